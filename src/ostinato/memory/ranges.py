"""The memory range of a buffer, or of another library's device array."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from ostinato.driver.api import MemoryRange
from ostinato.driver.signature import array_interface, element_bytes
from ostinato.errors import InputError

Target: TypeAlias = object
"""A Buffer, a device array of any library, or a MemoryRange."""


class KnownRanges:
    """`Driver.memory_range` for one pass over many addresses, most of which share an allocation:
    calls the driver once for each allocation, and each time for an address that is in none."""

    def __init__(self, find: Callable[[int], MemoryRange | None]) -> None:
        self._find = find
        # Replaced as a whole: nodes of one reading may be decoded by several threads.
        self._known: tuple[tuple[int, ...], tuple[MemoryRange, ...]] = (), ()
        self.notes: dict[Any, Any] = {}
        """Data of the readers that use this object, computed from the ranges."""

    def __call__(self, address: int) -> MemoryRange | None:
        """Returns the live allocation that holds an address, or None."""
        starts, ranges = self._known
        place = bisect_right(starts, address)
        if place:
            known = ranges[place - 1]
            if address < known.address + known.nbytes:
                return known
        found = self._find(address)
        if found is not None:
            self._known = (
                (*starts[:place], found.address, *starts[place:]),
                (*ranges[:place], found, *ranges[place:]),
            )
        return found


def merged(ranges: Iterable[MemoryRange]) -> list[MemoryRange]:
    """Returns the ranges in order of address, overlapping ones merged."""
    made: list[MemoryRange] = []
    for memory in sorted(ranges, key=lambda m: m.address):
        if made and memory.address < made[-1].end:
            end = max(made[-1].end, memory.end)
            made[-1] = MemoryRange(made[-1].address, end - made[-1].address)
        else:
            made.append(memory)
    return made


def range_of(target: Target, which: str = "target") -> MemoryRange:
    """Returns the memory of a buffer, of a device array of any library, or of a MemoryRange.

    Raises InputError, with `which` in the text, for other objects, such as an address alone, which
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


def _interface_range(interface: dict[str, Any]) -> MemoryRange:
    """Returns the range from the first to the last byte of an array, also of a strided one."""
    shape, data, strides = interface["shape"], interface["data"], interface.get("strides")
    size = element_bytes(interface["typestr"])
    if 0 in shape:
        return MemoryRange(int(data[0]), 0)
    if strides is None:
        return MemoryRange(int(data[0]), size * math.prod(map(int, shape)))
    reach = [(int(n) - 1) * int(stride) for n, stride in zip(shape, strides, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return MemoryRange(int(data[0]) + low, high - low + size)
