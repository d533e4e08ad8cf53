"""A stand-in for CuPy on the host driver: as much of its arrays, streams and memory pools as
functions need that read arrays in the middle.  It waits where CuPy waits, and only there; what its
kernels write shows in nothing but the addresses that they are given."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np

import ostinato as ost
from ostinato.device import Device
from ostinato.interop.graphed import Graphed
from ostinato.interop.reading.library import GraphedOptions

_BINARY: list[Callable[..., Any]] = [
    *(np.add, np.multiply, np.greater, np.equal),
    *(np.logical_and, np.maximum),
]
_WHOLE: list[Callable[..., Any]] = [np.sum, np.any, np.all, np.max]
_TYPES = [np.dtype(each) for each in ("f4", "?", "i8", "u1", "i4")]
ONE = ost.LaunchConfig(grid=1, block=1)


def _views(how: Any, types_: int, *places: tuple[int, int]) -> list[Any]:
    found = []
    for index, (address, count) in enumerate(places):
        dtype = _TYPES[types_ >> 4 * index & 15]
        found.append(how.memory(address, count * dtype.itemsize).view(dtype))
    return found


@ost.host_kernel("op: u32, types: u32, out: u64, a: u64, b: u64, n: u64, m: u64", name="binary")
def _binary(how: Any, op: int, types: int, out: int, a: int, b: int, n: int, m: int) -> None:
    to, one, other = _views(how, types, (out, n), (a, n), (b, m))
    to[:] = _BINARY[op](one, other)


@ost.host_kernel("op: u32, types: u32, out: u64, a: u64, n: u64", name="whole")
def _whole(how: Any, op: int, types: int, out: int, a: int, n: int) -> None:
    to, one = _views(how, types, (out, 1), (a, n))
    to[:] = _WHOLE[op](one)


@ost.host_kernel("types: u32, out: u64, a: u64, n: u64", name="cast")
def _cast(how: Any, types: int, out: int, a: int, n: int) -> None:
    to, one = _views(how, types, (out, n), (a, n))
    to[:] = one


@ost.host_kernel("types: u32, out: u64, n: u64, value: f64", name="fill")
def _fill(how: Any, types: int, out: int, n: int, value: float) -> None:
    _views(how, types, (out, n))[0][:] = value


@ost.host_kernel("types: u32, out: u64, a: u64, mask: u64, n: u64, m: u64", name="take")
def _take(how: Any, types: int, out: int, a: int, mask: int, n: int, m: int) -> None:
    to, one, chosen = _views(how, types, (out, m), (a, n), (mask, n))
    to[:] = one[chosen][:m]  # of another length than the mask has now, if the graph is stale
    # as a GPU: what was not written stays


@ost.host_kernel("types: u32, out: u64, a: u64, at: u64, n: u64, m: u64", name="gather")
def _gather(how: Any, types: int, out: int, a: int, at: int, n: int, m: int) -> None:
    to, one, places = _views(how, types, (out, m), (a, n), (at, m))
    to[:] = one[places]


@ost.host_kernel("types: u32, out: u64, b: u64, at: u64, n: u64, m: u64", name="scatter")
def _scatter(how: Any, types: int, out: int, b: int, at: int, n: int, m: int) -> None:
    to, other, places = _views(how, types, (out, n), (b, m), (at, m))
    to[places] = other


@ost.host_kernel("a: u64, b: u64, out: u64, n: u64", name="cupy_subtract__floats")
def _subtract(how: Any, a: int, b: int, out: int, n: int) -> None:
    to, one, other = _views(how, 0, (out, n), (a, n), (b, n))
    to[:] = one - other


@ost.host_kernel("seconds: f64", name="slow")
def _slow(how: Any, seconds: float) -> None:
    time.sleep(seconds)


_KERNELS = [_slow, _binary, _whole, _cast, _fill, _take, _gather, _scatter, _subtract]
_SOURCE = ost.Source(host=_KERNELS, name="cupy_on_host")


def module_of(**names: Any) -> Any:
    """Returns a module of an installed package, as guards see it."""
    module = types.ModuleType("cupy")
    vars(module).update(names)
    for value in names.values():
        inner = vars(value).values() if isinstance(value, type) else ()
        for each in (value, *inner):
            if isinstance(each, types.FunctionType | type):
                each.__module__ = "cupy"
    return module


def stand_in(device: Device) -> Any:
    """Returns the module."""
    driver = device.driver
    kernels = {
        kernel.name: device.modules.get_or_compile(_SOURCE, kernel.name) for kernel in _KERNELS
    }

    class CUDARuntimeError(RuntimeError):
        def __init__(self, status: int) -> None:
            super().__init__(f"status {status}")
            self.status = status

    def synchronised(handle: Any) -> None:
        try:
            driver.stream_synchronize(handle)
        except ost.errors.DriverError as error:
            raise CUDARuntimeError(int(error.status)) from None

    class Stream:
        def __init__(self, stream: ost.Stream | None = None, non_blocking: bool = True) -> None:
            self.stream = device.create_stream() if stream is None else stream
            self.ptr = int(self.stream.handle)

        @classmethod
        def from_external(cls, stream: ost.Stream) -> Stream:
            return cls(stream)

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.ptr

        def is_capturing(self) -> bool:
            return self.stream.capture_info().status.name != "NONE"

        def synchronize(self) -> None:
            synchronised(self.stream.handle)

        @property
        def done(self) -> bool:
            """Asks the driver, which breaks a capture."""
            try:
                return bool(driver.stream_query(self.stream.handle))
            except ost.errors.DriverError as error:
                raise CUDARuntimeError(int(error.status)) from None

        def wait_event(self, event: Event) -> None:
            driver.stream_wait_event(self.stream.handle, event.event.handle)

        def launch_host_func(self, callback: Any, arg: Any) -> None:
            driver.launch_host_function(self.stream.handle, lambda: callback(arg))
            if self.is_capturing():  # and the capture is none of CuPy's
                raise AttributeError("'NoneType' object has no attribute 'append'")

        def record(self, event: Event | None = None) -> Event:
            event = Event() if event is None else event
            event.record(self)
            return event

        def __enter__(self) -> Stream:
            here.streams.append(self)
            return self

        def use(self) -> Stream:
            here.streams[-1] = self
            return self

        def __exit__(self, *error: object) -> None:
            here.streams.pop()

    class Event:
        def __init__(self) -> None:
            self.event = device.create_event()

        def record(self, stream: Stream | None = None) -> None:
            on = here.streams[-1] if stream is None else stream
            driver.event_record(self.event.handle, on.stream.handle)

        def synchronize(self) -> None:
            try:
                driver.event_synchronize(self.event.handle)
            except ost.errors.DriverError as error:
                raise CUDARuntimeError(int(error.status)) from None

    class Device:
        def synchronize(self) -> None:
            for stream in (first, *here.streams):
                synchronised(stream.stream.handle)

    class Here(threading.local):
        def __init__(self) -> None:
            self.streams = [first]
            self.malloc: Callable[[int], MemoryPointer] = default.malloc

    class Memory:
        def __init__(self, nbytes: int) -> None:
            self.size, self.ptr = nbytes, 0
            self.ptr = driver.mem_alloc(max(1, nbytes))

        def __del__(self) -> None:
            if self.ptr and ost is not None:  # None at the end of the process
                with suppress(ost.errors.OstinatoError):  # the driver was closed
                    driver.mem_free(self.ptr)

    class Pooled:
        def __init__(self, pool: MemoryPool, chunk: Any) -> None:
            # Not the chunk: garbage would be finalised with all that it holds.
            self.pool, self.ptr, self.size = pool, chunk.ptr, chunk.size
            self.stream = here.streams[-1].ptr

        def __del__(self) -> None:
            self.pool.free.append((self.stream, self.ptr))

    class MemoryPointer:
        device_id = 0

        def __init__(self, mem: Any, offset: int) -> None:
            self.mem, self.ptr = mem, mem.ptr + offset

    class MemoryPool:
        def __init__(self, allocator: Callable[[int], MemoryPointer]) -> None:
            self.allocator, self.free = allocator, list[tuple[int, int]]()
            self.chunks: dict[int, Any] = {}

        def malloc(self, nbytes: int) -> MemoryPointer:
            nbytes = max(512, -(-nbytes // 512) * 512)
            for stream, address in self.free:  # memory stays with a stream
                if stream == here.streams[-1].ptr and self.chunks[address].size == nbytes:
                    self.free.remove((stream, address))
                    return MemoryPointer(Pooled(self, self.chunks[address]), 0)
            chunk = self.allocator(nbytes).mem
            self.chunks[chunk.ptr] = chunk
            return MemoryPointer(Pooled(self, chunk), 0)

        def free_all_blocks(self) -> None:
            while self.free:
                del self.chunks[self.free.pop()[1]]

    default = MemoryPool(lambda nbytes: MemoryPointer(Memory(nbytes), 0))
    first = Stream()
    here = Here()

    def disallowed(stream: Any) -> None:
        if stream.is_capturing():  # and the capture goes on
            raise RuntimeError("the current stream is capturing, so transfers are disallowed")

    def launch(name: str, *args: Any) -> None:
        kernel = kernels[name]
        packed = kernel.arguments(*args)
        driver.launch_kernel(here.streams[-1].stream.handle, kernel.function, ONE, packed)

    def types_of(*arrays: Any) -> int:
        return sum(_TYPES.index(each.dtype) << 4 * index for index, each in enumerate(arrays))

    class _ndarray_base:  # CuPy's name
        def __init__(self, shape: Any, dtype: Any = "f4", memptr: Any = None) -> None:
            self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
            self.dtype = np.dtype(dtype)
            self.data = here.malloc(self.nbytes) if memptr is None else memptr

        @property
        def ndim(self) -> int:
            return len(self.shape)

        @property
        def size(self) -> int:
            return int(np.prod(self.shape))

        @property
        def itemsize(self) -> int:
            return self.dtype.itemsize

        @property
        def nbytes(self) -> int:
            return self.size * self.itemsize

        @property
        def strides(self) -> tuple[int, ...]:
            return (self.itemsize,) * len(self.shape)

        def get(
            self, stream: Any = None, order: str = "C", out: Any = None, blocking: Any = 1
        ) -> Any:
            found = np.empty(self.shape, self.dtype) if out is None else out
            on = here.streams[-1] if stream is None else stream
            disallowed(on)
            if self.size:
                on.synchronize()
                bytes_ = memoryview(found.reshape(-1).view(np.uint8))
                driver.memcpy_to_host(bytes_, self.data.ptr, on.stream.handle)
            return found

        def slow(self, seconds: float) -> None:
            """Not CuPy's: a kernel that does nothing for some time."""
            launch("slow", seconds)

        def set(self, values: Any, stream: Any = None) -> None:
            if not isinstance(values, np.ndarray) or values.dtype != self.dtype:
                raise TypeError("no array of NumPy, or of another type")
            if values.shape != self.shape:
                raise ValueError("another shape")
            on = here.streams[-1] if stream is None else stream
            disallowed(on)
            copied(self, values, on)

        @property
        def flags(self) -> Any:
            return types.SimpleNamespace(c_contiguous=True, f_contiguous=True)

        def load(self, address: int) -> None:
            """Copies from pinned memory, as `cupy.cuda.runtime.memcpyAsync` does."""
            handle = here.streams[-1].stream.handle
            driver.memcpy(self.data.ptr, address, self.nbytes, handle)

        def __matmul__(self, other: Any) -> Any:
            return self.refused("cuBLAS") * other

        def refused(self, by: str = "cuSPARSE") -> Any:
            """Not CuPy's: an operation of a library that it does not call in a capture."""
            if here.streams[-1].is_capturing():
                raise NotImplementedError(f"calling {by} API during stream capture is unsupported")
            return self + 1.0

        def __repr__(self) -> str:
            return f"array({self.get()})"

        def __float__(self) -> float:
            return float(self.get())

        def __int__(self) -> int:
            return int(self.get())

        def __bool__(self) -> bool:
            return bool(self.get())

        def item(self) -> Any:
            return self.get().item()

        def tolist(self) -> Any:
            return self.get().tolist()

        def view(self, dtype: Any = None) -> Any:
            assert dtype is None
            return ndarray(self.shape, self.dtype, self.data)

        def copy(self, order: str = "C") -> Any:
            return self.astype(self.dtype)

        def astype(self, dtype: Any) -> Any:
            made = ndarray(self.shape, dtype)
            copyto(made, self)
            return made

        def fill(self, value: float) -> None:
            launch("fill", types_of(self), self.data.ptr, self.size, float(value))

        def _whole(self, op: int, dtype: Any) -> Any:
            made = ndarray((), dtype)
            launch("whole", op, types_of(made, self), made.data.ptr, self.data.ptr, self.size)
            return made

        def sum(self) -> Any:
            return self._whole(0, "i8" if self.dtype != "f4" else "f4")

        def any(self) -> Any:
            return self._whole(1, "?")

        def all(self) -> Any:
            return self._whole(2, "?")

        def max(self) -> Any:
            return self._whole(3, self.dtype)

        def _binary(self, op: int, other: Any, dtype: Any = None, into: Any = None) -> Any:
            if not isinstance(other, _ndarray_base):
                value, other = other, ndarray((), self.dtype)
                other.fill(value)
            made = ndarray(self.shape, dtype or self.dtype) if into is None else into
            where = made.data.ptr, self.data.ptr, other.data.ptr
            launch("binary", op, types_of(made, self, other), *where, self.size, other.size)
            return made

        def __add__(self, other: Any) -> Any:
            return self._binary(0, other)

        def __iadd__(self, other: Any) -> Any:
            return self._binary(0, other, into=self)

        def __sub__(self, other: Any) -> Any:
            return self.__isub__(other, ndarray(self.shape, self.dtype))

        def __isub__(self, other: Any, into: Any = None) -> Any:
            made = self if into is None else into
            where = self.data.ptr, other.data.ptr, made.data.ptr
            launch("cupy_subtract__floats", *where, self.size)
            return made

        def __mul__(self, other: Any) -> Any:
            return self._binary(1, other)

        def __gt__(self, other: Any) -> Any:
            return self._binary(2, other, "?")

        def __getitem__(self, index: Any) -> Any:
            if isinstance(index, slice):
                start, stop, _ = index.indices(self.size)
                place = MemoryPointer(self.data.mem, 0)
                place.ptr = self.data.ptr + start * self.itemsize
                return ndarray((max(0, stop - start),), self.dtype, place)
            index = index_of(index)
            if index.dtype != "?":
                made = ndarray(index.shape, self.dtype)
                where = made.data.ptr, self.data.ptr, index.data.ptr
                launch("gather", types_of(made, self, index), *where, self.size, index.size)
                return made
            count = int(index.sum())  # CuPy reads it too
            made = ndarray((count,), self.dtype)
            if count:
                where = made.data.ptr, self.data.ptr, index.data.ptr
                launch("take", types_of(made, self, index), *where, self.size, count)
            return made

        def take(self, index: Any) -> Any:
            return self[index if isinstance(index, _ndarray_base) else array(index, "i8")]

        def __setitem__(self, index: Any, value: Any) -> None:
            if isinstance(index, slice):
                copyto(self[index], value)
                return
            index = index_of(index)
            value = value if isinstance(value, _ndarray_base) else array(value, self.dtype)
            assert index.dtype == "i8" and value.shape == index.shape
            where = self.data.ptr, value.data.ptr, index.data.ptr
            launch("scatter", types_of(self, value, index), *where, self.size, index.size)

    class ndarray(_ndarray_base):  # CuPy's name
        pass

    class ufunc:
        """What is known of one whose kernels have a name that begins with its own."""

        name, nin, nout = "cupy_subtract", 2, 1

    def copyto(into: Any, array: Any) -> None:
        if into.size:
            launch("cast", types_of(into, array), into.data.ptr, array.data.ptr, into.size)

    @contextmanager
    def using_allocator(malloc: Callable[[int], MemoryPointer]) -> Iterator[None]:
        before, here.malloc = here.malloc, malloc
        try:
            yield
        finally:
            here.malloc = before

    def copied(array: Any, values: Any, stream: Stream) -> None:
        if array.size:
            bytes_ = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
            driver.memcpy_from_host(array.data.ptr, bytes_, stream.stream.handle)

    def array(values: Any, dtype: Any = None) -> Any:
        if isinstance(values, _ndarray_base):
            return values
        found = np.array(values, dtype)
        found = found.astype("f4") if found.dtype.kind == "f" else found
        try:  # CuPy looks whether earlier copies are done, and allocates pinned memory
            driver.mem_free_pinned(driver.mem_alloc_pinned(8))
        except ost.errors.DriverError:
            raise CUDARuntimeError(901) from None
        made = ndarray(found.shape, found.dtype)
        disallowed(here.streams[-1])
        copied(made, found, here.streams[-1])
        return made

    def index_of(index: Any, dtype: Any = None) -> Any:
        """As CuPy's compiled code, which finds `array` nowhere where it can be replaced."""
        if isinstance(index, tuple):
            (index,) = index
        if isinstance(index, _ndarray_base):
            return index
        return array(index if np.size(index) else np.empty(0, "i8"), dtype)

    def cholesky(array: Any) -> Any:
        """As with errors that are looked at; not the decomposition."""
        made = array.refused("cuSOLVER")
        if not (array > 0.0).all():
            raise np.linalg.LinAlgError("not positive")
        return made

    def zeros(shape: Any, dtype: Any = "f4") -> Any:
        made = ndarray(shape, dtype)
        made.fill(0)
        return made

    runtime = module_of(
        CUDARuntimeError=CUDARuntimeError,
        getDevice=lambda: 0,
        free=lambda address: None,
        deviceGetAttribute=lambda kind, number: 0,
        deviceSynchronize=lambda: Device().synchronize(),
    )
    core = module_of(array=array)
    cuda = module_of(
        Device=Device,
        Event=Event,
        ExternalStream=Stream,
        Memory=Memory,
        MemoryPointer=MemoryPointer,
        MemoryPool=MemoryPool,
        Stream=Stream,
        get_current_stream=lambda: here.streams[-1],
        runtime=runtime,
        using_allocator=using_allocator,
    )
    sys.modules["cupyx"] = types.SimpleNamespace(errstate=lambda **how: nullcontext())
    linalg = module_of(cholesky=cholesky)
    return module_of(
        __file__="/site-packages/cupy/__init__.py",
        _core=core,
        asarray=lambda values: core.array(values),
        copyto=copyto,
        cuda=cuda,
        empty=ndarray,
        empty_like=lambda array: ndarray(array.shape, array.dtype),
        get_default_memory_pool=lambda: default,
        linalg=linalg,
        ndarray=ndarray,
        subtract=ufunc(),
        ufunc=ufunc,
        zeros=zeros,
    )


@contextmanager
def installed(device: Device) -> Iterator[Any]:
    """Makes the stand-in CuPy in a block, of which the interop package is imported anew."""

    def ours() -> list[str]:
        return [
            n
            for n in sys.modules
            if n in ("cupy", "cupyx") or n.startswith("ostinato.interop.cupy")
        ]

    before = {name: sys.modules.pop(name) for name in ours()}
    sys.modules["cupy"] = module = stand_in(device)
    try:
        yield module
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)


def graphed(function: Any, *, device: Device, writes: bool = True, **options: Any) -> Graphed:
    """`interop.cupy.graphed` on the host driver, while the stand-in is installed."""
    from ostinato.interop.cupy.library import CuPy

    class OnHost(CuPy):
        def difference(self, one: Any, other: Any, tolerance: Any) -> str:
            a, b = one.get(), other.get()
            same = a.shape == b.shape and a.tobytes() == b.tobytes()
            return "" if same else f"{a} against {b}"

    return Graphed(
        function,
        OnHost(device, 0, writes=writes),
        GraphedOptions(**options),
        ost.GraphCache(device),
        name=getattr(function, "__name__", "f"),
        owns_cache=True,
    )
