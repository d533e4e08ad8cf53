"""A definition read at once (`api.FrozenGraph`): raw kernel nodes, decoded one by one.

The nodes are columns: a record of each node, and the argument bytes of all.  The launch sizes and
attributes of a kernel node are bytes too, its `shape`.  Most nodes of a graph have one of a few
shapes, so each shape is decoded once.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from ostinato.driver.api import (
    AllocNodeParams,
    ChildGraphNodeParams,
    ConditionalNodeParams,
    Edge,
    EdgeType,
    FreeNodeParams,
    FunctionHandle,
    KernelArguments,
    KernelColumns,
    KernelNodeParams,
    LaunchAttributes,
    LaunchConfig,
    Link,
    NodeHandle,
    NodeKind,
    NodeParams,
    ParameterSlot,
)
from ostinato.driver.cuda import libcuda as cu
from ostinato.driver.cuda.launch import (
    attribute_words,
    config_of,
    packed_arguments,
)
from ostinato.driver.cuda.nodes import read_edge_data
from ostinato.errors import DriverError
from ostinato.records import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

RECORD = np.dtype(
    [
        ("function", np.uint64),
        ("start", np.uint64),
        ("size", np.uint32),
        ("shape", np.uint32),
        ("kind", np.int32),
        ("packed", np.uint32),
    ]
)
"""A node as `_launch.read_nodes` reads it.  `kind` is that of the node, or `UNREAD`.  A kernel's
argument bytes begin at `start` of the bytes of all nodes (`api.KernelColumns`); `shape` is the
index of its shape; `packed`: whether a library packed the arguments."""
UNREAD = -1
"""The kind of a kernel that only Python can read."""
RawNodes: TypeAlias = tuple[bytes, list[bytes], bytes, list[tuple[int, int]]]
"""The records, the shapes, the argument bytes of all nodes, and index and kind of the others."""

_RECORD = struct.Struct("=QQIIiI")
NOT_READ = _RECORD.pack(0, 0, 0, 0, UNREAD, 0)
"""The record of a node that is not read in C."""
_LAUNCH = struct.Struct("=7I")
_ATTRIBUTE = struct.Struct("=I16s")
_VALUE_BYTES = ctypes.sizeof(cu.LaunchAttributeValue)


@lru_cache(maxsize=4096)
def layout_bytes(layout: tuple[ParameterSlot, ...]) -> bytes:
    """Returns a layout as C takes it: 32-bit offset and size of each parameter."""
    return struct.pack(
        f"={2 * len(layout)}I", *(n for slot in layout for n in (slot.offset, slot.size))
    )


@lru_cache(maxsize=4096)
def layout_from(raw: bytes) -> tuple[ParameterSlot, ...]:
    """Returns a layout from these bytes; the same object for equal ones."""
    return tuple(ParameterSlot(*pair) for pair in struct.iter_unpack("=2I", raw))


def raw_kernel(params: KernelNodeParams) -> tuple[bytes, list[bytes], bytes, dict[int, bytes]]:
    """Returns a kernel node as `read_nodes` gives a graph of one, with the layout of its function.

    Raises struct.error for a number that the driver cannot take.
    """
    config, arguments, function = params.config, params.arguments, params.function
    size = len(arguments.data)
    record = _RECORD.pack(function, 0, size, 0, NodeKind.KERNEL, arguments.packed)
    shape = _LAUNCH.pack(*config.grid, *config.block, config.shared)
    return record, [shape], arguments.data, {function: layout_bytes(arguments.layout)}


class _Shape(NamedTuple):
    config: LaunchConfig
    words: tuple[str, ...]
    """Attributes for which a config has no field, if they were read."""
    attributes: LaunchAttributes


@lru_cache(maxsize=4096)
def _decoded(raw: bytes, attributes: tuple[int, ...], programmatic: bool) -> _Shape:
    sizes = _LAUNCH.unpack_from(raw)
    found: dict[int, cu.LaunchAttributeValue] = {}
    for identity, (has, value) in zip(
        attributes, _ATTRIBUTE.iter_unpack(raw[_LAUNCH.size :]), strict=True
    ):
        if has:
            found[identity] = cu.LaunchAttributeValue.from_buffer_copy(
                value.ljust(_VALUE_BYTES, b"\0")
            )
    config = config_of(sizes, found, programmatic=programmatic)
    words = attribute_words(found)
    return _Shape(config, words, replace(LaunchAttributes.of(config), others=words))


class EdgeArrays:
    """The edges of a graph in the driver's arrays."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sources = (ctypes.c_uint64 * count)()
        self.targets = (ctypes.c_uint64 * count)()
        self.data = (cu.EdgeDataStruct * count)()

    @property
    def plain(self) -> bool:
        """True if no edge has data besides the order."""
        raw = bytes(self.data)
        return raw == bytes(len(raw))

    def edges(self) -> tuple[Edge, ...]:
        sources, targets, data = self.sources, self.targets, self.data
        return tuple(
            Edge(NodeHandle(sources[i]), NodeHandle(targets[i]), read_edge_data(data[i]))
            for i in range(self.count)
        )

    def links(self, nodes: Sequence[NodeHandle]) -> frozenset[Link]:
        """Returns the edges by the indices of these nodes."""
        place: dict[int, int] = {node: index for index, node in enumerate(nodes)}
        count = self.count
        data: Iterable[tuple[int, ...]] = itertools.repeat(())
        if not self.plain:
            data = [
                (one.from_port, one.to_port, one.type) if any(bytes(one)) else ()
                for one in self.data[:count]
            ]
        ends = (map(place.__getitem__, handles[:count]) for handles in (self.sources, self.targets))
        return frozenset(zip(*ends, data, strict=False))

    def programmatic(self) -> frozenset[int]:
        """Returns the nodes that may start before a node that they depend on has ended."""
        if self.plain:
            return frozenset()
        programmatic = EdgeType.PROGRAMMATIC
        return frozenset(
            self.targets[i] for i in range(self.count) if self.data[i].type == programmatic
        )


