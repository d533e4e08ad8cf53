"""Graph definitions of the host driver: nodes, edges with data, clones, bodies and children."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING

from ostinato.driver.api import (
    AllocNodeParams,
    BatchMemOpNodeParams,
    ChildGraphNodeParams,
    ConditionalHandle,
    ConditionalKind,
    ConditionalNodeParams,
    EdgeData,
    EmptyNodeParams,
    EventRecordNodeParams,
    EventWaitNodeParams,
    FreeNodeParams,
    GraphHandle,
    HostNodeParams,
    KernelNodeParams,
    MemcpyNodeParams,
    MemsetNodeParams,
    NodeHandle,
    NodeKind,
    NodeParams,
    OpaqueNodeParams,
)
from ostinato.errors import Status, driver_error

if TYPE_CHECKING:
    from ostinato.driver.host.capture import Capture

__all__ = [
    "KINDS",
    "MEMORY_KINDS",
    "SINGLE_KINDS",
    "Condition",
    "GraphDefinition",
    "Node",
    "ancestors",
    "check_conditional_size",
    "copy_dimensions",
    "execution_order",
    "new_handle",
    "refuse_opaque",
]

# Handles of every type come from one counter, so that one of the wrong type is always unknown.
new_handle: Callable[[], int] = itertools.count(0x5000_0000, 0x10).__next__

KINDS: dict[type[NodeParams], NodeKind] = {
    KernelNodeParams: NodeKind.KERNEL,
    MemcpyNodeParams: NodeKind.MEMCPY,
    MemsetNodeParams: NodeKind.MEMSET,
    HostNodeParams: NodeKind.HOST,
    ChildGraphNodeParams: NodeKind.CHILD_GRAPH,
    EmptyNodeParams: NodeKind.EMPTY,
    EventWaitNodeParams: NodeKind.EVENT_WAIT,
    EventRecordNodeParams: NodeKind.EVENT_RECORD,
    AllocNodeParams: NodeKind.MEM_ALLOC,
    FreeNodeParams: NodeKind.MEM_FREE,
    BatchMemOpNodeParams: NodeKind.BATCH_MEM_OP,
    ConditionalNodeParams: NodeKind.CONDITIONAL,
}

MEMORY_KINDS = frozenset({NodeKind.MEM_ALLOC, NodeKind.MEM_FREE})
# A graph with one of these can have one executable at a time, no clone, and be no child.
SINGLE_KINDS = MEMORY_KINDS | {NodeKind.CONDITIONAL}


def copy_dimensions(params: MemcpyNodeParams | MemsetNodeParams) -> int:
    """Whether a copy or a fill has one, two or three dimensions: an update may not change it."""
    if isinstance(params, MemcpyNodeParams) and params.depth > 1:
        return 3
    return 2 if params.height > 1 else 1


@dataclass(slots=True, eq=False)
class Condition:
    """A conditional handle's definition; each executable has a value of its own for it."""

    handle: ConditionalHandle
    default: int
    reset_at_launch: bool
    used: bool = False


@dataclass(slots=True, eq=False)
class Node:
    """A node.  `incoming` are its dependencies in the order they were given, with edge data."""

    handle: NodeHandle
    graph: GraphDefinition
    params: NodeParams
    incoming: list[tuple[Node, EdgeData]] = field(default_factory=list)
    child: GraphDefinition | None = None
    bodies: tuple[GraphDefinition, ...] = ()
    original: NodeHandle | None = None
    """Of a clone's node: the node that it was cloned from."""

    @property
    def kind(self) -> NodeKind:
        return KINDS[type(self.params)]

    @property
    def inner(self) -> tuple[GraphDefinition, ...]:
        """The graphs inside: the child, or the bodies."""
        return self.bodies if self.child is None else (self.child,)

    @property
    def condition(self) -> Condition:
        """Of a conditional node: the definition of its handle."""
        assert isinstance(self.params, ConditionalNodeParams)
        graph = self.graph
        while self.params.handle not in graph.conditions:
            assert graph.owner is not None, "checked when the node was added"
            graph = graph.owner.graph
        return graph.conditions[self.params.handle]


