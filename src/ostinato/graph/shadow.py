"""`Shadow`: what the nodes of an executable hold, which the driver does not tell.

States of a node: as the definition had it, or as it was set since.  All that was set since is one
frozen record (`Now`), which is replaced in one step: an interruption leaves the old one or the new
one, and never a mixture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ostinato.driver.api import Edge, EdgeData, KernelNodeParams, NodeHandle, NodeParams
from ostinato.errors import InputError, UpdateRefusedError
from ostinato.graph.changes import Change, Setting
from ostinato.graph.graph import Graph
from ostinato.graph.node import Node, given_reach

__all__ = ["Now", "Shadow"]


@dataclass(frozen=True, slots=True)
class Now:
    """What was set since the definition was read."""

    settings: Mapping[NodeHandle, Setting] = field(default_factory=dict)
    updated: tuple[Graph, tuple[NodeHandle, ...]] | None = None
    """The graph of the last whole update, and its nodes then."""


class Shadow:
    """The nodes of one executable, what they were set to, and what that keeps alive.

    Not for several threads at once.  The definition is read when it is first needed: an executable
    that is only launched, or only updated as a whole, never needs it.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        # The nodes it was made of: a definition may grow afterwards.
        self._handles = graph.context.driver.graph_nodes(graph.handle)
        self._edges = graph.edges
        self._nodes: tuple[Node, ...] | None = None
        self._before_update: tuple[Node, ...] | None = None
        self._given: dict[NodeHandle, Setting] = {}
        """Settings of the definition's own, worked out when they were first needed."""
        self._now = Now()

    @property
    def changed(self) -> bool:
        """Whether anything was set since the definition was read."""
        return bool(self._now.settings) or self._now.updated is not None

    @property
    def empty(self) -> bool:
        """Whether there are no nodes."""
        return not self._handles

    @property
    def grown(self) -> bool:
        """Whether the definition has other nodes than when it was read."""
        graph = self._graph
        return graph.context.driver.graph_nodes(graph.handle) != self._handles

    # --- reading
    @property
    def nodes(self) -> tuple[Node, ...]:
        """The definition's nodes with the parameters that the next launch will use."""
        return self._overlaid(self.definition())

    def _overlaid(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        settings = self._now.settings
        if not settings:
            return nodes
        return tuple(
            replace(
                settings[n.handle].shown() if n.handle in settings else n,
                children=tuple(self._overlaid(body) for body in n.children),
            )
            if n.children or n.handle in settings
            else n
            for n in nodes
        )

    def definition(self) -> tuple[Node, ...]:
        """The nodes as they were instantiated, or last updated, under the first ones' handles.

        Raises UpdateRefusedError if an update took a graph whose nodes come in another order.
        """
        if self._nodes is None:
            first = self._before_update or _some(self._graph, self._handles)
            self._nodes = first if self._now.updated is None else self._paired(first)
        return self._nodes

    def _paired(self, first: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes of the last update's graph under the first ones' handles."""
        assert self._now.updated is not None
        graph, handles = self._now.updated
        new = _some(graph, handles)
        # CUDA pairs nodes along edges, so it also takes a graph whose nodes come in another order;
        # what is set here belongs to a node's index.
        same = [n.kind for n in first] == [n.kind for n in new]
        if not same or _links(self._edges, first) != _links(graph.edges, new):
            raise UpdateRefusedError(
                "the executable was updated from a graph whose nodes come in another order, so its "
                "single nodes cannot be told apart any more; instantiate again to set them"
            )
        return _under_handles(first, new)

    def node(self, node: Node | int) -> Node:
        """A node as it was in the definition, also inside child graphs and bodies.

        A number is an index of the graph's own nodes.  Raises InputError if it is not one of these.
        """
        nodes = self.definition()
        if isinstance(node, int):
            if not 0 <= node < len(nodes):
                raise InputError(f"node {node}: the graph has {len(nodes)} nodes")
            return nodes[node]
        if node.index < len(nodes) and nodes[node.index].handle == node.handle:
            return nodes[node.index]
        found = next((n for n in _all(nodes) if n.handle == node.handle), None)
        if found is None:
            raise InputError(
                f"node {node.index} ({node.name}) is not of the graph that this was made of"
            )
        return found

    def setting(self, node: Node) -> Setting:
        """What one of these nodes holds."""
        now = self._now.settings.get(node.handle)
        if now is None:
            now = self._given.get(node.handle)
        if now is None:
            now = self._given[node.handle] = _given(node)
        return now

    def params(self, node: Node) -> NodeParams:
        """What the next launch will use for one of these nodes."""
        now = self._now.settings.get(node.handle)
        return node.params if now is None else now.params

    def settings(self) -> Iterator[tuple[tuple[Node, ...], Setting]]:
        """What every node holds, also inside; each with the nodes around it, outermost first."""
        yield from self._walk(self.definition(), ())

    def _walk(
        self, nodes: tuple[Node, ...], outer: tuple[Node, ...]
    ) -> Iterator[tuple[tuple[Node, ...], Setting]]:
        for node in nodes:
            yield outer, self.setting(node)
            for body in node.children:
                yield from self._walk(body, (*outer, node))

    # --- changing
    def after(self, changes: Sequence[Change]) -> Now:
        """The record of what is set once these changes are made, for `commit`."""
        made = {change.node.handle: self._changed(change) for change in changes}
        return replace(self._now, settings={**self._now.settings, **made})

    def _changed(self, change: Change) -> Setting:
        old, params = self.setting(change.node), change.params
        owners = {**({} if change.whole else old.owners), **dict(change.owners)}
        before, signature = old.params, old.signature
        if not (isinstance(params, KernelNodeParams) and isinstance(before, KernelNodeParams)):
            return Setting(old.node, params, None, {}, owners)
        reach = dict(old.reach)
        if change.whole:
            if change.signature is not None or params.function != before.function:
                signature = change.signature
            reach = _kept_reach(before, params, reach)
            reach.update(given_reach(params.arguments.data, owners.values()))
        for place, nbytes in change.reach:
            reach.pop(place, None)
            if nbytes is not None:
                reach[place] = nbytes
        return Setting(old.node, params, signature, reach, owners)

    def after_update(self, graph: Graph, handles: tuple[NodeHandle, ...]) -> Now:
        """The record once every parameter came from `graph`, whose nodes are these."""
        return Now(updated=(graph, handles))

    def commit(self, now: Now) -> list[object]:
        """Stores a record that the driver took. Returns what was pointed at before and may not be
        now."""
        before = self._now
        if now.updated is not before.updated:
            # Read only when a single node is asked for: an update by itself stays one call.
            self._before_update = self._nodes or self._before_update
            self._nodes = None
            self._given = {}
        self._now = now
        if now.updated is not before.updated:
            old: list[object] = [] if before.updated is None else [before.updated[0]]
            return old + [o for s in before.settings.values() for o in s.owners.values()]
        return [
            owner
            for handle, setting in before.settings.items()
            if now.settings[handle] is not setting
            for owner in setting.owners.values()
        ]

    def clear(self) -> None:
        """Releases what was set, after the executable was destroyed."""
        self._now = Now()


def _given(node: Node) -> Setting:
    reach: dict[int, int] = {}
    if isinstance(node.params, KernelNodeParams):
        reach = given_reach(node.params.arguments.data, node.keep)
    return Setting(node, node.params, node.signature, reach)


def _kept_reach(
    before: KernelNodeParams, now: KernelNodeParams, reach: Mapping[int, int]
) -> dict[int, int]:
    """What was known of words, for those that did not change."""
    old, new = before.arguments.data, now.arguments.data
    same = before.function == now.function and len(old) == len(new)
    return {at: n for at, n in reach.items() if same and old[at : at + 8] == new[at : at + 8]}


def _all(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        for body in node.children:
            yield from _all(body)


def _some(graph: Graph, handles: Sequence[NodeHandle]) -> tuple[Node, ...]:
    """Those nodes of a definition, which may have grown since."""
    wanted = set(handles)
    return tuple(n for n in graph.nodes if n.handle in wanted)


def _links(edges: Sequence[Edge], nodes: Sequence[Node]) -> set[tuple[int, int, EdgeData]]:
    """The edges by the places of their nodes."""
    place = {n.handle: i for i, n in enumerate(nodes)}
    return {
        (place[e.source], place[e.target], e.data)
        for e in edges
        if e.source in place and e.target in place
    }


def _under_handles(first: Sequence[Node], new: Sequence[Node]) -> tuple[Node, ...]:
    """The new nodes under the first ones' handles and places, also inside."""
    return tuple(
        replace(
            n,
            handle=old.handle,
            index=old.index,
            children=tuple(
                _under_handles(a, b) for a, b in zip(old.children, n.children, strict=True)
            ),
        )
        for old, n in zip(first, new, strict=True)
    )
