"""Converts the records of a manifest to JSON and back.  Pure.

docs/graph-file.md describes the format.  A file is untrusted: `parse` bounds every number, checks
all references, and raises GraphFileError with the place in the manifest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.driver.api import (
    KINDS,
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
    GraphHandle,
    LaunchConfig,
    MemcpyNodeParams,
    MemOp,
    MemOpKind,
    MemsetNodeParams,
    NodeParams,
    ParameterSlot,
)
from ostinato.driver.order import in_order
from ostinato.driver.signature import Access, Signature
from ostinato.errors import GraphFileError, InputError
from ostinato.graph.show.outline import OutlineEdge
from ostinato.graphfile.plain import MOST_ITEMS, MOST_TEXT, Column, Plain, short
from ostinato.graphfile.records import (
    PLAIN,
    PROOFS,
    WORD,
    Block,
    ConditionWord,
    FunctionRecord,
    GraphManifest,
    GraphRecord,
    Kernels,
    Look,
    MachineRecord,
    NamedBuffer,
    NodeRecord,
    PointerWord,
    Words,
    fields_of,
    itemsize_of,
    starts_of,
)

FORMAT, VERSION = "ostinato.graph", 1
_ROLES = (("input",), ("output",), ("input", "output"), ("constant",))
_KINDS = ("inputs", "constants", "results")  # the kinds of tensors

_MOST_NODES = 1_000_000  # of all graphs together; more means a damaged file
_MOST_BYTES = 1 << 46
_MOST_HINT = 1000
_MOST_ARGUMENTS = 1 << 16
_DEEPEST = 32
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TYPESTR = re.compile(r"[<>|=][a-zA-Z][0-9]{1,9}")

_EDGE_TYPES = frozenset(map(int, EdgeType))


# ---------------------------------------------------------------------------------------- to JSON


def to_dict(manifest: GraphManifest) -> dict[str, Any]:
    """Returns the manifest as plain data."""
    launches: dict[LaunchConfig, int] = {}
    for graph in manifest.graph.graphs():
        for config in graph.kernels.launches:
            launches.setdefault(config, len(launches))
    return {
        "format": FORMAT,
        "version": VERSION,
        "machine": _values(manifest.machine, _MACHINE),
        "functions": [
            _values(f, _FUNCTION)
            | {
                "parameters": [[slot.offset, slot.size] for slot in f.parameters],
                "signature": "" if f.signature is None else _text(f.signature),
            }
            for f in manifest.functions
        ],
        "blocks": {
            "nbytes": [b.nbytes for b in manifest.blocks],
            "phase": [b.phase for b in manifest.blocks],
            "pinned": [int(b.pinned) for b in manifest.blocks],
            "alloc": [[i, b.node] for i, b in enumerate(manifest.blocks) if b.node is not None],
        },
        "buffers": {
            "name": [b.name for b in manifest.buffers],
            "role": [_ROLES.index(b.roles) for b in manifest.buffers],
            "block": [b.block for b in manifest.buffers],
            "into": [b.into for b in manifest.buffers],
            "shape": [list(b.shape) for b in manifest.buffers],
            "dtype": [b.dtype for b in manifest.buffers],
            "stored": [int(b.stored) for b in manifest.buffers],
            "look": [_look_json(b) for b in manifest.buffers],
        },
        "conditions": [_values(c, ("default", "reset_at_launch")) for c in manifest.conditions],
        "events": manifest.events,
        "launches": [_values(config, _LAUNCH) for config in launches],
        "graph": _graph_json(manifest.graph, launches),
        "checked": manifest.checked,
        "tensors": dict(manifest.tensors),
        "key": manifest.key,
    }


def _values(record: object, names: Sequence[str]) -> dict[str, Any]:
    """Returns fields of a record as plain data."""
    values = ((name, getattr(record, name)) for name in names)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values}


def _text(signature: Signature) -> str:
    """Returns a signature as text that `Signature.parse` reads."""
    parts = []
    for p in signature.parameters:
        star = {Access.READ: "*const ", Access.WRITE: "*out "}.get(p.access, "*")
        size = f"[{p.size}]" if p.type == "bytes" and not p.pointer else ""
        parts.append(f"{p.name}: {star if p.pointer else ''}{p.type}{size}")
    return ", ".join(parts)


def _look_json(buffer: NamedBuffer) -> list[object] | bool | None:
    """Returns a buffer's look as plain data; True if its type and shape already describe it."""
    look = buffer.look
    if look is None:
        return None
    if look == Look(buffer.dtype, buffer.shape, None):
        return True
    return [look.typestr, list(look.shape), None if look.strides is None else list(look.strides)]


