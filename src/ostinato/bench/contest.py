"""The interface of a contestant in a comparison, and the record of one run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

__all__ = ["Contestant", "Timed", "Times", "random_tokens", "record"]


@dataclass(frozen=True, slots=True)
class Timed:
    """One run of a contestant.

    `seconds`: from the call until it has returned the last token of every sequence.
    `arrivals`: seconds from the call to each token of the first sequence, where they come one by
    one.  `tokens`: what was chosen, by sequence, where the contestant reads all of it.
    """

    seconds: float
    arrivals: tuple[float, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()


class Contestant(Protocol):
    """A way of decoding, or a library that decodes.

    `ours`: its tokens must be those of our other ways, bit for bit.  `multiple`: a run must decode
    a multiple of so many tokens, because each launch gives so many.  `no_prompts`: why its prompts
    are not measured; empty if they are.
    """

    name: str
    ours: bool
    multiple: int
    no_prompts: str

    def reserve(self, batch: int, positions: int) -> None:
        """Makes ready for `batch` sequences of so many positions.  May compile and capture."""

    def place(self, batch: int, context: int) -> None:
        """Sets each sequence to position `context`, with so many positions in its cache.  Not
        timed."""

    def decode(self, tokens: int) -> Timed:
        """Decodes so many tokens of each sequence, from where it is."""

    def piece(self, tokens: int) -> int:
        """How many tokens of such a prompt it takes at once."""

    def prompt(self, tokens: Sequence[int]) -> Timed:
        """Reads a prompt into the empty cache of one sequence and returns once the next token is
        chosen; `tokens` of the result is that token alone, of our ways."""

    def details(self) -> dict[str, object]:
        """Further facts for the results, beside its times."""

    def close(self) -> None:
        """Gives its memory back.  Idempotent."""


@dataclass(frozen=True, slots=True)
class Times:
    """A token's time over several runs, in microseconds: the whole run divided by its tokens."""

    median: float
    least: float
    most: float
    between: float | None
    """Median time from one token's arrival to the next one's, where they come one by one."""
    rounds: int

    @classmethod
    def of(cls, runs: Sequence[Timed], tokens: int) -> Times:
        each = [run.seconds / tokens * 1e6 for run in runs]
        gaps = [
            (later - earlier) * 1e6
            for run in runs
            for earlier, later in zip(run.arrivals, run.arrivals[1:], strict=False)
        ]
        between = statistics.median(gaps) if gaps else None
        return cls(statistics.median(each), min(each), max(each), between, len(each))


def random_tokens(vocabulary: int, count: int, seed: tuple[int, ...]) -> list[int]:
    """So many tokens; the same seed gives the same ones."""
    drawn = np.random.default_rng(seed).integers(0, vocabulary, count)
    return [int(token) for token in drawn]


def record(kind: str, fields: Mapping[str, object]) -> dict[str, object]:
    """A row for the results: its kind, and its fields with numbers to four digits."""
    plain: dict[str, object] = {"kind": kind, **fields}
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in plain.items()}
