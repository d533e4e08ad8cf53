"""Stores of graphs: restored in place of a capture, bound to live memory; or captured, and why."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import DeviceProperties
from ostinato.driver.host.driver import HostDriver
from ostinato.errors import InputError
from ostinato.graphfile.show import file_text
from tests.graphfile.file_kernels import ONE, add, affine, count_down, kernel
from tests.processes import child_environment

pytestmark = pytest.mark.usefixtures("checks_here")


class Model:
    """y = factor * x + w, with a graph for each factor."""

    def __init__(self, device: Device, weight: int = 10) -> None:
        self.device = device
        self.stream = device.create_stream()
        self.kernels = kernel(device, affine), kernel(device, add)
        self.x, self.y = device.array([1, 2], np.int32), device.array([0, 0], np.int32)
        self.w = device.array([weight, weight], np.int32)
        self.captures: list[int] = []

    def store(self, folder: Path, tag: str = "one") -> ost.GraphStore:
        return ost.GraphStore(
            self.device,
            folder,
            tag=tag,
            inputs={"x": self.x},
            outputs={"y": self.y},
            constants={"w": self.w},
        )

    def capture(self, factor: int) -> Callable[[], ost.GraphExec]:
        def make() -> ost.GraphExec:
            self.captures.append(factor)
            with ost.capture(self.stream) as under_way:
                ost.launch(self.stream, self.kernels[0], ONE, self.y, self.x, factor, 0, 2)
                ost.launch(self.stream, self.kernels[1], ONE, self.w, self.y, 2)
            return under_way.graph.instantiate()

        return make

    def run(self, cache: ost.GraphCache, store: ost.GraphStore, factor: int) -> list[int]:
        key = ("step", factor)
        cache.get_or_capture(key, store.maker(key, self.capture(factor)))
        assert cache.replay(key, self.stream)
        return self.y.to_numpy(self.stream).tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once: the check of each file starts a process."""
    made = tmp_path_factory.mktemp("first") / "store"
    with ost.open_device("host") as device:
        model = Model(device)
        store, cache = model.store(made), ost.GraphCache(device)
        for factor in (1, 2, 3):
            model.run(cache, store, factor)
        assert model.captures == [1, 2, 3]
        assert store.save_cache(cache) == {}
        assert store.statistics().saved == 3
    return made


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A store that a first process left, of the test's own."""
    return shutil.copytree(saved, tmp_path / "store")


def test_the_next_process_restores_and_is_bound_to_its_own_memory(folder: Path) -> None:
    with ost.open_device("host") as device:
        model = Model(device, weight=100)
        store, cache = model.store(folder), ost.GraphCache(device)
        assert model.run(cache, store, 2) == [102, 104]
        model.x.set([5, 6], model.stream)
        assert model.run(cache, store, 3) == [115, 118]
        assert model.captures == []
        assert model.run(cache, store, 4) == [120, 124]  # a key that is not there
        assert model.captures == [4]
        found = store.statistics()
        assert found.restored == 2
        assert found.reasons == {"there is no file of this key and tag": 1}


def test_a_file_that_does_not_fit_is_captured_with_the_reason(
    host_device: Device, folder: Path
) -> None:
    model, cache = Model(host_device), ost.GraphCache(host_device)
    store = model.store(folder)
    damaged = store.path(("step", 1))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    open_to_all = store.path(("step", 2))
    open_to_all.chmod(0o666)
    for factor in (1, 2):
        assert model.run(cache, store, factor) == [10 + factor, 10 + 2 * factor]
    assert model.captures == [1, 2]
    reasons = " ".join(store.statistics().reasons)
    assert "it cannot be read" in reasons and "other users may write to it" in reasons
    other = model.store(folder, tag="another model")
    model.run(ost.GraphCache(host_device), other, 3)
    assert model.captures == [1, 2, 3]
    model.w = host_device.array([1], np.int32)
    small = model.store(folder)
    assert small.restore(("step", 3)) is None
    assert "'w' has 4 bytes, and the graph was captured with 8" in str(small.statistics().reasons)


def test_a_patched_executable_is_not_saved(host_device: Device, tmp_path: Path) -> None:
    model, cache = Model(host_device), ost.GraphCache(host_device)
    store = model.store(tmp_path / "store")
    model.run(cache, store, 1)
    with cache.hold(("step", 1)) as run:
        assert not run.changed()
        run.set(0, "m", 7)
        assert run.changed()
    assert "was changed since it was made" in store.save_cache(cache)["step", 1]
    assert ("step", 1) not in store


