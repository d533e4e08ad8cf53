"""What a function uses besides its arguments, as far as it can be seen.

Pure.  A graph freezes what the function read while it was captured: a number of its closure, a
global, an attribute of the object that it is a method of, a weight's address.  A guard reads these
again at each call.  Plain values become part of the key.  Arrays are watched: the graph is bound
anew where one moved.

Seen are closure cells, default values, globals that the function's own code names, and the object
of a bound method; of each of these plain values, arrays, nested tuples, lists and dicts of them,
and the plain values and arrays among the attributes of other objects.
Not seen is what functions that it calls read by themselves, and what is deeper in objects.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ostinato.interop.graphing.trees import Arrays, children_of, is_plain, plain_token

__all__ = ["Guarded", "Guards", "Seen", "Watch", "same"]

_MISSING = object()
_DEEPEST = 4
_MOST = 4096
"""Objects that are kept to tell them apart."""


def same(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


class Watch(Protocol):
    """Something with a state of its own (a module), read at each call."""

    def read(self, tokens: list[Hashable], arrays: list[Any]) -> None:
        """Adds its plain values to `tokens` and its arrays to `arrays`."""
        ...


class Watcher(Arrays, Protocol):
    """A library that knows objects with a state of their own."""

    def watch(self, value: object, /) -> Watch | None:
        """How to read such an object; None for all others."""
        ...


class Seen(NamedTuple):  # it is made in each call, and a dataclass takes twice as long
    """What a function uses besides its arguments, at one moment."""

    tokens: tuple[Hashable, ...]
    arrays: list[Any]
    ends: list[tuple[int, int]]
    """How many tokens and arrays there were after each place."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value is read again at each call."""

    name: str
    read: Callable[[], Any]
    source: tuple[str, Any, str] = ("constant", None, "")
    """What `read` reads: an "attribute" or an "item" of an object, and its name, the arguments of a
    "partial", or a "constant" (for `recheck.py`)."""


class Guarded:
    """A function with guards of its own, which count for functions that call it."""

    _guards: Guards | None = None

    @property
    def guards(self) -> Guards | None:
        """None if it uses nothing that could change."""
        return self._guards

    def read(self, tokens: list[Hashable], arrays: list[Any]) -> None:
        """Adds what it uses to `tokens` and `arrays`."""
        if self._guards is not None:
            seen = self._guards.read()
            tokens.append(seen.tokens)
            arrays += seen.arrays


class Guards:
    """The guards of one function."""

    DEEPEST = _DEEPEST
    """How deep containers and objects are looked into."""

    def __init__(self, function: Callable[..., Any], library: Watcher) -> None:
        self._library = library
        self._watches: dict[int, tuple[object, Watch | None]] = {}
        self.places = tuple(_places(function))
        self.generation = 0

    @property
    def empty(self) -> bool:
        """Whether there is nothing to read."""
        return not self.places

    @property
    def names(self) -> list[str]:
        """What is read, in words."""
        return [place.name for place in self.places]

    def read(self) -> Seen:
        """What the function uses now."""
        if len(self._watches) > _MOST:
            self._watches.clear()  # what had an id before is another thing from here on
            self.generation += 1
        tokens: list[Hashable] = [self.generation]
        arrays: list[Any] = []
        ends: list[tuple[int, int]] = []
        for place in self.places:
            self._visit(place.read(), tokens, arrays, 0)
            ends.append((len(tokens), len(arrays)))
        return Seen(tuple(tokens), arrays, ends)

    def _visit(self, value: Any, tokens: list[Hashable], arrays: list[Any], depth: int) -> None:
        library = self._library
        if library.is_array(value):
            arrays.append(value)
            return
        if is_plain(value, library.plain):
            tokens.append(plain_token(value))
            return
        watch = self.watch(value)
        if watch is not None:
            watch.read(tokens, arrays)
            return
        found = children_of(value, library) if depth < _DEEPEST else None
        if found is None:
            tokens.append((type(value), id(value)))
            inside = self.inside(value) if depth < _DEEPEST else None
            if inside is not None:
                self.attributes(inside, tokens, arrays)
            return
        tokens.append(found[0])
        for child in found[1]:
            self._visit(child, tokens, arrays, depth + 1)

    @staticmethod
    def inside(value: object) -> dict[str, Any] | None:
        """The attributes of an object that are looked at."""
        inside = getattr(value, "__dict__", None)
        plain = isinstance(inside, dict) and not isinstance(value, types.ModuleType)
        return inside if plain else None

    def attributes(self, inside: dict[str, Any], tokens: list[Hashable], arrays: list[Any]) -> None:
        """The plain values and the arrays among the attributes of an object."""
        for name, child in inside.items():
            if self._library.is_array(child):
                arrays.append(child)
            elif is_plain(child, self._library.plain):
                tokens.append((name, plain_token(child)))

    def watch(self, value: Any) -> Watch | None:
        """How to read an object with a state of its own; None for all others."""
        known = self._watches.get(id(value))
        if known is None or known[0] is not value:
            watch = value if isinstance(value, Guarded) else self._library.watch(value)
            # The value is kept, so that no other one gets its id.
            known = self._watches[id(value)] = value, watch
        return known[1]

    def explain(self, before: Seen, after: Seen) -> str:
        """The names of what differs between two readings; empty if nothing does."""
        if before.tokens == after.tokens and same(before.arrays, after.arrays):
            return ""
        parts = zip(self.names, self._parts(before), self._parts(after), strict=True)
        changed = [name for name, (a, b), (c, d) in parts if a != c or not same(b, d)]
        return ", ".join(changed) or "what it uses"

    @staticmethod
    def _parts(seen: Seen) -> list[tuple[tuple[Hashable, ...], list[Any]]]:
        """What was read at each place."""
        parts, token, array = [], 1, 0  # behind the generation
        for tokens, arrays in seen.ends:
            parts.append((seen.tokens[token:tokens], seen.arrays[array:arrays]))
            token, array = tokens, arrays
        return parts


