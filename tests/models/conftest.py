"""Fixtures for the tests of models."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import threadpoolctl

from ostinato.device import Device
from ostinato.models.cuda.backend import CudaBackend
from tests.conftest import open_test_device
from tests.emulator.emulator import Emulator
from tests.models.emulated import EmulatedGpu, NumpyProducts
from tests.models.machines import OnDevice


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The device that a case names, "host" or "cuda" (`proof.on_both`): one for a whole module, so
    that a kernel compiled for one test is there for the next."""
    # BLAS's threads spin while they wait: beside other work, two are slower than one.
    threads = 1 if request.param == "host" else None
    with (
        threadpoolctl.threadpool_limits(limits=threads, user_api="blas"),
        open_test_device(request.param, request.config) as opened,
    ):
        yield opened


@pytest.fixture(scope="module")
def gpu(request: pytest.FixtureRequest) -> Iterator[Device]:
    """One device for all tests of a module: what is compiled for one is there for the next."""
    with open_test_device("cuda", request.config) as opened:
        yield opened


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, with a tokenizer and a chat template."""
    from tests.models.model_files import write_gguf  # needs what tests of kernels do not

    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def emulator() -> Emulator:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    return Emulator()


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Any:
    """The machine that a case of `machines.on_kernels` names."""
    if request.param == "emulator":
        return request.getfixturevalue("emulator")
    return OnDevice(request.getfixturevalue("cuda_device"))


@pytest.fixture
def library(host_device: Device, monkeypatch: pytest.MonkeyPatch) -> NumpyProducts:
    """Decoders of the test run the CUDA backend on the emulator, with this library."""
    found = NumpyProducts(host_device)

    def open_products(device: Any, rows: Any, stream: Any = None) -> Any:
        return (None, "not used: switched off") if rows is None else (found, "NumPy")

    def backend_for(device: Device, *, library_rows: Any, **_: object) -> CudaBackend:
        return CudaBackend(EmulatedGpu(device), library_rows=library_rows)  # type: ignore[arg-type]

    monkeypatch.setattr("ostinato.models.cuda.backend.open_products", open_products)
    monkeypatch.setattr("ostinato.models.decoder.backend_for", backend_for)
    return found
