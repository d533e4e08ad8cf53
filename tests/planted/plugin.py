"""A pytest plugin (`-p tests.planted.plugin`) that puts a fault in and notes what fails of it.

PLANTED_FAULT is the name of the fault, empty for none; PLANTED_REPORT is the file to write: a line
of JSON for each test that was run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ostinato.errors import OstinatoError
from tests.planted.faults import apply
from tests.planted.ours import FAULTS

SAID = AssertionError | OstinatoError | pytest.fail.Exception
"""What a test fails with that has looked: all else may be an accident of the fault."""


def pytest_configure() -> None:
    name = os.environ["PLANTED_FAULT"]
    if name:
        apply(FAULTS[name])
        sys.path.insert(0, str(Path(__file__).parent / "children"))  # tests hand it on


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    error = None if call.excinfo is None else call.excinfo.value
    if isinstance(error, pytest.skip.Exception) or (error is None and call.when != "call"):
        return
    line = {
        "test": item.nodeid,
        "when": call.when,
        "error": None if error is None else f"{type(error).__name__}: {error}"[:300],
        "said": isinstance(error, SAID),
    }
    with Path(os.environ["PLANTED_REPORT"]).open("a", encoding="utf-8") as report:
        report.write(json.dumps(line) + "\n")
