"""What a whole update would silently keep: launch attributes, and the kinds of edges.

An update pairs each node of the new graph with one of the executable.  CUDA pairs along the edges
(measured), by a rule that it does not document.  If the nodes and edges of both graphs are the same
by their places, nodes at the same place are a pair.  Otherwise nodes can be a pair only if
what is before them is the same, and then all nodes that can be paired must be alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol, TypeAlias

from ostinato.driver.api import FrozenGraph, LaunchAttributes

__all__ = ["Kept", "Whole", "kept_of_graphs"]

_Class: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Places of nodes in the old graph, and of those in the new one that they may be paired with."""


class Whole(Protocol):
    """A graph and the graphs inside its nodes, as they were."""

    @property
    def outer(self) -> FrozenGraph: ...

    def inside(self, frozen: FrozenGraph, index: int) -> Sequence[FrozenGraph]: ...


@dataclass(frozen=True, slots=True)
class Kept:
    """What an update would keep.  `path`: the places in the new graph of the nodes around it,
    outermost first.  `index`, `old` and `new` are of a kernel node of `graph`; None for edges."""

    graph: FrozenGraph
    path: tuple[int, ...]
    index: int | None = None
    old: LaunchAttributes | None = None
    new: LaunchAttributes | None = None


def kept_of_graphs(old: Whole, new: Whole) -> Kept | None:
    """The first difference that an update of an executable of `old` by `new` would not make.

    None also where the graphs differ in other ways: the driver refuses these.
    """
    return _Comparison(old, new).graphs(old.outer, new.outer, ())


class _Comparison:
    def __init__(self, old: Whole, new: Whole) -> None:
        self._old, self._new = old, new

    def graphs(self, old: FrozenGraph, new: FrozenGraph, path: tuple[int, ...]) -> Kept | None:
        plain = old.plain and new.plain
        if plain and not old.holders and not new.holders:
            kinds = old.kinds_of_attributes
            if len(kinds) < 2 and kinds >= new.kinds_of_attributes:
                return None  # whatever the pairs are
        if len(old.nodes) == len(new.nodes) and old.links() == new.links():
            classes: Iterable[_Class] | None = (((i,), (i,)) for i in range(len(old.nodes)))
        else:
            classes = _classes(old, new, data=True)
        if classes is None:
            same = not plain and _classes(old, new, data=False) is not None
            return Kept(new, path) if same else None
        return self._nodes(old, new, classes, path)

    def _nodes(
        self,
        old: FrozenGraph,
        new: FrozenGraph,
        classes: Iterable[_Class],
        path: tuple[int, ...],
    ) -> Kept | None:
        for before, after in classes:
            was, first = old.attributes(before[0]), new.attributes(after[0])
            # Each with the first of the others: what is equal to one is equal to all.
            pairs = [(before[0], b) for b in after] + [(a, after[0]) for a in before[1:]]
            for a, b in pairs if was is not None and first is not None else ():
                one, other = old.attributes(a), new.attributes(b)
                if one is not other and one != other:
                    return Kept(new, path, b, one, other)
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
    ) -> Kept | None:
        """What would be kept in graphs inside of nodes of one class."""
        for a, b in product(before, after):
            for was, is_ in zip(self._old.inside(old, a), self._new.inside(new, b), strict=False):
                found = self.graphs(was, is_, (*path, b))
                if found is not None:
                    return found
        return None


def _classes(old: FrozenGraph, new: FrozenGraph, *, data: bool) -> list[_Class] | None:
    """The nodes that have the same before them; None if the graphs are not the same.

    `data`: whether that of the edges counts.
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
    """A number for each node: of its kind and all that is before it."""
    count = len(frozen.nodes)
    before: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for source, target, words in frozen.links():
        before[target].append((source, words if data else ()))
        after[source].append(target)
    colours, waits = [0] * count, [len(sources) for sources in before]
    ready = [index for index in range(count) if not waits[index]]
    while ready:
        index = ready.pop()
        above = tuple(sorted((colours[source], words) for source, words in before[index]))
        colours[index] = known.setdefault((frozen.kind(index), above), len(known))
        for target in after[index]:
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    return colours
