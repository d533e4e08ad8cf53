"""Products with packed matrices on CUDA: what the kernels compute, on the emulator and on a GPU.

The file's bytes are put in order by the kernel that loading uses; NumPy over the dequantised
weights is the oracle.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from benchmarks.kernels import checks
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.bricks import (
    BRICK,
    FORMAT_OF,
    FORMATS,
    Part,
    formats_of,
    matrix_bytes,
    packing,
    places,
)
from ostinato.models.cuda.legal import matrix_problem
from ostinato.models.cuda.lowering import Lowering
from ostinato.models.cuda.shapes import (
    MAX_SHARED,
    PRODUCTS,
    ROUNDED_CALLS,
    MatrixShape,
    PackedShape,
    Product,
    default_tuning,
    packed_shape,
    products_of,
)
from tests.emulator.emulator import Emulator
from tests.models.machines import bench_on, check_cases, on_kernels

TENSORS = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down", "embed", "head")


config_of = partial(checks.config_of, layers=1)


WHOLE = config_of(4, 1, 64, inner=512, vocabulary=257, tied_embeddings=True)
"""Rows are whole bricks; the vocabulary is odd."""
RAGGED = config_of(4, 1, 24, hidden=864, inner=160, vocabulary=101)
"""Rows end within a brick, and within a pair of groups; pairs of keys are no whole tiles."""


def types_of(kind: str, **others: str) -> dict[str, str]:
    return dict.fromkeys(TENSORS, kind) | others


CASES: dict[str, tuple[LlamaConfig, dict[str, str], tuple[int, ...] | None]] = {
    **{kind: (WHOLE, types_of(kind), None) for kind in FORMAT_OF},
    **{
        f"{kind}, ragged": (
            replace(RAGGED, heads=4, head_size=24, hidden=352),
            types_of(kind),
            None,
        )
        for kind in FORMAT_OF
        if not kind.endswith("_K")
    },
    "as Q4_K_M": (WHOLE, types_of("Q4_K", wv="Q6_K", w_down="Q6_K", embed="Q6_K"), (1, 2, 2, 1)),
    "as narrow Q4_K_M": (
        replace(RAGGED, heads=4, head_size=24, hidden=352, inner=512),
        types_of("Q5_0", wv="Q8_0", w_down="Q6_K", embed="Q8_0", head="Q8_0"),
        None,
    ),
    "all sorts": (
        WHOLE,
        types_of("Q5_K", wq="Q4_0", wk="Q8_0", wo="Q4_1", w_down="Q4_1"),
        (2, 1, 4, 3),
    ),
    "Q8_0, quarters": (replace(WHOLE, inner=704), types_of("Q8_0"), None),
    "gate and up differ": (WHOLE, types_of("Q4_0", w_up="Q8_0"), (1, 3, 1, 1)),
    "some are not packed": (WHOLE, {"wq": "Q4_K", "wk": "Q4_K", "wo": "Q8_0"}, (1, 1, 3, 2)),
}
"""Model, types of tensors, and a cut that is not the rule's."""
LONG = {
    "all held": ("Q4_0", 8192, (8, 1, 1, 4, 1)),
    "one held": ("Q6_K", 8192, (16, 1, 1, 1, 1)),
    "one held, turns": ("Q4_K", 8192, (16, 1, 2, 1, 1)),
    "two held, turns": ("Q4_0", 8192, (16, 1, 2, 2, 1)),
    "four bricks, turns": ("Q4_K", 14336, (14, 1, 2, 1, 1)),
    "three bricks, the last not there": ("Q6_K", 8960, (12, 1, 1, 1, 1)),
    "fewer held than bricks": ("Q6_K", 8192, (6, 1, 2, 2, 1)),
    "fewer held than bricks, 8 bits": ("Q8_0", 8192, (6, 1, 2, 4, 1)),
}
"""Types, inputs and cuts of `down` whose warps have several bricks; most are the rule's."""
PANELLED = config_of(8, 1, 64, inner=1280, vocabulary=131)
"""Several slabs of 256 inputs; of 512 the last is half empty."""
PANEL_CUTS = {
    "ring of 2": MatrixShape(4, 1, 1, 256, 8),
    "ring of 3": MatrixShape(4, 1, 1, 256, 8, ring=3),
    "two warps": MatrixShape(4, 2, 1, 512, 8),
    "clusters": MatrixShape(4, 1, 2, 256, 8, cluster=2),
    "workspace": MatrixShape(4, 2, 2, 512, 8),
}
PREFETCH = {"qkv": ("gate_up", 1 << 30), "output": ("down", 1 << 30), "gate_up": ("down", 4096)}
"""All of matrices whose parts may be of several types; the rule has it for large models alone."""


