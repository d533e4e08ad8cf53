"""Capture: stream work becomes a graph, nothing runs, and it always ends.

States of a `Capture`:

    NEW -> begin() -> ACTIVE -> end()   -> ENDED   (graph)
                             -> abort() -> ABORTED (no graph; the first error is kept)

`capture(stream)` and `capture_function` drive them so that every path leaves ACTIVE.  Thread-local
mode is the default: in global mode, what any other thread of the process does (an allocation, a
query, a library's first call) breaks the capture.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ostinato.driver.api import CaptureMode, CaptureStatus, GraphHandle, NodeHandle
from ostinato.driver.location import caller_line, caller_location, describe_line
from ostinato.driver.stream import Operation, Stream
from ostinato.errors import (
    CaptureBrokenError,
    CaptureError,
    ContextPoisonedError,
    DriverError,
    NotCapturingError,
    OutOfMemoryError,
    Status,
    StreamCaptureError,
    explain,
)
from ostinato.graph.graph import Graph
from ostinato.graph.node import NodeLabel
from ostinato.graph.trace import LineTrace

if TYPE_CHECKING:
    from ostinato.memory import CapturePool

__all__ = ["Capture", "capture", "capture_function"]


class _State(enum.Enum):
    NEW = "new"
    ACTIVE = "under way"
    ENDED = "ended"
    ABORTED = "aborted"


class Capture:
    """One capture on one stream (and on the streams that are forked from it).

    `into` captures into an existing graph, such as a conditional body.  `pool`, if given, must be
    open.  `trace` looks after every line of Python for the first one that breaks the capture, also
    inside libraries that do not go through this one; it is slow, and for finding faults.
    """

    needs_access = False

    def __init__(
        self,
        stream: Stream,
        *,
        mode: CaptureMode = CaptureMode.THREAD_LOCAL,
        pool: CapturePool | None = None,
        into: Graph | None = None,
        trace: bool = False,
    ) -> None:
        self.stream = stream
        self.mode = mode
        self.pool = pool
        self._into = into
        self._trace = LineTrace(stream) if trace else None
        self._state = _State.NEW
        self._graph: Graph | None = None
        self._id = 0
        self._labels: dict[NodeHandle, NodeLabel] = {}
        self._keep: list[object] = []
        self._broken_at: str | None = None
        self._broken_by: DriverError | None = None
        self._forked_at: str | None = None
        """The last line that worked on a stream forked from this one."""
        self._thread = 0

    # --- Tap
    def submitted(self, stream: Stream, operation: Operation) -> None:
        """Notes which node an operation became, and the line, if it went into this capture."""
        info = stream.capture_info
        if info.status is CaptureStatus.INVALIDATED and stream is self.stream:
            self._note_broken(None)
        if info.status is not CaptureStatus.ACTIVE or info.capture_id != self._id:
            return
        self._keep.extend(operation.keep)
        location = caller_line()
        if stream is not self.stream and location is not None:
            self._forked_at = describe_line(*location)
        if len(info.dependencies) == 1:
            self._labels[info.dependencies[0]] = NodeLabel(operation, location)

    def waited(self, stream: Stream) -> None:
        """Notes the line that pulled another stream into this capture."""
        if stream is self.stream:
            return
        info = stream.capture_info
        if info.status is CaptureStatus.ACTIVE and info.capture_id == self._id:
            self._forked_at = caller_location()

    def failed(self, stream: Stream | None, error: DriverError) -> None:
        """Notes the line of the first refused call that can have broken this capture."""
        mine = threading.get_ident() == self._thread or self.mode is CaptureMode.GLOBAL
        if stream is self.stream or (mine and isinstance(error, StreamCaptureError)):
            self._note_broken(error)

    def _note_broken(self, error: DriverError | None) -> None:
        if self._broken_at is None:
            self._broken_at = caller_location()
            self._broken_by = error

    # --- begin and end
    def begin(self) -> Capture:
        """Begins the capture.

        Raises PoolSealedError before anything begins if the pool is sealed; CaptureError if this
        stream captures already or this Capture was used before.
        """
        if self._state is not _State.NEW:
            raise CaptureError(f"this capture is {self._state.value}; make a new one")
        if self.pool is not None:
            self.pool.require_open("a capture")
        stream, context = self.stream, self.stream.context
        context.require_open()
        context.collect()
        exclusive = self.mode is CaptureMode.GLOBAL
        self._thread = context.capture_begun(exclusive=exclusive)
        try:
            driver = context.driver
            if self._into is None:
                driver.stream_begin_capture(stream.handle, self.mode)
            else:
                leaves = _leaves(self._into)
                driver.stream_begin_capture_to_graph(
                    stream.handle, self._into.handle, leaves, self.mode
                )
            self._id = stream.capture_info.capture_id
        except DriverError as error:
            context.capture_ended(self._thread, exclusive=exclusive)
            if isinstance(error, ContextPoisonedError):
                raise
            reason = (
                "the stream is capturing already: end that capture first (they do not nest)"
                if error.status == Status.ILLEGAL_STATE
                else str(error)
            )
            raise CaptureError(f"a capture could not begin on {stream!r}: {reason}") from error
        self._state = _State.ACTIVE
        context.add_tap(self)
        if self._trace is not None:
            self._trace.start()
        return self

    def end(self) -> Graph:
        """Ends the capture; the graph.  The stream works again, also if this raises.

        Raises NotCapturingError if it is not under way, CaptureBrokenError with the line if
        something broke it, CaptureError if the driver gave no graph.
        """
        if self._state is not _State.ACTIVE:
            raise NotCapturingError(
                f"end of a capture that is {self._state.value}: begin() comes first, and ends once"
            )
        handle, error = self._finish()
        if error is not None:
            raise self._broken(error) from (self._broken_by or error)
        if not handle:
            raise CaptureError("the driver ended the capture without an error and without a graph")
        self._state = _State.ENDED
        if self._into is not None:
            self._into.labels.update(self._labels)
            self._into.keep.extend(self._keep)
            self._graph = self._into
        else:
            context = self.stream.context
            self._graph = Graph(context, handle, labels=self._labels, keep=self._keep)
        return self._graph

    def abort(self) -> DriverError | None:
        """Ends the capture without a graph; what the driver said, if it complained.

        Never raises; does nothing if the capture is not under way.
        """
        if self._state is not _State.ACTIVE:
            return None
        handle, error = self._finish()
        if handle and self._into is None:
            driver = self.stream.context.driver
            self.stream.context.retire(lambda: driver.graph_destroy(handle))
            self.stream.context.collect()
        return error

    def _finish(self) -> tuple[GraphHandle, DriverError | None]:
        """Leaves the driver's capture, whatever state it is in.  ABORTED, until it gave a graph."""
        context = self.stream.context
        if self._trace is not None:
            self._trace.stop()
        context.remove_tap(self)
        self._state = _State.ABORTED
        handle, failure = GraphHandle(0), None
        try:
            handle = context.driver.stream_end_capture(self.stream.handle)
        except DriverError as error:
            failure = error
        finally:
            context.capture_ended(self._thread, exclusive=self.mode is CaptureMode.GLOBAL)
        return handle, failure

    def _where(self) -> str | None:
        """The line that broke the capture: of a refused call of ours, else what the trace found."""
        return self._broken_at or (self._trace.broken_at if self._trace else None)

    def _broken(self, error: DriverError) -> Exception:
        if isinstance(error, ContextPoisonedError | OutOfMemoryError):
            return error
        where = self._where()
        if error.status == Status.STREAM_CAPTURE_UNJOINED:
            where = where or self._forked_at
        cause = self._broken_by or error
        meaning = explain(cause.status)
        place = f" at {where}" if where else ""
        hint = "" if where or self._trace else " capture(stream, trace=True) finds the line."
        return CaptureBrokenError(
            f"the capture was broken{place}: {cause.call} gave status {int(cause.status)}: "
            f"{meaning.meaning}. {meaning.advice}{hint} The stream works again.",
            location=where,
        )

    def explain_failure(
        self, error: BaseException, ended_with: DriverError | None
    ) -> Exception | None:
        """The error to raise in place of one that a broken capture caused, if it was one."""
        if isinstance(error, StreamCaptureError) or (
            isinstance(error, DriverError) and error is self._broken_by
        ):
            self._broken_by = self._broken_by or error
            return self._broken(error)
        if ended_with is not None and hasattr(error, "add_note"):
            where = self._where()
            at = f" at {where}" if where else ""
            error.add_note(f"the capture on {self.stream!r} was broken{at}: {ended_with}")
        return None

    # --- result
    @property
    def graph(self) -> Graph:
        """The captured graph.  Raises NotCapturingError before the capture has ended well."""
        if self._graph is None:
            raise NotCapturingError(f"the capture is {self._state.value}; it has no graph")
        return self._graph

    @property
    def active(self) -> bool:
        """Whether it is under way."""
        return self._state is _State.ACTIVE


