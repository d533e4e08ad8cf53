"""Drafts from the sequence itself: the tokens of single steps, bit by bit, whatever is drafted.

A silent wrong answer here would be a draft that the model does not choose, or a token that depends
on the rows beside its own.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from benchmarks.lookup import SuccessorCheckpoint, pieces
from ostinato.bench.random_weights import PackedCheckpoint
from ostinato.errors import InputError, LogitsError
from ostinato.models.cuda import lowering as kc
from ostinato.models.decoder import Decoder
from ostinato.models.host.kernels import HOST_KERNELS, drafts_of
from ostinato.models.host.packed_kernels import compiled, without_extension
from ostinato.models.host.shard_kernels import _key
from ostinato.models.program import (
    ACTIVE,
    DRAFTS,
    FROM_STATE,
    MASKED,
    MORE,
    OPTIONS,
    SAMPLE,
    STOP_TOKENS,
    decode_program,
)
from ostinato.models.sampling import GREEDY, SamplingOptions
from ostinato.models.stepper import TokenMasks
from ostinato.serve.scheduler import common as common_length
from tests.conftest import open_test_device
from tests.models.emulated import emulate_decoders
from tests.models.machines import on_kernels
from tests.models.proof import MODES, WIDE, interrupted, on_both
from tests.models.random_models import RandomModel, llama

MODEL = RandomModel(llama(2, 1, 32, inner=72, vocabulary=67, layers=2, tied_embeddings=True))
"""It repeats itself, with breaks in between: many drafts are right, and many are not."""
CONTEXT = 70
MOST = {"compiled": 7, "numpy": 3, "emulated": 7, "cuda": 7}
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
WAYS = ["compiled", "numpy", "emulated", CUDA]
not_emulated = pytest.mark.parametrize(
    "way",
    ["compiled", pytest.param("numpy", marks=pytest.mark.slow), CUDA],
    indirect=True,
    scope="module",
)
"""For what only the host decides: NumPy shows no more, and the emulator takes seconds for it."""


def on_each_way(name: str, cases: Iterable[Any], **quick: Iterable[Any]) -> pytest.MarkDecorator:
    """Cases for all kernels; with those that `quick` names, the cases it does not name are slow."""
    made = [
        pytest.param(
            way, one, marks=[pytest.mark.gpu] if way == "cuda" else [pytest.mark.slow] * slow
        )
        for way in MOST
        for one in cases
        for slow in [one not in quick.get(way, cases)]
    ]
    return pytest.mark.parametrize(("way", name), made, indirect=["way"], scope="module")


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[tuple[str, ost.Device]]:
    """The kernels, and one device for all tests of them."""
    name = request.param
    if name == "compiled" and not compiled():
        pytest.skip("the extension was not built")
    if name == "emulated" and shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    with open_test_device("cuda" if name == "cuda" else "host", request.config) as device:
        yield name, device


@contextmanager
def opened(
    way: tuple[str, ost.Device], model: RandomModel = MODEL, **options: Any
) -> Iterator[Decoder]:
    name, device = way
    options = {"lookup": MOST[name], "max_context": CONTEXT, "max_rows": 8, **options}
    with (
        without_extension() if name == "numpy" else nullcontext(),
        pytest.MonkeyPatch.context() as patch,
    ):
        if name == "emulated":
            emulate_decoders(patch)
        decoder = Decoder(device, model.checkpoint(), stop_tokens=(), **options)
    with decoder:
        yield decoder


@pytest.fixture(scope="module")
def kept(way: tuple[str, ost.Device]) -> Iterator[Decoder]:
    """One decoder for the tests that leave its settings as they were."""
    with opened(way) as decoder:
        yield decoder


@pytest.fixture
def decoder(kept: Decoder) -> Iterator[Decoder]:
    kept.reset()
    yield kept
    kept.set_sampling(GREEDY)
    kept.set_stop_tokens(())


def prompt_of(seed: int) -> list[int]:
    """A short piece again and again, with some other tokens in between."""
    draw = random.Random(seed)
    piece = MODEL.tokens(draw.randint(1, 9), seed)
    made: list[int] = []
    while len(made) < 18:
        made += piece[: draw.randint(1, len(piece))]
        made += MODEL.tokens(draw.randint(0, 2), draw.randrange(99))
    return made


def one_by_one(decoder: Decoder, prompt: Sequence[int], count: int = CONTEXT) -> list[int]:
    decoder.reset()
    tokens = [decoder.prefill(prompt)]
    while not decoder.stopped() and len(tokens) <= count:
        tokens.append(decoder.decode())
    return tokens


def per_step(decoder: Decoder, before: Any) -> float:
    now = decoder.statistics()
    return (now.lookup_tokens - before.lookup_tokens) / (now.lookup_steps - before.lookup_steps)


def cache_of(decoder: Decoder, sequence: int = 0) -> bytes:
    cache = decoder.plan.buffers["cache"].to_numpy(decoder.stream)
    return cache[:, :, sequence, :, : len(decoder.tokens(sequence)) - 1].tobytes()


# ------------------------------------------------------------------------------ the same tokens


@on_each_way("seed", range(4), numpy=range(2), emulated=[1])
def test_tokens_are_those_of_single_steps(
    way: tuple[str, ost.Device], decoder: Decoder, seed: int
) -> None:
    """To the context's end, a limit, an end token, a count: often in the middle of a step."""
    draw, prompt = random.Random(seed), prompt_of(seed)
    before = decoder.statistics().one_by_one  # other tests have used the decoder
    wanted = one_by_one(decoder, prompt)
    cache = cache_of(decoder)
    assert len(wanted) == CONTEXT - len(prompt) + 1
    for tokens_per_launch in (1, 3, 8) if way[0] != "emulated" else (1, 3)[seed % 2 :][:1]:
        decoder.reset()
        found = [decoder.prefill(prompt), *decoder.run(tokens_per_launch=tokens_per_launch)]
        assert found == wanted
        assert decoder.tokens() == (*prompt, *wanted)
        assert decoder.stopped()
        assert cache_of(decoder) == cache, "not a bit of a key or value depends on other rows"

        limit = draw.randint(len(prompt) + 1, CONTEXT - 1)
        decoder.set_sampling(GREEDY, limit=limit)
        decoder.reset()
        found = [decoder.prefill(prompt), *decoder.run(tokens_per_launch=tokens_per_launch)]
        assert found == wanted[: limit - len(prompt) + 1]
        assert decoder.stopped()
        decoder.set_sampling(GREEDY)

        end = draw.choice(wanted[1:])
        if end != wanted[0]:
            decoder.set_stop_tokens([end])
            decoder.reset()
            found = [decoder.prefill(prompt), *decoder.run(tokens_per_launch=tokens_per_launch)]
            assert found == wanted[: wanted.index(end) + 1]
            assert decoder.stopped()
            decoder.set_stop_tokens(())

        decoder.reset()
        found = [decoder.prefill(prompt)]
        while len(found) < len(wanted):
            count = draw.randint(1, 9)
            ahead = draw.randint(0, 3)
            run = decoder.run(count=count, tokens_per_launch=tokens_per_launch, ahead=ahead)
            more = [*run]
            assert len(more) == min(count, len(wanted) - len(found))
            found += more
            if draw.random() < 0.5 and not decoder.stopped():
                found.append(decoder.decode())
        assert found == wanted
    numbers = decoder.statistics()
    assert not numbers.quarantined and numbers.one_by_one == before


