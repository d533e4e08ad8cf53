"""The records of a graph file's manifest.  Pure; `format` converts them to JSON and back.

A node's record holds the parameters as in the driver's protocol, but handles (functions, events,
conditions) are indices into the manifest's lists, and addresses are zero.  Each address is a
`PointerWord`, which names a block of memory and an offset in it.

Most graphs consist almost only of kernel nodes, thousands of them.  They are kept as columns
(`Kernels`), so that loading makes no record of each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ostinato.driver.api import (
    AllocNodeParams,
    BatchMemOpNodeParams,
    ConditionDefaults,
    EdgeData,
    FreeNodeParams,
    FunctionCode,
    FunctionHandle,
    KernelArguments,
    KernelNodeParams,
    LaunchConfig,
    MemcpyNodeParams,
    MemoryRange,
    MemsetNodeParams,
    NodeParams,
    ParameterSlot,
)
from ostinato.driver.context import Context
from ostinato.driver.signature import (
    BF16,
    BF16_TYPESTR,
    BYTES,
    Signature,
    array_interface,
    element_bytes,
)
from ostinato.graph.show.outline import OutlineEdge
from ostinato.graph.words import AddressField, address_fields
from ostinato.memory import Buffer
from ostinato.memory.ranges import Target

WORD = 8
"""Bytes of an address."""

PLAIN = EdgeData()
"""The data of nearly all edges; those that are read have this very object."""

PROOFS = ("moved", "signature", "allocation", "field")
"""Ways to recognize a pointer: the word moved with its memory between two captures; its signature
declares it; its value lies in a live allocation; it is an address field of its node kind."""


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """The machine and library on which a graph was saved."""

    driver: str
    device: str
    compute_capability: tuple[int, int]
    driver_version: str
    library: str


def machine_of(context: Context) -> MachineRecord:
    """Describes a context's device, its driver, and this library."""
    import ostinato

    driver = context.driver
    properties = driver.properties
    return MachineRecord(
        driver.capabilities.source_language,
        properties.name,
        properties.compute_capability,
        properties.driver_version,
        ostinato.__version__,
    )


@dataclass(frozen=True, slots=True)
class Look:
    """Type (in the array interface's form: "<f4"), shape, and strides in bytes of an array; None
    for strides in C order."""

    typestr: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None

    def __str__(self) -> str:
        strides = "" if self.strides is None else f" with strides {list(self.strides)}"
        return f"{self.typestr}{list(self.shape)}{strides}"


def look_of(target: Target) -> Look | None:
    """Returns the look of a target, None if untyped.  Raises InputError as `array_interface`."""
    if isinstance(target, MemoryRange) or (isinstance(target, Buffer) and target.dtype is BYTES):
        return None
    if isinstance(target, Buffer | np.ndarray):
        typestr = BF16_TYPESTR if target.dtype is BF16 else target.dtype.str
        return Look(typestr, tuple(target.shape), None)
    interface = array_interface(target)
    if interface is None:
        return None
    typestr = str(interface["typestr"])
    shape = tuple(int(n) for n in interface["shape"])
    strides = interface.get("strides")
    if strides is not None:
        strides = tuple(int(n) for n in strides)
        if strides == _in_order(shape, element_bytes(typestr)):
            strides = None
    return Look(typestr, shape, strides)


