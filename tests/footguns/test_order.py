"""A graph keeps the order of the work that it was made from."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import CaptureError, ClosedError
from ostinato.explain.races import unordered
from ostinato.testing import HeldStream
from tests.footguns.common import N, checked_step, ones
from tests.sources import config, kernel


def test_recorded_order_holds_between_a_read_and_a_later_write(
    device: Device, stream: ost.Stream
) -> None:
    x, y, z = ones(device), ones(device), device.zeros(N, np.float32)
    with ost.record(stream) as recording:
        ost.launch(stream, kernel(device, "add"), config(N), x, y, z, N)
        ost.fill(stream, x, 7)  # runs after the launch has read x
    graph = recording.build()
    assert len(graph.edges()) == 1
    run = graph.instantiate()
    for expected in (8, 8):
        run.launch(stream)
        assert (z.to_numpy(stream) == expected).all()


def test_an_operation_submitted_as_a_graph_is_like_any_other(
    device: Device, stream: ost.Stream
) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    operation = ost.prepare(kernel(device, "add"), config(N), x, x, out, N)

    def seen() -> set[float]:
        return set(out.to_numpy(stream).tolist())

    with HeldStream(stream):  # the calls run in the order of the stream
        ost.fill(stream, x, 2)
        stream.submit_as_graph(operation)
        ost.fill(stream, x, 3)
        assert not stream.done()
    assert seen() == {4}
    captured = ost.capture_function(stream, lambda: stream.submit_as_graph(operation))
    assert [node.name for node in captured.nodes()] == ["add"] and seen() == {4}
    captured.instantiate().launch(stream)
    assert seen() == {6}
    ost.fill(stream, x, 4)
    with ost.record(stream) as recording:
        stream.submit_as_graph(operation)
    assert seen() == {8}
    ost.fill(stream, x, 5)
    recording.build().instantiate().launch(stream)
    assert seen() == {10}
    with (
        pytest.raises(CaptureError),
        ost.capture(device.create_stream(), contained=True),
    ):
        stream.submit_as_graph(operation)
    x.close()
    with pytest.raises(ClosedError):
        stream.submit_as_graph(operation)
    assert seen() == {10}


def check(
    device: Device, work: Callable[..., object], x: ost.Buffer, y: ost.Buffer, out: ost.Buffer
) -> str:
    """What the check of a step says whose work reads x and writes out, by way of y."""
    slots = [
        ost.Slot("x", x, "input"),
        ost.Slot("y", y, "scratch"),
        ost.Slot("out", out, "output"),
    ]
    return checked_step(device, work, slots, verify="first")().detail


def test_two_branches_of_a_tree_that_nothing_orders_are_found(device: Device) -> None:
    """The graph has as many edges as a chain, and is none."""
    side, add = device.create_stream(), kernel(device, "add")
    x, y, out = ones(device), device.zeros(N, np.float32), device.zeros(N, np.float32)

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, add, config(N), x, x, y, N)
        side.wait(stream.record())
        ost.launch(side, add, config(N), y, y, out, N)
        ost.launch(stream, add, config(N), x, y, out, N)
        stream.wait(side.record())

    assert "nothing orders" in check(device, work, x, y, out)


def test_a_node_that_nothing_orders_is_found_whoever_added_it(device: Device) -> None:
    """The driver's call adds the node, so its name is not that of the submitted work."""
    x, y, out = ones(device), device.zeros(N, np.float32), device.zeros(N, np.float32)
    add = kernel(device, "add")
    middle = ost.prepare(add, config(N), x, x, y, N)

    def work(stream: ost.Stream, ordered: bool) -> None:
        ost.launch(stream, kernel(device, "fill"), config(N), out, 0.0, N)
        info = stream.capture_info()
        if info.graph:
            driver = device.driver
            added = driver.graph_add_node(info.graph, info.dependencies, middle.params)
            if ordered:
                driver.stream_set_capture_dependencies(stream.handle, [added])
        else:
            stream.submit(middle)
        ost.launch(stream, add, config(N), y, y, out, N)

    for ordered in (True, False):
        says = check(device, lambda stream, _, ordered=ordered: work(stream, ordered), x, y, out)
        assert ("nothing orders" in says) is not ordered