def _graph_json(graph: GraphRecord, launches: Mapping[LaunchConfig, int]) -> dict[str, Any]:
    return {
        "nodes": [{"at": at} | _node_json(n, launches) for at, n in sorted(graph.others.items())],
        "kernels": _kernels_json(graph.kernels, launches),
        "edges": {
            "source": [edge.source for edge in graph.edges],
            "target": [edge.target for edge in graph.edges],
            "data": [
                [index, data.from_port, data.to_port, int(data.type)]
                for index, (_, _, data) in enumerate(graph.edges)
                if data != PLAIN
            ],
        },
    }


def _kernels_json(kernels: Kernels, launches: Mapping[LaunchConfig, int]) -> dict[str, Any]:
    forms = zip(kernels.packed, kernels.laid, strict=True)
    return {
        "function": list(kernels.functions),
        "launch": [launches[config] for config in kernels.launches],
        "form": [_PACKED * packed + _LAID * laid for packed, laid in forms],
        "size": list(kernels.sizes),
        "data": kernels.data.hex(),
        "pointers": {name: column.tolist() for name, column in kernels.words._asdict().items()},
        "names": [[kernel, name] for kernel, name in kernels.names.items()],
        "conditions": [
            [kernel, word.offset, word.condition]
            for kernel, words in kernels.conditions.items()
            for word in words
        ],
        "hints": [[kernel, hint] for kernel, hints in kernels.hints.items() for hint in hints],
        "unused": [
            [kernel, slot.offset, slot.size]
            for kernel, slots in kernels.unused.items()
            for slot in slots
        ],
    }


_PACKED, _LAID = 1, 2  # bits of a kernel's `form`


def _node_json(node: NodeRecord, launches: Mapping[LaunchConfig, int]) -> dict[str, Any]:
    """Returns a node that is not a kernel as plain data."""
    params = node.params
    made: dict[str, Any] = {"name": node.name, "kind": KINDS[type(params)].name.lower()}
    match params:
        case MemcpyNodeParams():
            made |= _values(params, _MEMCPY)
        case MemsetNodeParams():
            made |= _values(params, _MEMSET)
        case EventRecordNodeParams() | EventWaitNodeParams():
            made["event"] = int(params.event)
        case AllocNodeParams():
            made["nbytes"] = params.nbytes
        case BatchMemOpNodeParams():
            made["operations"] = [[int(o.kind), o.value, o.size] for o in params.operations]
        case ConditionalNodeParams():
            made |= {"condition": int(params.handle), "type": params.kind.name.lower()}
    if node.inner:
        made["inner"] = [_graph_json(graph, launches) for graph in node.inner]
    if node.pointers:
        made["pointers"] = [[w.place, w.block, w.into, w.proof] for w in node.pointers]
    return made


# The fields of records that are stored under their own names.
_MACHINE = ("driver", "device", "compute_capability", "driver_version", "library")
_FUNCTION = ("name", "kind", "digest", "target", "shared", "carveout", "wide_clusters")
_LAUNCH = ("grid", "block", "shared", "cluster", "cooperative", "programmatic", "priority")
_MEMCPY = ("width", "height", "depth", "dst_pitch", "src_pitch", "dst_height", "src_height")
_MEMSET = ("value", "element_size", "width", "height", "pitch")


