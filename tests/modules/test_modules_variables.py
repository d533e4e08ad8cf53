"""The variables in a cubin, and their first content."""

from __future__ import annotations

import contextlib
import functools
import struct

from hypothesis import given
from hypothesis import strategies as st

from ostinato.driver.cuda.variables import same_content, variables_of
from ostinato.modules import CompileOptions, Source
from ostinato.modules.compiler import compile_plan, plan_compilation
from tests.modules.cubin_loader import needs_nvrtc

pytestmark = needs_nvrtc()

TEXT = """
__device__ int counter;
__device__ float table[3] = {1.5f, 2.5f, 3.5f};
__constant__ unsigned limit = 7;
extern "C" __global__ void k(float* x) {
    __shared__ int s[4];
    s[threadIdx.x] = atomicAdd(&counter, 1);
    __syncthreads();
    x[0] = table[threadIdx.x] + limit + s[3 - threadIdx.x];
}
extern "C" __global__ void plain(float* x) { x[0] = 1; }
"""


@functools.cache
def compiled(text: str) -> bytes:
    return compile_plan(plan_compilation(Source(text), CompileOptions(), (9, 0))).data


def test_variables_are_found_with_their_first_content() -> None:
    found = {one.name: one.content for one in variables_of(compiled(TEXT))}
    assert found == {
        "counter": bytes(4),
        "table": struct.pack("<3f", 1.5, 2.5, 3.5),
        "limit": struct.pack("<I", 7),
    }
    plain = 'extern "C" __global__ void plain(float* x) { x[0] = 1; }'
    assert variables_of(compiled(plain)) == ()
    assert variables_of(b".version 8.0") == ()


@given(st.data())
def test_a_damaged_cubin_gives_errors_that_are_expected(data: st.DataObject) -> None:
    raw = bytearray(compiled(TEXT))
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError, IndexError, struct.error):
        variables_of(bytes(raw))


def test_contents_with_addresses_are_compared_by_what_they_point_to() -> None:
    def words(*values: int) -> bytes:
        return b"".join(value.to_bytes(8, "little") for value in values)

    one = {"table": (0x1000, words(0x2008, 7)), "data": (0x2000, bytes(16))}
    moved = {"table": (0x5000, words(0x6008, 7)), "data": (0x6000, bytes(16))}
    assert same_content("table", one, moved) and same_content("data", one, moved)
    for other in (
        words(0x6000, 7),  # another place
        words(0x6008, 8),
        words(0x6008),
    ):
        changed = {**moved, "table": (0x5000, other)}
        assert not same_content("table", one, changed), other
    assert not same_content("table", one, {"table": moved["table"]})
