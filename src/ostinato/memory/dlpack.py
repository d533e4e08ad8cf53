"""Arrays of other libraries as buffers, without a copy: CUDA array interface and DLPack.

The layout of DLPack's structures is dlpack.h's (version 0.8, which version 1 keeps for
unversioned capsules).
"""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ostinato.driver.context import Context
from ostinato.driver.interrupts import uninterrupted
from ostinato.driver.signature import BF16, BF16_TYPESTR, array_interface
from ostinato.errors import InputError
from ostinato.memory.buffer import Buffer, device_dtype

_CPU = 1
_CUDA_DEVICES = (2, 13)  # CUDA, CUDA managed


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def adopt_array(context: Context, array: object) -> Buffer:
    """Returns a buffer over a C-contiguous array of another library, which is kept alive.

    Through `__cuda_array_interface__`, else `__dlpack__`: device arrays, and on the host device
    arrays of the CPU (NumPy's, torch's).  Not ordered with the other library's streams: the caller
    must wait for its work on the array before using the buffer, and for work on the buffer before
    the other library reads the array.  bfloat16 comes as its uint16 bits.  Raises InputError for
    arrays on another device, read-only, strided and masked arrays, tensors with tracked gradients,
    and unknown types.
    """
    if isinstance(array, Buffer):
        return array
    interface = array_interface(array)
    if interface is not None:
        return _of_interface(context, array, interface)
    if hasattr(array, "__dlpack__"):
        return _from_dlpack(context, array)
    raise InputError(f"{type(array).__name__} has neither __cuda_array_interface__ nor __dlpack__")


def _of_interface(context: Context, array: object, interface: Mapping[str, Any]) -> Buffer:
    what = type(array).__name__
    if interface.get("mask") is not None:
        raise InputError(
            f"{what} has a mask, and kernels would read the masked elements as well; fill them, "
            "and give an array without a mask"
        )
    try:
        shape = tuple(operator.index(n) for n in interface["shape"])
        typestr = interface["typestr"]
        named = BF16 if typestr == BF16_TYPESTR else np.dtype(typestr)
        strides = interface.get("strides")
        strides = None if strides is None else [operator.index(n) for n in strides]
        address = operator.index(interface["data"][0])
        if min(shape, default=0) < 0 or not 0 <= address < 1 << 64:
            raise ValueError(f"shape {shape} at address {address}")
        if strides is not None and len(strides) != len(shape):
            raise ValueError(f"{len(strides)} strides of {len(shape)} dimensions")
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"{what}: __cuda_array_interface__ is not valid ({error!r})") from None
    dtype = device_dtype(named)
    if strides is not None:
        _require_dense(array, shape, strides, dtype.itemsize)
    return Buffer(context, address, shape, dtype, base=array)


def _require_dense(
    array: object, shape: tuple[int, ...], strides: Sequence[int], itemsize: int
) -> None:
    """Raises InputError unless the elements are in C order without gaps.

    The stride of an axis with one element has no meaning, and libraries give any number there.
    """
    step = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != step and 0 not in shape:
            raise InputError(
                f"{type(array).__name__}: strided arrays cannot be adopted; copy first"
            )
        step *= extent


def _from_dlpack(context: Context, array: Any) -> Buffer:
    # The capsule owns a reference to the array's memory until it is consumed or collected; the
    # buffer keeps it and never consumes it, so its own destructor runs when the buffer is
    # collected.
    driver, what = context.driver, type(array).__name__
    on_cpu = driver.capabilities.host_memory_is_device_memory
    device_type = int(array.__dlpack_device__()[0])
    if device_type == _CPU and not on_cpu:
        raise InputError(
            f"{what} is in memory of the CPU, which {driver.name} cannot read in place; "
            "device.array(values) copies it"
        )
    if device_type not in ((_CPU,) if on_cpu else _CUDA_DEVICES):
        raise InputError(f"{what} is on DLPack device {device_type}, and not on {driver.name}")
    try:
        capsule = array.__dlpack__(stream=None if on_cpu else -1)  # -1: does not wait
    except (BufferError, RuntimeError) as error:  # read-only; torch's: tracked for gradients
        raise InputError(f"{what} cannot be adopted: {error}") from None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _Tensor.from_address(pointer(capsule, b"dltensor"))
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    dtype = _dtype(tensor.dtype)
    if tensor.strides:
        strides = [tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim)]
        _require_dense(array, shape, strides, dtype.itemsize)
    address = (tensor.data or 0) + tensor.byte_offset
    buffer = Buffer(context, address, shape, dtype, base=(array, capsule))
    if on_cpu and buffer.nbytes:
        with uninterrupted:
            if driver.memory_adopt(address, buffer.nbytes, buffer.base):
                end = partial(driver.memory_end_adopted, address)
                weakref.finalize(buffer, context.retire, end).atexit = False
    return buffer


def _dtype(kind: _DataType) -> np.dtype[Any]:
    if (kind.code, kind.bits, kind.lanes) == (4, 16, 1):
        return BF16
    names = {0: "i", 1: "u", 2: "f", 5: "c", 6: "u"}  # 6: bool
    if kind.lanes != 1 or kind.code not in names or kind.bits % 8:
        raise InputError(f"DLPack type code {kind.code} with {kind.bits} bits is not supported")
    return np.dtype(f"{names[kind.code]}{kind.bits // 8}")
