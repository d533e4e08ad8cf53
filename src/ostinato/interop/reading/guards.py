"""Guards: read at each call what a function uses besides its arguments, as its code shows it.

Pure.  A graph freezes what the function read while it was captured: a number of its closure, a
global, an attribute of the object that it is a method of, a weight's address.  Plain values become
part of the key; arrays are watched, and the graph is bound anew when one moves.

A guard reads, for the function, for those that it wraps (`functools.wraps`), and for functions of
the user's that they may call: closure cells, default values, globals that the code names (also
those that are defined later), the object of a bound method, and what the code names of that
object's class.  In each of these it reads plain values, arrays, nested tuples, lists, dicts and
dataclasses, sets, small NumPy arrays, data of C, bound methods, partials, and modules of the
library.  In other objects, up to eight levels deep, it reads items, plain attributes, arrays, and
the attributes that the code names, also as texts for `getattr` and in the methods that it calls
(`self.config.scale`); of functions, and of modules and classes of the user's, what the code names;
of objects that the library declares (`states.py`), everything; and what hooks of modules, of
arrays and of optimisers use.  It does not read what functions of installed packages use.  An
iterator or a random generator makes a call run eagerly.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import enum
import functools
import io
import itertools
import operator
import os
import queue
import random
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from ostinato.interop.reading.objects import (
    KEEPING,
    KEPT,
    MOST_ITEMS,
    Missing,
    Watch,
    WatchingLibrary,
    attributes_of,
    items_in,
    same,
)
from ostinato.interop.reading.places import (
    ReadPlace,
    acts,
    data_in,
    data_of,
    descriptors_of,
    forget_methods,
    functions_in_method,
    is_own,
    methods_of,
    names_in_method,
    of_own_class,
    own_bases,
    own_names,
    places_of,
    places_of_one,
    texts_in,
)
from ostinato.interop.reading.trees import (
    ATOMS,
    Itself,
    Leaf,
    Unknown,
    bound_to,
    children_of,
    is_plain,
    plain_token,
)

_DEEPEST = 8
_MOST = 4096
"""The most objects that are looked into, and the most bytes of a NumPy array that is compared."""

Trail: TypeAlias = tuple[Any, ...]
"""The place of a value: the name of its place, then the items and attributes on the way."""


class Walker:
    """A receiver of all that a function uses, in order (`Guards.walk`).  A method that a subclass
    does not define does nothing."""

    def place(self, place: ReadPlace, value: Any) -> None:
        pass

    def array(self, path: Trail, array: Any) -> None:
        pass

    def plain(self, path: Trail, value: Any) -> None:
        pass

    def function(self, path: Trail, value: types.FunctionType) -> None:
        """Receives a function of the user's that may be called: its code and its default values may
        be replaced (`%autoreload`)."""

    def methods(self, path: Trail, kind: type, found: dict[str, Any]) -> None:
        """Receives what the code names of a class of the user's: its methods may be replaced."""

    def variable(self, path: Trail, value: Any, content: Any) -> None:
        """Receives a context variable or a weak reference, before its content."""

    def watched(self, path: Trail, watch: Watch) -> None:
        """Receives a watch, before the other objects that it holds (`Watch.others`)."""

    def container(self, path: Trail, value: Any, head: Hashable, children: list[Any]) -> None:
        """Receives a container, before its children."""

    def contents(self, path: Trail, value: Any, token: Hashable) -> None:
        """Receives an object that is compared by its content, of which `token` is made."""

    def other(self, path: Trail, value: Any, inside: dict[str, Any] | None, inner: bool) -> None:
        """Receives any other object, before its attributes that are read: `inside`, or None.

        `inner`: the object is inside another one; of such an object the attributes that the code
        names are read."""

    def items(self, path: Trail, value: Any, head: Hashable, items: list[Any]) -> None:
        """Receives the items of an object that is also a container, before they are read."""


class Seen(NamedTuple):  # made in each call; a dataclass takes twice as long
    """The values that a function uses besides its arguments, at one moment."""

    tokens: tuple[Hashable, ...]
    arrays: list[Any]


