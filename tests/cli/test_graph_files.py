"""`ostinato graph`: files are shown, run, checked and made from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import ostinato as ost
from tests.cli.commands import here, refused
from tests.graph.disk_kernels import ONE, add, affine, kernel
from tests.models.model_files import write_gguf


@pytest.fixture
def path(host_device: ost.Device, tmp_path: Path) -> Path:
    device, stream = host_device, host_device.create_stream()
    x, w, y = (device.array([n] * 3, "i4") for n in (1, 10, 0))
    first, second = kernel(device, affine), kernel(device, add)
    with ost.capture(stream) as under_way:
        ost.launch(stream, first, ONE, y, x, 2, 0, 3)
        ost.launch(stream, second, ONE, w, y, 3)
    made = tmp_path / "one.graph"
    under_way.graph.save(
        made, inputs={"x": x}, outputs={"y": y}, constants={"w": w}, keeping="by name"
    )
    return made


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    from safetensors.numpy import save_file

    made = tmp_path / "w.safetensors"
    save_file({"w": np.array([10, 10, 10], np.int32)}, made)
    return made


def test_show_says_what_a_file_holds(path: Path) -> None:
    answer = here("graph", "show", str(path))
    assert answer.status == 0, answer.err
    for words in (
        "passed its check",
        "addresses: 4 by signatures",
        "kernel affine: tests.graph.disk_kernels:affine",
        "2 kernel",
        "1  add  grid 1 block 1",
        "after 0",
    ):
        assert words in answer.out, (words, answer.out)
    assert re.search(r"^constant w: <i4\[3\], block \d, given by name$", answer.out, re.M)
    data = json.loads(here("graph", "show", str(path), "--json").out)
    assert data["format"] == "ostinato.graph" and len(data["graph"]["kernels"]["size"]) == 2


def test_run_takes_inputs_and_gives_outputs(path: Path, weights: Path, tmp_path: Path) -> None:
    given, found = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(given, x=np.array([1, 2, 3], np.int32))
    files = ("--constants", str(weights), "--inputs", str(given), "--outputs", str(found))
    answer = here("graph", "run", str(path), *files, "--times", "3")
    assert answer.status == 0, answer.err
    assert "3 launches" in answer.out and "y: [12 14 16]" in answer.out
    assert np.load(found)["y"].tolist() == [12, 14, 16]
    np.savez(given, z=np.zeros(1))
    refused(here("graph", "run", str(path), *files), "the graph has x")


def test_check_compares_with_the_stored_results(path: Path, weights: Path) -> None:
    answer = here("graph", "check", str(path), "--constants", str(weights))
    assert answer.status == 0 and "bit by bit" in answer.out, answer.err
    answer = here("graph", "check", str(path))
    assert answer.status == 1 and "takes the constant 'w'" in answer.err
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert here("graph", "check", str(path)).status == 1


def test_save_saves_a_models_step_or_says_why_not(tmp_path: Path) -> None:
    model, path = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "step.graph"
    answer = here("graph", "save", str(path), "--model", str(model))
    if answer.status:  # kernels in C are objects of one process
        assert "another process could not find the kernel" in answer.err and not path.exists()
    else:
        assert "nodes saved" in answer.out
        assert "passed its check" in here("graph", "show", str(path)).out
