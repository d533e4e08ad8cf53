"""The CUDA kernels: that all compile clean, that launches fit the program, and what they compute.

Without a GPU they are compiled with NVRTC, and run on the CPU by `tests.emulator` on small shapes;
with one, every kernel is checked on the device.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from benchmarks.kernels import checks
from benchmarks.kernels.checks import config_of, to_bf16
from ostinato.device import Device
from ostinato.driver.signature import Signature
from ostinato.errors import UnsupportedModelError
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda import lowering as kc
from ostinato.models.cuda import shapes
from ostinato.models.cuda.bricks import formats_of, matrix_bytes
from ostinato.models.cuda.legal import matrix_problem, problems_of
from ostinato.models.host.kernels import HOST_KERNELS
from ostinato.models.host.shard_kernels import SHARD_KERNELS, _key
from ostinato.models.program import (
    ABSENT,
    ACTIVE,
    BEST_OVER_RANKS,
    CARRYING_SUM,
    OF_RANKS,
    OPTIONS,
    SAMPLE,
    STOP_TOKENS,
    decode_program,
)
from ostinato.models.sharding import Sharding, shard_program
from ostinato.modules import CompileOptions
from tests.emulator.emulator import Emulator
from tests.models.machines import OnDevice, bench_on, check_cases, on_kernels, require

SMALL = config_of(3, 1, 64, inner=136, vocabulary=257, tied_embeddings=True)
SHAPES = {
    "smollm2-135m": config_of(9, 3, 64, inner=1536, vocabulary=49152, tied_embeddings=True),
    "llama-3.1-8b": config_of(32, 8, 128, inner=14336, vocabulary=128256),
    "odd": config_of(5, 1, 80, hidden=328, inner=264, vocabulary=301),
}


SMALL_SHARED = shapes.dynamic_shared(99 * 1024)
"""The limit of compute capability 8.6, 8.9 and 12.0."""
LLAMA_1B = config_of(32, 8, 64, inner=8192, vocabulary=128256, layers=2)

# The additions of other families to Llama's layers, at sizes for the emulator; heads of odd widths
# too, and both additions to the heads at once.
FAMILIES = {
    "bias": replace(SMALL, layers=2, qkv_bias=True),
    "norms": config_of(6, 2, 32, hidden=104, inner=136, vocabulary=131, qk_norm=True),
    "norms, head 128": config_of(2, 1, 128, hidden=136, inner=88, vocabulary=67, qk_norm=True),
    "bias and norms, head 80": config_of(
        2, 1, 80, hidden=96, inner=96, vocabulary=64, qkv_bias=True, qk_norm=True
    ),
    "windows": replace(SMALL, layers=2, windows=(37, 0)),
    "window of one, bias": replace(SMALL, layers=1, windows=(1,), qkv_bias=True),
    "all": replace(SMALL, layers=2, hidden=128, windows=(0, 64), qkv_bias=True, qk_norm=True),
}


QUICK = ("norms, head 128", "all")
"""The families that the emulator does not run as slow tests."""


def in_clusters(config: LlamaConfig, context: int = 2048, rows: int = 1) -> shapes.Tuning:
    """The rule's tuning for a device that has clusters and fast memory."""
    has: dict[str, Any] = {"clusters": True, "fast_memory": True}
    return shapes.default_tuning(config, rows=rows, context=context, **has)


# ----------------------------------------------------------------------------------------- lowering


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_launches_follow_the_program(shape: str, rows: int) -> None:
    config = SHAPES[shape]
    program = decode_program(config)
    launches = kc.lower(program, config, rows=rows, context=500)
    if rows > 1:  # all that is rounded has a place of its own, and products carry norms on
        names = [shapes.ROUNDED_CALLS.get(call.kernel, call.kernel) for call in program]
        assert [one.kernel for one in launches] == [names[0], "norm_rows", *names[1:]]
        kept = [launches[0], *launches[2:]]
        added = {"workspace", "rounded", "out", "squares", "norm", "next", "later"}
        replaced = {"x", "norm", "attended", "inner", "heads", "kv_heads", "head_size"}
        normed = [call for call in program if "norm" in dict(call.arguments)]
        carried = [dict(one.arguments)["norm"] for one in launches if "next" in dict(one.arguments)]
        assert dict(launches[1].arguments)["norm"] == dict(normed[0].arguments)["norm"]
        assert carried == [dict(call.arguments)["norm"] for call in normed[1:]]
    else:
        assert [one.kernel for one in launches] == [call.kernel for call in program]
        kept, added, replaced = list(launches), {"workspace", "later"}, set()
    for call, one in zip(program, kept, strict=True):
        given, wanted = dict(call.arguments), dict(one.arguments)
        assert {k: v for k, v in given.items() if k not in replaced}.items() <= wanted.items()
        assert set(wanted) - set(given) <= added
    for one in launches:
        assert [name for name, _ in one.arguments] == [p.name for p in one.signature.parameters]
        assert one.config.shared <= 200 * 1024
    assert not launches[0].config.programmatic, "a step waits for what was before it"
    assert all(one.config.programmatic for one in launches[1:])


@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)])
def test_one_launch_for_the_attention_of_a_layer(heads: tuple[int, int]) -> None:
    config = config_of(*heads, 64, inner=136, vocabulary=257)
    program, tuning = decode_program(config), in_clusters(config)
    assert tuning.block is not None
    launches = kc.lower(program, config, rows=1, context=500, tuning=tuning)
    three = ("norm_qkv_rope", "attention", "output_residual")
    calls = list(program)
    for one in launches:
        done = [calls.pop(0) for _ in range(one.calls)]
        assert [one.kernel] == [call.kernel for call in done] or (
            one.kernel == "attention_block" and tuple(call.kernel for call in done) == three
        )
        for name, value in one.arguments:
            given = [dict(call.arguments).get(name) for call in done] + [ABSENT]
            wanted = {"output_weight": dict(done[-1].arguments).get("weight")}.get(name, value)
            assert value == wanted
            assert name in ("output_weight", "workspace") or value in given
        if one.kernel == "attention_block":
            assert one.config.cluster == (tuning.block.cluster, 1, 1)
            assert one.config.grid == (tuning.block.cluster, tuning.block.units(config), 1)
    assert not calls
    # It reads what `embed` wrote before it waits: after that it may not be let start early.
    plain = [i for i, one in enumerate(launches) if not one.config.programmatic]
    assert plain == [0, 1]


