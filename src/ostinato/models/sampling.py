"""Choice of the next token: the NumPy reference that the device kernels must agree with.

Random numbers are a pure function of (seed, position), so an eager run, a replay and a device loop
draw the same numbers without any state: Philox4x32-10 (Salmon et al., SC'11, the Random123 library)
with the 64-bit seed as key and (position, 0, 0, 0) as counter.  The upper 24 bits of the first word
give a float32 in [0, 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.errors import InputError
from ostinato.models.arguments import number, quoted, whole
from ostinato.models.program import BIAS, MOST_BIASES

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MOST_TEMPERATURE = 3.4e38
_LEAST_TOP_P = math.nextafter(0.0, 1.0)
_LEAST_PENALTY, _MOST_PENALTY = 0.01, 100.0
_MOST_ADDED = 2.0
_MOST_BIAS = 100.0


def _within(value: float, name: str, least: float, most: float, wanted: str = "") -> float:
    """Returns a finite number from `least` to `most`.  Raises InputError; `wanted` is how the
    error describes them."""
    found = number(value, name)
    if not least <= found <= most:
        raise InputError(f"{name} is {found}, must be {wanted or f'{least:g} to {most:g}'}")
    return found


def _added(value: float, name: str) -> float:
    words = f"{-_MOST_ADDED:g} to {_MOST_ADDED:g}; 0 is off"
    return _within(value, name, -_MOST_ADDED, _MOST_ADDED, words)


def _biases(
    given: Mapping[int, float] | Iterable[tuple[int, float]],
) -> tuple[tuple[int, float], ...]:
    """Returns the pairs without those of 0, the lowest token first."""
    try:
        pairs = [(token, bias) for token, bias in dict(given).items()]
    except (TypeError, ValueError):
        raise InputError(
            f"logit_bias is {quoted(given)}, must be a mapping from tokens to numbers"
        ) from None
    found = {}
    for token, bias in pairs:
        token = whole(token, "logit_bias token", 0)
        found[token] = _within(bias, f"logit_bias of token {token}", -_MOST_BIAS, _MOST_BIAS)
    if len(found) > MOST_BIASES:
        raise InputError(f"logit_bias has {len(found)} tokens; {MOST_BIASES} at most")
    return tuple(sorted((token, bias) for token, bias in found.items() if bias))


@dataclass(frozen=True, slots=True)
class _Sampling:
    """The fields of `SamplingOptions`."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: tuple[tuple[int, float], ...]


class SamplingOptions(_Sampling):
    """Options for the choice of the next token.

    `temperature`: 0 is greedy, always the likeliest token; 3.4e38 at most.  `top_k`: only the k
    likeliest; 0 is off.  `top_p`: only the smallest set of likeliest tokens that together has this
    probability; 1.0 is off.  `seed`: 0 to 2^64 - 1.  `min_p`: only tokens with at least this
    fraction of the likeliest token's probability at this temperature; 0 is off.
    `repetition_penalty`: divides the positive and multiplies the negative logits of all tokens that
    the sequence holds, the prompt's too, as in transformers; 1.0 is off, 0.01 to 100 is allowed.
    `frequency_penalty`, `presence_penalty`: subtracted from the logit of each token of the answer
    so far, the first as often as the token is there, the second once, as in OpenAI's API; -2 to 2,
    0 is off.  `logit_bias`: added to the logits of these tokens, a mapping from tokens to -100 to
    100, or pairs of them, 1,024 at most.  All of these come before the temperature, in this order
    (`changed`).
    Raises InputError.
    """

    __slots__ = ()

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = (),
    ) -> None:
        # A larger one is infinite in float32, and minus infinity divided by infinity is NaN.
        words = f"0 (greedy) to {_MOST_TEMPERATURE:g}"
        temperature = _within(temperature, "temperature", 0, _MOST_TEMPERATURE, words)
        top_p = _within(top_p, "top_p", _LEAST_TOP_P, 1, "above 0 and at most 1 (off)")
        min_p = _within(min_p, "min_p", 0, 1, "0 (off) to 1")
        least, most = _LEAST_PENALTY, _MOST_PENALTY
        words = f"{least:g} to {most:g}; 1 is off"
        penalty = _within(repetition_penalty, "repetition_penalty", least, most, words)
        # Plain numbers from here on: arithmetic with NumPy's would wrap around.
        super().__init__(
            temperature,
            whole(top_k, "top_k", 0),
            top_p,
            whole(seed, "seed", 0, (1 << 64) - 1),
            min_p,
            penalty,
            _added(frequency_penalty, "frequency_penalty"),
            _added(presence_penalty, "presence_penalty"),
            _biases(logit_bias),
        )

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always chosen; no random number is drawn then."""
        return self.temperature == 0

    @property
    def changes_logits(self) -> bool:
        """True if a penalty or a bias is on, so that the likeliest token may not be the model's."""
        added = self.frequency_penalty or self.presence_penalty or self.logit_bias
        return self.repetition_penalty != 1 or bool(added)

    def with_named(self, **named: Any) -> SamplingOptions:
        """Returns a copy with the named options replaced.

        Temperature 0 means greedy choice: every option not named is then off, except the seed,
        which stays.  Raises InputError.
        """
        greedy = named.get("temperature") == 0
        return replace(SamplingOptions(seed=self.seed) if greedy else self, **named)


