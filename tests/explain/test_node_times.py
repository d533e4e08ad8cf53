"""The times of nodes: every node is timed, in the graph's own order, and its work is done."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import CaptureMode
from ostinato.driver.host.driver import HostDriver
from ostinato.errors import (
    CaptureError,
    ClosedError,
    ContextPoisonedError,
    DriverError,
    GraphError,
    HostFunctionError,
    InputError,
)
from ostinato.explain import NodeTimes
from ostinato.testing import FaultyDriver, HeldStream
from tests.explain.plants import ONE, Ground, chain
from tests.sources import config, kernel
from tests.threads import in_threads

N = 64
LEAST = 0.002
"""Seconds that `wait` takes at least."""

CUDA = r"""
extern "C" __global__ void wait(float* x) {
    unsigned long long begin, now;
    const float before = *(volatile float*)x;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin)::"memory");
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    while (now - begin < 2000000);
    *x = before + 1;  // two at once lose one
}
"""


@ost.host_kernel("x: *f32", name="wait")
def wait(launch: object, x: np.ndarray) -> None:
    before = x[0]
    time.sleep(LEAST)
    x[0] = before + 1  # two at once lose one


SOURCE = ost.Source(CUDA, host=[wait], name="wait.cu")


def filling(device: Device, x: ost.Buffer) -> ost.Graph:
    """A graph of one kernel, which fills x with ones."""
    graph = ost.Graph.create(device)
    graph.add_kernel(kernel(device, "fill"), config(N), x, 1.0, N)
    return graph


def launches_of(times: NodeTimes, launches: int) -> int:
    """How often a profile launched the work."""
    return launches * (2 * times.replays + 6)


def test_a_slow_node_is_told_from_fast_ones(device: Device, stream: ost.Stream) -> None:
    x, count = device.zeros(N, np.float32), device.zeros(1, np.float32)
    slow = device.kernel(SOURCE, "wait")
    with ost.capture(stream) as capture:
        ost.launch(stream, kernel(device, "fill"), config(N), x, 1.0, N)
        ost.launch(stream, slow, ost.LaunchConfig(1, 1), count)
        ost.launch(stream, kernel(device, "scale"), config(N), x, N)
    with capture.graph.instantiate() as run:
        times = run.profile(stream=stream, replays=3)
    assert [node.name for node in times.nodes] == ["fill", "wait", "scale"]
    assert [node.path for node in times.nodes] == ["0", "1", "2"]
    fill, waited, scale = times.nodes
    assert waited.least >= 0.9 * LEAST
    assert waited.seconds > max(fill.seconds, scale.seconds)
    assert waited.line.startswith("test_node_times.py:")
    assert not times.overlap
    assert times.replay >= LEAST
    assert count.to_numpy(stream)[0] == launches_of(times, 1)
    np.testing.assert_array_equal(x.to_numpy(stream), np.full(N, 2, np.float32))


def program(device: Device) -> tuple[ost.Graph, list[ost.Buffer]]:
    """A fork with copies, fills and a child graph: y = 2 + 1, and z a copy of y."""
    x, y, z = (device.zeros(N, np.float32) for _ in range(3))
    child = ost.Graph.create(device)
    first = child.add_kernel(kernel(device, "fill"), config(N), x, 1.0, N)
    child.add_kernel(kernel(device, "scale"), config(N), x, N, after=[first])
    graph = ost.Graph.create(device)
    left = graph.add_child(child)
    right = graph.add_fill(y, 1)
    met = graph.add_empty(after=[left, right])
    added = graph.add_kernel(kernel(device, "add"), config(N), x, y, y, N, after=[met])
    event = graph.add_event_record(device.create_event(), after=[added])
    graph.add_copy(z, y, after=[event])
    return graph, [x, y, z]


@pytest.mark.parametrize("known", [True, False], ids=["ours", "adopted"])
def test_all_kinds_of_nodes_in_forks_and_child_graphs(
    device: Device, stream: ost.Stream, known: bool
) -> None:
    made, (x, y, z) = program(device)
    graph = made if known else ost.Graph.adopt(device, made.handle, owner=made)
    with graph.instantiate() as run:
        times = run.profile(stream=stream, replays=5)
    names = {node.path: (node.kind, node.name) for node in times.nodes}
    assert names == {
        "0.child.0": ("kernel", "fill"),
        "0.child.1": ("kernel", "scale"),
        "1": ("memset", "memset"),
        "3": ("kernel", "add"),
        "5": ("memcpy", "memcpy"),
    }
    assert all(0 <= node.least <= node.seconds for node in times.nodes)
    for buffer, value in ((x, 2), (y, 3), (z, 3)):
        np.testing.assert_array_equal(buffer.to_numpy(stream), np.full(N, value, np.float32))


def test_the_order_of_the_edges_is_kept(device: Device, stream: ost.Stream) -> None:
    """Each node ends before those that wait for it begin."""
    graph, _ = program(device)
    with graph.instantiate() as run:
        times = {node.path: node for node in run.profile(stream=stream, replays=5).nodes}
    for first, second in (("0.child.0", "0.child.1"), ("0.child.1", "3"), ("1", "3"), ("3", "5")):
        assert times[first].end <= times[second].start + 1e-9


def test_a_trace_has_rows_without_overlap(device: Device, stream: ost.Stream) -> None:
    graph, _ = program(device)
    with graph.instantiate() as run:
        times = run.profile(stream=stream, replays=5)
    trace = json.loads(json.dumps(times.to_chrome_trace()))
    assert len(trace["traceEvents"]) == len(times.nodes)
    for row in {event["tid"] for event in trace["traceEvents"]}:
        own = sorted((e["ts"], e["dur"]) for e in trace["traceEvents"] if e["tid"] == row)
        assert all(at + spent <= after + 1e-3 for (at, spent), (after, _) in pairwise(own))


def test_the_table_has_nodes_or_names(device: Device, stream: ost.Stream) -> None:
    x = device.zeros(N, np.float32)
    for count, row in ((1, "0  scale"), (3, "2  scale"), (60, "60 ×")):
        graph = ost.Graph.create(device)
        last: list[ost.Node] = []
        for _ in range(count):
            last = [graph.add_kernel(kernel(device, "scale"), config(N), x, N, after=last)]
        with graph.instantiate() as run:
            text = str(run.profile(stream=stream, replays=1))
        assert row in text
        assert (
            f"\n{count} {'node' if count == 1 else 'nodes'}: " in text
            and "taken off each node" in text
        )


def test_a_node_that_is_off_is_not_timed(device: Device, stream: ost.Stream) -> None:
    graph, (_, _, z) = program(device)
    with graph.instantiate() as run:
        run.set(3, enabled=False)
        times = run.profile(stream=stream, replays=2)
        assert "3" not in {node.path for node in times.nodes}
        np.testing.assert_array_equal(z.to_numpy(stream), np.ones(N, np.float32))


def test_changed_arguments_and_what_comes_before_launches(
    device: Device, stream: ost.Stream
) -> None:
    x, other = (device.zeros(N, np.float32) for _ in range(2))
    called = []
    graph = filling(device, x)
    graph.before_launch = called.append
    with graph.instantiate() as run:
        run.set(0, "out", other)
        times = run.profile(stream=stream, replays=2)
    assert called == [stream] * launches_of(times, 1)
    assert x.to_numpy(stream).sum() == 0
    assert other.to_numpy(stream).sum() == N


def test_programmatic_launch_is_told(device: Device, stream: ost.Stream) -> None:
    x = device.zeros(N, np.float32)
    early = ost.LaunchConfig(1, N, programmatic=True)
    with ost.capture(stream) as capture:
        for _ in range(3):
            ost.launch(stream, kernel(device, "scale"), early, x, N)
    with capture.graph.instantiate() as run:
        times = run.profile(stream=stream, replays=2)
    assert times.overlap
    assert "programmatic launch" in str(times)


def test_what_cannot_be_timed_is_refused(device: Device, stream: ost.Stream) -> None:
    x = device.zeros(N, np.float32)
    graph = filling(device, x)
    run = graph.instantiate()
    for replays in (0, 1.5):
        with pytest.raises(InputError, match="replays"):
            run.profile(stream=stream, replays=replays)  # type: ignore[arg-type]
    with pytest.raises(CaptureError), ost.capture(stream):
        ost.launch(stream, kernel(device, "fill"), config(N), x, 1.0, N)
        run.profile(stream=stream)
    memory = ost.Graph.create(device)
    node = memory.add_alloc(4096)
    memory.add_free(node.alloc.address, after=[node])
    with memory.instantiate() as run, pytest.raises(GraphError, match=r"node 0 \(mem_alloc\)"):
        run.profile(stream=stream)
    assert x.to_numpy(stream).sum() == 0


# --- one launch in so many
def counting(device: Device) -> tuple[ost.GraphExec, ost.Buffer]:
    """Three nodes, the second of which counts launches and takes long."""
    x, count = device.zeros(N, np.float32), device.zeros(1, np.float32)
    graph = ost.Graph.create(device)
    first = graph.add_kernel(kernel(device, "fill"), config(N), x, 1.0, N)
    one = ost.LaunchConfig(1, 1)
    second = graph.add_kernel(device.kernel(SOURCE, "wait"), one, count, after=[first])
    graph.add_kernel(kernel(device, "scale"), config(N), x, N, after=[second])
    return graph.instantiate(), count


def launch(run: ost.GraphExec, stream: ost.Stream, times: int) -> None:
    """Launches so many times, each after the launch before has ended."""
    for _ in range(times):
        run.launch(stream)
        stream.synchronize()


def test_one_launch_in_so_many_is_timed_and_each_does_its_work_once(
    device: Device, stream: ost.Stream
) -> None:
    run, count = counting(device)
    with run.profile(stream=stream, sample=4) as sampler:
        assert sampler.times().replays == 0 and sampler.times().nodes == ()
        launch(run, stream, 10)
        times = sampler.times()
    run.launch(stream)
    assert count.to_numpy(stream)[0] == 11
    assert times.replays == 3, "of launches 2, 6 and 10"
    assert [node.name for node in times.nodes] == ["fill", "wait", "scale"]
    assert times.nodes[1].least >= 0.9 * LEAST and times.replay >= 0.9 * LEAST
    assert sampler.times() == times and not sampler.stopped


def test_the_latest_samples_are_kept(device: Device, stream: ost.Stream) -> None:
    run, _ = counting(device)
    with run.profile(stream=stream, sample=2, replays=3) as sampler:
        launch(run, stream, 12)
        assert sampler.times().replays == 3


def test_a_launch_is_not_timed_before_the_last_answer_is_there(
    device: Device, stream: ost.Stream
) -> None:
    run, count = counting(device)
    with run.profile(stream=stream, sample=2) as sampler:
        with HeldStream(stream):
            for _ in range(10):
                run.launch(stream)
            assert sampler.times().replays == 0
        stream.synchronize()
        assert sampler.times().replays == 1
    assert count.to_numpy(stream)[0] == 10


def test_closing_waits_for_a_timed_launch_so_that_later_ones_come_after_it(
    device: Device, stream: ost.Stream
) -> None:
    run, _ = counting(device)
    with run.profile(stream=stream, sample=2) as sampler:
        for _ in range(2):
            run.launch(stream)
    assert sampler.times().replays == 1
    sampler.close()


def test_launches_on_other_streams_keep_their_order_with_the_twin(device: Device) -> None:
    """As launches of one executable do."""
    run, count = counting(device)
    streams = [device.create_stream() for _ in range(3)]
    with run.profile(stream=streams[0], sample=2) as sampler:
        for turn in range(12):
            run.launch(streams[turn % 3])
    device.synchronize()
    assert sampler.times().replays >= 1
    assert count.to_numpy(streams[0])[0] == 12


CHANGED: dict[str, Callable[[ost.GraphExec, ost.Buffer, ost.Graph], object]] = {
    "set": lambda run, other, _: run.set(1, 0, other),
    "update": lambda run, _, graph: run.update(graph),
}


@pytest.mark.parametrize("how", CHANGED)
def test_a_changed_executable_is_timed_as_it_is(
    device: Device, stream: ost.Stream, how: str
) -> None:
    run, count = counting(device)
    same, other = counting(device)
    with run.profile(stream=stream, sample=2) as sampler:
        launch(run, stream, 2)
        CHANGED[how](run, other, same.graph)
        launch(run, stream, 4)
        assert sampler.times().replays == 3, "the same nodes: their rows count on"
    assert count.to_numpy(stream)[0] == 2
    assert other.to_numpy(stream)[0] == 4


def test_rows_of_other_nodes_are_dropped(device: Device, stream: ost.Stream) -> None:
    run, count = counting(device)
    with run.profile(stream=stream, sample=2) as sampler:
        for enabled in (True, False):
            run.set(1, enabled=enabled)
            launch(run, stream, 2)
        times = sampler.times()
    assert [node.path for node in times.nodes] == ["0", "2"] and times.replays == 1
    assert count.to_numpy(stream)[0] == 2


def test_an_executable_that_is_closed_ends_the_sampling(device: Device, stream: ost.Stream) -> None:
    run, _ = counting(device)
    with run.profile(stream=stream, sample=2) as sampler:
        for _ in range(2):
            run.launch(stream)
        run.close()
        with pytest.raises(ClosedError, match="the executable graph is closed"):
            run.launch(stream)
        stream.synchronize()
        assert sampler.times().replays == 1
    assert sampler.times().replays == 1


def test_what_is_closed_under_a_sampler_costs_the_times_and_no_launch(
    device: Device, stream: ost.Stream
) -> None:
    """A change after which the nodes cannot be read, since the definition is closed."""
    run, count = counting(device)
    with run.profile(stream=stream, sample=2) as sampler:
        run.set(0, 1, 3.0)
        run.graph.close()
        for _ in range(6):
            run.launch(stream)
        assert "closed" in sampler.stopped and "closed" in repr(sampler)
    assert count.to_numpy(stream)[0] == 6


def test_no_launch_is_timed_during_a_capture(device: Device, stream: ost.Stream) -> None:
    run, count = counting(device)
    side, x = device.create_stream(), device.zeros(N, np.float32)
    with run.profile(stream=stream, sample=2) as sampler:
        run.launch(stream)
        with ost.capture(side) as capture:
            ost.launch(side, kernel(device, "fill"), config(N), x, 1.0, N)
            in_threads(lambda: [run.launch(stream) for _ in range(4)])
        assert len(capture.graph) == 1
        stream.synchronize()
        assert sampler.times().replays == 0 and not sampler.stopped
    assert count.to_numpy(stream)[0] == 5


def test_a_capture_of_other_code_is_not_joined(device: Device, stream: ost.Stream) -> None:
    """On a stream of the executable's, which the timed launch would otherwise wait for."""
    run, count = counting(device)
    side, driver = device.create_stream(), device.driver
    run.launch(side)
    with run.profile(stream=stream, sample=2) as sampler:
        run.launch(stream)
        driver.stream_begin_capture(side.handle, CaptureMode.THREAD_LOCAL)
        run.launch(stream)
        driver.graph_destroy(driver.stream_end_capture(side.handle))
        stream.synchronize()
        assert sampler.times().replays == 0 and not sampler.stopped
        launch(run, stream, 2)
        assert sampler.times().replays == 1
    assert count.to_numpy(stream)[0] == 5


