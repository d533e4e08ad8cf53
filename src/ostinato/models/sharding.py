"""A model split over several ranks, as data: each rank's tensors and program.

Every rank has a share of the heads, of the MLP's inner width and of the output head's rows, and the
whole residual:

    wq wk wv, bq bk bv, w_gate w_up, head     rows           wo, w_down     columns
    embed, norms                              whole on every rank

So a rank's kernels are those of one device, for a smaller model (`Sharding.part`).  Two products of
a layer give a partial sum on each rank: in the program they add into `partial`, which `accumulate`
sums over the ranks, adds to the residual and clears.  Every rank then has the same residual, bit by
bit, and the same results of it.

    output_residual(x=partial)  accumulate(target=x, partial)      down_residual likewise

Key and value heads are repeated where there are fewer than ranks.  The embedding is whole on every
rank: each token reads only one row, and a split one would cost a collective for each token.

Greedy sampling: each rank's best logit with its index is one key of 8 bytes, all ranks get all
keys, and the largest wins: the best logit, and of equal ones the lowest index.  Otherwise all ranks
get all logits, and each draws the same token from them, as one device would.

    head(logits=logits_part)  best_of_part  all_gather(keys)  [all_gather(logits)]  sample

Drafts are accepted by keys, too: no step that drafts gathers logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ostinato import Buffer, Operation
from ostinato.errors import InputError, UnsupportedModelError
from ostinato.models.backend import Buffers, Resolve
from ostinato.models.config import LlamaConfig, tensor_shapes
from ostinato.models.files.checkpoint import Checkpoint, RawTensor, StoredCheckpoint
from ostinato.models.files.dequantise import BLOCK_TYPES
from ostinato.models.program import (
    ABSENT,
    BEST_OVER_RANKS,
    CARRYING_SUM,
    OF_RANKS,
    SHARED_PARTIAL,
    BufferArgument,
    CallArgument,
    KernelCall,
    kernel_call,
)

if TYPE_CHECKING:
    from ostinato.distributed import Collectives
    from ostinato.distributed.collectives import ExchangedSum

COLLECTIVES = ("accumulate", "all_gather")
"""Calls of a program that the group's collectives implement, not the backend's kernels."""

_SAMPLED_SIZES = ("row_count", "vocabulary", "stop_count", "context", "ring_size")
"""The parameters of `sample` and `accept` that follow their pointers."""
_WHOLE = ("embed", "attn_norm", "q_norm", "k_norm", "mlp_norm", "final_norm")


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a tensor: rows (`axis` 0) or columns (1) from `first` up to `stop`, which is
    excluded; the whole tensor if `axis` is None."""

    axis: int | None = None
    first: int = 0
    stop: int = 0

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the part, from the shape of the whole tensor."""
        count = self.stop - self.first
        return tuple(count if axis == self.axis else n for axis, n in enumerate(shape))

    def of(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns a view of the part, from the whole tensor."""
        if self.axis is None:
            return values
        rows = slice(self.first, self.stop)
        return values[rows] if self.axis == 0 else values[:, rows]