class Guarded(Watch):
    """A function with guards of its own, which also guard the functions that call it."""

    _guards: Guards | None = None

    @property
    def guards(self) -> Guards | None:
        """The guards; None if the function uses nothing that could change."""
        return self._guards

    def read(self, tokens: list[Hashable], arrays: list[Any]) -> None:
        """Appends what the function uses to `tokens` and `arrays`; nothing inside of a read that
        has met it already: functions that use each other would be read in every order."""
        if self._guards is None or self in _here.reading:
            return
        _here.reading.append(self)
        try:
            seen = self._guards.read()
        finally:
            if _here.reading[0] is self:
                _here.reading.clear()
        tokens.append(seen.tokens)
        arrays += seen.arrays


class _Here(threading.local):
    def __init__(self) -> None:
        self.reading: list[Guarded] = []
        """Functions whose guards this thread has read in the outermost reading of one."""


_here = _Here()


class Reading(Walker):
    """A walk that makes the tokens of a key, and lists the arrays."""

    def __init__(self, serial: Callable[[object], int]) -> None:
        self._serial = serial
        self._containers: dict[int, tuple[int, Any]] = {}
        """The containers by address, each with its number; kept, so that none has the address of
        one before."""
        self.tokens: list[Hashable] = []
        self.arrays: list[Any] = []

    def array(self, path: Trail, array: Any) -> None:
        self.tokens.append(Leaf)  # marks the place: `[array, 2.0]` is not `[2.0, array]`
        self.arrays.append(array)

    def plain(self, path: Trail, value: Any) -> None:
        self.tokens.append(plain_token(value))

    def function(self, path: Trail, value: types.FunctionType) -> None:
        self.tokens.append(code_token(value))

    def methods(self, path: Trail, kind: type, found: dict[str, Any]) -> None:
        self.tokens.append((kind, *found.values()))

    def variable(self, path: Trail, value: Any, content: Any) -> None:
        self.tokens.append((type(value), self._serial(value)))

    def watched(self, path: Trail, watch: Watch) -> None:
        watch.read(self.tokens, self.arrays)

    def _marked(self, container: Any, token: Hashable) -> Hashable:
        """Returns the token of a container, with its number if it was met before: functions ask
        whether two are one, and write one to read the other."""
        count = len(self._containers)
        number, _ = self._containers.setdefault(id(container), (count, container))
        return token if number == count else (token, number)

    def container(self, path: Trail, value: Any, head: Hashable, children: list[Any]) -> None:
        self.tokens.append(self._marked(value, head))

    def contents(self, path: Trail, value: Any, token: Hashable) -> None:
        self.tokens.append(self._marked(value, token))

    def other(self, path: Trail, value: Any, inside: dict[str, Any] | None, inner: bool) -> None:
        names = None if inside is None else tuple(inside)
        self.tokens.append((type(value), self._serial(value), names, size_of(value)))

    def items(self, path: Trail, value: Any, head: Hashable, items: list[Any]) -> None:
        self.tokens.append(head)


class Naming:
    """Stands for a reading during a walk, and notes the places of the values."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self.names: list[str] = []
        """The place of each token's value."""
        self.of_arrays: list[str] = []
        """The place of each array."""
        self.states: list[bool] = []
        """True for the tokens of objects with a state of their own."""

    def __getattr__(self, method: str) -> Callable[..., None]:
        receive, reading = getattr(self._reading, method), self._reading

        def named(*given: Any) -> None:
            first, arrays = len(reading.tokens), len(reading.arrays)
            receive(*given)
            count, more = len(reading.tokens) - first, len(reading.arrays) - arrays
            watch = given[1] if method == "watched" else None
            whole, inner = in_words(given[0]) if count else "", watch.names() if watch else ()
            known = [f"{whole}{name}" for name in inner] if len(inner) == count else None
            self.names += known or [whole] * count
            self.of_arrays += [whole] * more
            self.states += [_object_of(watch) is not None] * count

        return named


@dataclass(slots=True)
class _Known:
    """The record of an object that was met."""

    itself: Callable[[], object]
    serial: int
    """A number that, unlike an address, is never given to another object."""
    watch: Watch | None


