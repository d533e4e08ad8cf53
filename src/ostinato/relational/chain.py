"""Which kernels a join is made of: launches in order, with their grids.  Pure.

The grids follow the key alone: those of the left side its probe class, those of the output its
output class, those of the right side its build class.  Large classes of the right side and of the
output have a fixed number of blocks, with loops.
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
"""Blocks for each multiprocessor, at most: of kernels that loop over the right side, and over the
output."""


@functools.cache
def source() -> Source:
    """The kernels in both languages."""
    return Source(
        (Path(__file__).parent / "kernels" / "join.cu").read_text(encoding="utf-8"),
        host=HOST_KERNELS,
        headers={"layout.cuh": cuda_header()},
        name="join.cu",
    )


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel: its name, its blocks, and the numbers after the block's address."""

    kernel: str
    grid: int
    numbers: tuple[int, ...] = ()

    def config(self, *, programmatic: bool) -> LaunchConfig:
        """With `programmatic`, it may become resident before the launch before it has ended."""
        apart = self.kernel == "begin"  # it writes what the join before it reads
        return LaunchConfig(self.grid, SCAN_BLOCK, programmatic=programmatic and not apart)


def chain_of(key: JoinKey | IndexKey, multiprocessors: int) -> tuple[Launch, ...]:
    """The launches of a join, or of the building of an index."""
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
    """The scan's kernels between the first, which is `probe`, and the last, which is `materialize`:
    it adds the sums of level 1 to the offsets of level 0 as it reads them.

    Level 0 are the left rows' offsets; level i + 1 are the sums of the blocks of level i, which lie
    behind each other in one array.
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
