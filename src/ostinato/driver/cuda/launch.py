"""Converts kernel launches between records and cuda.h's structures: arguments and attributes.

All functions are pure: records in, structures out, and the other way.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ostinato.driver.api import (
    KernelArguments,
    KernelNodeParams,
    KernelTable,
    LaunchConfig,
    ParameterSlot,
)
from ostinato.driver.cuda import libcuda as cu
from ostinato.records import dataclass

# The heads of the blocks below, in the format of `struct`: CUlaunchConfig, and
# CUDA_KERNEL_NODE_PARAMS_v2.  A test compares them with the structures.
LAUNCH_HEAD = "=7I4xQQI4x"
NODE_HEAD = "=Q7I4xQQQQ"
_HEAD_START, _HEAD_END = struct.Struct("=Q7I4x"), struct.Struct("=QQQQ")  # of NODE_HEAD

_WORD = 8
_EXTRA_WORDS_GIVEN = 6  # the two pairs, the end, and the size to which one of them points
_EXTRA_WORDS_READ = 64

SETTABLE = (cu.ATTRIBUTE_CLUSTER_DIMENSION, cu.ATTRIBUTE_COOPERATIVE, cu.ATTRIBUTE_PRIORITY)
SHOWN = (
    *SETTABLE,
    cu.ATTRIBUTE_ACCESS_POLICY_WINDOW,
    cu.ATTRIBUTE_CLUSTER_SCHEDULING,
    cu.ATTRIBUTE_MEM_SYNC_DOMAIN,
    cu.ATTRIBUTE_MEM_SYNC_DOMAIN_MAP,
    cu.ATTRIBUTE_PREFERRED_CLUSTER,
    cu.ATTRIBUTE_DEVICE_UPDATABLE,
    cu.ATTRIBUTE_SHARED_CARVEOUT,
)
# CUclusterSchedulingPolicy
_LOAD_BALANCING = 2
"""The policy for blocks of clusters that is shown.  The driver reports 1 (spread) for a captured
launch that requests no policy (580.159)."""


@dataclass(slots=True, eq=False)
class PreparedLaunch:
    """A launch that can be repeated, from any thread: the same arguments, config and stream.

    It keeps `arguments` alive, so that their `id` identifies them.  `call` returns the status, or
    None, without a launch, if another context than the driver's is current.
    """

    stream: int
    function: int
    config: LaunchConfig
    arguments: KernelArguments
    attributes: Attributes | None
    call: Callable[[], int | None]


class Attributes:
    """A launch's attributes in the driver's format."""

    def __init__(self, config: LaunchConfig) -> None:
        values = attribute_values(config, launch=True)
        self.count = len(values)
        self._array = (cu.LaunchAttribute * len(values))()
        for slot, (identity, value) in zip(self._array, values.items(), strict=True):
            slot.id = identity
            slot.value = value
        self.address = ctypes.addressof(self._array)


attributes_of = functools.lru_cache(maxsize=1024)(Attributes)
"""Returns the attributes of a config, one object for all equal configs."""


# ------------------------------------------------------------------------------------- arguments

# A block is one piece of memory that holds all data of one call: the head, the pointers, and the
# argument bytes to which they point.  One `pack_into` instead of ctypes structures and arrays
# filled field by field: a launch against a libcuda that does nothing went from 4.2 to 2.6 µs.


@functools.lru_cache(maxsize=1024)
def _block_type(
    head: str, words: int, nbytes: int
) -> tuple[struct.Struct, type[ctypes.Array[ctypes.c_char]], int]:
    """Returns the packing of a block, its ctypes array type, and the offset of its words."""
    packing = struct.Struct(f"{head}{words}Q{nbytes}s")
    return packing, ctypes.c_char * packing.size, struct.calcsize(head)


class ParameterBlock(NamedTuple):
    """A block, and the addresses inside it for kernelParams and extra: one of them, or neither
    without arguments."""

    memory: ctypes.Array[ctypes.c_char]
    params: int | None
    extra: int | None


def _parts(
    head: str, arguments: KernelArguments
) -> tuple[struct.Struct, ctypes.Array[ctypes.c_char], int, int, Sequence[int]]:
    """Returns a block's packing, its memory, kernelParams and extra (0 for none), and its words."""
    data, layout = arguments.data, arguments.layout
    if layout and not arguments.packed:
        count = len(layout)
        packing, kind, start = _block_type(head, count, len(data))
        memory = kind()
        words = ctypes.addressof(memory) + start
        first = words + _WORD * count
        return packing, memory, words, 0, [first + slot.offset for slot in layout]
    packing, kind, start = _block_type(head, _EXTRA_WORDS_GIVEN if data else 0, len(data))
    memory = kind()
    if not data:
        return packing, memory, 0, 0, ()
    words = ctypes.addressof(memory) + start
    pair = cu.EXTRA_BUFFER_POINTER, words + _WORD * _EXTRA_WORDS_GIVEN
    size = cu.EXTRA_BUFFER_SIZE, words + _WORD * 5
    return packing, memory, 0, words, (*pair, *size, cu.EXTRA_END, len(data))