def test_a_branch_that_nothing_orders_is_found(device: Device, stream: ost.Stream) -> None:
    """A conditional node counts for what its bodies read and write."""
    x, y, out = ones(device), device.zeros(N, np.float32), device.zeros(N, np.float32)
    add, graph = kernel(device, "add"), ost.Graph.create(device)
    reads = ost.prepare(add, config(N), y, y, out, N)
    branch = graph.add_conditional("if", graph.condition(1))
    branch.bodies[0].add_kernel(add, config(N), x, x, y, N)
    late = graph.add_operation(reads)
    assert unordered(graph, [reads]) is not None
    graph.add_edges([(branch.node, late)])
    assert unordered(graph, [reads]) is None
    beside = ost.prepare(add, config(N), x, x, device.zeros(N, np.float32), N)
    graph.add_operation(beside)  # both only read x
    assert unordered(graph, [reads, beside]) is None


def is_chain(graph: ost.Graph) -> bool:
    """Whether each node waits for the one before it, and for no other."""
    handles = [node.handle for node in graph.nodes()]
    return {(e.source, e.target) for e in graph.edges()} == {*itertools.pairwise(handles)}


@pytest.mark.parametrize("reached", ["into", "adopted"])
@pytest.mark.parametrize(
    "how", ["kernel", "operation", "fill", "copy", "call", "empty", "child", "record", "branch"]
)
def test_a_node_added_under_capture_has_its_place_in_the_order(
    device: Device, stream: ost.Stream, how: str, reached: str
) -> None:
    """A fault let the work that was captured next run without waiting for the node."""
    x, out = ones(device), device.zeros(N, np.float32)
    fours, scale = device.array(np.full(N, 4, np.float32)), kernel(device, "scale")
    double, event = ost.prepare(scale, config(N), x, N), device.create_event()
    child = ost.capture_function(stream, lambda: stream.submit(double))
    graph = into = ost.Graph.create(device) if reached == "into" else None
    bodies: tuple[ost.Graph, ...] = ()
    with ost.capture(stream, into=into) as capture:
        ost.launch(stream, scale, config(N), x, N)
        if graph is None:
            handle = stream.capture_info().graph
            graph = ost.Graph.adopt(device, handle, owner=capture)
        if how == "branch":
            bodies = graph.add_conditional("if", graph.condition(1)).bodies
        else:
            adds: dict[str, Callable[[ost.Graph], object]] = {
                "kernel": lambda graph: graph.add_kernel(scale, config(N), x, N),
                "operation": lambda graph: graph.add_operation(double),
                "fill": lambda graph: graph.add_fill(x, 4),
                "copy": lambda graph: graph.add_copy(x, fours),
                "call": lambda graph: graph.add_call(lambda: None),
                "empty": lambda graph: graph.add_empty(),
                "child": lambda graph: graph.add_child(child),
                "record": lambda graph: graph.add_event_record(event),
            }
            adds[how](graph)
        ost.launch(stream, kernel(device, "add"), config(N), x, x, out, N)
    del graph
    for body in bodies:
        body.add_operation(double)
    assert is_chain(capture.graph)
    gc.collect()
    device.synchronize()
    capture.graph.instantiate().launch(stream)
    expected = 4 if how in ("call", "empty", "record") else 8
    assert (out.to_numpy(stream) == expected).all()


def test_a_node_added_under_capture_keeps_the_edges_it_is_given(
    device: Device, stream: ost.Stream
) -> None:
    graph, x, scale = ost.Graph.create(device), ones(device), kernel(device, "scale")
    with ost.capture(stream, into=graph):
        ost.launch(stream, scale, config(N), x, N)
        first = graph.node(0)
        ost.launch(stream, scale, config(N), x, N)
        added = graph.add_empty(after=[first])
        ost.launch(stream, scale, config(N), x, N)
    order = {(e.source, e.target) for e in graph.edges()}
    one, two, three, four = (node.handle for node in graph.nodes())
    assert three == added.handle
    assert order == {(one, two), (one, three), (two, three), (three, four)}
