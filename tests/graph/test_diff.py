"""Two graphs compared: one change is shown as that one change."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import EdgeData, EdgeType
from tests.sources import config, kernel, preload

N = 300


@pytest.fixture
def x(device: Device) -> ost.Buffer:
    return device.zeros(N, np.float32)


@dataclass(frozen=True)
class Step:
    """One launch of a chain: a kernel by name, how many elements, and a value for `fill`."""

    name: str = "scale"
    n: int = N
    value: float = 0.0


def chain(device: Device, x: ost.Buffer, steps: Sequence[Step]) -> ost.Graph:
    graph = ost.Graph.create(device)
    after: tuple[ost.Node, ...] = ()
    for step in steps:
        arguments: dict[str, tuple[object, ...]] = {
            "scale": (x, step.n),
            "fill": (x, step.value, step.n),
            "add": (x, x, x, step.n),
        }
        launch = config(N)
        node = graph.add_kernel(
            kernel(device, step.name), launch, *arguments[step.name], after=after
        )
        after = (node,)
    return graph


LAYERS = [Step("scale"), Step("fill", value=1.0), Step("add")] * 30


def test_a_graph_is_like_itself_and_its_clone(device: Device, x: ost.Buffer) -> None:
    graph = chain(device, x, LAYERS)
    for other in (graph, graph.clone(), chain(device, x, LAYERS)):
        found = graph.diff(other)
        assert found.empty and not found
        assert str(found) == "no difference"
        assert found.to_dict()["changed"] == []


def test_one_argument(device: Device, x: ost.Buffer) -> None:
    steps = [*LAYERS]
    steps[31] = Step("fill", value=2.5)
    found = chain(device, x, LAYERS).diff(chain(device, x, steps))
    assert found and not found.added and not found.removed and not found.edges
    (node,) = found.changed
    assert (node.before, node.after, node.name) == ("31", "31", "fill")
    (field,) = node.fields
    assert (field.field, field.before, field.after) == ("value", "1", "2.5")
    assert "~ node 31: kernel fill" in str(found)
    assert "value  1 → 2.5" in str(found)


def test_another_buffer_is_a_difference(device: Device, x: ost.Buffer) -> None:
    y = device.zeros(N, np.float32)
    found = chain(device, x, LAYERS[:3]).diff(chain(device, y, LAYERS[:3]))
    assert [[f.field for f in n.fields] for n in found.changed] == [
        ["x"],
        ["out"],
        ["a", "b", "out"],
    ]
    assert f"{x.address:#x}" in found.changed[0].fields[0].before


@pytest.mark.parametrize("at", [0, 1, 44, 45, 89, 90])
def test_an_inserted_node_is_one_addition(device: Device, x: ost.Buffer, at: int) -> None:
    steps = [*LAYERS[:at], Step("scale", n=7), *LAYERS[at:]]
    found = chain(device, x, LAYERS).diff(chain(device, x, steps))
    assert [n.after for n in found.added] == [str(at)]
    assert not found.removed and not found.changed
    # In a chain it takes one edge's place and brings two; at an end, only one.
    in_the_middle = 0 < at < len(LAYERS)
    assert len(found.edges_removed) == in_the_middle
    assert len(found.edges_added) == 1 + in_the_middle
    back = chain(device, x, steps).diff(chain(device, x, LAYERS))
    assert [n.before for n in back.removed] == [str(at)]
    assert not back.added and not back.changed


def test_an_insertion_among_launches_of_one_kernel(device: Device, x: ost.Buffer) -> None:
    steps = [Step("scale", n=n) for n in range(1, 20)]
    found = chain(device, x, steps).diff(chain(device, x, [Step("scale", n=N), *steps]))
    assert [n.after for n in found.added] == ["0"]
    assert not found.changed


def test_another_kernel_in_the_same_place(device: Device, x: ost.Buffer) -> None:
    a = chain(device, x, [Step(), Step("scale"), Step()])
    b = chain(device, x, [Step(), Step("add"), Step()])
    (node,) = a.diff(b).changed
    assert node.fields[0].field == "kernel"
    assert (node.fields[0].before, node.fields[0].after) == ("scale", "add")
    assert not a.diff(b).edges


def test_a_launch_size(device: Device, x: ost.Buffer) -> None:
    graphs = []
    for launch in (config(N), ost.LaunchConfig((3, 2), 128, shared=64)):
        graph = ost.Graph.create(device)
        graph.add_kernel(kernel(device, "scale"), launch, x, N)
        graphs.append(graph)
    (node,) = graphs[0].diff(graphs[1]).changed
    assert [str(f) for f in node.fields] == ["grid: 3 → 3×2", "shared: 0 → 64"]


def test_an_edge(device: Device, x: ost.Buffer) -> None:
    a, b = (chain(device, x, LAYERS[:5]) for _ in range(2))
    b.add_edges([(b.node(0), b.node(4))])
    found = a.diff(b)
    assert not found.nodes and not found.edges_removed
    assert [str(e) for e in found.edges_added] == ["+ edge 0 → 4"]


def test_an_edge_that_became_programmatic(host_device: Device) -> None:
    x = host_device.zeros(N, np.float32)
    operation = ost.prepare(kernel(host_device, "scale"), config(N), x, N)
    graphs = []
    for data in (EdgeData(), EdgeData(from_port=1, type=EdgeType.PROGRAMMATIC)):
        graph = ost.Graph.create(host_device)
        first = graph.add_operation(operation)
        graph.add(operation.params, after=(first,), edge_data=(data,), operation=operation)
        graphs.append(graph)
    found = graphs[0].diff(graphs[1])
    assert [str(e) for e in found.edges] == [
        "- edge 0 → 1",
        "+ edge 0 → 1 (programmatic, ports 1 → 0)",
    ]


def test_bodies_are_compared(host_device: Device) -> None:
    x = host_device.zeros(N, np.float32)

    def looped(n: int) -> ost.Graph:
        graph = ost.Graph.create(host_device)
        loop = graph.add_conditional("while", graph.condition(1))
        loop.bodies[0].add_kernel(kernel(host_device, "scale"), config(N), x, n)
        return graph

    assert not looped(N).diff(looped(N))
    (found,) = looped(N).diff(looped(7)).changed
    assert (found.before, found.after) == ("0.body.0", "0.body.0")
    assert [str(f) for f in found.fields] == [f"n: {N} → 7"]


def test_condition_handles_are_no_difference(host_device: Device) -> None:
    @ost.host_kernel("value: u32, again: cond")
    def decide(launch, value, again):
        launch.set_conditional(again, value)

    loaded = host_device.modules.get_or_compile(ost.Source(host=[decide], name="d"), "decide")

    def build(which: int) -> ost.Graph:
        graph = ost.Graph.create(host_device)
        conditions = [graph.condition(), graph.condition()]
        node = graph.add_kernel(loaded, ost.LaunchConfig(1, 1), 1, conditions[which])
        for condition in conditions:
            graph.add_conditional("if", condition, after=(node,))
        return graph

    assert not build(0).diff(build(0)), "other handles, the same condition"
    (node,) = build(0).diff(build(1)).changed
    assert [f.field for f in node.fields] == ["again"]


def test_child_graphs_are_compared(device: Device, x: ost.Buffer) -> None:
    def parent(steps: Sequence[Step]) -> ost.Graph:
        graph = ost.Graph.create(device)
        graph.add_empty(after=(graph.add_child(chain(device, x, steps)),))
        return graph

    assert not parent(LAYERS).diff(parent(LAYERS))
    found = parent(LAYERS).diff(parent([*LAYERS[:4], *LAYERS[5:]]))
    assert [n.before for n in found.removed] == ["0.child.4"]
    assert {e.source for e in found.edges_removed} == {"0.child.3", "0.child.4"}
    assert [str(e) for e in found.edges_added] == ["+ edge 0.child.3 → 0.child.4"]


def test_bodies_that_only_one_has(device: Device, x: ost.Buffer) -> None:
    def choice(size: int) -> ost.Graph:
        graph = ost.Graph.create(device)
        node = graph.add_conditional("if", graph.condition(), size=size)
        for body in node.bodies:
            body.add_fill(x, 0)
        return graph

    found = choice(1).diff(choice(2))
    assert [str(f) for f in found.changed[0].fields] == ["bodies: 1 → 2"]
    assert [n.after for n in found.added] == ["0.else.0"]


def test_host_functions_and_fills(device: Device, x: ost.Buffer) -> None:
    def make(function: Callable[[], object], value: int) -> ost.Graph:
        graph = ost.Graph.create(device)
        graph.add_call(function, after=(graph.add_fill(x.view(dtype=np.uint32), value),))
        return graph

    def one() -> None: ...
    def two() -> None: ...

    assert not make(one, 3).diff(make(one, 3))
    fill, host = make(one, 3).diff(make(two, 4)).changed
    assert [str(f) for f in fill.fields] == ["value: 3 → 4"]
    assert host.fields[0].field == "function"
    assert host.fields[0].before.endswith("one") and host.fields[0].after.endswith("two")


@pytest.mark.parametrize("before", ({"default": 1}, {"reset_at_launch": False}))
def test_what_a_condition_begins_with(device: Device, x: ost.Buffer, before: dict) -> None:
    def choice(**how: Any) -> ost.Graph:
        graph = ost.Graph.create(device)
        node = graph.add_conditional("if", graph.condition(**how))
        node.bodies[0].add_fill(x, 0)
        return graph

    assert not choice(**before).diff(choice(**before))
    (node,) = choice(**before).diff(choice()).changed
    (field,) = node.fields
    assert field.field == next(iter(before)).replace("_", " ")


def test_kernels_of_one_name_are_compared_by_their_code(host_device: Device) -> None:
    def loaded(factor: int) -> ost.Kernel:
        @ost.host_kernel("x: *i32")
        def scale(launch, x):
            x[:] *= factor

        source = ost.Source(host=[scale], name=f"by {factor}")
        return host_device.modules.get_or_compile(source, "scale")

    x = host_device.zeros(1, np.int32)
    two, three = loaded(2), loaded(3)
    graphs = [ost.Graph.create(host_device) for _ in range(3)]
    for graph, scale in zip(graphs, (two, three, two), strict=True):
        graph.add_kernel(scale, ost.LaunchConfig(1, 1), x)
    assert not graphs[0].diff(graphs[2])
    (node,) = graphs[0].diff(graphs[1]).changed
    assert [str(f) for f in node.fields] == ["kernel: scale → another scale"]


def test_structs_word_by_word(host_device: Device) -> None:
    @ost.host_kernel("state: bytes[24]")
    def take(launch, state):
        pass

    loaded = host_device.modules.get_or_compile(ost.Source(host=[take], name="t"), "take")
    graphs = []
    for middle in (1, 2):
        graph = ost.Graph.create(host_device)
        state = np.array([9, middle, 9], np.uint64).tobytes()
        graph.add_kernel(loaded, ost.LaunchConfig(1, 1), state)
        graphs.append(graph)
    (node,) = graphs[0].diff(graphs[1]).changed
    assert [str(f) for f in node.fields] == ["state+8: 0x1 → 0x2"]


def test_floats_that_look_alike(device: Device, x: ost.Buffer) -> None:
    close = float(np.nextafter(np.float32(1), np.float32(2)))
    a, b = (chain(device, x, [Step("fill", value=v)]) for v in (1.0, close))
    (field,) = a.diff(b).changed[0].fields
    assert field.before != field.after


def test_plain_data(device: Device, x: ost.Buffer) -> None:
    a = chain(device, x, [Step("scale"), Step("fill", value=1.0), Step("add")])
    b = chain(device, x, [Step("fill", value=2.0), Step("add"), Step("add")])
    data = a.diff(b).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["schema"] == "ostinato.diff/1"
    assert data["before"] == "3 nodes (3 kernel), 2 edges"
    text = str(a.diff(b))
    assert text.startswith("--- 3 nodes (3 kernel), 2 edges\n+++ 3 nodes (3 kernel), 2 edges\n")
    assert "- node 0: kernel scale (grid=3, block=128, x=[" in text


# --- any graph

steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(["scale", "fill", "add"]),
        st.integers(1, 3),
        st.sampled_from([0.0, 1.0, -2.0]),
    ),
    max_size=14,
)


@settings(deadline=None, max_examples=settings().max_examples // 2)
@given(steps, st.data())
def test_any_graph_is_like_its_clone_and_shows_one_change(
    first: list[Step], data: st.DataObject
) -> None:
    with ost.open_device("host") as device:
        preload(device)
        x = device.zeros(N, np.float32)
        graph = chain(device, x, first)
        assert not graph.diff(graph)
        assert not graph.diff(graph.clone())
        if not first:
            return
        at = data.draw(st.integers(0, len(first) - 1))
        changed = [*first]
        changed[at] = Step(first[at].name, first[at].n + 10, first[at].value)
        found = graph.diff(chain(device, x, changed))
        assert [(n.before, n.after) for n in found.nodes] == [(str(at), str(at))]
        assert [f.field for f in found.nodes[0].fields] == ["n"]
        assert not found.edges


@settings(deadline=None, max_examples=settings().max_examples // 2)
@given(steps, steps)
def test_a_diff_accounts_for_every_node(first: list[Step], second: list[Step]) -> None:
    with ost.open_device("host") as device:
        preload(device)
        x = device.zeros(N, np.float32)
        a, b = chain(device, x, first), chain(device, x, second)
        there, back = a.diff(b), b.diff(a)
        assert len(first) - len(there.removed) == len(second) - len(there.added)
        assert there.empty == back.empty
        # All `fill`s of a `Step` differ in what they show; `scale` and `add` have no value.
        shown = [
            [(s.name, s.n, s.value if s.name == "fill" else 0) for s in g] for g in (first, second)
        ]
        assert there.empty == (shown[0] == shown[1])
        str(there)
