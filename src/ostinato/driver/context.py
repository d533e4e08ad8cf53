"""`Context`: the driver of one opened device, its objects that wait for destruction, and the taps.

Every owner object (stream, buffer, module, graph) holds its `Context`.  The context destroys an
object only while no capture is under way and no replay uses the object:

    owner.close() or its finaliser
        └─ retire(destroy, streams)     noted; the driver is not called
             └─ collect()               outside of captures: marks the streams with events, and
                                        destroys objects whose marks are reached

Finalisers run on any thread, between any two lines, also inside a capture.  So they only append to
a deque.  `collect` calls the driver; owners call it where a driver call is allowed.  Inside a host
function no driver call is allowed, and `collect` does nothing.
"""

from __future__ import annotations

import enum
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ostinato.driver.api import (
    CaptureMode,
    Driver,
    EventHandle,
    GraphHandle,
    MemoryRange,
    NodeHandle,
)
from ostinato.driver.callbacks import in_host_function
from ostinato.driver.failures import HostFailures, said_at_exit
from ostinato.driver.forking import FORKED, new_lock, switch_off_in_children
from ostinato.driver.interrupts import uninterrupted
from ostinato.driver.signature import Space, space_of
from ostinato.errors import (
    CaptureError,
    ClosedError,
    ContextPoisonedError,
    DriverError,
    InputError,
    OstinatoError,
    StreamCaptureError,
)
from ostinato.logs import logger
from ostinato.records import dataclass

if TYPE_CHECKING:
    from ostinato.driver.stream import Event, Operation, Stream

T = TypeVar("T")

_LOCK_PATIENCE = 1.0
"""Seconds that a thread of the driver waits for the lock of a context."""
_BACKLOG = 64
"""The number of retired objects above which `collect` does not wait for captures to end."""


class CallKind(enum.Enum):
    """The kind of a call on a stream, for a graph that is being made of the stream's work."""

    WORK = "an operation that a graph can hold"
    ONCE = "work, or a wait, that a graph cannot do again"
    ORDER = "an event is recorded or waited for"
    GIVE = "another library gets the stream"


class Tap:
    """A listener for the work that is submitted to streams: a capture or a recording.

    Subclasses override the calls that they need; the base class does nothing.
    """

    needs_access = False
    """True if operations must list the memory that they read and write."""

    def entering(
        self, stream: Stream, what: str, kind: CallKind, operation: Operation | None
    ) -> None:
        """Called before the call named `what` on a stream reaches the driver; raises to refuse it.

        `operation` is the operation to be submitted, if known: for a tap that needs access it is
        known for all work but launches of graphs.
        """

    def submitted(self, stream: Stream, operation: Operation) -> None:
        """Called after the driver accepted the operation."""

    def recorded(self, stream: Stream, event: Event) -> None:
        """Called after an event was recorded on the stream."""

    def waited(self, stream: Stream, event: Event) -> None:
        """Called after the stream was made to wait for an event: in a capture, a fork or a join."""

    def awaited(self, event: Event | None) -> None:
        """Called before the host waits for an event (or queries its state), or for the device."""

    def fills(self, graph: GraphHandle, what: str) -> Stream | None:
        """Returns the stream whose capture puts its work into the graph, if this tap follows one.

        Called before the graph is changed by hand; raises to refuse that.  `what` names the change.
        """
        return None

    def added(self, graph: object, node: NodeHandle, label: object) -> None:
        """Called after a node was added by hand to the graph that a capture fills; the `Graph` of
        the addition keeps the objects that the node points at alive."""

    def failed(self, stream: Stream | None, error: DriverError) -> None:
        """Called when the driver refused a call on this stream, or (None) one without a stream."""


contexts: weakref.WeakSet[Context] = weakref.WeakSet()
"""Every context of this process."""


def members(objects: weakref.WeakSet[T]) -> tuple[T, ...]:
    """Returns the members of a set that other threads and finalisers may change meanwhile.

    Before CPython 3.14 the iteration of a WeakSet that changes ends with RuntimeError.
    """
    while True:
        try:
            return tuple(objects)
        except RuntimeError:
            continue


class Hot(Protocol):
    """An object with a shortcut that is valid while there is no tap and its stream is open."""

    def cool(self) -> None:
        """Drops the shortcut; `Context.keep_hot` allows it again."""


