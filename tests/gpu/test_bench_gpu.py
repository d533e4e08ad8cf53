"""`ostinato bench` on a GPU: what it measures there is whole and adds up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import tuning
from ostinato.bench.floor import measure_bandwidth
from ostinato.bench.shapes import SHAPES, traffic
from ostinato.cli.bench import bench
from ostinato.device import Device
from tests.gpu.foreign import library

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
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
        shape="135M", batch="1,2", context="20,0,300", quick=True,
        device=cuda_device.name, out=tmp_path, plot=picture,
    )  # fmt: skip
    result = json.loads(capsys.readouterr().out.rstrip().splitlines()[-1])
    assert result["summary"]["tokens_equal"] is True
    points = Counter((row["batch"], row["context"]) for row in result["rows"])
    assert points == {(1, 20): 4, (2, 20): 4, (1, 300): 4, (1, 0): 4}
    assert not any(row["quarantined"] or row["one_by_one"] for row in result["rows"])
    assert all(0 < row["of_floor"] < 1 for row in result["rows"])
    assert picture.stat().st_size > 2000


def test_the_default_shapes_are_measured_beside_a_search(
    cuda_device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuning.main(["--quick", "--device", cuda_device.name, "--out", str(tmp_path)]) == 0
    (row,) = json.loads(capsys.readouterr().out.rstrip().splitlines()[-1])["rows"]
    assert (row["shape"], row["rows"]) == ("135M", 8)  # two seconds may be too few for a candidate
    for context in (20, 500):
        ratio = row[f"default_us_{context}"] / row[f"found_us_{context}"]
        assert row[f"of_found_{context}"] == pytest.approx(ratio, abs=2e-3)
        assert row[f"found_us_{context}"] > row["floor_us"]


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


def test_other_libraries_decode_beside_us(cuda_device: Device, tmp_path: Path) -> None:
    library("torch")
    library("transformers")
    peers = ("transformers", "torch.cuda.graph")
    options = ["--shape", "135M", "--quick", "--prompt", "100", "--device", cuda_device.name]
    answer = subprocess.run(  # their warnings are not to be errors, as they are in here
        [sys.executable, "-m", "benchmarks.decode", *options, "--out", tmp_path, "--peers", *peers],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    result = json.loads(answer.stdout.rstrip().splitlines()[-1])
    assert set(result["skipped"]) == {"torch.cuda.graph, prompt 100"}
    prompts = {row["way"]: row for row in result["rows"] if row["kind"] == "prompt"}
    assert set(prompts) == {"eager", "capture", "record", "transformers"}
    assert all(row["tokens_per_second"] > 0 for row in prompts.values())
    rows = {row["way"]: row for row in result["rows"] if row["kind"] == "decode"}
    assert set(rows) == {"eager", "capture", "record", "while 4", *peers}
    assert all(rows[peer]["ours_is"] > 0 and not rows[peer]["ours"] for peer in peers)


_PROMPTS = """
import sys
import torch
from benchmarks.peers.transformers_loop import DecodeLoop, random_llama
from ostinato.models import LlamaConfig

device = sys.argv[1]
config = LlamaConfig(
    hidden=64, layers=2, heads=4, kv_heads=2, head_size=16, inner=96, vocabulary=320,
    context_length=256, tied_embeddings=True,
)
model = random_llama(config, device=device, dtype=torch.float32)
loop = DecodeLoop(model, batch=1, length=128, how="eager")
for count in (1, 70, 128):
    prompt = [(17 * i + count) % 320 for i in range(count)]
    with torch.no_grad():
        logits = model(torch.tensor([prompt], device=device)).logits[0, -1]
    loop.place(100)
    loop.run(5)  # leaves something in the cache
    for _ in range(2):
        loop.place(0)
        assert loop.prompt(prompt) == int(logits.argmax()), count
"""


def test_a_prompt_beside_us_is_what_its_model_says(cuda_device: Device) -> None:
    library("torch")
    library("transformers")
    command = [sys.executable, "-W", "ignore", "-c", _PROMPTS, cuda_device.name]
    answer = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert answer.returncode == 0, answer.stderr
