"""Hugging Face folders as checkpoints: config.json, one or many *.safetensors, tokenizer.json.

Quantised matrices are converted to GGUF's types on reading (`quantised`).

The package `safetensors` reads the heads alone: it has no bfloat16 for NumPy, and copies tensors.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from ostinato.errors import ModelError, ModelFormatError, UnsupportedModelError
from ostinato.models.arguments import quoted, shown
from ostinato.models.config import LlamaConfig
from ostinato.models.files.checkpoint import (
    JsonTokenizerSource,
    RawTensor,
    StoredCheckpoint,
    check_tensors,
    name_in_layer,
)
from ostinato.models.files.quantised import Quantisation
from ostinato.models.files.reading import MAX_JSON, forget, map_file, open_file, read_json, unmap

SUPPORTED_DTYPES = ("F32", "F16", "BF16")

_COMPARED = 1 << 22  # bytes compared at a time
_INDEX = "model.safetensors.index.json"

_WHOLE = {
    "model.embed_tokens.weight": "embed",
    "model.norm.weight": "final_norm",
    "lm_head.weight": "head",
}
_IN_LAYER = {
    "input_layernorm.weight": "attn_norm",
    "self_attn.q_proj.weight": "wq",
    "self_attn.k_proj.weight": "wk",
    "self_attn.v_proj.weight": "wv",
    "self_attn.q_proj.bias": "bq",
    "self_attn.k_proj.bias": "bk",
    "self_attn.v_proj.bias": "bv",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "self_attn.o_proj.weight": "wo",
    "post_attention_layernorm.weight": "mlp_norm",
    "mlp.gate_proj.weight": "w_gate",
    "mlp.up_proj.weight": "w_up",
    "mlp.down_proj.weight": "w_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.([a-z_.]+)")
# Old checkpoints store the rope frequencies, which the config determines.
_IGNORED = re.compile(r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq")


class SafetensorsCheckpoint(StoredCheckpoint):
    """A folder of mapped safetensors files, made by `open_folder`."""

    def __init__(
        self,
        path: Path,
        config: LlamaConfig,
        tensors: dict[str, RawTensor],
        mapped: dict[Path, mmap.mmap],
        quantisation: Quantisation | None = None,
        parts: Mapping[str, Mapping[str, RawTensor]] | None = None,
    ) -> None:
        super().__init__(path, config, JsonTokenizerSource(path), tensors, mapped)
        self._quantisation, self._parts = quantisation, parts or {}

    def _bytes(self, raw: RawTensor) -> npt.NDArray[np.uint8]:
        if raw.made:
            assert self._quantisation is not None
            return self._quantisation.bytes_of(raw, self._parts[raw.name], self._bytes)
        return super()._bytes(raw)

    def _forget(self, raw: RawTensor) -> None:
        for part in self._parts[raw.name].values() if raw.made else (raw,):
            super()._forget(part)


def open_folder(path: Path) -> SafetensorsCheckpoint:
    """Opens a folder with config.json and model.safetensors, or shards and their index.

    Raises ModelError if a file is missing, ModelFormatError if one is damaged or contradicts the
    others, UnsupportedModelError for another architecture or dtype, OSError.
    """
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ModelError(
            f"{path}: no config.json; a model folder has config.json and *.safetensors"
        )
    values = read_json(config_file)
    quantisation = Quantisation.from_hf(
        values.pop("quantization_config", None), where=str(config_file)
    )
    config = LlamaConfig.from_hf(values, where=str(config_file))
    mapped: dict[Path, mmap.mmap] = {}
    try:
        found = _Found(config, quantisation)
        files, indexed = _shards(path)
        for file in files:
            mapped[file] = map_file(file)
            _read_shard(file, found)
        found.require_places(indexed, path / _INDEX)
        tensors = check_tensors(config, found.with_made(), str(path))
        if found.tied_head is not None:
            _require_tied(found.tied_head, tensors["embed"], mapped, config_file)
        return SafetensorsCheckpoint(path, config, tensors, mapped, quantisation, found.parts)
    except BaseException:
        unmap(mapped.values())
        raise


def _require_tied(
    head: RawTensor, embed: RawTensor, mapped: Mapping[Path, mmap.mmap], config_file: Path
) -> None:
    """Raises ModelFormatError unless a head in the files equals the embedding, as config.json says:
    otherwise some readers would use the head, and others the embedding."""
    same = (head.type, head.shape, embed.made) == (embed.type, embed.shape, False)
    for start in range(0, head.size if same else 0, _COMPARED):
        size = min(_COMPARED, head.size - start)
        one, other = (
            np.frombuffer(mapped[raw.file], np.uint8, size, raw.offset + start)
            for raw in (head, embed)
        )
        same = same and np.array_equal(one, other)
    if not same:
        raise ModelFormatError(
            f"{config_file}: tie_word_embeddings is set, and {quoted(head.name)} in "
            f"{head.file.name} differs from {quoted(embed.name)}; set it to false if the model "
            "has a head of its own, or leave that tensor out"
        )
    for raw in (head, embed):
        forget(mapped[raw.file], raw.offset, raw.size)


def _shards(path: Path) -> tuple[list[Path], Mapping[str, str]]:
    """Returns the safetensors files of a folder, those in its index or the only one, and the
    index's map from tensors to file names, empty without an index."""
    index, single = path / _INDEX, path / "model.safetensors"
    if not index.exists():
        files = sorted(path.glob("*.safetensors"))
        if single in files:
            return [single], {}
        if len(files) != 1:
            raise ModelError(
                f"{path}: {len(files)} *.safetensors files and no {_INDEX}; there must be one file "
                "or an index"
            )
        return files, {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise ModelFormatError(f"{index}: weight_map is missing")
    names = set()
    for name in weight_map.values():
        # A shard must be a plain file of this folder: "../" would read other files.
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,200}\.safetensors", name):
            raise ModelFormatError(f"{index}: {quoted(name)} is not the name of a shard")
        names.add(name)
    for name in sorted(names):
        if not (path / name).is_file():
            raise ModelError(f"{path}: shard {name} is missing; fetch the model again")
    if single.name not in names and single.exists():
        raise ModelError(
            f"{path}: {single.name} is there, and {_INDEX} names other files; delete what is not "
            "the model's"
        )
    return [path / name for name in sorted(names)], weight_map


