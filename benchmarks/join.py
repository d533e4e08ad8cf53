"""Joins a second: by replay, by eager launches, by pyarrow on the CPU, by cuDF; and one large join.

A small join is limited by its chain of dependent kernels (a kernel with two or three dependent
reads takes the GPU some 2 µs), or by the CPU that launches them: once for a replay, once for each
kernel for eager launches.  A large join is limited by reads of random sectors: a left row reads a
slot of the hash table, the right key of that slot and the matching row number.  So the large join
is compared with a kernel that reads as many random sectors of arrays of the same sizes, without
dependent reads.

Three figures for each way of a small join:

  read                 each join's count is read before the next begins
  not read             joins are submitted one after the other; only the last is waited for
  not read, 8 joiners  the same by eight joiners in turn, each with its own stream: the chains of
                       eight joins overlap, and the limit is the CPU that submits them

Eager launches run the same kernels, one by one, by the library's fast launch, with configurations
and arguments made once for each key.  `times_eager` compares a replay with the fastest eager way,
of one joiner or eight, that reads counts or not like the replay.

Tables are random: equal numbers of rows on both sides, keys uniform over that many values, so that
a join gives about as many rows.  They are on the device beforehand (for pyarrow, in Arrow tables).
All ways take turns; the answers of each are compared with NumPy.

    python -m benchmarks.join [--out DIR] [--device cuda:0|host] [--quick]

The last line is one JSON object.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import ostinato as ost
from benchmarks import common
from ostinato.bench.floor import device_us
from ostinato.relational import Joiner, JoinIndex, KeyColumns, PendingJoin

TURNS = 5
SIZES = (1_000, 10_000, 100_000)
JOINS = {1_000: 2000, 10_000: 1000, 100_000: 500}
"""The number of joins in a turn, by the number of rows."""
MIXED_JOINS, MIXED_TABLES = 10_000, 64
LARGE = (10_000_000, 1_000_000)
SIDE_BY_SIDE = 8
"""The number of joiners that take turns."""

CUDA = r"""
// Each thread reads one random sector of each of three arrays.
extern "C" __global__ void gather(const uint4* slots, unsigned mask, const long long* keys,
                                  const unsigned* grouped, unsigned rows, unsigned n,
                                  unsigned* out) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned long long h = i * 0x9e3779b97f4a7c15ull;
    h = (h ^ h >> 33) * 0xff51afd7ed558ccdull;
    h ^= h >> 33;
    const uint4 slot = slots[static_cast<unsigned>(h) & mask];
    const long long key = keys[static_cast<unsigned>((h >> 32) * rows >> 32)];
    h *= 0xc4ceb9fe1a85ec53ull;
    const unsigned row = grouped[static_cast<unsigned>((h >> 32) * rows >> 32)];
    out[i] = slot.x ^ slot.z ^ static_cast<unsigned>(key) ^ row;
}
"""


@ost.host_kernel(
    "slots: *const u32, mask: u32, keys: *const i64, grouped: *const u32, rows: u32, n: u32, "
    "out: *out u32"
)
def gather(launch, slots, mask, keys, grouped, rows, n, out):
    h = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    at = (h >> np.uint64(40)).astype(np.int64)
    out[:n] = slots[4 * (at & mask)] ^ keys[at % rows].astype(np.uint32) ^ grouped[at % rows]


SOURCE = ost.Source(cuda=CUDA, host=[gather], name="gather.cu")


@dataclass(slots=True)
class Tables:
    """Two random tables of a size, and the number of rows of their join."""

    rows: int
    left: npt.NDArray[np.int64]
    right: npt.NDArray[np.int64]
    total: int = 0
    made: dict[object, Any] = field(default_factory=dict)
    """The tables in each contender's form, by contender."""

    @classmethod
    def random(cls, rows: int, rng: np.random.Generator) -> Tables:
        left, right = (rng.integers(0, rows, rows) for _ in range(2))
        counts = np.bincount(right, minlength=rows)
        return cls(rows, left, right, int(counts[left].sum()))

    def check(self, what: str, left: npt.ArrayLike, right: npt.ArrayLike) -> None:
        """Raises AssertionError unless these pairs of rows are the join."""
        a, b = np.asarray(left, np.int64), np.asarray(right, np.int64)
        pairs = np.unique(a * self.rows + b)
        if len(pairs) != len(a) or len(a) != self.total or (self.left[a] != self.right[b]).any():
            raise AssertionError(f"{what}: the join of {self.rows} rows is wrong")


@dataclass(slots=True)
class Contender:
    """One way to join.  `run` joins tables one after the other, and waits for the last join."""

    name: str
    prepare: Callable[[Tables], object]
    run: Callable[[Sequence[Tables]], object]
    check: Callable[[Tables], object]
    share: float = 1.0
    """The fraction of a turn's joins that this way does; less for slow ways."""
    seconds: list[float] = field(default_factory=list)
    """Seconds for each join, by turn."""