def test_drafts_are_right_and_wrong_here(decoder: Decoder) -> None:
    """Else the other tests show nothing."""
    before = decoder.statistics()
    for seed in range(2):
        decoder.reset()
        decoder.prefill(prompt_of(seed))
        list(decoder.run())
    most = decoder.plan.sizes.lookup + 1
    assert 1.3 < per_step(decoder, before) < 0.9 * most


@on_each_way("lookup", [1, 2, 3, 4], emulated=[2])
def test_any_number_of_drafts(way: tuple[str, ost.Device], lookup: int) -> None:
    """On a CPU also the tokens of a decoder without drafts."""
    if lookup > MOST[way[0]]:
        pytest.skip("not with these kernels")
    with opened(way, lookup=lookup) as decoder, opened(way, lookup=0) as without:
        for seed in range(1 if way[0] == "emulated" else 3):
            wanted = one_by_one(decoder, prompt_of(seed))
            if way[0] in ("compiled", "numpy"):
                assert one_by_one(without, prompt_of(seed)) == wanted
            decoder.reset()
            assert [decoder.prefill(prompt_of(seed)), *decoder.run()] == wanted
        assert per_step(decoder, without.statistics()) <= lookup + 1


SMALL: dict[str, Any] = {"inner": 72, "vocabulary": 67, "layers": 2}
FAMILIES = {
    "biases, tied": llama(3, 1, 32, qkv_bias=True, tied_embeddings=True, **SMALL),
    "norms of heads": llama(2, 1, 64, hidden=96, qk_norm=True, tied_embeddings=True, **SMALL),
    "windows": llama(2, 2, 32, windows=(5, 0), **SMALL),
    "all of it": llama(
        2, 1, 32, hidden=80, windows=(0, 6), qkv_bias=True, qk_norm=True, rope_magnitude=1.3,
        tied_embeddings=True, **SMALL,
    ),
}  # fmt: skip


