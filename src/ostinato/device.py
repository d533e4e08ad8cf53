"""`Device`: the streams, memory and compiled kernels of one device."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt

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
from ostinato.memory.buffer import device_dtype, fill_operation
from ostinato.modules import CompileOptions, Kernel, ModuleCache, Source
from ostinato.modules.source import as_source, only_kernel_of

if TYPE_CHECKING:
    from ostinato.driver.host.kernel import HostKernel


@elsewhere(
    stream="create_stream() makes one",
    event="create_event() makes one",
    alloc="empty(shape, dtype) allocates",
    compile="kernel(source, name) compiles and loads one",
    sync="synchronize() waits for its work",
)
class Device(Closeable):
    """One opened device, made by `open_device`.  `close()` or the end of `with` gives it back.

        with ost.open_device("host") as device:
            x = device.array([1.0, 2.0], "f4")

    Objects made on a device cannot be used after it is closed, and do not keep it open: a Device
    without references is closed too.
    """

    def __init__(self, driver: Driver) -> None:
        self.context = Context(driver)
        self.modules = ModuleCache(self.context)
        """Kernels compiled once and loaded once on this device."""
        self._copies: Stream | None = None
        self._lock = new_lock()
        # For a device that is dropped without `close()`: gives its threads and memory back.
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
        """The loaded kernel `name` of a source, compiled and loaded if it is not yet.

            scale = device.kernel(SOURCE, "scale")

        `name` may be left out where a source has one host kernel or one signature.  The rest is as
        in `modules.get_or_compile`, which this calls; so are the errors.
        """
        if name is None:
            name = only_kernel_of(as_source(source))
        return self.modules.get_or_compile(source, name, options=options, signature=signature)

    # --- streams
    def create_stream(self, *, priority: int = 0, blocking: bool | None = None) -> Stream:
        """A new stream.

        `priority`: work of streams with lower numbers goes first; 0 is the lowest priority, and the
        driver takes the nearest one that it has.

        `blocking`: its work waits for what was submitted to the legacy default stream before, and
        what is submitted there later waits for it.  None: OSTINATO_BLOCKING_CAPTURES, off by
        default.  It is for finding work that a captured function puts on the default stream: while
        a stream captures that is not blocking, such work runs at once, is missing from the graph,
        and nothing says so.  While a blocking one captures, the driver refuses it with status 906
        and breaks the capture, whichever thread submits it.
        """
        self.context.require_open()
        if blocking is None:
            blocking = settings.blocking_captures()
        with uninterrupted:
            handle = self.driver.stream_create(priority=priority, blocking=blocking)
            return Stream(self.context, handle, owned=True)

    def adopt_stream(self, stream: object) -> Stream:
        """Another library's stream, through its `__cuda_stream__`; the library still owns it.

        Raises InputError if the object has no such method (give it as an object of its library,
        not as a bare number) or returns something else than (version, handle).
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
        """A new event; with `timing`, `Event.elapsed_since` gives the time between two.

        `blocking`: a thread that waits for it sleeps, where it would keep a core busy (CUDA's
        BLOCKING_SYNC): it wakes some microseconds later.
        """
        return Event(self.context, timing=timing, blocking=blocking)

    # --- memory
    def empty(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike, *, name: str | None = None
    ) -> Buffer:
        """Device memory; its content is undefined.  Raises OutOfMemoryError, and InputError for a
        shape or dtype that device memory cannot have, as the methods below do.

        `dtype`: a word of signatures ("f32", "bf16"), NumPy's name or type ("u4", np.float32), or
        "bytes" for memory that pointers of any type may point at; views give it other types.

        `name`: shown in tables and pictures of graphs, as in the methods below.
        """
        return allocate(self.context, shape, dtype, name=name)

    def array(
        self, values: npt.ArrayLike, dtype: npt.DTypeLike | None = None, *, name: str | None = None
    ) -> Buffer:
        """Device memory with these values; they are there when this returns.

        Values with a dtype of their own (a NumPy array) need no other; it is taken in the byte
        order of this machine.  Raises InputError for Python's numbers without a dtype, for values
        that the dtype cannot hold, as `Buffer.copy_from` does, and OutOfMemoryError.
        """
        refuse_masked(values)
        if dtype is not None:
            array = exact_array(device_dtype(dtype), values)
        else:
            if not hasattr(values, "dtype"):
                raise InputError(
                    f"{type(values).__name__} has no dtype: give one, such as "
                    'device.array([1.0, 2.0], "f32")'
                )
            array = np.asarray(values)
            if not is_native(array.dtype):
                array = array.astype(array.dtype.newbyteorder("="))
        buffer = allocate(self.context, array.shape, array.dtype, name=name)
        stream = self._copy_stream()
        buffer.copy_from(array, stream)
        stream.synchronize()
        return buffer

    def zeros(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike, *, name: str | None = None
    ) -> Buffer:
        """Device memory filled with zero bytes when this returns; `dtype` as for `empty`."""
        buffer = allocate(self.context, shape, dtype, name=name)
        if buffer.nbytes:
            stream = self._copy_stream()
            # On a GPU fills on a second stream would slow replays (`Stream.submit_as_graph`).
            submit = stream.submit_as_graph if self.capabilities.compiles_cuda else stream.submit
            submit(fill_operation(buffer.view(dtype=np.uint8), 0))
            stream.synchronize()
        return buffer

    def adopt_array(self, array: object) -> Buffer:
        """A buffer over another library's array, without a copy; it is kept alive.

        Through `__cuda_array_interface__` or DLPack; C-contiguous only.  On a GPU the array must be
        on it; on the host device arrays of the CPU are adopted, such as NumPy's and torch's, so
        that code over tensors can be tested there.  Not ordered with the library's own work: see
        `memory.adopt_array`.  Raises InputError.
        """
        return adopt_array(self.context, array)

    def pinned(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike, *, name: str | None = None
    ) -> Buffer:
        """Page-locked host memory, for copies that do not wait; `.array` is the NumPy view."""
        return allocate(self.context, shape, dtype, pinned=True, name=name)

    def pool(
        self, *, reserve: int | str = 0, slab: int | str = "1 MiB", name: str | None = None
    ) -> CapturePool:
        """A pool that captures allocate from; sizes in bytes.  See `CapturePool`."""
        return CapturePool(self.context, reserve=reserve, slab=slab, name=name)

    def to_numpy(self, buffer: Buffer) -> npt.NDArray[Any]:
        """A copy of a buffer's content after all work of the device; waits as `synchronize`."""
        self.synchronize()
        return buffer.to_numpy(self._copy_stream())

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of device memory."""
        return self.driver.memory_info()

    def _copy_stream(self) -> Stream:
        with self._lock:
            if self._copies is None:
                self._copies = self.create_stream(blocking=False)
            return self._copies

    # --- lifetime
    def synchronize(self) -> None:
        """Waits for all work of the device.

        Raises CaptureError while another thread captures, since CUDA forbids this to all threads
        then; DriverError (900) while this thread does.
        """
        self.context.synchronize()

    def close(self) -> None:
        """Waits for the device's work, destroys what was made on it, and gives it back."""
        self.context.say_unsaid()
        self.modules.close()
        self.context.close()
        self._finalizer.detach()


def open_device(name: str | int | None = None) -> Device:
    """Opens a device: "host" (or "cpu"), "cuda", "cuda:0", …; a number is that of a GPU.

        device = ost.open_device()          # a GPU if there is one
        device = ost.open_device("host")    # the CPU

    Without a name: OSTINATO_DEVICE, else "cuda:0" if there is a GPU, else "host".
    Raises NoCudaError if a CUDA device is named and there is none, InputError for an unknown name,
    SettingsError for an unknown name in OSTINATO_DEVICE.
    """
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
    """The names of the devices that can be opened here."""
    from ostinato.driver.cuda.driver import gpu_count

    return ['"host" (or "cpu")', *(f'"cuda:{i}"' for i in range(gpu_count()))]
