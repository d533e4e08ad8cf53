"""A step with a store: its graphs are restored without a warm-up, bound to its slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import InputError
from ostinato.replay import Role, Slot
from ostinato.replay.policy import Action, Reason
from tests.graph.disk_kernels import ONE, kernel

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
            slots=[
                Slot("x", self.x, Role.INPUT, "rows"),
                Slot("y", self.y, Role.OUTPUT, "rows"),
                Slot("total", self.total, Role.STATE),
            ],
            store=self.store,
        )

    def run(self, stream: ost.Stream, rows: int) -> None:
        self.runs += 1
        size = self.step.size("rows")
        ost.launch(stream, self.kernel, ONE, self.x, self.w, self.y, self.total, size)

    def call(self, rows: int) -> tuple[Action, list[int], int]:
        decision = self.step(rows=rows)
        values = self.y.to_numpy(self.stream)[:rows].tolist()
        return decision.action, values, int(self.total.to_numpy(self.stream)[0])


@pytest.fixture
def folder(host_device: Device, tmp_path: Path) -> Path:
    first = Rig(host_device, tmp_path / "store", 10)
    for rows in (8, 8, 3, 3):  # the last call leaves padding, which no file may depend on
        first.call(rows)
    assert first.step.save() == {}
    assert first.call(2)[1] == [0, 10]  # saving changed nothing
    return tmp_path / "store"


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


def test_a_changed_graph_is_not_saved(host_device: Device, tmp_path: Path) -> None:
    rig = Rig(host_device, tmp_path, 1)
    rig.call(3), rig.call(3)
    (key,) = rig.step.cache.keys()
    with rig.step.cache.hold(key) as run:
        assert run is not None
        run.set_enabled(0, False)
    assert "was changed since it was made" in "".join(rig.step.save().values())


def test_a_step_without_a_store_saves_nothing(host_device: Device, tmp_path: Path) -> None:
    rig = Rig(host_device, tmp_path, 1)
    rig.step.store = None
    assert rig.step(rows=3).reason is Reason.WARMING_UP
    with pytest.raises(InputError, match="has no store"):
        rig.step.save()
