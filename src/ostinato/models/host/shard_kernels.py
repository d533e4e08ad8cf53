"""The kernels that only a program of several ranks has (`sharding`), in NumPy.

A *key* encodes a logit and its token such that the largest key has the largest logit and, of equal
ones, the lowest token: the upper half is the logit's bits, mapped to an unsigned number of the same
order, the lower half 2^32 - 1 - token.  NaN is the largest key.  `logit_key` in
`cuda/kernels/common.cuh` computes the same.
"""

from __future__ import annotations

import numpy as np

from ostinato import HostKernel
from ostinato.models.host.kernels import Given, accept_by, advance, kernel, sample, sampled_rows
from ostinato.models.program import OPTIONS

SHARD_KERNELS: dict[str, HostKernel] = {}
"""The kernels by name."""
_NAN_KEY = (1 << 64) - 1
_LOW = 0xFFFFFFFF


def _key(logit: np.float32, token: int) -> int:
    if np.isnan(logit):
        return _NAN_KEY
    bits = int((logit + np.float32(0)).view(np.uint32))  # -0 is 0
    ordered = ~bits & _LOW if bits & 0x80000000 else bits | 0x80000000
    return ordered << 32 | (_LOW - token)


def _is_finite(key: int) -> bool:
    """True if the logit of a key is neither NaN nor infinite."""
    return 0x007FFFFF < key >> 32 < 0xFF800000


def _token_of(a: Given, row: int) -> int:
    """Returns the token of a row's largest key, -1 if its logit is not finite."""
    best = int(a.keys[row * a.ranks : (row + 1) * a.ranks].max())
    return _LOW - (best & _LOW) if _is_finite(best) else -1


@kernel(SHARD_KERNELS)
def best_of_part(a: Given) -> None:
    """Computes the key of each sampling row's best logit among this rank's, whose tokens begin at
    `first`.  `logits`: this rank's, [sequences, vocabulary]."""
    for row, _, sequence in sampled_rows(a.live, a.row_count):
        values = a.logits[sequence * a.vocabulary : (sequence + 1) * a.vocabulary]
        best = int(values.argmax())  # the first NaN if there is one
        a.keys[row] = _key(values[best], a.first + best)


@kernel(SHARD_KERNELS)
def best_of_ranks(a: Given) -> None:
    """Replaces `sample`: chooses the token of each row's largest key.  `keys`: [rows, ranks].

    The token is -1 if a logit is NaN or the largest is infinite, and for a row that is not greedy,
    which needs all logits.
    """
    settings = a.options.view(OPTIONS)
    for row, position, sequence in sampled_rows(a.live, a.row_count):
        one = settings[sequence]
        greedy = one["temperature"] == 0 and one["repetition_penalty"] == 1
        names = ("frequency_penalty", "presence_penalty", "biased", "logprobs")
        plain = greedy and not any(one[name] for name in names)
        advance(a, _token_of(a, row) if plain else -1, position, sequence)


@kernel(SHARD_KERNELS)
def accept_of_ranks(a: Given) -> None:
    """Replaces `accept`: the likeliest token of a row is that of its largest key."""
    accept_by(a, lambda row: _token_of(a, row))


@kernel(SHARD_KERNELS)
def sample_of_ranks(a: Given) -> None:
    """Runs `sample` on all ranks' logits, [sequences, vocabulary]; the keys are not used."""
    sample(a)
