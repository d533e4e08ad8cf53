"""Limits of captures: a pure function from the captures of a cache to a refusal, or None.

A capture costs milliseconds, a replay microseconds.  Under a budget that is too small, or with
memory that keeps moving, a key is captured over and over, and its calls take longer than eager
runs.  These limits then refuse the capture, with a reason, and a `GraphedStep` runs the call
eagerly.  `Spent` adds up the time that captures took.
"""

from __future__ import annotations

import enum
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.driver.api import whole_number
from ostinato.errors import InputError


class Refusal(enum.StrEnum):
    """The reason why a capture is refused."""

    SECONDS = "the captures of the cache have taken the time that they may take"
    RECAPTURED = "the key was captured too often lately"


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused capture: the reason, and as text the numbers that led to it."""

    reason: Refusal
    detail: str

    def __str__(self) -> str:
        return f"{self.reason.value} ({self.detail})"


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """Limits for the captures of one `GraphCache`.  None is no limit.

    `seconds` is the host time that captures may take in any `window` seconds; with `window` None,
    since the cache was made.  A capture that has begun is finished, so the last one may exceed it.
    `per_key` is the number of captures of one key in its last `within` uses (hits and misses); the
    key can be captured again once enough of them are older.  Failed captures count too.

    `per_key` depends on the order of calls alone, so processes that make the same calls decide
    alike; `seconds` depends on the clock.  Raises InputError for numbers that are out of range.
    """

    seconds: float | None = None
    window: float | None = None
    per_key: int | None = None
    within: int = 1000

    def __post_init__(self) -> None:
        for name in ("seconds", "window"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise InputError(f"{name}={value!r}: more than 0 seconds, or None for no limit")
        if self.window is not None and self.seconds is None:
            raise InputError("a window is for `seconds`: give the seconds that it may hold")
        for name, value in (("per_key", self.per_key), ("within", self.within)):
            if (whole_number(value) or 0) < 1 and not (value is None and name == "per_key"):
                raise InputError(f"{name}={value!r}: a whole number of 1 or more is needed")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def refuse(
    limits: CaptureLimits, *, spent: float, uses: int, captured_at: Sequence[int]
) -> Refused | None:
    """Returns why a capture of a key must not begin; None if it may.

    `spent`: seconds that captures have taken in the window.  `uses`: the number of uses of the key
    so far.  `captured_at`: that number at the begin of each of the key's last captures.
    """
    if limits.per_key is not None:
        recent = sum(1 for at in captured_at if uses - at < limits.within)
        if recent >= limits.per_key:
            return Refused(
                Refusal.RECAPTURED,
                f"{recent} times in its last {limits.within} uses, at most {limits.per_key}",
            )
    if limits.seconds is not None and spent >= limits.seconds:
        window = "" if limits.window is None else f" in {limits.window:g} s"
        return Refused(Refusal.SECONDS, f"{spent:.3g} s{window}, at most {limits.seconds:g} s")
    return None


class Spent:
    """The host time of captures.  Not thread-safe; the cache's lock guards it."""

    def __init__(self) -> None:
        self._all = 0.0
        self._lately: deque[tuple[float, float]] = deque()
        """The end (monotonic clock) and the seconds of each capture inside the window."""

    def add(self, seconds: float, window: float | None) -> None:
        """Adds a capture that ended now; `window` is that of the current limits."""
        self._all += seconds
        if window is not None:
            self._lately.append((time.monotonic(), seconds))

    def within(self, window: float | None) -> float:
        """Returns the seconds of captures that ended in the last `window` seconds; None: of all."""
        if window is None:
            return self._all
        since = time.monotonic() - window
        while self._lately and self._lately[0][0] <= since:
            self._lately.popleft()
        return sum(seconds for _, seconds in self._lately)
