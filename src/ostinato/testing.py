"""Tools for testing code that uses this library: faults on demand, and held streams.

faults = FaultyDriver(HostDriver())
device = Device(faults)
faults.fail("graph_instantiate", status=Status.OUT_OF_MEMORY)   # the next one, once
faults.fail("mem_alloc", status=2, at=3, times=2)               # the 3rd and 4th from now
faults.fail_any(at=17)                                          # whatever the 17th call is

with HeldStream(stream) as held:    # nothing submitted from here on runs …
    run.launch(stream)
    assert not stream.done()
    held.release()                  # … until here, or the end of the block
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ostinato.driver.api import (
    Driver,
    StreamHandle,
)
from ostinato.driver.stream import Stream
from ostinato.errors import InputError, Status, driver_error

if TYPE_CHECKING:
    # To a type checker a wrapped driver has every call of the protocol, as this class has; at run
    # time the calls are looked up in the inner driver.
    from ostinato.driver.host.driver import HostDriver as _WrappedDriver
else:
    _WrappedDriver = object

__all__ = ["Fault", "FaultyDriver", "HeldStream"]


@dataclass(slots=True, eq=False)
class Fault:
    """Calls that will fail: from the `at`-th matching one on, `times` of them.

    `call` is the name of the call in the protocol, None for any call.  `seen` counts the matching
    calls since the fault was set, `fired` the failed ones among them.
    """

    call: str | None
    status: int
    at: int
    times: int
    seen: int = 0
    fired: int = 0

    def strikes(self, call: str) -> bool:
        """Counts one call; returns whether the call must fail."""
        if self.call is not None and self.call != call:
            return False
        self.seen += 1
        if not self.at <= self.seen < self.at + self.times:
            return False
        self.fired += 1
        return True

    @property
    def spent(self) -> bool:
        """True once all its `times` calls have failed."""
        return self.fired >= self.times


class FaultyDriver(_WrappedDriver):
    """A wrapper of any driver that makes chosen calls fail, and lists all calls made.

    A failed call does not reach the inner driver: it raises the error that the driver would raise
    for the status, and has no effect.  `name`, `capabilities`, `properties` and `close` are neither
    counted nor made to fail.
    A prepared launch (`exec_prepare_launch`) counts as `exec_launch` each time that it is called.
    """

    def __init__(self, inner: Driver) -> None:
        self.inner = inner
        self.calls: list[str] = []
        """The names of all calls made so far, in order, failed ones too."""
        self.faults: list[Fault] = []
        """The faults that are set and not yet spent."""
        self._guard = threading.Lock()

    def __repr__(self) -> str:
        made, left = len(self.calls), len(self.faults)
        return f"<FaultyDriver over {self.inner.name}: {made} calls made, {left} faults to come>"

    def fail(
        self, call: str, status: int = Status.INVALID_VALUE, *, at: int = 1, times: int = 1
    ) -> Fault:
        """Makes the `at`-th call of that name from now on fail, and the `times` - 1 after it.

        Raises InputError if the driver has no such call.
        """
        if call.startswith("_") or call in _NEVER_FAIL or not hasattr(Driver, call):
            raise InputError(f"the driver seam has no call {call!r} that can fail")
        return self._set(Fault(call, int(status), at, times))

    def fail_any(self, status: int = Status.INVALID_VALUE, *, at: int = 1, times: int = 1) -> Fault:
        """Makes the `at`-th call of any name from now on fail, and the `times` - 1 after it."""
        return self._set(Fault(None, int(status), at, times))

    def _set(self, fault: Fault) -> Fault:
        if fault.at < 1 or fault.times < 1:
            raise InputError(f"at={fault.at}, times={fault.times}: both count from 1")
        with self._guard:
            self.faults.append(fault)
        return fault

    def clear(self) -> None:
        """Removes the faults that have not fired yet, and the list of calls."""
        with self._guard:
            self.faults.clear()
            self.calls.clear()

    def count(self, call: str) -> int:
        """Returns how often a call was made so far."""
        with self._guard:
            return self.calls.count(call)

    def _note(self, call: str) -> None:
        with self._guard:
            self.calls.append(call)
            striking = [fault for fault in self.faults if fault.strikes(call)]
            self.faults = [fault for fault in self.faults if not fault.spent]
        if striking:
            raise driver_error(striking[0].status, call, "injected by ostinato.testing")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            inner = getattr(self.inner, name)
            if name.startswith("_") or name in _NEVER_FAIL or not hasattr(Driver, name):
                return inner
            wrapped = inner
            if name == "exec_prepare_launch":
                wrapped = self._prepared(inner)
            elif name in _SHORTCUTS:
                wrapped = _no_shortcut

            @functools.wraps(inner)
            def call(*arguments: Any, **options: Any) -> Any:
                self._note(name)
                return wrapped(*arguments, **options)

            self.__dict__[name] = call  # later accesses find this and skip `__getattr__`
            return call

    def _prepared(
        self, prepare: Callable[..., Callable[[], int]]
    ) -> Callable[..., Callable[[], int]]:
        def prepare_counted(*arguments: Any, **options: Any) -> Callable[[], int]:
            launch = prepare(*arguments, **options)

            def counted() -> int:
                self._note("exec_launch")
                return launch()

            return counted

        return prepare_counted


def _no_shortcut(*_: object) -> None:
    """Returns None, so that every launch is a `launch_kernel`, and every change of a node an
    `exec_set_params`, which can be made to fail."""


_SHORTCUTS = ("function_prepare_launch", "exec_prepare_kernel", "exec_prepare_kernels")
_NEVER_FAIL = frozenset(
    {"name", "capabilities", "properties", "cuda_context", "close", "on_host_failure", "unraised"}
)


class HeldStream:
    """A stream that runs nothing more until it is released: for tests of work under way.

    Takes a `Stream`, or a driver and a stream handle.  Entering submits a host function that
    blocks; leaving, or `release()`, ends it.  It blocks for `at_most` seconds, so that a failed
    test cannot block the machine.  Other streams go on.
    """

    def __init__(
        self,
        stream: Stream | Driver,
        handle: StreamHandle | None = None,
        *,
        at_most: float = 60.0,
    ) -> None:
        if isinstance(stream, Stream):
            if handle is not None:
                raise InputError("give a Stream, or a driver and a handle")
            self._driver: Driver = stream.context.driver
            self._handle = stream.handle
        else:
            if handle is None:
                raise InputError("give a Stream, or a driver and a handle")
            self._driver = stream
            self._handle = handle
        self._at_most = at_most
        self._gate = threading.Event()
        self._reached = threading.Event()

    def __repr__(self) -> str:
        held = self._reached.is_set() and not self._gate.is_set()
        state = "held" if held else "released" if self._gate.is_set() else "not held yet"
        return f"<HeldStream {self._handle:#x} on {self._driver.name}, {state}>"

    def __enter__(self) -> Self:
        gate, reached, at_most = self._gate, self._reached, self._at_most

        def hold() -> None:
            reached.set()
            gate.wait(at_most)

        self._driver.launch_host_function(self._handle, hold)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def wait_until_held(self, timeout: float = 10.0) -> bool:
        """Waits until earlier work of the stream is done; False after `timeout` seconds."""
        return self._reached.wait(timeout)

    def release(self) -> None:
        """Lets the stream run again.  Idempotent; any thread may call."""
        self._gate.set()

    def release_after(self, seconds: float) -> None:
        """Lets the stream run again after `seconds`, while the caller waits for its work."""
        timer = threading.Timer(seconds, self.release)
        timer.daemon = True
        timer.start()
