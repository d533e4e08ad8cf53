"""`Frozen`: a graph and the graphs inside its nodes, as they were when an executable was made.

This file also has the analyses of whole graphs: nodes that bodies of conditional nodes cannot hold,
loops that cannot end, and differences that a whole update would silently keep: launch attributes,
and the kinds of edges.

An update pairs each node of the new graph with one of the executable.  CUDA pairs along the edges
(measured), by a rule that it does not document.  If the nodes and edges of both graphs are the same
by their indices, nodes with the same index are a pair.  Otherwise nodes can be a pair only if
everything before them is the same, and then all nodes that can be paired must be alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Protocol, TypeAlias

from ostinato.driver.api import (
    BODY_PARAMS,
    ChildGraphNodeParams,
    ConditionalKind,
    ConditionalNodeParams,
    Driver,
    FrozenGraph,
    GraphHandle,
    KernelNodeParams,
    LaunchAttributes,
    NodeHandle,
    NodeKind,
    NodeParams,
    OpaqueNodeParams,
)
from ostinato.driver.context import Context
from ostinato.driver.location import caller_line
from ostinato.driver.order import in_order
from ostinato.driver.stream import Operation
from ostinato.errors import DriverError, GraphError
from ostinato.graph.node import Node, NodeLabel, NodeReader
from ostinato.memory.ranges import KnownRanges

_shown: dict[str | tuple[str, type[Warning], int], int] = {}
"""The warnings shown so far, for the filters that show each place once."""
BODY_RULE = (
    "the body of a conditional node, and a child graph in one, can hold kernels, copies, fills, "
    "empty nodes, child graphs and conditional nodes only; put other nodes before or after the "
    "conditional node"
)


def wrongly_in_a_body(nodes: Iterable[Node], way: str = "", *, inside: bool = False) -> str:
    """Describes the first node that no body can hold, with the nodes around it; empty if none.

    `inside`: the nodes themselves are in a body.
    """
    for node in nodes:
        here = f"{way}node {node.index} ({node.name})"
        if inside and not isinstance(node.params, (*BODY_PARAMS, OpaqueNodeParams)):
            return f"{here} of kind {node.kind.name}"
        conditional = node.kind is NodeKind.CONDITIONAL
        for number, graph in enumerate(node.children):
            inner = f"{here}, body {number}, " if conditional else f"{here}, "
            found = wrongly_in_a_body(graph, inner, inside=inside or conditional)
            if found:
                return found
    return ""


def graphs_inside(params: NodeParams) -> tuple[GraphHandle, ...]:
    """Returns the child graph, or the bodies, of a node with these parameters."""
    if isinstance(params, ChildGraphNodeParams):
        return (params.graph,)
    return params.bodies if isinstance(params, ConditionalNodeParams) else ()


class Definition(Protocol):
    """The part of `Graph` that an executable needs."""

    @property
    def context(self) -> Context: ...
    @property
    def labels(self) -> Mapping[NodeHandle, NodeLabel]: ...
    @property
    def handle(self) -> GraphHandle: ...
    @property
    def owned(self) -> bool: ...
    def nodes(self) -> tuple[Node, ...]: ...
    @property
    def reader(self) -> NodeReader: ...


class Frozen:
    """A graph and the graphs inside its nodes, as they were when this was made."""

    def __init__(
        self, driver: Driver, handle: GraphHandle, ours: Container[NodeHandle] | None = None
    ) -> None:
        """`ours`: nodes that this library made."""
        self._freeze = partial(driver.graph_freeze, ours=ours)
        self.graphs: dict[GraphHandle, FrozenGraph] = {}
        self.outer = self._add(handle)

    def _add(self, handle: GraphHandle) -> FrozenGraph:
        made = self.graphs[handle] = self._freeze(handle)
        for index in made.holders:
            for inner in graphs_inside(made.params(index)):
                self._add(inner)
        return made

    def inside(self, frozen: FrozenGraph, index: int) -> list[FrozenGraph]:
        """Returns the graphs inside a node."""
        return [self.graphs[inner] for inner in graphs_inside(frozen.params(index))]

    def hides(self, node: NodeHandle) -> bool:
        """True if a kernel node may have launch attributes that the driver does not report."""
        for frozen in self.graphs.values():
            if node in frozen.nodes:
                attributes = frozen.attributes(frozen.nodes.index(node))
                return attributes is not None and attributes.function is not None
        return False

    def at(self, handle: GraphHandle) -> Frozen | None:
        """Returns the graph inside that has this handle, as a `Frozen` of its own, or None."""
        outer = self.graphs.get(handle)
        return None if outer is None else self.around(outer)

    def around(self, outer: FrozenGraph) -> Frozen:
        """Returns one of the graphs inside as a `Frozen` of its own."""
        made = copy(self)
        made.outer = outer
        return made

    def shape(self) -> object:
        """Returns the kinds of nodes and the edges, by indices, also of the graphs inside."""
        return self._shape(self.outer)

    def _shape(self, frozen: FrozenGraph) -> object:
        kinds = [frozen.kind(index) for index in range(len(frozen.nodes))]
        inside = [self._shape(each) for at in frozen.holders for each in self.inside(frozen, at)]
        return kinds, frozen.links(), inside


class Nodes:
    """The nodes of one graph of an executable, read from its frozen content one by one.

    They have the handles of the graph of which the executable was made, also after an update from
    another graph.  Only `read` calls the driver with a node.
    """

    def __init__(
        self,
        of: Definition,
        reader: NodeReader,
        content: Frozen,
        first: Frozen,
        find: KnownRanges,
        outer: tuple[tuple[int, str], ...] = (),
    ) -> None:
        """`content`: a graph of `of`, with the graphs inside it; `first`: the one at its place in
        the executable when that was made; `outer`: index and name of the nodes around it, outermost
        first; `find`: the driver's allocations, as they were when the nodes were first read."""
        self.of, self.reader, self.find, self.outer = of, reader, find, outer
        self.frozen, self.handles = content.outer, first.outer.nodes
        self._content, self._first = content, first
        self._known: dict[int, Node] = {}
        self._inside: dict[int, tuple[Nodes, ...]] = {}

    def name(self, index: int) -> str:
        frozen, reader = self.frozen, self.reader
        if frozen.kernels.keys[index] is not None:
            return reader.function_name(frozen.kernel(index)[0])
        return reader.name(frozen.kind(index), frozen.params(index))

    def operations(self, indices: Iterable[int]) -> list[Operation | None]:
        """Returns the operations of which this library made nodes, as far as it did."""
        handles = self.frozen.nodes
        labels = map(self.reader.labels.get, [handles[index] for index in indices])
        return [None if label is None else label.operation for label in labels]

    def inside(self, index: int) -> tuple[Nodes, ...]:
        """Returns the child graph, or the bodies, of a node."""
        made = self._inside.get(index)
        if made is None and index in self.frozen.holders:
            content, first = self._content, self._first
            outer = (*self.outer, (index, self.name(index)))
            pairs = zip(
                content.inside(content.outer, index), first.inside(first.outer, index), strict=True
            )
            made = self._inside[index] = tuple(
                Nodes(
                    self.of,
                    self.reader,
                    content.around(now),
                    first.around(was),
                    self.find,
                    outer,
                )
                for now, was in pairs
            )
        return made or ()

    def parts(self) -> Iterator[tuple[Nodes, range]]:
        """Yields all nodes, each followed by those inside it, as ranges of indices."""
        start = 0
        for index in self.frozen.holders:
            yield self, range(start, index + 1)
            start = index + 1
            for inner in self.inside(index):
                yield from inner.parts()
        yield self, range(start, len(self.handles))

    def read(self, index: int) -> Node:
        """Returns a node.  Raises ClosedError if the definition was closed before: libcuda may
        crash on a node that is gone."""
        node = self._known.get(index)
        if node is None:
            _ = self.of.handle
            inner, frozen = iter(self.inside(index)), self.frozen
            content = frozen.nodes[index], frozen.kind(index), frozen.params(index)
            node = self.reader.read(index, *content, self.find, lambda _: next(inner).all())
            if node.handle != self.handles[index]:
                node = replace(node, handle=self.handles[index])
            _ = node.arguments  # decoded now: memory may be closed before a later access
            self._known[index] = node
        return node

    def all(self) -> tuple[Node, ...]:
        return tuple(map(self.read, range(len(self.handles))))


