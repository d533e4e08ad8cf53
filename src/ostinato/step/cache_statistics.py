"""The counts of a `GraphCache`, as frozen records."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ostinato.step.budget import FootprintSource
from ostinato.step.limits import CaptureLimits

_KEY_WIDTH = 60


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text in columns; the first is the heading.  Columns of numbers, of which the first is
    none, are set to the right."""
    columns = [*zip(*rows, strict=True)]
    made = []
    for index, column in enumerate(columns):
        width = max(map(len, column))
        numbers = index and any(cell[:1].isdecimal() for cell in column[1:])
        made.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*made, strict=True))


def key_text(key: Hashable) -> str:
    """A key in a table."""
    from ostinato.graph.show.outline import printable, shorten

    return shorten(printable(str(key)), _KEY_WIDTH)


def counted(reasons: Mapping[str, int]) -> Iterable[str]:
    """Lines of how often what happened, indented."""
    return (f"  {count} x {reason}" for reason, count in reasons.items())


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

    For a key without a graph at present, `nbytes` is 0 and the two fields after it are None.
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

    def __str__(self) -> str:
        """What the cache did, and a table of its keys, as they are listed."""
        from ostinato.graph.show.outline import bytes_text

        budget = f" of {bytes_text(self.budget)}" if self.budget is not None else ""
        words = [
            f"graphs {self.graphs}, {bytes_text(self.nbytes)}{budget}; hits {self.hits}, misses "
            f"{self.misses}, captures {self.captures} in {self.capture_ms:.1f} ms, failed "
            f"{self.capture_failures}, evicted {self.evictions.total}",
            *counted(self.refused),
        ]
        rows = [("key", "hits", "bytes", "captures", "ms", "evicted")]
        for line in (*self.keys, *self.gone):
            nbytes = "-" if line.nbytes_source is None else bytes_text(line.nbytes)
            took = f"{line.all_captures_ms:.1f}"
            counts = (str(line.captures), took, str(line.evictions.total))
            rows.append((key_text(line.key), str(line.hits), nbytes, *counts))
        return "\n".join([*words, *([table(rows)] if len(rows) > 1 else [])])
