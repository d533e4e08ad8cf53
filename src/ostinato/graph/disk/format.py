"""What a graph file says: the manifest's records, to JSON and back.  Pure.

docs/graph-file.md describes the format.  Nothing in a file is believed: `parse` bounds every number
and compares all that refer to each other, and raises GraphFileError with the place in the manifest.

A record of a node holds the node's parameters as the driver's protocol has them, with places in the
manifest's lists for handles (functions, events, conditions) and zero for addresses.  Where an
address belongs, a `PointerWord` says into which block of memory it goes.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ostinato.driver.api import (
    AllocNodeParams,
    BatchMemOpNodeParams,
    ChildGraphNodeParams,
    ConditionalHandle,
    ConditionalKind,
    ConditionalNodeParams,
    ConditionDefaults,
    EdgeData,
    EdgeType,
    EmptyNodeParams,
    EventHandle,
    EventRecordNodeParams,
    EventWaitNodeParams,
    FreeNodeParams,
    FunctionHandle,
    GraphHandle,
    KernelArguments,
    KernelNodeParams,
    LaunchConfig,
    MemcpyNodeParams,
    MemOp,
    MemOpKind,
    MemsetNodeParams,
    NodeKind,
    NodeParams,
    ParameterSlot,
)
from ostinato.driver.signature import Signature
from ostinato.errors import GraphFileError, InputError
from ostinato.graph.rebind import copy_extent, fill_extent

__all__ = [
    "FORMAT",
    "GRAPH_INPUT",
    "PROOFS",
    "VERSION",
    "Block",
    "ConditionWord",
    "EdgeRecord",
    "FunctionRecord",
    "GraphManifest",
    "GraphRecord",
    "MachineRecord",
    "NamedBuffer",
    "NodeRecord",
    "PointerWord",
    "fields_of",
    "in_order",
    "parse",
    "to_json",
]

FORMAT, VERSION = "ostinato.graph", 1
GRAPH_INPUT = ("input", "output", "constant")
"""What a named buffer can be; one may be several of them."""

_WORD = 8
_MOST_NODES = 1_000_000  # of all nodes together; a deeper or longer file is damaged
_MOST_ITEMS = 1 << 20
_MOST_BYTES = 1 << 46
_MOST_ARGUMENTS = 1 << 16
_DEEPEST = 32
_DIGEST = re.compile(r"[0-9a-f]{64}")

PROOFS = ("moved", "signature", "allocation", "field")
"""How a word was found to be a pointer: it moved with its memory between two captures; its
signature says so; its value lies in a live allocation; it is a field of the node's kind."""


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """Where a graph was saved."""

    driver: str
    device: str
    compute_capability: tuple[int, int]
    driver_version: str
    library: str


@dataclass(frozen=True, slots=True)
class FunctionRecord:
    """A kernel: the entry `name` of an image.  `digest` is of the image's bytes, in the file under
    "code/"; a kernel of the host has `target` in its place."""

    name: str
    kind: str
    digest: str
    target: str
    parameters: tuple[ParameterSlot, ...]
    shared: int
    carveout: int
    wide_clusters: bool
    signature: str
    """As text; empty if it is not known."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of memory that is allocated as one.

    `phase` is its address modulo 256 when it was captured, which a new one has too.  `node` is the
    place of the alloc node that allocates it, else None.
    """

    nbytes: int
    phase: int
    pinned: bool
    node: int | None


@dataclass(frozen=True, slots=True)
class NamedBuffer:
    """An input, output or constant, `into` bytes into a block.  `stored`: the file has its content
    (of a constant)."""

    name: str
    roles: tuple[str, ...]
    block: int
    into: int
    shape: tuple[int, ...]
    dtype: str
    stored: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class PointerWord:
    """An address of a node: at an offset of a kernel's arguments, in a field ("dst", "src",
    "address"), or of an operation of a batch ("0", "1", …)."""

    place: int | str
    block: int
    into: int
    proof: str


@dataclass(frozen=True, slots=True)
class ConditionWord:
    """A word of a kernel's arguments that holds the handle of a condition."""

    offset: int
    condition: int


