"""Running ahead: the same tokens and logits as step by step, however a run goes and ends.

A silent wrong answer here would be a token of another step, or logits of a later token.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ostinato import fill
from ostinato.device import Device
from ostinato.errors import CaptureError, ClosedError, GraphError, InputError, ModelError
from ostinato.graph import Graph, capture
from ostinato.models import plan
from ostinato.models.backend import DeviceModel
from ostinato.models.decoder import Decoder
from ostinato.models.sampling import SamplingOptions, sample
from ostinato.models.sequences import Sequence
from ostinato.models.stepper import TokenRing
from tests.conftest import open_test_device
from tests.models.proof import MODES, interrupted
from tests.models.random_models import RandomModel, llama
from tests.threads import in_thread

CONTEXT = 300
MODEL = RandomModel(llama(3, 1, 64, inner=136, vocabulary=257, layers=2, tied_embeddings=True))
PROMPT = MODEL.tokens(9)
OTHER = MODEL.tokens(9, seed=8)
HOT = SamplingOptions(temperature=1.5, seed=6)  # greedily it repeats itself
COUNT = 40


@pytest.fixture(scope="module", params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> Iterator[Device]:
    """One device for all tests here: what is compiled for one is there for the next."""
    with open_test_device(request.param, request.config) as opened:
        yield opened


def open_decoder(device: Device, **options: Any) -> Decoder:
    options = {"max_context": CONTEXT, "stop_tokens": (), **options}
    decoder = Decoder(device, MODEL.checkpoint(), **options)
    for sequence in range(options.get("sequences", 1)):
        decoder.set_sampling(HOT, sequence)
    return decoder


@pytest.fixture
def decoder(where: Device) -> Iterator[Decoder]:
    with open_decoder(where) as opened:
        yield opened


@pytest.fixture(scope="module")
def wanted(where: Device) -> dict[str, list[Any]]:
    """Step by step and eagerly: the tokens after each prompt, and the logits of each."""
    made: dict[str, list[Any]] = {}
    with open_decoder(where, graphs=False) as eager:
        for name, prompt in (("PROMPT", PROMPT), ("OTHER", OTHER)):
            eager.reset()
            tokens, logits = [eager.prefill(prompt)], [eager.logits().tobytes()]
            for _ in range(COUNT):
                tokens.append(eager.decode())
                logits.append(eager.logits().tobytes())
            made[name], made[f"{name} logits"] = tokens, logits
    assert len(set(made["PROMPT"])) > COUNT / 4, "the same token again and again shows nothing"
    assert made["PROMPT"] != made["OTHER"]
    return made


@pytest.fixture(scope="module")
def written(where: Device) -> bytes:
    """The cache after PROMPT and 24 tokens, step by step and eagerly."""
    with open_decoder(where, graphs=False) as eager:
        eager.prefill(PROMPT)
        for _ in range(23):
            eager.decode()
        return past(eager)


def past(decoder: Decoder) -> bytes:
    """Keys and values of the positions that sequence 0 has."""
    cache = decoder.plan.buffers["cache"].to_numpy(decoder.stream)
    return cache[:, :, 0, :, : len(decoder.tokens()) - 1].tobytes()


# ------------------------------------------------------------------------------ every way the same

DECODERS = {"eager": {"graphs": False}, "one graph at a time": {"graph_budget": 1}, **MODES}
RUNS: dict[str, dict[str, Any]] = {
    "one a launch": {},
    "one a launch, none ahead": {"ahead": 0},
    "one a launch, far ahead": {"ahead": 255},
    "loop of 4": {"tokens_per_launch": 4},
    "loop of 4, none ahead": {"tokens_per_launch": 4, "ahead": 0},
    "loop of 16": {"tokens_per_launch": 16},
}


@pytest.mark.parametrize(
    ("way", "run"),
    [
        pytest.param(way, run, marks=() if quick else pytest.mark.slow)
        for way in DECODERS
        for run in RUNS
        for quick in [way == "captured" or run in ("one a launch", "loop of 4")]
    ],
)
def test_every_way_gives_the_same_bits(
    where: Device, wanted: dict[str, list[Any]], written: bytes, way: str, run: str
) -> None:
    with open_decoder(where, **DECODERS[way]) as decoder:
        for _ in range(3):
            decoder.reset()
            tokens = [decoder.prefill(PROMPT), *decoder.run(count=23, **RUNS[run])]
            assert tokens == wanted["PROMPT"][:24]
            assert decoder.tokens() == (*PROMPT, *tokens)
            assert decoder.logits().tobytes() == wanted["PROMPT logits"][23]
            assert past(decoder) == written
            assert decoder.decode() == wanted["PROMPT"][24], "and it goes on from there"
        assert not decoder.statistics().quarantined


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 33])
@pytest.mark.parametrize("tokens_per_launch", [1, 16])
def test_a_run_gives_as_many_as_were_asked_for(
    decoder: Decoder, wanted: dict[str, list[Any]], tokens_per_launch: int, count: int
) -> None:
    for _ in range(3):
        decoder.reset()
        decoder.prefill(PROMPT)
        tokens = list(decoder.run(count=count, tokens_per_launch=tokens_per_launch))
        assert tokens == wanted["PROMPT"][1 : count + 1]
        assert decoder.logits().tobytes() == wanted["PROMPT logits"][count]
        assert not decoder.stopped()


def test_a_whole_loop_is_one_launch_and_no_host_write(
    decoder: Decoder, wanted: dict[str, list[Any]]
) -> None:
    decoder.prefill(PROMPT)
    list(decoder.run(count=17, tokens_per_launch=16))  # everything is built
    decoder.truncate(len(PROMPT) + 1)
    decoder.decode()  # says where the sequence is
    decoder.decode()  # has it from the device
    before = decoder.statistics()
    tokens = list(decoder.run(count=32, tokens_per_launch=16))
    after = decoder.statistics()
    assert tokens == wanted["PROMPT"][3:35]
    assert after.launches_replayed - before.launches_replayed == 2
    assert after.launches_eager == before.launches_eager
    assert after.host_writes == before.host_writes
    assert after.decoded_tokens - before.decoded_tokens == 32
    assert after.decode_seconds > before.decode_seconds


def test_a_replayed_token_is_one_launch_and_no_host_write(decoder: Decoder) -> None:
    decoder.prefill(PROMPT)
    for _ in range(3):
        decoder.decode()
    before = decoder.statistics()
    for _ in range(10):
        decoder.decode()
    after = decoder.statistics()
    assert after.launches_replayed - before.launches_replayed == 10
    assert after.launches_eager == before.launches_eager
    assert after.host_writes == before.host_writes
    assert after.kernel_seconds == before.kernel_seconds
    decoder.device_state = False  # switched off between steps, on the same graphs
    decoder.decode()
    assert decoder.statistics().host_writes == after.host_writes + 1
    assert decoder.statistics().graphs_captured == before.graphs_captured


def test_sampling_is_the_reference_and_reaches_replays(decoder: Decoder) -> None:
    """Step by step, in a loop on the device, and after a cut, behind which there is no history."""

    def answer(options: SamplingOptions) -> list[int]:
        decoder.set_sampling(options, answer=len(PROMPT))
        decoder.reset()
        tokens: list[int] = []
        for index in (*range(12), *range(6, 12)):
            if index == 6:
                decoder.truncate(len(PROMPT) + 6)
                del tokens[6:]
            tokens.append(decoder.prefill(PROMPT) if index == 0 else decoder.decode())
            seen = [*PROMPT, *tokens[:index]]
            assert tokens[-1] == sample(decoder.logits(), options, len(seen), seen, len(PROMPT))
        decoder.reset()
        assert [decoder.prefill(PROMPT), *decoder.run(count=11, tokens_per_launch=4)] == tokens
        return tokens

    greedy = answer(SamplingOptions())
    captured = decoder.statistics().graphs_captured
    for options in (
        SamplingOptions(temperature=1.3, top_k=50, top_p=0.95, seed=(7 << 40) + 1),
        SamplingOptions(repetition_penalty=1.5),
        SamplingOptions(2.0, seed=4, min_p=0.2),
        SamplingOptions(2.0, 50, 0.9, 5, min_p=0.01, repetition_penalty=0.8),
        SamplingOptions(frequency_penalty=1.3, presence_penalty=-0.4),
        SamplingOptions(logit_bias={greedy[0]: -100, greedy[3]: 2.5}),
        SamplingOptions(1.5, 0, 0.9, 8, 0.0, 1.1, -0.3, 1.7, {5: 3, greedy[2]: -8}),
    ):
        tokens = answer(options)
        assert tokens != greedy
        assert answer(options) == tokens, "the same seed gives the same tokens"
        assert options.is_greedy or answer(replace(options, seed=2)) != tokens
    assert answer(SamplingOptions()) == greedy
    assert decoder.statistics().graphs_captured <= captured + 1


# --------------------------------------------------------------------------------------- the end


def rest_of(decoder: Decoder, tokens_per_launch: int) -> Iterator[int]:
    """The tokens until the sequence stops: of a run, or of single steps if that is 0."""
    if tokens_per_launch:
        yield from decoder.run(tokens_per_launch=tokens_per_launch)
    while not decoder.stopped():
        yield decoder.decode()


@pytest.mark.parametrize("tokens_per_launch", [0, 1, 4, 16])
def test_ends_at_an_end_token_and_no_step_runs_after_it(
    decoder: Decoder, wanted: dict[str, list[Any]], tokens_per_launch: int
) -> None:
    tokens = wanted["PROMPT"]
    end = next(i for i in range(6, COUNT) if tokens[i] not in tokens[:i])
    decoder.set_stop_tokens([256, tokens[end]])
    for _ in range(3):
        decoder.reset()
        first = decoder.prefill(PROMPT)
        assert [first, *rest_of(decoder, tokens_per_launch)] == tokens[: end + 1]
        assert decoder.stopped()
        assert decoder.logits().tobytes() == wanted["PROMPT logits"][end]
        for call in (decoder.run, decoder.decode):
            with pytest.raises(InputError, match="sequence 0 has stopped"):
                call()
    if tokens_per_launch > 1:
        # Launches that came too late counted nothing down: the loop did not even begin.
        counter = decoder.plan.buffers["counter"].to_numpy(decoder.stream)
        assert counter.tolist() == [tokens_per_launch]
    decoder.set_stop_tokens(())
    rest = itertools.islice(rest_of(decoder, tokens_per_launch), 5)
    assert [*rest] == tokens[end + 1 : end + 6], "it goes on once the token is no end any more"


@pytest.mark.parametrize("tokens_per_launch", [0, 1, 4, 16])
@pytest.mark.parametrize("more", [1, 2, 4, 7, 16, 21])
def test_ends_at_the_limit(
    decoder: Decoder, wanted: dict[str, list[Any]], tokens_per_launch: int, more: int
) -> None:
    decoder.set_sampling(HOT, limit=len(PROMPT) + more)
    for _ in range(2):
        decoder.reset()
        tokens = [decoder.prefill(PROMPT), *rest_of(decoder, tokens_per_launch)]
        assert tokens == wanted["PROMPT"][: more + 1]
        assert decoder.stopped()
        assert decoder.logits().tobytes() == wanted["PROMPT logits"][more]
    if tokens_per_launch > more + 1:  # one loop, and the device left it early
        counter = decoder.plan.buffers["counter"].to_numpy(decoder.stream)
        assert counter.tolist() == [tokens_per_launch - more]


@pytest.mark.parametrize(
    "options", [{"ahead": 255}, {"tokens_per_launch": 64, "ahead": 3}, {"tokens_per_launch": 256}]
)
def test_the_ring_is_never_overrun(decoder: Decoder, options: dict[str, Any]) -> None:
    """More tokens than the ring has room for, as far ahead as may be, and a caller who dawdles."""
    decoder.prefill(PROMPT)
    tokens = []
    while not decoder.stopped():
        tokens.append(decoder.decode())
    assert len(tokens) > decoder.plan.sizes.ring, "to the end of the context, and around the ring"
    for _ in range(2):
        decoder.reset()
        decoder.prefill(PROMPT)
        again = []
        for token in decoder.run(**options):
            again.append(token)
            if len(again) in (1, 200):
                time.sleep(0.1)
        assert again == tokens
        assert len(decoder.tokens()) == CONTEXT + 1


def test_tokens_of_an_earlier_sequence_are_never_taken_for_new_ones(
    decoder: Decoder, wanted: dict[str, list[Any]]
) -> None:
    """The ring holds the same positions of another prompt."""
    for options in RUNS.values():
        for name, prompt in (("PROMPT", PROMPT), ("OTHER", OTHER)):
            decoder.reset()
            tokens = [decoder.prefill(prompt), *decoder.run(count=COUNT, **options)]
            assert tokens == wanted[name]


# --------------------------------------------------------------- runs that are left, and what comes


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("taken", [1, 6, 18])
def test_a_run_that_is_left_costs_nothing_but_what_was_ahead(
    decoder: Decoder, wanted: dict[str, list[Any]], taken: int, run: str
) -> None:
    for _ in range(3):
        decoder.reset()
        tokens = [decoder.prefill(PROMPT)]
        with decoder.run(**RUNS[run]) as under_way:
            for token in under_way:
                tokens.append(token)
                if len(tokens) > taken:
                    break
        assert list(under_way) == [], "it is over"
        assert decoder.tokens() == (*PROMPT, *tokens)
        tokens += [decoder.decode() for _ in range(3)]
        assert decoder.logits().tobytes() == wanted["PROMPT logits"][taken + 3]
        tokens += decoder.run(count=4, **RUNS[run])
        assert tokens == wanted["PROMPT"][: taken + 8]


def _prefill_more(decoder: Decoder, tokens: list[int]) -> list[int]:
    decoder.prefill(tokens[-1:])  # the last one was not decoded yet
    return list(decoder.tokens()[len(PROMPT) :])


def _other_run(decoder: Decoder, tokens: list[int]) -> list[int]:
    return [*tokens, *decoder.run(count=1)]


def _other_batch(decoder: Decoder, tokens: list[int]) -> list[int]:
    return [*tokens, *(item[0] for item in decoder.run_batch([0], count=1))]


def _truncate(decoder: Decoder, tokens: list[int]) -> list[int]:
    decoder.truncate(len(PROMPT) + 2)
    return tokens[:2]


def _start_again(decoder: Decoder, tokens: list[int]) -> list[int]:
    decoder.reset()
    return [decoder.prefill(PROMPT)]


def _profile(decoder: Decoder, tokens: list[int]) -> list[int]:
    with decoder.profile() as times:
        tokens = [*tokens, decoder.decode()]
    assert times.by_kernel()
    return tokens


def _same(call: Callable[[Decoder], object]) -> Callable[[Decoder, list[int]], list[int]]:
    def change(decoder: Decoder, tokens: list[int]) -> list[int]:
        call(decoder)
        return tokens

    return change


BETWEEN: dict[str, Callable[[Decoder, list[int]], list[int]]] = {
    "set_sampling": _same(lambda d: d.set_sampling(HOT)),
    "set_stop_tokens": _same(lambda d: d.set_stop_tokens(())),
    "truncate": _truncate,
    "prefill": _prefill_more,
    "decode": lambda d, tokens: [*tokens, d.decode()],
    "run": _other_run,
    "run_batch": _other_batch,
    "reset": _start_again,
    "profile": _profile,
}


@pytest.mark.parametrize("run", ["one a launch", "loop of 4", "loop of 16"])
@pytest.mark.parametrize("what", BETWEEN)
def test_other_calls_end_a_run_and_start_from_the_last_token_taken(
    decoder: Decoder, wanted: dict[str, list[Any]], what: str, run: str
) -> None:
    for taken in (3, 10):  # the first one meets graphs that are not built yet
        decoder.reset()
        tokens = [decoder.prefill(PROMPT)]
        under_way = decoder.run(**RUNS[run])
        tokens += [next(under_way) for _ in range(taken)]
        tokens = BETWEEN[what](decoder, tokens)
        with pytest.raises(ClosedError, match=rf"the run was ended by {what}\(\)"):
            next(under_way)
        tokens += decoder.run(count=6, **RUNS[run])
        assert tokens == wanted["PROMPT"][: len(tokens)]
        assert decoder.logits().tobytes() == wanted["PROMPT logits"][len(tokens) - 1]


@pytest.mark.parametrize("tokens_per_launch", [1, 4])
def test_a_run_with_nothing_left_is_over_whatever_is_done_next(
    decoder: Decoder, wanted: dict[str, list[Any]], tokens_per_launch: int
) -> None:
    for _ in range(2):
        decoder.reset()
        tokens = [decoder.prefill(PROMPT)]
        under_way = decoder.run(count=8, tokens_per_launch=tokens_per_launch)
        tokens += [next(under_way) for _ in range(8)]
        assert decoder.logits().tobytes() == wanted["PROMPT logits"][8]
        tokens.append(decoder.decode())
        assert list(under_way) == []
        assert tokens == wanted["PROMPT"][:10]


def test_reading_does_not_end_a_run(decoder: Decoder, wanted: dict[str, list[Any]]) -> None:
    tokens = [decoder.prefill(PROMPT)]
    for token in decoder.run(count=12):
        tokens.append(token)
        assert decoder.tokens() == (*PROMPT, *tokens)
        assert not decoder.stopped()
        assert decoder.statistics().decoded_tokens == len(tokens) - 1
        if len(tokens) == 6:
            context = decoder.plan.sizes.context
            bound = decoder.backend.bind(decoder.program(), DeviceModel(decoder.config, context), 1)
            with decoder.graph() as graph:
                assert len(graph.nodes()) == len(bound)
    assert tokens == wanted["PROMPT"][:13]


def test_wrong_calls_leave_a_run_alone(decoder: Decoder, wanted: dict[str, list[Any]]) -> None:
    tokens = [decoder.prefill(PROMPT)]
    for token in decoder.run(count=12):
        tokens.append(token)
        for call in (
            lambda: decoder.prefill([]),
            lambda: decoder.decode(3),
            lambda: decoder.run(count=0),
            lambda: decoder.reset(1),
            lambda: decoder.truncate(-1),
            lambda: decoder.truncate(1000),
            lambda: decoder.keep_common([-1]),
            lambda: decoder.copy_prefix(1, 0, 0),
            lambda: decoder.set_stop_tokens([-1]),
            lambda: decoder.set_sampling(HOT, limit=-1),
        ):
            with pytest.raises(InputError):
                call()
    assert tokens == wanted["PROMPT"][:13]


INSIDE: dict[str, Callable[[Decoder], object]] = {
    "prefill": lambda d: d.prefill(OTHER),
    "prefill_batch": lambda d: d.prefill_batch({0: OTHER}),
    "extend": lambda d: d.extend(OTHER),
    "decode": lambda d: d.decode(),
    "run": lambda d: d.run(),
    "run_batch": lambda d: d.run_batch([0]),
    "reset": lambda d: d.reset(),
    "truncate": lambda d: d.truncate(1),
    "keep_common": lambda d: d.keep_common(OTHER),
    "copy_prefix": lambda d: d.copy_prefix(1, 0, 1),
    "set_sampling": lambda d: d.set_sampling(SamplingOptions()),
    "set_stop_tokens": lambda d: d.set_stop_tokens([1]),
    "logits": lambda d: d.logits(),
    "graph": lambda d: d.graph(),
    "close": lambda d: d.close(),
}
"""Calls that must not be made while another one is under way."""


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("what", INSIDE)
def test_a_call_inside_of_another_is_refused(
    where: Device, wanted: dict[str, list[Any]], what: str, threaded: bool
) -> None:
    """Between the pieces of a prompt, by the one who is told of them or by another thread."""
    with open_decoder(where, max_rows=4, sequences=2) as decoder:
        refused = []

        def meddle(done: int, total: int) -> None:
            if threaded:
                refused.append(in_thread(lambda: INSIDE[what](decoder)))
            else:
                with pytest.raises(InputError) as raised:
                    INSIDE[what](decoder)
                refused.append(raised.value)

        # One who is told of a piece lets the error through: then it is the call's, too.
        with pytest.raises(InputError, match="must not overlap"):
            decoder.prefill(OTHER, progress=lambda *_: INSIDE[what](decoder))
        decoder.reset()
        tokens = [decoder.prefill(PROMPT, progress=meddle)]
        assert len(refused) == 3
        for error in refused:
            assert isinstance(error, InputError)
            assert "while Decoder.prefill() of the same decoder was under way" in str(error)
        tokens += [decoder.decode(), *decoder.run(count=5)]
        assert tokens == wanted["PROMPT"][:7]


def test_calls_of_another_thread_while_a_run_waits_are_refused(
    decoder: Decoder, wanted: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [decoder.prefill(PROMPT), decoder.decode(), decoder.decode()]
    under_way, refused = decoder.run(count=6), []
    take = TokenRing.word

    def meddle(ring: TokenRing, sequence: Sequence, step: int) -> tuple[int, bool]:
        for call in (decoder.decode, decoder.reset, under_way.close, lambda: next(under_way)):
            refused.append(in_thread(call))
        return take(ring, sequence, step)

    monkeypatch.setattr(TokenRing, "word", meddle)
    tokens.append(next(under_way))
    monkeypatch.undo()
    assert [type(error) for error in refused] == [InputError] * 4
    assert all("was called while" in str(error) for error in refused)
    assert tokens + list(under_way) == wanted["PROMPT"][:9]


def test_a_closed_decoder_ends_its_run(where: Device) -> None:
    decoder = open_decoder(where)
    decoder.prefill(PROMPT)
    under_way = decoder.run()
    for _ in range(5):
        next(under_way)
    decoder.close()
    with pytest.raises(ClosedError, match=r"ended by close\(\)"):
        next(under_way)
    with pytest.raises(ClosedError):
        decoder.run()


def test_a_closed_decoder_says_so_and_keeps_its_numbers(where: Device) -> None:
    with open_decoder(where) as decoder:
        decoder.prefill(PROMPT)
        list(decoder.run(count=5))
        numbers = decoder.statistics()
    decoder.close()
    assert decoder.statistics().launches_replayed == numbers.launches_replayed > 0
    calls: tuple[Callable[[], object], ...] = (
        lambda: decoder.prefill(PROMPT),
        decoder.decode,
        decoder.run,
        decoder.graph,
        lambda: decoder.set_sampling(HOT),
        lambda: decoder.set_stop_tokens([3]),
        lambda: decoder.extend(PROMPT),
        lambda: decoder.run_batch([0]),
        lambda: decoder.copy_prefix(1, 0, 1),
        decoder.logits,
    )
    for _ in range(2):  # with tokens, and without: an error that says to prefill would mislead
        for call in calls:
            with pytest.raises(ClosedError, match="the decoder is closed"):
                call()
        decoder.reset()


def test_an_array_of_numpy_is_a_prompt(decoder: Decoder, wanted: dict[str, list[Any]]) -> None:
    assert decoder.prefill(np.array(PROMPT)) == wanted["PROMPT"][0]
    assert all(type(token) is int for token in decoder.tokens())


def test_a_graph_can_be_read_while_its_step_is_profiled(decoder: Decoder) -> None:
    decoder.prefill(PROMPT)
    plain = [node.name for node in decoder.graph().nodes()]
    with decoder.profile():
        assert [node.name for node in decoder.graph().nodes()] == plain


# ----------------------------------------------------------------------------------------- logits


def test_logits_of_a_device_that_is_further_are_refused(
    decoder: Decoder, wanted: dict[str, list[Any]]
) -> None:
    for per_launch in (1, 4):
        decoder.reset()
        decoder.prefill(PROMPT)
        list(decoder.run(count=5, tokens_per_launch=per_launch))  # graphs are there
        under_way = decoder.run(tokens_per_launch=per_launch)
        next(under_way)
        with pytest.raises(InputError, match="the device is further in sequence 0"):
            decoder.logits()
        under_way.close()
        with pytest.raises(InputError, match="the device is further in sequence 0"):
            decoder.logits()
        at = len(decoder.tokens()) - len(PROMPT) - 1
        decoder.truncate(len(decoder.tokens()) - 1)
        assert decoder.decode() == wanted["PROMPT"][at]
        assert decoder.logits().tobytes() == wanted["PROMPT logits"][at]


def test_logits_after_each_token_with_nothing_ahead(
    decoder: Decoder, wanted: dict[str, list[Any]]
) -> None:
    for _ in range(2):
        decoder.reset()
        decoder.prefill(PROMPT)
        for index, _ in enumerate(decoder.run(count=15, ahead=0), 1):
            assert decoder.logits().tobytes() == wanted["PROMPT logits"][index]


def test_logits_of_sequences_outside_of_a_run_stay_readable(where: Device) -> None:
    with open_decoder(where, sequences=2, max_rows=2) as decoder:
        decoder.prefill(OTHER, 1)
        logits = decoder.logits(1).tobytes()
        decoder.prefill(PROMPT, 0)
        list(decoder.run(count=4))
        under_way = decoder.run()
        next(under_way)
        assert decoder.logits(1).tobytes() == logits


# ---------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("build", ["capture", "record"])
@pytest.mark.parametrize("tokens_per_launch", [1, 4, 16])
def test_a_batch_in_one_run(where: Device, tokens_per_launch: int, build: str) -> None:
    """Four sequences, one of which ends earlier; as many rows to the end, so the same graph."""
    limits = {0: 9 + 30, 1: 9 + 11, 2: 9 + 30, 3: 9 + 30}
    options: dict[str, Any] = {"sequences": 4, "max_rows": 4}

    def begin(decoder: Decoder) -> dict[int, list[int]]:
        decoder.reset()
        for sequence, limit in limits.items():
            decoder.set_sampling(replace(HOT, seed=sequence), sequence, limit=limit)
        return {s: [decoder.prefill(MODEL.tokens(9, seed=s), s)] for s in limits}

    with open_decoder(where, graphs=False, **options) as eager:
        wanted = begin(eager)
        while live := [sequence for sequence in limits if not eager.stopped(sequence)]:
            for sequence, token in zip(live, eager.decode_batch(live), strict=True):
                wanted[sequence].append(token)
    assert [len(wanted[sequence]) for sequence in limits] == [31, 12, 31, 31]
    with open_decoder(where, build=build, **options) as decoder:
        for _ in range(3):
            tokens = begin(decoder)
            items = list(decoder.run_batch(list(limits), tokens_per_launch=tokens_per_launch))
            assert [list(item) for item in items] == [[0, 1, 2, 3]] * 11 + [[0, 2, 3]] * 19
            for item in items:
                for sequence, token in item.items():
                    tokens[sequence].append(token)
                    assert decoder.tokens(sequence)[9:][-1] is not None
            assert tokens == wanted
            assert all(decoder.stopped(sequence) for sequence in limits)
            assert [len(decoder.tokens(sequence)) for sequence in limits] == [40, 21, 40, 40]


def test_a_batch_that_is_left_goes_on_where_each_sequence_was(where: Device) -> None:
    sequences = [2, 0, 1]
    with open_decoder(where, sequences=3, max_rows=4) as decoder:

        def begin() -> None:
            decoder.reset()
            for sequence in sequences:
                decoder.prefill(MODEL.tokens(5 + sequence, seed=sequence), sequence)

        begin()
        wanted = [decoder.decode_batch(sequences) for _ in range(20)]
        for per_launch in (1, 4):
            begin()
            steps = []
            for item in decoder.run_batch(sequences, tokens_per_launch=per_launch):
                steps.append([item[sequence] for sequence in sequences])
                if len(steps) == 7:
                    break
            steps += [decoder.decode_batch(sequences) for _ in range(2)]
            for item in decoder.run_batch(sequences, tokens_per_launch=per_launch, count=11):
                steps.append([item[sequence] for sequence in sequences])
            assert steps == wanted


@pytest.mark.parametrize("options", [{}, {"ahead": 9}, {"tokens_per_launch": 4}, {"ahead": 0}])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_run_that_is_finished_drops_nothing(
    where: Device, wanted: dict[str, list[Any]], graphs: bool, options: dict[str, Any]
) -> None:
    with open_decoder(where, graphs=graphs) as decoder:
        for taken in (0, 1, 5):
            decoder.reset()
            tokens = [decoder.prefill(PROMPT)]
            while len(tokens) < COUNT - 20:
                run = decoder.run(**options)
                tokens += [next(run) for _ in range(taken)]
                run.finish()
                run.finish()  # says nothing new
                tokens += list(run)
                writes = decoder.statistics().host_writes
                tokens.append(decoder.decode())
                if taken > 1 and graphs:
                    assert decoder.statistics().host_writes == writes, "the device is further"
            assert tokens == wanted["PROMPT"][: len(tokens)]


@pytest.mark.parametrize("spins", [True, False])
def test_waiting_in_another_way_gives_the_same_tokens(
    decoder: Decoder, wanted: dict[str, list[Any]], spins: bool
) -> None:
    decoder.spins = spins
    assert decoder.spins is spins
    for options in ({}, {"ahead": 0}, {"tokens_per_launch": 4}):
        decoder.reset()
        tokens = [decoder.prefill(PROMPT), *decoder.run(count=20, **options)]
        tokens += [decoder.decode() for _ in range(5)]
        assert tokens == wanted["PROMPT"][:26]


def test_a_run_that_is_finished_with_sequences_that_stop(where: Device) -> None:
    """Whatever is launched when it is finished is taken, also of those that stop in it.  The same
    rows of the same bucket for the others, before and after."""
    limits = {0: 9 + 30, 1: 9 + 20, 2: 9 + 25, 3: 9 + 4}
    with open_decoder(where, sequences=4, max_rows=4) as decoder:

        def begin() -> None:
            decoder.reset()
            for sequence, limit in limits.items():
                decoder.set_sampling(replace(HOT, seed=sequence), sequence, limit=limit)
                decoder.prefill(MODEL.tokens(9, seed=sequence), sequence)

        begin()
        wanted = list(decoder.run_batch([*limits]))
        for taken in range(1, 8):
            begin()
            run = decoder.run_batch([*limits], ahead=6)
            items = [next(run) for _ in range(taken)]
            run.finish()
            items += list(run)
            assert len(items) >= taken
            while len(live := [s for s in limits if not decoder.stopped(s)]) > 2:
                items.append(dict(zip(live, decoder.decode_batch(live), strict=True)))
            assert len(items) >= 20 and items == wanted[: len(items)]


# ----------------------------------------------------------------------- prompts, piece by piece


@pytest.mark.parametrize("graphs", [True, False])
def test_a_prompt_in_parts_beside_steps_of_others_is_the_same_prompt(
    where: Device, graphs: bool
) -> None:
    prompt, mate = MODEL.tokens(100, seed=4), MODEL.tokens(7, seed=5)
    with open_decoder(where, sequences=2, graphs=graphs) as decoder:
        for _ in range(3):
            decoder.reset()
            theirs = [decoder.prefill(mate, 1)]
            theirs += [decoder.decode(1) for _ in range(20)]
            decoder.reset()
            decoder.extend(prompt[:32])
            decoder.extend(prompt[32:90])
            tokens = [decoder.prefill(prompt[90:])]
            tokens += [decoder.decode() for _ in range(10)]
            decoder.reset()
            beside = [decoder.prefill(mate, 1)]
            for start, end in ((0, 32), (32, 90)):
                decoder.extend(prompt[start:end])
                assert decoder.tokens() == tuple(prompt[:end])
                with pytest.raises(InputError, match="no token to decode"):
                    decoder.decode()
                beside += [decoder.decode(1) for _ in range(5)]
            again = [decoder.prefill(prompt[90:])]
            for _ in range(10):
                again.append(decoder.decode(0))
                beside.append(decoder.decode(1))
            assert (again, beside) == (tokens, theirs)


def test_a_part_after_an_answer_drops_the_token_that_was_not_decoded(where: Device) -> None:
    with open_decoder(where) as decoder:
        decoder.prefill(PROMPT)
        decoder.extend(OTHER)
        assert decoder.tokens() == (*PROMPT, *OTHER)
        token = decoder.prefill([5])
        decoder.reset()
        decoder.extend(PROMPT)
        decoder.extend(OTHER)
        assert decoder.prefill([5]) == token
        decoder.reset()
        with pytest.raises(InputError, match="no tokens"):
            decoder.extend([])


def test_a_prefix_that_is_copied_is_as_good_as_one_that_is_read(where: Device) -> None:
    """The source may be in the middle of a run, further than its tokens say; a penalty looks at all
    tokens before."""
    strict = SamplingOptions(temperature=1.0, seed=9, repetition_penalty=1.5)
    shared = MODEL.tokens(40, seed=12)
    with open_decoder(where, sequences=3) as decoder:
        decoder.set_sampling(strict, 2)

        def answer(sequence: int, tail: list[int]) -> list[int]:
            return [decoder.prefill(tail, sequence), *decoder.run(sequence, count=15)]

        decoder.extend(shared, 2)
        wanted = answer(2, OTHER)
        decoder.reset()
        decoder.prefill([*shared, *PROMPT], 0)
        run = decoder.run(0)
        first = [next(run) for _ in range(5)]
        decoder.prefill(PROMPT, 2)  # something else before
        decoder.copy_prefix(len(shared), 0, 2)
        assert decoder.tokens(2) == tuple(shared)
        with pytest.raises(InputError, match="no token to decode"):
            decoder.decode(2)
        assert answer(2, OTHER) == wanted
        rest = [decoder.decode(0) for _ in range(10)]
        decoder.reset()
        decoder.prefill([*shared, *PROMPT], 0)
        assert [decoder.decode(0) for _ in range(15)] == [*first, *rest], "the source is as it was"
        decoder.copy_prefix(0, 0, 2)
        assert decoder.tokens(2) == ()


def test_a_copy_that_makes_no_sense_is_refused(where: Device) -> None:
    with open_decoder(where, sequences=2) as decoder:
        decoder.prefill(PROMPT, 0)
        decoder.prefill(OTHER, 1)
        for arguments, words in (
            ((10, 0, 1), "holds 9 tokens of sequence 0; 10 cannot be copied"),
            ((3, 0, 0), "cannot be copied to itself"),
            ((-1, 0, 1), "count is -1"),
            ((3, 0, 2), "there is no such sequence"),
        ):
            with pytest.raises(InputError, match=words):
                decoder.copy_prefix(*arguments)
        assert decoder.tokens(1)[:9] == tuple(OTHER), "nothing was done"


def test_an_interrupted_copy_leaves_nothing(where: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_decoder(where, sequences=2) as decoder:
        decoder.prefill(PROMPT, 0)
        decoder.prefill(OTHER, 1)

        def interrupt(*arguments: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(plan, "copy", interrupt)
            with pytest.raises(KeyboardInterrupt):
                decoder.copy_prefix(5, 0, 1)
        assert decoder.tokens(1) == ()


# ------------------------------------------------------------------------------------- what breaks


@pytest.mark.parametrize("tokens_per_launch", [1, 4])
def test_nan_logits_end_a_run_with_an_error(
    decoder: Decoder, wanted: dict[str, list[Any]], tokens_per_launch: int
) -> None:
    norm = decoder.weights.buffer("final_norm")
    sound = norm.to_numpy(decoder.stream)
    for taken in (3, 12):
        decoder.reset()
        tokens = [decoder.prefill(PROMPT)]
        under_way = decoder.run(tokens_per_launch=tokens_per_launch)
        tokens += [next(under_way) for _ in range(taken)]
        norm.set(np.full_like(sound, np.nan), decoder.stream)
        with pytest.raises(ModelError, match=r"sequence 0, position \d+: the logits hold NaN"):
            tokens += under_way
        assert list(under_way) == [], "it is over"
        norm.set(sound, decoder.stream)
        assert decoder.tokens() == (*PROMPT, *tokens)
        tokens += decoder.run(count=7, tokens_per_launch=tokens_per_launch)
        assert tokens == wanted["PROMPT"][: len(tokens)]
        assert decoder.logits().tobytes() == wanted["PROMPT logits"][len(tokens) - 1]


@pytest.mark.parametrize("tokens_per_launch", [1, 4])
@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_an_interrupted_run_can_be_taken_up(
    decoder: Decoder, wanted: dict[str, list[Any]], at: int, tokens_per_launch: int
) -> None:
    decoder.prefill(PROMPT)
    list(decoder.run(count=9, tokens_per_launch=tokens_per_launch))
    decoder.reset()
    tokens = [decoder.prefill(PROMPT)]
    under_way = decoder.run(tokens_per_launch=tokens_per_launch)
    with interrupted(at):
        for token in under_way:
            tokens.append(token)
    assert len(tokens) == at and list(under_way) == []
    assert decoder.tokens() == (*PROMPT, *tokens)
    with pytest.raises(InputError, match="the device is further"):
        decoder.logits()
    tokens += decoder.run(count=8, tokens_per_launch=tokens_per_launch)
    assert tokens == wanted["PROMPT"][: at + 8]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_is_interrupted_while_its_token_is_taken(
    decoder: Decoder, wanted: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Between the token and the length, two lines: the next step takes the token's place."""
    length: Any = Sequence.length  # type: ignore[misc]

    def interrupt(sequence: Sequence, value: int) -> None:
        raise KeyboardInterrupt

    decoder.prefill(PROMPT)
    list(decoder.run(count=9))
    decoder.reset()
    decoder.prefill(PROMPT)
    under_way = decoder.run() if ahead else None
    take: Callable[[], int] = decoder.decode if under_way is None else under_way.__next__
    take()
    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "length", property(length.__get__, interrupt))
        with pytest.raises(KeyboardInterrupt):
            take()
    for _ in range(4):
        decoder.decode()
    tokens = decoder.tokens()[len(PROMPT) :]
    assert list(tokens) == wanted["PROMPT"][: len(tokens)]


