"""Llama's relatives from their files: the logits that transformers had, and those of plain NumPy.

`record_families` made the record; its models' windows are shorter than their prompts, and positions
on both sides of a window's end are among those recorded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from ostinato.device import Device
from ostinato.errors import ModelFormatError, UnsupportedModelError
from ostinato.models.config import LlamaConfig, rope_inverse_frequencies
from ostinato.models.decoder import Decoder
from ostinato.models.files.open import open_checkpoint
from ostinato.models.host import packed_kernels
from tests.models import reference_llama
from tests.models.model_files import (
    CONFIG,
    FAMILIES,
    family_of,
    gguf_name,
    hf_config,
    weights,
    write_folder,
    write_gguf,
    write_tokenizer,
)
from tests.models.proof import difference
from tests.models.record_families import MODELS, RECORD, WINDOW, weight_of

RECORDED: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))["models"]


@contextmanager
def kernels(kind: str) -> Iterator[None]:
    """Decoders inside run on compiled kernels, or on NumPy."""
    if kind == "compiled" and not packed_kernels.compiled():
        pytest.skip("the extension was not built here")
    with nullcontext() if kind == "compiled" else packed_kernels.without_extension():
        yield


def write_recorded(folder: Path, name: str) -> Path:
    model = RECORDED[name]
    (folder / "config.json").write_text(json.dumps(model["config"]))
    values = {key: weight_of(key, tuple(shape)) for key, shape in model["tensors"].items()}
    safetensors.numpy.save_file(values, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("kind", ["compiled", "numpy"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_that_transformers_had(
    host_device: Device, tmp_path: Path, name: str, kind: str
) -> None:
    """The tokens come as one prompt, singly, and in pieces that end around the window's end."""
    tokens, wanted = RECORDED[name]["tokens"], RECORDED[name]["logits"]
    assert {WINDOW - 1, WINDOW, WINDOW + 1} <= set(map(int, wanted))
    with kernels(kind), Decoder(host_device, write_recorded(tmp_path, name)) as decoder:
        for pieces in ([], range(1, len(tokens)), (WINDOW - 3, WINDOW + 1, 2 * WINDOW + 1)):
            decoder.reset()
            ends = sorted({*pieces, *(int(at) + 1 for at in wanted)})
            done = 0
            for end in ends:
                decoder.prefill(tokens[done:end])
                done = end
                if str(end - 1) in wanted:
                    error = difference(decoder.logits(), np.array(wanted[str(end - 1)]))
                    assert error < 1e-5, (end - 1, error)
        decoder.reset()
        decoder.prefill(tokens)
        assert difference(decoder.logits(), np.array(wanted[str(len(tokens) - 1)])) < 1e-5


def test_the_records_models_are_what_they_are_meant_to_be() -> None:
    configs = {name: LlamaConfig.from_hf(one["config"]) for name, one in RECORDED.items()}
    assert {n: c.qkv_bias for n, c in configs.items()} == {n: "qwen2" in n for n in configs}
    assert {n: c.qk_norm for n, c in configs.items()} == {n: "qwen3" in n for n in configs}
    windows = {name: config.windows for name, config in configs.items() if config.windows}
    assert windows == {
        "mistral, window": (WINDOW, WINDOW),
        "qwen2, window from layer 1": (0, WINDOW),
        "qwen3, tied, window": (WINDOW, WINDOW),
    }
    assert configs["qwen3"].query_size != configs["qwen3"].hidden


@pytest.mark.parametrize("kind", ["compiled", "numpy"])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_kinds_of_file_give_the_same_model(
    host_device: Device, tmp_path: Path, family: str, kind: str
) -> None:
    config = FAMILIES[family]
    values = weights(config)
    paths = [write_folder(tmp_path / "folder", values, config=config)]
    if len(set(config.windows)) < 2:  # GGUF has no windows of some layers only
        paths.append(write_gguf(tmp_path / "model.gguf", values, config=config))
    tokens = [int(t) for t in np.random.default_rng(2).integers(3, 250, 20)]
    wanted = reference_llama.logits(config, values, tokens)
    for path in paths:
        with open_checkpoint(path) as checkpoint:
            assert (checkpoint.config.qkv_bias, checkpoint.config.qk_norm) == (
                *(config.qkv_bias, config.qk_norm),
            )
            assert checkpoint.config.windows == config.windows
            assert checkpoint.config.head_size == config.head_size
        with kernels(kind), Decoder(host_device, path) as decoder:
            done = 0
            for count in (3, 6, 7, 8, 20):
                decoder.prefill(tokens[done:count])
                done = count
                assert difference(decoder.logits(), wanted[count - 1]) < 1e-5, (path, count)


