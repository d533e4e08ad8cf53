"""`ostinato cache` on a folder with sound and damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.cli.cache import app
from ostinato.modules import DiskStore
from ostinato.modules.compiler import Compiled


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = DiskStore(tmp_path / "kernels")
    for n in range(3):
        store.save(bytes([n]) * 32, Compiled("ptx", bytes(1000)), name=f"[red]s{n}", arch="sm_90")
    (store.folder / ("ff" * 32 + ".kernel")).write_bytes(b"junk")
    return store.folder


def run(*words: str) -> str:
    answer = CliRunner().invoke(app, list(words))
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_list(folder: Path) -> None:
    text = run("list", "--folder", str(folder))
    assert "[red]s1" in text and "not used: it is torn" in text and "4 files" in text


def test_list_as_json(folder: Path) -> None:
    found = json.loads(run("list", "--json", "--folder", str(folder)))
    assert sorted(k["source"] for k in found["kernels"]) == ["", "[red]s0", "[red]s1", "[red]s2"]
    assert [k["problem"] for k in found["kernels"]].count(None) == 3


def test_prune_and_clear(folder: Path) -> None:
    said = json.loads(run("prune", "--max-mib", "0.0025", "--json", "--folder", str(folder)))
    assert said["left"] < 4 and said["removed"] == 4 - said["left"]
    assert (
        json.loads(run("prune", "--max-mib", "1e303", "--json", "--folder", str(folder)))["removed"]
        == 0
    )
    left = "1 file" if said["left"] == 1 else f"{said['left']} files"
    assert f"{left} removed, 0 left" in run("clear", "--folder", str(folder))


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "0 files" in run("list", "--folder", str(tmp_path / "none"))
    assert "0 files removed" in run("clear", "--folder", str(tmp_path / "none"))


def test_the_settings_folder_is_the_default(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(folder.parent))
    assert "4 files" in run("list")
