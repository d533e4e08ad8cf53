"""Graphs by key: which sizes share a graph, how many bytes graphs may take, and when they are
evicted."""

from ostinato.graph.manifest import Touch
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
from ostinato.step.limits import CaptureLimits, Refusal, Refused

__all__ = [
    "Buckets",
    "CacheStatistics",
    "CaptureLimits",
    "Evictions",
    "ExplicitBuckets",
    "Footprint",
    "FootprintSource",
    "GraphCache",
    "KeyStatistics",
    "Multiples",
    "PowersOfTwo",
    "Refusal",
    "Refused",
    "Touch",
    "capacity_class",
    "parse_bytes",
]
