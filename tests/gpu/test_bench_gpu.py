"""`ostinato bench` on a GPU: what it measures there is whole and adds up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ostinato.bench.floor import measure_bandwidth
from ostinato.bench.shapes import SHAPES, traffic
from ostinato.cli.bench import bench
from ostinato.device import Device
from tests.gpu.foreign import library

pytestmark = pytest.mark.gpu
CONFIG = SHAPES["135M"]


def test_both_bandwidths_are_those_of_one_memory(cuda_device: Device) -> None:
    found = measure_bandwidth(cuda_device, 1 << 28)
    assert 0.3 < found.read / found.copy < 3
    assert found.best == max(found.read, found.copy)


def test_all_our_ways_agree(
    cuda_device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "bench.svg"
    bench(
        shape="135M", batch="1,2", context="20,0,300", quick=True, peers="none",
        device=cuda_device.name, out=tmp_path, plot=picture,
    )  # fmt: skip
    result = json.loads(capsys.readouterr().out.rstrip().splitlines()[-1])
    assert result["summary"]["tokens_equal"] is True
    points = Counter((row["batch"], row["context"]) for row in result["rows"])
    assert points == {(1, 20): 4, (2, 20): 4, (1, 300): 4, (1, 0): 4}
    assert not any(row["quarantined"] or row["one_by_one"] for row in result["rows"])
    assert all(0 < row["of_floor"] < 1 for row in result["rows"])
    assert picture.stat().st_size > 2000


def test_a_profile_adds_up_to_the_step(
    cuda_device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(
        shape="135M", context="300", profile=True, quick=True, device=cuda_device.name,
        plot=tmp_path / "profile.svg",
    )  # fmt: skip
    result = json.loads(capsys.readouterr().out.rstrip().splitlines()[-1])
    summary, rows = result["summary"], result["rows"]
    parts = summary["start_us"] + sum(row["total_us"] for row in rows)
    assert parts == pytest.approx(summary["step_us"], abs=0.5)
    assert len(summary["launch_us"]) == sum(row["launches"] for row in rows)
    moved = sum(row["nbytes"] * row["launches"] for row in rows)
    assert moved == pytest.approx(traffic(CONFIG, 2).step(1, 301), rel=1e-2)


def test_other_libraries_decode_beside_us(cuda_device: Device) -> None:
    library("torch")
    library("transformers")
    peers = ("transformers", "torch.cuda.graph")
    answer = subprocess.run(  # their warnings are not to be errors, as they are in here
        [sys.executable, "-m", "ostinato", "bench", "--quick", "--peers", ",".join(peers)],
        env=os.environ | {"OSTINATO_DEVICE": cuda_device.name},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    result = json.loads(answer.stdout.rstrip().splitlines()[-1])
    assert result["skipped"] == {}
    rows = {row["way"]: row for row in result["rows"]}
    assert set(rows) == {"eager", "capture", "record", "while 4", *peers}
    assert all(rows[peer]["ours_is"] > 0 and not rows[peer]["ours"] for peer in peers)
