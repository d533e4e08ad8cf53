"""Starts the driver of a GPU while the modules that use it are imported.  Imports none of them."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from ctypes import byref


class StartingDriver:
    """A GPU's primary context, which is retained in a thread; that takes 0.3 s in a new process.

    Finds nothing out: what cannot be started, or is not there, `CudaDriver` says.
    """

    def __init__(self, ordinal: int, library: str = "libcuda.so.1") -> None:
        self._library = library
        self._device = ctypes.c_int()
        self._lib: ctypes.CDLL | None = None  # if the context is held
        self._thread = threading.Thread(target=self._start, args=(ordinal,), name="ostinato-start")
        self._thread.start()

    def _start(self, ordinal: int) -> None:
        device, context = self._device, ctypes.c_void_p()
        # No library, another one of its name, a number that is none of a GPU.
        with suppress(OSError, AttributeError, ctypes.ArgumentError):
            lib = ctypes.CDLL(self._library)
            if lib.cuInit(0) or lib.cuDeviceGet(byref(device), ordinal):
                return
            if not lib.cuDevicePrimaryCtxRetain(byref(context), device):
                self._lib = lib

    def release(self) -> None:
        """Waits for the thread, and releases the context, which a driver holds by then."""
        self._thread.join()
        if self._lib is not None:
            self._lib.cuDevicePrimaryCtxRelease_v2(self._device)
            self._lib = None
