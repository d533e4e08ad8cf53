"""Nodes as records: what a graph holds, in the driver's order, with arguments decoded."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from ostinato.driver.api import (
    AllocNodeParams,
    BatchMemOpNodeParams,
    ConditionalNodeParams,
    EventRecordNodeParams,
    EventWaitNodeParams,
    FreeNodeParams,
    HostNodeParams,
    KernelNodeParams,
    MemcpyNodeParams,
    MemoryRange,
    MemsetNodeParams,
    NodeHandle,
    NodeKind,
    NodeParams,
)
from ostinato.driver.location import describe_line
from ostinato.driver.signature import Parameter, Signature
from ostinato.driver.stream import Operation
from ostinato.errors import InputError, NodeKindError
from ostinato.memory.ranges import range_of

__all__ = [
    "Argument",
    "Node",
    "NodeLabel",
    "Pointer",
    "decode_arguments",
    "given_reach",
    "pointer_words",
]

P = TypeVar("P")
_WORD = 8


@dataclass(frozen=True, slots=True)
class Pointer:
    """A word that points into device memory: which allocation, and how far in (bytes)."""

    offset: int
    """Where the word lies in the packed parameter buffer."""
    address: int
    allocation: MemoryRange | None
    """None where a signature says "pointer" but no live allocation holds the address."""
    typed: bool
    """Whether a signature says that it is a pointer, or only that a live allocation holds it."""

    @property
    def into(self) -> int | None:
        """Bytes from the allocation's beginning."""
        return None if self.allocation is None else self.address - self.allocation.address


@dataclass(frozen=True, slots=True)
class Argument:
    """One kernel argument: its place, its bytes, and what is known of their meaning.

    `value` is a number where a signature gives the type, else None.  `pointers` are the words in
    it that point into device memory (more than one in a struct).
    """

    index: int
    offset: int
    size: int
    raw: bytes
    name: str = ""
    type: str = ""
    value: int | float | None = None
    pointers: tuple[Pointer, ...] = ()

    def __str__(self) -> str:
        return self.text({})

    def text(self, places: Mapping[int, str]) -> str:
        """In words; an address that is in `places` by the name that it has there."""
        label = f"{self.name}=" if self.name else ""
        if self.pointers and self.size == _WORD:
            pointer = self.pointers[0]
            if pointer.address in places:
                return f"{label}[{places[pointer.address]}]"
            if pointer.allocation is None:
                return f"{label}{pointer.address:#x}"
            inside = f"+{pointer.into}" if pointer.into else ""
            return f"{label}[{pointer.allocation.address:#x}{inside}]"
        if self.value is not None:
            return (
                f"{label}{self.value:g}"
                if isinstance(self.value, float)
                else (f"{label}{self.value}")
            )
        if self.size <= _WORD:
            return f"{label}0x{int.from_bytes(self.raw, 'little'):x}"
        return f"{label}<{self.size} bytes>"


