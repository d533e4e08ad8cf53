"""The line of the user's Python that a call came from."""

from __future__ import annotations

import enum
import linecache
import sys
from functools import lru_cache
from types import FrameType

_PACKAGE = __name__.partition(".")[0]
_COMMAND = f"{_PACKAGE}.cli"
"""Its callers are a shell, and a library that reads arguments."""
_USERS = tuple(f"{_PACKAGE}.{user}" for user in ("models", "relational"))
"""Packages built on the library: what calls them is named, and they where nothing else does."""
_MACHINERY = ("asyncio", "concurrent", "contextlib", "threading")


class _Place(enum.IntEnum):
    """The kind of a module, for a person who looks for a line."""

    OUTSIDE = 0
    USER = 1
    MACHINERY = 2


def describe_line(filename: str, line: int) -> str:
    """Returns "file:line: source"; without the source if it cannot be read."""
    source = linecache.getline(filename, line).strip()
    return f"{filename}:{line}: {source}" if source else f"{filename}:{line}"


def caller_location() -> str:
    """Returns the innermost line outside this package, to which its command does not belong.

    If there is none, as in a thread of the server, the innermost line of a package that is built on
    the library.
    """
    line = caller_line()
    return "unknown line" if line is None else describe_line(*line)


def caller_line(above: int = 1) -> tuple[str, int] | None:
    """Returns the place of `caller_location` as file and line number, for `describe_line`.

    `above`: the number of frames above this one that are known to be this package's own.
    """
    frame: FrameType | None = sys._getframe(above)
    user: FrameType | None = None
    while frame is not None:
        place = _place(frame.f_globals.get("__name__", ""))
        if place is _Place.OUTSIDE:
            return frame.f_code.co_filename, frame.f_lineno
        if place is _Place.USER and user is None:
            user = frame
        frame = frame.f_back
    return None if user is None else (user.f_code.co_filename, user.f_lineno)


def is_internal(frame: FrameType) -> bool:
    """True if a frame belongs to this package itself, not to a user of it.

    Decided by the module's name, not the file: generated code (dataclasses) has no file.
    """
    return _place(frame.f_globals.get("__name__", "")) is _Place.MACHINERY


@lru_cache(maxsize=1024)
def _place(name: str) -> _Place:
    top = name.partition(".")[0]
    if name.startswith(_USERS):
        return _Place.USER
    inside = top == _PACKAGE and not name.startswith(_COMMAND)
    return _Place.MACHINERY if inside or top in _MACHINERY else _Place.OUTSIDE
