"""Text for a terminal: control characters in a model's or a file's text must not command it."""

from __future__ import annotations

import sys
from typing import TextIO

_CONTROLS = [i for i in (*range(0x20), *range(0x7F, 0xA0)) if chr(i) not in "\t\n"]
_PICTURES = {i: 0x2400 + i if i < 0x20 else 0x2421 if i == 0x7F else 0xFFFD for i in _CONTROLS}


def plain(text: str, stream: TextIO | None = None) -> str:
    """Returns the text as written to a stream, by default standard output.

    On a terminal, a control character other than a tab or a new line becomes a visible sign (ESC
    becomes U+241B), so that it cannot move the cursor or command the terminal.  For a file or a
    pipe the text is unchanged.
    """
    return text.translate(_PICTURES) if (stream or sys.stdout).isatty() else text


def say(text: str, *, end: str = "\n", stream: TextIO | None = None) -> None:
    """Prints a text and flushes, by default to standard output; see `plain`."""
    print(plain(text, stream), end=end, file=stream, flush=True)
