"""Explains graphs and replays: faults, pointers, the first difference, missing orders, times."""

from ostinato.explain.black_box import BlackBox, black_box
from ostinato.explain.difference import (
    DifferenceCause,
    FirstDifference,
    first_difference,
    first_drift,
)
from ostinato.explain.races import unordered
from ostinato.explain.report import BlackBoxReport, NodeReport, ReplayReport
from ostinato.explain.times import Percentiles, ReplayEvent, ReplayProfile
from ostinato.graph.audit import AuditReport, KnownMemory, PointerReport, add_memory_source
from ostinato.graph.flat import FlatNode
from ostinato.graph.timing import NodeSampler, NodeTime, NodeTimes

__all__ = [
    "AuditReport",
    "BlackBox",
    "BlackBoxReport",
    "DifferenceCause",
    "FirstDifference",
    "FlatNode",
    "KnownMemory",
    "NodeReport",
    "NodeSampler",
    "NodeTime",
    "NodeTimes",
    "Percentiles",
    "PointerReport",
    "ReplayEvent",
    "ReplayProfile",
    "ReplayReport",
    "add_memory_source",
    "black_box",
    "first_difference",
    "first_drift",
    "unordered",
]
