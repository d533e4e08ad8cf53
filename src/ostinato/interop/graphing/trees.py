"""Nested arguments and results: what stands for them in a key, and how they are built again.

Pure.  A library says which types are arrays (`Arrays`) and how its registered containers come
apart; tuples, lists, dicts, named tuples and dataclasses are known here.  Everything else is a
plain value, which is compared, or unknown.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

__all__ = [
    "Arrays",
    "Join",
    "Leaf",
    "Node",
    "Tree",
    "Unknown",
    "children_of",
    "flatten",
    "is_plain",
    "joiner",
    "plain_token",
    "tree_of",
]


Join: TypeAlias = Callable[[Sequence[Any]], Any]
"""Makes a container of children, like another one in all else."""


class Arrays(Protocol):
    """What a library knows of its values."""

    plain: tuple[type, ...]
    """Types of immutable values that are compared in keys: dtypes, devices."""

    def is_array(self, value: object, /) -> bool:
        """Whether a value is one of the library's arrays, of whatever device or subclass."""
        ...

    def parts(self, value: object, /) -> tuple[Hashable, list[Any]] | None:
        """A registered container as what stands for its kind, and its children; else None."""
        ...

    def joiner(self, like: Any, /) -> Join:
        """Makes registered containers like this one."""
        ...


class Unknown(Exception):
    """A value that is no array, no plain value and no known container."""

    def __init__(self, path: str, value: object) -> None:
        super().__init__(path, value)
        self.path, self.value = path, value

    def __str__(self) -> str:
        kind = type(self.value)
        return (
            f"{self.path} is a {kind.__module__}.{kind.__qualname__}, which is no array, no plain "
            "value and no container that is known here"
        )


_ATOMS = frozenset({type(None), bool, int, str, bytes, complex, type(Ellipsis), range})
_IDENTITIES = (type, type(len), type(lambda: None))


def is_plain(value: object, more: tuple[type, ...] = ()) -> bool:
    """Whether a value can be compared in a key."""
    kind = type(value)
    if kind in _ATOMS or kind is float or isinstance(value, (enum.Enum, *more, *_IDENTITIES)):
        return True
    if kind is slice:
        return all(is_plain(v, more) for v in (value.start, value.stop, value.step))  # type: ignore[attr-defined]
    if kind in (tuple, frozenset):
        return all(is_plain(v, more) for v in value)  # type: ignore[attr-defined]
    return False


def plain_token(value: Any) -> Hashable:
    """What stands for a plain value: 1, True and 1.0 differ, so do 0.0 and -0.0; NaN is itself."""
    kind = type(value)
    if kind is float:
        if value == 0 or value != value:
            return kind, math.copysign(1.0, value), value == 0
        return kind, value
    if kind is complex:
        return kind, plain_token(value.real), plain_token(value.imag)
    if kind is slice:
        return kind, plain_token(value.start), plain_token(value.stop), plain_token(value.step)
    if kind is tuple:
        return kind, *map(plain_token, value)
    return kind, value


def children_of(value: Any, arrays: Arrays) -> tuple[Hashable, list[Any]] | None:
    """What stands for a container's kind, and its children; None for what is none."""
    kind = type(value)
    if kind is tuple or kind is list:
        return (kind, len(value)), list(value)
    if kind is dict or kind is OrderedDict:
        keys = tuple(value)
        if not all(is_plain(key) for key in keys):
            return None
        return (kind, tuple(map(plain_token, keys))), list(value.values())
    registered = arrays.parts(value)
    if registered is not None:
        return (kind, registered[0]), registered[1]
    if isinstance(value, tuple):  # named tuples, and the results of some functions
        return (kind, len(value)), list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        if all(field.init for field in fields):
            return (kind, len(fields)), [getattr(value, field.name) for field in fields]
    return None


def joiner(like: Any, arrays: Arrays) -> Join:
    """Makes containers like one that `children_of` knows."""
    kind: Any = type(like)
    if kind is list or kind is tuple:
        return list if kind is list else tuple
    if kind is dict or kind is OrderedDict:
        keys = tuple(like)
        return lambda children: kind(zip(keys, children, strict=True))
    if arrays.parts(like) is not None:
        return arrays.joiner(like)
    if isinstance(like, tuple):
        make: Join = kind._make if hasattr(like, "_fields") else kind
        return make
    names = [field.name for field in dataclasses.fields(like)]
    return lambda children: kind(**dict(zip(names, children, strict=True)))


