"""GGUF's block types to float32, fast: whole arrays at a time, written straight into place.

`gguf.quants` gives the layouts and is the reference that the tests compare with, bit for bit.  Its
way of working (groups of 16 rows, then one concatenation) takes 1.35 s for SmolLM2-135M on two
cores; the three types that models of that size come in take 0.2 s here.  The others go to `gguf`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

__all__ = ["SUPPORTED_TYPES", "block_layout", "dequantise_rows"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

_LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
_FOUR = np.uint64(4)


def block_layout(kind: str) -> tuple[int, int]:
    """How many values a block of the type holds, and in how many bytes."""
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(values), int(size)


def dequantise_rows(kind: str, block: Bytes, out: Floats) -> None:
    """Turn `block` (rows, bytes in a row; C-contiguous) into `out` (rows, columns; C-contiguous).

    `kind` is one of SUPPORTED_TYPES.  Scales that are not finite give values that are not finite.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        _DECODERS.get(kind, _by_gguf(kind))(block, out)


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
    values *= _halves(blocks[:, :2])


def _q4_0(block: Bytes, out: Floats) -> None:
    blocks = block.reshape(-1, 18)  # float16 scale, 16 bytes of nibbles, offset by 8
    values = out.reshape(-1, 32)
    values[...] = _nibbles(blocks[:, 2:])
    values -= np.float32(8)
    values *= _halves(blocks[:, :2])


def _q4_1(block: Bytes, out: Floats) -> None:
    blocks = block.reshape(-1, 20)  # float16 scale, float16 minimum, 16 bytes of nibbles
    values = out.reshape(-1, 32)
    scale_and_minimum = _halves(blocks[:, :4])
    values[...] = _nibbles(blocks[:, 4:])
    values *= scale_and_minimum[:, :1]
    values += scale_and_minimum[:, 1:]


def _nibbles(packed: Bytes) -> Bytes:
    """16 bytes to 32 values: first all low nibbles, then all high ones.  Eight bytes at a time."""
    words = np.ascontiguousarray(packed).view(np.uint64)
    unpacked = np.empty((len(words), 4), np.uint64)
    np.bitwise_and(words, _LOW_NIBBLES, out=unpacked[:, :2])
    np.right_shift(words, _FOUR, out=unpacked[:, 2:])
    unpacked[:, 2:] &= _LOW_NIBBLES
    return unpacked.view(np.uint8)


def _halves(packed: Bytes) -> Floats:
    return np.ascontiguousarray(packed).view("<f2").astype(np.float32)


def _by_gguf(kind: str) -> Callable[[Bytes, Floats], None]:
    def decode(block: Bytes, out: Floats) -> None:
        out[...] = dequantize(block, GGMLQuantizationType[kind])

    return decode


_DECODERS: dict[str, Callable[[Bytes, Floats], None]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
}
