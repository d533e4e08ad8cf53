"""What is shipped for users' tests: faults on demand, streams that stand still."""

from __future__ import annotations

import time

import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import Driver
from ostinato.driver.host.driver import HostDriver
from ostinato.errors import DriverError, InputError, OutOfMemoryError, Status, StreamCaptureError
from ostinato.testing import FaultyDriver, HeldStream


@pytest.fixture
def faults() -> FaultyDriver:
    return FaultyDriver(HostDriver())


def takes_a_driver(driver: Driver) -> str:
    return driver.name


def test_without_faults_it_is_the_inner_driver(faults: FaultyDriver) -> None:
    assert takes_a_driver(faults) == "host"
    assert faults.capabilities == faults.inner.capabilities
    assert faults.properties == faults.inner.properties
    address = faults.mem_alloc(64)
    assert faults.memory_range(address) == faults.inner.memory_range(address)
    faults.mem_free(address)
    assert faults.calls == ["mem_alloc", "memory_range", "mem_free"]
    assert (faults.count("mem_alloc"), faults.count("synchronize")) == (1, 0)
    faults.close()


def test_the_nth_call_fails_so_many_times(faults: FaultyDriver) -> None:
    fault = faults.fail("mem_alloc", status=Status.OUT_OF_MEMORY, at=2, times=2)
    faults.mem_alloc(1)
    faults.memory_info()
    for _ in range(2):
        with pytest.raises(OutOfMemoryError, match="injected"):
            faults.mem_alloc(1)
    assert fault.spent
    faults.mem_alloc(1)
    assert (fault.seen, fault.fired, faults.faults) == (3, 2, [])
    assert faults.count("mem_alloc") == 4
    assert faults.memory_info()[1] - faults.memory_info()[0] == 2  # the failed ones did nothing


def test_the_status_decides_the_class(faults: FaultyDriver) -> None:
    faults.fail("stream_create", status=Status.STREAM_CAPTURE_INVALIDATED)
    with pytest.raises(StreamCaptureError) as caught:
        faults.stream_create()
    assert (caught.value.status, caught.value.call) == (901, "stream_create")


def test_any_call_may_fail(faults: FaultyDriver) -> None:
    faults.fail_any(at=3)
    stream = faults.stream_create()
    faults.stream_query(stream)
    with pytest.raises(DriverError) as caught:
        faults.graph_create()
    assert caught.value.status == Status.INVALID_VALUE
    faults.graph_create()


def test_prepared_launches_count_as_launches(faults: FaultyDriver) -> None:
    stream = faults.stream_create()
    run = faults.graph_instantiate(faults.graph_create())
    launch = faults.exec_prepare_launch(run, stream)
    launch()
    faults.fail("exec_launch", status=Status.UNKNOWN)
    with pytest.raises(DriverError):
        launch()
    launch()
    assert faults.count("exec_launch") == 3


def test_clear(faults: FaultyDriver) -> None:
    faults.fail("mem_alloc", at=100)
    faults.mem_alloc(1)
    faults.clear()
    assert (faults.faults, faults.calls) == ([], [])


@pytest.mark.parametrize("call", ["memalloc", "close", "name", "__init__", "_lock"])
def test_only_calls_of_the_seam_can_fail(faults: FaultyDriver, call: str) -> None:
    with pytest.raises(InputError):
        faults.fail(call)


@pytest.mark.parametrize(("at", "times"), [(0, 1), (1, 0)])
def test_numbers_count_from_one(faults: FaultyDriver, at: int, times: int) -> None:
    with pytest.raises(InputError):
        faults.fail_any(at=at, times=times)


def test_every_call_can_be_wrapped(faults: FaultyDriver) -> None:
    for name in dir(Driver):
        if not name.startswith("_"):
            assert hasattr(faults, name)
    with pytest.raises(AttributeError):
        _ = faults.no_such_call  # type: ignore[attr-defined]


def test_a_device_over_a_faulty_driver() -> None:
    faults = FaultyDriver(HostDriver())
    with Device(faults) as device:
        stream = device.create_stream()
        x = device.zeros(4, "bytes")
        faults.fail("memset", status=1)
        with pytest.raises(ost.OstinatoError):
            ost.fill(stream, x, 1)
        ost.fill(stream, x, 1)


# --- held streams


def test_a_held_stream_stands_until_released(host_device: Device) -> None:
    stream = host_device.create_stream()
    x = host_device.zeros(4, "bytes")
    stream.synchronize()
    with HeldStream(stream) as held:
        assert held.wait_until_held()
        ost.fill(stream, x, 1)
        assert not host_device.driver.stream_query(stream.handle)
        held.release()
        held.release()
        stream.synchronize()
    assert (x.to_numpy(stream) == 1).all()


def test_leaving_releases_also_after_an_error() -> None:
    driver = HostDriver()
    stream = driver.stream_create()
    with pytest.raises(KeyError), HeldStream(driver, stream):
        raise KeyError
    driver.stream_synchronize(stream)
    driver.close()


def test_a_limit_and_a_delay() -> None:
    driver = HostDriver()
    stream = driver.stream_create()
    with HeldStream(driver, stream, at_most=0.02):
        began = time.perf_counter()
        driver.stream_synchronize(stream)
        assert 0.01 < time.perf_counter() - began < 30
    with HeldStream(driver, stream) as held:
        held.release_after(0.02)
        driver.stream_synchronize(stream)
    driver.close()


def test_what_to_hold_must_be_clear(host_device: Device) -> None:
    stream = host_device.create_stream()
    with pytest.raises(InputError):
        HeldStream(host_device.driver)
    with pytest.raises(InputError):
        HeldStream(stream, stream.handle)
