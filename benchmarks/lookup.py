"""Drafts from the sequence itself (`Decoder(lookup=…)`): tokens a step, and tokens a second.

    python -m benchmarks.lookup [--model smollm2-135m] [--shape 1B] [--lookup 3,7] [--tokens 256]
        [--sequences 8]

Two questions, each with ways that take turns; "lookup 0" is a decoder without drafts.

Texts: how often is a draft right?  A real model answers three prompts greedily: the summary of an
article, an edit of some code, a question without a text.  `equal`: the fraction of the answer
before its first difference from the one without drafts; on a GPU, steps of other numbers of rows
round differently.

Rates: what is a step worth?  A model of the shape with random weights, whose likeliest token is
always the next number: its output head is its embedding, one row further.  The prompt holds the
answer in pieces of as many tokens as a step shall give, with a wrong token after each, so that
every step keeps exactly those.  `tokens_per_step` is what was asked for, and the row says what was
measured.

`tokens_per_second`: after the first token, the median of the rounds, of all `--sequences` together,
which have the same prompt and decode in one step.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import ostinato as ost
from benchmarks import common
from ostinato.bench.random_weights import RandomCheckpoint
from ostinato.bench.shapes import SHAPES, shape_named, traffic
from ostinato.models import Decoder, TextGenerator

PER_LAUNCH = 8
COLUMNS = (
    "what",
    "lookup",
    "prompt",
    "tokens",
    "tokens_per_step",
    "tokens_per_second",
    "token_us",
    "times",
    "equal",
)
ARTICLE = """\
The harbour of Vessing was built between 1871 and 1884, when the railway reached the coast.
Its two moles of granite, the northern one 940 metres long and the southern one 610, enclose
a basin of 38 hectares. Until 1912 it was mainly a harbour for herring: at its peak, 214
luggers landed their catch there, and 1,900 people worked in the salting houses behind the
quay. After the herring had left the bay, the town council leased the eastern quay to the
Vessing Timber Company, which shipped pit props to Wales until 1936. During the war the
northern mole was breached in three places, and the basin silted up. The rebuilding, led by
the engineer Marta Lindqvist, took from 1949 to 1955. She had the breaches closed with
caissons of reinforced concrete instead of granite, and designed the curved wave breaker at
the head of the northern mole, which is listed as a monument today. Since 1998 the harbour
has been used by ferries to the islands, by some 60 fishing boats and by a marina of 420
berths. In 2019 the council decided to raise both moles by 80 centimetres, because the sea
level at Vessing has risen by 19 centimetres since the first measurement in 1886. The work
on the southern mole was finished in 2023; that on the northern mole began in the spring of
2024."""
CODE = """\
import csv
from pathlib import Path


class Ledger:
    def __init__(self, path):
        self.path = Path(path)
        self.entries = []

    def load(self):
        with self.path.open(newline="") as stream:
            for row in csv.DictReader(stream):
                amount = float(row["amount"])
                self.entries.append((row["date"], row["account"], amount))

    def total(self, account):
        result = 0.0
        for date, name, amount in self.entries:
            if name == account:
                result += amount
        return result

    def accounts(self):
        return sorted({name for date, name, amount in self.entries})

    def report(self):
        for name in self.accounts():
            print(f"{name:20} {self.total(name):10.2f}")
