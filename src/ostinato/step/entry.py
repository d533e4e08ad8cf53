"""All that is known of a key of a cache: its graph while it has one, and what happened to it."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ostinato.driver.forking import new_lock
from ostinato.driver.launcher import Seat
from ostinato.graph import GraphExec, Submission
from ostinato.step.budget import Footprint
from ostinato.step.limits import Refusal
from ostinato.step.policy import Reason
from ostinato.step.statistics import Evictions, KeyStatistics

if TYPE_CHECKING:
    from ostinato.driver.launcher import Repeat

Left = Literal["asked", "touching", "budget", "count", "memory", "replaced", "closed"]
"""Why a graph leaves; all but the last two are evictions."""


class CachedGraph(Seat):
    """A graph in a cache.  Its seat has the leases, whether it is leaving, and how often it was
    used."""

    __slots__ = (
        *("__weakref__", "at", "capture_seconds", "changing", "checked", "executable", "footprint"),
        "repeats",
    )

    def __init__(
        self, executable: GraphExec, footprint: Footprint, capture_seconds: float | None
    ) -> None:
        Seat.__init__(self)
        self.executable = executable
        self.footprint = footprint
        self.capture_seconds = capture_seconds
        """What its capture took; None if it was installed ready-made."""
        self.at = 0
        """When it was last used or put in: a count of the table's.  Not its place in the
        dictionary, which would need the key's `__hash__` again."""
        self.changing: AbstractContextManager[bool] = new_lock()
        """Held from a change of the executable to its launch."""
        self.checked: weakref.WeakKeyDictionary[object, frozenset[Hashable]] = (
            weakref.WeakKeyDictionary()
        )
        """By whose work it was compared with, the sizes that had padding then: works that share a
        key may differ."""
        self.repeats: set[Repeat] = set()
        """What launches it without a look at its entry; cooled when it leaves."""

    def cool(self) -> None:
        """Ends all short ways to it."""
        while self.repeats:
            self.repeats.pop().cool()

    def is_checked(self, by: object, padded: frozenset[Hashable]) -> bool:
        """Whether it was compared with that one's work, with padding of each size that has some
        now."""
        known = self.checked.get(by)
        return known is not None and padded <= known

    def note_check(self, by: object, padded: frozenset[Hashable]) -> None:
        self.checked[by] = padded | self.checked.get(by, frozenset())


@dataclass(slots=True, eq=False)
class Entry:
    """One key, also while it has no graph."""

    key: Hashable
    graph: CachedGraph | None = None
    forgotten: bool = False
    """Whether the cache has dropped it, for newer keys."""

    # --- what the cache counts
    hits_before: int = 0
    """Uses of the graphs that left."""
    misses: int = 0
    captures: int = 0
    failures: int = 0
    capture_seconds: float = 0.0
    installed: int = 0
    captured_at: deque[int] = field(default_factory=lambda: deque(maxlen=1))
    """How many uses there were when each of the last captures began."""
    left: Counter[Left] = field(default_factory=Counter)
    refused: Counter[Refusal] = field(default_factory=Counter)

    # --- what an engine knows
    reason: tuple[Reason, str] | None = None
    """Why it is not replayed (quarantine), and the text of the error."""
    refusals: int = 0
    """Refused replays in a row."""
    disturbed: int = 0
    """Builds in a row that something else than the work broke;"""
    wait: int = 0
    """how many calls run eagerly before the next one; and"""
    disturbance: tuple[Reason, str] | None = None
    """what broke the last one."""
    looked: bool = False
    """Whether a store was asked for its graph."""
    submitted: tuple[Submission, ...] | None = None
    """What the last warm-up submitted."""

    @property
    def hits(self) -> int:
        """Uses that found a graph."""
        return self.hits_before + (0 if self.graph is None else self.graph.uses)

    def note_capture(self, most: int) -> None:
        """Notes that a capture begins; keeps the last `most` of these."""
        if self.captured_at.maxlen != most:
            self.captured_at = deque(self.captured_at, most)
        self.captured_at.append(self.hits + self.misses)

    def forgive(self) -> None:
        """Forgets why it was not replayed."""
        self.reason = self.disturbance = None
        self.refusals = self.disturbed = self.wait = 0

    def statistics(self, charge: Footprint | None) -> KeyStatistics:
        """The line of the key.  `charge`: the bytes of its graph, if it has one."""
        return KeyStatistics(
            self.key,
            hits=self.hits,
            nbytes=0 if charge is None else charge.nbytes,
            nbytes_source=None if charge is None else charge.source,
            last_capture_seconds=None if self.graph is None else self.graph.capture_seconds,
            misses=self.misses,
            captures=self.captures,
            capture_failures=self.failures,
            refused=self.refusals_by_reason,
            capture_seconds=self.capture_seconds,
            installed=self.installed,
            replaced=self.left["replaced"],
            evictions=self.evictions,
        )

    @property
    def refusals_by_reason(self) -> dict[str, int]:
        """Captures that the limits refused."""
        return {reason.value: count for reason, count in self.refused.items()}

    @property
    def evictions(self) -> Evictions:
        """How many graphs left the cache, by reason."""
        left = self.left
        return Evictions(
            left["asked"], left["touching"], left["budget"], left["count"], left["memory"]
        )
