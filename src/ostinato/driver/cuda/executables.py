"""The CUDA driver's executables: instantiate, launch, change, update."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from ctypes import byref
from typing import cast

from ostinato.driver.api import (
    ChildGraphNodeParams,
    ExecHandle,
    FrozenGraph,
    GraphHandle,
    InstantiateFlags,
    KernelNodeParams,
    KernelSetter,
    NodeHandle,
    NodeParams,
    StreamHandle,
    UpdateOutcome,
    UpdateVerdict,
)
from ostinato.driver.cuda import libcuda as cu
from ostinato.driver.cuda.frozen import CudaFrozenGraph, raw_kernel
from ostinato.driver.cuda.graphs import GraphCalls
from ostinato.driver.launcher import kernel_nodes, prepare
from ostinato.errors import DriverError, Status

# CUgraphInstantiateResult in words
_INSTANTIATE_RESULTS = {
    2: "the graph's structure is invalid, such as a cycle",
    3: "a node does what a graph launched from the device cannot",
    4: "the nodes belong to several contexts",
    5: "a conditional handle is not used by any conditional node",
}


class ExecCalls(GraphCalls):
    """Executables of graph definitions of this library and of others."""

    def __init__(self, lib: cu.Libcuda, context: int, ordinal: int) -> None:
        super().__init__(lib, context, ordinal)
        self._upload_stream = self.stream_create()
        self._set_addresses = (
            lib.address("cuGraphExecKernelNodeSetParams_v2"),
            lib.address("cuCtxGetCurrent"),
        )

    def graph_instantiate(
        self, graph: GraphHandle, flags: InstantiateFlags = InstantiateFlags.NONE
    ) -> ExecHandle:
        params = cu.InstantiateParams()
        params.flags = int(flags)
        if flags & InstantiateFlags.UPLOAD:
            params.hUploadStream = self._upload_stream
        executable = ctypes.c_uint64()
        symbol = "cuGraphInstantiateWithParams"
        seam = "graph_instantiate"
        status = self._status(seam, symbol, byref(executable), graph, byref(params))
        if status:
            detail = _INSTANTIATE_RESULTS.get(params.result_out, "")
            raise self._error(status, seam, detail, node=params.hErrNode_out)
        return ExecHandle(executable.value)

    def exec_destroy(self, executable: ExecHandle) -> None:
        # First: once the handle is free, the driver may give it to another thread's executable.
        functions = self._host_functions.taken_from(executable)
        try:
            self._call("exec_destroy", "cuGraphExecDestroy", executable)
        except DriverError:
            for number in functions:
                self._host_functions.keep_with(executable, number)
            raise
        self._host_functions.give_up(functions)

    def exec_upload(self, executable: ExecHandle, stream: StreamHandle) -> None:
        self._call("exec_upload", "cuGraphUpload", executable, stream)

    def exec_launch(self, executable: ExecHandle, stream: StreamHandle) -> None:
        self._call("exec_launch", "cuGraphLaunch", executable, stream)

    def exec_prepare_launch(
        self, executable: ExecHandle, stream: StreamHandle
    ) -> Callable[[], int]:
        call = self._lib.bare("cuGraphLaunch")
        assert call is not None
        if stream:
            return prepare(call, executable, stream)
        # The legacy stream, which torch uses by default, is that of the current context.
        return prepare(call, executable, stream, (self._lib.bare("cuCtxGetCurrent"), self._context))

    def exec_set_params(self, executable: ExecHandle, node: NodeHandle, params: NodeParams) -> None:
        seam = "exec_set_params"
        match params:
            case KernelNodeParams():
                self._refuse_other_attributes(seam, node, params.config)
                block = self._kernel_block(seam, params, node)
                symbol = "cuGraphExecKernelNodeSetParams_v2"
                self._change(seam, node, symbol, executable, node, block)
            case ChildGraphNodeParams():
                symbol = "cuGraphExecChildGraphNodeSetParams"
                self._change(seam, node, symbol, executable, node, params.graph)
            case _:
                number = self._set(seam, node, params, executable)
                if number:
                    self._host_functions.keep_with(executable, number)

    def exec_prepare_kernel(
        self, executable: ExecHandle, node: NodeHandle, params: KernelNodeParams
    ) -> KernelSetter | None:
        arguments = params.arguments
        known = arguments.packed or arguments.layout or not arguments.data
        if self._off is not None or not all(self._set_addresses) or not known:
            return None
        try:
            content = raw_kernel(params)
            calls, context = self._set_addresses, self._context
            made = kernel_nodes(calls, context, executable, [node], [0], content)
        except (struct.error, ValueError):  # a number that is too large, or bytes that are too few
            return None
        return None if made is None else made[0]

    def exec_prepare_kernels(
        self,
        executable: ExecHandle,
        nodes: Sequence[NodeHandle],
        frozen: FrozenGraph,
        indices: Sequence[int],
    ) -> Sequence[KernelSetter] | None:
        if self._off is not None or not all(self._set_addresses):
            return None
        read = cast(CudaFrozenGraph, frozen)
        records, shapes, data, _ = read.raw
        content = (records, shapes, data, read.layouts)
        calls, context = self._set_addresses, self._context
        return kernel_nodes(calls, context, executable, nodes, indices, content)

    def exec_set_enabled(self, executable: ExecHandle, node: NodeHandle, enabled: bool) -> None:
        symbol = "cuGraphNodeSetEnabled"
        self._change("exec_set_enabled", node, symbol, executable, node, int(enabled))

    def exec_enabled(self, executable: ExecHandle, node: NodeHandle) -> bool:
        enabled = ctypes.c_uint()
        symbol = "cuGraphNodeGetEnabled"
        self._change("exec_enabled", node, symbol, executable, node, byref(enabled))
        return enabled.value != 0

    def exec_update(self, executable: ExecHandle, graph: GraphHandle) -> UpdateOutcome:
        info = cu.UpdateResultInfo()
        status = self._status("exec_update", "cuGraphExecUpdate_v2", executable, graph, byref(info))
        if status == Status.SUCCESS:
            return UpdateOutcome(UpdateVerdict.SUCCESS)
        if status != Status.GRAPH_EXEC_UPDATE_FAILURE:
            raise self._error(status, "exec_update", node=info.errorNode)
        try:
            # SUCCESS: the call failed, but the driver wrote no reason.
            verdict = UpdateVerdict(info.result or UpdateVerdict.ERROR)
        except ValueError:  # a reason that a newer driver has
            verdict = UpdateVerdict.ERROR
        return UpdateOutcome(verdict, NodeHandle(info.errorNode) if info.errorNode else None)