class _Met(set[int]):
    """The addresses of the objects that a walk has met."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[types.FunctionType, bool]] = []
        """The user's functions that may be called, each with whether that is unlikely: the code
        may name the class of the function for `isinstance` alone."""
        self.kinds: set[tuple[type, bool]] = set()
        """Classes whose methods the walker has received, likewise."""
        self._called: set[tuple[types.FunctionType, bool]] = set()

    def call(self, functions: Iterable[types.FunctionType], *, hardly: bool = False) -> None:
        for function in functions:
            if (function, hardly) not in self._called and is_own(function):
                self._called.add((function, hardly))
                self.called.append((function, hardly))


class _Methods(NamedTuple):
    """The methods of a class that may be called."""

    named: int
    """The number of attributes that the code named when the methods were looked up."""
    names: set[str]
    found: dict[str, Any]
    functions: list[types.FunctionType]
    """The functions of the methods, and those that these call."""
    descriptors: list[Any]


def _drop(known: dict[int, _Known], key: int, reference: object) -> None:
    """Removes the record of an object that is destroyed."""
    found = known.get(key)
    # Another object may have this address, and so this key, by now.
    if found is not None and found.itself is reference:
        del known[key]


class Guards:
    """The guards of one function."""

    def __init__(self, function: Callable[..., Any], library: WatchingLibrary) -> None:
        self._library = library
        self._known: dict[int, _Known] = {}
        self._serials = itertools.count()
        self._named: set[str] = set()
        """Attributes that the function's code names."""
        self._described: set[type] = set()
        """Classes with an attribute that the code names and that a descriptor in Python makes."""
        self._learned: dict[tuple[type, bool], _Methods] = {}
        self._function = function
        self._called: weakref.WeakKeyDictionary[
            types.FunctionType, tuple[types.CodeType, tuple[ReadPlace, ...]]
        ] = weakref.WeakKeyDictionary()
        """Functions that the function may call, with their code and the places in it."""
        self.given: Sequence[types.FunctionType | type | enum.Enum] = ()
        """The functions, classes and members of enumerations among the arguments of the call that
        is read."""
        self.places: tuple[ReadPlace, ...] = ()
        self._codes: list[tuple[types.FunctionType, types.CodeType]] = []
        """The functions that `places` were found in, with their code at that time."""
        self._look()

    def _look(self) -> None:
        """Finds the places in the function's code."""
        functions: list[types.FunctionType] = []
        self.places = tuple(places_of(self._function, self._named, functions))
        self._codes = [(each, each.__code__) for each in functions]
        self._shown = {(id(place.source[1]), place.source[2]) for place in self.places}

    @property
    def empty(self) -> bool:
        """True if there is nothing to read."""
        return not (self.places or self._codes)

    @property
    def named(self) -> frozenset[str]:
        """The attributes that the code names, as far as they have been found."""
        return frozenset(self._named)

    @property
    def known(self) -> int:
        """The number of these attributes."""
        return len(self._named)

    def read(self) -> Seen:
        """Reads the values that the function uses now."""
        for function, code in self._codes:
            if function.__code__ is not code:
                self._look()
                break
        known = -1
        while known != self.known:  # again if a method named further attributes
            known = self.known
            reading = Reading(self.serial)
            met = self.walk(reading)
        if len(self._known) > 2 * len(met) + 64:  # most records are not used any more
            # Over a set made at once: `_drop` may remove entries while this runs.
            for key in {*self._known} - met:
                self._known.pop(key, None)
        return Seen(tuple(reading.tokens), reading.arrays)

    def walk(self, walker: Walker) -> set[int]:
        """Shows a walker all that the function uses; returns the addresses of the objects met."""
        met = _Met()
        for function, _ in self._codes:
            walker.function((function.__name__,), function)
        for place in self.places:
            self._visit_place(walker, place, (place.name,), met)
        for given in self.given:
            self._visit(walker, (getattr(given, "__name__", "an argument"),), given, 0, met)
            if isinstance(given, type):  # of an argument
                self._visit_methods(walker, given, met, hardly=False)
        shown = {(*where, False) for where in self._shown}
        for function, hardly in met.called:
            walker.function((function.__name__,), function)
            for place in self._places_of_called(function):
                where = id(place.source[1]), place.source[2], hardly
                if where in shown:  # functions of one module name the same globals
                    continue
                shown.add(where)
                try:
                    self._visit_place(walker, place, ((function.__name__,), place.name), met)
                except _Moving:
                    if not hardly:
                        raise
        return met

    def walk_given(self, walker: Walker, value: Any) -> None:
        """Shows a walker all that the function may use of an argument that is passed as it is."""
        self._visit(walker, ("a static argument",), value, 0, _Met())

    def read_given(
        self,
        value: Any,
        arrays: list[Any],
        make: Callable[[Callable[[object], int]], Reading] = Reading,
    ) -> list[Hashable]:
        """Reads such an argument; returns its tokens, and adds those of its arrays to `arrays` that
        are not there.  Another object with the same content has the same tokens."""
        known = -1
        while known != self.known:
            known, numbers = self.known, dict[int, int]()
            reading = make(lambda each, n=numbers: n.setdefault(id(each), len(n)))  # type: ignore[misc]
            self.walk_given(reading, value)
        places = {id(each): place for place, each in enumerate(arrays)}
        for each in reading.arrays:
            if places.setdefault(id(each), len(arrays)) == len(arrays):
                arrays.append(each)
        return [*reading.tokens, tuple([places[id(each)] for each in reading.arrays])]

    def _visit_place(self, walker: Walker, place: ReadPlace, path: Trail, met: _Met) -> None:
        value = place.read()
        walker.place(place, value)
        if type(value) in ATOMS:
            walker.plain(path, value)
        else:
            self._visit(walker, path, value, 0, met)

    def _places_of_called(self, function: types.FunctionType) -> tuple[ReadPlace, ...]:
        known = self._called.get(function)
        if known is None or known[0] is not function.__code__:
            places = tuple(places_of_one(function, None, self._named))
            known = self._called[function] = function.__code__, places
        return known[1]

    def _visit(
        self, walker: Walker, path: Trail, value: Any, depth: int, met: _Met, inner: bool = False
    ) -> None:
        """Visits a value.  `inner`: the value is inside an object."""
        library = self._library
        if library.is_array(value):
            walker.array(path, value)
            for hooks in library.hooks(value):
                self._visit(walker, (path, "hooks"), hooks, depth + 1, met, True)
            return
        if type(value) in _WRAPPING:
            wrapped = getattr(value, "__wrapped__", None)
            met.call([wrapped] if type(wrapped) is types.FunctionType else [])
        if type(value) is types.FunctionType:
            met.call([value])
            if value is os.getenv:
                self._visit(walker, (path, "environ"), os.environ, depth, met, inner)
        with_attributes = type(value) is types.FunctionType and bool(vars(value))
        if with_attributes:  # it may stand for an object that the library watches
            watch = self.watch(value)
            if watch is not None:
                self._visit_watched(walker, path, value, watch, depth, met)
                return
        if with_attributes or isinstance(value, _SPACES):
            self._visit_space(walker, path, value, depth, met)
            return
        bound = _bound(value)
        if type(value) is types.MethodType and not is_own(value.__func__):
            owner = value.__self__  # the package's method may call methods of the user's class
            kind: Any = owner if isinstance(owner, type) else type(owner)
            self._named |= names_in_method(kind, value.__func__.__name__)
        if bound is not None and depth < _DEEPEST:
            walker.container(path, value, (type(value),), bound)
            self._visit_all(walker, path, enumerate(bound), depth, met, inner)
            return
        plain = is_plain(value, library.plain)
        if plain and (type(value) is types.FunctionType or not acts(value)):
            walker.plain(path, value)
            return
        watch = self.watch(value)
        if watch is not None:
            self._visit_watched(walker, path, value, watch, depth, met)
            return
        if size_of(value) is not None:
            walker.other(path, value, None, inner)
            return
        token = contents_of(value)
        if token is not None:
            walker.contents(path, value, token)
            if attributes_of(value) is None:  # objects of the user's classes may have attributes
                return
        known = depth >= _DEEPEST and (id(value) in met or len(met) >= _MOST)
        found = None if known else children_of(value, library)
        if found is not None:
            if depth >= _DEEPEST:  # containers may hold each other in a cycle
                met.add(id(value))
            walker.container(path, value, *found)
            self._visit_all(walker, path, enumerate(found[1]), depth, met, inner)
            if isinstance(value, dict):
                keys = [key for key in value if type(key) not in ATOMS and acts(key)]
                self._visit_all(walker, path, enumerate(keys), depth, met, inner)
            if type(value) not in _CONTAINERS and of_own_class(value):
                self._visit_methods(walker, type(value), met, hardly=False)
                if data_of(type(value), self._named):
                    self._visit_space(walker, path, type(value), depth, met)
            return
        iterated = hasattr(type(value), "__next__") and not isinstance(value, _FILES)
        if (iterated and not of_own_class(value)) or type(value) is queue.SimpleQueue:
            raise _Moving(in_words(path), value, "an iterator")
        if isinstance(value, _RANDOM):
            raise _Moving(in_words(path), value, "a random generator")
        if isinstance(value, _VARIABLES) and depth < _DEEPEST:
            content = content_of(value)
            walker.variable(path, value, content)
            self._visit_all(walker, path, [("get()", content)], depth, met, inner)
            return
        deep = depth >= _DEEPEST or id(value) in met or len(met) >= _MOST
        inside = None if deep else self._inside(walker, value, inner, met)
        met.add(id(value))
        walker.other(path, value, inside, inner)
        if inside is not None:
            self._visit_all(walker, path, inside.items(), depth, met, True)
        items = items_in(value) if depth < _DEEPEST else None
        if items is not None:
            self._visit_items(walker, path, value, items, depth, met)

    def _visit_watched(
        self, walker: Walker, path: Trail, value: Any, watch: Watch, depth: int, met: _Met
    ) -> None:
        met.add(id(value))
        walker.watched(path, watch)
        for kind, name in watch.methods():
            met.call(functions_in_method(kind, name))
            if own_bases(kind):
                self._visit_methods(walker, kind, met, hardly=False, among=own_names(kind))
        for name, hook in watch.hooks():
            self._visit(walker, (path, name), hook, depth + 1, met, True)
        for name, child in watch.others():
            if name.rpartition(".")[2] in self._named:
                self._visit(walker, (path, name), child, depth + 1, met, True)

    def _visit_space(self, walker: Walker, path: Trail, value: Any, depth: int, met: _Met) -> None:
        """Visits a module, a class, or a function with attributes."""
        own = isinstance(value, types.FunctionType) or value is os or is_own(value)
        own = own and depth < _DEEPEST and id(value) not in met
        if own and isinstance(value, type):  # the class may be called
            self._visit_methods(walker, value, met, hardly=True)
            if own_bases(type(value)):
                self._visit_methods(walker, type(value), met, hardly=False)
        inside = data_in(value, self._named) if own else None
        if inside or isinstance(value, types.ModuleType):
            met.add(id(value))
            walker.other(path, value, inside, True)
            self._visit_all(walker, path, (inside or {}).items(), depth, met, True)
        else:
            walker.plain(path, value)

    def _visit_items(
        self, walker: Walker, path: Trail, value: Any, items: list[Any], depth: int, met: _Met
    ) -> None:
        """Visits the items of a container of another class, or of one with objects as its keys."""
        kind, plain, paired = type(value), self._library.plain, len(items) > len(value)
        if isinstance(value, set | frozenset) or paired:
            keys = items[: len(value)]
            tokens = [plain_token(k) if is_plain(k, plain) else self.serial(k) for k in keys]
            head: Hashable = (kind, tuple(tokens) if paired else frozenset(tokens))
            looked = [k for k in keys if acts(k) or not is_plain(k, plain)]
            if not paired:
                looked.sort(key=self.serial)
            items = looked + items[len(value) :]
        else:
            head = kind, len(items)
        if len(value) > MOST_ITEMS:
            head, items = (kind, len(value)), []
        walker.items(path, value, head, items)
        self._visit_all(walker, path, enumerate(items), depth, met, True)

    def _inside(
        self, walker: Walker, value: object, inner: bool, met: _Met
    ) -> dict[str, Any] | None:
        """Returns the attributes of an object that are read; None if it has none."""
        found, library, named = attributes_of(value), self._library, self._named
        if found is None:
            return None
        kind: Any = type(value)
        shared = {}
        if own_bases(kind):
            self._visit_methods(walker, kind, met, hardly=False)
            shared = data_of(kind, named - found.keys())
        if "__match_args__" in named:
            named.update(getattr(kind, "__match_args__", ()))
        if inner and not (kind in self._described or ("__dict__" in named and own_bases(kind))):
            names = named.intersection(found)
            inside = {name: found[name] for name in sorted(names)}
        else:
            inside = {
                name: child
                for name, child in found.items()
                if name in named or library.is_array(child) or is_plain(child, library.plain)
            }
        if not KEEPING.isdisjoint(kind.__mro__):
            inside |= {name: found[name] for name in KEPT if name in found}
        return inside | {name: shared[name] for name in sorted(shared)} if shared else inside

    def _visit_methods(
        self,
        walker: Walker,
        kind: Any,
        met: _Met,
        *,
        hardly: bool,
        among: Iterable[str] | None = None,
    ) -> None:
        """Visits the methods of a class of the user's that may be called, or those `among` names.
        `hardly`: the code names the class itself.  Its constructor may be called, which is
        unlikely."""
        named, known = self._named, self._learned.get((kind, hardly))
        found = {} if known is None else methods_of(kind, known.names)
        if known is None or known.named != len(named) or known.found != found:
            if known is not None and known.found != found:
                forget_methods()
            special = _MAKING if hardly else frozenset()
            names = {
                name
                for name in (type.__dir__(kind) if among is None else among)
                if name in named
                or name in special
                or (name.startswith("__") and name.endswith("__") and name not in _NOT_CALLED)
            }
            functions: list[types.FunctionType] = []
            for name in sorted(names):
                named |= names_in_method(kind, name)
                functions += functions_in_method(kind, name)
            descriptors = descriptors_of(kind, named)
            if descriptors:
                self._described.add(kind)
            found = methods_of(kind, names)
            known = _Methods(len(named), names, found, functions, descriptors)
            self._learned[kind, hardly] = known
        met.call(known.functions, hardly=hardly)
        self._visit_all(walker, (kind.__qualname__,), enumerate(known.descriptors), 0, met, False)
        if found and (kind, hardly) not in met.kinds:
            met.kinds.add((kind, hardly))
            walker.methods((kind.__qualname__,), kind, found)
            for base in own_bases(kind)[1:]:  # `super()` may call what others override
                self._visit_methods(walker, base, met, hardly=hardly, among=known.names)

    def _visit_all(
        self,
        walker: Walker,
        path: Trail,
        items: Iterable[tuple[Any, Any]],
        depth: int,
        met: _Met,
        inner: bool,
    ) -> None:
        for name, child in items:
            if type(child) in ATOMS:  # most are: tested first
                walker.plain((path, name), child)
            else:
                self._visit(walker, (path, name), child, depth + 1, met, inner)

    def watch(self, value: Any) -> Watch | None:
        """Returns the watch of an object with a state of its own; None for all others."""
        if type(value) in _CONTAINERS:
            return None
        return self._look_up(value).watch

    def serial(self, value: object) -> int:
        """Returns the number that stands for an object."""
        return self._look_up(value).serial

    def _look_up(self, value: Any) -> _Known:
        known = self._known.get(id(value))
        if known is None or known.itself() is not value:
            watch = value if isinstance(value, Guarded) else self._library.watch(value)
            if watch is not None and watch is not value:
                watch.named = self._named
            itself: Callable[[], object] = functools.partial(_itself, value)
            if not isinstance(value, self._library.held):
                with contextlib.suppress(TypeError):  # no weak references
                    drop = functools.partial(_drop, self._known, id(value))
                    itself = weakref.ref(value, drop)
            known = self._known[id(value)] = _Known(itself, next(self._serials), watch)
            if isinstance(value, operator.attrgetter | operator.methodcaller):
                self._named |= texts_in(value.__reduce__())
            for kind, name in () if watch is None else watch.methods():
                self._named |= names_in_method(kind, name)
                self._named.add(name)  # an instance may have an attribute of this name
        return known

    def watched(self) -> list[Any]:
        """Returns the objects with a state of their own that the last readings have met."""
        found = [_object_of(known.watch) for known in [*self._known.values()]]
        return [each for each in found if each is not None]

    def start_over(self) -> None:
        """Forgets the objects that were met, whose watches may be others from now on."""
        self._known.clear()

    def naming(self) -> Naming:
        """Returns the places of the values of the tokens that `read` returns now."""
        naming = Naming(Reading(self.serial))
        self.walk(cast(Walker, naming))
        return naming

    def explain(self, before: Seen, after: Seen) -> list[str]:
        """Returns the names of what differs between two readings; empty if nothing does.  `after`
        was made just now."""
        if before.tokens == after.tokens and same(before.arrays, after.arrays):
            return []
        naming = self.naming()
        pairs = zip(naming.names, before.tokens, after.tokens, strict=False)
        found = [*dict.fromkeys([name for name, one, other in pairs if one != other])]
        if len(before.tokens) != len(after.tokens):
            return found[:1] or ["what it uses"]  # the tokens after the first one are shifted
        arrays = zip(naming.of_arrays, before.arrays, after.arrays, strict=False)
        return found or [*dict.fromkeys([name for name, one, other in arrays if one is not other])]


