"""Graphs in files: what is saved is loaded elsewhere and does the same; the rest is refused."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import KernelTable, MemcpyNodeParams, MemOp, MemOpKind
from ostinato.errors import ClosedError, DriverError, GraphFileError, InputError
from ostinato.graphfile import saving
from ostinato.graphfile.show import file_text
from tests.emulator.stub import build, stub_device
from tests.graphfile.file_kernels import (
    ONE,
    add,
    affine,
    big,
    choose,
    count_down,
    gapped,
    kernel,
    last_one,
    nonzero,
    once,
    packed,
    picked,
    spread,
)

pytestmark = pytest.mark.usefixtures("checks_here")


class Desk:
    """A host device with the kernels of these tests, a stream, and the place of a file."""

    def __init__(self, device: Device, folder: Path) -> None:
        self.device, self.folder, self.path = device, folder, folder / "one.graph"
        ours = (add, affine, big, choose, count_down, gapped, last_one, nonzero, once, packed)
        for made in (*ours, picked, spread, unsteady):
            self.kernel(made)  # loaded now: a capture cannot
        self.stream = device.create_stream()

    def kernel(self, made: ost.HostKernel) -> ost.Kernel:
        return kernel(self.device, made)

    def ints(self, *values: int) -> ost.Buffer:
        return self.device.array(values, np.int32)

    def captured(self, *launches: tuple[Any, ...]) -> ost.Graph:
        """A graph of launches, each a kernel and its arguments."""
        with ost.capture(self.stream) as under_way:
            for made, *given in launches:
                ost.launch(self.stream, self.kernel(made), ONE, *given)
        return under_way.graph

    def save(self, graph: ost.Graph, **options: Any) -> None:
        ost.graphfile.save(graph, self.path, **options)

    def load(self, **options: Any) -> ost.graphfile.LoadedGraph:
        return ost.graphfile.load(self.device, self.path, **options)

    def check(self, **options: Any) -> None:
        ost.graphfile.check(self.device, self.path, **options)

    def result(self, loaded: ost.graphfile.LoadedGraph, x: Any) -> Any:
        """What a launch on these inputs leaves in `y`."""
        loaded.inputs["x"].set(x, self.stream)
        with loaded.instantiate() as run:
            run.launch(self.stream)
            return loaded.outputs["y"].to_numpy(self.stream).tolist()


@pytest.fixture
def desk(host_device: Device, tmp_path: Path) -> Desk:
    return Desk(host_device, tmp_path)


def words(both: tuple[ost.Buffer, ...]) -> bytes:
    return b"".join(buffer.address.to_bytes(8, "little") for buffer in both)


class Work:
    """y = 2 x + w, through scratch memory."""

    def __init__(self, desk: Desk) -> None:
        self.x, self.w, self.y = desk.ints(1, 2, 3), desk.ints(10, 20, 30), desk.ints(0, 0, 0)
        self.scratch = scratch = desk.device.empty(3, np.int32)
        with ost.capture(desk.stream) as under_way:
            ost.launch(desk.stream, desk.kernel(affine), ONE, scratch, self.x, 2, 0, 3)
            ost.launch(desk.stream, desk.kernel(add), ONE, self.w, scratch, 3)
            ost.copy(desk.stream, self.y, scratch)
        self.graph, self.path = under_way.graph, desk.path

    def save(self, path: Path | None = None, **options: Any) -> None:
        named = {"inputs": {"x": self.x}, "outputs": {"y": self.y}, "constants": {"w": self.w}}
        ost.graphfile.save(self.graph, path or self.path, **{**named, **options})


@pytest.fixture
def work(desk: Desk) -> Work:
    return Work(desk)


# ------------------------------------------------------------------------------ saved and loaded


def test_a_loaded_graph_does_the_same_elsewhere(desk: Desk, work: Work) -> None:
    work.save()
    assert desk.device.to_numpy(work.y).tolist() == [0, 0, 0]  # saving leaves no trace
    loaded = desk.load()
    mine = {b.address for b in (work.x, work.y, work.w, work.scratch)}
    theirs = (*loaded.inputs.values(), *loaded.outputs.values(), *loaded.constants.values())
    assert mine.isdisjoint({b.address for b in (*theirs, *loaded.scratch)})
    work.graph.close()
    assert desk.result(loaded, [1, 2, 3]) == [12, 24, 36]
    assert desk.result(loaded, [0, -5, 7]) == [10, 10, 44]
    assert loaded.manifest().checked
    assert loaded.manifest().proofs() == {"signature": 4, "field": 2}


def test_a_loaded_graph_is_patched_rebound_and_shown(desk: Desk, work: Work) -> None:
    work.save()
    loaded = desk.load()
    other = desk.ints(100, 100, 100)
    loaded.inputs["x"].set([1, 2, 3], desk.stream)
    with loaded.instantiate() as run:
        assert len(run.rebind({loaded.constants["w"]: other}).words) == 1
        run.set(0, "m", 5)
        run.launch(desk.stream)
        assert loaded.outputs["y"].to_numpy(desk.stream).tolist() == [105, 110, 115]
    assert "m=2" in str(loaded)
    assert loaded.digest() == work.graph.digest()


def test_the_callers_buffers_are_used_as_they_are(desk: Desk, work: Work) -> None:
    work.save()
    x, y = desk.ints(4, 5, 6), desk.ints(0, 0, 0)
    loaded = desk.load(buffers={"x": x, "y": y})
    assert loaded.inputs["x"] is x
    with loaded.instantiate() as run:
        run.launch(desk.stream)
        assert y.to_numpy(desk.stream).tolist() == [18, 30, 42]
        x.close()
        with pytest.raises(ClosedError):
            run.launch(desk.stream)


def test_constants_by_name_are_bound_to_live_memory_or_read_from_a_file(
    desk: Desk, work: Work
) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file

    work.save(keeping="by name")
    with pytest.raises(GraphFileError, match=r"takes the constant 'w' \(12 bytes\) by name"):
        desk.load()
    live = desk.ints(7, 7, 7)
    loaded = desk.load(constants={"w": live})
    assert desk.result(loaded, [0, 0, 0]) == [7, 7, 7]
    assert loaded.constants["w"] is live
    weights = desk.folder / "weights.safetensors"
    save_file({"w": np.array([8, 8, 8], np.int32), "other": np.zeros(2)}, weights)
    loaded = desk.load(constants=weights)
    assert desk.result(loaded, [1, 1, 1]) == [10, 10, 10]


def test_bfloat16_is_a_number_after_loading_too(desk: Desk) -> None:
    x, y = desk.device.array([1.0, 2.5], "bf16"), desk.device.zeros(2, "bf16")
    with ost.capture(desk.stream) as under_way:
        ost.copy(desk.stream, y, x)
    desk.save(under_way.graph, inputs={"x": x}, outputs={"y": y})
    assert desk.result(desk.load(), [1.0, 7.0]) == [0x3F80, 0x40E0]


def test_state_is_an_input_and_an_output(desk: Desk) -> None:
    x, total = desk.ints(1), desk.ints(5)
    graph = desk.captured((add, x, total, 1))
    desk.save(graph, inputs={"x": x, "total": total}, outputs={"total": total})
    assert desk.device.to_numpy(total).tolist() == [5]
    loaded = desk.load()
    assert loaded.inputs["total"] is loaded.outputs["total"]
    assert loaded.inputs["total"].to_numpy(desk.stream).tolist() == [
        5
    ]  # as it was when it was saved
    loaded.inputs["total"].set([100], desk.stream)
    loaded.inputs["x"].set([2], desk.stream)
    run = loaded.instantiate()
    for _ in range(3):
        run.launch(desk.stream)
    assert loaded.outputs["total"].to_numpy(desk.stream).tolist() == [106]


def test_views_of_one_buffer_stay_together(desk: Desk) -> None:
    """The kernel is given the whole buffer, and the names are views of it."""
    whole, x = desk.ints(0, 0, 0, 0), desk.ints(3, 4, 5, 6)
    graph = desk.captured((affine, whole, x, 1, 1, 4))
    desk.save(graph, inputs={"x": x}, outputs={"y": whole[2:], "all": whole})
    loaded = desk.load()
    assert len(loaded.manifest().blocks) == 2
    assert loaded.outputs["y"].address == loaded.outputs["all"].address + 8
    assert desk.result(loaded, [1, 2, 3, 4]) == [4, 5]
    with pytest.raises(InputError, match="other buffers share its memory"):
        desk.load(buffers={"y": desk.ints(0, 0)})


@pytest.mark.parametrize("keeping", ["stored", "by name"])
@pytest.mark.parametrize("role", ["inputs", "constants"])
def test_loading_writes_nothing_into_memory_that_is_given(
    desk: Desk, role: str, keeping: Any
) -> None:
    """Another name, that is not given, is of a part of it."""
    whole, y = desk.ints(1, 2, 3, 4), desk.ints(0, 0)
    graph = ost.Graph.create(desk.device)
    graph.add_kernel(desk.kernel(affine), ONE, y, whole, 1, 10, 2)
    named: Any = {"inputs": {}, "outputs": {"y": y}, "keeping": keeping}
    desk.save(graph, **{**named, role: {"part": whole[:2], "whole": whole}})
    given = desk.ints(5, 6, 7, 8)
    loaded = desk.load(buffers={"whole": given})
    assert given.to_numpy(desk.stream).tolist() == [5, 6, 7, 8]
    with loaded.instantiate() as run:
        run.launch(desk.stream)
    assert loaded.outputs["y"].to_numpy(desk.stream).tolist() == [15, 16]


def test_all_kinds_of_nodes_come_back(desk: Desk) -> None:
    device = desk.device
    x, y, on = desk.ints(1, 2), desk.ints(0, 0), desk.ints(1)
    loop = desk.ints(3)
    event = device.create_event()
    inner = ost.Graph.create(device)
    inner.add_kernel(desk.kernel(affine), ONE, y, x, 3, 0, 2)
    graph = ost.Graph.create(device)
    first = graph.add_child(inner)
    inner.close()
    condition, again = graph.condition(), graph.condition(1, reset_at_launch=True)
    chosen = graph.add_kernel(desk.kernel(choose), ONE, on, condition, after=[first])
    branch = graph.add_conditional("if", condition, size=2, after=[chosen])
    for body, value in zip(branch.bodies, (100, 200), strict=True):
        body.add_kernel(desk.kernel(affine), ONE, y, y, 1, value, 2)
    repeat = graph.add_conditional("while", again, after=[branch.node])
    counted = repeat.bodies[0].add_kernel(desk.kernel(count_down), ONE, loop, again)
    repeat.bodies[0].add_kernel(desk.kernel(affine), ONE, y, y, 1, 1, 2, after=[counted])
    record = graph.add_event_record(event, after=[repeat.node])
    wait = graph.add_event_wait(event, after=[record])
    alloc = graph.add_alloc(8, after=[wait])
    memory = alloc.alloc.address
    copied = graph.add(MemcpyNodeParams(memory, y.address, 8), after=[alloc])
    back = graph.add(MemcpyNodeParams(y.address + 4, memory, 4), after=[copied])
    free = graph.add_free(memory, after=[back])
    z = desk.ints(0)
    graph.add_batch_mem_op([MemOp(MemOpKind.WRITE, z.address, 7)], keep=[z], after=[free])
    graph.add_empty(after=[free])
    outputs = {"y": y, "z": z, "loop": loop}
    desk.save(graph, inputs={"x": x, "on": on, "loop": loop}, outputs=outputs)
    loaded = desk.load()
    kinds = [node.kind for node in loaded.nodes()]
    assert kinds == [node.kind for node in graph.nodes()]
    assert len(loaded.events) == 1
    for on_value, expected in ((1, 3 + 100 + 3), (0, 3 + 200 + 3)):
        loaded.inputs["on"].set([on_value], desk.stream)
        loaded.inputs["loop"].set([3], desk.stream)
        assert desk.result(loaded, [1, 2]) == [expected, expected]
        assert loaded.outputs["z"].to_numpy(desk.stream).tolist() == [7]


def test_edges_with_data_and_launch_shapes_come_back(desk: Desk) -> None:
    x, y = desk.ints(1), desk.ints(0)
    config = ost.LaunchConfig((2, 2), (4, 1, 2), 64, cluster=2, programmatic=True, priority=-1)
    with ost.capture(desk.stream) as under_way:
        ost.launch(desk.stream, desk.kernel(affine), ONE, y, x, 1, 0, 1)
        ost.launch(desk.stream, desk.kernel(add), config, x, y, 1)
    graph = under_way.graph
    desk.save(graph, inputs={"x": x}, outputs={"y": y})
    loaded = desk.load()
    assert [e.data for e in loaded.edges()] == [e.data for e in graph.edges()]
    assert loaded.nodes()[1].kernel.config == graph.nodes()[1].kernel.config


def test_much_shared_memory_is_allowed_again(desk: Desk) -> None:
    y, made = desk.device.zeros(1, np.float32), desk.kernel(big)
    made.allow_shared(100_000)
    with ost.capture(desk.stream) as under_way:
        ost.launch(desk.stream, made, ost.LaunchConfig(1, 1, 100_000), y)
    desk.save(under_way.graph, outputs={"y": y})
    with ost.open_device("host") as other:
        loaded = ost.graphfile.load(other, desk.path)
        loaded.instantiate().launch(other_stream := other.create_stream())
        assert loaded.outputs["y"].to_numpy(other_stream).tolist() == [100_000]


# --------------------------------------------------------------------------------- two captures


class Pair:
    """A launch whose struct holds the addresses of x and y."""

    def __init__(
        self, desk: Desk, *, seed: int = 1, first: int = 9, rest: bytes | None = None
    ) -> None:
        """`rest`: bytes 16 to 32 of the struct of `gapped`, in place of `packed`."""
        self.desk, self.x, self.y = desk, desk.ints(41), desk.ints(0)
        both = words((self.x, self.y))
        plain = (packed, first, both, seed)
        self.graph = desk.captured(
            plain if rest is None else (gapped, both + rest.ljust(16, b"\0"))
        )
        self.graph.keep += [self.x, self.y]

    def twin(self, **buffers: ost.Buffer) -> ost.graphfile.Twin:
        return ost.graphfile.Twin(self.graph, {"x": self.x, "y": self.y, **buffers})

    def save(self, twin: ost.graphfile.Twin | None = None, **options: Any) -> None:
        inputs = {"x": self.x, **options.pop("more", {})}
        self.desk.save(self.graph, inputs=inputs, outputs={"y": self.y}, twin=twin, **options)


def test_addresses_inside_an_argument_are_proven_by_a_second_capture(desk: Desk) -> None:
    Pair(desk).save(Pair(desk).twin())
    loaded = desk.load()
    assert loaded.manifest().proofs() == {"moved": 2}
    assert desk.result(loaded, [9]) == [10]


def test_without_a_second_capture_live_memory_decides_and_the_file_says_so(desk: Desk) -> None:
    Pair(desk).save()
    loaded = desk.load()
    assert loaded.manifest().proofs() == {"allocation": 2}
    assert desk.result(loaded, [9]) == [10]


def test_a_number_that_looks_like_an_address_is_told_by_a_second_capture(desk: Desk) -> None:
    """The seed is the address of live memory: with one capture nothing tells it from one."""
    seed = desk.ints(0)
    one, two = (Pair(desk, seed=seed.address & 0x7FFF_FFFF) for _ in range(2))
    one.save(two.twin())
    loaded = desk.load()
    wanted = np.array([9], np.int32) + (seed.address & 0x7FFF_FFFF)
    assert desk.result(loaded, [9]) == wanted.astype(np.int32).tolist()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"seed": 2}, r"node 0 \(packed\), argument 2 \(seed\), offset 0: 0x1 .* 0x2 .*a seed"),
        ({"first": 3}, r"node 0 \(packed\), argument 0 \(first\), offset 0: 0x9 .* 0x3 "),
    ],
)
def test_what_differs_and_is_no_address_is_refused(
    desk: Desk, options: dict[str, Any], what: str
) -> None:
    other = Pair(desk, **options)
    with pytest.raises(GraphFileError, match=what):
        Pair(desk).save(other.twin())
    assert not desk.path.exists()


def save_gapped(desk: Desk, mine: bytes, theirs: bytes, **options: Any) -> None:
    one, two = (Pair(desk, rest=rest) for rest in (mine, theirs))
    one.save(two.twin(), **options)


def test_bytes_that_differ_without_an_effect_are_gaps(desk: Desk) -> None:
    """The flag and the numbers beside them are in the same words, and stay as they are."""
    mine, theirs = b"\1\2\3\4\5\6\x08\7\x11\x12", b"\1\2\xee\xdd\5\6\xcc\7\x11\x99"
    save_gapped(desk, mine, theirs)
    loaded = desk.load()
    assert [(s.offset, s.size) for s in loaded.manifest().graph.nodes[0].unused] == [
        *((18, 2), (22, 1), (25, 1)),
    ]
    assert desk.result(loaded, [9]) == [-9 + 6 + 7]
    assert "without effect +18:20, +22:23, +25:26" in file_text(desk.path)
    desk.check()
    with pytest.raises(GraphFileError, match="check=False tries nothing"):
        save_gapped(desk, mine, theirs, check=False)


def test_addresses_that_are_left_in_gaps_are_gaps(desk: Desk) -> None:
    """The last word is read by nobody.  It holds what was on the stack: addresses of something."""
    live, other = desk.ints(7), desk.ints(8)
    dead = b"\0" * 5 + b"\x7e\0\0"
    for mine, theirs in (
        (words((live,)), dead),  # only one of them is live
        (dead, words((live,))),
        (words((live,)), words((other,))),
    ):
        save_gapped(desk, b"\0" * 8 + mine, b"\0" * 8 + theirs)
        assert desk.result(desk.load(), [9]) == [9]
    old, new = desk.ints(9), desk.ints(10)
    held = words((old,))  # of an input, and in the twin of what is another one or none
    for mine, theirs in ((held, held), (held, words((live,))), (words((live,)), held)):
        one, two = (Pair(desk, rest=b"\0" * 8 + rest) for rest in (mine, theirs))
        one.save(two.twin(old=new), more={"old": old})
        assert desk.result(desk.load(), [5]) == [5]


@pytest.mark.parametrize(
    ("mine", "theirs", "where"),
    [
        pytest.param(b"\0", b"\1", 16, id="it is used"),
        pytest.param(b"\1\2", b"\2\2", 16, id="it is a flag that other values set too"),
        pytest.param(b"\0\0\0\0\0\1\0\2", b"\0\0\0\0\0\2\0\1", 21, id="they undo each other"),
        pytest.param(b"\0\0\0\0\3", b"\0\0\0\0\4", 20, id="only other values have an effect"),
        pytest.param(
            *(b"\0\0\0\0\0\0\0\0\x99", b"\0\0\0\0\0\0\0\0\x98", 24),
            id="another value ends the process",
            marks=pytest.mark.fresh_check,
        ),
    ],
)
def test_bytes_that_differ_and_have_an_effect_are_refused(
    desk: Desk, mine: bytes, theirs: bytes, where: int
) -> None:
    wanted = (
        rf"node 0 \(gapped\), argument 0 \(all\), offset {where}.*a seed, a counter or a handle"
    )
    with pytest.raises(GraphFileError, match=rf"{wanted}.*the results depend on it"):
        save_gapped(desk, mine, theirs)
    assert list(desk.path.parent.iterdir()) == []


def branched(desk: Desk, bodies: int, x: ost.Buffer) -> ost.Graph:
    graph = ost.Graph.create(desk.device)
    branch = graph.add_conditional("if", graph.condition(1), size=bodies)
    for body in branch.bodies:
        body.add_kernel(desk.kernel(affine), ONE, x, x, 2, 0, 1)
    return graph


def test_a_twin_with_another_number_of_bodies_is_of_other_work(desk: Desk) -> None:
    x = desk.ints(1)
    graph, other = (branched(desk, n, x) for n in (1, 2))
    for one, two in ((graph, other), (other, graph)):
        with pytest.raises(GraphFileError, match=r"node 0 .* bodies, and . in the other"):
            desk.save(one, inputs={"x": x}, outputs={"x": x}, twin=ost.graphfile.Twin(two))


def test_twins_must_be_of_the_same_work(desk: Desk, work: Work) -> None:
    one, two = (Pair(desk) for _ in range(2))
    with pytest.raises(GraphFileError, match="has 1 nodes, and 3 in the other"):
        one.save(ost.graphfile.Twin(work.graph))
    with pytest.raises(GraphFileError, match=r"points 0 bytes into 'x' .* 0 bytes into 'y'"):
        one.save(two.twin(x=two.y, y=two.x))
    with pytest.raises(GraphFileError, match="names z"):
        one.save(ost.graphfile.Twin(two.graph, {"z": two.y}))
    with pytest.raises(GraphFileError, match="lies in 'x' in both captures"):
        one.save(one.twin(x=two.x, y=two.y))


# --------------------------------------------------------------------------------------- refused


def test_memory_that_is_read_and_has_no_name_is_refused(desk: Desk, work: Work) -> None:
    with pytest.raises(
        GraphFileError, match=r"12 bytes at 0x\w+ \(used by node 1 \(add\)\) is only"
    ):
        work.save(constants={})
    assert not desk.path.exists()
    assert list(desk.path.parent.iterdir()) == []


@pytest.mark.fresh_check
def test_memory_that_results_depend_on_is_named_by_the_check(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hidden` is read before it is written, which no signature tells.  What the checking process
    wrote is there too: a GPU writes there which assertion of a kernel failed."""
    print_first = "import sys; print('Assertion `i < n` failed', file=sys.stderr);"
    monkeypatch.setattr(saving, "_PROGRAM", print_first + saving._PROGRAM)
    x, hidden, y = desk.ints(1), desk.ints(50), desk.ints(0)
    innocent = desk.ints(0)
    with ost.capture(desk.stream) as under_way:
        ost.launch(desk.stream, desk.kernel(affine), ONE, innocent, x, 1, 0, 1)
        ost.launch(desk.stream, desk.kernel(add), ONE, innocent, hidden, 1)
        ost.copy(desk.stream, y, hidden)
    with pytest.raises(
        GraphFileError,
        match=rf"bytes of 'y' differ.*`i < n` failed.*without a name.*{hidden.address:#x} .*node 1",
    ):
        desk.save(under_way.graph, inputs={"x": x}, outputs={"y": y})
    assert not desk.path.exists()


