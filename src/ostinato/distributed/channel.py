"""Messages between the ranks of a group, beside the device: one primitive, and one failure.

`exchange` gives every rank all ranks' payloads, in the order of ranks.  Barriers, broadcasts,
comparisons and, on the host device, the collectives are built on it.  Exchanges are numbered within
a *lane*: the n-th exchange of a lane on one rank belongs to the n-th of that lane on all others.
The work of a device's stream has lanes of its own, because it runs beside the caller's thread.

A group fails once and for good.  The rank that finds a failure reports it to the channel, which
reports it to every rank; every exchange that waits, or begins later, raises the same error on all
ranks.

    LocalChannel      ranks are threads of one process
    SocketChannel     ranks are processes (`sockets`)
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ostinato.errors import DeadlineError, DisagreementError, GroupError, RankLostError
from ostinato.lowlevel import Closeable, new_lock

_ERRORS: Mapping[str, type[GroupError]] = {
    "lost": RankLostError,
    "deadline": DeadlineError,
    "disagreement": DisagreementError,
    "failed": GroupError,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a group failed.  `kind`: "lost", "deadline", "disagreement" or "failed".
    `rank`: the rank that found the failure, or in which it happened."""

    kind: str
    rank: int
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Returns the failure that an exception of one rank means for the others."""
        if isinstance(error, GroupError):
            kinds = {error_type: kind for kind, error_type in _ERRORS.items()}
            return cls(kinds.get(type(error), "failed"), error.rank, str(error))
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return cls("lost", rank, f"rank {rank} raised {text[:2000]}")

    def error(self) -> GroupError:
        """Returns a new exception for this failure."""
        return _ERRORS.get(self.kind, GroupError)(self.text, rank=self.rank)


class Channel(Closeable, ABC):
    """The connection of one rank with the others.  Any thread may call its methods."""

    rank: int
    size: int

    @property
    @abstractmethod
    def failure(self) -> Failure | None:
        """The reason why the group failed; None while it works."""

    def exchange(self, lane: str, label: str, payload: bytes, seconds: float) -> list[bytes]:
        """Returns every rank's payload, once all ranks have sent theirs.

        `label`: describes the exchange; different labels in the same exchange are a disagreement.
        `seconds`: how long to wait for the others.  Raises GroupError; the group has then failed.
        """
        return self.finish(lane, self.begin(lane, label, payload), label, seconds)

    @abstractmethod
    def begin(self, lane: str, label: str, payload: bytes) -> int:
        """Sends this rank's part of an exchange, and returns its number; does not wait."""

    @abstractmethod
    def finish(self, lane: str, number: int, label: str, seconds: float) -> list[bytes]:
        """Waits for the end of an exchange that was begun, see `exchange`; to be called once."""

    @abstractmethod
    def fail(self, failure: Failure) -> None:
        """Ends the group on all ranks with this failure; the first one is kept."""

    @abstractmethod
    def on_failure(self, call: Callable[[Failure], None]) -> None:
        """Calls `call` once, on any thread, when the group fails; at once if it has failed."""

    def say(self, where: str) -> None:
        """Sets what this rank waits for; others receive it now and then, for error messages."""


# ---------------------------------------------------------------------------- exchanges under way


@dataclass(slots=True)
class _Exchange:
    label: str
    first: int
    parts: dict[int, bytes] = field(default_factory=dict)


class Exchanges:
    """The exchanges to which some ranks have sent their part and others have not.  Pure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._open: dict[tuple[str, int], _Exchange] = {}

    def add(
        self, rank: int, lane: str, number: int, label: str, payload: bytes
    ) -> list[bytes] | Failure | None:
        """Adds a rank's part.  Returns all parts once complete, a Failure if labels differ."""
        key = lane, number
        exchange = self._open.setdefault(key, _Exchange(label, rank))
        if label != exchange.label:
            return Failure(
                "disagreement",
                rank,
                f"rank {rank} is at {label[:400]!r} where rank {exchange.first} is at "
                f"{exchange.label[:400]!r}: all ranks must make the same calls in the same order",
            )
        exchange.parts[rank] = payload
        if len(exchange.parts) < self.size:
            return None
        del self._open[key]
        return [exchange.parts[one] for one in range(self.size)]

    def waited_for(self) -> list[int]:
        """Returns the ranks that have not sent their part to some open exchange."""
        return sorted({rank for key in self._open for rank in self.missing(*key)})

    def missing(self, lane: str, number: int) -> list[int]:
        """Returns the ranks that have not sent their part."""
        exchange = self._open.get((lane, number))
        parts = () if exchange is None else exchange.parts
        return [rank for rank in range(self.size) if rank not in parts]