def _object_of(watch: Watch | None) -> Any:
    """Returns the object that a watch reads whole; None for a watch of another kind."""
    # Asked of the type: a graphed module passes attributes that it lacks on to its module.
    return getattr(watch, "object", None) if hasattr(type(watch), "object") else None


_WRAPPING = (types.FunctionType, type(functools.lru_cache(len)))
_VARIABLES = (ContextVar, weakref.ref)


def content_of(variable: Any) -> Any:
    """Returns the present content of a context variable or a weak reference."""
    return variable.get(Missing) if type(variable) is ContextVar else variable()


def code_token(function: types.FunctionType) -> Hashable:
    """Returns the token of a function's own behaviour: its code and its default values."""
    given, named = function.__defaults__, function.__kwdefaults__
    if given is None and named is None:
        return function.__code__
    return (
        function.__code__,
        plain_token(given) if is_plain(given) else Itself(given),
        Itself(named),
    )


def size_of(value: Any) -> int | None:
    """Returns the length of a large table of plain values, whose items are not read; else None."""
    if type(value) not in _CONTAINERS or len(value) <= MOST_ITEMS:
        return None
    first = itertools.islice(value.values() if type(value) is dict else value, 16)
    return len(value) if all(map(is_plain, first)) else None


_CONTAINERS = (tuple, list, dict, set, frozenset)
_NOT_CALLED = frozenset(
    f"__{name}__"
    for name in (
        *("init", "new", "post_init", "init_subclass", "del", "repr", "str", "format", "dir"),
        *("reduce", "reduce_ex", "getstate", "setstate", "copy", "deepcopy", "eq", "hash"),
    )
)
"""Special methods that a function rarely calls, and that name all attributes of an object."""
_MAKING = frozenset(["__new__", "__init__", "__post_init__"])
_SPACES = (types.ModuleType, type)
_FILES = io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper
"""Iterators to which a function may print.  The position of all others that are not the user's
cannot be read, and a replay does not advance them."""
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_C_DATA: Any = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)
_NUMPY = (np.ndarray, np.void)
_VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))
_BUILT_IN = (types.BuiltinMethodType, types.MethodWrapperType)


