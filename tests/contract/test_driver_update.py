"""Changing executables: one node, on and off, or the whole graph; all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ostinato.driver.api import (
    ChildGraphNodeParams,
    EmptyNodeParams,
    EventRecordNodeParams,
    ExecHandle,
    GraphHandle,
    HostNodeParams,
    KernelNodeParams,
    LaunchConfig,
    MemcpyNodeParams,
    MemsetNodeParams,
    NodeHandle,
    UpdateVerdict,
)
from ostinato.driver.process_memory import as_numpy
from ostinato.errors import DriverError, Status
from ostinato.testing import HeldStream
from tests.contract.kernels import Rig, copy_of, refused, words


class Chain:
    """fill x with 2 → scale x by 3 → copy x to y → call; and its executable."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.driver = rig, rig.driver
        self.x, self.y, self.seen = rig.zeros(4), rig.zeros(4), list[str]()
        self.graph, self.nodes = self.build()
        self.run: ExecHandle = self.driver.graph_instantiate(self.graph)

    def build(
        self, value: float = 2.0, factor: float = 3.0, word: str = "first"
    ) -> tuple[GraphHandle, list[NodeHandle]]:
        rig, graph = self.rig, self.driver.graph_create()
        a = rig.add(graph, (), "fill", self.x, value, 4)
        b = rig.add(graph, [a], "scale", self.x, factor, 4)
        c = rig.add(graph, [b], copy_of(self.y, self.x, 16))
        d = rig.add(graph, [c], HostNodeParams(lambda: self.seen.append(word)))
        return graph, [a, b, c, d]

    def result(self) -> list[float]:
        self.rig.launch("fill", self.y, -1.0, 4)
        self.driver.exec_launch(self.run, self.rig.stream)
        return self.rig.values(self.y, 4)


@pytest.fixture
def chain(rig: Rig) -> Chain:
    return Chain(rig)


def test_one_node_at_a_time(chain: Chain) -> None:
    driver, rig = chain.driver, chain.rig
    fill, scale, copy, host = chain.nodes
    assert chain.result() == [6.0] * 4
    driver.exec_set_params(chain.run, fill, rig.params("fill", chain.x, 10.0, 4))
    assert chain.result() == [30.0] * 4
    driver.exec_set_params(chain.run, scale, rig.params("fill", chain.x, 1.0, 2))
    assert chain.result() == [1.0, 1.0, 10.0, 10.0]
    driver.exec_set_params(chain.run, copy, copy_of(chain.y, chain.x + 4, 8))
    assert chain.result() == [1.0, 10.0, -1.0, -1.0]
    driver.exec_set_params(chain.run, host, HostNodeParams(lambda: chain.seen.append("second")))
    chain.result()
    assert chain.seen == ["first"] * 4 + ["second"]
    # the definition knows nothing of it
    assert driver.node_params(fill) == rig.params("fill", chain.x, 2.0, 4)


def test_fills_may_change_value_and_element(rig: Rig) -> None:
    driver, x, graph = rig.driver, rig.zeros(4), rig.new_graph()
    node = rig.add(graph, (), words(x, 1, 4))
    run = rig.instantiate(graph)
    driver.exec_set_params(run, node, words(x, 7, 2))
    driver.exec_launch(run, rig.stream)
    assert rig.values(x, 4, "u4") == [7, 7, 0, 0]
    driver.exec_set_params(run, node, MemsetNodeParams(x, 9, 1, 4))
    driver.exec_launch(run, rig.stream)
    assert rig.values(x, 4, "u4") == [0x09090909, 7, 0, 0]


def test_event_nodes_may_change_their_event(rig: Rig) -> None:
    driver, graph, events = rig.driver, rig.new_graph(), [rig.new_event() for _ in range(2)]
    node = rig.add(graph, (), EventRecordNodeParams(events[0]))
    run = rig.instantiate(graph)
    driver.exec_set_params(run, node, EventRecordNodeParams(events[1]))
    with HeldStream(driver, rig.stream):
        driver.exec_launch(run, rig.stream)
        assert driver.event_query(events[0])
        assert not driver.event_query(events[1])
    driver.event_synchronize(events[1])


