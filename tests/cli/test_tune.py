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
from ostinato.models.tune import meter as tuning_bench
from ostinato.models.tune.sweep import SweepResult
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
    return store.save(key, tuning, before={20: 110.0}, after={20: 99.6}, seconds=2.0)


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
        (("--context", "soon"), "positions such as"),
        (("--context", "20,-3"), "positions such as"),
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


def test_listing_says_what_is_in_use(tmp_path: Path) -> None:
    shown = tune(tmp_path, "--list", "--shape", "1B")
    assert shown.status == 0, shown.err
    assert "in use for the 1B shape, 1 rows, on" in shown.out
    listed = json.loads(tune(tmp_path, "--list", "--shape", "1B", "--json").out)
    assert listed["in_use"]["shape"] == "2048-8192-32-8-64-128256"
    assert listed["in_use"]["origin"].startswith("none")


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


class _Meter:
    """Stands for the device's."""

    trusted: Any = None

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __enter__(self) -> _Meter:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def trust(self, tuning: shapes.Tuning) -> None:
        _Meter.trusted = tuning


def test_a_search_begins_with_what_is_stored(
    host_device: Device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
    path = store.save(key, stored, before={20: 110.0}, after={20: 99.6}, seconds=2.0)
    before = path.read_bytes()

    def sweep(config: LlamaConfig, start: shapes.Tuning, *_: Any, **options: Any) -> SweepResult:
        begun.append(start)
        return SweepResult(start, {20: 99.6}, {20: 99.6}, (), (), True)

    monkeypatch.setattr(tuning_bench, "sweep", sweep)
    monkeypatch.setattr(tuning_bench, "StepMeter", _Meter)
    settings = command._Settings(rows=1, contexts=(20,), seconds=1.0, as_json=False)
    command._tune(host_device, lambda: random_checkpoint(CONFIG), "a shape", settings, store)
    assert begun == [stored] and _Meter.trusted == rule
    assert path.read_bytes() == before
    assert "faster than the shapes in use" in capsys.readouterr().out


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
    options_now = ("--list", "--shape", "tiny", "--json")
    seen = json.loads(tune(tmp_path, *options_now, device="cuda:0").out)
    listed = seen["stored"]
    assert seen["in_use"]["origin"] == ("stored" if found["stored"] else "default")
    if found["stored"] is not None:  # the default may be as good
        (row,) = listed
        assert row["path"] == found["stored"] and row["problem"] is None
        assert row["gpu"] == cuda_device.properties.name
    else:
        assert listed == []
    shown = tune(tmp_path, *options, "--dry-run", device="cuda:0")
    assert shown.status == 0, shown.err
    assert "tokens/s" in shown.out
