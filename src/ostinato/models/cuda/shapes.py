"""Launch shapes of the decoder's CUDA kernels, and the rules that choose them.  Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ostinato.errors import UnsupportedModelError
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.bricks import BRICK

MAX_ROWS = 64
"""The most rows of one step whose products our kernels compute."""
COUNTER_BYTES = 1 << 16
"""Bytes of the counters at the start of the workspace (common.cuh)."""
PIECE_HEAD_SIZE = 128
"""The largest head size of piece_attention.cu."""
START_NEXT = ("AT_START", "AFTER_WAIT", "AFTER_INPUT", "BEFORE_OUTPUT", "NEVER")
"""The points at which a kernel may let the next one start (common.cuh)."""

PRODUCTS = {
    "norm_qkv_rope": "qkv",
    "output_residual": "output",
    "norm_gate_up": "gate_up",
    "down_residual": "down",
    "head": "head",
}
"""The kernels that multiply with weights, each with the name of its shape in a tuning."""
PRODUCT_CALLS = {**PRODUCTS, "norm_qkv": "qkv"}
"""PRODUCTS, and the kernel that replaces `norm_qkv_rope` in a model that norms heads."""
ROUNDED_CALLS = {
    "norm_qkv_rope": "rounded_qkv_rope",
    "norm_qkv": "rounded_qkv",
    "output_residual": "rounded_output",
    "norm_gate_up": "rounded_gate_up",
    "down_residual": "rounded_down",
    "head": "rounded_head",
}
"""The kernels for several rows, with rounded inputs, that replace each call (rounded.cu)."""

_MAX_HEAD_SIZE = 256
REGISTERS = 1 << 16
"""The 32-bit registers of a multiprocessor."""
MAX_SHARED = 160 * 1024
"""The most bytes of dynamic shared memory of a block."""
STATIC_SHARED = 3 * 1024
"""The most bytes of static shared memory of a kernel that has dynamic shared memory too."""
LEAST_SHARED = 99 * 1024
"""Bytes of static and dynamic shared memory that a block may have on compute capability 8.6, 8.9
and 12.0.  No other from 8.0 on has less; an A100 has 163 KiB, an H100 227."""
MAX_TURNS = 1 << 14
"""The most turns of a block of matvec.cu."""
MAX_WARPGROUP_SHARED = 216 * 1024
"""The most bytes of dynamic shared memory of a block with warpgroups."""
WARPGROUP_SHARED = 228 * 1024
"""Bytes of shared memory of a multiprocessor with warpgroups."""
_MORE_THAN_HALF = 116 * 1024
"""Bytes of shared memory that no multiprocessor has for two blocks at once."""
_HALF = 108 * 1024
"""Bytes of dynamic shared memory that a multiprocessor with warpgroups has for two blocks at once.
"""
_MORE_THAN_QUARTER = 57 * 1024
"""Bytes of shared memory that no multiprocessor has for four blocks at once."""
_SOON_OVER = (8 << 20, 64 << 20)
"""Bytes of matrices, least and most, whose short products for few rows use as many warps as the
registers allow."""
_FEW_ROWS = 16
"""The most rows of a step that prefetches weights, starts kernels early, has blocks of 16 warps."""
_PREFETCH_FROM = 32 << 20
"""Bytes of gate and up from which on products prefetch the weights of later ones."""
_BLOCK_WEIGHTS = 128 * 1024
"""The most bytes of weights that a block of attention_block.cu holds in registers.  More leave no
room for other kernels beside it, and reading them takes longer than the saved launches."""
_DIGIT_BYTES = 4 * BRICK + 64 + 80
"""Bytes of the digits of 256 inputs (packed.cuh)."""
CLUSTER_ROWS = 16
"""The most rows of a step whose attention uses clusters."""
_EVEN_CONTEXT = 8192
"""The most positions of a sequence for which few rows use clusters: longer rows may be too uneven.
"""
_MOST_SHARES = 64
"""The most parts of a row if blocks share the work of all rows."""
CLUSTER_PASSES = 4
"""Passes of a block of a cluster before its row gets another cluster, which costs more."""
TILE_POSITIONS = 16
"""Positions of a step of tile_softmax.cuh."""
HELD_STEPS = 128
"""Steps, of 1 KB of weights each, that the registers of a multiprocessor's warps can hold."""
_BLOCK_LANES = (4, 8, 16, 32)
_OTHERS = ("norm_rope", "embed", "attention", "attention_block", "sample")
STARTING = (*PRODUCT_CALLS, *ROUNDED_CALLS.values(), "norm_rows", *_OTHERS)
"""The kernels of a step, for each of which a tuning may set `start_next`."""


# ------------------------------------------------------------------------------------------ shapes


