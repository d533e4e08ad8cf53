"""The cache of loaded kernels: one compile a key, bounds, lifetimes, failures (C1-C4, C6, E5)."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from ostinato.driver.api import CaptureMode
from ostinato.driver.context import Context
from ostinato.driver.host.driver import HostDriver
from ostinato.driver.host.kernel import HostKernel, host_kernel
from ostinato.errors import (
    CaptureBrokenError,
    ClosedError,
    CompileError,
    InputError,
    NotAvailableError,
    OutOfMemoryError,
    Status,
    driver_error,
)
from ostinato.modules import Kernel, ModuleCache, Source
from ostinato.modules import cache as cache_module
from tests.modules.cubin_loader import kernel_text, make_cache, needs_nvrtc

nvrtc = needs_nvrtc()


@host_kernel("x: *f32, factor: f32, n: u32")
def scale(launch, x, factor, n):
    x[:n] *= factor


@host_kernel("x: *f32, n: u32")
def other(launch, x, n):
    x[:n] += 1


HOST = Source(host=[scale, other], name="host")


@pytest.fixture
def context() -> Iterator[Context]:
    opened = Context(HostDriver())
    yield opened
    opened.close()


@pytest.fixture
def modules(context: Context) -> Iterator[ModuleCache]:
    with ModuleCache(context, disk=False) as opened:
        yield opened


def fresh_source(number: int) -> Source:
    function = HostKernel("k", lambda launch, x: number, scale.signature)
    return Source(host=[function], name=f"fresh {number}")


# ------------------------------------------------------------------------------ one key, one kernel


def test_the_same_question_has_the_same_answer(modules: ModuleCache) -> None:
    first = modules.get_or_compile(HOST, "scale")
    assert modules.get_or_compile(HOST, "scale") is first
    assert modules.get_or_compile(Source(host=[scale, other], name="host"), "scale") is first
    assert modules.statistics().misses == 1
    assert modules.statistics().hits == 2


def test_names_of_one_source_share_a_module(modules: ModuleCache) -> None:
    one, two = modules.get_or_compile(HOST, "scale"), modules.get_or_compile(HOST, "other")
    assert one.module is two.module and one.function != two.function


def test_another_body_never_shares(modules: ModuleCache) -> None:
    one, two = (modules.get_or_compile(fresh_source(n), "k") for n in (1, 2))
    assert one.function != two.function


def test_two_devices_have_two_kernels() -> None:
    contexts = [Context(HostDriver()) for _ in range(2)]
    kernels = [ModuleCache(c, disk=False).get_or_compile(HOST, "scale") for c in contexts]
    assert [k.context for k in kernels] == contexts
    assert kernels[0].module is not kernels[1].module
    for each in contexts:
        each.close()


def test_a_host_kernel_is_a_source(modules: ModuleCache) -> None:
    assert modules.get_or_compile(scale, "scale").signature is scale.signature


def test_flags_as_a_list_work(modules: ModuleCache) -> None:
    first = modules.get_or_compile(HOST, "scale", options=["--restrict"])
    assert modules.get_or_compile(HOST, "scale", options=["--restrict"]) is first


def test_an_unknown_name_lists_the_names(modules: ModuleCache) -> None:
    with pytest.raises(InputError, match=r"no kernel 'scael'.*scale.*Did you mean 'scale'"):
        modules.get_or_compile(HOST, "scael")


@pytest.mark.parametrize("name", ["", "scale\0", "scale\udcff", 3, None, b"scale"])
def test_what_is_no_name_is_refused(modules: ModuleCache, name: object) -> None:
    with pytest.raises(InputError, match="kernel's name is"):
        modules.get_or_compile(HOST, name)


def test_what_is_no_signature_is_refused(modules: ModuleCache) -> None:
    with pytest.raises(InputError, match="signature=3"):
        modules.get_or_compile(HOST, "scale", signature=3)


@nvrtc
def test_a_source_whose_name_is_no_text_compiles() -> None:
    """A file's name may be any bytes; Python has lone surrogates for those that are no text."""
    text = 'extern "C" __global__ void k(float* x) { x[0] = 1; }'
    source = Source(text, name="\udcff.cu")
    cache, _ = make_cache()
    assert cache.get_or_compile(source, "k").name == "k"


