"""The memory range of a buffer, or of another library's device array."""

from __future__ import annotations

from typing import TypeAlias

from ostinato.driver.api import MemoryRange
from ostinato.driver.signature import array_interface
from ostinato.errors import InputError

__all__ = ["Target", "range_of"]

Target: TypeAlias = object
"""A Buffer, a device array of any library, or a MemoryRange."""


def range_of(target: Target, which: str = "target") -> MemoryRange:
    """The memory of a buffer, of a device array of any library, or of a MemoryRange.

    Raises InputError, with `which` in the text, for anything else, such as an address alone, which
    has no size.
    """
    if isinstance(target, MemoryRange):
        return target
    known = getattr(target, "range", None)
    if isinstance(known, MemoryRange):
        return known
    interface = array_interface(target)
    if interface is not None:
        return _interface_range(interface)
    raise InputError(
        f"the {which} ({type(target).__name__}) has no memory range; give a Buffer, a device "
        "array, or MemoryRange(address, nbytes)"
    )


def _interface_range(interface: dict[str, object]) -> MemoryRange:
    """From the first byte of an array to the end of its last, also for a strided array."""
    shape, data, typestr = interface["shape"], interface["data"], interface["typestr"]
    assert isinstance(shape, tuple) and isinstance(data, tuple) and isinstance(typestr, str)
    size = int(typestr[2:])
    strides = interface.get("strides")
    if 0 in shape:
        return MemoryRange(int(data[0]), 0)
    if not isinstance(strides, tuple):
        for extent in shape:
            size *= int(extent)
        return MemoryRange(int(data[0]), size)
    reach = [(int(n) - 1) * int(stride) for n, stride in zip(shape, strides, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return MemoryRange(int(data[0]) + low, high - low + size)
