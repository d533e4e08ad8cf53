"""Handles of the host driver, tables of their objects, and the most frequent errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

from ostinato.errors import DriverError, Status, driver_error

# One counter for handles of every type: a handle of the wrong type is then always unknown.
new_handle: Callable[[], int] = itertools.count(0x5000_0000, 0x10).__next__

T = TypeVar("T")


def invalid(call: str, detail: str, *, node: int | None = None) -> DriverError:
    """Returns the error INVALID_VALUE."""
    return driver_error(Status.INVALID_VALUE, call, detail, node=node)


def unsupported(call: str, detail: str, *, node: int | None = None) -> DriverError:
    """Returns the error NOT_SUPPORTED."""
    return driver_error(Status.NOT_SUPPORTED, call, detail, node=node)


class HandleTable(dict[int, T]):
    """The live objects of one type by handle.  `what` names the type in errors."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def find(self, call: str, handle: int) -> T:
        """Returns the object of a handle.  Raises INVALID_HANDLE if there is none."""
        found = self.get(handle)
        if found is None:
            raise driver_error(Status.INVALID_HANDLE, call, f"{self._what} {handle:#x}")
        return found
