"""Steps whose products cuBLASLt computes, on a GPU: against the host in float32, and every way of
running against the others."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from ostinato.device import Device
from ostinato.models.cuda.products import LibraryProducts, MatrixProduct, open_products
from ostinato.models.decoder import Decoder
from tests.models import proof
from tests.models.proof import RELATIVE, check_ways, difference, expected
from tests.models.random_models import RandomModel, llama

pytestmark = pytest.mark.gpu

LIMIT = RELATIVE["cuda"]
open_decoder = partial(proof.open_decoder, library_rows=16)
CONTEXT = 700
SHAPES = {
    # A third layer would be 1.7e-2 from float32 by bfloat16 inputs alone, whoever multiplies.
    "group 4, head 64": llama(
        8, 2, 64, inner=1024, vocabulary=517, context_length=CONTEXT, layers=2
    ),
    "group 3, head 128, tied": llama(
        3, 1, 128, hidden=328, inner=264, vocabulary=1003, context_length=CONTEXT, layers=2
    ),
    "norms of heads, head 128": llama(
        4,
        2,
        128,
        hidden=256,
        inner=264,
        vocabulary=517,
        context_length=CONTEXT,
        layers=2,
        qk_norm=True,
    ),
    "biases and windows": llama(
        8,
        2,
        64,
        inner=520,
        vocabulary=301,
        context_length=CONTEXT,
        layers=2,
        qkv_bias=True,
        windows=(128, 0),
    ),
    "group 1, head 24": llama(2, 2, 24, hidden=48, inner=88, vocabulary=67, context_length=CONTEXT),
}
FIRST = next(iter(SHAPES))


@pytest.fixture(scope="module", autouse=True)
def library(gpu: Device) -> LibraryProducts:
    """Skips where cuBLASLt is not installed."""
    found, why = open_products(gpu, 16)
    if found is None:
        pytest.skip(why)
    return found


def used(decoder: Decoder) -> bool:
    """Whether the library multiplied, and nothing went wrong."""
    numbers = decoder.statistics()
    return numbers.library.startswith("cuBLASLt") and not numbers.quarantined


# ----------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("rows", [1, 16, 100, 512])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_product_is_right_and_always_the_same(
    gpu: Device, library: LibraryProducts, rows: int, accumulate: bool
) -> None:
    product = MatrixProduct(rows, 264, 136, accumulate)
    rng = np.random.default_rng(rows)

    def bits(shape: tuple[int, ...]) -> Any:
        return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype("u2")

    def wide(values: Any) -> Any:
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    weight, inputs = bits((264, 136)), bits((rows, 136))
    before = rng.standard_normal((rows, 264)).astype(np.float32)
    given = {
        "weight": gpu.array(weight),
        "inputs": gpu.array(inputs),
        "out": gpu.array(before),
        "workspace": gpu.zeros(library.workspace_bytes, "bytes"),
    }
    operations = library.product(product).operations("product", **given)
    stream, seen = gpu.create_stream(), set()
    for _ in range(20):
        given["out"].set(before, stream)
        for operation in operations:
            stream.submit(operation)
        seen.add(given["out"].to_numpy(stream).tobytes())
    assert len(seen) == 1
    found = np.frombuffer(seen.pop(), np.float32).reshape(rows, 264)
    wanted = wide(inputs) @ wide(weight).T + (before if accumulate else 0)
    assert difference(found, wanted) < 1e-5


# ------------------------------------------------------------------------------------ right at all


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_in_large_pieces_agree_with_float32(gpu: Device, shape: str) -> None:
    config = SHAPES[shape]
    after = (20, 100, 128, 250, 512, 513, 650)
    tokens = RandomModel(config).tokens(max(after), seed=4)
    logits = expected(config, tuple(tokens), tuple(count - 1 for count in after))
    with open_decoder(gpu, config) as decoder:
        for index, count in enumerate(after):
            decoder.reset()
            decoder.prefill(tokens[:count])
            assert difference(decoder.logits(), logits[index]) < LIMIT, count
        assert used(decoder)


@pytest.mark.parametrize("count", [16, 40, 64])
def test_batches_agree_with_steps_of_one(gpu: Device, count: int) -> None:
    config = SHAPES[FIRST]
    with open_decoder(gpu, config, sequences=64, max_context=64) as decoder:
        for sequence in range(count):
            decoder.prefill(RandomModel(config).tokens(3 + sequence % 9, seed=sequence), sequence)
        for _ in range(4):  # eager, captured, replayed
            decoder.decode_batch(range(count))
        logits = [decoder.logits(sequence) for sequence in range(count)]
        tokens = [decoder.tokens(sequence) for sequence in range(count)]
        assert used(decoder)
    with open_decoder(gpu, config, max_context=64, library_rows=None) as single:
        for sequence in range(0, count, 5):
            single.reset()
            single.prefill(tokens[sequence][:-1])
            assert difference(logits[sequence], single.logits()) < LIMIT


# -------------------------------------------------------------- eager, captured, recorded, repeated


def run(decoder: Decoder, sequences: int = 16) -> list[bytes]:
    """Prompts of all buckets, and batches: all logits."""
    config, found = decoder.config, []
    for count in (20, 64, 100, 256, 300, 550):
        decoder.reset()
        decoder.prefill(RandomModel(config).tokens(count, seed=count))
        found.append(decoder.logits().tobytes())
    for sequence in range(sequences):
        decoder.prefill(RandomModel(config).tokens(5, seed=sequence), sequence)
    for _ in range(3):
        decoder.decode_batch(range(sequences))
        found += [decoder.logits(sequence).tobytes() for sequence in range(sequences)]
    assert used(decoder)
    return found


@pytest.mark.parametrize("options", [{}, {"build": "record"}, {"verify": "first"}, {"warmups": 0}])
def test_every_way_gives_the_same_bits(gpu: Device, options: dict[str, Any]) -> None:
    check_ways(partial(open_decoder, gpu, SHAPES[FIRST], sequences=16), run, options)


@pytest.mark.parametrize("build", ["capture", "record"])
def test_a_loop_gives_the_bits_of_single_steps(gpu: Device, build: str) -> None:
    config, sequences = SHAPES[FIRST], range(16)
    with open_decoder(gpu, config, sequences=16, max_context=64, build=build) as decoder:
        found = []
        for way in ("steps", "loop"):
            decoder.reset()
            for sequence in sequences:
                decoder.prefill(RandomModel(config).tokens(4, seed=sequence), sequence)
            if way == "steps":
                for _ in range(8):
                    decoder.decode_batch(sequences)
            else:
                assert len(list(decoder.run_batch(sequences, count=8, tokens_per_launch=4))) == 8
            tokens = [decoder.tokens(sequence) for sequence in sequences]
            decoder.decode_batch(sequences)
            found.append((tokens, [decoder.logits(sequence).tobytes() for sequence in sequences]))
        assert found[0] == found[1]
        assert used(decoder)
        assert not decoder.statistics().one_by_one


def test_a_hundred_repeats_give_the_same_bits(gpu: Device) -> None:
    config = SHAPES[FIRST]
    tokens = RandomModel(config).tokens(512, seed=8)
    with open_decoder(gpu, config, sequences=16) as decoder:
        seen = set()
        for _ in range(100):
            decoder.reset()
            decoder.prefill(tokens)
            seen.add(decoder.logits().tobytes())
        assert len(seen) == 1
        batches = set()
        for sequence in range(16):
            decoder.prefill(tokens[sequence : sequence + 9], sequence)
        lengths = [len(decoder.tokens(sequence)) for sequence in range(16)]
        for _ in range(100):
            decoder.decode_batch(range(16))
            batches.add(b"".join(decoder.logits(sequence).tobytes() for sequence in range(16)))
            for sequence in range(16):
                decoder.truncate(lengths[sequence], sequence)
        assert len(batches) == 1
        assert used(decoder)


def test_padding_reaches_nothing(gpu: Device) -> None:
    """Whatever stands in what pads a piece or a batch, the rest is the same."""
    config = SHAPES[FIRST]
    tokens = RandomModel(config).tokens(200, seed=8)
    with open_decoder(gpu, config, sequences=20) as decoder:
        seen = set()
        for value in (0.0, 1e30, float("nan")):
            for name in ("x", "q", "attended", "product_in", "product_out"):
                buffer = decoder.plan.buffers[name]
                kind = np.float32 if buffer.dtype == np.float32 else np.uint16
                number = value if kind == np.float32 else np.float32(value).view(np.uint32) >> 16
                buffer.set(np.full(buffer.shape, number, kind), decoder.stream)
            decoder.reset()
            decoder.prefill(tokens)
            logits = [decoder.logits()]
            for sequence in range(20):
                decoder.prefill(tokens[sequence : sequence + 9], sequence)
            decoder.decode_batch(range(20))
            logits += [decoder.logits(sequence) for sequence in range(20)]
            seen.add(b"".join(one.tobytes() for one in logits))
        assert len(seen) == 1
        assert used(decoder)


def test_a_step_is_kernels_of_ours_and_of_the_library(gpu: Device) -> None:
    """The graph says what runs; nothing in it is a child graph or a host call."""
    with open_decoder(gpu, SHAPES[FIRST], sequences=16) as decoder:
        decoder.prefill(RandomModel(SHAPES[FIRST]).tokens(100, seed=1))
        for graph in (decoder.graph(128), decoder.graph(16)):
            kinds = {node.kind.name for node in graph.nodes()}
            assert kinds <= {"KERNEL", "MEMSET"}
            names = [node.name for node in graph.nodes()]
            assert names.count("silu_rows") == SHAPES[FIRST].layers
        assert used(decoder)
