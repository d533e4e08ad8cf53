"""The black box names the node of a fault, and of a hang, and changes nothing else."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from benchmarks.uncompiled import without_extension
from ostinato.device import Device, open_device
from ostinato.driver.api import AllocNodeParams
from ostinato.driver.host.driver import HostDriver
from ostinato.errors import ContextPoisonedError, InputError, NotReadyError, SettingsError, Status
from ostinato.explain import BlackBoxReport, ReplayReport
from ostinato.explain.crumbs import CrumbTwin
from ostinato.explain.inputs import NotedInputs
from ostinato.graphfile.container import open_file
from ostinato.settings import BLACK_BOX
from ostinato.testing import HeldStream
from tests.cli.commands import here, refused
from tests.explain import plants
from tests.explain.plants import ONE, PLANTS, ROW, Ground, N, chain
from tests.graphfile import file_kernels

TRAP = ("trap", ONE)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Device]:
    """A device that a fault may cost: the host's.  On a GPU: tests/gpu/test_black_box_gpu.py."""
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path))
    with open_device("host") as device:
        yield device


@pytest.fixture
def ground(host: Device) -> Ground:
    return Ground(host)


def chained(ground: Ground, *bad: Any) -> ost.GraphExec:
    """twice, this kernel (name, shape, arguments), twice, a copy."""
    graph = ost.Graph.create(ground.device)
    chain(ground, graph, bad)
    return graph.instantiate()


def trapped(ground: Ground, turn: int = 1) -> ost.GraphExec:
    """twice, a trap at that turn, twice, a copy."""
    return chained(ground, *TRAP, (ground.count, turn))


def fault_of(ground: Ground, run: ost.GraphExec, **options: Any) -> ContextPoisonedError:
    with pytest.raises(ContextPoisonedError) as caught, ost.black_box(**options):
        run.launch(ground.stream)
        ground.stream.synchronize()
    return caught.value


def report_of(ground: Ground, run: ost.GraphExec, **options: Any) -> BlackBoxReport:
    report = fault_of(ground, run, **options).report
    assert isinstance(report, BlackBoxReport)
    return report


def running(report: BlackBoxReport) -> list[str]:
    return [node.path for replay in report.replays for node in replay.running]


# --- faults
@pytest.mark.parametrize("name", PLANTS)
def test_the_error_names_the_planted_node(name: str, host: Device, tmp_path: Path) -> None:
    plant, found = PLANTS[name], plants.planted(name, host, str(tmp_path))
    assert plant.running[0] in found["running"]
    assert set(found["running"]) <= set(plant.running)
    assert f"node {plant.running[0]} (" in found["text"]
    assert "plants.py:" in found["text"] or plant.adopted  # other code's lines are not known


@pytest.mark.parametrize("name", ["trap-chain", "trap-child", "trap-early", "third-turn-loop"])
def test_a_mark_comes_before_what_waited_for_its_node(name: str, tmp_path: Path) -> None:
    """Whatever the order of nodes that no edge orders."""
    for seed in range(8):
        with Device(HostDriver(shuffle=seed)) as device:
            found = plants.planted(name, device, str(tmp_path))
        assert found["running"] == list(PLANTS[name].running)


def row(ground: Ground, length: int, bad: int) -> ost.GraphExec:
    """A chain with a trap as the node of that number."""
    graph, after = ost.Graph.create(ground.device), list[ost.Node]()
    for number in range(length):
        name, *args = ("trap", ground.count, 1) if number == bad else ("twice", ground.x)
        after = [graph.add_kernel(ground.kernel(str(name)), ROW, *args, after=after)]
    return graph.instantiate()


def test_with_fewer_marks_it_is_one_of_a_few_nodes(ground: Ground) -> None:
    report = report_of(ground, row(ground, 6, bad=3), every=2)
    states = [node.state for node in report.replays[0].nodes]
    assert states == ["finished"] * 2 + ["running"] * 2 + ["waiting"] * 2


