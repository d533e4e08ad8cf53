"""The lowering of steps whose layers' products a library computes.  The calls of the program become

    norm_qkv_rope     norm_rows   [qkv]      norm_rope
    norm_qkv          norm_rows   [qkv]                    norm_rope does not change
    attention         attention
    output_residual   [output]                             added to the residual
    norm_gate_up      norm_rows   [gate_up]  silu_rows
    down_residual     [down]                               added to the residual
    residual_of_ranks rows_of_ranks                        in place of the next norm_rows

`[…]` is a product of the library, all others are our kernels (`kernels/pieces.cu`, `attention.cu`).
Products read bfloat16 and write float32 (`product_out`), so the same values are rounded as in our
own kernels; the residual stays float32.  `embed`, `head` and `sample` are those of `lowering`; if
only the last row of a step samples, `head` and the calls after it are those of a step of one row.

A packed matrix (`bricks`) is unpacked into `unpacked`, which its product, the next launch, reads:
neither of the two launches is programmatic.

`lower_with_library` is pure and needs no GPU.  Results may differ in bits from those of steps
without a library.

In steps of more than MAX_ROWS rows, which are pieces of a prompt, `piece_attention` takes the place
of `attention`: neighbouring rows share the keys and values that all of them read.  If the device
has warpgroups and the heads have 64 or 128 dimensions, it is `warpgroup_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

import numpy as np

from ostinato import LaunchConfig, Source
from ostinato.driver.cuda.blas import MatrixProduct
from ostinato.errors import UnsupportedModelError
from ostinato.models.backend import BoundCall, Buffers
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda import lowering as kc
from ostinato.models.cuda.bricks import FORMATS, Formats, pair_size
from ostinato.models.cuda.lowering import ENDING
from ostinato.models.cuda.products import PIECE_ROWS
from ostinato.models.cuda.shapes import (
    COUNTER_BYTES,
    MAX_ROWS,
    PIECE_HEAD_SIZE,
    Tuning,
    counted_rows,
    products_of,
    require_supported,
)
from ostinato.models.layout import weight_shapes
from ostinato.models.program import (
    ABSENT,
    SHARED_PARTIAL,
    BufferArgument,
    CallArgument,
    KernelCall,
    parameter_names,
)

_Arguments: TypeAlias = dict[str, CallArgument]

_MAX_PIECE_QUERIES = 4  # piece_attention.cu

_PIECE_ATTENTION = (
    "live: *const i32, q: *const f32, cache: *const bf16, out: *out bf16, row_count: u32, "
    "heads: u32, kv_heads: u32, head_size: u32, sequences: u32, context: u32, window: u32, "
    "scale: f32"
)
_WARPGROUP_ATTENTION = _PIECE_ATTENTION.replace("row_count", "workspace: *f32, row_count")
UNPACK_SIGNATURE = "bricks: *const u8, out: *bf16, offset: u64, columns: u32, first: u32, size: u32"

_OUT, _WORKSPACE = BufferArgument("product_out"), BufferArgument("product_workspace")
_UNPACKED = BufferArgument("unpacked")
ARRIVED = BufferArgument("arrived")
"""Other ranks' partial sums of this rank's rows, [ranks, rows of a share, hidden]."""
_UNPACK_THREADS = 256
_GATED_BYTES = 128 << 20
_MAP_BYTES = 128  # what a block of warpgroup_attention.cu has in the workspace


@dataclass(frozen=True, slots=True)
class ProductCall:
    """A product of the library in a step, with its buffers by their names in the plan."""

    name: str
    product: MatrixProduct
    weight: BufferArgument
    inputs: BufferArgument
    out: BufferArgument
    workspace: BufferArgument = _WORKSPACE

    @property
    def unpacked(self) -> bool:
        """True if the weights exist in bfloat16 only while the step runs."""
        return self.weight == _UNPACKED


Lowered = kc.CudaLaunch | ProductCall


def library_buffers(
    config: LlamaConfig, rows: int, workspace: int, formats: Formats | None = None
) -> Buffers:
    """Returns shapes and dtypes of the buffers that steps with a library, of up to `rows` rows,
    need besides a plan's buffers and `lowering.rounded_buffers`."""
    c = config
    width = max(c.query_size + 2 * c.kv_size, 2 * c.inner, c.hidden)
    found: Buffers = {
        "product_out": ((rows, width), np.dtype(np.float32)),
        "product_workspace": ((workspace,), np.dtype(np.uint8)),
    }
    if formats:
        shapes = weight_shapes(c)
        most = max((math.prod(shapes[n]) for n in formats if n.startswith("layers.")), default=0)
        found["unpacked"] = ((max(8, most),), np.dtype(np.uint16))
    return found


