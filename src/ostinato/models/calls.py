"""Calls of one decoder, which must not overlap: the later one of two is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from ostinato.errors import InputError

__all__ = ["Call", "alone", "overlap"]

F = TypeVar("F", bound=Callable[..., Any])

Call: TypeAlias = tuple[str, object]
"""One that is under way: its method, and what tells it from others of that method."""


def overlap(calls: list[Call], call: Call) -> InputError:
    """What a call raises that is not the first of those under way."""
    return InputError(
        f"{call[0]}() was called while {calls[0][0]}() of the same decoder was under way; such "
        "calls must not overlap: wait for it to return"
    )


def alone(method: F) -> F:
    """A method of an object whose `_calls` is a list of calls: its call raises InputError, and does
    nothing, while another one of that list is under way, in another thread or further out in the
    same.

    A list and no lock: what an interruption between two lines leaves in it is taken out again.
    The methods that a token goes through have these lines written out, which costs no frame.
    """
    name = method.__qualname__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        calls: list[Call] = self._calls
        mine = (name, object())
        try:
            calls.append(mine)  # atomic: of several threads, exactly one is first
            if calls[0] is not mine:
                raise overlap(calls, mine)
            return method(self, *args, **options)
        finally:
            if mine in calls:
                calls.remove(mine)

    return call  # type: ignore[return-value]
