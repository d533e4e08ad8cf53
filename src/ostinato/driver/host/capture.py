"""The rules of stream capture on the host driver: states, forbidden calls, what breaks a capture.

States of a stream: it captures nothing; it captures (`Stream.capture` is set: it began the capture,
or an event pulled it in); its capture is broken (`Capture.broken` is set: everything but the end
of the capture is refused with 901).  Ending the capture, well or not, frees all its streams.

A capture begins when its origin joins it and ends when `ended` is set.  Each is one assignment, so
that an interruption leaves the capture either begun or not, and either ended or not.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from ostinato.driver.api import (
    CaptureInfo,
    CaptureMode,
    CaptureStatus,
    EdgeData,
    EdgeType,
    GraphHandle,
    KernelNodeParams,
    NodeHandle,
    NodeKind,
    NodeParams,
    StreamHandle,
)
from ostinato.driver.host.core import HostCore
from ostinato.driver.host.definition import GraphDefinition, Node, ancestors
from ostinato.driver.host.queue import CapturedMark, Event, Stream
from ostinato.errors import DriverError, Status, driver_error

__all__ = ["Capture", "CaptureCalls"]

_numbers = itertools.count(1)

_ENDED = "the event was recorded in a capture that has ended: record it again"

# A kernel with programmatic stream serialization may start when the kernel before it allows.
_PROGRAMMATIC = EdgeData(from_port=1, type=EdgeType.PROGRAMMATIC)


@dataclass(slots=True, eq=False)
class Capture:
    """A capture under way.  `owned`: it made the graph itself and drops it when broken."""

    mode: CaptureMode
    thread: int
    graph: GraphDefinition
    origin: Stream
    owned: bool
    number: int = field(default_factory=_numbers.__next__)
    streams: list[Stream] = field(default_factory=list)
    broken: bool = False
    ended: bool = False

    @property
    def under_way(self) -> bool:
        return not self.ended and self.origin.joined is self

    def forbids(self, thread: int, thread_mode: CaptureMode) -> bool:
        """Whether a potentially unsafe call of a thread in that mode breaks this capture.

        A broken capture still forbids, until it is ended.
        """
        if CaptureMode.RELAXED in (self.mode, thread_mode):
            return False
        if self.thread == thread:
            return True
        return self.mode == CaptureMode.GLOBAL and thread_mode == CaptureMode.GLOBAL


class CaptureCalls(HostCore):
    """The capture part of the driver, and how stream work becomes nodes."""

    def _node_captured(self, call: str, stream: Stream, params: NodeParams) -> Node:
        """Work submitted to a capturing stream.  The lock is held."""
        capture = self._sound_capture(call, stream)
        edge_data = None
        if (
            isinstance(params, KernelNodeParams)
            and params.config.programmatic
            and stream.dependencies
            and all(node.kind == NodeKind.KERNEL for node in stream.dependencies)
        ):
            edge_data = (_PROGRAMMATIC,) * len(stream.dependencies)
        try:
            node = self._add_node(call, capture.graph, stream.dependencies, params, edge_data)
        except DriverError:
            # Work that is refused breaks the capture too: the graph would lack it.
            capture.broken = True
            raise
        stream.dependencies = (node,)
        return node

    def _sound_capture(self, call: str, stream: Stream) -> Capture:
        capture = stream.capture
        assert capture is not None
        if capture.broken:
            raise driver_error(Status.STREAM_CAPTURE_INVALIDATED, call)
        return capture

    def _refuse_capturing(self, call: str, stream: Stream) -> None:
        """Raises 900 and breaks the capture if the stream captures, broken already or not."""
        if stream.capture is not None:
            stream.capture.broken = True
            raise driver_error(
                Status.STREAM_CAPTURE_UNSUPPORTED, call, f"stream {stream.handle:#x} is capturing"
            )

    def _refuse_captured(self, call: str, event: Event, *, breaks: bool) -> None:
        """Raises 907 for an event last recorded in a capture: it has neither state nor time."""
        mark = event.captured
        if mark is None:
            return
        if mark.capture.ended:
            raise driver_error(Status.INVALID_VALUE, call, _ENDED)
        if breaks:
            mark.capture.broken = True
        raise driver_error(Status.CAPTURED_EVENT, call, f"event {event.handle:#x}")

    def _event_captured(self, event: Event, stream: Stream) -> None:
        capture = self._sound_capture("event_record", stream)
        event.captured = CapturedMark(capture, stream.dependencies)

    def _wait_captured(self, stream: Stream, event: Event) -> None:
        """A wait where the stream, or the event's last record, is in a capture."""
        call = "stream_wait_event"
        mark = event.captured
        if stream.capture is not None:
            capture = self._sound_capture(call, stream)
            if mark is None:
                if event.mark is None:
                    return  # never recorded: nothing to wait for
                capture.broken = True
                raise driver_error(
                    Status.STREAM_CAPTURE_ISOLATION,
                    call,
                    "the event was recorded outside of the capture",
                )
            if mark.capture is not capture:
                capture.broken = True
                if mark.capture.ended:
                    raise driver_error(Status.INVALID_VALUE, call, _ENDED)
                mark.capture.broken = True
                raise driver_error(Status.STREAM_CAPTURE_MERGE, call)
            merged = dict.fromkeys((*stream.dependencies, *mark.dependencies))
            stream.dependencies = tuple(merged)
            return
        assert mark is not None
        if mark.capture.ended:
            raise driver_error(Status.INVALID_VALUE, call, _ENDED)
        if mark.capture.broken:
            raise driver_error(
                Status.INVALID_VALUE, call, "the event was recorded in a capture that is broken"
            )
        if stream.handle == 0:
            mark.capture.broken = True
            raise driver_error(
                Status.STREAM_CAPTURE_IMPLICIT, call, "the legacy stream cannot join a capture"
            )
        stream.dependencies = mark.dependencies
        mark.capture.streams.append(stream)
        stream.joined = mark.capture

    # --- the calls

    def stream_begin_capture(self, stream: StreamHandle, mode: CaptureMode) -> None:
        call = "stream_begin_capture"
        with self._entered(call):
            target = self._capturable(call, stream)
            graph = GraphDefinition.new()
            self._register(graph)
            self._begin(target, graph, (), mode, owned=True)

    def stream_begin_capture_to_graph(
        self,
        stream: StreamHandle,
        graph: GraphHandle,
        dependencies: Sequence[NodeHandle],
        mode: CaptureMode,
    ) -> None:
        call = "stream_begin_capture_to_graph"
        with self._entered(call):
            target = self._capturable(call, stream)
            definition = self._graph(call, graph)
            if definition.capturing:
                raise driver_error(Status.INVALID_VALUE, call, "the graph is being captured into")
            nodes = self._nodes_of(call, definition, dependencies)
            self._begin(target, definition, tuple(nodes), mode, owned=False)

    def _capturable(self, call: str, stream: StreamHandle) -> Stream:
        target = self._stream(call, stream)
        if target.handle == 0:
            raise driver_error(
                Status.STREAM_CAPTURE_IMPLICIT, call, "the legacy stream cannot capture"
            )
        if target.capture is not None:
            raise driver_error(Status.ILLEGAL_STATE, call, "the stream captures already")
        return target

    def _begin(
        self,
        stream: Stream,
        graph: GraphDefinition,
        dependencies: tuple[Node, ...],
        mode: CaptureMode,
        *,
        owned: bool,
    ) -> None:
        capture = Capture(CaptureMode(mode), threading.get_ident(), graph, stream, owned)
        capture.streams.append(stream)
        graph.capture = capture
        stream.dependencies = dependencies
        self._begun.append(capture)
        stream.joined = capture

    def stream_end_capture(self, stream: StreamHandle) -> GraphHandle:
        call = "stream_end_capture"
        with self._entered(call):
            target = self._stream(call, stream)
            capture = target.capture
            if capture is None:
                raise driver_error(Status.ILLEGAL_STATE, call, "the stream does not capture")
            if capture.origin is not target:
                capture.broken = True
                raise driver_error(
                    Status.STREAM_CAPTURE_UNMATCHED,
                    call,
                    f"stream {capture.origin.handle:#x} began the capture",
                )
            if capture.mode != CaptureMode.RELAXED and capture.thread != threading.get_ident():
                # CUDA ends the capture even so, and drops its graph.
                self._finish_capture(capture, keep=False)
                raise driver_error(Status.STREAM_CAPTURE_WRONG_THREAD, call)
            broken, unjoined = capture.broken, None
            if not broken:
                joined = ancestors(target.dependencies)
                for forked in capture.streams:
                    if any(node not in joined for node in forked.dependencies):
                        unjoined = forked
            self._finish_capture(capture, keep=not broken and unjoined is None)
            if broken:
                raise driver_error(Status.STREAM_CAPTURE_INVALIDATED, call)
            if unjoined is not None:
                raise driver_error(
                    Status.STREAM_CAPTURE_UNJOINED, call, f"stream {unjoined.handle:#x}"
                )
            return capture.graph.handle

    def _finish_capture(self, capture: Capture, *, keep: bool) -> None:
        capture.ended = True
        for member in capture.streams:
            member.dependencies = ()
        self._begun = [begun for begun in self._begun if begun.under_way]
        # As driver 580 does (measured): with the capture goes a graph that it went into, too.
        if not keep and capture.graph.owner is None:
            self._forget(capture.graph)
            if not capture.owned:
                self._release_memory(capture.graph)

    def _drop_stream(self, stream: Stream) -> None:
        """The stream is destroyed while it captures.

        The capture goes with the stream that began it.  A forked one that was not joined is missed
        at the end: it stays in the capture's list for that.
        """
        capture = stream.capture
        if capture is not None and capture.origin is stream:
            self._finish_capture(capture, keep=False)

    def stream_capture_info(self, stream: StreamHandle) -> CaptureInfo:
        call = "stream_capture_info"
        with self._entered(call):
            target = self._stream(call, stream)
            capture = target.capture
            if capture is None:
                return CaptureInfo(CaptureStatus.NONE)
            if capture.broken:
                return CaptureInfo(CaptureStatus.INVALIDATED, capture.number)
            return CaptureInfo(
                CaptureStatus.ACTIVE,
                capture.number,
                capture.graph.handle,
                tuple(node.handle for node in target.dependencies),
            )

    def thread_exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        self._enter("thread_exchange_capture_mode")
        before = self._thread_mode()
        self._thread.mode = CaptureMode(mode)
        return before
