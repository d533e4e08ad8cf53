"""Where a command is asked to write: looked at before the work, and not after minutes of it."""

from __future__ import annotations

from pathlib import Path

import typer

__all__ = ["ready_file", "ready_folder"]


def ready_folder(folder: Path, option: str) -> None:
    """Makes the folder if it is not there.  Raises BadParameter where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"no such folder can be made: {error}", param_hint=option
        ) from None


def ready_file(path: Path, option: str) -> None:
    """Makes the folder that a file will be in.  Raises BadParameter for what cannot be a file."""
    ready_folder(path.parent, option)
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; a file is wanted", param_hint=option)
