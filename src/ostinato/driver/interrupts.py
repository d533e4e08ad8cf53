"""Delays Ctrl-C until a change of state is complete.

KeyboardInterrupt may come between any two lines of the main thread.  Inside `uninterrupted` it does
not: SIGINT is noted, and its handler is called when the outermost block ends.  The handler is the
program's own; the block's end restores it, and nothing is installed at import.  Other threads never
run handlers, so a block does nothing there.

A block must be short.  Code that waits, or that calls functions of the user that may take long,
must not be in a block: Ctrl-C would not end it.

A block begins with a call, and Ctrl-C may come in at the start of that call.  So a `finally` that
contains a block may be skipped: undo by a call inside `try`, and once more if that raised.
"""

from __future__ import annotations

import sys
import threading
from _signal import getsignal, signal  # type: ignore[import-not-found]  # `signal` is 25 times slower
from collections.abc import Callable
from contextlib import ContextDecorator
from signal import SIGINT
from types import FrameType

_NUMBER = int(SIGINT)


class _Note:
    """The handler of SIGINT in an outermost block, in the place of `handler`."""

    __slots__ = ("came", "handler")

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self.handler = handler
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True


class _Uninterrupted(ContextDecorator):
    """The class of `uninterrupted`: one object per process, in which the main thread's blocks nest.

    Finalisers run between any two lines of these methods too, and may have blocks of their own.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._note: _Note | None = None

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        depth = self._depth
        try:
            self._depth = depth + 1
            if depth == 0:
                handler = getsignal(_NUMBER)
                # Not SIG_IGN, SIG_DFL, or the handler of a program that embeds Python; and not the
                # note of an ending block in which a finaliser has begun this block.
                if callable(handler) and not isinstance(handler, _Note):
                    self._note = _Note(handler)
                    signal(_NUMBER, self._note)
        except ValueError:  # a subinterpreter, which cannot have handlers
            self._note = None
        except BaseException:
            self._depth = depth
            raise

    def __exit__(self, *error: object) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if self._depth > 1:
            self._depth -= 1
            return
        note, self._note = self._note, None
        self._depth = 0
        if note is None:
            return
        if getsignal(_NUMBER) is note:  # else the block has set another one, which stays
            signal(_NUMBER, note.handler)
        if note.came:
            note.handler(_NUMBER, sys._getframe(1))


uninterrupted = _Uninterrupted()
"""`with uninterrupted:` or `@uninterrupted`: SIGINT of the main thread waits for the end of the
outermost block.

The end raises the exception of SIGINT's handler, KeyboardInterrupt by default, after the block's
work is done.  Blocks may be nested.  An exception of the block is the context of the handler's
exception.
"""
