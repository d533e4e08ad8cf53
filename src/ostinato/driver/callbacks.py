"""Host functions: Python code that a driver calls, and that must not call the driver back.

CUDA leaves it undefined what a driver call inside a host function does, and as a rule it hangs.  So
both drivers run host functions through `run_host_function`, and whatever would call the driver by
itself (`Context.collect`) asks `in_host_function` first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class _Thread(threading.local):
    inside = False


_thread = _Thread()


def in_host_function() -> bool:
    """Whether this thread runs a host function, which a driver called."""
    return _thread.inside


def mark_thread() -> None:
    """Notes that a driver calls everything that this thread runs from now on."""
    _thread.inside = True


def run_host_function(function: Callable[[], object]) -> None:
    """Calls a host function.  Raises what it raises."""
    before, _thread.inside = _thread.inside, True
    try:
        function()
    finally:
        _thread.inside = before
