"""`with` for everything that has `close()`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import NoReturn, Self

__all__ = ["Closeable"]


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

    def __reduce__(self) -> NoReturn:
        # A copy would own the same handles, and closing it would free them under the original.
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: share it, or make another"
        )
