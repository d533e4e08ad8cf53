"""Reading files that only this user could have written."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

__all__ = ["UntrustedError", "read_private"]


class UntrustedError(Exception):
    """A file is there, but not one to believe; says why."""


def read_private(path: Path, max_bytes: int, *, touch: bool = False) -> bytes:
    """A regular file's content, if it is this user's and others cannot write it.

    `touch` notes the time of use on it.  Raises FileNotFoundError, OSError, UntrustedError.
    """
    # Not through a link: the file that is checked must be the one that is read.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    # A FIFO of that name must not block the open.
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedError("it is not a regular file")
        if hasattr(os, "getuid"):
            if status.st_uid != os.getuid():
                raise UntrustedError(f"it belongs to another user ({status.st_uid})")
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UntrustedError("other users may write to it")
        if status.st_size > max_bytes:
            raise UntrustedError(f"it has {status.st_size} bytes")
        data = file.read()
        if touch:
            with contextlib.suppress(OSError):
                os.utime(descriptor if os.utime in os.supports_fd else path)
    return data
