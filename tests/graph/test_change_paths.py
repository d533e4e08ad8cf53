"""A change by any path leaves what a graph made anew would hold: in the driver and in the shadow.

On the host driver, and on the CUDA driver with a libcuda that holds graphs and runs nothing
(`tests.emulator.stub`), whose executables can be read back.
"""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import ostinato as ost
from benchmarks.uncompiled import without_extension
from ostinato.driver import launcher as driver_launcher
from ostinato.driver.api import KernelArguments, KernelNodeParams
from ostinato.errors import ClosedError, GraphError, InputError, NodeKindError, UpdateRefusedError
from ostinato.modules import Kernel
from tests.emulator.stub import SIGNATURE, Stub, stub_device
from tests.interrupted import interrupt

SOURCE = Path(ost.__file__).parent
NODES = 12
CELLS = 8
CELL = 64


@ost.host_kernel(SIGNATURE)
def blend(launch, a, b, out, n):
    out[:n] = a[:n] + b[:n]


class Rig:
    """A device, one kernel, and executables of chains of it."""

    def __init__(self, device: ost.Device, kernel: Kernel, stub: Stub | None) -> None:
        self.device, self.kernel, self.stub = device, kernel, stub
        self.stream = device.create_stream()

    def buffers(self) -> list[ost.Buffer]:
        return [self.device.zeros(CELL, np.float32) for _ in range(CELLS)]

    def graph(self, launches: list[Launch]) -> ost.Graph:
        with ost.capture(self.stream) as capture:
            for one in launches:
                config = ost.LaunchConfig(one.grid, 32)
                ost.launch(self.stream, self.kernel, config, one.a, one.b, one.out, one.n)
        return capture.graph

    def check(self, run: ost.GraphExec, launches: list[Launch]) -> None:
        """What it holds is what a graph of these launches holds."""
        with self.graph(launches) as graph:
            for index, node in enumerate(graph.nodes()):
                kernel = node.kernel
                held = run.params(index)
                assert isinstance(held, type(kernel))
                assert held.arguments == kernel.arguments
                assert (held.function, held.config) == (kernel.function, kernel.config)
                if self.stub is not None:
                    shape = (*kernel.config.grid, *kernel.config.block, kernel.config.shared)
                    assert self.stub.holds(run, index) == (kernel.arguments.data, shape)


class Launch:
    def __init__(self, a: ost.Buffer, b: ost.Buffer, out: ost.Buffer, n: int, grid: int) -> None:
        self.a, self.b, self.out, self.n, self.grid = a, b, out, n, grid

    def copy(self) -> Launch:
        return Launch(self.a, self.b, self.out, self.n, self.grid)


@pytest.fixture(params=["host", "cuda compiled", "cuda python"])
def rig(request: pytest.FixtureRequest, library: Path) -> Iterator[Rig]:
    if request.param == "host":
        with ost.open_device("host") as device:
            source = ost.Source(host=[blend], name="blend")
            yield Rig(device, device.modules.get_or_compile(source, "blend"), None)
        return
    if request.param == "cuda python":
        with without_extension(), stub_device(library) as stub:
            yield Rig(stub.device, stub.kernel, stub)
        return
    if not driver_launcher.compiled():
        pytest.skip(driver_launcher.description())
    with stub_device(library) as stub:
        yield Rig(stub.device, stub.kernel, stub)


def test_a_graph_read_at_once_is_what_its_nodes_are(rig: Rig) -> None:
    """Also kernels whose arguments are packed, as libraries pack theirs."""
    driver, kernel = rig.device.driver, rig.kernel
    layout, data = kernel.slots, bytes(range(28))
    given = [
        KernelArguments(data, layout),
        KernelArguments(data, layout, packed=True),
        KernelArguments(bytes(28), layout),
    ]
    if rig.stub is not None:  # the host's kernels take what has a layout
        given += [KernelArguments(bytes(range(n)), (), packed=True) for n in (28, 32)]
    with ost.Graph.create(rig.device) as graph:
        nodes = []
        for number, arguments in enumerate(given):
            config = ost.LaunchConfig((number + 1, 2, 1), 32, shared=16 * number)
            params = KernelNodeParams(kernel.function, config, arguments)
            nodes.append(driver.graph_add_node(graph.handle, nodes[-1:], params))
        frozen = driver.graph_freeze(graph.handle)
        found = [frozen.params(index) for index in range(len(given))]
        assert found == [driver.node_params(node) for node in nodes]
        assert [one.arguments.data for one in found] == [one.data for one in given]
        assert [one.arguments.packed for one in found] == [one.packed for one in given]


