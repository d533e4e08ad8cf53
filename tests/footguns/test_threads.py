"""Threads and streams do not take each other's work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import CaptureError
from ostinato.explain.times import run_replay
from ostinato.testing import FaultyDriver, HeldStream
from tests.footguns.common import DefaultStream, N, Rows, count_step, graph_of, ones
from tests.sources import config, kernel, preload
from tests.threads import in_thread, in_threads

pytestmark = pytest.mark.usefixtures("launcher")  # compiled, and in Python


def test_two_threads_on_two_streams_replay_on_their_own(device: Device) -> None:
    counter = device.zeros(1, np.int32)
    first = device.create_stream()
    run = graph_of(first, kernel(device, "increment"), 1, counter, 1).instantiate(upload=first)
    second = device.create_stream()
    run.launch(second)  # the executable is prepared for both streams

    def replay(stream: ost.Stream) -> None:
        for _ in range(300):
            run.launch(stream)

    with HeldStream(second):
        in_threads(partial(replay, first))
        first.synchronize()  # does not wait for the held stream
    in_threads(partial(replay, first), partial(replay, second))
    device.synchronize()
    assert device.to_numpy(counter)[0] == 901


def test_a_graph_runs_on_the_stream_that_it_is_launched_on(device: Device) -> None:
    counter = device.zeros(1, np.int32)
    first, second = device.create_stream(), device.create_stream()
    run = graph_of(first, kernel(device, "increment"), 1, counter, 1).instantiate(upload=first)
    run.launch(first)
    run.launch(second)
    device.synchronize()
    for held, free in ((first, second), (second, first)):
        before = device.to_numpy(counter)[0]
        with HeldStream(held):
            run.launch(free)
            assert counter.to_numpy(free)[0] == before + 1
        device.synchronize()


def test_reused_arguments_go_to_the_kernel_and_stream_given(
    device: Device, stream: ost.Stream
) -> None:
    """The driver repeats a kept launch only for the same function, config and stream."""
    x = ones(device)
    scale, half, other = kernel(device, "scale"), config(N // 2), device.create_stream()
    twice = ost.prepare(scale, config(N), x, N)
    packed = twice.params.arguments

    def submit(where: ost.Stream, function: ost.Kernel, shape: ost.LaunchConfig) -> None:
        params = replace(twice.params, function=function.function, config=shape, arguments=packed)
        where.submit(replace(twice, params=params))

    for _ in range(2):
        stream.submit(twice)
    submit(stream, scale, half)
    np.testing.assert_array_equal(x.to_numpy(stream), np.repeat([8, 4], N // 2))
    submit(stream, kernel(device, "halve"), half)
    np.testing.assert_array_equal(x.to_numpy(stream), np.repeat([4, 4], N // 2))
    with ost.capture(other) as capture:
        submit(other, scale, config(N))
        submit(stream, scale, config(N))  # runs now, and is not captured
    assert len(capture.graph.nodes()) == 1
    np.testing.assert_array_equal(x.to_numpy(stream), np.full(N, 8))
    run = capture.graph.instantiate(upload=other)
    run.launch(other)
    np.testing.assert_array_equal(x.to_numpy(other), np.full(N, 16))


def test_a_held_launch_has_its_size_whatever_other_threads_call(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, cache = Rows(device), ost.GraphCache(device, buckets=ost.PowersOfTwo(8))
    step = ost.GraphedStep(work.add, stream=work.stream, cache=cache)
    for rows in (3, 3, 3, 4):
        step(rows=rows)
    other = threading.Thread(target=step, kwargs={"rows": 4}, daemon=True)

    def late(*arguments: Any) -> None:
        other.start()
        other.join(0.2)
        run_replay(*arguments)

    held = step.hold(rows=3)
    ost.fill(work.stream, work.totals, 0)
    with held:
        monkeypatch.setattr("ostinato.explain.times.run_replay", late)
        held.launch()
    other.join()
    assert work.seen() == [2, 2, 2, 1, 0, 0, 0, 0]


def test_another_threads_work_does_not_join_a_capture(device: Device, stream: ost.Stream) -> None:
    x, y = device.zeros(1, np.int32), device.zeros(1, np.int32)
    increment = kernel(device, "increment")
    with ost.capture(stream) as capture:
        ost.launch(stream, increment, config(1), x, 1)
        for call in (
            lambda: ost.launch(stream, increment, config(1), y, 1),
            lambda: ost.fill(stream, y, 3),
            stream.synchronize,
            lambda: y.to_numpy(stream),
            stream.record,
            device.synchronize,  # CUDA would break the capture
        ):
            error = in_thread(call)
            assert isinstance(error, CaptureError) and "another thread" in str(error)
    assert len(capture.graph) == 1  # the capture goes on without that work
    capture.graph.instantiate().launch(stream)
    assert [v.to_numpy(stream)[0] for v in (x, y)] == [1, 0]


def test_two_threads_steps_on_one_stream_take_turns(device: Device) -> None:
    stream, cache = device.create_stream(), ost.GraphCache(device)
    x, y = device.zeros(1, np.int32), device.zeros(1, np.int32)
    inside, increment = threading.Event(), kernel(device, "increment")
    first, joined = [], []

    def slowly(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, increment, config(1), x, 1)
        if first and stream.is_capturing():
            inside.set()
            time.sleep(0.05)  # lets the other thread call its step
            joined.append(len(stream.capture_info().dependencies))
        first.append(True)

    a = ost.GraphedStep(slowly, stream=stream, cache=cache)
    b = count_step(device, y, cache, 1, stream=stream)

    def other() -> None:
        assert inside.wait(30)
        b()

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(4):
        a()
    thread.join(60)
    assert not thread.is_alive()
    device.synchronize()
    assert [device.to_numpy(v)[0] for v in (x, y)] == [4, 1]
    assert joined == [1]


def test_two_objects_of_one_stream_are_one_stream(device: Device, stream: ost.Stream) -> None:
    """A foreign stream may be adopted twice."""
    x, again = ones(device), ost.Stream(device.context, stream.handle, owned=False, owner=stream)
    assert again.turn is stream.turn
    with ost.capture(stream):
        ost.fill(stream, x, 1)
        error = in_thread(lambda: ost.fill(again, x, 2))
        assert isinstance(error, CaptureError)


class _Between(FaultyDriver):
    """Calls a function when the driver has begun a capture, before this library notes it."""

    function: Callable[[], object] | None = None

    def stream_begin_capture(self, *arguments: Any) -> None:
        self.inner.stream_begin_capture(*arguments)
        if self.function is not None:
            self.function()


CALLS = pytest.mark.parametrize("call", ["launch", "submit", "fill"])


def put_work(call: str, stream: ost.Stream, x: ost.Buffer, double: ost.Kernel) -> None:
    """Doubles x, or fills it with 0, by one of the calls."""
    match call:
        case "launch":
            ost.launch(stream, double, config(N), x, N)
        case "submit":
            stream.submit(ost.prepare(double, config(N), x, N))
        case "fill":
            ost.fill(stream, x, 0)


@CALLS
def test_nothing_joins_a_capture_that_another_thread_begins(host_device: Device, call: str) -> None:
    """The driver has begun the capture, and this library has not noted it yet.

    Work that joined the capture then did not run, and ran in each replay."""
    driver = _Between(host_device.driver)
    device = preload(Device(driver))
    stream = device.create_stream()
    x, y = ones(device), ones(device)
    scale, raised = kernel(device, "scale"), []

    def between() -> None:
        raised.append(in_thread(lambda: put_work(call, stream, x, scale)))

    driver.function = between
    with ost.capture(stream) as under_way:
        driver.function = None
        ost.launch(stream, scale, config(N), y, N)
    assert [type(error) for error in raised] == [CaptureError]
    assert len(under_way.graph) == 1
    under_way.graph.instantiate().launch(stream)
    assert (x.to_numpy(stream)[0], y.to_numpy(stream)[0]) == (1, 2)


class _During(FaultyDriver):
    """Calls a function once, in the middle of a launch or fill."""

    function: Callable[[], object] | None = None

    def _now(self) -> None:
        function, self.function = self.function, None
        if function is not None:
            function()

    def launch_kernel(self, *arguments: Any) -> None:
        self._now()
        self.inner.launch_kernel(*arguments)

    def memset(self, *arguments: Any) -> None:
        self._now()
        self.inner.memset(*arguments)


@CALLS
def test_a_capture_begins_after_the_calls_of_other_threads(host_device: Device, call: str) -> None:
    """A fault let a capture begin after a launch had looked for one: the launch joined it."""
    driver = _During(host_device.driver)
    device = preload(Device(driver))
    stream = device.create_stream()
    x, y = ones(device), ones(device)
    scale, graphs, begun = kernel(device, "scale"), [], threading.Event()

    def capture() -> None:
        with ost.capture(stream) as under_way:
            begun.set()
            ost.launch(stream, scale, config(N), y, N)
        graphs.append(under_way.graph)

    thread = threading.Thread(target=capture)

    def between() -> None:
        thread.start()
        assert not begun.wait(0.2)

    driver.function = between
    put_work(call, stream, x, scale)
    thread.join()
    assert driver.function is None and len(graphs[0]) == 1
    wanted = 0 if call == "fill" else 2
    assert (x.to_numpy(stream)[0], y.to_numpy(stream)[0]) == (wanted, 1)
    graphs[0].instantiate().launch(stream)
    assert (x.to_numpy(stream)[0], y.to_numpy(stream)[0]) == (wanted, 2)


def test_a_held_replay_waits_for_a_run_of_its_step(device: Device) -> None:
    """A fault let a held replay run in the middle of another thread's eager run."""
    stream, add = device.create_stream(), kernel(device, "add")
    x, other, total = ones(device), device.zeros(N, np.float32), device.zeros(N, np.float32)
    begun, launched = threading.Event(), threading.Event()

    def run(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, add, config(N), total, x, other, N)  # other = total + 1
        if sizes.rows == 8:
            begun.set()
            launched.wait(0.2)
        ost.copy(stream, total, other)

    cache = ost.GraphCache(device, buckets=ost.PowersOfTwo(8))
    step = ost.GraphedStep(run, stream=stream, cache=cache)
    for _ in range(2):
        step(rows=4)
    held = step.hold(rows=4)
    with held:
        thread = threading.Thread(target=lambda: step(rows=8))
        thread.start()
        begun.wait()
        held.launch()
        launched.set()
        thread.join()
    assert total.to_numpy(stream)[0] == 4


