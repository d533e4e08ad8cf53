"""Replaces a graph's small fills by kernels.

The driver launches a chain of kernels faster than a chain that contains a small memset node: on
an H100 with driver 580, `cuGraphLaunch` of a chain takes 3 us more if fills of up to 4 KiB are
among its nodes, and the device 1.5 us more for each of them.  Fills of 64 KiB and over, copies and
forks cost nothing (docs/log.md, "Small fills in a chain of kernels").  PyTorch captures such fills,
mostly for counters of reductions.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.device import Device
from ostinato.driver.api import LaunchConfig, NodeKind
from ostinato.driver.host.kernel import host_kernel
from ostinato.errors import InputError
from ostinato.graph import Graph, prepare
from ostinato.modules import Kernel, Source

FILL = "ostinato_fill"
"""The name of the kernel."""
_SMALL = 1 << 16
_THREADS = 256
_BYTES = 64
"""Bytes that one thread fills."""
_KEPT = (NodeKind.MEM_ALLOC, NodeKind.MEM_FREE)
"""CUDA removes no node of a graph that has a node of these kinds."""


@host_kernel("to: *u8, pattern: u32, nbytes: u64", name=FILL)
def _fill(how: Any, to: Any, pattern: int, nbytes: int) -> None:
    to[:nbytes] = np.resize(np.frombuffer(pattern.to_bytes(4, "little"), np.uint8), nbytes)


@functools.cache
def source() -> Source:
    """Returns the kernel's source."""
    text = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    return Source(text, host=[_fill], name="fills.cu")


def fill_kernel(device: Device) -> Kernel:
    """Returns the kernel on a device; compiles and loads it at the first call.

    `replace_small_fills` calls this itself; call it before if another thread may be capturing when
    `replace_small_fills` runs.  Raises the errors of `ModuleCache.get_or_compile`.
    """
    return device.modules.get_or_compile(source(), FILL)


def replace_small_fills(device: Device, graph: Graph) -> int:
    """Replaces a graph's memset nodes of less than 64 KiB by kernels, so that its launch is faster;
    returns the number of replaced nodes.  The graph computes the same as before.

        graph = adopt_graph(device, captured)  # ostinato.interop.torch
        ost.lowlevel.replace_small_fills(device, graph)
        run = graph.instantiate()

    The graph is changed in place, so an adopted graph also changes for the library that made it:
    keep `device` open as long as that library replays it.  Fills of several rows, fills in child
    graphs and bodies, and all fills of a graph with alloc or free nodes (from which CUDA removes no
    node) stay as they are.

    Raises InputError for a graph of another device; GraphError as `Graph.replace` does, if the
    graph has an executable or a capture into it is under way; the errors of `fill_kernel`.  After
    an error, the fills are as before.
    """
    if not (isinstance(device, Device) and isinstance(graph, Graph)):
        raise InputError(
            "replace_small_fills: a Device and a Graph are needed, not "
            f"{type(device).__name__} and {type(graph).__name__}"
        )
    if graph.context is not device.context:
        raise InputError(f"replace_small_fills: {graph!r} is not of {device!r}")
    nodes = graph.nodes()
    if any(node.kind in _KEPT for node in nodes):
        return 0
    pairs = []
    for node in nodes:
        if node.kind is not NodeKind.MEMSET or node.memset.height != 1:
            continue
        fill = node.memset
        size, nbytes = fill.element_size, fill.element_size * fill.width
        if nbytes < _SMALL:
            unit = fill.value.to_bytes(4, "little")[:size]
            pattern = int.from_bytes(unit * (4 // size), "little")
            config = LaunchConfig(grid=max(1, -(-nbytes // (_BYTES * _THREADS))), block=_THREADS)
            operation = prepare(fill_kernel(device), config, fill.dst, pattern, nbytes)
            pairs.append((node, operation))
    if pairs:
        graph.replace_all(pairs)
    return len(pairs)
