"""Small model files for tests: the same random weights as GGUF and as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import safetensors.numpy
import tokenizers
from gguf.quants import quantize

from ostinato.models.config import LlamaConfig, tensor_shapes
from ostinato.models.packed import PackedMatrix


def packed_matrix(
    layout: PackedMatrix, parts: Sequence[npt.NDArray[np.uint8]]
) -> npt.NDArray[np.uint8]:
    """The matrix of these parts, each uint8 [rows, bytes in a row]."""
    memory = np.empty(layout.nbytes, np.uint8)
    for given, into in zip(parts, layout.begin(memory), strict=True):
        into[...] = given
    return memory


CONFIG = LlamaConfig(
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=16,
    inner=96,
    vocabulary=280,
    context_length=128,
    norm_epsilon=1e-5,
    rope_theta=10000.0,
    tied_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = TEMPLATE + (
    "{% if add_generation_prompt and think is defined and think is false %}"
    "{{ '<z></z>' + more | default('') }}{% endif %}"
)
"""A template with variables."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

GGUF_NAMES = {
    "attn_norm": "attn_norm.weight",
    "wq": "attn_q.weight",
    "wk": "attn_k.weight",
    "wv": "attn_v.weight",
    "bq": "attn_q.bias",
    "bk": "attn_k.bias",
    "bv": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "wo": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "w_gate": "ffn_gate.weight",
    "w_up": "ffn_up.weight",
    "w_down": "ffn_down.weight",
}
HF_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "bq": "self_attn.q_proj.bias",
    "bk": "self_attn.k_proj.bias",
    "bv": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "wo": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "w_up": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
}
FAMILIES = {
    "llama": CONFIG,
    "mistral": replace(CONFIG, windows=(7, 7)),
    "qwen2": replace(CONFIG, qkv_bias=True, rope_theta=1e6, tied_embeddings=False),
    "qwen2, windows": replace(CONFIG, qkv_bias=True, windows=(0, 7)),
    "qwen3": replace(CONFIG, qk_norm=True, head_size=24, rope_theta=1e6),
}
"""Configs by the name in config.json; GGUF files call Mistral's "llama"."""


def family_of(config: LlamaConfig) -> str:
    """The name of a config's architecture in config.json."""
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias:
        return "qwen2"
    return "mistral" if config.windows else "llama"


