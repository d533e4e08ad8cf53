"""Host functions: Python code that a driver calls and that must not call the driver.

CUDA does not define the effect of a driver call inside a host function; usually the call hangs.  So
both drivers run host functions through `run_host_function`, and code that would call the driver on
its own (`Context.collect`) checks `in_host_function` first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class _Thread(threading.local):
    inside = False


_thread = _Thread()


def in_host_function() -> bool:
    """True while this thread runs a host function for a driver."""
    return _thread.inside


def mark_thread() -> None:
    """Marks this thread as one that a driver owns: all that it runs is called by a driver."""
    _thread.inside = True


def run_host_function(function: Callable[[], object]) -> None:
    """Calls a host function.  Raises its exceptions."""
    before, _thread.inside = _thread.inside, True
    try:
        function()
    finally:
        _thread.inside = before
