"""Fixtures for the tests of models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
