"""`ostinato tune` where there is no GPU, and (with one) that decoders use what it stores."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ostinato.bench.random_weights import random_checkpoint
from ostinato.device import Device
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda import shapes
from ostinato.models.cuda.tunings import TuningKey, save_tuning
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


def test_a_folder_that_is_none_is_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    result = tune(file)
    assert result.status == 1 and "Not a directory" in result.err and not result.out


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
    begun: list[shapes.Tuning] = []
    key = TuningKey.of(CONFIG, 1, host_device.properties.name)
    path = save_tuning(key, stored, before={20: 110.0}, after={20: 99.6}, folder=tmp_path)
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
        host_device, lambda: random_checkpoint(CONFIG), 1, (20,), 1.0, keep=True, folder=tmp_path
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
    again = json.loads(tune(tmp_path, *options, "--dry-run", "--json", device="cuda:0").out)
    assert again["from"] == found["tuning"], "what was found is not in use"
    stored = [str(path) for path in (tmp_path / "tunings").glob("*")]
    assert stored == [found["stored"]] * found["improved"]
    shown = tune(tmp_path, *options, "--dry-run", device="cuda:0")
    assert shown.status == 0, shown.err
    assert "tokens/s" in shown.out
