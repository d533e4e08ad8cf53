"""Compiled kernels on disk, between processes: a folder of files that are never believed.

One file a key, named by it:

    offset  bytes
         0      8   magic "OSTINATO"
         8      4   schema
        12      4   bytes of JSON that follow the header
        16      8   bytes of code that follow the JSON
        24     32   the key
        56     32   BLAKE2b, keyed with the key, of the 56 bytes above, the JSON and the code
        88          JSON: code kind, entry names, the compiler's log;  then the code

A file counts only if it is a regular file of this user that others cannot write, and if all of
that fits together: torn, truncated, swapped, foreign and bit-flipped files are removed, and cost a
recompile and a warning.  This guards against damage and other users; not against code that runs as
this user, which could as well change the program itself.

Writers make a file of their own and rename it into place, so that readers see whole files only and
two writers of one key both succeed.  A lock is taken for pruning alone.  Files are not fsynced: a
power cut may leave a torn file, which is noticed.  A full disk, a read-only or foreign folder turns
the store off with one warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ostinato import settings
from ostinato.modules.compiler import Compiled
from ostinato.modules.keys import DIGEST_BYTES, SCHEMA
from ostinato.modules.private_file import UntrustedError, read_private

__all__ = ["DiskStatistics", "DiskStore", "StoredKernel"]

_log = logging.getLogger(__name__)

_MAGIC = b"OSTINATO"
_HEADER = struct.Struct(f"<8sIIQ{DIGEST_BYTES}s")
_SUFFIX = ".kernel"
_TEMPORARY = ".tmp-"
_MAX_FILE = 1 << 30
_STALE_SECONDS = 3600.0

DEFAULT_MAX_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredKernel:
    """One file of the store, as `ostinato cache list` shows it.

    `problem` says why the file cannot be believed, None for a sound one.  Times are seconds since
    1970.
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
    """Counts since this store object was made.  `off` says why it is switched off, if it is."""

    hits: int
    misses: int
    writes: int
    rejected: int
    pruned: int
    off: str | None


