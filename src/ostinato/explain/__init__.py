"""Explains graphs and replays: the first difference, operations without an order, times."""

from ostinato.explain.difference import first_drift
from ostinato.explain.races import unordered
from ostinato.explain.times import Percentiles, ReplayEvent, ReplayProfile

__all__ = ["Percentiles", "ReplayEvent", "ReplayProfile", "first_drift", "unordered"]
