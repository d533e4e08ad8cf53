"""Explains graphs and replays: the first difference, operations without an order, times."""

from ostinato.explain.difference import (
    DifferenceCause,
    DifferentNode,
    FirstDifference,
    first_difference,
    first_drift,
)
from ostinato.explain.races import unordered
from ostinato.explain.times import Percentiles, ReplayEvent, ReplayProfile
from ostinato.graph.timing import NodeTime, NodeTimes

__all__ = [
    "DifferenceCause",
    "DifferentNode",
    "FirstDifference",
    "NodeTime",
    "NodeTimes",
    "Percentiles",
    "ReplayEvent",
    "ReplayProfile",
    "first_difference",
    "first_drift",
    "unordered",
]