@on_each_way("family", FAMILIES, numpy=["windows", "all of it"], emulated=["all of it"])
def test_every_family_gives_the_bits_of_single_steps(
    way: tuple[str, ost.Device], family: str
) -> None:
    with opened(way, RandomModel(FAMILIES[family])) as decoder:
        for seed in range(1 if way[0] == "emulated" else 4):
            wanted = one_by_one(decoder, prompt_of(seed))
            cache = cache_of(decoder)
            decoder.reset()
            found = [decoder.prefill(prompt_of(seed)), *decoder.run(tokens_per_launch=3)]
            assert found == wanted
            assert cache_of(decoder) == cache
        assert decoder.statistics().lookup_tokens > decoder.statistics().lookup_steps
    # Steps of two sequences have more rows than those of one.
    given = {"sequences": 2, "lookup": 1 if way[0] == "numpy" else 3, "max_rows": 16}
    with opened(way, RandomModel(FAMILIES[family]), **given) as decoder:
        firsts = decoder.prefill_batch({0: prompt_of(0), 1: prompt_of(1)})
        steps = [decoder.decode_batch((0, 1)) for _ in range(12)]
        caches = [cache_of(decoder, sequence) for sequence in (0, 1)]
        for sequence in (0, 1):
            decoder.truncate(len(prompt_of(sequence)) + 1, sequence)
        list(decoder.run_batch((0, 1), count=12))
        for sequence in (0, 1):
            answer = decoder.tokens(sequence)[len(prompt_of(sequence)) :]
            assert [*answer] == [firsts[sequence], *(step[sequence] for step in steps)]
        assert [cache_of(decoder, sequence) for sequence in (0, 1)] == caches
        assert decoder.statistics().lookup_tokens > 0


@not_emulated
@pytest.mark.parametrize("mode", [m for m in MODES if m != "host sets rows"])
def test_every_mode_gives_the_same_tokens(way: tuple[str, ost.Device], mode: str) -> None:
    with opened(way, **MODES[mode]) as decoder:
        wanted = one_by_one(decoder, prompt_of(1))
        before = decoder.statistics()
        for tokens_per_launch in (1, 1, 4, 4):
            decoder.reset()
            first = decoder.prefill(prompt_of(1))
            assert [first, *decoder.run(tokens_per_launch=tokens_per_launch)] == wanted
        assert per_step(decoder, before) > 1
        numbers = decoder.statistics()
        assert not numbers.quarantined
        if "verify" in MODES[mode]:
            assert numbers.steps["lookup"].verified
            assert numbers.steps["lookup x 4"].verified


# ------------------------------------------------------------------------------ several sequences


SEVERAL = {"sequences": 4, "max_rows": 8}
"""A step of any of these sequences has 8 rows, so on a GPU too it has the bits of a single one."""


@pytest.fixture(scope="module")
def several(way: tuple[str, ost.Device]) -> Iterator[tuple[Decoder, Decoder]]:
    """A decoder that drafts for several sequences, and one that goes step by step: without drafts,
    or on a GPU with steps of as many rows."""
    # With NumPy only steps of four rows have the bits of single ones, so pieces have four too.
    more = SEVERAL | ({"max_rows": 4} if way[0] == "numpy" else {})
    single = {"lookup": 0} if way[0] in ("compiled", "numpy") else {"max_rows": 8}
    with opened(way, **more) as decoder, opened(way, **single) as other:
        yield decoder, other


class Request:
    """A prompt with settings, and the tokens that it gets one by one."""

    def __init__(self, draw: random.Random, single: Decoder) -> None:
        self.prompt = prompt_of(draw.randrange(9))[: draw.randint(1, 24)]
        if draw.random() < 0.4:
            self.prompt = prompt_of(0)[: draw.randint(12, 18)] + self.prompt[:6]
        self.limit = draw.randint(len(self.prompt) + 1, CONTEXT + 5)
        self.masked = draw.random() < 0.15
        self.logprobs = draw.choice((None, None, None, None, 2))
        self.options = GREEDY
        if draw.random() < 0.3:
            self.options = draw.choice(
                [
                    SamplingOptions(temperature=0.8, seed=draw.randrange(99)),
                    SamplingOptions(repetition_penalty=1.2),
                    SamplingOptions(logit_bias={5: 3.0}),
                ]
            )
        self.set(single, 0)
        single.reset()
        self.found: list[int] = []
        self.wanted = [*single.prefill_batch({0: self.prompt}, masks=masks_of({0: self})).values()]
        while not single.stopped():
            self.found = self.wanted
            self.wanted += single.decode_batch([0], masks=masks_of({0: self}))
        self.found = []

    def set(self, decoder: Decoder, sequence: int) -> None:
        given: dict[str, Any] = {"limit": self.limit, "answer": len(self.prompt)}
        decoder.set_sampling(self.options, sequence, logprobs=self.logprobs, **given)


def masks_of(requests: dict[int, Request]) -> TokenMasks | None:
    """A mask depends on the number of tokens that a request has."""
    masked = {sequence: one for sequence, one in requests.items() if one.masked}

    def fill(words: np.ndarray) -> None:
        for sequence, one in masked.items():
            words[sequence] = 0x5A5A5A5A << len(one.found) % 2

    return TokenMasks(tuple(masked), fill) if masked else None


