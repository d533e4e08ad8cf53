"""Runs the Python samples of the docs, and fills in their output.

The ```python blocks of a page form one program, in order, with line numbers as in one file.  A
```text block right after a block has its output.  A block may follow one of these comments:

    <!-- needs a GPU -->                runs only on machines with a GPU (tests/gpu)
    <!-- needs a GPU and torch -->      the same, with torch or another library
    <!-- a test file -->                a file of its own, which must pass in pytest
    <!-- run by tests/test_x.py -->     runs in that test, since it needs more than its page

A comment that begins with `<!-- python` contains a part of the program that the reader need not
see.  `filled` runs a page on the host driver, and returns the page with the output.
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
"""Names of the pages with samples."""
PAGES_FOR_GPUS = _pages_with("\n<!-- needs a GPU")
"""Names of the pages with samples that need a GPU."""

_BLOCK = re.compile(
    r"""
    (?:^<!--\ (?P<note>needs\ a\ GPU(?:\ and\ [\w.]+)?|a\ test\ file|run\ by\ [\w/]+\.py)\ -->\n)?
    ^(?:```python\n(?P<code>.*?)^```$ | <!--\ python\n(?P<hidden>.*?)^-->$)
    (?:\n\n```text\n(?P<output>.*?)^```$)?
    """,
    re.S | re.M | re.X,
)


class SampleError(Exception):
    """A sample fails or has output without a place; the message has the page and the line."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One block of a page."""

    code: str
    note: str
    """The comment before the block, or an empty text."""
    output: tuple[int, int] | None
    """The span of the output in the page; None without output."""
    line: int
    """The number of the page's line on which the code begins."""

    @property
    def library(self) -> str:
        """The library that the sample needs besides a GPU, or an empty text."""
        before, _, library = self.note.partition("needs a GPU and ")
        return "" if before else library


def samples(text: str) -> list[Sample]:
    """Returns the blocks of a page, in order."""
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
    """Runs blocks as one program, in an empty folder.  Returns the output of each block."""
    name, end = f"{Path(page).stem}.py", 0
    names: dict[str, object] = {"__name__": "__main__"}
    said = []
    with _empty_folder() as folder, mock.patch.dict(os.environ, COLUMNS="120", TERM="dumb"):
        # Errors and tables of graphs quote lines of the file.
        (folder / name).write_text("\n".join(block.code for block in blocks), encoding="utf-8")
        linecache.checkcache(name)
        for block in blocks:
            printed = io.StringIO()
            try:
                # Quarantined keys are logged, as the pages explain.
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
    """Runs the samples of a page on the host driver.  Returns the page's text with their output.

    Raises SampleError if a sample fails, or if the page has no place for its output.
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
    """Strips blanks at the ends of lines, and replaces handles and addresses, which differ from run
    to run, by numbers in the order in which they appear."""
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        place = numbers.setdefault(match[0], len(numbers) + 1)
        return f"0x{place << 12:0{len(match[0]) - 2}x}"

    text = re.sub(r"0x[0-9a-f]{6,}", number, text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())
