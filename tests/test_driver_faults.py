"""Known faults of drivers: the runner of the probes, and the probes on a GPU."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ostinato.driver.cuda.faults import (
    FAULTS,
    DriverFault,
    Finding,
    Verdict,
    run_probes,
    survey,
)
from tests.cli.commands import process
from tests.conftest import open_test_device

PAGE = Path(__file__).parents[1] / "docs" / "driver-faults.md"
FAKE = """
import json, os, sys, time
for name in sys.argv[1:]:
    if name == "ends":
        print("what it was", file=sys.stderr)
        os._exit(7)
    if name == "hangs":
        time.sleep(3600)
    print(json.dumps({"name": name, "verdict": name, "detail": " ".join(sys.argv[1:])}), flush=True)
"""


def fakes(*names: str, alone: Sequence[str] = ()) -> list[DriverFault]:
    def never(driver: object) -> Finding:
        raise AssertionError("probes run in another process")

    return [DriverFault(name, "a fake", never, alone=name in alone) for name in names]


def command(names: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", FAKE, *names]


def test_one_process_probes_all_but_those_that_need_their_own() -> None:
    found = run_probes(fakes("absent", "not applicable", "present", alone=["present"]), command)
    assert found == {
        "absent": Finding(Verdict.ABSENT, "absent not applicable"),
        "not applicable": Finding(Verdict.NOT_APPLICABLE, "absent not applicable"),
        "present": Finding(Verdict.PRESENT, "present"),
    }


def test_a_probe_that_ends_its_process_is_named_and_the_others_still_run() -> None:
    found = run_probes(fakes("absent", "ends", "present"), command)
    assert found["absent"].verdict is Verdict.ABSENT
    assert found["ends"].verdict is Verdict.FAILED
    assert "status 7" in found["ends"].detail and "what it was" in found["ends"].detail
    assert found["present"] == Finding(Verdict.PRESENT, "present")


def test_a_probe_that_does_not_end_is_ended() -> None:
    found = run_probes(fakes("hangs"), command, deadline=0.5)
    assert found["hangs"].verdict is Verdict.FAILED and "0.5 s" in found["hangs"].detail


def test_no_fault_is_applicable_to_the_cpu_driver() -> None:
    found = survey("host")
    assert list(found.findings) == [fault.name for fault in FAULTS]
    for one in found.findings.values():
        assert one.verdict is Verdict.NOT_APPLICABLE and "CPU driver" in one.detail


def test_every_fault_has_a_row_on_its_page() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(fault.name for fault in FAULTS)


@pytest.mark.parametrize("device", ["none", pytest.param("cuda", marks=pytest.mark.gpu)])
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
