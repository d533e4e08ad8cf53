"""Streams of the host driver: ordered queues, each drained by a thread of its own.

Nothing here knows the driver: the threads hold only their queue and the `HostContext`, so that a
driver which nobody holds any more can be collected while its threads still wait for work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ostinato.driver.host_kernel import HostKernel
from ostinato.driver.host_memory import MemoryTable
from ostinato.errors import ContextPoisonedError, DriverError, Status

if TYPE_CHECKING:
    from ostinato.driver.host_capture import Capture
    from ostinato.driver.host_graph import Node

__all__ = [
    "CapturedMark",
    "Event",
    "Failure",
    "HostContext",
    "Latch",
    "Mark",
    "Stream",
    "WorkQueue",
]

Task: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why nothing on the context works any more."""

    status: int
    cause: BaseException
    detail: str


def _failure(error: BaseException) -> Failure:
    """What a failure of running work means; which kernel it was is found in the traceback."""
    status = int(Status.ILLEGAL_ADDRESS if isinstance(error, IndexError) else Status.LAUNCH_FAILED)
    detail = f"{type(error).__name__}: {error}"
    if isinstance(error, DriverError):
        detail = f"{error.call}: {error.detail}"
        if isinstance(error, ContextPoisonedError):
            status = error.status
    else:
        frame = error.__traceback__
        while frame is not None:
            kernel = frame.tb_frame.f_locals.get("kernel")
            if isinstance(kernel, HostKernel):
                detail = f"kernel {kernel.name}: {detail}"
                break
            frame = frame.tb_next
    return Failure(status, error, detail)


class HostContext:
    """What running work needs: the memory, the queues, and whether all is lost."""

    def __init__(self, total_memory: int) -> None:
        self.memory = MemoryTable(total_memory)
        self.failure: Failure | None = None
        self.closed = False
        self.queues: set[WorkQueue] = set()
        # Threads that run work: the driver refuses their calls, as CUDA does in host functions.
        self.workers: set[int] = set()

    def fail(self, error: BaseException) -> None:
        """Poisons the context; the first failure stays."""
        if self.failure is None and not self.closed:
            self.failure = _failure(error)

    @property
    def stopped(self) -> bool:
        """Whether work that waits for something should give up."""
        return self.closed or self.failure is not None

    def shut_down(self) -> None:
        """Ends every thread; work that has not begun is dropped."""
        self.closed = True
        for queue in tuple(self.queues):
            queue.stop(drop=True)


class WorkQueue:
    """Tasks in order, numbered from 1.  `completed` is the number of the last one done.

    Only the worker writes `completed`, and only under the GIL's ordering: a waiter first puts
    itself on the list and then looks at `completed`; the worker first counts and then looks at the
    list.  So one of the two always sees the other, and the fast path takes no lock.
    """

    def __init__(self, context: HostContext, name: str) -> None:
        self.name = name
        self.submitted = 0
        self.completed = 0
        self._context = context
        self._tasks: deque[Task] = deque()
        self._lock = threading.RLock()  # a collection inside may end this very queue
        self._wake = threading.Lock()
        self._wake.acquire()
        self._idle = False
        self._stopping = False
        self._waiters: list[tuple[int, threading.Lock]] = []
        self._thread: threading.Thread | None = None
        context.queues.add(self)

    def submit(self, task: Task) -> int:
        """Puts a task at the end; its number.  Returns at once."""
        with self._lock:
            self._tasks.append(task)
            self.submitted += 1
            number = self.submitted
            if self._idle:
                self._idle = False
                self._wake.release()
            elif self._thread is None and not self._stopping:
                self._start()
        return number

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._thread.start()

    def wait(self, number: int) -> None:
        """Waits until task `number` and all before it are done (or dropped)."""
        if self.completed >= number:
            return
        latch = threading.Lock()
        latch.acquire()
        with self._lock:
            self._waiters.append((number, latch))
        if self.completed >= number:
            self._release_waiters()
        latch.acquire()

    def stop(self, *, drop: bool) -> None:
        """Ends the thread after the tasks that were submitted, or after the one that runs."""
        with self._lock:
            self._stopping = True
            if drop:
                self._tasks.clear()
                self.completed = self.submitted
            if self._idle:
                self._idle = False
                self._wake.release()
            if self._thread is None:
                self._context.queues.discard(self)
        if drop:
            self._release_waiters()

    def join(self, timeout: float) -> None:
        """Waits for the thread's end, but never for the calling thread itself."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _release_waiters(self) -> None:
        with self._lock:
            done = [latch for number, latch in self._waiters if number <= self.completed]
            self._waiters = [w for w in self._waiters if w[0] > self.completed]
        for latch in done:
            latch.release()

    def _work(self) -> None:
        tasks, context = self._tasks, self._context
        me = threading.get_ident()
        context.workers.add(me)
        task: Task | None = None
        while True:
            try:
                task = tasks.popleft()
            except IndexError:
                with self._lock:
                    if tasks:
                        continue
                    if self._stopping:
                        break
                    self._idle = True
                self._wake.acquire()
                continue
            if context.failure is None:
                try:
                    task()
                except BaseException as error:
                    context.fail(error)
            task = None  # what it holds must not live until the next task comes
            self.completed += 1
            if self._waiters:
                self._release_waiters()
        context.workers.discard(me)
        context.queues.discard(self)


class Mark:
    """A place in a queue, as an event remembers it."""

    __slots__ = ("number", "queue", "time")

    def __init__(self, queue: WorkQueue, number: int) -> None:
        self.queue = queue
        self.number = number
        self.time: float | None = None

    def done(self) -> bool:
        return self.queue.completed >= self.number

    def wait(self) -> None:
        self.queue.wait(self.number)

    def stamp(self) -> None:
        self.time = time.perf_counter()


class Latch(Mark):
    """A place inside a graph launch: it may be reached before the launch ends."""

    __slots__ = ("_reached",)

    def __init__(self, queue: WorkQueue, number: int) -> None:
        super().__init__(queue, number)
        self._reached = threading.Event()

    def done(self) -> bool:
        return self._reached.is_set() or super().done()

    def wait(self) -> None:
        # The launch may be dropped, and then nobody reaches the latch: look at its end as well.
        while not self._reached.wait(0.02):
            if super().done():
                return

    def stamp(self) -> None:
        super().stamp()
        self._reached.set()


@dataclass(frozen=True, slots=True)
class CapturedMark:
    """A place in a capture: what work after it would depend on."""

    capture: Capture
    dependencies: tuple[Node, ...]


@dataclass(slots=True, eq=False)
class Event:
    handle: int
    timing: bool
    mark: Mark | None = None
    """The last record outside of captures; None counts as done."""
    captured: CapturedMark | None = None
    """The last record, if it was in a capture."""
    destroyed: bool = False


@dataclass(slots=True, eq=False)
class Stream:
    handle: int
    queue: WorkQueue
    capture: Capture | None = None
    dependencies: tuple[Node, ...] = ()
    """While it captures: what its next node depends on."""
    destroyed: bool = False
