"""The command as a user meets it: output, exit status, errors without a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ostinato.driver import launcher


def ostinato(*arguments: str, timeout: float = 120, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "ostinato", *arguments],
        env=os.environ | {"OSTINATO_DEVICE": "host", "COLUMNS": "100"} | environ,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_version_and_help() -> None:
    assert ostinato("--version").stdout.startswith("ostinato ")
    for command in ("generate", "inspect", "doctor", "model", "cache"):
        result = ostinato(command, "--help")
        assert result.returncode == 0
        assert "Usage" in result.stdout


def test_doctor_says_what_there_is(tmp_path: Path) -> None:
    found = json.loads(ostinato("doctor", "--json", OSTINATO_CACHE_DIR=str(tmp_path)).stdout)
    assert found["host"]["kernels in"] == "host"
    assert found["ostinato"]["replay call"] == launcher.description()
    assert found["caches"]["folder"] == str(tmp_path)
    assert isinstance(found["cuda"], dict) or "not available" in found["cuda"]
    assert "OSTINATO_DEVICE" in found["settings"]
    assert "cuda" in ostinato("doctor").stdout


def test_an_error_is_words_and_status_one(tmp_path: Path) -> None:
    result = ostinato("generate", "hello", "--model", str(tmp_path / "nothing.gguf"))
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "nothing.gguf" in result.stderr
    assert "Traceback" not in result.stderr
    result = ostinato("generate", "hello", "--device", "tpu")
    assert result.returncode == 1
    assert "tpu" in result.stderr


def test_model_list(tmp_path: Path) -> None:
    (row,) = json.loads(
        ostinato("model", "list", "--json", OSTINATO_CACHE_DIR=str(tmp_path)).stdout
    )
    assert row["name"] == "smollm2-135m"
    assert row["present"] is False
    assert "not fetched" in ostinato("model", "list", OSTINATO_CACHE_DIR=str(tmp_path)).stdout


def generated(*arguments: str) -> dict:
    result = ostinato("generate", "--json", *arguments)
    assert result.returncode == 0, result.stderr
    text, _, last = result.stdout.rstrip("\n").rpartition("\n")
    summary = json.loads(last)
    assert summary["text"] == text.rstrip("\n") or summary["text"] in text
    return summary


def test_generate_replays_graphs_and_eager_says_the_same(smollm2_path: Path) -> None:
    options = ("What is 2 + 2?", "--model", str(smollm2_path), "--max-tokens", "12")
    graphs, eager = generated(*options), generated(*options, "--eager")
    recorded = generated(*options, "--build", "record")
    assert graphs["token_ids"] == eager["token_ids"] == recorded["token_ids"]
    assert graphs["graphs_captured"] >= 1
    assert graphs["launches_replayed"] >= 9
    assert eager["launches_replayed"] == eager["graphs_captured"] == 0
    assert eager["eager_reasons"]
    assert eager["launches_eager"] > 10 * graphs["launches_replayed"]
    assert {"text", "tokens_per_second", "device"} <= graphs.keys()


def test_sampling_repeats_with_its_seed(smollm2_path: Path) -> None:
    options = ("Tell me a story", "--model", str(smollm2_path), "--max-tokens", "10")
    sampled = ("--temperature", "1.0", "--top-k", "50", "--top-p", "0.95", "--seed")
    first, again = generated(*options, *sampled, "7"), generated(*options, *sampled, "7")
    other = generated(*options, *sampled, "8")
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]


def test_control_c_ends_with_the_summary(smollm2_path: Path) -> None:
    options = ("--json", "--model", str(smollm2_path), "--max-tokens", "2000")
    process = subprocess.Popen(
        [sys.executable, "-m", "ostinato", "generate", "Count to a thousand.", *options],
        env=os.environ | {"OSTINATO_DEVICE": "host"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(5)  # the first tokens are out
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    summary = json.loads(out.rstrip("\n").rpartition("\n")[2])
    assert summary["finish_reason"] == "interrupted"
    assert 0 < len(summary["token_ids"]) < 2000


def test_inspect_shows_the_decode_step(smollm2_path: Path, tmp_path: Path) -> None:
    graph = json.loads(ostinato("inspect", "--json", "--model", str(smollm2_path)).stdout)
    names = [node["name"] for node in graph["nodes"]]
    assert names.count("attention") == 30
    assert names[-1] == "advance"
    picture = tmp_path / "decode.svg"
    result = ostinato("inspect", "decode", "--svg", str(picture), "--model", str(smollm2_path))
    assert result.returncode == 0, result.stderr
    assert picture.read_text().startswith("<svg")
    assert "attention" in ostinato("inspect", "prefill", "--model", str(smollm2_path)).stdout


def test_a_picture_that_cannot_be_written_is_refused(smollm2_path: Path, tmp_path: Path) -> None:
    for path in (tmp_path, Path(__file__) / "decode.svg"):
        result = ostinato("inspect", "--svg", str(path), "--model", str(smollm2_path))
        assert result.returncode == 2 and "--svg" in result.stderr
        assert "Traceback" not in result.stderr and result.stdout == ""


@pytest.mark.parametrize("option", ["--max-tokens=0", "--temperature=-1", "--top-p=2"])
def test_bad_options_do_nothing(option: str, smollm2_path: Path) -> None:
    result = ostinato("generate", "hello", option, "--model", str(smollm2_path))
    assert result.returncode in (1, 2)
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
