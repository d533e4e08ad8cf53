"""The graph layer's tests on the other CPythons of this machine.

    python -m tools.check_pythons [--all]

Looked for are python3.11 to python3.14 and their free-threaded builds, on the path and among those
that pyenv and uv have installed; those that do not start, and the version that runs this, are left
out.  Each gets an environment of its own with what pyproject.toml's extra `test` names.  `--all`
runs all tests of graphs, steps, caches and devices' state, and the random lives.  Exit status 0 if
every one passes; a machine without other Pythons says so and passes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = tuple(f"3.{minor}{build}" for minor in (11, 12, 13, 14) for build in ("", "t"))
FREE_THREADED = {"hypothesis": ["hypothesis<6.150"], "safetensors": []}
"""There, in place of these: the others have a compiled part that no free-threaded Python takes."""
TESTS = (
    *("tests/contract", "tests/graph/test_change_paths.py"),
    *("tests/test_launcher.py", "tests/test_kernel_call.py", "tests/interop/test_recheck.py"),
)
MORE = (
    *("tests/graph", "tests/graphfile", "tests/step", "tests/state", "tests/property"),
    "tests/footguns",
)
WHICH = "import sys; print(sys.version_info[:2], getattr(sys, 'abiflags', ''))"


def candidates(version: str) -> Iterator[str]:
    """Where an interpreter may be."""
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield on_path
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(pyenv.glob(f"versions/*/bin/python{version}"), reverse=True))
    if shutil.which("uv") is not None:
        find = ("uv", "python", "find", "--no-python-downloads", version)
        yield from subprocess.run(
            find, capture_output=True, text=True, check=False
        ).stdout.splitlines()


def interpreters() -> dict[str, str]:
    """Version to program, of those that start and are not this one's."""
    found: dict[str, str] = {}
    own = f"{sys.version_info[0]}.{sys.version_info[1]}{sys.abiflags}"
    for version in VERSIONS:
        number = tuple(map(int, version.rstrip("t").split(".")))
        said = f"{number} {version[len(version.rstrip('t')) :]}".strip()
        for program in candidates(version) if version != own else ():
            # A shim may be there for a version that is not.
            done = subprocess.run(
                [program, "-c", WHICH], capture_output=True, text=True, check=False
            )
            if done.returncode == 0 and done.stdout.strip() == said:
                found[version] = program
                break
    return found


def needs(build: str) -> list[str]:
    """What is installed: pyproject.toml says what the library and its tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    if build == "t":
        found = [n for need in found for n in FREE_THREADED.get(need.partition(">")[0], [need])]
    return found


def passes(version: str, program: str, tests: tuple[str, ...]) -> bool:
    """Whether the tests pass there; prints what failed."""
    with tempfile.TemporaryDirectory(prefix=f"ostinato-python{version}-") as folder:
        python = Path(folder) / "bin" / "python"
        build = "t" if version.endswith("t") else ""
        install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        steps = (
            (program, "-m", "venv", folder),
            (str(python), *install, *needs(build)),
            (
                *(str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"),
                *("-p", "no:cacheprovider", "-m", "not slow", *tests),
            ),
        )
        for step in steps:
            done = subprocess.run(
                step,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": "src", "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                print(f"python{version}: {' '.join(step)}\n{done.stdout}{done.stderr}")
                return False
    print(f"python{version}: {done.stdout.strip().splitlines()[-1].strip('= ')}", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="the tests of caches and steps too")
    tests = (*TESTS, *MORE) if parser.parse_args().all else TESTS
    found = interpreters()
    if not found:
        print("no other Python is here")
    failed = [version for version in found if not passes(version, found[version], tests)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
