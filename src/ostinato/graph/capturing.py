"""Capture: stream work becomes a graph, and nothing runs.  A capture ends on every path.

States of a `Capture`:

    NEW -> begin() -> ACTIVE -> end()   -> ENDED   (graph)
                             -> abort() -> ABORTED (no graph; the first error is kept)

With `capture(stream)` and `capture_function` every path leaves ACTIVE.  A `Capture` that is dropped
while it is ACTIVE is ended by the context.  Thread-local mode is the default: in global mode, calls
of any other thread of the process (an allocation, a query, a library's first call) break the
capture.

While a thread captures a stream, calls of other threads on that stream are refused before they
reach the driver, so they neither join the capture nor break it.  In relaxed mode they are allowed.

An event that is recorded in a capture orders the work of the streams that wait for it there, by
edges.  If code outside can still wait for the event when the capture ends, the graph gets a node
that records it, at the place of its last record, so that each launch records it as eager work does.
"""

from __future__ import annotations

import enum
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, _GeneratorContextManager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

from ostinato.driver.api import (
    CaptureInfo,
    CaptureMode,
    CaptureStatus,
    Driver,
    EmptyNodeParams,
    EventHandle,
    EventRecordNodeParams,
    GraphHandle,
    NodeHandle,
    NodeKind,
    named_choice,
)
from ostinato.driver.closeable import elsewhere
from ostinato.driver.context import CallKind, Tap
from ostinato.driver.interrupts import uninterrupted
from ostinato.driver.location import caller_line, caller_location, describe_line
from ostinato.driver.stream import Event, Operation, Stream, next_serial, require_stream
from ostinato.errors import (
    CaptureBrokenError,
    CaptureError,
    ClosedError,
    ContextPoisonedError,
    DriverError,
    GraphError,
    InputError,
    NotCapturingError,
    OutOfMemoryError,
    Status,
    StreamCaptureError,
    explain,
)
from ostinato.graph.frozen import graphs_inside
from ostinato.graph.graph import Graph
from ostinato.graph.node import NodeLabel
from ostinato.graph.submissions import Submission
from ostinato.graph.trace import LineTrace
from ostinato.memory import CapturePool

_NOT_BEGUN = "the stream is capturing already: end that capture first (they do not nest)"
_INSIDE = (
    "Submit it to the stream that is captured, or fork this one from it "
    "(side.wait(stream.record())) and join it again (stream.wait(side.record()))."
)
ModeName: TypeAlias = Literal["global", "thread_local", "relaxed"]
"""The name of a `CaptureMode`."""
_PATIENCE = 10.0
"""Seconds that a beginning capture waits for other threads' calls."""


class _State(enum.Enum):
    NEW = "new"
    ACTIVE = "under way"
    ENDED = "ended"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class _Record:
    """The last record of an event in a capture.

    `after`: the nodes behind which it was recorded.  `gate`: for an event with timing, an empty
    node that later work of the stream waits for, and that will wait for the event's node.
    `made_inside`: whether the event was made in the capture.  `stream`: the handle of the stream.
    """

    event: EventHandle
    after: tuple[NodeHandle, ...]
    gate: NodeHandle | None
    line: tuple[str, int] | None
    made_inside: bool
    stream: int


def _broken_at(location: str | None, why: str) -> CaptureBrokenError:
    place = location or "unknown line"
    return CaptureBrokenError(f"the capture was broken at {place}: {why}", location=place)


