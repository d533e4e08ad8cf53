"""A short way for calls like the last: C compares what their key is made of, and makes no key.

After a replay by the key, `recheck` reads once more what the key is made of, and notes the place of
each value.  `ShortWay.match` compares all of it with a later call (`_recheck.c`).  A call that does
not match goes by the key.  The comparison may refuse a call of the same key (another object of the
same value), but accepts none of another key.  A key with a value that cannot be noted has no short
way.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import struct
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from ostinato import GraphExec, Stream
from ostinato.errors import ContextPoisonedError, OstinatoError
from ostinato.interop.reading.arguments import Arguments
from ostinato.interop.reading.chains import ChainReplay, Diverged
from ostinato.interop.reading.function import Subject
from ostinato.interop.reading.guards import Reading, Trail, content_of, contents_of, size_of
from ostinato.interop.reading.library import Library
from ostinato.interop.reading.objects import Watch, items_in, same
from ostinato.interop.reading.places import ReadPlace, held_by
from ostinato.interop.reading.records import AttachedGradient, Captured, Line, ReadCall
from ostinato.interop.reading.trees import Itself, children_of, is_plain, plain_token
from ostinato.lowlevel import NotLaunched, load_extension

_extension, _ = load_extension("ostinato.interop.reading._recheck")
MOST_HOT = 4
"""The most keys of a function that have a short way at one time."""
TIMED = 16
"""The number of calls of which one is timed."""
_COMPARED = 64
"""The number of first calls of a key that runs eagerly that are all compared."""
_chance = random.Random(0).random
"""Returns numbers from 0 to 1, of a generator of its own."""
_IMMUTABLE = (
    *(tuple, types.MethodType, types.BuiltinMethodType, types.MethodWrapperType),
    functools.partial,
)
_ATOMS = (int, bool, str, bytes, type(None))


def compiled() -> bool:
    """True if the extension was loaded; without it every call goes by its key."""
    return _extension is not None


class Inexpressible(Exception):
    """An error: a part of a key that these checks cannot compare."""


class Checks:
    """The checks of one call, as they are collected: each method adds checks for later calls."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._array_reads = library.reads
        self._made: list[tuple[Any, ...]] = []
        self._items: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        """Dicts with the items that are noted, by the dict's address."""
        self._sizes: dict[int, tuple[dict[Any, Any], int]] = {}
        self._slots = 0
        self.statics: list[Any] = []
        self.pointers: list[int] = []
        """Addresses of the static arguments."""

    # --- objects that do not depend on the call
    def _add(
        self,
        operation: str,
        slot: int,
        held: object = None,
        keys: Sequence[Any] = (),
        values: Sequence[Any] = (),
        following: int = 0,
    ) -> None:
        """`slot`: of the subject; -1 if it is `held`."""
        code = getattr(_extension, operation)
        self._made.append((code, slot, held, tuple(keys), tuple(values), following))

    def kind(self, held: object) -> None:
        """Checks that an object has the type that it has now."""
        self.types((held,), (type(held),))

    def types(self, objects: Sequence[Any], kinds: Sequence[type]) -> None:
        """Checks that objects have these types."""
        self._add("TYPES", -1, None, objects, kinds)

    def attributes(self, held: object, found: Mapping[str, Any]) -> None:
        """Checks that attributes of an object are the same objects as in `found`."""
        if not found:
            return
        self._add("ATTRIBUTES", -1, held, [*found], [*found.values()])

    def inside(self, value: object, found: Mapping[str, Any]) -> None:
        """Checks that an object has the same `__dict__`, of the same size, with these items."""
        held: Any = getattr(value, "__dict__", None)
        self._add("DICT", -1, value, values=(held,))
        self.size(held, len(held))
        if found:
            self.some_items(held, found)

    def items(self, held: dict[Any, Any], values: Sequence[Any]) -> None:
        """Checks that a dict has these values under its present keys, and no others."""
        if isinstance(held, OrderedDict) or dict.__len__(held) != len(values):
            raise Inexpressible  # an OrderedDict keeps its order outside of the dict
        self._add("ITEMS", -1, held, [*dict.keys(held)], values)

    def some_items(self, held: dict[str, Any], found: Mapping[str, Any]) -> None:
        """Checks that a dict has these values, among others."""
        if type(held) is not dict or any(type(key) is not str for key in found):
            raise Inexpressible
        known = self._items.setdefault(id(held), (held, {}))[1]
        if any(known.setdefault(name, value) is not value for name, value in found.items()):
            raise Inexpressible

    def kinds(self, held: dict[Any, Any]) -> None:
        """Checks that a dict has its present keys, and values of their types."""
        self._add("KINDS", -1, held, [*held], [*map(type, held.values())])

    def sequence(self, held: list[Any], values: Sequence[Any]) -> None:
        self._add("SEQUENCE", -1, held, values=values)

    def size(self, held: dict[Any, Any], count: int) -> None:
        if self._sizes.setdefault(id(held), (held, count))[1] != count:
            raise Inexpressible

    def calls(self, functions: Sequence[Callable[[], Any]]) -> tuple[Any, ...]:
        """Checks that functions return what they return now; returns the values."""
        values = tuple([function() for function in functions])
        self._add("CALLS", -1, None, functions, values)
        return values

    def each(self, function: Callable[[Any], Any], arrays: Sequence[Any]) -> list[Any]:
        """Checks that a function returns for each array what it returns now; returns the values."""
        values = [*map(function, arrays)]
        self._add_once("ADDRESSES", function, arrays, values)
        return values

    def addresses(self, arrays: Sequence[Any]) -> list[int]:
        """Checks that arrays have their present addresses; returns these."""
        library = self.library
        if library.reader is None:
            return self.each(library.address, arrays)
        values = [*map(library.address, arrays)]
        self._add_once("WORDS", library.reader, arrays, values)
        return values

    def _add_once(
        self, operation: str, held: object, arrays: Sequence[Any], values: Sequence[Any]
    ) -> None:
        """Adds a check of a value of each array; an array that comes twice (a weight of a module
        and of its optimiser) is checked once."""
        found = {id(array): (array, value) for array, value in zip(arrays, values, strict=True)}
        keys, each = [array for array, _ in found.values()], [value for _, value in found.values()]
        self._add(operation, -1, held, keys, each)

    def array(self, array: Any, slot: int = -1) -> None:
        """Checks that an array has the type and the signature that it has now."""
        reads, held = self._array_reads, array if slot < 0 else None
        values = [getattr(array, r) if isinstance(r, str) else r(array) for r in reads]
        if slot < 0:
            self.kind(array)
        else:
            self._add("TYPE", slot, values=(type(array),))
        self._add("READS", slot, held, reads, values)

    # --- the arguments
    def arguments(self, given: Sequence[tuple[str, Any]], subject: Subject) -> None:
        """`given`: the arguments in the order of a call, with the names of their parameters."""
        self._slots = len(given)
        for slot, (name, value) in enumerate(given):
            if name in subject.options.static:
                self._static(slot, value, subject.arguments)
            else:
                self._argument(slot, value)

    def _argument(self, slot: int, value: Any) -> None:
        library = self.library
        if is_plain(value, library.plain):
            if type(value) in _ATOMS or (type(value) is float and value and value == value):
                self._add("EQUAL", slot, values=(value,))
            elif type(value) in (float, complex, slice, tuple, range):
                self._add("TYPE", slot, values=(type(value),))
                self._add("READS", slot, None, (plain_token,), (plain_token(value),))
            else:
                self._add("IS", slot, values=(value,))
            return
        if library.is_array(value):
            self.array(value, slot)
            self._add("LEAF", slot)
            return
        if type(value) not in (tuple, list, dict) or children_of(value, library) is None:
            raise Inexpressible
        children = [*value.values()] if type(value) is dict else [*value]
        first, self._slots = self._slots, self._slots + len(children)
        if self._slots > _extension.MOST_SLOTS:
            raise Inexpressible
        if type(value) is dict:
            self._add("UNPACK_DICT", slot, None, [*value], following=first)
        else:
            self._add("TYPE", slot, values=(type(value),))
            self._add("UNPACK", slot, None, range(len(value)), following=first)
        for place, child in enumerate(children):
            self._argument(first + place, child)

    def _static(self, slot: int, value: Any, arguments: Arguments) -> None:
        """Checks an argument that is not copied: the same object, with arrays of the same
        signatures.

        Arrays inside an object are those of `InsideObject`; containers cannot be checked."""
        library = self.library
        if is_plain(value, library.plain):
            self._argument(slot, value)
            return
        self._add("IS", slot, values=(value,))
        arrays = [value]
        if not library.is_array(value):
            if children_of(value, library) is not None:
                raise Inexpressible
            arrays = []
            self.kind(value)
            inside = arguments.inside(value)
            for held, plain in inside.holders:
                if type(held) is list:
                    self.sequence(held, [*held])
                elif type(held) is dict:
                    self.kinds(held)
                    self.some_items(held, dict(plain))
                elif type(held) is not tuple:
                    raise Inexpressible
            for held, key in inside.places + inside.inner:
                if type(held) is dict:
                    self.some_items(held, {key: held[key]})
            arrays += [held[key] for held, key in inside.places]
            for each in inside.watches:
                if next(iter(each.others()), None) is not None:
                    raise Inexpressible
                _note(each, self, [], arrays)
            guards = arguments.guards_of(value)
            if guards is not None:
                guards.read_given(value, arrays, functools.partial(_Noting, self))
        for array in arrays:
            self.statics.append(array)
            self.array(array)
            self.reads(array, library.offset)
        self.pointers += self.addresses(arrays)

    def reads(self, held: object, function: Callable[[Any], Any]) -> None:
        """Checks that a function returns for an object what it returns now."""
        self._add("READS", -1, held, (function,), (function(held),))

    def made(self, positional: int, names: Sequence[str]) -> Any:
        sizes = dict(self._sizes)
        for key, (held, found) in self._items.items():
            _, size = sizes.pop(key, (held, -1))
            self._add("LOOKUP", -1, held, [*found], [*found.values()], size)
        for size in {size for _, size in sizes.values()}:
            alike = [held for held, count in sizes.values() if count == size]
            self._add("SIZE", -1, None, alike, following=size)
        return _extension.Recheck(positional, tuple(names), self._slots, tuple(self._made))


