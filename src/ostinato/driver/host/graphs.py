"""The graph definitions of the host driver: building, reading, cloning, changing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ostinato.driver.api import (
    AllocNodeParams,
    ChildGraphNodeParams,
    ConditionalHandle,
    ConditionalNodeParams,
    Edge,
    EdgeData,
    EdgeType,
    FreeNodeParams,
    GraphHandle,
    NodeHandle,
    NodeKind,
    NodeParams,
)
from ostinato.driver.host.core import HostCore
from ostinato.driver.host.definition import (
    KINDS,
    MEMORY_KINDS,
    SINGLE_KINDS,
    Condition,
    GraphDefinition,
    Node,
    ancestors,
    check_conditional_size,
    new_handle,
    refuse_opaque,
)
from ostinato.driver.host.memory import reserve
from ostinato.errors import Status, driver_error

__all__ = ["GraphCalls"]


class GraphCalls(HostCore):
    def graph_create(self) -> GraphHandle:
        with self._entered("graph_create"):
            graph = GraphDefinition.new()
            self._register(graph)
            return graph.handle

    def graph_destroy(self, graph: GraphHandle) -> None:
        call = "graph_destroy"
        with self._entered(call):
            definition = self._graph(call, graph)
            if definition.owner is not None or definition.capturing:
                owner = "its node" if definition.owner is not None else "a capture under way"
                raise driver_error(Status.INVALID_VALUE, call, f"the graph belongs to {owner}")
            self._forget(definition)
            self._release_memory(definition)

    def graph_clone(self, graph: GraphHandle) -> GraphHandle:
        call = "graph_clone"
        with self._entered(call):
            definition = self._graph(call, graph)
            self._refuse_fixed(call, definition, "be cloned")
            clone = definition.clone()
            self._register(clone)
            return clone.handle

    def _refuse_fixed(self, call: str, graph: GraphDefinition, what: str) -> None:
        """Memory and conditional nodes belong to one graph and one executable of it."""
        if any(node.kind in SINGLE_KINDS for node in graph.walk()):
            raise driver_error(
                Status.NOT_SUPPORTED,
                call,
                f"a graph with alloc, free or conditional nodes cannot {what}",
            )

    def node_in_clone(self, node: NodeHandle, clone: GraphHandle) -> NodeHandle:
        call = "node_in_clone"
        with self._entered(call):
            original = self._node(call, node).handle
            for twin in self._graph(call, clone).walk():
                if twin.original == original:
                    return twin.handle
            raise driver_error(
                Status.INVALID_VALUE, call, "the graph is no clone of the node's graph", node=node
            )

    def graph_nodes(self, graph: GraphHandle) -> tuple[NodeHandle, ...]:
        call = "graph_nodes"
        with self._entered(call):
            return tuple(self._graph(call, graph).nodes)

    def graph_edges(self, graph: GraphHandle) -> tuple[Edge, ...]:
        call = "graph_edges"
        with self._entered(call):
            return tuple(
                Edge(source.handle, node.handle, data)
                for node in self._graph(call, graph).nodes.values()
                for source, data in node.incoming
            )

    # --- nodes

    def graph_add_node(
        self,
        graph: GraphHandle,
        dependencies: Sequence[NodeHandle],
        params: NodeParams,
        edge_data: Sequence[EdgeData] | None = None,
    ) -> NodeHandle:
        call = "graph_add_node"
        with self._entered(call):
            definition = self._graph(call, graph)
            nodes = self._nodes_of(call, definition, dependencies)
            if edge_data is not None and len(edge_data) != len(nodes):
                raise driver_error(
                    Status.INVALID_VALUE,
                    call,
                    f"{len(edge_data)} edge data for {len(nodes)} dependencies",
                )
            for source, data in zip(nodes, edge_data or (), strict=False):
                self._check_edge(call, source, KINDS.get(type(params)), data)
            return self._add_node(call, definition, nodes, params, edge_data).handle

    def _add_node(
        self,
        call: str,
        graph: GraphDefinition,
        dependencies: Sequence[Node],
        params: NodeParams,
        edge_data: Sequence[EdgeData] | None = None,
    ) -> Node:
        refuse_opaque(params, call)
        child: GraphDefinition | None = None
        match params:
            case ConditionalNodeParams():
                params = self._take_condition(call, graph, params)
            case ChildGraphNodeParams():
                child = self._graph(call, params.graph)
                self._refuse_fixed(call, child, "be a child graph")
            case AllocNodeParams():
                params = self._reserve(call, graph, params)
            case FreeNodeParams():
                if params.address not in self._memory.reserved:
                    raise driver_error(
                        Status.INVALID_VALUE,
                        call,
                        f"{params.address:#x} is not the address of an alloc node",
                    )
            case _:
                self._check_params(call, params)
        node = graph.add(dependencies, params, edge_data)
        if child is not None:
            node.child = child.clone(node)
        self._register_node(node)
        return node

    def _take_condition(
        self, call: str, graph: GraphDefinition, params: ConditionalNodeParams
    ) -> ConditionalNodeParams:
        check_conditional_size(params, call)
        if params.bodies:
            raise driver_error(
                Status.INVALID_VALUE, call, "bodies are made with the node: give none"
            )
        condition = graph.root.conditions.get(params.handle)
        if condition is None or condition.used:
            why = "is of no use to this graph" if condition is None else "has a node already"
            raise driver_error(
                Status.INVALID_VALUE, call, f"conditional handle {params.handle:#x} {why}"
            )
        condition.used = True
        return params

    def _reserve(
        self, call: str, graph: GraphDefinition, params: AllocNodeParams
    ) -> AllocNodeParams:
        if params.nbytes <= 0 or params.address:
            raise driver_error(Status.INVALID_VALUE, call, f"{params}")
        if graph.owner is not None:
            raise driver_error(
                Status.NOT_SUPPORTED, call, "alloc nodes belong into the outermost graph"
            )
        allocation = reserve(params.nbytes, call, graph_owned=True)
        allocation.holders = 1
        self._memory.reserved[allocation.address] = allocation
        return AllocNodeParams(params.nbytes, allocation.address)

    def graph_remove_node(self, node: NodeHandle) -> None:
        call = "graph_remove_node"
        with self._entered(call):
            found = self._node(call, node)
            graph = found.graph
            if any(other.kind in MEMORY_KINDS for other in graph.nodes.values()):
                raise driver_error(
                    Status.NOT_SUPPORTED,
                    call,
                    "nodes cannot leave a graph that has alloc or free nodes",
                    node=node,
                )
            for other in graph.nodes.values():
                other.incoming = [edge for edge in other.incoming if edge[0] is not found]
            for capture in self._captures:
                for stream in capture.streams:
                    stream.dependencies = tuple(n for n in stream.dependencies if n is not found)
            del graph.nodes[found.handle]
            self._forget_node(found)

    def node_kind(self, node: NodeHandle) -> NodeKind:
        call = "node_kind"
        with self._entered(call):
            return self._node(call, node).kind

    def node_params(self, node: NodeHandle) -> NodeParams:
        call = "node_params"
        with self._entered(call):
            found = self._node(call, node)
            params = found.params
            if isinstance(params, ConditionalNodeParams):
                return replace(params, bodies=tuple(body.handle for body in found.bodies))
            if found.child is not None:
                return ChildGraphNodeParams(found.child.handle)
            return params

    def node_set_params(self, node: NodeHandle, params: NodeParams) -> None:
        call = "node_set_params"
        with self._entered(call):
            found = self._node(call, node)
            refuse_opaque(params, call)
            if KINDS[type(params)] != found.kind:
                raise driver_error(
                    Status.INVALID_VALUE,
                    call,
                    f"it is a {found.kind.name} node, not {KINDS[type(params)].name}",
                    node=node,
                )
            if found.kind in MEMORY_KINDS or found.inner:
                raise driver_error(
                    Status.NOT_SUPPORTED, call, f"a {found.kind.name} node is fixed", node=node
                )
            self._check_params(call, params)
            found.params = params

    def conditional_create(
        self, graph: GraphHandle, *, default: int = 0, reset_at_launch: bool = True
    ) -> ConditionalHandle:
        call = "conditional_create"
        with self._entered(call):
            root = self._graph(call, graph).root
            if not 0 <= default < 1 << 32:
                raise driver_error(Status.INVALID_VALUE, call, f"default={default}")
            handle = ConditionalHandle(new_handle())
            root.conditions[handle] = Condition(handle, default, reset_at_launch)
            return handle

    # --- edges

    def _check_edge(self, call: str, source: Node, target: NodeKind | None, data: EdgeData) -> None:
        """Programmatic edges and ports are between kernels only."""
        plain = data == EdgeData()
        if plain:
            return
        kernels = source.kind == NodeKind.KERNEL and (
            target == NodeKind.KERNEL or data.type == EdgeType.DEFAULT
        )
        if not kernels or data.to_port != 0 or data.from_port not in (0, 1, 2):
            raise driver_error(Status.INVALID_VALUE, call, f"{data} from a {source.kind.name} node")

    def graph_add_edges(self, graph: GraphHandle, edges: Sequence[Edge]) -> None:
        call = "graph_add_edges"
        with self._entered(call):
            definition = self._graph(call, graph)
            added: list[tuple[Node, Node, EdgeData]] = []
            try:
                for edge in edges:
                    source = self._nodes_of(call, definition, [edge.source])[0]
                    target = self._nodes_of(call, definition, [edge.target])[0]
                    self._check_edge(call, source, target.kind, edge.data)
                    if any(source is known for known, _ in target.incoming):
                        raise driver_error(Status.INVALID_VALUE, call, f"{edge} exists already")
                    if target in ancestors([source]):
                        raise driver_error(
                            Status.INVALID_VALUE, call, f"{edge} would close a cycle"
                        )
                    target.incoming.append((source, edge.data))
                    added.append((source, target, edge.data))
            except BaseException:
                for source, target, data in added:
                    target.incoming.remove((source, data))
                raise

    def graph_remove_edges(self, graph: GraphHandle, edges: Sequence[Edge]) -> None:
        call = "graph_remove_edges"
        with self._entered(call):
            definition = self._graph(call, graph)
            if any(node.kind in MEMORY_KINDS for node in definition.nodes.values()):
                raise driver_error(
                    Status.NOT_SUPPORTED,
                    call,
                    "edges cannot leave a graph that has alloc or free nodes",
                )
            found: list[tuple[Node, tuple[Node, EdgeData]]] = []
            for edge in edges:
                source = self._nodes_of(call, definition, [edge.source])[0]
                target = self._nodes_of(call, definition, [edge.target])[0]
                if (source, edge.data) not in target.incoming:
                    raise driver_error(Status.INVALID_VALUE, call, f"there is no {edge}")
                found.append((target, (source, edge.data)))
            for target, entry in found:
                target.incoming.remove(entry)
