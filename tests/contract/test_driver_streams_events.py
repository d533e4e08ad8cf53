"""Streams and events: order, independence, waiting."""

from __future__ import annotations

import logging
import threading
from functools import partial

import pytest

from ostinato.driver.api import Driver, StreamHandle
from ostinato.errors import NotReadyError, Status
from ostinato.testing import HeldStream
from tests.contract.kernels import Rig, refused
from tests.threads import in_threads


def test_work_of_a_stream_runs_in_order(rig: Rig) -> None:
    x = rig.zeros(4)
    for number in range(50):
        rig.launch("fill", x, float(number), 4)
        rig.launch("scale", x, 2.0, 4)
    assert rig.values(x, 4) == [98.0] * 4


def test_a_held_stream_holds_nobody_else(rig: Rig) -> None:
    driver, x = rig.driver, rig.zeros(4)
    other = rig.new_stream()
    with HeldStream(driver, rig.stream) as held:
        rig.launch("fill", x, 1.0, 4)
        rig.launch("increment", x, stream=other)
        driver.stream_synchronize(other)
        assert driver.stream_query(other)
        assert not driver.stream_query(rig.stream)
        held.release()
        driver.stream_synchronize(rig.stream)
        assert driver.stream_query(rig.stream)


def test_host_functions_run_in_stream_order_on_another_thread(rig: Rig) -> None:
    seen: list[object] = []
    for number in range(3):
        rig.driver.launch_host_function(rig.stream, lambda number=number: seen.append(number))
    rig.driver.launch_host_function(rig.stream, lambda: seen.append(threading.get_ident()))
    rig.driver.stream_synchronize(rig.stream)
    assert seen[:3] == [0, 1, 2]
    assert seen[3] != threading.get_ident()


def test_a_host_function_that_raises_is_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("mine")

    x = rig.zeros(4)
    with caplog.at_level(logging.ERROR):
        rig.driver.launch_host_function(rig.stream, fails)
        rig.launch("fill", x, 3.0, 4)
        assert rig.values(x, 4) == [3.0] * 4
    assert "mine" in caplog.text


def test_an_event_never_recorded_counts_as_done(rig: Rig) -> None:
    event = rig.new_event()
    assert rig.driver.event_query(event)
    rig.driver.event_synchronize(event)
    rig.driver.stream_wait_event(rig.stream, event)
    rig.driver.stream_synchronize(rig.stream)


def test_an_event_marks_a_place_in_its_stream(rig: Rig) -> None:
    driver, event = rig.driver, rig.new_event()
    with HeldStream(driver, rig.stream) as held:
        driver.event_record(event, rig.stream)
        assert not driver.event_query(event)
        held.release_after(0.02)
        driver.event_synchronize(event)
        assert driver.event_query(event)


def test_another_stream_waits_for_an_event(rig: Rig) -> None:
    driver, x = rig.driver, rig.zeros(4)
    other, event = rig.new_stream(), rig.new_event()
    with HeldStream(driver, rig.stream):
        rig.launch("fill", x, 5.0, 4)
        driver.event_record(event, rig.stream)
        driver.stream_wait_event(other, event)
        rig.launch("scale", x, 3.0, 4, stream=other)
        assert not driver.stream_query(other)
    driver.stream_synchronize(other)
    assert rig.values(x, 4) == [15.0] * 4


def test_a_wait_is_for_the_record_before_it(rig: Rig) -> None:
    driver = rig.driver
    other, event = rig.new_stream(), rig.new_event()
    driver.event_record(event, other)
    driver.stream_wait_event(rig.stream, event)
    with HeldStream(driver, other):
        driver.event_record(event, other)  # a later record: the wait was for the one before
        driver.stream_synchronize(rig.stream)


def test_time_between_events(rig: Rig) -> None:
    driver = rig.driver
    start, end = rig.new_event(timing=True), rig.new_event(timing=True)
    driver.event_record(start, rig.stream)
    with HeldStream(driver, rig.stream) as held:
        driver.event_record(end, rig.stream)
        with pytest.raises(NotReadyError):
            driver.event_elapsed(start, end)
        held.release_after(0.03)
        driver.event_synchronize(end)
    assert 0.015 < driver.event_elapsed(start, end) < 10.0


def test_time_needs_timing_and_a_record(rig: Rig) -> None:
    driver = rig.driver
    plain, timed = rig.new_event(), rig.new_event(timing=True)
    driver.event_record(plain, rig.stream)
    with refused(Status.INVALID_HANDLE):
        driver.event_elapsed(plain, plain)
    with refused(Status.INVALID_HANDLE):
        driver.event_elapsed(timed, timed)


def test_synchronize_waits_for_every_stream(rig: Rig) -> None:
    driver, x = rig.driver, rig.zeros(4)
    other = rig.new_stream()
    with HeldStream(driver, other) as held:
        rig.launch("fill", x, 7.0, 4, stream=other)
        held.release_after(0.02)
        driver.synchronize()
    assert driver.stream_query(other)
    assert rig.values(x, 4) == [7.0] * 4


def test_the_legacy_stream_works(rig: Rig) -> None:
    x = rig.zeros(4)
    rig.launch("fill", x, 2.0, 4, stream=StreamHandle(0))
    rig.driver.stream_synchronize(StreamHandle(0))
    assert rig.values(x, 4) == [2.0] * 4


def test_a_destroyed_stream_still_runs_what_it_has(rig: Rig) -> None:
    driver, x = rig.driver, rig.zeros(4)
    other = driver.stream_create(priority=0)
    held = HeldStream(driver, other)
    with held:
        rig.launch("fill", x, 9.0, 4, stream=other)
        driver.stream_destroy(other)
    driver.synchronize()
    assert rig.values(x, 4) == [9.0] * 4


def test_many_threads_on_many_streams(rig: Rig) -> None:
    driver = rig.driver
    counters = [rig.zeros(1) for _ in range(4)]

    def work(counter: int) -> None:
        stream = driver.stream_create()
        for _ in range(100):
            rig.launch("increment", counter, stream=stream)
        driver.stream_synchronize(stream)
        driver.stream_destroy(stream)

    in_threads(*(partial(work, counter) for counter in counters))
    assert [rig.values(c, 1, "u4") for c in counters] == [[100]] * 4


def test_driver_says_what_it_is(driver: Driver) -> None:
    assert driver.name
    assert driver.properties.name
    assert driver.properties.max_threads_per_block >= 256
    assert driver.properties.total_memory == driver.memory_info()[1]
    fastest = driver.properties.memory_bandwidth
    on_host = driver.capabilities.host_memory_is_device_memory
    assert fastest == 0 if on_host else 1e11 < fastest < 1e14
    assert driver.capabilities.image_kinds
    assert driver.capabilities.source_language in ("host", "cuda")
