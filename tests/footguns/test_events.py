"""An event that is recorded in a graph is recorded by each replay."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import CaptureBrokenError, CaptureError, GraphFileError
from ostinato.testing import HeldStream
from tests.footguns.common import N, ones
from tests.sources import config, kernel

BUILDS = pytest.mark.parametrize("build", ["capture", "record"])


@contextlib.contextmanager
def held_back(device: Device, stream: ost.Stream) -> Iterator[None]:
    """The stream waits for another stream, which does nothing until the block ends."""
    gate = device.create_stream()
    with HeldStream(gate):
        stream.wait(gate.record())
        yield


def built(stream: ost.Stream, build: str, work: Callable[[], object]) -> ost.Graph:
    """A graph of the work: it is captured, or it runs and is recorded."""
    if build == "capture":
        return ost.capture_function(stream, work)
    with ost.record(stream) as recording:
        work()
    stream.synchronize()
    return recording.build()


@BUILDS
def test_each_replay_records_the_event_that_its_step_records(device: Device, build: str) -> None:
    """A fault left the event as the eager run of another bucket had recorded it."""
    stream, other = device.create_stream(), device.create_stream()
    x, seen, event = device.zeros(1, np.int32), device.zeros(1, np.int32), device.create_event()

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "increment"), config(1), x, 1)
        stream.record(event)

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), build=build)
    for calls, rows in enumerate((4, 4, 8, 4, 4, 8, 8), 1):
        held = calls in (4, 5, 7)
        with held_back(device, stream) if held else contextlib.nullcontext():
            step(rows=rows)
            assert not held or not event.done()
            other.wait(event)
            ost.copy(other, seen, x)
        assert seen.to_numpy(other)[0] == calls
        assert event.done()
    assert not step.statistics().quarantined


@pytest.mark.parametrize(
    "way",
    ["plain", "definition closed", "clone", "child", "rebound", "patched", "updated", "recorded"],
)
def test_a_captured_event_is_recorded_however_its_graph_is_made(
    device: Device, stream: ost.Stream, way: str
) -> None:
    other = device.create_stream()
    x, y, seen = (device.zeros(1, np.int32) for _ in range(3))
    first, second = device.create_event(), device.create_event()

    def work(event: ost.Event, counter: ost.Buffer, by: int) -> None:
        ost.launch(stream, kernel(device, "increment"), config(1), counter, by)
        stream.record(event)

    event = first
    by = 5 if way == "patched" else 7
    graph = ost.capture_function(stream, lambda: work(first, y if way == "rebound" else x, by))
    run = graph.instantiate()
    if way == "definition closed":
        graph.close()
    if way == "clone":
        run = graph.clone().instantiate()
    if way == "child":
        around = ost.Graph.create(device)
        around.add_child(graph)
        run = around.instantiate()
    if way == "rebound":
        run.rebind({y: x})
    if way == "patched":
        run.set(0, "by", 7)
    if way == "updated":
        run.update(ost.capture_function(stream, lambda: work(second, x, 7)))
        event = second
    if way == "recorded":
        with ost.record(stream) as recording:
            work(second, x, 7)
        event, run = second, recording.build().instantiate()
        ost.copy(stream, x, y)
    run.upload(stream)
    device.synchronize()
    with held_back(device, stream):
        run.launch(stream)
        other.wait(event)
        ost.copy(other, seen, x)
        assert not event.done()
    assert seen.to_numpy(other)[0] == 7


@BUILDS
def test_an_event_may_fork_and_outlive_its_graph(
    device: Device, stream: ost.Stream, build: str
) -> None:
    """The last record of the event counts, and a record that nothing waits for has no node."""
    side, other = device.create_stream(), device.create_stream()
    x, y, seen, event = ones(device), ones(device), ones(device), device.create_event()
    add = kernel(device, "add")

    def work() -> None:
        ost.launch(stream, add, config(N), x, x, x, N)
        stream.record(event)
        side.wait(event)
        ost.launch(side, add, config(N), x, x, y, N)
        joins = side.record()
        stream.wait(joins)
        ost.launch(stream, add, config(N), x, y, x, N)
        stream.record(event)

    graph = built(stream, build, work)
    x.set(np.ones(N, np.float32), stream)
    run = graph.instantiate(upload=stream)
    assert [node.kind.name for node in graph.nodes()].count("EVENT_RECORD") == 1
    assert "event_record" in str(graph) and "stream.record(event)" in str(
        graph.nodes()[-1].location
    )
    device.synchronize()
    for expected in (6, 36):
        with held_back(device, stream):
            run.launch(stream)
            other.wait(event)
            ost.copy(other, seen, x)
        assert (seen.to_numpy(other) == expected).all()


@BUILDS
def test_events_with_timing_have_the_times_of_the_last_replay(
    device: Device, stream: ost.Stream, build: str
) -> None:
    """The start is recorded before the work after it, and the stop before the rest."""
    start, stop = (device.create_event(timing=True) for _ in range(2))
    seconds, opened, in_time = [0.0], threading.Event(), []
    opened.set()

    def work() -> None:
        stream.record(start)
        stream.record(stop)
        stream.record(start)
        stream.call(lambda: time.sleep(seconds[0]))
        stream.record(stop)
        stream.call(lambda: in_time.append(opened.wait(30)))

    run = built(stream, build, work).instantiate(upload=stream)
    for seconds[0] in (0.0, 0.2):
        opened.clear()
        run.launch(stream)
        stop.synchronize()
        opened.set()
        stream.synchronize()
        assert in_time.pop()
        assert stop.elapsed_since(start) >= seconds[0]


def test_a_timing_event_is_recorded_before_the_work_it_forks(
    device: Device, stream: ost.Stream
) -> None:
    side, add = device.create_stream(), kernel(device, "add")
    start, stop = (device.create_event(timing=True) for _ in range(2))
    x, y = ones(device), ones(device)

    def work() -> None:
        ost.launch(stream, add, config(N), x, x, x, N)
        side.wait(stream.record(start))
        side.call(lambda: time.sleep(0.2))
        ost.launch(side, add, config(N), x, x, y, N)
        stream.wait(side.record(stop))
        ost.launch(stream, add, config(N), x, y, x, N)

    run = ost.capture_function(stream, work).instantiate()
    for expected in (6, 36):
        run.launch(stream)
        assert (x.to_numpy(stream) == expected).all()
        assert stop.elapsed_since(start) >= 0.2


@pytest.mark.parametrize("of", ["nothing", "another stream", "a capture", "a replay"])
def test_a_capture_does_not_wait_for_what_is_not_in_it(
    device: Device, stream: ost.Stream, of: str
) -> None:
    """The driver leaves such a wait out of the graph, and no replay would wait."""
    other, event, x = device.create_stream(), device.create_event(), ones(device)

    def record() -> None:
        ost.fill(other, x, 2)
        other.record(event)

    if of == "another stream":
        record()
    if of in ("a capture", "a replay"):
        run = ost.capture_function(other, record).instantiate()
    if of == "a replay":
        run.launch(other)
    with pytest.raises(CaptureBrokenError) as caught, ost.capture(stream):
        with contextlib.suppress(CaptureBrokenError):  # the end of the capture raises too
            stream.wait(event)
        ost.fill(stream, x, 1)
    assert "stream.wait(event)" in (caught.value.location or "")
    device.synchronize()


@pytest.mark.parametrize("what", ["record", "wait"])
def test_a_step_that_orders_another_stream_is_run_eagerly(device: Device, what: str) -> None:
    """A capture would order the other stream once, and no replay would."""
    gate, stream, other = (device.create_stream() for _ in range(3))
    x, seen, event = device.zeros(1, np.int32), device.zeros(1, np.int32), device.create_event()

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "increment"), config(1), x, 1)
        if what == "record":
            other.record(event)
        else:
            other.wait(event)

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device))
    for _ in range(3):
        step()
    why = " ".join(step.statistics().quarantined.values())
    assert "broken at" in why and f"other.{what}(event)" in why
    device.synchronize()
    with HeldStream(gate):
        (other if what == "record" else gate).wait(gate.record())
        if what == "wait":
            gate.record(event)
        step()
        if what == "record":
            assert not event.done()
        else:
            ost.copy(other, seen, x)
            assert not other.done()


@pytest.mark.parametrize("kept", [True, False])
def test_a_body_records_no_event(device: Device, stream: ost.Stream, kept: bool) -> None:
    """CUDA has no event nodes in bodies.  A fork within the capture needs none."""
    side, x, y = device.create_stream(), ones(device), ones(device)
    graph = ost.Graph.create(device)
    branch = graph.add_conditional("if", graph.condition(default=1))
    (body,) = branch.bodies
    events = []

    def work() -> None:
        ost.fill(stream, x, 2)
        fork = stream.record()
        side.wait(fork)
        ost.fill(side, y, 3)
        stream.wait(side.record())
        events.extend([fork] * kept)

    def capture() -> None:
        with ost.capture(stream, into=body):
            work()

    if kept:
        with pytest.raises(CaptureBrokenError, match=r"fork = stream.record.*cannot record it"):
            capture()
        assert not len(body)
        events.clear()
        kept = False
    capture()
    assert len(body) == 2
    graph.instantiate().launch(stream)
    assert [int(b.to_numpy(stream)[0]) for b in (x, y)] == [2, 3]


def test_events_alone_are_no_capture(device: Device, stream: ost.Stream) -> None:
    """The work between the events went to another stream."""
    events = [device.create_event(timing=timing) for timing in (True, False)]
    x, other = ones(device), device.create_stream()
    for into in (None, ost.Graph.create(device)):
        nothing = pytest.raises(CaptureError, match="nothing was captured")
        with nothing, ost.capture(stream, into=into):
            for event in events:
                stream.record(event)
            ost.fill(other, x, 2)
        assert into is None or not len(into)


def test_a_store_refuses_a_graph_with_events_of_this_process(
    host_device: Device, tmp_path: Path
) -> None:
    """A restored graph would record an event of its own, and not the one of the step."""
    device, event = host_device, host_device.create_event()
    x, stream = ones(device), device.create_stream()

    def work() -> None:
        ost.fill(stream, x, 2)
        stream.record(event)

    store = ost.GraphStore(device, tmp_path, outputs={"x": x})
    with pytest.raises(GraphFileError, match="events of this process"):
        store.save("key", ost.capture_function(stream, work), check=False)
    assert "key" not in store


def test_the_last_of_a_graphs_records_of_an_event_counts(
    device: Device, stream: ost.Stream
) -> None:
    """A graph has two children that record the event, and a wait is for the second record."""
    other, event = device.create_stream(), device.create_event()
    x, seen = device.zeros(1, np.int32), device.zeros(1, np.int32)
    reached, opened = threading.Event(), threading.Event()

    def work() -> None:
        ost.launch(stream, kernel(device, "increment"), config(1), x, 1)
        stream.record(event)

    def hold() -> None:
        reached.set()
        opened.wait(30)

    inner, graph = ost.capture_function(stream, work), ost.Graph.create(device)
    first = graph.add_child(inner)
    held = graph.add_call(hold, after=[first])
    graph.add_child(inner, after=[held])
    run = graph.instantiate(upload=stream)
    device.synchronize()
    run.launch(stream)
    other.wait(event)
    ost.copy(other, seen, x)
    assert reached.wait(30) and not event.done()
    opened.set()
    assert seen.to_numpy(other)[0] == 2


@BUILDS
def test_a_step_that_keeps_its_event_makes_one_at_each_call(device: Device, build: str) -> None:
    """Replays of a bucket would record the event of its own capture, and not the one kept last."""
    stream = device.create_stream()
    x, last = device.zeros(1, np.int32), []

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "increment"), config(1), x, 1)
        last[:] = [stream.record()]

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), build=build)
    for rows in (4, 4, 8, 8):
        step(rows=rows)
    device.synchronize()
    with held_back(device, stream):
        step(rows=4)
        assert not last[0].done()
    reasons = step.statistics().quarantined.values()
    assert len(reasons) == 2 and all("last[:] = [stream.record()]" in why for why in reasons)


@BUILDS
def test_a_step_lets_another_stream_wait_for_it_at_each_call(device: Device, build: str) -> None:
    """CUDA allows a fork without work and without a join, and no replay makes a stream wait."""
    stream, other = device.create_stream(), device.create_stream()
    x, seen = device.zeros(1, np.int32), device.zeros(1, np.int32)

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "increment"), config(1), x, 1)
        other.wait(stream.record())

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), build=build)
    for _ in range(3):
        step()
    why = " ".join(step.statistics().quarantined.values())
    assert "other.wait(stream.record())" in why and "not joined" in why
    device.synchronize()
    with held_back(device, stream):
        step()
        ost.copy(other, seen, x)
        assert not other.done()
    assert seen.to_numpy(other)[0] == 4
