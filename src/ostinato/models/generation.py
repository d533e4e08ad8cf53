"""One answer in the making: an iterator over pieces of text, and its statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ostinato import Device
from ostinato.errors import ClosedError
from ostinato.models.arguments import counted
from ostinato.models.decoder import Decoder
from ostinato.models.sampling import SamplingOptions
from ostinato.models.stepper import TokenLogprobs
from ostinato.models.stop_strings import StopMatcher, checked_stops
from ostinato.models.text.tokenizer import Tokenizer


class Generator(Protocol):
    """The part of `TextGenerator` that its answers use."""

    device: Device
    decoder: Decoder
    tokenizer: Tokenizer
    load_seconds: float
    latest: Generation | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The result and the statistics of one generation.

    `finish_reason`: "stop" (an end token, or a stop string), "length" (`max_tokens`), "context" (no
    room left), "interrupted" (by the caller, or still under way).  `text`: the pieces yielded so
    far, joined.  `token_ids`: all chosen tokens, an end token and a stop string's tokens included.
    `sampling`: the options, with the seed.
    `cached_tokens`: tokens of the prompt that the KV cache held already.  `tokens_per_second`:
    decoding speed, measured from the first token on; 0 if there was no second token.
    `prompt_tokens_per_second`: prefill speed of the uncached tokens.  `time_to_first_token`:
    seconds since `generate`.

    `launches_eager`, `launches_replayed`, `graphs_captured`, `eager_reasons`: counts of this
    generation; one graph launch replaces `launches_per_token` eager launches, times
    `tokens_per_launch`.  `one_by_one`: reasons why a run did not go as asked (see
    `DecoderStatistics`).  `tokens_per_step`: average of the steps that drafted (`Decoder`'s
    `lookup`); 0 if none did.  `load_seconds`: load time of the model, the same for all generations.
    `library`, `weights`, `weight_bytes`: see `DecoderStatistics`.
    `ranks`: number of devices that share the model; `collectives`: their means of exchange.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    sampling: SamplingOptions
    prompt_tokens: int
    cached_tokens: int
    tokens_per_second: float
    prompt_tokens_per_second: float
    time_to_first_token: float
    load_seconds: float
    launches_eager: int
    launches_replayed: int
    launches_per_token: int
    tokens_per_launch: int
    tokens_per_step: float
    graphs_captured: int
    device: str
    eager_reasons: dict[str, int]
    one_by_one: dict[str, int]
    library: str
    weights: str
    weight_bytes: int
    ranks: int
    collectives: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as values that JSON can hold."""
        return {**asdict(self), "token_ids": list(self.token_ids)}

    def __str__(self) -> str:
        cached = f" ({self.cached_tokens} in the cache)" if self.cached_tokens else ""
        lines = [
            f"{counted(len(self.token_ids), 'token')} ({self.finish_reason}) at "
            f"{self.tokens_per_second:.1f} tokens/s, first after {self.time_to_first_token:.2f} s; "
            f"prompt {counted(self.prompt_tokens, 'token')}{cached} at "
            f"{self.prompt_tokens_per_second:.0f} tokens/s; "
            f"model loaded in {self.load_seconds:.2f} s",
            f"launches: {self.launches_eager} eager, {self.launches_replayed} of graphs "
            f"(each in place of up to {self.launches_per_token * self.tokens_per_launch}); "
            f"{counted(self.graphs_captured, 'graph')} captured; device {self.device}; "
            f"weights {self.weights}, {self.weight_bytes / 1e6:.0f} MB",
        ]
        if self.tokens_per_step:
            lines.append(f"drafts: {self.tokens_per_step:.2f} tokens a step")
        if self.ranks > 1:
            lines.append(f"one of {self.ranks} ranks, which exchange by {self.collectives}")
        if not self.sampling.is_greedy:
            lines.append(f"seed {self.sampling.seed}: the same seed gives the same answer")
        lines += [f"eager: {count} x {reason}" for reason, count in self.eager_reasons.items()]
        lines += [f"token by token: {reason}" for reason in self.one_by_one]
        if self.library.startswith("not used: "):
            lines.append(f"cuBLASLt {self.library}")
        return "\n".join(lines)


