"""The statistics of a graphed function, and the table that explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ostinato.lowlevel import table
from ostinato.step import CacheStatistics, StepKeyStatistics, StepStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphedStatistics(StepStatistics):
    """Counts of a graphed function since it was made."""

    cache: CacheStatistics
    not_restored: Mapping[str, int]
    """Reasons why keys were not restored from the store, with counts."""


def explained(keys: Sequence[StepKeyStatistics]) -> str:
    """Returns a table: each key, what is done with its calls, and why."""
    rows = [["key", "decision", "captures", "replays", "eager", "µs", "bytes", "reason"]]
    for each in keys:
        us = f"{1e6 * each.seconds.p50:.1f}" if each.seconds.count else "-"
        counts = map(str, (each.captures, each.replays, each.eager))
        reason = each.reason or _again(each)
        rows.append([each.words, each.decision, *counts, us, str(each.nbytes), reason])
    return table(rows)


def _again(key: StepKeyStatistics) -> str:
    """Describes why a key was captured more than once; empty if it was not."""
    again = [f"{why} ({count}x)" for why, count in [*key.capture_reasons.items()][1:]]
    if key.broken:
        again.append(f"a capture failed that the function did not break ({key.broken}x)")
    return f"captured again: {'; '.join(again)}" if again else ""