class Other(NamedTuple):
    """A node that was decoded at once: no kernel, or a kernel that only Python can read."""

    kind: NodeKind | None
    """The kind; None if this release does not have it."""
    params: NodeParams | DriverError


class NodeDecoder(Protocol):
    """The parts of the driver that decoding needs."""

    def words_of(self, node: int, attributes: tuple[int, ...]) -> tuple[str, ...]: ...
    def note_config(self, node: int, config: LaunchConfig) -> None: ...


_HOLDERS = (ChildGraphNodeParams, ConditionalNodeParams)
_MEMORY_NODES = (AllocNodeParams, FreeNodeParams)


@dataclass(slots=True, eq=False)
class _FrozenFields:
    """The fields of `CudaFrozenGraph`.  `raw`: the kernels as they were read, with the `layouts` of
    their functions (`layout_bytes`); `others`: the other nodes, by their indices.  `read`: the
    attributes that the shapes hold; `rest`: those to be read when a node is decoded.
    `by_function`: a node may have attributes that the driver does not report."""

    decoder: NodeDecoder
    nodes: tuple[NodeHandle, ...]
    raw: RawNodes
    layouts: dict[int, bytes]
    others: dict[int, Other]
    edges: EdgeArrays
    read: tuple[int, ...]
    rest: tuple[int, ...]
    by_function: bool


class CudaFrozenGraph(_FrozenFields):
    """A frozen definition, with what is computed from its fields when it is first needed."""

    @cached_property
    def records(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.raw[0], RECORD)

    @cached_property
    def holders(self) -> list[int]:
        return [i for i, other in self.others.items() if isinstance(other.params, _HOLDERS)]

    @cached_property
    def memory_nodes(self) -> list[int]:
        return [i for i, other in self.others.items() if isinstance(other.params, _MEMORY_NODES)]

    @cached_property
    def _programmatic(self) -> frozenset[int]:
        return self.edges.programmatic()

    def kind(self, index: int) -> NodeKind:
        other = self.others.get(index)
        if other is None:
            return NodeKind.KERNEL
        if other.kind is None:
            assert isinstance(other.params, DriverError)
            raise other.params
        return other.kind

    def params(self, index: int) -> NodeParams:
        other = self.others.get(index)
        if other is not None:
            if isinstance(other.params, DriverError):
                raise other.params
            return other.params
        node, decoder = self.nodes[index], self.decoder
        raw = self.raw[1][self.records[index]["shape"]]
        shape = _decoded(raw, self.read, node in self._programmatic)
        words = decoder.words_of(node, self.rest) if self.rest else shape.words
        decoder.note_config(node, shape.config)
        function, arguments = self.kernel(index)
        return KernelNodeParams(function, shape.config, arguments, words)

    def kernel(self, index: int) -> tuple[FunctionHandle, KernelArguments]:
        function, start, size, _, _, packed = self.records[index].item()
        data = self.raw[2][start : start + size]
        layout = layout_from(self.layouts[function]) if data else ()
        arguments = packed_arguments(data, layout) if packed else KernelArguments(data, layout)
        return FunctionHandle(function), arguments

    @cached_property
    def kernels(self) -> KernelColumns:
        records = self.records
        columns = (records[name].tolist() for name in ("function", "size", "packed"))
        keys: list[Hashable] = list(zip(*columns, strict=True))
        for index in self.others:
            keys[index] = None
        return KernelColumns(keys, records["start"], records["size"], self.raw[2])

    @property
    def plain(self) -> bool:
        return self.edges.plain

    def links(self) -> frozenset[Link]:
        return self.edges.links(self.nodes)

    def attributes(self, index: int) -> LaunchAttributes | None:
        other = self.others.get(index)
        if other is None:
            record = self.records[index]
            return self._attributes_of(int(record["shape"]), int(record["function"]))
        if other.kind is not NodeKind.KERNEL:
            return None
        params = self.params(index)
        assert isinstance(params, KernelNodeParams)
        function = params.function if self.by_function else None
        has = LaunchAttributes.of(params.config)
        return replace(has, others=params.extra_attributes, function=function)

    def _attributes_of(self, shape: int, function: int) -> LaunchAttributes:
        has = _decoded(self.raw[1][shape], self.read, False).attributes
        return replace(has, function=FunctionHandle(function)) if self.by_function else has

    @cached_property
    def kinds_of_attributes(self) -> frozenset[LaunchAttributes]:
        # Only kernels have shapes.
        kinds: Iterable[tuple[int, int]] = ((shape, 0) for shape in range(len(self.raw[1])))
        if self.by_function:
            kernels = self.records[self.records["kind"] == NodeKind.KERNEL]
            kinds = set(zip(kernels["shape"].tolist(), kernels["function"].tolist(), strict=True))
        made = {self._attributes_of(*kind) for kind in kinds}
        others = map(self.attributes, self.others)
        return frozenset(made.union(one for one in others if one is not None))
