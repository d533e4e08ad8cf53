"""Memory that is put back as it was, also if that is interrupted."""

from __future__ import annotations

from collections.abc import Callable

from ostinato.errors import ContextPoisonedError, DriverError, StateLostError


def put_back(write: Callable[[], None], lost: Callable[[DriverError], str]) -> None:
    """Calls `write`, which puts all memory back; once more if it was interrupted or refused.

    Raises the interruption after that; StateLostError, with what `lost` says of the driver's error,
    if the driver refuses it then too; ContextPoisonedError at once.
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
