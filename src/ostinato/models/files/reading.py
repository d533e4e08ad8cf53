"""Functions that read untrusted files, regular ones up to a size limit, and that write files whole
or not at all."""

from __future__ import annotations

import contextlib
import json
import mmap
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, cast

from ostinato.errors import ModelFormatError
from ostinato.files import UntrustedError, open_regular, replace_file

MAX_JSON = 4 << 20
"""The most bytes of JSON that are parsed; a model of 126 layers has 1,136 tensors of 120 bytes."""

_PART = re.compile(r"(.+-)[0-9]{5}(-of-([0-9]{5})\.gguf)")


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file for reading.

    Raises ModelFormatError for anything else (opening a pipe would wait for a writer), OSError.
    """
    # `open_regular` checks the type before opening, since opening alone triggers some devices, and
    # after, since the file may have been replaced.  Without O_NONBLOCK, opening a pipe waits.
    try:
        return open_regular(path, private=False)
    except UntrustedError:
        raise ModelFormatError(f"{path}: it is no regular file") from None


def read_file(path: Path, limit: int) -> bytes:
    """Reads a whole file.  Raises ModelFormatError if it has more than `limit` bytes, OSError."""
    with open_file(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ModelFormatError(f"{path}: it has more than {limit} bytes")
    return content


def read_json(path: Path) -> dict[str, object]:
    """Reads a JSON object of at most MAX_JSON bytes.  Raises ModelFormatError, OSError."""
    return parse_object(read_file(path, MAX_JSON), str(path))


def parse_object(text: bytes, where: str) -> dict[str, object]:
    """Parses a JSON object.  Raises ModelFormatError, whose message begins with `where`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFormatError(f"{where}: the JSON is a {type(value).__name__}, must be an object")
    return cast(dict[str, object], value)


def gguf_parts(name: str) -> list[str]:
    """Returns the names of all parts of the GGUF model that the file of this name is a part of
    (name-00002-of-00003.gguf), in order; only the name for any other file."""
    match = _PART.fullmatch(name)
    count = 0 if match is None else int(match[3])
    if match is None or not count:
        return [name]
    return [f"{match[1]}{number:05}{match[2]}" for number in range(1, count + 1)]


def map_file(path: Path) -> mmap.mmap:
    """Maps a whole file for reading.  Raises ModelFormatError if it is empty, OSError."""
    with open_file(path) as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ModelFormatError(f"{path}: the file is empty") from None


def forget(mapped: mmap.mmap, offset: int, size: int) -> None:
    """Releases the whole pages within these bytes from this process's memory, if the operating
    system supports it; the next read loads them again."""
    start, end = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE, offset + size
    end -= end % mmap.PAGESIZE
    if end > start and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, start, end - start)


def unmap(maps: Iterable[mmap.mmap]) -> None:
    """Closes each map, or leaves it open until its last view is deleted."""
    for mapped in maps:
        with contextlib.suppress(BufferError):  # a view exists; its deletion frees the map
            mapped.close()


def write_file(path: Path, content: str | memoryview) -> None:
    """Writes a file whole or not at all, str as UTF-8.  Raises OSError, which names the path."""
    data = content.encode() if isinstance(content, str) else content
    try:
        with contextlib.suppress(FileNotFoundError):
            # A device or a pipe is written to, not replaced.  `stat` raises for links in a circle,
            # for which `exists` would return False.
            if not stat.S_ISREG(path.stat().st_mode):
                path.write_bytes(data)
                return
        # Replaces the target of a link, not the link.
        replace_file(path.resolve(), data, private=False)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
