"""Rebinding: which words of a graph point into a buffer, and what they become.

Pure: from nodes and targets to the changes and a report; `GraphExec.rebind` makes them.

A word is taken for a pointer if a signature says so, or, where there is none, if it is a whole
aligned 8-byte word and the driver confirms that it lies in a live allocation.  A number that
a signature calls a scalar is never touched, however much it looks like an address.
"""

from __future__ import annotations

import enum
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ostinato.driver.api import (
    KernelArguments,
    KernelNodeParams,
    MemcpyNodeParams,
    MemoryRange,
    MemsetNodeParams,
    NodeHandle,
    NodeParams,
    ParameterSlot,
)
from ostinato.driver.signature import Parameter, Signature
from ostinato.errors import InputError
from ostinato.graph.node import Node
from ostinato.memory.ranges import Target, range_of

__all__ = [
    "Change",
    "LeftWord",
    "RebindReport",
    "Rebinding",
    "ReboundWord",
    "copy_extent",
    "plan_rebind",
]

_WORD = 8


@dataclass(frozen=True, slots=True)
class Change:
    """A node and the parameters that it is to have.

    `owners`: what its changed words point at now, by place (byte offset, "dst" or "src").
    """

    node: Node
    params: NodeParams
    owners: tuple[tuple[int | str, object], ...] = ()


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


@dataclass(frozen=True, slots=True)
class RebindReport:
    """Every word that `rebind` changed, and every one that it left."""

    words: tuple[ReboundWord, ...]
    left: tuple[LeftWord, ...]

    @property
    def nodes(self) -> int:
        """How many nodes were changed."""
        return len({word.node_index for word in self.words})


@dataclass(frozen=True, slots=True)
class Rebinding:
    """A plan: the changes to make, and the report of them."""

    changes: list[Change]
    report: RebindReport


@dataclass(frozen=True, slots=True)
class _Move:
    old: MemoryRange
    new: MemoryRange
    target: Target


class _Sort(enum.Enum):
    POINTER = "its signature says so"
    SCALAR = "its signature says that it is a number"
    UNKNOWN = "nothing says what it is"


@dataclass(frozen=True, slots=True)
class _Place:
    """An aligned word of a parameter buffer that may hold an address."""

    offset: int
    label: str
    sort: _Sort


