"""Conditional nodes: IF, WHILE and SWITCH, decided on the device."""

from __future__ import annotations

import numpy as np
import pytest

from ostinato.driver.api import (
    BatchMemOpNodeParams,
    CaptureMode,
    ChildGraphNodeParams,
    ConditionalHandle,
    ConditionalKind,
    ConditionalNodeParams,
    EmptyNodeParams,
    EventRecordNodeParams,
    EventWaitNodeParams,
    GraphHandle,
    HostNodeParams,
    MemOp,
    MemOpKind,
    NodeHandle,
    NodeParams,
    UpdateVerdict,
)
from ostinato.errors import Status
from tests.contract.kernels import Rig, copy_of, refused, words

IF, WHILE, SWITCH = ConditionalKind.IF, ConditionalKind.WHILE, ConditionalKind.SWITCH


@pytest.fixture(autouse=True)
def _conditional_nodes(rig: Rig) -> None:
    if not rig.driver.capabilities.conditional_nodes:
        pytest.skip("no conditional nodes here")


def conditional(
    rig: Rig,
    graph: GraphHandle,
    handle: ConditionalHandle,
    kind: ConditionalKind,
    size: int = 1,
    after: tuple[NodeHandle, ...] = (),
) -> tuple[NodeHandle, tuple[GraphHandle, ...]]:
    node = rig.add(graph, after, ConditionalNodeParams(handle, kind, size))
    read = rig.driver.node_params(node)
    assert isinstance(read, ConditionalNodeParams)
    assert len(read.bodies) == size
    return node, read.bodies


@pytest.mark.parametrize("value", [0, 1, 7])
@pytest.mark.parametrize("size", [1, 2])
def test_if_and_else(rig: Rig, graph: GraphHandle, value: int, size: int) -> None:
    driver, x, flag = rig.driver, rig.zeros(4), rig.array([value], np.uint32)
    handle = driver.conditional_create(graph)
    decide = rig.add(graph, (), "set_condition", handle, flag)
    _, bodies = conditional(rig, graph, handle, IF, size, (decide,))
    for number, body in enumerate(bodies, 1):
        rig.add(body, (), "fill", x, float(number), 4)
    rig.run(graph)
    expected = 1.0 if value else (2.0 if size == 2 else 0.0)
    assert rig.values(x, 4) == [expected] * 4


@pytest.mark.parametrize("limit", [1, 2, 25])
def test_while_repeats_its_body(rig: Rig, graph: GraphHandle, limit: int) -> None:
    driver, counter, x = rig.driver, rig.zeros(1, np.uint32), rig.array([1.0])
    handle = driver.conditional_create(graph, default=1)
    _, (body,) = conditional(rig, graph, handle, WHILE)
    double = rig.add(body, (), "scale", x, 2.0, 1)
    rig.add(body, [double], "count_up", handle, counter, limit)
    rig.run(graph)
    assert rig.values(counter, 1, np.uint32) == [limit]
    assert rig.values(x, 1) == [2.0**limit]


def test_while_may_not_run_at_all(rig: Rig, graph: GraphHandle) -> None:
    driver, counter = rig.driver, rig.zeros(1, np.uint32)
    handle = driver.conditional_create(graph, default=0)
    _, (body,) = conditional(rig, graph, handle, WHILE)
    rig.add(body, (), "count_up", handle, counter, 3)
    rig.run(graph)
    assert rig.values(counter, 1, np.uint32) == [0]


def test_the_default_comes_back_at_each_launch(rig: Rig, graph: GraphHandle) -> None:
    driver, counter = rig.driver, rig.zeros(1, np.uint32)
    handle = driver.conditional_create(graph, default=1)
    _, (body,) = conditional(rig, graph, handle, WHILE)
    rig.add(body, (), "count_up", handle, counter, 0)  # once, and the condition is 0
    rig.run(graph, times=3)
    assert rig.values(counter, 1, np.uint32) == [3]


