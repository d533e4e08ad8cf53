"""What an installation holds: everything that the code reads, and nothing that it does not."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.processes import python
from tools import release

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
    clients = {"openai", "langchain-openai", "llm"}
    assert clients <= {need.partition(">")[0] for need in extras["dev"]}
    needs = {need.partition(">")[0] for need in extras["serve"]}
    assert needs == {"starlette", "uvicorn", "h11", "prometheus-client", "llguidance"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    installed = [found.split(",") for found in re.findall(r'-e "\.\[(.+?)\]"', makefile)]
    assert any({"dev", "llm", "serve"} <= set(extras) for extras in installed)


def test_what_the_makefile_imports_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    statements = re.findall(r'python -c "(from ostinato\.[^;]+);', makefile)
    assert len(statements) == 2
    for statement in statements:
        exec(statement, {})


@pytest.mark.parametrize("address", [None, "https://example.org/ostinato"])
def test_the_page_on_the_index_has_no_link_that_leads_nowhere(
    tmp_path: Path, address: str | None
) -> None:
    """The project's address stands in one place, and may be missing."""
    for name in ("setup.py", "LICENSE"):
        shutil.copy2(ROOT / name, tmp_path)
    (tmp_path / "README.md").write_text(
        "![a picture](docs/a.svg)\n![far](https://x.org/b.svg) [there](docs/a.md#here)\n"
        "[in it](#part) [`code`](src/a.py) [far](https://x.org/)\n"
    )
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    if address is not None:
        project = project.replace(
            "[project.scripts]", f'[project.urls]\nRepository = "{address}"\n\n[project.scripts]'
        )
    (tmp_path / "pyproject.toml").write_text(project, encoding="utf-8")
    done = python("setup.py", "--quiet", "--long-description", cwd=tmp_path)
    wanted = (
        "\n![far](https://x.org/b.svg) there\n[in it](#part) `code` [far](https://x.org/)"
        if address is None
        else f"![a picture]({address}/raw/main/docs/a.svg)\n"
        f"![far](https://x.org/b.svg) [there]({address}/blob/main/docs/a.md#here)\n"
        f"[in it](#part) [`code`]({address}/blob/main/src/a.py) [far](https://x.org/)"
    )
    assert done.stdout.strip() == wanted.strip()


def test_the_address_stands_in_one_place() -> None:
    address = PROJECT["project"].get("urls", {}).get("Repository", "ostinato.invalid")
    kept = ["README.md", "setup.py", "mkdocs.yml", "SECURITY.md", "CITATION.cff", "CONTRIBUTING.md"]
    for path in (*(ROOT / name for name in kept), *(ROOT / "docs").rglob("*.md")):
        assert address not in path.read_text(encoding="utf-8"), path


def test_a_release_has_one_version() -> None:
    import ostinato

    version = PROJECT["project"]["version"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in citation and ostinato.__version__ == version
    assert f"\nlicense: {PROJECT['project']['license']}\n" in citation
    text, _ = release.notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    assert text.startswith("### Added\n") and "\n## " not in text


def test_notes_are_the_versions_section() -> None:
    changelog = (
        "# Changelog\n\n## [1.2.0] - unreleased\n\n### Added\n- new\n\n## [1.1.0] - 2026-01-02\n\n"
        "### Fixed\n- old\n\n[1.1.0]: https://x.org\n"
    )
    assert release.notes(changelog, "1.2.0") == ("### Added\n- new\n", "unreleased")
    assert release.notes(changelog, "1.1.0") == ("### Fixed\n- old\n", "2026-01-02")
    for version in ("1.2", "1x2.0", "2.0.0"):
        with pytest.raises(ValueError, match=f"no section .* {re.escape(f'[{version}]')} - date"):
            release.notes(changelog, version)
