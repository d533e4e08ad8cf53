"""Candidates of a sweep: tunings that differ from the best so far in one place.  Pure.

`cuda.legal` checks what the kernels support; `tune.search` measures the candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.shapes import (
    START_NEXT,
    Tuning,
    block_shapes,
    products_of,
    warpgroup_shape,
    without_warpgroups,
)


def neighbours(tuning: Tuning, name: str) -> Iterator[Tuning]:
    """Yields tunings in which one field of a shape ("qkv", "attention", …) is another by a step,
    then those in which two are, since some fields must change together.  Not all are legal."""
    shape = getattr(tuning, name)
    # Warpgroups compute all products or none.
    fields = [field for field in type(shape).__dataclass_fields__ if field != "warpgroup"]
    steps = {field: _steps(getattr(shape, field)) for field in fields}
    for count in (1, 2):
        for chosen in itertools.combinations(fields, count):
            for values in itertools.product(*(steps[field] for field in chosen)):
                changes = dict(zip(chosen, values, strict=True))
                yield replace(tuning, **{name: replace(shape, **changes)})


def _steps(value: int) -> list[int]:
    """Returns the numbers next to one, and about half, two thirds, three halves and twice of it."""
    found = {value // 2, 2 * value // 3, value - 1, value + 1, 3 * value // 2, 2 * value}
    return sorted(found - {value}, key=lambda one: abs(one - value))


def block_variants(tuning: Tuning, config: LlamaConfig, multiprocessors: int) -> Iterator[Tuning]:
    """Yields variants of the tuning with a layer's attention as one launch, or as three."""
    if tuning.block is not None:
        yield replace(tuning, block=None)
        yield from neighbours(tuning, "block")
    elif not tuning.tiles:
        for shape in block_shapes(config, multiprocessors, tuning.shared)[:1]:
            yield replace(tuning, block=shape)


def warpgroup_variants(
    tuning: Tuning, config: LlamaConfig, rows: int, multiprocessors: int
) -> tuple[Tuning, ...]:
    """Returns the variant of the tuning with warpgroups for all products if it has none, or without
    them if it has; for a device with warpgroups."""
    products = products_of(config)
    if rows <= 8 or not all(product.fits_warpgroups for product in products.values()):
        return ()
    made: dict[str, Any] = {
        name: without_warpgroups(name, tuning, product, rows, multiprocessors)
        if tuning.warpgroups
        else warpgroup_shape(name, product, rows, multiprocessors)
        for name, product in products.items()
    }
    return (replace(tuning, **made),)


def start_variants(tuning: Tuning) -> tuple[Tuning, ...]:
    """Returns variants with the same shapes but other points at which the next kernel may start,
    and one without programmatic launch."""
    made = [replace(tuning.with_start(where), programmatic=True) for where in START_NEXT]
    # Then the attention may read the cache before its wait, and `sample` its row.
    late = dict.fromkeys(("norm_qkv_rope", "norm_rope", "head", "rounded_head"), "AFTER_WAIT")
    early = replace(made[0], start_next={**made[0].start_next, **late})
    return (*made, early, replace(tuning, programmatic=False))
