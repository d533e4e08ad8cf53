"""`Group`: ranks that work together and detect each other's failures.

    with local_groups(4) as groups: …                   four threads of this process
    with open_group() as group: …                       this process, placed by its launcher
    with join_group(group_id, rank=1, size=2) as group: …     this process, placed by its caller

A group guarantees that no rank waits forever.  A rank that is killed, stopped, raises an exception
inside the `with` block, leaves, or waits longer than the deadline ends the group, and every other
rank raises a `GroupError` from the call that waits, or from its next call.  Waits on the device are
ended too (`Collectives.abort`).  Only a `endless` exchange waits without a deadline, for as long
as the other ranks live.

Not guaranteed: any result of work that was under way; after a failure its results must not be used,
and nothing here returns them.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from ostinato.distributed.channel import Channel, Failure, local_channels
from ostinato.errors import ClosedError, DisagreementError, GroupError, InputError
from ostinato.lowlevel import Closeable, new_lock, uninterrupted, whole_number
from ostinato.settings import group_deadline

_LOOKS = 10  # checks by the watchdog per deadline
_ENDLESS = 1e9  # seconds, more than any deadline: 31 years


def checked_deadline(deadline: float | None) -> float:
    """Returns the deadline in seconds; None gives the setting's.  Raises InputError."""
    if deadline is None:
        deadline = group_deadline()
    if not (isinstance(deadline, float | int) and 0 < deadline < 1e9):
        raise InputError(f"deadline is {deadline!r}, must be seconds, more than 0")
    return float(deadline)


def checked_root(root: object, size: int) -> int:
    """Returns `root` as a rank below `size`.  Raises InputError for any other value."""
    rank = whole_number(root)
    if rank is None or not 0 <= rank < size:
        raise InputError(f"root is {root!r}, must be a rank, 0 to {size - 1}")
    return rank


class Attached(Protocol):
    """A part of a group that works on a device."""

    def abort(self) -> None:
        """Ends waits for other ranks.  Callable from any thread."""

    def described(self) -> str:
        """Describes the backend and its use so far."""

    def close(self) -> None:
        """Frees what it owns.  Idempotent."""


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """One rank's numbers: the deadline in seconds, the failure's text ("" if none), its
    collectives."""

    rank: int
    size: int
    deadline: float
    failure: str
    collectives: tuple[str, ...]