GREEDY = SamplingOptions()
READABLE = SamplingOptions(temperature=0.7, min_p=0.05, repetition_penalty=1.1)
"""Options for models whose files have no advice.  They avoid the endless repetition of greedy
choices of small models without making the text incoherent."""


def require_options(value: object, name: str) -> None:
    """Raises InputError, whose message begins with `name`, unless `value` is `SamplingOptions`."""
    if not isinstance(value, SamplingOptions):
        raise InputError(f"{name} is {quoted(value)}, must be SamplingOptions")


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Computes Philox4x32-10: four 32-bit words from four words of counter and two of key.

    Raises InputError for a word outside 32 bits.
    """
    c0, c1, c2, c3 = (whole(word, "counter", 0, _MASK) for word in counter)
    k0, k1 = (whole(word, "key", 0, _MASK) for word in key)
    for _ in range(_ROUNDS):
        p0 = _MULTIPLIERS[0] * c0
        p1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> np.float32:
    """Returns the float32 in [0, 1) for a seed and a position: (first word >> 8) * 2^-24.

    `seed` is taken modulo 2^64 (low word first in the key), `position` modulo 2^32.
    Raises InputError for a value that is no whole number.
    """
    seed, position = whole(seed, "seed"), whole(position, "position")
    key = (seed & _MASK, (seed >> 32) & _MASK)
    word = philox4x32((position & _MASK, 0, 0, 0), key)[0]
    return np.float32((word >> 8) * 2.0**-24)  # 24 bits: exact in float32


def penalised(
    logits: npt.NDArray[np.float32], tokens: npt.ArrayLike, penalty: float
) -> npt.NDArray[np.float32]:
    """Returns a copy of the logits in which those of `tokens` are divided by the penalty if
    positive and multiplied by it if negative, in float32; once each, also for repeated tokens.

    `logits`: float32, (vocabulary,).  `tokens`: indices into `logits`.
    """
    out = logits.copy()
    seen = np.unique(np.asarray(tokens, np.intp))
    factor, values = np.float32(penalty), logits[seen]
    with np.errstate(over="ignore", under="ignore"):
        out[seen] = np.where(values < 0, values * factor, values / factor)
    return out


def changed(
    logits: npt.NDArray[np.float32],
    options: SamplingOptions,
    history: npt.ArrayLike = (),
    answer: int = 0,
    allowed: npt.NDArray[np.bool_] | None = None,
) -> npt.NDArray[np.float32]:
    """Returns the logits that a token is chosen from, float32, (vocabulary,): the `penalised` ones;
    less frequency_penalty times the number of times that a token is in the answer, and then
    presence_penalty if it is there; plus the bias; minus infinity for tokens that are not
    `allowed`.

    `history`: the sequence's tokens, the prompt's too; the answer is those from index `answer` on.
    Each operation is rounded to float32.
    """
    penalties = options.repetition_penalty, options.frequency_penalty, options.presence_penalty
    biases = np.array([*options.logit_bias], BIAS)
    return changed_by(logits, *penalties, biases, history, answer, allowed)


def changed_by(
    logits: npt.NDArray[np.float32],
    repetition: float,
    frequency: float,
    presence: float,
    biases: npt.NDArray[Any],
    history: npt.ArrayLike,
    answer: int,
    allowed: npt.NDArray[np.bool_] | None,
) -> npt.NDArray[np.float32]:
    """Returns what `changed` does.  `biases`: of type BIAS, no token twice."""
    out = penalised(logits, history, repetition)
    with np.errstate(over="ignore", under="ignore"):
        if frequency or presence:
            seen = np.asarray(history, np.intp)[answer:]
            tokens, counts = np.unique(seen, return_counts=True)
            out[tokens] -= np.float32(frequency) * counts.astype(np.float32)
            out[tokens] -= np.float32(presence)
        out[biases["token"]] += biases["bias"]
    if allowed is not None:
        out[~allowed] = -np.inf
    return out


def log_probabilities(
    logits: npt.NDArray[np.float32], token: int, top: int
) -> tuple[np.float32, npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Returns the natural logarithm of a token's probability, and the `top` likeliest tokens (on
    ties the lower index first) with theirs, as float32.

    The probabilities are the softmax of the model's logits, before temperature, penalties, biases
    and filters.  No logit may be NaN, and the largest must be finite.
    """
    largest = logits.max()
    with np.errstate(under="ignore"):
        scaled = logits - largest
        mass = np.log(np.exp(scaled).sum(dtype=np.float64))
    order = _largest_first(scaled, top)[:top]
    found = (scaled[[token, *order]] - mass).astype(np.float32)
    return found[0], order.astype(np.int32), found[1:]


