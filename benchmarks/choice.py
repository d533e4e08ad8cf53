"""The choice of the next token: what penalties, biases, log probabilities and grammars cost a step.

    python -m benchmarks.choice [--shape 1B] [--rows 32 1] [--tokens 64] [--context 128]

The weights are random, in the model's shape, and so are the words of its tokenizer, which has the
lengths and the punctuation of a real one.  All ways decode the same number of sequences from the
same context with `Decoder.run_batch`, and take turns.  What is changed beside "greedy" is named:

    greedy, drawn        steps launched ahead
    penalties, biases    on one row or on all of them, launched ahead; 300 biases a row
    log probabilities    5 likeliest tokens, which the host reads
    masks                that allow everything and cost the host nothing
    grammar              a JSON grammar on one row or on all of them (llguidance)

A step has the time of its slowest row: what one row's options or grammar cost a step is what the
other rows of the batch pay for them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

import ostinato as ost
from benchmarks import common
from ostinato.bench.random_weights import random_checkpoint
from ostinato.bench.shapes import SHAPES, shape_named
from ostinato.bench.ways import random_tokens
from ostinato.models import Decoder, SamplingOptions, Tokenizer, TokenMasks
from ostinato.models.text.tokenizer_parts import TokenizerParts

GREEDY = SamplingOptions()
_JSON = '{{"type": "array", "items": {{"type": "object"}}, "minItems": {}}}'
"""An array that a round does not end: an item is a token or more."""
_PUNCTUATION = ('{"', '":', '","', '"},', "}]", "[]", "{}", '": "', "\n  ", ", ", ": ", "true")
_BIASES = 300


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1B")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 1])
    parser.add_argument("--tokens", type=int, default=64, help="of each sequence in a round")
    parser.add_argument("--context", type=int, default=128, help="tokens before them")
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.rows, chosen.tokens, chosen.context, chosen.rounds = [3, 1], 4, 8, 2
    config = shape_named(chosen.shape)
    skipped: dict[str, str] = {}
    with (
        ost.open_device(chosen.device) as device,
        Decoder(
            device,
            random_checkpoint(config, chosen.shape),
            sequences=max(chosen.rows),
            max_context=chosen.context + chosen.tokens + 1,
            stop_tokens=(),
        ) as decoder,
    ):
        rows: list[dict[str, object]] = []
        for count in chosen.rows:
            bench = Bench(decoder, count, chosen.tokens, chosen.context)
            ways = bench.ways()
            try:
                ways |= bench.grammars()
            except ImportError as error:
                skipped["grammar"] = f"llguidance is not installed: {error}"
            times: dict[str, list[float]] = {name: [] for name in ways}
            for round_ in range(chosen.rounds + 1):  # the first one captures
                for name, way in ways.items():
                    seconds = way()
                    if round_:
                        times[name].append(seconds / chosen.tokens * 1e6)
            base = statistics.median(times["greedy"])
            for name, found in times.items():
                step = statistics.median(found)
                rows.append(
                    {
                        "rows": count,
                        "what": name,
                        "step_us": round(step, 2),
                        "more_us": round(step - base, 2),
                        "more_percent": round(100 * (step / base - 1), 2),
                        "least_us": round(min(found), 2),
                        "mask_us": bench.mask_us(name),
                    }
                )
        columns = ("rows", "what", "step_us", "more_us", "more_percent", "least_us", "mask_us")
        title = f"steps of {chosen.shape} on {device.name}"
        print(common.table(title, rows, columns))
        common.emit(
            f"choice-{chosen.shape}",
            device,
            chosen.out,
            ceiling={
                f"greedy_{row['rows']}_us": row["step_us"]
                for row in rows
                if row["what"] == "greedy"
            },
            settings={
                "shape": chosen.shape,
                "rows": chosen.rows,
                "tokens": chosen.tokens,
                "context": chosen.context,
                "rounds": chosen.rounds,
                "biases": _BIASES,
                "library": decoder.statistics().library,
            },
            rows=rows,
            skipped=skipped,
        )
    return 0


class Bench:
    """The ways to decode; each is a function that returns the seconds of its steps."""

    def __init__(self, decoder: Decoder, rows: int, tokens: int, context: int) -> None:
        self.decoder, self.rows, self.tokens, self.context = decoder, rows, tokens, context
        vocabulary = decoder.config.vocabulary
        decoder.reset()
        for row in range(rows):
            decoder.prefill(random_tokens(vocabulary, context, (7, row)), row)
        biased = random_tokens(vocabulary, min(_BIASES, vocabulary), (8, 0))
        self.biases = dict.fromkeys(biased, -3.0)
        self._mask_seconds: dict[str, list[float]] = {}

    def ways(self) -> dict[str, Callable[[], float]]:
        """Returns the ways without grammars, by name."""
        penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5}
        every = range(self.rows)
        found: dict[str, Callable[[], float]] = {"greedy": partial(self._run, {})}
        for name, options in (
            ("drawn, top_p 0.9", SamplingOptions(0.8, top_p=0.9)),
            ("penalties", SamplingOptions(**penalties)),
            ("biases", SamplingOptions(logit_bias=self.biases)),
            ("penalties and biases", SamplingOptions(**penalties, logit_bias=self.biases)),
        ):
            found[f"{name} on all rows"] = partial(self._run, dict.fromkeys(every, options))
        both = SamplingOptions(**penalties, logit_bias=self.biases)
        found["penalties and biases on 1 row"] = partial(self._run, {0: both})
        found["log probabilities on 1 row"] = partial(self._run, {}, logprobs=1)
        found["log probabilities on all rows"] = partial(self._run, {}, logprobs=self.rows)
        for count in dict.fromkeys((1, self.rows)):
            name = f"masks on {_rows(count)}"
            masks = TokenMasks(tuple(range(count)), lambda words: words.fill(0xFFFFFFFF))
            found[name] = partial(self._masked, name, masks)
        return found

    def grammars(self) -> dict[str, Callable[[], float]]:
        """Returns the ways with grammars, by name.  Raises ImportError without llguidance."""

        from ostinato.serve.grammar import GrammarCompiler, fill_masks

        vocabulary = self.decoder.config.vocabulary
        compiler = GrammarCompiler(random_words(vocabulary), vocabulary, [0])

        def way(name: str, count: int) -> float:
            text = _JSON.format(self.tokens)
            bound = {row: compiler.compile("json_schema", text) for row in range(count)}

            def take(tokens: dict[int, int]) -> None:
                for row in range(count):
                    over = bound[row].take(tokens[row])
                    assert not over and not bound[row].error, bound[row].error

            masks = TokenMasks(tuple(bound), lambda words: fill_masks(bound, words))
            return self._masked(name, masks, take)

        return {
            (name := f"grammar on {_rows(count)}"): partial(way, name, count)
            for count in dict.fromkeys((1, self.rows))
        }

    def mask_us(self, name: str) -> float | None:
        """Returns the median time of making the masks of a step; None for ways without."""
        found = self._mask_seconds.get(name)
        return None if not found else round(statistics.median(found) * 1e6, 2)

    def _begin(self, options: dict[int, SamplingOptions], logprobs: int = 0) -> None:
        for row in range(self.rows):
            self.decoder.truncate(self.context + 1, row)
            self.decoder.set_sampling(
                options.get(row, GREEDY),
                row,
                answer=self.context // 2,
                logprobs=5 if row < logprobs else None,
            )
        self.decoder.decode_batch(range(self.rows))  # from here on the state is on the device
        self.decoder.stream.synchronize()

    def _run(self, options: dict[int, SamplingOptions], *, logprobs: int = 0) -> float:
        self._begin(options, logprobs)
        begin = time.perf_counter()
        for _ in self.decoder.run_batch(range(self.rows), count=self.tokens - 1):
            for row in range(logprobs):
                self.decoder.logprobs(row)
        return (time.perf_counter() - begin) * self.tokens / (self.tokens - 1)

    def _masked(
        self,
        name: str,
        masks: TokenMasks,
        take: Callable[[dict[int, int]], None] = lambda tokens: None,
    ) -> float:
        self._begin({})
        masks = TokenMasks(masks.sequences, self._timed(name, masks.fill))
        begin = time.perf_counter()
        for tokens in self.decoder.run_batch(range(self.rows), count=self.tokens - 1, masks=masks):
            take(tokens)
        return (time.perf_counter() - begin) * self.tokens / (self.tokens - 1)

    def _timed(
        self, name: str, fill: Callable[[npt.NDArray[np.uint32]], object]
    ) -> Callable[[npt.NDArray[np.uint32]], object]:
        seconds = self._mask_seconds.setdefault(name, [])

        def timed(words: npt.NDArray[np.uint32]) -> None:
            begin = time.perf_counter()
            fill(words)
            seconds.append(time.perf_counter() - begin)

        return timed


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def random_words(vocabulary: int) -> Tokenizer:
    """Returns a tokenizer of bytes, JSON's punctuation and random words, half of which begin with a
    space; token 0 ends an answer."""
    random = np.random.default_rng(3)
    texts = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PUNCTUATION][:vocabulary]
    known = set(texts)
    while len(texts) < vocabulary:
        letters = "".join(map(chr, random.integers(97, 123, random.integers(2, 10))))
        word = letters if random.integers(2) else f"\u2581{letters}"
        if word not in known:
            known.add(word)
            texts.append(word)
    numbers = {text: token for token, text in enumerate(texts)}

    def encode(text: str, special: bool) -> list[int]:
        """Takes the longest word each time."""
        left, found = text.replace(" ", "\u2581"), []
        while left:
            size = next((n for n in range(10, 0, -1) if left[:n] in numbers), 1)
            word = left[:size] if left[:size] in numbers else None
            spelt = left[:size].replace("\u2581", " ").encode()
            found += [numbers[word]] if word else [1 + byte for byte in spelt]
            left = left[size:]
        return found

    ends = frozenset({0})
    return Tokenizer(
        TokenizerParts("random", encode, texts, False, False, ends, ends, None, (0,), {})
    )


if __name__ == "__main__":
    raise SystemExit(main())
