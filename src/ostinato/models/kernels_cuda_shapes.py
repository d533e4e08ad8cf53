"""How the decoder's CUDA kernels are cut into blocks: shapes, rules, and what was tuned.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ostinato.errors import UnsupportedModelError
from ostinato.models.config import LlamaConfig

__all__ = [
    "COUNTER_BYTES",
    "MAX_ROWS",
    "PRODUCTS",
    "START_NEXT",
    "TUNED",
    "AttentionShape",
    "MatrixShape",
    "Product",
    "Shape",
    "Tuning",
    "VectorShape",
    "default_tuning",
    "products_of",
    "require_supported",
    "shape_key",
    "tuning_for",
]

MAX_ROWS = 64
"""Most rows of one step."""
COUNTER_BYTES = 1 << 16
"""The counters at the start of the workspace (linear.cuh)."""
START_NEXT = ("AT_START", "AFTER_WAIT", "AFTER_INPUT", "BEFORE_OUTPUT", "NEVER")
"""Where a kernel lets the next one start (common.cuh)."""

PRODUCTS = {
    "norm_qkv_rope": "qkv",
    "output_residual": "output",
    "norm_gate_up": "gate_up",
    "down_residual": "down",
    "head": "head",
}
"""The kernels that multiply with weights, and what their shape is called in a tuning."""

_MAX_HEAD_SIZE = 256
_STARTING = (*PRODUCTS, "embed", "attention", "sample", "advance")


# ------------------------------------------------------------------------------------------ shapes


@dataclass(frozen=True, slots=True)
class VectorShape:
    """How matvec.cu cuts a product: `lanes` of `split` warps share `pairs` pairs of outputs; a
    block has `warps` warps."""

    lanes: int
    split: int
    pairs: int
    warps: int

    @property
    def block_pairs(self) -> int:
        return self.warps // self.split * (32 // self.lanes) * self.pairs


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """How matmul.cu cuts a product: a block makes `tiles` times 8 pairs of outputs, `split` warps
    sharing the inputs of each; `blocks_k` blocks share the inputs of the product, of which `slab`
    stand in shared memory at once."""

    tiles: int
    split: int
    blocks_k: int
    slab: int

    @property
    def block_pairs(self) -> int:
        return self.tiles * 8


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """How attention.cu cuts a head: `queries` query heads of a KV head in a block, `warps` warps,
    `steps` positions a lane asks for at once, `splits` blocks for the KV length."""

    queries: int
    warps: int
    steps: int
    splits: int


Shape = VectorShape | MatrixShape


@dataclass(frozen=True, slots=True)
class Tuning:
    """All that can be chosen freely for one config, number of rows and GPU."""

    qkv: Shape
    output: Shape
    gate_up: Shape
    down: Shape
    head: Shape
    attention: AttentionShape
    start_next: Mapping[str, str] = field(default_factory=dict)
    """By kernel where it is not "AFTER_WAIT"; one of START_NEXT."""
    programmatic: bool = True
    """Whether kernels may start before the previous one has ended."""

    def with_start(self, where: str) -> Tuning:
        """The same, with one place for all kernels."""
        return replace(self, start_next=dict.fromkeys(_STARTING, where))


@dataclass(frozen=True, slots=True)
class Product:
    inputs: int
    pairs: int
    normed: bool


def products_of(config: LlamaConfig) -> dict[str, Product]:
    c = config
    return {
        "qkv": Product(c.hidden, (c.query_size + 2 * c.kv_size) // 2, True),
        "output": Product(c.query_size, c.hidden // 2, False),
        "gate_up": Product(c.hidden, c.inner, True),
        "down": Product(c.inner, c.hidden // 2, False),
        "head": Product(c.hidden, -(-c.vocabulary // 2), True),
    }


def require_supported(config: LlamaConfig, rows: int = 1) -> None:
    """Raises UnsupportedModelError for what the kernels cannot do."""
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
    if not 1 <= rows <= MAX_ROWS:
        raise UnsupportedModelError(f"{rows} rows; the CUDA kernels take 1 to {MAX_ROWS}")
    if rows * c.heads > COUNTER_BYTES // 4:
        raise UnsupportedModelError(
            f"{rows} rows of {c.heads} heads; the CUDA kernels take {COUNTER_BYTES // 4} together"
        )


# ------------------------------------------------------------------------------------ tuned shapes


TUNED: dict[tuple[str, str, int], Tuning] = {}
"""What sweeps found (`python -m benchmarks.kernels --sweep`), by GPU name, `shape_key` and the
number of rows."""


def shape_key(config: LlamaConfig) -> str:
    """The sizes that the kernels are compiled for, as text."""
    c = config
    return f"{c.hidden}-{c.inner}-{c.heads}-{c.kv_heads}-{c.head_size}-{c.vocabulary}"


def tuning_for(
    config: LlamaConfig, *, rows: int, context: int, gpu: str, multiprocessors: int
) -> Tuning:
    """The tuned shapes for a GPU by name, or the default's.  Raises UnsupportedModelError."""
    require_supported(config, rows)
    return TUNED.get((gpu, shape_key(config), rows)) or default_tuning(
        config, rows=rows, context=context, multiprocessors=multiprocessors
    )


