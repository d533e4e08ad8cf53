"""Saves a graph, its code and its named memory to a file, which a separate process checks.

Memory is saved in *blocks*: ranges that pointers reach.  A block is a named buffer with all memory
known to be used through pointers into it; for a pointer of unknown reach, the whole part of the
allocation between named buffers.  Blocks without a name are scratch: the file has only their sizes.
The check finds out whether results depend on their content.

A pointer to a named buffer may reach beyond the buffer: a framework's pool reuses the memory of a
large intermediate tensor for a small result.  The check finds writes outside a block; the block is
then enlarged, and saving starts again.
"""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from ostinato.driver.api import (
    AllocNodeParams,
    ChildGraphNodeParams,
    ConditionalHandle,
    ConditionalNodeParams,
    ConditionDefaults,
    EventHandle,
    EventRecordNodeParams,
    EventWaitNodeParams,
    FunctionHandle,
    GraphHandle,
    KernelNodeParams,
    MemoryRange,
    NodeParams,
    ParameterSlot,
)
from ostinato.driver.context import Context
from ostinato.driver.signature import BF16_TYPESTR, Access
from ostinato.driver.stream import Stream
from ostinato.errors import DriverError, GraphFileError, InputError
from ostinato.files import temporary_beside
from ostinato.graph.executable import GraphExec
from ostinato.graph.graph import Graph
from ostinato.graph.show.outline import OutlineEdge
from ostinato.graphfile.container import tensor_bytes, write_file
from ostinato.graphfile.records import (
    Block,
    FunctionRecord,
    GraphManifest,
    GraphRecord,
    Look,
    NamedBuffer,
    NodeRecord,
    PointerWord,
    look_of,
    machine_of,
    with_addresses,
)
from ostinato.graphfile.survey import (
    Address,
    Loose,
    Stray,
    Survey,
    SurveyedGraph,
    SurveyedNode,
    Twin,
    survey,
)
from ostinato.memory.ranges import KnownRanges, Target, merged, range_of
from ostinato.memory.restoring import put_back

Keeping = Literal["stored", "by name"]
"""Storage of constants: their content is in the file, or they are given by name at loading."""

_CHECK_SECONDS = 120.0
_MOST_STRAYS = 8
_MOST_LOOSE = 1024  # each is tried by itself in the check

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Named:
    """A named buffer: its memory and its look."""

    name: str
    roles: tuple[str, ...]
    memory: MemoryRange
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    look: Look | None
    pinned: bool


def _by_address(
    things: Sequence[_T], address_of: Callable[[_T], int]
) -> Callable[[MemoryRange], list[_T]]:
    """Returns a function that finds the things with an address in a range, in their given order.
    It searches in sorted addresses: a graph has thousands of them, and of blocks."""
    order = sorted(range(len(things)), key=lambda n: address_of(things[n]))
    addresses = [address_of(things[n]) for n in order]

    def inside(memory: MemoryRange) -> list[_T]:
        first, behind = (bisect_left(addresses, end) for end in (memory.address, memory.end))
        return [things[n] for n in sorted(order[first:behind])]

    return inside


@dataclass(frozen=True, slots=True)
class _Piece:
    """A block at its current address, and the nodes that use it."""

    memory: MemoryRange
    names: tuple[str, ...]
    pinned: bool
    node: int | None
    users: tuple[str, ...]
    only_read: bool
    """True if all users are known to only read it."""
    empty: bool
    """True if it stands for buffers of no bytes, which may lie anywhere."""

    def __str__(self) -> str:
        users = ", ".join(self.users[:6]) + (", …" if len(self.users) > 6 else "")
        return f"{self.memory.nbytes} bytes at {self.memory.address:#x} (used by {users})"


