"""`with` for everything that has `close()`, and words for names of other libraries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self, TypeVar

T = TypeVar("T")


class _Elsewhere:
    """A name that a class does not have: reading it says what to write instead."""

    def __init__(self, name: str, hint: str) -> None:
        self.name, self.hint = name, hint

    def __get__(self, instance: object, kind: type) -> NoReturn:
        raise AttributeError(
            f"{kind.__name__!r} object has no attribute {self.name!r}: {self.hint}",
            name=self.name,
            obj=instance,
        )


def elsewhere(**hints: str) -> Callable[[type[T]], type[T]]:
    """A decorator for classes: names that users of other libraries look for, and what to write.

    Not `__getattr__`, with which CPython reads every attribute of an object several times as
    slowly.  Type checkers do not see these names, and `dir` does not list them.
    """

    def decorate(kind: type[T]) -> type[T]:
        for name, hint in hints.items():
            assert not hasattr(kind, name)
            setattr(kind, name, _Elsewhere(name, hint))
        return kind

    return decorate


class Closeable(ABC):
    """Base of everything that has `close()`.

        with ost.open_device() as device:
            ...

    The end of the `with` block calls it.
    """

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Gives back what is owned.  Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def __dir__(self) -> list[str]:
        held = {n: v for kind in reversed(type(self).__mro__) for n, v in vars(kind).items()}
        return [n for n in super().__dir__() if not isinstance(held.get(n), _Elsewhere)]

    def __reduce__(self) -> NoReturn:
        # A copy would own the same handles, and closing it would free them under the original.
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: share it, or make another"
        )
