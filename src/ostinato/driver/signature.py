"""Signatures of kernels as text, and the packing of Python values into a parameter buffer.

A signature is text such as ``"x: *f32, y: *const f32, out: *out f32, n: u32"``:

* ``*f32`` a pointer that is read and written, ``*const`` one only read, ``*out`` one only written;
* ``i8 u8 i16 u16 f16 bf16 i32 u32 f32 i64 u64 f64`` scalars, also by NumPy's names (``float32``,
  ``u4``);
* ``cond`` a conditional handle; ``bytes[24]`` a struct by value (aligned to 8);
* ``*bytes`` a pointer to memory of any type (``void*``).

Both drivers pack arguments by the signature; the recorder takes a launch's reads and writes from
it.  The layout is C's: each parameter aligned to its own size, as nvcc lays out parameters.

Memory with a known dtype and device has an `Element`; a pointer takes memory of its own type and
device, or bytes of no type.
"""

from __future__ import annotations

import enum
import itertools
import re
import struct
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import field
from functools import lru_cache
from math import isinf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ostinato.driver.api import KernelArguments, ParameterSlot
from ostinato.driver.forking import new_lock
from ostinato.errors import InputError
from ostinato.records import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

    from ostinato.driver.api import Driver


class Access(enum.Flag):
    """The access of a kernel to the memory behind a pointer."""

    READ = enum.auto()
    WRITE = enum.auto()


class _Scalar(NamedTuple):
    """A type of single numbers: its NumPy type, and its code in the module `struct`."""

    dtype: np.dtype[Any]
    code: str


BF16 = np.dtype(np.uint16, metadata={"ostinato": "bf16"})
"""The dtype "bf16": bfloat16, which NumPy lacks.  NumPy treats it as uint16, its bits; code
distinguishes the two by identity, so that numbers become bfloat16, not integers of 16 bits."""

BF16_TYPESTR = "<V2"
"""The type of bfloat16 in torch's array interface: void of 2 bytes, since NumPy lacks the type."""

# The one table of types.  Kernels on the host get the bits of a bfloat16.
_SCALARS = {
    "i8": _Scalar(np.dtype(np.int8), "b"),
    "u8": _Scalar(np.dtype(np.uint8), "B"),
    "i16": _Scalar(np.dtype(np.int16), "h"),
    "u16": _Scalar(np.dtype(np.uint16), "H"),
    "f16": _Scalar(np.dtype(np.float16), "e"),
    "bf16": _Scalar(BF16, "H"),
    "i32": _Scalar(np.dtype(np.int32), "i"),
    "u32": _Scalar(np.dtype(np.uint32), "I"),
    "f32": _Scalar(np.dtype(np.float32), "f"),
    "i64": _Scalar(np.dtype(np.int64), "q"),
    "u64": _Scalar(np.dtype(np.uint64), "Q"),
    "f64": _Scalar(np.dtype(np.float64), "d"),
    "cond": _Scalar(np.dtype(np.uint64), "Q"),
}

BYTES = np.dtype(np.uint8, metadata={"ostinato": "bytes"})
"""The dtype "bytes": memory of which only the size is known, for pointers of any type.  NumPy
treats it as uint8; code distinguishes them by identity."""

_WORDS = {
    **{word: scalar.dtype for word, scalar in _SCALARS.items() if word not in ("i8", "u8", "cond")},
    "bfloat16": BF16,
    "bytes": BYTES,
}
"""The words for dtypes that NumPy lacks.  NumPy's "f16" would be a float of 128 bits."""


_NUMPYS = {"bfloat16": "bf16"} | {
    name: word
    for word, scalar in _SCALARS.items()
    for name in (scalar.dtype.name, f"{scalar.dtype.kind}{scalar.dtype.itemsize}")
    if word not in ("bf16", "cond") and name not in _SCALARS
}
"""The types of the table by NumPy's names: "float32" and "f4" are "f32"."""


