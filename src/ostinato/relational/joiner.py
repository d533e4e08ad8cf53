"""`Joiner`: joins on one stream, each a replay of its key's graph.

What a join under way depends on:

    host                         ring of pinned memory            device, in stream order
    pack the block ────────────▶ entry (turn % depth) ──────────▶ begin: block, state = turn + 1
    launch the key's graph ─────────────────────────────────────▶ insert … materialize
    PendingJoin.result() ◀────── DONE (turn % depth) ◀─────────── the last block of the last kernel

No call but the launch reaches the driver.  An entry is used again only once its join is done.
`begin` takes an entry only if it is of the next turn; so a graph that somebody else launches does
nothing.  If a launch fails or is interrupted, nobody knows what the device did: the joiner is
*uncertain* until it has waited for the stream and set the device's state and table again.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np

from ostinato import (
    Buffer,
    Device,
    GraphCache,
    GraphExec,
    Stream,
    capture,
    fill,
    launch,
    open_device,
)
from ostinato.cache import CacheStatistics
from ostinato.driver.closeable import Closeable
from ostinato.driver.forking import new_lock
from ostinato.errors import ClosedError, GraphError, InputError
from ostinato.relational.block import (
    DONE,
    MAX_BYTES,
    RING_DEPTH,
    RING_PITCH,
    SLOT,
    pack,
)
from ostinato.relational.chain import KERNELS, chain_of, source
from ostinato.relational.columns import KeyColumns, On, Table, check_same_types, names_of
from ostinato.relational.keys import LARGEST, IndexKey, JoinKey, JoinKind, whole_number
from ostinato.relational.workspace import Lease, OutputPool, Workspace
from ostinato.settings import graphs_enabled

__all__ = [
    "JoinIndex",
    "JoinResult",
    "JoinStatistics",
    "Joiner",
    "PendingJoin",
    "build_index",
    "hash_join",
]

_SPINS = 100
"""Looks at the ring before the stream is asked."""


class _Turn:
    """One launch of a chain.  `keep` lives until it is done."""

    __slots__ = ("done", "keep", "lost", "number", "overflow", "total")

    def __init__(self, number: int, keep: tuple[object, ...]) -> None:
        self.number = number
        self.keep = keep
        self.done = self.lost = False
        self.total = self.overflow = 0


class JoinIndex(Closeable):
    """A hash index of one table's key columns on the device, made by `build_index`.

    It refers to the columns, which must not change as long as it is used.  `close()` or dropping it
    gives its memory back once joins under way are done.
    """

    def __init__(self, joiner: Joiner, columns: KeyColumns, table: Buffer, grouped: Buffer) -> None:
        self.joiner = joiner
        self.columns = columns
        self.table = table
        """All slots of the table (`block.SLOT`), as bytes."""
        self.grouped = grouped
        """Row numbers, those with equal keys beside each other; uint32."""

    def __repr__(self) -> str:
        return f"<JoinIndex of {self.columns!r}>"

    def __len__(self) -> int:
        return self.columns.rows

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.grouped.nbytes

    def close(self) -> None:
        """Gives its memory back once joins under way are done.  Idempotent."""
        self.table.close()
        self.grouped.close()


class JoinResult:
    """The result of a join: pairs of row numbers, in no particular order.

    `left_rows` and `right_rows` are device buffers, uint32, of `len(result)` elements; they may be
    kept after the result.  Their memory is used for later joins once nothing refers to it: work on
    other streams that reads them must be done by then, or the joiner's stream must wait for it.
    """

    def __init__(
        self, joiner: Joiner, key: JoinKey, lease: Lease, total: int, retries: int
    ) -> None:
        self._joiner = joiner
        self.key = key
        """The key of the graph that wrote it."""
        self.retries = retries
        """How often the join was repeated because its result did not fit."""
        self._lease, self._total = lease, total

    @functools.cached_property
    def left_rows(self) -> Buffer:
        """Row numbers of the left side; uint32, on the device."""
        return self._lease.rows(0, self._total)

    @functools.cached_property
    def right_rows(self) -> Buffer:
        """Row numbers of the right side, in the same order."""
        return self._lease.rows(1, self._total)

    def __len__(self) -> int:
        return self._total

    def __repr__(self) -> str:
        return f"<JoinResult {len(self)} rows on {self._joiner.device.name}>"

    def to_numpy(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the left and the right row numbers.  Waits for the joiner's stream."""
        stream = self._joiner.stream
        return self.left_rows.to_numpy(stream), self.right_rows.to_numpy(stream)


