"""One opened device below its user's face: the driver, what waits to be destroyed, who listens.

`Context` is what every owner object (stream, buffer, module, graph) holds.  It answers for the
rule that destroying anything waits until no capture is under way and no replay uses it:

    owner.close() or its finaliser
        └─ retire(destroy, streams)     noted; nothing happens to the driver yet
             └─ collect()               outside of captures: marks the streams with events,
                                        destroys what lies behind reached marks

Finalisers run on any thread, between any two lines, also inside a capture.  So they only append to
a deque; the driver is touched in `collect`, which owners call where the driver may be touched.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ostinato.driver.api import Driver, EventHandle
from ostinato.errors import ClosedError, ContextPoisonedError, DriverError

if TYPE_CHECKING:
    from ostinato.driver.stream import Operation, Stream

__all__ = ["Context", "HasContext", "Hot", "Tap", "context_of"]

_log = logging.getLogger(__name__)
_BACKLOG = 64
"""More than so many retired things are not left waiting for a pause between captures."""


class Tap(Protocol):
    """Someone who is told of the work submitted to streams: a capture or a recording."""

    needs_access: bool
    """Whether operations must say what they read and write."""

    def submitted(self, stream: Stream, operation: Operation) -> None:
        """Called after the driver took the operation."""
        ...

    def waited(self, stream: Stream) -> None:
        """Called after the stream was made to wait for an event: a fork or a join, in a capture."""
        ...

    def failed(self, stream: Stream | None, error: DriverError) -> None:
        """Called when the driver refused a call on this stream, or one that is no stream's."""
        ...


class Hot(Protocol):
    """Something with a shortcut that holds only while nobody taps and no stream is closed."""

    def cool(self) -> None:
        """Drops the shortcut; it may be taken again after a fresh look."""
        ...


class HasContext(Protocol):
    """A device, or anything made on one."""

    @property
    def context(self) -> Context: ...


def context_of(value: Context | HasContext) -> Context:
    """The context of a device or of what was made on it."""
    return value if isinstance(value, Context) else value.context


@dataclass(slots=True, eq=False)
class _Retired:
    """Something closed that is not destroyed yet.

    States: streams not yet marked -> waiting for `marks` -> destroyed.
    `past`: the whole device was waited for since, so its streams and marks need not be asked.
    """

    destroy: Callable[[], None]
    streams: tuple[Stream, ...] = ()
    quiet: bool = False
    marks: list[EventHandle] = field(default_factory=list)
    past: bool = False


