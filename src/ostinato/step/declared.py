"""The memory of a check for declared slots, which are compared bit by bit.

Each turn fills padding and all output rows with another poison.  So turns 0 and 1 differ if an
answer depends on padding, if the graph holds something frozen, or if one run does not write an
output.  Turn 2 finds faults that two poisons do not show: a minimum ignores NaN and large numbers,
the sum of two inputs is the same when their poisons change places, and an answer may equal the
poison that it overwrites.  Turn 2 runs if there is padding, or if an answer of the eager run is
equal to a poison.  Memory that a run writes and that no slot declares is saved, restored and
compared like a state, up to a limit in bytes (`step.undeclared`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato.driver.api import MemoryRange
from ostinato.driver.stream import Operation, Stream
from ostinato.errors import ContextPoisonedError, DriverError, OstinatoError, StateLostError
from ostinato.explain.difference import first_difference, first_drift
from ostinato.explain.races import unordered
from ostinato.graph import GraphExec, Recorded, build_graph, operations
from ostinato.memory.restoring import put_back
from ostinato.step.check import Cause, Finding, Memory
from ostinato.step.slots import Slot, Values, everywhere
from ostinato.step.undeclared import Undeclared

_OUTPUT_POISONS = (0xA5, 0x5A)


@dataclass(frozen=True, slots=True)
class _Content:
    """The content of all checked memory after a run, with the operations of an eager run."""

    slots: Mapping[str, Values]
    undeclared: tuple[Values, ...]
    operations: Sequence[Operation] | None = None


class Declared(Memory[_Content]):
    """The slots of a step, and other memory that its eager run or its graph writes.

    `sizes`: the numbers of rows in use.  `executable` is the graph that is checked, and `run` runs
    the step eagerly at the sizes of the graph; without them only `fault` may be used.  `own` is
    memory of the step itself, which is not compared.  `limit` is the largest number of undeclared
    bytes that are compared.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        sizes: Mapping[str, int],
        stream: Stream,
        executable: GraphExec | None = None,
        run: Callable[[], object] = lambda: None,
        *,
        own: Sequence[MemoryRange] = (),
        limit: int = 0,
    ) -> None:
        self._slots = [slot for slot in slots if slot.role != "scratch"]
        self._rows = {slot.name: slot.rows(sizes) for slot in self._slots}
        self._stream, self._executable, self._run = stream, executable, run
        self._most = limit + sum(slot.buffer.nbytes for slot in slots)
        self._memory = Undeclared(stream, [*(slot.buffer.range for slot in slots), *own], limit)
        if executable is not None:
            self._memory.save_written(executable)

    def nbytes(self) -> tuple[int, int, int]:
        declared = sum(slot.buffer.nbytes for slot in self._slots)
        return declared, self._memory.nbytes, self._memory.skipped

    def eager(self) -> Sequence[Operation]:
        """Runs the step eagerly, and returns its operations."""
        with self._memory.saving(), operations(self._stream.context) as made:
            self._run()
        return made

    def _has_padding(self, slot: Slot) -> bool:
        rows = self._rows[slot.name]
        return rows is not None and rows < len(slot.buffer)

    def _in_use(self, slot: Slot, content: _Content) -> Values:
        values, rows = content.slots[slot.name], self._rows[slot.name]
        return values if rows is None else values[:rows]  # a whole buffer may have no axis

    # --- before and after a run
    def turns(self, eager: _Content | None) -> Sequence[int]:
        assert eager is not None
        third = any(
            _holds_poison(slot, self._in_use(slot, eager)).any()
            if slot.role == "output"
            else self._has_padding(slot)
            for slot in self._slots
        )
        return (1, 2) if third else (1,)

    def read(self, result: Any = None, *, last: bool = False) -> _Content:
        """`result`: the operations that `eager` returned, or the result of a replay."""
        stream = self._stream
        slots = {slot.name: slot.buffer.to_numpy(stream) for slot in self._slots}
        return _Content(slots, self._memory.read(), result)

    def start(self, before: _Content, turn: int, eager: _Content | None) -> _Content:
        return self._start(before, turn, turn, eager)

    def _start(
        self, before: _Content, padding: int, outputs: int, eager: _Content | None
    ) -> _Content:
        """Leaves padding of a state as it is in the eager run: a large poison would round away a
        small change, and a write to these rows must be found."""
        self._memory.restore()
        start: dict[str, Values] = {}
        for place, slot in enumerate(self._slots):
            values, rows = before.slots[slot.name], self._rows[slot.name]
            if slot.role == "output":
                values = _output_poison(slot, min(outputs, 1), slot.buffer.shape)
                if outputs == 2 and eager is not None:  # other values than its answers
                    answers = _holds_poison(slot, eager.slots[slot.name])
                    values[answers] = _output_poison(slot, 0)[0]
            elif rows is not None and self._has_padding(slot) and (padding or slot.role != "state"):
                values = slot.poisoned(values, rows, padding, place)
            start[slot.name] = values
            slot.buffer.set(values, self._stream)
        return _Content(start, before.undeclared)

    def accept(self, before: _Content) -> None:
        """Puts back inputs and padding."""
        for slot in self._slots:
            rows = self._rows[slot.name]
            if slot.role == "input":
                slot.buffer.set(before.slots[slot.name], self._stream)
            elif rows is not None and self._has_padding(slot):
                slot.buffer[rows:].set(before.slots[slot.name][rows:], self._stream)
        self._stream.synchronize()

    def restore(self, before: _Content) -> None:
        def write() -> None:
            for slot in self._slots:
                slot.buffer.set(before.slots[slot.name], self._stream)
            self._memory.restore()
            self._stream.synchronize()

        def lost(refused: DriverError) -> str:
            names = ", ".join(repr(slot.name) for slot in self._slots)
            return (
                f"a check could not put back what it had changed ({refused}), so the content of "
                f"the slots {names} is not valid: write them again, then call step.forget(); "
                "until then the step does not run"
            )

        put_back(write, lost)

    # --- comparing
    def fault(self, start: _Content, end: _Content) -> Finding | None:
        """Returns the first fault of a run: two operations without an order, or an input or a
        padding row of a state that the run changed."""
        if self._executable is not None and end.operations is not None:
            race = unordered(self._executable.graph, end.operations)
            if race is not None:
                return Finding(f"{race[0].name} and {race[1].name}", "no path", Cause.UNORDERED)
        for slot in self._slots:
            was, is_ = start.slots[slot.name], end.slots[slot.name]
            rows = self._rows[slot.name]
            if slot.role == "input":
                index, cause = _first_difference(was, is_), Cause.INPUT_WRITTEN
            elif slot.role == "state" and rows is not None and not slot.scratch_padding:
                index, cause = _first_difference(was, is_, rows), Cause.PADDING_WRITTEN
            else:
                continue
            if index is not None:
                where = f"slot {slot.name!r} at {list(index)}"
                return Finding(where, f"{was[index]} before, {is_[index]} after", cause)
        return None

    def difference(
        self, before: _Content, eager: _Content, replayed: _Content, turn: int
    ) -> Finding | None:
        found = self._first(eager, replayed)
        if found is None:
            return None
        (where, what, cause), drift = found, None
        if cause is None:
            cause, drift = self._cause(before, eager, turn)
        if cause in (Cause.FROZEN, Cause.UNDECLARED):
            assert self._executable is not None
            nodes = self._executable.nodes()
            drift = first_drift(nodes, eager.operations or (), ("in the graph", "now"))
            what = "; ".join(filter(None, (what, drift, self._node(before, eager, turn))))
        elif drift is not None:
            what = f"{what}; {drift}"
        return Finding(where, what, cause)

    def _node(self, before: _Content, eager: _Content, turn: int) -> str | None:
        """Describes the first node whose memory differs between the operations of the eager run and
        the graph; None if none does, or they cannot be run one by one."""
        assert self._executable is not None
        self._start(before, turn, turn, eager)
        recorded = [Recorded(operation, None) for operation in eager.operations or ()]
        options: dict[str, Any] = {"limit": self._most}
        options["names"] = "the eager run", "the replay"
        try:
            with build_graph(self._stream, recorded, serial=True) as graph:
                found = first_difference(self._stream, graph, self._executable, **options)
        except (ContextPoisonedError, StateLostError):
            raise
        except OstinatoError:
            return None
        return None if found is None else f"the first node to differ is {found.line()}"

    def _cause(self, before: _Content, a: _Content, turn: int) -> tuple[Cause, str | None]:
        """Returns why the eager run and a replay differ; and, if the launches of two eager runs
        differ, where.

        Runs the step eagerly again: first with both poisons of the eager run, then with one poison
        of the replay at a time.
        """
        once = again = a.operations or ()

        def differs(padding: int, outputs: int) -> bool:
            nonlocal again
            self._start(before, padding, outputs, a)
            again = self.eager()
            return self._first(a, self.read()) is not None

        if differs(0, 0):
            drift = first_drift(once, again, ("in one run", "in the next"))
            return (Cause.UNREPEATABLE if drift is None else Cause.HOST_STATE), drift
        if differs(turn, 0):
            return Cause.PADDING, None
        return (Cause.OUTPUT_READ if differs(0, turn) else Cause.FROZEN), None

    def _first(self, a: _Content, b: _Content) -> tuple[str, str, Cause | None] | None:
        """Returns the place and the values of the first difference between the answers of two runs,
        and the cause if no other run is needed to find it."""
        for slot in self._slots:
            if slot.role == "input":
                continue
            one, other = self._in_use(slot, a), self._in_use(slot, b)
            index = _first_difference(one, other)
            if index is None:
                continue
            where = f"slot {slot.name!r} at {list(index)}"
            if slot.role == "output" and _is_poison(slot, one[index], other[index]):
                return where, "neither run writes it", Cause.UNWRITTEN
            return where, f"{one[index]} eagerly, {other[index]} by replay", None
        found = self._memory.difference(a.undeclared, b.undeclared)
        return None if found is None else (*found, Cause.UNDECLARED)


