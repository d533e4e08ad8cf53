"""Twins of executables that leave crumbs: words in pinned host memory that say which nodes ended.

A twin has the nodes of the graph, and after a node a kernel of one thread that sets the node's
word; the nodes that waited for the node wait for that kernel.  Before the first nodes all words are
filled with another value than at the start.  The host can read the words while the graph runs, and
after the context is lost.
Child graphs and bodies of conditional nodes have words of their own.

Behind a kernel the crumb's kernel starts as soon as all blocks of that one have begun, and waits
itself for its end, so that its launch takes no time of its own.  Not in the bodies of conditional
nodes, where drivers may refuse such edges, and not behind a node that is switched off, where only a
plain edge is sure to keep the order.

A kernel that lets the next one start early (a programmatic edge) still does: the crumb's kernel
starts early behind it, sets the word to a third value, lets the next kernel start, and waits for
the end of the node before it sets the word to that of a node that ended.  So the words tell which
nodes cannot have started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ostinato.driver.api import (
    LAUNCH_ORDER,
    PROGRAMMATIC,
    AllocNodeParams,
    ChildGraphNodeParams,
    ConditionalHandle,
    ConditionalNodeParams,
    EdgeData,
    FreeNodeParams,
    GraphHandle,
    InstantiateFlags,
    KernelNodeParams,
    LaunchConfig,
    NodeHandle,
    NodeKind,
    NodeParams,
    OpaqueNodeParams,
)
from ostinato.driver.interrupts import uninterrupted
from ostinato.driver.order import in_order
from ostinato.errors import GraphError, OstinatoError
from ostinato.graph import Conditional, Graph, GraphExec, Node, every_node, prepare
from ostinato.graph.frozen import graphs_inside
from ostinato.graph.probes import probe
from ostinato.memory.buffer import allocate

State: TypeAlias = Literal["finished", "running", "early", "waiting"]
_PLAIN = EdgeData()
_ENDED, _BEGUN, _LETS = 1, 2, 3
"""Words of a node that has finished, of one whose graph has begun, and of one that lets the next
ones start early and has not finished; before that they are 0."""
_THREADS = 256
_SURE = 1 << 16
"""Smaller words of kernels without a signature are numbers, not handles of conditions."""


@dataclass(frozen=True, slots=True)
class Area:
    """The words of one graph of a twin: from `start` on those of its nodes, by index."""

    start: int
    nodes: tuple[Node, ...]
    before: Sequence[Sequence[tuple[int, bool]]]
    """The nodes that each node waits for; True: it may start before that one ends."""
    order: Sequence[int]
    marked: frozenset[int]
    """The nodes that are followed by a crumb."""
    inside: Mapping[int, tuple[Area, ...]]

    def under_way(self, words: Sequence[int]) -> bool:
        """True if the graph has begun, and not all its nodes have finished."""
        return any(words[self.start + i] in (_BEGUN, _LETS) for i in self.marked)

    def states(self, words: Sequence[int]) -> list[State]:
        """Returns what is known of each node of a graph that is under way.

        "running": may be running; with a crumb after each node these are the nodes that can run at
        once, with fewer crumbs also some before and after them.  "early": may have started while a
        node that it waits for is running, and come to its own wait for that one.
        """
        ended = [words[self.start + i] == _ENDED for i in range(len(self))]
        for i in reversed(self.order):  # what a node waited for has finished
            if ended[i]:
                for source, _ in self.before[i]:
                    if source not in self.marked:
                        ended[source] = True
        states: list[State] = ["waiting"] * len(self)
        for i in self.order:
            if ended[i]:
                states[i] = "finished"
                continue
            allowed = [self._allowed(b, early, states[b], words) for b, early in self.before[i]]
            if all(allowed):
                states[i] = "early" if "early" in allowed else "running"
        return states

    def _allowed(
        self, source: int, early: bool, state: State, words: Sequence[int]
    ) -> Literal["running", "early", ""]:
        """Returns the state in which a node may be for all that one before it has done."""
        if state == "finished":
            return "running"
        if source in self.marked:
            return "early" if early and words[self.start + source] == _LETS else ""
        return "" if state == "waiting" else state

    def with_nodes(self, nodes: tuple[Node, ...]) -> Area:
        """Returns the same with other parameters of the nodes."""
        inside = {
            index: tuple(a.with_nodes(n) for a, n in zip(areas, nodes[index].children, strict=True))
            for index, areas in self.inside.items()
        }
        return replace(self, nodes=nodes, inside=inside)

    def __len__(self) -> int:
        return len(self.nodes)


class CrumbTwin:
    """A twin of one executable, which follows its changes.

    Raises GraphError if there can be none, or the driver's and the compiler's errors.
    """

    def __init__(self, run: GraphExec, every: int) -> None:
        self.every = every
        context = run.context
        self.revision, nodes = run.revision(), run.nodes()
        _require_copyable(run, nodes)
        every_graph = [nodes, *(body for node in every_node(nodes) for body in node.children)]
        self._off = _switched_off(run, nodes)
        """The nodes, by their handles, that the twin can switch off."""
        self._crumb_kernel = probe(context, "ostinato_crumb")
        self._early_kernel = probe(context, "ostinato_early_crumb")
        self._begin_kernel = probe(context, "ostinato_begin")
        size = max(1, sum(map(len, every_graph)))
        self._words = allocate(context, size, "u4", pinned=True, name="crumbs")
        context.owners.pop(self._words.address, None)  # not memory of the user's
        self._array = self._words.array
        self._array[:] = 0
        self._next = 0
        self._conditions: dict[int, ConditionalHandle] = {}
        with uninterrupted:
            self.graph = Graph(context, context.driver.graph_create())
        try:
            for node in every_node(nodes):
                if isinstance(node.params, ConditionalNodeParams):
                    first = node.defaults
                    assert first is not None
                    self._conditions[int(node.params.handle)] = self.graph.condition(
                        first.default, reset_at_launch=first.reset_at_launch
                    )
            self._made: dict[NodeHandle, Node] = {}
            """The twin's nodes, by the handles of the originals."""
            self._hidden = context.driver.capabilities.programmatic_launch
            """True: crumbs may start before the ends of the kernels before them."""
            self.area = self._fill(self.graph, run.graph.handle, nodes, run.graph.nodes())
            priority = bool(run.flags & InstantiateFlags.USE_NODE_PRIORITY)
            self.executable = self.graph.instantiate(use_node_priority=priority)
            self._switch(self._off)
        except BaseException:
            self.graph.close()
            raise

    def words(self) -> list[int]:
        """Returns the words as they are now; no driver is called."""
        found: list[int] = self._array.tolist()
        return found

    def follow(self, run: GraphExec) -> list[Node] | None:
        """Gives the twin the present parameters.  Returns the nodes that were changed, None if
        another twin is needed."""
        revision, changed = run.revision(), list[Node]()
        if revision == self.revision:
            return changed
        try:
            nodes = run.nodes()
            off = _switched_off(run, nodes)
            if not off <= self._off:
                return None
            for old, new in zip(every_node(self.area.nodes), every_node(nodes), strict=True):
                if new.params != old.params:
                    if new.children:
                        return None
                    self.executable.set(self._made[new.handle], self._params(new))
                    changed.append(new)
            self._switch(off)
        except OstinatoError:
            return None
        self.area, self.revision = self.area.with_nodes(nodes), revision
        return changed

    def close(self) -> None:
        """Destroys it once its launches are done."""
        self.executable.close()
        self.graph.close()

    def _switch(self, off: frozenset[NodeHandle]) -> None:
        """Switches these nodes off, and on those that are not among them."""
        for handle in self._off:
            self.executable.set(self._made[handle], enabled=handle not in off)

    # --- building
    def _fill(
        self,
        target: Graph,
        handle: GraphHandle,
        nodes: tuple[Node, ...],
        defined: tuple[Node, ...],
    ) -> Area:
        """Adds the nodes of a graph, and the crumbs.  `defined`: the nodes of the definition, which
        know the graphs inside of them, also after an update of the executable."""
        index = {node.handle: node.index for node in nodes}
        before: list[list[tuple[int, bool]]] = [[] for _ in nodes]
        data: list[list[EdgeData]] = [[] for _ in nodes]
        edges: list[tuple[int, int]] = []
        early: set[int] = set()
        for edge in target.context.driver.graph_edges(handle):
            if edge.source not in index:
                raise GraphError("a child graph node was given another child since")
            source, to = index[edge.source], index[edge.target]
            programmatic = edge.data.type is PROGRAMMATIC.type
            before[to].append((source, programmatic))
            data[to].append(edge.data)
            edges.append((source, to))
            if programmatic:
                early.add(source)
        order = in_order(len(nodes), edges)
        assert order is not None, "a driver refuses edges that form a cycle"
        start, self._next = self._next, self._next + len(nodes)
        words = self._words[start : self._next]
        followed = {source for source, _ in edges}
        clear = prepare(self._begin_kernel, LaunchConfig(1, _THREADS), words, len(nodes))
        begin = [target.add_operation(clear)] if nodes else []
        made: dict[int, Node] = {}
        crumbs: dict[int, Node] = {}
        inside: dict[int, tuple[Area, ...]] = {}
        for count, i in enumerate(order, 1):
            after = [crumbs.get(b) or made[b] for b, _ in before[i]] or begin
            kinds = [
                kind if b not in crumbs else PROGRAMMATIC if programmatic else _PLAIN
                for (b, programmatic), kind in zip(before[i], data[i], strict=True)
            ]
            data_of = None if all(kind == _PLAIN for kind in kinds) else kinds
            made[i], inside[i] = self._add(target, nodes[i], defined[i], after, data_of)
            self._made[nodes[i].handle] = made[i]
            if count % self.every == 0 or i not in followed:
                off = nodes[i].handle in self._off
                crumbs[i] = self._crumb(target, start + i, made[i], early=i in early, off=off)
        return Area(start, nodes, before, order, frozenset(crumbs), inside)

    def _crumb(self, target: Graph, at: int, after: Node, *, early: bool, off: bool) -> Node:
        kernel = self._early_kernel if early else self._crumb_kernel
        mark = prepare(kernel, LaunchConfig(1, 1), self._words[at : at + 1])
        hidden = self._hidden and after.kind is NodeKind.KERNEL
        data = None if off else [PROGRAMMATIC] if early else [LAUNCH_ORDER] if hidden else None
        return target.add(mark.params, after=[after], edge_data=data, operation=mark)

    def _add(
        self,
        target: Graph,
        node: Node,
        defined: Node,
        after: Sequence[Node],
        data: list[EdgeData] | None,
    ) -> tuple[Node, tuple[Area, ...]]:
        params, graphs = self._params(node), graphs_inside(defined.params)
        inner = tuple(zip(graphs, node.children, defined.children, strict=True))
        if isinstance(params, ChildGraphNodeParams):
            with uninterrupted:
                child = Graph(target.context, target.context.driver.graph_create())
            with child:
                area = self._fill(child, *inner[0])
                here = ChildGraphNodeParams(child.handle)
                made = target.add(here, after=after, edge_data=data, keep=(child, *child.kept))
                pairs = zip(every_node(child.nodes()), every_node(made.children[0]), strict=True)
                copies = {old.handle: copy for old, copy in pairs}
            for original in every_node(node.children[0]):
                self._made[original.handle] = copies[self._made[original.handle].handle]
            return made, (area,)
        made = target.add(params, after=after, edge_data=data)
        if not isinstance(params, ConditionalNodeParams):
            return made, ()
        bodies = Conditional(target, made).bodies
        hidden, self._hidden = self._hidden, False
        areas = [self._fill(body, *graph) for body, graph in zip(bodies, inner, strict=True)]
        self._hidden = hidden
        return made, tuple(areas)

    def _params(self, node: Node) -> NodeParams:
        """Returns a node's parameters with the twin's conditions."""
        params = node.params
        if isinstance(params, ConditionalNodeParams):
            handle = self._conditions[int(params.handle)]
            return ConditionalNodeParams(handle, params.kind, params.size)
        if not self._conditions or not isinstance(params, KernelNodeParams):
            return params
        data = bytearray(params.arguments.data)
        for at in _condition_places(node, params):
            mine = self._conditions.get(int.from_bytes(data[at : at + 8], "little"))
            if mine is not None:
                data[at : at + 8] = int(mine).to_bytes(8, "little")
        return params.with_data(bytes(data))


