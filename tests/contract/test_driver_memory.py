"""Memory: allocations, copies and fills."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ostinato.driver.api import Driver, MemoryRange
from ostinato.driver.process_memory import as_numpy
from ostinato.errors import DriverError, OutOfMemoryError, Status
from tests.contract.kernels import Rig, refused

ODD = np.arange(1000, dtype=np.uint8)


def test_bytes_come_back(rig: Rig) -> None:
    address = rig.array(ODD, np.uint8)
    assert (rig.read(address, 1000, np.uint8) == ODD).all()
    assert (rig.read(address + 7, 100, np.uint8) == ODD[7:107]).all()


@pytest.mark.parametrize("nbytes", [1, 100, 1 << 20])
def test_allocations_are_aligned_and_known(driver: Driver, nbytes: int) -> None:
    address = driver.mem_alloc(nbytes)
    assert address % 256 == 0
    assert driver.memory_range(address) == MemoryRange(address, nbytes)
    assert driver.memory_range(address + nbytes - 1) == MemoryRange(address, nbytes)
    driver.mem_free(address)
    assert driver.memory_range(address) is None


def test_allocations_do_not_overlap(driver: Driver) -> None:
    ranges = [MemoryRange(driver.mem_alloc(300), 300) for _ in range(20)]
    ordered = sorted(ranges, key=lambda r: r.address)
    for one, next_ in itertools.pairwise(ordered):
        assert one.end <= next_.address
    for one in ranges:
        driver.mem_free(one.address)


@pytest.mark.alone
def test_memory_info(driver: Driver) -> None:
    free, total = driver.memory_info()
    assert 0 < free <= total
    address = driver.mem_alloc(64 << 20)
    assert driver.memory_info()[0] <= free
    driver.mem_free(address)


def test_too_much_memory_is_said(driver: Driver) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        driver.mem_alloc(1 << 46)
    assert caught.value.status == Status.OUT_OF_MEMORY
    driver.mem_free(driver.mem_alloc(16))  # the context is sound


def test_wrong_sizes_and_addresses(driver: Driver) -> None:
    with refused(Status.INVALID_VALUE):
        driver.mem_alloc(0)
    address = driver.mem_alloc(1024)
    with refused(Status.INVALID_VALUE):
        driver.mem_free(address + 256)
    driver.mem_free(address)
    with refused(Status.INVALID_VALUE):
        driver.mem_free(address)


def test_copies_between_device_and_pinned(rig: Rig) -> None:
    driver = rig.driver
    pinned = driver.mem_alloc_pinned(64)
    view = as_numpy(pinned, (64,), np.dtype(np.uint8), None)
    view[:] = range(64)
    address, other = rig.zeros(64, np.uint8), rig.zeros(64, np.uint8)
    driver.memcpy(address, pinned, 64, rig.stream)
    driver.memcpy(other, address + 32, 32, rig.stream)
    assert rig.values(other, 33, np.uint8) == [*range(32, 64), 0]
    driver.memset(address, 0xEE, 1, 10, rig.stream)
    driver.memcpy(pinned, address, 64, rig.stream)
    driver.stream_synchronize(rig.stream)
    assert bytes(view[:12]) == b"\xee" * 10 + bytes([10, 11])
    found = driver.memory_range(pinned)
    assert found is None or found.holds(pinned, 64)
    del view
    driver.mem_free_pinned(pinned)


@pytest.mark.parametrize(("size", "value"), [(1, 0xAB), (2, 0xABCD), (4, 0xABCDEF01)])
def test_fills(rig: Rig, size: int, value: int) -> None:
    address = rig.zeros(64, np.uint8)
    rig.driver.memset(address, value, size, 5, rig.stream)
    expected = value.to_bytes(size, "little") * 5
    assert rig.read(address, 64, np.uint8).tobytes() == expected.ljust(64, b"\0")


def test_nothing_to_copy(rig: Rig) -> None:
    address = rig.array([1, 2])
    rig.driver.memcpy(address, address + 4, 0, rig.stream)
    rig.driver.memset(address, 7, 1, 0, rig.stream)
    rig.driver.memcpy_from_host(address, memoryview(b""), rig.stream)
    rig.driver.memcpy_to_host(memoryview(bytearray()), address, rig.stream)
    assert rig.values(address, 2) == [1, 2]


@pytest.mark.parametrize("nbytes", [64, 4 << 20])
def test_the_source_may_change_after_the_copy(rig: Rig, nbytes: int) -> None:
    address = rig.zeros(nbytes, np.uint8)
    source = bytearray(b"\1" * nbytes)
    rig.driver.memcpy_from_host(address, memoryview(source), rig.stream)
    source[:] = b"\2" * nbytes
    assert (rig.read(address, nbytes, np.uint8) == 1).all()


def test_copies_keep_stream_order(rig: Rig) -> None:
    x = rig.zeros(256)
    for value in range(1, 20):
        rig.driver.memset(x, 0, 4, 256, rig.stream)
        rig.launch("fill", x, float(value), 256)
    assert rig.values(x, 256) == [19.0] * 256


def test_a_fill_of_three_bytes_is_no_fill(rig: Rig) -> None:
    x = rig.zeros(16)
    with refused(Status.INVALID_VALUE):
        rig.driver.memset(x, 0, 3, 4, rig.stream)


def test_what_is_refused_changes_nothing(rig: Rig) -> None:
    x = rig.array([1, 2, 3])
    with pytest.raises(DriverError):
        rig.driver.memset(x + 1, 0, 4, 1, rig.stream)  # not aligned to its elements
    assert rig.values(x, 3) == [1, 2, 3]


def test_shared_memory_has_a_handle_and_garbage_opens_nothing(driver: Driver) -> None:
    if not driver.capabilities.shares_memory:
        pytest.skip("no device whose memory can be shared")
    address = driver.mem_alloc(1 << 21)
    handle = driver.memory_share(address)
    assert handle and handle == bytes(handle)
    with pytest.raises(DriverError):
        driver.memory_open_shared(handle[:-1])
    with pytest.raises(DriverError):
        driver.memory_open_shared(handle)  # its own
    with pytest.raises(DriverError):
        driver.memory_end_shared(address)
    driver.mem_free(address)


def test_memory_of_the_process_is_adopted_where_kernels_can_read_it(rig: Rig) -> None:
    driver, values = rig.driver, np.arange(64, dtype=np.float32)
    address = values.ctypes.data
    if not driver.capabilities.host_memory_is_device_memory:
        for call in (
            lambda: driver.memory_adopt(address, values.nbytes, values),
            lambda: driver.memory_end_adopted(address),
        ):
            with refused(Status.NOT_SUPPORTED):
                call()
        return
    assert driver.memory_adopt(address, values.nbytes, values)
    rig.launch("fill", address, 3.0, 32)
    assert rig.values(address, 64) == [3.0] * 32 + [*range(32, 64)]
    for free in (driver.mem_free, driver.mem_free_pinned, driver.memory_end_shared):
        with refused(Status.INVALID_VALUE):
            free(address)
    driver.memory_end_adopted(address)
    with refused(Status.INVALID_VALUE):
        driver.memset(address, 0, 1, 1, rig.stream)
    with refused(Status.INVALID_VALUE):
        driver.memory_end_adopted(address)
    assert driver.memory_adopt(rig.zeros(4), 16, None) is False  # its own
