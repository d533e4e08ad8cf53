"""Streams and events of the host driver, and the captures that they join.

States of a stream: not capturing; capturing (`HostStream.capture` is set: the stream began the
capture, or an event pulled it in); its capture is broken (`HostCapture.broken` is set: all calls
but the end of the capture are refused with 901).  Ending the capture, broken or not, frees all its
streams.

Callers of methods must hold the driver's lock, except for `HostCaptures.forbid`, which takes it,
and `exchange_mode`, which needs none.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from ostinato.driver.api import (
    PROGRAMMATIC,
    CaptureInfo,
    CaptureMode,
    CaptureStatus,
    EventHandle,
    KernelNodeParams,
    NodeHandle,
    NodeKind,
    NodeParams,
    StreamHandle,
)
from ostinato.driver.host.definition import DefinitionNode, GraphDefinition, ancestors
from ostinato.driver.host.handles import invalid
from ostinato.driver.host.queue import Mark, WorkQueue
from ostinato.errors import Status, driver_error
from ostinato.records import dataclass

_numbers = itertools.count(1)

_ENDED = "the event was recorded in a capture that has ended: record it again"


@dataclass(slots=True, eq=False)
class HostStream:
    """A stream: a queue that runs its work and, while it captures, a place in a graph."""

    handle: StreamHandle
    queue: WorkQueue
    blocking: bool = False
    """True if it and the legacy stream wait for each other, and for the legacy stream itself."""
    capture: HostCapture | None = None
    """The capture under way on it, or None."""
    dependencies: tuple[DefinitionNode, ...] = ()
    """The nodes that its next node depends on, while it captures."""
    destroyed: bool = False

    def refuse_capturing(self, call: str) -> None:
        """Raises 900 and breaks the capture if the stream captures (broken already or not)."""
        capture = self.capture
        if capture is not None:
            capture.broken = True
            detail = f"stream {self.handle:#x} is capturing"
            raise driver_error(Status.STREAM_CAPTURE_UNSUPPORTED, call, detail)

    def check_can_begin(self, call: str) -> None:
        """Raises 906 for the legacy stream, 401 for a stream that captures."""
        if self.handle == 0:
            detail = "the legacy stream cannot capture"
            raise driver_error(Status.STREAM_CAPTURE_IMPLICIT, call, detail)
        if self.capture is not None:
            raise driver_error(Status.ILLEGAL_STATE, call, "the stream captures already")

    def capture_info(self) -> CaptureInfo:
        capture = self.capture
        if capture is None:
            return CaptureInfo(CaptureStatus.NONE)
        if capture.broken:
            return CaptureInfo(CaptureStatus.INVALIDATED, capture.number)
        return CaptureInfo(
            CaptureStatus.ACTIVE,
            capture.number,
            capture.graph.handle,
            tuple(node.handle for node in self.dependencies),
        )

    def set_dependencies(self, call: str, nodes: Sequence[NodeHandle]) -> None:
        """Replaces the dependencies of the next captured node."""
        capture = self.capture
        if capture is None:
            raise driver_error(Status.ILLEGAL_STATE, call, "the stream does not capture")
        capture.refuse_broken(call)
        self.dependencies = tuple(capture.graph.nodes_of(call, nodes))

    def wait_event(self, call: str, event: HostEvent) -> None:
        """Makes later work wait for the event's last record: by a task, or by captured edges."""
        capture = self.capture
        if capture is not None:
            self._wait_in_capture(call, capture, event)
        elif event.captured is not None:
            self._join(call, event.captured)
        else:
            mark = event.mark
            if mark is not None and mark.queue is not self.queue and not mark.done():
                self.queue.submit(mark.wait)

    def _wait_in_capture(self, call: str, capture: HostCapture, event: HostEvent) -> None:
        capture.refuse_broken(call)
        mark = event.captured
        if mark is None:
            if event.mark is None:
                return  # never recorded: nothing to wait for
            capture.broken = True
            detail = "the event was recorded outside of the capture"
            raise driver_error(Status.STREAM_CAPTURE_ISOLATION, call, detail)
        if mark.capture is not capture:
            capture.broken = True
            if mark.capture.ended:
                raise invalid(call, _ENDED)
            mark.capture.broken = True
            raise driver_error(Status.STREAM_CAPTURE_MERGE, call)
        merged = dict.fromkeys((*self.dependencies, *mark.dependencies))
        self.dependencies = tuple(merged)

    def _join(self, call: str, mark: CapturedMark) -> None:
        """Pulls this stream, which does not capture, into the capture of an event."""
        capture = mark.capture
        if capture.ended:
            raise invalid(call, _ENDED)
        if capture.broken:
            raise invalid(call, "the event was recorded in a capture that is broken")
        if self.handle == 0:
            capture.broken = True
            detail = "the legacy stream cannot join a capture"
            raise driver_error(Status.STREAM_CAPTURE_IMPLICIT, call, detail)
        self.dependencies = mark.dependencies
        capture.streams.append(self)
        self.capture = capture