@pytest.mark.parametrize("made", [last_one, nonzero, once], ids=lambda made: made.name)
def test_memory_that_must_hold_something_is_named_by_the_check(
    desk: Desk, made: ost.HostKernel
) -> None:
    """A counter that each launch leaves at zero, a flag, and a mark that a launch leaves."""
    x, y = desk.ints(1), desk.ints(0)
    hidden = desk.ints(int(made is nonzero))
    graph = desk.captured((made, hidden, y, x))
    with pytest.raises(
        GraphFileError, match=rf"bytes of 'y' differ.*without a name.*{hidden.address:#x} .*node 0"
    ):
        desk.save(graph, inputs={"x": x}, outputs={"y": y})
    assert not desk.path.exists()
    if made is last_one:  # as an input it has the content that it needs
        desk.save(graph, inputs={"x": x, "n": hidden}, outputs={"y": y, "n": hidden})
        assert desk.result(desk.load(), [5]) == [6]


def save_pooled(desk: Desk, *, names: int = 1) -> None:
    """y = spread(spread(x)), where y is where the intermediate values begin that it is made of: the
    pool of a framework gives memory again that is not needed any more, also to something smaller.
    """
    arena, x = desk.device.zeros(96, np.int32), desk.device.array(np.arange(32), np.int32)
    wide, other = arena.view(0, 32, np.int32), arena.view(128, 32, np.int32)
    outputs = {name: arena.view(32 * n, 4, np.int32) for n, name in enumerate(("y", "z")[:names])}
    graph = desk.captured(
        (spread, words((x, wide)), 32, 2),
        (spread, words((wide, other)), 32, 3),
        *((spread, words((other, out)), 4, 1 + 4 * n) for n, out in enumerate(outputs.values())),
    )
    desk.save(graph, inputs={"x": x}, outputs=outputs)


