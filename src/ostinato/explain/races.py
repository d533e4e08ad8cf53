"""Finds two operations of a graph that use the same memory and that no path of edges orders."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from graphlib import TopologicalSorter

from ostinato.driver.api import (
    ConditionalNodeParams,
    KernelNodeParams,
    MemoryRange,
    NodeHandle,
    NodeKind,
    NodeParams,
)
from ostinato.driver.signature import Access
from ostinato.driver.stream import Operation
from ostinato.errors import DriverError
from ostinato.graph.frozen import graphs_inside
from ostinato.graph.graph import Graph
from ostinato.graph.order import conflict
from ostinato.memory import Buffer


def unordered(graph: Graph, operations: Sequence[Operation]) -> tuple[Operation, Operation] | None:
    """Returns the first two operations that conflict and that no path orders, or None.

    `operations`: those that the graph was captured from, in the order of submission, with the
    memory that they read and write.  If the graph has other nodes, such as some added by hand, an
    operation belongs to a node with the same parameters, and a conditional node stands for the
    operations in its bodies.  Operations whose memory is not known are left out.
    """
    every = graph.context.driver.graph_nodes(graph.handle)
    edges = graph.edges()
    after = {edge.source: edge.target for edge in edges}
    pairs = itertools.pairwise(every)
    if len(edges) == len(every) - 1 and all(after.get(one) == other for one, other in pairs):
        return None  # a chain
    placed = _by_name(graph, every, operations) or _by_params(graph, every, operations)
    nodes, found = [node for node, _ in placed], [operation for _, operation in placed]
    reached = _reached(graph, nodes)
    for later, second in enumerate(found):
        for earlier, first in enumerate(found[:later]):
            ordered = reached[nodes[later]] >> earlier & 1 or reached[nodes[earlier]] >> later & 1
            known = None not in (first.reads, first.writes, second.reads, second.writes)
            if known and not ordered and conflict(first, second):
                return first, second
    return None


_Placed = tuple[NodeHandle, Operation]


def _by_name(
    graph: Graph, every: Sequence[NodeHandle], operations: Sequence[Operation]
) -> list[_Placed]:
    """Pairs each operation with its node, if all nodes of work were captured from these operations
    alone; else returns nothing."""
    made = [(node, label.operation) for node, label in graph.labels.items()]
    known = [(node, operation) for node, operation in made if operation is not None]
    nodes = [node for node, _ in known]
    others = {*every} - {*nodes}
    if not {*nodes} <= {*every} or any(not _idle(graph, node) for node in others):
        return []
    if [operation.name for _, operation in known] != [operation.name for operation in operations]:
        return []
    return list(zip(nodes, operations, strict=True))


def _idle(graph: Graph, node: NodeHandle) -> bool:
    """True if a node touches no memory: a capture adds such nodes for events."""
    return graph.context.driver.node_kind(node) in (NodeKind.EMPTY, NodeKind.EVENT_RECORD)


def _by_params(
    graph: Graph, every: Sequence[NodeHandle], operations: Sequence[Operation]
) -> list[_Placed]:
    """Pairs each node with the first remaining operation of the same parameters; adds the
    conditional nodes."""
    left = list(operations)
    placed: list[_Placed] = []
    for node in every:
        try:
            params = graph.context.driver.node_params(node)
        except DriverError:
            continue
        if isinstance(params, ConditionalNodeParams):
            reads, writes = _in_bodies(graph, params)
            placed.append((node, Operation(params, params.kind.name.lower(), reads, writes)))
            continue
        at = next((i for i, one in enumerate(left) if _alike(one.params, params)), None)
        if at is not None:
            placed.append((node, left.pop(at)))
    return placed


def _alike(one: NodeParams, other: NodeParams) -> bool:
    if isinstance(one, KernelNodeParams) and isinstance(other, KernelNodeParams):
        return (one.function, one.arguments.data) == (other.function, other.arguments.data)
    return one == other


_Ranges = tuple[MemoryRange, ...] | None


def _in_bodies(graph: Graph, params: NodeParams) -> tuple[_Ranges, _Ranges]:
    """Returns the memory that operations inside a node read and write; None if it is not known."""
    reads: _Ranges = ()
    writes: _Ranges = ()
    driver = graph.context.driver
    for inner in graphs_inside(params):
        for node in driver.graph_nodes(inner):
            held = driver.node_params(node)
            label = graph.labels.get(node)
            if graphs_inside(held):
                touched = _in_bodies(graph, held)
            else:
                touched = _touched(graph, None if label is None else label.operation)
            reads = None if reads is None or touched[0] is None else reads + touched[0]
            writes = None if writes is None or touched[1] is None else writes + touched[1]
    return reads, writes


def _touched(graph: Graph, operation: Operation | None) -> tuple[_Ranges, _Ranges]:
    """Returns the memory that an operation reads and writes, if need be from the kernel's
    signature."""
    if operation is None:
        return None, None
    params, signature = operation.params, operation.signature
    if operation.reads is not None or not isinstance(params, KernelNodeParams) or not signature:
        return operation.reads, operation.writes
    if any(parameter.type == "bytes" for parameter in signature.parameters):
        return None, None  # a struct may hold pointers
    given = {kept.address: kept.range for kept in operation.keep if isinstance(kept, Buffer)}
    touched: dict[Access, list[MemoryRange]] = {Access.READ: [], Access.WRITE: []}
    for index in signature.pointers:
        address = int.from_bytes(params.arguments.raw(index), "little")
        memory = given.get(address) or graph.context.driver.memory_range(address)
        if address and memory is None:
            return None, None
        for access, ranges in touched.items():
            if memory is not None and access in signature.parameters[index].access:
                ranges.append(memory)
    return tuple(touched[Access.READ]), tuple(touched[Access.WRITE])


def _reached(graph: Graph, nodes: Sequence[NodeHandle]) -> dict[NodeHandle, int]:
    """Returns for each node of the graph the nodes of `nodes` before it, by index, as bits."""
    place = {node: index for index, node in enumerate(nodes)}
    sources: dict[NodeHandle, list[NodeHandle]] = {
        node: [] for node in graph.context.driver.graph_nodes(graph.handle)
    }
    for edge in graph.edges():
        sources[edge.target].append(edge.source)
    reached: dict[NodeHandle, int] = {}
    for node in TopologicalSorter(sources).static_order():
        bits = 0
        for source in sources[node]:
            bits |= reached[source] | (1 << place[source] if source in place else 0)
        reached[node] = bits
    return reached
