"""Host functions: Python code that a driver calls and that must not call the driver.

CUDA does not define the effect of a driver call inside a host function; usually the call hangs.  So
both drivers run host functions through `run_host_function`, and code that would call the driver on
its own (`Context.collect`) checks `in_host_function` first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from ostinato.driver.api import HostFailureListener
from ostinato.logs import logger


class _Thread(threading.local):
    inside = False


_thread = _Thread()


def in_host_function() -> bool:
    """True while this thread runs a host function for a driver."""
    return _thread.inside


def mark_thread() -> None:
    """Marks this thread as one that a driver owns: all that it runs is called by a driver."""
    _thread.inside = True


def run_host_function(
    function: Callable[[], object], listeners: Iterable[HostFailureListener]
) -> None:
    """Calls a host function.  Logs its exception and passes it to the listeners: the thread is a
    driver's, so nothing could catch it, and CUDA has no status for it."""
    before, _thread.inside = _thread.inside, True
    try:
        function()
    except BaseException as error:
        logger("ostinato").exception(
            "a host function of a stream or graph raised; the work after it goes on"
        )
        for listener in tuple(listeners):
            listener(function, error)
    finally:
        _thread.inside = before
