"""The base class of the CUDA driver: checked calls in the right context, and memory.

Every call goes through `CudaCalls._status`: it refuses at once after a sticky status, makes the
device's primary context current, and calls.  `_call` also raises the error of the status.

The current context is thread state that other libraries change (torch and CuPy set another
device's), so each call looks it up first, which costs 0.2 µs.  A thread without a context gets this
one and keeps it.  On a thread with another current context, that one is restored after the call.  A
prepared replay (`exec_prepare_launch`) skips the look-up: its stream belongs to one context.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from ctypes import byref
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ostinato.driver.api import CaptureStatus, MemoryRange, StreamHandle
from ostinato.driver.cuda import libcuda as cu
from ostinato.driver.cuda.host_functions import HostFunctions
from ostinato.driver.cuda.nodes import ELEMENT_SIZES, unsigned
from ostinato.driver.forking import FORKED, switch_off_in_children
from ostinato.errors import ClosedError, ContextPoisonedError, DriverError, Status, driver_error

_HOST_ALLOC_PORTABLE = 1  # usable from any context of the process
_HOST_ALLOC_DEVICE_MAP = 2
_LAZY_PEER_ACCESS = 1  # CUipcMem_flags

_RANGE_ATTRIBUTES = (ctypes.c_int * 2)(cu.POINTER_RANGE_START, cu.POINTER_RANGE_SIZE)
_TYPE_ATTRIBUTES = (ctypes.c_int * 1)(cu.POINTER_MEMORY_TYPE)

T = TypeVar("T")


class _CurrentContext(threading.local):
    """The ctypes objects by which a thread reads its current context, made once per thread."""

    def __init__(self) -> None:
        slot = ctypes.c_void_p()
        self.slot_and_reference = slot, byref(slot)


class CudaCalls:
    """Checked calls on one primary context, and its memory.  The driver's parts are subclasses."""

    def __init__(self, lib: cu.Libcuda, context: int, ordinal: int) -> None:
        self._lib = lib
        self._calls = lib.calls
        self._context = context
        self._ordinal = ordinal
        self._off: int | str | None = None
        """The reason why every call raises (a sticky status, or text if closed), or None."""
        self._current = _CurrentContext()
        self._get_current = lib["cuCtxGetCurrent"]
        self._host_functions = HostFunctions(lib)
        switch_off_in_children(self)

    def after_fork(self) -> None:
        """Makes calls in a forked child raise: libcuda has no context there."""
        self._off = FORKED

    def _status(self, seam: str, symbol: str, *args: object) -> int:
        """Calls and returns the status.  Raises only on a poisoned or closed context."""
        if self._off is not None:
            self._require_on(seam)
        slot, reference = self._current.slot_and_reference
        self._get_current(reference)
        if slot.value == self._context:
            return self._calls[symbol](*args)
        return self._in_context(partial(self._calls[symbol], *args))

    def _within(self, seam: str, call: Callable[[], T]) -> T:
        """Makes a call that is not in `_calls`, with the checks of `_status`."""
        if self._off is not None:
            self._require_on(seam)
        slot, reference = self._current.slot_and_reference
        self._get_current(reference)
        return call() if slot.value == self._context else self._in_context(call)

    def _in_context(self, call: Callable[[], T]) -> T:
        """Makes a call with this context current, where another one is current, or none."""
        slot, reference = self._current.slot_and_reference
        self._get_current(reference)
        if slot.value is None:
            self._calls["cuCtxSetCurrent"](self._context)
            return call()
        self._calls["cuCtxPushCurrent_v2"](self._context)
        try:
            return call()
        finally:
            self._calls["cuCtxPopCurrent_v2"](byref(ctypes.c_void_p()))

    def _call(self, seam: str, symbol: str, *args: object) -> None:
        """Calls, and raises the error of a status.  `seam`: the protocol's name of the call."""
        status = self._status(seam, symbol, *args)
        if status:
            raise self._error(status, seam)

    def _handle(self, seam: str, symbol: str, *args: object) -> int:
        """Calls a function that writes a handle or address to its first parameter; returns that."""
        out = ctypes.c_uint64()
        self._call(seam, symbol, byref(out), *args)
        return out.value

    def _error(
        self, status: int, seam: str, detail: str = "", *, node: int | None = None
    ) -> DriverError:
        """Returns the error of a status; remembers a sticky status."""
        error = driver_error(status, seam, detail, node=node or None)
        if isinstance(error, ContextPoisonedError) and not isinstance(self._off, str):
            self._off = status
        return error

    def _refused(self, seam: str, detail: str, *, node: int | None = None) -> DriverError:
        """Returns the error NOT_SUPPORTED where the driver would break the protocol."""
        return driver_error(Status.NOT_SUPPORTED, seam, detail, node=node)

    def _require_on(self, seam: str) -> None:
        """Raises if the context is poisoned or closed; for calls without `_status`."""
        if self._off is None:
            return
        if isinstance(self._off, str):
            raise ClosedError(f"{seam}: {self._off}")
        raise driver_error(
            self._off, seam, "an earlier call found this context poisoned; nothing was called"
        )

    # --- memory
    def memory_info(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("memory_info", "cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def mem_alloc(self, nbytes: int) -> int:
        _check_size("mem_alloc", nbytes)
        return self._handle("mem_alloc", "cuMemAlloc_v2", nbytes)

    def mem_free(self, address: int) -> None:
        self._call("mem_free", "cuMemFree_v2", address)

    def mem_alloc_pinned(self, nbytes: int) -> int:
        _check_size("mem_alloc_pinned", nbytes)
        flags = _HOST_ALLOC_PORTABLE | _HOST_ALLOC_DEVICE_MAP
        return self._handle("mem_alloc_pinned", "cuMemHostAlloc", nbytes, flags)

    def mem_free_pinned(self, address: int) -> None:
        self._call("mem_free_pinned", "cuMemFreeHost", address)

    def memory_view(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object
    ) -> Any:
        from cuda.core import Buffer
        from cuda.core.utils import StridedMemoryView

        nbytes = math.prod(shape) * dtype.itemsize

        def view() -> Any:
            memory = Buffer.from_handle(address, nbytes, owner=owner)
            return StridedMemoryView.from_buffer(memory, shape, dtype=dtype)

        self.memory_range(address)  # raises on a poisoned or closed context
        return self._in_context(view)

    def memory_range(self, address: int) -> MemoryRange | None:
        # For an address in no allocation the plural call returns zeros, where the singular one and
        # cuMemGetAddressRange fail.  It supports pinned, managed, pool and mapped memory too.
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        data = (ctypes.c_void_p * 2)(ctypes.addressof(start), ctypes.addressof(size))
        seam, symbol = "memory_range", "cuPointerGetAttributes"
        status = self._status(seam, symbol, 2, _RANGE_ATTRIBUTES, data, address)
        if status in (Status.INVALID_VALUE, Status.INVALID_CONTEXT):
            return None
        if status:
            raise self._error(status, seam)
        return MemoryRange(start.value, size.value) if start.value and size.value else None

    def memory_share(self, address: int) -> bytes:
        handle = cu.IpcMemHandle()
        self._call("memory_share", "cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle)

    def memory_open_shared(self, handle: bytes) -> int:
        seam = "memory_open_shared"
        if len(handle) != ctypes.sizeof(cu.IpcMemHandle):
            raise driver_error(Status.INVALID_VALUE, seam, f"a handle of {len(handle)} bytes")
        given = cu.IpcMemHandle.from_buffer_copy(handle)
        return self._handle(seam, "cuIpcOpenMemHandle_v2", given, _LAZY_PEER_ACCESS)

    def memory_end_shared(self, address: int) -> None:
        self._call("memory_end_shared", "cuIpcCloseMemHandle", address)

    def memory_adopt(self, address: int, nbytes: int, owner: object) -> bool:
        raise self._refused("memory_adopt", "kernels cannot read this process's memory in place")

    def memory_end_adopted(self, address: int) -> None:
        raise self._refused("memory_end_adopted", "there is no such memory")

    def _memory_type(self, address: int) -> int:
        """Returns the CUmemorytype of an address: 1 host, 2 device; 0 if unknown to the driver."""
        kind = ctypes.c_uint()
        data = (ctypes.c_void_p * 1)(ctypes.addressof(kind))
        symbol = "cuPointerGetAttributes"
        status = self._status("memory_range", symbol, 1, _TYPE_ATTRIBUTES, data, address)
        return 0 if status else kind.value

    def memcpy(self, dst: int, src: int, nbytes: int, stream: StreamHandle) -> None:
        _check_size("memcpy", nbytes)
        if nbytes:
            self._call("memcpy", "cuMemcpyAsync", dst, src, nbytes, stream)

    def memcpy_from_host(self, dst: int, src: memoryview, stream: StreamHandle) -> None:
        self._refuse_while_capturing("memcpy_from_host", stream)
        if src.nbytes:
            host = _host_address("memcpy_from_host", src)
            self._call("memcpy_from_host", "cuMemcpyHtoDAsync_v2", dst, host, src.nbytes, stream)
            # Pageable copies "might be synchronous with respect to host" (the API reference, "API
            # synchronization behavior"), and where the device reads pageable memory they are not.
            self._call("memcpy_from_host", "cuStreamSynchronize", stream)

    def memcpy_to_host(self, dst: memoryview, src: int, stream: StreamHandle) -> None:
        self._refuse_while_capturing("memcpy_to_host", stream)
        if dst.readonly:
            raise driver_error(Status.INVALID_VALUE, "memcpy_to_host", "dst cannot be written")
        if dst.nbytes:
            host = _host_address("memcpy_to_host", dst)
            self._call("memcpy_to_host", "cuMemcpyDtoHAsync_v2", host, src, dst.nbytes, stream)
            self._call("memcpy_to_host", "cuStreamSynchronize", stream)

    def memset(
        self, dst: int, value: int, element_size: int, count: int, stream: StreamHandle
    ) -> None:
        bits = unsigned(value, element_size, ELEMENT_SIZES, "memset")
        _check_size("memset", count)
        if count:
            symbol = f"cuMemsetD{8 * element_size}Async"
            self._call("memset", symbol, dst, bits, count, stream)

    def _refuse_while_capturing(self, seam: str, stream: StreamHandle) -> None:
        """Refuses a copy of pageable memory in a capture, and breaks the capture: CUDA would
        capture the address, and the memory may be gone when the graph runs."""
        state = self._capture_state(seam, stream)
        if state == CaptureStatus.NONE:
            return
        self._status(seam, "cuStreamSynchronize", stream)  # forbidden: invalidates the capture
        if state == CaptureStatus.ACTIVE:
            detail = "the host bytes would have to outlive the graph; use pinned memory and memcpy"
            raise self._error(Status.STREAM_CAPTURE_UNSUPPORTED, seam, detail)
        raise self._error(Status.STREAM_CAPTURE_INVALIDATED, seam)

    def _capture_state(self, seam: str, stream: StreamHandle) -> int:
        """Returns the CUstreamCaptureStatus of a stream: a `CaptureStatus`."""
        state = ctypes.c_int()
        self._call(seam, "cuStreamIsCapturing", stream, byref(state))
        return state.value


def _check_size(seam: str, size: int) -> None:
    if size < 0:  # as a C size_t it would be huge
        raise driver_error(Status.INVALID_VALUE, seam, f"a size of {size}")
    if size >= 1 << 63:  # ctypes cuts a size of 2**64 or more to its lower 64 bits
        raise driver_error(Status.OUT_OF_MEMORY, seam, f"{size} bytes are wanted")


def _host_address(seam: str, view: memoryview) -> int:
    if not view.contiguous:
        raise driver_error(Status.INVALID_VALUE, seam, "the host buffer must be contiguous")
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
