"""The check of a replay: a step run eagerly and by its graph, from the same state, bit by bit.

    before ──┬─ run eagerly, poison 0 ──▶ A
             ├─ replay,      poison 1 ──▶ B
             └─ replay,      poison 2 ──▶ C    with padding, or if A has a poison as an answer

Padding is filled with another poison for each run, and so is each whole OUTPUT.  So A and B differ
if an answer depends on padding, if the graph holds something frozen, or if one run does not write
an output.  C is for what two poisons do not show: a minimum ignores NaN and large numbers, the sum
of two inputs is the same when their poisons change places, and an answer may be equal to the poison
that it should be written over.  Memory that a run writes and that no slot declares is saved,
restored and compared like a STATE, up to a limit in bytes (`replay.undeclared`).  After a check
that passes, all memory is as one replay leaves it.  After one that fails or raises, all memory is
as before the check.

Not found: work that no run does (a plan that was made once, outside the step), pointers in
device memory, and concurrent work of other streams.  While a check runs, no other stream may write
memory that the graph points at.  docs/correctness.md has the whole list.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ostinato.driver.api import MemoryRange
from ostinato.driver.stream import Operation, Stream
from ostinato.errors import DriverError
from ostinato.explain.difference import first_drift
from ostinato.explain.races import unordered
from ostinato.graph import GraphExec
from ostinato.memory.restoring import put_back
from ostinato.step.slots import Role, Slot, Values
from ostinato.step.undeclared import Undeclared

_OUTPUT_POISONS = (0xA5, 0x5A)


class Cause(enum.StrEnum):
    """Why a check failed, as far as more eager runs can show."""

    HOST_STATE = (
        "two eager runs from the same state submit different work: the step keeps state of its own "
        "on the host, which captures and checks advance too; keep it on the device"
    )
    UNREPEATABLE = (
        "two eager runs of the same work from the same state differ: the step keeps state of its "
        "own, or adds up in no fixed order"
    )
    PADDING = "the step lets padding rows reach the answer"
    PADDING_WRITTEN = "the step changes padding rows of a state; they are not its to write"
    INPUT_WRITTEN = "the step changes an input; declare the slot STATE"
    UNWRITTEN = "an output is not written in all rows in use; declare the slot STATE"
    OUTPUT_READ = "an answer depends on what an output held before; declare the slot STATE"
    UNDECLARED = (
        "memory that no slot declares differs; declare it STATE, or SCRATCH if nothing reads it"
    )
    UNORDERED = "nothing orders two operations of the graph that use the same memory"
    FROZEN = "the graph lacks work of the step, or holds something that changed since its capture"


@dataclass(frozen=True, slots=True)
class Finding:
    """The first difference that a check found: where, what, and why."""

    where: str
    """ "slot 'x' at [0, 3]", "4 bytes at 0x7f…", or two operations."""
    what: str
    cause: Cause

    def __str__(self) -> str:
        return f"{self.where}: {self.what} ({self.cause})"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """One check of one graph.  Bytes; `finding` is None if it passed."""

    declared: int
    """Bytes of slots that were compared."""
    undeclared: int
    """Bytes that no slot declares, that a run may write, and that were compared."""
    skipped: int
    """Bytes of such memory that were not compared, because they are over the limit."""
    finding: Finding | None


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The content of all checked memory at one moment."""

    slots: Mapping[str, Values]
    undeclared: tuple[Values, ...]


def check_replay(
    slots: Sequence[Slot],
    sizes: Mapping[str, int],
    stream: Stream,
    executable: GraphExec,
    *,
    eager: Callable[[], Sequence[Operation]],
    replay: Callable[[], object],
    own: Sequence[MemoryRange],
    limit: int,
) -> CheckReport:
    """Runs a step both ways from the same state, and compares.

    `eager` runs the step at the sizes of the graph and returns its operations.  `own` is memory of
    the `GraphedStep` itself, which is not compared.  `limit` is the largest number of bytes of
    undeclared memory that are compared.  Raises what a run raises, after all memory was put
    back; StateLostError if the driver refuses to put it back.
    """
    memory = Undeclared(stream, [*(slot.buffer.range for slot in slots), *own], limit)
    memory.save_written(executable)
    check = _Check(slots, sizes, stream, memory)
    before = check.read()
    passed = False
    try:
        finding = check.find(executable, before, eager, replay)
        passed = finding is None
    finally:
        if not passed:
            check.restore(before)
    return CheckReport(
        declared=sum(slot.buffer.nbytes for slot in check.slots),
        undeclared=memory.nbytes,
        skipped=memory.skipped,
        finding=finding,
    )


def watch_promises(
    slots: Sequence[Slot], sizes: Mapping[str, int], stream: Stream
) -> Callable[[], Finding | None]:
    """For a run that is not repeated: call this before the run, and what it returns after it.

    The returned function gives the first input or padding row that the run changed, after it has
    put all slots back; None if there is none.
    """
    check = _Check(slots, sizes, stream, Undeclared(stream, (), 0))
    before = check.read()

    def look() -> Finding | None:
        finding = check.broken_promise(before, check.read())
        if finding is not None:
            check.restore(before)
        return finding

    return look


