"""The decoder with packed weights on a CUDA device: the whole way from a file's bytes to tokens.

On the host driver, by the kernels' emulator; what runs on a GPU is in test_decoder_packed_gpu.py.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ostinato.bench.random_weights import PackedCheckpoint, random_checkpoint, recipe_type
from ostinato.bench.shapes import SHAPES
from ostinato.device import Device, open_device
from ostinato.errors import InputError, NotAvailableError
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda import lowering as kc
from ostinato.models.cuda.bricks import device_bytes, formats_of, pays
from ostinato.models.cuda.library import ProductCall, lower_with_library
from ostinato.models.cuda.products import PIECE_ROWS
from ostinato.models.cuda.shapes import MatrixShape, default_tuning
from ostinato.models.decoder import Decoder, backend_for
from ostinato.models.files.open import open_checkpoint
from ostinato.models.program import decode_program
from ostinato.models.weights import load_weights
from tests.models import reference_llama, test_quantised
from tests.models.emulated import NumpyProducts
from tests.models.model_files import CONFIG, write_gguf
from tests.models.proof import answer, check_ways, furthest
from tests.models.random_models import RandomModel, llama

WHOLE = llama(
    4, 1, 64, layers=8, inner=512, vocabulary=301, context_length=512, tied_embeddings=True
)
RAGGED = llama(3, 1, 96, layers=2, inner=160, vocabulary=257, context_length=512)
MIXED = replace(RAGGED, inner=256, qk_norm=True)
TINY = llama(1, 1, 64, hidden=96, layers=2, inner=256, vocabulary=67, qk_norm=True)
"""Its types are those of MIXED."""
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")


def prompt(count: int, config: LlamaConfig) -> list[int]:
    return RandomModel(config).tokens(count, seed=5)


def opened(device: Device, config: LlamaConfig, recipe: str, **options: Any) -> Decoder:
    given = {"max_context": 160, "stop_tokens": (), "weights": "packed"} | options
    return Decoder(device, PackedCheckpoint(config, recipe, recipe), **given)


def logits_of(config: LlamaConfig, recipe: str, tokens: list[int]) -> Any:
    """NumPy's, over the dequantised weights."""
    with open_device("host") as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ostinato.models.decoder.backend_for", backend_for)
        weights = load_weights(device, PackedCheckpoint(config, recipe, recipe))  # float32
        with Decoder(device, weights, max_context=160, stop_tokens=()) as decoder:
            decoder.prefill(tokens)
            found = decoder.logits()
        weights.close()
    return found


@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        pytest.param(replace(WHOLE, layers=4), "Q4_K_M", marks=pytest.mark.slow),
        pytest.param(replace(WHOLE, layers=2, qk_norm=True), "Q4_0", marks=pytest.mark.slow),
        pytest.param(replace(RAGGED, qkv_bias=True), "Q8_0", marks=pytest.mark.slow),
        pytest.param(RAGGED, "Q4_1", marks=pytest.mark.slow),
        pytest.param(RAGGED, "Q8_0", marks=pytest.mark.slow),
        pytest.param(RAGGED, "Q5_1", marks=pytest.mark.slow),
        (MIXED, "Q4_K_M"),  # way down Q4_K and Q6_K, the rest Q5_0 and Q8_0
    ],
)
def test_tokens_of_every_kind_of_step_agree_with_numpy(
    host_device: Device, library: NumpyProducts, config: LlamaConfig, recipe: str
) -> None:
    """One row, some, and a piece that the library multiplies with unpacked weights."""
    tokens = prompt(90, config)
    for count in (1, 7, 75):
        wanted = logits_of(config, recipe, tokens[:count])
        with opened(host_device, config, recipe) as decoder:
            decoder.prefill(tokens[:count])
            assert furthest(decoder.logits(), wanted) < 1e-2, count
            assert not decoder.statistics().quarantined
    assert {one.rows for one in library.asked} == {128}


def test_a_folder_of_awq(host_device: Device, library: NumpyProducts, tmp_path: Path) -> None:
    quantisation = {**test_quantised.AWQ, "group_size": 32}
    config = replace(test_quantised.BLOCKS, head_size=64, inner=256)
    folder, values = test_quantised.write(tmp_path, quantisation, config=config)
    tokens = [5, 100, 7, 200, 9, 3, 250]
    wanted = reference_llama.logits(config, values, tokens)
    with Decoder(host_device, folder, weights="packed", stop_tokens=()) as decoder:
        assert decoder.statistics().weights == "packed (Q4_1), and 2 in bfloat16"
        for token in tokens:
            decoder.prefill([token])
        assert furthest(decoder.logits(), wanted[-1]) < 1e-2