def refused(model: Model, folder: Path, key: object, **store: str) -> str:
    """Why a key is not restored; it is captured, and right."""
    made = model.store(folder, **store)
    assert made.restore(key, complete=True) is None
    (why,) = made.statistics().reasons
    assert made.statistics().restored == 0
    return why


def test_the_file_of_another_key_is_not_taken(host_device: Device, folder: Path) -> None:
    model = Model(host_device)
    store = model.store(folder)
    store.path(("step", 2)).replace(store.path(("step", 1)))
    assert "the file of another key" in refused(model, folder, ("step", 1))
    store.path(("step", 1)).parent.mkdir(exist_ok=True)
    other = model.store(folder, tag="two")
    store.path(("step", 3)).replace(other.path(("step", 3)))
    assert "the file of another key or tag" in refused(model, folder, ("step", 3), tag="two")


class Elsewhere(HostDriver):
    """A device that says other things of itself."""

    changes: ClassVar[dict[str, object]] = {}

    @property
    def properties(self) -> DeviceProperties:
        return dataclasses.replace(super().properties, **self.changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [{"driver_version": "999.1"}, {"name": "another device"}],
    ids=lambda c: next(iter(c)),
)
def test_a_file_of_another_driver_or_device_is_captured_anew(
    folder: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Elsewhere, "changes", changes)
    with Device(Elsewhere()) as device:
        model = Model(device)
        store, cache = model.store(folder), ost.GraphCache(device)
        assert model.run(cache, store, 2) == [12, 14]
        assert model.captures == [2]
        (why,) = store.statistics().reasons
        assert "it was saved on" in why and str(next(iter(changes.values()))) in why
        assert store.save_cache(cache) == {}  # for the next process here
        assert model.store(folder).restore(("step", 2)) is not None


def test_a_file_that_names_more_than_the_process_has_is_captured_anew(
    host_device: Device, folder: Path
) -> None:
    """It would read what was there when it was saved."""
    model, cache = Model(host_device), ost.GraphCache(host_device)
    named = {"outputs": {"y": model.y}, "constants": {"w": model.w}}
    store = ost.GraphStore(host_device, folder, tag="one", **named)
    assert model.run(cache, store, 2) == [12, 14]
    assert model.captures == [2]
    assert list(store.statistics().reasons) == ["it names x, and that is not given here"]
    loaded = store.restore(("step", 2))  # who asks for the graph can have memory of its own
    assert loaded is not None and loaded.inputs["x"].address != model.x.address


def test_a_name_of_two_things_is_refused(host_device: Device, folder: Path) -> None:
    model = Model(host_device)
    store = model.store(folder)
    other = host_device.array([9, 9], np.int32)
    assert store.restore(("step", 1), {"x": other}) is None
    assert "the store has other memory of this name" in "".join(store.statistics().reasons)
    with pytest.raises(InputError, match="x: the store has other memory"):
        store.save(("step", 1), model.capture(1)().graph, inputs={"x": other})


def test_memory_that_was_closed_is_no_error_of_the_caller(
    host_device: Device, folder: Path
) -> None:
    model, cache = Model(host_device), ost.GraphCache(host_device)
    store = model.store(folder)
    old, model.w = model.w, host_device.array([1, 1], np.int32)
    old.close()
    assert model.run(cache, store, 2) == [3, 5]
    assert model.captures == [2]
    assert "'w' is at" in "".join(store.statistics().reasons)


def test_what_was_restored_is_not_saved_again(host_device: Device, folder: Path) -> None:
    model, cache = Model(host_device), ost.GraphCache(host_device)
    store = model.store(folder)
    for factor in (1, 2, 4):
        model.run(cache, store, factor)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.graph")}
    store.path(("step", 2)).unlink()
    assert store.save_cache(cache) == {}
    assert store.statistics().saved == 2  # the new key, and the one that is gone
    assert store.path(("step", 1)).stat().st_mtime_ns == before[store.path(("step", 1))]
    again = model.store(folder)
    assert all(again.restore(("step", factor)) is not None for factor in (1, 2, 3, 4))


