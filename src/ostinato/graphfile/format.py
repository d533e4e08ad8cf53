"""Converts the records of a manifest to JSON and back.  Pure.

docs/graph-file.md describes the format.  A file is untrusted: `parse` bounds every number, checks
all references, and raises GraphFileError with the place in the manifest.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, TypeAlias, TypeVar

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
    EventRecordNodeParams,
    EventWaitNodeParams,
    FreeNodeParams,
    GraphHandle,
    HostNodeParams,
    KernelNodeParams,
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
from ostinato.graphfile.plain import MOST, Column, Field, Plain, record_fields, short
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

_T = TypeVar("_T")

FORMAT, VERSION = "ostinato.graph", 1
_ROLES = (("input",), ("output",), ("input", "output"), ("constant",))
_KINDS = ("inputs", "constants", "results")  # the kinds of tensors

_MOST_EVENTS = 1 << 20
_MOST_ARGUMENTS = 1 << 16
_DEEPEST = 32
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TYPESTR = re.compile(r"[<>|=][a-zA-Z][0-9]{1,9}")

_FIELDS: dict[type, tuple[str, ...]] = {
    MachineRecord: ("driver", "device", "compute_capability", "driver_version", "library"),
    FunctionRecord: (*("name", "kind", "digest", "target", "shared", "carveout", "wide_clusters"),),
    ConditionDefaults: ("default", "reset_at_launch"),
    LaunchConfig: (
        *("grid", "block", "shared", "cluster", "cooperative", "programmatic", "priority"),
    ),
    MemcpyNodeParams: (
        *("width", "height", "depth", "dst_pitch", "src_pitch", "dst_height", "src_height"),
    ),
    MemsetNodeParams: ("value", "element_size", "width", "height", "pitch"),
    AllocNodeParams: ("nbytes",),
}
"""The fields of records that are stored under their own names."""

_BOUNDS = {
    **dict.fromkeys(("grid", "block", "cluster"), (1, (1 << 31) - 1)),
    "shared": (0, (1 << 31) - 1),
    "priority": (-1000, 1000),
    "carveout": (-1, 100),
    "default": (0, (1 << 32) - 1),
    **dict.fromkeys(("nbytes", "height", "depth"), (1, MOST)),
}
"""The smallest and the largest number in such a field, where it is not 0 and `MOST`."""


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
        "machine": _values(manifest.machine),
        "functions": [
            _values(f)
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
        "conditions": [_values(c) for c in manifest.conditions],
        "events": manifest.events,
        "launches": [_values(config) for config in launches],
        "graph": _graph_json(manifest.graph, launches),
        "checked": manifest.checked,
        "tensors": dict(manifest.tensors),
        "key": manifest.key,
    }


def _values(record: object) -> dict[str, Any]:
    """Returns the fields of a record that are stored under their own names, as plain data."""
    values = ((name, getattr(record, name)) for name in _FIELDS.get(type(record), ()))
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
    kind = KINDS[type(params)].name.lower()
    made: dict[str, Any] = {"name": node.name, "kind": kind, **_values(params)}
    made["pointers"] = [[w.place, w.block, w.into, w.proof] for w in node.pointers]
    match params:
        case EventRecordNodeParams() | EventWaitNodeParams():
            made["event"] = int(params.event)
        case BatchMemOpNodeParams():
            made["operations"] = [[int(o.kind), o.value, o.size] for o in params.operations]
        case ConditionalNodeParams():
            made |= {"condition": int(params.handle), "type": params.kind.name.lower()}
    if node.inner:
        made["inner"] = [_graph_json(graph, launches) for graph in node.inner]
    return made


# -------------------------------------------------------------------------------------- from JSON


def parse(data: object) -> GraphManifest:
    """Builds a manifest from plain data.  Raises GraphFileError with the place of the error."""
    top = Plain(data, "the manifest")
    if top.get("format", str) != FORMAT:
        raise top.wrong("format", "this is no graph file of ostinato")
    if (version := top.get("version", int)) != VERSION:
        raise top.wrong("version", f"format {version}; this release reads {VERSION}")
    machine = _record(top.object("machine"), MachineRecord)
    functions = top.each("functions", _function)
    blocks = _blocks(top.object("blocks"))
    buffers = _buffers(top.object("buffers"), blocks)
    conditions = top.each("conditions", lambda item: _record(item, ConditionDefaults))
    launches = top.each("launches", lambda item: _record(item, LaunchConfig))
    events = top.get("events", int, 0, _MOST_EVENTS)
    reader = _GraphReader(functions, blocks, launches, len(conditions), events)
    graph = reader.graph(top.object("graph"), 0)
    reader.require_allocations(graph)
    tensors = _tensors(top, {buffer.name for buffer in buffers})
    checked, key = top.get("checked", bool), top.get("key", str)
    top.done()
    return GraphManifest(
        *(machine, functions, blocks, buffers, conditions, events, graph, checked, tensors, key)
    )


@cache
def _fields(made: Any) -> list[Field]:
    return record_fields(made, _FIELDS.get(made, ()), _BOUNDS)


def _record(item: Plain, made: type[_T], **more: Any) -> _T:
    """Reads the fields that `_values` writes, which are all that the object has."""
    record = item.record(made, _fields(made), **more)  # type: ignore[arg-type]
    item.done()
    return record


def _tensors(top: Plain, names: Collection[str]) -> dict[str, str]:
    """Reads the tensors' digests, checking that each name has a known kind and buffer."""
    found: dict[str, str] = top.get("tensors", dict)
    for name, digest in found.items():
        kind, _, of = str(name).partition("/")
        if kind not in _KINDS or of not in names:
            raise top.wrong("tensors", f"{short(name)} is of no buffer")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise top.wrong("tensors", f"{short(digest)} of {name!r} is no SHA-256 digest")
    return found


