"""The layout's rules: who may import whom, and what an import may not do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ostinato

SOURCE = Path(ostinato.__file__).parent

# The one table.  A package imports only packages of lower ranks, and itself.
RANKS = {
    "errors": 0,
    "settings": 0,
    "driver": 1,
    "memory": 2,
    "modules": 2,
    "device": 3,
    "graph": 3,
    "state": 3,
    "cache": 4,
    "replay": 5,
    "testing": 5,
    "interop": 6,
    "models": 6,
    "relational": 6,
    "bench": 7,
    "cli": 8,
}
# Within rank 0, settings raises errors: the one import between neighbours.
NEIGHBOURS = {("settings", "errors")}
# Where a foreign library may be imported.
HOMES = {
    "cuda": ("driver/cuda", "modules/compiler.py"),
    "torch": ("interop/torch.py", "interop/transformers.py"),
    "cupy": ("interop/cupy.py",),
    "numba": ("interop/numba.py",),
    "triton": ("interop/triton.py",),
    "transformers": ("interop/transformers.py",),
    "llama_cpp": ("bench/llama_peer.py",),
}

FILES = sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> list[str]:
    """Every module that a file imports, also inside functions."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layers"
            found.append(node.module or "")
            if node.module == "ostinato":
                found += [f"ostinato.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    package = package_of(path)
    if package in ("__init__", "__main__"):
        return
    assert package in RANKS, f"{package} has no rank: add it to the table"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "ostinato" and len(parts) > 1 and parts[1] != package:
            other = parts[1]
            if RANKS[package] >= 6 and other not in RANKS:
                continue  # `from ostinato import launch`: the public names
            allowed = RANKS[other] < RANKS[package] or (package, other) in NEIGHBOURS
            assert allowed, f"{package} (rank {RANKS[package]}) imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_foreign_libraries_stay_home(path: Path) -> None:
    where = path.relative_to(SOURCE).as_posix()
    for name in imports(path):
        homes = HOMES.get(name.split(".")[0])
        if homes is not None:
            assert where.startswith(homes), f"{where} imports {name}; it belongs in {homes}"


def test_nothing_outside_the_driver_asks_which_driver_it_is() -> None:
    for path in FILES:
        if package_of(path) in ("driver", "device", "cli", "testing"):
            continue
        text = path.read_text()
        for sign in ("HostDriver", "CudaDriver", '.name == "host"', 'name.startswith("cuda'):
            assert sign not in text, f"{path.name} contains {sign}: ask for a capability"


def test_import_has_no_side_effects() -> None:
    code = (
        "import sys, os, pathlib\n"
        "os.mkdir = pathlib.Path.mkdir = None\n"
        "import ostinato\n"
        "heavy = [m for m in ('cuda', 'cuda.core', 'torch', 'cupy', 'gguf', 'tokenizers', 'rich')"
        " if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_file_stays_readable() -> None:
    long = {
        str(p.relative_to(SOURCE)): n
        for p in FILES
        if (n := len(p.read_text().splitlines())) > 700 and p.name != "api.py"
    }
    assert not long, f"is each of these one thing? {long}"
