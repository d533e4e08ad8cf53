"""The content of objects: attributes and slots, and the arrays inside a static argument."""

from __future__ import annotations

import argparse
import concurrent.futures
import configparser
import functools
import itertools
import operator
import queue
import string
import sys
import threading
import types
import weakref
from abc import ABC, abstractmethod
from collections import ChainMap, OrderedDict, UserDict, UserList, UserString, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from ostinato.interop.reading.trees import Arrays, is_plain, made_in_python, plain_token

_DEEPEST = 4
MOST_ITEMS = 1000


class Watch(ABC):
    """A reader of an object with a state of its own (a module), used at each call."""

    named: Collection[str] = frozenset()
    """Attributes that the code of the function names."""

    @abstractmethod
    def read(self, tokens: list[Hashable], arrays: list[Any]) -> None:
        """Adds the object's plain values to `tokens` and its arrays to `arrays`."""

    def others(self) -> Iterable[tuple[str, Any]]:
        """Returns the other objects that the object holds, by name; to be called after `read`."""
        return ()

    def methods(self) -> Iterable[tuple[type, str]]:
        """Returns classes, each with the name of a method that runs when the object is called."""
        return ()

    def hooks(self) -> Iterable[tuple[str, Any]]:
        """Returns the functions, by name, that run when the object is called, or when gradients of
        its arrays are computed; to be called after `read`."""
        return ()

    def names(self) -> list[str]:
        """Returns for each token of `read` the place of its value, behind the name of the object;
        empty if the places are not known."""
        return []

    def holders(self) -> Iterable[Any]:
        """Returns the dicts, lists and the like of what `read` reads; to be called after it."""
        return ()


_MOST_VERSIONS = 4096
_next_version = itertools.count()
_versions: dict[Hashable, int] = {}


def version_of(layout: Hashable) -> int:
    """Returns a number that stands for the layout of a watched object; equal layouts have the same
    number, also of different objects and functions."""
    if len(_versions) > _MOST_VERSIONS:
        _versions.clear()
    return _versions.setdefault(layout, next(_next_version))


class WatchingLibrary(Arrays, Protocol):
    """A library with objects that have a state of their own."""

    held: tuple[type, ...] = ()
    """Types that no weak reference may point at: the reference would outlive the object."""

    def watch(self, value: object, /) -> Watch | None:
        """Returns the watch of such an object; None for all others."""
        return None

    def hooks(self, array: Any, /) -> Iterable[Any]:
        """Returns the containers of functions that run when the gradient of an array is
        computed."""
        return ()


class Missing:
    """Stands for the value of an undefined global, and of a variable or a slot without a value."""


def of_standard_library(kind: type) -> bool:
    """True if a class is Python's own.  `exec` makes classes whose module is "builtins"."""
    module = kind.__module__
    if module == "builtins":
        return not made_in_python(kind)
    return module.partition(".")[0] in sys.stdlib_module_names


KEEPING = frozenset(
    [
        *(UserDict, UserList, UserString, ChainMap, weakref.WeakSet),
        *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
        *(threading.Event, threading.Semaphore, queue.Queue, concurrent.futures.Future),
        *(configparser.RawConfigParser, configparser.SectionProxy, string.Template),
        functools.singledispatchmethod,
    ]
)
"""Classes of the standard library whose objects keep what their methods return under these names.
"""
KEPT = (
    *("data", "maps", "_flag", "_value", "queue", "_state", "_result"),
    *("_sections", "_defaults", "_parser", "template", "dispatcher"),
)
_OPEN = KEEPING | {types.SimpleNamespace, argparse.Namespace, threading.local}


def attributes_of(value: object) -> dict[str, Any] | None:
    """Returns the attributes of an object; None for most of the standard library's: locks,
    threads."""
    kind: Any = type(value)
    if of_standard_library(kind) and _OPEN.isdisjoint(kind.__mro__):
        return None
    held = getattr(value, "__dict__", None)
    slots = _slots_of(kind)
    if not slots:
        return held if isinstance(held, dict) else None
    found = {name: getattr(value, name, Missing) for name in slots}
    return found | held if isinstance(held, dict) else found


@functools.lru_cache(maxsize=1024)
def _slots_of(kind: type) -> tuple[str, ...]:
    """Returns the names of the slots of a class."""
    found: list[str] = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            owner = base.__name__.lstrip("_")
            found.append(f"_{owner}{name}" if private and owner else name)
    return tuple([n for n in found if n not in ("__dict__", "__weakref__")])


