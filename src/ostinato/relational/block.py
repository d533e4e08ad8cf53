"""The parameter block of a join: the kernels read it instead of arguments.

The block is one record, written by the host into a ring of pinned memory, copied to the device by
the graph's first kernel, and read by all others.  The dtypes here are the only definition:
`cuda_header` generates the C structs from them, with sizes asserted, and the NumPy kernels view
memory as them.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ostinato.relational.keys import MAX_ARITY

BLOCK = np.dtype(
    [
        ("sequence", "u8"),  # of the join, counted from 1; 0 means no join
        ("slots", "u8"),  # address of the hash table (SLOT)
        ("grouped", "u8"),  # address of the right side's row numbers, group by group (u32)
        ("slot_of", "u8"),  # address: the table's slot of each right row (u32)
        ("rank", "u8"),  # address: the place of each right row in its group (u32)
        ("found", "u8"),  # address: where the matches of each left row start in `grouped` (u32)
        ("offsets", "u8"),  # address: matches before each left row in its block of 256 (u32)
        ("sums", "u8"),  # address: block sums of the scan, level by level (u64)
        ("left_out", "u8"),  # address: left row numbers of the result (u32)
        ("right_out", "u8"),  # address: right row numbers of the result (u32)
        ("done", "u8"),  # address: DONE of this join, in pinned memory
        ("left_rows", "u4"),
        ("right_rows", "u4"),
        ("mask", "u4"),  # slots of the table, less one
        ("capacity", "u4"),  # rows that the output has room for
        ("arity", "u4"),
        ("clear", "u4"),  # whether the last kernel empties the table
        # From here on the device's own fields: the host writes zeros.
        ("total", "u8"),  # rows of the result
        ("overflow", "u4"),  # 1: the result does not fit, and nothing was written
        ("groups", "u4"),  # entries of `grouped` that belong to a group so far
        ("ticket", "u4"),  # blocks of the last kernel that have finished
        ("reserved", "u4"),
    ],
    align=True,
)
"""The head of the block; `arity` records of COLUMN follow it."""

COLUMN = np.dtype([("left", "u8"), ("right", "u8"), ("nbytes", "u4"), ("reserved", "u4")])
"""One key column: addresses on both sides, and the bytes of a value (4 or 8)."""

SLOT = np.dtype([("row", "u4"), ("tag", "u4"), ("count", "u4"), ("start", "u4")])
"""A slot of the hash table: one group of right rows with equal keys.

`row`: a row of the group, plus one; 0 marks an empty slot.  So no key value has a special meaning,
and an empty table is all zeros.  `tag`: 32 bits of the key's hash.
"""

DONE = np.dtype([("sequence", "u8"), ("total", "u8"), ("overflow", "u8"), ("reserved", "u8")])
"""The record that a finished join writes for the host, `sequence` last."""

MAX_BYTES = BLOCK.itemsize + MAX_ARITY * COLUMN.itemsize
RING_PITCH = -(-MAX_BYTES // 256) * 256
"""Bytes from one entry of the ring to the next."""
RING_DEPTH = 32
"""Joins that may be under way on one joiner."""
TILE = 1024
"""Output rows that one block writes at a time."""


def offset_of(dtype: np.dtype[Any], field: str) -> int:
    """Returns the offset of a field in bytes."""
    fields = dtype.fields
    assert fields is not None
    return int(fields[field][1])


_OWN = BLOCK.itemsize - offset_of(BLOCK, "total")
"""Bytes of the device's own fields."""
_COLUMN = "QQII"
_ADDRESSES = struct.Struct("<7Q")
assert _ADDRESSES.size == offset_of(BLOCK, "left_out") - offset_of(BLOCK, "slots")
assert struct.calcsize(f"<{_COLUMN}") == COLUMN.itemsize


def block_bytes(arity: int) -> int:
    """Returns the bytes of a block with `arity` key columns."""
    return BLOCK.itemsize + arity * COLUMN.itemsize


class Pattern:
    """A prepared block, complete except for the fields of one launch: sequence, output and done."""

    __slots__ = ("_addresses", "_rest", "_write")

    def __init__(
        self, addresses: tuple[int, ...], sizes: tuple[int, ...], columns: tuple[int, ...]
    ) -> None:
        """Takes the fields of BLOCK from `slots` to `sums`, those from `left_rows` to `clear`, and
        those of COLUMN for each column."""
        self._addresses = _ADDRESSES.pack(*addresses)
        records = _COLUMN * (len(columns) // 4)
        self._rest = struct.pack(f"<6I{_OWN}x{records}", *sizes, *columns)
        self._write = struct.Struct(f"<Q{_ADDRESSES.size}sQQQ{len(self._rest)}s").pack_into

    def write(
        self, into: memoryview, at: int, sequence: int, left: int, right: int, done: int
    ) -> None:
        """Writes the block, with zeros for the device's own fields.  `left`, `right`, `done`: the
        addresses of the output and of DONE."""
        self._write(into, at, sequence, self._addresses, left, right, done, self._rest)


_TYPES = {"u4": "u32", "u8": "u64"}


def cuda_header() -> str:
    """Returns the records and constants above as C code, each size asserted."""
    records = (("Block", BLOCK), ("Column", COLUMN), ("Slot", SLOT), ("Done", DONE))
    numbers = (("TILE", TILE), ("RING_PITCH", RING_PITCH), ("RING_DEPTH", RING_DEPTH))
    return (
        "#pragma once\n"
        + "".join(f"constexpr u32 {name} = {value};\n" for name, value in numbers)
        + "".join(_c_struct(name, dtype) for name, dtype in records)
    )


def _c_struct(name: str, dtype: np.dtype[Any]) -> str:
    names = dtype.names or ()
    lines = [f"struct alignas(8) {name} {{"]
    lines += [f"    {_TYPES[dtype[field].str[1:]]} {field};" for field in names]
    # NVRTC before 13.1 has no offsetof; if the size is right and each field is aligned as in C, so
    # are the offsets.
    assert dtype == np.dtype([(field, dtype[field]) for field in names], align=True), name
    lines += ["};", f'static_assert(sizeof({name}) == {dtype.itemsize}, "{name}");', ""]
    return "\n".join(lines)
