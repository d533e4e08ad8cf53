"""Waits for the device in asyncio, where a thread waits, and waits up to a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ostinato.errors import InputError, NotReadyError, Status, unfinished_work


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


def wait_until(done: Callable[[], bool], deadline: float, call: str) -> None:
    """Waits until `done()`, and for `deadline` seconds at most; then raises NotReadyError with the
    nodes that have not finished, as far as a black box knows.  Raises InputError for a deadline
    that is no number of seconds, or below 0."""
    if not (isinstance(deadline, int | float) and deadline >= 0):
        raise InputError(f"deadline={deadline!r}: seconds are needed, 0 or more")
    end, pause = time.monotonic() + deadline, 20e-6
    while not done():
        left = end - time.monotonic()
        if left <= 0:
            error = NotReadyError(Status.NOT_READY, call, f"{deadline:g} s are over")
            error.unfinished = unfinished_work()
            raise error
        time.sleep(min(pause, left))
        pause = min(2 * pause, 1e-3)
