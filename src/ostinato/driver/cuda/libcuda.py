"""The calls and structures of libcuda that are used here, as cuda.h has them, and the loader.

Why ctypes on libcuda and not `cuda.bindings` for the calls: libcuda keeps the binary interface of
its versioned symbols (`cuGraphAddNode_v2`, …) for ever, while the Python signatures of
cuda.bindings changed between 12.9, 13.0 and later (which version a name stands for, edge data,
unions).  Prepared ctypes calls are also the fastest from Python (a graph launch: a median of
2.1 µs against 3.0) and release the GIL.  cuda.core opens the device and its primary context.

`PROTOTYPES` is text in C's own words, parsed here for ctypes.  The fields of structures have the
header's names; unions list only the members that are used.  Tests compare both with a table made
from the headers of CUDA 12.0 to 13.5 (`tools/cuda_versions.py`), and with the cuda.h of the machine
through a C compiler.

The version of the driver decides about features (`Libcuda.version`, from cuDriverGetVersion).
`REQUIRED` is the oldest that is opened: before 12.4 a function does not report its parameters
(cuFuncGetParamInfo), without which no kernel node can be read or checked.  Later calls and features
are in `FEATURES` and `SINCE`.  Structures are the newest known; a field that an older driver does
not have lies in bytes that it reserves, and is zero there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure, Union, c_char, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any, TypeAlias

from ostinato.errors import NoCudaError, NotAvailableError, explain
from ostinato.records import dataclass

INSTALL = 'install the NVIDIA driver, and then: pip install "ostinato[cuda13]"'

DriverCall: TypeAlias = Callable[..., int]
Version: TypeAlias = tuple[int, int]

REQUIRED: Version = (12, 4)
"""The oldest CUDA whose driver is opened (driver 550)."""

SINCE: dict[str, Version] = {"cuEventElapsedTime_v2": (12, 8), "cuGraphNodeGetParams": (13, 2)}
"""Calls that came after `REQUIRED`, and the CUDA that has them.  They are optional."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of drivers from some version on.  `words` are the subject of a sentence."""

    words: str
    since: Version


BRANCHES = Feature("an IF node with an ELSE body, and a SWITCH node", (12, 8))
READ_CONDITIONAL = Feature("reading a conditional node that another library made", (13, 2))
FEATURES = (BRANCHES, READ_CONDITIONAL)
"""The features that came after `REQUIRED`."""

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
cuIpcGetMemHandle(CUipcMemHandle *, CUdeviceptr)
cuIpcOpenMemHandle_v2(CUdeviceptr *, CUipcMemHandle, unsigned int)
cuIpcCloseMemHandle(CUdeviceptr)
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
cuStreamUpdateCaptureDependencies_v2(CUstream, CUgraphNode *, const CUgraphEdgeData *, size_t, \
unsigned int)
cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *)
cuEventCreate(CUevent *, unsigned int)
cuEventDestroy_v2(CUevent)
cuEventRecord(CUevent, CUstream)
cuEventQuery(CUevent)
cuEventSynchronize(CUevent)
cuEventElapsedTime(float *, CUevent, CUevent)
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
cuFuncGetModule(CUmodule *, CUfunction)
cuModuleGetGlobal_v2(CUdeviceptr *, size_t *, CUmodule, const char *)
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
cuGraphAddKernelNode_v2(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, \
const CUDA_KERNEL_NODE_PARAMS_v2 *)
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
cuGraphMemsetNodeGetParams(CUgraphNode, CUDA_MEMSET_NODE_PARAMS *)
cuGraphHostNodeGetParams(CUgraphNode, CUDA_HOST_NODE_PARAMS *)
cuGraphChildGraphNodeGetGraph(CUgraphNode, CUgraph *)
cuGraphEventRecordNodeGetEvent(CUgraphNode, CUevent *)
cuGraphEventWaitNodeGetEvent(CUgraphNode, CUevent *)
cuGraphMemAllocNodeGetParams(CUgraphNode, CUDA_MEM_ALLOC_NODE_PARAMS *)
cuGraphMemFreeNodeGetParams(CUgraphNode, CUdeviceptr *)
cuGraphBatchMemOpNodeGetParams(CUgraphNode, CUDA_BATCH_MEM_OP_NODE_PARAMS *)
cuGraphNodeGetParams(CUgraphNode, CUgraphNodeParams *)
cuGraphNodeSetParams(CUgraphNode, CUgraphNodeParams *)
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
cuGraphExecNodeSetParams(CUgraphExec, CUgraphNode, CUgraphNodeParams *)
cuGraphExecChildGraphNodeSetParams(CUgraphExec, CUgraphNode, CUgraph)
"""


def _named(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Returns pairs of a name and the type, such as the fields of a structure."""
    return tuple((name, kind) for name in names.split())