def sample(
    logits: npt.NDArray[np.float32],
    options: SamplingOptions = GREEDY,
    position: int = 0,
    history: npt.ArrayLike = (),
    answer: int = 0,
) -> int:
    """Returns the next token's index, chosen from float32 logits of shape (vocabulary,).

    The steps, in order: `changed` by the penalties and the bias, for the tokens in `history`, of
    which those from `answer` on are the answer's; (logit - largest) / temperature in float32; the
    `top_k` largest (on ties the lower index stays); softmax in float32; the fewest of the likeliest
    tokens, one or more, whose float64 sum is at least `top_p` of the whole; of these the tokens
    whose scaled logit is at least log(min_p), rounded to float32; of these, likeliest first and
    lower index first on ties, the first token whose running sum exceeds `uniform(seed, position)`
    times their total.

    A NaN logit counts as minus infinity, so that an index is always returned: the caller must check
    the logits for NaN to find a broken model.  If all logits are minus infinity, the result is 0;
    if any is plus infinity, the first such.  Raises InputError for other shapes.
    """
    if logits.ndim != 1 or logits.size == 0 or logits.dtype != np.float32:
        raise InputError(
            f"logits are {logits.dtype} {list(logits.shape)}, must be float32 (vocabulary,)"
        )
    logits = _without_nan(logits)
    if options.changes_logits:
        logits = changed(logits, options, history, answer)
    best = int(np.argmax(logits))
    largest = logits[best]
    if options.is_greedy or not np.isfinite(largest):
        return best
    # Underflow is meant (to probability 0); a temperature near 0 overflows to -inf, which is right.
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        scaled = (logits - largest) / np.float32(options.temperature)
        # With a temperature that rounds to 0 in float32, the largest logit became 0 / 0.
        scaled[logits == largest] = 0.0
        order = _largest_first(scaled, options.top_k)
        weights = np.exp(scaled[order], dtype=np.float32)
    running = np.cumsum(weights / np.sum(weights, dtype=np.float32), dtype=np.float64)
    kept = order.size
    if options.top_p < 1.0:
        enough = options.top_p * running[-1]
        kept = min(kept, int(np.searchsorted(running, enough, side="left")) + 1)
    if options.min_p > 0.0:
        least = np.float32(math.log(options.min_p))
        kept = min(kept, int(np.count_nonzero(scaled[order] >= least)))
    drawn = float(uniform(options.seed, position)) * running[kept - 1]
    index = int(np.searchsorted(running[:kept], drawn, side="right"))
    return int(order[min(index, kept - 1)])


def _largest_first(values: npt.NDArray[np.float32], top_k: int) -> npt.NDArray[np.intp]:
    """Returns the indices of the `top_k` largest values (all if 0), descending, the lower index
    first on ties."""
    if not 0 < top_k < values.size:
        return np.argsort(-values, kind="stable")
    # Only values that can be among the first k are sorted: those not below the k-th largest.
    threshold = np.partition(values, values.size - top_k)[values.size - top_k]
    candidates = np.flatnonzero(values >= threshold)
    order = np.argsort(-values[candidates], kind="stable")[:top_k]
    return candidates[order]


def _without_nan(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    nan = np.isnan(logits)
    return np.where(nan, np.float32(-np.inf), logits) if nan.any() else logits
