"""Steps whose products a library computes: the CUDA backend with its kernels on the emulator and
NumPy for the library, against the host's float32."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from ostinato.device import Device
from ostinato.errors import InputError, NotAvailableError, UnsupportedModelError
from ostinato.models.config import LlamaConfig, tensor_shapes
from ostinato.models.cuda import products
from ostinato.models.cuda.backend import CudaBackend
from ostinato.models.decoder import Decoder
from ostinato.models.files.checkpoint import Checkpoint
from ostinato.models.host.backend import HostBackend
from ostinato.models.plan import PlanSizes
from tests.models.emulated import EmulatedGpu, NumpyProducts
from tests.models.proof import RELATIVE, check_ways, furthest
from tests.models.random_models import MemoryCheckpoint, llama

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")

CONFIG = llama(
    2, 1, 24, layers=2, inner=88, vocabulary=67, context_length=1024, tied_embeddings=True
)
FAMILY = replace(CONFIG, qkv_bias=True, qk_norm=True, windows=(70, 0))
"""All additions of other families to Llama's layers."""
LIMIT = RELATIVE["cuda"]


def checkpoint(config: LlamaConfig = CONFIG) -> Checkpoint:
    """Weights that are exact in bfloat16 and leave the residual near 1."""
    rng = np.random.default_rng(11)
    made = {}
    for name, size in tensor_shapes(config).items():
        scale = 0.05 if name == "embed" else size[-1] ** -0.5
        values = (
            rng.uniform(0.5, 1.5, size) if len(size) == 1 else rng.standard_normal(size) * scale
        )
        bits = values.astype(np.float32).view(np.uint32)
        made[name] = (bits & np.uint32(0xFFFF0000 if len(size) > 1 else 0xFFFFFFFF)).view(
            np.float32
        )

    def fill(name: str, out: Any) -> None:
        values = made[name]
        out[...] = values if out.dtype == np.float32 else values.view(np.uint32) >> 16

    return MemoryCheckpoint(config, fill, "small")


def prompt(count: int, seed: int = 5) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, CONFIG.vocabulary, count)]


def open_decoder(device: Device, config: LlamaConfig = CONFIG, **options: Any) -> Decoder:
    options = {"max_context": 1000, "stop_tokens": (), "library_rows": 16, **options}
    return Decoder(device, checkpoint(config), **options)


@pytest.fixture(scope="module")
def wanted() -> dict[int, Any]:
    """The host's logits after so many tokens of `prompt(900)`."""
    from ostinato.device import open_device

    tokens, logits, done = prompt(900), {}, 0
    with open_device("host") as device, open_decoder(device) as decoder:
        for count in (20, 64, 65, 100, 128, 200, 300, 512, 513, 600, 900):
            decoder.prefill(tokens[done:count])
            done = count
            logits[count] = decoder.logits()
    return logits


# ------------------------------------------------------------------------------------------ prompts


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(20, marks=pytest.mark.slow),
        65,
        pytest.param(300, marks=pytest.mark.slow),
        600,
        pytest.param(900, marks=pytest.mark.slow),
    ],
)
def test_a_prompt_in_large_pieces_agrees_with_the_host(
    host_device: Device, library: NumpyProducts, wanted: dict[int, Any], count: int
) -> None:
    with open_decoder(host_device) as decoder:
        assert decoder.plan.sizes.rows == 1024
        token = decoder.prefill(prompt(900)[:count])
        assert furthest(decoder.logits(), wanted[count]) < LIMIT
        assert token == int(decoder.logits().argmax())
        assert decoder.tokens()[:count] == tuple(prompt(900)[:count])
        numbers = decoder.statistics()
        assert numbers.library == "NumPy"
        assert not numbers.quarantined
    # 600 tokens in 1,024 rows would mostly be padding.
    wanted_rows = {20: {32}, 65: {128}, 300: {512}, 600: {512, 128}, 900: {1024}}
    assert {one.rows for one in library.asked} == wanted_rows[count]


def test_pieces_go_on_from_pieces_and_tokens_from_them(
    host_device: Device, library: NumpyProducts, wanted: dict[int, Any]
) -> None:
    tokens, done = prompt(900), 0
    with open_decoder(host_device) as decoder:
        for count in (65, 200, 300):  # padded in front, by pieces of 128 and 256 rows
            decoder.prefill(tokens[done:count])
            done = count
            assert furthest(decoder.logits(), wanted[count]) < LIMIT
        token = decoder.prefill(tokens[300:512])
        assert decoder.decode() == decoder.tokens()[-1]
        assert decoder.tokens()[512] == token


