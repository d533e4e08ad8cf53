"""The decoder as data: which kernels a step launches, in which order, on which buffers.

A step works on *rows*.  A row is one token of one sequence:

    {token, position, sequence, flags}        four int32: `ROW`

`sequence` is the index of the sequence in the KV cache, `position` the token's place in the
sequence.  Rows of one sequence at rising positions are a piece of a prompt; rows of different
sequences are a batch.  Rows without `ACTIVE` pad a bucket: nothing that they write is read.  Only
the number of rows is frozen in a captured step: tokens, positions and lengths are read on the
device, and `sample` advances them there.

    embed                                                 rows and states -> live rows, residual
    layer 0..n: norm_qkv_rope  attention  output_residual  norm_gate_up  down_residual
    head  sample                                          only in a step that samples

Where heads are normed before their rope (`LlamaConfig.qk_norm`), a norm needs the sums of a whole
head, so `norm_qkv  norm_rope` replace `norm_qkv_rope`.

Several steps can be one launch: a graph with a WHILE node whose body is a step and one more kernel,
which counts down and ends the loop once every row of the step has stopped.

    continue_loop (starts the count)   while: embed … sample  continue_loop (counts down)

A step with drafts (`lookup`) gives its DRAFTS sequences several tokens: `draft` finds a sequence's
last tokens earlier in it, and makes rows of the tokens that followed there; `accept` keeps the
drafts that the model chooses too, and the token after them.  Rows without DRAFTS get one token from
`sample`, as ever.

    draft                                                 rows and states -> rows of the drafts
    embed … head  accept  sample                          as above, also with logits of the drafts

`decode_program(config)` returns a step as a tuple of `KernelCall`; it is pure, and `describe`
prints it.  `models.plan` allocates the buffers that the calls name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from ostinato.models.config import LlamaConfig

ACTIVE = 1
"""The flag of a row that is computed; a row without it is padding, whatever else it holds."""
SAMPLE = 2
"""The flag of a row that gets logits and a next token, and whose sequence's state is advanced."""
FROM_STATE = 4
"""The flag of a row whose token and position are read from the sequence's state.  Once the sequence
has stopped, the row is padding."""
MASKED = 8
"""The flag of a row whose next token is one that its sequence's mask allows (`allowed`)."""
DRAFTS = 16
"""The flag of a row behind which a step that drafts may put drafts, up to the next ACTIVE row."""

ROW = np.dtype(
    [("token", np.int32), ("position", np.int32), ("sequence", np.int32), ("flags", np.int32)]
)
STATE = np.dtype(
    [("token", np.int32), ("position", np.int32), ("length", np.int32), ("stopped", np.int32)]
)
"""The state of one sequence, written by `sample`: the sampled token, the position it will take, the
KV length with it (position + 1), and whether the sequence has stopped."""
OPTIONS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("seed", np.uint64),
        ("top_k", np.int32),
        ("limit", np.int32),
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("answer", np.int32),
        ("biased", np.int16),
        ("logprobs", np.int16),
    ]
)
"""The sampling options of a sequence (see `sampling.SamplingOptions`).  `limit`: a token that would
take this position or a later one stops the sequence.  `answer`: frequency and presence penalties
count the tokens from this position on.  `biased`: number of the sequence's `biases`.  `logprobs`:
0, or 1 + the number of likeliest tokens whose log probabilities are written."""
BIAS = np.dtype([("token", np.int32), ("bias", np.float32)])
"""A number that is added to the logit of a token."""
MOST_BIASES = 1024
"""The most biases of a sequence; no token may have two."""
MOST_LOGPROBS = 20
"""The most likeliest tokens with log probabilities."""
LOGPROBS = np.dtype(
    [
        ("chosen", np.float32),
        ("tokens", np.int32, (MOST_LOGPROBS,)),
        ("top", np.float32, (MOST_LOGPROBS,)),
    ]
)
"""Log probabilities that the device gives to the host, in the entry of their token's place in the
ring: the chosen token's, and the likeliest tokens with theirs, likeliest first."""
RING = np.dtype([("token", np.int32), ("tag", np.int32)])
"""A token that the device gives to the host, in entry `position % size` of the sequence's ring.
`tag` is 2 * position + stopped, so one 8-byte word identifies the token.  A negative tag: no token
yet.  A negative token: the logits held NaN."""
MORE = 1 << 30
"""Added to a token in the ring if the step that chose it has chosen the next one too."""
DRAFT_KEY = 3
"""The most last tokens of a sequence that a draft's place must have in common with its end."""

SAMPLED_ROWS = 64
"""Most rows of a step in which any row may be SAMPLE (larger batches: see `PlanSizes`).  A step of
more rows is a piece of one sequence's prompt: its active rows come last, at positions that rise by
one, and only the last row may be SAMPLE."""
STOP_TOKENS = 16
"""The number of end tokens that the device holds; unused ones are -1."""
ABSENT = 0
"""The null pointer, passed for a weight that the model does not have."""
OF_RANKS = {"output_residual": "output_of_ranks", "down_residual": "down_of_ranks"}
"""Products whose results are summed over all ranks, each with the name of the kernel that computes
the product and this sum."""