@pytest.mark.parametrize("names", [1, 2])
def test_a_result_in_the_place_of_something_larger(desk: Desk, names: int) -> None:
    """Nothing but a launch tells that the pointer to `y` is also one to 32 numbers."""
    save_pooled(desk, names=names)
    loaded = desk.load()
    block = loaded.manifest().blocks[loaded.manifest().buffers[1].block]
    assert block.nbytes == 4 * 96
    first = (np.arange(32) + 5) * 2 + np.arange(32)
    second = (first * 3 + np.arange(32))[:4]
    assert desk.result(loaded, np.arange(32) + 5) == (second + np.arange(4)).tolist()
    if names == 2:
        z = second * 5 + np.arange(4)
        assert loaded.outputs["z"].to_numpy(desk.stream).tolist() == z.tolist()
    desk.check()


def test_indices_outside_of_a_result_that_has_their_place(desk: Desk) -> None:
    """The check finds where they are: it is not ended by a kernel that asserts them."""
    arena, x = desk.device.zeros(64, np.int32), desk.device.array(np.arange(32), np.int32)
    y, indices = arena.view(0, 4, np.int32), arena.view(64, 4, np.int32)
    graph = desk.captured(
        (spread, words((x, y)), 32, 0),  # also to `indices`
        (picked, words((indices, y)), 4),
    )
    desk.save(graph, inputs={"x": x}, outputs={"y": y})
    loaded = desk.load()
    assert desk.result(loaded, list(range(32))) == [256, 289, 324, 361]


