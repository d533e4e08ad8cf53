"""The join's kernels in NumPy, for the host driver: names, parameters and memory of `join.cu`.

Each kernel does the work of its whole grid at once.  Blocks matter only in the scan, whose levels
are those of the CUDA kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato import host_kernel
from ostinato.lowlevel import HostLaunch
from ostinato.relational.block import BLOCK, COLUMN, DONE, MAX_BYTES, RING_DEPTH, RING_PITCH, SLOT
from ostinato.relational.keys import SCAN_BLOCK

Rows = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


class _Join:
    """The block of the join under way, and views of the memory that it names."""

    def __init__(self, launch: HostLaunch, block: npt.NDArray[np.uint8]) -> None:
        self._launch = launch
        self.head: Any = block[: BLOCK.itemsize].view(BLOCK)[0]
        self.left, self.right = int(self.head["left_rows"]), int(self.head["right_rows"])
        self.mask = int(self.head["mask"])
        end = BLOCK.itemsize + int(self.head["arity"]) * COLUMN.itemsize
        self.columns: Any = block[BLOCK.itemsize : end].view(COLUMN)

    def at(self, address: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns `count` elements from an address on."""
        kind = np.dtype(dtype)
        if count == 0:
            return np.empty(0, kind)
        return self._launch.memory(int(address), count * kind.itemsize).view(kind)

    def array(self, field: str, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns `count` elements of the array that a field of the head points to."""
        return self.at(self.head[field], count, dtype)

    @property
    def slots(self) -> npt.NDArray[Any]:
        return self.array("slots", self.mask + 1, SLOT)

    def keys(self, side: str) -> list[U64]:
        """Returns the key columns of a side, each as 64 bits."""
        rows = self.left if side == "left" else self.right
        return [
            self.at(column[side], rows, np.uint64 if column["nbytes"] == 8 else np.uint32).astype(
                np.uint64
            )
            for column in self.columns
        ]

    def set_total(self, total: int) -> None:
        self.head["total"] = total
        self.head["overflow"] = total > int(self.head["capacity"])

    def finish(self) -> None:
        """Reports to the host that the join is done."""
        if self.head["done"]:
            done = self.array("done", 1, DONE)[0]
            done["total"], done["overflow"] = self.head["total"], self.head["overflow"]
            done["sequence"] = self.head["sequence"]


def _mixed(h: U64) -> U64:
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ h >> np.uint64(33)


def _hash(columns: list[U64]) -> tuple[Rows, npt.NDArray[np.uint32]]:
    """Returns the lower 32 bits of each row's hash, and its tag."""
    h = np.zeros_like(columns[0])
    for column in columns:
        h = _mixed(h + np.uint64(0x9E3779B97F4A7C15) + column)
    low = (h & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return low, (h >> np.uint64(32)).astype(np.uint32)


def _same(columns: list[U64], rows: Rows, others: list[U64], other_rows: Rows) -> Any:
    same = np.ones(len(rows), bool)
    for column, other in zip(columns, others, strict=True):
        same &= column[rows] == other[other_rows]
    return same


@host_kernel("ring: *const u8, state: *u64, block: *u8, words: u32")
def begin(
    launch: HostLaunch,
    ring: npt.NDArray[np.uint8],
    state: npt.NDArray[np.uint64],
    block: npt.NDArray[np.uint8],
    words: int,
) -> None:
    turn = int(state[0])
    start = turn % RING_DEPTH * RING_PITCH
    entry = ring[start : start + 8 * words]
    block[:MAX_BYTES][: 8 * words] = 0
    if int(entry[:8].view(np.uint64)[0]) == turn + 1:
        block[: 8 * words] = entry
        state[0] = turn + 1


@host_kernel("block: *u8")
def insert(launch: HostLaunch, block: npt.NDArray[np.uint8]) -> None:
    join = _Join(launch, block)
    if not join.right:
        return
    keys, slots = join.keys("right"), join.slots
    low, tag = _hash(keys)
    at, left = low & join.mask, np.arange(join.right)
    while len(left):
        # The first of the rows at an empty slot claims it; then each row compares its key.
        free = left[slots["row"][at[left]] == 0]
        claimed, first = np.unique(at[free], return_index=True)
        slots["row"][claimed] = free[first] + 1
        slots["tag"][claimed] = tag[free[first]]
        there = slots[at[left]]
        equal = there["tag"] == tag[left]
        equal &= _same(keys, left, keys, there["row"].astype(np.int64) - 1)
        left = left[~equal]
        at[left] = (at[left] + 1) & join.mask
    order = np.argsort(at, kind="stable")
    claimed, first, counts = np.unique(at[order], return_index=True, return_counts=True)
    slots["count"][claimed] += counts.astype(np.uint32)
    rank = np.empty(join.right, np.uint32)
    rank[order] = np.arange(join.right) - np.repeat(first, counts)
    join.array("slot_of", join.right, np.uint32)[:] = at
    join.array("rank", join.right, np.uint32)[:] = rank


@host_kernel("block: *u8")
def starts(launch: HostLaunch, block: npt.NDArray[np.uint8]) -> None:
    join = _Join(launch, block)
    rank = join.array("rank", join.right, np.uint32)
    at = join.array("slot_of", join.right, np.uint32)[rank == 0]
    if len(at):
        counts = join.slots["count"][at].astype(np.int64)
        join.slots["start"][at] = np.cumsum(counts) - counts
        join.head["groups"] = counts.sum()


def _fill_groups(join: _Join) -> None:
    if join.right:
        at = join.array("slot_of", join.right, np.uint32)
        rank = join.array("rank", join.right, np.uint32)
        grouped = join.array("grouped", join.right, np.uint32)
        grouped[join.slots["start"][at] + rank] = np.arange(join.right)


@host_kernel("block: *u8")
def fill(launch: HostLaunch, block: npt.NDArray[np.uint8]) -> None:
    join = _Join(launch, block)
    _fill_groups(join)
    join.finish()


@host_kernel("block: *u8, probe_blocks: u32")
def probe(launch: HostLaunch, block: npt.NDArray[np.uint8], probe_blocks: int) -> None:
    join = _Join(launch, block)
    if launch.grid[0] > probe_blocks:
        _fill_groups(join)
    count, start = np.zeros(join.left, np.uint64), np.zeros(join.left, np.uint32)
    if join.left and join.right:
        keys, others, slots = join.keys("left"), join.keys("right"), join.slots
        low, tag = _hash(keys)
        at, left = low & join.mask, np.arange(join.left)
        while len(left):
            there = slots[at[left]]
            used = there["row"] != 0
            left, there = left[used], there[used]
            equal = there["tag"] == tag[left]
            equal &= _same(keys, left, others, there["row"].astype(np.int64) - 1)
            count[left[equal]], start[left[equal]] = there["count"][equal], there["start"][equal]
            left = left[~equal]
            at[left] = (at[left] + 1) & join.mask
    before, sums = _scanned(count)
    join.array("offsets", join.left, np.uint32)[:] = before.astype(np.uint32)
    join.array("found", join.left, np.uint32)[:] = start
    if probe_blocks == 1:
        join.set_total(int(sums.sum()))
        sums = np.zeros(min(1, join.left), np.uint64)
    join.array("sums", len(sums), np.uint64)[:] = sums


def _scanned(values: U64) -> tuple[U64, U64]:
    """Returns the sum of the values before each in its block, and the sum of each block."""
    blocks = -(-len(values) // SCAN_BLOCK)
    padded = np.zeros((blocks, SCAN_BLOCK), np.uint64)
    padded.reshape(-1)[: len(values)] = values
    upto = np.cumsum(padded, axis=1)
    return (upto - padded).reshape(-1)[: len(values)], upto[:, -1]


def _level_size(join: _Join, level: int) -> int:
    return -(-join.left // (1 << 8 * level))


@host_kernel("block: *u8, level: u32, own: u32, above: u32")
def scan(
    launch: HostLaunch, block: npt.NDArray[np.uint8], level: int, own: int, above: int
) -> None:
    join = _Join(launch, block)
    size = _level_size(join, level)
    values = join.at(int(join.head["sums"]) + 8 * own, size, np.uint64)
    before, sums = _scanned(values)
    values[:] = before
    if launch.grid[0] == 1:
        join.set_total(int(sums.sum()))
    else:
        join.at(int(join.head["sums"]) + 8 * above, len(sums), np.uint64)[:] = sums


@host_kernel("block: *u8, level: u32, own: u32, above: u32")
def add(launch: HostLaunch, block: npt.NDArray[np.uint8], level: int, own: int, above: int) -> None:
    join = _Join(launch, block)
    size = _level_size(join, level)
    values = join.at(int(join.head["sums"]) + 8 * own, size, np.uint64)
    sums = join.at(int(join.head["sums"]) + 8 * above, -(-size // SCAN_BLOCK), np.uint64)
    values += np.repeat(sums, SCAN_BLOCK)[:size]


@host_kernel("block: *u8, tile_blocks: u32")
def materialize(launch: HostLaunch, block: npt.NDArray[np.uint8], tile_blocks: int) -> None:
    join = _Join(launch, block)
    total = 0 if join.head["overflow"] else int(join.head["total"])
    if total:
        blocks = join.array("sums", -(-join.left // SCAN_BLOCK), np.uint64)
        offsets = np.repeat(blocks, SCAN_BLOCK)[: join.left].astype(np.int64)
        offsets += join.array("offsets", join.left, np.uint32)
        counts = np.diff(offsets, append=total)
        rows = np.repeat(np.arange(join.left), counts)
        places = join.array("found", join.left, np.uint32).astype(np.int64) - offsets
        grouped = join.array("grouped", join.right, np.uint32)
        join.array("left_out", total, np.uint32)[:] = rows
        join.array("right_out", total, np.uint32)[:] = grouped[places[rows] + np.arange(total)]
    if join.head["clear"]:
        join.slots[:] = np.zeros(1, SLOT)
    join.finish()


HOST_KERNELS = (begin, insert, starts, fill, probe, scan, add, materialize)
