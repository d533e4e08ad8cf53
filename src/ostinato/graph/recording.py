"""Record: launches run eagerly and are noted, and a graph is built from the notes by hand.

For work that stream capture cannot take, or when its answer is wanted at once: the recorded run is
a real run.  Edges come from what each operation reads and writes, so operations that touch
different memory may run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ostinato.driver.api import (
    CaptureStatus,
    ChildGraphNodeParams,
    EdgeData,
    EdgeType,
    KernelNodeParams,
    MemoryRange,
)
from ostinato.driver.location import caller_line
from ostinato.driver.stream import Operation, Stream
from ostinato.errors import CaptureError, DriverError, GraphError
from ostinato.graph.graph import Graph
from ostinato.graph.node import Node

__all__ = ["Recorded", "Recording", "add_recorded", "build_graph", "dependencies", "record"]

_PROGRAMMATIC = EdgeData(from_port=1, to_port=0, type=EdgeType.PROGRAMMATIC)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One operation that ran, and the line that submitted it."""

    operation: Operation
    line: tuple[str, int] | None


class Recording:
    """The operations that ran on one stream, in order."""

    needs_access = True

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.operations: list[Recorded] = []

    def submitted(self, stream: Stream, operation: Operation) -> None:
        if stream is self.stream:
            self.operations.append(Recorded(operation, caller_line()))

    def waited(self, stream: Stream) -> None:
        """Nothing to note: edges come from the memory that operations touch."""

    def failed(self, stream: Stream | None, error: DriverError) -> None:
        """Nothing to note: the caller sees the error, and what ran before stays recorded."""

    def __len__(self) -> int:
        return len(self.operations)

    def build(self, *, serial: bool = False) -> Graph:
        """A graph of what was recorded.

        `serial` chains everything in order instead of by memory touched.  Raises GraphError if
        nothing was recorded or the driver refuses a node; nothing is left behind then.
        """
        return build_graph(self.stream, self.operations, serial=serial)


@contextmanager
def record(stream: Stream) -> Iterator[Recording]:
    """Notes what the `with` block runs on `stream`; `recording.build()` makes the graph.

    Raises CaptureError if the stream is capturing: then nothing would run.
    """
    if stream.capture_info.status is not CaptureStatus.NONE:
        raise CaptureError("a stream that is capturing runs nothing that could be recorded")
    recording = Recording(stream)
    stream.context.add_tap(recording)
    try:
        yield recording
    finally:
        stream.context.remove_tap(recording)


def build_graph(stream: Stream, recorded: Sequence[Recorded], *, serial: bool = False) -> Graph:
    """The graph of recorded operations; see `Recording.build`."""
    if not recorded:
        raise GraphError("nothing was recorded on the stream, so there is no graph to build")
    graph = Graph.create(stream.context)
    try:
        add_recorded(graph, recorded, serial=serial)
    except BaseException:
        graph.close()
        raise
    return graph


def add_recorded(graph: Graph, recorded: Sequence[Recorded], *, serial: bool = False) -> list[Node]:
    """Adds recorded operations to a graph, with edges between them as in `Recording.build`."""
    operations = [r.operation for r in recorded]
    if serial:
        after = [[i - 1] if i else [] for i in range(len(operations))]
    else:
        after = dependencies(operations)
    nodes: list[Node] = []
    for index, entry in enumerate(recorded):
        operation = entry.operation
        nodes.append(
            graph.add(
                operation.params,
                [nodes[i] for i in after[index]],
                edge_data=_edge_data(operations, index, after[index]),
                operation=operation,
                line=entry.line,
            )
        )
    return nodes


def _edge_data(
    operations: Sequence[Operation], index: int, after: Sequence[int]
) -> list[EdgeData] | None:
    """A programmatic edge from the launch just before, where the launch was made so."""
    params = operations[index].params
    if not (isinstance(params, KernelNodeParams) and params.config.programmatic):
        return None
    return [
        _PROGRAMMATIC
        if i == index - 1 and isinstance(operations[i].params, KernelNodeParams)
        else EdgeData()
        for i in after
    ]


def dependencies(operations: Sequence[Operation]) -> list[list[int]]:
    """For each operation, the earlier ones it must wait for directly.

    Two operations are ordered if one writes what the other reads or writes; an operation whose
    memory is not known is ordered against all.  What follows from others is left out.
    Host functions and child graphs count as unknown.
    """
    ancestors: list[int] = []  # bit i: operation i comes before
    result: list[list[int]] = []
    for index, operation in enumerate(operations):
        direct: list[int] = []
        seen = 0
        for earlier in range(index - 1, -1, -1):
            if seen >> earlier & 1:
                continue
            if _conflict(operations[earlier], operation):
                direct.append(earlier)
                seen |= ancestors[earlier] | 1 << earlier
        ancestors.append(seen)
        result.append(sorted(direct))
    return result


def _conflict(first: Operation, second: Operation) -> bool:
    if isinstance(first.params, ChildGraphNodeParams) or isinstance(
        second.params, ChildGraphNodeParams
    ):
        return True
    if first.reads is None or first.writes is None or second.reads is None or second.writes is None:
        return True
    return (
        _overlap(first.writes, second.reads)
        or _overlap(first.writes, second.writes)
        or _overlap(first.reads, second.writes)
    )


def _overlap(left: Sequence[MemoryRange], right: Sequence[MemoryRange]) -> bool:
    return any(a.address < b.end and b.address < a.end for a in left for b in right)
