"""`Device`: the streams, memory and compiled kernels of one device."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from ostinato import settings
from ostinato.driver.api import Capabilities, DeviceProperties, Driver, StreamHandle
from ostinato.driver.closeable import Closeable, elsewhere
from ostinato.driver.context import Context
from ostinato.driver.forking import new_lock
from ostinato.driver.interrupts import uninterrupted
from ostinato.driver.signature import Signature, exact_array, is_native, refuse_masked
from ostinato.driver.stream import Event, Stream
from ostinato.errors import InputError, NoCudaError, SettingsError
from ostinato.memory import Buffer, CapturePool, adopt_array, allocate
from ostinato.memory.buffer import copy_operation, device_dtype, fill_operation, refuse_memory
from ostinato.modules import CompileOptions, Kernel, ModuleCache, Source
from ostinato.modules.source import as_source, only_kernel_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from ostinato.driver.host.kernel import HostKernel

_PIECE = 64 << 10
"""Bytes that the host writes of memory that is filled by copies."""


@elsewhere(
    stream="create_stream() makes one",
    event="create_event() makes one",
    alloc="empty(shape, dtype) allocates",
    compile="kernel(source, name) compiles and loads one",
    sync="synchronize() waits for its work",
)
class Device(Closeable):
    """One opened device, made by `open_device`.  `close()` or the end of `with` closes it.

        with ost.open_device("host") as device:
            x = device.array([1.0, 2.0], "f4")

    Objects made on a device cannot be used after it is closed, and do not keep it open: a Device
    without references is closed too.
    """

    def __init__(self, driver: Driver) -> None:
        self.context = Context(driver)
        self.modules = ModuleCache(self.context)
        """Kernels compiled once and loaded once on this device."""
        self.context.modules = self.modules
        self._copies: Stream | None = None
        self._lock = new_lock()
        # For a device that is dropped without `close()`: ends its threads and frees its memory.
        self._finalizer = weakref.finalize(self, self.context.drop)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        state = " closed" if self.context.closed else ""
        return f"<Device {self.name}: {self.properties.name}{state}>"

    @property
    def driver(self) -> Driver:
        """The driver, for calls that this class does not have."""
        return self.context.driver

    @property
    def name(self) -> str:
        """ "host", "cuda:0", …"""
        return self.driver.name

    @property
    def capabilities(self) -> Capabilities:
        return self.driver.capabilities

    @property
    def properties(self) -> DeviceProperties:
        return self.driver.properties

    # --- kernels
    def kernel(
        self,
        source: Source | str | HostKernel,
        name: str | None = None,
        *,
        options: CompileOptions | Sequence[str] = (),
        signature: Signature | str | None = None,
    ) -> Kernel:
        """Returns the loaded kernel `name` of a source; compiles and loads it at the first call.

            scale = device.kernel(SOURCE, "scale")

        `name` may be omitted for a source with one host kernel or one signature.  Other arguments
        and errors are those of `modules.get_or_compile`, which this calls.
        """
        if name is None:
            name = only_kernel_of(as_source(source))
        return self.modules.get_or_compile(source, name, options=options, signature=signature)

    # --- streams
    def create_stream(self, *, priority: int = 0, blocking: bool | None = None) -> Stream:
        """Makes a stream.

        `priority`: work of streams with lower numbers goes first; 0 is the lowest priority, and the
        driver takes the nearest one that it has.

        `blocking`: its work waits for earlier work of the legacy default stream, and later work
        there waits for its work.  None: OSTINATO_BLOCKING_CAPTURES, off by default.  It is for
        finding work that a captured function puts on the default stream: while a non-blocking
        stream captures, such work runs at once and is missing from the graph, without an error.
        While a blocking one captures, the driver refuses such work of any thread with status 906
        and breaks the capture.
        """
        self.context.require_open()
        if blocking is None:
            blocking = settings.blocking_captures()
        with uninterrupted:
            handle = self.driver.stream_create(priority=priority, blocking=blocking)
            return Stream(self.context, handle, owned=True)

    def adopt_stream(self, stream: object) -> Stream:
        """Returns another library's stream, by its `__cuda_stream__`; the library still owns it.

        Raises InputError if the object has no such method (pass an object of its library, not a
        bare number) or if the method does not return (version, handle).
        """
        if isinstance(stream, Stream):
            return stream
        method = getattr(stream, "__cuda_stream__", None)
        answer = method() if callable(method) else method
        if not (
            isinstance(answer, tuple)
            and len(answer) == 2
            and isinstance(answer[1], SupportsIndex)
            and 0 <= operator.index(answer[1]) < 1 << 64
        ):
            raise InputError(
                f"{type(stream).__name__} has no __cuda_stream__ that gives (version, handle)"
            )
        return Stream(
            self.context, StreamHandle(operator.index(answer[1])), owned=False, owner=stream
        )

    def create_event(self, *, timing: bool = False, blocking: bool = False) -> Event:
        """Makes an event; with `timing`, `Event.elapsed_since` gives the time between two.

        `blocking`: a thread that waits for it sleeps instead of keeping a core busy (CUDA's
        BLOCKING_SYNC): it wakes some microseconds later.
        """
        return Event(self.context, timing=timing, blocking=blocking)

    # --- memory
    def empty(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike, *, name: str | None = None
    ) -> Buffer:
        """Allocates device memory with undefined content.  Raises OutOfMemoryError, and InputError
        for a shape or dtype that device memory cannot have, as the methods below do.

        `dtype`: a word of signatures ("f32", "bf16"), NumPy's name or type ("u4", np.float32), or
        "bytes" for memory at which pointers of any type may point; views give it other types.

        `name`: shown in tables and pictures of graphs, as in the methods below.
        """
        return allocate(self.context, shape, dtype, name=name)

    def array(
        self, values: npt.ArrayLike, dtype: npt.DTypeLike | None = None, *, name: str | None = None
    ) -> Buffer:
        """Allocates device memory with these values, which are there when this returns.

        Values with a dtype of their own (a NumPy array) need no `dtype`; theirs is used in the byte
        order of this machine.  Raises InputError for Python's numbers without a dtype, for values
        that the dtype cannot hold, as `Buffer.set` does, and OutOfMemoryError.
        """
        refuse_memory(values)
        refuse_masked(values)
        if dtype is not None:
            kind = device_dtype(dtype)
            array = exact_array(kind, values)
        else:
            if not hasattr(values, "dtype"):
                raise InputError(
                    f"{type(values).__name__} has no dtype: give one, such as "
                    'device.array([1.0, 2.0], "f32")'
                )
            array = np.asarray(values)
            if not is_native(array.dtype):
                array = array.astype(array.dtype.newbyteorder("="))
            kind = array.dtype
        buffer = allocate(self.context, array.shape, kind, name=name)
        stream = self._copy_stream()
        buffer.set(array, stream)
        stream.synchronize()
        return buffer

    def zeros(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike, *, name: str | None = None
    ) -> Buffer:
        """Allocates memory that is zero when this returns; `dtype` as for `empty`."""
        kind = device_dtype(dtype)
        return self._filled(shape, kind, bytes(kind.itemsize), name)

    def ones(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike, *, name: str | None = None
    ) -> Buffer:
        """Allocates memory whose elements are 1 when this returns; `dtype` as for `empty`."""
        return self.full(shape, 1.0, dtype, name=name)

    def full(
        self,
        shape: int | Sequence[int],
        fill_value: npt.ArrayLike,
        dtype: npt.DTypeLike,
        *,
        name: str | None = None,
    ) -> Buffer:
        """Allocates memory whose elements are `fill_value` when this returns; `dtype`: see `empty`.

        `fill_value`: a number, or a tuple of the fields for structs.  Raises InputError
        for a value that the dtype cannot hold, as `array` does, and for an array; and
        OutOfMemoryError.
        """
        refuse_memory(fill_value)
        kind = device_dtype(dtype)
        one = exact_array(kind, fill_value)
        if one.shape:
            raise InputError(
                f"fill_value of shape {list(one.shape)}: one value is needed; "
                "device.array(values, dtype) copies an array"
            )
        return self._filled(shape, kind, one.tobytes(), name)

    def _filled(
        self, shape: int | Sequence[int], kind: np.dtype[Any], one: bytes, name: str | None
    ) -> Buffer:
        """Allocates memory whose elements have these bytes."""
        buffer = allocate(self.context, shape, kind, name=name)
        if not buffer.nbytes:
            return buffer
        stream = self._copy_stream()
        # On a GPU fills on a second stream would slow replays (`Stream.submit_as_graph`).
        submit = stream.submit_as_graph if self.capabilities.compiles_cuda else stream.submit
        for size in (1, 2, 4):
            pattern = one[:size]
            if len(one) % size == 0 and one == pattern * (len(one) // size):
                words = buffer.view(dtype=f"uint{8 * size}")
                submit(fill_operation(words, int.from_bytes(pattern, "little")))
                break
        else:  # no fill of a driver repeats it: the host writes a piece, and the rest are copies
            memory = buffer.view(dtype="bytes")
            done = len(one) * min(buffer.size, max(1, _PIECE // len(one)))
            memory[:done].set(np.frombuffer(one * (done // len(one)), np.uint8), stream)
            while done < buffer.nbytes:
                more = min(done, buffer.nbytes - done)
                submit(copy_operation(memory[done : done + more], memory[:more]))
                done += more
        stream.synchronize()
        return buffer

    def adopt_array(self, array: object) -> Buffer:
        """Returns a buffer over another library's array, without a copy; the array is kept alive.

        Through `__cuda_array_interface__` or DLPack; C-contiguous only.  On a GPU the array must be
        on that GPU; the host device adopts arrays of the CPU, such as NumPy's and torch's, so that
        code over tensors can be tested there.  Not ordered with the library's own work: see
        `memory.adopt_array`.  Raises InputError.
        """
        return adopt_array(self.context, array)

    def pinned(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike, *, name: str | None = None
    ) -> Buffer:
        """Allocates page-locked host memory, for copies that do not wait; `.array` views it."""
        return allocate(self.context, shape, dtype, pinned=True, name=name)

    def pool(
        self, *, reserve: int | str = 0, slab: int | str = "1 MiB", name: str | None = None
    ) -> CapturePool:
        """Makes a pool from which captures allocate; sizes in bytes.  See `CapturePool`."""
        return CapturePool(self.context, reserve=reserve, slab=slab, name=name)

    def to_numpy(self, buffer: Buffer) -> npt.NDArray[Any]:
        """Returns a copy of a buffer's content after all work of the device; waits for it."""
        self.synchronize()
        return buffer.to_numpy(self._copy_stream())

    def memory_info(self) -> tuple[int, int]:
        """Returns (free, total) bytes of device memory."""
        return self.driver.memory_info()

    def _copy_stream(self) -> Stream:
        with self._lock:
            if self._copies is None:
                self._copies = self.create_stream(blocking=False)
            return self._copies

    # --- lifetime
    def synchronize(self) -> None:
        """Waits for all work of the device.

        Raises CaptureError while another thread captures, since CUDA then forbids this to all
        threads; DriverError (900) while this thread captures.
        """
        self.context.synchronize()

    def close(self) -> None:
        """Waits for the device's work, destroys its objects, and releases the device."""
        self.context.say_unsaid()
        self.modules.close()
        self.context.close()
        self._finalizer.detach()