def launches(rng: random.Random, cells: list[ost.Buffer]) -> list[Launch]:
    return [
        Launch(*rng.choices(cells, k=3), rng.randrange(1, CELL), rng.randrange(1, 4))
        for _ in range(NODES)
    ]


def change(rig: Rig, rng: random.Random, run: ost.GraphExec, state: list[Launch], cells: list):
    """One change by a path drawn at random.  Returns the state that it leads to, and the call."""
    new = [one.copy() for one in state]
    index = rng.randrange(NODES)
    one = new[index]
    what = rng.choice(["set", "patcher", "set_all", "rebind", "parameters", "config", "update"])
    if what in ("set", "patcher"):
        name = rng.choice(["a", "b", "out", "n"])
        value = rng.randrange(1, CELL) if name == "n" else rng.choice(cells)
        setattr(one, name, value)
        place = rng.choice([name, ["a", "b", "out", "n"].index(name)])
        node = rng.choice([index, run.graph.node(index)])
        if what == "set":
            return new, lambda: run.set(node, place, value)
        return new, lambda: run.patcher(node, place)(value)
    if what == "set_all":
        patches = []
        for _ in range(rng.randrange(1, 10)):
            which, name = rng.randrange(NODES), rng.choice(["a", "n", "out"])
            value = rng.randrange(1, CELL) if name == "n" else rng.choice(cells)
            setattr(new[which], name, value)
            patches.append((which, name, value))
        return new, lambda: run.set_all(patches)
    if what == "rebind":
        old, other = rng.sample(cells, 2)
        for launch in new:
            for name in ("a", "b", "out"):
                if getattr(launch, name) is old:
                    setattr(launch, name, other)
        return new, lambda: run.rebind({old: other})
    if what == "parameters":
        one.a, one.n, one.grid = rng.choice(cells), rng.randrange(1, CELL), rng.randrange(1, 4)
        config = ost.LaunchConfig(one.grid, 32)
        operation = ost.prepare(rig.kernel, config, one.a, one.b, one.out, one.n)
        return new, lambda: run.set(index, operation)
    if what == "config":
        one.grid = rng.randrange(1, 4)
        return new, lambda: run.set(index, config=ost.LaunchConfig(one.grid, 32))
    new = launches(rng, cells)
    graph = rig.graph(new)
    return new, lambda: run.update(graph)