# --- loops
@dataclass(frozen=True, slots=True)
class _Found:
    """A node of a frozen graph, or of one inside it."""

    node: NodeHandle
    params: NodeParams | None
    """The parameters; None if the driver cannot read them."""
    way: str


def check_loops(driver: Driver, graph: Frozen) -> None:
    """Checks the WHILE nodes of a graph and of the graphs inside it.

    Only kernels set a condition.  Raises GraphError for a body without a kernel: a launch whose
    condition is true would never end.  Warns (UserWarning) of a loop that may begin, if none of its
    kernels has the condition among the arguments.
    """
    outer, inner = graph.outer, graph.graphs
    if not outer.holders:
        return
    everything = list(_nodes(outer, inner, ""))
    for found in everything:
        params = found.params
        if not isinstance(params, ConditionalNodeParams) or params.kind != ConditionalKind.WHILE:
            continue
        (body,) = params.bodies
        inside = list(_nodes(inner[body], inner, ""))
        if not any(isinstance(one.params, KernelNodeParams | None) for one in inside):
            what = "nothing" if not inside else f"{len(inside)} nodes and no kernel"
            raise GraphError(
                f"the body of the WHILE at {found.way} holds {what}, so nothing sets its condition "
                "and a launch could never end: fill the body with a kernel that sets the condition "
                "(if a capture into the body broke, capture into it again)"
            )
        if any(_may_set(one, params) for one in inside):
            continue
        defaults = driver.condition_defaults(found.node)
        if (
            defaults is None
            or defaults.default
            or not defaults.reset_at_launch
            or any(_may_set(one, params) for one in everything)
        ):
            file, line = caller_line() or ("ostinato", 0)
            warnings.warn_explicit(
                f"the WHILE at {found.way} may never end: no kernel in its body has the condition "
                f"{params.handle:#x} among its arguments. Give it to a kernel that sets it, unless "
                "one reads it from memory",
                UserWarning,
                file,
                line,
                registry=_shown,
            )