@dataclass(slots=True, eq=False)
class HostEvent:
    """An event.  Its last record is either in `mark` or in `captured`."""

    handle: EventHandle
    timing: bool
    mark: Mark | None = None
    """The last record outside of captures; None counts as done."""
    captured: CapturedMark | None = None
    """The last record, if it was in a capture."""

    def record(self, call: str, stream: HostStream) -> None:
        capture = stream.capture
        if capture is not None:
            capture.refuse_broken(call)
            self.captured = CapturedMark(capture, stream.dependencies)
            return
        queue = stream.queue
        mark = Mark(queue, queue.submitted)
        if self.timing:
            mark.number += 1
            queue.submit(mark.stamp)
        self.mark = mark
        self.captured = None

    def refuse_captured(self, call: str, *, breaks: bool) -> None:
        """Raises 907 if the last record was in a capture: the event then has no state or time."""
        mark = self.captured
        if mark is None:
            return
        if mark.capture.ended:
            raise invalid(call, _ENDED)
        if breaks:
            mark.capture.broken = True
        raise driver_error(Status.CAPTURED_EVENT, call, f"event {self.handle:#x}")

    def time(self, call: str) -> float:
        """Returns the time at which the last record was reached, in seconds."""
        mark = self.mark
        if not self.timing or mark is None:
            why = "was never recorded" if self.timing else "was made without timing"
            raise driver_error(Status.INVALID_HANDLE, call, f"event {self.handle:#x} {why}")
        if not mark.done() or mark.time is None:
            raise driver_error(Status.NOT_READY, call, f"event {self.handle:#x}")
        return mark.time


@dataclass(slots=True, eq=False)
class HostCapture:
    """A capture into a graph, which is destroyed if the capture breaks."""

    mode: CaptureMode
    thread: int
    graph: GraphDefinition
    origin: HostStream
    number: int = field(default_factory=_numbers.__next__)
    streams: list[HostStream] = field(default_factory=list)
    """Every stream that joined, also one destroyed since, which may be unjoined."""
    broken: bool = False
    ended: bool = False

    def forbids(self, thread: int, thread_mode: CaptureMode) -> bool:
        """True if a potentially unsafe call of a thread in that mode breaks this capture.

        A broken capture still forbids calls until it is ended.
        """
        if CaptureMode.RELAXED in (self.mode, thread_mode):
            return False
        if self.thread == thread:
            return True
        return self.mode == CaptureMode.GLOBAL and thread_mode == CaptureMode.GLOBAL

    def refuse_broken(self, call: str) -> None:
        """Raises 901 if the capture is broken."""
        if self.broken:
            raise driver_error(Status.STREAM_CAPTURE_INVALIDATED, call)

    def add(self, call: str, stream: HostStream, params: NodeParams) -> None:
        """Adds a node for work that was submitted to a stream and checked."""
        before = stream.dependencies
        edge_data = None
        if (
            isinstance(params, KernelNodeParams)
            and params.config.programmatic
            and before
            and all(node.kind == NodeKind.KERNEL for node in before)
        ):
            edge_data = (PROGRAMMATIC,) * len(before)
        stream.dependencies = (self.graph.add(call, before, params, edge_data),)

    def unjoined(self) -> HostStream | None:
        """Returns a stream with nodes that the origin has not waited for, or None."""
        joined = ancestors(self.origin.dependencies)
        found = [s for s in self.streams if not joined.issuperset(s.dependencies)]
        return found[-1] if found else None


@dataclass(frozen=True, slots=True)
class CapturedMark:
    """A place in a capture: the dependencies of work after it."""

    capture: HostCapture
    dependencies: tuple[DefinitionNode, ...]


class _Thread(threading.local):
    mode = CaptureMode.GLOBAL
    """The mode that decides about the thread's own calls.  CUDA begins with the strictest mode."""


