"""The device memory that a graph takes: a budget as text, a measurement, an estimate.

Measured on an H100 80GB (driver 580.159, CUDA 13.0) with 64 executables each of 1, 16, 280 and
2,000 chained kernel nodes of one argument, instantiated and uploaded:

* a kernel node takes 2,224 to 2,261 bytes, nearly the same for 280 and for 2,000 nodes;
* the driver takes memory in blocks of 2 MiB, so free memory does not change for most graphs, and
  falls by about 2 MiB for one now and then;
* the driver keeps the memory of destroyed executables for later graphs: free memory does not rise
  again, and the next graph of that size takes none.

So the change of free memory is no measure of a small graph.  It is used only if it is larger than
those blocks can explain: then the graph brought its own memory (a pool, a module).
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ostinato.driver.context import Context
from ostinato.errors import ClosedError, DriverError, InputError
from ostinato.graph.executable import GraphExec
from ostinato.graph.node import Node

__all__ = [
    "BLOCK_BYTES",
    "NODE_BYTES",
    "Footprint",
    "FootprintSource",
    "MemoryMeter",
    "footprint",
    "parse_bytes",
]

NODE_BYTES = 2304
"""Estimate for one node of an executable: the measured size, rounded up to 256."""

BLOCK_BYTES = 2 << 20
"""The driver takes memory for executables in blocks of so many bytes."""

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"\s*(?P<number>\d+(\.\d+)?)\s*(?P<unit>[a-z]*)\s*\Z", re.IGNORECASE | re.ASCII)


def parse_bytes(value: int | str) -> int:
    """A number of bytes from 4096 or from "4 KiB", "512 MiB", "1.5 GB" (MiB 2**20, MB 10**6).

    Raises InputError for what cannot be read or is below 1 byte.
    """
    nbytes = 0
    if isinstance(value, str):
        match = _SIZE.match(value)
        unit = _UNITS.get(match["unit"].lower()) if match else None
        if match is None or unit is None:
            raise InputError(f'{value!r} is no number of bytes; write "512 MiB", "2 GB" or 4096')
        number = match["number"]
        nbytes = int(float(number) * unit) if "." in number else int(number) * unit
    elif isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        raise InputError(f'{value!r} is no number of bytes; write "512 MiB", "2 GB" or 4096')
    if nbytes < 1:
        raise InputError(f"{value!r}: 1 byte or more is needed (None is for no limit)")
    return nbytes


class FootprintSource(enum.StrEnum):
    """Where a graph's number of bytes is from."""

    GIVEN = "given"
    MEASURED = "measured"
    ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of device memory that a graph is charged with, and where the number is from."""

    nbytes: int
    source: FootprintSource


class MemoryMeter:
    """By how many bytes free device memory fell inside the `with` block.

    `taken` is None where the driver could not say.  Not guaranteed: that it was this block's work,
    if other threads or processes allocate meanwhile.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._before: int | None = None
        self.taken: int | None = None

    def __enter__(self) -> Self:
        self._before = self._free()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._before is not None and kind is None:
            after = self._free()
            self.taken = None if after is None else self._before - after

    def _free(self) -> int | None:
        try:
            return self._context.driver.memory_info()[0]
        except DriverError:
            return None  # a later call that uses the driver raises; a size need not


def footprint(
    executable: GraphExec, *, given: int | None = None, taken: int | None = None
) -> Footprint:
    """The bytes to charge: as given, or measured if that is plausible, or estimated by nodes.

    `taken` is what a `MemoryMeter` saw around the making of the executable.  Memory of alloc nodes
    is the driver's pool and not counted.  Raises InputError for a negative `given`.
    """
    if given is not None and given < 0:
        raise InputError(f"nbytes={given}: bytes cannot be negative")
    try:
        # Read in any case: the executable keeps what it read, so the definition may be closed.
        estimate = NODE_BYTES * _count(executable.nodes)
    except ClosedError:
        estimate = BLOCK_BYTES
    if given is not None:
        return Footprint(given, FootprintSource.GIVEN)
    if taken is not None and taken > estimate + BLOCK_BYTES:
        return Footprint(taken, FootprintSource.MEASURED)
    return Footprint(estimate, FootprintSource.ESTIMATED)


def _count(nodes: tuple[Node, ...]) -> int:
    return len(nodes) + sum(_count(body) for node in nodes for body in node.children)
