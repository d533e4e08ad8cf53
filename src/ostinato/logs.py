"""Python's logging, imported when something is said: most programs start and end without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging


def logger(name: str) -> logging.Logger:
    """Returns `logging.getLogger(name)`."""
    import logging

    return logging.getLogger(name)
