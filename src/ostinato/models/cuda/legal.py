"""The check of launch shapes: whether the CUDA kernels can be compiled and launched so.  Pure.

The sweep tries only shapes that `problems_of` accepts, and a tuning from a file must pass it.
"""

from __future__ import annotations

from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.shapes import (
    COUNTER_BYTES,
    HELD_STEPS,
    MAX_ROWS,
    MAX_SHARED,
    MAX_TURNS,
    MAX_WARPGROUP_SHARED,
    PRODUCTS,
    REGISTERS,
    START_NEXT,
    STARTING,
    STATIC_SHARED,
    AttentionShape,
    MatrixShape,
    Product,
    Tuning,
    VectorShape,
    attends_in_tiles,
    block_problem,
    in_tiles,
    not_whole,
    products_of,
    slab_granule,
)

_OF_LAYERS = {*PRODUCTS.values()} - {"head"}
_MOST_LOADS = 30
"""The most 16-byte loads in flight of a thread of matvec.cu, for which it has registers."""


def problems_of(
    config: LlamaConfig,
    rows: int,
    tuning: Tuning,
    *,
    clusters: bool = True,
    warpgroups: bool = True,
    shared: int = MAX_SHARED,
) -> tuple[str, ...]:
    """Returns the reasons why the kernels cannot be compiled or launched so; empty if they can.

    The tuning's values may be of any type, since they may come from a file; a wrong type is a
    reason too.  `clusters`, `warpgroups`: True if the device has them.  `shared`: bytes of shared
    memory that a block may have (`dynamic_shared`).
    """
    found, tiles = [], in_tiles(config, rows, shared)
    for name, product in products_of(config).items():
        shape = getattr(tuning, name)
        if not tiles and isinstance(shape, VectorShape):
            said = vector_problem(shape, product, shared)
        elif tiles and isinstance(shape, MatrixShape):
            said = matrix_problem(name, shape, product, rows, shared)
            if not said and shape.cluster > 1 and not clusters:
                said = f"a cluster of {shape.cluster} blocks, which this device does not have"
            if not said and shape.warpgroup and not warpgroups:
                said = "a warpgroup, which this device does not have"
        else:
            said = f"{type(shape).__name__} is not for {rows} rows"
        if said:
            found.append(f"{name}: {said}")
    shapes = [getattr(tuning, name) for name in PRODUCTS.values()]
    if rows > 1 and not found and len({one.warpgroup for one in shapes}) > 1:
        found.append("warpgroups make some products; they make all of a step or none")
    said = attention_problem(tuning.attention, config, rows, shared)
    if not said and tuning.attention.cluster > 1 and not clusters:
        said = f"clusters of {tuning.attention.cluster}, which this device does not have"
    if said:
        found.append(f"attention: {said}")
    if tuning.block is not None:
        said = block_problem(tuning.block, config, shared)
        if tiles or not clusters:
            said = f"for one row and a device with clusters, not {rows} rows"
        if said:
            found.append(f"block: {said}")
    for kernel, where in tuning.start_next.items():
        if kernel not in STARTING or where not in START_NEXT:
            found.append(f"start_next: {kernel!r} at {where!r}")
    for name, (target, _) in tuning.prefetch.items():
        if not {name, target} <= _OF_LAYERS:
            found.append(f"prefetch: {name!r} of {target!r}")
    programmatic: object = tuning.programmatic
    if not isinstance(programmatic, bool):
        found.append(f"programmatic is {programmatic!r}")
    return tuple(found)


