"""Restores memory, also if that is interrupted."""

from __future__ import annotations

from collections.abc import Callable

from ostinato.errors import ContextPoisonedError, DriverError, StateLostError


def put_back(write: Callable[[], None], lost: Callable[[DriverError], str]) -> None:
    """Calls `write`, which puts all memory back; once more if it was interrupted or refused.

    Then raises the interruption; StateLostError, with the text of `lost` for the driver's error, if
    the driver refuses the second call too; ContextPoisonedError at once.
    """
    try:
        write()
    except ContextPoisonedError:
        raise
    except BaseException as error:
        try:
            write()
        except DriverError as refused:
            raise StateLostError(lost(refused)) from refused
        if not isinstance(error, DriverError):
            raise
