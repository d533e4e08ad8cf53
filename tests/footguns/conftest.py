"""The fixtures of all files of this package."""

from __future__ import annotations

import pytest

import ostinato as ost
from ostinato.device import Device


@pytest.fixture
def stream(device: Device) -> ost.Stream:
    return device.create_stream()
