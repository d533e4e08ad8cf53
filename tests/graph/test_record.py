"""Record: real runs, noted, and graphs built from them by what they read and write."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import EdgeType, EmptyNodeParams, MemoryRange
from ostinato.errors import CaptureBrokenError, CaptureError, GraphError
from ostinato.graph.order import dependencies
from ostinato.testing import FaultyDriver
from tests.sources import config, kernel, preload

N = 200


def test_prepared_operations_become_the_graph_of_their_recording(device: Device) -> None:
    stream = device.create_stream()
    x, y, z = (device.zeros(N, np.float32) for _ in range(3))
    operations = [
        ost.prepare(kernel(device, "fill"), config(N), x, 1.0, N),
        ost.prepare(kernel(device, "fill"), config(N), y, 2.0, N),
        ost.prepare(kernel(device, "add"), config(N), x, y, z, N),
    ]
    with ost.record(stream) as recording:
        for operation in operations:
            stream.submit(operation)
    graph = ost.Graph.create(device)
    nodes = graph.add_operations(operations)
    assert [node.name for node in nodes] == ["fill", "fill", "add"]
    assert not graph.diff(recording.build())
    for buffer in (x, y, z):
        ost.fill(stream, buffer, 0)
    graph.instantiate().launch(stream)
    assert (z.to_numpy(stream) == 3).all()


def test_nothing_recorded_is_an_error(device: Device) -> None:
    stream = device.create_stream()
    with ost.record(stream) as recording:
        pass
    with pytest.raises(GraphError, match="nothing was recorded"):
        recording.build()


def test_recording_inside_a_capture_is_refused(device: Device) -> None:
    stream = device.create_stream()
    x = device.zeros(8, np.float32)
    with ost.capture(stream):
        ost.fill(stream, x, 0)
        with pytest.raises(CaptureError, match="runs nothing"), ost.record(stream):
            pass


def test_only_the_launch_before_on_the_stream_lets_a_launch_begin_early(device: Device) -> None:
    """Programmatic launch is a matter of one stream: all else is waited for to its end."""
    stream, side = device.create_stream(), device.create_stream()
    x, y, z = (device.zeros(N, np.float32) for _ in range(3))
    add, early = kernel(device, "add"), replace(config(N), programmatic=True)
    with ost.record(stream) as recording:
        ost.launch(stream, add, config(N), x, x, y, N)
        side.wait(stream.record())
        ost.launch(side, add, config(N), x, x, z, N)
        ost.launch(side, add, early, y, z, z, N)
        stream.wait(side.record())
    graph = recording.build()
    first, second, third = (node.handle for node in graph.nodes())
    kinds = {(e.source, e.target): e.data.type for e in graph.edges()}
    assert kinds == {(first, third): EdgeType.DEFAULT, (second, third): EdgeType.PROGRAMMATIC}


def test_a_launch_with_a_struct_is_ordered_against_everything(host_device: Device) -> None:
    """The struct holds a pointer, which no signature shows."""
    stream = host_device.create_stream()
    x, out = host_device.zeros(N, np.float32), host_device.zeros(N, np.float32)

    @ost.host_kernel("where: bytes[16], out: *f32")
    def count(launch, where, out):
        out[0] += len(where)

    struct = np.array([x.address, N], np.uint64).tobytes()
    with ost.record(stream) as recording:
        ost.fill(stream, x, 3)
        ost.launch(
            stream, host_device.modules.get_or_compile(count, "count"), config(1), struct, out
        )
        ost.fill(stream, x, 5)
    graph = recording.build()
    first, second, third = (node.handle for node in graph.nodes())
    assert {(e.source, e.target) for e in graph.edges()} == {(first, second), (second, third)}


def test_a_launch_at_a_plain_address_is_ordered_with_all_of_its_allocation(device: Device) -> None:
    stream = device.create_stream()
    x, out = device.array(np.ones(N, np.float32)), device.zeros(N, np.float32)
    with ost.record(stream) as recording:
        ost.launch(stream, kernel(device, "add"), config(N), x.address, x.address, out, N)
        ost.fill(stream, x[N // 2 :], 5)
    assert len(recording.build().edges()) == 1


def test_a_launch_at_the_address_of_an_alloc_node_is_ordered_with_all(device: Device) -> None:
    """Before the graph runs, no allocation says how far such memory goes."""
    graph = ost.Graph.create(device)
    address = graph.add_alloc(4 * N).alloc.address
    add, scale = kernel(device, "add"), kernel(device, "scale")
    first = ost.prepare(add, config(N), address, address, address, N)
    second = ost.prepare(scale, config(1), address + 2 * N, 1)
    a, b = graph.add_operations([first, second])
    assert (a.handle, b.handle) in {(e.source, e.target) for e in graph.edges()}


def test_launches_that_set_conditions_are_ordered(host_device: Device) -> None:
    """The last one decides, whatever memory they use."""
    x, y = host_device.array([0], np.uint32), host_device.array([1], np.uint32)

    @ost.host_kernel("x: *const u32, condition: cond")
    def decide(launch, x, condition):
        launch.set_conditional(condition, int(x[0]))

    found = host_device.modules.get_or_compile(decide, "decide")
    graph = ost.Graph.create(host_device)
    condition = graph.condition()
    operations = [ost.prepare(found, config(1), v, condition) for v in (x, y)]
    first, second = graph.add_operations(operations)
    graph.add_conditional("if", condition, after=[first, second])
    assert (first.handle, second.handle) in {(e.source, e.target) for e in graph.edges()}


def test_a_launch_that_was_done_raises_nothing_because_of_a_recording(host_device: Device) -> None:
    """A step would take the launch for refused, and run its work again."""
    faults = FaultyDriver(host_device.driver)
    device = preload(Device(faults))
    stream, x = device.create_stream(), device.zeros(1, np.int32)
    increment = kernel(device, "increment")
    step = ost.GraphedStep(
        lambda stream, _: ost.launch(stream, increment, config(1), x, 1),
        stream=stream,
        cache=ost.GraphCache(device),
    )
    for _ in range(2):
        step()
    with ost.record(stream) as recording:
        faults.fail("graph_nodes", at=2)
        step()
    assert x.to_numpy(stream)[0] == 3
    with pytest.raises(CaptureBrokenError, match="refused a call"):
        recording.build()


def test_work_that_may_have_been_captured_is_not_recorded(host_device: Device) -> None:
    """The driver refuses to say whether it was."""
    faults = FaultyDriver(host_device.driver)
    device = Device(faults)
    stream, x = device.create_stream(), device.zeros(1, np.int32)
    with ost.record(stream) as recording:
        faults.fail("stream_capture_info", times=2)
        ost.fill(stream, x, 1)
    faults.clear()
    assert x.to_numpy(stream)[0] == 1
    with pytest.raises(CaptureBrokenError, match="refused a call"):
        recording.build()


def test_another_threads_work_is_not_recorded(device: Device) -> None:
    stream = device.create_stream()
    x, y = device.zeros(1, np.int32), device.zeros(1, np.int32)
    increment = kernel(device, "increment")
    with ost.record(stream) as recording:
        ost.launch(stream, increment, config(1), x, 1)
        other = threading.Thread(
            target=ost.launch, args=(stream, increment, config(1), y, 1), daemon=True
        )
        other.start()
        other.join()
    graph = recording.build()
    assert "test_record.py" in (graph.node(0).location or "")
    graph.instantiate().launch(stream)
    assert [v.to_numpy(stream)[0] for v in (x, y)] == [2, 1]


def test_other_streams_are_not_recorded(device: Device) -> None:
    stream, other = device.create_stream(), device.create_stream()
    x = device.zeros(8, np.float32)
    with ost.record(stream) as recording:
        ost.fill(other, x, 1)
        ost.fill(stream, x, 2)
    assert len(recording) == 1


ranges = st.lists(st.builds(MemoryRange, st.integers(0, 20), st.integers(1, 4)), max_size=2).map(
    tuple
)
operations = st.lists(
    st.builds(
        lambda reads, writes, known: ost.Operation(
            EmptyNodeParams(), "op", reads if known else None, writes if known else None
        ),
        ranges,
        ranges,
        st.booleans() | st.just(True),
    ),
    max_size=12,
)


@given(operations)
def test_every_conflict_is_ordered_and_no_edge_is_idle(work: list[ost.Operation]) -> None:
    after = dependencies(work)
    reach: list[set[int]] = []
    for direct in after:
        reach.append(set(direct).union(*(reach[i] for i in direct)))
    for j, second in enumerate(work):
        for i in range(j):
            first = work[i]
            if None in (first.reads, first.writes, second.reads, second.writes):
                conflict = True
            else:
                overlap = lambda a, b: any(  # noqa: E731
                    p.address < q.end and q.address < p.end for p in a for q in b
                )
                conflict = (
                    overlap(first.writes, second.reads)
                    or overlap(first.writes, second.writes)
                    or overlap(first.reads, second.writes)
                )
            assert not conflict or i in reach[j]
        # No direct edge that others imply already.
        for i in after[j]:
            assert not any(i in reach[k] for k in after[j] if k != i)