def launch_block(
    config: LaunchConfig, stream: int, attributes: Attributes | None, arguments: KernelArguments
) -> ParameterBlock:
    """Makes a block that begins with a CUlaunchConfig.  Raises struct.error as `node_block`."""
    packing, memory, params, extra, words = _parts(LAUNCH_HEAD, arguments)
    given = (0, 0) if attributes is None else (attributes.address, attributes.count)
    sizes = *config.grid, *config.block, config.shared
    packing.pack_into(memory, 0, *sizes, stream, *given, *words, arguments.data)
    return ParameterBlock(memory, params or None, extra or None)


def node_block(params: KernelNodeParams, context: int) -> ctypes.Array[ctypes.c_char]:
    """Makes a block that begins with a CUDA_KERNEL_NODE_PARAMS_v2.

    Raises struct.error if a number does not fit its field.
    """
    config, arguments = params.config, params.arguments
    packing, memory, pointers, extra, words = _parts(NODE_HEAD, arguments)
    sizes = *config.grid, *config.block, config.shared
    ends = pointers, extra, 0, context
    packing.pack_into(memory, 0, params.function, *sizes, *ends, *words, arguments.data)
    return memory


class NodeBlocks:
    """The blocks of `node_block` for many rows of a table, in one piece of memory.

    The blocks point to the table's own bytes.
    """

    def __init__(self, kernels: KernelTable, rows: Sequence[int], context: int) -> None:
        """Raises struct.error as `node_block` does."""
        layouts, sizes, packed = kernels.layouts, kernels.sizes, kernels.packed
        laid = [bool(layouts[row]) and not packed[row] for row in rows]
        counts = [
            len(layouts[row]) if apart else _EXTRA_WORDS_GIVEN * (sizes[row] > 0)
            for row, apart in zip(rows, laid, strict=True)
        ]
        self._table = kernels
        self._words = (ctypes.c_uint64 * sum(counts))()
        here = ctypes.addressof(self._words)
        data = ctypes.addressof(ctypes.c_char.from_buffer(kernels.data)) if kernels.data else 0
        # Data that many rows share is packed once, keyed by the identity of the table's objects.
        starts: dict[tuple[int, int], bytes] = {}
        offsets: dict[int, list[int]] = {}
        words: list[int] = []
        heads: list[bytes] = []
        for row, count, apart in zip(rows, counts, laid, strict=True):
            function, config, layout = kernels.functions[row], kernels.configs[row], layouts[row]
            first, at = data + kernels.starts[row], here if count else 0
            start = starts.get((function, id(config)))
            if start is None:
                shape = (*config.grid, *config.block, config.shared)
                start = starts[function, id(config)] = _HEAD_START.pack(function, *shape)
            heads.append(start)
            if apart:
                known = offsets.get(id(layout))
                if known is None:
                    known = offsets[id(layout)] = [slot.offset for slot in layout]
                words += [first + offset for offset in known]
                heads.append(_HEAD_END.pack(at, 0, 0, context))
            else:
                if count:
                    words += (cu.EXTRA_BUFFER_POINTER, first)
                    words += (cu.EXTRA_BUFFER_SIZE, at + _WORD * 5, cu.EXTRA_END, sizes[row])
                heads.append(_HEAD_END.pack(0, at, 0, context))
            here += _WORD * count
        self._words[:] = words  # type: ignore[assignment]
        self._heads = ctypes.create_string_buffer(b"".join(heads))
        begin, step = ctypes.addressof(self._heads), struct.calcsize(NODE_HEAD)
        self.addresses = range(begin, begin + step * len(rows), step)


def read_arguments(
    kernel_params: int | None, extra: int | None, layout: tuple[ParameterSlot, ...]
) -> KernelArguments:
    """Copies the arguments from a node's memory, which belongs to the driver.  `layout`: that of
    the function."""
    if kernel_params and layout:
        end = max(slot.offset + slot.size for slot in layout)
        data = bytearray(end)
        pointers = (ctypes.c_void_p * len(layout)).from_address(kernel_params)
        for pointer, slot in zip(pointers, layout, strict=True):
            if pointer and slot.size:
                data[slot.offset : slot.offset + slot.size] = ctypes.string_at(pointer, slot.size)
        return KernelArguments(bytes(data), layout)
    if extra:
        return packed_arguments(_read_extra(extra), layout)
    return KernelArguments(b"", ())


def packed_arguments(data: bytes, layout: tuple[ParameterSlot, ...]) -> KernelArguments:
    """Returns the arguments of a buffer, with the function's layout only if it fits the buffer."""
    fits = all(slot.offset + slot.size <= len(data) for slot in layout)
    return KernelArguments(data, layout if fits else (), packed=True)