def test_what_leaves_its_block_does_not_pass_a_check(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that says too little, as those of older releases may."""
    monkeypatch.setattr("ostinato.graphfile.saving._check", lambda *rest: {})
    save_pooled(desk)
    with pytest.raises(
        GraphFileError, match="writes outside of its memory, 0 bytes before and 112 behind"
    ):
        desk.check()


def test_an_output_that_is_not_wholly_written_is_named(desk: Desk) -> None:
    x, y = desk.ints(1, 1), desk.ints(0, 7)
    graph = desk.captured((affine, y, x, 1, 0, 1))
    with pytest.raises(GraphFileError, match=r"what y held before .*name it as an input too"):
        desk.save(graph, inputs={"x": x}, outputs={"y": y})
    desk.save(graph, inputs={"x": x, "y": y}, outputs={"y": y})


def test_a_constant_that_is_written_is_refused(desk: Desk) -> None:
    x, w = desk.ints(1), desk.ints(5)
    graph = desk.captured((add, x, w, 1))
    with pytest.raises(GraphFileError, match="writes into the constant 'w'"):
        desk.save(graph, inputs={"x": x}, constants={"w": w})
    assert desk.device.to_numpy(w).tolist() == [5]


RUNS: list[int] = []


@ost.host_kernel("y: *i32")
def unsteady(_: Any, y: Any) -> None:
    RUNS.append(0)
    y[0] = len(RUNS)


def test_results_that_differ_from_run_to_run_are_refused(desk: Desk) -> None:
    y = desk.ints(0)
    graph = desk.captured((unsteady, y))
    with pytest.raises(GraphFileError, match=r"two launches .* different bytes in 'y'"):
        desk.save(graph, outputs={"y": y})
    desk.save(graph, outputs={"y": y}, check=False)
    assert not desk.load().manifest().checked
    with pytest.raises(GraphFileError, match="check=False"):
        desk.check()


def hosted(desk: Desk) -> ost.Graph:
    graph = ost.Graph.create(desk.device)
    graph.add_call(lambda: None)
    return graph


def local(desk: Desk) -> ost.Graph:
    @ost.host_kernel("x: *i32")
    def inside(_: Any, x: Any) -> None: ...

    graph = ost.Graph.create(desk.device)
    graph.add_kernel(desk.kernel(inside), ONE, desk.ints(1))
    return graph


def closed(desk: Desk) -> ost.Graph:
    y = desk.ints(1)
    graph = ost.Graph.create(desk.device)
    graph.add(MemcpyNodeParams(y.address, y.address, 4))
    y.close()
    desk.device.synchronize()
    return graph


def foreign_condition(desk: Desk) -> ost.Graph:
    graph = ost.Graph.create(desk.device)
    graph.add_kernel(desk.kernel(choose), ONE, desk.ints(1), graph.condition())
    return graph


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (hosted, "calls a function of this process"),
        (local, "another process could not find the kernel 'inside'"),
        (closed, "is in no live memory"),
        (foreign_condition, "has no conditional node in this graph"),
    ],
)
def test_what_no_file_can_have_is_refused_with_the_reason(
    desk: Desk, make: Callable[[Desk], ost.Graph], why: str
) -> None:
    with pytest.raises(GraphFileError, match=f"node 0 .*{why}"):
        ost.graphfile.save(make(desk), desk.path)


def test_two_names_for_two_things(desk: Desk, work: Work) -> None:
    with pytest.raises(InputError, match="'x' is the name of two buffers"):
        work.save(outputs={"x": work.y})
    with pytest.raises(InputError, match="a constant and something else"):
        work.save(outputs={"w": work.w})
    with pytest.raises(InputError, match="keeping="):
        work.save(keeping="somewhere")


# ------------------------------------------------------------------------------------- the check


def test_a_file_is_checked_again(desk: Desk, work: Work) -> None:
    work.save()
    desk.check()
    work.save(keeping="by name")
    desk.check(constants={"w": work.w})
    wrong = desk.ints(0, 0, 0)
    with pytest.raises(GraphFileError, match="bytes of 'y' differ"):
        desk.check(constants={"w": wrong})


def test_files_that_others_may_write_are_not_loaded(desk: Desk, work: Work) -> None:
    work.save()
    desk.path.chmod(0o666)
    with pytest.raises(GraphFileError, match="other users may write to it"):
        desk.load()
    with pytest.raises(GraphFileError, match="no such file"):
        ost.graphfile.load(desk.device, desk.path.with_name("none.graph"))


def test_what_is_no_file_is_refused_in_words(desk: Desk, work: Work) -> None:
    work.save(keeping="by name")
    folder, link = desk.path.parent, desk.path.with_name("link.graph")
    link.symlink_to(desk.path)
    for graph in (folder, link):
        with pytest.raises(GraphFileError, match="it is not a regular file; a graph file is a"):
            ost.graphfile.load(desk.device, graph)
    for constants in (folder, folder / "none"):
        with pytest.raises(GraphFileError, match=r"the constants in .* cannot be read"):
            desk.load(constants=constants)


def test_a_full_disk_leaves_the_old_file_alone(desk: Desk, work: Work) -> None:
    desk.path.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))  # of each file
    try:
        with pytest.raises(GraphFileError, match=r"cannot be written .*; nothing was saved"):
            work.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [one.name for one in desk.path.parent.iterdir()] == [desk.path.name]
    assert desk.path.read_bytes() == b"old"


@pytest.mark.parametrize("check", [True, False])
def test_a_file_that_cannot_be_written_is_named_as_it_was_given(
    desk: Desk, work: Work, check: bool
) -> None:
    path = desk.folder / "no such folder" / "one.graph"
    with pytest.raises(GraphFileError, match=rf"{path} cannot be written"):
        work.save(path, check=check)


def test_files_share_what_they_have_in_common(desk: Desk, work: Work) -> None:
    """Of x and w each once; of y the digest alone.  Kernels of the host have no images."""
    folder = desk.folder / "shared"
    other = desk.folder / "other.graph"
    work.save(code=folder)
    work.save(other, code=folder)
    assert sorted(p.stat().st_size for p in folder.iterdir()) == [12, 12]
    ost.graphfile.check(desk.device, other, code=folder)
    loaded = ost.graphfile.load(desk.device, other, code=folder)
    assert loaded.inputs["x"].to_numpy(desk.stream).tolist() == [1, 2, 3]
    assert desk.result(loaded, [0, 0, 0]) == [10, 20, 30]
    with pytest.raises(GraphFileError, match=r"'inputs/x' is not in it; give .* \(code=\)"):
        ost.graphfile.load(desk.device, other)
    shared = sorted(folder.iterdir())
    (x,) = (p for p in shared if p.read_bytes() == np.array([1, 2, 3], np.int32).tobytes())
    x.write_bytes(np.array([7, 7, 7], np.int32).tobytes())
    with pytest.raises(GraphFileError, match="'inputs/x' is not what its digest says"):
        ost.graphfile.load(desk.device, other, code=folder)
    work.save(other, code=folder)  # what was changed is written again
    ost.graphfile.check(desk.device, other, code=folder)
    x.unlink()
    with pytest.raises(GraphFileError, match="'inputs/x' is not there"):
        ost.graphfile.load(desk.device, other, code=folder)


# ---------------------------------------------------------------------------------- what is bound


class Array:
    """Another library's array over memory of ours."""

    def __init__(self, buffer: ost.Buffer, typestr: str, shape: Any, strides: Any = None) -> None:
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "data": (buffer.address, False),
            "typestr": typestr,
            "shape": shape,
            "strides": strides,
            "version": 3,
        }


