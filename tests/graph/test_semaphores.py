"""Graphs with nodes for semaphores of other APIs: read, shown, compared, launched, never saved.

Such a semaphore comes from Vulkan or Direct3D, which a machine for tests does not have.  So the
driver's reader is made to take the graph's empty nodes for them; what libcuda says of real ones is
in tests/test_cuda_calls.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import NodeKind, OpaqueNodeParams
from ostinato.errors import GraphFileError, NodeKindError
from tests.sources import config, kernel

KINDS = (NodeKind.SEMAPHORE_WAIT, NodeKind.SEMAPHORE_SIGNAL)
OPAQUE = OpaqueNodeParams("an external semaphore; its parameters are another API's")


class _Frozen:
    """A graph as the driver gave it, but for its empty nodes."""

    def __init__(self, frozen: Any, kind: NodeKind) -> None:
        self._frozen = frozen
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._frozen, name)

    def kind(self, index: int) -> NodeKind:
        found: NodeKind = self._frozen.kind(index)
        return self._kind if found is NodeKind.EMPTY else found

    def params(self, index: int) -> Any:
        found = self._frozen.kind(index)
        return OPAQUE if found is NodeKind.EMPTY else self._frozen.params(index)


class Reader:
    """How the driver reads: empty nodes are of `kind`, in the graphs `others` of the other one."""

    def __init__(self, device: Device, kind: NodeKind, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kind = kind
        (self.other,) = set(KINDS) - {kind}
        self.others: set[int] = set()
        driver = device.driver
        freeze, kind_of, params = driver.graph_freeze, driver.node_kind, driver.node_params

        def graph_freeze(graph: int, **options: Any) -> _Frozen:
            found = self.other if graph in self.others else self.kind
            return _Frozen(freeze(graph, **options), found)

        def node_kind(node: Any) -> NodeKind:
            found = kind_of(node)
            return kind if found is NodeKind.EMPTY else found

        def node_params(node: Any) -> Any:
            return OPAQUE if kind_of(node) is NodeKind.EMPTY else params(node)

        monkeypatch.setattr(driver, "graph_freeze", graph_freeze)
        monkeypatch.setattr(driver, "node_kind", node_kind)
        monkeypatch.setattr(driver, "node_params", node_params)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name.lower())
def reader(
    request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch
) -> Reader:
    return Reader(device, request.param, monkeypatch)


@pytest.fixture
def kind(reader: Reader) -> NodeKind:
    return reader.kind


def graph_of(device: Device, count: Any) -> ost.Graph:
    """A semaphore, a kernel behind it, and a child graph of the same."""
    inner, graph = (ost.Graph.create(device) for _ in range(2))
    increment = kernel(device, "increment")
    for made in (inner, graph):
        semaphore = made.add_empty()
        made.add_kernel(increment, config(1), count, 1, after=[semaphore])
    graph.add_child(inner, after=[graph.nodes()[1]])
    return graph


def test_a_semaphore_is_compared(device: Device, reader: Reader) -> None:
    count = device.zeros(1, np.int32)
    graph, same, changed = (graph_of(device, count) for _ in range(3))
    assert not graph.diff(same) and graph.digest() == same.digest()
    reader.others.add(changed.handle)
    assert changed.nodes()[0].kind is reader.other
    assert changed.digest() != graph.digest()
    text = str(graph.diff(changed))
    for sign, kind in (("-", reader.kind), ("+", reader.other)):
        assert f"{sign} node 0: {kind.name.lower().replace('_', ' ')} ({OPAQUE.why})" in text


def test_a_graph_with_a_semaphore_can_be_changed_and_launched(
    device: Device, kind: NodeKind
) -> None:
    count, other = (device.zeros(1, np.int32) for _ in range(2))
    stream, run = device.create_stream(), graph_of(device, count).instantiate()
    run.launch(stream)
    run.set(1, 1, 10)
    run.launch(stream)
    run.rebind({count: other})
    run.launch(stream)
    assert (count.to_numpy(stream)[0], other.to_numpy(stream)[0]) == (2 + 11, 11)
    with pytest.raises(NodeKindError, match=rf"node 0 \({kind.name.lower()}\).*{kind.name}"):
        run.set(0, 0, 1)


def test_a_semaphore_is_in_no_file(device: Device, kind: NodeKind, tmp_path: Path) -> None:
    """Nor is one that lies deeper; the error names it."""
    count, word = device.zeros(1, np.int32), kind.name.lower()
    graph = graph_of(device, count)
    with pytest.raises(GraphFileError, match=rf"node 0 \({word}\) cannot be saved.*semaphore"):
        ost.graphfile.save(graph, tmp_path / "graph")
    outer = ost.Graph.create(device)
    outer.add_child(graph)
    with pytest.raises(GraphFileError, match=rf"node 0.* / node 0 \({word}\) cannot be saved"):
        ost.graphfile.save(outer, tmp_path / "graph")
    assert not [*tmp_path.iterdir()]