class Group(Closeable):
    """One rank's part of a group.  All ranks must make the same calls in the same order.

    `channel`: the connection to the others.  `deadline`: seconds that this rank waits for another
    before it ends the group; None for OSTINATO_GROUP_DEADLINE, or 60.  A wait for the device counts
    from the last collective that finished.  One thread at a time may call its methods; `fail` and
    `check`, any.
    """

    def __init__(self, channel: Channel, *, deadline: float | None = None) -> None:
        self.channel = channel
        self.rank, self.size = channel.rank, channel.size
        self.deadline = checked_deadline(deadline)
        self._closed = False
        self._lanes = 0
        self._attached: list[Attached] = []
        self._lock = new_lock()
        self._watched: tuple[str, float] | None = None
        self._progress = 0.0
        self._stop = threading.Event()
        self._watchdog: threading.Thread | None = None
        channel.on_failure(lambda failure: self._abort())

    def __repr__(self) -> str:
        failure = self.channel.failure
        state = ", closed" if self._closed else ""
        state += f", failed: {failure.text}" if failure is not None else ""
        return f"<Group: rank {self.rank} of {self.size}{state}>"

    # --- failures
    @property
    def failure(self) -> Failure | None:
        """The reason why the group failed; None while it works."""
        return self.channel.failure

    def check(self) -> None:
        """Raises GroupError if the group has failed, ClosedError if it was closed."""
        failure = self.channel.failure
        if failure is not None:
            raise failure.error()
        if self._closed:
            raise ClosedError("the group is closed; form another")

    def fail(self, error: BaseException) -> None:
        """Ends the group on all ranks, because of an exception of this one."""
        self.channel.fail(Failure.of(error, self.rank))

    # --- exchanges
    def exchange(self, label: str, payload: bytes = b"") -> list[bytes]:
        """Returns every rank's payload, in the order of ranks.  Raises GroupError, InputError."""
        return self.begin_exchange(label, payload)()

    def begin_exchange(
        self, label: str, payload: bytes = b"", *, endless: bool = False
    ) -> Callable[[], list[bytes]]:
        """Sends this rank's payload of an `exchange`, and returns a function, to be called once,
        that waits for the others' and returns all.  Further exchanges may be made meanwhile.

        `endless`: the function waits without a deadline, as a rank does that has nothing to do
        until another calls; a rank that dies, is silent or leaves ends that wait too.
        """
        if not isinstance(payload, bytes):
            raise InputError(f"{label!r}: the payload is {type(payload).__name__}, must be bytes")
        self.check()
        self.channel.say(label)
        number = self.channel.begin("calls", label, payload)
        seconds = _ENDLESS if endless else self.deadline
        return lambda: self.channel.finish("calls", number, label, seconds)

    def barrier(self, label: str = "barrier") -> None:
        """Returns once all ranks are here.  Raises GroupError."""
        self.exchange(label)

    def broadcast(self, label: str, payload: bytes = b"", *, root: int = 0) -> bytes:
        """Returns the payload of rank `root` on all ranks; others' payloads are ignored.  Raises
        GroupError, also if roots differ, and InputError for an invalid root."""
        root = checked_root(root, self.size)
        mine = payload if self.rank == root else b""
        return self.exchange(f"{label} from rank {root}", mine)[root]

    def agree(self, label: str, lines: Sequence[str]) -> None:
        """Compares what ranks are about to do, described in lines.

        Raises DisagreementError on all ranks if lines differ anywhere, with the first difference.
        Ranks exchange digests, and the lines only if these differ.
        """
        text = "\n".join(lines).encode("utf-8", "surrogatepass")
        digests = self.exchange(label, hashlib.blake2b(text, digest_size=32).digest())
        if len(set(digests)) == 1:
            return
        self._compare(label, self.exchange(f"{label}: differences", text))

    def begin_agreement(self, label: str, lines: Sequence[str]) -> Callable[[], None]:
        """Sends the lines of an `agree`, and returns a function, to be called once, that waits for
        the others' and compares them; meant for few lines."""
        text = "\n".join(lines).encode("utf-8", "surrogatepass")
        wait = self.begin_exchange(label, text)
        return lambda: self._compare(label, wait())

    def _compare(self, label: str, told: Sequence[bytes]) -> None:
        if len(set(told)) > 1:
            error = DisagreementError(_difference(label, told), rank=self.rank)
            self.fail(error)
            raise error

    # --- waits on the device
    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Guards a block that waits for the device, whose work may wait for other ranks: if no
        collective finishes within the deadline, the group fails, which ends that work.

        Raises GroupError after the block, instead of the block's own exception, if the group
        failed.
        """
        self._begin_watching()
        self.channel.say(what)
        before, self._watched = self._watched, (what, time.monotonic())
        try:
            yield
        except Exception as error:
            failure = self.channel.failure
            if failure is None or isinstance(error, GroupError):
                raise
            raise failure.error() from error
        finally:
            self._watched = before
        failure = self.channel.failure
        if failure is not None:
            raise failure.error()

    def note_progress(self) -> None:
        """Records that a collective finished, so what is watched is not stuck."""
        self._progress = time.monotonic()

    def _begin_watching(self) -> None:
        if self._watchdog is None and self.size > 1:
            name = f"ostinato rank {self.rank} watch"
            with uninterrupted:
                self._watchdog = threading.Thread(
                    target=_watch, args=(self,), name=name, daemon=True
                )
                self._watchdog.start()

    def _look(self) -> None:
        """Fails the group if the watched wait is beyond the deadline; called by the watchdog."""
        watched = self._watched
        if watched is None or self.channel.failure is not None:
            return
        what, since = watched
        waited = time.monotonic() - max(since, self._progress)
        if waited > self.deadline:
            text = (
                f"rank {self.rank} waited {self.deadline:g} s for {what}, and no collective got on "
                "meanwhile; the group's deadline is a setting"
            )
            self.channel.fail(Failure("deadline", self.rank, text))

    # --- what belongs to the group
    def new_lane(self, what: str) -> str:
        """Returns a lane for exchanges of their own; all ranks request theirs in the same order."""
        self.check()
        with self._lock:
            self._lanes += 1
            return f"{what} {self._lanes}"

    def attach(self, worker: Attached) -> None:
        """Aborts `worker` when the group fails, and closes it with the group, unless it is detached
        before."""
        with self._lock:
            self._attached.append(worker)
        if self.channel.failure is not None:
            worker.abort()

    def detach(self, worker: Attached) -> None:
        """Removes a closed worker, so that the group no longer keeps its device.  Idempotent."""
        with self._lock, suppress(ValueError):
            self._attached.remove(worker)

    def _abort(self) -> None:
        for worker in [*self._attached]:
            worker.abort()

    def statistics(self) -> GroupStatistics:
        """Returns the numbers of this rank and descriptions of its collectives."""
        failure = self.channel.failure
        return GroupStatistics(
            self.rank,
            self.size,
            self.deadline,
            "" if failure is None else failure.text,
            tuple(worker.described() for worker in [*self._attached]),
        )

    # --- lifetime
    def close(self) -> None:
        """Leaves the group.  The others find this rank lost if they still need it.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        for worker in [*self._attached]:
            worker.close()
        self.channel.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if value is not None and not self._closed:
            self.fail(value)
        self.close()