@pytest.mark.parametrize(
    ("typestr", "shape", "strides"),
    [
        pytest.param("<f4", (2, 3), None, id="another type"),
        pytest.param("<u4", (2, 3), None, id="another sign"),
        pytest.param("<i2", (4, 3), None, id="smaller elements"),
        pytest.param("<i4", (3, 2), None, id="another shape"),
        pytest.param("<i4", (6,), None, id="flat"),
        pytest.param("<i4", (2, 3), (4, 8), id="another order"),
        pytest.param("<V2", (2, 6), None, id="a type that NumPy does not have, of another size"),
        pytest.param("<c4", (2, 3), None, id="another kind of one size"),
    ],
)
@pytest.mark.parametrize("name", ["x", "w"])
def test_memory_of_another_look_is_refused(
    desk: Desk, work: Work, name: str, typestr: str, shape: Any, strides: Any
) -> None:
    """It would be read as something else."""
    device = desk.device
    whole = device.array(np.arange(6).reshape(2, 3), np.int32)
    named: dict[str, Any] = {"x": whole, "w": device.array(np.ones((2, 3)), np.int32)}
    graph = ost.Graph.create(device)
    graph.add_kernel(desk.kernel(add), ONE, named["x"], y := desk.ints(*[0] * 6), 6)
    graph.add_kernel(desk.kernel(add), ONE, named["w"], y, 6, after=graph.nodes()[-1:])
    ost.graphfile.save(
        graph,
        desk.path,
        inputs={"x": named["x"], "y": y},
        outputs={"y": y},
        constants={"w": named["w"]},
        keeping="by name",
    )
    other = Array(desk.ints(*[0] * 6), typestr, shape, strides)
    with pytest.raises(InputError, match=rf"'{name}' is .*was captured with <i4\[2, 3\]"):
        desk.load(buffers={**named, name: other})
    for fits in (
        Array(desk.ints(*[0] * 6), "<i4", (2, 3), (12, 4)),
        Array(desk.ints(*[0] * 9), "<i4", (3, 3)),  # more rows
        Array(desk.ints(*[0] * 6), "<V4", (2, 3)),
        Array(desk.ints(*[0] * 6), "|u1", (24,)),  # bytes
        ost.MemoryRange((held := desk.ints(*[0] * 6)).address, 24),
    ):
        desk.load(buffers={**named, name: fits})
    del held


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "F4", "C64", "of another time"])
def test_a_file_of_constants_may_have_types_that_numpy_has_not(
    desk: Desk, work: Work, kind: str
) -> None:
    def weights(name: str, other: str) -> Path:
        ours = {"dtype": "I32", "shape": [3], "data_offsets": [0, 12]}
        theirs = {"dtype": kind, "shape": [12], "data_offsets": [12, 24]}
        if kind in ("F4", "C64"):
            theirs["shape"] = [24] if kind == "F4" else [1]
            theirs["data_offsets"] = [12, 24 if kind == "F4" else 20]
        header = json.dumps({name: ours, other: theirs}).encode()
        made = desk.folder / "weights.safetensors"
        content = np.array([8, 8, 8, 0, 0, 0], np.int32).tobytes()
        made.write_bytes(len(header).to_bytes(8, "little") + header + content)
        return made

    work.save(keeping="by name")
    loaded = desk.load(constants=weights("w", "other"))
    assert desk.result(loaded, [1, 1, 1]) == [10, 10, 10]
    with pytest.raises(InputError, match=r"captured with <i4\[3\]"):  # as many bytes as it has
        desk.load(constants=weights("other", "w"))


