"""A model's weights on disk, whatever the format: one interface, canonical names, float32.

`open.open_checkpoint` opens a `.gguf` file or a folder with `config.json`, `*.safetensors`
and `tokenizer.json`.  The checkpoint maps the files, and reads a tensor only on request.

Canonical names: `embed`, `layers.{i}.attn_norm`, `.wq .wk .wv .wo`, `.mlp_norm`,
`.w_gate .w_up .w_down`, `final_norm`, and `head` unless the embeddings are tied; in some families
also `.bq .bk .bv`, or `.q_norm .k_norm` (`config.tensor_shapes`).  Matrices are [out, in], and
queries and keys are in Hugging Face's order for rope (a head's first half, then its second half),
whatever the file's order is.

Files are not trusted.  Opening a file checks sizes, offsets, overlaps, names, and shapes against
the config.  There is no protection against another process that shortens a mapped file (the
operating system then sends SIGBUS).
"""

from __future__ import annotations

import abc
import math
import mmap
import re
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ostinato.driver.closeable import Closeable
from ostinato.driver.signature import to_bfloat16
from ostinato.errors import (
    ClosedError,
    InputError,
    ModelFormatError,
    UnsupportedModelError,
)
from ostinato.models.arguments import quoted, whole
from ostinato.models.config import LlamaConfig, tensor_shapes
from ostinato.models.files.dequantise import dequantise_rows
from ostinato.models.files.reading import forget, unmap

# Float32 values converted at a time: half a MiB, so that all passes over a block hit the L2 cache.
_BLOCK_VALUES = 1 << 17
# Values in one work item of a thread in `load`.
_PIECE_VALUES = 1 << 22
# The arrays that `load` fills, by canonical name: float32, or bfloat16's bits.
FloatArrays: TypeAlias = Mapping[str, "npt.NDArray[np.float32] | npt.NDArray[np.uint16]"]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as stored in a file.

    `name`: its name in the file.  `type`: "F32", "BF16", "Q4_1", ….  `shape`: [out, in], as
    returned by `tensor`.  `file`, `offset`, `size`: the place of its bytes, in bytes.  `heads`: the
    number of heads if its rows are in GGUF's interleaved order for rope, else 0.  `made`: its bytes
    are computed from other tensors, all at once, on each read; they have no place in the file.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size: int
    heads: int = 0
    made: bool = False

    @property
    def rows(self) -> int:
        """The number of rows; a vector has one."""
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def columns(self) -> int:
        """The number of values in a row."""
        return self.shape[-1]

    @property
    def together(self) -> int:
        """The number of rows that must be converted together: those of a head, which are reordered,
        all rows of a tensor that is `made`, else one."""
        if self.made:
            return self.rows
        return self.rows // self.heads if self.heads else 1


@dataclass(frozen=True, slots=True)
class GgufTokenizerSource:
    """A tokenizer stored in GGUF metadata."""

    path: Path
    metadata: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class JsonTokenizerSource:
    """A tokenizer stored in a folder: `tokenizer.json`, `tokenizer_config.json`."""

    path: Path


TokenizerSource = GgufTokenizerSource | JsonTokenizerSource


