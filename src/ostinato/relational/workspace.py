"""Memory of joins: scratch memory and result buffers, both reused.

All of it is used in the order of one stream, so memory released by one join can be used by the next
without a wait.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from ostinato import Buffer, Device, Stream, fill
from ostinato.errors import CaptureError
from ostinato.lowlevel import uninterrupted
from ostinato.relational.block import SLOT
from ostinato.relational.keys import ScanTopology
from ostinato.step import capacity_class

_KEPT = 8
"""Most result buffers of one class that are kept for later joins."""


def require_no_capture(stream: Stream) -> None:
    """Raises CaptureError if the stream captures: the join's work would be recorded into the graph
    instead of running."""
    if stream.is_capturing():
        raise CaptureError(
            f"a join cannot be captured: {stream!r} is capturing (the capture goes on)"
        )


class Workspace:
    """Scratch memory of one joiner, which grows by powers of two.

    The hash table is all zeros between joins.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device, self._stream = device, stream
        self._slots = self._right = self._left = 0
        self._buffers: dict[str, tuple[Buffer, ...]] = {"table": (), "build": (), "probe": ()}
        self.growths = 0
        """Number of allocations."""
        # Addresses for the parameter block.
        self.slots = self.slot_of = self.rank = self.grouped = 0
        self.found = self.offsets = self.sums = 0

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for held in self._buffers.values() for buffer in held)

    def reserve(self, slots: int, right: int, probe: int, scan: ScanTopology | None) -> None:
        """Reserves a hash table of `slots` slots, memory to build an index of `right` right rows,
        and memory to probe with the left class `probe`; 0 for what is not needed."""
        device = self._device
        if slots > self._slots:
            require_no_capture(self._stream)
            table = device.empty(slots * SLOT.itemsize, "bytes")
            fill(self._stream, table, 0)
            with uninterrupted:
                old = self._replace("table", table)
                self._slots, self.slots = slots, table.address
            _close(old)
        if right > self._right:
            require_no_capture(self._stream)
            capacity = capacity_class(right)
            build = device.empty((3, capacity), np.uint32)
            with uninterrupted:
                old = self._replace("build", build)
                self.slot_of, self.rank, self.grouped = (build[i].address for i in range(3))
                self._right = capacity
            _close(old)
        if probe > self._left and scan is not None:
            require_no_capture(self._stream)
            # All at once: smaller classes need fewer sums too, so comparing `probe` is enough.
            sums = device.empty(max(1, sum(scan.scratch)), np.uint64)
            found, offsets = device.empty(probe, np.uint32), device.empty(probe, np.uint32)
            with uninterrupted:
                old = self._replace("probe", found, offsets, sums)
                self.found, self.offsets, self.sums = found.address, offsets.address, sums.address
                self._left = probe
            _close(old)

    def _replace(self, use: str, *buffers: Buffer) -> tuple[Buffer, ...]:
        self.growths += 1
        old, self._buffers[use] = self._buffers[use], buffers
        return old

    def clean(self) -> None:
        """Clears the table after a join that may not have finished."""
        for table in self._buffers["table"]:
            fill(self._stream, table, 0)

    def close(self) -> None:
        for held in self._buffers.values():
            _close(held)


def _close(buffers: tuple[Buffer, ...]) -> None:
    """Frees memory once the joins under way are done."""
    for buffer in buffers:
        buffer.close()


class Lease:
    """A buffer of a pool, returned to it once nothing refers to the lease."""

    __slots__ = ("__weakref__", "_leased", "_pool", "buffer", "capacity")

    def __init__(
        self, buffer: Buffer, capacity: int, pool: deque[Buffer], leased: dict[int, Buffer]
    ) -> None:
        self.buffer = buffer
        self.capacity = capacity
        self._pool, self._leased = pool, leased
        # Without this the garbage collector would free a lease's memory in a cycle before
        # `__del__`.
        leased[id(buffer)] = buffer

    def __del__(self) -> None:
        # Atomic calls only: the garbage collector may run this between any two lines.
        self._leased.pop(id(self.buffer), None)
        if len(self._pool) < _KEPT:
            self._pool.append(self.buffer)

    def rows(self, which: int, count: int) -> Buffer:
        """Returns the first `count` left (0) or right (1) row numbers; the buffer keeps the lease
        alive."""
        address = self.buffer.address + 4 * which * self.capacity
        return Buffer(self.buffer.context, address, (count,), np.dtype(np.uint32), base=self)


class OutputPool:
    """Buffers for results, by capacity class: left row numbers, then right ones."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device, self._stream = device, stream
        self._free: dict[int, deque[Buffer]] = {}
        self._leased: dict[int, Buffer] = {}
        """Leased buffers by `id`."""

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for later joins."""
        return sum(buffer.nbytes for free in self._free.values() for buffer in tuple(free))

    def take(self, capacity: int) -> Lease:
        """Returns room for `capacity` pairs.  Raises OutOfMemoryError, CaptureError."""
        free = self._free.get(capacity)
        if free is None:
            free = self._free.setdefault(capacity, deque())
        try:
            buffer = free.pop()
        except IndexError:
            require_no_capture(self._stream)
            buffer = self._device.empty((2, capacity), np.uint32)
        return Lease(buffer, capacity, free, self._leased)

    def clear(self) -> None:
        """Frees the buffers that are kept for later joins."""
        for free in self._free.values():
            while free:
                free.pop().close()