PREFETCH = {
    "qkv": ("output", 4096),
    "output": ("gate_up", 8192),
    "gate_up": ("down", 1 << 30),
    "down": ("qkv", 5000),
}


def prefetched_bytes(one: kc.CudaLaunch) -> int:
    macro = f"{kc.PRODUCTS_OF[one.kernel].upper()}_PREFETCH"
    return int(dict(one.options.defines).get(macro, "0"))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_products_prefetch_weights_of_the_next_such_product(rows: int, packed: bool) -> None:
    config = config_of(8, 2, 64, inner=1024, vocabulary=1000, layers=3)

    def kind_of(tensor: str) -> str:  # the second layer is smaller
        return "Q4_0" if ".1." in tensor else "Q8_0"

    formats = formats_of(config, kind_of) if packed else {}
    assert packed == bool(formats)
    given: Any = {"rows": rows, "context": 200, "formats": formats}
    tuning = replace(shapes.default_tuning(config, rows=rows, context=200), prefetch=PREFETCH)
    launches = kc.lower(decode_program(config), config, tuning=tuning, **given)
    products = [one for one in launches if one.kernel in kc.PRODUCTS_OF]
    order = ["qkv", "output", "gate_up", "down"]
    assert [kc.PRODUCTS_OF[one.kernel] for one in products] == 3 * order + ["head"]
    for i, one in enumerate(products[:-1]):
        target, wanted = PREFETCH[order[i % 4]]
        later, nbytes = dict(one.arguments)["later"], prefetched_bytes(one)
        following = [p for p in products[i + 1 :] if kc.PRODUCTS_OF[p.kernel] == target]
        if not following:  # the last layer's way down
            assert later == ABSENT
            continue
        assert later == dict(following[0].arguments)["weight"]
        shape = shapes.products_of(config)[target]
        how = formats.get(f"layers.{later.layer}.{later.name}")
        there = 4 * shape.pairs * shape.inputs if how is None else matrix_bytes(how, shape.inputs)
        assert 0 < nbytes <= min(wanted, there) and nbytes % 2048 == 0
    assert "later" not in dict(products[-1].arguments)
    plain = replace(tuning, prefetch={})
    for one in kc.lower(decode_program(config), config, tuning=plain, **given):
        if one.kernel in kc.PRODUCTS_OF:
            assert prefetched_bytes(one) == 0
            assert dict(one.arguments).get("later", ABSENT) == ABSENT


@pytest.mark.parametrize("rows", [1, 5])
def test_sample_knows_when_the_head_before_it_lets_it_start(rows: int) -> None:
    """It reads its row before its wait, unless the head may still wait for `embed` itself."""
    default = shapes.default_tuning(SMALL, rows=rows)
    for start in (None, "AT_START", "AFTER_WAIT", "BEFORE_OUTPUT"):
        given = dict.fromkeys(("head", "rounded_head"), start) if start else {}
        tuning = replace(default, start_next={**default.start_next, **given})
        *_, head, sample = kc.lower(
            decode_program(SMALL), SMALL, rows=rows, context=200, tuning=tuning
        )
        assert (head.kernel.endswith("head"), sample.kernel) == (True, "sample")
        starts = dict(head.options.defines)["START_NEXT"]
        assert dict(sample.options.defines)["PREVIOUS_STARTS"] == starts
        assert starts == start if start else starts != "AT_START"


@pytest.mark.parametrize(("multiprocessors", "exchanges"), [(2, True), (1, False)])
def test_products_exchange_sums_only_where_all_blocks_are_resident(
    multiprocessors: int, exchanges: bool
) -> None:
    """12 or 24 small blocks on a multiprocessor: compute capability 8.6 has room for 16."""
    given: Any = {"multiprocessors": multiprocessors}
    tuning = shapes.default_tuning(SMALL, shared=SMALL_SHARED, **given)
    narrow = shapes.VectorShape(8, 1, 1, 1)
    tuning = replace(tuning, output=narrow, down=narrow)
    assert not problems_of(SMALL, 1, tuning, shared=SMALL_SHARED)
    assert kc.Lowering(SMALL, 1, tuning, **given).exchanges_sums() == exchanges


def test_products_exchange_sums_only_where_their_shared_memory_fits() -> None:
    """Two blocks of 56 KiB: an H100 has room for them, a GPU with 100 KiB has not."""
    config = config_of(2, 1, 64, inner=14336, vocabulary=257)
    wide = shapes.VectorShape(32, 8, 1, 8)
    for shared, exchanges in ((shapes.MAX_SHARED, True), (SMALL_SHARED, False)):
        tuning = shapes.default_tuning(config, shared=shared, multiprocessors=32)
        tuning = replace(tuning, down=wide)
        assert not problems_of(config, 1, tuning, shared=shared)
        assert kc.Lowering(config, 1, tuning, multiprocessors=32).exchanges_sums() == exchanges


def test_products_of_several_rows_exchange_sums_only_where_all_clusters_are_resident() -> None:
    """Clusters of eight blocks are halved; two multiprocessors hold a cluster of four, of 98 KiB a
    block, if each has room for two blocks."""
    config = config_of(16, 4, 64, hidden=2048, inner=4096, vocabulary=64128)
    given: Any = {"clusters": True, "warpgroups": True}
    tuning = shapes.default_tuning(config, rows=32, **given)
    assert tuning.down.cluster == 8  # type: ignore[union-attr]
    wide = replace(tuning.down, blocks_k=4, cluster=4, ring=8)  # type: ignore[call-arg]
    whole = replace(tuning.down, blocks_k=1, cluster=1)  # type: ignore[call-arg]
    for multiprocessors, down, exchanges in (
        (132, tuning.down, True),
        (132, wide, False),
        (64, tuning.down, True),
        (62, tuning.down, False),
        (132, whole, False),
    ):
        cut = replace(tuning, down=down)
        lowering = kc.Lowering(config, 32, cut, multiprocessors=multiprocessors)
        launch = lowering.launch_config("rounded_down_of_ranks", programmatic=False)
        clusters = ((4, 1, 1), (4, 32, 1)) if down is not whole else (None, (32, 1, 1))
        assert (launch.cluster, launch.grid) == clusters
        assert lowering.exchanges_sums() == exchanges


