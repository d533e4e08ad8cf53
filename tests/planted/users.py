"""The catalogue of mistakes that users make with graphs: all of them, by name."""

from __future__ import annotations

# Each registers what it has.
from tests.planted import frozen, memory, missing, padding  # noqa: F401
from tests.planted.programme import PLANTS, Caught, Plant, play

__all__ = ["PLANTS", "Caught", "Plant", "play"]
