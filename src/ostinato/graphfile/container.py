"""The file format around a manifest: an uncompressed zip with the manifest and content by digest.

    manifest.json           see `format`
    manifest.sha256         digest of manifest.json
    content/<digest>        a kernel image, a constant or an input, under the SHA-256 of its bytes

Of the results of the check there are the digests only.  Several graphs can share a folder that
holds images, constants and inputs, each once and named by digest.  All bytes read are compared with
their digests.  Files are read only if they belong to this user and no other user may write them,
because a graph file is a program.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ostinato.errors import GraphFileError
from ostinato.files import UntrustedError, open_regular, replace_file, temporary_beside
from ostinato.graphfile.format import parse, to_dict
from ostinato.graphfile.records import GraphManifest

_MANIFEST, _DIGEST, _CONTENT = "manifest.json", "manifest.sha256", "content/"
_ENTRY = re.compile(r"manifest\.json|manifest\.sha256|content/[0-9a-f]{64}")
_MOST_MANIFEST = 1 << 28
_MOST_ENTRIES = 1 << 16
_MOST_THREADS = 8


class Contents:
    """An open graph file: the manifest, with content read on demand."""

    def __init__(self, path: Path, file: BinaryIO, folder: Path | None) -> None:
        self.path = path
        self._file = file
        self._folder = folder
        self._entries = _entries(file)
        self.raw = self._read(_MANIFEST, _MOST_MANIFEST)
        """The manifest's bytes as stored."""
        if self._read(_DIGEST, 64).decode("ascii", "replace") != _digest(self.raw):
            raise GraphFileError("the manifest is not what its digest says")
        self.manifest = read_manifest(self.raw)

    def code(self, digest: str) -> bytes:
        """Reads an image from the file or the shared folder."""
        return self._content(digest, f"the code {digest[:12]}…")

    def codes(self, digests: Sequence[str]) -> Iterator[bytes]:
        """Yields images in this order.  Threads read those of the shared folder and compute their
        digests ahead of the caller."""
        if len(digests) < 2 or any(_CONTENT + digest in self._entries for digest in digests):
            yield from map(self.code, digests)
            return
        with ThreadPoolExecutor(min(len(digests), _MOST_THREADS)) as pool:
            yield from pool.map(self.code, digests)

    def tensor(self, name: str) -> npt.NDArray[np.uint8]:
        """Reads the bytes of a tensor from the file or the shared folder."""
        digest = self.manifest.tensors.get(name)
        if digest is None:
            raise GraphFileError(f"the content of {name!r} is not in it; save it again")
        return np.frombuffer(self._content(digest, f"the content of {name!r}"), np.uint8)

    def _content(self, digest: str, what: str) -> bytes:
        entry = self._entries.get(_CONTENT + digest)
        if entry is not None:
            data = self._part(entry)
        elif self._folder is None:
            raise GraphFileError(
                f"{what} is not in it; give the folder that it was saved with (code=)"
            )
        else:
            try:
                with open_regular(self._folder / digest, private=True) as file:
                    data = file.read()
            except (OSError, UntrustedError) as error:
                raise GraphFileError(f"{what} is not there ({error})") from None
        if _digest(data) != digest:
            raise GraphFileError(f"{what} is not what its digest says")
        return data

    def _read(self, name: str, most: int) -> bytes:
        entry = self._entries.get(name)
        if entry is None:
            raise GraphFileError(f"it has no {name}")
        if entry.nbytes > most:
            raise GraphFileError(
                f"its {name} has {entry.nbytes} bytes, and at most {most} are read"
            )
        return self._part(entry)

    def _part(self, entry: _Entry) -> bytes:
        self._file.seek(entry.start)
        data = self._file.read(entry.nbytes)
        if len(data) != entry.nbytes:
            raise GraphFileError("it is cut off")
        return data


def read_manifest(raw: bytes) -> GraphManifest:
    """Parses a manifest from its bytes.  Raises GraphFileError."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise GraphFileError(f"its manifest cannot be read ({error})") from None
    return parse(data)


@dataclass(frozen=True, slots=True)
class _Entry:
    """The position of a zip entry's content in the file, in bytes."""

    start: int
    nbytes: int


