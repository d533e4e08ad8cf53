"""`WordIndex`: every word of an executable that may hold an address, by its value.

One index answers three questions: which words a rebinding moves (`plan`), whether a graph uses some
memory, and whether it points at memory that was freed.  It is built for the first question, and
follows every change.

A word is a pointer if a signature declares it, if the launch was given memory there, or if it is an
address field of a node that is no kernel.  Without a signature, an aligned word of 8 bytes may be
one, if its value is in an allocation that the caller names.  The extent of a pointer is that of the
memory given to the launch, or all bytes of a copy or fill; where neither is known, it goes up to
the end of the allocation.  A number mistaken for a pointer costs a capture; a missed pointer gives
a wrong answer.  Not found: memory used by a host function, or behind a pointer in device memory.
"""

from __future__ import annotations

import enum
import itertools
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ostinato.driver.api import (
    AllocNodeParams,
    BatchMemOpNodeParams,
    FreeNodeParams,
    KernelArguments,
    KernelNodeParams,
    MemcpyNodeParams,
    MemOpKind,
    MemoryRange,
    MemsetNodeParams,
    NodeHandle,
    NodeParams,
    ParameterSlot,
)
from ostinato.driver.signature import BYTES, Access, Parameter, Signature
from ostinato.driver.stream import Operation
from ostinato.errors import InputError
from ostinato.graph.frozen import Nodes
from ostinato.graph.node import Node, given_reach
from ostinato.launching import Inside
from ostinato.memory.ranges import range_of

_WORD = 8
_MOST = (1 << 64) - 1
_WHOLE = "owner "

WordPlace: TypeAlias = int | str
"""The place of an address in a node: a byte offset in the parameter buffer, "dst" or "src"; or
`whole_place`."""
Find: TypeAlias = Callable[[int], MemoryRange | None]
"""Returns the live allocation that holds an address, or None."""


def whole_place(index: int) -> WordPlace:
    """Returns the place of the `index`-th object that a node got as a whole, not as one word."""
    return f"{_WHOLE}{index}"


def is_whole(place: WordPlace) -> bool:
    """True if a place is one of `whole_place`."""
    return isinstance(place, str) and place.startswith(_WHOLE)


@dataclass(frozen=True, slots=True)
class Setting:
    """The content of one node in the next launch.

    `reach`: by the offset of a pointer word, the number of bytes known to be used behind it.
    `owners`: for the words set since, the owners of the memory at which they point: None if
    unknown, and a pair (before, after) if a patch was interrupted; a `shadow.Live` node shares this
    dict.
    """

    node: Node
    """The node as it was in the definition."""
    params: NodeParams
    signature: Signature | None
    reach: dict[int, int]
    owners: dict[WordPlace, object] = field(default_factory=dict)

    def shown(self) -> Node:
        """Returns the node with its present content."""
        return replace(self.node, params=self.params, signature=self.signature)


class Sort(enum.IntEnum):
    """The knowledge about a word."""

    POINTER = 0
    """A pointer by its signature."""
    UNKNOWN = 1
    """A word without a signature."""
    SCALAR = 2
    """A number by its signature."""
    FIELD = 3
    """An address of a node that is no kernel."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a node that may hold an address.

    `offset` is in the parameter buffer of a kernel.  `place` is text ("argument 2",
    "argument 0 +16", "dst"), `label` the same with the argument's name.
    """

    offset: int
    label: str
    sort: Sort
    holds: np.dtype[Any] | None = None
    """The type of the memory behind a pointer, by its signature."""
    place: str = ""
    written: bool = True
    """False only if it is known that the node does not write through it."""
    only_written: bool = False
    """True only if it is known that the node writes through it and does not read."""

    @property
    def key(self) -> WordPlace:
        return self.place if self.sort is Sort.FIELD else self.offset


