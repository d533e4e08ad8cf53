"""The kernels' names in a cubin: all of a sound one, an error for a damaged one, little memory."""

from __future__ import annotations

import functools
import struct
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import InputError
from ostinato.modules import CompileOptions, Source
from ostinato.modules.compiler import compile_plan, plan_compilation
from ostinato.modules.cubin import kernel_names, kernel_resources
from tests.modules.cubin_loader import needs_nvrtc

pytestmark = needs_nvrtc()

TEXT = """
__device__ __noinline__ int f(int x) { return x * 3; }
template <int N> __global__ void __launch_bounds__(N) t(float* x, char c) { x[threadIdx.x] = c; }
template __global__ void t<64>(float*, char);
__global__ void nothing() {}
struct Three { float a, b, c; };
extern "C" __global__ void k(char c, Three y, int* x, short h) {
    __shared__ int s[100];
    s[threadIdx.x] = f(*x);
    __syncthreads();
    *x = s[99 - threadIdx.x] + y.b + c + h;
}
"""


@functools.cache
def real() -> bytes:
    plan = plan_compilation(Source(TEXT), CompileOptions(), (9, 0))
    return compile_plan(plan).data


def read(data: bytes) -> tuple[str, ...] | None:
    """None for InputError.  Anything else that is raised is a failure."""
    try:
        return kernel_names(data)
    except InputError:
        return None


MUTATION = st.tuples(
    st.sampled_from(["byte", "word", "long", "cut", "insert", "copy", "zero"]),
    st.integers(0, 1 << 20),
    st.integers(0, (1 << 64) - 1) | st.sampled_from([0, 1, 255, 1 << 31, 1 << 63, (1 << 64) - 1]),
)


def mutated(data: bytes, what: str, at: int, value: int) -> bytes:
    at %= len(data) or 1
    changed = bytearray(data)
    match what:
        case "byte":
            changed[at : at + 1] = [value & 0xFF]
        case "word":
            changed[at : at + 4] = struct.pack("<I", value & 0xFFFFFFFF)
        case "long":
            changed[at : at + 8] = struct.pack("<Q", value)
        case "cut":
            del changed[at : at + value % 200]
        case "insert":
            changed[at:at] = bytes(value % 200)
        case "copy":
            begin = value % len(changed)
            changed[at : at + 64] = changed[begin : begin + 64]
        case "zero":
            changed[at : at + 64] = bytes(64)
    return bytes(changed)


@settings(deadline=None, max_examples=4 * settings().max_examples)
@given(st.lists(MUTATION, min_size=1, max_size=4))
def test_mutations_are_read_or_refused(mutations) -> None:
    data = real()
    for mutation in mutations:
        data = mutated(data, *mutation)
    read(data)


@settings(deadline=None, max_examples=2 * settings().max_examples)
@given(st.integers(0, 63) | st.just(None), st.integers(0, (1 << 64) - 1), st.integers(0, 400))
def test_headers_full_of_numbers_are_read_or_refused(
    at: int | None, value: int, section: int
) -> None:
    """The file's header, and those of its sections, which say where everything is."""
    data = bytearray(real())
    (table,) = struct.unpack_from("<Q", data, 0x28)
    start = at if at is not None else table + section * 4
    data[start : start + 8] = struct.pack("<Q", value)
    read(bytes(data))


@settings(max_examples=2 * settings().max_examples)
@given(st.binary(max_size=400))
def test_noise_is_refused(noise: bytes) -> None:
    assert not read(noise) and not read(b"\x7fELF\x02" + noise)


def header(table: int, count: int, names: int, entry: int = 64) -> bytes:
    start = b"\x7fELF\x02".ljust(0x28, b"\0") + struct.pack("<Q", table)
    return start.ljust(0x3A, b"\0") + struct.pack("<HHH", entry, count, names)


def section(name: int, offset: int, size: int, link: int = 0, kind: int = 1) -> bytes:
    return struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, link, 0, 0, 0)


N = 20_000
BOMBS: dict[str, Callable[[], bytes]] = {
    "a table far away": lambda: header((1 << 63) + 5, 9, 0),
    "headers of no size": lambda: header(64, 65535, 0, 0) + section(0, 0, 1000) + bytes(2000),
    "sections that are all the file": lambda: (
        header(64, N, 0)
        + b"".join(section(0, 0, 64 + N * 64 + 100_000) for _ in range(N))
        + b".nv.constant0.".ljust(100_000, b"x")
    ),
    "names that are all the file": lambda: (
        header(64, N, 0)
        + section(0, 64 + N * 64, 100_010)
        + b"".join(section(i, 0, 0) for i in range(N - 1))
        + b".nv.constant0.".ljust(100_009, b"x")
        + b"\0"
    ),
    "names without an end": lambda: header(64, 1, 0) + section(0, 64, 64),
    "a section without content, of all sizes": lambda: (
        header(64, 2, 0) + section(0, 192, 12) + section(0, 0, 1 << 63, kind=8) + b".nv.shared.\0"
    ),
    "names of another section": lambda: header(64, 1, 77) + section(0, 0, 10),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_cost_no_more_than_their_size(bomb: str) -> None:
    data = BOMBS[bomb]()
    tracemalloc.start()
    try:
        read(data)
        assert tracemalloc.get_traced_memory()[1] < 20 * len(data) + (1 << 20)
    finally:
        tracemalloc.stop()


def test_a_sound_one_tells_all() -> None:
    assert kernel_names(real()) == ("_Z1tILi64EEvPfc", "_Z7nothingv", "k")  # and not `f`
    t, nothing, k = kernel_resources(real())
    assert (nothing.name, nothing.parameters) == ("_Z7nothingv", ())
    assert (t.name, t.max_threads, [p.size for p in t.parameters]) == (
        *("_Z1tILi64EEvPfc", 64),
        [8, 1],
    )
    assert (k.name, k.max_threads) == ("k", None)
    assert [(p.offset, p.size) for p in k.parameters] == [(0, 1), (4, 12), (16, 8), (24, 2)]
    assert k.shared >= 400 and k.registers >= 8
    for size in (0, 4, 63, 200, 1000):
        assert read(real()[:size]) is None
