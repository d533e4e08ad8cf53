"""The decoder as data: which kernels a step launches, in which order, on which buffers.

A step works on *rows*.  A row is one token of one sequence:

    {token, position, sequence, flags}        four int32: `ROW`

`sequence` says whose sequence it is (its place in the KV cache), `position` where in it.  Rows of
one sequence at rising positions are a piece of a prompt; rows of different sequences are a batch.
Rows without `ACTIVE` pad a bucket: nothing that they write is read.  Only the number of rows is
frozen in a captured step: tokens, positions and lengths are read on the device, and `sample`
advances them there.

    embed                                                 rows and states -> live rows, residual
    layer 0..n: norm_qkv_rope  attention  output_residual  norm_gate_up  down_residual
    head  sample                                          only in a step that samples

Where heads are normed before their rope (`LlamaConfig.qk_norm`), a norm needs a whole head's sums,
and `norm_qkv  norm_rope` stand in the place of `norm_qkv_rope`.

Several steps can be one launch: a graph with a WHILE node whose body is a step and one kernel more,
which counts down and checks whether any row of the step has not stopped.

    continue_loop (starts the count)   while: embed … sample  continue_loop (counts down)

`decode_program(config)` gives that as a tuple of `KernelCall`; it is pure, and printing it is the
documentation of a step.  The buffers that the calls name are made by `models.plan`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ostinato.models.config import LlamaConfig

__all__ = [
    "ABSENT",
    "ACTIVE",
    "FROM_STATE",
    "OF_RANKS",
    "OPTIONS",
    "RING",
    "ROW",
    "SAMPLE",
    "SAMPLED_ROWS",
    "STATE",
    "STOP_TOKENS",
    "Bound",
    "KernelCall",
    "decode_program",
    "describe",
    "kernel_call",
    "loop_call",
]

ACTIVE = 1
"""The row is computed; without it the row is padding, whatever else it holds."""
SAMPLE = 2
"""The row gets logits and a next token, and its sequence's state is advanced."""
FROM_STATE = 4
"""Token and position are the sequence's state, not the row's; and the row pads once that
stopped."""

ROW = np.dtype(
    [("token", np.int32), ("position", np.int32), ("sequence", np.int32), ("flags", np.int32)]
)
STATE = np.dtype(
    [("token", np.int32), ("position", np.int32), ("length", np.int32), ("stopped", np.int32)]
)
"""Of one sequence, written by `sample`: the sampled token, the position it will take, the KV
length once it is there (position + 1), and whether the sequence is at its end."""
OPTIONS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("seed", np.uint64),
        ("top_k", np.int32),
        ("limit", np.int32),
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
    ]
)
"""How a sequence samples (see `sampling.SamplingOptions`).  `limit`: a token that would take this
position or a later one stops the sequence."""
RING = np.dtype([("token", np.int32), ("tag", np.int32)])
"""Where the host finds tokens: entry `position % size` of the sequence's ring; `tag` is
2 * position + stopped, so that one 8-byte word says which token it is.  A negative tag is none yet;
a negative token says that the logits held NaN."""

SAMPLED_ROWS = 64
"""A step of more rows is a piece of one sequence's prompt: its active rows come last, at positions
that rise by one, and only the last one may be SAMPLE.  See `PlanSizes` for where batches are
larger."""
STOP_TOKENS = 16
"""How many end tokens the device holds; unused ones are -1."""
ABSENT = 0
"""The null pointer: in the place of a weight that this model does not have."""
OF_RANKS = {"output_residual": "output_of_ranks", "down_residual": "down_of_ranks"}
"""Products whose sums belong together with other ranks', and what they are called where they add
these themselves."""


@dataclass(frozen=True, slots=True)
class Bound:
    """An argument that is a buffer of the plan.  `layer` picks that layer's part, `last` the part
    of the step's last row."""

    name: str
    layer: int | None = None
    last: bool = False

    def __str__(self) -> str:
        name = f"{self.name}, last row" if self.last else self.name
        return name if self.layer is None else f"{name}[{self.layer}]"


Argument: TypeAlias = Bound | str | int | float
"""A buffer, the name of a size that the step decides ("rows", "sequences", "context", "ring") or of
the loop's "condition", or a constant."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch: the kernel's name, and its arguments by parameter."""

    kernel: str
    arguments: tuple[tuple[str, Argument], ...]

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(f'{name}={value}' for name, value in self.arguments)})"


def decode_program(
    config: LlamaConfig, *, sampled: bool = True, last_row: bool = False
) -> tuple[KernelCall, ...]:
    """The launches of one step, in order.

    `sampled`: with the output head, the choice of the next token and the advance of the state;
    without, what all pieces of a prompt but the last need.  `last_row`: these are done for the
    step's last row alone, so that a long piece does not pay for a head of all its rows.
    """
    sizes = _Sizes(config)
    calls = [sizes.embed()]
    for layer in range(config.layers):
        calls.extend(sizes.layer(layer))
    if sampled:
        calls.extend(sizes.ending(last_row))
    return tuple(calls)


def loop_call(start: int = 0) -> KernelCall:
    """The kernel that decides whether a loop goes on with another step.

    With `start` it is launched before the loop, which then does `start` steps at most; without, it
    is the last kernel of the loop's body.  The loop goes on only as long as a row that is
    FROM_STATE has not stopped, so no step runs after all have.
    """
    return kernel_call(
        "continue_loop",
        condition="condition",
        counter=Bound("counter"),
        rows=Bound("rows"),
        state=Bound("state"),
        row_count="rows",
        sequences="sequences",
        start=start,
    )


