"""What `generate` and `chat` share: a loaded model, its options, and how its text is printed."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ostinato.cli.progress import busy, fetched

if TYPE_CHECKING:
    from ostinato.distributed import Group
    from ostinato.models import SamplingOptions, TextGenerator

__all__ = ["sampling_options", "show", "speaker"]

_CONTROLS = [i for i in (*range(0x20), *range(0x7F, 0xA0)) if chr(i) not in "\t\n"]
_PICTURES = {i: 0x2400 + i if i < 0x20 else 0x2421 if i == 0x7F else 0xFFFD for i in _CONTROLS}


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


def sampling_options(seed: int | None, **options: Any) -> SamplingOptions:
    """Without a seed, a fresh one that is short enough to be typed again."""
    from ostinato.models.sampling import SamplingOptions

    return SamplingOptions(seed=secrets.randbits(32) if seed is None else seed, **options)


def show(piece: str) -> None:
    """Prints a piece of an answer at once.

    On a terminal a control character other than a tab or a new line becomes a visible sign (ESC
    becomes U+241B): a model's text must not move the cursor or command the terminal.  A file or a
    pipe gets the text as it is.
    """
    sys.stdout.write(piece.translate(_PICTURES) if sys.stdout.isatty() else piece)
    sys.stdout.flush()
