"""`GraphExec`: an executable graph that is launched, and changed without being made again.

The driver has no getters on an executable, so a shadow holds what was set: `params(node)` returns
the parameters of the next launch.  A change is all or nothing (`shadow`); an interruption waits
until the change is made, except in launches and in changes of a single argument.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ostinato.driver.api import (
    ChildGraphNodeParams,
    ExecHandle,
    InstantiateFlags,
    KernelNodeParams,
    LaunchConfig,
    MemcpyNodeParams,
    MemoryRange,
    MemsetNodeParams,
    NodeHandle,
    NodeKind,
    NodeParams,
    ParameterSlot,
    not_null,
)
from ostinato.driver.closeable import Closeable, elsewhere
from ostinato.driver.context import CallKind, Context
from ostinato.driver.forking import new_lock
from ostinato.driver.interrupts import uninterrupted
from ostinato.driver.launcher import Launcher, packer
from ostinato.driver.signature import Element, Space
from ostinato.driver.stream import Operation, Stream, require_stream
from ostinato.errors import (
    CaptureError,
    ClosedError,
    ContextPoisonedError,
    DriverError,
    GraphError,
    InputError,
    NodeKindError,
    Status,
    StreamCaptureError,
    UpdateRefusedError,
)
from ostinato.graph.flat import FlatNode, flat_nodes
from ostinato.graph.frozen import BODY_RULE, wrongly_in_a_body
from ostinato.graph.graph import Graph
from ostinato.graph.node import Node
from ostinato.graph.plan import (
    NodeChange,
    RebindReport,
    argument_bytes,
    argument_index,
    moves_of,
    plan_rebind,
    refused,
)
from ostinato.graph.shadow import Live, Shadow, Write, inner_words
from ostinato.graph.words import Touch, whole_place
from ostinato.memory import Buffer
from ostinato.memory.buffer import copy_operation, fill_operation, for_a_node
from ostinato.memory.ranges import KnownRanges, Target, range_of

if TYPE_CHECKING:
    from ostinato.graph.audit import AuditReport
    from ostinato.graph.timing import NodeSampler, NodeTimes

_log = logging.getLogger(__name__)
_EXACT = (str, int)
"""The types of the names of arguments."""


in_place: Callable[[GraphExec, Stream], GraphExec] | None = None
"""Set while a black box is armed (`explain.black_box`): returns the executable to launch in the
place of one, or this one.  Every launch then takes the slow path."""


class _Nothing:
    """Stands for a parameter that was not given."""

    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()
_TAKES = {
    NodeKind.KERNEL: "set(node, argument, value), set(node, config=…), set(node, enabled=…)",
    NodeKind.MEMCPY: "set(node, dst=…, src=…), set(node, enabled=…)",
    NodeKind.MEMSET: "set(node, dst=…, value=…), set(node, enabled=True)",
}
"""The forms of `set` for a node of each kind, besides the one with all parameters, for errors."""
_FIXED = {NodeKind.CONDITIONAL, NodeKind.MEM_ALLOC, NodeKind.MEM_FREE}


def _takes(node: Node) -> str:
    if node.kind in _FIXED:
        return f"a node of kind {node.kind.name} cannot be changed; instantiate again"
    every = "set(node, parameters) with all of its parameters (a record, or ost.prepare(…))"
    short = _TAKES.get(node.kind)
    of_kind = f"a node of kind {node.kind.name} takes"
    return f"{of_kind} {every}" if short is None else f"{of_kind} {short}, {every}"


def _require_kind(node: Node, kind: NodeKind, what: str) -> None:
    """Raises NodeKindError unless `what` can be set for the node."""
    if node.kind is not kind:
        raise NodeKindError(f"node {node.index} ({node.name}) has no {what}: {_takes(node)}")


def _require_no_capture(stream: Stream) -> None:
    """Raises CaptureError if an upload on this stream would break a capture."""
    if stream.is_capturing():
        raise CaptureError(
            f"an executable cannot be uploaded on {stream!r}, which is capturing: upload before "
            "the capture (the capture goes on)"
        )


def _leaving() -> int:
    """Stands for the launch on a closed stream."""
    raise AssertionError("a launch on a closed stream")


def _forget(prepared: dict[Stream, Callable[[], int]], stream: Stream) -> None:
    prepared.pop(stream, None)


class _Release:
    """Destroys the driver's executable once; later calls do nothing."""

    def __init__(self, context: Context, handle: ExecHandle) -> None:
        self.handle = handle
        self.shadow: Shadow | None = None
        self._context = context
        self._done = False
        self._left: list[int] = []
        """Addresses of alloc nodes, to be freed before the executable is destroyed."""

    def retire(self, prepared: Mapping[Stream, object]) -> None:
        """Destroys the executable, and releases the objects of its nodes, once its last launch on
        each of the streams that it was prepared for has finished."""
        self._context.retire(self._destroy, tuple(prepared))

    def _destroy(self) -> None:
        if self.shadow is not None and not self._done and not self._left:
            self._left = self.shadow.left_allocated()
            if self._left:
                # Memory of the last launch, which CUDA keeps allocated although no node can reach
                # it any more.  Freeing waits for the device.
                self._context.retire(self._free_and_destroy, quiet=True)
                return
        self._destroy_now()

    def _free_and_destroy(self) -> None:
        """Frees before the executable is destroyed: until then its addresses are not reused."""
        driver = self._context.driver
        for address in self._left:
            try:
                driver.mem_free(address)
            except StreamCaptureError:
                raise  # the context tries again later
            except DriverError as error:
                # Not allocated: it was never launched, or another graph has freed the memory.
                if error.status != Status.INVALID_VALUE:
                    _log.warning("freeing the memory of an alloc node failed: %s", str(error))
        self._destroy_now()

    def _destroy_now(self) -> None:
        if not self._done:
            self._done = True
            try:
                self._context.driver.exec_destroy(self.handle)
            except StreamCaptureError:  # refused during captures; the context tries again later
                self._done = False
                raise
        if self.shadow is not None:
            self.shadow.clear()


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The result of a whole-graph update: the number of nodes with the new graph's parameters."""

    nodes: int

    def __str__(self) -> str:
        from ostinato.graph.show.outline import count_text

        return f"{count_text(self.nodes, 'node')} updated"


