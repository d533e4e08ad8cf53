"""The times of nodes: every node is timed, in the graph's own order, and its work is done."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import CaptureError, GraphError, InputError
from ostinato.explain import NodeTimes
from tests.sources import config, kernel

N = 64
LEAST = 0.002
"""Seconds that `wait` takes at least."""

CUDA = r"""
extern "C" __global__ void wait(float* x) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin)::"memory");
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    while (now - begin < 2000000);
    *x += 1;
}
"""


@ost.host_kernel("x: *f32", name="wait")
def wait(launch: object, x: np.ndarray) -> None:
    time.sleep(LEAST)
    x[0] += 1


SOURCE = ost.Source(CUDA, host=[wait], name="wait.cu")


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


def program(device: Device, work: ost.Graph | None = None) -> tuple[ost.Graph, list[ost.Buffer]]:
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
    for count, row in ((3, "2  scale"), (60, "60 ×")):
        graph = ost.Graph.create(device)
        last: list[ost.Node] = []
        for _ in range(count):
            last = [graph.add_kernel(kernel(device, "scale"), config(N), x, N, after=last)]
        with graph.instantiate() as run:
            text = str(run.profile(stream=stream, replays=1))
        assert row in text
        assert f"{count} nodes: " in text and "taken off each node" in text


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
    graph = ost.Graph.create(device)
    graph.add_kernel(kernel(device, "fill"), config(N), x, 1.0, N)
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
    graph = ost.Graph.create(device)
    graph.add_kernel(kernel(device, "fill"), config(N), x, 1.0, N)
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