def _watch(group: Group) -> None:
    while not group._stop.wait(min(1.0, group.deadline / _LOOKS)):
        group._look()


def _difference(label: str, told: Sequence[bytes]) -> str:
    lines = [text.decode("utf-8", "surrogatepass").split("\n") for text in told]
    longest = max(len(one) for one in lines)
    for index in range(longest):
        here = [one[index] if index < len(one) else "nothing more" for one in lines]
        if len(set(here)) > 1:
            other = next(rank for rank, text in enumerate(here) if text != here[0])
            return (
                f"{label}: the ranks differ, first in line {index} of {longest}: rank 0 has "
                f"{here[0][:400]!r}, rank {other} has {here[other][:400]!r}. All ranks must run "
                "the same program with the same build and settings"
            )
    raise AssertionError("the digests differ and the lines do not")


class LocalGroups(Closeable, Sequence[Group]):
    """The groups of ranks that are threads of this process, by rank.  Made by `local_groups`."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = tuple(groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, rank: int) -> Group:  # type: ignore[override]
        return self._groups[rank]

    def run(self, work: object, *args: object) -> list[object]:
        """Calls `work(group, *args)` on a thread for each rank; returns the results by rank.

        If several ranks raise, raises the earliest exception that is not a GroupError; if there is
        none, the earliest GroupError.
        """
        if not callable(work):
            raise InputError(f"work is {work!r}, must be a function of a group")
        results: list[object] = [None] * len(self)
        errors: list[tuple[float, BaseException]] = []

        def rank_thread(group: Group) -> None:
            try:
                results[group.rank] = work(group, *args)
            except BaseException as error:
                errors.append((time.monotonic(), error))
                group.fail(error)

        threads = [
            threading.Thread(target=rank_thread, args=(group,), name=f"rank {group.rank}")
            for group in self
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            own = [pair for pair in errors if not isinstance(pair[1], GroupError)]
            raise min(own or errors, key=lambda pair: pair[0])[1]
        return results

    def close(self) -> None:
        """Closes every rank's group.  Idempotent."""
        for group in self._groups:
            group.close()


def local_groups(size: int, *, deadline: float | None = None) -> LocalGroups:
    """Returns groups of `size` ranks in this process, for host devices: one thread per rank.

        with local_groups(4) as groups:
            tokens = groups.run(decode)          # decode(group) on four threads

    Everything is as in a group of processes, except that ranks exchange through memory.
    """
    ranks = whole_number(size)
    if ranks is None or not 1 <= ranks <= 1024:
        raise InputError(f"size is {size!r}, must be 1 to 1024 ranks")
    return LocalGroups([Group(one, deadline=deadline) for one in local_channels(ranks)])
