"""What a function uses besides its arguments, as far as it can be seen.

Pure.  A graph freezes what the function read while it was captured: a number of its closure, a
global, an attribute of the object that it is a method of, a weight's address.  A guard reads these
again at each call.  Plain values become part of the key.  Arrays are watched: the graph is bound
anew where one moved.

Read are, of the function and of those that it wraps (`functools.wraps`): closure cells, default
values, globals that its own code names (also those that are defined later), attributes of modules
and classes that its code reads from a global, the object of a bound method, and what its code names
of that object's class.  Of each of these: plain values, arrays, nested tuples, lists, dicts and
dataclasses, sets, small NumPy arrays, and modules of the library.  Of other objects: plain
attributes and arrays, and what else of them the code names, by the names of attributes in it and in
the methods of the same object that it calls (`self.config.scale`), three objects deep.
Not read is what other functions that it calls read by themselves.
"""

from __future__ import annotations

import argparse
import builtins
import dis
import functools
import inspect
import itertools
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from ostinato.interop.graphing.trees import ATOMS, Arrays, children_of, is_plain, plain_token

__all__ = [
    "Guarded",
    "Guards",
    "Place",
    "Seen",
    "Trail",
    "Walker",
    "Watch",
    "contents_of",
    "same",
    "size_of",
]


class _Missing:
    """Stands for a global that is not defined, and for a variable without a value."""


_DEEPEST = 4
_DEEPEST_OBJECT = 3
_MOST_ITEMS = 1000
_MOST = 4096
"""Objects that are looked into, and bytes of a NumPy array that is compared."""

Trail: TypeAlias = tuple[Any, ...]
"""Where a value is: the name of its place, then what it is an item or an attribute of."""