@elsewhere(replay="launch(stream) replays it")
class GraphExec(Launcher, Closeable):
    """An executable (CUgraphExec), made by `Graph.instantiate`.

    It keeps its graph alive, with the memory at which the nodes point, and every buffer to which it
    was rebound or set.  It refuses to launch once memory at which it points was closed.
    Launches of one executable never overlap.  Changes apply to later launches, not to launches in
    flight, and are thread-safe; `launch` may be called from several threads, ordered by the caller.

        run.rebind({x: y})
        run.launch(stream)
    """

    def __init__(self, graph: Graph, release: _Release) -> None:
        self.graph = graph
        self.context = graph.context
        self.flags = InstantiateFlags.NONE
        self._handle = release.handle
        self.closed = False
        self._lock = new_lock()
        self._prepared: dict[Stream, Callable[[], int]] = {}
        self._before_launch = graph.before_launch
        self._sampler: NodeSampler | None = None
        graph.instantiated = True
        self._shadow = Shadow(graph, release.handle)
        self._arguments: dict[tuple[int, int | str], ArgumentSetter] = {}
        """The setters of arguments that were set."""
        self._toggled = False
        self._given_back: deque[MemoryRange] = deque()
        """Memory closed since the last launch that checked, at which the graph may point."""
        self._watch(graph.storages)
        if not graph.owned:  # adopted: the memory that its nodes use is unknown
            self.context.watchers.add(self)
        release.shadow = self._shadow
        self._finalizer = weakref.finalize(self, release.retire, self._prepared)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        state = "closed" if self.closed else "unusable" if self._shadow.unusable else "ready"
        return f"<GraphExec {self._handle:#x} on {self.context.driver.name}, {state}>"

    @property
    def handle(self) -> ExecHandle:
        """The driver's handle.  Raises ClosedError after close()."""
        if self.closed:
            raise ClosedError("the executable graph is closed; instantiate it again")
        return self._handle

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams on which it was launched, or prepared for a launch."""
        return tuple(self._prepared)

    def usable(self) -> bool:
        """True if it can be launched: it is open, it has no half-done change, and no memory at
        which it points was closed."""
        try:
            self._require_usable()
        except (ClosedError, GraphError):
            return False
        return True

    @property
    def suspect(self) -> bool:
        """True if `usable()` may be False: a cheap check before each replay."""
        return bool(self._given_back or self._shadow.unusable or self.closed)

    # --- closed memory
    def _watch(self, owners: Iterable[object]) -> None:
        """Registers with owners, which call `memory_closed` when their memory is freed."""
        for owner in owners:
            watch = getattr(owner, "watch", None)
            if callable(watch):
                watch(self)

    def memory_closed(self, memory: MemoryRange) -> None:
        """Called by the owner of memory at which this points, or did; the next launch checks its
        pointers."""
        self._given_back.append(memory)
        self.cool()

    def _require_usable(self) -> None:
        """Raises ClosedError or GraphError unless it can be launched."""
        self.context.require_open()
        if self.closed:
            raise ClosedError("the executable graph is closed; instantiate it again")
        if self._shadow.unusable:
            raise GraphError(self._shadow.unusable)
        if self._given_back:
            with self._lock:
                self._require_memory()

    def _require_memory(self) -> None:
        for memory in tuple(self._given_back):
            try:
                touch = self._dangling(memory)
            except ClosedError as error:
                raise ClosedError(
                    "memory was closed that this may point at, and what it points at cannot be "
                    f"read ({error}); make the graph again"
                ) from error
            if touch is not None:
                raise ClosedError(
                    f"node {touch.node_index} ({touch.node_name}) {touch.place} points at memory "
                    f"that was closed ({memory.nbytes} bytes at {memory.address:#x}): rebind or "
                    "set it to another buffer, or make the graph again"
                )
            self._given_back.remove(memory)

    def _dangling(
        self, memory: MemoryRange, apart: Sequence[tuple[NodeHandle, range]] = ()
    ) -> Touch | None:
        return self._shadow.words().dangling(memory, self._shadow.owners, apart)

    def _settled(self, writes: Iterable[Write]) -> list[MemoryRange]:
        """Returns closed memory at which no word will point once these writes are made.

        An address without an owner may be that of newer memory, at the place of the closed memory.
        """
        apart = [
            (write.live.handle, range(write.place, write.place + len(write.raw)))
            for write in writes
            if write.owner is None
        ]
        try:
            return [m for m in tuple(self._given_back) if apart and not self._dangling(m, apart)]
        except ClosedError:  # the next launch raises this error
            return []

    def _forget(self, settled: Iterable[MemoryRange]) -> None:
        for memory in settled:
            with suppress(ValueError):  # another launch has checked meanwhile
                self._given_back.remove(memory)

    # --- running
    def _prepare(self, stream: Stream) -> Callable[[], int]:
        self._require_usable()
        handle = self.handle
        if stream.closed:
            raise ClosedError("the stream is closed; launch on another")
        call = self._prepared.get(stream)
        if call is None:
            call = self.context.driver.exec_prepare_launch(handle, stream.handle)
            with self._lock:
                self._forget_closed()
                self._prepared[stream] = call
        sampler = self._sampling()
        return call if sampler is None else sampler.around(stream, call)

    def _sampling(self) -> NodeSampler | None:
        """Returns the sampler that is not closed."""
        sampler = self._sampler
        return None if sampler is None or sampler.closed else sampler

    def _forget_closed(self) -> None:
        """Forgets each closed stream once its work is done: until then a launch of this may run
        there, and its memory must not be freed."""
        for stream, call in tuple(self._prepared.items()):
            if stream.closed and call is not _leaving:
                self._prepared[stream] = _leaving
                self.context.retire(partial(_forget, self._prepared, stream), (stream,))

    def _launch_slowly(self, stream: Stream) -> None:
        """Launches on another stream than the last one, or while there is a tap.

        A recording notes the launch.  On a stream that captures this raises CaptureError: the
        driver would refuse it too (status 900, measured on driver 580) and break the capture.
        """
        require_stream(stream, "launch(stream)", self.context)
        sampler = self._sampling()
        call = self._prepare(stream)
        before = self._before_launch
        if before is not None:  # such a graph is never launched by the hot path
            if self.context.taps:
                stream.enter("a graph with something to do before each launch", CallKind.ONCE)
            if stream.is_capturing():
                raise CaptureError(
                    "an executable cannot be launched into a capture (the capture goes on)"
                )
            before(stream)
            if in_place is not None or self.context.taps or call():
                self._launch_checked(stream)
            return
        if in_place is not None and not self.context.taps:
            self._launch_checked(stream)
            return
        if not self.context.taps:
            stays = False
            try:
                # Listed before it is hot, so that a child that is forked in between can cool it.
                self.context.keep_hot(self)
                self._heat(stream, call)
                # Checked afterwards: a tap or a close in between has cooled it, or is found here.
                open_ = in_place is None and not (
                    self.closed or self._shadow.unusable or self._given_back or stream.closed
                )
                stays = self.context.keep_hot(self) and open_ and self._sampling() is sampler
            finally:  # also after an interruption: no other code would cool it
                if not stays:
                    self.cool()
            if call():
                self._launch_checked(stream)
            return
        if stream.is_capturing():
            raise CaptureError(
                "an executable cannot be launched into a capture; capture the work itself, or add "
                "its definition to a graph with Graph.add_child (the capture goes on)"
            )
        # A graph that is made of this launch contains the definition.
        if self.graph.closed:
            stream.enter("a graph whose definition is closed", CallKind.ONCE)
            self._launch_checked(stream)
            return
        other = self.changed()
        stream.enter(
            "a graph that was changed since it was made" if other else "graph",
            CallKind.ONCE if other else CallKind.WORK,
        )
        child = ChildGraphNodeParams(self.graph.handle)
        self._launch_checked(stream)
        stream.announce(Operation(child, "graph", keep=(self.graph, *self.graph.kept)))

    def _launch_checked(self, stream: Stream) -> None:
        run, other = self, in_place
        if other is not None:
            run = other(self, stream)
            if run is not self:
                run._prepare(stream)  # it is not destroyed before its work on the stream is done
        self.context.driver.exec_launch(run.handle, stream.handle)

    def upload(self, stream: Stream) -> None:
        """Puts the executable on the device before its first launch, in stream order.

        Without this call the first launch does so.  A waiting executable of many kernels (16, not
        8; H200, driver 580) makes every replay slower, by 0.18 us a kernel, until an uploaded one
        is launched for the first time; closing it does not end that.  So upload only executables
        that are launched soon.  Raises CaptureError on a stream that captures (the capture goes
        on), DriverError, ClosedError.
        """
        require_stream(stream, "upload(stream)", self.context)
        self._require_usable()
        handle = self.handle
        _require_no_capture(stream)
        upload = self.context.driver.exec_upload
        stream.guarded("upload", lambda h: upload(handle, h), CallKind.ORDER)
        self._prepare(stream)

    @overload
    def profile(self, *, stream: Stream, replays: int = 100) -> NodeTimes: ...
    @overload
    def profile(self, *, stream: Stream, replays: int = 100, sample: int) -> NodeSampler: ...
    def profile(
        self, *, stream: Stream, replays: int = 100, sample: int | None = None
    ) -> NodeTimes | NodeSampler:
        """Measures the seconds that each node takes; also of adopted graphs.

            profile = run.profile(stream=stream)
            print(profile)

        A twin with a timer after each node is launched `replays` times, and the executable itself
        as often: the work runs, and state moves on, as by twice as many launches (and six more).
        Nodes of parallel branches still run side by side; kernels that start before their
        predecessors end do not (`NodeTimes.overlap`).  A time includes the start of the node, and
        what other streams do meanwhile; times below half a microsecond are mostly noise.

        *In production.*  `sample=1000` launches nothing: of the launches that the program makes on
        `stream` (also through a step or a cache), one in a thousand goes through the twin, and the
        result, a `NodeSampler`, has the times of the latest `replays` of these.  The others go the
        usual way, after a counter in Python.  No launch is timed while a capture is under way or a
        black box is armed, nor before the last answer is there.  After a change of the executable
        the next timed launch makes another twin, and takes about as long as `instantiate`.
        Launches on other streams keep their order with the twin.  One sampler at a time.

        Raises GraphError for a node that runs in no other graph (a conditional node, alloc and free
        nodes), CaptureError on a stream that captures, CompileError if the timer cannot be
        compiled, InputError, and the errors of `launch`.
        """
        from ostinato.graph.timing import NodeSampler, profile

        if sample is None:
            return profile(self.flat_nodes(), stream, replays, self.launch, self._before_launch)
        self._require_usable()
        sampler = NodeSampler(self, stream, replays, sample)
        with self._lock:
            taken = self._sampling() is not None
            if not taken:
                self._sampler = sampler
        if taken:
            sampler.close()
            raise InputError("profile: its launches are sampled already; close that sampler first")
        self.cool()
        return sampler

    # --- reading
    @property
    def empty(self) -> bool:
        """True if it has no nodes, so that a launch does nothing."""
        return not len(self._shadow)

    def nodes(self) -> tuple[Node, ...]:
        """The definition's nodes with the parameters of the next launch.

        Arguments are decoded as they were in the definition; `params` is current.
        """
        with self._lock:
            return self._shadow.nodes()

    def audit(self) -> AuditReport:
        """Returns every pointer of the next launch, with what is known of the memory there: see
        `Graph.audit`.  Raises ClosedError, and the driver's errors."""
        from ostinato.graph.audit import audit

        return audit(self.context, self.nodes())

    def params(self, node: Node | int) -> NodeParams:
        """Returns the parameters of a node in the next launch."""
        with self._lock:
            return self._shadow.params(self._shadow.node(node))

    def manifest(self) -> tuple[Touch, ...]:
        """Returns every pointer, in the order of the nodes.

        Words without a signature count as pointers if they are addresses in a live allocation.
        Raises ClosedError if the definition was closed before it was first read.
        """
        with self._lock:
            find = KnownRanges(self.context.driver.memory_range)
            return tuple(self._shadow.words().manifest(find))

    def touches(self, target: Target) -> bool:
        """Returns whether the next launch may use a buffer, a device array or a MemoryRange.

        True also if the definition was closed before it was first read.  Raises InputError.
        """
        memory = range_of(target)
        around = self.context.driver.memory_range(memory.address)
        with self._lock:
            try:
                return self._shadow.words().touches(memory, around)
            except ClosedError:
                return True

    # --- changing
    @overload
    def set(self, node: Node | int, argument: int | str, value: object) -> None: ...
    @overload
    def set(
        self, node: Node | int, params: NodeParams | Operation, /, *, keep: Iterable[object] = ()
    ) -> None: ...
    @overload
    def set(self, node: Node | int, *, config: LaunchConfig) -> None: ...
    @overload
    def set(self, node: Node | int, *, dst: Buffer, src: Buffer) -> None: ...
    @overload
    def set(self, node: Node | int, *, dst: Buffer, value: float) -> None: ...
    @overload
    def set(self, node: Node | int, *, enabled: bool) -> None: ...
    def set(
        self,
        node: Node | int,
        argument: Any = _NOTHING,
        value: Any = _NOTHING,
        # By keyword only, as the overloads declare: a `*` here costs 0.1 us in each call.
        config: Any = _NOTHING,
        dst: Any = _NOTHING,
        src: Any = _NOTHING,
        enabled: Any = _NOTHING,
        keep: Any = _NOTHING,
    ) -> None:
        """Changes a node for the launches from here on, also in child graphs and bodies.

            run.set(node, "n", 128)                # an argument of a kernel, by name or index
            run.set(node, config=config)           # a kernel's grid, block and shared memory
            run.set(node, dst=y, src=x)            # all of what a copy node copies
            run.set(node, dst=y, value=0)          # all of what a fill node fills, as `ost.fill`
            run.set(node, enabled=False)           # whether a kernel or a copy runs
            run.set(node, ost.prepare(kernel, config, x, n))   # all parameters of a node

        *An argument.*  With a signature the value is checked against its type, else against its
        size; without one it has no name.  As in a launch, it is not known how much of a buffer the
        kernel uses.  A buffer, and a buffer of this library at a plain address, is kept alive;
        memory at addresses inside of bytes (a struct) is not.

        *Grid, block, shared memory.*  An executable keeps the other launch attributes that it was
        made with (cluster, cooperative, programmatic, priority): a `config` with others is refused.

        *A copy, a fill.*  InputError as by `ost.copy` and `ost.fill`, and for buffers of 0 bytes; a
        node that copies or fills rows with a pitch, or works on a CUDA array, is refused.

        *Off and on.*  A node that is off keeps its edges.  CUDA switches fill nodes off too, but
        then loses the order around them, and cooperative kernels, but then loses the context
        (`Driver.exec_set_enabled`): both can only be switched on.

        *All parameters*, of the node's kind.  An operation (`ostinato.prepare`) brings its own
        signature and the objects that it keeps alive; parameters alone bring none, and with another
        function than before no argument has a name or a known type from here on.  `keep` lives as
        long as the executable, or until the node is set again.  ClosedError for an operation with
        memory that is closed by now.

        Raises UpdateRefusedError for changes that the driver or this library refuses; NodeKindError
        for forms that a node of this kind does not have; InputError for an unknown node or
        argument, and for a value that does not fit; TypeError for other combinations.  The
        executable is then as before.
        """
        if value is _NOTHING or not (config is dst is src is enabled is keep is _NOTHING):
            given = {
                "parameters": argument,
                "value": value,
                "config": config,
                "dst": dst,
                "src": src,
                "enabled": enabled,
                "keep": keep,
            }
            self._set_more(node, {n: v for n, v in given.items() if v is not _NOTHING})
            return
        with self._lock:
            made = None
            if type(node) is int and type(argument) in _EXACT:
                made = self._arguments.get((node, argument))
            (made or self._argument(node, argument)).set(self, value)

    def _set_more(self, node: Node | int, given: dict[str, Any]) -> None:
        """Does the work of `set` for all but a single argument."""
        names = given.keys()
        if names == {"parameters"} or names == {"parameters", "keep"}:
            self._set_params(node, **given)
        elif names == {"config"}:
            self._set_config(node, **given)
        elif names == {"dst", "src"}:
            self._set_row(node, copy_operation(**given), **given)
        elif names == {"dst", "value"}:
            self._set_row(node, fill_operation(**given), given["dst"])
        elif names == {"enabled"}:
            self._set_enabled(node, **given)
        else:
            with self._lock:
                found = self._shadow.node(node)
            what = " and ".join(names) or "nothing"
            raise TypeError(f"set node {found.index} ({found.name}) with {what}: {_takes(found)}")

    def _set_params(
        self, node: Node | int, parameters: NodeParams | Operation, keep: Iterable[object] = ()
    ) -> None:
        params, owners, signature, ours = parameters, tuple(keep), None, None
        with uninterrupted, self._lock:
            found = self._shadow.node(node)
            if not isinstance(params, Operation | NodeParams):
                raise InputError(
                    f"set node {found.index} ({found.name}): {params!r} is no parameters of a "
                    f"node: {_takes(found)}"
                )
            if isinstance(params, Operation):
                params.require_usable(self.context)
                owners, signature = (*owners, *params.keep), params.signature
                params = params.params
            if isinstance(params, ChildGraphNodeParams):
                for graph in [owner for owner in owners if isinstance(owner, Graph)]:
                    owners = (*owners, *graph.kept)
                    if graph.owned and not graph.closed and graph.handle == params.graph:
                        ours = graph.labels
                self.context.watchers.add(self)  # the memory of its nodes is unknown here
            kept = tuple((whole_place(i), owner) for i, owner in enumerate(owners))
            self._change(NodeChange(found, params, kept, True, signature, ours))

    def changed(self) -> bool:
        """Returns True if it may differ from its graph: one of both was changed since."""
        return self._toggled or self._shadow.changed() or self._shadow.grown()

    def revision(self) -> int:
        """Returns a number that is another one after each change of the nodes."""
        with self._lock:
            return self._shadow.revision()

    def patcher(self, node: Node | int, argument: int | str) -> Patcher:
        """Prepares `set` of one argument: a call of the result with a value sets the argument.

        Raises NodeKindError, and InputError if there is no such node or argument.

            set_n = run.patcher(3, "n")
            set_n(128)
        """
        with self._lock:
            return Patcher(self, self._argument(node, argument))

    def set_all(self, changes: Iterable[tuple[Node | int, int | str, object]]) -> None:
        """Sets many kernel arguments, (node, argument, value) each, all or none.

        Each is set as by `set`.  An argument that comes twice gets the last value.

            run.set_all((node, "n", 128) for node in attention)
        """
        given = list(changes)
        for entry in given:
            if not (isinstance(entry, tuple | list) and len(entry) == 3):
                raise InputError(f"set_all: {entry!r} is no (node, argument, value)")
        with uninterrupted, self._lock:
            writes: dict[NodeHandle, dict[int, Write]] = {}
            for node, argument, value in given:
                write = self._argument(node, argument).write(self, value)
                writes.setdefault(write.live.handle, {})[write.place] = write
            if writes:
                self._write_all([w for of_node in writes.values() for w in of_node.values()])

    @uninterrupted
    def _write_all(self, writes: list[Write]) -> None:
        """Makes all writes or none; those of one node must be next to each other."""
        self._watch([write.owner for write in writes])
        settled = self._settled(writes) if self._given_back else ()
        self._made(self._shadow.write, writes)
        self._forget(settled)

    def _argument(self, node: Node | int, argument: int | str) -> ArgumentSetter:
        key = -node.handle if isinstance(node, Node) else node, argument
        if type(key[0]) is not int or type(argument) not in _EXACT:
            # Equal to a number that was used, but not an index: True, 1.0.
            return ArgumentSetter(self, self._shadow.node(node), argument)
        made = self._arguments.get(key)
        if made is None:
            made = self._arguments[key] = ArgumentSetter(self, self._shadow.node(node), argument)
        return made

    def _live(self, node: Node) -> Live:
        """Returns a kernel node that is changed in place.  Raises NodeKindError."""
        _ = self.handle
        _require_kind(node, NodeKind.KERNEL, "arguments")
        return self._shadow.live(node)

    def _set_config(self, node: Node | int, config: LaunchConfig) -> None:
        if not isinstance(config, LaunchConfig):
            raise InputError(f"set: config is {type(config).__name__}: a LaunchConfig is needed")
        with uninterrupted, self._lock:
            found = self._shadow.node(node)
            _require_kind(found, NodeKind.KERNEL, "config")
            kernel = self._shadow.params(found)
            assert isinstance(kernel, KernelNodeParams)
            self._change(NodeChange(found, replace(kernel, config=config)))

    def _set_row(
        self, node: Node | int, operation: Operation, dst: Buffer, src: Buffer | None = None
    ) -> None:
        """Sets a node that copies or fills one row of linear memory.  Raises UpdateRefusedError for
        one that has several rows, or works on a CUDA array."""
        new = for_a_node(operation).params
        copies = isinstance(new, MemcpyNodeParams)
        kind, what = (NodeKind.MEMCPY, "src") if copies else (NodeKind.MEMSET, "value")
        with uninterrupted, self._lock:
            found = self._shadow.node(node)
            _require_kind(found, kind, f"dst and {what}")
            old = self._shadow.params(found)
            if isinstance(old, MemcpyNodeParams) and isinstance(new, MemcpyNodeParams):
                rows, opaque = old.height * old.depth, old.opaque
                params: NodeParams = replace(old, dst=new.dst, src=new.src, width=new.width)
            else:
                assert isinstance(old, MemsetNodeParams) and isinstance(new, MemsetNodeParams)
                rows, opaque = old.height, False
                params = replace(new, pitch=old.pitch)
            if rows != 1 or opaque:
                why = "works on a CUDA array" if opaque else f"has {rows} rows"
                raise UpdateRefusedError(
                    f"node {found.index} ({found.name}) {why}, which a buffer does not describe; "
                    "set all of its parameters: set(node, MemcpyNodeParams(…)) or "
                    "MemsetNodeParams(…)",
                    node_index=found.index,
                )
            self.context.space.require(dst, "dst", "the executable is of")
            owners = (("dst", dst), ("src", src)) if copies else (("dst", dst),)
            self._change(NodeChange(found, params, owners))

    def _set_enabled(self, node: Node | int, enabled: bool) -> None:
        with uninterrupted, self._lock:
            found = self._shadow.node(node)
            kinds = {NodeKind.KERNEL, NodeKind.MEMCPY} | ({NodeKind.MEMSET} if enabled else set())
            if found.kind not in kinds:
                why = "only kernel and memcpy nodes can be switched off"
                if found.kind is NodeKind.MEMSET:
                    why += (
                        ": nodes after a memset node that is off would not wait for those before "
                        "it. Make it a kernel before the graph is instantiated "
                        "(ost.lowlevel.replace_small_fills), or give it memory that nothing reads "
                        "(set(node, dst=…, value=…))"
                    )
                raise UpdateRefusedError(
                    f"node {found.index} ({found.name}) is of kind {found.kind.name}; {why}",
                    node_index=found.index,
                )
            params = found.params
            if not enabled and isinstance(params, KernelNodeParams) and params.config.cooperative:
                raise UpdateRefusedError(
                    f"node {found.index} ({found.name}) is a cooperative kernel; switched off, it "
                    "loses the context with some drivers. Let the kernel do nothing instead: give "
                    "it a size of 0",
                    node_index=found.index,
                )
            self._toggled = True
            try:
                self.context.driver.exec_set_enabled(self.handle, found.handle, enabled)
            except DriverError as error:
                raise refused(found, error) from error
            self._shadow.switched()

    def flat_nodes(self) -> tuple[FlatNode, ...]:
        """Returns the nodes of the next launch, child graphs taken apart, each after those that it
        waits for.  Raises GraphError for a node that no other graph can hold, and if nodes were
        added to the definition since: its edges are no longer those of the executable."""
        nodes = self.nodes()
        if self._shadow.grown():
            raise GraphError("the graph has other nodes than when it was instantiated")
        off: list[NodeHandle] = []
        if self._toggled:
            kinds = NodeKind.KERNEL, NodeKind.MEMCPY
            off = [n.handle for n in nodes if n.kind in kinds and not self.enabled(n)]
        return flat_nodes(self.context.driver, self.graph.handle, nodes, off)

    def enabled(self, node: Node | int) -> bool:
        """Returns whether a node is switched on."""
        with self._lock:
            handle = self._shadow.node(node).handle
            return self.context.driver.exec_enabled(self.handle, handle)

    def rebind(
        self, targets: Mapping[Any, Target] | Iterable[tuple[Target, Target]]
    ) -> RebindReport:
        """Makes every pointer into one buffer point to the same place in another.

        `targets`: {old: new}, or (old, new) pairs for arrays that cannot be keys; buffers, device
        arrays of any library, or MemoryRange.  Only kernel arguments, memcpy and memset nodes are
        changed; the report lists every changed word, and every word left, with the reason.  Raises
        InputError for a new target that holds another type, or is of another device, and if a new
        range is shorter than the part of the old one that is used (or, if that is unknown, than the
        rest of the old one) or if the operands of a copy would overlap; ClosedError for a new
        target or a definition that is closed; UpdateRefusedError if the driver refuses.  The
        executable is then as before.
        """
        pairs = list(targets.items() if isinstance(targets, Mapping) else targets)
        with uninterrupted, self._lock:
            self._require_nodes()
            shadow, find = self._shadow, self.context.driver.memory_range
            moves = moves_of(pairs, self.context.owner_of, self.context.space)
            plan = plan_rebind(shadow.words(), moves, find, shadow.setting_at)
            self._watch([move.target for move in moves])
            self._made(shadow.rebind, plan)
            return plan.report

    def update(self, graph: Graph) -> UpdateReport:
        """Takes every parameter from another graph of the same topology.

        Raises UpdateRefusedError with the failing node and the reason; the executable is then as
        before.  Launch attributes (cluster, cooperative, memory synchronisation domain, …) and
        programmatic edges must be equal: CUDA keeps the old ones and returns SUCCESS.  They are
        compared first, as far as the driver reports them: not attributes that other code set
        through the handle of a node of this library, except cluster, cooperative and priority.
        """
        if not isinstance(graph, Graph):
            raise InputError(f"update: a Graph is needed, not {type(graph).__name__}")
        self.context.require_same(graph.context, "update: the graph", "the executable is of")
        with uninterrupted, self._lock:
            graph.require_launchable()
            self._watch(graph.storages)
            self._made(self._shadow.update, graph)
            self._before_launch = graph.before_launch
            self.cool()
            return UpdateReport(len(self._shadow))

    def _require_nodes(self) -> None:
        """Raises ClosedError or GraphError if the nodes are gone with the definition."""
        if self.context.closed or self.graph.closed or self.graph.lost:
            _ = self.graph.handle

    def _change(self, change: NodeChange) -> None:
        self._watch([owner for _, owner in change.owners])
        self._made(self._shadow.change, [change])

    def _made(self, make: Callable[[Any], list[object]], plan: Any) -> None:
        """Makes a change, and keeps objects that are no longer pointed at until the launches under
        way are done."""
        _ = self.handle  # raises if the executable is closed
        try:
            self._let_go(make(plan))
        finally:
            if self._shadow.unusable:
                self.cool()

    def _let_go(self, old: list[object]) -> None:
        if any(owner is not None for owner in old):
            self.context.retire(old.clear, tuple(self._prepared))

    # --- lifetime
    @uninterrupted
    def close(self) -> None:
        """Destroys the executable once its own last launch is done; does not wait.  Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.cool()
        with self._lock:  # waits for changes in other threads; later ones find this closed
            self._shadow.end_live()
        self._finalizer()
        self.context.collect()


def make_executable(graph: Graph, upload: Stream | None, flags: InstantiateFlags) -> GraphExec:
    """Implements `Graph.instantiate`."""
    context = graph.context
    context.require_open()
    context.collect()
    graph.require_launchable()
    if upload is not None:
        require_stream(upload, "instantiate(upload=…)", context)
        _require_no_capture(upload)
    try:
        handle = context.driver.graph_instantiate(graph.handle, flags)
    except ContextPoisonedError:
        raise
    except DriverError as error:
        blamed = next((n for n in graph.nodes() if n.handle == error.node), None)
        what = "" if blamed is None else f" at node {blamed.index} ({blamed.name})"
        misplaced = wrongly_in_a_body(graph.nodes())
        if misplaced:
            what = f" at {misplaced}: {BODY_RULE}. The driver says"
        raise GraphError(f"instantiating the graph failed{what}: {error}") from error
    not_null(handle, "executable")
    release = _Release(context, handle)
    try:
        executable = GraphExec(graph, release)
        executable.flags = flags
        executable._shadow.check_loops()
    except Exception:
        release.retire({})
        context.collect()
        raise
    if upload is not None:
        try:
            executable.upload(upload)
        except Exception:
            executable.close()
            raise
    return executable


# --- single arguments
class ArgumentSetter:
    """One kernel argument of one node of an executable, with the data needed to set it.

    It has no reference to the executable, which keeps it.  Callers hold the executable's lock.
    """

    __slots__ = ("_argument", "_inner", "_live", "_node", "_pack", "_place", "_pointer", "_size")

    def __init__(self, run: GraphExec, node: Node, argument: int | str) -> None:
        self._node, self._argument = node, argument
        self._renew(run)

    def __repr__(self) -> str:
        return f"argument {self._argument!r} of node {self._node.index} ({self._node.name})"

    def _renew(self, run: GraphExec) -> Live:
        """Looks the argument up in the node's present parameters.  Raises InputError."""
        live = run._live(self._node)
        slot, code, pointer, element = _found(live, self._argument, run.context.space)
        # Exact types only; other values take the careful way, which also words the errors.
        self._pack: Callable[[tuple[object, ...]], bytes | None] | None = None
        self._size = slot.size
        if code:  # then bytes are packed too, and not copied unchanged
            self._pack = packer(code, (ParameterSlot(0, slot.size),), (element,))
        self._inner = inner_words(slot.offset, slot.size)
        # Last: until then the argument is as before, and is looked up again.
        self._place, self._pointer, self._live = slot.offset, pointer, live
        return live

    def _current(self, run: GraphExec) -> Live:
        run._require_nodes()
        if self._live.gone:
            self._node = run._shadow.node(self._node)
            return self._renew(run)
        return self._live

    def set(self, run: GraphExec, value: object) -> None:
        """Implements `GraphExec.set` of an argument."""
        live = self._live
        # Tested here and not in `_current`: the call would cost time each time.
        if live.gone or run.context.closed or run.graph.closed:
            live = self._current(run)
        pack, raw = self._pack, None
        if pack is not None:  # as in `_packed`, whose call would be felt
            raw = pack((value,))
        elif type(value) is bytes and len(value) == self._size:
            raw = value
        place = self._place
        if (
            raw is None
            or (self._pointer and type(value) is not bytes)
            or live.owners.get(place) is not None
            or place in live.reach
            or (self._inner and (live.owners or live.reach) and self._noted(live))
        ):
            self._write(run, live, self._raw(run, live, raw, value), value)
            return
        settled: Sequence[MemoryRange] = ()
        if run._given_back and type(value) is bytes:
            settled = run._settled([Write(live, place, raw)])
        if settled or not live.setter.holds(place, raw):
            # A number, or bytes, whose owners are unknown: only bytes change.
            run._shadow.touch(live)
            if live.setter.set(place, raw) != 0:
                run._write_all([Write(live, place, raw)])
        if settled:
            run._forget(settled)

    def _write(self, run: GraphExec, live: Live, raw: bytes, value: object) -> None:
        """Sets bytes and notes the owner of the memory at which they point.

        An interruption may come between any two lines: a word has both owners until it is known at
        which one it points, and meanwhile the number of bytes used there is unknown.
        """
        place = self._place
        owner, nbytes = owner_of(run.context, value, self._pointer)
        if self._inner:
            run._write_all([Write(live, place, raw, owner, nbytes)])
            return
        settled: Sequence[MemoryRange] = ()
        if owner is not None:
            run._watch((owner,))
        elif run._given_back:
            settled = run._settled([Write(live, place, raw)])
        run._shadow.touch(live)
        before, reach = live.owners.get(place), live.reach.pop(place, None)
        live.owners[place] = before, owner
        try:
            status = live.setter.set(place, raw)
        except Exception:
            _put_back(live, place, before, reach)
            raise
        if status == 0:
            if before is not owner:
                run._let_go([before])
            live.owners[place] = owner
            if nbytes is not None:
                live.reach[place] = nbytes
            if settled:
                run._forget(settled)
        else:
            _put_back(live, place, before, reach)
            run._write_all([Write(live, place, raw, owner, nbytes)])

    def _noted(self, live: Live) -> bool:
        """True if the owner or extent of a word after the first is known."""
        owners, reach = live.owners, live.reach
        return any(place in reach or owners.get(place) is not None for place in self._inner)

    def write(self, run: GraphExec, value: object) -> Write:
        """Returns the write that `set` would make."""
        live = self._current(run)
        raw = self._raw(run, live, self._packed(value), value)
        return Write(live, self._place, raw, *owner_of(run.context, value, self._pointer))

    def _packed(self, value: object) -> bytes | None:
        """Returns the value's bytes by its exact type: without a signature only bytes of the right
        size.  None for other values."""
        if self._pack is not None:
            return self._pack((value,))
        return value if type(value) is bytes and len(value) == self._size else None

    def _raw(self, run: GraphExec, live: Live, raw: bytes | None, value: object) -> bytes:
        """Returns the value's bytes, if its exact type did not give them."""
        if raw is None:
            arguments = live.params.arguments
            index, raw = argument_bytes(
                self._node, live.signature, arguments, self._argument, value, run.context.space
            )
            arguments.require_size(index, raw)
        return raw


