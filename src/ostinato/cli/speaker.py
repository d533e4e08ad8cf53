"""The parts that `generate`, `chat` and `serve` share: loading, sampling options, printing."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ostinato.cli.plain import say
from ostinato.cli.progress import busy, fetched

if TYPE_CHECKING:
    from ostinato.distributed import Group
    from ostinato.models import SamplingOptions, TextGenerator


@contextmanager
def speaker(
    model: str,
    *,
    device: str | None,
    threads: int | None,
    quiet: bool = False,
    group: Group | None = None,
    **options: Any,
) -> Iterator[TextGenerator]:
    """Yields a generator.  `options` as for `Decoder`.  An exception of the block fails the group
    before the decoder is closed, whose work may wait for other ranks."""
    from ostinato.device import open_device
    from ostinato.models.generate import TextGenerator

    if threads is not None:
        options["threads"] = threads
    with open_device(device) as opened:  # finds a wrong name before a model is fetched
        path = fetched(model)
        with busy(f"loading {model}", quiet=quiet):
            generator = TextGenerator(opened, path, group=group, **options)
        with generator:
            try:
                yield generator
            except BaseException as error:
                if group is not None:
                    group.fail(error)
                raise


def sampling_options(
    base: SamplingOptions, seed: int | None, **named: float | None
) -> SamplingOptions:
    """Returns `base` with the given options.  Without a seed, draws one short enough to be typed
    again.  Raises InputError."""
    given = {name: value for name, value in named.items() if value is not None}
    return base.with_named(seed=secrets.randbits(32) if seed is None else seed, **given)


def advised_options(
    seed: int | None, **named: float | None
) -> Callable[[TextGenerator], SamplingOptions]:
    """Returns a function that adds the given options to what a loaded model's files advise.

    Raises InputError for options that no model accepts, before one is loaded.
    """
    from ostinato.models.sampling import READABLE

    sampling_options(READABLE, seed, **named)
    return lambda generator: sampling_options(generator.default_sampling, seed, **named)


def show(piece: str) -> None:
    """Prints a piece of an answer at once, on a terminal without control characters."""
    say(piece, end="")
