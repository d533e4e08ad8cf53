"""Kernels in the place of a graph's small fills.

The driver launches a chain of kernels faster than one that has a small memset node in it: on an
H100 with driver 580, `cuGraphLaunch` of a chain takes 3 us more if fills of up to 4 KiB are among
its nodes, and the device 1.5 us more for each of them.  Fills of 64 KiB and over, copies and forks
cost nothing (docs/log.md, "Small fills in a chain of kernels").  PyTorch puts such fills into what
it captures: counters of reductions, mostly.
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
"""Of a thread."""
_KEPT = (NodeKind.MEM_ALLOC, NodeKind.MEM_FREE)
"""With one of these, CUDA removes no node of a graph."""


@host_kernel("to: *u8, pattern: u32, nbytes: u64", name=FILL)
def _fill(how: Any, to: Any, pattern: int, nbytes: int) -> None:
    to[:nbytes] = np.resize(np.frombuffer(pattern.to_bytes(4, "little"), np.uint8), nbytes)


@functools.cache
def source() -> Source:
    """The kernel's source."""
    text = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    return Source(text, host=[_fill], name="fills.cu")


def fill_kernel(device: Device) -> Kernel:
    """The kernel on a device, compiled and loaded if it is not yet.

    `replace_small_fills` loads it by itself; call this before, where a capture of another thread
    may be under way then.  Raises what `ModuleCache.get_or_compile` does.
    """
    return device.modules.get_or_compile(source(), FILL)


def replace_small_fills(device: Device, graph: Graph) -> int:
    """Puts kernels in the place of a graph's memset nodes of less than 64 KiB, so that it is
    launched faster; returns how many.  What the graph does stays the same.

        graph = adopt_graph(device, captured)  # ostinato.interop.torch
        ost.lowlevel.replace_small_fills(device, graph)
        run = graph.instantiate()

    The graph is changed in place, so an adopted one changes for the library that made it, too:
    keep `device` open as long as that replays it.  Fills of several rows, fills in child graphs and
    bodies, and all fills of a graph with alloc or free nodes, from which CUDA removes none, stay as
    they are.

    Raises InputError for a graph of another device; GraphError as `Graph.replace` does, if an
    executable was made of the graph, or something is captured into it; what `fill_kernel` raises.
    If it raises, the fills that are not replaced yet are as before.
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
    replaced = 0
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
            graph.replace(node, operation)
            replaced += 1
    return replaced
