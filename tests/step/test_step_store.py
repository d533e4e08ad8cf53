"""A step with a store: its graphs are restored without a warm-up, bound to its slots."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.host.driver import HostDriver
from ostinato.errors import CaptureError, ContextPoisonedError, InputError, StateLostError, Status
from ostinato.step import Slot
from ostinato.step.policy import Action, Reason
from ostinato.step.store import StoreStatistics
from ostinato.step.work import work_digest
from ostinato.testing import FaultyDriver
from tests.graphfile.file_kernels import ONE, kernel

pytestmark = pytest.mark.usefixtures("checks_here")

ROWS = 8


@ost.host_kernel("x: *const i32, w: *const i32, y: *i32, total: *i32, rows: *const u32")
def weigh(_: Any, x: Any, w: Any, y: Any, total: Any, rows: Any) -> None:
    n = int(rows[0])
    y[:n] = x[:n] * w[0]
    total[0] += n


class Rig:
    def __init__(self, device: Device, folder: Path, weight: int) -> None:
        self.stream = device.create_stream()
        self.kernel = kernel(device, weigh)
        self.x = device.array(np.arange(ROWS), np.int32)
        self.y, self.total = device.zeros(ROWS, np.int32), device.zeros(1, np.int32)
        self.w = device.array([weight], np.int32)
        self.runs = 0
        self.store = ost.GraphStore(device, folder, tag="weigh", constants={"w": self.w})
        self.step = ost.GraphedStep(
            self.run,
            stream=self.stream,
            cache=ost.GraphCache(device, buckets=ost.PowersOfTwo(ROWS)),
            name="weigh",
            slots=self.named(),
            store=self.store,
        )

    def named(self) -> list[Slot]:
        return [
            Slot("x", self.x, "input", "rows"),
            Slot("y", self.y, "output", "rows"),
            Slot("total", self.total, "state"),
        ]

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.runs += 1
        size = sizes.on_device("rows")
        ost.launch(stream, self.kernel, ONE, self.x, self.w, self.y, self.total, size)

    def call(self, rows: int) -> tuple[Action, list[int], int]:
        decision = self.step(rows=rows)
        values = self.y.to_numpy(self.stream)[:rows].tolist()
        return decision.action, values, int(self.total.to_numpy(self.stream)[0])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once: the check of each file starts a process."""
    made = tmp_path_factory.mktemp("first") / "store"
    with ost.open_device("host") as device:
        first = Rig(device, made, 10)
        for rows in (8, 8, 3, 3):  # the last call leaves padding, which no file may depend on
            first.call(rows)
        assert first.step.save() == {}
        assert first.call(2)[1] == [0, 10]  # saving changed nothing
    return made


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A store that a first process left, of the test's own."""
    return shutil.copytree(saved, tmp_path / "store")


def test_the_next_process_replays_at_once(folder: Path) -> None:
    with ost.open_device("host") as device:
        rig = Rig(device, folder, weight=100)
        assert rig.call(3) == (Action.REPLAY, [0, 100, 200], 3)
        assert rig.call(4) == (Action.REPLAY, [0, 100, 200, 300], 7)  # the same bucket
        assert rig.call(8) == (Action.REPLAY, [100 * n for n in range(8)], 15)
        assert rig.runs == 0
        assert rig.store.statistics().restored == 2
        assert rig.call(1)[0] is Action.EAGER  # a key that is not there is warmed up as usual
        assert rig.runs == 1


def test_prepare_and_hold_restore_too(folder: Path) -> None:
    """A held graph reads its own size, also after a call of another one: no run has said which
    sizes are read."""
    with ost.open_device("host") as device:
        rig = Rig(device, folder, weight=100)
        assert rig.step.prepare(rows=3).action is Action.REPLAY
        with rig.step.hold(rows=8) as held:
            assert rig.call(3) == (Action.REPLAY, [0, 100, 200], 3)
            held.launch()
        assert rig.y.to_numpy(rig.stream).tolist() == [100 * n for n in range(8)]
        assert rig.runs == 0 and rig.store.statistics().restored == 2


def test_a_restored_step_joins_no_capture_with_another_size(folder: Path) -> None:
    """The size cannot be written there."""
    with ost.open_device("host") as device:
        rig = Rig(device, folder, weight=100)
        rig.call(3)
        wrong = "rows is 3 on the device and 8 is wanted"
        with pytest.raises(CaptureError, match=wrong), ost.capture(rig.stream):
            rig.step(rows=8)
        rig.call(8)
        with ost.capture(rig.stream) as under_way:
            rig.step(rows=8)
        rig.y.set(np.zeros(ROWS, np.int32), rig.stream)
        under_way.graph.instantiate().launch(rig.stream)
        assert rig.y.to_numpy(rig.stream).tolist() == [100 * n for n in range(8)]


class ReadsNow(Rig):
    """It reads its size in some of its runs."""

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.runs += 1
        size = sizes.on_device("rows") if sizes.rows > 2 else self.w.view(dtype="u32")
        ost.launch(stream, self.kernel, ONE, self.x, self.w, self.y, self.total, size)


