"""Steps: which sizes share a graph, the cache of graphs by key, the step that becomes graphs, the
policy behind it, and its checks.

Not here: one graph and its executable (`ostinato.graph`), graph files (`ostinato.graphfile`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.graph.words import Touch
from ostinato.step.buckets import (
    Buckets,
    ExplicitBuckets,
    Multiples,
    PowersOfTwo,
    capacity_class,
)
from ostinato.step.budget import Footprint, FootprintSource, parse_bytes
from ostinato.step.cache import GraphCache
from ostinato.step.cache_statistics import CacheStatistics, Evictions, KeyStatistics
from ostinato.step.graphed_step import GraphedStep
from ostinato.step.held import HeldReplay
from ostinato.step.limits import CaptureLimits, Refusal, Refused
from ostinato.step.policy import Action, Decision, Reason, Situation, decide
from ostinato.step.sizes import Sizes, StepKey
from ostinato.step.slots import Role, Slot
from ostinato.step.statistics import StepKeyStatistics, StepStatistics

if TYPE_CHECKING:
    from ostinato.step.check import Cause, CheckReport, Finding

__all__ = [
    "Action",
    "Buckets",
    "CacheStatistics",
    "CaptureLimits",
    "Cause",
    "CheckReport",
    "Decision",
    "Evictions",
    "ExplicitBuckets",
    "Finding",
    "Footprint",
    "FootprintSource",
    "GraphCache",
    "GraphedStep",
    "HeldReplay",
    "KeyStatistics",
    "Multiples",
    "PowersOfTwo",
    "Reason",
    "Refusal",
    "Refused",
    "Role",
    "Situation",
    "Sizes",
    "Slot",
    "StepKey",
    "StepKeyStatistics",
    "StepStatistics",
    "Touch",
    "capacity_class",
    "decide",
    "parse_bytes",
]


def __getattr__(name: str) -> object:
    """What only checks need is loaded when it is first used."""
    if name not in ("Cause", "CheckReport", "Finding"):
        raise AttributeError(f"module 'ostinato.step' has no attribute {name!r}")
    from ostinato.step import check

    return getattr(check, name)
