"""Checkpoints of random weights, which are made as fast as memory can be written."""

from __future__ import annotations

import math
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.errors import InputError
from ostinato.models import Checkpoint, LlamaConfig
from ostinato.models.arguments import whole
from ostinato.models.config import tensor_shapes
from ostinato.models.files.checkpoint import (
    FloatArrays,
    JsonTokenizerSource,
    RawTensor,
    StoredCheckpoint,
)
from ostinato.models.files.dequantise import BLOCK_TYPES

_SEED = 11
_WIDTH = np.float32(0.02)
# Values of the random block: an odd number, so that rows of a matrix begin at different offsets.
_BLOCK = (1 << 20) + 7
_PIECE = 1 << 22  # values that one thread writes at a time
_PACKED_VALUES = 1 << 22  # the least number of values in a random piece of packed blocks


RECIPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q5_K", "Q6_K", "Q4_K_M")
"""Recipes of packed files: one type for all matrices, or llama.cpp's mixture Q4_K_M."""
# What llama.cpp takes for rows that are no whole blocks of 256.
_OF_NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# Standard deviations of the codes, or of IQ4_NL's values; and their means where there is a minimum.
_CODES = {"Q8_0": 74.0, "Q4_0": 4.6, "Q4_1": 4.6, "Q5_0": 9.2, "Q5_1": 9.2, "IQ4_NL": 69.6}
_MIDDLES = {"Q4_1": 7.5, "Q5_1": 15.5}


def recipe_type(recipe: str, config: LlamaConfig, name: str) -> str:
    """Returns the tensor type of a matrix, by its canonical name, in a file of a recipe."""
    kind = _wanted_type(recipe, config, name)
    whole_blocks = tensor_shapes(config)[name][1] % BLOCK_TYPES[kind].values == 0
    return kind if whole_blocks else _OF_NARROW.get(kind, kind)


def _wanted_type(recipe: str, config: LlamaConfig, name: str) -> str:
    if recipe != "Q4_K_M":
        return recipe
    layer, _, last = name.rpartition(".")
    if last == ("embed" if config.tied_embeddings else "head"):
        return "Q6_K"
    if last not in ("wv", "w_down"):
        return "Q4_K"
    index, eighth = int(layer.rpartition(".")[2]), config.layers // 8
    more = index < eighth or index >= 7 * config.layers // 8 or (index - eighth) % 3 == 2
    return "Q6_K" if more else "Q4_K"