def test_an_answer_is_taken_while_later_launches_wait(device: Device, stream: ost.Stream) -> None:
    """A program that always has launches under way would else never see one."""
    run, _ = counting(device)
    with run.profile(stream=stream, sample=2) as sampler, HeldStream(stream) as first:
        for _ in range(2):
            run.launch(stream)
        after = stream.record()
        with HeldStream(stream):
            for _ in range(4):
                run.launch(stream)
            first.release()
            after.synchronize(deadline=60)
            assert sampler.times().replays == 1


def test_threads_that_launch_in_turns_are_sampled_together(
    device: Device, stream: ost.Stream
) -> None:
    run, count = counting(device)
    turn = threading.Lock()

    def work() -> None:
        for _ in range(20):
            with turn:
                run.launch(stream)
                stream.synchronize()

    with run.profile(stream=stream, sample=5) as sampler:
        in_threads(work, work)
        assert sampler.times().replays == 8
    assert count.to_numpy(stream)[0] == 40


def test_what_comes_before_launches_comes_before_timed_ones(
    device: Device, stream: ost.Stream
) -> None:
    called, x = list[ost.Stream](), device.zeros(N, np.float32)
    graph = filling(device, x)
    graph.before_launch = called.append
    run = graph.instantiate()
    with run.profile(stream=stream, sample=2) as sampler:
        launch(run, stream, 4)
        assert sampler.times().replays == 2
    assert called == [stream] * 4


