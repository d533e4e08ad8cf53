"""How the ranks of a group talk to each other beside the device: one primitive, and one failure.

`exchange` gives every rank what every rank brought, in the order of ranks.  Barriers, broadcasts,
comparisons and, on the host device, the collectives themselves are made of it.  Exchanges are
counted by *lane*: the n-th one of a lane on one rank belongs to the n-th one of that lane on all
others.  Work of a device's stream has lanes of its own, because it runs beside the caller's thread.

A group fails once and for good.  The rank that finds a failure tells the channel, and the channel
tells every rank; every exchange that waits, or begins later, raises the same error on all of them.

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
    """Why a group cannot go on.  `kind`: "lost", "deadline", "disagreement" or "failed".  `rank`:
    the rank that found it, or that it happened to."""

    kind: str
    rank: int
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """The failure that an exception of a rank is to the others."""
        if isinstance(error, GroupError):
            kinds = {error_type: kind for kind, error_type in _ERRORS.items()}
            return cls(kinds.get(type(error), "failed"), error.rank, str(error))
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return cls("lost", rank, f"rank {rank} raised {text[:2000]}")

    def error(self) -> GroupError:
        """A new exception that says so."""
        return _ERRORS.get(self.kind, GroupError)(self.text, rank=self.rank)


class Channel(Closeable, ABC):
    """The connection of one rank with the others.  Its methods may be called by any thread."""

    rank: int
    size: int

    @property
    @abstractmethod
    def failure(self) -> Failure | None:
        """Why the group cannot go on; None while it can."""

    @abstractmethod
    def exchange(self, lane: str, label: str, payload: bytes, seconds: float) -> list[bytes]:
        """Every rank's payload, once all have brought theirs.

        `label` says what for; ranks that bring different ones to the same exchange disagree.
        `seconds`: how long to wait for the others.  Raises GroupError; the group has failed then.
        """

    @abstractmethod
    def fail(self, failure: Failure) -> None:
        """Ends the group on all ranks, for this reason; the first reason is kept."""

    @abstractmethod
    def on_failure(self, call: Callable[[Failure], None]) -> None:
        """`call` is called once, on any thread, when the group fails; at once if it has."""

    def say(self, where: str) -> None:
        """What this rank waits for now, for the messages of others, which get it now and then."""


# ---------------------------------------------------------------------------- exchanges under way


@dataclass(slots=True)
class _Exchange:
    label: str
    first: int
    parts: dict[int, bytes] = field(default_factory=dict)


class Exchanges:
    """The exchanges that some ranks have brought their part to and others have not.  Pure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._open: dict[tuple[str, int], _Exchange] = {}

    def add(
        self, rank: int, lane: str, number: int, label: str, payload: bytes
    ) -> list[bytes] | Failure | None:
        """A rank's part; all parts once they are there, or why the ranks disagree."""
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

    def under_way(self) -> list[tuple[str, int]]:
        """Lane and number of each."""
        return list(self._open)

    def missing(self, lane: str, number: int) -> list[int]:
        """The ranks that have not brought their part."""
        exchange = self._open.get((lane, number))
        parts = () if exchange is None else exchange.parts
        return [rank for rank in range(self.size) if rank not in parts]


def waited_text(rank: int, label: str, seconds: float, missing: list[int]) -> str:
    """What a rank says that has waited for too long."""
    others = ", ".join(str(one) for one in missing) or "none"
    return (
        f"rank {rank} waited {seconds:g} s for {label!r}, and these ranks did not come: {others}. "
        "They are busy with something else or hang; a longer deadline is a setting of the group"
    )


class FirstFailure:
    """Why a group cannot go on: the first failure that is set, None before; later ones are dropped.

    `changed` is notified when it is set.  The owner's waits use it for what else they wait for.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(new_lock())
        self.failure: Failure | None = None
        self._calls: list[Callable[[Failure], None]] = []

    def fail(self, failure: Failure) -> None:
        """Sets the failure unless there is one, and makes the calls that `on_failure` got."""
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
    """What the ranks of one process share."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.exchanges = Exchanges(size)
        self.size = size
        self.results: dict[tuple[str, int], tuple[list[bytes], set[int]]] = {}
        self.left: set[int] = set()


class LocalChannel(Channel):
    """A rank that is a thread of this process.  Made by `local_channels`."""

    def __init__(self, room: _Room, rank: int) -> None:
        self._room = room
        self.rank, self.size = rank, room.size
        self._counts: Counter[str] = Counter()

    @property
    def failure(self) -> Failure | None:
        return self._room.failure

    def exchange(self, lane: str, label: str, payload: bytes, seconds: float) -> list[bytes]:
        room, rank = self._room, self.rank
        failure: Failure | None
        with room.changed:
            number = self._counts[lane]
            self._counts[lane] += 1
            key = lane, number
            found = room.exchanges.add(rank, lane, number, label, payload)
            if isinstance(found, list):
                room.results[key] = found, set(range(self.size))
                room.changed.notify_all()
            failure = found if isinstance(found, Failure) else None
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
        """Leaves the group: ranks that wait for this one, or will, find it lost.  Idempotent."""
        with self._room.changed:
            self._room.left.add(self.rank)
            self._room.changed.notify_all()


def local_channels(size: int) -> list[LocalChannel]:
    """The channels of ranks that are threads of this process."""
    room = _Room(size)
    return [LocalChannel(room, rank) for rank in range(size)]