def describe(program: Sequence[KernelCall]) -> str:
    """The program as text, one call a line."""
    width = max((len(call.kernel) for call in program), default=0)
    lines = []
    for index, call in enumerate(program):
        arguments = ", ".join(
            str(value) if isinstance(value, Bound) else f"{name}={value}"
            for name, value in call.arguments
        )
        lines.append(f"{index:4}  {call.kernel:{width}}  {arguments}")
    return "\n".join(lines)


def kernel_call(kernel: str, **arguments: Argument) -> KernelCall:
    """A call with arguments by parameter."""
    return KernelCall(kernel, tuple(arguments.items()))


class _Sizes:
    """Makes the calls of one config."""

    def __init__(self, config: LlamaConfig) -> None:
        self.config = config

    def embed(self) -> KernelCall:
        c = self.config
        return kernel_call(
            "embed",
            rows=Bound("rows"),
            state=Bound("state"),
            live=Bound("live"),
            table=Bound("embed"),
            x=Bound("x"),
            history=Bound("history"),
            row_count="rows",
            hidden=c.hidden,
            vocabulary=c.vocabulary,
            sequences="sequences",
            context="context",
        )

    def layer(self, layer: int) -> tuple[KernelCall, ...]:
        c = self.config
        live, x, workspace = Bound("live"), Bound("x"), Bound("workspace")
        q, attended, inner = Bound("q"), Bound("attended"), Bound("inner")
        cache = Bound("cache", layer)
        heads = {"heads": c.heads, "kv_heads": c.kv_heads, "head_size": c.head_size}
        return (
            *self.qkv(layer),
            kernel_call(
                "attention",
                live=live,
                q=q,
                cache=cache,
                attended=attended,
                workspace=workspace,
                row_count="rows",
                **heads,
                sequences="sequences",
                context="context",
                window=c.window(layer),
                scale=1.0 / math.sqrt(c.head_size),
            ),
            kernel_call(
                "output_residual",
                live=live,
                attended=attended,
                weight=Bound("wo", layer),
                x=x,
                workspace=workspace,
                row_count="rows",
                hidden=c.hidden,
                width=c.query_size,
            ),
            kernel_call(
                "norm_gate_up",
                live=live,
                x=x,
                norm=Bound("mlp_norm", layer),
                weight=Bound("w_gate_up", layer),
                inner=inner,
                workspace=workspace,
                row_count="rows",
                hidden=c.hidden,
                width=c.inner,
                epsilon=c.norm_epsilon,
            ),
            kernel_call(
                "down_residual",
                live=live,
                inner=inner,
                weight=Bound("w_down", layer),
                x=x,
                workspace=workspace,
                row_count="rows",
                hidden=c.hidden,
                width=c.inner,
            ),
        )

    def qkv(self, layer: int) -> tuple[KernelCall, ...]:
        """Norm, queries, keys and values, rope, and the write into the cache."""
        c = self.config
        live, qkv, cache, q = Bound("live"), Bound("qkv"), Bound("cache", layer), Bound("q")
        heads = {"heads": c.heads, "kv_heads": c.kv_heads, "head_size": c.head_size}
        product: dict[str, Argument] = {
            "live": live,
            "x": Bound("x"),
            "norm": Bound("attn_norm", layer),
            "weight": Bound("wqkv", layer),
        }
        bias: Argument = Bound("bqkv", layer) if c.qkv_bias else ABSENT
        if not c.qk_norm:
            one = kernel_call(
                "norm_qkv_rope",
                **product,
                bias=bias,
                rope=Bound("rope"),
                cache=cache,
                q=q,
                workspace=Bound("workspace"),
                row_count="rows",
                hidden=c.hidden,
                **heads,
                sequences="sequences",
                context="context",
                epsilon=c.norm_epsilon,
            )
            return (one,)
        return (
            kernel_call(
                "norm_qkv",
                **product,
                qkv=qkv,
                workspace=Bound("workspace"),
                row_count="rows",
                hidden=c.hidden,
                **heads,
                epsilon=c.norm_epsilon,
            ),
            kernel_call(
                "norm_rope",
                live=live,
                qkv=qkv,
                bias=bias,
                q_norm=Bound("q_norm", layer),
                k_norm=Bound("k_norm", layer),
                rope=Bound("rope"),
                cache=cache,
                q=q,
                row_count="rows",
                **heads,
                sequences="sequences",
                context="context",
                epsilon=c.norm_epsilon,
            ),
        )

    def ending(self, last: bool) -> tuple[KernelCall, ...]:
        c = self.config
        live, logits = Bound("live", last=last), Bound("logits")
        rows: Argument = 1 if last else "rows"
        return (
            kernel_call(
                "head",
                live=live,
                x=Bound("x", last=last),
                norm=Bound("final_norm"),
                weight=Bound("embed" if c.tied_embeddings else "head"),
                logits=logits,
                workspace=Bound("workspace"),
                row_count=rows,
                hidden=c.hidden,
                vocabulary=c.vocabulary,
                epsilon=c.norm_epsilon,
            ),
            kernel_call(
                "sample",
                live=live,
                logits=logits,
                options=Bound("options"),
                stops=Bound("stops"),
                state=Bound("state"),
                ring=Bound("ring"),
                history=Bound("history"),
                adjusted=Bound("adjusted"),
                row_count=rows,
                vocabulary=c.vocabulary,
                stop_count=STOP_TOKENS,
                context="context",
                ring_size="ring",
            ),
        )