class PendingJoin:
    """A join that was submitted; nobody has to ask for its result."""

    def __init__(
        self, joiner: Joiner, left: KeyColumns, right: KeyColumns | JoinIndex, capacity: int
    ) -> None:
        self._joiner = joiner
        self._sides: tuple[KeyColumns, KeyColumns | JoinIndex] | None = (left, right)
        self._retries = 0
        self._key, self._lease, self._turn = joiner._start(left, right, capacity)
        self._result: JoinResult | None = None

    def __repr__(self) -> str:
        return f"<PendingJoin {self._key}>"

    @property
    def done(self) -> bool:
        """Whether the device is done with it; does not wait."""
        return self._joiner._looked(self._turn)

    def result(self) -> JoinResult:
        """The result.  Waits for the join, and repeats it with more room if it did not fit.

        The columns must be as they were when the join was submitted.  Raises InputError if the
        result has 2**32 rows or more, OutOfMemoryError, DriverError, ClosedError.
        """
        while self._result is None:
            turn = self._turn
            self._joiner._wait(turn)
            with self._joiner._lock:
                if self._result is None and self._turn is turn:  # and no other thread came first
                    self._settle(turn)
        return self._result

    def _settle(self, turn: _Turn) -> None:
        joiner, sides = self._joiner, self._sides
        assert sides is not None
        if not turn.overflow:
            self._result = JoinResult(joiner, self._key, self._lease, turn.total, self._retries)
            self._sides = None
            return
        if turn.total > LARGEST:
            raise InputError(
                f"the result of this join has {turn.total} rows, and row numbers of 32 bits count "
                f"to {LARGEST}; nothing was written. Join parts of the left side"
            )
        self._key, self._lease, self._turn = joiner._start(*sides, turn.total)
        self._retries += 1
        joiner._count("retries")


@dataclass(frozen=True, slots=True)
class JoinStatistics:
    """What a joiner did since it was made."""

    joins: int
    """Joins submitted, repetitions not counted."""
    indexes: int
    """Indexes built."""
    retries: int
    """Joins repeated because their result did not fit."""
    replays: int
    """Launches of a graph."""
    eager: int
    """Chains launched kernel by kernel instead."""
    waits: int
    """How often a join had to wait because all entries of the ring were in use."""
    recoveries: int
    """How often the device's state was set again after a failed launch."""
    growths: int
    """How often the workspace took memory."""
    workspace_bytes: int
    output_bytes: int
    """Result buffers that wait for later joins."""
    kernels_compiled: int
    """By the device's module cache, for whoever asked."""
    cache: CacheStatistics
    """Of the graphs: `captures`, `hits`, and a line for each key."""