def _nodes(
    frozen: FrozenGraph, inner: Mapping[GraphHandle, FrozenGraph], way: str
) -> Iterator[_Found]:
    """Yields every node, each followed by the nodes of the graphs inside it."""
    for index, node in enumerate(frozen.nodes):
        try:
            params: NodeParams | None = frozen.params(index)
        except DriverError:
            params = None
        yield _Found(node, params, f"{way}node {index}")
        for handle in () if params is None else graphs_inside(params):
            yield from _nodes(inner[handle], inner, f"{way}node {index}, ")


def _may_set(found: _Found, loop: ConditionalNodeParams) -> bool:
    """True if a node is a kernel with the loop's condition in its arguments, or unreadable."""
    params = found.params
    if isinstance(params, KernelNodeParams):
        return int(loop.handle).to_bytes(8, "little") in params.arguments.data
    return params is None


# --- differences that an update keeps
_Class: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Indices of nodes in the old graph, and of nodes in the new one that may be their pairs."""


@dataclass(frozen=True, slots=True)
class KeptDifference:
    """A difference that an update would keep.  `path`: the indices in the new graph of the nodes
    around it, outermost first.  `index`, `old` and `new` are those of a kernel node of `graph`;
    None for edges."""

    graph: FrozenGraph
    path: tuple[int, ...]
    index: int | None = None
    old: LaunchAttributes | None = None
    new: LaunchAttributes | None = None


def kept_of_graphs(old: Frozen, new: Frozen) -> KeptDifference | None:
    """Returns the first difference that an update of an executable of `old` by `new` would keep.

    None also for graphs that differ in other ways: the driver refuses these.
    """
    return _Comparison(old, new).graphs(old.outer, new.outer, ())


class _Comparison:
    def __init__(self, old: Frozen, new: Frozen) -> None:
        self._old, self._new = old, new

    def graphs(
        self, old: FrozenGraph, new: FrozenGraph, path: tuple[int, ...]
    ) -> KeptDifference | None:
        plain = old.plain and new.plain
        if plain and not old.holders and not new.holders:
            kinds = old.kinds_of_attributes
            if len(kinds) < 2 and kinds >= new.kinds_of_attributes:
                return None  # the same for all pairings
        if len(old.nodes) == len(new.nodes) and old.links() == new.links():
            classes: Iterable[_Class] | None = (((i,), (i,)) for i in range(len(old.nodes)))
        else:
            classes = _classes(old, new, data=True)
        if classes is None:
            same = not plain and _classes(old, new, data=False) is not None
            return KeptDifference(new, path) if same else None
        return self._nodes(old, new, classes, path)

    def _nodes(
        self,
        old: FrozenGraph,
        new: FrozenGraph,
        classes: Iterable[_Class],
        path: tuple[int, ...],
    ) -> KeptDifference | None:
        for before, after in classes:
            was, first = old.attributes(before[0]), new.attributes(after[0])
            # Each with the first of the others: nodes equal to one are equal to all.
            pairs = [(before[0], b) for b in after] + [(a, after[0]) for a in before[1:]]
            for a, b in pairs if was is not None and first is not None else ():
                one, other = old.attributes(a), new.attributes(b)
                if one is not other and one != other:
                    return KeptDifference(new, path, b, one, other)
            if was is None and first is None:
                found = self._inside(old, new, before, after, path)
                if found is not None:
                    return found
        return None

    def _inside(
        self,
        old: FrozenGraph,
        new: FrozenGraph,
        before: Sequence[int],
        after: Sequence[int],
        path: tuple[int, ...],
    ) -> KeptDifference | None:
        """Returns the first kept difference in graphs inside of nodes of one class, or None."""
        for a, b in product(before, after):
            for was, is_ in zip(self._old.inside(old, a), self._new.inside(new, b), strict=False):
                found = self.graphs(was, is_, (*path, b))
                if found is not None:
                    return found
        return None


def _classes(old: FrozenGraph, new: FrozenGraph, *, data: bool) -> list[_Class] | None:
    """Returns classes of nodes with the same nodes before them; None for different graphs.

    `data`: whether the data of the edges counts.
    """
    known: dict[object, int] = {}
    made: list[dict[int, list[int]]] = []
    for frozen in (old, new):
        classes: dict[int, list[int]] = {}
        for index, colour in enumerate(_colours(frozen, known, data)):
            classes.setdefault(colour, []).append(index)
        made.append(classes)
    left, right = made
    if {c: len(nodes) for c, nodes in left.items()} != {c: len(n) for c, n in right.items()}:
        return None
    return [(nodes, right[colour]) for colour, nodes in left.items()]


def _colours(frozen: FrozenGraph, known: dict[object, int], data: bool) -> list[int]:
    """Returns a number for each node, for its kind and everything before it."""
    count, links = len(frozen.nodes), frozen.links()
    before: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(count)]
    for source, target, words in links:
        before[target].append((source, words if data else ()))
    colours = [0] * count
    for index in in_order(count, [link[:2] for link in links]) or ():
        above = tuple(sorted((colours[source], words) for source, words in before[index]))
        colours[index] = known.setdefault((frozen.kind(index), above), len(known))
    return colours
