"""Capture: nothing runs, it always ends, the first error wins and names its line."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import (
    CaptureBrokenError,
    CaptureError,
    ClosedError,
    GraphError,
    InputError,
    NotCapturingError,
    PoolSealedError,
)
from ostinato.testing import FaultyDriver
from tests.sources import config, kernel, preload


@pytest.fixture
def x(device: Device) -> ost.Buffer:
    return device.array(np.arange(1000, dtype=np.float32))


def assert_usable(device: Device, stream: ost.Stream, x: ost.Buffer) -> None:
    """The stream is not capturing, and a capture on it works."""
    assert not stream.is_capturing()
    assert not device.context.captures
    assert device.context.taps == ()
    before = x.to_numpy(stream)
    with ost.capture(stream) as capture:
        ost.launch(stream, kernel(device, "scale"), config(1000), x, 1000)
    capture.graph.instantiate(upload=stream).launch(stream)
    np.testing.assert_array_equal(x.to_numpy(stream), 2 * before)


def test_begin_and_end_as_steps(device: Device, stream: ost.Stream, x: ost.Buffer) -> None:
    capture = ost.Capture(stream)
    with pytest.raises(NotCapturingError, match="begin"):
        capture.end()
    with pytest.raises(NotCapturingError):
        _ = capture.graph
    capture.begin()
    ost.fill(stream, x, 0)
    graph = capture.end()
    assert len(graph) == 1
    with pytest.raises(NotCapturingError):
        capture.end()
    with pytest.raises(CaptureError, match="new one"):
        capture.begin()


def test_an_exception_ends_it_and_is_the_one_raised(
    device: Device, stream: ost.Stream, x: ost.Buffer
) -> None:
    with pytest.raises(KeyError, match="mine"), ost.capture(stream):
        ost.fill(stream, x, 0)
        raise KeyError("mine")
    assert_usable(device, stream, x)


def test_a_function_is_captured_and_cleaned_up(
    device: Device, stream: ost.Stream, x: ost.Buffer
) -> None:
    graph = ost.capture_function(stream, lambda: ost.fill(stream, x, 7))
    graph.instantiate().launch(stream)
    assert (x.to_numpy(stream) == 7).all()

    def fails() -> None:
        raise ZeroDivisionError("first")

    with pytest.raises(ZeroDivisionError, match="first"):
        ost.capture_function(stream, fails)
    assert_usable(device, stream, x)


def test_trace_finds_the_line_that_does_not_go_through_us(
    device: Device, stream: ost.Stream, x: ost.Buffer
) -> None:
    def foreign() -> None:
        with contextlib.suppress(ost.OstinatoError):
            device.driver.stream_query(stream.handle)  # behind our back

    with pytest.raises(CaptureBrokenError) as caught, ost.capture(stream, trace=True):
        ost.fill(stream, x, 0)
        foreign()
        _ = 1 + 1
    assert "behind our back" in (caught.value.location or "")
    assert_usable(device, stream, x)


@pytest.mark.parametrize("before", ["a call", "a finaliser"])
def test_trace_finds_the_line_that_goes_on_after_a_function(
    device: Device, stream: ost.Stream, x: ost.Buffer, before: str
) -> None:
    """The line of what had run in its middle was named, such as that of a garbage collection."""

    def nothing(*_: object) -> None:
        return None

    first = {"a call": nothing, "a finaliser": gc.collect}[before]
    if before == "a finaliser":
        gc.callbacks.append(nothing)
    try:
        with pytest.raises(CaptureBrokenError) as caught, ost.capture(stream, trace=True):
            ost.fill(stream, x, 0)
            with contextlib.suppress(ost.OstinatoError):
                _ = first(), device.driver.stream_query(stream.handle)  # behind our back
            _ = 1 + 1
    finally:
        if before == "a finaliser":
            gc.callbacks.remove(nothing)
    assert "behind our back" in (caught.value.location or "")
    assert_usable(device, stream, x)


def test_nested_capture_is_refused_and_the_outer_goes_on(
    device: Device, stream: ost.Stream, x: ost.Buffer
) -> None:
    with ost.capture(stream) as outer:
        with pytest.raises(CaptureError, match="nest"), ost.capture(stream):
            pass
        ost.fill(stream, x, 3)
    outer.graph.instantiate().launch(stream)
    assert (x.to_numpy(stream) == 3).all()


def test_sealed_pool_is_refused_before_it_begins(device: Device, stream: ost.Stream) -> None:
    pool = device.pool(reserve=4096, name="weights")
    with ost.capture(stream, pool=pool) as capture:
        y = pool.empty(16, np.float32, name="step")
        ost.fill(stream, y, 1)
    for _ in range(2):  # sealed twice is as once
        pool.seal()
    with pytest.raises(PoolSealedError, match="weights"):
        ost.Capture(stream, pool=pool).begin()
    assert not stream.is_capturing()
    with pytest.raises(PoolSealedError):
        pool.empty(16, "bytes")
    pool.open()
    with ost.capture(stream, pool=pool):
        ost.fill(stream, y, 2)
    capture.graph.instantiate().launch(stream)
    assert (y.to_numpy(stream) == 1).all()


def test_pool_growth_in_a_capture_is_reported_with_its_line(
    device: Device, stream: ost.Stream
) -> None:
    pool = device.pool(reserve=1024, slab=1 << 16)
    with ost.capture(stream, pool=pool) as capture:
        y = pool.empty(8192, np.uint8, name="too much")  # grows here
        ost.fill(stream, y, 5)
    (growth,) = pool.statistics().grown_in_capture
    assert growth.name == "too much"
    assert "grows here" in growth.location
    assert pool.statistics().by_name["too much"] >= 8192
    capture.graph.instantiate().launch(stream)
    assert (y.to_numpy(stream) == 5).all()


def test_pieces_of_a_pool_share_its_memory(device: Device) -> None:
    pool = device.pool(reserve=1024, slab=512)
    pieces = [pool.empty(size, "bytes") for size in (1, 256, 257)]  # of 256, 256 and 512 bytes
    assert pool.statistics().reserved == pool.statistics().allocated == 1024
    pieces += [pool.empty(4, "bytes"), pool.empty(2048, "bytes", name="more")]
    assert pool.statistics().by_name == {None: 1024 + 256, "more": 2048}
    assert repr(pool).startswith("<CapturePool of 3584 bytes")
    assert pool.statistics().reserved == 1024 + 512 + 2048
    assert pool.statistics().grown_in_capture == ()  # there was no capture
    ends = sorted((piece.address, piece.address + piece.nbytes) for piece in pieces)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
    pool.close()
    for refused in (pool.open, pool.seal, lambda: pool.empty(4, "bytes")):
        with pytest.raises(ClosedError, match="is closed"):
            refused()


@pytest.mark.parametrize("wrong", [{"reserve": -1}, {"slab": 0}])
def test_a_pool_of_no_size(device: Device, wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match="or more"):
        device.pool(**wrong)


def test_another_thread_destroys_nothing_in_a_global_capture(
    device: Device, stream: ost.Stream, x: ost.Buffer
) -> None:
    """Not even the backlog that it would destroy beside a capture in another mode."""
    doomed = [device.zeros(64, "bytes") for _ in range(100)]

    def closing() -> None:
        while doomed:
            doomed.pop().close()

    with ost.capture(stream, mode="global") as capture:
        ost.fill(stream, x, 1)
        thread = threading.Thread(target=closing)
        thread.start()
        thread.join()
        assert device.context.retired >= 100
    capture.graph.instantiate().launch(stream)
    assert (x.to_numpy(stream) == 1).all()
    device.synchronize()
    assert device.context.retired == 0


def test_what_is_captured_into_a_graph_comes_after_it(
    device: Device, stream: ost.Stream, x: ost.Buffer
) -> None:
    y = device.zeros(len(x), x.dtype)
    graph = ost.capture_function(stream, lambda: ost.fill(stream, y, 1))
    with ost.capture(stream, into=graph):
        ost.copy(stream, x, y)
    first, second = graph.nodes()
    assert [(edge.source, edge.target) for edge in graph.edges()] == [(first.handle, second.handle)]
    graph.instantiate().launch(stream)
    assert (x.to_numpy(stream) == 1).all()


@pytest.mark.parametrize("many", [3, 100])
def test_garbage_collected_in_a_capture_does_not_break_it(
    device: Device, stream: ost.Stream, x: ost.Buffer, many: int
) -> None:
    """Also more of it than is left waiting beside another thread's capture."""
    made = [ost.capture_function(stream, lambda: ost.fill(stream, x, 0)) for _ in range(many)]
    doomed = [graph.instantiate() for graph in made]
    spare, other = device.zeros(64, "bytes"), device.zeros(64, "bytes")
    with ost.capture(stream) as capture:
        ost.fill(stream, x, 1)
        doomed.clear()
        made.clear()
        del spare
        gc.collect()
        other.close()  # and what can be destroyed now is
        assert device.context.retired >= many
        ost.fill(stream, x, 2)
    capture.graph.instantiate().launch(stream)
    assert (x.to_numpy(stream) == 2).all()
    assert device.context.collect() == 0


