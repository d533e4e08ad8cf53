"""Divergences planted in one of two graphs of the same work: the node that is named, and why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import CaptureError, GraphError, InputError
from ostinato.explain import DifferenceCause, FirstDifference, KnownMemory, first_difference
from tests.sources import config, kernel

N = 300
SHAPES = ["chain", "fork", "child"]


@dataclass(frozen=True)
class Launch:
    name: str
    args: tuple[object, ...]
    config: ost.LaunchConfig = field(default_factory=lambda: config(N))


class Work:
    """out = 2 (value) + 3, acc += factor out: two branches that meet, and a state."""

    def __init__(self, device: Device) -> None:
        self.device = device
        rng = np.random.default_rng(5)

        def noise(name: str) -> ost.Buffer:
            return device.array(rng.uniform(1, 2, N).astype(np.float32), name=name)

        self.x, self.y, self.out, self.acc = map(noise, ("x", "y", "out", "acc"))
        self.other, self.factor = noise("other"), device.array(np.float32([1.5]), name="factor")

    @property
    def buffers(self) -> list[ost.Buffer]:
        return [self.x, self.y, self.out, self.acc, self.other, self.factor]

    def launches(self) -> list[Launch]:
        return [
            Launch("fill", (self.x, 1.25, N)),
            Launch("scale", (self.x, N)),
            Launch("fill", (self.y, 3.0, N)),
            Launch("add", (self.x, self.y, self.out, N)),
            Launch("axpy", (self.out, self.factor, self.acc, N)),
        ]

    def graph(
        self, shape: str, launches: list[Launch | None] | None = None, cut: tuple[int, int] = (0, 0)
    ) -> ost.Graph:
        """`cut`: an edge of a fork that is left out."""
        edges = {1: [0], 2: [], 3: [1, 2], 4: [3]}
        if shape != "fork":
            edges = {n: [n - 1] for n in range(1, 5)}
        graph = outer = ost.Graph.create(self.device)
        nodes: dict[int, ost.Node] = {}
        given = launches or self.launches()
        for at, one in enumerate(given[:-1]):
            before = [n for n in edges.get(at, []) if (n, at) != cut]
            if shape == "chain":  # a launch that is left out leaves a shorter chain
                before = [max(nodes)] if nodes else []
            if one is not None:
                after = [nodes[n] for n in before if n in nodes]
                code = kernel(self.device, one.name)
                nodes[at] = graph.add_kernel(code, one.config, *one.args, after=after)
        last = [n for at, n in nodes.items() if at == max(nodes)]
        if shape == "child":
            outer = ost.Graph.create(self.device)
            last = [outer.add_child(graph)]
        if cut == (3, 4):
            last = []
        if given[-1] is not None:
            one = given[-1]
            outer.add_kernel(kernel(self.device, one.name), one.config, *one.args, after=last)
        return outer

    def path(self, shape: str, at: int) -> str:
        if shape != "child":
            return str(at)
        return "1" if at == 4 else f"0.child.{at}"


def line(device: Device, *launches: tuple[object, ...]) -> ost.Graph:
    """A chain of kernels, each given by its name and its arguments."""
    made, last = ost.Graph.create(device), list[ost.Node]()
    for name, *args in launches:
        last = [made.add_kernel(kernel(device, str(name)), config(N), *args, after=last)]
    return made


def paths(found: FirstDifference | None) -> tuple[str | None, str | None]:
    """The places of the two nodes that differ; None for a run without such a node."""
    assert found is not None
    one, two = (None if node is None else node.path for node in (found.a, found.b))
    return one, two


Plant = Callable[[Work, list[Launch]], tuple[int, Launch | None]]


PLANTS: dict[str, tuple[Plant, int, DifferenceCause, str]] = {
    "other kernel": (
        lambda w, of: (1, replace(of[1], name="halve")),
        1,
        DifferenceCause.OTHER_KERNEL,
        "scale in a, halve in b",
    ),
    "changed constant": (
        lambda w, of: (2, replace(of[2], args=(w.y, 3.5, N))),
        2,
        DifferenceCause.OTHER_ARGUMENT,
        "argument 1 (value) is 3 in a and 3.5 in b",
    ),
    "other length": (
        lambda w, of: (1, replace(of[1], args=(w.x, N - 1))),
        1,
        DifferenceCause.OTHER_ARGUMENT,
        "argument 1 (n) is 300 in a and 299 in b",
    ),
    "other argument": (
        lambda w, of: (3, replace(of[3], args=(w.x, w.x, w.out, N))),
        3,
        DifferenceCause.OTHER_ARGUMENT,
        "argument 1 (b) is [y] in a and [x] in b",
    ),
    "stale input": (
        lambda w, of: (3, replace(of[3], args=(w.x, w.other, w.out, N))),
        3,
        DifferenceCause.STALE_POINTER,
        "argument 1 (b) is [y] in a and [other] in b",
    ),
    "stale output": (
        lambda w, of: (3, replace(of[3], args=(w.x, w.y, w.other, N))),
        3,
        DifferenceCause.STALE_POINTER,
        "argument 2 (out) is [out] in a and [other] in b",
    ),
    "stale last output": (
        lambda w, of: (4, replace(of[4], args=(w.out, w.factor, w.other, N))),
        4,
        DifferenceCause.STALE_POINTER,
        "argument 2 (y) is [acc] in a and [other] in b",
    ),
    "other grid": (
        lambda w, of: (1, replace(of[1], config=ost.LaunchConfig(1, 128))),
        1,
        DifferenceCause.OTHER_CONFIG,
        "grid (3, 1, 1) in a, (1, 1, 1) in b",
    ),
    "missing node": (lambda w, of: (2, None), 2, DifferenceCause.MISSING_NODE, "only a has it"),
    "missing state": (lambda w, of: (4, None), 4, DifferenceCause.MISSING_NODE, "only a has it"),
}


def adopted(device: Device, graph: ost.Graph) -> ost.Graph:
    """The graph as if another library had made it: without signatures, lines and owners."""
    return ost.Graph.adopt(device, graph.handle, owner=graph)


@pytest.mark.parametrize("known", [True, False], ids=["ours", "adopted"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PLANTS)
def test_the_node_of_a_planted_difference_is_named(
    device: Device, stream: ost.Stream, shape: str, name: str, known: bool
) -> None:
    plant, at, cause, why = PLANTS[name]
    work = Work(device)
    launches: list[Launch | None] = [*work.launches()]
    where, launch = plant(work, work.launches())
    launches[where] = launch
    graphs = [work.graph(shape), work.graph(shape, launches)]
    if not known:
        graphs = [adopted(device, graph) for graph in graphs]
    before = [b.to_numpy(stream) for b in work.buffers]
    found = first_difference(stream, *graphs)
    assert found is not None
    assert found.cause is cause
    assert found.why == why or not known
    assert found.a is not None and found.a.path == work.path(shape, at)
    assert found.values is not None and found.values[0] != found.values[1]
    assert {type(value) for value in found.values} == {np.float32}
    assert work.launches()[at].name in str(found)
    for buffer, content in zip(work.buffers, before, strict=True):
        np.testing.assert_array_equal(buffer.to_numpy(stream), content)


def test_the_element_and_both_values_are_told(device: Device, stream: ost.Stream) -> None:
    grid = device.array(np.arange(12, dtype=np.float32).reshape(3, 4), name="grid")
    graphs = []
    for n in (9, 6):
        graph = ost.Graph.create(device)
        graph.add_kernel(kernel(device, "scale"), config(n), grid, n)
        graphs.append(graph)
    found = first_difference(stream, *graphs, names=("long", "short"))
    assert found is not None
    assert (found.argument, found.index, found.values) == ("argument 0 (x)", (1, 2), (12, 6))
    assert found.line() == "node 0 (scale), argument 0 (x) at [1, 2]: 12.0 in long, 6.0 in short"
    assert "cause: another argument: argument 1 (n) is 9 in long and 6 in short" in str(found)
    assert "grid 1, block 128; x=[grid], n=9; test_first_difference.py:" in str(found)


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_graphs_differ_in_no_node(device: Device, stream: ost.Stream, shape: str) -> None:
    work = Work(device)
    with work.graph(shape) as one, work.graph(shape) as two, two.instantiate() as run:
        assert first_difference(stream, one, two) is None
        assert first_difference(stream, one, run) is None
        assert first_difference(stream, one, adopted(device, two)) is None


@pytest.mark.parametrize("own", [False, True], ids=["same memory", "own memory"])
@pytest.mark.parametrize("order", [(2, 0, 1, 3, 4), (0, 2, 1, 3, 4)], ids=str)
def test_nodes_in_another_order_are_no_difference(
    device: Device, stream: ost.Stream, order: tuple[int, ...], own: bool
) -> None:
    work = Work(device)
    other = Work(device) if own else work

    def ordered(launches: list[Launch]) -> ost.Graph:
        made, nodes = ost.Graph.create(device), {}
        for at in order:
            one = launches[at]
            after = [nodes[n] for n in {1: [0], 3: [1, 2], 4: [3]}.get(at, [])]
            code = kernel(device, one.name)
            nodes[at] = made.add_kernel(code, one.config, *one.args, after=after)
        return made

    assert first_difference(stream, work.graph("fork"), ordered(other.launches())) is None
    launches = other.launches()
    launches[2] = Launch("fill", (other.y, 4.0, N))  # alike to none: still the one that is left
    found = first_difference(stream, work.graph("fork"), ordered(launches))
    assert paths(found) == ("2", str(order.index(2)))
    found = first_difference(stream, ordered(launches), work.graph("fork"))
    assert paths(found) == (str(order.index(2)), "2")


def test_nodes_of_one_name_are_paired_as_their_edges_allow(
    device: Device, stream: ost.Stream
) -> None:
    """x doubles after it was filled; y is filled, doubled too, in the first graph before x."""
    graphs = []
    for order in ("xxyy", "yyxx", "xyxy", "yxyx"):
        memory = {name: device.zeros(N, np.float32, name=name) for name in "xy"}
        last: dict[str, list[ost.Node]] = {"x": [], "y": []}
        made = ost.Graph.create(device)
        for name in order:
            value = (1.0 if name == "x" else 5.0) + len(last[name])
            args = memory[name], value, N
            added = made.add_kernel(kernel(device, "fill"), config(N), *args, after=last[name][-1:])
            last[name].append(added)
        graphs.append(made)
    for other in graphs[1:]:
        assert first_difference(stream, graphs[0], other) is None
        assert first_difference(stream, other, graphs[0]) is None


def layers(work: Work, values: list[float | None]) -> ost.Graph:
    """A chain of layers at the same addresses: fill y, x += y, x doubles; None: without a fill."""
    launches: list[tuple[object, ...]] = []
    for value in values:
        launches += [("fill", work.y, value, N)] if value else []
        launches += [("add", work.x, work.y, work.x, N), ("scale", work.x, N)]
    return line(work.device, *launches)


@pytest.mark.parametrize("own", [False, True], ids=["same memory", "own memory"])
def test_a_missing_node_of_several_of_its_name(
    device: Device, stream: ost.Stream, own: bool
) -> None:
    works = Work(device), Work(device)
    graphs = layers(works[0], [3, 4, 5]), layers(works[own], [3, None, 5])
    found = first_difference(stream, *graphs)
    assert paths(found) == ("3", None) and found.cause is DifferenceCause.MISSING_NODE
    found = first_difference(stream, *graphs[::-1])
    assert paths(found) == (None, "3") and found.cause is DifferenceCause.MISSING_NODE


@pytest.mark.parametrize("own", [False, True], ids=["same memory", "own memory"])
def test_a_node_that_alone_writes_its_memory(device: Device, stream: ost.Stream, own: bool) -> None:
    """No argument of the other run stands for that memory: it is compared with itself."""
    works = Work(device), Work(device)
    one = layers(works[0], [3, 4])
    other = layers(works[own], [3, 4])
    code = kernel(device, "fill")
    other.add_kernel(code, config(N), works[own].other, 7.0, N, after=[other.nodes()[-1]])
    for pair in ((one, other), (other, one)):
        found = first_difference(stream, *pair)
        assert found is not None and found.cause is DifferenceCause.MISSING_NODE
        nodes = {None if node is None else node.path for node in (found.a, found.b)}
        assert nodes == {None, "6"}


@pytest.mark.parametrize("place", range(4))
def test_an_additional_node_of_the_name_of_the_next_one(
    device: Device, stream: ost.Stream, place: int
) -> None:
    """In memory of its own: which of the two is the partner, more nodes tell."""
    works, graphs = (Work(device), Work(device)), []
    for work in works:
        launches = [("scale", work.x, N), ("add", work.x, work.other, work.y, N)] * 4
        if work is works[1]:
            launches.insert(2 * place, ("scale", work.acc, N))
        graphs.append(line(device, *launches))
    found = first_difference(stream, *graphs)
    assert paths(found) == (None, str(2 * place)), str(found)


def test_two_changes_are_not_taken_for_one(device: Device, stream: ost.Stream) -> None:
    """A node that is new, and one of its name that is another one later."""
    work = Work(device)
    fill, add = ("fill", work.y, 3.0, N), ("add", work.x, work.y, work.x, N)
    one = line(device, fill, add, ("scale", work.x, N))
    other = line(device, fill, ("scale", work.y, N), add, ("halve", work.x, N))
    found = first_difference(stream, one, other)
    assert paths(found) == (None, "1") and found.cause is DifferenceCause.MISSING_NODE


def test_an_answer_that_is_also_an_input(device: Device, stream: ost.Stream) -> None:
    """Zeros in place of answers that are there are zeros for both runs."""
    works = Work(device), Work(device)
    graphs = []
    for work in works:
        made = ost.Graph.create(device)
        last = made.add_copy(work.out, work.x)
        if work is works[1]:
            made.add_copy(work.x, work.out, after=[last])  # the same bytes
        graphs.append(made)
    assert first_difference(stream, *graphs) is None
    assert first_difference(stream, *graphs[::-1]) is None


def test_edges_that_contradict_each_other_are_no_difference(
    device: Device, stream: ost.Stream
) -> None:
    """Without memory in common two nodes may run in either order: each run has its own."""
    work = Work(device)
    launches = work.launches()

    def ordered(*order: int) -> ost.Graph:
        return line(device, *((launches[at].name, *launches[at].args) for at in order))

    one, other = ordered(0, 1, 2, 3, 4), ordered(2, 0, 1, 3, 4)
    assert first_difference(stream, one, other) is None
    launches[1] = Launch("halve", (work.x, N))
    found = first_difference(stream, one, ordered(2, 0, 1, 3, 4))
    assert paths(found) == ("1", "2")


def test_each_run_has_its_own_order_where_they_contradict(
    device: Device, stream: ost.Stream
) -> None:
    x = device.array(np.full(N, 3, np.float32), name="x")
    scale, fill = ("scale", x, N), ("fill", x, 1.0, N)
    found = first_difference(stream, line(device, scale, fill), line(device, fill, scale))
    assert found is not None
    assert (found.cause, found.values) == (DifferenceCause.OTHER_ORDER, (6, 2))
    assert found.why == "node 0 (fill) comes before it in b and after it in a"


@pytest.mark.parametrize("known", [True, False], ids=["ours", "adopted"])
@pytest.mark.parametrize("cut", [(0, 1), (1, 3), (2, 3), (3, 4)], ids=str)
def test_a_missing_edge_is_found_by_another_order(
    device: Device, stream: ost.Stream, cut: tuple[int, int], known: bool
) -> None:
    work = Work(device)
    graphs = [work.graph("fork"), work.graph("fork", cut=cut)]
    if not known:
        graphs = [adopted(device, graph) for graph in graphs]
    # Memory as an earlier replay left it: the answers are there already.
    with work.graph("fork").instantiate() as run:
        run.launch(stream)
    for pair, name in ((graphs, "b"), (graphs[::-1], "a")):
        found = first_difference(stream, *pair)
        assert found is not None
        assert found.cause is DifferenceCause.MISSING_EDGE
        names = [one.name for one in work.launches()]
        one, two = (f"node {n} ({names[n]})" for n in cut)
        assert found.why == f"nothing orders {one} and {two} in {name}"


@pytest.mark.parametrize("name", ["other length", "other grid", "stale output", "missing node"])
def test_answers_that_are_there_already(device: Device, stream: ost.Stream, name: str) -> None:
    """An earlier replay has left what the wrong graph does not write."""
    plant, _, _, _ = PLANTS[name]
    work = Work(device)
    launches: list[Launch | None] = [*work.launches()]
    if name == "other length":
        launches[3] = Launch("add", (work.x, work.y, work.out, N - 1))
    elif name == "other grid":
        launches[3] = replace(work.launches()[3], config=ost.LaunchConfig(1, 128))
    else:
        where, launch = plant(work, work.launches())
        launches[where] = launch
    with work.graph("chain").instantiate() as run:
        run.launch(stream)
    before = [b.to_numpy(stream) for b in work.buffers]
    found = first_difference(stream, work.graph("chain"), work.graph("chain", launches))
    assert found is not None and found.a is not None
    assert found.a.path == ("2" if name == "missing node" else "3")
    np.testing.assert_equal([b.to_numpy(stream) for b in work.buffers], before)


def test_a_function_is_the_order_of_its_launches(device: Device, stream: ost.Stream) -> None:
    work = Work(device)

    def eagerly() -> None:
        for one in work.launches():
            ost.launch(stream, kernel(device, one.name), one.config, *one.args)

    assert first_difference(stream, eagerly, work.graph("fork")) is None
    found = first_difference(stream, eagerly, work.graph("fork", cut=(2, 3)))
    assert found is not None and found.cause is DifferenceCause.MISSING_EDGE


def test_bytes_that_no_node_writes_do_not_count(device: Device, stream: ost.Stream) -> None:
    """Without signatures a node may write up to the end of the allocation behind each pointer."""
    graphs = []
    for garbage in (3.0, 4.0):
        arena = device.array(np.full((4, N), garbage, np.float32))
        add = "add", arena[0], arena[0], arena[1], N
        graphs.append(adopted(device, line(device, ("fill", arena[0], 1.0, N), add)))
    assert first_difference(stream, *graphs) is None


def test_results_that_another_library_allocates_anew(device: Device, stream: ost.Stream) -> None:
    """As in two captures by torch: inputs and weights are the same, and each has its own results,
    with other bytes in them before."""
    x, y = (device.array(np.full(N, value, np.float32)) for value in (1, 2))
    arenas = [device.array(np.full((3, N), value, np.float32)) for value in (8, 9)]

    def graph(
        arena: ost.Buffer,
        second: str = "scale",
        given: tuple[ost.Buffer, ost.Buffer] = (x, y),
        places: tuple[int, int] = (0, 1),
    ) -> ost.Graph:
        inner, result = (arena[place] for place in places)
        first, last = ("add", *given, inner, N), ("add", y, inner, result, N)
        return adopted(device, line(device, first, (second, inner, N), last))

    owners = [device.context.owners.pop(arena.address) for arena in (*arenas, x, y)]
    one, other = (graph(arena) for arena in arenas)
    assert first_difference(stream, one, other) is None
    found = first_difference(stream, one, graph(arenas[1], "halve"))
    assert found is not None and found.cause is DifferenceCause.OTHER_KERNEL
    assert paths(found)[1] == "1"
    assert [value.view(np.float32) for value in found.values or ()] == [6, 1.5]  # of unknown type
    assert "0x40c00000 (as f32 6) in a" in found.line()
    wrong = graph(arenas[1], given=(x, x))
    found = first_difference(stream, one, wrong)
    assert found is not None and found.cause is DifferenceCause.OTHER_ARGUMENT
    assert paths(found)[1] == "0"
    assert first_difference(stream, one, graph(arenas[1], places=(1, 0))) is None
    found = first_difference(stream, one, graph(arenas[1], "halve", places=(1, 0)))
    assert found is not None and found.b is not None and found.b.path == "1"
    del owners


@pytest.fixture
def pool(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[ost.Buffer]:
    """The pool of a library's captures, of 8 rows; the library tells of it."""
    rows = device.array(np.full((8, N), 9, np.float32))
    owner = device.context.owners.pop(rows.address)

    def told(context: object) -> Iterator[KnownMemory]:
        if context is device.context:  # one piece: what is free there is not told apart
            yield KnownMemory(rows.range, "a pool", of="capture")

    monkeypatch.setattr(sys.modules["ostinato.graph.audit"], "_sources", [told])
    yield rows
    del owner


