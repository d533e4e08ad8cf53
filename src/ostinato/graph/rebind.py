"""Rebinding: which words of a graph point into a buffer, and what they become.

Pure: from what nodes hold and targets to the changes and a report; `GraphExec.rebind` makes them.

A word counts as a pointer if a signature says so; without a signature, if it is an aligned 8-byte
word and the driver confirms that its value lies in a live allocation.  A word that a signature
declares as a scalar is never changed, even if it looks like an address.

A word moves only if what is used from where it points fits into the new range: as many bytes as the
launch was given there, or, where that is not known, up to the end of the old range.
"""

from __future__ import annotations

import enum
import itertools
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

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
    NodeParams,
    ParameterSlot,
)
from ostinato.driver.signature import BYTES, Parameter, Signature, Space, held_by
from ostinato.errors import ClosedError, InputError
from ostinato.graph.changes import Change, Place, Setting
from ostinato.graph.node import Node
from ostinato.memory.ranges import Target, range_of

__all__ = [
    "AddressField",
    "LeftWord",
    "Move",
    "RebindReport",
    "Rebinding",
    "ReboundWord",
    "Sort",
    "Word",
    "address_fields",
    "copy_extent",
    "moves_of",
    "named",
    "plan_rebind",
    "words_of",
]

_WORD = 8


@dataclass(frozen=True, slots=True)
class ReboundWord:
    """One word that was changed.

    `node_index` is of the graph's own node; for a node inside a child graph or a body, of the one
    around it, and `node_name` is the path inwards.  `place` says where: "argument 2 (x)",
    "argument 0 +16", "dst", "src".  `confirmed_by` is "signature", "allocation" or "field".
    """

    node_index: int
    node_name: str
    place: str
    old: int
    new: int
    confirmed_by: str


@dataclass(frozen=True, slots=True)
class LeftWord:
    """A word that looks like an address in the old range and was left, and why."""

    node_index: int
    node_name: str
    place: str
    value: int
    why: str


