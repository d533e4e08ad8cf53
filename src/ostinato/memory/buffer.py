"""`Buffer`: device and pinned memory, freed by its owner.

A `Buffer` is an allocation, or a view into one, with a shape and a dtype.  Its address never
changes.  It is freed when it is closed, or when no reference to it is left; graphs keep the
buffers that their nodes point at.  Launches with a closed buffer raise ClosedError, and so do
launches of graphs that point at it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ostinato.driver.api import MemcpyNodeParams, MemoryRange, MemsetNodeParams, whole_number
from ostinato.driver.closeable import Closeable
from ostinato.driver.context import CallKind, Context, Watcher, members
from ostinato.driver.interrupts import uninterrupted
from ostinato.driver.process_memory import as_numpy
from ostinato.driver.signature import (
    BYTES,
    Element,
    as_dtype,
    dtype_name,
    exact_array,
    exact_bytes,
    is_native,
    numpys_dtype,
)
from ostinato.driver.stream import Operation, Stream, require_stream
from ostinato.errors import ClosedError, InputError, NotAvailableError

if TYPE_CHECKING:
    import numpy.typing as npt

_HINTS = dict.fromkeys(
    ("numpy", "get", "cpu", "tolist", "item", "copy_to_host"),
    "to_numpy(stream) copies the values to the host",
) | {
    "astype": "view(dtype=…) is the same bytes with another dtype",
    "copy_from": "set(values, stream) takes values, ost.copy(stream, dst, src) a Buffer",
    "copy_to": "ost.copy(stream, dst, src) copies a Buffer",
    "fill": "ost.fill(stream, buffer, value) fills it",
    "data_ptr": "address says where it begins",
    "ptr": "address says where it begins",
}
"""Names of other libraries, and the text that says what to write instead."""


def _nobody() -> None:
    """Returns None, like a weak reference to a collected object."""


def as_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Returns a shape as a tuple.  Raises InputError for negative or fractional sizes."""
    parts = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    sizes = tuple(-1 if (n := whole_number(part)) is None else n for part in parts)
    if any(n < 0 for n in sizes):
        raise InputError(f"shape {shape!r}: whole numbers of 0 or more are needed")
    return sizes