@pytest.mark.parametrize("rows", [(0, 1, 0, 2), (1, 0, 2, 3), (3, 2, 1, 0), (4, 0, 4, 1)])
def test_two_captures_that_use_a_pool_in_another_order(
    device: Device, stream: ost.Stream, pool: ost.Buffer, rows: tuple[int, ...]
) -> None:
    """What stands for what is another thing at each node, as addresses are used again."""
    x, y = (device.array(np.full(N, value, np.float32)) for value in (1, 2))

    def graph(rows: tuple[int, ...], plant: bool = False) -> ost.Graph:
        one, two, three, last = (pool[row] for row in rows)
        made = line(
            device,
            ("add", x, y, one, N),
            ("scale", one, N),
            ("add", one, y, two, N),
            ("add", two, x if plant else y, three, N),
            ("add", three, two, last, N),
        )
        return adopted(device, made)

    first = graph((0, 1, 0, 2))
    assert first_difference(stream, first, graph(rows)) is None
    assert first_difference(stream, graph(rows), first) is None
    found = first_difference(stream, first, graph(rows, plant=True))
    assert found is not None and found.b is not None and found.b.path == "3", str(found)
    assert [value.view(np.float32) for value in found.values or ()] == [10, 9]
    assert found.cause is DifferenceCause.OTHER_ARGUMENT
    assert found.why.startswith("argument 1 is ")


