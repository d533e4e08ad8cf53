"""`with` for every class that has `close()`, and hints for names of other libraries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self, TypeVar

T = TypeVar("T")


class _Elsewhere:
    """A name that a class does not have: reading it raises an AttributeError with a hint."""

    def __init__(self, name: str, hint: str) -> None:
        self.name, self.hint = name, hint

    def __get__(self, instance: object, kind: type) -> NoReturn:
        raise AttributeError(
            f"{kind.__name__!r} object has no attribute {self.name!r}: {self.hint}",
            name=self.name,
            obj=instance,
        )


def elsewhere(**hints: str) -> Callable[[type[T]], type[T]]:
    """Decorates a class with names from other libraries, each with a hint of what to write instead.

    Not by `__getattr__`, with which CPython reads every attribute of an object several times more
    slowly.  Type checkers do not have these names, and `dir` does not list them.
    """

    def decorate(kind: type[T]) -> type[T]:
        for name, hint in hints.items():
            assert not hasattr(kind, name)
            setattr(kind, name, _Elsewhere(name, hint))
        return kind

    return decorate


class Closeable(ABC):
    """The base of every class that has `close()`.

        with ost.open_device() as device:
            ...

    The end of the `with` block calls `close`.
    """

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Releases everything that the object owns.  Idempotent."""

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
