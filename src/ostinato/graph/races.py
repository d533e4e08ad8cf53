"""Finds two operations of a graph that use the same memory and that no path of edges orders."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ostinato.driver.api import NodeHandle
from ostinato.driver.stream import Operation
from ostinato.graph.graph import Graph
from ostinato.graph.order import conflict

__all__ = ["unordered"]


def unordered(graph: Graph, operations: Sequence[Operation]) -> tuple[Operation, Operation] | None:
    """The first two operations that conflict and that no path orders, or None.

    `operations` are those that the graph was captured from, in the order of their submission, with
    the memory that they read and write.  Also None if their names are not those of the graph's
    nodes.  Operations whose memory is not known are left out.
    """
    nodes = [handle for handle, label in graph.labels.items() if label.operation is not None]
    names = [label.operation.name for label in graph.labels.values() if label.operation is not None]
    edges = graph.edges
    if len(edges) == len(nodes) - 1 and _is_chain(nodes, {e.source: e.target for e in edges}):
        return None
    if names != [operation.name for operation in operations]:
        return None
    reached = _reached(graph, nodes)
    for later, second in enumerate(operations):
        for earlier, first in enumerate(operations[:later]):
            ordered = reached[nodes[later]] >> earlier & 1 or reached[nodes[earlier]] >> later & 1
            known = None not in (first.reads, first.writes, second.reads, second.writes)
            if known and not ordered and conflict(first, second):
                return first, second
    return None


def _is_chain(nodes: Sequence[NodeHandle], after: dict[NodeHandle, NodeHandle]) -> bool:
    return all(after.get(one) == other for one, other in itertools.pairwise(nodes))


def _reached(graph: Graph, nodes: Sequence[NodeHandle]) -> dict[NodeHandle, int]:
    """For each node of the graph, the indices (as bits) of those of `nodes` that come before it."""
    place = {node: index for index, node in enumerate(nodes)}
    sources: dict[NodeHandle, list[NodeHandle]] = {
        node: [] for node in graph.context.driver.graph_nodes(graph.handle)
    }
    for edge in graph.edges:
        sources[edge.target].append(edge.source)
    reached: dict[NodeHandle, int] = {}
    for node in sources:
        _visit(node, sources, place, reached)
    return reached


def _visit(
    node: NodeHandle,
    sources: dict[NodeHandle, list[NodeHandle]],
    place: dict[NodeHandle, int],
    reached: dict[NodeHandle, int],
) -> None:
    """Fills `reached` for a node, after it did so for all nodes that it depends on."""
    stack = [node]
    while stack:
        top = stack[-1]
        waiting = [source for source in sources[top] if source not in reached]
        if waiting:
            stack += waiting
            continue
        stack.pop()
        bits = 0
        for source in sources[top]:
            bits |= reached[source] | (1 << place[source] if source in place else 0)
        reached[top] = bits
