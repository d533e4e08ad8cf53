"""Graphs by key: which sizes share a graph, how many bytes graphs may take, and when they are
evicted."""

from ostinato.cache.buckets import (
    Buckets,
    ExplicitBuckets,
    Multiples,
    PowersOfTwo,
    capacity_class,
)
from ostinato.cache.budget import Footprint, FootprintSource, parse_bytes
from ostinato.cache.graph_cache import GraphCache
from ostinato.cache.limits import CaptureLimits, Refusal, Refused
from ostinato.cache.statistics import CacheStatistics, Evictions, KeyStatistics
from ostinato.graph.manifest import Touch

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
