"""The counts of a `GraphCache`, as frozen records."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from ostinato.cache.budget import FootprintSource
from ostinato.cache.limits import CaptureLimits

__all__ = ["CacheStatistics", "Evictions", "KeyStatistics"]


@dataclass(frozen=True, slots=True)
class Evictions:
    """How many graphs left the cache, by reason (a replaced graph is not evicted)."""

    asked: int = 0
    """By `evict` and `evict_all`."""
    touching: int = 0
    """By `evict_touching`."""
    budget: int = 0
    """Least recently used, because the bytes were over the budget."""
    count: int = 0
    """Least recently used, because there were more than `max_graphs`."""

    @property
    def total(self) -> int:
        return self.asked + self.touching + self.budget + self.count


@dataclass(frozen=True, slots=True)
class KeyStatistics:
    """One key: its graph in the cache, and what happened to the key since it first came.

    Of a key without a graph at present, `nbytes` is 0 and the two fields after it are None.
    """

    key: Hashable
    hits: int
    """Uses that found a graph, over all graphs that the key had."""
    nbytes: int
    """Bytes that its graph is charged with."""
    nbytes_source: FootprintSource | None
    capture_ms: float | None
    """What the capture of its graph took; None if it was installed ready-made."""
    misses: int = 0
    captures: int = 0
    """Those that gave a graph."""
    capture_failures: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    """Captures that the limits refused to `get_or_capture`, by reason."""
    all_captures_ms: float = 0.0
    """What all captures of the key took, failed ones too."""
    installed: int = 0
    replaced: int = 0
    evictions: Evictions = Evictions()

    @property
    def left(self) -> int:
        """Graphs of this key that are not in the cache any more."""
        return self.replaced + self.evictions.total


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """A snapshot of a cache.  Counts are since it was made; bytes are of device memory."""

    graphs: int
    nbytes: int
    """The sum of the bytes that the graphs in the cache are charged with."""
    budget: int | None
    max_graphs: int | None
    leaving: int
    """Graphs that were taken out, but that a replay or `hold` is using at this moment."""
    hits: int
    """Calls for a key that was there: replay, get, hold, get_or_capture."""
    misses: int
    """Calls of replay, get and hold for a key that was not there, and of get_or_capture that the
    limits refused."""
    captures: int
    capture_failures: int
    joined: int
    """Calls of get_or_capture that waited for another thread's capture of the key."""
    capture_ms: float
    """Time spent in captures, also in failed ones; the sum over all threads."""
    installed: int
    """By `install`."""
    replaced: int
    evictions: Evictions
    over_budget: int
    """How often the graph just put in was over the budget by itself (it is kept)."""
    keys: tuple[KeyStatistics, ...]
    """Those with a graph, from the least to the most recently used."""
    limits: CaptureLimits
    refused: Mapping[str, int]
    """Captures that the limits refused to `get_or_capture`, by reason."""
    shared_growth: int
    """By how much free device memory fell in captures of graphs that share blocks."""
    gone: tuple[KeyStatistics, ...]
    """Those without a graph, the latest last; of so many as are remembered."""
    forgotten: int
    """Keys without a graph that are in `gone` no more.  While this is 0, the counts of all keys add
    up to those of the cache."""
