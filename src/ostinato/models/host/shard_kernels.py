"""The kernels that only a program of several ranks has (`sharding`), in NumPy.

A *key* is a logit with its token, such that the largest key is the largest logit and, of equal
ones, the lowest token: above, the logit's bits as a number of the same order; below, 2^32 - 1 -
token.  NaN is above all.  `cuda/kernels/common.cuh` has the same (`logit_key`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato import HostKernel, host_kernel
from ostinato.models.host.kernels import HOST_KERNELS, Floats, Ints, advance, sampled_rows
from ostinato.models.program import OPTIONS, SIGNATURES

__all__ = ["SHARD_KERNELS"]

Keys = npt.NDArray[np.uint64]
_NAN_KEY = (1 << 64) - 1
_LOW = 0xFFFFFFFF


def _key(logit: np.float32, token: int) -> int:
    if np.isnan(logit):
        return _NAN_KEY
    bits = int((logit + np.float32(0)).view(np.uint32))  # -0 is 0
    ordered = ~bits & _LOW if bits & 0x80000000 else bits | 0x80000000
    return ordered << 32 | (_LOW - token)


def _is_finite(key: int) -> bool:
    """Whether the logit of a key is neither NaN nor infinite."""
    return 0x007FFFFF < key >> 32 < 0xFF800000


@host_kernel(SIGNATURES["best_of_part"])
def best_of_part(
    launch: object,
    live: Ints,
    logits: Floats,
    keys: Keys,
    workspace: Floats,
    row_count: int,
    vocabulary: int,
    first: int,
) -> None:
    """The key of each sampling row's best logit among those of this rank, whose tokens begin at
    `first`.  `logits`: [sequences, vocabulary] of this rank."""
    for row, _, sequence in sampled_rows(live, row_count):
        values = logits[sequence * vocabulary : (sequence + 1) * vocabulary]
        best = int(values.argmax())  # the first NaN if there is one
        keys[row] = _key(values[best], first + best)


@host_kernel(SIGNATURES["best_of_ranks"])
def best_of_ranks(
    launch: object,
    live: Ints,
    logits: Floats,
    options: npt.NDArray[np.uint64],
    stops: Ints,
    state: Ints,
    ring: Ints,
    history: Ints,
    adjusted: Floats,
    keys: Keys,
    row_count: int,
    vocabulary: int,
    stop_count: int,
    context: int,
    ring_size: int,
    ranks: int,
) -> None:
    """As `sample`: the token of the largest key of each row that samples.  `keys`: [rows, ranks].

    -1 if a logit is NaN or the largest is infinite, and for a row that is not greedy, since it
    needs more than the best.
    """
    settings = options.view(OPTIONS)
    for row, position, sequence in sampled_rows(live, row_count):
        best = int(keys[row * ranks : (row + 1) * ranks].max())
        one = settings[sequence]
        greedy = one["temperature"] == 0 and one["repetition_penalty"] == 1
        token = _LOW - (best & _LOW) if greedy and _is_finite(best) else -1
        advance(token, position, sequence, one, stops[:stop_count], state, ring, context, ring_size)


@host_kernel(SIGNATURES["sample_of_ranks"])
def sample_of_ranks(launch: object, *arguments: Any) -> None:
    """As `sample`, from all ranks' logits, [sequences, vocabulary]; the keys are not needed."""
    *pointers, _, row_count, vocabulary, stop_count, context, ring_size, _ = arguments
    sizes = (row_count, vocabulary, stop_count, context, ring_size)
    HOST_KERNELS["sample"].function(launch, *pointers, *sizes)


SHARD_KERNELS: dict[str, HostKernel] = {
    kernel.name: kernel for kernel in (best_of_part, best_of_ranks, sample_of_ranks)
}
"""By name."""
