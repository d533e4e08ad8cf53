"""Graph definitions of the host driver: nodes, edges with data, clones, bodies and children."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ostinato.driver.api import (
    KINDS,
    AllocNodeParams,
    ChildGraphNodeParams,
    ConditionalHandle,
    ConditionalKind,
    ConditionalNodeParams,
    ConditionDefaults,
    Edge,
    EdgeData,
    EdgeType,
    FreeNodeParams,
    FunctionHandle,
    GraphHandle,
    KernelArguments,
    KernelColumns,
    KernelNodeParams,
    LaunchAttributes,
    Link,
    MemcpyNodeParams,
    NodeHandle,
    NodeKind,
    NodeParams,
    OpaqueNodeParams,
)
from ostinato.driver.host.handles import HandleTable, invalid, new_handle, unsupported
from ostinato.driver.host.memory import MemoryTable
from ostinato.driver.order import in_order
from ostinato.errors import DriverError
from ostinato.records import dataclass

if TYPE_CHECKING:
    from random import Random

MEMORY_KINDS = frozenset({NodeKind.MEM_ALLOC, NodeKind.MEM_FREE})
# A graph with a node of these kinds has one executable at a time, no clone, and is no child.
SINGLE_KINDS = MEMORY_KINDS | {NodeKind.CONDITIONAL}

_BODIES_AT_MOST = {ConditionalKind.IF: 2, ConditionalKind.WHILE: 1}


@dataclass(slots=True, eq=False)
class Condition:
    """The definition of a conditional handle; each executable has its own value for the handle."""

    handle: ConditionalHandle
    defaults: ConditionDefaults
    used: bool = False


@dataclass(slots=True, eq=False)
class DefinitionNode:
    """A node.  `incoming` are its dependencies in the order of their addition, with edge data."""

    handle: NodeHandle
    graph: GraphDefinition
    params: NodeParams
    incoming: list[tuple[DefinitionNode, EdgeData]] = field(default_factory=list)
    child: GraphDefinition | None = None
    bodies: tuple[GraphDefinition, ...] = ()
    original: NodeHandle | None = None
    """The original of a clone's node; None for other nodes."""

    @property
    def kind(self) -> NodeKind:
        return KINDS[type(self.params)]

    @property
    def inner(self) -> tuple[GraphDefinition, ...]:
        """The graphs inside: the child, or the bodies."""
        return self.bodies if self.child is None else (self.child,)

    @property
    def condition(self) -> Condition:
        """The definition of a conditional node's handle."""
        assert isinstance(self.params, ConditionalNodeParams)
        graph = self.graph
        while self.params.handle not in graph.conditions:
            assert graph.owner is not None, "checked when the node was added"
            graph = graph.owner.graph
        return graph.conditions[self.params.handle]

    @property
    def shown(self) -> NodeParams:
        """The parameters, with the handles of this node's own graphs."""
        if isinstance(self.params, ConditionalNodeParams):
            return replace(self.params, bodies=tuple(body.handle for body in self.bodies))
        if self.child is not None:
            return ChildGraphNodeParams(self.child.handle)
        return self.params

    def check_settable(
        self, call: str, params: NodeParams, fixed: Container[NodeKind], blamed: NodeHandle | None
    ) -> None:
        """Raises unless the node can get other parameters of this type.

        Nodes of the kinds in `fixed` cannot.  `blamed`: the node that the error names.
        """
        refuse_opaque(call, params)
        if KINDS[type(params)] != self.kind:
            raise invalid(
                call, f"it is a {self.kind.name} node, not {KINDS[type(params)].name}", node=blamed
            )
        if self.kind in fixed:
            raise unsupported(call, f"a {self.kind.name} node is fixed", node=blamed)

    def check_edge(self, call: str, target: NodeKind | None, data: EdgeData) -> None:
        """Raises unless an edge from this node to one of kind `target` can have this data.

        Programmatic edges and ports are between kernels only.
        """
        if data == EdgeData():
            return
        kernels = self.kind == NodeKind.KERNEL and (
            target == NodeKind.KERNEL or data.type == EdgeType.DEFAULT
        )
        if not kernels or data.to_port != 0 or data.from_port not in (0, 1, 2):
            raise invalid(call, f"{data} from a {self.kind.name} node")