def as_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Returns the dtype of a word of signatures ("f32", "bf16"), of "bytes", or of a value that
    `np.dtype` accepts ("float32", "f4", np.float32, a structure, whose fields may be such words).

    "bf16" is `BF16`, "bytes" is `BYTES`.  Raises InputError for other values, and for "i8" and
    "u8", which have 8 bits in signatures and 8 bytes in NumPy.
    """
    if isinstance(dtype, str):
        known = _WORDS.get(dtype)
        if known is not None:
            return known
        if dtype in ("i8", "u8"):
            kind = "int" if dtype == "i8" else "uint"
            raise InputError(
                f"dtype {dtype!r} has 8 bits in signatures and 8 bytes in NumPy: give "
                f'"{kind}8" or "{kind}64"'
            )
    elif dtype is None:
        raise InputError('dtype None: a type is needed ("f32"; "bytes" for memory of any type)')
    try:
        return np.dtype([_field(one) for one in dtype] if isinstance(dtype, list) else dtype)
    except (TypeError, ValueError) as error:
        words = ", ".join(word for word in _SCALARS if word in _WORDS)
        raise InputError(
            f'dtype {dtype!r}: {error}; there are the words of signatures ({words}), "bytes", and '
            'what NumPy takes ("int8", "float32", "f4", np.float32)'
        ) from None


def _field(field: Any) -> Any:
    """A field of a structure as NumPy takes it."""
    if isinstance(field, tuple) and len(field) in (2, 3):
        return (field[0], as_dtype(field[1]), *field[2:])
    return field


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Returns NumPy's name of a dtype; "bytes" for `BYTES`, "bfloat16" for `BF16`."""
    if dtype is BYTES:
        return "bytes"
    return "bfloat16" if dtype is BF16 else dtype.name


def numpys_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype of NumPy arrays of such memory: uint8 for `BYTES`, uint16 for `BF16`."""
    return np.dtype(dtype.type) if dtype is BYTES or dtype is BF16 else dtype


# --------------------------------------------------------- the type and device of memory


@dataclass(frozen=True, slots=True, eq=False)
class Element:
    """The dtype of a piece of memory, and its device.

    There is one object for each pair, so that the packers, also in C, compare identities.
    """

    space: Space
    dtype: np.dtype[Any] | None
    """The dtype as signatures name it (`_pointed`); None for bytes of no type."""


class Space:
    """The memory that the kernels of one device use: one object for each context of a driver, which
    two devices that were opened on one GPU share.

    `host_memory`: true if kernels also use the pinned memory of other such devices.
    """

    def __init__(self, name: str, *, host_memory: bool = False) -> None:
        self.name = f"{name} #{next(_opened)}"
        self.host_memory = host_memory
        self.raw = Element(self, None)
        self._elements: dict[np.dtype[Any], Element] = {}

    def element(self, dtype: np.dtype[Any]) -> Element:
        """Returns the element of memory with this dtype."""
        if dtype is BYTES:
            return self.raw
        found = self._elements.get(dtype)
        if found is None:
            kind = _pointed(dtype)
            # Two threads may come here at once: both must return the same object for a kind.
            found = self._elements.setdefault(kind, Element(self, kind))
            self._elements.setdefault(dtype, found)
        return found

    def takes(self, memory: object) -> bool:
        """True if kernels can use the memory of a value, or if that is unknown."""
        pointer = getattr(memory, "_pointer", None)
        if type(pointer) is not tuple or pointer[1].space is self:
            return True
        both = self.host_memory and pointer[1].space.host_memory
        return both and getattr(memory, "pinned", False) is True

    def require(self, memory: object, what: str, of: str = "it is used on") -> None:
        """Raises InputError, which begins with `what` and the memory, for another device's
        memory."""
        if not self.takes(memory):
            theirs = memory._pointer[1].space  # type: ignore[attr-defined]
            raise InputError(
                f"{what} {memory!r} is memory of another device ({theirs.name}), and {of} "
                f"{self.name} (# counts the devices opened in this process): make it on that "
                "device, and copy through the host: "
                "buffer.set(other.to_numpy(its_stream), stream)"
            )


_opened = itertools.count(1)
_spaces: weakref.WeakValueDictionary[int, Space] = weakref.WeakValueDictionary()
"""The spaces by the handle of a CUDA context."""
_spaces_lock = new_lock()


def space_of(driver: Driver) -> Space:
    """Returns the space of a driver's memory: one for all drivers of one CUDA context."""
    cuda = driver.cuda_context
    if cuda is None:
        return Space(driver.name)
    with _spaces_lock:
        found = _spaces.get(cuda.context)
        if found is None:
            found = _spaces[cuda.context] = Space(driver.name, host_memory=True)
        return found


