"""The choice of the next token by a decoder: masks, biases and log probabilities, on both drivers.

tests/models/test_decoder_run.py has the options of sampling.  A silent wrong answer here would be a
token that was not allowed, or the probability of another token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ostinato.device import Device
from ostinato.errors import DriverError, InputError, LogitsError, UnsupportedModelError
from ostinato.models import SamplingOptions, TokenLogprobs, TokenMasks
from ostinato.models.decoder import Decoder
from ostinato.models.sampling import changed, log_probabilities
from tests.conftest import open_test_device
from tests.models.random_models import RandomModel, llama

MODEL = RandomModel(llama(3, 1, 64, inner=136, vocabulary=257, layers=2, tied_embeddings=True))
PROMPT, OTHER = MODEL.tokens(9), MODEL.tokens(7, seed=8)
LONG = MODEL.tokens(90, seed=9)
"""More rows than may all sample."""
HOT = SamplingOptions(temperature=1.5, seed=6)
WORDS = 9


@pytest.fixture(scope="module", params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> Iterator[Device]:
    with open_test_device(request.param, request.config) as opened:
        yield opened


def open_decoder(device: Device, **options: Any) -> Decoder:
    return Decoder(
        device,
        MODEL.checkpoint(),
        **{"max_context": 200, "stop_tokens": (), "sequences": 3, **options},
    )


@pytest.fixture(params=[{}, {"graphs": False}, {"verify": "first"}, {"build": "record"}], ids=str)
def decoder(where: Device, request: pytest.FixtureRequest) -> Iterator[Decoder]:
    with open_decoder(where, **request.param) as opened:
        yield opened


def masks(**allowed: list[int]) -> TokenMasks:
    """`s1=[5, 6]`: sequence 1 gets one of these."""
    by_sequence = {int(name[1:]): tokens for name, tokens in allowed.items()}

    def fill(words: npt.NDArray[np.uint32]) -> None:
        assert words.shape == (3, WORDS)
        for sequence, tokens in by_sequence.items():
            words[sequence] = 0
            for token in tokens:
                words[sequence, token // 32] |= np.uint32(1 << token % 32)

    return TokenMasks(tuple(by_sequence), fill)


def test_a_mask_is_of_one_step_and_of_its_sequences(decoder: Decoder) -> None:
    decoder.set_sampling(HOT, 1)
    first = decoder.prefill_batch({0: PROMPT, 1: OTHER, 2: PROMPT})
    plain = [decoder.decode_batch([0, 1, 2]) for _ in range(6)]
    rest = [token for token in range(257) if token != plain[0][0]]
    for one in range(3):
        decoder.reset(one)
    assert decoder.prefill_batch({0: PROMPT, 1: OTHER, 2: PROMPT}) == first
    for step in range(3):  # eagerly, captured, replayed
        for sequence in range(3):
            decoder.truncate((9, 7, 9)[sequence] + 1, sequence)
        got = decoder.decode_batch([0, 1, 2], masks=masks(s0=rest))
        logits = decoder.logits(0)
        assert got[0] == np.argmax(np.where(np.arange(257) == plain[0][0], -np.inf, logits))
        assert got[0] != plain[0][0] and got[1:] == plain[0][1:], step
        # What is allowed may be the least likely, and drawing makes no difference.
        for sequence in range(3):
            decoder.truncate((9, 7, 9)[sequence] + 1, sequence)
        least = int(np.argmin(logits))
        got = decoder.decode_batch([2, 1], masks=masks(s1=[256], s2=[least]))
        assert got == [least, 256]
    for sequence in range(3):
        decoder.truncate((9, 7, 9)[sequence] + 1, sequence)
    assert [decoder.decode_batch([0, 1, 2]) for _ in range(6)] == plain, "no mask stays"
    assert not decoder.statistics().quarantined


def test_a_step_with_masks_is_the_same_step(decoder: Decoder) -> None:
    """All tokens are allowed: the same tokens, from the same bits of logits."""
    found = []
    for given in (None, masks(s0=[*range(257)], s1=[*range(257)])):
        decoder.reset()
        decoder.set_sampling(HOT, 0)
        decoder.set_sampling(SamplingOptions(repetition_penalty=1.3), 1)
        kept = [decoder.prefill_batch({0: LONG, 1: OTHER}, masks=given)]
        for _ in range(5):
            kept.append(dict(enumerate(decoder.decode_batch([0, 1], masks=given))))
        found.append((kept, decoder.logits(0).tobytes(), decoder.logits(1).tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("rows", [64, 128])
def test_the_first_token_has_a_mask_too(where: Device, prompt: list[int], rows: int) -> None:
    """Also where the step has more rows than may sample, and its ending has one."""
    try:
        decoder = open_decoder(where, max_rows=rows)
    except UnsupportedModelError as error:  # a GPU without a library
        pytest.skip(str(error))
    with decoder:
        for _ in range(3):
            decoder.reset()
            free = decoder.prefill_batch({0: prompt, 1: OTHER})
            decoder.reset()
            got = decoder.prefill_batch({0: prompt, 1: OTHER}, masks=masks(s0=[3, 250]))
            logits = decoder.logits(0)
            assert got == {0: 3 if logits[3] > logits[250] else 250, 1: free[1]}


def test_masks_come_after_penalties_and_biases(decoder: Decoder) -> None:
    decoder.prefill(PROMPT)
    seen, allowed = [*PROMPT, decoder.tokens()[-1]], np.arange(257) % 3 == 0
    logits = decoder.logits()
    options = SamplingOptions(
        repetition_penalty=1.4,
        frequency_penalty=0.7,
        presence_penalty=0.3,
        logit_bias={int(np.argmax(logits)) // 3 * 3: 4.0, 1: 100.0},
    )
    decoder.set_sampling(options, answer=len(PROMPT))
    for _ in range(3):
        (token,) = decoder.decode_batch([0], masks=masks(s0=[*np.flatnonzero(allowed)]))
        wanted = changed(decoder.logits(), options, seen, len(PROMPT), allowed)
        assert token == np.argmax(wanted)
        seen.append(token)


class AfterTokens:
    """Masks of sequences 0 and 2 that depend on all tokens that these got before."""

    def __init__(self) -> None:
        self.sums = {0: 0, 2: 0}
        self.filled = 0
        self.masks = TokenMasks((0, 2), self.fill)

    def fill(self, words: npt.NDArray[np.uint32]) -> None:
        self.filled += 1
        for sequence, total in self.sums.items():
            words[sequence] = np.random.default_rng(total).integers(1 << 32, size=WORDS)

    def took(self, chosen: dict[int, int]) -> dict[int, int]:
        for sequence in self.sums.keys() & chosen.keys():
            self.sums[sequence] = 31 * self.sums[sequence] + chosen[sequence] + 1
        return chosen


def test_a_run_with_masks_gives_what_steps_with_masks_give(decoder: Decoder) -> None:
    """Tokens and logits; also when the run is left, finishes, or a sequence stops in it."""
    found: list[tuple[dict[int, int], bytes]] = []

    def begin() -> AfterTokens:
        found.clear()
        decoder.reset()
        for sequence, options in enumerate((HOT, HOT, SamplingOptions(repetition_penalty=1.3))):
            decoder.set_sampling(options, sequence, limit=14 if sequence == 1 else None)
        after = AfterTokens()
        prompts = {0: PROMPT, 1: OTHER, 2: PROMPT}
        after.took(decoder.prefill_batch(prompts, masks=after.masks))
        return after

    def keep(after: AfterTokens, item: dict[int, int]) -> None:
        found.append((after.took(item), decoder.logits(2).tobytes()))

    def step(after: AfterTokens) -> None:
        live = [sequence for sequence in range(3) if not decoder.stopped(sequence)]
        keep(after, dict(zip(live, decoder.decode_batch(live, masks=after.masks), strict=True)))

    after = begin()
    for _ in range(24):
        step(after)
    wanted = [*found]
    assert [len(item) for item, _ in wanted][5:9] == [3, 3, 2, 2], "sequence 1 has stopped"
    for _ in range(2):  # at the latest in the second all steps are replays
        after = begin()
        for item in decoder.run_batch(range(3), count=9, masks=after.masks):
            keep(after, item)
        run = decoder.run_batch([0, 2], masks=after.masks)
        for _ in range(5):
            keep(after, next(run))
        filled = after.filled
        step(after)  # which ends the run
        assert after.filled == filled + 1, "no mask is made for a token that nobody takes"
        run = decoder.run_batch([0, 2], masks=after.masks)
        keep(after, next(run))
        run.finish()
        for item in run:
            keep(after, item)
        assert len(found) == 17, "it finishes with the step that is begun"
        for item in decoder.run_batch([0, 2], count=24 - len(found), masks=after.masks):
            keep(after, item)
        assert found == wanted
    assert not decoder.statistics().quarantined
    with pytest.raises(InputError, match="tokens_per_launch is 2: masks are made on the host"):
        decoder.run_batch([0], tokens_per_launch=2, masks=after.masks)


def test_a_mask_that_cannot_be_made_leaves_the_tokens_as_they_were(decoder: Decoder) -> None:
    decoder.prefill(PROMPT)
    wanted = [decoder.decode() for _ in range(4)]
    decoder.truncate(10)

    def fail(words: npt.NDArray[np.uint32]) -> None:
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            decoder.decode_batch([0], masks=TokenMasks((0,), fail))
        assert decoder.tokens() == (*PROMPT, decoder.tokens()[-1])
        with pytest.raises(InputError, match="has no logits"):
            decoder.logits()
    (first,) = decoder.decode_batch([0])
    assert first == wanted[0]
    with pytest.raises(ZeroDivisionError):
        next(decoder.run_batch([0], masks=TokenMasks((0,), fail)))
    assert decoder.tokens() == (*PROMPT, decoder.tokens()[-2], first)
    decoder.truncate(10)
    assert [decoder.decode() for _ in range(4)] == wanted


def test_a_mask_that_allows_nothing_chooses_no_token(decoder: Decoder) -> None:
    decoder.prefill_batch({0: PROMPT, 1: OTHER})
    with pytest.raises(LogitsError) as raised:
        decoder.decode_batch([0, 1], masks=masks(s1=[]))
    assert [*raised.value.failed] == [1] and [*raised.value.chosen] == [0]


# ------------------------------------------------------------------------------- log probabilities


def check_logprobs(found: TokenLogprobs, logits: np.ndarray, token: int, count: int) -> None:
    chosen, tokens, top = log_probabilities(logits, token, count)
    assert found.token == token and [one for one, _ in found.top] == tokens.tolist()
    assert found.logprob == pytest.approx(float(chosen), abs=2e-5)
    assert [value for _, value in found.top] == pytest.approx(top.tolist(), abs=2e-5)


OPTIONS = [
    SamplingOptions(),
    SamplingOptions(1.5, top_k=40, top_p=0.9, seed=3, min_p=0.01),
    SamplingOptions(frequency_penalty=2.0, logit_bias={7: 50}),
]


@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "hot", "changed"])
@pytest.mark.parametrize("count", [0, 1, 20])
def test_log_probabilities_are_of_the_logits(
    decoder: Decoder, options: SamplingOptions, count: int
) -> None:
    """Before temperature, penalties and biases; and they change no token."""
    decoder.set_sampling(options)
    wanted = [decoder.prefill(PROMPT), *(decoder.decode() for _ in range(5))]
    decoder.reset()
    decoder.set_sampling(options, logprobs=count)
    tokens = [decoder.prefill(PROMPT)]
    while True:
        check_logprobs(decoder.logprobs(), decoder.logits(), tokens[-1], count)
        if len(tokens) == len(wanted):
            break
        tokens.append(decoder.decode())
    assert tokens == wanted


@pytest.mark.parametrize("run", [{}, {"ahead": 255}, {"tokens_per_launch": 16}], ids=str)
def test_a_run_has_the_log_probabilities_of_each_token(where: Device, run: dict[str, Any]) -> None:
    """Also where the ring of 256 entries is used again, and other sequences want other numbers."""
    with open_decoder(where, max_context=400) as decoder:
        decoder.set_sampling(HOT, 0, logprobs=3)
        decoder.set_sampling(HOT, 1)
        decoder.prefill_batch({0: PROMPT, 1: OTHER})
        found = [decoder.logprobs(0)]
        for item in decoder.run_batch([0, 1], count=299, **run):
            found.append(decoder.logprobs(0))
            assert found[-1].token == item[0]
        decoder.reset()
        decoder.prefill_batch({0: PROMPT, 1: OTHER})
        for index, one in enumerate(found):
            if index:
                decoder.decode_batch([0, 1])
            assert one == decoder.logprobs(0)
            if index % 50 == 0:
                check_logprobs(one, decoder.logits(0), one.token, 3)


def test_no_log_probabilities_of_another_token(decoder: Decoder) -> None:
    def refused() -> None:
        with pytest.raises(InputError, match="sequence 0 has no log probabilities"):
            decoder.logprobs()

    refused()
    decoder.prefill(PROMPT)
    refused()
    decoder.set_sampling(HOT, logprobs=2)
    refused()  # its last token was chosen before
    decoder.decode()
    second = decoder.logprobs()
    decoder.decode()
    assert len(decoder.logprobs().top) == 2
    decoder.truncate(len(PROMPT) + 2)
    refused()
    decoder.truncate(len(PROMPT) + 1)
    decoder.decode()
    assert decoder.logprobs() == second
    decoder.set_sampling(HOT, logprobs=5)
    refused()
    decoder.reset()
    decoder.prefill(PROMPT)
    assert len(decoder.logprobs().top) == 5
    for _ in range(4):
        decoder.decode()
    decoder.set_sampling(HOT, logprobs=1)
    decoder.keep_common(PROMPT)
    decoder.prefill(PROMPT[-1:])
    assert len(decoder.logprobs().top) == 1
    decoder.set_sampling(HOT)
    decoder.decode()
    refused()
    with pytest.raises(InputError, match="logprobs is 21"):
        decoder.set_sampling(HOT, logprobs=21)


def test_masks_do_not_change_log_probabilities(decoder: Decoder) -> None:
    decoder.set_sampling(SamplingOptions(), logprobs=4)
    decoder.prefill(PROMPT)
    for token in LONG[:5]:
        assert decoder.decode_batch([0], masks=masks(s0=[token])) == [token]
        check_logprobs(decoder.logprobs(), decoder.logits(), token, 4)


# ------------------------------------------------------------------------------------------ biases


def test_biases_belong_to_their_sequence(decoder: Decoder) -> None:
    decoder.set_sampling(SamplingOptions(logit_bias={3: 100}), 0)
    decoder.set_sampling(SamplingOptions(logit_bias={5: 100, 9: 50}), 2)
    decoder.prefill_batch({0: PROMPT, 1: PROMPT, 2: PROMPT})
    free = decoder.tokens(1)[-1]
    assert [decoder.tokens(sequence)[-1] for sequence in range(3)] == [3, free, 5]
    decoder.set_sampling(SamplingOptions(logit_bias={9: 100}), 2)
    assert decoder.decode_batch([2, 0]) == [9, 3]
    decoder.set_sampling(SamplingOptions(), 0)
    decoder.reset(0)
    assert decoder.prefill(PROMPT) == free
    with pytest.raises(InputError, match="logit_bias of token 257: there are token ids 0 to 256"):
        decoder.set_sampling(SamplingOptions(logit_bias={257: 1}))


def test_options_that_cannot_be_set_leave_the_biases(
    where: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_decoder(where) as decoder:
        decoder.set_sampling(SamplingOptions(logit_bias={3: 100}))
        set_options = decoder.plan.options.set
        calls = iter(range(2))

        def fail_once(values: object, stream: Any) -> None:
            if next(calls, 1) == 0:
                raise DriverError(1, "memcpy", "no")
            set_options(values, stream)

        monkeypatch.setattr(decoder.plan.options, "set", fail_once)
        with pytest.raises(DriverError):
            decoder.set_sampling(SamplingOptions(logit_bias={5: 100}))
        assert decoder.prefill(PROMPT) == 3
