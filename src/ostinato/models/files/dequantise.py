"""Fast conversion of GGUF's block types to float32: whole arrays, written straight into place.

`gguf.quants` defines the layouts; the tests compare with it bit for bit.  Its method (groups of 16
rows, then one concatenation) takes 1.35 s for SmolLM2-135M on two cores; the three quantised types
that are common for such models take 0.2 s here.  Other types are left to `gguf`, imported only for
them: the import takes longer than the conversion of a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class BlockType:
    """A tensor type: its number in GGUF, and a block's number of values and its size in bytes."""

    number: int
    values: int
    size: int


BLOCK_TYPES = {
    "F32": BlockType(0, 1, 4),
    "F16": BlockType(1, 1, 2),
    "BF16": BlockType(30, 1, 2),
    "Q8_0": BlockType(8, 32, 34),
    "Q4_0": BlockType(2, 32, 18),
    "Q4_1": BlockType(3, 32, 20),
    "Q5_0": BlockType(6, 32, 22),
    "Q5_1": BlockType(7, 32, 24),
    "IQ4_NL": BlockType(20, 32, 18),
    "Q4_K": BlockType(12, 256, 144),
    "Q5_K": BlockType(13, 256, 176),
    "Q6_K": BlockType(14, 256, 210),
}
"""Types by name, equal to `gguf.GGMLQuantizationType` and `gguf.GGML_QUANT_SIZES`."""
SUPPORTED_TYPES = tuple(BLOCK_TYPES)

_LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
_FOUR = np.uint64(4)


def dequantise_rows(kind: str, block: Bytes, out: Floats) -> None:
    """Converts `block` [rows, bytes in a row] into `out` [rows, columns]; both C-contiguous.

    `kind` is one of SUPPORTED_TYPES.  Scales that are not finite give values that are not finite.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        decode = _DECODERS.get(kind)
        if decode is not None:
            decode(block, out)
            return
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        out[...] = dequantize(block, GGMLQuantizationType[kind])


def _f32(block: Bytes, out: Floats) -> None:
    out[...] = block.view("<f4")


def _f16(block: Bytes, out: Floats) -> None:
    out[...] = block.view("<f2")


def _bf16(block: Bytes, out: Floats) -> None:
    bits = out.view(np.uint32)
    bits[...] = block.view("<u2")
    bits <<= np.uint32(16)


def _q8_0(block: Bytes, out: Floats) -> None:
    blocks = block.reshape(-1, 34)  # float16 scale, 32 signed bytes
    values = out.reshape(-1, 32)
    values[...] = blocks[:, 2:].view(np.int8)
    values *= _halves(blocks.view(np.uint16)[:, :1])


def _q4_0(block: Bytes, out: Floats) -> None:
    blocks = block.reshape(-1, 18).view(np.uint16)  # float16 scale, 16 bytes of nibbles, less 8
    values = out.reshape(-1, 32)
    _nibbles(blocks[:, 1:], values)
    values -= np.float32(8)
    values *= _halves(blocks[:, :1])


def _q4_1(block: Bytes, out: Floats) -> None:
    blocks = block.reshape(-1, 20).view(np.uint32)  # float16 scale and minimum, 16 bytes of nibbles
    values = out.reshape(-1, 32)
    scale_and_minimum = _halves(blocks[:, :1])
    _nibbles(blocks[:, 1:], values)
    values *= scale_and_minimum[:, :1]
    values += scale_and_minimum[:, 1:]


def _nibbles(packed: npt.NDArray[Any], values: Floats) -> None:
    """Unpacks blocks of 16 bytes to 32 values each: all low nibbles, then all high ones.  The words
    of all blocks form one row, since NumPy is slow with many short rows."""
    words = np.array(packed, order="C").view(np.uint64).reshape(-1)  # a copy: shifted in place
    low = words & _LOW_NIBBLES
    words >>= _FOUR
    words &= _LOW_NIBBLES
    values[:, :16] = low.view(np.uint8).reshape(-1, 16)
    values[:, 16:] = words.view(np.uint8).reshape(-1, 16)


def _halves(packed: npt.NDArray[Any]) -> Floats:
    """Returns the float16 numbers in the words `packed` [blocks, 1] as float32 [blocks, n]; n is 1
    for 16-bit words, 2 for 32-bit words."""
    return np.array(packed, order="C").view("<f2").astype(np.float32)


_DECODERS: dict[str, Callable[[Bytes, Floats], None]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
}
