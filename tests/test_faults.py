"""A fault at every driver call, one by one: the right answer or a typed error, and nothing torn.

Each scenario is run once without faults, to count its driver calls, and then once for each of them
with that call refused.  After a typed error the state must be what it was before; without an error
the answer must be right.  Everything closed, the host driver's tables must hold what they hold
after a run without faults; a refused destruction may leave the one thing that it was to destroy.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.host.driver import HostDriver
from ostinato.errors import (
    ContextPoisonedError,
    GraphError,
    NotHeldError,
    OstinatoError,
    StateLostError,
    Status,
)
from ostinato.graphfile import child
from ostinato.memory.buffer import fill_operation
from ostinato.relational import Joiner
from ostinato.testing import FaultyDriver
from tests.relational.tables import expected, pairs
from tests.sources import config, kernel, preload
from tests.sums import N, Sums, assert_sound

DESTRUCTIONS = {
    "mem_free": "memory",
    "mem_free_pinned": "memory",
    "event_destroy": "events",
    "stream_destroy": "streams",
    "graph_destroy": "graphs",
    "exec_destroy": "executables",
}
"""Calls that leave what they are to destroy, if they are refused."""


class World(Sums):
    """A device whose calls can fail, and a graph on it: three times out = a + a."""

    def __init__(self) -> None:
        self.faults = FaultyDriver(HostDriver(total_memory=1 << 24))
        super().__init__(preload(Device(self.faults)))
        self.side = self.device.create_stream()
        self.run.launch(self.stream)
        self.stream.synchronize()

    def assert_sound(self) -> None:
        assert_sound(self.device, self.stream, self.side)


def census(faults: FaultyDriver) -> dict[str, int]:
    """What the driver holds."""
    host: Any = faults.inner
    return {
        "memory": len(host._memory._live),
        "streams": len(host._streams),
        "events": len(host._events),
        "graphs": len(host._graphs),
        "nodes": len(host._nodes),
        "executables": len(host._executables),
    }


Case = tuple[Callable[[], object], Callable[[OstinatoError | None], None]]
Scenario = Callable[[World], Case]

SCENARIOS: dict[str, Scenario] = {}


def scenario(make: Scenario) -> Scenario:
    """`make` sets up and returns the work, and the check of what it led to: without an error it is
    done, with one all is as it was."""
    SCENARIOS[make.__name__] = make
    return make


SIX, TEN = [6.0, 6.0, 6.0], [10.0, 10.0, 10.0]


def answers_or_unusable(world: World) -> list[float] | None:
    """What a launch gives, None if the executable says that it must not be used any more."""
    if world.run.usable():
        return world.answers()
    with pytest.raises(OstinatoError, match="instantiate its graph again"):
        world.run.launch(world.stream)
    return None


def _change(change: Callable[[World], object], after: list[float]) -> Scenario:
    def make(world: World) -> Case:
        def check(error: OstinatoError | None) -> None:
            seen = answers_or_unusable(world)
            if error is None:
                assert seen == after
            else:
                assert seen in (SIX, None)
            if seen is not None:
                change(world)
                assert world.answers() == after

        return lambda: change(world), check

    return make


CHANGES: dict[str, tuple[Callable[[World], object], list[float]]] = {
    "rebind": (lambda w: w.run.rebind({w.a: w.b}), TEN),
    "argument": (lambda w: w.run.set(1, "a", w.b), [6, 8, 6]),
    "parameters": (
        lambda w: w.run.set(1, w.other.nodes()[1].params, keep=(w.b,)),
        [6, 10, 6],
    ),
    "update": (lambda w: w.run.update(w.other), TEN),
    "enabled": (lambda w: w.run.set(1, enabled=False), [6, 0, 6]),
}
SCENARIOS |= {name: _change(change, after) for name, (change, after) in CHANGES.items()}


@scenario
def copy_node(world: World) -> Case:
    source, target = world.a, world.device.zeros(N, np.float32)
    run = ost.capture_function(
        world.stream, lambda: ost.copy(world.stream, target, source)
    ).instantiate()

    def check(error: OstinatoError | None) -> None:
        run.launch(world.stream)
        assert target.to_numpy(world.stream)[-1] == (3 if error else 5)

    return lambda: run.set(0, dst=target, src=world.b), check


@scenario
def fill_node(world: World) -> Case:
    target = world.device.zeros(N, np.float32)
    run = ost.capture_function(
        world.stream, lambda: ost.fill(world.stream, target, 1)
    ).instantiate()

    def check(error: OstinatoError | None) -> None:
        run.launch(world.stream)
        assert target.to_numpy(world.stream)[-1] == (1 if error else 2)

    return lambda: run.set(0, dst=target, value=2), check


@scenario
def launch_as_a_graph(world: World) -> Case:
    add = kernel(world.device, "add")
    operations = [
        ost.prepare(add, config(N), world.b, world.b, world.outs[0], N),
        fill_operation(world.outs[1], 7),
    ]
    world.clear()

    def work() -> None:
        for operation in operations:
            world.stream.submit_as_graph(operation)

    def check(error: OstinatoError | None) -> None:
        ran = [[0.0, 0.0, 0.0], [10.0, 0.0, 0.0], [10.0, 7.0, 0.0]]
        assert world.seen() in (ran[:2] if error else ran[2:])

    return work, check


def _makes(
    make: Callable[[World], ost.Graph | ost.GraphExec], wanted: list[float] = TEN
) -> Scenario:
    """A scenario of a function that returns a graph, or an executable, with these answers."""

    def set_up(world: World) -> Case:
        made: list[ost.Graph | ost.GraphExec] = []

        def check(error: OstinatoError | None) -> None:
            assert bool(made) == (error is None)
            for one in made:
                run = one.instantiate() if isinstance(one, ost.Graph) else one
                assert world.answers(run) == wanted

        return lambda: made.append(make(world)), check

    return set_up


def _with_a_side_stream(world: World) -> ost.Graph:
    add = kernel(world.device, "add")
    with ost.capture(world.stream) as under_way:
        world.side.wait(world.stream.record())
        ost.launch(world.side, add, config(N), world.b, world.b, world.outs[0], N)
        world.stream.wait(world.side.record())
        ost.launch(world.stream, add, config(N), world.b, world.b, world.outs[1], N)
    return under_way.graph


def _by_hand(world: World) -> ost.Graph:
    under_way = ost.Capture(world.stream)
    under_way.begin()
    world.submit(world.b)
    return under_way.end()


def _recorded(world: World) -> ost.Graph:
    with ost.record(world.stream) as recording:
        world.submit(world.b)
    return recording.build()


def _built(world: World) -> ost.GraphExec:
    graph = ost.Graph.create(world.device)
    graph.add_child(world.other)
    graph = graph.clone()
    graph.add_conditional("if", graph.condition(default=1))
    return graph.instantiate(upload=world.stream)


SCENARIOS |= {
    "capture": _makes(lambda world: world.captured(world.b)),
    "capture_with_a_side_stream": _makes(_with_a_side_stream, [10, 10, 0]),
    "capture_by_hand": _makes(_by_hand),
    "record": _makes(_recorded),
    "build_by_hand": _makes(_built),
    "instantiate": _makes(lambda world: world.other.instantiate(upload=world.stream)),
}


@scenario
def capture_into(world: World) -> Case:
    graph = ost.Graph.create(world.device)
    branch = graph.add_conditional("if", graph.condition(default=1))

    def work() -> None:
        with ost.capture(world.stream, into=branch.bodies[0]):
            world.submit(world.b)

    def check(error: OstinatoError | None) -> None:
        if error is None:
            assert world.answers(graph.instantiate()) == TEN

    return work, check


@scenario
def capture_events(world: World) -> Case:
    graphs: list[ost.Graph] = [ost.Graph.create(world.device)]
    start, stop = (world.device.create_event(timing=timing) for timing in (True, False))

    def work() -> None:
        for into in (graphs[0], None):
            with ost.capture(world.stream, into=into) as under_way:
                world.stream.record(start)
                world.submit(world.b)
                world.stream.record(stop)
            graphs.append(under_way.graph)

    def check(error: OstinatoError | None) -> None:
        assert (len(graphs) == 3) == (error is None)
        for graph in graphs[1:]:
            assert world.answers(graph.instantiate()) == TEN
            assert start.done() and stop.done()
        if len(graphs) == 1 and not (graphs[0].lost or graphs[0].only_to_read):
            assert not len(graphs[0]), "the broken capture left nodes"

    return work, check


@scenario
def replace(world: World) -> Case:
    """A node of the graph, between two others, by what gives the other answer."""
    graph = world.graph.clone()
    node, add = graph.nodes()[1], kernel(world.device, "add")
    other = ost.prepare(add, config(N), world.a, world.b, world.outs[1], N)

    def work() -> None:
        graph.replace(node, other)

    def check(error: OstinatoError | None) -> None:
        try:
            run = graph.instantiate()
        except GraphError as lost:
            assert error is not None and "could not be taken back" in str(lost)
            return
        assert len(graph) == 3 and len(graph.edges()) == 2
        assert world.answers(run) == ([6, 8, 6] if error is None else SIX)

    return work, check


@scenario
def upload(world: World) -> Case:
    run = world.other.instantiate()

    def check(error: OstinatoError | None) -> None:
        assert world.answers(run) == TEN

    return lambda: run.upload(world.stream), check


@scenario
def launch(world: World) -> Case:
    world.clear()

    def work() -> None:
        for _ in range(3):
            world.run.launch(world.stream)
        world.run.launch(world.side)
        world.side.synchronize()

    def check(error: OstinatoError | None) -> None:
        assert world.seen() in ([SIX] if error is None else [SIX, [0, 0, 0]])
        assert world.answers() == SIX

    return work, check


@scenario
def close(world: World) -> Case:
    run, buffer = world.other.instantiate(), world.device.zeros(N, "bytes")

    def work() -> None:
        run.launch(world.stream)
        run.close()
        buffer.close()
        world.device.create_stream().close()
        world.device.synchronize()

    def check(error: OstinatoError | None) -> None:
        if error is None:
            assert run.closed and buffer.closed
        assert world.answers() == SIX

    return work, check


@scenario
def cache(world: World) -> Case:
    kept = ost.GraphCache(world.device, max_graphs=2)

    def work() -> None:
        for turn in range(2):
            for key, graph in (("a", world.graph), ("b", world.other), ("c", world.graph)):
                run = kept.get_or_capture((key, turn), graph.instantiate)
                world.clear()
                run.launch(world.stream)
                assert world.seen() == (TEN if key == "b" else SIX)
        kept.evict(("c", 1))
        kept.evict_touching(world.b)
        kept.evict_all()
        world.device.synchronize()

    def check(error: OstinatoError | None) -> None:
        statistics = kept.statistics()
        assert statistics.nbytes == sum(key.nbytes for key in statistics.keys)
        assert statistics.graphs == len(statistics.keys) <= 2
        kept.evict_all()
        assert world.answers(kept.get_or_capture("b", world.other.instantiate)) == TEN
        kept.close()

    return work, check


def _step(build: str, verify: Any, **options: Any) -> Scenario:
    """total += x for the rows in use, six calls: warm-ups, builds, replays, padding, checks."""

    def make(world: World) -> Case:
        device, width = world.device, 4
        x, total = (device.zeros((4, width), np.float32) for _ in range(2))
        one = device.array(np.ones(1, np.float32))
        model = np.zeros((4, width), np.float32)
        possible = [model]  # before and after the call that failed

        def body(stream: ost.Stream, sizes: ost.Sizes) -> None:
            axpy, real = kernel(device, "axpy_rows"), sizes.on_device("rows")
            ost.launch(stream, axpy, config(sizes.rows * width), x, one, total, real, width)

        step = ost.GraphedStep(
            body,
            stream=device.create_stream(),
            cache=ost.GraphCache(device, buckets=ost.ExplicitBuckets([2, 4])),
            slots=[
                ost.Slot("x", x, "input", size="rows"),
                ost.Slot("total", total, "state", size="rows"),
            ],
            build=build,
            verify=verify,
            **options,
        )

        def call(rows: int) -> None:
            data, after = np.full((4, width), rows, np.float32), model.copy()
            after[:rows] += data[:rows]
            possible[:] = [model.copy(), after]
            x.set(data, step.stream)
            step(rows=rows)
            model[:] = after

        def work() -> None:
            for rows in (1, 3, 2, 4, 3, 1):
                call(rows)
                step.stream.synchronize()

        def check(error: OstinatoError | None) -> None:
            now = total.to_numpy(step.stream)
            if isinstance(error, StateLostError):
                assert "slots 'x', 'total'" in str(error)
                with pytest.raises(StateLostError):  # until the caller says that it is mended
                    step(rows=1)
                model[:] = possible[0]
                total.set(model, step.stream)
                step.forget(rows=1)
            elif error is not None:
                assert any((now == model).all() for model in possible), now
                model[:] = now
            np.testing.assert_array_equal(total.to_numpy(step.stream), model)
            for rows in (3, 1, 2, 4):
                if step.strict:  # else a key without a graph is refused
                    step.forget(rows=rows)
                call(rows)
                np.testing.assert_array_equal(total.to_numpy(step.stream), model)
            step.close()
            step.cache.close()
            step.stream.close()

        return work, check

    return make


SCENARIOS["step"] = _step("capture", "off")
SCENARIOS["step_recorded"] = _step("record", "off")
SCENARIOS["step_verified"] = _step("capture", 1)
SCENARIOS["step_strict"] = _step("capture", 2, strict=True)


@scenario
def step_held(world: World) -> Case:
    counter = world.device.zeros(1, np.int32)
    increment = kernel(world.device, "increment")
    step = ost.GraphedStep(
        lambda stream, _: ost.launch(stream, increment, config(1), counter, 1),
        stream=world.stream,
        cache=ost.GraphCache(world.device),
    )
    replays = [0]

    def work() -> None:
        for _ in range(2):
            step()
            replays[0] += 1
        try:
            around, launch = (held := step.hold()), held.launch
        except NotHeldError:
            around, launch = nullcontext(), step
        with around:
            for _ in range(3):
                launch()
                replays[0] += 1

    def check(error: OstinatoError | None) -> None:
        before = counter.to_numpy(world.stream)[0]
        assert before == replays[0]
        step()
        assert counter.to_numpy(world.stream)[0] == before + 1
        step.close()
        step.cache.close()

    return work, check


@scenario
def memory(world: World) -> Case:
    def work() -> None:
        device, stream = world.device, world.stream
        x = device.array(np.arange(N, dtype=np.float32))
        pool = device.pool(reserve=4096)
        y = pool.empty(N, np.float32)
        ost.copy(stream, y, x)
        scalar = ost.DeviceScalar(device, np.float32, initial=2, stream=stream)
        add = kernel(device, "axpy")
        ost.launch(stream, add, config(N), x, scalar, y, N)
        scalar.set(3, stream)
        ost.launch(stream, add, config(N), x, scalar, y, N)
        np.testing.assert_array_equal(y.to_numpy(stream), 6 * np.arange(N))
        device.synchronize()
        pool.close()
        x.close()

    return work, lambda error: None


def _join(graphs: bool) -> Scenario:
    """Joins with and without an index, an output that does not fit, several under way."""

    def make(world: World) -> Case:
        rng = np.random.default_rng(3)
        left, right = ({"k": rng.integers(0, 90, n)} for n in (300, 100))
        wanted = expected(left, right)
        joiner = Joiner(world.device, graphs=graphs)

        def all_right() -> None:
            index = joiner.build_index(right, "k")
            pending = [joiner.submit(left, side, "k", capacity=1 << 9) for side in (index, right)]
            pending.append(joiner.submit(left, right, "k", capacity=4))
            for one in pending:
                np.testing.assert_array_equal(pairs(one.result()), wanted)
            index.close()

        def check(error: OstinatoError | None) -> None:
            all_right()
            assert joiner.statistics().recoveries <= 1
            joiner.close()

        return all_right, check

    return make


SCENARIOS["join"] = _join(graphs=True)
SCENARIOS["join_eager"] = _join(graphs=False)


@scenario
def joiner(world: World) -> Case:
    table = {"k": np.arange(5)}

    def work() -> None:
        with Joiner(world.device) as joiner:
            assert len(joiner.join(table, table, "k")) == 5

    return work, lambda error: work()


# ------------------------------------------------------------------------------------ graph files


def _folder(world: World) -> Path:
    """Of a case, which ends with its world: not every case comes to its check."""
    folder = Path(tempfile.mkdtemp(prefix="ostinato-"))
    weakref.finalize(world, shutil.rmtree, folder, ignore_errors=True)
    return folder


def _named(world: World) -> dict[str, dict[str, ost.Buffer]]:
    outs = {str(i): out for i, out in enumerate(world.outs)}
    return {"inputs": {"a": world.a}, "outputs": outs}


def _checked_here(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """What the process that checks a file does, on a device of its own, without the start of one
    for each fault."""
    return subprocess.CompletedProcess(command, child.main(command[-1]), "", "")


@scenario
def graph_saved(world: World) -> Case:
    """With its check, which launches it here and on another device: in another process in the run
    without faults, in this one with them, as they are this device's alone."""
    folder = _folder(world)
    path = folder / "one.graph"

    def check(error: OstinatoError | None) -> None:
        if not isinstance(error, StateLostError):
            assert world.seen() == SIX  # saving leaves all as it was
        assert [p.name for p in folder.iterdir()] == ([] if error else ["one.graph"])
        if error is None:
            loaded = ost.graphfile.load(world.device, path, buffers={"a": world.b})
            loaded.instantiate().launch(world.stream)
            assert loaded.outputs["0"].to_numpy(world.stream)[-1] == 10

    def work() -> None:
        here = patch.object(subprocess, "run", _checked_here)
        with here if world.faults.faults else nullcontext():
            ost.graphfile.save(world.graph, path, **_named(world))

    return work, check


