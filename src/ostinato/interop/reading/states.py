"""Objects whose whole state decides what a function does (optimisers), read at each call."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from ostinato.interop.reading.guards import contents_of
from ostinato.interop.reading.objects import (
    Slots,
    Watch,
    WatchingLibrary,
    attributes_of,
    holders_of,
    items_of,
    same,
    version_of,
)
from ostinato.interop.reading.recheck import Checks, Inexpressible, SameItems
from ostinato.interop.reading.trees import Itself, is_plain, plain_token

_DEEPEST = 16
_CONTAINERS = (dict, list, tuple, deque)
_all = itertools.chain.from_iterable


class StateWatch(Watch):
    """All that an object holds, at any depth and under any name: plain values, each with a token of
    its own, arrays, and the layout that connects them.

    The watch does not keep the object alive."""

    def __init__(self, value: object, library: WatchingLibrary) -> None:
        self._object, self._library = weakref.ref(value), library
        self._found = False

    @property
    def object(self) -> Any:
        return self._object()

    def _find(self) -> None:
        self._holders: list[Any] = []
        """All containers that were looked into: dicts, lists, deques, tuples, and `Slots`."""
        self._tokens: list[Hashable] = []
        self._names: list[str] = []
        """The place of each token's value."""
        self._arrays: list[Any] = []
        """The arrays, each once."""
        self._contents: list[tuple[Any, Hashable]] = []
        """Objects that are compared by content, each with the token of its content."""
        self._objects: list[Any] = []
        """Objects inside the watched one that are no containers."""
        self._watches: list[tuple[str, Watch]] = []
        self._numbers: dict[int, int] = {}
        self._met: dict[int, int] = {}
        self._placed: list[dict[int, int]] = []
        """The places of tokens: for each holder, the index of a value and that of its token."""
        self._layout: list[Hashable] = []
        value = self.object
        self._kind: Any = type(value)
        self._search("", value, 0)
        self._inside = [h.values() if isinstance(h, dict) else h for h in self._holders]
        self._dicts = [held for held in self._holders if isinstance(held, dict)]
        self._sized = [held for held in self._holders if not isinstance(held, Slots)]
        self._keys, self._lengths = [*_all(self._dicts)], [*map(len, self._sized)]
        self._kinds = [*map(type, self._objects)]
        self._values = [*_all(self._inside)]
        starts = itertools.accumulate([len([*inside]) for inside in self._inside], initial=0)
        self._places = {
            start + index: place
            for start, placed in zip(starts, self._placed, strict=False)
            for index, place in placed.items()
        }
        self._version = version_of(tuple(self._layout))
        self._found = True

    def _search(self, name: str, value: Any, depth: int) -> None:
        library, layout = self._library, self._layout
        if library.is_array(value):
            layout.append(self._number(value))
            return
        if is_plain(value, library.plain):
            layout.append(None)
            self._tokens.append(plain_token(value))
            self._names.append(name)
            return
        if id(value) in self._met:
            layout.append(("again", self._met[id(value)]))
            return
        self._met[id(value)] = len(self._met)
        container = isinstance(value, _CONTAINERS)
        watch = None if container else library.watch(value)
        if watch is not None and not isinstance(watch, StateWatch):
            kind: Any = type(value)
            layout.append(kind)
            self._watches.append((name, watch))
            return
        contents = None if container else contents_of(value)
        if contents is not None:
            layout.append(None)
            self._tokens.append(contents)
            self._names.append(name)
            self._contents.append((value, contents))
            return
        if depth > _DEEPEST or (not container and attributes_of(value) is None):
            layout.append(Itself(value))  # compared by identity alone
            self._objects.append(value)
            return
        if depth and not container:
            self._objects.append(value)
        kind = type(value)
        layout.append(kind)
        for held in holders_of(value):
            items, placed = [*items_of(held)], dict[int, int]()
            self._holders.append(held)
            self._placed.append(placed)
            layout.append(tuple([self._key(key) for key, _ in items]))
            for index, (key, child) in enumerate(items):
                if is_plain(child, library.plain):
                    placed[index] = len(self._tokens)
                attribute = held is not value and isinstance(key, str)
                inside = f"{name}.{key}" if attribute else f"{name}[{_word(key)}]"
                self._search(inside, child, depth + 1)

    def _number(self, array: Any) -> int:
        number = self._numbers.setdefault(id(array), len(self._arrays))
        if number == len(self._arrays):
            self._arrays.append(array)
        return number

    def _key(self, key: Any) -> Hashable:
        if self._library.is_array(key):
            return self._number(key)
        return plain_token(key) if is_plain(key, self._library.plain) else Itself(key)

    def _as_before(self) -> bool:
        """True if the layout and the arrays are unchanged.  Updates the tokens of changed plain
        values."""
        # Loops run in C where possible, since each call that goes by its key runs this.
        if not self._found or type(self.object) is not self._kind:
            return False
        values = [*_all(self._inside)]
        if (
            [*map(len, self._sized)] != self._lengths
            or not same([*_all(self._dicts)], self._keys)
            or [*map(type, self._objects)] != self._kinds
            or any(contents_of(value) != contents for value, contents in self._contents)
            or len(values) != len(self._values)
        ):
            return False
        if same(values, self._values):
            return True
        plain = self._library.plain
        for index, (value, before) in enumerate(zip(values, self._values, strict=True)):
            if value is not before:
                place = self._places.get(index)
                if place is None or not is_plain(value, plain):
                    return False
                self._tokens[place] = plain_token(value)
        self._values = values
        return True

    def read(self, tokens: list[Hashable], arrays: list[Any]) -> None:
        if not self._as_before():
            self._find()
        tokens.append((StateWatch, self._version))
        tokens += self._tokens
        arrays += self._arrays
        for _, watch in self._watches:
            watch.read(tokens, arrays)

    def names(self) -> list[str]:
        return [] if self._watches else ["", *self._names]

    def others(self) -> Iterator[tuple[str, Any]]:
        for name, watch in self._watches:
            for inner, child in watch.others():
                yield f"{name}.{inner}", child

    def holders(self) -> Iterable[Any]:
        inside = [watch.holders() for _, watch in self._watches]
        return [*self._holders, *[value for value, _ in self._contents], *_all(inside)]

    def note(self, checks: Checks, tokens: list[Hashable], arrays: list[Any]) -> None:
        """Reads the state, and notes the place of each value."""
        self.read(tokens, arrays)
        if self._watches:
            raise Inexpressible  # the modules in an optimiser are not compared
        checks.types([self.object, *self._objects], [self._kind, *self._kinds])
        for held in self._holders:
            if isinstance(held, OrderedDict) and not held:
                checks.size(held, 0)
            elif isinstance(held, dict) and not isinstance(held, OrderedDict):
                checks.items(held, [*dict.values(held)])
            elif type(held) is list:
                checks.sequence(held, [*held])
            elif isinstance(held, Slots):
                raise Inexpressible
            elif type(held) is not tuple:
                checks.reads(held, SameItems(held))
        for value, _ in self._contents:
            checks.reads(value, contents_of)
        if not same([*_all(self._inside)], self._values):
            raise Inexpressible


def _word(key: Any) -> str:
    return repr(key) if type(key) in (str, int) else "…"
