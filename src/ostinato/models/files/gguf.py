"""GGUF files as checkpoints.

The head of a file is parsed here (`read_header`), and not by `gguf.GGUFReader`, which trusts the
file: with a false count it loops or allocates for minutes.  It also takes 2.5 s for the 98,000
strings of SmolLM2's tokenizer, this parser 0.1 s.  The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
llama.cpp's tensor names and row order are converted to ours.

A model in parts (llama-gguf-split) is several files, each with its share of the tensors.  The first
has the metadata; the others have only `split.no`, `split.count` and `split.tensors.count`.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ostinato.errors import ModelError, ModelFormatError, UnsupportedModelError
from ostinato.models.arguments import quoted
from ostinato.models.config import LlamaConfig
from ostinato.models.files.checkpoint import (
    GgufTokenizerSource,
    RawTensor,
    StoredCheckpoint,
    check_tensors,
    name_in_layer,
)
from ostinato.models.files.dequantise import BLOCK_TYPES, SUPPORTED_TYPES
from ostinato.models.files.reading import gguf_parts, map_file, unmap

_ROPE_FACTORS = "rope_freqs.weight"
_WHOLE = {
    "token_embd.weight": "embed",
    "output_norm.weight": "final_norm",
    "output.weight": "head",
}
_IN_LAYER = {
    "attn_norm.weight": "attn_norm",
    "attn_q.weight": "wq",
    "attn_k.weight": "wk",
    "attn_v.weight": "wv",
    "attn_q.bias": "bq",
    "attn_k.bias": "bk",
    "attn_v.bias": "bv",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "attn_output.weight": "wo",
    "ffn_norm.weight": "mlp_norm",
    "ffn_gate.weight": "w_gate",
    "ffn_up.weight": "w_up",
    "ffn_down.weight": "w_down",
}
_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_.]+)")
# Architectures whose queries and keys llama.cpp's converter reorders to interleaved rope pairs.
_INTERLEAVED = ("llama",)

# Bounds far above any published model; they keep the parsing of a hostile head under a second and
# 1 GiB.  Llama 3's head has 30 entries, 290 tensors, 408,000 strings in 8 MB.
_MAX_HEAD = 64 << 20
_MAX_ENTRIES = 1 << 12
_MAX_TENSORS = 1 << 14
_MAX_STRINGS = 1 << 20
_MAX_NUMBERS = 1 << 21
_MAX_NAME = 256
_MAX_DIMENSIONS = 4
_MAX_VALUES = 1 << 40

# Metadata types by number, equal to `gguf.GGUFValueType`.
_SCALARS = {
    number: struct.Struct(f"<{code}")
    for number, code in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_STRING, _ARRAY = 8, 9
_TYPE_NAMES = {found.number: name for name, found in BLOCK_TYPES.items()}
# Bytes read at a time of a long array of strings.
_WINDOW = 1 << 20
_U32, _U64 = _SCALARS[4], _SCALARS[10]


class GgufCheckpoint(StoredCheckpoint):
    """A mapped GGUF file, or all parts of a model, made by `open_gguf`."""


def open_gguf(path: Path) -> GgufCheckpoint:
    """Opens a GGUF file of an architecture that `LlamaConfig.from_gguf` supports; if it is a part
    of a model, all parts, which must lie beside it.  The checkpoint's path is the first part's.

    Raises ModelFormatError, UnsupportedModelError (see `read_header` and `check_tensors`),
    ModelError for a missing part, OSError.
    """
    mapped: dict[Path, mmap.mmap] = {}
    try:
        path, header = _read_headers(path, mapped)
        config = _config(header, mapped, path)
        tensors: dict[str, RawTensor] = {}
        interleaved = {}
        if header.metadata["general.architecture"] in _INTERLEAVED:
            interleaved = {"wq": config.heads, "wk": config.kv_heads}
        for entry in header.tensors:
            if entry.name != _ROPE_FACTORS:
                canonical = _WHOLE.get(entry.name) or name_in_layer(
                    entry.name, _LAYER_NAME, _IN_LAYER, entry.file
                )
                heads = interleaved.get(canonical.rpartition(".")[2], 0)
                tensors[canonical] = replace(entry, heads=heads)
        tensors = check_tensors(config, tensors, str(path))
        source = GgufTokenizerSource(path, header.metadata)
        return GgufCheckpoint(path, config, source, tensors, mapped)
    except BaseException:
        unmap(mapped.values())
        raise


def _read_headers(path: Path, mapped: dict[Path, mmap.mmap]) -> tuple[Path, GgufHeader]:
    """Maps the file, or all parts of its model, into `mapped`.  Returns the path of the first part,
    and its metadata with the tensors of all."""

    def read(file: Path) -> GgufHeader:
        mapped[file] = map_file(file)
        with memoryview(mapped[file]) as data:
            return read_header(data, file)

    given = read(path)
    count, total = (given.metadata.get(f"split.{key}") for key in ("count", "tensors.count"))
    if count in (None, 0, 1):  # 0: parts that llama-gguf-split joined
        return path, given
    names = gguf_parts(path.name)
    if len(names) != count:
        raise ModelFormatError(
            f"{path}: it is one of {quoted(count)} parts of a model, which are found by their "
            "names; give it its own name back, such as model-00001-of-00003.gguf"
        )
    parts: dict[Path, GgufHeader] = {}
    tensors: dict[str, RawTensor] = {}
    for number, file in enumerate(map(path.with_name, names)):
        if not file.is_file():
            raise ModelError(
                f"{file}: it is missing; all {count} parts of the model must lie in one folder"
            )
        part = parts[file] = given if file == path else read(file)
        first = next(iter(parts.values()))
        shared = first.metadata.keys() & part.metadata.keys() - {"general.alignment"}
        wanted = {key: first.metadata[key] for key in shared}
        wanted |= {"split.no": number, "split.count": count, "split.tensors.count": total}
        for key, value in wanted.items():
            if part.metadata.get(key) != value:
                raise ModelFormatError(
                    f"{file}: {quoted(key)} is {quoted(part.metadata.get(key))}, must be "
                    f"{quoted(value)}: it is another part than number {number + 1}, or of another "
                    f"model than {path.name}"
                )
        for entry in part.tensors:
            if entry.name in tensors:
                other = tensors[entry.name].file
                raise ModelFormatError(
                    f"{file}: tensor {quoted(entry.name)} is in {other.name} too"
                )
            tensors[entry.name] = entry
    if len(tensors) != total:
        raise ModelFormatError(
            f"{path}: all parts together have {len(tensors)} tensors, split.tensors.count is "
            f"{quoted(total)}; fetch them again"
        )
    file, first = next(iter(parts.items()))
    return file, replace(first, tensors=tuple(tensors.values()))


def _config(header: GgufHeader, mapped: Mapping[Path, mmap.mmap], path: Path) -> LlamaConfig:
    by_name = {entry.name: entry for entry in header.tensors}
    embed = by_name.get("token_embd.weight")
    factors = by_name.get(_ROPE_FACTORS)
    return LlamaConfig.from_gguf(
        header.metadata,
        # Without an embedding, `from_gguf` refuses the architecture by name, or `check_tensors`
        # names the missing tensor: both are better than an error here.
        vocabulary=1 if embed is None else embed.shape[0],
        tied_embeddings="output.weight" not in by_name,
        rope_factors=None if factors is None else _factors(factors, mapped[factors.file]),
        where=str(path),
    )


def _factors(entry: RawTensor, mapped: mmap.mmap) -> tuple[float, ...]:
    if entry.type != "F32" or len(entry.shape) != 1 or entry.shape[0] > 1 << 10:
        raise ModelFormatError(
            f"{entry.file}: {_ROPE_FACTORS} is {entry.type} {list(entry.shape)}, must be an F32 "
            "vector"
        )
    return tuple(np.frombuffer(mapped, "<f4", entry.shape[0], entry.offset).tolist())


# ----------------------------------------------------------------------------------------- the head


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The head of a file, which precedes the tensors' data.

    Metadata values are int, float, bool, str, or a list of one of these types.
    """

    metadata: dict[str, object]
    tensors: tuple[RawTensor, ...]


