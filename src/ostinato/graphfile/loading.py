"""Loads a graph file as a graph with named buffers, at addresses of this process."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.device import Device
from ostinato.driver.api import (
    AllocNodeParams,
    ChildGraphNodeParams,
    ConditionalHandle,
    ConditionalNodeParams,
    EdgeData,
    EventRecordNodeParams,
    EventWaitNodeParams,
    GraphHandle,
    KernelTable,
    MemoryRange,
    NodeHandle,
    NodeParams,
    not_null,
)
from ostinato.driver.context import Context, context_of
from ostinato.driver.order import in_order
from ostinato.driver.signature import BF16, BF16_TYPESTR, BYTES
from ostinato.driver.stream import Event, Operation, Stream
from ostinato.errors import ContextPoisonedError, DriverError, GraphFileError, InputError
from ostinato.files import UntrustedError, open_regular
from ostinato.graph.frozen import graphs_inside
from ostinato.graph.graph import Graph
from ostinato.graph.node import NodeLabel
from ostinato.graph.order import overlap
from ostinato.graphfile.container import (
    Contents,
    open_file,
    read_manifest,
    read_tensors,
    tensor_bytes,
)
from ostinato.graphfile.records import (
    PLAIN,
    WORD,
    Block,
    FunctionRecord,
    GraphManifest,
    GraphRecord,
    Kernels,
    NamedBuffer,
    NodeRecord,
    look_of,
    machine_of,
    misfit,
    with_addresses,
)
from ostinato.memory import Buffer, allocate
from ostinato.memory.ranges import KnownRanges, Target, range_of
from ostinato.modules import Kernel, LoadedModule

_ALIGNMENT = 256  # bytes; captured addresses are known modulo this
_APART = 1024  # bytes between blocks: a multiple of the driver's alignment
_GUARD = 64 << 10  # smallest guard in bytes, a multiple of the alignment
_GUARDS_SHARE = 8  # guards take at most this fraction (1/8) of free memory


class LoadedGraph(Graph):
    """A graph from a file, made by `load`.

    loaded = ost.graphfile.load(device, "step.graph")
    run = loaded.instantiate(upload=stream)
    loaded.inputs["x"].set(values, stream)
    run.launch(stream)
    """

    inputs: Mapping[str, Any]
    """Memory that a launch reads, by name: buffers, or the memory that the caller gave."""
    outputs: Mapping[str, Any]
    constants: Mapping[str, Any]
    events: tuple[Event, ...]
    """Events that the event nodes record and wait for, in node order."""
    labels: _Labels
    raw: bytes
    """The manifest's bytes as stored in the file."""
    scratch: tuple[Buffer, ...]
    """Memory without a name."""

    _size: tuple[int, int]

    def manifest(self) -> GraphManifest:
        """The file's manifest.  Parsed on each access, so that a process with many graphs does not
        keep all manifests."""
        return read_manifest(self.raw)

    def as_saved(self) -> bool:
        """True if no node was added or replaced since loading."""
        if self.replaced:
            return False
        nodes = edges = 0
        inside = [(self.handle, self.nodes())]
        while inside:
            handle, own = inside.pop()
            nodes += len(own)
            edges += len(self.context.driver.graph_edges(handle))
            for node in own:
                inside += zip(graphs_inside(node.params), node.children, strict=True)
        return (nodes, edges) == self._size

    def take_labels(self, child: GraphHandle, node: NodeHandle) -> None:
        """Moves the labels of a child graph's nodes to their copies in a child graph node."""
        self._label_copies(self.labels, child, node)
        for original in self.context.driver.graph_nodes(child):
            self.labels.pop(original, None)


