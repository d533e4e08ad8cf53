"""cuda.h's structures and numbers that this library uses, and nothing else.

Field names are the header's, so that a test can have a C compiler compare every size and offset.
Unions list only the members that are used.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, Union, c_char, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

__all__ = [
    "STRUCTURES",
    "BatchMemOpParams",
    "ConditionalParams",
    "EdgeDataStruct",
    "GraphNodeParams",
    "HostParams",
    "InstantiateParams",
    "KernelParams",
    "LaunchAttribute",
    "LaunchAttributeValue",
    "LaunchConfigStruct",
    "MemAllocParams",
    "MemOpStruct",
    "Memcpy3D",
    "MemsetParams",
    "UpdateResultInfo",
]

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


class EdgeDataStruct(Structure):
    _fields_ = (
        ("from_port", c_ubyte),
        ("to_port", c_ubyte),
        ("type", c_ubyte),
        ("reserved", c_ubyte * 5),
    )


class Dimensions(Structure):
    _fields_ = (("x", c_uint), ("y", c_uint), ("z", c_uint))


class DomainMap(Structure):
    _fields_ = (("default_", c_ubyte), ("remote", c_ubyte))


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
        ("words", c_uint64 * 8),  # ours: aligns the union as the header's does, by its pointers
    )


class LaunchAttribute(Structure):
    _fields_ = (("id", c_int), ("pad", c_char * 4), ("value", LaunchAttributeValue))


class LaunchConfigStruct(Structure):
    _fields_ = (
        ("gridDimX", c_uint),
        ("gridDimY", c_uint),
        ("gridDimZ", c_uint),
        ("blockDimX", c_uint),
        ("blockDimY", c_uint),
        ("blockDimZ", c_uint),
        ("sharedMemBytes", c_uint),
        ("hStream", c_void_p),
        ("attrs", c_void_p),
        ("numAttrs", c_uint),
    )


class KernelParams(Structure):
    _fields_ = (
        ("func", c_void_p),
        ("gridDimX", c_uint),
        ("gridDimY", c_uint),
        ("gridDimZ", c_uint),
        ("blockDimX", c_uint),
        ("blockDimY", c_uint),
        ("blockDimZ", c_uint),
        ("sharedMemBytes", c_uint),
        ("kernelParams", c_void_p),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    )


class Memcpy3D(Structure):
    _fields_ = (
        ("srcXInBytes", c_size_t),
        ("srcY", c_size_t),
        ("srcZ", c_size_t),
        ("srcLOD", c_size_t),
        ("srcMemoryType", c_int),
        ("srcHost", c_void_p),
        ("srcDevice", c_uint64),
        ("srcArray", c_void_p),
        ("reserved0", c_void_p),
        ("srcPitch", c_size_t),
        ("srcHeight", c_size_t),
        ("dstXInBytes", c_size_t),
        ("dstY", c_size_t),
        ("dstZ", c_size_t),
        ("dstLOD", c_size_t),
        ("dstMemoryType", c_int),
        ("dstHost", c_void_p),
        ("dstDevice", c_uint64),
        ("dstArray", c_void_p),
        ("reserved1", c_void_p),
        ("dstPitch", c_size_t),
        ("dstHeight", c_size_t),
        ("WidthInBytes", c_size_t),
        ("Height", c_size_t),
        ("Depth", c_size_t),
    )


class MemcpyParams(Structure):
    _fields_ = (
        ("flags", c_int),
        ("reserved", c_int),
        ("copyCtx", c_void_p),
        ("copyParams", Memcpy3D),
    )


class MemsetParams(Structure):
    """CUDA_MEMSET_NODE_PARAMS_v2; version 1 is the same without `ctx`, which is last."""

    _fields_ = (
        ("dst", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("elementSize", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
        ("ctx", c_void_p),
    )


class HostParams(Structure):
    _fields_ = (("fn", c_void_p), ("userData", c_void_p))


class ChildGraphParams(Structure):
    """`ownership` came with 12.9 and is zero (clone) before."""

    _fields_ = (("graph", c_void_p), ("ownership", c_int))


class EventParams(Structure):
    _fields_ = (("event", c_void_p),)


class MemLocation(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class MemPoolProps(Structure):
    _fields_ = (
        ("allocType", c_int),
        ("handleTypes", c_int),
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
    _fields_ = (
        ("ctx", c_void_p),
        ("count", c_uint),
        ("paramArray", c_void_p),
        ("flags", c_uint),
    )


class ConditionalParams(Structure):
    _fields_ = (
        ("handle", c_uint64),
        ("type", c_int),
        ("size", c_uint),
        ("phGraph_out", c_void_p),
        ("ctx", c_void_p),
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
        ("hUploadStream", c_void_p),
        ("hErrNode_out", c_void_p),
        ("result_out", c_int),
    )


class UpdateResultInfo(Structure):
    _fields_ = (("result", c_int), ("errorNode", c_void_p), ("errorFromNode", c_void_p))


# Ours to the header's name; the test compares sizes and the offsets of fields with these names.
STRUCTURES: dict[str, type[Structure] | type[Union]] = {
    "CUgraphEdgeData": EdgeDataStruct,
    "CUlaunchAttributeValue": LaunchAttributeValue,
    "CUlaunchAttribute": LaunchAttribute,
    "CUlaunchConfig": LaunchConfigStruct,
    "CUDA_KERNEL_NODE_PARAMS_v2": KernelParams,
    "CUDA_KERNEL_NODE_PARAMS_v3": KernelParams,
    "CUDA_MEMCPY3D": Memcpy3D,
    "CUDA_MEMCPY_NODE_PARAMS": MemcpyParams,
    "CUDA_MEMSET_NODE_PARAMS_v2": MemsetParams,
    "CUDA_HOST_NODE_PARAMS_v2": HostParams,
    "CUDA_CHILD_GRAPH_NODE_PARAMS": ChildGraphParams,
    "CUDA_EVENT_RECORD_NODE_PARAMS": EventParams,
    "CUDA_EVENT_WAIT_NODE_PARAMS": EventParams,
    "CUmemLocation": MemLocation,
    "CUmemPoolProps": MemPoolProps,
    "CUDA_MEM_ALLOC_NODE_PARAMS_v2": MemAllocParams,
    "CUDA_MEM_FREE_NODE_PARAMS": MemFreeParams,
    "CUstreamBatchMemOpParams": MemOpStruct,
    "CUDA_BATCH_MEM_OP_NODE_PARAMS_v2": BatchMemOpParams,
    "CUDA_CONDITIONAL_NODE_PARAMS": ConditionalParams,
    "CUgraphNodeParams": GraphNodeParams,
    "CUDA_GRAPH_INSTANTIATE_PARAMS": InstantiateParams,
    "CUgraphExecUpdateResultInfo": UpdateResultInfo,
}
