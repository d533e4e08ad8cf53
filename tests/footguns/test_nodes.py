"""A node has the index that it says, runs where it may, and its errors are raised."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import MemOp, MemOpKind
from ostinato.errors import (
    CaptureBrokenError,
    GraphError,
    HostFunctionError,
    InputError,
    UpdateRefusedError,
)
from ostinato.testing import FaultyDriver, HeldStream
from tests.footguns.common import N, graph_of, ones
from tests.interrupted import every, interrupt, lines
from tests.sources import config, kernel


@ost.host_kernel("go_on: cond, counter: *u32, limit: u32")
def count_up(launch, go_on, counter, limit):
    counter[0] += 1
    launch.set_conditional(go_on, int(counter[0] < limit))


LOOPS = ost.Source(
    cuda=r"""
    extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(
        cudaGraphConditionalHandle handle, unsigned int value);

    extern "C" __global__ void count_up(
        cudaGraphConditionalHandle go_on, unsigned* counter, unsigned limit) {
        *counter += 1;
        cudaGraphSetConditional(go_on, *counter < limit);
    }
    """,
    host=[count_up],
    name="loops",
)


@pytest.fixture
def counting(device: Device) -> ost.Kernel:
    """A kernel that counts, and keeps a condition set until it has reached a limit."""
    return device.modules.get_or_compile(LOOPS, "count_up")


def emptied(stream: ost.Stream, body: ost.Graph, x: ost.Buffer) -> None:
    """Begins a capture into the body and ends it by an exception."""
    with pytest.raises(ZeroDivisionError), ost.capture(stream, into=body):
        ost.fill(stream, x, 1)
        raise ZeroDivisionError


@pytest.mark.parametrize("inside", ["nothing", "a broken capture", "a fill", "a child", "a branch"])
def test_a_loop_that_no_kernel_ends_is_refused(
    device: Device, stream: ost.Stream, inside: str
) -> None:
    """A launch of such a graph hung."""
    graph, x = ost.Graph.create(device), ones(device)
    (body,) = graph.add_conditional("while", graph.condition(1)).bodies
    if inside == "a broken capture":
        emptied(stream, body, x)
    elif inside == "a fill":
        body.add_fill(x, 1)
    elif inside == "a child":
        body.add_child(ost.capture_function(stream, lambda: ost.fill(stream, x, 1)))
    elif inside == "a branch":
        body.add_conditional("if", graph.condition(1))
    with pytest.raises(GraphError, match=r"WHILE at node 0 .*could never end.*fill the body"):
        graph.instantiate()


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("deep", [True, False])
def test_a_loop_whose_kernels_lack_its_condition_is_warned_of(
    device: Device, counting: ost.Kernel, starts: bool, deep: bool
) -> None:
    graph, counter = ost.Graph.create(device), device.zeros(1, np.uint32)
    outer = graph
    if deep:
        (outer,) = graph.add_conditional("if", graph.condition(1)).bodies
    mine, others = graph.condition(int(starts)), graph.condition(0)
    (body,) = outer.add_conditional("while", mine).bodies
    body.add_kernel(counting, config(1), others, counter, 3)
    outer.add_conditional("if", others)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph.instantiate()
    assert [str(w.message).count("may never end") for w in caught] == [1] * starts
    assert all(w.filename == __file__ for w in caught)


def test_loops_that_end_are_not_warned_of(
    device: Device, stream: ost.Stream, counting: ost.Kernel
) -> None:
    """A kernel in the body, in its child graph or in its branch sets the condition."""
    for way in ("body", "child", "branch"):
        graph, counter = ost.Graph.create(device), device.zeros(1, np.uint32)
        handle = graph.condition(1)
        (body,) = graph.add_conditional("while", handle).bodies
        count = partial(ost.launch, stream, counting, ost.LaunchConfig(1, 1), handle, counter, 3)
        if way == "child":
            body.add_child(ost.capture_function(stream, count))
        else:
            if way == "branch":
                (body,) = body.add_conditional("if", graph.condition(1)).bodies
            with ost.capture(stream, into=body):
                count()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run = graph.instantiate()
        run.launch(stream)
        assert counter.to_numpy(stream).tolist() == [3]


@pytest.mark.parametrize("what", ["host", "record", "wait", "write"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_body_refuses_what_it_cannot_hold_at_once(
    device: Device, stream: ost.Stream, what: str, depth: int
) -> None:
    """CUDA refuses the whole graph when it is instantiated, and does not name the node.

    `depth` is the number of child graphs around the node."""

    def add(graph: ost.Graph) -> None:
        if what == "host":
            graph.add_call(print)
        elif what == "write":
            graph.add_batch_mem_op([MemOp(MemOpKind.WRITE, x.address, 1)], keep=(x,))
        else:
            (graph.add_event_record if what == "record" else graph.add_event_wait)(event)

    graph, x, event = ost.Graph.create(device), ones(device), device.create_event()
    (body,) = graph.add_conditional("if", graph.condition(1)).bodies
    inner = body
    for _ in range(depth):
        child = ost.Graph.create(device)
        add(child) if inner is body else child.add_child(inner)
        inner = child
    with pytest.raises(GraphError, match="can hold kernels, copies, fills"):
        add(body) if inner is body else body.add_child(inner)
    assert len(body) == 0


def test_a_host_function_captured_into_a_body_is_named(device: Device, stream: ost.Stream) -> None:
    graph = ost.Graph.create(device)
    (body,) = graph.add_conditional("if", graph.condition(1)).bodies
    with pytest.raises((GraphError, CaptureBrokenError)) as caught:
        with ost.capture(stream, into=body):
            stream.call(print)
        graph.instantiate()
    if isinstance(caught.value, GraphError):
        assert "node 0 (if), body 0, node 0 (print) of kind HOST" in str(caught.value)


def fails() -> None:
    raise ZeroDivisionError("in a host function")


@pytest.mark.parametrize("waits", ["stream", "event", "device", "copy", "launch", "replay", "work"])
def test_the_next_call_raises_the_error_of_a_host_function(
    device: Device, stream: ost.Stream, waits: str
) -> None:
    """A fault only logged the error."""
    x, scale = ones(device), kernel(device, "scale")
    graph = graph_of(stream, scale, N, x, N)
    good = graph.instantiate(upload=stream)
    good.launch(stream)
    good.launch(stream)  # takes the short way
    recorded = threading.Event()

    def fails_later() -> None:
        recorded.wait(60)
        fails()

    run = ost.capture_function(stream, lambda: stream.call(fails_later)).instantiate()
    done = device.create_event()
    calls: dict[str, Callable[[], object]] = {
        "stream": stream.synchronize,
        "event": done.synchronize,
        "device": device.synchronize,
        "copy": lambda: x.to_numpy(stream),
        "launch": lambda: ost.launch(stream, scale, config(N), x, N),
        "replay": lambda: good.launch(stream),
        "work": lambda: ost.fill(stream, x, 0),
    }
    for _ in range(2):
        recorded.clear()
        run.launch(stream)
        stream.record(done)
        recorded.set()
        if waits in ("launch", "replay", "work"):  # these do not wait for the host function
            while not device.context.failures:
                time.sleep(0.001)
            while not device.context.taps:
                time.sleep(0.001)
        with pytest.raises(HostFunctionError, match=r"fails_later of .*ZeroDiv") as caught:
            calls[waits]()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert caught.value.__cause__.__traceback__ is not None
        calls[waits]()  # the error is raised once
        assert device.context.taps == ()
    stream.synchronize()


def test_host_functions_that_raise_do_not_break_a_capture(
    device: Device, stream: ost.Stream
) -> None:
    """The capture ends well, and the call after it raises the error."""
    x, scale, other = ones(device), kernel(device, "scale"), device.create_stream()
    with ost.capture(stream) as capture:
        other.call(fails)
        while not device.context.failures:
            time.sleep(0.001)
        ost.launch(stream, scale, config(N), x, N)
    run = capture.graph.instantiate()
    with pytest.raises(HostFunctionError):
        run.launch(stream)
    run.launch(stream)
    assert (x.to_numpy(stream) == 2).all()


def test_many_host_functions_that_raise_are_one_error(device: Device, stream: ost.Stream) -> None:
    with HeldStream(stream):  # else the second call would raise the error of the first
        for _ in range(3):
            stream.call(fails)
    with pytest.raises(HostFunctionError, match="and so did 2 calls after it"):
        stream.synchronize()
    stream.synchronize()


def test_a_cooperative_kernel_is_not_switched_off(device: Device, stream: ost.Stream) -> None:
    """libcuda 580.159 lost the context at the second launch of a graph of one such node."""
    if not device.capabilities.cooperative_launch:
        pytest.skip("no device with cooperative launches")
    x, together = ones(device), ost.LaunchConfig(1, N, cooperative=True)
    graph = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "scale"), together, x, N)
    )
    outer = ost.Graph.create(device)
    outer.add_child(graph)
    for run in (graph.instantiate(), outer.instantiate()):
        node = run.nodes()[0]
        if node.kind is not ost.NodeKind.KERNEL:
            node = node.children[0][0]
        with pytest.raises(UpdateRefusedError, match=r"cooperative.*give it a size of 0"):
            run.set(node, enabled=False)
        for _ in range(2):
            run.launch(stream)
    assert (x.to_numpy(stream) == 16).all()


@pytest.mark.parametrize("kind", ["kernel", "memcpy", "memset"])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_node_that_is_off_keeps_the_order(
    device: Device, stream: ost.Stream, kind: str, is_last: bool
) -> None:
    """libcuda 580 loses the order around a memset node that is off, so it stays on."""
    x, y = device.zeros(4, np.int32), device.zeros(4, np.int32)
    ran: list[int] = []

    def late() -> None:
        time.sleep(0.02)
        ran.append(1)

    graph = ost.Graph.create(device)
    first = graph.add_call(late)
    off = {
        "kernel": lambda: graph.add_kernel(
            kernel(device, "increment"), config(1), x, 1, after=[first]
        ),
        "memcpy": lambda: graph.add_copy(x, y, after=[first]),
        "memset": lambda: graph.add_fill(x, 7, after=[first]),
    }[kind]()
    if not is_last:
        graph.add_call(lambda: ran.append(2), after=[off])
    run = graph.instantiate()
    if kind == "memset":
        with pytest.raises(UpdateRefusedError, match="would not wait for those before it"):
            run.set(off, enabled=False)
        run.set(off, enabled=True)
    else:
        run.set(off, enabled=False)
    run.launch(stream)
    stream.synchronize()
    assert ran == ([1] if is_last else [1, 2])
    assert x.to_numpy(stream)[0] == (7 if kind == "memset" else 0)


@pytest.mark.parametrize("before", range(5))
@pytest.mark.parametrize("fails", [False, True])
def test_nodes_that_are_added_in_a_capture_shift_no_index(
    device: Device, stream: ost.Stream, before: int, fails: bool
) -> None:
    """A patch by a shifted index would change another node."""
    graph, x = ost.Graph.create(device), ones(device)
    for value in range(before):
        graph.add_fill(x, value)
    with contextlib.suppress(ZeroDivisionError), ost.capture(stream, into=graph):
        ost.fill(stream, x, 1)
        graph.add_fill(x, 2)
        ost.fill(stream, x, 3)
        assert not fails or 1 / 0
    added = [graph.add_fill(x, value) for value in range(3)]
    handles = [node.handle for node in graph.nodes()]
    assert [node.index for node in added] == [handles.index(node.handle) for node in added]


@pytest.mark.parametrize("before", range(5))
def test_a_node_that_could_not_be_added_shifts_no_index(host_device: Device, before: int) -> None:
    """The driver refuses the node, fails after it has taken it, or an interruption comes."""
    faults = FaultyDriver(host_device.driver)
    device = Device(faults)
    x, increment = device.zeros(1, np.int32), kernel(device, "increment")
    child = ost.Graph.create(device)
    child.add_kernel(increment, config(1), x, 1000)

    def added(graph: ost.Graph, kind: str, memory: ost.Buffer) -> None:
        _ = graph.add_child(child) if kind == "child" else graph.add_fill(memory, 0)

    calls = ("graph_add_node", "node_params", "node_kind")
    for call, kind in itertools.product(calls, ("child", "memset")):
        graph, unused = ost.Graph.create(device), device.zeros(1, np.int32)
        for _ in range(before):
            graph.add_kernel(increment, config(1), x, 1)
        faults.fail(call)
        with pytest.raises(GraphError, match=call):
            added(graph, kind, unused)
        unused.close()
        node = graph.add_kernel(increment, config(1), x, 0)
        assert graph.nodes()[node.index].handle == node.handle
        assert len(graph) == before + 1, "the graph is as before"
        graph.instantiate().close()

    def work() -> None:
        graph.add_kernel(increment, config(1), x, 0)

    for at in every(lines(work), 4 if before == 2 else 20):
        graph = ost.Graph.create(device)
        for _ in range(before):
            graph.add_kernel(increment, config(1), x, 1)
        where = interrupt(work, at)
        node = graph.add_kernel(increment, config(1), x, 0)
        assert graph.nodes()[node.index].handle == node.handle, where


@pytest.mark.parametrize("wrong", [True, 1.0])
def test_what_equals_an_index_is_none(device: Device, stream: ost.Stream, wrong: object) -> None:
    """True and 1.0 equal the index 1, also once that index is in a cache."""
    x = ones(device)

    def work() -> None:
        for _ in range(2):
            ost.launch(stream, kernel(device, "scale"), config(N), x, N)

    run = ost.capture_function(stream, work).instantiate()
    for _ in range(2):
        for node, argument in ((1, wrong), (wrong, 1)):
            with pytest.raises(InputError):
                run.set(node, argument, 0)  # type: ignore[arg-type]
            with pytest.raises(InputError):
                run.set_all([(node, argument, 0)])  # type: ignore[list-item]
        run.set(1, 1, N)
        run.set(1, np.int64(1), N)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="LaunchConfig"):
        run.set(0, config=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Graph"):
        run.update(run)  # type: ignore[arg-type]
