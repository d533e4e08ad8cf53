"""Ctrl-C (SIGINT) before any line of this package, one after the other.

Python's own handler of SIGINT raises KeyboardInterrupt there, unless the line lies in a block of
`driver.interrupts.uninterrupted`: then the end of the block raises it.

The interpreter looks for a Ctrl-C only after calls, at the start of functions and at the end of
loops' rounds.  So two kinds of lines are left out, where a trace function can raise and Ctrl-C
never comes: the `try:` itself, and the end of a `with` block before its `__exit__` is called.  (An
exception there would slip past the handlers around it.)

Left out, too, is where Python loses the handlers of a function; what has been done is there as at
the lines around.  From 3.12 on that is where a round ends and the next one begins on the same line,
as in most comprehensions, which are no functions any more: the interpreter forgets where the trace
function raised.  In 3.13 it is a line that begins with a jump, as some ends of rounds do: the
compiler guards not all of those (python/cpython#130279; there a real Ctrl-C is not caught either).
"""

from __future__ import annotations

import dis
import functools
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ostinato

LOST = "in a finaliser"
PACKAGE = str(Path(ostinato.__file__).parent) + os.sep


@functools.cache
def left_out(code: CodeType) -> frozenset[int]:
    """Offsets of instructions before which nothing is raised."""
    instructions = list(dis.get_instructions(code))
    found = set()
    for index, one in enumerate(instructions):
        next_ones = instructions[index : index + 4]
        leaves = [i.argval if i.opname == "LOAD_CONST" else i.opname for i in next_ones]
        # A `return` inside the block first puts its value out of the way.
        ends_with = [None] * 3 in (leaves[:3], leaves[1:])
        jumps = "JUMP" in one.opname and sys.version_info >= (3, 13)
        if one.opname == "NOP" or jumps or ends_with:
            found.add(one.offset)
        if one.opname == "JUMP_BACKWARD" and sys.version_info >= (3, 12):
            target = next(i for i in instructions if i.offset == one.argval)
            if _line(target) == _line(one):
                found.add(target.offset)  # where 3.12 says that it is; later ones name the jump
    return frozenset(found)


def _line(instruction: dis.Instruction) -> int | None:
    return instruction.positions and instruction.positions.lineno


class _Interrupt:
    """Sends SIGINT at the `at`-th line of the package that this thread begins; counts them all."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0
        self.where = ""

    def frame(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        # What only looks up the caller's line changes nothing.
        return self.line if name.startswith(PACKAGE) and not name.endswith("location.py") else None

    def line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and frame.f_lasti not in left_out(frame.f_code):
            self.seen += 1
            if self.seen == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self.line


def interrupt(work: Callable[[], object], at: int = 0) -> str | None:
    """Runs `work` with an interruption before its `at`-th line; where it came, None if it did not.

    An interruption that hits a finaliser is lost: Python prints it and goes on, and what the
    finaliser was to do is not done.  That counts as none, and shows as `LOST`.  Nothing else may
    swallow one, and the handler of SIGINT must be there again at the end.
    """
    interruption = _Interrupt(at)
    lost: list[object] = []
    raised = False
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    trace, hook = sys.gettrace(), sys.unraisablehook
    sys.unraisablehook = lost.append
    sys.settrace(interruption.frame)
    try:
        work()
    except KeyboardInterrupt as error:
        error.__traceback__ = None
        raised = True
    finally:
        sys.settrace(trace)
        gc.collect()
        sys.unraisablehook = hook
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, interruption.where
    assert raised or lost or not interruption.where, f"{interruption.where}: SIGINT got lost"
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
