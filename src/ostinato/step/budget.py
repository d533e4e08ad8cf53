"""The device memory that a graph takes: a budget as text, a measurement, an estimate.

Measured on an H100 80GB (driver 580.159, CUDA 13.0) with 64 executables each of 1, 16, 280 and
2,000 chained kernel nodes of one argument, instantiated and uploaded:

* a kernel node takes 2,224 to 2,261 bytes, nearly the same for 280 and for 2,000 nodes;
* the driver takes memory in blocks of 2 MiB, so free memory does not change for most graphs, and
  falls by about 2 MiB for a few;
* the driver keeps the memory of destroyed executables for later graphs: free memory does not rise
  again, and the next graph of that size takes none.

So the change of free memory does not measure one small graph: it is 0 or 2 MiB.  A graph is charged

* with the bytes that the caller gives;
* with the change of free memory around its capture, if that exceeds its estimate by more than a
  block: the graph then allocated memory of its own (a pool, a module);
* else with its estimate by nodes, scaled by the bytes that all such graphs of the cache took
  together over the sum of their estimates (`SharedBlocks`).

Not guaranteed: that a growth of at most one block was caused by the graph.  If other threads or
processes allocate during captures, small graphs are charged too much until the cache is empty once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Self

from ostinato.driver.api import parse_bytes
from ostinato.driver.context import Context
from ostinato.errors import ClosedError
from ostinato.graph.executable import GraphExec
from ostinato.graph.node import Node

NODE_BYTES = 2304
"""Estimate for one node of an executable: the measured size, rounded up to 256."""

BLOCK_BYTES = 2 << 20
"""The size of the blocks in which the driver takes memory for executables."""


class FootprintSource(enum.StrEnum):
    """The source of the number of bytes that a graph is charged with."""

    GIVEN = "given"
    MEASURED = "measured"
    """The change of free memory around its capture."""
    ESTIMATED = "estimated"
    """The number of its nodes."""
    SHARED = "shared"
    """The number of its nodes, scaled by the blocks that it and other graphs took together."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of device memory that a graph is charged with, and where the number comes from.

    `grown` and `free` belong to an estimate: by how many bytes free memory fell during the capture,
    and how many bytes were free after it.  None if that is not known.
    """

    nbytes: int
    source: FootprintSource
    grown: int | None = None
    free: int | None = None


@dataclass(slots=True)
class SharedBlocks:
    """The blocks of memory that the small graphs of one cache share.

    The driver keeps the memory of graphs that left the cache, and gives it to later graphs.  So the
    memory taken is divided by the largest sum of estimates at any one time.
    Memory that graphs allocated themselves is given back when they leave: then free memory rises
    between two captures.
    """

    grown: int = 0
    """Bytes by which free memory fell in captures, less the bytes that were given back."""
    peak: int = 0
    """The largest sum of estimates, at any time, of the graphs that `grown` counts."""
    _free: int | None = None
    """Free memory after the last capture."""

    def note(self, grown: int, free: int, others: int, nbytes: int) -> None:
        """Counts a capture: free memory fell by `grown` bytes and is `free` now.  The estimate is
        `nbytes` for the graph, and `others` for all other graphs in the cache together."""
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
        """Returns the footprint to charge in place of an estimate: at least the estimate, and at
        most one block more.

        The last block may be partly empty, so it counts only once the next one is begun.
        Footprints from other sources are returned unchanged.
        """
        taken = self.grown - BLOCK_BYTES
        if footprint.source is not FootprintSource.ESTIMATED or taken <= self.peak:
            return footprint
        share = -(-footprint.nbytes * taken // self.peak) if self.peak else footprint.nbytes
        nbytes = min(share, footprint.nbytes + BLOCK_BYTES)
        return Footprint(nbytes, FootprintSource.SHARED, footprint.grown, footprint.free)


class MemoryMeter:
    """Measures by how many bytes free device memory falls inside the `with` block.

    Memory of objects closed earlier that the context frees meanwhile is added.  `taken` is None
    where the driver cannot tell; `free` is the free memory at the end of the block.  Not
    guaranteed: that this block caused the change, if other threads or processes allocate meanwhile.
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

    def __exit__(self, kind: object, *_: object) -> None:
        self._context.measuring(False)
        if self._before is not None and kind is None:
            self.free = self._context.free_memory()
            if self.free is not None:
                back = self._context.given_back - self._given_back
                self.taken = self._before - self.free + back


def footprint(
    executable: GraphExec,
    *,
    given: int | str | None = None,
    taken: int | None = None,
    free: int | None = None,
) -> Footprint:
    """Returns the bytes of a graph: given, or measured if it allocated its own, or estimated by
    nodes.

    `taken` and `free` are those of a `MemoryMeter` around the making of the executable.  Memory of
    alloc nodes belongs to the driver's pool and is not counted.  Raises InputError if `given` is no
    number of bytes.
    """
    nbytes = None if given is None else parse_bytes(given, "nbytes")
    try:
        # Read in any case: the executable caches its nodes, so the definition may be closed later.
        estimate = NODE_BYTES * _count(executable.nodes())
    except ClosedError:
        estimate = BLOCK_BYTES
    if nbytes is not None:
        return Footprint(nbytes, FootprintSource.GIVEN)
    if taken is not None and taken > estimate + BLOCK_BYTES:
        return Footprint(taken, FootprintSource.MEASURED)
    return Footprint(estimate, FootprintSource.ESTIMATED, taken, free)


def _count(nodes: tuple[Node, ...]) -> int:
    return len(nodes) + sum(_count(body) for node in nodes for body in node.children)
