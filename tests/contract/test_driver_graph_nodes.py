"""Graph definitions: every kind of node, edges, clones, changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ostinato.driver.api import (
    AllocNodeParams,
    BatchMemOpNodeParams,
    ChildGraphNodeParams,
    ConditionalKind,
    ConditionalNodeParams,
    Edge,
    EdgeData,
    EdgeType,
    EmptyNodeParams,
    EventRecordNodeParams,
    EventWaitNodeParams,
    FreeNodeParams,
    GraphHandle,
    HostNodeParams,
    KernelNodeParams,
    KernelTable,
    LaunchConfig,
    MemcpyNodeParams,
    MemOp,
    MemOpKind,
    MemsetNodeParams,
    NodeKind,
    NodeParams,
    OpaqueNodeParams,
)
from ostinato.errors import DriverError, Status
from tests.contract.kernels import Rig, copy_of, refused, words

PROGRAMMATIC = EdgeData(from_port=1, type=EdgeType.PROGRAMMATIC)


def test_nodes_in_order_with_their_kinds(rig: Rig, graph: GraphHandle) -> None:
    driver, x, y = rig.driver, rig.zeros(4), rig.zeros(4)
    event, child = driver.event_create(), driver.graph_create()
    rig.add(child, (), "nothing")
    made: list[tuple[NodeParams, NodeKind]] = [
        (rig.params("fill", x, 1.0, 4), NodeKind.KERNEL),
        (copy_of(y, x, 16), NodeKind.MEMCPY),
        (words(x, 0, 4), NodeKind.MEMSET),
        (HostNodeParams(lambda: None), NodeKind.HOST),
        (ChildGraphNodeParams(child), NodeKind.CHILD_GRAPH),
        (EmptyNodeParams(), NodeKind.EMPTY),
        (EventRecordNodeParams(event), NodeKind.EVENT_RECORD),
        (EventWaitNodeParams(event), NodeKind.EVENT_WAIT),
    ]
    nodes = []
    for params, kind in made:
        node = rig.add(graph, nodes[-1:], params)
        nodes.append(node)
        assert driver.node_kind(node) == kind
    assert driver.graph_nodes(graph) == tuple(nodes)
    assert rig.edges(graph) == {(i, i + 1) for i in range(len(made) - 1)}
    assert driver.node_params(nodes[0]) == made[0][0]
    assert driver.node_params(nodes[6]) == made[6][0]
    assert driver.node_params(nodes[7]) == made[7][0]


def test_many_kernels_at_once(rig: Rig, graph: GraphHandle) -> None:
    driver, notes, cursor = rig.driver, rig.zeros(8, np.uint32), rig.zeros(1, np.uint32)
    made = [rig.params("note", notes, cursor, number) for number in range(5)]
    special = replace(made[3].config, priority=0)
    table = KernelTable(
        [one.function for one in made],
        [special if row == 3 else one.config for row, one in enumerate(made)],
        [one.arguments.layout for one in made],
        [False] * 5,
        bytearray(b"".join(one.arguments.data for one in made)),
        [row * len(made[0].arguments.data) for row in range(5)],
        [len(one.arguments.data) for one in made],
    )
    nodes = [rig.add(graph, (), EmptyNodeParams())]
    driver.graph_add_kernels(graph, nodes, table, [(4, []), (1, [0, 1]), (3, [2]), (0, [2, 3])])
    assert driver.graph_nodes(graph) == tuple(nodes) and len(nodes) == 5
    assert rig.edges(graph) == {(0, 2), (1, 2), (2, 3), (2, 4), (3, 4)}
    for node, row in zip(nodes[1:], (4, 1, 3, 0), strict=True):
        read = driver.node_params(node)
        assert isinstance(read, KernelNodeParams)
        assert read.arguments == made[row].arguments
        assert (read.function, read.config.grid) == (made[row].function, made[row].config.grid)
    rig.run(graph)
    assert rig.values(notes, 5, np.uint32) == [4, 1, 3, 0, 0]


def test_copies_in_two_and_three_dimensions(rig: Rig, graph: GraphHandle) -> None:
    source = np.arange(4 * 6 * 8, dtype=np.uint8).reshape(4, 6, 8)
    x, y = rig.array(source, np.uint8), rig.zeros(4 * 6 * 8, np.uint8)
    flat = rig.add(
        graph,
        (),
        MemcpyNodeParams(
            y, x + 2, 3, height=5, depth=2, dst_pitch=8, src_pitch=8, dst_height=6, src_height=6
        ),
    )
    rig.run(graph)
    expected = np.zeros_like(source)
    expected[:2, :5, :3] = source[:2, :5, 2:5]
    assert (rig.read(y, 192, np.uint8).reshape(4, 6, 8) == expected).all()
    read = rig.driver.node_params(flat)
    assert isinstance(read, MemcpyNodeParams)
    assert (read.dst, read.src, read.width, read.height, read.depth) == (y, x + 2, 3, 5, 2)
    assert (read.dst_pitch, read.src_pitch) == (8, 8)


def test_a_fill_in_two_dimensions(rig: Rig, graph: GraphHandle) -> None:
    x = rig.zeros(4 * 16, np.uint8)
    node = rig.add(graph, (), MemsetNodeParams(x, 0x0102, 2, width=3, height=4, pitch=16))
    rig.run(graph)
    expected = np.zeros((4, 16), np.uint8)
    expected[:, :6] = [2, 1] * 3
    assert (rig.read(x, 64, np.uint8).reshape(4, 16) == expected).all()
    read = rig.driver.node_params(node)
    assert isinstance(read, MemsetNodeParams)
    assert (read.dst, read.value, read.element_size, read.width) == (x, 0x0102, 2, 3)
    assert (read.height, read.pitch) == (4, 16)


def test_host_nodes_run_each_time(rig: Rig, graph: GraphHandle) -> None:
    seen: list[str] = []
    first = rig.add(graph, (), HostNodeParams(lambda: seen.append("a")))
    rig.add(graph, [first], HostNodeParams(lambda: seen.append("b")))
    rig.run(graph, times=2)
    assert seen == ["a", "b"] * 2


def test_a_child_is_a_copy_of_its_own(rig: Rig, graph: GraphHandle) -> None:
    driver, x = rig.driver, rig.zeros(4)
    child = driver.graph_create()
    inner = rig.add(child, (), "fill", x, 2.0, 4)
    node = rig.add(graph, (), ChildGraphNodeParams(child))
    rig.add(graph, [node], "scale", x, 5.0, 4)
    driver.node_set_params(inner, rig.params("fill", x, 100.0, 4))  # not the copy's
    driver.graph_destroy(child)
    read = driver.node_params(node)
    assert isinstance(read, ChildGraphNodeParams)
    (embedded,) = driver.graph_nodes(read.graph)
    assert driver.node_params(embedded) == rig.params("fill", x, 2.0, 4)
    rig.run(graph)
    assert rig.values(x, 4) == [10.0] * 4
    with pytest.raises(DriverError):
        driver.graph_destroy(read.graph)  # it belongs to the node


def test_event_nodes_order_work_between_streams(rig: Rig, graph: GraphHandle) -> None:
    driver, x = rig.driver, rig.zeros(4)
    event, other = rig.new_event(), rig.new_stream()
    fill = rig.add(graph, (), "fill", x, 3.0, 4)
    rig.add(graph, [fill], EventRecordNodeParams(event))
    run = rig.instantiate(graph)
    driver.exec_launch(run, rig.stream)
    driver.stream_wait_event(other, event)
    rig.launch("scale", x, 2.0, 4, stream=other)
    driver.stream_synchronize(other)
    assert driver.event_query(event)
    assert rig.values(x, 4) == [6.0] * 4
    waiting = rig.new_graph()
    driver.event_record(event, rig.stream)
    wait = rig.add(waiting, (), EventWaitNodeParams(event))
    rig.add(waiting, [wait], "scale", x, 2.0, 4)
    rig.run(waiting)
    assert rig.values(x, 4) == [12.0] * 4


def test_batch_memory_operations(rig: Rig, graph: GraphHandle) -> None:
    driver = rig.driver
    if not driver.capabilities.batch_memory_ops:
        pytest.skip("no batch memory operations here")
    x = rig.array([5, 0, 6, 1], np.uint32)
    operations = (
        MemOp(MemOpKind.WAIT_GEQ, x, 4),
        MemOp(MemOpKind.WAIT_EQ, x + 8, 6),
        MemOp(MemOpKind.WAIT_AND, x + 8, 2),
        MemOp(MemOpKind.WRITE, x + 4, 77),
    )
    node = rig.add(graph, (), BatchMemOpNodeParams(operations))
    assert driver.node_kind(node) == NodeKind.BATCH_MEM_OP
    assert driver.node_params(node) == BatchMemOpNodeParams(operations)
    rig.run(graph)
    assert rig.values(x, 4, np.uint32) == [5, 77, 6, 1]


# --- memory nodes


def test_alloc_nodes_have_their_address_at_once(rig: Rig, graph: GraphHandle) -> None:
    driver, out = rig.driver, rig.zeros(4)
    if not driver.capabilities.memory_nodes:
        pytest.skip("no memory nodes here")
    alloc = rig.add(graph, (), AllocNodeParams(1024))
    read = driver.node_params(alloc)
    assert isinstance(read, AllocNodeParams)
    assert read.nbytes >= 1024
    assert read.address % 256 == 0
    fill = rig.add(graph, [alloc], "fill", read.address, 6.0, 4)
    copy = rig.add(graph, [fill], copy_of(out, read.address, 16))
    free = rig.add(graph, [copy], FreeNodeParams(read.address))
    assert driver.node_kind(free) == NodeKind.MEM_FREE
    assert driver.node_params(free) == FreeNodeParams(read.address)
    rig.run(graph, times=3)
    assert rig.values(out, 4) == [6.0] * 4


def test_graphs_with_memory_nodes_are_fixed(rig: Rig, graph: GraphHandle) -> None:
    driver = rig.driver
    if not driver.capabilities.memory_nodes:
        pytest.skip("no memory nodes here")
    alloc = rig.add(graph, (), AllocNodeParams(1024))
    empty = rig.add(graph, [alloc], EmptyNodeParams())
    outer = rig.new_graph()
    attempts: list[Callable[[], object]] = [
        lambda: driver.graph_remove_node(alloc),
        lambda: driver.graph_remove_node(empty),
        lambda: driver.graph_clone(graph),
        lambda: rig.add(outer, (), ChildGraphNodeParams(graph)),
    ]
    for attempt in attempts:
        with refused(Status.NOT_PERMITTED, Status.NOT_SUPPORTED):
            attempt()
    run = driver.graph_instantiate(graph)
    with refused(Status.NOT_PERMITTED, Status.NOT_SUPPORTED):
        driver.graph_instantiate(graph)  # one at a time
    driver.exec_destroy(run)
    driver.exec_destroy(driver.graph_instantiate(graph))


def test_free_nodes_are_for_alloc_nodes(rig: Rig, graph: GraphHandle) -> None:
    if not rig.driver.capabilities.memory_nodes:
        pytest.skip("no memory nodes here")
    with refused(Status.INVALID_VALUE):
        rig.add(graph, (), FreeNodeParams(rig.zeros(4)))


# --- edges


def test_edges_added_at_once_keep_their_own_data(rig: Rig, graph: GraphHandle) -> None:
    driver, cursor = rig.driver, rig.zeros(1, np.uint32)
    a, b, c = (rig.add(graph, (), "increment", cursor) for _ in range(3))
    fill = rig.add(graph, (), words(cursor, 0, 1))
    wanted = [Edge(a, c, PROGRAMMATIC), Edge(b, c), Edge(fill, a)]
    with refused(Status.INVALID_VALUE):  # the last one is not from a kernel: none is added
        driver.graph_add_edges(graph, [*wanted, Edge(fill, b, PROGRAMMATIC)])
    assert driver.graph_edges(graph) == ()
    driver.graph_add_edges(graph, wanted)
    assert set(driver.graph_edges(graph)) == set(wanted)


def test_edges_are_added_once(rig: Rig, graph: GraphHandle) -> None:
    driver = rig.driver
    a, b, c = (rig.add(graph, (), EmptyNodeParams()) for _ in range(3))
    driver.graph_add_edges(graph, [Edge(a, b), Edge(b, c)])
    assert rig.edges(graph) == {(0, 1), (1, 2)}
    with refused(Status.INVALID_VALUE):
        driver.graph_add_edges(graph, [Edge(a, b)])
    with refused(Status.INVALID_VALUE):
        driver.graph_add_edges(graph, [Edge(a, a)])


def test_no_cycle_ever_runs(rig: Rig, graph: GraphHandle) -> None:
    driver = rig.driver
    a = rig.add(graph, (), EmptyNodeParams())
    b = rig.add(graph, [a], EmptyNodeParams())
    c = rig.add(graph, [b], EmptyNodeParams())
    with refused(Status.INVALID_VALUE):
        driver.graph_add_edges(graph, [Edge(c, a)])


def test_edges_stay_inside_a_graph(rig: Rig, graph: GraphHandle) -> None:
    driver, other = rig.driver, rig.new_graph()
    here, there = rig.add(graph, (), EmptyNodeParams()), rig.add(other, (), EmptyNodeParams())
    with refused(Status.INVALID_VALUE):
        rig.add(graph, [there], EmptyNodeParams())
    with refused(Status.INVALID_VALUE):
        rig.add(graph, [here, here], EmptyNodeParams())
    with refused(Status.INVALID_VALUE):
        driver.graph_add_edges(graph, [Edge(here, there)])
    assert driver.graph_nodes(graph) == (here,)


def test_programmatic_edges_keep_their_data(rig: Rig, graph: GraphHandle) -> None:
    driver, x = rig.driver, rig.zeros(4)
    if not driver.capabilities.programmatic_launch:
        pytest.skip("no programmatic launch here")
    first = rig.add(graph, (), "fill", x, 1.0, 4)
    second = rig.add(graph, [first], "nothing", edge_data=[PROGRAMMATIC])
    (edge,) = driver.graph_edges(graph)
    assert edge == Edge(first, second, PROGRAMMATIC)
    with refused(Status.INVALID_VALUE):
        driver.graph_add_edges(graph, [Edge(first, second)])  # there is one already
    fill = rig.add(graph, (), words(x, 0, 4))
    with refused(Status.INVALID_VALUE):
        driver.graph_add_edges(graph, [Edge(fill, second, PROGRAMMATIC)])  # not from a kernel
    rig.run(graph)


# --- clones and changes


def test_a_clone_is_independent(rig: Rig) -> None:
    driver, x = rig.driver, rig.zeros(4)
    graph = driver.graph_create()
    first = rig.add(graph, (), "fill", x, 2.0, 4)
    second = rig.add(graph, [first], "scale", x, 3.0, 4)
    clone = driver.graph_clone(graph)
    twins = [driver.node_in_clone(node, clone) for node in (first, second)]
    assert driver.graph_nodes(clone) == tuple(twins)
    assert rig.edges(clone) == {(0, 1)}
    driver.node_set_params(twins[0], rig.params("fill", x, 5.0, 4))
    driver.graph_remove_node(second)
    rig.run(clone)
    assert rig.values(x, 4) == [15.0] * 4
    rig.run(graph)
    assert rig.values(x, 4) == [2.0] * 4
    driver.graph_destroy(graph)
    rig.run(clone)
    driver.graph_destroy(clone)


def test_only_a_clone_has_the_nodes_twin(rig: Rig, graph: GraphHandle) -> None:
    driver = rig.driver
    node, other = rig.add(graph, (), EmptyNodeParams()), rig.new_graph()
    with refused(Status.INVALID_VALUE):
        driver.node_in_clone(node, other)


def test_a_removed_node_takes_its_edges_along(rig: Rig, graph: GraphHandle) -> None:
    driver = rig.driver
    a = rig.add(graph, (), EmptyNodeParams())
    b = rig.add(graph, [a], EmptyNodeParams())
    c = rig.add(graph, [a, b], EmptyNodeParams())
    driver.graph_remove_node(b)
    assert driver.graph_nodes(graph) == (a, c)
    assert rig.edges(graph) == {(0, 1)}


def test_setting_what_a_node_does(rig: Rig, graph: GraphHandle) -> None:
    driver, x, y = rig.driver, rig.zeros(4), rig.zeros(4)
    fill = rig.add(graph, (), words(x, 0, 4))
    kernel = rig.add(graph, [fill], "scale", x, 2.0, 4)
    copy = rig.add(graph, [kernel], copy_of(y, x, 4))
    host = rig.add(graph, [copy], HostNodeParams(lambda: None))
    seen: list[int] = []
    driver.node_set_params(fill, words(x, 0x3F800000, 3))
    driver.node_set_params(kernel, rig.params("scale", x, 7.0, 2))
    driver.node_set_params(copy, copy_of(y, x, 16))
    driver.node_set_params(host, HostNodeParams(lambda: seen.append(1)))
    rig.run(graph)
    assert rig.values(y, 4) == [7.0, 7.0, 1.0, 0.0]
    assert seen == [1]
    with refused(Status.INVALID_VALUE):
        driver.node_set_params(kernel, copy_of(y, x, 16))


def test_a_kernel_may_become_another(rig: Rig, graph: GraphHandle) -> None:
    x = rig.array([1.0] * 4)
    node = rig.add(graph, (), "scale", x, 2.0, 4)
    rig.driver.node_set_params(node, rig.params("fill", x, 9.0, 3))
    rig.run(graph)
    assert rig.values(x, 4) == [9.0, 9.0, 9.0, 1.0]


def test_what_is_shown_but_not_made(rig: Rig, graph: GraphHandle) -> None:
    with pytest.raises((DriverError, ValueError)):
        rig.add(graph, (), OpaqueNodeParams("a semaphore"))
    assert rig.driver.graph_nodes(graph) == ()


def test_launch_settings_come_back(rig: Rig, graph: GraphHandle) -> None:
    driver = rig.driver
    params = rig.params("nothing")
    config = LaunchConfig((3, 2, 1), (32, 2, 2), 1024)
    node = rig.add(graph, (), KernelNodeParams(params.function, config, params.arguments))
    read = driver.node_params(node)
    assert isinstance(read, KernelNodeParams)
    assert (read.config.grid, read.config.block) == ((3, 2, 1), (32, 2, 2))
    assert read.config.shared == 1024


def test_nodes_in_a_body(rig: Rig, graph: GraphHandle) -> None:
    driver = rig.driver
    if not driver.capabilities.conditional_nodes:
        pytest.skip("no conditional nodes here")
    handle = driver.conditional_create(graph, default=1)
    node = rig.add(graph, (), ConditionalNodeParams(handle, ConditionalKind.IF))
    assert driver.node_kind(node) == NodeKind.CONDITIONAL
    read = driver.node_params(node)
    assert isinstance(read, ConditionalNodeParams)
    assert (read.handle, read.kind, read.size) == (handle, ConditionalKind.IF, 1)
    (body,) = read.bodies
    assert driver.graph_nodes(body) == ()
    inner = rig.add(body, (), "nothing")
    with refused(Status.INVALID_VALUE):
        rig.add(graph, [inner], EmptyNodeParams())
    with pytest.raises(DriverError):
        driver.graph_destroy(body)
    rig.run(graph)
