"""What broke a capture, in words that name the caller's line."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path
from types import ModuleType

import ostinato

__all__ = ["explained"]


def explained(error: Exception, library: ModuleType, cannot: str) -> str:
    """What broke a capture, and the line of the caller's code where it did.

    `cannot`: what of the library no graph can hold.
    """
    ours = tuple(
        f"{Path(str(module.__file__)).resolve().parent}/" for module in (ostinato, library)
    )
    text = str(error).strip().partition("\n")[0]
    kind = type(error).__name__
    place = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not str(Path(frame.filename).resolve()).startswith(ours):
            source = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
            place = f" at {frame.filename}:{frame.lineno}: {source}"
            break
    hint = ""
    if "captur" in text.lower():
        hint = (
            ". The line waits for the GPU, or does something else that no graph can hold "
            f"({cannot})"
        )
    return f"it cannot be captured: {kind}: {text}{place}{hint}"