@on_each_way("seed", range(12), compiled=range(3), numpy=[4], emulated=[0])
def test_several_sequences_give_the_tokens_of_single_steps(
    way: tuple[str, ost.Device], several: tuple[Decoder, Decoder], seed: int
) -> None:
    """A random program: requests join and leave at different steps, with prefixes of each other;
    some draw, or have penalties, biases, log probabilities, masks; limits and end tokens, runs that
    are left, finished, and go on as single steps."""
    decoder, single = several
    draw = random.Random(seed)
    stops = [draw.randrange(MODEL.config.vocabulary)] * draw.randint(0, 1)
    decoder.set_stop_tokens(stops)
    single.set_stop_tokens(stops)
    decoder.reset()
    slots: dict[int, Request] = {}
    over = 0
    rounds = 6 if way[0] == "emulated" else 40
    for _ in range(rounds):
        for sequence in range(4):
            if sequence in slots or draw.random() < 0.3:
                continue
            one = slots[sequence] = Request(draw, single)
            source = draw.choice([s for s in range(4) if s != sequence])
            kept = decoder.keep_common(one.prompt, sequence)
            common = common_length(one.prompt[:-1], decoder.tokens(source)[:-1])
            if common > kept and draw.random() < 0.7:
                decoder.copy_prefix(common, source, sequence)
                kept = common
            one.set(decoder, sequence)
            rest = {sequence: one.prompt[kept:]}
            one.found += decoder.prefill_batch(rest, masks=masks_of({sequence: one})).values()
        live = [s for s in slots if not decoder.stopped(s)]
        some = {s: slots[s] for s in draw.sample(live, draw.randint(min(1, len(live)), len(live)))}
        if some:
            go_on(decoder, some, draw)
        for sequence, one in [*slots.items()]:
            assert one.found == one.wanted[: len(one.found)]
            assert decoder.tokens(sequence) == (*one.prompt, *one.found)
            if decoder.stopped(sequence):
                assert one.found == one.wanted
            if decoder.stopped(sequence) or draw.random() < 0.1:
                over += 1
                del slots[sequence]
    assert over > rounds // 20
    assert not decoder.statistics().quarantined


def go_on(decoder: Decoder, some: dict[int, Request], draw: random.Random) -> None:
    """The next tokens of these requests, in one of several ways."""
    masks = masks_of(some)
    if draw.random() < 0.1:
        for sequence, token in zip(some, decoder.decode_batch(some, masks=masks), strict=True):
            some[sequence].found.append(token)
        return
    count = draw.choice((None, draw.randint(1, 9)))
    each = 1 if masks is not None else draw.choice((1, 3))
    left, finished = draw.choice((99, draw.randint(1, 9))), draw.random() < 0.5
    before = {sequence: len(one.found) for sequence, one in some.items()}
    given = {"count": count, "tokens_per_launch": each, "ahead": draw.randint(0, 2)}
    with decoder.run_batch(some, masks=masks, **given) as run:
        within = set[int]()
        for number, item in enumerate(run, 1):
            assert not within or {*item} <= within, "what is left of a step comes before the next"
            within = {*item} if run.within_step else set()
            for sequence, token in item.items():
                one = some[sequence]
                one.found.append(token)
                assert decoder.tokens(sequence)[-1] == token
                if one.logprobs is not None:
                    assert decoder.logprobs(sequence).token == token
            if number == left and finished:
                run.finish()
            elif number == left:
                return
    for sequence, one in some.items():
        taken = len(one.found) - before[sequence]
        assert decoder.stopped(sequence) or left < 99 or taken == count


def test_several_sequences_draft(
    way: tuple[str, ost.Device], several: tuple[Decoder, Decoder]
) -> None:
    """Each drafts from its own tokens and keeps its own number; the others take one token."""
    decoder, single = several
    decoder.set_stop_tokens(())
    single.set_stop_tokens(())
    single.set_sampling(GREEDY)  # without the limits of other tests
    decoder.reset()
    wanted = {s: one_by_one(single, prompt_of(s), 20) for s in (0, 1)}
    before, kept = decoder.statistics(), dict.fromkeys(range(2 if way[0] == "numpy" else 3), 0)
    for sequence in kept:
        options = SamplingOptions(temperature=0.7, seed=1) if sequence == 2 else GREEDY
        decoder.set_sampling(options, sequence)
        decoder.prefill(prompt_of(sequence % 2), sequence)
    steps = 0
    for item in (run := decoder.run_batch(kept, ahead=0)):
        steps += not run.within_step
        for sequence in item:
            kept[sequence] += 1
        if kept[0] >= 19 and kept[1] >= 19 and not run.within_step:
            break
    assert kept.get(2, steps) == steps, "NumPy's steps have four rows, none for a third sequence"
    assert max(kept[0], kept[1]) > 1.2 * steps and kept[0] != kept[1]
    for sequence in (0, 1):
        assert decoder.tokens(sequence)[len(prompt_of(sequence)) :][:20] == (
            *wanted[sequence][:20],
        )
    now = decoder.statistics()
    assert now.lookup_tokens - before.lookup_tokens == kept[0] + kept[1]
    assert now.lookup_steps - before.lookup_steps == 2 * steps
    decoder.set_sampling(GREEDY, 2)