@nvrtc
def test_a_signature_of_no_entry_is_said_when_its_kernel_is_asked_for() -> None:
    text = kernel_text(1) + "__global__ void plain(int* x) { x[0] = 1; }\n"
    text += "template <class T> __global__ void each(T* x) { x[0] = 1; }\n"
    right = {"plain": "x: *i32", "each<int>": "x: *i32", "each<float>": "x: *f32"}
    cache, _ = make_cache()
    for name in ("k", "each<int>"):
        assert cache.get_or_compile(Source(text, signatures=right), name).name == name
    wrong = Source(text, signatures={**right, "kk": "x: *i32, p: i32"}, name="text.cu")
    with pytest.raises(InputError, match=r"'text.cu': signatures has 'kk', .*: .*\bk\b"):
        cache.get_or_compile(wrong, "k")
    kernel = cache.get_or_compile(wrong, "k", signature="x: *i32, p: i32")
    assert [p.name for p in kernel.signature.parameters] == ["x", "p"]
    assert cache.get_or_compile(wrong, "plain").signature is not None


def test_the_wrong_language_is_said(modules: ModuleCache) -> None:
    with pytest.raises(NotAvailableError, match="runs host functions"):
        modules.get_or_compile("__global__ void k() {}", "k")
    cache, _ = make_cache()
    with pytest.raises(NotAvailableError, match="host functions alone"):
        cache.get_or_compile(HOST, "scale")
    with pytest.raises(NotAvailableError, match="does not load fatbin"):
        cache.get_or_compile(Source(data=b"x", kind="fatbin"), "k")


def test_a_closed_cache_says_so_and_its_kernels_stay(modules: ModuleCache) -> None:
    kernel = modules.get_or_compile(HOST, "scale")
    modules.close()
    modules.close()
    assert kernel.occupancy(128) > 0
    with pytest.raises(ClosedError):
        modules.get_or_compile(HOST, "scale")


# ------------------------------------------------------------------------------------------ threads


def slow_compile(monkeypatch, gates: dict[str, threading.Event]) -> list[str]:
    """Compilations wait at the gate of their source's name; the list names those begun."""
    begun: list[str] = []
    real = cache_module.try_plan

    def compile_slowly(plan):
        begun.append(plan.source.name)
        gate = gates.get(plan.source.name)
        assert gate is None or gate.wait(60)
        return real(plan)

    monkeypatch.setattr(cache_module, "try_plan", compile_slowly)
    return begun


@nvrtc
def test_many_threads_one_compile(monkeypatch) -> None:
    gate = threading.Event()
    begun = slow_compile(monkeypatch, {"one": gate})
    cache, loader = make_cache()
    source = Source(kernel_text(1), name="one")
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(cache.get_or_compile, source, "k") for _ in range(16)]
        while cache.statistics().waits < 15:
            time.sleep(0.001)
        gate.set()
        kernels = {id(a.result(60)) for a in asked}
    assert begun == ["one"] and loader.loads == 1 and len(kernels) == 1


@nvrtc
def test_other_keys_do_not_wait(monkeypatch) -> None:
    gate = threading.Event()
    slow_compile(monkeypatch, {"slow": gate})
    cache, _ = make_cache()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(cache.get_or_compile, Source(kernel_text(1), name="slow"), "k")
        try:
            quick = cache.get_or_compile(Source(kernel_text(2), name="quick"), "k")
            assert len(quick.info.parameters) == 3
            assert not slow.done()
        finally:
            gate.set()
        assert len(slow.result(60).info.parameters) == 2


@nvrtc
def test_waiting_threads_share_a_compile_error(monkeypatch) -> None:
    gate = threading.Event()
    begun = slow_compile(monkeypatch, {"bad": gate})
    cache, _ = make_cache()
    source = Source("nonsense", name="bad")
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(cache.get_or_compile, source, "k") for _ in range(4)]
        while cache.statistics().waits < 3:
            time.sleep(0.001)
        gate.set()
        errors = [a.exception(60) for a in asked]
    assert begun == ["bad"]
    assert {str(e) for e in errors} == {str(errors[0])}
    assert all(isinstance(e, CompileError) for e in errors)