@scenario
def graph_loaded(world: World) -> Case:
    with tempfile.NamedTemporaryFile(suffix=".graph") as file:
        ost.graphfile.save(world.graph, file.name, check=False, **_named(world))
        whole = Path(file.name).read_bytes()
    made: list[ost.graphfile.LoadedGraph] = []

    def work() -> None:
        with tempfile.NamedTemporaryFile(suffix=".graph") as file:
            Path(file.name).write_bytes(whole)
            made.append(ost.graphfile.load(world.device, file.name, buffers={"0": world.outs[0]}))

    def check(error: OstinatoError | None) -> None:
        assert bool(made) == (error is None)
        for loaded in made:
            world.clear()
            loaded.instantiate().launch(world.stream)
            assert world.seen() == [6, 0, 0]

    return work, check


@scenario
def step_restored(world: World) -> Case:
    """What is wrong with a restore costs speed alone."""
    folder = _folder(world)

    def stored() -> ost.GraphedStep:
        outs = [ost.Slot(str(i), out, "output") for i, out in enumerate(world.outs)]
        return ost.GraphedStep(
            lambda stream, _: world.submit(world.a),
            stream=world.stream,
            cache=ost.GraphCache(world.device),
            name="sums",
            slots=[ost.Slot("a", world.a, "input"), *outs],
            store=ost.GraphStore(world.device, folder),
        )

    with stored() as first:
        for _ in range(2):
            first()
        assert first.save(check=False) == {}
    step = stored()
    assert step.store is not None
    world.clear()

    def check(error: OstinatoError | None) -> None:
        assert step.store is not None
        try:
            statistics = step.store.statistics()
            if error is None:
                assert world.seen() == SIX
                assert statistics.restored + len(statistics.reasons) == 1, statistics
            for _ in range(2):
                world.clear()
                step()
                assert world.seen() == SIX
        finally:
            step.close()

    return step, check