@pytest.mark.parametrize(
    ("words", "states"),
    {
        (2, 2, 2, 2): ["running", "waiting", "waiting", "waiting"],
        (3, 2, 2, 2): ["running", "early", "waiting", "waiting"],
        (1, 3, 2, 2): ["finished", "running", "early", "waiting"],
        (3, 3, 2, 2): ["running", "early", "early", "waiting"],
        (3, 1, 2, 2): ["running", "finished", "running", "waiting"],
    }.items(),
)
def test_what_may_have_started_early_is_named_too(
    words: tuple[int, ...], states: list[str], ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words that only a GPU leaves: 3, the node lets the next one start.  A node that has ended
    without a wait says nothing of the one before it."""
    graph = ost.Graph.create(ground.device)
    plants.early(ground, graph, (*TRAP, (ground.count, 1)))
    monkeypatch.setattr(CrumbTwin, "words", lambda self: list(words))
    (replay,) = report_of(ground, graph.instantiate()).replays
    assert [node.state for node in replay.nodes] == states
    text = str(replay)
    assert ("one that may have started early:" in text) == ("early" in states)
    assert all(f"node {i} (" in text for i in range(4) if states[i] in ("running", "early"))


@pytest.mark.parametrize("off", [False, True])
def test_no_mark_is_set_before_that_of_the_node_before(device: Device, off: bool) -> None:
    """Also if a node between two others is switched off; on both drivers."""
    ground, graph = Ground(device), ost.Graph.create(device)
    spin = graph.add_kernel(ground.kernel("spin"), ONE, 50)
    second = graph.add_kernel(ground.kernel("twice"), ROW, ground.x, after=[spin])
    graph.add_kernel(ground.kernel("twice"), ROW, ground.x, after=[second])
    run = graph.instantiate()
    if off:
        run.set(1, enabled=False)
    with ost.black_box() as box:
        run.launch(ground.stream)
        (watched,) = box._kept
        assert watched.twin is not None
        while not ground.stream.done():
            seen, later = watched.twin.words(), watched.twin.words()
            assert all(later[i - 1] == 1 for i in (1, 2) if seen[i] == 1), (seen, later)
        assert watched.twin.words() == [1, 1, 1]


def test_the_last_node_has_a_mark_in_any_case(ground: Ground) -> None:
    report = report_of(ground, row(ground, 4, bad=3), every=100)
    assert running(report) == ["0", "1", "2", "3"]


def test_memory_that_nothing_kept_is_said_to_be_freed(ground: Ground) -> None:
    """Nobody closed it: it went with its last reference."""
    graph, lost = ost.Graph.create(ground.device), ground.device.zeros(8, "f4", name="lost")
    graph.add(ost.prepare(ground.kernel("touch"), ONE, lost, 0).params)
    run = graph.instantiate()
    with pytest.raises(ContextPoisonedError, match=": freed, 'lost' float32"), ost.black_box():
        run.launch(ground.stream)
        ground.stream.synchronize()
        del lost
        gc.collect()
        ground.device.synchronize()
        run.launch(ground.stream)
        ground.stream.synchronize()


def test_it_says_what_had_finished_and_what_each_pointer_is(ground: Ground) -> None:
    report = report_of(ground, chained(ground, "touch", ONE, (ground.x[16:], 1 << 40)))
    nodes = {node.path: node for node in report.replays[0].nodes}
    states = {path: node.state for path, node in nodes.items()}
    assert states == {"0": "finished", "1": "running", "2": "waiting", "3": "waiting"}
    (pointer,) = nodes["1"].pointers
    assert (pointer.state, pointer.address) == ("live", ground.x.address + 64)
    assert pointer.memory.startswith("64 bytes into 'x' float32[256] (1024 bytes at ")
    assert nodes["1"].launch == "grid 1, block 1" and "plants.py" in nodes["1"].line


def test_memory_that_was_freed_after_the_first_replay_is_said_to_be_freed(
    host: Device, tmp_path: Path
) -> None:
    text = plants.planted("stale-chain", host, str(tmp_path))["text"]
    assert ": freed, an allocation of the driver (67108864 bytes at " in text


def test_a_pointer_past_an_allocation_says_by_how_much_it_misses(ground: Ground) -> None:
    past = ground.x.address + 1024 + 64
    error = fault_of(ground, chained(ground, "touch", ONE, (past, 0)))
    assert "unknown, 64 bytes after the end of 'x' float32[256] (1024 bytes at " in str(error)


def test_without_a_box_one_sentence_says_how_to_arm_one(ground: Ground) -> None:
    trapped(ground).launch(ground.stream)
    with pytest.raises(ContextPoisonedError) as caught:
        ground.stream.synchronize()
    assert caught.value.report is None
    assert str(caught.value).count("OSTINATO_BLACK_BOX=1") == 1
    assert "black box:" not in str(caught.value)


def test_eager_work_that_fails_in_a_box_is_not_put_down_to_a_replay(ground: Ground) -> None:
    run = trapped(ground, turn=9)
    with pytest.raises(ContextPoisonedError, match="no watched replay was under way"):  # noqa: SIM117
        with ost.black_box():
            run.launch(ground.stream)
            ground.stream.synchronize()
            ost.launch(ground.stream, ground.kernel("touch"), ONE, ground.x, 1 << 40)
            ground.stream.synchronize()


@pytest.mark.parametrize("compiled", [True, False])
def test_an_executable_that_was_launched_before_is_watched(ground: Ground, compiled: bool) -> None:
    """Its launches on one stream had taken the shortest way."""
    with nullcontext() if compiled else without_extension():
        run = trapped(ground, turn=4)
        for _ in range(3):
            run.launch(ground.stream)
        assert "node 1 (trap)" in str(fault_of(ground, run))


def test_an_executable_that_is_dropped_after_its_launch_is_named(ground: Ground) -> None:
    with pytest.raises(ContextPoisonedError, match="node 1 \\(trap\\)"), ost.black_box():
        with HeldStream(ground.stream):
            trapped(ground).launch(ground.stream)
            gc.collect()
            ground.device.context.collect()
        ground.stream.synchronize()


def test_the_block_waits_and_raises_what_no_call_has_reported(ground: Ground) -> None:
    run = trapped(ground)
    with pytest.raises(ContextPoisonedError, match="node 1 \\(trap\\)"), ost.black_box():
        run.launch(ground.stream)


def test_an_error_of_other_code_in_the_block_gets_the_report(ground: Ground) -> None:
    run = trapped(ground)
    with pytest.raises(ContextPoisonedError, match="node 1 \\(trap\\)") as caught, ost.black_box():
        run.launch(ground.stream)
        while not ground.device.driver.unraised(60):  # as torch waits, without a call of ours
            pass
        raise RuntimeError("CUDA error: unspecified launch failure")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_without_a_fault_passes_through_the_block(ground: Ground) -> None:
    run = trapped(ground, turn=9)
    with pytest.raises(ZeroDivisionError), ost.black_box():
        run.launch(ground.stream)
        _ = 1 // 0
    ground.stream.synchronize()


def test_two_graphs_under_way_are_both_named(ground: Ground) -> None:
    """Work of two streams runs at once, so the fault may be of either."""
    gate, slow = threading.Event(), ost.Graph.create(ground.device)
    slow.add_call(lambda: gate.wait(60))
    runs, side = (trapped(ground), slow.instantiate()), ground.device.create_stream()
    with pytest.raises(ContextPoisonedError) as caught, ost.black_box():
        runs[1].launch(side)
        while not any(_begun()):
            pass
        runs[0].launch(ground.stream)
        while not ground.device.driver.unraised(0.1):
            pass
        try:
            ground.stream.synchronize()
        finally:
            gate.set()
    report = caught.value.report
    assert isinstance(report, BlackBoxReport)
    assert sorted(running(report)) == ["0", "1"] and len(report.replays) == 2


def _begun() -> Iterator[bool]:
    from ostinato.explain.black_box import _boxes

    for box in _boxes:
        for context in box.contexts():
            yield bool(box.under_way(context)[0])


# --- the twin follows its executable
def test_a_changed_argument_reaches_the_watched_replay(ground: Ground) -> None:
    run = trapped(ground, turn=9)
    with pytest.raises(ContextPoisonedError, match="node 1 \\(trap\\)"), ost.black_box():
        run.launch(ground.stream)
        ground.stream.synchronize()
        run.set(1, "turn", 2)
        run.launch(ground.stream)
        ground.stream.synchronize()


CHANGES: dict[str, Callable[[Ground, ost.GraphExec], object]] = {
    "set": lambda g, run: run.set(0, "x", g.y),
    "set all": lambda g, run: run.set_all([(0, "x", g.y), (3, 0, g.spare)]),
    "rebind": lambda g, run: run.rebind({g.x: g.spare}),
    "off": lambda g, run: run.set(0, enabled=False),
    "update": lambda g, run: run.update(shape(g, g.spare)),
    "inside": lambda g, run: run.set(run.nodes()[1].children[0][1], "turn", 77),
    "inside a body": lambda g, run: run.set(run.nodes()[2].children[0][0], "x", g.spare),
}


def shape(ground: Any, x: ost.Buffer) -> ost.Graph:
    """Kernels, a child graph, a loop of three turns, a fork and a copy."""
    graph, inner = ost.Graph.create(ground.device), ost.Graph.create(ground.device)
    chain(ground, inner, (*TRAP, (ground.count, 99)))
    twice, again = ground.kernel("twice"), ground.kernel("again")
    first = graph.add_kernel(twice, ROW, x)
    child = graph.add_child(inner, after=[first])
    condition = graph.condition(1)
    loop = graph.add_conditional("while", condition, after=[child])
    turn = loop.bodies[0].add_kernel(twice, ROW, ground.y)
    count = loop.bodies[0].add_kernel(ground.kernel("trap"), ONE, ground.count, 99, after=[turn])
    loop.bodies[0].add_kernel(again, ONE, ground.count, 4, condition, after=[count])
    left = graph.add_kernel(twice, ROW, x, after=[loop.node])
    right = graph.add_copy(ground.out, ground.y, after=[loop.node])
    graph.add_kernel(twice, ROW, ground.out, after=[left, right])
    return graph


@pytest.mark.parametrize("every", [1, 2, 7])
@pytest.mark.parametrize("change", [None, *CHANGES])
def test_watched_replays_give_the_same_answers(
    device: Device, change: str | None, every: int
) -> None:
    """Before a change, after it, and after the box, on both drivers."""
    answers = []
    for watched in (False, True):
        ground: Any = Ground(device)
        ground.out = device.zeros(N, "f4")
        ground.spare = device.full(N, 3, "f4")
        if device.name != "host" and change in ("inside a body", "update"):
            pytest.skip("CUDA refuses changes of graphs with conditional nodes here")
        run = shape(ground, ground.x).instantiate()
        seen = []

        def launch(run: ost.GraphExec = run, ground: Any = ground, seen: Any = seen) -> None:
            run.launch(ground.stream)
            for buffer in (ground.x, ground.y, ground.out, ground.spare, ground.count):
                seen.append(buffer.to_numpy(ground.stream).tolist())

        if watched:
            with ost.black_box(every=every) as box:
                launch()
                if change is not None:
                    CHANGES[change](ground, run)
                launch()
                assert not box.notes()
        else:
            launch()
            if change is not None:
                CHANGES[change](ground, run)
            launch()
        launch()
        answers.append(seen)
    assert answers[0] == answers[1]


def test_a_graph_with_memory_of_its_own_runs_unwatched_and_the_report_says_so(
    ground: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    graph = ost.Graph.create(ground.device)
    node = graph.add_alloc(64)
    assert isinstance(node.params, AllocNodeParams)
    bad = graph.add_kernel(ground.kernel("trap"), ONE, ground.count, 1, after=[node])
    graph.add_free(node.params.address, after=[bad])
    error = fault_of(ground, graph.instantiate())
    assert "no watched replay was under way" in str(error)
    assert "not watched: <Graph" in str(error) and "allocates or frees memory" in str(error)
    assert "a replay is not watched" in caplog.text


def test_a_box_for_one_executable_leaves_others_alone(ground: Ground) -> None:
    first, second = trapped(ground, turn=99), trapped(ground, turn=99)
    with ost.black_box(first) as box:
        second.launch(ground.stream)
        assert not box.contexts()
        first.launch(ground.stream)
        assert box.contexts() == [ground.device.context]


def test_a_step_and_what_it_replays_are_watched(ground: Ground) -> None:
    x, count, stream = ground.x, ground.count, ground.stream
    trap = ground.kernel("trap")

    def work(stream: ost.Stream, sizes: Any) -> None:
        ost.launch(stream, ground.kernel("twice"), ROW, x)
        ost.launch(stream, trap, ONE, count, 4)

    slots = [ost.Slot("x", x, "state"), ost.Slot("count", count, "state")]
    cache = ost.GraphCache(ground.device)
    step = ost.GraphedStep(work, stream=stream, slots=slots, cache=cache, name="scaling")
    with pytest.raises(ContextPoisonedError, match="node 1 \\(trap\\)") as caught, ost.black_box():
        for _ in range(4):
            step()
            stream.synchronize()
    key = re.escape(str(step.key()))
    found = (
        f"a replay of the graph of 2 nodes of {key} that begins at .*test_black_box.py:\\d+ was in"
    )
    assert re.search(found, str(caught.value)), "step and sizes are named"


# --- hangs
def test_a_wait_names_the_node_that_has_not_finished(host: Device) -> None:
    found = plants.hang(host)
    assert "0.5 s are over" in found["text"] and "node 1 (spin)" in found["text"]
    assert "finished: node 0" in found["text"] and "not begun: nodes 2 to 3" in found["text"]
    assert found["y"] == [2, 2], "the work went on, and was waited for"


@pytest.mark.parametrize("way", ["stream", "event"])
def test_a_deadline_without_a_box_says_how_to_arm_one(device: Device, way: str) -> None:
    stream = device.create_stream()
    with HeldStream(stream) as held:
        waited: Any = stream if way == "stream" else stream.record()
        with pytest.raises(NotReadyError, match="OSTINATO_BLACK_BOX=1") as caught:
            waited.synchronize(deadline=0.01)
        assert caught.value.status == Status.NOT_READY
        held.release()
        waited.synchronize(deadline=60)


@pytest.mark.parametrize("deadline", [-1, "soon", float("nan")])
def test_a_deadline_is_seconds(device: Device, deadline: Any) -> None:
    stream = device.create_stream()
    with pytest.raises(InputError, match="seconds are needed"):
        stream.synchronize(deadline=deadline)


# --- the report's file, the environment, the options
def test_the_file_holds_the_report_and_the_command_prints_it(
    ground: Ground, tmp_path: Path
) -> None:
    report = report_of(ground, trapped(ground))
    assert report.file is not None
    assert Path(report.file).parent == tmp_path / "faults"
    assert BlackBoxReport.load(report.file) == report
    printed = here("autopsy", report.file)
    assert printed.status == 0 and "node 1 (trap), kernel, grid 1, block 1" in printed.out
    assert "waiting        2  kernel       twice" in printed.out
    assert "live   'count' uint32[1] (4 bytes at " in printed.out
    assert json.loads(here("autopsy", report.file, "--json").out)["device"] == "host"
    refused(here("autopsy", report.file, "--device", "host"), "is a report, which is not replayed")


OTHERS = ["", "{}", '{"ostinato_fault": 2}', "[1]", '{"ostinato_fault":1}', "[" * 100_000]
OTHERS.append(
    '{"ostinato_fault": 1, "device": "host", "memory": [], "notes": [], "replays": [{"graph": "", '
    '"every": 1, "nodes": [{"path": 1, "name": "", "kind": "", "state": "running", "launch": "", '
    '"line": "", "pointers": []}, {"path": 2, "name": "", "kind": "", "state": "running", '
    '"launch": "", "line": "", "pointers": []}]}]}'
)


@pytest.mark.parametrize("text", OTHERS, ids=range(len(OTHERS)))
def test_another_file_is_no_report(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    answer = here("autopsy", str(path))
    assert answer.status == 2 and "other.json" in answer.err and "Traceback" not in answer.err
    told = "give the .json or the .graph file that the error of the fault names"
    assert told in answer.err or "of another version" in answer.err


def test_a_folder_that_cannot_be_written_costs_only_the_file(
    ground: Ground, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    error = fault_of(ground, trapped(ground), folder=tmp_path / "file" / "folder")
    assert "node 1 (trap)" in str(error) and "no report file: " in str(error)


PROGRAM = """
import ostinato as ost
from tests.explain.plants import Ground, ONE, chain
ground = Ground(ost.open_device("host"))
graph = ost.Graph.create(ground.device)
chain(ground, graph, ("trap", ONE, (ground.count, 2)))
run = graph.instantiate()
for _ in range(5):
    run.launch(ground.stream)
{wait}
"""


@pytest.mark.parametrize("wait", ["ground.stream.synchronize()", ""], ids=["waits", "ends"])
def test_the_environment_arms_a_box_for_a_process(wait: str, tmp_path: Path) -> None:
    """A program that does not wait at all is told at its end."""
    environ = os.environ | {"OSTINATO_BLACK_BOX": "on", "OSTINATO_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(wait=wait)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 1
    assert "node 1 (trap), kernel" in ended.stderr and "finished: node 0" in ended.stderr
    assert sorted(one.suffix for one in (tmp_path / "faults").iterdir()) == [".graph", ".json"]


def test_the_variable_takes_the_usual_words_and_numbers() -> None:
    read = {
        text: BLACK_BOX.read({"OSTINATO_BLACK_BOX": text}) for text in ("", "0", "on", "1", "9")
    }
    assert read == {"": 0, "0": 0, "on": 1, "1": 1, "9": 9}
    with pytest.raises(SettingsError, match="OSTINATO_BLACK_BOX='maybe'"):
        BLACK_BOX.read({"OSTINATO_BLACK_BOX": "maybe"})


@pytest.mark.parametrize("options", [{"every": 0}, {"every": True}, {"every": 1.5}])
def test_every_is_a_whole_number(options: Any) -> None:
    with pytest.raises(InputError, match="1 or more"):
        ost.black_box(**options)
    with pytest.raises(InputError, match="executables are needed"):
        ost.black_box("run")  # type: ignore[arg-type]


def test_nothing_is_left_of_a_box(device: Device) -> None:
    """Neither its twins nor their memory, once its block has ended."""
    ground = Ground(device)
    run = trapped(ground, turn=99)
    for _ in range(3):
        with ost.black_box():
            run.launch(ground.stream)
    gc.collect()
    device.synchronize()
    assert device.context.retired == 0
    assert not [one for one in gc.get_objects() if isinstance(one, CrumbTwin | NotedInputs)]


def test_a_closed_device_lets_go_of_its_twins() -> None:
    def closed_under_all(box: ost.explain.BlackBox) -> weakref.ref[ost.Buffer]:
        with open_device("host") as device:
            ground = Ground(device)
            run = trapped(ground, turn=9)
            run.launch(ground.stream)
            assert len(box._kept) == 1
        return weakref.ref(ground.x)

    with ost.black_box() as box:
        for _ in range(2):
            gone = closed_under_all(box)
            gc.collect()
            assert gone() is None and not box._kept


def test_a_twin_that_no_longer_fits_goes_with_its_launches(host: Device) -> None:
    """And one whose executable is gone."""
    ground: Any = Ground(host)
    ground.out, ground.spare = host.zeros(N, "f4"), host.zeros(N, "f4")
    run = shape(ground, ground.x).instantiate()
    with ost.black_box() as box:
        for _ in range(5):
            run.launch(ground.stream)
            run.update(shape(ground, ground.spare))
        run.launch(ground.stream)
        host.synchronize()
        gc.collect()
        host.synchronize()
        assert len(box._kept) == 1
        del run
        gc.collect()
        host.synchronize()
        assert len(box._kept) == 0


# --- the graph and the inputs of a replay that failed
@pytest.mark.parametrize("name", [name for name, plant in PLANTS.items() if plant.again])
def test_an_autopsy_of_the_graph_file_names_the_planted_node(
    name: str, host: Device, tmp_path: Path
) -> None:
    plant, found = PLANTS[name], plants.planted(name, host, str(tmp_path))
    answer = here("autopsy", str(found["graph"]), "--device", "host", "--json")
    assert plant.running[0] in plants.in_state(answer.out, "running"), (answer, found["text"])


def file_of(ground: Ground, run: ost.GraphExec, launches: int = 1, **options: Any) -> ReplayReport:
    """What is reported of the one replay that failed, of so many that were launched at once."""
    with pytest.raises(ContextPoisonedError) as caught, ost.black_box(**options):
        with HeldStream(ground.stream):
            for _ in range(launches):
                run.launch(ground.stream)
        ground.stream.synchronize()
    assert isinstance(caught.value.report, BlackBoxReport)
    (replay,) = caught.value.report.replays
    assert (replay.file or replay.not_saved) in str(caught.value)
    return replay


def inputs_in(file: str | None) -> dict[str, list[float]]:
    assert file is not None
    with open_device("host") as device:
        loaded, stream = ost.graphfile.load(device, file), device.create_stream()
        return {name: b.to_numpy(stream).tolist() for name, b in loaded.inputs.items()}


def test_the_replay_that_failed_is_replayed_from_its_file(ground: Ground, tmp_path: Path) -> None:
    """The third one, so it fails by what its inputs hold; others were launched behind it."""
    replay = file_of(ground, trapped(ground, turn=3), launches=5)
    command = ("autopsy", str(replay.file), "--device", "host")
    again = json.loads(here(*command, "--json").out)
    states = [node["state"] for node in again["replays"][0]["nodes"]]
    assert states == ["finished", "running", "waiting", "waiting"]
    assert len([*(tmp_path / "faults").glob("*.graph")]) == 1, "an autopsy makes no other"
    (pointer, *_) = again["replays"][0]["nodes"][1]["pointers"]
    assert pointer["memory"].startswith("'count' "), "memory has the names of the file"
    given = tmp_path / "in.npz"
    np.savez(given, count=np.zeros(1, np.uint32))
    answer = here(*command, "--inputs", str(given))
    assert answer.status == 0 and "no node failed" in answer.out, answer.err


def test_the_inputs_are_those_of_the_replay_that_failed(ground: Ground) -> None:
    found = inputs_in(file_of(ground, trapped(ground, turn=3), launches=5).file)
    before = {name: values[0] for name, values in found.items()}
    assert before == {"count": 2, "x": 4, "y": 4}, "after two replays, which double x"


def test_launches_on_another_stream_leave_the_inputs_of_a_replay_under_way(ground: Ground) -> None:
    graph, device = ost.Graph.create(ground.device), ground.device
    first = graph.add_kernel(ground.kernel("twice"), ROW, ground.x)
    wait = graph.add_kernel(ground.kernel("spin"), ONE, 1000, after=[first])
    graph.add_kernel(ground.kernel("trap"), ONE, ground.count, 1, after=[wait])
    run, side = graph.instantiate(), device.create_stream()
    with pytest.raises(ContextPoisonedError) as caught, ost.black_box() as box:
        run.launch(ground.stream)
        while not any(_begun()):
            pass
        with suppress(ContextPoisonedError):
            run.launch(side)
        ground.stream.synchronize()
    assert caught.value.report is box.report and box.report is not None
    found = inputs_in(box.report.replays[0].file)
    assert found["x"][0] == 1, "what it was before the replay"


def test_the_file_does_what_the_replay_did(device: Device, tmp_path: Path) -> None:
    """Kernels, a child graph, a loop, a fork and a copy, on both drivers; the second replay."""
    ground: Any = Ground(device)
    ground.out = device.zeros(N, "f4", name="out")
    run, path = shape(ground, ground.x).instantiate(), tmp_path / "one.graph"
    with ost.black_box() as box:
        for _ in range(2):
            run.launch(ground.stream)
        ground.stream.synchronize()
        (watched,) = box._kept
        assert watched.inputs is not None
        watched.inputs.write(path)
    loaded = ost.graphfile.load(device, path)
    loaded.instantiate().launch(ground.stream)
    found = {name: b.to_numpy(ground.stream) for name, b in loaded.inputs.items()}
    for buffer in (ground.x, ground.y, ground.out, ground.count):
        np.testing.assert_array_equal(found[buffer.name], buffer.to_numpy(ground.stream))


def picking(ground: Ground) -> ost.GraphExec:
    """y = x[at], out of bounds: `x` is large and read alone, `filled` is written alone."""
    device = ground.device
    x = device.array(np.arange(1000, dtype=np.int32), name="x")
    at, y = device.array([1, 2, 1000], "i4", name="at"), device.zeros(3, "i4", name="y")
    graph = ost.Graph.create(device)
    pick = file_kernels.kernel(device, file_kernels.pick)
    filled = graph.add_fill(device.zeros(1, "i4", name="filled"), 1)
    graph.add_kernel(pick, ONE, x, at, y, 3, after=[filled])
    return graph.instantiate()


@pytest.mark.parametrize(("most", "names"), [("1 MiB", ["at", "x", "y"]), (100, ["at", "y"])])
def test_the_smallest_memory_is_noted_up_to_a_limit(
    ground: Ground, most: Any, names: list[str]
) -> None:
    replay = file_of(ground, picking(ground), inputs=most)
    answer = here("autopsy", str(replay.file), "--device", "host")
    assert "node 1 (pick), kernel" in answer.out, answer.err
    assert ("zeros: x " in answer.err) == ("x" not in names)
    with open_file(Path(str(replay.file))) as contents:
        found = contents.manifest.names("input")
    assert sorted(found) == names


def test_memory_of_one_name_has_names_of_its_own_in_the_file(ground: Ground) -> None:
    graph, after = ost.Graph.create(ground.device), list[ost.Node]()
    for name in ("x", "x", "x.1", None):
        x = ground.device.zeros(N, "f4", name=name)
        after = [graph.add_kernel(ground.kernel("twice"), ROW, x, after=after)]
    graph.add_kernel(ground.kernel("trap"), ONE, ground.count, 1, after=after)
    found = inputs_in(file_of(ground, graph.instantiate()).file)
    assert sorted(found) == ["count", "memory.3", "x", "x.1", "x.1.2"]


def test_without_inputs_there_is_no_graph_file(ground: Ground, tmp_path: Path) -> None:
    replay = file_of(ground, picking(ground), inputs=0)
    assert replay.file is None and not replay.not_saved
    assert [one.suffix for one in (tmp_path / "faults").iterdir()] == [".json"]


def test_a_changed_executable_is_in_the_file_as_it_is(ground: Ground) -> None:
    """A number, another kernel, and a copy; the definition would not fail."""
    graph = ost.Graph.create(ground.device)
    trap = ground.kernel("trap")
    first = graph.add_kernel(trap, ONE, ground.count, 9)
    second = graph.add_kernel(ground.kernel("twice"), ROW, ground.x, after=[first])
    graph.add_copy(ground.y, ground.x, after=[second])
    run = graph.instantiate()
    run.set(0, "turn", 7)
    run.set(1, ost.prepare(trap, ONE, ground.count, 2).params)
    run.set(2, dst=ground.x, src=ground.y)
    replay = file_of(ground, run)
    answer = here("autopsy", str(replay.file), "--device", "host")
    assert "node 1 (trap), kernel" in answer.out, answer.out + answer.err


@pytest.mark.parametrize("how", ["between", "switched off", "inside"])
def test_some_changed_executables_are_in_no_file(ground: Ground, how: str) -> None:
    """A file is of the graph, which would do other work."""
    graph, outer = trapped(ground, turn=9).graph, ost.Graph.create(ground.device)
    outer.add_child(graph)
    run = (outer if how == "inside" else graph).instantiate()
    node = run.nodes()[0].children[0][1] if how == "inside" else run.nodes()[1]
    if how == "switched off":
        run.set(0, enabled=False)
    with pytest.raises(ContextPoisonedError, match="in no file: it was changed ") as caught:  # noqa: SIM117
        with ost.black_box():
            for number in range(2):
                if number == (how == "between"):
                    run.set(node, "turn", 2)
                run.launch(ground.stream)
            ground.stream.synchronize()
    assert isinstance(caught.value.report, BlackBoxReport)
    assert caught.value.report.replays[0].file is None


def test_a_kernel_that_no_other_process_finds_is_in_no_file(ground: Ground) -> None:
    @ost.host_kernel("x: *f32")
    def local(launch: Any, x: Any) -> None:
        raise RuntimeError("planted")

    graph = ost.Graph.create(ground.device)
    graph.add_kernel(ground.device.kernel(local), ONE, ground.x)
    replay = file_of(ground, graph.instantiate())
    assert replay.file is None and "local" in replay.not_saved


def test_memory_that_was_freed_is_not_read(ground: Ground) -> None:
    """By other code, so that the launch is not refused; the copy would fault itself."""
    run = chained(ground, "touch", ONE, (ground.allocated(), 0))
    with pytest.raises(ContextPoisonedError, match="was freed before its last launch"):  # noqa: SIM117
        with ost.black_box(inputs="1 GiB"):
            run.launch(ground.stream)
            ground.stream.synchronize()
            ground.free_all()
            run.launch(ground.stream)
            ground.stream.synchronize()


@pytest.mark.parametrize("most", [1, 20_000])
def test_a_full_disk_costs_only_the_files(ground: Ground, tmp_path: Path, most: int) -> None:
    resource = pytest.importorskip("resource")
    graph, big = ost.Graph.create(ground.device), ground.device.zeros(25_000, "f4", name="big")
    first = graph.add_kernel(ground.kernel("touch"), ONE, big, 0)
    graph.add_kernel(ground.kernel("trap"), ONE, ground.count, 1, after=[first])
    run = graph.instantiate()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        error = fault_of(ground, run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "node 1 (trap)" in str(error)
    assert "graph and inputs are in no file: [Errno 27]" in str(error)
    assert ("no report file: [Errno 27]" in str(error)) == (most == 1)
    left = [one.suffix for one in (tmp_path / "faults").iterdir()]
    assert left == ([] if most == 1 else [".json"])


def test_files_that_were_cut_off_are_refused_in_one_line(ground: Ground) -> None:
    report = report_of(ground, trapped(ground))
    for file in (report.file, report.replays[0].file):
        assert file is not None
        path, whole = Path(file), Path(file).read_bytes()
        for part in (0, 1, 3, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:part])
            answer = here("autopsy", file, "--device", "host")
            assert answer.status == 2 and path.name in answer.err, (part, answer.err)
            assert "Traceback" not in answer.err