# -------------------------------------------------------------------------------------- from JSON


def parse(data: object) -> GraphManifest:
    """Builds a manifest from plain data.  Raises GraphFileError with the place of the error."""
    top = Plain(data, "the manifest")
    if top.text("format") != FORMAT:
        raise top.wrong("format", "this is no graph file of ostinato")
    if (version := top.number("version", 0, 1 << 31)) != VERSION:
        raise top.wrong("version", f"format {version}; this release reads {VERSION}")
    machine = _machine(top.object("machine"))
    functions = top.each("functions", _function)
    blocks = _blocks(top.object("blocks"))
    buffers = _buffers(top.object("buffers"), blocks)
    conditions = top.each(
        "conditions",
        lambda item: ConditionDefaults(
            item.number("default", 0, (1 << 32) - 1), item.flag("reset_at_launch")
        ),
    )
    launches = top.each("launches", _launch)
    events = top.number("events", 0, MOST_ITEMS)
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


def _tensors(top: Plain, names: Collection[str]) -> dict[str, str]:
    """Reads the tensors' digests, checking that each name has a known kind and buffer."""
    found = {}
    tensors = top.get("tensors")
    if not isinstance(tensors, dict):
        raise top.wrong("tensors", f"{short(tensors)} is no object")
    for name, digest in tensors.items():
        kind, _, of = str(name).partition("/")
        if kind not in _KINDS or of not in names:
            raise top.wrong("tensors", f"{short(name)} is of no buffer")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise top.wrong("tensors", f"{short(digest)} is no SHA-256 digest")
        found[name] = digest
    return found


def _machine(item: Plain) -> MachineRecord:
    major, minor = item.numbers("compute_capability", 0, 1000, 2)
    driver, device = item.text("driver"), item.text("device")
    version, library = item.text("driver_version"), item.text("library")
    item.done()
    return MachineRecord(driver, device, (major, minor), version, library)


def _slots(item: Plain, key: str) -> tuple[ParameterSlot, ...]:
    """Reads slots, which must be in order and must not overlap."""
    end, made = 0, []
    for offset, size in item.rows(key, 0, _MOST_ARGUMENTS, 2):
        if offset < end or size == 0:
            raise item.wrong(key, f"{size} bytes at {offset} overlap what comes before")
        end = offset + size
        made.append(ParameterSlot(offset, size))
    return tuple(made)


def _function(item: Plain) -> FunctionRecord:
    kind, digest, target = item.text("kind"), item.text("digest"), item.text("target")
    if bool(digest) == bool(target) or (digest and not _DIGEST.fullmatch(digest)):
        raise item.wrong("digest", "either the digest of an image is needed, or a target")
    try:
        signature = _signature(item.text("signature"))
    except InputError as error:
        raise item.wrong("signature", str(error)) from None
    parameters = _slots(item, "parameters")
    if signature is not None and signature.layout != parameters:
        raise item.wrong("signature", "it does not say where the parameters are")
    name, shared = item.text("name"), item.number("shared", 0, 1 << 24)
    carveout, wide = item.number("carveout", -1, 100), item.flag("wide_clusters")
    code = name, kind, b"", target, shared, carveout, wide
    return FunctionRecord(*code, digest, parameters, signature)


@lru_cache(maxsize=1024)
def _signature(text: str) -> Signature | None:
    """Parses a signature; cached, as files of a store share signatures.  Raises InputError."""
    return Signature.parse(text) if text else None


def _has_twice(numbers: Column) -> bool:
    """True if two numbers are equal; fast for columns in ascending order, as most are."""
    if (numbers[1:] > numbers[:-1]).all():
        return False
    ordered = np.sort(numbers)  # np.unique would import numpy.ma, which takes longer
    return bool((ordered[1:] == ordered[:-1]).any())