def _entries(file: BinaryIO) -> dict[str, _Entry]:
    """Returns the zip entries by name.  Raises GraphFileError for an unknown entry."""
    with _archive(file) as archive:
        entries = archive.infolist()
    if len(entries) > _MOST_ENTRIES:
        raise GraphFileError(f"it has {len(entries)} entries")
    whole = os.fstat(file.fileno()).st_size
    found: dict[str, _Entry] = {}
    for entry in entries:
        name = entry.filename
        if not _ENTRY.fullmatch(name) or name in found:
            raise GraphFileError(f"its entry {name[:80]!r} does not belong there")
        plain = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1
        if not plain or entry.compress_size != entry.file_size:
            raise GraphFileError(f"its entry {name} is compressed or encrypted")
        # Read without zipfile: the digests make its checksums unnecessary.
        file.seek(max(0, entry.header_offset))
        head = file.read(_LOCAL.size)
        if len(head) != _LOCAL.size or head[:4] != b"PK\3\4":
            raise GraphFileError(f"its entry {name} has no header")
        name_bytes, extra_bytes = _LOCAL.unpack(head)[1:]
        start = entry.header_offset + _LOCAL.size + name_bytes + extra_bytes
        if start + entry.file_size > whole:
            raise GraphFileError(f"its entry {name} is cut off")
        found[name] = _Entry(start, entry.file_size)
    return found


_LOCAL = struct.Struct("<26sHH")  # a local header, up to the lengths of name and extra field


@contextmanager
def open_file(path: Path, folder: Path | None = None) -> Iterator[Contents]:
    """Opens a graph file; `folder` is shared by several files.  Raises GraphFileError."""
    try:
        with open_regular(path, private=True) as file:
            yield Contents(path, file, folder)
    except GraphFileError as error:
        raise _of_file(path, str(error)) from None
    except FileNotFoundError:
        raise _of_file(path, "there is no such file") from None
    except UntrustedError as error:
        why = f"{error}; a graph file is a program, so only a file (no link) that nobody else may"
        raise _of_file(path, f"{why} write to is loaded") from None
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError) as error:
        raise _of_file(path, f"it cannot be read ({error})") from None


def _of_file(path: Path, why: str) -> GraphFileError:
    return GraphFileError(f"{path}: {why}" if not why.startswith(str(path)) else why)


def _archive(file: BinaryIO) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError):
        raise
    except Exception as error:  # zipfile passes on errors of struct and codecs
        raise GraphFileError(f"it is no zip file ({error})") from None


def write_file(
    path: Path,
    manifest: GraphManifest,
    code: Mapping[str, bytes],
    tensors: Mapping[str, npt.NDArray[Any]],
    folder: Path | None,
) -> None:
    """Writes a graph file, replacing an existing one; shared content goes to `folder`, if given.

    Raises OSError if the file cannot be written; the existing file is then unchanged.
    """
    digests = {name: _digest(tensor_bytes(array).data) for name, array in tensors.items()}
    manifest = replace(manifest, tensors=digests)
    contents = {digest: memoryview(data) for digest, data in code.items()}
    for name, array in tensors.items():
        if not name.startswith("results/"):
            contents[digests[name]] = tensor_bytes(array).data
    temporary = temporary_beside(path)
    try:
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for digest, data in contents.items():
                _share(folder / digest, data)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            raw = json.dumps(to_dict(manifest), separators=(",", ":")).encode()
            archive.writestr(_MANIFEST, raw)
            archive.writestr(_DIGEST, _digest(raw))
            for digest, data in contents.items() if folder is None else ():
                with archive.open(_CONTENT + digest, "w", force_zip64=True) as entry:
                    entry.write(data)
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def _share(path: Path, data: memoryview) -> None:
    """Writes a file unless it exists with this content: an existing one may be torn or changed."""
    if not _holds(path, data):
        replace_file(path, data, private=True)


def _holds(path: Path, data: memoryview) -> bool:
    """True if a file belongs to this user and holds exactly these bytes."""
    try:
        with open_regular(path, private=True) as file:
            return os.fstat(file.fileno()).st_size == len(data) and file.read() == data
    except (OSError, UntrustedError):
        return False


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


# ---------------------------------------------------------------------------------------- tensors

# NumPy's types by safetensors' names; others are read as bytes.
_TYPES = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "BF16": "<u2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
    "C64": "<c8",
}


def tensor_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Returns the bytes of an array, flat; a view if the array is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def read_tensors(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Returns the views of a safetensors file's tensors, by name.  Raises GraphFileError."""
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
        entries = [*header.items()]
    except (ValueError, RecursionError, AttributeError, OverflowError) as error:
        raise GraphFileError(f"the header of its tensors cannot be read ({error})") from None
    body = memoryview(data)[8 + length :]
    return {name: _tensor(name, one, body) for name, one in entries if name != "__metadata__"}


def _tensor(name: str, entry: Any, body: memoryview) -> npt.NDArray[Any]:
    try:
        kind, shape = str(entry["dtype"]), tuple(entry["shape"])
        start, end = entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
            raise ValueError("its shape and offsets must be whole numbers of 0 or more")
        if not start <= end <= len(body):
            raise ValueError("it lies outside of the file")
        if kind not in _TYPES and not kind.startswith("F8_"):
            shape = (end - start,)  # the element size is unknown
        return np.frombuffer(body[start:end], _TYPES.get(kind, "V1")).reshape(shape)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise GraphFileError(f"its tensor {name[:80]!r} is damaged ({error!r})") from None