def _pointed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype as a signature names it: for a struct the type of its fields, if they share
    one; uint8 for other structs, for flags, and for other types of one byte; and uint16 for
    bfloat16, which NumPy has only as an extension."""
    if dtype.names is not None:
        fields = {_pointed(dtype[name].base) for name in dtype.names}
        packed = sum(dtype[name].itemsize for name in dtype.names) == dtype.itemsize
        return fields.pop() if packed and len(fields) == 1 else _SCALARS["u8"].dtype
    if dtype.kind == "b":
        return _SCALARS["u8"].dtype
    if dtype.kind == "V" and dtype.itemsize <= 2:
        return _SCALARS["u8" if dtype.itemsize == 1 else "u16"].dtype
    return dtype


def _agrees(held: np.dtype[Any] | None, wanted: np.dtype[Any] | None) -> bool:
    """True if a pointer to `wanted` may point at memory of type `held`; None: unknown."""
    if held is None or wanted is None or _pointed(held) == wanted:
        return True
    return held.names is not None and wanted == _SCALARS["u8"].dtype


PLAIN_CODES = frozenset("P").union(s.code for s in _SCALARS.values()) - {"e"}
"""The codes that `launcher.packer` takes, `P` for an address: numbers that have exactly one Python
type and that C converts as NumPy does."""

_PARAMETER = (
    r"\s*(?P<name>[A-Za-z_]\w*)\s*:\s*(?P<star>\*\s*(?P<access>const\b|out\b)?\s*)?"
    r"(?P<type>[a-z]+\d*)(\[(?P<size>\d+)\])?\s*\Z"
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One kernel parameter.  `dtype` is that of the value, or of the memory behind a pointer."""

    name: str
    type: str
    dtype: np.dtype[Any]
    pointer: bool
    access: Access
    size: int
    """Bytes in the parameter buffer."""

    @property
    def code(self) -> str:
        """The code in the module `struct`; P for a pointer."""
        if self.pointer:
            return "P"
        return f"{self.size}s" if self.type == "bytes" else _SCALARS[self.type].code

    @property
    def plain(self) -> str:
        """The code as `launcher.packer` takes it; "" where it does not pack such values."""
        code = self.code
        return code if code in PLAIN_CODES and (self.pointer or self.dtype is not BF16) else ""

    @property
    def alignment(self) -> int:
        return min(self.size, 8) if self.type != "bytes" else 8


@dataclass(frozen=True, slots=True)
class _LaidOut:
    """The fields of `Signature`."""

    parameters: tuple[Parameter, ...]
    layout: tuple[ParameterSlot, ...] = field(repr=False, compare=False)
    """Offset and size of each parameter in the packed buffer."""
    pointers: tuple[int, ...] = field(repr=False, compare=False)
    """The indices of the parameters that are pointers."""


