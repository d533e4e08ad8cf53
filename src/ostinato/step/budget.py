"""The device memory that a graph takes: a budget as text, a measurement, an estimate.

Measured on an H100 80GB (driver 580.159, CUDA 13.0) with 64 executables each of 1, 16, 280 and
2,000 chained kernel nodes of one argument, instantiated and uploaded:

* a kernel node takes 2,224 to 2,261 bytes, nearly the same for 280 and for 2,000 nodes;
* the driver takes memory in blocks of 2 MiB, so free memory does not change for most graphs, and
  falls by about 2 MiB for a few;
* the driver keeps the memory of destroyed executables for later graphs: free memory does not rise
  again, and the next graph of that size takes none.

So the change of free memory does not measure one small graph: it is 0 or 2 MiB.  A graph is charged

* with what is given;
* with the change of free memory around its capture, if that is larger than its estimate by more
  than a block: then it allocated memory of its own (a pool, a module);
* else with its estimate by nodes, times what all such graphs of the cache took together over what
  they were estimated at together (`SharedBlocks`).

Not guaranteed: that a growth of at most one block was the graph's.  If other threads or processes
allocate so much during captures, small graphs are charged too much until the cache is empty once.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ostinato.driver.api import whole_number
from ostinato.driver.context import Context
from ostinato.errors import ClosedError, InputError
from ostinato.graph.executable import GraphExec
from ostinato.graph.node import Node

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
_SIZE = re.compile(
    r"\s*(?P<number>\d{1,20}(\.\d{1,20})?)\s*(?P<unit>[a-z]*)\s*\Z", re.IGNORECASE | re.ASCII
)


def parse_bytes(value: int | str) -> int:
    """A number of bytes from 4096 or from "4 KiB", "512 MiB", "1.5 GB" (MiB 2**20, MB 10**6).

    Raises InputError for what cannot be read or is below 1 byte.
    """
    nbytes = whole_number(value)
    match = _SIZE.match(value) if isinstance(value, str) else None
    unit = None if match is None else _UNITS.get(match["unit"].lower())
    if match is not None and unit is not None:
        number = match["number"]
        nbytes = int(float(number) * unit) if "." in number else int(number) * unit
    if nbytes is None:
        raise InputError(f'{value!r} is not a number of bytes; write "512 MiB", "2 GB" or 4096')
    if nbytes < 1:
        raise InputError(f"{value!r}: 1 byte or more is needed (None is for no limit)")
    return nbytes


class FootprintSource(enum.StrEnum):
    """Where the number of a graph's bytes comes from."""

    GIVEN = "given"
    MEASURED = "measured"
    """By the change of free memory around its capture."""
    ESTIMATED = "estimated"
    """By its nodes."""
    SHARED = "shared"
    """By its nodes, as a share of the blocks that it and other graphs took together."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of device memory that a graph is charged with, and where the number comes from.

    `grown` and `free` belong to an estimate: by how many bytes free memory fell during the capture,
    and how many were free after it.  None if that is not known.
    """

    nbytes: int
    source: FootprintSource
    grown: int | None = None
    free: int | None = None


@dataclass(slots=True)
class SharedBlocks:
    """The blocks of memory that the small graphs of one cache share.

    The driver keeps the memory of graphs that left the cache, and gives it to later graphs.  So the
    memory taken is divided by the largest number of bytes that graphs were estimated at together.
    Memory that graphs allocated themselves is given back when they leave: then free memory rises
    between two captures.
    """

    grown: int = 0
    """Bytes by which free memory fell in captures, less what was given back."""
    peak: int = 0
    """The most bytes that the graphs of `grown` were estimated at together, at any time."""
    _free: int | None = None
    """Free memory after the last capture."""

    def note(self, grown: int, free: int, others: int, nbytes: int) -> None:
        """Counts a capture: free memory fell by `grown` bytes and is `free` now; the graph was
        estimated at `nbytes`, and all other graphs in the cache at `others`."""
        if self._free is not None and self.peak:
            rose = free + grown - self._free
            left = self.grown * max(0, self.peak - others) // self.peak
            back = min(max(rose, 0), left)  # more than `left` was freed by others
            if back:
                self.peak -= self.peak * back // self.grown
                self.grown -= back
        self._free = free
        self.grown += max(grown, 0)
        self.peak = max(self.peak, others + nbytes)

    def share(self, footprint: Footprint) -> Footprint:
        """The footprint to charge in place of an estimate: at least the estimate, and at most one
        block more.

        The last block may be partly empty, so it is not counted until the next one is begun.
        Footprints from other sources are returned as they are.
        """
        taken = self.grown - BLOCK_BYTES
        if footprint.source is not FootprintSource.ESTIMATED or taken <= self.peak:
            return footprint
        share = -(-footprint.nbytes * taken // self.peak) if self.peak else footprint.nbytes
        nbytes = min(share, footprint.nbytes + BLOCK_BYTES)
        return Footprint(nbytes, FootprintSource.SHARED, footprint.grown, footprint.free)


class MemoryMeter:
    """By how many bytes free device memory fell inside the `with` block.

    Memory that the context freed meanwhile, of objects closed before, is added.  `taken` is None
    where the driver could not say; `free` is what was free at the end of the block.  Not
    guaranteed: that it was this block's work, if other threads or processes allocate meanwhile.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._before: int | None = None
        self._given_back = 0
        self.taken: int | None = None
        self.free: int | None = None

    def __enter__(self) -> Self:
        self._context.measuring(True)
        self._given_back = self._context.given_back
        self._before = self._context.free_memory()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._context.measuring(False)
        if self._before is not None and kind is None:
            self.free = self._context.free_memory()
            if self.free is not None:
                back = self._context.given_back - self._given_back
                self.taken = self._before - self.free + back


def footprint(
    executable: GraphExec,
    *,
    given: int | None = None,
    taken: int | None = None,
    free: int | None = None,
) -> Footprint:
    """The bytes of a graph: as given, or measured if it brought its own, or estimated by nodes.

    `taken` and `free` are what a `MemoryMeter` saw around the making of the executable.  Memory of
    alloc nodes is the driver's pool and not counted.  Raises InputError for a negative `given`.
    """
    if given is not None:
        number = whole_number(given)
        if number is None or number < 0:
            raise InputError(f"nbytes={given!r}: a whole number of 0 or more bytes is needed")
    try:
        # Read in any case: the executable keeps what it read, so the definition may be closed.
        estimate = NODE_BYTES * _count(executable.nodes())
    except ClosedError:
        estimate = BLOCK_BYTES
    if given is not None:
        return Footprint(given, FootprintSource.GIVEN)
    if taken is not None and taken > estimate + BLOCK_BYTES:
        return Footprint(taken, FootprintSource.MEASURED)
    return Footprint(estimate, FootprintSource.ESTIMATED, taken, free)


def _count(nodes: tuple[Node, ...]) -> int:
    return len(nodes) + sum(_count(body) for node in nodes for body in node.children)
