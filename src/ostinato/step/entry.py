"""The entry of a cache's key: its graph while it has one, and the counts of what happened to it."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

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
"""The reason why a graph leaves; all but the last two are evictions."""


class CachedGraph(Seat):
    """A graph in a cache.  The base class holds the number of leases, whether the graph is leaving,
    and the number of its uses."""

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
        """Duration of its capture; None if it was installed ready-made."""
        self.at = 0
        """The table's count of uses when this graph was last used or put in.  (Its place in the
        dictionary is not the order of use: moving it would need the key's `__hash__` again.)"""
        self.changing: AbstractContextManager[bool] = new_lock()
        """Held from a change of the executable until its launch."""
        self.checked: weakref.WeakKeyDictionary[object, frozenset[Hashable]] = (
            weakref.WeakKeyDictionary()
        )
        """The sizes that had padding in checks, by the engine whose work was compared: engines
        that share a key may have different works."""
        self.repeats: set[Repeat] = set()
        """Launchers that skip the lookup of the entry; cooled when the graph leaves."""

    def cool(self) -> None:
        """Cools all launchers of this graph (`repeats`)."""
        while self.repeats:
            self.repeats.pop().cool()

    def is_checked(self, by: object, padded: frozenset[Hashable]) -> bool:
        """True if the graph was compared with work of the engine `by`, with padding in each size
        of `padded`."""
        known = self.checked.get(by)
        return known is not None and padded <= known

    def note_check(self, by: object, padded: frozenset[Hashable]) -> None:
        self.checked[by] = padded | self.checked.get(by, frozenset())


@dataclass(slots=True, eq=False)
class Entry:
    """The record of one key, also while it has no graph."""

    key: Hashable
    graph: CachedGraph | None = None
    forgotten: bool = False
    """True once the cache has dropped the entry, for newer keys."""

    # --- counted by the cache
    hits_before: int = 0
    """Uses of the graphs that left."""
    misses: int = 0
    captures: int = 0
    failures: int = 0
    capture_seconds: float = 0.0
    installed: int = 0
    captured_at: deque[int] = field(default_factory=lambda: deque(maxlen=1))
    """The number of uses (hits and misses) at the begin of each of the last captures."""
    left: Counter[Left] = field(default_factory=Counter)
    refused: Counter[Refusal] = field(default_factory=Counter)

    # --- set by an engine
    reason: tuple[Reason, str] | None = None
    """The reason why the key is not replayed (quarantine), with the text of the error."""
    refusals: int = 0
    """The number of refused replays in a row."""
    disturbed: int = 0
    """The number of builds in a row that failed for a reason outside the work."""
    wait: int = 0
    """The number of calls that still run eagerly before the next build."""
    disturbance: tuple[Reason, str] | None = None
    """The reason why the last of these builds failed, with its text."""
    looked: bool = False
    """True once the store has been searched for a graph of this key."""
    submitted: tuple[Submission, ...] | None = None
    """The operations that the last warm-up submitted."""

    @property
    def hits(self) -> int:
        """The number of uses that found a graph."""
        return self.hits_before + (0 if self.graph is None else self.graph.uses)

    def note_capture(self, most: int) -> None:
        """Notes that a capture begins; keeps the notes of the last `most` captures."""
        if self.captured_at.maxlen != most:
            self.captured_at = deque(self.captured_at, most)
        self.captured_at.append(self.hits + self.misses)

    def forgive(self) -> None:
        """Clears the quarantine and the counts of failures."""
        self.reason = self.disturbance = None
        self.refusals = self.disturbed = self.wait = 0

    def counts(self) -> dict[str, Any]:
        """Returns the counts that the records of a key and of all keys together have in common."""
        left = self.left
        return {
            "misses": self.misses,
            "captures": self.captures,
            "capture_failures": self.failures,
            "refused": {reason.value: count for reason, count in self.refused.items()},
            "capture_seconds": self.capture_seconds,
            "installed": self.installed,
            "replaced": left["replaced"],
            "evictions": Evictions(
                left["asked"], left["touching"], left["budget"], left["count"], left["memory"]
            ),
        }

    def statistics(self, charge: Footprint | None) -> KeyStatistics:
        """Returns the record of the key.  `charge`: the bytes of its graph, if it has one."""
        return KeyStatistics(
            **self.counts(),
            key=self.key,
            hits=self.hits,
            nbytes=0 if charge is None else charge.nbytes,
            nbytes_source=None if charge is None else charge.source,
            last_capture_seconds=None if self.graph is None else self.graph.capture_seconds,
        )