def _function(item: Plain) -> FunctionRecord:
    parameters = tuple(itertools.starmap(ParameterSlot, item.rows("parameters", MOST, MOST)))
    try:
        signature = _signature(item.get("signature", str))
    except InputError as error:
        raise item.wrong("signature", str(error)) from None
    if signature is not None and signature.layout != parameters:
        raise item.wrong("signature", "it does not say where the parameters are")
    more = {"parameters": parameters, "signature": signature}
    made = item.record(FunctionRecord, _fields(FunctionRecord), **more)
    if bool(made.digest) == bool(made.target) or not _DIGEST.fullmatch(made.digest or "0" * 64):
        raise item.wrong("digest", "either the digest of an image is needed, or a target")
    return made


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


def _texts(item: Plain, key: str, count: int) -> dict[int, tuple[str, ...]]:
    """Reads pairs of a kernel and a text; returns the texts of each kernel."""
    found: dict[int, tuple[str, ...]] = {}
    for kernel, text in item.get(key, list[tuple[int, str]], 0, count - 1):
        found[kernel] = (*found.get(kernel, ()), text)
    return found


def _blocks(item: Plain) -> tuple[Block, ...]:
    nbytes, phase, pinned = item.columns(nbytes=MOST, phase=255, pinned=1)
    if not nbytes.all():
        raise item.wrong("nbytes", f"block {int(nbytes.argmin())} has none")
    rows = item.rows("alloc", len(nbytes) - 1, MOST)
    nodes = {one[0]: one[1] for one in rows}
    if len(nodes) != len(rows):
        raise item.wrong("alloc", "a block has two nodes")
    item.done()
    columns = zip(nbytes.tolist(), phase.tolist(), pinned.tolist(), strict=True)
    return tuple(
        Block(size, offset, bool(pin), nodes.get(index))
        for index, (size, offset, pin) in enumerate(columns)
    )


_LookJson: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...] | None] | bool | None


