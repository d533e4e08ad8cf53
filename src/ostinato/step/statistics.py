"""What a `GraphedStep` counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from ostinato.explain.times import Percentiles
from ostinato.step.cache_statistics import KeyStatistics, counted, key_text, table
from ostinato.step.held import HeldCounts
from ostinato.step.policy import Reason
from ostinato.step.sizes import StepKey

if TYPE_CHECKING:
    from ostinato.step.check import CheckReport


@dataclass(frozen=True, slots=True)
class StepKeyStatistics:
    """What a step did so far for one key; fields of the same name are those of `StepStatistics`.

    `us`: host time of the latest timed replays in microseconds.  One replay in 32 is timed;
    launches of held graphs are not.  It includes what the step's settings add to a launch: with
    `synchronize`, also the time of the device.  `graph`: the cache's record of the key (bytes,
    capture ms, hits, evictions); None if it has none.
    """

    key: StepKey
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

    def ran_eagerly(self, launches: int, reason: Reason) -> None:
        """One eager run, of so many operations."""
        self.eager += 1
        self.launches_eager += launches
        self.reasons[reason.value] += 1

    def replays(self, held: HeldCounts) -> None:
        """What a held graph was launched for, a call each."""
        self.calls += held.launches
        self.replayed += held.launches
        self.used += held.launches * held.used
        self.padded += held.launches * held.padded

    def add(self, other: Counts) -> None:
        """Adds the counts of another key."""
        for each in fields(self):
            if each.name != "reasons":
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        self.reasons.update(other.reasons)

    def copy(self) -> Counts:
        return Counts.sum([self])

    @classmethod
    def sum(cls, counts: Iterable[Counts]) -> Counts:
        """The counts of several keys."""
        total = cls()
        for each in counts:
            total.add(each)
        return total

    def key_statistics(
        self,
        key: StepKey,
        quarantined: str | None,
        times: Iterable[float],
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
            Percentiles.of(times),
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
