"""Values at fixed device addresses that kernels in a graph read, and that the host sets in
between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.device import Device
from ostinato.driver.api import MemoryRange
from ostinato.driver.closeable import Closeable
from ostinato.driver.context import Context, Watcher, context_of
from ostinato.driver.signature import Element, dtype_name, exact_array, exact_bytes
from ostinato.driver.stream import Stream
from ostinato.errors import InputError
from ostinato.memory import Buffer, allocate
from ostinato.memory.buffer import refuse_memory
from ostinato.state.staging import StagingRing

LARGEST = 64 << 10
"""The most bytes of a device state."""


class DeviceArray(Closeable):
    """A small array of values or structs at one device address, set as a whole in one copy.

        positions = ost.DeviceArray(device, 4, "i4")
        positions.set([0, 7, 7, 9], stream)

    `dtype`: a number or a struct, as a word of signatures ("u32") or a NumPy dtype; the whole array
    has 1 byte to 64 KiB.  The content is undefined until it is set.  Writes go through pinned
    memory in stream order, so no replay reads a half-written value.  `depth`: the number of writes
    that may be under way before `set` waits for the oldest.  `name`: as for `Device.empty`.
    Raises InputError, OutOfMemoryError.
    """

    def __init__(
        self,
        device: Device,
        shape: int | tuple[int, ...],
        dtype: npt.DTypeLike,
        *,
        depth: int = 4,
        name: str | None = None,
    ) -> None:
        context = context_of(device)
        self.buffer = allocate(context, shape, dtype, name=name)
        if not 1 <= self.buffer.nbytes <= LARGEST:
            nbytes = self.buffer.nbytes
            self.buffer.close()
            raise InputError(f"{nbytes} bytes: device state holds 1 to {LARGEST} bytes")
        self._ring = StagingRing(context, self.buffer.nbytes, depth=depth)

    def __repr__(self) -> str:
        kind, shape = dtype_name(self.dtype), list(self.shape) or ""
        state = " closed" if self.closed else ""
        at, where = f"{self.range.address:#x}", self.buffer.context.driver.name
        return f"<{type(self).__name__} {kind}{shape} at {at} on {where}{state}>"

    @property
    def address(self) -> int:
        """The address of the first byte.  Raises ClosedError after `close()`."""
        return self.buffer.address

    @property
    def _pointer(self) -> tuple[int, Element]:
        return self.buffer._pointer

    @property
    def context(self) -> Context:
        return self.buffer.context

    @property
    def range(self) -> MemoryRange:
        """The address and the bytes, also after `close()`."""
        return self.buffer.range

    @property
    def closed(self) -> bool:
        """True once the memory was given back."""
        return self.buffer.closed

    def watch(self, watcher: Watcher) -> None:
        """Calls `Buffer.watch`."""
        self.buffer.watch(watcher)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.buffer.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.buffer.shape

    def set(self, value: object, stream: Stream) -> None:
        """Sets the whole content in stream order, as one copy.

        Returns at once unless `depth` writes are under way; then waits for the oldest of them.
        `value`: an array of the shape, or for structs a sequence of tuples or of mappings of
        fields.  Raises InputError if a value does not fit its type (floats may be rounded),
        CaptureError in a capture, ClosedError.
        """
        array = as_exact(value, self.dtype, self.shape)
        self._ring.write(self.buffer, array.tobytes(), stream)

    def to_numpy(self, stream: Stream) -> npt.NDArray[Any]:
        """Returns the content after the stream's work so far, for which it waits."""
        return self.buffer.to_numpy(stream)

    def field(self, name: str) -> Buffer:
        """Returns a field of a single struct, as a buffer for kernels.

        Raises InputError for an unknown field or more than one element.
        """
        fields = self.dtype.fields
        if fields is None or name not in fields:
            known = ", ".join(self.dtype.names or ()) or "none"
            raise InputError(f"there is no field {name!r}; there are: {known}")
        if self.buffer.size != 1:
            raise InputError("fields of one struct only; this holds several")
        kind, offset = fields[name][:2]
        return self.buffer.view(offset, kind.shape, kind.base)

    def close(self) -> None:
        """Gives the memory back.  Idempotent."""
        self._ring.close()
        self.buffer.close()


class DeviceScalar(DeviceArray):
    """One typed value (or one struct) at a fixed address, set in stream order.

        length = ost.DeviceScalar(device, "u4", initial=1, stream=stream)
        length.set(2, stream)

    Otherwise like `DeviceArray`.  `initial`, if given, is set on `stream`, which is needed then.
    """

    def __init__(
        self,
        device: Device,
        dtype: npt.DTypeLike,
        *,
        initial: object = None,
        stream: Stream | None = None,
        depth: int = 4,
        name: str | None = None,
    ) -> None:
        super().__init__(device, (), dtype, depth=depth, name=name)
        if initial is not None:
            if stream is None:
                self.close()
                raise InputError("an initial value needs the stream to set it on")
            self.set(initial, stream)


def as_exact(value: object, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Converts `value` to an array of exactly this dtype and shape.

    Raises InputError if the shape differs, a field is missing or unknown, or a number does not
    survive the conversion (out of bounds, fraction lost); floats may be rounded to narrower ones.
    """
    if shape == () and type(value) is {"i": int, "u": int, "f": float}.get(dtype.kind):
        return np.frombuffer(exact_bytes(dtype, value, "the value"), dtype).reshape(())
    refuse_memory(value)
    # `exact_array` raises for a value that is not an array.
    given = exact_array(dtype, _with_tuples(value, dtype, shape))  # type: ignore[arg-type]
    if given.shape != shape:
        raise InputError(f"shape {given.shape} was given, and {shape} is needed")
    return given


def _with_tuples(value: object, dtype: np.dtype[Any], shape: tuple[int, ...]) -> object:
    """Converts structs in `value` for `exact_array`: a list for each axis, a tuple for each struct.
    A struct may be a list or a mapping too, since the shape tells them apart."""
    if dtype.names is None or isinstance(value, np.ndarray | np.generic):
        return value
    if shape:
        if not isinstance(value, list | tuple):
            raise InputError(f"a sequence of {shape} structs is needed, not {type(value).__name__}")
        return [_with_tuples(item, dtype, shape[1:]) for item in value]
    names = dtype.names
    if isinstance(value, Mapping):
        if set(value) != set(names):
            given = ", ".join(map(str, value))
            raise InputError(f"fields {given} were given, and {', '.join(names)} are needed")
        value = [value[name] for name in names]
    elif not (isinstance(value, tuple | list) and len(value) == len(names)):
        raise InputError(f"a mapping or tuple of the fields {', '.join(names)} is needed")
    kinds = [dtype[name] for name in names]
    return tuple(
        [_with_tuples(item, kind.base, kind.shape) for item, kind in zip(value, kinds, strict=True)]
    )