def save(
    graph: Graph,
    path: str | Path,
    *,
    inputs: Mapping[str, Target] | None = None,
    outputs: Mapping[str, Target] | None = None,
    constants: Mapping[str, Target] | None = None,
    keeping: Keeping = "stored",
    twin: Twin | None = None,
    check: bool = True,
    code: str | Path | None = None,
) -> None:
    """Writes a graph to a file that `load` reads, in any process on a device of this kind.

        graphfile.save(graph, "step.graph", inputs={"x": x}, outputs={"y": y}, constants=w)

    Buffers and device arrays of any library can be named: `inputs` are read, `outputs` are written,
    state is both.  `constants` are never written; their content is in the file (`keeping="stored"`)
    or given at loading ("by name").  All other memory is scratch.  `twin`: a second capture, which
    proves which words are addresses; without one, signatures and live allocations decide.  `code`:
    a folder for content that several files share: kernel images, constants and inputs.

    With `check`, launches the graph twice, restores all memory, and checks the file in a fresh
    process with other memory at other addresses before it is put in place.  Raises GraphFileError
    for what cannot be saved, with the node and the reason; docs/graph-file.md has the rules.
    """
    GraphSaving(
        graph,
        Path(path),
        inputs=inputs or {},
        outputs=outputs or {},
        constants=constants or {},
        keeping=keeping,
        twin=twin,
        check=check,
        code=None if code is None else Path(code),
    ).save()


@dataclass(frozen=True, slots=True)
class GraphSaving:
    """The arguments of `save`.  `key`: the key in a store, as text.  `run`: an executable of the
    graph as it is, used for the launches; if None, one is instantiated (a graph with conditional
    nodes allows only one)."""

    graph: Graph
    path: Path
    inputs: Mapping[str, Target]
    outputs: Mapping[str, Target]
    constants: Mapping[str, Target]
    keeping: Keeping
    twin: Twin | None
    check: bool
    code: Path | None
    key: str = ""
    run: GraphExec | None = None

    def save(self) -> None:
        """Implements `save`."""
        graph, check = self.graph, self.check
        if self.keeping not in ("stored", "by name"):
            raise InputError(f'keeping={self.keeping!r}: "stored" or "by name"')
        _require_whole(graph)
        graph.context.synchronize()
        named = _named(self.inputs, self.outputs, self.constants)
        found = survey(graph, {n: one.memory for n, one in named.items()}, self.twin)
        if self.key and found.events:
            raise GraphFileError(
                "the graph records or waits for events of this process, and one that is restored "
                "has events of its own: nobody outside would see them"
            )
        loose = [(at, one) for at, node in enumerate(found.graph.walk()) for one in node.loose]
        if len(loose) > (_MOST_LOOSE if check else 0):
            many = f"{len(loose)} such places are too many to try" if check else ""
            raise GraphFileError(f"{loose[0][1].why} ({many or 'check=False tries nothing'})")
        strayed: list[MemoryRange] = []
        for _ in range(_MOST_STRAYS):
            more = self._attempt(found, named, loose, strayed)
            if not more:
                return
            strayed += more
        raise GraphFileError(
            f"{self.path}: each try writes outside of the memory that the last one was found to "
            f"use, such as at {strayed[-1].address:#x}; name all memory that the graph uses"
        )

    def _attempt(
        self,
        found: Survey,
        named: Mapping[str, _Named],
        loose: Sequence[tuple[int, Loose]],
        strayed: Sequence[MemoryRange],
    ) -> list[MemoryRange]:
        """Writes the file and returns []; or writes none and returns the memory that the check
        found in use besides.  `strayed`: such memory from earlier attempts."""
        context, path, check = self.graph.context, self.path, self.check
        pieces = _pieces(found, named, context, strayed)
        plan = _Plan(self.graph, found, named, pieces, self.keeping)
        manifest, images = plan.manifest(checked=check, key=self.key)
        stored = plan.constant if self.keeping == "stored" else []
        with Stream(context, context.driver.stream_create(), owned=True) as stream:
            content = _Content(context, stream, pieces, None if check else {*plan.given, *stored})
            tensors = {f"constants/{name}": plan.view(content.first, name) for name in stored}
            for name in plan.given:
                tensors[f"inputs/{name}"] = plan.view(content.first, name)
            rest: dict[str, npt.NDArray[Any]] = {}
            if check:
                after = _reference(self.graph, self.run, stream, content, plan)
                for name in plan.changing:
                    tensors[f"results/{name}"] = plan.view(after, name)
                rest = {} if stored else plan.constants(content.first)
        draft = temporary_beside(path)
        try:
            write_file(draft if check else path, manifest, images, tensors, self.code)
            if check:
                strays = _check(draft, context, pieces, rest, content, self.code, loose)
                if strays:
                    return [_grown(pieces[n], stray, named, context) for n, stray in strays.items()]
                draft.replace(path)
        except OSError as error:
            raise GraphFileError(
                f"{path} cannot be written ({error}); nothing was saved"
            ) from error
        finally:
            with suppress(OSError):
                draft.unlink()
        return []


