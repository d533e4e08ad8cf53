"""What the README and the docs say is what works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


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


def test_the_code_in_the_readme_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OSTINATO_DEVICE", "host")
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    out = capsys.readouterr().out
    assert "scale" in out
    assert "launches_replayed=2" in out
    assert "quarantined={}" in out
    names["device"].close()  # type: ignore[attr-defined]


def test_the_commands_in_the_readme_exist() -> None:
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^\$ make (\w+)", README, flags=re.M):
        assert f"\n{target}:" in targets
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for command in re.findall(r"^\$ ostinato ([a-z]+(?: list)?)", README, flags=re.M):
        assert f"`ostinato {command}`" in page, command


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_generated_pages_are_fresh() -> None:
    result = run("-m", "tools.make_docs", "--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_numbers_come_from_results_that_are_there() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for name in re.findall(r"benchmarks/results/[\w./-]+\.json", page.read_text("utf-8")):
            json.loads((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "examples").glob("[a-z]*.py")))
def test_examples_run(name: str) -> None:
    result = run("-m", f"examples.{name}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
