"""Slots: the static buffers that a step reads and writes, and how a replay is checked on them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.driver.stream import Stream
from ostinato.errors import InputError
from ostinato.memory import Buffer

__all__ = ["Cause", "Role", "Slot", "SlotMismatch", "check_replay"]

Snapshot = dict[str, npt.NDArray[Any]]


class Role(enum.Enum):
    """What a step does with a slot."""

    INPUT = "input"
    """The caller fills it before the step; the step only reads it."""
    OUTPUT = "output"
    """The step overwrites it."""
    STATE = "state"
    """The step reads and changes it; a check sets it back between its runs."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A static buffer of a step.

    `size` names the size argument that says how many rows of the first axis are in use; the rest
    up to the bucket is padding.  `poison` are two values to fill the padding of an input with
    while a step is checked: they must be legal to read (a token id must exist) and differ; None
    gives NaN and a large number for floats, and no poisoning for whole numbers.
    """

    name: str
    buffer: Buffer
    role: Role
    size: str | None = None
    poison: tuple[float, float] | None = None

    def rows(self, sizes: Mapping[str, int]) -> int | None:
        """How many rows are in use; None if all are."""
        if self.size is None:
            return None
        if self.size not in sizes:
            raise InputError(f"slot {self.name!r} has its rows from {self.size!r}, not a size here")
        return min(sizes[self.size], len(self.buffer))

    def poisons(self) -> tuple[float, float] | None:
        """The two values for padding, or None where it is not poisoned."""
        if self.role is not Role.INPUT or self.size is None:
            return None
        if self.poison is not None:
            return self.poison
        if self.buffer.dtype.kind == "f":
            return (float("nan"), float(np.finfo(self.buffer.dtype).max) / 4)
        return None


class Cause(enum.StrEnum):
    """Why a replay differs from the eager run, as far as more eager runs can tell."""

    UNREPEATABLE = "two eager runs from the same state differ: the step keeps state of its own"
    PADDING = "the step lets padding rows reach the answer"
    FROZEN = "the graph holds something that changed since its capture"


@dataclass(frozen=True, slots=True)
class SlotMismatch:
    """Where a replay differed from the eager run: slot, first index, both values, and why."""

    slot: str
    index: tuple[int, ...]
    eager: str
    replayed: str
    cause: Cause

    def __str__(self) -> str:
        return (
            f"slot {self.slot!r} at {list(self.index)}: {self.eager} eagerly, "
            f"{self.replayed} by replay; {self.cause.value}"
        )


def check_replay(
    slots: Sequence[Slot],
    sizes: Mapping[str, int],
    stream: Stream,
    eager: Callable[[], object],
    replay: Callable[[], object],
) -> SlotMismatch | None:
    """Runs a step eagerly and by replay from the same state, and compares bit by bit.

    Padding rows hold another poison in each run, so an answer that depends on them differs.
    Afterwards the slots are as after one run, the eager one's values where the two differ.
    """
    before = _read(slots, stream)

    def run(work: Callable[[], object], poison: int) -> Snapshot:
        _restore(slots, stream, before)
        _poison(slots, sizes, stream, before, poison)
        work()
        return _read(slots, stream)

    eagerly, replayed = run(eager, 0), run(replay, 1)
    found = _first_difference(slots, sizes, eagerly, replayed)
    mismatch = None
    if found is not None:
        slot, index = found
        cause = Cause.FROZEN
        if _first_difference(slots, sizes, eagerly, run(eager, 0)) is not None:
            cause = Cause.UNREPEATABLE
        elif _first_difference(slots, sizes, eagerly, run(eager, 1)) is not None:
            cause = Cause.PADDING
        mismatch = SlotMismatch(
            slot.name,
            index,
            str(eagerly[slot.name][index]),
            str(replayed[slot.name][index]),
            cause,
        )
        _restore(slots, stream, eagerly)
    inputs = [s for s in slots if s.role is Role.INPUT]
    _restore(inputs, stream, before)
    stream.synchronize()
    return mismatch


def _read(slots: Sequence[Slot], stream: Stream) -> Snapshot:
    return {slot.name: slot.buffer.to_numpy(stream) for slot in slots}


def _restore(slots: Sequence[Slot], stream: Stream, values: Snapshot) -> None:
    for slot in slots:
        slot.buffer.copy_from(values[slot.name], stream)


def _poison(
    slots: Sequence[Slot], sizes: Mapping[str, int], stream: Stream, before: Snapshot, which: int
) -> None:
    for slot in slots:
        poisons, rows = slot.poisons(), slot.rows(sizes)
        if poisons is None or rows is None:
            continue
        padded = before[slot.name].copy()
        padded[rows:] = poisons[which]
        slot.buffer.copy_from(padded, stream)


def _first_difference(
    slots: Sequence[Slot], sizes: Mapping[str, int], left: Snapshot, right: Snapshot
) -> tuple[Slot, tuple[int, ...]] | None:
    for slot in slots:
        if slot.role is Role.INPUT:
            continue
        rows = slot.rows(sizes)
        a, b = left[slot.name][:rows] if rows is not None else left[slot.name], right[slot.name]
        b = b[:rows] if rows is not None else b
        itemsize = a.dtype.itemsize
        different = (
            np.ascontiguousarray(a).view(np.uint8).reshape(-1, itemsize)
            != np.ascontiguousarray(b).view(np.uint8).reshape(-1, itemsize)
        ).any(axis=1)
        if different.any():
            flat = int(np.flatnonzero(different)[0])
            return slot, tuple(int(i) for i in np.unravel_index(flat, a.shape))
    return None