@pytest.mark.parametrize("change", ["a node more", "another node"])
def test_a_restored_graph_that_was_changed_is_saved(
    host_device: Device, folder: Path, change: str
) -> None:
    model, cache = Model(host_device), ost.GraphCache(host_device)
    store = model.store(folder)
    loaded = store.restore(("step", 2))
    assert loaded is not None and loaded.as_saved()
    if change == "a node more":
        loaded.add_kernel(model.kernels[1], ONE, model.w, model.y, 2, after=loaded.nodes()[-1:])
    else:  # as many nodes and edges as before
        other = ost.prepare(model.kernels[1], ONE, model.w, model.y, 2)
        loaded.replace(loaded.nodes()[-1], other)
    assert not loaded.as_saved()
    run = loaded.instantiate()
    run.launch(model.stream)
    answer = model.y.to_numpy(model.stream).tolist()
    cache.install(("step", 2), run)
    assert store.save_cache(cache) == {}
    assert model.run(ost.GraphCache(host_device), model.store(folder), 2) == answer


def test_a_loop_is_saved_beside_its_executable(host_device: Device, tmp_path: Path) -> None:
    """A graph with conditional nodes has one executable at a time, and the cache has it."""
    device = host_device
    stream, left, y = device.create_stream(), device.array([3], "i4"), device.array([0], "i4")
    step, countdown = kernel(device, affine), kernel(device, count_down)
    memory = {"left": left, "y": y}

    def store() -> ost.GraphStore:
        return ost.GraphStore(device, tmp_path, inputs=memory, outputs=memory)

    def make() -> ost.GraphExec:
        graph = ost.Graph.create(device)
        again = graph.condition(1, reset_at_launch=True)
        body = graph.add_conditional("while", again).bodies[0]
        counted = body.add_kernel(countdown, ONE, left, again)
        body.add_kernel(step, ONE, y, y, 1, 10, 1, after=[counted])
        return graph.instantiate()

    cache = ost.GraphCache(device)
    cache.get_or_capture("loop", make)
    assert store().save_cache(cache) == {}
    restored = ost.GraphCache(device)
    restored.get_or_capture("loop", store().maker("loop", lambda: pytest.fail("captured")))
    for one in (cache, restored):
        left.set([3], stream)
        y.set([0], stream)
        assert one.replay("loop", stream)
        assert y.to_numpy(stream).tolist() == [30]


def test_threads_restore_at_once(host_device: Device, folder: Path) -> None:
    """Each from the first file to the last: they share modules, and each has its own graphs."""
    answers: list[list[list[int]]] = []

    def work() -> None:
        for _ in range(8):
            model, cache = Model(host_device), ost.GraphCache(host_device)
            store = model.store(folder)
            answers.append([model.run(cache, store, factor) for factor in (1, 2, 3)])
            assert model.captures == []

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[[11, 12], [12, 14], [13, 16]]] * 32


def test_show_says_whose_file_it_is(host_device: Device, folder: Path) -> None:
    path = Model(host_device).store(folder).path(("step", 1))
    (line,) = (line for line in file_text(path).splitlines() if line.startswith("key"))
    assert "'one'" in line and "'step'" in line and "int:1" in line


def test_keys_share_their_inputs(host_device: Device, folder: Path) -> None:
    model, cache = Model(host_device), ost.GraphCache(host_device)
    store, code = model.store(folder), folder / "code"
    assert [path.stat().st_size for path in code.iterdir()] == [8]  # x, of three keys
    for factor in (1, 2, 3):
        model.run(cache, store, factor)
        ost.graphfile.check(
            host_device, store.path(("step", factor)), code=code, constants={"w": model.w}
        )
    model.x.set([7, 8], model.stream)
    store.save(("step", 1), model.capture(1)().graph)
    (code / ("0" * 64)).write_bytes(b"123")
    left = folder / "graphs" / f".tmp-1-{'0' * 16}"  # of a process that was killed
    left.write_bytes(b"12")
    assert len(list(code.iterdir())) == 3
    assert store.prune() == 5 and not left.exists()
    for factor in (2, 3):
        store.save(("step", factor), model.capture(factor)().graph)
    assert store.prune() == 8
    assert store.prune() == 0
    assert model.store(folder).restore(("step", 1)) is not None


def test_pruning_leaves_what_the_store_did_not_write(host_device: Device, folder: Path) -> None:
    store = Model(host_device).store(folder)
    for own in ("code/train.py", "code/.tmp-notes", "graphs/.tmp-notes", "graphs/notes.txt"):
        (folder / own).write_text("mine")
    (folder / "code" / ("0" * 64)).write_text("of none")
    assert store.prune() == len("of none")
    assert all(
        (folder / own).read_text() == "mine"
        for own in ("code/train.py", "code/.tmp-notes", "graphs/.tmp-notes", "graphs/notes.txt")
    )