@pytest.mark.parametrize("from_file", [False, True])
def test_values_of_stored_constants_are_used_in_place_of_what_the_file_has(
    desk: Desk, work: Work, from_file: bool
) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file

    work.save()
    given: Any = {"w": np.array([8, 8, 8], np.int32)}
    if from_file:
        save_file(given, desk.folder / "weights.safetensors")
        given = desk.folder / "weights.safetensors"
    loaded = desk.load(constants=given)
    assert desk.result(loaded, [1, 1, 1]) == [10, 10, 10]
    with pytest.raises(GraphFileError, match="does not give the stored results"):
        desk.check(constants=given)


@pytest.mark.parametrize("name", ["x", "weight"])
@pytest.mark.parametrize("use", [ost.graphfile.load, ost.graphfile.check])
def test_values_of_what_is_no_constant_are_refused(
    desk: Desk, work: Work, use: Callable[..., object], name: str
) -> None:
    work.save()
    with pytest.raises(InputError, match=rf"no constant {name}; its constants: w"):
        use(desk.device, desk.path, constants={name: np.ones(3, np.int32)})


def test_what_does_not_fit_the_name_that_it_is_given_for_is_refused(desk: Desk, work: Work) -> None:
    work.save(keeping="by name")
    gone = desk.ints(1, 2, 3)
    where = gone.range
    gone.close()
    desk.device.synchronize()
    elsewhere, w = np.zeros(3, np.int32), {"w": work.w}
    not_live = r"'w' is at .*no live memory of host"
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # buffers and constants
        ({"x": desk.ints(1)}, w, "'x' has 4 bytes, and the graph was captured with 12"),
        ({"nothing": work.x}, w, "names no nothing; it names x, y, w"),
        ({"x": desk.device.zeros(16, "bytes").view(2, 12)}, w, "aligned to"),
        ({}, {"w": np.ones(3, np.float32)}, r"'w' is <f4\[3\], .* captured with <i4\[3\]"),
        ({}, {"w": gone}, not_live),
        ({}, {"w": where}, not_live),
        ({}, {"w": ost.MemoryRange(elsewhere.ctypes.data, 12)}, not_live),
        (w, {"w": np.zeros(3, "i4")}, "w: given as buffers and as constants"),
    ]
    with ost.open_device("host") as other:
        refused.append(({}, {"w": other.array([1, 2, 3], "i4")}, "'w' is memory of another device"))
        for buffers, constants, why in refused:
            with pytest.raises(InputError, match=why):
                desk.load(buffers=buffers, constants=constants)