# ------------------------------------------------------------- a row does not depend on the others


def test_logits_of_a_row_do_not_depend_on_the_other_rows(decoder: Decoder) -> None:
    """Those of a step that drafts are those of a single step, bit by bit, at each of its rows."""
    prompt, seen = prompt_of(3), set()
    one_by_one(decoder, prompt, 1)
    wanted = {}
    while not decoder.stopped():
        wanted[len(decoder.tokens()) - 1] = decoder.logits().tobytes()
        decoder.decode()
    decoder.reset()
    decoder.prefill(prompt)
    while not decoder.stopped():
        start = len(decoder.tokens()) - 1
        for token in decoder.run(ahead=0):
            entry = decoder.plan.ring.array[0, len(decoder.tokens()) - 1]
            assert entry["token"] & ~MORE == token
            if entry["token"] == token:
                break  # the first step's last token
        logits = decoder.plan.buffers["logits"].to_numpy(decoder.stream)
        for row in range(len(decoder.tokens()) - 1 - start):
            position = start + row + 1
            if position in wanted:  # behind those of the only sequence are the drafts', by row
                found = logits[row + 1 if row else 0]
                assert found.tobytes() == wanted[position], (start, row)
                seen.add(row)
    assert seen == set(range(decoder.plan.sizes.lookup + 1))


CHECKPOINTS = {
    "successors": lambda config: SuccessorCheckpoint(config, "successors"),
    "random": lambda config: RandomModel(config).checkpoint(),
    "Q8_0": lambda config: PackedCheckpoint(config, "Q8_0", "Q8_0"),
    "Q4_K_M": lambda config: PackedCheckpoint(config, "Q4_K_M", "Q4_K_M"),
}


@on_both(
    "case",
    host=[("tiny", name, 3, sequences) for name in CHECKPOINTS for sequences in (1, 2)],
    cuda=[
        (shape, name, lookup, sequences)
        for shape, name in [
            *((shape, name) for shape in WIDE for name in ("successors", "random")),
            *(("as Llama-3.2-1B", kind) for kind in ("Q8_0", "Q4_K_M")),
        ]
        for lookup, sequences in ((1, 1), (3, 1), (7, 1), (15, 1), (3, 5), (7, 8))
    ],
)
def test_real_widths_have_the_bits_of_single_steps(
    machine: ost.Device, case: tuple[str, str, int, int]
) -> None:
    """Their kernels are cut otherwise: tokens, and all keys and values."""
    shape, name, lookup, sequences = case
    config = WIDE.get(shape, llama(4, 2, 64, inner=512, vocabulary=301, layers=2))
    config = replace(config, tied_embeddings=False)
    given: dict[str, Any] = {"lookup": lookup, "stop_tokens": (), "max_context": 400}
    every = range(sequences)
    prompts = [pieces(config.vocabulary, 60, 3 + sequence) for sequence in every]
    with Decoder(machine, CHECKPOINTS[name](config), sequences=sequences, **given) as decoder:
        # Of several sequences, the last steps of a count would be a smaller batch's.
        for tokens_per_launch in (1, 4) if sequences == 1 else (1,):
            decoder.reset()
            found = [[decoder.prefill(prompts[sequence], sequence)] for sequence in every]
            for item in decoder.run_batch(every, count=100, tokens_per_launch=tokens_per_launch):
                for sequence, token in item.items():
                    found[sequence].append(token)
            caches, numbers = [cache_of(decoder, one) for one in every], decoder.statistics()
            for sequence in every:
                decoder.truncate(len(prompts[sequence]) + 1, sequence)
            steps = [decoder.decode_batch(every) for _ in range(100)]
            assert [one[1:] for one in found] == [[*tokens] for tokens in zip(*steps, strict=True)]
            assert [cache_of(decoder, one) for one in every] == caches
        assert not numbers.one_by_one and not numbers.quarantined
        if name == "successors":
            assert all(one[:60] == [*range(1, 61)] for one in found)
            assert numbers.lookup_tokens > 1.2 * numbers.lookup_steps


# ------------------------------------------------------------------------------------ how runs end


