"""Pools from which captures allocate: stable addresses, reported growth.

A pool takes large slabs from the driver and gives out pieces one after another.  A piece is never
moved and never given out twice, so its address stays valid for every graph that holds it, until the
pool is closed.

States: OPEN (allocates; captures may use it) -> SEALED (refuses both) -> OPEN again -> closed.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from ostinato.driver.api import parse_bytes
from ostinato.driver.closeable import Closeable
from ostinato.driver.context import Context
from ostinato.driver.forking import new_lock
from ostinato.driver.location import caller_location
from ostinato.driver.signature import BYTES
from ostinato.errors import ClosedError, PoolSealedError
from ostinato.logs import logger
from ostinato.memory.buffer import Buffer, allocate, as_shape, device_dtype
from ostinato.records import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

_ALIGNMENT = 256


class PoolState(enum.Enum):
    """The state of a pool, which decides whether it allocates."""

    OPEN = "open"
    SEALED = "sealed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Growth:
    """A slab that was allocated in a capture: its bytes, the line that needed it, its owner."""

    nbytes: int
    location: str
    name: str | None


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Bytes taken from the driver, given out, and given out by name (None: without one); growth
    during captures."""

    state: PoolState
    reserved: int
    allocated: int
    by_name: dict[str | None, int] = field(default_factory=dict)
    grown_in_capture: tuple[Growth, ...] = ()


def _for(name: str | None) -> str:
    """Returns the name of the memory as a text."""
    return "" if name is None else f" for {name!r}"


class CapturePool(Closeable):
    """Memory for captured graphs to point at.

        pool = device.pool(reserve="1 MiB")
        with ost.capture(stream, pool=pool) as capture:
            y = pool.empty(1024, "f4")

    `reserve` bytes are taken at once, so that captures need not grow the pool; `slab` is the
    smallest growth in bytes.  Pieces are freed only with the whole pool: `close()` it after the
    graphs.  Thread-safe.
    """

    def __init__(
        self,
        context: Context,
        *,
        reserve: int | str = 0,
        slab: int | str = "1 MiB",
        name: str | None = None,
    ) -> None:
        first, least = parse_bytes(reserve, "reserve"), parse_bytes(slab, "slab", 1)
        self.context = context
        self.name = name
        self._slab = least
        self.state = PoolState.OPEN
        self._lock = new_lock()
        self._slabs: list[Buffer] = []
        self._used = 0  # bytes used of the last slab
        self._allocated: Counter[str | None] = Counter()
        self._growth: list[Growth] = []
        if first:
            self._slabs.append(allocate(context, first, BYTES))

    def __repr__(self) -> str:
        kept = f"{sum(slab.nbytes for slab in self._slabs)} bytes"
        where = self.context.driver.name
        return f"<CapturePool{self._named} of {kept} on {where}, {self.state.value}>"

    @property
    def _named(self) -> str:
        """Its name in a text, with a space before it."""
        return "" if self.name is None else f" {self.name!r}"

    def require_open(self, what: str) -> None:
        """Raises PoolSealedError or ClosedError, with `what` in the text."""
        self.context.require_open()
        if self.state is PoolState.SEALED:
            raise PoolSealedError(self.sealed_text(what))
        if self.state is PoolState.CLOSED:
            raise ClosedError(f"{what}: the pool{self._named} is closed")

    def sealed_text(self, what: str) -> str:
        """Returns the text of the PoolSealedError for `what`."""
        return (
            f"{what} needs memory from the sealed pool{self._named}: "
            "call pool.open() first, or seal it only after the last capture"
        )

    def seal(self) -> None:
        """Refuses allocations and captures from here on.  Buffers given out stay valid.

        Idempotent.  Raises ClosedError after `close`.
        """
        with self._lock:
            if self.state is not PoolState.SEALED:
                self.require_open("seal()")
                self.state = PoolState.SEALED

    def open(self) -> None:
        """Allows allocations and captures again after `seal`.  Raises ClosedError after `close`."""
        with self._lock:
            if self.state is PoolState.CLOSED:
                raise ClosedError(f"the pool{self._named} is closed; make another")
            self.state = PoolState.OPEN

    def empty(
        self,
        shape: int | Sequence[int],
        dtype: npt.DTypeLike,
        *,
        name: str | None = None,
    ) -> Buffer:
        """Allocates a buffer, aligned to 256 bytes, with undefined content.  `dtype` as for
        `Device.empty`.

        `name` labels the bytes in the statistics.  If the reserved memory is not enough during a
        capture, the pool grows, logs a warning, and keeps the line that needed the memory.  Raises
        PoolSealedError, ClosedError, OutOfMemoryError.
        """
        dims, kind = as_shape(shape), device_dtype(dtype)
        nbytes = math.prod(dims) * kind.itemsize
        with self._lock:
            self.require_open(f"an allocation of {nbytes} bytes{_for(name)}")
            piece = -(-max(1, nbytes) // _ALIGNMENT) * _ALIGNMENT
            slab = self._slab_with(piece, name)
            start = self._used
            self._used += piece
            self._allocated[name] += piece
        return slab.view(start, dims, kind)

    def _slab_with(self, piece: int, name: str | None) -> Buffer:
        if self._slabs and self._used + piece <= self._slabs[-1].nbytes:
            return self._slabs[-1]
        size = max(piece, self._slab)
        if self.context.captures:
            growth = Growth(size, caller_location(), name)
            with self.context.relaxed():
                slab = allocate(self.context, size, BYTES)
            self._growth.append(growth)
            logger(__name__).warning(
                "pool%s grew by %d bytes during a capture%s at %s; reserve more beforehand",
                self._named,
                size,
                _for(name),
                growth.location,
            )
        else:
            slab = allocate(self.context, size, BYTES)
        self._slabs.append(slab)
        self._used = 0
        return slab

    def statistics(self) -> PoolStatistics:
        """Returns the bytes reserved, allocated and by name, and the growth during captures."""
        with self._lock:
            return PoolStatistics(
                self.state,
                sum(s.nbytes for s in self._slabs),
                self._allocated.total(),
                dict(self._allocated),
                tuple(self._growth),
            )

    def close(self) -> None:
        """Frees the memory once no work under way can use it.  Idempotent.

        Graphs that still point into it must be closed before.
        """
        with self._lock:
            self.state = PoolState.CLOSED
            slabs, self._slabs = self._slabs, []
        for slab in slabs:
            slab.close()