def random_blocks(
    kind: str, shape: tuple[int, int], rng: np.random.Generator, width: float = 0.02
) -> npt.NDArray[np.uint8]:
    """Returns random packed rows, [rows, bytes in a row], whose values have a standard deviation of
    about `width`."""
    block = BLOCK_TYPES[kind]
    rows, count = shape[0], shape[1] // block.values
    made = rng.integers(0, 256, (rows, count, block.size), np.uint8)
    spread = rng.uniform(0.7, 1.3, (rows, count, 1)).astype(np.float32) * np.float32(width)

    def halves(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
        return values.astype(np.float16).view(np.uint8)

    if kind in _CODES:
        scale = spread / np.float32(_CODES[kind])
        made[..., :2] = halves(scale)
        if kind in _MIDDLES:
            made[..., 2:4] = halves(scale * np.float32(-_MIDDLES[kind]))
    elif kind == "Q6_K":
        made[..., 192:208] = rng.integers(32, 96, (rows, count, 16), np.uint8)
        made[..., 192:208:3] ^= 0xFF  # makes every third scale negative
        made[..., 208:] = halves(spread / np.float32(64 * 18.5))
    else:  # scales from 32 on, and minima about as large
        middle = np.float32(7.5 if kind == "Q4_K" else 15.5)
        scale = spread / np.float32(48 * 0.61) / middle
        made[..., :4] = halves(np.concatenate([scale, scale * middle], axis=2))
        made[..., 4:12] |= 0x20
        made[..., 4:12] &= 0xBF  # the upper two bits of the last four groups become 2
        made[..., 4:12] |= 0x80
    return made.reshape(rows, count * block.size)


def _fill_around(out: npt.NDArray[Any], block: npt.NDArray[Any], place: int) -> None:
    """Fills `out` with values of the block from `place` on; the block repeats at its end."""
    at, done = place % len(block), 0
    while done < len(out):
        count = min(len(block) - at, len(out) - done)
        out[done : done + count] = block[at : at + count]
        done, at = done + count, 0


class RandomCheckpoint(Checkpoint):
    """Random weights of a shape: matrices normal with standard deviation 0.02, norms between 0.5
    and 1.5.  There is no file and no tokenizer; `name` is shown in place of a path.

    Every tensor is copied from one random block, from its own offset on, so that gigabytes take a
    second and no thread waits for a generator.  A shape always has the same weights; float32 and
    bfloat16 values differ only by rounding towards zero.
    """

    has_file = False

    def __init__(self, config: LlamaConfig, name: str) -> None:
        super().__init__(Path(name), config, JsonTokenizerSource(Path(name)))
        rng = np.random.default_rng(_SEED)
        self._floats = rng.standard_normal(_BLOCK, np.float32) * _WIDTH
        self._halves = (self._floats.view(np.uint32) >> 16).astype(np.uint16)

    def load(self, into: FloatArrays, *, threads: int = 2) -> None:
        """Implements `Checkpoint.load`, on all cores at least, since memory is the bottleneck."""
        threads = max(whole(threads, "threads", 1), os.cpu_count() or 1)
        with ThreadPoolExecutor(threads) as pool:
            pieces = []
            for name, array in into.items():
                place = zlib.crc32(name.encode())
                if array.ndim == 1:
                    rng = np.random.default_rng((_SEED, place))
                    array[...] = rng.uniform(0.5, 1.5, array.shape)
                    continue
                block = self._halves if array.dtype == np.uint16 else self._floats
                flat = array.reshape(-1)
                for at in range(0, flat.size, _PIECE):
                    piece = flat[at : at + _PIECE]
                    pieces.append(pool.submit(_fill_around, piece, block, place + at))
            for filled in pieces:
                filled.result()


class PackedCheckpoint(StoredCheckpoint):
    """Random weights of a shape, packed by one of RECIPES; matrices have a standard deviation of
    about 0.02.

    Every tensor is copied from one random piece of blocks of its type, from its own offset on.
    Raises InputError for an unknown recipe, and for a shape whose rows are no whole blocks.
    """

    has_file = False

    def __init__(self, config: LlamaConfig, recipe: str, name: str) -> None:
        known = {one.lower(): one for one in RECIPES}
        if recipe.lower() not in known:
            raise InputError(f"there is no recipe {recipe!r}; there are: {', '.join(known)}")
        path, tensors = Path(name), dict[str, RawTensor]()
        for tensor, shape in tensor_shapes(config).items():
            matrix = len(shape) == 2
            kind = recipe_type(known[recipe.lower()], config, tensor) if matrix else "F32"
            block = BLOCK_TYPES[kind]
            if shape[-1] % block.values:
                raise InputError(
                    f"{tensor} has rows of {shape[-1]} values, which are no whole blocks of "
                    f"{kind} ({block.values})"
                )
            size = math.prod(shape) // block.values * block.size
            tensors[tensor] = RawTensor(tensor, kind, shape, path, 0, size)
        super().__init__(path, config, JsonTokenizerSource(path), tensors)
        self._pieces: dict[str, npt.NDArray[np.uint8]] = {}

    def _bytes(self, raw: RawTensor) -> npt.NDArray[np.uint8]:
        place = zlib.crc32(raw.name.encode())
        if raw.type == "F32":
            rng = np.random.default_rng((_SEED, place))
            return rng.uniform(0.5, 1.5, raw.shape).astype(np.float32).view(np.uint8)
        block = BLOCK_TYPES[raw.type]
        piece = self._pieces.get(raw.type)
        if piece is None:
            rng = np.random.default_rng((_SEED, block.number))
            # Each row of a matrix begins at a different block, so no two rows are equal.
            alike = [one for one in self._tensors.values() if one.type == raw.type]
            count = max(_PACKED_VALUES // block.values, *(one.rows for one in alike))
            while any(math.gcd(count, one.columns // block.values) > 1 for one in alike):
                count += 1
            made = random_blocks(raw.type, (1, count * block.values), rng)
            piece = self._pieces[raw.type] = made.reshape(-1, block.size)
        found = np.empty((raw.size // block.size, block.size), np.uint8)
        _fill_around(found, piece, place)
        return found.reshape(-1)


def random_checkpoint(
    config: LlamaConfig, name: str = "random", *, recipe: str | None = None
) -> Checkpoint:
    """Opens a checkpoint of random weights; `name` is shown in place of a path.

    `recipe`: one of RECIPES, in any case, for packed weights; None for weights that are not.
    Raises InputError.
    """
    if recipe is not None:
        return PackedCheckpoint(config, recipe, name)
    return RandomCheckpoint(config, name)