CARRYING_SUM = "residual_of_ranks"
"""The kernel of a sum over all ranks that also writes the next product's inputs."""
BEST_OVER_RANKS = "best_over_ranks"
"""The kernel that does `best_of_part` and `best_of_ranks`, and gathers the ranks' keys itself."""

_LIVE = "live: *const i32, "
_HEADS = "heads: u32, kv_heads: u32, head_size: u32, "
_CACHED = _HEADS + "sequences: u32, context: u32, "
_RESIDUAL = (
    "weight: *const f32, x: *f32, workspace: *out f32, row_count: u32, hidden: u32, width: u32"
)
_NORMED = _LIVE + "x: *const f32, norm: *const f32, weight: *const f32, "
_SAMPLED = (
    _LIVE + "logits: *f32, options: *const u64, stops: *const i32, state: *i32, ring: *i32, "
    "history: *const i32, kept: *out u32, biases: *const i32, allowed: *const u32, "
    "masks: *out u32, logprobs: *i32, "
)
_OF_RANKS = (
    _SAMPLED + "keys: *const u64, row_count: u32, vocabulary: u32, stop_count: u32, context: u32, "
    "ring_size: u32, ranks: u32"
)
SIGNATURES: dict[str, str] = {
    "embed": "rows: *const i32, state: *const i32, live: *out i32, table: *const f32, "
    "x: *out f32, history: *i32, row_count: u32, hidden: u32, vocabulary: u32, sequences: u32, "
    "context: u32",
    "norm_qkv_rope": _NORMED + "bias: *const f32, rope: *const f32, cache: *f32, q: *out f32, "
    f"workspace: *out f32, row_count: u32, hidden: u32, {_CACHED}epsilon: f32",
    "norm_qkv": _NORMED + "qkv: *out f32, workspace: *out f32, row_count: u32, hidden: u32, "
    f"{_HEADS}epsilon: f32",
    "norm_rope": _LIVE + "qkv: *const f32, bias: *const f32, q_norm: *const f32, "
    f"k_norm: *const f32, rope: *const f32, cache: *f32, q: *out f32, row_count: u32, {_CACHED}"
    "epsilon: f32",
    "attention": _LIVE + "q: *const f32, cache: *const f32, attended: *out f32, "
    f"workspace: *out f32, row_count: u32, {_CACHED}window: u32, scale: f32",
    "output_residual": f"{_LIVE}attended: *const f32, {_RESIDUAL}",
    "norm_gate_up": _NORMED + "inner: *out f32, workspace: *out f32, row_count: u32, hidden: u32, "
    "width: u32, epsilon: f32",
    "down_residual": f"{_LIVE}inner: *const f32, {_RESIDUAL}",
    "head": _NORMED + "logits: *f32, workspace: *out f32, row_count: u32, hidden: u32, "
    "vocabulary: u32, epsilon: f32",
    "sample": _SAMPLED + "row_count: u32, vocabulary: u32, stop_count: u32, context: u32, "
    "ring_size: u32",
    "draft": "rows: *const i32, state: *const i32, history: *const i32, drafted: *out i32, "
    "scored: *out i32, row_count: u32, sequences: u32, context: u32, most: u32",
    "accept": _LIVE + "scored: *const i32, logits: *const f32, options: *const u64, "
    "stops: *const i32, state: *i32, ring: *i32, row_count: u32, vocabulary: u32, stop_count: u32, "
    "context: u32, ring_size: u32",
    "accept_of_ranks": _LIVE + "options: *const u64, stops: *const i32, state: *i32, ring: *i32, "
    "keys: *const u64, row_count: u32, vocabulary: u32, stop_count: u32, context: u32, "
    "ring_size: u32, ranks: u32",
    "best_of_part": _LIVE + "logits: *const f32, keys: *out u64, workspace: *const f32, "
    "row_count: u32, vocabulary: u32, first: u32",
    "best_of_ranks": _OF_RANKS,
    "sample_of_ranks": _OF_RANKS,
    "continue_loop": "condition: cond, counter: *i32, rows: *const i32, state: *const i32, "
    "row_count: u32, sequences: u32, start: u32",
}
"""The kernels of a step, for one device and for a rank, with their parameters on the host."""


@dataclass(frozen=True, slots=True)
class BufferArgument:
    """An argument that is a buffer of the plan.  `layer` selects a layer's part, `last` the part of
    the step's last row."""

    name: str
    layer: int | None = None
    last: bool = False

    def __str__(self) -> str:
        name = f"{self.name}, last row" if self.last else self.name
        return name if self.layer is None else f"{name}[{self.layer}]"


SHARED_PARTIAL = BufferArgument("shared_partial")
"""A rank's partial sums, which are not added to what is there before."""

CallArgument: TypeAlias = BufferArgument | str | int | float
"""An argument of a call: a buffer; the name of a size of the step ("rows", "sequences", "context",
"ring") or of the loop's "condition"; or a constant."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch: the kernel's name, and its arguments by parameter name."""

    kernel: str
    arguments: tuple[tuple[str, CallArgument], ...]

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(f'{name}={value}' for name, value in self.arguments)})"


