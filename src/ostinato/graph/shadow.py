"""`Shadow`: what the nodes of an executable hold; the driver has no getters for it.

States of a node: as in the definition, or as it was set since.  What was set since is one frozen
record (`Now`), which is replaced in one step: an interruption leaves the old record or the new one,
never a mixture.  Kernel nodes whose single arguments are set often are held as `Live` objects
instead, and folded into the record when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial

from ostinato.driver.api import (
    AllocNodeParams,
    ChildGraphNodeParams,
    Driver,
    EmptyNodeParams,
    FreeNodeParams,
    FrozenGraph,
    GraphHandle,
    KernelNodeParams,
    KernelSetter,
    NodeHandle,
    NodeParams,
)
from ostinato.errors import InputError, UpdateRefusedError
from ostinato.graph.bodies import check_loops, graphs_inside
from ostinato.graph.changes import Change, Setting, keeps, require_kept
from ostinato.graph.graph import Graph
from ostinato.graph.node import Node, every_node, given_reach, index_below
from ostinato.graph.pairing import kept_of_graphs
from ostinato.graph.pointers import PlainMove, PointerIndex
from ostinato.memory.ranges import KnownRanges

__all__ = ["Live", "Now", "Shadow"]


@dataclass(frozen=True, slots=True)
class Now:
    """What was set since the definition was read."""

    settings: Mapping[NodeHandle, Setting] = field(default_factory=dict)
    updated: tuple[Graph, _Frozen] | None = None
    """The graph of the last whole update, and what it held then."""


class Live:
    """One kernel node whose arguments are set by `KernelSetter`, without a record for each change.

    What it holds is in here until `Shadow` folds it into a `Setting`.  `gone`: the node was changed
    in another way since, and another `Live` is to be made.
    """

    __slots__ = ("dirty", "gone", "node", "owners", "params", "reach", "setter", "signature")

    def __init__(self, setting: Setting, params: KernelNodeParams, setter: KernelSetter) -> None:
        self.node = setting.node
        self.params = params
        self.signature = setting.signature
        self.setter = setter
        # The record's own: it must not keep alive what the node points at no longer.
        self.owners = setting.owners
        self.reach = dict(setting.reach)
        self.dirty = False
        self.gone = False

    def setting(self) -> Setting:
        """What the node holds."""
        params = self.params.with_data(self.setter.data)
        return Setting(self.node, params, self.signature, dict(self.reach), self.owners)


class _Frozen:
    """A graph and the graphs inside its nodes, as they were when this was made."""

    def __init__(
        self, driver: Driver, handle: GraphHandle, ours: Container[NodeHandle] | None = None
    ) -> None:
        """`ours`: nodes that this library made."""
        self._freeze = partial(driver.graph_freeze, ours=ours)
        self.graphs: dict[GraphHandle, FrozenGraph] = {}
        self.outer = self._add(handle)

    @classmethod
    def of(cls, graph: Graph) -> _Frozen:
        # In an adopted graph another library may remove a node of ours, and add one that gets its
        # handle.
        return cls(graph.context.driver, graph.handle, graph.labels if graph.owned else None)

    def _add(self, handle: GraphHandle) -> FrozenGraph:
        made = self.graphs[handle] = self._freeze(handle)
        for index in made.holders:
            for inner in graphs_inside(made.params(index)):
                self._add(inner)
        return made

    def inside(self, frozen: FrozenGraph, index: int) -> list[FrozenGraph]:
        """The graphs inside a node."""
        return [self.graphs[inner] for inner in graphs_inside(frozen.params(index))]

    def hides(self, node: NodeHandle) -> bool:
        """Whether a kernel node may have launch attributes that the driver does not tell."""
        for frozen in self.graphs.values():
            if node in frozen.nodes:
                attributes = frozen.attributes(frozen.nodes.index(node))
                return attributes is not None and attributes.function is not None
        return False

    def at(self, handle: GraphHandle) -> _Frozen | None:
        """The graph inside that has this handle, as one of its own; None if there is none."""
        outer = self.graphs.get(handle)
        if outer is None:
            return None
        made = copy(self)
        made.outer = outer
        return made

    def shape(self) -> object:
        """Kinds of nodes and edges by the places of nodes, also of the graphs inside."""
        return self._shape(self.outer)

    def _shape(self, frozen: FrozenGraph) -> object:
        kinds = [frozen.kind(index) for index in range(len(frozen.nodes))]
        inside = [self._shape(each) for at in frozen.holders for each in self.inside(frozen, at)]
        return kinds, frozen.links(), inside

    def node(self, graph: Graph, index: int, find: KnownRanges) -> Node:
        """One of its own nodes."""
        return self._read(graph, self.outer, index, find)

    def nodes(self, graph: Graph) -> tuple[Node, ...]:
        """All of them."""
        find = KnownRanges(graph.context.driver.memory_range)
        return tuple(self.node(graph, index, find) for index in range(len(self.outer.nodes)))

    def _inside(self, graph: Graph, find: KnownRanges, handle: GraphHandle) -> tuple[Node, ...]:
        frozen = self.graphs[handle]
        return tuple(self._read(graph, frozen, index, find) for index in range(len(frozen.nodes)))

    def _read(self, graph: Graph, frozen: FrozenGraph, index: int, find: KnownRanges) -> Node:
        node = graph.read_node(frozen, index, find, partial(self._inside, graph, find))
        _ = node.arguments  # decoded now: memory may be closed before they are asked for
        return node


class Shadow:
    """The nodes of one executable, what they were set to, and what that keeps alive.

    Not for several threads at once.  The definition is frozen when the executable is made, and a
    node is decoded when it is first asked for: what the definition is changed to afterwards, by
    this library or another one, is not taken for what the executable holds.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._frozen = _Frozen.of(graph)
        self._handles = self._frozen.outer.nodes
        self._single: dict[int, Node] = {}
        """Nodes that were read one by one."""
        self._nodes: tuple[Node, ...] | None = None
        self._before_update: tuple[Node, ...] | None = None
        self._given: dict[NodeHandle, Setting] = {}
        """Settings of the definition's own, worked out when they were first needed."""
        self._now = Now()
        self._live: dict[NodeHandle, Live] = {}
        self._dirty: list[Live] = []
        """Those that hold what `_now` does not."""
        self._pointers: PointerIndex | None = None
        self._stale: set[NodeHandle] = set()
        """Nodes that were changed since `pointers` was asked for last."""

    @property
    def changed(self) -> bool:
        """Whether anything was set since the definition was read."""
        return bool(self._dirty or self._now.settings) or self._now.updated is not None

    def __len__(self) -> int:
        """How many nodes there are, without those inside others."""
        return len(self._handles)

    @property
    def empty(self) -> bool:
        """Whether there are no nodes."""
        return not self._handles

    @property
    def grown(self) -> bool:
        """Whether the definition has other nodes than when it was read."""
        graph = self._graph
        return graph.context.driver.graph_nodes(graph.handle) != self._handles

    def check_loops(self) -> None:
        """Raises GraphError for a WHILE of the definition that cannot end (`bodies`)."""
        check_loops(self._graph.context.driver, self._frozen.outer, self._frozen.graphs)

    def left_allocated(self) -> list[int]:
        """The addresses of the definition's alloc nodes that it has no free node for."""
        found = [
            frozen.params(index)
            for frozen in self._frozen.graphs.values()
            for index in frozen.memory_nodes
        ]
        freed = {params.address for params in found if isinstance(params, FreeNodeParams)}
        return [
            params.address
            for params in found
            if isinstance(params, AllocNodeParams) and params.address not in freed
        ]

    # --- reading
    @property
    def nodes(self) -> tuple[Node, ...]:
        """The definition's nodes with the parameters that the next launch will use."""
        return self._overlaid(self.definition(), self._folded().settings)

    def _overlaid(
        self, nodes: tuple[Node, ...], settings: Mapping[NodeHandle, Setting]
    ) -> tuple[Node, ...]:
        if not settings:
            return nodes
        return tuple(
            replace(
                settings[n.handle].shown() if n.handle in settings else n,
                children=tuple(self._overlaid(body, settings) for body in n.children),
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
            first = self._before_update or self._first()
            self._nodes = first if self._now.updated is None else self._paired(first)
            self._single = {}
        return self._nodes

    def _first(self) -> tuple[Node, ...]:
        """The nodes as they were instantiated."""
        _ = self._graph.handle  # raises if the definition was closed
        read = self._frozen.nodes(self._graph)
        return tuple(self._single.get(node.index, node) for node in read)

    def _paired(self, first: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes of the last update's graph under the first ones' handles."""
        assert self._now.updated is not None
        graph, frozen = self._now.updated
        _ = graph.handle
        # CUDA pairs nodes along edges, so it also takes a graph whose nodes come in another order;
        # what is set here belongs to a node's index.
        if self._frozen.shape() != frozen.shape():
            raise UpdateRefusedError(
                "the executable was updated from a graph whose nodes come in another order, so its "
                "single nodes cannot be told apart any more; instantiate again to set them"
            )
        return _under_handles(first, frozen.nodes(graph))

    def node(self, node: Node | int) -> Node:
        """A node as it was in the definition, also inside child graphs and bodies.

        A number is an index of the graph's own nodes.  Raises InputError if it is not one of these,
        ClosedError if the definition was closed: libcuda may crash over a node that is gone.
        """
        _ = self._graph.handle
        handles = self._handles
        if not isinstance(node, Node):
            return self._own(index_below(len(handles), node))
        if node.index < len(handles) and handles[node.index] == node.handle:
            return self._own(node.index)
        found = next((n for n in every_node(self.definition()) if n.handle == node.handle), None)
        if found is None:
            raise InputError(
                f"node {node.index} ({node.name}) is not of the graph that this was made of"
            )
        return found

    def _own(self, index: int) -> Node:
        """One of the graph's own nodes; the others need not be read."""
        if self._nodes is not None or self._now.updated is not None:
            return self.definition()[index]
        found = self._single.get(index)
        if found is None:
            graph = self._graph
            find = KnownRanges(graph.context.driver.memory_range)
            found = self._single[index] = self._frozen.node(graph, index, find)
        return found

    def _folded(self) -> Now:
        """The record of what was set, with what is in `Live` nodes."""
        if self._dirty:
            made = {live.node.handle: live.setting() for live in self._dirty}
            self._now = replace(self._now, settings={**self._now.settings, **made})
            for handle in made:  # a `Live` notes owners in the setting that it was made of
                self._given.pop(handle, None)
            while self._dirty:
                self._dirty.pop().dirty = False
        return self._now

    def setting(self, node: Node) -> Setting:
        """What one of these nodes holds."""
        now = self._folded().settings.get(node.handle)
        if now is None:
            now = self._given.get(node.handle)
        if now is None:
            now = self._given[node.handle] = _given(node)
        return now

    def params(self, node: Node) -> NodeParams:
        """What the next launch will use for one of these nodes."""
        now = self._folded().settings.get(node.handle)
        return node.params if now is None else now.params

    def set_with(self, node: Node) -> list[Node]:
        """A node, and the nodes inside it that were set: a node that gets its child graph again
        loses what was set inside."""
        settings = self._folded().settings
        inside = every_node(inner for body in node.children for inner in body)
        return [node, *(inner for inner in inside if inner.handle in settings)]

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

    def pointers(self) -> PointerIndex:
        """Every word that may hold an address, as the next launch will use it."""
        index, self._pointers = self._pointers, None  # kept only if nothing breaks off
        if index is not None and self._stale:
            settings = self._folded().settings
            changed = [settings.get(handle) for handle in self._stale]
            # A handle without a setting was updated, or undone.
            if not index.refreshed(one for one in changed if one) or None in changed:
                index = None
        if index is None:
            index = PointerIndex(self.settings())
        self._stale.clear()
        self._pointers = index
        return index

    def moved(self, move: PlainMove) -> None:
        """Notes in the index that a rebinding which it planned was made, with no other change in
        between."""
        if self._pointers is not None:
            self._pointers.moved(move)
            self._stale.clear()

    # --- nodes that are changed often
    def live(
        self, node: Node, prepare: Callable[[NodeHandle, KernelNodeParams], KernelSetter]
    ) -> Live:
        """One of the nodes, to be changed in place.  Raises NodeKindError if it is no kernel."""
        live = self._live.get(node.handle)
        if live is None:
            setting = self.setting(node)
            params = setting.params
            if not isinstance(params, KernelNodeParams):
                params = node.kernel
            live = Live(setting, params, prepare(node.handle, params))
            self._live[node.handle] = live
        return live

    def touch(self, live: Live) -> None:
        """Must be called before a `Live` node is changed."""
        if not live.dirty:
            self._dirty.append(live)
            live.dirty = True
        self._stale.add(live.node.handle)

    def end_live(self) -> None:
        """Makes the record of what is in `Live` nodes, and ends these."""
        self._folded()
        self._drop(tuple(self._live))

    def _drop(self, handles: Iterable[NodeHandle]) -> None:
        """Forgets the `Live` objects of these nodes: the driver was given other parameters."""
        for handle in handles:
            live = self._live.pop(handle, None)
            if live is not None:
                live.gone = True
                live.owners = {}  # a patcher may hold it for longer

    # --- changing
    def after(self, changes: Sequence[Change]) -> Now:
        """The record of what is set once these changes are made, for `commit`."""
        made = {change.node.handle: self._changed(change) for change in changes}
        for change in changes:
            if isinstance(change.params, ChildGraphNodeParams):
                made.update(self._changed_inside(change, change.params.graph))
        now = self._folded()
        return replace(now, settings={**now.settings, **made})

    def _changed(self, change: Change) -> Setting:
        old, params = self.setting(change.node), change.params
        owners = {**({} if change.whole else old.owners), **dict(change.owners)}
        before, signature = old.params, old.signature
        if not (isinstance(params, KernelNodeParams) and isinstance(before, KernelNodeParams)):
            return Setting(old.node, params, None, {}, owners)
        other = params.function != before.function
        same = before.config, before.extra_attributes
        if other or (params.config, params.extra_attributes) != same:
            by_function = other and self._frozen.hides(old.node.handle)
            require_kept(old.node, before, params, by_function=by_function)
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

    def _changed_inside(self, change: Change, child: GraphHandle) -> dict[NodeHandle, Setting]:
        """What the nodes inside a child graph node hold once it got another child.

        Raises UpdateRefusedError unless the child has the same nodes and edges, in the same order,
        and its kernels the same launch attributes.
        """
        node = change.node
        assert isinstance(node.params, ChildGraphNodeParams)
        graphs = [o for _, o in change.owners if isinstance(o, Graph) and o.owned and not o.closed]
        ours = next((graph.labels for graph in graphs if graph.handle == child), None)
        before = self._inside(node.params.graph)
        frozen = _Frozen(self._graph.context.driver, child, ours)
        self._require_kept(before, frozen, node)
        if before.shape() != frozen.shape():
            raise UpdateRefusedError(
                f"node {node.index} ({node.name}): the child graph that it is to have has other "
                "nodes or edges, or in another order; instantiate again",
                node_index=node.index,
            )
        return dict(self._set_inside(node.children[0], frozen, frozen.outer))

    def _inside(self, graph: GraphHandle) -> _Frozen:
        """A graph inside, as it was when the executable was made, or updated."""
        updated = None if self._now.updated is None else self._now.updated[1].at(graph)
        found = updated or self._frozen.at(graph)
        assert found is not None, "a node's child is one of those that were read with it"
        return found

    def _set_inside(
        self, nodes: Sequence[Node], whole: _Frozen, frozen: FrozenGraph
    ) -> Iterator[tuple[NodeHandle, Setting]]:
        for index, inner in enumerate(nodes):
            params = frozen.params(index)
            if isinstance(params, EmptyNodeParams):
                continue
            yield inner.handle, self._changed(Change(inner, params, whole=True))
            for body, graph in zip(inner.children, whole.inside(frozen, index), strict=True):
                yield from self._set_inside(body, whole, graph)

    def _require_kept(self, old: _Frozen, new: _Frozen, around: Node | None = None) -> None:
        """Raises UpdateRefusedError if the driver would take `new` for `old`, but not all of it.

        `around`: the child graph node that is changed, None for the whole graph.
        """
        kept = kept_of_graphs(old, new)
        if kept is None:
            return
        path = kept.path if around is None else (around.index, *kept.path)
        inside = "".join(f" inside node {index}" for index in reversed(path))
        if kept.index is None or kept.old is None or kept.new is None:
            raise UpdateRefusedError(
                f"the edges{inside} are not the same: programmatic in one graph, plain in the "
                "other. An executable keeps its edges. Instantiate again.",
                node_index=path[0] if path else None,
            )
        params = kept.graph.params(kept.index)
        assert isinstance(params, KernelNodeParams)
        name = self._graph.context.driver.function_info(params.function).name
        where = f"node {kept.index} ({name}){inside}"
        raise keeps(where, kept.old, kept.new, path[0] if path else kept.index)

    def after_update(self, graph: Graph) -> Now:
        """The record once every parameter came from `graph` as it is now.

        Raises UpdateRefusedError if the driver would not take all of it, and not say so.
        """
        frozen = _Frozen.of(graph)
        self._require_kept(self._frozen, frozen)
        return Now(updated=(graph, frozen))

    def commit(self, now: Now) -> list[object]:
        """Stores a record that the driver took.  Returns what was pointed at before it, and may not
        be pointed at any more."""
        before = self._folded()
        if now.updated is not before.updated:
            # Decoded only when a single node is asked for.
            self._before_update = self._nodes or self._before_update
            self._nodes = None
            self._given = {}
            self._drop(tuple(self._live))
            self._now = now
            self._stale.update(self._handles)
            old: list[object] = [] if before.updated is None else [before.updated[0]]
            return old + [o for s in before.settings.values() for o in s.owners.values()]
        settings = before.settings
        changed = [h for h, setting in now.settings.items() if settings.get(h) is not setting]
        self._drop(changed)
        self._now = now
        self._stale.update(changed)
        return [owner for h in changed if h in settings for owner in settings[h].owners.values()]

    def clear(self) -> None:
        """Releases what was set, after the executable was destroyed."""
        self.end_live()
        self._now = Now()
        self._given = {}


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


def _under_handles(first: Sequence[Node], new: Sequence[Node]) -> tuple[Node, ...]:
    """The new nodes with the handles and indices of the first ones, also inside of nodes."""
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