def device_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Returns a dtype that device memory can have; takes words as `signature.as_dtype` does.

    Raises InputError for a value that is no dtype, Python objects, elements without bytes, elements
    that are arrays, and a foreign byte order: a kernel would read other numbers.
    """
    kind = as_dtype(dtype)
    if kind.subdtype is not None:  # NumPy would add its axes to the shape of every copy
        raise InputError(
            f"dtype {kind!r} has elements that are arrays: give {kind.base.name}, and the axes "
            f"{list(kind.shape)} as the last of the shape"
        )
    if kind.hasobject:
        raise InputError(f"dtype {kind!r} holds Python objects, which no device can read")
    if not kind.itemsize:
        raise InputError(f"dtype {kind!r} has elements of 0 bytes")
    if not is_native(kind):
        raise InputError(
            f"dtype {kind!r} has not the byte order of this machine, and kernels would read other "
            'numbers: convert the values first (array.astype(array.dtype.newbyteorder("=")))'
        )
    return kind


class Buffer(Closeable):
    """Memory of a device (or pinned memory of the host), with a shape and a dtype, C order.

        x = device.array([1.0, 2.0], "f4")
        x[1:].set([3.0], stream)

    Made by `Device.empty`, `Device.array`, `Device.pinned`, a pool, or as a view of another.
    `x[3]` and `x[2:5]` are views of rows of the first axis, without a step.
    """

    address: int
    """The device address of the first byte.  Raises ClosedError once the buffer is closed."""

    def __init__(
        self,
        context: Context,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        pinned: bool = False,
        base: object = None,
        name: str | None = None,
    ) -> None:
        self.context = context
        self.name = name
        """The name that tables and pictures of graphs, and reports of faults, show in place of the
        address; None for none.  A view has none, and can be given one: it is shown for addresses in
        the view."""
        self.shape = shape
        self.dtype = dtype
        self.pinned = pinned
        self.base = base
        """The owner of the memory of a view or an adopted array, which is kept alive; or None."""
        self.range = MemoryRange(address, math.prod(shape) * dtype.itemsize)
        """Address and bytes; those that it had, if the buffer is closed."""
        self._closed = False
        self._finalizer: weakref.finalize[..., Buffer] | None = None
        self._place(address)

    def _place(self, address: int) -> None:
        """Sets the address, and the watchers of a buffer that is no view."""
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        self._last_watcher: Callable[[], Watcher | None] = _nobody
        # Plain attributes until `close`: the fastest for launches to read.
        self.address = address
        self._pointer: tuple[int, Element] = (address, self.context.space.element(self.dtype))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name in ("address", "_pointer") and "range" in self.__dict__:
                self._require_open()
            hint = _HINTS.get(name, "")
            raise AttributeError(
                f"{type(self).__name__.strip('_')!r} object has no attribute {name!r}"
                + (f": {hint}" if hint else ""),
                name=name,
                obj=self,
            )

    def __repr__(self) -> str:
        place = "pinned" if self.pinned else self.context.driver.name
        state = " closed" if self.closed else ""
        at = f"{self.range.address:#x}"
        name = f"{self.name!r} " if self.name else ""
        return (
            f"<Buffer {name}{dtype_name(self.dtype)}{list(self.shape)} at {at} on {place}{state}>"
        )

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.range.nbytes

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def storage(self) -> Buffer:
        """The buffer at the root of this view; the buffer itself if it is no view."""
        return self

    def watch(self, watcher: Watcher) -> None:
        """Has `watcher.memory_closed(range)` called when this memory is freed, or at once if it
        was freed before."""
        # An executable that is patched by turns to the same few buffers calls this each time.
        if self._last_watcher() is not watcher:
            self._watchers.add(watcher)
            self._last_watcher = weakref.ref(watcher)
        if self._closed:  # perhaps by another thread, after the watcher was added
            watcher.memory_closed(self.range)

    def _require_open(self) -> None:
        if self.closed:
            named = f"buffer {self.name!r}" if self.name else "buffer"
            raise ClosedError(f"the {named} at {self.range.address:#x} is closed; allocate another")

    # --- views
    def view(
        self,
        offset: int = 0,
        shape: int | Sequence[int] | None = None,
        dtype: npt.DTypeLike | None = None,
    ) -> Buffer:
        """Returns the same memory from byte `offset` on, with another shape or dtype: "f32",
        np.float32, …, "bytes" for pointers of any type.

        Without a shape: one dimension up to the end.  Raises InputError for a view out of bounds.
        """
        self._require_open()
        kind = self.dtype if dtype is None else device_dtype(dtype)
        start = whole_number(offset)
        if start is None:
            shaped = isinstance(offset, Iterable) and not isinstance(offset, str)
            raise InputError(
                f"offset={offset!r}: a whole number of bytes is needed; a shape and a dtype are "
                f"given by their names: {f'view(shape={offset!r})' if shaped else 'view(dtype=…)'}"
            )
        left = self.nbytes - start
        new = (max(0, left) // kind.itemsize,) if shape is None else as_shape(shape)
        if start < 0 or math.prod(new) * kind.itemsize > left:
            raise InputError(
                f"a view of {dtype_name(kind)}{list(new)} at byte {start} reaches outside "
                f"{self.nbytes} bytes"
            )
        return self._part(start, new, kind)

    def reshape(self, *shape: int | Sequence[int]) -> Buffer:
        """Returns a view of the same memory with another shape, in C order; never a copy.

            x.reshape(2, 3)
            x.reshape((2, -1))

        One size may be -1 and is then computed.  Raises InputError for another number of elements.
        """
        self._require_open()
        given = shape[0] if len(shape) == 1 else shape
        parts: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else (given,)
        places = [i for i, part in enumerate(parts) if whole_number(part) == -1]
        known = as_shape([part for i, part in enumerate(parts) if i not in places])
        sizes, rest = list(known), math.prod(known)
        for place in places:
            sizes.insert(place, self.size // rest if rest else 0)
        if len(places) > 1 or math.prod(sizes) != self.size or (places and not rest):
            raise InputError(
                f"{self.size} elements {list(self.shape)} have no shape {list(parts)}: a reshape "
                "keeps their number; one size may be -1"
            )
        return self._part(0, tuple(sizes), self.dtype)

    def _part(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        """Returns a view that is known to lie inside."""
        address = self.range.address + offset
        return _View(self.context, address, shape, dtype, pinned=self.pinned, base=self)

    def __getitem__(self, index: int | slice) -> Buffer:
        """Returns a view of rows of the first axis, which must be contiguous."""
        self._require_open()
        if not self.shape:
            raise InputError("a buffer without dimensions has no rows")
        row = self.shape[1:]
        row_bytes = math.prod(row) * self.dtype.itemsize
        if isinstance(index, slice):
            start, stop, step = index.indices(self.shape[0])
            if step != 1:
                raise InputError("only contiguous rows can be viewed (step 1)")
            return self._part(start * row_bytes, (max(0, stop - start), *row), self.dtype)
        place = whole_number(index)
        if place is None:
            raise InputError(f"{index!r} is no row: one whole number or slice is needed")
        if not -self.shape[0] <= place < self.shape[0]:
            raise InputError(f"row {place} of {self.shape[0]}")
        return self._part((place % self.shape[0]) * row_bytes, row, self.dtype)

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise TypeError(
            f"elements of a {type(self).__name__.strip('_')} cannot be assigned: "
            "buffer[2:5].set(values, stream) copies rows, ost.fill(stream, buffer[2:5], "
            "value) fills them"
        )

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    def __iter__(self) -> Iterator[Buffer]:
        """Yields the rows of the first axis, as views."""
        if not self.shape:
            raise InputError("a buffer without dimensions has no rows")
        return (self[row] for row in range(len(self)))

    @property
    def array(self) -> npt.NDArray[Any]:
        """A NumPy array over this memory, without a copy, writable.

        Only where the process can read the memory: pinned memory, and memory of a device with the
        capability `host_memory_is_device_memory`.  Raises NotAvailableError elsewhere.
        Not ordered with any stream: synchronise first.

        The array keeps the buffer alive.  With that capability it keeps the memory too, and can be
        read after the buffer or the device was closed.  Pinned memory of a GPU's driver is then
        freed.
        """
        self._require_open()
        driver = self.context.driver
        if driver.capabilities.host_memory_is_device_memory:
            self.context.require_open()
            made: npt.NDArray[Any] = driver.memory_view(
                self.address, self.shape, numpys_dtype(self.dtype), self
            )
            return made
        if not self.pinned:
            raise NotAvailableError(
                f"device memory of {driver.name} cannot be read in place; use to_numpy(stream)"
            )
        return as_numpy(self.address, self.shape, numpys_dtype(self.dtype), self)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """Implements `numpy.asarray(buffer)`: returns `array`, after all work of the device.

        Raises NotAvailableError where the process cannot read the memory in place.
        """
        array = self.array
        self.context.synchronize()
        return np.array(array, dtype, copy=copy)

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        """Returns DLPack's capsule over the memory, without a copy, which keeps the buffer alive.

        Waits for all work of the device first, since a buffer has no record of the streams that
        wrote it; `stream=-1` does not wait.  The consumer must end before the buffer is closed.
        Raises BufferError for a dtype that DLPack does not have.
        """
        exported = self._exported()
        if stream != -1:
            self.context.synchronize()
        return exported.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns (1, 0) for memory that the process can read, (2, n) for memory of cuda:n."""
        kind, number = self._exported().__dlpack_device__()
        return int(kind), int(number)

    def _exported(self) -> Any:
        """Returns a NumPy array, or an object of the driver, with DLPack's methods."""
        driver = self.context.driver
        if self.pinned or driver.capabilities.host_memory_is_device_memory:
            return self.array
        return driver.memory_view(self.address, self.shape, numpys_dtype(self.dtype), self)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """The array interface, version 3, for CuPy, Numba, PyTorch; absent for other memory."""
        if self.pinned or self.context.driver.capabilities.host_memory_is_device_memory:
            raise AttributeError("not CUDA device memory")
        self._require_open()
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }

    # --- content
    def set(self, values: npt.ArrayLike, stream: Stream) -> None:
        """Sets the whole content in stream order: a NumPy array or a list of as many elements, of
        this shape or with a single axis.

        The bytes are read before this returns; not allowed during a capture (stage through pinned
        memory).  `ostinato.copy` copies a buffer.
        Numbers are rounded to the buffer's float type, whole numbers too (2**24 + 1 becomes
        16777216 in float32).  Raises InputError if the elements do not fit, and for a value outside
        the type's range, a fraction for whole numbers, a finite number that would become infinite,
        and other values that `signature.exact_array` refuses.
        """
        self._require_open()
        require_stream(stream, "set(values, stream)", self.context)
        refuse_memory(values)
        array = exact_array(self.dtype, values)
        if array.size != self.size:
            raise InputError(f"{array.size} elements cannot be copied into {self.size}")
        _require_shape(self, array.shape)
        if array.size:
            data, to = array.reshape(-1).view(np.uint8).data, self.address
            copy_in = self.context.driver.memcpy_from_host
            stream.guarded(
                "a copy of the host's bytes", lambda h: copy_in(to, data, h), CallKind.ONCE
            )

    def to_numpy(self, stream: Stream) -> npt.NDArray[Any]:
        """Returns a copy of the content after the present work on `stream`; waits for it."""
        self._require_open()
        require_stream(stream, "to_numpy(stream)", self.context)
        out = np.empty(self.shape, numpys_dtype(self.dtype))
        if out.size:
            data, source = out.reshape(-1).view(np.uint8).data, self.address
            copy_out = self.context.driver.memcpy_to_host
            stream.guarded("a copy to the host", lambda h: copy_out(data, source, h), CallKind.ONCE)
        return out

    # --- lifetime
    def _told(self) -> tuple[Watcher, ...]:
        """Returns the watchers of this buffer alone."""
        return members(self._watchers)

    def close(self) -> None:
        """Frees the memory; the driver first waits for the device's work under way.  Idempotent.

        Later launches with the buffer raise ClosedError, and so do graphs that still point at it:
        close or evict them first, or rebind them.
        """
        if self._closed:
            return
        with uninterrupted:
            self._closed = True
            self.context.memory_epoch = object()
            self.__dict__.pop("address", None)
            self.__dict__.pop("_pointer", None)
            everybody = () if self._finalizer is None else members(self.context.watchers)
            # Closing a view, or memory of another owner, frees nothing.
            for watcher in (*self._told(), *everybody):
                watcher.memory_closed(self.range)
            if self._finalizer is not None:
                self._finalizer()
        if self._finalizer is not None:
            self.context.collect()


