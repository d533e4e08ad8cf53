"""The layout's rules: who may import whom, and what an import may not do."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import ostinato

SOURCE = Path(ostinato.__file__).parent

# The one table.  A package imports only packages of lower ranks, and itself.
RANKS = {
    "errors": 0,
    "files": 0,
    "logs": 0,
    "records": 0,
    "settings": 0,
    "driver": 1,
    "memory": 2,
    "modules": 2,
    "device": 3,
    "graph": 3,
    "launching": 3,
    "state": 3,
    "explain": 4,
    "opening": 4,
    "graphfile": 4,
    "step": 5,
    "testing": 5,
    "distributed": 6,
    "relational": 6,
    "models": 7,
    "interop": 8,
    "bench": 9,
    "serve": 9,
    "cli": 10,
}
# Between neighbours: errors and settings have records, settings raises errors, signatures of graph
# and state name the device, a launch becomes a node of a graph, which a program that only launches
# does not import, and the report of a fault has the graph in a file.
NEIGHBOURS = {
    *(("settings", "errors"), ("graph", "device"), ("state", "device"), ("graph", "launching")),
    *(("errors", "records"), ("settings", "records")),
    ("explain", "graphfile"),
}
# Where a foreign library may be imported.
HOMES = {
    "cuda": ("driver/cuda", "modules/nvrtc.py"),
    "nccl": ("distributed/nccl.py",),
    "torch": ("interop/torch/", "interop/transformers/"),
    "cupy": ("interop/cupy/",),
    "cupyx": ("interop/cupy/",),
    "numba": ("interop/numba.py",),
    "triton": ("interop/triton.py",),
    "transformers": ("interop/transformers/",),
    "llama_cpp": (),
    "llguidance": ("serve",),
    "starlette": ("serve",),
    "uvicorn": ("serve",),
    "h11": ("serve",),
    "prometheus_client": ("serve",),
}

# Files that import each other in a circle, and why they must.
CIRCLES = {
    frozenset({"driver.context", "driver.stream"}): (
        "a stream is made on a context, and a context waits for streams before it destroys things"
    ),
    frozenset({"graph.graph", "graph.executable"}): (
        "a graph instantiates executables, and an executable holds its graph"
    ),
}

# Packages that use the library as its users do: names of `ostinato`, and of these modules of it.
USERS = ("distributed", "relational", "interop", "serve")
PUBLIC = (
    *("errors", "explain", "graphfile", "lowlevel", "models", "modules", "settings", "step"),
    "testing",
)
# The two faces: names for users, and names for packages that are built on the library.
FACES = ("__init__", "lowlevel")

FILES = sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> list[str]:
    """Every module that a file imports, also inside functions."""
    found: list[str] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layers"
            found.append(node.module or "")
            if node.module == "ostinato":
                found += [f"ostinato.{alias.name}" for alias in node.names]
    return found


def test_imports_point_down() -> None:
    wrong = [f"{path}: {why}" for path in FILES for why in upward_imports(path)]
    assert not wrong, "\n".join(wrong)


def upward_imports(path: Path) -> Iterator[str]:
    package = package_of(path)
    if package in (*FACES, "__main__"):
        return
    assert package in RANKS, f"{package} has no rank: add it to the table"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "ostinato" and len(parts) > 1 and parts[1] != package:
            other = parts[1]
            if RANKS[package] >= 6 and other not in RANKS:
                continue  # `from ostinato import launch`, `from ostinato.lowlevel import new_lock`
            if RANKS[other] >= RANKS[package] and (package, other) not in NEIGHBOURS:
                yield f"{package} (rank {RANKS[package]}) imports {name}"


def test_a_program_that_launches_one_kernel_imports_what_it_needs() -> None:
    """And not graphs, of which it has none; modules of Python and NumPy that wait for a failure;
    patterns for text that nobody gave; six compiled methods of each record."""
    program = """
import dataclasses, re, sys
import numpy
before = {*sys.modules}
import ostinato as ost
import ostinato.driver.cuda.driver

@ost.host_kernel("x: *f32, n: u32")
def twice(launch, x, n):
    x[:n] *= 2

with ost.open_device("host") as device:
    stream, x = device.create_stream(), device.zeros(8, "f4")
    kernel = device.kernel(ost.Source(host=[twice], name="twice"), "twice")
    ost.launch(stream, kernel, ost.LaunchConfig(1, 32), x, numpy.uint32(8))
    stream.synchronize()
for name in {*sys.modules} - before:
    if name.startswith(("ostinato.graph", "ostinato.step", *UNUSED)):
        print("imports", name)
    if name.startswith("ostinato."):
        for what, value in vars(sys.modules[name]).items():
            if isinstance(value, re.Pattern):
                print(name, "compiles", what)
            if value is dataclasses.dataclass:
                print(name, "has the standard library's dataclass")