def bench_of(kernels: Any, name: str, rows: int) -> checks.Bench:
    config, types, cut = CASES[name]
    tuning = default_tuning(config, rows=rows, context=70, clusters=True)
    tuning = replace(tuning, prefetch=PREFETCH, block=None)
    if cut is not None and rows == 1:
        tuning = replace(tuning, packed=dict.fromkeys(PRODUCTS.values(), PackedShape(*cut)))
    return bench_on(kernels, config, rows, tunings={rows: tuning}, types=types)


def cases_of(*rows: int) -> list[tuple[str, int]]:
    return [(name, count) for name in CASES for count in rows]


QUICK = {
    *(
        ("Q5_1, ragged", 9),
        ("as narrow Q4_K_M", 1),
        ("IQ4_NL", 9),
        ("all sorts", 1),
        ("as Q4_K_M", 9),
    ),
    *(("gate and up differ", 9), ("some are not packed", 1)),
}
"""Every type once, every way to lie, one row and several: a case is up to seven compilations."""


@on_kernels("case", cases_of(1, 9, 64), emulator=cases_of(3), slow={*cases_of(1, 3, 9, 64)} - QUICK)
def test_packed_products_agree_with_numpy(kernels: Any, case: tuple[str, int]) -> None:
    bench = bench_of(kernels, *case)
    assert bench.formats
    some = slice(None, None, 6) if case[1] == 1 else slice(1, 4, 2)
    check_cases(bench, checks.cases(bench, case[1]), some)


@on_kernels("name", LONG, slow=LONG.keys() - {"one held, turns", "fewer held than bricks, 8 bits"})
def test_long_rows_agree_with_numpy(kernels: Any, name: str) -> None:
    kind, inner, cut = LONG[name]
    config = replace(WHOLE, inner=inner)
    tuning = replace(default_tuning(config, context=70), packed={"down": PackedShape(*cut)})
    bench = bench_on(kernels, config, 1, tunings={1: tuning}, types=types_of("Q4_0", w_down=kind))
    check_cases(bench, checks.cases(bench, 1), slice(1))


def panelled(kernels: Any, cut: str, rows: int) -> checks.Bench:
    """Products with packed matrices, whose inputs one thread copies.  Blocks share inputs where
    they may: not those of the head, and through the workspace not of matrices in parts."""
    shape = PANEL_CUTS[cut]
    alone = replace(shape, blocks_k=1, cluster=1)
    packed = dict.fromkeys(PRODUCTS.values(), shape)
    packed |= {"head": alone} if shape.cluster > 1 else {"head": alone, "qkv": alone}
    tuning = default_tuning(PANELLED, rows=rows, context=70, clusters=True)
    bench = bench_on(
        kernels, PANELLED, rows, tunings={rows: replace(tuning, packed=packed)},
        types=types_of("Q4_K", wv="Q6_K", w_down="Q6_K", head="Q6_K"),
    )  # fmt: skip
    for one in bench.launches(rows):
        if one.kernel in (*ROUNDED_CALLS.values(), "attention", "norm_rows"):
            assert ("PANELS", "2") in one.options.defines
    return bench


PANELS = [(cut, rows) for cut in PANEL_CUTS for rows in (2, 9, 32, 64)]
OF_THE_EMULATOR = list(zip(PANEL_CUTS, (9, 32, 2, 17, 64), strict=True))


@on_kernels(
    "case", emulator=OF_THE_EMULATOR, cuda=PANELS,
    slow=[("ring of 2", 9), ("two warps", 2), ("workspace", 64)],
)  # fmt: skip
def test_inputs_in_panels_agree_with_numpy(kernels: Any, case: tuple[str, int]) -> None:
    bench = panelled(kernels, *case)
    check_cases(bench, checks.cases(bench, case[1]), slice(1, 4, 2))


def test_inputs_lie_in_panels_where_all_products_read_whole_panels() -> None:
    def panels(config: LlamaConfig, types: dict[str, str], *, clusters: bool = True) -> int:
        tuning = default_tuning(config, rows=32, context=70, clusters=clusters)
        formats = formats_of(config, lambda name: types.get(name.rpartition(".")[2], "BF16"))
        return Lowering(config, 32, tuning, formats).panels

    assert panels(WHOLE, types_of("Q4_K")) == 2
    assert panels(WHOLE, types_of("Q4_K"), clusters=False) == 0
    assert panels(WHOLE, {}) == 0
    assert panels(WHOLE, types_of("Q4_K", w_up="Q8_0")) == 0  # gate and up are bfloat16
    assert panels(RAGGED, types_of("Q8_0")) == 0  # 13 panels and a half


@pytest.mark.parametrize(
    ("rows", "shared"),
    [
        (9, 96 << 10),
        *[pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 10 << 10), (64, 96 << 10))],
    ],
)
def test_packed_products_for_small_gpus_agree_with_numpy(
    emulator: Emulator, rows: int, shared: int
) -> None:
    """One row is multiplied as several are: its digits are said not to fit."""
    config = replace(WHOLE, inner=2304)
    tuning = default_tuning(config, rows=rows, context=70, shared=shared)
    bench = bench_on(emulator, config, rows, tunings={rows: tuning}, types=types_of("Q4_K"))
    assert max(one.config.shared for one in bench.launches(rows)) <= shared
    check_cases(bench, checks.cases(bench, rows), slice(1, 4, 2))


