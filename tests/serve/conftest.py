"""Fixtures for the tests of the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import threadpoolctl

from tests.serve import serving


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def close_clients() -> Iterator[None]:
    yield
    while serving.clients:
        serving.clients.pop().close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """BLAS's threads spin while they wait: beside other work, two are slower than one."""
    with threadpoolctl.threadpool_limits(limits=1, user_api="blas"):
        yield
