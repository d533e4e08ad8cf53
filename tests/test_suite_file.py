"""tools.suite: what the GPU suite said, as a results file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.suite import main

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one" time="1.5"/>
<testcase classname="tests.a" name="two" time="0.5"><skipped message="no device"/></testcase>
{more}</testsuite></testsuites>"""
FAILED = (
    '<testcase classname="tests.b" name="x" time="3"><{kind} message="3 is 4&#10;more"/></testcase>'
)


@pytest.mark.parametrize("kind", ["", "failure", "error"])
def test_what_the_suite_said_is_written(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "1.xml", tmp_path / "2.xml"
    first.write_text(JUNIT.format(more=""))
    second.write_text(JUNIT.format(more=FAILED.format(kind=kind) if kind else ""))
    arguments = [str(first), str(second), "--out", str(tmp_path), "--device", "host"]
    assert main(arguments) == (1 if kind else 0)
    (path,) = tmp_path.glob("suite-*.json")
    told = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == told
    assert told["summary"] == {
        "tests": 4 + bool(kind), "passed": 2, "skipped": 2, **({"failed": 1} if kind else {}),
    }  # fmt: skip
    assert told["skipped"] == {"no device": "2 tests"}
    failed = [row for row in told["rows"] if row["outcome"] == "failed"]
    assert [row["why"] for row in failed[:1]] == (["3 is 4"] if kind else [])


def test_what_was_under_way_when_a_run_was_cut_off_is_unfinished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """pytest writes such a test down without a name, and with no outcome."""
    (tmp_path / "1.xml").write_text(JUNIT.format(more='<testcase time="0.007"/>'))
    assert main([str(tmp_path / "1.xml"), "--out", str(tmp_path), "--device", "host"]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["summary"] == {"tests": 3, "passed": 1, "skipped": 1, "unfinished": 1}
    assert told["rows"][0]["why"] == "the run was cut off"


@pytest.mark.parametrize("text", ["", "<testsuites/>", "{}"])
def test_a_file_that_holds_no_test_is_refused(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "1.xml").write_text(text)
    assert main([str(tmp_path / "1.xml"), "--out", str(tmp_path)]) == 2
    assert "1.xml" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.json"))