def test_a_restored_graph_reads_a_size_that_no_run_has_read(
    host_device: Device, tmp_path: Path
) -> None:
    first = ReadsNow(host_device, tmp_path, 1)
    first.call(8), first.call(8)
    assert first.step.save() == {}
    with ost.open_device("host") as device:
        rig = ReadsNow(device, tmp_path, weight=1)
        assert rig.call(8)[:2] == (Action.REPLAY, [*range(8)])
        assert rig.call(1)[0] is Action.EAGER
        rig.y.set(np.zeros(ROWS, np.int32), rig.stream)
        assert rig.call(5)[:2] == (Action.REPLAY, [*range(5)])
        assert rig.y.to_numpy(rig.stream).tolist() == [0, 1, 2, 3, 4, 0, 0, 0]


class ReadsNone(Rig):
    """Its graphs are of whole buckets."""

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.runs += 1
        count = self.w.view(dtype="u32")
        ost.launch(stream, self.kernel, ONE, self.x, self.w, self.y, self.total, count)


def test_a_step_that_reads_no_size_is_restored_and_joins_captures(
    host_device: Device, tmp_path: Path
) -> None:
    first = ReadsNone(host_device, tmp_path, 2)
    first.call(8), first.call(8)
    assert first.step.save() == {}
    with ost.open_device("host") as device:
        rig = ReadsNone(device, tmp_path, 2)
        assert rig.call(8) == (Action.REPLAY, [0, 2, 0, 0, 0, 0, 0, 0], 2)
        with ost.capture(rig.stream) as under_way:
            rig.step(rows=3)
        assert len(under_way.graph) == 1


def test_a_step_whose_graphs_are_off_restores_nothing(folder: Path) -> None:
    with ost.open_device("host") as device:
        rig = Rig(device, folder, weight=100)
        rig.step.graphs = False
        assert rig.call(3) == (Action.EAGER, [0, 100, 200], 3)
        assert rig.store.statistics() == StoreStatistics(0, 0, {})
        rig.step.graphs = True
        assert rig.call(3) == (Action.REPLAY, [0, 100, 200], 6)


class Edited(Rig):
    """The next version of the program."""

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.runs += 1
        size = sizes.on_device("rows")
        ost.launch(stream, self.kernel, ONE, self.x, self.w, self.y, self.total, size)
        ost.launch(stream, self.kernel, ONE, self.x, self.w, self.y, self.total, size)


class Fewer(Rig):
    """A slot is gone, and the step writes to memory without a name."""

    def named(self) -> list[Slot]:
        return super().named()[:2]


@pytest.mark.parametrize(
    ("other", "total", "why"),
    [(Edited, 6, "no file of this key and tag"), (Fewer, 3, "it names total")],
)
def test_another_step_does_not_take_the_graphs(
    folder: Path, other: type[Rig], total: int, why: str
) -> None:
    with ost.open_device("host") as device:
        rig = other(device, folder, weight=100)
        assert rig.call(3) == (Action.EAGER, [0, 100, 200], total)
        assert rig.runs == 1
        assert why in "".join(rig.store.statistics().reasons)


def test_two_steps_of_one_store_need_two_names(host_device: Device, tmp_path: Path) -> None:
    """Each would restore the other's graphs."""
    rig = Rig(host_device, tmp_path, 1)

    def another(**options: Any) -> ost.GraphedStep:
        cache = rig.step.cache
        return ost.GraphedStep(rig.run, stream=rig.stream, cache=cache, store=rig.store, **options)

    with pytest.raises(InputError, match="the graphs of another 'weigh'"):
        another(name="weigh")
    shared = [another(name="weigh", share="same") for _ in range(2)]
    other = another(name="other")
    rig.step.close()
    other.close()
    assert len({step.name for step in (another(name="weigh"), another(name="other"))}) == 2
    del shared


def test_a_digest_of_work_is_of_code_defaults_and_closures() -> None:
    def made(factor: int, offset: float = 0.5) -> Callable[..., object]:
        def run(x: object, y: float = offset) -> object:
            return factor, x, y

        return run

    def other(x: object, y: float = 0.5) -> object:
        return x, y

    class Model:
        def run(self) -> None: ...

    model = Model()
    same = [made(1), made(1)]
    for _ in range(1000):  # the interpreter specialises code that runs often
        same[0](1)
    assert work_digest(same[0], None) == work_digest(same[1], None)
    assert work_digest(model.run) == work_digest(Model().run)
    assert work_digest(partial(other, 1)) == work_digest(partial(other, 1))
    functions = [
        *(made(1), made(2), made(1, 0.25), other, model.run, len),
        *(partial(other, 1), partial(other, 2), partial(other, x=2), partial(other, y=2)),
    ]
    assert len({work_digest(f, None) for f in functions}) == len(functions)
    assert work_digest(other, None) != work_digest(None, other)