class IpcMemHandle(Structure):
    """CUipcMemHandle, which a function takes by value."""

    _fields_ = (("reserved", c_ubyte * 64),)


_C_TYPES: dict[str, Any] = {
    "CUipcMemHandle": IpcMemHandle,
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
    # Opaque handles: pointers in C, integers in the protocol.
    **dict(_named(c_void_p, "CUcontext CUevent CUfunction CUgraph CUgraphExec CUgraphNode")),
    **dict(_named(c_void_p, "CUkernel CUmodule CUstream CUuserObject")),
}


def parse_prototypes() -> dict[str, tuple[str, ...]]:
    """Returns `PROTOTYPES` as a table: symbol to the C types of its parameters, as written."""
    table: dict[str, tuple[str, ...]] = {}
    for line in PROTOTYPES.strip().splitlines():
        symbol, _, rest = line.rstrip(")").partition("(")
        table[symbol] = tuple(p.strip() for p in rest.split(",")) if rest else ()
    return table


def _ctype(parameter: str) -> Any:
    return c_void_p if parameter.endswith("*") else _C_TYPES[parameter]


# ------------------------------------------------------------------------- numbers and structures

# CUlaunchAttributeID
ATTRIBUTE_ACCESS_POLICY_WINDOW = 1
ATTRIBUTE_COOPERATIVE = 2
ATTRIBUTE_CLUSTER_DIMENSION = 4
ATTRIBUTE_CLUSTER_SCHEDULING = 5
ATTRIBUTE_PROGRAMMATIC_SERIALIZATION = 6
ATTRIBUTE_PRIORITY = 8
ATTRIBUTE_MEM_SYNC_DOMAIN_MAP = 9
ATTRIBUTE_MEM_SYNC_DOMAIN = 10
ATTRIBUTE_PREFERRED_CLUSTER = 11
ATTRIBUTE_DEVICE_UPDATABLE = 13
ATTRIBUTE_SHARED_CARVEOUT = 14

# CUpointer_attribute
POINTER_MEMORY_TYPE = 2
POINTER_RANGE_START = 11
POINTER_RANGE_SIZE = 12

# CUmemorytype
MEMORY_HOST = 1
MEMORY_DEVICE = 2
MEMORY_ARRAY = 3
MEMORY_UNIFIED = 4

# A launch's `extra`: pairs of a key and a pointer, ended by zero.
EXTRA_END = 0
EXTRA_BUFFER_POINTER = 1
EXTRA_BUFFER_SIZE = 2


_LAUNCH_SIZES = _named(
    c_uint, "gridDimX gridDimY gridDimZ blockDimX blockDimY blockDimZ sharedMemBytes"
)


class EdgeDataStruct(Structure):
    _fields_ = (*_named(c_ubyte, "from_port to_port type"), ("reserved", c_ubyte * 5))


class Dimensions(Structure):
    _fields_ = _named(c_uint, "x y z")


class DomainMap(Structure):
    _fields_ = _named(c_ubyte, "default_ remote")


class LaunchAttributeValue(Union):
    _fields_ = (
        ("pad", c_char * 64),
        ("cooperative", c_int),
        ("clusterDim", Dimensions),
        ("clusterSchedulingPolicyPreference", c_int),
        ("programmaticStreamSerializationAllowed", c_int),
        ("priority", c_int),
        ("memSyncDomainMap", DomainMap),
        ("memSyncDomain", c_int),
        ("preferredClusterDim", Dimensions),
        ("deviceUpdatable", c_int),
        ("sharedMemCarveout", c_uint),
        ("words", c_uint64 * 8),  # not in the header: aligns the union as its pointers do
    )


class LaunchAttribute(Structure):
    _fields_ = (("id", c_int), ("pad", c_char * 4), ("value", LaunchAttributeValue))


class LaunchConfigStruct(Structure):
    _fields_ = (*_LAUNCH_SIZES, *_named(c_void_p, "hStream attrs"), ("numAttrs", c_uint))


