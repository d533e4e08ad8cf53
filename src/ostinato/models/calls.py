"""Calls of one decoder, which must not overlap: the later one of two is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ostinato.errors import InputError

__all__ = ["Call", "alone"]

F = TypeVar("F", bound=Callable[..., Any])


class Call:
    """One that is under way."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def alone(method: F) -> F:
    """A method of an object whose `_calls` is a list of calls: its call raises InputError, and does
    nothing, while another one of that list is under way, in another thread or further out in the
    same.

    A list and no lock: what an interruption between two lines leaves in it is taken out again.
    """
    name = method.__qualname__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        calls: list[Call] = self._calls
        mine = Call(name)
        try:
            calls.append(mine)  # at once for all threads: one of them is the first
            first = calls[0]
            if first is not mine:
                raise InputError(
                    f"{name}() was called while {first.name}() of the same decoder was under way; "
                    "such calls must not overlap: wait for it to return"
                )
            return method(self, *args, **options)
        finally:
            if mine in calls:
                calls.remove(mine)

    return call  # type: ignore[return-value]
