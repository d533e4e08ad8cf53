"""The host's state of each sequence, and the rows of sequences in a step.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.errors import InputError
from ostinato.lowlevel import uninterrupted
from ostinato.models.arguments import quoted, token_ids, whole
from ostinato.models.program import ACTIVE, DRAFTS, FROM_STATE, MASKED, ROW, SAMPLE


@dataclass(slots=True)
class Sequence:
    """The tokens and the state of one sequence.  `index`: its place in the KV cache, from 0.

    The cache holds keys and values of the first `length` of `tokens`; if there is one token more,
    it is the next to decode.  `on_device`: the sequence's state on the device agrees with this one.
    `ahead`: the device has computed further, so the logits there are of a later token.
    `has_logits`: unless `ahead`, the logits there are those that the last token was chosen from.
    `stopped`: the last token is an end token, or takes the limit or the end of the context.
    `limit`: the position that stops the sequence once a token takes it.
    `plain`: the sampling options ask for the likeliest token of the model's own logits, and for
    nothing else; so the sequence may draft.
    `logprobs_from`: the number of tokens that were chosen before the present sampling options.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    on_device: bool = False
    ahead: bool = False
    has_logits: bool = False
    stopped: bool = False
    limit: int = 0
    plain: bool = True
    logprobs_from: int = 0

    @property
    def room(self) -> int:
        """The most tokens until the sequence stops, one or more."""
        return max(1, self.limit - self.length)

    @property
    def next_token(self) -> int:
        """The token to decode next.  Raises InputError if there is none yet."""
        if self.length >= len(self.tokens):
            raise InputError(f"sequence {self.index} has no token to decode: prefill it first")
        return self.tokens[self.length]

    def keep_common(self, tokens: Items[int]) -> int:
        """Keeps the common prefix of the cache and `tokens`, but never all of `tokens`, so that one
        is left to prefill; returns the number of tokens kept."""
        most = min(self.length, len(tokens) - 1)
        kept = next((i for i in range(most) if self.tokens[i] != tokens[i]), max(0, most))
        with uninterrupted:
            del self.tokens[kept:]
            self.length = kept
            self.on_device = self.stopped = self.has_logits = False
            self.logprobs_from = min(self.logprobs_from, kept)
        return kept

    def kept(self, count: int) -> int:
        """Returns `count` as an int.  Raises InputError unless the sequence has that many."""
        count = whole(count, "count")
        if not 0 <= count <= len(self.tokens):
            raise InputError(
                f"sequence {self.index} has {len(self.tokens)} tokens; {count} cannot be kept"
            )
        return count

    @uninterrupted
    def truncate(self, count: int) -> None:
        """Keeps the first `count` tokens (checked by `kept`); the last of them is decoded next."""
        self.on_device = False
        if count < len(self.tokens):
            self.has_logits = self.stopped = False
        self.length = min(self.length, max(0, count - 1))
        self.logprobs_from = min(self.logprobs_from, count)
        del self.tokens[count:]