class _Session(Tap):
    """One capture in the driver, and the tap that follows the work in it.

    The session has no reference to its `Capture`, so that a dropped `Capture` is finalised, and the
    context ends the capture.  `leave` may be called at any time and repeatedly.
    """

    def __init__(
        self, stream: Stream, mode: CaptureMode, into: Graph | None, contained: bool, trace: bool
    ) -> None:
        self.stream = stream
        self.mode = mode
        self.into = into
        self.contained = contained
        self.trace = LineTrace(stream) if trace else None
        self.handle = GraphHandle(0)
        """The graph that the driver returned at the end, until a `Graph` owns it."""
        self.failure: DriverError | None = None
        """The driver's error at the end of the capture."""
        self.labels: dict[NodeHandle, NodeLabel] = {}
        self.keep: list[object] = []
        self.noted: list[NodeLabel] = []
        """The operations that went into this capture, in order."""
        self.refusal: CaptureBrokenError | None = None
        """The error for refused work that the graph would lack."""
        self.broken_at: str | None = None
        self.broken_by: DriverError | None = None
        self.forked_at: str | None = None
        """The last line that used a stream forked from the captured one."""
        self.records: weakref.WeakKeyDictionary[object, _Record] = weakref.WeakKeyDictionary()
        """The last record of each event in this capture, by the owner of the driver's event."""
        self.forks: dict[int, str] = {}
        """The streams that wait for captured work, by handle, and for which nothing in the capture
        has waited since, with the lines."""
        self.gates: set[NodeHandle] = set()
        self._id = 0
        self._serial = 0
        """A number below the serials of all events that are made in the capture."""
        self._thread = 0
        self._in_driver = False
        self._before: frozenset[NodeHandle] | None = None
        """The nodes that `into` had when the capture began."""

    # --- begin and end
    def enter(self) -> None:
        """Registers the capture and its tap; it is not begun yet.  The caller must call `leave`,
        also after an error."""
        stream, context = self.stream, self.stream.context
        context.require_open()
        context.collect()
        self._thread = threading.get_ident()
        if stream.is_capturing():
            raise CaptureError(f"a capture could not begin on {stream!r}: {_NOT_BEGUN}")
        context.capture_begun(self, exclusive=self.mode is CaptureMode.GLOBAL)
        # Before the driver's call: later submissions of other threads are refused, and those under
        # way must not join the capture.
        context.add_tap(self)

    def begin(self) -> None:
        """Begins the capture, after `enter` and `wait_for_others`."""
        stream, driver = self.stream, self.stream.context.driver
        try:
            if self.into is None:
                driver.stream_begin_capture(stream.handle, self.mode)
            else:
                leaves, into = _leaves(self.into), self.into.handle
                self._before = frozenset(driver.graph_nodes(into))
                self.into.recount()
                driver.stream_begin_capture_to_graph(stream.handle, into, leaves, self.mode)
        except ContextPoisonedError:
            raise
        except DriverError as error:
            reason = _NOT_BEGUN if error.status == Status.ILLEGAL_STATE else str(error)
            raise CaptureError(f"a capture could not begin on {stream!r}: {reason}") from error
        self._in_driver = True
        self._serial = next_serial()
        self._id = stream.capture_info().capture_id
        if self.trace is not None:
            self.trace.start()

    def wait_for_others(self) -> None:
        """Waits until no other thread is putting work on the stream.  Raises CaptureError if a
        thread does not return from the driver."""
        stream, end = self.stream, time.monotonic() + _PATIENCE
        while any(thread != self._thread for thread in tuple(stream.submitting)):
            if time.monotonic() > end:
                raise CaptureError(
                    f"a capture could not begin on {stream!r}: for {_PATIENCE:.0f} s another "
                    "thread has been putting work on it; let threads take turns on a stream"
                )
            time.sleep(0)

    def leave(self) -> None:
        """Ends the driver's capture in any state; sets `handle` or `failure`."""
        context = self.stream.context
        try:
            if self.trace is not None:
                self.trace.stop()
            context.remove_tap(self)
            if self._in_driver:
                self._in_driver = not self._ended_in_driver()
        finally:
            if not self._in_driver:
                context.capture_ended(self)

    def _ended_in_driver(self) -> bool:
        """Ends the capture in the driver.  Returns False if the driver refused that, so that the
        capture is still under way."""
        driver, stream = self.stream.context.driver, self.stream.handle
        for _ in range(2):
            try:
                self.handle = driver.stream_end_capture(stream)
                return True
            except ContextPoisonedError as error:
                self.failure = error
                return True
            except ClosedError:  # it has ended, or this is a forked child, which has no capture
                return True
            except DriverError as error:
                self.failure = self.failure or error
            try:
                info = driver.stream_capture_info(stream)
            except DriverError:
                return False
            # The driver gives no number for a broken capture.
            broken = info.status is CaptureStatus.INVALIDATED
            mine = broken or not self._id or info.capture_id == self._id
            if info.status is CaptureStatus.NONE or not mine:
                return True
        return False

    @uninterrupted
    def drop(self) -> None:
        """Ends the capture and drops its graph, or removes its nodes from the graph that it went
        into.  Does not raise."""
        self.leave()
        if self._in_driver:
            self.stream.context.abandon(self.drop)  # the context tries again later
            return
        before, self._before = self._before, None
        if self.into is not None and before is not None:
            self._take_back(self.into, before)
        handle, self.handle = self.handle, GraphHandle(0)
        if handle and self.into is None:
            context = self.stream.context
            driver = context.driver
            context.retire(lambda: driver.graph_destroy(handle))
            context.collect()

    def grew(self, graph: Graph) -> bool:
        """True if the graph has nodes of work that it did not have at the begin."""
        nodes = graph.context.driver.graph_nodes(graph.handle)
        return frozenset(nodes) - self.gates != (self._before or frozenset())

    def add_records(self, graph: Graph) -> None:
        """Adds a node for each event that code outside can wait for after the capture.

        Raises CaptureBrokenError with the line if the graph cannot have such a node;
        ContextPoisonedError, OutOfMemoryError.
        """
        for owner, record in list(self.records.items()):
            params = EventRecordNodeParams(record.event)
            location = None if record.line is None else describe_line(*record.line)
            if self.contained and record.made_inside:
                raise _broken_at(
                    location,
                    "the event that is recorded there was made in the run and is in use after it. "
                    "Replays make no other, so all would record this one. Make an event before, "
                    "and record that one (stream.record(event)).",
                )
            try:
                node = graph.add(params, after=record.after, keep=(owner,), line=record.line)
                if record.gate is not None:
                    graph.add_edges([(node, record.gate)])
            except GraphError as error:
                if isinstance(error.__cause__, ContextPoisonedError | OutOfMemoryError):
                    raise error.__cause__ from None
                raise _broken_at(
                    location,
                    "an event was recorded there that is still in use after the capture, and the "
                    f"graph cannot record it: {error}. Record it before or after, or let go of it "
                    "inside the capture (side.wait(stream.record())).",
                ) from error

    def _take_back(self, into: Graph, before: frozenset[NodeHandle]) -> None:
        """Restores a graph to the state before a capture that went into it and broke.

        Driver 580 destroys the graph instead if a refused call broke the capture (measured), and a
        call with the handle of a destroyed graph may succeed (also measured): then no call is made.
        """
        if isinstance(self.failure, StreamCaptureError) and not self.handle:
            into.lose(
                "a capture into this graph or a body in it broke, and the driver destroyed what it "
                f"went into ({self.failure}); make the graph again"
            )
            return
        driver = into.context.driver
        try:
            nodes = driver.graph_nodes(into.handle)
            for node in reversed(nodes):
                if node not in before:
                    inside = list(_inside(driver, node))
                    driver.graph_remove_node(node)
                    for gone in (node, *inside):  # a later node may get the handle
                        into.labels.pop(gone, None)
        except (ClosedError, ContextPoisonedError):
            pass  # no launch is possible any more
        except DriverError as error:
            into.keep.extend(self.keep)
            into.spoil(
                "a capture into it broke, and its half of the work cannot be taken out again "
                f"({error}); make the graph again"
            )

    # --- Tap
    def entering(
        self, stream: Stream, what: str, kind: CallKind, operation: Operation | None
    ) -> None:
        """Refuses other threads' calls on a captured stream, and work that the graph would lack."""
        if threading.get_ident() != self._thread:
            if self.mode is not CaptureMode.RELAXED and self._holds(stream):
                raise CaptureError(
                    f"{what}: another thread is capturing {stream!r}, and this call would go into "
                    "its graph; nothing was done. Give each thread a stream of its own, or wait "
                    "until the capture has ended"
                )
            return
        work = kind in (CallKind.WORK, CallKind.ONCE)
        if self.contained and work and not self._holds(stream):
            self._refuse(
                f"{what} went to {stream!r}, which is not in the capture, so the graph would lack "
                f"it; it did not run. {_INSIDE}"
            )

    def _refuse(self, why: str) -> NoReturn:
        """Refuses work that the graph would lack: now, and at the end if the error is caught."""
        self.refusal = self.refusal or _broken_at(caller_location(), why)
        raise self.refusal

    def _holds(self, stream: Stream) -> bool:
        """True if a stream is in this capture."""
        if stream.handle == self.stream.handle:
            return True
        info = stream.capture_info()
        # The driver gives no number for a broken capture.
        return info.status is CaptureStatus.INVALIDATED or (
            info.status is CaptureStatus.ACTIVE and info.capture_id == self._id
        )

    def submitted(self, stream: Stream, operation: Operation) -> None:
        """Notes the node and the line of an operation, if it went into this capture."""
        info = self._place(stream, operation.name)
        if info is None:
            return
        self.keep.extend(operation.keep)
        line = caller_line(2)  # `Stream.announce` calls this
        if stream is not self.stream and line is not None:
            self.forked_at = describe_line(*line)
        label = NodeLabel(operation, line)
        if len(info.dependencies) == 1:
            self.labels[info.dependencies[0]] = label
        self.noted.append(label)

    def _place(self, stream: Stream, what: str) -> CaptureInfo | None:
        """Returns a stream's place in this capture after `what`; None for a stream outside."""
        try:
            info = stream.context.driver.stream_capture_info(stream.handle)
        except DriverError as error:  # the graph would not keep what the node points at
            self.refusal = self.refusal or _broken_at(
                caller_location(),
                f"after {what} the driver refused to say what is captured ({error})",
            )
            return None  # raised at the end: the work may have run, on a stream outside
        if info.status is CaptureStatus.INVALIDATED and stream is self.stream:
            self._note_broken(None)
        if info.status is not CaptureStatus.ACTIVE or info.capture_id != self._id:
            return None
        return info

    def recorded(self, stream: Stream, event: Event) -> None:
        """Notes the place of an event's record in this capture."""
        info = self._place(stream, "a record of an event")
        if info is None:
            self._require_contained(stream, "an event was recorded on")
            return
        after, gate, line = info.dependencies, None, caller_line()
        if event.timing:  # the time counts before all later work, which must wait for its node
            driver = stream.context.driver
            try:
                gate = driver.graph_add_node(info.graph, after, EmptyNodeParams())
                driver.stream_set_capture_dependencies(stream.handle, [gate])
                driver.event_record(event.handle, stream.handle)
            except DriverError as error:
                self._refuse(f"the record of an event with timing cannot be captured ({error}).")
            self.gates.add(gate)
            self.labels[gate] = NodeLabel(None, line)
        if event.owner is not None:
            inside = event.serial > self._serial
            self.records[event.owner] = _Record(
                event.handle, after, gate, line, inside, int(stream.handle)
            )

    def waited(self, stream: Stream, event: Event) -> None:
        """Notes the line that pulled another stream into this capture; refuses a wait for an event
        that was never recorded, which the driver would ignore."""
        if self._place(stream, "a wait for an event") is None:
            self._require_contained(stream, "an event is waited for on")
            return
        if stream is not self.stream:
            self.forked_at = caller_location()
        record = self.records.get(event.owner)
        if record is not None and record.stream != stream.handle:
            self.forks.pop(record.stream, None)
            if stream.handle != self.stream.handle:
                self.forks[stream.handle] = caller_location()
        if record is None:
            self._refuse(
                f"{stream!r} was made to wait for an event that was not recorded in the capture, "
                "so the graph would not wait for it. Wait for it before each launch, or add a node "
                "that does (graph.add_event_wait(event))."
            )

    def require_joined(self) -> None:
        """Refuses the end of a `contained` capture that leaves a stream waiting: CUDA requires a
        join only if that stream has captured work."""
        if self.contained and self.forks:
            self.refusal = self.refusal or _broken_at(
                next(iter(self.forks.values())),
                "a stream was made to wait for the captured work there and is not joined again, "
                "and replays would not make it wait. Let it wait after the call, or for an event "
                "that was made before (stream.record(event); after the call: side.wait(event)).",
            )

    def _require_contained(self, stream: Stream, what: str) -> None:
        """Refuses, in a `contained` capture, an order of work outside, which replays would lack."""
        mine = threading.get_ident() == self._thread
        if self.contained and mine and not self._holds(stream):
            self._refuse(
                f"{what} {stream!r}, which is not in the capture, so replays would lack that. "
                f"{_INSIDE}"
            )

    def fills(self, graph: GraphHandle, what: str) -> Stream | None:
        """Returns this capture's stream if it fills the graph; refuses changes of other threads."""
        if not self._in_driver:
            return None
        info = self.stream.context.driver.stream_capture_info(self.stream.handle)
        mine = (info.graph, info.capture_id) == (graph, self._id)
        if info.status is not CaptureStatus.ACTIVE or not mine:
            return None
        if threading.get_ident() != self._thread and self.mode is not CaptureMode.RELAXED:
            raise CaptureError(
                f"{what}: another thread is capturing {self.stream!r} into this graph; nothing was "
                "done. Wait until the capture has ended"
            )
        return self.stream

    def added(self, graph: object, node: NodeHandle, label: object) -> None:
        assert isinstance(label, NodeLabel)
        self.labels[node] = label
        self.noted.append(label)
        if graph is not self.into:
            self.keep.append(graph)

    def failed(self, stream: Stream | None, error: DriverError) -> None:
        """Notes the line of the first refused call that can have broken this capture."""
        mine = threading.get_ident() == self._thread or self.mode is CaptureMode.GLOBAL
        if stream is self.stream or (mine and isinstance(error, StreamCaptureError)):
            self._note_broken(error)

    def _note_broken(self, error: DriverError | None) -> None:
        if self.broken_at is None:
            self.broken_at = caller_location()
            self.broken_by = error

    # --- errors
    def _where(self) -> str | None:
        """Returns the line that broke the capture: of a refused call, else the trace's; or None."""
        return self.broken_at or (self.trace.broken_at if self.trace else None)

    def broken(self, error: DriverError) -> Exception:
        """Returns the error to raise for a driver's error at the end of the capture."""
        if isinstance(error, ContextPoisonedError | OutOfMemoryError):
            return error
        where = self._where()
        if error.status == Status.STREAM_CAPTURE_UNJOINED:
            where = where or self.forked_at
        cause = self.broken_by or error
        meaning = explain(cause.status)
        place = f" at {where}" if where else ""
        hint = "" if where or self.trace else " capture(stream, trace=True) finds the line."
        if hint and cause.status == Status.STREAM_CAPTURE_INVALIDATED:
            hint += (
                " If none is found, another thread broke it: on a blocking stream, any thread's "
                "work on the legacy default stream does."
            )
        after = (
            "The driver refused to end it as well, so the stream captures until a later call can."
            if self._in_driver
            else "The stream works again."
        )
        return CaptureBrokenError(
            f"the capture was broken{place}: {cause.call} gave status {int(cause.status)}: "
            f"{meaning.meaning}. {meaning.advice}{hint} {after}",
            location=where,
        )

    def explanation(self, error: BaseException) -> Exception | None:
        """Returns the error to raise in place of one that left the block; None to keep that one."""
        if isinstance(error, StreamCaptureError) or (
            isinstance(error, DriverError) and error is self.broken_by
        ):
            self.broken_by = self.broken_by or error
            return self.broken(error)
        if self.failure is not None and error is not self.refusal and hasattr(error, "add_note"):
            where = self._where()
            at = f" at {where}" if where else ""
            error.add_note(f"the capture on {self.stream!r} was broken{at}: {self.failure}")
        return None


