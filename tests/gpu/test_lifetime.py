"""What lives how long: owners, buffers, children; and what is destroyed when, and where."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import ClosedError
from ostinato.testing import HeldStream
from tests.sources import config, kernel

N = 512


class Owner:
    """Whatever owns a graph or a stream elsewhere."""


@pytest.fixture
def stream(device: Device) -> ost.Stream:
    return device.create_stream()


@pytest.fixture
def x(device: Device) -> ost.Buffer:
    return device.array(np.ones(N, np.float32))


def scaled(device: Device, stream: ost.Stream, x: ost.Buffer) -> ost.Graph:
    scale = kernel(device, "scale")
    return ost.capture_function(stream, lambda: ost.launch(stream, scale, config(N), x, N))


@pytest.mark.parametrize("end", ["closed", "dropped"])
def test_the_owner_of_an_adopted_graph_outlives_a_replay_under_way(
    device: Device, stream: ost.Stream, x: ost.Buffer, end: str
) -> None:
    captured = scaled(device, stream, x)
    owner = Owner()
    gone = weakref.ref(owner)
    run = ost.Graph.adopt(device, int(captured.handle), owner=owner).instantiate(upload=stream)
    stream.synchronize()
    del owner
    with HeldStream(stream):
        run.launch(stream)
        if end == "closed":
            run.close()
        del run
        gc.collect()
        device.context.collect()
        # Its memory may be the owner's (torch's pool of the capture, say).
        assert gone() is not None, "the owner went while a replay was under way"
    device.synchronize()
    gc.collect()
    device.synchronize()
    assert gone() is None
    assert (x.to_numpy(stream) == 2).all()


def test_a_stream_closed_under_its_work_finishes_it(device: Device, x: ost.Buffer) -> None:
    stream, other = device.create_stream(), device.create_stream()
    with HeldStream(stream):
        ost.launch(stream, kernel(device, "scale"), config(N), x, N)
        stream.close()
        with pytest.raises(ClosedError):
            ost.fill(stream, x, 0)
    device.synchronize()
    assert (x.to_numpy(other) == 2).all()
    assert device.context.retired == 0


def test_the_owner_of_an_adopted_stream_lives_with_it(device: Device, x: ost.Buffer) -> None:
    class Foreign:
        def __init__(self) -> None:
            self.real = device.create_stream()

        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, self.real.handle)

    foreign = Foreign()
    gone = weakref.ref(foreign)
    adopted = device.adopt_stream(foreign)
    del foreign
    gc.collect()
    assert gone() is not None
    ost.fill(adopted, x, 4)
    adopted.synchronize()
    assert (x.to_numpy(adopted) == 4).all()
    adopted.close()  # lets it go, and does not destroy it
    del adopted
    gc.collect()
    assert gone() is None
    device.synchronize()


def test_closed_on_another_thread_during_a_capture(
    device: Device, stream: ost.Stream, x: ost.Buffer
) -> None:
    graph = scaled(device, stream, x)
    run = graph.instantiate(upload=stream)
    spare = device.zeros(1 << 16, "bytes")
    run.launch(stream)
    stream.synchronize()

    def close_all() -> None:
        run.close()
        graph.close()
        spare.close()

    with ost.capture(stream) as capture:
        ost.fill(stream, x, 1)
        thread = threading.Thread(target=close_all)
        thread.start()
        thread.join()
        assert device.context.retired >= 3  # noted, not destroyed
        ost.launch(stream, kernel(device, "scale"), config(N), x, N)
    capture.graph.instantiate(upload=stream).launch(stream)
    assert (x.to_numpy(stream) == 2).all()
    device.synchronize()
    assert device.context.retired == 0


def test_kept_buffers_go_with_the_executable(device: Device, stream: ost.Stream) -> None:
    passing = [device.array(np.ones(N, np.float32))]
    gone = weakref.ref(passing[0])
    graph = scaled(device, stream, passing.pop())
    run = graph.instantiate(upload=stream)
    gc.collect()
    assert gone() is not None
    run.launch(stream)
    run.close()
    graph.close()
    del run, graph
    gc.collect()
    device.synchronize()
    gc.collect()
    assert gone() is None


@pytest.mark.alone
def test_many_graphs_leave_nothing(device: Device, stream: ost.Stream) -> None:
    x = device.zeros(N, np.float32)

    def once() -> None:
        with scaled(device, stream, x) as graph, graph.instantiate(upload=stream) as run:
            run.launch(stream)

    for _ in range(20):
        once()
    device.synchronize()
    before = device.memory_info()[0]
    for _ in range(300):
        once()
    device.synchronize()
    assert device.context.retired == 0
    assert device.memory_info()[0] >= before


def test_owners_survive_being_dropped_after_the_device(device: Device) -> None:
    stream = device.create_stream()
    x = device.zeros(N, np.float32)
    run = scaled(device, stream, x).instantiate(upload=stream)
    run.launch(stream)
    device.close()
    del run, x, stream
    gc.collect()
    device.close()