# ----------------------------------------------------------------------------------------- running

KINDS = {
    "refused": (Status.INVALID_VALUE, 1),
    "memory": (Status.OUT_OF_MEMORY, 1),
    "and the undo": (Status.INVALID_VALUE, 2),
    "all from here": (Status.OUT_OF_MEMORY, 10**9),
    "the context lost": (Status.LAUNCH_FAILED, 10**9),
}


def _without_frames(error: OstinatoError) -> OstinatoError:
    """The error, holding nothing of where it was raised."""
    one: BaseException | None = error
    while one is not None and one.__traceback__ is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


@dataclass(frozen=True)
class _Outcome:
    """The calls that were refused, and what the driver holds once all is closed; None if it does
    not answer any more."""

    struck: list[str]
    left: dict[str, int] | None


def _run(name: str, at: int = 0, status: int = 1, times: int = 1) -> _Outcome:
    """One run of a scenario whose `at`-th call and those after it, `times` in all, are refused."""
    world = World()
    work, check = SCENARIOS[name](world)
    world.device.synchronize()
    faults, device = world.faults, world.device
    faults.clear()
    fault = faults.fail_any(status, at=at, times=times) if at else None
    error = None
    try:
        work()
    except OstinatoError as caught:
        error = _without_frames(caught)
    if fault is None:
        assert error is None, error
    elif fault.fired == 0:
        device.close()
        return _Outcome([], None)
    if status == Status.LAUNCH_FAILED and error is not None:
        # Nothing works any more.  It says so, and nothing hangs.
        with pytest.raises(ContextPoisonedError):
            world.stream.synchronize()
        for one in (world.run, world.a, world.stream, world.side, device):
            one.close()
        return _Outcome(["all"], None)
    struck = faults.calls[at - 1 : at - 1 + times]
    faults.clear()
    world.assert_sound()
    check(error)
    world.assert_sound()
    del work, check, error, world
    for _ in range(3):  # what is destroyed lets other things go
        gc.collect()
        device.synchronize()
    left = census(faults)
    device.close()
    return _Outcome(struck, left)


