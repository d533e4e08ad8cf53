"""What commands are given to read and write: looked at before the work, not after minutes of it."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path

import typer

__all__ = [
    "expanded",
    "finite",
    "ready_file",
    "ready_folder",
    "require_readable",
    "text",
]


def expanded(path: Path | None) -> Path | None:
    """For options that take a path: `~` in it, which a shell leaves alone after a `=`."""
    try:
        return None if path is None else path.expanduser()
    except RuntimeError:
        raise typer.BadParameter(f"{path}: there is no such user's home folder") from None


def text(value: str | None) -> str | None:
    """For what is said to a model: bytes that are no text in the locale's encoding are refused."""
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        raise typer.BadParameter(
            f"{value!r} is no text in this locale's encoding, {encoding}"
        ) from None
    return value


def finite(value: float | None) -> float | None:
    """For options that take a number: nan and inf are none."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number to reckon with")
    return value


def require_readable(folder: Path) -> None:
    """Raises OSError for a folder that is there and cannot be looked into: to the library, whose
    caches are optional, it is as if it were empty."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder):
        pass


def ready_folder(folder: Path, option: str) -> None:
    """Makes the folder if it is not there.  Raises BadParameter where that cannot be, or where
    nothing can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"no such folder can be made: {error}", param_hint=option
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"{folder} cannot be written", param_hint=option)


def ready_file(path: Path, option: str) -> None:
    """Makes the folder that a file will be in.  Raises BadParameter for what cannot be a file."""
    try:
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder; a file is wanted", param_hint=option)
        if path.exists() and not path.is_file():  # a device, a pipe
            return
    except OSError as error:  # a name that is too long, a folder that nobody may look into
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint=option) from None
    ready_folder(path.parent, option)
