"""The decoder on a tiny random model: against float64, eager against replay, batches, padding."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.device import Device, open_device
from ostinato.driver.api import StreamHandle
from ostinato.driver.host.driver import HostDriver
from ostinato.driver.stream import Stream
from ostinato.errors import (
    ClosedError,
    DriverError,
    InputError,
    ModelError,
    NotAvailableError,
)
from ostinato.models.config import LlamaConfig, RopeScaling
from ostinato.models.decoder import Decoder, backend_for
from ostinato.models.files.open import open_checkpoint
from ostinato.models.plan import BufferPlan
from ostinato.models.program import STATE
from ostinato.models.sampling import GREEDY, SamplingOptions
from ostinato.models.sequences import Sequence
from ostinato.models.weights import load_weights
from ostinato.testing import FaultyDriver
from tests.interrupted import interrupt, lines
from tests.models import reference_llama as reference
from tests.models.model_files import CONFIG, weights, write_folder, write_gguf
from tests.models.proof import interrupted

PROMPT = [5, 17, 200, 3, 99, 42, 7, 260, 11, 64, 128]
LOGITS = {"rtol": 1e-3, "atol": 2e-4}
SCALING = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
}


@pytest.fixture
def decoder(host_device: Device, tiny: Path) -> Iterator[Decoder]:
    with Decoder(host_device, tiny, stop_tokens=()) as opened:
        yield opened


def test_decoders_work_on_the_stream_that_they_are_given(host_device: Device, tiny: Path) -> None:
    with Decoder(host_device, tiny, stop_tokens=()) as alone:
        wanted, other = generate(alone, 8), generate(alone, 8, PROMPT[:3])
    stream = host_device.create_stream()
    with (
        Decoder(host_device, tiny, stop_tokens=(), stream=stream) as one,
        Decoder(host_device, tiny, stop_tokens=(), stream=stream, build="record") as two,
    ):
        assert one.stream is stream and two.stream is stream
        tokens, others = [one.prefill(PROMPT)], [two.prefill(PROMPT[:3])]
        for _ in range(7):
            tokens.append(one.decode())
            others.append(two.decode())
    assert tokens == wanted and others == other
    with Decoder(host_device, tiny, stop_tokens=(), stream=stream) as again:  # it is still open
        assert generate(again, 8) == wanted


def test_a_stream_that_a_decoder_cannot_work_on_is_refused(host_device: Device, tiny: Path) -> None:
    closed = host_device.create_stream()
    closed.close()
    legacy = Stream(host_device.context, StreamHandle(0), owned=False)
    with open_device("host") as other:
        for stream, why in (
            (closed, "is closed"),
            (other.create_stream(), "of another device"),
            (legacy, "legacy default stream"),
            (7, "a Stream is needed, not int"),
        ):
            with pytest.raises(InputError, match=why):
                Decoder(host_device, tiny, stream=stream)  # type: ignore[arg-type]


def generate(decoder: Decoder, count: int, prompt: list[int] = PROMPT) -> list[int]:
    decoder.reset()
    tokens = [decoder.prefill(prompt)]
    while len(tokens) < count:
        tokens.append(decoder.decode())
    return tokens


def logits_and_tokens(decoder: Decoder, count: int = 6) -> tuple[list[int], list[np.ndarray]]:
    decoder.reset()
    tokens, logits = [decoder.prefill(PROMPT)], [decoder.logits()]
    for _ in range(count):
        tokens.append(decoder.decode())
        logits.append(decoder.logits())
    return tokens, logits


# ------------------------------------------------------------------------------ right at all


CONFIGS: dict[str, tuple[LlamaConfig, dict[str, Any]]] = {
    "tied": (CONFIG, {}),
    "own head": (replace(CONFIG, tied_embeddings=False), {}),
    "one kv head": (replace(CONFIG, kv_heads=1), {}),
    "odd sizes": (
        replace(CONFIG, hidden=50, heads=3, kv_heads=3, head_size=10, inner=37, layers=3),
        {},
    ),
    "llama 3 rope": (
        replace(CONFIG, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16), rope_theta=500.0),
        SCALING,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_float64(host_device: Device, tmp_path: Path, name: str) -> None:
    config, more = CONFIGS[name]
    values = weights(config, seed=3)
    folder = write_folder(tmp_path / "model", values, config=config, **more)
    with Decoder(host_device, folder, stop_tokens=(), max_rows=8) as decoder:
        tokens, logits = logits_and_tokens(decoder)
        sequence = decoder.tokens()
        assert sequence == (*PROMPT, *tokens)
    expected = reference.logits(config, values, sequence)[len(PROMPT) - 1 : -1]
    for ours, theirs, token in zip(logits, expected, tokens, strict=True):
        np.testing.assert_allclose(ours, theirs, **LOGITS)
        assert token == theirs.argmax()


# --------------------------------------------------------------- eager, captured, recorded, by host


def test_the_environment_switches_graphs_off(
    host_device: Device, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_NO_GRAPHS", "1")
    with Decoder(host_device, tiny, stop_tokens=()) as decoder:
        generate(decoder, 4)
        assert decoder.statistics().graphs_captured == 0
    with Decoder(host_device, tiny, stop_tokens=(), graphs=True) as decoder:
        generate(decoder, 4)
        assert decoder.statistics().graphs_captured > 0


def test_device_state_is_token_position_and_length(decoder: Decoder) -> None:
    tokens = generate(decoder, 3)
    state = decoder.device.to_numpy(decoder.plan.buffers["state"])[0]
    position = len(PROMPT) + 2
    named = dict(zip(STATE.names or (), state.tolist(), strict=True))
    assert named == {
        "token": tokens[-1],
        "position": position,
        "length": position + 1,
        "stopped": 0,
    }


def test_addresses_and_logits_stay_where_they_are(host_device: Device, tiny: Path) -> None:
    with Decoder(host_device, tiny, stop_tokens=(), sequences=3) as decoder:
        buffers = decoder.plan.buffers
        before = {name: buffer.address for name, buffer in buffers.items()}
        decoder.prefill(PROMPT)
        single = decoder.logits(0)
        for sequence in (1, 2):
            decoder.prefill(PROMPT, sequence)
        decoder.decode_batch((0, 1, 2))
        decoder.truncate(len(PROMPT), 0)
        decoder.decode(0)  # the prompt's last token again, alone after a batch
        np.testing.assert_allclose(decoder.logits(0), single, **LOGITS)
        assert {name: buffer.address for name, buffer in buffers.items()} == before


@pytest.mark.parametrize("build", ["capture", "record"])
def test_failed_builds_cost_speed_and_no_answers(
    host_device: Device, tiny: Path, build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostinato.graph import Graph

    with Decoder(host_device, tiny, stop_tokens=(), graphs=False) as eager:
        tokens = generate(eager, 6)

    def refuse(*_: object, **__: object) -> None:
        raise ModelError("no executable today")

    monkeypatch.setattr(Graph, "instantiate", refuse)
    with Decoder(host_device, tiny, stop_tokens=(), build=build) as decoder:
        assert generate(decoder, 6) == tokens
        numbers = decoder.statistics()
        assert numbers.launches_replayed == 0
        assert "building the graph failed before" in numbers.eager_reasons
        assert "no executable today" in str(numbers.quarantined)


@pytest.mark.parametrize(
    ("precondition", "spoil"),
    [
        ("weights loaded", lambda d: setattr(d.weights, "loaded", False)),
        ("workspace ready", lambda d: setattr(d.plan, "prepared", False)),
    ],
)
def test_unmet_preconditions_run_eagerly(decoder: Decoder, precondition: str, spoil: Any) -> None:
    tokens = generate(decoder, 6)
    spoil(decoder)
    before = decoder.statistics()
    assert generate(decoder, 6) == tokens
    after = decoder.statistics()
    assert after.launches_replayed == before.launches_replayed
    assert after.eager_reasons["a precondition is not met"] == 6
    assert precondition in decoder.last_decision.detail


def test_the_captured_graph_can_be_read(decoder: Decoder) -> None:
    graph = decoder.graph()
    names = [node.name for node in graph.nodes()]
    assert names == [call.kernel for call in decoder.program()]
    assert len(decoder.graph(3, sampled=False).nodes()) == len(names) - 2
    assert str(decoder.program()[-1]).startswith("sample(live=live, logits=logits, options=options")
    assert repr(decoder) == (
        "<Decoder of 2 layers, hidden 64, on host: 1 sequences of 128 positions>"
    )


def test_a_graph_has_the_names_of_weights_and_the_callers_line(decoder: Decoder) -> None:
    graph = decoder.graph()
    here = sys._getframe().f_lineno - 1
    assert {node.line for node in graph.nodes()} == {(__file__, here)}
    text = str(graph)
    for name in ("table=[embed]", "norm=[layers.1.attn_norm]", "weight=[layers.1.wqkv]"):
        assert name in text
    assert "cache=[cache[1]]" in text and "weights+" not in text
    pointers = graph.audit().pointers
    (norm,) = (p for p in pointers if p.node == "6" and p.place.endswith("(norm)"))
    assert norm.memory.startswith("'layers.1.attn_norm' float32[64] in 'weights' (256 bytes at ")


def test_where_nobody_calls_a_decoder_a_line_is_its_own(decoder: Decoder) -> None:
    with ThreadPoolExecutor(1) as pool:
        nodes = pool.submit(decoder.graph).result().nodes()
    assert {Path(node.line[0]).name for node in nodes if node.line} == {"step_graphs.py"}


# -------------------------------------------------------------------------------------- batches


def test_steps_have_rows_for_all_sequences_by_themselves(host_device: Device, tiny: Path) -> None:
    with Decoder(host_device, tiny, stop_tokens=()) as single:
        expected = generate(single, 3)
    with Decoder(host_device, tiny, stop_tokens=(), sequences=65) as decoder:
        steps = [[*decoder.prefill_batch(dict.fromkeys(range(65), PROMPT)).values()]]
        steps += [decoder.decode_batch(range(65)) for _ in range(2)]
    assert steps == [[token] * 65 for token in expected]


# ---------------------------------------------------------------------- sampling, stopping, errors


def test_other_settings_start_nothing_that_they_stop_too(host_device: Device, tiny: Path) -> None:
    with Decoder(host_device, tiny, sequences=2) as decoder:
        end = decoder.prefill(PROMPT)
        decoder.set_stop_tokens([end])
        decoder.set_sampling(SamplingOptions(5.0, seed=1), 1, limit=len(PROMPT))
        chosen = decoder.prefill_batch({0: PROMPT, 1: PROMPT})
        assert chosen[0] == end != chosen[1]
        for change in (
            lambda: decoder.set_stop_tokens([end, 279]),
            lambda: decoder.set_sampling(SamplingOptions(1.0)),
            lambda: decoder.set_sampling(SamplingOptions(1.0), 1, limit=len(PROMPT) - 3),
        ):
            change()
            assert decoder.stopped(0) and decoder.stopped(1)
        for sequence in (0, 1):
            with pytest.raises(InputError, match=f"sequence {sequence} has stopped"):
                decoder.decode(sequence)
        decoder.set_sampling(SamplingOptions(), 1, limit=len(PROMPT) + 1)
        assert not decoder.stopped(1) and decoder.stopped(0)
        decoder.decode(1)
        assert decoder.stopped(1)


def test_stops_at_the_context(host_device: Device, tiny: Path) -> None:
    with Decoder(host_device, tiny, stop_tokens=(), max_context=16) as decoder:
        tokens = [decoder.prefill(PROMPT)]
        while not decoder.stopped():
            tokens.append(decoder.decode())
        assert len(PROMPT) + len(tokens) == 17, "the last one has no place in the cache any more"
        decoder.reset()
        decoder.prefill([1] * 16)
        assert decoder.stopped()
        decoder.set_stop_tokens(())
        with pytest.raises(InputError, match="end of its context"):
            decoder.decode()
        decoder.reset()
        with pytest.raises(InputError, match="room for 16 more of 16"):
            decoder.prefill([1] * 17)


def test_sizes_of_any_integer_type(host_device: Device, tiny: Path) -> None:
    class Two:
        def __index__(self) -> int:
            return 2

    for rows in (None, np.int64(4)):
        with Decoder(
            host_device, tiny, max_rows=rows, sequences=Two(), max_context=np.int16(32)
        ) as decoder:
            sizes = decoder.plan.sizes
            assert sizes.sequences == 2
            assert {type(each) for each in (sizes.rows, sizes.sequences, sizes.context)} == {int}


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"sequences": 1025}, "sequences is 1025, must be 1 to 1024"),
        ({"max_rows": 4097}, "max_rows is 4097, must be 1 to 4096"),
    ],
)
def test_more_than_device_state_has_room_for_is_refused(
    host_device: Device, tiny: Path, sizes: dict[str, int], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        Decoder(host_device, tiny, max_context=16, **sizes)


def test_truncating_to_all_tokens_changes_nothing(decoder: Decoder) -> None:
    decoder.set_sampling(GREEDY, limit=len(PROMPT) + 2)
    decoder.prefill(PROMPT)
    while not decoder.stopped():
        decoder.decode()
    decoder.truncate(len(decoder.tokens()))
    assert decoder.stopped()
    with pytest.raises(InputError, match="has stopped"):
        decoder.decode()


@pytest.mark.parametrize("change", ["truncate", "keep_common"])
def test_an_interrupted_truncation_leaves_no_stale_cache(change: str) -> None:
    """Tokens and length are cut together: what the cache holds is what the tokens say."""
    after = {"truncate": ([5, 6], 1), "keep_common": ([5, 6], 2)}[change]
    seen = set()

    def work() -> None:
        one.truncate(2) if change == "truncate" else one.keep_common([5, 6, 9, 9])

    one = Sequence(0, tokens=[5, 6, 7, 8], length=4, limit=16)
    for at in range(1, lines(work) + 1):
        one = Sequence(0, tokens=[5, 6, 7, 8], length=4, limit=16)
        where = interrupt(work, at)
        assert (one.tokens, one.length) in (([5, 6, 7, 8], 4), after), where
        seen.add(one.length)
    assert len(seen) == 2, "it was interrupted before and after"


@pytest.mark.parametrize("call", ["memcpy", "event_record"])
def test_settings_that_the_driver_refuses_are_not_set(tmp_path: Path, call: str) -> None:
    """Neither now, nor with the next settings, of another sequence."""
    faults = FaultyDriver(HostDriver())
    path = write_gguf(tmp_path / "m.gguf")
    with (
        Device(faults) as device,
        Decoder(device, path, sequences=2, stop_tokens=()) as decoder,
    ):
        wanted = generate(decoder, 8)
        hot = SamplingOptions(temperature=5.0, seed=3)
        changes: list[Callable[[], object]] = [
            lambda: decoder.set_sampling(hot, 0, limit=len(PROMPT) + 2),
            lambda: decoder.set_stop_tokens([wanted[2]]),
        ]
        for change in changes:
            fault = faults.fail(call)
            with pytest.raises(DriverError, match="injected"):
                change()
            assert fault.fired == 1
            faults.clear()
            assert decoder.stop_tokens == () and generate(decoder, 8) == wanted
            decoder.set_sampling(hot, 1)
            assert generate(decoder, 8) == wanted


def test_a_decoder_gives_its_memory_back_after_its_stream_was_closed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    with open_device("host") as device:
        before = device.memory_info()[0]
        stream = device.create_stream()
        decoder = Decoder(device, path, stream=stream)
        decoder.prefill(PROMPT)
        stream.close()
        decoder.close()
        device.synchronize()
        assert device.memory_info()[0] >= before - (1 << 16)


def test_a_profile_inside_of_a_profile_is_refused(decoder: Decoder) -> None:
    with decoder.profile() as times:
        with pytest.raises(InputError, match="a profile is under way"), decoder.profile():
            pass
        decoder.prefill(PROMPT)
    assert times


def test_an_interrupted_prompt_leaves_whole_pieces(host_device: Device, tiny: Path) -> None:
    with Decoder(host_device, tiny, stop_tokens=(), max_rows=4) as decoder:
        tokens = generate(decoder, 4)
        decoder.reset()
        with interrupted(1):
            decoder.prefill(PROMPT)
        done = decoder.tokens()
        assert done == tuple(PROMPT[:8])
        with pytest.raises(InputError, match="no token to decode"):
            decoder.decode()
        assert decoder.prefill(PROMPT[8:]) == tokens[0]
        assert [decoder.decode() for _ in range(3)] == tokens[1:]


def test_a_budget_of_one_graph_costs_captures_and_no_answers(
    host_device: Device, tiny: Path
) -> None:
    with Decoder(host_device, tiny, stop_tokens=()) as decoder:
        tokens = generate(decoder, 6)
    with Decoder(host_device, tiny, stop_tokens=(), graph_budget=1, warmups=0) as decoder:
        assert [generate(decoder, 6) for _ in range(3)] == [tokens] * 3
        assert len(decoder.graph_cache) == 1
        assert decoder.statistics().graphs_captured == 6


def test_weights_in_bfloat16_and_through_ordinary_memory(
    host_device: Device, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device with its own memory and bfloat16 kernels loads so."""
    apart = replace(host_device.capabilities, host_memory_is_device_memory=False)
    with open_checkpoint(tiny) as checkpoint:
        with monkeypatch.context() as patch:
            patch.setattr(type(host_device), "capabilities", apart)
            loaded = load_weights(host_device, checkpoint, np.uint16)
        assert loaded.loaded
        for name in ("wq", "wk", "wv"):
            assert f"layers.1.{name}" not in loaded.tensors
        fused = np.concatenate([checkpoint.bfloat16(f"layers.1.w{part}") for part in "qkv"])
        np.testing.assert_array_equal(loaded.buffer("wqkv", 1).array, fused)
        np.testing.assert_array_equal(
            loaded.buffer("final_norm").array, checkpoint.tensor("final_norm")
        )
        matrices = sum(b.size for b in loaded.tensors.values() if len(b.shape) == 2)
        norms = sum(b.size for b in loaded.tensors.values() if len(b.shape) == 1)
        assert loaded.nbytes == 2 * matrices + 4 * norms
        loaded.close()
        with pytest.raises(ClosedError, match=r"'layers\.1\.wo' is not loaded"):
            loaded.buffer("wo", 1)


