"""The CUDA driver's graphs: making, cloning, listing, edges."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref

from ostinato.driver.api import (
    ConditionalNodeParams,
    Edge,
    EdgeData,
    EdgeType,
    GraphHandle,
    NodeHandle,
    NodeKind,
)
from ostinato.driver.cuda.core import CudaCalls
from ostinato.driver.cuda.structs import EdgeDataStruct
from ostinato.errors import DriverError, Status

__all__ = ["GraphCalls", "edge_array"]


_MEMORY_NODES = "nodes and edges cannot leave a graph that has alloc or free nodes"


def edge_array(edge_data: Sequence[EdgeData]) -> ctypes.Array[EdgeDataStruct]:
    """Edge data as the driver takes it."""
    array = (EdgeDataStruct * len(edge_data))()
    for slot, data in zip(array, edge_data, strict=True):
        slot.from_port, slot.to_port, slot.type = data.from_port, data.to_port, int(data.type)
    return array


def _edge_data(raw: EdgeDataStruct) -> EdgeData:
    return EdgeData(raw.from_port, raw.to_port, EdgeType(raw.type))


class GraphCalls(CudaCalls):
    """Graphs and their edges."""

    # A driver before 13.2 cannot read a conditional node back, so those that we made are kept
    # here.  A handle may be given again to a foreign node once ours is gone: both tables forget
    # with every destroy call of ours.
    _conditionals: dict[int, ConditionalNodeParams]
    _conditionals_in: dict[int, set[int]]
    """Graph to its conditional nodes."""

    def graph_create(self) -> GraphHandle:
        return GraphHandle(self._handle("graph_create", "cuGraphCreate", 0))

    def graph_destroy(self, graph: GraphHandle) -> None:
        self._call("graph_destroy", "cuGraphDestroy", graph)
        self._forget_graph(graph)

    def graph_clone(self, graph: GraphHandle) -> GraphHandle:
        return GraphHandle(self._handle("graph_clone", "cuGraphClone", graph))

    def node_in_clone(self, node: NodeHandle, clone: GraphHandle) -> NodeHandle:
        return NodeHandle(self._handle("node_in_clone", "cuGraphNodeFindInClone", node, clone))

    def graph_nodes(self, graph: GraphHandle) -> tuple[NodeHandle, ...]:
        count = ctypes.c_size_t()
        self._call("graph_nodes", "cuGraphGetNodes", graph, None, byref(count))
        if not count.value:
            return ()
        nodes = (ctypes.c_uint64 * count.value)()
        self._call("graph_nodes", "cuGraphGetNodes", graph, nodes, byref(count))
        return tuple(NodeHandle(node) for node in nodes[: count.value])

    def graph_edges(self, graph: GraphHandle) -> tuple[Edge, ...]:
        # Always with edge data: without a place for it the query fails (LOSSY_QUERY) where there
        # is programmatic launch.
        count = ctypes.c_size_t()
        self._call("graph_edges", "cuGraphGetEdges_v2", graph, None, None, None, byref(count))
        if not count.value:
            return ()
        sources = (ctypes.c_uint64 * count.value)()
        targets = (ctypes.c_uint64 * count.value)()
        data = (EdgeDataStruct * count.value)()
        self._call("graph_edges", "cuGraphGetEdges_v2", graph, sources, targets, data, byref(count))
        return tuple(
            Edge(NodeHandle(sources[i]), NodeHandle(targets[i]), _edge_data(data[i]))
            for i in range(count.value)
        )

    def graph_add_edges(self, graph: GraphHandle, edges: Sequence[Edge]) -> None:
        if not edges:
            return
        # The driver may notice a cycle only when the graph is instantiated.
        if _has_cycle([*self.graph_edges(graph), *edges]):
            raise self._error(
                Status.INVALID_VALUE, "graph_add_edges", "these edges would close a cycle"
            )
        self._change_edges("graph_add_edges", "cuGraphAddDependencies_v2", graph, edges)

    def graph_remove_edges(self, graph: GraphHandle, edges: Sequence[Edge]) -> None:
        if not edges:
            return
        seam = "graph_remove_edges"
        try:
            self._change_edges(seam, "cuGraphRemoveDependencies_v2", graph, edges)
        except DriverError as error:
            if any(self._is_memory_node(seam, node) for node in self.graph_nodes(graph)):
                raise self._error(Status.NOT_PERMITTED, seam, _MEMORY_NODES) from error
            raise

    def graph_remove_node(self, node: NodeHandle) -> None:
        seam = "graph_remove_node"
        status = self._status(seam, "cuGraphDestroyNode", node)
        if status:
            # cuda.h says only "an error", and there is no way from a node to its graph.
            if self._is_memory_node(seam, node):
                raise self._error(Status.NOT_PERMITTED, seam, _MEMORY_NODES, node=node)
            raise self._error(status, seam, node=node)
        self._forget_node(node)

    def _is_memory_node(self, seam: str, node: int) -> bool:
        kind = ctypes.c_int()
        self._call(seam, "cuGraphNodeGetType", node, byref(kind))
        return kind.value in (NodeKind.MEM_ALLOC, NodeKind.MEM_FREE)

    def _change_edges(
        self, seam: str, symbol: str, graph: GraphHandle, edges: Sequence[Edge]
    ) -> None:
        count = len(edges)
        sources = (ctypes.c_void_p * count)(*[edge.source for edge in edges])
        targets = (ctypes.c_void_p * count)(*[edge.target for edge in edges])
        data = edge_array([edge.data for edge in edges])
        self._call(seam, symbol, graph, sources, targets, data, count)

    def _incoming_edge_data(self, seam: str, node: int) -> tuple[EdgeData, ...]:
        count = ctypes.c_size_t()
        symbol = "cuGraphNodeGetDependencies_v2"
        self._call(seam, symbol, node, None, None, byref(count))
        if not count.value:
            return ()
        nodes = (ctypes.c_uint64 * count.value)()
        data = (EdgeDataStruct * count.value)()
        self._call(seam, symbol, node, nodes, data, byref(count))
        return tuple(_edge_data(raw) for raw in data[: count.value])

    def _remember_conditional(self, graph: int, node: int, params: ConditionalNodeParams) -> None:
        self._conditionals[node] = params
        self._conditionals_in.setdefault(graph, set()).add(node)

    def _forget_graph(self, graph: int) -> None:
        for node in self._conditionals_in.pop(graph, set()):
            self._forget_node(node)

    def _forget_node(self, node: int) -> None:
        params = self._conditionals.pop(node, None)
        if params is not None:
            for body in params.bodies:
                self._forget_graph(body)


def _has_cycle(edges: Sequence[Edge]) -> bool:
    """Whether the edges hold a cycle: take nodes without open dependencies until none is left."""
    followers: dict[int, list[int]] = {}
    open_dependencies: dict[int, int] = {}
    for edge in edges:
        followers.setdefault(edge.source, []).append(edge.target)
        open_dependencies.setdefault(edge.source, 0)
        open_dependencies[edge.target] = open_dependencies.get(edge.target, 0) + 1
    ready = [node for node, count in open_dependencies.items() if count == 0]
    done = 0
    while ready:
        node = ready.pop()
        done += 1
        for follower in followers.get(node, ()):
            open_dependencies[follower] -= 1
            if open_dependencies[follower] == 0:
                ready.append(follower)
    return done < len(open_dependencies)
