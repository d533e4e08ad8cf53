"""`ostinato tune` where there is no GPU, what it lists, and (with one) that decoders use it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ostinato.bench.random_weights import random_checkpoint
from ostinato.device import Device
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda import shapes
from ostinato.models.cuda.tunings import TuningKey, TuningStore
from ostinato.models.tune import search as tuning_bench
from ostinato.models.tune.search import SweepResult
from tests.cli.commands import Answer, here, process, refused

command: Any = import_module("ostinato.cli.tune")

CONFIG = LlamaConfig(
    hidden=192,
    layers=1,
    heads=3,
    kv_heads=1,
    head_size=64,
    inner=136,
    vocabulary=257,
    context_length=512,
)


def tune(folder: Path, *arguments: str, device: str = "host") -> Answer:
    environ = {"OSTINATO_DEVICE": device, "OSTINATO_CACHE_DIR": str(folder), "COLUMNS": "160"}
    return (here if device == "host" else process)("tune", *arguments, **environ)


def save(folder: Path, gpu: str = "Test GPU") -> Path:
    key = TuningKey.of(CONFIG, 1, gpu)
    tuning = shapes.default_tuning(CONFIG)
    store = TuningStore(folder / "tunings")
    return store.save(key, tuning, before={20: 110.0}, after={20: 99.6})


@pytest.mark.parametrize("arguments", [(), ("--shape", "1B", "--rows", "8"), ("--json",)])
def test_the_host_has_nothing_to_tune(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = tune(tmp_path, *arguments)
    assert result.status == 1
    assert "nothing to tune on host" in result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    assert not (tmp_path / "tunings").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--shape", "2T"), "no shape '2T'"),
        (("--model", "x", "--shape", "1B"), "not both"),
        (("--context", "soon"), "whole numbers"),
        (("--context", "20,-3"), "begin at 0"),
        (("--rows", "65"), "--rows"),
        (("--seconds", "0"), "--seconds"),
        (("--seconds", "nan"), "--seconds"),
        (("--shape", ""), "no shape ''"),
    ],
)
def test_bad_options_are_said(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    result = tune(tmp_path, *arguments)
    refused(result, said)


def test_listing_says_what_is_stored_and_what_is_not_used(tmp_path: Path) -> None:
    assert json.loads(tune(tmp_path, "--list", "--json").out)["stored"] == []
    save(tmp_path)
    damaged = save(tmp_path, "Other GPU [red]")
    damaged.write_text("{}")
    listed = json.loads(tune(tmp_path, "--list", "--json").out)
    assert listed["folder"] == str(tmp_path / "tunings")
    by_gpu = {row["gpu"]: row for row in listed["stored"]}
    assert by_gpu["Test GPU"]["after_us"] == {"20": 99.6}
    assert by_gpu["Test GPU"]["problem"] is None
    assert by_gpu[None]["problem"]
    shown = tune(tmp_path, "--list").out
    assert "Test GPU" in shown and shapes.shape_key(CONFIG) in shown
    assert "not used" in shown
    assert f"2 stored in {tmp_path}" in shown


def test_a_folder_that_is_none_is_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    for option in ("--list", "--clear"):
        result = tune(file, option)
        assert result.status == 1 and "Not a directory" in result.err and not result.out


def test_what_is_no_file_is_listed_and_cleared(tmp_path: Path) -> None:
    """Reading a FIFO without a writer does not end."""
    (tmp_path / "tunings").mkdir()
    os.mkfifo(tmp_path / "tunings" / "x.json")
    assert "not a regular file" in tune(tmp_path, "--list").out
    assert "1 tunings removed" in tune(tmp_path, "--clear").out


def test_clearing(tmp_path: Path) -> None:
    save(tmp_path)
    assert json.loads(tune(tmp_path, "--clear", "--json").out)["removed"] == 1
    assert "0 tunings removed" in tune(tmp_path, "--clear").out


def test_a_search_begins_with_what_is_stored(
    host_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a short search does not replace what a longer one found with something slower."""
    rule = shapes.default_tuning(
        CONFIG,
        multiprocessors=host_device.properties.multiprocessors,
        clusters=host_device.capabilities.clusters,
    )
    stored = replace(rule, programmatic=False)
    store, begun = TuningStore(tmp_path), []
    key = TuningKey.of(CONFIG, 1, host_device.properties.name)
    path = store.save(key, stored, before={20: 110.0}, after={20: 99.6})
    before = path.read_bytes()

    class Meter:
        def __init__(self, device: Device, weights: Any, trusted: Any, **sizes: Any) -> None:
            begun.append(trusted)

        def __enter__(self) -> Meter:
            return self

        def __exit__(self, *exception: object) -> None: ...

    def run(sweep: tuning_bench.Sweep, seconds: float) -> SweepResult:
        begun.append(sweep.best)
        return SweepResult(sweep.best, {20: 99.6}, {20: 99.6}, (), ())

    monkeypatch.setattr(tuning_bench, "StepMeter", Meter)
    monkeypatch.setattr(tuning_bench.Sweep, "run", run)
    found = command._search(
        host_device, lambda: random_checkpoint(CONFIG), 1, (20,), 1.0, store, keep=True
    )
    assert begun == [rule, stored]
    assert path.read_bytes() == before
    assert found["stored"] is None and not found["improved"]


@pytest.mark.gpu
@pytest.mark.alone  # it has so many seconds, and needs some of them to itself
def test_a_tuning_is_found_stored_and_used(cuda_device: Device, tmp_path: Path) -> None:
    options = ("--shape", "tiny", "--context", "5,100", "--seconds", "8")
    result = tune(tmp_path, *options, "--json", device="cuda:0")
    assert result.status == 0, result.err
    found = json.loads(result.out)
    assert found["trials"] > 0
    assert not found["refused"]
    assert set(found["before_us"]) == set(found["after_us"]) == {"5", "100"}
    listed = json.loads(tune(tmp_path, "--list", "--json", device="cuda:0").out)["stored"]
    again = json.loads(tune(tmp_path, *options, "--dry-run", "--json", device="cuda:0").out)
    assert again["from"] == found["tuning"], "what was found is not in use"
    if found["stored"] is not None:  # the default may be as good
        (row,) = listed
        assert row["path"] == found["stored"] and row["problem"] is None
        assert row["gpu"] == cuda_device.properties.name
    else:
        assert listed == []
    shown = tune(tmp_path, *options, "--dry-run", device="cuda:0")
    assert shown.status == 0, shown.err
    assert "tokens/s" in shown.out