def test_a_large_model_keeps_three_launches() -> None:
    assert in_clusters(SHAPES["llama-3.1-8b"]).block is None
    assert shapes.default_tuning(SHAPES["smollm2-135m"], rows=1).block is None, "without clusters"
    assert shapes.default_tuning(SHAPES["smollm2-135m"], rows=2, clusters=True).block is None


def test_parameters_are_the_hosts() -> None:
    of_three = {
        name: p
        for call in ("norm_qkv_rope", "norm_rope", "attention", "output_residual")
        for name, p in ((p.name, p) for p in HOST_KERNELS[call].signature.parameters)
    }
    block = list(Signature.parse(kc.SIGNATURES["attention_block"]).parameters)
    inside = {"q", "attended", "width", "qkv"}
    assert {p.name for p in block} == set(of_three) - inside | {"output_weight"}
    of_one = {call: product for product, call in OF_RANKS.items()}
    for name, text in kc.SIGNATURES.items():
        if name in ("attention_block", CARRYING_SUM, BEST_OVER_RANKS, "rows_of_ranks"):
            continue  # the host has two of them
        own = list(Signature.parse(text).parameters)
        kernel = (HOST_KERNELS | SHARD_KERNELS)[of_one.get(name, name)]
        host = {p.name: p for p in kernel.signature.parameters}
        if name in of_one:  # `sums` and `rank` are in the place of a workspace
            own = [p for p in own if p.name not in ("sums", "rank")]
            host.pop("workspace")
        assert [p.name for p in own if p.name in host] == list(host)
        for p in own:
            if p.name not in ("workspace", "later"):
                assert p.pointer == host[p.name].pointer
                assert p.access == host[p.name].access
                assert p.pointer or p.type == host[p.name].type


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_output_has_a_block(shape: str, rows: int) -> None:
    config = SHAPES[shape]
    tuning = shapes.default_tuning(config, rows=rows)
    pairs = {
        "norm_qkv_rope": (config.query_size + 2 * config.kv_size) // 2,
        "output_residual": config.hidden // 2,
        "norm_gate_up": config.inner,
        "down_residual": config.hidden // 2,
        "head": (config.vocabulary + 1) // 2,
    }
    done = []
    rounded = {new: old for old, new in shapes.ROUNDED_CALLS.items()}
    for one in kc.lower(decode_program(config), config, rows=rows, context=500):
        kernel = rounded.get(one.kernel, one.kernel)
        if kernel in pairs:
            shape_of = getattr(tuning, shapes.PRODUCTS[kernel])
            made = one.config.grid[0] * shape_of.block_pairs
            assert pairs[kernel] <= made < pairs[kernel] + shape_of.block_pairs
            done.append(kernel)
    assert set(done) == set(pairs)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden": 324}, "hidden is 324"),
        ({"inner": 33}, "inner is 33"),
        ({"heads": 3, "kv_heads": 3, "head_size": 40, "hidden": 64, "inner": 36}, "inner is 36"),
        ({"head_size": 512}, "head_size is 512"),
    ],
)
def test_what_is_not_supported_is_said(changes: Mapping[str, Any], said: str) -> None:
    config = replace(SMALL, **changes)
    with pytest.raises(UnsupportedModelError, match=said):
        kc.lower(decode_program(config), config, rows=1, context=100)


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="65 rows"):
        shapes.default_tuning(SMALL, rows=65)


# --------------------------------------------------------- what they compute, on emulator and GPU


@dataclass(frozen=True)
class Setup:
    """A small model and how its kernels are cut."""

    config: LlamaConfig
    rows: int = 1
    tuning: shapes.Tuning | None = None
    some: slice = field(default_factory=lambda: slice(None, None, 2))
    """The cases that the emulator runs."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the bench."""

    def bench(self, kernels: Any) -> checks.Bench:
        tunings = {} if self.tuning is None else {self.rows: self.tuning}
        return bench_on(kernels, self.config, self.rows, **{"tunings": tunings, **self.options})

    def check(self, kernels: Any) -> None:
        bench = self.bench(kernels)
        check_cases(bench, checks.cases(bench, self.rows), self.some)


def clustered(config: LlamaConfig, rows: int = 1, context: int = 70, **changes: Any) -> Setup:
    """In the rule's cut for a device with clusters, but for `changes`."""
    tuning = replace(in_clusters(config, context, rows), **changes)
    return Setup(config, rows, tuning, options={"context": context})


def cut(config: LlamaConfig, rows: int, context: int = 70, **changes: Any) -> Setup:
    """In the rule's cut for any device, but for `changes`."""
    tuning = replace(shapes.default_tuning(config, rows=rows, context=context), **changes)
    return Setup(config, rows, tuning, options={"context": context})