def test_a_step_is_sampled_where_it_keeps_its_graph(device: Device, stream: ost.Stream) -> None:
    count = device.zeros(1, np.float32)

    def work(stream: ost.Stream, sizes: object) -> None:
        ost.launch(stream, device.kernel(SOURCE, "wait"), ost.LaunchConfig(1, 1), count)

    cache = ost.GraphCache(device)
    slots = [ost.Slot("count", count, "state")]
    step = ost.GraphedStep(work, stream=stream, slots=slots, cache=cache)
    for _ in range(4):
        step()
    (key,) = cache.keys()
    with cache.hold(key) as run, run.profile(stream=stream, sample=2) as sampler:
        for _ in range(4):
            step()
            stream.synchronize()
        assert sampler.times().replays == 2
    assert count.to_numpy(stream)[0] == 8


def test_what_a_host_function_raises_is_not_lost_in_a_timed_launch(
    device: Device, stream: ost.Stream
) -> None:
    def fail() -> None:
        raise ValueError("planted")

    graph = ost.Graph.create(device)
    graph.add_call(fail)
    run, raised = graph.instantiate(), 0
    with run.profile(stream=stream, sample=2) as sampler:
        for _ in range(6):
            try:
                run.launch(stream)
                stream.synchronize()
            except HostFunctionError:
                raised += 1
    assert raised == 6 and not sampler.stopped