def _texts(item: Plain, key: str, count: int, most: int) -> dict[int, tuple[str, ...]]:
    """Reads pairs of a kernel and a text; returns the texts of each kernel."""
    found: dict[int, tuple[str, ...]] = {}
    for row in item.items(key):
        if not isinstance(row, list) or len(row) != 2:
            raise item.wrong(key, f"{short(row)} is no kernel and a text")
        kernel, text = row
        if type(kernel) is not int or not 0 <= kernel < count:
            raise item.wrong(key, f"{short(row)} is of no kernel")
        if not isinstance(text, str) or len(text) > most:
            raise item.wrong(key, f"{short(text)} is no text")
        found[kernel] = (*found.get(kernel, ()), text)
    return found


def _launch(item: Plain) -> LaunchConfig:
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


def _priority(item: Plain, value: object) -> int:
    if type(value) is not int or not -1000 <= value <= 1000:
        raise item.wrong("priority", f"{short(value)} is no priority")
    return value


def _blocks(item: Plain) -> tuple[Block, ...]:
    nbytes, phase, pinned = item.columns(nbytes=_MOST_BYTES, phase=255, pinned=1)
    if not nbytes.all():
        raise item.wrong("nbytes", f"block {int(nbytes.argmin())} has none")
    nodes: dict[int, int] = {}
    for block, node in item.rows("alloc", 0, _MOST_NODES, 2):
        if block >= len(nbytes) or block in nodes:
            raise item.wrong("alloc", f"{block} is no block, or has a node already")
        nodes[block] = node
    item.done()
    columns = zip(nbytes.tolist(), phase.tolist(), pinned.tolist(), strict=True)
    return tuple(
        Block(size, offset, bool(pin), nodes.get(index))
        for index, (size, offset, pin) in enumerate(columns)
    )


def _buffers(item: Plain, blocks: Sequence[Block]) -> tuple[NamedBuffer, ...]:
    names = item.items("name")
    count = len(names)
    columns = item.columns(role=len(_ROLES) - 1, block=len(blocks) - 1, into=_MOST_BYTES, stored=1)
    lists = [item.items(key) for key in ("shape", "dtype", "look")]
    if len(columns[0]) != count or any(len(one) != count for one in lists):
        raise item.wrong("name", f"{count} names, but other columns have more or fewer entries")
    if not all(isinstance(name, str) and len(name) <= MOST_TEXT for name in names):
        raise item.wrong("name", f"all must be texts of at most {MOST_TEXT} characters")
    if len(set(names)) != count:
        raise item.wrong("name", "two have one name")
    item.done()
    made = []
    rows = zip(names, *(column.tolist() for column in columns), *lists, strict=True)
    for name, role, block, into, stored, shape, dtype, look in rows:
        sizes = item.list_of(shape, "shape", 0, _MOST_BYTES)
        if len(sizes) > 32:
            raise item.wrong("shape", f"{len(sizes)} dimensions")
        itemsize = itemsize_of(dtype) if isinstance(dtype, str) else 0
        if not itemsize:
            raise item.wrong("dtype", f"{short(dtype)} is no type of plain numbers")
        nbytes = math.prod(sizes) * itemsize
        if into + nbytes > blocks[block].nbytes:
            raise item.wrong("into", f"{nbytes} bytes at {into} reach out of block {block}")
        if blocks[block].node is not None:
            raise item.wrong("block", "memory of an alloc node has no name")
        known = _look(item, look, dtype, sizes)
        made.append(NamedBuffer(name, _ROLES[role], block, into, sizes, dtype, bool(stored), known))
    return tuple(made)