class KernelParams(Structure):
    _fields_ = (
        ("func", c_void_p),
        *_LAUNCH_SIZES,
        *_named(c_void_p, "kernelParams extra kern ctx"),
    )


class Memcpy3D(Structure):
    _fields_ = (
        *_named(c_size_t, "srcXInBytes srcY srcZ srcLOD"),
        ("srcMemoryType", c_int),
        ("srcHost", c_void_p),
        ("srcDevice", c_uint64),
        *_named(c_void_p, "srcArray reserved0"),
        *_named(c_size_t, "srcPitch srcHeight dstXInBytes dstY dstZ dstLOD"),
        ("dstMemoryType", c_int),
        ("dstHost", c_void_p),
        ("dstDevice", c_uint64),
        *_named(c_void_p, "dstArray reserved1"),
        *_named(c_size_t, "dstPitch dstHeight WidthInBytes Height Depth"),
    )


class MemcpyParams(Structure):
    _fields_ = (*_named(c_int, "flags reserved"), ("copyCtx", c_void_p), ("copyParams", Memcpy3D))


class MemsetParams(Structure):
    """CUDA_MEMSET_NODE_PARAMS_v2; version 1 is the same without `ctx`, which is last."""

    _fields_ = (
        ("dst", c_uint64),
        ("pitch", c_size_t),
        *_named(c_uint, "value elementSize"),
        *_named(c_size_t, "width height"),
        ("ctx", c_void_p),
    )


class HostParams(Structure):
    _fields_ = _named(c_void_p, "fn userData")


class ChildGraphParams(Structure):
    """`ownership` came with 12.9 and is zero (clone) before."""

    _fields_ = (("graph", c_void_p), ("ownership", c_int))


class EventParams(Structure):
    _fields_ = (("event", c_void_p),)


class MemLocation(Structure):
    _fields_ = _named(c_int, "type id")