def open_device(name: str | int | None = None) -> Device:
    """Does what `ostinato.open_device` says, which starts a GPU's driver first if this module is
    not imported yet."""
    if name is not None and name != "":
        return Device(_driver(name))
    configured = settings.device_name()
    if configured is None:
        try:
            return Device(_driver("cuda:0"))
        except NoCudaError:
            return Device(_driver("host"))
    try:
        return Device(_driver(configured))
    except InputError as error:
        raise SettingsError(f"{settings.DEVICE.name}: {error}") from None


def _driver(name: str | int) -> Driver:
    wanted = f"cuda:{name}" if isinstance(name, int) and not isinstance(name, bool) else name
    kind, _, number = wanted.partition(":") if isinstance(wanted, str) else ("", "", "")
    if kind in ("host", "cpu") and wanted == kind:
        from ostinato.driver.host.driver import HostDriver

        return HostDriver()
    if kind == "cuda" and (wanted == kind or (number.isascii() and number.isdecimal())):
        from ostinato.driver.cuda.driver import CudaDriver

        return CudaDriver(int(number or 0))
    raise InputError(f"there is no device {name!r}; there are {', '.join(_names())}")


def _names() -> list[str]:
    """Returns the names of the devices that can be opened here."""
    from ostinato.driver.cuda.driver import gpu_count

    return ['"host" (or "cpu")', *(f'"cuda:{i}"' for i in range(gpu_count()))]