class _View(Buffer):
    """A part of another buffer, which it keeps alive; closed when either is."""

    base: Buffer

    def _place(self, address: int) -> None:
        """Leaves `address` and `_pointer` to properties, which check the buffer under the view;
        watchers of a view watch that buffer."""
        self._made: tuple[int, Element] | None = None

    def _told(self) -> tuple[Watcher, ...]:
        return ()

    @property
    def address(self) -> int:  # type: ignore[override]
        """The address of the first byte.  Raises ClosedError once it or its owner is closed."""
        base = self.base
        # If the base is no view, its flag itself: each launch reads this.
        if self._closed or (base._closed if type(base) is Buffer else base.closed):
            self._require_open()
        return self.range.address

    @property
    def _pointer(self) -> tuple[int, Element]:  # type: ignore[override]
        base = self.base
        if self._closed or (base._closed if type(base) is Buffer else base.closed):
            self._require_open()
        made = self._made
        if made is None:
            element = self.context.space.element(self.dtype)
            made = self._made = (self.range.address, element)
        return made

    @property
    def closed(self) -> bool:
        return self._closed or self.base.closed

    @property
    def storage(self) -> Buffer:
        return self.base.storage

    def watch(self, watcher: Watcher) -> None:
        self.base.watch(watcher)  # closing a view frees nothing