class AnswerText:
    """Decoding of an answer token by token; it ends before the first text of `stop` in the answer.

    No piece has part of a character, or the beginning of a text that may still end the answer.
    `continues`: the answer continues the prompt's text, and is no turn of a chat.  `shown`: special
    tokens whose text the answer has.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: str | Iterable[str] = (),
        *,
        continues: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._out = tokenizer.stream_decoder(continues=continues, shown=shown)
        self._stops = StopMatcher(checked_stops(stop))

    def __repr__(self) -> str:
        return f"<AnswerText: {self._stops!r}>"

    def push(self, *tokens: int, last: bool = False) -> tuple[str, bool]:
        """Adds tokens; returns the text that is final now, and True if a stop text ended it.

        `last`: no token follows, so no text is held back.  Raises InputError for an unknown token.
        """
        piece = self._out.push(*tokens)
        if last:
            piece += self._out.finish()
        piece, stopped = self._stops.push(piece)
        if last and not stopped:
            piece += self._stops.finish()
        return piece, stopped


class Generation:
    """One answer: an iterator over pieces of text, and its summary so far.

    No piece has part of a character.  An exception in the middle (Ctrl-C too) goes to the caller;
    `text`, `token_ids` and `summary()` then hold the part up to it, and the generator can be used
    again.
    """

    def __init__(
        self,
        generator: Generator,
        prompt: Items[int],
        *,
        sampling: SamplingOptions,
        cached: int = 0,
        stops: tuple[str, ...] = (),
        continues: bool = False,
        tokens_per_launch: int = 1,
        with_logprobs: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._generator = generator
        self._prompt = tuple(prompt)
        self._sampling = sampling
        self._cached = cached
        self._out = AnswerText(generator.tokenizer, stops, continues=continues)
        self._progress = progress
        self._per_launch = tokens_per_launch
        self._changes = generator.decoder.changes
        self._before = generator.decoder.statistics()
        self._began = time.perf_counter()
        self._first = self._last = 0.0
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._with_logprobs = with_logprobs
        self._logprobs: list[TokenLogprobs] = []
        self._reason = "interrupted"
        self._work = self._run()

    def __repr__(self) -> str:
        prompt, tokens = len(self._prompt), len(self._tokens)
        return f"<Generation: {tokens} tokens after a prompt of {prompt}, {self._reason}>"

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._generator.latest is not self and self._reason == "interrupted":
            raise ClosedError(
                "a later generation ended this one, or its conversation was reset; the decoder's "
                "tokens are not its own any more"
            )
        return next(self._work)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens chosen so far."""
        return tuple(self._tokens)

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """The log probabilities of the tokens chosen so far; empty if none were asked for."""
        return tuple(self._logprobs)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    @property
    def finish_reason(self) -> str:
        """The reason why the answer ended, see `Summary`; "interrupted" while it is under way."""
        return self._reason

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the whole prompt."""
        return len(self._prompt)

    @property
    def cached_tokens(self) -> int:
        """The number of tokens of the prompt that the KV cache held already."""
        return self._cached

    def _run(self) -> Iterator[str]:
        decoder = self._generator.decoder
        self._require_untouched()
        first = decoder.prefill(self._prompt[self._cached :], progress=self._progress)
        self._changes = decoder.changes
        piece, over = self._next(first)
        if piece:
            yield piece
        if over:
            return
        self._require_untouched()  # from here on the run itself raises ClosedError
        # The next tokens are computed while the caller works with this piece.
        with decoder.run(tokens_per_launch=self._per_launch) as tokens:
            for token in tokens:
                piece, over = self._next(token)
                if piece:
                    yield piece
                if over:
                    return

    def _require_untouched(self) -> None:
        """Raises ClosedError if anything else has used the decoder since the last step."""
        if self._generator.decoder.changes != self._changes:
            raise ClosedError(
                "the decoder was used otherwise since, which ended this generation: its tokens and "
                "settings are not its own any more; generate again"
            )

    def _next(self, token: int) -> tuple[str, bool]:
        """Adds a token; returns its piece of text, and True if the answer ends with it."""
        decoder = self._generator.decoder
        self._last = time.perf_counter()
        self._first = self._first or self._last
        if self._with_logprobs:
            self._logprobs.append(decoder.logprobs())
        self._tokens.append(token)
        ended = token in decoder.stop_tokens
        over = ended or decoder.stopped()
        if over:
            full = len(self._prompt) + len(self._tokens) > decoder.plan.sizes.context
            length = "context" if full else "length"
            # Set before the last piece is yielded: the caller may not resume after it.
            self._reason = "stop" if ended else length
        piece, stopped = self._out.push(token, last=over)
        if stopped:
            self._reason, over = "stop", True
        if piece:
            self._pieces.append(piece)
        return piece, over

    def summary(self) -> Summary:
        """Returns the result and statistics so far; final once the iteration has ended."""
        now, before = self._generator.decoder.statistics(), self._before
        decoded, spent = len(self._tokens) - 1, self._last - self._first
        read = len(self._prompt) - self._cached
        prefill = now.prefill_seconds - before.prefill_seconds
        drafted = now.lookup_tokens - before.lookup_tokens
        steps = now.lookup_steps - before.lookup_steps
        return Summary(
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=self._reason,
            sampling=self._sampling,
            prompt_tokens=len(self._prompt),
            cached_tokens=self._cached,
            tokens_per_second=decoded / spent if decoded > 0 and spent > 0 else 0.0,
            prompt_tokens_per_second=read / prefill if self._tokens else 0.0,
            time_to_first_token=self._first - self._began if self._tokens else 0.0,
            load_seconds=self._generator.load_seconds,
            launches_eager=now.launches_eager - before.launches_eager,
            launches_replayed=now.launches_replayed - before.launches_replayed,
            launches_per_token=now.launches_per_token,
            tokens_per_launch=self._per_launch,
            tokens_per_step=drafted / steps if steps else 0.0,
            graphs_captured=now.graphs_captured - before.graphs_captured,
            device=self._generator.device.name,
            eager_reasons=_since(before.eager_reasons, now.eager_reasons),
            one_by_one=_since(before.one_by_one, now.one_by_one),
            library=now.library,
            weights=now.weights,
            weight_bytes=now.weight_bytes,
            ranks=self._generator.decoder.ranks,
            collectives=self._generator.decoder.collectives,
        )


def _since(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    counts = {reason: count - before.get(reason, 0) for reason, count in now.items()}
    return {reason: count for reason, count in counts.items() if count}