LONG = [name for name in SCENARIOS if name.startswith(("step", "cache", "join"))]
"""Scenarios of hundreds of calls."""
DENSE = {(name, "refused"): 1 for name in SCENARIOS if name not in LONG}
SPARSE = {
    (name, kind): 5
    for name in SCENARIOS
    for kind in KINDS
    if name not in LONG
    or kind == "refused"
    or (kind == "all from here" and not name.startswith(("join", "step_strict")))
}
QUICK = SPARSE | DENSE
# A graph that is saved is loaded by another process to be checked.
QUICK = {case: n for case, n in QUICK.items() if case[0] != "graph_saved" or case[1] == "refused"}
"""What fails in the usual run, at every so many calls; slow tests fail the rest, at every call."""
CASES = [
    *[pytest.param(*case, n, id=f"{'-'.join(case)}-every {n}") for case, n in QUICK.items()],
    *[
        pytest.param(name, kind, 1, marks=pytest.mark.slow, id=f"{name}-{kind}")
        for name in SCENARIOS
        for kind in KINDS
        if QUICK.get((name, kind)) != 1
    ],
]


@pytest.mark.parametrize(("name", "kind", "stride"), CASES)
def test_a_fault_at_every_call(
    name: str, kind: str, stride: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "ostinato")  # what a refused destruction says, thousandfold
    status, times = KINDS[kind]
    clean = _run(name).left
    # Each kind begins at another call, so that together they come to all.
    for at in itertools.count(1 + [*KINDS].index(kind) % stride, stride):
        outcome = _run(name, at, status, times)
        if not outcome.struck:
            break
        if outcome.left is None:
            continue
        left = {what: n - clean[what] for what, n in outcome.left.items() if n != clean[what]}
        refused = {DESTRUCTIONS[call] for call in outcome.struck if call in DESTRUCTIONS}
        if "graphs" in refused:
            refused.add("nodes")
        assert all(more > 0 for more in left.values()), (at, outcome.struck[0], left)
        assert left.keys() <= refused, (at, outcome.struck[0], left)
    assert at > 1, "the scenario makes calls"


