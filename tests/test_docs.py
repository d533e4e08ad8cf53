"""What the README and the docs say is what works."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import pkgutil
import re
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ostinato as ost
from tests.kernel_checks import KernelCheck, check
from tests.modules.cubin_loader import needs_nvrtc
from tests.processes import ROOT, python
from tools import figures, samples

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


run = partial(python, OSTINATO_DEVICE="host")


def blocks(page: str) -> list[samples.Sample]:
    return samples.samples((ROOT / page).read_text(encoding="utf-8"))


def test_the_code_in_the_readme_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OSTINATO_DEVICE", "host")
    names: dict[str, object] = {}
    assert len(blocks("README.md")) == 2
    for block in blocks("README.md"):
        exec(compile(block.code, "README.md", "exec"), names)
    out = capsys.readouterr().out
    assert "scale" in out
    assert "replays 2, eager 1" in out
    assert "quarantined" not in out
    names["device"].close()  # type: ignore[attr-defined]


def test_the_code_has_types(tmp_path: Path) -> None:
    """Where the package is installed: as a user's own mypy sees it."""
    programs = []
    for page in ("README.md", *samples.PAGES_FOR_GPUS):
        program = tmp_path / f"{Path(page).stem.lower()}.py"
        # A tutorial's functions need no annotations.
        lax = ("defs", "decorators", "calls")
        head = "# mypy: allow-incomplete-defs\n" + "".join(
            f"# mypy: allow-untyped-{n}\n" for n in lax
        )
        head = "" if page == "README.md" else head
        text = head + "\n".join(block.code for block in blocks(page))
        program.write_text(text, encoding="utf-8")
        programs.append(str(program))
    checker = ("-m", "mypy", "--strict", "--config-file=", "--ignore-missing-imports")
    cache = f"--cache-dir={ROOT}/.mypy_cache/docs"
    result = run(*checker, cache, *programs, MYPYPATH=str(ROOT / "src"))
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_error_in_the_readme_is_the_error(host_device: ost.Device) -> None:
    stream = host_device.create_stream()
    with pytest.raises(ost.errors.CaptureBrokenError) as caught, ost.capture(stream):
        stream.synchronize()
    (shown,) = re.findall(r"^```\nCaptureBrokenError: (.*?)^```", README, flags=re.S | re.M)
    said = re.sub(r"at \S+:\d+", "at app.py:41", str(caught.value))
    assert " ".join(said.split()) == " ".join(shown.split())


@needs_nvrtc()
@pytest.mark.parametrize("page", samples.PAGES)
def test_the_cuda_of_samples_compiles(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[ost.Source] = []

    def noted(*arguments: Any, **options: Any) -> ost.Source:
        sources.append(source(*arguments, **options))
        return sources[-1]

    def noted_kernel(*arguments: Any, **options: Any) -> Any:
        decorate = kernel(*arguments, **options)
        return lambda function: sources.append(decorate(function)) or sources[-1]

    source, kernel = ost.Source, ost.kernel
    monkeypatch.setattr(ost, "Source", noted)
    monkeypatch.setattr(ost, "kernel", noted_kernel)
    monkeypatch.setenv("OSTINATO_DEVICE", "host")
    samples.run(page, [block for block in blocks(page) if not block.note])
    for made in sources:
        if made.cuda is not None:
            assert not check(KernelCheck(page, made), "sm_90").problems


def test_every_block_of_python_in_the_docs_is_a_sample() -> None:
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        lines = text.splitlines()
        found = samples.samples(text)
        shown = [lines[block.line - 2] for block in found].count("```python")
        assert text.count("```python") == shown, page
        for block in found:
            if block.note.startswith("run by "):
                test = ROOT / block.note.removeprefix("run by ")
                assert page.name in test.read_text(encoding="utf-8"), block.note


PRINTS = """```python
import numpy as np

print(np.arange({}), hex(id(np)))
```

```text
[0 1] 0x000000001000
```
"""


def test_what_a_sample_prints_is_mended() -> None:
    page = samples.filled("docs/page.md", PRINTS.format(3))
    assert re.search(r"^\[0 1 2\] 0x0+1000$", page, re.M)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```python\nx = 1\n\ny = x.z\n```\n", r"docs/page\.md:2: AttributeError"),
        ("```python\nprint(1)\n```\n", "no ```text block"),
        ("<!-- a test file -->\n```python\ndef test_it():\n    assert 0\n```\n", "assert 0"),
        ("<!-- python\nx = 1\n-->\n\n```python\nassert x == 2\n```\n", "AssertionError"),
    ],
)
def test_a_sample_that_does_not_run_is_an_error(text: str, why: str) -> None:
    with pytest.raises(samples.SampleError, match=why):
        samples.filled("docs/page.md", text)