# ------------------------------------------------------------------------- what is not as it should


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_a_file_without_what_its_family_has_is_refused(
    tmp_path: Path, family: str, kind: str
) -> None:
    config = FAMILIES[family]
    values = weights(config)
    part = "bk" if config.qkv_bias else "k_norm"
    del values[f"layers.1.{part}"]
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelFormatError, match=rf"'layers\.1\.{part}' is missing"):
        if kind == "gguf":
            open_checkpoint(write_gguf(path, values, config=config))
        else:
            open_checkpoint(write_folder(tmp_path, values, config=config))


@pytest.mark.parametrize("part", ["bq", "q_norm"])
def test_what_llama_does_not_have_is_refused_in_its_files(tmp_path: Path, part: str) -> None:
    extra = {gguf_name(f"layers.0.{part}"): np.ones(64 if part == "bq" else 16, np.float32)}
    with pytest.raises(UnsupportedModelError, match="has no place in a Llama decoder"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", extra=extra))


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen3", {"attention_bias": True}, "attention_bias True"),
        ("qwen2", {"rope_scaling": {"type": "longrope"}}, "'longrope' is.*linear, llama3, yarn$"),
        (
            "qwen3",
            {"rope_scaling": {"rope_type": "dynamic"}},
            "'dynamic' is.*a copy with the type 'default'",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is set"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "attn_factor": 2}}, "attn_fac"),
        ("mistral", {"rope_parameters": {"full_attention": {}}}, "a rope of its own for 'full_"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types of a Mistral"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "layer_types is"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types is"),
        ("qwen2", {"layer_types": [["full_attention"]] * 2}, "layer_types is"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window is not set"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen3", {"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
        ("qwen3", {"model_type": ["qwen3"]}, "model_type"),
    ],
)
def test_a_config_that_is_not_supported_says_why(
    family: str, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        LlamaConfig.from_hf(hf_config(FAMILIES[family], **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 0},
        {"sliding_window": -3},
        {"sliding_window": "4096"},
        {"sliding_window": 2.5},
        {"sliding_window": 1 << 40},
        {"use_sliding_window": "yes"},
        {"max_window_layers": None, "num_hidden_layers": 1 << 60},
    ],
)
def test_a_damaged_window_is_refused(changes: dict[str, object]) -> None:
    given = hf_config(FAMILIES["qwen2"], use_sliding_window=True, max_window_layers=0)
    with pytest.raises(ModelFormatError):
        LlamaConfig.from_hf({**given, **changes})


def test_what_config_json_leaves_out_is_what_transformers_takes() -> None:
    given = hf_config(replace(CONFIG, heads=32, kv_heads=32, head_size=2))
    for name in ("head_dim", "num_key_value_heads"):
        del given[name]
    found = {
        family: LlamaConfig.from_hf({**given, "model_type": family})
        for family in ("llama", "mistral", "qwen2", "qwen3")
    }
    assert {n: c.windows for n, c in found.items() if c.windows} == {"mistral": (4096, 4096)}
    assert {n: (c.kv_heads, c.head_size) for n, c in found.items()} == {
        "llama": (32, 2),
        "mistral": (8, 2),
        "qwen2": (32, 2),
        "qwen3": (32, 128),
    }
    for family in ("llama", "qwen2", "qwen3"):  # null is all heads
        nothing = {"model_type": family, "num_key_value_heads": None, "num_attention_heads": 16}
        assert LlamaConfig.from_hf({**given, **nothing}).kv_heads == 16


@pytest.mark.parametrize(
    ("kind", "factor", "older", "by"),
    [  # llama.cpp takes "linear" where there is no type, and the older key where there is no factor
        (None, 4.0, None, 4),
        (None, None, 2.0, 2),
        ("linear", 4.0, None, 4),
        ("linear", 0.5, 1.0, 0.5),
        ("linear", 1.0, 2.0, None),
        ("linear", 0.0, 2.0, None),
        ("linear", 1.0, None, None),
        ("linear", None, None, None),
        (None, 1.0, 1.0, None),
        ("none", 4.0, 2.0, None),
    ],
)
def test_linear_rope_in_gguf_goes_by_its_factor(
    tmp_path: Path, kind: str | None, factor: float | None, older: float | None, by: float | None
) -> None:
    keys = {"rope.scaling.type": kind, "rope.scaling.factor": factor, "rope.scale_linear": older}
    metadata = {f"llama.{key}": value for key, value in keys.items()}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata=metadata)) as checkpoint:
        assert checkpoint.config.rope_factors == (None if by is None else (by,) * 8)
        assert checkpoint.config.context_length == CONFIG.context_length * max(by or 1, 1)


def yarn_by_the_book(
    size: int, theta: float, factor: float, original: int, fast: float = 32.0, slow: float = 1.0
) -> list[float]:
    """ggml's `rope_yarn`, `rope_yarn_ramp` and `ggml_rope_yarn_corr_dims`, one pair at a time."""

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    start = max(0, math.floor(dimension(fast)))
    end = min(size - 1, math.ceil(dimension(slow)))
    result = []
    for i in range(0, size, 2):
        extrapolated = theta ** (-i / size)
        ramp = 1 - min(1, max(0, (i / 2 - start) / max(0.001, end - start)))
        result.append(extrapolated / factor * (1 - ramp) + extrapolated * ramp)
    return result