@dataclass(frozen=True, slots=True)
class NodeRecord:
    name: str
    params: NodeParams
    pointers: tuple[PointerWord, ...] = ()
    conditions: tuple[ConditionWord, ...] = ()
    hints: tuple[str, ...] = ()
    """Launch attributes in words that a loaded graph does not have again."""
    inner: tuple[GraphRecord, ...] = ()
    """The child graph, or the bodies."""
    unused: tuple[ParameterSlot, ...] = ()
    """Bytes of a kernel's arguments that differed between two captures and have no effect."""


@dataclass(frozen=True, slots=True)
class EdgeRecord:
    source: int
    target: int
    data: EdgeData


@dataclass(frozen=True, slots=True)
class GraphRecord:
    nodes: tuple[NodeRecord, ...]
    edges: tuple[EdgeRecord, ...]

    def walk(self) -> list[NodeRecord]:
        """All nodes, those inside others too."""
        found = []
        for node in self.nodes:
            found.append(node)
            for inner in node.inner:
                found += inner.walk()
        return found


@dataclass(frozen=True, slots=True)
class GraphManifest:
    """The manifest of a file.  `checked`: the file passed the check before it was written.
    `tensors` is the digest of the tensors' file, empty if there is none."""

    machine: MachineRecord
    functions: tuple[FunctionRecord, ...]
    blocks: tuple[Block, ...]
    buffers: tuple[NamedBuffer, ...]
    conditions: tuple[ConditionDefaults, ...]
    events: int
    graph: GraphRecord
    checked: bool
    tensors: str

    def names(self, role: str) -> list[str]:
        """The names of the buffers that have a role."""
        return [buffer.name for buffer in self.buffers if role in buffer.roles]

    def proofs(self) -> dict[str, int]:
        """How many words were found to be pointers in which way."""
        counts: dict[str, int] = {}
        for node in self.graph.walk():
            for word in node.pointers:
                counts[word.proof] = counts.get(word.proof, 0) + 1
        return counts

    def with_data(self, changes: Mapping[tuple[int, int], bytes]) -> GraphManifest:
        """With other bytes in arguments: by the place of the node in `graph.walk()` and offset."""
        places = iter(range(_MOST_NODES))

        def changed(graph: GraphRecord) -> GraphRecord:
            return replace(graph, nodes=tuple(map(changed_node, graph.nodes)))

        def changed_node(node: NodeRecord) -> NodeRecord:
            place = next(places)
            if isinstance(node.params, KernelNodeParams):
                data = bytearray(node.params.arguments.data)
                for (at, offset), value in changes.items():
                    if at == place:
                        data[offset : offset + len(value)] = value
                return replace(node, params=node.params.with_data(bytes(data)))
            return replace(node, inner=tuple(map(changed, node.inner)))

        return replace(self, graph=changed(self.graph))

    def with_check(self) -> GraphManifest:
        """As it is once the file has passed its check."""
        return replace(self, checked=True)


# ---------------------------------------------------------------------------------------- to JSON


def to_json(manifest: GraphManifest) -> dict[str, Any]:
    """The manifest as plain data."""
    machine = manifest.machine
    return {
        "format": FORMAT,
        "version": VERSION,
        "machine": {
            "driver": machine.driver,
            "device": machine.device,
            "compute_capability": list(machine.compute_capability),
            "driver_version": machine.driver_version,
            "library": machine.library,
        },
        "functions": [
            {
                "name": f.name,
                "kind": f.kind,
                "digest": f.digest,
                "target": f.target,
                "parameters": [[slot.offset, slot.size] for slot in f.parameters],
                "shared": f.shared,
                "carveout": f.carveout,
                "wide_clusters": f.wide_clusters,
                "signature": f.signature,
            }
            for f in manifest.functions
        ],
        "blocks": [
            {"nbytes": b.nbytes, "phase": b.phase, "pinned": b.pinned, "node": b.node}
            for b in manifest.blocks
        ],
        "buffers": [
            {
                "name": b.name,
                "roles": list(b.roles),
                "block": b.block,
                "into": b.into,
                "shape": list(b.shape),
                "dtype": b.dtype,
                "stored": b.stored,
            }
            for b in manifest.buffers
        ],
        "conditions": [
            {"default": c.default, "reset_at_launch": c.reset_at_launch}
            for c in manifest.conditions
        ],
        "events": manifest.events,
        "graph": _graph_json(manifest.graph),
        "checked": manifest.checked,
        "tensors": manifest.tensors,
    }