def library_rows_for(config: LlamaConfig) -> int:
    """Returns the least rows for which a library is faster, by the bytes of a layer's weights.

    Measured on an H100, us a step of 64 rows with ours and with cuBLASLt: 135M 791 and 950, 360M
    988 and 1,223, 1B 1,268 and 1,773, 8B 7,578 and 6,770; of 32 rows 8B 5,992 and 6,427.  8B on an
    H200, 64 rows: 5,369 and 5,328.
    """
    products = products_of(config)
    layer = sum(4 * p.pairs * p.inputs for name, p in products.items() if name != "head")
    return 33 if layer >= 256 << 20 else MAX_ROWS + 1


def piece_rows(config: LlamaConfig) -> int:
    """Returns the default rows of the largest step: PIECE_ROWS, or as many as attention.cu has
    counters for if it computes pieces too.  Large models get fewer, down to 512, which are enough
    for fast products (docs/log.md), so that the buffer of gate and up has at most 128 MiB."""
    rows = PIECE_ROWS
    while rows > MAX_ROWS and counted_rows(config, rows) * config.heads > COUNTER_BYTES // 4:
        rows //= 2
    while rows > 512 and rows * 2 * config.inner * 4 > _GATED_BYTES:
        rows //= 2
    return rows


def lower_with_library(
    program: Sequence[KernelCall | BoundCall],
    config: LlamaConfig,
    *,
    rows: int,
    tuning: Tuning,
    single: Tuning,
    multiprocessors: int = 132,
    warpgroups: bool = False,
    formats: Formats | None = None,
) -> tuple[Lowered | BoundCall, ...]:
    """Returns the launches and products of a step of `rows` rows, in order; bound calls stay in
    their places.

    `tuning`: for `rows` rows; `single`: for one row, used where only the last row samples.
    `warpgroups`: True if the device has them.  `formats`: the packed matrices.
    Raises UnsupportedModelError: of more than MAX_ROWS rows, only the last one may sample.
    """
    require_supported(config, rows, most=PIECE_ROWS)
    lowering = LibraryLowering(
        config, rows, tuning, single, formats or {}, multiprocessors, warpgroups
    )
    made: list[Lowered | BoundCall] = []
    for call in program:
        if not isinstance(call, KernelCall):
            made.append(call)
            continue
        for one in lowering.lower(call):
            if getattr(one, "kernel", "") == "norm_rows" and _norms(made[-1]):
                continue
            # Programmatic only between two of our kernels: the library's do not support it, and the
            # kernels that unpack do not wait for their predecessor.
            early = tuning.programmatic and bool(made) and not _unpacks(one)
            early = early and isinstance(made[-1], kc.CudaLaunch) and not _unpacks(made[-1])
            if isinstance(one, kc.CudaLaunch):
                one = replace(one, config=replace(one.config, programmatic=early))
            made.append(one)
    return tuple(made)


def _norms(one: Lowered | BoundCall) -> bool:
    """True for a sum over ranks that has normed the rows for the next product."""
    if not isinstance(one, kc.CudaLaunch) or one.kernel != "rows_of_ranks":
        return False
    return dict(one.arguments)["norm"] != ABSENT


def _unpacks(one: Lowered | BoundCall) -> bool:
    return isinstance(one, kc.CudaLaunch) and one.source is unpack_source()


@cache
def unpack_source() -> Source:
    return kc.source_of("unpack", {f"{kind}_to_rows": UNPACK_SIGNATURE for kind in FORMATS})


@cache
def _piece_attention() -> Source:
    return kc.source_of("piece_attention", {"piece_attention": _PIECE_ATTENTION})


@cache
def _warpgroup_attention() -> Source:
    return kc.source_of("warpgroup_attention", {"warpgroup_attention": _WARPGROUP_ATTENTION})


