"""Both drivers, for tests of the seam: what they assert must hold on each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ostinato.driver.api import Driver, GraphHandle
from ostinato.driver.host.driver import HostDriver
from ostinato.errors import NotAvailableError
from tests.contract.kernels import Rig

_opened: dict[str, Driver] = {}


def open_cuda(config: pytest.Config) -> Driver:
    """The CUDA driver, opened once; skips where there is none and none is required."""
    if "cuda" not in _opened:
        try:
            from ostinato.driver.cuda.driver import CudaDriver

            _opened["cuda"] = CudaDriver(0)
        except (NotAvailableError, ImportError) as error:
            if config.getoption("--require-gpu"):
                pytest.fail(f"a GPU is required: {error}")
            pytest.skip(f"no device: {error}")
    return _opened["cuda"]


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """A driver: the host driver new for each test, the CUDA driver opened once."""
    if request.param == "cuda":
        yield open_cuda(request.config)
        return
    host = HostDriver()
    yield host
    host.close()


@pytest.fixture
def rig(driver: Driver) -> Iterator[Rig]:
    made = Rig(driver)
    yield made
    made.close()


@pytest.fixture
def graph(rig: Rig) -> GraphHandle:
    return rig.new_graph()


@pytest.fixture(scope="session", autouse=True)
def _close_cuda() -> Iterator[None]:
    yield
    for opened in _opened.values():
        opened.close()
    _opened.clear()
