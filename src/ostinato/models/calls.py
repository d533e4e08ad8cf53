"""Calls of one decoder, which must not overlap: the later one of two is refused."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ostinato.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])


class Calls:
    """Which call of a decoder is under way.

    A call first looks whether the `lock` is free, and raises `overlap` if not; then it holds it.
    Of two threads that looked at the same moment one waits for the other.
    """

    __slots__ = ("lock", "name")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.name = ""
        """The call that holds the lock, or held it last."""

    def overlap(self, name: str) -> InputError:
        """What a call raises while another one is under way."""
        return InputError(
            f"{name}() was called while {self.name}() of the same decoder was under way; such "
            "calls must not overlap: wait for it to return"
        )


def alone(method: F) -> F:
    """A method of an object with `_calls`: it raises InputError, and does nothing, while another
    such call is under way, in another thread or further out in the same.

    The methods that a token goes through have these lines written out, which costs no frame.
    """
    name = method.__qualname__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        calls: Calls = self._calls
        if calls.lock.locked():
            raise calls.overlap(name)
        with calls.lock:
            calls.name = name
            return method(self, *args, **options)

    return call  # type: ignore[return-value]