def test_a_step_inside_a_capture_ends_the_run_and_not_the_capture(
    decoder: Decoder, wanted: dict[str, list[Any]]
) -> None:
    decoder.prefill(PROMPT)
    list(decoder.run(count=9))
    decoder.reset()
    tokens = [decoder.prefill(PROMPT)]
    under_way = decoder.run(ahead=0)
    tokens += [next(under_way) for _ in range(4)]
    scratch = decoder.device.zeros(8, "bytes")
    with capture(decoder.stream) as graph:
        fill(decoder.stream, scratch, 1)
        with pytest.raises(CaptureError, match="cannot be launched into a capture"):
            next(under_way)
    assert len(graph.graph) == 1
    tokens += decoder.run(count=4)
    assert tokens == wanted["PROMPT"][:9]


def test_a_loop_that_cannot_be_built_costs_launches_and_no_answers(
    where: Device, wanted: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise GraphError("no loops today")

    monkeypatch.setattr(Graph, "add_conditional", refuse)
    with open_decoder(where) as decoder:
        for number in (1, 2):
            decoder.reset()
            tokens = [decoder.prefill(PROMPT), *decoder.run(count=20, tokens_per_launch=4)]
            assert tokens == wanted["PROMPT"][:21]
            numbers = decoder.statistics()
            assert numbers.one_by_one == {"building the graph failed before": number}
        assert "no loops today" in str(numbers.quarantined)
        assert numbers.launches_replayed >= 37, "one by one, but by graph"


def test_a_device_without_conditional_nodes_says_so(
    where: Device, wanted: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    without = replace(where.capabilities, conditional_nodes=False)
    with open_decoder(where) as decoder:
        monkeypatch.setattr(type(where), "capabilities", without)
        decoder.prefill(PROMPT)
        assert list(decoder.run(count=9, tokens_per_launch=4)) == wanted["PROMPT"][1:10]
        assert "has no conditional nodes" in str(decoder.statistics().quarantined)


def test_refused_programmatic_launches_in_a_loop_become_plain_ones(
    host_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    instantiate, bind = Graph.instantiate, "ostinato.models.host.backend.HostBackend.bind"
    from ostinato.models.host.backend import HostBackend

    plain_bind = HostBackend.bind
    refused = []

    def programmatic(self: HostBackend, *arguments: Any, **options: Any) -> Any:
        bound = plain_bind(self, *arguments, **options)
        return tuple(replace(o, config=replace(o.config, programmatic=True)) for o in bound)

    def picky(self: Graph, **options: Any) -> Any:
        inside = [n for node in self.nodes() for body in node.children for n in body]
        if any(node.kernel.config.programmatic for node in inside):
            refused.append(self)
            raise GraphError("not in here")
        return instantiate(self, **options)

    monkeypatch.setattr(bind, programmatic)
    monkeypatch.setattr(Graph, "instantiate", picky)
    with open_decoder(host_device, graphs=False) as eager:
        eager.prefill(PROMPT)
        wanted = [eager.decode() for _ in range(16)]
    with open_decoder(host_device) as decoder:
        decoder.prefill(PROMPT)
        assert list(decoder.run(count=16, tokens_per_launch=4)) == wanted
        numbers = decoder.statistics()
    assert refused
    assert refused[0].closed, "what was refused is given back"
    assert not numbers.quarantined
    assert not numbers.one_by_one


def test_off_switches_and_profiling_have_their_reasons(
    decoder: Decoder, wanted: dict[str, list[Any]]
) -> None:
    decoder.device_state = False
    decoder.prefill(PROMPT)
    tokens = list(decoder.run(count=5, tokens_per_launch=4))
    decoder.device_state = True
    with decoder.profile() as times:
        tokens += decoder.run(count=5, tokens_per_launch=4)
    by_kernel = times.by_kernel()
    assert by_kernel["embed"].launches == 5
    launches = 5 * decoder.statistics().launches_per_token
    assert sum(one.launches for one in by_kernel.values()) == launches
    assert all(one.seconds > 0 for one in by_kernel.values())
    with decoder.graph() as graph:
        assert {node.name for node in graph.nodes()} <= {*by_kernel}
    tokens += decoder.run(count=5, tokens_per_launch=4)
    assert tokens == wanted["PROMPT"][1:16]
    assert decoder.statistics().one_by_one == {
        "the host sets the state before each step (device_state is off)": 1,
        "profiling per operation": 1,
    }
    assert decoder.statistics().eager_reasons["profiling per operation"] == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "count is 0"),
        ({"count": True}, "count is True"),
        ({"tokens_per_launch": 0}, "tokens_per_launch is 0, must be 1 to 256"),
        ({"tokens_per_launch": 257}, "what the ring holds"),
        ({"ahead": -1}, "ahead is -1, must be 0 to 255"),
        ({"ahead": 256}, "ahead is 256"),
        ({"tokens_per_launch": 100, "ahead": 2}, "ahead is 2, must be 0 to 1"),
        ({"sequence": 1}, "sequence 1: there is no such"),
    ],
)
def test_wrong_options(decoder: Decoder, options: dict[str, Any], message: str) -> None:
    decoder.prefill(PROMPT)
    with pytest.raises(InputError, match=message):
        decoder.run(**options)
    assert len(list(decoder.run(count=3))) == 3


def test_an_empty_sequence_has_nothing_to_run(decoder: Decoder) -> None:
    with pytest.raises(InputError, match="sequence 0 has no token to decode"):
        decoder.run()
    with pytest.raises(InputError, match="one or more are needed"):
        decoder.run_batch([])


@pytest.mark.alone
def test_runs_give_everything_back(where: Device) -> None:
    for _ in range(2):  # the driver keeps some of its own after the first
        where.synchronize()
        free, _ = where.memory_info()
        with open_decoder(where) as decoder:
            decoder.prefill(PROMPT)
            list(decoder.run(count=12, tokens_per_launch=4))
            left = decoder.run(tokens_per_launch=4)
            next(left)
        where.synchronize()
    assert free - where.memory_info()[0] < (8 << 20 if where.name != "host" else 1)