class Watcher(Protocol):
    """An object that points at memory of other owners, such as an executable graph."""

    def memory_closed(self, memory: MemoryRange) -> None:
        """Called, perhaps on any thread, when memory that it watches is freed."""


class _Raising(Tap):
    """Makes the next call on a stream raise the error of a host function."""

    def __init__(self, context: Context) -> None:
        self._context = weakref.ref(context)

    def entering(
        self, stream: Stream, what: str, kind: CallKind, operation: Operation | None
    ) -> None:
        context = self._context()
        if context is not None and not context.captures_here():
            context.raise_failures()


class HasContext(Protocol):
    """A device, or an object made on one."""

    @property
    def context(self) -> Context: ...


def context_of(device: HasContext) -> Context:
    """Returns the context of a device.  Raises InputError for other objects."""
    context = getattr(device, "context", None)
    if not isinstance(context, Context):
        given = "its context" if isinstance(device, Context) else type(device).__name__
        raise InputError(f"a device is needed (ostinato.open_device), not {given}")
    return context


class Turn:
    """The lock of one stream, which a step holds for a call, so that threads take turns.

    `submitting`: the threads that are submitting work, from before their check for a capture on the
    stream until the driver has the work.  A capture begins when no other thread is submitting.

    A context has one for each stream handle, also if several `Stream` objects have that handle.
    """

    __slots__ = ("__weakref__", "lock", "submitting")

    def __init__(self) -> None:
        self.lock = new_lock()
        self.submitting: set[int] = set()