def decode_program(
    config: LlamaConfig, *, sampled: bool = True, last_row: bool = False, lookup: int = 0
) -> tuple[KernelCall, ...]:
    """Returns the launches of one step, in order.

    `sampled`: with the output head, the choice of the next token and the advance of the state; all
    pieces of a prompt but the last need none of these.  `last_row`: these are computed for the
    step's last row only, so that a long piece does not compute the head for all its rows.
    `lookup`: the most tokens that the step drafts for each of its DRAFTS sequences.
    """
    call = _Calls(config)
    calls = [call("draft", most=lookup)] if lookup else []
    rows = BufferArgument("drafted" if lookup else "rows")
    calls.append(call("embed", table=BufferArgument("embed"), rows=rows))
    for layer in range(config.layers):
        calls.extend(_layer(config, layer))
    if sampled:
        call, head = _Calls(config, last=last_row), "embed" if config.tied_embeddings else "head"
        given = {"norm": BufferArgument("final_norm"), "weight": BufferArgument(head)}
        if lookup:  # a draft in `scored` has a sequence of its own, so that each has its logits
            calls.append(call("head", **given, live=BufferArgument("scored")))
            calls.append(call("accept"))
        else:
            calls.append(call("head", **given))
        calls.append(call("sample"))
    return tuple(calls)


@functools.cache
def parameter_names(signature: str) -> tuple[str, ...]:
    """Returns the names of a kernel's parameters, in order."""
    return tuple(part.split(":")[0].strip() for part in signature.split(","))


def loop_call(start: int = 0) -> KernelCall:
    """Returns the call of the kernel that decides whether a loop runs another step.

    With `start` the call belongs before the loop, which then runs at most `start` steps; without,
    it is the last of the loop's body.  The loop continues only while some FROM_STATE row has not
    stopped, so no step runs after all have.
    """
    return kernel_call(
        "continue_loop",
        condition="condition",
        counter=BufferArgument("counter"),
        rows=BufferArgument("rows"),
        state=BufferArgument("state"),
        row_count="rows",
        sequences="sequences",
        start=start,
    )


def describe(program: Sequence[KernelCall]) -> str:
    """Returns the program as text, one call a line."""
    width = max((len(call.kernel) for call in program), default=0)
    lines = []
    for index, call in enumerate(program):
        arguments = ", ".join(
            str(value) if isinstance(value, BufferArgument) else f"{name}={value}"
            for name, value in call.arguments
        )
        lines.append(f"{index:4}  {call.kernel:{width}}  {arguments}")
    return "\n".join(lines)


def kernel_call(kernel: str, **arguments: CallArgument) -> KernelCall:
    """Returns a call of the kernel with these arguments, in the order given."""
    return KernelCall(kernel, tuple(arguments.items()))


class _Calls:
    """A factory of calls for one config, and for one layer.  A parameter without a given argument
    gets the buffer, size or constant of its name; `last`: for the step's last row."""

    def __init__(
        self, config: LlamaConfig, layer: int | None = None, *, last: bool = False
    ) -> None:
        c = config
        self._known: dict[str, CallArgument] = {
            "live": BufferArgument("live", last=last),
            "x": BufferArgument("x", last=last),
            "cache": BufferArgument("cache", layer),
            "row_count": 1 if last else "rows",
            "sequences": "sequences",
            "context": "context",
            "ring_size": "ring",
            "hidden": c.hidden,
            "heads": c.heads,
            "kv_heads": c.kv_heads,
            "head_size": c.head_size,
            "vocabulary": c.vocabulary,
            "epsilon": c.norm_epsilon,
            "scale": 1.0 / math.sqrt(c.head_size),
            "stop_count": STOP_TOKENS,
        }

    def __call__(self, kernel: str, **given: CallArgument) -> KernelCall:
        known = self._known | given
        names = parameter_names(SIGNATURES[kernel])
        return KernelCall(
            kernel, tuple((name, known.get(name, BufferArgument(name))) for name in names)
        )


def _layer(config: LlamaConfig, layer: int) -> tuple[KernelCall, ...]:
    c, call, weight = config, _Calls(config, layer), partial(BufferArgument, layer=layer)
    product = {"norm": weight("attn_norm"), "weight": weight("wqkv")}
    bias: CallArgument = weight("bqkv") if c.qkv_bias else ABSENT
    qkv: tuple[KernelCall, ...]
    if c.qk_norm:
        norms = {"q_norm": weight("q_norm"), "k_norm": weight("k_norm")}
        qkv = (call("norm_qkv", **product), call("norm_rope", bias=bias, **norms))
    else:
        qkv = (call("norm_qkv_rope", **product, bias=bias),)
    mlp = {"norm": weight("mlp_norm"), "weight": weight("w_gate_up")}
    return (
        *qkv,
        call("attention", window=c.window(layer)),
        call("output_residual", weight=weight("wo"), width=c.query_size),
        call("norm_gate_up", **mlp, width=c.inner),
        call("down_residual", weight=weight("w_down"), width=c.inner),
    )
