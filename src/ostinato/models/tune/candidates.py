"""Candidates of a sweep: launch shapes that are legal for a model, the promising ones first.  Pure.

`cuda.legal` checks what the kernels support; `tune.search` measures the candidates.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, replace
from typing import Any

from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.legal import (
    VECTOR_LOADS,
    attention_problem,
    matrix_problem,
    vector_problem,
    vector_steps,
)
from ostinato.models.cuda.shapes import (
    CLUSTER_PASSES,
    CLUSTER_ROWS,
    MAX_SHARED,
    REGISTERS,
    START_NEXT,
    TILE_POSITIONS,
    AttentionShape,
    MatrixShape,
    Product,
    Shape,
    Tuning,
    VectorShape,
    attends_in_tiles,
    block_shapes,
    in_tiles,
    largest_divisor,
    power_of_two_from,
    products_of,
    slab_granule,
    warpgroup_shape,
    without_warpgroups,
)


def product_shapes(
    config: LlamaConfig,
    name: str,
    rows: int,
    multiprocessors: int,
    *,
    clusters: bool = False,
    warpgroups: bool = False,
    shared: int = MAX_SHARED,
) -> tuple[Shape, ...]:
    """Returns promising shapes of a product ("qkv", "output", …), ordered by a rough cost; but one
    of each cut comes before the second of any, since shapes of one cut are about equally fast.

    `clusters`: True if the device has them; `warpgroups`: True if warpgroups compute the products;
    `shared`: bytes of shared memory that a block may have.
    """
    product = products_of(config)[name]
    made: list[tuple[float, Shape]] = []
    if not in_tiles(config, rows, shared):
        for shape in _vectors(product, multiprocessors):
            if vector_problem(shape, product, shared) is None:
                made.append((_vector_cost(shape, product, multiprocessors), shape))
    else:
        several = _matrices(product, multiprocessors, clusters)
        for matrix in _warpgroups(product, multiprocessors) if warpgroups else several:
            if matrix_problem(name, matrix, product, rows, shared) is None:
                made.append((_matrix_cost(matrix, product, rows, multiprocessors), matrix))
    seen: Counter[tuple[int, ...]] = Counter()
    ranked: list[tuple[int, Shape]] = []
    for _, one in sorted(made, key=lambda pair: pair[0]):
        # The first fields are the cut, how the product is divided; the others order the loads.
        cut = astuple(one)[: 4 if isinstance(one, VectorShape) else 3]
        ranked.append((seen[cut], one))
        seen[cut] += 1
    return tuple(one for _, one in sorted(ranked, key=lambda pair: pair[0]))


def _vectors(product: Product, multiprocessors: int) -> Iterator[VectorShape]:
    chunks = product.inputs // 8
    small = product.pairs * product.inputs * 4 < 40e3 * multiprocessors
    for lanes, split, pairs, warps in itertools.product(
        (8, 16, 32), (1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 3, 4, 6, 8, 12, 16)
    ):
        if warps % split:
            continue
        one = VectorShape(lanes, split, pairs, warps)
        steps = vector_steps(one, product)
        if not VECTOR_LOADS[0] <= steps * pairs * 2 or steps * lanes * split > 1.35 * chunks:
            continue
        blocks = -(-product.pairs // one.block_pairs)
        if blocks < multiprocessors // 2 and product.pairs >= 512:
            continue
        yield one
        if small or warps < 4:
            continue
        # Numbers of turns that leave one, two or three blocks resident on each multiprocessor.
        for resident in (1, 2, 3):
            turns = -(-blocks // (resident * multiprocessors))
            if turns > 1 and lanes > 8:
                for ahead in sorted({0, min(2, turns - 1)}):
                    yield replace(one, turns=turns, ahead=ahead)


def _vector_cost(shape: VectorShape, product: Product, multiprocessors: int) -> float:
    """Returns a cost without a unit, from idle lanes, idle multiprocessors, repeated reads of the
    inputs, and bytes in flight."""
    chunks = product.inputs // 8
    waste = vector_steps(shape, product) * shape.lanes * shape.split / chunks
    blocks = -(-product.pairs // shape.block_pairs)
    # Warps that fit on a multiprocessor, by registers.
    warps = min(48.0, REGISTERS / 32 / (48 + 8 * vector_steps(shape, product) * shape.pairs))
    resident = max(1.0, warps // shape.warps)
    waves = blocks / (multiprocessors * resident)
    last = -(-blocks // multiprocessors) * multiprocessors / blocks if waves < 4 else 1.0
    again = blocks * product.inputs * 4 / (product.pairs * product.inputs * 4)
    under_way = min(resident, blocks / multiprocessors) * shape.warps * 512
    under_way *= 2 * vector_steps(shape, product) * shape.pairs
    hops = 0.02 * math.log2(shape.split) + 0.02 * math.log2(32 / shape.lanes) + 0.01 * shape.ahead
    return waste * last * (1 + 0.4 * again) * (1 + 16e3 / under_way) * (1 + hops)


def _matrices(product: Product, multiprocessors: int, clusters: bool) -> Iterator[MatrixShape]:
    for tiles, split, blocks_k, steps in itertools.product(
        (1, 2, 4, 8, 16), (1, 2, 4, 8, 16), (1, 2, 4, 8), (2, 3, 4, 5, 6, 8, 10, 12)
    ):
        blocks = -(-product.pairs // (8 * tiles)) * blocks_k
        slab = math.lcm(32 * split * steps, slab_granule(split))
        slabs = -(-product.inputs // slab)
        if not 4 <= tiles * split <= 16 or blocks < multiprocessors // 4:
            continue
        # Limits the padding past the inputs; more is allowed where a block has only one slab, since
        # no other slab waits for it.
        each = -(-slabs // blocks_k)
        if each * blocks_k * slab > (1.35 if each > 1 else 1.8) * product.inputs:
            continue
        for depth in {largest_divisor(slab // (32 * split), most) for most in (4, 6, 8)}:
            for ring in (2, 3, 4, 6):
                if ring <= max(2, -(-slabs // blocks_k) + 1):
                    cluster = blocks_k if clusters else 1
                    one = MatrixShape(tiles, split, blocks_k, slab, depth, cluster, ring)
                    yield one
                    if blocks <= multiprocessors:
                        yield replace(one, alone=1)


def _warpgroups(product: Product, multiprocessors: int) -> Iterator[MatrixShape]:
    """Yields shapes for compute capability 9.0, which has clusters too."""
    for tiles, split, blocks_k, (slab, ring) in itertools.product(
        (4, 8), (1, 2), (1, 2, 4, 8), ((64, 4), (64, 5), (64, 6), (64, 8), (128, 3), (128, 4))
    ):
        blocks = -(-product.pairs // (8 * tiles)) * blocks_k
        if blocks < multiprocessors // 4 or slab * blocks_k > product.inputs:
            continue
        # A ring with two slabs more than a block reads is never full.
        if ring > 4 and slab * blocks_k * (ring - 2) >= product.inputs:
            continue
        yield MatrixShape(tiles, split, blocks_k, slab, 1, blocks_k, ring, warpgroup=1)


def _matrix_cost(shape: MatrixShape, product: Product, rows: int, multiprocessors: int) -> float:
    """Returns a cost without a unit, from idle multiprocessors, inputs read by every block, waits
    for inputs, and bytes in flight.  For products that fit the registers it is in microseconds,
    from warps that copy inputs or delay the next kernel, waits for slabs and weights, and the
    products of a warp and sums of a thread (a fit to 950 shapes on an H100; docs/log.md, "What
    searches found")."""
    groups = -(-product.pairs // shape.block_pairs)
    blocks = groups * shape.blocks_k
    slabs = -(-product.inputs // (shape.blocks_k * shape.slab))
    if product.fits_registers(multiprocessors) and not shape.warpgroup:
        steps = -(-product.inputs // (32 * shape.split * shape.blocks_k))
        cost = 0.6 * blocks * shape.tiles * shape.split / (16 * multiprocessors)
        cost += slabs - 1 + 0.02 * steps + 0.05 * max(0, steps - shape.depth)
        cost += 0.15 * -(-rows // 8) / (4 * shape.split) + 0.15 * (shape.blocks_k > 1)
        return cost + 0.2 * (not shape.alone and blocks <= multiprocessors)
    fill = max(1.0, multiprocessors / blocks)
    waves = -(-blocks // multiprocessors) * multiprocessors / blocks if blocks > 64 else 1.0
    inputs = rows * groups / (product.pairs * 2)
    partial = 0.1 * (shape.blocks_k > 1) - 0.05 * (shape.cluster > 1)
    held = shape.tiles * shape.split * shape.depth * 1024
    if shape.warpgroup:
        held = shape.tiles * 32 * shape.slab * (shape.ring - 2)
    under_way = held * min(2.0, blocks / multiprocessors)
    loads = 1 + 16e3 / under_way
    return math.sqrt(fill) * min(waves, 2.0) * (1 + 0.3 * inputs + partial + 0.1 * slabs) * loads


def attention_shapes(
    config: LlamaConfig, rows: int, *, clusters: bool = False, shared: int = MAX_SHARED
) -> tuple[AttentionShape, ...]:
    """Returns promising shapes of the attention, first those that read some 64 or 128 positions at
    a time.

    `clusters`: True if the device has them; `shared`: bytes of shared memory that a block may have.
    Where possible, blocks share the work of all rows, or a row has a cluster: a sweep times rows of
    one length, and must not choose a shape that is slow for rows of very different lengths.
    `for_context` then sets the number of blocks a row.
    """
    group, blocks = config.heads // config.kv_heads, rows * config.heads
    tiled = attends_in_tiles(config, rows, shared)
    each = TILE_POSITIONS if tiled else 32 // power_of_two_from(config.head_size // 8)
    usual = 128 if tiled else 64
    ways = [] if tiled else [(8, 1), (16, 1), (32, 1)] + [(1, 1)] * (rows > 1)
    if clusters and (rows <= CLUSTER_ROWS or not tiled):
        ways = [(8, 8), (4, 4), (16, 8), (32, 8), *ways]
        ways += [(2, 2), (4, 2), (8, 2)] * (rows > 1)
    made: list[AttentionShape] = []
    for queries in (q for q in range(1, 9) if group % q == 0):
        for warps, steps in itertools.product((2, 4, 8, 16), (1, 2, 4, 8)):
            for splits, cluster in ways:
                passes = CLUSTER_PASSES if cluster > 1 else 1
                made.append(AttentionShape(queries, warps, steps, splits, cluster, passes))
            for share in (512, 1024, 2048) if tiled else ():
                passes = max(1, share // (warps * steps * each))
                shape = AttentionShape(queries, warps, steps, 1, 1, passes)
                all_of_it = (replace(shape, resident=n) for n in (8, 6, 4, 3, 2, 1))
                legal = (
                    one for one in all_of_it if not attention_problem(one, config, rows, shared)
                )
                made.extend(itertools.islice(legal, 1))
    promising = [
        shape
        for shape in dict.fromkeys(made)
        if attention_problem(shape, config, rows, shared) is None
        and 16 <= shape.warps * shape.steps * each <= 512
        and blocks // shape.queries * shape.splits <= 4096
    ]

    def distance(shape: AttentionShape) -> float:
        return abs(math.log2(shape.warps * shape.steps * each / usual))

    return tuple(sorted(promising, key=distance))


def block_variants(tuning: Tuning, config: LlamaConfig, multiprocessors: int) -> tuple[Tuning, ...]:
    """Returns variants of the tuning with a layer's attention as one launch, and as three."""
    if tuning.tiles:
        return ()
    made = block_shapes(config, multiprocessors, tuning.shared)
    return tuple(replace(tuning, block=shape) for shape in (*made[:1], None, *made[1:]) if made)


def warpgroup_variants(
    tuning: Tuning, config: LlamaConfig, rows: int, multiprocessors: int
) -> tuple[Tuning, ...]:
    """Returns the variant of the tuning with warpgroups for all products if it has none, or without
    them if it has; for a device with warpgroups."""
    products = products_of(config)
    if rows <= 8 or not all(product.fits_warpgroups for product in products.values()):
        return ()
    made: dict[str, Any] = {
        name: without_warpgroups(name, tuning, product, rows, multiprocessors)
        if tuning.warpgroups
        else warpgroup_shape(name, product, rows, multiprocessors)
        for name, product in products.items()
    }
    return (replace(tuning, **made),)


def start_variants(tuning: Tuning) -> tuple[Tuning, ...]:
    """Returns variants with the same shapes but other points at which the next kernel may start,
    and one without programmatic launch."""
    made = [replace(tuning.with_start(where), programmatic=True) for where in START_NEXT]
    # Then the attention may read the cache before its wait, and `sample` its row.
    late = dict.fromkeys(("norm_qkv_rope", "norm_rope", "head", "rounded_head"), "AFTER_WAIT")
    early = replace(made[0], start_next={**made[0].start_next, **late})
    return (*made, early, replace(tuning, programmatic=False))