def _graph_json(graph: GraphRecord) -> dict[str, Any]:
    return {
        "nodes": [_node_json(node) for node in graph.nodes],
        "edges": [
            [e.source, e.target, e.data.from_port, e.data.to_port, int(e.data.type)]
            for e in graph.edges
        ],
    }


def _node_json(node: NodeRecord) -> dict[str, Any]:
    params = node.params
    made: dict[str, Any] = {"name": node.name}
    match params:
        case KernelNodeParams():
            config, arguments = params.config, params.arguments
            made |= {
                "kind": "kernel",
                "function": int(params.function),
                "grid": list(config.grid),
                "block": list(config.block),
                "shared": config.shared,
                "cluster": None if config.cluster is None else list(config.cluster),
                "cooperative": config.cooperative,
                "programmatic": config.programmatic,
                "priority": config.priority,
                "packed": arguments.packed,
                "layout": [[slot.offset, slot.size] for slot in arguments.layout],
                "data": arguments.data.hex(),
                "conditions": [[word.offset, word.condition] for word in node.conditions],
                "hints": list(node.hints),
            }
        case MemcpyNodeParams():
            made |= {"kind": "memcpy"} | {name: getattr(params, name) for name in _MEMCPY}
        case MemsetNodeParams():
            made |= {"kind": "memset"} | {name: getattr(params, name) for name in _MEMSET}
        case ChildGraphNodeParams():
            made |= {"kind": "child_graph", "inner": [_graph_json(g) for g in node.inner]}
        case EmptyNodeParams():
            made |= {"kind": "empty"}
        case EventRecordNodeParams():
            made |= {"kind": "event_record", "event": int(params.event)}
        case EventWaitNodeParams():
            made |= {"kind": "event_wait", "event": int(params.event)}
        case AllocNodeParams():
            made |= {"kind": "mem_alloc", "nbytes": params.nbytes}
        case FreeNodeParams():
            made |= {"kind": "mem_free"}
        case BatchMemOpNodeParams():
            made |= {
                "kind": "batch_mem_op",
                "operations": [[int(o.kind), o.value, o.size] for o in params.operations],
            }
        case ConditionalNodeParams():
            made |= {
                "kind": "conditional",
                "condition": int(params.handle),
                "type": params.kind.name.lower(),
                "inner": [_graph_json(g) for g in node.inner],
            }
        case _:
            raise AssertionError(f"saving refuses {type(params).__name__}")
    if node.pointers:
        made["pointers"] = [[w.place, w.block, w.into, w.proof] for w in node.pointers]
    if node.unused:
        made["unused"] = [[slot.offset, slot.size] for slot in node.unused]
    return made


_MEMCPY = ("width", "height", "depth", "dst_pitch", "src_pitch", "dst_height", "src_height")
_MEMSET = ("value", "element_size", "width", "height", "pitch")


# -------------------------------------------------------------------------------------- from JSON

T = TypeVar("T")


def parse(data: object) -> GraphManifest:
    """A manifest from plain data.  Raises GraphFileError that names the place that is wrong."""
    top = _Object(data, "the manifest")
    if top.text("format") != FORMAT:
        raise top.wrong("format", "this is no graph file of ostinato")
    if (version := top.number("version", 0, 1 << 31)) != VERSION:
        raise top.wrong("version", f"format {version}; this release reads {VERSION}")
    machine = _machine(top.object("machine"))
    functions = top.each("functions", _function)
    blocks = top.each("blocks", _block)
    buffers = top.each("buffers", lambda item: _buffer(item, blocks))
    if len({buffer.name for buffer in buffers}) != len(buffers):
        raise top.wrong("buffers", "two have one name")
    conditions = top.each(
        "conditions",
        lambda item: ConditionDefaults(
            item.number("default", 0, (1 << 32) - 1), item.flag("reset_at_launch")
        ),
    )
    reader = _GraphReader(functions, blocks, len(conditions), top.number("events", 0, _MOST_ITEMS))
    graph = reader.graph(top.object("graph"), 0)
    reader.require_allocations(graph)
    tensors = top.text("tensors")
    if tensors and not _DIGEST.fullmatch(tensors):
        raise top.wrong("tensors", "no SHA-256 digest")
    checked = top.flag("checked")
    top.done()
    return GraphManifest(
        *(machine, functions, blocks, buffers, conditions),
        *(reader.events, graph, checked, tensors),
    )


