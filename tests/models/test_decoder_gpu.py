"""The decoder on a GPU against itself on the host in float32, and every way of running against the
others.

Weights are made in memory and are exact in bfloat16, so that what differs is what the kernels do:
bfloat16 in the KV cache and, in steps of several rows, in the inputs of products.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ostinato.device import Device, open_device
from ostinato.driver.api import EdgeType
from ostinato.errors import DownloadError, UnsupportedModelError
from ostinato.graph import record
from ostinato.models.backend import BoundLaunch
from ostinato.models.config import LlamaConfig, tensor_shapes
from ostinato.models.decoder import Decoder
from ostinato.models.files.checkpoint import Checkpoint
from ostinato.models.files.open import open_checkpoint
from ostinato.models.sampling import SamplingOptions, sample
from tests.models.random_models import MemoryCheckpoint

pytestmark = pytest.mark.gpu

CONTEXT = 300
RELATIVE = 2e-2
"""What logits may differ by from float32, as |ours - theirs| / |theirs|."""


def config_of(heads: int, kv_heads: int, head_size: int, **sizes: Any) -> LlamaConfig:
    values = {"hidden": heads * head_size, "layers": 3, "context_length": 512, **sizes}
    return LlamaConfig(heads=heads, kv_heads=kv_heads, head_size=head_size, **values)


SHAPES = {
    "group 3, head 64, tied": config_of(9, 3, 64, inner=520, vocabulary=301, tied_embeddings=True),
    "group 4, head 128": config_of(4, 1, 128, hidden=328, inner=264, vocabulary=1003),
    "group 8, head 64": config_of(8, 1, 64, hidden=256, inner=1000, vocabulary=517),
    "group 1, head 128, tied": config_of(
        2, 2, 128, inner=712, vocabulary=259, tied_embeddings=True, layers=2
    ),
    "biases": config_of(7, 1, 64, inner=520, vocabulary=301, qkv_bias=True),
    "norms of heads": config_of(4, 2, 128, hidden=256, inner=264, vocabulary=517, qk_norm=True),
    "windows": config_of(8, 2, 64, hidden=256, inner=264, vocabulary=259, windows=(64, 0, 128)),
}
FIRST = next(iter(SHAPES))


@functools.cache
def values_of(shape: str) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights that leave the residual near 1, cut to what bfloat16 can hold.

    The embedding is small: a large one, tied, makes every token its own successor.
    """
    rng = np.random.default_rng(17)
    made = {}
    for name, size in tensor_shapes(SHAPES[shape]).items():
        if len(size) == 1:
            if name.rpartition(".")[2] in ("bq", "bk", "bv"):
                made[name] = rng.uniform(-1, 1, size).astype(np.float32)
                continue
            made[name] = rng.uniform(0.5, 1.5, size).astype(np.float32)
            continue
        scale = 0.05 if name == "embed" else size[1] ** -0.5
        values = (rng.standard_normal(size) * scale).astype(np.float32)
        made[name] = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return made


def checkpoint_of(shape: str) -> Checkpoint:
    values = values_of(shape)

    def fill(name: str, out: npt.NDArray[Any]) -> None:
        made = values[name]
        out[...] = made if out.dtype == np.float32 else (made.view(np.uint32) >> 16)

    return MemoryCheckpoint(SHAPES[shape], fill, shape)


def tokens_of(shape: str, count: int = CONTEXT, seed: int = 3) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(t) for t in rng.integers(0, SHAPES[shape].vocabulary, count)]


def open_decoder(device: Device, shape: str, **options: Any) -> Decoder:
    options = {"max_context": CONTEXT, "stop_tokens": (), **options}
    return Decoder(device, checkpoint_of(shape), **options)


def bound_launches(decoder: Decoder) -> list[BoundLaunch]:
    """The launches of a token."""
    context = decoder.plan.sizes.context
    bound = decoder.backend.bind(decoder.program(), decoder.config, 1, context)
    return [one for one in bound if isinstance(one, BoundLaunch)]


@functools.cache
def expected(shape: str) -> dict[int, npt.NDArray[np.float32]]:
    """The host's logits after some positions of `tokens_of(shape)`."""
    tokens, logits, done = tokens_of(shape), {}, 0
    with open_device("host") as device, open_decoder(device, shape) as decoder:
        for position in (0, 1, 2, 63, 64, 127, 128, 200, CONTEXT - 1):
            decoder.prefill(tokens[done : position + 1])
            done = position + 1
            logits[position] = decoder.logits()
    return logits