def weights(config: LlamaConfig = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights by canonical name."""
    random = np.random.default_rng(seed)
    return {
        name: random.standard_normal(shape, dtype=np.float32) * np.float32(0.2)
        for name, shape in tensor_shapes(config).items()
    }


def gguf_name(name: str) -> str:
    whole = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}
    if name in whole:
        return f"{whole[name]}.weight"
    _, layer, part = name.split(".")
    return f"blk.{layer}.{GGUF_NAMES[part]}"


def hf_name(name: str) -> str:
    whole = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
    if name in whole:
        return f"{whole[name]}.weight"
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{HF_NAMES[part]}"


def permute(matrix: np.ndarray, heads: int) -> np.ndarray:
    """The order of the rows of wq and wk that llama.cpp's convert_hf_to_gguf.py makes."""
    rows, columns = matrix.shape
    return (
        matrix.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def byte_tokens(count: int = CONFIG.vocabulary) -> tuple[list[str], list[str]]:
    """A byte-level vocabulary of `count` tokens, special ones first, and its merges."""
    from ostinato.models.text.tokenizer import _BYTE_LEVEL

    tokens = SPECIAL + sorted(_BYTE_LEVEL, key=_BYTE_LEVEL.__getitem__)
    merges = ["t h", "Ġ a", "th e", "Ġ th", "i n", "e r", "1 2", "a b", "Ġ Ġ"]
    tokens += [merge.replace(" ", "") for merge in merges]
    tokens += [f"<unused{index}>" for index in range(count - len(tokens))]
    return tokens, merges


def write_gguf(
    path: Path,
    values: Mapping[str, np.ndarray] | None = None,
    *,
    config: LlamaConfig = CONFIG,
    kind: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    raw: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    architecture: str | None = None,
    split: int = 0,
) -> Path:
    """Write a GGUF file of `config` with a byte-level tokenizer, or parts of `split` tensors each;
    then the first one's path is returned.

    Matrices are quantised to `kind` where their rows allow it.  `metadata` is laid over the usual
    (None leaves a key out); `raw` gives ready blocks by canonical name; `extra` more tensors.
    """
    values = weights(config) if values is None else values
    known = {"mistral": "llama"}.get(family_of(config), family_of(config))
    writer = gguf.GGUFWriter(path, architecture or known, split_max_tensors=split)
    tokens, merges = byte_tokens(config.vocabulary)
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))
    entries: dict[str, Any] = {
        "llama.block_count": config.layers,
        "llama.context_length": config.context_length,
        "llama.embedding_length": config.hidden,
        "llama.feed_forward_length": config.inner,
        "llama.attention.head_count": config.heads,
        "llama.attention.head_count_kv": config.kv_heads,
        "llama.attention.key_length": config.head_size,
        "llama.attention.value_length": config.head_size,
        "llama.rope.dimension_count": config.head_size,
        "llama.rope.freq_base": config.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": config.norm_epsilon,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
        **({"llama.attention.sliding_window": max(config.windows)} if any(config.windows) else {}),
    }
    prefixed = (key.replace("llama.", f"{known}.", 1) for key in entries)
    entries = {**dict(zip(prefixed, entries.values(), strict=True)), **(metadata or {})}
    for key, value in entries.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in values.items():
        if raw and name in raw:
            blocks, block_kind = raw[name]
            writer.add_tensor(gguf_name(name), blocks, raw_dtype=block_kind)
            continue
        heads = None
        if known == "llama":
            heads = {"wq": config.heads, "wk": config.kv_heads}.get(name.rpartition(".")[2])
        data = permute(tensor, heads) if heads else tensor
        quantised = gguf.GGMLQuantizationType[kind]
        if data.ndim > 1 and kind != "F32":
            writer.add_tensor(gguf_name(name), quantize(data, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(data))
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-*.gguf")) if split else path


def hf_config(config: LlamaConfig = CONFIG, **changes: object) -> dict[str, object]:
    family = family_of(config)
    windows: dict[str, object] = {}
    if family == "mistral":
        windows = {"sliding_window": max(config.windows)}
    elif any(config.windows):
        first = next(i for i, window in enumerate(config.windows) if window)
        windows = {
            "use_sliding_window": True,
            "sliding_window": max(config.windows),
            "max_window_layers": first,
        }
    return {
        "model_type": family,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.inner,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **windows,
        **changes,
    }


def byte_level_encoder() -> tokenizers.Tokenizer:
    """`byte_tokens` as the `tokenizers` package has it, in the way of SmolLM2."""
    tokens, merges = byte_tokens()
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=pairs))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    encoder.decoder = tokenizers.decoders.ByteLevel()
    encoder.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in SPECIAL])
    return encoder


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json as SmolLM2 has it, and tokenizer_config.json."""
    byte_level_encoder().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "chat_template": TEMPLATE},
        )
    )


Tensors = dict[str, tuple[str, np.ndarray]]
"""The dtype in the file and an array with the bytes, by the tensor's name."""


def save_safetensors(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file; NumPy need not have the tensors' dtypes."""
    head: dict[str, Any] = {}
    data = b""
    for name, (kind, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        head[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_folder(
    folder: Path,
    values: Mapping[str, np.ndarray] | None = None,
    *,
    config: LlamaConfig = CONFIG,
    shards: int = 1,
    dtype: type = np.float32,
    **changes: object,
) -> Path:
    """Write a Hugging Face folder, in one file or in shards with their index."""
    values = weights(config) if values is None else values
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(config, **changes)))
    write_tokenizer(folder)
    named = {hf_name(name): value.astype(dtype) for name, value in values.items()}
    if shards == 1:
        safetensors.numpy.save_file(named, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: named[name] for name in list(named)[shard::shards]}
        safetensors.numpy.save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