# --- handles that are null, from a driver that says SUCCESS


class Nulls(World):
    """A world whose driver gives null handles from a call on that it is told."""

    def __init__(self, patched: pytest.MonkeyPatch, folder: Path) -> None:
        super().__init__()
        self.patched, self.folder = patched, folder
        self.host: Any = self.faults.inner

    def give(self, call: str, after: int = 0) -> None:
        """The driver's call gives 0 from here on, having made nothing; not so the first ones."""
        real, calls = getattr(self.host, call), itertools.count()

        def given(*arguments: Any, **options: Any) -> int:
            return real(*arguments, **options) if next(calls) < after else 0

        self.patched.setattr(self.faults, call, given, raising=False)

    def give_no_graph(self) -> None:
        """The end of a capture gives none."""
        end = self.host.stream_end_capture

        def ended(stream: Any) -> int:
            self.host.graph_destroy(end(stream))
            return 0

        self.patched.setattr(self.faults, "stream_end_capture", ended, raising=False)

    def give_inside(self, **changes: Any) -> None:
        """Nodes that hold graphs say that these are null."""
        read = self.host.node_params

        def node_params(node: Any) -> Any:
            params = read(node)
            same = set(changes) & set(type(params).__dataclass_fields__)
            return dataclasses.replace(params, **changes) if same else params

        self.patched.setattr(self.faults, "node_params", node_params, raising=False)