class _Noting(Reading):
    """A reading that also notes the place of each value; of a plain value the object decides."""

    def __init__(self, checks: Checks, serial: Callable[[object], int]) -> None:
        super().__init__(serial)
        self._checks = checks

    def place(self, place: ReadPlace, value: Any) -> None:
        how, held, name = place.source
        if how == "attribute":
            self._checks.attributes(held, {name: value})
        elif how == "item" and name in held:
            self._checks.some_items(held, {name: value})
        elif how == "item":
            self._checks.calls([place.read])
        elif how == "partial":
            self._checks.attributes(held, {"args": value[0], "keywords": value[1]})

    def function(self, path: Trail, value: types.FunctionType) -> None:
        super().function(path, value)
        names = "__code__", "__defaults__", "__kwdefaults__"
        self._checks.attributes(value, {name: getattr(value, name) for name in names})

    def methods(self, path: Trail, kind: type, found: dict[str, Any]) -> None:
        super().methods(path, kind, found)
        held = [name for name, each in found.items() if isinstance(each, Itself)]
        self._checks.attributes(kind, {name: found[name] for name in found.keys() - {*held}})
        for name in held:
            self._checks.reads(kind, functools.partial(held_by, name))

    def variable(self, path: Trail, value: Any, content: Any) -> None:
        super().variable(path, value, content)
        if isinstance(value, weakref.ref) and content is not None:
            raise Inexpressible  # checks would keep what it points at
        self._checks.reads(value, _Holds(content))

    def watched(self, path: Trail, watch: Watch) -> None:
        _note(watch, self._checks, self.tokens, self.arrays)

    def container(self, path: Trail, value: Any, head: Hashable, children: list[Any]) -> None:
        super().container(path, value, head, children)
        kind, checks = type(value), self._checks
        if kind is list:
            checks.sequence(value, children)
        elif kind is dict:
            checks.items(value, children)
        elif kind is OrderedDict:
            checks.reads(value, SameItems(value))
        elif kind is not tuple and checks.library.parts(value) is not None:
            raise Inexpressible
        elif dataclasses.is_dataclass(value):
            checks.kind(value)
            held = getattr(value, "__dict__", {})
            if held:
                checks.inside(value, held)
            names = [field.name for field in dataclasses.fields(value)]
            named = dict(zip(names, children, strict=True))
            checks.attributes(value, {n: v for n, v in named.items() if n not in held})
        elif not isinstance(value, _IMMUTABLE):
            raise Inexpressible

    def contents(self, path: Trail, value: Any, token: Hashable) -> None:
        super().contents(path, value, token)
        self._checks.reads(value, contents_of)

    def other(self, path: Trail, value: Any, inside: dict[str, Any] | None, inner: bool) -> None:
        super().other(path, value, inside, inner)
        if size_of(value) is not None:
            self._checks.reads(value, size_of)
        self._checks.kind(value)
        if inside is None:
            return
        if isinstance(value, type):
            self._checks.attributes(value, inside)
            return
        held = getattr(value, "__dict__", None)
        if held is not None and inner:
            self._checks.inside(value, {n: v for n, v in inside.items() if n in held})
        elif held is not None:
            self._checks.inside(value, {})
            self._checks.items(held, [*held.values()])
        rest = {n: v for n, v in inside.items() if n not in (held or ())}
        self._checks.attributes(value, rest)

    def items(self, path: Trail, value: Any, head: Hashable, items: list[Any]) -> None:
        super().items(path, value, head, items)
        if isinstance(value, dict) and not isinstance(value, OrderedDict):
            self._checks.items(value, [*dict.values(value)])
        elif isinstance(value, list):
            self._checks.sequence(value, [*list.__iter__(value)])
        else:
            self._checks.reads(value, SameItems(value))