def test_launches_under_way_keep_the_old_values(chain: Chain) -> None:
    driver, rig = chain.driver, chain.rig
    driver.exec_upload(chain.run, rig.stream)
    driver.exec_launch(chain.run, rig.stream)
    driver.stream_synchronize(rig.stream)
    copies = [rig.zeros(4) for _ in range(2)]
    with HeldStream(driver, rig.stream):
        driver.exec_launch(chain.run, rig.stream)
        driver.memcpy(copies[0], chain.y, 16, rig.stream)
        driver.exec_set_params(chain.run, chain.nodes[0], rig.params("fill", chain.x, 5.0, 4))
        driver.exec_launch(chain.run, rig.stream)
        driver.memcpy(copies[1], chain.y, 16, rig.stream)
    assert [rig.values(c, 4) for c in copies] == [[6.0] * 4, [15.0] * 4]


def test_what_one_node_cannot_become(chain: Chain) -> None:
    driver, rig = chain.driver, chain.rig
    fill, _scale, copy, _host = chain.nodes
    attempts: list[Callable[[], object]] = [
        lambda: driver.exec_set_params(chain.run, fill, copy_of(chain.y, chain.x, 16)),
        lambda: driver.exec_set_params(
            chain.run, copy, MemcpyNodeParams(chain.y, chain.x, 4, height=2, dst_pitch=8)
        ),
        lambda: driver.exec_set_params(chain.run, copy, words(chain.x, 0, 4)),
    ]
    for attempt in attempts:
        with refused(Status.INVALID_VALUE, Status.NOT_SUPPORTED):
            attempt()
    other, nodes = chain.build()
    with refused(Status.INVALID_VALUE):
        driver.exec_set_params(chain.run, nodes[0], rig.params("fill", chain.x, 9.0, 4))
    driver.graph_destroy(other)
    assert chain.result() == [6.0] * 4


def test_a_copy_to_another_kind_of_memory(chain: Chain) -> None:
    """A driver may refuse it, and then nothing has changed; or do it right."""
    driver = chain.driver
    pinned = driver.mem_alloc_pinned(16)
    view = as_numpy(pinned, (4,), np.dtype(np.float32), None)
    view[:] = 0
    try:
        driver.exec_set_params(chain.run, chain.nodes[2], copy_of(pinned, chain.x, 16))
    except DriverError as error:
        assert error.status == Status.INVALID_VALUE
        assert chain.result() == [6.0] * 4
    else:
        assert chain.result() == [-1.0] * 4
        assert view.tolist() == [6.0] * 4
    driver.exec_destroy(chain.run)
    driver.mem_free_pinned(pinned)


def test_flat_fills_stay_flat(rig: Rig) -> None:
    driver, x, graph = rig.driver, rig.zeros(16), rig.new_graph()
    node = rig.add(graph, (), words(x, 1, 4))
    run = rig.instantiate(graph)
    with refused(Status.INVALID_VALUE):
        driver.exec_set_params(run, node, MemsetNodeParams(x, 1, 4, 2, height=2, pitch=16))


# --- on and off


def test_nodes_switched_off_do_nothing(chain: Chain) -> None:
    driver = chain.driver
    scale, copy = chain.nodes[1:3]
    assert driver.exec_enabled(chain.run, scale)
    driver.exec_set_enabled(chain.run, scale, False)
    assert not driver.exec_enabled(chain.run, scale)
    assert chain.result() == [2.0] * 4
    driver.exec_set_enabled(chain.run, copy, False)
    assert chain.result() == [-1.0] * 4
    driver.exec_set_enabled(chain.run, scale, True)
    driver.exec_set_enabled(chain.run, copy, True)
    assert chain.result() == [6.0] * 4


def test_only_kernels_copies_and_fills_switch_off(chain: Chain) -> None:
    with refused(Status.INVALID_VALUE):
        chain.driver.exec_set_enabled(chain.run, chain.nodes[3], False)
    with refused(Status.INVALID_VALUE):
        chain.driver.exec_enabled(chain.run, chain.nodes[3])


# --- children


def test_nodes_inside_a_child(rig: Rig) -> None:
    driver, x = rig.driver, rig.zeros(4)
    child, graph = rig.new_graph(), rig.new_graph()
    original = rig.add(child, (), "fill", x, 2.0, 4)
    node = rig.add(graph, (), ChildGraphNodeParams(child))
    rig.add(graph, [node], "scale", x, 10.0, 4)
    embedded = driver.graph_nodes(driver.node_params(node).graph)[0]  # type: ignore[union-attr]
    run = rig.instantiate(graph)
    driver.exec_set_params(run, embedded, rig.params("fill", x, 3.0, 4))
    driver.exec_launch(run, rig.stream)
    assert rig.values(x, 4) == [30.0] * 4
    with refused(Status.INVALID_VALUE):  # the child was cloned: its own node is not in there
        driver.exec_set_params(run, original, rig.params("fill", x, 4.0, 4))
    driver.exec_set_enabled(run, embedded, False)
    driver.exec_launch(run, rig.stream)
    assert rig.values(x, 4) == [300.0] * 4