class _Found:
    """The tensors of all files by canonical name, and those of quantised matrices by part."""

    def __init__(self, config: LlamaConfig, quantisation: Quantisation | None) -> None:
        self.config, self.quantisation = config, quantisation
        self.tensors: dict[str, RawTensor] = {}
        self.tied_head: RawTensor | None = None
        """The head in the files, if any, of a model whose config ties it to the embedding."""
        self._files: dict[str, str] = {}
        self._by_name: dict[str, dict[str, RawTensor]] = {}
        self.parts: dict[str, dict[str, RawTensor]] = {}
        """The tensors of quantised matrices, by the name of the converted matrix, then by part."""

    def add(self, entry: RawTensor, path: Path) -> None:
        name, part = entry.name, ""
        self._files.setdefault(name, path.name)
        if self.quantisation is not None:
            part = next((end for end in self.quantisation.parts if name.endswith(end)), "")
            # A plain weight beside quantised ones is a matrix that was not quantised.
            if part == ".weight" and entry.type in SUPPORTED_DTYPES:
                part = ""
        canonical = _canonical(f"{name.removesuffix(part)}.weight" if part else name, path)
        if canonical is None:
            return
        if canonical == "head" and self.config.tied_embeddings:
            self.tied_head = entry
            return
        if part:
            into, key = self._by_name.setdefault(canonical, {}), part
        else:
            into, key = self.tensors, canonical
            if entry.type not in SUPPORTED_DTYPES:
                raise _unsupported(path, entry.name, entry.type)
        if key in into:
            raise ModelFormatError(f"{path}: tensor {quoted(entry.name)} is in another shard too")
        into[key] = entry

    def require_places(self, indexed: Mapping[str, str], index: Path) -> None:
        """Raises ModelFormatError for a tensor that is not in the file that the index names."""
        for name, file in indexed.items():
            found = self._files.get(name)
            left_out = self.config.tied_embeddings and _WHOLE.get(name) == "head"
            if _IGNORED.fullmatch(name) or (found is None and left_out):
                continue
            if found != file:
                raise ModelFormatError(
                    f"{index}: tensor {quoted(name)} should be in {file}, and is in "
                    f"{found or 'none of the files'}; fetch the model again"
                )

    def with_made(self) -> dict[str, RawTensor]:
        """Returns all tensors, with one for each quantised matrix.  Raises ModelFormatError."""
        made = dict(self.tensors)
        for canonical, parts in self._by_name.items():
            assert self.quantisation is not None
            one = next(iter(parts.values()))
            if canonical in made:
                raise ModelFormatError(
                    f"{one.file}: {quoted(one.name)}: the weight is there quantised and plain"
                )
            made[canonical] = matrix = self.quantisation.made(parts)
            self.parts[matrix.name] = parts
        return made


def _read_shard(path: Path, found: _Found) -> None:
    """Adds the tensors of a file, whose head `safetensors` reads and checks: the tensors have the
    sizes of their shapes, and fill the file without gaps."""
    with open_file(path) as raw:
        size = int.from_bytes(raw.read(8), "little")
    if size > MAX_JSON:
        raise ModelFormatError(f"{path}: the head is {size} bytes long, more than {MAX_JSON}")
    try:
        with safe_open(path, "np") as file:
            slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
            described = [(name, one.get_dtype(), one.get_shape()) for name, one in slices]
    except SafetensorError as error:
        raise ModelFormatError(
            f"{path}: {shown(str(error), 100)}; it is no safetensors file, or damaged: fetch it "
            "again"
        ) from None
    at = 8 + size
    for name, kind, shape in described:
        if kind not in _SIZES:
            raise _unsupported(path, name, kind)
        entry = RawTensor(name, kind, tuple(shape), path, at, math.prod(shape) * _SIZES[kind])
        found.add(entry, path)
        at += entry.size


def _unsupported(path: Path, name: str, kind: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path}: tensor {quoted(name)} is of type {kind}, which is not supported; supported: "
        f"{', '.join(SUPPORTED_DTYPES)}"
    )


# Bytes a value of the dtypes whose places are known, also of unsupported ones.
_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


def _canonical(name: str, path: Path) -> str | None:
    """Returns a tensor's canonical name; None if the tensor is not needed."""
    if name in _WHOLE:
        return _WHOLE[name]
    if _IGNORED.fullmatch(name):
        return None
    return name_in_layer(name, _LAYER_NAME, _IN_LAYER, path)
