"""What is measured of prompts, as rows.

A prompt is random tokens, other ones in each round and the same ones for all; it goes into the
empty cache of one sequence.  Its time is the wall time from the call, with the tokens on the host,
until the first token after them is in the caller's hand.

The floor is memory's alone: a contestant that takes a prompt in pieces needs every weight once for
each piece, and one that takes it whole needs it once, so each has a floor of its own.  Arithmetic
is not counted; for a long prompt taken whole it is what really bounds it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ostinato.bench.contest import Timed, random_tokens, record

__all__ = ["PromptRow", "first_tokens_differ", "prompt_tokens"]

_SEED = 23


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One contestant and one length of a prompt; in results its `kind` is "prompt".

    Times are microseconds.  `first_token_us` is the median of the rounds, and `tokens_per_second`
    the prompt's tokens over it.  `piece`: tokens that went through the layers at once.  `floor_us`:
    see above; `of_floor` is it over `first_token_us`.  `ours_is`: how many times as fast the
    fastest of our ways is.
    """

    way: str
    ours: bool
    prompt: int
    piece: int
    tokens_per_second: float
    first_token_us: float
    first_token_min_us: float
    first_token_max_us: float
    rounds: int
    floor_us: float
    of_floor: float
    ours_is: float | None

    @classmethod
    def of(
        cls,
        way: str,
        ours: bool,
        prompt: int,
        piece: int,
        *,
        runs: Sequence[Timed],
        floor_us: float,
        best_us: float | None,
    ) -> PromptRow:
        """`best_us`: of the fastest of our ways."""
        each = [run.seconds * 1e6 for run in runs]
        median = statistics.median(each)
        return cls(
            way=way,
            ours=ours,
            prompt=prompt,
            piece=piece,
            tokens_per_second=prompt * 1e6 / median,
            first_token_us=median,
            first_token_min_us=min(each),
            first_token_max_us=max(each),
            rounds=len(each),
            floor_us=floor_us,
            of_floor=floor_us / median,
            ours_is=None if best_us is None else median / best_us,
        )

    def as_dict(self) -> dict[str, object]:
        """For the results."""
        return record("prompt", asdict(self))


def prompt_tokens(vocabulary: int, count: int, number: int) -> list[int]:
    """A prompt of `count` tokens for round `number`."""
    return random_tokens(vocabulary, count, (_SEED, count, number))


def first_tokens_differ(runs: dict[str, list[Timed]], ours: Sequence[str]) -> str:
    """Where our ways chose different tokens after the same prompt, in words; or nothing."""
    for name in ours[1:]:
        for number, (one, other) in enumerate(zip(runs[ours[0]], runs[name], strict=True)):
            if one.tokens != other.tokens:
                return (
                    f"in round {number + 1} the first token is {one.tokens[0][0]} by {ours[0]} and "
                    f"{other.tokens[0][0]} by {name}"
                )
    return ""