def _buffers(item: Plain, blocks: Sequence[Block]) -> tuple[NamedBuffer, ...]:
    names = item.get("name", list[str])
    if len(set(names)) != len(names):
        raise item.wrong("name", "two have one name")
    columns: list[list[Any]] = [
        names,
        *(c.tolist() for c in item.columns(role=3, block=len(blocks) - 1, into=MOST, stored=1)),
        item.get("shape", list[tuple[int, ...]]),
        item.get("dtype", list[str]),
        item.get("look", list[_LookJson], -MOST),  # strides may be negative
    ]
    item.done()
    if len({*map(len, columns)}) > 1:
        raise item.wrong("name", f"{len(names)} names, and other columns have more or fewer")
    made = []
    for name, role, block, into, stored, shape, dtype, look in zip(*columns, strict=True):
        itemsize = itemsize_of(dtype)
        if not itemsize:
            raise item.wrong("dtype", f"{short(dtype)} is no type of plain numbers")
        nbytes = math.prod(shape) * itemsize
        if len(shape) > 32 or into + nbytes > blocks[block].nbytes:
            raise item.wrong("into", f"{nbytes} bytes at {into} reach out of block {block}")
        if blocks[block].node is not None:
            raise item.wrong("block", "memory of an alloc node has no name")
        known = Look(*look) if isinstance(look, tuple) else Look(dtype, shape, None)
        if look and not _TYPESTR.fullmatch(known.typestr):
            raise item.wrong("look", f"{short(known.typestr)} is no type of an array")
        made.append(
            NamedBuffer(
                *(name, _ROLES[role], block, into, shape, dtype, bool(stored)),
                known if look else None,
            )
        )
    return tuple(made)


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
        self._events = events

    def graph(self, item: Plain, depth: int) -> GraphRecord:
        if depth > _DEEPEST:
            raise item.wrong("nodes", f"graphs inside graphs, {depth} deep")
        kernels = self._kernels(item.object("kernels"))
        others: dict[int, NodeRecord] = {}
        rows = item.get("nodes", list)
        count = len(kernels) + len(rows)
        last = -1
        for index, data in enumerate(rows):
            one = Plain(data, item, ", nodes[", index, "]")
            last = one.get("at", int, last + 1, count - 1)
            others[last] = self._node(one, depth)
            one.done()
        edges = self._edges(item.object("edges"), count)
        item.done()
        return GraphRecord(kernels, others, edges)

    def _edges(self, item: Plain, count: int) -> list[OutlineEdge]:
        source, target = item.columns(source=count - 1, target=count - 1)
        rest = item.rows("data", len(source) - 1, 255, 255, 255)
        item.done()
        same = source == target
        if same.any():
            raise item.wrong("target", f"{int(source[same][0])} is joined to itself")
        if _has_twice(target * count + source):
            raise item.wrong("target", "two nodes are joined twice")
        data = [PLAIN] * len(source)
        for index, from_port, to_port, kind in rest:
            if kind not in {*EdgeType}:
                raise item.wrong("data", f"{kind} is no type of an edge")
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
        kind, name = item.get("kind", str), item.get("name", str)
        made: Any = _OTHER_KINDS.get(kind)
        if made is None:
            raise item.wrong("kind", f"{short(kind)} is no kind of node that a file can have")
        inner: tuple[GraphRecord, ...] = ()
        more: dict[str, Any] = {}
        if made is ConditionalNodeParams:
            more, inner = self._conditional(item, depth)
        elif made is ChildGraphNodeParams:
            more["graph"], inner = GraphHandle(0), self._inner(item, depth, 1)
        elif made in (EventRecordNodeParams, EventWaitNodeParams):
            more["event"] = item.get("event", int, 0, self._events - 1)
        elif made is BatchMemOpNodeParams:
            more["operations"] = self._operations(item)
        elif made in (MemcpyNodeParams, MemsetNodeParams, FreeNodeParams):
            more = dict.fromkeys(_ADDRESSES[made], 0)
        params = item.record(made, _fields(made), **more)
        return NodeRecord(name, params, self._pointers(item, params), inner=inner)

    def _pointers(self, item: Plain, params: NodeParams) -> tuple[PointerWord, ...]:
        """Reads the pointer of each address field; its use stays within the block."""
        rows = item.get("pointers", list[tuple[str, int, int, str]])
        wanted = fields_of(params)
        if sorted(row[0] for row in rows) != sorted(wanted):
            there = ", ".join(wanted) or "nothing"
            raise item.wrong("pointers", f"addresses for {there} are needed")
        made = []
        for word in itertools.starmap(PointerWord, rows):
            if word.block >= len(self._blocks) or word.proof not in PROOFS:
                raise item.wrong("pointers", f"{short([*word])} is no pointer")
            block, nbytes = self._blocks[word.block], wanted[str(word.place)].nbytes
            if word.into + nbytes > block.nbytes:
                where = f"{nbytes} bytes at {word.into}"
                raise item.wrong("pointers", f"{where} leave block {word.block}")
            if isinstance(params, FreeNodeParams) and (block.node is None or word.into):
                raise item.wrong("pointers", "only the memory of an alloc node is freed")
            made.append(word)
        return tuple(made)

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
        names = _texts(item, "names", count)
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
            _texts(item, "hints", count),
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
        text = item.get("data", str)
        try:
            data = bytes.fromhex(text)
        except ValueError:
            raise item.wrong("data", f"{short(text)} are no hexadecimal digits") from None
        if len(data) != nbytes:
            raise item.wrong("data", f"{len(data)} bytes, and {nbytes} belong here")
        return data

    def _words_of(self, item: Plain, count: int) -> Words:
        words = Words(
            *item.columns(
                kernel=count - 1,
                place=_MOST_ARGUMENTS,
                block=len(self._blocks) - 1,
                into=MOST,
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
        most = count - 1, _MOST_ARGUMENTS, self._conditions - 1
        for kernel, offset, condition in item.rows("conditions", *most):
            found[kernel] = (*found.get(kernel, ()), ConditionWord(offset, condition))
        return found

    @staticmethod
    def _unused(
        item: Plain, size: Column, kernels: Column, places: Column
    ) -> dict[int, tuple[ParameterSlot, ...]]:
        """Reads the bytes without effect: in a kernel's arguments, outside of its words."""
        found: dict[int, tuple[ParameterSlot, ...]] = {}
        for kernel, offset, nbytes in item.rows("unused", len(size) - 1, MOST, MOST):
            before = found.get(kernel, ())
            start = before[-1].offset + before[-1].size if before else 0
            end = offset + nbytes
            sound = start <= offset < end <= int(size[kernel])
            words = places[kernels == kernel]
            if not sound or ((words < end) & (offset < words + WORD)).any():
                why = f"{nbytes} bytes at {offset} are no free bytes of kernel {kernel}"
                raise item.wrong("unused", why)
            found[kernel] = (*before, ParameterSlot(offset, nbytes))
        return found

    # --- other node kinds
    @staticmethod
    def _operations(item: Plain) -> tuple[MemOp, ...]:
        rows = item.get("operations", list[tuple[int, int, int]], 0, (1 << 64) - 1)
        if not {kind for kind, _, _ in rows} <= {*MemOpKind}:
            raise item.wrong("operations", "they have a kind that is not known")
        return tuple(MemOp(MemOpKind(kind), 0, value, size) for kind, value, size in rows)

    def _conditional(
        self, item: Plain, depth: int
    ) -> tuple[dict[str, Any], tuple[GraphRecord, ...]]:
        text = item.get("type", str)
        if text.upper() not in ConditionalKind.__members__:
            raise item.wrong("type", f"{short(text)} is no conditional node")
        kind = ConditionalKind[text.upper()]
        condition = item.get("condition", int, 0, self._conditions - 1)
        if condition in self._used:
            raise item.wrong("condition", "it has a node already")
        self._used.add(condition)
        inner = self._inner(item, depth, _BODIES[kind])
        return {"handle": ConditionalHandle(condition), "kind": kind, "size": len(inner)}, inner

    def _inner(self, item: Plain, depth: int, most: int) -> tuple[GraphRecord, ...]:
        graphs = item.get("inner", list)
        if not 1 <= len(graphs) <= most:
            raise item.wrong("inner", f"{len(graphs)} graphs")
        made = []
        for index, data in enumerate(graphs):
            graph = self.graph(Plain(data, item, ", inner[", index, "]"), depth + 1)
            others = graph.others.values()
            if any(isinstance(n.params, AllocNodeParams | FreeNodeParams) for n in others):
                raise item.wrong("inner", "alloc and free nodes belong into the outermost graph")
            made.append(graph)
        return tuple(made)


_OTHER_KINDS = {
    kind.name.lower(): made
    for made, kind in KINDS.items()
    if made not in (KernelNodeParams, HostNodeParams)
}
"""The kinds of nodes that are no kernels, and that a file can have."""
_ADDRESSES = {
    MemcpyNodeParams: ("dst", "src"),
    MemsetNodeParams: ("dst",),
    FreeNodeParams: ("address",),
}
_BODIES = {ConditionalKind.IF: 2, ConditionalKind.WHILE: 1, ConditionalKind.SWITCH: 1024}
