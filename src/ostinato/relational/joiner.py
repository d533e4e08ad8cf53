"""`Joiner`: joins on one stream, each a replay of its key's graph.

It is the engine's door with bound slots: the graph of a key is the same for all its joins, and the
parameters of a join go through a ring of pinned memory (`ring`), so only the launch calls the
driver.  After a launch that fails or is interrupted, the device's state is unknown: the ring is
*uncertain* until the joiner has waited for the stream and restored the table and the device's count
of turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import Literal, SupportsIndex

import numpy as np

from ostinato import (
    Buffer,
    Device,
    GraphCache,
    GraphExec,
    Kernel,
    LaunchConfig,
    Stream,
    capture,
    fill,
    launch,
    open_device,
)
from ostinato.errors import (
    ClosedError,
    ContextPoisonedError,
    DriverError,
    InputError,
    OstinatoError,
    OutOfMemoryError,
)
from ostinato.lowlevel import Call, Closeable, Engine, Work, new_lock
from ostinato.relational.block import SLOT, Pattern
from ostinato.relational.chain import KERNELS, chain_of, source
from ostinato.relational.columns import (
    KeyColumns,
    On,
    TableLike,
    check_same_types,
    names_of,
    serials,
)
from ostinato.relational.keys import LARGEST, IndexKey, JoinKey, bounded
from ostinato.relational.results import JoinResult, JoinStatistics
from ostinato.relational.ring import Ring, RingTurn
from ostinato.relational.workspace import Lease, OutputPool, Workspace, require_no_capture
from ostinato.settings import graphs_enabled


class JoinIndex(Closeable):
    """A hash index of one table's key columns on the device, made by `build_index`.

    It refers to the columns, which must not change while it is used.  `close()` or dropping it
    frees its memory once joins under way are done.
    """

    def __init__(self, joiner: Joiner, columns: KeyColumns, table: Buffer, grouped: Buffer) -> None:
        self.joiner = joiner
        self.columns = columns
        self.table = table
        """All slots of the table (`block.SLOT`), as bytes."""
        self.grouped = grouped
        """Row numbers, grouped by equal keys; uint32."""
        self.serial = next(serials)

    def __repr__(self) -> str:
        return f"<JoinIndex of {self.columns!r}{', closed' * self.table.closed}>"

    def __len__(self) -> int:
        return self.columns.rows

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.grouped.nbytes

    def require_open(self) -> None:
        """Raises ClosedError if its memory, or that of its columns, was freed."""
        self.columns.require_open()
        _ = self.table.address, self.grouped.address

    def close(self) -> None:
        """Frees its memory once joins under way are done.  Idempotent."""
        self.table.close()
        self.grouped.close()


class PendingJoin:
    """A join that was submitted.  It may be dropped without calling `result`."""

    __slots__ = ("_joiner", "_key", "_lease", "_result", "_retries", "_ring_turn", "_sides")

    def __init__(
        self, joiner: Joiner, left: KeyColumns, right: KeyColumns | JoinIndex, capacity: int
    ) -> None:
        self._joiner = joiner
        self._sides: tuple[KeyColumns, KeyColumns | JoinIndex] | None = (left, right)
        self._retries = 0
        self._result: JoinResult | None = None
        self._key, self._lease, self._ring_turn = joiner._start(left, right, capacity, "joins")

    def __repr__(self) -> str:
        return f"<PendingJoin {self._key}, {'done' if self.done() else 'under way'}>"

    def done(self) -> bool:
        """True if the device is done with the join; does not wait."""
        return self._joiner._ring.look(self._ring_turn)

    def result(self) -> JoinResult:
        """Returns the result.  Waits for the join, and repeats it with more room if it did not fit.

        The columns must be as they were when the join was submitted.  Raises InputError if the
        result has 2**32 rows or more, OutOfMemoryError, DriverError, ClosedError.
        """
        while self._result is None:
            turn = self._ring_turn
            self._joiner._ring.wait(turn)
            with self._joiner._turn, self._joiner._lock:
                if self._result is None and self._ring_turn is turn:  # no other thread has done it
                    self._settle(turn)
        return self._result

    def _settle(self, turn: RingTurn) -> None:
        joiner, sides = self._joiner, self._sides
        assert sides is not None
        if not turn.overflow:
            made = self._key, self._lease, turn.total, self._retries
            self._result = JoinResult(joiner.device, joiner.stream, *made)
            self._sides = None
            return
        if turn.total > LARGEST:
            raise InputError(
                f"the result of this join has {turn.total} rows, and row numbers of 32 bits count "
                f"to {LARGEST}; nothing was written. Join parts of the left side"
            )
        self._key, self._lease, self._ring_turn = joiner._start(*sides, turn.total, "retries")
        self._retries += 1


class Joiner(Closeable):
    """A joiner of tables on one device, in the order of one stream.

    `stream`: None for a stream of its own.  `graphs`: False launches kernel by kernel, None reads
    OSTINATO_NO_GRAPHS.  `budget` and `max_graphs` limit the graphs as in `GraphCache`.
    Thread-safe.  Work of other streams that fills a Buffer given as a column must be done, or the
    joiner's stream must wait for it.
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
        self._options = _JoinOptions(graphs_enabled(graphs))
        self._turn = self.stream.turn.lock
        self._engine = Engine(self.cache, self._turn)
        self._lock = self._engine.lock
        """Taken after the turn."""
        self._kernels = dict(
            zip(KERNELS, device.modules.preload([(source(), KERNELS)]), strict=True)
        )
        self._workspace = Workspace(device, self.stream)
        self._outputs = OutputPool(device, self.stream)
        self._ring = Ring(device, self.stream)
        # Captures have a stream of their own, so that other threads can use `stream` meanwhile.
        self._captures = device.create_stream()
        self._closed = False
        self._plans: dict[tuple[int, int, int], _Plan] = {}
        """Plans by the serial numbers of the sides and the bits of the capacity."""
        self._calls: dict[JoinKey | IndexKey, _ChainCall] = {}
        self._counts = dict.fromkeys(_COUNTED, 0)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Joiner on {self.device.name}, {len(self.cache)} graphs{state}>"

    # --- public calls
    def columns(self, table: TableLike, on: On) -> KeyColumns:
        """Returns the named columns of a table as key columns for several joins, on the device.

        Host arrays are copied; device arrays are referred to.  Raises InputError that names the
        column.
        """
        self._require_open()
        names, others = names_of(on)
        for name, other in zip(names, others, strict=True):
            if name != other:
                raise InputError(
                    f"on: {name!r} and {other!r} are two names, and the columns are of one table; "
                    "name each of its columns once"
                )
        return KeyColumns.of(self.device, self.stream, table, names)

    def build_index(self, right: TableLike, on: On | None = None) -> JoinIndex:
        """Returns a hash index of a table's key columns, for many joins; does not wait.

        Raises InputError that names the column, OutOfMemoryError, DriverError, ClosedError.
        """
        columns = self._side(right, None if on is None else names_of(on)[1])
        rows = columns.rows
        with self._turn, self._lock:
            self._ready()
            columns.require_open()
            require_no_capture(self.stream)
            table = self.device.empty(columns.slots * SLOT.itemsize, "bytes")
            grouped = self.device.empty(rows, np.uint32)
            fill(self.stream, table, 0)
            work = self._workspace
            work.reserve(0, rows, 0, None)
            index = JoinIndex(self, columns, table, grouped)
            arity = len(columns.sizes)
            pattern = Pattern(
                (table.address, grouped.address, work.slot_of, work.rank, 0, 0, 0),
                (0, rows, columns.slots - 1, 0, arity, 0),
                _columns((0,) * arity, columns),
            )
            enter = partial(self._ring.enter, pattern, 0, 0, (columns, table, grouped))
            self._launch(self._call(IndexKey(arity, columns.key_bytes)), enter)
            self._counts["indexes"] += 1
            return index

    def submit(
        self,
        left: TableLike,
        right: TableLike | JoinIndex,
        on: On | None = None,
        *,
        capacity: SupportsIndex | None = None,
    ) -> PendingJoin:
        """Begins a join without waiting; `result()` waits.

        `on`: names of the key columns; may be omitted if both sides are key columns or an index.
        An index compares columns in its own order: `on` has the left names in that order, or pairs.
        `capacity`: room for the result, in rows; None for as many as the left side has.  If the
        result does not fit, the join is repeated.  Raises InputError that names the column,
        OutOfMemoryError, DriverError, ClosedError; nothing was submitted then.
        """
        one, other = self._sides(left, right, on)
        if capacity is None:
            room = one.rows
        elif type(capacity) is int and 0 <= capacity <= LARGEST:  # the common case, faster
            room = capacity
        else:
            room = bounded(capacity, "capacity", 0, LARGEST)
        return PendingJoin(self, one, other, room)

    def join(
        self,
        left: TableLike,
        right: TableLike | JoinIndex,
        on: On | None = None,
        *,
        capacity: SupportsIndex | None = None,
    ) -> JoinResult:
        """Does `submit` and `result` in one call."""
        return self.submit(left, right, on, capacity=capacity).result()

    def forget(self) -> None:
        """Drops the reasons why joins run kernel by kernel: their graphs are tried again."""
        with self._lock:
            for call in self._calls.values():
                self._engine.forget(call.key)

    def statistics(self) -> JoinStatistics:
        """Returns counts and bytes, read under one lock."""
        with self._lock:
            calls = self._engine.statistics()
            return JoinStatistics(
                **self._counts,
                replays=calls["replays"],
                eager=calls["eager"],
                eager_reasons=calls["eager_reasons"],
                waits=self._ring.waits,
                growths=self._workspace.growths,
                workspace_bytes=self._workspace.nbytes,
                output_bytes=self._outputs.nbytes,
                kernels_compiled=self.device.modules.statistics().compiles,
                cache=self.cache.statistics(),
            )

    # --- a join
    def _side(self, table: TableLike, names: tuple[str, ...] | None) -> KeyColumns:
        if names is None:
            if not isinstance(table, KeyColumns):
                raise InputError("on=… is needed: the names of the key columns")
            if table.stream is self.stream:
                return table
            names = table.names
        self._require_open()
        return KeyColumns.of(self.device, self.stream, table, names)

    def _sides(
        self, left: TableLike, right: TableLike | JoinIndex, on: On | None
    ) -> tuple[KeyColumns, KeyColumns | JoinIndex]:
        """Returns both sides on the device, checked against each other."""
        # The common case first: the sides are ready.  The general path below takes twice as long to
        # find that out.
        if on is None and type(left) is KeyColumns and left.stream is self.stream:
            if type(right) is JoinIndex:
                if right.joiner is self and left.dtypes == right.columns.dtypes:
                    return left, right
            elif (
                type(right) is KeyColumns
                and right.stream is left.stream
                and left.dtypes == right.dtypes
            ):
                return left, right
        lefts = rights = None
        if on is not None:
            lefts, rights = names_of(on)
        # JoinIndex second: the check takes longer when it is false.
        if isinstance(right, KeyColumns) or not isinstance(right, JoinIndex):
            own = right = self._side(right, rights)
        else:
            if right.joiner is not self:
                raise InputError("the index was built by another joiner, and is of use to it alone")
            own = right.columns
            if rights is not None and rights != lefts:  # else `on` has the left names alone
                own.require_names(rights)
            elif rights is not None:
                own.require_places(rights)
        side = self._side(left, lefts)
        check_same_types(side, own)
        return side, right

    def _start(
        self, left: KeyColumns, right: KeyColumns | JoinIndex, capacity: int, count: str
    ) -> tuple[JoinKey, Lease, RingTurn]:
        """Launches a join with room for `capacity` rows, and adds it to the count named `count`."""
        with self._turn, self._lock:
            self._ready()
            left.require_open()
            right.require_open()
            # Capacities of one class share their bit length, which is cheaper to compute than the
            # class.
            sides = left.serial, right.serial, (max(capacity, 1) - 1).bit_length()
            plan = self._plans.get(sides)
            if plan is None or plan.growths != self._workspace.growths:
                plan = self._plan(left, right, capacity)
                if len(self._plans) >= _MOST_PLANS:
                    self._plans.clear()
                self._plans[sides] = plan
            try:
                lease = self._outputs.take(plan.key.output)
            except OutOfMemoryError:
                self._outputs.clear()
                lease = self._outputs.take(plan.key.output)
            out, keep = lease.buffer.address, (left, right)
            enter = partial(self._ring.enter, plan.pattern, out, out + 4 * lease.capacity, keep)
            turn = self._launch(plan.call, enter)
            self._counts[count] += 1
            return plan.key, lease, turn

    def _plan(self, left: KeyColumns, right: KeyColumns | JoinIndex, capacity: int) -> _Plan:
        columns = right if isinstance(right, KeyColumns) else right.columns
        inner = columns is right
        key = JoinKey.of(
            "inner" if inner else "indexed inner",
            len(left.sizes),
            left.key_bytes,
            left.rows,
            columns.rows,
            capacity,
        )
        slots, rows = (columns.slots, columns.rows) if inner else (0, 0)
        work = self._workspace
        try:
            work.reserve(slots, rows, key.probe, key.scan)
        except OutOfMemoryError:
            self._outputs.clear()
            work.reserve(slots, rows, key.probe, key.scan)
        if isinstance(right, KeyColumns):
            table, grouped = work.slots, work.grouped
        else:
            table, grouped = right.table.address, right.grouped.address
        pattern = Pattern(
            (table, grouped, work.slot_of, work.rank, work.found, work.offsets, work.sums),
            (left.rows, columns.rows, columns.slots - 1, key.output, len(left.sizes), inner),
            _columns(left.addresses, columns),
        )
        return _Plan(key, self._call(key), pattern, work.growths)

    def _call(self, key: JoinKey | IndexKey) -> _ChainCall:
        return self._calls.setdefault(key, _ChainCall(key, given=_ALIKE))

    def _launch(self, call: _ChainCall, enter: Callable[[], RingTurn]) -> RingTurn:
        """Launches the key's chain for the turn that `enter` returns."""
        refused: OstinatoError | None = None
        if call.repeat is not None:
            turn = enter()
            try:
                if call.repeat.again(_ALIKE) is not None:
                    self._ring.launched(turn)
                    return turn
            except ContextPoisonedError:
                raise
            except OstinatoError as error:
                refused = error
        work = _JoinWork(self, call, enter)
        if refused is None:
            self._engine.call(work)
        else:
            self._engine.refused(work, refused)
        self._ring.launched(work.turn)
        return work.turn

    def _chain(self, key: JoinKey | IndexKey, *, programmatic: bool) -> _Chain:
        ring = self._ring
        made = []
        for one in chain_of(key, self.device.properties.multiprocessors):
            first = (ring.pinned, ring.state) if one.kernel == "begin" else ()
            config = one.config(programmatic=programmatic)
            made.append((self._kernels[one.kernel], config, (*first, ring.block, *one.numbers)))
        return tuple(made)

    def _ready(self) -> None:
        """Raises ClosedError if closed; restores the device's state if it is uncertain."""
        if self._closed or self.device.context.closed:
            self._require_open()
        if self._ring.uncertain:
            require_no_capture(self.stream)
            self._ring.recover()
            self._workspace.clean()
            self._counts["recoveries"] += 1
            self._ring.uncertain = False

    # --- lifetime
    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the joiner is closed; make another")
        self.device.context.require_open()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Waits for the joins under way and frees all memory except results.  Idempotent.

        Joins whose `result()` was not called before have no result then.
        """
        with self._lock:
            if self._closed:
                return
            if not self.stream.closed and not self.device.context.closed:
                with suppress(DriverError):  # all memory is freed only after the device's work
                    self.stream.synchronize()
            self._closed = True
            self._ring.close()
            self.cache.close()
            self._outputs.clear()
            self._workspace.close()
            self._captures.close()
            if self._own_stream:
                self.stream.close()


@dataclass(frozen=True, slots=True)
class _JoinOptions:
    """The engine's options.  Graphs are made at once: the kernels are loaded, and a chain has
    nothing to initialise."""

    graphs: bool
    profiling: bool = False
    strict: bool = False
    verify: Literal["off"] = "off"
    warmups: int = 0
    preconditions: Mapping[str, Callable[[], bool]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _ChainCall(Call):
    """The engine's calls of one key."""

    key: JoinKey | IndexKey
    chain: _Chain | None = None
    """The chain's launches for eager runs, made when first needed."""