class _Check:
    """One check: the slots to compare, how many of their rows are in use, and undeclared memory."""

    def __init__(
        self,
        slots: Sequence[Slot],
        sizes: Mapping[str, int],
        stream: Stream,
        memory: Undeclared,
    ) -> None:
        self.slots = [slot for slot in slots if slot.role is not Role.SCRATCH]
        self._rows = {slot.name: slot.rows(sizes) for slot in self.slots}
        self._stream = stream
        self._memory = memory

    def _has_padding(self, slot: Slot) -> bool:
        rows = self._rows[slot.name]
        return rows is not None and rows < len(slot.buffer)

    # --- the runs
    def find(
        self,
        executable: GraphExec,
        before: _Snapshot,
        eager: Callable[[], Sequence[Operation]],
        replay: Callable[[], object],
    ) -> Finding | None:
        start = self._start(before, 0, 0)
        operations = self._run(eager)
        a = self.read()
        # First: if nothing orders two operations, any run may have any result.
        finding = _race(executable, operations) or self.broken_promise(start, a)
        for poison in (1, 2) if self._needs_third(a) else (1,):
            if finding is not None:
                return finding
            start = self._start(before, poison, poison, a)
            replay()
            b = self.read()
            finding = self.broken_promise(start, b)
            found = None if finding is not None else self._difference(a, b)
            if found is not None:
                where, what, cause = found
                drift = None
                if cause is None:
                    cause, drift = self._cause(before, a, operations, eager, poison)
                if cause in (Cause.FROZEN, Cause.UNDECLARED):
                    drift = first_drift(executable.nodes, operations, ("in the graph", "now"))
                what += "" if drift is None else f"; {drift}"
                finding = Finding(where, what, cause)
        if finding is None:
            self._tidy(before)
        return finding

    def _needs_third(self, a: _Snapshot) -> bool:
        """Whether two poisons are not enough."""
        return any(
            _holds_poison(slot, self._in_use(slot, a)).any()
            if slot.role is Role.OUTPUT
            else self._has_padding(slot)
            for slot in self.slots
        )

    def _in_use(self, slot: Slot, snapshot: _Snapshot) -> Values:
        values, rows = snapshot.slots[slot.name], self._rows[slot.name]
        return values if rows is None else values[:rows]  # all of it may have no axis

    def _run(self, eager: Callable[[], Sequence[Operation]]) -> Sequence[Operation]:
        with self._memory.saving():
            return eager()

    def _cause(
        self,
        before: _Snapshot,
        a: _Snapshot,
        operations: Sequence[Operation],
        eager: Callable[[], Sequence[Operation]],
        poison: int,
    ) -> tuple[Cause, str | None]:
        """Why A and a replay with another poison differ; and where the launches of two eager runs
        differ, if they do.

        Runs the step eagerly again: first with both poisons of A, then with one poison of the
        replay at a time.
        """
        again = operations

        def differs(padding: int, outputs: int) -> bool:
            nonlocal again
            self._start(before, padding, outputs, a)
            again = self._run(eager)
            return self._difference(a, self.read()) is not None

        if differs(0, 0):
            drift = first_drift(operations, again, ("in one run", "in the next"))
            return (Cause.UNREPEATABLE if drift is None else Cause.HOST_STATE), drift
        if differs(poison, 0):
            return Cause.PADDING, None
        return (Cause.OUTPUT_READ if differs(0, poison) else Cause.FROZEN), None

    def _start(
        self, before: _Snapshot, padding: int, outputs: int, a: _Snapshot | None = None
    ) -> _Snapshot:
        """Puts all memory back, poisons it, and returns what a run starts from.

        Padding of a STATE is not poisoned in the eager run: a small change of a large poison is
        rounded away, and a write to these rows must be seen.
        """
        self._memory.restore()
        start: dict[str, Values] = {}
        for turn, slot in enumerate(self.slots):
            values, rows = before.slots[slot.name], self._rows[slot.name]
            if slot.role is Role.OUTPUT:
                values = _output_poison(slot, min(outputs, 1), slot.buffer.shape)
                if outputs == 2 and a is not None:  # other values than A's answers
                    values[_holds_poison(slot, a.slots[slot.name])] = _output_poison(slot, 0)[0]
            elif (
                rows is not None
                and self._has_padding(slot)
                and (padding or slot.role is not Role.STATE)
            ):
                values = slot.poisoned(values, rows, padding, turn)
            start[slot.name] = values
            slot.buffer.copy_from(values, self._stream)
        return _Snapshot(start, before.undeclared)

    def _tidy(self, before: _Snapshot) -> None:
        """After a check that passes: puts back inputs and padding, and keeps the answer."""
        for slot in self.slots:
            rows = self._rows[slot.name]
            if slot.role is Role.INPUT:
                slot.buffer.copy_from(before.slots[slot.name], self._stream)
            elif rows is not None and self._has_padding(slot):
                slot.buffer[rows:].copy_from(before.slots[slot.name][rows:], self._stream)
        self._stream.synchronize()

    # --- comparing
    def broken_promise(self, start: _Snapshot, end: _Snapshot) -> Finding | None:
        """The first input or padding row of a STATE that one run changed."""
        for slot in self.slots:
            was, is_ = start.slots[slot.name], end.slots[slot.name]
            rows = self._rows[slot.name]
            if slot.role is Role.INPUT:
                index, cause = _first_difference(was, is_), Cause.INPUT_WRITTEN
            elif slot.role is Role.STATE and rows is not None and not slot.scratch_padding:
                index, cause = _first_difference(was, is_, rows), Cause.PADDING_WRITTEN
            else:
                continue
            if index is not None:
                where = f"slot {slot.name!r} at {list(index)}"
                return Finding(where, f"{was[index]} before, {is_[index]} after", cause)
        return None

    def _difference(self, a: _Snapshot, b: _Snapshot) -> tuple[str, str, Cause | None] | None:
        """The place and the values in which the answers of two runs differ first, and the cause if
        it is known without another run; None if they are the same."""
        for slot in self.slots:
            if slot.role is Role.INPUT:
                continue
            one, other = self._in_use(slot, a), self._in_use(slot, b)
            index = _first_difference(one, other)
            if index is None:
                continue
            where = f"slot {slot.name!r} at {list(index)}"
            if slot.role is Role.OUTPUT and _is_poison(slot, one[index], other[index]):
                return where, "neither run writes it", Cause.UNWRITTEN
            return where, f"{one[index]} eagerly, {other[index]} by replay", None
        found = self._memory.difference(a.undeclared, b.undeclared)
        return None if found is None else (*found, Cause.UNDECLARED)

    # --- memory
    def read(self) -> _Snapshot:
        stream = self._stream
        slots = {slot.name: slot.buffer.to_numpy(stream) for slot in self.slots}
        return _Snapshot(slots, self._memory.read())

    def restore(self, before: _Snapshot) -> None:
        """Puts all memory back, also if it is interrupted.

        Raises StateLostError if the driver refuses it twice.
        """

        def lost(refused: DriverError) -> str:
            names = ", ".join(repr(slot.name) for slot in self.slots)
            return (
                f"a check could not put back what it had changed ({refused}), so the content of "
                f"the slots {names} is not valid: write them again, then call step.release(); "
                "until then the step does not run"
            )

        put_back(partial(self._write_back, before), lost)

    def _write_back(self, before: _Snapshot) -> None:
        for slot in self.slots:
            slot.buffer.copy_from(before.slots[slot.name], self._stream)
        self._memory.restore()
        self._stream.synchronize()