def load(
    device: Device,
    path: str | Path,
    *,
    buffers: Mapping[str, Target] | None = None,
    constants: Mapping[str, Target] | str | Path | None = None,
    code: str | Path | None = None,
) -> LoadedGraph:
    """Returns a graph that `save` wrote, ready to instantiate, patch and rebind like any other.

    `buffers`: memory for inputs and outputs, by name, used in place; the others are allocated, and
    inputs start with their content at the time of saving.  `constants`: by name, live tensors that
    are used in place or NumPy arrays that are copied; or a safetensors file to read them from.
    Constants that the graph file stores may be left out; given ones take precedence.  `code`: the
    folder that the file shares with others.  Nothing is launched.

    A graph file is a program: load none that you would not run.  Raises GraphFileError for a file
    that is damaged, that other users may write, or that does not fit this device; InputError for
    buffers that do not fit.
    """
    context = context_of(device)
    context.require_open()
    given, stored = constants_of(constants)
    named = constants if isinstance(constants, Mapping) else {}  # a safetensors file may have more
    twice = named.keys() & (buffers or {}).keys()
    if twice:
        raise InputError(f"{', '.join(sorted(twice))}: given as buffers and as constants")
    given |= buffers or {}
    folder = None if code is None else Path(code)
    with without_collection(), open_file(Path(path), folder) as contents:
        loader = Loader(context, contents, given)
        return loader.load(loader.values(stored, exact=isinstance(constants, Mapping)))


