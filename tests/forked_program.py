"""Forks while the device is idle, busy on other threads, captures, or is being changed; see
test_fork."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

import numpy as np

import ostinato as ost
from tests.sources import config, kernel, preload

N = 256
WORDS = "forked"
CHILD_SECONDS = 60
"""After which a child that hangs is ended by SIGALRM."""


class Parent:
    """A device with one of everything on it."""

    def __init__(self, name: str) -> None:
        self.device = preload(ost.open_device(name))
        self.stream = self.device.create_stream()
        self.x = self.device.array(np.ones(N, np.float32))
        self.out = self.device.zeros(N, np.float32)
        self.scalar = ost.DeviceScalar(self.device, np.float32, initial=1, stream=self.stream)
        self.pool = self.device.pool(reserve=4096)
        self.add = kernel(self.device, "add")
        self.graph = ost.capture_function(self.stream, self.work)
        self.run = self.graph.instantiate(upload=self.stream)
        self.run.launch(self.stream)
        self.cache = ost.GraphCache(self.device)
        self.step = ost.GraphedStep(
            lambda _, sizes: self.work(), stream=self.stream, cache=self.cache
        )
        for _ in range(3):
            self.step()
        self.stream.synchronize()

    def work(self) -> None:
        ost.launch(self.stream, self.add, config(N), self.x, self.x, self.out, N)

    def refused(self) -> dict[str, Callable[[], object]]:
        """What must raise in a child."""
        stream = self.stream
        return {
            "launch a graph": lambda: self.run.launch(stream),
            "launch a kernel": self.work,
            "copy to the device": lambda: self.x.set(np.zeros(N, np.float32), stream),
            "copy to the host": lambda: self.x.to_numpy(stream),
            "allocate": lambda: self.device.zeros(4, "bytes"),
            "allocate in a pool": lambda: self.pool.empty(4, "bytes"),
            "set a scalar": lambda: self.scalar.set(2, stream),
            "wait for a stream": stream.synchronize,
            "wait for the device": self.device.synchronize,
            "capture": lambda: ost.capture_function(stream, self.work),
            "instantiate": lambda: self.graph.instantiate(),
            "rebind": lambda: self.run.rebind({self.x: self.out}),
            "a step": self.step,
            "make a stream": self.device.create_stream,
            "load a kernel": lambda: self.device.modules.get_or_compile("// nothing\n", "missing"),
        }

    def close_all(self) -> None:
        for one in (self.run, self.graph, self.step, self.cache, self.pool, self.x, self.out):
            one.close()
        self.stream.close()
        self.device.close()


def child(parent: Parent) -> None:
    for what, call in parent.refused().items():
        try:
            call()
        except ost.OstinatoError as error:
            assert WORDS in str(error), (what, error)
        else:
            raise AssertionError(f"{what} was not refused")
    gc.collect()
    parent.close_all()
    gc.collect()


def fork(parent: Parent) -> None:
    """Forks, and waits for the child, which ends as Python programs do."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_SECONDS)
        try:
            child(parent)
        except BaseException:
            traceback.print_exc()
            sys.exit(1)
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with status {status:#x}"


def main(name: str, way: str) -> None:
    parent = Parent(name)
    if way == "idle":
        fork(parent)
    elif way == "capturing":
        with ost.capture(parent.stream):
            parent.work()
            fork(parent)
    elif way == "cooling":
        stop = cooling(parent)
        fork(parent)
        stop.set()
    else:
        stop = threading.Event()
        threads = [
            threading.Thread(target=busy, args=(parent, stop), daemon=True) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for _ in range(3):
            fork(parent)
        stop.set()
        for thread in threads:
            thread.join()
    parent.run.launch(parent.stream)
    assert (parent.out.to_numpy(parent.stream) == 2).all()
    parent.close_all()
    print("the parent goes on")


class Slow:
    """A shortcut that takes its time to be dropped."""

    def __init__(self) -> None:
        self.reached, self.goes_on = threading.Event(), threading.Event()
        self.process = os.getpid()

    def cool(self) -> None:
        if os.getpid() == self.process:
            self.reached.set()
            self.goes_on.wait(CHILD_SECONDS)


def cooling(parent: Parent) -> threading.Event:
    """A thread drops shortcuts of launches, and stops in the middle until the event is set."""
    slow, context = Slow(), parent.device.context
    others = [Slow() for _ in range(7)]  # most likely one is reached before the launches' own
    for one in (slow, *others):
        one.reached, one.goes_on = slow.reached, slow.goes_on
        assert context.keep_hot(one)
    thread = threading.Thread(target=lambda: (context.cool(), others.clear()), daemon=True)
    thread.start()
    assert slow.reached.wait(CHILD_SECONDS)
    return slow.goes_on


def busy(parent: Parent, stop: threading.Event) -> None:
    stream = parent.device.create_stream()
    while not stop.is_set():
        parent.step()
        x = parent.device.zeros(N, np.float32)
        run = ost.capture_function(stream, lambda: ost.fill(stream, x, 1)).instantiate()  # noqa: B023
        run.launch(stream)
        stream.synchronize()
        run.close()
        x.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
