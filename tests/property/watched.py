"""The host driver with a warden: freed memory faults, and what is destroyed too early is noted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ostinato.driver.api import ExecHandle
from ostinato.driver.host.driver import HostDriver
from ostinato.driver.host.memory import POISON, Allocation, MemoryTable


class _Quarantine(MemoryTable):
    """Never gives a freed address out again."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.freed: list[Allocation] = []

    def remove(self, allocation: Allocation) -> bool:
        removed = super().remove(allocation)
        if removed:
            allocation.data.fill(POISON)
            self.freed.append(allocation)
        return removed


class WatchedDriver(HostDriver):
    """A launch that still uses freed memory poisons the context, since nobody else can get it.

    `early`: executables that were destroyed under their own launch, which this driver forgives.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory = self._context.memory = _Quarantine(self._memory.total)
        self._tables.memory = self._memory
        self.early: list[str] = []

    def exec_destroy(self, executable: ExecHandle) -> None:
        found = self._executables.get(executable)
        if found is not None and found._last is not None and not found._last.done():
            self.early.append("an executable was destroyed under its own launch")
        super().exec_destroy(executable)

    @property
    def lost(self) -> bool:
        """Whether a kernel has poisoned the context."""
        return self._context.failure is not None

    def view(self, address: int, count: int) -> np.ndarray:
        """The memory itself, which keeps nothing of the library alive."""
        allocation = self._memory.find(address)
        assert allocation is not None
        start = address - allocation.address
        return allocation.data[start : start + 4 * count].view(np.int32)

    def census(self) -> Mapping[str, int]:
        """How many of each kind of thing there are."""
        return {
            "streams": len(self._streams),
            "events": len(self._events),
            "modules": len(self._modules),
            "graphs": len(self._graphs),
            "nodes": len(self._nodes),
            "executables": len(self._executables),
            "allocations": len(self._memory._live),
            "reserved": len(self._memory.reserved),
            "captures": len(self._captures.under_way),
        }