@nvrtc
def test_threads_mixed_over_keys_get_their_own_kernels() -> None:
    cache, _ = make_cache(max_modules=3)
    sources = [Source(kernel_text(n), name=f"s{n}") for n in range(6)]

    def ask(i: int) -> bool:
        number = i % 6
        return len(cache.get_or_compile(sources[number], "k").info.parameters) == number + 1

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(120)))
    cache.context.collect()


# ----------------------------------------------------------------------------------------- failures


@nvrtc
def test_a_failed_compile_is_remembered_and_not_stored(tmp_path: Path, monkeypatch) -> None:
    begun = slow_compile(monkeypatch, {})
    cache, _ = make_cache(tmp_path)
    source = Source('extern "C" __global__ void k() { oops; }', name="bad")
    messages = set()
    for _ in range(3):
        with pytest.raises(CompileError, match=r"bad\(1\): error") as caught:
            cache.get_or_compile(source, "k")
        messages.add((str(caught.value), caught.value.log))
    assert begun == ["bad"] and len(messages) == 1
    assert not list(tmp_path.glob("*.kernel"))
    assert cache.statistics().failures == 1 and cache.statistics().known_failures == 2


@nvrtc
def test_remembered_failures_are_bounded() -> None:
    cache, _ = make_cache()
    for n in range(cache_module._MAX_FAILURES + 5):
        cache._failed[n.to_bytes(4, "little")] = cache_module.CompileFailure("", "", True)
    with pytest.raises(CompileError):
        cache.get_or_compile("nonsense", "k")
    assert len(cache._failed) == cache_module._MAX_FAILURES


@nvrtc
def test_a_full_device_is_not_remembered() -> None:
    cache, loader = make_cache()
    loader.fail_with = [driver_error(Status.OUT_OF_MEMORY, "module_load")]
    with pytest.raises(OutOfMemoryError):
        cache.get_or_compile(kernel_text(1), "k")
    assert cache.get_or_compile(kernel_text(1), "k").name == "k"


@nvrtc
def test_bad_ptx_shows_the_assemblers_log_and_is_remembered() -> None:
    cache, loader = make_cache()
    source = Source(data=".version 8.0\nnonsense\n", kind="ptx", name="bad.ptx")
    for _ in range(2):
        with pytest.raises(CompileError, match="ptxas: line 1") as caught:
            cache.get_or_compile(source, "k")
        assert caught.value.log == "ptxas: line 1: syntax"
    assert loader.loads == 1


@nvrtc
def test_a_name_that_is_not_there_does_not_spoil_the_source() -> None:
    cache, loader = make_cache()
    with pytest.raises(InputError, match="there are: k"):
        cache.get_or_compile(kernel_text(1), "missing")
    assert cache.get_or_compile(kernel_text(1), "k").name == "k"
    assert loader.loads == 1


# -------------------------------------------------------------------------------------------- names


@nvrtc
def test_plain_cpp_names_are_found_if_unique() -> None:
    cache, _ = make_cache()
    assert cache.get_or_compile("__global__ void k(int* x) {}", "k").info.name == "_Z1kPi"
    overloaded = "__global__ void k(int* x) {}\n__global__ void k(float* x) {}"
    with pytest.raises(InputError, match="overloaded"):
        cache.get_or_compile(overloaded, "k")


@nvrtc
def test_templates_by_their_cpp_name(tmp_path: Path) -> None:
    text = "template <class T> __global__ void t(T* x, T y) { *x = y; }"
    for expected in (0, 1):  # compiled, then from disk with the names kept
        cache, _ = make_cache(tmp_path)
        wide = cache.get_or_compile(text, "t<double>")
        narrow = cache.get_or_compile(text, "t<char>")
        assert [k.info.parameters[1].size for k in (wide, narrow)] == [8, 1]
        assert (cache.statistics().compiles == 0) == bool(expected)


# --------------------------------------------------------------------------------------- signatures