def ours(joiners: Sequence[Joiner], way: str, *, read: bool, indexed: bool) -> Contender:
    kind = "indexed" if indexed else "inner"
    name = f"{way}, {kind}, {'read' if read else 'not read'}"
    if len(joiners) > 1:
        name += f", {len(joiners)} joiners"

    def sides(tables: Tables, joiner: Joiner) -> tuple[KeyColumns, KeyColumns | JoinIndex]:
        made = tables.made.get((id(joiner), kind))
        if made is None:
            left, right = (joiner.columns({"k": v}, "k") for v in (tables.left, tables.right))
            made = left, joiner.build_index(right) if indexed else right
            tables.made[id(joiner), kind] = made
        found: tuple[KeyColumns, KeyColumns | JoinIndex] = made
        return found

    def prepare(tables: Tables) -> None:
        for joiner in joiners:
            sides(tables, joiner)

    def run(chosen: Sequence[Tables]) -> None:
        last: deque[PendingJoin] = deque(maxlen=len(joiners))
        for tables, joiner in zip(chosen, itertools.cycle(joiners), strict=False):
            left, right = tables.made[id(joiner), kind]
            pending = joiner.submit(left, right, capacity=2 * tables.rows)
            if read:
                pending.result()
            last.append(pending)
        for pending in last:
            pending.result()

    def check(tables: Tables) -> None:
        for joiner in joiners:
            result = joiner.join(*sides(tables, joiner), capacity=2 * tables.rows)
            tables.check(name, *result.to_numpy())

    return Contender(name, prepare, run, check)


def pyarrow() -> Contender:
    import pyarrow as pa

    def join(left: Any, right: Any) -> Any:
        return left.join(right, keys="k", join_type="inner")

    return library("pyarrow", pa.table, join, share=0.02)


def cudf() -> Contender:
    import cudf as frames

    def join(left: Any, right: Any) -> Any:
        return left.merge(right, on="k", how="inner")

    return library("cuDF", frames.DataFrame, join, share=0.1)


def library(
    name: str,
    table: Callable[[dict[str, npt.NDArray[Any]]], Any],
    join: Callable[[Any, Any], Any],
    *,
    share: float,
) -> Contender:
    """Makes the contender of a library: `table` makes a table from columns, and `join` joins two
    tables by the column "k"."""

    def prepare(tables: Tables) -> None:
        rows = np.arange(tables.rows, dtype=np.uint32)
        tables.made[name] = (
            table({"k": tables.left, "l": rows}),
            table({"k": tables.right, "r": rows}),
        )

    def check(tables: Tables) -> None:
        found = join(*tables.made[name])
        tables.check(name, found["l"].to_numpy(), found["r"].to_numpy())

    def run(chosen: Sequence[Tables]) -> None:
        for tables in chosen:
            len(join(*tables.made[name]))

    return Contender(f"{name}, read", prepare, run, check, share=share)


def contenders(
    replayed: Sequence[Joiner], eager: Sequence[Joiner], skipped: dict[str, str]
) -> list[Contender]:
    found = [
        ours(joiners[:count], way, read=read, indexed=indexed)
        for indexed in (False, True)
        for read, count in ((False, SIDE_BY_SIDE), (False, 1), (True, 1))
        for way, joiners in (("replay", replayed), ("eager", eager))
    ]
    for name, make in (("pyarrow", pyarrow), ("cuDF", cudf)):
        made = common.optional(skipped, name, make)
        if isinstance(made, Contender):
            found.append(made)
    return found


def measure(
    what: str,
    pool: Sequence[Tables],
    joins: int,
    found: Sequence[Contender],
    *,
    turns: int,
    rng: np.random.Generator,
) -> list[dict[str, object]]:
    """Measures all contenders over the same random sequence of tables.  Returns their rows."""
    for contender in found:
        contender.seconds.clear()
        for tables in pool:
            contender.prepare(tables)
            contender.check(tables)
    for _ in range(turns):
        chosen = [pool[i] for i in rng.integers(0, len(pool), joins)]
        for contender in found:
            part = chosen[: max(1, int(joins * contender.share))]
            start = time.perf_counter()
            contender.run(part)
            contender.seconds.append((time.perf_counter() - start) / len(part))
    rows: list[dict[str, object]] = []
    taken = {c.name: statistics.median(c.seconds) for c in found}
    for contender in found:
        name, middle = contender.name, taken[contender.name]
        like = name.replace("replay", "eager").partition(f", {SIDE_BY_SIDE} ")[0]
        beside = [us for other, us in taken.items() if other.startswith(like)]
        rows.append(
            {
                "rows": what,
                "joined by": contender.name,
                "joins_per_s": round(1 / middle),
                "us": round(1e6 * middle, 2),
                "worst_us": round(1e6 * max(contender.seconds), 2),
                "times_eager": round(min(beside) / middle, 2)
                if name.startswith("replay")
                else None,
            }
        )
    return rows


def submission(joiner: Joiner, tables: Tables, *, count: int) -> float:
    """Returns the median CPU time of `submit` in microseconds, with a wait after every eight."""
    left, right = tables.made[id(joiner), "inner"]
    times: list[int] = []
    for i in range(count):
        start = time.perf_counter_ns()
        pending = joiner.submit(left, right, capacity=2 * tables.rows)
        times.append(time.perf_counter_ns() - start)
        if i % 8 == 7:
            pending.result()
    joiner.stream.synchronize()
    return statistics.median(times) / 1e3


