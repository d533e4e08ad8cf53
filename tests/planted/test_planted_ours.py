"""Faults of this library, each put in on purpose: the tests that are named find every one.

And the tests pass without them.  Each run is a pytest of its own, with the fault in its process and
in the programs that its tests start.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.planted.faults import Fault, mutated
from tests.planted.ours import FAULTS
from tests.processes import ROOT, python

every_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.name)


@dataclass(frozen=True)
class Run:
    """What a pytest gave: tests that have a case that was run, that failed, and how it ended."""

    ran: set[str]
    failed: set[str]
    said: set[str]
    """Those of the failed that say so, by an assertion or an error of the library."""
    output: str


def without_case(test: str) -> str:
    """The test's name without its parameters."""
    return test.partition("[")[0]


def run_tests(tests: set[str], report: Path, fault: str = "") -> Run:
    options = ["-q", "-m", "not gpu", "-p", "tests.planted.plugin", "-p", "no:cacheprovider"]
    environ = {"PLANTED_FAULT": fault, "PLANTED_REPORT": str(report), "PYTEST_ADDOPTS": ""}
    done = python("-m", "pytest", *options, *sorted(tests), **environ)
    output = done.stdout + done.stderr
    assert done.returncode in (0, 1), f"the tests did not run to their end:\n{output}"
    ran, failed, said = set(), set(), set()
    for line in report.read_text(encoding="utf-8").splitlines() if report.exists() else ():
        outcome = json.loads(line)
        test = without_case(outcome["test"])
        ran.add(test)
        if outcome["error"] is not None:
            failed.add(test)
            if outcome["said"] and outcome["when"] == "call":
                said.add(test)
    return Run(ran, failed, said, output)


def test_the_catalogue_is_what_it_says() -> None:
    assert len(FAULTS) >= 40
    for fault in FAULTS.values():
        assert fault.caught_by, fault.name
        assert fault.mistake.endswith("."), fault.name
        assert fault.thread is None or re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", fault.thread)


@every_fault
def test_a_fault_is_a_line_that_is_there(fault: Fault) -> None:
    """So that a change of that line is not found out by the slow tests alone."""
    function, code = mutated(fault)
    assert (
        code.co_code != function.__code__.co_code or code.co_consts != function.__code__.co_consts
    )
    assert code.co_freevars == function.__code__.co_freevars
    for test in fault.caught_by:
        path, _, name = without_case(test).partition("::")
        assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), test


@pytest.mark.slow
def test_without_a_fault_the_tests_pass(tmp_path: Path) -> None:
    every = {test for fault in FAULTS.values() for test in fault.caught_by}
    run = run_tests(every, tmp_path / "report")
    assert not run.failed, run.output


@pytest.mark.slow
@every_fault
def test_each_test_that_is_named_finds_the_fault(fault: Fault, tmp_path: Path) -> None:
    run = run_tests(set(fault.caught_by), tmp_path / "report", fault.name)
    if not run.ran:
        pytest.skip("the tests that find it cannot run here")
    blind = {without_case(test) for test in fault.caught_by} - run.said
    assert not blind, f"{fault.mistake}\n{sorted(blind)} does not say so\n{run.output}"
