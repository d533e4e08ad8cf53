"""The decoder's CUDA kernels: which source, macros and launch shape a call of the program gets.

    launches = lower(program, config, rows=1, context=2048, tuning=…)

gives one `CudaLaunch` for each launch of a step; it is pure and needs no GPU.  The kernels
(`kernels/*.cu`) have the names and parameters of `host.kernels`, and are compiled for one shape:

    rows == 1      matvec.cu    float32 activations, weights straight into registers
                   attention_block.cu  a layer's first three calls in one launch, by the tuning
    rows 2 to 64   matmul.cu    tensor cores, inputs of the products rounded to bfloat16
    more, and from some rows on, where a library multiplies: see cuda.library
    any            attention.cu (split over the KV length), step.cu (embed, advance), sample.cu,
                   loop.cu (continue_loop)

Types: matrices, embedding and KV cache bfloat16; norms, rope, residual, q, attended, inner, logits
float32; sums float32.  Layouts are those of `weights` and `plan`.  The workspace is larger than the
host's: `workspace_bytes`, zeroed once when it is allocated (its counters reset themselves).

Not guaranteed: the same bits for other numbers of rows, other tunings or other GPUs.  The same
launches give the same bits, always: sums go in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ostinato import LaunchConfig, Source
from ostinato.driver.signature import Signature
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.shapes import (
    BLOCKED,
    COUNTER_BYTES,
    MAX_ROWS,
    PRODUCTS,
    MatrixShape,
    Product,
    Shape,
    Tuning,
    VectorShape,
    default_tuning,
    products_of,
    require_supported,
)
from ostinato.models.program import Argument, Bound, KernelCall
from ostinato.modules import CompileOptions

__all__ = ["SIGNATURES", "CudaLaunch", "Cut", "lower", "source_of", "workspace_bytes"]

_FOLDER = Path(__file__).parent / "kernels"
_EMBED_THREADS = 128
_SAMPLE_THREADS = 1024

_LIVE = "live: *const i32, "
_HEADS = "heads: u32, kv_heads: u32, head_size: u32, sequences: u32, context: u32, "
SIGNATURES: dict[str, str] = {
    "embed": "rows: *const i32, state: *const i32, live: *out i32, table: *const bf16, "
    "x: *out f32, history: *i32, row_count: u32, hidden: u32, vocabulary: u32, sequences: u32, "
    "context: u32",
    "norm_qkv_rope": _LIVE + "x: *const f32, norm: *const f32, weight: *const bf16, "
    "rope: *const f32, cache: *bf16, q: *out f32, workspace: *f32, row_count: u32, hidden: u32, "
    + _HEADS
    + "epsilon: f32",
    "attention": _LIVE + "q: *const f32, cache: *const bf16, attended: *out f32, workspace: *f32, "
    "row_count: u32, " + _HEADS + "scale: f32",
    "attention_block": _LIVE + "x: *const f32, norm: *const f32, weight: *const bf16, "
    "rope: *const f32, cache: *bf16, output_weight: *const bf16, workspace: *f32, row_count: u32, "
    "hidden: u32, " + _HEADS + "epsilon: f32, scale: f32",
    "output_residual": _LIVE + "attended: *const f32, weight: *const bf16, x: *f32, "
    "workspace: *f32, row_count: u32, hidden: u32, width: u32",
    "norm_gate_up": _LIVE + "x: *const f32, norm: *const f32, weight: *const bf16, "
    "inner: *out f32, workspace: *f32, row_count: u32, hidden: u32, width: u32, epsilon: f32",
    "down_residual": _LIVE + "inner: *const f32, weight: *const bf16, x: *f32, workspace: *f32, "
    "row_count: u32, hidden: u32, width: u32",
    "head": _LIVE + "x: *const f32, norm: *const f32, weight: *const bf16, logits: *f32, "
    "workspace: *f32, row_count: u32, hidden: u32, vocabulary: u32, epsilon: f32",
    "sample": _LIVE + "logits: *const f32, options: *const u64, chosen: *out i32, "
    "history: *const i32, adjusted: *out f32, workspace: *const f32, row_count: u32, "
    "vocabulary: u32, context: u32",
    "advance": _LIVE + "chosen: *const i32, options: *const u64, stops: *const i32, state: *i32, "
    "ring: *i32, row_count: u32, stop_count: u32, context: u32, ring_size: u32",
    "continue_loop": "condition: cond, counter: *i32, rows: *const i32, state: *const i32, "
    "row_count: u32, sequences: u32, start: u32",
}
"""Parameters of the CUDA kernels.  Those of the host's, and `workspace` for `sample`, which reads
there what `head` found; `attention_block` has those of the three that it stands for."""


# ---------------------------------------------------------------------------------------- lowering


@dataclass(frozen=True, slots=True)
class CudaLaunch:
    """One launch of a step: what to compile, how to launch it, and with what."""

    kernel: str
    source: Source
    options: CompileOptions
    config: LaunchConfig
    arguments: tuple[tuple[str, Argument], ...]
    calls: int = 1
    """How many calls of the program it does, one after the other."""

    @property
    def signature(self) -> Signature:
        return self.source.signatures[self.kernel]


def lower(
    program: Sequence[KernelCall],
    config: LlamaConfig,
    *,
    rows: int,
    context: int,
    tuning: Tuning | None = None,
    multiprocessors: int = 132,
) -> tuple[CudaLaunch, ...]:
    """The launches of a step of `rows` rows, in order.

    `context`: positions of a sequence, which bounds the grid of the attention.  `tuning`: the
    default's if None.  Raises UnsupportedModelError.
    """
    require_supported(config, rows)
    chosen = tuning or default_tuning(
        config, rows=rows, context=context, multiprocessors=multiprocessors
    )
    cut = Cut(config, rows, chosen)
    launches: list[CudaLaunch] = []
    rest = list(program)
    while rest:
        calls = rest[:1]
        if chosen.block is not None and calls[0].kernel == BLOCKED[0]:
            calls = rest[: len(BLOCKED)]
        del rest[: len(calls)]
        launches.append(cut.launch(calls, after=launches[-1].kernel if launches else None))
    return tuple(launches)


def workspace_bytes(
    config: LlamaConfig,
    *,
    rows: int,
    context: int,
    tuning: Tuning | None = None,
    multiprocessors: int = 132,
) -> int:
    """Bytes that a step of exactly `rows` rows needs as its workspace; a plan for several sizes of
    steps needs the largest.  To be zero before the first step."""
    chosen = tuning or default_tuning(
        config, rows=rows, context=context, multiprocessors=multiprocessors
    )
    return Cut(config, rows, chosen).workspace_bytes


@functools.cache
def _source(name: str) -> Source:
    return source_of(name, SIGNATURES)


def source_of(name: str, signatures: Mapping[str, str]) -> Source:
    """A .cu file with the headers beside it."""
    headers = {path.name: path.read_text() for path in sorted(_FOLDER.glob("*.cuh"))}
    return Source(
        (_FOLDER / f"{name}.cu").read_text(),
        signatures=signatures,
        headers=headers,
        name=f"{name}.cu",
    )


@dataclass(frozen=True)
class Cut:
    """A config, a number of rows and a tuning, made into macros and grids."""

    config: LlamaConfig
    rows: int
    tuning: Tuning

    @functools.cached_property
    def products(self) -> dict[str, Product]:
        return products_of(self.config)

    @property
    def padded_rows(self) -> int:
        return -(-self.rows // 8) * 8

    def blocks(self, name: str) -> int:
        """Blocks that share the outputs of a product."""
        shape: Shape = getattr(self.tuning, name)
        return -(-self.products[name].pairs // shape.block_pairs)

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
        }

    def macros(self, kernel: str) -> dict[str, str]:
        """What a kernel's source is compiled with; no more, so that equal code is compiled once."""
        shape, c, block = self.shape_macros, self.config, self.tuning.block
        found: dict[str, object]
        if kernel in PRODUCTS:
            found = dict(shape)
            for call, name in PRODUCTS.items():
                if block is not None and call in BLOCKED:
                    continue
                for item in fields(getattr(self.tuning, name)):
                    value = getattr(getattr(self.tuning, name), item.name)
                    found[f"{name}_{item.name}".upper()] = value
            if block is not None:
                found["RESIDUAL_PARTS"] = block.units(c)
        elif kernel == "attention":
            found = {k: shape[k] for k in ("HEADS", "KV_HEADS", "HEAD_SIZE", "ROWS")}
            for name, value in asdict(self.tuning.attention).items():
                found[f"ATTENTION_{name.upper()}"] = value
            found["PREVIOUS_STARTS"] = self.starts("norm_qkv_rope")
        elif kernel == "attention_block":
            assert block is not None
            found = dict(shape)
            for name, value in asdict(block).items():
                found[f"BLOCK_{name.upper()}"] = value
        elif kernel == "sample":
            found = {"VOCAB": c.vocabulary, "HEAD_BLOCKS": self.blocks("head")}
            found["SAMPLE_THREADS"] = _SAMPLE_THREADS
        elif kernel == "continue_loop":
            found = {"ROWS": self.rows}
        else:
            found = {"HIDDEN": c.hidden, "VOCAB": c.vocabulary, "ROWS": self.rows}
            found["EMBED_THREADS"] = _EMBED_THREADS
        found["START_NEXT"] = self.starts(kernel)
        return {name: str(value) for name, value in found.items()}

    def starts(self, kernel: str) -> str:
        return self.tuning.start_next.get(kernel, "AFTER_WAIT")

    def file(self, kernel: str) -> str:
        if kernel in PRODUCTS:
            return "matvec" if self.rows == 1 else "matmul"
        if kernel == "continue_loop":
            return "loop"
        return kernel if kernel in ("attention", "attention_block", "sample") else "step"

    def launch(self, calls: Sequence[KernelCall], *, after: str | None) -> CudaLaunch:
        """The launch that does these calls; `after`: the kernel before it, None for the first."""
        kernel = calls[0].kernel if len(calls) == 1 else "attention_block"
        arguments = {name: value for call in calls for name, value in call.arguments}
        if kernel == "sample":
            arguments.setdefault("workspace", Bound("workspace"))
        elif kernel == "attention_block":
            arguments["weight"] = dict(calls[0].arguments)["weight"]
            arguments["output_weight"] = dict(calls[2].arguments)["weight"]
        # attention_block reads what `embed` writes before it waits.
        apart = after is None or (kernel == "attention_block" and after == "embed")
        names = [part.split(":")[0].strip() for part in SIGNATURES[kernel].split(",")]
        return CudaLaunch(
            kernel,
            _source(self.file(kernel)),
            CompileOptions(defines=tuple(self.macros(kernel).items())),
            self.launch_config(kernel, programmatic=self.tuning.programmatic and not apart),
            tuple((name, arguments[name]) for name in names),
            len(calls),
        )

    def launch_config(self, kernel: str, *, programmatic: bool) -> LaunchConfig:
        c = self.config
        if kernel in PRODUCTS:
            name = PRODUCTS[kernel]
            shape, product = getattr(self.tuning, name), self.products[name]
            grid: tuple[int, int, int]
            if isinstance(shape, VectorShape):
                half = -(-(product.inputs // 8) // 8) * 8 + 4
                grid, warps, shared = (self.blocks(name), 1, 1), shape.warps, 2 * half * 16
            else:
                grid, warps = (self.blocks(name), shape.blocks_k, 1), shape.tiles * shape.split
                inputs = self.padded_rows * (shape.slab + 32) * 2
                shared = max(inputs, warps * 16 * self.padded_rows * 4)
            return LaunchConfig(grid, 32 * warps, shared, programmatic=programmatic)
        if kernel == "attention":
            shape = self.tuning.attention
            parts = c.heads // c.kv_heads // shape.queries
            grid = (shape.splits, c.kv_heads * parts, self.rows)
            shared = (shape.warps + 1) * shape.queries * (c.head_size + 2) * 4
            cluster = (shape.cluster, 1, 1) if shape.cluster > 1 else None
            return LaunchConfig(
                grid, 32 * shape.warps, shared, cluster=cluster, programmatic=programmatic
            )
        if kernel == "attention_block":
            block = self.tuning.block
            assert block is not None
            return LaunchConfig(
                (block.cluster, block.units(c), 1),
                32 * block.warps,
                block.shared_bytes(c),
                cluster=(block.cluster, 1, 1),
                programmatic=programmatic,
            )
        if kernel == "sample":
            return LaunchConfig(self.rows, _SAMPLE_THREADS, programmatic=programmatic)
        if kernel == "embed":
            return LaunchConfig(self.rows, _EMBED_THREADS, programmatic=programmatic)
        return LaunchConfig(1, MAX_ROWS, programmatic=programmatic)

    @property
    def workspace_bytes(self) -> int:
        c, t = self.config, self.tuning
        most = self.rows * c.heads * t.attention.splits * (c.head_size + 2) * 4
        most = max(most, self.rows * self.blocks("head") * 8)
        if t.block is not None:
            most = max(most, (t.block.units(c) + 1) * c.hidden * 4)
        for name, product in self.products.items():
            shape = getattr(t, name)
            if isinstance(shape, MatrixShape) and shape.blocks_k > 1:
                width = -(-product.pairs // 8) * 8
                most = max(most, shape.blocks_k * self.padded_rows * width * 8)
        return COUNTER_BYTES + most
