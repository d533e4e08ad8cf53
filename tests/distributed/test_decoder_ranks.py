"""Decoders of several ranks on host devices: one device's tokens, the same bits on all ranks, and
what happens when ranks differ or fail."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ostinato as ost
from ostinato.distributed import Group, local_groups
from ostinato.errors import (
    DisagreementError,
    GroupError,
    InputError,
    RankLostError,
    UnsupportedModelError,
)
from ostinato.models import TokenMasks
from ostinato.models import ranks as ranks_module
from ostinato.models.decoder import Decoder
from ostinato.models.sampling import GREEDY, SamplingOptions, log_probabilities, sample
from tests.distributed.test_local import outcomes
from tests.models.model_files import write_gguf
from tests.models.random_models import RandomModel, llama

SHAPES = {
    "8 heads, tied": RandomModel(
        llama(8, 4, 16, hidden=96, inner=128, vocabulary=512, tied_embeddings=True)
    ),
    "9 heads": RandomModel(llama(9, 3, 16, hidden=80, inner=96, vocabulary=273)),
    "1 key head": RandomModel(llama(8, 1, 32, inner=160, vocabulary=304, layers=2)),
    "biases": RandomModel(llama(8, 2, 16, inner=128, vocabulary=304, layers=2, qkv_bias=True)),
    "norms of heads, windows": RandomModel(
        llama(8, 4, 16, hidden=96, inner=128, vocabulary=304, qk_norm=True, windows=(7, 0, 7))
    ),
}
FIRST = next(iter(SHAPES))
RANKS = [1, 2, 3, 4, 8]
RELATIVE = 1e-5


def possible(model: RandomModel, size: int) -> bool:
    c = model.config
    return not (c.heads % size or c.inner % size or c.vocabulary % size)


QUICK = {(FIRST, 1), (FIRST, 2), (FIRST, 8), ("9 heads", 3), ("1 key head", 4), ("biases", 2)}
QUICK |= {("norms of heads, windows", 4)}
CASES = [
    pytest.param(name, size, marks=() if (name, size) in QUICK else pytest.mark.slow)
    for name, model in SHAPES.items()
    for size in RANKS
    if possible(model, size)
]


def decoding(
    model: Any, work: Callable[[Decoder], Any], **options: Any
) -> Callable[[Group | None], Any]:
    """`work` on a decoder of a group's rank, or on one device."""

    def call(group: Group | None) -> Any:
        given = model.checkpoint() if isinstance(model, RandomModel) else model
        settings = {"stop_tokens": (), "threads": 1, **options}
        with (
            ost.open_device("host") as device,
            Decoder(device, given, group=group, **settings) as decoder,
        ):
            return work(decoder)

    return call


def on_ranks(size: int, work: Callable[[Group | None], Any], deadline: float = 60) -> Any:
    """What every rank gives, which must be the same."""
    with local_groups(size, deadline=deadline) as groups:
        found = groups.run(work)
    for one in found[1:]:
        assert one == found[0]
    return found[0]


def with_logits(prompt: list[int], count: int) -> Callable[[Decoder], Any]:
    def work(decoder: Decoder) -> list[tuple[int, bytes]]:
        found = [(decoder.prefill(prompt), decoder.logits().tobytes())]
        for _ in range(count):
            found.append((decoder.decode(), decoder.logits().tobytes()))
        assert not decoder.statistics().quarantined
        return found

    return work


