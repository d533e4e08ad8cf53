"""What memory that a caller names looks like: type, shape and strides, besides its bytes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ostinato.driver.api import MemoryRange
from ostinato.driver.signature import BYTES, array_interface, element_bytes
from ostinato.memory import Buffer
from ostinato.memory.ranges import Target

__all__ = ["Look", "look_of", "misfit"]


@dataclass(frozen=True, slots=True)
class Look:
    """Type (as in an array interface: "<f4"), shape, and strides in bytes; no strides if the
    elements are in C order."""

    typestr: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None

    def __str__(self) -> str:
        strides = "" if self.strides is None else f" with strides {list(self.strides)}"
        return f"{self.typestr}{list(self.shape)}{strides}"


def look_of(target: Target) -> Look | None:
    """None for memory that says nothing but its size.  Raises InputError as `array_interface`."""
    if isinstance(target, MemoryRange) or (isinstance(target, Buffer) and target.dtype is BYTES):
        return None
    if isinstance(target, Buffer | np.ndarray):
        return Look(target.dtype.str, tuple(target.shape), None)
    interface = array_interface(target)
    if interface is None:
        return None
    typestr = str(interface["typestr"])
    shape = tuple(int(n) for n in interface["shape"])
    strides = interface.get("strides")
    if strides is not None:
        strides = tuple(int(n) for n in strides)
        if strides == _in_order(shape, element_bytes(typestr)):
            strides = None
    return Look(typestr, shape, strides)


def _in_order(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The strides of elements in C order."""
    return tuple(size * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def misfit(wanted: Look | None, given: Look | None) -> bool:
    """Whether memory is laid out otherwise than what a graph was captured with.

    More rows are no misfit, nor is flat memory of bytes, nor whole numbers of one size in place of
    a type that NumPy does not have (bfloat16).
    """
    if wanted is None or given is None:
        return False
    if given.typestr[1:] == "u1" and len(given.shape) == 1 and given.strides is None:
        return False
    if wanted.strides != given.strides or wanted.typestr[2:] != given.typestr[2:]:
        return True
    kinds = {wanted.typestr[1], given.typestr[1]}
    if wanted.typestr != given.typestr and not ("V" in kinds and kinds <= {*"Vui"}):
        return True
    same = [n for n in wanted.shape if n != 1] == [n for n in given.shape if n != 1]
    more = len(wanted.shape) == len(given.shape) and wanted.shape[1:] == given.shape[1:]
    return not (same or more)
