"""The line of the user's Python that a call came from."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType

__all__ = ["caller_location", "describe_line", "is_internal"]

_PACKAGE = str(Path(__file__).resolve().parent.parent)
_MACHINERY = ("contextlib.py", "threading.py")


def describe_line(filename: str, line: int) -> str:
    """ "file:line: source", the source where it can be read."""
    source = linecache.getline(filename, line).strip()
    return f"{filename}:{line}: {source}" if source else f"{filename}:{line}"


def caller_location() -> str:
    """The innermost line outside this package (models and CLI count as users of it)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_internal(name):
            return describe_line(name, frame.f_lineno)
        frame = frame.f_back
    return "unknown line"


def is_internal(filename: str) -> bool:
    """Whether a file is this package's own machinery, not a user of it."""
    if filename.endswith(_MACHINERY):
        return True
    if not filename.startswith(_PACKAGE):
        return False
    return not filename[len(_PACKAGE) + 1 :].startswith(("models", "cli", "relational"))
