"""Writes the outcome of the GPU suite as a results file.

    PYTHONPATH=src python3 -m tools.suite JUNIT ... [--out DIR] [--device cuda:0]

JUNIT: files of `pytest --junitxml`, of one commit and one kind of device.  The result is
DIR/suite-{device}.json: the numbers of tests that passed, failed, were skipped, and were unfinished
when a run was cut off; each failed test with its reason, the number of skipped tests by reason, and
the slowest tests.  Tests that a run did not begin are in no file.  Exit status: 0 if tests passed
and none failed or was unfinished, else 1; 2 if a file cannot be read.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import ostinato as ost
from ostinato.bench.report import Result, machine

__all__ = ["main", "read"]

_SLOWEST = 10


def read(path: Path) -> list[dict[str, object]]:
    """Returns the tests of a file: `name`, `outcome` ("passed", "failed", "skipped", "unfinished"),
    `why`, `seconds`.  Raises OSError, and ValueError if the file is not JUnit XML."""
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError as error:
        raise ValueError(f"{path}: {error}") from None
    found: list[dict[str, object]] = []
    for case in root.iter("testcase"):
        outcome, why = "passed", ""
        for kind in ("skipped", "failure", "error"):
            if (said := case.find(kind)) is not None:
                outcome = "skipped" if kind == "skipped" else "failed"
                why = (said.get("message") or "").split("\n")[0]
        if case.get("name") is None:  # pytest was interrupted during the test
            outcome, why = "unfinished", "the run was cut off"
        name = f"{case.get('classname')}::{case.get('name')}"
        seconds = round(float(case.get("time", 0)), 2)
        found.append({"name": name, "outcome": outcome, "why": why, "seconds": seconds})
    if not found:
        raise ValueError(f"{path} holds no test")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.suite", description=__doc__)
    parser.add_argument("junit", nargs="+", type=Path, metavar="JUNIT")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), metavar="DIR")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    try:
        tests = [test for path in options.junit for test in read(path)]
    except (OSError, ValueError) as error:
        print(f"tools.suite: {error}", file=sys.stderr)
        return 2
    bad = ("failed", "unfinished")
    counts = Counter(str(test["outcome"]) for test in tests)
    skipped = Counter(str(test["why"]) for test in tests if test["outcome"] == "skipped")
    slowest = sorted(tests, key=lambda test: -float(str(test["seconds"])))[:_SLOWEST]
    with ost.open_device(options.device) as device:
        result = Result(
            benchmark="suite",
            ceiling={},
            summary={"tests": len(tests), **counts},
            machine=machine(device),
            settings={"files": len(options.junit)},
            rows=[test for test in tests if test["outcome"] in bad] + slowest,
            skipped={why: f"{count} tests" for why, count in skipped.most_common()},
        )
    print(result.write(options.out))
    print(result.line())
    return 0 if counts["passed"] and not any(counts[outcome] for outcome in bad) else 1


if __name__ == "__main__":
    sys.exit(main())