def _switched_off(run: GraphExec, nodes: tuple[Node, ...]) -> frozenset[NodeHandle]:
    """Returns the nodes of an executable that are switched off."""
    if not run.changed():
        return frozenset()
    can = [n for n in every_node(nodes) if n.kind in (NodeKind.KERNEL, NodeKind.MEMCPY)]
    return frozenset(node.handle for node in can if not run.enabled(node))


def _condition_places(node: Node, params: KernelNodeParams) -> Iterator[int]:
    """Yields the offsets of the words that may be handles of conditions."""
    data, layout, signature = params.arguments.data, params.arguments.layout, node.signature
    if signature is not None and signature.layout == layout:
        for slot, parameter in zip(layout, signature.parameters, strict=True):
            if parameter.type == "cond" and not parameter.pointer:
                yield slot.offset
        return
    for at in range(0, len(data) - 7, 8):
        if int.from_bytes(data[at : at + 8], "little") >= _SURE:
            yield at


def _require_copyable(run: GraphExec, nodes: tuple[Node, ...]) -> None:
    """Raises GraphError for a graph of which there can be no twin."""
    there = run.context.driver.graph_nodes(run.graph.handle)
    if there != tuple(node.handle for node in nodes):
        raise GraphError("the graph has other nodes than when it was instantiated")
    for node in every_node(nodes):
        params, why = node.params, ""
        if isinstance(params, AllocNodeParams | FreeNodeParams):
            why = "allocates or frees memory, whose address another graph cannot have"
        elif isinstance(params, OpaqueNodeParams):
            why = f"cannot be made again: {params.why}"
        elif getattr(params, "opaque", False):
            why = "works on a CUDA array, which cannot be read"
        elif isinstance(params, ConditionalNodeParams) and node.defaults is None:
            why = "has a condition of another library, whose first value is not known"
        if why:
            raise GraphError(f"node {node.index} ({node.name}) {why}")