class _Object:
    """An object of the manifest, read key by key; `done` refuses keys that nothing read."""

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise GraphFileError(f"{where}: {_short(data)} is no object; the file is damaged")
        self._data: Mapping[str, object] = data
        self._left = set(data)
        self.where = where

    def wrong(self, key: str, why: str) -> GraphFileError:
        return GraphFileError(
            f"{self.where}, {key}: {why}; the file is damaged or of another release: save it again"
        )

    def get(self, key: str) -> object:
        if key not in self._data:
            raise self.wrong(key, "it is missing")
        self._left.discard(key)
        return self._data[key]

    def done(self) -> None:
        if self._left:
            raise self.wrong(_short(min(map(str, self._left))), "nothing is known of this")

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or len(value) > _MOST_ARGUMENTS:
            raise self.wrong(key, f"{_short(value)} is no text")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, f"{_short(value)} is neither true nor false")
        return value

    def number(self, key: str, low: int, high: int) -> int:
        return self._number(self.get(key), key, low, high)

    def _number(self, value: object, key: str, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"{_short(value)} is no whole number from {low} to {high}")
        return value

    def numbers(self, key: str, low: int, high: int, count: int | None = None) -> tuple[int, ...]:
        return self._numbers(self.get(key), key, low, high, count)

    def _numbers(
        self, value: object, key: str, low: int, high: int, count: int | None
    ) -> tuple[int, ...]:
        if not isinstance(value, list) or (count is not None and len(value) != count):
            raise self.wrong(key, f"{_short(value)} is no list of {count or 'numbers'}")
        return tuple(self._number(item, key, low, high) for item in value)

    def rows(self, key: str, low: int, high: int, count: int) -> list[tuple[int, ...]]:
        """A list of lists of so many numbers."""
        return [self._numbers(row, key, low, high, count) for row in self.items(key)]

    def items(self, key: str) -> list[object]:
        value = self.get(key)
        if not isinstance(value, list) or len(value) > _MOST_ITEMS:
            raise self.wrong(key, f"{_short(value)} is no list")
        return value

    def object(self, key: str) -> _Object:
        return _Object(self.get(key), f"{self.where}, {key}")

    def each(self, key: str, read: Callable[[_Object], T]) -> tuple[T, ...]:
        """Reads a list of objects."""
        made = []
        for index, item in enumerate(self.items(key)):
            one = _Object(item, f"{key}[{index}]")
            made.append(read(one))
            one.done()
        return tuple(made)

    def has(self, key: str) -> bool:
        return key in self._data


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _machine(item: _Object) -> MachineRecord:
    major, minor = item.numbers("compute_capability", 0, 1000, 2)
    made = MachineRecord(
        item.text("driver"),
        item.text("device"),
        (major, minor),
        item.text("driver_version"),
        item.text("library"),
    )
    item.done()
    return made


def _slots(item: _Object, key: str) -> tuple[ParameterSlot, ...]:
    """Slots in order that do not overlap."""
    end, made = 0, []
    for offset, size in item.rows(key, 0, _MOST_ARGUMENTS, 2):
        if offset < end or size == 0:
            raise item.wrong(key, f"{size} bytes at {offset} overlap what comes before")
        end = offset + size
        made.append(ParameterSlot(offset, size))
    return tuple(made)


def _function(item: _Object) -> FunctionRecord:
    kind, digest, target = item.text("kind"), item.text("digest"), item.text("target")
    if bool(digest) == bool(target) or (digest and not _DIGEST.fullmatch(digest)):
        raise item.wrong("digest", "either the digest of an image is needed, or a target")
    signature = item.text("signature")
    try:
        Signature.parse(signature)
    except InputError as error:
        raise item.wrong("signature", str(error)) from None
    return FunctionRecord(
        item.text("name"),
        kind,
        digest,
        target,
        _slots(item, "parameters"),
        item.number("shared", 0, 1 << 24),
        item.number("carveout", -1, 100),
        item.flag("wide_clusters"),
        signature,
    )


