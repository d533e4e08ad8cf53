"""What a `GraphedStep` counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ostinato.replay.check import CheckReport
from ostinato.replay.held import HeldCounts
from ostinato.replay.policy import Reason

__all__ = ["Counts", "StepStatistics"]


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """What a step did so far.

    `launches_eager` counts operations launched one by one, `launches_replayed` graph launches.
    `eager_reasons` counts calls by reason.  `padded` and `used` add up bucketed and real sizes.
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

    @property
    def padding_waste(self) -> float:
        """The share of bucketed sizes that was padding, 0 to 1."""
        return 1 - self.used / self.padded if self.padded else 0.0


@dataclass(slots=True)
class Counts:
    """What a step counts while it runs; the fields are those of `StepStatistics`."""

    calls: int = 0
    eager: int = 0
    replayed: int = 0
    built: int = 0
    launches_eager: int = 0
    launches_replayed: int = 0
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
        self.launches_replayed += held.launches
        self.used += held.launches * held.used
        self.padded += held.launches * held.padded

    def statistics(
        self, quarantined: dict[str, str], last_check: CheckReport | None
    ) -> StepStatistics:
        """A snapshot."""
        return StepStatistics(
            self.calls,
            self.eager,
            self.replayed,
            self.built,
            self.launches_eager,
            self.launches_replayed,
            dict(self.reasons),
            quarantined,
            self.verified,
            self.used,
            self.padded,
            last_check,
        )
