"""The CUDA driver's streams, events and stream capture."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

from ostinato.driver.api import (
    CaptureInfo,
    CaptureMode,
    CaptureStatus,
    EventHandle,
    GraphHandle,
    HostFailureListener,
    NodeHandle,
    StreamHandle,
)
from ostinato.driver.cuda.core import CudaCalls
from ostinato.driver.cuda.libcuda import Libcuda
from ostinato.driver.launcher import reader
from ostinato.errors import Status

_ACTIVE = int(CaptureStatus.ACTIVE)
_NONE = CaptureInfo(CaptureStatus.NONE)
_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_SET_DEPENDENCIES = 1
_BLOCKING_SYNC = 1  # CU_EVENT_BLOCKING_SYNC
# The legacy default stream: the null handle, or CU_STREAM_LEGACY.
_LEGACY = (0, 1)
_LAST_DEFAULT_STREAM = 2  # CU_STREAM_PER_THREAD


class StreamCalls(CudaCalls):
    """Streams, events, host functions and captures."""

    def __init__(self, lib: Libcuda, context: int, ordinal: int) -> None:
        super().__init__(lib, context, ordinal)
        calls = lib.address("cuStreamGetCaptureInfo_v3"), lib.address("cuCtxGetCurrent")
        self._info_addresses = calls if all(calls) else None
        self._into_graph: dict[int, int] = {}
        """The graphs of captures into an existing graph, by the stream's handle."""

    def synchronize(self) -> None:
        given_up = self._host_functions.take_given_up()
        self._call("synchronize", "cuCtxSynchronize")
        for number in given_up:
            self._host_functions.release(number)
        self._host_functions.sweep()

    def stream_create(self, *, priority: int = 0, blocking: bool = False) -> StreamHandle:
        flags = 0 if blocking else _NON_BLOCKING
        return StreamHandle(
            self._handle("stream_create", "cuStreamCreateWithPriority", flags, priority)
        )

    def stream_destroy(self, stream: StreamHandle) -> None:
        seam = "stream_destroy"
        if stream <= _LAST_DEFAULT_STREAM:
            detail = "a default stream cannot be destroyed"
            raise self._error(Status.INVALID_HANDLE, seam, detail)
        if self._capture_state(seam, stream):
            # What cuStreamDestroy does to a capture is not documented: end the capture first.
            graph = ctypes.c_void_p()
            self._status(seam, "cuStreamEndCapture", stream, byref(graph))
            if graph.value and graph.value != self._into_graph.pop(stream, None):
                self._call(seam, "cuGraphDestroy", graph)
        self._call(seam, "cuStreamDestroy_v2", stream)

    def stream_synchronize(self, stream: StreamHandle) -> None:
        self._call("stream_synchronize", "cuStreamSynchronize", stream)

    def stream_query(self, stream: StreamHandle) -> bool:
        return self._done("stream_query", "cuStreamQuery", stream)

    def _done(self, seam: str, symbol: str, handle: int) -> bool:
        status = self._status(seam, symbol, handle)
        if status in (Status.SUCCESS, Status.NOT_READY):
            return status == Status.SUCCESS
        raise self._error(status, seam)

    def stream_wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        self._call("stream_wait_event", "cuStreamWaitEvent", stream, event, 0)

    def event_create(self, *, timing: bool = False, blocking: bool = False) -> EventHandle:
        flags = (0 if timing else _DISABLE_TIMING) | (_BLOCKING_SYNC if blocking else 0)
        return EventHandle(self._handle("event_create", "cuEventCreate", flags))

    def event_destroy(self, event: EventHandle) -> None:
        self._call("event_destroy", "cuEventDestroy_v2", event)

    def event_record(self, event: EventHandle, stream: StreamHandle) -> None:
        self._call("event_record", "cuEventRecord", event, stream)

    def event_query(self, event: EventHandle) -> bool:
        return self._done("event_query", "cuEventQuery", event)

    def event_synchronize(self, event: EventHandle) -> None:
        self._call("event_synchronize", "cuEventSynchronize", event)

    def event_elapsed(self, start: EventHandle, end: EventHandle) -> float:
        milliseconds = ctypes.c_float()
        newest = self._lib.has("cuEventElapsedTime_v2")
        symbol = "cuEventElapsedTime_v2" if newest else "cuEventElapsedTime"
        self._call("event_elapsed", symbol, byref(milliseconds), start, end)
        return milliseconds.value / 1e3

    def launch_host_function(self, stream: StreamHandle, function: Callable[[], object]) -> None:
        functions = self._host_functions
        # The legacy stream never captures.  A query of it would fail without breaking the capture
        # of a blocking stream; a use breaks that capture.
        info = self.stream_capture_info(stream) if stream else None
        if info and info.status is CaptureStatus.ACTIVE:  # a node, which may run many times
            pointer = functions.pointer
            number = functions.add_to_graph(info.graph, function)
        else:
            pointer, number = functions.once_pointer, functions.add(function)
        status = self._status("launch_host_function", "cuLaunchHostFunc", stream, pointer, number)
        if status:
            functions.release(number)
            raise self._error(status, "launch_host_function")

    def on_host_failure(self, listener: HostFailureListener) -> None:
        self._host_functions.listeners.append(listener)

    # --- capture
    def stream_begin_capture(self, stream: StreamHandle, mode: CaptureMode) -> None:
        self._refuse_legacy("stream_begin_capture", stream)
        self._call("stream_begin_capture", "cuStreamBeginCapture_v2", stream, int(mode))

    def stream_begin_capture_to_graph(
        self,
        stream: StreamHandle,
        graph: GraphHandle,
        dependencies: Sequence[NodeHandle],
        mode: CaptureMode,
    ) -> None:
        seam = "stream_begin_capture_to_graph"
        self._refuse_legacy(seam, stream)
        count = len(dependencies)
        nodes = (ctypes.c_void_p * count)(*dependencies) if count else None
        symbol = "cuStreamBeginCaptureToGraph"
        self._call(seam, symbol, stream, graph, nodes, None, count, int(mode))
        self._into_graph[stream] = graph

    def stream_end_capture(self, stream: StreamHandle) -> GraphHandle:
        graph = ctypes.c_uint64()
        status = self._status("stream_end_capture", "cuStreamEndCapture", stream, byref(graph))
        if status not in (Status.STREAM_CAPTURE_UNMATCHED, Status.STREAM_CAPTURE_WRONG_THREAD):
            self._into_graph.pop(stream, None)  # after those two the stream still captures
        if status:
            raise self._error(status, "stream_end_capture")
        return GraphHandle(graph.value)

    def stream_capture_info(self, stream: StreamHandle) -> CaptureInfo:
        compiled, addresses = reader("capture_info"), self._info_addresses
        if compiled is not None and addresses is not None and self._off is None:
            found = compiled(addresses, self._context, stream)
            if type(found) is tuple:
                if found[0] == _ACTIVE:
                    return CaptureInfo(CaptureStatus.ACTIVE, *found[1:])
                return CaptureInfo(CaptureStatus(found[0])) if found[0] else _NONE
            if found is not None:
                raise self._error(found, "stream_capture_info")
        state, number, graph, count = c_int(), c_uint64(), c_uint64(), c_size_t()
        nodes, edge_data = c_void_p(), c_void_p()
        # Without room for edge data the query fails where programmatic launches were captured.
        places = map(byref, (state, number, graph, nodes, edge_data, count))
        self._call("stream_capture_info", "cuStreamGetCaptureInfo_v3", stream, *places)
        if state.value != _ACTIVE:  # the other values are valid only while it is active
            return CaptureInfo(CaptureStatus(state.value))
        dependencies: tuple[NodeHandle, ...] = ()
        if nodes.value:  # the driver's array: copied before any other call
            given = (c_uint64 * count.value).from_address(nodes.value)
            dependencies = tuple(map(NodeHandle, given))
        place = GraphHandle(graph.value)
        return CaptureInfo(CaptureStatus.ACTIVE, number.value, place, dependencies)

    def stream_set_capture_dependencies(
        self, stream: StreamHandle, nodes: Sequence[NodeHandle]
    ) -> None:
        given = (ctypes.c_void_p * len(nodes))(*nodes) if nodes else None
        symbol = "cuStreamUpdateCaptureDependencies_v2"
        seam = "stream_set_capture_dependencies"
        self._call(seam, symbol, stream, given, None, len(nodes), _SET_DEPENDENCIES)

    def thread_exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        value = ctypes.c_int(int(mode))
        seam = "thread_exchange_capture_mode"
        self._call(seam, "cuThreadExchangeStreamCaptureMode", byref(value))
        return CaptureMode(value.value)

    def _refuse_legacy(self, seam: str, stream: StreamHandle) -> None:
        if stream in _LEGACY:
            detail = "the legacy default stream cannot capture"
            raise self._error(Status.STREAM_CAPTURE_IMPLICIT, seam, detail)
