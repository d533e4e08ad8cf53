"""What broke a capture, in words that name the caller's line."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path
from types import ModuleType

import ostinato
from ostinato.errors import Status


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
    if _status(error) == Status.STREAM_CAPTURE_IMPLICIT:
        hint = (
            ". The line, or a library that it calls, works on the legacy default stream, which no "
            f"graph can hold: give it the stream that is current in {library.__name__}"
        )
    return f"it cannot be captured: {kind}: {text}{place}{hint}"


def disturbed(error: BaseException) -> bool:
    """Whether an error of a capture says that something else had broken it before (status 901), and
    nothing that was called in it was refused."""
    statuses, known = set(), set()
    following: BaseException | None = error
    while following is not None and id(following) not in known:
        known.add(id(following))
        statuses.add(_status(following))
        hidden = following.__suppress_context__
        following = following.__cause__ or (None if hidden else following.__context__)
    return statuses - {None} == {Status.STREAM_CAPTURE_INVALIDATED}


def _status(error: BaseException) -> int | None:
    """Which rule of capture an error speaks of, by its status, or by CUDA's words for it."""
    status = getattr(error, "status", None)
    if isinstance(status, int):
        rule = Status.STREAM_CAPTURE_UNSUPPORTED <= status <= Status.STREAM_CAPTURE_WRONG_THREAD
        return int(status) if rule else None
    if isinstance(error, ostinato.OstinatoError):
        return None  # its cause has the status
    text = str(error).lower()
    if "previous error during capture" in text:
        return Status.STREAM_CAPTURE_INVALIDATED
    if "legacy stream depend" in text:
        return Status.STREAM_CAPTURE_IMPLICIT
    return Status.STREAM_CAPTURE_UNSUPPORTED if "captur" in text else None
