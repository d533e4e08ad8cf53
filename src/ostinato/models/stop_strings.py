"""Texts that end an answer, found as it comes, also across the borders of its pieces.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ostinato.errors import InputError
from ostinato.models.arguments import quoted


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
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def __repr__(self) -> str:
        return f"<StopMatcher of {len(self._stops)} texts, {len(self._held)} characters held back>"

    def push(self, piece: str) -> tuple[str, bool]:
        """(the text that is certain now, whether a stop string ended it)."""
        if not self._stops:
            return piece, False
        before, text = len(self._held), self._held + piece
        self._held = ""
        # The first that is complete, and of those that end there the longest: as if the characters
        # came one by one.  So a token of many characters ends where several of fewer would.
        # What was held back has none that is complete: one ends in the new piece.
        found = [
            (at + len(stop), at)
            for stop in self._stops
            if (at := text.find(stop, max(0, before + 1 - len(stop)))) >= 0
        ]
        if found:
            return text[: min(found)[1]], True
        # From the front: what is passed over is passed on, so that all pieces together take time
        # by their length alone, whatever the stop strings are.
        kept = next(
            at for at in range(max(0, len(text) + 1 - self._longest), len(text) + 1)
            if self._begins_one(text[at:])
        )  # fmt: skip
        self._held = text[kept:]
        return text[:kept], False

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _begins_one(self, end: str) -> bool:
        """Whether a stop string begins so; all of them begin with nothing."""
        return any(stop.startswith(end) for stop in self._stops)
