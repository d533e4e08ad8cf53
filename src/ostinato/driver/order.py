"""An order of the nodes of a graph that its edges allow."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def in_order(count: int, edges: Sequence[tuple[int, int]]) -> list[int] | None:
    """Returns the nodes in topological order; None if the edges form a cycle.

    Nodes and the ends of edges are indices.  Where there is a choice, the smallest comes first, so
    nodes that are in order already stay so.
    """
    if all(source < target for source, target in edges):
        return list(range(count))
    waiting = [0] * count
    after: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        waiting[target] += 1
        after[source].append(target)
    ready = [node for node in range(count) if not waiting[node]]
    order: list[int] = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for follower in after[node]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, follower)
    return order if len(order) == count else None
