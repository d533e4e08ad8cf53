"""The table of mistakes in docs/correctness.md, from the catalogue:
`python -m tests.planted.table`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ostinato.step import Cause
from tests.planted.users import PLANTS, Caught, Plant

__all__ = ["PAGE", "with_table"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "correctness.md"
BEGIN = "<!-- users: written by python -m tests.planted.table -->\n"


def with_table(page: str) -> str:
    """The page with its table as the catalogue has it."""
    before, begin, after = page.partition(BEGIN)
    end = after.index("<!-- end -->")
    return before + begin + "\n".join(_users()) + "\n" + after[end:]


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


def _link(thread: str | None) -> str:
    if thread is None:
        return ""
    repository, _, number = thread.partition("#")
    return f"[{thread}](https://github.com/{repository}/issues/{number})"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
