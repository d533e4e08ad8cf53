"""Work that a capture or a recording cannot hold is not lost."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import CaptureBrokenError, CaptureError, DriverError, InputError
from tests.footguns.common import DefaultStream, N, graph_of, ones
from tests.sources import config, kernel

pytestmark = pytest.mark.usefixtures("launcher")  # compiled, and in Python


def test_work_on_another_stream_is_not_lost(device: Device) -> None:
    """The step puts all of its work on another stream than its own.  (A part of it: in the planted
    catalogue.)"""
    counter, side = device.zeros(1, np.int32), device.create_stream()
    increment = kernel(device, "increment")
    for verify in ("off", "first", 1):
        step = ost.GraphedStep(
            lambda stream, _: ost.launch(side, increment, config(1), counter, 1),
            stream=device.create_stream(),
            cache=ost.GraphCache(device),
            slots=[ost.Slot("counter", counter, "state")],
            verify=verify,
        )
        device.synchronize()
        before = device.to_numpy(counter)[0]
        for _ in range(5):
            step()
            device.synchronize()
        assert device.to_numpy(counter)[0] == before + 5
        (why,) = step.statistics().quarantined.values()
        assert "increment went to" in why and Path(__file__).name in why


@pytest.mark.parametrize("call", ["copy", "host copy", "graph", "staged"])
def test_other_kinds_of_work_do_not_escape_either(device: Device, call: str) -> None:
    x, y = device.zeros(1, np.int32), device.zeros(1, np.int32)
    stream, side = device.create_stream(), device.create_stream()
    increment = kernel(device, "increment")
    value = ost.DeviceScalar(device, np.int32, initial=0, stream=side)
    run = graph_of(side, increment, 1, y, 1).instantiate(upload=side)
    calls = {
        "copy": lambda: ost.copy(side, y, x),
        "host copy": lambda: y.set([7], side),
        "graph": lambda: run.launch(side),
        "staged": lambda: value.set(3, side),
    }

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, increment, config(1), x, 1)
        calls[call]()

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), warmups=0)
    side.synchronize()
    seen = []
    for _ in range(3):
        step()
        device.synchronize()
        seen.append((device.to_numpy(x)[0], device.to_numpy(y)[0]))
    assert [a for a, _ in seen] == [1, 2, 3]
    if call == "graph":
        assert [b for _, b in seen] == [1, 2, 3]  # the capture launches nothing
    assert step.statistics().replays == 0


def test_a_caught_error_of_a_launch_still_breaks_the_capture(device: Device) -> None:
    x, y, side = device.zeros(1, np.int32), device.zeros(1, np.int32), device.create_stream()
    increment = kernel(device, "increment")

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, increment, config(1), x, 1)
        with contextlib.suppress(CaptureBrokenError):
            ost.launch(side, increment, config(1), y, 1)

    step = ost.GraphedStep(
        work, stream=device.create_stream(), cache=ost.GraphCache(device), warmups=0
    )
    for calls in (1, 2, 3):
        step()
        device.synchronize()
        assert [device.to_numpy(v)[0] for v in (x, y)] == [calls, calls]


def test_a_capture_without_work_is_an_error(device: Device, stream: ost.Stream) -> None:
    with pytest.raises(CaptureError, match="nothing was captured"), ost.capture(stream):
        pass
    assert not stream.is_capturing()
    empty = ost.Graph.create(device).instantiate()
    with pytest.raises(InputError, match="no nodes"):
        ost.GraphCache(device).install("nothing", empty)


@pytest.mark.parametrize("work", ["none", "elsewhere"])
def test_a_body_that_got_no_work_is_an_error(device: Device, stream: ost.Stream, work: str) -> None:
    graph, side, x = ost.Graph.create(device), device.create_stream(), ones(device)
    branch = graph.add_conditional("if", graph.condition(1))
    with (
        pytest.raises(CaptureError, match="nothing was captured"),
        ost.capture(stream, into=branch.bodies[0]),
    ):
        if work == "elsewhere":
            ost.fill(side, x, 5)
    with ost.capture(stream, into=branch.bodies[0]):
        ost.fill(stream, x, 7)
    gc.collect()
    graph.instantiate().launch(stream)
    assert (x.to_numpy(stream) == 7).all()


def test_an_upload_into_a_capture_does_not_break_it(device: Device, stream: ost.Stream) -> None:
    x = ones(device)
    run = ost.capture_function(stream, lambda: ost.fill(stream, x, 5)).instantiate()
    with ost.capture(stream) as capture:
        ost.fill(stream, x, 7)
        with pytest.raises(CaptureError, match="the capture goes on"):
            run.upload(stream)
    capture.graph.instantiate().launch(stream)
    assert (x.to_numpy(stream) == 7).all()


@pytest.mark.parametrize("call", ["launch", "upload", "replay", "record", "synchronize", "save"])
def test_a_capture_that_is_dropped_ends_before_the_next_call(
    device: Device, stream: ost.Stream, call: str, tmp_path: Path
) -> None:
    """The next call ends the capture, also one that submits no operation to the stream."""
    x = ones(device)
    graph = ost.capture_function(stream, lambda: ost.fill(stream, x, 7))
    run, cache = graph.instantiate(), ost.GraphCache(device)
    cache.install("x", run)

    def recorded() -> None:
        with ost.record(stream):
            ost.fill(stream, x, 6)

    calls: dict[str, Callable[[], object]] = {
        "launch": lambda: run.launch(stream),
        "upload": lambda: run.upload(stream),
        "replay": lambda: cache.replay("x", stream),
        "record": recorded,
        "synchronize": device.synchronize,
        "save": lambda: ost.graphfile.save(
            graph, tmp_path / "x.graph", outputs={"x": x}, check=False
        ),
    }
    under_way = ost.Capture(stream).begin()
    ost.fill(stream, x, 5)
    del under_way
    gc.collect()
    calls[call]()
    assert not stream.is_capturing() and not device.context.captures
    run.launch(stream)
    assert (x.to_numpy(stream) == 7).all()


def test_nodes_added_under_a_capture_that_is_dropped_go_with_it(
    device: Device, stream: ost.Stream
) -> None:
    graph, x = ost.Graph.create(device), ones(device)
    scale = kernel(device, "scale")
    with pytest.raises(ZeroDivisionError), ost.capture(stream, into=graph):
        (body,) = graph.add_conditional("if", graph.condition(1)).bodies
        body.add_kernel(scale, config(N), x, N)
        graph.add_kernel(scale, config(N), x, N)
        raise ZeroDivisionError
    assert len(graph) == 0
    assert not graph.labels  # else a later node with the same handle would get the label


@pytest.mark.parametrize("asked", ["parameter", "environment"])
def test_work_on_the_default_stream_in_a_capture_can_be_found(
    device: Device, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """Streams do not look for it by default: the work runs once, and no replay has it."""
    x, scale = ones(device), kernel(device, "scale")
    default = device.adopt_stream(DefaultStream())
    if asked == "environment":
        monkeypatch.setenv("OSTINATO_BLOCKING_CAPTURES", "1")
        stream = device.create_stream()
    else:
        stream = device.create_stream(blocking=True)

    def work() -> None:
        ost.launch(stream, scale, config(N), x, N)
        ost.fill(default, x, 0)

    with pytest.raises(CaptureBrokenError, match=r"906.*legacy default stream") as caught:
        ost.capture_function(stream, work)
    assert "ost.fill(default, x, 0)" in (caught.value.location or "")
    assert "a stream of its own" in str(caught.value)
    run = graph_of(stream, scale, N, x, N)
    run.instantiate().launch(stream)
    assert (x.to_numpy(stream) == 2).all()


def test_a_forked_stream_is_recorded(device: Device) -> None:
    """A recording of a fork does what a capture of it does."""
    stream, side = device.create_stream(), device.create_stream()
    x, y = device.zeros(1, np.int32), device.zeros(1, np.int32)
    increment = kernel(device, "increment")

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, increment, config(1), x, 1)
        side.wait(stream.record())
        ost.launch(side, increment, config(1), y, 5)
        stream.wait(side.record())
        ost.launch(stream, increment, config(1), x, 1)

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), build="record")
    for calls in range(1, 5):
        step()
        device.synchronize()
        assert [device.to_numpy(v)[0] for v in (x, y)] == [2 * calls, 5 * calls]
    assert step.statistics().replays == 3


@pytest.mark.parametrize("kind", ["host copy", "scalar", "side stream", "waits"])
def test_what_cannot_be_recorded_breaks_the_recording(device: Device, kind: str) -> None:
    stream, side = device.create_stream(), device.create_stream()
    x, y = device.zeros(N, np.float32), device.zeros(N, np.float32)
    scalar = ost.DeviceScalar(device, np.float32, initial=0, stream=stream)
    values, outside = [], side.record()
    breaks = {
        "host copy": lambda: y.set(np.full(N, values[-1], np.float32), stream),
        "scalar": lambda: scalar.set(values[-1], stream),
        "side stream": lambda: ost.fill(side, y, values[-1]),
        "waits": lambda: stream.wait(outside),
    }

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        values.append(float(len(values)))
        breaks[kind]()
        ost.launch(stream, kernel(device, "axpy"), config(N), y, scalar, x, N)

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), build="record")
    for _ in range(3):
        step()
    assert len(values) == 3, "each call ran"
    (why,) = step.statistics().quarantined.values()
    assert "the recording was broken at" in why and Path(__file__).name in why


@pytest.mark.parametrize("how", ["device", "asarray", "event", "event done", "elapsed"])
def test_what_the_host_reads_breaks_the_recording(host_device: Device, how: str) -> None:
    """The host may read memory of the device here, as it may read pinned memory on a GPU."""
    device, stream = host_device, host_device.create_stream()
    side, event = device.create_stream(), device.create_event(timing=True)
    x, y = device.zeros(1, np.int32), device.zeros(1, np.int32)
    increment = kernel(device, "increment")

    def read() -> int:
        stream.record(event)
        side.wait(event)
        while how == "event done" and not event.done():
            pass
        if how == "event":
            event.synchronize()
        if how == "device":
            device.synchronize()
        while how == "elapsed":
            with contextlib.suppress(DriverError):  # the stream has not reached the event
                event.elapsed_since(event)
                break
        return int(np.asarray(x)[0] if how == "asarray" else x.array[0])

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, increment, config(1), x, 1)
        ost.launch(stream, increment, config(1), y, read())

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), build="record")
    for expected in (1, 3, 6):
        step()
        assert y.to_numpy(stream)[0] == expected
    (why,) = step.statistics().quarantined.values()
    assert "the recording was broken at" in why and "the host waited for" in why


def test_a_recorded_launch_has_the_patches_of_its_executable(device: Device) -> None:
    stream, x = device.create_stream(), device.zeros(1, np.int32)
    increment = kernel(device, "increment")
    run = graph_of(stream, increment, 1, x, 1).instantiate(upload=stream)
    run.set(0, "by", 10)
    step = ost.GraphedStep(
        lambda stream, _: run.launch(stream),
        stream=stream,
        cache=ost.GraphCache(device),
        build="record",
    )
    for calls in range(1, 4):
        step()
        assert x.to_numpy(stream)[0] == 10 * calls


def test_a_recorded_launch_is_not_of_what_its_graph_became(device: Device) -> None:
    stream, x = device.create_stream(), device.zeros(1, np.int32)
    increment = kernel(device, "increment")
    graph = graph_of(stream, increment, 1, x, 1)
    run = graph.instantiate()
    with ost.record(stream) as recording:
        run.launch(stream)
    same = recording.build()
    graph.add_kernel(increment, config(1), x, 10)
    with pytest.raises(CaptureBrokenError, match=r"test_captures.*nodes were added since"):
        recording.build()
    same.instantiate().launch(stream)
    assert x.to_numpy(stream)[0] == 2


@pytest.mark.parametrize("forked", [False, True])
def test_what_is_captured_in_a_recording_did_not_run(device: Device, forked: bool) -> None:
    """A recorded step calls a step that captures its graph during the recording."""
    stream, side = device.create_stream(), device.create_stream()
    x, y = device.zeros(1, np.int32), device.zeros(1, np.int32)
    increment = kernel(device, "increment")

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, increment, config(1), x, 1)
        if forked:
            side.wait(stream.record())
            ost.launch(side, increment, config(1), y, 1)
            stream.wait(side.record())

    inner = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device))
    inner()

    def run(stream: ost.Stream, _: ost.Sizes) -> None:
        inner()

    step = ost.GraphedStep(run, stream=stream, cache=ost.GraphCache(device), build="record")
    for calls in (2, 3, 4):
        step()
        assert x.to_numpy(stream)[0] == calls
        assert y.to_numpy(stream)[0] == (calls if forked else 0)
    assert step.statistics().replays == 2


def test_a_recorded_run_that_raises_is_not_tried_again(device: Device) -> None:
    stream, x, fail = device.create_stream(), device.zeros(1, np.int32), [True]

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "increment"), config(1), x, 1)
        if fail:
            fail.clear()
            raise ZeroDivisionError("mine")

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), build="record")
    with pytest.raises(ZeroDivisionError):
        step()
    for _ in range(2):
        assert step().action.value == "eager"
    assert x.to_numpy(stream)[0] == 3
    assert "mine" in str(step.statistics().quarantined)
