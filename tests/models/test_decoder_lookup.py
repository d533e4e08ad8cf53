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
from itertools import islice
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from benchmarks.lookup import SuccessorCheckpoint, pieces
from ostinato.bench.random_weights import PackedCheckpoint
from ostinato.errors import InputError, LogitsError
from ostinato.models.cuda import lowering as kc
from ostinato.models.cuda.backend import CudaBackend
from ostinato.models.decoder import Decoder
from ostinato.models.host.kernels import HOST_KERNELS, drafts_of
from ostinato.models.host.packed_kernels import compiled, without_extension
from ostinato.models.host.shard_kernels import _key
from ostinato.models.program import (
    ACTIVE,
    FROM_STATE,
    MORE,
    OPTIONS,
    SAMPLE,
    STOP_TOKENS,
    decode_program,
)
from ostinato.models.sampling import GREEDY, SamplingOptions
from tests.conftest import open_test_device
from tests.models.emulated import EmulatedGpu
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
    "way", ["compiled", "numpy", CUDA], indirect=True, scope="module"
)
"""For what only the host decides: the emulator takes seconds for it."""


def on_each_way(name: str, cases: Iterable[Any], emulated: Iterable[Any]) -> pytest.MarkDecorator:
    """Cases for all kernels; on the emulator the others than `emulated` are slow."""
    made = [
        pytest.param(
            way, one, marks=[pytest.mark.gpu] if way == "cuda" else [pytest.mark.slow] * slow
        )
        for way in MOST
        for one in cases
        for slow in [way == "emulated" and one not in emulated]
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
            gpu: Any = EmulatedGpu(device)
            patch.setattr(
                "ostinato.models.decoder.backend_for",
                lambda device, **_: CudaBackend(gpu, library_rows=None),
            )
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


def cache_of(decoder: Decoder) -> bytes:
    cache = decoder.plan.buffers["cache"].to_numpy(decoder.stream)
    return cache[:, :, 0, :, : len(decoder.tokens()) - 1].tobytes()


# ------------------------------------------------------------------------------ the same tokens


@on_each_way("seed", range(4), emulated=range(2))
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


@on_each_way("family", FAMILIES, emulated=["all of it"])
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
        scores = decoder.plan.buffers["scores"].to_numpy(decoder.stream)
        for row in range(len(decoder.tokens()) - 1 - start):
            position = start + row + 1
            if position in wanted:
                assert scores[row].tobytes() == wanted[position], (start, row)
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
    host=[("tiny", name, 3) for name in CHECKPOINTS],
    cuda=[
        (shape, name, lookup)
        for shape, name in [
            *((shape, name) for shape in WIDE for name in ("successors", "random")),
            *(("as Llama-3.2-1B", kind) for kind in ("Q8_0", "Q4_K_M")),
        ]
        for lookup in (1, 3, 7, 15)
    ],
)
def test_real_widths_have_the_bits_of_single_steps(
    machine: ost.Device, case: tuple[str, str, int]
) -> None:
    """Their kernels are cut otherwise: tokens, and all keys and values."""
    shape, name, lookup = case
    config = WIDE.get(shape, llama(4, 2, 64, inner=512, vocabulary=301, layers=2))
    config = replace(config, tied_embeddings=False)
    given: dict[str, Any] = {"lookup": lookup, "stop_tokens": (), "max_context": 400}
    prompt = pieces(config.vocabulary, 60, 3)
    with Decoder(machine, CHECKPOINTS[name](config), **given) as decoder:
        for tokens_per_launch in (1, 4):
            decoder.reset()
            found = [decoder.prefill(prompt)]
            found += decoder.run(count=100, tokens_per_launch=tokens_per_launch)
            cache, numbers = cache_of(decoder), decoder.statistics()
            decoder.truncate(len(prompt) + 1)
            assert found[1:] == [decoder.decode() for _ in found[1:]]
            assert cache_of(decoder) == cache
        assert not numbers.one_by_one and not numbers.quarantined
        if name == "successors":
            assert found[:60] == [*range(1, 61)]
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
@pytest.mark.parametrize("taken", [1, 2, 3, 5, 7, 11])
def test_a_run_that_is_left_goes_on_after_the_last_token_taken(
    decoder: Decoder, taken: int
) -> None:
    prompt = prompt_of(2)
    wanted = one_by_one(decoder, prompt)
    for after in ("decode", "run", "prefill"):
        decoder.reset()
        found = [decoder.prefill(prompt)]
        with decoder.run() as run:
            found += islice(run, taken)
        assert decoder.tokens() == (*prompt, *found)
        if after == "decode":
            found.append(decoder.decode())
            decoder.logits()
        elif after == "prefill":
            decoder.prefill(found[-1:])
            found = [*decoder.tokens()[len(prompt) :]]
            if found[-1] != wanted[len(found) - 1]:  # a piece of a prompt has other bits
                continue
        found += decoder.run(count=6)
        assert found == wanted[: len(found)]


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
def test_several_sequences_do_not_draft_and_one_of_them_does(way: tuple[str, ost.Device]) -> None:
    with opened(way, sequences=2) as decoder:
        wanted = one_by_one(decoder, prompt_of(6), 12)
        decoder.reset()
        for sequence in (0, 1):
            decoder.prefill(prompt_of(6), sequence)
        items = list(decoder.run_batch([0, 1], count=6))
        assert [one[0] for one in items] == [one[1] for one in items] == wanted[1:7]
        assert decoder.statistics().lookup_steps == 0
        assert [one[1] for one in decoder.run_batch([1], count=4)] == wanted[7:11]
        assert decoder.statistics().lookup_tokens == 4
        assert list(decoder.run(0, count=4)) == wanted[7:11]


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