BLOCKS = {
    "one unit": shapes.BlockShape(queries=3, warps=4, lanes=16, output_lanes=8, steps=2),
    "parts": shapes.BlockShape(queries=1, warps=3, lanes=8, output_lanes=4, steps=1, cluster=4),
    "three launches": None,
}
# Weights of fewer steps than a slab's, whole sums in a lane, rings of more slabs, and blocks that
# share inputs, apart and in a cluster.
STREAMED = {
    "qkv": shapes.MatrixShape(4, 4, 1, 384, depth=1),
    "output": shapes.MatrixShape(1, 4, 2, 128, depth=1),
    "gate_up": shapes.MatrixShape(2, 1, 1, 192, depth=2, ring=4),
    "down": shapes.MatrixShape(2, 2, 2, 64, depth=1, cluster=2),
    "head": shapes.MatrixShape(4, 1, 1, 256, depth=4),
}
# Products of warpgroups: whole sums, warps that share inputs, and blocks that do, apart and in a
# cluster; rings of more slabs than there are, and of fewer.
WARPGROUPS = {
    "qkv": shapes.MatrixShape(4, 1, 1, 64, 1, ring=3, warpgroup=1),
    "output": shapes.MatrixShape(4, 2, 2, 64, 1, ring=4, warpgroup=1),
    "gate_up": shapes.MatrixShape(8, 1, 1, 64, 1, ring=4, warpgroup=1),
    "down": shapes.MatrixShape(4, 4, 2, 128, 1, cluster=2, ring=3, warpgroup=1),
    "head": shapes.MatrixShape(8, 1, 1, 64, 1, ring=5, warpgroup=1),
}
# The attention in clusters: one block, then one cluster, then two as the length grows.
CLUSTERS = {
    "of one row": (1, (1, 1, 1, 8, 4)),
    "of 8 blocks": (1, (3, 2, 2, 8, 8)),
    "of 2 rows": (2, (3, 1, 2, 4, 2)),
}
# A row whose inputs are said not to fit: plain, and with all that families add.
TOO_WIDE = {
    "plain": config_of(3, 1, 64, hidden=192, inner=2576, vocabulary=257),
    "all": config_of(
        4, 1, 64, inner=2816, vocabulary=257, qkv_bias=True, qk_norm=True, windows=(0, 20)
    ),
}
ONE, TWO = replace(SMALL, layers=1), replace(SMALL, layers=2)
ROUNDED = config_of(3, 1, 64, hidden=520, inner=1032, vocabulary=257, layers=1)
WIDE = config_of(6, 2, 64, hidden=1032, inner=2064, vocabulary=1001, layers=1)
SHARING = config_of(3, 1, 64, hidden=192, inner=2064, vocabulary=257, layers=1)
"""Blocks in clusters share its way down."""
SETUPS = {
    **{f"block, {name}": clustered(TWO, 1, 300, block=block) for name, block in BLOCKS.items()},
    **{
        f"clusters {name}": cut(ONE, rows, 110, attention=shapes.AttentionShape(*shape))
        for name, (rows, shape) in CLUSTERS.items()
    },
    **{f"prefetch, {n} rows": cut(TWO, n, prefetch=PREFETCH) for n in (1, 2)},
    **{f"streamed, {n} rows": cut(ONE, n, **STREAMED, prefetch=PREFETCH) for n in (3, 17)},
    **{
        f"warpgroups, {n} rows": cut(
            config_of(6, 2, 64, hidden=192, inner=640, vocabulary=301, layers=1),
            n, **WARPGROUPS, prefetch=PREFETCH,
        )
        for n in (3, 17, 40, 64)
    },
    "rounded, 9 rows": clustered(ROUNDED, 9),
    "rounded, 33 rows": replace(clustered(ROUNDED, 33), some=slice(3, 4)),
}  # fmt: skip
"""Small enough for the emulator and for racecheck."""
OF_THE_EMULATOR = {
    **{f"rows in clusters, {n} rows": clustered(SHARING, n, 300) for n in (3, 8, 16)},
    **{f"wide, {n} rows": clustered(WIDE, n) for n in (3, 24, 64)},
    **{
        f"{name}, rounded, {n} rows": clustered(FAMILIES[name], n)
        for name in ("all", "bias")
        for n in (3, 24, 64)
    },
    **{
        f"small GPU, {n} rows": Setup(
            config, n, shapes.default_tuning(config, rows=n, context=70, shared=SMALL_SHARED),
            slice(3, 4),
        )
        for config, n in ((replace(ROUNDED, heads=6, kv_heads=2), 64), (WIDE, 24))
    },
    **{
        f"too wide, {name}{', clusters' * clusters}": Setup(
            config,
            tuning=shapes.default_tuning(config, context=70, clusters=clusters, shared=12_800),
        )
        for name, config in TOO_WIDE.items()
        for clusters in (False, True)
    },
    **{
        f"{name}, {n} rows": Setup(config, n, options={"context": 150})
        for name, config in FAMILIES.items()
        for n in (1, 3)
    },
    **{
        f"block, {name}": clustered(
            config, 1, 150, block=shapes.BlockShape(
                config.heads // config.kv_heads, warps=4, lanes=16, output_lanes=8, steps=2,
                cluster=4,
            ),
        )
        for name, config in FAMILIES.items()
    },
}  # fmt: skip
SLOW = {
    *(f"warpgroups, {n} rows" for n in (17, 40, 64)), "streamed, 17 rows", "prefetch, 1 rows",
    *(f"rows in clusters, {n} rows" for n in (8, 16)), "small GPU, 24 rows", "rounded, 33 rows",
    "block, one unit", "prefetch, 2 rows", "bias, rounded, 3 rows",
    "too wide, plain, clusters", "too wide, all", "too wide, all, clusters", "all, 1 rows",
    "norms, head 128, 3 rows", "block, norms, head 128", "clusters of one row",
    *(f"wide, {n} rows" for n in (3, 24, 64)),
    *(f"{name}, rounded, {n} rows" for name, n in (("all", 3), ("all", 64), ("bias", 24),
                                                     ("bias", 64))),
    *(f"{name}, {n} rows" for name in FAMILIES if name not in QUICK for n in (1, 3)),
    *(f"block, {name}" for name in FAMILIES if name not in QUICK),
}  # fmt: skip


@on_kernels("name", SETUPS, emulator=OF_THE_EMULATOR, slow=SLOW)
def test_small_setups_agree_with_numpy(kernels: Any, name: str) -> None:
    (SETUPS | OF_THE_EMULATOR)[name].check(kernels)


def test_setups_are_what_their_names_say() -> None:
    def tuned(name: str) -> Any:
        return (SETUPS | OF_THE_EMULATOR)[name].tuning

    assert tuned("rows in clusters, 3 rows").attention.cluster == 4
    assert all(tuned(f"rounded, {n} rows").down.cluster > 1 for n in (9, 33))
    assert tuned("rounded, 33 rows").qkv.cluster > 1
    assert all(tuned(f"wide, {n} rows").qkv.cluster > 1 for n in (3, 24, 64))
    assert all(tuned(f"rows in clusters, {n} rows").down.cluster > 1 for n in (8, 16))
    for n in (24, 64):
        config = OF_THE_EMULATOR[f"small GPU, {n} rows"].config
        rule = shapes.default_tuning(config, rows=n, context=70)
        assert tuned(f"small GPU, {n} rows") != replace(rule, shared=SMALL_SHARED)
    for name in (f"too wide, {one}" for one in ("plain", "all", "plain, clusters")):
        setup = OF_THE_EMULATOR[name]
        assert isinstance(tuned(name).down, shapes.MatrixShape)
        launches = kc.lower(
            decode_program(setup.config), setup.config, rows=1, context=70, tuning=setup.tuning
        )
        assert max(one.config.shared for one in launches) <= 12_800


