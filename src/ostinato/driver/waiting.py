"""Waits for the device in asyncio: a thread waits while the event loop goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress


async def wait_in_thread(wait: Callable[[], None]) -> None:
    """Calls `wait`, which blocks, in a thread of its own; raises its exceptions.

    Not in the loop's pool of threads: a few of these waits would fill it.  If the task is
    cancelled, or the loop is closed, the thread ends when `wait` returns, and its result is
    dropped.  The thread does not keep the process from ending.
    """
    import asyncio  # here, since it takes tens of milliseconds to import

    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def tell(error: Exception | None) -> None:
        if done.done():  # cancelled
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def work() -> None:
        failed: Exception | None = None
        try:
            wait()
        except Exception as error:
            failed = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, failed)

    threading.Thread(target=work, name="ostinato wait_async", daemon=True).start()
    await done