def _in_order(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Returns the strides in bytes of elements in C order."""
    return tuple(size * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def misfit(wanted: Look | None, given: Look | None) -> bool:
    """True if memory is laid out differently from what a graph was captured with.

    These are accepted: more rows, flat memory of bytes, and whole numbers of the same size in place
    of a type that NumPy lacks (bfloat16).
    """
    if wanted is None or given is None:
        return False
    if given.typestr[1:] == "u1" and len(given.shape) == 1 and given.strides is None:
        return False
    if wanted.strides != given.strides or wanted.typestr[2:] != given.typestr[2:]:
        return True
    kinds = {wanted.typestr[1], given.typestr[1]}
    if wanted.typestr != given.typestr and not ("V" in kinds and kinds <= {*"Vui"}):
        return True
    same = [n for n in wanted.shape if n != 1] == [n for n in given.shape if n != 1]
    more = len(wanted.shape) == len(given.shape) and wanted.shape[1:] == given.shape[1:]
    return not (same or more)


@dataclass(frozen=True, slots=True)
class FunctionRecord(FunctionCode):
    """A kernel, without `data`.  `digest` names the image's bytes in the file, under "code/"; a
    host kernel has `target` instead.  `signature`: the kernel's; None if unknown."""

    digest: str = ""
    parameters: tuple[ParameterSlot, ...] = ()
    signature: Signature | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of memory that is allocated as a whole.

    `phase`: the address at the capture modulo 256, which the new address has too.  `node`: index of
    the alloc node that allocates the block, None for other memory.
    """

    nbytes: int
    phase: int
    pinned: bool
    node: int | None


@dataclass(frozen=True, slots=True)
class NamedBuffer:
    """An input, output or constant, `into` bytes into a block.  `stored`: the file holds its
    content (constants only).  `look`: the captured array, if known; `shape` and `dtype` describe
    bytes where NumPy has no such type."""

    name: str
    roles: tuple[str, ...]
    block: int
    into: int
    shape: tuple[int, ...]
    dtype: str
    stored: bool
    look: Look | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize_of(self.dtype)


class PointerWord(NamedTuple):
    """An address in a node.  `place`: offset in a kernel's arguments, or name of a field
    (`address_fields`)."""

    place: int | str
    block: int
    into: int
    proof: str


@dataclass(frozen=True, slots=True)
class ConditionWord:
    """A word of a kernel's arguments that holds a condition's handle."""

    offset: int
    condition: int


@dataclass(frozen=True, slots=True)
class NodeRecord:
    name: str
    params: NodeParams
    pointers: tuple[PointerWord, ...] = ()
    conditions: tuple[ConditionWord, ...] = ()
    hints: tuple[str, ...] = ()
    """Launch attributes, in words, that the loaded graph lacks."""
    inner: tuple[GraphRecord, ...] = ()
    """The child graph, or the bodies of a conditional node."""
    unused: tuple[ParameterSlot, ...] = ()
    """Bytes of a kernel's arguments that differed between two captures but have no effect."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """The kernel nodes of a graph as columns in node order, with one entry per kernel; `words` has
    one entry per word.

    `known`: the manifest's functions; `functions` are indices into it.  `laid`: whether the
    arguments have the layout of the function's parameters; otherwise only their bytes are known.
    `packed`: whether the arguments are passed as one buffer.
    """

    known: Sequence[FunctionRecord]
    functions: Sequence[int]
    launches: Sequence[LaunchConfig]
    laid: Sequence[bool]
    packed: Sequence[bool]
    sizes: Sequence[int]
    """Bytes of arguments of each kernel."""
    starts: npt.NDArray[np.int64]
    """Offset in `data` of each kernel's arguments, a multiple of a word; at last the end."""
    data: bytes
    words: Words
    names: Mapping[int, str]
    """Names that differ from the function's, by kernel."""
    conditions: Mapping[int, tuple[ConditionWord, ...]]
    hints: Mapping[int, tuple[str, ...]]
    unused: Mapping[int, tuple[ParameterSlot, ...]]

    @classmethod
    def of(cls, known: Sequence[FunctionRecord], nodes: Iterable[NodeRecord]) -> Kernels:
        """Builds the columns from the nodes that are kernels."""
        made = [(node, node.params) for node in nodes if isinstance(node.params, KernelNodeParams)]
        arguments = [params.arguments for _, params in made]
        functions = [int(params.function) for _, params in made]
        words = [(i, word) for i, (node, _) in enumerate(made) for word in node.pointers]
        proofs = {proof: place for place, proof in enumerate(PROOFS)}
        return cls(
            known,
            functions,
            [params.config for _, params in made],
            [bool(one.layout) for one in arguments],
            [one.packed for one in arguments],
            [len(one.data) for one in arguments],
            starts_of([len(one.data) for one in arguments]),
            b"".join(one.data + bytes(-len(one.data) % WORD) for one in arguments),
            Words(
                _column(i for i, _ in words),
                _column(int(word.place) for _, word in words),
                _column(word.block for _, word in words),
                _column(word.into for _, word in words),
                _column(proofs[word.proof] for _, word in words),
            ),
            {i: n.name for i, (n, _) in enumerate(made) if n.name != known[functions[i]].name},
            {i: node.conditions for i, (node, _) in enumerate(made) if node.conditions},
            {i: node.hints for i, (node, _) in enumerate(made) if node.hints},
            {i: node.unused for i, (node, _) in enumerate(made) if node.unused},
        )

    def __len__(self) -> int:
        return len(self.functions)

    def name(self, index: int) -> str:
        return self.names.get(index) or self.known[self.functions[index]].name

    def layout(self, index: int) -> tuple[ParameterSlot, ...]:
        """Returns the slots of a kernel's arguments; empty if unknown."""
        return self.known[self.functions[index]].parameters if self.laid[index] else ()

    def nodes(self) -> list[NodeRecord]:
        """Returns a record of each kernel."""
        words = zip(*(column.tolist() for column in self.words), strict=True)
        pointers: list[list[PointerWord]] = [[] for _ in self.functions]
        for kernel, place, block, into, proof in words:
            pointers[kernel].append(PointerWord(place, block, into, PROOFS[proof]))
        made = []
        for index, start in enumerate(self.starts[:-1].tolist()):
            data = self.data[start : start + self.sizes[index]]
            arguments = KernelArguments(data, self.layout(index), self.packed[index])
            function = FunctionHandle(self.functions[index])
            made.append(
                NodeRecord(
                    self.name(index),
                    KernelNodeParams(function, self.launches[index], arguments),
                    tuple(pointers[index]),
                    self.conditions.get(index, ()),
                    self.hints.get(index, ()),
                    unused=self.unused.get(index, ()),
                )
            )
        return made


class Words(NamedTuple):
    """The addresses in kernels' arguments as columns in kernel order: the fields of `PointerWord`
    after the kernel's index; `proof` is an index into `PROOFS`."""

    kernel: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    block: npt.NDArray[np.int64]
    into: npt.NDArray[np.int64]
    proof: npt.NDArray[np.int64]


def _column(numbers: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(numbers, np.int64)


def starts_of(sizes: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the start of each kernel's arguments, word-aligned, and at last the end."""
    ends = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum((np.asarray(sizes, np.int64) + WORD - 1) // WORD * WORD, out=ends[1:])
    return ends


@dataclass(frozen=True, slots=True, eq=False)
class GraphRecord:
    """A graph.  `others`: the nodes that are not kernels, by index; kernels take the remaining
    indices in order."""

    kernels: Kernels
    others: Mapping[int, NodeRecord]
    edges: Sequence[OutlineEdge]

    @classmethod
    def of(
        cls,
        known: Sequence[FunctionRecord],
        nodes: Sequence[NodeRecord],
        edges: Sequence[OutlineEdge],
    ) -> GraphRecord:
        """Builds a graph's record; `known`: the manifest's functions."""
        kernels = Kernels.of(known, nodes)
        others = {i: n for i, n in enumerate(nodes) if not isinstance(n.params, KernelNodeParams)}
        return cls(kernels, others, edges)

    def __len__(self) -> int:
        return len(self.kernels) + len(self.others)

    @property
    def nodes(self) -> list[NodeRecord]:
        """A record of each node, built on each access."""
        kernels = iter(self.kernels.nodes())
        return [self.others.get(place) or next(kernels) for place in range(len(self))]

    def graphs(self) -> list[GraphRecord]:
        """Returns this graph and all graphs nested in its nodes."""
        inner = [graph for node in self.others.values() for graph in node.inner]
        return [self, *(one for graph in inner for one in graph.graphs())]

    @property
    def size(self) -> tuple[int, int]:
        """Numbers of nodes and edges, including nested graphs."""
        every = self.graphs()
        return sum(map(len, every)), sum(len(graph.edges) for graph in every)

    def walk(self) -> list[NodeRecord]:
        """Returns all nodes; the nodes of nested graphs follow the node that holds them."""
        found = []
        for node in self.nodes:
            found.append(node)
            for inner in node.inner:
                found += inner.walk()
        return found


@dataclass(frozen=True, slots=True)
class GraphManifest:
    """The manifest of a file.  `checked`: the file passed its check when it was saved.  `tensors`:
    digests of the tensors' bytes, by name ("inputs/x").  `key`: the key of a store's graph as text,
    else empty."""

    machine: MachineRecord
    functions: tuple[FunctionRecord, ...]
    blocks: tuple[Block, ...]
    buffers: tuple[NamedBuffer, ...]
    conditions: tuple[ConditionDefaults, ...]
    events: int
    graph: GraphRecord
    checked: bool
    tensors: Mapping[str, str]
    key: str = ""

    def names(self, role: str) -> list[str]:
        """Returns the names of the buffers that have a role."""
        return [buffer.name for buffer in self.buffers if role in buffer.roles]

    def proofs(self) -> dict[str, int]:
        """Returns the number of pointers for each proof."""
        counts: dict[str, int] = {}
        for node in self.graph.walk():
            for word in node.pointers:
                counts[word.proof] = counts.get(word.proof, 0) + 1
        return counts

    def with_data(self, changes: Mapping[tuple[int, int], bytes]) -> GraphManifest:
        """Returns a copy with other bytes in kernel arguments, also where an address was; `changes`
        is by index of the node in `graph.walk()` and offset."""
        of: dict[int, dict[int, bytes]] = {}
        for (place, offset), value in changes.items():
            of.setdefault(place, {})[offset] = value
        places = itertools.count()

        def changed(graph: GraphRecord) -> GraphRecord:
            return GraphRecord.of(self.functions, [*map(changed_node, graph.nodes)], graph.edges)

        def changed_node(node: NodeRecord) -> NodeRecord:
            mine = of.get(next(places))
            if mine is not None and isinstance(node.params, KernelNodeParams):
                data = bytearray(node.params.arguments.data)
                for offset, value in mine.items():
                    data[offset : offset + len(value)] = value
                pointers = tuple(word for word in node.pointers if word.place not in mine)
                return replace(node, params=node.params.with_data(bytes(data)), pointers=pointers)
            return replace(node, inner=tuple(map(changed, node.inner))) if node.inner else node

        return replace(self, graph=changed(self.graph))


def fields_of(params: NodeParams) -> dict[str, AddressField]:
    """Returns the address fields of a node that is no kernel, by their names in a file; none for an
    alloc node, whose address the driver chooses."""
    if isinstance(params, AllocNodeParams):
        return {}
    return {field.place: field for field in address_fields(params)}


def with_addresses(params: NodeParams, at: Mapping[str, int]) -> NodeParams:
    """Returns the parameters with other addresses; fields without one become zero."""
    match params:
        case MemcpyNodeParams():
            return replace(params, dst=at.get("dst", 0), src=at.get("src", 0))
        case MemsetNodeParams():
            return replace(params, dst=at.get("dst", 0))
        case FreeNodeParams():
            return FreeNodeParams(at.get("freed", 0))
        case BatchMemOpNodeParams():
            operations = enumerate(params.operations)
            return BatchMemOpNodeParams(
                tuple(replace(o, address=at.get(f"operation {i}", 0)) for i, o in operations)
            )
        case _:
            return params


@lru_cache(maxsize=256)
def itemsize_of(dtype: str) -> int:
    """Returns the bytes of an element of a NumPy type string; 0 if it is not plain numbers."""
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        return 0
    return 0 if found.hasobject or found.str != dtype else found.itemsize
