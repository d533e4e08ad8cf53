"""The host driver draws the order of what nothing orders, so that a missing edge shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.host.driver import HostDriver
from tests.conftest import open_test_device
from tests.sources import preload


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device of each driver."""
    if request.param == "host":
        opened = Device(HostDriver(shuffle=2))
    else:
        opened = open_test_device(request.param, request.config)
    with opened:
        yield preload(opened)


@pytest.fixture
def stream(device: Device) -> ost.Stream:
    return device.create_stream()