class Sequences:
    """The sequences of a decoder, with the checks of their arguments.

    `context`: positions of each sequence; `vocabulary`: number of token ids.
    """

    def __init__(self, count: int, *, context: int, vocabulary: int) -> None:
        self._sequences = tuple(Sequence(index) for index in range(count))
        self._context = context
        self._vocabulary = vocabulary

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, sequence: int) -> Sequence:
        """Returns a sequence by its number.  Raises InputError if there is no such sequence."""
        if type(sequence) is not int:
            sequence = whole(sequence, "sequence")
        if not 0 <= sequence < len(self._sequences):
            raise InputError(
                f"sequence {sequence}: there is no such sequence; the decoder has "
                f"{len(self._sequences)}, counted from 0"
            )
        return self._sequences[sequence]

    def ready(self, sequences: Iterable[int]) -> list[Sequence]:
        """Returns the sequences.  Raises InputError unless one step can decode all of them."""
        try:
            found = [self[sequence] for sequence in sequences]
        except TypeError:
            raise InputError(
                f"sequences is {quoted(sequences)}, must be a list of their numbers"
            ) from None
        named = [one.index for one in found]
        if not named or len(set(named)) != len(named):
            raise InputError(f"sequences {quoted(named)}: one or more are needed, each once")
        for one in found:
            if one.length >= self._context:
                raise InputError(f"sequence {one.index} is at the end of its context")
            if one.stopped:
                raise InputError(f"sequence {one.index} has stopped; reset or truncate it")
            _ = one.next_token  # raises if there is none
        return found

    def prompt(self, tokens: Iterable[int], sequence: Sequence) -> list[int]:
        """Returns the tokens as ints.  Raises InputError if there are none, if one is outside the
        vocabulary, or if they do not fit behind the tokens in the sequence's cache."""
        found = token_ids(tokens, self._vocabulary, "tokens")
        if not found:
            raise InputError("no tokens: a prompt has one at least")
        room = self._context - sequence.length
        if len(found) > room:
            raise InputError(
                f"{len(found)} tokens do not fit: the context of sequence {sequence.index} has "
                f"room for {room} more of {self._context} (max_context)"
            )
        return found


def prompt_rows(
    out: npt.NDArray[Any],
    sequence: int,
    tokens: Items[int],
    position: int,
    *,
    sample: bool,
    end: int | None = None,
) -> npt.NDArray[Any]:
    """Fills `out` with the rows of a piece of a prompt, the last of which samples if asked, and
    with padding.  `end`: the row after the piece's last one; the number of tokens if None.
    """
    out[...] = np.zeros((), ROW)
    end = len(tokens) if end is None else end
    _read(out[end - len(tokens) : end], sequence, tokens, position, sample=sample)
    return out


def prompts_rows(
    out: npt.NDArray[Any], sequences: Items[Sequence], prompts: Items[Items[int]]
) -> npt.NDArray[Any]:
    """Fills `out` with the rows of several prompts, each at the end of its sequence's cache, then
    padding; the last row of each prompt samples."""
    out[...] = np.zeros((), ROW)
    start = 0
    for one, tokens in zip(sequences, prompts, strict=True):
        _read(out[start : start + len(tokens)], one.index, tokens, one.length, sample=True)
        start += len(tokens)
    return out


def _read(
    rows: npt.NDArray[Any], sequence: int, tokens: Items[int], position: int, *, sample: bool
) -> None:
    rows["token"] = tokens
    rows["position"] = np.arange(position, position + len(tokens))
    rows["sequence"] = sequence
    rows["flags"] = ACTIVE
    if sample:
        rows["flags"][-1] = ACTIVE | SAMPLE


def mask_rows(rows: npt.NDArray[Any], sequences: Items[int]) -> None:
    """Marks the rows of these sequences that sample as MASKED."""
    flags = rows["flags"]
    flags[np.isin(rows["sequence"], sequences) & (flags & SAMPLE != 0)] |= MASKED


def decode_rows(
    out: npt.NDArray[Any],
    sequences: Items[Sequence],
    *,
    device_state: bool,
    room: Items[int] | None = None,
) -> npt.NDArray[Any]:
    """Fills `out` with one row for each sequence, and with padding.  With `device_state`, a row
    reads token and position from the device's state if that is up to date.  `room`: for a step that
    drafts, the rows of each sequence, of which the padding behind the first is for drafts."""
    out[...] = np.zeros((), ROW)
    index = 0
    for sequence, rows in zip(sequences, room or [1] * len(sequences), strict=True):
        flags = ACTIVE | SAMPLE | (DRAFTS if rows > 1 else 0)
        if device_state and sequence.on_device:
            out[index] = (0, 0, sequence.index, flags | FROM_STATE)
        else:
            out[index] = (sequence.next_token, sequence.length, sequence.index, flags)
        index += rows
    return out