def test_memory_that_its_library_has_taken_back(
    device: Device, stream: ost.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is mapped still, and may be another array's tomorrow: the node does not run."""
    rows = device.array(np.full((2, N), 9, np.float32))
    owner = device.context.owners.pop(rows.address)

    def told(context: object) -> Iterator[KnownMemory]:
        yield KnownMemory(rows[0].range, "an array")
        yield KnownMemory(rows[1].range, "an array", live=False)

    monkeypatch.setattr(sys.modules["ostinato.graph.audit"], "_sources", [told])
    graphs = [adopted(device, line(device, ("scale", row, N))) for row in (rows[0], rows[1])]
    found = first_difference(stream, *graphs)
    assert found is not None and found.cause is DifferenceCause.STALE_POINTER
    assert found.why.endswith("the node was not run")
    np.testing.assert_array_equal(rows.to_numpy(stream), 9)
    del owner


CODE = """
extern "C" __global__ void scale(float* x, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = 3.0f * x[i];
}
"""


@ost.host_kernel("x: *f32, n: u32", name="scale")
def triple(launch: object, x: np.ndarray, n: int) -> None:
    x[:n] *= np.float32(3)


def test_another_kernel_of_the_same_name(device: Device, stream: ost.Stream) -> None:
    work = Work(device)
    other = device.kernel(ost.Source(CODE, host=[triple], name="other.cu"), "scale")
    graphs = []
    for code in (kernel(device, "scale"), other):
        graph = ost.Graph.create(device)
        graph.add_kernel(code, config(N), work.x, N)
        graphs.append(graph)
    found = first_difference(stream, *graphs)
    assert found is not None and found.cause is DifferenceCause.OTHER_KERNEL
    assert found.why == "scale in a, scale in b"


@pytest.mark.parametrize("name", ["acc", "factor"])
def test_memory_that_is_read_before_it_is_written(
    device: Device, stream: ost.Stream, name: str
) -> None:
    one, two = Work(device), Work(device)
    buffer = getattr(two, name)
    buffer.set(np.full(buffer.shape, 7, np.float32), stream)
    before = [b.to_numpy(stream) for w in (one, two) for b in w.buffers]
    found = first_difference(stream, one.graph("chain"), two.graph("chain"))
    assert found is not None and found.cause is DifferenceCause.READ_BEFORE_WRITTEN
    assert paths(found)[1] == "4"
    after = [b.to_numpy(stream) for w in (one, two) for b in w.buffers]
    np.testing.assert_equal(after, before)  # also what is only read
    place = {"acc": "argument 2 (y)", "factor": "argument 1 (factor)"}[name]
    assert found.why == f"when the node began, the memory of {place} held other bytes"


def test_a_forgotten_rebind_is_a_stale_pointer(device: Device, stream: ost.Stream) -> None:
    work, fresh = Work(device), Work(device)
    with work.graph("chain").instantiate() as run, work.graph("chain").instantiate() as wrong:
        run.rebind({work.x: fresh.x})
        for node in (0, 1):  # and not node 3
            wrong.set(node, "out" if node == 0 else "x", fresh.x)
        found = first_difference(stream, run, wrong)
    assert found is not None and found.cause is DifferenceCause.STALE_POINTER
    assert paths(found)[1] == "3"


@pytest.mark.parametrize("known", [True, False], ids=["ours", "adopted"])
def test_a_node_that_points_at_freed_memory_is_not_run(
    device: Device, stream: ost.Stream, known: bool
) -> None:
    work = Work(device)
    launches: list[Launch | None] = [*work.launches()]
    launches[3] = Launch("add", (work.x, work.other, work.out, N))
    graphs = [work.graph("fork"), work.graph("fork", launches)]
    if not known:
        graphs = [adopted(device, graph) for graph in graphs]
    work.other.close()
    found = first_difference(stream, *graphs)
    assert found is not None and found.cause is DifferenceCause.STALE_POINTER
    assert paths(found)[1] == "3"
    assert "argument 1 of b is 0x" in found.why and "was not run" in found.why
    device.context.synchronize()  # no fault


def test_freed_memory_at_whose_place_is_other_memory_by_now(
    device: Device, stream: ost.Stream
) -> None:
    work = Work(device)
    launches: list[Launch | None] = [*work.launches()]
    launches[3] = Launch("add", (work.x, work.other, work.out, N))
    right, wrong = work.graph("fork"), work.graph("fork", launches)
    address = work.other.address
    work.other.close()
    others = [device.zeros(N, np.float32) for _ in range(64)]
    if all(other.address != address for other in others):
        pytest.skip("this driver does not use the place again")
    found = first_difference(stream, right, wrong)
    assert found is not None and found.cause is DifferenceCause.STALE_POINTER
    assert paths(found)[1] == "3"
    assert "was not run" in found.why


@ost.kernel(
    "x: *f32, unset: u64",
    """
extern "C" __global__ void padded(float* x, unsigned long long unset) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < 300) x[i] += 1;
}
""",
    name="padded",
)
def padded(launch: Any, x: Any, unset: int) -> None:
    x[:] += 1


def test_bytes_that_nobody_set_are_no_stale_pointer(device: Device, stream: ost.Stream) -> None:
    """An argument of another library's kernel holds what lay there: once an address, once not."""
    work = Work(device)
    graphs = []
    for unset in (work.other.address, 0x100):
        made = ost.Graph.create(device)
        made.add_kernel(device.modules.get_or_compile(padded, "padded"), config(N), work.x, unset)
        graphs.append(adopted(device, made))
    assert first_difference(stream, *graphs) is None


def test_a_pointer_to_no_memory_is_told_in_both(device: Device, stream: ost.Stream) -> None:
    graph = line(device, ("fill", 0x1000, 1.0, N))
    found = first_difference(stream, graph, graph.clone())
    assert found is not None and found.cause is DifferenceCause.STALE_POINTER
    assert found.why.startswith("argument 0 of a is 0x1000, where no memory is")
    device.context.synchronize()  # no fault


def test_the_node_that_is_left_has_the_stale_pointer(device: Device, stream: ost.Stream) -> None:
    work = Work(device)
    graphs = []
    for order in ((work.out, work.y), (work.y, work.other)):
        graph = ost.Graph.create(device)
        for buffer in order:
            graph.add_kernel(kernel(device, "scale"), config(N), buffer, N)
        graphs.append(graph)
    found = first_difference(stream, *graphs)
    assert paths(found) == ("0", "1")


def test_a_node_that_is_switched_off(device: Device, stream: ost.Stream) -> None:
    work = Work(device)
    with work.graph("fork") as graph, graph.instantiate() as run:
        run.set(1, enabled=False)
        found = first_difference(stream, graph, run)
        assert found is not None and found.b is not None
        assert (found.b.path, found.why) == ("1", "it is switched off in b")


def test_an_earlier_difference_counts_more_than_a_stale_pointer(
    device: Device, stream: ost.Stream
) -> None:
    work = Work(device)
    launches: list[Launch | None] = [*work.launches()]
    launches[1] = Launch("halve", (work.x, N))
    launches[3] = Launch("add", (work.x, work.other, work.out, N))
    wrong = work.graph("chain", launches)
    work.other.close()
    found = first_difference(stream, work.graph("chain"), wrong)
    assert found is not None and found.cause is DifferenceCause.OTHER_KERNEL


def test_copies_and_fills_are_compared(device: Device, stream: ost.Stream) -> None:
    work = Work(device)

    def graph(value: float, src: ost.Buffer) -> ost.Graph:
        made = ost.Graph.create(device)
        first = made.add_fill(work.x, value)
        made.add_copy(work.out, src, after=[first])
        return made

    right = graph(1, work.x)
    for wrong, path, why in (
        (graph(2, work.x), "0", "value is "),
        (graph(1, work.y), "1", "src is "),
    ):
        found = first_difference(stream, right, wrong)
        assert found is not None and found.b is not None
        assert found.b.path == path and found.why.startswith(why)
        assert found.argument == "dst"


def test_what_cannot_be_compared_is_refused(device: Device, stream: ost.Stream) -> None:
    work = Work(device)
    graph = work.graph("chain")
    with pytest.raises(InputError, match=r"limit"):
        first_difference(stream, graph, graph, limit=100)
    with pytest.raises(InputError, match="a function"):
        first_difference(stream, graph, 3)  # type: ignore[arg-type]
    with ost.capture(stream) as capture:
        ost.launch(stream, kernel(device, "fill"), config(N), work.x, 1.0, N)
        with pytest.raises(CaptureError):
            first_difference(stream, graph, graph)
    assert capture.graph.count() == 1
    alloc = ost.Graph.create(device)
    alloc.add_alloc(4096)
    with pytest.raises(GraphError, match=r"node 0 \(mem_alloc\)"):
        first_difference(stream, graph, alloc)


def test_a_node_that_does_not_repeat_its_answer(host_device: Device) -> None:
    runs = iter(range(100))

    @ost.host_kernel("out: *out f32")
    def count(launch: object, out: np.ndarray) -> None:
        out[0] = next(runs)

    stream, x = host_device.create_stream(), host_device.zeros(4, np.float32)
    graph = ost.Graph.create(host_device)
    graph.add_kernel(host_device.kernel(count), ost.LaunchConfig(1, 1), x)
    found = first_difference(stream, graph, graph.clone())
    assert found is not None and found.cause is DifferenceCause.UNREPEATABLE


def test_memory_behind_an_address_in_memory_is_unknown(host_device: Device) -> None:
    @ost.host_kernel("table: *const u64, out: *out f32")
    def gather(launch: ost.lowlevel.HostLaunch, table: np.ndarray, out: np.ndarray) -> None:
        out[0] = launch.memory(int(table[0]), 4).view(np.float32)[0]

    device, stream = host_device, host_device.create_stream()
    code = device.kernel(gather)
    values, table = device.array([1.0, 2.0], "f4"), device.zeros(1, np.uint64)
    out, graphs = device.zeros(2, np.float32), []
    for at in range(2):
        table = device.array([values[at].address], "uint64")
        graph = ost.Graph.create(device)
        graph.add_kernel(code, ost.LaunchConfig(1, 1), table, out)
        graph.add_kernel(kernel(device, "scale"), config(1), out, 1)
        graphs.append(graph)
    found = first_difference(stream, *graphs)
    # Each has its own table, so the address there is content that nothing wrote.
    assert found is not None and found.a is not None and found.a.path == "0"
    assert found.values == (1, 2)