def _race(executable: GraphExec, operations: Sequence[Operation]) -> Finding | None:
    race = unordered(executable.graph, operations)
    if race is None:
        return None
    return Finding(f"{race[0].name} and {race[1].name}", "no path", Cause.UNORDERED)


def _output_poison(slot: Slot, which: int, shape: tuple[int, ...] = (1,)) -> Values:
    dtype = slot.buffer.dtype
    if slot.poison is not None:
        return np.full(shape, slot.poison[which], dtype)
    filled = np.full(math.prod(shape) * dtype.itemsize, _OUTPUT_POISONS[which], np.uint8)
    return filled.view(dtype).reshape(shape)


def _is_poison(slot: Slot, one: Any, other: Any) -> bool:
    """Whether both elements of an output still hold their poison."""
    poisons = [_output_poison(slot, which).tobytes() for which in (0, 1)]
    return [np.asarray(one).tobytes(), np.asarray(other).tobytes()] == poisons


def _holds_poison(slot: Slot, values: Values) -> Values:
    """Where an output's values are those that the second run is poisoned with."""
    return np.asarray(~_differ(values, _output_poison(slot, 1))).reshape(values.shape)


def _differ(one: Values, other: Values) -> Values:
    """Where the bits of elements differ, in one row.  Either may be a single element."""
    size = one.dtype.itemsize
    word = math.gcd(size, 8)  # by words: by bytes takes ten times as long
    a, b = (
        np.ascontiguousarray(values).view(f"u{word}").reshape(-1, size // word)
        for values in (one, other)
    )
    different = a != b
    return np.asarray(different[:, 0] if word == size else different.any(axis=1))


def _first_difference(one: Values, other: Values, start: int = 0) -> tuple[int, ...] | None:
    """The index of the first element whose bits differ, from row `start` on."""
    a, b = one[start:] if start else one, other[start:] if start else other
    if not a.size:
        return None
    different = _differ(a, b)
    if not different.any():
        return None
    index = [int(i) for i in np.unravel_index(int(np.flatnonzero(different)[0]), a.shape)]
    return (index[0] + start, *index[1:]) if index else ()
