"""Explains graphs and replays: the first difference, operations without an order, times."""

from ostinato.explain.difference import (
    DifferenceCause,
    FirstDifference,
    first_difference,
    first_drift,
)
from ostinato.explain.races import unordered
from ostinato.explain.times import Percentiles, ReplayEvent, ReplayProfile
from ostinato.graph.flat import FlatNode
from ostinato.graph.timing import NodeTime, NodeTimes

__all__ = [
    "DifferenceCause",
    "FirstDifference",
    "FlatNode",
    "NodeTime",
    "NodeTimes",
    "Percentiles",
    "ReplayEvent",
    "ReplayProfile",
    "first_difference",
    "first_drift",
    "unordered",
]
