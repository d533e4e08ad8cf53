"""The line of the user's Python that a call came from."""

from __future__ import annotations

import linecache
import sys
from functools import lru_cache
from types import FrameType

_PACKAGE = __name__.partition(".")[0]
_USERS = tuple(f"{_PACKAGE}.{user}" for user in ("models", "cli", "relational"))
_MACHINERY = ("contextlib", "threading")


def describe_line(filename: str, line: int) -> str:
    """Returns "file:line: source"; without the source if it cannot be read."""
    source = linecache.getline(filename, line).strip()
    return f"{filename}:{line}: {source}" if source else f"{filename}:{line}"


def caller_location() -> str:
    """Returns the innermost line outside this package (models and CLI count as users of it)."""
    line = caller_line()
    return "unknown line" if line is None else describe_line(*line)


def caller_line(above: int = 1) -> tuple[str, int] | None:
    """Returns the place of `caller_location` as file and line number, for `describe_line`.

    `above`: the number of frames above this one that are known to be this package's own.
    """
    frame: FrameType | None = sys._getframe(above)
    while frame is not None:  # the test of `is_internal`, without a call for each frame
        if not _is_machinery(frame.f_globals.get("__name__", "")):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def is_internal(frame: FrameType) -> bool:
    """True if a frame belongs to this package itself, not to a user of it.

    Decided by the module's name, not the file: generated code (dataclasses) has no file.
    """
    return _is_machinery(frame.f_globals.get("__name__", ""))


@lru_cache(maxsize=1024)
def _is_machinery(name: str) -> bool:
    if name in _MACHINERY:
        return True
    return name.partition(".")[0] == _PACKAGE and not name.startswith(_USERS)
