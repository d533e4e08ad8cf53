"""Nodes as records: the content of a graph, in the driver's order, with arguments decoded."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from ostinato.driver.api import (
    AllocNodeParams,
    BatchMemOpNodeParams,
    ChildGraphNodeParams,
    ConditionalNodeParams,
    ConditionDefaults,
    Driver,
    EventRecordNodeParams,
    EventWaitNodeParams,
    FreeNodeParams,
    FunctionHandle,
    GraphHandle,
    HostNodeParams,
    KernelNodeParams,
    MemcpyNodeParams,
    MemoryRange,
    MemsetNodeParams,
    NodeHandle,
    NodeKind,
    NodeParams,
    ParameterSlot,
    not_null,
    whole_number,
)
from ostinato.driver.location import describe_line
from ostinato.driver.signature import Parameter, Signature
from ostinato.driver.stream import Operation
from ostinato.errors import InputError, NodeKindError
from ostinato.memory import Buffer
from ostinato.memory.ranges import KnownRanges, range_of

P = TypeVar("P")
_WORD = 8


class Pointer(NamedTuple):
    """A word that points into device memory: the allocation, and the offset in it (bytes)."""

    offset: int
    """The offset of the word in the packed parameter buffer."""
    address: int
    allocation: MemoryRange | None
    """The allocation; None if a signature declares a pointer but no live allocation holds it."""
    typed: bool
    """True if a signature declares the pointer, False if only a live allocation suggests it."""

    @property
    def into(self) -> int | None:
        """Bytes from the allocation's beginning, or None."""
        return None if self.allocation is None else self.address - self.allocation.address


class Argument(NamedTuple):
    """One kernel argument: its place, its bytes, and their meaning as far as known.

    `value` is a number if a signature gives the type, else None.  `pointers` are the words in
    it that point into device memory (more than one in a struct).
    """

    index: int  # type: ignore[assignment]  # a tuple's method has this name too
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
        """Returns the argument as text; an address in `places` by its name there."""
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
            form = "g" if isinstance(self.value, float) else ""
            return f"{label}{self.value:{form}}"
        if self.size <= _WORD:
            return f"{label}0x{int.from_bytes(self.raw, 'little'):x}"
        return f"{label}<{self.size} bytes>"


@dataclass(frozen=True, slots=True)
class NodeLabel:
    """This library's data on a node: the operation and the line that made it."""

    operation: Operation | None
    line: tuple[str, int] | None


class _Only(Generic[P]):
    """A property of a node: its parameters, if they are of this kind."""

    def __init__(self, kind: type[P]) -> None:
        self._kind = kind

    def __get__(self, node: Node, owner: object) -> P:
        if not isinstance(node.params, self._kind):
            wanted = self._kind.__name__.removesuffix("NodeParams")
            raise NodeKindError(
                f"node {node.index} ({node.name}) is of kind {node.kind.name}, "
                f"so it has no {wanted} parameters"
            )
        return node.params


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a graph, as it was when it was read.

    `index` is its index in the driver's order, `handle` the driver's.  Access to the parameters
    of another kind (`node.memset` of a kernel node) raises NodeKindError.
    """

    index: int
    handle: NodeHandle
    kind: NodeKind
    name: str
    params: NodeParams
    held: tuple[Argument, ...] | Callable[[], tuple[Argument, ...]] = field(
        default=(), compare=False, repr=False
    )
    """The arguments, or a function that decodes them."""
    line: tuple[str, int] | None = None
    """File and line of the Python code that made the node, or None."""
    signature: Signature | None = None
    keep: tuple[object, ...] = ()
    """Objects that must live while the node can run."""
    children: tuple[tuple[Node, ...], ...] = ()
    """The nodes of its child graph, or of each conditional body."""
    defaults: ConditionDefaults | None = None
    """The defaults of a conditional node's condition, if known."""
    places: Mapping[int, str] = field(default_factory=dict, compare=False, repr=False)
    """Texts for addresses of the node that are in named buffers, for showing."""

    def __repr__(self) -> str:
        return f"<Node {self.index} {self.kind.name} {self.name!r}>"

    @property
    def location(self) -> str | None:
        """ "file:line: source" of the Python code that made the node, or None."""
        return None if self.line is None else describe_line(*self.line)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """A kernel's arguments, in order; () for other kinds.

        They are decoded at the first access.  The bytes are those of the node when it was read; the
        allocations are those that are live at the access.  Raises ClosedError if the device was
        closed before.
        """
        return self.held if isinstance(self.held, tuple) else self.held()

    kernel = _Only(KernelNodeParams)
    memcpy = _Only(MemcpyNodeParams)
    memset = _Only(MemsetNodeParams)
    host = _Only(HostNodeParams)
    event_record = _Only(EventRecordNodeParams)
    event_wait = _Only(EventWaitNodeParams)
    alloc = _Only(AllocNodeParams)
    free = _Only(FreeNodeParams)
    batch_mem_op = _Only(BatchMemOpNodeParams)
    conditional = _Only(ConditionalNodeParams)


