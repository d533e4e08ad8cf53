"""The lowering of the program's calls to CUDA kernels: source, macros and launch shape of each.

    launches = lower(program, config, rows=1, context=2048, tuning=…)

returns one `CudaLaunch` for each launch of a step; `lower` is pure and needs no GPU.  The kernels
(`kernels/*.cu`) have the names and parameters of `host.kernels`, some of them with more parameters
(`SIGNATURES`), and are compiled for one shape:

    rows == 1      matvec.cu    float32 activations, weights straight into registers; rounded.cu
                                where shared memory cannot hold them (`in_tiles`)
                   attention_block.cu  a layer's first three calls in one launch, by the tuning
    rows 2 to 64   rounded.cu   tensor cores, inputs rounded to bfloat16 by the preceding kernel, or
                                in pieces.cu
    more, or fewer with a library: see cuda.library
                   all of these also with packed matrices (`bricks`)
    any            attention.cu (split over the KV length), step.cu (embed), sample.cu,
                   loop.cu (continue_loop), norm_rope.cu (norms of heads), lookup.cu (draft, accept)

The additions of a family to Llama's layers (biases, norms of heads, sliding windows) are compiled
only into the kernels of its models: `family_macros`.

Types: matrices, embedding and KV cache bfloat16; norms, rope, residual, q, attended, inner, logits
float32; sums float32.  Layouts are those of `weights` and `plan`.  The workspace is larger than the
host's: `workspace_bytes`, zeroed once when it is allocated (its counters reset themselves).

Other numbers of rows, other tunings or other GPUs may give other bits.  The same launches always
give the same bits: sums have a fixed order.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from ostinato import LaunchConfig, Source
from ostinato.driver.signature import Signature
from ostinato.models.backend import BoundCall, Buffers
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.bricks import FORMATS, Formats, Packing, matrix_bytes
from ostinato.models.cuda.shapes import (
    COUNTER_BYTES,
    MAX_ROWS,
    PRODUCT_CALLS,
    ROUNDED_CALLS,
    STATIC_SHARED,
    WARPGROUP_SHARED,
    AttentionShape,
    BlockShape,
    MatrixShape,
    PackedShape,
    Product,
    Shape,
    Tuning,
    attends_in_tiles,
    blocked_calls,
    default_tuning,
    packed_shape,
    power_of_two_from,
    products_of,
    require_supported,
    without_block,
    without_warpgroups,
)
from ostinato.models.program import (
    ABSENT,
    BEST_OVER_RANKS,
    CARRYING_SUM,
    DRAFT_KEY,
    MOST_BIASES,
    MOST_LOGPROBS,
    OF_RANKS,
    BufferArgument,
    CallArgument,
    KernelCall,
    decode_program,
    parameter_names,
)
from ostinato.models.program import SIGNATURES as HOST_SIGNATURES
from ostinato.modules import CompileOptions

ENDING = (
    *("head", "sample", "accept", "best_of_part", "best_of_ranks", BEST_OVER_RANKS),
    *("sample_of_ranks", "accept_of_ranks"),
)
"""The calls that work only on rows that sample."""
_FOLDER = Path(__file__).parent / "kernels"
_MATRICES = ("weight", "table")
"""The parameters whose matrices may be packed."""
_ATTENDED = ("attended: *out f32", "attended: *out bf16")
_PACKED = re.compile(rf"\b({'|'.join(_MATRICES)}): \*const bf16")
_Packing: TypeAlias = Packing | None
"""The packing of a matrix; None for bfloat16."""
_RESIDENT_THREADS = 1024  # leaves 64 registers for each thread
_RESIDENT_BLOCKS = 16  # of a multiprocessor of compute capability 8.6, the fewest of all
_MOST_OF_RANKS = 4  # blocks of a cluster whose product adds the sums of all ranks
ROUNDED_OF_RANKS = {call: f"rounded_{call}" for call in OF_RANKS.values()}
"""The kernels for several rows, with rounded inputs, that replace each of `OF_RANKS`."""
_OF_ONE = {call: product for product, call in OF_RANKS.items()}
_OF_ONE |= {ROUNDED_OF_RANKS[call]: ROUNDED_CALLS[product] for call, product in _OF_ONE.items()}
"""The kernels of products with a sum over ranks, each with the kernel of the product alone."""
_OF_ROUNDED = {ROUNDED_CALLS[call]: name for call, name in PRODUCT_CALLS.items()}
_FILES = {
    **dict.fromkeys((*PRODUCT_CALLS, *_OF_ONE), "matvec"),
    **dict.fromkeys((*_OF_ROUNDED, *ROUNDED_OF_RANKS.values()), "rounded"),
    **dict.fromkeys(("best_of_part", "best_of_ranks", BEST_OVER_RANKS), "shard"),
    "sample_of_ranks": "sample",
    CARRYING_SUM: "residual",
    "continue_loop": "loop",
    **dict.fromkeys(("draft", "accept", "accept_of_ranks"), "lookup"),
    "embed": "step",
}
"""The kernels whose source file has another name."""
PRODUCTS_OF = PRODUCT_CALLS | _OF_ROUNDED
"""The product that each kernel computes, by kernel."""
_ROW_THREADS = {
    "embed": 128,
    **dict.fromkeys(("sample", "sample_of_ranks"), 1024),
    **dict.fromkeys(("draft", "accept", "accept_of_ranks"), 1024),
    **dict.fromkeys(("best_of_part", "best_of_ranks"), 32),
    BEST_OVER_RANKS: 128,
}
"""Threads of the kernels that have a block for each row."""
_PREFETCH_PIECE = 2048
_WARPGROUP_PANELS, _BRICK_PANELS = 1, 2  # PANELS in common.cuh
_ROPE_THREADS = 128

_LIVE = "live: *const i32, "
_WEIGHT = "weight: *const bf16, later: *const bytes, "
_HALVES = re.compile(r"\b(weight|table|cache): (\*(?:const )?)f32")
_OF_RANKS = f"{_WEIGHT}x: *f32, sums: *u64, row_count: u32, hidden: u32, width: u32, rank: u32"


def _of_cuda(kernel: str, signature: str) -> str:
    text = _HALVES.sub(r"\1: \2bf16", signature).replace("workspace: *out f32", "workspace: *f32")
    if kernel in PRODUCT_CALLS and kernel != "head":
        text = text.replace("weight: *const bf16, ", _WEIGHT)
    if kernel in ("sample", "accept"):
        text = text.replace("row_count", "workspace: *const f32, row_count")
    return text


SIGNATURES: dict[str, str] = {
    **{kernel: _of_cuda(kernel, text) for kernel, text in HOST_SIGNATURES.items()},
    "attention_block": _LIVE + "x: *const f32, norm: *const f32, weight: *const bf16, "
    "bias: *const f32, q_norm: *const f32, k_norm: *const f32, rope: *const f32, cache: *bf16, "
    "output_weight: *const bf16, workspace: *f32, row_count: u32, hidden: u32, heads: u32, "
    "kv_heads: u32, head_size: u32, sequences: u32, context: u32, window: u32, epsilon: f32, "
    "scale: f32",
    "output_of_ranks": f"{_LIVE}attended: *const f32, {_OF_RANKS}",
    "down_of_ranks": f"{_LIVE}inner: *const f32, {_OF_RANKS}",
    CARRYING_SUM: f"{_LIVE}x: *f32, partial: *f32, norm: *const f32, next: *out bf16, "
    "squares: *u64, windows: *u64, half: u32, row_count: u32, hidden: u32, rank: u32",
    BEST_OVER_RANKS: f"{_LIVE}options: *const u64, stops: *const i32, state: *i32, ring: *i32, "
    "workspace: *const f32, windows: *u64, row_count: u32, context: u32, ring_size: u32, "
    "first: u32, rank: u32",
    "rows_of_ranks": f"{_LIVE}x: *f32, partial: *const f32, arrived: *f32, norm: *const f32, "
    "next: *bf16, windows: *u64, row_count: u32, hidden: u32, rank: u32, epsilon: f32",
}
"""Parameters of the CUDA kernels: those of the host's kernels, with matrices and cache in bfloat16.
Products of layers also have `later`, the weights that they prefetch; `sample` and `accept` also
have `workspace`, with the results of `head`.  `attention_block` has the parameters of the calls
that it replaces.
"""


PIECE_SIGNATURES = {
    "norm_rows": _LIVE
    + "x: *const f32, norm: *const f32, out: *out bf16, squares: *u64, half: u32, "
    "row_count: u32, hidden: u32, epsilon: f32",
    "silu_rows": _LIVE + "sums: *const f32, out: *out bf16, row_count: u32, width: u32",
}
"""Parameters of the kernels in pieces.cu."""
_ROUNDED = f"{_LIVE}rounded: *const bf16, {_WEIGHT}"
_COUNTS = "workspace: *f32, row_count: u32, hidden: u32"
_SCALED = f"squares: *u64, {_COUNTS}"
_CARRIED = f"norm: *const f32, next: *out bf16, squares: *u64, {_COUNTS}"
ROUNDED_SIGNATURES = {
    "rounded_qkv_rope": _ROUNDED + "bias: *const f32, rope: *const f32, cache: *bf16, "
    f"q: *out f32, {_SCALED}, sequences: u32, context: u32, epsilon: f32",
    "rounded_qkv": f"{_ROUNDED}qkv: *out f32, {_SCALED}, epsilon: f32",
    "rounded_output": f"{_ROUNDED}x: *f32, {_CARRIED}, width: u32",
    "rounded_gate_up": f"{_ROUNDED}out: *out bf16, {_SCALED}, width: u32, epsilon: f32",
    "rounded_down": f"{_ROUNDED}x: *f32, {_CARRIED}, width: u32",
    **dict.fromkeys(
        ROUNDED_OF_RANKS.values(),
        f"{_ROUNDED}x: *f32, {_CARRIED.replace(_COUNTS, 'sums: *u64, ' + _COUNTS)}, "
        "width: u32, rank: u32",
    ),
    "rounded_head": f"{_LIVE}rounded: *const bf16, weight: *const bf16, logits: *f32, {_SCALED}, "
    "vocabulary: u32, epsilon: f32",
}
"""Parameters of the kernels in rounded.cu."""
ROUNDED_IN, ROUNDED_INNER = BufferArgument("product_in"), BufferArgument("product_inner")
"""Inputs of products in bfloat16: the attention's result ("output"), the MLP's inner ("down")."""
CARRIED, SQUARES = BufferArgument("product_next"), BufferArgument("product_squares")
"""The residual times the next norm's weights, and its sums of squares (linear.cuh)."""
_CARRYING = ("rounded_output", "rounded_down", *ROUNDED_OF_RANKS.values(), CARRYING_SUM)
ROW_THREADS = 128
"""Threads of the blocks in pieces.cu that compute a part of a row."""
_MAX_NORM_THREADS = 512