def test_a_step_inside_of_a_step_and_beside_it(device: Device) -> None:
    """Two threads call the outer and the inner step, and neither waits for ever.

    A fault let one hold the stream's turn and the other the inner step."""
    stream, add, x = device.create_stream(), kernel(device, "add"), ones(device)
    total = device.zeros(N, np.float32)
    cache = ost.GraphCache(device, buckets=ost.PowersOfTwo(8))

    def run(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, add, config(N), total, x, total, N)

    inner = ost.GraphedStep(run, stream=stream, cache=cache, name="inner")
    outer = ost.GraphedStep(
        lambda stream, sizes: inner(rows=sizes.rows), stream=stream, cache=cache
    )
    outer.graphs = False
    calls = 300
    threads = [
        threading.Thread(target=lambda s=step: [s(rows=4) for _ in range(calls)], daemon=True)
        for step in (outer, inner)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    assert total.to_numpy(stream)[0] == 2 * calls


def test_a_held_graph_that_is_dropped_waits_for_no_step(device: Device) -> None:
    """Any thread may end a held graph, also one that the step waits for."""
    stream, other = device.create_stream(), device.create_stream()
    scale, x = kernel(device, "scale"), ones(device)
    inside, go_on = threading.Event(), threading.Event()
    go_on.set()

    def met() -> bool:
        inside.set()
        return go_on.wait(60)

    step = ost.GraphedStep(
        lambda stream, sizes: ost.launch(stream, scale, config(N), x, N),
        stream=stream,
        cache=ost.GraphCache(device, buckets=ost.PowersOfTwo(8)),
        preconditions={"met": met},
    )
    for _ in range(2):
        step(rows=4)
    held = step.hold(rows=4)
    held.launch()
    inside.clear()
    go_on.clear()
    calls = threading.Thread(target=lambda: step(rows=4), daemon=True)
    calls.start()
    inside.wait()
    del held
    ends = threading.Thread(target=other.synchronize, daemon=True)
    ends.start()
    ends.join(30)
    waits = ends.is_alive()
    go_on.set()
    calls.join()
    ends.join()
    assert not waits, "the other stream's work waited for the step"
    assert step.statistics().calls == 4


def test_another_thread_adds_nothing_to_a_graph_under_capture(
    device: Device, stream: ost.Stream
) -> None:
    graph, x, scale = ost.Graph.create(device), ones(device), kernel(device, "scale")
    with ost.capture(stream, into=graph):
        ost.launch(stream, scale, config(N), x, N)
        error = in_thread(graph.add_empty)
    assert isinstance(error, CaptureError) and "another thread is capturing" in str(error)
    assert len(graph) == 1


def test_a_capture_leaves_another_threads_default_stream_alone(
    device: Device, stream: ost.Stream
) -> None:
    """Streams do not block the default stream unless that is asked for."""
    x, y, scale = ones(device), ones(device), kernel(device, "scale")
    default, enough = device.adopt_stream(DefaultStream()), threading.Event()
    begun, raised, turns = threading.Event(), list[BaseException](), 0

    def works() -> None:
        nonlocal turns
        try:
            while not enough.is_set() or turns < 4:
                ost.launch(default, scale, config(N), y, N)
                ost.launch(default, kernel(device, "halve"), config(N), y, N)
                turns += 1
                begun.set()
        except BaseException as error:
            raised.append(error)
            begun.set()

    other = threading.Thread(target=works)
    other.start()
    begun.wait(30)
    for _ in range(8):
        with ost.capture(stream) as capture:
            ost.launch(stream, scale, config(N), x, N)
            at = turns
            while turns < at + 2 and not raised:  # the other thread works inside the capture
                time.sleep(0)
        capture.graph.instantiate().launch(stream)
        stream.synchronize()
    enough.set()
    other.join()
    assert not raised
    assert (x.to_numpy(stream) == 256).all()
    default.synchronize()
    assert (y.to_numpy(stream) == 1).all()