def _require_whole(graph: Graph) -> None:
    """Raises GraphFileError if a launch of the graph needs more than its nodes."""
    graph.require_launchable()
    if graph.before_launch is not None:
        raise GraphFileError(
            "the graph draws random numbers, and the state of their generator is moved on "
            "before each launch by what is no part of the graph; draw the numbers outside of "
            "the graph, into a named buffer"
        )


class Draft:
    """A graph file without content and check, for `write` when the driver cannot be asked any more.

    `inputs` and `constants` as for `save`; constants are to be given by name.  Launches nothing and
    waits for nothing.  Raises GraphFileError.
    """

    def __init__(
        self, graph: Graph, inputs: Mapping[str, Target], constants: Mapping[str, Target]
    ) -> None:
        _require_whole(graph)
        named = _named(inputs, {}, constants)
        found = survey(graph, {n: one.memory for n, one in named.items()}, None)
        pieces = _pieces(found, named, graph.context, ())
        plan = _Plan(graph, found, named, pieces, "by name")
        self._manifest, self._images = plan.manifest(checked=False, key="")

    def write(self, path: Path, content: Mapping[str, npt.NDArray[np.uint8]]) -> None:
        """Writes the file; `content`: the bytes of each input.  Raises OSError; then there is no
        file."""
        tensors = {f"inputs/{name}": raw for name, raw in content.items()}
        write_file(path, self._manifest, self._images, tensors, None)


# ----------------------------------------------------------------------------------------- memory


def _named(
    inputs: Mapping[str, Target], outputs: Mapping[str, Target], constants: Mapping[str, Target]
) -> dict[str, _Named]:
    """Returns the named buffers.  Raises InputError if one name is given for two memories."""
    found: dict[str, _Named] = {}
    for role, targets in (("input", inputs), ("output", outputs), ("constant", constants)):
        for name, target in targets.items():
            if not isinstance(name, str) or not name:
                raise InputError(f"{name!r} is no name of an {role}: a text is needed")
            memory = range_of(target, f"{role} {name!r}")
            look = look_of(target)
            shape, dtype = _kind_of(look, memory)
            pinned = bool(getattr(target, "pinned", False))
            made = _Named(name, (role,), memory, shape, dtype, look, pinned)
            known = found.get(name)
            if known is not None and known.memory != memory:
                raise InputError(f"{name!r} is the name of two buffers; give each its own")
            if known is not None and "constant" in (*known.roles, role):
                raise InputError(f"{name!r} is a constant and something else; it is one of them")
            found[name] = made if known is None else replace(known, roles=(*known.roles, role))
    return found


