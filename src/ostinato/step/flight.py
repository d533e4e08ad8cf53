"""Single flight: of all threads that need one key, one makes it and the others wait.

A flight begins when a thread boards a key that no other thread makes, and lands once, with or
without an error.  Threads that wait for each other's flights in a ring would wait for ever: the
call that would close the ring raises an error instead.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field

from ostinato.errors import CaptureError


@dataclass(slots=True, eq=False)
class Flight:
    """The making of one key.  Once `landed`: successful, failed with `error`, or given up."""

    key: Hashable
    owner: int
    """The identifier of the thread that makes the key."""
    alone: bool = True
    """False once another flight was under way at the same time."""
    landed: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class Flights:
    """The flights of one cache.  `lock` is the cache's lock, and guards this object too."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._flights: dict[Hashable, Flight] = {}
        self._waiting: dict[int, Flight] = {}  # which flight a thread waits for

    def board(self, flight: Flight) -> Flight | None:
        """Begins a flight of this thread and returns None; or returns another thread's flight for
        the same key, for which the caller must `wait`.

        The caller must hold the lock.  Raises CaptureError if the wait would never end.
        """
        other = self._flights.get(flight.key)
        if other is not None:
            self._refuse_ring(other, flight.owner)
            self._waiting[flight.owner] = other
            return other
        self._flights[flight.key] = flight
        if len(self._flights) > 1:
            for each in self._flights.values():
                each.alone = False
        return None

    def _refuse_ring(self, flight: Flight, me: int) -> None:
        link: Flight | None = flight
        while link is not None and not link.landed.is_set():
            if link.owner == me:
                raise CaptureError(
                    f"the capture for key {flight.key!r} waits for itself: what makes key "
                    f"{link.key!r} led back to a key whose capture is under way. Capture the inner "
                    "graph first, or under a key of its own."
                )
            link = self._waiting.get(link.owner)

    def wait(self, flight: Flight) -> None:
        """Waits for another thread's flight.  Raises its error, the same object in all threads.

        Also returns if the owner gave up (after Ctrl-C, say); the caller must then board again.
        """
        try:
            flight.landed.wait()
        finally:
            with self._lock:
                self._waiting.pop(threading.get_ident(), None)
        if flight.error is not None:
            try:
                raise flight.error
            finally:
                del flight  # its error's traceback holds this frame

    def land(self, flight: Flight) -> None:
        """Ends a flight of this thread, if it began, and wakes the waiting threads.  Idempotent."""
        with self._lock:
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]
            self._waiting.pop(flight.owner, None)
        flight.landed.set()
