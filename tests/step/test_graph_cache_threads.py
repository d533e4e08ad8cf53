"""Many threads: one capture for a key, errors for all who waited, no lock over other keys."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import CaptureError, ClosedError, NotHeldError
from tests.sources import config, empty_graph, kernel

PATIENCE = 30.0


@pytest.fixture
def cache(device: Device) -> Iterator[ost.GraphCache]:
    with ost.GraphCache(device) as opened:
        yield opened


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


class SlowMake:
    """A make() that waits inside until it is let go; `calls` counts."""

    def __init__(self, make: Callable[[], ost.GraphExec]) -> None:
        self.make = make
        self.calls = 0
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> ost.GraphExec:
        self.calls += 1
        self.inside.set()
        assert self.go_on.wait(PATIENCE)
        return self.make()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.001)


def test_one_capture_however_many_ask(
    device: Device, cache: ost.GraphCache, pool: ThreadPoolExecutor
) -> None:
    stream, count = device.create_stream(), device.zeros(1, np.int32)
    increment = kernel(device, "increment")

    def captured() -> ost.GraphExec:
        return ost.capture_function(
            stream, lambda: ost.launch(stream, increment, config(1), count, 1)
        ).instantiate()

    make = SlowMake(captured)
    asked = [pool.submit(cache.get_or_capture, "a", make) for _ in range(8)]
    until(lambda: cache.statistics().joined == 7)
    make.go_on.set()
    got = {id(f.result(PATIENCE)) for f in asked}
    assert len(got) == 1 and make.calls == 1
    wait([pool.submit(cache.replay, "a", stream) for _ in range(8)])
    assert count.to_numpy(stream)[0] == 8
    stats = cache.statistics()
    assert (stats.captures, stats.joined, stats.hits, stats.misses) == (1, 7, 8, 0)


def test_a_failure_reaches_everyone_who_waited_and_nobody_later(
    device: Device, cache: ost.GraphCache, pool: ThreadPoolExecutor
) -> None:
    def fail() -> ost.GraphExec:
        raise CaptureError("cannot be captured")

    make = SlowMake(fail)
    asked = [pool.submit(cache.get_or_capture, "a", make) for _ in range(4)]
    until(lambda: cache.statistics().joined == 3)
    make.go_on.set()
    errors = {id(f.exception(PATIENCE)) for f in asked}
    assert len(errors) == 1 and isinstance(asked[0].exception(), CaptureError)
    assert make.calls == 1 and "a" not in cache
    assert cache.statistics().capture_failures == 1
    cache.get_or_capture("a", lambda: empty_graph(device))
    assert "a" in cache and cache.statistics().captures == 1


def test_those_who_wait_for_one_that_gave_up_try_again(
    device: Device, cache: ost.GraphCache, pool: ThreadPoolExecutor
) -> None:
    """Ctrl-C in the thread that captures is that thread's affair."""

    def interrupted() -> ost.GraphExec:
        raise KeyboardInterrupt

    make = SlowMake(interrupted)
    first = pool.submit(cache.get_or_capture, "a", make)
    assert make.inside.wait(PATIENCE)
    second = pool.submit(cache.get_or_capture, "a", lambda: empty_graph(device))
    until(lambda: cache.statistics().joined == 1)
    make.go_on.set()
    assert isinstance(first.exception(PATIENCE), KeyboardInterrupt)
    assert second.result(PATIENCE) is cache.get("a")


def test_a_make_that_asks_for_its_own_key_is_refused(device: Device, cache: ost.GraphCache) -> None:
    def make() -> ost.GraphExec:
        return cache.get_or_capture("a", lambda: empty_graph(device))

    with pytest.raises(CaptureError, match="key 'a' waits for itself"):
        cache.get_or_capture("a", make)
    cache.get_or_capture("a", lambda: empty_graph(device))


def test_a_make_may_ask_for_another_key(device: Device, cache: ost.GraphCache) -> None:
    def make() -> ost.GraphExec:
        cache.get_or_capture("inner", lambda: empty_graph(device))
        return empty_graph(device)

    cache.get_or_capture("outer", make)
    assert cache.keys() == ["inner", "outer"]


def test_a_ring_of_two_threads_is_refused(
    device: Device, cache: ost.GraphCache, pool: ThreadPoolExecutor
) -> None:
    both = threading.Barrier(2)

    def make(other: str) -> ost.GraphExec:
        both.wait(PATIENCE)
        return cache.get_or_capture(other, lambda: empty_graph(device))

    asked = {
        "a": pool.submit(cache.get_or_capture, "a", lambda: make("b")),
        "b": pool.submit(cache.get_or_capture, "b", lambda: make("a")),
    }
    # One is refused, which fails its key; that failure reaches the other, which waited for it.
    errors = {id(f.exception(PATIENCE)) for f in asked.values()}
    assert len(errors) == 1 and isinstance(asked["a"].exception(), CaptureError)
    assert len(cache) == 0


def test_who_waited_once_is_not_taken_for_waiting(
    device: Device, cache: ost.GraphCache, pool: ThreadPoolExecutor
) -> None:
    """b waits for a, a lands; then a's thread asks for b: no ring, though b may not run yet."""
    for _ in range(50):
        a, b_begun = SlowMake(lambda: empty_graph(device)), threading.Event()

        def make_b(a: SlowMake = a, b_begun: threading.Event = b_begun) -> ost.GraphExec:
            b_begun.set()
            cache.get_or_capture("a", a)
            return empty_graph(device)

        def both(a: SlowMake = a) -> None:
            cache.get_or_capture("a", a)
            cache.get_or_capture("b", lambda: empty_graph(device))

        first = pool.submit(both)
        assert a.inside.wait(PATIENCE)
        second = pool.submit(cache.get_or_capture, "b", make_b)
        assert b_begun.wait(PATIENCE)
        a.go_on.set()
        first.result(PATIENCE)
        second.result(PATIENCE)
        cache.evict_all()


