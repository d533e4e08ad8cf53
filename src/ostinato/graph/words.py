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
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ostinato.driver.api import (
    AllocNodeParams,
    BatchMemOpNodeParams,
    FreeNodeParams,
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
from ostinato.errors import InputError
from ostinato.graph.launching import Inside
from ostinato.graph.node import Node
from ostinato.memory.ranges import range_of

_WORD = 8
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
    return np.uint64(min(max(address, 0), (1 << 64) - 1))


class IndexedNode(NamedTuple):
    """One node of the index: its words are the rows from `start` on."""

    outer: tuple[Node, ...]
    """The child graph or conditional nodes around it, outermost first."""
    node: Node
    start: int
    words: tuple[Word, ...]

    @property
    def named(self) -> tuple[int, str]:
        """The index of the outermost node, and the names from there inwards."""
        if not self.outer:
            return self.node.index, self.node.name
        return self.outer[0].index, " / ".join(n.name for n in (*self.outer, self.node))


class WordIndex:
    """An index as at the top of the file.  Not thread-safe."""

    def __init__(self, settings: Iterable[tuple[tuple[Node, ...], Setting]]) -> None:
        """`settings`: those of every node, with the nodes around it, outermost first."""
        # By identity: nodes of one kernel share both objects, and hashing them takes longer than
        # the use of their places.
        self._known: dict[tuple[int, int, int], tuple[tuple[Word, ...], object]] = {}
        self.entries: list[IndexedNode] = []
        addresses: list[int] = []
        reach: list[int] = []
        owners: list[int] = []
        for outer, setting in settings:
            words, values, extents = self._read(setting)
            owners += [len(self.entries)] * len(words)
            self.entries.append(IndexedNode(outer, setting.node, len(addresses), words))
            addresses += values
            reach += extents
        every = [word for entry in self.entries for word in entry.words]
        self._by_handle = {entry.node.handle: entry for entry in self.entries}
        self.addresses = np.array(addresses, np.uint64)
        self.reach = np.array(reach, np.int64)
        """The number of bytes used.  If unknown, `-1 - n`: n bytes were there up to the end of the
        allocation when the definition was read (`_stored`)."""
        self.sorts = np.array([word.sort for word in every], np.uint8)
        self.places = np.array([word.offset for word in every], np.uint32)
        self.owners = np.array(owners, np.intp)
        """The entry of each row."""
        self._every = every
        self._types: tuple[npt.NDArray[np.intp], dict[np.dtype[Any], int]] | None = None

    def _read(self, setting: Setting) -> tuple[tuple[Word, ...], list[int], list[int]]:
        """Returns a node's words, their values, and their rows of `reach`."""
        params = setting.params
        if not isinstance(params, KernelNodeParams):
            fields = address_fields(params)
            words = tuple(
                Word(0, f.place, Sort.FIELD, place=f.place, written=f.written) for f in fields
            )
            return words, [f.address for f in fields], [f.nbytes for f in fields]
        data, layout, reach = params.arguments.data, params.arguments.layout, setting.reach
        key = id(setting.signature), id(layout), len(data)
        known = self._known.get(key)
        if known is None:
            words = words_of(setting.signature, layout, len(data))
            known = self._known[key] = words, (setting.signature, layout)
        words = known[0]
        every = struct.unpack_from(f"<{len(data) // _WORD}Q", data)
        values = [every[word.offset // _WORD] for word in words]
        extents = [reach.get(word.offset, -1) for word in words]
        if -1 in extents:
            for at, word in enumerate(words):
                if extents[at] == -1 and word.sort is Sort.POINTER:
                    extents[at] = -1 - _stored(setting, word.offset, values[at])
        if len(reach) > len(words) - extents.count(-1):
            # Words across two arguments: an address in two halves, say.
            words, values, extents = _with_split(layout, words, values, extents, every, reach)
        return words, values, extents

    def refresh(self, settings: Iterable[Setting]) -> bool:
        """Reads changed nodes again.  Returns False if the index must be built anew."""
        for setting in settings:
            entry = self._by_handle.get(setting.node.handle)
            words, values, extents = self._read(setting)
            if entry is None or not (words is entry.words or words == entry.words):
                return False
            rows = slice(entry.start, entry.start + len(words))
            self.addresses[rows], self.reach[rows] = values, extents
        return True

    def move(self, rows: npt.NDArray[np.intp], values: npt.NDArray[np.uint64]) -> None:
        """Notes that words have other values, with the extents as before."""
        self.addresses[rows] = values
        self.reach[rows[self.reach[rows] < 0]] = -1

    def at(self, row: int) -> tuple[IndexedNode, Word]:
        """Returns the node and the word of a row."""
        return self.entries[int(self.owners[row])], self._every[row]

    def other_type(self, rows: npt.NDArray[np.intp], holds: np.dtype[Any]) -> npt.NDArray[np.bool_]:
        """Returns a mask of the words that must point at another type than `holds`."""
        if self._types is None:
            numbers: dict[np.dtype[Any], int] = {}
            each = [
                -1 if word.holds is None else numbers.setdefault(word.holds, len(numbers))
                for word in self._every
            ]
            self._types = np.array(each, np.intp), numbers
        types, wanted = self._types[0][rows], self._types[1].get(holds, -2)
        other: npt.NDArray[np.bool_] = (types >= 0) & (types != wanted)
        return other

    # --- used memory
    def manifest(self, find: Find) -> Iterator[Touch]:
        """Yields every pointer, in the order of the nodes."""
        touches = (self._touch(row, find) for row in range(len(self._every)))
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
        setting_of: Callable[[Node], Setting],
        apart: Sequence[tuple[NodeHandle, range]] = (),
    ) -> Touch | None:
        """Returns a pointer into memory that was freed, or None.

        A word whose owner is open does not count: it may be another buffer at the same address.
        Nor do the words `apart`: at these offsets in the arguments of these nodes.
        """
        for row in self._using(closed, closed.address).tolist():
            entry, word = self.at(row)
            if any(entry.node.handle == node and word.key in places for node, places in apart):
                continue
            address = int(self.addresses[row])
            if not _has_open_owner(setting_of(entry.node), word.key, address):
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
        index, name, place = entry.node.index, entry.node.name, word.place
        if entry.outer:
            place = " ".join([*(n.name for n in entry.outer[1:]), name, place])
            index, name = entry.outer[0].index, entry.outer[0].name
        memory = MemoryRange(address, nbytes)
        return Touch(index, name, place, memory, word.written, entry.node.handle, word.key)


def _with_split(
    layout: tuple[ParameterSlot, ...],
    words: tuple[Word, ...],
    values: list[int],
    extents: list[int],
    every: Sequence[int],
    reach: dict[int, int],
) -> tuple[tuple[Word, ...], list[int], list[int]]:
    """Adds the words at which the launch was given memory, and that are in no single argument."""
    rows = list(zip(words, values, extents, strict=True))
    there = {word.offset for word in words}
    for at in set(reach) - there:
        index = next(i for i, slot in enumerate(layout) if at < slot.offset + slot.size)
        inside = at - layout[index].offset
        place = f"argument {index}" + (f" +{inside}" if inside else "")
        rows.append((Word(at, place, Sort.SCALAR, place=place), every[at // _WORD], reach[at]))
    rows.sort(key=lambda row: row[0].offset)
    made = tuple(row[0] for row in rows)
    return made, [row[1] for row in rows], [row[2] for row in rows]


def _stored(setting: Setting, offset: int, address: int) -> int:
    """Returns the number of bytes up to the end of the allocation behind a word when the definition
    was read; 0 if the word has changed since."""
    for argument in setting.node.arguments:
        for pointer in argument.pointers:
            if (pointer.offset, pointer.address) == (offset, address) and pointer.allocation:
                return pointer.allocation.end - address
    return 0


def _has_open_owner(setting: Setting, key: WordPlace, address: int) -> bool:
    own = setting.owners.get(key)
    if own is not None and not isinstance(own, tuple):
        return not _is_closed(own)
    # Not the owners of other words: one may be new memory at the address of the closed one.
    whole = [owner for place, owner in setting.owners.items() if is_whole(place)]
    for owner in own or (*whole, *setting.node.keep):
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
