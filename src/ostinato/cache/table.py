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
from dataclasses import dataclass
from typing import Literal

from ostinato.cache.budget import Footprint
from ostinato.cache.statistics import Evictions, KeyStatistics
from ostinato.driver.context import members
from ostinato.errors import InputError
from ostinato.graph.executable import GraphExec

__all__ = ["Entry", "Reason", "Table"]

Reason = Literal["asked", "touching", "budget", "count", "replaced", "closed"]
"""Why an entry leaves; the first four are evictions."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Entry:
    """A graph in the table, and how it is used."""

    executable: GraphExec
    footprint: Footprint
    capture_ms: float | None
    hits: int = 0
    leases: int = 0
    leaving: bool = False


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
        self._left: Counter[Reason] = Counter()

    @property
    def nbytes(self) -> int:
        """The sum of the bytes that the entries are charged with."""
        return sum(entry.footprint.nbytes for entry in self.entries.values())

    def use(self, key: Hashable) -> Entry | None:
        """The entry under a key.  Counts a hit, and makes it the most recently used."""
        entry = self.entries.get(key)
        if entry is not None:
            self.entries.move_to_end(key)
            entry.hits += 1
        return entry

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
        before = self.entries.get(key)
        out: list[Entry] = []
        if before is not None and before.executable is entry.executable:
            before.footprint = entry.footprint
            self.entries.move_to_end(key)
        else:
            out += self.remove([key], "replaced")
            self.entries[key] = entry
        return out + self._trim()

    def _require_free(self, key: Hashable, executable: GraphExec) -> None:
        for other, entry in self.entries.items():
            if entry.executable is executable and other != key:
                raise InputError(
                    f"the executable for key {key!r} is in the cache under key {other!r} already; "
                    "use one key, or instantiate twice"
                )
        if any(entry.executable is executable for entry in members(self.leaving)):
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
                nbytes -= entry.footprint.nbytes
                out += self.remove([key], "budget")
            self.over_budget += nbytes > self.budget
        return out

    # --- numbers
    @property
    def replaced(self) -> int:
        return self._left["replaced"]

    @property
    def evictions(self) -> Evictions:
        left = self._left
        return Evictions(left["asked"], left["touching"], left["budget"], left["count"])

    def key_statistics(self) -> tuple[KeyStatistics, ...]:
        """A line for each key, from the least to the most recently used."""
        return tuple(
            KeyStatistics(
                key, e.hits, e.footprint.nbytes, e.footprint.source, capture_ms=e.capture_ms
            )
            for key, e in self.entries.items()
        )