class RebindReport:
    """Every word that `rebind` changed (`words`), and every one that it left (`left`)."""

    __slots__ = ("_later", "_nodes", "_words", "left")

    def __init__(
        self,
        words: tuple[ReboundWord, ...] | Callable[[], tuple[ReboundWord, ...]],
        left: tuple[LeftWord, ...] = (),
        *,
        nodes: int,
    ) -> None:
        """`words` may be a function, which is called when they are first asked for."""
        self._words = words if isinstance(words, tuple) else None
        self._later = None if isinstance(words, tuple) else words
        self._nodes = nodes
        self.left = left

    @property
    def words(self) -> tuple[ReboundWord, ...]:
        if self._words is None:
            assert self._later is not None
            self._words, self._later = self._later(), None
        return self._words

    @property
    def nodes(self) -> int:
        """How many of the graph's own nodes were changed, or hold one that was."""
        return self._nodes

    def __repr__(self) -> str:
        return f"<RebindReport: {str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        from ostinato.graph.show.outline import count_text

        pointers, nodes = count_text(len(self.words), "pointer"), count_text(self.nodes, "node")
        lines = [f"{pointers} of {nodes} rebound"]
        if self.left:
            lines[0] += f", {count_text(len(self.left), 'word')} left as they were:"
        for left in self.left:
            place = f"node {left.node_index} ({left.node_name}), {left.place}"
            lines.append(f"  {place}: {left.value:#x}: {left.why}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Rebinding:
    """A plan: the changes to make, and the report of them."""

    changes: list[Change]
    report: RebindReport


@dataclass(frozen=True, slots=True)
class Move:
    """Pointers into `old` are to point into `new`, memory of `target`.

    `holds`: what the new memory holds, where the old did not say the same; each pointer must be of
    that type.
    """

    old: MemoryRange
    new: MemoryRange
    target: Target
    holds: np.dtype[Any] | None = None


class Sort(enum.Enum):
    """What is known of a word."""

    POINTER = "its signature says so"
    SCALAR = "its signature says that it is a number"
    UNKNOWN = "nothing says what it is"


@dataclass(frozen=True, slots=True)
class Word:
    """An aligned word of a parameter buffer that may hold an address."""

    offset: int
    label: str
    sort: Sort
    holds: np.dtype[Any] | None = None
    """What a pointer's signature says that it points at."""


@lru_cache(maxsize=4096)
def words_of(
    signature: Signature | None, layout: tuple[ParameterSlot, ...], nbytes: int
) -> tuple[Word, ...]:
    """Where addresses may be: the same for every launch of a kernel, so worked out once."""
    if not layout:
        return tuple(
            Word(at, f"packed arguments +{at}", Sort.UNKNOWN)
            for at in range(0, nbytes - _WORD + 1, _WORD)
        )
    typed: Sequence[Parameter | None] = [None] * len(layout)
    if signature is not None and signature.layout == layout:
        typed = signature.parameters
    found = []
    for index, (slot, parameter) in enumerate(zip(layout, typed, strict=True)):
        sort = Sort.UNKNOWN
        if parameter is not None and (parameter.type != "bytes" or parameter.pointer):
            sort = Sort.POINTER if parameter.pointer else Sort.SCALAR
        holds = parameter.dtype if parameter is not None and sort is Sort.POINTER else None
        holds = None if holds is BYTES else holds
        label = f"argument {index}" + (f" ({parameter.name})" if parameter else "")
        for at in slot.words:
            inside = "" if at == slot.offset else f" +{at - slot.offset}"
            found.append(Word(at, label + inside, sort, holds))
    return tuple(found)


def plan_rebind(
    settings: Iterable[tuple[tuple[Node, ...], Setting]],
    moves: Sequence[Move],
    find: Callable[[int], MemoryRange | None],
) -> Rebinding:
    """Works out a rebinding of what nodes hold (`Shadow.settings`).

    Raises InputError for ranges that do not fit, and for copies that would overlap.
    """
    plan = _Plan(moves, find)
    for outer, setting in settings:
        plan.visit(outer, setting)
    nodes = len({word.node_index for word in plan.words})
    report = RebindReport(tuple(plan.words), tuple(plan.left), nodes=nodes)
    return Rebinding(plan.changes, report)


def moves_of(
    targets: Sequence[tuple[Target, Target]],
    owner_of: Callable[[int], object | None],
    space: Space,
) -> list[Move]:
    """The moves between the targets' ranges, in the order of the old addresses.

    `owner_of` gives what holds the memory at an address, which a MemoryRange does not.  Raises
    InputError for what is no pair, for a new target that holds another type than the old one or is
    of another device, and for old ranges that overlap; ClosedError for a new target that is closed.
    """
    for pair in targets:  # a buffer of two rows would be taken for a pair of its rows
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(
                f"rebind: {{old: new}} or (old, new) pairs are needed, not {type(pair).__name__} "
                f"({pair!r})"
            )
    moves = []
    for old, new in targets:
        memory, to = range_of(old, "old target"), range_of(new, "new target")
        owner = owner_of(to.address) if isinstance(new, MemoryRange) else None
        target = new if owner is None else owner
        if getattr(target, "closed", False):
            raise ClosedError("a new target is closed; nothing was changed")
        space.require(new, f"the new target {new!r}", "the executable is of")
        was, holds = held_by(old), held_by(new)
        if was is not None and holds is not None and was != holds:
            raise InputError(
                f"rebind: the old target holds {was.name} and the new one {holds.name}, which "
                "kernels would read as other values; nothing was changed. Give memory of that "
                f'type, or say that its bytes are meant (buffer.view(dtype="{was.name}"))'
            )
        moves.append(Move(memory, to, target, holds if was is None else None))
    ordered = sorted(moves, key=lambda m: m.old.address)
    for left, right in itertools.pairwise(ordered):
        if left.old.end > right.old.address:
            raise InputError("two of the ranges to rebind from overlap; rebind one at a time")
    return ordered


def named(outer: tuple[Node, ...], node: Node) -> tuple[int, str]:
    """The index of the outermost node, and the names from there inwards."""
    if not outer:
        return node.index, node.name
    return outer[0].index, " / ".join(n.name for n in (*outer, node))


class _Plan:
    def __init__(self, moves: Sequence[Move], find: Callable[[int], MemoryRange | None]) -> None:
        self._moves = moves
        self._low = min((m.old.address for m in moves), default=0)
        self._high = max((m.old.end for m in moves), default=0)
        self._find = find
        # By identity: nodes of one kernel share both objects, and hashing them takes longer than
        # what the places are needed for.  The nodes keep them alive meanwhile.
        self._words: dict[tuple[int, int, int], tuple[Word, ...]] = {}
        self._outer: tuple[
            Node, ...
        ] = ()  # the child graph or conditional nodes around the visited
        self.changes: list[Change] = []
        self.words: list[ReboundWord] = []
        self.left: list[LeftWord] = []

    def visit(self, outer: tuple[Node, ...], setting: Setting) -> None:
        # Nodes inside others are set one by one like these (measured on driver 580).
        self._outer = outer
        node, params = setting.node, setting.params
        if isinstance(params, KernelNodeParams):
            self._kernel(setting, params)
        elif isinstance(params, MemsetNodeParams) or (
            isinstance(params, MemcpyNodeParams) and not params.opaque
        ):
            self._fields(node, params)
        else:
            for field in address_fields(params):
                if self._move_of(field.address) is not None:
                    why = f"a {node.kind.name} node cannot be rebound"
                    self._leave(node, field.place, field.address, why)

    def _leave(self, node: Node, place: str, value: int, why: str) -> None:
        self.left.append(LeftWord(*self._name(node), place, value, why))

    def _name(self, node: Node) -> tuple[int, str]:
        return named(self._outer, node)

    def _move_of(self, address: int) -> Move | None:
        if self._low <= address < self._high:
            for move in self._moves:
                if move.old.holds(address):
                    return move
        return None

    def _note_overlap(self, node: Node, place: str, address: int, nbytes: int) -> None:
        """Reports a word that points in front of an old range and whose bytes reach into it."""
        if any(address < move.old.address < address + nbytes for move in self._moves):
            why = "it points in front of the old range and reaches into it"
            self._leave(node, place, address, why)

    def _moved(self, move: Move, address: int, nbytes: int, node: Node, place: str) -> int:
        """The new address.  Raises InputError if what is used there would overrun the new range."""
        offset = address - move.old.address
        if move.new.address + offset + nbytes > move.new.end:
            index, name = self._name(node)
            raise InputError(
                f"node {index} ({name}) {place} points {offset} bytes into the old range and uses "
                f"up to {nbytes} bytes from there, but the new range has only {move.new.nbytes} "
                "bytes; nothing was changed. Give a range that is as large, or patch the argument "
                "and what says how much of it is used"
            )
        return move.new.address + offset

    def _kernel(self, setting: Setting, params: KernelNodeParams) -> None:
        arguments, node = params.arguments, setting.node
        words = struct.unpack_from(f"<{len(arguments.data) // _WORD}Q", arguments.data)
        data: bytearray | None = None
        owners: list[tuple[Place, object]] = []
        name: tuple[int, str] | None = None
        for word in self._words_of(setting.signature, arguments):
            value = words[word.offset // _WORD]
            move = self._move_of(value)
            if move is None:
                self._note_overlap(node, word.label, value, setting.reach.get(word.offset, 0))
                continue
            if word.sort is not Sort.POINTER and not self._confirmed(node, word, value):
                continue
            if move.holds is not None and word.holds is not None and move.holds != word.holds:
                index, path = self._name(node)
                raise InputError(
                    f"node {index} ({path}) {word.label} points at {word.holds.name}, and the new "
                    f"target holds {move.holds.name}; nothing was changed. Give memory of that "
                    'type, or bytes of no type (buffer.view(dtype="bytes"))'
                )
            nbytes = setting.reach.get(word.offset, move.old.end - value)
            new = self._moved(move, value, nbytes, node, word.label)
            by = "signature" if word.sort is Sort.POINTER else "allocation"
            name = name or self._name(node)
            self.words.append(ReboundWord(*name, word.label, value, new, by))
            data = data or bytearray(arguments.data)
            data[word.offset : word.offset + _WORD] = new.to_bytes(_WORD, "little")
            owners.append((word.offset, move.target))
        if data is not None:
            self.changes.append(Change(node, params.with_data(bytes(data)), tuple(owners)))

    def _words_of(
        self, signature: Signature | None, arguments: KernelArguments
    ) -> tuple[Word, ...]:
        nbytes = len(arguments.data)
        key = id(signature), id(arguments.layout), nbytes
        found = self._words.get(key)
        if found is None:
            found = self._words[key] = words_of(signature, arguments.layout, nbytes)
        return found

    def _confirmed(self, node: Node, word: Word, value: int) -> bool:
        """Whether a word that no signature calls a pointer is one; it is reported if not."""
        if word.sort is Sort.SCALAR:
            why = "its signature says that it is a number, not a pointer"
        elif self._find(value) is None:
            why = "no live allocation holds it, so nothing confirms that it is a pointer"
        else:
            return True
        self._leave(node, word.label, value, why)
        return False

    def _fields(self, node: Node, params: MemcpyNodeParams | MemsetNodeParams) -> None:
        new: dict[str, Any] = {}
        owners: list[tuple[Place, object]] = []
        for place, address, nbytes, _ in address_fields(params):
            move = self._move_of(address)
            if move is None:
                self._note_overlap(node, place, address, nbytes)
            else:
                new[place] = self._moved(move, address, nbytes, node, place)
                name = self._name(node)
                self.words.append(ReboundWord(*name, place, address, new[place], "field"))
                owners.append((place, move.target))
        if new:
            made = replace(params, **new)
            if isinstance(made, MemcpyNodeParams):
                self._require_apart(node, made)
            self.changes.append(Change(node, made, tuple(owners)))

    def _require_apart(self, node: Node, params: MemcpyNodeParams) -> None:
        """Raises InputError if a copy of one row would overlap itself: a GPU copies in any order.

        Between the rows of a copy with a pitch there may be room for the other side's.
        """
        one_row = params.height * params.depth == 1
        if one_row and 0 < abs(params.dst - params.src) < params.width:
            index, name = self._name(node)
            raise InputError(
                f"node {index} ({name}) would copy {params.width} bytes at {params.src:#x} to "
                f"{params.dst:#x}, and they overlap; nothing was changed. Give new ranges that do "
                "not overlap"
            )


def copy_extent(params: MemcpyNodeParams, pitch: int, height: int) -> int:
    """Bytes from the first to behind the last that a copy touches on one side."""
    row = pitch or params.width
    rows = (params.depth - 1) * (height or params.height) + params.height
    return (rows - 1) * row + params.width


def fill_extent(params: MemsetNodeParams) -> int:
    """Bytes from the first to behind the last that a fill touches."""
    return (params.height - 1) * params.pitch + params.width * params.element_size


class AddressField(NamedTuple):
    """A field of a node that is no kernel: where it is, the address in it, how many bytes are used
    there, and whether they are written."""

    place: str
    address: int
    nbytes: int
    written: bool


def address_fields(params: NodeParams) -> list[AddressField]:
    """The fields that hold addresses, of a node that is no kernel."""
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
