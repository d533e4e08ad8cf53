"""Streams, events, and `Operation`: one piece of stream work as a record.

All work that this library submits to a stream is an `Operation`: the parameters of its graph node,
the memory that it reads and writes, and the objects that must stay alive.  The same record runs
eagerly, is noted by a recording, and labels a node of a captured graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import field
from threading import get_ident
from typing import TypeVar

from ostinato.driver.api import (
    CaptureInfo,
    CaptureStatus,
    EventHandle,
    FunctionHandle,
    HostNodeParams,
    KernelArguments,
    KernelNodeParams,
    LaunchConfig,
    MemcpyNodeParams,
    MemoryRange,
    MemsetNodeParams,
    NodeParams,
    StreamHandle,
    not_null,
)
from ostinato.driver.closeable import Closeable, elsewhere
from ostinato.driver.context import CallKind, Context
from ostinato.driver.interrupts import uninterrupted
from ostinato.driver.signature import Signature
from ostinato.driver.waiting import wait_in_thread, wait_until
from ostinato.errors import (
    ClosedError,
    DriverError,
    InputError,
    NotAvailableError,
    StreamCaptureError,
)
from ostinato.records import dataclass

T = TypeVar("T")
_serials = itertools.count(1)


def next_serial() -> int:
    """Returns a number above the `serial` of every event that was made so far."""
    return next(_serials)


def require_callable(function: object) -> None:
    """Raises InputError if a host function is not callable: the driver would call it much later."""
    if not callable(function):
        raise InputError(f"a host function is called, and {function!r} cannot be")


def wait_for_streams(stream: Stream, others: Iterable[Stream]) -> bool:
    """Makes later work of a stream wait for what others hold by now, closed ones too.

    Returns False if one of them captures, so that its work cannot be waited for.
    """
    if stream.is_capturing():
        return False
    driver = stream.context.driver
    for other in others:
        if other is not stream:
            event = other.mark()
            if event is None:
                return False
            try:
                driver.stream_wait_event(stream.handle, event)
            finally:
                driver.event_destroy(event)
    return True


def require_stream(stream: object, call: str, context: Context | None = None) -> None:
    """Raises InputError for a value that is no stream (of another library, say, or a device), and
    for a stream of another device than `context`, if that is given."""
    if not isinstance(stream, Stream):
        raise InputError(
            f"{call}: a Stream is needed, not {type(stream).__name__} "
            "(device.create_stream, or device.adopt_stream for another library's)"
        )
    if context is not None and stream.context is not context:
        stream.context.require_same(context, f"{call}: what it is called on", "the stream is of")


@dataclass(frozen=True, slots=True)
class Operation:
    """One piece of stream work.

    `reads` and `writes` are the memory it accesses, for edges between recorded operations.  None
    means unknown: such an operation is ordered against all others.  `keep` are the objects that
    must live as long as the work can run again.
    """

    params: NodeParams
    name: str
    reads: tuple[MemoryRange, ...] | None = None
    writes: tuple[MemoryRange, ...] | None = None
    keep: tuple[object, ...] = ()
    signature: Signature | None = None
    """Names and types of a kernel's arguments, if they are known."""
    once: str = ""
    """The reason why a graph must not repeat it; empty if a graph may."""
    _found_open: list[object] = field(
        default_factory=lambda: [None], init=False, repr=False, compare=False
    )
    """A list of the context's `memory_epoch` at which all memory in `keep` was found open."""

    @property
    def usable(self) -> bool:
        """True if none of its memory is closed."""
        return self._closed_memory() is None

    def require_usable(self, context: Context) -> None:
        """Raises ClosedError if memory in `keep` is closed, InputError if an object in it is of
        another device.  Checks again only after memory of the context was closed: operations are
        often submitted by the thousand."""
        epoch = context.memory_epoch  # read before the check: a close meanwhile changes it
        if self._found_open[0] is epoch:
            return
        closed = self._closed_memory()
        if closed is not None:
            raise ClosedError(
                f"{self.name}: {closed!r} is closed, which the operation was made with"
            )
        for owner in self.keep:
            of = getattr(owner, "context", None)
            if of is not context and isinstance(of, Context):
                space = context.space
                if hasattr(owner, "_pointer"):
                    space.require(owner, f"{self.name}:")
                else:
                    context.require_same(of, f"{self.name}: {owner!r}", "it is used on")
        self._found_open[0] = epoch

    def _closed_memory(self) -> object:
        """Returns the first closed memory in `keep`, or None."""
        for owner in self.keep:  # one loop: a call for each object takes twice as long
            if getattr(owner, "closed", False) is True and hasattr(owner, "range"):
                return owner
        return None