Kept = TypeVar("Kept", bound=BoundCall)

# ---------------------------------------------------------------------------------------- lowering


@dataclass(frozen=True, slots=True)
class CudaLaunch:
    """One launch of a step: the source and options to compile, the launch shape, the arguments."""

    kernel: str
    source: Source
    options: CompileOptions
    config: LaunchConfig
    arguments: tuple[tuple[str, CallArgument], ...]
    calls: int = 1
    """The number of consecutive calls of the program that the launch computes."""

    @classmethod
    def of(
        cls,
        kernel: str,
        source: Source,
        macros: Mapping[str, object],
        config: LaunchConfig,
        given: Mapping[str, CallArgument],
        *,
        arch: str | None = None,
        calls: int = 1,
    ) -> CudaLaunch:
        """Returns a launch whose kernel is compiled with these macros; of the arguments in `given`
        it has those that the kernel takes."""
        options = CompileOptions(defines=tuple((k, str(v)) for k, v in macros.items()), arch=arch)
        names = [parameter.name for parameter in source.signatures[kernel].parameters]
        arguments = tuple((name, given[name]) for name in names)
        return cls(kernel, source, options, config, arguments, calls)

    @property
    def signature(self) -> Signature:
        return self.source.signatures[self.kernel]

    @property
    def compiled(self) -> tuple[str, Source, CompileOptions]:
        """The key of the compiled kernel."""
        return self.kernel, self.source, self.options