@not_emulated
@pytest.mark.parametrize("options", [{"ahead": 255}, {"tokens_per_launch": 64, "ahead": 3}])
def test_the_ring_is_never_overrun(way: tuple[str, ost.Device], options: dict[str, int]) -> None:
    """As far ahead as may be, around the ring, and a caller who dawdles."""
    with opened(way, lookup=2, max_context=777) as decoder:
        wanted = one_by_one(decoder, prompt_of(5), 777)
        assert len(wanted) > 2.5 * decoder.plan.sizes.ring
        decoder.reset()
        found = [decoder.prefill(prompt_of(5))]
        for token in decoder.run(**options):
            found.append(token)
            if len(found) in (2, 30, 300):
                time.sleep(0.1)
        assert found == wanted


@not_emulated
@pytest.mark.parametrize("at", [1, 3, 4, 8])
@pytest.mark.parametrize("tokens_per_launch", [1, 4])
def test_an_interrupted_run_goes_on(decoder: Decoder, at: int, tokens_per_launch: int) -> None:
    prompt = prompt_of(2)
    wanted = one_by_one(decoder, prompt)
    decoder.reset()
    found = [decoder.prefill(prompt)]
    with interrupted(at):
        found += decoder.run(tokens_per_launch=tokens_per_launch)
    found = [*decoder.tokens()[len(prompt) :]]
    assert len(found) == at
    found += decoder.run(count=10, tokens_per_launch=tokens_per_launch)
    assert found == wanted[: at + 10]


@not_emulated
@pytest.mark.parametrize("taken", [0, 1, 2, 5])
def test_a_finished_run_gives_all_that_was_launched(decoder: Decoder, taken: int) -> None:
    prompt = prompt_of(2)
    wanted = one_by_one(decoder, prompt)
    decoder.reset()
    found = [decoder.prefill(prompt)]
    run = decoder.run(ahead=2)
    found += islice(run, taken)
    run.finish()
    found += run
    assert found == wanted[: len(found)]
    writes = decoder.statistics().host_writes
    found += decoder.run(count=4)
    assert found == wanted[: len(found)]
    if taken > 1:
        assert decoder.statistics().host_writes == writes, "it goes on from the device's state"


def test_logits_of_a_step_that_drafts_are_refused(decoder: Decoder) -> None:
    decoder.prefill(prompt_of(1))
    decoder.logits()
    list(decoder.run())
    with pytest.raises(InputError, match="no logits"):
        decoder.logits()


def test_a_logit_that_is_not_a_number_is_an_error(way: tuple[str, ost.Device]) -> None:
    with opened(way) as decoder:
        wanted = one_by_one(decoder, prompt_of(1), 30)
        decoder.reset()
        first = decoder.prefill(prompt_of(1))
        found = [first, *decoder.run(count=3)]
        norm = decoder.weights.buffer("final_norm")
        norm.set(np.full(norm.shape, np.nan, np.float32), decoder.stream)
        with pytest.raises(LogitsError):
            for token in decoder.run():
                found.append(token)
        assert found == wanted[: len(found)]


# -------------------------------------------------------------------------------------- who drafts


@not_emulated
@pytest.mark.parametrize(
    "options",
    [
        {"options": SamplingOptions(temperature=0.8, seed=3)},
        {"options": SamplingOptions(repetition_penalty=1.2)},
        {"options": SamplingOptions(logit_bias={5: 3.0})},
        {"options": GREEDY, "logprobs": 2},
    ],
)
def test_other_choices_do_not_draft(decoder: Decoder, options: dict[str, Any]) -> None:
    decoder.set_sampling(**options)
    wanted = one_by_one(decoder, prompt_of(4))
    before = decoder.statistics()
    decoder.reset()
    assert [decoder.prefill(prompt_of(4)), *decoder.run()] == wanted
    after = decoder.statistics()
    assert after.lookup_steps == before.lookup_steps
    (reason,) = after.one_by_one.items() - before.one_by_one.items()
    assert "greedy" in reason[0]


@not_emulated
@pytest.mark.parametrize("options", [{"graphs": False}, {"device_state": False}])
def test_without_graphs_there_are_no_drafts(
    way: tuple[str, ost.Device], options: dict[str, bool]
) -> None:
    with opened(way, **options) as decoder:
        wanted = one_by_one(decoder, prompt_of(6), 12)
        decoder.reset()
        assert [decoder.prefill(prompt_of(6)), *decoder.run(count=12)] == wanted
        assert decoder.statistics().lookup_steps == 0
        assert decoder.statistics().one_by_one


def test_bad_numbers_of_drafts_are_refused(way: tuple[str, ost.Device]) -> None:
    for lookup, options in ((-1, {}), (64, {}), (8, {"max_rows": 8}), (True, {}), ("4", {})):
        with pytest.raises(InputError, match="lookup"), opened(way, lookup=lookup, **options):
            pass
    if way[0] == "numpy":
        with (
            pytest.raises(InputError, match=r"0 to 3 with these kernels \(numpy\)"),
            opened(way, lookup=4),
        ):
            pass