def test_a_long_capture_holds_nobody_else_up(
    device: Device, cache: ost.GraphCache, pool: ThreadPoolExecutor
) -> None:
    stream, x = device.create_stream(), device.zeros(1, np.int32)
    add = kernel(device, "increment")
    graph = ost.Graph.create(device)
    graph.add_kernel(add, config(1), x, 1)
    cache.install("quick", graph.instantiate())
    make = SlowMake(lambda: empty_graph(device))
    slow = pool.submit(cache.get_or_capture, "slow", make)
    assert make.inside.wait(PATIENCE)
    assert cache.replay("quick", stream) and not cache.replay("slow", stream)
    cache.get_or_capture("other", lambda: empty_graph(device))
    assert cache.touching(x) == ["quick"] and cache.evict("other")
    assert int(x.to_numpy(stream)[0]) == 1 and not slow.done()
    make.go_on.set()
    assert slow.result(PATIENCE) is cache.get("slow")


def test_a_changed_replay_launches_its_own_change(
    device: Device, cache: ost.GraphCache, pool: ThreadPoolExecutor
) -> None:
    """Another thread's change of the graph does not come between a change and its launch."""
    stream, total = device.create_stream(), device.zeros(1, np.int32)
    increment = kernel(device, "increment")
    with ost.capture(stream) as under_way:
        ost.launch(stream, increment, config(1), total, 1)
    cache.install("a", under_way.graph.instantiate())
    others: list[Future[bool]] = []

    def other(run: ost.GraphExec) -> None:
        run.set(0, 1, 10)

    def change(run: ost.GraphExec) -> None:
        run.set(0, 1, 100)
        others.append(pool.submit(cache.replay, "a", stream, other))
        wait(others, timeout=0.2)  # it waits for this replay

    assert cache.replay("a", stream, change) and others[0].result(PATIENCE)
    assert total.to_numpy(stream)[0] == 110


def test_an_install_during_a_capture_of_the_key(
    device: Device, cache: ost.GraphCache, pool: ThreadPoolExecutor
) -> None:
    """The last one to come is kept; the other is closed, not lost."""
    make, installed = SlowMake(lambda: empty_graph(device)), empty_graph(device)
    slow = pool.submit(cache.get_or_capture, "a", make)
    assert make.inside.wait(PATIENCE)
    cache.install("a", installed)
    assert cache.get_or_capture("a", make) is installed
    make.go_on.set()
    assert slow.result(PATIENCE) is cache.get("a")
    assert installed.closed and cache.statistics().replaced == 1


def test_failures_leave_no_cycles(cache: ost.GraphCache) -> None:
    """What a failed capture held is dropped at once, and not when the collector comes by."""

    class Held:
        pass

    seen: list[weakref.ref[Held]] = []

    def fail() -> ost.GraphExec:
        held = Held()
        seen.append(weakref.ref(held))
        raise CaptureError("no")

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(CaptureError):
            cache.get_or_capture("a", fail)
        assert seen[-1]() is None
    finally:
        gc.enable()


def test_everything_at_once(device: Device) -> None:
    """A storm: every replay that says it ran did run, and everything that left is closed."""
    total = device.zeros(1, np.int32)
    add = kernel(device, "increment")
    made: list[ost.GraphExec] = []
    replays = [0] * 6
    cache = ost.GraphCache(device, max_graphs=3)
    stream = device.create_stream()  # one for all, so that the additions are ordered

    def make() -> ost.GraphExec:
        graph = ost.Graph.create(device)
        graph.add_kernel(add, config(1), total, 1)
        run = graph.instantiate()
        made.append(run)
        return run

    def storm(index: int) -> None:
        chance = random.Random(index)
        for _ in range(150):
            key = chance.randrange(5)
            match chance.randrange(8):
                case 0:
                    cache.evict(key)
                case 1:
                    cache.install(key, make())
                case 2:
                    cache.evict_touching(total)
                case 3:
                    with contextlib.suppress(NotHeldError), cache.hold(key) as run:
                        run.launch(stream)
                        replays[index] += 1
                case 4 | 5:
                    cache.get_or_capture(key, make)
                case _:
                    replays[index] += cache.replay(key, stream)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # more chances to come between any two lines
    try:
        with ThreadPoolExecutor(len(replays)) as pool:
            done: list[Future[None]] = [pool.submit(storm, i) for i in range(len(replays))]
    finally:
        sys.setswitchinterval(interval)
    for future in done:
        future.result()
    assert int(total.to_numpy(stream)[0]) == sum(replays) > 0
    stats = cache.statistics()
    assert stats.leaving == 0 and stats.graphs <= 3
    kept = [cache.get(key) for key in range(5)]
    assert all((run in kept) != run.closed for run in made)
    assert stats.captures + stats.installed == len(made)
    assert len(made) == stats.graphs + stats.replaced + stats.evictions.total
    cache.close()
    assert all(run.closed for run in made)
    with pytest.raises(ClosedError):
        cache.replay(0, stream)
