"""Tuning: what may be tried, how the best is found, what is kept, and whether it is right."""

from __future__ import annotations

import itertools
import json
import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from benchmarks.kernels import checks
from benchmarks.kernels.checks import config_of
from ostinato.bench.random_weights import random_checkpoint
from ostinato.device import Device
from ostinato.driver.api import LaunchConfig
from ostinato.driver.host.kernel import HostKernel
from ostinato.errors import CompileError, InputError, NotAvailableError
from ostinato.graph import prepare
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda import lowering as kc
from ostinato.models.cuda import shapes
from ostinato.models.cuda import tunings as choosing
from ostinato.models.cuda.bricks import formats_of, packing
from ostinato.models.cuda.legal import problems_of
from ostinato.models.cuda.tunings import TuningKey, decode_tuning, encode_tuning
from ostinato.models.program import decode_program
from ostinato.models.tune import search as tuning_bench
from ostinato.models.tune.candidates import neighbours, start_variants, warpgroup_variants
from ostinato.models.tune.search import StepMeter, Sweep, SweepResult
from ostinato.models.weights import load_weights
from tests.emulator.emulator import Emulator
from tests.kernel_checks import KernelCheck, check
from tests.models.machines import OnDevice

GPU = "Test GPU 80GB"
SMALL_SHARED = shapes.dynamic_shared(99 * 1024)
"""The limit of compute capability 8.6, 8.9 and 12.0."""


SMALL = config_of(3, 1, 64, inner=136, vocabulary=257, tied_embeddings=True, layers=1)
CONFIGS = {
    "135M": config_of(9, 3, 64, inner=1536, vocabulary=49152, layers=30, tied_embeddings=True),
    "1B": config_of(32, 8, 64, inner=8192, vocabulary=128256, layers=16, tied_embeddings=True),
    "8B": config_of(32, 8, 128, inner=14336, vocabulary=128256, layers=32),
    "70B": config_of(64, 8, 128, inner=28672, vocabulary=128256, layers=80),
    "odd": config_of(5, 1, 80, hidden=328, inner=264, vocabulary=301),
}


