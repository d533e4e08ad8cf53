"""The host driver: the whole of `driver.api.Driver` on the CPU, with CUDA's rules.

It is a driver, not a mock: streams are ordered queues with a thread each, captures record without
running, executables are snapshots of graphs that run in dependency order, and calls that CUDA
refuses are refused with CUDA's status.  The files:

    handles      handles, and tables of their objects
    kernel       kernels: Python functions over NumPy views
    memory       addresses, allocations, decoded arguments
    modules      loaded kernels and the limits of their launches
    queue        queues of work and their threads; how a failure poisons the context
    definition   graph definitions: nodes, edges, clones
    streams      streams, events, and the rules of capture
    work         the work of each kind of node
    executable   executables: compiled, launched, and changed

Each file imports only files above it in this list.  `HostDriver` finds objects by handle and holds
the lock; the other files do the work.  The lock guards the tables and their objects.  It is never
held while user code runs: streams run their work on threads of their own, which never take it.

Statuses and the calls that a capture forbids were measured on an H100 (driver 580.159).

Differences from a GPU, on purpose:

* The nodes of one launch run one after another, in an order that the edges allow
  (`HostDriver(shuffle=seed)` draws it).  So a node that waits for a write of a parallel branch of
  the same launch waits for ever.
* Streams have no priority, and a kernel never overlaps the one before it: programmatic edges are
  kept and shown, and order nodes like other edges.
* A kernel's access is checked by allocation, not by thread; freed addresses may be used again.
* Loading a module breaks a capture that is not relaxed.  CUDA loads lazily, and the first launch
  may break it; here the rule is simple, so that tests find the mistake.
* A cycle is refused when its last edge is added, not only by instantiation.
* Kernels and host functions that call the driver get NOT_PERMITTED (800); undefined in CUDA.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato.driver.api import (
    Capabilities,
    CaptureInfo,
    CaptureMode,
    ConditionalHandle,
    ConditionDefaults,
    CudaContext,
    DeviceProperties,
    Edge,
    EdgeData,
    EventHandle,
    ExecHandle,
    FrozenGraph,
    FunctionCode,
    FunctionHandle,
    FunctionInfo,
    GraphHandle,
    HostFailureListener,
    HostNodeParams,
    Image,
    InstantiateFlags,
    KernelArguments,
    KernelNodeParams,
    KernelSetter,
    KernelTable,
    LaunchConfig,
    MemcpyNodeParams,
    MemoryRange,
    MemsetNodeParams,
    ModuleHandle,
    NodeHandle,
    NodeKind,
    NodeParams,
    Pack,
    PlainLaunch,
    StreamHandle,
    UpdateOutcome,
)
from ostinato.driver.forking import new_lock, switch_off_in_children
from ostinato.driver.host.definition import (
    SINGLE_KINDS,
    DefinitionNode,
    GraphTables,
    HostFrozenGraph,
    check_edge_data,
)
from ostinato.driver.host.executable import Executable, check_instantiable
from ostinato.driver.host.handles import HandleTable, invalid, new_handle
from ostinato.driver.host.memory import bytes_of
from ostinato.driver.host.modules import MAX_SHARED, MAX_THREADS, HostModule, image_of
from ostinato.driver.host.queue import HostContext, Mark, WorkQueue
from ostinato.driver.host.streams import HostCaptures, HostEvent, HostStream
from ostinato.driver.host.work import WorkCompiler
from ostinato.driver.interrupts import uninterrupted
from ostinato.driver.process_memory import as_numpy
from ostinato.errors import DriverError, Status, driver_error

if TYPE_CHECKING:
    from random import Random

DEFAULT_MEMORY = 8 << 30

# Seconds that `close` waits for a thread.  A host function may never return.
_PATIENCE = 2.0

# Pageable bytes up to this size are copied aside, so that the call need not wait for the stream.
_STAGED = 64 * 1024


class HostDriver:
    """A device in this process.  `total_memory` is the limit of its allocations in bytes.

    Nodes that no path of edges orders run in the order of their creation, which hides a missing
    edge.  With `shuffle`, a seed, they run in an order drawn anew for each executable.

    Threads start with the first work on a stream.  They end with `close`, or when the driver is
    collected; they never keep the interpreter from ending.
    """

    capabilities = Capabilities(
        conditional_nodes=True,
        conditional_branches=True,
        batch_memory_ops=True,
        memory_nodes=True,
        programmatic_launch=True,
        clusters=True,
        cooperative_launch=True,
        host_memory_is_device_memory=True,
        image_kinds=frozenset({"host"}),
        source_language="host",
        shares_memory=True,
    )
    cuda_context: CudaContext | None = None

    def __init__(
        self,
        name: str = "host",
        *,
        total_memory: int = DEFAULT_MEMORY,
        shuffle: int | None = None,
    ) -> None:
        self.name = name
        self._shuffle: Random | None = None
        if shuffle is not None:
            from random import Random

            self._shuffle = Random(shuffle)
        self._lock = new_lock()
        self._context = HostContext(total_memory)
        self._memory = self._context.memory
        self._captures = HostCaptures(self._lock)
        self._compiler = WorkCompiler(self._context)
        self._functions = self._compiler.functions
        self._events = self._compiler.events
        self._tables = GraphTables(self._memory)
        self._graphs = self._tables.graphs
        self._nodes = self._tables.nodes
        self._modules: HandleTable[HostModule] = HandleTable("module")
        self._executables: HandleTable[Executable] = HandleTable("executable")
        self._streams: HandleTable[HostStream] = HandleTable("stream")
        legacy = StreamHandle(0)
        self._streams[legacy] = HostStream(
            legacy, WorkQueue(self._context, "ostinato-host-legacy"), blocking=True
        )
        self._enter = self._context.enter
        self._finalizer = weakref.finalize(self, self._context.shut_down)
        switch_off_in_children(self._context)

    @property
    def properties(self) -> DeviceProperties:
        return DeviceProperties(
            name=f"host ({platform.machine()}, NumPy {np.__version__})",
            compute_capability=(0, 0),
            multiprocessors=os.cpu_count() or 1,
            total_memory=self._memory.total,
            l2_cache=0,
            max_threads_per_block=MAX_THREADS,
            max_shared_per_block=MAX_SHARED,
            memory_bandwidth=0,
            driver_version="host",
        )

    def close(self) -> None:
        """Ends the threads, drops work that has not begun, and frees all memory."""
        queues = self._context.queues.copy()
        self._finalizer()
        for queue in queues:
            queue.join(_PATIENCE)
        with self._lock:
            for module in self._modules.values():
                module.unload()
            for table in (self._modules, self._functions, self._events, self._executables):
                table.clear()
            self._graphs.clear()
            self._nodes.clear()
            self._captures.clear()
            self._memory.clear()

    @contextlib.contextmanager
    def _entered(self, call: str) -> Iterator[str]:
        """Surrounds a call that need not be fast with `_enter` and the lock; yields its name.

        Ctrl-C waits for the end of the call, as it does for a call of libcuda.
        """
        self._enter(call)
        with uninterrupted, self._lock:
            yield call

    def _wait_for_all(self, call: str) -> None:
        """Waits for the work of every stream that was submitted before."""
        with self._lock:
            queues = self._context.queues.copy()
        for queue in queues:
            queue.wait(queue.submitted)
        self._context.raise_failure(call)

    def synchronize(self) -> None:
        with self._entered("synchronize") as call:
            self._captures.forbid_all(call)
        self._wait_for_all(call)

    # --- memory

    def memory_info(self) -> tuple[int, int]:
        self._enter("memory_info")
        return self._memory.free, self._memory.total

    def mem_alloc(self, nbytes: int) -> int:
        return self._allocate("mem_alloc", nbytes, pinned=False)

    def mem_alloc_pinned(self, nbytes: int) -> int:
        return self._allocate("mem_alloc_pinned", nbytes, pinned=True)

    @uninterrupted
    def _allocate(self, call: str, nbytes: int, *, pinned: bool) -> int:
        self._enter(call)
        self._captures.forbid(call)
        return self._memory.allocate(call, nbytes, pinned=pinned)

    def mem_free(self, address: int) -> None:
        self._free("mem_free", address, pinned=False)

    def mem_free_pinned(self, address: int) -> None:
        self._free("mem_free_pinned", address, pinned=True)

    def _free(self, call: str, address: int, *, pinned: bool) -> None:
        self._enter(call)
        self._captures.forbid(call)
        self._wait_for_all(call)  # work under way may use the memory: CUDA waits here too
        with self._entered(call):
            self._memory.release(call, address, pinned=pinned)

    def memory_range(self, address: int) -> MemoryRange | None:
        self._enter("memory_range")
        return self._memory.range(address)

    def memory_share(self, address: int) -> bytes:
        return self._memory.share(self._enter("memory_share"), address)

    def memory_open_shared(self, handle: bytes) -> int:
        with self._entered("memory_open_shared") as call:
            return self._memory.open_shared(call, handle)

    def memory_end_shared(self, address: int) -> None:
        call = self._enter("memory_end_shared")
        self._wait_for_all(call)
        with self._entered(call):
            self._memory.end_shared(call, address)

    def memory_adopt(self, address: int, nbytes: int, owner: object) -> bool:
        with self._entered("memory_adopt") as call:
            return self._memory.adopt(call, address, nbytes, owner)

    def memory_end_adopted(self, address: int) -> None:
        call = self._enter("memory_end_adopted")
        self._wait_for_all(call)
        with self._entered(call):
            self._memory.end_adopted(call, address)

    def memory_view(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object
    ) -> Any:
        # Not `_enter`: this is no call of a device, and host functions read memory with it.
        nbytes = math.prod(shape) * dtype.itemsize
        self._memory.check(address, nbytes, "memory_view", "address")
        return as_numpy(address, shape, dtype, (owner, self._memory.find(address)))

    def memcpy(self, dst: int, src: int, nbytes: int, stream: StreamHandle) -> None:
        call = self._enter("memcpy")
        target = self._streams.find(call, stream)
        if nbytes < 0:
            raise invalid(call, f"{nbytes} bytes")
        if nbytes == 0:
            return
        self._memory.check(dst, nbytes, call, "dst")
        self._memory.check(src, nbytes, call, "src")
        self._submit(call, target, MemcpyNodeParams(dst, src, nbytes))

    def memset(
        self, dst: int, value: int, element_size: int, count: int, stream: StreamHandle
    ) -> None:
        call = self._enter("memset")
        target = self._streams.find(call, stream)
        if element_size not in (1, 2, 4) or count < 0:
            raise invalid(call, f"{count} elements of {element_size} bytes")
        if count == 0:
            return
        self._memory.check(dst, element_size * count, call, "dst")
        self._submit(call, target, MemsetNodeParams(dst, value, element_size, count))

    def memcpy_from_host(self, dst: int, src: memoryview, stream: StreamHandle) -> None:
        call = "memcpy_from_host"
        target, nbytes = self._pageable(call, stream), src.nbytes
        if nbytes == 0:
            return
        memory = self._memory
        memory.check(dst, nbytes, call, "dst")
        staged, source = nbytes <= _STAGED, bytes_of(call, src)
        if staged:
            source = source.copy()
        with self._lock:
            number = target.queue.submit(lambda: np.copyto(memory.view(dst, nbytes, call), source))
        if not staged:
            target.queue.wait(number)
            self._context.raise_failure(call)

    def memcpy_to_host(self, dst: memoryview, src: int, stream: StreamHandle) -> None:
        call = "memcpy_to_host"
        target, nbytes = self._pageable(call, stream), dst.nbytes
        if dst.readonly:
            raise invalid(call, "dst cannot be written")
        if nbytes == 0:
            return
        memory = self._memory
        memory.check(src, nbytes, call, "src")
        to = bytes_of(call, dst)
        with self._lock:
            number = target.queue.submit(lambda: np.copyto(to, memory.view(src, nbytes, call)))
        target.queue.wait(number)
        self._context.raise_failure(call)

    def _pageable(self, call: str, stream: StreamHandle) -> HostStream:
        """Returns the stream of a copy of pageable memory, which no capture can hold."""
        with self._entered(call):
            target = self._streams.find(call, stream)
            target.refuse_capturing(call)
            if target.blocking:
                self._order_with_legacy(call, target)
            return target

    # --- work, streams and events

    def _submit(self, call: str, stream: HostStream, params: NodeParams) -> None:
        """Makes work a task of the stream's queue or, while the stream captures, a node."""
        compiler = self._compiler
        with self._lock:
            if stream.blocking:
                self._order_with_legacy(call, stream)
            capture = stream.capture
            if capture is None:
                compiler.check(call, params)
                stream.queue.submit(compiler.step(call, params))
                return
            capture.refuse_broken(call)
            try:
                compiler.check(call, params)
            except DriverError:
                capture.broken = True  # its graph would lack the refused operation
                raise
            capture.add(call, stream, params)

    def on_host_failure(self, listener: HostFailureListener) -> None:
        self._context.listeners.append(listener)

    def unraised(self, patience: float) -> DriverError | None:
        return self._context.unraised(patience)

    def _order_with_legacy(self, call: str, stream: HostStream) -> None:
        """Orders a blocking stream's next work after the legacy stream's present work, and the
        other way round.  Raises 906 for the legacy stream while a blocking stream captures."""
        if stream.handle == 0:
            self._captures.refuse_implicit(call)
            others = [s for s in self._streams.values() if s.blocking and s is not stream]
        else:
            others = [] if stream.capture is not None else [self._streams[StreamHandle(0)]]
        for other in others:
            mark = Mark(other.queue, other.queue.submitted)
            if not mark.done():
                stream.queue.submit(mark.wait)

    def launch_host_function(self, stream: StreamHandle, function: Callable[[], object]) -> None:
        call = self._enter("launch_host_function")
        self._submit(call, self._streams.find(call, stream), HostNodeParams(function))

    def launch_kernel(
        self,
        stream: StreamHandle,
        function: FunctionHandle,
        config: LaunchConfig,
        arguments: KernelArguments,
    ) -> None:
        call = self._enter("launch_kernel")
        target = self._streams.find(call, stream)
        self._submit(call, target, KernelNodeParams(function, config, arguments))

    def stream_create(self, *, priority: int = 0, blocking: bool = False) -> StreamHandle:
        # One thread runs each stream: a priority would change nothing.
        with self._entered("stream_create"):
            handle = StreamHandle(new_handle())
            name = f"ostinato-host-stream-{len(self._streams)}"
            self._streams[handle] = HostStream(handle, WorkQueue(self._context, name), blocking)
            return handle

    def stream_destroy(self, stream: StreamHandle) -> None:
        with self._entered("stream_destroy") as call:
            target = self._streams.find(call, stream)
            if target.handle == 0:
                detail = "the legacy stream cannot be destroyed"
                raise driver_error(Status.INVALID_HANDLE, call, detail)
            self._captures.drop_stream(target)
            target.destroyed = True
            del self._streams[stream]
            target.queue.stop(drop=False)

    def _queue_to_ask(self, call: str, stream: StreamHandle) -> WorkQueue:
        with self._entered(call):
            target = self._streams.find(call, stream)
            target.refuse_capturing(call)
            if target.handle == 0:
                self._captures.refuse_implicit(call)
            self._captures.forbid(call)  # captures of other streams forbid it, too
            return target.queue

    def stream_synchronize(self, stream: StreamHandle) -> None:
        call = "stream_synchronize"
        queue = self._queue_to_ask(call, stream)
        queue.wait(queue.submitted)
        self._context.raise_failure(call)

    def stream_query(self, stream: StreamHandle) -> bool:
        queue = self._queue_to_ask("stream_query", stream)
        return queue.reached(queue.submitted)

    def stream_wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        call = self._enter("stream_wait_event")
        with self._lock:
            target = self._streams.find(call, stream)
            found = self._events.find(call, event)
            if target.handle == 0:
                self._captures.refuse_implicit(call)
            target.wait_event(call, found)

    def event_create(self, *, timing: bool = False, blocking: bool = False) -> EventHandle:
        with self._entered("event_create"):
            handle = EventHandle(new_handle())
            self._events[handle] = HostEvent(handle, timing)
            return handle

    def event_destroy(self, event: EventHandle) -> None:
        with self._entered("event_destroy") as call:
            self._events.find(call, event)
            del self._events[event]

    def event_record(self, event: EventHandle, stream: StreamHandle) -> None:
        call = self._enter("event_record")
        with self._lock:
            found, target = self._events.find(call, event), self._streams.find(call, stream)
            if target.blocking:
                self._order_with_legacy(call, target)
            found.record(call, target)

    def _last_record(self, call: str, event: EventHandle) -> Mark | None:
        with self._entered(call):
            found = self._events.find(call, event)
            found.refuse_captured(call, breaks=True)
            self._captures.forbid(call)
            return found.mark

    def event_query(self, event: EventHandle) -> bool:
        mark = self._last_record("event_query", event)
        return mark is None or mark.done()

    def event_synchronize(self, event: EventHandle) -> None:
        call = "event_synchronize"
        mark = self._last_record(call, event)
        if mark is not None:
            mark.wait()
        self._context.raise_failure(call)

    def event_elapsed(self, start: EventHandle, end: EventHandle) -> float:
        with self._entered("event_elapsed") as call:
            first, second = (self._events.find(call, handle) for handle in (start, end))
            for event in (first, second):
                event.refuse_captured(call, breaks=False)
        began = first.time(call)
        return second.time(call) - began

    # --- modules and functions

    def module_load(self, image: Image) -> ModuleHandle:
        call = self._enter("module_load")
        self._captures.forbid(call)
        module = HostModule(call, image)
        with self._entered(call):
            self._functions.update({f.handle: f for f in module.functions.values()})
            self._modules[module.handle] = module
            return module.handle

    def module_unload(self, module: ModuleHandle) -> None:
        call = self._enter("module_unload")
        self._modules.find(call, module)
        self._captures.forbid(call)
        self._wait_for_all(call)
        with self._entered(call):
            found = self._modules.find(call, module)
            found.unload()
            for function in found.functions.values():
                del self._functions[function.handle]
            del self._modules[module]

    def module_functions(self, module: ModuleHandle) -> tuple[str, ...]:
        with self._entered("module_functions") as call:
            return tuple(self._modules.find(call, module).functions)

    def module_function(self, module: ModuleHandle, name: str) -> FunctionHandle:
        with self._entered("module_function") as call:
            return self._modules.find(call, module).function(call, name).handle

    def function_info(self, function: FunctionHandle) -> FunctionInfo:
        call = self._enter("function_info")
        return self._functions.find(call, function).info

    def function_load(self, function: FunctionHandle) -> None:
        call = self._enter("function_load")
        self._functions.find(call, function)

    def function_allow_shared(self, function: FunctionHandle, nbytes: int) -> None:
        with self._entered("function_allow_shared") as call:
            self._functions.find(call, function).allow_shared(call, nbytes)

    def function_code(self, function: FunctionHandle) -> FunctionCode:
        call = self._enter("function_code")
        return self._functions.find(call, function).code(call)

    def code_image(self, code: FunctionCode) -> Image:
        return image_of(self._enter("code_image"), code)

    def function_restore(self, function: FunctionHandle, code: FunctionCode) -> None:
        with self._entered("function_restore") as call:
            found = self._functions.find(call, function)
            if code.shared > found.allowed_shared:  # another graph of this function may need more
                found.allow_shared(call, code.shared)

    def function_occupancy(self, function: FunctionHandle, threads: int, shared: int) -> int:
        call = self._enter("function_occupancy")
        return self._functions.find(call, function).occupancy(call, threads, shared)

    def function_prepare_launch(self, function: FunctionHandle, pack: Pack) -> PlainLaunch | None:
        return None

    # --- capture

    def stream_begin_capture(self, stream: StreamHandle, mode: CaptureMode) -> None:
        with self._entered("stream_begin_capture") as call:
            target = self._streams.find(call, stream)
            target.check_can_begin(call)
            self._captures.begin(target, self._tables.create(), (), mode)

    def stream_begin_capture_to_graph(
        self,
        stream: StreamHandle,
        graph: GraphHandle,
        dependencies: Sequence[NodeHandle],
        mode: CaptureMode,
    ) -> None:
        with self._entered("stream_begin_capture_to_graph") as call:
            target = self._streams.find(call, stream)
            target.check_can_begin(call)
            definition = self._graphs.find(call, graph)
            if self._captures.fills(definition):
                raise invalid(call, "the graph is being captured into")
            nodes = definition.nodes_of(call, dependencies)
            self._captures.begin(target, definition, tuple(nodes), mode)

    def stream_end_capture(self, stream: StreamHandle) -> GraphHandle:
        with self._entered("stream_end_capture") as call:
            return self._captures.end(call, self._streams.find(call, stream)).handle

    def stream_capture_info(self, stream: StreamHandle) -> CaptureInfo:
        with self._entered("stream_capture_info") as call:
            return self._streams.find(call, stream).capture_info()

    def stream_set_capture_dependencies(
        self, stream: StreamHandle, nodes: Sequence[NodeHandle]
    ) -> None:
        with self._entered("stream_set_capture_dependencies") as call:
            self._streams.find(call, stream).set_dependencies(call, nodes)

    def thread_exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        self._enter("thread_exchange_capture_mode")
        return self._captures.exchange_mode(mode)

    # --- graphs

    def graph_create(self) -> GraphHandle:
        with self._entered("graph_create"):
            return self._tables.create().handle

    def graph_destroy(self, graph: GraphHandle) -> None:
        with self._entered("graph_destroy") as call:
            definition = self._graphs.find(call, graph)
            if definition.owner is not None or self._captures.fills(definition):
                owner = "its node" if definition.owner is not None else "a capture under way"
                raise invalid(call, f"the graph belongs to {owner}")
            definition.destroy()

    def graph_clone(self, graph: GraphHandle) -> GraphHandle:
        with self._entered("graph_clone") as call:
            definition = self._graphs.find(call, graph)
            definition.refuse_single(call, "be cloned")
            clone = definition.clone()
            clone.register()
            return clone.handle

    def node_in_clone(self, node: NodeHandle, clone: GraphHandle) -> NodeHandle:
        with self._entered("node_in_clone") as call:
            self._nodes.find(call, node)
            return self._graphs.find(call, clone).node_for(call, node)

    def graph_nodes(self, graph: GraphHandle) -> tuple[NodeHandle, ...]:
        with self._entered("graph_nodes") as call:
            return tuple(self._graphs.find(call, graph).nodes)

    def graph_edges(self, graph: GraphHandle) -> tuple[Edge, ...]:
        with self._entered("graph_edges") as call:
            return self._graphs.find(call, graph).edges()

    def graph_freeze(
        self, graph: GraphHandle, *, ours: Container[NodeHandle] | None = None
    ) -> FrozenGraph:
        with self._entered("graph_freeze") as call:
            return HostFrozenGraph(self._graphs.find(call, graph))

    def graph_add_node(
        self,
        graph: GraphHandle,
        dependencies: Sequence[NodeHandle],
        params: NodeParams,
        edge_data: Sequence[EdgeData] | None = None,
    ) -> NodeHandle:
        with self._entered("graph_add_node") as call:
            definition = self._graphs.find(call, graph)
            nodes = definition.nodes_of(call, dependencies)
            if edge_data is not None:
                check_edge_data(call, nodes, params, edge_data)
            self._compiler.check(call, params)
            return definition.add(call, nodes, params, edge_data).handle

    def graph_add_kernels(
        self,
        graph: GraphHandle,
        nodes: list[NodeHandle],
        kernels: KernelTable,
        rows: Sequence[tuple[int, Sequence[int]]],
    ) -> None:
        for row, before in rows:
            after = [nodes[place] for place in before]
            nodes.append(self.graph_add_node(graph, after, kernels.params(row)))

    def graph_add_edges(self, graph: GraphHandle, edges: Sequence[Edge]) -> None:
        with self._entered("graph_add_edges") as call:
            self._graphs.find(call, graph).add_edges(call, edges)

    def graph_remove_node(self, node: NodeHandle) -> None:
        with self._entered("graph_remove_node") as call:
            found = self._nodes.find(call, node)
            found.graph.refuse_memory(call, node)
            self._captures.drop_node(found)
            found.graph.remove(found)

    def node_kind(self, node: NodeHandle) -> NodeKind:
        with self._entered("node_kind") as call:
            return self._nodes.find(call, node).kind

    def node_params(self, node: NodeHandle) -> NodeParams:
        with self._entered("node_params") as call:
            return self._nodes.find(call, node).shown

    def node_set_params(self, node: NodeHandle, params: NodeParams) -> None:
        with self._entered("node_set_params") as call:
            found = self._nodes.find(call, node)
            found.check_settable(call, params, SINGLE_KINDS | {NodeKind.CHILD_GRAPH}, node)
            self._compiler.check(call, params)
            found.params = params

    def conditional_create(
        self, graph: GraphHandle, *, default: int = 0, reset_at_launch: bool = True
    ) -> ConditionalHandle:
        with self._entered("conditional_create") as call:
            definition = self._graphs.find(call, graph)
            return definition.create_condition(call, default, reset_at_launch=reset_at_launch)

    def condition_defaults(self, node: NodeHandle) -> ConditionDefaults | None:
        with self._entered("condition_defaults") as call:
            return self._nodes.find(call, node).condition.defaults

    # --- executables

    def graph_instantiate(
        self, graph: GraphHandle, flags: InstantiateFlags = InstantiateFlags.NONE
    ) -> ExecHandle:
        with self._entered("graph_instantiate") as call:
            definition = self._graphs.find(call, graph)
            self._captures.forbid(call)
            check_instantiable(
                definition,
                self._compiler.knows,
                capturing=self._captures.fills(definition),
                instances=any(e.definition is definition for e in self._executables.values()),
            )
            executable = Executable(definition, flags, self._compiler, self._shuffle)
            self._executables[executable.handle] = executable
            return executable.handle

    def exec_destroy(self, executable: ExecHandle) -> None:
        with self._entered("exec_destroy") as call:
            found = self._executables.find(call, executable)
            self._captures.forbid(call)
            found.destroyed = True
            del self._executables[executable]
            found.release_memory()

    def exec_upload(self, executable: ExecHandle, stream: StreamHandle) -> None:
        with self._entered("exec_upload") as call:
            self._executables.find(call, executable)
            self._streams.find(call, stream).refuse_capturing(call)

    def exec_launch(self, executable: ExecHandle, stream: StreamHandle) -> None:
        call = self._enter("exec_launch")
        with self._lock:
            found = self._executables.find(call, executable)
            target = self._streams.find(call, stream)
            if target.blocking:
                self._order_with_legacy(call, target)
            found.launch(target)

    def exec_prepare_launch(
        self, executable: ExecHandle, stream: StreamHandle
    ) -> Callable[[], int]:
        with self._entered("exec_prepare_launch") as call:
            found = self._executables.find(call, executable)
            target = self._streams.find(call, stream)

        def launch() -> int:
            self._enter("exec_launch")
            with self._lock:
                if target.blocking:
                    self._order_with_legacy("exec_launch", target)
                found.launch_prepared(target)
            return 0

        return launch

    def _exec_node(
        self, call: str, executable: ExecHandle, node: NodeHandle
    ) -> tuple[Executable, DefinitionNode]:
        """Returns the executable, and its own node for a node of the definition."""
        found = self._executables.find(call, executable)
        self._nodes.find(call, node)
        return found, found.node(call, node)

    def exec_set_params(self, executable: ExecHandle, node: NodeHandle, params: NodeParams) -> None:
        with self._entered("exec_set_params") as call:
            target, found = self._exec_node(call, executable, node)
            target.set_params(call, found, params)

    def exec_prepare_kernel(
        self, executable: ExecHandle, node: NodeHandle, params: KernelNodeParams
    ) -> KernelSetter | None:
        return None

    def exec_prepare_kernels(
        self,
        executable: ExecHandle,
        nodes: Sequence[NodeHandle],
        frozen: FrozenGraph,
        indices: Sequence[int],
    ) -> Sequence[KernelSetter] | None:
        return None

    def exec_set_enabled(self, executable: ExecHandle, node: NodeHandle, enabled: bool) -> None:
        with self._entered("exec_set_enabled") as call:
            target, found = self._exec_node(call, executable, node)
            target.set_enabled(call, found, enabled)

    def exec_enabled(self, executable: ExecHandle, node: NodeHandle) -> bool:
        with self._entered("exec_enabled") as call:
            target, found = self._exec_node(call, executable, node)
            return target.enabled(call, found)

    def exec_update(self, executable: ExecHandle, graph: GraphHandle) -> UpdateOutcome:
        with self._entered("exec_update") as call:
            target = self._executables.find(call, executable)
            return target.update(self._graphs.find(call, graph))
