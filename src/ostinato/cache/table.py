"""The table behind `GraphCache`: entries in order of use, their bytes, and when they leave.

It launches and closes nothing, and is not thread-safe; the cache calls it under its lock.  States
of an entry:

    put() -> KEPT -> removed, replaced or trimmed -> CLOSED by the cache
                     └─ LEAVING as long as a lease is out ─┘

Calls that take entries out return those without a lease.  For the others the last `release` returns
True.  In both cases the caller must close the executable.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from ostinato.cache.budget import Footprint, SharedBlocks
from ostinato.cache.records import KeyRecord, Reason, Records, evictions
from ostinato.cache.schedule import Event, Schedule
from ostinato.cache.statistics import Evictions, KeyStatistics
from ostinato.errors import InputError
from ostinato.graph.executable import GraphExec

__all__ = ["Entry", "Table"]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Entry:
    """A graph in the table, and how it is used."""

    executable: GraphExec
    footprint: Footprint
    capture_ms: float | None
    hits: int = 0
    leases: int = 0
    leaving: bool = False
    used: bytes = b""
    """What stands for a use of it in the schedule."""
    record: KeyRecord = field(default_factory=KeyRecord)


class Table:
    """Entries by key.  Over `budget` (bytes) or `max_graphs`, the least recently used leave."""

    def __init__(self, budget: int | None, max_graphs: int | None) -> None:
        self.budget = budget
        self.max_graphs = max_graphs
        self.entries: OrderedDict[Hashable, Entry] = OrderedDict()
        """The last is the most recently used."""
        self.leaving: weakref.WeakSet[Entry] = weakref.WeakSet()
        """Weak: a lease that an interruption lost must not keep a graph for ever."""
        self.over_budget = 0
        self.blocks = SharedBlocks()
        self.records = Records()
        self._left: Counter[Reason] = Counter()
        self._schedule = Schedule()
        self._latest: Entry | None = None
        """The last of the entries, if it was used or put in last; and its hits before.  Uses of it
        in a row are one event of the schedule, so that they cost nothing more."""
        self._hits_before = 0

    @property
    def nbytes(self) -> int:
        """The sum of the bytes that the entries are charged with."""
        return sum(self.charge(entry).nbytes for entry in self.entries.values())

    def charge(self, entry: Entry) -> Footprint:
        """The bytes that an entry is charged with, as of now."""
        return self.blocks.share(entry.footprint)

    def use(self, key: Hashable) -> Entry | None:
        """The entry under a key.  Counts a hit, and makes it the most recently used."""
        entry = self.entries.get(key)
        if entry is not None:
            if entry is not self._latest:
                self.entries.move_to_end(key)
                self._begin_uses(entry)
            entry.hits += 1
        return entry

    def _begin_uses(self, entry: Entry | None) -> None:
        """Ends the uses in a row of one entry, and begins those of another, or of none."""
        latest, before = self._latest, self._hits_before
        self._latest, self._hits_before = entry, 0 if entry is None else entry.hits
        if latest is not None and latest.hits > before:
            self._schedule.add(latest.used, latest.hits - before)

    def note(self, key: Hashable, event: Event) -> None:
        """Adds an event to the schedule."""
        self._begin_uses(None)
        self._schedule.note(key, event)

    def schedule_digest(self) -> str:
        """Of all events so far."""
        latest = self._latest
        times = 0 if latest is None else latest.hits - self._hits_before
        return self._schedule.digest(b"" if latest is None else latest.used, times)

    def miss(self, key: Hashable) -> None:
        """A use that found no entry."""
        self.records.of(key).misses += 1
        self.note(key, "missed")

    def record(self, key: Hashable) -> KeyRecord:
        """The record of a key, whether it has an entry or not."""
        entry = self.entries.get(key)
        return self.records.of(key) if entry is None else entry.record

    def uses(self, key: Hashable) -> int:
        """Hits and misses of a key."""
        entry = self.entries.get(key)
        record = self.records.gone.get(key) if entry is None else entry.record
        hits = 0 if entry is None else entry.hits
        return hits if record is None else hits + record.hits + record.misses

    def captured_at(self, key: Hashable) -> tuple[int, ...]:
        """How many uses of a key there were when each of its last captures began."""
        entry = self.entries.get(key)
        record = self.records.gone.get(key) if entry is None else entry.record
        return () if record is None else tuple(record.captured_at)

    def release(self, entry: Entry) -> bool:
        """Ends one lease.  True if the entry has left and this was the last."""
        entry.leases -= 1
        last = entry.leaving and not entry.leases
        if last:
            self.leaving.discard(entry)
        return last

    def put(self, key: Hashable, entry: Entry) -> list[Entry]:
        """Puts an entry under a key, in place of another, and trims.

        An executable that is under this key already only gets its new footprint.  Raises
        InputError if it is elsewhere in the table: it would be closed twice.
        """
        self._require_free(key, entry.executable)
        used = self._schedule.mark(key, "used")  # first: a key of a user's class may raise here
        before = self.entries.get(key)
        out: list[Entry] = []
        if before is not None and before.executable is entry.executable:
            before.footprint = entry.footprint
            entry = before
            self.entries.move_to_end(key)
        else:
            out += self.remove([key], "replaced")
            entry.used = used
            entry.record = self.records.take(key)
            self.entries[key] = entry
        self._begin_uses(entry)
        self._measure(entry)
        return out + self._trim()

    def _measure(self, entry: Entry) -> None:
        """Notes what the capture of an entry told about the blocks that entries share."""
        footprint = entry.footprint
        if footprint.grown is None or footprint.free is None:
            return
        if len(self.entries) == 1 and not self.leaving:
            self.blocks = SharedBlocks()
        others = [e.footprint for e in (*self.entries.values(), *self.leaving) if e is not entry]
        estimated = sum(each.nbytes for each in others if each.grown is not None)
        self.blocks.note(footprint.grown, footprint.free, estimated, footprint.nbytes)

    def _require_free(self, key: Hashable, executable: GraphExec) -> None:
        for other, entry in self.entries.items():
            if entry.executable is executable and other != key:
                raise InputError(
                    f"the executable for key {key!r} is in the cache under key {other!r} already; "
                    "use one key, or instantiate twice"
                )
        if any(entry.executable is executable for entry in self.leaving):
            raise InputError(
                f"the executable for key {key!r} has just been evicted and will be closed; "
                "instantiate another"
            )

    def remove(self, keys: Iterable[Hashable], reason: Reason) -> list[Entry]:
        """Takes out the entries that are under these keys; returns those without a lease."""
        out = []
        for key in keys:
            entry = self.entries.pop(key, None)
            if entry is None:
                continue
            self._left[reason] += 1
            entry.record.left[reason] += 1
            entry.record.hits += entry.hits
            self.records.keep(key, entry.record)
            if entry is self._latest:
                self._begin_uses(None)
            entry.leaving = True
            if entry.leases:
                self.leaving.add(entry)
            else:
                out.append(entry)
        return out

    def _trim(self) -> list[Entry]:
        """Takes out the least recently used until the limits hold, or only the newest is left."""
        out: list[Entry] = []
        while self.max_graphs is not None and len(self.entries) > self.max_graphs:
            out += self.remove([next(iter(self.entries))], "count")
        if self.budget is not None:
            nbytes = self.nbytes
            while nbytes > self.budget and len(self.entries) > 1:
                key, entry = next(iter(self.entries.items()))
                nbytes -= self.charge(entry).nbytes
                out += self.remove([key], "budget")
            self.over_budget += nbytes > self.budget
        return out

    # --- numbers
    @property
    def replaced(self) -> int:
        return self._left["replaced"]

    @property
    def evictions(self) -> Evictions:
        return evictions(self._left)

    def key_statistics(self, key: Hashable) -> KeyStatistics | None:
        """The line of one key; None if nothing is known of it."""
        entry = self.entries.get(key)
        record = self.records.gone.get(key) if entry is None else entry.record
        return None if record is None else self._line(key, record, entry)

    def all_statistics(self) -> tuple[KeyStatistics, ...]:
        """A line for each key with an entry, from the least to the most recently used."""
        return tuple(self._line(key, e.record, e) for key, e in self.entries.items())

    def gone_statistics(self) -> tuple[KeyStatistics, ...]:
        """A line for each key that has no entry, the latest last."""
        return tuple(self._line(key, r, None) for key, r in self.records.gone.items())

    def _line(self, key: Hashable, record: KeyRecord, entry: Entry | None) -> KeyStatistics:
        charge = None if entry is None else self.charge(entry)
        return KeyStatistics(
            key,
            hits=record.hits + (0 if entry is None else entry.hits),
            nbytes=0 if charge is None else charge.nbytes,
            nbytes_source=None if charge is None else charge.source,
            capture_ms=None if entry is None else entry.capture_ms,
            misses=record.misses,
            captures=record.captures,
            capture_failures=record.failures,
            refused={reason.value: count for reason, count in record.refused.items()},
            all_captures_ms=1e3 * record.capture_seconds,
            installed=record.installed,
            replaced=record.left["replaced"],
            evictions=evictions(record.left),
        )
