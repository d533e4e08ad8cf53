"""The file around a manifest: a zip without compression, with code and tensors beside it.

    manifest.json           what `format` describes
    manifest.sha256         the digest of manifest.json
    code/<digest>           images of kernels, each by the SHA-256 of its bytes
    tensors.safetensors     constants, inputs, and the results of the check

A store keeps the code of many graphs in one folder beside them.  Every byte is compared with a
digest when it is read.  Only files that belong to this user, and that nobody else may write, are
read: a graph file is a program.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ostinato.errors import GraphFileError
from ostinato.files import TEMPORARY_PREFIX, UntrustedError, open_regular, replace_file
from ostinato.graph.disk.format import GraphManifest, parse, to_json

__all__ = ["Contents", "open_file", "read_tensors", "tensor_bytes", "write_file"]

_MANIFEST, _DIGEST, _TENSORS, _CODE = (
    "manifest.json",
    "manifest.sha256",
    "tensors.safetensors",
    "code/",
)
_ENTRY = re.compile(r"manifest\.json|manifest\.sha256|tensors\.safetensors|code/[0-9a-f]{64}")
_MOST_MANIFEST = 1 << 28
_MOST_CODE = 1 << 31
_MOST_ENTRIES = 1 << 16
_MOST_HEADER = 1 << 26


class Contents:
    """An open graph file: its manifest, and code and tensors when they are asked for."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, code: Path | None) -> None:
        self.path = path
        self._archive = archive
        self._folder = code
        self._sizes = _sizes(archive)
        raw = self._read(_MANIFEST, _MOST_MANIFEST)
        if self._read(_DIGEST, 64).decode("ascii", "replace") != _digest(raw):
            raise GraphFileError("the manifest is not what its digest says")
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise GraphFileError(f"its manifest cannot be read ({error})") from None
        self.manifest: GraphManifest = parse(data)

    def code(self, digest: str) -> bytes:
        """An image, from the file or from the store's folder."""
        name = _CODE + digest
        if name in self._sizes:
            data = self._read(name, _MOST_CODE)
        elif self._folder is not None:
            try:
                with open_regular(self._folder / digest, private=True) as file:
                    data = file.read(_MOST_CODE)
            except (OSError, UntrustedError) as error:
                raise GraphFileError(f"the code {digest[:12]}… is not there ({error})") from None
        else:
            raise GraphFileError(f"the code {digest[:12]}… is not in it")
        if _digest(data) != digest:
            raise GraphFileError(f"the code {digest[:12]}… is not what its digest says")
        return data

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """The tensors by name."""
        if not self.manifest.tensors:
            return {}
        data = self._read(_TENSORS, 1 << 62)
        if _digest(data) != self.manifest.tensors:
            raise GraphFileError("its tensors are not what their digest says")
        return read_tensors(data)

    def _read(self, name: str, most: int) -> bytes:
        size = self._sizes.get(name)
        if size is None:
            raise GraphFileError(f"it has no {name}")
        if size > most:
            raise GraphFileError(f"its {name} has {size} bytes, and at most {most} are read")
        try:
            with self._archive.open(name) as file:
                data = file.read(size + 1)
        except (ValueError, struct.error, RuntimeError) as error:
            raise GraphFileError(f"its {name} cannot be read ({error})") from None
        if len(data) != size:
            raise GraphFileError(f"its {name} is cut off")
        return data


def _sizes(archive: zipfile.ZipFile) -> dict[str, int]:
    """The entries by name.  Raises GraphFileError for any that do not belong there."""
    entries = archive.infolist()
    if len(entries) > _MOST_ENTRIES:
        raise GraphFileError(f"it has {len(entries)} entries")
    sizes: dict[str, int] = {}
    for entry in entries:
        if not _ENTRY.fullmatch(entry.filename) or entry.filename in sizes:
            raise GraphFileError(f"its entry {entry.filename[:80]!r} does not belong there")
        plain = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1
        if not plain or entry.compress_size != entry.file_size:
            raise GraphFileError(f"its entry {entry.filename} is compressed or encrypted")
        sizes[entry.filename] = entry.file_size
    return sizes


@contextmanager
def open_file(path: Path, code: Path | None = None) -> Iterator[Contents]:
    """Opens a graph file; `code` is the store's folder of images.  Raises GraphFileError."""
    try:
        with (
            open_regular(path, private=True) as file,
            _archive(file) as archive,
        ):
            yield Contents(path, archive, code)
    except GraphFileError as error:
        raise _of_file(path, str(error)) from None
    except FileNotFoundError:
        raise _of_file(path, "there is no such file") from None
    except UntrustedError as error:
        raise _of_file(path, f"{error}; a graph file is a program, so chmod go-w it") from None
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError) as error:
        raise _of_file(path, f"it cannot be read ({error})") from None