@lru_cache(maxsize=4096)
def _places(
    signature: Signature | None, layout: tuple[ParameterSlot, ...], nbytes: int
) -> tuple[_Place, ...]:
    """Where addresses may be: the same for every launch of a kernel, so worked out once."""
    if not layout:
        return tuple(
            _Place(at, f"packed arguments +{at}", _Sort.UNKNOWN)
            for at in range(0, nbytes - _WORD + 1, _WORD)
        )
    typed: Sequence[Parameter | None] = [None] * len(layout)
    if signature is not None and signature.layout == layout:
        typed = signature.parameters
    found = []
    for index, (slot, parameter) in enumerate(zip(layout, typed, strict=True)):
        sort = _Sort.UNKNOWN
        if parameter is not None and parameter.type != "bytes":
            sort = _Sort.POINTER if parameter.pointer else _Sort.SCALAR
        label = f"argument {index}" + (f" ({parameter.name})" if parameter else "")
        start = -(-slot.offset // _WORD) * _WORD
        for at in range(start, slot.offset + slot.size - _WORD + 1, _WORD):
            inside = "" if at == slot.offset else f" +{at - slot.offset}"
            found.append(_Place(at, label + inside, sort))
    return tuple(found)


def plan_rebind(
    nodes: Sequence[Node],
    current: Mapping[NodeHandle, NodeParams],
    targets: Sequence[tuple[Target, Target]],
    find: Callable[[int], MemoryRange | None],
) -> Rebinding:
    """Works out a rebinding of nodes, whose parameters are `current`'s where that has them.

    Raises InputError for ranges that overlap or do not fit.
    """
    moves = [
        _Move(range_of(old, "old target"), range_of(new, "new target"), new) for old, new in targets
    ]
    ordered = sorted(moves, key=lambda m: m.old.address)
    for left, right in itertools.pairwise(ordered):
        if left.old.end > right.old.address:
            raise InputError("two of the ranges to rebind from overlap; rebind one at a time")
    plan = _Plan(ordered, current, find)
    for node in nodes:
        plan.visit(node)
    return Rebinding(plan.changes, RebindReport(tuple(plan.words), tuple(plan.left)))


class _Plan:
    def __init__(
        self,
        moves: Sequence[_Move],
        current: Mapping[NodeHandle, NodeParams],
        find: Callable[[int], MemoryRange | None],
    ) -> None:
        self._moves = moves
        self._low = min((m.old.address for m in moves), default=0)
        self._high = max((m.old.end for m in moves), default=0)
        self._current = current
        self._find = find
        # By identity: nodes of one kernel share both objects, and hashing them takes longer than
        # what the places are needed for.  The nodes keep them alive meanwhile.
        self._places: dict[tuple[int, int, int], tuple[_Place, ...]] = {}
        self._outer: list[Node] = []  # the child graph or conditional nodes around the visited one
        self.changes: list[Change] = []
        self.words: list[ReboundWord] = []
        self.left: list[LeftWord] = []

    def visit(self, node: Node) -> None:
        params = self._current.get(node.handle, node.params)
        if isinstance(params, KernelNodeParams):
            self._kernel(node, params)
        elif isinstance(params, MemcpyNodeParams) and not params.opaque:
            to = copy_extent(params, params.dst_pitch, params.dst_height)
            come = copy_extent(params, params.src_pitch, params.src_height)
            self._fields(node, params, {"dst": (params.dst, to), "src": (params.src, come)})
        elif isinstance(params, MemsetNodeParams):
            extent = params.width * params.element_size + (params.height - 1) * params.pitch
            self._fields(node, params, {"dst": (params.dst, extent)})
        elif node.children:
            # Nodes inside are set one by one like the others (measured on driver 580).
            self._outer.append(node)
            for body in node.children:
                for child in body:
                    self.visit(child)
            self._outer.pop()

    def _name(self, node: Node) -> tuple[int, str]:
        """The index of the outermost node, and the names from there inwards."""
        if not self._outer:
            return node.index, node.name
        return self._outer[0].index, " / ".join(n.name for n in (*self._outer, node))

    def _move_of(self, address: int) -> _Move | None:
        if self._low <= address < self._high:
            for move in self._moves:
                if move.old.holds(address):
                    return move
        return None

    def _moved(self, move: _Move, address: int, extent: int, node: Node, place: str) -> int:
        """The new address.  Raises InputError if what is pointed at would overrun the new range."""
        offset = address - move.old.address
        if move.new.address + offset + extent > move.new.end:
            index, name = self._name(node)
            raise InputError(
                f"node {index} ({name}) {place} points {offset} bytes into the old range, and the "
                f"new one has only {move.new.nbytes} bytes; nothing was changed"
            )
        return move.new.address + offset

    def _kernel(self, node: Node, params: KernelNodeParams) -> None:
        arguments = params.arguments
        words = struct.unpack_from(f"<{len(arguments.data) // _WORD}Q", arguments.data)
        data: bytearray | None = None
        owners: list[tuple[int | str, object]] = []
        name: tuple[int, str] | None = None
        for place in self._places_of(node.signature, arguments):
            value = words[place.offset // _WORD]
            move = self._move_of(value)
            if move is None:
                continue
            if place.sort is not _Sort.POINTER and not self._confirmed(node, place, value):
                continue
            new = self._moved(move, value, 1, node, place.label)
            by = "signature" if place.sort is _Sort.POINTER else "allocation"
            name = name or self._name(node)
            self.words.append(ReboundWord(*name, place.label, value, new, by))
            data = data or bytearray(arguments.data)
            data[place.offset : place.offset + _WORD] = new.to_bytes(_WORD, "little")
            owners.append((place.offset, move.target))
        if data is not None:
            changed = KernelArguments(bytes(data), arguments.layout, arguments.packed)
            made = KernelNodeParams(
                params.function, params.config, changed, params.extra_attributes
            )
            self.changes.append(Change(node, made, tuple(owners)))

    def _places_of(
        self, signature: Signature | None, arguments: KernelArguments
    ) -> tuple[_Place, ...]:
        nbytes = len(arguments.data)
        key = id(signature), id(arguments.layout), nbytes
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = _places(signature, arguments.layout, nbytes)
        return found

    def _confirmed(self, node: Node, place: _Place, value: int) -> bool:
        """Whether a word that no signature calls a pointer is one; it is reported if not."""
        if place.sort is _Sort.SCALAR:
            why = "its signature says that it is a number, not a pointer"
        elif self._find(value) is None:
            why = "no live allocation holds it, so nothing confirms that it is a pointer"
        else:
            return True
        self.left.append(LeftWord(*self._name(node), place.label, value, why))
        return False

    def _fields(
        self,
        node: Node,
        params: MemcpyNodeParams | MemsetNodeParams,
        fields: Mapping[str, tuple[int, int]],
    ) -> None:
        new: dict[str, Any] = {}
        owners: list[tuple[int | str, object]] = []
        for place, (address, extent) in fields.items():
            move = self._move_of(address)
            if move is not None:
                new[place] = self._moved(move, address, extent, node, place)
                name = self._name(node)
                self.words.append(ReboundWord(*name, place, address, new[place], "field"))
                owners.append((place, move.target))
        if new:
            self.changes.append(Change(node, replace(params, **new), tuple(owners)))


def copy_extent(params: MemcpyNodeParams, pitch: int, height: int) -> int:
    """Bytes from the first to behind the last that a copy touches on one side."""
    row = pitch or params.width
    rows = (params.depth - 1) * (height or params.height) + params.height
    return (rows - 1) * row + params.width