class Patcher:
    """Sets one argument of one kernel node; made by `GraphExec.patcher`.

        set_n = run.patcher(node, "n")
        set_n(128)
        run.launch(stream)

    A call does the same as `GraphExec.set`, and raises the same errors.  A patcher still works
    after other changes of the node, and keeps the executable alive.
    """

    __slots__ = ("_argument", "_lock", "_run", "_set")

    def __init__(self, run: GraphExec, argument: ArgumentSetter) -> None:
        self._run, self._lock, self._argument, self._set = run, run._lock, argument, argument.set

    def __repr__(self) -> str:
        return f"<Patcher of {self._argument!r}>"

    def __call__(self, value: object) -> None:
        with self._lock:
            self._set(self._run, value)


def _put_back(live: Live, place: int, owner: object, nbytes: int | None) -> None:
    live.owners[place] = owner
    if nbytes is not None:
        live.reach[place] = nbytes


def _found(
    live: Live, argument: int | str, space: Space
) -> tuple[ParameterSlot, str, bool, Element | None]:
    """Returns an argument's place, its `Parameter.plain` if a signature gives one, whether it may
    be a pointer, and the element that it then takes."""
    node, signature, arguments = live.node, live.signature, live.params.arguments
    index = argument_index(node, signature, arguments, argument)
    slot = arguments.slot(index)
    if signature is None:
        return slot, "", True, None
    parameter = signature.parameters[index]
    code = parameter.plain if signature.layout == arguments.layout else ""
    element = space.element(parameter.dtype) if parameter.pointer else None
    return slot, code, parameter.pointer, element


_PLAIN = (int, float, bytes, bytearray, memoryview, np.generic, np.ndarray)
_WHOLE = (int, np.integer)


def owner_of(context: Context, value: object, pointer: bool) -> tuple[object, int | None]:
    """Returns the object to keep alive for a new argument, and the number of its bytes; None for
    unknown ones."""
    if isinstance(value, _PLAIN):
        if isinstance(value, _WHOLE) and pointer and value > 0:
            return context.owner_of(int(value)), None
        return None, None
    if isinstance(value, MemoryRange):  # a range keeps nothing alive
        return context.owner_of(value.address), value.nbytes
    try:
        return value, range_of(value).nbytes
    except InputError:  # a bare address, whose extent is unknown
        return value, None
