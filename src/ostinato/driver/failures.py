"""Failures of work that no call has waited for: raised by the next call, or printed at exit.

A host function that raises has no caller that could catch it, and a failed kernel is found by a
later call.  Without a later call the process would end with status 0 and no message.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from ostinato.errors import HostFunctionError, OstinatoError

_PATIENCE = 2.0
"""Seconds that the process waits at its end for work of the host driver."""


class HostFailures:
    """Host functions that raised and that no call has reported yet: the first, and the number."""

    def __init__(self) -> None:
        self._first: tuple[Callable[[], object], BaseException] | None = None
        self._count = 0

    def __bool__(self) -> bool:
        return self._first is not None

    def note(self, function: Callable[[], object], error: BaseException) -> None:
        """Notes a failure.  Called on a driver's thread."""
        self._count += 1
        if self._first is None:
            self._first = function, error

    def take(self) -> HostFunctionError | None:
        """Returns the error to raise, once; its cause is the first function's exception."""
        first, self._first = self._first, None
        count, self._count = self._count, 0
        if first is None:
            return None
        function, cause = first
        name = getattr(function, "__qualname__", type(function).__name__)
        more = f", and so did {count - 1} calls after it" if count > 1 else ""
        error = HostFunctionError(
            f"the host function {name} of a stream or graph raised {type(cause).__name__}: {cause}"
            f"{more}. The work after it ran all the same; catch in the function what can be raised "
            "there"
        )
        error.__cause__ = cause
        return error


class Unsaid(Protocol):
    """An object that may hold a failure that no call has reported."""

    def unsaid(self, patience: float) -> OstinatoError | None:
        """Returns that failure; waits up to `patience` seconds for work under way."""


_watched: weakref.WeakSet[Unsaid] = weakref.WeakSet()
_hooked = False


def said_at_exit(thing: Unsaid) -> None:
    """Makes the end of the process report a failure that `thing` still holds: on standard error,
    and with the status 1 where the C library allows that."""
    global _hooked
    _watched.add(thing)
    if not _hooked:
        _hooked = True
        atexit.register(_at_exit)


def _at_exit() -> None:
    end = time.monotonic() + _PATIENCE
    failed = False
    for thing in tuple(_watched):
        try:
            error = thing.unsaid(max(0.001, end - time.monotonic()))
        except OstinatoError:  # closed, or in a forked child
            continue
        if error is not None:
            import traceback  # here, since most processes end without

            failed = True
            print("ostinato: work failed, and no call after it could say so:", file=sys.stderr)
            traceback.print_exception(error, file=sys.stderr)
    if failed:
        _end_with_failure()


def _end_with_failure() -> None:
    """Makes the status of this process 1.  A Python exit handler cannot set it: a handler of the C
    library, which runs after the interpreter's end, calls _exit(1) in place of earlier handlers."""
    try:
        libc = ctypes.CDLL(None)
        register, leave, flush = libc.__cxa_atexit, libc._exit, libc.fflush
    except (AttributeError, OSError, TypeError):  # no such C library: the text must suffice
        return
    flush(None)
    register.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    register(ctypes.cast(leave, ctypes.c_void_p), ctypes.c_void_p(1), None)
