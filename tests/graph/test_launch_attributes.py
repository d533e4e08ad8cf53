"""Launch attributes of an executable: a change that would silently keep the old ones is refused.

libcuda 580.159 answers SUCCESS to a whole update by a graph whose kernel has another cluster size,
and the kernel runs with the old one.  The host driver does the same.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import (
    ChildGraphNodeParams,
    FunctionHandle,
    KernelArguments,
    KernelNodeParams,
    UpdateVerdict,
)
from ostinato.driver.cuda.faults import FAULTS, Verdict
from ostinato.errors import UpdateRefusedError
from tests.emulator.stub import Stub, stub_device
from tests.sources import kernel

SIZES = [(2, 4), (4, 2), (2, 8), (None, 2), (2, None)]
"""Cluster sizes before and after."""


class Seen:
    """Graphs of a kernel that writes the size of its cluster."""

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.create_stream()
        self.kernel = kernel(device, "cluster_size")
        self.out = device.zeros(1, np.uint32)

    def operation(self, cluster: int | None = None, **options: object) -> ost.Operation:
        config = ost.LaunchConfig(8, 32, cluster=cluster, **options)  # type: ignore[arg-type]
        return ost.prepare(self.kernel, config, self.out)

    def plain(self, cluster: int | None = None, **options: object) -> ost.Graph:
        graph = ost.Graph.create(self.device)
        graph.add_operation(self.operation(cluster, **options))
        return graph

    def captured(self, cluster: int | None) -> ost.Graph:
        config = ost.LaunchConfig(8, 32, cluster=cluster)
        with ost.capture(self.stream) as capture:
            ost.launch(self.stream, self.kernel, config, self.out)
        return capture.graph

    def child(self, cluster: int | None) -> ost.Graph:
        graph = ost.Graph.create(self.device)
        first = graph.add_fill(self.out, 0)
        graph.add_child(self.plain(cluster), after=[first])
        return graph

    def body(self, cluster: int | None) -> ost.Graph:
        graph = ost.Graph.create(self.device)
        (body,) = graph.add_conditional("if", graph.condition(1)).bodies
        body.add_operation(self.operation(cluster))
        return graph

    def adopted(self, cluster: int | None) -> ost.Graph:
        """As another library's graph."""
        made = self.plain(cluster)
        return ost.Graph.adopt(self.device, made.handle, owner=made)

    def ran(self, run: ost.GraphExec) -> int:
        """The size of the cluster that a launch of the executable has."""
        ost.fill(self.stream, self.out, 0)
        run.launch(self.stream)
        return int(self.out.to_numpy(self.stream)[0])


@pytest.fixture
def seen(device: Device) -> Seen:
    if not device.capabilities.clusters:
        pytest.skip("no device with clusters")
    return Seen(device)


@pytest.mark.parametrize(("before", "after"), SIZES)
@pytest.mark.parametrize("make", ["plain", "captured", "child", "body", "adopted"])
def test_an_update_keeps_no_cluster_size_silently(
    seen: Seen, make: str, before: int | None, after: int | None
) -> None:
    made: Callable[[int | None], ost.Graph] = getattr(seen, make)
    run = made(before).instantiate()
    with pytest.raises(UpdateRefusedError, match=r"\(cluster_size\).* cluster ") as caught:
        run.update(made(after))
    assert caught.value.node_index == (1 if make == "child" else 0)
    for size in (before, after):
        assert (f"{size} × 1 × 1" if size else "no cluster") in str(caught.value)
    assert seen.ran(run) == (before or 1)
    run.update(made(before))
    assert seen.ran(run) == (before or 1)


@pytest.mark.parametrize("how", ["parameters", "config"])
@pytest.mark.parametrize(("before", "after"), SIZES)
def test_one_node_keeps_no_cluster_size_silently(
    seen: Seen, how: str, before: int | None, after: int | None
) -> None:
    run = seen.plain(before).instantiate()
    with pytest.raises(UpdateRefusedError, match=r"node 0 \(cluster_size\).* cluster "):
        if how == "parameters":
            run.set(0, seen.operation(after))
        else:
            run.set(0, config=ost.LaunchConfig(8, 32, cluster=after))
    assert seen.ran(run) == (before or 1)
    run.set(0, seen.operation(before))
    run.set(0, "out", seen.out)
    assert seen.ran(run) == (before or 1)


def test_another_child_graph_keeps_no_cluster_size_silently(seen: Seen) -> None:
    run = seen.child(2).instantiate()
    other = seen.plain(4)
    with pytest.raises(UpdateRefusedError, match=r"node 0 \(cluster_size\) inside node 1") as got:
        run.set(1, ChildGraphNodeParams(other.handle), keep=(other,))
    assert got.value.node_index == 1
    assert seen.ran(run) == 2
    same = seen.plain(2)
    run.set(1, ChildGraphNodeParams(same.handle), keep=(same,))
    assert seen.ran(run) == 2


