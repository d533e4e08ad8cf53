"""The tables in docs/correctness.md are those of the catalogues."""

from __future__ import annotations

from tests.planted.table import PAGE, with_tables


def test_the_tables_of_the_page_are_those_of_the_catalogues() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "stale; run python -m tests.planted.table"