def _kind_of(look: Look | None, memory: MemoryRange) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Returns shape and dtype; those of bytes if unknown or if elements are not in C order."""
    if look is not None and look.strides is None:
        with suppress(TypeError):
            dtype = np.dtype("<u2" if look.typestr == BF16_TYPESTR else look.typestr)
            fits = math.prod(look.shape) * dtype.itemsize == memory.nbytes
            if dtype.kind in "biufc" and fits:
                return look.shape, dtype
    return (memory.nbytes,), np.dtype(np.uint8)


def _pieces(
    found: Survey,
    named: Mapping[str, _Named],
    context: Context,
    strayed: Sequence[MemoryRange],
) -> list[_Piece]:
    """Returns the blocks by ascending address, those of alloc nodes last."""
    taken = merged(
        MemoryRange(one.memory.address, max(1, one.memory.nbytes)) for one in named.values()
    )
    starts = [memory.address for memory in taken]
    live = KnownRanges(context.driver.memory_range)
    ranges = [*taken, *strayed]
    for node in found.graph.walk():
        for address in node.addresses:
            if any(memory.holds(address.value) for memory in found.allocated.values()):
                continue
            if address.reach:
                ranges.append(MemoryRange(address.value, address.reach))
            else:
                behind = bisect_right(starts, address.value)
                near = taken[max(0, behind - 1) : behind + 1]
                if not any(memory.holds(address.value) for memory in near):
                    gap = _gap(address, near, live)
                    if gap is not None:
                        ranges.append(gap)
    uses = [(address, node) for node in found.graph.walk() for address in node.addresses]
    used = _by_address(uses, lambda use: use[0].value)
    names = _by_address(list(named.values()), lambda one: one.memory.address)
    pieces = [
        _piece(memory, None, used(memory), names(memory), context) for memory in merged(ranges)
    ]
    for index, memory in found.allocated.items():
        pieces.append(_piece(memory, index, used(memory), (), context))
    return pieces


def _grown(
    piece: _Piece, stray: Stray, named: Mapping[str, _Named], context: Context
) -> MemoryRange:
    """Returns a block's memory enlarged by the writes outside of it, up to the next named buffer.

    Raises GraphFileError if it then leaves the allocation.
    """
    memory = piece.memory
    allocation = context.driver.memory_range(memory.address)
    start, end = memory.address - stray.before, memory.end + stray.behind
    if allocation is None or start < allocation.address or end > allocation.end:
        raise GraphFileError(
            f"the graph writes {stray.before} bytes before and {stray.behind} behind {piece}, "
            "and that is outside of its allocation; no file was written"
        )
    if stray.behind:
        behind = [one.memory.address for one in named.values() if one.memory.address >= end]
        end = min([allocation.end, *behind])
    return MemoryRange(start, end - start)


def _gap(address: Address, near: Sequence[MemoryRange], live: KnownRanges) -> MemoryRange | None:
    """Returns the part of an address's allocation between the named buffers around it (`near`);
    None if it is in no live memory."""
    allocation = live(address.value)
    if allocation is None:
        return None
    start = max((m.end for m in near if m.end <= address.value), default=0)
    end = min((m.address for m in near if m.address > address.value), default=allocation.end)
    start, end = max(start, allocation.address), min(end, allocation.end)
    return MemoryRange(start, end - start)


def _piece(
    memory: MemoryRange,
    node: int | None,
    uses: Sequence[tuple[Address, SurveyedNode]],
    inside: Sequence[_Named],
    context: Context,
) -> _Piece:
    """Describes a block.  `uses`: addresses in it, with their nodes.  `inside`: named buffers that
    begin in it."""
    users = {id(node): node.path for _, node in uses}
    access = Access(0)
    for address, _ in uses:
        access |= address.access
    owner = context.owner_of(memory.address) if node is None else None
    pinned = any(one.pinned for one in inside) or bool(getattr(owner, "pinned", False))
    return _Piece(
        memory,
        tuple(one.name for one in inside),
        pinned,
        node,
        tuple(users.values()),
        bool(users) and Access.WRITE not in access,
        node is None and bool(inside) and not any(one.memory.nbytes for one in inside),
    )


# ------------------------------------------------------------------------------------- the manifest


class _Plan:
    """The manifest to write, and the places of the named buffers in the blocks."""

    def __init__(
        self,
        graph: Graph,
        found: Survey,
        named: Mapping[str, _Named],
        pieces: Sequence[_Piece],
        keeping: Keeping,
    ) -> None:
        self._graph = graph
        self._found = found
        self._named = named
        self._pieces = pieces
        self._starts = [piece.memory.address for piece in pieces if piece.node is None]
        self._keeping = keeping
        self._refuse_lost()
        self._digests: dict[bytes, str] = {}
        """The digests of the kernels' images; many kernels share one."""
        self._codes = [self._code(function) for function in found.functions]
        self.given = [n for n, one in named.items() if "input" in one.roles]
        """Names of inputs."""
        self.changing = [n for n, one in named.items() if "constant" not in one.roles]
        """Names of buffers that a launch may write."""
        self.constant = [n for n, one in named.items() if "constant" in one.roles]

    def _refuse_lost(self) -> None:
        """Raises GraphFileError for unnamed memory that is only read: its content would be lost."""
        for piece in self._pieces:
            if not piece.names and piece.node is None and piece.only_read:
                raise GraphFileError(
                    f"{piece} is only read and has no name, so its content would be lost; name it "
                    "as an input or a constant"
                )

    def manifest(self, *, checked: bool, key: str) -> tuple[GraphManifest, dict[str, bytes]]:
        """Returns the manifest, and the images by digest."""
        known = {
            int(found.node.params.handle): found.node.defaults
            for found in self._found.graph.walk()
            if isinstance(found.node.params, ConditionalNodeParams)
        }
        conditions = [_made_here(handle, known[handle]) for handle in self._found.conditions]
        made = GraphManifest(
            machine_of(self._graph.context),
            tuple(self._codes),
            tuple(
                Block(p.memory.nbytes, p.memory.address % 256, p.pinned, p.node)
                for p in self._pieces
            ),
            tuple(self._buffer(one) for one in self._named.values()),
            tuple(conditions),
            len(self._found.events),
            self._record(self._found.graph),
            checked,
            {},
            key,
        )
        return made, {digest: image for image, digest in self._digests.items()}

    def _buffer(self, one: _Named) -> NamedBuffer:
        block, into = self._place(one.memory.address)
        stored = self._keeping == "stored" and "constant" in one.roles
        return NamedBuffer(
            *(one.name, one.roles, block, into, one.shape, one.dtype.str, stored, one.look)
        )

    def _code(self, function: FunctionHandle) -> FunctionRecord:
        driver = self._graph.context.driver
        user = next(
            node
            for node in self._found.graph.walk()
            if isinstance(node.node.params, KernelNodeParams)
            and node.node.params.function == function
        )
        try:
            code = driver.function_code(function)
        except DriverError as error:
            raise GraphFileError(f"{user.path} cannot be saved: {error.detail or error}") from error
        parameters = driver.function_info(function).parameters
        signature = user.node.signature
        known = signature is not None and signature.layout == parameters
        if code.data and code.data not in self._digests:
            self._digests[code.data] = sha256(code.data).hexdigest()
        return FunctionRecord(
            *(code.name, code.kind, b"", code.target),
            *(code.shared, code.carveout, code.wide_clusters),
            *(self._digests.get(code.data, ""), parameters, signature if known else None),
        )

    def _place(self, address: int) -> tuple[int, int]:
        """Returns the block of an address and the offset in it."""
        # Blocks are disjoint and in ascending order; those of alloc nodes follow them.
        behind = bisect_right(self._starts, address)
        near = [*range(max(0, behind - 1), behind), *range(len(self._starts), len(self._pieces))]
        for index in near:
            if self._pieces[index].memory.holds(address):
                return index, address - self._pieces[index].memory.address
        for index in near:
            if self._pieces[index].memory.end == address:
                return index, self._pieces[index].memory.nbytes
        raise AssertionError("every address has its block")

    def _record(self, graph: SurveyedGraph) -> GraphRecord:
        place = {node.node.handle: index for index, node in enumerate(graph.nodes)}
        return GraphRecord.of(
            self._codes,
            [self._node(node) for node in graph.nodes],
            [OutlineEdge(place[e.source], place[e.target], e.data) for e in graph.edges],
        )

    def _node(self, entry: SurveyedNode) -> NodeRecord:
        params = entry.node.params
        words = tuple(PointerWord(a.place, *self._place(a.value), a.proof) for a in entry.addresses)
        hints: tuple[str, ...] = ()
        if isinstance(params, KernelNodeParams):
            hints = params.extra_attributes
        return NodeRecord(
            entry.node.name,
            self._without_handles(params, entry),
            words,
            entry.conditions,
            hints,
            tuple(self._record(graph) for graph in entry.inner),
            tuple(ParameterSlot(one.offset, len(one.other)) for one in entry.loose if one.free),
        )

    def _without_handles(self, params: NodeParams, entry: SurveyedNode) -> NodeParams:
        """Returns the parameters with manifest indices for handles and zero for addresses."""
        found = self._found
        match params:
            case KernelNodeParams():
                data = bytearray(params.arguments.data)
                places = [int(address.place) for address in entry.addresses]
                for at in (*places, *(word.offset for word in entry.conditions)):
                    data[at : at + 8] = bytes(8)
                made = params.with_data(bytes(data))
                function = FunctionHandle(found.functions.index(params.function))
                return replace(made, function=function, extra_attributes=())
            case ChildGraphNodeParams():
                return ChildGraphNodeParams(GraphHandle(0))
            case ConditionalNodeParams():
                place = ConditionalHandle(found.conditions.index(int(params.handle)))
                return ConditionalNodeParams(place, params.kind, params.size)
            case EventRecordNodeParams() | EventWaitNodeParams():
                return type(params)(EventHandle(found.events.index(int(params.event))))
            case AllocNodeParams():
                return AllocNodeParams(params.nbytes)
        return with_addresses(params, {})

    # --- content
    def view(self, content: Sequence[npt.NDArray[np.uint8]], name: str) -> npt.NDArray[Any]:
        """Returns the array of a named buffer within the content of all blocks."""
        one = self._named[name]
        block, into = self._place(one.memory.address)
        flat = content[block][into : into + one.memory.nbytes]
        return (
            flat.view(one.dtype).reshape(one.shape) if flat.size else np.empty(one.shape, one.dtype)
        )

    def constants(self, content: Sequence[npt.NDArray[np.uint8]]) -> dict[str, npt.NDArray[Any]]:
        return {name: self.view(content, name) for name in self.constant}