def lower(
    program: Sequence[KernelCall | Kept],
    config: LlamaConfig,
    *,
    rows: int,
    context: int,
    tuning: Tuning | None = None,
    multiprocessors: int = 132,
    formats: Formats | None = None,
) -> tuple[CudaLaunch | Kept, ...]:
    """Returns the launches of a step of `rows` rows, in order; bound calls stay in their places.

    `context`: positions of a sequence, which bounds the grid of the attention.  `tuning`: the
    default tuning if None.  `formats`: the packed matrices.  Raises UnsupportedModelError.
    """
    require_supported(config, rows)
    chosen = tuning or default_tuning(
        config, rows=rows, context=context, multiprocessors=multiprocessors
    )
    if formats or not all(
        isinstance(call, KernelCall) and call.kernel not in (*_OF_ONE, CARRYING_SUM)
        for call in program
    ):
        # attention_block reads only bfloat16, and leaves the residual in parts.
        chosen = without_block(chosen, config, multiprocessors=multiprocessors)
    lowering = Lowering(config, rows, chosen, formats or {}, multiprocessors)
    launches: list[CudaLaunch | Kept] = []
    rest = list(program)
    while rest:
        first = rest[0]
        if not isinstance(first, KernelCall):
            launches.append(first)
            del rest[0]
            continue
        calls = [first]
        if chosen.block is not None and calls[0].kernel == lowering.blocked[0]:
            calls = [call for call in rest[: len(lowering.blocked)] if isinstance(call, KernelCall)]
        del rest[: len(calls)]
        before, following = launches[-1] if launches else None, rest[0] if rest else None
        launches.extend(lowering.launches(calls, getattr(before, "kernel", None), following))
    return tuple(lowering.prefetching(launches))


def rounded_buffers(config: LlamaConfig, rows: int) -> Buffers:
    """Returns shapes and dtypes of the buffers that steps of up to `rows` rows with rounded inputs
    need besides a plan's, and those of the float32 buffers that they replace except for one row."""
    c, bfloat16, f32 = config, np.dtype(np.uint16), np.dtype(np.float32)
    return {
        "attended": ((1, c.heads, c.head_size), f32),
        "inner": ((1, c.inner), f32),
        ROUNDED_IN.name: ((rows, c.query_size), bfloat16),
        ROUNDED_INNER.name: ((rows, c.inner), bfloat16),
        CARRIED.name: ((rows, c.hidden), bfloat16),
        SQUARES.name: ((2, rows, 2), np.dtype(np.uint64)),
    }


def workspace_bytes(
    config: LlamaConfig,
    *,
    rows: int,
    context: int,
    tuning: Tuning | None = None,
    multiprocessors: int = 132,
    formats: Formats | None = None,
) -> int:
    """Returns the bytes of workspace for a step of exactly `rows` rows; a plan for several sizes of
    steps needs the largest.  The caller must zero the workspace before the first step."""
    chosen = tuning or default_tuning(
        config, rows=rows, context=context, multiprocessors=multiprocessors
    )
    return Lowering(config, rows, chosen, formats or {}, multiprocessors).workspace_bytes


def shape_macro(name: str) -> str:
    """Returns the macro of a product's shape in the kernels."""
    return f"{name.upper()}_SHAPE"


