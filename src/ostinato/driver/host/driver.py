"""The host driver: the whole of `driver.api.Driver` on the CPU, with CUDA's rules.

It is a driver, not a mock: streams are ordered queues with a thread each, captures record without
running, graphs are snapshots that run in dependency order, and what CUDA refuses is refused with
CUDA's status.  Where to read on:

    host_kernel          kernels: Python functions over NumPy views
    host_memory          addresses, allocations, decoded arguments
    host_stream          queues, threads, marks for events
    host_steps           what each kind of work does when it runs
    host_graph           definitions: nodes, edges, clones
    host_capture         the rules of stream capture
    host_exec            executables; host_update: what may change in them
    host_core, *_calls   the calls, by subject, over one lock and tables of handles

Statuses and the calls that a capture forbids were measured on an H100 (driver 580.159).

Differences from a GPU, on purpose:

* The nodes of one launch run one after another, in an order that the edges allow
  (`HostDriver(shuffle=seed)` draws it).  So a node that waits for a write of a parallel branch of
  the same launch waits for ever.
* Streams have no priority, and a kernel never overlaps the one before it: programmatic edges are
  kept and shown, and order nodes like other edges.
* A kernel's access is checked by allocation, not by thread; freed addresses may be used again.
* Loading a module breaks a capture that is not relaxed.  CUDA loads lazily, and the first launch
  may do so; here the rule is simple, so that tests find the mistake.
* A cycle is refused when its last edge is added, not only by instantiation.
* Kernels and host functions that call the driver get NOT_PERMITTED (800); CUDA leaves it undefined.
"""

from __future__ import annotations

import os
import platform
import weakref
from random import Random

import numpy as np

from ostinato.driver.api import Capabilities, DeviceProperties, Driver
from ostinato.driver.host.exec_calls import ExecCalls
from ostinato.driver.host.memory_calls import MemoryCalls
from ostinato.driver.host.modules import MAX_SHARED, MAX_THREADS, ModuleCalls

__all__ = ["DEFAULT_MEMORY", "HostDriver"]

DEFAULT_MEMORY = 8 << 30

# `close` waits so long for a thread: a host function may never return.
_PATIENCE = 2.0


class HostDriver(ExecCalls, MemoryCalls, ModuleCalls):
    """A device in this process.  `total_memory` is how many bytes its allocations may have.

    Nodes that no path of edges orders run in the order of their creation, which hides a missing
    edge.  With `shuffle`, a seed, they run in an order drawn anew for each executable.

    Threads start with the first work on a stream and end with `close`, or when the driver is
    dropped; they do not keep the interpreter from ending.
    """

    def __init__(
        self,
        name: str = "host",
        *,
        total_memory: int = DEFAULT_MEMORY,
        shuffle: int | None = None,
    ) -> None:
        super().__init__(total_memory)
        self._shuffle = None if shuffle is None else Random(shuffle)
        self._name = name
        self._finalizer = weakref.finalize(self, self._context.shut_down)

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            conditional_nodes=True,
            batch_memory_ops=True,
            memory_nodes=True,
            programmatic_launch=True,
            clusters=True,
            cooperative_launch=True,
            host_memory_is_device_memory=True,
            image_kinds=frozenset({"host"}),
            source_language="host",
        )

    @property
    def properties(self) -> DeviceProperties:
        return DeviceProperties(
            name=f"host ({platform.machine()}, NumPy {np.__version__})",
            compute_capability=(0, 0),
            multiprocessors=os.cpu_count() or 1,
            total_memory=self._memory.total,
            l2_cache=0,
            max_threads_per_block=MAX_THREADS,
            max_shared_per_block=MAX_SHARED,
            driver_version="host",
        )

    def close(self) -> None:
        """Ends the threads; work that has not begun is dropped, memory is given back."""
        queues = tuple(self._context.queues)
        self._finalizer()
        for queue in queues:
            queue.join(_PATIENCE)
        with self._lock:
            for functions in self._modules.values():
                for function in functions.values():
                    function.unload()
            for table in (
                self._events,
                self._functions,
                self._modules,
                self._graphs,
                self._nodes,
                self._executables,
            ):
                table.clear()
            self._begun.clear()
            self._memory.clear()


def _is_a_driver(driver: HostDriver) -> Driver:
    """For mypy, which proves here that every call is there, with the protocol's types."""
    return driver
