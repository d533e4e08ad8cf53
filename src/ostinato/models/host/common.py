"""What the NumPy kernels share: the table of them, the rows of a step, norms and products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ostinato import HostKernel, host_kernel
from ostinato.models.program import ACTIVE, SAMPLE

__all__ = [
    "HOST_KERNELS",
    "ROW_BY_ROW",
    "Floats",
    "Ints",
    "Run",
    "kernel",
    "matrix",
    "normed",
    "product",
    "runs_of",
    "sampled_rows",
    "used_rows",
]

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int32]

HOST_KERNELS: dict[str, HostKernel] = {}
"""By name."""

_FLAGS = 3
ROW_BY_ROW = 4  # up to so many rows, matrix-vector products are faster than a matrix product


def kernel(signature: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a kernel.  As on a GPU, infinities and NaN are values and no warnings."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        made = host_kernel(signature, name=function.__name__)(np.errstate(all="ignore")(function))
        HOST_KERNELS[made.name] = made
        return function

    return decorate


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `start` to `stop` of one slot at rising positions from `position`."""

    start: int
    stop: int
    slot: int
    position: int


def used_rows(live: Ints, row_count: int) -> int:
    """Rows up to the last active one."""
    if row_count == 1:
        return int(live[_FLAGS]) & ACTIVE
    active = np.flatnonzero(live[_FLAGS : 4 * row_count : 4] & ACTIVE)
    return int(active[-1]) + 1 if active.size else 0


def runs_of(live: Ints, used: int) -> Iterator[Run]:
    run: Run | None = None
    for index, (_, position, slot, flags) in enumerate(live[: 4 * used].reshape(-1, 4).tolist()):
        if not flags & ACTIVE:
            continue
        if run is not None:
            follows = run.stop == index and run.slot == slot
            if follows and run.position + run.stop - run.start == position:
                run = Run(run.start, index + 1, slot, run.position)
                continue
            yield run
        run = Run(index, index + 1, slot, position)
    if run is not None:
        yield run


def sampled_rows(live: Ints, used: int) -> list[tuple[int, int, int]]:
    """(row, position, slot) of the rows that get logits."""
    wanted = ACTIVE | SAMPLE
    rows = live[: 4 * used].reshape(-1, 4).tolist()
    return [(i, row[1], row[2]) for i, row in enumerate(rows) if row[3] & wanted == wanted]


def matrix(flat: npt.NDArray[Any], rows: int, columns: int) -> npt.NDArray[Any]:
    return flat[: rows * columns].reshape(rows, columns)


def product(weight: Floats, x: Floats, out: Floats) -> None:
    """out = x @ weight.T for x [rows, in], weight [out, in].

    Measured with OpenBLAS on two cores, all layers of SmolLM2-135M: as `x @ weight.T` 2 rows take
    43 ms and 8 take 47; row by row 2 take 23; as `weight @ x.T` 8 take 38, the copy included.
    """
    if len(x) <= ROW_BY_ROW:
        for row, target in zip(x, out, strict=True):
            np.matmul(weight, row, out=target)
    else:
        out[...] = np.matmul(weight, x.T).T


def normed(x: Floats, norm: Floats, epsilon: float) -> Floats:
    """RMS norm of rows, times the weights."""
    width = x.shape[1]
    if len(x) == 1:
        row = x[0]
        scale = 1.0 / np.sqrt(np.dot(row, row) / np.float32(width) + np.float32(epsilon))
        out = x * np.float32(scale)
    else:
        squares = np.square(x).mean(axis=1, keepdims=True)
        squares += np.float32(epsilon)
        np.sqrt(squares, out=squares)
        out = x / squares
    out *= norm[:width]
    return out