def difference(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> float:
    """Relative to the norm, or if that is more, the largest relative to the largest logit."""
    wrong = ours.astype(np.float64) - theirs
    norm = np.linalg.norm(wrong) / np.linalg.norm(theirs)
    return float(max(norm, np.abs(wrong).max() / np.abs(theirs).max()))


# ----------------------------------------------------------------------------------- right at all


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_agree_with_the_host_in_pieces_of_every_size(gpu: Device, shape: str) -> None:
    tokens, done = tokens_of(shape), 0
    with open_decoder(gpu, shape) as decoder:
        for position, theirs in expected(shape).items():
            decoder.prefill(tokens[done : position + 1])
            done = position + 1
            error = difference(decoder.logits(), theirs)
            assert error < RELATIVE, f"position {position}: {error:.1e}"
        assert not decoder.statistics().quarantined


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_agree_with_the_host_token_by_token(gpu: Device, shape: str) -> None:
    tokens, theirs, errors = tokens_of(shape), expected(shape), {}
    with open_decoder(gpu, shape) as decoder:
        for position in range(202):
            decoder.prefill(tokens[position : position + 1])
            if position in theirs:
                errors[position] = difference(decoder.logits(), theirs[position])
        numbers = decoder.statistics()
    assert max(errors.values()) < RELATIVE, errors
    assert numbers.launches_replayed >= 200
    assert numbers.graphs_captured == 1


@pytest.mark.parametrize("max_rows", [1, 3, 8, 64])
def test_a_prompt_in_pieces_equals_token_by_token(gpu: Device, max_rows: int) -> None:
    tokens = tokens_of(FIRST, 70)
    with open_decoder(gpu, FIRST, max_rows=1, graphs=False) as single:
        single.prefill(tokens)
        wanted = single.logits()
    with open_decoder(gpu, FIRST, max_rows=max_rows) as decoder:
        for _ in range(3):  # eager, captured, replayed
            decoder.reset()
            decoder.prefill(tokens)
            assert difference(decoder.logits(), wanted) < RELATIVE


# --------------------------------------------------------------- eager, captured, recorded, by host


MODES: dict[str, dict[str, Any]] = {
    "captured": {},
    "captured at once": {"warmups": 0},
    "recorded": {"build": "record"},
    "checked": {"verify": "first"},
    "checked always": {"verify": 1},
    "host sets rows": {"device_state": False},
}


def run(decoder: Decoder, count: int = 8) -> tuple[list[int], list[bytes]]:
    decoder.reset()
    tokens = [decoder.prefill(tokens_of(FIRST, 75))]
    logits = [decoder.logits().tobytes()]
    for _ in range(count):
        tokens.append(decoder.decode())
        logits.append(decoder.logits().tobytes())
    return tokens, logits


@pytest.mark.parametrize("mode", MODES)
def test_every_way_gives_the_same_bits(gpu: Device, mode: str) -> None:
    with open_decoder(gpu, FIRST, max_rows=64, graphs=False) as eager:
        wanted = run(eager)
        assert eager.statistics().launches_replayed == 0
    with open_decoder(gpu, FIRST, max_rows=64, **MODES[mode]) as decoder:
        for _ in range(3):
            assert run(decoder) == wanted
        numbers = decoder.statistics()
        assert not numbers.quarantined
        assert numbers.graphs_captured == 3  # 64 rows, the rest of the prompt, single tokens
        assert numbers.launches_replayed > 16
        if "verify" in MODES[mode]:
            assert sum(step.verified for step in numbers.steps.values()) >= 3


def test_tokens_without_logits_in_between_are_the_same(gpu: Device) -> None:
    """Nothing waits for the stream then: tokens come from the ring alone."""
    with open_decoder(gpu, FIRST) as decoder:
        wanted = run(decoder, 40)[0]
        for _ in range(3):
            decoder.reset()
            tokens = [decoder.prefill(tokens_of(FIRST, 75))]
            tokens += [decoder.decode() for _ in range(40)]
            assert tokens == wanted


@pytest.mark.parametrize("build", ["capture", "record"])
def test_the_graph_is_a_programmatic_chain(gpu: Device, build: str) -> None:
    with open_decoder(gpu, FIRST, graphs=False) as decoder:
        run(decoder, 2)  # the rows stay as they are from here on
        if build == "capture":
            graph = decoder.graph()
        else:
            with record(decoder.stream) as recording:
                decoder.decode()
            graph = recording.build()
        launches = bound_launches(decoder)
        assert [node.name for node in graph.nodes()] == [one.kernel.name for one in launches]
        place = {node.handle: index for index, node in enumerate(graph.nodes())}
        edges = sorted((place[edge.source], place[edge.target]) for edge in graph.edges())
        assert edges == [(i, i + 1) for i in range(len(place) - 1)]
        early = {place[e.target] for e in graph.edges() if e.data.type is EdgeType.PROGRAMMATIC}
        assert early == {i for i, one in enumerate(launches) if one.config.programmatic}
        # All but the first, and the second where it reads what `embed` wrote before it waits.
        assert len(early) >= len(launches) - 2
        graph.close()


def test_a_replayed_token_is_one_launch_and_no_host_write(gpu: Device) -> None:
    with open_decoder(gpu, FIRST) as decoder:
        run(decoder, 3)
        before = decoder.statistics()
        for _ in range(20):
            decoder.decode()
        after = decoder.statistics()
    assert after.launches_replayed - before.launches_replayed == 20
    assert after.launches_eager == before.launches_eager
    assert after.host_writes == before.host_writes
    assert after.kernel_seconds == before.kernel_seconds
    assert after.graphs_captured == before.graphs_captured


def test_profiling_times_every_kernel(gpu: Device) -> None:
    with open_decoder(gpu, FIRST) as decoder:
        wanted = run(decoder, 3)
        with decoder.profile() as times:
            assert run(decoder, 3) == wanted
        with decoder.graph() as graph:  # of a token; the prompt has others beside
            assert {node.name for node in graph.nodes()} <= set(times.by_kernel())


# ------------------------------------------------------------------------------ batches and padding


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_batch_agrees_with_single_sequences(gpu: Device, count: int) -> None:
    prompts = [tokens_of(FIRST, 3 + 11 * i, seed=i) for i in range(count)]
    follow = [tokens_of(FIRST, 5, seed=50 + i) for i in range(count)]
    with open_device("host") as host, open_decoder(host, FIRST) as single:
        wanted = []
        for prompt, after in zip(prompts, follow, strict=True):
            single.reset()
            single.prefill(prompt + after)
            wanted.append(single.logits())
    with open_decoder(gpu, FIRST, sequences=count + 1) as decoder:
        for sequence, (prompt, after) in enumerate(zip(prompts, follow, strict=True)):
            decoder.prefill(prompt + after, sequence)
        before = decoder.device.to_numpy(decoder.plan.buffers["cache"])
        for _ in range(4):  # the last token again, all in one step: eager, captured, replayed
            for sequence in range(count):
                decoder.truncate(len(prompts[sequence]) + 5, sequence)
            decoder.decode_batch(range(count))
            for sequence, theirs in enumerate(wanted):
                assert difference(decoder.logits(sequence), theirs) < RELATIVE
        after_all = decoder.device.to_numpy(decoder.plan.buffers["cache"])
        # [layers, 2, sequences, kv_heads, context, head_size]: nothing but the own position is
        # written.
        for sequence in range(count):
            length = len(prompts[sequence]) + 4
            one, other = before[:, :, sequence, :, :length], after_all[:, :, sequence, :, :length]
            assert one.tobytes() == other.tobytes()
        steps = [decoder.decode_batch(range(count)) for _ in range(3)]
        assert all(len(step) == count for step in steps)
        assert [decoder.tokens(s)[-3:] for s in range(count)] == list(zip(*steps, strict=True))


def test_poison_in_padding_reaches_nothing(gpu: Device) -> None:
    with open_decoder(gpu, FIRST, sequences=5, max_rows=8) as decoder:
        for sequence in range(5):
            decoder.prefill(tokens_of(FIRST, 4 + sequence, seed=sequence), sequence)
        tokens = decoder.decode_batch(range(5))
        logits = [decoder.logits(sequence).tobytes() for sequence in range(5)]
        cache = decoder.device.to_numpy(decoder.plan.buffers["cache"])
        for _ in range(3):  # eagerly was the first; now by graph, 5 rows in a bucket of 8
            for sequence in range(5):
                decoder.truncate(5 + sequence, sequence)
            for name in ("x", "q", "attended", "inner"):
                buffer = decoder.plan.buffers[name]
                buffer.set(np.full(buffer.shape, np.nan, np.float32), decoder.stream)
            assert decoder.decode_batch(range(5)) == tokens
            assert [decoder.logits(sequence).tobytes() for sequence in range(5)] == logits
            again = decoder.device.to_numpy(decoder.plan.buffers["cache"])
            assert again.tobytes() == cache.tobytes()


# -------------------------------------------------------------------------- sampling, stops, limits


def test_sampling_is_the_reference(gpu: Device) -> None:
    options = SamplingOptions(temperature=1.2, top_k=50, top_p=0.95, seed=(7 << 40) + 1)
    with open_decoder(gpu, FIRST) as decoder:
        decoder.set_sampling(options)
        for index in range(12):
            token = decoder.prefill(tokens_of(FIRST, 20)) if index == 0 else decoder.decode()
            assert token == sample(decoder.logits(), 1.2, 50, 0.95, options.seed, 20 + index)


def test_stops_at_the_limit_and_at_an_end_token(gpu: Device) -> None:
    with open_decoder(gpu, FIRST) as decoder:
        decoder.set_sampling(SamplingOptions(temperature=3.0, seed=4), limit=25)
        tokens = [decoder.prefill(tokens_of(FIRST, 20))]
        while not decoder.stopped():
            tokens.append(decoder.decode())
        assert len(tokens) == 6
        end = next(i for i in range(1, 6) if tokens[i] not in tokens[:i])
        decoder.set_stop_tokens([tokens[end]])
        decoder.reset()
        again = [decoder.prefill(tokens_of(FIRST, 20))]
        while not decoder.stopped():
            again.append(decoder.decode())
        assert again == tokens[: end + 1]


def test_what_the_kernels_cannot_do_is_said(gpu: Device) -> None:
    with pytest.raises(UnsupportedModelError, match="65 rows"):
        open_decoder(gpu, FIRST, max_rows=65, library_rows=None)


@pytest.mark.alone
def test_everything_is_given_back(gpu: Device) -> None:
    for _ in range(2):  # the driver keeps some of its own after the first
        gpu.synchronize()
        free, _ = gpu.memory_info()
        with open_decoder(gpu, FIRST) as decoder:
            run(decoder)
        gpu.synchronize()
    assert free - gpu.memory_info()[0] < 8 << 20


# ----------------------------------------------------------------------------------- the real model


REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "reference_smollm2.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def smollm2_file(request: pytest.FixtureRequest) -> Path:
    """OSTINATO_MODEL_FILE, or fetched; skipped where it can neither be had nor fetched."""
    given = os.environ.get("OSTINATO_MODEL_FILE")
    if given:
        return Path(given)
    try:
        path: Path = request.getfixturevalue("smollm2_path")
    except DownloadError as error:
        pytest.skip(f"no model file (OSTINATO_MODEL_FILE names one): {error}")
    return path


@pytest.fixture(scope="module", params=["bf16", "packed"])
def smollm2(gpu: Device, smollm2_file: Path, request: pytest.FixtureRequest) -> Iterator[Decoder]:
    with (
        open_checkpoint(smollm2_file) as checkpoint,
        Decoder(gpu, checkpoint, max_context=512, stop_tokens=(), weights=request.param) as decoder,
    ):
        yield decoder


@pytest.mark.parametrize("prompt", REFERENCE["prompts"], ids=lambda p: p["name"])
def test_64_greedy_tokens_of_smollm2(smollm2: Decoder, prompt: dict[str, Any]) -> None:
    """Equal to float32's wherever its two best logits lie further apart than the error of both.

    The error is measured: the largest difference of any logit in the reference's digests (its
    best ones and 16 more) over the 64 steps; it must itself stay within the bound for logits.
    After a token that differs the reference's own is put in its place.
    """
    steps, wanted = prompt["steps"], prompt["tokens"]
    smollm2.reset()
    token = smollm2.prefill(prompt["prompt_ids"])
    errors, differing = [], []
    for index, (step, right) in enumerate(zip(steps, wanted, strict=True)):
        logits = smollm2.logits()
        theirs = np.array(step["top_values"] + step["sampled"])
        ids = step["top_ids"] + REFERENCE["sample_indices"]
        errors.append(float(np.abs(logits[ids] - theirs).max()))
        assert errors[-1] < RELATIVE * np.abs(theirs).max(), f"token {index}"
        assert token == int(logits.argmax())
        if token != right:
            differing.append((index, step["top_values"][0] - step["top_values"][1]))
        if index + 1 < len(wanted):
            token = smollm2.decode() if token == right else smollm2.prefill([right])
    bound = 2 * max(errors)
    too_far = [(index, margin) for index, margin in differing if margin > bound]
    assert not too_far, f"at (token, margin) {too_far}; the bound is {bound:.3f}"
    margins = [step["top_values"][0] - step["top_values"][1] for step in steps]
    assert sum(margin > bound for margin in margins) >= 32, f"{bound:.3f} bounds nothing"