def _made_here(handle: int, defaults: ConditionDefaults | None) -> ConditionDefaults:
    if defaults is None:
        raise GraphFileError(
            f"the condition {handle:#x} was made by another library, and the driver does not "
            "tell its first value; make the conditional node with this library"
        )
    return defaults


# -------------------------------------------------------------------------------------- the check


class _Content:
    """The content of all blocks before the reference run, in host memory."""

    def __init__(
        self,
        context: Context,
        stream: Stream,
        pieces: Sequence[_Piece],
        needed: Collection[str] | None,
    ) -> None:
        """Reads the blocks of the names in `needed`; all blocks if None."""
        self._driver = context.driver
        self._stream = stream
        self._pieces = pieces
        self._wanted = [
            piece.node is None
            and not piece.empty
            and (needed is None or any(name in needed for name in piece.names))
            for piece in pieces
        ]
        self.first = self.read()

    def read(self) -> list[npt.NDArray[np.uint8]]:
        """Reads the blocks; empty for alloc nodes' memory and for blocks that are not needed."""
        made = []
        for piece, wanted in zip(self._pieces, self._wanted, strict=True):
            memory = piece.memory
            host = np.empty(memory.nbytes if wanted else 0, np.uint8)
            if host.size:
                self._driver.memcpy_to_host(host.data, memory.address, self._stream.handle)
            made.append(host)
        return made

    def restore(self) -> None:
        """Writes the first content back, also if it is interrupted.

        Raises StateLostError if the driver fails twice.
        """

        def lost(refused: DriverError) -> str:
            names = ", ".join(repr(name) for piece in self._pieces for name in piece.names)
            return (
                "saving launched the graph, and could not put back what that changed "
                f"({refused}), so the content of {names or 'its memory'} is not valid: write it "
                "again"
            )

        put_back(self._write_back, lost)

    def _write_back(self) -> None:
        for piece, host in zip(self._pieces, self.first, strict=True):
            if host.size:
                address = piece.memory.address
                self._driver.memcpy_from_host(address, host.data, self._stream.handle)
        self._stream.synchronize()  # later work may use other streams


