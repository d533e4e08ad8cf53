"""The memory part of the host driver: allocations, copies and fills."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.driver.api import MemcpyNodeParams, MemoryRange, MemsetNodeParams, StreamHandle
from ostinato.driver.host.core import HostCore
from ostinato.driver.host.memory import reserve
from ostinato.driver.host.queue import Stream
from ostinato.driver.process_memory import as_numpy
from ostinato.errors import Status, driver_error

__all__ = ["MemoryCalls"]

# Pageable bytes up to this size are copied aside, so that the call need not wait for the stream.
_STAGED = 64 * 1024


class MemoryCalls(HostCore):
    def memory_info(self) -> tuple[int, int]:
        self._enter("memory_info")
        return self._memory.free, self._memory.total

    def mem_alloc(self, nbytes: int) -> int:
        return self._allocate("mem_alloc", nbytes, pinned=False)

    def mem_alloc_pinned(self, nbytes: int) -> int:
        return self._allocate("mem_alloc_pinned", nbytes, pinned=True)

    def _allocate(self, call: str, nbytes: int, *, pinned: bool) -> int:
        self._enter(call)
        self._forbid(call)
        if nbytes <= 0:
            raise driver_error(Status.INVALID_VALUE, call, f"{nbytes} bytes")
        if not pinned and nbytes > self._memory.free:
            free, total = self._memory.free, self._memory.total
            raise driver_error(
                Status.OUT_OF_MEMORY, call, f"{nbytes} bytes wanted, {free} of {total} are free"
            )
        allocation = reserve(nbytes, call, pinned=pinned)
        self._memory.add(allocation, call)
        return allocation.address

    def mem_free(self, address: int) -> None:
        self._free("mem_free", address, pinned=False)

    def mem_free_pinned(self, address: int) -> None:
        self._free("mem_free_pinned", address, pinned=True)

    def _free(self, call: str, address: int, *, pinned: bool) -> None:
        self._enter(call)
        self._forbid(call)
        # Work under way may still use it: CUDA waits here too.
        self._wait_for_all()
        self._raise_failure(call)
        with self._lock:
            allocation = self._memory.find(address)
            if (
                allocation is None
                or allocation.address != address
                or allocation.pinned != pinned
                or not self._memory.remove(allocation)
            ):
                what = "pinned" if pinned else "device"
                raise driver_error(
                    Status.INVALID_VALUE, call, f"{address:#x} does not begin {what} memory"
                )
            if allocation.graph_owned:
                allocation.outstanding = False
                self._memory.drop_reserved(allocation)

    def pinned_view(self, address: int, nbytes: int) -> memoryview:
        call = "pinned_view"
        self._enter(call)
        self._memory.check(address, nbytes, call, "address")
        allocation = self._memory.find(address)
        if allocation is None or not allocation.pinned:
            raise driver_error(Status.INVALID_VALUE, call, f"{address:#x} is not pinned memory")
        start = address - allocation.address
        return allocation.data[start : start + nbytes].data

    def memory_range(self, address: int) -> MemoryRange | None:
        self._enter("memory_range")
        return self._memory.range(address)

    def memory_view(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object
    ) -> Any:
        self._enter("memory_view")
        nbytes = math.prod(shape) * dtype.itemsize
        self._memory.check(address, nbytes, "memory_view", "address")
        return as_numpy(address, shape, dtype, (owner, self._memory.find(address)))

    def memcpy(self, dst: int, src: int, nbytes: int, stream: StreamHandle) -> None:
        call = "memcpy"
        self._enter(call)
        target = self._stream(call, stream)
        if nbytes < 0:
            raise driver_error(Status.INVALID_VALUE, call, f"{nbytes} bytes")
        if nbytes == 0:
            return
        self._memory.check(dst, nbytes, call, "dst")
        self._memory.check(src, nbytes, call, "src")
        self._submit(call, target, MemcpyNodeParams(dst, src, nbytes))

    def memset(
        self, dst: int, value: int, element_size: int, count: int, stream: StreamHandle
    ) -> None:
        call = "memset"
        self._enter(call)
        target = self._stream(call, stream)
        if element_size not in (1, 2, 4) or count < 0:
            raise driver_error(
                Status.INVALID_VALUE, call, f"{count} elements of {element_size} bytes"
            )
        if count == 0:
            return
        self._memory.check(dst, element_size * count, call, "dst")
        self._submit(call, target, MemsetNodeParams(dst, value, element_size, count))

    def memcpy_from_host(self, dst: int, src: memoryview, stream: StreamHandle) -> None:
        call = "memcpy_from_host"
        self._enter(call)
        target = self._pageable(call, stream)
        nbytes = src.nbytes
        if nbytes == 0:
            return
        self._memory.check(dst, nbytes, call, "dst")
        source = _bytes_of(src, call)
        staged = nbytes <= _STAGED
        if staged:
            source = source.copy()
        memory = self._memory

        def copy() -> None:
            np.copyto(memory.view(dst, nbytes, call), source)

        with self._lock:
            number = target.queue.submit(copy)
        if not staged:
            target.queue.wait(number)
            self._raise_failure(call)

    def memcpy_to_host(self, dst: memoryview, src: int, stream: StreamHandle) -> None:
        call = "memcpy_to_host"
        self._enter(call)
        target = self._pageable(call, stream)
        if dst.readonly:
            raise driver_error(Status.INVALID_VALUE, call, "dst cannot be written")
        nbytes = dst.nbytes
        if nbytes == 0:
            return
        self._memory.check(src, nbytes, call, "src")
        destination = _bytes_of(dst, call)
        memory = self._memory

        def copy() -> None:
            np.copyto(destination, memory.view(src, nbytes, call))

        with self._lock:
            number = target.queue.submit(copy)
        target.queue.wait(number)
        self._raise_failure(call)

    def _pageable(self, call: str, stream: StreamHandle) -> Stream:
        """The stream of a copy of pageable memory, which no capture can hold."""
        with self._lock:
            target = self._stream(call, stream)
            self._refuse_capturing(call, target)
        return target


def _bytes_of(view: memoryview, call: str) -> npt.NDArray[np.uint8]:
    try:
        return np.frombuffer(view, dtype=np.uint8)
    except (BufferError, ValueError) as error:
        raise driver_error(Status.INVALID_VALUE, call, str(error)) from error
