"""What a sweep may try: shapes that are legal for a model, the promising ones first.  Pure.

`problems_of` is the one place that knows what the kernels can be compiled for and launched with; a
tuning from a file is held to it as well.  Not here: how fast anything is (`tune.sweep`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.block import block_problem, block_shapes
from ostinato.models.cuda.shapes import (
    COUNTER_BYTES,
    PRODUCTS,
    START_NEXT,
    STARTING,
    AttentionShape,
    MatrixShape,
    Product,
    Shape,
    Tuning,
    VectorShape,
    power_of_two_from,
    products_of,
)

__all__ = [
    "attention_shapes",
    "block_variants",
    "expected_gains",
    "problems_of",
    "product_shapes",
    "start_variants",
]

_MAX_SHARED = 160 * 1024
"""Bytes of shared memory of a block; an H100 has 227 KiB, an A100 163."""
_MAX_STATIC = 46 * 1024
_REGISTERS = 1 << 16
_BEFORE_THREE = 8
"""Shapes of the one launch that are tried before the three launches."""
_VECTOR_LOADS = (4, 20)
"""16-byte loads that a thread of matvec.cu has under way: fewer do not fill the memory's latency,
more do not fit its registers."""


# ------------------------------------------------------------------------------------------- legal


def problems_of(
    config: LlamaConfig, rows: int, tuning: Tuning, *, clusters: bool = True
) -> tuple[str, ...]:
    """Why the kernels cannot be compiled or launched so, in words; empty if they can.

    Takes whatever a file may hold: values of a wrong type are said, too.  `clusters`: whether the
    device has them.
    """
    found = []
    for name, product in products_of(config).items():
        shape = getattr(tuning, name)
        if rows == 1 and isinstance(shape, VectorShape):
            said = _vector_problem(shape, product)
        elif rows > 1 and isinstance(shape, MatrixShape):
            said = _matrix_problem(name, shape, product, rows)
        else:
            said = f"{type(shape).__name__} is not for {rows} rows"
        if said:
            found.append(f"{name}: {said}")
    said = _attention_problem(tuning.attention, config)
    if not said and tuning.attention.cluster > 1 and not clusters:
        said = f"clusters of {tuning.attention.cluster}, which this device does not have"
    if said:
        found.append(f"attention: {said}")
    if tuning.block is not None:
        said = block_problem(tuning.block, config)
        if rows > 1 or not clusters:
            said = f"for one row and a device with clusters, not {rows} rows"
        if said:
            found.append(f"block: {said}")
    for kernel, where in tuning.start_next.items():
        if kernel not in STARTING or where not in START_NEXT:
            found.append(f"start_next: {kernel!r} at {where!r}")
    programmatic: object = tuning.programmatic
    if not isinstance(programmatic, bool):
        found.append(f"programmatic is {programmatic!r}")
    return tuple(found)


def _not_whole(shape: Shape | AttentionShape, least: dict[str, int]) -> str | None:
    for name in type(shape).__dataclass_fields__:
        value: object = getattr(shape, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least.get(name, 1):
            return f"{name} is {value!r}"
    return None


def _vector_problem(shape: VectorShape, product: Product) -> str | None:
    s = shape
    wrong = _not_whole(s, {"ahead": 0})
    if wrong:
        return wrong
    if s.lanes not in (2, 4, 8, 16, 32) or 2 * s.pairs > s.lanes:
        return f"{s.pairs} pairs for {s.lanes} lanes"
    if s.warps > 32 or s.warps % s.split:
        return f"{s.warps} warps in teams of {s.split}"
    if s.turns > 1 << 14 or s.ahead >= s.turns:
        return f"{s.ahead} turns ahead of {s.turns}"
    loads = _vector_steps(s, product) * s.pairs * 2
    fixed = 48 if s.turns == 1 else 72  # with turns, some of two turns' weights are there
    if loads > _VECTOR_LOADS[1] or (fixed + 4 * loads) * 32 * s.warps > _REGISTERS:
        return f"{loads} loads a thread in {s.warps} warps do not fit the registers"
    if 2 * (product.inputs // 8 + 12) * 16 > _MAX_SHARED:
        return f"{product.inputs} inputs do not fit shared memory"
    return None


def _vector_steps(shape: VectorShape, product: Product) -> int:
    return -(-(product.inputs // 8) // (shape.lanes * shape.split))


def _matrix_problem(name: str, shape: MatrixShape, product: Product, rows: int) -> str | None:
    s = shape
    wrong = _not_whole(s, {})
    if wrong:
        return wrong
    warps, padded = s.tiles * s.split, -(-rows // 8) * 8
    if warps > 16:
        return f"{s.tiles} tiles of {s.split} warps are more than 16 warps"
    if s.slab % (32 * s.split) or s.slab % 64:
        return f"a slab of {s.slab} is not whole steps of {s.split} warps"
    if s.slab // (32 * s.split) > 8:
        return f"a slab of {s.slab} does not fit the registers of {s.split} warps"
    if max(padded * (s.slab + 32) * 2, warps * 16 * padded * 4) > _MAX_SHARED:
        return f"a slab of {s.slab} does not fit shared memory with {rows} rows"
    if product.normed and s.blocks_k > 1:
        return "a norm needs whole rows"
    if s.blocks_k > 64 or -(-product.pairs // s.block_pairs) > COUNTER_BYTES // 4:
        return f"{s.blocks_k} blocks for the inputs"
    if name == "head" and s.tiles % 4:
        return f"{s.tiles} tiles; the head's keys need a multiple of 4"
    return None


def _attention_problem(shape: AttentionShape, config: LlamaConfig) -> str | None:
    s = shape
    wrong = _not_whole(s, {})
    if wrong:
        return wrong
    if config.heads // config.kv_heads % s.queries or s.queries > 8:
        return f"{s.queries} queries of {config.heads // config.kv_heads} in a block"
    if s.warps > 16 or s.steps > 8 or s.splits > 128:
        return f"{s.warps} warps, {s.steps} steps, {s.splits} splits"
    if s.cluster > 8 or s.splits % s.cluster:
        return f"{s.splits} splits in clusters of {s.cluster}"
    registers = 34 + 22 * s.queries + 7 * s.steps + 2 * s.queries * s.steps
    if registers > 255 or s.queries * s.steps > 24 or registers * 32 * s.warps > _REGISTERS:
        return f"{s.queries} queries and {s.steps} steps in {s.warps} warps do not fit"
    if (s.warps + 1) * s.queries * (config.head_size + 2) * 4 > _MAX_STATIC:
        return f"{s.queries} queries in {s.warps} warps do not fit shared memory"
    return None


# ----------------------------------------------------------------------------------------- to try


def product_shapes(
    config: LlamaConfig, name: str, rows: int, multiprocessors: int
) -> tuple[Shape, ...]:
    """Shapes of a product ("qkv", "output", …) worth a try, by a rough cost, the least first."""
    product = products_of(config)[name]
    made: list[tuple[float, Shape]] = []
    if rows == 1:
        for shape in _vectors(product, multiprocessors):
            if _vector_problem(shape, product) is None:
                made.append((_vector_cost(shape, product, multiprocessors), shape))
    else:
        for matrix in _matrices(product):
            if _matrix_problem(name, matrix, product, rows) is None:
                made.append((_matrix_cost(matrix, product, rows, multiprocessors), matrix))
    return tuple(shape for _, shape in sorted(made, key=lambda pair: pair[0]))


def _vectors(product: Product, multiprocessors: int) -> Iterator[VectorShape]:
    chunks = product.inputs // 8
    small = product.pairs * product.inputs * 4 < 40e3 * multiprocessors
    for lanes, split, pairs, warps in itertools.product(
        (8, 16, 32), (1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 3, 4, 6, 8, 12, 16)
    ):
        if warps % split:
            continue
        one = VectorShape(lanes, split, pairs, warps)
        steps = _vector_steps(one, product)
        if not _VECTOR_LOADS[0] <= steps * pairs * 2 or steps * lanes * split > 1.35 * chunks:
            continue
        blocks = -(-product.pairs // one.block_pairs)
        if blocks < multiprocessors // 2 and product.pairs >= 512:
            continue
        yield one
        if small or warps < 4:
            continue
        # So many turns that one, two or three blocks stand on a multiprocessor.
        for resident in (1, 2, 3):
            turns = -(-blocks // (resident * multiprocessors))
            if turns > 1 and lanes > 8:
                for ahead in sorted({0, min(2, turns - 1)}):
                    yield replace(one, turns=turns, ahead=ahead)


def _vector_cost(shape: VectorShape, product: Product, multiprocessors: int) -> float:
    """Of no unit: idle lanes, idle multiprocessors, how often the input is read, how many bytes
    are under way."""
    chunks = product.inputs // 8
    waste = _vector_steps(shape, product) * shape.lanes * shape.split / chunks
    blocks = -(-product.pairs // shape.block_pairs)
    # That fit a multiprocessor, by registers.
    warps = min(48.0, _REGISTERS / 32 / (48 + 8 * _vector_steps(shape, product) * shape.pairs))
    resident = max(1.0, warps // shape.warps)
    waves = blocks / (multiprocessors * resident)
    last = -(-blocks // multiprocessors) * multiprocessors / blocks if waves < 4 else 1.0
    again = blocks * product.inputs * 4 / (product.pairs * product.inputs * 4)
    under_way = min(resident, blocks / multiprocessors) * shape.warps * 512
    under_way *= 2 * _vector_steps(shape, product) * shape.pairs
    hops = 0.02 * math.log2(shape.split) + 0.02 * math.log2(32 / shape.lanes) + 0.01 * shape.ahead
    return waste * last * (1 + 0.4 * again) * (1 + 16e3 / under_way) * (1 + hops)


def _matrices(product: Product) -> Iterator[MatrixShape]:
    for tiles, split, blocks_k, slab in itertools.product(
        (1, 2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 4, 8, 16), (64, 128, 256, 512, 1024)
    ):
        if tiles * split < 4 or product.inputs < blocks_k * slab // 2:
            continue
        yield MatrixShape(tiles, split, blocks_k, slab)


def _matrix_cost(shape: MatrixShape, product: Product, rows: int, multiprocessors: int) -> float:
    """Of no unit: idle multiprocessors, and inputs read again by every block."""
    blocks = -(-product.pairs // shape.block_pairs) * shape.blocks_k
    fill = max(1.0, multiprocessors / blocks)
    waves = -(-blocks // multiprocessors) * multiprocessors / blocks if blocks > 64 else 1.0
    inputs = rows * 4 * -(-product.pairs // shape.block_pairs) / (product.pairs * 4)
    partial = 0.1 * (shape.blocks_k > 1)
    return math.sqrt(fill) * min(waves, 2.0) * (1 + 0.3 * inputs + partial)


def attention_shapes(
    config: LlamaConfig, rows: int, *, clusters: bool = False
) -> tuple[AttentionShape, ...]:
    """Shapes of the attention worth a try, those that read some 64 positions at once first.

    `clusters`: whether the device has them.
    """
    group, groups = config.heads // config.kv_heads, 32 // power_of_two_from(config.head_size // 8)
    merging = ((8, 8), (4, 4), (16, 8), (32, 8)) if clusters else ()
    made = (
        AttentionShape(queries, warps, steps, splits, cluster)
        for queries in (q for q in range(1, 9) if group % q == 0)
        for warps in (2, 4, 8, 16)
        for steps in (1, 2, 4, 8)
        for splits, cluster in (*merging, (8, 1), (16, 1), (32, 1))
    )
    blocks = rows * config.heads
    legal = [
        shape
        for shape in made
        if _attention_problem(shape, config) is None
        and 16 <= shape.warps * shape.steps * groups <= 512
        and blocks // shape.queries * shape.splits <= 4096
    ]
    return tuple(sorted(legal, key=lambda s: abs(math.log2(s.warps * s.steps * groups / 64))))


def block_variants(tuning: Tuning, config: LlamaConfig, multiprocessors: int) -> tuple[Tuning, ...]:
    """The same tuning with a layer's attention as one launch, and as three."""
    made: list[Tuning] = [
        replace(tuning, block=shape) for shape in block_shapes(config, multiprocessors)
    ]
    if made:
        made.insert(_BEFORE_THREE, replace(tuning, block=None))
    return tuple(made)


