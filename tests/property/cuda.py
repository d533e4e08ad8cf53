"""The world of the property test on a GPU: the same rules, another driver."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from ostinato.driver.api import MemoryRange, StreamHandle
from ostinato.driver.cuda.driver import CudaDriver
from ostinato.driver.process_memory import as_numpy
from ostinato.errors import OstinatoError
from tests.property.threads import ThreadRules
from tests.property.world import Lane, Memory

SNAPSHOTS = 1 << 20
"""Bytes of pinned memory for what is compared in stream order."""

_COUNTED = {
    "streams": ("stream_create", "stream_destroy"),
    "events": ("event_create", "event_destroy"),
    "modules": ("module_load", "module_unload"),
    "executables": ("graph_instantiate", "exec_destroy"),
    "allocations": ("mem_alloc", "mem_free"),
    "pinned": ("mem_alloc_pinned", "mem_free_pinned"),
}


class WatchedCuda(CudaDriver):
    """The CUDA driver with a warden: it counts, and freed memory is given to nobody else.

    A wrong use of freed memory so shows as a wrong value; a GPU may not notice it otherwise.
    """

    lost = False
    early: tuple[str, ...] = ()

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self.freed: set[int] = set()
        self._there: Counter[str] = Counter()
        self._snapshots = super().mem_alloc_pinned(SNAPSHOTS)
        self._taken = 0
        for what, (make, end) in _COUNTED.items():
            for name, change in ((make, 1), (end, -1)):
                self.__dict__[name] = self._counted(what, change, getattr(self, name))

    def _counted(self, what: str, change: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            self._there[what] += change
            return result

        return counted

    def mem_free(self, address: int) -> None:
        self._require_on("mem_free")
        self.freed.add(address)

    def memory_range(self, address: int) -> MemoryRange | None:
        found = super().memory_range(address)
        return None if found is None or found.address in self.freed else found

    def close(self) -> None:
        with contextlib.suppress(OstinatoError):
            super().synchronize()
        for address in self.freed:
            with contextlib.suppress(OstinatoError):
                super().mem_free(address)
        if self._snapshots:
            with contextlib.suppress(OstinatoError):
                super().mem_free_pinned(self._snapshots)
        self.freed, self._snapshots = set(), 0
        super().close()

    def census(self) -> dict[str, int]:
        """How many of each kind of thing there are more than when the driver was opened."""
        return {what: self._there[what] for what in _COUNTED}

    def snapshot(self, address: int, count: int, stream: StreamHandle) -> np.ndarray:
        """Whole numbers of the device, which are in this array when the stream gets to it."""
        nbytes = 4 * count
        if self._taken + nbytes > SNAPSHOTS:
            self.synchronize()  # nobody reads the old ones any more
            self._taken = 0
        at = self._snapshots + self._taken
        self._taken += nbytes
        self.memcpy(at, address, nbytes, stream)
        return as_numpy(at, (count,), np.dtype(np.int32), self)


class CudaRules(ThreadRules):
    """All rules but those that end the context, which a process has only once."""

    ordinal = 0
    driver: WatchedCuda  # type: ignore[assignment]

    poison = None  # type: ignore[assignment]

    def new_driver(self) -> WatchedCuda:  # type: ignore[override]
        return WatchedCuda(self.ordinal)

    def contents(self, memory: Memory) -> np.ndarray:
        found = np.empty(len(memory.box), np.int32)
        stream = self.open_lanes[0].stream.handle
        self.driver.memcpy_to_host(memoryview(found).cast("B"), memory.address, stream)
        return found

    def found_by(self, lane: Lane, memory: Memory) -> np.ndarray:
        return self.driver.snapshot(memory.address, len(memory.box), lane.stream.handle)


class UncompiledCuda(CudaRules):
    """Without the compiled launch call."""

    compiled = False
