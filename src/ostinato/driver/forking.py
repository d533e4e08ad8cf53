"""Forked children cannot use devices that their parent opened.

A CUDA context does not survive a fork, and neither do the threads of the host driver; a lock that
another thread held would stay locked for ever in the child.  So, before any of the child's code
runs, its copies of contexts and drivers are switched off and its locks are released: every later
call raises ClosedError instead of hanging, and nothing is destroyed twice.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Protocol

FORKED = (
    "this process was forked from the one that opened the device, and no device survives a fork; "
    'open it after the fork, or start processes with the "spawn" method'
)
"""The text of the error that calls in a forked child raise."""


class Forkable(Protocol):
    """An object whose copy in a forked child must be switched off."""

    def after_fork(self) -> None:
        """Switches the copy off.  Called in the child, on its only thread.  Must call no driver."""


_open: weakref.WeakSet[Forkable] = weakref.WeakSet()
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_hooked = threading.Event()


def new_lock() -> Any:
    """Returns a threading.RLock that is free in a forked child, whichever thread held it before.

    For objects of a device: a call in the child then raises ClosedError instead of hanging.
    Data that the lock guards may be half-written in the child.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def switch_off_in_children(thing: Forkable) -> None:
    """Makes a forked child call `thing.after_fork()` before any other code."""
    _open.add(thing)
    if not _hooked.is_set() and hasattr(os, "register_at_fork"):
        _hooked.set()
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # as the standard library does with its own
    for thing in list(_open):
        thing.after_fork()
    _open.clear()