def _block(item: _Object) -> Block:
    node = item.get("node")
    return Block(
        item.number("nbytes", 1, _MOST_BYTES),
        item.number("phase", 0, 255),
        item.flag("pinned"),
        None if node is None else item.number("node", 0, _MOST_NODES),
    )


def _buffer(item: _Object, blocks: Sequence[Block]) -> NamedBuffer:
    roles = item.items("roles")
    if not roles or any(role not in GRAPH_INPUT for role in roles):
        raise item.wrong("roles", f"{_short(roles)}; there are {', '.join(GRAPH_INPUT)}")
    block = item.number("block", 0, len(blocks) - 1)
    shape = item.numbers("shape", 0, _MOST_BYTES)
    if len(shape) > 32:
        raise item.wrong("shape", f"{len(shape)} dimensions")
    text = item.text("dtype")
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, SyntaxError):
        raise item.wrong("dtype", f"{_short(text)} is no type of NumPy") from None
    if dtype.hasobject or dtype.itemsize == 0 or dtype.str != text:
        raise item.wrong("dtype", f"{_short(text)} is no type of plain numbers")
    into = item.number("into", 0, _MOST_BYTES)
    nbytes = math.prod(shape) * dtype.itemsize
    if into + nbytes > blocks[block].nbytes:
        raise item.wrong("into", f"{nbytes} bytes at {into} reach out of block {block}")
    if blocks[block].node is not None:
        raise item.wrong("block", "memory of an alloc node has no name")
    return NamedBuffer(
        item.text("name"), tuple(map(str, roles)), block, into, shape, text, item.flag("stored")
    )


