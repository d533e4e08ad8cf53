"""Every kernel of the library, and of its tests, for every architecture: `kernel_checks`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

import ostinato
from benchmarks import divergences
from ostinato.modules import Source, compiler
from ostinato.modules.nvrtc import Toolchain
from tests import sources
from tests.kernel_checks import (
    ARCHITECTURES,
    SMALL_ARCHITECTURES,
    KernelCheck,
    check,
    library_checks,
    small_checks,
)
from tests.modules.cubin_loader import needs_nvrtc

pytestmark = needs_nvrtc()


Pair = tuple[KernelCheck, str]


@cache
def every_check() -> list[KernelCheck]:
    return [
        *library_checks(),
        KernelCheck("sources.py", sources.SOURCE),
        KernelCheck("divergences.py", divergences.SOURCE),
    ]


def of_each_file() -> list[KernelCheck]:
    """One check of each file, and of what its macros leave out."""
    found: dict[object, KernelCheck] = {}
    for one in every_check():
        defines = dict(one.options.defines)
        ranks = "RANKS" in defines
        found.setdefault((one.source.name, ranks, *map(defines.get, ("PACKED", "PANELS"))), one)
    return list(found.values())


def small_ones() -> list[KernelCheck]:
    """One check of each file that is cut by the shared memory of a block."""
    names = tuple(f"small odd-bf16-{n}-" for n in (1, 2, 5, 9, 10, 11))
    return [one for one in small_checks() if one.name.startswith(names)]


def on_all(checks: Iterable[KernelCheck], architectures: Sequence[str]) -> list[Pair]:
    return [
        (wanted, arch)
        for wanted in checks
        for arch in architectures
        if wanted.options.arch is None or wanted.options.arch.rstrip("a") == arch
        if arch != "sm_80" or not wanted.name.endswith("-panels")  # copied where clusters are
    ]


def require_clean(pairs: Iterable[Pair]) -> None:
    problems = [f"{one.name}-{arch}: {p}" for one, arch in pairs for p in check(one, arch).problems]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("part", range(8))
def test_each_file_compiles_cleanly(part: int) -> None:
    pairs = on_all(of_each_file(), ["sm_90"]) + on_all(small_ones(), ["sm_86"])
    require_clean(pairs[part::8])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(64))
def test_every_way_of_compiling_is_clean(part: int) -> None:
    pairs = on_all(every_check(), ARCHITECTURES) + on_all(small_checks(), SMALL_ARCHITECTURES)
    require_clean(pairs[part::64])


def oldest_compiler() -> str:
    """The path of the oldest NVRTC that the library takes.  Skips if it is not installed."""
    try:
        files = metadata.files("nvidia-cuda-nvrtc-cu12") or ()
    except metadata.PackageNotFoundError:
        files = ()
    found = [str(one.locate()) for one in files if one.name == "libnvrtc.so.12"]
    if not found:
        pytest.skip("nvidia-cuda-nvrtc-cu12 is not installed")
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_the_oldest_compiler_takes_them(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It judges templates that nothing uses, which later ones do not."""
    path = oldest_compiler()
    monkeypatch.setattr(compiler, "toolchain", Toolchain(lambda: path, lambda: None))
    assert compiler.toolchain.library().version < (13, 0)
    for wanted in every_check()[part::16]:
        options = replace(wanted.options, arch=wanted.options.arch or "sm_90")
        compiler.compile_plan(compiler.plan_compilation(wanted.source, options, (0, 0)))


def test_every_file_of_the_library_is_checked() -> None:
    files = {path.name for path in Path(ostinato.__file__).parent.rglob("*.cu")}
    inline = {sources.SOURCE.name, divergences.SOURCE.name}
    assert files == {wanted.source.name for wanted in every_check()} - inline


def test_a_warning_is_a_problem() -> None:
    source = Source('extern "C" __global__ void k(int* x) { int unused; x[0] = 1; }')
    (problem,) = check(KernelCheck("", source), "sm_90").problems
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
    report = check(KernelCheck("", SPILLING), "sm_90")
    assert any("spills" in p for p in report.problems)
    (kernel,) = report.kernels
    assert kernel.spill_stores > 0 and kernel.registers_allowed == 64
    room = -(-max(kernel.spill_stores, kernel.resources.frame) // 8) * 8
    assert not check(KernelCheck("", SPILLING, spills={"k": room}), "sm_90").problems
    for spills in ({"k": kernel.spill_stores - 8}, {"other": room}):
        problems = check(KernelCheck("", SPILLING, spills=spills), "sm_90").problems
        assert any("spills" in p for p in problems)


def test_too_many_registers_are_a_problem() -> None:
    unbound = Source(SPILLING.cuda.replace("__launch_bounds__(1024)", ""))
    problems = check(KernelCheck("", unbound), "sm_90").problems
    assert any("1024 threads (no launch bounds) leave 64" in p for p in problems)
    bound = Source(SPILLING.cuda.replace("1024", "128"))
    problems = check(KernelCheck("", bound), "sm_90").problems
    assert not any("registers" in p for p in problems)


def test_a_wrong_signature_is_a_problem() -> None:
    text = 'extern "C" __global__ void k(int* x, float y) { x[0] = y; }'
    for signature, good in (("x: *i32, y: f32", True), ("x: *i32, y: f64", False)):
        source = Source(text, signatures={"k": signature})
        assert bool(check(KernelCheck("", source), "sm_90").problems) != good


def test_too_much_shared_memory_and_a_missing_kernel_are_problems() -> None:
    source = Source('extern "C" __global__ void k(int* x) { x[0] = 1; }')
    wanted = KernelCheck("", source, shared={"k": 300_000, "l": 0}, registers={"k": 2})
    said = "\n".join(check(wanted, "sm_90").problems)
    for part in ("300000 bytes of shared memory", "no kernel l", "more than 2"):
        assert part in said