class NodeReader:
    """A reader of nodes, which joins the driver's data with that of this library (`labels`)."""

    __slots__ = ("_driver", "_names", "labels")

    def __init__(self, driver: Driver, labels: Mapping[NodeHandle, NodeLabel]) -> None:
        self._driver, self.labels = driver, labels
        self._names: dict[FunctionHandle, str] = {}
        """The names of functions.  The driver keeps none of another library's functions, since
        their modules are unloaded unseen; while this is used, the graph's are loaded."""

    def all(self, graph: GraphHandle, find: KnownRanges | None = None) -> tuple[Node, ...]:
        """Returns all nodes of a graph, with child graphs and conditional bodies inside."""
        find = find or KnownRanges(self._driver.memory_range)
        frozen = self._driver.graph_freeze(graph)
        inside = partial(self.all, find=find)
        return tuple(
            self.read(index, handle, frozen.kind(index), frozen.params(index), find, inside)
            for index, handle in enumerate(frozen.nodes)
        )

    def one(self, index: int, handle: NodeHandle) -> Node:
        """Returns a node with the driver's present parameters."""
        driver = self._driver
        return self.made(index, handle, driver.node_kind(handle), driver.node_params(handle))

    def made(self, index: int, handle: NodeHandle, kind: NodeKind, params: NodeParams) -> Node:
        """Returns a node that is known to have these parameters."""
        find = KnownRanges(self._driver.memory_range)
        return self.read(index, handle, kind, params, find, self.all)

    def read(
        self,
        index: int,
        handle: NodeHandle,
        kind: NodeKind,
        params: NodeParams,
        find: KnownRanges,
        inside: Callable[[GraphHandle], tuple[Node, ...]],
    ) -> Node:
        """Returns a node with these parameters.  `inside` reads a child graph or a body."""
        label = self.labels.get(handle)
        operation = None if label is None else label.operation
        signature = None if operation is None else operation.signature
        held: tuple[Argument, ...] | Callable[[], tuple[Argument, ...]] = ()
        children: tuple[tuple[Node, ...], ...] = ()
        defaults = None
        if isinstance(params, KernelNodeParams):
            held = _later(params, signature, find)
        elif isinstance(params, ConditionalNodeParams):
            children = tuple(inside(not_null(body, "body")) for body in params.bodies)
            defaults = self._driver.condition_defaults(handle)
        elif isinstance(params, ChildGraphNodeParams):
            children = (inside(not_null(params.graph, "child graph")),)
        return Node(
            index,
            handle,
            kind,
            self.name(kind, params),
            params,
            held,
            None if label is None else label.line,
            signature,
            () if operation is None else operation.keep,
            children,
            defaults,
        )

    def name(self, kind: NodeKind, params: NodeParams) -> str:
        """Returns the name of a node of these parameters."""
        if isinstance(params, KernelNodeParams):
            return self.function_name(params.function)
        if isinstance(params, ConditionalNodeParams):
            return params.kind.name.lower()
        name = kind.name.lower()
        if isinstance(params, HostNodeParams) and params.function is not None:
            name = getattr(params.function, "__qualname__", name)
        return name

    def function_name(self, function: FunctionHandle) -> str:
        known = self._names.get(function)
        if known is None:
            known = self._names[function] = self._driver.function_info(function).name
        return known


def _later(
    params: KernelNodeParams, signature: Signature | None, find: KnownRanges
) -> Callable[[], tuple[Argument, ...]]:
    """Returns a function that decodes the arguments once (`functools.cache` takes 3 us to make)."""
    decoded: tuple[Argument, ...] | None = None

    def get() -> tuple[Argument, ...]:
        nonlocal decoded
        if decoded is None:
            decoded = decode_arguments(params, signature, find, find.notes)
        return decoded

    return get


def index_below(count: int, given: object) -> int:
    """Returns a valid index of a graph's `count` own nodes.  Raises InputError."""
    index = whole_number(given)
    if index is None or not 0 <= index < count:
        raise InputError(
            f"there is no node {given!r}: give a Node of this graph, or an index below {count}"
        )
    return index


