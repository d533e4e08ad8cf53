"""Files in folders that other programs and users may write to.

Reading opens only regular files and never blocks; writing puts a whole file in place or none.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_TEMPORARY = r"\.tmp-[0-9]+-[0-9a-f]{16}\Z"
"""The names of unfinished files (`temporary_beside`)."""

# O_NONBLOCK: if a FIFO takes the file's place after the check, the open must not block.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class UntrustedError(Exception):
    """A file exists, but its content must not be trusted; the message says why."""


def open_regular(path: str | Path, *, private: bool) -> BinaryIO:
    """Opens a regular file for reading.

    `private`: the file must belong to this user, must be writable by no other user, and must not
    be a link.  Raises FileNotFoundError, OSError, UntrustedError.
    """
    # Checked before the open: opening some devices has effects.
    _check(os.stat(path, follow_symlinks=not private), private)  # noqa: PTH116
    file = os.fdopen(os.open(path, _FLAGS | _NO_LINK if private else _FLAGS), "rb")
    try:
        # Checked again: the opened file may be another one.
        _check(os.fstat(file.fileno()), private)
    except BaseException:
        file.close()
        raise
    return file


def replace_file(path: Path, data: bytes | memoryview, *, private: bool) -> None:
    """Writes a file and puts it in place of an older one.

    `private`: only this user may read it; else the mode is that of the old file, or of the process'
    umask if there is none.  Readers get the old file or the new one, never a part.  Not fsynced: a
    power cut may leave a torn file.  Raises OSError; then the old file is as it was.
    """
    temporary = temporary_beside(path)
    mode = None
    if not private:
        with suppress(FileNotFoundError):
            mode = stat.S_IMODE(path.stat().st_mode)
    opener = _open_private if private or mode is not None else None
    try:
        with open(temporary, "xb", opener=opener) as file:
            file.write(data)
        if mode is not None:
            with suppress(OSError):  # a file system without modes
                temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def temporary_beside(path: Path) -> Path:
    """Returns a new name in the folder of a file, for the data that will replace the file."""
    return path.with_name(f".tmp-{os.getpid()}-{os.urandom(8).hex()}")


def is_temporary(path: Path) -> bool:
    """True if the name is one of `temporary_beside`."""
    return bool(re.match(_TEMPORARY, path.name))


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | _NO_LINK, 0o600)


def _check(status: os.stat_result, private: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UntrustedError("it is not a regular file")
    if private and hasattr(os, "getuid"):
        if status.st_uid != os.getuid():
            raise UntrustedError(f"it belongs to another user ({status.st_uid})")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UntrustedError("other users may write to it (chmod go-w takes that away)")