# ------------------------------------------------------------------------------------- the kernels


def drafted(tokens: Sequence[int], most: int) -> list[int]:
    """By the rule, one place after the other."""
    best = (0, -1)
    for place in range(len(tokens) - 1):
        common = 0
        while common < 3 and common <= place and tokens[place - common] == tokens[-1 - common]:
            common += 1
        best = max(best, (common, place))
    made: list[int] = [*tokens]
    for index in range(most if best[0] else 0):
        made.append(made[best[1] + 1 + index])
    return made[len(tokens) :]


@pytest.mark.parametrize("seed", range(40))
def test_drafts_follow_the_rule(seed: int) -> None:
    draw = random.Random(seed)
    tokens = [draw.randrange(draw.choice((2, 3, 9))) for _ in range(draw.randint(1, 40))]
    for most in (1, 4, 50):
        found = drafts_of(np.array(tokens, np.int32), most).tolist()
        assert found == drafted(tokens, most)


CONFIG = MODEL.config
LIVE = ACTIVE | SAMPLE


def launch_of(kernel: str, rows: int) -> tuple[kc.CudaLaunch, ...]:
    calls = [c for c in decode_program(CONFIG, lookup=rows - 1) if c.kernel == kernel]
    return kc.lower(calls, CONFIG, rows=rows, context=3000)


def both(machine: Any, kernel: str, rows: int, values: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the kernel writes on the machine, after a check that it is the host's."""
    (launch,) = launch_of(kernel, rows)
    names = [p.name for p in HOST_KERNELS[kernel].signature.parameters]
    on_host = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in values.items()}
    HOST_KERNELS[kernel].function(
        None,
        *(v.reshape(-1) if isinstance(v := on_host[name], np.ndarray) else v for name in names),
    )
    given = {n: machine.array(v) if isinstance(v, np.ndarray) else v for n, v in values.items()}
    machine.launch(launch, given)
    machine.synchronize()
    found = {}
    for name in ("drafted", "scored", "state", "ring"):
        if name in values:
            found[name] = machine.read(given[name]).reshape(values[name].shape)
            np.testing.assert_array_equal(found[name], on_host[name])
    return found


