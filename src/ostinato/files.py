"""Files in folders that other programs and users may write to.

Reading opens regular files alone and never blocks; writing puts a whole file in place or none.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_TEMPORARY = re.compile(r"\.tmp-[0-9]+-[0-9a-f]{16}\Z")
"""The names of files that are not finished: `temporary_beside`."""

# O_NONBLOCK: if a FIFO takes the file's place after the check, the open must not block.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class UntrustedError(Exception):
    """A file is there, but its content must not be believed; the message says why."""


def open_regular(path: str | Path, *, private: bool) -> BinaryIO:
    """Opens a regular file for reading.

    `private`: the file must belong to this user, nobody else may be able to write to it, and it
    must not be a link.  Raises FileNotFoundError, OSError, UntrustedError.
    """
    # Checked before it is opened: opening some devices has effects.
    _check(os.stat(path, follow_symlinks=not private), private)  # noqa: PTH116
    file = os.fdopen(os.open(path, _FLAGS | _NO_LINK if private else _FLAGS), "rb")
    try:
        # Checked again: the file that was opened may be another one.
        _check(os.fstat(file.fileno()), private)
    except BaseException:
        file.close()
        raise
    return file


def replace_file(path: Path, data: bytes | memoryview, *, private: bool) -> None:
    """Writes a file and puts it in place of an older one.

    `private`: only this user may read it; else those who may read the old one, or whom the process'
    umask lets if there is none.  Readers see the old file or the new one, never a part.  Not
    fsynced: a power cut may leave a torn file.  Raises OSError; then the old file is as it was.
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
    """A new name in the folder of a file, for what will be put in its place."""
    return path.with_name(f".tmp-{os.getpid()}-{os.urandom(8).hex()}")


def is_temporary(path: Path) -> bool:
    """Whether the name is one that `temporary_beside` gives."""
    return bool(_TEMPORARY.match(path.name))


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
