"""What was closed, evicted or replaced is not used again: memory, graphs and devices.

How a graph comes to point at memory that is closed then: `test_lifetimes`.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import CaptureBrokenError, ClosedError
from ostinato.testing import HeldStream
from tests.footguns.common import N, addresses, doubling, graph_of, ones, struct_kernel
from tests.sources import config, kernel, preload

pytestmark = pytest.mark.usefixtures("launcher")  # compiled, and in Python


def test_what_points_at_closed_memory_does_not_run(device: Device, stream: ost.Stream) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    add = kernel(device, "add")
    graph = graph_of(stream, add, N, x, x, out, N)
    run = graph.instantiate(upload=stream)
    run.launch(stream)
    stream.synchronize()
    x.close()
    device.synchronize()
    # One of these may be at the address of x.
    others = [device.array(np.full(N, 9, np.float32)) for _ in range(4)]
    for _ in range(2):
        with pytest.raises(ClosedError, match=r"node 0 \(add\) argument 0"):
            run.launch(stream)
    with pytest.raises(ClosedError):
        graph.instantiate()
    with pytest.raises(ClosedError):
        ost.launch(stream, add, config(N), x, x, out, N)
    assert (out.to_numpy(stream) == 2).all()
    run.rebind({x: others[0]})
    run.launch(stream)
    assert (out.to_numpy(stream) == 18).all()


@pytest.mark.parametrize("kind", ["pool", "state"])
def test_closed_memory_is_seen_through_what_stands_for_it(
    device: Device, stream: ost.Stream, kind: str
) -> None:
    out, pool = device.zeros(N, np.float32), device.pool(reserve=4096)
    state = ost.DeviceArray(device, N, np.float32)
    state.set(np.ones(N, np.float32), stream)
    owner, argument = {
        "pool": (pool, pool.empty(N, np.float32)),
        "state": (state, state),
    }[kind]
    run = graph_of(stream, kernel(device, "add"), N, argument, out, out, N).instantiate()
    run.launch(stream)
    owner.close()
    with pytest.raises(ClosedError):
        run.launch(stream)


def test_closed_memory_is_seen_by_an_adopted_graph(device: Device, stream: ost.Stream) -> None:
    """The library does not know which buffers the nodes of an adopted graph use."""
    x, out = ones(device), device.zeros(N, np.float32)
    own = graph_of(stream, kernel(device, "add"), N, x, x, out, N)
    run = ost.Graph.adopt(device, own.handle, owner=own).instantiate(upload=stream)
    run.launch(stream)
    ones(device).close()  # the graph does not use it
    run.launch(stream)
    x.close()
    with pytest.raises(ClosedError):
        run.launch(stream)


@pytest.mark.parametrize("kind", ["view", "adopted"])
def test_closing_a_view_does_not_stop_an_adopted_graph(
    device: Device, stream: ost.Stream, kind: str
) -> None:
    """Closing a view, or a buffer over another library's memory, frees no memory."""
    x = ones(device)
    own = graph_of(stream, kernel(device, "scale"), N, x, N)
    run = ost.Graph.adopt(device, own.handle, owner=own).instantiate(upload=stream)
    if kind == "view":
        x[:].close()
    else:
        ost.Buffer(device.context, x.address, (N,), np.dtype(np.float32), base=x).close()
    run.launch(stream)
    assert (x.to_numpy(stream) == 2).all()


def test_a_patched_struct_forgets_what_its_words_pointed_at(
    device: Device, stream: ost.Stream
) -> None:
    x, y, out, new = ones(device), ones(device), device.zeros(N, np.float32), ones(device)
    summing = struct_kernel(device)

    def work() -> None:
        ost.launch(stream, summing, config(N), addresses(x, out), N)
        ost.launch(stream, kernel(device, "scale"), config(N), y, N)

    run = ost.capture_function(stream, work).instantiate()
    run.rebind({out: new})  # the executable notes what the second word points at
    run.set(0, "both", addresses(x, y))
    y.close()
    with pytest.raises(ClosedError, match="node 0"):
        run.launch(stream)
    for patch in (
        lambda value: run.set(0, "both", value),
        lambda value: run.set_all([(0, "both", value)]),
        lambda value: run.set(0, "both", np.void(value)),
    ):
        patch(addresses(x, out))
        with pytest.raises(ClosedError, match="node 1"):
            run.launch(stream)
    run.set_all([(0, "both", addresses(x, new)), (1, "x", new)])
    run.launch(stream)
    assert (new.to_numpy(stream) == 4).all()


def test_an_operation_of_closed_memory_is_set_to_no_node(
    device: Device, stream: ost.Stream
) -> None:
    x, y, out = ones(device), ones(device), device.zeros(N, np.float32)
    add = kernel(device, "add")
    run = doubling(device, stream, x, out)
    operation = ost.prepare(add, config(N), y, y, out, N)
    params = operation.params
    y.close()
    with pytest.raises(ClosedError, match="add"):
        run.set(0, operation)
    run.launch(stream)
    assert (out.to_numpy(stream) == 2).all()
    run.set(0, params, keep=(y, out))
    with pytest.raises(ClosedError, match="argument 0"):
        run.launch(stream)


