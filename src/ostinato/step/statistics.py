"""The counts of a cache and a step, as frozen records with tables."""

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
"""The number of times that are kept for a key, the latest ones."""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as text in columns; the first row is the heading.  Columns of numbers, except
    the first column, are aligned to the right."""
    columns = [*zip(*rows, strict=True)]
    made = []
    for index, column in enumerate(columns):
        width = max(map(len, column))
        numbers = index and any(cell[:1].isdecimal() for cell in column[1:])
        made.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*made, strict=True))


def key_text(key: Hashable) -> str:
    """Returns the text of a key in a table."""
    from ostinato.graph.show.outline import printable, shorten

    return shorten(printable(str(key)), _KEY_WIDTH)


def counted(reasons: Mapping[str, int]) -> Iterable[str]:
    """Returns indented lines with the count of each reason."""
    return (f"  {count} x {reason}" for reason, count in reasons.items())


@dataclass(frozen=True, slots=True)
class Evictions:
    """The number of graphs that left the cache, by reason (a replaced graph is not evicted)."""

    asked: int = 0
    """Graphs evicted by `evict` and `evict_all`."""
    touching: int = 0
    """Graphs evicted by `evict_touching`."""
    budget: int = 0
    """Least recently used graphs, evicted because the bytes were over the budget."""
    count: int = 0
    """Least recently used graphs, evicted because there were more than `max_graphs`."""
    memory: int = 0
    """Graphs evicted because the device had no memory for another one."""

    @property
    def total(self) -> int:
        return self.asked + self.touching + self.budget + self.count + self.memory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cached:
    """The counts of a cache: of one key, or of all keys together."""

    nbytes: int
    """Bytes of device memory that the graphs in the cache are charged with."""
    hits: int
    """Uses that found a graph: replay, get, hold, get_or_capture."""
    misses: int
    """Calls of replay, get and hold without a graph, and calls of get_or_capture that the limits
    refused."""
    captures: int
    """The number of captures that gave a graph."""
    capture_failures: int
    refused: Mapping[str, int]
    """Captures that the limits refused to `get_or_capture`, by reason."""
    capture_seconds: float
    """Time spent in captures, also in failed ones; the sum over all threads."""
    installed: int
    """Graphs that came in by `install`."""
    replaced: int
    evictions: Evictions


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStatistics(_Cached):
    """The record of one key: its graph in the cache, and counts since the key first came.

    For a key without a graph at present, `nbytes` is 0, and `nbytes_source` and
    `last_capture_seconds` are None.
    """

    key: Hashable
    nbytes_source: FootprintSource | None
    last_capture_seconds: float | None
    """Duration of the capture of its graph; None if it was installed ready-made."""

    @property
    def left(self) -> int:
        """The number of graphs of this key that are not in the cache any more."""
        return self.replaced + self.evictions.total


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics(_Cached):
    """A snapshot of a cache.  Counts are since the cache was made."""

    graphs: int
    budget: int | None
    max_graphs: int | None
    leaving: int
    """Graphs that were taken out while a replay or `hold` still uses them."""
    joined: int
    """Calls of get_or_capture that waited for another thread's capture of the key."""
    over_budget: int
    """The number of times that the newest graph alone was over the budget (it is kept)."""
    keys: tuple[KeyStatistics, ...]
    """The keys with a graph, from the least to the most recently used."""
    limits: CaptureLimits
    gone: tuple[KeyStatistics, ...]
    """The remembered keys without a graph, the latest last."""
    forgotten: int
    """Keys without a graph that are not remembered any more.  While this is 0, the counts of all
    keys add up to those of the cache."""

    def __str__(self) -> str:
        """Returns the counts of the cache, and a table of its keys in their order."""
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
    """The counts of one key, or of all keys together."""

    calls: int
    eager: int
    """Calls that ran launch by launch, among them calls that recorded their graph."""
    replays: int
    """Calls that were replayed, among them calls that captured their graph first."""
    captures: int
    """Graphs that were made: captured, recorded, or by a builder."""
    restored: int
    """Graphs that were read from a store."""
    rebound: int
    """The number of times that a function's graph was bound to memory that had moved."""
    verified: int
    """Checks.  Each also counts in `replays`, even if it failed or launched the graph twice."""
    broken: int
    """Captures that an outside event broke, such as a `synchronize()` of another thread, or for
    which the device had no memory."""
    eager_reasons: Mapping[str, int]
    """Eager runs by reason."""
    capture_reasons: Mapping[str, int]
    """Captures of a function by reason: the first capture, and the reasons why later calls were
    captured again instead of bound to other memory."""
    used: int
    """The sum of a step's real sizes."""
    padded: int
    """The sum of a step's bucketed sizes."""

    @property
    def padding_waste(self) -> float:
        """The share of bucketed sizes that was padding, 0 to 1."""
        return 1 - self.used / self.padded if self.padded else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKeyStatistics(_Counted):
    """The counts of one key of a step or a graphed function.

    `seconds`: host time of the latest timed replays.  For a step one replay in 32 is
    timed, without the work before the launch; launches of held graphs are not timed.  The time
    includes what the step's settings add to a launch: with `synchronize`, also the time of the
    device.  For a graphed function one call in 16 is timed, as a whole.
    """

    key: Hashable
    """The key of its graph in the cache: a `StepKey`, or a name."""
    words: str
    """The sizes, or the arguments of a function."""
    decision: Literal["warmed up", "replayed", "evicted", "eager"]
    reason: str
    """The reason why its calls run eagerly from now on; empty if they do not."""
    seconds: Percentiles
    graph: KeyStatistics | None
    """The cache's record of the key (bytes, capture seconds, hits, evictions), or None."""

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the cache charges for its graph."""
        return 0 if self.graph is None else self.graph.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatistics(_Counted):
    """The counts of a step or a graphed function.

    A call that raised an error other than VerificationError counts in `calls`, `used` and `padded`
    alone.
    """

    launches_eager: int
    """Operations that a step launched one by one; always 0 for a graphed function."""
    quarantined: Mapping[str, str]
    """The reason for each key that runs eagerly from now on."""
    last_check: CheckReport | None = None
    """The report of the last check: bytes compared and skipped, and the finding."""
    keys: tuple[StepKeyStatistics, ...] = ()
    """The record of each key, in the order in which the keys came.  They add up to the numbers
    above, unless there were so many keys (4,096) that the oldest were dropped."""

    def __str__(self) -> str:
        """Returns the counts, the reasons of eager runs, and a table of the keys."""
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
    """The counts of one key while they change; the fields are those of `StepStatistics`."""

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
        """Counts `runs` eager runs that launched `launches` operations together."""
        self.eager += runs
        self.launches_eager += launches
        self.eager_reasons[reason] += runs

    def replayed(self, launches: int, used: int, padded: int) -> None:
        """Counts calls that were replays, each with these sums of sizes."""
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
        """Returns the fields that the record of a key and the sum of all keys have in common."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        del found["times"], found["launches_eager"]
        reasons = {name: dict(found[name]) for name in ("eager_reasons", "capture_reasons")}
        return found | reasons
