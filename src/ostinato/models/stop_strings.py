"""Search for the texts that end an answer, also across the borders of its pieces.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ostinato.errors import InputError
from ostinato.models.arguments import quoted


def checked_stops(stop: object) -> tuple[str, ...]:
    """Returns one text or several as a tuple without duplicates.  Raises InputError for an empty
    text, or for a value that is neither text nor several texts."""
    if isinstance(stop, bytes | bytearray) or not isinstance(stop, Iterable):
        raise InputError(f"stop is {quoted(stop)}, must be text or several texts")
    found: list[str] = []
    for text in (stop,) if isinstance(stop, str) else stop:
        if not isinstance(text, str) or not text:
            raise InputError(f"stop: {quoted(text)} must be text of one character or more")
        found.append(text)
    return tuple(dict.fromkeys(found))


class StopMatcher:
    """A filter of text pieces that ends the text before the first complete stop string.

    Text that may be the beginning of a stop string is held back until later pieces decide.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def __repr__(self) -> str:
        return f"<StopMatcher of {len(self._stops)} texts, {len(self._held)} characters held back>"

    def push(self, piece: str) -> tuple[str, bool]:
        """Adds a piece; returns the text that is final now, and True if a stop string ended it."""
        if not self._stops:
            return piece, False
        before, text = len(self._held), self._held + piece
        self._held = ""
        # The stop string that ends first, and of those that end there the longest, as if the
        # characters came one by one: the result does not depend on how the text is cut into pieces.
        # The held text has no complete stop string, so any match ends in the new piece.
        found = [
            (at + len(stop), at)
            for stop in self._stops
            if (at := text.find(stop, max(0, before + 1 - len(stop)))) >= 0
        ]
        if found:
            return text[: min(found)[1]], True
        # The search begins at the front: text that it skips is final and never searched again, so
        # the total time depends on the text's length only, whatever the stop strings are.
        kept = next(
            at for at in range(max(0, len(text) + 1 - self._longest), len(text) + 1)
            if self._begins_one(text[at:])
        )  # fmt: skip
        self._held = text[kept:]
        return text[:kept], False

    def finish(self) -> str:
        """Returns the held text, after the last piece."""
        held, self._held = self._held, ""
        return held

    def _begins_one(self, end: str) -> bool:
        """True if a stop string begins with `end`; always for the empty string."""
        return any(stop.startswith(end) for stop in self._stops)
