"""Fixtures for the tests of models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import threadpoolctl

from ostinato.device import Device
from tests.conftest import open_test_device


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
