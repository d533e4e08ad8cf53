"""Which joins share a graph: join keys and scan topologies.  Pure; no driver, no I/O.

A join's kernels read row counts and addresses from memory, so its graph depends on little: which
kernels there are, and their grids.  `JoinKey` is just that.  Two joins share a graph exactly if
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
"""The most right rows of each class of the build side.  The more rows, the more blocks build: of a
small side, each block that waits for rows that are not there keeps a chain of another join away; of
a large side, the more blocks, the more of its random reads are under way."""


@dataclass(frozen=True, slots=True)
class ScanTopology:
    """The kernels of a multi-block exclusive scan with blocks of 256.

    `scratch`: elements of each level of block sums, from the lowest; empty if one block does it.
    """

    kernels: int
    scratch: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kernels}{[*self.scratch]}"


def scan_topology(rows: SupportsIndex) -> ScanTopology:
    """The topology of a scan over `rows` elements.

    0 rows need no kernels; up to 256 one; more need a level of block sums for each factor of 256,
    and each level two kernels: one that scans it and one that adds it to the level below.
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
    """The class of a right side of so many rows."""
    return next(most for most in BUILD_CLASSES if rows <= most)


def table_slots(rows: int) -> int:
    """Slots of the hash table of so many rows: a power of two, at least twice as many."""
    return 1 << max(1, (2 * rows - 1).bit_length())


@dataclass(frozen=True, slots=True)
class JoinKey:
    """What the graph of a join depends on.

    `kind`: "inner" builds a hash index of the right side, uses it once and clears it; "indexed
    inner" uses an index that `build_index` made.  `arity`: key columns, 1 to 255.  `key_bytes`:
    bytes of one row's key, 4 or 8 a column.  `probe` and `output`: capacity classes of the probe
    side's rows and of the result.  `build`: the right side's class, one of BUILD_CLASSES, or 0 with
    an index.  `scan`: the topology of the scan over the probe class.

    Raises InputError for values outside these bounds, for classes that are none, and for a topology
    of another class.
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
        """The hash of some fields only: each join looks its graph up."""
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
        """The key of a join of `rows` probe rows with room for `capacity` output rows."""
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
    """What the graph depends on that builds an index.  Raises InputError like `JoinKey`."""

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
    """`value` as an int.  Raises InputError, with `what` in it, if it is none or out of bounds."""
    number = whole_number(value)
    if number is None:
        raise InputError(f"{what} is {value!r}; a whole number is needed")
    if not least <= number <= most:
        raise InputError(f"{what}={value!r}: {least} to {most} are possible")
    return number