"""
    unused = (
        *("asyncio", "concurrent", "graphlib", "importlib.metadata", "logging", "multiprocessing"),
        *("numpy.ma", "numpy.typing", "random", "socket", "subprocess", "tempfile", "traceback"),
        "uuid",
    )
    command = [sys.executable, "-c", f"UNUSED = {unused}\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert not done.stdout, done.stdout


def test_upper_packages_use_public_names() -> None:
    wrong = [
        f"{path}: {why}"
        for path in FILES
        if package_of(path) in USERS
        for why in private_imports(path)
    ]
    assert not wrong, "\n".join(wrong)


def private_imports(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("ostinato."):
                    yield f"imports {alias.name}: import names of ostinato"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ostinato"):
            home = str(node.module)
            if home.startswith(f"ostinato.{package_of(path)}"):
                continue
            if home != "ostinato" and home.removeprefix("ostinato.") not in PUBLIC:
                yield f"imports from {home}: export under ostinato what it needs"
                continue
            public = importlib.import_module(home).__all__
            for alias in node.names:
                if alias.name not in public:
                    yield f"{home}.{alias.name} is not public"


def test_foreign_libraries_stay_home() -> None:
    wrong = []
    for path in FILES:
        where = path.relative_to(SOURCE).as_posix()
        for name in imports(path):
            homes = HOMES.get(name.split(".")[0])
            if homes is not None and not where.startswith(homes):
                wrong.append(f"{where} imports {name}; it belongs in {homes}")
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for type checkers count, and so does importlib."""
    modules = {module_of(path): path for path in FILES}
    graph = {name: imported(path, modules) - {name} for name, path in modules.items()}
    found = {frozenset(circle) for circle in circles(graph)}
    assert found == set(CIRCLES)
    assert len(CIRCLES) <= 2 and all(len(circle) == 2 for circle in CIRCLES)
    for path in FILES:
        hidden = re.findall(
            r"(?:import_module|load_extension)\("
            r"[\"']ostinato\.(?!driver\._launch[\"']|models\._native[\"']|"
            r"interop\.reading\._recheck[\"'])([\w.]+)[\"']",
            path.read_text(),
        )
        assert not hidden, f"{path.name} imports {hidden} where no one sees it"


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path, modules: Collection[str]) -> set[str]:
    """The files of the library that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in nodes_of(path):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [
                n if n.removeprefix("ostinato.") in modules else str(node.module) for n in inner
            ]
        found |= {n.removeprefix("ostinato.") for n in names if n.startswith("ostinato.")}
    return found & set(modules)


def circles(graph: Mapping[str, Collection[str]]) -> list[set[str]]:
    """Sets of files that all reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [*graph[start]]
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead.extend(graph[name])
        return seen

    reach = {name: reached(name) for name in graph}
    found: list[set[str]] = []
    for name in graph:
        circle = {other for other in reach[name] if name in reach[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def test_nothing_outside_the_driver_asks_which_driver_it_is() -> None:
    for path in FILES:
        if package_of(path) in ("driver", "device", "cli", "testing"):
            continue
        text = path.read_text()
        for sign in ("HostDriver", "CudaDriver", '.name == "host"', 'name.startswith("cuda'):
            assert sign not in text, f"{path.name} contains {sign}: ask for a capability"


def test_nothing_outside_the_driver_compares_what_kernels_are_written_in() -> None:
    """`Capabilities.compiles_cuda`, `runs_host_functions` and `Driver.cuda_context` answer that."""
    for path in FILES:
        if package_of(path) == "driver":
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Compare):
                words = ast.unparse(node)
                assert "source_language" not in words, f"{path.name}: {words}"


def test_frozen_records_are_never_written() -> None:
    """A record that converts what it is given passes it on to the generated `__init__` of a base
    class (`LaunchConfig`)."""
    for path in FILES:
        text = path.read_text()
        assert "object.__setattr__" not in text, f"{path.name} writes into a frozen record"
        if path.parts[-3:] == ("interop", "torch", "graphing.py"):
            continue  # what is set of a graphed module is set of the module
        if path.parts[-2:] == ("step", "graphed_step.py"):
            continue  # no record: what is set of a step may forbid its next replay
        assert "def __setattr__" not in text, f"{path.name}: @dataclass(frozen=True) forbids that"


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


def test_a_public_name_is_defined_in_one_module() -> None:
    """Names of classes and of types, so that what a signature says needs no look at the imports.
    A name of two levels says its level: `Stream` is public, `HostStream` the host driver's."""
    homes: dict[str, set[str]] = {}
    for path in FILES:
        for node in nodes_of(path):
            name = ""
            if isinstance(node, ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
                name = ast.unparse(node.target)
            if name and not name.startswith("_"):
                homes.setdefault(name, set()).add(module_of(path))
    found = {name: sorted(modules) for name, modules in homes.items() if len(modules) > 1}
    assert not found, f"each name stands for one thing: {found}"


def test_docstrings_begin_with_what_they_are_about() -> None:
    """With a verb or a noun: a sentence that begins otherwise is half of one."""
    halves = {"As", "How", "It", "Of", "That", "They", "Those", "What", "Where", "Whether", "Who"}
    found = []
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = node.value.value
                if isinstance(text, str) and text.split()[:1] and text.split()[0] in halves:
                    found.append(f"{path}:{node.lineno}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)