class MemPoolProps(Structure):
    _fields_ = (
        *_named(c_int, "allocType handleTypes"),
        ("location", MemLocation),
        ("win32SecurityAttributes", c_void_p),
        ("maxSize", c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", c_ubyte * 54),
    )


class MemAllocParams(Structure):
    _fields_ = (
        ("poolProps", MemPoolProps),
        ("accessDescs", c_void_p),
        ("accessDescCount", c_size_t),
        ("bytesize", c_size_t),
        ("dptr", c_uint64),
    )


class MemFreeParams(Structure):
    _fields_ = (("dptr", c_uint64),)


class MemOpValue(Structure):
    """CUstreamMemOpWaitValueParams and …WriteValueParams, which are laid out alike."""

    _fields_ = (
        ("operation", c_int),
        ("address", c_uint64),
        ("value64", c_uint64),
        ("flags", c_uint),
        ("alias", c_uint64),
    )


class MemOpStruct(Union):
    _fields_ = (("operation", c_int), ("waitValue", MemOpValue), ("pad", c_uint64 * 6))


class BatchMemOpParams(Structure):
    _fields_ = (("ctx", c_void_p), ("count", c_uint), ("paramArray", c_void_p), ("flags", c_uint))


class ConditionalParams(Structure):
    _fields_ = (
        ("handle", c_uint64),
        ("type", c_int),
        ("size", c_uint),
        *_named(c_void_p, "phGraph_out ctx"),
    )


class NodeParamsUnion(Union):
    _fields_ = (
        ("reserved1", ctypes.c_longlong * 29),
        ("kernel", KernelParams),
        ("memcpy", MemcpyParams),
        ("memset", MemsetParams),
        ("host", HostParams),
        ("graph", ChildGraphParams),
        ("eventWait", EventParams),
        ("eventRecord", EventParams),
        ("alloc", MemAllocParams),
        ("free", MemFreeParams),
        ("memOp", BatchMemOpParams),
        ("conditional", ConditionalParams),
    )


class GraphNodeParams(Structure):
    _anonymous_ = ("u",)
    _fields_ = (
        ("type", c_int),
        ("reserved0", c_int * 3),
        ("u", NodeParamsUnion),
        ("reserved2", ctypes.c_longlong),
    )


class InstantiateParams(Structure):
    _fields_ = (
        ("flags", c_uint64),
        *_named(c_void_p, "hUploadStream hErrNode_out"),
        ("result_out", c_int),
    )


class UpdateResultInfo(Structure):
    _fields_ = (("result", c_int), *_named(c_void_p, "errorNode errorFromNode"))


# ------------------------------------------------------------------------------------- the library


class Libcuda:
    """libcuda.so.1.  `lib[symbol]` is a call that returns a status and releases the GIL.

    `version` is the newest CUDA that this driver serves: (12, 8) for a driver 570.  A call that the
    driver lacks raises NotAvailableError, and `has` is False for it.

    Raises NoCudaError if libcuda cannot be loaded, NotAvailableError if its version is before
    `REQUIRED`.
    """

    def __init__(self, path: str = "libcuda.so.1") -> None:
        try:
            self._dll = ctypes.CDLL(path)
        except OSError as error:
            raise NoCudaError(
                f"the CUDA driver ({path}) is not on this machine ({error}); {INSTALL}"
            ) from error
        self.version = self._read_version(path)
        self.calls: dict[str, DriverCall] = {}
        for symbol, parameters in parse_prototypes().items():
            call = self.bare(symbol)
            if call is None:
                self.calls[symbol] = self._missing_call(symbol)
            else:
                call.argtypes = [_ctype(parameter) for parameter in parameters]
                self.calls[symbol] = call

    def _read_version(self, path: str) -> Version:
        call, number = self.bare("cuDriverGetVersion"), ctypes.c_int()
        if call is None or call(ctypes.byref(number)):
            raise NoCudaError(f"{path} does not give its version, as a CUDA driver does; {INSTALL}")
        version = number.value // 1000, number.value % 1000 // 10
        if version < REQUIRED:
            raise NotAvailableError(
                f"the NVIDIA driver is for CUDA {in_words(version)}; reading and changing the "
                f"kernels of a graph needs {in_words(REQUIRED)} or later (driver 550): update the "
                "driver (or install NVIDIA's cuda-compat package, on data center GPUs), or open "
                'the device "host"'
            )
        return version

    def __getitem__(self, symbol: str) -> DriverCall:
        return self.calls[symbol]

    def has(self, symbol: str) -> bool:
        return self.bare(symbol) is not None

    def require(self, feature: Feature) -> None:
        """Raises NotAvailableError, with the versions found and needed, without the feature."""
        if self.version < feature.since:
            raise NotAvailableError(
                f"{feature.words} needs a driver for CUDA {in_words(feature.since)} or later; "
                f"this one is for {in_words(self.version)}: update the NVIDIA driver"
            )

    def _missing_call(self, symbol: str) -> DriverCall:
        since = SINCE.get(symbol, REQUIRED)
        if self.version >= since:
            words = "its libcuda is not whole"
        else:
            words = f"it came with {in_words(since)}: update the NVIDIA driver"

        def call(*_: object) -> int:
            raise NotAvailableError(
                f"{symbol} is not in this driver, which is for CUDA {in_words(self.version)}; "
                f"{words}"
            )

        return call

    def address(self, symbol: str) -> int:
        """Returns the address of a function, for C; 0 if this driver does not have it."""
        call = self.bare(symbol)
        return 0 if call is None else ctypes.cast(call, ctypes.c_void_p).value or 0

    def bare(self, symbol: str) -> Any | None:
        """Returns a new call without argument conversion, for ctypes objects as arguments."""
        try:
            call = self._dll[symbol]  # by index: a new object each time, so argtypes are its own
        except AttributeError:
            return None
        call.restype = ctypes.c_int
        return call


def in_words(version: Version) -> str:
    """Returns text such as "12.4"."""
    return f"{version[0]}.{version[1]}"


def require_gpu(lib: Libcuda, ordinal: int) -> None:
    """Raises NoCudaError if there is no such GPU.  Starts the driver, and touches no GPU."""
    count = ctypes.c_int()
    for symbol, arguments in (("cuInit", (0,)), ("cuDeviceGetCount", (ctypes.byref(count),))):
        status = lib[symbol](*arguments)
        if status:
            words = explain(status)
            raise NoCudaError(
                f"{symbol} failed with status {status}: {words.meaning}. {words.advice} If there "
                f"is a GPU: {INSTALL}"
            )
    if count.value == 0:
        raise NoCudaError(f"the driver sees no GPU; {INSTALL}")
    if not 0 <= ordinal < count.value:
        raise NoCudaError(
            f"there is no cuda:{ordinal}: the driver sees {count.value} GPU(s), numbered from 0. "
            f"If one is missing, see CUDA_VISIBLE_DEVICES, or {INSTALL}"
        )
