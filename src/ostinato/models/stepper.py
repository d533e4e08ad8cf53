"""Runs steps for sequences: copies rows to the device, takes tokens back, updates the host's state.

The host's state of a sequence (`Sequence`) changes only when the host takes a token.  So after an
exception, or if the device is ahead, the next step sends token and position again, and overwrites
the KV cache behind them.

Tokens come back through a pinned ring (`program.RING`).  An entry is one word of 8 bytes: the tag
in the upper half, which names the token's position, and the token in the lower.  A word whose tag
does not name the position that the host waits for is not written yet.  An entry must not hold that
position from an earlier step: `forget` clears the entry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ostinato import Buffer, Stream
from ostinato.errors import LogitsError
from ostinato.models.decoder_statistics import Phases
from ostinato.models.plan import BufferPlan
from ostinato.models.program import LOGPROBS, MORE, ROW
from ostinato.models.sequences import (
    Sequence,
    decode_rows,
    mask_rows,
    prompt_rows,
    prompts_rows,
)
from ostinato.models.step_graphs import StepGraphs

if TYPE_CHECKING:
    from ostinato.models.ranks import Ranks

# The time that the host polls for a token before it waits without using the processor.
_SPIN_SECONDS = 0.002
_PAUSE_SECONDS = (5e-5, 1e-3)  # between two checks after that time: the first, and the longest


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that a step may choose for some of its sequences.

    `fill` is called once in the step, after its layers are launched, so that it runs while the
    device computes them.  It is given uint32 words, [sequences of the decoder, vocabulary / 32
    rounded up], and sets those of each of `sequences`: bit t % 32 of word t // 32 allows token t.
    It must not use the decoder.  Of several ranks only rank 0's is called, and all use its words.
    """

    sequences: tuple[int, ...]
    fill: Callable[[npt.NDArray[np.uint32]], object]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural logarithms of probabilities of a token and of the likeliest ones at its place.

    They are those of the model's own distribution: before temperature, penalties, biases, masks and
    filters.  `top`: pairs of token and log probability, likeliest first, of equal ones the lowest
    token first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class TokenRing:
    """The host's side of the ring of tokens.  `spins`: see `Backend`; it can be changed between
    steps.

    A token is identified by its sequence and a number `step`: its position is the number of tokens
    in the sequence's cache plus `step`.
    """

    def __init__(self, ring: Buffer, stream: Stream, *, spins: bool) -> None:
        self._array = ring.array
        self._words = [memoryview(row.view(np.int64)) for row in ring.array]
        self.size: int = ring.shape[1]
        """The most tokens of a sequence that may be written and not yet taken."""
        self._stream = stream
        self.spins = spins

    def forget(self, sequence: Sequence, step: int) -> None:
        """Clears the entry of a token that is still to come; no step that writes to the entry may
        be under way."""
        self._words[sequence.index][(sequence.length + step) % self.size] = -1

    def forget_all(self, sequence: Sequence) -> None:
        """Clears all entries of a sequence; no step of the sequence may be under way."""
        self._array[sequence.index]["tag"] = -1

    def word(self, sequence: Sequence, step: int) -> tuple[int, bool]:
        """Returns the token and True if the sequence stopped there; the token is negative if the
        logits held NaN.  The caller must have waited for the token."""
        word = self._words[sequence.index][(sequence.length + step) % self.size]
        token = word & 0xFFFFFFFF
        return token & ~MORE if token < 1 << 31 else -1, bool(word >> 32 & 1)

    def has_more(self, sequence: Sequence) -> bool:
        """True if the step that chose the sequence's last token has chosen more tokens."""
        word = self._words[sequence.index][sequence.length % self.size]
        return word & (MORE | 1 << 31) == MORE

    def _missing(self, sequences: Items[Sequence], steps: Items[int]) -> bool:
        words, size = self._words, self.size
        for sequence, step in zip(sequences, steps, strict=True):
            position = sequence.length + step
            if words[sequence.index][position % size] >> 33 != position:
                return True
        return False

    def wait(self, sequences: Items[Sequence], steps: Items[int], *, last: bool) -> None:
        """Waits until the token of each sequence, at its `step`, is in the ring.

        Polling pinned memory is some microseconds faster than any wait.  After `_SPIN_SECONDS`
        without a token the host synchronises the stream if this is the stream's `last` work;
        otherwise it checks ring and stream at intervals.  Raises the stream's error if the work
        failed.
        """
        missing = self._missing
        if self.spins:
            give_up = time.perf_counter() + _SPIN_SECONDS
            while missing(sequences, steps):
                if time.perf_counter() > give_up:
                    break
            else:
                return
        if last:
            self._stream.synchronize()
        else:
            pause, longest = _PAUSE_SECONDS
            while missing(sequences, steps) and not self._stream.done():
                time.sleep(pause)
                pause = min(2 * pause, longest)
        assert not missing(sequences, steps), "a step skipped a row that was active"