def vector_problem(shape: VectorShape, product: Product, shared: int = MAX_SHARED) -> str | None:
    s = shape
    wrong = not_whole(s, ahead=0)
    if wrong:
        return wrong
    if s.lanes not in (2, 4, 8, 16, 32) or 2 * s.pairs > s.lanes:
        return f"{s.pairs} pairs for {s.lanes} lanes"
    if s.warps > 32 or s.warps % s.split:
        return f"{s.warps} warps in teams of {s.split}"
    if s.turns > MAX_TURNS or s.ahead >= s.turns:
        return f"{s.ahead} turns ahead of {s.turns}"
    loads = -(-(product.inputs // 8) // (s.lanes * s.split)) * s.pairs * 2
    fixed = 48 if s.turns == 1 else 72  # with turns, the registers hold weights of two turns
    if loads > _MOST_LOADS or (fixed + 4 * loads) * 32 * s.warps > REGISTERS:
        return f"{loads} loads a thread in {s.warps} warps do not fit the registers"
    if s.shared_bytes(product.inputs) + s.static_bytes > shared + STATIC_SHARED:
        return f"{product.inputs} inputs do not fit shared memory"
    return None


def matrix_problem(
    name: str, shape: MatrixShape, product: Product, rows: int, shared: int = MAX_SHARED
) -> str | None:
    s = shape
    wrong = not_whole(s, depth=0, alone=0, warpgroup=0)
    if wrong:
        return wrong
    warps = s.tiles * s.split
    if warps > 16:
        return f"{s.tiles} tiles of {s.split} warps are more than 16 warps"
    if s.slab % slab_granule(s.split):
        return f"a slab of {s.slab} is not whole steps of {s.split} warps"
    steps = s.slab // (32 * s.split)
    depth = s.depth or steps
    if s.warpgroup > 1 or (s.warpgroup and (s.tiles % 4 or depth != 1 or s.ring < 3)):
        return f"warpgroup {s.warpgroup} with {s.tiles} tiles, depth {depth}, {s.ring} slabs"
    if depth > 16 or depth * warps > HELD_STEPS:
        return f"the weights of {depth} steps do not fit the registers of {warps} warps"
    if steps % depth:
        return f"{steps} steps of a slab are not whole times {depth}"
    if s.cluster not in (1, s.blocks_k) or s.cluster > 8:
        return f"a cluster of {s.cluster} blocks, where {s.blocks_k} share the inputs"
    if s.shared_bytes(rows, shared) > (MAX_WARPGROUP_SHARED if s.warpgroup else shared):
        return f"a slab of {s.slab} does not fit shared memory with {rows} rows"
    if s.warpgroup and product.inputs % s.slab:
        return f"{product.inputs} inputs are not whole slabs of {s.slab}, as a warpgroup needs"
    if s.warpgroup and not product.fits_warpgroups:
        return f"a matrix of {product.nbytes} bytes, which is too large for a warpgroup"
    if s.ring == 1 or s.ring > 8 or s.alone > 1:
        return f"a ring of {s.ring} slabs, alone {s.alone}"
    if s.blocks_k > 64 or -(-product.pairs // s.block_pairs) > COUNTER_BYTES // 4:
        return f"{s.blocks_k} blocks for the inputs"
    if name == "head" and (s.tiles % 4 or s.blocks_k > 1):
        return f"{s.tiles} tiles; the head's keys need a multiple of 4, and all inputs in a block"
    return None


def attention_problem(
    shape: AttentionShape, config: LlamaConfig, rows: int, shared: int = MAX_SHARED
) -> str | None:
    s, tiled = shape, attends_in_tiles(config, rows, shared)
    wrong = not_whole(s, resident=0)
    if wrong:
        return wrong
    if config.heads // config.kv_heads % s.queries or s.queries > 8:
        return f"{s.queries} queries of {config.heads // config.kv_heads} in a block"
    if s.warps > 16 or s.steps > 8 or s.splits > 128 or s.passes > 128:
        return f"{s.warps} warps, {s.steps} steps, {s.splits} splits, {s.passes} passes"
    if s.cluster > 8 or s.splits % s.cluster:
        return f"{s.splits} splits in clusters of {s.cluster}"
    registers = _attention_registers(s, config, tiled)
    if registers > 255 or registers * 32 * s.warps * max(1, s.resident) > REGISTERS:
        return f"{s.queries} queries and {s.steps} steps in {s.warps} warps do not fit"
    if s.shared_bytes(config) > shared:
        return f"{s.queries} queries in {s.warps} warps do not fit shared memory"
    if s.resident and (not tiled or s.cluster > 1 or (s.splits > 1 and rows > MAX_ROWS)):
        return f"blocks that share the work of {rows} rows, in clusters of {s.cluster}"
    if s.shares_rows and rows * config.heads // s.queries >= COUNTER_BYTES // 4:
        return f"{rows} rows of {config.heads} heads, which are more than there are counters"
    return None


def _attention_registers(shape: AttentionShape, config: LlamaConfig, tiled: bool) -> int:
    """Returns an upper bound on a thread's registers: keys, values, queries, sums and the rest."""
    queries, steps = shape.queries, shape.steps
    if not tiled:
        held = 22 * queries + 7 * steps + 2 * queries * steps
        return 34 + held if queries * steps <= 24 else 256
    keys, values = -(-config.head_size // 32), -(-config.head_size // 64)
    held = steps * (8 * keys + 16 * values + 8) + 8 * keys + 32 * values
    return held + (36 if values == 1 else 68)
