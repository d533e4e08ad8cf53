"""Known faults of drivers: the runner of the probes, and the probes on a GPU."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from ostinato.driver.cuda.faults import FAULTS, Verdict, run_probe, survey
from tests.cli.commands import process
from tests.conftest import open_test_device

PAGE = Path(__file__).parents[1] / "docs" / "driver-faults.md"
TOLD = {"verdict": "present", "detail": "seen"}


@pytest.mark.parametrize(
    ("program", "deadline", "verdict", "detail"),
    [
        (f"print({json.dumps(TOLD)!r})", 60, Verdict.PRESENT, "seen"),
        ("raise SystemExit('why')", 60, Verdict.FAILED, "ended with status 1: why"),
        ("import time; time.sleep(3600)", 0.5, Verdict.FAILED, "did not end within 0.5 s"),
    ],
)
def test_a_probe_ends_in_a_result_whatever_its_process_does(
    program: str, deadline: float, verdict: Verdict, detail: str
) -> None:
    found = run_probe([sys.executable, "-c", program], deadline)
    assert found.verdict is verdict and detail in found.detail


def test_no_fault_is_applicable_to_the_cpu_driver() -> None:
    found = survey("host")
    assert list(found.results) == [fault.name for fault in FAULTS]
    for one in found.results.values():
        assert one.verdict is Verdict.NOT_APPLICABLE and "CPU driver" in one.detail


def test_every_fault_has_a_row_on_its_page() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(fault.name for fault in FAULTS)


@pytest.mark.parametrize(
    "device", ["none", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.alone])]
)
def test_every_probe_gives_a_verdict(device: str, request: pytest.FixtureRequest) -> None:
    env = {"CUDA_VISIBLE_DEVICES": ""}
    if device == "cuda":
        open_test_device("cuda", request.config).close()
        env = {}
    told = json.loads(process("doctor", "--faults", "--json", **env).out)
    assert [row["name"] for row in told["faults"]] == [fault.name for fault in FAULTS]
    for row in told["faults"]:
        assert row["verdict"] != "failed", row
        assert (row["verdict"] == "not applicable") or device == "cuda", row
    text = process("doctor", "--faults", **env).out
    assert all(f"{fault.name}: {fault.what}" in text for fault in FAULTS)
