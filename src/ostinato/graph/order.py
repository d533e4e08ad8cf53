"""The order of recorded operations: dependencies by the memory that they read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.driver.api import (
    PROGRAMMATIC,
    ChildGraphNodeParams,
    EdgeData,
    KernelNodeParams,
    MemoryRange,
)
from ostinato.driver.stream import Operation


@dataclass(frozen=True, slots=True)
class Recorded:
    """One operation that ran, the line that submitted it, and the handle of its stream."""

    operation: Operation
    line: tuple[str, int] | None
    stream: int = 0


def edge_data(
    recorded: Sequence[Recorded], index: int, before: int | None, after: Sequence[int]
) -> list[EdgeData] | None:
    """Returns the data of all edges into one operation, programmatic for that from `before` (the
    launch before it on the stream) if the launch requests it.  None: all edges are plain."""
    params = recorded[index].operation.params
    if not (isinstance(params, KernelNodeParams) and params.config.programmatic):
        return None
    return [
        PROGRAMMATIC
        if i == before and isinstance(recorded[i].operation.params, KernelNodeParams)
        else EdgeData()
        for i in after
    ]


def dependencies(operations: Sequence[Operation]) -> list[list[int]]:
    """Returns, for each operation, the earlier ones it must wait for directly.

    Two operations are ordered if one writes memory that the other reads or writes, or if both set
    conditions; an operation whose memory is unknown is ordered against all.  Dependencies that
    follow from others are left out.  Host functions and child graphs count as unknown.
    """
    ancestors: list[int] = []  # bit i: operation i comes before
    result: list[list[int]] = []
    for index, operation in enumerate(operations):
        direct: list[int] = []
        seen = 0
        for earlier in range(index - 1, -1, -1):
            if seen >> earlier & 1:
                continue
            if conflict(operations[earlier], operation):
                direct.append(earlier)
                seen |= ancestors[earlier] | 1 << earlier
        ancestors.append(seen)
        result.append(sorted(direct))
    return result


def conflict(first: Operation, second: Operation) -> bool:
    """True if two operations must be ordered: one writes memory that the other reads or writes,
    both set conditions, or the memory of one is unknown."""
    if isinstance(first.params, ChildGraphNodeParams) or isinstance(
        second.params, ChildGraphNodeParams
    ):
        return True
    if first.reads is None or first.writes is None or second.reads is None or second.writes is None:
        return True
    if _sets_conditions(first) and _sets_conditions(second):
        return True
    return (
        overlap(first.writes, second.reads)
        or overlap(first.writes, second.writes)
        or overlap(first.reads, second.writes)
    )


def _sets_conditions(operation: Operation) -> bool:
    signature = operation.signature
    return signature is not None and any(p.type == "cond" for p in signature.parameters)


def overlap(left: Sequence[MemoryRange], right: Sequence[MemoryRange]) -> bool:
    """True if a range of one overlaps one of the other."""
    return any(a.overlaps(b) for a in left for b in right)
