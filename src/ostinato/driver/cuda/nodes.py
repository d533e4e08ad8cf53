"""Converts nodes and edges between records and cuda.h's structures; kernels are in `launch`.

All functions are pure: structures in, records out, and the other way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ostinato.driver.api import (
    BatchMemOpNodeParams,
    ConditionalHandle,
    ConditionalKind,
    ConditionalNodeParams,
    Edge,
    EdgeData,
    EdgeType,
    GraphHandle,
    MemcpyNodeParams,
    MemOp,
    MemOpKind,
    MemsetNodeParams,
    OpaqueNodeParams,
)
from ostinato.driver.cuda import libcuda as cu
from ostinato.driver.order import in_order
from ostinato.errors import Status, driver_error
from ostinato.records import dataclass

ELEMENT_SIZES = (1, 2, 4)
"""The possible sizes of a fill's elements, in bytes."""

# CUstreamBatchMemOpType
_WAIT_32, _WRITE_32, _WAIT_64, _WRITE_64 = 1, 2, 4, 5
_WAIT_KIND_MASK = 0x3


def unsigned(value: int, size: int, sizes: tuple[int, ...], seam: str) -> int:
    """Returns `value` if it fits `size` bytes without a sign: ctypes would cut it silently.

    Raises INVALID_VALUE for a value that does not fit, and for a size that is not in `sizes`.
    """
    if size not in sizes:
        raise driver_error(Status.INVALID_VALUE, seam, f"{size} bytes; it takes one of {sizes}")
    if not 0 <= value < 1 << (8 * size):
        raise driver_error(Status.INVALID_VALUE, seam, f"{value} does not fit into {size} bytes")
    return value


def fill_memcpy(
    raw: cu.Memcpy3D, params: MemcpyNodeParams, source_kind: int, target_kind: int
) -> None:
    """Fills a copy from linear to linear memory.  The kinds are CUmemorytype."""
    raw.srcMemoryType, raw.dstMemoryType = source_kind, target_kind
    if source_kind == cu.MEMORY_HOST:
        raw.srcHost = params.src
    else:
        raw.srcDevice = params.src
    if target_kind == cu.MEMORY_HOST:
        raw.dstHost = params.dst
    else:
        raw.dstDevice = params.dst
    raw.WidthInBytes, raw.Height, raw.Depth = params.width, params.height, params.depth
    if params.height > 1 or params.depth > 1:
        # Only then: a pitch has an upper limit (2 GiB), a plain copy has none.
        raw.srcPitch = params.src_pitch or params.width
        raw.dstPitch = params.dst_pitch or params.width
        raw.srcHeight = params.src_height or params.height
        raw.dstHeight = params.dst_height or params.height


def read_memcpy(raw: cu.Memcpy3D) -> MemcpyNodeParams:
    """Reads a copy: adds offsets to the addresses, and reads dense pitches and heights as zero."""
    size = {"width": raw.WidthInBytes, "height": raw.Height or 1, "depth": raw.Depth or 1}
    source = _start(raw.srcMemoryType, raw.srcHost, raw.srcDevice)
    target = _start(raw.dstMemoryType, raw.dstHost, raw.dstDevice)
    if source is None or target is None:
        return MemcpyNodeParams(dst=target or 0, src=source or 0, opaque=True, **size)
    source += (raw.srcZ * raw.srcHeight + raw.srcY) * raw.srcPitch + raw.srcXInBytes
    target += (raw.dstZ * raw.dstHeight + raw.dstY) * raw.dstPitch + raw.dstXInBytes
    if size["height"] == 1 and size["depth"] == 1:
        return MemcpyNodeParams(dst=target, src=source, **size)
    return MemcpyNodeParams(
        dst=target,
        src=source,
        dst_pitch=_unless(raw.dstPitch, size["width"]),
        src_pitch=_unless(raw.srcPitch, size["width"]),
        dst_height=_unless(raw.dstHeight, size["height"]),
        src_height=_unless(raw.srcHeight, size["height"]),
        **size,
    )


def copy_ends(raw: cu.Memcpy3D) -> tuple[CopyEnd, CopyEnd]:
    """Returns source and target of a copy."""
    source = _start(raw.srcMemoryType, raw.srcHost, raw.srcDevice)
    target = _start(raw.dstMemoryType, raw.dstHost, raw.dstDevice)
    return CopyEnd(raw.srcMemoryType, source or 0), CopyEnd(raw.dstMemoryType, target or 0)


@dataclass(frozen=True, slots=True)
class CopyEnd:
    """One side of a copy: its CUmemorytype and its address."""

    kind: int
    address: int


