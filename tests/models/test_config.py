"""The config: what both formats give, what is refused, and rope's frequencies.

What transformers makes of a rope was recorded by `record_families`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import InputError, ModelFormatError, UnsupportedModelError
from ostinato.models.config import (
    LlamaConfig,
    RopeScaling,
    rope_inverse_frequencies,
    tensor_shapes,
)
from tests.models.model_files import CONFIG, hf_config
from tests.models.record_families import RECORD, ROPES, SIZES

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
RECORDED: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))["ropes"]


def llama3_by_the_book(theta: float, size: int) -> list[float]:
    """transformers' `_compute_llama3_parameters`, one frequency at a time."""
    result = []
    for i in range(0, size, 2):
        inverse = 1.0 / theta ** (i / size)
        length = 2 * math.pi / inverse
        if length > 8192 / 1.0:
            inverse /= 32.0
        elif length >= 8192 / 4.0:
            smooth = (8192 / length - 1.0) / (4.0 - 1.0)
            inverse = (1 - smooth) * inverse / 32.0 + smooth * inverse
        result.append(inverse)
    return result


def test_hf_config_is_read_whole() -> None:
    assert LlamaConfig.from_hf(hf_config()) == CONFIG


def test_absent_keys_follow_from_others() -> None:
    config = hf_config()
    for key in ("num_key_value_heads", "head_dim", "tie_word_embeddings"):
        del config[key]
    read = LlamaConfig.from_hf(config)
    assert (read.kv_heads, read.head_size, read.tied_embeddings) == (4, 16, False)


def test_theta_may_stand_in_rope_parameters() -> None:
    config = hf_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert LlamaConfig.from_hf(config).rope_theta == 5e5


@pytest.mark.parametrize("theta", [1, 1e12])
def test_theta_at_its_limits(theta: float) -> None:
    assert LlamaConfig.from_hf(hf_config(rope_theta=theta)).rope_theta == theta


def test_two_ropes_that_disagree_are_refused() -> None:
    """transformers 5 takes `rope_scaling` before `rope_parameters`, others do not: with a
    `rope_scaling` put into a newer config.json as older instructions say, one was silently left
    out."""
    plain = {"rope_type": "default", "rope_theta": 5e5}
    with pytest.raises(UnsupportedModelError, match="both there and disagree"):
        LlamaConfig.from_hf(hf_config(rope_parameters=plain, rope_scaling=LLAMA3, rope_theta=5e5))
    with pytest.raises(UnsupportedModelError, match="both there and disagree"):
        LlamaConfig.from_hf(hf_config(rope_parameters=plain, rope_scaling={"type": "default"}))
    with pytest.raises(UnsupportedModelError, match="both there and disagree"):
        LlamaConfig.from_hf(hf_config(rope_parameters=plain, rope_scaling=YARN, rope_theta=5e5))
    both = {**LLAMA3, "rope_theta": 5e5}
    read = LlamaConfig.from_hf(hf_config(rope_parameters=both, rope_scaling=LLAMA3, rope_theta=5e5))
    assert (read.rope_theta, read.rope_scaling) == (5e5, RopeScaling(32.0, 1.0, 4.0, 8192))
    assert LlamaConfig.from_hf(hf_config(rope_parameters=plain, rope_scaling=None)) == (
        dataclasses.replace(CONFIG, rope_theta=5e5)
    )


def test_the_context_before_scaling_stands_in_two_places() -> None:
    """transformers takes the one beside the rope's parameters."""
    with pytest.raises(UnsupportedModelError, match="original_max_position_embeddings is 4096"):
        LlamaConfig.from_hf(hf_config(rope_scaling=LLAMA3, original_max_position_embeddings=4096))
    LlamaConfig.from_hf(hf_config(rope_scaling=LLAMA3, original_max_position_embeddings=8192))
    beside = {"rope_scaling": {"type": "yarn", "factor": 4.0}}
    with_it = LlamaConfig.from_hf(hf_config(**beside, original_max_position_embeddings=64))
    assert with_it == LlamaConfig.from_hf(hf_config(rope_scaling=YARN))


