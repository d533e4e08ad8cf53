"""What a cache and a step count, as frozen records and their tables."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from ostinato.explain.times import Percentiles
from ostinato.step.budget import FootprintSource
from ostinato.step.limits import CaptureLimits

if TYPE_CHECKING:
    from ostinato.step.check import CheckReport

_KEY_WIDTH = 60
_TIMES = 256
"""So many times of a key are kept, the latest."""


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
    memory: int = 0
    """Because the device had no memory for another graph."""

    @property
    def total(self) -> int:
        return self.asked + self.touching + self.budget + self.count + self.memory


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


@dataclass(frozen=True, slots=True)
class StepKeyStatistics:
    """What a step did so far for one key; fields of the same name are those of `StepStatistics`.

    `us`: host time of the latest timed replays in microseconds.  One replay in 32 is timed;
    launches of held graphs are not.  It includes what the step's settings add to a launch: with
    `synchronize`, also the time of the device.  `graph`: the cache's record of the key (bytes,
    capture ms, hits, evictions); None if it has none.
    """

    key: Hashable
    """A `StepKey`."""
    calls: int
    eager: int
    replayed: int
    built: int
    eager_reasons: dict[str, int]
    quarantined: str | None
    used: int
    padded: int
    us: Percentiles
    graph: KeyStatistics | None

    @property
    def padding_waste(self) -> float:
        """The share of bucketed sizes that was padding, 0 to 1."""
        return 1 - self.used / self.padded if self.padded else 0.0


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """What a step did so far.

    `built` counts graphs that were made; a call that captures one replays it too, so it is in
    `replayed`, and a call that records one is in `eager`.
    `launches_eager` counts operations launched one by one, `launches_replayed` replays.
    `eager_reasons` counts eager runs by reason.  `padded` and `used` add up bucketed and real
    sizes.  `verified` counts checks; each is one in `replayed` as well, also if it failed or
    launched the graph twice.  A call that raised something else is in `calls`, `used` and `padded`.
    """

    calls: int
    eager: int
    replayed: int
    built: int
    launches_eager: int
    launches_replayed: int
    eager_reasons: dict[str, int]
    quarantined: dict[str, str]
    verified: int
    used: int
    padded: int
    last_check: CheckReport | None = None
    """What the last check compared, and what it left out."""
    keys: tuple[StepKeyStatistics, ...] = ()
    """A line for each key, in the order in which they came.  They add up to the numbers above,
    unless there were so many keys (4,096) that the oldest were dropped."""

    def __str__(self) -> str:
        """What the step did, why it ran eagerly, and a table of its keys."""
        words = [
            f"calls {self.calls}: replayed {self.replayed}, eager {self.eager}, checked "
            f"{self.verified}; graphs built {self.built}; padding {self.padding_waste:.0%}",
            *counted(self.eager_reasons),
        ]
        rows: list[tuple[str, ...]] = [
            ("key", "calls", "replayed", "eager", "built", "padding", "µs p50", "p99", "")
        ]
        for line in self.keys:
            counts = (line.calls, line.replayed, line.eager, line.built)
            times = [f"{time:.1f}" if line.us.count else "-" for time in (line.us.p50, line.us.p99)]
            why = line.quarantined and f"quarantined: {line.quarantined}"
            share = f"{line.padding_waste:.0%}"
            rows.append((key_text(line.key), *map(str, counts), share, *times, why or ""))
        return "\n".join([*words, *([table(rows)] if self.keys else [])])

    @property
    def padding_waste(self) -> float:
        """The share of bucketed sizes that was padding, 0 to 1."""
        return 1 - self.used / self.padded if self.padded else 0.0


@dataclass(slots=True)
class Counts:
    """What a step counts for a key while it runs; the fields are those of `StepStatistics`."""

    calls: int = 0
    eager: int = 0
    replayed: int = 0
    built: int = 0
    launches_eager: int = 0
    verified: int = 0
    used: int = 0
    padded: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMES))
    """Microseconds of host time of the replays that were timed."""

    def ran_eagerly(self, launches: int, reason: str, runs: int = 1) -> None:
        """Eager runs, of so many operations."""
        self.eager += runs
        self.launches_eager += launches
        self.reasons[reason] += runs

    def replays(self, launches: int, used: int, padded: int) -> None:
        """Calls that were replays, each with these sums of sizes."""
        self.calls += launches
        self.replayed += launches
        self.used += launches * used
        self.padded += launches * padded

    def add(self, other: Counts) -> None:
        """Adds the counts of another key."""
        for each in fields(self):
            if each.name not in ("reasons", "times"):
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        self.reasons.update(other.reasons)

    def copy(self) -> Counts:
        made = Counts.sum([self])
        made.times = self.times
        return made

    @classmethod
    def sum(cls, counts: Iterable[Counts]) -> Counts:
        """The counts of several keys."""
        total = cls()
        for each in counts:
            total.add(each)
        return total

    def key_statistics(
        self,
        key: Hashable,
        quarantined: str | None,
        graph: KeyStatistics | None,
    ) -> StepKeyStatistics:
        """A snapshot, of one key."""
        return StepKeyStatistics(
            key,
            self.calls,
            self.eager,
            self.replayed,
            self.built,
            dict(self.reasons),
            quarantined,
            self.used,
            self.padded,
            Percentiles.of(self.times),
            graph,
        )

    def statistics(
        self, keys: tuple[StepKeyStatistics, ...], last_check: CheckReport | None
    ) -> StepStatistics:
        """A snapshot, of all keys together."""
        return StepStatistics(
            self.calls,
            self.eager,
            self.replayed,
            self.built,
            self.launches_eager,
            self.replayed,
            dict(self.reasons),
            {str(line.key): line.quarantined for line in keys if line.quarantined is not None},
            self.verified,
            self.used,
            self.padded,
            last_check,
            keys,
        )
