"""Stores of graphs: restored in place of a capture, bound to live memory; or captured, and why."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import InputError
from tests.graph.disk_kernels import ONE, add, affine, kernel


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


@pytest.fixture
def folder(host_device: Device, tmp_path: Path) -> Path:
    """A store that a first process left."""
    model, made = Model(host_device), tmp_path / "store"
    store, cache = model.store(made), ost.GraphCache(host_device)
    for factor in (1, 2, 3):
        model.run(cache, store, factor)
    assert model.captures == [1, 2, 3]
    assert store.save_cache(cache) == {}
    assert store.statistics().saved == 3
    return made


def test_the_next_process_restores_and_is_bound_to_its_own_memory(folder: Path) -> None:
    with ost.open_device("host") as device:
        model = Model(device, weight=100)
        store, cache = model.store(folder), ost.GraphCache(device)
        assert model.run(cache, store, 2) == [102, 104]
        model.x.copy_from([5, 6], model.stream)
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
        assert run is not None and not run.changed
        run.patch(0, "m", 7)
        assert run.changed
    assert "was changed since it was made" in store.save_cache(cache)["step", 1]
    assert ("step", 1) not in store


class Mode(enum.Enum):
    FAST = 1


@dataclass(frozen=True)
class Key:
    rows: int
    mode: Mode


def test_keys_are_the_same_in_every_process(host_device: Device, tmp_path: Path) -> None:
    store = ost.GraphStore(host_device, tmp_path)
    keys = [1, 1.0, True, "1", b"1", None, (1,), ((1,),), (1, 2), ("1", "2"), Key(1, Mode.FAST)]
    assert len({store.path(key) for key in keys}) == len(keys)
    assert store.path((1, "a")) == ost.GraphStore(host_device, tmp_path).path((1, "a"))
    with pytest.raises(InputError, match="object in a key"):
        store.path(object())