def test_an_operation_does_not_outlive_its_memory(device: Device, stream: ost.Stream) -> None:
    """Another buffer may have the address when the operation is submitted."""
    x, y = ones(device), ones(device)
    operation = ost.prepare(kernel(device, "add"), config(N), x, x, y, N)
    y.close()
    device.synchronize()
    others = [device.zeros(N, np.float32) for _ in range(64)]
    with pytest.raises(ClosedError, match="add: <Buffer"):
        stream.submit(operation)
    with pytest.raises(ClosedError), ost.capture(stream):
        stream.submit(operation)
    assert not any(other.to_numpy(stream).any() for other in others)


def test_memory_that_is_closed_while_it_is_given_is_seen(
    device: Device, stream: ost.Stream
) -> None:
    """Another thread may close memory after its address is read and before its use is noted."""
    x, out = ones(device), device.zeros(N, np.float32)
    run = doubling(device, stream, x, out)
    new = ones(device)

    class Closing:
        """A buffer that closes when its address is read."""

        range = new.range

        @property
        def address(self) -> int:
            address = new.address
            new.close()
            return address

        def watch(self, watcher: object) -> None:
            new.watch(watcher)  # type: ignore[arg-type]

        @property
        def closed(self) -> bool:
            return new.closed

    run.set(0, "a", Closing())
    with pytest.raises(ClosedError, match="argument 0"):
        run.launch(stream)


def test_closed_memory_stays_closed_if_its_address_is_reused(
    device: Device, stream: ost.Stream
) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    run = doubling(device, stream, x, out)
    address = x.address
    x.close()
    device.synchronize()
    # Another library may give its memory the address that ours had.
    new = ost.Buffer(device.context, address, (N,), np.dtype(np.float32), base=object())
    run.set(0, "a", new)
    with pytest.raises(ClosedError, match="argument 1"):
        run.launch(stream)


def test_memory_closed_in_a_host_function_is_freed_later(
    device: Device, stream: ost.Stream
) -> None:
    x = device.zeros(1 << 20, np.uint8)
    device.synchronize()
    free = device.memory_info()[0]
    stream.call(x.close)
    stream.synchronize()
    device.synchronize()
    assert x.closed
    assert device.context.retired == 0
    assert device.memory_info()[0] >= free + (1 << 20) or device.name != "host"


def test_memory_is_given_back_while_graphs_are_adopted(device: Device) -> None:
    """Closing a buffer tells all graphs, while another thread adds graphs.

    A fault iterated over the set that grew.  The exception left the memory neither freed nor
    marked as closed."""

    class Graph:
        def __init__(self) -> None:
            self.told = 0

        def memory_closed(self, memory: ost.MemoryRange) -> None:
            self.told += 1

    first, ended, failures = Graph(), threading.Event(), list[BaseException]()
    watchers = device.context.watchers
    watchers.add(first)
    buffers = [device.empty(8, "bytes") for _ in range(800)]

    def adopt() -> None:
        kept: list[Graph] = []
        try:
            while not ended.is_set():
                kept = [*kept[-500:], Graph()]
                watchers.add(kept[-1])
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=adopt)
    try:
        thread.start()
        for buffer in buffers:
            buffer.close()
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failures
    assert first.told == len(buffers)


def test_a_patched_pointer_reaches_as_far_as_its_new_memory(
    device: Device, stream: ost.Stream
) -> None:
    small, large, out = device.zeros(4, np.float32), ones(device), device.zeros(N, np.float32)
    cache = ost.GraphCache(device)
    run = graph_of(stream, kernel(device, "add"), N, small, out, out, 4).instantiate()
    cache.install("sum", run)
    run.set(0, "a", large)
    assert cache.touching(large[N - 4 :]) == ["sum"]
    assert cache.touching(small) == []
    run.set(0, "a", large.address)
    assert cache.touching(large[N - 4 :]) == ["sum"]


def test_a_closed_executable_is_not_changed(device: Device, stream: ost.Stream) -> None:
    """A closed executable refuses changes also while its last launch runs."""
    x = ones(device)
    run = graph_of(stream, kernel(device, "scale"), N, x, N).instantiate(upload=stream)
    patch = run.patcher(0, "n")
    patch(1)
    run.launch(stream)  # its compiled launch is prepared
    with HeldStream(stream) as held:
        run.launch(stream)
        run.close()
        for change in (
            lambda: patch(2),
            lambda: run.set(0, "n", 2),
            lambda: run.set_all([(0, "n", 2)]),
            lambda: run.rebind({x: ones(device)}),
            lambda: run.set(0, enabled=False),
        ):
            with pytest.raises(ClosedError):
                change()
        held.release()
    assert (x.to_numpy(stream) == [4] + [1] * (N - 1)).all()


