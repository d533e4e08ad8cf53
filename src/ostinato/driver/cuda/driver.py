"""The CUDA driver: the protocol of `driver.api` on a real GPU, through libcuda.

`CudaDriver` opens the device.  The calls are in the files beside this one; each file imports only
those below it, and keeps its own data of a handle:

    faults           probes for known faults of drivers
    executables      instantiate, launch, change, update
    graphs           definitions, their nodes and edges
    streams          streams, events, captures
    modules          modules, functions, eager launches
    collecting       the machine code of other libraries' kernels
    variables        the variables in a cubin
    core             checked calls in the right context, memory
    nodes, launch    records to cuda.h's structures and back
    host_functions   Python functions that CUDA calls
    libcuda          prototypes, structures, the loader
    starting         the driver's start, beside the imports of a new process

Nothing of `cuda.*` is imported, and libcuda is not loaded, before a device is opened.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import byref
from typing import Any

from ostinato import settings
from ostinato.driver.api import Capabilities, CudaContext, DeviceProperties, StreamHandle
from ostinato.driver.cuda.collecting import collect_modules
from ostinato.driver.cuda.executables import ExecCalls
from ostinato.driver.cuda.libcuda import BRANCHES, FEATURES, INSTALL, Libcuda, in_words, require_gpu
from ostinato.driver.cuda.modules import IMAGE_KINDS
from ostinato.driver.cuda.starting import StartingDriver
from ostinato.errors import (
    ContextPoisonedError,
    DriverError,
    NoCudaError,
    NotAvailableError,
    OstinatoError,
    driver_error,
)


class CudaDriver(ExecCalls):
    """One GPU through its primary context, which other libraries of the process share.

    Handles are the driver's own, so that graphs, streams and events of torch, CuPy or cuda.core
    can be used directly.  CUDA does not always recognise a destroyed handle, and may crash on it.
    Any thread may call.  Raises NoCudaError with the missing part and the line that installs it,
    NotAvailableError if the NVIDIA driver is too old (`libcuda.REQUIRED`).
    """

    def __init__(self, ordinal: int = 0) -> None:
        if settings.COLLECT_MODULES.read():
            collect_modules()  # before anything is loaded
        lib = Libcuda()  # first: without it, importing cuda.core takes 0.5 s and 35 MB for nothing
        starting = StartingDriver(ordinal)  # it takes as long as the import of cuda.core, 0.2 s
        try:
            device_type = _import_device()
            require_gpu(lib, ordinal)
            device = device_type(ordinal)
            device.set_current()
        except OstinatoError:
            raise
        except Exception as error:  # cuda.core raises its own CUDAError, and pathfinder's
            raise NoCudaError(f"cuda:{ordinal} cannot be opened ({error}); {INSTALL}") from error
        finally:
            starting.release()
        context = ctypes.c_void_p()
        lib["cuCtxGetCurrent"](byref(context))
        if not context.value:
            raise NoCudaError(f"cuda:{ordinal} has no context after cuda.core opened it; {INSTALL}")
        super().__init__(lib, context.value, ordinal)
        self._device = device
        self.name = f"cuda:{ordinal}"
        self.properties = self._read_properties()
        self.capabilities = self._read_capabilities()
        # The preferred cluster size, which these devices have, cannot be read from a node: the
        # getter does not return it (sgl-project/sglang#37657), and an update does not change it.
        self._hides_attributes = self.properties.compute_capability >= (10, 0)

    @property
    def cuda_context(self) -> CudaContext:
        return self

    @property
    def context(self) -> int:
        """The primary context's handle (CUcontext)."""
        return self._context

    @contextmanager
    def made_current(self) -> Iterator[None]:
        """Makes this context current on the calling thread for a `with` block, for libraries that
        use the current context.  Restores the one before."""
        self._call("made_current", "cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._calls["cuCtxPopCurrent_v2"](byref(ctypes.c_void_p()))

    def unraised(self, patience: float) -> DriverError | None:
        if self._off is not None or not patience:
            return None
        if patience == math.inf:
            status = self._status("unraised", "cuCtxSynchronize")
        else:  # no call waits for a limited time, so only query, and no handle of this library
            status = self._status("unraised", "cuStreamQuery", StreamHandle(0))
        found = driver_error(status, "work under way")
        return found if isinstance(found, ContextPoisonedError) else None

    def close(self) -> None:
        """Ends this object's use of the primary context, which other libraries may still use."""
        if isinstance(self._off, str):  # closed already
            return
        with suppress(OstinatoError):  # the context may be poisoned, and its streams gone with it
            self._call("close", "cuStreamDestroy_v2", self._upload_stream)
        self._upload_stream = StreamHandle(0)
        self._off = f"{self.name} was closed"

    def _read_properties(self) -> DeviceProperties:
        device, found = self._device, self._device.properties
        capability = device.compute_capability
        clock, width = 1000 * int(found.memory_clock_rate), int(found.global_memory_bus_width)
        return DeviceProperties(
            name=str(device.name),
            compute_capability=(int(capability[0]), int(capability[1])),
            multiprocessors=int(found.multiprocessor_count),
            total_memory=self.memory_info()[1],
            l2_cache=int(found.l2_cache_size),
            max_threads_per_block=int(found.max_threads_per_block),
            max_shared_per_block=int(found.max_shared_memory_per_block_optin),
            memory_bandwidth=clock * 2 * width // 8,  # both edges of the clock
            driver_version=in_words(self._lib.version),
        )

    def _read_capabilities(self) -> Capabilities:
        found = self._device.properties
        hopper = self.properties.compute_capability >= (9, 0)
        return Capabilities(
            conditional_nodes=True,
            conditional_branches=self._lib.version >= BRANCHES.since,
            batch_memory_ops=bool(found.can_use_64_bit_stream_mem_ops),
            memory_nodes=bool(found.memory_pools_supported),
            programmatic_launch=hopper,
            clusters=hopper and bool(found.cluster_launch),
            cooperative_launch=bool(found.cooperative_launch),
            host_memory_is_device_memory=False,
            image_kinds=IMAGE_KINDS,
            source_language="cuda",
            shares_memory=True,
            lacks=tuple(
                f"{feature.words} (from CUDA {in_words(feature.since)})"
                for feature in FEATURES
                if self._lib.version < feature.since
            ),
        )


def _import_device() -> Any:
    try:
        from cuda.core import Device
    except ImportError as error:
        raise NoCudaError(
            f"cuda.core and cuda.bindings are not installed ({error}); {INSTALL}"
        ) from error
    return Device


def gpu_count() -> int:
    """Returns the number of GPUs that can be opened; 0 without a driver, or with one too old."""
    count = ctypes.c_int()
    try:
        lib = Libcuda()
        seen = not lib["cuInit"](0) and not lib["cuDeviceGetCount"](byref(count))
    except NotAvailableError:
        return 0
    return count.value if seen else 0