def _loads(call: str, *, inside: bool = False) -> Callable[[Nulls], Callable[[], object]]:
    """Loads the file of a graph, whose launch is in a child graph or not, and instantiates it."""

    def make(world: Nulls) -> Callable[[], object]:
        graph = ost.capture_function(world.stream, lambda: world.submit(world.b))
        if inside:
            outer = ost.Graph.create(world.device)
            outer.add_child(graph)
            graph = outer
        path = world.folder / "a.graph"
        ost.graphfile.save(graph, path, inputs={"b": world.b}, check=False)
        world.give(call, after=int(inside))
        return lambda: ost.graphfile.load(world.device, path).instantiate()

    return make


def _captures(world: Nulls) -> Callable[[], object]:
    world.give_no_graph()
    return lambda: ost.capture_function(world.stream, lambda: world.submit(world.b))


def _gives(call: str, work: Callable[[Nulls], object]) -> Callable[[Nulls], Callable[[], object]]:
    def make(world: Nulls) -> Callable[[], object]:
        world.give(call)
        return lambda: work(world)

    return make


def _child(world: Nulls) -> Callable[[], object]:
    graph, child = ost.Graph.create(world.device), world.run.graph
    world.give_inside(graph=0)
    return lambda: graph.add_child(child)


def _body(world: Nulls) -> Callable[[], object]:
    graph = ost.Graph.create(world.device)
    condition = graph.condition(1)
    world.give_inside(bodies=(0,))
    return lambda: graph.add_conditional("if", condition)