@st.composite
def configs(draw: st.DrawFn) -> LlamaConfig:
    kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 16))
    # One row has registers for so many inputs of a product, 28,672.
    head_size = 8 * draw(st.integers(1, min(32, 3584 // (kv_heads * group))))
    return config_of(
        kv_heads * group,
        kv_heads,
        head_size,
        hidden=8 * draw(st.integers(1, 1024)),
        inner=8 * draw(st.integers(1, 3584)),
        vocabulary=draw(st.integers(2, 200_000)),
    )


def candidates(
    config: LlamaConfig, rows: int, name: str, shared: int = shapes.MAX_SHARED
) -> list[shapes.Tuning]:
    base = shapes.default_tuning(config, rows=rows, clusters=name == "block", shared=shared)
    sizes: dict[str, Any] = {"rows": rows, "multiprocessors": 132, "context": 4096, "contexts": ()}
    meter: Any = None
    sweep = Sweep(config, base, meter, **sizes, clusters=True, shared=shared)
    return list(sweep.candidates(name))


STAGES = (*shapes.PRODUCTS.values(), "attention")


# ------------------------------------------------------------------------------------- candidates


@settings(deadline=None)
@given(
    config=configs(),
    rows=st.sampled_from([1, 2, 7, 8, 33, 64]),
    name=st.sampled_from([*STAGES, "block"]),
    shared=st.sampled_from([shapes.MAX_SHARED, SMALL_SHARED]),
    data=st.data(),
)
def test_every_candidate_is_a_legal_launch_that_covers_all(
    config: LlamaConfig, rows: int, name: str, shared: int, data: st.DataObject
) -> None:
    rows = 1 if name == "block" else rows
    products = shapes.products_of(config)
    tunings = candidates(config, rows, name, shared)
    assume(tunings)
    tuning = data.draw(st.sampled_from(tunings))
    assert problems_of(config, rows, tuning, shared=shared) == ()
    launches = kc.lower(decode_program(config), config, rows=rows, context=4096, tuning=tuning)
    for one in {launch.kernel: launch for launch in launches}.values():
        grid, block = one.config.grid, one.config.block
        assert 1 <= math.prod(block) <= 1024
        assert 1 <= grid[0] < 1 << 31 and 1 <= max(grid[1:]) <= 65535
        assert one.config.shared <= shared
        product = kc.PRODUCTS_OF.get(one.kernel)
        if product is not None:
            shape = getattr(tuning, product)
            covered = math.prod(grid) // getattr(shape, "blocks_k", 1) * shape.block_pairs
            assert 0 <= covered - products[product].pairs < shape.block_pairs
    assert kc.workspace_bytes(config, rows=rows, context=4096, tuning=tuning) < 1 << 31


@pytest.mark.parametrize(
    ("rows", "multiprocessors"),
    [
        *((rows, 132) for rows in (2, 8, 9, 16, 32, 64)),
        *((1, count) for count in (16, 78, 132, 160)),
    ],
)
def test_the_rule_is_legal_for_every_width(rows: int, multiprocessors: int) -> None:
    for hidden in range(64, 8192 + 64, 192):
        inners = (hidden, 8 * hidden) if rows > 1 else (hidden, min(4 * hidden, 28672))
        for inner, clusters in zip(inners, (True, False), strict=True):
            config = config_of(hidden // 64, 1, 64, inner=inner, vocabulary=64 * hidden)
            has: Any = {"clusters": clusters, "warpgroups": clusters}
            for fast in (False, True):
                known = has | {"multiprocessors": multiprocessors, "fast_memory": fast}
                tuning = shapes.default_tuning(config, rows=rows, **known)
                assert problems_of(config, rows, tuning, **has) == (), hidden


def test_few_rows_of_a_large_model_hold_more_weights_and_prefetch_more() -> None:
    wide, small = CONFIGS["8B"], CONFIGS["135M"]
    few, many = (shapes.default_tuning(wide, rows=n, clusters=True) for n in (8, 24))
    held = [one.output.tiles * one.output.split for one in (few, many)]  # type: ignore[union-attr]
    assert held == [16, 8]
    assert [one.qkv.cluster for one in (few, many)] == [4, 1]  # type: ignore[union-attr]
    assert set(few.prefetch) == {"qkv", "output", "gate_up", "down"} and not many.prefetch
    assert few.start_next == {"rounded_output": "AT_START"} and not many.start_next
    assert shapes.default_tuning(wide, clusters=True).prefetch == few.prefetch
    for rows in (1, 8):
        assert not shapes.default_tuning(small, rows=rows, clusters=True).prefetch


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("rows", [2, 8, 16, 32, 40, 64])
def test_products_of_a_small_model_ask_for_all_weights_before_the_wait(
    rows: int, fast: bool
) -> None:
    config = CONFIGS["135M"]
    tuning = shapes.default_tuning(config, rows=rows, clusters=True, fast_memory=fast)
    for name, product in shapes.products_of(config).items():
        shape: Any = getattr(tuning, name)
        if name == "head":
            assert shape.blocks_k == 1
            continue
        assert shape.slab * shape.blocks_k >= product.inputs
        assert shape.depth * shape.split * 32 == shape.slab
        blocks = -(-product.pairs // shape.block_pairs) * shape.blocks_k
        assert 36 <= blocks <= 132 and shape.cluster == shape.blocks_k
        assert shape.alone == (name != "qkv" or rows > 8 or not fast)
    assert shapes.default_tuning(config, rows=rows).qkv.cluster == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["1B", "8B", "70B"])
@pytest.mark.parametrize("rows", [2, 8, 16, 17, 48, 64])
@pytest.mark.parametrize("context", [300, 5000, 100_000])
def test_blocks_of_the_attention_have_room_at_once(name: str, rows: int, context: int) -> None:
    """Long rows are cut, and blocks share them where rows may be far from equally long."""
    config, given = CONFIGS[name], {"rows": rows, "context": context}
    shape = shapes.default_tuning(config, clusters=True, **given).attention
    blocks = rows * config.kv_heads * (config.heads // config.kv_heads // shape.queries)
    even = rows <= 16 and context <= 8192
    assert even or shape.cluster == 1
    assert shape.shares_rows == (shape.cluster == 1 and context > 1024)
    held = shape.warps * shape.steps * (2 if config.head_size > 64 else 1)
    if shape.cluster > 1:
        assert blocks * shape.cluster <= 132 * (2 if held <= 8 else 1)
    elif context > 1024:
        share = 16 * shape.warps * shape.steps * shape.passes
        assert shape.splits == min(64, -(-context // share))
        assert share == (1024 if rows > 16 and blocks >= 0.9 * 132 else 512)
        assert shape.resident * held in (16, 24)
        assert blocks <= shape.resident * 132 or shape.warps == 2
    else:
        assert shape.splits == 1
    assert shapes.default_tuning(config, **given).attention.cluster == 1


def test_heads_that_are_few_are_cut_in_more_parts() -> None:
    """A shard of 70B has one KV head."""
    config, given = config_of(8, 1, 128, hidden=8192, inner=3584, vocabulary=1003), {"rows": 17}
    shape = shapes.default_tuning(config, clusters=True, context=2048, **given).attention
    assert (shape.warps * 16 * shape.passes, shape.splits, shape.cluster) == (512, 4, 1)


def test_a_stored_tuning_with_clusters_shares_rows_of_long_contexts() -> None:
    config, sizes = CONFIGS["1B"], {"rows": 8, "multiprocessors": 132}
    tuning = shapes.default_tuning(config, clusters=True, context=2048, **sizes)
    assert tuning.attention.cluster == 2
    assert shapes.for_context(tuning, config, context=8192, **sizes) == tuning
    longer = shapes.for_context(tuning, config, context=100_000, **sizes)
    wanted = shapes.default_tuning(config, clusters=True, context=100_000, **sizes)
    assert longer == replace(tuning, attention=wanted.attention)
    assert longer.attention.shares_rows and problems_of(config, 8, longer) == ()


def test_rows_with_as_many_heads_as_counters_share_nothing() -> None:
    """The last counter is the list's."""
    config = config_of(256, 256, 64, hidden=64, inner=64, vocabulary=67)
    given: Any = {"rows": 64, "context": 5000, "clusters": True}
    tuning = shapes.default_tuning(config, **given)
    assert not tuning.attention.shares_rows and problems_of(config, 64, tuning) == ()
    shared = replace(tuning, attention=replace(tuning.attention, splits=5))
    assert "counters" in problems_of(config, 64, shared)[0]


def test_the_attention_beside_a_library_is_that_of_the_shape() -> None:
    """One row has float32's lanes, whoever multiplies."""
    config = CONFIGS["8B"]
    for rows in (1, 2):
        given: Any = {"rows": rows, "context": 500}
        tuning = shapes.default_tuning(config, clusters=True, **given)
        cut = kc.Lowering(config, rows, tuning, library=True)
        assert cut.macros("attention", {})["ATTENTION_TILED"] == int(rows > 1)
        assert cut.macros("attention", {})["ROUND_ATTENDED"] == 1
    wide = config_of(8, 4, 256, hidden=136, inner=88, vocabulary=67)
    tuning = shapes.default_tuning(wide, rows=8, context=70)
    shared = replace(tuning, attention=replace(tuning.attention, splits=1, resident=1))
    assert "share the work" in problems_of(wide, 8, shared)[0]


def test_no_more_clusters_than_a_long_context_needs() -> None:
    shapes_of = [
        shapes.default_tuning(config, context=context, clusters=True).attention
        for config in (CONFIGS["1B"], CONFIGS["8B"])
        for context in (4096, 4097, 16384, 100_000)
    ]
    assert {(one.queries, one.cluster) for one in shapes_of} == {(2, 8)}
    assert [one.splits // 8 for one in shapes_of] == [1, 2, 3, 3, 1, 1, 1, 1]


@settings(deadline=None, max_examples=40)
@given(
    config=configs(),
    rows=st.integers(1, 64),
    context=st.integers(1, 1_000_000),
    clusters=st.booleans(),
    warpgroups=st.booleans(),
    small=st.booleans(),
    fast=st.booleans(),
    multiprocessors=st.integers(1, 200),
    kind=st.sampled_from([None, "Q8_0", "Q6_K"]),
)
def test_the_default_rule_is_legal(
    config: LlamaConfig,
    rows: int,
    context: int,
    clusters: bool,
    warpgroups: bool,
    small: bool,
    fast: bool,
    multiprocessors: int,
    kind: str | None,
) -> None:
    has: dict[str, Any] = {"clusters": clusters, "warpgroups": clusters and warpgroups}
    if small:
        has |= {"warpgroups": False, "shared": SMALL_SHARED}
        formats = {} if kind is None else formats_of(config, lambda _: kind)
        for one in launches_of(config, rows, multiprocessors, formats, **has):
            assert one.config.shared <= SMALL_SHARED, one.kernel
    known = {**has, "multiprocessors": multiprocessors, "fast_memory": fast}
    tuning = shapes.default_tuning(config, rows=rows, context=context, **known)
    assert problems_of(config, rows, tuning, **has) == ()
    sizes = {"rows": rows, "context": 4 * context, "multiprocessors": multiprocessors}
    longer = shapes.for_context(tuning, config, **sizes)
    assert problems_of(config, rows, longer, **has) == ()
    assert longer.attention.splits >= tuning.attention.splits
    assert clusters or tuning.attention.cluster == 1


def launches_of(
    config: LlamaConfig, rows: int, multiprocessors: int, formats: Any, **has: Any
) -> tuple[kc.CudaLaunch, ...]:
    given: Any = {"rows": rows, "context": 2048, "multiprocessors": multiprocessors}
    tuning = shapes.default_tuning(config, **given, **has)
    return kc.lower(decode_program(config), config, tuning=tuning, formats=formats, **given)


# One row of it leaves few bytes for sums.
FULL = config_of(28, 4, 128, inner=18944, vocabulary=152064, qkv_bias=True)


@pytest.mark.parametrize("kind", [None, "Q8_0", "Q4_K"])
@pytest.mark.parametrize("name", [*CONFIGS, "Qwen2.5 7B"])
def test_the_rule_for_small_gpus_fits_them(name: str, kind: str | None) -> None:
    """99 KiB hold it and the static shared memory of kernels (`STATIC_SHARED`)."""
    config = replace(CONFIGS.get(name, FULL), layers=2)  # more have the same launches
    formats = {} if kind is None else formats_of(config, lambda _: kind)
    most = dict.fromkeys((shapes.MAX_SHARED, SMALL_SHARED), 0)
    for shared, rows, (clusters, multiprocessors) in itertools.product(
        most, (1, 2, 9, 16, 64), ((False, 8), (False, 84), (True, 170))
    ):
        has: Any = {"clusters": clusters, "shared": shared}
        for one in launches_of(config, rows, multiprocessors, formats, **has):
            most[shared] = max(most[shared], one.config.shared)
    assert most[SMALL_SHARED] <= 96 * 1024
    assert most[shapes.MAX_SHARED] > 96 * 1024 or name == "odd", "shapes that fit anyway"


@pytest.mark.parametrize(
    ("config", "multiprocessors"),
    [
        (config_of(49, 7, 256, hidden=1536, inner=6144, vocabulary=2843), 78),
        (config_of(16, 1, 8, hidden=6440, inner=9216, vocabulary=179796), 1),
    ],
    ids=["seven wide heads in a block", "one multiprocessor"],
)
def test_the_default_rule_is_legal_at_its_limits(config: LlamaConfig, multiprocessors: int) -> None:
    given: Any = {"context": 100_000, "multiprocessors": multiprocessors, "clusters": True}
    assert problems_of(config, 1, shapes.default_tuning(config, **given)) == ()


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_100", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["135M", *(pytest.param(name, marks=pytest.mark.slow) for name in ("8B", "odd"))]
)
def test_the_attention_in_clusters_compiles_without_local_memory(name: str, arch: str) -> None:
    config = CONFIGS[name]
    tuning = replace(shapes.default_tuning(config, clusters=True, context=8192), block=None)
    launches = kc.lower(decode_program(config), config, rows=1, context=8192, tuning=tuning)
    one = next(launch for launch in launches if launch.kernel == "attention")
    assert one.config.cluster == (8, 1, 1)
    assert check(KernelCheck(name, one.source, one.options), arch).problems == ()


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
@pytest.mark.parametrize("name", ["1B", pytest.param("8B", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "rows", [8, 64, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (24, 48))]
)
def test_blocks_that_share_all_rows_compile_without_local_memory(
    name: str, rows: int, arch: str
) -> None:
    """Their registers are bounded, so that all of them have room at once."""
    config, given = CONFIGS[name], {"rows": rows, "context": 100_000}
    tuning = shapes.default_tuning(config, clusters=arch > "sm_80", **given)
    assert tuning.attention.shares_rows
    launches = kc.lower(decode_program(config), config, tuning=tuning, **given)
    one = next(launch for launch in launches if launch.kernel == "attention")
    assert check(KernelCheck(name, one.source, one.options), arch).problems == ()


@pytest.mark.parametrize(
    ("name", "rows", "shared"),
    [
        *((name, rows, shapes.MAX_SHARED) for name in ("135M", "8B") for rows in (1, 8)),
        *(("70B", rows, SMALL_SHARED) for rows in (1, 8, 64)),
    ],
)
def test_there_is_something_to_try(name: str, rows: int, shared: int) -> None:
    """On small GPUs one row of 70B too, which is multiplied as several rows are."""
    for stage in STAGES:
        made = candidates(CONFIGS[name], rows, stage, shared)
        assert len(made) >= 8, stage
        assert all(one.tiles for one in made) or name != "70B"
    assert bool(candidates(CONFIGS[name], 1, "block", shared)) == (name == "135M")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", ["135M", "8B", "odd"])
def test_candidates_compile(name: str, rows: int) -> None:
    """One in sixty of each stage; all of them would take hours.  Some do not fit the registers,
    which costs time alone, and that is measured."""
    config, sizes = CONFIGS[name], {"rows": rows, "context": 2048}
    for stage in STAGES:
        for tuning in candidates(config, rows, stage)[::60]:
            made = kc.lower(decode_program(config), config, tuning=tuning, **sizes)
            own = [one for one in made if kc.PRODUCTS_OF.get(one.kernel, one.kernel) == stage]
            report = check(KernelCheck(name, own[0].source, own[0].options), "sm_90")
            wrong = [line for line in report.problems if "local memory" not in line]
            assert not wrong, (stage, getattr(tuning, stage))


def test_places_to_start_are_all_tried() -> None:
    base = shapes.default_tuning(SMALL)
    whole = start_variants(base)
    assert {one.start_next["head"] for one in whole[:-1]} == set(shapes.START_NEXT)
    assert not whole[-1].programmatic
    assert all(problems_of(SMALL, 1, one) == () for one in whole)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"qkv": shapes.VectorShape(3, 1, 1, 8)}, "qkv: 1 pairs for 3 lanes"),
        ({"qkv": shapes.VectorShape(8, 3, 1, 8)}, "8 warps in teams of 3"),
        ({"qkv": shapes.VectorShape(8, 1, 1, 64)}, "64 warps"),
        ({"head": shapes.VectorShape(8, 1, 1, 8, 2, 2)}, "2 turns ahead of 2"),
        ({"down": shapes.VectorShape(8, 1, 1, -1)}, "warps is -1"),
        ({"down": shapes.VectorShape(8, 1, 1, "8")}, "warps is '8'"),  # type: ignore[arg-type]
        ({"down": shapes.VectorShape(8, True, 1, 8)}, "split is True"),
        ({"output": shapes.MatrixShape(1, 8, 1, 256)}, "MatrixShape is not for 1 rows"),
        ({"attention": shapes.AttentionShape(2, 4, 4, 8)}, "2 queries of 3"),
        ({"attention": shapes.AttentionShape(3, 4, 4, 1000)}, "1000 splits"),
        ({"start_next": {"head": "SOON"}}, "'head' at 'SOON'"),
        ({"start_next": {"tail": "NEVER"}}, "'tail' at 'NEVER'"),
        ({"programmatic": 1}, "programmatic is 1"),
        ({"prefetch": {"down": ("head", 4096)}}, "prefetch: 'down' of 'head'"),
        ({"prefetch": {"head": ("qkv", 4096)}}, "prefetch: 'head' of 'qkv'"),
        ({"prefetch": {"down": ("wqkv", 4096)}}, "prefetch: 'down' of 'wqkv'"),
    ],
)
def test_what_cannot_be_launched_is_said(changes: dict[str, Any], said: str) -> None:
    tuning = replace(shapes.default_tuning(SMALL), **changes)
    problems = problems_of(SMALL, 1, tuning)
    assert len(problems) == 1
    assert said in problems[0]


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (shapes.MatrixShape(8, 2, 1, 128, 3), "2 steps of a slab are not whole times 3"),
        (shapes.MatrixShape(8, 1, 1, 640), "the weights of 20 steps"),
        (shapes.MatrixShape(16, 1, 1, 512, 16), "the weights of 16 steps"),
        (shapes.MatrixShape(8, 1, 4, 64, 2, 2), "a cluster of 2 blocks, where 4 share the inputs"),
        (shapes.MatrixShape(8, 1, 16, 64, 2, 16), "a cluster of 16 blocks"),
        (shapes.MatrixShape(8, 1, 2, 64, 2, 2), "a cluster of 2 blocks, which this device"),
        (shapes.MatrixShape(8, 1, 1, 64, -1), "depth is -1"),
        (shapes.MatrixShape(8, 1, 1, 16384, 8), "does not fit shared memory"),
        (shapes.MatrixShape(8, 1, 1, 64, 2, 1, 1), "a ring of 1 slabs"),
        (shapes.MatrixShape(8, 1, 1, 64, 2, alone=2), "alone 2"),
        (shapes.MatrixShape(8, 1, 1, 64, 1, ring=3, warpgroup=2), "warpgroup 2"),
        (shapes.MatrixShape(8, 1, 1, 64, 2, ring=3, warpgroup=1), "depth 2"),
        (shapes.MatrixShape(8, 1, 1, 64, 1, ring=2, warpgroup=1), "2 slabs"),
        (shapes.MatrixShape(2, 1, 1, 64, 1, ring=3, warpgroup=1), "2 tiles"),
        (shapes.MatrixShape(8, 1, 1, 512, 1, ring=3, warpgroup=1), "does not fit shared memory"),
    ],
)
def test_what_cannot_be_launched_for_rows_is_said(shape: shapes.MatrixShape, said: str) -> None:
    tuning = replace(shapes.default_tuning(SMALL, rows=8), output=shape)
    (problem,) = problems_of(SMALL, 8, tuning, clusters=False)
    assert said in problem


def test_warpgroups_make_all_products_of_a_step_or_none() -> None:
    config = CONFIGS["1B"]
    given: Any = {"rows": 32, "clusters": True}
    tuning = shapes.default_tuning(config, warpgroups=True, **given)
    without = shapes.default_tuning(config, **given)
    (problem,) = problems_of(config, 32, replace(tuning, down=without.down))
    assert "all of a step or none" in problem
    wrong = replace(tuning, qkv=replace(tuning.qkv, slab=192))
    (problem,) = problems_of(config, 32, wrong)
    assert "not whole slabs of 192" in problem


def test_a_step_with_packed_matrices_has_no_warpgroups() -> None:
    config = CONFIGS["1B"]
    tuning = shapes.default_tuning(config, rows=32, clusters=True, warpgroups=True)
    formats = {"layers.3.w_down": packing("w_down", ("Q8_0",), (config.hidden,), config.inner)}
    for packed, wanted in (({}, True), (formats, False)):
        cut = kc.Lowering(config, 32, tuning, packed)
        assert {one.warpgroup for one in map(cut.shape, cut.products)} == {int(wanted)}
        launches = kc.lower(
            decode_program(config), config, rows=32, context=2048, tuning=tuning, formats=packed
        )
        panels = {one.kernel for one in launches if ("PANELS", "1") in one.options.defines}
        made = {"attention", "norm_rows", *shapes.ROUNDED_CALLS.values()} - {"rounded_qkv"}
        assert panels == (made if wanted else set())


@pytest.mark.parametrize("rows", [24, 64])
def test_a_sweep_tries_both_ways_to_multiply(rows: int) -> None:
    config = CONFIGS["1B"]
    tuning = shapes.default_tuning(config, rows=rows, clusters=True, warpgroups=True)
    (other,) = warpgroup_variants(tuning, config, rows, 132)
    (back,) = warpgroup_variants(other, config, rows, 132)
    assert not other.warpgroups and back == tuning
    for one in (tuning, other, back):
        assert not problems_of(config, rows, one)
        for tried in neighbours(one, "down"):
            assert tried.down.warpgroup == int(one.warpgroups)  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------ sweeps


class Landscape:
    """A meter over made-up times, and a clock that each measurement moves on."""

    def __init__(self, *, seconds_each: float = 0.01, wrong: Sequence[str] = ()) -> None:
        self.now, self.seconds_each, self.wrong = 0.0, seconds_each, wrong
        self.prepared: list[shapes.Tuning] = []

    def clock(self) -> float:
        return self.now

    def prepare(self, tunings: Sequence[shapes.Tuning]) -> None:
        self.prepared += tunings

    def microseconds(
        self,
        tuning: shapes.Tuning,
        context: int,
        *,
        careful: bool = False,
        enough: float = math.inf,
    ) -> float:
        assert tuning in self.prepared, "measured before it was compiled"
        self.now += self.seconds_each
        return self.cost(tuning, context)

    def cost(self, tuning: shapes.Tuning, context: int) -> float:
        us = 100.0 + 0.01 * context
        us += abs(tuning.down.warps - 12)  # type: ignore[union-attr]
        us += 3 * abs(tuning.attention.warps - 8) * (context > 100)
        us -= 7.0 * (tuning.start_next.get("head") == "AFTER_INPUT")
        return us

    def problem(self, tuning: shapes.Tuning) -> str | None:
        return "wrong logits" if tuning.start_next.get("head") in self.wrong else None


class Flat(Landscape):
    """Every tuning is as fast."""

    def cost(self, tuning: shapes.Tuning, context: int) -> float:
        return 100.0


def run_sweep(
    meter: Any, seconds: float = 1e6, contexts: Sequence[int] = (20, 500)
) -> tuple[shapes.Tuning, SweepResult]:
    config = CONFIGS["135M"]
    start = shapes.default_tuning(config)
    sizes: Any = {"rows": 1, "multiprocessors": 132, "context": 2048, "contexts": contexts}
    return start, Sweep(config, start, meter, **sizes, clock=meter.clock).run(seconds)


def test_a_sweep_finds_the_bottom() -> None:
    start, result = run_sweep(Landscape())
    assert result.tuning.down.warps == 12  # type: ignore[union-attr]
    assert result.tuning.attention.warps == 8
    assert result.tuning.start_next["head"] == "AFTER_INPUT"
    assert result.improved and not result.refused
    assert result.after[20] < result.before[20] and result.after[500] < result.before[500]
    assert start == shapes.default_tuning(CONFIGS["135M"])


def test_a_sweep_tries_what_decoders_of_its_context_launch() -> None:
    """It does not try the faster attention of shorter contexts."""
    config, has = CONFIGS["135M"], {"clusters": True, "multiprocessors": 132}
    sizes: dict[str, Any] = {"rows": 32, "context": 2048, "multiprocessors": 132}
    meter: Any = Flat()
    start = shapes.default_tuning(config, rows=32, **has)  # type: ignore[arg-type]
    given: dict[str, Any] = {"contexts": (20, 500), "clock": meter.clock}
    result = Sweep(config, start, meter, **sizes, clusters=True, **given).run(1e4)
    tried = [trial.tuning for trial in result.trials if trial.stage == "attention"]
    assert any(tuning.attention.splits > 1 for tuning in tried)
    for tuning in tried:
        assert shapes.for_context(tuning, config, **sizes) == tuning


def test_a_sweep_ends_in_time() -> None:
    meter = Landscape(seconds_each=0.1)
    _, result = run_sweep(meter, seconds=20.0)
    assert meter.now < 40.0
    assert sum(result.after.values()) <= sum(result.before.values())


def test_a_sweep_spends_little_time_on_what_is_slow() -> None:
    class InRounds(Landscape):
        """Three rounds, or one where that is enough."""

        stops = True

        def microseconds(self, tuning: shapes.Tuning, context: int, **how: Any) -> float:
            us = super().microseconds(tuning, context, **how)
            us += sum(abs(getattr(tuning, name).warps - 8) for name in ("qkv", "output", "gate_up"))
            if us <= how.get("enough", math.inf) or not self.stops:
                self.now += 2 * self.seconds_each
            return us

    class Patient(InRounds):
        stops = False

    quick, patient = (
        run_sweep(meter(seconds_each=0.1), seconds=60.0)[1] for meter in (InRounds, Patient)
    )
    assert len(quick.trials) > 1.2 * len(patient.trials)
    assert sum(quick.after.values()) <= sum(patient.after.values())


def test_what_gives_wrong_logits_is_not_taken() -> None:
    _, result = run_sweep(Landscape(wrong=["AFTER_INPUT"]))
    assert result.tuning.start_next.get("head") != "AFTER_INPUT"
    assert any("wrong logits" in line for line in result.refused)


def test_what_the_device_refuses_is_passed_over() -> None:
    class Refusing(Landscape):
        def microseconds(self, tuning: shapes.Tuning, context: int, **how: Any) -> float:
            us = super().microseconds(tuning, context, **how)
            return math.inf if tuning.down.warps == 12 else us  # type: ignore[union-attr]

    _, result = run_sweep(Refusing())
    assert result.tuning.down.warps != 12  # type: ignore[union-attr]
    assert result.improved


def test_no_better_than_the_start_is_the_start() -> None:
    start, result = run_sweep(Flat())
    assert result.tuning == start
    assert not result.improved


@pytest.mark.parametrize(("contexts", "seconds"), [((), 1.0), ((20,), 0.0), ((20,), math.nan)])
def test_a_sweep_without_time_or_place_is_refused(
    contexts: tuple[int, ...], seconds: float
) -> None:
    with pytest.raises(InputError):
        run_sweep(Landscape(), seconds, contexts)


# --------------------------------------------------------------------------------------- the store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "tunings"


def tuned(rows: int = 1) -> shapes.Tuning:
    base = shapes.default_tuning(SMALL, rows=rows).with_start("AFTER_INPUT")
    return replace(base, attention=shapes.AttentionShape(1, 2, 2, 5))


def save(store: Path, rows: int = 1, gpu: str = GPU, tuning: shapes.Tuning | None = None) -> Path:
    key = TuningKey.of(SMALL, rows, gpu)
    times = {"before": {20: 100.0}, "after": {20: 90.0}}
    return choosing.save_tuning(key, tuning or tuned(rows), **times, folder=store)


def known_of(host: Device, **properties: int) -> dict[str, Any]:
    """What the rule knows of a device that has these properties and otherwise the host's."""
    changed = replace(host.properties, **properties)
    device: Any = SimpleNamespace(properties=changed, capabilities=host.capabilities)
    return choosing.known_of(device)


def chosen(store: Path, **changes: Any) -> shapes.Tuning:
    values = {"rows": 1, "context": 300, "gpu": GPU, "multiprocessors": 132}
    return choosing.choose_tuning(SMALL, folder=store, **values | changes)


def rule(rows: int = 1, gpu: str = GPU, shared: int = shapes.MAX_SHARED) -> shapes.Tuning:
    """The tuning of a decoder for which nothing is stored."""
    return shapes.default_tuning(SMALL, rows=rows, context=300, multiprocessors=132, shared=shared)


@pytest.mark.parametrize("rows", [1, 16])
def test_what_was_stored_is_used(store: Path, rows: int) -> None:
    save(store, rows=rows)
    found = chosen(store, rows=rows)
    assert found == tuned(rows) != rule(rows=rows)


@pytest.mark.parametrize("changes", [{"rows": 2}, {"gpu": "Another GPU"}])
def test_a_tuning_is_for_its_key_alone(store: Path, changes: dict[str, Any]) -> None:
    save(store)
    assert chosen(store, **changes) == rule(**changes)


def test_clusters_are_not_used_where_the_device_has_none(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clustered = replace(tuned(), attention=shapes.AttentionShape(1, 2, 2, 8, 8))
    save(store, tuning=clustered)
    assert chosen(store, clusters=True) == replace(clustered, clusters=True)
    with caplog.at_level(logging.WARNING):
        assert chosen(store) == rule()
    assert "clusters of 8" in caplog.text


@pytest.mark.parametrize(
    ("most", "shared"), [(99, 96), (163, 160), (227, 160)], ids=["8.9", "8.0", "9.0"]
)
def test_what_a_block_may_have_is_known_of_a_device(
    host_device: Device, most: int, shared: int
) -> None:
    """Kernels have static shared memory beside it."""
    known = known_of(host_device, max_shared_per_block=most * 1024)
    assert known["shared"] == shared * 1024


@pytest.mark.parametrize(
    ("bandwidth", "count", "fast"),
    [(4.9e12, 132, True), (3.35e12, 132, False), (0.86e12, 142, False), (0, 4, False)],
    ids=["H200", "H100", "L40S", "host"],
)
def test_the_rule_knows_how_fast_the_memory_is(
    host_device: Device, store: Path, bandwidth: float, count: int, fast: bool
) -> None:
    known = known_of(host_device, memory_bandwidth=int(bandwidth), multiprocessors=count)
    assert known["fast_memory"] is fast
    given: Any = {"rows": 8, "context": 2048, "clusters": True}
    found = choosing.choose_tuning(
        CONFIGS["8B"], gpu="any", folder=store, **{**known, **given, "multiprocessors": 132}
    )
    gate_up: Any = found.gate_up
    assert gate_up.tiles == (4 if fast else 2)


def test_blocks_that_a_small_gpu_has_no_room_for_are_not_used_there(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large = replace(tuned(16), down=shapes.MatrixShape(8, 1, 1, 1984, 2))
    save(store, 16, tuning=large)
    assert chosen(store, rows=16) == large
    with caplog.at_level(logging.WARNING):
        found = chosen(store, rows=16, shared=SMALL_SHARED)
    assert found == rule(rows=16, shared=SMALL_SHARED)
    assert "a slab of 1984 does not fit shared memory" in caplog.text


@pytest.mark.parametrize(
    ("context", "multiprocessors", "splits"),
    [(300, 132, 16), (8192, 132, 16), (8193, 132, 24), (100_000, 132, 128), (100_000, 10, 16)],
)
def test_a_stored_tuning_gets_clusters_for_a_longer_context(
    store: Path, context: int, multiprocessors: int, splits: int
) -> None:
    """It gets no more than a multiprocessor has room for, and never fewer than were stored."""
    clustered = replace(tuned(), attention=shapes.AttentionShape(1, 2, 2, 16, 8))
    save(store, tuning=clustered)
    sizes = {"context": context, "multiprocessors": multiprocessors}
    found = chosen(store, clusters=True, **sizes).attention
    assert found == replace(clustered.attention, splits=splits)
    save(store)
    assert chosen(store, clusters=True, **sizes).attention == tuned().attention


def test_other_kernel_code_has_no_stored_tuning(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store)
    monkeypatch.setattr(choosing, "sources_digest", lambda: "0" * 32)
    assert chosen(store) == rule()


def test_the_code_of_every_kernel_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = choosing.sources_digest.__wrapped__
    kernels = tmp_path / "kernels"
    shutil.copytree(choosing._KERNELS, kernels)
    monkeypatch.setattr(choosing, "_KERNELS", kernels)
    before = digest()
    files = [path for path in kernels.iterdir() if path.is_file()]
    assert len(files) > 15
    for path in files:
        text = path.read_text()
        path.write_text(text + "\n")
        assert digest() != before, path.name
        path.write_text(text)
    assert digest() == before


def changed(path: Path, **changes: Any) -> None:
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | changes))


def break_tuning(path: Path, name: str, value: Any) -> None:
    record = json.loads(path.read_text())
    record["tuning"][name] = value
    path.write_text(json.dumps(record))


_VECTOR = {"lanes": 8, "split": 1, "pairs": 1, "warps": 2, "turns": 1}
DAMAGE = {
    "torn": lambda path: path.write_text(path.read_text()[:200]),
    "empty": lambda path: path.write_bytes(b""),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00\x80" * 30),
    "huge": lambda path: path.write_bytes(b" " * 100_000),
    "deep": lambda path: path.write_text("[" * 60_000),
    "no object": lambda path: path.write_text("[1, 2]"),
    "schema": lambda path: changed(path, schema="ostinato.tuning/0"),
    "another key": lambda path: changed(path, rows=4),
    "rows": lambda path: changed(path, rows="1"),
    "gpu": lambda path: changed(path, gpu=None),
    "tuning": lambda path: changed(path, tuning=None),
    "illegal": lambda path: break_tuning(path, "qkv", {**_VECTOR, "ahead": 7}),
    "field": lambda path: break_tuning(path, "qkv", _VECTOR),
    "text": lambda path: break_tuning(path, "qkv", {**_VECTOR, "ahead": "0; rm -rf"}),
    "another kind": lambda path: break_tuning(
        path, "qkv", asdict(shapes.MatrixShape(8, 2, 1, 128))
    ),
    "attention": lambda path: break_tuning(path, "attention", {"queries": 1}),
    "names alone": lambda path: break_tuning(path, "attention", [*asdict(tuned().attention)]),
    "no starts": lambda path: break_tuning(path, "start_next", [["head", "NEVER"]]),
    "starts": lambda path: break_tuning(path, "start_next", {"head": 3}),
    "place": lambda path: break_tuning(path, "start_next", {"head": "0) evil("}),
    "more": lambda path: break_tuning(path, "colour", "red"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_costs_a_warning(
    store: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    path = save(store)
    DAMAGE[name](path)
    with caplog.at_level(logging.WARNING):
        assert chosen(store) == rule()
    assert path.name in caplog.text and "not used" in caplog.text
    save(store)
    assert chosen(store) == tuned()


@pytest.mark.parametrize("rows", [1, 9])
def test_a_number_of_another_type_is_a_reason_and_no_crash(
    store: Path, caplog: pytest.LogCaptureFixture, rows: int
) -> None:
    """One shape's numbers may be compared with another's."""
    path = save(store, rows=rows)
    sound = json.loads(path.read_text())["tuning"]
    values = itertools.cycle(["0; rm -rf", None, [1], {}, 1.5, math.nan, True, 10**30])
    for name in (*shapes.PRODUCTS.values(), "attention"):
        for field, value in zip(sound[name], values, strict=False):
            save(store, rows=rows)
            break_tuning(path, name, {**sound[name], field: value})
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                assert chosen(store, rows=rows) == rule(rows=rows), (name, field, value)
            assert "not used" in caplog.text


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(position=st.integers(0, 5000), byte=st.integers(0, 255))
def test_no_flipped_byte_is_a_crash(store: Path, position: int, byte: int) -> None:
    path = save(store)
    data = bytearray(path.read_bytes())
    data[position % len(data)] = byte
    path.write_bytes(data)
    found = chosen(store)
    assert problems_of(SMALL, 1, found) == ()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    blocked = tmp_path / "file" / "tunings"
    assert chosen(blocked) == rule()
    with pytest.raises(NotAvailableError, match="OSTINATO_CACHE_DIR"):
        save(blocked)


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_encoding_loses_nothing(data: st.DataObject) -> None:
    config, rows = CONFIGS["135M"], data.draw(st.sampled_from([1, 8]))
    stages = [*STAGES, "block"] if rows == 1 else STAGES
    tuning = data.draw(
        st.sampled_from(candidates(config, rows, data.draw(st.sampled_from(stages))))
    )
    again = decode_tuning(json.loads(json.dumps(encode_tuning(tuning))), tuning)
    assert again == tuning


# ------------------------------------------------------------------------------------- the meter


class EmulatedMeter(StepMeter):
    """Steps of the emulated kernels on the host device."""

    emulator: Emulator
    tamper: Any = None
    """Called with the kernel's name and the values after each launch."""

    def _kernel(self, launch: kc.CudaLaunch) -> Any:
        if launch.config.block[0] == 32 * 5:  # stands for what a compiler or driver refuses
            raise CompileError("five warps are too odd")
        names = [name for name, _ in launch.arguments]
        self.emulator.expect(launch)

        def run(_: object, *values: Any) -> None:
            given = dict(zip(names, values, strict=True))
            self.emulator.launch(launch, given)
            if self.tamper is not None:
                self.tamper(launch.kernel, given)

        host = HostKernel(launch.kernel, run, launch.signature)
        return self.device.modules.get_or_compile(host, launch.kernel)

    def _operation(self, launch: kc.CudaLaunch) -> Any:
        arguments = (self.plan.resolve(value, self.rows) for _, value in launch.arguments)
        return prepare(self._kernel(launch), LaunchConfig(grid=1, block=1), *arguments)


@pytest.fixture
def meter(
    host_device: Device, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EmulatedMeter]:
    for name in ("_WARM", "_REPEATS", "_ROUNDS", "_CAREFUL_ROUNDS"):
        monkeypatch.setattr(tuning_bench, name, 1)
    checkpoint = random_checkpoint(SMALL)
    weights = load_weights(host_device, checkpoint, np.uint16)
    default = shapes.default_tuning(SMALL)
    monkeypatch.setattr(EmulatedMeter, "emulator", emulator, raising=False)
    with EmulatedMeter(host_device, weights, default, rows=1, positions=70) as made:
        yield made
    weights.close()
    checkpoint.close()


V = shapes.VectorShape
TURNED = replace(
    shapes.default_tuning(SMALL),
    qkv=V(8, 1, 1, 2, 3, 1),
    output=V(16, 2, 2, 2, 3, 2),
    gate_up=V(8, 2, 2, 4, 2, 0),
    down=V(32, 1, 1, 2, 5, 0),
    head=V(16, 1, 2, 4, 4, 3),
    attention=shapes.AttentionShape(3, 2, 1, 8, 4),
)
"""Ragged on purpose: last blocks with fewer turns, last turns with fewer pairs."""


def test_a_meter_times_and_trusts_what_agrees(meter: EmulatedMeter) -> None:
    assert problems_of(SMALL, 1, TURNED) == ()
    meter.prepare([TURNED])
    assert 0 < meter.microseconds(TURNED, 3) < math.inf
    assert meter.problem(TURNED) is None
    default, turned = (meter.logits(t, 69) for t in (shapes.default_tuning(SMALL), TURNED))
    assert np.isfinite(turned).all()
    assert np.abs(default - turned).max() < 1e-4 * np.abs(default).max()
    assert default.tobytes() != meter.logits(TURNED, 20).tobytes()


@pytest.mark.parametrize(
    ("wrong", "said"), [(True, "away from the default's"), (False, "different bits")]
)
def test_a_meter_sees_wrong_logits_and_bits_that_change(
    meter: EmulatedMeter, wrong: bool, said: str
) -> None:
    count = 0

    def tamper(kernel: str, values: Any) -> None:
        nonlocal count
        if kernel == "head":
            count += 1
            if not wrong:
                values["logits"][0] += np.float32(1e-5 * count)
            elif count > 1:  # the trusted one comes first
                values["logits"][: SMALL.vocabulary // 2] *= 1.5

    meter.tamper = tamper
    assert said in str(meter.problem(TURNED))


def test_a_meter_gives_infinity_for_what_is_refused(meter: EmulatedMeter) -> None:
    refused = replace(TURNED, down=V(32, 1, 1, 5))
    meter.prepare([refused])
    assert meter.microseconds(refused, 3) == math.inf
    huge = replace(TURNED, attention=shapes.AttentionShape(3, 2, 1, 1 << 20))
    assert meter.microseconds(huge, 3) == math.inf  # its workspace
    assert 0 < meter.microseconds(TURNED, 3) < math.inf


def test_positions_that_the_model_does_not_have_are_refused(host_device: Device) -> None:
    checkpoint = random_checkpoint(replace(SMALL, context_length=64))
    weights = load_weights(host_device, checkpoint, np.uint16)
    with pytest.raises(InputError, match="64 positions"):
        StepMeter(host_device, weights, shapes.default_tuning(SMALL), rows=1, positions=60)
    weights.close()
    checkpoint.close()


# ----------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.alone  # it searches for so many seconds, and must come to candidates
@pytest.mark.parametrize("rows", [1, 8])
def test_a_sweep_on_the_device(cuda_device: Device, store: Path, rows: int) -> None:
    config = config_of(9, 3, 64, inner=1536, vocabulary=8192, layers=3, tied_embeddings=True)
    count = cuda_device.properties.multiprocessors
    start = shapes.default_tuning(config, rows=rows, multiprocessors=count)
    checkpoint = random_checkpoint(config)
    weights = load_weights(cuda_device, checkpoint, np.uint16)
    clusters = cuda_device.capabilities.clusters
    sizes: Any = {"rows": rows, "multiprocessors": count, "context": 2048, "contexts": (20, 300)}
    with StepMeter(cuda_device, weights, start, rows=rows, positions=300) as meter:
        result = Sweep(config, start, meter, **sizes, clusters=clusters).run(8.0)
        assert not result.refused, "a legal candidate computed something else"
        assert meter.problem(result.tuning) is None
    weights.close()
    checkpoint.close()
    assert problems_of(config, rows, result.tuning) == ()
    assert result.trials
    assert sum(math.isinf(t.microseconds) for t in result.trials) == 0, "refused by the driver"


@pytest.mark.gpu
def test_turned_products_agree_with_numpy(cuda_device: Device) -> None:
    checks.run_checks(
        OnDevice(cuda_device), SMALL, (1,), sequences=3, context=600, tunings={1: TURNED}
    )