def test_a_failed_load_gives_the_memory_back(
    host_device: Device, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, _ = host_device.memory_info()

    def refuse(*_: object, **__: object) -> None:
        raise ModelError("no more")

    with open_checkpoint(tiny) as checkpoint:
        for owner, name in ((BufferPlan, "allocate"), (type(checkpoint), "load")):
            monkeypatch.setattr(owner, name, refuse)
            with pytest.raises(ModelError, match="no more"):
                Decoder(host_device, checkpoint)
    host_device.synchronize()
    assert host_device.memory_info()[0] == free


def test_logits_of_other_tokens_are_refused(host_device: Device, tiny: Path) -> None:
    with Decoder(host_device, tiny, stop_tokens=(), sequences=2) as decoder:

        def keep(count: int) -> int:
            return decoder.keep_common([*PROMPT[:count], 279])

        changes: dict[str, Any] = {
            "reset": lambda: decoder.reset(0),
            "extend": lambda: decoder.extend([1, 2]),
            "truncate": lambda: decoder.truncate(len(PROMPT)),
            "keep_common": lambda: keep(3),
            "copy_prefix": lambda: decoder.copy_prefix(2, 1, 0),
        }
        with pytest.raises(InputError, match="sequence 0 has no logits"):
            decoder.logits()
        for change in changes.values():
            generate(decoder, 2)
            wanted = decoder.logits()
            decoder.prefill([5, 6, 7], 1)
            decoder.truncate(len(decoder.tokens()))  # keeps all of them
            assert np.array_equal(decoder.logits(), wanted)
            change()
            with pytest.raises(InputError, match="sequence 0 has no logits"):
                decoder.logits()
            decoder.logits(1)


def test_replays_of_a_decoder_are_profiled_as_a_steps(
    host_device: Device, tiny: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Replays of single steps and of a run that is ahead are counted together."""
    monkeypatch.setenv("OSTINATO_PROFILE", "1")
    with Decoder(host_device, tiny, stop_tokens=(), warmups=0) as decoder:
        decoder.prefill([1])  # one row, as each that follows
        for _ in range(30):
            decoder.decode()
        assert len(list(decoder.run(count=40))) == 40
    printed = re.findall(r"^ostinato: replay (\d+) of decode", capsys.readouterr().err, re.M)
    assert printed == ["1", "65"]


WRONG: list[tuple[Callable[[Decoder], object], str]] = [
    (lambda d: d.prefill([]), "no tokens"),
    (lambda d: d.prefill(np.zeros(0, np.int64)), "no tokens"),
    (lambda d: d.prefill([1.5]), r"tokens\[0\] is 1.5, must be a token id"),
    (lambda d: d.prefill([280]), "token 280 is outside the vocabulary of 280"),
    (lambda d: d.prefill([-1]), "token -1 is outside"),
    (lambda d: d.prefill([1], 1), "sequence 1: there is no such"),
    (lambda d: d.prefill([1], progress=5), "progress is 5, must be a function"),
    (lambda d: d.decode(), "sequence 0 has no token to decode"),
    (lambda d: d.decode_batch(()), "one or more are needed"),
    (lambda d: d.decode_batch((0, 0)), "each once"),
    (lambda d: d.truncate(1), "1 cannot be kept"),
    (lambda d: d.set_stop_tokens(range(17)), "17 stop tokens; 16 at most"),
    (lambda d: d.set_stop_tokens([280]), "token 280 is outside the vocabulary"),
    (lambda d: d.set_sampling(SamplingOptions(), limit=-1), "limit is -1"),
]


def test_wrong_calls(decoder: Decoder) -> None:
    for call, message in WRONG:
        with pytest.raises(InputError, match=message):
            call(decoder)
        assert decoder.tokens() == ()
    assert len(generate(decoder, 3)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_context": 129}, "trained for 1 to 128"),
        ({"max_context": 0}, "max_context is 0"),
        ({"sequences": 0}, "sequences is 0"),
        ({"sequences": 65, "max_rows": 64}, "max_rows is 64, and 65 sequences are to step togeth"),
        ({"max_rows": 0}, "rows is 0"),
    ],
)
def test_wrong_sizes(
    host_device: Device, tiny: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Decoder(host_device, tiny, **options)


def test_a_device_without_kernels_is_refused(
    host_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(host_device.capabilities, source_language="metal")
    monkeypatch.setattr(type(host_device), "capabilities", other)
    with pytest.raises(NotAvailableError, match="no kernels in 'metal'"):
        backend_for(host_device)