@nvrtc
def test_a_signature_is_checked_against_the_code() -> None:
    cache, _ = make_cache()
    with pytest.raises(InputError, match=r"takes 2 parameters, its signature has 1 \(x\)"):
        cache.get_or_compile(kernel_text(1), "k", signature="x: *i32")
    with pytest.raises(InputError, match=r"parameter 1 has 4 bytes at offset 8.*'p' has 8"):
        cache.get_or_compile(kernel_text(1), "k", signature="x: *i32, p: i64")
    kernel = cache.get_or_compile(kernel_text(1), "k", signature="x: *i32, p: i32")
    assert kernel.arguments(16, -1).data == (16).to_bytes(8, "little") + b"\xff" * 4


@nvrtc
def test_without_a_signature_sizes_pack() -> None:
    cache, _ = make_cache()
    kernel = cache.get_or_compile(kernel_text(1), "k")
    assert kernel.signature is None
    assert kernel.arguments(16, 3).data == (16).to_bytes(8, "little") + (3).to_bytes(4, "little")


@nvrtc
def test_a_struct_lies_where_the_code_wants_it() -> None:
    cache, _ = make_cache()
    text = 'struct S { float a, b, c; };\nextern "C" __global__ void k(int n, S s) {}'
    kernel = cache.get_or_compile(text, "k", signature="n: i32, s: bytes[12]")
    packed = kernel.arguments(7, b"abcdefghijkl")
    assert packed.data == (7).to_bytes(4, "little") + b"abcdefghijkl"
    assert packed.layout == kernel.info.parameters


def test_packing_is_the_signatures(modules: ModuleCache) -> None:
    import numpy as np

    kernel = modules.get_or_compile(HOST, "scale")
    for values in [
        (1 << 40, 2.5, 7),
        (np.int64(512), np.float32(1.5), np.uint32(3)),
        (0, 3, 1),
        (0, 1e300 * 1e300, 1),
        (0, float("nan"), True),
    ]:
        assert kernel.arguments(*values) == kernel.signature.pack(values)
    for wrong in [
        (0, 1.0),
        (0, 1.0, -1),
        (0, 1.0, 1.5),
        (1.5, 1.0, 1),
        (0, "x", 1),
        (0, 1, 2**32),
        (0, 1e300, 1),
    ]:
        with pytest.raises(InputError):
            kernel.arguments(*wrong)


# ----------------------------------------------------------------------------- bounds and lifetimes


def test_the_least_recently_used_is_let_go(context: Context) -> None:
    cache = ModuleCache(context, disk=False, max_modules=2)
    sources = [fresh_source(n) for n in range(3)]
    cache.get_or_compile(sources[0], "k")
    watched = weakref.ref(cache.get_or_compile(sources[1], "k").module)
    cache.get_or_compile(sources[0], "k")  # now 1 is the oldest
    cache.get_or_compile(sources[2], "k")
    assert watched() is None
    assert cache.statistics().modules == 2 and cache.statistics().evictions == 1
    hits = cache.statistics().hits
    cache.get_or_compile(sources[0], "k")
    assert cache.statistics().hits == hits + 1
    cache.close()


def test_bytes_are_bounded_too(context: Context) -> None:
    cache = ModuleCache(context, disk=False, max_bytes=25_000)
    for n in range(5):
        cache.get_or_compile(Source("x" * 10_000, host=fresh_source(n).host, name=str(n)), "k")
        assert cache.statistics().nbytes <= 25_000
    assert cache.statistics().modules < 3
    cache.close()


def test_what_someone_holds_is_never_let_go(context: Context) -> None:
    cache = ModuleCache(context, disk=False, max_modules=2)
    held = [cache.get_or_compile(fresh_source(n), "k") for n in range(4)]
    for kernel in held:
        assert kernel.occupancy(64) > 0 and not kernel.module.closed
    assert cache.statistics().modules == 4 and cache.statistics().evictions == 0
    again = cache.get_or_compile(Source(host=held_source(held[0]), name="fresh 0"), "k")
    assert again is held[0]
    del held, again, kernel
    cache.get_or_compile(fresh_source(9), "k")
    assert cache.statistics().modules <= 2
    cache.close()


def held_source(kernel: Kernel) -> dict[str, HostKernel]:
    return dict(kernel.module._keep.host)