@pytest.mark.parametrize("value", [0, 1, 2, 3, 100])
def test_switch_takes_the_body_of_that_number(rig: Rig, graph: GraphHandle, value: int) -> None:
    driver, x, flag = rig.driver, rig.zeros(4), rig.array([value], np.uint32)
    handle = driver.conditional_create(graph)
    decide = rig.add(graph, (), "set_condition", handle, flag)
    node, bodies = conditional(rig, graph, handle, SWITCH, 3, (decide,))
    for number, body in enumerate(bodies):
        rig.add(body, (), "fill", x, 10.0 + number, 4)
    rig.add(graph, [node], "scale", x, 2.0, 4)
    rig.run(graph)
    assert rig.values(x, 4) == [2 * (10.0 + value) if value < 3 else 0.0] * 4


def test_one_inside_another(rig: Rig, graph: GraphHandle) -> None:
    driver, counter, x = rig.driver, rig.zeros(1, np.uint32), rig.zeros(1, np.uint32)
    loop, inner = driver.conditional_create(graph, default=1), driver.conditional_create(graph)
    _, (body,) = conditional(rig, graph, loop, WHILE)
    count = rig.add(body, (), "count_up", loop, counter, 6)
    decide = rig.add(body, [count], "set_condition", inner, counter)
    _, bodies = conditional(rig, body, inner, SWITCH, 4, (decide,))
    rig.add(bodies[2], (), "increment", x)
    rig.add(bodies[3], (), "increment", x)
    rig.run(graph, times=1)
    assert rig.values(counter, 1, np.uint32) == [6]
    assert rig.values(x, 1, np.uint32) == [2]


def test_a_body_is_filled_by_capture(rig: Rig, graph: GraphHandle) -> None:
    driver, counter = rig.driver, rig.zeros(1, np.uint32)
    handle = driver.conditional_create(graph, default=1)
    _, (body,) = conditional(rig, graph, handle, WHILE)
    driver.stream_begin_capture_to_graph(rig.stream, body, (), CaptureMode.THREAD_LOCAL)
    rig.launch("count_up", handle, counter, 8)
    assert driver.stream_end_capture(rig.stream) == body
    rig.run(graph)
    assert rig.values(counter, 1, np.uint32) == [8]


def test_a_conditional_node_added_while_capturing(rig: Rig) -> None:
    driver, counter = rig.driver, rig.zeros(1, np.uint32)
    graph = rig.new_graph()
    driver.stream_begin_capture_to_graph(rig.stream, graph, (), CaptureMode.THREAD_LOCAL)
    rig.launch("increment", counter)
    info = driver.stream_capture_info(rig.stream)
    handle = driver.conditional_create(info.graph, default=1)
    _, (body,) = conditional(rig, info.graph, handle, WHILE, after=info.dependencies)
    assert driver.stream_end_capture(rig.stream) == graph
    rig.add(body, (), "count_up", handle, counter, 5)
    rig.run(graph)
    assert rig.values(counter, 1, np.uint32) == [5]


def test_what_a_body_may_hold(rig: Rig, graph: GraphHandle) -> None:
    driver, x, y = rig.driver, rig.zeros(4), rig.zeros(4)
    child = rig.new_graph()
    rig.add(child, (), "scale", x, 3.0, 4)
    handle = driver.conditional_create(graph, default=1)
    _, (body,) = conditional(rig, graph, handle, IF)
    fill = rig.add(body, (), words(x, 0x3F800000, 4))
    empty = rig.add(body, [fill], EmptyNodeParams())
    nested = rig.add(body, [empty], ChildGraphNodeParams(child))
    rig.add(body, [nested], copy_of(y, x, 16))
    rig.run(graph)
    assert rig.values(y, 4) == [3.0] * 4


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_a_body_may_not_hold(rig: Rig, depth: int) -> None:
    """`depth`: in how many child graphs of the body it is."""
    driver, event = rig.driver, rig.new_event()
    write = BatchMemOpNodeParams((MemOp(MemOpKind.WRITE, rig.zeros(1), 1),))
    records, waits = EventRecordNodeParams(event), EventWaitNodeParams(event)
    for params in (HostNodeParams(lambda: None), records, waits, write):
        graph = driver.graph_create()
        handle = driver.conditional_create(graph, default=1)
        _, (body,) = conditional(rig, graph, handle, IF)
        children: list[GraphHandle] = []
        with refused(Status.INVALID_VALUE, Status.NOT_SUPPORTED, Status.NOT_PERMITTED):
            inner: NodeParams = params  # refused when it is added, or at the latest at the end
            for _ in range(depth):
                children.append(driver.graph_create())
                rig.add(children[-1], (), inner)
                inner = ChildGraphNodeParams(children[-1])
            rig.add(body, (), inner)
            driver.graph_instantiate(graph)
        for made in (graph, *children):
            driver.graph_destroy(made)