def flatten(
    value: Any, path: str, arrays: Arrays, tokens: list[Hashable], leaves: list[Any]
) -> None:
    """Adds what stands for a value to `tokens`, and its arrays to `leaves`.

    An array leaves a mark in `tokens`; its shape is for the caller to add.  Raises Unknown.
    """
    if arrays.is_array(value):
        tokens.append(Leaf)
        leaves.append(value)
        return
    if is_plain(value, arrays.plain):
        tokens.append(plain_token(value))
        return
    found = children_of(value, arrays)
    if found is None:
        raise Unknown(path, value)
    head, children = found
    tokens.append(head)
    for index, child in enumerate(children):
        flatten(child, f"{path}[{index}]", arrays, tokens, leaves)


@dataclass(frozen=True, slots=True)
class Leaf:
    """The place of an array in a tree."""

    index: int


@dataclass(frozen=True, slots=True)
class Node:
    """A container in a tree: how it is made, and its children."""

    join: Join
    children: tuple[object, ...]


class Tree:
    """A value taken apart once: its arrays in order, and how it is built from others."""

    __slots__ = ("_flat", "_top", "given", "leaves", "paths")

    def __init__(self, top: object, leaves: list[Any], paths: list[str], given: bool) -> None:
        self._top, self.leaves, self.paths = top, leaves, paths
        self.given = given
        """Whether it holds objects that are given anew when it is built."""
        self._flat: Join | None = None
        if isinstance(top, Node):
            order = [c.index if isinstance(c, Leaf) else -1 for c in top.children]
            if order == [*range(len(leaves))]:
                self._flat = top.join

    def build(self, leaves: Sequence[Any], given: Sequence[Any] = ()) -> Any:
        """The value with other arrays in the places of its own, and other given objects."""
        if self._flat is not None:
            return self._flat(leaves)
        if type(self._top) is Leaf:
            return leaves[self._top.index]
        return self._build(self._top, leaves, given)

    def _build(self, place: object, leaves: Sequence[Any], given: Sequence[Any]) -> Any:
        if type(place) is Leaf:
            return leaves[place.index]
        if type(place) is Node:
            children = [self._build(c, leaves, given) for c in place.children]
            return place.join(children)
        if type(place) is _Given:
            return given[place.index]
        return place.value  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Constant:
    value: object


@dataclass(frozen=True, slots=True)
class _Given:
    index: int


def tree_of(
    value: Any,
    path: str,
    arrays: Arrays,
    given: Sequence[object] = (),
) -> Tree:
    """A value taken apart.  Objects among `given` are not.  Raises Unknown."""
    leaves: list[Any] = []
    paths: list[str] = []
    places = {id(value): index for index, value in enumerate(given)}
    met: list[int] = []

    def visit(value: Any, path: str) -> object:
        if id(value) in places:
            met.append(places[id(value)])
            return _Given(met[-1])
        if arrays.is_array(value):
            leaves.append(value)
            paths.append(path)
            return Leaf(len(leaves) - 1)
        if is_plain(value, arrays.plain):
            return _Constant(value)
        found = children_of(value, arrays)
        if found is None:
            raise Unknown(path, value)
        names = _names(value, len(found[1]))
        children = [visit(c, path + n) for c, n in zip(found[1], names, strict=True)]
        return Node(joiner(value, arrays), tuple(children))

    return Tree(visit(value, path), leaves, paths, bool(met))


def _names(value: Any, count: int) -> Iterable[str]:
    """How the children of a container are written behind its own path."""
    if isinstance(value, dict):
        return [f"[{key!r}]" for key in value] if len(value) == count else map(str, range(count))
    if dataclasses.is_dataclass(value):
        named = [f".{field.name}" for field in dataclasses.fields(value)]
        if len(named) == count:
            return named
    return [f"[{index}]" for index in range(count)]
