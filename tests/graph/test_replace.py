"""An operation in the place of a node: the same edges, and no half-replaced node."""

from __future__ import annotations

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import EdgeData, EdgeType
from ostinato.errors import GraphError, InputError
from ostinato.testing import FaultyDriver
from tests.interrupted import every, interrupt, lines
from tests.sources import config, kernel, preload

N = 300


def operation(device: Device, name: str, *args: object) -> ost.Operation:
    return ost.prepare(kernel(device, name), config(N), *args, N)


def test_a_fill_becomes_a_kernel_between_the_same_neighbours(device: Device) -> None:
    stream = device.create_stream()
    x, y = device.zeros(N, "f4"), device.array(np.full(N, 3, "f4"))
    graph = ost.Graph.create(device)
    first = graph.add_operation(operation(device, "fill", x, 1.0))
    fill = graph.add_fill(x, 0, after=[first])
    added = graph.add_operation(operation(device, "add", x, y, x), after=[fill])
    last = graph.add_operation(operation(device, "scale", x), after=[fill, added])
    new = graph.replace(fill, operation(device, "fill", x, 5.0))
    assert new == graph.nodes()[3] and new.kernel.config == config(N)
    assert [node.kind for node in graph.nodes()] == [ost.NodeKind.KERNEL] * 4 and len(graph) == 4
    assert [node.index for node in graph.nodes()] == [0, 1, 2, 3]
    assert {(edge.source, edge.target) for edge in graph.edges()} == {
        (first.handle, new.handle),
        (new.handle, added.handle),
        (new.handle, last.handle),
        (added.handle, last.handle),
    }
    run = graph.instantiate()
    run.launch(stream)
    assert (x.to_numpy(stream) == 16).all()  # 2 * (5 + 3)
    run.set(new, "value", 7.0)
    run.launch(stream)
    assert (x.to_numpy(stream) == 20).all()


def test_edges_keep_their_data(device: Device) -> None:
    x, nodes = device.zeros(N, "f4"), []
    early = EdgeData(from_port=1, type=EdgeType.PROGRAMMATIC)
    graph, scale = ost.Graph.create(device), operation(device, "scale", x)
    for _ in range(3):
        data = [early] * len(nodes[-1:])
        nodes.append(
            graph.add(scale.params, after=nodes[-1:], edge_data=data or None, operation=scale)
        )
    graph.replace(nodes[1], operation(device, "halve", x))
    assert [edge.data for edge in graph.edges()] == [early, early]


def test_only_nodes_of_the_graph_itself(device: Device) -> None:
    x = device.zeros(N, "f4")
    inner, graph = ost.Graph.create(device), ost.Graph.create(device)
    inner.add_fill(x, 0)
    fill = graph.add_fill(x, 1)
    child = graph.add_child(inner, after=[fill])
    scale = operation(device, "scale", x)
    for node in (inner.nodes()[0], graph.node(child.index).children[0]):
        with pytest.raises(InputError, match="no node of this graph itself"):
            graph.replace(node, scale)
    with pytest.raises(InputError, match="given twice"):
        graph.replace_all([(fill, scale), (fill, scale)])
    assert [node.kind.name for node in graph.nodes()] == ["MEMSET", "CHILD_GRAPH"]
    graph.replace(fill, scale)
    with pytest.raises(InputError, match="no node of this graph itself"):
        graph.replace(fill, scale)  # it is gone
    assert [node.kind.name for node in graph.nodes()] == ["CHILD_GRAPH", "KERNEL"]


def test_graphs_whose_handles_are_in_use_are_left_alone(device: Device) -> None:
    stream, x = device.create_stream(), device.zeros(N, "f4")
    scale = operation(device, "scale", x)

    def refused(graph: ost.Graph, node: ost.Node, why: str) -> None:
        before = [(node.kind, node.handle) for node in graph.nodes()], graph.edges()
        with pytest.raises(GraphError, match=why):
            graph.replace(node, scale)
        assert before == ([(node.kind, node.handle) for node in graph.nodes()], graph.edges())

    graph = ost.Graph.create(device)
    fill = graph.add_fill(x, 0)
    with ost.capture(stream, into=graph):
        ost.fill(stream, x, 1)
        refused(graph, fill, "captured into the graph")
    graph.clone().instantiate().close()
    graph.replace(fill, scale)
    loop = graph.add_conditional("if", graph.condition(1))
    refused(graph, loop.node, "conditional")
    refused(loop.bodies[0], loop.bodies[0].add_fill(x, 0), "executable")
    graph.instantiate().close()
    refused(graph, graph.nodes()[0], "executable")
    allocating = ost.Graph.create(device)
    fill = allocating.add_fill(x, 0)
    allocating.add_free(
        allocating.add_alloc(64, after=[fill]).alloc.address, after=[allocating.node(1)]
    )
    refused(allocating, fill, "alloc or free")