class _JoinWork(Work):
    """One launch of a key's chain."""

    __slots__ = ("call", "enter", "joiner", "options", "stream", "turn")

    call: _ChainCall

    def __init__(self, joiner: Joiner, call: _ChainCall, enter: Callable[[], RingTurn]) -> None:
        self.joiner, self.call, self.enter = joiner, call, enter
        self.options, self.stream = joiner._options, joiner.stream

    def begin(self, *, inside: bool = False) -> None:
        require_no_capture(self.stream)

    def run(self, *, padded: bool = False) -> None:
        self.turn, made = self.enter(), self.call.chain
        if made is None:
            # Not programmatic: such launches take more CPU time, which bounds eager chains.
            made = self.call.chain = self.joiner._chain(self.call.key, programmatic=False)
        for kernel, config, arguments in made:
            launch(self.stream, kernel, config, *arguments)

    def build(self) -> GraphExec:
        joiner = self.joiner
        programmatic = joiner.device.capabilities.programmatic_launch
        with capture(joiner._captures) as under_way:
            for kernel, config, arguments in joiner._chain(
                self.call.key, programmatic=programmatic
            ):
                launch(joiner._captures, kernel, config, *arguments)
        return under_way.graph.instantiate(upload=self.stream)

    def bind(self) -> None:
        self.turn = self.enter()