@pytest.mark.parametrize(("kind", "size"), [(IF, 0), (IF, 3), (WHILE, 0), (WHILE, 2), (SWITCH, 0)])
def test_numbers_of_bodies_that_cannot_be(
    rig: Rig, graph: GraphHandle, kind: ConditionalKind, size: int
) -> None:
    handle = rig.driver.conditional_create(graph)
    with refused(Status.INVALID_VALUE):
        rig.add(graph, (), ConditionalNodeParams(handle, kind, size))


def test_a_handle_has_one_node_of_its_graph(rig: Rig, graph: GraphHandle) -> None:
    driver, other = rig.driver, rig.new_graph()
    handle = driver.conditional_create(graph)
    with refused(Status.INVALID_VALUE):
        rig.add(other, (), ConditionalNodeParams(handle, IF))
    rig.add(graph, (), ConditionalNodeParams(handle, IF))
    with refused(Status.INVALID_VALUE):
        rig.add(graph, (), ConditionalNodeParams(handle, IF))


def test_a_handle_without_a_node_cannot_be_instantiated(rig: Rig, graph: GraphHandle) -> None:
    rig.driver.conditional_create(graph)
    with refused(Status.INVALID_VALUE):
        rig.driver.graph_instantiate(graph)


def test_such_graphs_have_one_executable_and_no_copies(rig: Rig, graph: GraphHandle) -> None:
    driver, outer = rig.driver, rig.new_graph()
    _, (body,) = conditional(rig, graph, driver.conditional_create(graph, default=1), IF)
    rig.instantiate(graph)
    with refused(Status.NOT_SUPPORTED):
        driver.graph_instantiate(graph)
    for copied in (graph, body):
        with refused(Status.NOT_SUPPORTED):
            driver.graph_clone(copied)
        with refused(Status.NOT_SUPPORTED):
            rig.add(outer, (), ChildGraphNodeParams(copied))


def _counting(rig: Rig, counter: int, limit: int, extra: bool = False) -> GraphHandle:
    graph = rig.driver.graph_create()
    handle = rig.driver.conditional_create(graph, default=1)
    _, (body,) = conditional(rig, graph, handle, WHILE)
    node = rig.add(body, (), "count_up", handle, counter, limit)
    if extra:
        rig.add(body, [node], EmptyNodeParams())
    return graph


def test_updates_reach_into_bodies(rig: Rig) -> None:
    driver, counter = rig.driver, rig.zeros(1, np.uint32)
    run = rig.instantiate(_counting(rig, counter, 3))
    assert driver.exec_update(run, _counting(rig, counter, 9)).verdict == UpdateVerdict.SUCCESS
    driver.exec_launch(run, rig.stream)
    assert rig.values(counter, 1, np.uint32) == [9]
    refusal = driver.exec_update(run, _counting(rig, counter, 9, extra=True))
    assert refusal.verdict != UpdateVerdict.SUCCESS
    driver.exec_launch(run, rig.stream)
    assert rig.values(counter, 1, np.uint32) == [10]


def test_single_nodes_in_bodies_change_too(rig: Rig, graph: GraphHandle) -> None:
    driver, counter = rig.driver, rig.zeros(1, np.uint32)
    handle = driver.conditional_create(graph, default=1)
    node, (body,) = conditional(rig, graph, handle, WHILE)
    inner = rig.add(body, (), "count_up", handle, counter, 3)
    run = rig.instantiate(graph)
    driver.exec_set_params(run, inner, rig.params("count_up", handle, counter, 7))
    driver.exec_launch(run, rig.stream)
    assert rig.values(counter, 1, np.uint32) == [7]
    with refused(Status.NOT_SUPPORTED):
        driver.exec_set_params(run, node, ConditionalNodeParams(handle, WHILE))
    with refused(Status.NOT_SUPPORTED):
        driver.node_set_params(node, ConditionalNodeParams(handle, WHILE))