def test_how_matrices_are_packed() -> None:
    qkv = packing("layers.0.wqkv", ("Q4_K", "Q4_K", "Q6_K"), (64, 16, 16), 512)
    assert qkv == (Part("Q4_K", 40), Part("Q6_K", 8))
    assert packing("layers.0.wqkv", ("Q8_0", "F16", "Q8_0"), (64, 16, 16), 512) is None
    # Parts whose pairs do not fill the tiles of 8 stay apart.
    apart = packing("layers.0.wqkv", ("Q8_0",) * 3, (36, 12, 12), 512)
    assert apart == (Part("Q8_0", 18), Part("Q8_0", 6), Part("Q8_0", 6))
    assert packing("layers.0.w_gate_up", ("Q4_0", "Q4_0"), (96, 96), 512) == (Part("Q4_0", 96),)
    assert packing("layers.0.w_gate_up", ("Q4_0", "Q4_1"), (96, 96), 512) is None
    assert packing("layers.0.w_down", ("Q4_0",), (16,), 53248) is None
    assert packing("embed", ("Q6_K",), (257,), 512) == (Part("Q6_K", 129),)
    assert packing("layers.0.w_gate_up", ("IQ4_NL", "Q8_0"), (96, 96), 288) == (Part("Q8_0", 96),)


def test_bytes_are_those_of_the_file() -> None:
    """Rows are whole bricks here, and pairs whole tiles."""
    from ostinato.models.files.dequantise import BLOCK_TYPES

    for kind in FORMATS:
        block = BLOCK_TYPES[kind]
        stored = 2048 * 512 // block.values * block.size
        assert matrix_bytes((Part(kind, 1024),), 512) == stored


def test_places_of_the_parts_of_a_matrix() -> None:
    kinds, rows = ("Q8_0", "Q8_0", "Q4_0"), (64, 32, 32)
    how = packing("layers.0.wqkv", kinds, rows, 256)
    assert how is not None
    found = places(WHOLE, "layers.0.wqkv", how, rows, 256)
    assert [(p.offset, p.first, p.size) for p in found] == [
        (0, 0, 64),
        (0, 64, 64),
        (96 * 272, 0, 64),
    ]


def packed_problem(
    name: str, shape: PackedShape | MatrixShape, product: Product, rows: int
) -> str | None:
    """Why a product with a packed matrix cannot be launched so; None if it can."""
    if isinstance(shape, MatrixShape):
        whole = rows > 1 and shape.slab % (BRICK * shape.split) == 0 and shape.depth % 8 == 0
        why = "a slab is not whole bricks" if shape.warpgroup or not whole else None
        return matrix_problem(name, shape, product, rows) or why
    if rows > 1 or shape.warps > 32 or shape.split > -(-product.inputs // BRICK):
        return f"{shape.split} warps for {product.inputs} inputs, {shape.warps} in all"
    over = shape.shared_bytes(product.inputs) > MAX_SHARED
    return "turns do not fit shared memory" if over else None


def test_a_rule_for_every_shape() -> None:
    """Every warp has inputs, and blocks are not larger than a multiprocessor takes."""
    for hidden in (256, 576, 2048, 3072, 4096, 8192, 16384):
        config = config_of(hidden // 64, 1, 64, inner=2 * hidden, vocabulary=128256)
        for name, product in products_of(config).items():
            for rows, (bits, k_types), clusters in itertools.product(
                (1, 2, 8, 9, 16, 32, 33, 64), ((4, False), (4, True), (8, False)), (True, False)
            ):
                how: Any = {"bits": bits, "k_types": k_types, "clusters": clusters}
                shape = packed_shape(name, product, rows, **how)
                assert packed_problem(name, shape, product, rows) is None
                assert name != "head" or rows == 1 or shape.block_pairs % 32 == 0


@pytest.mark.parametrize("bricks", range(1, 65))
def test_few_warps_or_few_bricks_of_a_warp_leave_room_for_the_next_kernel(bricks: int) -> None:
    """All bricks of a row have a warp, whichever type they have."""
    config = config_of(32, 8, 64, inner=256 * bricks, vocabulary=128256)
    down = products_of(config)["down"]
    for bits, k_types in ((4, False), (4, True), (8, False)):
        shape = packed_shape("down", down, bits=bits, k_types=k_types)
        assert isinstance(shape, PackedShape)
        span = -(-bricks // shape.split)
        assert shape.depth <= span and packed_problem("down", shape, down, 1) is None
        if 16 < bricks <= 32 and bits == 4:
            assert shape.depth == (1 if k_types else span) and (k_types or shape.warps <= 8)
