"""FP8 and AWQ safetensors, made from random weights, against plain formulas."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.device import Device
from ostinato.driver.signature import to_bfloat16
from ostinato.errors import ModelError, ModelFormatError, UnsupportedModelError
from ostinato.models.config import LlamaConfig
from ostinato.models.decoder import Decoder
from ostinato.models.files.open import open_checkpoint
from ostinato.models.files.quantised import Quantisation, e4m3_values
from tests.models import reference_llama
from tests.models.model_files import (
    Tensors,
    hf_config,
    hf_name,
    save_safetensors,
    weights,
    write_tokenizer,
)
from tests.models.proof import difference

CONFIG = LlamaConfig(
    hidden=192, layers=2, heads=4, kv_heads=2, head_size=40, inner=200, vocabulary=280,
    context_length=64, qkv_bias=True, bos_token_id=1, eos_token_ids=(2,),
)  # fmt: skip
"""No size but `hidden`'s half is a whole number of blocks of 128."""
FP8: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}  # fmt: skip
AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True,
    "modules_to_not_convert": None,
}  # fmt: skip


def e4m3(code: int) -> float:
    """One byte's value, by the standard's words."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    value = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def to_fp8(matrix: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Codes and factors: the nearest code of each value over its block's factor."""
    height, width = block
    table = np.array([e4m3(code) for code in range(256)])
    table[np.isnan(table)] = np.inf
    rows, columns = matrix.shape
    scales = np.zeros((-(-rows // height), -(-columns // width)), np.float32)
    codes = np.zeros(matrix.shape, np.uint8)
    for i, j in np.ndindex(scales.shape):
        part = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
        scales[i, j] = np.abs(matrix[part]).max() / 448
        distances = np.abs(matrix[part][..., None] / scales[i, j] - table)
        codes[part] = distances.argmin(-1)
    return codes, scales


def to_awq(matrix: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """qweight, qzeros and scales as AutoAWQ's WQLinear_GEMM.from_linear packs them."""
    outputs, inputs = matrix.shape
    group = group if group > 0 else inputs
    by_group = matrix.T.reshape(inputs // group, group, outputs)
    low, high = by_group.min(1), by_group.max(1)
    scales = np.maximum((high - low) / 15, 1e-5).astype(np.float16)
    zeros = np.clip(np.round(-low / scales), 0, 15).astype(np.int64)
    codes = np.clip(np.round(by_group / scales[:, None]) + zeros[:, None], 0, 15).astype(np.int64)

    def pack(values: np.ndarray) -> np.ndarray:
        packed = np.zeros((values.shape[0], outputs // 8), np.int64)
        for column in range(outputs // 8):
            for i, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                packed[:, column] |= values[:, column * 8 + place] << (4 * i)
        return packed.astype(np.uint32).view(np.int32)

    return pack(codes.reshape(inputs, outputs)), pack(zeros), scales


def from_awq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Each code less its group's zero, times its group's scale, [out, in]."""
    columns = np.arange(qweight.shape[1] * 8)
    places = np.array([[0, 2, 4, 6, 1, 3, 5, 7].index(column % 8) for column in columns])

    def codes(words: np.ndarray) -> np.ndarray:
        picked = words.astype(np.int64)[:, columns // 8] >> (4 * places)
        return (picked & 15).astype(np.float32)

    group = len(qweight) // len(scales)
    zeros, factors = (np.repeat(one, group, 0) for one in (codes(qzeros), scales))
    return np.ascontiguousarray(((codes(qweight) - zeros) * factors.astype(np.float32)).T)


def rounded(values: np.ndarray) -> np.ndarray:
    """The values rounded to bfloat16."""
    bits = to_bfloat16(np.ascontiguousarray(values, np.float32)).astype(np.uint32)
    return (bits << 16).view(np.float32)


@functools.cache
def _made(text: str, config: LlamaConfig) -> tuple[Tensors, dict[str, np.ndarray]]:
    """The file's tensors by a quantization_config as JSON, and what their values are; the head and
    the embedding are not quantised."""
    quantisation = json.loads(text)
    tensors: Tensors = {}
    values: dict[str, np.ndarray] = {}
    for name, array in weights(config).items():
        file_name, base = hf_name(name), hf_name(name).removesuffix(".weight")
        if array.ndim == 1 or name in ("embed", "head"):
            tensors[file_name] = ("F16", array.astype(np.float16))
            values[name] = array.astype(np.float16).astype(np.float32)
        elif quantisation["quant_method"] == "fp8":
            block = quantisation["weight_block_size"]
            codes, scales = to_fp8(array, tuple(block) if block else array.shape)
            tensors[file_name] = ("F8_E4M3", codes)
            stored = scales if block else scales.reshape(())
            tensors[f"{file_name}_scale_inv"] = ("F32", stored)
            table = np.array([e4m3(code) for code in range(256)], np.float32)
            height, width = block or array.shape
            wide = np.repeat(np.repeat(scales, height, 0), width, 1)
            values[name] = rounded(table[codes] * wide[: array.shape[0], : array.shape[1]])
        else:
            parts = to_awq(array, quantisation["group_size"])
            for part, kind, data in zip(
                ("qweight", "qzeros", "scales"), ("I32", "I32", "F16"), parts, strict=True
            ):
                tensors[f"{base}.{part}"] = (kind, data)
            exact = from_awq(*parts)
            values[name] = exact if quantisation["group_size"] == 32 else rounded(exact)
    return tensors, values


def write(
    folder: Path,
    quantisation: dict[str, Any],
    change: Callable[[Tensors], None] = lambda tensors: None,
    config: LlamaConfig = CONFIG,
) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder, and what its tensors' values are."""
    made, values = _made(json.dumps(quantisation), config)
    tensors = dict(made)
    change(tensors)
    save_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(
        json.dumps(hf_config(config, quantization_config=quantisation))
    )
    write_tokenizer(folder)
    return folder, values


KINDS = {
    "fp8": FP8,
    "fp8, blocks of 64 x 96": {**FP8, "weight_block_size": [64, 96]},
    "fp8, one factor": {**FP8, "weight_block_size": None},
    "awq": AWQ,
}
BLOCKS = replace(CONFIG, inner=224)
"""Every product's inputs are whole blocks of 32."""


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_formula_bit_by_bit(tmp_path: Path, kind: str) -> None:
    folder, values = write(tmp_path, KINDS[kind])
    with open_checkpoint(folder) as checkpoint:
        for name, wanted in values.items():
            np.testing.assert_array_equal(checkpoint.tensor(name), wanted, err_msg=name)
            bits = to_bfloat16(wanted)
            np.testing.assert_array_equal(checkpoint.bfloat16(name), bits, err_msg=name)
        name = "layers.1.w_down"
        raw = checkpoint.raw(name)
        assert (raw.type, raw.shape, raw.made) == ("BF16", (192, 200), True)
        stored = checkpoint.stored(name)
        assert stored.nbytes == raw.size
        np.testing.assert_array_equal(
            stored.view(np.uint16).reshape(raw.shape), bits_of(values[name])
        )
        packed = np.empty((192, 400), np.uint8)
        checkpoint.packed(name, packed)
        np.testing.assert_array_equal(packed.view(np.uint16), bits_of(values[name]))
        into = {name: np.empty(values[name].shape, np.float32) for name in values}
        checkpoint.load(into, threads=3)
        for name, array in into.items():
            np.testing.assert_array_equal(array, values[name])


@pytest.mark.parametrize("group", [32, -1])
def test_awq_in_whole_blocks_stays_packed(tmp_path: Path, group: int) -> None:
    """Codes and scales bit by bit; a minimum is the half next to -scale x zero."""
    folder, _ = write(tmp_path, {**AWQ, "group_size": group}, config=BLOCKS)
    tensors, _ = _made(json.dumps({**AWQ, "group_size": group}), BLOCKS)
    for name in ("layers.0.wq", "layers.1.w_down"):
        base = hf_name(name).removesuffix(".weight")
        words, zeros, scales = (tensors[f"{base}.{p}"][1] for p in ("qweight", "qzeros", "scales"))
        exact = from_awq(words, zeros, scales)
        outputs, inputs = exact.shape
        with open_checkpoint(folder) as checkpoint:
            raw = checkpoint.raw(name)
            assert (raw.type, raw.shape, raw.made) == ("Q4_1", exact.shape, True)
            assert checkpoint.stored(name).nbytes == raw.size == outputs * inputs // 32 * 20
            found = checkpoint.tensor(name)
        wide = np.repeat(scales.astype(np.float32), inputs // len(scales), axis=0).T
        none = from_awq(np.zeros_like(words), zeros, scales)  # -scale x zero
        np.testing.assert_array_equal(found, codes_of(words) * wide + none.astype(np.float16))
        assert (np.abs(found - exact) <= wide * 2.0**-7).all()


@pytest.mark.parametrize("scale", [np.inf, 60000.0])
def test_scales_that_no_minimum_goes_with(tmp_path: Path, scale: float) -> None:
    name = "model.layers.0.self_attn.q_proj.scales"

    def change(tensors: Tensors) -> None:
        scales = tensors[name][1].copy()
        scales[1, 3] = scale
        tensors[name] = ("F16", scales)

    folder, _ = write(tmp_path, {**AWQ, "group_size": 32}, change, BLOCKS)
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(ModelFormatError, match=f"{name}.*not finite, or too large"),
    ):
        checkpoint.tensor("layers.0.wq")


def codes_of(words: np.ndarray) -> np.ndarray:
    """[out, in], without zeros and scales."""
    one = np.ones((1, words.shape[1] * 8), np.float16)
    return from_awq(words, np.zeros((1, words.shape[1]), np.int32), one)


def bits_of(values: np.ndarray) -> np.ndarray:
    return to_bfloat16(np.ascontiguousarray(values))


@pytest.mark.parametrize(
    ("kind", "config", "most"),
    [("fp8", CONFIG, 1e-5), ("awq", CONFIG, 1e-5), ("awq, packed", BLOCKS, 2e-3)],
)
def test_a_quantised_model_decodes_as_its_values_do(
    host_device: Device, tmp_path: Path, kind: str, config: LlamaConfig, most: float
) -> None:
    quantisation = KINDS.get(kind, {**AWQ, "group_size": 32})
    folder, values = write(tmp_path, quantisation, config=config)
    tokens = [5, 100, 7, 200, 9, 3, 250]
    wanted = reference_llama.logits(config, values, tokens)
    with Decoder(host_device, folder) as decoder:
        decoder.prefill(tokens)
        assert difference(decoder.logits(), wanted[-1]) < most
    # And it is near the model that was quantised.
    whole = reference_llama.logits(config, weights(config), tokens)
    assert difference(wanted[-1], whole[-1]) < 0.5


def test_the_table_of_fp8() -> None:
    table = e4m3_values()
    wanted = np.array([e4m3(code) for code in range(256)], np.float32)
    np.testing.assert_array_equal(table, wanted)
    assert (table[0x7E], table[0x01], table[0x38]) == (448.0, 2.0**-9, 1.0)
    assert np.isnan(table[[0x7F, 0xFF]]).all() and np.isnan(table).sum() == 2


def test_matrices_that_were_not_converted_are_plain(tmp_path: Path) -> None:
    plain = weights(CONFIG)["layers.0.wo"].astype(np.float16)

    def change(tensors: Tensors) -> None:
        base = "model.layers.0.self_attn.o_proj.weight"
        del tensors[f"{base}_scale_inv"]
        tensors[base] = ("F16", plain)

    folder, values = write(tmp_path, FP8, change)
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_array_equal(checkpoint.tensor("layers.0.wo"), plain)
        wanted = values["layers.1.wo"]
        np.testing.assert_array_equal(checkpoint.tensor("layers.1.wo"), wanted)


# ------------------------------------------------------------------------- what is not as it should

DTYPES = {
    "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8,
    "F16": np.float16, "F32": np.float32, "I32": np.int32, "I64": np.int64,
}  # fmt: skip
SCALE = "weight_scale_inv"


@pytest.mark.parametrize(
    ("kind", "name", "put", "error", "said"),
    [  # `put`: dtype and shape of what is there instead
        ("fp8", SCALE, None, ModelFormatError, "no tensor weight_scale_inv"),
        ("fp8", "weight", None, ModelFormatError, "has no tensor weight"),
        ("fp8", SCALE, ("F32", 2, 3), ModelFormatError, r"has shape \[2, 3\], must be \[2, 2\]"),
        ("fp8", SCALE, ("F8_E8M0", 2, 2), UnsupportedModelError, "of type F8_E8M0"),
        ("fp8", "weight", ("F8_E5M2", 160, 192), UnsupportedModelError, "of type F8_E5M2"),
        ("fp8", "weight", ("F16", 160, 192), ModelFormatError, "is there quantised and plain"),
        ("fp8", "weight", ("F8_E4M3", 256, 192), ModelFormatError, "the config says"),
        ("fp8", "model.norm.weight", ("F8_E4M3", 192), ModelError, "no tensor weight_scale_inv"),
        ("fp8", "input_scale", ("F32",), UnsupportedModelError, "has no place"),
        ("awq", "qzeros", None, ModelFormatError, "has no tensor qzeros"),
        ("awq", "qzeros", ("I32", 24, 10), ModelFormatError,
         r"qzeros has shape \[24, 10\], must be \[24, 20\]"),
        ("awq", "scales", ("F16", 12, 160), ModelFormatError, r"scales has shape \[12, 160\]"),
        ("awq", "qweight", ("I64", 192, 20), UnsupportedModelError, "of type I64"),
        ("awq", "qweight", ("I32", 7, 20), ModelFormatError, "7 inputs are no whole groups of 8"),
        ("awq", "qweight", ("I32", 0, 20), ModelFormatError, "is empty"),
        ("awq", "g_idx", ("I32", 192), UnsupportedModelError, "has no place"),
    ],
)  # fmt: skip
def test_a_damaged_matrix_is_refused_when_it_is_opened(
    tmp_path: Path, kind: str, name: str, put: Any, error: type[ModelError], said: str
) -> None:
    name = name if name.startswith("model.") else f"model.layers.0.self_attn.q_proj.{name}"

    def change(tensors: Tensors) -> None:
        if put is None:
            del tensors[name]
        else:
            dtype, *shape = put
            tensors[name] = dtype, np.ones(shape, DTYPES[dtype])

    folder, _ = write(tmp_path, KINDS[kind], change)
    with pytest.raises(error, match=said):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, UnsupportedModelError, "'gptq'.*fp8, awq"),
        ({"quant_method": "compressed-tensors"}, UnsupportedModelError, "compressed-tensors"),
        ({}, UnsupportedModelError, "quant_method None"),
        ("awq", ModelFormatError, "must be an object"),
        ({**AWQ, "bits": 8}, UnsupportedModelError, "bits of quantization_config is 8"),
        ({**AWQ, "bits": True}, UnsupportedModelError, "bits"),
        ({**AWQ, "version": "gemv"}, UnsupportedModelError, "version.*'gemv'"),
        # transformers 5 reads `format` where there is no version.
        ({**AWQ, "format": "gemv"}, UnsupportedModelError, "format.*'gemv'"),
        ({**AWQ, "backend": "llm-awq"}, UnsupportedModelError, "backend 'llm-awq'"),
        ({**AWQ, "zero_point": False}, UnsupportedModelError, "zero_point"),
        ({**AWQ, "group_size": 0}, ModelFormatError, "group_size is 0"),
        ({**AWQ, "group_size": "128"}, ModelFormatError, "group_size"),
        ({**FP8, "weight_block_size": [128]}, ModelFormatError, "weight_block_size"),
        ({**FP8, "weight_block_size": [0, 128]}, ModelFormatError, "weight_block_size"),
        ({**FP8, "weight_block_size": 128}, ModelFormatError, "weight_block_size"),
        ({**FP8, "fmt": "e5m2"}, UnsupportedModelError, "fmt"),
        ({**FP8, "activation_scheme": "static"}, UnsupportedModelError, "activation_scheme"),
    ],
)
def test_other_quantisations_are_refused(value: Any, error: type[ModelError], said: str) -> None:
    with pytest.raises(error, match=said):
        Quantisation.from_hf(value, "config.json")


def test_none_is_none() -> None:
    assert Quantisation.from_hf(None, "config.json") is None
