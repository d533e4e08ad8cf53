"""A step of one row as one persistent kernel (`kernels/persistent.cu`): when, and in which shape.

    shape = persistent_shape(config, multiprocessors=132, compute_capability=(9, 0))

is None where this kernel cannot do it; `why_not` says why.  Pure.

No backend chooses it.  Measured on an H100, µs a step at context 20 and 500: the 135M shape 340 and
360 here, 305 and 380 by the chain; the 1B shape 957 and 963 here, 954 and 993 by the chain (before
the chain's last tuning).  That is no gain at short contexts and too little at longer ones.
`lower(..., persistent=shape)` chooses it by hand.  A decoder's plan lacks what it needs: the
layers' weights of one kind in one buffer, and the exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.models.config import LlamaConfig

__all__ = [
    "DECODE_STEP",
    "SHARED_BYTES",
    "SIGNATURE",
    "PersistentShape",
    "exchange_words",
    "persistent_macros",
    "persistent_shape",
    "why_not",
]

DECODE_STEP = "decode_step"
"""The kernel's name."""
SIGNATURE = (
    "rows: *const i32, state: *i32, live: *out i32, table: *const bf16, attn_norm: *const f32, "
    "wqkv: *const bf16, wo: *const bf16, mlp_norm: *const f32, w_gate_up: *const bf16, "
    "w_down: *const bf16, final_norm: *const f32, head: *const bf16, rope: *const f32, "
    "cache: *bf16, x: *out f32, logits: *f32, options: *const u64, stops: *const i32, "
    "chosen: *out i32, ring: *i32, exchange: *u32, slots: u32, context: u32, stop_count: u32, "
    "ring_size: u32, epsilon: f32, scale: f32"
)
SHARED_BYTES = 232_448
"""Shared memory that a block of compute capability 9.0 can have."""

_LEAST = (9, 0)  # bulk copies


@dataclass(frozen=True, slots=True)
class PersistentShape:
    """How persistent.cu is cut.

    `blocks` stay on the chip together, each with `warps` warps that compute and one that
    copies.  A slot of the ring holds `columns` columns of two rows (a multiple of 64).
    What is handed on is written `replicas` times, and each time so that 128 bytes of it lie in
    `spread` lines: not all blocks ask the same places of L2.  `under_way`: slots of a warp's ring
    that are asked for and not there yet.
    Attention: a block takes a query head and one split of the positions, of which there is one for
    every `positions` there are, at most `splits`; a lane asks for `steps` positions at once.
    `shared`: bytes of shared memory of a block, of which the rings take what is left.
    """

    blocks: int
    warps: int
    columns: int
    replicas: int
    steps: int
    splits: int
    positions: int
    spread: int = 4
    under_way: int = 1
    shared: int = SHARED_BYTES

    @property
    def threads(self) -> int:
        return 32 * self.warps + 32

    @property
    def sample_threads(self) -> int:
        """Those of the threads that sample: a power of two."""
        return 32 << (self.warps.bit_length() - 1)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def why_not(
    config: LlamaConfig, *, multiprocessors: int, compute_capability: tuple[int, int]
) -> str | None:
    """Why the persistent kernel cannot do this model on this GPU, in words; None if it can."""
    c = config
    if compute_capability < _LEAST:
        return (
            f"compute capability {compute_capability[0]}.{compute_capability[1]} has no bulk copies"
        )
    if c.heads % c.kv_heads or c.head_size % 8 or c.head_size > 256:
        return f"{c.heads} heads of {c.head_size} over {c.kv_heads} KV heads are no whole groups"
    blocks = _blocks(c, multiprocessors)
    if c.heads > blocks:
        return f"{c.heads} heads are more than {blocks} blocks"
    widest = max(c.query_size, c.inner)
    if (widest + c.hidden) * 4 > SHARED_BYTES // 2:
        return f"inputs of {c.hidden} and {widest} leave too little shared memory for weights"
    return None


def persistent_shape(
    config: LlamaConfig, *, multiprocessors: int, compute_capability: tuple[int, int]
) -> PersistentShape | None:
    """The shape by rule, or None where this kernel cannot do it (`why_not`)."""
    if why_not(config, multiprocessors=multiprocessors, compute_capability=compute_capability):
        return None
    c = config
    blocks = _blocks(c, multiprocessors)
    wide = c.hidden > 1024  # more registers a thread for longer parts; the memory is the limit
    return PersistentShape(
        blocks=blocks,
        warps=7 if wide else 11,
        columns=min(1024, _up(max(c.hidden, 256), 64)),
        replicas=4,
        steps=1,
        splits=max(1, min(4, blocks // c.heads)),
        positions=128,
        under_way=2 if wide else 1,
    )


def _blocks(config: LlamaConfig, multiprocessors: int) -> int:
    """Every block needs a pair of outputs in the two phases that keep all in step."""
    c = config
    return min(multiprocessors, (c.query_size + 2 * c.kv_size) // 2, c.inner)


def exchange_words(config: LlamaConfig, shape: PersistentShape) -> int:
    """32-bit words of the exchange; zero at first, and written by this kernel alone."""
    c, s = config, shape
    region = 0
    for words in (
        c.query_size + 2 * c.kv_size,
        s.splits * c.query_size,
        s.splits * c.heads * 2,
        c.hidden,
        c.inner,
        c.hidden,
    ):
        region += _up(words, 32)
    return 32 + s.replicas * s.spread * region + _up(4 * s.blocks, 32)


def persistent_macros(config: LlamaConfig, shape: PersistentShape) -> dict[str, int | str]:
    """What persistent.cu is compiled with."""
    c, s = config, shape
    return {
        "HIDDEN": c.hidden,
        "INNER": c.inner,
        "HEADS": c.heads,
        "KV_HEADS": c.kv_heads,
        "HEAD_SIZE": c.head_size,
        "VOCAB": c.vocabulary,
        "LAYERS": c.layers,
        "ROWS": 1,
        "SAMPLE_THREADS": s.sample_threads,
        "SAMPLE_SYNC()": f"sync_threads_of(2,{s.sample_threads})",
        "PERSISTENT_BLOCKS": s.blocks,
        "PERSISTENT_WARPS": s.warps,
        "PERSISTENT_COLUMNS": s.columns,
        "PERSISTENT_REPLICAS": s.replicas,
        "PERSISTENT_SPREAD": s.spread,
        "PERSISTENT_UNDER_WAY": s.under_way,
        "PERSISTENT_STEPS": s.steps,
        "PERSISTENT_SPLITS": s.splits,
        "PERSISTENT_POSITIONS": s.positions,
        "PERSISTENT_SHARED": s.shared,
        "PERSISTENT_EXCHANGE": exchange_words(c, s),
    }