def test_a_launch_that_is_refused_is_no_measure_of_a_replay() -> None:
    """The one before a timed one, by an error that the program goes on after."""
    driver = FaultyDriver(HostDriver())
    with Device(driver) as device:
        stream = device.create_stream()
        run, count = counting(device)
        with run.profile(stream=stream, sample=2) as sampler:
            driver.fail("exec_launch")
            with pytest.raises(DriverError):
                run.launch(stream)
            launch(run, stream, 3)
            assert sampler.times().replays == 1 and not sampler.stopped
        assert count.to_numpy(stream)[0] == 3


def test_a_sampler_that_is_dropped_leaves_nothing(device: Device, stream: ost.Stream) -> None:
    run, _ = counting(device)
    sampler = run.profile(stream=stream, sample=2)
    launch(run, stream, 3)
    gone = weakref.ref(sampler)
    del sampler, run
    for _ in range(3):  # the twin first, then what it held
        device.synchronize()
    assert gone() is None and device.context.retired == 0


@pytest.mark.parametrize("options", [{}, {"sample": 2}], ids=["now", "sampled"])
def test_a_graph_that_has_grown_is_refused(
    device: Device, stream: ost.Stream, options: dict[str, int]
) -> None:
    run, _ = counting(device)
    run.graph.add_kernel(kernel(device, "scale"), config(N), device.zeros(N, np.float32), N)
    with pytest.raises(GraphError, match="other nodes than when it was instantiated"):
        run.profile(stream=stream, **options)


def test_what_cannot_be_sampled_is_refused(device: Device, stream: ost.Stream) -> None:
    run, _ = counting(device)
    for sample in (0, 1, 2.5, True, "2"):
        with pytest.raises(InputError, match="sample="):
            run.profile(stream=stream, sample=sample)  # type: ignore[call-overload]
    with run.profile(stream=stream, sample=2), pytest.raises(InputError, match="sampled already"):
        run.profile(stream=stream, sample=3)
    with run.profile(stream=stream, sample=3):
        pass
    run.close()
    with pytest.raises(ClosedError):
        run.profile(stream=stream, sample=2)


def test_a_fault_of_a_timed_launch_is_raised_where_it_is_waited_for() -> None:
    with ost.open_device("host") as device:
        stream, ground = device.create_stream(), Ground(device)
        graph = ost.Graph.create(device)
        chain(ground, graph, ("trap", ONE, (ground.count, 2)))
        run = graph.instantiate()
        with run.profile(stream=stream, sample=2):
            for _ in range(2):
                run.launch(stream)
            with pytest.raises(ContextPoisonedError):
                stream.synchronize()
            with pytest.raises(ContextPoisonedError):
                for _ in range(4):
                    run.launch(stream)
