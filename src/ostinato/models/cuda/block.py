"""How attention_block.cu is cut: a layer's norm, QKV, attention and output projection of one row as
one launch.  Shapes, what is legal, the rule.  Pure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ostinato.models.config import LlamaConfig

__all__ = ["BlockShape", "block_problem", "block_rule", "block_shapes"]

_REGISTERS = 1 << 16
_MOST_BYTES = 128 * 1024
"""Of weights that a block holds in registers.  More leave no room for the kernels beside it, and a
multiprocessor takes longer to read them than the launches that are saved."""
_MAX_SHARED = 160 * 1024
_LANES = (4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A cluster of `cluster` blocks does `queries` query heads of a KV head.  `warps` of a block;
    `lanes` share a pair of rows of the first product, `output_lanes` a row of the second; `steps`
    positions a lane asks for at once."""

    queries: int
    warps: int
    lanes: int
    output_lanes: int
    steps: int
    cluster: int = 8

    def units(self, config: LlamaConfig) -> int:
        """Clusters, each of which leaves a part of the residual."""
        return config.heads // self.queries

    def shared_bytes(self, config: LlamaConfig) -> int:
        """Dynamic shared memory of a block: `Shared` in attention_block.cu."""
        c, width = config, self.queries * config.head_size
        halves = sum(-(-(size // 8) // 8) * 8 + 4 for size in (c.hidden, width))
        fresh = (self.queries + 2) * c.head_size
        partials = (self.cluster + self.warps) * self.queries * (c.head_size + 2)
        return 32 * halves + -(-(4 * (fresh + partials + self.warps) + 16) // 16) * 16

    def loads(self, config: LlamaConfig) -> tuple[int, int]:
        """16-byte loads of weights of a thread, of the first product and of the second."""
        c = config
        pairs = -(-(self.queries + 2) * (c.head_size // 2) // self.cluster)
        rows, width = -(-c.hidden // self.cluster), self.queries * c.head_size
        return (
            2 * -(-pairs * self.lanes // (32 * self.warps)) * -(-c.hidden // (8 * self.lanes)),
            -(-rows * self.output_lanes // (32 * self.warps))
            * -(-width // (8 * self.output_lanes)),
        )


def block_problem(shape: BlockShape, config: LlamaConfig) -> str | None:
    """Why the kernel cannot be compiled or launched so, in words; None if it can.

    Takes what a file may hold: values of a wrong type are said, too.
    """
    s, c = shape, config
    for name in type(s).__dataclass_fields__:
        value: object = getattr(s, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return f"{name} is {value!r}"
    if c.heads // c.kv_heads % s.queries:
        return f"{s.queries} queries of {c.heads // c.kv_heads} in a cluster"
    if s.lanes not in _LANES or s.output_lanes not in _LANES or s.steps > 8:
        return f"{s.lanes} and {s.output_lanes} lanes, {s.steps} steps"
    if s.warps > 16 or not 2 <= s.cluster <= 8:
        return f"{s.warps} warps in clusters of {s.cluster}"
    first, second = s.loads(c)
    held = 4 * second + 8 * s.steps
    most = 36 + max(held + 4 * first + 8 * -(-c.hidden // (128 * s.warps)), held + 18 * s.queries)
    if most > min(255, _REGISTERS // (32 * s.warps)):
        return f"{first} and {second} loads a thread in {s.warps} warps do not fit the registers"
    if s.shared_bytes(c) > _MAX_SHARED:
        return f"{s.queries} queries in {s.warps} warps do not fit shared memory"
    return None


def block_shapes(config: LlamaConfig, multiprocessors: int) -> tuple[BlockShape, ...]:
    """Shapes worth a try, by a rough cost, the least first; none for a model that is too large."""
    c = config
    lanes = 32 // (1 << max(0, c.head_size // 8 - 1).bit_length())  # positions of a warp at once
    made: list[tuple[float, BlockShape]] = []
    for queries, cluster in itertools.product(range(1, c.heads // c.kv_heads + 1), (8, 4)):
        rows = (queries + 2) * c.head_size * c.hidden + c.hidden * queries * c.head_size
        if (
            2 * rows / cluster > _MOST_BYTES
            or cluster * c.heads // queries > multiprocessors
            or c.heads // c.kv_heads % queries
        ):
            continue
        for warps, pair_lanes, output_lanes, steps in itertools.product(
            (4, 5, 6, 8, 10, 12, 16), (8, 16, 32), (4, 8, 16), (1, 2, 4)
        ):
            shape = BlockShape(queries, warps, pair_lanes, output_lanes, steps, cluster)
            if block_problem(shape, c) is None:
                # What a thread does one after the other, warps that wait for each other, parts that
                # the next kernel adds up; idle positions, or a second tile soon.
                cost = sum(shape.loads(c)) + 0.75 * warps + 1.5 * shape.units(c)
                cost += 8 * abs(warps * lanes * steps * cluster / 640 - 1)
                cost += (cluster < 8) * 2 + 0.1 * abs(output_lanes - 8)
                made.append((cost, shape))
    return tuple(shape for _, shape in sorted(made, key=lambda pair: pair[0]))


def block_rule(config: LlamaConfig, multiprocessors: int) -> BlockShape | None:
    """The shape for a GPU that nobody has tuned for; None where three launches are better."""
    shapes = block_shapes(config, multiprocessors)
    return shapes[0] if shapes else None