@lru_cache(maxsize=4096)
def words_of(
    signature: Signature | None, layout: tuple[ParameterSlot, ...], nbytes: int
) -> tuple[Word, ...]:
    """Returns the possible places of addresses: equal for all launches of a kernel, so cached."""
    if not layout:
        labels = ((at, f"packed arguments +{at}") for at in range(0, nbytes - _WORD + 1, _WORD))
        return tuple(Word(at, label, Sort.UNKNOWN, place=label) for at, label in labels)
    typed: Sequence[Parameter | None] = [None] * len(layout)
    if signature is not None and signature.layout == layout:
        typed = signature.parameters
    found = []
    for index, (slot, parameter) in enumerate(zip(layout, typed, strict=True)):
        sort, holds, access, name = Sort.UNKNOWN, None, Access.READ | Access.WRITE, ""
        if parameter is not None:
            name = f" ({parameter.name})"
            if parameter.pointer:
                sort, holds = Sort.POINTER, parameter.dtype
                access = parameter.access
            elif parameter.type != "bytes":
                sort = Sort.SCALAR
        holds = None if holds is BYTES else holds
        for at in slot.words:
            inside = "" if at == slot.offset else f" +{at - slot.offset}"
            place = f"argument {index}"
            flags = Access.WRITE in access, access is Access.WRITE
            found.append(Word(at, place + name + inside, sort, holds, place + inside, *flags))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Touch:
    """One pointer of a graph.

    `place` is text for the place in the node: "argument 2", "argument 0 +16", "dst", "operation
    1".  `range` begins at the pointer's address and has as many bytes as may be used; `written` is
    False only if it is known that the node does not write through it.  `handle` and `key` are the
    driver's node and the place for code: a byte offset in the parameter buffer, or the field's
    name.
    """

    node_index: int
    """The index of the graph's own node; for nodes inside another node, of the outermost one."""
    node_name: str
    place: str
    range: MemoryRange
    written: bool
    handle: NodeHandle
    key: WordPlace


def as_word(address: int) -> np.uint64:
    """Clips an address for comparisons: a caller's range may exceed the values of a word."""
    return np.uint64(min(max(address, 0), _MOST))


@dataclass(frozen=True, slots=True)
class IndexedNode:
    """One node of the index."""

    nodes: Nodes
    index: int
    name: str

    @property
    def handle(self) -> NodeHandle:
        return self.nodes.handles[self.index]

    @property
    def operation(self) -> Operation | None:
        return self.nodes.operations([self.index])[0]

    @property
    def named(self) -> tuple[int, str]:
        """The index of the outermost node, and the names from there inwards."""
        outer = self.nodes.outer
        if not outer:
            return self.index, self.name
        return outer[0][0], " / ".join([*(name for _, name in outer), self.name])


class _Kind(NamedTuple):
    """The words and the name of a node: most nodes of one function share both."""

    words: tuple[Word, ...]
    name: str


class _Read(NamedTuple):
    """The words of a node, their values, and their rows of `reach`."""

    words: tuple[Word, ...]
    values: list[int]
    extents: list[int]


