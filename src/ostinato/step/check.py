"""The check of a replay: runs a call eagerly and by its graph, from the same state, and compares
the memory that the runs leave.

    before ──┬─ eagerly,  turn 0 ──▶ a
             ├─ replayed, turn 1 ──▶ b
             └─ replayed, turn 2 ──▶ c    if `Memory.turns` has it

A `Memory` of the door saves, poisons, compares and restores: `step.declared` for declared slots,
`interop.reading.checking` for the arrays of a function.

No check finds: work that no run does (a plan that was made once, outside of the call), pointers
in device memory, and concurrent work of other streams.  While a check runs, no other stream may
write memory that the graph points at.  docs/correctness.md has the whole list.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Content = TypeVar("Content")
"""The content of all memory of a check at one moment, with the result of the run that left it."""


class Cause(enum.StrEnum):
    """The cause of a failed check, as far as more eager runs can show."""

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
    INPUT_WRITTEN = 'the step changes an input; declare the slot "state"'
    UNWRITTEN = 'an output is not written in all rows in use; declare the slot "state"'
    OUTPUT_READ = 'an answer depends on what an output held before; declare the slot "state"'
    UNDECLARED = (
        'memory that no slot declares differs; declare it "state", or "scratch" if nothing reads it'
    )
    UNORDERED = "nothing orders two operations of the graph that use the same memory"
    FROZEN = "the graph lacks work of the step, or holds something that changed since its capture"


@dataclass(frozen=True, slots=True)
class Finding:
    """The first difference that a check found: the place, the values, and the cause."""

    where: str
    """ "slot 'x' at [0, 3]", "4 bytes at 0x7f…", or two operations."""
    what: str
    cause: Cause

    def __str__(self) -> str:
        return f"{self.where}: {self.what} ({self.cause})"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """One check of one graph, in bytes; `finding` is None if the graph passed."""

    declared: int
    """Bytes of slots that were compared."""
    undeclared: int
    """Bytes that no slot declares, that a run may write, and that were compared."""
    skipped: int
    """Bytes that no slot declares and that were not compared, because they exceed the limit."""
    finding: Finding | None


class Memory(ABC, Generic[Content]):
    """The memory that the runs of one check read and write."""

    @abstractmethod
    def nbytes(self) -> tuple[int, int, int]:
        """Returns the compared bytes, declared and undeclared, and the skipped bytes."""

    @abstractmethod
    def turns(self, eager: Content | None) -> Sequence[int]:
        """Returns the turns of the replays, from 1 on.  `eager`: the content after the eager run,
        or None if the replays come first."""

    @abstractmethod
    def read(self, result: Any = None, *, last: bool = False) -> Content:
        """Reads the content after a run that returned `result`.  `last`: no run follows."""

    @abstractmethod
    def start(self, before: Content, turn: int, eager: Content | None) -> Content:
        """Puts all memory back, poisons it for a turn, and returns the content before the run."""

    @abstractmethod
    def restore(self, before: Content) -> None:
        """Puts all memory back.  Raises StateLostError if the driver refuses that."""

    def fault(self, start: Content, end: Content) -> Finding | None:
        """Returns the first change by one run that no run may make, or None."""
        return None

    @abstractmethod
    def difference(
        self, before: Content, eager: Content, replayed: Content, turn: int
    ) -> Finding | None:
        """Returns the first difference between the contents after the two runs, or None."""

    def accept(self, before: Content) -> None:  # where the eager run comes last
        """Puts back, after a check that passed, all but the answer of the last replay."""


def check_runs(
    memory: Memory[Content],
    eager: Callable[[], object],
    replay: Callable[[int], object],
    *,
    once: bool = False,
) -> CheckReport:
    """Runs a call both ways and compares.  `replay` is called with its turn.

    After a check that passes, memory is as the last replay left it; after one that fails or
    raises, as before.  `once`: the eager run cannot be repeated, and its answer counts.  It then
    comes last, and memory stays as it left it; if a replay raises, memory is as before.

    Raises what a run raises, and StateLostError if memory cannot be put back.
    """
    before, settled = memory.read(), False

    def replayed(turn: int, a: Content | None) -> tuple[Content, Content]:
        start = memory.start(before, turn, a)
        return start, memory.read(replay(turn))

    try:
        early = {turn: replayed(turn, None) for turn in memory.turns(None)} if once else {}
        start = memory.start(before, 0, None)
        settled = once
        a = memory.read(eager(), last=once)
        # First: if nothing orders two operations, any run may have any result.
        finding = memory.fault(start, a)
        for turn in early or memory.turns(a):
            if finding is None:
                start, b = early.get(turn) or replayed(turn, a)
                finding = memory.fault(start, b) or memory.difference(before, a, b, turn)
        if finding is None and not once:
            memory.accept(before)
            settled = True
    finally:
        if not settled:
            memory.restore(before)
    return CheckReport(*memory.nbytes(), finding)