def allocate(
    context: Context,
    shape: int | Sequence[int],
    dtype: npt.DTypeLike,
    *,
    pinned: bool = False,
    name: str | None = None,
) -> Buffer:
    """Makes a buffer.  Raises OutOfMemoryError, InputError, or DriverError (900) in a capture."""
    context.require_open()
    context.collect()
    dims, kind = as_shape(shape), device_dtype(dtype)
    driver = context.driver
    nbytes = max(1, math.prod(dims) * kind.itemsize)
    free = driver.mem_free_pinned if pinned else driver.mem_free
    with uninterrupted, context.reporting():
        address = driver.mem_alloc_pinned(nbytes) if pinned else driver.mem_alloc(nbytes)
        buffer = Buffer(context, address, dims, kind, pinned=pinned, name=name)
        context.owners[address] = buffer
        buffer._finalizer = weakref.finalize(buffer, context.retire, lambda: free(address))
        buffer._finalizer.atexit = False
    return buffer


def refuse_memory(values: object) -> None:
    """Raises InputError for memory of a device, where values are needed: NumPy would read it where
    the process can, and not in stream order."""
    if isinstance(getattr(values, "_pointer", None), tuple):
        raise InputError(
            f"{values!r} is memory of a device, and values of the host are needed: "
            "ost.copy(stream, dst, src) copies a Buffer (.buffer of device state), "
            "src.to_numpy(stream) gives its values"
        )