def large(
    joiner: Joiner, sizes: tuple[int, int], turns: int, rng: np.random.Generator
) -> list[dict[str, object]]:
    """Measures one large join, with and without an index, and a kernel that gathers as many
    sectors."""
    device, stream = joiner.device, joiner.stream
    rows, keys = sizes
    right = rng.permutation(keys)
    left = rng.integers(0, keys, rows)
    one, other = (joiner.columns({"k": values}, "k") for values in (left, right))
    index = joiner.build_index(other)
    kernel = device.modules.get_or_compile(SOURCE, "gather")
    out = device.empty(2 * rows, np.uint32)
    # A left row reads a slot, a key and a row number.  A right row claims a slot, counts in it,
    # writes the slot's start, reads it and writes its number.
    sectors = {"indexed": 3 * rows, "inner": 3 * rows + 5 * keys}

    def gathered(count: int) -> None:
        grid = -(-count // 256)
        slots = index.table.view(dtype=np.uint32)
        arguments = (slots, other.slots - 1, other.buffers[0], index.grouped, keys, count, out)
        ost.launch(stream, kernel, ost.LaunchConfig(grid, 256), *arguments)

    found = []
    for kind, side in (("indexed", index), ("inner", other)):
        result = joiner.join(one, side, capacity=rows)
        a, b = result.to_numpy()
        if len(a) != rows or (left[a] != right[b]).any() or len(np.unique(a)) != rows:
            raise AssertionError(f"the large join ({kind}) is wrong")
        del result
        floor, ms = (
            device_us(device, stream, work, turns) / 1e3
            for work in (
                lambda kind=kind: gathered(sectors[kind] // 3),
                lambda side=side: joiner.submit(one, side, capacity=rows),
            )
        )
        found.append(
            {
                "rows": f"{rows:,} x {keys:,}",
                "joined by": f"replay, {kind}",
                "us": round(1e3 * ms, 1),
                "gather_us": round(1e3 * floor, 1),
                "times_gather": round(ms / floor, 2),
                "million_rows_per_s": round(rows / ms / 1e3),
                "table_bytes": index.table.nbytes,
            }
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = common.options(__doc__).parse_args(argv)
    quick = options.quick
    turns = 1 if quick else TURNS
    skipped: dict[str, str] = {}
    rng = np.random.default_rng(7)
    with ost.open_device(options.device) as device, ExitStack() as stack:
        joiners, eager = (
            [stack.enter_context(Joiner(device, graphs=graphs)) for _ in range(SIDE_BY_SIDE)]
            for graphs in (True, False)
        )
        replayed = joiners[0]
        found = contenders(joiners, eager, skipped)
        rows: list[dict[str, object]] = []
        for size in SIZES[:1] if quick else SIZES:
            pool = [Tables.random(size, rng) for _ in range(4)]
            joins = 16 if quick else JOINS[size]
            rows += measure(f"{size:,}", pool, joins, found, turns=turns, rng=rng)
            if size == SIZES[0]:
                submit_us = submission(replayed, pool[0], count=16 if quick else 2000)
        most, tables = (4_000, 4) if quick else (100_000, MIXED_TABLES)
        sizes = np.exp(rng.uniform(np.log(1_000), np.log(most), tables))
        pool = [Tables.random(int(n), rng) for n in sizes]
        before = replayed.statistics()
        joins = 16 if quick else MIXED_JOINS
        rows += measure(f"1,000 to {most:,}", pool, joins, found, turns=1, rng=rng)
        after = replayed.statistics()
        columns = ["rows", "joined by", "joins_per_s", "us", "worst_us", "times_eager"]
        print(common.table(f"Small joins, {device.properties.name}", rows, columns))
        big = large(replayed, (20_000, 2_000) if quick else LARGE, turns, rng)
        columns = ["rows", "joined by", "us", "gather_us", "times_gather", "million_rows_per_s"]
        print(common.table(f"A large join, {device.properties.name}", big, columns))
        by = {(r["rows"], r["joined by"]): r["times_eager"] for r in rows}
        summary = {
            "replay over eager, 1,000 rows": {
                name.removeprefix("replay, "): times
                for (size, name), times in by.items()
                if size == "1,000" and str(name).startswith("replay")
            },
            "large join over gather": {r["joined by"]: r["times_gather"] for r in big},
            "submit_us": round(submit_us, 2),
            "mixed sizes": {
                "joins": after.joins - before.joins,
                "captures": after.cache.captures - before.cache.captures,
                "kernels compiled": after.kernels_compiled - before.kernels_compiled,
                "retries": after.retries - before.retries,
            },
        }
        print(summary)
        common.emit(
            "join",
            device,
            options.out,
            ceiling={
                "what": "the large join: a kernel that reads as many random sectors of arrays of "
                "the same sizes, microseconds",
                "us": {r["joined by"]: r["gather_us"] for r in big},
            },
            settings={"turns": turns, "quick": quick, "mixed joins": joins},
            rows=[*rows, *big],
            skipped=skipped,
            summary=summary,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
