"""What `generate`, `chat` and `serve` share: a loaded model, its options, how text is printed."""

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
    """A generator for the block.  `options` as for `Decoder`.  What the block raises fails the
    group, before the decoder waits for its work, which may wait for other ranks."""
    from ostinato.device import open_device
    from ostinato.models.generate import TextGenerator

    if threads is not None:
        options["threads"] = threads
    with open_device(device) as opened:  # a wrong name is found before a model is fetched
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
    """`base` with the options that are given.  Without a seed, a fresh one that is short enough to
    be typed again.  Raises InputError."""
    given = {name: value for name, value in named.items() if value is not None}
    return base.with_named(seed=secrets.randbits(32) if seed is None else seed, **given)


def advised_options(
    seed: int | None, **named: float | None
) -> Callable[[TextGenerator], SamplingOptions]:
    """What a model's files advise, with the options that are given; asked once it is loaded.

    Raises InputError for options that no model could have, before one is loaded.
    """
    from ostinato.models.sampling import READABLE

    sampling_options(READABLE, seed, **named)
    return lambda generator: sampling_options(generator.default_sampling, seed, **named)


def show(piece: str) -> None:
    """Prints a piece of an answer at once; on a terminal without control characters."""
    say(piece, end="")
