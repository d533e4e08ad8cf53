"""What a graph file says: the manifest's records, to JSON and back.  Pure.

docs/graph-file.md describes the format.  Nothing in a file is believed: `parse` bounds every number
and compares all that refer to each other, and raises GraphFileError with the place in the manifest.

A record of a node holds the node's parameters as the driver's protocol has them, with places in the
manifest's lists for handles (functions, events, conditions) and zero for addresses.  Where an
address belongs, a `PointerWord` says into which block of memory it goes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

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
from ostinato.graph.disk.looks import Look
from ostinato.graph.rebind import copy_extent, fill_extent

__all__ = [
    "FORMAT",
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
_ROLES = ("input", "output", "constant")  # a buffer may have several
_KINDS = ("inputs", "constants", "results")  # of tensors

_WORD = 8
_MOST_NODES = 1_000_000  # of all nodes together; a deeper or longer file is damaged
_MOST_ITEMS = 1 << 20
_MOST_BYTES = 1 << 46
_MOST_ARGUMENTS = 1 << 16
_DEEPEST = 32
_PLAIN = EdgeData()
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TYPESTR = re.compile(r"[<>|=][a-zA-Z][0-9]{1,9}")

_EDGE_TYPES = frozenset(map(int, EdgeType))

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
    (of a constant).  `look`: what was named, if that is known; `shape` and `dtype` are of bytes
    where NumPy has no such type."""

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
        return math.prod(self.shape) * _itemsize(self.dtype)


