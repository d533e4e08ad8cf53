"""Conversion of quantised safetensors to types of GGUF on reading.

    fp8   `weight` in FP8 (E4M3) with `weight_scale_inv`, a factor for each block of 128 x 128
          (DeepSeek, Qwen), or one factor: becomes bfloat16
    awq   `qweight`, `qzeros` and `scales`: 4 bits a value, 8 values in a word in AWQ's order, with
          a zero point and a scale for each group of inputs: becomes Q4_1, or bfloat16 where groups
          are no multiples of 32 inputs or scales are not float16

Q4_1 keeps AWQ's codes and scales, and has a minimum in place of the zero point: -scale x zero
rounded to float16, an error of at most 2^-7 of a step.  That of bfloat16 would be up to 2^-5.

Activations are not quantised, even for a model that was meant to round them too.  Layouts:
transformers' `integrations/finegrained_fp8.py`, and AutoAWQ's `WQLinear_GEMM`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.driver.signature import to_bfloat16
from ostinato.errors import ModelFormatError, UnsupportedModelError
from ostinato.models.arguments import quoted
from ostinato.models.files.checkpoint import RawTensor
from ostinato.models.files.dequantise import BLOCK_TYPES, dequantise_rows

Read = Callable[[RawTensor], npt.NDArray[np.uint8]]
_PLAIN = ("F32", "F16", "BF16")
_MAX_BLOCK = 1 << 20
# Bits 4 i to 4 i + 3 of word n hold the value of column 8 n + _AWQ_ORDER[i].
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The quantisation of a folder's matrices.

    `method`: "fp8" or "awq".  `block`: rows and columns that share a factor (fp8); both 0 for one
    factor.  `group`: inputs that share a scale (awq), 0 for all.
    """

    method: str
    block: tuple[int, int] = (0, 0)
    group: int = 0

    @classmethod
    def from_hf(cls, value: object, where: str) -> Quantisation | None:
        """Parses `quantization_config` of a config.json; None if there is none.

        Raises UnsupportedModelError for another method, ModelFormatError for a damaged entry.
        """
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ModelFormatError(
                f"{where}: quantization_config is {quoted(value)}, must be an object"
            )
        method = value.get("quant_method")
        if method == "fp8":
            _expect(value, where, {"fmt": ("e4m3",), "activation_scheme": ("dynamic",)})
            return cls("fp8", _block(value.get("weight_block_size"), where))
        if method == "awq":
            layout = ("gemm", "GEMM")
            _expect(
                value,
                where,
                {"bits": (4,), "version": layout, "format": layout, "zero_point": (True,)},
            )
            if value.get("backend") == "llm-awq":  # has another layout, whatever `version` is
                raise UnsupportedModelError(
                    f"{where}: backend 'llm-awq' of quantization_config is not supported"
                )
            group = value.get("group_size", 128)
            if type(group) is not int or (group != -1 and not 1 <= group <= _MAX_BLOCK):
                raise ModelFormatError(f"{where}: group_size is {quoted(group)}")
            return cls("awq", group=max(group, 0))
        raise UnsupportedModelError(
            f"{where}: quant_method {quoted(method)} is not supported; supported: fp8, awq; and "
            "GGUF files"
        )

    @property
    def parts(self) -> tuple[str, ...]:
        """The suffixes of the names of a matrix's tensors."""
        if self.method == "fp8":
            return (".weight", ".weight_scale_inv")
        return (".qweight", ".qzeros", ".scales")

    def shape(self, tensors: Mapping[str, RawTensor]) -> tuple[int, int]:
        """Returns [out, in] of a matrix from its tensors by part.  Raises ModelFormatError for
        shapes that do not match or a missing part, UnsupportedModelError for an unsupported type.
        """
        first = next(iter(tensors.values()))
        place = f"{first.file}: {quoted(first.name.rpartition('.')[0])}"
        for part in self.parts:
            if part not in tensors:
                raise ModelFormatError(f"{place} has no tensor {part[1:]}")
        given = [tensors[part] for part in self.parts]
        if any(0 in tensor.shape for tensor in given):
            raise ModelFormatError(f"{place} is empty")
        if self.method == "fp8":
            weight, scale = given
            _require_type(weight, ("F8_E4M3",))
            _require_type(scale, _PLAIN)
            if len(weight.shape) != 2:
                raise ModelFormatError(f"{place} has shape {list(weight.shape)}")
            rows, columns = weight.shape
            wanted: tuple[int, ...] = ()
            if self.block[0]:
                wanted = -(-rows // self.block[0]), -(-columns // self.block[1])
            if scale.shape != wanted and (wanted or math.prod(scale.shape) != 1):
                raise ModelFormatError(
                    f"{place}: weight_scale_inv has shape {list(scale.shape)}, must be "
                    f"{list(wanted)} for a weight of {[rows, columns]}"
                )
            return rows, columns
        words, zeros, scales = given
        _require_type(words, ("I32",))
        _require_type(zeros, ("I32",))
        _require_type(scales, _PLAIN)
        if len(words.shape) != 2:
            raise ModelFormatError(f"{place} has a qweight of shape {list(words.shape)}")
        inputs, outputs = words.shape[0], words.shape[1] * 8
        group = self.group or inputs
        groups = inputs // group
        if inputs % group:
            raise ModelFormatError(f"{place}: {inputs} inputs are no whole groups of {group}")
        for tensor, shape in ((zeros, (groups, outputs // 8)), (scales, (groups, outputs))):
            if tensor.shape != shape:
                raise ModelFormatError(
                    f"{place}: {tensor.name.rpartition('.')[2]} has shape {list(tensor.shape)}, "
                    f"must be {list(shape)}"
                )
        return outputs, inputs

    def made(self, tensors: Mapping[str, RawTensor]) -> RawTensor:
        """Describes the converted matrix, from its tensors by part.  Raises what `shape` raises."""
        rows, columns = self.shape(tensors)
        one, kind = next(iter(tensors.values())), "BF16"
        if self.method == "awq" and tensors[".scales"].type == "F16":
            kind = "BF16" if (self.group or columns) % BLOCK_TYPES["Q4_1"].values else "Q4_1"
        size = rows * columns // BLOCK_TYPES[kind].values * BLOCK_TYPES[kind].size
        name = one.name.rpartition(".")[0] + ".weight"
        return RawTensor(name, kind, (rows, columns), one.file, 0, size, made=True)

    def bytes_of(
        self, made: RawTensor, tensors: Mapping[str, RawTensor], read: Read
    ) -> npt.NDArray[np.uint8]:
        """Converts a matrix that `made` described; returns its bytes, flat; bfloat16 is rounded to
        nearest even.

        `read`: returns a tensor's bytes.  Raises ModelFormatError if a minimum is not finite in
        float16.
        """
        if made.type == "Q4_1":
            return self._blocks(made, tensors, read)
        out = np.empty(made.shape, np.uint16)
        with np.errstate(invalid="ignore", over="ignore"):
            (self._fp8 if self.method == "fp8" else self._awq)(tensors, read, out)
        return out.astype("<u2", copy=False).reshape(-1).view(np.uint8)

    def _fp8(
        self, tensors: Mapping[str, RawTensor], read: Read, out: npt.NDArray[np.uint16]
    ) -> None:
        rows, columns = out.shape
        weight = read(tensors[".weight"]).reshape(rows, columns)
        scale = _floats(tensors[".weight_scale_inv"], read)
        height, width = self.block if self.block[0] else (rows, columns)
        scale = scale.reshape(-(-rows // height), -(-columns // width))
        values = e4m3_values()
        # Rows that share factors, some of them at a time to save memory.
        step = min(height, max(1, (1 << 20) // columns))
        for block, factors in enumerate(scale):
            wide = np.repeat(factors, width)[:columns]
            end = min((block + 1) * height, rows)
            for start in range(block * height, end, step):
                part = slice(start, min(start + step, end))
                to_bfloat16(values[weight[part]] * wide, out[part])

    def _blocks(
        self, made: RawTensor, tensors: Mapping[str, RawTensor], read: Read
    ) -> npt.NDArray[np.uint8]:
        outputs, inputs = made.shape
        words = read(tensors[".qweight"]).view("<u4").reshape(inputs, outputs // 8)
        zeros = _nibbles(read(tensors[".qzeros"]).view("<u4").reshape(-1, outputs // 8))
        scales = read(tensors[".scales"]).view("<f2").reshape(-1, outputs)
        with np.errstate(invalid="ignore", over="ignore"):
            minima = -(scales.astype(np.float32) * zeros)
            halves = minima.astype("<f2")
        if not np.isfinite(halves).all():
            raise ModelFormatError(
                f"{made.file}: {quoted(tensors['.scales'].name)} has scales that are not finite, "
                "or too large for a weight"
            )
        each = (self.group or inputs) // 32
        out = np.empty((outputs, inputs // 32, 20), np.uint8)
        for place, column in ((0, scales), (2, halves)):
            numbers = np.ascontiguousarray(np.repeat(column, each, axis=0).T)
            out[:, :, place : place + 2] = numbers.view(np.uint8).reshape(outputs, -1, 2)
        step = max(1, (1 << 20) // (32 * outputs))
        for start in range(0, inputs // 32, step):
            codes = _nibbles(words[32 * start : 32 * (start + step)], np.uint8)
            pairs = codes.reshape(-1, 2, 16, outputs)
            both = pairs[:, 0] | pairs[:, 1] << 4
            out[:, start : start + step, 4:] = both.transpose(2, 0, 1)
        return out.reshape(-1)

    def _awq(
        self, tensors: Mapping[str, RawTensor], read: Read, out: npt.NDArray[np.uint16]
    ) -> None:
        outputs, inputs = out.shape
        group = self.group or inputs
        words = read(tensors[".qweight"]).view("<u4").reshape(inputs, outputs // 8)
        zeros = read(tensors[".qzeros"]).view("<u4").reshape(-1, outputs // 8)
        scales = _floats(tensors[".scales"], read).reshape(-1, outputs)
        for index, (zero, scale) in enumerate(zip(zeros, scales, strict=True)):
            lowest = _nibbles(zero[None])
            step = max(1, (1 << 20) // outputs)
            end = (index + 1) * group
            for start in range(index * group, end, step):
                part = slice(start, min(start + step, end))
                made = (_nibbles(words[part]) - lowest) * scale
                out[:, part] = to_bfloat16(made).T


def e4m3_values() -> npt.NDArray[np.float32]:
    """Returns the 256 values of FP8 E4M3 "fn" by byte: no infinities, 0x7F and 0xFF are NaN."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    values = np.where(
        exponents > 0,
        np.ldexp(1.0 + mantissas / 8.0, exponents - 7),
        np.ldexp(mantissas / 8.0, -6),
    )
    values[codes & 0x7F == 0x7F] = np.nan
    signed: npt.NDArray[np.float32] = np.where(codes & 0x80, -values, values).astype(np.float32)
    return signed


def _nibbles(words: npt.NDArray[np.uint32], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """Unpacks rows of words to rows of eight values a word, in the order of columns."""
    found = np.empty((*words.shape, 8), dtype)
    for place, column in enumerate(_AWQ_ORDER):
        found[..., column] = words >> np.uint32(4 * place) & np.uint32(15)
    return found.reshape(words.shape[0], -1)


def _floats(tensor: RawTensor, read: Read) -> npt.NDArray[np.float32]:
    out = np.empty(math.prod(tensor.shape), np.float32)
    dequantise_rows(tensor.type, read(tensor).reshape(1, -1), out[None])
    return out


def _block(value: object, where: str) -> tuple[int, int]:
    if value is None:
        return (0, 0)
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(type(size) is int and 1 <= size <= _MAX_BLOCK for size in value)
    ):
        return value[0], value[1]
    raise ModelFormatError(f"{where}: weight_block_size is {quoted(value)}")


def _expect(value: Mapping[str, object], where: str, wanted: dict[str, tuple[object, ...]]) -> None:
    """Raises UnsupportedModelError for a setting with a value that is not listed in `wanted`; a
    missing setting is accepted."""
    for key, known in wanted.items():
        given = value.get(key, known[0])
        if not any(type(given) is type(one) and given == one for one in known):
            raise UnsupportedModelError(
                f"{where}: {key} of quantization_config is {quoted(given)}, which is not "
                f"supported; supported: {known[0]}"
            )


def _require_type(tensor: RawTensor, known: tuple[str, ...]) -> None:
    if tensor.type not in known:
        raise UnsupportedModelError(
            f"{tensor.file}: tensor {quoted(tensor.name)} is of type {tensor.type}, which is not "
            f"supported; supported: {', '.join(known)}"
        )
