"""A kernel in the place of a node: the same edges, and no half-replaced node."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import EdgeData, EdgeType
from ostinato.errors import GraphError, InputError
from ostinato.testing import FaultyDriver
from tests.sources import config, kernel, preload

N = 300


def pairs(graph: ost.Graph) -> set[tuple[str, str]]:
    """The edges, each node by what it does."""
    names = {node.handle: f"{node.name} {node.kind.name}" for node in graph.nodes}
    return {(names[edge.source], names[edge.target]) for edge in graph.edges}


def test_a_fill_becomes_a_kernel_between_the_same_neighbours(device: Device) -> None:
    stream = device.create_stream()
    x, y = device.zeros(N, "f4"), device.array(np.full(N, 3, "f4"))
    graph = ost.Graph.create(device)
    first = graph.add_kernel(kernel(device, "fill"), config(N), x, 1.0, N)
    fill = graph.add_memset(x, 0, 4, after=[first])
    added = graph.add_kernel(kernel(device, "add"), config(N), x, y, x, N, after=[fill])
    both = graph.add_kernel(kernel(device, "scale"), config(N), x, N, after=[fill, added])
    before, old = pairs(graph), graph.instantiate()
    new = graph.replace(fill, kernel(device, "fill"), config(N), x, 5.0, N)
    assert new == graph.nodes[new.index] and new.kernel.config == config(N)
    assert [node.kind for node in graph.nodes] == [ost.NodeKind.KERNEL] * 4 and len(graph) == 4
    assert pairs(graph) == {
        (a.replace("memset MEMSET", "fill KERNEL"), b.replace("memset MEMSET", "fill KERNEL"))
        for a, b in before
    }
    run = graph.instantiate()
    run.launch(stream)
    assert (x.to_numpy(stream) == 16).all()  # 2 * (5 + 3)
    old.launch(stream)  # as it was made
    assert (x.to_numpy(stream) == 6).all()
    run.patch(new, "value", 7.0)
    run.launch(stream)
    assert (x.to_numpy(stream) == 20).all()
    assert both.handle in {node.handle for node in graph.nodes}


def test_edges_keep_their_data(device: Device) -> None:
    x = device.zeros(N, "f4")
    early = EdgeData(from_port=1, type=EdgeType.PROGRAMMATIC)
    graph = ost.Graph.create(device)
    scaled = [ost.prepare(kernel(device, "scale"), config(N), x, N)] * 3
    nodes = []
    for one in scaled:
        nodes.append(
            graph.add(
                one.params, nodes[-1:], edge_data=[early] * len(nodes[-1:]) or None, operation=one
            )
        )
    graph.replace(nodes[1], kernel(device, "halve"), config(N), x, N)
    assert [edge.data for edge in graph.edges] == [early, early]


def test_only_nodes_of_the_graph_itself(device: Device) -> None:
    x = device.zeros(N, "f4")
    inner, graph = ost.Graph.create(device), ost.Graph.create(device)
    inner.add_memset(x, 0)
    fill = graph.add_memset(x, 1)
    child = graph.add_child(inner, after=[fill])
    scale = kernel(device, "scale")
    for node in (inner.nodes[0], graph.node(child.index).children[0]):
        with pytest.raises(InputError, match="no node of this graph itself"):
            graph.replace(node, scale, config(N), x, N)
    with pytest.raises(InputError):
        graph.replace(fill, scale, config(N), x)
    graph.replace(fill, scale, config(N), x, N)
    with pytest.raises(InputError, match="no node of this graph itself"):
        graph.replace(fill, scale, config(N), x, N)  # it is gone
    assert [node.kind.name for node in graph.nodes] == ["CHILD_GRAPH", "KERNEL"]


def test_a_graph_that_allocates_is_left_alone(device: Device) -> None:
    x = device.zeros(N, "f4")
    graph = ost.Graph.create(device)
    fill = graph.add_memset(x, 0)
    graph.add_free(graph.add_alloc(64, after=[fill]).alloc.address, after=[graph.node(1)])
    before = [(node.kind, node.handle) for node in graph.nodes], graph.edges
    with pytest.raises(GraphError, match="alloc or free"):
        graph.replace(fill, kernel(device, "scale"), config(N), x, N)
    assert before == ([(node.kind, node.handle) for node in graph.nodes], graph.edges)


@pytest.mark.parametrize("seam", ["graph_add_node", "graph_add_edges", "graph_remove_node"])
def test_a_fault_leaves_the_graph_as_it_was(host_device: Device, seam: str) -> None:
    faults = FaultyDriver(host_device.driver)
    device = preload(Device(faults))
    x = device.zeros(N, "f4")
    graph = ost.Graph.create(device)
    fill = graph.add_memset(x, 0)
    graph.add_kernel(kernel(device, "scale"), config(N), x, N, after=[fill])
    before = [(node.kind, node.handle) for node in graph.nodes], graph.edges
    faults.fail(seam, at=1)
    with pytest.raises(GraphError):
        graph.replace(fill, kernel(device, "fill"), config(N), x, 1.0, N)
    assert before == ([(node.kind, node.handle) for node in graph.nodes], graph.edges)
    faults.clear()
    graph.replace(fill, kernel(device, "fill"), config(N), x, 1.0, N)
    stream = device.create_stream()
    graph.instantiate().launch(stream)
    assert (x.to_numpy(stream) == 2).all()


@pytest.mark.parametrize("seed", range(4))
def test_random_graphs_keep_their_order(device: Device, seed: int) -> None:
    """Fills of one array, each a kernel now or not: what waits for what is the same."""
    rng = np.random.default_rng(seed)
    x, count = device.zeros(N, "f4"), 12
    graph = ost.Graph.create(device)
    nodes: list[ost.Node] = []
    for i in range(count):
        after = [node for node in nodes if rng.random() < 0.3]
        nodes.append(graph.add_memset(x, i, 1, after=after))
    place = {node.handle: i for i, node in enumerate(nodes)}
    before = sorted((place[e.source], place[e.target]) for e in graph.edges)
    for i in rng.permutation(count)[: count - 2].tolist():
        new = graph.replace(nodes[i], kernel(device, "fill"), config(N), x, float(i), N)
        place[new.handle] = i
    assert sorted((place[e.source], place[e.target]) for e in graph.edges) == before
    assert sorted(place[node.handle] for node in graph.nodes) == [*range(count)]
    values = itertools.count()
    assert all(node.index == next(values) for node in graph.nodes)