class PointerWord(NamedTuple):
    """An address of a node: at an offset of a kernel's arguments, in a field ("dst", "src",
    "address"), or of an operation of a batch ("0", "1", …).  There are thousands in a graph, which
    a named tuple makes in a third of the time."""

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

    @property
    def size(self) -> tuple[int, int]:
        """How many nodes and edges there are, with those inside of nodes."""
        nodes = self.walk()
        inner = [graph for node in nodes for graph in node.inner]
        return len(nodes), sum(len(graph.edges) for graph in (self, *inner))

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
    `tensors`: the digests of the tensors' bytes, by name ("inputs/x").  `key`: of a store's graph,
    as text; empty for others."""

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
        """With other bytes in arguments, also in place of an address: by the place of the node in
        `graph.walk()` and offset."""
        of: dict[int, dict[int, bytes]] = {}
        for (place, offset), value in changes.items():
            of.setdefault(place, {})[offset] = value
        places = itertools.count()

        def changed(graph: GraphRecord) -> GraphRecord:
            return replace(graph, nodes=tuple(map(changed_node, graph.nodes)))

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


# ---------------------------------------------------------------------------------------- to JSON


def to_json(manifest: GraphManifest) -> dict[str, Any]:
    """The manifest as plain data."""
    machine = manifest.machine
    launches: dict[LaunchConfig, int] = {}
    for node in manifest.graph.walk():
        if isinstance(node.params, KernelNodeParams):
            launches.setdefault(node.params.config, len(launches))
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
                "look": _look_json(b),
            }
            for b in manifest.buffers
        ],
        "conditions": [
            {"default": c.default, "reset_at_launch": c.reset_at_launch}
            for c in manifest.conditions
        ],
        "events": manifest.events,
        "launches": [_launch_json(config) for config in launches],
        "graph": _graph_json(manifest.graph, manifest.functions, launches),
        "checked": manifest.checked,
        "tensors": dict(manifest.tensors),
        "key": manifest.key,
    }


def _look_json(buffer: NamedBuffer) -> list[object] | bool | None:
    """True for one that type and shape say already."""
    look = buffer.look
    if look is None:
        return None
    if look == Look(buffer.dtype, buffer.shape, None):
        return True
    return [look.typestr, list(look.shape), None if look.strides is None else list(look.strides)]


def _launch_json(config: LaunchConfig) -> dict[str, Any]:
    return {
        "grid": list(config.grid),
        "block": list(config.block),
        "shared": config.shared,
        "cluster": None if config.cluster is None else list(config.cluster),
        "cooperative": config.cooperative,
        "programmatic": config.programmatic,
        "priority": config.priority,
    }


def _graph_json(
    graph: GraphRecord, functions: Sequence[FunctionRecord], launches: Mapping[LaunchConfig, int]
) -> dict[str, Any]:
    return {
        "nodes": [_node_json(node, functions, launches) for node in graph.nodes],
        "edges": [_edge_json(edge) for edge in graph.edges],
    }


def _edge_json(edge: EdgeRecord) -> list[int]:
    """Ports and type only where they are not those of a plain edge."""
    data = edge.data
    rest = [data.from_port, data.to_port, int(data.type)]
    return [edge.source, edge.target, *([] if data == _PLAIN else rest)]


def _node_json(
    node: NodeRecord, functions: Sequence[FunctionRecord], launches: Mapping[LaunchConfig, int]
) -> dict[str, Any]:
    params = node.params
    made: dict[str, Any] = {"name": node.name}
    inner = [_graph_json(graph, functions, launches) for graph in node.inner]
    match params:
        case KernelNodeParams():
            arguments = params.arguments
            made |= {
                "kind": "kernel",
                "function": int(params.function),
                "launch": launches[params.config],
                "packed": arguments.packed,
                "layout": bool(arguments.layout),
                "data": arguments.data.hex(),
            }
            if node.name == functions[int(params.function)].name:
                del made["name"]  # it may be long, and there are many
            if node.conditions:
                made["conditions"] = [[word.offset, word.condition] for word in node.conditions]
            if node.hints:
                made["hints"] = list(node.hints)
        case MemcpyNodeParams():
            made |= {"kind": "memcpy"} | {name: getattr(params, name) for name in _MEMCPY}
        case MemsetNodeParams():
            made |= {"kind": "memset"} | {name: getattr(params, name) for name in _MEMSET}
        case ChildGraphNodeParams():
            made |= {"kind": "child_graph", "inner": inner}
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
                "inner": inner,
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
    launches = top.each("launches", _launch)
    events = top.number("events", 0, _MOST_ITEMS)
    reader = _GraphReader(functions, blocks, launches, len(conditions), events)
    graph = reader.graph(top.object("graph"), 0)
    reader.require_allocations(graph)
    tensors = _tensors(top, {buffer.name for buffer in buffers})
    checked, key = top.flag("checked"), top.text("key")
    top.done()
    return GraphManifest(
        *(machine, functions, blocks, buffers, conditions),
        *(reader.events, graph, checked, tensors, key),
    )


def _tensors(top: _Object, names: Collection[str]) -> dict[str, str]:
    """The digests of tensors, each of a kind and a buffer that there is."""
    found = {}
    tensors = top.get("tensors")
    if not isinstance(tensors, dict):
        raise top.wrong("tensors", f"{_short(tensors)} is no object")
    for name, digest in tensors.items():
        kind, _, of = str(name).partition("/")
        if kind not in _KINDS or of not in names:
            raise top.wrong("tensors", f"{_short(name)} is of no buffer")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise top.wrong("tensors", f"{_short(digest)} is no SHA-256 digest")
        found[name] = digest
    return found


class _Object:
    """An object of the manifest, read key by key; `done` refuses keys that nothing read."""

    __slots__ = ("_data", "_read", "_where")

    def __init__(self, data: object, *where: object) -> None:
        """`where`: put together if there is something to say."""
        self._where = where
        self._read: list[str] = []
        if not isinstance(data, dict):
            raise GraphFileError(f"{self.where}: {_short(data)} is no object; the file is damaged")
        self._data: Mapping[str, object] = data

    @property
    def where(self) -> str:
        return "".join(str(one.where if isinstance(one, _Object) else one) for one in self._where)

    def wrong(self, key: str, why: str) -> GraphFileError:
        return GraphFileError(
            f"{self.where}, {key}: {why}; the file is damaged or of another release: save it again"
        )

    def get(self, key: str) -> object:
        """The value of a key.  Each is read once."""
        try:
            value = self._data[key]
        except KeyError:
            raise self.wrong(key, "it is missing") from None
        self._read.append(key)
        return value

    def done(self) -> None:
        if len(self._read) != len(self._data):
            left = set(map(str, self._data)) - set(self._read)
            raise self.wrong(_short(min(left)), "nothing is known of this")

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
        value = self.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"{_short(value)} is no whole number from {low} to {high}")
        return value

    def numbers(self, key: str, low: int, high: int, count: int | None = None) -> tuple[int, ...]:
        return self.list_of(self.get(key), key, low, high, count)

    def list_of(
        self, value: object, key: str, low: int, high: int, count: int | None = None
    ) -> tuple[int, ...]:
        if not isinstance(value, list) or (count is not None and len(value) != count):
            raise self.wrong(key, f"{_short(value)} is no list of {count or 'numbers'}")
        for item in value:
            if type(item) is not int or not low <= item <= high:
                raise self.wrong(key, f"{_short(item)} is no whole number from {low} to {high}")
        return tuple(value)

    def rows(self, key: str, low: int, high: int, count: int) -> list[tuple[int, ...]]:
        """A list of lists of so many numbers."""
        return [self.list_of(row, key, low, high, count) for row in self.items(key)]

    def items(self, key: str) -> list[object]:
        value = self.get(key)
        if not isinstance(value, list) or len(value) > _MOST_ITEMS:
            raise self.wrong(key, f"{_short(value)} is no list")
        return value

    def object(self, key: str) -> _Object:
        return _Object(self.get(key), self, f", {key}")

    def each(self, key: str, read: Callable[[_Object], T]) -> tuple[T, ...]:
        """Reads a list of objects."""
        made = []
        for index, item in enumerate(self.items(key)):
            one = _Object(item, key, "[", index, "]")
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


def _launch(item: _Object) -> LaunchConfig:
    most = (1 << 31) - 1
    cluster, priority = item.get("cluster"), item.get("priority")
    try:
        return LaunchConfig(
            item.numbers("grid", 1, most, 3),
            item.numbers("block", 1, most, 3),
            item.number("shared", 0, most),
            cluster=None if cluster is None else item.list_of(cluster, "cluster", 1, most, 3),
            cooperative=item.flag("cooperative"),
            programmatic=item.flag("programmatic"),
            priority=None if priority is None else _priority(item, priority),
        )
    except InputError as error:
        raise item.wrong("grid", str(error)) from None


def _priority(item: _Object, value: object) -> int:
    if type(value) is not int or not -1000 <= value <= 1000:
        raise item.wrong("priority", f"{_short(value)} is no priority")
    return value


def _block(item: _Object) -> Block:
    node = item.get("node")
    if node is not None and (type(node) is not int or not 0 <= node < _MOST_NODES):
        raise item.wrong("node", f"{_short(node)} is no place of a node")
    return Block(
        item.number("nbytes", 1, _MOST_BYTES),
        item.number("phase", 0, 255),
        item.flag("pinned"),
        node if isinstance(node, int) else None,
    )


def _buffer(item: _Object, blocks: Sequence[Block]) -> NamedBuffer:
    roles = item.items("roles")
    if not roles or any(role not in _ROLES for role in roles):
        raise item.wrong("roles", f"{_short(roles)}; there are {', '.join(_ROLES)}")
    block = item.number("block", 0, len(blocks) - 1)
    shape = item.numbers("shape", 0, _MOST_BYTES)
    if len(shape) > 32:
        raise item.wrong("shape", f"{len(shape)} dimensions")
    text = item.text("dtype")
    itemsize = _itemsize(text)
    if not itemsize:
        raise item.wrong("dtype", f"{_short(text)} is no type of plain numbers")
    into = item.number("into", 0, _MOST_BYTES)
    nbytes = math.prod(shape) * itemsize
    if into + nbytes > blocks[block].nbytes:
        raise item.wrong("into", f"{nbytes} bytes at {into} reach out of block {block}")
    if blocks[block].node is not None:
        raise item.wrong("block", "memory of an alloc node has no name")
    return NamedBuffer(
        *(item.text("name"), tuple(map(str, roles)), block, into, shape, text),
        *(item.flag("stored"), _look(item, text, shape)),
    )


@lru_cache(maxsize=256)
def _itemsize(text: str) -> int:
    """The bytes of an element of a type of NumPy; 0 if the text is none."""
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, SyntaxError):
        return 0
    return 0 if dtype.hasobject or dtype.str != text else dtype.itemsize


def _look(item: _Object, dtype: str, shape: tuple[int, ...]) -> Look | None:
    value = item.get("look")
    if value is None:
        return None
    if value is True:
        return Look(dtype, shape, None)
    if not isinstance(value, list) or len(value) != 3:
        raise item.wrong("look", f"{_short(value)} is no type, shape and strides")
    typestr, shape, strides = value
    if not isinstance(typestr, str) or not _TYPESTR.fullmatch(typestr):
        raise item.wrong("look", f"{_short(typestr)} is no type of an array")
    most = _MOST_BYTES
    numbers = item.list_of(shape, "look", 0, most)
    return Look(
        *(typestr, numbers),
        None if strides is None else item.list_of(strides, "look", -most, most, len(numbers)),
    )


@dataclass(frozen=True, slots=True)
class _Called:
    """What reading a node asks of its function."""

    name: str
    layout: tuple[ParameterSlot, ...]
    words: frozenset[int]
    """The aligned offsets at which a whole word of an argument is."""
    size: int

    @classmethod
    def of(cls, function: FunctionRecord) -> _Called:
        layout = function.parameters
        words = frozenset(
            at
            for slot in layout
            for at in range(-(-slot.offset // _WORD) * _WORD, slot.offset + slot.size - 7, _WORD)
        )
        return cls(
            function.name, layout, words, layout[-1].offset + layout[-1].size if layout else 0
        )


class _GraphReader:
    def __init__(
        self,
        functions: Sequence[FunctionRecord],
        blocks: Sequence[Block],
        launches: Sequence[LaunchConfig],
        conditions: int,
        events: int,
    ) -> None:
        self._functions = [_Called.of(function) for function in functions]
        self._launches = launches
        self._blocks = blocks
        self._reaches = [block.nbytes for block in blocks]
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
            one = _Object(data, item, ", node ", index)
            nodes.append(self._node(one, depth))
            one.done()
        edges = self._edges(item, nodes)
        item.done()
        return GraphRecord(tuple(nodes), edges)

    def _edges(self, item: _Object, nodes: Sequence[NodeRecord]) -> tuple[EdgeRecord, ...]:
        made: list[EdgeRecord] = []
        seen: set[tuple[int, int]] = set()
        most = len(nodes) - 1
        for row in item.items("edges"):
            plain = isinstance(row, list) and len(row) == 2
            source, target, *rest = item.list_of(row, "edges", 0, _MOST_NODES, 2 if plain else 5)
            if source > most or target > most or source == target:
                raise item.wrong("edges", f"{_short(row)} joins no two of {len(nodes)} nodes")
            data = _PLAIN if plain else self._edge_data(item, *rest)
            if (source, target) in seen:
                raise item.wrong("edges", f"{source} and {target} are joined twice")
            seen.add((source, target))
            made.append(EdgeRecord(source, target, data))
        if in_order(len(nodes), made) is None:
            raise item.wrong("edges", "they close a cycle")
        return tuple(made)

    @staticmethod
    def _edge_data(item: _Object, from_port: int, to_port: int, kind: int) -> EdgeData:
        if max(from_port, to_port) > 255 or kind not in _EDGE_TYPES:
            row = [from_port, to_port, kind]
            raise item.wrong("edges", f"{row} are ports or a type that are not known")
        return EdgeData(from_port, to_port, EdgeType(kind))

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
        kind = item.text("kind")
        read = _READERS.get(kind)
        if read is None:
            raise item.wrong("kind", f"{_short(kind)} is no kind of node that a file can have")
        named = read is not _GraphReader.kernel or item.has("name")
        record: NodeRecord = read(self, item, item.text("name") if named else "", depth)
        if item.has("unused"):
            record = replace(record, unused=_slots(item, "unused"))
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

    def _pointers(self, item: _Object) -> tuple[PointerWord, ...]:
        if not item.has("pointers"):
            return ()
        made: list[PointerWord] = []
        reaches = self._reaches
        for row in item.items("pointers"):
            if type(row) is not list or len(row) != 4:
                raise item.wrong("pointers", f"{_short(row)} is no pointer")
            place, block, into, proof = row
            if type(block) is not int or not 0 <= block < len(reaches):
                raise item.wrong("pointers", f"{_short(row)} names no block")
            if type(into) is not int or not 0 <= into <= reaches[block]:
                reach = reaches[block]
                raise item.wrong("pointers", f"{_short(row)} points out of its block of {reach}")
            if type(proof) is not str or proof not in PROOFS or type(place) not in (int, str):
                raise item.wrong("pointers", f"{_short(row)} is no pointer")
            made.append(PointerWord(place, block, into, proof))
        return tuple(made)

    def _fields(self, item: _Object, name: str, params: NodeParams) -> NodeRecord:
        """A node that is no kernel.  It has an address in each of its fields, and stays inside the
        block."""
        pointers, wanted = self._pointers(item), fields_of(params)
        places = [word.place for word in pointers]
        if len(set(places)) != len(places) or set(places) != set(wanted):
            there = ", ".join(wanted) or "nothing"
            raise item.wrong("pointers", f"addresses for {there} belong here")
        for word in pointers:
            self._require_reach(item, params, word, wanted[str(word.place)])
        return NodeRecord(name, params, pointers)

    def _require_reach(
        self, item: _Object, params: NodeParams, word: PointerWord, nbytes: int
    ) -> None:
        block = self._blocks[word.block]
        if word.into + nbytes > block.nbytes:
            raise item.wrong("pointers", f"{nbytes} bytes at {word.into} leave block {word.block}")
        if isinstance(params, FreeNodeParams) and (block.node is None or word.into):
            raise item.wrong("pointers", "only the memory of an alloc node is freed")

    # --- kinds
    def kernel(self, item: _Object, name: str, depth: int) -> NodeRecord:
        number = item.number("function", 0, len(self._functions) - 1)
        function = self._functions[number]
        config = self._launches[item.number("launch", 0, len(self._launches) - 1)]
        text = item.text("data")
        try:
            data = bytes.fromhex(text)
        except ValueError:
            raise item.wrong("data", f"{_short(text)} are no hexadecimal digits") from None
        if len(data) < function.size:
            raise item.wrong("data", f"{len(data)} bytes, and the function takes {function.size}")
        layout = function.layout if item.flag("layout") else ()
        arguments = KernelArguments(data, layout, item.flag("packed"))
        pointers, conditions = self._pointers(item), self._conditions_of(item)
        words = [word.place for word in pointers] + [word.offset for word in conditions]
        there = function.words if layout else range(0, len(data) - _WORD + 1, _WORD)
        for at in words:
            if at not in there:
                raise item.wrong("pointers", f"a word at {_short(at)} is outside the arguments")
        if len(set(words)) != len(words):
            raise item.wrong("pointers", "two words are at one place")
        hints = item.items("hints") if item.has("hints") else []
        if not all(isinstance(hint, str) and len(hint) < 1000 for hint in hints):
            raise item.wrong("hints", "they are no texts")
        params = KernelNodeParams(FunctionHandle(number), config, arguments)
        texts = tuple(map(str, hints))
        return NodeRecord(name or function.name, params, pointers, conditions, texts)

    def _conditions_of(self, item: _Object) -> tuple[ConditionWord, ...]:
        if not item.has("conditions"):
            return ()
        rows = item.rows("conditions", 0, _MOST_ARGUMENTS, 2)
        if any(condition >= self._conditions for _, condition in rows):
            raise item.wrong("conditions", "there is no such condition")
        return tuple(ConditionWord(offset, condition) for offset, condition in rows)

    def memcpy(self, item: _Object, name: str, depth: int) -> NodeRecord:
        sizes = {key: item.number(key, 0, _MOST_BYTES) for key in _MEMCPY}
        if not (sizes["height"] and sizes["depth"]):
            raise item.wrong("height", "a copy has at least one row")
        params = MemcpyNodeParams(
            *(0, 0, sizes["width"], sizes["height"], sizes["depth"]),
            *(sizes["dst_pitch"], sizes["src_pitch"]),
            *(sizes["dst_height"], sizes["src_height"]),
        )
        return self._fields(item, name, params)

    def memset(self, item: _Object, name: str, depth: int) -> NodeRecord:
        values = {key: item.number(key, 0, _MOST_BYTES) for key in _MEMSET}
        size = values["element_size"]
        if size not in (1, 2, 4) or values["value"] >= 1 << (8 * size) or not values["height"]:
            raise item.wrong("element_size", f"no fill of {values['value']} in {size} bytes")
        if values["height"] > 1 and values["pitch"] < values["width"] * size:
            raise item.wrong("pitch", "it is less than a row")
        return self._fields(item, name, MemsetNodeParams(dst=0, **values))

    def child(self, item: _Object, name: str, depth: int) -> NodeRecord:
        return NodeRecord(
            name, ChildGraphNodeParams(GraphHandle(0)), inner=self._inner(item, depth, 1)
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
        inner = self._inner(item, depth, _BODIES[kind])
        params = ConditionalNodeParams(ConditionalHandle(condition), kind, len(inner))
        return NodeRecord(name, params, inner=inner)

    def _inner(self, item: _Object, depth: int, most: int) -> tuple[GraphRecord, ...]:
        graphs = item.items("inner")
        if not 1 <= len(graphs) <= most:
            raise item.wrong("inner", f"{len(graphs)} graphs")
        made = []
        for index, data in enumerate(graphs):
            graph = self.graph(_Object(data, item, ", inner[", index, "]"), depth + 1)
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
        return self._fields(item, name, FreeNodeParams(0))

    def batch(self, item: _Object, name: str, depth: int) -> NodeRecord:
        operations = []
        for kind, value, size in item.rows("operations", 0, (1 << 64) - 1, 3):
            if kind not in tuple(MemOpKind) or size not in (4, 8) or value >= 1 << (8 * size):
                raise item.wrong("operations", f"{[kind, value, size]} is no operation")
            operations.append(MemOp(MemOpKind(kind), 0, value, size))
        return self._fields(item, name, BatchMemOpNodeParams(tuple(operations)))


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
    if all(edge.source < edge.target for edge in edges):
        return list(range(count))
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
