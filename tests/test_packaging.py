"""What an installation holds: everything that the code reads, and nothing that it does not."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "ostinato"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_file_that_is_no_code_is_package_data() -> None:
    """A kernel's source that is missing in a wheel is missed only where the wheel is used."""
    wanted = {
        path
        for path in PACKAGE.rglob("*")
        if path.is_file()
        and path.suffix not in (".py", ".pyc", ".c", ".h", ".so")  # built from, or built
        and "__pycache__" not in path.parts
    }
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["ostinato"]
    held = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert wanted == held
    for pattern in patterns:
        assert any(PACKAGE.glob(pattern)), f"{pattern} names nothing"


def test_every_folder_with_code_is_a_package() -> None:
    """Only packages are found: a folder without __init__.py would be left out."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_what_is_compiled_is_what_setup_names() -> None:
    sources = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.c")}
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert sources and all(f'"{source}"' in setup for source in sources)
    assert setup.count('.c"') == len(sources)


def test_what_tests_of_the_server_skip_without_is_installed_for_them() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert any(need.startswith("openai>") for need in extras["dev"])
    needs = {need.partition(">")[0] for need in extras["serve"]}
    assert needs == {"starlette", "uvicorn", "prometheus-client"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert '-e ".[dev,llm,serve,cuda13]"' in makefile


def test_what_the_makefile_imports_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    statements = re.findall(r'python -c "(from ostinato\.[^;]+);', makefile)
    assert len(statements) == 2
    for statement in statements:
        exec(statement, {})
