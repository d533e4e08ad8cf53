"""The CUDA driver's graphs: definitions, with their nodes and edges.

A kernel node's cluster, cooperative and priority are attributes, set by separate calls once the
node exists.  A programmatic launch is not an attribute of the node but of its incoming edges:
`LaunchConfig.programmatic` is read from them and not written.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Container, Sequence
from contextlib import suppress
from ctypes import byref
from functools import partial

from ostinato.driver.api import (
    KINDS,
    AllocNodeParams,
    BatchMemOpNodeParams,
    ChildGraphNodeParams,
    ConditionalHandle,
    ConditionalKind,
    ConditionalNodeParams,
    ConditionDefaults,
    Edge,
    EdgeData,
    EdgeType,
    EmptyNodeParams,
    EventHandle,
    EventRecordNodeParams,
    EventWaitNodeParams,
    ExecHandle,
    FreeNodeParams,
    FunctionHandle,
    GraphHandle,
    HostNodeParams,
    KernelNodeParams,
    KernelTable,
    LaunchAttributes,
    LaunchConfig,
    MemcpyNodeParams,
    MemsetNodeParams,
    NodeHandle,
    NodeKind,
    NodeParams,
    OpaqueNodeParams,
    ParameterSlot,
)
from ostinato.driver.cuda import libcuda as cu
from ostinato.driver.cuda.frozen import (
    NOT_READ,
    UNREAD,
    CudaFrozenGraph,
    EdgeArrays,
    Other,
    RawNodes,
    layout_bytes,
)
from ostinato.driver.cuda.launch import (
    SETTABLE,
    SHOWN,
    NodeBlocks,
    attribute_values,
    attribute_words,
    config_of,
    default_value,
    node_block,
    read_arguments,
)
from ostinato.driver.cuda.modules import ModuleCalls
from ostinato.driver.cuda.nodes import (
    CopyEnd,
    copy_ends,
    edge_array,
    fill_memcpy,
    fill_memset,
    has_cycle,
    mem_op_array,
    read_batch,
    read_conditional,
    read_edge_data,
    read_memcpy,
    read_memset,
)
from ostinato.driver.cuda.streams import StreamCalls
from ostinato.driver.launcher import reader
from ostinato.errors import ContextPoisonedError, DriverError, Status
from ostinato.records import dataclass

_SETTABLE = (
    *(MemcpyNodeParams, MemsetNodeParams, HostNodeParams, BatchMemOpNodeParams),
    *(EventRecordNodeParams, EventWaitNodeParams),
)
"""The nodes that `_set` changes; kernels and child graphs have calls of their own."""

# The calls that read a kernel node.
_READ = ("cuGraphNodeGetType", "cuGraphKernelNodeGetParams_v2", "cuGraphKernelNodeGetAttribute")

_ASSIGN_DEFAULT = 1
_PINNED_ALLOCATION = 1
_LOCATION_DEVICE = 1
_MAX_CONFIGS = 65536
_NO_COPIES = (
    "a graph with alloc, free or conditional nodes has no copies, and neither has the body of a "
    "conditional node"
)
_MEMORY_NODES = "nodes cannot leave a graph that has alloc or free nodes"


class GraphCalls(StreamCalls, ModuleCalls):
    """Graph definitions of this library and of others."""

    def __init__(self, lib: cu.Libcuda, context: int, ordinal: int) -> None:
        super().__init__(lib, context, ordinal)
        self._conditionals = _Conditionals()
        self._read_addresses = tuple(lib.address(symbol) for symbol in _READ)
        self._hides_attributes = False
        """True if kernels of other libraries may have launch attributes that cannot be read."""
        self._configs_read: dict[int, LaunchConfig] = {}
        """The config last read from each node.  An update that passes this same object keeps the
        node's attributes, which then need not be read from the driver again."""

    def graph_create(self) -> GraphHandle:
        return GraphHandle(self._handle("graph_create", "cuGraphCreate", 0))

    def graph_destroy(self, graph: GraphHandle) -> None:
        # First: once the handles are free, the driver may give them to another thread's graph.
        before = self._conditionals.take_graph(graph)
        try:
            self._call("graph_destroy", "cuGraphDestroy", graph)
        except DriverError:
            self._conditionals.put_back(before)
            raise

    def graph_clone(self, graph: GraphHandle) -> GraphHandle:
        try:
            return GraphHandle(self._handle("graph_clone", "cuGraphClone", graph))
        except DriverError as error:
            if error.status == Status.NOT_SUPPORTED:
                error.detail = _NO_COPIES
            raise

    def node_in_clone(self, node: NodeHandle, clone: GraphHandle) -> NodeHandle:
        return NodeHandle(self._handle("node_in_clone", "cuGraphNodeFindInClone", node, clone))

    def graph_nodes(self, graph: GraphHandle) -> tuple[NodeHandle, ...]:
        return _handles(self._node_array("graph_nodes", graph))

    def _node_array(self, seam: str, graph: GraphHandle) -> ctypes.Array[ctypes.c_uint64]:
        count = ctypes.c_size_t()
        self._call(seam, "cuGraphGetNodes", graph, None, byref(count))
        nodes = (ctypes.c_uint64 * count.value)()
        if count.value:
            self._call(seam, "cuGraphGetNodes", graph, nodes, byref(count))
        # The graph may have shrunk in between.
        return nodes if count.value == len(nodes) else (ctypes.c_uint64 * count.value)(*nodes)

    def graph_edges(self, graph: GraphHandle) -> tuple[Edge, ...]:
        return self._edge_arrays("graph_edges", graph).edges()

    def _edge_arrays(self, seam: str, graph: GraphHandle) -> EdgeArrays:
        # Always with edge data: without room for it the query fails (LOSSY_QUERY) for graphs with
        # programmatic launch.
        count = ctypes.c_size_t()
        self._call(seam, "cuGraphGetEdges_v2", graph, None, None, None, byref(count))
        made = EdgeArrays(count.value)
        if count.value:
            taken = (made.sources, made.targets, made.data, byref(count))
            self._call(seam, "cuGraphGetEdges_v2", graph, *taken)
            made.count = min(made.count, count.value)
        return made

    # --- reading all of a graph at once
    def graph_freeze(
        self, graph: GraphHandle, *, ours: Container[NodeHandle] | None = None
    ) -> CudaFrozenGraph:
        seam = "graph_freeze"
        array, edges = self._node_array(seam, graph), self._edge_arrays(seam, graph)
        nodes = _handles(array)
        all_ours = ours is not None and all(map(ours.__contains__, nodes))
        attributes = SETTABLE if all_ours else SHOWN
        layouts: dict[int, bytes] = {}
        raw = self._within(seam, lambda: self._read_nodes(array, nodes, attributes, layouts))
        if isinstance(raw, int):
            raise self._error(raw, seam)
        others = {index: self._read_other(nodes[index], kind) for index, kind in raw[3]}
        rest = SHOWN[len(SETTABLE) :] if all_ours else ()
        by_function = self._hides_attributes and not all_ours
        return CudaFrozenGraph(
            self, nodes, raw, layouts, others, edges, attributes, rest, by_function=by_function
        )

    def _read_nodes(
        self,
        array: ctypes.Array[ctypes.c_uint64],
        nodes: Sequence[int],
        attributes: tuple[int, ...],
        layouts: dict[int, bytes],
    ) -> RawNodes | int:
        """Returns the raw nodes, or the first status that is not 0.  Adds to `layouts`."""

        def missing(function: int) -> bytes:
            return layout_bytes(self.layout_of(function))

        compiled = reader("read_nodes")
        if compiled is None or not all(self._read_addresses):  # then each is read by itself
            kind, others = ctypes.c_int(), list[tuple[int, int]]()
            for index, node in enumerate(nodes):
                status = self._calls["cuGraphNodeGetType"](node, byref(kind))
                if status:
                    return status
                others.append((index, kind.value or UNREAD))
            return NOT_READ * len(nodes), [], b"", others
        start = ctypes.addressof(array)
        found: RawNodes | int
        found = compiled(self._read_addresses, start, len(nodes), attributes, layouts, missing)
        return found

    def _read_other(self, node: NodeHandle, kind: int) -> Other:
        """Reads a node that only Python can read.  Keeps an error, for the access to raise."""
        try:
            params: NodeParams | DriverError = self.node_params(node)
        except ContextPoisonedError:
            raise
        except DriverError as error:
            params = error
        try:
            return Other(NodeKind.KERNEL if kind == UNREAD else NodeKind(kind), params)
        except ValueError:  # a kind that this release does not have
            return Other(None, params)

    def layout_of(self, function: int, seam: str = "node_params") -> tuple[ParameterSlot, ...]:
        """Returns the layout of a function's parameters."""
        known = self._layouts.get(function)
        return self._parameter_layout(seam, function) if known is None else known

    def words_of(self, node: int, attributes: tuple[int, ...]) -> tuple[str, ...]:
        """Returns in words those of a node's attributes for which `LaunchConfig` has no field."""
        return attribute_words(self._attributes_of(node, attributes))

    def note_config(self, node: int, config: LaunchConfig) -> None:
        """Notes that a config equals the present attributes of a node."""
        if len(self._configs_read) >= _MAX_CONFIGS:
            self._configs_read.clear()
        self._configs_read[node] = config

    def graph_add_edges(self, graph: GraphHandle, edges: Sequence[Edge]) -> None:
        if not edges:
            return
        # The driver may notice a cycle only when the graph is instantiated.
        seam = "graph_add_edges"
        if has_cycle([*self.graph_edges(graph), *edges]):
            raise self._error(Status.INVALID_VALUE, seam, "these edges would close a cycle")
        # Some drivers give all edges of one call the data of the first (docs/driver-faults.md).
        added: list[Edge] = []
        try:
            for data in dict.fromkeys(edge.data for edge in edges):
                alike = [edge for edge in edges if edge.data == data]
                self._change_edges(seam, "cuGraphAddDependencies_v2", graph, alike)
                added += alike
        except DriverError:
            if added:
                with suppress(DriverError):
                    self._change_edges(seam, "cuGraphRemoveDependencies_v2", graph, added)
            raise

    def graph_remove_node(self, node: NodeHandle) -> None:
        seam = "graph_remove_node"
        before = self._conditionals.take_node(node)  # first, as in `graph_destroy`
        status = self._status(seam, "cuGraphDestroyNode", node)
        if status:
            self._conditionals.put_back(before)
            # cuda.h says only "an error", and there is no way from a node to its graph.
            kind = ctypes.c_int()
            self._call(seam, "cuGraphNodeGetType", node, byref(kind))
            if kind.value in (NodeKind.MEM_ALLOC, NodeKind.MEM_FREE):
                raise self._error(Status.NOT_PERMITTED, seam, _MEMORY_NODES, node=node)
            raise self._error(status, seam, node=node)

    def _change_edges(
        self, seam: str, symbol: str, graph: GraphHandle, edges: Sequence[Edge]
    ) -> None:
        count = len(edges)
        sources = (ctypes.c_void_p * count)(*[edge.source for edge in edges])
        targets = (ctypes.c_void_p * count)(*[edge.target for edge in edges])
        data = edge_array([edge.data for edge in edges])
        self._call(seam, symbol, graph, sources, targets, data, count)

    def _incoming_edge_data(self, seam: str, node: int) -> tuple[EdgeData, ...]:
        count = ctypes.c_size_t()
        symbol = "cuGraphNodeGetDependencies_v2"
        self._call(seam, symbol, node, None, None, byref(count))
        if not count.value:
            return ()
        nodes = (ctypes.c_uint64 * count.value)()
        data = (cu.EdgeDataStruct * count.value)()
        self._call(seam, symbol, node, nodes, data, byref(count))
        return tuple(read_edge_data(raw) for raw in data[: count.value])

    # --- nodes
    def graph_add_node(
        self,
        graph: GraphHandle,
        dependencies: Sequence[NodeHandle],
        params: NodeParams,
        edge_data: Sequence[EdgeData] | None = None,
    ) -> NodeHandle:
        seam = "graph_add_node"
        if edge_data is not None and len(edge_data) != len(dependencies):
            detail = f"{len(edge_data)} edge data for {len(dependencies)} dependencies"
            raise self._error(Status.INVALID_VALUE, seam, detail)
        number = 0
        if isinstance(params, HostNodeParams) and params.function is not None:
            self._require_on(seam)
            number = self._host_functions.add_to_graph(graph, params.function)
        count = len(dependencies)
        nodes = (ctypes.c_void_p * count)(*dependencies) if count else None
        edges = edge_array(edge_data) if count and edge_data is not None else None
        node = ctypes.c_uint64()
        if isinstance(params, KernelNodeParams) and edges is None:
            block = self._kernel_block(seam, params)
            symbol = "cuGraphAddKernelNode_v2"
            status = self._status(seam, symbol, byref(node), graph, nodes, count, block)
        else:
            raw = cu.GraphNodeParams()
            keep = self._fill(seam, raw, params, number)
            symbol = "cuGraphAddNode_v2"
            status = self._status(seam, symbol, byref(node), graph, nodes, edges, count, byref(raw))
            del keep  # memory that `raw` points to had to live until here
            if not status and isinstance(params, ConditionalNodeParams):
                bodies = read_conditional(raw.conditional)
                self._conditionals.add(graph, NodeHandle(node.value), bodies)
        if status:
            self._host_functions.release(number)
            raise self._error(status, seam, type(params).__name__)
        handle = NodeHandle(node.value)
        if isinstance(params, KernelNodeParams) and not params.config.plain:
            self._set_attributes_or_remove(seam, handle, params.config)
        return handle

    def graph_add_kernels(
        self,
        graph: GraphHandle,
        nodes: list[NodeHandle],
        kernels: KernelTable,
        rows: Sequence[tuple[int, Sequence[int]]],
    ) -> None:
        seam = "graph_add_node"
        self._within(seam, partial(self._add_kernels, seam, graph, nodes, kernels, rows))

    def _add_kernels(
        self,
        seam: str,
        graph: GraphHandle,
        nodes: list[NodeHandle],
        kernels: KernelTable,
        rows: Sequence[tuple[int, Sequence[int]]],
    ) -> None:
        layouts, configs = kernels.layouts, kernels.configs
        for sizes in {(kernels.functions[r], len(layouts[r]), kernels.sizes[r]) for r, _ in rows}:
            self._check_sizes(seam, *sizes)
        try:
            blocks = NodeBlocks(kernels, [row for row, _ in rows], self._context)
        except struct.error as error:
            raise self._error(Status.INVALID_VALUE, seam, f"a launch shape: {error}") from error
        call = self._calls["cuGraphAddKernelNode_v2"]
        made = (ctypes.c_uint64 * 1)()
        out = ctypes.addressof(made)
        most = max((len(before) for _, before in rows), default=0)
        after = (ctypes.c_uint64 * most)()
        given = ctypes.addressof(after) if most else None
        for (row, before), block in zip(rows, blocks.addresses, strict=True):
            for index, place in enumerate(before):
                after[index] = nodes[place]
            count = len(before)
            status = call(out, graph, given if count else None, count, block)
            if status:
                raise self._error(status, seam, "KernelNodeParams")
            node = NodeHandle(made[0])
            if not configs[row].plain:
                self._set_attributes_or_remove(seam, node, configs[row])
            nodes.append(node)

    def _fill(
        self,
        seam: str,
        raw: cu.GraphNodeParams,
        params: NodeParams,
        number: int,
        node: NodeHandle | None = None,
    ) -> object:
        """Fills the union.  Returns the object that must stay alive as long as `raw` is used.

        `number`: that of a host function.  `node`: the node that gets the parameters, None for a
        new node.
        """
        if isinstance(params, OpaqueNodeParams):
            raise self._refused(seam, f"this node can only be shown: {params.why}")
        context, raw.type = self._context, KINDS[type(params)]
        match params:
            case KernelNodeParams():
                block = self._kernel_block(seam, params)
                ctypes.memmove(byref(raw.kernel), block, ctypes.sizeof(raw.kernel))
                return block
            case MemcpyNodeParams():
                raw.memcpy.copyCtx = context
                old = None if node is None else self._raw_memcpy(seam, node)
                self._fill_memcpy(seam, raw.memcpy.copyParams, params, old)
            case MemsetNodeParams():
                fill_memset(raw.memset, params, context, seam)
            case HostNodeParams():
                given = (params.pointer, params.user_data)
                if params.function is not None:
                    given = (self._host_functions.pointer, number)
                raw.host.fn, raw.host.userData = given
            case ChildGraphNodeParams():
                raw.graph.graph = params.graph
            case EventRecordNodeParams():
                raw.eventRecord.event = params.event
            case EventWaitNodeParams():
                raw.eventWait.event = params.event
            case AllocNodeParams():
                raw.alloc.poolProps.allocType = _PINNED_ALLOCATION
                raw.alloc.poolProps.location.type = _LOCATION_DEVICE
                raw.alloc.poolProps.location.id = self._ordinal
                raw.alloc.bytesize = params.nbytes
            case FreeNodeParams():
                raw.free.dptr = params.address
            case BatchMemOpNodeParams():
                operations = mem_op_array(params, seam)
                raw.memOp.ctx, raw.memOp.count = context, len(operations)
                raw.memOp.paramArray = ctypes.addressof(operations)
                return operations
            case ConditionalNodeParams():
                if params.kind is ConditionalKind.SWITCH or params.size > 1:
                    self._require_on(seam)
                    self._lib.require(cu.BRANCHES)
                raw.conditional.handle = params.handle
                raw.conditional.type = int(params.kind)
                raw.conditional.size = params.size
                raw.conditional.ctx = context
        return None

    def node_kind(self, node: NodeHandle) -> NodeKind:
        kind = ctypes.c_int()
        self._call("node_kind", "cuGraphNodeGetType", node, byref(kind))
        try:
            return NodeKind(kind.value)
        except ValueError:
            detail = f"a node of kind {kind.value}, which this release does not know"
            raise self._refused("node_kind", detail, node=node) from None

    def node_params(self, node: NodeHandle) -> NodeParams:
        seam = "node_params"
        kind = self.node_kind(node)
        match kind:
            case NodeKind.KERNEL:
                return self._read_kernel(seam, node)
            case NodeKind.MEMCPY:
                return read_memcpy(self._raw_memcpy(seam, node))
            case NodeKind.MEMSET:
                memset = cu.MemsetParams()
                self._call(seam, "cuGraphMemsetNodeGetParams", node, byref(memset))
                return read_memset(memset)
            case NodeKind.HOST:
                host = cu.HostParams()
                self._call(seam, "cuGraphHostNodeGetParams", node, byref(host))
                pointer, user_data = host.fn or 0, host.userData or 0
                function = self._host_functions.find(pointer, user_data)
                return HostNodeParams(function, pointer, user_data)
            case NodeKind.CHILD_GRAPH:
                graph = self._get(seam, "cuGraphChildGraphNodeGetGraph", node)
                return ChildGraphNodeParams(GraphHandle(graph))
            case NodeKind.EMPTY:
                return EmptyNodeParams()
            case NodeKind.EVENT_WAIT:
                event = self._get(seam, "cuGraphEventWaitNodeGetEvent", node)
                return EventWaitNodeParams(EventHandle(event))
            case NodeKind.EVENT_RECORD:
                event = self._get(seam, "cuGraphEventRecordNodeGetEvent", node)
                return EventRecordNodeParams(EventHandle(event))
            case NodeKind.MEM_ALLOC:
                alloc = cu.MemAllocParams()
                self._call(seam, "cuGraphMemAllocNodeGetParams", node, byref(alloc))
                return AllocNodeParams(alloc.bytesize, alloc.dptr)
            case NodeKind.MEM_FREE:
                return FreeNodeParams(self._get(seam, "cuGraphMemFreeNodeGetParams", node))
            case NodeKind.BATCH_MEM_OP:
                batch = cu.BatchMemOpParams()
                self._call(seam, "cuGraphBatchMemOpNodeGetParams", node, byref(batch))
                return read_batch(batch)
            case NodeKind.CONDITIONAL:
                return self._read_conditional(seam, node)
        return OpaqueNodeParams("an external semaphore; its parameters are another API's")

    def node_set_params(self, node: NodeHandle, params: NodeParams) -> None:
        seam = "node_set_params"
        if isinstance(params, KernelNodeParams):
            self._set_kernel(seam, node, params)
            return
        # No call gives a node's graph (before 13.2), so no user object can hold a host function:
        # it is kept as long as the process, like the function that it replaced.
        self._set(seam, node, params, None)

    def conditional_create(
        self, graph: GraphHandle, *, default: int = 0, reset_at_launch: bool = True
    ) -> ConditionalHandle:
        flags = _ASSIGN_DEFAULT if reset_at_launch else 0
        symbol = "cuGraphConditionalHandleCreate"
        handle = self._handle("conditional_create", symbol, graph, self._context, default, flags)
        self._conditionals.note(graph, handle, ConditionDefaults(default, reset_at_launch))
        return ConditionalHandle(handle)

    def condition_defaults(self, node: NodeHandle) -> ConditionDefaults | None:
        self._require_on("condition_defaults")
        return self._conditionals.defaults(node)

    def _set(
        self, seam: str, node: NodeHandle, params: NodeParams, executable: ExecHandle | None
    ) -> int:
        """Sets parameters of a node that is no kernel, in the definition or in an executable.

        Returns the number under which a host function is kept, else 0.
        """
        if not isinstance(params, _SETTABLE):
            raise self._fixed(seam, node, params)
        number = 0
        if isinstance(params, HostNodeParams) and params.function is not None:
            number = self._host_functions.add(params.function)
        raw = cu.GraphNodeParams()
        keep = self._fill(seam, raw, params, number, node)
        if executable is None:
            status = self._status(seam, "cuGraphNodeSetParams", node, byref(raw))
        else:
            symbol = "cuGraphExecNodeSetParams"
            status = self._status(seam, symbol, executable, node, byref(raw))
        del keep  # memory that `raw` points to had to live until here
        if status:
            self._host_functions.release(number)
            raise self._error(status, seam, node=node)
        return number

    def _change(self, seam: str, node: int, symbol: str, *args: object) -> None:
        """Makes a call that changes `node`; the error names the node."""
        status = self._status(seam, symbol, *args)
        if status:
            raise self._error(status, seam, node=node)

    def _get(self, seam: str, symbol: str, node: int) -> int:
        out = ctypes.c_uint64()
        self._call(seam, symbol, node, byref(out))
        return out.value

    def _raw_memcpy(self, seam: str, node: int) -> cu.Memcpy3D:
        raw = cu.Memcpy3D()
        self._change(seam, node, "cuGraphMemcpyNodeGetParams", node, byref(raw))
        return raw

    def _fill_memcpy(
        self, seam: str, raw: cu.Memcpy3D, params: MemcpyNodeParams, old: cu.Memcpy3D | None
    ) -> None:
        """Fills a copy node's parameters.  `old`: the node's present ones, None for a new node."""
        before = (None, None) if old is None else copy_ends(old)
        if params.opaque or any(end and end.kind == cu.MEMORY_ARRAY for end in before):
            raise self._refused(seam, "one side of this copy is a CUDA array: shown, not settable")
        source = self._memory_kind(params.src, before[0])
        target = self._memory_kind(params.dst, before[1])
        fill_memcpy(raw, params, source, target)

    def _memory_kind(self, address: int, old: CopyEnd | None) -> int:
        """Returns the CUmemorytype for the memory at `address`, host or device.

        This is the type that the driver reports; "unified" for memory unknown to the driver, such
        as that of an alloc node.  A node keeps its value for memory of the same kind: the driver
        treats another value as a change of kind, and refuses it.
        """
        kind = self._memory_type(address)
        if old is None or kind == old.kind:
            return kind or cu.MEMORY_UNIFIED
        if old.kind == cu.MEMORY_UNIFIED or self._memory_type(old.address) == kind:
            return old.kind
        return kind or cu.MEMORY_UNIFIED

    def _fixed(self, seam: str, node: NodeHandle, params: NodeParams) -> DriverError:
        """Returns the error for parameters that cannot be set: a fixed or another kind of node."""
        kind = self.node_kind(node)
        if KINDS.get(type(params)) not in (None, kind):
            detail = f"it is a {kind.name} node, and {type(params).__name__} were given"
            return self._error(Status.INVALID_VALUE, seam, detail, node=node)
        return self._refused(
            seam, f"a {kind.name} node is fixed; build or capture the graph again", node=node
        )

    def _read_conditional(self, seam: str, node: int) -> NodeParams:
        known = self._conditionals.get(node)
        if known is not None:
            return known
        if self._lib.has("cuGraphNodeGetParams"):
            raw = cu.GraphNodeParams()
            self._call(seam, "cuGraphNodeGetParams", node, byref(raw))
            return read_conditional(raw.conditional)
        return OpaqueNodeParams(
            "a conditional node that another library made: reading it needs a driver for CUDA "
            f"{cu.in_words(cu.READ_CONDITIONAL.since)} or later; this one is for "
            f"{cu.in_words(self._lib.version)}"
        )

    # --- kernel nodes
    def _kernel_block(
        self, seam: str, params: KernelNodeParams, node: int | None = None
    ) -> ctypes.Array[ctypes.c_char]:
        """Returns a block of a CUDA_KERNEL_NODE_PARAMS_v2 and the memory that it points to."""
        layout, data = params.arguments.layout, params.arguments.data
        self._check_sizes(seam, params.function, len(layout), len(data), node)
        try:
            return node_block(params, self._context)
        except struct.error as error:
            detail = f"{params.config}: {error}"
            raise self._error(Status.INVALID_VALUE, seam, detail, node=node) from error

    def _read_kernel(self, seam: str, node: int) -> KernelNodeParams:
        raw = cu.KernelParams()
        self._call(seam, "cuGraphKernelNodeGetParams_v2", node, byref(raw))
        function = raw.func or 0
        if not function and raw.kern:  # a context-independent kernel
            function = self._handle(seam, "cuKernelGetFunction", raw.kern)
        layout = self.layout_of(function, seam)
        attributes = self._attributes_of(node, SHOWN)
        edges = self._incoming_edge_data(seam, node)
        sizes = (
            *(raw.gridDimX, raw.gridDimY, raw.gridDimZ),
            *(raw.blockDimX, raw.blockDimY, raw.blockDimZ),
            raw.sharedMemBytes,
        )
        programmatic = any(edge.type is EdgeType.PROGRAMMATIC for edge in edges)
        config = config_of(sizes, attributes, programmatic=programmatic)
        self.note_config(node, config)
        return KernelNodeParams(
            FunctionHandle(function),
            config,
            read_arguments(raw.kernelParams, raw.extra, layout),
            attribute_words(attributes),
        )

    def _set_kernel(self, seam: str, node: NodeHandle, params: KernelNodeParams) -> None:
        """Sets parameters and attributes, or neither."""
        before = self._read_kernel(seam, node)
        self._configs_read.pop(node, None)
        self._set_kernel_struct(seam, node, params)
        try:
            self._set_attributes(seam, node, params.config, before.config)
        except DriverError:
            self._set_kernel_struct(seam, node, before)
            self._set_attributes(seam, node, before.config, params.config)
            raise

    def _set_kernel_struct(self, seam: str, node: int, params: KernelNodeParams) -> None:
        block = self._kernel_block(seam, params, node)
        self._change(seam, node, "cuGraphKernelNodeSetParams_v2", node, block)

    def _set_attributes_or_remove(self, seam: str, node: NodeHandle, config: LaunchConfig) -> None:
        try:
            self._set_attributes(seam, node, config, None)
        except DriverError as error:
            if self._off is None and self._status(seam, "cuGraphDestroyNode", node):
                error.detail += f"; and node {node:#x} could not be taken out again"
            raise

    def _set_attributes(
        self, seam: str, node: int, config: LaunchConfig, before: LaunchConfig | None
    ) -> None:
        values = attribute_values(config, launch=False)
        if before is not None:  # attributes that are not requested any more return to their default
            for identity in attribute_values(before, launch=False):
                values.setdefault(identity, default_value(identity))
        symbol = "cuGraphKernelNodeSetAttribute"
        for identity, value in values.items():
            status = self._status(seam, symbol, node, identity, byref(value))
            if status:
                detail = f"launch attribute {identity} of {config}"
                raise self._error(status, seam, detail, node=node)

    def _refuse_other_attributes(self, seam: str, node: int, config: LaunchConfig) -> None:
        """Raises if the attributes differ from the node's: an executable's setter ignores them."""
        if self._configs_read.get(node) is config:
            return
        self._require_on(seam)
        now = config_of((1,) * 6 + (0,), self._attributes_of(node, SETTABLE), programmatic=False)
        has = LaunchAttributes.of(now)
        if LaunchAttributes.of(config) != has:
            detail = (
                f"cluster {has.cluster}, cooperative {has.cooperative} and priority "
                f"{has.priority} cannot change on an executable (asked for: {config})"
            )
            raise self._refused(seam, detail, node=node)

    def _attributes_of(
        self, node: int, identities: tuple[int, ...]
    ) -> dict[int, cu.LaunchAttributeValue]:
        """Returns the node's attributes that this device has.  These calls skip the look-up of the
        current context: a node needs ten of them, and they do not depend on it."""
        values = (cu.LaunchAttributeValue * len(identities))()
        get, address = self._calls["cuGraphKernelNodeGetAttribute"], ctypes.addressof(values)
        size = ctypes.sizeof(cu.LaunchAttributeValue)
        return {
            identity: values[index]
            for index, identity in enumerate(identities)
            if not get(node, identity, address + size * index)
        }