def default_tuning(
    config: LlamaConfig, *, rows: int = 1, context: int = 2048, multiprocessors: int = 132
) -> Tuning:
    """Shapes by rule, for a GPU that nobody has tuned for.  Raises UnsupportedModelError."""
    require_supported(config, rows)
    products = products_of(config)
    make = _vector_shape if rows == 1 else _matrix_shape
    qkv, output, gate_up, down, head = (
        make(name, products[name], rows, multiprocessors) for name in PRODUCTS.values()
    )
    attention = _attention_shape(config, rows, context, multiprocessors)
    return Tuning(qkv, output, gate_up, down, head, attention)


def _vector_shape(name: str, product: Product, rows: int, multiprocessors: int) -> VectorShape:
    """A thread holds up to 9 steps of 2 rows (72 registers); blocks of one size fill the chip."""
    chunks = product.inputs // 8
    lanes = 32 if chunks >= 128 else 16 if chunks >= 64 else 8
    split = 1
    while -(-chunks // (lanes * split)) > 9:
        split *= 2
    each = -(-product.pairs * lanes // 32) * split / multiprocessors  # warps of a multiprocessor
    warps = max(split, 8) if each > 16 else max(1, -(-int(each + 0.999) // split)) * split
    return VectorShape(lanes, split, 1, warps)


def _matrix_shape(name: str, product: Product, rows: int, multiprocessors: int) -> MatrixShape:
    """Blocks of 8 warps, with so many outputs that L2 is not the limit, and enough blocks."""
    padded = -(-rows // 8) * 8
    tile_count = -(-product.pairs // 8)
    least = 4 if name == "head" else 1  # a warp's keys are of one row
    tiles = max(least, min(8, _power_of_two(padded // 8)))
    while tiles > least and tile_count / tiles < 0.7 * multiprocessors and product.normed:
        tiles //= 2
    tiles = min(tiles, 4) if not product.normed else tiles
    blocks_k = 1
    if not product.normed:
        while tiles > 1 and tile_count / tiles * 8 < 0.7 * multiprocessors:
            tiles //= 2
        while (
            tile_count / tiles * blocks_k < 0.7 * multiprocessors
            and product.inputs / (2 * blocks_k) >= 256
            and blocks_k < 8
        ):
            blocks_k *= 2
    split = 8 // tiles
    granule = max(64, 32 * split)
    share = -(-product.inputs // blocks_k)
    span = -(-share // granule) * granule
    slab = min(max(256, 128 * split), span)
    while padded * (slab + 32) * 2 > 72 * 1024 and slab > granule:
        slab -= granule
    return MatrixShape(tiles, split, blocks_k, slab)


def _attention_shape(
    config: LlamaConfig, rows: int, context: int, multiprocessors: int
) -> AttentionShape:
    group = config.heads // config.kv_heads
    divisors = [n for n in range(1, 9) if group % n == 0]
    small = [n for n in divisors if n <= 5]
    queries = small[-1] if small[-1] > 1 or len(divisors) == 1 else divisors[-1]
    warps, steps = 4, 4
    tile = warps * steps * (32 // _power_of_two(config.head_size // 8))
    wanted = 2 * multiprocessors / (rows * config.kv_heads * (group // queries))
    splits = max(1, min(-(-context // tile), 64, int(wanted)))
    return AttentionShape(queries, warps, steps, splits)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()