@pytest.mark.parametrize("rows", [1, 2])
def test_every_piece_is_prefetched_once(emulator: Emulator, rows: int) -> None:
    config = config_of(4, 1, 64, inner=2048, vocabulary=67, layers=2)
    # Few blocks, so that a lane has more than one piece.
    given: Any = {"rows": rows, "context": 70, "multiprocessors": 2}
    wanted = {name: (target, 1 << 30) for name, (target, _) in PREFETCH.items()}
    tuning = replace(shapes.default_tuning(config, **given), prefetch=wanted)
    bench = bench_on(emulator, config, rows, tunings={rows: tuning})
    bench.set_case(next(checks.cases(bench, rows)))
    found = {}
    for one in bench.launches(rows):
        bench.launch(one, rows)
        with_later = emulator.prefetched
        if dict(one.arguments).get("later", ABSENT) != ABSENT:
            without = dict(one.arguments) | {"later": ABSENT}
            bench.launch(replace(one, arguments=tuple(without.items())), rows)
            found[kc.PRODUCTS_OF[one.kernel]] = with_later - emulator.prefetched
            assert found[kc.PRODUCTS_OF[one.kernel]] == prefetched_bytes(one) > 0, one.kernel
    assert set(found) == set(PREFETCH)


# The attention on the tensor cores: heads, KV heads and their size, rows, context, how it is cut.
TILED = {
    "a block for each row": ((4, 1, 64), 3, 150, (4, 4, 2, 1)),
    "clusters": ((4, 1, 64), 3, 300, (4, 2, 1, 8, 2, 1)),
    "shares": ((4, 1, 64), 3, 300, (4, 2, 1, 16, 1, 1, 1)),
    "shares of 8 warps": ((4, 1, 64), 3, 600, (4, 8, 2, 3, 1, 1, 1)),
    "shares of 24 rows": ((6, 2, 64), 24, 130, (3, 2, 2, 3, 1, 1, 3)),
    "shares of 64 rows": ((6, 2, 64), 64, 200, (3, 1, 1, 5, 1, 2, 1)),
    "a window": ((4, 1, 64), 5, 300, (2, 2, 1, 4, 1, 1, 1)),
    "group 7": ((7, 1, 64), 3, 130, (7, 2, 1, 3, 1, 1, 1)),
    "group 8, head 128": ((8, 1, 128), 3, 130, (8, 2, 1, 3, 1, 1, 1)),
    "head 40": ((4, 2, 40), 40, 130, (2, 1, 1, 3, 1, 1, 4)),
    "head 80": ((2, 1, 80), 3, 130, (2, 2, 1, 3, 1, 1, 1)),
    "head 96": ((4, 2, 96), 3, 130, (1, 2, 1, 3, 1, 1, 1)),
}


def tiled(name: str) -> Setup:
    """Sequences of different lengths, on a device of one multiprocessor, so that blocks take
    several shares one after the other."""
    heads, rows, context, shape = TILED[name]
    sizes = {"hidden": 136, "inner": 88, "vocabulary": 67, "layers": 1}
    if name == "a window":
        sizes["windows"] = (77,)
    config = config_of(*heads, **sizes)
    base = shapes.default_tuning(config, rows=rows, context=context, clusters=True)
    tuning = replace(base, attention=shapes.AttentionShape(*shape))
    options = {"context": context, "sequences": rows, "multiprocessors": 1}
    return Setup(config, rows, tuning, slice(None, 2 if rows >= 24 else None), options)


@on_kernels(
    "name", TILED,
    slow=TILED.keys() - {"clusters", "group 8, head 128", "head 40"},
)  # fmt: skip
def test_the_attention_in_tiles_agrees_with_numpy(kernels: Any, name: str) -> None:
    tiled(name).check(kernels)


