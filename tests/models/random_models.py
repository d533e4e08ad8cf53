"""Models with random weights for tests of the decoder: exact in bfloat16, made in memory.

Values are the same whatever holds them (float32, or the bits of bfloat16), so that what differs
from a float32 reference is what the kernels do.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.models.config import LlamaConfig, tensor_shapes
from ostinato.models.files.checkpoint import Checkpoint, JsonTokenizerSource

__all__ = ["MemoryCheckpoint", "RandomModel", "llama"]


def llama(heads: int, kv_heads: int, head_size: int, **sizes: Any) -> LlamaConfig:
    """A config whose hidden width is that of its heads unless it is given."""
    values = {"hidden": heads * head_size, "layers": 3, "context_length": 777, **sizes}
    return LlamaConfig(heads=heads, kv_heads=kv_heads, head_size=head_size, **values)


class MemoryCheckpoint(Checkpoint):
    """Weights of a function: `fill(name, out)` writes a tensor's values into a float32 array, or
    their bits as bfloat16 into a uint16 one."""

    has_file = False

    def __init__(
        self, config: LlamaConfig, fill: Callable[[str, npt.NDArray[Any]], None], name: str
    ) -> None:
        super().__init__(Path(name), config, JsonTokenizerSource(Path(name)))
        self._fill = fill

    def load(self, into: Mapping[str, npt.NDArray[Any]], *, threads: int = 2) -> None:
        """Like `Checkpoint.load`, one tensor after the other."""
        for name, out in into.items():
            self._fill(name, out)


@functools.cache
def _normal(exponent: int, dtype: type) -> npt.NDArray[Any]:
    """Normal values times 2**exponent, cut to what bfloat16 holds.  An odd number of them, so that
    no two rows of a matrix that is longer begin at the same place."""
    values = np.random.default_rng(17).standard_normal((1 << 22) + 7, np.float32)
    values *= np.float32(2.0**exponent)
    halves = values.view(np.uint32) >> np.uint32(16)
    if dtype is np.uint16:
        return halves.astype(np.uint16)
    return (halves << np.uint32(16)).view(np.float32)


@dataclass(frozen=True)
class RandomModel:
    """Weights that leave the residual near 1.

    Matrices are pieces of one block of normal values, scaled by powers of two (exact in bfloat16).
    The embedding is small: a large one, tied, makes every token its own successor.
    """

    config: LlamaConfig

    def fill(self, name: str, out: npt.NDArray[Any]) -> None:
        """Writes a tensor's values: float32, or bfloat16's bits where `out` is uint16."""
        if out.ndim == 1:
            seed = np.random.default_rng(zlib.crc32(name.encode()))
            bias = name.rpartition(".")[2] in ("bq", "bk", "bv")
            out[...] = seed.uniform(-1.0 if bias else 0.5, 1.0 if bias else 1.5, out.shape)
            return
        exponent = -4 if name == "embed" else -round(np.log2(out.shape[1]) / 2)
        block, flat = _normal(exponent, out.dtype.type), out.reshape(-1)
        at = zlib.crc32(name.encode()) % len(block)
        start = 0
        while start < flat.size:
            count = min(len(block) - at, flat.size - start)
            flat[start : start + count] = block[at : at + count]
            start, at = start + count, 0

    def values(self) -> dict[str, npt.NDArray[np.float32]]:
        """Every tensor by its canonical name."""
        made = {}
        for name, shape in tensor_shapes(self.config).items():
            made[name] = np.empty(shape, np.float32)
            self.fill(name, made[name])
        return made

    def checkpoint(self) -> Checkpoint:
        """The same, for a decoder."""
        return MemoryCheckpoint(self.config, self.fill, "random")

    def tokens(self, count: int, seed: int = 3) -> list[int]:
        """Random ones of its vocabulary."""
        rng = np.random.default_rng(seed)
        return [int(t) for t in rng.integers(0, self.config.vocabulary, count)]
