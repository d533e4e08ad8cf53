"""Checks on kernels that need no GPU: every kernel of a package, for every architecture.

CI compiles the library's own kernels for each architecture it claims, and fails on a warning, a
spill to local memory, or more registers than the launch bounds leave room for.

A `.cu` file that does not compile by itself (it wants macros, or holds templates) is covered by a
module beside it with a function that says how it is really compiled:

    def kernel_checks() -> Iterable[KernelCheck]: ...

whose sources have the file's name as their `name`, or include it as a header of that name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ostinato.modules.compiler import compile_plan, plan_compilation
from ostinato.modules.cubin import KernelResources, kernel_resources
from ostinato.modules.options import CompileOptions
from ostinato.modules.source import Source

__all__ = [
    "ARCHITECTURES",
    "CheckedKernel",
    "KernelCheck",
    "Report",
    "check_source",
    "package_sources",
]

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")

_REGISTERS_OF_MULTIPROCESSOR = 65536
_MAX_REGISTERS = 255
_MAX_THREADS = 1024
_ALLOCATION_UNIT = 8  # registers a thread are handed out in eights

_SPILLS = re.compile(
    r"Function properties for (?P<name>\S+)\s*\n\s*ptxas\s+[.:]?\s*\d+ bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
_WARNING = re.compile(r"^.*\bwarning(?: #|\s*:).*$", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """One way in which a source is compiled; `expressions` are the C++ names wanted of it."""

    source: Source
    options: CompileOptions = field(default_factory=CompileOptions)
    expressions: tuple[str, ...] = ()

    def covers(self, file_name: str) -> bool:
        """Whether this compiles the file of that name."""
        return self.source.name == file_name or file_name in self.source.headers


@dataclass(frozen=True, slots=True)
class CheckedKernel:
    """One kernel for one architecture; spills in bytes a thread."""

    resources: KernelResources
    spill_stores: int
    spill_loads: int

    @property
    def registers_allowed(self) -> int:
        """What a block as large as the launch bounds allow (1024 without any) leaves a thread."""
        threads = self.resources.max_threads or _MAX_THREADS
        share = _REGISTERS_OF_MULTIPROCESSOR // threads // _ALLOCATION_UNIT * _ALLOCATION_UNIT
        return min(_MAX_REGISTERS, share)


@dataclass(frozen=True, slots=True)
class Report:
    """What the compiler made of a source for one architecture; `problems` in words."""

    source: str
    arch: str
    kernels: tuple[CheckedKernel, ...]
    problems: tuple[str, ...]


def package_sources(root: Path) -> Iterator[Source]:
    """Every `.cu` file under a folder, each with the `.cuh` and `.h` files beside it."""
    for path in sorted(root.rglob("*.cu")):
        beside = sorted([*path.parent.glob("*.cuh"), *path.parent.glob("*.h")])
        yield Source(
            path.read_text(encoding="utf-8"),
            headers={header.name: header.read_text(encoding="utf-8") for header in beside},
            name=path.name,
        )


def check_source(
    source: Source,
    arch: str,
    options: CompileOptions | None = None,
    expressions: Sequence[str] = (),
) -> Report:
    """Compiles for `arch` ("sm_90") and says what is wrong.  Raises CompileError, NoCudaError."""
    chosen = options or CompileOptions()
    chosen = replace(chosen, arch=arch, extra=(*chosen.extra, "--ptxas-options=-v"))
    compiled = compile_plan(plan_compilation(source, chosen, (0, 0), expressions))
    spills = {m["name"]: m for m in _SPILLS.finditer(compiled.log)}
    problems = [f"the compiler warns: {m[0].strip()}" for m in _WARNING.finditer(compiled.log)]
    kernels = []
    for resources in kernel_resources(compiled.data):
        found = spills.get(resources.name)
        if found is None:
            problems.append(f"{resources.name}: the assembler says nothing of its spills")
            continue
        kernel = CheckedKernel(resources, int(found["stores"]), int(found["loads"]))
        kernels.append(kernel)
        if kernel.spill_stores or kernel.spill_loads:
            problems.append(
                f"{resources.name} spills: {kernel.spill_stores} bytes stored, "
                f"{kernel.spill_loads} loaded"
            )
        if resources.registers > kernel.registers_allowed:
            bound = resources.max_threads
            problems.append(
                f"{resources.name} uses {resources.registers} registers; "
                + (f"its launch bounds of {bound}" if bound else "1024 threads (no launch bounds)")
                + f" leave {kernel.registers_allowed}"
            )
    if not kernels:
        problems.append("it holds no kernel")
    return Report(source.name, arch, tuple(kernels), tuple(problems))