class Checkpoint(Closeable):
    """The weights of one model, from any source.

    `has_file`: True if the file or folder `path` exists.  `shapes` lists the tensors, and `load`
    fills arrays with their values.
    """

    has_file: bool = True

    def __init__(self, path: Path, config: LlamaConfig, tokenizer: TokenizerSource) -> None:
        self.path = path
        self.config = config
        self.tokenizer = tokenizer
        self._closed = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all tensors by canonical name, in the order of use."""
        return tensor_shapes(self.config)

    @abc.abstractmethod
    def load(self, into: FloatArrays, *, threads: int = 2) -> None:
        """Fills the arrays in `into`, by canonical name, on `threads` threads.

        A float32 array gets the values, a uint16 array their bits as bfloat16, rounded to nearest
        even.  Raises InputError, before anything is written, for an unknown name or an array that
        does not fit.
        """

    def close(self) -> None:
        """Frees the resources of the weights.  Idempotent."""
        self._closed = True

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.shapes())} tensors"
        return f"{type(self).__name__}({str(self.path)!r}, {state})"


class StoredCheckpoint(Checkpoint):
    """Weights stored as bytes, which `raw` describes; mostly those of mapped files, which the
    checkpoint owns: use `with`, or call `close`.

    Reading is thread-safe.  Arrays that the checkpoint returned stay valid after `close`.
    """

    def __init__(
        self,
        path: Path,
        config: LlamaConfig,
        tokenizer: TokenizerSource,
        tensors: Mapping[str, RawTensor],
        mapped: Mapping[Path, mmap.mmap] = MappingProxyType({}),
    ) -> None:
        super().__init__(path, config, tokenizer)
        self._tensors = dict(tensors)
        self._mapped = mapped
        self._scratch = _Scratch()

    def tensor_names(self) -> tuple[str, ...]:
        """Returns the canonical names, in the order of use."""
        return tuple(self._tensors)

    def raw(self, name: str) -> RawTensor:
        """Returns the description of a stored tensor.  Raises InputError for an unknown name."""
        try:
            return self._tensors[name]
        except KeyError:
            known = ", ".join(list(self._tensors)[:4])
            raise InputError(f"{self.path}: no tensor {name!r}; there are {known}, …") from None

    def stored(self, name: str) -> npt.NDArray[np.uint8]:
        """Returns the tensor's bytes in the file: flat, a read-only view of the map; for a tensor
        that is `made`, the bytes that `raw` describes.

        Raises InputError for an unknown name, ClosedError.
        """
        raw = self.raw(name)
        self._require_open()
        return self._bytes(raw)

    def packed(self, name: str, out: npt.NDArray[np.uint8]) -> None:
        """Fills `out`, uint8 [rows, bytes in a row], with the tensor's rows, packed as in the file,
        in the order of `tensor`.  Then releases the file's pages from this process's memory, which
        would otherwise hold the model twice.

        Raises InputError for an unknown name or an `out` that does not fit, ClosedError.
        """
        raw = self.raw(name)
        self._require_open()
        rows = self._bytes(raw).reshape(raw.rows, -1)
        if out.dtype != np.uint8 or out.shape != rows.shape:
            raise InputError(
                f"out for {name!r} is {out.dtype} {list(out.shape)}, must be uint8 "
                f"{list(rows.shape)}"
            )
        out[...] = _half_split(rows, raw.together) if raw.heads else rows
        self._forget(raw)

    def tensor(
        self, name: str, out: npt.NDArray[np.float32] | None = None
    ) -> npt.NDArray[np.float32]:
        """Returns the tensor's values: float32, C-contiguous, [out, in] or [size].

        `out`: a C-contiguous float32 array of the same shape to write into; it is returned.
        Raises InputError for an unknown name or an `out` that does not fit, ClosedError.
        """
        raw = self.raw(name)
        array = _destination(name, raw, out, np.dtype(np.float32))
        self._convert(raw, array)
        return array

    def bfloat16(
        self, name: str, out: npt.NDArray[np.uint16] | None = None
    ) -> npt.NDArray[np.uint16]:
        """Returns the tensor's values as bfloat16 bit patterns (uint16), rounded to nearest even.

        `out` and errors: see `tensor`.
        """
        raw = self.raw(name)
        array = _destination(name, raw, out, np.dtype(np.uint16))
        self._convert(raw, array)
        return array

    def load(self, into: FloatArrays, *, threads: int = 2) -> None:
        """Implements `Checkpoint.load`: a float32 array gets the result of `tensor`, a uint16 array
        that of `bfloat16`."""
        threads = whole(threads, "threads", 1)
        pieces = []
        for name, array in into.items():
            raw = self.raw(name)
            wanted = np.dtype(np.uint16 if array.dtype == np.uint16 else np.float32)
            out = _destination(name, raw, array, wanted)
            step = _rows_at_a_time(raw, _PIECE_VALUES)
            pieces += [(raw, out, start, start + step) for start in range(0, raw.rows, step)]
        # Large pieces first: a large one at the end would keep a single thread busy.
        pieces.sort(key=lambda piece: -piece[0].columns * min(piece[0].rows, piece[3] - piece[2]))
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda piece: self._convert(*piece), pieces):
                pass

    def close(self) -> None:
        """Unmaps the files.  Idempotent."""
        super().close()
        mapped, self._mapped = self._mapped, {}
        unmap(mapped.values())

    def _convert(
        self, raw: RawTensor, out: npt.NDArray[Any], first: int = 0, stop: int | None = None
    ) -> None:
        """Converts rows `first` to `stop` of a tensor into the same rows of `out` (float32, or
        uint16 for bfloat16), in blocks of rows; in whole heads if the file interleaves their rows.
        """
        self._require_open()
        source = self._bytes(raw).reshape(raw.rows, -1)
        target = out.reshape(raw.rows, raw.columns)
        step = _rows_at_a_time(raw, _BLOCK_VALUES)
        last = raw.rows if stop is None else min(stop, raw.rows)
        for start in range(first, last, step):
            rows = slice(start, min(start + step, last))
            block, into = source[rows], target[rows]
            if raw.heads:
                block = _half_split(block, raw.together)
            block = np.ascontiguousarray(block)  # a rank's share of columns is not
            if out.dtype == np.float32:
                dequantise_rows(raw.type, block, into)
            elif raw.type == "BF16":
                into[...] = block.view("<u2")
                _make_quiet(into)
            else:
                values, words = self._scratch.take(into.shape)
                dequantise_rows(raw.type, block, values)
                to_bfloat16(values, into, words)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.path}: the checkpoint was closed; open it again")

    def _bytes(self, raw: RawTensor) -> npt.NDArray[np.uint8]:
        """Returns the tensor's bytes, flat, as a view of the mapped file."""
        return np.frombuffer(self._mapped[raw.file], np.uint8, raw.size, raw.offset)

    def _forget(self, raw: RawTensor) -> None:
        """Releases the tensor's pages of a mapped file from this process's memory."""
        if raw.file in self._mapped:
            forget(self._mapped[raw.file], raw.offset, raw.size)