def _of_file(path: Path, why: str) -> GraphFileError:
    return GraphFileError(f"{path}: {why}" if not why.startswith(str(path)) else why)


def _archive(file: BinaryIO) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError):
        raise
    except Exception as error:  # zipfile lets struct's and the codecs' errors through
        raise GraphFileError(f"it is no zip file ({error})") from None


def write_file(
    path: Path,
    manifest: GraphManifest,
    code: Mapping[str, bytes],
    tensors: Mapping[str, npt.NDArray[Any]],
    folder: Path | None,
) -> None:
    """Writes a graph file, in place of an older one; images go to `folder` if there is one.

    Raises GraphFileError if it cannot be written; then the old file is as it was.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
    try:
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for digest, data in code.items():
                if not (folder / digest).exists():
                    replace_file(folder / digest, data, private=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            if tensors:
                digest = _write_tensors(archive, tensors)
                manifest = replace(manifest, tensors=digest)
            raw = json.dumps(to_json(manifest), separators=(",", ":")).encode()
            archive.writestr(_MANIFEST, raw)
            archive.writestr(_DIGEST, _digest(raw))
            for digest, data in code.items() if folder is None else ():
                archive.writestr(_CODE + digest, data)
        temporary.replace(path)
    except OSError as error:
        raise GraphFileError(f"{path} cannot be written ({error}); nothing was saved") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---------------------------------------------------------------------------------------- tensors

# safetensors' names of types.  Whatever has none is written as bytes (the manifest has its type).
_TYPES = {
    np.dtype(t): n
    for n, t in {
        "BOOL": "?",
        "U8": "u1",
        "I8": "i1",
        "U16": "<u2",
        "I16": "<i2",
        "F16": "<f2",
        "U32": "<u4",
        "I32": "<i4",
        "F32": "<f4",
        "U64": "<u8",
        "I64": "<i8",
        "F64": "<f8",
    }.items()
}
_NAMES = {name: dtype for dtype, name in _TYPES.items()} | {"BF16": np.dtype("<u2")}


def tensor_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of an array, flat."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _header(tensors: Mapping[str, npt.NDArray[Any]]) -> bytes:
    header: dict[str, object] = {}
    at = 0
    for name, array in tensors.items():
        kind = _TYPES.get(array.dtype)
        shape = list(array.shape) if kind is not None else [array.nbytes]
        header[name] = {
            "dtype": kind or "U8",
            "shape": shape,
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def _write_tensors(archive: zipfile.ZipFile, tensors: Mapping[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    with archive.open(_TENSORS, "w", force_zip64=True) as file:
        header = _header(tensors)
        for view in (memoryview(header), *(tensor_bytes(t).data for t in tensors.values())):
            digest.update(view)
            file.write(view)
    return digest.hexdigest()


def read_tensors(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a safetensors file, by name, without a copy.  Raises GraphFileError."""
    (length,) = struct.unpack_from("<Q", data) if len(data) >= 8 else (0,)
    if not 2 <= length <= min(_MOST_HEADER, len(data) - 8):
        raise GraphFileError("its tensors have no header")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise GraphFileError(f"the header of its tensors cannot be read ({error})") from None
    if not isinstance(header, dict):
        raise GraphFileError("the header of its tensors is no object")
    body = memoryview(data)[8 + length :]
    return {
        name: _tensor(name, entry, body) for name, entry in header.items() if name != "__metadata__"
    }


def _tensor(name: str, entry: object, body: memoryview) -> npt.NDArray[Any]:
    try:
        if not isinstance(entry, dict):
            raise TypeError("it is no object")
        dtype, shape = _NAMES[entry["dtype"]], entry["shape"]
        start, end = entry["data_offsets"]
        numbers = (*shape, start, end)
        if not all(type(n) is int and 0 <= n < 1 << 48 for n in numbers) or len(shape) > 32:
            raise ValueError("its sizes are no sizes")
        if not start <= end <= len(body):
            raise ValueError("it lies outside of the file")
        return np.frombuffer(body[start:end], dtype).reshape(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise GraphFileError(f"its tensor {name[:80]!r} is damaged ({error!r})") from None
