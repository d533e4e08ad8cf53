"""What a cache and a step count, as frozen records and their tables."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ostinato.explain.times import Percentiles
from ostinato.step.budget import FootprintSource
from ostinato.step.check import CheckReport
from ostinato.step.limits import CaptureLimits

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
    last_capture_seconds: float | None
    """What the capture of its graph took; None if it was installed ready-made."""
    misses: int = 0
    captures: int = 0
    """Those that gave a graph."""
    capture_failures: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    """Captures that the limits refused to `get_or_capture`, by reason."""
    capture_seconds: float = 0.0
    """Time spent in captures of the key, also in failed ones."""
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
    capture_seconds: float
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
        took = f"{1e3 * self.capture_seconds:.1f} ms"
        words = [
            f"graphs {self.graphs}, {bytes_text(self.nbytes)}{budget}; hits {self.hits}, misses "
            f"{self.misses}, captures {self.captures} in {took}, failed "
            f"{self.capture_failures}, evicted {self.evictions.total}",
            *counted(self.refused),
        ]
        rows = [("key", "hits", "bytes", "captures", "ms", "evicted")]
        for line in (*self.keys, *self.gone):
            nbytes = "-" if line.nbytes_source is None else bytes_text(line.nbytes)
            took = f"{1e3 * line.capture_seconds:.1f}"
            counts = (str(line.captures), took, str(line.evictions.total))
            rows.append((key_text(line.key), str(line.hits), nbytes, *counts))
        return "\n".join([*words, *([table(rows)] if len(rows) > 1 else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """What is counted for a key, and for all of them together."""

    calls: int
    eager: int
    """Calls that ran launch by launch; one that records its graph is among them."""
    replays: int
    """Calls that were replayed; one that captures its graph is among them."""
    captures: int
    """Graphs that were made: captured, recorded, or by a builder."""
    restored: int
    """Graphs that were read from a store instead."""
    rebound: int
    """How often a function's graph was bound to memory that had moved."""
    verified: int
    """Checks.  Each is one in `replays` as well, also if it failed or launched the graph twice."""
    broken: int
    """Captures that something else broke, such as a `synchronize()` of another thread, or for which
    the device had no memory."""
    eager_reasons: Mapping[str, int]
    """Eager runs by reason."""
    capture_reasons: Mapping[str, int]
    """Captures of a function by reason: the first one, and why again instead of bound to other
    memory."""
    used: int
    """The sum of a step's real sizes."""
    padded: int
    """The sum of its bucketed sizes."""

    @property
    def padding_waste(self) -> float:
        """The share of bucketed sizes that was padding, 0 to 1."""
        return 1 - self.used / self.padded if self.padded else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKeyStatistics(_Counted):
    """What a step, or a graphed function, did so far for one key.

    `seconds`: host time of the latest timed replays.  Of a step one replay in 32 is
    timed, without what comes before the launch, and launches of held graphs are not; it includes
    what the step's settings add to a launch: with `synchronize`, also the time of the device.  Of a
    graphed function one call in 16 is timed, as a whole.
    """

    key: Hashable
    """The key of its graph in the cache: a `StepKey`, or a name."""
    words: str
    """The sizes, or the arguments of a function."""
    decision: Literal["warmed up", "replayed", "evicted", "eager"]
    reason: str
    """Why its calls run eagerly from now on; empty if they do not."""
    seconds: Percentiles
    graph: KeyStatistics | None
    """The cache's record of the key (bytes, capture, hits, evictions); None if it has none."""

    @property
    def nbytes(self) -> int:
        """The device bytes that the cache charges for its graph."""
        return 0 if self.graph is None else self.graph.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatistics(_Counted):
    """What a step, or a graphed function, did so far.

    A call that raised something else than VerificationError is in `calls`, `used` and `padded`
    alone.
    """

    launches_eager: int
    """Operations that a step launched one by one; 0 for a function, whose library does not tell."""
    quarantined: Mapping[str, str]
    """The reason for each key that runs eagerly from now on."""
    last_check: CheckReport | None = None
    """What the last check compared, and what it left out."""
    keys: tuple[StepKeyStatistics, ...] = ()
    """A line for each key, in the order in which they came.  They add up to the numbers above,
    unless there were so many keys (4,096) that the oldest were dropped."""

    def __str__(self) -> str:
        """What was done, why calls ran eagerly, and a table of the keys."""
        words = [
            f"calls {self.calls}: replays {self.replays}, eager {self.eager}, verified "
            f"{self.verified}; captures {self.captures}; padding {self.padding_waste:.0%}",
            *counted(self.eager_reasons),
        ]
        rows: list[tuple[str, ...]] = [
            ("key", "calls", "replays", "eager", "captures", "padding", "µs p50", "p99", "")
        ]
        for line in self.keys:
            counts = (line.calls, line.replays, line.eager, line.captures)
            spent = (line.seconds.p50, line.seconds.p99)
            times = [f"{1e6 * each:.1f}" if line.seconds.count else "-" for each in spent]
            why = line.reason and f"quarantined: {line.reason}"
            share = f"{line.padding_waste:.0%}"
            rows.append((key_text(line.words), *map(str, counts), share, *times, why))
        return "\n".join([*words, *([table(rows)] if self.keys else [])])


@dataclass(slots=True)
class Counts:
    """What is counted for a key; the fields are those of `StepStatistics`."""

    calls: int = 0
    eager: int = 0
    replays: int = 0
    captures: int = 0
    rebound: int = 0
    verified: int = 0
    broken: int = 0
    launches_eager: int = 0
    used: int = 0
    padded: int = 0
    eager_reasons: Counter[str] = field(default_factory=Counter)
    capture_reasons: Counter[str] = field(default_factory=Counter)
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMES))
    """Seconds of host time of the replays that were timed."""

    def ran_eagerly(self, launches: int, reason: str, runs: int = 1) -> None:
        """Eager runs, of so many operations."""
        self.eager += runs
        self.launches_eager += launches
        self.eager_reasons[reason] += runs

    def replayed(self, launches: int, used: int, padded: int) -> None:
        """Calls that were replays, each with these sums of sizes."""
        self.calls += launches
        self.replays += launches
        self.used += launches * used
        self.padded += launches * padded

    def add(self, other: Counts) -> None:
        """Adds the counts of another key, but not its times."""
        for each in fields(self):
            if each.name != "times":
                mine, theirs = getattr(self, each.name), getattr(other, each.name)
                setattr(self, each.name, mine + theirs)

    def copy(self) -> Counts:
        made = Counts(times=self.times)
        made.add(self)
        return made

    def fields(self) -> dict[str, Any]:
        """What a key's record and the sums have of it."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        del found["times"], found["launches_eager"]
        reasons = {name: dict(found[name]) for name in ("eager_reasons", "capture_reasons")}
        return found | reasons