@dataclass(frozen=True, slots=True)
class VectorShape:
    """The shape of a product in matvec.cu: `lanes` lanes in each of `split` warps share `pairs`
    pairs of outputs; a block of `warps` warps takes `turns` turns, each with other pairs.  Weights
    of `ahead` turns after the first are prefetched into L2 before the wait for the last kernel."""

    lanes: int
    split: int
    pairs: int
    warps: int
    turns: int = 1
    ahead: int = 0

    @property
    def turn_pairs(self) -> int:
        return self.warps // self.split * (32 // self.lanes) * self.pairs

    @property
    def static_bytes(self) -> int:
        """Bytes of static shared memory of a block: sums of one turn or two, squares, keys."""
        sums = self.warps if self.split > 1 else 1
        return 8 * min(2, self.turns) * sums * (32 // self.lanes) * self.pairs + 12 * self.warps

    def shared_bytes(self, inputs: int) -> int:
        """Returns the bytes of dynamic shared memory of a block: the inputs."""
        return 2 * (-(-(inputs // 8) // 8) * 8 + 4) * 16

    @property
    def block_pairs(self) -> int:
        return self.turn_pairs * self.turns


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """The shape of a product in matmul.cuh: a block computes `tiles` tiles of 8 pairs of outputs,
    and `split` warps share the inputs of each; `blocks_k` blocks share the inputs of the product.
    `ring` slabs of `slab` inputs are in shared memory, all but one still being copied.  A warp
    loads weights `depth` steps of 32 inputs before it needs them; 0 for all steps of a slab.
    Blocks that share inputs add their sums in a cluster of `cluster` blocks (compute capability 9.0
    and up), or through the workspace if it is 1.  `alone`: 1 to keep a multiprocessor from having a
    second block of the kernel.  `warpgroup`: 1 if four warps multiply together (compute capability
    9.0 only), with the weights of the slabs in shared memory too; `depth` is then 1, and the inputs
    are whole slabs.  All products of a step use warpgroups or none, since each writes the next
    one's inputs in the layout that it reads; with packed matrices none does."""

    tiles: int
    split: int
    blocks_k: int
    slab: int
    depth: int = 0
    cluster: int = 1
    ring: int = 2
    alone: int = 0
    warpgroup: int = 0

    @property
    def block_pairs(self) -> int:
        return self.tiles * 8

    @property
    def whole_sums(self) -> bool:
        """True if each warp has complete sums, which then need no shared memory."""
        return self.split == 1 and self.blocks_k == 1

    def shared_bytes(self, rows: int, shared: int = MAX_SHARED) -> int:
        """Returns the bytes of dynamic shared memory of a block, which may have `shared`: inputs,
        and later sums in their place."""
        padded = -(-rows // 8) * 8
        later, threads = 0, 32 * self.tiles * self.split
        if not self.whole_sums and (self.split > 1 or self.cluster == 1):
            later += self.split * padded * (self.block_pairs + 2) * 8
        if self.cluster > 1:  # the sums that the cluster's blocks send
            items = self.block_pairs * rows
            later += self.cluster * min(items, -(-items // (self.cluster * threads)) * threads) * 8
        counted = 8 if self.cluster > 1 else 0
        least = min(_MORE_THAN_HALF, shared) - counted if self.alone else 0
        slab = padded * (self.slab + 32) * 2
        if self.warpgroup:  # and a count of 8 bytes
            slab = (self.tiles * 16 + (32 if rows <= 32 else 64)) * self.slab * 2 + 8
        return max(self.ring * slab, later, least) + counted


@dataclass(frozen=True, slots=True)
class PackedShape:
    """The shape of a product of one row with a packed matrix in packed.cuh: a team of `split` warps
    shares the inputs of 8 pairs of outputs; a block of `teams` teams takes `turns` turns, each with
    other pairs; a warp holds `depth` bricks at once.  `resident`: blocks that a multiprocessor must
    have registers for; 0 for the compiler's choice."""

    split: int
    teams: int
    turns: int = 1
    depth: int = 1
    resident: int = 0

    @property
    def warps(self) -> int:
        return self.split * self.teams

    @property
    def block_pairs(self) -> int:
        return 8 * self.teams * self.turns

    def shared_bytes(self, inputs: int) -> int:
        """Returns the bytes of dynamic shared memory of a block: sums, and the inputs' digits."""
        bricks = -(-inputs // BRICK)
        span = -(-bricks // self.split)
        return self.teams * self.turns * self.split * 64 + self.warps * span * _DIGIT_BYTES


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape of attention.cu: a block of `warps` warps computes `queries` query heads of one KV
    head.  A warp loads `steps` groups of positions at once: of 16 positions each on the tensor
    cores (`attends_in_tiles`), else of as many as its lanes hold.

    `splits`: the most blocks for the positions of a row.  `cluster` of these merge through shared
    memory (compute capability 9.0 and up).  `passes`: loads, of all warps at once, that each block
    of a cluster does before the row gets another cluster.  `resident`: blocks of a multiprocessor
    if they share the work of all rows (`shares_rows`); 0 if each part of a row has its own block.
    """

    queries: int
    warps: int
    steps: int
    splits: int
    cluster: int = 1
    passes: int = 1
    resident: int = 0

    @property
    def shares_rows(self) -> bool:
        """True if blocks take parts of any row; never if no row is split."""
        return self.resident > 0 and self.splits > 1

    def shared_bytes(self, config: LlamaConfig) -> int:
        """Returns the bytes of dynamic shared memory of a block: the partial results of its warps
        and of the cluster's blocks."""
        partial = self.queries * (config.head_size + 2) * 4
        return (self.warps + self.cluster) * partial + 8


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The shape of attention_block.cu: a cluster of `cluster` blocks, of `warps` warps each,
    computes `queries` query heads of a KV head.  `lanes` lanes share a pair of rows of the first
    product, `output_lanes` a row of the second; a lane loads `steps` positions at once."""

    queries: int
    warps: int
    lanes: int
    output_lanes: int
    steps: int
    cluster: int = 8

    def units(self, config: LlamaConfig) -> int:
        """Returns the number of clusters, each of which leaves a part of the residual."""
        return config.heads // self.queries

    def shared_bytes(self, config: LlamaConfig) -> int:
        """Returns the bytes of dynamic shared memory of a block: `Shared` in attention_block.cu."""
        c, width = config, self.queries * config.head_size
        halves = sum(-(-(size // 8) // 8) * 8 + 4 for size in (c.hidden, width))
        fresh = (self.queries + 2) * c.head_size
        partials = (self.cluster + self.warps) * self.queries * (c.head_size + 2)
        return 32 * halves + -(-(4 * (fresh + partials + self.warps) + 16) // 16) * 16

    def loads(self, config: LlamaConfig) -> tuple[int, int]:
        """Returns a thread's 16-byte loads of weights, for the first product and for the second."""
        c = config
        pairs = -(-(self.queries + 2) * (c.head_size // 2) // self.cluster)
        rows, width = -(-c.hidden // self.cluster), self.queries * c.head_size
        return (
            2 * -(-pairs * self.lanes // (32 * self.warps)) * -(-c.hidden // (8 * self.lanes)),
            -(-rows * self.output_lanes // (32 * self.warps))
            * -(-width // (8 * self.output_lanes)),
        )


Shape = VectorShape | MatrixShape


@dataclass(frozen=True, slots=True)
class Tuning:
    """All choices for one config, number of rows and GPU that do not change what is computed."""

    qkv: Shape
    output: Shape
    gate_up: Shape
    down: Shape
    head: Shape
    attention: AttentionShape
    start_next: Mapping[str, str] = field(default_factory=dict)
    """One of START_NEXT by kernel; "AFTER_WAIT" for kernels without an entry."""
    programmatic: bool = True
    """True if kernels may start before the previous one has ended."""
    packed: Mapping[str, PackedShape | MatrixShape] = field(default_factory=dict)
    """Shapes of products with packed matrices, by "qkv", "output", …, that replace the rule's: a
    MatrixShape for more than one row, whose slab has bricks enough for its `split`."""
    block: BlockShape | None = None
    """The shape of one kernel for the `blocked_calls` of a layer, which replaces `qkv`, `output`
    and `attention`.  Only for one row and a device with clusters."""
    clusters: bool = False
    """True if the device has clusters, which the rule's shapes of packed products then use."""
    shared: int = MAX_SHARED
    """Bytes of dynamic shared memory that a block may have, also for packed products."""
    prefetch: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Prefetches into L2 by product ("qkv", "output", "gate_up", "down"): a target, also one of
    these, and the bytes to prefetch of its next matrix.  Compute capability 9.0 and up."""

    @property
    def tiles(self) -> bool:
        """True if the products are those of rounded.cu (`in_tiles`)."""
        return isinstance(self.down, MatrixShape)

    @property
    def warpgroups(self) -> bool:
        """True if warpgroups compute all products."""
        shapes = (self.qkv, self.output, self.gate_up, self.down, self.head)
        return all(isinstance(one, MatrixShape) and bool(one.warpgroup) for one in shapes)

    def with_start(self, where: str) -> Tuning:
        """Returns a copy with the same `start_next` for all kernels."""
        return replace(self, start_next=dict.fromkeys(STARTING, where))


@dataclass(frozen=True, slots=True)
class Product:
    """A product: its inputs, its pairs of outputs, and True if its inputs are normed first."""

    inputs: int
    pairs: int
    normed: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix in bfloat16; with one row more for an odd vocabulary."""
        return 4 * self.pairs * self.inputs

    @property
    def tile_count(self) -> int:
        """The number of tiles of 8 pairs of outputs."""
        return -(-self.pairs // 8)

    def fits_registers(self, multiprocessors: int) -> bool:
        """True if the device's registers can hold the whole matrix and leave room for the next
        kernel's weights."""
        steps = self.tile_count * -(-self.inputs // 32)
        return steps <= 0.75 * multiprocessors * HELD_STEPS

    @property
    def fits_warpgroups(self) -> bool:
        """True if warpgroups support the product: its inputs are whole panels, and offsets in its
        matrix fit 32 bits."""
        return self.inputs % 64 == 0 and self.nbytes < 1 << 33


def products_of(config: LlamaConfig) -> dict[str, Product]:
    c = config
    return {
        "qkv": Product(c.hidden, (c.query_size + 2 * c.kv_size) // 2, True),
        "output": Product(c.query_size, c.hidden // 2, False),
        "gate_up": Product(c.hidden, c.inner, True),
        "down": Product(c.inner, c.hidden // 2, False),
        "head": Product(c.hidden, -(-c.vocabulary // 2), True),
    }


def require_supported(config: LlamaConfig, rows: int = 1, *, most: int = MAX_ROWS) -> None:
    """Raises UnsupportedModelError for a model or rows that the kernels cannot compute."""
    c = config
    wanted = {
        "hidden": c.hidden,
        "inner": c.inner,
        "heads * head_size": c.query_size,
        "head_size": c.head_size,
    }
    for name, value in wanted.items():
        if value % 8:
            raise UnsupportedModelError(
                f"{name} is {value}; the CUDA kernels read 16 bytes at a time and need a multiple "
                "of 8. The host device has no such limit"
            )
    if c.head_size > _MAX_HEAD_SIZE:
        raise UnsupportedModelError(
            f"head_size is {c.head_size}; the CUDA kernels go up to {_MAX_HEAD_SIZE}"
        )
    if not 1 <= rows <= most:
        raise UnsupportedModelError(f"{rows} rows; the CUDA kernels take 1 to {most}")
    if counted_rows(c, rows) * c.heads > COUNTER_BYTES // 4:
        raise UnsupportedModelError(
            f"{rows} rows of {c.heads} heads; the CUDA kernels take {COUNTER_BYTES // 4} together"
        )


def counted_rows(config: LlamaConfig, rows: int) -> int:
    """Returns the most rows of attention.cu, whose heads have counters: pieces of prompts count
    only if piece_attention.cu, which has no counters, does not support the head size."""
    return rows if config.head_size > PIECE_HEAD_SIZE else min(rows, MAX_ROWS)


# ------------------------------------------------------------------------------------------- rules


def shape_key(config: LlamaConfig) -> str:
    """Returns the model's sizes and family additions, for which kernels are compiled, as text."""
    c = config
    sizes = f"{c.hidden}-{c.inner}-{c.heads}-{c.kv_heads}-{c.head_size}-{c.vocabulary}"
    added = {"bias": c.qkv_bias, "norm": c.qk_norm, "window": any(c.windows)}
    return "-".join([sizes, *(name for name, there in added.items() if there)])


def blocked_calls(config: LlamaConfig) -> tuple[str, ...]:
    """Returns the calls of the program that attention_block.cu computes in one launch."""
    qkv = ("norm_qkv", "norm_rope") if config.qk_norm else ("norm_qkv_rope",)
    return (*qkv, "attention", "output_residual")


def default_tuning(
    config: LlamaConfig,
    *,
    rows: int = 1,
    context: int = 2048,
    multiprocessors: int = 132,
    clusters: bool = False,
    warpgroups: bool = False,
    shared: int = MAX_SHARED,
    fast_memory: bool = False,
    most: int = MAX_ROWS,
) -> Tuning:
    """Chooses shapes by rule, for a GPU without a stored tuning.  The rule was found on an H100 and
    an H200; docs/log/launch-shapes.md has what each part of it gains.

    `context`: positions of a sequence.  `clusters`, `warpgroups`: True if the device has them.
    `shared`: bytes of shared memory that a block may have (`dynamic_shared`).  `fast_memory`: the
    result of `has_fast_memory`.  Raises UnsupportedModelError, also for more than `most` rows.
    """
    require_supported(config, rows, most=most)
    products, tiles = products_of(config), in_tiles(config, rows, shared)

    def cut(name: str) -> Shape:
        product = products[name]
        if not tiles:
            return _vector_shape(name, product, multiprocessors, fast_memory)
        # With more than MAX_ROWS rows, our kernels compute only the head, for the last row.
        few = min(rows, MAX_ROWS)
        if warpgroups and shared == MAX_SHARED and _warpgroups_pay(config, products, few):
            return warpgroup_shape(name, product, few, multiprocessors)
        given: dict[str, bool] = {"clusters": clusters, "fast_memory": fast_memory}
        return _matrix_shape(name, product, few, multiprocessors, shared, **given)

    qkv, output, gate_up, down, head = map(cut, PRODUCTS.values())
    more: dict[str, Any] = {"clusters": clusters, "shared": shared}
    more["prefetch"] = _prefetch(products, rows)
    if tiles:
        if attends_in_tiles(config, rows, shared):
            attention = _tiled_attention(config, rows, context, multiprocessors, clusters)
        else:
            attention = _attention_shape(config, rows, context, multiprocessors)
        early = _early_starts(products, rows)
        return Tuning(qkv, output, gate_up, down, head, attention, early, **more)
    block = None
    if clusters:
        attention = _cluster_shape(config, context, multiprocessors)
        block = next(iter(block_shapes(config, multiprocessors, shared)), None)
    else:
        attention = _attention_shape(config, rows, context, multiprocessors)
    # Kernels start as early as possible, so that weights load while the two preceding kernels still
    # run; but the attention reads the cache before its wait, and `sample` its row, which is safe
    # only if the preceding kernel starts them late.
    late = ("norm_qkv_rope", "norm_rope", "attention_block", "head")
    kernels = (*PRODUCT_CALLS, *_OTHERS)
    starts = dict.fromkeys(kernels, "AT_START") | dict.fromkeys(late, "AFTER_WAIT")
    if block is not None:
        gate_up, down = _few_blocks(products, gate_up, down, multiprocessors)
        starts["norm_gate_up"] = "AFTER_WAIT"
    return Tuning(qkv, output, gate_up, down, head, attention, starts, block=block, **more)


def _early_starts(products: Mapping[str, Product], rows: int) -> dict[str, str]:
    """Returns `start_next` for steps of several rows.  Gate and up load weights before the
    attention has ended, in small models the output projection too, but in the smallest only for few
    rows."""
    gate_up = products["gate_up"].nbytes
    small = gate_up < _PREFETCH_FROM
    most = 2 * _FEW_ROWS if small and gate_up >= _SOON_OVER[0] else _FEW_ROWS
    if rows > most:
        return {}
    early = ("rounded_output", "attention") if small else ("rounded_output",)
    return dict.fromkeys(early, "AT_START")


def _prefetch(products: Mapping[str, Product], rows: int) -> dict[str, tuple[str, int]]:
    """Returns `prefetch` for few rows of large models, so that memory is busy between kernels.
    Small models, which are up to 10 % slower with it, have none."""
    if rows > _FEW_ROWS or products["gate_up"].nbytes < _PREFETCH_FROM:
        return {}
    return {
        "qkv": ("gate_up", 4 << 20),
        "output": ("down", 2 << 20),
        "gate_up": ("down", 4 << 20),
        "down": ("qkv", 4 << 20),
    }


def for_context(
    tuning: Tuning, config: LlamaConfig, *, rows: int, context: int, multiprocessors: int
) -> Tuning:
    """Returns a tuning, perhaps made for shorter contexts, with enough blocks for this one."""
    shape = tuning.attention
    tiled = attends_in_tiles(config, rows, tuning.shared)
    if tiled and shape.cluster > 1 and context > _EVEN_CONTEXT:
        longer = _tiled_attention(config, rows, context, multiprocessors, clusters=True)
        return replace(tuning, attention=longer)
    if shape.resident:
        longer = _in_list(shape, context)
    elif shape.cluster > 1:
        longer = _with_clusters(shape, config, rows, context, multiprocessors)
    else:
        return tuning
    return tuning if longer.splits <= shape.splits else replace(tuning, attention=longer)


def _in_list(shape: AttentionShape, context: int) -> AttentionShape:
    """Returns the shape with as many `splits` as the longest row has shares."""
    share = shape.passes * shape.warps * shape.steps * TILE_POSITIONS
    return replace(shape, splits=min(_MOST_SHARES, -(-context // share)))


def _with_clusters(
    shape: AttentionShape, config: LlamaConfig, rows: int, context: int, multiprocessors: int
) -> AttentionShape:
    """Returns the shape with a cluster for each 4,096 positions, up to 12 warps a multiprocessor.

    Any number is correct for any length.  A block without positions costs 3 ns."""
    warps = rows * config.heads // shape.queries * shape.cluster * shape.warps
    most = max(1, min(16, 12 * multiprocessors // warps))
    return replace(shape, splits=shape.cluster * min(most, -(-context // 4096)))


def _vector_shape(
    name: str, product: Product, multiprocessors: int, fast_memory: bool = False
) -> VectorShape:
    """Chooses a VectorShape.  A thread holds up to 9 steps of 2 rows (72 registers), and blocks of
    equal size fill the device.

    A small product ends before the memory is busy, so more lanes and warps share a pair, to shorten
    each thread's chain of loads.  If the blocks would fill the device more than twice, they take
    turns instead, and twice as many warps share a pair, or two.  For long rows of the head, two
    warps share two pairs, and a multiprocessor has one block; for a "down" with long rows, eight
    warps share two pairs, or for longer ones 16 half warps share one.
    """
    chunks = product.inputs // 8
    lanes = 32 if chunks >= 128 else 16 if chunks >= 64 else 8
    split = 1
    while -(-chunks // (lanes * split)) > 9:
        split *= 2

    def each() -> float:  # warps of a multiprocessor
        return -(-product.pairs * lanes // 32) * split / multiprocessors

    def wasteful(width: int) -> bool:  # too many of the `width` lanes idle, or too many warps
        return -(-chunks // width) * width > 1.4 * chunks or width > 16 * 32

    while each() <= 5 and -(-chunks // (lanes * split)) > 2 and not wasteful(2 * lanes * split):
        lanes, split = (2 * lanes, split) if lanes < 32 else (lanes, 2 * split)
    if not product.normed and (lanes, split) == (32, 1) and each() <= 8:
        if fast_memory:  # leaves a third of the multiprocessors to the next kernel
            return VectorShape(lanes, split, 1, -(-3 * product.pairs // (2 * multiprocessors)))
        lanes, split = 16, 2
    wanted = each()
    if name == "head" and (lanes, split) == (32, 1) and chunks >= 256:
        turns = -(-product.pairs // (8 * multiprocessors))
        return VectorShape(lanes, 2, 2, 8, turns, ahead=min(2, turns - 1))
    if product.normed and (lanes, split) == (32, 1) and 8 < wanted <= 16:
        wanted /= 2  # two blocks a multiprocessor
    warps = max(split, 8) if wanted > 16 else max(1, -(-int(wanted + 0.999) // split)) * split
    shape = VectorShape(lanes, split, 1, warps)
    blocks = -(-product.pairs // shape.block_pairs)
    if blocks > 2 * multiprocessors:
        turns = min(MAX_TURNS, -(-blocks // (2 * multiprocessors)))
        shape = replace(shape, turns=turns)
    if shape.turns == 1 or name == "head" or (lanes, warps) != (32, 8):
        return shape
    if split <= 2:
        # With two pairs, a thread reads its inputs from shared memory once for both.
        pairs = 2 if product.nbytes <= _SOON_OVER[1] else 1
        return replace(shape, split=2 * split, pairs=pairs)
    if not product.normed and split == 4 and product.inputs >= 8192:
        return replace(shape, split=8, pairs=2)
    if not product.normed and split == 8 and chunks <= 7 * 256:  # more do not fit the registers
        return replace(shape, lanes=16, split=16, warps=16)
    return shape


def without_block(tuning: Tuning, config: LlamaConfig, *, multiprocessors: int = 132) -> Tuning:
    """Returns the tuning for steps that cannot use `block`; the MLP, whose shapes fit a `block`,
    gets the rule's shapes for separate launches."""
    if tuning.block is None:
        return tuning
    products = products_of(config)
    gate_up, down = (
        _vector_shape(name, products[name], multiprocessors) for name in ("gate_up", "down")
    )
    starts = {**tuning.start_next, "norm_gate_up": "AT_START"}
    return replace(tuning, block=None, gate_up=gate_up, down=down, start_next=starts)


def _few_blocks(
    products: Mapping[str, Product], gate_up: Shape, down: Shape, multiprocessors: int
) -> tuple[Shape, Shape]:
    """Returns shapes of the MLP of a small model, whose attention is one launch: at most three
    quarters of the multiprocessors have a block, since each block reads all parts of the residual
    and the next kernel needs room.  Shapes stay if a thread would have too many loads."""
    most = multiprocessors * 3 // 4 + 1
    product = products["gate_up"]
    for warps in (4, 8):
        wide = VectorShape(8, 1, 1, warps)
        if -(-product.inputs // 64) <= 15 and -(-product.pairs // wide.block_pairs) <= most:
            gate_up = wide
            break
    product, long = products["down"], VectorShape(32, 2, 1, 12)
    if 512 < product.inputs <= 5 * 512 and -(-product.pairs // long.block_pairs) <= most:
        down = long
    return gate_up, down


def packed_shape(
    name: str,
    product: Product,
    rows: int = 1,
    *,
    bits: int = 8,
    k_types: bool = False,
    multiprocessors: int = 132,
    clusters: bool = False,
    shared: int = MAX_SHARED,
) -> PackedShape | MatrixShape:
    """Returns the shape of a product with a packed matrix, by a rule found on an H200 and an H100.
    `bits`: bits of a code, 4 or 8 (4 for types that store further bits separately); `k_types`: True
    if a part has a K type; `clusters`: True if the device has them; `shared`: bytes of shared
    memory that a block may have.

    One row: a warp for each 256 inputs, up to 16, which loads all its weights before the wait for
    the previous kernel; blocks take turns if there would be more than fit a multiprocessor at once
    (two, or one of more than 8 warps).  The head, which is long, loads two turns at once; that fits
    the registers if all blocks take equally many turns and rows are whole bricks.

    In 4 bits, rows of 17 to 32 bricks have 8 warps that hold all, which leaves registers to the
    next kernel; if blocks take turns, or with K types, 16 warps that hold one brick and load the
    second while they use it; 16 that hold two are slower.  Two turns of more than 8 warps are both
    loaded before the wait.
    """
    if rows > 1:
        if rows <= 32 and clusters and shared == MAX_SHARED:
            few = _packed_in_clusters(name, product, rows, multiprocessors)
            if few is not None:
                return few
        given: dict[str, bool] = {"clusters": clusters, "packed": True}
        return _matrix_shape(name, product, rows, multiprocessors, shared, **given)
    span, split = _packed_split(product.inputs)
    tiles = product.tile_count
    resident = max(1, 16 // split)
    room = (shared - PackedShape(split, 1).shared_bytes(product.inputs)) // (split * 64)
    turns = min(64, 1 + max(0, room), -(-tiles // (min(resident, 2) * multiprocessors)))
    depth = span if span <= 2 else 1  # more do not fit the registers
    if bits == 4 and span == 2:
        depth = 1
        if not k_types and turns == 1:
            depth = -(-product.inputs // (8 * BRICK))
            split = -(-product.inputs // (depth * BRICK))
    elif bits == 4 and span == 1 and turns == 2 and split > 8:
        depth = 2
    if name == "head" and product.inputs % BRICK == 0 and resident > 1:
        most = min(turns, 8 if bits == 8 else 16)
        even = [n for n in range(4, most + 1) if tiles % n == 0]
        if even:
            turns, depth = even[-1], 2
    return PackedShape(split, 1, turns, depth, resident)


def _packed_in_clusters(
    name: str, product: Product, rows: int, multiprocessors: int
) -> MatrixShape | None:
    """Returns shapes for products of large models with 2 to 32 rows, None for the general rule."""
    tiles = product.tile_count
    if rows <= 16:
        if name == "qkv" and product.inputs >= 2048:
            return MatrixShape(2, 4, 2, 1024, 8, 2)
        if name == "output" and product.inputs >= 2048 and tiles <= multiprocessors:
            return MatrixShape(2, 4, 2, 1024, 8, 2, alone=1)
        if name == "down" and product.inputs >= 4096 and rows <= 8:
            return MatrixShape(1, 8, 2, 2048, 8, 2)
        return None
    if name == "qkv" and product.inputs >= 2048:
        return MatrixShape(4, 2, 4, 512, 8, 4)
    small = product.nbytes <= _SOON_OVER[1]
    if name == "gate_up" and small and 0.9 <= tiles / (8 * multiprocessors) <= 1:
        return MatrixShape(8, 2, 1, 512, 8)
    return None


def _packed_split(inputs: int) -> tuple[int, int]:
    """Returns the bricks of a warp, and the warps of a row."""
    bricks = -(-inputs // BRICK)
    span = -(-bricks // 16)
    return span, -(-bricks // span)


def in_tiles(config: LlamaConfig, rows: int, shared: int) -> bool:
    """True if the products of a step have a MatrixShape: with several rows, or with one row if its
    inputs as digits (packed.cuh) exceed the `shared` bytes of a block on a small device."""
    if rows > 1 or shared >= MAX_SHARED:
        return rows > 1
    inputs = {product.inputs for product in products_of(config).values()}
    return any(PackedShape(_packed_split(n)[1], 1).shared_bytes(n) > shared for n in inputs)


def attends_in_tiles(config: LlamaConfig, rows: int, shared: int) -> bool:
    """True if the attention of a step uses the tensor cores (tile_softmax.cuh): if its result is
    rounded to bfloat16 anyway, and a head fits the registers."""
    return in_tiles(config, rows, shared) and config.head_size <= PIECE_HEAD_SIZE


def dynamic_shared(most: int) -> int:
    """Returns the bytes of dynamic shared memory of a block that may have `most` bytes in all."""
    return min(MAX_SHARED, most - STATIC_SHARED)


def _matrix_shape(
    name: str,
    product: Product,
    rows: int,
    multiprocessors: int,
    shared: int,
    *,
    clusters: bool = False,
    fast_memory: bool = False,
    packed: bool = False,
) -> MatrixShape:
    """Chooses a MatrixShape by a rule found on an H100 with the 1B and 8B shapes.

    A block has 8 warps, and a multiprocessor has room for two blocks, so that the next kernel's
    weights load while these still run.  Each warp has its own tile; if that makes too few blocks,
    warps share the inputs of fewer tiles, and then blocks share inputs in clusters: sharing adds
    sums through shared memory, slowest between a cluster's blocks.  Unpacking takes a warp longer
    than its waits, so there are twice as many blocks with packed weights.

    A short product for few rows has 16 warps a block if each still has 8 steps: most of the weights
    are loaded before the wait.  Blocks of 16 warps mostly fill a multiprocessor's registers, so
    there are either at most as many as multiprocessors, or whole waves; two blocks of 8 warps may
    share a multiprocessor.

    If there are at most as many blocks as multiprocessors, no two may share one, since the others
    would wait for these two.  A multiprocessor that the preceding kernel left free gets two blocks,
    so up to 40 rows a warp has its own tile only with more blocks than multiprocessors.
    """
    if name == "head" and not packed:
        head = _head_of_few_rows(product, rows)
        if head is not None and head.shared_bytes(rows, shared) <= shared:
            return head
    if clusters and not packed and name != "head" and shared == MAX_SHARED:
        clustered = _in_clusters(product, rows, multiprocessors, fast_memory)
        if clustered is not None:
            return clustered
    tile_count, padded = product.tile_count, -(-rows // 8) * 8
    fewest = 4 if packed and padded > 32 else 2 if padded > 16 else 1  # bricks are long slabs
    enough = 0.7 * multiprocessors
    least = 4 if name == "head" else fewest  # in the head a warp's keys are of one row
    many = padded > 40
    enough_of_one = 2 * enough if packed else enough if many else multiprocessors
    granule = BRICK if packed else slab_granule(1)
    tiles, blocks_k = 8, 1
    while least < 8 and 4 * padded * (granule * 8 // least + 32) > shared:  # the least ring
        least *= 2
    while tiles > least and product.inputs >= 2 * granule * (8 // tiles):
        if tile_count / tiles >= (enough_of_one if tiles == 8 and name != "head" else enough):
            break
        tiles //= 2
    most_k = 8 if clusters or not (packed and product.normed) else 1  # sums of parts need clusters
    split = 8 // tiles
    short = _SOON_OVER[0] <= product.nbytes <= _SOON_OVER[1] and padded <= _FEW_ROWS
    short = short and not packed and name != "head"
    waves = -(-tile_count // (tiles * multiprocessors))
    filled = tile_count / (tiles * multiprocessors * waves)
    if short and (waves == 1 or (padded <= 8 and filled >= 0.9)):
        while tiles * split < 16 and product.inputs >= 512 * split:
            split *= 2
    while tile_count / tiles * blocks_k < enough and blocks_k < most_k and name != "head":
        if product.inputs < 2 * granule * split * blocks_k:
            break
        blocks_k *= 2
    inputs = -(-product.inputs // blocks_k)
    granule = BRICK * split if packed else slab_granule(split)
    # A slab has about 8 steps of each warp, or 4 if two warps share a tile or many rows have many
    # inputs; the slab with the least padding wins.  Registers hold weights of all steps or of half.
    deep = split >= 4 and not many and (padded <= 16 or inputs <= 512 * split)
    wanted = 256 * split if deep or split == 1 else 128 * split
    most = 8 if deep or (split == 1 and many and name != "head") else 4

    blocks = -(-tile_count // tiles) * blocks_k
    alone = int(not short and split >= 4 and blocks <= multiprocessors)

    def shape(slab: int) -> MatrixShape:
        depth = 8 if packed else largest_divisor(slab // (32 * split), most)
        cluster = blocks_k if clusters else 1
        return MatrixShape(tiles, split, blocks_k, slab, depth, cluster, 2, alone)

    made = [shape(granule * n) for n in range(1, 1 + max(1, 3 * wanted // (2 * granule)))]
    fitting = [one for one in made if one.shared_bytes(rows, shared) <= shared]
    far = [one for one in fitting if 2 * one.depth >= most]
    found = min(
        far or fitting or made[:1],
        key=lambda one: (-(-inputs // one.slab) * one.slab, abs(one.slab - wanted)),
    )
    longer = replace(found, ring=3)
    if tiles * split > 8 and inputs > found.slab and longer.shared_bytes(rows, shared) <= shared:
        return longer
    return found


def _head_of_few_rows(product: Product, rows: int) -> MatrixShape | None:
    """Returns a shape of the head for few rows: two warps a tile, with all inputs at once; for
    longer inputs four, in two slabs.  None for the general rule."""
    if rows <= _FEW_ROWS and product.inputs <= 1024:
        each = -(-product.inputs // 64)  # steps of a warp, up to 8 of which it holds
        parts = -(-each // 8)
        held = -(-each // parts)
        return MatrixShape(4, 2, 1, 64 * held * parts, held)
    if rows <= 8 and product.inputs <= 2048:
        held = -(-product.inputs // 256)
        return MatrixShape(4, 4, 1, 128 * held, held, ring=3)
    return None


def _in_clusters(
    product: Product, rows: int, multiprocessors: int, fast_memory: bool
) -> MatrixShape | None:
    """Returns shapes for products of 2 to 64 rows on a device with clusters, None for the general
    rule.

    Small products, whose weights fit the registers of three quarters of the multiprocessors, eight
    steps of a warp: all weights are loading before the wait, so memory is not the bottleneck.  The
    copies of all rows' inputs by each block are, and a next kernel without a free multiprocessor.
    So there are as few blocks as hold the weights, but at least a third of the multiprocessors, or
    half of them with many rows; with few outputs four blocks share the inputs, or, for a few rows
    with short inputs, each block has one tile.  Up to 8 rows blocks of 16 warps wait less, for
    normed products only with fast memory.  Large products with many inputs: blocks share these too.
    """
    tile_count, steps = product.tile_count, -(-product.inputs // 32)
    many = rows > 32
    if not product.fits_registers(multiprocessors):
        few = rows <= _FEW_ROWS
        return _long_in_clusters(product, multiprocessors, fast_memory) if few else None
    cuts = _cuts(product, rows, multiprocessors, fast_memory)
    for tiles, blocks_k, warps in cuts:
        blocks, each = -(-tile_count // tiles) * blocks_k, -(-steps // blocks_k)
        if blocks < multiprocessors / (2 if many else 3) and (tiles, blocks_k, warps) != cuts[-1]:
            continue
        split = max(warps // tiles, power_of_two_from(-(-each // 8)))
        depth = -(-each // split)
        # Pairs of blocks of 16 warps leave the attention room.
        alone = int(blocks <= multiprocessors and (blocks_k, warps) != (2, 16))
        shape = MatrixShape(tiles, split, blocks_k, 32 * split * depth, depth, blocks_k, 2, alone)
        if tiles * split <= 16 and shape.shared_bytes(rows) <= MAX_SHARED:
            return shape
    return None


def _cuts(
    product: Product, rows: int, multiprocessors: int, fast_memory: bool
) -> tuple[tuple[int, int, int], ...]:
    """Returns the cuts that `_in_clusters` tries for a small product, in order: tiles of a block,
    blocks that share inputs, least warps of a block.  The number of blocks never falls."""
    tile_count, steps = product.tile_count, -(-product.inputs // 32)
    if rows > 32:
        return (4, 1, 8), (4, 2, 8), (4, 4, 8), (2, 4, 8) if steps <= 48 else (4, 8, 8)
    if rows > _FEW_ROWS:
        return (4, 1, 8), (2, 1, 8), (4, 4, 8), (2, 4, 8)
    if steps <= 32 and tile_count < multiprocessors / 3:
        return ((1, 1, 8),)
    pays = fast_memory if product.normed else rows > 4 and steps >= 48
    if rows <= 8 and tile_count < multiprocessors / 2 and pays:
        return (4, 1, 8), (2, 1, 8), (2, 2, 16), (4, 4, 16)
    return (4, 1, 8), (2, 1, 8), (4, 4, 8)


def _long_in_clusters(
    product: Product, multiprocessors: int, fast_memory: bool
) -> MatrixShape | None:
    """Returns shapes for products of few rows with many inputs (`_in_clusters`), None for the
    general rule.  Large ones have four tiles a block with fast memory, else two."""
    tile_count = product.tile_count
    if product.normed and product.inputs >= 4096:
        if fast_memory or tile_count < 8 * multiprocessors:
            return MatrixShape(4, 2, 4, 512, 8, 4)
        return MatrixShape(2, 4, 4, 512, 4, 4)
    if product.inputs >= 8192 and tile_count > multiprocessors:
        return MatrixShape(2, 8, 2, 1024, 4, 2)
    if product.inputs >= 4096 and 0.7 * multiprocessors <= tile_count <= multiprocessors:
        return MatrixShape(2, 8, 2, 2048, 8, 2, alone=1)
    return None


def has_fast_memory(bandwidth: float, multiprocessors: int) -> bool:
    """True if a multiprocessor gets over 30 GB/s of the memory's bandwidth, so that waits for
    weights are a smaller part of a product's time: an H200 has 37, an H100 25 (A100, L40S less)."""
    return bandwidth > 30e9 * multiprocessors


def has_warpgroups(capability: tuple[int, int]) -> bool:
    """True if four warps can multiply together (wgmma); later devices have other instructions."""
    return capability == (9, 0)


def _warpgroups_pay(config: LlamaConfig, products: Mapping[str, Product], rows: int) -> bool:
    """True if warpgroups are faster, by measurements of five models (docs/log/launch-shapes.md)."""
    if not all(product.fits_warpgroups for product in products.values()):
        return False
    if config.hidden >= 3072:
        return 24 < rows <= 32 or rows > 48
    return rows > (16 if config.hidden > 1024 else 40) and config.hidden >= 768


def warpgroup_shape(name: str, product: Product, rows: int, multiprocessors: int) -> MatrixShape:
    """Returns the shape of a product with warpgroups, by a rule found on an H200 with the 1B shape.

    A block has 64 rows of the matrix, so that a multiprocessor has room for two blocks, or for one
    and one of the next kernel, which loads its weights meanwhile.  If there are too few blocks,
    clusters of them share inputs, down to 256 in each.  With many rows two warps share the inputs,
    since they finish twice as many sums; or a block has 128 rows, if there is one for each
    multiprocessor.
    """
    head, few = name == "head", rows <= 32
    one_each = 0.9 * multiprocessors <= product.pairs / 64 <= multiprocessors
    tiles = 8 if not few and (head or one_each) else 4
    split = 1 if few or tiles == 8 else 2
    blocks, blocks_k = -(-product.pairs // (8 * tiles)), 1
    while not head and tiles == 4 and blocks_k < 8 and product.inputs >= 512 * blocks_k:
        if blocks * blocks_k >= 1.4 * multiprocessors:
            break
        blocks_k *= 2
    each = -(-product.inputs // blocks_k)
    # The largest ring that fits two blocks, or the only one; a smaller ring with more blocks.
    wide = not head and (blocks_k == 1 or 256 < each <= 512)
    slab = 128 if wide and few and product.inputs % 128 == 0 else 64
    cut = MatrixShape(tiles, split, blocks_k, slab, 1, blocks_k, 4, warpgroup=1)
    if head:
        return cut
    rings = [replace(cut, ring=n) for n in range(3, max(4, min(8, each // slab)) + 1)]
    if wide:
        most = MAX_SHARED if tiles == 8 else _HALF
        return [one for one in rings if one.shared_bytes(rows) <= most][-1]
    full = (one for one in rings[1:] if one.shared_bytes(rows) > _MORE_THAN_QUARTER)
    return next(full, rings[-1])


def _attention_shape(
    config: LlamaConfig, rows: int, context: int, multiprocessors: int
) -> AttentionShape:
    """Returns the shape without tensor cores and clusters: the most heads that fit registers."""
    group = config.heads // config.kv_heads
    divisors = [n for n in range(1, 9) if group % n == 0]
    small = [n for n in divisors if n <= 5]
    queries = small[-1] if small[-1] > 1 or len(divisors) == 1 else divisors[-1]
    warps, steps = 4, 4 if queries <= 5 else 2
    tile = warps * steps * (32 // power_of_two_from(config.head_size // 8))
    wanted = 2 * multiprocessors / (rows * config.kv_heads * (group // queries))
    splits = max(1, min(-(-context // tile), 64, int(wanted)))
    return AttentionShape(queries, warps, steps, splits)


def _tiled_attention(
    config: LlamaConfig, rows: int, context: int, multiprocessors: int, clusters: bool
) -> AttentionShape:
    """Returns the shape on the tensor cores: a block has all query heads of a KV head, up to 8,
    since a further head costs nothing, and as many warps as let all blocks run at once.

    For a few rows of short contexts, a cluster of two or four blocks computes these heads of a row.
    For more rows, or long contexts, whose lengths may be uneven, as many blocks as the device holds
    share the work of all rows.  The figures are in docs/log.md, "The attention of many rows".
    """
    queries = largest_divisor(config.heads // config.kv_heads, 8)
    blocks = rows * config.heads // queries  # if each part of a row has one block
    wide = config.head_size > 64
    if clusters and rows <= CLUSTER_ROWS and context <= _EVEN_CONTEXT:
        cluster = 4 if 8 * blocks <= multiprocessors else 2
        steps = 1 if wide or cluster * blocks > multiprocessors else 2
        if cluster * blocks <= multiprocessors * (1 if wide or steps == 2 else 2):
            shape = AttentionShape(queries, 8, steps, cluster, cluster, CLUSTER_PASSES)
            return _with_clusters(shape, config, rows, context, multiprocessors)
    # Shares are shorter if those of 1,024 positions would leave some multiprocessors without work.
    few = rows <= CLUSTER_ROWS or blocks < 0.9 * multiprocessors
    held = 8 if wide else 16  # warps of a multiprocessor, of one step
    warps, steps = 2, 1
    if blocks * 8 <= held * multiprocessors:
        warps = 8
        if not wide and not few and rows >= 32 and blocks <= multiprocessors:
            held, steps = 12, 2  # one block each reads twice as many positions at once
    elif blocks * 4 <= held * multiprocessors:
        warps = 4
        if not wide and blocks * 4 <= 12 * multiprocessors:
            held, steps = 12, 2
    share, tile = 512 if few else 1024, warps * steps * TILE_POSITIONS
    shape = AttentionShape(queries, warps, steps, 1, 1, share // tile, held // warps)
    if rows > MAX_ROWS or blocks >= COUNTER_BYTES // 4:  # the list of shares needs a counter, too
        return shape
    return _in_list(shape, context)


def _cluster_shape(config: LlamaConfig, context: int, multiprocessors: int) -> AttentionShape:
    """Returns the shape for one row: small blocks of 64 positions that fit beside another kernel.

    A head's 8 blocks merge in their cluster, so separate reads of keys for each query head cost
    less than more queries in fewer, larger blocks, as long as the device holds all blocks.  Two
    query heads share keys if nearly every multiprocessor still has a block.
    """
    group = config.heads // config.kv_heads
    divisors = [n for n in range(1, 8) if group % n == 0]
    fitting = [q for q in divisors if 8 * config.heads // q <= 2 * multiprocessors]
    queries = fitting[0] if fitting else divisors[-1]
    if queries == 1 and group % 2 == 0 and 4 * config.heads >= 0.9 * multiprocessors:
        queries = 2
    steps = 8 if queries == 1 else 4 if queries <= 4 else 2
    groups = 32 // power_of_two_from(config.head_size // 8)
    warps = max(1, 64 // (steps * groups))
    shape = AttentionShape(queries, min(warps, 8), steps, 8, 8, CLUSTER_PASSES)
    return _with_clusters(shape, config, 1, context, multiprocessors)


def without_warpgroups(
    name: str, tuning: Tuning, product: Product, rows: int, multiprocessors: int
) -> MatrixShape:
    """Returns the rule's shape of a product in a step of several rows without warpgroups."""
    shared, clusters = tuning.shared, tuning.clusters
    return _matrix_shape(name, product, rows, multiprocessors, shared, clusters=clusters)


def slab_granule(split: int) -> int:
    """Returns the granule of slabs: whole steps of `split` warps, and no bank conflicts."""
    return math.lcm(64, 32 * split)


def largest_divisor(n: int, most: int) -> int:
    """Returns the largest divisor of n that is at most `most`."""
    return max(d for d in range(1, most + 1) if n % d == 0)


def power_of_two_from(n: int) -> int:
    """Returns the smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def not_whole(shape: object, **least: int) -> str | None:
    """Describes the first field that is no int or below its `least` (1 if not given), or None."""
    for name in type(shape).__dataclass_fields__:  # type: ignore[attr-defined]
        value: object = getattr(shape, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least.get(name, 1):
            return f"{name} is {value!r}"
    return None


# ------------------------------------------------- norm, QKV, attention and output in one launch


def block_problem(shape: BlockShape, config: LlamaConfig, shared: int = MAX_SHARED) -> str | None:
    """Returns the reason why the kernel cannot be compiled or launched so; None if it can.

    `shared`: bytes of shared memory that a block may have.  The shape's values may be of any type,
    since they may come from a file; a wrong type is a reason too.
    """
    s, c = shape, config
    wrong = not_whole(s)
    if wrong:
        return wrong
    if c.heads // c.kv_heads % s.queries:
        return f"{s.queries} queries of {c.heads // c.kv_heads} in a cluster"
    if s.lanes not in _BLOCK_LANES or s.output_lanes not in _BLOCK_LANES or s.steps > 8:
        return f"{s.lanes} and {s.output_lanes} lanes, {s.steps} steps"
    if s.warps > 16 or not 2 <= s.cluster <= 8:
        return f"{s.warps} warps in clusters of {s.cluster}"
    first, second = s.loads(c)
    held = 4 * second + 8 * s.steps
    most = 36 + max(held + 4 * first + 8 * -(-c.hidden // (128 * s.warps)), held + 18 * s.queries)
    if most > min(255, REGISTERS // (32 * s.warps)):
        return f"{first} and {second} loads a thread in {s.warps} warps do not fit the registers"
    if s.shared_bytes(c) > shared:
        return f"{s.queries} queries in {s.warps} warps do not fit shared memory"
    return None


def block_shapes(
    config: LlamaConfig, multiprocessors: int, shared: int = MAX_SHARED
) -> tuple[BlockShape, ...]:
    """Returns promising shapes of attention_block.cu, ordered by a rough cost; none for a model
    that is too large."""
    c = config
    lanes = 32 // power_of_two_from(c.head_size // 8)  # positions that a warp reads at once
    made: list[tuple[float, BlockShape]] = []
    for queries, cluster in itertools.product(range(1, c.heads // c.kv_heads + 1), (8, 4)):
        rows = (queries + 2) * c.head_size * c.hidden + c.hidden * queries * c.head_size
        if (
            2 * rows / cluster > _BLOCK_WEIGHTS
            or cluster * c.heads // queries > multiprocessors
            or c.heads // c.kv_heads % queries
        ):
            continue
        for warps, pair_lanes, output_lanes, steps in itertools.product(
            (4, 5, 6, 8, 10, 12, 16), (8, 16, 32), (4, 8, 16), (1, 2, 4)
        ):
            shape = BlockShape(queries, warps, pair_lanes, output_lanes, steps, cluster)
            if block_problem(shape, c, shared) is None:
                # A thread's loads, warps that wait for each other, parts of the residual that the
                # next kernel adds; then idle positions, or an early second tile.
                cost = sum(shape.loads(c)) + 2 * warps + 1.25 * shape.units(c)
                cost += 8 * abs(warps * lanes * steps * cluster / 640 - 1)
                cost += (cluster < 8) * 2 + 0.3 * abs(output_lanes - 4)
                made.append((cost, shape))
    return tuple(shape for _, shape in sorted(made, key=lambda pair: pair[0]))
