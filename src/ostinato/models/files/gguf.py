"""GGUF files as checkpoints: llama.cpp's tensor names and row order turned into ours."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ostinato.errors import ModelFormatError, UnsupportedModelError
from ostinato.models.arguments import quoted
from ostinato.models.config import LlamaConfig
from ostinato.models.files.checkpoint import (
    Checkpoint,
    GgufTokenizerSource,
    RawTensor,
    check_tensors,
)
from ostinato.models.files.dequantise import dequantise_rows
from ostinato.models.files.gguf_header import GgufHeader, GgufTensor, read_header
from ostinato.models.files.reading import forget, map_file, unmap

__all__ = ["GgufCheckpoint", "open_gguf"]

_ROPE_FACTORS = "rope_freqs.weight"
_WHOLE = {
    "token_embd.weight": "embed",
    "output_norm.weight": "final_norm",
    "output.weight": "head",
}
_IN_LAYER = {
    "attn_norm": "attn_norm",
    "attn_q": "wq",
    "attn_k": "wk",
    "attn_v": "wv",
    "attn_output": "wo",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "w_gate",
    "ffn_up": "w_up",
    "ffn_down": "w_down",
}
_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.weight")


class GgufCheckpoint(Checkpoint):
    """A mapped GGUF file.  Made by `open_gguf`."""

    def __init__(
        self,
        path: Path,
        config: LlamaConfig,
        tokenizer: GgufTokenizerSource,
        tensors: dict[str, RawTensor],
        mapped: mmap.mmap,
    ) -> None:
        super().__init__(path, config, tokenizer, tensors)
        self._mapped: mmap.mmap | None = mapped

    def _bytes(self, raw: RawTensor) -> npt.NDArray[np.uint8]:
        assert self._mapped is not None, "the base class refuses to read once closed"
        return np.frombuffer(self._mapped, np.uint8, raw.size, raw.offset)

    def _decode(
        self, kind: str, block: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]
    ) -> None:
        dequantise_rows(kind, block, out)

    def _forget(self, raw: RawTensor) -> None:
        assert self._mapped is not None, "the base class refuses to read once closed"
        forget(self._mapped, raw.offset, raw.size)

    def _unmap(self) -> None:
        mapped, self._mapped = self._mapped, None
        unmap(mapped)


def open_gguf(path: Path) -> GgufCheckpoint:
    """Open a GGUF file of the Llama architecture.

    Raises ModelFormatError, UnsupportedModelError (see `read_header` and `check_tensors`), OSError.
    """
    mapped = map_file(path)
    try:
        with memoryview(mapped) as data:
            header = read_header(data, path)
            config = _config(header, data, path)
        tensors: dict[str, RawTensor] = {}
        for entry in header.tensors:
            if entry.name != _ROPE_FACTORS:
                canonical = _canonical(entry.name, path)
                heads = {"wq": config.heads, "wk": config.kv_heads}.get(
                    canonical.rpartition(".")[2], 0
                )
                tensors[canonical] = RawTensor(
                    entry.name, entry.type, entry.shape, path, entry.offset, entry.size, heads
                )
        tensors = check_tensors(config, tensors, str(path))
        source = GgufTokenizerSource(path, header.metadata)
        return GgufCheckpoint(path, config, source, tensors, mapped)
    except BaseException:
        unmap(mapped)
        raise


def _canonical(name: str, path: Path) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        raise UnsupportedModelError(
            f"{path}: tensor {quoted(name)} has no place in a Llama decoder; this variant of the "
            "architecture is not supported (biases, experts and adapters are not)"
        )
    return f"layers.{match[1]}.{_IN_LAYER[match[2]]}"


def _config(header: GgufHeader, data: memoryview, path: Path) -> LlamaConfig:
    by_name = {entry.name: entry for entry in header.tensors}
    embed = by_name.get("token_embd.weight")
    factors = by_name.get(_ROPE_FACTORS)
    return LlamaConfig.from_gguf(
        header.metadata,
        # Without the embedding `check_tensors` will say what is missing, or, before it, the
        # architecture is refused by name: both say more than this function could.
        vocabulary=1 if embed is None else embed.shape[0],
        tied_embeddings="output.weight" not in by_name,
        rope_factors=None if factors is None else _factors(factors, data, path),
        where=str(path),
    )


def _factors(entry: GgufTensor, data: memoryview, path: Path) -> tuple[float, ...]:
    if entry.type != "F32" or len(entry.shape) != 1 or entry.shape[0] > 1 << 10:
        raise ModelFormatError(
            f"{path}: {_ROPE_FACTORS} is {entry.type} {list(entry.shape)}, must be an F32 vector"
        )
    values = np.frombuffer(bytes(data[entry.offset : entry.offset + entry.size]), "<f4")
    return tuple(values.tolist())
