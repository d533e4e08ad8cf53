"""The headers that come with the compiler: cuda_fp16.h, mma.h, <cuda/std/…> and their like.

A recent NVRTC brings its own, which fit it by construction.  They are unpacked once for each NVRTC,
26 MB, into a folder of the cache; a file beside them holds the digest of each.  Headers that a
compilation read are compared with these digests, and a folder that does not fit is replaced.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ostinato import settings
from ostinato.modules.keys import content_digest
from ostinato.modules.nvrtc import Nvrtc
from ostinato.modules.nvrtc_file import CompilerFile
from ostinato.modules.safe_file import UntrustedError, open_regular

__all__ = ["Toolkit", "bundled_headers"]

_DIGESTS = ".digests"
_STALE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A folder of headers.

    `digests` has those of bundled headers, by the path in the folder; None for an installed
    toolkit, whose headers may change like anyone's.
    """

    root: str
    digests: Mapping[str, str] | None = field(default=None, repr=False)

    @property
    def folders(self) -> tuple[str, str]:
        """What the compiler searches.  CUDA 13 has <cuda/std/…> and <nv/target> one folder down."""
        return (self.root, f"{self.root}/cccl")

    def owns(self, path: str) -> bool:
        """Whether a path is that of a bundled header."""
        return self.digests is not None and path.startswith(f"{self.root}/")

    def holds(self, path: str, digest: bytes) -> bool:
        """Whether a bundled header has that content."""
        name = os.path.normpath(path)[len(self.root) + 1 :]
        return self.digests is not None and self.digests.get(name) == digest.hex()

    def damaged(self) -> bool:
        """Whether a bundled header is missing or has changed.  Reads all of them, in 0.1 s."""
        return self.digests is not None and dict(_digests(self.root)) != self.digests


def bundled_headers(library: Nvrtc, *, unpack: bool = False) -> Toolkit | None:
    """The compiler's own headers; None if it has none, or they are, or can be, unpacked nowhere.

    With `unpack` what is damaged is replaced.
    """
    import tempfile

    name = _name(library.file)
    for parent in (settings.cache_dir() / "headers", Path(tempfile.gettempdir())):
        try:
            found = _unpacked(parent / name)
            if unpack and (found is None or found.damaged()):
                found = _unpack(library, parent / name)
        except OSError:
            continue
        if found is not None:
            return found
    return None


def _name(file: CompilerFile) -> str:
    user = os.getuid() if hasattr(os, "getuid") else 0
    # Copies of one library share their headers; a note is what tells apart one like no other.
    note = "".join(c for c in file.note if c.isdecimal())
    return f"ostinato-nvrtc-{file.nbytes:x}-{file.mtime_ns:x}{note and '-' + note}-{user}"


def _unpacked(folder: Path) -> Toolkit | None:
    """A folder that this user has unpacked, as its digests tell; whether they fit is not looked at.

    Raises OSError if the folder cannot be looked at, or is another's.
    """
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return None
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user ({status.st_uid})")
    if not stat.S_ISDIR(status.st_mode) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    try:
        with open_regular(folder / _DIGESTS, private=True) as file:
            digests = json.load(file)
    except (OSError, UntrustedError, ValueError):
        return None
    return Toolkit(str(folder), digests) if isinstance(digests, dict) else None


def _unpack(library: Nvrtc, folder: Path) -> Toolkit | None:
    """Unpacks to a folder of its own, which then takes the place.  Raises OSError."""
    import tempfile

    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in folder.parent.glob(f"{folder.name}.*"):  # by a process that died
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
        made = Path(temporary, "made")
        flags = (f"--use-bundled-headers={made}", "--gpu-architecture=sm_90")
        if library.compile("", "unpack.cu", {}, flags).status:
            return None
        (made / _DIGESTS).write_text(json.dumps(dict(_digests(str(made)))), encoding="utf-8")
        made.chmod(0o700)
        (made / _DIGESTS).chmod(0o600)
        try:
            made.rename(folder)
        except OSError:  # something is there: another process was first, or it is damaged
            found = _unpacked(folder)
            if found is None or found.damaged():
                folder.rename(Path(temporary, "old"))
                made.rename(folder)
    return _unpacked(folder)


def _digests(root: str) -> Iterator[tuple[str, str]]:
    """Of the headers in a folder and those below it, by their paths in it.  Raises OSError."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = f"{folder}/{name}"
            if not name.startswith("."):
                with suppress(UntrustedError), open_regular(path, private=False) as file:
                    yield path[len(root) + 1 :], content_digest(file.read()).hex()