@pytest.mark.parametrize(
    "change", ["config", "parameters", "enable", "enabled", "set", "patcher", "rebind"]
)
def test_nodes_of_a_closed_definition_cannot_be_changed(
    device: Device, stream: ost.Stream, change: str
) -> None:
    """libcuda crashed when it was given a node of a destroyed graph."""
    x, y, scale = ones(device), ones(device), kernel(device, "scale")
    double = ost.prepare(scale, config(N), x, N)
    graph = ost.capture_function(stream, lambda: stream.submit(double))
    run = graph.instantiate()
    run.set(0, double)
    run.set(0, 1, N)
    patcher = run.patcher(0, 1)
    node = graph.node(0)
    for pair in ({x: y}, {y: x}):
        run.rebind(pair)
    graph.close()
    device.context.collect()
    calls: dict[str, Callable[[], object]] = {
        "config": lambda: run.set(node, config=ost.LaunchConfig(2, 32)),
        "parameters": lambda: run.set(0, ost.prepare(scale, config(1), x, 1)),
        "enable": lambda: run.set(0, enabled=False),
        "enabled": lambda: run.enabled(0),
        "set": lambda: run.set(0, 1, 1),
        "patcher": lambda: patcher(1),
        "rebind": lambda: run.rebind({x: y}),
    }
    with pytest.raises(ClosedError):
        calls[change]()
    run.launch(stream)
    assert (x.to_numpy(stream) == 2).all()
    assert (y.to_numpy(stream) == 1).all()


def test_a_graph_recorded_and_closed_is_no_child(device: Device, stream: ost.Stream) -> None:
    x = ones(device)
    add = kernel(device, "add")
    inner = graph_of(stream, add, N, x, x, x, N)
    run = inner.instantiate()
    with ost.record(stream) as recorded:
        run.launch(stream)
    inner.close()
    with pytest.raises(ClosedError, match="child"):
        recorded.build()
    with ost.record(stream) as recorded:
        run.launch(stream)
    with pytest.raises(CaptureBrokenError, match="definition is closed"):
        recorded.build()
    assert (x.to_numpy(stream) == 4).all()


def test_a_replaced_graph_is_not_replayed(device: Device, stream: ost.Stream) -> None:
    counter = device.zeros(1, np.int32)
    cache = ost.GraphCache(device)
    for by in (1, 10):
        run = graph_of(stream, kernel(device, "increment"), 1, counter, by).instantiate()
        cache.install("count", run)
    cache.replay("count", stream)
    assert counter.to_numpy(stream)[0] == 10


def test_a_graph_that_is_held_outlives_an_eviction_by_budget(
    device: Device, stream: ost.Stream
) -> None:
    counter, cache = device.zeros(1, np.int32), ost.GraphCache(device, budget=1)

    def make(by: int) -> ost.GraphExec:
        return graph_of(stream, kernel(device, "increment"), 1, counter, by).instantiate(
            upload=stream
        )

    cache.install("first", make(1))
    with cache.hold("first") as run:
        cache.install("second", make(10))
        assert "first" not in cache
        run.launch(stream)
    assert counter.to_numpy(stream)[0] == 1
    with pytest.raises(ClosedError):
        run.launch(stream)


def test_a_closed_device_lets_go_of_what_was_still_alive(device: Device) -> None:
    """The device destroys its objects, and no list keeps them for later."""

    def closed_under_all() -> list[weakref.ref[object]]:
        stream, x = device.create_stream(), ones(device)
        graph = graph_of(stream, kernel(device, "fill"), N, x, 1.0, N)
        run = graph.instantiate(upload=stream)
        run.launch(stream)
        device.close()
        return [weakref.ref(one) for one in (stream, x, graph, run)]

    left = closed_under_all()
    gc.collect()
    assert [one() for one in left] == [None] * len(left)
    assert device.context.retired == 0


def test_a_device_that_is_dropped_is_closed(launcher: str) -> None:
    """The driver goes with the device, so all objects made on it refuse to be used."""

    def made() -> tuple[ost.Buffer, ost.Stream, ost.GraphExec]:
        device = ost.open_device("host")
        stream, x = device.create_stream(), device.zeros(N, np.float32)
        run = ost.capture_function(stream, lambda: ost.fill(stream, x, 5)).instantiate()
        run.launch(stream)
        run.launch(stream)
        return x, stream, run

    x, stream, run = made()
    gc.collect()
    for use in (
        lambda: run.launch(stream),
        lambda: x.to_numpy(stream),
        lambda: x.array,
        lambda: ost.fill(stream, x, 1),
        lambda: run.nodes(),
        lambda: run.graph.clone(),
    ):
        with pytest.raises(ClosedError, match="nothing refers to its Device any more"):
            use()


def test_nothing_is_launched_on_a_device_that_was_closed() -> None:
    """The short way of a second launch checks the device too."""
    device = preload(ost.open_device("host"))
    stream = device.create_stream()
    run = doubling(device, stream, ones(device), ones(device))
    run.launch(stream)
    run.launch(stream)
    device.close()
    with pytest.raises(ClosedError, match="closed; open it again"):
        run.launch(stream)