@dataclass(frozen=True, slots=True)
class NodeLabel:
    """What this library knows of a node beyond what the driver does: who made it, and where."""

    operation: Operation | None
    line: tuple[str, int] | None

    @property
    def location(self) -> str | None:
        """ "file:line: source", where it is known."""
        return None if self.line is None else describe_line(*self.line)


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a graph, as it was when it was read.

    `index` is its place in the driver's order, `handle` the driver's.  Asking for the parameters
    of another kind (`node.memset` of a kernel node) raises NodeKindError.
    """

    index: int
    handle: NodeHandle
    kind: NodeKind
    name: str
    params: NodeParams
    arguments: tuple[Argument, ...] = ()
    location: str | None = None
    signature: Signature | None = None
    keep: tuple[object, ...] = ()
    """What must live while the node can run."""
    children: tuple[tuple[Node, ...], ...] = ()
    """The nodes of its child graph, or of each conditional body."""
    places: Mapping[int, str] = field(default_factory=dict, compare=False, repr=False)
    """Words for addresses that it holds, where they lie in buffers with names; for showing."""

    def __repr__(self) -> str:
        return f"<Node {self.index} {self.kind.name} {self.name!r}>"

    def _as(self, kind: type[P]) -> P:
        if not isinstance(self.params, kind):
            wanted = kind.__name__.removesuffix("NodeParams")
            raise NodeKindError(
                f"node {self.index} ({self.name}) is of kind {self.kind.name}, "
                f"so it has no {wanted} parameters"
            )
        return self.params

    @property
    def kernel(self) -> KernelNodeParams:
        return self._as(KernelNodeParams)

    @property
    def memcpy(self) -> MemcpyNodeParams:
        return self._as(MemcpyNodeParams)

    @property
    def memset(self) -> MemsetNodeParams:
        return self._as(MemsetNodeParams)

    @property
    def host(self) -> HostNodeParams:
        return self._as(HostNodeParams)

    @property
    def event_record(self) -> EventRecordNodeParams:
        return self._as(EventRecordNodeParams)

    @property
    def event_wait(self) -> EventWaitNodeParams:
        return self._as(EventWaitNodeParams)

    @property
    def alloc(self) -> AllocNodeParams:
        return self._as(AllocNodeParams)

    @property
    def free(self) -> FreeNodeParams:
        return self._as(FreeNodeParams)

    @property
    def batch_mem_op(self) -> BatchMemOpNodeParams:
        return self._as(BatchMemOpNodeParams)

    @property
    def conditional(self) -> ConditionalNodeParams:
        return self._as(ConditionalNodeParams)


def pointer_words(
    data: bytes,
    offset: int,
    size: int,
    find: Callable[[int], MemoryRange | None],
) -> tuple[Pointer, ...]:
    """The aligned 8-byte words of one argument that lie in live allocations."""
    found = []
    first = -(-offset // _WORD) * _WORD
    for at in range(first, offset + size - _WORD + 1, _WORD):
        address = int.from_bytes(data[at : at + _WORD], "little")
        allocation = find(address) if address else None
        if allocation is not None:
            found.append(Pointer(at, address, allocation, typed=False))
    return tuple(found)


def given_reach(data: bytes, owners: Iterable[object]) -> dict[int, int]:
    """How many bytes a launch was given behind the pointer at each offset, where it is known.

    `data` is the parameter buffer; `owners` are what the launch was given as memory.
    """
    given: dict[int, int] = {}
    for owner in owners:
        with suppress(InputError):  # the kernel itself, or an object without memory
            memory = range_of(owner)
            given[memory.address] = max(memory.nbytes, given.get(memory.address, 0))
    words = (
        (at, int.from_bytes(data[at : at + _WORD], "little"))
        for at in range(0, len(data) - _WORD + 1, _WORD)
    )
    return {at: given[word] for at, word in words if word in given}


def decode_arguments(
    params: KernelNodeParams,
    signature: Signature | None,
    find: Callable[[int], MemoryRange | None],
    made: dict[tuple[int, bytes, int, int], Argument] | None = None,
) -> tuple[Argument, ...]:
    """The arguments of a kernel node.

    `made`: arguments of other nodes that were decoded with the same `find`, which are shared.

    With a signature of the same layout by type; else by size, with words that lie in live
    allocations (`find`) shown as pointers.  A packed buffer of unknown layout is one argument.
    """
    arguments = params.arguments
    data = arguments.data
    typed: tuple[Parameter | None, ...] = (None,) * len(arguments.layout)
    if signature is not None and signature.layout == arguments.layout:
        typed = signature.parameters
    if not arguments.layout:
        if not data:
            return ()
        return (Argument(0, 0, len(data), data, pointers=pointer_words(data, 0, len(data), find)),)
    made = {} if made is None else made
    decoded: list[Argument] = []
    for index, (slot, parameter) in enumerate(zip(arguments.layout, typed, strict=True)):
        offset, size = slot.offset, slot.size
        # By identity: equal parameters may be found twice, and hashing one takes longer.
        key = id(parameter), data[offset : offset + size], offset, index
        known = made.get(key)
        if known is None:
            known = made[key] = _argument(index, data, offset, size, parameter, find)
        decoded.append(known)
    return tuple(decoded)


def _argument(
    index: int,
    data: bytes,
    offset: int,
    size: int,
    parameter: Parameter | None,
    find: Callable[[int], MemoryRange | None],
) -> Argument:
    raw = data[offset : offset + size]
    if parameter is None:
        words = pointer_words(data, offset, size, find)
        return Argument(index, offset, size, raw, pointers=words)
    name, kind = parameter.name, parameter.type
    if parameter.pointer:
        address = int.from_bytes(raw, "little")
        held = find(address) if address else None
        pointer = Pointer(offset, address, held, typed=True)
        return Argument(index, offset, size, raw, name, f"*{kind}", pointers=(pointer,))
    if kind == "bytes":
        words = pointer_words(data, offset, size, find)
        return Argument(index, offset, size, raw, name, kind, pointers=words)
    (value,) = struct.unpack(f"<{parameter.code}", raw)
    return Argument(index, offset, size, raw, name, kind, value)
