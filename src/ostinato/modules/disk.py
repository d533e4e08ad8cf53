"""Compiled kernels on disk, shared by processes.  Every file is checked before it is used.

Each key has one file, named by it.  `Compiled.inputs` lists the header files that the code was made
from; the caller must check them.

    offset  bytes
         0      8   magic "OSTINATO"
         8      4   schema
        12      4   bytes of JSON that follow the header
        16      8   bytes of code that follow the JSON
        24     32   the key
        56     32   BLAKE2b, keyed with the key, of the 56 bytes above, the JSON and the code
        88          JSON: code kind, entry names, the compiler's log, inputs;  then the code

A file is used only if it is a regular file of this user that others cannot write, and if all of the
above is consistent.  Torn, truncated, swapped, foreign and bit-flipped files are removed, with a
warning, and compiled again.  This guards against damage and other users, not against code that runs
as this user, which could change the program itself as well.  FIFOs, devices, links, folders and
huge files in the folder are not opened, followed or waited for.

Writers rename complete files into place (`files.replace_file`), so readers see complete files only,
and two writers of one key both succeed.  There is no lock: removing a file that no longer exists is
not an error.  A torn file, as after a power cut, is detected.  A full disk and a read-only or
foreign folder switch the store off, with one warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import stat
import struct
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ostinato import settings
from ostinato.driver.api import parse_bytes
from ostinato.driver.forking import new_lock
from ostinato.errors import InputError
from ostinato.files import UntrustedError, is_temporary, open_regular, replace_file
from ostinato.logs import logger
from ostinato.modules.compiler import Compiled
from ostinato.modules.headers import Inputs
from ostinato.modules.source import DIGEST_BYTES, SCHEMA
from ostinato.records import dataclass

_MAGIC = b"OSTINATO"
_HEADER = struct.Struct(f"<8sIIQ{DIGEST_BYTES}s")
_SUFFIX = ".kernel"
_MAX_FILE = 1 << 28
_KEY_NAME = rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}\Z"
_STALE_SECONDS = 3600.0

_COUNTED = ("hits", "misses", "writes", "rejected", "pruned")

DEFAULT_MAX_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredKernel:
    """One file of the store, as `ostinato cache list` shows it.

    `problem`: why the file is not used, None for a sound one.  `key`: in hexadecimal, "" if the
    file's name is not a key.  `last_use`: seconds since 1970, never in the future.
    """

    path: Path
    key: str
    nbytes: int
    last_use: float
    name: str = ""
    arch: str = ""
    entries: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class DiskStatistics:
    """Counts since this store object was made.  `off`: why it is switched off, else None."""

    hits: int
    misses: int
    writes: int
    rejected: int
    pruned: int
    off: str | None


class DiskStore:
    """A folder of compiled kernels, limited in bytes; the least recently used are removed.

    `folder` defaults to "kernels" in the cache folder of the settings, looked up at first use.
    Thread-safe; safe among processes.  Does not raise for anything found on disk.  Raises
    InputError for `max_bytes` below 1.
    """

    def __init__(
        self, folder: Path | str | None = None, *, max_bytes: int | str = DEFAULT_MAX_BYTES
    ) -> None:
        # Absolute: the process may change its current folder.
        self._folder = None if folder is None else Path(folder).absolute()
        self.max_bytes = parse_bytes(max_bytes, "max_bytes", 1)
        self._lock = new_lock()
        self._ready = False
        self._off: str | None = None
        self._counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        state = "" if self._off is None else f", off: {self._off}"
        return f"<DiskStore {self._folder or 'in the cache folder'}{state}>"

    @property
    def folder(self) -> Path:
        """The folder of the files; it may not exist yet."""
        if self._folder is None:
            self._folder = settings.cache_dir() / "kernels"
        return self._folder

    def path(self, key: bytes) -> Path:
        """Returns the path of a key's file."""
        return self.folder / (key.hex() + _SUFFIX)

    def statistics(self) -> DiskStatistics:
        with self._lock:
            counts = {name: self._counts[name] for name in _COUNTED}
            return DiskStatistics(**counts, off=self._off)

    # --- reading
    def load(self, key: bytes) -> Compiled | None:
        """Returns the code of a key, or None.  Removes a file that is not sound, with a warning.

        The caller must check with `compiler.is_current` that its header files are unchanged.
        """
        if self._off is not None and not self._ready:
            return None
        path = self.path(key)
        try:
            compiled, _ = _read(path, key, touch=True)
        except FileNotFoundError:
            self._count(misses=1)
            return None
        except UntrustedError as error:
            self.reject(key, str(error))
            return None
        except OSError as error:  # such as too many open files: the file may be sound
            logger(__name__).warning(
                "kernel file %s cannot be read: %s; compiling again", path, error
            )
            self._count(rejected=1, misses=1)
            return None
        self._count(hits=1)
        return compiled

    def reject(self, key: bytes, why: str) -> None:
        """Removes the file of a key, with a warning; the key must be compiled again."""
        path = self.path(key)
        logger(__name__).warning("kernel file %s is not used: %s; compiling again", path, why)
        _remove(path)
        self._count(rejected=1, misses=1)

    # --- writing
    def save(
        self, key: bytes, compiled: Compiled, *, name: str | None = None, arch: str = ""
    ) -> bool:
        """Writes the code of a key; returns True if it is on disk now.  Never raises OSError."""
        if self._off is not None:
            return False
        data = _encode(key, compiled, name or "", arch)
        if len(data) > min(self.max_bytes, _MAX_FILE):
            return False
        path = self.path(key)
        try:
            self._make_folder()
            replace_file(path, data, private=True)
        except IsADirectoryError:
            logger(__name__).warning(
                "kernel file %s is not written: a folder has its name; remove it", path
            )
            return False
        except (OSError, UntrustedError) as error:
            self._switch_off(str(error))
            return False
        self._count(writes=1)
        self.prune()
        return True

    def _make_folder(self) -> None:
        if self._ready:
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = self.folder.stat()
        if hasattr(os, "getuid"):
            if status.st_uid != os.getuid():
                raise UntrustedError(f"{self.folder} belongs to another user ({status.st_uid})")
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UntrustedError(f"others may write to {self.folder}; run chmod go-w on it")
        self._ready = True

    def _switch_off(self, why: str) -> None:
        with self._lock:
            if self._off is not None:
                return
            self._off = why
        logger(__name__).warning("kernels are not kept on disk from here on: %s", why)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    # --- housekeeping
    def entries(self, *, check: bool = True) -> tuple[StoredKernel, ...]:
        """Returns the stored files, most recently used first.  `check` reads and authenticates
        each."""
        found = []
        now = time.time()
        for path, status in self._files(_SUFFIX):
            name = path.name.removesuffix(_SUFFIX)
            key = name if re.match(_KEY_NAME, name) else ""
            last_use = min(max(status.st_mtime, 0.0), now)
            record = StoredKernel(path, key, status.st_size, last_use)
            found.append(_described(record) if check else record)
        return tuple(sorted(found, key=lambda r: -r.last_use))

    def _files(self, suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
        try:
            with os.scandir(self.folder) as items:
                for item in items:
                    with contextlib.suppress(OSError):
                        if item.name.endswith(suffix):
                            yield Path(item.path), item.stat(follow_symlinks=False)
        except OSError:
            return

    def prune(self, max_bytes: int | str | None = None) -> int:
        """Removes least recently used files until the rest fits (None: the store's own limit);
        returns how many.

        Files under a key that cannot be kernel files are removed first.  Temporary files left an
        hour ago by processes that died are removed too, and not counted.  Files with other names
        are not the store's and stay.
        """
        return self._prune(
            self.max_bytes if max_bytes is None else parse_bytes(max_bytes, "max_bytes")
        )

    def _prune(self, limit: int) -> int:
        files = []
        for path, status in self._files(""):
            if is_temporary(path):
                if time.time() - status.st_mtime > _STALE_SECONDS:
                    _remove(path)
            elif path.name.endswith(_SUFFIX) and re.match(
                _KEY_NAME, path.name.removesuffix(_SUFFIX)
            ):
                files.append((path, status))
        total = sum(status.st_size for _, status in files)
        removed = 0
        for path, status in sorted(files, key=_usefulness):
            if total <= limit:
                break
            removed += _remove(path)
            total -= status.st_size  # also if it stays: no other file is to go in its place
        self._count(pruned=removed)
        return removed

    def clear(self) -> int:
        """Removes every file of the store; returns how many."""
        return self._prune(-1)


def _usefulness(file: tuple[Path, os.stat_result]) -> tuple[bool, float]:
    _, status = file
    return stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_FILE, status.st_mtime


def _remove(path: Path) -> bool:
    """Removes a file of any kind: a link but not its target, a folder only if empty."""
    for remove in (path.unlink, path.rmdir):
        with contextlib.suppress(OSError):
            remove()
            return True
    return False


def _encode(key: bytes, compiled: Compiled, name: str, arch: str) -> bytes:
    about = json.dumps(
        {
            "kind": compiled.kind,
            "log": compiled.log,
            "lowered": compiled.lowered,
            "inputs": compiled.inputs.to_dict(),
            "name": name,
            "arch": arch,
        }
    ).encode()
    header = _HEADER.pack(_MAGIC, SCHEMA, len(about), len(compiled.data), key)
    return header + _authenticate(key, header, about, compiled.data) + about + compiled.data


def _authenticate(key: bytes, *parts: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key, person=b"ostinato-file")
    for part in parts:
        state.update(part)
    return state.digest()


def _read(path: Path, key: bytes, *, touch: bool = False) -> tuple[Compiled, dict[str, object]]:
    """Returns a file's code and its JSON.  `touch` sets the file's time of last use.

    Raises FileNotFoundError, OSError, or UntrustedError unless every byte is as written under this
    key.
    """
    with open_regular(path, private=True) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > _MAX_FILE:
            raise UntrustedError(f"it has {nbytes} bytes")
        found = _decode(file.read(), key)
        if touch:
            with contextlib.suppress(OSError):
                os.utime(file.fileno() if os.utime in os.supports_fd else path)
    return found


def _decode(data: bytes, key: bytes) -> tuple[Compiled, dict[str, object]]:
    """Returns the code and the JSON.  Raises UntrustedError unless all bytes are as written."""
    start = _HEADER.size + DIGEST_BYTES
    if len(data) < start:
        raise UntrustedError(f"it is torn ({len(data)} bytes)")
    magic, schema, about_size, code_size, own_key = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise UntrustedError("it is not a kernel file")
    if schema != SCHEMA:
        raise UntrustedError(f"it has schema {schema}; this version reads {SCHEMA}")
    if own_key != key:
        raise UntrustedError("it holds another key's kernel")
    if len(data) != start + about_size + code_size:
        raise UntrustedError(f"it is torn ({len(data)} of {start + about_size + code_size} bytes)")
    header, digest = data[: _HEADER.size], data[_HEADER.size : start]
    about, code = data[start : start + about_size], data[start + about_size :]
    if not hmac.compare_digest(digest, _authenticate(key, header, about, code)):
        raise UntrustedError("it is damaged (its digest does not fit)")
    try:
        record = json.loads(about)
        inputs = Inputs.from_json(record["inputs"])
        lowered = {str(name): str(symbol) for name, symbol in record["lowered"].items()}
        compiled = Compiled(str(record["kind"]), code, str(record["log"]), lowered, inputs)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UntrustedError(f"it is not what this version writes ({error!r})") from None
    return compiled, record


def _described(record: StoredKernel) -> StoredKernel:
    from ostinato.modules.cubin import kernel_names

    if not record.key:
        return replace(record, problem=f"its name, {record.path.name!a}, is not a key")
    try:
        compiled, about = _read(record.path, bytes.fromhex(record.key))
        entries = kernel_names(compiled.data) if compiled.kind == "cubin" else ()
    except (UntrustedError, InputError, OSError) as error:
        return replace(record, problem=str(error))
    name, arch = str(about.get("name", "")), str(about.get("arch", ""))
    return replace(record, name=name, arch=arch, entries=entries)
