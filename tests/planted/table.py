"""The tables of docs/correctness.md, from the catalogues: `python -m tests.planted.table`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ostinato.step import Cause
from tests.planted.ours import FAULTS
from tests.planted.users import PLANTS, Caught, Plant

__all__ = ["PAGE", "with_tables"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "correctness.md"


def with_tables(page: str) -> str:
    """The page with its tables as the catalogues have them."""
    for name, rows in (("users", _users()), ("ours", _ours())):
        begin = f"<!-- {name}: written by python -m tests.planted.table -->\n"
        pattern = re.escape(begin) + ".*?(?=<!-- end -->)"
        table = begin + "\n".join(rows) + "\n"
        page, found = re.subn(pattern, lambda _, table=table: table, page, flags=re.S)
        assert found == 1, f"the page has {found} places for the table {name!r}"
    return page


def _users() -> Iterable[str]:
    yield "| mistake | found by | `verify` | thread |"
    yield "|---|---|---|---|"
    for plant in PLANTS:
        yield f"| {plant.mistake} | {_found_by(plant)} | {_verify(plant)} | {_link(plant.thread)} |"


def _found_by(plant: Plant) -> str:
    if plant.cause is Cause.HOST_STATE:
        return f"{plant.caught}: `{plant.cause.name}`, which raises"
    return f"{plant.caught}: `{plant.cause.name}`" if plant.cause else str(plant.caught)


def _verify(plant: Plant) -> str:
    if plant.caught is not Caught.CHECK:
        return "not needed"
    return '`"first"`' if plant.verify == "first" else "`n`"


def _ours() -> Iterable[str]:
    yield "| with the fault | tests that fail | thread |"
    yield "|---|---|---|"
    for fault in FAULTS.values():
        tests = ", ".join(
            f"`{test.rpartition('::')[2].partition('[')[0]}`" for test in fault.caught_by
        )
        yield f"| {fault.mistake} | {tests} | {_link(fault.thread)} |"


def _link(thread: str | None) -> str:
    if thread is None:
        return ""
    repository, _, number = thread.partition("#")
    return f"[{thread}](https://github.com/{repository}/issues/{number})"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
