"""Hugging Face folders: one file and shards, every dtype, and what opening refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from ostinato.driver.signature import to_bfloat16
from ostinato.errors import ModelError, ModelFormatError, UnsupportedModelError
from ostinato.models.files.checkpoint import JsonTokenizerSource
from ostinato.models.files.open import open_checkpoint
from tests.models.model_files import (
    CONFIG,
    hf_config,
    hf_name,
    save_safetensors,
    weights,
    write_folder,
)

INDEX = "model.safetensors.index.json"


def write_head(folder: Path, head: object, data: bytes = b"", *, size: int | None = None) -> Path:
    """A folder whose safetensors file has exactly this head."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config()))
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    length = len(text) if size is None else size
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + text + data)
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor(tmp_path: Path, shards: int) -> None:
    values = weights()
    with open_checkpoint(write_folder(tmp_path, values, shards=shards)) as checkpoint:
        assert checkpoint.config == CONFIG
        assert checkpoint.tokenizer == JsonTokenizerSource(tmp_path)
        for name, value in values.items():
            assert np.array_equal(checkpoint.tensor(name), value), name


def test_float16(tmp_path: Path) -> None:
    values = weights()
    with open_checkpoint(write_folder(tmp_path, values, dtype=np.float16)) as checkpoint:
        expected = values["embed"].astype(np.float16).astype(np.float32)
        assert np.array_equal(checkpoint.tensor("embed"), expected)
        assert checkpoint.raw("embed").type == "F16"


def test_bfloat16(tmp_path: Path) -> None:
    values = weights()
    write_folder(tmp_path, values)
    bits = {hf_name(name): ("BF16", to_bfloat16(value)) for name, value in values.items()}
    save_safetensors(tmp_path / "model.safetensors", bits)
    with open_checkpoint(tmp_path) as checkpoint:
        for name, value in values.items():
            assert np.array_equal(checkpoint.bfloat16(name), to_bfloat16(value))
            np.testing.assert_allclose(checkpoint.tensor(name), value, rtol=2**-8)


def test_any_bfloat16_bits_are_read_as_they_are_but_nan_is_made_quiet(tmp_path: Path) -> None:
    write_folder(tmp_path)
    bits = {}
    for name, value in weights().items():
        any_bits = np.arange(value.size) * 40503 % (1 << 16)  # NaNs among them
        bits[hf_name(name)] = "BF16", any_bits.astype(np.uint16).reshape(value.shape)
    save_safetensors(tmp_path / "model.safetensors", bits)
    with open_checkpoint(tmp_path) as checkpoint:
        found = checkpoint.bfloat16("embed").reshape(-1)
        assert np.array_equal(found, to_bfloat16(checkpoint.tensor("embed")).reshape(-1))
    kept = bits[hf_name("embed")][1].reshape(-1)
    quiet = np.flatnonzero(found != kept)
    assert quiet.size > 10
    assert (found[quiet] == kept[quiet] | 0x40).all() and ((kept[quiet] & 0x7F80) == 0x7F80).all()


def test_a_tied_head_that_is_the_embedding_is_left_out(tmp_path: Path) -> None:
    values = weights(dataclasses.replace(CONFIG, tied_embeddings=False))
    values["head"] = values["embed"]
    with open_checkpoint(write_folder(tmp_path, values)) as checkpoint:
        assert "head" not in checkpoint.tensor_names()


@pytest.mark.parametrize("where", [0, -1])
def test_a_tied_head_that_is_not_the_embedding_is_refused(tmp_path: Path, where: int) -> None:
    """transformers 5 would use it, and 4 the embedding: two models in one folder."""
    values = weights(dataclasses.replace(CONFIG, tied_embeddings=False))
    values["head"] = values["embed"].copy()
    values["head"][where, where] += 1
    with pytest.raises(ModelFormatError, match=r"tie_word_embeddings is set.*lm_head.*differs"):
        open_checkpoint(write_folder(tmp_path, values))
    values["head"] = values["embed"][:-1]
    with pytest.raises(ModelFormatError, match="differs"):
        open_checkpoint(write_folder(tmp_path, values))


