"""The ground of the CUDA driver: checked calls in the right context.

Every call goes through `CudaCalls._status`: it refuses at once after a sticky status, makes the
device's primary context current, and calls.  `_call` also raises what came back.

Which context is current is thread state that other libraries change (torch and CuPy set another
device's), so it is asked before each call, 0.2 µs, and not remembered.  A thread without a context
gets ours and keeps it; a thread on which another context is current has that one back afterwards.
The prepared replay (`cuda_exec`) does not ask: a graph launch names its context by its stream.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ostinato.driver.cuda.host_functions import HostFunctions
from ostinato.driver.cuda.libcuda import Libcuda
from ostinato.driver.forking import FORKED, switch_off_in_children
from ostinato.errors import ClosedError, ContextPoisonedError, DriverError, Status, driver_error

__all__ = ["CudaCalls"]

T = TypeVar("T")


class _CurrentContext(threading.local):
    """Where a thread asks for its current context: made once for each thread."""

    def __init__(self) -> None:
        slot = ctypes.c_void_p()
        self.slot_and_reference = slot, ctypes.byref(slot)


class CudaCalls:
    """Checked calls on one primary context.  The parts of the driver are its subclasses."""

    def __init__(self, lib: Libcuda, context: int, ordinal: int) -> None:
        self._lib = lib
        self._calls = lib.calls
        self._context = context
        self._ordinal = ordinal
        self._poison: int | None = None
        self._closed = self._forked = False
        self._current = _CurrentContext()
        self._get_current = lib["cuCtxGetCurrent"]
        self._launch_addresses = lib.address("cuLaunchKernelEx"), lib.address("cuCtxGetCurrent")
        self._host_functions = HostFunctions(lib)
        switch_off_in_children(self)

    def after_fork(self) -> None:
        """In a forked child: no call reaches libcuda, whose context is not there."""
        self._closed = self._forked = True

    def _status(self, seam: str, symbol: str, *args: object) -> int:
        """Calls, and gives the status back.  Raises only on a poisoned or closed context."""
        if self._poison is not None or self._closed:
            self._refuse(seam)
        slot, reference = self._current.slot_and_reference
        self._get_current(reference)
        if slot.value == self._context:
            return self._calls[symbol](*args)
        return self._in_context(partial(self._calls[symbol], *args))

    def _in_context(self, call: Callable[[], T]) -> T:
        """Makes a call with our context current, where another is, or none."""
        slot, reference = self._current.slot_and_reference
        self._get_current(reference)
        if slot.value is None:
            self._calls["cuCtxSetCurrent"](self._context)
            return call()
        self._calls["cuCtxPushCurrent_v2"](self._context)
        try:
            return call()
        finally:
            self._calls["cuCtxPopCurrent_v2"](ctypes.byref(ctypes.c_void_p()))

    def _call(self, seam: str, symbol: str, *args: object) -> None:
        """Calls.  `seam` is the protocol's name, for the error."""
        status = self._status(seam, symbol, *args)
        if status:
            raise self._error(status, seam, symbol=symbol)

    def _handle(self, seam: str, symbol: str, *args: object) -> int:
        """Calls what answers one handle or address through its first parameter."""
        out = ctypes.c_uint64()
        self._call(seam, symbol, ctypes.byref(out), *args)
        return out.value

    def _error(
        self, status: int, seam: str, detail: str = "", *, node: int | None = None, symbol: str = ""
    ) -> DriverError:
        """The error for a status; a sticky one is remembered."""
        if symbol and not self._lib.has(symbol):
            detail = f"this machine's libcuda is too old for {symbol}; update the NVIDIA driver"
        error = driver_error(status, seam, detail, node=node or None)
        if isinstance(error, ContextPoisonedError):
            self._poison = status
        return error

    def _refused(self, seam: str, detail: str, *, node: int | None = None) -> DriverError:
        """An error of our own, where the driver would do something else than the protocol says."""
        return driver_error(Status.NOT_SUPPORTED, seam, detail, node=node)

    def _refuse(self, seam: str) -> None:
        if self._closed:
            why = FORKED if self._forked else f"cuda:{self._ordinal} was closed"
            raise ClosedError(f"{seam}: {why}")
        assert self._poison is not None
        raise driver_error(
            self._poison, seam, "an earlier call found this context poisoned; nothing was called"
        )