def prefetch_macro(name: str) -> str:
    """Returns the macro of the number of bytes that a product prefetches."""
    return f"{name.upper()}_PREFETCH"


def _shape_type(template: str, shape: Shape | PackedShape, packing: Packing = ()) -> str:
    parts = (f"Rows<{part.kind}, {part.pairs}>" for part in packing)
    values = (str(value) for name, value in asdict(shape).items() if name != "alone")
    return f"{template}<{', '.join([*values, *parts])}>"


def _product_of(kernel: str) -> str | None:
    """Returns the product that a kernel computes, None if it computes none."""
    return PRODUCTS_OF.get(_OF_ONE.get(kernel, kernel))


def family_macros(config: LlamaConfig) -> dict[str, int]:
    """Returns the macros for a family's additions to Llama's layers; none for Llama itself."""
    c = config
    wanted = {"QKV_BIAS": c.qkv_bias, "QK_NORM": c.qk_norm, "WINDOWED": any(c.windows)}
    return {name: 1 for name, there in wanted.items() if there}


@functools.cache
def _pieces() -> Source:
    return source_of("pieces", PIECE_SIGNATURES)


@functools.cache
def _source(
    name: str, packed: bool = False, of_ranks: bool = False, rounds: bool = False
) -> Source:
    signatures = ROUNDED_SIGNATURES if name == "rounded" else SIGNATURES
    if name == "attention" and rounds:
        signatures = {k: v.replace(*_ATTENDED) for k, v in signatures.items()}
    if packed:
        signatures = {k: _PACKED.sub(r"\1: *const u8", v) for k, v in signatures.items()}
    if not of_ranks:
        return source_of(name, signatures)
    from ostinato.distributed.exchange import exchange_headers

    return source_of(name, signatures, exchange_headers())


def exchange_macros(given: Mapping[str, CallArgument]) -> dict[str, object]:
    """Returns the macros of exchange.cuh for a sum over ranks, from the call's arguments."""
    from ostinato.distributed.exchange import THREADS

    names = ("words", "header", "blocks", "scattered")
    found: dict[str, object] = {f"EXCHANGE_{name.upper()}": given[name] for name in names}
    return found | {"RANKS": given["ranks"], "EXCHANGE_THREADS": THREADS}


def source_of(
    name: str, signatures: Mapping[str, str], more: Mapping[str, str] | None = None
) -> Source:
    """Returns the source of a .cu file with the headers beside it, and those in `more` by name."""
    headers = {path.name: path.read_text() for path in sorted(_FOLDER.glob("*.cuh"))}
    headers.update(more or {})
    return Source(
        (_FOLDER / f"{name}.cu").read_text(),
        signatures=signatures,
        headers=headers,
        name=f"{name}.cu",
    )