class DiskStore:
    """A folder of compiled kernels, bounded in bytes, least recently used out.

    `folder` defaults to "kernels" in the cache folder of the settings, looked up at first use.
    Thread-safe; safe among processes.  Never raises for what it finds on disk.
    """

    def __init__(
        self, folder: Path | str | None = None, *, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> None:
        self._folder = None if folder is None else Path(folder)
        self.max_bytes = max_bytes
        self._lock = threading.RLock()
        self._ready = False
        self._off: str | None = None
        self._hits = self._misses = self._writes = self._rejected = self._pruned = 0

    @property
    def folder(self) -> Path:
        """Where the files are; it may not exist yet."""
        if self._folder is None:
            self._folder = settings.cache_dir() / "kernels"
        return self._folder

    def path(self, key: bytes) -> Path:
        """The file of a key."""
        return self.folder / (key.hex() + _SUFFIX)

    def statistics(self) -> DiskStatistics:
        with self._lock:
            return DiskStatistics(
                self._hits, self._misses, self._writes, self._rejected, self._pruned, self._off
            )

    # --- reading
    def load(self, key: bytes) -> Compiled | None:
        """The code of a key, or None.  A file that cannot be believed is removed and warned of."""
        if self._off is not None and not self._ready:
            return None
        path = self.path(key)
        try:
            compiled, _ = _decode(read_private(path, _MAX_FILE, touch=True), key)
        except FileNotFoundError:
            self._count(misses=1)
            return None
        except UntrustedError as error:
            self.reject(key, str(error))
            return None
        except OSError as error:
            self.reject(key, f"it cannot be read ({error})")
            return None
        self._count(hits=1)
        return compiled

    def reject(self, key: bytes, why: str) -> None:
        """Removes a file and warns: it costs a recompile."""
        path = self.path(key)
        _log.warning("kernel file %s is not used: %s; compiling again", path, why)
        with contextlib.suppress(OSError):
            path.unlink()
        self._count(rejected=1, misses=1)

    # --- writing
    def save(self, key: bytes, compiled: Compiled, *, name: str = "", arch: str = "") -> bool:
        """Writes the code of a key; whether it is on disk now.  Never raises for the disk."""
        if self._off is not None:
            return False
        data = _encode(key, compiled, name, arch)
        if len(data) > min(self.max_bytes, _MAX_FILE):
            return False
        try:
            self._make_folder()
            self._write(self.path(key), data)
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

    def _write(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def _switch_off(self, why: str) -> None:
        with self._lock:
            if self._off is not None:
                return
            self._off = why
        _log.warning("kernels are not kept on disk from here on: %s", why)

    def _count(
        self, *, hits: int = 0, misses: int = 0, writes: int = 0, rejected: int = 0, pruned: int = 0
    ) -> None:
        with self._lock:
            self._hits += hits
            self._misses += misses
            self._writes += writes
            self._rejected += rejected
            self._pruned += pruned

    # --- housekeeping
    def entries(self, *, check: bool = True) -> tuple[StoredKernel, ...]:
        """What is stored, most recently used first.  `check` reads and authenticates each file."""
        found = []
        for path, status in self._files():
            key = path.name.removesuffix(_SUFFIX)
            record = StoredKernel(path, key, status.st_size, status.st_mtime)
            found.append(_described(record) if check else record)
        return tuple(sorted(found, key=lambda r: -r.last_use))

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        try:
            with os.scandir(self.folder) as items:
                for item in items:
                    with contextlib.suppress(OSError):
                        status = item.stat(follow_symlinks=False)
                        if item.name.startswith(_TEMPORARY):
                            # Left by a process that died while it wrote.
                            if time.time() - status.st_mtime > _STALE_SECONDS:
                                Path(item.path).unlink()
                        elif item.name.endswith(_SUFFIX) and not stat.S_ISDIR(status.st_mode):
                            yield Path(item.path), status
        except OSError:
            return

    def prune(self, max_bytes: int | None = None) -> int:
        """Removes least recently used files until the rest fits; how many were removed.

        Does nothing while another process prunes.
        """
        limit = self.max_bytes if max_bytes is None else max_bytes
        files = list(self._files())
        if sum(status.st_size for _, status in files) <= limit:
            return 0
        from filelock import FileLock, Timeout

        try:
            with FileLock(str(self.folder / ".lock"), timeout=0, mode=0o600):
                files = sorted(self._files(), key=lambda f: f[1].st_mtime)
                total = sum(status.st_size for _, status in files)
                removed = 0
                for path, status in files:
                    if total <= limit:
                        break
                    with contextlib.suppress(OSError):
                        path.unlink()
                        total -= status.st_size
                        removed += 1
        except (OSError, Timeout):
            return 0
        self._count(pruned=removed)
        return removed

    def clear(self) -> int:
        """Removes every file of the store; how many."""
        return self.prune(max_bytes=-1)


def _encode(key: bytes, compiled: Compiled, name: str, arch: str) -> bytes:
    about = json.dumps(
        {
            "kind": compiled.kind,
            "log": compiled.log,
            "lowered": compiled.lowered,
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


def _decode(data: bytes, key: bytes) -> tuple[Compiled, dict[str, object]]:
    """Raises UntrustedError unless every byte is what was written under this key."""
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
    if not secrets.compare_digest(digest, _authenticate(key, header, about, code)):
        raise UntrustedError("it is damaged (its digest does not fit)")
    record = json.loads(about)
    return Compiled(record["kind"], code, record["log"], record["lowered"]), record


def _described(record: StoredKernel) -> StoredKernel:
    from ostinato.modules.cubin import kernel_names

    name, arch = "", ""
    entries: tuple[str, ...] = ()
    problem: str | None = None
    try:
        key = bytes.fromhex(record.key)
        if len(key) != DIGEST_BYTES:
            raise ValueError
        compiled, about = _decode(record.path.read_bytes(), key)
        name, arch = str(about["name"]), str(about["arch"])
        entries = kernel_names(compiled.data) if compiled.kind == "cubin" else ()
    except ValueError:
        problem = "its name is not a key"
    except (UntrustedError, OSError) as error:
        problem = str(error)
    return StoredKernel(
        record.path, record.key, record.nbytes, record.last_use, name, arch, entries, problem
    )