@pytest.mark.parametrize("how", ["raised", "refused", "dropped"])
def test_a_capture_into_a_graph_that_breaks_leaves_the_graph_as_it_was(
    device: Device, stream: ost.Stream, x: ost.Buffer, how: str
) -> None:
    scale = kernel(device, "scale")
    with ost.capture(stream) as capture:
        ost.launch(stream, scale, config(1000), x, 1000)
    graph = capture.graph
    before = [node.handle for node in graph.nodes()]
    with contextlib.suppress(ZeroDivisionError, CaptureBrokenError):
        again = ost.Capture(stream, into=graph).begin()
        ost.launch(stream, scale, config(1000), x, 1000)
        if how == "raised":
            again.abort()
        elif how == "refused":
            with pytest.raises(ost.errors.DriverError):
                stream.synchronize()
            again.end()
        del again
        gc.collect()
        device.context.end_abandoned()
    if how == "refused":  # CUDA destroys the graph with the capture
        for use in (lambda: graph.nodes(), graph.instantiate, lambda: str(graph)):
            with pytest.raises(GraphError, match="make the graph again"):
                use()
        graph.close()
    else:
        assert [node.handle for node in graph.nodes()] == before
        graph.instantiate(upload=stream).launch(stream)
        np.testing.assert_array_equal(x.to_numpy(stream), 2 * np.arange(1000))
        x.set(np.arange(1000, dtype=np.float32), stream)
    assert_usable(device, stream, x)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_graph_goes_with_a_body_whose_capture_broke(
    device: Device, stream: ost.Stream, x: ost.Buffer, depth: int
) -> None:
    """CUDA frees the body that its node points at: closing the graph ended the process."""

    def break_a_body() -> None:
        graph = body = ost.Graph.create(device)
        for _ in range(depth):
            (body,) = body.add_conditional("if", graph.condition(1)).bodies
        with pytest.raises(CaptureBrokenError), ost.capture(stream, into=body):
            ost.fill(stream, x, 2)
            with contextlib.suppress(ost.errors.DriverError):
                stream.synchronize()
        for use in (lambda: body.nodes(), lambda: graph.nodes(), graph.instantiate, graph.clone):
            with pytest.raises(GraphError, match="make the graph again"):
                use()
        graph.close()

    break_a_body()
    gc.collect()
    assert_usable(device, stream, x)


