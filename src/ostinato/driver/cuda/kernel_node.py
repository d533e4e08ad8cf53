"""The CUDA driver's kernel nodes: parameters, and the attributes that lie beside them.

A kernel node's cluster, cooperative and priority are attributes, set by calls of their own after
the node is there.  Whether it may start before its predecessor ends is not the node's at all, but
its incoming edges' (`LaunchConfig.programmatic` is read from them, and not written to them).
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import byref
from dataclasses import dataclass

from ostinato.driver.api import (
    Dim3,
    EdgeType,
    FunctionHandle,
    KernelNodeParams,
    LaunchConfig,
    NodeHandle,
)
from ostinato.driver.cuda import structs as cs
from ostinato.driver.cuda.graphs import GraphCalls
from ostinato.driver.cuda.launch import (
    attribute_values,
    cluster_of,
    node_block,
    read_arguments,
)
from ostinato.driver.cuda.modules import ModuleCalls
from ostinato.errors import DriverError, Status

__all__ = ["KernelNodeCalls"]

_MAX_CONFIGS = 65536
_SETTABLE = (cs.ATTRIBUTE_CLUSTER_DIMENSION, cs.ATTRIBUTE_COOPERATIVE, cs.ATTRIBUTE_PRIORITY)
_SHOWN = (
    *_SETTABLE,
    cs.ATTRIBUTE_ACCESS_POLICY_WINDOW,
    cs.ATTRIBUTE_CLUSTER_SCHEDULING,
    cs.ATTRIBUTE_MEM_SYNC_DOMAIN,
    cs.ATTRIBUTE_MEM_SYNC_DOMAIN_MAP,
    cs.ATTRIBUTE_PREFERRED_CLUSTER,
    cs.ATTRIBUTE_DEVICE_UPDATABLE,
    cs.ATTRIBUTE_SHARED_CARVEOUT,
)
# CUclusterSchedulingPolicy
_SCHEDULING = {1: "spread", 2: "load balancing"}


class KernelNodeCalls(GraphCalls, ModuleCalls):
    """Kernel nodes of definitions, ours and foreign."""

    _configs_read: dict[int, LaunchConfig]
    """Node to the config last read from it: by its identity, an update that keeps it is known to
    keep the attributes, without asking the driver three times."""

    def _kernel_block(
        self, seam: str, params: KernelNodeParams, node: int | None = None
    ) -> ctypes.Array[ctypes.c_char]:
        """Begins with a CUDA_KERNEL_NODE_PARAMS_v2, and holds all that it points to."""
        self._check_arguments(seam, params.function, params.arguments, node)
        try:
            return node_block(params, self._context)
        except struct.error as error:
            raise self._error(
                Status.INVALID_VALUE, seam, f"{params.config}: {error}", node=node
            ) from error

    def _read_kernel(self, seam: str, node: int) -> KernelNodeParams:
        raw = cs.KernelParams()
        self._call(seam, "cuGraphKernelNodeGetParams_v2", node, byref(raw))
        function = raw.func or 0
        if not function and raw.kern:  # a context-independent kernel
            function = self._handle(seam, "cuKernelGetFunction", raw.kern)
        layout = self._layouts.get(function)
        if layout is None:
            layout = self._parameter_layout(seam, function)
        attributes = self._attributes_of(node, _SHOWN)
        settable = _settable(attributes)
        edges = self._incoming_edge_data(seam, node)
        config = LaunchConfig(
            grid=(raw.gridDimX, raw.gridDimY, raw.gridDimZ),
            block=(raw.blockDimX, raw.blockDimY, raw.blockDimZ),
            shared=raw.sharedMemBytes,
            cluster=settable.cluster,
            cooperative=settable.cooperative,
            programmatic=any(edge.type is EdgeType.PROGRAMMATIC for edge in edges),
            priority=settable.priority or None,
        )
        if len(self._configs_read) >= _MAX_CONFIGS:
            self._configs_read.clear()
        self._configs_read[node] = config
        return KernelNodeParams(
            FunctionHandle(function),
            config,
            read_arguments(raw.kernelParams, raw.extra, layout),
            _extra_words(attributes),
        )

    def _set_kernel(self, seam: str, node: NodeHandle, params: KernelNodeParams) -> None:
        """Parameters and attributes, or neither."""
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
        status = self._status(seam, "cuGraphKernelNodeSetParams_v2", node, block)
        if status:
            raise self._error(status, seam, node=node)

    def _set_attributes_or_remove(self, seam: str, node: NodeHandle, config: LaunchConfig) -> None:
        try:
            self._set_attributes(seam, node, config, None)
        except DriverError as error:
            if self._poison is None and self._status(seam, "cuGraphDestroyNode", node):
                error.detail += f"; and node {node:#x} could not be taken out again"
            raise

    def _set_attributes(
        self, seam: str, node: int, config: LaunchConfig, before: LaunchConfig | None
    ) -> None:
        values = dict(attribute_values(config, launch=False))
        if before is not None:  # what was set and is not wanted any more goes back to its default
            for identity, _ in attribute_values(before, launch=False):
                values.setdefault(identity, _default_value(identity))
        for identity, value in values.items():
            status = self._status(
                seam, "cuGraphKernelNodeSetAttribute", node, identity, byref(value)
            )
            if status:
                raise self._error(
                    status, seam, f"launch attribute {identity} of {config}", node=node
                )

    def _refuse_other_attributes(self, seam: str, node: int, config: LaunchConfig) -> None:
        """An executable's setter changes no attributes, and does not say so: it is said here."""
        if self._configs_read.get(node) is config:
            return
        has = self._settable_attributes(node)
        asked = _Settable(cluster_of(config.cluster), config.cooperative, config.priority or 0)
        if asked != has:
            raise self._refused(
                seam,
                f"cluster {has.cluster}, cooperative {has.cooperative} and priority "
                f"{has.priority} cannot change on an executable (asked for: {config})",
                node=node,
            )

    def _settable_attributes(self, node: int) -> _Settable:
        return _settable(self._attributes_of(node, _SETTABLE))

    def _attributes_of(
        self, node: int, identities: tuple[int, ...]
    ) -> dict[int, cs.LaunchAttributeValue]:
        """Those that this device has.  Without the look at the current context that other calls
        take: there are ten to a node, and they do not depend on it."""
        values = (cs.LaunchAttributeValue * len(identities))()
        get, address = self._calls["cuGraphKernelNodeGetAttribute"], ctypes.addressof(values)
        size = ctypes.sizeof(cs.LaunchAttributeValue)
        return {
            identity: values[index]
            for index, identity in enumerate(identities)
            if not get(node, identity, address + size * index)
        }


