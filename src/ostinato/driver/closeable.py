"""`with` for everything that has `close()`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

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