def _note(watch: Watch, checks: Checks, tokens: list[Hashable], arrays: list[Any]) -> None:
    """Notes the places of what a watch reads; appends that to `tokens` and `arrays`."""
    # Read from the type: a graphed module passes attributes that it lacks on to its module.
    note = getattr(type(watch), "note", None)
    if note is None:
        raise Inexpressible
    note(watch, checks, tokens, arrays)


class SameItems:
    """A function that returns True if a container holds the objects that it held at first."""

    def __init__(self, value: Any) -> None:
        self._items = items_in(value) or []

    def __call__(self, value: Any) -> bool:
        return same(items_in(value) or [], self._items)


class _Holds:
    """A function that returns True if a context variable or a weak reference holds `content`."""

    def __init__(self, content: Any) -> None:
        self._content = content

    def __call__(self, value: Any) -> bool:
        return content_of(value) is self._content


MISSED = object()
"""Returned instead of a result for a call that does not match."""
EAGER = object()
"""Returned instead of a result for a call that the caller must run."""
Match: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], list[Any] | None]
"""A function that returns the arrays of a call's arguments if the call matches, else None."""


class Way(Protocol):
    """A whole call by a short way: a replay, in C, or an eager call (`_Eager`)."""

    count: int
    """The number of replays."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        """Returns the result of a replay; MISSED if the call does not match.  Raises as a replay
        does."""
        ...

    def end(self) -> None:
        """Makes each later call return MISSED."""
        ...


def _replay(
    subject: Subject,
    line: Line,
    state: Sequence[Any],
    stream: Stream,
    captured: Captured,
    change: Callable[[GraphExec], object],
    leaves: Sequence[Any],
    made: Sequence[Any],
) -> Any:
    """Replays a chain, or a graph whose arrays are copied outside of it.

    Returns the values that the host has read; MISSED, with all memory as before, if the graph was
    evicted, a value is another one, or the call must go by its key.  `change`: makes the graph copy
    the arrays, if it copies them.  `leaves`: the arrays that are copied in.  `made`: those that
    outputs are copied into."""
    chain, backward = captured.chain, captured.backward
    if backward is not None:
        if backward.pending:
            return MISSED
        backward.begin(leaves, subject.lock, subject.turns.take)
    why: object = "the last one was evicted"
    replay: ChainReplay | None = None
    launched = False
    try:
        if captured.moves is None:
            captured.stage([*leaves, *made])
        if chain is not None:
            replay = chain.start(subject.library, state, stream)
    except (Diverged, NotLaunched):
        return MISSED
    try:
        launched = subject.cache.replay(
            line.name, stream, None if captured.moves is None else change
        )
    except OstinatoError as error:
        if replay is None or isinstance(error, ContextPoisonedError):
            raise
        why = error
    except BaseException:
        if replay is not None:
            replay.put_back()
        raise
    if replay is None:
        return () if launched else MISSED
    if not launched:
        replay.refused(why)
        return MISSED
    try:
        replay.finish()
    except Diverged:
        return MISSED
    return replay.fresh


class _Eager:
    """The way of a key that runs eagerly from now on.

    While nothing else is done with calls of the function (`alone`), most of them are not compared
    after the first, since that takes 30 us in caches that the function has filled.  A call of
    another key then runs eagerly, which is right too, and one of the next ones is compared."""

    def __init__(self, match: Match | None, alone: Callable[[], bool]) -> None:
        self.count, self._ended, self._match, self._alone = 0, False, match, alone

    def end(self) -> None:
        self._ended = True

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        if self._ended:
            return MISSED
        if self._match is not None:
            # In no rhythm: another key may come at each sixteenth call.
            due = self.count < _COMPARED or _chance() < 1 / 16
            if (due or not self._alone()) and self._match(args, kwargs) is None:
                return MISSED
        self.count += 1
        return EAGER


@dataclasses.dataclass(slots=True, eq=False)
class ShortWay:
    """The short way of one key."""

    match: Match | None
    """The comparison of a call; None matches every call."""
    line: Line
    way: Way
    reason: str = ""
    """The reason why its calls run eagerly; empty if they are replays."""
    _counted: int = 0

    def count(self) -> None:
        """Adds the calls since the last `count` to the counts of the key."""
        new, self._counted = self.way.count - self._counted, self.way.count
        counts = self.line.counts
        assert counts is not None
        if self.reason:
            counts.calls += new
            counts.ran_eagerly(0, self.reason, new)
        else:
            counts.replayed(new, 0, 0)
        self.line.unmatched >>= min(new // TIMED, 64)

    def end(self) -> None:
        """Makes each later call miss the short way."""
        self.way.end()
        self.count()


def eager(line: Line, match: Match | None, reason: str, alone: Callable[[], bool]) -> ShortWay:
    """Makes the short way of a key that runs eagerly.  `alone`: a function that returns True while
    no other key is known, and none raises an error."""
    return ShortWay(match, line, _Eager(match, alone), reason)


def checked(
    subject: Subject,
    call: ReadCall,
    attached: Sequence[AttachedGradient],
    seen: tuple[list[Any], list[int], Hashable],
    note: Callable[[Checks], None],
) -> Any:
    """Returns an object whose `match` compares calls with this one, which was just made by its key;
    None if C cannot compare them.

    `attached`: the gradients that the graph sets.  `seen`: the guarded arrays, their addresses, and
    the modes, as in the key.  `note` notes what must be compared besides the key.
    """
    library, options, guards = subject.library, subject.options, subject.guards
    if _extension is None or options.padding:
        return None
    given = [*subject.arguments.named(call.args, call.kwargs)]
    if len(given) > _extension.MOST_SLOTS:
        return None
    checks = Checks(library)
    try:
        checks.calls(library.situation())
        for held, name in library.names():
            checks.some_items(held, {name: held[name]})
        note(checks)
        if library.modes() != seen[2] or library.capturing():
            return None
        checks.arguments(given, subject)
        if not same(checks.statics, call.statics) or checks.pointers != subject.pointers(call):
            return None
        if guards is not None and call.seen is not None:
            noting = _Noting(checks, guards.serial)
            guards.walk(noting)
            if tuple(noting.tokens) != call.seen.tokens or not same(noting.arrays, seen[0]):
                return None
            if checks.addresses(noting.arrays) != seen[1]:
                return None
            live = library.live(attached=False)
            if live is not None:
                checks.each(live, noting.arrays)
        for each in attached:  # the gradients are as a replay leaves them: nothing to set
            if not each.fits:
                return None
            checks.attributes(each.array, {each.name: each.after})
        made = checks.made(len(call.args), [*call.kwargs])
    except Inexpressible:
        return None
    # Also None if an array was given twice: the checks do not compare which arrays are the same.
    leaves = made.match(call.args, call.kwargs)
    return made if leaves is not None and same(leaves, call.leaves) else None


def recheck(
    subject: Subject,
    call: ReadCall,
    line: Line,
    captured: Captured,
    stream: Stream,
    seen: tuple[list[Any], list[int], Hashable],
    note: Callable[[Checks], None],
) -> ShortWay | None:
    """Makes the short way of a key that was just replayed, or returns None.  See `checked`."""
    library = subject.library
    if subject.options.verify != "off" or line.written:
        return None
    if any(index >= len(captured.marks) for index in captured.tree.given):
        return None  # objects among the arguments
    made = checked(subject, call, captured.attached, seen, note)
    if made is None or library.stream() is not stream:
        return None
    # Memory that the function writes: a call with an argument in it goes by its key.
    ranges = [library.storage(call.state[i]) for i in line.state if i < len(call.state)]
    ends = [at for r in dict.fromkeys(ranges) for at in (r.address, r.end)]
    chain, moves = captured.chain, captured.moves
    replay: Callable[..., Any] = subject.cache.replay
    name: str | None = line.name
    if moves is None or (chain is not None and (chain.last.record is not None or chain.inside)):
        replay, name = functools.partial(_replay, subject, line, [*call.state], stream), None
    way = _extension.Way(
        *(made, subject.lock.acquire, subject.lock.release, weakref.ref(captured), subject.turns),
        *(stream, library.maker(), library.address, library.reader, moves and moves.node),
        *(replay, name, MISSED, line.times.append, struct.pack(f"{len(ends)}Q", *ends)),
        moves and moves.further,
    )
    return ShortWay(made.match, line, way)