def _look(item: Plain, value: object, dtype: str, shape: tuple[int, ...]) -> Look | None:
    if value is None:
        return None
    if value is True:
        return Look(dtype, shape, None)
    if not isinstance(value, list) or len(value) != 3:
        raise item.wrong("look", f"{short(value)} is no type, shape and strides")
    typestr, shape, strides = value
    if not isinstance(typestr, str) or not _TYPESTR.fullmatch(typestr):
        raise item.wrong("look", f"{short(typestr)} is no type of an array")
    most = _MOST_BYTES
    numbers = item.list_of(shape, "look", 0, most)
    return Look(
        *(typestr, numbers),
        None if strides is None else item.list_of(strides, "look", -most, most, len(numbers)),
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
        self._functions = functions
        ends = [[slot.offset + slot.size for slot in f.parameters] for f in functions]
        self._sizes = np.array([max(end, default=0) for end in ends], np.int64)
        self._launches = launches
        self._blocks = blocks
        self._reaches = np.array([block.nbytes for block in blocks], np.int64)
        self._conditions = conditions
        self._used: set[int] = set()
        """Conditions that already have their node."""
        self._words: dict[int, frozenset[int]] = {}
        """Offsets of whole words of arguments, by function."""
        self._count = 0
        self.events = events

    def graph(self, item: Plain, depth: int) -> GraphRecord:
        if depth > _DEEPEST:
            raise item.wrong("nodes", f"graphs inside graphs, {depth} deep")
        kernels = self._kernels(item.object("kernels"))
        others: dict[int, NodeRecord] = {}
        rows = item.items("nodes")
        count = len(kernels) + len(rows)
        self._count += count
        if self._count > _MOST_NODES:
            raise item.wrong("nodes", f"more than {_MOST_NODES}")
        last = -1
        for index, data in enumerate(rows):
            one = Plain(data, item, ", nodes[", index, "]")
            last = one.number("at", last + 1, count - 1)
            others[last] = self._node(one, depth)
            one.done()
        edges = self._edges(item.object("edges"), count)
        item.done()
        return GraphRecord(kernels, others, edges)

    def _edges(self, item: Plain, count: int) -> list[OutlineEdge]:
        source, target = item.columns(source=count - 1, target=count - 1)
        rest = item.rows("data", 0, _MOST_NODES, 4)
        item.done()
        same = source == target
        if same.any():
            raise item.wrong("target", f"{int(source[same][0])} is joined to itself")
        if _has_twice(target * count + source):
            raise item.wrong("target", "two nodes are joined twice")
        data = [PLAIN] * len(source)
        for index, *one in rest:
            if index >= len(data):
                raise item.wrong("data", f"there is no edge {index}")
            from_port, to_port, kind = one
            if max(from_port, to_port) > 255 or kind not in _EDGE_TYPES:
                raise item.wrong("data", f"{one} are ports or a type that are not known")
            data[index] = EdgeData(from_port, to_port, EdgeType(kind))
        made = list(
            map(OutlineEdge._make, zip(source.tolist(), target.tolist(), data, strict=True))
        )
        pairs = [] if (source < target).all() else [(edge.source, edge.target) for edge in made]
        if in_order(count, pairs) is None:
            raise item.wrong("target", "they close a cycle")
        return made

    def require_allocations(self, graph: GraphRecord) -> None:
        """Raises GraphFileError unless alloc nodes and their blocks correspond in number and
        size."""
        places = [block.node for block in self._blocks if block.node is not None]
        wanted = {block.node: block.nbytes for block in self._blocks if block.node is not None}
        there = {
            place: node.params.nbytes
            for place, node in graph.others.items()
            if isinstance(node.params, AllocNodeParams)
        }
        if wanted != there or len(places) != len(wanted):
            raise GraphFileError(
                "the graph: its alloc nodes and the blocks that they allocate differ; the file is "
                "damaged: save it again"
            )

    def _node(self, item: Plain, depth: int) -> NodeRecord:
        kind, name = item.text("kind"), item.text("name")
        match kind:
            case "memcpy":
                return self._fields(item, name, self._memcpy(item))
            case "memset":
                return self._fields(item, name, self._memset(item))
            case "batch_mem_op":
                return self._fields(item, name, self._batch(item))
            case "mem_free":
                return self._fields(item, name, FreeNodeParams(0))
            case "child_graph":
                inner = self._inner(item, depth, 1)
                return NodeRecord(name, ChildGraphNodeParams(GraphHandle(0)), inner=inner)
            case "conditional":
                return self._conditional(item, name, depth)
            case "empty":
                return NodeRecord(name, EmptyNodeParams())
            case "event_record" | "event_wait":
                event = EventHandle(item.number("event", 0, self.events - 1))
                made = EventRecordNodeParams if kind == "event_record" else EventWaitNodeParams
                return NodeRecord(name, made(event))
            case "mem_alloc":
                return NodeRecord(name, AllocNodeParams(item.number("nbytes", 1, _MOST_BYTES)))
        raise item.wrong("kind", f"{short(kind)} is no kind of node that a file can have")

    def _pointers(self, item: Plain) -> tuple[PointerWord, ...]:
        if not item.has("pointers"):
            return ()
        made: list[PointerWord] = []
        for row in item.items("pointers"):
            if type(row) is not list or len(row) != 4:
                raise item.wrong("pointers", f"{short(row)} is no pointer")
            place, block, into, proof = row
            if type(block) is not int or not 0 <= block < len(self._blocks):
                raise item.wrong("pointers", f"{short(row)} names no block")
            reach = self._blocks[block].nbytes
            if type(into) is not int or not 0 <= into <= reach:
                raise item.wrong("pointers", f"{short(row)} points out of its block of {reach}")
            if type(place) is not str or type(proof) is not str or proof not in PROOFS:
                raise item.wrong("pointers", f"{short(row)} is no pointer")
            made.append(PointerWord(place, block, into, proof))
        return tuple(made)

    def _fields(self, item: Plain, name: str, params: NodeParams) -> NodeRecord:
        """Reads a node that is not a kernel: each address field has a pointer, and its use stays
        within the block."""
        pointers, wanted = self._pointers(item), fields_of(params)
        places = [word.place for word in pointers]
        if len(set(places)) != len(places) or set(places) != set(wanted):
            there = ", ".join(wanted) or "nothing"
            raise item.wrong("pointers", f"addresses for {there} are needed")
        for word in pointers:
            self._require_reach(item, params, word, wanted[str(word.place)].nbytes)
        return NodeRecord(name, params, pointers)

    def _require_reach(
        self, item: Plain, params: NodeParams, word: PointerWord, nbytes: int
    ) -> None:
        block = self._blocks[word.block]
        if word.into + nbytes > block.nbytes:
            raise item.wrong("pointers", f"{nbytes} bytes at {word.into} leave block {word.block}")
        if isinstance(params, FreeNodeParams) and (block.node is None or word.into):
            raise item.wrong("pointers", "only the memory of an alloc node is freed")

    # --- kernels
    def _kernels(self, item: Plain) -> Kernels:
        """Reads all kernels, checking whole columns: restoring a graph mostly consists of this."""
        function, launch, form, size = item.columns(
            function=len(self._functions) - 1,
            launch=len(self._launches) - 1,
            form=_PACKED | _LAID,
            size=_MOST_ARGUMENTS,
        )
        count = len(function)
        self._require(item, "size", size >= self._sizes[function], "the function takes more bytes")
        starts = starts_of(size)
        data = self._data(item, int(starts[-1]))
        # A function without parameters has no layout, whatever the file says.
        laid = ((form & _LAID) != 0) & (self._sizes[function] > 0)
        words = self._words_of(item.object("pointers"), count)
        conditions = self._conditions_of(item, count)
        kernel, place = words.kernel, words.place
        if conditions:
            others = [(number, one.offset) for number, some in conditions.items() for one in some]
            more = np.array(others, np.int64).T
            kernel, place = np.append(kernel, more[0]), np.append(place, more[1])
        self._require_words(item, kernel, place, function, size, laid)
        slots = starts[kernel] + place
        if _has_twice(slots):
            raise item.wrong("pointers", "two words are at one place")
        names = _texts(item, "names", count, MOST_TEXT)
        if any(len(some) > 1 for some in names.values()):
            raise item.wrong("names", "a kernel has two")
        kernels = Kernels(
            self._functions,
            function.tolist(),
            [self._launches[one] for one in launch.tolist()],
            laid.tolist(),
            ((form & _PACKED) != 0).tolist(),
            size.tolist(),
            starts,
            data,
            words,
            {one: name for one, (name,) in names.items()},
            conditions,
            _texts(item, "hints", count, _MOST_HINT),
            self._unused(item, size, kernel, place),
        )
        item.done()
        return kernels

    @staticmethod
    def _require(item: Plain, key: str, sound: npt.NDArray[np.bool_], why: str) -> None:
        """Raises GraphFileError for the first entry of a column that is not sound."""
        if not sound.all():
            raise item.wrong(key, f"at {int(sound.argmin())}: {why}")

    @staticmethod
    def _data(item: Plain, nbytes: int) -> bytes:
        text = item.get("data")
        try:
            data = bytes.fromhex(text) if isinstance(text, str) else None
        except ValueError:
            data = None
        if data is None:
            raise item.wrong("data", f"{short(text)} are no hexadecimal digits")
        if len(data) != nbytes:
            raise item.wrong("data", f"{len(data)} bytes, and {nbytes} belong here")
        return data

    def _words_of(self, item: Plain, count: int) -> Words:
        words = Words(
            *item.columns(
                kernel=count - 1,
                place=_MOST_ARGUMENTS,
                block=len(self._blocks) - 1,
                into=_MOST_BYTES,
                proof=len(PROOFS) - 1,
            )
        )
        kernel = words.kernel
        item.done()
        self._require(item, "kernel", kernel[1:] >= kernel[:-1], "they are not in order")
        reach = self._reaches[words.block]
        self._require(item, "into", words.into <= reach, "it points out of its block")
        return words

    def _require_words(
        self,
        item: Plain,
        kernel: Column,
        place: Column,
        function: Column,
        size: Column,
        laid: npt.NDArray[np.bool_],
    ) -> None:
        """Raises GraphFileError unless each word is aligned and within the arguments; within one
        argument if the layout is known."""
        outside = (place % WORD != 0) | (place + WORD > size[kernel])
        bad = place[outside].tolist()
        known = laid[kernel]
        pairs = function[kernel[known]] * (2 * _MOST_ARGUMENTS) + place[known]
        for pair in set(pairs.tolist()):  # few: many kernels share a function
            number, at = divmod(pair, 2 * _MOST_ARGUMENTS)
            if at not in self._words_in(number):
                bad.append(at)
        if bad:
            raise item.wrong("pointers", f"a word at {bad[0]} is outside the arguments")

    def _words_in(self, function: int) -> frozenset[int]:
        """Returns the aligned offsets at which an argument has a whole word."""
        found = self._words.get(function)
        if found is None:
            found = self._words[function] = frozenset(
                at for slot in self._functions[function].parameters for at in slot.words
            )
        return found

    def _conditions_of(self, item: Plain, count: int) -> dict[int, tuple[ConditionWord, ...]]:
        found: dict[int, tuple[ConditionWord, ...]] = {}
        for kernel, offset, condition in item.rows("conditions", 0, _MOST_NODES, 3):
            if kernel >= count or offset > _MOST_ARGUMENTS or condition >= self._conditions:
                row = [kernel, offset, condition]
                raise item.wrong("conditions", f"{row}: there is no such kernel or condition")
            found[kernel] = (*found.get(kernel, ()), ConditionWord(offset, condition))
        return found

    @staticmethod
    def _unused(
        item: Plain, size: Column, kernels: Column, places: Column
    ) -> dict[int, tuple[ParameterSlot, ...]]:
        """Reads the bytes without effect: in a kernel's arguments, outside of its words."""
        found: dict[int, tuple[ParameterSlot, ...]] = {}
        for kernel, offset, nbytes in item.rows("unused", 0, _MOST_NODES, 3):
            before = found.get(kernel, ())
            start = before[-1].offset + before[-1].size if before else 0
            end = offset + nbytes
            sound = kernel < len(size) and start <= offset < end <= int(size[kernel])
            words = places[kernels == kernel]
            if not sound or ((words < end) & (offset < words + WORD)).any():
                why = f"{nbytes} bytes at {offset} are no free bytes of kernel {kernel}"
                raise item.wrong("unused", why)
            found[kernel] = (*before, ParameterSlot(offset, nbytes))
        return found

    # --- other node kinds
    @staticmethod
    def _memcpy(item: Plain) -> MemcpyNodeParams:
        sizes: dict[str, Any] = {key: item.number(key, 0, _MOST_BYTES) for key in _MEMCPY}
        if not (sizes["height"] and sizes["depth"]):
            raise item.wrong("height", "a copy has at least one row")
        return MemcpyNodeParams(dst=0, src=0, **sizes)

    @staticmethod
    def _memset(item: Plain) -> MemsetNodeParams:
        values = {key: item.number(key, 0, _MOST_BYTES) for key in _MEMSET}
        size = values["element_size"]
        if size not in (1, 2, 4) or values["value"] >= 1 << (8 * size) or not values["height"]:
            raise item.wrong("element_size", f"no fill of {values['value']} in {size} bytes")
        if values["height"] > 1 and values["pitch"] < values["width"] * size:
            raise item.wrong("pitch", "it is less than a row")
        return MemsetNodeParams(dst=0, **values)

    @staticmethod
    def _batch(item: Plain) -> BatchMemOpNodeParams:
        operations = []
        for kind, value, size in item.rows("operations", 0, (1 << 64) - 1, 3):
            if kind not in tuple(MemOpKind) or size not in (4, 8) or value >= 1 << (8 * size):
                raise item.wrong("operations", f"{[kind, value, size]} is no operation")
            operations.append(MemOp(MemOpKind(kind), 0, value, size))
        return BatchMemOpNodeParams(tuple(operations))

    def _conditional(self, item: Plain, name: str, depth: int) -> NodeRecord:
        text = item.text("type")
        if text.upper() not in ConditionalKind.__members__:
            raise item.wrong("type", f"{short(text)} is no conditional node")
        kind = ConditionalKind[text.upper()]
        condition = item.number("condition", 0, self._conditions - 1)
        if condition in self._used:
            raise item.wrong("condition", "it has a node already")
        self._used.add(condition)
        inner = self._inner(item, depth, _BODIES[kind])
        params = ConditionalNodeParams(ConditionalHandle(condition), kind, len(inner))
        return NodeRecord(name, params, inner=inner)

    def _inner(self, item: Plain, depth: int, most: int) -> tuple[GraphRecord, ...]:
        graphs = item.items("inner")
        if not 1 <= len(graphs) <= most:
            raise item.wrong("inner", f"{len(graphs)} graphs")
        made = []
        for index, data in enumerate(graphs):
            graph = self.graph(Plain(data, item, ", inner[", index, "]"), depth + 1)
            if any(isinstance(n.params, AllocNodeParams | FreeNodeParams) for n in graph.nodes):
                raise item.wrong("inner", "alloc and free nodes belong into the outermost graph")
            made.append(graph)
        return tuple(made)


_BODIES = {ConditionalKind.IF: 2, ConditionalKind.WHILE: 1, ConditionalKind.SWITCH: 1024}