def test_a_whole_child_at_once(rig: Rig) -> None:
    driver, x = rig.driver, rig.zeros(4)

    def child(value: float, extra: bool = False) -> GraphHandle:
        made = rig.new_graph()
        rig.add(made, (), "fill", x, value, 4)
        if extra:
            rig.add(made, (), EmptyNodeParams())
        return made

    graph = rig.new_graph()
    children = [child(1.0), child(2.0), child(3.0, extra=True)]
    node = rig.add(graph, (), ChildGraphNodeParams(children[0]))
    run = rig.instantiate(graph)
    driver.exec_set_params(run, node, ChildGraphNodeParams(children[1]))
    driver.exec_launch(run, rig.stream)
    assert rig.values(x, 4) == [2.0] * 4
    with refused(Status.GRAPH_EXEC_UPDATE_FAILURE):
        driver.exec_set_params(run, node, ChildGraphNodeParams(children[2]))
    driver.exec_launch(run, rig.stream)
    assert rig.values(x, 4) == [2.0] * 4


# --- the whole graph


def test_a_whole_graph_at_once(chain: Chain) -> None:
    other, nodes = chain.build(5.0, 7.0, "updated")
    outcome = chain.driver.exec_update(chain.run, other)
    assert outcome.verdict == UpdateVerdict.SUCCESS
    assert outcome.node is None
    assert chain.result() == [35.0] * 4
    assert chain.seen == ["updated"]
    # nodes are still named by the graph that it was made from
    params = chain.rig.params("fill", chain.x, 1.0, 4)
    chain.driver.exec_set_params(chain.run, chain.nodes[0], params)
    with refused(Status.INVALID_VALUE):
        chain.driver.exec_set_params(chain.run, nodes[0], params)
    assert chain.result() == [7.0] * 4


def test_an_update_by_the_same_graph_after_edits(chain: Chain) -> None:
    chain.driver.node_set_params(chain.nodes[1], chain.rig.params("scale", chain.x, 50.0, 4))
    assert chain.result() == [6.0] * 4
    assert chain.driver.exec_update(chain.run, chain.graph).verdict == UpdateVerdict.SUCCESS
    assert chain.result() == [100.0] * 4


def _more(chain: Chain, graph: GraphHandle, nodes: list[NodeHandle]) -> None:
    chain.rig.add(graph, [nodes[3]], EmptyNodeParams())


def _fewer(chain: Chain, graph: GraphHandle, nodes: list[NodeHandle]) -> None:
    chain.driver.graph_remove_node(nodes[3])


def _rewired(chain: Chain, graph: GraphHandle, nodes: list[NodeHandle]) -> None:
    chain.driver.graph_remove_node(nodes[3])
    chain.rig.add(graph, [nodes[1]], HostNodeParams(lambda: None))


def _unwired(chain: Chain, graph: GraphHandle, nodes: list[NodeHandle]) -> None:
    chain.driver.graph_remove_node(nodes[3])
    chain.rig.add(graph, (), HostNodeParams(lambda: None))


@pytest.mark.parametrize("change", [_more, _fewer, _rewired, _unwired])
def test_a_topology_that_differs_is_refused(
    chain: Chain, change: Callable[[Chain, GraphHandle, list[NodeHandle]], None]
) -> None:
    other, nodes = chain.build(9.0, 9.0)
    change(chain, other, nodes)
    outcome = chain.driver.exec_update(chain.run, other)
    assert outcome.verdict == UpdateVerdict.TOPOLOGY_CHANGED
    if outcome.node is not None:
        assert outcome.node in chain.driver.graph_nodes(other)
    assert chain.result() == [6.0] * 4


def test_another_kind_of_node_is_refused_and_named(rig: Rig) -> None:
    driver, x = rig.driver, rig.zeros(4)

    def build(second: bool) -> tuple[GraphHandle, NodeHandle]:
        graph = rig.new_graph()
        first = rig.add(graph, (), "fill", x, 1.0, 4)
        params = rig.params("scale", x, 2.0, 4) if second else words(x, 0, 4)
        return graph, rig.add(graph, [first], params)

    graph, _ = build(True)
    other, culprit = build(False)
    run = rig.instantiate(graph)
    outcome = driver.exec_update(run, other)
    assert outcome.verdict == UpdateVerdict.NODE_TYPE_CHANGED
    assert outcome.node == culprit
    driver.exec_launch(run, rig.stream)
    assert rig.values(x, 4) == [2.0] * 4