NULLS: dict[str, tuple[str, Callable[[Nulls], Callable[[], object]]]] = {
    "an executable": (
        "null executable",
        _gives("graph_instantiate", lambda w: w.run.graph.instantiate()),
    ),
    "an executable that is uploaded": (
        "null executable",
        _gives("graph_instantiate", lambda w: w.run.graph.instantiate(upload=w.stream)),
    ),
    "an executable of a file": ("null executable", _loads("graph_instantiate")),
    "an executable for one launch": (
        "null executable",
        _gives("graph_instantiate", lambda w: _by_graph(w)),
    ),
    "a graph for one launch": ("null graph", _gives("graph_create", lambda w: _by_graph(w))),
    "a graph": ("null graph", _gives("graph_create", lambda w: ost.Graph.create(w.device))),
    "a clone": ("null graph", _gives("graph_clone", lambda w: w.run.graph.clone())),
    "a capture": ("without an error and without a graph", _captures),
    "a graph of a file": ("null graph", _loads("graph_create")),
    "a child graph of a file": ("null graph", _loads("graph_create", inside=True)),
    "a condition": (
        "null condition",
        _gives("conditional_create", lambda w: w.run.graph.condition(1)),
    ),
    "a child graph": ("null child graph", _child),
    "a body": ("null body", _body),
}


def _by_graph(world: Nulls) -> object:
    return world.stream.submit_as_graph(fill_operation(world.outs[0], 1))


@pytest.mark.parametrize("name", NULLS)
def test_a_null_handle_is_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is raised where it was given, nothing leaks, and all goes on once handles come again."""
    world = Nulls(monkeypatch, tmp_path)
    words, make = NULLS[name]
    work = make(world)
    gc.collect()
    world.device.context.collect()
    before = census(world.faults)
    with pytest.raises(OstinatoError, match=words):
        work()
    gc.collect()
    world.device.context.collect()
    assert census(world.faults) == before
    monkeypatch.undo()
    assert world.answers() == SIX
    world.assert_sound()
