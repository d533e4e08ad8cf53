"""Capture: nothing runs, order becomes edges, events fork and join."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ostinato.driver.api import (
    CaptureMode,
    CaptureStatus,
    EdgeType,
    EmptyNodeParams,
    HostNodeParams,
    KernelNodeParams,
    LaunchConfig,
    MemcpyNodeParams,
    MemsetNodeParams,
    NodeKind,
)
from ostinato.errors import Status
from tests.contract.kernels import Rig, refused

LOCAL = CaptureMode.THREAD_LOCAL


@pytest.mark.parametrize("mode", list(CaptureMode))
def test_nothing_runs_until_the_graph_is_launched(rig: Rig, mode: CaptureMode) -> None:
    driver, x = rig.driver, rig.array([1.0] * 4)
    driver.stream_begin_capture(rig.stream, mode)
    rig.launch("scale", x, 3.0, 4)
    rig.launch("scale", x, 2.0, 4)
    graph = driver.stream_end_capture(rig.stream)
    assert rig.values(x, 4) == [1.0] * 4
    assert rig.edges(graph) == {(0, 1)}
    rig.run(graph, times=2)
    assert rig.values(x, 4) == [36.0] * 4
    driver.graph_destroy(graph)


def test_every_kind_of_stream_work_becomes_its_node(rig: Rig) -> None:
    driver, seen = rig.driver, list[int]()
    x, y = rig.zeros(8), rig.zeros(8)
    driver.stream_begin_capture(rig.stream, LOCAL)
    driver.memset(x, 0x3F800000, 4, 8, rig.stream)
    rig.launch("scale", x, 5.0, 8)
    driver.memcpy(y, x, 32, rig.stream)
    driver.launch_host_function(rig.stream, lambda: seen.append(1))
    graph = driver.stream_end_capture(rig.stream)
    nodes = driver.graph_nodes(graph)
    kinds = [driver.node_kind(node) for node in nodes]
    assert kinds == [NodeKind.MEMSET, NodeKind.KERNEL, NodeKind.MEMCPY, NodeKind.HOST]
    assert rig.edges(graph) == {(0, 1), (1, 2), (2, 3)}
    fill, kernel, copy, host = (driver.node_params(node) for node in nodes)
    assert isinstance(fill, MemsetNodeParams)
    assert (fill.dst, fill.value, fill.height) == (x, 0x3F800000, 1)
    assert fill.element_size * fill.width == 32
    assert isinstance(kernel, KernelNodeParams)
    assert kernel.function == rig.functions["scale"]
    assert (kernel.config.grid, kernel.config.block) == ((1, 1, 1), (256, 1, 1))
    assert kernel.arguments.raw(0) == x.to_bytes(8, "little")
    assert kernel.arguments.raw(1) == np.float32(5).tobytes()
    assert isinstance(copy, MemcpyNodeParams)
    assert (copy.dst, copy.src, copy.width, copy.height, copy.depth) == (y, x, 32, 1, 1)
    assert isinstance(host, HostNodeParams)
    assert seen == []
    rig.run(graph)
    assert rig.values(y, 8) == [5.0] * 8
    assert seen == [1]
    driver.graph_destroy(graph)


def test_info_says_what_the_next_node_depends_on(rig: Rig) -> None:
    driver = rig.driver
    assert driver.stream_capture_info(rig.stream).status == CaptureStatus.NONE
    driver.stream_begin_capture(rig.stream, LOCAL)
    first = driver.stream_capture_info(rig.stream)
    assert first.status == CaptureStatus.ACTIVE
    assert first.dependencies == ()
    rig.launch("nothing")
    second = driver.stream_capture_info(rig.stream)
    assert second.capture_id == first.capture_id
    assert second.dependencies == driver.graph_nodes(second.graph)
    graph = driver.stream_end_capture(rig.stream)
    assert driver.stream_capture_info(rig.stream).status == CaptureStatus.NONE
    assert len(driver.graph_nodes(graph)) == 1
    driver.stream_begin_capture(rig.stream, LOCAL)
    assert driver.stream_capture_info(rig.stream).capture_id != first.capture_id
    driver.graph_destroy(driver.stream_end_capture(rig.stream))
    driver.graph_destroy(graph)


def test_an_empty_capture_is_an_empty_graph(rig: Rig) -> None:
    rig.driver.stream_begin_capture(rig.stream, LOCAL)
    graph = rig.driver.stream_end_capture(rig.stream)
    assert rig.driver.graph_nodes(graph) == ()
    rig.run(graph)
    rig.driver.graph_destroy(graph)


def test_events_fork_and_join_without_nodes_of_their_own(rig: Rig) -> None:
    driver, x, y = rig.driver, rig.zeros(4), rig.zeros(4)
    other = rig.new_stream()
    forked, joined = rig.new_event(), rig.new_event()
    driver.stream_begin_capture(rig.stream, LOCAL)
    rig.launch("fill", x, 2.0, 4)
    driver.event_record(forked, rig.stream)
    driver.stream_wait_event(other, forked)
    assert (
        driver.stream_capture_info(other).capture_id
        == driver.stream_capture_info(rig.stream).capture_id
    )
    rig.launch("scale", x, 3.0, 4)
    rig.launch("fill", y, 10.0, 4, stream=other)
    driver.event_record(joined, other)
    driver.stream_wait_event(rig.stream, joined)
    assert len(driver.stream_capture_info(rig.stream).dependencies) == 2
    rig.launch("add", x, y, x, 4)
    graph = driver.stream_end_capture(rig.stream)
    assert driver.stream_capture_info(other).status == CaptureStatus.NONE
    assert rig.edges(graph) == {(0, 1), (0, 2), (1, 3), (2, 3)}
    rig.run(graph)
    assert rig.values(x, 4) == [16.0] * 4
    rig.launch("fill", x, 1.0, 4, stream=other)  # the forked stream works eagerly again
    driver.stream_synchronize(other)
    assert rig.values(x, 4) == [1.0] * 4
    driver.graph_destroy(graph)


def test_a_fork_that_does_nothing_needs_no_join(rig: Rig) -> None:
    driver, event = rig.driver, rig.new_event()
    other = rig.new_stream()
    driver.stream_begin_capture(rig.stream, LOCAL)
    rig.launch("nothing")
    driver.event_record(event, rig.stream)
    driver.stream_wait_event(other, event)
    graph = driver.stream_end_capture(rig.stream)
    assert len(driver.graph_nodes(graph)) == 1
    driver.graph_destroy(graph)


def test_waiting_for_an_event_never_recorded_changes_nothing(rig: Rig) -> None:
    driver, event = rig.driver, rig.new_event()
    driver.stream_begin_capture(rig.stream, LOCAL)
    driver.stream_wait_event(rig.stream, event)
    rig.launch("nothing")
    driver.graph_destroy(driver.stream_end_capture(rig.stream))


def test_other_streams_run_eagerly_meanwhile(rig: Rig) -> None:
    driver, x = rig.driver, rig.zeros(4)
    other, done = rig.new_stream(), threading.Event()
    driver.stream_begin_capture(rig.stream, LOCAL)
    rig.launch("fill", x, 1.0, 4)
    rig.launch("fill", x, 2.0, 4, stream=other)
    driver.launch_host_function(other, done.set)
    assert done.wait(10)
    graph = driver.stream_end_capture(rig.stream)
    assert rig.values(x, 4) == [2.0] * 4
    driver.graph_destroy(graph)


def test_capture_into_a_graph_after_its_nodes(rig: Rig) -> None:
    driver, x = rig.driver, rig.zeros(4)
    graph = rig.new_graph()
    first = rig.add(graph, (), "fill", x, 4.0, 4)
    rig.add(graph, (), EmptyNodeParams())
    driver.stream_begin_capture_to_graph(rig.stream, graph, [first], LOCAL)
    assert driver.stream_capture_info(rig.stream).dependencies == (first,)
    rig.launch("scale", x, 5.0, 4)
    assert driver.stream_end_capture(rig.stream) == graph
    assert rig.edges(graph) == {(0, 2)}
    rig.run(graph)
    assert rig.values(x, 4) == [20.0] * 4


def test_relaxed_allows_memory_and_another_thread(rig: Rig) -> None:
    driver = rig.driver
    driver.stream_begin_capture(rig.stream, CaptureMode.RELAXED)
    address = driver.mem_alloc(256)
    rig.launch("increment", address)
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(driver.stream_end_capture(rig.stream)))
    thread.start()
    thread.join()
    assert len(driver.graph_nodes(ended[0])) == 1  # type: ignore[arg-type]
    driver.graph_destroy(ended[0])  # type: ignore[arg-type]
    driver.mem_free(address)


def test_a_thread_may_relax_itself_for_a_while(rig: Rig) -> None:
    driver = rig.driver
    driver.stream_begin_capture(rig.stream, LOCAL)
    before = driver.thread_exchange_capture_mode(CaptureMode.RELAXED)
    assert before == CaptureMode.GLOBAL
    address = driver.mem_alloc(256)
    assert driver.thread_exchange_capture_mode(before) == CaptureMode.RELAXED
    driver.memset(address, 0, 1, 256, rig.stream)
    graph = driver.stream_end_capture(rig.stream)
    rig.run(graph)
    driver.graph_destroy(graph)
    driver.mem_free(address)


def test_programmatic_launches_become_programmatic_edges(rig: Rig) -> None:
    driver = rig.driver
    if not driver.capabilities.programmatic_launch:
        pytest.skip("no programmatic launch here")
    params = rig.params("nothing")
    config = LaunchConfig(1, 32, programmatic=True)
    driver.stream_begin_capture(rig.stream, LOCAL)
    for _ in range(2):
        driver.launch_kernel(rig.stream, params.function, config, params.arguments)
    graph = driver.stream_end_capture(rig.stream)
    (edge,) = driver.graph_edges(graph)
    assert edge.data.type == EdgeType.PROGRAMMATIC
    rig.run(graph)
    driver.graph_destroy(graph)


def test_what_is_captured_next_depends_on_what_is_set(rig: Rig) -> None:
    """As for a node that was added to the graph of a capture by hand."""
    driver, x = rig.driver, rig.array([1.0] * 4)
    other = rig.new_graph()
    foreign = rig.add(other, (), EmptyNodeParams())
    with refused(Status.ILLEGAL_STATE):
        driver.stream_set_capture_dependencies(rig.stream, ())
    driver.stream_begin_capture(rig.stream, LOCAL)
    rig.launch("scale", x, 3.0, 4)
    info = driver.stream_capture_info(rig.stream)
    added = rig.add(info.graph, info.dependencies, "add", x, x, x, 4)
    with refused(Status.INVALID_VALUE):
        driver.stream_set_capture_dependencies(rig.stream, (foreign,))
    assert driver.stream_capture_info(rig.stream).dependencies == info.dependencies
    driver.stream_set_capture_dependencies(rig.stream, (added,))
    assert driver.stream_capture_info(rig.stream).dependencies == (added,)
    rig.launch("scale", x, 5.0, 4)
    graph = driver.stream_end_capture(rig.stream)
    assert rig.edges(graph) == {(0, 1), (1, 2)}
    rig.run(graph)
    assert rig.values(x, 4) == [30.0] * 4
    driver.graph_destroy(graph)