def _require_shape(dst: Buffer, shape: tuple[int, ...]) -> None:
    """Raises InputError for another shape, apart from axes of one element, unless one of both has a
    single axis: rows and columns may have been exchanged."""
    if shape == dst.shape:
        return
    here, there = (tuple(n for n in one if n != 1) for one in (dst.shape, shape))
    if dst.size and here != there and min(len(here), len(there)) > 1:
        raise InputError(
            f"shape {list(shape)} cannot be copied into {list(dst.shape)}; reshape it if its "
            "elements are meant in that order"
        )


def copy(stream: Stream, dst: Buffer, src: Buffer) -> None:
    """Copies the bytes of `src` into `dst` (as many) in stream order; capturable.

    Raises InputError if the sizes differ, or, unless one is "bytes", the dtypes or the shapes (axes
    of one element apart, and unless one has a single axis), for buffers of another device, for
    those that overlap in part, and for what is no Buffer.
    """
    require_stream(stream, "copy(stream, dst, src)")
    operation = copy_operation(dst, src)
    if dst.nbytes:
        stream.submit(operation)


def copy_operation(dst: Buffer, src: Buffer) -> Operation:
    """Returns the operation that `copy` submits, for buffers of at least one byte."""
    for what, given in (("dst", dst), ("src", src)):
        if not isinstance(given, Buffer):
            raise InputError(
                f"{what} is {type(given).__name__}, and a copy is from Buffer to Buffer: "
                "buffer.set takes values, device.adopt_array other libraries' device arrays"
            )
    if dst.nbytes != src.nbytes:
        raise InputError(f"{src.nbytes} bytes cannot be copied into {dst.nbytes}")
    if (
        dst.dtype is not src.dtype
        and dst.dtype != src.dtype
        and dst.dtype is not BYTES
        and src.dtype is not BYTES
    ):
        kind = dtype_name(dst.dtype)
        raise InputError(
            f"a copy takes the bytes as they are, and {dtype_name(src.dtype)} is not converted to "
            f"{kind}: convert on the host (dst.set(src.to_numpy(stream), stream)) "
            f'or in a kernel, or say that the bytes are meant (src.view(dtype="{kind}"))'
        )
    if dst.shape != src.shape and dst.dtype is not BYTES and src.dtype is not BYTES:
        _require_shape(dst, src.shape)
    if dst.context is not src.context:
        dst.context.space.require(src, "src", "dst is of")
    if 0 < abs(dst.address - src.address) < dst.nbytes:  # a GPU copies in any order
        raise InputError(
            f"{src!r} cannot be copied into {dst!r}: they overlap; copy to other memory in between"
        )
    params = MemcpyNodeParams(dst.address, src.address, dst.nbytes)
    return Operation(params, "copy", (src.range,), (dst.range,), (dst, src))


def fill(stream: Stream, dst: Buffer, value: float) -> None:
    """Fills every element with `value` in stream order; capturable.

    Elements of 1, 2 and 4 bytes, or of 8 if both halves are equal (such as 0); single bytes with
    `dst.view(dtype=np.uint8)`.  Raises InputError if the value does not fit its type: out of
    bounds, a fraction for whole numbers, a finite number that the type would make infinite.
    """
    require_stream(stream, "fill(stream, dst, value)")
    operation = fill_operation(dst, value)
    if dst.nbytes:
        stream.submit(operation)


def fill_operation(dst: Buffer, value: float) -> Operation:
    """Returns the operation of `fill`, for a buffer of at least one byte."""
    if not isinstance(dst, Buffer):
        raise InputError(
            f"fill: dst is {type(dst).__name__}, and a Buffer is needed "
            "(device.adopt_array makes one of another library's device array)"
        )
    pattern = exact_bytes(dst.dtype, value, "the value to fill with")
    size = len(pattern)
    if size == 8 and pattern[:4] == pattern[4:]:
        size, pattern = 4, pattern[:4]
    if size not in (1, 2, 4):
        raise InputError(
            f"a fill repeats 1, 2 or 4 bytes; {value!r} in {dst.dtype.name} is not one: use "
            "buffer.set, or a kernel"
        )
    params = MemsetNodeParams(
        dst.address, int.from_bytes(pattern, "little"), size, dst.nbytes // size
    )
    return Operation(params, "fill", (), (dst.range,), (dst,))


def for_a_node(operation: Operation) -> Operation:
    """A copy or a fill, if a graph can hold it.  Raises InputError for one of 0 bytes."""
    params = operation.params
    if isinstance(params, MemcpyNodeParams | MemsetNodeParams) and not params.width:
        raise InputError(f"{operation.name}: a node needs 1 byte or more, and the buffer has 0")
    return operation
