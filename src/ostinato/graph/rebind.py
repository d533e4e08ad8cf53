"""Rebinding: which words of a graph point into a buffer, and what they become.

Pure: from nodes and targets to the changes and a report; `GraphExec.rebind` makes them.

A word is taken for a pointer if a signature says so, or, where there is none, if it is a whole
aligned 8-byte word and the driver confirms that it lies in a live allocation.  A number that
a signature calls a scalar is never touched, however much it looks like an address.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ostinato.driver.api import (
    ChildGraphNodeParams,
    ConditionalNodeParams,
    HostNodeParams,
    KernelArguments,
    KernelNodeParams,
    MemcpyNodeParams,
    MemoryRange,
    MemsetNodeParams,
    NodeParams,
)
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
    """A node and the parameters that it is to have."""

    node: Node
    params: NodeParams


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


def plan_rebind(
    nodes: Sequence[Node],
    targets: Sequence[tuple[Target, Target]],
    find: Callable[[int], MemoryRange | None],
) -> Rebinding:
    """Works out a rebinding.  Raises InputError for ranges that overlap or do not fit."""
    moves = [
        _Move(range_of(old, "old target"), range_of(new, "new target")) for old, new in targets
    ]
    ordered = sorted(moves, key=lambda m: m.old.address)
    for left, right in itertools.pairwise(ordered):
        if left.old.end > right.old.address:
            raise InputError("two of the ranges to rebind from overlap; rebind one at a time")
    plan = _Plan(moves, find)
    for node in nodes:
        plan.visit(node)
    return Rebinding(plan.changes, RebindReport(tuple(plan.words), tuple(plan.left)))


class _Plan:
    def __init__(self, moves: Sequence[_Move], find: Callable[[int], MemoryRange | None]) -> None:
        self._moves = moves
        self._find = find
        self._outer: list[Node] = []  # the child graph or conditional nodes around the visited one
        self.changes: list[Change] = []
        self.words: list[ReboundWord] = []
        self.left: list[LeftWord] = []

    def visit(self, node: Node) -> None:
        params = node.params
        if isinstance(params, KernelNodeParams):
            arguments = self._kernel(node, params.arguments)
            if arguments != params.arguments:
                self.changes.append(Change(node, replace(params, arguments=arguments)))
        elif isinstance(params, MemcpyNodeParams):
            self._memcpy(node, params)
        elif isinstance(params, MemsetNodeParams):
            extent = params.width * params.element_size
            extent += (params.height - 1) * params.pitch
            dst = self._field(node, "dst", params.dst, extent)
            if dst != params.dst:
                self.changes.append(Change(node, replace(params, dst=dst)))
        elif isinstance(params, ChildGraphNodeParams | ConditionalNodeParams):
            # Nodes inside are set one by one like the others (measured on driver 580).
            for body in node.children:
                for child in body:
                    self._outer.append(node)
                    self.visit(child)
                    self._outer.pop()
        elif isinstance(params, HostNodeParams):
            pass  # what a host function holds is not ours to see

    def _name(self, node: Node) -> tuple[int, str]:
        """The index of the outermost node, and the names from there inwards."""
        path = [*self._outer, node]
        return path[0].index, " / ".join(n.name for n in path)

    # --- words
    def _moved(self, address: int, extent: int, where: str) -> int | None:
        """The new address, or None if it is in no old range.  Raises InputError if it overruns."""
        for move in self._moves:
            if not move.old.holds(address):
                continue
            new = move.new.address + (address - move.old.address)
            if new + extent > move.new.end:
                raise InputError(
                    f"{where} points {address - move.old.address} bytes into the old range, and "
                    f"the new one has only {move.new.nbytes} bytes; nothing was changed"
                )
            return new
        return None

    def _kernel(self, node: Node, arguments: KernelArguments) -> KernelArguments:
        signature = node.signature
        typed = signature is not None and signature.layout == arguments.layout
        for index, slot in enumerate(arguments.layout):
            parameter = signature.parameters[index] if signature is not None and typed else None
            label = f"argument {index}" + (f" ({parameter.name})" if parameter else "")
            scalar = parameter is not None and not parameter.pointer and parameter.type != "bytes"
            arguments = self._words(
                node,
                arguments,
                range(-(-slot.offset // _WORD) * _WORD, slot.offset + slot.size - _WORD + 1, _WORD),
                slot.offset,
                label,
                by_signature=parameter is not None and parameter.pointer,
                scalar=scalar,
            )
        if not arguments.layout and arguments.data:
            places = range(0, len(arguments.data) - _WORD + 1, _WORD)
            arguments = self._words(
                node, arguments, places, 0, "packed arguments", by_signature=False, scalar=False
            )
        return arguments

    def _words(
        self,
        node: Node,
        arguments: KernelArguments,
        places: range,
        start: int,
        label: str,
        *,
        by_signature: bool,
        scalar: bool,
    ) -> KernelArguments:
        for at in places:
            value = int.from_bytes(arguments.data[at : at + _WORD], "little")
            place = label if at == start else f"{label} +{at - start}"
            if not any(move.old.holds(value) for move in self._moves):
                continue
            if scalar:
                why = "its signature says that it is a number, not a pointer"
                self.left.append(LeftWord(*self._name(node), place, value, why))
                continue
            if not by_signature and self._find(value) is None:
                why = "no live allocation holds it, so nothing confirms that it is a pointer"
                self.left.append(LeftWord(*self._name(node), place, value, why))
                continue
            new = self._moved(value, 1, f"node {node.index} ({node.name}) {place}")
            assert new is not None
            confirmed = "signature" if by_signature else "allocation"
            self.words.append(ReboundWord(*self._name(node), place, value, new, confirmed))
            arguments = arguments.with_bytes(at, new.to_bytes(_WORD, "little"))
        return arguments

    def _field(self, node: Node, place: str, address: int, extent: int) -> int:
        new = self._moved(address, extent, f"node {node.index} ({node.name}) {place}")
        if new is None:
            return address
        self.words.append(ReboundWord(*self._name(node), place, address, new, "field"))
        return new

    def _memcpy(self, node: Node, params: MemcpyNodeParams) -> None:
        if params.opaque:
            return  # an array side has no address; the linear side cannot be set without it
        dst = self._field(
            node, "dst", params.dst, copy_extent(params, params.dst_pitch, params.dst_height)
        )
        src = self._field(
            node, "src", params.src, copy_extent(params, params.src_pitch, params.src_height)
        )
        if (dst, src) != (params.dst, params.src):
            self.changes.append(Change(node, replace(params, dst=dst, src=src)))


def copy_extent(params: MemcpyNodeParams, pitch: int, height: int) -> int:
    """Bytes from the first to behind the last that a copy touches on one side."""
    row = pitch or params.width
    rows = (params.depth - 1) * (height or params.height) + params.height
    return (rows - 1) * row + params.width
