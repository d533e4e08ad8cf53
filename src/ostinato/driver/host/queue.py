"""The queues of the host driver, which run tasks, each with a thread of its own.

A thread refers to its queue and to the `HostContext`, and never to the driver.  So a driver without
references is collected, and its threads end, also while they wait for work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from ostinato.driver.api import HostFailureListener
from ostinato.driver.callbacks import mark_thread
from ostinato.driver.forking import FORKED, new_lock
from ostinato.driver.host.kernel import HostKernel
from ostinato.driver.host.memory import MemoryTable
from ostinato.driver.interrupts import uninterrupted
from ostinato.errors import ContextPoisonedError, DriverError, Status, driver_error
from ostinato.records import dataclass

Task: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True)
class StickyFailure:
    """The reason why the context is poisoned: every later call raises `status`."""

    status: int
    cause: BaseException
    detail: str


def _failure(error: BaseException) -> StickyFailure:
    """Returns the failure for an exception of running work.

    The traceback gives the name of the kernel: the step that called it has a variable `kernel`.
    """
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
    return StickyFailure(status, error, detail)


class HostContext:
    """The data of running work: memory, queues, and whether the context was closed or poisoned."""

    def __init__(self, total_memory: int) -> None:
        self.memory = MemoryTable(total_memory)
        self.failure: StickyFailure | None = None
        self.raised = False
        """True once a call has raised the failure."""
        self.listeners: list[HostFailureListener] = []
        self.closed = False
        self.why_closed = "the host driver was closed"
        self.queues: set[WorkQueue] = set()
        # The threads that run work.  The driver refuses their calls.
        self.workers: set[int] = set()

    def enter(self, call: str) -> str:
        """Raises if the context is closed or poisoned, and on a thread that runs work.

        Returns `call`, the name of the driver's call that begins.
        """
        if self.closed:
            raise driver_error(Status.INVALID_CONTEXT, call, self.why_closed)
        if threading.get_ident() in self.workers:
            raise driver_error(
                Status.NOT_PERMITTED, call, "kernels and host functions must not call the driver"
            )
        if self.failure is not None:
            self.raise_failure(call)
        return call

    def raise_failure(self, call: str) -> None:
        """Raises the failure that poisoned the context, if there is one."""
        failure = self.failure
        if failure is not None:
            self.raised = True
            raise driver_error(failure.status, call, failure.detail) from failure.cause

    def unraised(self, patience: float) -> DriverError | None:
        """Implements `Driver.unraised`."""
        end = time.monotonic() + patience
        while not self.stopped and time.monotonic() < end:
            if all(queue.reached(queue.submitted) for queue in self.queues.copy()):
                break
            time.sleep(0.001)
        if self.failure is None or self.raised:
            return None
        try:
            self.raise_failure("work under way")
        except DriverError as error:
            return error
        return None

    def fail(self, error: BaseException) -> None:
        """Poisons the context; the first failure is kept."""
        if self.failure is None and not self.closed:
            self.failure = _failure(error)

    @property
    def stopped(self) -> bool:
        """True if work that waits must stop waiting."""
        return self.closed or self.failure is not None

    def after_fork(self) -> None:
        """Makes every call in a forked child, which has none of the threads, raise."""
        self.closed, self.why_closed = True, FORKED
        self.queues.clear()

    def shut_down(self) -> None:
        """Ends every thread; drops work that has not begun."""
        self.closed = True
        for queue in self.queues.copy():
            queue.stop(drop=True)


class WorkQueue:
    """Tasks in order, numbered from 1.  `completed` is the number of the last finished one.

    Submissions are not guarded against Ctrl-C (`driver.interrupts`), which would make launches
    slower.  So a task enters the queue together with its number, in one step, and leaves it only
    after `completed` has reached the number; and each wait wakes the worker once more.

    A waiter first adds itself to the list and then reads `completed`; the worker first raises
    `completed` and then reads the list.  So no waiter is missed.
    """

    def __init__(self, context: HostContext, name: str) -> None:
        self.name = name
        self.completed = 0
        self._context = context
        self._tasks: deque[tuple[int, Task]] = deque()
        self._lock = new_lock()  # a garbage collection inside may end this same queue
        self._wake: SimpleQueue[None] = SimpleQueue()
        """At least one entry for each task, and one for `stop`."""
        self._stopping = False
        self._waiters: list[tuple[int, threading.Lock]] = []
        self._thread: threading.Thread | None = None
        context.queues.add(self)

    @property
    def submitted(self) -> int:
        """The number of the last task in the queue, or of the last finished one."""
        try:
            return self._tasks[-1][0]
        except IndexError:  # all are done, and `completed` was raised before the last one left
            return self.completed

    def submit(self, task: Task) -> int:
        """Appends a task; returns its number.  Does not wait."""
        with self._lock:
            if self._thread is None and not self._stopping:
                self._start()
            number = self.submitted + 1
            self._tasks.append((number, task))
            self._wake.put(None)
        return number

    @uninterrupted
    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._thread.start()

    def wait(self, number: int) -> None:
        """Waits until task `number` and all before it are done or were dropped (see `reached`)."""
        if self.reached(number):
            return
        latch = threading.Lock()
        latch.acquire()
        with self._lock:
            self._waiters.append((number, latch))
        if self.reached(number):
            self._release_waiters()
        latch.acquire()

    def reached(self, number: int) -> bool:
        """True if task `number` is done, was dropped, or was never submitted because its submission
        was interrupted."""
        if self.completed >= number or number > self.submitted:
            return True
        if self._wake.empty():  # perhaps the submission was interrupted before it woke the worker
            self._wake.put(None)
        return False

    def stop(self, *, drop: bool) -> None:
        """Ends the thread after the submitted tasks or, with `drop`, after the running one."""
        with self._lock:
            self._stopping = True
            if drop:
                self.completed = self.submitted
                self._tasks.clear()
            self._wake.put(None)
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
            done = [latch for number, latch in self._waiters if self.reached(number)]
            self._waiters = [w for w in self._waiters if w[1] not in done]
        for latch in done:
            latch.release()

    def _work(self) -> None:
        tasks, context = self._tasks, self._context
        me = threading.get_ident()
        mark_thread()
        context.workers.add(me)
        while True:
            self._wake.get()
            try:
                number, task = tasks[0]
            except IndexError:
                if self._stopping:
                    break
                continue
            if context.failure is None:
                try:
                    task()
                except BaseException as error:
                    context.fail(error)
            del task  # the task's objects must not live until the next task
            self._finish(number)
        context.workers.discard(me)
        context.queues.discard(self)

    def _finish(self, number: int) -> None:
        """Removes the finished task at the front, unless it was dropped meanwhile."""
        with self._lock:
            if self._tasks and self._tasks[0][0] == number:
                self.completed = number
                self._tasks.popleft()
        if self._waiters:
            self._release_waiters()


@dataclass(slots=True, eq=False)
class Mark:
    """A place in a queue, such as the last record of an event."""

    queue: WorkQueue
    number: int
    time: float | None = None

    def done(self) -> bool:
        return self.queue.reached(self.number)

    def wait(self) -> None:
        self.queue.wait(self.number)

    def stamp(self) -> None:
        self.time = time.perf_counter()


class Latch(Mark):
    """A place inside a graph launch, which may be reached before the launch ends.

    `stamps`: the number of nodes of the graph that record the event; the last one counts.
    """

    __slots__ = ("_left", "_reached")

    def __init__(self, queue: WorkQueue, number: int, stamps: int) -> None:
        super().__init__(queue, number)
        self._left = stamps
        self._reached = threading.Event()

    def done(self) -> bool:
        return self._reached.is_set() or super().done()

    def wait(self) -> None:
        # A launch that is dropped never sets the latch: check for the launch's end as well.
        while not self._reached.wait(0.02):
            if super().done():
                return

    def stamp(self) -> None:
        super().stamp()
        self._left -= 1
        if not self._left:
            self._reached.set()