@on_kernels("rows", [2, 8, 5, 64])
def test_draft_makes_rows_of_what_followed(
    kernels: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each sequence, up to the next one's row; one behind another, or with room between.  On
    the emulator also with threads in any order, and the last block first."""
    context, count, draw = 3000, 5, random.Random(rows)
    for number in range(12):
        if number == 10:
            monkeypatch.setenv("EMULATED_ORDER", "1")
        most = draw.randint(1, rows - 1)
        history = np.array([draw.randrange(7) for _ in range(count * context)], np.int32)
        if number % 3 == 0:
            history[:] = np.arange(history.size) + 10
        history = history.reshape(count, context)
        state = np.array([[4, 9, 9, 0]] * count, np.int32)
        given = np.zeros((rows, 4), np.int32)
        firsts = [0, *sorted(draw.sample(range(1, rows), min(draw.randrange(count), rows - 1)))]
        scored = np.zeros((rows, 4), np.int32)
        made = scored.copy()
        for index, end in pairwise([*firsts, rows]):
            sequence, position = firsts.index(index), draw.choice((0, 1, 5, 31, 1100, 2999))
            drafts, stopped = draw.random() < 0.8, draw.random() < 0.1
            from_state = draw.random() < 0.7
            flags = LIVE | (DRAFTS if drafts else draw.choice((0, MASKED)))
            token, state[sequence] = 3 + from_state, (4, position, 0, stopped)
            given[index] = (3, position, sequence, flags | (FROM_STATE if from_state else 0))
            wanted = drafted([*history[sequence, :position].tolist(), token], most)
            if stopped and from_state:
                flags, wanted = flags & ~ACTIVE, []
            scored[index] = made[index] = (token, position, sequence, flags)
            for row in range(index + 1, min(end, index + 1 + len(wanted) * drafts)):
                made[row] = (wanted[row - index - 1], position + row - index, sequence, flags)
                scored[row] = (*made[row, :2], count + row, flags)
            if drafts:
                made[index:end, 3] &= ~SAMPLE
        values = {
            "rows": given, "state": state, "history": history,
            "drafted": np.full((rows, 4), 77, np.int32),
            "scored": np.full((rows, 4), 77, np.int32),
            "row_count": rows, "sequences": count, "context": context, "most": most,
        }  # fmt: skip
        found = both(kernels, "draft", rows, values)
        np.testing.assert_array_equal(found["drafted"], made)
        np.testing.assert_array_equal(found["scored"], scored)


@pytest.mark.parametrize(
    "row",
    [(1, 2, -1, LIVE), (1, 2, 2, LIVE), (1, 99, 0, LIVE), (1, -1, 0, LIVE), (1, 2, 0, 0)],
)
def test_draft_reads_nothing_for_rows_out_of_range(emulator: Any, row: tuple[int, ...]) -> None:
    values = {
        "rows": np.array([(*row[:3], row[3] | DRAFTS), (0, 0, 0, 0)], np.int32),
        "state": np.zeros((2, 4), np.int32),
        "history": np.ones((2, 40), np.int32),
        "drafted": np.full((2, 4), 77, np.int32),
        "scored": np.full((2, 4), 77, np.int32),
        "row_count": 2, "sequences": 2, "context": 40, "most": 1,
    }  # fmt: skip
    found = both(emulator, "draft", 2, values)
    assert not found["drafted"][1].any()


@on_kernels("rows", [2, 8, 5, 64])
def test_accept_keeps_what_the_model_chooses(
    kernels: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each sequence that drafts, however many rows it has; it leaves the others to `sample`."""
    (launch,) = launch_of("accept", rows)
    draw, blocks = random.Random(rows), int(dict(launch.options.defines)["HEAD_BLOCKS"])
    count, ring, lengths = 4, 64, set()
    for number in range(24):
        if number == 22:
            monkeypatch.setenv("EMULATED_ORDER", "1")
        chosen = [draw.randrange(CONFIG.vocabulary) for _ in range(rows)]
        live, scored = np.zeros((2, rows, 4), np.int32)
        firsts = [0, *sorted(draw.sample(range(1, rows), min(draw.randrange(count), rows - 1)))]
        groups = []
        for index, end in pairwise([*firsts, rows]):
            sequence, position = firsts.index(index), draw.randint(0, 20)
            drafts = index == 0 or draw.random() < 0.8
            if draw.random() < 0.3:
                end = draw.randint(index + 1, end)
            end = end if drafts else index + 1
            tokens = [chosen[index - 1], *chosen[index : end - 1]]  # as if it were a draft
            right = draw.randint(0, end - index - 1)
            if index + right + 1 < end:
                tokens[right + 1] = (tokens[right + 1] + 1) % CONFIG.vocabulary
            for row, token in enumerate(tokens, index):
                live[row] = (token, position + row - index, sequence, LIVE)
                scored[row] = live[row]
                if row > index:
                    scored[row, 2] = count + row
            if drafts:
                live[index:end, 3] = ACTIVE | DRAFTS
                groups.append((sequence, position, index, right))
        logits = np.zeros((count + rows, CONFIG.vocabulary), np.float32)
        places = scored[:, 2]
        logits[places, chosen] = live[:, 3] & ACTIVE
        stops = np.full(STOP_TOKENS, -1, np.int32)
        if number % 5 == 2:
            stops[draw.randrange(STOP_TOKENS)] = draw.choice(chosen)
        options = np.zeros(count, OPTIONS)
        options["repetition_penalty"], options["limit"] = 1, 99
        if number % 5 == 3:
            options["limit"] = [draw.randint(1, 30) for _ in range(count)]
        if number % 5 == 4:
            logits[draw.choice(places), 3] = draw.choice((np.nan, np.inf))
        keys = np.array(
            [[_key(v, i) for i, v in enumerate(logits[place])] for place in places], np.uint64
        )
        # Each block of `head` leaves its largest; here the first has some, and the last the rest.
        found = np.zeros((rows, blocks), np.uint64)
        found[:, 0], found[:, -1] = keys[:, ::2].max(1), keys.max(1)
        workspace = np.zeros(kc.COUNTER_BYTES // 4 + 2 * found.size, np.float32)
        workspace[kc.COUNTER_BYTES // 4 :] = found.reshape(-1).view(np.float32)
        values = {
            "live": live, "scored": scored, "logits": logits, "options": options.view(np.uint64),
            "stops": stops, "state": np.full((count, 4), 77, np.int32),
            "ring": np.full((count, ring, 2), 77, np.int32),
            "workspace": workspace, "row_count": rows, "vocabulary": CONFIG.vocabulary,
            "stop_count": STOP_TOKENS, "context": 22, "ring_size": ring,
        }  # fmt: skip
        made = both(kernels, "accept", rows, values)
        for sequence in {*range(count)} - {one[0] for one in groups}:
            assert (made["state"][sequence] == 77).all() and (made["ring"][sequence] == 77).all()
        for sequence, position, index, right in groups:
            written = made["ring"][sequence][made["ring"][sequence, :, 1] != 77]
            lengths.add(len(written))
            assert sum(token & MORE == 0 or token < 0 for token, _ in written.tolist()) == 1
            if number % 5 == 0 and position + right + 1 < 22:
                assert len(written) == right + 1
                wanted = [chosen[index + right], position + right + 1]
                assert made["state"][sequence].tolist()[:2] == wanted
    assert len(lengths) > min(2, rows - 1)
