"""Nested arguments and results: their tokens in a key, and building them again.

Pure.  A library defines which types are arrays (`Arrays`) and how its registered containers come
apart; this file defines tuples, lists, dicts, named tuples and dataclasses.  Every other value is
either plain, and compared, or unknown.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

Join: TypeAlias = Callable[[Sequence[Any]], Any]
"""A function that makes a container of other children, and is otherwise like a given container."""


class Arrays(Protocol):
    """The types of values of a library; by default one without containers of its own."""

    plain: tuple[type, ...] = ()
    """Types of immutable values that are compared in keys: dtypes, devices."""

    def is_array(self, value: object, /) -> bool:
        """True if a value is one of the library's arrays, on any device, subclasses included."""
        ...

    def parts(self, value: object, /) -> tuple[Hashable, list[Any]] | None:
        """Takes a registered container apart: a token of its kind, and its children; else None."""
        return None

    def joiner(self, like: Any, /) -> Join:
        """Returns a function that makes registered containers like this one.  Raises Unknown."""
        raise AssertionError(f"{type(like).__name__} is no registered container")


class Unknown(Exception):
    """An error: a value is no array, no plain value and no known container."""

    def __init__(self, path: str, value: object) -> None:
        super().__init__(path, value)
        self.path, self.value = path, value

    def __str__(self) -> str:
        kind = type(self.value)
        return (
            f"{self.path} is a {kind.__module__}.{kind.__qualname__}, which is no array, no plain "
            "value and no container that is known here"
        )


ATOMS = frozenset({type(None), bool, int, str, bytes, type(Ellipsis)})
"""Types whose equal values behave alike."""
_IDENTITIES = (type, types.FunctionType)


def bound_to(function: Any) -> Any:
    """Returns the object that a built-in method is bound to; None for other built-in functions."""
    owner = getattr(function, "__self__", None)
    functions = isinstance(owner, types.ModuleType | type) or type(owner).__name__ == "PyCapsule"
    return None if functions else owner


def is_plain(value: object, more: tuple[type, ...] = ()) -> bool:
    """True if a value can be compared in a key."""
    kind = type(value)
    if kind in ATOMS or kind in (float, complex, range):
        return True
    if kind is types.BuiltinMethodType:
        return bound_to(value) is None
    if isinstance(value, (enum.Enum, *more, *_IDENTITIES)):
        return True
    if kind is slice:
        return all(is_plain(v, more) for v in (value.start, value.stop, value.step))  # type: ignore[attr-defined]
    if kind in (tuple, frozenset):
        return all(is_plain(v, more) for v in value)  # type: ignore[attr-defined]
    return False


def plain_token(value: Any) -> Hashable:
    """Returns the token of a plain value: 1, True and 1.0 differ, so do 0.0 and -0.0; NaN equals
    NaN.

    The same holds for values inside tuples, slices and frozensets."""
    kind: Any = type(value)
    if kind in ATOMS:
        return kind, value
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
    if kind is frozenset:
        return kind, frozenset(map(plain_token, value))
    if kind is range:
        return kind, value.start, value.stop, value.step
    if isinstance(value, np.generic):
        return kind, str(value.dtype), value.tobytes()
    if isinstance(value, _OF_ONE) and kind.__eq__ is not object.__eq__:
        return kind, Itself(value)
    return kind, value


_OF_ONE = (enum.Enum, type)
"""Types of which each value is a single object: identity decides."""


class Itself:
    """A token that is equal only for the same object, since equal objects may act differently."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def children_of(value: Any, arrays: Arrays) -> tuple[Hashable, list[Any]] | None:
    """Takes a container apart: a token of its kind, and its children; None for other values."""
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
        known = hasattr(kind, "_fields") or hasattr(kind, "n_fields") or not made_in_python(kind)
        more = getattr(value, "__dict__", None)
        return ((kind, len(value)), list(value)) if known and not more else None
    made_plainly = getattr(kind, "__new__", None) is object.__new__
    if made_plainly and dataclasses.is_dataclass(value):
        held, rest = getattr(value, "__dict__", {}), other_attributes(value)
        names = [field.name for field in dataclasses.fields(value)]
        children = [held[n] if n in held else getattr(value, n, _ABSENT) for n in names]
        absent = any(child is _ABSENT for child in children)
        if not absent and all(map(is_plain, rest.values())):
            others = tuple([(n, plain_token(v)) for n, v in rest.items()])
            return (kind, len(names), others), children
    return None


_ABSENT = object()


def made_in_python(kind: type) -> bool:
    """True if a class was made by Python code (Py_TPFLAGS_HEAPTYPE)."""
    return bool(kind.__flags__ & 1 << 9)


def other_attributes(record: Any) -> dict[str, Any]:
    """Returns the attributes of a dataclass's object that are not fields."""
    names = {field.name for field in dataclasses.fields(record)}
    return {n: v for n, v in getattr(record, "__dict__", {}).items() if n not in names}