def _reference(
    graph: Graph, given: GraphExec | None, stream: Stream, content: _Content, plan: _Plan
) -> list[npt.NDArray[np.uint8]]:
    """Returns the content of all blocks after a launch, and restores the memory.

    Raises GraphFileError if a second launch gives other results, or if constants change.
    """
    run = graph.instantiate() if given is None else given
    try:
        after: list[list[npt.NDArray[np.uint8]]] = []
        for _ in range(2):
            try:
                run.launch(stream)
                stream.synchronize()
                after.append(content.read())
            finally:
                content.restore()
    finally:
        if given is None:
            run.close()
    for name in plan.changing:
        if not _same_bytes(plan.view(after[0], name), plan.view(after[1], name)):
            raise GraphFileError(
                f"two launches from the same state leave different bytes in {name!r}, so no check "
                "can compare them (sums in any order, or memory without a name that they change); "
                "save it with check=False if that is meant"
            )
    for name, before in plan.constants(content.first).items():
        if not _same_bytes(plan.view(after[0], name), before):
            raise GraphFileError(
                f"the graph writes into the constant {name!r}; name it as an input and an output"
            )
    return after[0]


def _same_bytes(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    return np.array_equal(tensor_bytes(one), tensor_bytes(other))  # without a copy: weights are GBs


# A fresh process, because only that has none of this one's state.
_PROGRAM = "import sys\nfrom ostinato.graphfile import child\nsys.exit(child.main(sys.argv[1]))"


def _check(
    draft: Path,
    context: Context,
    pieces: Sequence[_Piece],
    constants: Mapping[str, npt.NDArray[Any]],
    content: _Content,
    code: Path | None,
    loose: Sequence[tuple[int, Loose]],
) -> dict[int, Stray]:
    """Checks the file in a fresh process.  Raises GraphFileError with the difference and its cause.

    Returns how far the graph writes outside of blocks; if it does, nothing else was checked.
    """
    with tempfile.TemporaryDirectory(prefix="ostinato-") as name:
        folder = Path(name)
        job: dict[str, Any] = {
            "path": draft.absolute(),
            "code": None if code is None else code.absolute(),
            "device": context.driver.name,
            "rooms": _rooms(pieces, context),
            "avoid": [piece.memory for piece in pieces if piece.node is None],
            "constants": constants,
            "scratch": None,
            "loose": [(place, one.offset, one.other) for place, one in loose],
        }
        answer = _asked(folder, job)
        if answer["passed"]:
            return {}
        if answer["why"] == "strays":
            strays: dict[int, Stray] = answer["strays"]
            return strays
        if answer["why"] == "loose":
            first = loose[answer["loose"]][1]
            raise GraphFileError(f"{first.why} (the results depend on it: {answer['what']})")
        if answer["why"] == "content":
            job["scratch"] = {i: c for i, c in enumerate(content.first) if c.size}
            again = _asked(folder, job)
            blamed = again.get("block")
            if blamed is not None:
                piece = pieces[blamed]
                if piece.names:
                    raise GraphFileError(
                        f"{answer['what']}; they depend on what {', '.join(piece.names)} held "
                        f"before ({piece}): name it as an input too, as the graph does not write "
                        "all of it"
                    )
                raise GraphFileError(
                    f"{answer['what']}; they depend on memory without a name: {piece}. Name it as "
                    "an input (and output, if it is state) or a constant: MemoryRange("
                    f"{piece.memory.address:#x}, {piece.memory.nbytes})"
                )
        raise GraphFileError(
            f"the file did not pass its check, so it was not written: {answer['what']}"
        )


def _rooms(pieces: Sequence[_Piece], context: Context) -> dict[int, int]:
    """Returns the bytes of its allocation that follow each block, by the block's index."""
    live = KnownRanges(context.driver.memory_range)
    found = {}
    for index, piece in enumerate(pieces):
        allocation = live(piece.memory.address) if piece.node is None else None
        if allocation is not None:
            found[index] = max(0, allocation.end - piece.memory.end)
    return found


def _asked(folder: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a job in a fresh process and returns its answer."""
    paper, reply = folder / "job", folder / "answer"
    reply.unlink(missing_ok=True)
    paper.write_bytes(pickle.dumps({**job, "answer": reply}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", _PROGRAM, str(paper)]
    said, ended = "", "it did not end"
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_CHECK_SECONDS + len(job["loose"]) / 2,  # each takes a few launches more
            check=False,
        )
        said, ended = done.stderr.strip().rpartition("\n")[2], f"status {done.returncode}"
    words = said or ended
    with suppress(OSError):
        answer: dict[str, Any] = pickle.loads(reply.read_bytes())
        if {"passed", "block", "loose"} & answer.keys():
            if said and answer.get("what"):  # for example, a kernel's failed assertion
                answer["what"] += f" (the checking process wrote: {said})"
            return {"passed": False, "why": "content", "what": words, **answer}
    return {"passed": False, "why": "content", "what": f"the checking process failed: {words}"}