@pytest.mark.parametrize(
    "added",
    [
        pytest.param({"qkv_bias": True}, marks=pytest.mark.slow),
        pytest.param({"qk_norm": True}, marks=pytest.mark.slow),
        pytest.param({"windows": (70, 0)}, marks=pytest.mark.slow),
        {"head_size": 64, "windows": (70, 0)},
        {},
    ],
)
def test_families_in_large_pieces_agree_with_the_host(
    host_device: Device, library: NumpyProducts, added: dict[str, Any]
) -> None:
    """`{}`: all of it at once; heads of 64: the attention by warpgroups."""
    config = replace(CONFIG, **added) if added else FAMILY
    tokens, wanted, done = prompt(300), {}, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ostinato.models.decoder.backend_for", lambda d, **_: HostBackend(d))
        with open_decoder(host_device, config) as host:
            for count in (20, 71, 300):
                host.prefill(tokens[done:count])
                wanted[count], done = host.logits(), count
    with open_decoder(host_device, config) as decoder:
        for count, logits in wanted.items():
            decoder.reset()
            decoder.prefill(tokens[:count])
            assert furthest(decoder.logits(), logits) < LIMIT
        assert decoder.statistics().library == "NumPy"
        assert not decoder.statistics().quarantined


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (CONFIG, {}),
        pytest.param(FAMILY, {}, marks=pytest.mark.slow),  # as the last, but for its check
        (FAMILY, {"build": "record"}),
        (FAMILY, {"verify": "first"}),
    ],
)
def test_every_way_gives_the_same_bits(
    host_device: Device, library: NumpyProducts, options: dict[str, Any], config: LlamaConfig
) -> None:
    def run(decoder: Decoder) -> list[bytes]:
        decoder.reset()
        found = []
        for step in (prompt(90), prompt(20, seed=6), None):
            decoder.decode() if step is None else decoder.prefill(step)
            found.append(decoder.logits().tobytes())
        return found

    assert check_ways(partial(open_decoder, host_device, config), run, options) == [3]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"max_rows": 1, "library_rows": None}, marks=pytest.mark.slow)]
)
def test_a_small_gpu_multiplies_a_row_of_too_many_inputs_as_several(
    host_device: Device, library: NumpyProducts, monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    """Neither its float32 nor its digits fit 99 KiB; the row of a piece that samples too."""
    config = replace(CONFIG, inner=25600)
    tokens = prompt(3 if options else 70)

    def open_small(device: Device, *, library_rows: Any, **_: object) -> CudaBackend:
        gpu: Any = EmulatedGpu(device, shared=99 * 1024)
        return CudaBackend(gpu, library_rows=library_rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ostinato.models.decoder.backend_for", lambda d, **_: HostBackend(d))
        with open_decoder(host_device, config, max_context=100) as host:
            host.prefill(tokens)
            first = host.logits()
            token = host.decode()
            wanted = [first, host.logits()]
    monkeypatch.setattr("ostinato.models.decoder.backend_for", open_small)
    with open_decoder(host_device, config, max_context=100, **options) as decoder:
        decoder.prefill(tokens)
        assert furthest(decoder.logits(), wanted[0]) < LIMIT
        assert decoder.decode() == token
        assert furthest(decoder.logits(), wanted[1]) < LIMIT
        assert not decoder.statistics().quarantined


# ------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("count", [pytest.param(16, marks=pytest.mark.slow), 33])
def test_a_batch_agrees_with_the_host(
    host_device: Device, library: NumpyProducts, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    with open_decoder(host_device, sequences=count, max_context=40) as decoder:
        for sequence in range(count):
            decoder.prefill(prompt(1 + sequence % 3, seed=sequence), sequence)
        library.asked.clear()
        for _ in range(2):
            decoder.decode_batch(range(count))
        bucket = 1 << (count - 1).bit_length()
        assert {one.rows for one in library.asked} == {min(bucket, 64)}
        batched = [decoder.logits(sequence) for sequence in range(count)]
        tokens = [decoder.tokens(sequence) for sequence in range(count)]
    monkeypatch.setattr("ostinato.models.decoder.backend_for", lambda d, **_: HostBackend(d))
    with open_decoder(host_device, max_context=40) as single:
        for sequence in range(count):
            single.reset()
            single.prefill(tokens[sequence][:-1])
            assert furthest(batched[sequence], single.logits()) < LIMIT


def test_a_loop_gives_the_tokens_of_single_steps(
    host_device: Device, library: NumpyProducts
) -> None:
    sequences = range(16)
    with open_decoder(host_device, sequences=16, max_context=40, build="record") as decoder:
        given = {}
        for way in ("steps", "loop"):
            decoder.reset()
            for sequence in sequences:
                decoder.prefill(prompt(1, seed=sequence), sequence)
            if way == "steps":
                given[way] = [decoder.decode_batch(sequences) for _ in range(4)]
            else:
                run = decoder.run_batch(sequences, count=4, tokens_per_launch=2)
                given[way] = [[one[sequence] for sequence in sequences] for one in run]
        assert given["loop"] == given["steps"]
        numbers = decoder.statistics()
        assert not numbers.quarantined and not numbers.one_by_one


# ------------------------------------------------------------------------- where there is none


def test_without_a_library_our_kernels_take_pieces_of_64(
    host_device: Device, library: NumpyProducts, wanted: dict[int, Any]
) -> None:
    with open_decoder(host_device, library_rows=None) as decoder:
        assert decoder.plan.sizes.rows == 64
        decoder.prefill(prompt(900)[:100])
        assert furthest(decoder.logits(), wanted[100]) < LIMIT
        assert decoder.statistics().library == "not used: switched off"
    assert not library.asked
    with pytest.raises(UnsupportedModelError, match="128 rows; the CUDA kernels take 1 to 64"):
        open_decoder(host_device, library_rows=None, max_rows=128)


@pytest.mark.parametrize("works_to", [0, 64, pytest.param(128, marks=pytest.mark.slow)])
def test_a_library_that_fails_costs_speed_and_no_answer(
    host_device: Device, library: NumpyProducts, wanted: dict[int, Any], works_to: int
) -> None:
    library.broken = lambda product: product.rows > works_to
    with open_decoder(host_device) as decoder:
        for count in (20, 100 if works_to < 128 else 300):
            decoder.reset()
            decoder.prefill(prompt(900)[:count])
            assert furthest(decoder.logits(), wanted[count]) < LIMIT
        assert decoder.statistics().library.startswith("not used: no algorithm for")
        assert not decoder.statistics().quarantined


def test_the_library_multiplies_from_the_rows_asked_for(
    host_device: Device, library: NumpyProducts
) -> None:
    with open_decoder(host_device, library_rows=4, max_rows=8) as decoder:
        decoder.prefill(prompt(3))
        assert {one.rows for one in library.asked} == {4}
        library.asked.clear()
        decoder.decode()
        assert not library.asked
    library.asked.clear()
    with open_decoder(host_device, library_rows=300) as decoder:
        decoder.prefill(prompt(40))
        assert not library.asked
        decoder.prefill(prompt(70))  # our own kernels do not take so many
        assert {one.rows for one in library.asked} == {128}
    with pytest.raises(InputError, match="library_rows is 0"):
        open_decoder(host_device, library_rows=0)


def test_more_than_64_rows_cannot_all_sample(host_device: Device, library: NumpyProducts) -> None:
    with pytest.raises(UnsupportedModelError, match="128 rows"):
        open_decoder(host_device, sequences=65, max_rows=128)


def test_the_reason_is_said_where_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise NotAvailableError("cuBLASLt cannot be loaded: it is not here")

    monkeypatch.setattr(products, "load_cublaslt", missing)
    device: Any = None
    found, why = products.open_products(device, 16)
    assert found is None
    assert why == "not used: cuBLASLt cannot be loaded: it is not here"
    found, why = products.open_products(device, None)
    assert found is None and "switched off" in why


# -------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("max_rows", [100, 128, 512])
def test_large_pieces_on_the_host_give_what_small_ones_do(
    host_device: Device, wanted: dict[int, Any], max_rows: int
) -> None:
    tokens, done = prompt(900), 0
    with open_decoder(host_device, max_rows=max_rows) as decoder:
        for count in (65, 200, 513, 600):
            decoder.prefill(tokens[done:count])
            done = count
            assert furthest(decoder.logits(), wanted[count]) < 1e-5


def test_how_a_prompt_is_cut() -> None:
    sizes = PlanSizes(rows=2048, context=10000)

    def pieces(count: int, most: int = 2048) -> list[int]:
        found: list[int] = []
        while (left := count - sum(found)) > 0:
            found.append(sizes.piece(left, most))
        return found

    for count in (1, 64, 65, 257, 300, 512, 769, 1024, 1537, 2000, 2048):
        assert pieces(count) == [count], "what is left, padded by less than a quarter or not much"
    assert pieces(513) == [512, 1]
    assert pieces(768) == [512, 256]
    assert pieces(1536) == [1024, 512]
    assert pieces(5000) == [2048, 2048, 904]
    assert pieces(2700) == [2048, 512, 140]
    assert pieces(1300, most=64) == [64] * 20 + [20]
    odd = PlanSizes(rows=1500, context=10000)  # its largest bucket is no power of two
    assert [odd.piece(count, 1500) for count in (5000, 1500, 1200, 1100, 1025, 1024, 700)] == [
        *(1500, 1500, 1200, 1024, 1024, 1024, 512)
    ]
    assert PlanSizes(rows=1).piece(9, 1) == 1


def test_where_a_piece_ends() -> None:
    sizes = PlanSizes(rows=512, sequences=3)
    assert list(sizes.buckets) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert sizes.sampled_rows == 64
    assert [sizes.piece_end(n) for n in (1, 33, 64, 65, 128, 129, 300, 512)] == [
        *(1, 33, 64, 128, 128, 256, 512, 512)
    ]
    # Steps of larger batches, where these are possible, sample in every row.
    assert PlanSizes(rows=128, sequences=100).piece_end(70) == 70
    assert PlanSizes(rows=48).piece_end(40) == 40