class Context:
    """A driver, the retired objects that wait for it, and the taps on its streams."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.taps: tuple[Tap, ...] = ()
        self._hot: weakref.WeakSet[Hot] = weakref.WeakSet()
        self._incoming: deque[_Retired] = deque()
        self._waiting: list[_Retired] = []
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        # Set while this thread goes through what waits: garbage collection may come in between,
        # and somebody's finaliser may close things, which must not go through it as well.
        self._looking = False
        self._destroying = 0
        self._capturing: Counter[int] = Counter()  # captures under way by the thread that began
        self._exclusive = 0
        self._closed = False

    # --- captures
    @property
    def captures_under_way(self) -> int:
        """How many captures this library has begun and not ended on this context."""
        return self._capturing.total()

    def capture_begun(self, *, exclusive: bool = False) -> int:
        """This thread destroys nothing from here on; with `exclusive`, no thread does.

        `exclusive` is for captures in global mode, which any thread's calls can break; it waits for
        what another thread is destroying just now.  Gives what `capture_ended` takes.
        """
        thread = threading.get_ident()
        with self._idle:
            self._capturing[thread] += 1
            self._exclusive += exclusive
            while exclusive and self._destroying:
                self._idle.wait()
        return thread

    def capture_ended(self, thread: int, *, exclusive: bool = False) -> None:
        """Undoes one `capture_begun`; what waited is destroyed as far as it can be."""
        with self._lock:
            self._capturing[thread] -= 1
            self._exclusive -= exclusive
            if not self._capturing[thread]:
                del self._capturing[thread]
        self.collect()

    def report(self, error: DriverError) -> None:
        """Tells the taps that the driver refused a call that is no stream's."""
        for tap in self.taps:
            tap.failed(None, error)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """For calls that are no stream's: the taps are told if the driver refuses one."""
        try:
            yield
        except DriverError as error:
            self.report(error)
            raise

    def add_tap(self, tap: Tap) -> None:
        with self._lock:
            self.taps = (*self.taps, tap)
        self.cool()

    def keep_hot(self, hot: Hot) -> bool:
        """Whether a shortcut may be taken now; if so it is cooled when that changes."""
        with self._lock:
            if not self.taps:
                self._hot.add(hot)
            return not self.taps

    def cool(self) -> None:
        """Drops every shortcut: somebody taps, or a stream was closed."""
        with self._lock:
            hot, self._hot = list(self._hot), weakref.WeakSet()
            for one in hot:
                one.cool()

    def remove_tap(self, tap: Tap) -> None:
        with self._lock:
            self.taps = tuple(t for t in self.taps if t is not tap)

    # --- destruction
    @property
    def retired(self) -> int:
        """How many closed objects are not destroyed yet."""
        return len(self._incoming) + len(self._waiting)

    def retire(
        self,
        destroy: Callable[[], None],
        streams: Iterable[Stream] = (),
        *,
        quiet: bool = False,
    ) -> None:
        """Notes that `destroy` is to run once all work now on `streams` is done.

        `quiet`: and while no capture is under way on any thread, since it waits for the device.
        Safe in finalisers: touches nothing but a deque.  Streams are marked at the next `collect`,
        so work submitted in between is waited for as well.
        """
        self._incoming.append(_Retired(destroy, tuple(streams), quiet))

    def collect(self) -> int:
        """Destroys what can be destroyed now; how many still wait.  Never raises.

        Does nothing while a capture is under way.  Only with a long backlog (threads that capture
        in turns never leave a pause) it goes on beside another thread's capture, unless that is
        in global mode: the others are not disturbed by it.  Destroying happens outside of the
        lock: it may take long (freed memory waits for the device) and retire more.
        """
        if not self._incoming and not self._waiting:
            return 0
        with self._lock:
            if self._closed or self._looking or self._must_wait():
                return self.retired
            self._looking = True
            try:
                self._take_in()
                ready: list[_Retired] = []
                waiting: list[_Retired] = []
                for item in self._waiting:
                    (ready if self._reached(item) else waiting).append(item)
                self._waiting = waiting
            finally:
                self._looking = False
            self._destroying += 1
        try:
            for item in ready:
                self._destroy(item)
        finally:
            with self._idle:
                self._destroying -= 1
                self._idle.notify_all()
        # Whatever a destroyed thing kept alive was retired by its going.
        return self.collect() if ready and self._incoming else self.retired

    def _take_in(self) -> None:
        """What finalisers noted is among what waits from here on."""
        while self._incoming:
            self._waiting.append(self._incoming.popleft())

    def _must_wait(self) -> bool:
        if not self._capturing:
            return False
        mine = threading.get_ident() in self._capturing
        return mine or self._exclusive > 0 or self.retired <= _BACKLOG

    def _reached(self, item: _Retired) -> bool:
        """Moves one retired thing on by as many states as it can.  True once its marks are past."""
        driver = self.driver
        if item.quiet and self._capturing:
            return False
        try:
            unmarked = []
            for stream in () if item.past else item.streams:
                mark = stream.mark()
                if mark is None:  # captured by someone else just now
                    unmarked.append(stream)
                else:
                    item.marks.append(mark)
            item.streams = tuple(unmarked)
            while item.marks:
                if not item.past and not driver.event_query(item.marks[-1]):
                    return False
                driver.event_destroy(item.marks.pop())
        except DriverError as error:
            if not isinstance(error, ContextPoisonedError):
                # As text: a log that keeps the error keeps its frames, and what they hold.
                _log.warning("waiting for a closed object failed: %s", str(error))
            return True
        return not item.streams

    def _destroy(self, item: _Retired) -> None:
        try:
            item.destroy()
        except ContextPoisonedError:
            pass  # the driver took everything down with it
        except DriverError as error:
            _log.warning("destroying a closed object failed: %s", str(error))

    def synchronize(self) -> None:
        """Waits for all work of the context, then destroys what was closed or dropped before.

        What another thread is destroying just now may be gone a moment later.
        """
        with self.reporting():
            self._wait_for_all()
        self.collect()

    def _wait_for_all(self) -> None:
        """Waits for the device.  What was retired before is not asked by marks then: one that is
        made only now is not reached at once, also where nothing runs."""
        with self._lock:
            if not self._looking:
                self._take_in()
            before = tuple(self._waiting)
        self.driver.synchronize()
        with self._lock:
            for item in before:
                item.past = True

    @property
    def closed(self) -> bool:
        return self._closed

    def require_open(self) -> None:
        """Raises ClosedError once the device is closed."""
        if self._closed:
            raise ClosedError(f"the device {self.driver.name} is closed; open it again")

    def close(self) -> None:
        """Waits for the device, destroys what waits, and gives the driver back.  Idempotent."""
        if self._closed:
            return
        try:
            self._wait_for_all()
        except DriverError as error:
            _log.debug("closing %s: %s", self.driver.name, str(error))
        self.collect()
        with self._lock:
            self._closed = True
            self._incoming.clear()
            self._waiting.clear()
        self.driver.close()
