"""All buffers of a decoder, allocated once, so that their addresses are the same for every batch.

One plan serves steps of 1 to `max_rows` rows: each works on the first rows of the same buffers.
Logits, states, options and rings belong to *sequences* and not to rows, so that a sequence's logits
are at the same place whether a batched step or a single one computed them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ostinato import Buffer, Device, DeviceArray, PowersOfTwo, Stream, copy
from ostinato.errors import InputError
from ostinato.models.arguments import whole
from ostinato.models.backend import Buffers
from ostinato.models.config import LlamaConfig, rope_inverse_frequencies
from ostinato.models.program import (
    BIAS,
    LOGPROBS,
    MOST_BIASES,
    OPTIONS,
    RING,
    ROW,
    SAMPLED_ROWS,
    STATE,
    STOP_TOKENS,
    BufferArgument,
    CallArgument,
)
from ostinato.models.weights import Weights
from ostinato.state.scalar import LARGEST

_WHOLE_ROWS = 512
"""The least bucket worth splitting: 64 to 256 rows take about the same time (H100, 1B shape)."""


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """The capacity of a decoder.

    `rows`: most rows of one step.  `sequences`: number of sequences.  `context`: positions of each.
    `ring`: steps that the device may be ahead of the host.  `lookup`: the most tokens that a step
    drafts for a sequence; `alike_rows`: the most rows of a step that drafts.  Raises InputError,
    also for more rows (4,096) or sequences (1,024) than device state has room for.
    """

    rows: int = 64
    sequences: int = 1
    context: int = 2048
    ring: int = 256
    lookup: int = 0
    alike_rows: int = SAMPLED_ROWS

    def __post_init__(self) -> None:
        whole(self.rows, "max_rows", 1, LARGEST // ROW.itemsize)
        whole(self.sequences, "sequences", 1, LARGEST // OPTIONS.itemsize)
        whole(self.context, "context", 1)
        whole(self.ring, "ring", 1)
        whole(self.lookup, "lookup", 0, min(self.rows, SAMPLED_ROWS) - 1)
        if self.sequences > self.rows:
            raise InputError(
                f"max_rows is {self.rows}, and {self.sequences} sequences are to step together: it "
                "must be as many at least"
            )

    @property
    def buckets(self) -> PowersOfTwo:
        """The numbers of rows that launches are prepared for: powers of two, and `rows` itself."""
        return PowersOfTwo(self.rows)

    @property
    def least_rows(self) -> int:
        """The rows of the smallest step: with drafts as many as one sequence has that drafts, so
        that all its steps run the same kernels, and a token does not depend on the drafts."""
        return self.buckets.bucket(self.lookup + 1)

    @property
    def draft_rows(self) -> int:
        """The rows of the largest step that drafts; 0 if none does."""
        if not self.lookup:
            return 0
        wanted = self.sequences * (self.lookup + 1)
        return self.buckets.bucket(min(wanted, self.alike_rows, self.rows))

    def drafting(self, sequences: int, others: int = 0) -> int:
        """Returns the rows that each of some sequences that draft has in a step, beside `others`
        with one row each: one for its token, and one for each draft."""
        if not self.lookup or not sequences:
            return 1
        room = min(self.alike_rows, self.rows) - others
        return max(1, min(self.lookup + 1, room // sequences))

    @property
    def ring_tokens(self) -> int:
        """The tokens of each sequence that the device may be ahead of the host."""
        return self.ring * (self.lookup + 1)

    @property
    def sampled_rows(self) -> int:
        """The most rows of a step in which every row may sample, as in a batch.  In a larger step,
        a piece of a prompt, only the last row may sample, so its padding precedes the piece."""
        return max(SAMPLED_ROWS, self.buckets.bucket(self.sequences))

    def piece(self, count: int, most: int) -> int:
        """Returns the tokens that the next step of a prompt takes, of `count` left, at most `most`.

        All of them, unless a quarter of a large step would be padding: then as many as the next
        smaller bucket holds, since this step and one for the rest cost less together.
        """
        count = min(count, most)
        bucket = self.buckets.bucket(count)
        below = 1 << (bucket - 1).bit_length() >> 1
        return below if below >= _WHOLE_ROWS and 4 * count <= 3 * bucket else count

    def piece_end(self, count: int) -> int:
        """Returns the number of rows of the step for a piece of `count` tokens; the piece takes the
        last ones."""
        bucket = self.buckets.bucket(count)
        return bucket if bucket > self.sampled_rows else count


@dataclass(slots=True, eq=False)
class BufferPlan:
    """The buffers, by the names that the program uses.

    The host sets `rows`, `options` and `stops`, each in one staged copy, and a sequence's `biases`,
    [sequences, MOST_BIASES], when they change.  `ring` and `logprobs` are pinned memory that the
    device writes and the host reads.  `allowed` is pinned memory that the host writes and the
    device reads, [sequences, vocabulary / 32]: a bit for each token.  `cache` is [layers, 2 (keys,
    values), sequences, kv_heads, context, head_size].  `history` holds the token at each position,
    [sequences, context], for penalties and drafts.  `logits` are by sequence, and behind these, if
    steps draft, by row.  Only the device writes and reads the rest, except that the
    host reads logits.
    `prepared`: the buffers are allocated; False after `close`.
    """

    config: LlamaConfig
    sizes: PlanSizes
    weights: Weights
    rows: DeviceArray
    options: DeviceArray
    stops: DeviceArray
    ring: Buffer
    logprobs: Buffer
    allowed: Buffer
    buffers: dict[str, Buffer] = field(repr=False)
    prepared: bool = True
    scalars: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        sizes = self.sizes
        self.scalars = {"sequences": sizes.sequences, "context": sizes.context}
        self.scalars["ring"] = sizes.ring_tokens

    @classmethod
    def allocate(
        cls,
        device: Device,
        weights: Weights,
        sizes: PlanSizes,
        *,
        workspace: int,
        more: Buffers | None = None,
        given: Mapping[str, Buffer] | None = None,
    ) -> BufferPlan:
        """Allocates all buffers for the largest step.  Raises OutOfMemoryError, InputError.

        `workspace`: bytes that the kernels need besides the named buffers; `more`: shapes and
        dtypes of buffers that only some kernels use (both from `Backend`), or that replace those of
        a named buffer.  All but the KV cache is filled with zeros: counters in the workspace start
        from zero, and kernels read whole buffers.  Kernels read the KV cache only at positions that
        were written.  `given`: named buffers that another owner has allocated so.
        """
        c = weights.config
        f32, i32 = np.dtype(np.float32), np.dtype(np.int32)
        drafts = sizes.draft_rows
        cleared: Buffers = {
            "live": ((sizes.rows, 4), i32),
            "x": ((sizes.rows, c.hidden), f32),
            "q": ((sizes.rows, c.heads, c.head_size), f32),
            "attended": ((sizes.rows, c.heads, c.head_size), f32),
            "inner": ((sizes.rows, c.inner), f32),
            "workspace": ((-(-workspace // 4),), f32),
            "history": ((sizes.sequences, sizes.context), i32),
            "logits": ((sizes.sequences + drafts, c.vocabulary), f32),
            "kept": ((sizes.sequences, sizes.context + MOST_BIASES), np.dtype(np.uint32)),
            "biases": ((sizes.sequences, MOST_BIASES, BIAS.itemsize // 4), i32),
            "state": ((sizes.sequences, STATE.itemsize // 4), i32),
            "counter": ((1,), i32),
            **(dict.fromkeys(("drafted", "scored"), ((drafts, 4), i32)) if drafts else {}),
            **({"qkv": ((sizes.rows, c.query_size + 2 * c.kv_size), f32)} if c.qk_norm else {}),
            **(more or {}),
        }
        buffers = dict(given or {})
        for name, (shape, kind) in cleared.items():
            if name not in buffers:
                buffers[name] = device.zeros(shape, kind, name=name)
        # Of a rank's plan, logits are those of the whole vocabulary.
        masks = (sizes.sequences, mask_words(buffers["logits"].shape[1]))
        buffers["masks"] = device.zeros(masks, np.uint32, name="masks")
        buffers["cache"] = device.empty(
            (c.layers, 2, sizes.sequences, c.kv_heads, sizes.context, c.head_size),
            weights.dtype,
            name="cache",
        )
        buffers["rope"] = device.array(rope_table(c, sizes.context), name="rope")
        ring = device.pinned((sizes.sequences, sizes.ring_tokens), RING, name="ring")
        ring.array[...] = (0, -1)
        entries = (sizes.sequences, sizes.ring_tokens, LOGPROBS.itemsize // 4)
        logprobs = device.pinned(entries, i32, name="logprobs")
        return cls(
            c,
            sizes,
            weights,
            DeviceArray(device, sizes.rows, ROW, name="rows"),
            DeviceArray(device, sizes.sequences, OPTIONS, name="options"),
            DeviceArray(device, STOP_TOKENS, np.int32, name="stops"),
            ring,
            logprobs,
            device.pinned(masks, np.uint32, name="allowed"),
            buffers,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of device memory of the plan, without the weights."""
        state = (self.rows.buffer, self.options.buffer, self.stops.buffer)
        return sum(b.nbytes for b in (*self.buffers.values(), *state))

    def resolve(self, argument: CallArgument, rows: int) -> object:
        """Returns the value of an argument in a step of `rows` rows: a buffer or a number."""
        if isinstance(argument, BufferArgument):
            buffer = self.buffer(argument)
            return buffer[rows - 1 : rows] if argument.last else buffer
        if isinstance(argument, str):
            return rows if argument == "rows" else self.scalars[argument]
        return argument

    def buffer(self, bound: BufferArgument) -> Buffer:
        """Returns a buffer, or its part for a layer, by its name in the program."""
        name, layer = bound.name, bound.layer
        if name == "options":  # structs of several types, which kernels take as words
            return self.options.buffer.view(dtype="bytes")
        if name in ("rows", "stops"):
            return {"rows": self.rows, "stops": self.stops}[name].buffer
        if name in ("ring", "logprobs", "allowed"):
            return {"ring": self.ring, "logprobs": self.logprobs, "allowed": self.allowed}[name]
        if name in self.buffers:
            if layer is None:
                return self.buffers[name]
            part = self.buffers[name][layer]
            part.name = str(bound)
            return part
        return self.weights.buffer(name, layer)

    def copy_sequence(self, stream: Stream, source: int, target: int) -> None:
        """Copies the KV cache and the history of sequence `source` to sequence `target`.

        Copies all positions, even those never written: all keys of a sequence in a layer are one
        contiguous piece, while those of some positions would be one piece for each head.
        """
        for layer in self.buffers["cache"]:
            for part in layer:
                copy(stream, part[target], part[source])
        history = self.buffers["history"]
        copy(stream, history[target], history[source])

    def close(self) -> None:
        """Frees all buffers, but not the weights.  Idempotent."""
        self.prepared = False
        for array in (self.rows, self.options, self.stops):
            array.close()
        for buffer in (self.ring, self.logprobs, self.allowed, *self.buffers.values()):
            buffer.close()


def mask_words(vocabulary: int) -> int:
    """Returns the number of 32-bit words that have a bit for each token."""
    return -(-vocabulary // 32)


def rope_table(config: LlamaConfig, context: int) -> npt.NDArray[np.float32]:
    """Returns the cosines and sines of every position, times the rope's magnitude: float32,
    [context, 2, head_size / 2].

    Angles are float32 products, as in transformers.
    """
    positions = np.arange(context, dtype=np.float32)
    angles = positions[:, None] * rope_inverse_frequencies(config)[None, :]
    return np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.float32(config.rope_magnitude)