def test_rope_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    named = {hf_name(name): value for name, value in weights().items()}
    named["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    write_folder(tmp_path)
    safetensors.numpy.save_file(named, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.tensor_names()) == 20


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]},
        {"dtype": 4, "shape": [16], "data_offsets": [0, 16]},
        ["F32"],
    ],
)
def test_bad_entries(tmp_path: Path, entry: object) -> None:
    folder = write_head(tmp_path, {"model.norm.weight": entry}, bytes(16))
    with pytest.raises(ModelFormatError, match="no safetensors file, or damaged"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("dtype", "count"), [("I8", 16), ("F4", 32)])
def test_other_dtypes_are_named(tmp_path: Path, dtype: str, count: int) -> None:
    entry = {"dtype": dtype, "shape": [count], "data_offsets": [0, 16]}
    with pytest.raises(UnsupportedModelError, match=rf"model\.norm\.weight.* type {dtype}"):
        open_checkpoint(write_head(tmp_path, {"model.norm.weight": entry}, bytes(16)))


@pytest.mark.parametrize("size", [3, 5 << 20, 1 << 63])
def test_bad_heads(tmp_path: Path, size: int) -> None:
    with pytest.raises(ModelFormatError):
        open_checkpoint(write_head(tmp_path, b"{}", size=size))


def test_shape_against_config(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"mlp\.gate_proj.*\[96, 64\].*\[97, 64\]"):
        open_checkpoint(write_folder(tmp_path, intermediate_size=97))


def test_missing_and_unknown_tensors(tmp_path: Path) -> None:
    values = weights()
    del values["layers.1.wo"]
    with pytest.raises(ModelFormatError, match=r"layers\.1\.wo.*missing"):
        open_checkpoint(write_folder(tmp_path, values))
    named = {hf_name(name): value for name, value in weights().items()}
    named["model.layers.0.self_attn.q_norm.weight"] = np.ones(16, np.float32)
    safetensors.numpy.save_file(named, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="q_norm"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", 7])
def test_index_cannot_point_elsewhere(tmp_path: Path, name: object) -> None:
    write_folder(tmp_path, shards=2)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ModelFormatError, match="not the name of a shard"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("lie", ["in the other shard", "in none", "in two"])
def test_an_index_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    write_folder(tmp_path, shards=2)
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    index = json.loads((tmp_path / INDEX).read_text())
    where = index["weight_map"]
    if lie == "in the other shard":
        where["model.norm.weight"] = {first: second, second: first}[where["model.norm.weight"]]
    elif lie == "in none":
        where["model.layers.0.self_attn.q_proj.bias"] = first
    else:
        named = safetensors.numpy.load_file(tmp_path / first)
        named |= safetensors.numpy.load_file(tmp_path / second)
        safetensors.numpy.save_file(named, tmp_path / first)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match=r"should be in|in another shard"):
        open_checkpoint(tmp_path)


def test_an_index_may_name_what_is_not_needed(tmp_path: Path) -> None:
    write_folder(tmp_path, shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    for name in ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"):
        index["weight_map"][name] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.tensor_names()) == 20


def test_shards_beside_a_whole_model_are_refused(tmp_path: Path) -> None:
    """transformers would read the file, and others the shards."""
    write_folder(tmp_path, weights(seed=1), shards=2)
    write_folder(tmp_path, weights(seed=2))
    with pytest.raises(ModelError, match="names other files"):
        open_checkpoint(tmp_path)


def test_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    write_folder(tmp_path, shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        open_checkpoint(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"0 \*\.safetensors"):
        open_checkpoint(tmp_path)


def test_a_lone_safetensors_file_is_explained(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with pytest.raises(ModelError, match="give the folder"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_truncated(tmp_path: Path) -> None:
    file = write_folder(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 4, 8, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelFormatError):
            open_checkpoint(tmp_path)
