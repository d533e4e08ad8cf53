"""What a graphed function counts, and the table that explains it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ostinato.lowlevel import table
from ostinato.step import CacheStatistics


@dataclass(frozen=True, slots=True)
class GraphedKeyStatistics:
    """What happened to one key of a graphed function.

    `us` is the median host time of a replayed call in microseconds, of the latest calls that were
    timed (one in 16); None before one was.  `nbytes` are the device bytes that the cache charges.
    """

    name: str
    key: str
    """The arguments, in words."""
    decision: str
    """"warmed up", "replayed", "evicted" or "eager"."""
    reason: str
    """Why its calls run eagerly; empty if they do not."""
    calls: int
    eager: int
    captures: int
    restored: int
    """How often its graph was read from a file instead."""
    replays: int
    rebound: int
    verified: int
    us: float | None
    nbytes: int
    eager_reasons: Mapping[str, int]
    capture_reasons: Mapping[str, int]
    """Why it was captured: the first time, and why again instead of bound to other memory."""
    broken: int
    """Captures that something else than the function broke, such as a `synchronize()` of another
    thread, or for which the device had no memory."""


@dataclass(frozen=True, slots=True)
class GraphedStatistics:
    """What a graphed function did so far.

    `nested` calls came inside of a capture that was under way, and ran the function plainly.
    Calls that raised are in `calls` alone.
    """

    calls: int
    eager: int
    captures: int
    restored: int
    replays: int
    rebound: int
    verified: int
    broken: int
    nested: int
    quarantined: Mapping[str, str]
    """The reason for each key that runs eagerly from now on."""
    eager_reasons: Mapping[str, int]
    capture_reasons: Mapping[str, int]
    keys: tuple[GraphedKeyStatistics, ...]
    cache: CacheStatistics
    not_restored: Mapping[str, int]
    """Why keys were not restored from the store."""

    @classmethod
    def of(
        cls,
        keys: tuple[GraphedKeyStatistics, ...],
        *,
        nested: int,
        cache: CacheStatistics,
        not_restored: Mapping[str, int],
    ) -> Self:
        """The sums over keys."""
        eager_reasons: Counter[str] = Counter()
        capture_reasons: Counter[str] = Counter()
        for each in keys:
            eager_reasons.update(each.eager_reasons)
            capture_reasons.update(each.capture_reasons)
        return cls(
            calls=sum(each.calls for each in keys) + nested,
            eager=sum(each.eager for each in keys),
            captures=sum(each.captures for each in keys),
            restored=sum(each.restored for each in keys),
            replays=sum(each.replays for each in keys),
            rebound=sum(each.rebound for each in keys),
            verified=sum(each.verified for each in keys),
            broken=sum(each.broken for each in keys),
            nested=nested,
            quarantined={each.name: each.reason for each in keys if each.reason},
            eager_reasons=dict(eager_reasons),
            capture_reasons=dict(capture_reasons),
            keys=keys,
            cache=cache,
            not_restored=not_restored,
        )


def explained(keys: Sequence[GraphedKeyStatistics]) -> str:
    """A table: each key, what is done with its calls, and why."""
    rows = [["key", "decision", "captures", "replays", "eager", "µs", "bytes", "reason"]]
    for each in keys:
        us = "-" if each.us is None else f"{each.us:.1f}"
        counts = map(str, (each.captures, each.replays, each.eager))
        reason = each.reason or _again(each)
        rows.append([each.key, each.decision, *counts, us, str(each.nbytes), reason])
    return table(rows)


def _again(key: GraphedKeyStatistics) -> str:
    """Why a key was captured more than once."""
    again = [f"{why} ({count}x)" for why, count in [*key.capture_reasons.items()][1:]]
    if key.broken:
        again.append(f"a capture failed that the function did not break ({key.broken}x)")
    return f"captured again: {'; '.join(again)}" if again else ""
