"""Every kernel of the library, and of its tests, for every architecture: no warning, no spill."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import ostinato
from ostinato.errors import CompileError
from ostinato.modules import CompileOptions, Source
from ostinato.modules.catalog import (
    ARCHITECTURES,
    KernelCheck,
    check_source,
    package_sources,
)
from ostinato.relational import chain
from tests import sources
from tests.modules.cubin_loader import needs_nvrtc

pytestmark = needs_nvrtc()

ROOT = Path(ostinato.__file__).parent


def package_checks() -> list[KernelCheck]:
    """How each kernel file of the package is compiled: as its package says, else as it is."""
    checks = [KernelCheck(chain.source())]  # with a header that is made
    for path in sorted(ROOT.rglob("*.py")):
        if "\ndef kernel_checks(" in path.read_text(encoding="utf-8"):
            name = ".".join(["ostinato", *path.relative_to(ROOT).with_suffix("").parts])
            checks += importlib.import_module(name).kernel_checks()
    for source in package_sources(ROOT):
        if not any(check.covers(source.name) for check in checks):
            checks.append(KernelCheck(source))
    return checks


def check_name(check: KernelCheck) -> str:
    macros = ",".join(f"{k}={v}" for k, v in dict(check.options.defines).items())
    return f"{check.source.name}[{macros[:40]}]" if macros else check.source.name


@pytest.mark.parametrize(
    ("check", "arch"),
    [  # each on one architecture, and slowly on all
        pytest.param(
            check,
            arch,
            marks=() if number % len(ARCHITECTURES) == k else pytest.mark.slow,
            id=f"{check_name(check)}-{arch}",
        )
        for number, check in enumerate([*package_checks(), KernelCheck(sources.SOURCE)])
        for k, arch in enumerate(ARCHITECTURES)
    ],
)
def test_kernels_compile_cleanly(check: KernelCheck, arch: str) -> None:
    try:
        report = check_source(check.source, arch, check.options, check.expressions)
    except CompileError as error:
        error.add_note("say how it is compiled: kernel_checks() in ostinato.modules.catalog")
        raise
    assert report.kernels
    assert not report.problems, "\n".join(report.problems)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_host_signatures_fit_the_compiled_kernels(arch: str) -> None:
    report = check_source(sources.SOURCE, arch)
    for kernel in report.kernels:
        signature = sources.SOURCE.signature(kernel.resources.name)
        assert signature is not None
        assert signature.layout == kernel.resources.parameters


def test_a_warning_is_a_problem() -> None:
    source = Source('extern "C" __global__ void k(int* x) { int unused; x[0] = 1; }')
    (problem,) = check_source(source, "sm_90").problems
    assert "unused" in problem


SPILLING = Source(
    """
extern "C" __global__ void __launch_bounds__(1024) k(float* x, int n) {
    float a[96], sum = 0;
    #pragma unroll
    for (int i = 0; i < 96; ++i) a[i] = x[i * 7 + threadIdx.x];
    for (int j = 0; j < n; ++j) {
        #pragma unroll
        for (int i = 0; i < 96; ++i) sum += a[i] * x[j];
        #pragma unroll
        for (int i = 0; i < 96; ++i) a[i] = a[(i + 7) % 96] + sum * i;
    }
    #pragma unroll
    for (int i = 0; i < 96; ++i) x[i] = a[i];
}
"""
)


def test_a_spill_is_a_problem() -> None:
    report = check_source(SPILLING, "sm_90")
    assert any("spills" in p for p in report.problems)
    (kernel,) = report.kernels
    assert kernel.spill_stores > 0 and kernel.registers_allowed == 64


def test_too_many_registers_are_a_problem() -> None:
    unbound = Source(SPILLING.cuda.replace("__launch_bounds__(1024)", ""))
    (problem,) = check_source(unbound, "sm_90").problems
    assert "1024 threads (no launch bounds) leave 64" in problem
    bound = Source(SPILLING.cuda.replace("1024", "128"))
    assert not check_source(bound, "sm_90", CompileOptions()).problems


def test_headers_beside_a_file_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text('#include "a.cuh"\nextern "C" __global__ void k(T* x) {}')
    (tmp_path / "a.cuh").write_text("typedef float T;\n")
    (source,) = package_sources(tmp_path)
    assert not check_source(source, "sm_80").problems
