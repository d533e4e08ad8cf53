"""Loading: a graph file becomes a graph with named buffers, at addresses of this process."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.driver.api import (
    AllocNodeParams,
    BatchMemOpNodeParams,
    ChildGraphNodeParams,
    ConditionalHandle,
    ConditionalNodeParams,
    EdgeData,
    EventRecordNodeParams,
    EventWaitNodeParams,
    FreeNodeParams,
    FunctionCode,
    GraphHandle,
    KernelNodeParams,
    MemcpyNodeParams,
    MemoryRange,
    MemsetNodeParams,
    NodeHandle,
    NodeParams,
)
from ostinato.driver.context import Context, HasContext, context_of
from ostinato.driver.signature import Signature
from ostinato.driver.stream import Event, Operation, Stream
from ostinato.errors import DriverError, GraphFileError, InputError
from ostinato.files import open_regular
from ostinato.graph.disk.container import Contents, open_file, read_tensors
from ostinato.graph.disk.format import (
    FunctionRecord,
    GraphManifest,
    GraphRecord,
    NamedBuffer,
    NodeRecord,
    in_order,
)
from ostinato.graph.graph import Graph
from ostinato.graph.node import NodeLabel
from ostinato.memory import Buffer, allocate
from ostinato.memory.ranges import Target, range_of
from ostinato.modules import Kernel, LoadedModule

__all__ = ["LoadedGraph", "Loader", "constants_of", "load_graph"]


class LoadedGraph(Graph):
    """A graph from a file, made by `load_graph`.

    loaded = ost.load_graph(device, "step.graph")
    run = loaded.instantiate(upload=stream)
    loaded.inputs["x"].copy_from(values, stream)
    run.launch(stream)
    """

    inputs: Mapping[str, Any]
    """What a launch reads, by name: buffers, or what the caller gave."""
    outputs: Mapping[str, Any]
    constants: Mapping[str, Any]
    events: tuple[Event, ...]
    """Those that its event nodes record and wait for, in the order of the nodes."""
    manifest: GraphManifest
    """What the file says."""
    scratch: tuple[Buffer, ...]
    """Memory without a name."""

    def take_labels(self, child: GraphHandle, node: NodeHandle) -> None:
        """Moves what is known of a child graph's nodes to their copies in a node."""
        self._label_copies(self.labels, child, node)
        for original in self.context.driver.graph_nodes(child):
            self.labels.pop(original, None)


def load_graph(
    device: Context | HasContext,
    path: str | Path,
    *,
    buffers: Mapping[str, Target] | None = None,
    constants: Mapping[str, Target] | str | Path | None = None,
    code: str | Path | None = None,
) -> LoadedGraph:
    """A graph that `Graph.save` wrote, ready to instantiate, patch and rebind like any other.

    `buffers`: memory of the caller's for inputs and outputs by name, used as it is; the others are
    allocated, and inputs begin with what they held when the graph was saved.  `constants`: live
    tensors by name, used as they are, or a safetensors file that they are read from; those that the
    graph file stores need not be given.  `code`: the folder of a store's images.  Nothing is
    launched.

    A graph file is a program: load none that you would not run.  Raises GraphFileError for a file
    that is damaged, that others may write, or that does not fit this device; InputError for
    buffers that do not fit.
    """
    context = context_of(device)
    context.require_open()
    given, stored = constants_of(constants)
    twice = given.keys() & (buffers or {}).keys()
    if twice:
        raise InputError(f"{', '.join(sorted(twice))}: given as buffers and as constants")
    given |= buffers or {}
    with open_file(Path(path), None if code is None else Path(code)) as contents:
        loader = Loader(context, contents, given)
        return loader.load(loader.values(stored))


def constants_of(
    constants: Mapping[str, Any] | str | Path | None,
) -> tuple[dict[str, Target], dict[str, npt.NDArray[Any]]]:
    """Memory of the device that is to be used as it is, and values that are to be copied."""
    if constants is None:
        return {}, {}
    if isinstance(constants, str | Path):
        return {}, _from_file(Path(constants))
    values = {n: one for n, one in constants.items() if isinstance(one, np.ndarray)}
    return {n: one for n, one in constants.items() if n not in values}, values