@dataclass(frozen=True, slots=True)
class _Plan:
    """The prepared join of two sides with room of one class, valid until the workspace grows."""

    key: JoinKey
    call: _ChainCall
    pattern: Pattern
    growths: int


_MOST_PLANS = 1024

_COUNTED = ("joins", "indexes", "retries", "recoveries")

_ALIKE: dict[str, int] = {}
"""The values that distinguish calls of one key: none, since graphs read the ring."""


_Chain = tuple[tuple[Kernel, LaunchConfig, tuple[object, ...]], ...]
"""Launches in order: kernel, shape, and arguments."""


def _columns(lefts: tuple[int, ...], right: KeyColumns) -> tuple[int, ...]:
    """Returns the fields of the records of `block.COLUMN`, one after the other."""
    if len(lefts) == 1:  # five times as fast as the general path
        return lefts[0], right.addresses[0], right.sizes[0], 0
    return tuple(chain.from_iterable(zip(lefts, right.addresses, right.sizes, repeat(0))))


# ------------------------------------------------------------------------------ without a joiner

_default: list[Joiner] = []
_default_lock = new_lock()


def _default_joiner() -> Joiner:
    """Returns the process's joiner, on the device that `open_device()` gives."""
    with _default_lock:
        if not _default or _default[0].closed or _default[0].device.context.closed:
            _default[:] = [Joiner(open_device())]
        return _default[0]


def hash_join(
    left: TableLike,
    right: TableLike | JoinIndex,
    on: On | None = None,
    *,
    joiner: Joiner | None = None,
    capacity: SupportsIndex | None = None,
) -> JoinResult:
    """Joins two tables on equal keys: returns all pairs of row numbers whose key columns are equal.

    `left` and `right`: a mapping of names to arrays, an Arrow table, or `KeyColumns`; `right` also
    a `JoinIndex`.  Key columns are one-dimensional, of 32- or 64-bit integers, without nulls, and
    of the same type on both sides.  `on`: their names.  `joiner`: None for the process's joiner, on
    the device that `open_device()` gives.  See `Joiner.submit` for the rest and the errors.
    """
    chosen = right.joiner if isinstance(right, JoinIndex) and joiner is None else joiner
    return (chosen or _default_joiner()).join(left, right, on, capacity=capacity)


def build_index(
    right: TableLike, on: On | None = None, *, joiner: Joiner | None = None
) -> JoinIndex:
    """Returns a hash index of a table's key columns, for many joins.  See `Joiner.build_index`."""
    return (joiner or _default_joiner()).build_index(right, on)