@pytest.mark.parametrize(("shape", "size"), CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_ranks_give_the_tokens_of_one_device(
    shape: str, size: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the margin rule: a token may differ only where the best two logits are as close as
    float32 sums in another order make them; after it nothing is compared."""
    from ostinato.models.host.backend import HostBackend

    monkeypatch.setattr(
        "ostinato.models.decoder.backend_for",
        lambda device, **kw: HostBackend(device, threads=1, packed=packed),
    )
    model = SHAPES[shape]
    work = decoding(model, with_logits(model.tokens(11), 10))
    one, several = work(None), on_ranks(size, work)
    for (token, bits), (other, other_bits) in zip(one, several, strict=True):
        logits, others = (np.frombuffer(b, np.float32) for b in (bits, other_bits))
        difference = np.linalg.norm(logits - others) / np.linalg.norm(logits)
        assert difference < RELATIVE
        assert other == int(others.argmax())
        if token != other:
            best = np.sort(logits)[-2:]
            assert best[1] - best[0] < 1e-4
            break


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "graphs": ({}, None),
    "eager": ({"graphs": False}, None),
    "recorded": ({"build": "record"}, None),
    "verified": ({"verify": "first"}, None),
    "host state": ({"device_state": False}, None),
    "ahead": ({}, {}),
    "loops": ({}, {"tokens_per_launch": 4}),
    "recorded loops": ({"build": "record"}, {"tokens_per_launch": 4}),
    "small pieces": ({"max_rows": 4}, None),
}


@pytest.mark.parametrize(
    ("way", "collectives"),
    [
        *((way, "exchange") for way in WAYS),
        *(
            pytest.param(way, "library", marks=[pytest.mark.slow] * (way not in ("eager", "loops")))
            for way in WAYS
        ),
    ],
)
def test_every_way_of_running_gives_the_same(way: str, collectives: str) -> None:
    options, run = WAYS[way]
    options = {**options, "collectives": collectives}

    def work(decoder: Decoder) -> list[int]:
        tokens = [decoder.prefill(SHAPES[FIRST].tokens(11)), decoder.decode()]
        if run is None:
            tokens += [decoder.decode() for _ in range(12)]
        else:
            tokens += list(decoder.run(count=12, **run))
        numbers = decoder.statistics()
        assert not numbers.quarantined and not (numbers.one_by_one if run is not None else {})
        return tokens

    assert on_ranks(2, decoding(SHAPES[FIRST], work, **options)) == plain_tokens()


@functools.cache
def plain_tokens() -> list[int]:
    def work(decoder: Decoder) -> list[int]:
        return [decoder.prefill(SHAPES[FIRST].tokens(11)), *decoder.run(count=13)]

    found: list[int] = on_ranks(2, decoding(SHAPES[FIRST], work))
    return found


@pytest.mark.parametrize("size", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_exchanges_in_memory_give_the_bits_of_others(size: int) -> None:
    """Sums go in the order of ranks in both ways."""
    model = SHAPES["9 heads"] if size == 3 else SHAPES[FIRST]
    work = with_logits(model.tokens(11), 6)
    wanted = on_ranks(size, decoding(model, work, collectives="library"))
    assert on_ranks(size, decoding(model, work, collectives="exchange")) == wanted


SAMPLINGS = {
    "temperature": SamplingOptions(temperature=0.9, seed=7),
    "top_k": SamplingOptions(temperature=1.1, top_k=17, seed=3),
    "top_p": SamplingOptions(temperature=0.8, top_p=0.7, seed=1 << 60),
    "min_p": SamplingOptions(temperature=1.5, min_p=0.05, seed=11),
    "penalty": SamplingOptions(repetition_penalty=1.4),
    "added": SamplingOptions(
        frequency_penalty=1.5, presence_penalty=0.5, logit_bias={3: 4.0, 9: -50.0}
    ),
    "all": SamplingOptions(
        temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, seed=5, repetition_penalty=1.2
    ),
}


@pytest.mark.parametrize("options", SAMPLINGS.values(), ids=SAMPLINGS)
def test_all_ranks_draw_the_same_token_from_all_logits(options: SamplingOptions) -> None:
    model = SHAPES[FIRST]

    def work(decoder: Decoder) -> tuple[list[int], list[int]]:
        decoder.set_sampling(options, answer=11, logprobs=2)
        drawn, reference = [decoder.prefill(model.tokens(11))], []
        for _ in range(10):
            seen = decoder.tokens()
            drawn.append(decoder.decode())
            reference.append(sample(decoder.logits(), options, len(seen), seen, 11))
            chosen, tokens, top = log_probabilities(decoder.logits(), drawn[-1], 2)
            found = decoder.logprobs()
            assert [token for token, _ in found.top] == tokens.tolist()
            assert np.allclose([found.logprob, *(p for _, p in found.top)], [chosen, *top])
        return drawn, reference

    drawn, reference = on_ranks(2, decoding(model, work))
    assert drawn[1:] == reference


def masked(decoder: Decoder, rank: int = 0) -> list[Any]:
    """Prompts, steps and runs with masks, beside a sequence without."""
    model = SHAPES[FIRST]
    made = np.random.default_rng(7)

    def fill(words: npt.NDArray[np.uint32]) -> None:
        assert rank == 0, "rank 0 makes the masks"
        words[[0, 2]] = made.integers(1 << 32, size=(2, words.shape[1]))

    masks = TokenMasks((0, 2), fill)
    for sequence, options in enumerate((GREEDY, SAMPLINGS["all"], SAMPLINGS["all"])):
        decoder.set_sampling(options, sequence, logprobs=1)
    prompts = {sequence: model.tokens(5, seed=sequence) for sequence in range(3)}
    found: list[Any] = [decoder.prefill_batch(prompts, masks=masks)]
    for _ in range(4):
        found += [decoder.decode_batch([2, 0, 1], masks=masks), decoder.decode_batch([1, 2])]
    for item in decoder.run_batch(range(3), count=5, masks=masks):
        found.append((item, [decoder.logprobs(sequence).top[0][0] for sequence in range(3)]))
    found.append([one for one, _ in zip(decoder.run_batch([0], masks=masks), "ab", strict=False)])
    return [*found, decoder.decode_batch([0, 1, 2]), [decoder.tokens(n) for n in range(3)]]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("graphs", [True, False])
def test_masks_of_rank_0_are_those_of_all(size: int, graphs: bool) -> None:
    """The tokens of one device."""
    one = decoding(SHAPES[FIRST], masked, sequences=3)(None)

    def work(group: Group | None) -> Any:
        assert group is not None
        ranked = partial(masked, rank=group.rank)
        return decoding(SHAPES[FIRST], ranked, sequences=3, graphs=graphs)(group)

    assert on_ranks(size, work) == one


def test_masks_that_rank_0_cannot_make_are_an_error_on_all() -> None:
    def fail(words: npt.NDArray[np.uint32]) -> None:
        raise ZeroDivisionError

    def work(group: Group) -> list[Any]:
        def call(decoder: Decoder) -> list[Any]:
            found: list[Any] = [decoder.prefill([1, 2])]
            decoder.reset()
            with pytest.raises(InputError if group.rank else ZeroDivisionError):
                decoder.prefill_batch({0: [1, 2]}, masks=TokenMasks((0,), fail))
            decoder.reset()
            return [*found, decoder.prefill([1, 2])]

        return decoding(SHAPES[FIRST], call)(group)

    first, again = on_ranks(2, work)  # type: ignore[arg-type]
    assert first == again, "the group goes on"


DRAFTING = RandomModel(llama(2, 2, 32, inner=72, vocabulary=68, layers=2, tied_embeddings=True))
"""It repeats itself, with breaks in between: many drafts are right, and many are not."""


def drafting(run: dict[str, Any], prompt: list[int], decoder: Decoder) -> tuple[list[int], int]:
    """The tokens of a prompt and of two runs, with a step between; and the steps that drafted."""
    tokens = [decoder.prefill(prompt), *decoder.run(count=13, **run), decoder.decode()]
    tokens += decoder.run(count=9, **run)
    numbers = decoder.statistics()
    assert not numbers.quarantined and not numbers.one_by_one
    assert numbers.lookup_tokens == 22
    return tokens, numbers.lookup_steps


@pytest.mark.parametrize("way", ["ahead", "recorded", "loops", "recorded loops"])
def test_ranks_draft_as_one_device_does(way: str) -> None:
    options, run = WAYS[way]
    prompt = [5, 7, 9, 11] * 4 + [5, 7]
    work = partial(drafting, run or {}, prompt)
    one = decoding(DRAFTING, work, **options, lookup=3)(None)
    assert on_ranks(2, decoding(DRAFTING, work, **options, lookup=3)) == one
    assert one[1] < 22, "no draft was right"
    single = on_ranks(2, decoding(DRAFTING, lambda d: [d.prefill(prompt), *d.run(count=23)]))
    assert one[0] == single


def drafts_beside_steps(decoder: Decoder) -> list[list[int]]:
    """The tokens of two sequences that draft in one run, which are those of single steps."""
    found = []
    for drafts in (True, False):
        decoder.reset()
        decoder.prefill_batch({0: [5, 7, 9] * 4, 1: [3, 8] * 5})
        if drafts:
            list(decoder.run_batch((0, 1), count=15))
        else:
            for _ in range(15):
                decoder.decode_batch((0, 1))
        found.append([decoder.tokens(0), decoder.tokens(1)])
    numbers = decoder.statistics()
    assert not numbers.quarantined
    assert numbers.lookup_steps < numbers.lookup_tokens == 30
    assert found[0] == found[1]
    return found[0]


def test_ranks_draft_while_all_sequences_may() -> None:
    """Several sequences at once; none while one of them draws, or has a mask."""
    prompts = {i: [3 + i, 8, 13 + i, 8] * 4 for i in range(3)}

    def work(decoder: Decoder, size: int) -> list[Any]:
        found: list[Any] = [decoder.prefill_batch(prompts), *decoder.run_batch(range(3), count=9)]
        steps = decoder.statistics().lookup_steps
        assert 0 < steps < 27
        for masks, options in ((None, SAMPLINGS["all"]), (TokenMasks((0,), allow_all), GREEDY)):
            decoder.set_sampling(options, 1)
            found += decoder.run_batch(range(3), count=4, masks=masks)
            assert size == 1 or decoder.statistics().lookup_steps == steps
        return [*found, [decoder.tokens(i) for i in range(3)]]

    def sized(size: int) -> Callable[[Group | None], Any]:
        return decoding(DRAFTING, partial(work, size=size), lookup=3, sequences=3)

    assert on_ranks(2, sized(2))[-1] == sized(1)(None)[-1]


def allow_all(words: npt.NDArray[np.uint32]) -> None:
    words[:] = 0xFFFFFFFF


def test_greedy_and_drawn_sequences_side_by_side() -> None:
    model = SHAPES[FIRST]
    prompts = [model.tokens(6, seed=i) for i in range(3)]

    def work(decoder: Decoder) -> list[list[int]]:
        found = []
        for options in (GREEDY, SAMPLINGS["all"], GREEDY):
            decoder.reset()
            decoder.set_sampling(options, 1)
            tokens = [[decoder.prefill(prompt, i)] for i, prompt in enumerate(prompts)]
            for _ in range(6):
                for one, token in zip(tokens, decoder.decode_batch((0, 1, 2)), strict=True):
                    one.append(token)
            found.append(tokens)
        return found

    together = decoding(model, work, sequences=3)
    several = on_ranks(2, together)
    assert several == together(None)
    assert several[0] == several[2] and several[0][1] != several[1][1]


def test_equal_logits_on_different_ranks_give_the_lowest_token() -> None:
    """An embedding of equal rows: all logits are the same."""
    model = SHAPES[FIRST]

    class Equal(RandomModel):
        def fill(self, name: str, out: Any) -> None:
            super().fill(name, out)
            if name == "embed":
                out[...] = out[:1]

    equal = Equal(model.config)
    assert on_ranks(4, decoding(equal, lambda d: [d.prefill([5, 6]), d.decode()])) == [0, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_logit_on_one_rank_is_an_error_on_all(value: float) -> None:
    model = SHAPES[FIRST]

    class Broken(RandomModel):
        def fill(self, name: str, out: Any) -> None:
            super().fill(name, out)
            if name == "embed":
                out[400:402, 0] = value, -value  # rows of the last rank's head

    def work(group: Group) -> Any:
        return decoding(Broken(model.config), lambda d: d.prefill([5, 6]))(group)

    with local_groups(4) as groups:
        found = outcomes(groups, work)
    assert all("NaN" in str(one) for one in found)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_files_are_shared(tmp_path: Path, kind: str) -> None:
    config = llama(8, 2, 32, hidden=256, inner=512, vocabulary=264, layers=2)
    path = write_gguf(tmp_path / "m.gguf", config=config, kind=kind)
    work = decoding(path, with_logits([1, 7, 200, 31], 12))
    one, several = work(None), on_ranks(4, work)
    for (token, bits), (other, other_bits) in zip(one, several, strict=True):
        logits, others = (np.frombuffer(b, np.float32) for b in (bits, other_bits))
        assert np.linalg.norm(logits - others) / np.linalg.norm(logits) < RELATIVE
        assert token == other


def test_sequences_are_copied_truncated_and_stopped_alike() -> None:
    model = SHAPES[FIRST]
    prompt = model.tokens(20)

    def work(decoder: Decoder) -> Any:
        first = decoder.prefill(prompt)
        decoder.copy_prefix(12, 0, 1)
        again = decoder.prefill(prompt[12:], 1)
        decoder.truncate(8)
        kept = decoder.keep_common(prompt)
        third = decoder.prefill(prompt[kept:])
        decoder.set_stop_tokens([decoder.decode()])
        decoder.truncate(len(prompt))
        decoder.extend(prompt[:3], 1)
        last = decoder.prefill(prompt[3:5], 1)
        return first, again, kept, third, last, decoder.tokens(), decoder.tokens(1)

    together = decoding(model, work, sequences=2)
    found = on_ranks(2, together)
    assert found == together(None)
    assert found[0] == found[1] == found[3]


# ------------------------------------------------------------------------------------- refusals


def test_a_model_that_ranks_cannot_share() -> None:
    with local_groups(2) as groups:
        found = outcomes(groups, decoding(SHAPES["9 heads"], lambda d: d.prefill([1])))
    assert all(isinstance(one, UnsupportedModelError) for one in found)
    assert "heads is 9, which 2 ranks cannot share" in str(found[0])


def test_weights_in_device_memory_are_not_split(host_device: ost.Device) -> None:
    model = SHAPES[FIRST]
    with (
        Decoder(host_device, model.checkpoint()) as decoder,
        local_groups(2) as groups,
        pytest.raises(InputError, match="not split over ranks"),
    ):
        Decoder(host_device, decoder.weights, group=groups[0])


# ------------------------------------------------------------------------------------- agreement


def differing(work: Callable[[Decoder, int], Any], **options: Any) -> list[Any]:
    """What each of 4 ranks ends with, of which rank 2 does something else."""

    def call(group: Group) -> Any:
        return decoding(SHAPES[FIRST], lambda d: work(d, group.rank), **options)(group)

    with local_groups(4, deadline=30) as groups:
        found = outcomes(groups, call)
    assert all(isinstance(one, DisagreementError) for one in found), found
    assert len({str(one) for one in found}) == 1
    return found


def test_another_prompt_is_an_error_before_it_runs() -> None:
    found = differing(lambda d, rank: d.prefill([5, 6, 7 + (rank == 2)]))
    assert "prefill of sequence 0" in str(found[0]) and "rank 2 has" in str(found[0])


def test_other_sampling_is_an_error_before_the_next_step() -> None:
    def work(decoder: Decoder, rank: int) -> None:
        decoder.prefill([5, 6, 7])
        decoder.set_sampling(SamplingOptions(temperature=1.0, seed=rank // 2))
        decoder.prefill([8])

    assert "set_sampling" in str(differing(work)[0])


def test_another_call_is_an_error() -> None:
    def work(decoder: Decoder, rank: int) -> None:
        decoder.prefill([5, 6, 7])
        if rank == 2:
            decoder.truncate(2)
        decoder.decode()

    assert "truncate" in str(differing(work)[0])


def test_another_batch_is_an_error() -> None:
    def work(decoder: Decoder, rank: int) -> None:
        for one in range(3):
            decoder.prefill([5, 6, 7], one)
        decoder.decode_batch((0, 1) if rank != 2 else (0, 1, 2))

    assert "decode of [0, 1, 2]" in str(differing(work, sequences=3)[0])


def test_another_model_is_an_error() -> None:
    def work(group: Group) -> Any:
        model = SHAPES[FIRST]
        config = llama(
            8, 4, 16, hidden=96, inner=128 + 128 * (group.rank == 1), vocabulary=512,
            tied_embeddings=True,
        )  # fmt: skip
        return decoding(RandomModel(config) if group.rank else model, lambda d: 0)(group)

    with local_groups(2, deadline=30) as groups:
        found = outcomes(groups, work)
    assert all(isinstance(one, DisagreementError) for one in found)
    assert "inner=128" in str(found[0]) and "inner=256" in str(found[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"graphs": False}, "graphs False"),
        ({"build": "record"}, "build 'record'"),
        ({"warmups": 3}, "warmups 3"),
        ({"verify": "first"}, "verify 'first'"),
    ],
)
def test_other_steps_are_an_error_before_one_is_run(options: dict[str, Any], words: str) -> None:
    """And not one at the deadline, of ranks that seem to hang."""

    def work(group: Group) -> Any:
        return decoding(SHAPES[FIRST], lambda d: 0, **(options if group.rank else {}))(group)

    with local_groups(2, deadline=30) as groups:
        found = outcomes(groups, work)
    assert all(isinstance(one, DisagreementError) for one in found)
    assert words in str(found[0])


def test_another_build_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose library or kernels are of another version."""
    codes = ranks_module.Ranks.code_of

    def code_of(self: Any, bound: Any) -> list[str]:
        lines = codes(self, bound)
        return [*lines[:2], "code of other: 12", *lines[2:]] if self.group.rank == 2 else lines

    monkeypatch.setattr(ranks_module.Ranks, "code_of", code_of)
    found = differing(lambda d, rank: [d.prefill([5, 6]), d.decode(), d.decode()])
    assert "graph of 'decode', rows=1" in str(found[0]) and "code of other" in str(found[0])


def test_another_graph_is_an_error_that_names_the_node() -> None:
    """A rank whose step has one more launch."""

    def work(decoder: Decoder, rank: int) -> None:
        decoder.prefill([5, 6])
        if rank == 2:
            steps = decoder._steps
            made = steps._prepared[1]["decode"]
            # An embedding twice does no harm, and is no collective.
            steps._prepared[1]["decode"] = (made[0], *made)
        decoder.decode()
        decoder.decode()

    found = differing(work)
    assert "graph of 'decode', rows=1" in str(found[0])
    assert "node 1: kernel norm_qkv_rope" in str(found[0])
    assert "node 1: kernel embed" in str(found[0])


def test_a_rank_that_cannot_make_a_graph_tells_the_others() -> None:
    def work(decoder: Decoder, rank: int) -> None:
        decoder.prefill([5, 6])
        decoder.decode()
        if rank == 2:
            decoder._steps._prepared[1] = dict.fromkeys(decoder._steps._prepared[1], ())
        decoder.decode()

    found = differing(work)
    assert "graph of 'decode', rows=1" in str(found[0]) and "no graph" in str(found[0])


# -------------------------------------------------------------------------------------- failures


MOMENTS = ("start", "prompt", "between", "loop")


def pass_moments(
    model: RandomModel, here: Callable[[str], None], count: int, decoder: Decoder
) -> None:
    """A prompt, some tokens, and so many in a loop; `here` is told of each moment but the start."""
    here("prompt")
    decoder.prefill(model.tokens(40))
    for _ in range(5):
        decoder.decode()
    here("between")
    for number, _ in enumerate(decoder.run(count=count, tokens_per_launch=4)):
        if number == 9:
            here("loop")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_raises_ends_all(moment: str) -> None:
    """At the start, before the prompt, between replays, and while the others are in a loop."""
    model = SHAPES[FIRST]

    def call(group: Group) -> Any:
        fails = group.rank == 1

        def here(now: str) -> None:
            if fails and now == moment:
                raise ValueError(f"broken at {now}")

        here("start")
        work = partial(pass_moments, model, here, 60)
        return decoding(model, work, max_rows=8)(group)

    with local_groups(4, deadline=30) as groups:
        found = outcomes(groups, call)
    assert isinstance(found[1], ValueError)
    for rank in (0, 2, 3):
        error = found[rank]
        assert isinstance(error, RankLostError) and f"broken at {moment}" in str(error)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_hangs_is_noticed_at_the_deadline(moment: str) -> None:
    model = SHAPES[FIRST]
    over = threading.Event()

    def call(group: Group) -> Any:
        hangs = group.rank == 1

        def here(now: str) -> None:
            if hangs and now == moment:
                over.wait(120)
                group.check()

        try:
            here("start")
            work = partial(pass_moments, model, here, 200)
            return decoding(model, work, max_rows=8)(group)
        finally:
            over.set()

    with local_groups(4, deadline=0.7) as groups:
        found = outcomes(groups, call)
    assert all(isinstance(one, GroupError) for one in found), found
    assert "rank" in str(found[0]) and len({str(one) for one in found}) == 1


def test_a_decoder_whose_group_failed_is_closed_and_gives_its_memory_back() -> None:
    model = SHAPES[FIRST]

    def call(group: Group) -> int:
        with ost.open_device("host") as device:
            before = device.memory_info()[0]
            with Decoder(device, model.checkpoint(), stop_tokens=(), group=group) as decoder:
                decoder.prefill([5, 6])
                for _ in range(3):
                    decoder.decode()
                group.barrier()
                with pytest.raises(GroupError, match="over"):
                    for count in range(1000):
                        if group.rank == 0 and count == 5:
                            group.fail(RuntimeError("over"))
                        decoder.decode()
                with pytest.raises(GroupError, match="over"):
                    decoder.prefill([1])
                with pytest.raises(GroupError, match="over"):
                    decoder.logits()
            group.close()
            device.synchronize()
            return before - device.memory_info()[0]

    with local_groups(2) as groups:
        assert groups.run(call) == [0, 0]
