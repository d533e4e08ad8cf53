"""Joins on the device, each shape captured once and replayed with new tables.

    result = hash_join(left, right, on="key")              # pairs of row numbers
    index = build_index(right, on="key")                   # for many joins with one table
    pending = joiner.submit(left, index, on="key")         # does not wait

The algorithm, its costs and limits are in docs/relational.md.
"""

from ostinato.relational.columns import KeyColumns
from ostinato.relational.joiner import Joiner, JoinIndex, PendingJoin, build_index, hash_join
from ostinato.relational.keys import IndexKey, JoinKey, ScanTopology, scan_topology
from ostinato.relational.results import JoinResult, JoinStatistics

__all__ = [
    "IndexKey",
    "JoinIndex",
    "JoinKey",
    "JoinResult",
    "JoinStatistics",
    "Joiner",
    "KeyColumns",
    "PendingJoin",
    "ScanTopology",
    "build_index",
    "hash_join",
    "scan_topology",
]