class Sharding:
    """The split of a model over `size` ranks, and the part of rank `rank`.

    `whole`: the model.  `part`: the model of this rank's kernels, with its share of heads, inner
    width and vocabulary, and no end tokens.  Raises UnsupportedModelError for a model that cannot
    be split over this many ranks, InputError for a rank outside 0 to size - 1.
    """

    def __init__(self, whole: LlamaConfig, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise InputError(f"rank is {rank}, must be 0 to {size - 1}")
        self.whole, self.rank, self.size = whole, rank, size
        for name in ("heads", "inner", "vocabulary"):
            if getattr(whole, name) % size:
                raise UnsupportedModelError(
                    f"{name} is {getattr(whole, name)}, which {size} ranks cannot share: it must "
                    f"be a multiple of {size}"
                )
        kv_heads = whole.kv_heads
        if kv_heads % size and size % kv_heads:
            raise UnsupportedModelError(
                f"kv_heads is {kv_heads}, which {size} ranks can neither share nor repeat: one "
                "must be a multiple of the other"
            )
        self.first_kv_head = rank * kv_heads // size
        self.part = replace(
            whole,
            heads=whole.heads // size,
            kv_heads=max(1, kv_heads // size),
            inner=whole.inner // size,
            vocabulary=whole.vocabulary // size,
            tied_embeddings=False,
            bos_token_id=None,
            eos_token_ids=(),
        )

    def __repr__(self) -> str:
        p = self.part
        return (
            f"<rank {self.rank} of {self.size}: {p.heads} heads, {p.kv_heads} of keys and values, "
            f"inner {p.inner}, {p.vocabulary} rows of the output head>"
        )

    def cut(self, name: str) -> Shard:
        """Returns this rank's part of a tensor, by canonical name.  Raises UnsupportedModelError
        for an unknown tensor."""
        last = name.rpartition(".")[2]
        if last in _WHOLE:
            return Shard()
        p, rank, size = self.part, self.rank, self.part.head_size
        if last in ("wk", "wv", "bk", "bv"):
            first = self.first_kv_head * size
            return Shard(0, first, first + p.kv_heads * size)
        axis, width = {
            "wq": (0, p.heads * size),
            "bq": (0, p.heads * size),
            "wo": (1, p.heads * size),
            "w_gate": (0, p.inner),
            "w_up": (0, p.inner),
            "w_down": (1, p.inner),
            "head": (0, p.vocabulary),
        }.get(last, (None, 0))
        if axis is None:
            raise UnsupportedModelError(f"the tensor {name!r} cannot be split over ranks yet")
        return Shard(axis, rank * width, (rank + 1) * width)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of this rank's tensors by canonical name, in the order of use; there
        is always a `head`, even where the whole model's head is the embedding."""
        shapes = tensor_shapes(replace(self.whole, tied_embeddings=False))
        return {name: self.cut(name).shape(shape) for name, shape in shapes.items()}

    def source(self, name: str) -> str:
        """Returns the name of the whole model's tensor that this rank's tensor is cut from."""
        return "embed" if name == "head" and self.whole.tied_embeddings else name


def shard_checkpoint(whole: Checkpoint, sharding: Sharding) -> Checkpoint:
    """Returns a checkpoint of a rank's part, read from an open one, which the caller closes.

    Its config is `Sharding.part`, but its embedding has the rows of the whole vocabulary
    (`shapes`).  Raises UnsupportedModelError as `ShardedCheckpoint` does.
    """
    if isinstance(whole, StoredCheckpoint):
        return ShardedCheckpoint(whole, sharding)
    return _ShardedValues(whole, sharding)


class _ShardedValues(Checkpoint):
    """A rank's part of a checkpoint without stored bytes: each tensor is made whole, then cut."""

    def __init__(self, whole: Checkpoint, sharding: Sharding) -> None:
        super().__init__(whole.path, sharding.part, whole.tokenizer)
        self._whole = whole
        self.has_file = whole.has_file
        self._sharding = sharding
        self._memory = np.empty(0, np.uint8)  # kept: to touch new pages takes longer than to cut

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Implements `Checkpoint.shapes`."""
        return self._sharding.shapes()

    def load(self, into: Mapping[str, npt.NDArray[Any]], *, threads: int = 2) -> None:
        """Implements `Checkpoint.load`."""
        sharding = self._sharding
        shapes = tensor_shapes(sharding.whole)
        for name, out in into.items():
            cut, source = sharding.cut(name), sharding.source(name)
            if cut.axis is None:
                self._whole.load({source: out}, threads=threads)
                continue
            nbytes = math.prod(shapes[source]) * out.itemsize
            if self._memory.size < nbytes:
                self._memory = np.empty(nbytes, np.uint8)
            values = self._memory[:nbytes].view(out.dtype).reshape(shapes[source])
            self._whole.load({source: values}, threads=threads)
            out[...] = cut.of(values)


class ShardedCheckpoint(StoredCheckpoint):
    """A rank's part of a stored checkpoint: only the part of each tensor is read, and packed rows
    are split between blocks.  Raises UnsupportedModelError if a part would split a block."""

    def __init__(self, whole: StoredCheckpoint, sharding: Sharding) -> None:
        self._whole = whole
        self._sharding = sharding
        parts = {name: self._part(name) for name in sharding.shapes()}
        self._of = {part: name for name, part in parts.items()}
        super().__init__(whole.path, sharding.part, whole.tokenizer, parts)
        self.has_file = whole.has_file

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Implements `Checkpoint.shapes`."""
        return self._sharding.shapes()

    def _part(self, name: str) -> RawTensor:
        sharding = self._sharding
        raw, cut = self._whole.raw(sharding.source(name)), sharding.cut(name)
        shape = cut.shape(raw.shape)
        block = BLOCK_TYPES[raw.type].values
        if cut.axis == len(shape) - 1 and shape[-1] % block:
            raise UnsupportedModelError(
                f"{raw.name}: {raw.columns} columns of {raw.type} cannot be shared by "
                f"{sharding.size} ranks: {shape[-1]} columns are no whole number of blocks of "
                f"{block}"
            )
        return replace(
            raw,
            name=f"{raw.name} ({name})",  # head and embedding may be one tensor of the file
            shape=shape,
            size=raw.size * math.prod(shape) // math.prod(raw.shape),
            heads=raw.heads and shape[0] // raw.together,
        )

    def stored(self, name: str) -> npt.NDArray[np.uint8]:
        """Implements `StoredCheckpoint.stored`; returns a copy where columns are split."""
        return np.ascontiguousarray(super().stored(name)).reshape(-1)

    def _bytes(self, raw: RawTensor) -> npt.NDArray[np.uint8]:
        """Returns the part's bytes: flat, or [rows, bytes], a view of the file's rows, where
        columns are split."""
        name = self._of[raw]
        whole = self._whole.raw(self._sharding.source(name))
        rows = self._whole._bytes(whole).reshape(whole.rows, -1)
        cut = self._sharding.cut(name)
        if cut.axis is None:
            return rows.reshape(-1)
        if cut.axis != len(whole.shape) - 1:
            return rows[cut.first : cut.stop].reshape(-1)
        block = BLOCK_TYPES[raw.type]
        first, stop = (n // block.values * block.size for n in (cut.first, cut.stop))
        return rows[:, first:stop] if len(rows) > 1 else rows[0, first:stop]

    def _forget(self, raw: RawTensor) -> None:
        self._whole._forget(self._whole.raw(self._sharding.source(self._of[raw])))


# -------------------------------------------------------------------------------------- programs


def shard_program(
    program: Sequence[KernelCall], sharding: Sharding, *, whole_logits: bool, last_row: bool = False
) -> tuple[KernelCall, ...]:
    """Returns a rank's program, made from the program of one device for `Sharding.part`.

    `whole_logits`: all ranks get all logits, so that rows can be sampled in any way; if False, all
    rows must be greedy, and one that is not gets no token.  `last_row`: see `decode_program`.
    """
    calls: list[KernelCall] = []
    partial, vocabulary = BufferArgument("partial"), sharding.part.vocabulary
    keys, parts = BufferArgument("keys", last=last_row), BufferArgument("key_parts", last=last_row)
    for call in program:
        given = dict(call.arguments)
        if call.kernel == "embed":
            calls.append(_with(call, vocabulary=sharding.whole.vocabulary))
        elif call.kernel in OF_RANKS:
            calls.append(_with(call, x=partial))
            calls.append(kernel_call("accumulate", target=given["x"], partial=partial, rows="rows"))
        elif call.kernel == "head":
            calls.append(_with(call, logits=BufferArgument("logits_part")))
            calls.append(
                kernel_call(
                    "best_of_part",
                    live=given["live"],
                    logits=BufferArgument("logits_part"),
                    keys=parts,
                    workspace=BufferArgument("workspace"),
                    row_count=given["row_count"],
                    vocabulary=vocabulary,
                    first=sharding.rank * vocabulary,  # the token of its first row
                )
            )
            calls.append(kernel_call("all_gather", source=parts, out=keys, rows=given["row_count"]))
            if whole_logits:
                calls.append(
                    kernel_call(
                        "all_gather",
                        source=BufferArgument("logits_part"),
                        out=BufferArgument("logits"),
                        rows="sequences",
                    )
                )
        elif call.kernel in ("sample", "accept"):
            kernel = "sample_of_ranks" if whole_logits else "best_of_ranks"
            if call.kernel == "accept":
                kernel = "accept_of_ranks"
                del given["scored"], given["logits"]
            given["vocabulary"] = sharding.whole.vocabulary
            sizes = {name: given.pop(name) for name in _SAMPLED_SIZES}
            calls.append(kernel_call(kernel, **given, keys=keys, **sizes, ranks=sharding.size))
        else:
            calls.append(call)
    return tuple(calls)


def exchanging_products(
    program: Sequence[KernelCall], sharding: Sharding, exchanged: ExchangedSum | None = None
) -> tuple[KernelCall, ...]:
    """Returns a rank's program in which each product followed by an `accumulate` is replaced by one
    kernel that computes the product and its sum over all ranks, and so is the choice of the ranks'
    best logit, as `exchanged` says."""
    calls: list[KernelCall] = []
    for call in program:
        last = [one.kernel for one in calls[-2:]]  # others in a step that drafts
        if exchanged and (*last, call.kernel) == ("best_of_part", "all_gather", "best_of_ranks"):
            *calls, part, _ = calls
            given = dict(part.arguments) | dict(call.arguments) | _exchange(sharding, exchanged)
            calls.append(kernel_call(BEST_OVER_RANKS, **given))
            continue
        if call.kernel != "accumulate":
            calls.append(call)
            continue
        product, target = calls.pop(), dict(call.arguments)["target"]
        given = dict(product.arguments) | {"x": target, "sums": BufferArgument("sums")}
        del given["workspace"]
        given |= {"rank": sharding.rank, "ranks": sharding.size}
        calls.append(kernel_call(OF_RANKS[product.kernel], **given))
    return tuple(calls)


def carrying_sums(
    program: Sequence[KernelCall],
    sharding: Sharding,
    exchanged: ExchangedSum,
    *,
    shared: bool = False,
) -> tuple[KernelCall, ...]:
    """Returns a rank's program in which each `accumulate` is a kernel that also writes the inputs
    of the next product, as `exchanged` says.  `shared`: each rank adds the sums of a share of the
    rows, and the partial sums are not cleared."""
    calls: list[KernelCall] = []
    for call, after in zip(program, [*program[1:], None], strict=True):
        if call.kernel == "accumulate":
            given, product = dict(call.arguments), calls[-1]
            of = dict(product.arguments)
            partial = SHARED_PARTIAL if shared else given["partial"]
            calls[-1] = _with(product, x=partial)
            normed = after is not None and after.kernel != "head"
            call = kernel_call(
                CARRYING_SUM,
                live=of["live"],
                x=given["target"],
                partial=partial,
                norm=dict(after.arguments)["norm"] if after is not None and normed else ABSENT,
                half=int(product.kernel == "down_residual"),
                row_count=of["row_count"],
                hidden=of["hidden"],
                grid=exchanged.grid,
                **_exchange(sharding, exchanged),
            )
        calls.append(call)
    return tuple(calls)


def _exchange(sharding: Sharding, exchanged: ExchangedSum) -> dict[str, CallArgument]:
    """Returns the arguments of a kernel that exchanges words through the ranks' windows."""
    return {
        "windows": BufferArgument("windows"),
        "rank": sharding.rank,
        "ranks": sharding.size,
        "words": exchanged.words,
        "header": exchanged.header,
        "blocks": exchanged.blocks,
        "scattered": int(exchanged.scattered),
    }


def shard_buffers(
    sharding: Sharding, rows: int, summed: int, sequences: int, drafts: int
) -> Buffers:
    """Returns shapes and dtypes of the buffers that a rank's program needs besides, or instead of,
    those that `Sharding.part` would need on one device.  `summed`: the most rows of a step whose
    partial sums are in `partial`; `drafts`: the most rows of one that drafts."""
    f32, u64 = np.dtype(np.float32), np.dtype(np.uint64)
    whole = sharding.whole
    return {
        "partial": ((summed, whole.hidden), f32),
        "logits_part": ((sequences + drafts, sharding.part.vocabulary), f32),
        "logits": ((sequences, whole.vocabulary), f32),
        "key_parts": ((rows, 1), u64),
        "keys": ((rows, sharding.size), u64),
    }


@dataclass(frozen=True, slots=True)
class BoundCollective:
    """A collective in a step; see `BoundCall`."""

    call: KernelCall
    collectives: Collectives
    rows: int
    programmatic: bool = False

    @property
    def kernel(self) -> str | None:
        """The kernel's name if the next launch may be programmatic after it, else None."""
        return self.call.kernel if self.programmatic else None

    def with_programmatic(self, programmatic: bool) -> BoundCollective:
        """Returns a copy with this `programmatic`; never True if this one's is False."""
        return replace(self, programmatic=programmatic and self.programmatic)

    def operations(self, resolve: Resolve) -> tuple[Operation, ...]:
        """Returns the collective's operations on its rows of the buffers.  Raises GroupError."""
        given = dict(self.call.arguments)
        rows = resolve(given.pop("rows"))
        assert isinstance(rows, int)
        buffers = []
        for argument in given.values():
            buffer = resolve(argument)
            assert isinstance(buffer, Buffer)
            buffers.append(buffer[:rows])
        one, other = buffers
        if self.call.kernel == "accumulate":
            return self.collectives.accumulate(one, other, programmatic=self.programmatic)
        assert self.call.kernel == "all_gather", self.call.kernel
        return self.collectives.all_gather(one, other, programmatic=self.programmatic)


def _with(call: KernelCall, **changed: CallArgument) -> KernelCall:
    """Returns the call with some arguments replaced; each must exist."""
    given = dict(call.arguments)
    assert set(changed) <= set(given), (call, changed)
    return kernel_call(call.kernel, **{**given, **changed})