def test_what_a_file_brings_keeps_no_cluster_size_silently(seen: Seen, tmp_path: Path) -> None:
    graphs = {}
    for size in (2, 4):
        path = tmp_path / f"{size}.graph"
        ost.graphfile.save(seen.captured(size), path, outputs={"out": seen.out}, check=False)
        graphs[size] = ost.graphfile.load(seen.device, path, buffers={"out": seen.out})
    run = graphs[2].instantiate()
    assert seen.ran(run) == 2
    for other in (graphs[4], seen.captured(4)):
        with pytest.raises(UpdateRefusedError, match="cluster"):
            run.update(other)
        assert seen.ran(run) == 2
    run.update(seen.captured(2))
    assert seen.ran(run) == 2


def test_a_kernel_stays_cooperative_or_not(seen: Seen) -> None:
    for cooperative in (True, False):
        run = seen.plain(cooperative=cooperative).instantiate()
        with pytest.raises(UpdateRefusedError, match=r"cooperative (True|False).*(True|False)"):
            run.update(seen.plain(cooperative=not cooperative))
        assert seen.ran(run) == 1


def test_a_kernel_keeps_its_priority(seen: Seen) -> None:
    low, high = (seen.plain(priority=priority) for priority in (0, -1))
    run = low.instantiate()
    with pytest.raises(UpdateRefusedError, match=r"priority 0.* -1"):
        run.update(high)
    run.update(seen.plain())


def test_edges_stay_programmatic_or_not(seen: Seen) -> None:
    def pair(programmatic: bool) -> ost.Graph:
        with ost.capture(seen.stream) as capture:
            for each in (False, programmatic):
                config = ost.LaunchConfig(8, 32, programmatic=each)
                ost.launch(seen.stream, seen.kernel, config, seen.out)
        return capture.graph

    for before in (True, False):
        run = pair(before).instantiate()
        with pytest.raises(UpdateRefusedError, match="programmatic"):
            run.update(pair(not before))
        run.update(pair(before))
        assert seen.ran(run) == 1


def chain(seen: Seen, sizes: list[int | None], order: list[int]) -> ost.Graph:
    """A chain of a kernel for each size, whose nodes are added in this order."""
    graph = ost.Graph.create(seen.device)
    added = {place: graph.add_operation(seen.operation(sizes[place])) for place in order}
    graph.add_edges([(added[i], added[i + 1]) for i in range(len(sizes) - 1)])
    return graph


def test_nodes_in_another_order_are_compared_along_the_edges(seen: Seen) -> None:
    """Whether the driver takes such a graph is its own affair."""
    run = chain(seen, [2, 4, 8], [0, 1, 2]).instantiate()
    same, other = chain(seen, [2, 4, 8], [2, 0, 1]), chain(seen, [8, 2, 4], [2, 0, 1])
    refusal = _update_refused(run, same)
    assert refusal == "" or "the same" in refusal  # by the driver, for the order
    assert "cluster" in _update_refused(run, other)
    assert seen.ran(run) == 8


def test_nodes_that_cannot_be_told_apart_must_be_alike(seen: Seen) -> None:
    """Two nodes without edges: which gets which is not known if others come in another order."""

    def graph(order: list[int]) -> ost.Graph:
        made = ost.Graph.create(seen.device)
        fork = made.add_operation(seen.operation(1))
        sizes = [2, 4]
        for place in order:
            made.add_operation(seen.operation(sizes[place]), after=[fork])
        last = made.add_fill(seen.out, 0)
        made.add_edges([(last, fork)])
        return made

    run = graph([0, 1]).instantiate()
    run.update(graph([0, 1]))
    with pytest.raises(UpdateRefusedError, match="cluster"):
        run.update(graph([1, 0]))


def _update_refused(run: ost.GraphExec, graph: ost.Graph) -> str:
    """The words of the refusal, or none."""
    try:
        run.update(graph)
    except UpdateRefusedError as error:
        return str(error)
    return ""


# --- attributes that only CUDA has, on a libcuda that holds graphs and runs nothing


class Foreign:
    """Graphs of one kernel as another library makes them, on the stub."""

    def __init__(self, stub: Stub) -> None:
        self.stub, self.device = stub, stub.device
        self.params = KernelNodeParams(
            stub.kernel.function,
            ost.LaunchConfig(1, 32),
            KernelArguments(bytes(28), stub.kernel.slots),
        )

    def graph(self, attributes: dict[int, bytes], *, function: int = 0) -> ost.Graph:
        driver = self.device.driver
        handle = driver.graph_create()
        params = replace(self.params, function=FunctionHandle(function or self.params.function))
        node = driver.graph_add_node(handle, (), params)
        for which, value in attributes.items():
            self.stub.set_attribute(node, which, value)
        return ost.Graph.adopt(self.device, handle, owner=None)

    def ours(self, *, function: int = 0) -> ost.Graph:
        graph = ost.Graph.create(self.device)
        params = replace(self.params, function=FunctionHandle(function or self.params.function))
        graph.add(params)
        return graph


