"""The kernels of a join: launches in order, with their grids.  Pure.

The grids depend on the key alone: for the left side on its probe class, for the output on its
output class, for the right side on its build class.  Large classes of the right side and of the
output have a fixed number of blocks, which loop.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from ostinato import LaunchConfig, Source
from ostinato.relational.block import TILE, block_bytes, cuda_header
from ostinato.relational.kernels_host import HOST_KERNELS
from ostinato.relational.keys import BUILD_CLASSES, SCAN_BLOCK, IndexKey, JoinKey

KERNELS = tuple(kernel.name for kernel in HOST_KERNELS)
_BUILD_BLOCKS = 4
_TILE_BLOCKS = 16
"""Most blocks per multiprocessor, of kernels that loop over the right side (build) and over the
output (tile)."""


@functools.cache
def source() -> Source:
    """Returns the kernels in both languages."""
    return Source(
        (Path(__file__).parent / "kernels" / "join.cu").read_text(encoding="utf-8"),
        host=HOST_KERNELS,
        headers={"layout.cuh": cuda_header()},
        name="join.cu",
    )


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: the kernel's name, its grid, and the numbers after the block's address."""

    kernel: str
    grid: int
    numbers: tuple[int, ...] = ()

    def config(self, *, programmatic: bool) -> LaunchConfig:
        """Returns the launch's shape; `programmatic` allows it to become resident before its
        predecessor ends."""
        apart = self.kernel == "begin"  # `begin` writes what the previous join reads
        return LaunchConfig(self.grid, SCAN_BLOCK, programmatic=programmatic and not apart)


def chain_of(key: JoinKey | IndexKey, multiprocessors: int) -> tuple[Launch, ...]:
    """Returns the launches of a join, or those that build an index."""
    each = _BUILD_BLOCKS * (2 if isinstance(key, JoinKey) and key.build > BUILD_CLASSES[1] else 1)
    most = each * max(1, multiprocessors)
    build = most if isinstance(key, IndexKey) else min(-(-key.build // SCAN_BLOCK), most)
    launches = [Launch("begin", 1, (block_bytes(key.arity) // 8,))]
    if isinstance(key, IndexKey):
        return (*launches, *(Launch(name, build) for name in ("insert", "starts", "fill")))
    if key.kind == "inner":
        launches += [Launch("insert", build), Launch("starts", build)]
    probe = -(-key.probe // SCAN_BLOCK)
    launches.append(Launch("probe", probe + build, (probe,)))
    launches += _scan(key)
    tiles = min(-(-key.output // TILE), _TILE_BLOCKS * max(1, multiprocessors))
    launches.append(Launch("materialize", tiles + build, (tiles,)))
    return tuple(launches)


def _scan(key: JoinKey) -> list[Launch]:
    """Returns the scan's launches between the first, `probe`, and the last, `materialize`, which
    adds the sums of level 1 to the offsets of level 0 as it reads them.

    Level 0 holds the left rows' offsets; level i + 1 holds the sums of the blocks of level i.
    Levels from 1 on are consecutive in one array.
    """
    sizes = (*key.scan.scratch, 1)
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    levels = range(1, len(sizes))
    up = [Launch("scan", sizes[i], (i, begins[i - 1], begins[i])) for i in levels]
    down = [
        Launch("add", sizes[i], (i, begins[i - 1], begins[i]))
        for i in reversed(range(1, len(sizes) - 1))
    ]
    return up + down