@dataclass(slots=True, eq=False)
class GraphDefinition:
    """A graph.  `owner` is the node that holds a child graph or a body."""

    handle: GraphHandle
    nodes: dict[NodeHandle, Node] = field(default_factory=dict)
    owner: Node | None = None
    body: bool = False
    conditions: dict[ConditionalHandle, Condition] = field(default_factory=dict)
    """In order of creation; only of a root graph."""
    capture: Capture | None = None
    """The capture that filled it last."""

    @property
    def capturing(self) -> bool:
        return self.capture is not None and self.capture.under_way

    @classmethod
    def new(cls, owner: Node | None = None, *, body: bool = False) -> GraphDefinition:
        return cls(GraphHandle(new_handle()), owner=owner, body=body)

    @property
    def root(self) -> GraphDefinition:
        graph = self
        while graph.owner is not None:
            graph = graph.owner.graph
        return graph

    def walk(self) -> Iterable[Node]:
        """Every node; those of children and bodies come right after the node that holds them."""
        for node in self.nodes.values():
            yield node
            for inner in node.inner:
                yield from inner.walk()

    def add(
        self,
        dependencies: Sequence[Node],
        params: NodeParams,
        edge_data: Sequence[EdgeData] | None = None,
    ) -> Node:
        node = Node(NodeHandle(new_handle()), self, params)
        data = edge_data if edge_data is not None else (EdgeData(),) * len(dependencies)
        node.incoming = list(zip(dependencies, data, strict=True))
        if isinstance(params, ConditionalNodeParams):
            node.bodies = tuple(GraphDefinition.new(node, body=True) for _ in range(params.size))
        self.nodes[node.handle] = node
        return node

    def clone(self, owner: Node | None = None, *, inner: bool = False) -> GraphDefinition:
        """A deep copy.  Conditional handles keep their numbers: they are in kernel arguments.

        `inner`: the copy is a part of the copy of a larger graph.
        """
        copy = GraphDefinition(GraphHandle(new_handle()), owner=owner, body=self.body and inner)
        conditions = self.conditions if inner else self.root.conditions
        copy.conditions = {h: replace(c) for h, c in conditions.items()}
        stands_for: dict[Node, Node] = {}
        for node in self.nodes.values():
            twin = Node(NodeHandle(new_handle()), copy, node.params, original=node.handle)
            twin.child = None if node.child is None else node.child.clone(twin, inner=True)
            twin.bodies = tuple(body.clone(twin, inner=True) for body in node.bodies)
            stands_for[node] = twin
            copy.nodes[twin.handle] = twin
        for node, twin in stands_for.items():
            twin.incoming = [(stands_for[source], data) for source, data in node.incoming]
        return copy


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """The nodes and all that they depend on."""
    seen: set[Node] = set()
    rest = list(nodes)
    while rest:
        node = rest.pop()
        if node not in seen:
            seen.add(node)
            rest.extend(source for source, _ in node.incoming)
    return seen


def execution_order(graph: GraphDefinition, shuffle: Random | None = None) -> list[Node]:
    """A topological order.  Nodes that no edges order come in the order of their creation, or in
    one drawn with `shuffle`."""
    nodes = list(graph.nodes.values())
    if shuffle is not None:
        shuffle.shuffle(nodes)
    index = {node: i for i, node in enumerate(nodes)}
    if all(index[source] < i for i, node in enumerate(nodes) for source, _ in node.incoming):
        return nodes
    waiting = [len({source for source, _ in node.incoming}) for node in nodes]
    followers: dict[Node, list[int]] = {}
    for i, node in enumerate(nodes):
        for source in {source for source, _ in node.incoming}:
            followers.setdefault(source, []).append(i)
    ready = [i for i, count in enumerate(waiting) if count == 0]
    order: list[Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for i in followers.get(node, ()):
            waiting[i] -= 1
            if waiting[i] == 0:
                heapq.heappush(ready, i)
    assert len(order) == len(nodes), "edges are checked for cycles when they are added"
    return order


def refuse_opaque(params: NodeParams, call: str) -> None:
    """Refuses nodes that the protocol can show but not make."""
    if isinstance(params, OpaqueNodeParams):
        raise driver_error(Status.NOT_SUPPORTED, call, f"an opaque node ({params.why})")
    if isinstance(params, MemcpyNodeParams) and params.opaque:
        raise driver_error(Status.NOT_SUPPORTED, call, "a copy to or from a CUDA array")


def check_conditional_size(params: ConditionalNodeParams, call: str) -> None:
    most = {ConditionalKind.IF: 2, ConditionalKind.WHILE: 1}.get(params.kind)
    if params.size < 1 or (most is not None and params.size > most):
        raise driver_error(
            Status.INVALID_VALUE,
            call,
            f"a {params.kind.name} node cannot have {params.size} bodies",
        )
