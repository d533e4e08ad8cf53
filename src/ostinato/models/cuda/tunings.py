"""Which tuning a decoder's CUDA kernels get, and where it comes from.

stored      found by `ostinato tune` on this machine, for this GPU and this kernel code
default     by rule, for everything else
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.shapes import Tuning, default_tuning, for_context
from ostinato.models.cuda.tuning_store import TuningKey, TuningStore

__all__ = ["ChosenTuning", "Origin", "choose_tuning"]


class Origin(enum.Enum):
    """Where a tuning comes from."""

    STORED = "stored"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class ChosenTuning:
    """A tuning and its origin."""

    tuning: Tuning
    origin: Origin


def choose_tuning(
    config: LlamaConfig,
    *,
    rows: int,
    context: int,
    gpu: str,
    multiprocessors: int,
    clusters: bool = False,
    store: TuningStore | None = None,
) -> ChosenTuning:
    """The tuning for steps of `rows` rows on a GPU by name, and its origin.

    `context`: positions of a slot.  `clusters`: whether the device has them.  A stored tuning that
    is damaged or does not fit is not used, and a warning is logged.
    Raises UnsupportedModelError.
    """
    ruled = default_tuning(
        config, rows=rows, context=context, multiprocessors=multiprocessors, clusters=clusters
    )
    key = TuningKey.of(config, rows, gpu)
    found = (store or TuningStore()).load(key, config, ruled, clusters=clusters)
    if found is None:
        return ChosenTuning(ruled, Origin.DEFAULT)
    return ChosenTuning(for_context(found, context), Origin.STORED)