class GraphTables:
    """The definitions of one driver and their nodes by handle, and the memory of alloc nodes."""

    def __init__(self, memory: MemoryTable) -> None:
        self.memory = memory
        self.graphs: HandleTable[GraphDefinition] = HandleTable("graph")
        self.nodes: HandleTable[DefinitionNode] = HandleTable("node")

    def create(self) -> GraphDefinition:
        """Makes a graph that is registered by handle."""
        graph = GraphDefinition(self)
        graph.register()
        return graph


class HostFrozenGraph:
    """The content of a definition when this object was made (`api.FrozenGraph`)."""

    def __init__(self, graph: GraphDefinition) -> None:
        self.nodes = tuple(graph.nodes)
        self._held = [(node.kind, node.shown) for node in graph.nodes.values()]
        self.holders = [index for index, node in enumerate(graph.nodes.values()) if node.inner]
        self._attributes = [
            LaunchAttributes.of(params.config) if isinstance(params, KernelNodeParams) else None
            for _, params in self._held
        ]
        self.kinds_of_attributes = frozenset(one for one in self._attributes if one is not None)
        place = {node: index for index, node in enumerate(graph.nodes.values())}
        self._links = frozenset(
            (place[source], place[node], _link_data(data))
            for node in place
            for source, data in node.incoming
        )
        self.plain = not any(data for _, _, data in self._links)
        self.memory_nodes = [
            index for index, (kind, _) in enumerate(self._held) if kind in MEMORY_KINDS
        ]

    def kind(self, index: int) -> NodeKind:
        return self._held[index][0]

    def params(self, index: int) -> NodeParams:
        return self._held[index][1]

    @cached_property
    def kernels(self) -> KernelColumns:
        keys: list[Hashable] = []
        starts, sizes, data = [], [], bytearray()
        for _, params in self._held:
            key, raw = None, b""
            if isinstance(params, KernelNodeParams):
                raw = params.arguments.data
                key = params.function, id(params.arguments.layout), len(raw)
            keys.append(key)
            starts.append(len(data))
            sizes.append(len(raw))
            data += raw.ljust(-(-len(raw) // 8) * 8, b"\0")
        return KernelColumns(keys, np.array(starts, int), np.array(sizes, int), bytes(data))

    def kernel(self, index: int) -> tuple[FunctionHandle, KernelArguments]:
        params = self._held[index][1]
        assert isinstance(params, KernelNodeParams)
        return params.function, params.arguments

    def links(self) -> frozenset[Link]:
        return self._links

    def attributes(self, index: int) -> LaunchAttributes | None:
        return self._attributes[index]


def _link_data(data: EdgeData) -> tuple[int, ...]:
    numbers = (data.from_port, data.to_port, int(data.type))
    return numbers if any(numbers) else ()


class GraphDefinition:
    """A graph.  `owner` is the node to which a child graph or a body belongs.

    A definition has a valid handle once it is registered; the snapshots of executables never are.
    """

    def __init__(
        self, tables: GraphTables, owner: DefinitionNode | None = None, *, body: bool = False
    ) -> None:
        self.tables = tables
        self.handle = GraphHandle(new_handle())
        self.nodes: dict[NodeHandle, DefinitionNode] = {}
        self.owner = owner
        self.body = body
        # In order of creation; empty except in a root graph.
        self.conditions: dict[ConditionalHandle, Condition] = {}

    @property
    def root(self) -> GraphDefinition:
        graph = self
        while graph.owner is not None:
            graph = graph.owner.graph
        return graph

    @property
    def in_body(self) -> bool:
        """True for the body of a conditional node, and for a child graph at any depth in a body."""
        graph = self
        while not graph.body and graph.owner is not None:
            graph = graph.owner.graph
        return graph.body

    def walk(self) -> Iterable[DefinitionNode]:
        """Yields every node; nodes of children and bodies come right after their holder."""
        for node in self.nodes.values():
            yield node
            for inner in node.inner:
                yield from inner.walk()

    def edges(self) -> tuple[Edge, ...]:
        return tuple(
            Edge(source.handle, node.handle, data)
            for node in self.nodes.values()
            for source, data in node.incoming
        )

    # --- handles

    def register(self) -> None:
        """Makes the handles of the definition, its nodes and the graphs inside valid."""
        self.tables.graphs[self.handle] = self
        for node in self.nodes.values():
            self._register_node(node)

    def _register_node(self, node: DefinitionNode) -> None:
        self.tables.nodes[node.handle] = node
        for inner in node.inner:
            inner.register()

    def forget(self) -> None:
        """Makes the handles of the definition and of all inside it invalid."""
        self.tables.graphs.pop(self.handle, None)
        for node in self.nodes.values():
            self._forget_node(node)

    def _forget_node(self, node: DefinitionNode) -> None:
        self.tables.nodes.pop(node.handle, None)
        for inner in node.inner:
            inner.forget()

    def destroy(self) -> None:
        """Forgets the definition, and releases the addresses of its alloc nodes."""
        self.forget()
        memory = self.tables.memory
        for node in self.walk():
            if isinstance(node.params, AllocNodeParams):
                allocation = memory.reserved.get(node.params.address)
                if allocation is not None:
                    memory.unhold(allocation)

    def nodes_of(self, call: str, handles: Sequence[NodeHandle]) -> list[DefinitionNode]:
        """Returns the nodes of handles.  Raises for another graph's node, or one given twice."""
        nodes = [self.tables.nodes.find(call, handle) for handle in handles]
        for node in nodes:
            if node.graph is not self:
                raise invalid(call, f"node {node.handle:#x} is of another graph", node=node.handle)
        if len(set(nodes)) != len(nodes):
            raise invalid(call, "a dependency is named twice")
        return nodes

    # --- nodes

    def add(
        self,
        call: str,
        dependencies: Sequence[DefinitionNode],
        params: NodeParams,
        edge_data: Sequence[EdgeData] | None = None,
    ) -> DefinitionNode:
        """Adds a node; the caller has checked its parameters as work."""
        child: GraphDefinition | None = None
        match params:
            case ConditionalNodeParams():
                self._take_condition(call, params)
            case ChildGraphNodeParams():
                child = self.tables.graphs.find(call, params.graph)
                child.refuse_single(call, "be a child graph")
            case AllocNodeParams():
                params = self._reserve(call, params)
            case FreeNodeParams():
                if params.address not in self.tables.memory.reserved:
                    raise invalid(call, f"{params.address:#x} is not the address of an alloc node")
        node = DefinitionNode(NodeHandle(new_handle()), self, params)
        data = edge_data if edge_data is not None else (EdgeData(),) * len(dependencies)
        node.incoming = list(zip(dependencies, data, strict=True))
        if isinstance(params, ConditionalNodeParams):
            node.bodies = tuple(
                GraphDefinition(self.tables, node, body=True) for _ in range(params.size)
            )
        if child is not None:
            node.child = child.clone(node)
        self.nodes[node.handle] = node
        self._register_node(node)
        return node

    def _take_condition(self, call: str, params: ConditionalNodeParams) -> None:
        most = _BODIES_AT_MOST.get(params.kind)
        if params.size < 1 or (most is not None and params.size > most):
            raise invalid(call, f"a {params.kind.name} node cannot have {params.size} bodies")
        if params.bodies:
            raise invalid(call, "bodies are made with the node: give none")
        condition = self.root.conditions.get(params.handle)
        if condition is None or condition.used:
            why = "is of no use to this graph" if condition is None else "has a node already"
            raise invalid(call, f"conditional handle {params.handle:#x} {why}")
        condition.used = True

    def _reserve(self, call: str, params: AllocNodeParams) -> AllocNodeParams:
        if params.nbytes <= 0 or params.address:
            raise invalid(call, f"{params}")
        if self.owner is not None:
            raise unsupported(call, "alloc nodes belong into the outermost graph")
        allocation = self.tables.memory.reserve(call, params.nbytes)
        return AllocNodeParams(params.nbytes, allocation.address)

    def refuse_memory(self, call: str, node: NodeHandle) -> None:
        """Raises if the graph has alloc or free nodes: then no node may be removed from it."""
        if any(other.kind in MEMORY_KINDS for other in self.nodes.values()):
            raise unsupported(
                call, "nodes cannot leave a graph that has alloc or free nodes", node=node
            )

    def remove(self, node: DefinitionNode) -> None:
        for other in self.nodes.values():
            other.incoming = [edge for edge in other.incoming if edge[0] is not node]
        del self.nodes[node.handle]
        self._forget_node(node)

    def create_condition(
        self, call: str, default: int, *, reset_at_launch: bool
    ) -> ConditionalHandle:
        if not 0 <= default < 1 << 32:
            raise invalid(call, f"default={default}")
        handle = ConditionalHandle(new_handle())
        self.root.conditions[handle] = Condition(
            handle, ConditionDefaults(default, reset_at_launch)
        )
        return handle

    # --- edges

    def add_edges(self, call: str, edges: Sequence[Edge]) -> None:
        """Adds all edges or, if one is refused, none."""
        changed: list[DefinitionNode] = []
        try:
            for edge in edges:
                (source,) = self.nodes_of(call, [edge.source])
                (target,) = self.nodes_of(call, [edge.target])
                source.check_edge(call, target.kind, edge.data)
                if any(source is known for known, _ in target.incoming):
                    raise invalid(call, f"{edge} exists already")
                if target in ancestors([source]):
                    raise invalid(call, f"{edge} would close a cycle")
                target.incoming.append((source, edge.data))
                changed.append(target)
        except DriverError:
            for target in reversed(changed):
                target.incoming.pop()
            raise

    # --- copies

    def refuse_single(self, call: str, what: str) -> None:
        """Raises if this is the body of a conditional node, or has a node that can belong to only
        one graph and one executable."""
        if self.body or any(node.kind in SINGLE_KINDS for node in self.walk()):
            raise unsupported(
                call,
                "a graph with alloc, free or conditional nodes, and the body of a conditional "
                f"node, cannot {what}",
            )

    def clone(self, owner: DefinitionNode | None = None, *, inner: bool = False) -> GraphDefinition:
        """Returns a deep copy that is not registered.

        Conditional handles keep their numbers, since kernels have them as arguments.  `inner`: the
        copy is a part of the copy of a larger graph.
        """
        copy = GraphDefinition(self.tables, owner, body=self.body and inner)
        conditions = self.conditions if inner else self.root.conditions
        copy.conditions = {h: replace(c) for h, c in conditions.items()}
        stands_for: dict[DefinitionNode, DefinitionNode] = {}
        for node in self.nodes.values():
            twin = DefinitionNode(NodeHandle(new_handle()), copy, node.params, original=node.handle)
            twin.child = None if node.child is None else node.child.clone(twin, inner=True)
            twin.bodies = tuple(body.clone(twin, inner=True) for body in node.bodies)
            stands_for[node] = twin
            copy.nodes[twin.handle] = twin
        for node, twin in stands_for.items():
            twin.incoming = [(stands_for[source], data) for source, data in node.incoming]
        return copy

    def node_for(self, call: str, original: NodeHandle) -> NodeHandle:
        """Returns this clone's node for a node of the original."""
        for twin in self.walk():
            if twin.original == original:
                return twin.handle
        raise invalid(call, "the graph is no clone of the node's graph", node=original)


def check_edge_data(
    call: str, sources: Sequence[DefinitionNode], params: NodeParams, edge_data: Sequence[EdgeData]
) -> None:
    """Raises unless there is valid data for each dependency of a new node."""
    if len(edge_data) != len(sources):
        raise invalid(call, f"{len(edge_data)} edge data for {len(sources)} dependencies")
    for source, data in zip(sources, edge_data, strict=True):
        source.check_edge(call, KINDS.get(type(params)), data)


def refuse_opaque(call: str, params: NodeParams) -> None:
    """Raises for parameters that the protocol only shows: no node can be made of them."""
    if isinstance(params, OpaqueNodeParams):
        raise unsupported(call, f"an opaque node ({params.why})")
    if isinstance(params, MemcpyNodeParams) and params.opaque:
        raise unsupported(call, "a copy to or from a CUDA array")


def ancestors(nodes: Iterable[DefinitionNode]) -> set[DefinitionNode]:
    """Returns the nodes and all nodes that they depend on."""
    seen: set[DefinitionNode] = set()
    rest = list(nodes)
    while rest:
        node = rest.pop()
        if node not in seen:
            seen.add(node)
            rest.extend(source for source, _ in node.incoming)
    return seen


def execution_order(graph: GraphDefinition, shuffle: Random | None = None) -> list[DefinitionNode]:
    """Returns a topological order.  Nodes that no edges order come in the order of their creation,
    or in an order drawn with `shuffle`."""
    nodes = list(graph.nodes.values())
    if shuffle is not None:
        shuffle.shuffle(nodes)
    index = {node: i for i, node in enumerate(nodes)}
    edges = [(index[source], i) for i, node in enumerate(nodes) for source, _ in node.incoming]
    order = in_order(len(nodes), edges)
    assert order is not None, "edges are checked when they are added"
    return [nodes[i] for i in order]
