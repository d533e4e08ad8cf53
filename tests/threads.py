"""Work on threads of its own, to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def in_thread(work: Callable[[], object]) -> BaseException | None:
    """Runs `work` on a thread to its end, and returns what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(300)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


def in_threads(*calls: Callable[[], object]) -> list[object]:
    """What the calls return, side by side.  Raises what one of them raised, once all are over."""
    with ThreadPoolExecutor(len(calls)) as pool:
        under_way = [pool.submit(call) for call in calls]
    return [one.result() for one in under_way]
