"""Options and fixtures for all tests."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread of BLAS, and of the decoder's kernels, for each worker and what it starts: two
    # workers that spin on two cores each take ten times as long.  Read when NumPy is imported, so
    # before everything else.  Tests of threads say how many there are.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OSTINATO_THREADS", "1")

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

import ostinato as ost
from benchmarks.uncompiled import without_extension
from ostinato.device import Device, open_device
from ostinato.driver import launcher as driver_launcher
from ostinato.driver.host.driver import HostDriver
from ostinato.errors import NotAvailableError
from ostinato.graphfile import child, saving
from tests.sources import preload

# A shell lets what it starts in the background ignore Ctrl-C, and nohup the end of its terminal; so
# would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No test depends on speed, so there are no deadlines and no check of how fast data is made.  The
# examples are the same in each run: who changes a line is not stopped by what another line does on
# a new example, and a failure is there again when it is looked into.  `make test-all` draws new
# ones, and more (--hypothesis-profile=random).
hypothesis.settings.register_profile(
    "same",
    derandomize=True,
    max_examples=50,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "random",
    hypothesis.settings.get_profile("same"),
    derandomize=False,
    max_examples=250,
    print_blob=True,
)
hypothesis.settings.load_profile("same")
# Nor do they depend on the constants in the modules that are imported by then, or on their paths.
providers.is_local_module_file = lambda path: False  # type: ignore[attr-defined]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="a missing GPU is a failure, not a skip",
    )
    parser.addoption(
        "--all-lines",
        action="store_true",
        help="interruptions before every line of what is tested, not before some",
    )
    parser.addoption(
        "--share",
        type=_share,
        metavar="K/N",
        help="only the K-th of N equal shares of the tests, for runs side by side",
    )


def _share(text: str) -> tuple[int, int]:
    which, _, of = text.partition("/")
    share = int(which), int(of)
    if not 1 <= share[0] <= share[1]:
        raise ValueError(f"{text} is no share: it is K/N with K from 1 to N")
    return share


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """What is there by now stays, thousands of tests and what others left: collections, of which
    some tests make hundreds, need not look at it again.  It is never thawed."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries that look for leaks at the end report what is frozen


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share: tuple[int, int] | None = config.getoption("--share")
    if share is not None:
        which, of = share
        chosen = items[which - 1 :: of]
        config.hook.pytest_deselected(items=[i for i in items if i not in set(chosen)])
        items[:] = chosen


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device of each driver: what a test asserts of it must hold on both."""
    with open_test_device(request.param, request.config) as opened:
        yield preload(opened)


@pytest.fixture
def stream(device: Device) -> ost.Stream:
    return device.create_stream()


@pytest.fixture
def other_device(device: Device) -> Iterator[Device]:
    """A second device of the same driver."""
    try:
        opened = open_device("host" if device.name == "host" else "cuda:1")
    except NotAvailableError as error:
        pytest.skip(f"no second device: {error}")
    with opened:
        yield preload(opened)


@pytest.fixture
def host_device() -> Iterator[Device]:
    """The host device, for rules that only it can show."""
    with open_device("host") as opened:
        yield preload(opened)


@pytest.fixture
def cuda_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A CUDA device, for tests marked gpu."""
    with open_test_device("cuda", request.config) as opened:
        yield preload(opened)


@pytest.fixture(params=["compiled", "python"])
def launcher(request: pytest.FixtureRequest) -> Iterator[str]:
    """Replays by the compiled hot path, where it was built, and by the one in Python."""
    if request.param == "python":
        with without_extension():
            yield "python"
    elif driver_launcher.compiled():
        yield "compiled"
    else:
        pytest.skip(f"replay call: {driver_launcher.description()}")


@pytest.fixture
def checks_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graph files of the host device are checked in this process, not in one that takes a second to
    start; but in tests that are marked `fresh_check`."""
    real = saving.subprocess

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if pickle.loads(Path(command[-1]).read_bytes())["device"] != "host":
            return real.run(command, **options)
        return subprocess.CompletedProcess(command, child.main(command[-1]), "", "")

    if request.node.get_closest_marker("fresh_check") is None:
        here = SimpleNamespace(run=run, TimeoutExpired=real.TimeoutExpired)
        monkeypatch.setattr(saving, "subprocess", here)


def open_test_device(name: str, config: pytest.Config) -> Device:
    """Opens a device, or skips where there is none and none is required."""
    try:
        return open_device(name)
    except NotAvailableError as error:
        if config.getoption("--require-gpu"):
            pytest.fail(f"a GPU is required: {error}")
        pytest.skip(f"no device: {error}")


DRIVERS = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]
"""The parameters of a fixture that opens a device of each driver."""


def shuffled_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device of each driver; the host driver draws the order of what nothing orders."""
    if request.param == "host":
        opened = Device(HostDriver(shuffle=2))
    else:
        opened = open_test_device(request.param, request.config)
    with opened:
        yield preload(opened)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The file of SmolLM2-135M-Instruct, fetched on first use."""
    from ostinato.models.files import store

    return store.pull("smollm2-135m")
