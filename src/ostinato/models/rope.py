"""Scaled ropes: by how much each pair turns more slowly, and what rotated heads are multiplied by.
Pure.  The numbers come from files and are not trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.errors import ModelFormatError


def yarn_magnitude(where: str, factor: float, *shares: float) -> float:
    """Returns YaRN's correction of the attention for a rope stretched by `factor`: 1 + 0.1
    ln(factor) with the first share of the logarithm, divided by that with the second."""
    for share in shares:
        _require_size(where, "mscale", share, least=0.0)
    over, under = (1.0 + 0.1 * share * math.log(max(factor, 1.0)) for share in shares)
    return over / under


def yarn_kept(
    where: str,
    theta: float,
    pairs: int,
    original: int,
    betas: Sequence[float],
    *,
    truncate: bool = True,
) -> npt.NDArray[np.float64]:
    """Returns the share of each pair's frequency that YaRN keeps: 1 for pairs that turn more often
    than `betas[0]` in the first training's `original` positions, 0 for those that turn less than
    `betas[1]`, a ramp of pairs between; `truncate`: from whole pairs to whole pairs."""
    for beta in betas:
        _require_size(where, "beta", beta)
    _require_size(where, "the original context", original)
    _require_size(where, "rope_theta", theta, least=1.0 + 1e-9)
    low, high = (
        pairs * math.log(original / (beta * 2 * math.pi)) / math.log(theta) for beta in betas
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if high < low:
        raise ModelFormatError(
            f"{where}: a yarn rope of {original} positions with beta_fast {betas[0]:g} and "
            f"beta_slow {betas[1]:g} scales no pair or all; it must scale some"
        )
    ramp = (np.arange(pairs, dtype=np.float64) - low) / (high - low or 0.001)
    return np.clip(1.0 - ramp, 0.0, 1.0)


def scaled_rope(
    where: str,
    pairs: int,
    factor: float,
    context: int,
    original: int,
    magnitude: float = 1.0,
    kept: npt.NDArray[np.float64] | float = 0.0,
    given: tuple[float, ...] | None = None,
) -> dict[str, Any]:
    """The fields of a rope whose frequencies are divided by `factor`, except for the shares `kept`,
    and by the divisors `given`.  It serves `factor` times as many positions as the `original`
    context, and never less than `context`."""
    _require_size(where, "factor", factor)
    if factor != 1:
        shares = np.zeros(pairs) + kept
        divisors = 1.0 / ((1.0 - shares) / factor + shares)
        if given is None:
            given = tuple(divisors.tolist())
        elif len(given) == len(divisors):  # else the config refuses their number
            given = tuple((divisors * np.array(given)).tolist())
    return {
        "context_length": max(context, int(factor * original)),
        "rope_factors": given,
        "rope_magnitude": magnitude,
    }


def _require_size(where: str, name: str, value: float, least: float = 1e-9) -> None:
    if not least <= value <= 1e12:  # not NaN either
        raise ModelFormatError(
            f"{where}: {name} of the rope's scaling is {value:g}, must be {least:g} to 1e12"
        )
