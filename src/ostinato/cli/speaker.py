"""What `generate` and `chat` share: an open model with its generator."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ostinato.cli.progress import busy, fetched

if TYPE_CHECKING:
    from ostinato.models import SamplingOptions, TextGenerator

__all__ = ["sampling_options", "speaker"]


@contextmanager
def speaker(
    model: str, *, device: str | None, threads: int | None, quiet: bool = False, **options: Any
) -> Iterator[TextGenerator]:
    """A generator for the block.  `options` as for `Decoder`."""
    from ostinato.device import open_device
    from ostinato.models.generate import TextGenerator

    if threads is not None:
        options["threads"] = threads
    with open_device(device) as opened:  # a wrong name is found before a model is fetched
        path = fetched(model)
        with busy(f"loading {model}", quiet=quiet):
            generator = TextGenerator(opened, path, **options)
        with generator:
            yield generator


def sampling_options(seed: int | None, **options: Any) -> SamplingOptions:
    """Without a seed, a fresh one that is short enough to be typed again."""
    from ostinato.models.sampling import SamplingOptions

    return SamplingOptions(seed=secrets.randbits(32) if seed is None else seed, **options)