def compiled(body: str) -> Any:
    names: dict[str, Any] = {}
    exec(body, names)
    return names["run"]


def closing_over(value: object) -> Callable[..., object]:
    return lambda: value


@dataclass(frozen=True)
class Scaled:
    by: int

    def __call__(self) -> int:
        return self.by


@dataclass(frozen=True)
class ScaledOtherwise:
    by: int

    def __call__(self) -> int:
        return -self.by


ScaledOtherwise.__qualname__ = Scaled.__qualname__  # the next version of the program


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(
            partial(compiled("def run(a, b): pass"), a=1, b=2),
            partial(compiled("def run(a, b): pass"), b=1, a=2),
            id="named arguments",
        ),
        pytest.param(
            compiled("def run(x): return x[..., 0]"),
            compiled("def run(x): return x[..., 1]"),
            id="an index with an ellipsis",
        ),
        pytest.param(
            compiled("class A:\n def __call__(self): return 1\nrun = A()"),
            compiled("class A:\n def __call__(self): return 2\nrun = A()"),
            id="an object that can be called",
        ),
        pytest.param(Scaled(1), ScaledOtherwise(1), id="a record that can be called"),
        pytest.param(closing_over([1, 2]), closing_over([2, 1]), id="a list"),
        pytest.param(closing_over((1, [2])), closing_over((1, [3])), id="a list in a tuple"),
        pytest.param(closing_over({"a": 1}), closing_over({"a": 2}), id="a dict"),
        pytest.param(closing_over({1, 2}), closing_over({1, 3}), id="a set"),
        pytest.param(closing_over(slice(4)), closing_over(slice(8)), id="a slice"),
        pytest.param(
            closing_over(np.float32(1)), closing_over(np.float32(2)), id="a number of NumPy"
        ),
        pytest.param(closing_over(np.float32), closing_over(np.float16), id="a type of NumPy"),
        pytest.param(closing_over([[1], 2]), closing_over([[1, 2]]), id="lists in lists"),
    ],
)
def test_a_digest_of_work_tells_apart(one: object, other: object) -> None:
    """A store would give the graph of the one to the other."""
    assert work_digest(one) == work_digest(one)
    assert work_digest(one) != work_digest(other)


def test_memory_that_cannot_be_put_back_is_said(folder: Path) -> None:
    """The check launches the graph on the step's own memory."""
    faults = FaultyDriver(HostDriver())
    with Device(faults) as device:
        rig = Rig(device, folder.parent / "another", weight=100)
        for _ in range(2):
            rig.call(3)
        faults.fail("memcpy_from_host", Status.INVALID_VALUE, at=2, times=2)
        with pytest.raises(StateLostError, match="could not put back"):
            rig.step.save()
        with pytest.raises(StateLostError):
            rig.step(rows=3)
        for slot in rig.step.slots:
            slot.buffer.set(np.zeros(slot.buffer.shape, np.int32), rig.stream)
        rig.step.forget(rows=3)
        assert rig.call(3)[1] == [0, 0, 0]
        assert rig.step.save() == {}


def test_a_step_without_a_store_saves_nothing(host_device: Device, tmp_path: Path) -> None:
    rig = Rig(host_device, tmp_path, 1)
    rig.step.store = None
    assert rig.step(rows=3).reason is Reason.WARMING_UP
    with pytest.raises(InputError, match="has no store"):
        rig.step.save()


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ("graph_create", Status.OUT_OF_MEMORY),
        ("graph_add_kernels", Status.INVALID_VALUE),
        ("module_load", Status.INVALID_IMAGE),
        ("graph_instantiate", Status.INVALID_VALUE),
        ("graph_instantiate", Status.OUT_OF_MEMORY),
        ("memory_range", Status.INVALID_VALUE),
        ("exec_launch", Status.OUT_OF_MEMORY),  # after the restore
    ],
)
def test_a_restore_that_the_driver_refuses_costs_speed_alone(
    folder: Path, call: str, status: Status
) -> None:
    faults = FaultyDriver(HostDriver())
    with Device(faults) as device:
        rig = Rig(device, folder, weight=100)
        fault = faults.fail(call, status)
        assert rig.call(3) == (Action.EAGER, [0, 100, 200], 3)
        assert fault.fired == 1
        assert rig.call(3)[1:] == ([0, 100, 200], 6)  # captured as usual
        assert rig.call(3)[0] is Action.REPLAY
        found, late = rig.store.statistics(), call == "exec_launch"
        assert found.restored == 2 * late and list(found.reasons.values()) == [1] * (not late), (
            found
        )


@pytest.mark.parametrize("call", ["graph_add_kernels", "module_load", "graph_instantiate"])
def test_a_context_that_is_lost_while_a_graph_is_restored_is_said(folder: Path, call: str) -> None:
    faults = FaultyDriver(HostDriver())
    with Device(faults) as device:
        rig = Rig(device, folder, weight=100)
        faults.fail(call, Status.LAUNCH_FAILED)
        with pytest.raises(ContextPoisonedError):
            rig.step(rows=3)