class WordIndex:
    """An index as at the top of the file.  Not thread-safe.

    Kernels that did not change are read all at once, without a record for each.
    """

    def __init__(
        self, parts: Iterable[tuple[Nodes, range]], changed: Mapping[NodeHandle, Setting]
    ) -> None:
        """`parts`: all nodes, as ranges of indices; `changed`: the settings of changed nodes."""
        # By identity: nodes of one kernel share both objects, and hashing them takes longer than
        # the use of their places.
        self._known: dict[tuple[int, int, int], tuple[tuple[Word, ...], object]] = {}
        self._parts = list(parts)
        self._firsts: list[int] = []
        """The entry at which each part begins."""
        self._kinds: list[_Kind] = []
        numbers: dict[object, int] = {}
        kinds: list[int] = []
        alone: dict[int, _Read] = {}
        owners: list[tuple[object, ...]] = []
        for nodes, indices in self._parts:
            self._firsts.append(len(kinds))
            handles, keys = nodes.handles, nodes.frozen.kernels.keys[indices.start : indices.stop]
            for index, key, made in zip(indices, keys, nodes.operations(indices), strict=True):
                if key is None or handles[index] in changed:
                    read = alone[len(kinds)] = self._alone(nodes, index, changed)
                    owners.append(())
                    kinds.append(len(self._kinds))
                    self._kinds.append(_Kind(read.words, nodes.name(index)))
                    continue
                signature = None if made is None else made.signature
                number = numbers.get((id(signature), key))
                if number is None:
                    number = numbers[id(signature), key] = len(self._kinds)
                    words = self._words_of(signature, nodes.frozen.kernel(index)[1])
                    self._kinds.append(_Kind(words, nodes.name(index)))
                owners.append(() if made is None else made.keep)
                kinds.append(number)
        self._kind_of = np.array(kinds, np.intp)
        self._by_handle: dict[NodeHandle, int] = {}
        """The entries, once a node is read again."""
        content = _Content(self._parts, owners)
        at = self._lay_out(content, alone)
        split = content.entries_with_more(at)
        for entry in split:
            alone[entry] = read = self._split(*self._where(entry))
            self._kind_of[entry] = len(self._kinds)
            self._kinds.append(_Kind(read.words, self._kinds[kinds[entry]].name))
        if split:
            at = self._lay_out(content, alone)
        self.addresses, self.reach = content.words[at], content.reach[at]
        """`reach`: the number of bytes used.  If unknown, `-1 - n`: n bytes were there up to the
        end of the allocation when the definition was read (`_stored`)."""
        open_ended = np.flatnonzero((self.sorts == Sort.POINTER) & (self.reach < 0))
        for row, address in zip(open_ended, self.addresses[open_ended].tolist(), strict=True):
            self.reach[row] = -1 - _left_of(self._parts[0][0].find, address)
        for entry, read in alone.items():
            rows = self._rows(entry)
            self.addresses[rows], self.reach[rows] = read.values, read.extents

    def _lay_out(self, content: _Content, alone: Collection[int]) -> npt.NDArray[np.intp]:
        """Makes the rows of all words.  Returns the place of each in the content."""
        self._every = [word for kind in self._kinds for word in kind.words]
        counts = np.array([len(kind.words) for kind in self._kinds], np.intp)
        each = counts[self._kind_of]
        self._starts = np.cumsum(each) - each
        self.owners = np.repeat(np.arange(len(each)), each)
        """The entry of each row."""
        first = (np.cumsum(counts) - counts)[self._kind_of]
        self._word_of = np.arange(len(self.owners)) + (first - self._starts)[self.owners]
        self.sorts = np.array([word.sort for word in self._every], np.uint8)[self._word_of]
        self.places = np.array([word.offset for word in self._every], np.uint32)[self._word_of]
        at = content.starts[self.owners] + self.places.astype(np.intp) // _WORD
        apart = np.zeros(len(each), np.bool_)
        apart[list(alone)] = True
        at[apart[self.owners]] = len(content.words) - 1  # their values are set afterwards
        return at

    def _words_of(
        self, signature: Signature | None, arguments: KernelArguments
    ) -> tuple[Word, ...]:
        layout, nbytes = arguments.layout, len(arguments.data)
        key = id(signature), id(layout), nbytes
        known = self._known.get(key)
        if known is None:
            words = words_of(signature, layout, nbytes)
            known = self._known[key] = words, (signature, layout)
        return known[0]

    def _alone(self, nodes: Nodes, index: int, changed: Mapping[NodeHandle, Setting]) -> _Read:
        """Reads a node that changed, or is no kernel."""
        setting = changed.get(nodes.handles[index])
        params = nodes.frozen.params(index) if setting is None else setting.params
        if not isinstance(params, KernelNodeParams):
            return _fields(params)
        return self._changed(setting or first_setting(nodes.read(index)))

    def _changed(self, setting: Setting) -> _Read:
        params = setting.params
        if not isinstance(params, KernelNodeParams):
            return _fields(params)
        stored = partial(_stored, setting)
        return self._kernel(setting.signature, params.arguments, setting.reach, stored)

    def _split(self, nodes: Nodes, index: int) -> _Read:
        """Reads a kernel that was given memory at a word that is in no single argument."""
        (made,), (_, arguments) = nodes.operations([index]), nodes.frozen.kernel(index)
        assert made is not None, "it was given memory"
        reach = given_reach(arguments.data, made.keep)
        find = nodes.find
        return self._kernel(
            made.signature, arguments, reach, lambda _, address: _left_of(find, address)
        )

    def _kernel(
        self,
        signature: Signature | None,
        arguments: KernelArguments,
        reach: dict[int, int],
        stored: Callable[[int, int], int],
    ) -> _Read:
        words, data = self._words_of(signature, arguments), arguments.data
        every = struct.unpack_from(f"<{len(data) // _WORD}Q", data)
        values = [every[word.offset // _WORD] for word in words]
        extents = [reach.get(word.offset, -1) for word in words]
        if -1 in extents:
            for at, word in enumerate(words):
                if extents[at] == -1 and word.sort is Sort.POINTER:
                    extents[at] = -1 - stored(word.offset, values[at])
        if len(reach) > len(words) - extents.count(-1):
            # Words across two arguments: an address in two halves, say.
            return _with_split(arguments.layout, _Read(words, values, extents), every, reach)
        return _Read(words, values, extents)

    def refresh(self, settings: Iterable[Setting]) -> bool:
        """Reads changed nodes again.  Returns False if the index must be built anew."""
        if not self._by_handle:
            every = (nodes.handles[i] for nodes, indices in self._parts for i in indices)
            self._by_handle = {handle: entry for entry, handle in enumerate(every)}
        for setting in settings:
            read = self._changed(setting)
            entry = self._by_handle.get(setting.node.handle)
            if entry is None:
                return False
            before = self._kinds[self._kind_of[entry]].words
            if not (read.words is before or read.words == before):
                return False
            rows = self._rows(entry)
            self.addresses[rows], self.reach[rows] = read.values, read.extents
        return True

    def _rows(self, entry: int) -> slice:
        start = int(self._starts[entry])
        return slice(start, start + len(self._kinds[self._kind_of[entry]].words))

    def _where(self, entry: int) -> tuple[Nodes, int]:
        place = bisect_right(self._firsts, entry) - 1
        nodes, indices = self._parts[place]
        return nodes, indices[entry - self._firsts[place]]

    def node(self, entry: int) -> IndexedNode:
        """Returns the node of an entry."""
        return IndexedNode(*self._where(entry), self._kinds[self._kind_of[entry]].name)

    def count_outermost(self, entries: npt.NDArray[np.intp]) -> int:
        """Returns the number of the graph's own nodes that these are, or that they are inside."""
        outermost = [
            np.full(len(indices), nodes.outer[0][0]) if nodes.outer else np.array(indices, np.intp)
            for nodes, indices in self._parts
        ]
        return int(np.count_nonzero(np.bincount(np.concatenate(outermost)[entries])))

    def kernels(self, entries: Sequence[int]) -> Iterator[tuple[Nodes, list[int]]]:
        """Yields the nodes of entries in ascending order, by their graphs."""
        for first, (nodes, indices) in zip(self._firsts, self._parts, strict=True):
            low, high = (bisect_left(entries, first + n) for n in (0, len(indices)))
            if low < high:
                yield nodes, [indices.start + entry - first for entry in entries[low:high]]

    def move(self, rows: npt.NDArray[np.intp], values: npt.NDArray[np.uint64]) -> None:
        """Notes that words have other values, with the extents as before."""
        self.addresses[rows] = values
        self.reach[rows[self.reach[rows] < 0]] = -1

    def at(self, row: int) -> tuple[IndexedNode, Word]:
        """Returns the node and the word of a row."""
        return self.node(int(self.owners[row])), self._every[self._word_of[row]]

    def other_type(self, rows: npt.NDArray[np.intp], holds: np.dtype[Any]) -> npt.NDArray[np.bool_]:
        """Returns a mask of the words that must point at another type than `holds`."""
        other = [word.holds is not None and word.holds != holds for word in self._every]
        return np.array(other, np.bool_)[self._word_of[rows]]

    # --- used memory
    def manifest(self, find: Find) -> Iterator[Touch]:
        """Yields every pointer, in the order of the nodes."""
        touches = (self._touch(row, find) for row in range(len(self.owners)))
        return (touch for touch in touches if touch is not None)

    def touches(self, target: MemoryRange, allocation: MemoryRange | None) -> bool:
        """True if any pointer is used inside `target`.

        `allocation` is the live allocation around the target, or None: a pointer in front of the
        target whose extent is unknown may reach the target.
        """
        if not target.nbytes:
            return False
        start = target.address if allocation is None else min(allocation.address, target.address)
        return bool(self._using(target, start).size)

    def dangling(
        self,
        closed: MemoryRange,
        owners_of: Callable[[NodeHandle], Mapping[WordPlace, object]],
        apart: Sequence[tuple[NodeHandle, range]] = (),
    ) -> Touch | None:
        """Returns a pointer into memory that was freed, or None.

        A word whose owner is open does not count: it may be another buffer at the same address.
        Nor do the words `apart`: at these offsets in the arguments of these nodes.
        """
        for row in self._using(closed, closed.address).tolist():
            entry, word = self.at(row)
            if any(entry.handle == node and word.key in places for node, places in apart):
                continue
            address, operation = int(self.addresses[row]), entry.operation
            keep = () if operation is None else operation.keep
            if not _has_open_owner(owners_of(entry.handle), keep, word.key, address):
                return self._touch(row, lambda at: closed if closed.holds(at) else None)
        return None

    def _using(self, memory: MemoryRange, start: int) -> npt.NDArray[np.intp]:
        """Returns the words that are used inside of memory; words of unknown extent count if they
        point between `start` and its end."""
        low, high, addresses = as_word(memory.address), as_word(memory.end), self.addresses
        known = self.reach >= 0
        ends = addresses + np.where(known, self.reach, -1 - self.reach).astype(np.uint64)
        reaching = (ends > low) & (known | (self.sorts == Sort.POINTER))
        loose = ~known & (self.sorts <= Sort.UNKNOWN) & (addresses >= as_word(start))
        return np.flatnonzero((reaching | loose) & (addresses < high) & (addresses != 0))

    def _touch(self, row: int, find: Find) -> Touch | None:
        entry, word = self.at(row)
        address, nbytes = int(self.addresses[row]), int(self.reach[row])
        if not address:  # the side of a copy that is an array, or memory without an address yet
            return None
        if nbytes < 0:
            memory = None if word.sort is Sort.SCALAR else find(address)
            if memory is not None:
                nbytes = memory.end - address
            elif word.sort is Sort.POINTER:
                nbytes = -1 - nbytes or 1
            else:
                return None
        index, name, place = entry.index, entry.name, word.place
        if entry.nodes.outer:
            (index, outermost), *between = entry.nodes.outer
            place = " ".join([*(outer for _, outer in between), name, place])
            name = outermost
        memory = MemoryRange(address, nbytes)
        return Touch(index, name, place, memory, word.written, entry.handle, word.key)


class _Content:
    """The argument bytes of all kernels of an index, as words.

    `words` ends with a zero; `starts` is the place of each entry's first word; `reach` has for each
    word the number of bytes that the launch was given there, or -1.
    """

    def __init__(
        self, parts: Sequence[tuple[Nodes, range]], owners: Sequence[tuple[object, ...]]
    ) -> None:
        """`owners`: the objects that the launch of each entry got."""
        blocks, starts, sizes, total = [], [], [], 0
        for nodes, indices in parts:
            columns = nodes.frozen.kernels
            begins = columns.starts[indices.start : indices.stop].astype(np.intp) // _WORD
            words = np.frombuffer(columns.data, np.uint64)
            if len(begins):
                stop = indices.stop
                end = (
                    int(columns.starts[stop]) // _WORD if stop < len(nodes.handles) else len(words)
                )
                blocks.append(words[begins[0] : end])
                starts.append(begins - begins[0] + total)
                sizes.append(columns.sizes[indices.start : stop].astype(np.intp))
                total += len(blocks[-1])
        nothing = np.zeros(0, np.intp)
        self.words = np.concatenate([*blocks, np.zeros(1, np.uint64)])
        self.starts = np.concatenate([nothing, *starts])
        self.reach = np.full(len(self.words), -1, np.int64)
        counts = np.diff(self.starts, append=total)
        self._entries = np.repeat(np.arange(len(counts)), counts)
        if any(owners):
            whole = np.concatenate([nothing, *sizes]) // _WORD  # a last word may be a part of one
            self._find_given(owners, self.starts + whole)

    def _find_given(self, owners: Sequence[tuple[object, ...]], ends: npt.NDArray[np.intp]) -> None:
        """Does the work of `given_reach` for all entries, whose words end at `ends`."""
        flat = list(itertools.chain.from_iterable(owners))
        ids = np.fromiter(map(id, flat), np.intp, len(flat))
        each = dict(zip(map(id, flat), flat, strict=True))
        # Most are buffers: a call of `range_of` for each would be felt.
        ranges: dict[int, Any] = {n: getattr(owner, "range", None) for n, owner in each.items()}
        for number in [n for n, memory in ranges.items() if type(memory) is not MemoryRange]:
            memory = None
            with suppress(InputError):  # the kernel itself, or an object without memory
                memory = ranges[number] = range_of(each[number])
            if memory is None or not 0 <= memory.address <= _MOST:
                del ranges[number]
        if not ranges:
            return
        numbers = np.fromiter(ranges, np.intp, len(ranges))
        order = np.argsort(numbers)
        numbers, memories = numbers[order], ranges.values()
        starts = np.array([memory.address for memory in memories], np.uint64)[order]
        sizes = np.array([memory.nbytes for memory in memories], np.int64)[order]
        which = np.minimum(np.searchsorted(numbers, ids), len(numbers) - 1)
        has = numbers[which] == ids
        which, of = which[has], np.repeat(np.arange(len(owners)), list(map(len, owners)))[has]
        # Pairs of an entry and an address as one number: given ones, and those of all words.
        addresses = np.sort(starts)
        addresses = addresses[np.append(True, addresses[1:] != addresses[:-1])]
        count = len(addresses)
        given = of * count + np.searchsorted(addresses, starts)[which]
        order = np.lexsort((sizes[which], given))
        given, nbytes = given[order], sizes[which][order]
        words = self.words[:-1]
        place = np.minimum(np.searchsorted(addresses, words), count - 1)
        inside = np.arange(len(words)) < ends[self._entries]
        hit = np.flatnonzero((addresses[place] == words) & inside)
        pair = self._entries[hit] * count + place[hit]
        last = np.searchsorted(given, pair, "right") - 1  # the largest of equal ones
        same = (last >= 0) & (given[last] == pair)
        self.reach[hit[same]] = nbytes[last[same]]

    def entries_with_more(self, at: npt.NDArray[np.intp]) -> list[int]:
        """Returns entries that were given memory at other words than those at these places."""
        more = self.reach >= 0
        more[at] = False
        found: list[int] = np.unique(self._entries[np.flatnonzero(more)]).tolist()
        return found


def _fields(params: NodeParams) -> _Read:
    """Reads a node that is no kernel."""
    fields = address_fields(params)
    words = tuple(Word(0, f.place, Sort.FIELD, place=f.place, written=f.written) for f in fields)
    return _Read(words, [f.address for f in fields], [f.nbytes for f in fields])


def _with_split(
    layout: tuple[ParameterSlot, ...], read: _Read, every: Sequence[int], reach: dict[int, int]
) -> _Read:
    """Adds the words at which the launch was given memory, and that are in no single argument."""
    rows = list(zip(*read, strict=True))
    there = {word.offset for word in read.words}
    for at in set(reach) - there:
        index = next(i for i, slot in enumerate(layout) if at < slot.offset + slot.size)
        inside = at - layout[index].offset
        place = f"argument {index}" + (f" +{inside}" if inside else "")
        rows.append((Word(at, place, Sort.SCALAR, place=place), every[at // _WORD], reach[at]))
    rows.sort(key=lambda row: row[0].offset)
    words, values, extents = zip(*rows, strict=True)
    return _Read(words, list(values), list(extents))


def first_setting(node: Node) -> Setting:
    """Returns the setting of a node that did not change."""
    reach: dict[int, int] = {}
    if isinstance(node.params, KernelNodeParams):
        reach = given_reach(node.params.arguments.data, node.keep)
    return Setting(node, node.params, node.signature, reach)


def _left_of(find: Find, address: int) -> int:
    """Returns the number of bytes up to the end of the allocation behind an address, or 0."""
    memory = find(address) if address else None
    return 0 if memory is None else memory.end - address


def _stored(setting: Setting, offset: int, address: int) -> int:
    """Returns the number of bytes up to the end of the allocation behind a word when the definition
    was read; 0 if the word has changed since."""
    for argument in setting.node.arguments:
        for pointer in argument.pointers:
            if (pointer.offset, pointer.address) == (offset, address) and pointer.allocation:
                return pointer.allocation.end - address
    return 0


def _has_open_owner(
    owners: Mapping[WordPlace, object], keep: Iterable[object], key: WordPlace, address: int
) -> bool:
    own = owners.get(key)
    if own is not None and not isinstance(own, tuple):
        return not _is_closed(own)
    # Not the owners of other words: one may be new memory at the address of the closed one.
    whole = [owner for place, owner in owners.items() if is_whole(place)]
    for owner in own or (*whole, *keep):
        if isinstance(owner, Inside):
            owner = owner.storage
        try:
            holds = range_of(owner).holds(address)
        except InputError:  # the kernel itself, or an object without memory
            continue
        if holds and not _is_closed(owner):
            return True
    return False


def _is_closed(owner: object) -> bool:
    return getattr(owner, "closed", False) is True


def copy_extent(params: MemcpyNodeParams, pitch: int, height: int) -> int:
    """Returns the number of bytes from the first to the last that a copy accesses on one side."""
    row = pitch or params.width
    rows = (params.depth - 1) * (height or params.height) + params.height
    return (rows - 1) * row + params.width


def fill_extent(params: MemsetNodeParams) -> int:
    """Returns the number of bytes from the first to the last that a fill writes."""
    return (params.height - 1) * params.pitch + params.width * params.element_size


class AddressField(NamedTuple):
    """An address field of a node that is no kernel: its place, the address, the number of bytes
    used there, and whether they are written."""

    place: str
    address: int
    nbytes: int
    written: bool


def address_fields(params: NodeParams) -> list[AddressField]:
    """Returns the fields that hold addresses, of a node that is no kernel."""
    match params:
        case MemcpyNodeParams():
            to = copy_extent(params, params.dst_pitch, params.dst_height)
            come = copy_extent(params, params.src_pitch, params.src_height)
            return [
                AddressField("dst", params.dst, to, True),
                AddressField("src", params.src, come, False),
            ]
        case MemsetNodeParams():
            return [AddressField("dst", params.dst, fill_extent(params), True)]
        case BatchMemOpNodeParams():
            return [
                AddressField(f"operation {i}", op.address, op.size, op.kind is MemOpKind.WRITE)
                for i, op in enumerate(params.operations)
            ]
        case AllocNodeParams():
            return [AddressField("allocation", params.address, params.nbytes, True)]
        case FreeNodeParams():
            return [AddressField("freed", params.address, 1, True)]
    return []
