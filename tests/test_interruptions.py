"""Ctrl-C at any line: no capture stays open, no change is torn, nothing hangs, no key is dead.

On the host, where everything but NumPy and the interpreter is this package's own Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import KernelNodeParams
from tests.interrupted import every, interrupt, lines
from tests.sources import config, kernel
from tests.sums import Sums, assert_sound


@pytest.fixture
def device(host_device: Device) -> Device:
    return host_device


@pytest.fixture(params=[25, pytest.param(3, marks=pytest.mark.slow)])
def step_size(request: pytest.FixtureRequest) -> int:
    """Every so many lines are interrupted; with `--all-lines` each is."""
    return 1 if request.config.getoption("--all-lines") else request.param


def shadow(sums: Sums) -> list[float]:
    """What `params` says that a launch will give."""
    said = []
    for index in range(3):
        params = sums.run.params(index)
        assert isinstance(params, KernelNodeParams)
        address = int.from_bytes(params.arguments.raw(0), "little")
        said.append({sums.a.address: 6.0, sums.b.address: 10.0}[address])
    return said


def test_a_capture_always_ends(device: Device, step_size: int) -> None:
    sums = Sums(device)
    stream = sums.stream

    def work() -> None:
        with ost.capture(stream):
            sums.submit(sums.a)

    for at in every(lines(work), step_size):
        where = interrupt(work, at)
        assert_sound(device, stream)
        assert sums.answers() == [6, 6, 6], where


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_capture_begun_by_hand_ends_once_it_is_dropped(
    device: Device, step_size: int, mode: Any
) -> None:
    sums = Sums(device)
    stream = sums.stream

    def work() -> None:
        under_way = ost.Capture(stream, mode=mode)
        under_way.begin()
        sums.submit(sums.a)
        under_way.end()

    for at in every(lines(work), step_size):
        interrupt(work, at)
        assert_sound(device, stream)


def test_a_recording_stops_listening(device: Device, step_size: int) -> None:
    sums = Sums(device)

    def work() -> None:
        with ost.record(sums.stream) as recording:
            sums.submit(sums.a)
        recording.build().instantiate()

    for at in every(lines(work), step_size):
        interrupt(work, at)
        assert_sound(device, sums.stream)


CHANGES: dict[str, Callable[[Sums], object]] = {
    "rebind": lambda s: s.run.rebind({s.a: s.b}),
    "argument": lambda s: s.run.set(1, "a", s.b),
    "update": lambda s: s.run.update(s.other),
    "parameters": lambda s: s.run.set(1, s.other.nodes()[1].params, keep=(s.b,)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_made_or_not(device: Device, step_size: int, change: str) -> None:
    sums = Sums(device)
    run = CHANGES[change]
    before = sums.run.handle
    run(sums)
    after = sums.answers()
    count = lines(lambda: run(sums))
    for at in every(count, step_size):
        sums.run = sums.graph.instantiate()
        where = interrupt(lambda: run(sums), at)
        assert sums.run.usable(), where
        seen = sums.answers()
        assert seen in ([6, 6, 6], after), where
        if change in ("rebind", "update"):
            assert shadow(sums) == seen, where
        run(sums)
        assert sums.answers() == after, where
    assert before


def test_a_node_that_is_off_does_not_run(device: Device, step_size: int) -> None:
    sums = Sums(device)
    for enabled in (False, True):

        def work(enabled: bool = enabled) -> None:
            sums.run.set(1, enabled=enabled)

        for at in every(lines(work), step_size):
            sums.run.set(1, enabled=not enabled)
            where = interrupt(work, at)
            assert sums.answers() == [6, 6 if sums.run.enabled(1) else 0, 6], where


def test_a_key_is_not_dead_and_nobody_waits_for_it(device: Device, step_size: int) -> None:
    sums = Sums(device)
    cache = ost.GraphCache(device)

    def make() -> ost.GraphExec:
        return sums.graph.instantiate()

    def work() -> None:
        cache.get_or_capture("key", make)

    for at in every(lines(work), step_size):
        cache.evict_all()
        waiting: list[threading.Thread] = []

        def make_while_others_wait(waiting: list[threading.Thread] = waiting) -> ost.GraphExec:
            thread = threading.Thread(target=cache.get_or_capture, args=("key", make))
            thread.start()
            waiting.append(thread)
            return make()

        where = interrupt(lambda: cache.get_or_capture("key", make_while_others_wait), at)
        for thread in waiting:
            thread.join(30)
            assert not thread.is_alive(), where
        cache.get_or_capture("key", make).launch(sums.stream)
        statistics = cache.statistics()
        assert statistics.graphs == 1
        assert statistics.nbytes == sum(key.nbytes for key in statistics.keys)


def test_launches_and_copies_hang_nothing(device: Device, step_size: int) -> None:
    sums = Sums(device)
    other = device.create_stream()

    def work() -> None:
        sums.run.launch(sums.stream)
        sums.run.launch(other)
        ost.copy(sums.stream, sums.outs[0], sums.outs[1])
        other.wait(sums.stream.record())
        sums.stream.synchronize()

    work()
    for at in every(lines(work), step_size):
        interrupt(work, at)
        assert_sound(device, sums.stream)
        assert_sound(device, other)
        assert sums.answers() == [6, 6, 6]


def test_the_first_work_of_a_stream_hangs_nothing(device: Device) -> None:
    x = device.zeros(1, np.uint32)

    def work() -> None:
        ost.fill(device.create_stream(), x, 7)

    for at in range(1, lines(work) + 1):
        where = interrupt(work, at)
        waiting = threading.Thread(target=device.synchronize, daemon=True)
        waiting.start()
        waiting.join(20)
        assert not waiting.is_alive(), where


@pytest.mark.parametrize("build", ["capture", "record"])
@pytest.mark.parametrize("verify", ["off", 1])
def test_a_step_goes_on(device: Device, step_size: int, build: str, verify: object) -> None:
    counter, increment = device.zeros(1, np.int32), kernel(device, "increment")
    slots = [ost.Slot("counter", counter, "state")]

    def fresh() -> ost.GraphedStep:
        return ost.GraphedStep(
            lambda stream, _: ost.launch(stream, increment, config(1), counter, 1),
            stream=device.create_stream(),
            cache=ost.GraphCache(device),
            slots=slots,
            build=build,
            verify=verify,
        )

    def calls(step: ost.GraphedStep) -> None:
        for _ in range(4):
            step()

    # Checks read and write a lot: every line of them would take minutes.
    stride = step_size * (4 if verify == 1 else 1)
    count = lines(lambda: calls(fresh()))
    device.synchronize()  # that step's stream is not the others'
    for at in every(count, stride):
        step = fresh()
        where = interrupt(lambda: calls(step), at)  # noqa: B023
        assert_sound(device, step.stream)
        for _ in range(3):
            before = counter.to_numpy(step.stream)[0]
            step()
            assert counter.to_numpy(step.stream)[0] == before + 1, where
        step.close()


def test_memory_is_given_back(device: Device, step_size: int) -> None:
    def work() -> None:
        buffer = device.zeros(1000, "bytes")
        buffer.close()
        device.context.collect()

    work()
    device.synchronize()
    free = device.memory_info()[0]
    points = list(every(lines(work), step_size))
    for at in points:
        # The driver adds up here what is live.  In `work` it would run a line for each allocation:
        # one that is lost moved the next interruption to the same place, which lost one again.
        device.memory_info()
        interrupt(work, at)
        device.synchronize()
    # Lost is what an interruption meets inside the driver's own calls: whether it freed something
    # is not known then, and to free it twice could take another owner's memory.
    assert (free - device.memory_info()[0]) // 1000 < len(points) // 4
