"""The CUDA driver's executables: instantiate, launch, change, update."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref

from ostinato.driver.api import (
    BatchMemOpNodeParams,
    ChildGraphNodeParams,
    EventRecordNodeParams,
    EventWaitNodeParams,
    ExecHandle,
    GraphHandle,
    HostNodeParams,
    InstantiateFlags,
    KernelNodeParams,
    MemcpyNodeParams,
    MemsetNodeParams,
    NodeHandle,
    NodeParams,
    StreamHandle,
    UpdateOutcome,
    UpdateVerdict,
)
from ostinato.driver.cuda import structs as cs
from ostinato.driver.cuda.node_calls import NodeCalls
from ostinato.driver.cuda.nodes import fill_memset
from ostinato.driver.launcher import prepare
from ostinato.errors import Status

__all__ = ["ExecCalls"]

# CUgraphInstantiateResult in words
_INSTANTIATE_RESULTS = {
    2: "the graph's structure is invalid, such as a cycle",
    3: "a node does what a graph launched from the device cannot",
    4: "the nodes belong to several contexts",
    5: "a conditional handle is not used by any conditional node",
}


class ExecCalls(NodeCalls):
    """Executables of our definitions and of foreign ones."""

    _upload_stream: StreamHandle
    _exec_functions: dict[int, list[int]]
    """Host functions set on an executable, by their numbers: it holds no user objects."""
    _given_up: list[int]
    """Host functions of destroyed executables, until the next `synchronize`."""

    def graph_instantiate(
        self, graph: GraphHandle, flags: InstantiateFlags = InstantiateFlags.NONE
    ) -> ExecHandle:
        params = cs.InstantiateParams()
        params.flags = int(flags)
        if flags & InstantiateFlags.UPLOAD:
            params.hUploadStream = self._upload_stream
        executable = ctypes.c_uint64()
        symbol = "cuGraphInstantiateWithParams"
        status = self._status("graph_instantiate", symbol, byref(executable), graph, byref(params))
        if status:
            raise self._error(
                status,
                "graph_instantiate",
                _INSTANTIATE_RESULTS.get(params.result_out, ""),
                node=params.hErrNode_out,
                symbol=symbol,
            )
        return ExecHandle(executable.value)

    def exec_destroy(self, executable: ExecHandle) -> None:
        self._call("exec_destroy", "cuGraphExecDestroy", executable)
        self._given_up.extend(self._exec_functions.pop(executable, ()))

    def exec_upload(self, executable: ExecHandle, stream: StreamHandle) -> None:
        self._call("exec_upload", "cuGraphUpload", executable, stream)

    def exec_launch(self, executable: ExecHandle, stream: StreamHandle) -> None:
        self._call("exec_launch", "cuGraphLaunch", executable, stream)

    def exec_prepare_launch(
        self, executable: ExecHandle, stream: StreamHandle
    ) -> Callable[[], int]:
        if not stream:  # the legacy stream of whichever context is current: that must be asked

            def launch_on_legacy() -> int:
                self.exec_launch(executable, stream)
                return 0

            return launch_on_legacy

        call = self._lib.bare("cuGraphLaunch")
        assert call is not None
        return prepare(call, executable, stream)

    def exec_set_params(self, executable: ExecHandle, node: NodeHandle, params: NodeParams) -> None:
        seam = "exec_set_params"
        match params:
            case KernelNodeParams():
                self._refuse_other_attributes(seam, node, params.config)
                block = self._kernel_block(seam, params, node)
                symbol = "cuGraphExecKernelNodeSetParams_v2"
                self._change(seam, node, symbol, executable, node, block)
            case MemcpyNodeParams():
                old = self._raw_memcpy(seam, node)
                memcpy = cs.Memcpy3D()
                self._fill_memcpy(seam, memcpy, params, old)
                symbol = "cuGraphExecMemcpyNodeSetParams"
                self._change(seam, node, symbol, executable, node, byref(memcpy), self._context)
            case MemsetNodeParams():
                memset = cs.MemsetParams()
                fill_memset(memset, params, self._context, seam)
                symbol = "cuGraphExecMemsetNodeSetParams"
                self._change(seam, node, symbol, executable, node, byref(memset), self._context)
            case HostNodeParams():
                self._set_exec_host(seam, executable, node, params)
            case ChildGraphNodeParams():
                symbol = "cuGraphExecChildGraphNodeSetParams"
                self._change(seam, node, symbol, executable, node, params.graph)
            case EventRecordNodeParams():
                symbol = "cuGraphExecEventRecordNodeSetEvent"
                self._change(seam, node, symbol, executable, node, params.event)
            case EventWaitNodeParams():
                symbol = "cuGraphExecEventWaitNodeSetEvent"
                self._change(seam, node, symbol, executable, node, params.event)
            case BatchMemOpNodeParams():
                batch = cs.BatchMemOpParams()
                operations = self._fill_batch(seam, batch, params)
                symbol = "cuGraphExecBatchMemOpNodeSetParams"
                self._change(seam, node, symbol, executable, node, byref(batch))
                del operations
            case _:
                raise self._fixed(seam, node, params)

    def _set_exec_host(
        self, seam: str, executable: ExecHandle, node: NodeHandle, params: HostNodeParams
    ) -> None:
        number = 0 if params.function is None else self._host_functions.add(params.function)
        host = cs.HostParams()
        self._fill_host(host, params, number)
        status = self._status(seam, "cuGraphExecHostNodeSetParams", executable, node, byref(host))
        if status:
            self._host_functions.release(number)
            raise self._error(status, seam, node=node)
        if number:  # earlier ones stay too: launches under way keep the old values
            self._exec_functions.setdefault(executable, []).append(number)

    def exec_set_enabled(self, executable: ExecHandle, node: NodeHandle, enabled: bool) -> None:
        self._change(
            "exec_set_enabled", node, "cuGraphNodeSetEnabled", executable, node, int(enabled)
        )

    def exec_enabled(self, executable: ExecHandle, node: NodeHandle) -> bool:
        enabled = ctypes.c_uint()
        self._change(
            "exec_enabled", node, "cuGraphNodeGetEnabled", executable, node, byref(enabled)
        )
        return enabled.value != 0

    def exec_update(self, executable: ExecHandle, graph: GraphHandle) -> UpdateOutcome:
        info = cs.UpdateResultInfo()
        status = self._status("exec_update", "cuGraphExecUpdate_v2", executable, graph, byref(info))
        if status == Status.SUCCESS:
            return UpdateOutcome(UpdateVerdict.SUCCESS)
        if status != Status.GRAPH_EXEC_UPDATE_FAILURE:
            raise self._error(status, "exec_update", node=info.errorNode)
        try:
            verdict = UpdateVerdict(info.result)
        except ValueError:  # a reason that a newer driver has
            verdict = UpdateVerdict.ERROR
        if verdict is UpdateVerdict.SUCCESS:  # refused, and no reason was written
            verdict = UpdateVerdict.ERROR
        return UpdateOutcome(verdict, _node(info.errorNode), _node(info.errorFromNode))


def _node(handle: int | None) -> NodeHandle | None:
    return NodeHandle(handle) if handle else None