def _start(kind: int, host: int | None, device: int) -> int | None:
    if kind == cu.MEMORY_HOST:
        return host or 0
    if kind in (cu.MEMORY_DEVICE, cu.MEMORY_UNIFIED):
        return device
    return None  # an array


def _unless(value: int, dense: int) -> int:
    return 0 if value == dense else value


def fill_memset(raw: cu.MemsetParams, params: MemsetNodeParams, context: int, seam: str) -> None:
    """Fills a memset.  Raises INVALID_VALUE for a value that does not fit its element."""
    raw.dst = params.dst
    raw.value = unsigned(params.value, params.element_size, ELEMENT_SIZES, seam)
    raw.elementSize = params.element_size
    raw.width, raw.height = params.width, params.height
    raw.pitch = params.pitch
    raw.ctx = context


def read_memset(raw: cu.MemsetParams) -> MemsetNodeParams:
    height = raw.height or 1
    return MemsetNodeParams(
        dst=raw.dst,
        value=raw.value,
        element_size=raw.elementSize,
        width=raw.width,
        height=height,
        pitch=raw.pitch if height > 1 else 0,
    )


def mem_op_array(params: BatchMemOpNodeParams, seam: str) -> ctypes.Array[cu.MemOpStruct]:
    """Returns the array.  Raises INVALID_VALUE for a wrong size, or a value that does not fit."""
    array = (cu.MemOpStruct * len(params.operations))()
    for slot, operation in zip(array, params.operations, strict=True):
        value = unsigned(operation.value, operation.size, (4, 8), seam)
        wide, write = operation.size == 8, operation.kind is MemOpKind.WRITE
        if write:
            slot.waitValue.operation = _WRITE_64 if wide else _WRITE_32
        else:
            slot.waitValue.operation = _WAIT_64 if wide else _WAIT_32
            slot.waitValue.flags = int(operation.kind)
        slot.waitValue.address = operation.address
        slot.waitValue.value64 = value
    return array


def read_batch(raw: cu.BatchMemOpParams) -> BatchMemOpNodeParams | OpaqueNodeParams:
    """Reads a batch; opaque if it holds a barrier or a flush, for which there is no `MemOp`."""
    if not raw.count:
        return BatchMemOpNodeParams(())
    array = (cu.MemOpStruct * raw.count).from_address(raw.paramArray)
    operations: list[MemOp] = []
    for slot in array:
        value = slot.waitValue
        if slot.operation in (_WRITE_32, _WRITE_64):
            kind, wide = MemOpKind.WRITE, slot.operation == _WRITE_64
        elif slot.operation in (_WAIT_32, _WAIT_64):
            kind, wide = MemOpKind(value.flags & _WAIT_KIND_MASK), slot.operation == _WAIT_64
        else:
            return OpaqueNodeParams("a batch of memory operations with a barrier or a flush")
        number = value.value64 if wide else value.value64 & 0xFFFFFFFF
        operations.append(MemOp(kind, value.address, number, 8 if wide else 4))
    return BatchMemOpNodeParams(tuple(operations))


def read_conditional(raw: cu.ConditionalParams) -> ConditionalNodeParams:
    bodies: tuple[GraphHandle, ...] = ()
    if raw.phGraph_out and raw.size:
        graphs = (ctypes.c_uint64 * raw.size).from_address(raw.phGraph_out)
        bodies = tuple(GraphHandle(graph) for graph in graphs)
    return ConditionalNodeParams(
        ConditionalHandle(raw.handle), ConditionalKind(raw.type), raw.size, bodies
    )


def edge_array(edge_data: Sequence[EdgeData]) -> ctypes.Array[cu.EdgeDataStruct]:
    """Returns edge data in the driver's format."""
    array = (cu.EdgeDataStruct * len(edge_data))()
    for slot, data in zip(array, edge_data, strict=True):
        slot.from_port, slot.to_port, slot.type = data.from_port, data.to_port, int(data.type)
    return array


def read_edge_data(raw: cu.EdgeDataStruct) -> EdgeData:
    return EdgeData(raw.from_port, raw.to_port, EdgeType(raw.type))


def has_cycle(edges: Sequence[Edge]) -> bool:
    """True if the edges hold a cycle."""
    ends = {node for edge in edges for node in (edge.source, edge.target)}
    places = {node: place for place, node in enumerate(ends)}
    by_place = [(places[edge.source], places[edge.target]) for edge in edges]
    return in_order(len(places), by_place) is None