def test_a_sample_for_a_gpu_does_not_run_without_one() -> None:
    text = "<!-- needs a GPU and torch -->\n```python\nimport no_such_module\n```\n"
    assert samples.filled("docs/page.md", text) == text


PRIVATE = {
    "bench": "what `ostinato bench` is made of",
    "cli": "the command, which has a page of its own",
    "device": "its names are at the top",
    "driver": "only its protocol is public: driver.api",
    "files": "the library's own",
    "generate_call": "a part of transformers, which needs neither it nor torch",
}
"""Packages and modules right under `ostinato` and in `interop` that are not in the reference, and
why."""


def public_paths(folder: Path) -> list[Path]:
    """The modules and packages of a folder that the reference must have."""
    paths = (path for path in sorted(folder.iterdir()) if path.suffix in ("", ".py"))
    return [path for path in paths if path.stem not in PRIVATE and not path.stem.startswith("_")]


def test_every_public_name_is_in_the_reference() -> None:
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    told = re.findall(r"^::: (\S+)$", text, re.M)
    assert len(set(told)) == len(told), "a name is there twice"
    places = (name.rpartition(".") for name in told if "interop" not in name)
    there = [getattr(pkgutil.resolve_name(parent), name) for parent, _, name in places]
    package = ROOT / "src" / "ostinato"
    modules = ["ostinato", "ostinato.driver.api"]
    modules += [f"ostinato.{path.stem}" for path in public_paths(package)]
    missing = []
    for module in map(importlib.import_module, modules):
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if not (inspect.ismodule(value) or any(value is other for other in there)):
                missing.append(f"{module.__name__}.{name}")
    for path in public_paths(package / "interop"):
        names = listed(path / "__init__.py" if path.is_dir() else path)
        missing += {f"ostinato.interop.{path.stem}.{name}" for name in names}.difference(told)
    assert missing == []


def listed(path: Path) -> list[str]:
    """`__all__` of a module that may not be importable here."""
    found = re.search(r"^__all__ = (\[.*?\])", path.read_text(encoding="utf-8"), re.S | re.M)
    return [] if found is None else list(ast.literal_eval(found[1]))


def test_the_commands_in_the_readme_exist() -> None:
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^\$ make (\w+)", README, flags=re.M):
        assert f"\n{target}:" in targets
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for command in re.findall(r"^\$ ostinato ([a-z]+(?: list)?)", README, flags=re.M):
        assert f"`ostinato {command}`" in page, command
    for extras in re.findall(r"ostinato\[([\w,]+)\]", README):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


OTHERS = (ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md")


def test_links_in_the_docs_lead_somewhere() -> None:
    """Files of this repository are linked from where the page is; setup.py makes the package
    index's links of the README's."""
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *OTHERS):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name} links to {link}"
            assert not link.startswith(PROJECT.get("urls", {}).get("Repository", " ")), link