def given_part(node: Node, address: int) -> Buffer | None:
    """Returns the smallest open buffer with a name that a node's launch got and that holds an
    address: of a view, the name says more than that of its memory."""
    named = (b for b in node.keep if isinstance(b, Buffer) and b.name and not b.closed)
    return min((b for b in named if b.range.holds(address)), key=lambda b: b.nbytes, default=None)


def every_node(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yields the nodes, each followed by those of its child graph or of its conditional bodies."""
    for node in nodes:
        yield node
        for body in node.children:
            yield from every_node(body)


def pointer_words(
    raw: bytes, offset: int, find: Callable[[int], MemoryRange | None]
) -> tuple[Pointer, ...]:
    """Returns the aligned 8-byte words of one argument that are addresses in live allocations.

    `raw` is the argument, which is at `offset` in the packed buffer.
    """
    found = []
    first = -(-offset // _WORD) * _WORD
    for at in range(first, offset + len(raw) - _WORD + 1, _WORD):
        address = int.from_bytes(raw[at - offset : at - offset + _WORD], "little")
        allocation = find(address) if address else None
        if allocation is not None:
            found.append(Pointer(at, address, allocation, typed=False))
    return tuple(found)


def given_reach(data: bytes, owners: Iterable[object]) -> dict[int, int]:
    """Returns the bytes of memory given to a launch behind the pointer at each offset, if known.

    `data` is the parameter buffer; `owners` are the objects that the launch got as memory.
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
    made: dict[Any, Any] | None = None,
) -> tuple[Argument, ...]:
    """Decodes the arguments of a kernel node.

    `made`: the decoded arguments of other nodes with the same `find`, to be shared.

    With a signature of the same layout by type; else by size, with words that are addresses in live
    allocations (`find`) as pointers.  A packed buffer of unknown layout is one argument.
    """
    data, layout = params.arguments.data, params.arguments.layout
    if not layout:
        if not data:
            return ()
        return (Argument(0, 0, len(data), data, pointers=pointer_words(data, 0, find)),)
    # By identity: comparing and hashing signatures and layouts takes longer than all the rest.
    pair, made = (id(signature), id(layout)), {} if made is None else made
    slots = made.get(pair)
    if slots is None:
        slots = made[pair] = _slots(layout, signature)
    decoded: list[Argument] = []
    for offset, end, parameter, index, known in slots.each:
        raw = data[offset:end]
        argument = known.get(raw)
        if argument is None:
            argument = known[raw] = _argument(index, offset, raw, parameter, find)
        decoded.append(argument)
    return tuple(decoded)


class _Slots(NamedTuple):
    """The slots of one layout and one signature, and the arguments decoded in them."""

    each: tuple[tuple[int, int, Parameter | None, int, dict[bytes, Argument]], ...]
    """Offset, end, parameter if the signature has it, index, and arguments by their bytes."""
    known_by: tuple[object, object]
    """Layout and signature, kept alive because they are identified by their `id`."""


def _slots(layout: tuple[ParameterSlot, ...], signature: Signature | None) -> _Slots:
    typed: tuple[Parameter | None, ...] = (None,) * len(layout)
    if signature is not None and signature.layout == layout:
        typed = signature.parameters
    each: tuple[tuple[int, int, Parameter | None, int, dict[bytes, Argument]], ...] = tuple(
        (slot.offset, slot.offset + slot.size, parameter, index, {})
        for index, (slot, parameter) in enumerate(zip(layout, typed, strict=True))
    )
    return _Slots(each, (layout, signature))


def _argument(
    index: int,
    offset: int,
    raw: bytes,
    parameter: Parameter | None,
    find: Callable[[int], MemoryRange | None],
) -> Argument:
    size = len(raw)
    if parameter is None:
        words = pointer_words(raw, offset, find)
        return Argument(index, offset, size, raw, pointers=words)
    name, kind = parameter.name, parameter.type
    if parameter.pointer:
        address = int.from_bytes(raw, "little")
        pointer = Pointer(offset, address, find(address) if address else None, True)
        return Argument(index, offset, size, raw, name, f"*{kind}", None, (pointer,))
    if kind == "bytes":
        words = pointer_words(raw, offset, find)
        return Argument(index, offset, size, raw, name, kind, pointers=words)
    (value,) = struct.unpack(f"<{parameter.code}", raw)
    return Argument(index, offset, size, raw, name, kind, value)