def test_what_changes_nothing_is_no_reason_to_refuse() -> None:
    neutral = {
        "attention_bias": False,
        "hidden_act": "swish",
        "logit_scale": 1.0,
        "final_logit_softcapping": None,
        "per_layer_config": {},
        "pretraining_tp": 2,
        "attention_dropout": 0.1,
        "is_causal": True,
    }
    assert LlamaConfig.from_hf(hf_config(**neutral)) == CONFIG


@pytest.mark.parametrize("scaling", [{"type": "linear", "factor": 1.0}, {**YARN, "factor": 1.0}])
def test_a_rope_scaled_by_one_is_none(scaling: dict[str, object]) -> None:
    assert LlamaConfig.from_hf(hf_config(rope_scaling=scaling)) == CONFIG


@pytest.mark.parametrize("name", ROPES)
def test_scaled_ropes_are_those_of_transformers(name: str) -> None:
    frequencies, magnitude = RECORDED[name]
    config = LlamaConfig.from_hf({**SIZES, **ROPES[name]})
    np.testing.assert_allclose(rope_inverse_frequencies(config), frequencies, rtol=1e-6)
    assert config.rope_magnitude == pytest.approx(magnitude, rel=1e-12)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"type": "linear", "factor": 2.0}, 2 * CONFIG.context_length),
        ({"type": "linear", "factor": 0.5}, CONFIG.context_length),
        ({"type": "yarn", "factor": 2.0}, 2 * CONFIG.context_length),
        ({**YARN, "factor": 1.5}, CONFIG.context_length),
        ({**YARN, "factor": 100.0}, 6400),
    ],
)
def test_a_scaled_rope_serves_a_longer_context(scaling: dict[str, object], context: int) -> None:
    assert LlamaConfig.from_hf(hf_config(rope_scaling=scaling)).context_length == context


def test_several_ends_of_sequence() -> None:
    assert LlamaConfig.from_hf(hf_config(eos_token_id=[2, 5, 7])).eos_token_ids == (2, 5, 7)


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral", None, 7])
def test_another_architecture_is_named(name: object) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{name!r}.*supported: llama"):
        LlamaConfig.from_hf(hf_config(model_type=name))


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"quantization_config": {"bits": 4}},
        {"hidden_act": "gelu"},
        {"rope_scaling": {**YARN, "attn_factor": 0.5}},
        {"rope_scaling": {**YARN, "extrapolation_factor": 0.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        {"partial_rotary_factor": 0.5},
        {"is_causal": False},
        {"is_causal": None},  # transformers takes null for false
        {"per_layer_config": {"0": {"rms_norm_eps": 0.1}}},
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"logit_scale": 0.5},
        {"embedding_multiplier": 12.0},
        {"attention_bias": "yes"},
        {"hidden_act": None},
    ],
)
def test_features_that_would_give_wrong_answers_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"supported|partial_rotary_factor"):
        LlamaConfig.from_hf(hf_config(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 0},
        {"hidden_size": -64},
        {"hidden_size": 1 << 40},
        {"hidden_size": 10**30},
        {"hidden_size": "64"},
        {"hidden_size": True},
        {"hidden_size": 64.0},
        {"hidden_size": None},
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": 0, "head_dim": None},
        {"num_key_value_heads": 3},
        {"head_dim": 15},
        {"vocab_size": 1 << 33},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": 0},
        {"rope_theta": float("inf")},
        {"rope_theta": 10**400},
        {"rope_theta": 1.1e12},
        {"rope_theta": 0.9},
        {"rope_scaling": []},
        {"rope_scaling": {**LLAMA3, "factor": 0.5}},
        {"rope_scaling": {**LLAMA3, "factor": float("nan")}},
        {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
        {"rope_scaling": {"rope_type": "llama3"}},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "linear", "factor": 0}},
        {"rope_scaling": {"type": "linear", "factor": float("nan")}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "head_dim": 1 << 40},
        {"rope_scaling": {"type": "yarn"}},
        {"rope_scaling": {**YARN, "factor": float("inf")}},
        {"rope_scaling": {**YARN, "attention_factor": 0.0}},
        {"rope_scaling": {**YARN, "attention_factor": float("nan")}},
        {"rope_scaling": {**YARN, "beta_fast": -1.0}},
        {"rope_scaling": {**YARN, "beta_slow": 1e-320}},
        {"rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 32.0}},
        {"rope_scaling": {**YARN, "mscale": -1.0, "mscale_all_dim": 1.0}},
        {"rope_scaling": {**YARN, "truncate": "no"}},
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}},
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 1}},
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 64.0}},
        {"rope_scaling": YARN, "rope_theta": 1.0},
        {"rope_scaling": YARN, "head_dim": 1 << 40},
        {"eos_token_id": 280},
        {"eos_token_id": "2"},
        {"bos_token_id": -1},
        {"tie_word_embeddings": "yes"},
    ],
)
def test_nonsense_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelFormatError):
        LlamaConfig.from_hf(hf_config(**change))


