"""Opening files in folders where anything may lie: never waits, and opens regular files alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["UntrustedError", "open_regular"]

# O_NONBLOCK: a FIFO that takes the file's place after the first look must not block the open.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class UntrustedError(Exception):
    """A file is there, but not one to believe; says why."""


def open_regular(path: str | Path, *, private: bool) -> BinaryIO:
    """A regular file, opened for reading.

    `private`: only this user's, which others cannot write, and not through a link.
    Raises FileNotFoundError, OSError, UntrustedError.
    """
    flags = _FLAGS | getattr(os, "O_NOFOLLOW", 0) if private else _FLAGS
    # Looked at before it is opened: to open some devices has effects.
    _check(os.stat(path, follow_symlinks=not private), private)  # noqa: PTH116
    file = os.fdopen(os.open(path, flags), "rb")
    try:
        # The file that is checked must be the one that is read.
        _check(os.fstat(file.fileno()), private)
    except BaseException:
        file.close()
        raise
    return file


def _check(status: os.stat_result, private: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UntrustedError("it is not a regular file")
    if private and hasattr(os, "getuid"):
        if status.st_uid != os.getuid():
            raise UntrustedError(f"it belongs to another user ({status.st_uid})")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UntrustedError("other users may write to it")
