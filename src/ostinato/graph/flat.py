"""A graph as one list of nodes in an order that its edges allow, child graphs taken apart.

`explain.difference` launches the nodes one by one; `graph.timing` puts a timer after each.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from ostinato.driver.api import (
    ChildGraphNodeParams,
    Driver,
    EmptyNodeParams,
    EventRecordNodeParams,
    EventWaitNodeParams,
    GraphHandle,
    KernelNodeParams,
    MemcpyNodeParams,
    NodeHandle,
    NodeKind,
    NodeParams,
)
from ostinato.driver.order import in_order
from ostinato.errors import GraphError
from ostinato.graph.node import Node

_APART = {
    NodeKind.CONDITIONAL: "whose condition belongs to the graph",
    NodeKind.MEM_ALLOC: "whose memory belongs to the graph",
    NodeKind.MEM_FREE: "whose memory belongs to the graph",
    NodeKind.SEMAPHORE_SIGNAL: "which cannot be read",
    NodeKind.SEMAPHORE_WAIT: "which cannot be read",
}


@dataclass(frozen=True, slots=True)
class FlatNode:
    """One node, also of a child graph.  A child graph's own node comes after all of its nodes.

    `path` is "3", or "3.child.0" inside of node 3; `after` are the places in the list of the nodes
    that it waits for; `off` is true for a node that the executable has switched off.
    """

    node: Node
    path: str
    after: tuple[int, ...]
    off: bool = False

    def __str__(self) -> str:
        return f"node {self.path} ({self.node.name})"

    @property
    def idle(self) -> bool:
        """True if it touches no memory: an event, a join, a node that is off."""
        kinds = EmptyNodeParams, EventRecordNodeParams, EventWaitNodeParams, ChildGraphNodeParams
        return self.off or isinstance(self.node.params, kinds)

    @property
    def alone(self) -> NodeParams:
        """The parameters of a node in a graph of other edges: no kernel starts early there."""
        params = self.node.params
        if isinstance(params, KernelNodeParams) and params.config.programmatic:
            return replace(params, config=replace(params.config, programmatic=False))
        return params


def flat_nodes(
    driver: Driver,
    graph: GraphHandle,
    nodes: Sequence[Node],
    off: Container[NodeHandle] = (),
) -> tuple[FlatNode, ...]:
    """Returns the nodes of a graph, each after those that it waits for, else in the driver's order.
    `off`: nodes that are switched off.

    Raises GraphError for a node that no other graph can hold: a conditional node, alloc and free
    nodes, semaphores, copies of CUDA arrays.
    """
    found: list[FlatNode] = []
    _add(driver, graph, nodes, "", (), off, found)
    return tuple(found)


def _add(
    driver: Driver,
    graph: GraphHandle,
    nodes: Sequence[Node],
    prefix: str,
    outer: tuple[int, ...],
    off: Container[NodeHandle],
    found: list[FlatNode],
) -> None:
    """Appends the nodes of one graph, whose first ones wait for `outer`."""
    # By index: an executable that was updated has its first handles, and the new graph's children.
    index = {node: at for at, node in enumerate(driver.graph_nodes(graph))}
    edges = [(index[edge.source], index[edge.target]) for edge in driver.graph_edges(graph)]
    sources: list[list[int]] = [[] for _ in nodes]
    for source, target in edges:
        sources[target].append(source)
    place: dict[int, int] = {}
    for at in in_order(len(nodes), edges) or ():
        node = nodes[at]
        path = f"{prefix}{node.index}"
        _require_apart(node, path)
        after = tuple(sorted(place[source] for source in sources[at])) or outer
        if isinstance(node.params, ChildGraphNodeParams):
            begin = len(found)
            inside = node.params.graph, node.children[0], f"{path}.child."
            _add(driver, *inside, after, (), found)
            waited = {before for one in found[begin:] for before in one.after}
            after = tuple(n for n in range(begin, len(found)) if n not in waited) or after
        place[at] = len(found)
        found.append(FlatNode(node, path, after, node.handle in off))


def _require_apart(node: Node, path: str) -> None:
    why = _APART.get(node.kind)
    if isinstance(node.params, MemcpyNodeParams) and node.params.opaque:
        why = "which copies a CUDA array"
    if why is not None:
        raise GraphError(
            f"node {path} ({node.name}) is of kind {node.kind.name}, {why}, so it runs in no other "
            "graph; take a graph of the nodes around it"
        )