def _output_poison(slot: Slot, which: int, shape: tuple[int, ...] = (1,)) -> Values:
    dtype = slot.buffer.dtype
    if slot.poison is not None:
        return np.full(shape, everywhere(dtype, slot.poison[which]), dtype)
    filled = np.full(math.prod(shape) * dtype.itemsize, _OUTPUT_POISONS[which], np.uint8)
    return filled.view(dtype).reshape(shape)


def _is_poison(slot: Slot, one: Any, other: Any) -> bool:
    """True if both elements of an output still hold their poison."""
    poisons = [_output_poison(slot, which).tobytes() for which in (0, 1)]
    return [np.asarray(one).tobytes(), np.asarray(other).tobytes()] == poisons


def _holds_poison(slot: Slot, values: Values) -> Values:
    """Returns a mask of the values of an output that equal the poison of the second run."""
    return np.asarray(~_differ(values, _output_poison(slot, 1))).reshape(values.shape)


def _differ(one: Values, other: Values) -> Values:
    """Returns a flat mask of the elements whose bits differ.  Either may be a single element."""
    size = one.dtype.itemsize
    word = math.gcd(size, 8)  # by words: by bytes takes ten times as long
    a, b = (
        np.ascontiguousarray(values).view(f"u{word}").reshape(-1, size // word)
        for values in (one, other)
    )
    different = a != b
    return np.asarray(different[:, 0] if word == size else different.any(axis=1))


def _first_difference(one: Values, other: Values, start: int = 0) -> tuple[int, ...] | None:
    """Returns the index of the first element whose bits differ, from row `start` on."""
    a, b = one[start:] if start else one, other[start:] if start else other
    if not a.size:
        return None
    different = _differ(a, b)
    if not different.any():
        return None
    index = [int(i) for i in np.unravel_index(int(np.flatnonzero(different)[0]), a.shape)]
    return (index[0] + start, *index[1:]) if index else ()