class _GraphReader:
    def __init__(
        self,
        functions: Sequence[FunctionRecord],
        blocks: Sequence[Block],
        conditions: int,
        events: int,
    ) -> None:
        self._functions = functions
        self._blocks = blocks
        self._conditions = conditions
        self._used: set[int] = set()
        """Conditions that have their node."""
        self._count = 0
        self.events = events

    def graph(self, item: _Object, depth: int) -> GraphRecord:
        if depth > _DEEPEST:
            raise item.wrong("nodes", f"graphs inside graphs, {depth} deep")
        nodes = []
        for index, data in enumerate(item.items("nodes")):
            self._count += 1
            if self._count > _MOST_NODES:
                raise item.wrong("nodes", f"more than {_MOST_NODES}")
            one = _Object(data, f"{item.where}, node {index}")
            nodes.append(self._node(one, depth))
            one.done()
        edges = self._edges(item, nodes)
        item.done()
        return GraphRecord(tuple(nodes), edges)

    def _edges(self, item: _Object, nodes: Sequence[NodeRecord]) -> tuple[EdgeRecord, ...]:
        made: list[EdgeRecord] = []
        seen: set[tuple[int, int]] = set()
        for row in item.rows("edges", 0, _MOST_NODES, 5):
            source, target, from_port, to_port, kind = row
            if not (source < len(nodes) and target < len(nodes)) or source == target:
                raise item.wrong("edges", f"{list(row)} joins no two of {len(nodes)} nodes")
            if max(from_port, to_port) > 255 or kind not in tuple(EdgeType):
                raise item.wrong("edges", f"{list(row)} has ports or a type that are not known")
            data = EdgeData(from_port, to_port, EdgeType(kind))
            if (source, target) in seen:
                raise item.wrong("edges", f"{source} and {target} are joined twice")
            seen.add((source, target))
            made.append(EdgeRecord(source, target, data))
        if in_order(len(nodes), made) is None:
            raise item.wrong("edges", "they close a cycle")
        return tuple(made)

    def require_allocations(self, graph: GraphRecord) -> None:
        """Each block of an alloc node has its node, with the block's size."""
        nodes = [node.params for node in graph.nodes]
        of = {block.node: block for block in self._blocks if block.node is not None}
        for index, params in enumerate(nodes):
            block = of.pop(index, None)
            wanted = params.nbytes if isinstance(params, AllocNodeParams) else None
            if wanted != (None if block is None else block.nbytes):
                raise GraphFileError(
                    f"the graph, node {index}: its block and what it allocates differ; the file "
                    "is damaged: save it again"
                )
        if of or len(set(of)) != len(of):
            raise GraphFileError("a block names an alloc node that is not there; save it again")

    def _node(self, item: _Object, depth: int) -> NodeRecord:
        name, kind = item.text("name"), item.text("kind")
        read = _READERS.get(kind)
        if read is None:
            raise item.wrong("kind", f"{_short(kind)} is no kind of node that a file can have")
        record: NodeRecord = read(self, item, name, depth)
        pointers = self._pointers(item, record) if item.has("pointers") else ()
        unused = _slots(item, "unused") if item.has("unused") else ()
        record = replace(record, pointers=pointers, unused=unused)
        self._require_fields(item, record)
        self._require_unused(item, record)
        return record

    @staticmethod
    def _require_unused(item: _Object, record: NodeRecord) -> None:
        """Bytes without effect lie in a kernel's arguments, beside addresses and conditions."""
        params = record.params
        size = len(params.arguments.data) if isinstance(params, KernelNodeParams) else 0
        words = [int(word.place) for word in record.pointers] if size and record.unused else []
        words += [word.offset for word in record.conditions]
        for slot in record.unused:
            end = slot.offset + slot.size
            if end > size or any(at < end and slot.offset < at + _WORD for at in words):
                raise item.wrong("unused", f"{slot.size} bytes at {slot.offset} are no free bytes")

    def _pointers(self, item: _Object, record: NodeRecord) -> tuple[PointerWord, ...]:
        made: list[PointerWord] = []
        for row in item.items("pointers"):
            if not isinstance(row, list) or len(row) != 4:
                raise item.wrong("pointers", f"{_short(row)} is no pointer")
            place, block, into, proof = row
            known = isinstance(block, int) and not isinstance(block, bool)
            if not known or not 0 <= block < len(self._blocks):
                raise item.wrong("pointers", f"{_short(row)} names no block")
            reach = self._blocks[block].nbytes
            if isinstance(into, bool) or not isinstance(into, int) or not 0 <= into <= reach:
                raise item.wrong("pointers", f"{_short(row)} points out of its block of {reach}")
            if proof not in PROOFS or isinstance(place, bool) or not isinstance(place, int | str):
                raise item.wrong("pointers", f"{_short(row)} is no pointer")
            made.append(PointerWord(place, block, into, proof))
        self._require_places(item, record, [word.place for word in made])
        return tuple(made)

    def _require_places(
        self, item: _Object, record: NodeRecord, places: Sequence[int | str]
    ) -> None:
        """Words of a kernel lie in its arguments, and apart; fields are those of the node."""
        params = record.params
        if not isinstance(params, KernelNodeParams):
            if len(set(places)) != len(places) or not set(places) <= set(fields_of(params)):
                raise item.wrong("pointers", f"{_short(list(places))} are no fields of the node")
            return
        arguments = params.arguments
        whole = (ParameterSlot(0, len(arguments.data)),)
        words = [*places, *(word.offset for word in record.conditions)]
        for at in words:
            if not isinstance(at, int) or at % _WORD or not _inside(at, arguments.layout or whole):
                raise item.wrong("pointers", f"a word at {_short(at)} is outside the arguments")
        if len(set(words)) != len(words):
            raise item.wrong("pointers", "two words are at one place")

    def _require_fields(self, item: _Object, record: NodeRecord) -> None:
        """A node that is no kernel has an address in each field, and stays inside the block."""
        if isinstance(record.params, KernelNodeParams):
            if not record.pointers:
                self._require_places(item, record, ())
            return
        wanted = fields_of(record.params)
        if {word.place for word in record.pointers} != set(wanted):
            raise item.wrong("pointers", f"addresses for {', '.join(wanted) or 'nothing'} belong")
        for word in record.pointers:
            nbytes = wanted[str(word.place)]
            block = self._blocks[word.block]
            if word.into + nbytes > block.nbytes:
                raise item.wrong("pointers", f"{nbytes} bytes at {word.into} leave block")
            if isinstance(record.params, FreeNodeParams) and (block.node is None or word.into):
                raise item.wrong("pointers", "only the memory of an alloc node is freed")

    # --- kinds
    def kernel(self, item: _Object, name: str, depth: int) -> NodeRecord:
        function = item.number("function", 0, len(self._functions) - 1)
        parameters = self._functions[function].parameters
        text = item.text("data")
        try:
            data = bytes.fromhex(text)
        except ValueError:
            raise item.wrong("data", f"{_short(text)} are no hexadecimal digits") from None
        layout = _slots(item, "layout")
        if layout not in ((), parameters):
            raise item.wrong("layout", "it is not that of the function")
        end = max((slot.offset + slot.size for slot in parameters), default=0)
        if len(data) < end:
            raise item.wrong("data", f"{len(data)} bytes, and the function takes {end}")
        cluster, priority = item.get("cluster"), item.get("priority")
        config = self._config(item, cluster, priority)
        conditions = tuple(
            ConditionWord(offset, condition)
            for offset, condition in item.rows("conditions", 0, _MOST_ARGUMENTS, 2)
        )
        if any(word.condition >= self._conditions for word in conditions):
            raise item.wrong("conditions", "there is no such condition")
        hints = item.items("hints")
        if not all(isinstance(hint, str) and len(hint) < 1000 for hint in hints):
            raise item.wrong("hints", "they are no texts")
        arguments = KernelArguments(data, layout, item.flag("packed"))
        params = KernelNodeParams(FunctionHandle(function), config, arguments)
        return NodeRecord(name, params, (), conditions, tuple(map(str, hints)))

    @staticmethod
    def _config(item: _Object, cluster: object, priority: object) -> LaunchConfig:
        most = (1 << 31) - 1
        try:
            return LaunchConfig(
                item.numbers("grid", 1, most, 3),
                item.numbers("block", 1, most, 3),
                item.number("shared", 0, most),
                cluster=None if cluster is None else item.numbers("cluster", 1, most, 3),
                cooperative=item.flag("cooperative"),
                programmatic=item.flag("programmatic"),
                priority=None if priority is None else item.number("priority", -1000, 1000),
            )
        except InputError as error:
            raise item.wrong("grid", str(error)) from None

    def memcpy(self, item: _Object, name: str, depth: int) -> NodeRecord:
        sizes = {key: item.number(key, 0, _MOST_BYTES) for key in _MEMCPY}
        if not (sizes["height"] and sizes["depth"]):
            raise item.wrong("height", "a copy has at least one row")
        params = MemcpyNodeParams(
            *(0, 0, sizes["width"], sizes["height"], sizes["depth"]),
            *(sizes["dst_pitch"], sizes["src_pitch"]),
            *(sizes["dst_height"], sizes["src_height"]),
        )
        return NodeRecord(name, params)

    def memset(self, item: _Object, name: str, depth: int) -> NodeRecord:
        values = {key: item.number(key, 0, _MOST_BYTES) for key in _MEMSET}
        size = values["element_size"]
        if size not in (1, 2, 4) or values["value"] >= 1 << (8 * size) or not values["height"]:
            raise item.wrong("element_size", f"no fill of {values['value']} in {size} bytes")
        if values["height"] > 1 and values["pitch"] < values["width"] * size:
            raise item.wrong("pitch", "it is less than a row")
        return NodeRecord(name, MemsetNodeParams(dst=0, **values))

    def child(self, item: _Object, name: str, depth: int) -> NodeRecord:
        return NodeRecord(
            name, ChildGraphNodeParams(GraphHandle(0)), inner=self._inner(item, depth, (1, 1))
        )

    def conditional(self, item: _Object, name: str, depth: int) -> NodeRecord:
        text = item.text("type")
        if text.upper() not in ConditionalKind.__members__:
            raise item.wrong("type", f"{_short(text)} is no conditional node")
        kind = ConditionalKind[text.upper()]
        condition = item.number("condition", 0, self._conditions - 1)
        if condition in self._used:
            raise item.wrong("condition", "it has a node already")
        self._used.add(condition)
        inner = self._inner(item, depth, (1, _BODIES[kind]))
        params = ConditionalNodeParams(ConditionalHandle(condition), kind, len(inner))
        return NodeRecord(name, params, inner=inner)

    def _inner(self, item: _Object, depth: int, count: tuple[int, int]) -> tuple[GraphRecord, ...]:
        graphs = item.items("inner")
        if not count[0] <= len(graphs) <= count[1]:
            raise item.wrong("inner", f"{len(graphs)} graphs")
        made = []
        for index, data in enumerate(graphs):
            graph = self.graph(_Object(data, f"{item.where}, inner[{index}]"), depth + 1)
            if any(isinstance(n.params, AllocNodeParams | FreeNodeParams) for n in graph.nodes):
                raise item.wrong("inner", "alloc and free nodes belong into the outermost graph")
            made.append(graph)
        return tuple(made)

    def empty(self, item: _Object, name: str, depth: int) -> NodeRecord:
        return NodeRecord(name, EmptyNodeParams())

    def event_record(self, item: _Object, name: str, depth: int) -> NodeRecord:
        return NodeRecord(name, EventRecordNodeParams(self._event(item)))

    def event_wait(self, item: _Object, name: str, depth: int) -> NodeRecord:
        return NodeRecord(name, EventWaitNodeParams(self._event(item)))

    def _event(self, item: _Object) -> EventHandle:
        return EventHandle(item.number("event", 0, self.events - 1))

    def alloc(self, item: _Object, name: str, depth: int) -> NodeRecord:
        return NodeRecord(name, AllocNodeParams(item.number("nbytes", 1, _MOST_BYTES)))

    def free(self, item: _Object, name: str, depth: int) -> NodeRecord:
        return NodeRecord(name, FreeNodeParams(0))

    def batch(self, item: _Object, name: str, depth: int) -> NodeRecord:
        operations = []
        for kind, value, size in item.rows("operations", 0, (1 << 64) - 1, 3):
            if kind not in tuple(MemOpKind) or size not in (4, 8) or value >= 1 << (8 * size):
                raise item.wrong("operations", f"{[kind, value, size]} is no operation")
            operations.append(MemOp(MemOpKind(kind), 0, value, size))
        return NodeRecord(name, BatchMemOpNodeParams(tuple(operations)))