@on_kernels("rows", [2, 8, 5])
def test_draft_makes_rows_of_what_followed(kernels: Any, rows: int) -> None:
    context, draw = 3000, random.Random(rows)
    for number in range(12):
        most, position = draw.randint(1, rows - 1), draw.choice((0, 1, 5, 31, 1100, 2999))
        history = np.array([draw.randrange(7) for _ in range(2 * context)], np.int32)
        if number % 3 == 0:
            history[:] = np.arange(2 * context) + 10
        row = (3, position, 1, LIVE | FROM_STATE) if number % 2 else (3, position, 1, LIVE)
        state = np.array([[9, 9, 9, 9], [4, position, 0, number == 5]], np.int32)
        values = {
            "rows": np.array([row] + [(1, 1, 1, 1)] * (rows - 1), np.int32),
            "state": state,
            "history": history.reshape(2, context),
            "drafted": np.full((rows, 4), 77, np.int32),
            "scored": np.full((rows, 4), 77, np.int32),
            "row_count": rows, "sequences": 2, "context": context, "most": most,
        }  # fmt: skip
        found = both(kernels, "draft", rows, values)
        token = 4 if number % 2 else 3
        wanted = drafted([*history[context : context + position].tolist(), token], most)
        wanted = [] if number == 5 else wanted
        made = [(token, position, 1, SAMPLE if number == 5 else LIVE)]
        made += [(t, position + 1 + i, 1, LIVE) for i, t in enumerate(wanted)]
        made += [(0, 0, 0, 0)] * (rows - len(made))
        assert found["drafted"].tolist() == [list(one) for one in made]
        assert found["scored"][:, 2].tolist() == list(range(rows))
        assert found["scored"][:, [0, 1, 3]].tolist() == found["drafted"][:, [0, 1, 3]].tolist()


@pytest.mark.parametrize(
    "row",
    [(1, 2, -1, LIVE), (1, 2, 2, LIVE), (1, 99, 0, LIVE), (1, -1, 0, LIVE), (1, 2, 0, 0)],
)
def test_draft_reads_nothing_for_rows_out_of_range(emulator: Any, row: tuple[int, ...]) -> None:
    values = {
        "rows": np.array([row, row], np.int32),
        "state": np.zeros((2, 4), np.int32),
        "history": np.ones((2, 40), np.int32),
        "drafted": np.full((2, 4), 77, np.int32),
        "scored": np.full((2, 4), 77, np.int32),
        "row_count": 2, "sequences": 2, "context": 40, "most": 1,
    }  # fmt: skip
    found = both(emulator, "draft", 2, values)
    assert not found["drafted"][1].any()


@on_kernels("rows", [2, 8, 5])
def test_accept_keeps_what_the_model_chooses(kernels: Any, rows: int) -> None:
    (launch,) = launch_of("accept", rows)
    draw, blocks = random.Random(rows), int(dict(launch.options.defines)["HEAD_BLOCKS"])
    lengths = set()
    for number in range(24):
        position, ring = draw.randint(0, 20), 16
        chosen = [draw.randrange(CONFIG.vocabulary) for _ in range(rows)]
        tokens = [5, *chosen[:-1]]
        right = draw.randint(0, rows - 1)
        if right + 1 < rows:
            tokens[right + 1] = (tokens[right + 1] + 1) % CONFIG.vocabulary
        live = np.array([(t, position + i, 1, LIVE) for i, t in enumerate(tokens)], np.int32)
        if number % 5 == 1 and rows > 2:
            live[draw.randint(1, rows - 1) :] = 0
        scores = np.zeros((rows, CONFIG.vocabulary), np.float32)
        scores[range(rows), chosen] = 1
        stops = np.full(STOP_TOKENS, -1, np.int32)
        if number % 5 == 2:
            stops[draw.randrange(STOP_TOKENS)] = draw.choice(chosen)
        options = np.zeros(2, OPTIONS)
        options["repetition_penalty"] = 1
        options["limit"] = position + draw.randint(1, rows + 2) if number % 5 == 3 else 99
        if number % 5 == 4:
            scores[draw.randrange(rows), 3] = draw.choice((np.nan, np.inf))
        keys = np.array([[_key(v, i) for i, v in enumerate(row)] for row in scores], np.uint64)
        # Each block of `head` leaves its largest; here the first has some, and the last the rest.
        found = np.zeros((rows, blocks), np.uint64)
        found[:, 0], found[:, -1] = keys[:, ::2].max(1), keys.max(1)
        workspace = np.zeros(kc.COUNTER_BYTES // 4 + 2 * found.size, np.float32)
        workspace[kc.COUNTER_BYTES // 4 :] = found.reshape(-1).view(np.float32)
        values = {
            "live": live, "scores": scores, "options": options.view(np.uint64), "stops": stops,
            "state": np.full((2, 4), 77, np.int32), "ring": np.full((2, ring, 2), 77, np.int32),
            "workspace": workspace, "row_count": rows, "vocabulary": CONFIG.vocabulary,
            "stop_count": STOP_TOKENS, "context": 22, "ring_size": ring,
        }  # fmt: skip
        made = both(kernels, "accept", rows, values)
        assert (made["state"][0] == 77).all() and (made["ring"][0] == 77).all()
        written = made["ring"][1][made["ring"][1, :, 1] != 77]
        lengths.add(len(written))
        assert sum(token & MORE == 0 or token < 0 for token, _ in written.tolist()) == 1
        if number % 5 == 0 and position + right + 1 < 22:
            assert len(written) == right + 1
            assert made["state"][1].tolist()[:2] == [chosen[right], position + right + 1]
    assert len(lengths) > min(2, rows - 1)
