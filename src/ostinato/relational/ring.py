"""The ring of pinned memory through which a joiner and the device communicate.

    host                       entry and word of turn % depth   device, in stream order
    enter: pack the block ───▶ entry ───────────────────────▶ begin: block, state = turn + 1
    launch the chain ───────────────────────────────────────▶ insert … materialize
    look, wait ◀────────────── DONE ◀──────────────────────── the last block of the last kernel

An entry is reused only once its turn is done.  `begin` accepts only an entry of the next turn, so a
graph launched by other code does nothing.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable
from functools import partial

import numpy as np

from ostinato import Buffer, Device, Stream
from ostinato.errors import ClosedError, GraphError
from ostinato.lowlevel import new_lock
from ostinato.relational.block import DONE, MAX_BYTES, RING_DEPTH, RING_PITCH, Pattern

_DONE_BYTES = DONE.itemsize
_DONE_WORDS = _DONE_BYTES // 8
_SPINS = 100
"""Reads of a turn's word before the stream's state is queried."""


class RingTurn:
    """A turn of the ring: one launch of a chain.

    `keep` is held until the turn is `done`; `total` and `overflow` are valid from then on.
    """

    __slots__ = ("done", "keep", "number", "overflow", "total")

    def __init__(self, number: int, keep: tuple[object, ...]) -> None:
        self.number = number
        self.keep = keep
        self.done = False
        self.total = self.overflow = 0


class Ring:
    """Entries for the blocks of joins, and the words that report them done.

    `enter`, `launched` and `recover` are for one thread at a time; the rest is thread-safe.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self._stream = stream
        self._context = device.context
        self._entry_bytes = RING_DEPTH * RING_PITCH
        self.pinned = device.pinned(self._entry_bytes + RING_DEPTH * DONE.itemsize, "bytes")
        """Entries that `begin` reads, and the DONE records that the last kernel writes."""
        self.state = device.zeros(1, np.uint64)
        """Number of turns that `begin` has taken."""
        self.block = device.zeros(MAX_BYTES, "bytes")
        """The block of the join under way, on the device."""
        self.pinned.array[:] = 0
        bytes_ = self.pinned.array.data
        self._entries = bytes_[: self._entry_bytes]
        self._words = bytes_[self._entry_bytes :].cast("Q")
        self._done_address = self.pinned.address + self._entry_bytes
        self._under_way: deque[RingTurn] = deque()
        self._lock = new_lock()
        self.turns = 0
        """The number of the last turn, as the device must have counted it."""
        self.waits = 0
        """Number of waits because all entries were in use."""
        self.uncertain = False
        """True if the device's count may differ, or a turn may have been cut off."""
        self._closed = False
        # The memory stays until the stream's work is done, also if the ring is dropped.
        close = partial(_close, (self.pinned, self.state, self.block))
        self._finalizer = weakref.finalize(self, device.context.retire, close, (stream,))
        self._finalizer.atexit = False

    # --- launching
    def enter(self, pattern: Pattern, left: int, right: int, keep: tuple[object, ...]) -> RingTurn:
        """Writes the block of the next turn into its entry, once that is free.

        `left` and `right`: the addresses of the output.  The turn counts, and the ring is certain
        again, once it is `launched`; until then, `enter` returns the same turn again.
        """
        under_way, turns = self._under_way, self.turns
        with self._lock:
            while under_way and self._read(under_way[0]):
                under_way.popleft()
        if len(under_way) == RING_DEPTH:
            self.waits += 1
            self.wait(under_way[0])
            under_way.popleft()
        at = turns % RING_DEPTH
        turns += 1
        done = self._done_address + at * _DONE_BYTES
        pattern.write(self._entries, at * RING_PITCH, turns, left, right, done)
        self.uncertain = True
        return RingTurn(turns, keep)

    def launched(self, turn: RingTurn) -> None:
        """Records that the turn's chain is on the stream."""
        self.turns = turn.number
        self._under_way.append(turn)
        self.uncertain = False

    # --- results from the device
    def look(self, turn: RingTurn) -> bool:
        """Returns True if a turn is done; does not wait."""
        if turn.done:
            return True
        with self._lock:
            return self._read(turn)

    def _read(self, turn: RingTurn) -> bool:
        """Implements `look`, under the lock: the entry is not reused between these lines."""
        number, words = turn.number, self._words
        at = (number - 1) % RING_DEPTH * _DONE_WORDS
        if turn.done or self._context.closed or self._closed or words[at] != number:
            return turn.done
        turn.total, turn.overflow = words[at + 1], words[at + 2]
        turn.done, turn.keep = True, ()
        return True

    def wait(self, turn: RingTurn) -> None:
        """Waits until a turn is done.

        Raises the device's error; GraphError if the turn is lost: the stream is idle, and the
        device did not report the turn done.
        """
        looks = 0
        while not self.look(turn):
            if self._closed:
                raise ClosedError("the joiner was closed before this result was asked for")
            looks += 1
            if looks < _SPINS:
                continue
            if self._stream.done() and not self.look(turn):
                self.uncertain = True
                raise GraphError(
                    "this join was launched and did not come to its end, because a launch before "
                    "it failed or was interrupted; submit it again"
                )
            time.sleep(0 if looks < 10 * _SPINS else 50e-6)

    def recover(self) -> None:
        """Waits for the stream, and sets the device's count to that of this ring.

        The caller resets `uncertain` once the rest of the device's state is restored too.
        """
        self._stream.synchronize()
        for turn in self._under_way:
            self.look(turn)
            turn.keep = ()
        self._under_way.clear()
        # A turn may have run without being counted here: its word already reports its number done.
        self.turns += 1
        self.state.set(np.array([self.turns], np.uint64), self._stream)

    # --- lifetime
    def close(self) -> None:
        """Frees the memory once the stream's work is done.  Idempotent."""
        for turn in self._under_way:
            self.look(turn)
            turn.keep = ()
        self._under_way.clear()
        with self._lock:
            self._closed = True
        self._finalizer()
        self._context.collect()


def _close(buffers: Iterable[Buffer]) -> None:
    for buffer in buffers:
        buffer.close()
