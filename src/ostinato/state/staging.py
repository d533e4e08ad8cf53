"""A ring of pinned memory through which host values go to the device.

An entry is used again only once the copy out of it is done, so a copy in flight never reads
half-written bytes.  The caller does not wait for the device while fewer than `depth` writes are
under way.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ostinato.driver.api import CaptureStatus, MemcpyNodeParams, whole_number
from ostinato.driver.context import Context
from ostinato.driver.forking import new_lock
from ostinato.driver.interrupts import uninterrupted
from ostinato.driver.signature import BYTES
from ostinato.driver.stream import Event, Operation, Stream, require_stream
from ostinato.errors import CaptureError, ClosedError, InputError
from ostinato.memory import Buffer, allocate

_ONCE = "its bytes come from an entry of the ring, which later writes use again"


class StagingRing:
    """A ring of `depth` pinned entries of `nbytes` bytes, used in turn.  Thread-safe."""

    def __init__(self, context: Context, nbytes: int, *, depth: int = 4) -> None:
        entries = whole_number(depth)
        if entries is None or entries < 1:
            raise InputError(f"depth={depth!r}: a whole number of 1 or more is needed")
        self.nbytes = nbytes
        self.depth = depth = entries
        stride = -(-nbytes // 256) * 256
        self._memory = allocate(context, stride * depth, BYTES, pinned=True)
        self._entries = [self._memory.view(i * stride, nbytes) for i in range(depth)]
        self._views: list[npt.NDArray[np.uint8]] = [entry.array for entry in self._entries]
        self._done: list[Event | None] = [None] * depth
        """The event after the last copy out of each entry."""
        self._unmarked: list[Stream | None] = [None] * depth
        """The stream of each entry whose last copy has no event, because recording it failed."""
        self._streams: list[Stream | None] = [None] * depth
        """The stream of the last copy out of each entry."""
        self._closed = False
        self._next = 0
        self._waits = 0
        self._lock = new_lock()

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<StagingRing of {self.depth} entries of {self.nbytes} bytes{state}>"

    @property
    def waits(self) -> int:
        """The number of writes that had to wait because all entries were in flight."""
        return self._waits

    def write(self, dst: Buffer, data: bytes | memoryview, stream: Stream) -> None:
        """Copies `data` to the beginning of `dst` in stream order, as one copy.

        Returns at once unless all entries are in flight.  Raises InputError if the data does not
        fit, ClosedError, and CaptureError during a capture: each replay would copy the content that
        the entry has by then.
        """
        require_stream(stream, "set(value, stream)", self._memory.context)
        size = len(data)
        if size > min(self.nbytes, dst.nbytes):
            raise InputError(f"{size} bytes do not fit: {min(self.nbytes, dst.nbytes)} are there")
        if stream.capture_info().status is not CaptureStatus.NONE:
            raise CaptureError(
                "a staged write cannot be captured: write before the capture or between replays"
            )
        with self._lock:
            if self._closed:
                raise ClosedError("the staging ring is closed, and so is what it writes to")
            index = self._next
            self._next = (index + 1) % self.depth
            context = self._memory.context
            if context.captures:  # captures on other streams forbid this thread to query events
                with context.relaxed():
                    self._wait_for(index)
            else:
                self._wait_for(index)
            self._views[index][:size] = np.frombuffer(data, np.uint8)
            entry = self._entries[index]
            params = MemcpyNodeParams(dst.address, entry.address, size)
            operation = Operation(
                params, "staged write", (entry.range,), (dst.range,), (dst, self), once=_ONCE
            )
            self._unmarked[index] = self._streams[index] = stream
            stream.submit(operation)
            self._done[index] = stream.record(self._done[index])
            self._unmarked[index] = None

    def _wait_for(self, index: int) -> None:
        """Waits until the last copy out of an entry is done."""
        done = self._done[index]
        if done is not None and not done.done():
            self._waits += 1
            done.synchronize()
        # The stream of a copy whose event could not be recorded, or whose write was interrupted.
        stream = self._unmarked[index]
        if stream is not None and not stream.closed:
            stream.synchronize()
        elif stream is not None:  # a closed stream, whose work may be under way
            mark, driver = stream.mark(), self._memory.context.driver
            if mark is not None:
                try:
                    driver.event_synchronize(mark)
                finally:
                    driver.event_destroy(mark)
        self._unmarked[index] = None

    def close(self) -> None:
        """Frees the pinned memory once the copies out of it are done.  Idempotent."""
        with uninterrupted, self._lock:
            if self._closed:
                return
            self._closed = True
            streams = {stream for stream in self._streams if stream is not None}
            self._memory.context.retire(self._memory.close, streams)
            self._streams = [None] * self.depth
            self._done = [None] * self.depth  # events that nothing refers to are destroyed
        self._memory.context.collect()
