"""The options of a comparison, and the points at which it measures.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostinato.device import Device
from ostinato.errors import InputError
from ostinato.models import LlamaConfig
from ostinato.models.backend import LibraryRows, WeightsKind

MOST_ROWS = 64
"""The most sequences that a decoder steps at once."""


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """The options of a comparison.

    `batches`, `contexts`: see `ostinato.bench.decode`.  `tokens`: tokens of each sequence in a run.
    `tokens_per_launch`: each number above 1 is a way with a WHILE node, whose runs have the next
    lower multiple of `tokens`.
    `uneven`: True to place the sequences of a batch at different positions (`positions_of`), which
    only our ways support.
    `prompts`: lengths of prompts to measure as well; our decoders then have room for the longest.
    `library_rows`, `weights`: see `Decoder`.  `rounds`: most rounds of a point; fewer if time runs
    short, but one at least.  `seconds`: the time of the comparison; a point gets its share of the
    time left, and no compilation begins if too little is left for it.
    """

    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (20,)
    uneven: bool = False
    tokens: int = 100
    tokens_per_launch: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    library_rows: LibraryRows = "auto"
    weights: WeightsKind = "auto"
    rounds: int = 5
    seconds: float = 120.0

    @classmethod
    def usual(
        cls,
        device: Device,
        *,
        quick: bool = False,
        tokens: int | None = None,
        tokens_per_launch: tuple[int, ...] = (),
        rounds: int = 5,
        seconds: float | None = None,
        **given: Any,
    ) -> DecodeOptions:
        """Makes options with defaults that suit the device, since a step is slow on the CPU.
        `quick`: few tokens and one round."""
        slow = device.capabilities.host_memory_is_device_memory
        count = tokens or (8 if quick else 32 if slow else 100)
        return cls(
            tokens=count,
            tokens_per_launch=tokens_per_launch or (min(4 if quick else 16, count),),
            rounds=1 if quick else rounds,
            seconds=seconds or (45 if slow else 120),
            **given,
        )

    def require(self, config: LlamaConfig) -> None:
        """Raises InputError for options that are invalid or do not fit a model of this shape."""
        for name, given, needed in (  # these identify runs
            ("batch", self.batches, True),
            ("context", self.contexts, True),
            ("number of tokens a launch", self.tokens_per_launch, False),
            ("prompt", self.prompts, False),
        ):
            if needed and not given:
                raise InputError(f"no {name} was given")
            if len(set(given)) != len(given):
                raise InputError(f"a {name} was given twice: {', '.join(map(str, given))}")
        for batch in self.batches:
            if not 1 <= batch <= MOST_ROWS:
                raise InputError(f"batch {batch}: a step decodes 1 to {MOST_ROWS} sequences")
        longest = config.context_length
        for context in self.contexts:
            if not 0 <= context < longest:
                raise InputError(
                    f"context {context}: this model has {longest} positions, so that a token can "
                    f"have 0 to {longest - 1} before it"
                )
        for prompt in self.prompts:
            if not 1 <= prompt <= longest:
                raise InputError(
                    f"a prompt of {prompt} tokens: this model has {longest} positions, so 1 to "
                    f"{longest} can be given"
                )
        for name, value in (("tokens", self.tokens), ("rounds", self.rounds)):
            if value < 1:
                raise InputError(f"{name} is {value}, must be 1 or more")
        if self.tokens > longest:
            raise InputError(f"{self.tokens} tokens: this model has {longest} positions")
        for count in self.tokens_per_launch:
            if not 1 <= count <= self.tokens:
                raise InputError(
                    f"{count} tokens a launch: a run has {self.tokens} tokens; 1 to as many can "
                    "come from a launch"
                )


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a comparison.  `first`: the position of the first token, which is `context`, or
    less so that the run's last token fits in the model's context."""

    batch: int
    context: int
    first: int


def positions_of(batch: int, context: int, uneven: bool) -> tuple[int, ...]:
    """Returns the position of each sequence of a batch: `context`, or if `uneven` evenly spaced
    positions from `context` down to `context` / `batch`."""
    if not uneven:
        return (context,) * batch
    return tuple(context * (batch - i) // batch for i in range(batch))


def points_of(options: DecodeOptions, config: LlamaConfig) -> list[list[Point]]:
    """Returns the points in series; one set of decoders serves a series.  Contexts decrease."""

    def point(batch: int, context: int) -> Point:
        return Point(batch, context, min(context, config.context_length - options.tokens))

    first, *more = options.contexts
    if len(options.batches) == 1:
        falling = sorted(options.contexts, reverse=True)
        return [[point(options.batches[0], context) for context in falling]]
    series = [[point(batch, first) for batch in options.batches]]
    if more:
        series.append([point(options.batches[0], c) for c in sorted(more, reverse=True)])
    return series