def check_tensors(
    config: LlamaConfig, found: Mapping[str, RawTensor], where: str
) -> dict[str, RawTensor]:
    """Returns `found` in the order of use, after comparing every shape with the config.

    Raises ModelFormatError for a missing tensor or a wrong shape, UnsupportedModelError for a
    tensor that the decoder would not use (to ignore it would give wrong answers).
    """
    shapes = tensor_shapes(config)
    for name, raw in found.items():
        if name not in shapes:
            raise UnsupportedModelError(
                f"{where}: tensor {quoted(raw.name)} has no place in a Llama decoder of "
                f"{config.layers} layers; this variant of the architecture is not supported"
            )
    for name, shape in shapes.items():
        tensor = found.get(name)
        if tensor is None:
            missing = sum(other not in found for other in shapes)
            raise ModelFormatError(f"{where}: tensor {name!r} is missing ({missing} in all)")
        if tensor.shape != shape:
            raise ModelFormatError(
                f"{where}: tensor {quoted(tensor.name)} has shape {list(tensor.shape)}, the config "
                f"says {list(shape)} ([out, in])"
            )
    return {name: found[name] for name in shapes}


def _make_quiet(halves: npt.NDArray[np.uint16]) -> None:
    """Sets the quiet bit of every NaN, as `to_bfloat16` does."""
    nan = (halves & np.uint16(0x7FFF)) > np.uint16(0x7F80)
    if nan.any():
        halves[nan] |= np.uint16(0x40)


class _Scratch(threading.local):
    """Working memory of one thread, kept because fresh pages for each block cost more than the
    conversion."""

    def __init__(self) -> None:
        self._floats, self._words = np.empty(0, np.float32), np.empty(0, np.uint32)

    def take(self, shape: tuple[int, ...]) -> tuple[npt.NDArray[np.float32], npt.NDArray[Any]]:
        """Returns float32 and uint32 arrays of this shape, with undefined values."""
        size = math.prod(shape)
        if self._floats.size < size:
            self._floats, self._words = np.empty(size, np.float32), np.empty(size, np.uint32)
        return self._floats[:size].reshape(shape), self._words[:size].reshape(shape)


def _rows_at_a_time(raw: RawTensor, values: int) -> int:
    """Returns the number of rows with about `values` values: a multiple of `raw.together`, and at
    least that many."""
    return max(1, values // (raw.together * raw.columns)) * raw.together


def _half_split(block: npt.NDArray[np.uint8], head: int) -> npt.NDArray[np.uint8]:
    """Reorders rows of whole heads from llama.cpp's interleaved rope order to the half-split order.

    llama.cpp's converter moved row `half * head/2 + pair` of a head to row `pair * 2 + half`.
    """
    pairs = block.reshape(-1, head // 2, 2, block.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(block.shape)


def _destination(
    name: str, raw: RawTensor, out: npt.NDArray[Any] | None, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    if out is None:
        return np.empty(raw.shape, dtype)
    if out.dtype != dtype or out.shape != raw.shape or not out.flags.c_contiguous:
        raise InputError(
            f"out for {name!r} is {out.dtype} {list(out.shape)}"
            f"{'' if out.flags.c_contiguous else ' (not C-contiguous)'}, must be C-contiguous "
            f"{dtype} {list(raw.shape)}"
        )
    return out


def name_in_layer(
    name: str, pattern: re.Pattern[str], in_layer: Mapping[str, str], path: Path
) -> str:
    """Returns the canonical name of a layer's tensor.

    `pattern` splits a file's name into the layer's number and the rest, `in_layer` maps the rest to
    the canonical one.  Raises UnsupportedModelError for any other name.
    """
    match = pattern.fullmatch(name)
    if match is None or match[2] not in in_layer:
        raise UnsupportedModelError(
            f"{path}: tensor {quoted(name)} has no place in a Llama decoder; this variant of the "
            "architecture is not supported (other biases, experts and adapters are not)"
        )
    return f"layers.{match[1]}.{in_layer[match[2]]}"
