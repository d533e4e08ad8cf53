"""A guard against overlapping calls of one decoder: the later of two calls raises."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from ostinato.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Leader(Protocol):
    """Rank 0's side of calls that other ranks repeat (`models.leading`)."""

    def call(
        self,
        name: str,
        method: Callable[..., T],
        args: tuple[object, ...],
        options: dict[str, Any],
    ) -> T:
        """Calls `method`, and has the other ranks do the same."""

    def end(self) -> None:
        """Tells the other ranks that no call follows."""


class Calls:
    """The lock of a decoder, and the name of the call that holds it.

    A call first checks whether the `lock` is free, and raises `overlap` if not; then it takes the
    lock.  If two threads check at the same moment, one of them waits for the other.
    """

    __slots__ = ("lead", "lock", "name")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.name = ""
        """The name of the call that holds the lock, or that held it last."""
        self.lead: Leader | None = None
        """The leader, if other ranks repeat the calls."""

    def overlap(self, name: str) -> InputError:
        """Returns the error that the call `name` raises while another call is under way."""
        return InputError(
            f"{name}() was called while {self.name}() of the same decoder was under way; such "
            "calls must not overlap: wait for it to return"
        )


def alone(method: F) -> F:
    """Wraps a method of an object with `_calls` so that it raises InputError, and does nothing,
    while another such call is under way in another thread or further up this thread's stack.

    The methods that run once a token repeat these lines inline to save a stack frame.
    """
    name = method.__qualname__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        calls: Calls = self._calls
        if calls.lock.locked():
            raise calls.overlap(name)
        with calls.lock:
            calls.name = name
            if calls.lead is not None:
                return calls.lead.call(name, partial(method, self), args, options)
            return method(self, *args, **options)

    return call  # type: ignore[return-value]
