"""Single flight: of all who ask for one key, one makes it and the others wait.

A flight begins when a thread boards a key that nobody makes, and lands once, well or with an error.
Threads that wait for each other's flights in a ring would wait for ever: the one who would close
the ring is refused instead.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field

from ostinato.errors import CaptureError

__all__ = ["Flight", "Flights"]


@dataclass(slots=True, eq=False)
class Flight:
    """One making under way.  Once `landed`: made, or failed with `error`, or given up."""

    key: Hashable
    owner: int
    """The thread that makes it."""
    alone: bool = True
    """Whether no other flight was under way at any time of this one."""
    landed: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class Flights:
    """The flights of one cache.  `lock` is the cache's, and guards both."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._flights: dict[Hashable, Flight] = {}
        self._waiting: dict[int, Flight] = {}  # which flight a thread waits for

    def board(self, key: Hashable) -> Flight:
        """The flight of a key; a new one, owned by this thread, if there is none.

        If it is another thread's, `wait` for it.  Call under the lock.  Raises CaptureError if
        that would be for ever.
        """
        me = threading.get_ident()
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = Flight(key, me)
            if len(self._flights) > 1:
                for each in self._flights.values():
                    each.alone = False
        else:
            self._refuse_ring(flight, me)
            self._waiting[me] = flight
        return flight

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

        Returns also if the owner gave up (Ctrl-C in it, say): board again.
        """
        try:
            flight.landed.wait()
        finally:
            with self._lock:
                del self._waiting[threading.get_ident()]
        if flight.error is not None:
            try:
                raise flight.error
            finally:
                del flight  # its error's traceback holds this frame

    def land(self, flight: Flight, error: Exception | None = None) -> None:
        """Ends a flight of this thread; those who wait go on."""
        with self._lock:
            del self._flights[flight.key]
        flight.error = error
        flight.landed.set()