def test_a_copy_of_other_dimensions_is_refused(rig: Rig) -> None:
    driver, x, y = rig.driver, rig.zeros(16), rig.zeros(16)
    graph, other = rig.new_graph(), rig.new_graph()
    rig.add(graph, (), copy_of(y, x, 16))
    deep = MemcpyNodeParams(y, x, 8, height=2, dst_pitch=16, src_pitch=16)
    culprit = rig.add(other, (), deep)
    run = rig.instantiate(graph)
    outcome = driver.exec_update(run, other)
    assert outcome.verdict == UpdateVerdict.PARAMETERS_CHANGED
    assert outcome.node == culprit


def test_an_update_reaches_into_children(rig: Rig) -> None:
    driver, x = rig.driver, rig.zeros(4)

    def build(value: float, extra: bool = False) -> GraphHandle:
        child, graph = driver.graph_create(), driver.graph_create()
        rig.add(child, (), "fill", x, value, 4)
        if extra:
            rig.add(child, (), EmptyNodeParams())
        rig.add(graph, (), ChildGraphNodeParams(child))
        driver.graph_destroy(child)
        return graph

    run = rig.instantiate(build(1.0))
    assert driver.exec_update(run, build(2.0)).verdict == UpdateVerdict.SUCCESS
    driver.exec_launch(run, rig.stream)
    assert rig.values(x, 4) == [2.0] * 4
    assert driver.exec_update(run, build(3.0, extra=True)).verdict != UpdateVerdict.SUCCESS
    driver.exec_launch(run, rig.stream)
    assert rig.values(x, 4) == [2.0] * 4


def _in_clusters(rig: Rig, out: int, cluster: int | None) -> KernelNodeParams:
    config = LaunchConfig(8, 32, cluster=cluster)
    return replace(rig.params("cluster_size", out), config=config)


def _cluster_seen(rig: Rig, run: ExecHandle, out: int) -> int:
    rig.driver.memset(out, 0, 4, 1, rig.stream)
    rig.driver.exec_launch(run, rig.stream)
    return int(rig.values(out, 1, "u4")[0])


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 8), (None, 2), (2, None)])
def test_an_update_keeps_the_cluster_size(rig: Rig, before: int | None, after: int | None) -> None:
    """`GraphExec.update` must compare it: the driver does not say so.

    libcuda takes the new size until the first launch, unless it is the default (580.159).
    """
    driver, out = rig.driver, rig.zeros(1, "u4")
    if not driver.capabilities.clusters:
        pytest.skip("no device with clusters")
    graph, other = rig.new_graph(), rig.new_graph()
    rig.add(graph, (), _in_clusters(rig, out, before))
    rig.add(other, (), _in_clusters(rig, out, after))
    run = rig.instantiate(graph)
    assert _cluster_seen(rig, run, out) == (before or 1)
    assert driver.exec_update(run, other).verdict == UpdateVerdict.SUCCESS
    assert _cluster_seen(rig, run, out) == (before or 1)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (None, 2), (2, None)])
def test_one_node_keeps_its_cluster_size(rig: Rig, before: int | None, after: int | None) -> None:
    driver, out, graph = rig.driver, rig.zeros(1, "u4"), rig.new_graph()
    if not driver.capabilities.clusters:
        pytest.skip("no device with clusters")
    node = rig.add(graph, (), _in_clusters(rig, out, before))
    run = rig.instantiate(graph)
    with refused(Status.NOT_SUPPORTED):
        driver.exec_set_params(run, node, _in_clusters(rig, out, after))
    driver.exec_set_params(run, node, _in_clusters(rig, out, before))
    assert _cluster_seen(rig, run, out) == (before or 1)


def test_updating_with_nodes_that_are_gone(chain: Chain) -> None:
    other, nodes = chain.build()
    chain.driver.graph_destroy(other)
    with pytest.raises(DriverError):
        chain.driver.exec_set_params(chain.run, chain.nodes[2], ChildGraphNodeParams(chain.graph))
    assert len(nodes) == 4
    assert chain.result() == [6.0] * 4