@pytest.mark.parametrize("name", ["a window", "shares", "group 8, head 128"])
def test_the_attention_in_tiles_takes_any_order_of_its_threads(
    emulator: Emulator, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = tiled(name).bench(emulator)
    for order in "12":
        monkeypatch.setenv("EMULATED_ORDER", order)
        check_cases(bench, checks.cases(bench, TILED[name][1]), slice(2))


def attended(bench: checks.Bench, rows: int, positions: Sequence[int]) -> np.ndarray:
    """The attention's result for sequences at these positions: uint16, [rows, heads * size]."""
    (launch,) = (one for one in bench.launches(rows) if one.kernel == "attention")
    live = np.zeros((rows, 4), np.int32)
    live[: len(positions), 1], live[: len(positions), 2] = positions, np.arange(len(positions))
    live[: len(positions), 3] = ACTIVE
    bench.machine.write(bench.device["live"], live)
    queries = np.random.default_rng(7).standard_normal((rows, bench.config.query_size))
    bench.machine.write(bench.device["q"], queries.astype(np.float32))
    bench.launch(launch, rows)
    bench.machine.synchronize()
    return bench.machine.read(bench.device["product_in"])[:rows]


def check_rows_apart(bench: checks.Bench, rows: int, lengths: Sequence[Sequence[int]]) -> None:
    """A row's bits do not depend on how long other rows are, or whether they are there."""
    context = bench.context
    one, other = context - 1, context // 2
    seen = [attended(bench, rows, [one, *others, other]) for others in lengths]
    for others, found in zip(lengths, seen, strict=True):
        assert np.array_equal(found[0], seen[0][0])
        assert np.array_equal(found[1 + len(others)], seen[0][1 + len(lengths[0])])


@pytest.mark.parametrize("name", ["shares", "shares of 24 rows", "a block for each row"])
def test_rows_do_not_change_each_other_on_the_emulator(emulator: Emulator, name: str) -> None:
    setup = tiled(name)
    middle, last = setup.rows - 2, setup.options["context"] - 1
    lengths = [[0] * middle, [last] * middle, [last // 3] * middle]
    check_rows_apart(setup.bench(emulator), setup.rows, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "rows", "context", "multiprocessors"),
    [(64, 8, 9000, 1), (64, 64, 3000, 1), (64, 64, 3000, 132), (128, 32, 3000, 132)],
)
def test_rows_do_not_change_each_other(
    cuda_device: Device, size: int, rows: int, context: int, multiprocessors: int
) -> None:
    """With the rule's tuning the bits are the same every time, whichever block does what."""
    config = config_of(8, 2, size, hidden=136, inner=88, vocabulary=67, layers=1)
    given: Any = {"rows": rows, "context": context, "multiprocessors": multiprocessors}
    tuning = shapes.default_tuning(config, clusters=True, **given)
    assert tuning.attention.shares_rows
    options: Any = {"sequences": rows, "context": context, "multiprocessors": multiprocessors}
    bench = checks.Bench(
        OnDevice(cuda_device), config, max_rows=rows, tunings={rows: tuning}, **options
    )
    middle = rows - 2
    mixed = list(np.random.default_rng(3).integers(0, context, middle))
    check_rows_apart(bench, rows, [[0] * middle, [context - 1] * middle, mixed])
    seen = {attended(bench, rows, mixed).tobytes() for _ in range(100)}
    assert len(seen) == 1


def test_a_block_that_has_a_multiprocessor_to_itself_reads_more_positions_at_once() -> None:
    """As on a rank, which has half of the heads."""
    given: Any = {"rows": 32, "context": 1024, "clusters": True, "warpgroups": True}
    rank = Sharding(LLAMA_1B, 0, 2).part
    steps = [shapes.default_tuning(one, **given).attention.steps for one in (LLAMA_1B, rank)]
    assert steps == [1, 2]


@pytest.mark.parametrize("rows", [24, 64])
def test_the_rule_multiplies_with_warpgroups_where_they_pay(rows: int) -> None:
    config = LLAMA_1B
    given: Any = {"rows": rows, "context": 512, "clusters": True}
    tuning = shapes.default_tuning(config, warpgroups=True, **given)
    launches = kc.lower(decode_program(config), config, rows=rows, context=512, tuning=tuning)
    archs = {one.kernel: one.options.arch for one in launches}
    assert {kernel for kernel, arch in archs.items() if arch == "sm_90a"} == {
        kernel for kernel in archs if kernel.startswith("rounded")
    }
    assert not problems_of(config, rows, tuning)
    assert "a warpgroup" in problems_of(config, rows, tuning, warpgroups=False)[0]
    without = shapes.default_tuning(config, **given)
    assert not problems_of(config, rows, without, warpgroups=False)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [24, 64])
def test_the_rule_for_warpgroups_agrees_with_numpy_on_the_emulator(
    emulator: Emulator, rows: int
) -> None:
    config = config_of(17, 1, 64, hidden=1088, inner=4352, vocabulary=301, layers=1)
    given: Any = {"rows": rows, "context": 40, "clusters": True, "warpgroups": True}
    tuning = shapes.default_tuning(config, **given)
    assert tuning.down.cluster == 8 and tuning.down.warpgroup  # type: ignore[union-attr]
    Setup(config, rows, tuning, slice(3, 4), {"context": 40}).check(emulator)


def legal_cut(
    rng: random.Random, name: str, product: shapes.Product, rows: int, *, warpgroups: bool
) -> Any:
    """Any cut that the kernels take, also one that no rule and no search would choose."""
    while True:
        blocks_k = rng.choice((1, 2, 3, 4, 8))
        tiles, split = rng.choice((1, 2, 3, 4, 8, 16)), rng.choice((1, 2, 3, 4, 6, 8, 16))
        cluster, slab = rng.choice((1, blocks_k)), 32 * split * rng.randint(1, 24)
        depth, ring = rng.randint(0, 16), rng.randint(2, 5)
        shape = shapes.MatrixShape(tiles, split, blocks_k, slab, depth, cluster, ring)
        if warpgroups:
            shape = replace(shape, depth=1, warpgroup=1)
        if matrix_problem(name, shape, product, rows) is None:
            return shape


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 40))]
)
@pytest.mark.parametrize("warpgroups", [False, True])
def test_any_legal_cut_agrees_with_numpy(emulator: Emulator, seed: int, warpgroups: bool) -> None:
    rng = random.Random(seed)
    rows, kv_heads = rng.choice((2, 5, 8, 9, 16, 17, 33)), rng.choice((1, 2))
    unit = 64 if warpgroups else 8  # whole slabs
    config = config_of(
        kv_heads * rng.randint(1, 3),
        kv_heads,
        64 if warpgroups else rng.choice((32, 64)),
        hidden=unit * rng.randint(128 // unit, 480 // unit),
        inner=unit * rng.randint(128 // unit, 1200 // unit),
        vocabulary=rng.randint(40, 700),
        layers=1,
    )
    cuts = {
        n: legal_cut(rng, n, p, rows, warpgroups=warpgroups)
        for n, p in shapes.products_of(config).items()
    }
    replace(cut(config, rows, 90, **cuts), some=slice(None, None, 3)).check(emulator)


def check_sampling(bench: checks.Bench, every: int = 1) -> None:
    done = list(checks.sampling_cases(bench))[::every]
    chosen = set()
    for case in done:
        bench.check(case)
        chosen.add(int(bench.host["state"][case.rows["sequence"][0], 0]))
    least = min(len(done), bench.config.vocabulary) // 4
    assert len(chosen) > least, "draws that are all the same show nothing"


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("vocabulary", [256, 257])
def test_sampling_agrees_with_numpy_on_the_emulator(
    emulator: Emulator, vocabulary: int, every: int
) -> None:
    """256 logits are read four at a time, 257 are not."""
    check_sampling(bench_on(emulator, replace(ONE, vocabulary=vocabulary), 1), every)


@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinite_logits_choose_no_token(
    emulator: Emulator, temperature: float, penalty: float
) -> None:
    bench = bench_on(emulator, ONE, 1)
    case = next(checks.sampling_cases(bench))
    case.rows["token"], case.rows["position"] = 3, 1
    case.options["temperature"], case.options["repetition_penalty"] = temperature, penalty
    bench.set_case(case)
    heads = bench.read("embed").copy()
    chosen = []
    for infinities in ((), (7, 9)):  # one of the two logits is plus infinity, the other minus
        changed = heads.copy()
        for token, value in zip(infinities, (np.inf, -np.inf), strict=False):
            changed[token, 0] = value
        bench.machine.write(bench.device["embed"], to_bf16(changed))
        for launch in bench.launches(1):
            bench.launch(launch, 1)
        assert np.isinf(bench.read("logits")).sum() == len(infinities)
        chosen.append(int(bench.read("state")[case.rows["sequence"][0], 0]))
    assert chosen[0] >= 0
    assert chosen[1] == -1


@pytest.mark.parametrize("rows", [1, 3])
def test_an_end_token_stops_its_sequence_alone(emulator: Emulator, rows: int) -> None:
    bench = bench_on(emulator, ONE, rows)
    case = next(checks.cases(bench, rows))
    case.options["temperature"], case.rows["position"] = 0, 5
    bench.check(case)
    sequence = case.rows["sequence"][0]
    token = bench.host["state"][sequence, 0]
    others = bench.host["state"][:, 0] != token
    for place in (0, STOP_TOKENS - 1):
        bench.host["stops"][:] = -1
        bench.host["stops"][place] = token
        bench.machine.write(bench.device["stops"], bench.host["stops"])
        bench.check(case)
        assert bench.host["state"][sequence].tolist()[::3] == [token, 1]
        assert not bench.host["state"][others, 3].any()


def test_the_best_of_ranks_is_that_of_the_host(emulator: Emulator) -> None:
    sharding = Sharding(replace(SMALL, heads=4, kv_heads=2, inner=128, vocabulary=512), 0, 2)
    program = shard_program(decode_program(sharding.part), sharding, whole_logits=False)
    calls = [call for call in program if call.kernel == "best_of_ranks"]
    (launch,) = kc.lower(calls, sharding.part, rows=1, context=40)
    found = []
    for pair in ((1.5, 2.5), (2.5, 2.5), (-1.0, -0.0), (np.nan, 3), (3, np.inf), (-np.inf,) * 2):
        keys = [_key(np.float32(logit), 10 + rank) for rank, logit in enumerate(pair)]
        values: dict[str, Any] = {
            "live": np.array([0, 1, 0, ACTIVE | SAMPLE], np.int32),
            "logits": np.zeros(1, np.float32),
            "options": np.zeros(1, OPTIONS),
            "stops": np.full(STOP_TOKENS, 10, np.int32),
            "state": np.full(4, 77, np.int32),
            "ring": np.full(8, 77, np.int32),
            "history": np.zeros(40, np.int32),
            "kept": np.zeros(40, np.uint32),
            "biases": np.zeros(2, np.int32),
            "allowed": np.zeros(1, np.uint32),
            "masks": np.zeros(1, np.uint32),
            "logprobs": np.zeros(1, np.int32),
            "keys": np.array(keys, np.uint64),
        }
        values["options"]["repetition_penalty"], values["options"]["limit"] = 1, 9
        values["options"] = values["options"].view(np.uint64)
        sizes = {"row_count": 1, "vocabulary": 512, "stop_count": STOP_TOKENS, "context": 40}
        sizes |= {"ring_size": 4, "ranks": 2}
        on_host = {name: array.copy() for name, array in values.items()}
        SHARD_KERNELS["best_of_ranks"].function(None, *on_host.values(), *sizes.values())
        arrays = {name: emulator.array(array) for name, array in values.items()}
        emulator.launch(launch, {**arrays, **sizes})
        for name in ("state", "ring"):
            got = emulator.read(arrays[name])
            assert np.array_equal(got, on_host[name]), pair
        found.append(emulator.read(arrays["state"])[[0, 3]].tolist())
    assert found == [[11, 0], [10, 1], [11, 0], [-1, 1], [-1, 1], [-1, 1]]


# Every kernel and both ways to multiply (vectors, matrices) in tiny blocks of work: racecheck slows
# a kernel a hundredfold.  As many heads a KV head, and as wide ones, as real models have.
SMALL_CASES = {
    "tiny head 32": config_of(2, 2, 32, inner=72, vocabulary=67, layers=1),
    "tiny head 64": config_of(3, 1, 64, inner=136, vocabulary=131, layers=1),
    "tiny head 80": config_of(2, 1, 80, inner=96, vocabulary=64, layers=1),
    "tiny head 128": config_of(4, 1, 128, hidden=136, inner=88, vocabulary=67, layers=1),
    "tiny, all of it": config_of(
        2, 1, 64, hidden=136, inner=88, vocabulary=67, layers=1, qkv_bias=True, qk_norm=True,
        windows=(33,),
    ),
}  # fmt: skip


def small_cases(*rows: int) -> list[tuple[str, int]]:
    return [(name, count) for name in SMALL_CASES for count in rows]


@on_kernels("vocabulary", [67, 1056])
def test_small_sampling_agrees_with_numpy(
    kernels: Any, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One case of each way to sample, some with masks; on the emulator in any order of threads."""
    small = replace(SMALL_CASES["tiny head 32"], vocabulary=vocabulary)
    bench = bench_on(kernels, small, 1, sequences=2)
    cases = list(checks.sampling_cases(bench))[2::11]
    assert any(case.masks is not None for case in cases)
    check_cases(bench, cases, slice(None))
    for order in "12" if kernels.name == "emulator" else "":
        monkeypatch.setenv("EMULATED_ORDER", order)
        check_cases(bench, cases, slice(None, None, 3))


@on_kernels(
    "case",
    small_cases(1, 8, 33),
    cuda=small_cases(17),
    slow=[case for case in small_cases(1, 8, 33) if "64" not in case[0]],
)
def test_small_kernels_agree_with_numpy(
    kernels: Any, case: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the emulator in any order of their threads, as racecheck has it on a GPU, but for what
    depends on memory ordering."""
    rows = case[1]
    bench = bench_on(kernels, SMALL_CASES[case[0]], rows, sequences=3)
    check_cases(bench, checks.cases(bench, rows))
    for order in "12" if kernels.name == "emulator" else "":
        monkeypatch.setenv("EMULATED_ORDER", order)
        check_cases(bench, checks.cases(bench, rows), slice(3))


@pytest.mark.parametrize("barrier", [True, False])
def test_a_missing_barrier_is_found_by_the_order_of_threads(
    emulator: Emulator, barrier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """KERNEL turned(int* out) {
        __shared__ int values[64];
        values[threadIdx.x] = threadIdx.x;
        __syncthreads();
        out[threadIdx.x] = values[63 - threadIdx.x];
        BARRIER;
        values[threadIdx.x] = -1;
    }"""
    source = ost.Source(text, signatures={"turned": "out: *out i32"}, name="turned.cu")
    options = CompileOptions(defines=(("BARRIER", "__syncthreads()" if barrier else "(void)0"),))
    launch = kc.CudaLaunch("turned", source, options, ost.LaunchConfig(1, 64), ())
    seen = set()
    for order in range(1, 6):
        monkeypatch.setenv("EMULATED_ORDER", str(order))
        out = emulator.array(np.zeros(64, np.int32))
        emulator.launch(launch, {"out": out})
        seen.add(emulator.read(out).tobytes())
    assert (seen == {np.arange(63, -1, -1, dtype=np.int32).tobytes()}) == barrier


# ----------------------------------------------------------------------------------------- on a GPU


GPU_CASES = {
    "smollm2-135m": (SHAPES["smollm2-135m"], (1, 8, 40)),
    "head 128, group 4, odd vocabulary": (
        config_of(8, 2, 128, inner=1432, vocabulary=1003),
        (1, 2, 5, 33, 64),
    ),
    "group 8": (config_of(8, 1, 64, hidden=328, inner=264, vocabulary=301), (1, 3, 7, 24)),
    "group 1": (config_of(4, 4, 32, inner=88, vocabulary=131), (1, 4, 12)),
    "head 80": (config_of(2, 1, 80, inner=96, vocabulary=64), (1, 2, 9)),
    "as Qwen3-0.6B": (
        config_of(16, 8, 128, hidden=1024, inner=3072, vocabulary=1003, qk_norm=True),
        (1, 3, 40),
    ),
    "as Qwen2.5-0.5B": (
        config_of(14, 2, 64, inner=4864, vocabulary=1003, qkv_bias=True),
        (1, 3, 40),
    ),
    **{name: (config, (1, 3, 17)) for name, config in FAMILIES.items()},
}


@pytest.mark.gpu
@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize("name", GPU_CASES)
def test_kernels_agree_with_numpy(cuda_device: Device, name: str, clusters: bool) -> None:
    """In the rule's cut for any device, and for one with clusters."""
    (config, rows), tunings = GPU_CASES[name], {}
    if clusters:
        if not cuda_device.capabilities.clusters:
            pytest.skip("no device with clusters")
        rows = (2, 8, 16, 33, 64)
        tunings = {n: in_clusters(config, 600, n) for n in rows}
    checks.run_checks(
        OnDevice(cuda_device), config, rows, sequences=5, context=600, tunings=tunings
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_sampling_agrees_with_numpy(cuda_device: Device, name: str) -> None:
    config = GPU_CASES[name][0]
    config = replace(config, layers=1, windows=config.windows[:1])
    check_sampling(
        checks.Bench(OnDevice(cuda_device), config, max_rows=1, sequences=2, context=3000)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", GPU_CASES)
def test_clusters_agree_with_numpy(cuda_device: Device, name: str, together: bool) -> None:
    tuning = in_clusters(GPU_CASES[name][0], 1300)
    if not together:
        tuning = replace(tuning, block=None)
    Setup(GPU_CASES[name][0], 1, tuning, options={"context": 1300}).check(OnDevice(cuda_device))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 16])
def test_the_rule_for_few_rows_agrees_with_numpy(cuda_device: Device, rows: int) -> None:
    config, machine = replace(LLAMA_1B, vocabulary=1001), OnDevice(cuda_device)
    context = 1100 if rows == 2 else 300  # two clusters of a head merge from 1,025 positions on
    given: Any = {"rows": rows, "context": context, "clusters": cuda_device.capabilities.clusters}
    tuning = shapes.default_tuning(config, **given)
    down: Any = tuning.down
    assert tuning.prefetch and (rows == 1 or down.tiles * down.split == 16)
    sizes: Any = {"sequences": 16, "context": context}
    checks.run_checks(machine, config, (rows,), tunings={rows: tuning}, **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_the_rule_for_small_gpus_agrees_with_numpy(cuda_device: Device, rows: int) -> None:
    """On any GPU.  One row has more inputs than fit."""
    config = replace(LLAMA_1B, inner=25600, vocabulary=1001)
    given: Any = {"rows": rows, "context": 300, "shared": SMALL_SHARED}
    tuning = shapes.default_tuning(config, clusters=cuda_device.capabilities.clusters, **given)
    assert isinstance(tuning.down, shapes.MatrixShape)
    sizes: Any = {"sequences": min(rows, 16), "context": 300}
    checks.run_checks(OnDevice(cuda_device), config, (rows,), tunings={rows: tuning}, **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [24, 32, 64])
def test_the_rule_for_warpgroups_agrees_with_numpy(cuda_device: Device, rows: int) -> None:
    config = replace(LLAMA_1B, vocabulary=1001)
    given: Any = {"rows": rows, "context": 300, "clusters": True, "warpgroups": True}
    tuning = shapes.default_tuning(config, **given)
    assert tuning.output.warpgroup  # type: ignore[union-attr]
    options = {"sequences": 64, "context": 300}
    Setup(config, rows, tuning, options=options).check(OnDevice(cuda_device))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("smollm2-135m", 1),
        ("smollm2-135m", 8),
        ("smollm2-135m", 32),
        ("warpgroups", 32),
        ("warpgroups", 64),
    ],
)
def test_a_step_gives_the_same_bits_every_time(cuda_device: Device, name: str, rows: int) -> None:
    machine, config = OnDevice(cuda_device), SHAPES["smollm2-135m"]
    tuning = in_clusters(config, 600, rows) if cuda_device.capabilities.clusters else None
    if name == "warpgroups":
        config = replace(LLAMA_1B, vocabulary=1001)
        given: Any = {"clusters": True, "warpgroups": True}
        tuning = shapes.default_tuning(config, rows=rows, context=600, **given)
        require(machine, config, rows, tuning)
    tunings = {} if tuning is None or rows == 1 else {rows: tuning}
    bench = checks.Bench(machine, config, max_rows=rows, sequences=8, context=600, tunings=tunings)
    case = next(iter(checks.cases(bench, rows)))
    case.rows["position"] = 500 + np.arange(rows)
    bench.set_case(case)
    launches = bench.launches(rows)
    seen = set()
    for _ in range(50):
        for launch in launches:
            bench.launch(launch, rows)
        seen.add(machine.read(bench.device["logits"]).tobytes())
    assert len(seen) == 1


def test_an_mlp_beside_launches_apart_is_cut_for_them() -> None:
    """Where weights are packed or belong to a rank there is no launch for a layer's attention."""
    config = SHAPES["smollm2-135m"]
    beside, alone = in_clusters(config), shapes.default_tuning(config, rows=1)
    apart = shapes.without_block(beside, config)
    assert beside.block is not None and beside.gate_up != alone.gate_up
    assert apart.block is None and apart.attention == beside.attention
    assert (apart.gate_up, apart.down) == (alone.gate_up, alone.down)
    assert apart.start_next == alone.start_next | {"norm_gate_up": "AT_START"}
    assert shapes.without_block(alone, config) is alone
