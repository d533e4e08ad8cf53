"""The keys of joins' graphs, and scan topologies.  Pure; no driver, no I/O.

A join's kernels read row counts and addresses from memory, so its graph depends only on which
kernels there are, and their grids.  `JoinKey` holds just that: two joins share a graph exactly if
their keys are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, SupportsIndex

from ostinato.errors import InputError
from ostinato.lowlevel import whole_number
from ostinato.step import capacity_class

LARGEST = 2**32 - 1
"""The largest capacity class; row counts are below it."""
MAX_ARITY = 255
"""The most key columns that a join may have."""
SCAN_BLOCK = 256
"""Elements that one block scans."""
BUILD_CLASSES = (16_384, 262_144, LARGEST)
"""Largest number of right rows of each build class.  Larger classes use more blocks: for a small
side, surplus blocks would keep another join's chain off the device; for a large side, more blocks
keep more random reads in flight."""


@dataclass(frozen=True, slots=True)
class ScanTopology:
    """The kernels of a multi-block exclusive scan with blocks of 256.

    `scratch`: elements of each level of block sums, from the lowest; empty if one block suffices.
    """

    kernels: int
    scratch: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kernels}{[*self.scratch]}"


def scan_topology(rows: SupportsIndex) -> ScanTopology:
    """Returns the topology of a scan over `rows` elements.

    0 rows need no kernels; up to 256 need one; more need a level of block sums for each factor of
    256, and two kernels per level: one that scans it and one that adds it to the level below.
    Raises InputError unless 0 <= rows <= 2**32 - 1.
    """
    left = bounded(rows, "rows", 0, LARGEST)
    if left == 0:
        return ScanTopology(0, ())
    scratch = []
    while left > SCAN_BLOCK:
        left = -(-left // SCAN_BLOCK)
        scratch.append(left)
    return ScanTopology(1 + 2 * len(scratch), tuple(scratch))


def build_class(rows: int) -> int:
    """Returns the build class of a right side."""
    return next(most for most in BUILD_CLASSES if rows <= most)


def table_slots(rows: int) -> int:
    """Returns the slots of a hash table for `rows` rows: a power of two, at least twice as many."""
    return 1 << max(1, (2 * rows - 1).bit_length())


@dataclass(frozen=True, slots=True)
class JoinKey:
    """The parts of a join that determine its graph.

    `kind`: "inner" builds a hash index of the right side, uses it once and clears it; "indexed
    inner" uses an index that `build_index` made.  `arity`: key columns, 1 to 255.  `key_bytes`:
    bytes of one row's key, 4 or 8 per column.  `probe` and `output`: capacity classes of the probe
    side's rows and of the result.  `build`: the right side's class, one of BUILD_CLASSES, or 0 with
    an index.  `scan`: the scan topology of the probe class.

    Raises InputError for values out of these bounds, for invalid classes, and for a topology of
    another class.
    """

    kind: Literal["inner", "indexed inner"]
    arity: int
    key_bytes: int
    probe: int
    output: int
    build: int
    scan: ScanTopology

    def __post_init__(self) -> None:
        if self.kind not in ("inner", "indexed inner"):
            raise InputError(f'kind={self.kind!r}: "inner" or "indexed inner" is needed')
        _check_columns(self.arity, self.key_bytes)
        for name, value in (("probe", self.probe), ("output", self.output)):
            if capacity_class(value) != value:
                raise InputError(f"{name}={value} is no capacity class: a power of two, or 2**32-1")
        if self.build not in ((0,) if self.kind != "inner" else BUILD_CLASSES):
            raise InputError(f"build={self.build}: {self.kind} has no such class of the right side")
        if self.scan != scan_topology(self.probe):
            raise InputError(f"scan={self.scan}: probe class {self.probe} has another topology")

    def __hash__(self) -> int:
        """Hashes some fields only: each join looks its graph up."""
        return hash((self.build, self.arity, self.key_bytes, self.probe, self.output))

    @classmethod
    def of(
        cls,
        kind: Literal["inner", "indexed inner"],
        arity: int,
        key_bytes: int,
        rows: int,
        right_rows: int,
        capacity: int,
    ) -> JoinKey:
        """Returns the key of a join of `rows` probe rows with room for `capacity` output rows."""
        probe, output = capacity_class(rows), capacity_class(capacity)
        build = build_class(right_rows) if kind == "inner" else 0
        return cls(kind, arity, key_bytes, probe, output, build, scan_topology(probe))

    def __str__(self) -> str:
        return (
            f"{self.kind}, {self.arity} columns of {self.key_bytes} bytes, probe {self.probe}, "
            f"output {self.output}, build {self.build}, scan {self.scan}"
        )


@dataclass(frozen=True, slots=True)
class IndexKey:
    """The parts of building an index that determine its graph.  Raises InputError like
    `JoinKey`."""

    arity: int
    key_bytes: int

    def __post_init__(self) -> None:
        _check_columns(self.arity, self.key_bytes)

    def __str__(self) -> str:
        return f"index, {self.arity} columns of {self.key_bytes} bytes"


def _check_columns(arity: int, key_bytes: int) -> None:
    bounded(arity, "arity", 1, MAX_ARITY)
    if not 4 * arity <= key_bytes <= 8 * arity or key_bytes % 4:
        raise InputError(
            f"key_bytes={key_bytes}: {arity} columns of 4 or 8 bytes have {4 * arity} to "
            f"{8 * arity} bytes"
        )


def bounded(value: object, what: str, least: int, most: int) -> int:
    """Returns `value` as an int.  Raises InputError, with `what` in it, if it is no int or out of
    bounds."""
    number = whole_number(value)
    if number is None:
        raise InputError(f"{what} is {value!r}; a whole number is needed")
    if not least <= number <= most:
        raise InputError(f"{what}={value!r}: {least} to {most} are possible")
    return number
