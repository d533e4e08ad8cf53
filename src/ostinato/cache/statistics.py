"""The counts of a `GraphCache`, as frozen records."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ostinato.cache.budget import FootprintSource

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
    """One graph in the cache.  `capture_ms` is None if it was installed ready-made."""

    key: Hashable
    hits: int
    nbytes: int
    nbytes_source: FootprintSource
    capture_ms: float | None


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
    """Calls of replay, get and hold for a key that was not there."""
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
    """From the least to the most recently used."""