@pytest.fixture
def foreign(library: Path, launcher: str) -> Iterator[Foreign]:
    with stub_device(library) as stub:
        yield Foreign(stub)


HIDDEN = {
    "access policy window of 4096 bytes": (1, struct.pack("=QQ", 0x1000, 4096)),
    "cluster scheduling: load balancing": (5, struct.pack("=I", 2)),
    "memory synchronisation domains 2 and 3": (9, b"\2\3"),
    "memory synchronisation domain: remote": (10, struct.pack("=I", 1)),
    "preferred cluster 4 × 1 × 1": (11, struct.pack("=3I", 4, 1, 1)),
    "updatable from the device": (13, struct.pack("=I", 1)),
    "shared memory carveout 50 %": (14, struct.pack("=I", 50)),
}


@pytest.mark.parametrize("words", HIDDEN)
def test_attributes_without_a_field_are_compared_too(foreign: Foreign, words: str) -> None:
    which, value = HIDDEN[words]
    graphs = [foreign.graph({}), foreign.graph({which: value}), foreign.ours()]
    for before, after in ((0, 1), (1, 0), (1, 2), (2, 1)):
        run = graphs[before].instantiate()
        with pytest.raises(UpdateRefusedError, match=rf"node 0 \(blend\): .*{words}.* cannot be"):
            run.update(graphs[after])
        run.update(graphs[before])
        if before == 1:
            with pytest.raises(UpdateRefusedError, match=words):
                run.set(0, foreign.params)
            run.set(0, replace(run.nodes()[0].kernel, arguments=foreign.params.arguments))
    graphs[0].instantiate().update(graphs[2])


def test_what_is_kept_is_what_the_executable_was_made_with(foreign: Foreign) -> None:
    """And not what the definition has by now."""
    four, two = (struct.pack("=3I", size, 1, 1) for size in (4, 2))
    made = foreign.graph({4: two})
    run = made.instantiate()
    foreign.stub.set_attribute(made.nodes()[0].handle, 4, four)
    config = ost.LaunchConfig(8, 32, cluster=4)
    with pytest.raises(UpdateRefusedError, match="a cluster of 2 × 1 × 1; a cluster of 4"):
        run.set(0, config=config)
    with pytest.raises(UpdateRefusedError, match="a cluster of 2 × 1 × 1; a cluster of 4"):
        run.update(made)
    run.update(foreign.graph({4: two}))


def test_a_kernel_with_a_secret_is_replaced_by_itself_only(library: Path, launcher: str) -> None:
    """From compute capability 10 on a kernel may have a preferred cluster size, which no driver
    tells (sgl-project/sglang#37657: a hang).  A kernel that this library launched has none."""
    for capability, told in (((9, 0), True), ((10, 0), False)):
        with stub_device(library, capability) as stub:
            foreign = Foreign(stub)
            run = foreign.graph({}).instantiate()
            run.update(foreign.graph({}))
            if told:
                run.update(foreign.graph({}, function=0x78))
            else:
                with pytest.raises(UpdateRefusedError, match="preferred cluster size"):
                    run.update(foreign.graph({}, function=0x78))
                with pytest.raises(UpdateRefusedError, match="preferred cluster size"):
                    run.set(0, replace(foreign.params, function=FunctionHandle(0x78)))
                run.set(0, foreign.params)
                with pytest.raises(UpdateRefusedError, match="preferred cluster size"):
                    foreign.ours().instantiate().update(foreign.graph({}))
            foreign.ours().instantiate().update(foreign.ours(function=0x78))


def probed(device: Device) -> str:
    """The detail of the probe, which must find the fault."""
    (fault,) = (fault for fault in FAULTS if fault.name == "update-keeps-attributes")
    found = fault.probe(device.driver)  # type: ignore[arg-type]
    assert found.verdict is Verdict.PRESENT
    return found.detail


def test_what_this_driver_keeps_is_found(library: Path) -> None:
    """The stub keeps the cluster size, and refuses nothing."""
    with stub_device(library) as stub:
        assert probed(stub.device).count("SUCCESS, and the kernel has the old value") == 2


@pytest.mark.gpu
def test_what_the_gpus_driver_keeps(cuda_device: Device) -> None:
    """Another answer of a newer driver means that the library refuses what it need not."""
    driver, seen = cuda_device.driver, Seen(cuda_device)
    made = seen.plain(2)
    assert driver.node_params(made.nodes()[0].handle).config.cluster == (2, 1, 1)  # type: ignore[union-attr]
    assert probed(cuda_device).count("SUCCESS, and the kernel has the old value") == 2
    # Documented for cuGraphExecUpdate, and what the host driver does.
    run = driver.graph_instantiate(seen.plain().handle)
    outcome = driver.exec_update(run, seen.plain(cooperative=True).handle)
    driver.exec_destroy(run)
    assert outcome.verdict is not UpdateVerdict.SUCCESS
