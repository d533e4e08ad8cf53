"""The black box on a GPU: planted faults, each in a process of its own, which loses its context."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ostinato.device import Device
from tests.explain.plants import PLANTS, in_state
from tests.gpu import black_box_torch
from tests.gpu.foreign import library

pytestmark = pytest.mark.gpu


def outcome(module: str, name: str, device: Device, folder: Path) -> Any:
    """What a process that plants one fault prints."""
    command = [sys.executable, "-m", module, name, device.name, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", PLANTS)
def test_the_error_names_the_planted_node(name: str, cuda_device: Device, tmp_path: Path) -> None:
    plant, found = PLANTS[name], outcome("tests.explain.plants", name, cuda_device, tmp_path)
    named = found["running"] + found["early"] * plant.hasty
    assert plant.running[0] in named, found["text"]
    assert set(found["running"]) <= set(plant.running), found["text"]
    assert Path(found["file"]).parent == tmp_path
    if plant.again:  # in a process that knows only the file
        assert found["graph"] is not None, found["text"]
        command = [sys.executable, "-m", "ostinato", "autopsy", found["graph"], "--json"]
        command += ["--device", cuda_device.name]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
        states = ("running", "early") if plant.hasty else ("running",)
        assert plant.running[0] in in_state(ended.stdout, *states), ended.stdout


def test_a_hang_is_named(cuda_device: Device, tmp_path: Path) -> None:
    found = outcome("tests.explain.plants", "hang", cuda_device, tmp_path)
    assert "node 1 (spin)" in found["text"] and "finished: node 0" in found["text"]
    assert found["y"] == [2, 2]


@pytest.mark.parametrize("name", black_box_torch.PLANTS)
def test_the_error_names_a_node_of_torch(name: str, cuda_device: Device, tmp_path: Path) -> None:
    library("torch")
    found = outcome("tests.gpu.black_box_torch", name, cuda_device, tmp_path)
    assert found["torch"], "torch's own error is what ended the block"
    (name_found,) = found["names"]
    assert black_box_torch.PLANTS[name] in name_found, found["text"]
    if name == "freed":
        assert ": freed, " in found["text"], found["text"]
    if name == "observed":
        assert "captured at " in found["text"], found["text"]