class LibraryLowering:
    """The lowering of calls for one config, number of rows and pair of tunings."""

    def __init__(
        self,
        config: LlamaConfig,
        rows: int,
        tuning: Tuning,
        single: Tuning,
        formats: Formats,
        multiprocessors: int,
        warpgroups: bool,
    ) -> None:
        self.config, self.rows, self.formats = config, rows, formats
        self.warpgroups = warpgroups and config.head_size in (64, 128)
        self.warpgroups &= config.heads // config.kv_heads <= 64
        # The tuning's `start_next` is dropped: it was measured with other neighbouring kernels.
        tuning = replace(tuning, start_next={}, block=None)
        self.own = kc.Lowering(config, rows, tuning, formats, multiprocessors, library=True)
        self.single = kc.Lowering(config, 1, single, formats, multiprocessors)

    def lower(self, call: KernelCall) -> Iterable[Lowered]:
        """Returns the launches of one call, whose `programmatic` the caller sets."""
        make = getattr(self, f"_{call.kernel}", None)
        if make is not None:
            return make(call, dict(call.arguments))  # type: ignore[no-any-return]
        last = any(isinstance(v, BufferArgument) and v.last for _, v in call.arguments)
        if call.kernel in ENDING and not last and self.rows > MAX_ROWS:
            raise UnsupportedModelError(
                f"{call.kernel} of {self.rows} rows: more than {MAX_ROWS} rows may sample in the "
                "last one only (decode_program(config, last_row=True))"
            )
        return (self.single if last else self.own).launches([call])

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace of our own kernels: the attention's, and the head's if all rows may
        sample; not those for a single last row, which a step of one row needs too."""
        c, most = self.config, 0
        if (splits := self.own.tuning.attention.splits) > 1:
            most = self.rows * c.heads * splits * (c.head_size + 2) * 4
        if self.rows <= MAX_ROWS:
            most = max(most, self.rows * self.own.blocks("head", self.own.head_packing) * 8)
        elif self.warpgroups:
            most = max(most, self._warpgroup_cut[1] * _MAP_BYTES)
        return COUNTER_BYTES + most

    # --- the calls of a layer
    def _norm_qkv_rope(self, _: KernelCall, given: _Arguments) -> list[Lowered]:
        names = parameter_names(kc.SIGNATURES["norm_rope"])
        given = {**given, "qkv": _OUT, "q_norm": ABSENT, "k_norm": ABSENT}
        rope = KernelCall("norm_rope", tuple((name, given[name]) for name in names))
        return [*self._norm_qkv(rope, given), self.own.launch([rope], after=None)]

    def _norm_qkv(self, _: KernelCall, given: _Arguments) -> list[Lowered]:
        c = self.config
        product = MatrixProduct(self.rows, c.query_size + 2 * c.kv_size, c.hidden)
        called = self._product("qkv", product, given["weight"], kc.CARRIED, given["qkv"])
        return [self._norm(given), *called]

    def _attention(self, call: KernelCall, given: _Arguments) -> Sequence[Lowered]:
        c = self.config
        if self.rows <= MAX_ROWS or c.head_size > PIECE_HEAD_SIZE:
            return self.own.launches([call])
        one = self._warpgroup_attention if self.warpgroups else self._piece_attention
        return [one({**given, "out": kc.ROUNDED_IN})]

    def _output_residual(self, _: KernelCall, given: _Arguments) -> list[Lowered]:
        return self._added("output", self.config.query_size, kc.ROUNDED_IN, given)

    def _residual_of_ranks(self, _: KernelCall, given: _Arguments) -> list[Lowered]:
        given |= {"partial": _OUT, "arrived": ARRIVED, "next": kc.CARRIED}
        given["epsilon"] = self.config.norm_epsilon
        return [self.own.shared_rows(given)]

    def _norm_gate_up(self, _: KernelCall, given: _Arguments) -> list[Lowered]:
        c = self.config
        product = MatrixProduct(self.rows, 2 * c.inner, c.hidden)
        called = self._product("gate_up", product, given["weight"], kc.CARRIED, _OUT)
        silu = {**given, "sums": _OUT, "out": kc.ROUNDED_INNER}
        grid = self.own.row_grid(c.inner // 8)
        gated = self.own.piece("silu_rows", grid, kc.ROW_THREADS, silu)
        return [self._norm(given), *called, gated]

    def _down_residual(self, _: KernelCall, given: _Arguments) -> list[Lowered]:
        return self._added("down", self.config.inner, kc.ROUNDED_INNER, given)

    def _added(
        self, name: str, inputs: int, rounded: BufferArgument, given: _Arguments
    ) -> list[Lowered]:
        """Returns a product that is added to what is there, unless `rows_of_ranks` adds it."""
        adds = given["x"] != SHARED_PARTIAL
        product = MatrixProduct(self.rows, self.config.hidden, inputs, accumulate=adds)
        return self._product(name, product, given["weight"], rounded, given["x"] if adds else _OUT)

    def _piece_attention(self, given: _Arguments) -> kc.CudaLaunch:
        """Returns a launch with blocks of 3 or 4 warps.  A warp has 32 rows of a query head if the
        blocks still fill the device and the registers suffice, else 16 (docs/log has others)."""
        c, group = self.config, self.config.heads // self.config.kv_heads
        queries = max(n for n in range(1, _MAX_PIECE_QUERIES + 1) if group % n == 0)
        warps, heads = max(1, 4 // queries), c.heads // queries
        blocks = heads * -(-self.rows // (32 * warps))
        tiles = 2 if c.head_size <= 64 and 2 * blocks >= 3 * self.own.multiprocessors else 1
        positions = 64 if c.head_size <= 64 and tiles == 1 else 32
        rows, threads = 16 * tiles * warps, 32 * warps * queries
        shared = 4 * positions * -(-c.head_size // 64) * 128  # keys and values, twice
        macros = self._heads_macros | {"PIECE_QUERIES": queries, "PIECE_ROWS": rows}
        macros |= {"PIECE_TILES": tiles, "PIECE_POSITIONS": positions}
        shape = LaunchConfig((heads, -(-self.rows // rows), 1), threads, shared)
        return kc.CudaLaunch.of("piece_attention", _piece_attention(), macros, shape, given)

    @property
    def _warpgroup_cut(self) -> tuple[int, int]:
        """The warpgroups of a block, with 64 query vectors each, and the blocks: the most
        warpgroups whose blocks still fill the device.  They do not change a row's bits."""
        c, multiprocessors = self.config, self.own.multiprocessors
        groups = 4 if c.head_size == 64 else 2
        while True:
            rows = 64 * groups // (c.heads // c.kv_heads)
            items = c.kv_heads * -(-self.rows // rows)
            if groups == 1:
                return groups, min(items, 2 * multiprocessors)
            if items >= 0.9 * multiprocessors:
                return groups, min(items, multiprocessors)
            groups //= 2

    def _warpgroup_attention(self, given: _Arguments) -> kc.CudaLaunch:
        """Returns a launch whose blocks have one warpgroup more, which copies."""
        c, (groups, blocks) = self.config, self._warpgroup_cut
        positions, stages = (64, 4) if c.head_size == 64 else (128, 2)
        shared = (64 * groups + 2 * stages * positions) * c.head_size * 2 + 4 * self.rows
        macros = self._heads_macros | {"WARPGROUPS": groups, "STAGES": stages}
        macros |= {"PIECE_POSITIONS": positions}
        shape, kernel = LaunchConfig(blocks, 128 * (groups + 1), shared), "warpgroup_attention"
        return kc.CudaLaunch.of(kernel, _warpgroup_attention(), macros, shape, given, arch="sm_90a")

    # --- parts
    @property
    def _heads_macros(self) -> dict[str, int]:
        found = {k: self.own.shape_macros[k] for k in ("HEADS", "KV_HEADS", "HEAD_SIZE")}
        return found | kc.family_macros(self.config)

    def _norm(self, given: _Arguments) -> kc.CudaLaunch:
        return self.own.norm({**given, "out": kc.CARRIED, "squares": ABSENT, "half": 0})

    def _product(
        self,
        name: str,
        product: MatrixProduct,
        weight: CallArgument,
        inputs: BufferArgument,
        out: CallArgument,
    ) -> list[Lowered]:
        """Returns the product, after the launches that unpack a packed matrix."""
        assert isinstance(weight, BufferArgument) and isinstance(out, BufferArgument)
        name = f"{name}_product"
        packing = self.formats.get(f"layers.{weight.layer}.{weight.name}")
        if packing is None:
            return [ProductCall(name, product, weight, inputs, out)]
        made: list[Lowered] = []
        offset = first = 0
        for part in packing:
            given: _Arguments = {"bricks": weight, "out": _UNPACKED, "offset": offset}
            given |= {"columns": product.inputs, "first": first}
            given["size"] = pair_size(self.config, weight.name)
            shape = LaunchConfig(2 * part.pairs, _UNPACK_THREADS)
            kernel = f"{part.kind}_to_rows"
            made.append(kc.CudaLaunch.of(kernel, unpack_source(), {}, shape, given))
            offset, first = offset + part.nbytes(product.inputs), first + 2 * part.pairs
        return [*made, ProductCall(name, product, _UNPACKED, inputs, out)]