def test_the_limits_are_those_of_the_code() -> None:
    from ostinato.cli.doctor import LEAST_VERSIONS
    from ostinato.driver.cuda import libcuda
    from ostinato.models import config, program
    from ostinato.models.cuda import backend, products, shapes
    from ostinato.serve import protocol

    def rows(heading: str) -> dict[str, list[str]]:
        part = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        cells = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
        return {first.strip(): [cell.strip() for cell in rest] for first, *rest in cells}

    page = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    machine, graphs = rows("Where it runs"), rows("Graphs")
    decoder, server = rows("Decoder"), rows("Server")

    def words(version: tuple[int, int]) -> str:
        return "{}.{}".format(*version)

    assert f"CUDA {words(libcuda.REQUIRED)} or" in machine["CUDA driver"][0]
    assert words(backend.CudaBackend._LEAST) in machine["GPU, for the decoder"][0]
    read, branches = libcuda.READ_CONDITIONAL.since, libcuda.BRANCHES.since
    assert f"CUDA {words(read)}" in graphs["IF and WHILE nodes"][2]
    assert f"CUDA {words(branches)}" in graphs["IF with an else, SWITCH"][1]
    assert decoder["rows of a step"][0].startswith(f"{shapes.MAX_ROWS}; {products.PIECE_ROWS:,} ")
    assert program.SAMPLED_ROWS == shapes.MAX_ROWS
    assert decoder["sequences at once"][0] == f"{shapes.MAX_ROWS}"
    assert f"up to {shapes._MAX_HEAD_SIZE};" in decoder["head size"][0]
    assert decoder["head size"][1] == f"up to {config._LIMITS['head_size']:,}"
    counters = shapes.COUNTER_BYTES // 4
    assert decoder["heads"][0] == (
        f"{counters // shapes.MAX_ROWS} with {shapes.MAX_ROWS} rows; if heads are wider than "
        f"{shapes.PIECE_HEAD_SIZE}, rows times heads up to {counters:,}"
    )
    assert decoder["heads"][1] == f"up to {config._LIMITS['heads']:,}"
    assert decoder["stop tokens"] == [f"{program.STOP_TOKENS}"] * 2
    libraries = {name.strip("`"): cells[0] for name, cells in rows("Other libraries").items()}
    assert libraries.items() >= LEAST_VERSIONS.items()
    stops = f"{protocol._MOST_STOPS}, of up to {protocol._LONGEST_STOP:,} characters"
    assert server["stop texts of a request"][0] == stops
    command = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    served = command.split("### `ostinato serve`")[1].split("\n### ")[0]
    for option, default in (
        *(("--slots", 8), ("--queue", 64), ("--max-choices", 16), ("--max-body", 4 << 20)),
        ("--timeout", 600.0),
    ):
        about = re.search(rf"(?s){option} .*?default:\s+([\d.]+)", served)
        assert about is not None and float(about[1]) == default


def test_generated_pages_are_fresh() -> None:
    """And samples print what their pages say."""
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


def test_a_list_at_the_end_of_a_page_is_of_the_paragraph_that_it_names() -> None:
    sentence, comment = SENTENCE.split("\n", 1)
    comment = comment.replace("figures", "figures of: A kernel takes")
    page = f"# A page\n\n{sentence}\n\nNo other takes 40.1 ms.\n\n{comment}"
    stale, fresh = (page.format(ms, PLACES.format(ms)) for ms in ("40.1", "48.2"))
    assert figures.filled(stale) == fresh
    assert figures.unlisted(fresh) == ["40.1 ms"]  # the other sentence's, which no list has
    with pytest.raises(figures.FigureError, match=r"no 48\.2 behind"):
        figures.filled(page.format("40.1", PLACES.format("48.2")))
    with pytest.raises(figures.FigureError, match="0 paragraphs begin with 'A kernel takes'"):
        figures.filled(fresh.replace("\nA kernel takes", "\nIt takes"))


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
        ("docs/log: no such entry\n1.6", "no entry"),
        ("docs/log: BLAS threads and other processes\n1.6", "does not say 1.6"),
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
    if name == "ray_serve" and importlib.util.find_spec("ray") is not None:
        pytest.skip("it serves until it is stopped: tests/serve/test_deploying.py")
    result = run("-m", f"examples.{name}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