class Joiner(Closeable):
    """Joins tables on one device, in the order of one stream.

    `stream`: the joiner's own if None.  `graphs`: False launches kernel by kernel, None asks
    OSTINATO_NO_GRAPHS.  `budget` and `max_graphs` limit the graphs as in `GraphCache`.  Every call
    may come from any thread.  Work of other streams that fills a Buffer given as a column must be
    done, or the joiner's stream must wait for it.
    """

    def __init__(
        self,
        device: Device,
        *,
        stream: Stream | None = None,
        graphs: bool | None = None,
        budget: int | str | None = None,
        max_graphs: int | None = None,
    ) -> None:
        self.device = device
        self.stream = device.create_stream() if stream is None else stream
        self._own_stream = stream is None
        self.cache = GraphCache(device, budget=budget, max_graphs=max_graphs)
        """The graphs, by JoinKey and IndexKey."""
        self._use_graphs = graphs_enabled(graphs)
        self._kernels = dict(
            zip(KERNELS, device.modules.preload([(source(), KERNELS)]), strict=True)
        )
        self._workspace = Workspace(device, self.stream)
        self._outputs = OutputPool(device)
        self._block = device.zeros(MAX_BYTES)
        self._state = device.zeros(1, np.uint64)
        ring = RING_DEPTH * RING_PITCH
        self._pinned = device.pinned(ring + RING_DEPTH * DONE.itemsize)
        self._pinned.array[:] = 0
        self._entries = self._pinned.array.data[:ring]
        self._said = self._pinned.array.data[ring:].cast("Q")
        self._done_address = self._pinned.address + ring
        self._turns = 0
        """Launches so far, as the device must have counted them."""
        self._under_way: deque[_Turn] = deque()
        self._uncertain = False
        self._closed = False
        self._lock = new_lock()
        self._keys: dict[tuple[object, ...], JoinKey] = {}
        self._counts = dict.fromkeys(_COUNTED, 0)

    def __repr__(self) -> str:
        return f"<Joiner on {self.device.name}, {len(self.cache)} graphs>"

    # --- what users call
    def columns(self, table: Table, on: On) -> KeyColumns:
        """The named columns of a table as key columns for several joins, on the device.

        Arrays of the process are copied; arrays on the device are referred to.  Raises InputError
        that names the column.
        """
        self._require_open()
        return KeyColumns.of(self.device, self.stream, table, names_of(on)[0])

    def build_index(self, right: Table, on: On | None = None) -> JoinIndex:
        """A hash index of a table's key columns, for many joins; does not wait.

        Raises InputError that names the column, OutOfMemoryError, DriverError, ClosedError.
        """
        columns = self._side(right, None if on is None else names_of(on)[1])
        rows = columns.rows
        with self._lock:
            self._ready()
            columns.require_open()
            table = self.device.empty(columns.slots * SLOT.itemsize)
            grouped = self.device.empty(rows, np.uint32)
            fill(self.stream, table, 0)
            self._workspace.reserve_build(rows)
            index = JoinIndex(self, columns, table, grouped)
            head = self._head(columns, (table.address, grouped.address))
            key = IndexKey(len(columns.names), columns.key_bytes)
            self._launch(key, head, _columns(None, columns), (index.columns, table, grouped))
            self._count("indexes")
            return index

    def submit(
        self,
        left: Table,
        right: Table | JoinIndex,
        on: On | None = None,
        *,
        how: str = "inner",
        capacity: SupportsIndex | None = None,
    ) -> PendingJoin:
        """Begins a join and does not wait: `result()` does.

        `on` names the key columns; it may be left out where both sides are key columns or an index.
        `capacity`: room for so many rows of the result; None for as many as the left side has.  If
        it is too small the join is repeated.  Raises InputError that names the column,
        OutOfMemoryError, DriverError, ClosedError; nothing was submitted then.
        """
        if how != "inner":
            raise InputError(f'how={how!r}: "inner" is possible')
        lefts = rights = None
        if on is not None:
            lefts, rights = names_of(on)
        if isinstance(right, JoinIndex):
            if right.joiner is not self:
                raise InputError("the index was built by another joiner, and is of use to it alone")
            own = right.columns
            if rights is not None and rights != lefts:  # else `on` names the left columns alone
                own.require_names(rights)
        else:
            own = right = self._side(right, rights)
        side = self._side(left, lefts)
        check_same_types(side, own)
        room = side.rows if capacity is None else whole_number(capacity, "capacity", 0, LARGEST)
        pending = PendingJoin(self, side, right, room)
        self._count("joins")
        return pending

    def join(
        self,
        left: Table,
        right: Table | JoinIndex,
        on: On | None = None,
        *,
        how: str = "inner",
        capacity: SupportsIndex | None = None,
    ) -> JoinResult:
        """`submit` and `result` in one."""
        return self.submit(left, right, on, how=how, capacity=capacity).result()

    def statistics(self) -> JoinStatistics:
        """Counts and bytes, taken at one moment."""
        with self._lock:
            return JoinStatistics(
                **self._counts,
                growths=self._workspace.growths,
                workspace_bytes=self._workspace.nbytes,
                output_bytes=self._outputs.nbytes,
                kernels_compiled=self.device.modules.statistics().compiles,
                cache=self.cache.statistics(),
            )

    # --- a join
    def _side(self, table: Table, names: tuple[str, ...] | None) -> KeyColumns:
        if names is None:
            if not isinstance(table, KeyColumns):
                raise InputError("on=… is needed: the names of the key columns")
            names = table.names
        self._require_open()
        return KeyColumns.of(self.device, self.stream, table, names)

    def _start(
        self, left: KeyColumns, right: KeyColumns | JoinIndex, capacity: int
    ) -> tuple[JoinKey, Lease, _Turn]:
        """Launches a join with room for `capacity` rows."""
        with self._lock:
            self._ready()
            workspace = self._workspace
            if isinstance(right, JoinIndex):
                kind, columns = JoinKind.INDEXED_INNER, right.columns
                tables = right.table.address, right.grouped.address  # ClosedError if it is closed
            else:
                kind, columns = JoinKind.INNER, right
                workspace.reserve_table(right.slots)
                workspace.reserve_build(right.rows)
                tables = workspace.slots, workspace.grouped
            left.require_open()
            columns.require_open()
            key = self._key(kind, left, capacity)
            workspace.reserve_probe(key.probe, key.scan)
            lease = self._outputs.take(key.output)
            head = self._head(columns, tables, left, key, lease)
            turn = self._launch(key, head, _columns(left, columns), (left, right))
            return key, lease, turn

    def _key(self, kind: JoinKind, left: KeyColumns, capacity: int) -> JoinKey:
        # Capacities of one class share their bit length: cheaper to work out than the class.
        known = (kind, left.sizes, left.probe, (max(capacity, 1) - 1).bit_length())
        key = self._keys.get(known)
        if key is None:
            key = JoinKey.of(kind, len(left.sizes), left.key_bytes, left.rows, capacity)
            self._keys[known] = key
        return key

    def _head(
        self,
        right: KeyColumns,
        tables: tuple[int, int],
        left: KeyColumns | None = None,
        key: JoinKey | None = None,
        lease: Lease | None = None,
    ) -> tuple[int, ...]:
        """The fields of `block.BLOCK` that the host writes."""
        work, number = self._workspace, self._turns + 1
        out = 0 if lease is None else lease.buffer.address
        capacity = 0 if key is None else key.output
        return (
            number,
            *tables,
            work.slot_of,
            work.rank,
            work.found,
            work.offsets,
            work.sums,
            out,
            out + 4 * capacity,
            self._done_address + (number - 1) % RING_DEPTH * DONE.itemsize,
            0 if left is None else left.rows,
            right.rows,
            right.slots - 1,
            capacity,
            len(right.sizes),
            key is not None and key.kind is JoinKind.INNER,
        )

    def _launch(
        self,
        key: JoinKey | IndexKey,
        head: tuple[int, ...],
        columns: tuple[tuple[int, int, int], ...],
        keep: tuple[object, ...],
    ) -> _Turn:
        """Puts a block into the ring and launches the key's chain."""
        turn = _Turn(self._turns + 1, keep)
        under_way = self._under_way
        while under_way and self._look(under_way[0]):
            under_way.popleft()
        if len(under_way) == RING_DEPTH:
            self._count("waits")
            self._wait(under_way[0])
            under_way.popleft()
        pack(self._entries, (turn.number - 1) % RING_DEPTH * RING_PITCH, head, columns)
        self._uncertain = True
        if self._use_graphs:
            while not self.cache.replay(key, self.stream):
                self.cache.get_or_capture(key, lambda: self._captured(key))
            self._count("replays")
        else:
            self._submit(key, programmatic=False)
            self._count("eager")
        self._turns = turn.number
        under_way.append(turn)
        self._uncertain = False
        return turn

    def _captured(self, key: JoinKey | IndexKey) -> GraphExec:
        with capture(self.stream) as under_way:
            self._submit(key, programmatic=self.device.capabilities.programmatic_launch)
        return under_way.graph.instantiate(upload=self.stream)

    def _submit(self, key: JoinKey | IndexKey, *, programmatic: bool) -> None:
        for one in chain_of(key, self.device.properties.multiprocessors):
            first = (self._pinned, self._state) if one.kernel == "begin" else ()
            config = one.config(programmatic=programmatic)
            kernel = self._kernels[one.kernel]
            launch(self.stream, kernel, config, *first, self._block, *one.numbers)

    # --- what the device says
    def _look(self, turn: _Turn) -> bool:
        """Whether a turn is done.  Call under the lock."""
        if not turn.done:
            at = (turn.number - 1) % RING_DEPTH * (DONE.itemsize // 8)
            if self._closed or self._said[at] != turn.number:
                return False
            turn.total, turn.overflow = self._said[at + 1], self._said[at + 2]
            turn.done, turn.keep = True, ()
        return True

    def _looked(self, turn: _Turn) -> bool:
        with self._lock:
            return self._look(turn)

    def _wait(self, turn: _Turn) -> None:
        """Waits until a turn is done.  Raises what the device failed with."""
        looks = 0
        while not self._looked(turn):
            self._require_open()
            looks += 1
            if looks < _SPINS:
                continue
            idle = turn.lost or self.stream.done
            if idle and not self._looked(turn):
                with self._lock:
                    self._uncertain = True
                raise GraphError(
                    "the join was launched and did not come to its end: a launch before it failed, "
                    "or was interrupted; submit it again"
                )
            time.sleep(0 if looks < 10 * _SPINS else 50e-6)

    def _ready(self) -> None:
        """Raises ClosedError, or makes the device's state certain."""
        self._require_open()
        if self._uncertain:
            self._recover()

    def _recover(self) -> None:
        """Waits for the stream, and makes the device's state what this joiner thinks it is."""
        self.stream.synchronize()
        for turn in self._under_way:
            turn.lost = not self._look(turn)
            turn.keep = ()
        self._under_way.clear()
        self._state.copy_from(np.array([self._turns], np.uint64), self.stream)
        self._workspace.clean()
        self.stream.synchronize()
        self._count("recoveries")
        self._uncertain = False

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    # --- lifetime
    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the joiner is closed; make another")
        self.device.context.require_open()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Waits for the joins under way and gives all memory back but that of results.  Idempotent.

        Joins whose result was not asked for by then have none.
        """
        with self._lock:
            if self._closed:
                return
            try:
                if not self.stream.closed and not self.device.context.closed:
                    self.stream.synchronize()
            finally:
                for turn in self._under_way:
                    self._look(turn)
                    turn.keep = ()
                self._closed = True
                self._under_way.clear()
                self.cache.close()
                self._outputs.clear()
                self._workspace.close()
                self._entries.release()
                self._said.release()
                for buffer in (self._block, self._state, self._pinned):
                    buffer.close()
                if self._own_stream:
                    self.stream.close()


_COUNTED = ("joins", "indexes", "retries", "replays", "eager", "waits", "recoveries")


def _columns(left: KeyColumns | None, right: KeyColumns) -> tuple[tuple[int, int, int], ...]:
    """The records of `block.COLUMN`."""
    lefts = (0,) * len(right.sizes) if left is None else left.addresses
    return tuple(zip(lefts, right.addresses, right.sizes, strict=True))


# ------------------------------------------------------------------------------ without a joiner

_default: list[Joiner] = []
_default_lock = new_lock()


def _default_joiner() -> Joiner:
    """One for the process, on the device that `open_device()` gives."""
    with _default_lock:
        if not _default or _default[0].closed or _default[0].device.context.closed:
            _default[:] = [Joiner(open_device())]
        return _default[0]


def hash_join(
    left: Table,
    right: Table | JoinIndex,
    on: On | None = None,
    *,
    how: str = "inner",
    joiner: Joiner | None = None,
    capacity: SupportsIndex | None = None,
) -> JoinResult:
    """Joins two tables on equal keys: all pairs of row numbers whose key columns are equal.

    `left` and `right`: a mapping of names to arrays, an Arrow table, or `KeyColumns`; `right` also
    a `JoinIndex`.  Key columns are one-dimensional, of 32- or 64-bit integers, without nulls, and
    of the same type on both sides.  `on`: their names.  `joiner`: one of the process, on the device
    that `open_device()` gives, if None.  See `Joiner.submit` for the rest and the errors.
    """
    chosen = right.joiner if isinstance(right, JoinIndex) and joiner is None else joiner
    return (chosen or _default_joiner()).join(left, right, on, how=how, capacity=capacity)


def build_index(right: Table, on: On | None = None, *, joiner: Joiner | None = None) -> JoinIndex:
    """A hash index of a table's key columns, for many joins.  See `Joiner.build_index`."""
    return (joiner or _default_joiner()).build_index(right, on)