def test_dropping_the_last_kernel_unloads_after_the_capture(context: Context) -> None:
    cache = ModuleCache(context, disk=False)
    kernel = cache.get_or_compile(fresh_source(1), "k")
    unloaded = []
    real = context.driver.module_unload
    context.driver.module_unload = lambda module: (unloaded.append(module), real(module))
    cache.close()
    gc.collect()
    context.collect()
    assert not unloaded  # the kernel keeps it
    context.capture_begun("a capture")
    del kernel
    gc.collect()
    context.collect()
    assert not unloaded  # a capture is under way
    context.capture_ended("a capture")
    assert len(unloaded) == 1


def test_closing_a_module_unloads_it_once(context: Context) -> None:
    cache = ModuleCache(context, disk=False)
    module = cache.get_or_compile(fresh_source(1), "k").module
    with module:
        assert not module.closed
    module.close()
    assert module.closed
    with pytest.raises(ClosedError):
        module.kernel("another")


@nvrtc
def test_sources_built_at_run_time_leak_nothing() -> None:
    cache, loader = make_cache(max_modules=4)
    for n in range(12):
        cache.get_or_compile(kernel_text(n % 6) + f"// {n}\n", "k")
    cache.context.collect()
    assert len(loader.modules) <= 4
    assert len(cache._fast) <= 4


# ----------------------------------------------------------------------------- preload and captures


@nvrtc
def test_preload_forces_every_function_in_order() -> None:
    cache, loader = make_cache()
    sources = [Source(kernel_text(n), name=f"s{n}") for n in range(5)]
    ready = cache.get_or_compile(sources[4], "k")
    loader.forced.clear()
    two = Source(kernel_text(1, "a") + kernel_text(2, "b"), name="two")
    kernels = cache.preload([(sources[0], "k"), ready, (two, ["a", "b"]), (sources[1], "k")])
    assert [k.name for k in kernels] == ["k", "k", "a", "b", "k"]
    assert [len(k.info.parameters) for k in kernels] == [1, 5, 2, 3, 2]
    assert set(loader.forced) == {k.function for k in kernels}


@nvrtc
def test_preload_raises_the_first_failure() -> None:
    cache, _ = make_cache()
    with pytest.raises(CompileError, match="bad"):
        cache.preload([(kernel_text(1), "k"), (Source("nonsense", name="bad"), "k")])


def test_preload_says_what_it_takes(modules: ModuleCache) -> None:
    for wrong in ([HOST], (HOST, "scale"), [(HOST, "scale", 3)]):
        with pytest.raises(InputError, match=r"a list of \(source, name\)"):
            modules.preload(cast(Any, wrong))


def test_loading_inside_a_capture_says_preload(context: Context, modules: ModuleCache) -> None:
    driver = context.driver
    ready = modules.get_or_compile(HOST, "scale")
    stream = driver.stream_create()
    driver.stream_begin_capture(stream, CaptureMode.THREAD_LOCAL)
    context.capture_begun("a capture")
    assert modules.get_or_compile(HOST, "scale") is ready  # what is loaded stays at hand
    with pytest.raises(CaptureBrokenError, match="preload") as caught:
        modules.get_or_compile(fresh_source(1), "k")
    assert "test_modules_cache.py" in caught.value.location
    with pytest.raises(Exception, match="901"):
        driver.stream_end_capture(stream)
    context.capture_ended("a capture")
    assert modules.get_or_compile(fresh_source(1), "k").name == "k"


# --------------------------------------------------------------------------------------- statistics


@nvrtc
def test_statistics_add_up(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path)
    cache.get_or_compile(kernel_text(1), "k")
    for _ in range(3):
        cache.get_or_compile(kernel_text(1), "k")
    seen = cache.statistics()
    assert (seen.modules, seen.hits, seen.misses, seen.compiles) == (1, 3, 1, 1)
    assert seen.compile_seconds > 0 and seen.nbytes > 1000
    assert seen.disk is not None and (seen.disk.misses, seen.disk.writes) == (1, 1)
    with make_cache(tmp_path)[0] as second:
        second.get_or_compile(kernel_text(1), "k")
        assert second.statistics().compiles == 0
        assert second.statistics().disk.hits == 1