class InsideObject:
    """The content of an object, up to `_DEEPEST` levels deep, at one moment.

    Plain values are compared unless the object's class is a package's, and those of the library's
    modules."""

    def __init__(
        self,
        value: object,
        library: Arrays,
        watch_of: Callable[[Any], Watch | None],
        *,
        own: bool,
    ) -> None:
        """`own`: the object's class is no package's."""
        self._library, self._watch_of, self._own = library, watch_of, own
        self._kind: Any = type(value)
        self.places: list[tuple[Any, Any]] = []
        """The holder of each array, and the array's name or index there."""
        self.inner: list[tuple[Any, Any]] = []
        """The holder and the name of each object that was looked into."""
        self.holders: list[tuple[Any, list[tuple[Any, Any]]]] = []
        """The dicts, lists, deques, tuples and `Slots` that were looked into, each with its plain
        values that are compared, and their names or indices."""
        self.watches: list[Watch] = []
        """The watches of the library's modules."""
        self._search(value, 0, set())

    def _search(self, value: Any, depth: int, seen: set[int]) -> None:
        if depth > _DEEPEST or id(value) in seen:
            return
        seen.add(id(value))
        plain = self._library.plain
        watch = self._watch_of(value) if hasattr(value, "__dict__") else None
        if watch is not None:
            self.watches.append(watch)
            watch.read([], [])
            for _, child in watch.others():
                if not isinstance(child, _CALLED):
                    self._search(child, depth + 1, seen)
            return
        for held in holders_of(value):
            items, found = [*items_of(held)], list[tuple[Any, Any]]()
            self.holders.append((held, found))
            compared = self._own and len(items) <= MOST_ITEMS
            for key, child in items:
                if self._library.is_array(child):
                    self.places.append((held, key))
                elif is_plain(child, plain):
                    if compared and is_plain(key, plain):
                        found.append((key, child))
                elif not isinstance(child, _CALLED):
                    self.inner.append((held, key))
                    self._search(child, depth + 1, seen)

    def read(self, tokens: list[Hashable], arrays: list[Any]) -> None:
        """Adds what is compared to `tokens`, and the arrays to `arrays`."""
        number = {id(held): index for index, (held, _) in enumerate(self.holders)}
        found = self.places + self.inner
        layout = [(number[id(held)], key if is_plain(key) else None) for held, key in found]
        tokens.append((self._kind, len(self.places), tuple(layout)))
        for _, plain in self.holders:
            tokens += [(plain_token(key), plain_token(value)) for key, value in plain]
        tokens += [(type(held[key]),) for held, key in (self.inner if self._own else ())]
        arrays += [held[key] for held, key in self.places]
        for watch in self.watches:
            watch.read(tokens, arrays)


class Slots:
    """The slots of an object as a dict."""

    def __init__(self, value: object, names: Iterable[str]) -> None:
        self._value, self._names = value, names

    def __getitem__(self, name: str) -> Any:
        return getattr(self._value, name)

    def __iter__(self) -> Iterator[Any]:
        return iter([value for _, value in self.items()])

    def fill(self, held: Mapping[str, Any]) -> None:
        """Gives the slots these values, and deletes the others."""
        for name in self._names:
            if name in held:
                setattr(self._value, name, held[name])
            elif hasattr(self._value, name):
                delattr(self._value, name)

    def items(self) -> list[tuple[str, Any]]:
        held = [(name, getattr(self._value, name, Missing)) for name in self._names]
        return [(name, value) for name, value in held if value is not Missing]


_CALLED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)


def same(some: list[Any], others: list[Any]) -> bool:
    """True if two lists hold the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def items_in(value: Any) -> list[Any] | None:
    """Returns the items of a container, keys before values; None for other values."""
    if isinstance(value, OrderedDict):  # its order is not that of the dict
        return [*OrderedDict.keys(value), *OrderedDict.values(value)]
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value)]
    if isinstance(value, types.MappingProxyType):
        return [*value.keys(), *value.values()]
    kinds: tuple[Any, ...] = list, tuple, set, frozenset, deque
    for kind in kinds:
        if isinstance(value, kind):
            return [*kind.__iter__(value)]
    return None


def holders_of(value: Any) -> Iterator[Any]:
    kind: Any = type(value)
    if isinstance(value, dict | list | tuple | deque):
        yield value
        if kind in (dict, list, tuple, deque):
            return
    held, slots = getattr(value, "__dict__", None), _slots_of(kind)
    if held is not None:
        yield held
    if slots:
        yield Slots(value, slots)


def items_of(held: Any) -> Iterable[tuple[Any, Any]]:
    return enumerate(held) if isinstance(held, list | tuple | deque) else held.items()