@dataclass(frozen=True, slots=True)
class _Settable:
    """The attributes that `LaunchConfig` has, as a node has them."""

    cluster: Dim3 | None
    cooperative: bool
    priority: int


def _settable(found: dict[int, cs.LaunchAttributeValue]) -> _Settable:
    """What the device lacks reads as not set."""
    cluster: Dim3 | None = None
    if value := found.get(cs.ATTRIBUTE_CLUSTER_DIMENSION):
        size = value.clusterDim
        cluster = cluster_of((size.x, size.y, size.z))
    value = found.get(cs.ATTRIBUTE_COOPERATIVE)
    cooperative = value is not None and value.cooperative != 0
    value = found.get(cs.ATTRIBUTE_PRIORITY)
    return _Settable(cluster, cooperative, 0 if value is None else int(value.priority))


def _extra_words(found: dict[int, cs.LaunchAttributeValue]) -> tuple[str, ...]:
    """Attributes that `LaunchConfig` has no field for, in words, where they are set."""
    words: list[str] = []
    if (value := found.get(cs.ATTRIBUTE_ACCESS_POLICY_WINDOW)) and value.words[1]:
        words.append(f"access policy window of {value.words[1]} bytes at {value.words[0]:#x}")
    if value := found.get(cs.ATTRIBUTE_CLUSTER_SCHEDULING):
        policy = _SCHEDULING.get(value.clusterSchedulingPolicyPreference)
        if policy:
            words.append(f"cluster scheduling: {policy}")
    if (value := found.get(cs.ATTRIBUTE_MEM_SYNC_DOMAIN)) and value.memSyncDomain:
        words.append("memory synchronisation domain: remote")
    if value := found.get(cs.ATTRIBUTE_MEM_SYNC_DOMAIN_MAP):
        domains = (value.memSyncDomainMap.default_, value.memSyncDomainMap.remote)
        if domains not in ((0, 0), (0, 1)):
            words.append(f"memory synchronisation domains {domains[0]} and {domains[1]}")
    if value := found.get(cs.ATTRIBUTE_PREFERRED_CLUSTER):
        size = value.preferredClusterDim
        if max(size.x, size.y, size.z) > 1:
            words.append(f"preferred cluster {size.x} × {size.y} × {size.z}")
    if (value := found.get(cs.ATTRIBUTE_DEVICE_UPDATABLE)) and value.deviceUpdatable:
        words.append("updatable from the device")
    if (value := found.get(cs.ATTRIBUTE_SHARED_CARVEOUT)) and 0 < value.sharedMemCarveout <= 100:
        words.append(f"shared memory carveout {value.sharedMemCarveout} %")
    return tuple(words)


def _default_value(identity: int) -> cs.LaunchAttributeValue:
    value = cs.LaunchAttributeValue()
    if identity == cs.ATTRIBUTE_CLUSTER_DIMENSION:
        value.clusterDim = cs.Dimensions(1, 1, 1)
    return value