def test_pruning_keeps_what_a_file_that_is_not_read_may_name(
    host_device: Device, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be of a newer version, or another user's for now."""
    model = Model(host_device)
    store = model.store(folder)
    path = store.path(("step", 1))
    for other in (2, 3):
        store.path(("step", other)).unlink()
    path.chmod(0o666)
    assert store.prune() == 0
    assert str(path) in caplog.text and "nothing is deleted" in caplog.text
    path.chmod(0o600)
    assert store.prune() == 0 and store.restore(("step", 1)) is not None


def test_what_is_no_file_is_captured_with_the_reason(host_device: Device, folder: Path) -> None:
    model, cache = Model(host_device), ost.GraphCache(host_device)
    store = model.store(folder)
    store.path(("step", 1)).unlink()
    store.path(("step", 1)).mkdir()
    assert model.run(cache, store, 1) == [11, 12]
    assert "it is not a regular file" in "".join(store.statistics().reasons)
    assert "another process" not in store.save_cache(cache)[("step", 1)]
    (folder / "graphs").rename(folder / "moved")
    (folder / "graphs").write_text("a file in its place")
    other = model.store(folder)
    assert model.run(ost.GraphCache(host_device), other, 2) == [12, 14]
    assert len(other.statistics().reasons) == 1
    assert model.captures == [1, 2]


def test_a_relative_folder_stays_where_it_was(
    host_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Model(host_device)
    store = model.store(Path("here"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.save("key", model.capture(2)().graph, check=False)
    assert not list(Path.cwd().iterdir())
    monkeypatch.chdir(tmp_path)
    assert model.store(Path("here")).restore("key") is not None


def test_keys_are_the_same_in_every_process(host_device: Device, tmp_path: Path) -> None:
    """`test_stable_text` has what their texts are."""
    store = ost.GraphStore(host_device, tmp_path)
    keys = [1, 1.0, True, "1", b"1", None, (1,), ((1,),), (1, 2), ("1", "2")]
    assert len({store.path(key) for key in keys}) == len(keys)
    assert store.path((1, "a")) == ost.GraphStore(host_device, tmp_path).path((1, "a"))
    with pytest.raises(InputError, match="is not the same in another process"):
        store.path(object())


def test_tag_and_key_do_not_run_into_each_other(host_device: Device, tmp_path: Path) -> None:
    def store(tag: str) -> ost.GraphStore:
        return ost.GraphStore(host_device, tmp_path, tag=tag)

    assert store("a\nstr 'b'").path("c") != store("a").path("b\nstr 'c'")
    assert store("\ud800").path("\udfff") != store("\udfff").path("\ud800")


_SAVING = """
import sys
from pathlib import Path
import ostinato as ost
from tests.step.test_graph_store import Model
with ost.open_device("host") as device:
    model = Model(device)
    store, cache = model.store(Path(sys.argv[1])), ost.GraphCache(device)
    for factor in (1, 2):
        model.run(cache, store, factor)
    print("begun", flush=True)
    while True:
        assert store.save_cache(cache, check=False) == {}
        if sys.argv[2] == "once":
            break
"""


def saving(folder: Path, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _SAVING, str(folder), how],
        env=child_environment(),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )


def all_of(folder: Path) -> None:
    """Every key is restored, and right."""
    with ost.open_device("host") as device:
        model = Model(device)
        store, cache = model.store(folder), ost.GraphCache(device)
        assert [model.run(cache, store, factor) for factor in (1, 2)] == [[11, 12], [12, 14]]
        assert model.captures == [] and store.statistics().reasons == {}


def test_two_processes_save_one_store(tmp_path: Path) -> None:
    both = [saving(tmp_path / "store", "once") for _ in range(2)]
    for process in both:
        process.communicate(timeout=120)
        assert process.returncode == 0
    all_of(tmp_path / "store")
    assert len(list((tmp_path / "store" / "graphs").iterdir())) == 2


def test_a_process_that_is_killed_while_it_saves_leaves_whole_files(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    for wait in (0.003, 0.05):
        process = saving(folder, "for ever")
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        while len(list(folder.glob("graphs/*.graph"))) < 2:
            assert process.poll() is None
        time.sleep(wait)
        process.kill()
        process.communicate()
        all_of(folder)