def _places(function: Callable[..., Any]) -> list[_Place]:
    """What is read of a function, of whatever kind."""
    places: list[_Place] = []
    while isinstance(function, functools.partial):
        partial = function
        places.append(
            _Place(
                "partial arguments",
                lambda p=partial: (p.args, p.keywords),  # type: ignore[misc]
                ("partial", partial, ""),
            )
        )
        function = partial.func
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType | type):
        places.append(_Place("self", lambda: owner))
    plain = getattr(function, "__func__", function)
    if not isinstance(plain, types.FunctionType):
        call = vars(type(function)).get("__call__")
        if owner is None and isinstance(call, types.FunctionType):
            places.append(_Place(type(function).__name__, lambda: function))
            plain = call
        else:
            return places
    code = plain.__code__
    for name, cell in zip(code.co_freevars, plain.__closure__ or (), strict=True):
        source = "attribute", cell, "cell_contents"
        places.append(_Place(name, lambda c=cell: _content(c), source))  # type: ignore[misc]
    if plain.__defaults__:
        places.append(
            _Place(
                "default values", lambda: plain.__defaults__, ("attribute", plain, "__defaults__")
            )
        )
    if plain.__kwdefaults__:
        places.append(
            _Place(
                "default values",
                lambda: plain.__kwdefaults__,
                ("attribute", plain, "__kwdefaults__"),
            )
        )
    space = plain.__globals__
    for name in code.co_names:
        value = space.get(name, _MISSING)
        if value is _MISSING or isinstance(value, types.ModuleType | type | types.FunctionType):
            continue
        if isinstance(value, types.BuiltinFunctionType):
            continue
        places.append(_Place(name, lambda n=name: space.get(n), ("item", space, name)))  # type: ignore[misc]
    return places


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # deleted, or not assigned yet
        return _MISSING


class ObjectWatch:
    """The arrays of an object, found once and read again at each call, where they were found.

    Plain values of it are not watched: it was declared static.
    """

    def __init__(self, value: object, arrays: Arrays) -> None:
        self._value = value
        self._arrays = arrays
        self.places: list[tuple[Any, Hashable]] = []
        self._find(value, 0, set())

    def _find(self, value: Any, depth: int, seen: set[int]) -> None:
        if depth > _DEEPEST or id(value) in seen:
            return
        seen.add(id(value))
        held: Any = None
        if isinstance(value, dict | list):
            held = value
        elif isinstance(value, tuple):
            for child in value:
                self._find(child, depth + 1, seen)
            return
        else:
            held = getattr(value, "__dict__", None)
        if held is None:
            return
        for key, child in list(held.items() if isinstance(held, dict) else enumerate(held)):
            if self._arrays.is_array(child):
                self.places.append((held, key))
            elif not is_plain(child, self._arrays.plain) and not callable(child):
                self._find(child, depth + 1, seen)

    def read(self, tokens: list[Hashable], arrays: list[Any]) -> None:
        tokens.append(type(self._value).__qualname__)
        for held, key in self.places:
            try:
                value = held[key]
            except (KeyError, IndexError):
                value = None
            if self._arrays.is_array(value):
                arrays.append(value)
            else:
                tokens.append("gone")
