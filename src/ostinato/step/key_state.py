"""What a graphed step keeps of one key besides its graph."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar

from ostinato.graph import GraphExec, Submission
from ostinato.step.policy import Reason
from ostinato.step.statistics import Counts

K = TypeVar("K")
V = TypeVar("V")

TIMED_EVERY = 32
"""One replay in so many of a key is timed, and never its first."""
_TIMES = 256
"""So many times of a key are kept, the latest."""
_REMEMBERED = 4096
"""How many sizes and keys a step keeps records of; the oldest are dropped."""


@dataclass(slots=True, eq=False)
class KeyState:
    """The records of one key, besides its graph."""

    runs: int = 0
    replays: int = 0
    refusals: int = 0
    looked: bool = False
    """Whether the step's store was asked for its graph."""
    quarantine: tuple[Reason, str] | None = None
    submitted: tuple[Submission, ...] | None = None
    """What the last warm-up submitted."""
    checked: weakref.ref[GraphExec] | None = None
    """The graph that was checked."""
    checked_padded: frozenset[str] = frozenset()
    """The sizes with which it was checked when they had padding."""
    counts: Counts = field(default_factory=Counts)
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMES))
    """Microseconds of host time of the replays that were timed."""

    def is_checked(self, executable: GraphExec, padded: frozenset[str]) -> bool:
        """Whether this graph was checked, with padding of each size that has some now."""
        known = self.checked is not None and self.checked() is executable
        return known and padded <= self.checked_padded

    def note_check(self, executable: GraphExec, padded: frozenset[str]) -> None:
        again = self.checked is not None and self.checked() is executable
        self.checked_padded = padded | self.checked_padded if again else padded
        self.checked = weakref.ref(executable)


def remember(table: dict[K, V], key: K, value: V) -> V | None:
    """Puts an entry into a table; takes the oldest out, and returns it, if the table is full."""
    table[key] = value
    return table.pop(next(iter(table))) if len(table) > _REMEMBERED else None