_BODIES = {ConditionalKind.IF: 2, ConditionalKind.WHILE: 1, ConditionalKind.SWITCH: 1024}
_READERS: Mapping[str, Callable[[_GraphReader, _Object, str, int], NodeRecord]] = {
    NodeKind.KERNEL.name.lower(): _GraphReader.kernel,
    NodeKind.MEMCPY.name.lower(): _GraphReader.memcpy,
    NodeKind.MEMSET.name.lower(): _GraphReader.memset,
    NodeKind.CHILD_GRAPH.name.lower(): _GraphReader.child,
    NodeKind.CONDITIONAL.name.lower(): _GraphReader.conditional,
    NodeKind.EMPTY.name.lower(): _GraphReader.empty,
    NodeKind.EVENT_RECORD.name.lower(): _GraphReader.event_record,
    NodeKind.EVENT_WAIT.name.lower(): _GraphReader.event_wait,
    NodeKind.MEM_ALLOC.name.lower(): _GraphReader.alloc,
    NodeKind.MEM_FREE.name.lower(): _GraphReader.free,
    NodeKind.BATCH_MEM_OP.name.lower(): _GraphReader.batch,
}


def fields_of(params: NodeParams) -> dict[str, int]:
    """The fields of a node, no kernel, that hold addresses, and how many bytes are used there."""
    match params:
        case MemcpyNodeParams():
            return {
                "dst": copy_extent(params, params.dst_pitch, params.dst_height),
                "src": copy_extent(params, params.src_pitch, params.src_height),
            }
        case MemsetNodeParams():
            return {"dst": fill_extent(params)}
        case FreeNodeParams():
            return {"address": 0}
        case BatchMemOpNodeParams():
            return {str(i): operation.size for i, operation in enumerate(params.operations)}
        case _:
            return {}


def in_order(count: int, edges: Sequence[EdgeRecord]) -> list[int] | None:
    """The nodes, each behind those that it depends on; None if the edges close a cycle."""
    waiting = [0] * count
    after: list[list[int]] = [[] for _ in range(count)]
    for edge in edges:
        waiting[edge.target] += 1
        after[edge.source].append(edge.target)
    ready = [node for node in range(count) if not waiting[node]]
    order: list[int] = []
    while ready:
        node = heapq.heappop(ready)  # the smallest, so that a sound order stays as it is
        order.append(node)
        for follower in after[node]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, follower)
    return order if len(order) == count else None


def _inside(offset: int, slots: Sequence[ParameterSlot]) -> bool:
    return any(s.offset <= offset and offset + _WORD <= s.offset + s.size for s in slots)