@pytest.mark.parametrize("seed", range(6))
def test_any_path_equals_a_graph_made_anew(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    cells = rig.buffers()
    state = launches(rng, cells)
    with rig.graph(state) as graph, graph.instantiate() as run:
        for step in range(60):
            new, call = change(rig, rng, run, state, cells)
            refused = rig.stub is not None and rng.random() < 0.25
            if refused and rig.stub is not None:
                rig.stub.refuse(1, node=rng.randrange(NODES))
            try:
                call()
                state = new
            except UpdateRefusedError:
                assert refused
            finally:
                if rig.stub is not None:
                    rig.stub.refuse(0)
            if step % 3 == 0:
                rig.check(run, state)
        rig.check(run, state)


def test_a_refusal_in_the_middle_of_many_patches_changes_nothing(rig: Rig) -> None:
    if rig.stub is None:
        pytest.skip("the host driver refuses nothing here")
    cells, rng = rig.buffers(), random.Random(1)
    state = launches(rng, cells)
    with rig.graph(state) as graph, graph.instantiate() as run:
        for node in (0, 1, 5, NODES - 1):
            rig.stub.refuse(1, node=node)
            with pytest.raises(UpdateRefusedError):
                run.set_all((i, "a", cells[0]) for i in range(NODES))
            rig.stub.refuse(1, node=node)
            with pytest.raises(UpdateRefusedError):
                run.rebind({cell: cells[i - 1] for i, cell in enumerate(cells)})
            rig.stub.refuse(0)
            rig.check(run, state)
            assert run.usable()


def test_what_cannot_be_taken_back_is_launched_no_more(rig: Rig) -> None:
    if rig.stub is None:
        pytest.skip("the host driver refuses nothing here")
    cells, rng = rig.buffers(), random.Random(2)
    with rig.graph(launches(rng, cells)) as graph, graph.instantiate() as run:
        rig.stub.refuse(1, after=3)
        with pytest.raises(GraphError, match="instantiate its graph again"):
            run.set_all((i, "a", cells[0]) for i in range(NODES))
        rig.stub.refuse(0)
        with pytest.raises(GraphError, match="instantiate its graph again"):
            run.launch(rig.stream)


def test_a_patcher_refuses_what_a_patch_refuses(rig: Rig) -> None:
    cells, rng = rig.buffers(), random.Random(3)
    state = launches(rng, cells)
    with rig.graph(state) as graph, graph.instantiate() as run:
        for node, argument in ((0, "c"), (0, 4), (NODES, "a"), (0, -1)):
            with pytest.raises(InputError):
                run.patcher(node, argument)
        patch, point = run.patcher(0, "n"), run.patcher(0, "a")
        for value in (-1, 1.5, 1 << 32, "text", None):
            with pytest.raises(InputError):
                patch(value)
        for value in ("text", 1.5, None):
            with pytest.raises(InputError):
                point(value)
        gone = rig.device.zeros(CELL, np.float32)
        gone.close()
        with pytest.raises(ClosedError):
            point(gone)
        rig.check(run, state)
    with pytest.raises(ClosedError):
        patch(3)


def test_a_rebinding_is_told_after_its_definition_is_closed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nodes are gone then, and libcuda may crash on one: nothing may be asked of them."""
    cells = rig.buffers()
    graph = rig.graph([Launch(*cells[:3], 1, 1) for _ in range(2)])
    run = graph.instantiate()
    report = run.rebind({cells[0]: cells[3]})
    graph.close()

    def gone(*arguments: object) -> None:
        raise AssertionError(f"a node that is gone was asked for: {arguments}")

    for call in ("node_kind", "node_params", "words_of"):
        if hasattr(rig.device.driver, call):
            monkeypatch.setattr(rig.device.driver, call, gone)
    assert [(word.node_index, word.node_name, word.place) for word in report.words] == [
        (index, "blend", "argument 0 (a)") for index in range(2)
    ]
    assert run.touches(cells[3]) and not run.touches(cells[0])
    assert [touch.node_name for touch in run.manifest()] == ["blend"] * 6
    cells[3].close()
    with pytest.raises(ClosedError, match=r"node 0 \(blend\) argument 0 points at memory that"):
        run.launch(rig.stream)


def test_a_rebinding_of_kernels_without_signatures(rig: Rig) -> None:
    """As other libraries make them, also with packed arguments."""
    driver, function = rig.device.driver, rig.kernel.function
    old, new, other = (rig.device.zeros(CELL, np.float32) for _ in range(3))
    with ost.Graph.create(rig.device) as made:
        given: list[bytes] = []
        for number, packed in enumerate((False, True, True, False)):
            words = old.address + 8 * number, other.address, old.address
            given.append(
                b"".join(word.to_bytes(8, "little") for word in words) + bytes([number] * 4)
            )
            arguments = KernelArguments(given[-1], rig.kernel.slots, packed=packed)
            config = ost.LaunchConfig(number + 1, 32)
            driver.graph_add_node(made.handle, (), KernelNodeParams(function, config, arguments))
        with ost.Graph.adopt(rig.device, made.handle, owner=made).instantiate() as run:
            report = run.rebind({old: new})
            assert (report.nodes, len(report.words), report.left) == (4, 8, ())
            for number, data in enumerate(given):
                moved = (old.address + 8 * number - old.address + new.address).to_bytes(8, "little")
                expected = moved + data[8:16] + new.address.to_bytes(8, "little") + data[24:]
                held = run.params(number)
                assert isinstance(held, KernelNodeParams)
                assert held.arguments.data == expected
                assert held.config.grid == (number + 1, 1, 1)
                if rig.stub is not None:
                    assert rig.stub.holds(run, number) == (
                        expected,
                        (number + 1, 1, 1, 32, 1, 1, 0),
                    )


def test_a_rebinding_follows_a_patch_that_nothing_read(rig: Rig) -> None:
    """Nothing asks what the node holds between a rebinding, the patch, and the next rebinding."""
    cells, rng = rig.buffers(), random.Random(10)
    state = launches(rng, cells[:2])
    with rig.graph(state) as graph, graph.instantiate() as run:
        run.rebind({cells[0]: cells[2], cells[1]: cells[3]})
        run.set(0, "a", cells[4])
        run.set(1, "b", cells[2])
        run.rebind({cells[4]: cells[5], cells[2]: cells[6]})
        became = {cells[0]: cells[6], cells[1]: cells[3]}
        for one in state:
            one.a, one.b, one.out = became[one.a], became[one.b], became[one.out]
        state[0].a, state[1].b = cells[5], cells[6]
        rig.check(run, state)


def test_a_second_rebinding_goes_through_few_files(rig: Rig) -> None:
    """Request, plan, words, shadow, and what memory is; behind them is the driver."""
    a, b, out, other = rig.buffers()[:4]
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(SOURCE):
            files.add(file.relative_to(SOURCE).as_posix())

    with rig.graph([Launch(a, b, out, CELL, 1)]) as graph, graph.instantiate() as run:
        run.rebind({a: other})
        sys.setprofile(note)
        try:
            run.rebind({other: a})
        finally:
            sys.setprofile(None)
        rig.check(run, [Launch(a, b, out, CELL, 1)])
    ours = {file for file in files if not file.startswith("driver/")}
    changing = {f"graph/{name}.py" for name in ("executable", "plan", "shadow", "words")}
    assert ours == changing | {"memory/buffer.py", "memory/ranges.py"}


@pytest.mark.parametrize("what", ["set", "set a number", "set all", "rebind"])
def test_an_interruption_leaves_the_driver_and_the_shadow_alike(
    rig: Rig, what: str, request: pytest.FixtureRequest
) -> None:
    """Ctrl-C before any line (some of them without --all-lines): what the driver holds is what the
    shadow says, and what a word points at is kept."""
    step = 1 if request.config.getoption("--all-lines") else 61 if what == "rebind" else 11
    cells, rng = rig.buffers(), random.Random(11)
    state = launches(rng, cells[:1])
    with rig.graph(state) as graph:

        def attempt(at: int) -> str | None:
            run = graph.instantiate()
            new = [rig.device.zeros(CELL, np.float32)]
            seen, memory = weakref.ref(new[0]), new[0].range

            def call() -> object:
                if what == "set":
                    return run.set(0, "a", new[0])
                if what == "set a number":
                    return run.set(0, "n", 3)
                if what == "set all":
                    return run.set_all([(0, "a", new[0]), (1, "b", new[0]), (0, "n", 3)])
                return run.rebind({cells[0]: new[0]})

            run.set(0, "out", cells[0])
            run.rebind({memory: memory})  # makes the index
            where = interrupt(call, at)
            new.clear()
            gc.collect()
            pointed = False
            for index in range(NODES):
                held = run.params(index)
                assert isinstance(held, KernelNodeParams)
                words = [int.from_bytes(held.arguments.raw(i), "little") for i in range(3)]
                pointed = pointed or memory.address in words
                if rig.stub is not None:
                    assert rig.stub.holds(run, index)[0] == held.arguments.data, where
            assert not pointed or seen() is not None, where
            if (kept := seen()) is not None:  # closed, it is missed if it is pointed at, only then
                kept.close()
                assert run.usable() is not pointed, where
            run.close()
            rig.device.synchronize()
            return where

        at = 1
        while attempt(at) is not None:
            at += step
        assert at > step


def test_an_empty_node_has_nothing_to_patch(rig: Rig) -> None:
    if rig.stub is not None:
        pytest.skip("it has kernels only")
    with ost.Graph.create(rig.device) as graph:
        graph.add_empty()
        with graph.instantiate() as run, pytest.raises(NodeKindError):
            run.patcher(0, 0)


def test_a_patcher_follows_other_changes(rig: Rig) -> None:
    cells, rng = rig.buffers(), random.Random(4)
    state = launches(rng, cells)
    with rig.graph(state) as graph, graph.instantiate() as run:
        patch = run.patcher(0, "n")
        patch(7)
        state[0].n = 7
        run.set(0, config=ost.LaunchConfig(3, 32))
        state[0].grid = 3
        patch(8)
        state[0].n = 8
        rig.check(run, state)
        other = launches(rng, cells)
        with rig.graph(other) as new:
            run.update(new)
            patch(9)
            other[0].n = 9
            rig.check(run, other)


@pytest.mark.parametrize("end", ["changed", "closed"])
@pytest.mark.parametrize("change", ["set", "patcher", "rebind"])
def test_a_buffer_lives_as_long_as_it_is_pointed_at(rig: Rig, change: str, end: str) -> None:
    cells, rng = rig.buffers(), random.Random(5)
    state = launches(rng, cells)
    with rig.graph(state) as graph, graph.instantiate() as run:
        first = rig.device.zeros(CELL, np.float32)
        seen, memory = weakref.ref(first), first.range
        if change == "rebind":
            run.rebind({state[0].a: first})
        elif change == "patcher":
            run.patcher(0, "a")(first)
        else:
            run.set(0, "a", first)
        del first
        gc.collect()
        assert seen() is not None
        if end == "closed":
            run.close()
        elif change == "rebind":
            run.rebind({memory: cells[0]})
        else:
            run.set(0, "a", cells[0])
        rig.device.synchronize()
        gc.collect()
        assert seen() is None


def test_a_dropped_executable_is_not_held_by_what_was_patched(rig: Rig) -> None:
    cells, rng = rig.buffers(), random.Random(7)
    with rig.graph(launches(rng, cells)) as graph:
        run = graph.instantiate()
        run.set(0, "n", 5)
        run.rebind({cells[0]: cells[1]})
        seen = weakref.ref(run)
        gc.disable()
        try:
            del run
            assert seen() is None
        finally:
            gc.enable()


def test_a_definition_that_is_changed_afterwards_does_not_show(rig: Rig) -> None:
    """Another library may change it by its handle, at any time."""
    cells, rng = rig.buffers(), random.Random(8)
    state = launches(rng, cells)
    for updated in (False, True):
        with rig.graph(state) as graph, graph.instantiate() as run:
            made_of = rig.graph(state) if updated else graph
            if updated:
                run.update(made_of)
            driver = rig.device.driver
            for node in made_of.nodes():
                held = node.kernel.arguments
                other = held.with_bytes(held.slot(3).offset, (63).to_bytes(4, "little"))
                changed = type(node.kernel)(node.kernel.function, node.kernel.config, other)
                driver.node_set_params(node.handle, changed)
            run.set(2, "a", cells[1])
            run.rebind({cells[2]: cells[3]})
            expected = [one.copy() for one in state]
            expected[2].a = cells[1]
            for one in expected:
                for name in ("a", "b", "out"):
                    if getattr(one, name) is cells[2]:
                        setattr(one, name, cells[3])
            rig.check(run, expected)


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_node_that_was_added_has_its_place(rig: Rig, newest_first: bool) -> None:
    """Also where the driver lists nodes in an order that no known one has."""
    if rig.stub is None and newest_first:
        pytest.skip("the host driver lists nodes as they were added")
    (a, b, out), config = rig.buffers()[:3], ost.LaunchConfig(1, 32)
    if rig.stub is not None:
        rig.stub.newest_first(newest_first)
    try:
        with ost.Graph.create(rig.device) as graph:
            for _ in range(40):
                made = graph.add_kernel(rig.kernel, config, a, b, out, CELL)
                assert [node.handle for node in graph.nodes()][made.index] == made.handle
                assert graph.node(made.index).arguments == made.arguments
    finally:
        if rig.stub is not None:
            rig.stub.newest_first(False)


def test_a_closed_view_frees_nothing(rig: Rig) -> None:
    cells, n = rig.device.zeros((3, CELL), np.float32), CELL
    views = [cells[i] for i in range(3)]
    with ost.capture(rig.stream) as capture:
        ost.launch(rig.stream, rig.kernel, ost.LaunchConfig(1, 32), *views, n)
    for view in views:
        view.close()
    with capture.graph.instantiate() as run:
        run.launch(rig.stream)
        rig.stream.synchronize()
        cells.close()
        with pytest.raises(ClosedError, match="closed"):
            run.launch(rig.stream)
    with pytest.raises(ClosedError, match="closed"):
        capture.graph.instantiate()
