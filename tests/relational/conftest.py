"""A joiner on each driver, and one whose kernels are the CUDA ones on the emulator."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from ostinato.device import open_device
from ostinato.relational import Joiner
from tests.conftest import open_test_device
from tests.relational.emulated import emulated_source

WAYS = ["host", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=WAYS)
def joiner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Joiner]:
    """What a test asserts of it must hold on all."""
    if request.param == "emulated":
        if shutil.which("g++") is None:
            pytest.skip("the emulator needs g++")
        monkeypatch.setattr("ostinato.relational.joiner.source", emulated_source)
    name = "cuda" if request.param == "cuda" else "host"
    with open_test_device(name, request.config) as device, Joiner(device) as made:
        yield made


@pytest.fixture
def host_joiner() -> Iterator[Joiner]:
    with open_device("host") as device, Joiner(device) as made:
        yield made


@pytest.fixture
def cuda_joiner(request: pytest.FixtureRequest) -> Iterator[Joiner]:
    with open_test_device("cuda", request.config) as device, Joiner(device) as made:
        yield made