def _bound(value: Any) -> list[Any] | None:
    """Returns the parts of a function that is bound to arguments; None for other values."""
    if type(value) is types.MethodType:
        return [value.__func__, value.__self__]
    if isinstance(value, _BUILT_IN):
        owner = bound_to(value)
        return None if owner is None else [value.__name__, owner]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, _VIEWS):
        return [dict(value.mapping)]
    if type(value) in weakref.ProxyTypes:
        with contextlib.suppress(ReferenceError):  # it points at nothing any more
            return [value.__init__.__self__]
    return None


class _Moving(Unknown):
    """An error: a value has a state on the host that a replay does not change."""

    def __init__(self, path: str, value: object, what: str) -> None:
        super().__init__(path, value)
        self._what = what

    def __str__(self) -> str:
        kind = type(self.value).__qualname__
        return f"{self.path} is {self._what} ({kind}), which a replay would not advance"


def in_words(path: Trail) -> str:
    """Formats a path: `self.layers[0]`."""
    *before, last = path
    if not before:
        return str(last)
    inside = in_words(before[0])
    return f"{inside}[{last}]" if isinstance(last, int) else f"{inside}.{last}"


def _itself(value: object) -> object:
    return value


def contents_of(value: Any) -> Hashable | None:
    """Returns a token of an object's content, for types that are compared so; None for others."""
    kind: Any = type(value)
    if value is os.environ:
        return kind, frozenset(value.items())
    if kind is set and all(map(is_plain, value)) and not any(map(acts, value)):
        return kind, frozenset(map(plain_token, value))
    if kind is bytearray and len(value) <= _MOST:
        return kind, bytes(value)
    if kind is memoryview and value.nbytes <= _MOST:
        return kind, value.format, value.shape, value.tobytes()
    if kind is array.array and len(value) * value.itemsize <= _MOST:
        return kind, value.typecode, value.tobytes()
    if issubclass(kind, _NUMPY):  # `isinstance` reads the value's `__class__`, which may run Python
        if value.nbytes > _MOST or value.dtype.hasobject:
            return None
        masked = value.mask.tobytes() if issubclass(kind, np.ma.MaskedArray) else None
        return kind, str(value.dtype), value.shape, np.asarray(value).tobytes(), masked
    if issubclass(kind, _C_DATA) and ctypes.sizeof(value) <= _MOST:
        return kind, bytes(memoryview(value))  # `bytes` calls an `__index__` that it may have
    return None
