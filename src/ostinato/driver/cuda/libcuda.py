"""libcuda through ctypes: what each call takes, and where it is found.

Why ctypes on libcuda and not `cuda.bindings` for the calls: libcuda keeps the binary interface of
its versioned symbols (`cuGraphAddNode_v2`, …) for ever, while the Python signatures of
cuda.bindings changed between 12.9, 13.0 and later (which version a name stands for, edge data,
unions).  Prepared ctypes calls are also the fastest from Python (a graph launch: a median of
2.1 µs against 3.0) and release the GIL.  cuda.core gives the device and its primary context.

`PROTOTYPES` is text in C's own words: it is parsed here for ctypes, and a test has a C compiler
compare it with cuda.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

from ostinato.errors import NoCudaError, Status

__all__ = ["INSTALL", "PROTOTYPES", "Libcuda", "parse_prototypes"]

INSTALL = 'install the NVIDIA driver, and then: pip install "ostinato[cuda13]"'

DriverCall: TypeAlias = Callable[..., int]

# Symbols are those that the header's macros map to, so that a newer driver changes nothing.
PROTOTYPES = """
cuInit(unsigned int)
cuDriverGetVersion(int *)
cuDeviceGetCount(int *)
cuDeviceGet(CUdevice *, int)
cuDevicePrimaryCtxRetain(CUcontext *, CUdevice)
cuDevicePrimaryCtxRelease_v2(CUdevice)
cuCtxGetCurrent(CUcontext *)
cuCtxSetCurrent(CUcontext)
cuCtxPushCurrent_v2(CUcontext)
cuCtxPopCurrent_v2(CUcontext *)
cuCtxSynchronize()
cuMemGetInfo_v2(size_t *, size_t *)
cuMemAlloc_v2(CUdeviceptr *, size_t)
cuMemFree_v2(CUdeviceptr)
cuMemHostAlloc(void **, size_t, unsigned int)
cuMemFreeHost(void *)
cuPointerGetAttributes(unsigned int, CUpointer_attribute *, void **, CUdeviceptr)
cuMemcpyAsync(CUdeviceptr, CUdeviceptr, size_t, CUstream)
cuMemcpyHtoDAsync_v2(CUdeviceptr, const void *, size_t, CUstream)
cuMemcpyDtoHAsync_v2(void *, CUdeviceptr, size_t, CUstream)
cuMemsetD8Async(CUdeviceptr, unsigned char, size_t, CUstream)
cuMemsetD16Async(CUdeviceptr, unsigned short, size_t, CUstream)
cuMemsetD32Async(CUdeviceptr, unsigned int, size_t, CUstream)
cuStreamCreateWithPriority(CUstream *, unsigned int, int)
cuStreamDestroy_v2(CUstream)
cuStreamSynchronize(CUstream)
cuStreamQuery(CUstream)
cuStreamWaitEvent(CUstream, CUevent, unsigned int)
cuStreamIsCapturing(CUstream, CUstreamCaptureStatus *)
cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode)
cuStreamBeginCaptureToGraph(CUstream, CUgraph, const CUgraphNode *, const CUgraphEdgeData *, \
size_t, CUstreamCaptureMode)
cuStreamEndCapture(CUstream, CUgraph *)
cuStreamGetCaptureInfo_v3(CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, \
const CUgraphNode **, const CUgraphEdgeData **, size_t *)
cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *)
cuEventCreate(CUevent *, unsigned int)
cuEventDestroy_v2(CUevent)
cuEventRecord(CUevent, CUstream)
cuEventQuery(CUevent)
cuEventSynchronize(CUevent)
cuEventElapsedTime_v2(float *, CUevent, CUevent)
cuLaunchHostFunc(CUstream, CUhostFn, void *)
cuLaunchKernelEx(const CUlaunchConfig *, CUfunction, void **, void **)
cuModuleLoadDataEx(CUmodule *, const void *, unsigned int, CUjit_option *, void **)
cuModuleUnload(CUmodule)
cuModuleGetFunction(CUfunction *, CUmodule, const char *)
cuModuleGetFunctionCount(unsigned int *, CUmodule)
cuModuleEnumerateFunctions(CUfunction *, unsigned int, CUmodule)
cuFuncGetAttribute(int *, CUfunction_attribute, CUfunction)
cuFuncSetAttribute(CUfunction, CUfunction_attribute, int)
cuFuncGetName(const char **, CUfunction)
cuFuncGetParamInfo(CUfunction, size_t, size_t *, size_t *)
cuFuncLoad(CUfunction)
cuKernelGetFunction(CUfunction *, CUkernel)
cuOccupancyMaxActiveBlocksPerMultiprocessor(int *, CUfunction, int, size_t)
cuGraphCreate(CUgraph *, unsigned int)
cuGraphDestroy(CUgraph)
cuGraphClone(CUgraph *, CUgraph)
cuGraphNodeFindInClone(CUgraphNode *, CUgraphNode, CUgraph)
cuGraphGetNodes(CUgraph, CUgraphNode *, size_t *)
cuGraphGetEdges_v2(CUgraph, CUgraphNode *, CUgraphNode *, CUgraphEdgeData *, size_t *)
cuGraphNodeGetDependencies_v2(CUgraphNode, CUgraphNode *, CUgraphEdgeData *, size_t *)
cuGraphAddNode_v2(CUgraphNode *, CUgraph, const CUgraphNode *, const CUgraphEdgeData *, size_t, \
CUgraphNodeParams *)
cuGraphAddDependencies_v2(CUgraph, const CUgraphNode *, const CUgraphNode *, \
const CUgraphEdgeData *, size_t)
cuGraphRemoveDependencies_v2(CUgraph, const CUgraphNode *, const CUgraphNode *, \
const CUgraphEdgeData *, size_t)
cuGraphDestroyNode(CUgraphNode)
cuGraphNodeGetType(CUgraphNode, CUgraphNodeType *)
cuGraphKernelNodeGetParams_v2(CUgraphNode, CUDA_KERNEL_NODE_PARAMS_v2 *)
cuGraphKernelNodeSetParams_v2(CUgraphNode, const CUDA_KERNEL_NODE_PARAMS_v2 *)
cuGraphKernelNodeGetAttribute(CUgraphNode, CUlaunchAttributeID, CUlaunchAttributeValue *)
cuGraphKernelNodeSetAttribute(CUgraphNode, CUlaunchAttributeID, const CUlaunchAttributeValue *)
cuGraphMemcpyNodeGetParams(CUgraphNode, CUDA_MEMCPY3D *)
cuGraphMemcpyNodeSetParams(CUgraphNode, const CUDA_MEMCPY3D *)
cuGraphMemsetNodeGetParams(CUgraphNode, CUDA_MEMSET_NODE_PARAMS *)
cuGraphMemsetNodeSetParams(CUgraphNode, const CUDA_MEMSET_NODE_PARAMS *)
cuGraphHostNodeGetParams(CUgraphNode, CUDA_HOST_NODE_PARAMS *)
cuGraphHostNodeSetParams(CUgraphNode, const CUDA_HOST_NODE_PARAMS *)
cuGraphChildGraphNodeGetGraph(CUgraphNode, CUgraph *)
cuGraphEventRecordNodeGetEvent(CUgraphNode, CUevent *)
cuGraphEventRecordNodeSetEvent(CUgraphNode, CUevent)
cuGraphEventWaitNodeGetEvent(CUgraphNode, CUevent *)
cuGraphEventWaitNodeSetEvent(CUgraphNode, CUevent)
cuGraphMemAllocNodeGetParams(CUgraphNode, CUDA_MEM_ALLOC_NODE_PARAMS *)
cuGraphMemFreeNodeGetParams(CUgraphNode, CUdeviceptr *)
cuGraphBatchMemOpNodeGetParams(CUgraphNode, CUDA_BATCH_MEM_OP_NODE_PARAMS *)
cuGraphBatchMemOpNodeSetParams(CUgraphNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *)
cuGraphNodeGetParams(CUgraphNode, CUgraphNodeParams *)
cuGraphConditionalHandleCreate(CUgraphConditionalHandle *, CUgraph, CUcontext, unsigned int, \
unsigned int)
cuUserObjectCreate(CUuserObject *, void *, CUhostFn, unsigned int, unsigned int)
cuUserObjectRelease(CUuserObject, unsigned int)
cuGraphRetainUserObject(CUgraph, CUuserObject, unsigned int, unsigned int)
cuGraphInstantiateWithParams(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *)
cuGraphExecDestroy(CUgraphExec)
cuGraphUpload(CUgraphExec, CUstream)
cuGraphLaunch(CUgraphExec, CUstream)
cuGraphExecUpdate_v2(CUgraphExec, CUgraph, CUgraphExecUpdateResultInfo *)
cuGraphNodeSetEnabled(CUgraphExec, CUgraphNode, unsigned int)
cuGraphNodeGetEnabled(CUgraphExec, CUgraphNode, unsigned int *)
cuGraphExecKernelNodeSetParams_v2(CUgraphExec, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS_v2 *)
cuGraphExecMemcpyNodeSetParams(CUgraphExec, CUgraphNode, const CUDA_MEMCPY3D *, CUcontext)
cuGraphExecMemsetNodeSetParams(CUgraphExec, CUgraphNode, const CUDA_MEMSET_NODE_PARAMS *, \
CUcontext)
cuGraphExecHostNodeSetParams(CUgraphExec, CUgraphNode, const CUDA_HOST_NODE_PARAMS *)
cuGraphExecChildGraphNodeSetParams(CUgraphExec, CUgraphNode, CUgraph)
cuGraphExecEventRecordNodeSetEvent(CUgraphExec, CUgraphNode, CUevent)
cuGraphExecEventWaitNodeSetEvent(CUgraphExec, CUgraphNode, CUevent)
cuGraphExecBatchMemOpNodeSetParams(CUgraphExec, CUgraphNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *)
"""

_C_TYPES: dict[str, Any] = {
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "unsigned char": ctypes.c_ubyte,
    "unsigned short": ctypes.c_ushort,
    "size_t": ctypes.c_size_t,
    "CUdeviceptr": ctypes.c_uint64,
    "CUdevice": ctypes.c_int,
    "CUfunction_attribute": ctypes.c_int,
    "CUlaunchAttributeID": ctypes.c_int,
    "CUstreamCaptureMode": ctypes.c_int,
    "CUhostFn": ctypes.c_void_p,
}
# Opaque handles: pointers in C, integers at our seam.
_HANDLES = frozenset(
    {
        "CUcontext",
        "CUevent",
        "CUfunction",
        "CUgraph",
        "CUgraphExec",
        "CUgraphNode",
        "CUkernel",
        "CUmodule",
        "CUstream",
        "CUuserObject",
    }
)


def parse_prototypes(text: str = PROTOTYPES) -> dict[str, tuple[str, ...]]:
    """Symbol to the C types of its parameters, as written."""
    table: dict[str, tuple[str, ...]] = {}
    for line in text.strip().splitlines():
        symbol, _, rest = line.rstrip(")").partition("(")
        table[symbol] = tuple(p.strip() for p in rest.split(",")) if rest else ()
    return table


def _ctype(parameter: str) -> Any:
    if parameter.endswith("*") or parameter in _HANDLES:
        return ctypes.c_void_p
    return _C_TYPES[parameter]


class Libcuda:
    """libcuda.so.1.  `lib[symbol]` is a call that returns a status and releases the GIL.

    A symbol that this driver is too old for answers NOT_SUPPORTED instead; `has` tells.
    """

    def __init__(self, path: str = "libcuda.so.1") -> None:
        try:
            self._dll = ctypes.CDLL(path)
        except OSError as error:
            raise NoCudaError(
                f"the CUDA driver ({path}) is not on this machine ({error}); {INSTALL}"
            ) from error
        self.calls: dict[str, DriverCall] = {}
        self._missing: set[str] = set()
        for symbol, parameters in parse_prototypes().items():
            call = self.bare(symbol)
            if call is None:
                self._missing.add(symbol)
                self.calls[symbol] = _not_supported
            else:
                call.argtypes = [_ctype(parameter) for parameter in parameters]
                self.calls[symbol] = call

    def __getitem__(self, symbol: str) -> DriverCall:
        return self.calls[symbol]

    def has(self, symbol: str) -> bool:
        return symbol not in self._missing

    def address(self, symbol: str) -> int:
        """Where a call begins, for C; 0 if there is none."""
        call = self.bare(symbol)
        return 0 if call is None else ctypes.cast(call, ctypes.c_void_p).value or 0

    def bare(self, symbol: str) -> Any | None:
        """A new call without argument conversion, for arguments that are ctypes objects already."""
        try:
            call = self._dll[symbol]  # by index: a new object each time, so argtypes are its own
        except AttributeError:
            return None
        call.restype = ctypes.c_int
        return call


def _not_supported(*_: object) -> int:
    return int(Status.NOT_SUPPORTED)