@contextmanager
def without_collection() -> Iterator[None]:
    """Disables Python's cycle collector for the block: loading makes many small objects without
    cycles, and each collection would walk all objects of the process."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def constants_of(
    constants: Mapping[str, Any] | str | Path | None,
) -> tuple[dict[str, Target], dict[str, npt.NDArray[Any]]]:
    """Splits constants into device memory to use in place and values to copy."""
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
    except (OSError, UntrustedError, GraphFileError) as error:
        raise GraphFileError(f"the constants in {path} cannot be read ({error})") from None


@dataclass(frozen=True, slots=True)
class Guard:
    """Memory before or behind a block that no launch may write."""

    block: int
    memory: MemoryRange
    behind: bool


class Loader:
    """One loading of a file.  `bases`: addresses of the blocks; `owners`: the objects that own
    them."""

    def __init__(
        self,
        context: Context,
        contents: Contents,
        given: Mapping[str, Target],
        *,
        rooms: Mapping[int, int] | None = None,
    ) -> None:
        """Takes `rooms` for the check: each block gets an allocation of its own between guards.
        Its values: bytes behind the block in its allocation where the graph was saved, if known."""
        self._context = context
        self._rooms = rooms
        self.guards: list[Guard] = []
        self._driver = context.driver
        self._contents = contents
        self._given = given
        self.manifest = contents.manifest
        self._kernels: list[Kernel] = []
        self.bases: list[int] = []
        self.owners: list[object] = []
        self._kept = _Kept(self.owners)
        self._live = KnownRanges(self._driver.memory_range)
        self._conditions: list[ConditionalHandle] = []
        self._events: list[Event] = []
        self._known = {buffer.name: buffer for buffer in self.manifest.buffers}
        unknown = given.keys() - self._known.keys()
        if unknown:
            there = ", ".join(self._known) or "nothing"
            raise InputError(
                f"{contents.path} names no {', '.join(sorted(unknown))}; it names {there}"
            )

    def values(
        self, given: Mapping[str, npt.NDArray[Any]], *, exact: bool = False
    ) -> dict[str, npt.NDArray[Any]]:
        """Returns initial content by name, for inputs and constants outside the caller's memory.

        `given`: values of constants, which replace those stored in the file; with `exact`, other
        names in it raise InputError.  Raises GraphFileError for constants without a value.
        """
        constants = self.manifest.names("constant")
        unknown = given.keys() - set(constants) if exact else set()
        if unknown:
            there = ", ".join(constants) or "none"
            raise InputError(
                f"{self._contents.path} has no constant {', '.join(sorted(unknown))}; its "
                f"constants: {there}"
            )
        found: dict[str, npt.NDArray[Any]] = {}
        theirs = {buffer.block for buffer in self.manifest.buffers if self._is_given(buffer)}
        for buffer in self.manifest.buffers:
            name = buffer.name
            if name in self._given:
                continue
            if "constant" in buffer.roles and name in given:
                _require_fit(buffer, given[name])
                found[name] = given[name]
            elif buffer.block in theirs:
                continue
            elif "input" in buffer.roles or buffer.stored:
                kind = "constants" if buffer.stored else "inputs"
                found[name] = self._contents.tensor(f"{kind}/{name}")
            elif "constant" in buffer.roles:
                raise GraphFileError(
                    f"it takes the constant {name!r} ({buffer.nbytes} bytes) by name: give "
                    "constants={name: tensor}, or a safetensors file"
                )
        return found

    def load(self, values: Mapping[str, npt.NDArray[Any]]) -> LoadedGraph:
        self._require_device()
        try:
            modules = self._load_modules()
            self._kernels = [self._kernel(record, modules) for record in self.manifest.functions]
            self._allocate(values)
            self._events = [Event(self._context) for _ in range(self.manifest.events)]
        except ContextPoisonedError:
            raise
        except DriverError as error:
            raise _refused(error) from error
        return self.build(self.manifest.graph)

    def build(self, record: GraphRecord) -> LoadedGraph:
        """Builds a graph over the memory that `load` made; `record`: the manifest's or similar."""
        graph: LoadedGraph | None = None
        try:
            graph = LoadedGraph(self._context, self._driver.graph_create())
            graph.labels = _Labels()
            self._conditions = [
                not_null(
                    self._driver.conditional_create(
                        graph.handle, default=c.default, reset_at_launch=c.reset_at_launch
                    ),
                    "condition",
                )
                for c in self.manifest.conditions
            ]
            graph.keep += [*self._kernels, *self.owners, *self._events]
            self._build(graph, graph.handle, record)
        except BaseException as error:
            if graph is not None:
                graph.close()
            if isinstance(error, DriverError) and not isinstance(error, ContextPoisonedError):
                raise _refused(error) from error
            raise
        self._name(graph)
        return graph

    def _require_device(self) -> None:
        """Raises GraphFileError unless this device can run the code."""
        here = machine_of(self._context)
        machine = self.manifest.machine
        kinds = {f.kind for f in self.manifest.functions} - self._driver.capabilities.image_kinds
        mine, theirs = here.compute_capability, machine.compute_capability
        compiled = any(f.kind == "cubin" for f in self.manifest.functions)
        if kinds or (compiled and (mine[0] != theirs[0] or mine[1] < theirs[1])):
            raise GraphFileError(
                f"it was saved on {machine.device} (compute capability {theirs[0]}.{theirs[1]}), "
                f"and {self._driver.name} is {here.device} ({mine[0]}.{mine[1]}), which does "
                "not run its code; save the graph on this device"
            )

    # --- code
    def _load_modules(self) -> dict[str, LoadedModule]:
        """Loads the modules of all functions, by digest or target; modules already loaded are
        shared."""
        loaded = _modules.setdefault(self._context, weakref.WeakValueDictionary())
        first = {_module_of(record): record for record in reversed(self.manifest.functions)}
        found: dict[str, LoadedModule] = {}
        for key in first:
            module = loaded.get(key)
            if module is not None and not module.closed:
                found[key] = module
        digests = [r.digest for key, r in first.items() if key not in found and r.digest]
        images = self._contents.codes(digests)
        for key, record in first.items():
            if key not in found:
                data = next(images) if record.digest else b""
                image = self._driver.code_image(replace(record, data=data))
                found[key] = loaded[key] = LoadedModule(self._context, image, name=key[:12])
        return found

    def _kernel(self, record: FunctionRecord, modules: Mapping[str, LoadedModule]) -> Kernel:
        module = modules[_module_of(record)]
        try:
            kernel = module.kernel(record.name)
        except InputError as error:
            raise GraphFileError(f"its code has no kernel {record.name!r} ({error})") from None
        if kernel.info.parameters != record.parameters:
            raise GraphFileError(
                f"the kernel {record.name!r} takes other parameters than when the graph was saved; "
                "save it again"
            )
        self._driver.function_restore(kernel.function, record)
        return kernel

    # --- memory
    def _allocate(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        of: dict[int, list[NamedBuffer]] = {}
        for buffer in self.manifest.buffers:
            of.setdefault(buffer.block, []).append(buffer)
        blocks = self.manifest.blocks
        # Checked before any allocation: new memory may reuse the addresses of the caller's closed
        # memory.
        given = {
            index: self._bound(named, blocks[index].nbytes, blocks[index].phase)
            for index, named in of.items()
            if any(map(self._is_given, named))
        }
        self._require_apart({index: base for index, (_, base) in given.items()}, of)
        mine = [i for i, b in enumerate(blocks) if b.node is None and i not in given]
        wanted = sum(blocks[i].nbytes for i in mine)
        free = self._driver.memory_info()[0] if mine else 0
        if wanted > free:
            raise GraphFileError(
                f"it needs {wanted} bytes of memory, and {free} are free; close other graphs"
            )
        if self._rooms is None:
            alone = [i for i in mine if i in of or blocks[i].pinned]
            made = self._made(alone, blocks, of)
            made |= self._made_together([i for i in mine if i not in made], blocks)
        else:
            share = (free - wanted) // (_GUARDS_SHARE * max(1, len(mine)))
            made = self._made(mine, blocks, of, max(_GUARD, share))
        for index in range(len(blocks)):
            owner, base = given.get(index) or made.get(index) or (None, 0)
            self.owners.append(owner)
            self.bases.append(base)
        self._fill(values)

    def _made(
        self,
        wanted: Sequence[int],
        blocks: Sequence[Block],
        of: Mapping[int, list[NamedBuffer]],
        most: int = 0,
    ) -> dict[int, tuple[object, int]]:
        """Allocates each block by itself, with the name of the first buffer in it.  With `most`,
        each lies between two guards; the one behind has the bytes of the room behind the block
        where the graph was saved, but no more than `most`."""
        found: dict[int, tuple[object, int]] = {}
        for index in wanted:
            block = blocks[index]
            before, after = block.phase, 0
            if most:
                room = (self._rooms or {}).get(index, 0)
                before, after = _GUARD + block.phase, max(_GUARD, min(room, most))
            nbytes = before + block.nbytes + after
            name = of[index][0].name if index in of else None
            whole = allocate(self._context, nbytes, BYTES, pinned=block.pinned, name=name)
            base = whole.address + before
            found[index] = whole, base
            if most:
                self.guards += [
                    Guard(index, MemoryRange(whole.address, before), behind=False),
                    Guard(index, MemoryRange(base + block.nbytes, after), behind=True),
                ]
        return found

    def _made_together(
        self, wanted: Sequence[int], blocks: Sequence[Block]
    ) -> dict[int, tuple[object, int]]:
        """Allocates blocks in one piece: allocations are the slowest part of loading."""
        places: list[int] = []
        end = 0
        for index in wanted:
            places.append(end + blocks[index].phase)
            end = -(-(places[-1] + blocks[index].nbytes) // _APART) * _APART
        if not wanted:
            return {}
        whole = allocate(self._context, end, BYTES)
        pairs = zip(wanted, places, strict=True)
        return {index: (whole, whole.address + place) for index, place in pairs}

    def _require_apart(self, bases: Mapping[int, int], of: Mapping[int, list[NamedBuffer]]) -> None:
        """Raises InputError if memory given for two blocks overlaps: the graph does not order
        writes to one and reads of the other.  Constants may overlap, as they are never written."""
        last, end = -1, 0  # the block with the largest end so far
        for index in sorted(bases, key=lambda i: bases[i]):
            reach = bases[index] + self.manifest.blocks[index].nbytes
            if bases[index] < end and any("constant" not in b.roles for b in of[last] + of[index]):
                raise InputError(
                    f"the memory given for {of[last][0].name!r} and {of[index][0].name!r} "
                    "overlaps, and in the graph it does not; give each its own"
                )
            if reach > end:
                last, end = index, reach

    def _is_given(self, buffer: NamedBuffer) -> bool:
        """True if the caller gives a buffer's memory; a buffer of no bytes needs none."""
        return buffer.name in self._given and buffer.nbytes > 0

    def _bound(self, named: list[NamedBuffer], nbytes: int, phase: int) -> tuple[object, int]:
        """Returns the caller's memory for a block: its object and the block's address."""
        bases: dict[int, object] = {}
        for buffer in named:
            if not self._is_given(buffer):
                continue
            target = self._given[buffer.name]
            memory = range_of(target, buffer.name)
            base = memory.address - buffer.into
            _require_fit(buffer, target)
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
            theirs = target.context if isinstance(target, Buffer) else self._context
            if theirs.driver.name != self._driver.name or (
                # Two host devices share a name, and so do two contexts of one GPU.
                theirs is not self._context and not self._live(memory.address)
            ):
                raise InputError(
                    f"{buffer.name!r} is memory of another device ({theirs.driver.name}); give "
                    f"memory of {self._driver.name}, which the graph is loaded on"
                )
            closed = getattr(target, "closed", False)
            if closed or not (isinstance(target, Buffer) or self._live(memory.address)):
                raise InputError(
                    f"{buffer.name!r} is at {memory.address:#x}, which is no live memory of "
                    f"{self._driver.name}; give memory of this device"
                )
            alignment = math.gcd(phase or _ALIGNMENT, _ALIGNMENT)
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
        """True if a block overlaps one of these ranges."""
        mine = [
            MemoryRange(base, block.nbytes)
            for base, block in zip(self.bases, self.manifest.blocks, strict=True)
        ]
        return overlap(mine, ranges)

    def _fill(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        wanted = [b for b in self.manifest.buffers if b.name in values and b.nbytes]
        if not wanted:
            return
        with Stream(self._context, self._driver.stream_create(), owned=True) as stream:
            for buffer in wanted:
                data = tensor_bytes(values[buffer.name])
                if data.nbytes != buffer.nbytes:
                    raise GraphFileError(
                        f"what {buffer.name!r} is to hold has {data.nbytes} bytes, and the graph "
                        f"was captured with {buffer.nbytes}"
                    )
                address = self.bases[buffer.block] + buffer.into
                self._driver.memcpy_from_host(address, data.data, stream.handle)
            stream.synchronize()  # later work may use other streams

    def _name(self, graph: LoadedGraph) -> None:
        """Sets a graph's named buffers, events and scratch memory."""
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
                kind = np.dtype(buffer.dtype)
                look = None if buffer.look is None else buffer.look.typestr
                if kind == np.uint16 and look == BF16_TYPESTR:
                    kind = BF16
                elif kind == np.uint8 and look != buffer.dtype:
                    kind = BYTES  # named without a type, or with one that NumPy lacks
                view = owner.view(into, buffer.shape, kind)
                view.name = buffer.name
                made[buffer.name] = view
            else:
                made[buffer.name] = MemoryRange(base + into, buffer.nbytes)
        names = self.manifest.names
        graph.inputs = {name: made[name] for name in names("input")}
        graph.outputs = {name: made[name] for name in names("output")}
        graph.constants = {name: made[name] for name in names("constant")}
        graph.events = tuple(self._events)
        graph.raw = self._contents.raw
        graph._size = self.manifest.graph.size
        scratch = [owner for index, owner in enumerate(self.owners) if index not in named]
        graph.scratch = tuple({id(s): s for s in scratch if isinstance(s, Buffer)}.values())

    # --- nodes
    def _build(self, graph: LoadedGraph, handle: GraphHandle, record: GraphRecord) -> None:
        """Adds all nodes of a record to a definition: the graph's own, a child graph or a body."""
        order = in_order(len(record), [(edge.source, edge.target) for edge in record.edges])
        assert order is not None, "a manifest with a cycle is refused"
        position = {place: index for index, place in enumerate(order)}
        before: list[list[int]] = [[] for _ in order]
        for source, target, _ in record.edges:
            before[position[target]].append(position[source])
        of_edges: dict[int, list[EdgeData]] = {
            target: [] for _, target, data in record.edges if data is not PLAIN
        }
        for _, target, data in record.edges if of_edges else ():
            if target in of_edges:
                of_edges[target].append(data)
        others = record.others
        kernels = iter(range(len(record.kernels)))
        rows = [-1 if place in others else next(kernels) for place in range(len(order))]
        launches = _Launches(
            record.kernels, self._kernels, self.bases, self._conditions, self._kept
        )
        nodes: list[NodeHandle] = []
        some: list[tuple[int, Sequence[int]]] = []  # consecutive kernels, added in one call

        def add_kernels() -> None:
            first = len(nodes)
            try:
                self._driver.graph_add_kernels(handle, nodes, launches.table, some)
            finally:
                graph.labels.note(nodes[first:], launches, [row for row, _ in some])
            some.clear()

        for place, sources in zip(order, before, strict=True):
            given = of_edges.get(place)
            if rows[place] >= 0 and given is None:
                some.append((rows[place], sources))
                continue
            add_kernels()
            after = [nodes[source] for source in sources]
            if rows[place] < 0:
                nodes.append(self._add(graph, handle, place, others[place], after, given, launches))
                continue
            params = launches.table.params(rows[place])
            nodes.append(self._driver.graph_add_node(handle, after, params, given))
            graph.labels.note(nodes[-1:], launches, rows[place : place + 1])
        add_kernels()

    def _add(
        self,
        graph: LoadedGraph,
        handle: GraphHandle,
        place: int,
        node: NodeRecord,
        sources: Sequence[NodeHandle],
        data: Sequence[EdgeData] | None,
        launches: _Launches,
    ) -> NodeHandle:
        """Adds a node that is not a kernel, and its nested graphs."""
        child = GraphHandle(0)
        if isinstance(node.params, ChildGraphNodeParams):
            child = not_null(self._driver.graph_create(), "graph")
        try:
            if child:
                self._build(graph, child, node.inner[0])
            params, keep = self._params(node, child)
            made = self._driver.graph_add_node(handle, sources, params, data)
            graph.labels[made] = NodeLabel(
                Operation(params, node.name, None, None, keep, None), None
            )
            if child:
                graph.take_labels(child, made)
        finally:
            if child:
                self._driver.graph_destroy(child)
        driver_sets = isinstance(node.params, ConditionalNodeParams | AllocNodeParams)
        added = self._driver.node_params(made) if driver_sets else None
        if isinstance(added, ConditionalNodeParams):
            for body, inner in zip(added.bodies, node.inner, strict=True):
                self._build(graph, not_null(body, "body"), inner)
        elif isinstance(added, AllocNodeParams):
            block = next(i for i, b in enumerate(self.manifest.blocks) if b.node == place)
            self.bases[block] = added.address
            launches.move(block, added.address)
        return made

    def _params(
        self, node: NodeRecord, child: GraphHandle
    ) -> tuple[NodeParams, tuple[object, ...]]:
        """Returns a node's parameters with handles and addresses, and the objects to keep alive."""
        params = node.params
        keep = self._kept([word.block for word in node.pointers])
        match params:
            case ChildGraphNodeParams():
                return ChildGraphNodeParams(child), ()
            case ConditionalNodeParams():
                handle = self._conditions[int(params.handle)]
                return ConditionalNodeParams(handle, params.kind, params.size), ()
            case EventRecordNodeParams() | EventWaitNodeParams():
                event = self._events[int(params.event)]
                return type(params)(event.handle), (event,)
        at = {str(word.place): self.bases[word.block] + word.into for word in node.pointers}
        return with_addresses(params, at), keep


class _Kept:
    """The objects that nodes keep alive, as tuples; nodes with the same objects share one tuple."""

    def __init__(self, owners: Sequence[object]) -> None:
        """Takes the owner of each block's memory."""
        self._owners = owners
        self._made: dict[tuple[object, ...], tuple[object, ...]] = {}

    def __call__(self, blocks: Iterable[int], *others: object) -> tuple[object, ...]:
        key = (*blocks, *map(id, others))
        keep = self._made.get(key)
        if keep is None:
            owners = [self._owners[block] for block in dict.fromkeys(blocks)]
            keep = (*others, *(owner for owner in owners if owner is not None))
            self._made[key] = keep
        return keep


class _Launches:
    """A graph's kernels with the functions, addresses and conditions of this process."""

    def __init__(
        self,
        kernels: Kernels,
        loaded: Sequence[Kernel],
        bases: Sequence[int],
        conditions: Sequence[ConditionalHandle],
        kept: _Kept,
    ) -> None:
        """Takes in `loaded` the kernels of the manifest's functions."""
        self._kernels, self._loaded, self._kept = kernels, loaded, kept
        self._words = words = kernels.words
        starts = kernels.starts.tolist()
        data = bytearray(kernels.data)
        self._data = np.frombuffer(data, "<u8")
        self._slots = (kernels.starts[words.kernel] + words.place) // WORD
        if len(self._slots):
            known = np.array(bases, np.uint64)
            self._data[self._slots] = known[words.block] + words.into.astype(np.uint64)
        for row, some in kernels.conditions.items():
            for word in some:
                self._data[(starts[row] + word.offset) // WORD] = int(conditions[word.condition])
        handles = [one.function for one in loaded]
        layouts = [one.parameters for one in kernels.known]
        self.table = KernelTable(
            [handles[function] for function in kernels.functions],
            kernels.launches,
            [
                layouts[function] if laid else ()
                for function, laid in zip(kernels.functions, kernels.laid, strict=True)
            ],
            kernels.packed,
            data,
            starts,
            kernels.sizes,
        )

    def move(self, block: int, base: int) -> None:
        """Sets the addresses in a block whose base is known only now."""
        which = self._words.block == block
        into = self._words.into[which].astype(np.uint64)
        self._data[self._slots[which]] = into + np.uint64(base)

    def label(self, row: int) -> NodeLabel:
        """Returns the label of a kernel's node."""
        kernels = self._kernels
        kernel = self._loaded[kernels.functions[row]]
        first, end = np.searchsorted(self._words.kernel, (row, row + 1)).tolist()
        keep = self._kept(self._words.block[first:end].tolist(), kernel)
        params, name = self.table.params(row), kernels.name(row)
        signature = kernels.known[kernels.functions[row]].signature
        return NodeLabel(Operation(params, name, None, None, keep, signature), None)


class _Labels(UserDict[NodeHandle, NodeLabel]):
    """A loaded graph's labels.  Those of kernels are made on first access: reading or changing the
    graph needs them, launching does not."""

    def note(self, nodes: Sequence[NodeHandle], launches: _Launches, rows: Sequence[int]) -> None:
        """Records which kernel each of these nodes is."""
        later: Any = zip(itertools.repeat(launches), rows)
        self.data.update(zip(nodes, later, strict=False))

    def __getitem__(self, node: NodeHandle) -> NodeLabel:
        known: NodeLabel | tuple[_Launches, int] = self.data[node]
        if isinstance(known, tuple):
            launches, row = known
            known = self.data[node] = launches.label(row)
        return known


_modules: weakref.WeakKeyDictionary[Context, weakref.WeakValueDictionary[str, LoadedModule]] = (
    weakref.WeakKeyDictionary()
)
"""The modules of graph files by digest: many files of a store share them."""


def _module_of(record: FunctionRecord) -> str:
    return record.digest or f"{record.target}:{record.name}"


def _require_fit(buffer: NamedBuffer, target: Target) -> None:
    """Raises InputError if type, shape or layout differ from the captured ones."""
    look = look_of(target)
    if misfit(buffer.look, look):
        raise InputError(
            f"{buffer.name!r} is {look}, and the graph was captured with {buffer.look}; give it "
            "with that type, shape and layout"
        )


def _refused(error: DriverError) -> GraphFileError:
    return GraphFileError(f"the driver refuses what it says: {error}")
