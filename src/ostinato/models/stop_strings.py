"""Texts that end an answer, found as it comes, also across the borders of its pieces.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ostinato.errors import InputError
from ostinato.models.arguments import quoted

__all__ = ["StopMatcher", "checked_stops"]


def checked_stops(stop: object) -> tuple[str, ...]:
    """One text or several, as a tuple.  Raises InputError for what is no text, or an empty one."""
    if isinstance(stop, bytes | bytearray) or not isinstance(stop, Iterable):
        raise InputError(f"stop is {quoted(stop)}, must be text or several texts")
    found: list[str] = []
    for text in (stop,) if isinstance(stop, str) else stop:
        if not isinstance(text, str) or not text:
            raise InputError(f"stop: {quoted(text)} must be text of one character or more")
        found.append(text)
    return tuple(dict.fromkeys(found))


class StopMatcher:
    """Passes pieces of text on, and ends before the first stop string that is complete.

    What may be the beginning of one is held back until the next pieces decide.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def __repr__(self) -> str:
        return f"<StopMatcher of {len(self._stops)} texts, {len(self._held)} characters held back>"

    def push(self, piece: str) -> tuple[str, bool]:
        """(the text that is certain now, whether a stop string ended it)."""
        if not self._stops:
            return piece, False
        text, self._held = self._held + piece, ""
        # The first that is complete, and of those that end there the longest: as if the characters
        # came one by one.  So a token of many characters ends where several of fewer would.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            return text[: min(found)[1]], True
        kept = len(text) - max(self._beginning(stop, text) for stop in self._stops)
        self._held = text[kept:]
        return text[:kept], False

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _beginning(stop: str, text: str) -> int:
        """How many characters at the end of the text are the beginning of a stop string."""
        longest = min(len(stop) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
