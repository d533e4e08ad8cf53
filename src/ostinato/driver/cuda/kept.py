"""Launch attributes that an executable silently keeps, tried on this machine's driver.

For each attribute: a kernel node with one value is instantiated and launched, and then given
another value, by a whole update (cuGraphExecUpdate) and by parameters of one node
(cuGraphExecKernelNodeSetParams, after the definition's node got the other value).  A kernel can
read the size of its cluster; for the other attributes only the driver's status is known.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass

from ostinato.driver.api import (
    ExecHandle,
    GraphHandle,
    Image,
    KernelArguments,
    KernelNodeParams,
    LaunchConfig,
    NodeHandle,
    ParameterSlot,
    StreamHandle,
)
from ostinato.driver.cuda import libcuda as cu
from ostinato.driver.cuda.driver import CudaDriver

_PTX = """
.version 7.8
.target sm_90
.address_size 64

// Writes how many blocks its cluster has.
.visible .entry cluster(.param .u64 out)
{
    .reg .u32 %r<2>;
    .reg .u64 %t<2>;
    ld.param.u64 %t1, [out];
    cvta.to.global.u64 %t1, %t1;
    mov.u32 %r1, %cluster_nctaid.x;
    st.global.u32 [%t1], %r1;
    ret;
}
"""


class Fate(enum.Enum):
    """The fate of another value."""

    REFUSED = "refused"
    APPLIED = "the kernel has the new value"
    KEPT = "SUCCESS, and the kernel has the old value"
    UNSEEN = "SUCCESS, and a kernel does not see which value it has"


@dataclass(frozen=True, slots=True)
class AttributeFate:
    """The fates of one attribute.  `read_back`: the driver reports the value set on a node."""

    attribute: str
    read_back: bool
    update: Fate
    set_params: Fate


def _dimensions(size: int) -> bytes:
    return bytes(cu.Dimensions(size, 1, 1))


def _number(value: int) -> bytes:
    return bytes(ctypes.c_int(value))


# Name, identity, the value before (None: the default) and the value after.
# A node with a preferred cluster size also has a cluster size, which must divide it.
_TRIED: tuple[tuple[str, int, bytes | None, bytes], ...] = (
    ("cluster size", cu.ATTRIBUTE_CLUSTER_DIMENSION, _dimensions(2), _dimensions(4)),
    ("preferred cluster size", cu.ATTRIBUTE_PREFERRED_CLUSTER, None, _dimensions(4)),
    ("cooperative", cu.ATTRIBUTE_COOPERATIVE, None, _number(1)),
    ("priority", cu.ATTRIBUTE_PRIORITY, None, _number(-1)),
    ("cluster scheduling", cu.ATTRIBUTE_CLUSTER_SCHEDULING, _number(1), _number(2)),
    ("memory synchronisation domain", cu.ATTRIBUTE_MEM_SYNC_DOMAIN, None, _number(1)),
    ("memory synchronisation map", cu.ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, None, b"\1\0"),
    ("shared memory carveout", cu.ATTRIBUTE_SHARED_CARVEOUT, _number(25), _number(75)),
)


def attribute_fates(driver: CudaDriver) -> tuple[AttributeFate, ...]:
    """Returns the fates of the attributes that this GPU and driver have; empty without clusters.

    Raises DriverError.  The trials take less than 1 MiB of memory, which the end of the process
    frees.
    """
    if not driver.capabilities.clusters:
        return ()
    module = driver.module_load(Image("ptx", _PTX.encode()))
    function, out = driver.module_function(module, "cluster"), driver.mem_alloc(4)
    driver.function_load(function)
    layout = driver.layout_of(function) or (ParameterSlot(0, 8),)
    data = out.to_bytes(8, "little").ljust(layout[-1].offset + layout[-1].size, b"\0")
    kernel = KernelNodeParams(function, LaunchConfig(8, 32), KernelArguments(data, layout))
    stream = driver.stream_create()
    trials = (_Trial(driver, kernel, out, stream, *tried) for tried in _TRIED)
    return tuple(fate for trial in trials if (fate := trial.fate()) is not None)


@dataclass(frozen=True, slots=True)
class _Trial:
    """One attribute and its two values.  `out`: the address to which the kernel writes."""

    driver: CudaDriver
    kernel: KernelNodeParams
    out: int
    stream: StreamHandle
    name: str
    identity: int
    before: bytes | None
    after: bytes

    def fate(self) -> AttributeFate | None:
        """Returns the fates of the attribute; None if no node can have it here."""
        made = [self._graph(value) for value in (self.before, self.after)]
        if None in made:
            return None
        (first, node), (second, other) = (one for one in made if one is not None)
        held = self.driver._attributes_of(other, (self.identity,)).get(self.identity)
        return AttributeFate(
            self.name,
            held is not None and bytes(held)[: len(self.after)] == self.after,
            self._changed(first, lambda run: self._update(run, second)),
            self._changed(first, lambda run: self._set_params(run, node)),
        )

    def _graph(self, value: bytes | None) -> tuple[GraphHandle, NodeHandle] | None:
        """Makes a graph of one kernel node with this value of the attribute; None: its default."""
        graph = self.driver.graph_create()
        node = self.driver.graph_add_node(graph, (), self.kernel)
        if self.identity == cu.ATTRIBUTE_PREFERRED_CLUSTER:
            self._set(node, cu.ATTRIBUTE_CLUSTER_DIMENSION, _dimensions(2))
        if value is not None and self._set(node, self.identity, value):
            return None
        return graph, node

    def _set(self, node: NodeHandle, identity: int, value: bytes) -> int:
        raw = cu.LaunchAttributeValue.from_buffer_copy(value.ljust(64, b"\0"))
        return self._status("cuGraphKernelNodeSetAttribute", node, identity, byref(raw))

    def _changed(self, graph: GraphHandle, change: Callable[[ExecHandle], int]) -> Fate:
        """Returns the fate of a change of an executable that was launched."""
        run = self.driver.graph_instantiate(graph)
        try:
            self.driver.exec_launch(run, self.stream)
            self.driver.stream_synchronize(self.stream)
            if change(run):
                return Fate.REFUSED
            if self.identity != cu.ATTRIBUTE_CLUSTER_DIMENSION:
                return Fate.UNSEEN
            self.driver.exec_launch(run, self.stream)
            seen = bytearray(4)
            self.driver.memcpy_to_host(memoryview(seen), self.out, self.stream)
            new = int.from_bytes(self.after[:4], "little")
            return Fate.APPLIED if int.from_bytes(seen, "little") == new else Fate.KEPT
        finally:
            self.driver.exec_destroy(run)

    def _update(self, run: ExecHandle, graph: GraphHandle) -> int:
        info = byref(cu.UpdateResultInfo())
        return self._status("cuGraphExecUpdate_v2", run, graph, info)

    def _set_params(self, run: ExecHandle, node: NodeHandle) -> int:
        if status := self._set(node, self.identity, self.after):
            return status
        block = self.driver._kernel_block("attribute_fates", self.kernel, node)
        return self._status("cuGraphExecKernelNodeSetParams_v2", run, node, block)

    def _status(self, symbol: str, *args: object) -> int:
        return self.driver._status("attribute_fates", symbol, *args)