"""
TEXTS = {
    "summary": "Summarise this article in five sentences. Keep its names and numbers.\n\n"
    + ARTICLE,
    "code edit": "Rename the method `total` to `balance`, and add a docstring to each method. "
    "Answer with the whole file.\n\n```python\n" + CODE + "```",
    "chat": "I have one free day in a small town by the sea. What would you do there, and why?",
}


class SuccessorCheckpoint(RandomCheckpoint):
    """Random weights whose likeliest token is the last one plus 1: a large embedding, layers that
    add little to it, and a head that is the embedding moved by a row."""

    def load(self, into: Mapping[str, npt.NDArray[Any]], *, threads: int = 2) -> None:
        """Implements `Checkpoint.load`."""
        super().load(into, threads=threads)
        for name, array in into.items():
            if name in ("embed", "head"):
                super().load({"embed": array}, threads=threads)
                _scale(array, 6)
                if name == "head":
                    array[...] = np.roll(array, 1, axis=0)
            elif name.endswith((".wo", ".w_down")):
                _scale(array, -6)


def _scale(array: npt.NDArray[Any], exponent: int) -> None:
    """Multiplies floats, or the bits of bfloat16, by 2**exponent."""
    if array.dtype == np.uint16:
        array += np.uint16(exponent << 7 & 0xFFFF)
    else:
        array *= np.float32(2.0**exponent)


class Turns:
    """Decoders with the same weights that take turns, by their `lookup`."""

    def __init__(self, decoders: Mapping[int, Decoder], rounds: int) -> None:
        self.decoders, self.rounds = decoders, rounds

    @staticmethod
    def run(decoder: Decoder, prompt: Sequence[int], tokens: int) -> tuple[list[int], float]:
        """Returns the answer to a prompt in all sequences, the worst if they differ, and the
        seconds after its first token."""
        decoder.reset()
        every = range(decoder.plan.sizes.sequences)
        answers = {sequence: [decoder.prefill(prompt, sequence)] for sequence in every}
        began = time.perf_counter()
        for item in decoder.run_batch(every, count=tokens - 1, tokens_per_launch=PER_LAUNCH):
            for sequence, token in item.items():
                answers[sequence].append(token)
        spent = time.perf_counter() - began
        assert all(one == answers[0] for one in answers.values()), "the sequences differ"
        return answers[0], spent

    def rows(self, what: str, prompt: Sequence[int], tokens: int) -> list[dict[str, object]]:
        """Measures the answer to a prompt, of at most `tokens` tokens, with each decoder."""
        times: dict[int, list[float]] = {lookup: [] for lookup in self.decoders}
        answers: dict[int, list[int]] = {}
        for number in range(self.rounds + 2):  # two to build graphs
            for lookup, decoder in self.decoders.items():
                answers[lookup], spent = self.run(decoder, prompt, tokens)
                made = len(answers[lookup]) - 1
                if number > 1 and made:
                    times[lookup].append(spent / made)
        rows: list[dict[str, object]] = []
        reference, base = answers[0], statistics.median(times[0])
        for lookup, decoder in self.decoders.items():
            one, answer = statistics.median(times[lookup]), answers[lookup]
            pairs = zip(answer, reference, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(answer))
            rows.append(
                {
                    "what": what,
                    "lookup": lookup,
                    "prompt": len(prompt),
                    "tokens": len(answer),
                    "tokens_per_step": self._per_step(decoder, prompt, tokens) if lookup else 1.0,
                    "tokens_per_second": round(decoder.plan.sizes.sequences / one, 1),
                    "token_us": round(one * 1e6, 1),
                    "least_token_us": round(min(times[lookup]) * 1e6, 1),
                    "times": round(base / one, 2),
                    "equal": round(same / len(answer), 3),
                }
            )
        return rows

    def _per_step(self, decoder: Decoder, prompt: Sequence[int], tokens: int) -> float:
        before = decoder.statistics()
        self.run(decoder, prompt, tokens)
        after = decoder.statistics()
        steps = after.lookup_steps - before.lookup_steps
        return round((after.lookup_tokens - before.lookup_tokens) / steps, 2)


def pieces(vocabulary: int, tokens: int, each: int) -> list[int]:
    """Returns a prompt that holds 1, 2, 3, …, `tokens` + 1 in pieces of `each`, with a wrong token
    after each, and then 0, with which the answer 1, 2, 3, … begins."""
    made, wrong = [0], vocabulary - 1
    for start in range(1, tokens + 2, each):
        made += [*range(start, start + each), wrong]
        wrong -= 1
    return [*made, 0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="for the texts; none if empty")
    parser.add_argument("--shape", choices=SHAPES, help="for the rates; 1B, or tiny on the CPU")
    parser.add_argument("--lookup", default="3,7", help="numbers of drafts")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--sequences", type=int, default=1, help="that decode in one step")
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.tokens, chosen.rounds = 24, 1
    on_gpu = chosen.device != "host"
    shape = chosen.shape or ("1B" if on_gpu and not chosen.quick else "tiny")
    count = chosen.sequences
    lookups = [0, *map(int, chosen.lookup.split(","))]
    rows: list[dict[str, object]] = []
    skipped = {} if chosen.model else {"texts": "no model was given"}
    with ost.open_device(chosen.device) as device:
        if chosen.model:
            texts = partial(
                of_texts, device, chosen.model, lookups, chosen.tokens, chosen.rounds, count
            )
            found = common.optional(skipped, "texts", texts)
            rows += found if isinstance(found, list) else []
        config = replace(shape_named(shape), tied_embeddings=False)
        tokens = min(chosen.tokens, config.context_length // 3)
        opened = SuccessorCheckpoint(config, shape)
        context = min(config.context_length, 3 * tokens + 16)
        with ExitStack() as stack:
            turns = take_turns(stack, device, opened, lookups, chosen.rounds, context, count)
            for each in (1, 2, 4, 8):
                if each <= max(lookups) + 1:
                    prompt = pieces(config.vocabulary, tokens, each)
                    rows += turns.rows(f"{shape}, {each} a step", prompt, tokens)
        print(common.table(f"drafts on {device.name}", rows, COLUMNS))
        moved = traffic(config, 2 if on_gpu else 4)
        common.emit(
            f"lookup-{shape}" + (f"-{count}-sequences" if count > 1 else ""),
            device,
            chosen.out,
            ceiling={
                "what": "bytes that a step of the shape reads of weights, at the least",
                "weight_bytes": moved.weights,
            },
            settings={
                "model": chosen.model,
                "shape": shape,
                "tokens": chosen.tokens,
                "tokens_per_launch": PER_LAUNCH,
                "sequences": count,
                "rounds": chosen.rounds,
            },
            rows=rows,
            skipped=skipped,
        )
    return 0


def take_turns(
    stack: ExitStack,
    device: ost.Device,
    checkpoint: Any,
    lookups: Sequence[int],
    rounds: int,
    context: int,
    count: int,
) -> Turns:
    """Opens a decoder for each number of drafts, on the same weights; `stack` closes them."""
    given: dict[str, Any] = {"max_context": context, "stop_tokens": (), "sequences": count}
    first = stack.enter_context(Decoder(device, checkpoint, lookup=lookups[0], **given))
    decoders = {lookups[0]: first}
    for lookup in lookups[1:]:
        one = Decoder(device, first.weights, lookup=lookup, **given)
        decoders[lookup] = stack.enter_context(one)
    return Turns(decoders, rounds)


def of_texts(
    device: ost.Device,
    model: str,
    lookups: Sequence[int],
    tokens: int,
    rounds: int,
    count: int,
) -> list[dict[str, object]]:
    """Returns the rows of the three texts."""
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        generator = stack.enter_context(TextGenerator(device, model, max_context=2048))
        decoder = generator.decoder
        turns = take_turns(stack, device, decoder.weights, lookups, rounds, 2048, count)
        for one in turns.decoders.values():
            one.set_stop_tokens(decoder.stop_tokens)
        for what, text in TEXTS.items():
            prompt = generator.encode([{"role": "user", "content": text}])
            rows += turns.rows(what, prompt, tokens)
    return rows


if __name__ == "__main__":
    sys.exit(main())