def start_variants(tuning: Tuning, kernel: str | None = None) -> tuple[Tuning, ...]:
    """The same shapes, with other places where the next kernel may start: of one kernel, or of
    all, and then also without programmatic launch."""
    if kernel is None:
        made = [replace(tuning.with_start(where), programmatic=True) for where in START_NEXT]
        # The attention may read the cache before its wait then.
        first = made[0]
        late = {**first.start_next, "norm_qkv_rope": "AFTER_WAIT"}
        return (*made, replace(first, start_next=late), replace(tuning, programmatic=False))
    places: Sequence[str] = [where for where in START_NEXT if where != "NEVER"]
    return tuple(
        replace(tuning, start_next={**tuning.start_next, kernel: where}) for where in places
    )


def expected_gains(config: LlamaConfig) -> tuple[str, ...]:
    """What a sweep should turn to first: the products and "attention", by how much time of a step
    is not the memory's: launches, times a hop and the share of the bytes that is mostly lost."""
    gains = {"attention": config.layers * 1.5}
    for name, product in products_of(config).items():
        launches = 1 if name == "head" else config.layers
        lost = 0.1 if name == "head" else 0.2
        gains[name] = launches * (0.8 + lost * product.pairs * product.inputs * 4 / 3e6)
    assert set(gains) == {"attention", *PRODUCTS.values()}
    return tuple(sorted(gains, key=lambda name: -gains[name]))
