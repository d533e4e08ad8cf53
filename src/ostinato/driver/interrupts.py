"""Ctrl-C waits until a change of state is whole.

KeyboardInterrupt may come between any two lines of the main thread.  Inside `uninterrupted` it does
not: SIGINT is noted, and its handler is called when the outermost block ends.  The handler is the
program's own; it is put back then, and nothing is installed at import.  Other threads never run
handlers, so a block does nothing there.

For changes of state that are short.  Code that waits, or calls functions of the user that may take
long, must not lie in a block: Ctrl-C would not end it.
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


class _Uninterrupted(ContextDecorator):
    """See `uninterrupted`.  One for the process: the main thread's blocks are nested in it."""

    def __init__(self) -> None:
        self._depth = 0
        self._previous: Callable[[int, FrameType | None], object] | None = None
        """The handler that the block took the place of."""
        self._came = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._depth += 1
        # A finaliser may begin and end a block of its own between any two of these lines: it is an
        # inner one.
        if self._depth > 1:
            return
        try:
            handler = getsignal(_NUMBER)
            if callable(handler):  # not SIG_IGN, SIG_DFL, or the handler of a program around Python
                self._came = False
                self._previous = handler
                signal(_NUMBER, self._note)
        except ValueError:  # Python is not the main thread of the process
            self._previous = None
        except BaseException:
            self._depth -= 1
            raise

    def __exit__(self, *error: object) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if self._depth > 1:
            self._depth -= 1
            return
        handler, self._previous = self._previous, None
        try:
            # Another one was set in the block: that one stays.
            if handler is not None and getsignal(_NUMBER) == self._note:
                signal(_NUMBER, handler)
        finally:
            self._depth -= 1
        if handler is not None and self._came:
            self._came = False
            handler(_NUMBER, sys._getframe(1))


uninterrupted = _Uninterrupted()
"""`with uninterrupted:` or `@uninterrupted`: SIGINT of the main thread waits for the end of the
outermost block.

The end raises what the handler of SIGINT raises, KeyboardInterrupt by default, after the block's
work is done.  Blocks may be nested.  An exception of the block is the context of the one that the
handler raises.
"""
