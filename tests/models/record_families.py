"""Records what transformers computes for a small random model of each family:

    python -m tests.models.record_families        (torch and transformers; writes tests/data)

The record holds each model's config.json and tensor names as transformers itself writes them, and
its logits in float32 at some positions.  Weights follow from the tensors' names (`weight_of`), so
that test_families.py makes the same model without torch.  It also holds what transformers makes of
further ropes (`ROPES`): their inverse frequencies and what cosines and sines are multiplied by.
"""

from __future__ import annotations

import importlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

RECORD = Path(__file__).parents[1] / "data" / "reference_families.json"
WINDOW, TOKENS = 12, 40
SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_MILLION = {"rope_type": "default", "rope_theta": 1e6}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": _SCALED},
    "llama, linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.5}},
    "mistral": {"model_type": "mistral", "sliding_window": None, "rope_parameters": _MILLION},
    "mistral, window": {"model_type": "mistral", "sliding_window": WINDOW, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", "rope_parameters": _MILLION, "tie_word_embeddings": True},
    "qwen2, window from layer 1": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen2, yarn": {"model_type": "qwen2", "rope_parameters": {**_YARN, "rope_theta": 1e6}},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "rope_parameters": _MILLION},
    "qwen3, tied, window": {
        "model_type": "qwen3",
        "head_dim": 32,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 0,
    },
}


_LONG = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
_QWEN = {"model_type": "qwen2", "hidden_size": 512, "rope_theta": 1e6}  # heads of 128
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4}},
    "linear, stretched less": {
        "model_type": "mistral",
        "rope_parameters": {"rope_type": "linear", "factor": 0.5, "rope_theta": 5e5},
    },
    "as Qwen says": {**_QWEN, "rope_scaling": _LONG},
    "as transformers 5 writes it": {
        "model_type": "qwen3",
        "rope_parameters": {**_LONG, "rope_type": "yarn", "rope_theta": 1e6},
    },
    "by one": {**_QWEN, "rope_scaling": {**_LONG, "factor": 1.0}},
    "less than one": {**_QWEN, "rope_scaling": {**_LONG, "factor": 0.5}},
    "of the context": {"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 8.0}},
    "factor of the contexts": {
        **_QWEN,
        "max_position_embeddings": 131072,
        "rope_scaling": {**_LONG, "factor": None},
    },
    "attention_factor": {**_QWEN, "rope_scaling": {**_LONG, "attention_factor": 1.0}},
    "mscale": {**_QWEN, "rope_scaling": {**_LONG, "mscale": 0.707, "mscale_all_dim": 1.2}},
    "mscale alone": {**_QWEN, "rope_scaling": {**_LONG, "mscale": 0.707}},
    "betas": {**_QWEN, "rope_scaling": {**_LONG, "beta_fast": 64, "beta_slow": 0.5}},
    "betas of zero": {**_QWEN, "rope_scaling": {**_LONG, "beta_fast": 0, "beta_slow": None}},
    "one beta": {**_QWEN, "rope_scaling": {**_LONG, "beta_fast": 2.0, "beta_slow": 2.0}},
    "not truncated": {**_QWEN, "rope_scaling": {**_LONG, "truncate": False}},
    "null is false": {**_QWEN, "rope_scaling": {**_LONG, "truncate": None}},
    "one pair": {
        **_QWEN,
        "rope_scaling": {**_LONG, "beta_fast": 2.0, "beta_slow": 2.0, "truncate": False},
    },
}


def weight_of(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The tensor's values: norms near 1, biases and matrices around 0."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith("norm.weight"):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    if name.endswith("bias"):
        return rng.uniform(-1.0, 1.0, shape).astype(np.float32)
    scale = 0.2 if "embed" in name else 1.5 * shape[1] ** -0.5
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def tokens_of(model: str) -> list[int]:
    rng = np.random.default_rng(zlib.crc32(model.encode()))
    return [int(token) for token in rng.integers(0, SIZES["vocab_size"], TOKENS)]


def record() -> dict[str, Any]:
    """Raises ImportError without torch and transformers."""
    import torch
    import transformers

    made: dict[str, Any] = {
        "made_by": "python -m tests.models.record_families",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "models": {},
        "ropes": {},
    }
    for name, fields in ROPES.items():
        values = {**SIZES, **fields}
        kind = values.pop("model_type")
        module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        config = transformers.AutoConfig.for_model(kind, **values)
        rope = getattr(module, f"{kind.title()}RotaryEmbedding")(config)
        made["ropes"][name] = [[float(f"{v:.9g}") for v in rope.inv_freq], rope.attention_scaling]
    positions = [0, 1, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, TOKENS - 1]
    for name, fields in MODELS.items():
        values = {**SIZES, **fields}
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        model = model.to(torch.float32).eval()
        shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        if config.tie_word_embeddings:
            del shapes["lm_head.weight"]
        state = {key: torch.from_numpy(weight_of(key, shape)) for key, shape in shapes.items()}
        answer = model.load_state_dict(state, strict=False)
        assert not answer.unexpected_keys
        assert set(answer.missing_keys) <= {"lm_head.weight"}
        with torch.no_grad():
            logits = model(torch.tensor([tokens_of(name)])).logits[0].numpy()
        made["models"][name] = {
            "config": json.loads(config.to_json_string(use_diff=False)),
            "tensors": {key: list(shape) for key, shape in shapes.items()},
            "tokens": tokens_of(name),
            "logits": {at: [float(f"{v:.7g}") for v in logits[at]] for at in positions},
        }
    return made


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), indent=None, separators=(",", ":")) + "\n")
    print(f"{RECORD}: {RECORD.stat().st_size} bytes")
