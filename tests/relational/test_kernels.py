"""The join's kernels: that they compile clean, agree on the block's layout, and give way to PDL."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from ostinato.errors import CompileError
from ostinato.modules import CompileOptions, Source
from ostinato.modules.compiler import compile_plan, plan_compilation
from ostinato.relational import IndexKey, JoinKey
from ostinato.relational.block import BLOCK, COLUMN, DONE, SLOT, Pattern, block_bytes, cuda_header
from ostinato.relational.chain import chain_of
from ostinato.step import PowersOfTwo


def test_the_header_would_notice_another_layout() -> None:
    text = cuda_header().replace("u32 mask;", "u64 mask;")
    assert text != cuda_header()
    types = "typedef unsigned int u32; typedef unsigned long long u64;\n"
    for header, good in ((cuda_header(), True), (text, False)):
        layout = Source(types + header + 'extern "C" __global__ void f() {}')
        plan = plan_compilation(layout, CompileOptions(arch="sm_90"), (9, 0))
        if good:
            compile_plan(plan)
        else:
            with pytest.raises(CompileError, match="static assertion"):
                compile_plan(plan)


def test_a_block_is_packed_as_its_record_says() -> None:
    into = bytearray(b"\xa5" * 1024)
    head = tuple(range(1, 18))
    pattern = Pattern(head[1:8], head[11:], (101, 102, 4, 0, 103, 104, 8, 0))
    pattern.write(memoryview(into), 64, head[0], *head[8:11])
    record = np.frombuffer(into, BLOCK, 1, 64)[0]
    assert list(record.tolist())[:17] == [*head]
    assert not any(record.tolist()[17:])
    columns = np.frombuffer(into, COLUMN, 2, 64 + BLOCK.itemsize)
    assert columns.tolist() == [(101, 102, 4, 0), (103, 104, 8, 0)]
    end = 64 + block_bytes(2)
    assert into[:64] + into[end:] == b"\xa5" * (1024 - end + 64)
    assert (SLOT.itemsize, DONE.itemsize % 8, BLOCK.itemsize % 8) == (16, 0, 0)


@pytest.mark.parametrize("kind", ["inner", "indexed inner"])
def test_grids_follow_the_key(kind: Literal["inner", "indexed inner"]) -> None:
    for rows in PowersOfTwo():
        key = JoinKey.of(kind, 1, 8, rows, rows, rows)
        chain = chain_of(key, 132)
        grids = {one.kernel: one.grid for one in chain}
        blocks = -(-rows // 256)
        build = grids.get("insert", 0)
        most = 64 if rows <= 16_384 else (4 if rows <= 262_144 else 8) * 132
        assert build == (most if kind == "inner" else 0)
        assert grids["begin"] == 1 and grids["probe"] == blocks + build
        assert grids["materialize"] == min(-(-rows // 1024), 16 * 132) + build
        levels = [one for one in chain if one.kernel in ("scan", "add")]
        assert len(levels) == max(0, key.scan.kernels - 2)  # without `probe` and `materialize`
        scanned = [one.grid for one in levels if one.kernel == "scan"]
        added = [one.grid for one in levels if one.kernel == "add"]
        assert scanned == [*key.scan.scratch[1:], 1][: len(key.scan.scratch)]
        assert added == [*reversed(key.scan.scratch[1:])]
        assert all(one.grid < 2**31 for one in chain)


def test_an_index_is_built_by_a_chain_of_its_own() -> None:
    chain = chain_of(IndexKey(2, 12), 10)
    assert [one.kernel for one in chain] == ["begin", "insert", "starts", "fill"]
    assert chain[0].numbers == (block_bytes(2) // 8,)


def test_only_begin_waits_for_the_whole_join_before_it() -> None:
    """Kernels read what `begin` wrote through L1: it must not overlap what came before."""
    for key in (IndexKey(1, 8), JoinKey.of("inner", 1, 8, 10**6, 10**6, 10**6)):
        overlaps = [one.config(programmatic=True).programmatic for one in chain_of(key, 132)]
        assert overlaps == [False] + [True] * (len(overlaps) - 1)
