"""The fixtures of all files of this package."""

from __future__ import annotations

import pytest

import ostinato as ost
from ostinato.device import Device


@pytest.fixture(autouse=True)
def launcher(launcher: str) -> str:
    """Every test runs with both replay paths, the compiled one and the one in Python."""
    return launcher


@pytest.fixture
def stream(device: Device) -> ost.Stream:
    return device.create_stream()
