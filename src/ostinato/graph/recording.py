"""Record: launches run eagerly and are noted, and a graph is built from the notes.

Use it for work that stream capture refuses, or if the answer is needed at once: the recorded run is
a real run.  Edges follow from the memory that each operation reads and writes, so operations on
different memory may run side by side.  An event that code can still wait for when the graph is
built gets a node, after all that was recorded before it and before the rest.

Work that a graph cannot repeat breaks a recording, as it breaks a capture, but the run goes on:
bytes of the host copied to the device, waiting for the device, a stream that was not forked from
the recorded one, an event from outside.  Not noticed: launches of another library on the stream,
unless the library gets the stream during the recording.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ostinato.driver.api import (
    CaptureStatus,
    ChildGraphNodeParams,
    EventHandle,
    EventRecordNodeParams,
    NodeHandle,
)
from ostinato.driver.context import CallKind, Tap
from ostinato.driver.location import caller_line, caller_location, describe_line
from ostinato.driver.stream import Event, Operation, Stream, next_serial, require_stream
from ostinato.errors import (
    CaptureBrokenError,
    CaptureError,
    ClosedError,
    DriverError,
    GraphError,
)
from ostinato.graph.graph import Graph
from ostinato.graph.order import Recorded


@dataclass(frozen=True, slots=True)
class _Break:
    """The first reason why a recording is broken, and its line."""

    why: str
    location: str


@dataclass(frozen=True, slots=True)
class _Record:
    """The last record of an event inside: the number of operations recorded before it, the line,
    the handles of the event and of its stream, and whether the event was made inside."""

    index: int
    line: tuple[str, int] | None
    event: EventHandle
    stream: int
    made_inside: bool


class Recording(Tap):
    """The operations that one thread ran on one stream, and on streams forked from it, in order.

    `operations` are those recorded so far.
    """

    needs_access = True

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.operations: list[Recorded] = []
        self._thread = threading.get_ident()
        self._members = {int(stream.handle)}
        self._events: weakref.WeakKeyDictionary[object, _Record] = weakref.WeakKeyDictionary()
        """The events whose last record was inside, by the owner of the driver's event."""
        self._waited: weakref.WeakSet[object] = weakref.WeakSet()
        """The events among these for which work inside has waited."""
        self._forks: dict[int, str] = {}
        """The streams that wait for recorded work, by handle, and for which nothing inside has
        waited since, with the lines."""
        self._serial = next_serial()
        self._launched: list[tuple[Graph, tuple[NodeHandle, ...], str]] = []
        """Graphs that were launched, with their nodes at that time and the line."""
        self._broken: _Break | None = None
        self._did_more = False
        """True if a call ran that is no operation of the recording."""

    def __repr__(self) -> str:
        from ostinato.graph.show.outline import count_text

        broken = ", broken" if self._found() is not None else ""
        return f"<Recording of {count_text(len(self), 'operation')} on {self.stream!r}{broken}>"

    def _found(self) -> _Break | None:
        """Returns the reason why the recording is broken, or would break now, or None."""
        for owner, record in () if self._broken else list(self._events.items()):
            if record.made_inside and owner not in self._waited:
                return _Break(
                    "the event that is recorded there was made inside and is in use after it, and "
                    "a replay makes no other; make an event before, and record that one",
                    "unknown line" if record.line is None else describe_line(*record.line),
                )
        if self._broken is None and self._forks:
            return _Break(
                "a stream was made to wait for the recorded work there and is not joined again "
                "(stream.wait(side.record())), and a replay would not make it wait",
                next(iter(self._forks.values())),
            )
        return self._broken

    def _break(self, why: str, *, refused: bool = False) -> None:
        self._did_more |= not refused
        if self._broken is None:
            self._broken = _Break(why, caller_location())

    @property
    def did_nothing(self) -> bool:
        """True if a second run would repeat no work: there were refused calls only."""
        return not (self.operations or self._did_more)

    def _is_mine(self, stream: Stream) -> bool:
        """True if a call on the stream was work of the recording."""
        mine = threading.get_ident() == self._thread and int(stream.handle) in self._members
        return mine and not self._is_captured(stream)

    def _is_captured(self, stream: Stream) -> bool:
        """True if work on the stream goes into a capture now, also of another library."""
        try:
            return stream.is_capturing()
        except ClosedError:
            return False
        except DriverError as error:  # the work may have run, so no error may be raised
            self._note_refused(error)
            return False

    # --- Tap
    def entering(
        self, stream: Stream, what: str, kind: CallKind, operation: Operation | None
    ) -> None:
        """Notes work that a graph would lack.  Refuses nothing, because the run is a real one."""
        if threading.get_ident() != self._thread or kind is CallKind.ORDER:
            return
        if kind is CallKind.GIVE:
            self._break(f"{what}: what it launches there cannot be recorded")
        elif self._is_captured(stream):
            return  # the call does not run; a launch of its graph is recorded as one operation
        elif kind is CallKind.ONCE:
            self._break(f"{what} is not work that a graph can hold")
        elif int(stream.handle) not in self._members:
            self._break(
                f"{what} went to {stream!r}, which was not forked from the recorded stream "
                "(side.wait(stream.record()))"
            )

    def submitted(self, stream: Stream, operation: Operation) -> None:
        if not self._is_mine(stream):
            return
        self.operations.append(Recorded(operation, caller_line(), int(stream.handle)))
        if isinstance(operation.params, ChildGraphNodeParams):
            graph = operation.keep[0]
            assert isinstance(graph, Graph)
            try:
                self._launched.append((graph, _nodes(graph), caller_location()))
            except DriverError as error:  # the launch has run, so no error may be raised
                self._note_refused(error)

    def recorded(self, stream: Stream, event: Event) -> None:
        """Notes a record: an event inside can fork or join a stream; one from outside cannot."""
        self._events.pop(event.owner, None)
        self._waited.discard(event.owner)
        if event.owner is not None and self._is_mine(stream):
            self._did_more = True
            self._events[event.owner] = _Record(
                *(len(self.operations), caller_line(), event.handle, int(stream.handle)),
                event.serial > self._serial,
            )

    def waited(self, stream: Stream, event: Event) -> None:
        if threading.get_ident() != self._thread or self._is_captured(stream):
            return
        record = self._events.get(event.owner)
        if record is not None:
            self._waited.add(event.owner)
            self._members.add(int(stream.handle))
            if record.stream != stream.handle:
                self._forks.pop(record.stream, None)
                if stream.handle != self.stream.handle:
                    self._forks[int(stream.handle)] = caller_location()
        elif int(stream.handle) in self._members:
            self._break("the stream was made to wait for an event from outside of the recording")

    def awaited(self, event: Event | None) -> None:
        """Breaks the recording: values that the host reads after a wait and passes to later work
        become constants of the graph."""
        inside = event is not None and event.owner in self._events
        if threading.get_ident() == self._thread and (event is None or inside):
            what = "the device" if event is None else "an event of the recording"
            self._break(f"the host waited for {what}, or asked whether it was reached")

    def failed(self, stream: Stream | None, error: DriverError) -> None:
        """Breaks the recording after a refused call, also if the caller catches the error."""
        if stream is None or self._is_mine(stream):
            self._note_refused(error)

    def _note_refused(self, error: DriverError) -> None:
        why = f"the driver refused a call ({error.call}, status {int(error.status)})"
        self._break(why, refused=True)

    def __len__(self) -> int:
        return len(self.operations)

    def build(self, *, serial: bool = False) -> Graph:
        """Builds a graph of the recorded operations.

        `serial` chains them in order instead of by the memory that they access.  The edges do not
        follow later changes: two nodes that are patched or rebound to the same memory, and that had
        no memory in common before, have no order without `serial`.  Raises CaptureBrokenError with
        the line if work ran that a graph cannot repeat; GraphError if nothing was recorded or the
        driver refuses a node.  After an error no graph is left.
        """
        broken = self._found()
        for graph, nodes, location in self._launched:
            if not (broken or graph.closed) and _nodes(graph) != nodes:
                broken = _Break("nodes were added since to the graph that it launched", location)
        if broken is not None:
            raise CaptureBrokenError(
                f"the recording was broken at {broken.location}: {broken.why}. The run is done; a "
                "graph cannot repeat it.",
                location=broken.location,
            )
        return build_graph(self.stream, self._with_events(), serial=serial)

    def _with_events(self) -> list[Recorded]:
        """Returns the operations, and the records of events that code can still wait for."""
        result = list(self.operations)
        records = sorted(self._events.items(), key=lambda each: each[1].index)
        for owner, record in reversed(records if result else ()):
            operation = Operation(
                EventRecordNodeParams(record.event), "event record", keep=(owner,)
            )
            result.insert(record.index, Recorded(operation, record.line, record.stream))
        return result


def _nodes(graph: Graph) -> tuple[NodeHandle, ...]:
    return graph.context.driver.graph_nodes(graph.handle)


@contextmanager
def record(stream: Stream) -> Iterator[Recording]:
    """Notes the work that the `with` block runs on `stream`; `recording.build()` makes the graph.

    Raises CaptureError if the stream is capturing: then nothing would run.

        with ost.record(stream) as recording:
            answer = step(stream)
        run = recording.build().instantiate(upload=stream)
    """
    require_stream(stream, "record(stream)")
    if stream.capture_info().status is not CaptureStatus.NONE:
        raise CaptureError("a stream that is capturing runs nothing that could be recorded")
    recording = Recording(stream)
    with stream.context.tapped(recording):
        yield recording


def build_graph(stream: Stream, recorded: Sequence[Recorded], *, serial: bool = False) -> Graph:
    """Builds the graph of recorded operations; see `Recording.build`."""
    if not recorded:
        raise GraphError("nothing was recorded on the stream, so there is no graph to build")
    graph = Graph._create(stream.context)
    try:
        graph.add_recorded(recorded, serial=serial)
    except Exception:
        graph.close()
        raise
    return graph