def test_memory_that_overlaps_is_refused(desk: Desk) -> None:
    """In the graph nothing orders what writes the one and what reads the other."""
    device, n = desk.device, 80
    x, v, w, y = (desk.ints(*[k] * n) for k in (1, 2, 3, 0))
    graph = ost.Graph.create(device)
    graph.add_kernel(desk.kernel(affine), ONE, y, x, 1, 0, n)
    for constant in (v, w):
        graph.add_kernel(desk.kernel(add), ONE, constant, y, n, after=graph.nodes()[-1:])
    desk.save(graph, inputs={"x": x}, outputs={"y": y}, constants={"v": v, "w": w})
    whole = desk.ints(*range(5 * 64))
    for buffers in (
        {"x": whole[:n], "y": whole[:n]},
        {"x": whole[64 : 64 + n], "y": whole[:n]},
        {"x": whole, "y": whole[64:]},
        {"y": whole[64:], "w": whole[128:]},
        {"v": whole[64:], "w": whole[64:], "x": whole[128:]},
    ):
        with pytest.raises(InputError, match="overlap"):
            desk.load(buffers=buffers)
    beside = desk.load(buffers={"x": whole[:n], "y": whole[128 : 128 + n]})
    with beside.instantiate() as run:
        run.launch(desk.stream)
        found = whole.to_numpy(desk.stream).tolist()
        assert found[128 : 128 + n] == [k + 5 for k in range(n)]
    tied = desk.ints(*[5] * n)  # two weights of a model may be one
    loaded = desk.load(constants={"v": tied, "w": tied})
    assert desk.result(loaded, list(range(n))) == [k + 10 for k in range(n)]


