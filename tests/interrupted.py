"""KeyboardInterrupt before any line of this package, one after the other.

The interpreter looks for a Ctrl-C only after calls, at the start of functions and at the end of
loops' rounds.  So two kinds of lines are left out, where a trace function can raise and Ctrl-C
never comes: the `try:` itself, and the end of a `with` block before its `__exit__` is called.  (An
exception there would slip past the handlers around it.)
"""

from __future__ import annotations

import dis
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ostinato

LOST = "in a finaliser"
PACKAGE = str(Path(ostinato.__file__).parent) + os.sep


@functools.cache
def _unreachable(code: CodeType) -> frozenset[int]:
    """Offsets of instructions that begin a line and before which no Ctrl-C can come."""
    instructions = list(dis.get_instructions(code))
    found = set()
    for index, one in enumerate(instructions):
        next_ones = instructions[index : index + 4]
        leaves = [i.argval if i.opname == "LOAD_CONST" else i.opname for i in next_ones]
        # A `return` inside the block first puts its value out of the way.
        if one.opname == "NOP" or [None] * 3 in (leaves[:3], leaves[1:]):
            found.add(one.offset)
    return frozenset(found)


class _Interrupt:
    """Raises at the `at`-th line of the package that this thread begins; counts them all."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0
        self.where = ""

    def frame(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        # What only looks up the caller's line changes nothing.
        return self.line if name.startswith(PACKAGE) and not name.endswith("location.py") else None

    def line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and frame.f_lasti not in _unreachable(frame.f_code):
            self.seen += 1
            if self.seen == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt(self.where)
        return self.line


def interrupt(work: Callable[[], object], at: int = 0) -> str | None:
    """Runs `work` with an interruption before its `at`-th line; where it came, None if it did not.

    An interruption that hits a finaliser is lost: Python prints it and goes on, and what the
    finaliser was to do is not done.  That counts as none, and shows as `LOST`.
    """
    interruption = _Interrupt(at)
    lost: list[object] = []
    trace, hook = sys.gettrace(), sys.unraisablehook
    sys.unraisablehook = lost.append
    sys.settrace(interruption.frame)
    try:
        work()
    except KeyboardInterrupt as error:
        error.__traceback__ = None
    finally:
        sys.settrace(trace)
        gc.collect()
        sys.unraisablehook = hook
    return LOST if lost else interruption.where or None


def lines(work: Callable[[], object]) -> int:
    """How many lines of the package `work` begins."""
    counting = _Interrupt(0)
    before = sys.gettrace()
    sys.settrace(counting.frame)
    try:
        work()
    finally:
        sys.settrace(before)
    return counting.seen


def every(count: int, step: int) -> Iterator[int]:
    """Lines to interrupt at: all of them with a step of 1, else every so many, the last too."""
    yield from range(1, count + 1, step)
    yield count