LOG4 = 1 + 0.1 * math.log(
    4
)  # llama.cpp's 1 / LOG4, which ggml's rope multiplies by LOG4, is left out


@pytest.mark.parametrize(
    ("keys", "book", "magnitude"),
    [
        ({}, {}, LOG4),
        ({"original_context_length": None}, {"original": 100}, LOG4),
        ({"original_context_length": 0}, {"original": 100}, LOG4),
        ({"attn_factor": 0.5}, {}, 0.5 * LOG4),
        ({"yarn_log_multiplier": 1.0}, {}, 1.0),
        ({"yarn_log_multiplier": 0.5}, {}, LOG4 / (1 + 0.05 * math.log(4))),
        ({"yarn_beta_fast": 4.0, "yarn_beta_slow": 0.25}, {"fast": 4.0, "slow": 0.25}, LOG4),
        ({"yarn_beta_fast": 2.0, "yarn_beta_slow": 2.0}, {"fast": 2.0, "slow": 2.0}, LOG4),
        ({"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0}, {}, LOG4),
        ({"yarn_ext_factor": -1.0, "yarn_attn_factor": round(LOG4, 6)}, {}, LOG4),
        ({"factor": 1.0}, {"factor": 1.0}, 1.0),
        ({"factor": 0.5}, {"factor": 0.5}, 1.0),
        ({"type": "linear", "attn_factor": 0.5}, None, 0.5),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_yarn_in_gguf_is_that_of_llama_cpp(
    tmp_path: Path,
    architecture: str,
    keys: dict[str, object],
    book: dict[str, Any] | None,
    magnitude: float,
) -> None:
    given = {"type": "yarn", "factor": 4.0, "original_context_length": 64, **keys}
    metadata = {f"{architecture}.rope.scaling.{key}": value for key, value in given.items()}
    path = tmp_path / "m.gguf"
    config = replace(FAMILIES[architecture], context_length=100, rope_theta=500.0)
    factors = np.linspace(1, 3, config.head_size // 2, dtype=np.float32)
    for extra in ({}, {"rope_freqs.weight": factors}):
        write_gguf(path, config=config, metadata=metadata, extra=extra)
        with open_checkpoint(path) as checkpoint:
            found = checkpoint.config
        if book is None:
            wanted = 500.0 ** -(np.arange(0, found.head_size, 2) / found.head_size) / 4.0
        else:
            by = {"factor": 4.0, "original": 64, **book}
            wanted = np.array(yarn_by_the_book(found.head_size, 500.0, **by))
        wanted /= factors if extra else 1
        np.testing.assert_allclose(rope_inverse_frequencies(found), wanted, rtol=1e-6)
        assert found.rope_magnitude == pytest.approx(magnitude, rel=1e-5)


def test_gguf_keys_that_change_nothing_are_no_reason_to_refuse(tmp_path: Path) -> None:
    neutral = {
        "attention.head_count": [CONFIG.heads] * CONFIG.layers,
        "attention.head_count_kv": [CONFIG.kv_heads] * CONFIG.layers,
        "feed_forward_length": [CONFIG.inner] * CONFIG.layers,
        "rope.scaling.original_context_length": 8192,
        "rope.scaling.finetuned": False,
        "attention.causal": True,
        "expert_count": 0,
        "expert_used_count": 0,
        "tensor_data_layout": "Meta AI original pth",
        "vocab_size": CONFIG.vocabulary,
    }
    metadata = {f"llama.{key}": value for key, value in neutral.items()}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata=metadata)) as checkpoint:
        assert replace(checkpoint.config, norm_epsilon=1e-5) == CONFIG


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen3moe", "mistral3", "gemma3", "phi3"])
def test_other_architectures_are_named(tmp_path: Path, architecture: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture=architecture)
    with pytest.raises(
        UnsupportedModelError, match=f"architecture '{architecture}'.*supported: llama"
    ):
        open_checkpoint(path)


def test_the_families_are_told_apart() -> None:
    assert [family_of(config) for config in FAMILIES.values()] == [
        *("llama", "mistral", "qwen2", "qwen2", "qwen3"),
    ]


# ----------------------------------------------------------------------------------- with a config


def test_windows_are_of_every_layer_or_of_none() -> None:
    assert replace(CONFIG, windows=(0, 0)).windows == ()
    assert replace(CONFIG, windows=(0, 5)).window(1) == 5
    with pytest.raises(ModelFormatError, match="windows of 1 layers"):
        replace(CONFIG, windows=(5,))
    with pytest.raises(ModelFormatError, match="a sliding window is -5"):
        replace(CONFIG, windows=(0, -5))