class Capture:
    """One capture on one stream (and on the streams that are forked from it).

    `mode`: which calls break the capture while it is under way.  "thread_local": those of this
    thread that captures forbid, and a wait for the whole device by any thread; "global": those of
    any thread; "relaxed": only those that would have to wait for the capture, and the caller must
    know that others are safe.  `into` captures into an existing graph, such as a
    conditional body.  A node that the block adds to the graph by hand takes its place in the
    capture: it waits for the work captured before on `stream`, and the work captured there next
    waits for it.  After an exception in the block the graph is as it was before.  A call that
    the driver refuses may cost the graph: CUDA destroys it with the capture, and later uses of it
    raise GraphError.  `pool`: one from which the work allocates; it must be open.  `contained`
    refuses everything that replays of a function's graph would lack: work that this thread submits
    to a stream outside of the capture, where it would run at once; events that it records or waits
    for there; an event that it makes, records and keeps, since replays make no new one; and a
    stream that waits for the work and is not joined again.  `trace` checks the capture after every
    line of Python and finds the first line that breaks it, also inside other libraries; it is slow,
    and only for debugging.  Raises InputError for arguments of the wrong type.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        mode: ModeName = "thread_local",
        pool: CapturePool | None = None,
        into: Graph | None = None,
        contained: bool = False,
        trace: bool = False,
    ) -> None:
        require_stream(stream, "capture(stream)")
        forbids = named_choice("mode", mode, CaptureMode)
        if not isinstance(into, Graph | None):
            raise InputError(
                f"into: a Graph is needed, not {type(into).__name__} (a conditional's is one of "
                "its .bodies)"
            )
        if not isinstance(pool, CapturePool | None):
            raise InputError(f"pool: a CapturePool is needed, not {type(pool).__name__}")
        if pool is not None and pool.context is not stream.context:
            theirs, ours = pool.context.space.name, stream.context.space.name
            raise InputError(f"the pool is of another device ({theirs}) than the stream ({ours})")
        if into is not None:
            stream.context.require_same(into.context, "into: the graph", "the stream is of")
        self.stream = stream
        self.mode = mode
        self.pool = pool
        self._session = _Session(stream, forbids, into, contained, trace)
        self._state = _State.NEW
        self._graph: Graph | None = None
        self._finalizer: weakref.finalize[..., Capture] | None = None

    def __repr__(self) -> str:
        return f"<Capture on {self.stream!r}, {self._state.value}>"

    def begin(self) -> Capture:
        """Begins the capture.

        Raises PoolSealedError, before anything begins, if the pool is sealed; CaptureError if this
        stream already captures or this Capture was used before.
        """
        if self._state is not _State.NEW:
            raise CaptureError(f"this capture is {self._state.value}; make a new one")
        if self.pool is not None:
            self.pool.require_open("a capture")
        session = self._session
        try:
            with uninterrupted:
                self._finalizer = weakref.finalize(self, self.stream.context.abandon, session.drop)
                self._finalizer.atexit = False
                session.enter()
            session.wait_for_others()
            with uninterrupted:
                session.begin()
                self._state = _State.ACTIVE
        except BaseException:  # also if the wait is interrupted
            self._abort()
            self._state = _State.NEW if session.failure is None else _State.ABORTED
            raise
        return self

    @uninterrupted
    def end(self) -> Graph:
        """Ends the capture and returns the graph.  The stream works again, also after an error.

        Raises NotCapturingError if it is not under way, CaptureBrokenError with the line if a call
        broke it, CaptureError if nothing was captured or the driver returned no graph, ClosedError
        if the device was closed.
        """
        if self._state is not _State.ACTIVE:
            raise NotCapturingError(
                f"end of a capture that is {self._state.value}: begin() comes first, and ends once"
            )
        session = self._session
        session.leave()
        self._state = _State.ABORTED  # until there is a graph
        if session.failure is not None:
            self._abort()
            self.stream.context.require_open()
            raise session.broken(session.failure) from (session.broken_by or session.failure)
        try:
            session.require_joined()
            if session.refusal is not None:
                raise session.refusal
            if not session.handle:
                raise CaptureError(
                    "the driver ended the capture without an error and without a graph"
                )
            self._graph = self._take_graph(session)
        except Exception:
            self._abort()
            raise
        self._detach()
        self._state = _State.ENDED
        return self._graph

    def _take_graph(self, session: _Session) -> Graph:
        """Makes the `Graph` that owns the graph of the driver."""
        context, into = self.stream.context, session.into
        handle, session.handle = session.handle, GraphHandle(0)
        nothing = CaptureError(
            f"nothing was captured: no work reached {self.stream!r} while it was captured. "
            "Work on another stream is not in the graph: submit it to this one, or fork the "
            "other from it with an event; other libraries must be given this stream"
        )
        if into is not None:
            if not session.noted and not session.grew(into):
                raise nothing
            session.add_records(into)
            into.labels.update(session.labels)
            into.keep.extend(session.keep)
            return into
        graph = Graph(context, handle, labels=session.labels, keep=session.keep)
        try:
            if not session.noted and not session.grew(graph):
                raise nothing
            session.add_records(graph)
        except Exception:
            graph.close()
            raise
        return graph

    @uninterrupted
    def abort(self) -> DriverError | None:
        """Ends the capture without a graph; returns the driver's error, if any.

        Does not raise; does nothing if the capture is not under way.
        """
        if self._state is not _State.ACTIVE:
            return None
        self._abort()
        self._state = _State.ABORTED
        return self._session.failure

    def _abort(self) -> None:
        self._session.drop()
        self._detach()

    def _detach(self) -> None:
        """Detaches the finaliser: the capture has ended, so it must not be ended again."""
        if self._finalizer is not None:
            self._finalizer.detach()

    def explanation(self, error: BaseException) -> Exception | None:
        """Returns the error to raise in place of one that left the block, if a broken capture
        caused it; else None."""
        return self._session.explanation(error)

    # --- result
    @property
    def graph(self) -> Graph:
        """The captured graph.  Raises NotCapturingError before a successful end."""
        if self._graph is None:
            raise NotCapturingError(
                f"the capture is {self._state.value}; it has a graph only after it ended well"
            )
        return self._graph

    @property
    def active(self) -> bool:
        """True while the capture is under way."""
        return self._state is _State.ACTIVE

    @property
    def submissions(self) -> tuple[Submission, ...]:
        """The operations that this library put into the capture so far, in order."""
        noted = self._session.noted
        return tuple(Submission(made.operation.name, made.line) for made in noted if made.operation)


def _inside(driver: Driver, node: NodeHandle) -> Iterator[NodeHandle]:
    """Yields the nodes inside a node that was added by hand."""
    if driver.node_kind(node) in (NodeKind.CHILD_GRAPH, NodeKind.CONDITIONAL):
        for graph in graphs_inside(driver.node_params(node)):
            for inner in driver.graph_nodes(graph):
                yield inner
                yield from _inside(driver, inner)


def _leaves(graph: Graph) -> list[NodeHandle]:
    """Returns the nodes on which no other depends: the next captured work depends on them."""
    sources = {edge.source for edge in graph.edges()}
    return [n for n in graph.context.driver.graph_nodes(graph.handle) if n not in sources]


@elsewhere(
    **dict.fromkeys(
        ("graph", "begin", "end"),
        "capture() is for `with`: with ost.capture(stream) as capture: …; then capture.graph",
    )
)
class _Block(_GeneratorContextManager[Capture]):
    """The context manager that `capture` returns."""


def capture(
    stream: Stream,
    *,
    mode: ModeName = "thread_local",
    pool: CapturePool | None = None,
    into: Graph | None = None,
    contained: bool = False,
    trace: bool = False,
) -> AbstractContextManager[Capture]:
    """Captures the work that the `with` block submits to `stream`; `capture.graph` is the result.

    Nothing runs.  The capture ends on every path: an exception in the block is raised again
    unchanged, except the driver's refusal of a call that cannot be captured, which becomes a
    CaptureBrokenError with the line.  Options as for `Capture`.  Raises the errors of
    `Capture.begin` and `Capture.end`.

        with ost.capture(stream) as capture:
            ost.launch(stream, kernel, config, x, n)
        run = capture.graph.instantiate(upload=stream)
    """
    options = {"mode": mode, "pool": pool, "into": into, "contained": contained, "trace": trace}
    return _Block(_captured, (stream,), options)


def _captured(stream: Stream, **options: Any) -> Generator[Capture, None, None]:
    under_way = Capture(stream, **options)
    try:  # all inside: an interruption may come right after `begin`
        under_way.begin()
        yield under_way
        if under_way.active:  # the block may have ended it itself
            under_way.end()
    except BaseException as error:
        under_way.abort()
        better = under_way.explanation(error)
        if better is not None and better is not error:
            raise better from error
        raise


def capture_function(
    stream: Stream,
    work: Callable[[], object],
    *,
    mode: ModeName = "thread_local",
    pool: CapturePool | None = None,
    trace: bool = False,
) -> Graph:
    """Captures the work that `work()` submits to `stream`, and returns the graph.

        graph = ost.capture_function(stream, lambda: step(stream))

    Options and errors are those of `capture`.
    """
    with capture(stream, mode=mode, pool=pool, trace=trace) as under_way:
        work()
    return under_way.graph
