"""tools/sanitize.py: what it reads from the tool's words, and when it calls a part sound."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tools import sanitize
from tools.sanitize import Found, Outcome, Part, read_tool

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at scale+0x80
=========     by thread (255,0,0) in block (0,0,0)
=========     Address 0x7f0 is out of bounds
========= Target application returned an error
========= ERROR SUMMARY: 104 errors
========= ERROR SUMMARY: 4 errors were not printed. Use --print-limit option to adjust the number
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
RACES = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at matvec+0x150
=========     and Read access at matvec+0x210 [992 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
NO_RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"

PART = Part("memcheck x", "memcheck", ("tests/x",))
SOUND = Outcome(PART, Counter(passed=7), Found(0, 0, 1), 3.0, 0)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (MEMCHECK, Found(104, 0, 1)),
        (CLEAN, Found(0, 0, 1)),
        ("========= ERROR SUMMARY: 1 error\n", Found(1, 0, 1)),
        (RACES, Found(1, 1, 1)),
        (NO_RACES, Found(0, 0, 1)),
        (CLEAN + MEMCHECK, Found(104, 0, 2)),  # two processes
        ("========= COMPUTE-SANITIZER\n", Found()),
        ("a test prints ERROR SUMMARY: 5 errors\n", Found()),
        (
            "========= Internal Sanitizer Error: the device is out of memory\n" + CLEAN,
            Found(0, 0, 1, "Internal Sanitizer Error: the device is out of memory"),
        ),
    ],
    ids=["errors", "clean", "one", "races", "no races", "two", "begun", "not its own", "trouble"],
)
def test_the_tools_words(text: str, found: Found) -> None:
    if found.trouble:
        assert read_tool(text) == found
    else:
        assert replace(read_tool(text), trouble="") == found


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (replace(SOUND, found=Found(2, 0, 1), status=9), "2 errors reported by memcheck"),
        (replace(SOUND, tests=Counter(passed=6, failed=1), status=1), "1 tests failed"),
        (replace(SOUND, status=None), "cut off"),
        (replace(SOUND, tests=Counter(), status=139), "ended without a summary"),
        (replace(SOUND, found=Found()), "ended without a summary"),
        (replace(SOUND, tests=Counter(skipped=7)), "no test passed"),
        (replace(SOUND, found=Found(0, 0, 1, "Internal Sanitizer Error: x")), "Internal"),
        (replace(SOUND, status=3), "exit status 3"),
        (Outcome(PART), "cut off"),
    ],
)
def test_what_makes_a_part_unsound(outcome: Outcome, said: str) -> None:
    assert any(words.startswith(said) for words in outcome.objections), outcome.objections
    found = sanitize.result([SOUND, outcome], {})
    assert found["summary"]["sound"] is False
    assert found["rows"][1]["objections"] == outcome.objections


def test_sound_parts_make_a_sound_result() -> None:
    races = Part("racecheck y", "racecheck", ("tests/y",))
    warned = Outcome(races, Counter(passed=1, skipped=1), Found(0, 3, 1), 1.0, 0)
    found = sanitize.result([SOUND, warned], {"device": "a card"})
    assert found["summary"] == {
        "sound": True,
        "memcheck": {"passed": 7, "errors": 0, "parts": 1, "complete": 1},
        "racecheck": {"passed": 1, "errors": 0, "parts": 1, "complete": 1},
    }
    assert found["machine"] == {"device": "a card"}
    assert found["rows"][1]["warnings"] == 3
    assert sanitize.result([], {})["summary"]["sound"] is False


def test_a_part_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    child = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    start, part = time.monotonic(), replace(PART, timeout=1.0)
    command = [sys.executable, "-c", code]
    outcome = sanitize.run_part(part, tmp_path, start + 1000, lambda *_: command)
    assert time.monotonic() - start < 500, "its child kept it"
    assert outcome.objections == ["cut off"]


def test_a_test_that_failed_is_named(tmp_path: Path) -> None:
    case = "<testcase classname='tests.x' name='y'><failure message='2 != 3&#10;more'/></testcase>"

    def command(_: Part, log: Path, junit: Path) -> list[str]:
        junit.write_text(f"<testsuite>{case}</testsuite>")
        log.write_text(CLEAN)
        return [sys.executable, "-c", "raise SystemExit(1)"]

    outcome = sanitize.run_part(PART, tmp_path, time.monotonic() + 500, command)
    assert outcome.objections[:2] == ["1 tests failed", "tests.x::y: 2 != 3"]


def test_a_part_has_its_order_of_the_gpus(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    sanitize.run_part(PART, tmp_path, time.monotonic() + 500, lambda *_: command, (1, 0))
    (words,) = tmp_path.glob("*.txt")
    assert words.read_text() == "1,0\n"


def test_after_the_deadline_nothing_begins(tmp_path: Path) -> None:
    def never(*_: object) -> list[str]:
        raise AssertionError("it began")

    outcome = sanitize.run_part(PART, tmp_path, time.monotonic() - 1, never)
    assert outcome.objections == ["cut off"]


def test_parts_run_side_by_side_and_some_alone() -> None:
    together = threading.Barrier(2, timeout=300)
    done: list[str] = []

    def run(part: Part) -> Outcome:
        if part.alone:
            done.append(part.name)
        else:
            together.wait()  # passes only if both are under way
            done.append("together")
        return replace(SOUND, part=part)

    parts = [replace(PART, name="last", alone=True), PART, replace(PART, name="b")]
    outcomes = sanitize.run_all(parts, 2, run, lambda line: None)
    assert done == ["together", "together", "last"]
    assert [o.part.name for o in outcomes] == ["memcheck x", "b", "last"]


FAKE = """\
#!{python}
import sys
arguments = sys.argv[1:]
log = arguments[arguments.index("--log-file") + 1]
tool = arguments[arguments.index("--tool") + 1]
(junit,) = (a.partition("=")[2] for a in arguments if a.startswith("--junitxml="))
open(junit, "w").write("<testsuite>" + 3 * "<testcase name='x'/>" + "</testsuite>")
summary = {{"racecheck": "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"}}
open(log, "w").write("========= " + summary.get(tool, "ERROR SUMMARY: 0 errors") + "\\n")
sys.exit(9 if tool in summary else 0)
"""


def test_a_run_that_was_cut_off_is_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    first, fake = tmp_path / "first", tmp_path / "sanitizer"
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(0o755)
    given = ["--sanitizer", str(fake), "--only", "memcheck graph", "racecheck", "--out"]
    assert sanitize.main([*given, str(first)]) == 1
    (path,) = first.glob("sanitize-*.json")
    before = json.loads(path.read_text())
    assert {"device", "commit", "date"} <= set(before["machine"])
    for row in before["rows"]:
        assert row["complete"] and row["selected"] == row["passed"] == 3
        assert row["errors"] == (row["tool"] == "racecheck")
    before["rows"][-1]["keyword"] = "other tests"
    before["machine"]["commit"] = "an earlier one"
    path.write_text(json.dumps(before))
    fake.write_text(FAKE.format(python=sys.executable).replace('"racecheck"', '"none"'))
    assert sanitize.main([*given, str(tmp_path), "--after", str(path)]) == 0
    (path,) = tmp_path.glob("sanitize-*.json")
    found = json.loads(path.read_text())
    assert found["summary"]["sound"] and found["machine"]["commit"] != "an earlier one"
    assert sorted(r["part"] for r in found["rows"]) == sorted(r["part"] for r in before["rows"])
    kept = [row["part"] for row in found["rows"] if row.get("commit") == "an earlier one"]
    assert kept == [row["part"] for row in before["rows"] if not row["objections"]][:-1]
    path.write_text("[]")
    assert sanitize.main([*given, str(tmp_path), "--after", str(path)]) == 2
    assert "no result file" in capsys.readouterr().out


def test_no_program_and_no_part_are_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert sanitize.main(["--only", "no such part", "--sanitizer", "x"]) == 2
    assert "name" in capsys.readouterr().out


def test_a_part_that_did_not_begin_is_run_once_more() -> None:
    """But not one that was cut off, and none a third time."""
    silent, said = Outcome(PART, status=1), []
    answers = {"flaky": [silent, SOUND], "dead": [silent, silent], "late": [Outcome(PART)]}
    parts = [replace(PART, name=name) for name in answers]
    outcomes = sanitize.run_all(parts, 1, lambda part: answers[part.name].pop(0), said.append)
    assert [bool(o.objections) for o in outcomes] == [False, True, True]
    assert sum("once more" in line for line in said) == 2


def covered(file: str, alone: bool) -> bool:
    """Whether memcheck looks at a file, or it is said why not."""
    return file in sanitize.LEFT_OUT or any(
        file == path or file.startswith(path + "/")
        for part in sanitize.PARTS
        if part.tool == "memcheck" and part.alone == alone
        for path in part.tests
    )


def test_memcheck_forgets_none_of_the_files_collected_here(request: pytest.FixtureRequest) -> None:
    gpu = {
        item.path.relative_to(sanitize.ROOT).as_posix()
        for item in request.session.items
        if item.get_closest_marker("gpu")
    }
    assert not {file for file in gpu if not covered(file, False)}


def test_memcheck_forgets_no_file_of_tests_that_run_alone() -> None:
    assert all((sanitize.ROOT / file).is_file() for file in sanitize.LEFT_OUT)
    alone = [
        path.relative_to(sanitize.ROOT).as_posix()
        for path in (sanitize.ROOT / "tests").rglob("test_*.py")
        if "@pytest.mark.alone\n" in path.read_text()
    ]
    assert alone
    assert not {file for file in alone if not covered(file, True)}


def test_what_is_left_out_by_name_is_there() -> None:
    """Or a test that was renamed would be run for minutes under the tool."""
    texts = [path.read_text() for path in (sanitize.ROOT / "tests" / "models").glob("test_*.py")]
    for name in sanitize._SMALL.replace("not ", "").split(" and "):
        assert any(re.search(rf"def test_\w*{name}", text) for text in texts), name


def test_shares_are_a_partition() -> None:
    for part in sanitize.PARTS:
        k, n = part.share
        same = [p.share for p in sanitize.PARTS
                if (p.tool, p.tests, p.marks) == (part.tool, part.tests, part.marks)]  # fmt: skip
        assert 1 <= k <= n
        assert sorted(same) == [(i, n) for i in range(1, n + 1)]
    assert len({part.name for part in sanitize.PARTS}) == len(sanitize.PARTS)