@pytest.mark.parametrize(
    ("call", "at", "times", "lost"),
    [
        ("graph_add_node", 2, 1, False),
        ("graph_add_edges", 1, 1, False),
        ("graph_remove_node", 1, 1, False),
        ("graph_remove_node", 1, 2, True),  # of an old one, and of a new one
        ("graph_remove_node", 2, 1, True),
    ],
)
def test_all_nodes_are_replaced_or_none(
    host_device: Device, call: str, at: int, times: int, lost: bool
) -> None:
    """A graph with an old node beside its new one is lost."""
    faults = FaultyDriver(host_device.driver)
    device = preload(Device(faults))
    x = device.zeros(N, "f4")
    graph = ost.Graph.create(device)
    first = graph.add_fill(x, 0)
    second = graph.add_fill(x, 0, after=[first])
    one, nodes, edges = operation(device, "fill", x, 1.0), graph.nodes(), graph.edges()
    faults.fail(call, at=at, times=times)
    with pytest.raises(GraphError, match="failed"):
        graph.replace_all([(first, one), (second, one)])
    if lost:
        with pytest.raises(GraphError, match="make the graph again"):
            graph.instantiate()
    else:
        assert (graph.nodes(), graph.edges()) == (nodes, edges)
        graph.instantiate().close()


def test_a_replacement_that_is_interrupted_is_made_or_not(host_device: Device) -> None:
    stream, x = host_device.create_stream(), host_device.zeros(N, "f4")
    one = operation(host_device, "fill", x, 1.0)

    def built() -> tuple[ost.Graph, ost.Node]:
        graph = ost.Graph.create(host_device)
        fill = graph.add_fill(x, 0)
        graph.add_operation(operation(host_device, "scale", x), after=[fill])
        return graph, fill

    def work() -> None:
        graph.replace(fill, one)

    graph, fill = built()
    for at in every(lines(work), 1):
        graph, fill = built()
        where = interrupt(work, at)
        if graph.only_to_read:  # the driver was interrupted, which CUDA cannot be
            assert where is not None and "driver/host" in where
            continue
        assert len(graph) == 2 and len(graph.edges()) == 1, where
        made = fill.handle not in {node.handle for node in graph.nodes()}
        graph.instantiate().launch(stream)
        assert (x.to_numpy(stream) == 2 * made).all(), where


@pytest.mark.parametrize("at_once", [1, 4, 10])
@pytest.mark.parametrize("seed", range(2))
def test_random_graphs_keep_their_order(device: Device, seed: int, at_once: int) -> None:
    """Fills of one array, some of which become kernels: what waits for what is the same."""
    rng = np.random.default_rng(seed)
    x, count = device.zeros(N, "f4"), 12
    graph, nodes = ost.Graph.create(device), list[ost.Node]()
    for i in range(count):
        after = [node for node in nodes if rng.random() < 0.3]
        nodes.append(graph.add_fill(x, i, after=after))
    place = {node.handle: i for i, node in enumerate(nodes)}
    before = sorted((place[e.source], place[e.target]) for e in graph.edges())
    replaced = rng.permutation(count)[: count - 2].tolist()
    for which in [replaced[at : at + at_once] for at in range(0, len(replaced), at_once)]:
        pairs = [(nodes[i], operation(device, "fill", x, float(i))) for i in which]
        for i, node in zip(which, graph.replace_all(pairs), strict=True):
            assert node == graph.nodes()[node.index]
            place[node.handle] = i
    assert sorted((place[e.source], place[e.target]) for e in graph.edges()) == before
    assert sorted(place[node.handle] for node in graph.nodes()) == [*range(count)]