@dataclass(frozen=True)
class Lowering:
    """The macros and grids for a config, a number of rows and a tuning."""

    config: LlamaConfig
    rows: int
    tuning: Tuning
    formats: Formats = field(default_factory=dict)
    multiprocessors: int = 132
    library: bool = False
    """True if a library computes the products of layers."""

    @property
    def rounds(self) -> bool:
        """True if products of layers read bfloat16, which the attention then writes."""
        return self.library or self.tuning.tiles

    @functools.cached_property
    def products(self) -> dict[str, Product]:
        return products_of(self.config)

    @property
    def blocked(self) -> tuple[str, ...]:
        """The calls of the program that attention_block.cu computes in one launch."""
        return blocked_calls(self.config)

    @functools.cached_property
    def panels(self) -> int:
        """The layout of rounded inputs: 0 for rows; else panels for warpgroups or packed matrices,
        if all products read them.  Panels need bulk copies, which devices with clusters have."""
        found = {packing for packings in self._packings.values() for packing in packings}
        if self.library or not self.tuning.tiles:
            return 0
        if found == {None}:
            return _WARPGROUP_PANELS if self.tuning.warpgroups else 0
        whole = all(product.inputs % 64 == 0 for product in self.products.values())
        return _BRICK_PANELS if whole and self.tuning.clusters and None not in found else 0

    def packing(self, call: KernelCall) -> _Packing:
        """Returns the packing of the matrix that the call reads, if any."""
        for name, value in call.arguments:
            if name in _MATRICES and isinstance(value, BufferArgument):
                at = "" if value.layer is None else f"layers.{value.layer}."
                return self.formats.get(at + value.name)
        return None

    @property
    def head_packing(self) -> _Packing:
        return self.formats.get("embed" if self.config.tied_embeddings else "head")

    def shape(self, name: str, packing: _Packing = None) -> Shape | PackedShape:
        """Returns the shape of a product."""
        if packing is None:
            shape: Shape = getattr(self.tuning, name)
            if (
                isinstance(shape, MatrixShape)
                and shape.warpgroup
                and self.panels != _WARPGROUP_PANELS
            ):
                few = min(self.rows, MAX_ROWS)
                of = self.products[name]
                return without_warpgroups(name, self.tuning, of, few, self.multiprocessors)
            return shape
        if (known := self.tuning.packed.get(name)) is not None:
            return known
        return packed_shape(
            name,
            self.products[name],
            max(2, self.rows) if self.tuning.tiles else self.rows,
            bits=max(FORMATS[part.kind].unit for part in packing) // 128,
            k_types=any(part.kind.endswith("K") for part in packing),
            multiprocessors=self.multiprocessors,
            clusters=self.tuning.clusters,
            shared=self.tuning.shared,
        )

    def shape_of(self, kernel: str, packing: _Packing = None) -> Shape | PackedShape:
        """Returns the shape of a kernel's product.  One that also sums over ranks has clusters of
        at most four blocks, which fit two multiprocessors that have room for two blocks each."""
        name = _product_of(kernel)
        assert name is not None, kernel
        shape = self.shape(name, packing)
        if not isinstance(shape, MatrixShape) or kernel not in ROUNDED_OF_RANKS.values():
            return shape
        few = min(shape.cluster, _MOST_OF_RANKS)
        return replace(shape, blocks_k=few, cluster=few) if shape.cluster > 1 else shape

    def blocks(self, name: str, packing: _Packing = None) -> int:
        """Returns the number of blocks that divide the outputs of a product."""
        each = self.shape(name, packing).block_pairs
        if packing is None:
            return -(-self.products[name].pairs // each)
        return sum(-(-part.pairs // each) for part in packing)

    @functools.cached_property
    def shape_macros(self) -> dict[str, int]:
        c = self.config
        return {
            "HIDDEN": c.hidden,
            "INNER": c.inner,
            "HEADS": c.heads,
            "KV_HEADS": c.kv_heads,
            "HEAD_SIZE": c.head_size,
            "VOCAB": c.vocabulary,
            "ROWS": self.rows,
            **({"PANELS": self.panels} if self.panels else {}),
            **family_macros(c),
        }

    def macros(
        self, kernel: str, given: Mapping[str, CallArgument], packing: _Packing = None
    ) -> dict[str, object]:
        """Returns the macros that a kernel's source needs, and no others, so that equal code is
        compiled once.

        `given`: the call's arguments.  A rank of several embeds and samples with the whole
        vocabulary, while its products have its part.
        """
        shape, c, block = self.shape_macros, self.config, self.tuning.block
        vocabulary = given.get("vocabulary", c.vocabulary)
        head = self.head_packing
        found: dict[str, object]

        def some(*names: str) -> dict[str, object]:
            return {name: shape[name] for name in names if name in shape}

        def fields(prefix: str, record: AttentionShape | BlockShape) -> dict[str, object]:
            return {f"{prefix}_{name.upper()}": value for name, value in asdict(record).items()}

        if kernel in _OF_ONE:
            from ostinato.distributed.exchange import sums_macros

            packed = "PackedMatrixShape" if self.tuning.tiles else "PackedShape"
            template = "Shape" if packing is None else packed
            name = PRODUCTS_OF[_OF_ONE[kernel]]
            cut = self.shape_of(kernel, packing)
            found = shape | self._product_macros(template, name, packing, cut)
            ranks = given["ranks"]
            assert isinstance(ranks, int)
            found |= {**sums_macros(ranks), "RANKS": ranks}
            found["RESIDENT_BLOCKS"] = self.resident(kernel, packing)
        elif kernel in PRODUCTS_OF:
            found = dict(shape)
            calls = PRODUCT_CALLS if kernel in PRODUCT_CALLS else _OF_ROUNDED
            for call, name in calls.items():
                if packing is None and (block is None or call not in self.blocked):
                    found |= self._product_macros("Shape", name)
                elif packing is not None and call == kernel:
                    template = "PackedMatrixShape" if self.tuning.tiles else "PackedShape"
                    found |= self._product_macros(template, name, packing)
            if block is not None:
                found["RESIDUAL_PARTS"] = block.units(c)
        elif kernel == CARRYING_SUM:
            found = {k: v for k, v in shape.items() if k != "ROWS"}  # all steps share the kernel
            found |= exchange_macros(given)
        elif kernel == "attention":
            found = some("HEADS", "KV_HEADS", "HEAD_SIZE", "ROWS", "WINDOWED", "PANELS")
            found |= fields("ATTENTION", self.tuning.attention)
            tiled = attends_in_tiles(c, self.rows, self.tuning.shared)
            found["ATTENTION_TILED"] = int(tiled)
            before = self.blocked[self.blocked.index(kernel) - 1]
            if self.rounds:
                before = ROUNDED_CALLS.get(before, before)
                found["ROUND_ATTENDED"] = 1
            found["PREVIOUS_STARTS"] = self.starts(before)
        elif kernel == "norm_rope":
            found = some("HEADS", "KV_HEADS", "HEAD_SIZE", "QKV_BIAS", "QK_NORM")
            found["ROPE_THREADS"] = _ROPE_THREADS
        elif kernel == "attention_block":
            assert block is not None
            found = shape | fields("BLOCK", block)
        elif kernel in ("sample", "sample_of_ranks"):
            found = {"VOCAB": vocabulary, "STOPS": given["stop_count"]}
            found |= {"MOST_BIASES": MOST_BIASES, "MOST_LOGPROBS": MOST_LOGPROBS}
            found["SAMPLE_THREADS"] = _ROW_THREADS[kernel]
            if kernel == "sample":
                before = "rounded_head" if self.tuning.tiles else "head"
                found["HEAD_BLOCKS"] = self.blocks("head", head)
                found["HEAD_TOKENS"] = 2 * self.shape("head", head).block_pairs
                found["PREVIOUS_STARTS"] = self.starts(before)
            else:
                ranks = given["ranks"]
                assert isinstance(vocabulary, int) and isinstance(ranks, int)
                found |= {"HEAD_BLOCKS": ranks, "RANKS": ranks, "HEAD_TOKENS": vocabulary // ranks}
        elif kernel in ("draft", "accept", "accept_of_ranks"):
            found = {"ROWS": self.rows, "LOOKUP_THREADS": _ROW_THREADS[kernel]}
            if kernel == "draft":
                found["DRAFT_KEY"] = DRAFT_KEY
            elif kernel == "accept":
                found |= {"STOPS": given["stop_count"], "HEAD_BLOCKS": self.blocks("head", head)}
            else:
                ranks = given["ranks"]
                found |= {"STOPS": given["stop_count"], "HEAD_BLOCKS": ranks, "RANKS": ranks}
        elif kernel == "best_of_part":
            found = {"HEAD_BLOCKS": self.blocks("head", head)}
        elif kernel == BEST_OVER_RANKS:
            found = {"HEAD_BLOCKS": self.blocks("head", head), "STOPS": given["stop_count"]}
            found |= exchange_macros(given)
        elif kernel == "best_of_ranks":
            found = {"RANKS": given["ranks"], "STOPS": given["stop_count"]}
        elif kernel == "continue_loop":
            found = {"ROWS": self.rows}
        else:
            threads = _ROW_THREADS["embed"]
            found = {"HIDDEN": c.hidden, "VOCAB": vocabulary, "EMBED_THREADS": threads}
            if packing is not None:
                found |= {"PACKED": 1, "EMBED_FORMAT": packing[0].kind}
        return found | {"START_NEXT": self.starts(kernel)}

    def _product_macros(
        self,
        template: str,
        name: str,
        packing: _Packing = None,
        cut: Shape | PackedShape | None = None,
    ) -> dict[str, object]:
        cut = cut or self.shape(name, packing)
        found: dict[str, object] = {
            shape_macro(name): _shape_type(template, cut, packing or ()),
            prefetch_macro(name): self.prefetched(name),
        }
        return found if packing is None else found | {"PACKED": 1}

    def arch(self, kernel: str, packing: _Packing) -> str | None:
        """Returns the architecture to compile a kernel for; None for the device's own."""
        if _OF_ONE.get(kernel, kernel) in _OF_ROUNDED and packing is None:
            return "sm_90a" if self.panels == _WARPGROUP_PANELS else None
        return None

    def prefetched(self, name: str) -> int:
        """Returns the bytes of a later product's weights that a product prefetches into L2: the
        tuning's, or the smallest layer's matrix, in whole pieces (`Later` in common.cuh)."""
        if name not in self.tuning.prefetch:
            return 0
        target, wanted = self.tuning.prefetch[name]
        least = min(self._matrix_bytes(packing, target) for packing in self._packings[target])
        return min(wanted, least) // _PREFETCH_PIECE * _PREFETCH_PIECE

    @functools.cached_property
    def _packings(self) -> dict[str, set[_Packing]]:
        """The packings of each product's matrices in all layers, by product."""
        found: dict[str, set[_Packing]] = {}
        for call in decode_program(self.config):
            if (name := PRODUCT_CALLS.get(call.kernel)) is not None:
                found.setdefault(name, set()).add(self.packing(call))
        return found

    def _matrix_bytes(self, packing: _Packing, name: str) -> int:
        product = self.products[name]
        return product.nbytes if packing is None else matrix_bytes(packing, product.inputs)

    def prefetching(self, launches: Sequence[CudaLaunch | Kept]) -> list[CudaLaunch | Kept]:
        """Returns the launches of a step, with `later` set to the weights that each prefetches:
        those of the next launch of the product that the tuning names, if there is one."""
        made: list[CudaLaunch | Kept] = []
        later: dict[str, CallArgument] = {}  # the weights of the next product of each name
        for one in reversed(launches):
            if isinstance(one, CudaLaunch) and (name := _product_of(one.kernel)) is not None:
                given = dict(one.arguments)
                target, _ = self.tuning.prefetch.get(name, ("", 0))
                if target in later:
                    given["later"] = later[target]
                later[name] = given["weight"]
                made.append(replace(one, arguments=tuple(given.items())))
            else:
                made.append(one)
        return made[::-1]

    def starts(self, kernel: str) -> str:
        return self.tuning.start_next.get(_OF_ONE.get(kernel, kernel), "AFTER_WAIT")

    def resident(self, kernel: str, packing: _Packing = None) -> int:
        """Returns the blocks of a multiprocessor if all of a product's blocks run at once.  Two
        multiprocessors together hold whole clusters: which others share clusters is not known."""
        config = self.launch_config(kernel, packing, programmatic=False)
        blocks = math.prod(config.grid)
        if config.cluster is None:
            return -(-blocks // self.multiprocessors)
        size = config.cluster[0]
        clusters = -(-blocks // size // max(1, self.multiprocessors // 2))
        return -(-clusters * size // 2)

    def launches(
        self, calls: Sequence[KernelCall], after: str | None = None, before: object = None
    ) -> list[CudaLaunch]:
        """Returns the launches for these calls; more than one if inputs must be rounded first.

        `after`: the preceding kernel, None if unknown.  `before`: the following call, whose norm,
        if any, is applied to the residual that these calls leave."""
        if not self.rounds:
            return [self.launch(calls, after=after)]
        [call] = calls
        given = dict(call.arguments)
        if call.kernel == "attention":
            given["attended"] = ROUNDED_IN
            return [self.launch([replace(call, arguments=tuple(given.items()))], after=after)]
        carried: dict[str, CallArgument] = {"norm": ABSENT, "next": ABSENT, "squares": ABSENT}
        if isinstance(before, KernelCall) and self._normed(before):
            norm = dict(before.arguments)["norm"]
            carried = {"norm": norm, "next": CARRIED, "squares": SQUARES}
        if call.kernel == CARRYING_SUM:
            arguments = tuple((given | carried).items())
            return [self.launch([replace(call, arguments=arguments)], after=after)]
        kernel = (ROUNDED_CALLS | ROUNDED_OF_RANKS).get(call.kernel)
        if kernel is None or not self.tuning.tiles:
            return [self.launch(calls, after=after)]
        made: list[CudaLaunch] = []
        given["later"] = ABSENT
        if kernel in _CARRYING:
            given["rounded"] = ROUNDED_IN if _product_of(kernel) == "output" else ROUNDED_INNER
            given |= {"workspace": BufferArgument("workspace"), **carried}
        else:
            given |= {"rounded": CARRIED, "squares": SQUARES, "out": ROUNDED_INNER}
            if after not in _CARRYING:
                half = int(kernel != "rounded_gate_up")
                made.append(self.norm({**given, "out": CARRIED, "half": half}))
        names = parameter_names(ROUNDED_SIGNATURES[kernel])
        if "ranks" in given:  # no parameter, but a macro
            names = (*names, "ranks")
        product = KernelCall(kernel, tuple((name, given[name]) for name in names))
        return [*made, self.launch([product], after=made[0].kernel if made else after)]

    def _normed(self, call: KernelCall) -> bool:
        """True if the call is a product of the normed residual."""
        kernel = ROUNDED_CALLS.get(call.kernel)
        return kernel is not None and self.products[_OF_ROUNDED[kernel]].normed

    def norm(self, given: Mapping[str, CallArgument]) -> CudaLaunch:
        """Returns the launch that norms and rounds all rows of the residual to `out`; with
        `squares`, the product that reads `out` applies the scale."""
        return self.piece("norm_rows", (self.rows, 1, 1), self._norm_threads, given)

    def row_grid(self, items: int) -> tuple[int, int, int]:
        """Returns the grid of a kernel with `items` threads for each row."""
        return (-(-items // ROW_THREADS), self.rows, 1)

    def piece(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        threads: int,
        given: Mapping[str, CallArgument],
    ) -> CudaLaunch:
        """Returns a launch of a kernel in pieces.cu."""
        shape = LaunchConfig(grid, threads, programmatic=self.tuning.programmatic)
        macros = self._piece_macros | {"ROW_THREADS": ROW_THREADS}
        return CudaLaunch.of(kernel, _pieces(), macros, shape, given)

    def shared_rows(self, given: Mapping[str, CallArgument]) -> CudaLaunch:
        """Returns a launch of rows_of_ranks.cu; `given`: see `sharding.carrying_sums`."""
        ranks, grid = given["ranks"], given["grid"]
        assert isinstance(ranks, int) and isinstance(grid, int)
        kernel, macros = "rows_of_ranks", self._piece_macros | exchange_macros(given)
        shape = LaunchConfig(min(grid, -(-self.rows // ranks)), self._norm_threads)
        return CudaLaunch.of(kernel, _source(kernel, of_ranks=True), macros, shape, given)

    @property
    def _piece_macros(self) -> dict[str, object]:
        """The macros of linear.cuh without the number of rows: all steps share the kernels."""
        macros: dict[str, object] = {k: v for k, v in self.shape_macros.items() if k != "ROWS"}
        return macros | {"NORM_THREADS": self._norm_threads}

    @property
    def _norm_threads(self) -> int:
        """The threads of `norm_rows`: one for each 16 bytes of the result, up to a block's most."""
        return min(_MAX_NORM_THREADS, -(-self.config.hidden // 256) * 32)

    def launch(self, calls: Sequence[KernelCall], *, after: str | None) -> CudaLaunch:
        """Returns the launch for these calls.  `after`: the preceding kernel, None if unknown."""
        kernel = calls[0].kernel if len(calls) == 1 else "attention_block"
        arguments = {name: value for call in calls for name, value in call.arguments}
        arguments.setdefault("later", ABSENT)
        if kernel in ("sample", "accept"):
            arguments.setdefault("workspace", BufferArgument("workspace"))
        elif kernel == "attention_block":
            arguments["weight"] = dict(calls[0].arguments)["weight"]
            arguments["output_weight"] = dict(calls[-1].arguments)["weight"]
            for name in ("q_norm", "k_norm"):
                arguments.setdefault(name, ABSENT)
        # attention_block reads `embed`'s results before its wait, so it must not start early there.
        apart = after is None or (kernel == "attention_block" and after == "embed")
        packing = self.packing(calls[0])
        programmatic = self.tuning.programmatic and not apart
        of_ranks = kernel in (*_OF_ONE, CARRYING_SUM, BEST_OVER_RANKS)
        file = _FILES.get(kernel, kernel)
        return CudaLaunch.of(
            kernel,
            _source(file, packing is not None, of_ranks, self.rounds),
            self.macros(kernel, arguments, packing),
            self.launch_config(kernel, packing, arguments, programmatic=programmatic),
            arguments,
            arch=self.arch(kernel, packing),
            calls=len(calls),
        )

    def launch_config(
        self,
        kernel: str,
        packing: _Packing = None,
        given: Mapping[str, CallArgument] | None = None,
        *,
        programmatic: bool,
    ) -> LaunchConfig:
        """Returns the shape of a launch.  `given`: the call's arguments, for a sum over ranks."""
        c = self.config
        grid: tuple[int, int, int] = (self.rows, 1, 1)
        shared, cluster = 0, 1  # blocks of a cluster, along x
        if (name := _product_of(kernel)) is not None:
            shape, blocks = self.shape_of(kernel, packing), self.blocks(name, packing)
            if isinstance(shape, MatrixShape):
                cluster = shape.cluster
                grid = (shape.blocks_k, blocks, 1) if cluster > 1 else (blocks, shape.blocks_k, 1)
                threads = 32 * shape.tiles * shape.split
                shared = shape.shared_bytes(self.rows, self.tuning.shared)
            else:
                grid, threads = (blocks, 1, 1), 32 * shape.warps
                shared = shape.shared_bytes(self.products[name].inputs)
        elif kernel == "attention":
            split = self.tuning.attention
            parts = c.heads // c.kv_heads // split.queries
            grid = (split.splits, c.kv_heads * parts, self.rows)
            if split.shares_rows:
                own = self.rows * c.kv_heads * parts
                grid = (max(own, split.resident * self.multiprocessors), 1, 1)
            threads, shared, cluster = 32 * split.warps, split.shared_bytes(c), split.cluster
        elif kernel == "attention_block":
            block = self.tuning.block
            assert block is not None
            grid = (block.cluster, block.units(c), 1)
            threads, shared, cluster = 32 * block.warps, block.shared_bytes(c), block.cluster
        elif kernel == "norm_rope":
            # A thread has four pairs of a head, and all threads of a head are in one warp.
            lanes = power_of_two_from(c.head_size // 8) * (c.heads + 2 * c.kv_heads)
            grid, threads = (-(-lanes // _ROPE_THREADS), self.rows, 1), _ROPE_THREADS
        elif kernel == CARRYING_SUM:
            from ostinato.distributed.exchange import THREADS

            assert given is not None and isinstance(given["grid"], int)
            grid, threads = (given["grid"], 1, 1), THREADS
        elif kernel == "continue_loop":
            grid, threads = (1, 1, 1), MAX_ROWS
        else:
            threads = _ROW_THREADS[kernel]
        return LaunchConfig(
            grid,
            threads,
            shared,
            cluster=(cluster, 1, 1) if cluster > 1 else None,
            programmatic=programmatic,
        )

    def _all_shapes(self) -> Iterator[tuple[Product, Shape | PackedShape]]:
        """Yields all products of a step, with each shape that they have in it."""
        for name, product in self.products.items():
            yield product, self.shape(name)
        for name, packings in self._packings.items():
            for packing in packings - {None}:
                yield self.products[name], self.shape(name, packing)

    def exchanges_sums(self) -> bool:
        """True if kernels of products can compute the sums over ranks: all blocks must be resident
        at once, since each waits for the same block of other ranks, and not every lane of one has
        sums of all rows (`whole_sums`)."""
        tiles = self.tuning.tiles
        most = WARPGROUP_SHARED if tiles and self.tuning.warpgroups else self.tuning.shared
        for call in decode_program(self.config):
            if call.kernel in OF_RANKS:
                packing, kernel = self.packing(call), OF_RANKS[call.kernel]
                kernel = ROUNDED_OF_RANKS[kernel] if tiles else kernel
                shape = self.shape_of(kernel, packing)
                if isinstance(shape, MatrixShape) and shape.whole_sums:
                    return False
                config = self.launch_config(kernel, packing, programmatic=False)
                held = self.resident(kernel, packing)
                if held > _RESIDENT_BLOCKS or held * config.block[0] > _RESIDENT_THREADS:
                    return False
                if held * (config.shared + (STATIC_SHARED if tiles else 0) + 1024) > most:
                    return False
        return True

    @property
    def workspace_bytes(self) -> int:
        c, t = self.config, self.tuning
        most = self.rows * c.heads * t.attention.splits * (c.head_size + 2) * 4
        most = max(most, self.rows * self.blocks("head", self.head_packing) * 8)
        if t.block is not None:
            most = max(most, (t.block.units(c) + 1) * c.hidden * 4)
        for product, shape in self._all_shapes():
            if isinstance(shape, MatrixShape) and shape.blocks_k > 1 and shape.cluster == 1:
                width, padded_rows = product.tile_count * 8, -(-self.rows // 8) * 8
                most = max(most, shape.blocks_k * padded_rows * width * 8)
        return COUNTER_BYTES + most
