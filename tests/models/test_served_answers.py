"""The server's engine on every driver, by the margin rule: each token of an answer is the likeliest
one after those before it, as the decoder alone computes it, or as likely within what the order of
sums and bfloat16 may differ by."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from ostinato.device import Device
from ostinato.models.decoder import Decoder
from ostinato.models.generate import TextGenerator
from ostinato.models.sampling import GREEDY, SamplingOptions, log_probabilities
from ostinato.models.stepper import TokenLogprobs
from ostinato.models.text.tokenizer import Tokenizer
from ostinato.models.text.tokenizer_parts import TokenizerParts
from ostinato.serve.engine import End, Job, Rejection, ServingEngine, Update
from tests.models.proof import FIRST, RELATIVE, SHAPES, kind, on_both
from tests.models.random_models import RandomModel

MODEL = RandomModel(SHAPES[FIRST])
SHARED = MODEL.tokens(70, seed=1)
SECONDS = 300.0


@dataclass
class Numbers:
    """A generator whose words are the numbers of its tokens."""

    device: Device
    decoder: Decoder

    def __post_init__(self) -> None:
        none = frozenset[int]()
        texts = [f"\u2581{token}" for token in range(MODEL.config.vocabulary)]
        parts = TokenizerParts(
            "numbers", lambda text, special: [1], texts, False, False, none, none, None, (), {}
        )
        self.tokenizer = Tokenizer(parts)


@dataclass
class Answer:
    text: str = ""
    end: End | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    over: threading.Event = field(default_factory=threading.Event)

    def __call__(self, update: Update) -> None:
        self.text += update.text
        self.logprobs += update.logprobs
        if update.end is not None:
            self.end = update.end
            self.over.set()


@on_both("slots", host=[3], cuda=[3, 8, 64])
def test_every_token_is_one_that_the_decoder_alone_would_choose(
    machine: Device, slots: int
) -> None:
    """Joined and left in the middle, with prompts in pieces, and prefixes copied between slots."""
    count = 3 * slots
    with Decoder(
        machine, MODEL.checkpoint(), sequences=slots, max_context=300, stop_tokens=()
    ) as decoder:
        generator = cast(TextGenerator, Numbers(machine, decoder))
        prompts = [
            (SHARED if n % 3 else SHARED[:9]) + MODEL.tokens(1 + 11 * n % 90, seed=100 + n)
            for n in range(count)
        ]
        jobs = [Job(tuple(p), 3 + 5 * n % 31, GREEDY) for n, p in enumerate(prompts)]
        answers = [Answer() for _ in jobs]
        with ServingEngine(generator, queue=count, piece=40).start() as engine:
            numbers = [engine.submit([j], [a]) for j, a in zip(jobs, answers, strict=True)]
            assert not [one for one in numbers if isinstance(one, Rejection)]
            for gone in numbers[5::7]:
                assert not isinstance(gone, Rejection)
                engine.cancel(gone)
            for answer in answers:
                assert answer.over.wait(SECONDS)
            found = engine.statistics().result(SECONDS)
        assert found.cached_tokens > 0 and not found.decoder.quarantined
        assert found.ended["failed"] == 0 and found.under_way == 0
        bound, clear, chosen = 2 * RELATIVE[kind(machine)], 0, 0
        for job, answer in zip(jobs, answers, strict=True):
            tokens = [int(word) for word in answer.text.split()]
            assert len(tokens) == job.max_tokens or answer.end is End.CANCELLED
            decoder.reset(0)
            feed = list(job.tokens)
            for place, token in enumerate(tokens):
                decoder.prefill(feed)
                logits = decoder.logits().astype(np.float64)
                largest = np.sort(logits)[-2:]
                allowed = bound * np.abs(logits).max()
                short = largest[1] - logits[token]
                assert short <= allowed, f"token {place}: {short:.2e} of {allowed:.2e}"
                clear += largest[1] - largest[0] > allowed
                chosen += 1
                feed = [token]
        assert chosen > 10 * slots and clear > chosen / 3, "the bound bounds nothing"


@on_both("slots", host=[3], cuda=[3, 32])
def test_log_probabilities_are_those_of_the_decoder_alone(machine: Device, slots: int) -> None:
    """Of every other answer also those of its prompt, whose tokens are forced by masks in the steps
    of the others."""
    count = 2 * slots
    with Decoder(
        machine, MODEL.checkpoint(), sequences=slots, max_context=300, stop_tokens=()
    ) as decoder:
        generator = cast(TextGenerator, Numbers(machine, decoder))
        jobs = [
            Job(
                tuple(MODEL.tokens(2 + 7 * n % 30, seed=300 + n)),
                3 + 5 * n % 17,
                SamplingOptions(temperature=0.8, seed=n, frequency_penalty=n % 3 / 2),
                logprobs=n % 4,
                prompt_logprobs=n % 2 == 0,
            )
            for n in range(count)
        ]
        answers = [Answer() for _ in jobs]
        with ServingEngine(generator, queue=count).start() as engine:
            engine.submit(jobs, answers)
            for answer in answers:
                assert answer.over.wait(SECONDS)
            assert not engine.statistics().result(SECONDS).decoder.quarantined
        allowed = 4 * RELATIVE[kind(machine)]
        for job, answer in zip(jobs, answers, strict=True):
            found = [one.token for one in answer.logprobs]
            if job.prompt_logprobs:
                assert found[: len(job.tokens) - 1] == [*job.tokens[1:]]
            given = [*job.tokens[: 1 if job.prompt_logprobs else None], *found]
            assert len(given) == len(job.tokens) + job.max_tokens
            decoder.reset(0)
            feed = given[: len(given) - len(found)]
            for one in answer.logprobs:
                decoder.prefill(feed)
                logits = decoder.logits()
                chosen, _, top = log_probabilities(logits, one.token, job.logprobs or 0)
                values = [one.logprob, *(value for _, value in one.top)]
                within = allowed * np.abs(logits).max()
                assert np.abs(np.array(values) - [chosen, *top]).max() <= within
                feed = [one.token]
