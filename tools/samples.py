"""The Python samples of the docs, and what they print.

The ```python blocks of a page are one program, in order, with the lines that they would have in one
file.  A ```text block right after one holds what it prints.  In front of a block may stand

    <!-- needs a GPU -->                it runs where one is (tests/gpu), and nowhere else
    <!-- needs a GPU and torch -->      it runs where both are, and so for any other library
    <!-- a test file -->                it is a file of its own, and pytest passes it
    <!-- run by tests/test_x.py -->     that test runs it, because it needs more than its page

and a comment that begins with `<!-- python` holds a part of the program that a reader need not see.
`filled` runs a page on the host driver, and returns it with what was printed.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

__all__ = ["PAGES", "PAGES_FOR_GPUS", "Sample", "SampleError", "filled", "run", "samples"]

ROOT = Path(__file__).resolve().parent.parent


def _pages_with(text: str) -> tuple[str, ...]:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return tuple(
        page.relative_to(ROOT).as_posix()
        for page in pages
        if text in page.read_text(encoding="utf-8")
    )


PAGES = _pages_with("\n```python\n")
"""The pages with samples."""
PAGES_FOR_GPUS = _pages_with("\n<!-- needs a GPU")
"""Those with samples that run only where one is."""

_BLOCK = re.compile(
    r"""
    (?:^<!--\ (?P<note>needs\ a\ GPU(?:\ and\ [\w.]+)?|a\ test\ file|run\ by\ [\w/]+\.py)\ -->\n)?
    ^(?:```python\n(?P<code>.*?)^```$ | <!--\ python\n(?P<hidden>.*?)^-->$)
    (?:\n\n```text\n(?P<output>.*?)^```$)?
    """,
    re.S | re.M | re.X,
)


class SampleError(Exception):
    """A sample does not do what its page says: names the page and the line."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One block of a page."""

    code: str
    note: str
    """The comment in front of it, or nothing."""
    output: tuple[int, int] | None
    """Where in the page its output stands."""
    line: int
    """The line of the page on which its code begins."""

    @property
    def library(self) -> str:
        """The library that it needs besides a GPU, or nothing."""
        before, _, library = self.note.partition("needs a GPU and ")
        return "" if before else library


def samples(text: str) -> list[Sample]:
    """The blocks of a page, in order."""
    found = []
    for match in _BLOCK.finditer(text):
        part = "hidden" if match["code"] is None else "code"
        found.append(
            Sample(
                match[part],
                match["note"] or "",
                None if match["output"] is None else match.span("output"),
                text.count("\n", 0, match.start(part)) + 1,
            )
        )
    return found


def run(page: str, blocks: list[Sample]) -> list[str]:
    """Runs blocks as one program, in an empty folder; returns what each of them prints."""
    name, end = f"{Path(page).stem}.py", 0
    names: dict[str, object] = {"__name__": "__main__"}
    said = []
    with _empty_folder() as folder, mock.patch.dict(os.environ, COLUMNS="120", TERM="dumb"):
        # As a reader's file has them: errors and tables of graphs quote its lines.
        (folder / name).write_text("\n".join(block.code for block in blocks), encoding="utf-8")
        linecache.checkcache(name)
        for block in blocks:
            printed = io.StringIO()
            try:
                # Keys that are quarantined are logged, and pages speak of that.
                with (
                    contextlib.redirect_stdout(printed),
                    contextlib.redirect_stderr(io.StringIO()),
                ):
                    exec(compile("\n" * end + block.code, name, "exec"), names)
            except Exception as error:
                raise SampleError(
                    f"{page}:{block.line}: {type(error).__name__}: {error}"
                ) from error
            end += block.code.count("\n") + 1
            said.append(_plain(printed.getvalue()))
        close = getattr(names.get("device"), "close", None)
        if close is not None:
            close()
    return said


def filled(page: str, text: str) -> str:
    """The text of a page, its samples run on the host driver, with what they print.

    Raises SampleError if one fails, or prints what the page has no place for.
    """
    found = samples(text)
    _run_test_files(page, [block for block in found if block.note == "a test file"])
    program = [block for block in found if not block.note]
    with mock.patch.dict(os.environ, OSTINATO_DEVICE="host"):
        said = run(page, program)
    for block, printed in reversed(list(zip(program, said, strict=True))):
        if block.output is not None:
            start, stop = block.output
            text = text[:start] + printed + text[stop:]
        elif printed:
            raise SampleError(
                f"{page}:{block.line}: no ```text block for what it prints: {printed}"
            )
    return text


def _run_test_files(page: str, blocks: list[Sample]) -> None:
    for block in blocks:
        with _empty_folder() as folder:
            (folder / "test_sample.py").write_text(block.code, encoding="utf-8")
            pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            result = subprocess.run(
                [*pytest, f"--rootdir={folder}", "-W", "error"],
                cwd=folder,
                env=environ,
                capture_output=True,
                text=True,
                check=False,
            )
        if result.returncode:
            raise SampleError(f"{page}:{block.line}: {result.stdout}{result.stderr}")


@contextlib.contextmanager
def _empty_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield Path(folder)


def _plain(text: str) -> str:
    """What was printed, without blanks at the ends of lines, and with handles and addresses, which
    differ from run to run, numbered in the order in which they appear."""
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        place = numbers.setdefault(match[0], len(numbers) + 1)
        return f"0x{place << 12:0{len(match[0]) - 2}x}"

    text = re.sub(r"0x[0-9a-f]{6,}", number, text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())