def _read_extra(extra: int) -> bytes:
    words = (ctypes.c_void_p * _EXTRA_WORDS_READ).from_address(extra)
    buffer, size = 0, 0
    for index in range(0, _EXTRA_WORDS_READ, 2):
        key = words[index]
        if not key:  # the end
            break
        value = words[index + 1] or 0
        if key == cu.EXTRA_BUFFER_POINTER:
            buffer = value
        elif key == cu.EXTRA_BUFFER_SIZE and value:
            size = ctypes.c_size_t.from_address(value).value
    return ctypes.string_at(buffer, size) if buffer and size else b""


# ------------------------------------------------------------------------------------- attributes


def attribute_values(config: LaunchConfig, *, launch: bool) -> dict[int, cu.LaunchAttributeValue]:
    """Returns the attributes that a config requests.

    Programmatic stream serialization is valid for launches only; a node has it in its edges.
    """
    found: dict[int, cu.LaunchAttributeValue] = {}
    make = cu.LaunchAttributeValue
    if config.cluster is not None:
        found[cu.ATTRIBUTE_CLUSTER_DIMENSION] = make(clusterDim=cu.Dimensions(*config.cluster))
    if config.cooperative:
        found[cu.ATTRIBUTE_COOPERATIVE] = make(cooperative=1)
    if config.priority is not None:
        found[cu.ATTRIBUTE_PRIORITY] = make(priority=config.priority)
    if config.programmatic and launch:
        found[cu.ATTRIBUTE_PROGRAMMATIC_SERIALIZATION] = make(
            programmaticStreamSerializationAllowed=1
        )
    return found


def config_of(
    sizes: Sequence[int], found: dict[int, cu.LaunchAttributeValue], *, programmatic: bool
) -> LaunchConfig:
    """Returns the launch shape of a node with these attributes and `sizes`: grid (three numbers),
    block (three) and dynamic shared memory.  An attribute that the device lacks counts as not
    set."""
    cluster = None
    if value := found.get(cu.ATTRIBUTE_CLUSTER_DIMENSION):
        size = value.clusterDim
        if max(size.x, size.y, size.z) > 1:  # zeros: not set
            cluster = (size.x, size.y, size.z)
    cooperative, priority = found.get(cu.ATTRIBUTE_COOPERATIVE), found.get(cu.ATTRIBUTE_PRIORITY)
    return LaunchConfig(
        grid=(sizes[0], sizes[1], sizes[2]),
        block=(sizes[3], sizes[4], sizes[5]),
        shared=sizes[6],
        cluster=cluster,
        cooperative=cooperative is not None and cooperative.cooperative != 0,
        programmatic=programmatic,
        priority=None if priority is None else priority.priority or None,
    )


def attribute_words(found: dict[int, cu.LaunchAttributeValue]) -> tuple[str, ...]:
    """Returns in words the attributes that are set and for which `LaunchConfig` has no field."""
    words: list[str] = []
    if (value := found.get(cu.ATTRIBUTE_ACCESS_POLICY_WINDOW)) and value.words[1]:
        words.append(f"access policy window of {value.words[1]} bytes at {value.words[0]:#x}")
    if (value := found.get(cu.ATTRIBUTE_CLUSTER_SCHEDULING)) and (
        value.clusterSchedulingPolicyPreference == _LOAD_BALANCING
    ):
        words.append("cluster scheduling: load balancing")
    if (value := found.get(cu.ATTRIBUTE_MEM_SYNC_DOMAIN)) and value.memSyncDomain:
        words.append("memory synchronisation domain: remote")
    if value := found.get(cu.ATTRIBUTE_MEM_SYNC_DOMAIN_MAP):
        domains = (value.memSyncDomainMap.default_, value.memSyncDomainMap.remote)
        if domains not in ((0, 0), (0, 1)):
            words.append(f"memory synchronisation domains {domains[0]} and {domains[1]}")
    if value := found.get(cu.ATTRIBUTE_PREFERRED_CLUSTER):
        size = value.preferredClusterDim
        if max(size.x, size.y, size.z) > 1:
            words.append(f"preferred cluster {size.x} × {size.y} × {size.z}")
    if (value := found.get(cu.ATTRIBUTE_DEVICE_UPDATABLE)) and value.deviceUpdatable:
        words.append("updatable from the device")
    if (value := found.get(cu.ATTRIBUTE_SHARED_CARVEOUT)) and 0 < value.sharedMemCarveout <= 100:
        words.append(f"shared memory carveout {value.sharedMemCarveout} %")
    return tuple(words)


def default_value(identity: int) -> cu.LaunchAttributeValue:
    value = cu.LaunchAttributeValue()
    if identity == cu.ATTRIBUTE_CLUSTER_DIMENSION:
        value.clusterDim = cu.Dimensions(1, 1, 1)
    return value
