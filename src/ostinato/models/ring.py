"""The host's side of the pinned ring through which tokens come (see `program.RING`).

An entry is one word of 8 bytes: the tag, which says whose token it is, above the token.  So a word
that the host finds is either of the position it looks for, or not there yet; what an entry held
before must not be of that position, which is what `forget` is for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Items

import numpy as np

from ostinato import Buffer, Stream
from ostinato.models.sequences import Sequence

__all__ = ["TokenRing"]

# How long the host looks for a token before it waits in a way that leaves the processor to others.
_SPIN_SECONDS = 0.002
_PAUSE_SECONDS = (5e-5, 1e-3)  # between two looks: at first, and at most


class TokenRing:
    """Looks for the tokens of sequences.  `spins` as in `Backend`.

    A token is named by its sequence and how far it is from there: `step` 1 is the one that takes
    the position after the last in the cache.
    """

    def __init__(self, ring: Buffer, stream: Stream, *, spins: bool) -> None:
        self._array = ring.array
        self._words = [memoryview(row.view(np.int64)) for row in ring.array]
        self.size: int = ring.shape[1]
        """Tokens of a slot that may be there and not yet taken."""
        self._stream = stream
        self._spins = spins

    def forget(self, sequence: Sequence, step: int) -> None:
        """Clears the entry that a token will take; no step that writes it may be under way."""
        self._words[sequence.slot][(sequence.length + step) % self.size] = -1

    def forget_all(self, sequence: Sequence) -> None:
        """Clears all entries of a slot; no step of it may be under way."""
        self._array[sequence.slot]["tag"] = -1

    def word(self, sequence: Sequence, step: int) -> tuple[int, bool]:
        """(token, whether the sequence stopped there); the token is negative if the logits held
        NaN.  Only once it is there."""
        word = self._words[sequence.slot][(sequence.length + step) % self.size]
        token = word & 0xFFFFFFFF
        return token if token < 1 << 31 else -1, bool(word >> 32 & 1)

    def _missing(self, sequences: Items[Sequence], step: int) -> bool:
        words, size = self._words, self.size
        for sequence in sequences:
            position = sequence.length + step
            if words[sequence.slot][position % size] >> 33 != position:
                return True
        return False

    def wait(self, sequences: Items[Sequence], step: int, *, last: bool) -> None:
        """Returns once the token of each is there.

        A look at pinned memory is some microseconds faster than any wait.  After `_SPIN_SECONDS`
        without an answer the stream is waited for if this is its `last` work, else asked now and
        then.  Raises what that raises if the work failed.
        """
        missing = self._missing
        if self._spins:
            give_up = time.perf_counter() + _SPIN_SECONDS
            while missing(sequences, step):
                if time.perf_counter() > give_up:
                    break
            else:
                return
        if last:
            self._stream.synchronize()
        else:
            pause, longest = _PAUSE_SECONDS
            while missing(sequences, step) and not self._stream.done:
                time.sleep(pause)
                pause = min(2 * pause, longest)
        assert not missing(sequences, step), "a step skipped a row that was active"
