"""Key columns: users' tables as device memory that the kernels read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ostinato import Buffer, Device, Stream
from ostinato.errors import InputError
from ostinato.relational.keys import LARGEST, MAX_ARITY, table_slots
from ostinato.relational.workspace import require_no_capture

TableLike: TypeAlias = "Mapping[str, object] | KeyColumns | object"
"""Columns by name (a mapping to arrays, or an Arrow table), or key columns."""

On: TypeAlias = "str | Sequence[str | tuple[str, str]]"
"""Names of the key columns; a pair if the left and the right name differ."""

_TYPES = tuple(np.dtype(kind) for kind in (np.int32, np.uint32, np.int64, np.uint64))
_CPU: Final = 1  # kDLCPU, DLPack's device type

serials = itertools.count()
"""Serial numbers of key columns and indexes."""


class KeyColumns:
    """The key columns of one side of a join, in memory of one device.

    Made by `Joiner.columns`, for many joins without reading the table again.  Keeps the memory
    alive.  `names`, `dtypes` and `rows` describe it.
    """

    __slots__ = (
        "addresses",
        "buffers",
        "device",
        "dtypes",
        "key_bytes",
        "names",
        "rows",
        "serial",
        "sizes",
        "slots",
        "stream",
    )

    def __init__(
        self, device: Device, stream: Stream, names: tuple[str, ...], buffers: tuple[Buffer, ...]
    ) -> None:
        """Raises InputError that names the column: lengths that differ, 2**32 - 1 rows or more."""
        for name, buffer in zip(names, buffers, strict=True):
            if buffer.shape != buffers[0].shape:
                raise InputError(
                    f"column {name!r} has {len(buffer)} rows, and column {names[0]!r} has "
                    f"{len(buffers[0])}"
                )
        self.serial = next(serials)
        """A number that no other key columns or index of the process has."""
        self.device = device
        self.stream = stream
        """The stream on which the columns are copied to the device."""
        self.names = names
        self.buffers = buffers
        self.rows = len(buffers[0])
        self.dtypes: tuple[np.dtype[Any], ...] = tuple(b.dtype for b in buffers)
        self.sizes = tuple(kind.itemsize for kind in self.dtypes)
        self.key_bytes = sum(self.sizes)
        if self.rows >= LARGEST:
            raise InputError(
                f"column {names[0]!r} has {self.rows} rows; a join takes fewer than {LARGEST}"
            )
        self.addresses = tuple(b.address for b in buffers)
        self.slots = table_slots(self.rows)
        """Slots of a hash table for the rows."""

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        columns = ", ".join(f"{n}: {t.name}" for n, t in zip(self.names, self.dtypes, strict=True))
        return f"<KeyColumns {columns}; {self.rows} rows on {self.device.name}>"

    def require_names(self, names: tuple[str, ...]) -> None:
        """Raises InputError unless these are the columns, in this order."""
        if self.names != names:
            raise InputError(
                f"these key columns are {', '.join(self.names)}, and {', '.join(names)} are asked "
                "for"
            )

    def require_places(self, names: tuple[str, ...]) -> None:
        """Raises InputError if a column of one of these names is at another position here."""
        if any(n in self.names and n != own for n, own in zip(names, self.names, strict=False)):
            raise InputError(
                f"on names {', '.join(names)}, and the index has its key columns in the order "
                f"{', '.join(self.names)}; use that order, or (left, right) pairs of names"
            )

    def require_open(self) -> None:
        """Raises ClosedError if a column's memory was freed."""
        for buffer in self.buffers:
            _ = buffer.address

    @classmethod
    def of(
        cls, device: Device, stream: Stream, table: TableLike, names: Sequence[str]
    ) -> KeyColumns:
        """Returns the named columns of a table, copied to the device in the stream's order.

        Raises InputError that names the column and the fault.
        """
        if isinstance(table, KeyColumns):
            if table.device.context is not device.context:
                raise InputError(
                    f"column {table.names[0]!r} lives on {_another(table.device.name, device)}"
                )
            table.require_names(tuple(names))
            if table.stream.closed:  # its last work may be under way, and no event can be recorded
                device.context.synchronize()
            elif table.stream is not stream:
                stream.wait(table.stream.record())
            return table
        return cls(
            device,
            stream,
            tuple(names),
            tuple(_buffer(device, stream, name, _column(table, name)) for name in names),
        )


def names_of(on: On) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the key columns' names on the left and on the right.  Raises InputError."""
    pairs: list[tuple[str, str]] = []
    for item in on if isinstance(on, list | tuple) else [on]:
        match item:
            case str(name):
                pairs.append((name, name))
            case (str(left), str(right)):
                pairs.append((left, right))
            case _:
                raise InputError(f"on={on!r}: names of columns, or (left, right) pairs of names")
    if not 1 <= len(pairs) <= MAX_ARITY:
        raise InputError(f"on: {len(pairs)} key columns; 1 to {MAX_ARITY} are possible")
    return tuple(left for left, _ in pairs), tuple(right for _, right in pairs)


