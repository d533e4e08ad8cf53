"""The pointer manifest: which memory a graph points into, as the next launch will use it.

Read from the executable whenever it is asked for, so it follows every patch and rebinding.

A pointer is what a signature calls one, what the launch was given as a buffer, an address field of
a memcpy, memset or memory node, or an aligned word that lies in the memory that is asked about (the
asker says that it is memory).  A false alarm costs a capture; a pointer missed would cost an
answer, so a graph that cannot be read counts as pointing everywhere.  Not seen: what a host
function or a pointer in device memory leads to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ostinato.driver.api import (
    AllocNodeParams,
    BatchMemOpNodeParams,
    FreeNodeParams,
    KernelNodeParams,
    MemcpyNodeParams,
    MemoryRange,
    MemsetNodeParams,
    NodeHandle,
    NodeParams,
)
from ostinato.errors import ClosedError, InputError
from ostinato.graph.executable import GraphExec
from ostinato.graph.graph import Graph
from ostinato.graph.node import Node, NodeLabel, decode_arguments
from ostinato.graph.rebind import copy_extent
from ostinato.memory.ranges import range_of

__all__ = ["Touch", "manifest", "touches"]

_WORD = 8


@dataclass(frozen=True, slots=True)
class Touch:
    """One pointer of a graph.

    `place` says where in the node: "argument 2 (x)", "argument 0 +16", "dst", "operation 1".
    `range` is from where it points, as many bytes as are known to be used: all that a copy or fill
    covers, the buffer that a launch was given, and 1 where nothing but the pointer is known.
    """

    node_index: int
    """Of the graph's own node; for nodes inside a child graph or a body, of the one around them."""
    node_name: str
    place: str
    range: MemoryRange


def touches(executable: GraphExec, target: MemoryRange) -> bool:
    """Whether the executable points into `target`, or cannot be read."""
    if not target.nbytes:
        return False

    def find(address: int) -> MemoryRange | None:
        return target if target.holds(address) else None

    try:
        return any(
            touch.range.address < target.end and target.address < touch.range.end
            for touch in _walk(executable, find)
        )
    except ClosedError:
        return True


def manifest(executable: GraphExec) -> tuple[Touch, ...]:
    """Every pointer of the executable, in the order of its nodes.

    Words that no signature explains are taken for pointers if a live allocation holds them.
    Raises ClosedError if the definition was closed before it was first read.
    """
    return tuple(_walk(executable, executable.context.driver.memory_range))


def _walk(executable: GraphExec, find: Callable[[int], MemoryRange | None]) -> Iterator[Touch]:
    reader = _Reader(executable.graph, find)
    for node in executable.nodes:
        yield from reader.read(node)


class _Reader:
    """Reads nodes of one graph; `find` says whether an unexplained word is a pointer."""

    def __init__(self, graph: Graph, find: Callable[[int], MemoryRange | None]) -> None:
        self._labels: Mapping[NodeHandle, NodeLabel] = graph.labels
        self._find = find

    def read(self, node: Node) -> Iterator[Touch]:
        for body in node.children:
            for inner in body:
                for touch in self.read(inner):
                    place = f"{touch.node_name} {touch.place}"
                    yield Touch(node.index, node.name, place, touch.range)
        if isinstance(node.params, KernelNodeParams):
            yield from self._kernel(node, node.params)
            return
        for place, address, nbytes in _fields(node.params):
            if address:  # zero: the side of a copy that is an array, or memory not placed yet
                yield Touch(node.index, node.name, place, MemoryRange(address, nbytes))

    def _kernel(self, node: Node, params: KernelNodeParams) -> Iterator[Touch]:
        extents = self._extents(node)
        data = params.arguments.data
        for offset, nbytes in extents.items():
            address = int.from_bytes(data[offset : offset + _WORD], "little")
            if address:
                place = _place(params, offset)
                yield Touch(node.index, node.name, place, MemoryRange(address, nbytes))
        for argument in decode_arguments(params, node.signature, self._find):
            for pointer in argument.pointers:
                if pointer.address and pointer.offset not in extents:
                    place = _place(params, pointer.offset)
                    touched = MemoryRange(pointer.address, 1)
                    yield Touch(node.index, node.name, place, touched)

    def _extents(self, node: Node) -> dict[int, int]:
        """How many bytes the launch was given behind the pointer at each offset, where known.

        By place and not by address: after a rebinding the same argument still reaches as far.
        """
        label = self._labels.get(node.handle)
        operation = None if label is None else label.operation
        if operation is None or not isinstance(operation.params, KernelNodeParams):
            return {}
        given: dict[int, int] = {}
        for owner in operation.keep:
            with suppress(InputError):  # the kernel itself, or what says no range
                touched = range_of(owner)
                given[touched.address] = max(touched.nbytes, given.get(touched.address, 0))
        data = operation.params.arguments.data
        words = (
            (at, int.from_bytes(data[at : at + _WORD], "little"))
            for at in range(0, len(data) - _WORD + 1, _WORD)
        )
        return {at: given[word] for at, word in words if word in given}


def _place(params: KernelNodeParams, offset: int) -> str:
    for index, slot in enumerate(params.arguments.layout):
        if slot.offset <= offset < slot.offset + slot.size:
            inside = offset - slot.offset
            return f"argument {index}" + (f" +{inside}" if inside else "")
    return f"packed arguments +{offset}"


def _fields(params: NodeParams) -> Iterator[tuple[str, int, int]]:
    """Place, address and bytes of each address field of a node that is no kernel."""
    if isinstance(params, MemcpyNodeParams):
        dst = copy_extent(params, params.dst_pitch, params.dst_height)
        src = copy_extent(params, params.src_pitch, params.src_height)
        yield "dst", params.dst, dst
        yield "src", params.src, src
    elif isinstance(params, MemsetNodeParams):
        row = params.width * params.element_size
        yield "dst", params.dst, (params.height - 1) * params.pitch + row
    elif isinstance(params, BatchMemOpNodeParams):
        for index, operation in enumerate(params.operations):
            yield f"operation {index}", operation.address, operation.size
    elif isinstance(params, AllocNodeParams):
        yield "allocation", params.address, params.nbytes
    elif isinstance(params, FreeNodeParams):
        yield "freed", params.address, 1
