"""The CUDA driver's nodes: adding, reading and changing them in a definition."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref

from ostinato.driver.api import (
    AllocNodeParams,
    BatchMemOpNodeParams,
    ChildGraphNodeParams,
    ConditionalHandle,
    ConditionalKind,
    ConditionalNodeParams,
    EdgeData,
    EmptyNodeParams,
    EventHandle,
    EventRecordNodeParams,
    EventWaitNodeParams,
    FreeNodeParams,
    GraphHandle,
    HostNodeParams,
    KernelNodeParams,
    MemcpyNodeParams,
    MemsetNodeParams,
    NodeHandle,
    NodeKind,
    NodeParams,
    OpaqueNodeParams,
)
from ostinato.driver.cuda import structs as cs
from ostinato.driver.cuda.graphs import edge_array
from ostinato.driver.cuda.kernel_node import KernelNodeCalls
from ostinato.driver.cuda.memory import MemoryCalls
from ostinato.driver.cuda.nodes import (
    CopyEnd,
    copy_ends,
    fill_memcpy,
    fill_memset,
    mem_op_array,
    read_batch,
    read_memcpy,
    read_memset,
)
from ostinato.errors import DriverError, Status

__all__ = ["NodeCalls"]

# Kinds that no call changes.
_KINDS: dict[type[NodeParams], NodeKind] = {
    EmptyNodeParams: NodeKind.EMPTY,
    ChildGraphNodeParams: NodeKind.CHILD_GRAPH,
    AllocNodeParams: NodeKind.MEM_ALLOC,
    FreeNodeParams: NodeKind.MEM_FREE,
    ConditionalNodeParams: NodeKind.CONDITIONAL,
}

_ASSIGN_DEFAULT = 1
_PINNED_ALLOCATION = 1
_LOCATION_DEVICE = 1


class NodeCalls(KernelNodeCalls, MemoryCalls):
    """Nodes of definitions, ours and foreign."""

    def graph_add_node(
        self,
        graph: GraphHandle,
        dependencies: Sequence[NodeHandle],
        params: NodeParams,
        edge_data: Sequence[EdgeData] | None = None,
    ) -> NodeHandle:
        seam = "graph_add_node"
        if edge_data is not None and len(edge_data) != len(dependencies):
            raise self._error(
                Status.INVALID_VALUE,
                seam,
                f"{len(edge_data)} edge data for {len(dependencies)} dependencies",
            )
        raw = cs.GraphNodeParams()
        number, keep = self._fill(seam, raw, graph, params)
        count = len(dependencies)
        nodes = (ctypes.c_void_p * count)(*dependencies) if count else None
        edges = edge_array(edge_data) if count and edge_data is not None else None
        node = ctypes.c_uint64()
        status = self._status(
            seam, "cuGraphAddNode_v2", byref(node), graph, nodes, edges, count, byref(raw)
        )
        del keep  # what `raw` points to had to live until here
        if status:
            self._host_functions.release(number)
            raise self._error(status, seam, type(params).__name__, symbol="cuGraphAddNode_v2")
        handle = NodeHandle(node.value)
        if isinstance(params, KernelNodeParams):
            self._set_attributes_or_remove(seam, handle, params.config)
        elif isinstance(params, ConditionalNodeParams):
            self._remember_conditional(graph, handle, _conditional(raw.conditional))
        return handle

    def _fill(
        self, seam: str, raw: cs.GraphNodeParams, graph: int, params: NodeParams
    ) -> tuple[int, object]:
        """Fills the union.  Gives the number of a host function, and what must stay alive."""
        context = self._context
        match params:
            case KernelNodeParams():
                raw.type = NodeKind.KERNEL
                block = self._kernel_block(seam, params)
                ctypes.memmove(byref(raw.kernel), block, ctypes.sizeof(raw.kernel))
                return 0, block
            case MemcpyNodeParams():
                raw.type = NodeKind.MEMCPY
                raw.memcpy.copyCtx = context
                self._fill_memcpy(seam, raw.memcpy.copyParams, params, None)
            case MemsetNodeParams():
                raw.type = NodeKind.MEMSET
                fill_memset(raw.memset, params, context, seam)
            case HostNodeParams():
                raw.type = NodeKind.HOST
                number = 0
                if params.function is not None:
                    number = self._host_functions.add_to_graph(graph, params.function)
                self._fill_host(raw.host, params, number)
                return number, None
            case ChildGraphNodeParams():
                raw.type = NodeKind.CHILD_GRAPH
                raw.graph.graph = params.graph
            case EmptyNodeParams():
                raw.type = NodeKind.EMPTY
            case EventRecordNodeParams():
                raw.type = NodeKind.EVENT_RECORD
                raw.eventRecord.event = params.event
            case EventWaitNodeParams():
                raw.type = NodeKind.EVENT_WAIT
                raw.eventWait.event = params.event
            case AllocNodeParams():
                raw.type = NodeKind.MEM_ALLOC
                raw.alloc.poolProps.allocType = _PINNED_ALLOCATION
                raw.alloc.poolProps.location.type = _LOCATION_DEVICE
                raw.alloc.poolProps.location.id = self._ordinal
                raw.alloc.bytesize = params.nbytes
            case FreeNodeParams():
                raw.type = NodeKind.MEM_FREE
                raw.free.dptr = params.address
            case BatchMemOpNodeParams():
                raw.type = NodeKind.BATCH_MEM_OP
                return 0, self._fill_batch(seam, raw.memOp, params)
            case ConditionalNodeParams():
                raw.type = NodeKind.CONDITIONAL
                raw.conditional.handle = params.handle
                raw.conditional.type = int(params.kind)
                raw.conditional.size = params.size
                raw.conditional.ctx = context
            case OpaqueNodeParams():
                raise self._refused(seam, f"this node can only be shown: {params.why}")
        return 0, None

    def node_kind(self, node: NodeHandle) -> NodeKind:
        kind = ctypes.c_int()
        self._call("node_kind", "cuGraphNodeGetType", node, byref(kind))
        try:
            return NodeKind(kind.value)
        except ValueError:
            raise self._refused(
                "node_kind",
                f"a node of kind {kind.value}, which this release does not know",
                node=node,
            ) from None

    def node_params(self, node: NodeHandle) -> NodeParams:
        seam = "node_params"
        kind = self.node_kind(node)
        match kind:
            case NodeKind.KERNEL:
                return self._read_kernel(seam, node)
            case NodeKind.MEMCPY:
                return read_memcpy(self._raw_memcpy(seam, node))
            case NodeKind.MEMSET:
                memset = cs.MemsetParams()
                self._call(seam, "cuGraphMemsetNodeGetParams", node, byref(memset))
                return read_memset(memset)
            case NodeKind.HOST:
                host = cs.HostParams()
                self._call(seam, "cuGraphHostNodeGetParams", node, byref(host))
                pointer, user_data = host.fn or 0, host.userData or 0
                function = self._host_functions.find(pointer, user_data)
                return HostNodeParams(function, pointer, user_data)
            case NodeKind.CHILD_GRAPH:
                return ChildGraphNodeParams(
                    GraphHandle(self._get(seam, "cuGraphChildGraphNodeGetGraph", node))
                )
            case NodeKind.EMPTY:
                return EmptyNodeParams()
            case NodeKind.EVENT_WAIT:
                return EventWaitNodeParams(
                    EventHandle(self._get(seam, "cuGraphEventWaitNodeGetEvent", node))
                )
            case NodeKind.EVENT_RECORD:
                return EventRecordNodeParams(
                    EventHandle(self._get(seam, "cuGraphEventRecordNodeGetEvent", node))
                )
            case NodeKind.MEM_ALLOC:
                alloc = cs.MemAllocParams()
                self._call(seam, "cuGraphMemAllocNodeGetParams", node, byref(alloc))
                return AllocNodeParams(alloc.bytesize, alloc.dptr)
            case NodeKind.MEM_FREE:
                return FreeNodeParams(self._get(seam, "cuGraphMemFreeNodeGetParams", node))
            case NodeKind.BATCH_MEM_OP:
                batch = cs.BatchMemOpParams()
                self._call(seam, "cuGraphBatchMemOpNodeGetParams", node, byref(batch))
                return read_batch(batch)
            case NodeKind.CONDITIONAL:
                return self._read_conditional(seam, node)
        return OpaqueNodeParams("an external semaphore; its parameters are another API's")

    def node_set_params(self, node: NodeHandle, params: NodeParams) -> None:
        seam = "node_set_params"
        match params:
            case KernelNodeParams():
                self._set_kernel(seam, node, params)
            case MemcpyNodeParams():
                old = self._raw_memcpy(seam, node)
                memcpy = cs.Memcpy3D()
                self._fill_memcpy(seam, memcpy, params, old)
                self._change(seam, node, "cuGraphMemcpyNodeSetParams", node, byref(memcpy))
            case MemsetNodeParams():
                memset = cs.MemsetParams()
                fill_memset(memset, params, self._context, seam)
                self._change(seam, node, "cuGraphMemsetNodeSetParams", node, byref(memset))
            case HostNodeParams():
                # No call gives a node's graph (before 13.2), so no user object can hold the
                # function: it is kept as long as the process, as are those it replaced.
                number = 0 if params.function is None else self._host_functions.add(params.function)
                host = cs.HostParams()
                self._fill_host(host, params, number)
                self._change(seam, node, "cuGraphHostNodeSetParams", node, byref(host))
            case EventRecordNodeParams():
                self._change(seam, node, "cuGraphEventRecordNodeSetEvent", node, params.event)
            case EventWaitNodeParams():
                self._change(seam, node, "cuGraphEventWaitNodeSetEvent", node, params.event)
            case BatchMemOpNodeParams():
                batch = cs.BatchMemOpParams()
                keep = self._fill_batch(seam, batch, params)
                self._change(seam, node, "cuGraphBatchMemOpNodeSetParams", node, byref(batch))
                del keep
            case _:
                raise self._fixed(seam, node, params)

    def conditional_create(
        self, graph: GraphHandle, *, default: int = 0, reset_at_launch: bool = True
    ) -> ConditionalHandle:
        flags = _ASSIGN_DEFAULT if reset_at_launch else 0
        symbol = "cuGraphConditionalHandleCreate"
        return ConditionalHandle(
            self._handle("conditional_create", symbol, graph, self._context, default, flags)
        )

    # --- parts that executables use too
    def _change(self, seam: str, node: int, symbol: str, *args: object) -> None:
        """A call that changes `node`, which the error names."""
        status = self._status(seam, symbol, *args)
        if status:
            raise self._error(status, seam, node=node, symbol=symbol)

    def _get(self, seam: str, symbol: str, node: int) -> int:
        out = ctypes.c_uint64()
        self._call(seam, symbol, node, byref(out))
        return out.value

    def _raw_memcpy(self, seam: str, node: int) -> cs.Memcpy3D:
        raw = cs.Memcpy3D()
        self._change(seam, node, "cuGraphMemcpyNodeGetParams", node, byref(raw))
        return raw

    def _fill_memcpy(
        self, seam: str, raw: cs.Memcpy3D, params: MemcpyNodeParams, old: cs.Memcpy3D | None
    ) -> None:
        """`old`: what the node copies now, None for a new one."""
        before = (None, None) if old is None else copy_ends(old)
        if params.opaque or any(end and end.kind == cs.MEMORY_ARRAY for end in before):
            raise self._refused(seam, "one side of this copy is a CUDA array: shown, not settable")
        source, target = before
        fill_memcpy(
            raw,
            params,
            self._memory_kind(params.src, source),
            self._memory_kind(params.dst, target),
        )

    def _memory_kind(self, address: int, old: CopyEnd | None) -> int:
        """What to call the memory at `address`, host or device.

        The driver says it; where it does not know (memory of an alloc node, say), "unified" leaves
        it to the copy.  A node is not told another kind than it has for memory of the same sort:
        the driver would take that for a change, which it refuses.
        """
        kind = self._memory_type(address)
        if old is None or kind == old.kind:
            return kind or cs.MEMORY_UNIFIED
        if old.kind == cs.MEMORY_UNIFIED or self._memory_type(old.address) == kind:
            return old.kind
        return kind or cs.MEMORY_UNIFIED

    def _fixed(self, seam: str, node: NodeHandle, params: NodeParams) -> DriverError:
        """Why parameters of a kind that never changes were refused."""
        kind = self.node_kind(node)
        if _KINDS.get(type(params)) not in (None, kind):
            detail = f"it is a {kind.name} node, and {type(params).__name__} were given"
            return self._error(Status.INVALID_VALUE, seam, detail, node=node)
        return self._refused(
            seam, f"a {kind.name} node is fixed; build or capture the graph again", node=node
        )

    def _fill_host(self, raw: cs.HostParams, params: HostNodeParams, number: int) -> None:
        if params.function is not None:
            raw.fn, raw.userData = self._host_functions.pointer, number
        else:
            raw.fn, raw.userData = params.pointer, params.user_data

    def _fill_batch(
        self, seam: str, raw: cs.BatchMemOpParams, params: BatchMemOpNodeParams
    ) -> object:
        operations = mem_op_array(params, seam)
        raw.ctx, raw.count, raw.flags = self._context, len(params.operations), 0
        raw.paramArray = ctypes.addressof(operations)
        return operations

    def _read_conditional(self, seam: str, node: int) -> NodeParams:
        known = self._conditionals.get(node)
        if known is not None:
            return known
        if self._lib.has("cuGraphNodeGetParams"):
            raw = cs.GraphNodeParams()
            self._call(seam, "cuGraphNodeGetParams", node, byref(raw))
            return _conditional(raw.conditional)
        return OpaqueNodeParams(
            "a conditional node that another library made; this driver has no call to read it "
            "(cuGraphNodeGetParams, from CUDA 13.2)"
        )


def _conditional(raw: cs.ConditionalParams) -> ConditionalNodeParams:
    bodies: tuple[GraphHandle, ...] = ()
    if raw.phGraph_out and raw.size:
        graphs = (ctypes.c_uint64 * raw.size).from_address(raw.phGraph_out)
        bodies = tuple(GraphHandle(graph) for graph in graphs)
    return ConditionalNodeParams(
        ConditionalHandle(raw.handle), ConditionalKind(raw.type), raw.size, bodies
    )