@pytest.mark.parametrize("staged", [1, 64 << 20])
def test_a_file_whose_heads_are_interleaved(
    host_device: Device,
    library: NumpyProducts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    staged: int,
) -> None:
    """In one piece, and a head or a row at a time."""
    monkeypatch.setattr("ostinato.models.cuda.dequantise._MOST_STAGED", staged)
    path = write_gguf(tmp_path / "model.gguf", kind="Q8_0")
    tokens = prompt(9, CONFIG)
    given: dict[str, Any] = {"max_context": 64, "stop_tokens": ()}
    with open_device("host") as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ostinato.models.decoder.backend_for", backend_for)
        with open_checkpoint(path) as checkpoint:
            weights = load_weights(device, checkpoint)
        with Decoder(device, weights, **given) as numpy:
            numpy.prefill(tokens)
            wanted = numpy.logits()
        weights.close()
    with Decoder(host_device, path, weights="packed", **given) as decoder:
        assert decoder.statistics().weights == "packed (Q8_0)"
        for pieces in ([tokens], [[token] for token in tokens]):
            decoder.reset()
            for piece in pieces:
                decoder.prefill(piece)
            assert furthest(decoder.logits(), wanted) < 1e-2


def test_every_way_of_running_gives_the_same_bits(
    host_device: Device, library: NumpyProducts
) -> None:
    def run(decoder: Decoder) -> list[tuple[int, bytes]]:
        found = answer(decoder, prompt(5, TINY), 5)
        if decoder.statistics().graphs_captured:
            decoder.reset()
            first = decoder.prefill(prompt(5, TINY))
            looped = [first, *decoder.run(count=4, tokens_per_launch=2)]
            assert looped == [token for token, _ in found]
            assert decoder.logits().tobytes() == found[-1][1]
        return found

    check_ways(partial(opened, host_device, TINY, "Q4_K_M"), run, {}, {"build": "record"})


def test_what_is_packed_is_said(host_device: Device, library: NumpyProducts) -> None:
    with opened(host_device, WHOLE, "Q4_K_M") as decoder:
        numbers = decoder.statistics()
        assert numbers.weights == "packed (Q4_K, Q6_K)"
        assert numbers.weight_bytes == device_bytes(decoder.weights.shapes, decoder.weights.formats)
        assert numbers.weight_bytes < 0.4 * numbers.unpacked_bytes
    for wanted in ("bf16", "auto"):  # auto: a small model is faster in bfloat16
        with opened(host_device, WHOLE, "Q4_K_M", weights=wanted) as decoder:
            numbers = decoder.statistics()
            assert numbers.weights == "bfloat16"
            assert numbers.weight_bytes == numbers.unpacked_bytes


def test_what_cannot_be_packed_is_refused(host_device: Device, library: NumpyProducts) -> None:
    made = random_checkpoint(WHOLE)
    with pytest.raises(InputError, match="no quantised matrix"):
        Decoder(host_device, made, weights="packed")
    with pytest.raises(InputError, match="there are 'auto', 'packed', 'bf16'"):
        Decoder(host_device, made, weights="int4")  # type: ignore[arg-type]


def test_bfloat16_is_not_for_the_host(host_device: Device) -> None:
    with pytest.raises(InputError, match="are for GPUs"):
        Decoder(host_device, random_checkpoint(WHOLE), weights="bf16")


def test_a_host_without_compiled_kernels_has_no_packed_weights(
    host_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostinato.models.host.backend.compiled", lambda: False)
    with pytest.raises(NotAvailableError, match="need the compiled kernels"):
        Decoder(host_device, random_checkpoint(WHOLE), weights="packed")


def test_large_models_are_packed_by_themselves() -> None:
    assert not any(pays(SHAPES[name]) for name in ("135M", "360M"))
    assert pays(SHAPES["1B"]) and pays(SHAPES["8B"])


@pytest.mark.parametrize("clusters", [False, True])
def test_packed_products_use_clusters_where_the_device_has_them(clusters: bool) -> None:
    """The model's other products share no inputs among blocks."""
    config = SHAPES["8B"]
    formats = formats_of(config, partial(recipe_type, "Q4_K_M", config))
    tuning = default_tuning(config, rows=64, context=512, clusters=clusters)
    assert isinstance(tuning.output, MatrixShape) and tuning.output.cluster == 1
    steps = kc.lower(
        decode_program(config), config, rows=64, context=512, tuning=tuning, formats=formats
    )
    found = {one.kernel: one.config.cluster for one in steps if isinstance(one, kc.CudaLaunch)}
    shared = {name for name, cluster in found.items() if cluster is not None}
    assert shared >= {"rounded_output"} if clusters else not shared, found


def test_unpacking_waits_for_what_reads_the_memory_before() -> None:
    """Neither the launch that unpacks nor the one after it may start early: both touch memory that
    no wait of theirs covers."""
    checkpoint = PackedCheckpoint(WHOLE, "Q4_K_M", "pieces")
    formats = formats_of(WHOLE, lambda name: checkpoint.raw(name).type)
    tuning = default_tuning(WHOLE, rows=128, context=512, most=PIECE_ROWS)
    program = decode_program(WHOLE, last_row=True)
    step = lower_with_library(
        program, WHOLE, rows=128, tuning=tuning, single=tuning_of_one(), formats=formats
    )
    unpacked = [i for i, one in enumerate(step) if getattr(one, "kernel", "").endswith("_to_rows")]
    assert len(unpacked) == 8 * 4 + 4  # of four layers, the values are of another type
    for i in unpacked:
        for one in step[i : i + 2]:
            assert isinstance(one, ProductCall) or not one.config.programmatic
    assert any(isinstance(one, kc.CudaLaunch) and one.config.programmatic for one in step)


def tuning_of_one() -> Any:
    return default_tuning(WHOLE, context=512)