def _leaves(graph: Graph) -> list[NodeHandle]:
    """The nodes that nothing depends on: what is captured next comes after them."""
    sources = {edge.source for edge in graph.edges}
    return [n for n in graph.context.driver.graph_nodes(graph.handle) if n not in sources]


@contextmanager
def capture(
    stream: Stream,
    *,
    mode: CaptureMode = CaptureMode.THREAD_LOCAL,
    pool: CapturePool | None = None,
    into: Graph | None = None,
    trace: bool = False,
) -> Iterator[Capture]:
    """Captures what the `with` block submits to `stream`; `capture.graph` afterwards.

    Nothing runs.  The capture ends on every path: an exception in the block is raised again as it
    was, unless it is the driver's refusal of something that cannot be captured, which becomes a
    CaptureBrokenError naming the line.  Raises what `Capture.begin` and `Capture.end` raise.
    """
    under_way = Capture(stream, mode=mode, pool=pool, into=into, trace=trace).begin()
    try:
        yield under_way
    except BaseException as error:
        ended_with = under_way.abort()
        better = under_way.explain_failure(error, ended_with)
        if better is not None and better is not error:
            raise better from error
        raise
    if under_way.active:  # the block may have ended it itself
        under_way.end()


def capture_function(
    stream: Stream,
    work: Callable[[], object],
    *,
    mode: CaptureMode = CaptureMode.THREAD_LOCAL,
    pool: CapturePool | None = None,
    trace: bool = False,
) -> Graph:
    """Captures what `work()` submits to `stream`.  Ends and cleans up as `capture` does."""
    with capture(stream, mode=mode, pool=pool, trace=trace) as under_way:
        work()
    return under_way.graph
