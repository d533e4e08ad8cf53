"""A snapshot of the host state that a run of a function may change.

It is put back after a capture that failed: Python has run, but nothing on the device.
"""

from __future__ import annotations

import array
import ctypes
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np

from ostinato.interop.reading.guards import Guarded, Guards, Trail, Walker
from ostinato.interop.reading.objects import Missing, Slots, Watch, holders_of, same
from ostinato.interop.reading.places import ReadPlace


class HostSnapshot(Walker):
    """The content of the host objects that are noted in it, without the memory of arrays, which no
    capture writes.

    Puts back only what has changed between `begin` and `end`: other threads may change the same
    objects later."""

    def __init__(self, note: Callable[[HostSnapshot], None]) -> None:
        """`note`: notes everything that the run may change."""
        self._note = note
        self._held: dict[int, tuple[Any, Any]] = {}
        """Objects with content, and that content, by the object's address."""
        self._named: list[tuple[Any, str, Any]] = []
        """Dicts and other objects, each with the name of an item or attribute and its value."""
        self._guards: list[Guards] = []
        self._names: set[str] = set()
        """Attributes that the code names."""

    def begin(self) -> None:
        """Begins a run; a second run begins with the state that the first one began with."""
        self.put_back()
        self._note(self)

    def end(self) -> None:
        """Ends the run, and keeps only what it has changed."""
        self._named = [each for each in self._named if _named(*each[:2]) is not each[2]]
        self._held = {key: each for key, each in self._held.items() if _differs(*each)}

    def put_back(self) -> None:
        """Puts back what the run changed."""
        for held, name, value in self._named:
            if _named(held, name) is not value:
                _set_named(held, name, value)
        for held, before in self._held.values():
            if _differs(held, before):
                _fill(held, before)
        for noted in (self._held, self._named, self._guards, self._names):
            noted.clear()

    def hold(self, held: Any) -> None:
        """Notes the content of an object, if that can change."""
        if id(held) not in self._held:
            found = _taken(held)
            if found is not None:
                self._held[id(held)] = held, found

    def attributes(self, found: Iterable[tuple[Any, str, Any]]) -> None:
        """Notes attributes of objects: each as the object, the name and the value."""
        self._named += found

    # --- a walk
    def guards(self, guards: Guards) -> None:
        """Notes what a function uses besides its arguments.  Raises Unknown."""
        if guards not in self._guards:  # a function that uses itself
            self._guards.append(guards)
            self._names |= guards.named
            guards.walk(self)

    def place(self, place: ReadPlace, value: Any) -> None:
        how, held, name = place.source
        if isinstance(held, type):  # the class that has it, not one that inherits it
            held = next((base for base in held.__mro__ if name in vars(base)), held)
        if how in ("item", "attribute"):
            self._named.append((held, name, value))

    def watched(self, path: Trail, watch: Watch) -> None:
        if isinstance(watch, Guarded):
            if watch.guards is not None:
                self.guards(watch.guards)
            return
        self.watch(watch)

    def watch(self, watch: Watch) -> None:
        watch.read([], [])
        for held in watch.holders():
            self.hold(held)

    def container(self, path: Trail, value: Any, head: Hashable, children: list[Any]) -> None:
        self._whole(value)

    def contents(self, path: Trail, value: Any, token: Hashable) -> None:
        self._whole(value)

    def other(self, path: Trail, value: Any, inside: dict[str, Any] | None, inner: bool) -> None:
        # Only what the function uses: other threads may change the other attributes.
        if inside is None:
            return
        if isinstance(value, types.ModuleType | types.FunctionType | type):
            self._named += [(value, name, child) for name, child in inside.items()]
            return
        held = getattr(value, "__dict__", None)
        if type(held) is dict:
            names = self._names.union(inside)
            self._named += [(held, name, held.get(name, Missing)) for name in names]
        for each in holders_of(value):
            if isinstance(each, Slots):
                self.hold(each)

    def items(self, path: Trail, value: Any, head: Hashable, items: list[Any]) -> None:
        self._whole(value)

    def _whole(self, value: Any) -> None:
        self.hold(value)
        for held in holders_of(value):
            self.hold(held)


def _named(held: Any, name: str) -> Any:
    if type(held) is dict:
        return held.get(name, Missing)
    try:
        return getattr(held, name, Missing)
    except ValueError:  # a variable without a value
        return Missing


def _set_named(held: Any, name: str, value: Any) -> None:
    if value is not Missing:
        if type(held) is dict:
            held[name] = value
        else:
            setattr(held, name, value)
    elif type(held) is dict:
        del held[name]
    else:
        delattr(held, name)


_BYTES = (bytearray, array.array, ctypes.Array, ctypes.Structure, ctypes.Union, ctypes._SimpleCData)


def _taken(held: Any) -> Any:
    """Returns the content of an object: a list of objects, keys before values, or bytes.  None if
    the content cannot change."""
    if isinstance(held, OrderedDict):
        return [*held.keys(), *held.values()]
    if isinstance(held, dict):
        return [*dict.keys(held), *dict.values(held)]
    if isinstance(held, list | set | deque):
        return [*held]
    if isinstance(held, Slots):
        return [each for pair in held.items() for each in pair]
    if isinstance(held, np.ndarray):
        plain = held.flags.writeable and not held.dtype.hasobject
        return np.asarray(held).tobytes() if plain else None
    return bytes(memoryview(held)) if isinstance(held, _BYTES) else None


def _differs(held: Any, before: Any) -> bool:
    now = _taken(held)
    return now != before if isinstance(before, bytes) else not same(now, before)


def _fill(held: Any, before: Any) -> None:
    """Gives an object the content that `_taken` returned."""
    if isinstance(held, dict):
        kind: Any = OrderedDict if isinstance(held, OrderedDict) else dict
        kind.clear(held)
        half = len(before) // 2
        for key, value in zip(before[:half], before[half:], strict=True):
            kind.__setitem__(held, key, value)
    elif isinstance(held, list):
        list.__setitem__(held, slice(None), before)
    elif isinstance(held, set | deque):
        held.clear()
        (held.update if isinstance(held, set) else held.extend)(before)
    elif isinstance(held, Slots):
        held.fill(dict(zip(before[::2], before[1::2], strict=True)))
    elif isinstance(held, np.ndarray):
        np.asarray(held)[...] = np.frombuffer(before, held.dtype).reshape(held.shape)
    elif isinstance(held, array.array):
        held[:] = array.array(held.typecode, before)
    elif isinstance(held, bytearray):
        held[:] = before
    else:
        ctypes.memmove(ctypes.addressof(held), before, len(before))