def _from_file(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        with open_regular(path, private=False) as file:
            return read_tensors(file.read())
    except (OSError, GraphFileError) as error:
        raise GraphFileError(f"the constants in {path} cannot be read ({error})") from None


class Loader:
    """One loading of a file.  `bases`: where its blocks are; `owners`: whose memory they are."""

    def __init__(self, context: Context, contents: Contents, given: Mapping[str, Target]) -> None:
        self._context = context
        self._driver = context.driver
        self._contents = contents
        self._given = given
        self.manifest = contents.manifest
        self._kernels: list[Kernel] = []
        self.bases: list[int] = []
        self.owners: list[object] = []
        self._conditions: list[ConditionalHandle] = []
        self._events: list[Event] = []
        self._known = {buffer.name: buffer for buffer in self.manifest.buffers}
        unknown = given.keys() - self._known.keys()
        if unknown:
            there = ", ".join(self._known) or "nothing"
            raise InputError(
                f"{contents.path} names no {', '.join(sorted(unknown))}; it names {there}"
            )

    def values(self, given: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """What inputs and constants hold at first, except for the caller's own memory.

        Raises GraphFileError for constants that nobody has.
        """
        wanted = [b for b in self.manifest.buffers if b.name not in self._given]
        read = any(b.stored or "input" in b.roles for b in wanted)
        mine = self._contents.tensors() if read else {}
        found = {}
        for buffer in wanted:
            name = buffer.name
            if "input" in buffer.roles or buffer.stored:
                kept = f"{'constants' if buffer.stored else 'inputs'}/{name}"
                if kept not in mine:
                    raise GraphFileError(f"the content of {name!r} is not in it; save it again")
                found[name] = mine[kept]
            elif "constant" in buffer.roles and name in given:
                found[name] = given[name]
            elif "constant" in buffer.roles:
                raise GraphFileError(
                    f"it takes the constant {name!r} ({buffer.nbytes} bytes) by name: give "
                    "constants={name: tensor}, or a safetensors file"
                )
        return found

    def load(self, values: Mapping[str, npt.NDArray[Any]]) -> LoadedGraph:
        self._require_device()
        try:
            self._kernels = [self._kernel(record) for record in self.manifest.functions]
            self._allocate(values)
            self._events = [Event(self._context) for _ in range(self.manifest.events)]
        except DriverError as error:
            raise _refused(error) from error
        return self.build(self.manifest.graph)

    def build(self, record: GraphRecord) -> LoadedGraph:
        """A graph over the memory that `load` made; `record` is the manifest's, or one like it."""
        graph: LoadedGraph | None = None
        try:
            graph = LoadedGraph(self._context, self._driver.graph_create())
            self._conditions = [
                self._driver.conditional_create(
                    graph.handle, default=c.default, reset_at_launch=c.reset_at_launch
                )
                for c in self.manifest.conditions
            ]
            graph.keep += [*self._kernels, *self.owners, *self._events]
            self._build(graph, graph.handle, record)
        except DriverError as error:
            if graph is not None:
                graph.close()
            raise _refused(error) from error
        except BaseException:
            if graph is not None:
                graph.close()
            raise
        self._name(graph)
        return graph

    def _require_device(self) -> None:
        """Raises unless this device can run the code."""
        machine, properties = self.manifest.machine, self._driver.properties
        kinds = {f.kind for f in self.manifest.functions} - self._driver.capabilities.image_kinds
        mine, theirs = properties.compute_capability, machine.compute_capability
        compiled = any(f.kind == "cubin" for f in self.manifest.functions)
        if kinds or (compiled and (mine[0] != theirs[0] or mine[1] < theirs[1])):
            raise GraphFileError(
                f"it was saved on {machine.device} (compute capability {theirs[0]}.{theirs[1]}), "
                f"and {self._driver.name} is {properties.name} ({mine[0]}.{mine[1]}), which does "
                "not run its code; save the graph on this device"
            )

    # --- code
    def _kernel(self, record: FunctionRecord) -> Kernel:
        modules = _modules.setdefault(self._context, weakref.WeakValueDictionary())
        key = record.digest or f"{record.target}:{record.name}"
        data = b"" if key in modules or not record.digest else self._contents.code(record.digest)
        code = FunctionCode(
            record.name,
            record.kind,
            data,
            record.target,
            record.shared,
            record.carveout,
            record.wide_clusters,
        )
        module = modules.get(key)
        if module is None or module.closed:
            if record.digest and not data:
                code = replace(code, data=self._contents.code(record.digest))
            image = self._driver.code_image(code)
            module = modules[key] = LoadedModule(self._context, image, name=key[:12])
        try:
            kernel = module.kernel(record.name)
        except InputError as error:
            raise GraphFileError(f"its code has no kernel {record.name!r} ({error})") from None
        if kernel.info.parameters != record.parameters:
            raise GraphFileError(
                f"the kernel {record.name!r} takes other parameters than when the graph was saved; "
                "save it again"
            )
        self._driver.function_restore(kernel.function, code)
        return kernel

    # --- memory
    def _allocate(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        of: dict[int, list[NamedBuffer]] = {}
        for buffer in self.manifest.buffers:
            of.setdefault(buffer.block, []).append(buffer)
        blocks = self.manifest.blocks
        mine = {
            i
            for i, block in enumerate(blocks)
            if block.node is None and not any(b.name in self._given for b in of.get(i, ()))
        }
        wanted, (free, _) = sum(blocks[i].nbytes for i in mine), self._driver.memory_info()
        if wanted > free:
            raise GraphFileError(
                f"it needs {wanted} bytes of memory, and {free} are free; close other graphs"
            )
        for index, block in enumerate(blocks):
            owner: object = None
            base = 0
            if index in mine:
                whole = allocate(
                    self._context, block.nbytes + block.phase, np.uint8, pinned=block.pinned
                )
                owner, base = whole, whole.address + block.phase
            elif block.node is None:
                owner, base = self._bound(of[index], block.nbytes, block.phase)
            self.owners.append(owner)
            self.bases.append(base)
        self._fill(values)

    def _bound(self, named: list[NamedBuffer], nbytes: int, phase: int) -> tuple[object, int]:
        """The caller's memory for a block."""
        bases: dict[int, object] = {}
        for buffer in named:
            if buffer.name not in self._given:
                continue
            target = self._given[buffer.name]
            memory = range_of(target, buffer.name)
            base = memory.address - buffer.into
            if memory.nbytes < buffer.nbytes:
                raise InputError(
                    f"{buffer.name!r} has {memory.nbytes} bytes, and the graph was captured with "
                    f"{buffer.nbytes}"
                )
            if not memory.holds(base, nbytes):
                raise InputError(
                    f"the graph uses {nbytes} bytes around {buffer.name!r}, which has "
                    f"{memory.nbytes}: other buffers share its memory; give one that has them all, "
                    "or none"
                )
            alignment = math.gcd(phase or 256, 256)
            if base % alignment:
                raise InputError(
                    f"{buffer.name!r} is at {memory.address:#x}, and the graph was captured with "
                    f"one aligned to {alignment} bytes"
                )
            bases[base] = target
        if len(bases) > 1:
            names = ", ".join(repr(buffer.name) for buffer in named)
            raise InputError(f"{names} share memory in the graph; give buffers that do, or none")
        base, target = next(iter(bases.items()))
        return target, base

    def overlaps(self, ranges: Sequence[MemoryRange]) -> bool:
        """Whether a block lies in one of these ranges."""
        mine = [
            MemoryRange(base, block.nbytes)
            for base, block in zip(self.bases, self.manifest.blocks, strict=True)
        ]
        return any(a.address < b.end and b.address < a.end for a in mine for b in ranges)

    def _fill(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        wanted = [b for b in self.manifest.buffers if b.name in values and b.nbytes]
        if not wanted:
            return
        with Stream(self._context, self._driver.stream_create(), owned=True) as stream:
            for buffer in wanted:
                data = np.ascontiguousarray(values[buffer.name]).reshape(-1).view(np.uint8)
                if data.nbytes != buffer.nbytes:
                    raise GraphFileError(
                        f"what {buffer.name!r} is to hold has {data.nbytes} bytes, and the graph "
                        f"was captured with {buffer.nbytes}"
                    )
                address = self.bases[buffer.block] + buffer.into
                self._driver.memcpy_from_host(address, data.data, stream.handle)
            stream.synchronize()  # later work may be on other streams

    def _name(self, graph: LoadedGraph) -> None:
        """Gives a graph its named buffers."""
        made: dict[str, Any] = {}
        named = set()
        for buffer in self.manifest.buffers:
            named.add(buffer.block)
            if buffer.name in self._given:
                made[buffer.name] = self._given[buffer.name]
                continue
            owner = self.owners[buffer.block]
            base = range_of(owner).address
            into = self.bases[buffer.block] + buffer.into - base
            if isinstance(owner, Buffer):
                view = owner.view(into, buffer.shape, np.dtype(buffer.dtype))
                view.name = buffer.name
                made[buffer.name] = view
            else:
                made[buffer.name] = MemoryRange(base + into, buffer.nbytes)
        names = self.manifest.names
        graph.inputs = {name: made[name] for name in names("input")}
        graph.outputs = {name: made[name] for name in names("output")}
        graph.constants = {name: made[name] for name in names("constant")}
        graph.events = tuple(self._events)
        graph.manifest = self.manifest
        graph.scratch = tuple(
            owner
            for index, owner in enumerate(self.owners)
            if index not in named and isinstance(owner, Buffer)
        )

    # --- nodes
    def _build(self, graph: LoadedGraph, handle: GraphHandle, record: GraphRecord) -> None:
        """Adds all nodes of a record to a definition: the graph's own, a child's or a body's."""
        before: dict[int, list[tuple[int, EdgeData]]] = {}
        for edge in record.edges:
            before.setdefault(edge.target, []).append((edge.source, edge.data))
        order = in_order(len(record.nodes), record.edges)
        assert order is not None, "a manifest with a cycle is refused"
        handles: dict[int, NodeHandle] = {}
        for index in order:
            edges = before.get(index, [])
            data = [data for _, data in edges]
            node = record.nodes[index]
            child = GraphHandle(0)
            if isinstance(node.params, ChildGraphNodeParams):
                child = self._driver.graph_create()
            try:
                if child:
                    self._build(graph, child, node.inner[0])
                params, keep = self._params(node, child)
                made = self._driver.graph_add_node(
                    handle,
                    [handles[source] for source, _ in edges],
                    params,
                    data if any(one != EdgeData() for one in data) else None,
                )
                handles[index] = made
                self._label(graph, made, node, params, keep)
                if child:
                    graph.take_labels(child, made)
            finally:
                if child:
                    self._driver.graph_destroy(child)
            added = self._driver.node_params(made) if _read_back(node) else None
            if isinstance(added, ConditionalNodeParams):
                for body, inner in zip(added.bodies, node.inner, strict=True):
                    self._build(graph, body, inner)
            elif isinstance(added, AllocNodeParams):
                block = next(i for i, b in enumerate(self.manifest.blocks) if b.node == index)
                self.bases[block] = added.address

    def _label(
        self,
        graph: LoadedGraph,
        handle: NodeHandle,
        node: NodeRecord,
        params: NodeParams,
        keep: tuple[object, ...],
    ) -> None:
        signature = None
        if isinstance(node.params, KernelNodeParams):
            text = self.manifest.functions[int(node.params.function)].signature
            signature = Signature.parse(text) if text else None
        operation = Operation(params, node.name, None, None, keep, signature)
        graph.labels[handle] = NodeLabel(operation, None)

    def _params(
        self, node: NodeRecord, child: GraphHandle
    ) -> tuple[NodeParams, tuple[object, ...]]:
        """A node's parameters with this process' handles and addresses, and what they need."""
        params = node.params
        keep: list[object] = [
            owner for w in node.pointers if (owner := self.owners[w.block]) is not None
        ]
        at = {word.place: self.bases[word.block] + word.into for word in node.pointers}
        match params:
            case KernelNodeParams():
                kernel = self._kernels[int(params.function)]
                data = bytearray(params.arguments.data)
                words = [(int(place), address) for place, address in at.items()]
                words += [(w.offset, int(self._conditions[w.condition])) for w in node.conditions]
                for offset, value in words:
                    data[offset : offset + 8] = value.to_bytes(8, "little")
                made = replace(params.with_data(bytes(data)), function=kernel.function)
                return made, (kernel, *keep)
            case MemcpyNodeParams():
                return replace(params, dst=at["dst"], src=at["src"]), tuple(keep)
            case MemsetNodeParams():
                return replace(params, dst=at["dst"]), tuple(keep)
            case BatchMemOpNodeParams():
                operations = enumerate(params.operations)
                moved = tuple(replace(o, address=at[str(i)]) for i, o in operations)
                return BatchMemOpNodeParams(moved), tuple(keep)
            case ChildGraphNodeParams():
                return ChildGraphNodeParams(child), ()
            case ConditionalNodeParams():
                handle = self._conditions[int(params.handle)]
                return ConditionalNodeParams(handle, params.kind, params.size), ()
            case EventRecordNodeParams():
                event = self._events[int(params.event)]
                return EventRecordNodeParams(event.handle), (event,)
            case EventWaitNodeParams():
                event = self._events[int(params.event)]
                return EventWaitNodeParams(event.handle), (event,)
            case FreeNodeParams():
                return FreeNodeParams(at["address"]), ()
        return params, ()


_modules: weakref.WeakKeyDictionary[Context, weakref.WeakValueDictionary[str, LoadedModule]] = (
    weakref.WeakKeyDictionary()
)
"""The modules that graph files brought, by their digest: many files of a store have the same."""


def _refused(error: DriverError) -> GraphFileError:
    return GraphFileError(f"the driver refuses what it says: {error}")


def _read_back(node: NodeRecord) -> bool:
    """Whether the driver decides something of a node when it is added."""
    return isinstance(node.params, ConditionalNodeParams | AllocNodeParams)