class Signature(_LaidOut):
    """The parameters of a kernel, in order, and their places in the packed buffer (`layout`)."""

    __slots__ = ()

    def __init__(self, parameters: tuple[Parameter, ...]) -> None:
        slots: list[ParameterSlot] = []
        end = 0
        for parameter in parameters:
            start = -(-end // parameter.alignment) * parameter.alignment
            slots.append(ParameterSlot(start, parameter.size))
            end = start + parameter.size
        pointers = tuple(i for i, parameter in enumerate(parameters) if parameter.pointer)
        super().__init__(parameters, tuple(slots), pointers)

    @classmethod
    def parse(cls, text: str) -> Signature:
        """Reads a signature.  Raises InputError, which quotes the part that cannot be read."""
        if not isinstance(text, str):
            raise InputError(
                f"a signature is text like 'x: *f32, n: u32', not {type(text).__name__} "
                "(a kernel for the host: @host_kernel('x: *f32, n: u32') in front of its function)"
            )
        parts = text.split(",") if text.strip() else []
        parameters = [_parse_parameter(part, text) for part in parts]
        names = [p.name for p in parameters]
        if len(set(names)) != len(names):
            raise InputError(f"signature {text!r}: two parameters share a name")
        return cls(tuple(parameters))

    def index(self, name: str, where: str = "") -> int:
        """Returns the position of a parameter by name.  Raises InputError, which lists the names
        after `where`."""
        for index, parameter in enumerate(self.parameters):
            if parameter.name == name:
                return index
        known = ", ".join(p.name for p in self.parameters)
        raise InputError(f"{where}there is no parameter {name!r}; there are: {known}")

    def elements(self, space: Space) -> tuple[Element | None, ...]:
        """Returns the element that each pointer takes on a device; None for other parameters."""
        return tuple([space.element(p.dtype) if p.pointer else None for p in self.parameters])

    def pack(
        self,
        values: Sequence[object],
        layout: tuple[ParameterSlot, ...] | None = None,
        space: Space | None = None,
    ) -> KernelArguments:
        """Packs values (buffers, addresses, numbers, bytes).

        `layout`: that of the function, with a slot of the same size for each parameter, if a struct
        by value is aligned in a way that the signature cannot express.  `space`: that of the
        kernel's device, if known.  Raises InputError, by name, also for memory of another type than
        its pointer's, or of another device.
        """
        if len(values) != len(self.parameters):
            raise InputError(
                f"{len(self.parameters)} arguments are needed "
                f"({', '.join(p.name for p in self.parameters)}), {len(values)} were given"
            )
        layout = self.layout if layout is None else layout
        data = bytearray(end_of(layout))
        for parameter, slot, value in zip(self.parameters, layout, values, strict=True):
            data[slot.offset : slot.offset + slot.size] = self.pack_one(parameter, value, space)
        return KernelArguments(bytes(data), layout)

    @staticmethod
    def pack_one(parameter: Parameter, value: object, space: Space | None = None) -> bytes:
        """Returns the bytes of one argument.  Raises InputError if the value does not fit the type,
        and for memory of another type or device."""
        what = f"parameter {parameter.name!r}"
        if parameter.pointer:
            address, held = _memory(value)
            if address is None:
                raise InputError(
                    f"{what} is a pointer; {type(value).__name__} has no device address (give a "
                    "Buffer, an array on the device, or an address)"
                )
            if space is not None:
                space.require(value, what, "the kernel is of")
            typed = None if parameter.dtype is BYTES else held  # a pointer to bytes takes any type
            if typed is not None and not _agrees(typed, parameter.dtype):
                raise InputError(_wrong_type(parameter, typed))
            return _address_bytes(address, what)
        if parameter.type == "bytes":
            if isinstance(value, np.generic | np.ndarray):
                value = _array_bytes(value, what)
            elif isinstance(value, memoryview):
                value = value.tobytes()  # whose length is in bytes
            if not isinstance(value, bytes | bytearray) or len(value) != parameter.size:
                given = len(value) if isinstance(value, bytes | bytearray) else type(value).__name__
                raise InputError(f"{what} takes exactly {parameter.size} bytes, not {given}")
            return bytes(value)
        return exact_bytes(parameter.dtype, value, what)


def _wrong_type(parameter: Parameter, held: np.dtype[Any]) -> str:
    """Returns the error text for memory of another type than its parameter's."""
    word = parameter.type if parameter.type not in ("i8", "u8") else parameter.dtype.name
    return (
        f"parameter {parameter.name!r} points at {parameter.type}, and the memory holds "
        f"{dtype_name(held)}, which the kernel would read as other values: make it of that type "
        f'(device.array(values, "{word}")), or say that its bytes are meant '
        f'(buffer.view(dtype="{word}"))'
    )


def _parse_parameter(part: str, text: str) -> Parameter:
    match = re.match(_PARAMETER, part)
    if match is None:
        raise InputError(f"signature {text!r}: cannot read {part.strip()!r} (like 'x: *f32')")
    name, kind, pointer = match["name"], match["type"], match["star"] is not None
    kind = _NUMPYS.get(kind, kind)
    access = {
        "const": Access.READ,
        "out": Access.WRITE,
        None: Access.READ | Access.WRITE,
    }[match["access"]]
    if kind == "bytes" and match["size"] and not pointer and int(match["size"]) > 0:
        return Parameter(name, kind, np.dtype(np.uint8), False, access, int(match["size"]))
    if kind == "bytes" and pointer and match["size"] is None:
        return Parameter(name, kind, BYTES, True, access, 8)
    if kind not in _SCALARS or match["size"] is not None:
        raise InputError(
            f"signature {text!r}: {part.strip()!r} has no known type; "
            f"there are: {', '.join(_SCALARS)}, bytes[N], *bytes"
        )
    dtype = _SCALARS[kind].dtype
    return Parameter(name, kind, dtype, pointer, access, 8 if pointer else dtype.itemsize)


def buffer_struct(codes: Iterable[str], slots: Sequence[ParameterSlot]) -> struct.Struct:
    """Returns the `struct` that packs a parameter buffer: one value a slot, addresses as ints.

    `codes`: a `Parameter.code` for each slot.
    """
    text, end = "<", 0
    for code, slot in zip(codes, slots, strict=True):
        text += f"{slot.offset - end}x{'Q' if code == 'P' else code}"
        end = slot.offset + slot.size
    return struct.Struct(text)


def address_of(value: object) -> int | None:
    """Returns the device address of a value, or None if it has none.

    Plain whole numbers are addresses; so are an integer attribute `address`, and the data of a
    `__cuda_array_interface__`.
    """
    return _memory(value)[0]


def address_for(value: object, element: Element | None) -> int | None:
    """Returns `address_of` for a pointer that takes this element; None for memory of another type
    or device.  Without an element any memory is accepted."""
    address, held = _memory(value)
    if element is None or address is None:
        return address
    return address if _agrees(held, element.dtype) and element.space.takes(value) else None


def _memory(value: object) -> tuple[int | None, np.dtype[Any] | None]:
    """Returns the address of a value, or None; and the dtype of its memory, if it has one: a
    buffer, or a device array of another library."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value), None
    pointer = getattr(value, "_pointer", None)
    if type(pointer) is tuple:
        return pointer[0], None if pointer[1].dtype is None else value.dtype  # type: ignore[attr-defined]
    address = getattr(value, "address", None)
    if isinstance(address, int):
        return address, None
    interface = array_interface(value)
    if interface is None:
        return None, None
    return int(interface["data"][0]), _type_of(interface.get("typestr"))


def held_by(target: object) -> np.dtype[Any] | None:
    """Returns the dtype of a buffer, also a closed one, or of another library's device array, as
    signatures name it; None for bytes of no type, and for values without a dtype."""
    dtype = getattr(target, "dtype", None)
    if not isinstance(dtype, np.dtype):
        interface = array_interface(target)
        dtype = None if interface is None else _type_of(interface.get("typestr"))
    return None if dtype is None or dtype is BYTES else _pointed(dtype)


@lru_cache(maxsize=256)
def _type_of(typestr: object) -> np.dtype[Any] | None:
    """Returns None for a missing type, and for a type that NumPy does not have."""
    try:
        return np.dtype(typestr) if isinstance(typestr, str) else None
    except TypeError:
        return None


def array_interface(value: object) -> dict[str, Any] | None:
    """Returns another library's `__cuda_array_interface__`, or None if there is none.

    Raises InputError if the library refuses it (a torch tensor that requires a gradient).
    """
    try:
        interface = getattr(value, "__cuda_array_interface__", None)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{type(value).__name__} does not give its memory: {error}; if it is a tensor that "
            "requires a gradient, give tensor.detach()"
        ) from error
    return interface if isinstance(interface, dict) else None


def element_bytes(typestr: str) -> int:
    """Returns the bytes of an element of an array interface.  Raises InputError for no type.

    The number in `typestr` counts characters for text ("<U4"), and a unit may follow ("<M8[ns]").
    """
    try:
        return np.dtype(typestr).itemsize
    except TypeError:  # or a type that NumPy does not have, such as "<c4"
        if typestr[2:].isdecimal():
            return int(typestr[2:])
        raise InputError(f"typestr {typestr!r} of an array interface is no type") from None


def is_native(dtype: np.dtype[Any]) -> bool:
    """True if all numbers have the byte order of this machine.

    `isnative` is True for fields that are arrays, whatever their elements are (NumPy 2.4).
    """
    return dtype == dtype.newbyteorder("=")


def exact_bytes(dtype: np.dtype[Any], value: object, what: str) -> bytes:
    """Returns the bytes of one number of this type.

    Raises InputError, with `what` in it, if the value would be lost: no number, out of bounds, a
    fraction for whole numbers, a finite number that would become infinite.  Floats are rounded.
    """
    if dtype is BF16 and isinstance(value, int | float | np.generic):
        try:
            return exact_array(dtype, value).tobytes()
        except InputError as error:
            raise InputError(f"{what}: {error}") from None
    if isinstance(value, np.generic):
        if value.dtype.kind != "b" and not np.can_cast(value.dtype, dtype, "safe"):
            plain = "int" if dtype.kind in "iu" else "float"
            raise InputError(
                f"{what} takes {dtype.name}; {value.dtype.name} does not fit safely "
                f"(give {plain}(value))"
            )
        value = value.item()
    if not isinstance(value, int | float):
        raise InputError(f"{what} takes a number ({dtype_name(dtype)}), not {type(value).__name__}")
    if dtype.kind in "iu":
        if not isinstance(value, int):
            raise InputError(f"{what} takes a whole number ({dtype.name}), not {value!r}")
        info = np.iinfo(dtype)
        if not info.min <= value <= info.max:
            raise InputError(f"{what}: {value} is outside {_bounds(dtype)}")
    elif dtype.kind == "b":
        if value not in (0, 1):
            raise InputError(f"{what} takes True or False, not {value!r}")
    elif dtype.kind != "f":
        raise InputError(f"{what}: {dtype.name} is no type of single numbers")
    return _rounded(dtype, value, what)


_EXACT_FLOATS = 1 << 53
"""The limit below which every whole number is a float of its own."""


def exact_array(dtype: np.dtype[Any], values: npt.ArrayLike) -> npt.NDArray[Any]:
    """Returns `values` as a C-order array of this dtype; unchanged if it is one already.

    Raises InputError if a value would be lost: no number, out of bounds, a fraction for whole
    numbers, a number other than 0 and 1 for flags, an imaginary part for real numbers, a finite
    number that would become infinite.  Numbers are rounded to the float type, whole ones too.
    Structs, which are tuples or come from an array of structs, are converted field by field.
    For `BF16` floats are rounded, uint16 are the bits, and other whole numbers than 0 are refused.
    """
    if type(values) is np.ndarray and values.dtype == dtype:
        return np.ascontiguousarray(values).reshape(values.shape)
    refuse_masked(values)
    if dtype.fields is not None:
        return _exact_structs(dtype, values)
    try:
        given = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise InputError(f"cannot read {values!r} as {dtype.name}: {error}") from None
    wanted, kind = dtype.kind, given.dtype.kind
    if given.dtype == dtype or not given.size:
        pass
    elif dtype is BF16:
        return _exact_bfloat16(given)
    elif wanted in "iu" and kind in "iu":
        _require_bounds(dtype, given.min(), given.max())
    elif wanted in "biufc":
        if kind in "fO" and wanted in "iu" and not hasattr(values, "dtype"):
            given = _whole_numbers(values, given)
        elif kind == "O" and wanted in "fc" and _are_whole(given):
            try:
                given = given.astype(np.float64)
            except OverflowError:
                raise InputError(f"{given.max()} is outside {_bounds(dtype)}") from None
        _require_numbers(dtype, given)
    elif not np.can_cast(given.dtype, dtype, "safe"):
        raise InputError(f"{dtype.name} is needed, not {given.dtype.name}")
    with np.errstate(over="ignore"):
        made = np.ascontiguousarray(given, dtype=dtype).reshape(given.shape)
    if wanted in "fc" and given.dtype != dtype:
        lost = np.isinf(made) & np.isfinite(given)
        if lost.any():
            raise InputError(f"{given[lost][0]} is outside {_bounds(dtype)}")
    return made


def _exact_bfloat16(given: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Does the work of `exact_array` for bfloat16."""
    if given.dtype.kind in "biuO" and given.any():
        raise InputError(
            f"{given.dtype.name} could be the values or the bits of bfloat16: give floats (1.0), "
            "or the bits as an array of uint16"
        )
    if given.dtype.kind != "f":
        given = exact_array(_SCALARS["f32"].dtype, given)  # zeros; it words what is no number
    with np.errstate(over="ignore"):
        made = to_bfloat16(given.astype(np.float32).reshape(-1)).reshape(given.shape)
    lost = ((made & 0x7FFF) == 0x7F80) & np.isfinite(given)
    if lost.any():
        raise InputError(f"{given[lost][0]} is outside bfloat16 (at most 3.38953e+38)")
    return made.view(BF16)


def to_bfloat16(
    values: npt.NDArray[np.float32],
    out: npt.NDArray[np.uint16] | None = None,
    words: npt.NDArray[np.uint32] | None = None,
) -> npt.NDArray[np.uint16]:
    """Rounds to bit patterns of bfloat16, ties to even; NaN stays NaN, overflow becomes infinity.

    `out`: the array to write to; `words`: working memory.  Both have the shape of `values`.
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = np.right_shift(bits, np.uint32(16), out=words)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    if out is None:
        out = np.empty(values.shape, np.uint16)
    np.right_shift(rounded, np.uint32(16), out=out, casting="unsafe")
    # A NaN's payload could carry into the sign or round down to infinity: cut it, and set quiet.
    if values.size and np.isnan(values.max()):
        nan = np.isnan(values)
        out[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(0x40)
    return out


def _exact_structs(dtype: np.dtype[Any], values: object) -> npt.NDArray[Any]:
    """Does the work of `exact_array` for structs.

    NumPy would drop fractions, and match the fields of another struct by their order instead of
    their names.
    """
    if isinstance(values, list):
        rows = [_exact_structs(dtype, row) for row in values]
        if len({row.shape for row in rows}) > 1:
            raise InputError(f"rows of the same length are needed, not {values!r}")
        return np.stack(rows) if rows else np.zeros(0, dtype)
    names = dtype.names or ()
    shape: tuple[int, ...] = ()
    parts: Sequence[Any] = values if isinstance(values, tuple) else ()
    if isinstance(values, np.ndarray | np.generic) and values.dtype.names == names:
        array = np.asarray(values)
        shape, parts = array.shape, [array[name] for name in names]
    if len(parts) != len(names):
        given = getattr(values, "dtype", repr(values))
        raise InputError(f"structs of the fields {', '.join(names)} are needed, not {given}")
    made = np.zeros(shape, dtype)
    for name, part in zip(names, parts, strict=True):
        field = exact_array(dtype[name].base, part)
        if field.shape != made[name].shape:
            raise InputError(f"field {name!r} has shape {made[name].shape}, not {field.shape}")
        made[name] = field
    return made


def refuse_masked(values: object, what: str = "") -> None:
    """Raises InputError, which begins with `what`, for masked elements: the values under a mask
    would be used as values."""
    # The name `np.ma` would import it, which takes milliseconds of a start; if nobody has imported
    # it, there is no masked array.
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())
    # By the mask's bytes: NumPy has no `any` for a mask of structs.
    if (
        isinstance(values, masked)
        and np.frombuffer(np.ma.getmaskarray(values).tobytes(), bool).any()
    ):
        raise InputError(
            f"{what}elements are masked, and what is under the mask would be taken for their "
            "values; fill them (array.filled(value))"
        )


def _whole_numbers(values: npt.ArrayLike, given: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns `given`, or `values` as objects if all are whole numbers: NumPy converts whole
    numbers that have no common 64-bit type to floats."""
    numbers = np.array(values, object)
    return numbers if _are_whole(numbers) else given


def _are_whole(numbers: npt.NDArray[Any]) -> bool:
    return all(isinstance(number, int | np.integer) for number in numbers.flat)


def _require_numbers(dtype: np.dtype[Any], given: npt.NDArray[Any]) -> None:
    """Raises InputError for values without an equal in a type of numbers or flags.

    The caller handles floats that are too large.
    """
    kind = given.dtype.kind
    if kind == "O" and dtype.kind in "iu" and _are_whole(given):
        _require_bounds(dtype, given.min(), given.max())
    elif kind not in "biufc":
        raise InputError(f"numbers are needed ({dtype.name}), not {given.dtype.name}")
    elif kind == "c" and dtype.kind != "c":
        raise InputError(f"real numbers are needed ({dtype.name}), not {given.dtype.name}")
    elif dtype.kind == "b":
        wrong = given[(given != 0) & (given != 1)]
        if wrong.size:
            raise InputError(f"True or False is needed, not {wrong[0]}")
    elif dtype.kind in "iu" and kind == "f":
        wrong = given[given != np.floor(given)]
        if wrong.size:
            raise InputError(f"a whole number is needed ({dtype.name}), not {wrong[0]}")
        low, high = given.min(), given.max()
        if np.isinf(low) or np.isinf(high):
            raise InputError(f"infinity is outside {_bounds(dtype)}")
        _require_bounds(dtype, low, high)
        if max(-low, high) >= _EXACT_FLOATS:
            raise InputError(
                f"{max(-low, high)} is a float that stands for several whole numbers; give "
                f"{dtype.name}"
            )


def _require_bounds(dtype: np.dtype[Any], low: Any, high: Any) -> None:
    """Raises InputError unless whole numbers from `low` to `high` fit into this integer type."""
    info = np.iinfo(dtype)
    for bad in (int(low), int(high)):
        if not info.min <= bad <= info.max:
            raise InputError(f"{bad} is outside {_bounds(dtype)}")


def _bounds(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return f"{dtype.name} ({info.min} to {info.max})"
    return f"{dtype.name} (at most {np.finfo(dtype).max:g})"


def _rounded(dtype: np.dtype[Any], value: float, what: str) -> bytes:
    """Returns the bytes of a number that may be rounded, but not to infinity."""
    try:
        with np.errstate(over="ignore"):
            made = np.array(value, dtype=dtype)
    except OverflowError:
        made = np.array(np.inf)
    if dtype.kind == "f" and np.isinf(made) and not (isinstance(value, float) and isinf(value)):
        raise InputError(f"{what}: {value!r} is outside {_bounds(dtype)}")
    return made.astype(dtype).tobytes()


def pack_untyped(
    slots: Sequence[ParameterSlot], values: Sequence[object], space: Space | None = None
) -> KernelArguments:
    """Packs values for a function of which only the parameter sizes are known.

    Floats become float32 or float64 by size, whole numbers two's complement by size, objects with
    an address 8-byte words; bytes must have the exact size.  A whole number for a parameter that
    is really a float cannot be detected: give a signature, or NumPy scalars.
    Raises InputError by index.
    """
    if len(values) != len(slots):
        raise InputError(f"the function takes {len(slots)} arguments, {len(values)} were given")
    data = bytearray(end_of(slots))
    for index, (slot, value) in enumerate(zip(slots, values, strict=True)):
        data[slot.offset : slot.offset + slot.size] = pack_by_size(slot.size, value, index, space)
    return KernelArguments(bytes(data), tuple(slots))


def end_of(slots: Sequence[ParameterSlot]) -> int:
    """Returns the size of the packed parameter buffer in bytes."""
    return max((slot.offset + slot.size for slot in slots), default=0)


def pack_by_size(size: int, value: object, index: int, space: Space | None = None) -> bytes:
    """Returns the bytes of one argument of which only the size is known.  Raises InputError by
    index, also for memory of another device."""
    what = f"argument {index}"
    if isinstance(value, bytes | bytearray | memoryview | np.generic):
        raw = _array_bytes(value, what) if isinstance(value, np.generic) else bytes(value)
        if len(raw) != size:
            raise InputError(f"{what} takes {size} bytes; {len(raw)} were given")
        return raw
    if isinstance(value, bool):
        return int(value).to_bytes(size, "little")
    if isinstance(value, float):
        if size not in (4, 8):
            raise InputError(f"{what} takes {size} bytes; a float has 4 or 8")
        return _rounded(np.dtype(np.float32 if size == 4 else np.float64), value, what)
    if isinstance(value, int):
        bits = 8 * size
        if not -(1 << (bits - 1)) <= value < 1 << bits:
            raise InputError(f"{what}: {value} does not fit into {size} bytes")
        return (value & ((1 << bits) - 1)).to_bytes(size, "little")
    address = address_of(value)
    if address is None:
        raise InputError(f"{what}: {type(value).__name__} is neither a number nor device memory")
    if size != 8:
        raise InputError(f"{what} takes {size} bytes; a device address has 8")
    if space is not None:
        space.require(value, what, "the kernel is of")
    return _address_bytes(address, what)


def _array_bytes(value: np.generic | npt.NDArray[Any], what: str) -> bytes:
    """Returns the bytes of a NumPy scalar or array that is given as a struct.

    Raises InputError if a kernel would read other values: a foreign byte order, Python objects,
    masked elements.
    """
    refuse_masked(value, f"{what}: ")
    if value.dtype.hasobject or not is_native(value.dtype):
        why = "holds Python objects" if value.dtype.hasobject else "has a foreign byte order"
        raise InputError(f"{what}: {value.dtype} {why}, and a kernel would read other values")
    return value.tobytes()


def _address_bytes(address: int, what: str) -> bytes:
    if not 0 <= address < 1 << 64:
        raise InputError(f"{what}: {address} is no device address (64 bits without a sign)")
    return address.to_bytes(8, "little")
