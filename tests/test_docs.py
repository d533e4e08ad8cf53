"""What the README and the docs say is what works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import ostinato as ost
from tests.graph import disk_kernels
from tests.graph.disk_kernels import add, affine
from tools import figures

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"OSTINATO_DEVICE": "host"} | environ,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def samples(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M)


def test_the_code_in_the_readme_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OSTINATO_DEVICE", "host")
    names: dict[str, object] = {}
    assert len(samples("README.md")) == 2
    for block in samples("README.md"):
        exec(compile(block, "README.md", "exec"), names)
    out = capsys.readouterr().out
    assert "scale" in out
    assert "launches_replayed=2" in out
    assert "quarantined={}" in out
    names["device"].close()  # type: ignore[attr-defined]


def test_the_code_in_the_readme_has_types(tmp_path: Path) -> None:
    """Where the package is installed: as a user's own mypy sees it."""
    program = tmp_path / "readme.py"
    program.write_text("\n".join(samples("README.md")), encoding="utf-8")
    checker = ("-m", "mypy", "--strict", "--config-file=", f"--cache-dir={tmp_path}", str(program))
    result = run(*checker, MYPYPATH=str(ROOT / "src"))
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_error_in_the_readme_is_the_error(host_device: ost.Device) -> None:
    stream = host_device.create_stream()
    with pytest.raises(ost.errors.CaptureBrokenError) as caught, ost.capture(stream):
        stream.synchronize()
    (shown,) = re.findall(r"^```\nCaptureBrokenError: (.*?)^```", README, flags=re.S | re.M)
    said = re.sub(r"at \S+:\d+", "at app.py:41", str(caught.value))
    assert " ".join(said.split()) == " ".join(shown.split())


def test_the_code_on_joins_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_DEVICE", "host")
    (block,) = samples("docs/relational.md")
    column = np.arange(4)
    left = {"key": column, "a": column, "b": column + 1}
    right = {"key": column[::-1].copy(), "a": column, "c": column + 1}
    names: dict[str, object] = {"ost": ost, "left": left, "right": right}
    exec(compile(block, "relational.md", "exec"), names)
    assert len(names["result"]) == 4  # type: ignore[arg-type]


def test_the_code_on_graph_files_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host_device: ost.Device
) -> None:
    monkeypatch.chdir(tmp_path)
    device, stream = host_device, host_device.create_stream()
    first, second = disk_kernels.kernel(device, affine), disk_kernels.kernel(device, add)
    x, w, y = (device.array([n] * 3, "i4") for n in (1, 10, 0))

    def work() -> None:
        ost.launch(stream, first, disk_kernels.ONE, y, x, 2, 0, 3)
        ost.launch(stream, second, disk_kernels.ONE, w, y, 3)

    (block,) = samples("docs/graph-file.md")
    names = {"ost": ost, "device": device, "stream": stream, "work": work, "values": [4, 5, 6]}
    names |= {"x": x, "w": w, "y": y}
    exec(compile(block, "graph-file.md", "exec"), names)
    loaded = names["loaded"]
    assert isinstance(loaded, ost.LoadedGraph)
    assert loaded.outputs["y"].to_numpy(stream).tolist() == [18, 20, 22]


def test_only_pages_that_are_run_have_code() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        has_code = "```python" in page.read_text(encoding="utf-8")
        # tests/test_graphed_generate.py runs that of transformers.md.
        assert has_code == (page.name in ("relational.md", "transformers.md", "graph-file.md")), (
            page.name
        )


def test_the_commands_in_the_readme_exist() -> None:
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^\$ make (\w+)", README, flags=re.M):
        assert f"\n{target}:" in targets
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for command in re.findall(r"^\$ ostinato ([a-z]+(?: list)?)", README, flags=re.M):
        assert f"`ostinato {command}`" in page, command
    for extras in re.findall(r"ostinato\[([\w,]+)\]", README):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_links_in_the_docs_lead_somewhere() -> None:
    """Files of this repository are linked from where the page is; setup.py makes the package
    index's links of the README's."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name} links to {link}"
            assert not link.startswith(PROJECT["urls"]["Repository"]), f"{link} can be relative"


def test_generated_pages_are_fresh() -> None:
    result = run("-m", "tools.make_docs", "--check")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("page", figures.PAGES)
def test_measured_figures_come_from_results(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert figures.unlisted(text) == []
    for name in re.findall(r"[\w-]+-(?:nvidia|host)-[\w-]+\.json", text):
        json.loads((figures.RESULTS / name).read_text(encoding="utf-8"))


SENTENCE = """A kernel takes 1.6 ms, and {} ms until its first launch is done.
<!-- figures
modules-nvidia-h200.json
{}
-->
"""
PLACES = "1.6 = rows[library=ostinato].disk_loaded_ms\n{} = rows[library=ostinato].disk_launched_ms"


def test_a_figure_that_is_not_the_results_is_mended() -> None:
    stale = SENTENCE.format("40.1", PLACES.format("40.1"))
    assert figures.filled(stale) == SENTENCE.format("48.2", PLACES.format("48.2"))
    assert figures.unlisted(stale) == []


def test_a_table_is_written_whole() -> None:
    begin = "<!-- table: modules, written by make docs -->\n"
    page = figures.filled(f"{begin}| 12.5 |\n<!-- end -->")
    assert "| cuda.core | 9.0 | 9.0 |" in page and "12.5" not in page
    assert figures.unlisted(page) == []


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (
            "48.2 = rows[library=ostinato].disk_launched_ms\n1.6 = rows[library=CuPy].again_us",
            "no 1.6 behind",
        ),
        ("1.6 = rows[library=nobody].disk_loaded_ms", "0 rows"),
        ("1.6 = rows[processes=7].disk_loaded_ms", "3 rows"),
        ("1.6 = machine.device", "no number"),
        ("1.6 = summary.no_such", "no_such"),
        ("no/such/file", "nor a file"),
        ("README.md\n1.6", "nor a file"),
        ("docs/log.md: no such entry\n1.6", "no entry"),
        ("docs/log.md: BLAS threads and other processes\n1.6", "does not say 1.6"),
    ],
)
def test_a_list_of_figures_that_cannot_be_followed_is_an_error(lines: str, why: str) -> None:
    with pytest.raises(figures.FigureError, match=why):
        figures.filled(SENTENCE.format("48.2", lines))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 1.2 to 1.4 µs.", ["1.2 to 1.4 µs"]),
        ("Faster: 93 %, 4,664 tok/s.", ["93 %", "4,664 tok/s"]),
        ("| C | 1.5 | **4,664** |", ["1.5", "**4,664**"]),
        (SENTENCE.format("48.2", "1.6 = rows[library=ostinato].disk_loaded_ms"), ["48.2 ms"]),
        ("A prompt of 512 tokens, SmolLM2-135M, `verify=100`, python 3.11, H100 80GB.", []),
    ],
)
def test_a_figure_that_is_not_listed_is_found(text: str, found: list[str]) -> None:
    assert figures.unlisted(text) == found


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "examples").glob("[a-z]*.py")))
def test_examples_run(name: str) -> None:
    result = run("-m", f"examples.{name}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
