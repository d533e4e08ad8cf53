"""Which tuning a decoder's CUDA kernels get, and where it comes from.

stored      found by `ostinato tune` on this machine, for this GPU and this kernel code
built-in    found the same way when this version was made (`kernels_cuda_shapes.TUNED`)
default     by rule, for everything else
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.shapes import (
    TUNED,
    Tuning,
    default_tuning,
    for_context,
    require_supported,
    shape_key,
)
from ostinato.models.cuda.tuning_store import TuningKey, TuningStore

__all__ = ["ChosenTuning", "Origin", "choose_tuning", "rule_tuning"]


class Origin(enum.Enum):
    """Where a tuning comes from."""

    STORED = "stored"
    BUILT_IN = "built-in"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class ChosenTuning:
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

    `context`: positions of a slot.  `clusters`: whether the device has them.  A stored one that is
    damaged or does not fit is passed over with a warning.
    Raises UnsupportedModelError.
    """
    ruled = rule_tuning(
        config,
        rows=rows,
        context=context,
        gpu=gpu,
        multiprocessors=multiprocessors,
        clusters=clusters,
    )
    key = TuningKey.of(config, rows, gpu)
    found = (store or TuningStore()).load(key, config, ruled.tuning, clusters=clusters)
    if found is None:
        return ruled
    return ChosenTuning(for_context(found, context), Origin.STORED)


def rule_tuning(
    config: LlamaConfig,
    *,
    rows: int,
    context: int = 2048,
    gpu: str,
    multiprocessors: int,
    clusters: bool = False,
) -> ChosenTuning:
    """What is used where nothing is stored: the built-in tuning, or the default rule's.

    Raises UnsupportedModelError.
    """
    built_in = TUNED.get((gpu, shape_key(config), rows))
    if built_in is not None:
        require_supported(config, rows)
        return ChosenTuning(for_context(built_in, context), Origin.BUILT_IN)
    default = default_tuning(
        config, rows=rows, context=context, multiprocessors=multiprocessors, clusters=clusters
    )
    return ChosenTuning(default, Origin.DEFAULT)
