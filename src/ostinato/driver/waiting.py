"""Waits for the device in asyncio: a thread waits while the event loop goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable


async def wait_in_thread(wait: Callable[[], None]) -> None:
    """Calls `wait`, which blocks, in a thread of its own; raises its exceptions.

    Not in the loop's pool of threads: a few of these waits would fill it.  If the task is
    cancelled, or the loop is closed, the thread ends when `wait` returns, and its result is
    dropped.  The thread does not keep the process from ending.
    """
    import asyncio  # here, since it takes tens of milliseconds to import
    from concurrent.futures import Future

    done = Future[None]()
    done.set_running_or_notify_cancel()  # cancelling the task does not cancel this

    def work() -> None:
        try:
            wait()
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=work, name="ostinato wait_async", daemon=True).start()
    await asyncio.wrap_future(done)