class Event(Closeable):
    """A point in a stream's work.

        start, end = device.create_event(timing=True), device.create_event(timing=True)
        seconds = end.elapsed_since(start)    # once both are recorded and reached

    `close()` or the end of `with` releases it.  A graph with a node for it still works then.
    Every call on a closed event raises ClosedError.
    """

    def __init__(self, context: Context, *, timing: bool = False, blocking: bool = False) -> None:
        context.require_open()
        self.context = context
        self.timing = timing
        self.owner: object = _DriverEvent(context, timing, blocking)
        """The driver's event, which graphs keep; None after `close()`."""
        self._handle: EventHandle = self.owner.handle
        self.serial = next_serial()
        """A number that rises with each event made."""

    def __repr__(self) -> str:
        timing = " with timing" if self.timing else ""
        state = " closed" if self.closed else ""
        return f"<Event {self._handle:#x}{timing} on {self.context.driver.name}{state}>"

    @property
    def closed(self) -> bool:
        return self.owner is None

    @property
    def handle(self) -> EventHandle:
        """The driver's handle.  Raises ClosedError after `close()`."""
        if self.owner is None:
            raise ClosedError("the event is closed; create another")
        return self._handle

    def done(self) -> bool:
        """True if the work before its last record is done, or if it was never recorded.

        Raises DriverError if it was last recorded in a capture, and no launch of the graph has
        recorded it yet: with status 907 while the capture is under way, which breaks the capture.
        """
        with self.context.reporting():
            return self.context.driver.event_query(self._awaited())

    def synchronize(self, *, deadline: float | None = None) -> None:
        """Waits for the work before its last record.  Raises as `done()`.

        `deadline`, in seconds: as for `Stream.synchronize`.
        """
        with self.context.reporting():
            handle, driver = self._awaited(), self.context.driver
            if deadline is not None:
                wait_until(lambda: driver.event_query(handle), deadline, "event_synchronize")
            driver.event_synchronize(handle)
        if self.context.failures:
            self.context.raise_failures()

    async def wait_async(self) -> None:
        """Waits like `synchronize`, in asyncio (`await event.wait_async()`); the loop goes on.

        A thread waits meanwhile; for an event made with `blocking` the thread sleeps.  Any number
        of tasks may wait; cancelling a task does not disturb the others.  Raises as `done()`, and
        the error of a context that fails meanwhile.
        """
        driver, owner, handle = self.context.driver, self.owner, self._awaited()

        def wait() -> None:
            driver.event_synchronize(handle)
            assert owner is not None  # kept until now: `close` must not destroy the awaited event

        with self.context.reporting():
            if driver.event_query(handle):
                driver.event_synchronize(handle)  # raises if the context has failed
            else:
                await wait_in_thread(wait)

    def _awaited(self) -> EventHandle:
        """Calls the taps, and returns the driver's handle for a call that queries the event."""
        handle = self.handle
        for tap in self.context.taps:
            tap.awaited(self)
        return handle

    def elapsed_since(self, start: Event) -> float:
        """Returns seconds from `start` to this event.

        For events recorded in a capture: the time of the graph's last launch.  Raises InputError
        unless both were made with `timing`, DriverError unless both were recorded (in a capture:
        by a launch) and reached.
        """
        self.context.require_same(start.context, f"{start!r}", "the other event is of")
        if not (self.timing and start.timing):
            raise InputError("both events must be made with timing=True to be subtracted")
        return self.context.driver.event_elapsed(start._awaited(), self._awaited())

    def close(self) -> None:
        """Releases the event once no graph has a node for it.  Idempotent."""
        self.owner = None
        self.context.collect()