# Plain characters only: building hypothesis' table of all of Unicode takes two seconds.
NAMES = st.text("abc_01", max_size=3)
JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    NAMES,
    st.lists(st.integers(), max_size=3),
    st.dictionaries(NAMES, st.floats(), max_size=3),
)


SCALINGS = st.builds(
    lambda kind, values: {"type": kind, **values},
    st.sampled_from(["linear", "yarn", "llama3"]),
    st.dictionaries(
        st.sampled_from(
            [*YARN, "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"]
        ),
        st.none() | st.integers() | st.floats(),
    ),
)


@given(
    st.dictionaries(
        st.sampled_from([*hf_config(), "rope_scaling", "attention_bias"]), JSON_VALUES, max_size=6
    ),
    st.none() | SCALINGS,
)
def test_any_json_gives_a_config_or_our_error(
    changes: dict[str, object], scaling: dict[str, object] | None
) -> None:
    if scaling is not None:
        changes["rope_scaling"] = scaling
    try:
        config = LlamaConfig.from_hf(hf_config(**changes))
    except (ModelFormatError, UnsupportedModelError):
        return
    assert config.heads % config.kv_heads == 0
    assert np.isfinite(rope_inverse_frequencies(config)).all()


def test_plain_rope() -> None:
    frequencies = rope_inverse_frequencies(CONFIG)
    assert frequencies.dtype == np.float32
    expected = [10000.0 ** -(2 * pair / 16) for pair in range(8)]
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)


def test_llama3_rope() -> None:
    config = LlamaConfig.from_hf(
        hf_config(head_dim=128, rope_theta=500000.0, rope_scaling=LLAMA3),
    )
    assert config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    expected = llama3_by_the_book(500000.0, 128)
    np.testing.assert_allclose(rope_inverse_frequencies(config), expected, rtol=1e-6)


def test_factors_of_gguf_give_what_the_numbers_give() -> None:
    plain = dataclasses.replace(CONFIG, head_size=128, rope_theta=500000.0)
    scaled = np.array(llama3_by_the_book(500000.0, 128))
    factors = rope_inverse_frequencies(plain).astype(np.float64) / scaled
    config = dataclasses.replace(plain, rope_factors=tuple(factors.tolist()))
    np.testing.assert_allclose(rope_inverse_frequencies(config), scaled, rtol=1e-6)


@pytest.mark.parametrize("factors", [(1.0,), (0.0,) * 8, (math.nan,) * 8, (-1.0,) * 8])
def test_bad_factors_are_refused(factors: tuple[float, ...]) -> None:
    with pytest.raises(ModelFormatError, match="factors"):
        dataclasses.replace(CONFIG, rope_factors=factors)


def test_tensors_of_a_model() -> None:
    shapes = tensor_shapes(CONFIG)
    assert len(shapes) == 2 + 9 * CONFIG.layers
    assert shapes["layers.1.wk"] == (32, 64)
    assert "head" not in shapes
    untied = dataclasses.replace(CONFIG, tied_embeddings=False)
    assert tensor_shapes(untied)["head"] == (280, 64)


def test_sizes_of_numpy_become_plain_ints() -> None:
    """Products of NumPy's 32-bit numbers would wrap around."""
    names = ("hidden", "layers", "heads", "kv_heads", "head_size", "inner")
    sizes = dict(zip(names, (64, 1, 2, 1, 32, 96), strict=True))
    config = LlamaConfig(
        **{name: np.int32(size) for name, size in sizes.items()},
        vocabulary=np.int32(100),
        context_length=np.int32(64),
    )
    assert config == LlamaConfig(**sizes, vocabulary=100, context_length=64)
    assert all(type(getattr(config, name)) is int for name in sizes)
    with pytest.raises(InputError, match="layers"):
        dataclasses.replace(config, layers=1.5)