@dataclass(slots=True, eq=False)
class _Retired:
    """A closed object that is not destroyed yet.

    States: streams not yet marked -> waiting for `marks` -> destroyed.
    `past`: the whole device was waited for since, so its streams need no marks.
    `gone`: `destroy` was called, which must not happen twice.
    """

    destroy: Callable[[], None]
    streams: tuple[Stream, ...] = ()
    quiet: bool = False
    marks: list[EventHandle] = field(default_factory=list)
    past: bool = False
    gone: bool = False


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A capture under way: the thread that began it, and whether no thread may destroy objects."""

    thread: int
    exclusive: bool


class Context:
    """A driver, the retired objects that wait for it, and the taps on its streams."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.space: Space = space_of(driver)
        """Its memory, which decides what may be used together; shared by two devices on one GPU."""
        self.taps: tuple[Tap, ...] = ()
        self.modules: Any = None
        """The module cache of its device, for code that has no device; None without a device."""
        self.memory_epoch: object = object()
        """An object that is replaced each time that memory of the context is closed."""
        self.owners: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
        """The live owners of allocations made here, by address."""
        self.watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        """Watchers of all memory that is freed, not only of single owners."""
        self.given_back = 0
        """Bytes by which free memory rose while retired objects were destroyed; counted only while
        `measuring` is on."""
        self._measuring = 0
        self._hot: weakref.WeakSet[Hot] = weakref.WeakSet()
        self._incoming: deque[_Retired] = deque()
        self._waiting: list[_Retired] = []
        self._lock = new_lock()
        self._idle = threading.Condition(self._lock)
        # True while a thread goes through the waiting objects: a garbage collection meanwhile may
        # run a finaliser that closes objects, whose call of `collect` must not do the same.
        self._looking = False
        self._destroying: set[object] = set()
        self.captures: dict[object, _UnderWay] = {}
        """The captures of this library that are under way, by token.  Read-only elsewhere."""
        self._abandoned: deque[Callable[[], None]] = deque()
        self._turns: weakref.WeakValueDictionary[int, Turn] = weakref.WeakValueDictionary()
        self.closed = False
        """True if the device was closed, or if this is a forked child."""
        self._forked = False
        self._advice = "open it again"
        self.failures = HostFailures()
        """Host functions that raised and that no call has reported yet."""
        noted = weakref.WeakMethod(self._host_function_raised)  # the driver must not keep this

        def listener(function: Callable[[], object], error: BaseException) -> None:
            note = noted()
            if note is not None:
                note(function, error)

        driver.on_host_failure(listener)
        switch_off_in_children(self)
        said_at_exit(self)
        contexts.add(self)

    def after_fork(self) -> None:
        """Makes every later call in a forked child raise before it reaches the driver."""
        self._forked = self.closed = True
        self.cool()

    def require_same(self, other: Context, what: str, of: str) -> None:
        """Raises InputError unless both are of one device (or of two that were opened on one GPU).

        `what` names the object of `other`, and `of` ("the stream is of") the one of this context.
        """
        if other.space is not self.space:
            raise InputError(
                f"{what} is of another device ({other.space.name}), and {of} {self.space.name} "
                "(# counts the devices opened in this process): use objects of one device together"
            )

    def turn(self, handle: int) -> Turn:
        """Returns the turn of the stream with this handle, one as long as a `Stream` holds it."""
        with self._lock:
            turn = self._turns.get(handle)
            if turn is None:
                turn = self._turns[handle] = Turn()
            return turn

    def owner_of(self, address: int) -> object | None:
        """Returns the owner of the allocation that holds an address, if it was made here."""
        memory = self.driver.memory_range(address)
        return None if memory is None else self.owners.get(memory.address)

    # --- captures
    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Allows, in the block, calls of this thread that captures forbid but that cannot harm
        one, such as an allocation; they break no capture, whichever thread captures."""
        before = self.driver.thread_exchange_capture_mode(CaptureMode.RELAXED)
        try:
            yield
        finally:
            self.driver.thread_exchange_capture_mode(before)

    def capture_begun(self, token: object, *, exclusive: bool = False) -> None:
        """Keeps this thread, or with `exclusive` all threads, from destroying objects from here on.

        `exclusive` is for captures in global mode, which calls of any thread can break; the call
        waits until no other thread is destroying objects.  `capture_ended` needs the `token`.
        """
        with self._idle:
            self.captures[token] = _UnderWay(threading.get_ident(), exclusive)
            while exclusive and self._destroying:
                self._idle.wait()

    def capture_ended(self, token: object) -> None:
        """Undoes `capture_begun`, and destroys the waiting objects that can be.  Idempotent."""
        with self._lock:
            self.captures.pop(token, None)
        self.collect()

    def abandon(self, end: Callable[[], None]) -> None:
        """Notes that `end` must be called, to end a capture that was dropped.

        Safe in finalisers: only appends to a deque.
        """
        self._abandoned.append(end)

    def end_abandoned(self) -> None:
        """Ends the captures that were dropped while they were under way; tries each once."""
        for _ in range(len(self._abandoned)):
            with suppress(IndexError):  # another thread took the last one
                self._abandoned.popleft()()

    def report(self, error: DriverError) -> None:
        """Calls `failed` of the taps: the driver refused a call that is not on a stream."""
        for tap in self.taps:
            tap.failed(None, error)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Calls `failed` of the taps if a call in the block, not on a stream, is refused."""
        try:
            yield
        except DriverError as error:
            self.report(error)
            raise

    # --- failures of work that no call waits for
    def _host_function_raised(self, function: Callable[[], object], error: BaseException) -> None:
        """Notes a failure.  Called on a driver's thread, which must not wait for other threads."""
        self.failures.note(function, error)
        # Without the lock the next wait still raises it.
        if self._lock.acquire(timeout=_LOCK_PATIENCE):
            try:
                if not any(isinstance(tap, _Raising) for tap in self.taps):
                    self.add_tap(_Raising(self))
            finally:
                self._lock.release()

    def raise_failures(self) -> None:
        """Raises HostFunctionError, once, if a host function has raised."""
        with self._lock:
            self.taps = tuple(tap for tap in self.taps if not isinstance(tap, _Raising))
            error = self.failures.take()
        if error is not None:
            raise error

    def captures_here(self) -> bool:
        """True if the calling thread captures."""
        me = threading.get_ident()
        return any(one.thread == me for one in tuple(self.captures.values()))

    def unsaid(self, patience: float) -> OstinatoError | None:
        """Returns a failure that no call has raised; waits up to `patience` seconds for work."""
        failed = None if self.closed else self.driver.unraised(patience)
        return self.failures.take() or failed

    def say_unsaid(self) -> None:
        """Waits for the device, which is being closed, and logs a failure that no call has
        raised."""
        unsaid = self.unsaid(0 if self.captures else math.inf)
        if unsaid is not None:
            logger(__name__).error("closing %s: %s", self.driver.name, str(unsaid))

    # --- taps
    def add_tap(self, tap: Tap) -> None:
        """Passes all stream work of this context to the tap from here on."""
        with uninterrupted, self._lock:
            self.taps = (*self.taps, tap)
            self.cool()

    def remove_tap(self, tap: Tap) -> None:
        """Undoes `add_tap`.  Idempotent."""
        with self._lock:
            self.taps = tuple(t for t in self.taps if t is not tap)

    @contextmanager
    def tapped(self, tap: Tap) -> Iterator[None]:
        """Passes all stream work of a `with` block to the tap."""
        try:
            self.add_tap(tap)
            yield
            self.remove_tap(tap)
        except BaseException:  # also Ctrl-C before `add_tap` did anything
            self.remove_tap(tap)
            raise

    def keep_hot(self, hot: Hot) -> bool:
        """True if a shortcut may be taken now.  Its `cool` is then called when that changes."""
        with self._lock:
            if not self.taps:
                self._hot.add(hot)
            return not self.taps

    def cool(self) -> None:
        """Drops every shortcut, because a tap was added or a stream was closed."""
        with uninterrupted, self._lock:
            for one in members(self._hot):
                one.cool()
            # Only now: a child that is forked in between finds the remaining ones here.
            self._hot = weakref.WeakSet()

    # --- destruction
    @property
    def retired(self) -> int:
        """The number of closed objects that are not destroyed yet."""
        return len(self._incoming) + len(self._waiting)

    def retire(
        self,
        destroy: Callable[[], None],
        streams: Iterable[Stream] = (),
        *,
        quiet: bool = False,
    ) -> None:
        """Notes that `destroy` must run once all present work on `streams` is done.

        `quiet`: only while no thread captures, since `destroy` waits for the device.  Safe in
        finalisers: only appends to a deque.  Streams are marked at the next `collect`, so work
        submitted in between is waited for as well.  Nothing is noted once the device is closed: the
        driver has destroyed the object, and references of `destroy` must not be kept.
        """
        if not self.closed:
            self._incoming.append(_Retired(destroy, tuple(streams), quiet))

    def collect(self) -> int:
        """Destroys the objects that can be destroyed now; returns how many still wait.

        Does nothing while a capture is under way, nor inside a host function.  With more than
        `_BACKLOG` retired objects (threads that capture in turns may never leave a pause) captures
        of other threads do not delay it, except those in global mode, which it would break.
        Objects are destroyed outside of the lock: that may take long (freeing memory waits for the
        device) and may retire more.  Errors of the driver are logged, not raised.
        """
        if self._abandoned and not self.closed:
            self.end_abandoned()
        if not self._incoming and not self._waiting:
            return 0
        if in_host_function():
            return self.retired
        ready: deque[_Retired] = deque()
        mine = object()
        try:
            with uninterrupted, self._lock:
                if self.closed or self._looking or self._must_wait():
                    return self.retired
                self._destroying.add(mine)
                self._looking = True
                try:
                    self._sort_out(ready)
                finally:
                    self._looking = False
            before = self.free_memory() if ready and self._measuring else None
            while ready:
                self._destroy(ready.popleft())
            after = None if before is None else self.free_memory()
            if before is not None and after is not None:
                with self._lock:
                    self.given_back += max(0, after - before)
        finally:
            self._incoming.extend(ready)  # left by Ctrl-C: destroying may wait for the device
            with self._idle:
                self._destroying.discard(mine)
                self._idle.notify_all()
        # Destroying an object retires the objects that only it kept alive.
        return self.collect() if self._incoming else self.retired

    def free_memory(self) -> int | None:
        """Returns the free bytes of the device; None if the driver cannot tell."""
        try:
            return self.driver.memory_info()[0]
        except DriverError:
            return None  # a size is not essential: a later call raises the error

    def measuring(self, on: bool) -> None:
        """Counts `given_back` from here on; False ends one call of this with True."""
        with self._lock:
            self._measuring += 1 if on else -1

    def _take_in(self) -> None:
        """Moves the objects that finalisers noted to the waiting ones."""
        while self._incoming:
            self._waiting.append(self._incoming.popleft())

    def _sort_out(self, ready: deque[_Retired]) -> None:
        """Moves the objects that need not wait any more to `ready`."""
        self._take_in()
        waiting: list[_Retired] = []
        for item in self._waiting:
            (ready if self._reached(item) else waiting).append(item)
        self._waiting = waiting

    def _must_wait(self) -> bool:
        if not self.captures:
            return False
        me = threading.get_ident()
        under_way = self.captures.values()
        if any(one.thread == me or one.exclusive for one in under_way):
            return True
        return self.retired <= _BACKLOG

    def _reached(self, item: _Retired) -> bool:
        """Advances an object by as many states as possible.  True once its marks are reached."""
        if item.quiet and self.captures:
            return False
        try:
            if not item.past and not self._marks_reached(item):
                return False
        except ContextPoisonedError:
            pass  # the context is lost, and its objects with it
        except DriverError as error:
            # As text: a log that keeps the error would keep its frames, and their objects.
            logger(__name__).warning(
                "waiting for a closed object failed, and goes on: %s", str(error)
            )
            return False
        while item.marks:
            self._destroy_mark(item.marks.pop())
        return True

    def _marks_reached(self, item: _Retired) -> bool:
        """Marks the streams that are not marked yet; returns whether all marks are reached."""
        for stream in item.streams:
            mark = stream.mark()
            if mark is not None:  # None: the stream is being captured
                item.marks.append(mark)
                item.streams = tuple(s for s in item.streams if s is not stream)
        while item.marks:
            if not self.driver.event_query(item.marks[-1]):
                return False
            self._destroy_mark(item.marks.pop())
        return not item.streams

    def _destroy_mark(self, mark: EventHandle) -> None:
        self._try_to_destroy(lambda: self.driver.event_destroy(mark))

    def _destroy(self, item: _Retired) -> None:
        if item.gone:
            return
        item.gone = True
        if not self._try_to_destroy(item.destroy):
            item.gone = False
            with self._lock:
                self._waiting.append(item)

    @staticmethod
    def _try_to_destroy(destroy: Callable[[], None]) -> bool:
        """Returns False, to try again later, if a capture (maybe of another library) forbids it."""
        try:
            destroy()
        except ContextPoisonedError:
            pass  # the context is lost, and its objects with it
        except StreamCaptureError as error:
            logger(__name__).warning("destroying a closed object is put off: %s", str(error))
            return False
        except DriverError as error:
            logger(__name__).warning("destroying a closed object failed: %s", str(error))
        return True

    def synchronize(self) -> None:
        """Waits for all work of the context, then destroys objects closed or dropped before.

        Objects that another thread is destroying meanwhile may still be there when this returns.
        Raises CaptureError while another thread captures: CUDA then refuses this call in all
        threads, and it would break that capture.  DriverError (900) while this thread captures.
        """
        self.require_open()
        self.end_abandoned()  # an abandoned capture would forbid the wait
        mine = threading.get_ident()
        with self._lock:
            others = any(capture.thread != mine for capture in self.captures.values())
        if others:
            raise CaptureError(
                "another thread is capturing, and a wait for the whole device would break its "
                "capture; nothing was done. Wait for streams or events, or until the capture has "
                "ended"
            )
        for tap in self.taps:
            tap.awaited(None)
        with self.reporting():
            self._wait_for_all()
        self.collect()
        if self.failures:
            self.raise_failures()

    def _wait_for_all(self) -> None:
        """Waits for the device, and notes that objects retired before need no marks: a mark that is
        made now is not reached at once, even if no work runs."""
        with self._lock:
            if not self._looking:
                self._take_in()
            before = tuple(self._waiting)
        self.driver.synchronize()
        with self._lock:
            for item in before:
                item.past = True

    # --- lifetime
    def require_open(self) -> None:
        """Raises ClosedError once the device is closed, and in a forked child."""
        if self.closed:
            raise ClosedError(
                FORKED if self._forked else f"{self.driver.name} is closed; {self._advice}"
            )

    def drop(self) -> None:
        """Closes a device without references; does not wait.  Safe in finalisers."""
        self._advice = "nothing refers to its Device any more: keep it as long as it is used"
        self.closed = True
        self.cool()
        self._incoming.clear()
        self.driver.close()

    def close(self) -> None:
        """Waits for the device, destroys waiting objects, and closes the driver.  Idempotent."""
        if self.closed:
            return
        self.say_unsaid()
        try:
            self._wait_for_all()
        except DriverError as error:
            logger(__name__).debug("closing %s: %s", self.driver.name, str(error))
        self.collect()
        with self._lock:
            self.closed = True
            self._incoming.clear()
            self._waiting.clear()
        self.cool()  # launchers that check nothing must find it closed
        self.driver.close()
