"""The headers that come with the compiler: cuda_fp16.h, mma.h, <cuda/std/…> and their like.

A recent NVRTC brings its own, which fit it by construction; they are unpacked once for each NVRTC,
26 MB, into the cache folder.  Whether it has any is remembered there too.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ostinato import settings
from ostinato.modules.nvrtc import INVALID_OPTION, Toolchain
from ostinato.modules.nvrtc_file import CompilerFile

__all__ = ["headers_folder", "unpacked_headers"]

_DONE, _NONE = ".unpacked", ".none"


def headers_folder() -> Path:
    """Where unpacked headers, and what was read of headers, are kept."""
    return settings.cache_dir() / "headers"


def unpacked_headers(toolchain: Toolchain) -> str | None:
    """The folder of the compiler's own headers; None if it has none, or they cannot be unpacked.

    The compiler is loaded only if nobody has asked for its headers on this machine before.
    """
    for root in (headers_folder(), Path(tempfile.gettempdir())):
        folder = root / _name(toolchain.file())
        if _is_ours(folder):
            if (folder / _DONE).exists():
                return str(folder)
            if (folder / _NONE).exists():
                return None
    # From here on the compiler is known and not expected.
    toolchain.library()
    for root in (headers_folder(), Path(tempfile.gettempdir())):
        folder = root / _name(toolchain.file())
        answer = _unpack(toolchain, folder)
        if answer is not None:
            return str(folder) if answer else None
    return None


def _name(file: CompilerFile) -> str:
    user = os.getuid() if hasattr(os, "getuid") else 0
    # Copies of one library share their headers; a note is what tells apart one like no other.
    note = "".join(c for c in file.note if c.isdecimal())
    return f"ostinato-nvrtc-{file.nbytes:x}-{file.mtime_ns:x}{note and '-' + note}-{user}"


def _is_ours(folder: Path) -> bool:
    try:
        return not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
    except OSError:
        return False


def _unpack(toolchain: Toolchain, folder: Path) -> bool | None:
    """Whether the headers are in the folder now; None if it cannot be written, or is not ours."""
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_ours(folder):
            return None
        with FileLock(str(folder / ".lock"), timeout=60):
            if not (folder / _DONE).exists():
                flags = (f"--use-bundled-headers={folder}", "--gpu-architecture=sm_90")
                answer = toolchain.library().compile("", "unpack.cu", {}, flags)
                if answer.status == INVALID_OPTION:
                    (folder / _NONE).touch()
                    return False
                if answer.status:
                    return None
                (folder / _DONE).touch()
        return True
    except (OSError, Timeout):
        return None