def new_record(kind: Any, attributes: Iterable[tuple[str, Any]]) -> Any:
    """Makes a dataclass's object without its constructor, which may do more than store
    arguments."""
    made = object.__new__(kind)
    for name, value in attributes:
        member = getattr(kind, name, None)
        if isinstance(member, types.MemberDescriptorType):  # a slot
            member.__set__(made, value)
        else:
            made.__dict__[name] = value
    return made


def joiner(like: Any, arrays: Arrays) -> Join:
    """Returns a function that makes containers like one that `children_of` takes apart."""
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
    rest = [*other_attributes(like).items()]
    return lambda children: new_record(kind, [*zip(names, children, strict=True), *rest])


def flatten(
    value: Any, path: str, arrays: Arrays, tokens: list[Hashable], leaves: list[Any]
) -> None:
    """Appends the tokens of a value to `tokens`, and its arrays to `leaves`.

    An array adds only the mark `Leaf` to `tokens`; the caller adds its shape.  Raises Unknown.
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


def code_in(tokens: Iterable[Hashable]) -> Iterator[types.FunctionType | type | enum.Enum]:
    """Yields the functions, the classes and the members of enumerations among the plain values that
    have these tokens, and the classes of containers and other objects."""
    for token in tokens:
        if type(token) is tuple:
            if token and isinstance(token[0], type) and made_in_python(token[0]):
                yield token[0]
            value = token[1] if len(token) == 2 else None
            value = value.value if type(value) is Itself else value
            if isinstance(value, (*_IDENTITIES, enum.Enum)):
                yield value
            else:
                yield from code_in(token)
        elif type(token) is frozenset:
            yield from sorted(code_in(token), key=id)


class Leaf:
    """The token of an array."""


@dataclasses.dataclass(slots=True, eq=False)
class Tree:
    """A value taken apart once: its arrays in order, and a function that builds it from others."""

    source: str
    """The source of an expression that builds the value from `leaves` and `given`."""
    names: dict[str, Any]
    """The variables of that expression."""
    leaves: list[Any]
    paths: list[str]
    given: frozenset[int]
    """Indices of the objects in the value that `build` must be given anew."""
    tokens: list[Hashable]
    """The tokens of the value: everything but its arrays."""
    _build: Callable[..., Any] | None = None

    @property
    def build(self) -> Callable[..., Any]:
        """The function that builds the value from other arrays, and from other given objects, in
        the places of its own.  It is compiled, since each replay calls it."""
        if self._build is None:
            self._build = eval(f"lambda leaves, given=(): {self.source}", self.names)
        return self._build


def tree_of(value: Any, path: str, arrays: Arrays, given: Sequence[object] = ()) -> Tree:
    """Takes a value apart, except for the objects in `given`.  Raises Unknown."""
    leaves: list[Any] = []
    paths: list[str] = []
    names: dict[str, Any] = {"__builtins__": {}}
    places = {id(value): index for index, value in enumerate(given)}
    met: list[int] = []
    tokens: list[Hashable] = []

    def named(value: object) -> str:
        name = f"n{len(names)}"
        names[name] = value
        return name

    def visit(value: Any, path: str, depth: int) -> str:
        """Returns the source of an expression that builds a value like this one."""
        if id(value) in places:
            met.append(places[id(value)])
            tokens.append((Tree, met[-1]))
            return f"given[{met[-1]}]"
        if arrays.is_array(value):
            leaves.append(value)
            paths.append(path)
            tokens.append(Leaf)
            return f"leaves[{len(leaves) - 1}]"
        if is_plain(value, arrays.plain):
            tokens.append(plain_token(value))
            return named(value)
        found = children_of(value, arrays) if depth < _DEEPEST else None
        if found is None:
            raise Unknown(path, value)
        tokens.append(found[0])
        steps = _names(value, len(found[1]))
        inner = [visit(c, path + n, depth + 1) for c, n in zip(found[1], steps, strict=True)]
        whole, kind = "".join([f"{one}, " for one in inner]), type(value)
        if kind is tuple:
            return f"({whole})"
        if kind is dict:
            return f"{{{', '.join([f'{named(k)}: {v}' for k, v in zip(value, inner)])}}}"  # noqa: B905
        return f"[{whole}]" if kind is list else f"{named(joiner(value, arrays))}([{whole}])"

    return Tree(visit(value, path, 0), names, leaves, paths, frozenset(met), tokens)


_DEEPEST = 32
"""The deepest nesting of results: Python's parser has limits."""


def _names(value: Any, count: int) -> Iterable[str]:
    """Returns the text that each child of a container adds to the container's path."""
    if isinstance(value, dict):
        return [f"[{key!r}]" for key in value] if len(value) == count else map(str, range(count))
    if dataclasses.is_dataclass(value):
        named = [f".{field.name}" for field in dataclasses.fields(value)]
        if len(named) == count:
            return named
    return [f"[{index}]" for index in range(count)]