def test_what_is_loaded_twice_is_two_graphs(desk: Desk, work: Work) -> None:
    work.save()
    one, two = (desk.load() for _ in range(2))
    assert desk.result(one, [1, 1, 1]) == [12, 22, 32]
    assert desk.result(two, [2, 2, 2]) == [14, 24, 34]
    assert one.outputs["y"].to_numpy(desk.stream).tolist() == [12, 22, 32]
    run = two.instantiate()
    other = desk.ints(0, 0, 0)
    one.close()
    two.close()
    two.inputs["x"].set([3, 3, 3], desk.stream)
    run.launch(desk.stream)  # an executable goes on without its definition
    assert two.outputs["y"].to_numpy(desk.stream).tolist() == [16, 26, 36]
    with pytest.raises(ClosedError):
        run.rebind({two.constants["w"]: other})
    with pytest.raises(ClosedError):
        one.instantiate()
    run.launch(desk.stream)
    assert two.outputs["y"].to_numpy(desk.stream).tolist() == [16, 26, 36]


def test_a_file_does_not_take_away_what_another_files_kernel_needs(desk: Desk) -> None:
    """Both have one kernel, and each what was set on it when it was saved."""
    made = desk.kernel(big)
    y = desk.device.zeros(1, np.float32)
    paths = {nbytes: desk.folder / f"{nbytes}.graph" for nbytes in (60_000, 100_000)}
    for nbytes, desk.path in paths.items():
        made.allow_shared(nbytes)
        with ost.capture(desk.stream) as under_way:
            ost.launch(desk.stream, made, ost.LaunchConfig(1, 1, nbytes), y)
        desk.save(under_way.graph, outputs={"y": y}, check=False)
    with ost.open_device("host") as other:
        there = other.create_stream()
        much, less = (ost.graphfile.load(other, paths[n]) for n in (100_000, 60_000))
        for loaded, nbytes in ((much, 100_000), (less, 60_000)):
            loaded.instantiate().launch(there)
            assert loaded.outputs["y"].to_numpy(there).tolist() == [nbytes]
        again = desk.folder / "again.graph"
        ost.graphfile.save(much, again, outputs=much.outputs, check=False)
        ost.graphfile.load(other, again).instantiate().launch(there)


def test_a_loaded_graph_is_saved_again(desk: Desk, work: Work) -> None:
    work.save()
    first = desk.load()
    ost.graphfile.save(
        first,
        desk.folder / "two.graph",
        inputs=first.inputs,
        outputs=first.outputs,
        constants=first.constants,
    )
    second = ost.graphfile.load(desk.device, desk.folder / "two.graph")
    assert desk.result(second, [5, 5, 5]) == [20, 30, 40]
    assert second.digest() == work.graph.digest()


def test_memory_without_bytes(desk: Desk) -> None:
    x, y, nothing = desk.ints(4), desk.ints(0), desk.device.empty(0, np.int32)
    null = ost.MemoryRange(0, 0)
    graph = desk.captured((add, nothing, y, 0), (affine, y, x, 3, 0, 1))
    desk.save(graph, inputs={"x": x, "nothing": nothing, "null": null}, outputs={"y": y})
    loaded = desk.load()
    assert desk.result(loaded, [5]) == [15]
    given = {"nothing": desk.device.empty(0, np.int32), "null": ost.MemoryRange(0, 0)}
    assert desk.result(desk.load(buffers=given), [6]) == [18]


def test_the_cuda_driver_gets_what_was_saved(desk: Desk) -> None:
    """On a libcuda that runs nothing: each node's bytes and shape are those of the graph, with the
    addresses of this loading's memory."""
    library = build(desk.folder)
    if library is None:
        pytest.skip("needs a C compiler")
    with stub_device(library) as stub:
        device, desk.stream = stub.device, stub.device.create_stream()
        x, y = device.zeros(64, "f4"), device.zeros(64, "f4")
        with ost.capture(desk.stream) as capture:
            for row in range(20):
                given = (x, y, y) if row % 3 else (y, x[4:], y[8:])
                config = ost.LaunchConfig(1 + row, 32, shared=row)
                ost.launch(desk.stream, stub.kernel, config, *given, row)
        named = {"inputs": {"x": x}, "outputs": {"y": y}}
        desk.save(capture.graph, **named, check=False)
        loaded = ost.graphfile.load(device, desk.path)
        moves = {x: loaded.inputs["x"], y: loaded.outputs["y"]}
        run, other = capture.graph.instantiate(), loaded.instantiate()
        run.rebind(moves)
        assert [stub.holds(other, row) for row in range(20)] == [
            stub.holds(run, row) for row in range(20)
        ]
        assert loaded.nodes()[7].arguments[3].value == 7 and loaded.nodes()[7].signature is not None
        driver = device.context.driver
        table = KernelTable(
            [stub.kernel.function], [ost.LaunchConfig(1, 1)], [()], [True], bytearray(27), [0], [27]
        )
        with pytest.raises(DriverError, match="27 bytes; the function takes 4 of 28"):
            driver.graph_add_kernels(loaded.handle, [], table, [(0, [])])