def waited_text(rank: int, label: str, seconds: float, missing: list[int]) -> str:
    """Returns the error text of a rank that waited too long."""
    others = ", ".join(str(one) for one in missing) or "none"
    return (
        f"rank {rank} waited {seconds:g} s for {label!r}, and these ranks did not come: {others}. "
        "They are busy with something else or hang; a longer deadline is a setting of the group"
    )


class FirstFailure:
    """The first failure of a group, None before; later failures are dropped.

    `changed` is notified when it is set; the owner's waits also use it for other changes.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(new_lock())
        self.failure: Failure | None = None
        self._calls: list[Callable[[Failure], None]] = []

    def fail(self, failure: Failure) -> None:
        """Sets the failure unless there is one, and calls the functions given to `on_failure`."""
        with self.changed:
            if self.failure is not None:
                return
            self.failure = failure
            calls, self._calls = self._calls, []
            self.changed.notify_all()
        for call in calls:
            call(failure)

    def on_failure(self, call: Callable[[Failure], None]) -> None:
        with self.changed:
            if self.failure is None:
                self._calls.append(call)
                return
        call(self.failure)


# -------------------------------------------------------------------------- ranks as threads


class _Room(FirstFailure):
    """The state that the ranks of one process share."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.exchanges = Exchanges(size)
        self.size = size
        self.results: dict[tuple[str, int], tuple[list[bytes], set[int]]] = {}
        self.left: set[int] = set()


class LocalChannel(Channel):
    """The channel of a rank that is a thread of this process.  Made by `local_channels`."""

    def __init__(self, room: _Room, rank: int) -> None:
        self._room = room
        self.rank, self.size = rank, room.size
        self._counts: Counter[str] = Counter()

    @property
    def failure(self) -> Failure | None:
        return self._room.failure

    def begin(self, lane: str, label: str, payload: bytes) -> int:
        room = self._room
        with room.changed:
            number = self._counts[lane]
            self._counts[lane] += 1
            found = room.exchanges.add(self.rank, lane, number, label, payload)
            if isinstance(found, list):
                room.results[lane, number] = found, set(range(self.size))
                room.changed.notify_all()
        if isinstance(found, Failure):
            room.fail(found)
        return number

    def finish(self, lane: str, number: int, label: str, seconds: float) -> list[bytes]:
        room, rank, key = self._room, self.rank, (lane, number)
        failure: Failure | None = None
        with room.changed:
            end = time.monotonic() + seconds
            while failure is None and key not in room.results:
                failure = room.failure
                missing = room.exchanges.missing(lane, number)
                gone = [one for one in missing if one in room.left]
                left = end - time.monotonic()
                if failure is None and gone:
                    failure = Failure("lost", gone[0], f"rank {gone[0]} has left the group")
                elif failure is None and left <= 0:
                    text = waited_text(rank, label, seconds, missing)
                    failure = Failure("deadline", rank, text)
                elif failure is None:
                    room.changed.wait(left)
            if failure is None:
                parts, takers = room.results[key]
                takers.discard(rank)
                if not takers:
                    del room.results[key]
                return parts
        room.fail(failure)
        raise (room.failure or failure).error()

    def fail(self, failure: Failure) -> None:
        self._room.fail(failure)

    def on_failure(self, call: Callable[[Failure], None]) -> None:
        self._room.on_failure(call)

    def close(self) -> None:
        """Leaves the group: ranks that need this one now or later find it lost.  Idempotent."""
        with self._room.changed:
            self._room.left.add(self.rank)
            self._room.changed.notify_all()


def local_channels(size: int) -> list[LocalChannel]:
    """Returns the channels of ranks that are threads of this process."""
    room = _Room(size)
    return [LocalChannel(room, rank) for rank in range(size)]
