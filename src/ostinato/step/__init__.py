"""Steps: which sizes share a graph, the cache of graphs by key, the step that becomes graphs, the
policy behind it, and its checks.

Not here: one graph and its executable (`ostinato.graph`), graph files (`ostinato.graphfile`).
"""

from __future__ import annotations

from ostinato.graph.words import Touch
from ostinato.step.buckets import (
    Buckets,
    ExplicitBuckets,
    Multiples,
    PowersOfTwo,
    capacity_class,
)
from ostinato.step.budget import Footprint, FootprintSource
from ostinato.step.cache import GraphCache
from ostinato.step.check import Cause, CheckReport, Finding
from ostinato.step.graphed_step import GraphedStep
from ostinato.step.held import HeldReplay
from ostinato.step.limits import CaptureLimits, Refusal, Refused
from ostinato.step.policy import Action, Decision, Reason, Situation, decide
from ostinato.step.sizes import Sizes, StepKey
from ostinato.step.slots import Slot
from ostinato.step.statistics import (
    CacheStatistics,
    Evictions,
    KeyStatistics,
    StepKeyStatistics,
    StepStatistics,
)

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
    "Situation",
    "Sizes",
    "Slot",
    "StepKey",
    "StepKeyStatistics",
    "StepStatistics",
    "Touch",
    "capacity_class",
    "decide",
]