def test_a_graph_that_went_with_its_capture_is_not_asked_about(
    host_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA may answer for a graph that it has destroyed, as if it were there."""
    stream, x = host_device.create_stream(), host_device.zeros(8, "bytes")
    graph = ost.Graph.create(host_device)
    graph.add_fill(x, 1)
    nodes = tuple(node.handle for node in graph.nodes())
    monkeypatch.setattr(host_device.driver, "graph_nodes", lambda handle: nodes)
    with pytest.raises(CaptureBrokenError), ost.capture(stream, into=graph):
        ost.fill(stream, x, 2)
        with contextlib.suppress(ost.errors.DriverError):
            stream.synchronize()
    with pytest.raises(GraphError, match="make the graph again"):
        _ = graph.nodes()


@pytest.mark.parametrize("seam", ["graph_remove_node", "graph_nodes"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_graph_whose_half_capture_cannot_be_taken_back_cannot_be_launched(
    host_device: Device, inside: bool, seam: str
) -> None:
    """Nor a graph with it in a body; also where the driver has destroyed it."""
    faults = FaultyDriver(host_device.driver)
    device = preload(Device(faults))
    stream, x = device.create_stream(), device.zeros(8, "bytes")
    with ost.capture(stream) as capture:
        ost.fill(stream, x, 1)
    graph = into = capture.graph
    if inside:
        into = graph.add_conditional("if", graph.condition(1)).bodies[0]
    with pytest.raises(ZeroDivisionError), ost.capture(stream, into=into):
        ost.fill(stream, x, 2)
        faults.fail(seam)
        raise ZeroDivisionError
    faults.clear()
    with pytest.raises(ost.errors.GraphError, match="make the graph again"):
        graph.instantiate()


def test_a_node_that_is_refused_keeps_nothing_alive(host_device: Device) -> None:
    faults = FaultyDriver(host_device.driver)
    device = Device(faults)
    graph, x, y = ost.Graph.create(device), device.zeros(8, "bytes"), device.zeros(8, "bytes")
    graph.add_fill(x, 1)
    faults.fail("graph_add_node")
    with pytest.raises(ost.errors.GraphError):
        graph.add_fill(y, 1)
    y.close()
    stream = device.create_stream()
    graph.instantiate().launch(stream)  # y is no memory of its
    assert (x.to_numpy(stream) == 1).all()


def test_a_device_that_is_closed_in_a_capture_is_named(host_device: Device) -> None:
    stream, x = host_device.create_stream(), host_device.zeros(8, np.float32)
    with pytest.raises(ClosedError, match="host is closed"), ost.capture(stream):
        ost.fill(stream, x, 1)
        host_device.close()


def test_a_launch_that_was_done_raises_nothing_because_of_a_capture(host_device: Device) -> None:
    """Of another stream.  A step would take the launch for refused, and run its work again."""
    faults = FaultyDriver(host_device.driver)
    device = preload(Device(faults))
    stream, other, x = device.create_stream(), device.create_stream(), device.zeros(1, np.int32)
    increment = kernel(device, "increment")
    step = ost.GraphedStep(
        lambda stream, _: ost.launch(stream, increment, config(1), x, 1),
        stream=other,
        cache=ost.GraphCache(device),
    )
    for _ in range(2):
        step()
    with pytest.raises(CaptureBrokenError, match="refused to say"), ost.capture(stream):
        ost.fill(stream, x, 0)
        faults.fail("stream_capture_info", at=3)  # after the launch
        step()
    assert x.to_numpy(other)[0] == 3