class Stepper:
    """The steps of one decoder.  Calls must not overlap.  `ranks`: the decoder's membership in a
    group, if any; waits then raise GroupError if the group fails."""

    def __init__(
        self,
        plan: BufferPlan,
        steps: StepGraphs,
        ring: TokenRing,
        phases: Phases,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self.steps = steps
        self.ring = ring
        self.phases = phases
        self._plan = plan
        self._stream = steps.stream
        self._rows = np.zeros(plan.sizes.rows, ROW)
        self._rows_on_device = b""
        self._settled = True
        self._drafting: set[int] = set()  # sequences that draft in the steps launched ahead

    # --- one step
    def prompt(
        self,
        sequence: Sequence,
        tokens: Items[int],
        progress: Callable[[int, int], None] | None = None,
        *,
        choose: bool = True,
        masks: TokenMasks | None = None,
    ) -> int:
        """Appends tokens to a sequence's KV cache, in pieces; returns the token chosen after them,
        or -1 without a wait if `choose` is False.

        Raises LogitsError.
        """
        chosen, start = -1, 0
        with self.phases.measure("prefill", len(tokens)):
            while start < len(tokens):
                stop = start + self.steps.piece(len(tokens) - start)
                piece = tokens[start:stop]
                last = choose and stop == len(tokens)
                end = self._plan.sizes.piece_end(len(piece))
                rows = prompt_rows(
                    self._rows, sequence.index, piece, sequence.length, sample=last, end=end
                )
                self._set_rows(rows, masks)
                if last:
                    (chosen,) = _all(*self._sampled([sequence], [piece], end, masks))
                else:
                    self.steps(end, sampled=False)
                    sequence.tokens.extend(piece)
                    sequence.length += len(piece)
                if progress is not None:
                    progress(stop, len(tokens))
                start = stop
            if self._ranks is not None:
                self._ranks.agreed()
        return chosen

    def prompts(
        self,
        sequences: list[Sequence],
        prompts: Items[Items[int]],
        masks: TokenMasks | None = None,
    ) -> list[int]:
        """Appends a prompt to each sequence and returns the chosen tokens, in order.  Consecutive
        prompts that fit into one step that samples run together.  After an exception the earlier
        steps are done; after a LogitsError all are."""
        chosen: dict[int, int] = {}
        failed: dict[int, int] = {}
        most = min(self._plan.sizes.sampled_rows, self._plan.sizes.rows)
        stop = 0
        while stop < len(prompts):
            first, count = stop, 0
            while stop < len(prompts) and count + len(prompts[stop]) <= most:
                count += len(prompts[stop])
                stop += 1
            if stop - first < 2:
                stop = first + 1
                try:
                    one = sequences[first]
                    chosen[one.index] = self.prompt(one, prompts[first], masks=masks)
                except LogitsError as error:
                    failed |= error.failed
                continue
            some, theirs = sequences[first:stop], prompts[first:stop]
            with self.phases.measure("prefill", count):
                self._set_rows(prompts_rows(self._rows, some, theirs), masks)
                found, broken = self._sampled(some, theirs, count, masks)
            chosen |= found
            failed |= broken
        return _all(chosen, failed)

    def together(
        self, sequences: list[Sequence], *, device_state: bool, masks: TokenMasks | None = None
    ) -> list[int]:
        """Runs one step, waits for it and returns the next token of each sequence.

        Raises InputError if a sequence has no token to decode, LogitsError.
        """
        phases, begin = self.phases, time.perf_counter()
        try:
            self._set_rows(decode_rows(self._rows, sequences, device_state=device_state), masks)
            chosen, failed = self._sampled(sequences, (), self.rows(sequences, masks), masks)
            phases.tokens["decode"] += len(chosen)
            return _all(chosen, failed)
        finally:
            phases.seconds["decode"] += time.perf_counter() - begin

    def _sampled(
        self,
        sequences: list[Sequence],
        pieces: Items[Items[int]],
        rows: int,
        masks: TokenMasks | None,
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Runs a step of `rows` rows that samples once for each sequence; returns as `_take` does.

        `pieces`: the tokens of each sequence in this step; empty for a decode step.
        """
        steps = [len(piece) for piece in pieces] or [1] * len(sequences)
        self._settle()
        for sequence, step in zip(sequences, steps, strict=True):
            # Set again once the step has ended without an error.
            sequence.on_device = sequence.has_logits = False
            self.ring.forget(sequence, step)
        self._settled = False
        masked = {one.index for one in sequences} & {*(masks.sequences if masks else ())}
        if masks is None or not masked:
            self.steps(rows)
        else:
            self.steps(rows, sampled=False)
            self._fill(masks, masked)
            self.steps.end(rows)
        self._wait(sequences, steps, last=True)
        self._settled = True
        chosen, failed = self._take(sequences, steps, pieces)
        # Not earlier: after an interruption no token may have the logits of another one.
        for sequence in sequences:
            sequence.has_logits = True  # also those that hold NaN
            if sequence.index not in failed:
                sequence.on_device = True
                sequence.ahead = False
        return chosen, failed

    def _fill(self, masks: TokenMasks, masked: Iterable[int]) -> None:
        """Makes the masks of a step, whose ending is not launched yet, for the sequences `masked`.

        The tokens of every earlier step with masks must have been taken: none still reads them."""
        words = self._plan.allowed.array
        if self._ranks is None:
            masks.fill(words)
        else:
            span = slice(min(masked), max(masked) + 1)
            self._ranks.fill_masks(masks.fill, words, span)

    def _take(
        self, sequences: list[Sequence], steps: Items[int], pieces: Items[Items[int]] = ()
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Moves the tokens from the ring into the sequences.  Returns the chosen tokens by
        sequence, and the positions by sequence where the logits held NaN; these sequences do not
        change."""
        chosen: dict[int, int] = {}
        failed: dict[int, int] = {}
        for index, (sequence, step) in enumerate(zip(sequences, steps, strict=True)):
            token, stopped = self.ring.word(sequence, step)
            if token < 0:
                failed[sequence.index] = sequence.length + step
                continue
            chosen[sequence.index] = token
            piece = pieces[index] if pieces else ()
            # Assigned by index: an interruption between these lines must not store a token twice.
            sequence.tokens[sequence.length + (not piece) :] = (*piece, token)
            sequence.length += step
            sequence.stopped = stopped
        return chosen, failed

    def logprobs(self, sequence: Sequence, count: int) -> TokenLogprobs:
        """Returns the logprobs of the sequence's last token, with the `count` likeliest ones."""
        entries = self._plan.logprobs.array.view(LOGPROBS)[..., 0]
        one = entries[sequence.index, sequence.length % self.ring.size]
        tokens, found = (one[name][:count].tolist() for name in ("tokens", "top"))
        pairs = tuple(zip(tokens, found, strict=True))
        return TokenLogprobs(sequence.tokens[-1], float(one["chosen"]), pairs)

    # --- many steps, the host behind
    def room(self, sequences: Items[Sequence], masks: TokenMasks | None = None) -> list[int]:
        """Returns the rows of each sequence in a step that drafts; 1 for one that cannot draft."""
        masked = masks.sequences if masks is not None else ()
        plain = [one.plain and one.index not in masked for one in sequences]
        drafting = sum(plain)
        each = self._plan.sizes.drafting(drafting, len(plain) - drafting)
        return [each if drafts else 1 for drafts in plain]

    def rows(self, sequences: Items[Sequence], masks: TokenMasks | None = None) -> int:
        """Returns the rows of a step of these sequences, the same whether it drafts or not, so that
        no token depends on it."""
        return sum(self.room(sequences, masks)) if self._plan.sizes.lookup else len(sequences)

    def begin_ahead(
        self,
        sequences: list[Sequence],
        *,
        drafts: bool = False,
        masks: TokenMasks | None = None,
    ) -> None:
        """Prepares steps of these sequences that are launched before their tokens are taken.

        All sequences must be `on_device`.  The host writes no rows until `end_ahead`.  `drafts`:
        the steps draft, and leave no logits of the sequences that do.  `masks`: of the steps
        (`choose`).
        """
        self._settle()
        room = self.room(sequences, masks) if drafts else [1] * len(sequences)
        self._set_rows(decode_rows(self._rows, sequences, device_state=True, room=room), masks)
        self._drafting = {one.index for one, rows in zip(sequences, room, strict=True) if rows > 1}
        for sequence in sequences:
            sequence.on_device = False  # the device's state is ahead of the host's
            sequence.has_logits = sequence.has_logits and sequence.index not in self._drafting
            self.ring.forget_all(sequence)

    def choose(
        self, rows: int, masks: TokenMasks, sequences: Items[Sequence], *, drafts: bool
    ) -> None:
        """Ends a step of `rows` rows, whose layers are launched, with these masks."""
        masked = {one.index for one in sequences} & {*masks.sequences}
        if masked:
            self._fill(masks, masked)
        self.steps.end(rows, drafts=drafts)

    def take_next(self, sequences: list[Sequence]) -> list[int]:
        """Waits for the next token of each sequence and takes it.  Raises LogitsError."""
        begin = time.perf_counter()
        steps = [1] * len(sequences)
        self._wait(sequences, steps, last=False)
        chosen, failed = self._take(sequences, steps)
        phases = self.phases
        phases.tokens["decode"] += len(chosen)
        phases.seconds["decode"] += time.perf_counter() - begin
        return _all(chosen, failed)

    def count_drafted(self, sequences: Items[Sequence], *, first: bool) -> list[Sequence]:
        """Counts the tokens just taken of a step that drafts; returns the sequences of which it has
        more.  `first`: they are the first ones of the step."""
        drafting = len(self._drafting.intersection(one.index for one in sequences))
        self.phases.lookup_tokens += drafting
        self.phases.lookup_steps += drafting * first
        return [one for one in sequences if self.ring.has_more(one)]

    def end_ahead(self, sequences: list[Sequence], further: Callable[[Sequence], bool]) -> None:
        """Ends launching ahead.  `further`: whether the device may have computed tokens of a
        sequence that were not taken."""
        for sequence in sequences:
            if not sequence.stopped:
                sequence.ahead = further(sequence)
                sequence.on_device = not sequence.ahead
                self._settled = self._settled and sequence.on_device

    def _wait(self, sequences: Items[Sequence], steps: Items[int], *, last: bool) -> None:
        """Waits for the token of each sequence, see `TokenRing.wait`; watches the group."""
        if self._ranks is None:
            self.ring.wait(sequences, steps, last=last)
            return
        self._ranks.agreed()
        one = sequences[0]
        what = f"the token of sequence {one.index} for position {one.length + steps[0]}"
        with self._ranks.group.watching(what):
            self.ring.wait(sequences, steps, last=last)

    def _settle(self) -> None:
        """Waits for an interrupted step, which could still write to ring entries that the next
        step uses."""
        if not self._settled:
            ranks, what = self._ranks, "an earlier step"
            with nullcontext() if ranks is None else ranks.group.watching(what):
                self._stream.synchronize()
            self._settled = True

    def _set_rows(self, rows: npt.NDArray[Any], masks: TokenMasks | None = None) -> None:
        """Sets all rows in one staged copy, unless the device has them already."""
        if masks is not None:
            mask_rows(rows, masks.sequences)
        data = rows.tobytes()
        if data != self._rows_on_device:
            self._rows_on_device = b""
            self._plan.rows.set(rows, self._stream)
            self._rows_on_device = data
            self.phases.host_writes += 1


def _all(chosen: dict[int, int], failed: dict[int, int]) -> list[int]:
    """Returns the tokens in order.  Raises LogitsError if a sequence has none."""
    if failed:
        raise LogitsError(failed, chosen)
    return [*chosen.values()]
