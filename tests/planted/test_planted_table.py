"""What docs/correctness.md says of tests is what there is."""

from __future__ import annotations

import re

from tests.planted.table import PAGE, with_table
from tests.processes import ROOT


def test_the_table_of_the_page_is_that_of_the_catalogue() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "stale; run python -m tests.planted.table"


def test_the_tests_that_the_page_names_are_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    files = (ROOT / "tests").rglob("test_*.py")
    there = {n for f in files for n in re.findall(r"def (test_\w+)\(", f.read_text("utf-8"))}
    assert len(named) > 100
    assert named <= there, named - there
