"""Packed weights on a GPU: against NumPy over the dequantised weights, and every way of running
against the others."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ostinato.bench.random_weights import RECIPES, PackedCheckpoint
from ostinato.device import Device, open_device
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.bricks import device_bytes
from ostinato.models.decoder import Decoder
from ostinato.models.weights import load_weights
from tests.models.proof import answer, check_ways, difference
from tests.models.random_models import RandomModel, llama

pytestmark = pytest.mark.gpu

CONTEXT = 602
POSITIONS = (0, 1, 127, 128, 500, CONTEXT - 1)
RELATIVE = 1e-2
CONFIG = llama(
    8, 2, 64, layers=8, inner=1536, vocabulary=1003, context_length=1024, tied_embeddings=True
)
RAGGED = llama(9, 3, 64, inner=480, vocabulary=301, context_length=1024)
"""Rows end within a brick."""
# One process has all tests of a case, whose NumPy logits take long.
CASES = [
    pytest.param(config, recipe, id=name, marks=pytest.mark.xdist_group(name))
    for config, recipes in (
        (CONFIG, RECIPES),
        (RAGGED, ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q4_K_M")),
    )
    for recipe in recipes
    for name in [f"{recipe}, hidden {config.hidden}"]
]


def tokens_of(config: LlamaConfig, count: int) -> list[int]:
    return RandomModel(config).tokens(count)


@functools.cache
def expected(config: LlamaConfig, recipe: str) -> dict[int, npt.NDArray[np.float32]]:
    """NumPy's logits after some positions, over the dequantised weights."""
    tokens, logits, done = tokens_of(config, CONTEXT), {}, 0
    with open_device("host") as device:
        weights = load_weights(device, PackedCheckpoint(config, recipe, recipe))  # float32
        with Decoder(device, weights, max_context=CONTEXT, stop_tokens=()) as decoder:
            for position in POSITIONS:
                decoder.prefill(tokens[done : position + 1])
                done = position + 1
                logits[position] = decoder.logits()
        weights.close()
    return logits


def opened(device: Device, config: LlamaConfig, recipe: str, **options: Any) -> Decoder:
    given = {"max_context": CONTEXT, "stop_tokens": (), "weights": "packed"} | options
    return Decoder(device, PackedCheckpoint(config, recipe, recipe), **given)


@pytest.mark.parametrize(("config", "recipe"), CASES)
def test_logits_agree_with_numpy_token_by_token(
    gpu: Device, config: LlamaConfig, recipe: str
) -> None:
    tokens, theirs, errors = tokens_of(config, CONTEXT), expected(config, recipe), {}
    with opened(gpu, config, recipe) as decoder:
        for position, token in enumerate(tokens):
            decoder.prefill([token])
            if position in theirs:
                errors[position] = difference(decoder.logits(), theirs[position])
        assert not decoder.statistics().quarantined
    assert max(errors.values()) < RELATIVE, errors


@pytest.mark.parametrize("library_rows", ["auto", None])
@pytest.mark.parametrize(("config", "recipe"), CASES)
def test_logits_agree_with_numpy_in_pieces(
    gpu: Device, config: LlamaConfig, recipe: str, library_rows: Any
) -> None:
    """Pieces of 2 to 512 rows, with our kernels on bricks and with a library's on unpacked weights.
    Both multiply weights rounded to bfloat16: NumPy over such weights differs by 8.4e-3 at position
    127 with Q6_K, and by 7.3e-3 at most with the other types."""
    tokens, errors, done = tokens_of(config, CONTEXT), {}, 0
    with opened(gpu, config, recipe, library_rows=library_rows) as decoder:
        for position, theirs in expected(config, recipe).items():
            decoder.prefill(tokens[done : position + 1])
            done = position + 1
            errors[position] = difference(decoder.logits(), theirs)
        decoder.reset()
        for first in range(0, 128, 8):  # pieces of 8
            decoder.prefill(tokens[first : first + 8])
        errors[-127] = difference(decoder.logits(), expected(config, recipe)[127])
        assert not decoder.statistics().quarantined
    assert max(errors.values()) < RELATIVE, errors


@pytest.mark.parametrize("recipe", ["Q8_0", "Q4_1", "Q4_K_M"])
def test_every_way_gives_the_same_bits(gpu: Device, recipe: str) -> None:
    prompt = tokens_of(CONFIG, 75)

    def run(decoder: Decoder) -> list[tuple[int, bytes]]:
        found = answer(decoder, prompt, 9)
        if decoder.device_state and decoder.statistics().launches_replayed:
            decoder.reset()
            looped = [decoder.prefill(prompt), *decoder.run(count=8, tokens_per_launch=4)]
            assert looped == [token for token, _ in found]
            assert decoder.logits().tobytes() == found[-1][1]
        return found

    ways = ({}, {"build": "record"}, {"verify": 1}, {"device_state": False})
    check_ways(partial(opened, gpu, CONFIG, recipe), run, *ways)


@pytest.mark.parametrize("recipe", ["Q8_0", "Q4_K_M"])
def test_a_batch_is_the_same_each_time(gpu: Device, recipe: str) -> None:
    """Eager, captured, replayed, recorded; and as NumPy has it."""
    seen = set()
    prompt = tokens_of(CONFIG, 128)
    for options in ({}, {"build": "record"}):
        with opened(gpu, CONFIG, recipe, sequences=9, max_context=200, **options) as decoder:
            for sequence in range(9):
                decoder.prefill(prompt, sequence)
            for _ in range(4):
                for sequence in range(9):
                    decoder.truncate(128, sequence)
                decoder.decode_batch(range(9))
                seen.add(tuple(decoder.logits(sequence).tobytes() for sequence in range(9)))
            error = difference(decoder.logits(8), expected(CONFIG, recipe)[127])
            assert error < RELATIVE
    assert len(seen) == 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["Q8_0", "Q4_K_M"])
def test_1000_steps_give_the_same_bits(gpu: Device, recipe: str) -> None:
    with opened(gpu, CONFIG, recipe) as decoder:
        tokens = tokens_of(CONFIG, 129)
        decoder.prefill(tokens)
        seen = set()
        for _ in range(1000):
            decoder.truncate(129)
            decoder.decode()
            seen.add(decoder.logits().tobytes())
    assert len(seen) == 1


def test_memory_is_that_of_the_packed_weights(gpu: Device) -> None:
    with opened(gpu, CONFIG, "Q4_0") as decoder:
        numbers = decoder.statistics()
        assert numbers.weight_bytes == device_bytes(decoder.weights.shapes, decoder.weights.formats)
        assert numbers.weight_bytes < 0.3 * numbers.unpacked_bytes
        assert numbers.weights == "packed (Q4_0)"