@dataclass(frozen=True, slots=True)
class _Conditional:
    """A conditional node that this library made."""

    graph: int
    params: ConditionalNodeParams
    defaults: ConditionDefaults | None


class _Conditionals:
    """The conditional nodes that this library made: a driver before 13.2 cannot read one back.

    A node of another thread or library may get the handle of a destroyed node.  So each call that
    destroys removes the data first, and puts it back if the driver refuses.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, _Conditional] = {}
        self._made: dict[int, dict[int, ConditionDefaults]] = {}
        """The conditions that were made for each graph, by its handle."""

    def note(self, graph: int, handle: int, defaults: ConditionDefaults) -> None:
        self._made.setdefault(graph, {})[handle] = defaults

    def defaults(self, node: int) -> ConditionDefaults | None:
        known = self._nodes.get(node)
        return None if known is None else known.defaults

    def add(self, graph: int, node: int, params: ConditionalNodeParams) -> None:
        place: int | None = graph
        defaults = None
        while place is not None and defaults is None:
            defaults = self._made.get(place, {}).get(params.handle)
            place = self._around(place)  # a body's node may have a condition of the graph around it
        self._nodes[node] = _Conditional(graph, params, defaults)

    def get(self, node: int) -> ConditionalNodeParams | None:
        known = self._nodes.get(node)
        return None if known is None else known.params

    def put_back(self, taken: _Conditionals) -> None:
        self._nodes |= taken._nodes
        self._made |= taken._made

    def _around(self, body: int) -> int | None:
        """Returns the graph that contains a body's node; None for a graph that is no body."""
        nodes = [*self._nodes.values()]  # other threads add and remove
        return next((known.graph for known in nodes if body in known.params.bodies), None)

    def take_graph(self, graph: int, taken: _Conditionals | None = None) -> _Conditionals:
        """Removes the data of a graph and of the bodies in it; returns it, added to `taken`."""
        taken = _Conditionals() if taken is None else taken
        made = self._made.pop(graph, None)
        if made is not None:
            taken._made[graph] = made
        for node, known in [*self._nodes.items()]:
            if known.graph == graph:
                self.take_node(node, taken)
        return taken

    def take_node(self, node: int, taken: _Conditionals | None = None) -> _Conditionals:
        """Removes the data of a node and of its bodies; returns it, added to `taken`."""
        taken = _Conditionals() if taken is None else taken
        known = self._nodes.pop(node, None)
        if known is not None:
            taken._nodes[node] = known
            for body in known.params.bodies:
                self.take_graph(body, taken)
        return taken


def _handles(array: ctypes.Array[ctypes.c_uint64]) -> tuple[NodeHandle, ...]:
    handles: list[NodeHandle] = array[:]  # type: ignore[assignment]  # plain integers already
    return tuple(handles)