class _DriverEvent:
    """An event of the driver, destroyed when neither an `Event` nor a graph keeps it."""

    @uninterrupted
    def __init__(self, context: Context, timing: bool, blocking: bool) -> None:
        driver = context.driver
        self.handle: EventHandle = driver.event_create(timing=timing, blocking=blocking)
        handle = self.handle
        finalizer = weakref.finalize(self, context.retire, lambda: driver.event_destroy(handle))
        finalizer.atexit = False


def handle_of(event: Event, context: Context) -> EventHandle:
    """Returns an event's handle.  Raises InputError for other objects (the driver would accept a
    stream's handle), and for an event of another device than `context`."""
    if not isinstance(event, Event):
        raise InputError(
            f"an Event is needed, not {type(event).__name__} (side.wait(stream.record()))"
        )
    if event.context is not context:
        context.require_same(
            event.context,
            f"{event!r} (wait for it on the host: event.synchronize())",
            "it is used on",
        )
    return event.handle


@elsewhere(
    sync="synchronize() waits for its work",
    query="done() says whether all its work is done",
    wait_event="wait(event) makes later work wait for an event",
    wait_stream="wait(other.record()) makes later work wait for another stream",
)
class Stream(Closeable):
    """An ordered queue of device work.

        stream = device.create_stream()
        ost.launch(stream, kernel, config, x, n); stream.synchronize()

    Made by `Device.create_stream`, or adopted from another library by `Device.adopt_stream` (then
    `owner` is kept alive, and closing does not destroy the stream).
    """

    def __init__(
        self, context: Context, handle: StreamHandle, *, owned: bool, owner: object = None
    ) -> None:
        self.context = context
        self.handle = handle
        self.owner = owner
        self.submitted = 0
        """The number of operations that the driver accepted on this stream so far."""
        self.closed = False
        self.turn = context.turn(handle)
        """Held by a `GraphedStep` during a call, so that steps on one stream take turns."""
        self.submitting = self.turn.submitting
        self._destroyed = False
        self._finalizer: weakref.finalize[..., Stream] | None = None
        if owned:
            driver = context.driver
            self._finalizer = weakref.finalize(
                self, context.retire, lambda: driver.stream_destroy(handle)
            )
            self._finalizer.atexit = False

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<Stream {self.handle:#x} on {self.context.driver.name}{state}>"

    def __cuda_stream__(self) -> tuple[int, int]:
        """Returns (version, handle), for libraries that take CUDA streams by this protocol.

        Only on CUDA: NotAvailableError elsewhere.
        """
        if self.context.driver.cuda_context is None:
            raise NotAvailableError(f"a stream of {self.context.driver.name} is no CUDA stream")
        return 0, self.enter("giving the stream to another library", CallKind.GIVE)

    def _require_open(self) -> StreamHandle:
        self.context.require_open()
        if self.closed:
            raise ClosedError("the stream is closed; create another")
        return self.handle

    def enter(
        self, what: str, kind: CallKind = CallKind.WORK, operation: Operation | None = None
    ) -> StreamHandle:
        """Checks that a call on this stream may go to the driver, and returns the driver's handle.

        `what` names the call.  Raises ClosedError, and CaptureError if the call would go into
        another thread's capture, or bypass the capture that must hold all work of this thread.
        """
        context = self.context
        if self.closed or context.closed:
            self._require_open()
        if context.taps:
            context.end_abandoned()
            for tap in context.taps:
                tap.entering(self, what, kind, operation)
        return self.handle

    # --- work
    def submit(self, operation: Operation) -> None:
        """Puts one operation on the stream (or into the capture that is under way on it).

        Raises DriverError, which the taps receive, ClosedError if memory of the operation is
        closed, and the errors of `enter`.
        """
        # The first checks of `require_usable` and `enter`: the calls are a quarter of a launch.
        context = self.context
        if operation._found_open[0] is not context.memory_epoch:
            operation.require_usable(context)  # it may be much older than this call
        thread = get_ident()
        try:
            self.submitting.add(thread)
            if context.taps or self.closed or context.closed:
                self.enter(
                    operation.name, CallKind.ONCE if operation.once else CallKind.WORK, operation
                )
            handle, driver = self.handle, context.driver
            params = operation.params
            try:
                if isinstance(params, KernelNodeParams):
                    driver.launch_kernel(handle, params.function, params.config, params.arguments)
                elif isinstance(params, MemcpyNodeParams):
                    if params.height != 1 or params.depth != 1 or params.opaque:
                        raise InputError("only linear copies can be submitted to a stream")
                    driver.memcpy(params.dst, params.src, params.width, handle)
                elif isinstance(params, MemsetNodeParams):
                    if params.height != 1:
                        raise InputError("only linear fills can be submitted to a stream")
                    driver.memset(
                        params.dst, params.value, params.element_size, params.width, handle
                    )
                elif isinstance(params, HostNodeParams) and params.function is not None:
                    driver.launch_host_function(handle, params.function)
                else:
                    raise InputError(f"{operation.name}: not work that a stream takes by itself")
            except DriverError as error:
                self.report(error)
                raise
        finally:
            self.submitting.discard(thread)
        self.submitted += 1
        if context.taps:
            self.announce(operation)

    def submit_as_graph(self, operation: Operation) -> None:
        """Submits by launching a graph of this operation alone, which costs the host some tens of
        microseconds.  For work on a stream beside the one that a process launches on: the driver
        replays graphs more slowly once kernels, fills or copies on the device were put on two
        streams (docs/performance.md, "A second stream").

        Raises the errors of `submit`.
        """
        operation.require_usable(self.context)
        if self.context.captures or self.is_capturing():
            self.submit(operation)  # a capture, also of another stream, forbids making graphs
            return
        driver, retire = self.context.driver, self.context.retire

        def launch(handle: StreamHandle) -> None:
            graph = not_null(driver.graph_create(), "graph")
            try:
                driver.graph_add_node(graph, (), operation.params)
                executable = not_null(driver.graph_instantiate(graph), "executable")
            finally:
                retire(lambda: driver.graph_destroy(graph))
            try:
                driver.exec_launch(executable, handle)
            finally:
                retire(lambda: driver.exec_destroy(executable), (self,))

        kind = CallKind.ONCE if operation.once else CallKind.WORK
        try:
            self.guarded(operation.name, launch, kind, operation)
        finally:
            self.context.collect()
        self.submitted += 1
        if self.context.taps:
            self.announce(operation)

    def launch(
        self, name: str, function: FunctionHandle, config: LaunchConfig, arguments: KernelArguments
    ) -> bool:
        """Puts a kernel on the stream as `submit` does.  Returns whether the caller must call
        `announce`.  Raises DriverError, which the taps receive, and the errors of `enter`."""
        context, thread = self.context, get_ident()
        launch = context.driver.launch_kernel
        try:
            self.submitting.add(thread)
            self.guarded(name, lambda h: launch(h, function, config, arguments), CallKind.WORK)
        finally:
            self.submitting.discard(thread)
        self.submitted += 1
        return bool(context.taps)

    def announce(self, operation: Operation) -> None:
        """Passes an operation that the driver accepted on this stream to the taps."""
        for tap in self.context.taps:
            tap.submitted(self, operation)

    def report(self, error: DriverError) -> None:
        """Passes the driver's refusal of a call on this stream to the taps."""
        for tap in self.context.taps:
            tap.failed(self, error)

    def call(self, function: Callable[[], object]) -> None:
        """Calls `function` in stream order on a driver's thread.  It must not call the driver.

        If it raises, the next call on a stream of the device that waits or submits work raises
        HostFunctionError; without such a call, the end of the process reports it.
        """
        require_callable(function)
        name = getattr(function, "__qualname__", type(function).__name__)
        self.submit(Operation(HostNodeParams(function), name, keep=(function,)))

    def record(self, event: Event | None = None) -> Event:
        """Records an event (a new one if none is given) after the work submitted so far.

        In a capture or a recording each launch of the graph records it, if the event exists when
        the graph is made.  In a capture that another library began, no launch records it.
        """
        if event is None:
            event = Event(self.context)
        handle = handle_of(event, self.context)
        record = self.context.driver.event_record
        self.guarded("record", lambda h: record(handle, h), CallKind.ORDER)
        for tap in self.context.taps:
            tap.recorded(self, event)
        return event

    def wait(self, event: Event) -> None:
        """Makes later work of this stream wait for the event.

        An event recorded inside a capture pulls this stream into the capture (fork and join).  A
        capturing stream can wait for no other events: raises DriverError (905) or
        CaptureBrokenError.
        """
        handle = handle_of(event, self.context)
        wait = self.context.driver.stream_wait_event
        self.guarded("wait", lambda h: wait(h, handle), CallKind.ORDER)
        for tap in self.context.taps:
            tap.waited(self, event)

    def synchronize(self, *, deadline: float | None = None) -> None:
        """Waits for all work of the stream.  Raises DriverError (status 900) while it captures, and
        HostFunctionError if a host function has raised.

        `deadline`: after so many seconds NotReadyError is raised, with the nodes that have not
        finished if a black box is armed (`ost.black_box`).  The work goes on, and can be waited for
        again: nothing is ended, and a kernel that never ends holds the device until the process
        ends.
        """
        driver = self.context.driver

        def wait(handle: StreamHandle) -> None:
            if deadline is not None:
                wait_until(lambda: driver.stream_query(handle), deadline, "stream_synchronize")
            driver.stream_synchronize(handle)

        call = driver.stream_synchronize if deadline is None else wait
        self.guarded("synchronize", call, CallKind.ONCE)
        self.context.collect()

    async def wait_async(self) -> None:
        """Waits for the work submitted so far, in asyncio: `await stream.wait_async()`.

        The event loop and this stream go on: later work is not waited for.  A thread sleeps
        meanwhile.  Raises as `synchronize`, and the error of a context that fails meanwhile.
        """
        driver = self.context.driver
        if self.guarded("wait_async", driver.stream_query, CallKind.ONCE):
            # Raises if the context has failed.  No `collect`: freeing memory waits for the device.
            self.guarded("wait_async", driver.stream_synchronize, CallKind.ONCE)
        else:
            await self.record(Event(self.context, blocking=True)).wait_async()

    def done(self) -> bool:
        """True if all its work is done.  Raises DriverError (status 900) while it captures."""
        return self.guarded("done", self.context.driver.stream_query, CallKind.ONCE)

    def guarded(
        self,
        what: str,
        call: Callable[[StreamHandle], T],
        kind: CallKind,
        operation: Operation | None = None,
    ) -> T:
        """Makes a driver call on this stream, after `enter`; passes a refusal to the taps."""
        handle = self.enter(what, kind, operation)
        try:
            result = call(handle)
        except DriverError as error:
            self.report(error)
            raise
        if kind is CallKind.ONCE and self.context.failures:
            self.context.raise_failures()  # those of the work that was waited for
        return result

    # --- capture state
    def capture_info(self) -> CaptureInfo:
        """The state of the capture on this stream, also of one that another library began; a
        dropped capture of this library is ended first."""
        self.context.end_abandoned()
        return self.context.driver.stream_capture_info(self._require_open())

    def is_capturing(self) -> bool:
        """True while a capture, sound or broken, is under way on this stream."""
        return self.capture_info().status is not CaptureStatus.NONE

    # --- lifetime
    @uninterrupted
    def mark(self) -> EventHandle | None:
        """Returns a new event, recorded after all work so far; the caller must destroy it.

        None while the stream captures: an event that is recorded then cannot be waited for.
        """
        driver = self.context.driver
        event = driver.event_create()
        try:
            if self._destroyed:
                return event  # never recorded, so already reached: a destroyed stream has no work
            if driver.stream_capture_info(self.handle).status is CaptureStatus.NONE:
                driver.event_record(event, self.handle)
                return event
        except StreamCaptureError:
            pass
        except DriverError:
            driver.event_destroy(event)
            raise
        driver.event_destroy(event)
        return None

    def close(self) -> None:
        """Releases the stream once its work is done; does not wait.  Idempotent."""
        if self.closed:
            return
        with uninterrupted:
            self.closed = True
            self.context.cool()
            if self._finalizer is not None and self._finalizer.detach():
                self.context.retire(self._destroy, (self,))
        self.context.collect()

    def _destroy(self) -> None:
        self._destroyed = True
        self.context.driver.stream_destroy(self.handle)
