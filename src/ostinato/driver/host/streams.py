"""The streams and events of the host driver, and how work is submitted."""

from __future__ import annotations

from collections.abc import Callable

from ostinato.driver.api import EventHandle, HostNodeParams, NodeParams, StreamHandle
from ostinato.driver.host.capture import CaptureCalls
from ostinato.driver.host.definition import new_handle
from ostinato.driver.host.queue import Event, Mark, Stream, WorkQueue
from ostinato.errors import Status, driver_error

__all__ = ["StreamCalls"]


class StreamCalls(CaptureCalls):
    def _submit(self, call: str, stream: Stream, params: NodeParams) -> None:
        with self._lock:
            if stream.capture is not None:
                self._node_captured(call, stream, params)
                return
            self._check_params(call, params)
            stream.queue.submit(self._step(call, params))

    def synchronize(self) -> None:
        call = "synchronize"
        self._enter(call)
        with self._lock:
            # In all capture modes: it would have to wait for all of their streams.
            for capture in self._captures:
                capture.broken = True
            if self._captures:
                raise driver_error(
                    Status.STREAM_CAPTURE_UNSUPPORTED,
                    call,
                    f"stream {self._captures[0].origin.handle:#x} is capturing",
                )
        self._wait_for_all()
        self._raise_failure(call)

    # --- streams

    def stream_create(self, *, priority: int = 0) -> StreamHandle:
        # One thread runs each stream: there is nothing that a priority could change.
        with self._entered("stream_create"):
            handle = StreamHandle(new_handle())
            name = f"ostinato-host-stream-{len(self._streams)}"
            self._streams[handle] = Stream(handle, WorkQueue(self._context, name))
            return handle

    def stream_destroy(self, stream: StreamHandle) -> None:
        call = "stream_destroy"
        with self._entered(call):
            target = self._stream(call, stream)
            if target.handle == 0:
                raise driver_error(
                    Status.INVALID_HANDLE, call, "the legacy stream cannot be destroyed"
                )
            self._drop_stream(target)
            target.destroyed = True
            del self._streams[target.handle]
            target.queue.stop(drop=False)

    def stream_synchronize(self, stream: StreamHandle) -> None:
        call = "stream_synchronize"
        self._enter(call)
        with self._lock:
            target = self._stream(call, stream)
            self._refuse_capturing(call, target)
            self._forbid(call)  # of other streams, too
        target.queue.wait(target.queue.submitted)
        if self._context.failure is not None:
            self._raise_failure(call)

    def stream_query(self, stream: StreamHandle) -> bool:
        call = "stream_query"
        self._enter(call)
        with self._lock:
            target = self._stream(call, stream)
            self._refuse_capturing(call, target)
            self._forbid(call)  # of other streams, too
        return target.queue.completed >= target.queue.submitted

    def stream_wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        call = "stream_wait_event"
        self._enter(call)
        with self._lock:
            target, awaited = self._stream(call, stream), self._event(call, event)
            if target.capture is not None or awaited.captured is not None:
                self._wait_captured(target, awaited)
                return
            mark = awaited.mark
            if mark is not None and mark.queue is not target.queue and not mark.done():
                target.queue.submit(mark.wait)

    def launch_host_function(self, stream: StreamHandle, function: Callable[[], object]) -> None:
        call = "launch_host_function"
        self._enter(call)
        self._submit(call, self._stream(call, stream), HostNodeParams(function))

    # --- events

    def event_create(self, *, timing: bool = False) -> EventHandle:
        with self._entered("event_create"):
            handle = EventHandle(new_handle())
            self._events[handle] = Event(handle, timing)
            return handle

    def event_destroy(self, event: EventHandle) -> None:
        call = "event_destroy"
        with self._entered(call):
            self._event(call, event).destroyed = True
            del self._events[event]

    def event_record(self, event: EventHandle, stream: StreamHandle) -> None:
        call = "event_record"
        self._enter(call)
        with self._lock:
            recorded, target = self._event(call, event), self._stream(call, stream)
            if target.capture is not None:
                self._event_captured(recorded, target)
                return
            queue = target.queue
            mark = Mark(queue, queue.submitted)
            if recorded.timing:
                mark.number += 1
                queue.submit(mark.stamp)
            recorded.mark = mark
            recorded.captured = None

    def _state_of(self, call: str, event: EventHandle) -> Mark | None:
        with self._lock:
            found = self._event(call, event)
            self._refuse_captured(call, found, breaks=True)
            self._forbid(call)
            return found.mark

    def event_query(self, event: EventHandle) -> bool:
        call = "event_query"
        self._enter(call)
        mark = self._state_of(call, event)
        return mark is None or mark.done()

    def event_synchronize(self, event: EventHandle) -> None:
        call = "event_synchronize"
        self._enter(call)
        mark = self._state_of(call, event)
        if mark is not None:
            mark.wait()
        self._raise_failure(call)

    def event_elapsed(self, start: EventHandle, end: EventHandle) -> float:
        call = "event_elapsed"
        self._enter(call)
        with self._lock:
            found = [self._event(call, handle) for handle in (start, end)]
            for event in found:
                self._refuse_captured(call, event, breaks=False)
        times: list[float] = []
        for event in found:
            if not event.timing or event.mark is None:
                why = "was never recorded" if event.timing else "was made without timing"
                raise driver_error(Status.INVALID_HANDLE, call, f"event {event.handle:#x} {why}")
            if not event.mark.done() or event.mark.time is None:
                raise driver_error(Status.NOT_READY, call, f"event {event.handle:#x}")
            times.append(event.mark.time)
        return (times[1] - times[0]) * 1e3