def same(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


class Watch(Protocol):
    """Something with a state of its own (a module), read at each call."""

    def read(self, tokens: list[Hashable], arrays: list[Any]) -> None:
        """Adds its plain values to `tokens` and its arrays to `arrays`."""
        ...

    def others(self) -> Iterable[tuple[str, Any]]:
        """What else it holds, by names; asked for after `read`."""
        ...

    def methods(self) -> Iterable[tuple[type, str]]:
        """Classes and the names of their methods that run when it is called."""
        ...


class Watcher(Arrays, Protocol):
    """A library that knows objects with a state of their own."""

    def watch(self, value: object, /) -> Watch | None:
        """How to read such an object; None for all others."""
        ...


class Walker(Protocol):
    """Takes what a walk through all that a function uses meets (`Guards.walk`), in order."""

    def place(self, place: Place, value: Any) -> None: ...

    def array(self, path: Trail, array: Any) -> None: ...

    def plain(self, path: Trail, value: Any) -> None: ...

    def watched(self, path: Trail, watch: Watch) -> None:
        """Before what else it holds."""
        ...

    def container(self, path: Trail, value: Any, head: Hashable, children: list[Any]) -> None:
        """Before its children."""
        ...

    def contents(self, path: Trail, value: Any, token: Hashable) -> None:
        """Something that is compared by what it holds."""
        ...

    def other(self, path: Trail, value: Any, inside: dict[str, Any] | None, inner: bool) -> None:
        """Anything else, before those of its attributes that are looked at; None if none is.

        `inner`: it is somewhere in another object, and these are those that the code names."""
        ...


class Seen(NamedTuple):  # it is made in each call, and a dataclass takes twice as long
    """What a function uses besides its arguments, at one moment."""

    tokens: tuple[Hashable, ...]
    arrays: list[Any]
    starts: list[tuple[int, int]]
    """How many tokens and arrays there were before each place."""


@dataclass(frozen=True, slots=True)
class Place:
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
        """Adds what it uses to `tokens` and `arrays`; nothing for a function that uses itself."""
        if self._guards is None or self in _here.reading:
            return
        _here.reading.append(self)
        try:
            seen = self._guards.read()
        finally:
            _here.reading.pop()
        tokens.append(seen.tokens)
        arrays += seen.arrays

    def others(self) -> Iterable[tuple[str, Any]]:
        return ()

    def methods(self) -> Iterable[tuple[type, str]]:
        return ()


class _Here(threading.local):
    def __init__(self) -> None:
        self.reading: list[Guarded] = []
        """Functions whose guards are read now."""


_here = _Here()


class _Reading:
    """A walk that makes a key."""

    def __init__(self, serial: Callable[[object], int]) -> None:
        self._serial = serial
        self.tokens: list[Hashable] = []
        self.arrays: list[Any] = []
        self.starts: list[tuple[int, int]] = []

    def place(self, place: Place, value: Any) -> None:
        self.starts.append((len(self.tokens), len(self.arrays)))

    def array(self, path: Trail, array: Any) -> None:
        self.arrays.append(array)

    def plain(self, path: Trail, value: Any) -> None:
        self.tokens.append(plain_token(value))

    def watched(self, path: Trail, watch: Watch) -> None:
        watch.read(self.tokens, self.arrays)

    def container(self, path: Trail, value: Any, head: Hashable, children: list[Any]) -> None:
        self.tokens.append(head)

    def contents(self, path: Trail, value: Any, token: Hashable) -> None:
        self.tokens.append(token)

    def other(self, path: Trail, value: Any, inside: dict[str, Any] | None, inner: bool) -> None:
        names = None if inside is None else tuple(inside)
        self.tokens.append((type(value), self._serial(value), names, size_of(value)))


@dataclass(slots=True)
class _Known:
    """An object that was met before."""

    itself: Callable[[], object]
    serial: int
    """Unlike an address it is never given to another object."""
    watch: Watch | None


class _Drops:
    """Forgets what is known of an object that is gone."""

    def __init__(self, known: dict[int, _Known], key: int) -> None:
        self._known, self._key = known, key

    def __call__(self, reference: object) -> None:
        known = self._known.get(self._key)
        if known is not None and known.itself is reference:  # else another one has its address
            del self._known[self._key]


class Guards:
    """The guards of one function."""

    def __init__(self, function: Callable[..., Any], library: Watcher) -> None:
        self._library = library
        self._known: dict[int, _Known] = {}
        self._serials = itertools.count()
        self._named: set[str] = set()
        """Attributes that the function's code names."""
        self.places = tuple(_places(function, self._named))

    @property
    def empty(self) -> bool:
        """Whether there is nothing to read."""
        return not self.places

    def read(self) -> Seen:
        """What the function uses now."""
        reading = _Reading(self.serial)
        met = self.walk(reading)
        if len(self._known) > 2 * len(met) + 64:  # most of them are not used any more
            for key in [key for key in self._known if key not in met]:
                self._known.pop(key, None)
        return Seen(tuple(reading.tokens), reading.arrays, reading.starts)

    def walk(self, walker: Walker) -> set[int]:
        """Shows a walker all that the function uses; the addresses of the objects that it met."""
        met: set[int] = set()
        for place in self.places:
            value = place.read()
            walker.place(place, value)
            self._visit(walker, (place.name,), value, 0, met)
        return met

    def _visit(
        self,
        walker: Walker,
        path: Trail,
        value: Any,
        depth: int,
        met: set[int],
        inner: bool = False,
    ) -> None:
        """`inner`: whether it is somewhere in an object."""
        library = self._library
        if library.is_array(value):
            walker.array(path, value)
            return
        if is_plain(value, library.plain):
            walker.plain(path, value)
            return
        watch = self.watch(value)
        if watch is not None:
            met.add(id(value))
            walker.watched(path, watch)
            for name, child in watch.others():
                if name.rpartition(".")[2] in self._named:
                    self._visit(walker, (path, name), child, depth + 1, met, True)
            return
        if size_of(value) is not None:
            walker.other(path, value, None, inner)
            return
        token = contents_of(value)
        if token is not None:
            walker.contents(path, value, token)
            return
        found = children_of(value, library) if depth < _DEEPEST else None
        if found is not None:
            walker.container(path, value, *found)
            self._visit_all(walker, path, enumerate(found[1]), depth, met, inner)
            return
        deep = depth >= _DEEPEST_OBJECT or id(value) in met or len(met) >= _MOST
        inside = None if deep else self._inside(value, inner)
        met.add(id(value))
        walker.other(path, value, inside, inner)
        if inside is not None:
            self._visit_all(walker, path, inside.items(), depth, met, True)

    def _inside(self, value: object, inner: bool) -> dict[str, Any] | None:
        """The attributes of an object that are looked at."""
        found, library, named = _attributes_of(value), self._library, self._named
        if found is None:
            return None
        if inner:
            return {name: found[name] for name in sorted(named.intersection(found))}
        return {
            name: child
            for name, child in found.items()
            if name in named or library.is_array(child) or is_plain(child, library.plain)
        }

    def _visit_all(
        self,
        walker: Walker,
        path: Trail,
        items: Iterable[tuple[Any, Any]],
        depth: int,
        met: set[int],
        inner: bool,
    ) -> None:
        for name, child in items:
            if type(child) in ATOMS:  # most are, and need no other question
                walker.plain((path, name), child)
            else:
                self._visit(walker, (path, name), child, depth + 1, met, inner)

    def watch(self, value: Any) -> Watch | None:
        """How to read an object with a state of its own; None for all others."""
        if type(value) in _CONTAINERS:
            return None
        return self._look_up(value).watch

    def serial(self, value: object) -> int:
        """A number that stands for an object."""
        return self._look_up(value).serial

    def _look_up(self, value: Any) -> _Known:
        known = self._known.get(id(value))
        if known is None or known.itself() is not value:
            watch = value if isinstance(value, Guarded) else self._library.watch(value)
            try:
                itself: Callable[[], object] = weakref.ref(value, _Drops(self._known, id(value)))
            except TypeError:
                itself = functools.partial(_itself, value)
            known = self._known[id(value)] = _Known(itself, next(self._serials), watch)
            for kind, name in () if watch is None else watch.methods():
                self._named |= _names_in_method(kind, name)
        return known

    def explain(self, before: Seen, after: Seen) -> str:
        """The names of what differs between two readings; empty if nothing does."""
        if before.tokens == after.tokens and same(before.arrays, after.arrays):
            return ""
        parts = zip(self.places, _parts(before), _parts(after), strict=True)
        changed = [place.name for place, (a, b), (c, d) in parts if a != c or not same(b, d)]
        return ", ".join(changed) or "what it uses"


def size_of(value: Any) -> int | None:
    """How many items a large table of plain values has, which are not looked at."""
    if type(value) not in _CONTAINERS or len(value) <= _MOST_ITEMS:
        return None
    first = itertools.islice(value.values() if type(value) is dict else value, 16)
    return len(value) if all(map(is_plain, first)) else None


_CONTAINERS = (tuple, list, dict, set, frozenset)


def _itself(value: object) -> object:
    return value


def _parts(seen: Seen) -> list[tuple[tuple[Hashable, ...], list[Any]]]:
    """What was read at each place."""
    ends = [*seen.starts[1:], (len(seen.tokens), len(seen.arrays))]
    return [
        (seen.tokens[a:b], seen.arrays[c:d])
        for (a, c), (b, d) in zip(seen.starts, ends, strict=True)
    ]


def contents_of(value: Any) -> Hashable | None:
    """What stands for something that is compared by what it holds; None for anything else."""
    kind: Any = type(value)
    if kind is set and all(map(is_plain, value)):
        return kind, frozenset(map(plain_token, value))
    if kind is bytearray and len(value) <= _MOST:
        return kind, bytes(value)
    if kind is np.ndarray and value.nbytes <= _MOST and not value.dtype.hasobject:
        return kind, str(value.dtype), value.shape, value.tobytes()
    return None


def _attributes_of(value: object) -> dict[str, Any] | None:
    """The attributes of an object; not those of the standard library's: locks, loggers, threads."""
    kind: Any = type(value)
    if kind not in (types.SimpleNamespace, argparse.Namespace) and (
        kind.__module__.partition(".")[0] in sys.stdlib_module_names
    ):
        return None
    held = getattr(value, "__dict__", None)
    slots = _slots(kind)
    if not slots:
        return held if isinstance(held, dict) else None
    found = {name: getattr(value, name, _Missing) for name in slots}
    return found | held if isinstance(held, dict) else found


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[str, ...]:
    """The names of the slots of a class."""
    found: list[str] = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        found += [names] if isinstance(names, str) else names
    return tuple([n for n in found if n not in ("__dict__", "__weakref__")])


# ------------------------------------------------------------------------------------------ places


def _places(function: Callable[..., Any], attributes: set[str]) -> Iterator[Place]:
    """What is read of a function, of whatever kind; adds the attributes that it names."""
    while isinstance(function, functools.partial):
        partial = function
        yield Place(
            "partial arguments",
            lambda p=partial: (p.args, p.keywords),  # type: ignore[misc]
            ("partial", partial, ""),
        )
        function = partial.func
    owner = getattr(function, "__self__", None)
    plain = getattr(function, "__func__", function)
    if owner is not None and not isinstance(owner, types.ModuleType | type):
        yield Place("self", lambda: owner)
    elif owner is None and not isinstance(plain, types.FunctionType):
        yield Place(type(function).__name__, lambda: function)
        call = vars(type(function)).get("__call__")
        wrapped = getattr(function, "__wrapped__", None)  # of functools.lru_cache, say
        owner, plain = (function, call) if isinstance(call, types.FunctionType) else (None, wrapped)
    met: set[int] = set()
    while isinstance(plain, types.FunctionType) and id(plain) not in met:
        met.add(id(plain))
        yield from _places_of(plain, owner, attributes)
        plain = getattr(plain, "__wrapped__", None)
        plain = getattr(plain, "__func__", plain)


def _places_of(
    function: types.FunctionType, owner: object, named_attributes: set[str]
) -> Iterator[Place]:
    """What one function reads besides its arguments; `owner`: the object that it is a method of."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        source = "attribute", cell, "cell_contents"
        yield Place(name, functools.partial(_content, cell), source)
    for name in ("__defaults__", "__kwdefaults__"):
        if getattr(function, name):
            read = functools.partial(getattr, function, name)
            yield Place("default values", read, ("attribute", function, name))
    space = function.__globals__
    named, attributes = _names(code)
    named_attributes |= attributes
    for name in named:
        value = space.get(name, _Missing)
        if isinstance(value, types.ModuleType | type) and value is not _Missing:
            if not _installed(value):
                yield from _attributes(name, value, named[name])
        elif name in space or not hasattr(builtins, name):
            read = functools.partial(space.get, name, _Missing)
            yield Place(name, read, ("item", space, name))
    if owner is not None and not isinstance(owner, types.ModuleType):
        kind = owner if isinstance(owner, type) else type(owner)
        for name in attributes:
            named_attributes |= _names_in_method(kind, name)
        held = [base for base in kind.__mro__ if not _installed(base)]
        found = {n: None for base in held for n in vars(base) if n in attributes}
        yield from _attributes(kind.__name__, kind, found)


def _attributes(name: str, held: Any, names: Iterable[str]) -> Iterator[Place]:
    """The attributes of a module or a class that are data."""
    for each in names:
        value = getattr(held, each, _Missing)
        if not (
            callable(value) or isinstance(value, types.ModuleType) or hasattr(value, "__get__")
        ):
            read = functools.partial(getattr, held, each, _Missing)
            yield Place(f"{name}.{each}", read, ("attribute", held, each))


def _names(code: types.CodeType) -> tuple[dict[str, dict[str, None]], set[str]]:
    """The globals that code names, and those in it, with the attributes that it reads of them; and
    all names of attributes."""
    named: dict[str, dict[str, None]] = {}
    attributes: set[str] = set()
    last: str | None = None
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            last = str(step.argval)
            named.setdefault(last, {})
            continue
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(str(step.argval))
            if last is not None:
                named[last][str(step.argval)] = None
        last = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, more = _names(constant)
            attributes |= more
            for name, found in inner.items():
                named.setdefault(name, {}).update(found)
    return named, attributes


@functools.lru_cache(maxsize=4096)
def _names_in_method(kind: type, name: str) -> frozenset[str]:
    """The attributes that a method of a class names, with those of methods that it calls."""
    found: set[str] = set()
    left, met = [name], set()
    while left:
        method = inspect.getattr_static(kind, left.pop(), None)
        method = getattr(method, "fget", getattr(method, "__func__", method))
        while isinstance(method, types.FunctionType) and method not in met:
            met.add(method)
            _, attributes = _names(method.__code__)
            left += attributes - found
            found |= attributes
            method = getattr(method, "__wrapped__", None)
    return frozenset(found)


def _installed(value: Any) -> bool:
    """Whether a module or a class is of an installed package or the standard library."""
    module = value if isinstance(value, types.ModuleType) else sys.modules.get(value.__module__)
    top = getattr(module, "__name__", "").partition(".")[0]
    file = str(getattr(module, "__file__", None) or "")
    known = top in sys.stdlib_module_names and top != "__main__"
    return known or "site-packages" in file or "dist-packages" in file


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # deleted, or not assigned yet
        return _Missing


class ObjectWatch:
    """The arrays of an object, read again at each call where they were found.

    They are looked for again if what holds them has more or fewer values, or values of other types:
    caches are made of None at first.  Plain values are not watched: the object was declared static.
    The object itself is not kept."""

    def __init__(self, value: object, arrays: Arrays) -> None:
        self._arrays = arrays
        self._find(value)

    def _find(self, value: object) -> None:
        self.places: list[tuple[Any, Hashable]] = []
        """What holds an array, and its name there."""
        self.holders: list[Any] = []
        """All that was looked into: dicts, lists, and `_Slots`."""
        self._search(value, 0, set())
        self._kinds = self._kinds_now()

    def _search(self, value: Any, depth: int, seen: set[int]) -> None:
        if depth > _DEEPEST or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, tuple):
            for child in value:
                self._search(child, depth + 1, seen)
            return
        for held in _holders(value):
            self.holders.append(held)
            for key, child in [*_items(held)]:
                if self._arrays.is_array(child):
                    self.places.append((held, key))
                elif not is_plain(child, self._arrays.plain) and not callable(child):
                    self._search(child, depth + 1, seen)

    def _kinds_now(self) -> list[list[type]]:
        return [[type(child) for _, child in _items(held)] for held in self.holders]

    def read(self, value: object, tokens: list[Hashable], arrays: list[Any]) -> None:
        """Adds the arrays of the object to `arrays`."""
        if self._kinds_now() != self._kinds:
            self._find(value)
        tokens.append((type(value).__qualname__, len(self.places)))
        arrays += [held[key] for held, key in self.places]


class _Slots:
    """An object's slots as a dict."""

    def __init__(self, value: object, names: Iterable[str]) -> None:
        self._value, self._names = value, names

    def __getitem__(self, name: str) -> Any:
        return getattr(self._value, name)

    def items(self) -> list[tuple[str, Any]]:
        held = [(name, getattr(self._value, name, _Missing)) for name in self._names]
        return [(name, value) for name, value in held if value is not _Missing]


def _holders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        return
    kind: Any = type(value)
    held, slots = getattr(value, "__dict__", None), _slots(kind)
    if held is not None:
        yield held
    if slots:
        yield _Slots(value, slots)


def _items(held: Any) -> Iterable[tuple[Any, Any]]:
    return enumerate(held) if isinstance(held, list) else held.items()
