"""What objects hold: their attributes and slots, and the arrays in a static argument."""

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from ostinato.interop.graphing.trees import Arrays, is_plain

__all__ = ["Missing", "ObjectWatch", "attributes_of"]

_DEEPEST = 4


class Missing:
    """Stands for a global that is not defined, and for a variable or a slot without a value."""


def attributes_of(value: object) -> dict[str, Any] | None:
    """The attributes of an object; not those of the standard library's: locks, loggers, threads."""
    kind: Any = type(value)
    if kind not in (types.SimpleNamespace, argparse.Namespace) and (
        kind.__module__.partition(".")[0] in sys.stdlib_module_names
    ):
        return None
    held = getattr(value, "__dict__", None)
    slots = _slots_of(kind)
    if not slots:
        return held if isinstance(held, dict) else None
    found = {name: getattr(value, name, Missing) for name in slots}
    return found | held if isinstance(held, dict) else found


@functools.lru_cache(maxsize=1024)
def _slots_of(kind: type) -> tuple[str, ...]:
    """The names of the slots of a class."""
    found: list[str] = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        found += [names] if isinstance(names, str) else names
    return tuple([n for n in found if n not in ("__dict__", "__weakref__")])


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
        held = [(name, getattr(self._value, name, Missing)) for name in self._names]
        return [(name, value) for name, value in held if value is not Missing]


def _holders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        return
    kind: Any = type(value)
    held, slots = getattr(value, "__dict__", None), _slots_of(kind)
    if held is not None:
        yield held
    if slots:
        yield _Slots(value, slots)


def _items(held: Any) -> Iterable[tuple[Any, Any]]:
    return enumerate(held) if isinstance(held, list) else held.items()
