"""`Shadow`: what the nodes of an executable hold, which the driver does not tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ostinato.driver.api import NodeHandle, NodeParams
from ostinato.errors import InputError, UpdateRefusedError
from ostinato.graph.changes import links, under_handles
from ostinato.graph.graph import Graph
from ostinato.graph.node import Node
from ostinato.graph.rebind import Change

__all__ = ["Shadow"]


class Shadow:
    """The nodes of one executable, and what they were set to.  Not for several threads at once.

    The definition is read when it is first needed: an executable that is only launched, or only
    updated as a whole, never needs it.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        # The nodes it was made of: a definition may grow afterwards.
        self._handles = graph.context.driver.graph_nodes(graph.handle)
        self._edges = graph.edges
        self._nodes: tuple[Node, ...] | None = None
        self._updated: tuple[Graph, tuple[NodeHandle, ...]] | None = None
        self._before_update: tuple[Node, ...] | None = None
        self.current: dict[NodeHandle, NodeParams] = {}
        """What single nodes were set to since."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The definition's nodes with the parameters that the next launch will use."""
        return self._overlaid(self.definition())

    def _overlaid(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        if not self.current:
            return nodes
        return tuple(
            replace(
                n,
                params=self.current.get(n.handle, n.params),
                children=tuple(self._overlaid(body) for body in n.children),
            )
            if n.children or n.handle in self.current
            else n
            for n in nodes
        )

    def definition(self) -> tuple[Node, ...]:
        """The nodes as they were instantiated, or last updated, under the first ones' handles.

        Raises UpdateRefusedError if an update took a graph whose nodes come in another order.
        """
        if self._nodes is None and self._updated is None:
            self._nodes = _some(self._graph, self._handles)
        elif self._nodes is None and self._updated is not None:
            first = self._before_update or _some(self._graph, self._handles)
            graph, handles = self._updated
            new = _some(graph, handles)
            # CUDA pairs nodes along edges, so it also takes a graph whose nodes come in another
            # order; what is set here goes by a node's place.
            same = [n.kind for n in first] == [n.kind for n in new]
            if not same or links(self._edges, first) != links(graph.edges, new):
                raise UpdateRefusedError(
                    "the executable was updated from a graph whose nodes come in another order, so "
                    "its single nodes cannot be told apart any more; instantiate again to set them"
                )
            self._nodes = under_handles(first, new)
        assert self._nodes is not None
        return self._nodes

    def node(self, node: Node | int) -> Node:
        """A node as it was in the definition.  Raises InputError if it is not one of these."""
        index = node.index if isinstance(node, Node) else node
        nodes = self.definition()
        if not 0 <= index < len(nodes):
            raise InputError(f"node {index}: the graph has {len(nodes)} nodes")
        found = nodes[index]
        if isinstance(node, Node) and node.handle != found.handle:
            raise InputError(f"node {index} ({node.name}) is of another graph")
        return found

    def params(self, node: Node) -> NodeParams:
        """What the next launch will use for one of these nodes."""
        return self.current.get(node.handle, node.params)

    def changed(self, changes: Sequence[Change]) -> None:
        """The driver took these changes."""
        for change in changes:
            self.current[change.node.handle] = change.params

    def updated(self, graph: Graph, handles: tuple[NodeHandle, ...]) -> None:
        """The driver took every parameter from `graph`, whose nodes were these."""
        # Read only when a single node is asked for: an update by itself stays one call.
        self._before_update = self._nodes or self._before_update
        self._nodes, self._updated = None, (graph, handles)
        self.current.clear()


def _some(graph: Graph, handles: Sequence[NodeHandle]) -> tuple[Node, ...]:
    """Those nodes of a definition, which may have grown since."""
    wanted = set(handles)
    return tuple(n for n in graph.nodes if n.handle in wanted)
