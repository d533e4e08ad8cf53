"""Memory that a checked step writes and that no slot declares: saved, put back, compared.

A graph's manifest lists the memory that the graph writes before it runs.  The writes of an eager
run are known only when it submits its work, and may be to other memory: a buffer that was replaced
since the capture, or one that is used only in a branch.  So the memory of each operation is saved
just before the operation is submitted.  Not found: writes by operations without a signature, host
functions, graphs that the step launches, and other libraries.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ostinato.driver.api import AllocNodeParams, MemoryRange
from ostinato.driver.context import CallKind, Tap
from ostinato.driver.stream import Operation, Stream
from ostinato.errors import InputError
from ostinato.graph import GraphExec
from ostinato.memory import Buffer
from ostinato.memory.ranges import merged, range_of
from ostinato.step.slots import Values

_GRAIN = 256
"""The size of the pieces in which memory is put back; only changed pieces are written."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """A piece of memory, its content before the check, and the objects that keep it alive."""

    memory: Buffer
    before: Values
    keep: tuple[object, ...]

    @property
    def lost(self) -> bool:
        """True if the memory was closed since, so that another buffer may be there now."""
        holders = [owner for owner in self.keep if _holds(owner, self.memory.range)]
        return bool(holders) and all(getattr(o, "closed", False) is True for o in holders)


class Undeclared:
    """The undeclared memory of one check.

    `known` is memory that is not saved here: slots, and the step's own.  `limit` is the largest
    number of bytes that are saved.
    """

    def __init__(self, stream: Stream, known: Sequence[MemoryRange], limit: int) -> None:
        self.skipped = 0
        """Bytes that were not saved because they exceed the limit."""
        self._stream = stream
        self._known = list(known)
        self._limit = limit
        self._saved: list[_Saved] = []

    @property
    def nbytes(self) -> int:
        """The number of saved bytes."""
        return sum(saved.memory.nbytes for saved in self._saved)

    # --- saving
    def save_written(self, executable: GraphExec) -> None:
        """Saves the memory that a graph may write, small pieces first."""
        context = self._stream.context
        pieces = _without(_written(executable), self._known)
        for piece in sorted(pieces, key=lambda memory: memory.nbytes):
            owner = context.owner_of(piece.address)
            self._save(piece, self._stream, () if owner is None else (owner,))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Saves the memory that this thread's operations in the block write, before they run."""
        with self._stream.context.tapped(_Saver(self)):
            yield

    def save(self, operation: Operation, stream: Stream) -> None:
        """Saves the memory that an operation writes, before it is submitted to the stream."""
        for piece in _without(operation.writes or (), self._known):
            owner = stream.context.owner_of(piece.address)
            keep = operation.keep if owner is None else (*operation.keep, owner)
            self._save(piece, stream, keep)

    def _save(self, piece: MemoryRange, stream: Stream, keep: tuple[object, ...]) -> None:
        self._known.append(piece)
        if self.nbytes + piece.nbytes > self._limit:
            self.skipped += piece.nbytes
            return
        memory = Buffer(stream.context, piece.address, (piece.nbytes,), np.dtype(np.uint8))
        self._saved.append(_Saved(memory, memory.to_numpy(stream), keep))

    # --- comparing and putting back
    def read(self) -> tuple[Values, ...]:
        """Returns the present content of all saved memory; for lost memory, the saved content."""
        return tuple(
            saved.before if saved.lost else saved.memory.to_numpy(self._stream)
            for saved in self._saved
        )

    def difference(self, one: Sequence[Values], other: Sequence[Values]) -> tuple[str, str] | None:
        """Returns the place and the values of the first difference between two readings, or None.

        A piece that was saved after a reading is not in that reading; its saved content is used.
        """
        for index, saved in enumerate(self._saved):
            a, b = (r[index] if index < len(r) else saved.before for r in (one, other))
            different = np.flatnonzero(a != b)
            if len(different):
                at = int(different[0])
                where = f"{saved.memory.nbytes} bytes at {saved.memory.range.address:#x}"
                return where, f"byte {at} is {a[at]} eagerly, {b[at]} by replay"
        return None

    def restore(self) -> None:
        """Writes back the changed pieces only: the other pieces may have other owners."""
        for saved in self._saved:
            if not saved.lost:
                now = saved.memory.to_numpy(self._stream)
                for start, stop in _changed_pieces(saved.before, now):
                    saved.memory[start:stop].set(saved.before[start:stop], self._stream)


class _Saver(Tap):
    """A tap that saves the memory of each operation of one thread before it is submitted."""

    needs_access = True

    def __init__(self, undeclared: Undeclared) -> None:
        self._undeclared = undeclared
        self._thread = threading.get_ident()

    def entering(
        self, stream: Stream, what: str, kind: CallKind, operation: Operation | None
    ) -> None:
        if operation is not None and threading.get_ident() == self._thread:
            self._undeclared.save(operation, stream)


def _holds(owner: object, memory: MemoryRange) -> bool:
    try:
        return range_of(owner).holds(memory.address)
    except InputError:  # a kernel, or another object without memory
        return False


def _written(executable: GraphExec) -> list[MemoryRange]:
    """Returns allocated memory that nodes may write, by address, overlaps merged."""
    driver = executable.context.driver
    made = [p for p in (n.params for n in executable.nodes()) if isinstance(p, AllocNodeParams)]
    found: list[MemoryRange] = []
    for touch in executable.manifest():
        address = touch.range.address
        if not touch.written or any(p.address <= address < p.address + p.nbytes for p in made):
            continue
        live = driver.memory_range(address)
        if live is not None:
            found.append(MemoryRange(address, min(touch.range.end, live.end) - address))
    return merged(found)


def _without(ranges: Sequence[MemoryRange], taken: Sequence[MemoryRange]) -> list[MemoryRange]:
    left: list[MemoryRange] = []
    for memory in ranges:
        start = memory.address
        for other in sorted(taken, key=lambda m: m.address):
            if other.address >= memory.end or other.end <= start:
                continue
            if other.address > start:
                left.append(MemoryRange(start, other.address - start))
            start = max(start, other.end)
        if start < memory.end:
            left.append(MemoryRange(start, memory.end - start))
    return left


def _changed_pieces(was: Values, is_: Values) -> list[tuple[int, int]]:
    """Returns the pieces of `_GRAIN` bytes in which two arrays differ, neighbours joined."""
    different = np.flatnonzero(was != is_)
    pieces: list[tuple[int, int]] = []
    for grain in np.unique(different // _GRAIN):
        start, stop = int(grain) * _GRAIN, min((int(grain) + 1) * _GRAIN, len(was))
        if pieces and pieces[-1][1] == start:
            pieces[-1] = (pieces[-1][0], stop)
        else:
            pieces.append((start, stop))
    return pieces
