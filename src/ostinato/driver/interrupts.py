"""Ctrl-C waits until a change of state is whole.

KeyboardInterrupt may come between any two lines of the main thread.  Inside `uninterrupted` it does
not: SIGINT is noted, and its handler is called when the outermost block ends.  The handler is the
program's own; it is put back then, and nothing is installed at import.  Other threads never run
handlers, so a block does nothing there.

For changes of state that are short.  Code that waits, or calls functions of the user that may take
long, must not lie in a block: Ctrl-C would not end it.

A block begins with a call, at whose start Ctrl-C may still come in.  So a `finally` with a block
may do nothing of it: what must be undone is undone by a call inside `try`, and once more if that
raised.
"""

from __future__ import annotations

import sys
import threading
from _signal import getsignal, signal  # type: ignore[import-not-found]  # `signal` is 25 times slower
from collections.abc import Callable
from contextlib import ContextDecorator
from signal import SIGINT
from types import FrameType

__all__ = ["uninterrupted"]

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
    """See `uninterrupted`.  One for the process: the main thread's blocks are nested in it.

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
                # Not SIG_IGN, SIG_DFL, or the handler of a program around Python; and not the note
                # of a block in whose end this one, of a finaliser, lies.
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
        if getsignal(_NUMBER) is note:  # else one was set in the block, and stays
            signal(_NUMBER, note.handler)
        if note.came:
            note.handler(_NUMBER, sys._getframe(1))


uninterrupted = _Uninterrupted()
"""`with uninterrupted:` or `@uninterrupted`: SIGINT of the main thread waits for the end of the
outermost block.

The end raises what the handler of SIGINT raises, KeyboardInterrupt by default, after the block's
work is done.  Blocks may be nested.  An exception of the block is the context of the one that the
handler raises.
"""