def check_same_types(left: KeyColumns, right: KeyColumns) -> None:
    """Raises InputError that names the first column whose types differ."""
    if left.dtypes == right.dtypes:
        return
    if len(left.dtypes) != len(right.dtypes):
        raise InputError(
            f"the left side has {len(left.dtypes)} key columns ({', '.join(left.names)}), and the "
            f"right side {len(right.dtypes)} ({', '.join(right.names)})"
        )
    for name, other, own, its in zip(
        left.names, right.names, left.dtypes, right.dtypes, strict=True
    ):
        if own != its:
            raise InputError(
                f"column {name!r} is {own.name} on the left, and column {other!r} is {its.name} on "
                "the right; convert one of them"
            )


def _column(table: object, name: str) -> object:
    """Returns a column of a mapping or of an Arrow table by name."""
    if isinstance(table, Mapping):
        known: list[object] = list(table)
        if name in table:
            return table[name]
    elif hasattr(table, "column_names") and hasattr(table, "column"):
        known = list(table.column_names)
        if known.count(name) > 1:
            raise InputError(f"the table has {known.count(name)} columns {name!r}")
        if name in known:
            return table.column(name)
    else:
        raise InputError(
            f"a {type(table).__name__} is no table; give a mapping of column names to arrays, or "
            "an Arrow table"
        )
    there = ", ".join(map(str, known)) or "none"
    raise InputError(f"there is no column {name!r}; there are: {there}")


def _buffer(device: Device, stream: Stream, name: str, array: Any) -> Buffer:
    if isinstance(array, Buffer):
        if array.context is not device.context:
            raise InputError(
                f"column {name!r} lives on {_another(array.context.driver.name, device)}"
            )
        buffer = array
    elif isinstance(getattr(array, "null_count", None), int):
        buffer = _uploaded(device, stream, name, _of_arrow(name, array))
    elif isinstance(array, np.ndarray):
        buffer = _uploaded(device, stream, name, array)
    else:
        buffer = _of_library(device, stream, name, array)
    _check(name, buffer.dtype, buffer.shape)
    if buffer.nbytes and buffer.address % buffer.dtype.itemsize:
        raise InputError(
            f"column {name!r} begins at {buffer.address:#x}, and {buffer.dtype} needs an address "
            f"that {buffer.dtype.itemsize} divides; copy it to memory of its own"
        )
    return buffer


def _another(name: str, device: Device) -> str:
    """Returns "host, another device than …", for memory of another device."""
    if name == device.name:
        return (
            f"{name}, another device than this joiner's (the same one, opened another time): use "
            "one Device for both"
        )
    return f"{name}, another device than this joiner's {device.name}"


def _check(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if dtype not in _TYPES:
        known = ", ".join(kind.name for kind in _TYPES)
        raise InputError(f"column {name!r} is {dtype}; keys are of type {known}")
    if len(shape) != 1:
        raise InputError(f"column {name!r} has shape {list(shape)}; one dimension is needed")


def _of_arrow(name: str, column: Any) -> npt.NDArray[Any]:
    """Returns an Arrow array or chunked array as NumPy, without a copy if it is one chunk."""
    if column.null_count:
        raise InputError(
            f"column {name!r} has {column.null_count} nulls; a join takes columns without nulls "
            "(drop those rows, or fill them)"
        )
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
        if hasattr(column, "num_chunks"):  # some versions give no chunk at all
            column = column.chunk(0) if column.num_chunks else column.to_numpy()
    array = column if isinstance(column, np.ndarray) else column.to_numpy(zero_copy_only=False)
    return np.asarray(array)


def _uploaded(device: Device, stream: Stream, name: str, array: npt.NDArray[Any]) -> Buffer:
    _check(name, array.dtype, array.shape)  # first: NumPy cannot tell whether a struct is masked
    if isinstance(array, np.ma.MaskedArray):
        if np.ma.is_masked(array):
            raise InputError(
                f"column {name!r} has masked values; a join takes columns without nulls"
            )
        array = array.data
    require_no_capture(stream)
    buffer = device.empty(array.shape, array.dtype)
    buffer.set(array, stream)
    return buffer


def _of_library(device: Device, stream: Stream, name: str, array: Any) -> Buffer:
    """Returns another library's device array, without a copy, after the work that fills it."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None and not hasattr(array, "__dlpack__"):
        raise InputError(
            f"column {name!r} is a {type(array).__name__}; give a NumPy array, an Arrow array, or "
            "one with __cuda_array_interface__ or DLPack"
        )
    if interface is None and hasattr(array, "__dlpack_device__"):
        kind, number = array.__dlpack_device__()
        if int(kind) == _CPU:
            try:
                on_host = np.from_dlpack(array)
            except (BufferError, RuntimeError, TypeError, ValueError) as error:
                raise InputError(f"column {name!r}: NumPy cannot read it: {error}") from None
            return _uploaded(device, stream, name, on_host)
        if device.name != f"cuda:{int(number)}":
            raise InputError(
                f"column {name!r} lives on DLPack device ({int(kind)}, {int(number)}), another "
                f"device than this joiner's {device.name}"
            )
    try:
        buffer = device.adopt_array(array)
    except InputError as error:
        raise InputError(f"column {name!r}: {error}") from None
    if buffer.nbytes and device.driver.memory_range(buffer.address) is None:
        raise InputError(f"column {name!r} is not in memory of {device.name}")
    producer = None if interface is None else interface.get("stream")
    if producer is None:  # nothing identifies the work that fills it
        device.context.synchronize()
    else:
        stream.wait(device.adopt_stream(_Producer(producer)).record())
    return buffer


class _Producer:
    """A stream that a library gives by its handle."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle
