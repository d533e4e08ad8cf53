"""What a library put into a capture, as operations of our own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import MemsetNodeParams
from ostinato.errors import GraphError
from ostinato.modules import Kernel


@ost.host_kernel("x: *const f32, y: *f32, n: u32")
def add(_: Any, x: Any, y: Any, n: int) -> None:
    y[:n] += x[:n]


@pytest.fixture
def stream(host_device: Device) -> ost.Stream:
    return host_device.create_stream()


def lifted(device: Device, stream: ost.Stream, x: ost.Buffer, y: ost.Buffer) -> Any:
    """y = 0, y += x, y += x: as a library would put it on a stream."""
    kernel = device.modules.get_or_compile(add, "add")
    with ost.capture(stream) as under_way:
        ost.fill(stream, y, 0)
        for _ in range(2):
            ost.launch(stream, kernel, ost.LaunchConfig(1, 1), x, y, x.size)
    with under_way.graph as graph:
        return ost.lift(graph, name="twice", reads=[x.range], writes=[y.range], keep=[kernel])


def test_lifted_work_runs_in_every_way(host_device: Device, stream: ost.Stream) -> None:
    x = host_device.array(np.arange(5, dtype=np.float32))
    y = host_device.array(np.ones(5, np.float32))
    operations = lifted(host_device, stream, x, y)
    assert [one.name for one in operations] == ["twice"] * 3

    def submit() -> None:
        for one in operations:
            stream.submit(one)

    def found() -> list[float]:
        values = y.to_numpy(stream).tolist()
        ost.fill(stream, y, -1)
        return values

    submit()
    assert found() == [0, 2, 4, 6, 8]
    with ost.capture(stream) as under_way:
        submit()
    under_way.graph.instantiate().launch(stream)
    assert found() == [0, 2, 4, 6, 8]
    with ost.record(stream) as recording:
        submit()
    assert found() == [0, 2, 4, 6, 8]
    graph = recording.build()
    assert len(graph.edges()) == 2  # in order, by what they read and write
    graph.instantiate().launch(stream)
    assert found() == [0, 2, 4, 6, 8]


def test_what_it_touches_is_as_given_and_what_it_keeps_besides(
    host_device: Device, stream: ost.Stream
) -> None:
    x, y = host_device.zeros(4, np.float32), host_device.zeros(4, np.float32)
    for one in lifted(host_device, stream, x, y):
        assert one.reads == (x.range,)
        assert one.writes == (y.range,)
        kernel, *rest = one.keep
        assert isinstance(kernel, Kernel)  # which was given
        assert {owner for owner in rest if isinstance(owner, ost.Buffer)} == {x, y}


@pytest.mark.parametrize("how", ["given with a node", "copy of an adopted graph"])
def test_what_no_node_names_is_kept_too(host_device: Device, how: str) -> None:
    class Owner:
        """Whatever holds what an adopted graph points at; or another's memory."""

    owner, y = Owner(), host_device.zeros(4, np.float32)
    graph = ost.Graph.create(host_device)
    if how == "given with a node":
        graph.add(MemsetNodeParams(y.address, 0, 4, 4), keep=(owner,))
    else:
        graph.add_fill(y, 0)
        graph = ost.Graph.adopt(host_device, graph.handle, owner=(graph, owner)).clone()
    (operation,) = ost.lift(graph, name="fill")
    gone = weakref.ref(owner)
    del graph, owner
    gc.collect()
    assert gone() is not None
    del operation
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ([], "no chain"),
        ([[], []], "2 nodes with 0 edges"),
        ([[], [0], [0]], "no chain"),
        ([[], [], [0, 1]], "no chain"),
    ],
    ids=["empty", "apart", "forked", "joined"],
)
def test_what_is_no_chain_of_launches_is_refused(
    host_device: Device, after: list[list[int]], why: str
) -> None:
    """`after`: the fills that each fill waits for."""
    y, graph, nodes = host_device.zeros(4, np.float32), ost.Graph.create(host_device), []
    for places in after:
        nodes.append(graph.add_fill(y, 0, after=[nodes[place] for place in places]))
    with pytest.raises(GraphError, match=why):
        ost.lift(graph, name="work")


def test_what_is_no_launch_is_refused(host_device: Device) -> None:
    other = ost.Graph.create(host_device)
    other.add_call(lambda: None)
    with pytest.raises(GraphError, match="a host node"):
        ost.lift(other, name="other")
