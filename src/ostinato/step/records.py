"""What is known of each key of a cache, also while there is no graph under it."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

from ostinato.step.budget import Footprint
from ostinato.step.cache_statistics import Evictions, KeyStatistics
from ostinato.step.limits import Refusal

Reason = Literal["asked", "touching", "budget", "count", "replaced", "closed"]
"""Why a graph leaves; the first four are evictions."""

_REMEMBERED = 4096
"""So many keys without a graph are remembered; the oldest are dropped."""


@dataclass(slots=True, eq=False)
class KeyRecord:
    """The counts of one key.  `hits` are those of its graphs that left the cache; the entry of a
    graph that is in the cache counts its own hits."""

    hits: int = 0
    misses: int = 0
    captures: int = 0
    failures: int = 0
    capture_seconds: float = 0.0
    installed: int = 0
    captured_at: deque[int] = field(default_factory=lambda: deque(maxlen=1))
    """How many uses there were when each of the last captures began."""
    left: Counter[Reason] = field(default_factory=Counter)
    refused: Counter[Refusal] = field(default_factory=Counter)

    def note_capture(self, uses: int, most: int) -> None:
        """Notes that a capture begins, and that the key had `uses` before it; keeps the last
        `most` of these numbers."""
        if self.captured_at.maxlen != most:
            self.captured_at = deque(self.captured_at, most)
        self.captured_at.append(uses)

    @property
    def refusals(self) -> dict[str, int]:
        return {reason.value: count for reason, count in self.refused.items()}

    def statistics(
        self,
        key: Hashable,
        hits: int = 0,
        charge: Footprint | None = None,
        capture_ms: float | None = None,
    ) -> KeyStatistics:
        """The line of the key; the other arguments are of its graph, if it has one."""
        return KeyStatistics(
            key,
            hits=self.hits + hits,
            nbytes=0 if charge is None else charge.nbytes,
            nbytes_source=None if charge is None else charge.source,
            capture_ms=capture_ms,
            misses=self.misses,
            captures=self.captures,
            capture_failures=self.failures,
            refused=self.refusals,
            all_captures_ms=1e3 * self.capture_seconds,
            installed=self.installed,
            replaced=self.left["replaced"],
            evictions=evictions(self.left),
        )


class Records:
    """The records of keys without a graph, the latest last.  The record of a key with a graph is
    in its entry."""

    def __init__(self) -> None:
        self.gone: dict[Hashable, KeyRecord] = {}
        self.forgotten = 0

    def of(self, key: Hashable) -> KeyRecord:
        """The record of a key without a graph; a new one where there is none."""
        record = self.gone.get(key)
        if record is None:
            record = KeyRecord()
            self.keep(key, record)
        return record

    def keep(self, key: Hashable, record: KeyRecord) -> None:
        """Remembers the record of a key whose graph left, or that has none yet."""
        self.gone[key] = record
        if len(self.gone) > _REMEMBERED:
            if self.gone.pop(next(iter(self.gone)), None) is None:  # the key's hash has changed
                self.gone = dict(itertools.islice(self.gone.items(), 1, None))
            self.forgotten += 1

    def take(self, key: Hashable) -> KeyRecord:
        """The record of a key that gets a graph."""
        return self.gone.pop(key, None) or KeyRecord()


def evictions(left: Counter[Reason]) -> Evictions:
    """How many graphs left the cache, by reason."""
    return Evictions(left["asked"], left["touching"], left["budget"], left["count"])
