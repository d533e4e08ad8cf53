"""Checkpoints whose weights are made, not read: as fast as memory can be written."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.errors import InputError
from ostinato.models import Checkpoint, LlamaConfig
from ostinato.models.files.checkpoint import JsonTokenizerSource, RawTensor

__all__ = ["MadeCheckpoint", "RandomCheckpoint", "random_checkpoint"]

_WIDTH = np.float32(0.02)
# Of odd length, so that no two rows of a matrix begin at the same place of it.
_BLOCK = (1 << 20) + 7
_PIECE = 1 << 22  # values that one thread writes at a time


class MadeCheckpoint(Checkpoint):
    """Weights that `load` makes; no file, no tokenizer.  `name` is shown in place of a path."""

    has_file = False

    def __init__(self, config: LlamaConfig, name: str) -> None:
        super().__init__(Path(name), config, JsonTokenizerSource(Path(name)), {})

    def _bytes(self, raw: RawTensor) -> npt.NDArray[np.uint8]:
        raise NotImplementedError("made weights have no file")

    def _decode(self, kind: str, blocks: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> None:
        raise NotImplementedError("made weights have no file")

    def _unmap(self) -> None:
        """Nothing is mapped."""


class RandomCheckpoint(MadeCheckpoint):
    """Weights of a shape: matrices normal, 0.02 wide; norms between 0.5 and 1.5.

    Every tensor is cut out of one random block, each from a place of its own, so that gigabytes
    take a second and no thread waits for a generator.  The same seed gives the same weights; as
    float32 and as bfloat16 they are the same but for rounding towards zero.
    """

    def __init__(self, config: LlamaConfig, name: str, seed: int = 11) -> None:
        super().__init__(config, name)
        rng = np.random.default_rng(seed)
        self._seed = seed
        self._floats = rng.standard_normal(_BLOCK, np.float32) * _WIDTH
        self._halves = (self._floats.view(np.uint32) >> 16).astype(np.uint16)

    def load(
        self,
        into: Mapping[str, npt.NDArray[np.float32] | npt.NDArray[np.uint16]],
        *,
        threads: int = 2,
    ) -> None:
        """As `Checkpoint.load`; on every core, since it is memory's speed that counts here."""
        if threads < 1:
            raise InputError(f"threads is {threads}, must be 1 or more")
        with ThreadPoolExecutor(max(threads, os.cpu_count() or 1)) as pool:
            for _ in pool.map(lambda piece: self._fill_piece(*piece), _pieces(into)):
                pass

    def _fill_piece(self, name: str, start: int, out: npt.NDArray[Any], vector: bool) -> None:
        """Values `start` and on of a tensor, into a flat array."""
        place = zlib.crc32(name.encode())
        if vector:
            rng = np.random.default_rng((self._seed, place))
            out[...] = rng.uniform(0.5, 1.5, out.shape)
            return
        block = self._halves if out.dtype == np.uint16 else self._floats
        at, done = (place + start) % _BLOCK, 0
        while done < out.size:
            count = min(_BLOCK - at, out.size - done)
            out[done : done + count] = block[at : at + count]
            done, at = done + count, 0


def _pieces(
    into: Mapping[str, npt.NDArray[Any]],
) -> Iterator[tuple[str, int, npt.NDArray[Any], bool]]:
    for name, array in into.items():
        flat = array.reshape(-1)
        if array.ndim == 1:
            yield name, 0, flat, True
            continue
        for start in range(0, flat.size, _PIECE):
            yield name, start, flat[start : start + _PIECE], False


def random_checkpoint(config: LlamaConfig, name: str = "random", seed: int = 11) -> Checkpoint:
    """An open checkpoint of random weights; `name` is shown in place of a path."""
    return RandomCheckpoint(config, name, seed)