def read_header(data: memoryview, path: Path) -> GgufHeader:
    """Parses the head of a GGUF file; `data` is the whole file.

    Raises ModelFormatError (with the byte where parsing stopped) if the head is damaged, or if
    tensors overlap or exceed the file; UnsupportedModelError for another version, a big-endian
    file, or a tensor type that is not one of SUPPORTED_TYPES.
    """
    cursor = _Cursor(data[:_MAX_HEAD], path)
    if bytes(data[:4]) != b"GGUF":
        raise ModelFormatError(f"{path}: not a GGUF file: it begins with {quoted(bytes(data[:4]))}")
    cursor.position = 4
    version = cursor.u32("version")
    if version not in (2, 3):
        # A big-endian file's 3 reads as 3 << 24.
        kind = "a big-endian file" if version & 0xFFFF == 0 and version else f"version {version}"
        raise UnsupportedModelError(
            f"{path}: {kind} of GGUF is not supported; supported: versions 2 and 3, little-endian"
        )
    tensor_count = cursor.count("tensor count", _MAX_TENSORS, 24)
    entry_count = cursor.count("metadata count", _MAX_ENTRIES, 13)
    metadata: dict[str, object] = {}
    for _ in range(entry_count):
        key = cursor.text("metadata key", _MAX_NAME)
        if key in metadata:
            raise cursor.damaged(f"metadata key {quoted(key)} is there twice")
        metadata[key] = cursor.value(cursor.u32(f"type of {quoted(key)}"), key)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16 or alignment % 8:
        raise cursor.damaged(f"general.alignment is {quoted(alignment)}, must be a multiple of 8")
    entries = [cursor.tensor() for _ in range(tensor_count)]
    start = -(-cursor.position // alignment) * alignment
    tensors = tuple(replace(entry, offset=start + entry.offset) for entry in entries)
    _check_extents(tensors, alignment, data.nbytes, cursor)
    return GgufHeader(metadata, tensors)


def _check_extents(
    tensors: Iterable[RawTensor], alignment: int, size: int, cursor: _Cursor
) -> None:
    names: set[str] = set()
    previous: RawTensor | None = None
    for tensor in sorted(tensors, key=lambda t: t.offset):
        if tensor.name in names:
            raise cursor.damaged(f"tensor {quoted(tensor.name)} is there twice")
        names.add(tensor.name)
        if tensor.offset % alignment:
            raise cursor.damaged(
                f"tensor {quoted(tensor.name)} begins at {tensor.offset}, not a multiple of "
                f"{alignment}"
            )
        if tensor.offset + tensor.size > size:
            raise ModelFormatError(
                f"{cursor.path}: tensor {quoted(tensor.name)} needs bytes {tensor.offset} to "
                f"{tensor.offset + tensor.size}, the file ends at {size}; it was cut short, fetch "
                "it again"
            )
        if previous is not None and previous.offset + previous.size > tensor.offset:
            raise cursor.damaged(
                f"tensors {quoted(previous.name)} and {quoted(tensor.name)} overlap"
            )
        previous = tensor


class _Cursor:
    """A forward reader of the head that never reads past its end."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data = data
        self.path = path
        self.position = 0
        self._end = data.nbytes
        self._strings_left = _MAX_STRINGS
        self._numbers_left = _MAX_NUMBERS

    def damaged(self, what: str) -> ModelFormatError:
        return ModelFormatError(
            f"{self.path}: damaged GGUF head before byte {self.position}: {what}"
        )

    def take(self, size: int, what: str) -> int:
        """Moves past the next `size` bytes; returns the position where they begin."""
        begin = self.position
        if size > self._end - begin:
            raise self.damaged(
                f"{what} needs {size} bytes, {self._end - begin} are left (of a head of at most "
                f"{_MAX_HEAD >> 20} MiB)"
            )
        self.position = begin + size
        return begin

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self.take(8, what))[0]
        return value

    def count(self, what: str, limit: int, smallest: int) -> int:
        """Reads a count of items of at least `smallest` bytes; checks it against `limit` and the
        bytes left."""
        value = self.u64(what)
        if value > min(limit, (self._end - self.position) // smallest):
            raise self.damaged(f"{what} is {value}, more than this file can hold or than {limit}")
        return value

    def text(self, what: str, limit: int = 1 << 22) -> str:
        size = self.u64(f"length of {what}")
        if size > limit:
            raise self.damaged(f"{what} is {size} bytes long, more than {limit}")
        begin = self.take(size, what)
        try:
            return str(self.data[begin : self.position], "utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is not UTF-8: {error.reason}") from None

    def value(self, kind: int, key: str) -> object:
        if kind == _STRING:
            return self.text(f"value of {quoted(key)}")
        if kind == _ARRAY:
            return self._array(key)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self.damaged(f"{quoted(key)} has the unknown type {kind}")
        value: object = scalar.unpack_from(
            self.data, self.take(scalar.size, f"value of {quoted(key)}")
        )[0]
        return value

    def _array(self, key: str) -> list[object]:
        kind = self.u32(f"element type of {quoted(key)}")
        if kind == _STRING:
            count = self.count(f"length of {quoted(key)}", self._strings_left, 8)
            self._strings_left -= count
            return self._texts(count, key)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self.damaged(
                f"{quoted(key)} is an array of type {kind}, which is not a plain value"
            )
        count = self.count(f"length of {quoted(key)}", self._numbers_left, scalar.size)
        self._numbers_left -= count
        begin = self.take(count * scalar.size, key)
        code = scalar.format.lstrip("<")
        return list(struct.unpack_from(f"<{count}{code}", self.data, begin))

    def _texts(self, count: int, key: str) -> list[object]:
        """Reads `count` strings.  With 100,000 strings and more this is the hot loop of opening a
        model, so it reads windows as `bytes`, which are three times as fast as a memoryview."""
        texts: list[object] = []
        while len(texts) < count:
            window = bytes(self.data[self.position : self.position + _WINDOW])
            used = self._texts_of(window, count - len(texts), texts, key)
            if not used:  # the string is longer than a window, or the head ends in it
                texts.append(self.text(f"string {len(texts)} of {quoted(key)}"))
            self.position += used
        return texts

    def _texts_of(self, window: bytes, count: int, texts: list[object], key: str) -> int:
        """Appends up to `count` strings that lie wholly in the window; returns their bytes."""
        position, end = 0, len(window)
        length_at: Callable[[bytes, int], tuple[int]] = _U64.unpack_from
        add = texts.append
        try:
            for _ in range(count):
                begin = position + 8
                if begin > end:
                    break
                stop = begin + length_at(window, position)[0]
                if stop > end:
                    break
                add(window[begin:stop].decode())
                position = stop
        except UnicodeDecodeError as error:
            raise self.damaged(
                f"string {len(texts)} of {quoted(key)} is not UTF-8: {error.reason}"
            ) from None
        return position

    def tensor(self) -> RawTensor:
        """Reads one tensor's entry; its offset is relative to the start of the tensors' data."""
        name = self.text("tensor name", _MAX_NAME)
        shown = quoted(name)
        dimensions = self.u32(f"dimensions of {shown}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self.damaged(f"tensor {shown} has {dimensions} dimensions")
        shape = tuple(self.u64(f"shape of {shown}") for _ in range(dimensions))
        if 0 in shape or math.prod(shape) > _MAX_VALUES:
            raise self.damaged(f"tensor {shown} has the impossible shape {list(shape)}")
        number = self.u32(f"type of {shown}")
        offset = self.u64(f"offset of {shown}")
        kind = _TYPE_NAMES.get(number)
        if kind is None:
            raise UnsupportedModelError(
                f"{self.path}: tensor {shown} is of type {_type_name(number)}, which is not "
                f"supported; supported: {', '.join(SUPPORTED_TYPES)}"
            )
        layout = BLOCK_TYPES[kind]
        if shape[0] % layout.values:
            raise self.damaged(
                f"tensor {shown} has rows of {shape[0]}, which {kind} cannot cut into blocks "
                f"of {layout.values}"
            )
        nbytes = math.prod(shape) // layout.values * layout.size
        return RawTensor(name, kind, shape[::-1], self.path, offset, nbytes)  # GGUF has [in, out]


def _type_name(number: int) -> str:
    from gguf.constants import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(number).name)
    except ValueError:
        return str(number)