class HostCaptures:
    """The captures of a driver that are under way, and the calls that they forbid."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._thread = _Thread()
        self.under_way: list[HostCapture] = []

    def fills(self, graph: GraphDefinition) -> bool:
        """True if a capture adds nodes to the graph."""
        return any(capture.graph is graph for capture in self.under_way)

    # --- forbidden calls

    def exchange_mode(self, mode: CaptureMode) -> CaptureMode:
        """Sets the calling thread's mode and returns the one before."""
        before, self._thread.mode = self._thread.mode, CaptureMode(mode)
        return before

    def forbid(self, call: str) -> None:
        """Raises 900 for a call that captures forbid to this thread, and breaks those captures.

        CUDA calls such a call potentially unsafe: it may wait for, or change, objects of a capture.
        """
        if not self.under_way:
            return
        with self._lock:
            thread, mode = threading.get_ident(), self._thread.mode
            harmed = [c for c in self.under_way if c.forbids(thread, mode)]
            self._break(call, harmed, Status.STREAM_CAPTURE_UNSUPPORTED)

    def forbid_all(self, call: str) -> None:
        """Raises 900 and breaks every capture of any mode: `call` waits for all streams."""
        self._break(call, self.under_way, Status.STREAM_CAPTURE_UNSUPPORTED)

    def refuse_implicit(self, call: str) -> None:
        """Raises 906 for a use of the legacy stream while a blocking stream captures, and breaks
        the capture, in any mode and from any thread."""
        harmed = [c for c in self.under_way if any(member.blocking for member in c.streams)]
        why = ", and waits for the legacy stream"
        self._break(call, harmed, Status.STREAM_CAPTURE_IMPLICIT, why)

    @staticmethod
    def _break(call: str, harmed: list[HostCapture], status: Status, why: str = "") -> None:
        """Breaks the captures, and raises if there are any."""
        for capture in harmed:
            capture.broken = True
        if harmed:
            origin, mode = harmed[0].origin.handle, harmed[0].mode.name.lower()
            raise driver_error(status, call, f"stream {origin:#x} captures ({mode} mode){why}")

    # --- begin and end

    def begin(
        self,
        stream: HostStream,
        graph: GraphDefinition,
        dependencies: tuple[DefinitionNode, ...],
        mode: CaptureMode,
    ) -> None:
        capture = HostCapture(CaptureMode(mode), threading.get_ident(), graph, stream)
        capture.streams.append(stream)
        stream.dependencies = dependencies
        self.under_way.append(capture)
        stream.capture = capture

    def end(self, call: str, stream: HostStream) -> GraphDefinition:
        """Ends the capture on a stream and returns its graph.

        Raises CUDA's status for a broken capture.  The capture ends also then, unless another
        stream began it.
        """
        capture = stream.capture
        if capture is None:
            raise driver_error(Status.ILLEGAL_STATE, call, "the stream does not capture")
        if capture.origin is not stream:
            capture.broken = True
            detail = f"stream {capture.origin.handle:#x} began the capture"
            raise driver_error(Status.STREAM_CAPTURE_UNMATCHED, call, detail)
        if capture.mode != CaptureMode.RELAXED and capture.thread != threading.get_ident():
            # CUDA ends the capture even so, and drops its graph.
            self._finish(capture, keep=False)
            raise driver_error(Status.STREAM_CAPTURE_WRONG_THREAD, call)
        unjoined = None if capture.broken else capture.unjoined()
        self._finish(capture, keep=not capture.broken and unjoined is None)
        capture.refuse_broken(call)
        if unjoined is not None:
            raise driver_error(Status.STREAM_CAPTURE_UNJOINED, call, f"stream {unjoined.handle:#x}")
        return capture.graph

    def _finish(self, capture: HostCapture, *, keep: bool) -> None:
        capture.ended = True
        for member in capture.streams:
            member.dependencies, member.capture = (), None
        self.under_way.remove(capture)
        # As in driver 580 (measured): a graph that the capture went into is destroyed with it.
        if not keep and capture.graph.owner is None:
            capture.graph.destroy()

    def drop_stream(self, stream: HostStream) -> None:
        """Ends and drops the capture that a stream began, which is being destroyed.

        A capture that the stream was pulled into goes on, and its end finds the stream unjoined.
        """
        capture = stream.capture
        if capture is not None and capture.origin is stream:
            self._finish(capture, keep=False)

    def drop_node(self, node: DefinitionNode) -> None:
        """Removes a node from the dependencies of the next captured nodes."""
        for capture in self.under_way:
            for stream in capture.streams:
                stream.dependencies = tuple(n for n in stream.dependencies if n is not node)

    def clear(self) -> None:
        self.under_way.clear()
