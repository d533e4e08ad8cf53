"""Whole calls by a short way: what they give, when they give up, and what they leave behind."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from benchmarks import torch_graphed
from ostinato.device import Device
from ostinato.errors import ClosedError
from ostinato.interop.graphed import Graphed
from ostinato.interop.reading import recheck
from ostinato.interop.reading.library import NotGraphable
from tests.interop.library import Array, Lib, graphed

pytestmark = pytest.mark.skipif(not recheck.compiled(), reason="the extension was not built")


@pytest.fixture(params=["inside", "beside"])
def make(
    make: Callable[..., Graphed], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Graphed]:
    """Graphed functions whose graphs copy arrays themselves, or have them copied beside."""
    if request.param == "beside":
        monkeypatch.setattr(Lib, "extent", lambda self, array: None)
    return make


def numbers(start: float = 0.0) -> Any:
    return np.arange(start, start + 4, dtype=np.float32)


def double(x: Array) -> Array:
    return x.line(2.0)


def heated(step: Graphed, lib: Lib, *, args: int = 1) -> Any:
    for start in range(4):
        step(*[lib.array(numbers(start)) for _ in range(args)])
    assert step._hot, "there is no short way"
    return step._hot[0].way


def check(step: Graphed, lib: Lib, start: float) -> None:
    np.testing.assert_array_equal(step(lib.array(numbers(start))).numpy(), 2 * numbers(start))


def test_counts_and_times(lib: Lib, make: Any) -> None:
    step, began = make(double), time.perf_counter()
    heated(step, lib)
    for start in range(100):
        check(step, lib, start)
    statistics = step.statistics()
    (line,) = statistics.keys
    assert (line.calls, line.replays, line.eager) == (104, 103, 1) and statistics.calls == 104
    assert statistics.cache.hits == 103
    spent = time.perf_counter() - began
    assert 0 < line.seconds.p50 <= line.seconds.largest <= spent, "not in seconds"
    assert step.statistics().calls == 104, "counted twice"
    step._set_hot()
    assert step.statistics().calls == 104


def test_what_another_call_gives(lib: Lib, make: Any) -> None:
    step = make(double)
    way = heated(step, lib)
    x = lib.array(numbers(3))
    before = way.count
    assert way.call((), {}) is recheck.MISSED
    assert way.call((x, x), {}) is recheck.MISSED
    assert way.call((lib.array(np.ones(3)),), {}) is recheck.MISSED
    assert way.count == before
    np.testing.assert_array_equal(way.call((x,), {}).numpy(), 2 * numbers(3))
    with pytest.raises(TypeError):
        way.call(x)
    way.end()
    assert way.call((x,), {}) is recheck.MISSED


def test_an_evicted_graph_is_captured_again(lib: Lib, make: Any) -> None:
    step = make(double)
    for _ in range(5):
        for start in range(12):  # a way is looked for less and less often
            check(step, lib, start)
        assert step._hot and step.cache.evict_all() == 1
        check(step, lib, 7)
    assert step.statistics().captures == 6


def test_close_and_invalidate(lib: Lib, make: Any) -> None:
    step = make(double)
    way = heated(step, lib)
    step.forget()
    assert way.call((lib.array(numbers()),), {}) is recheck.MISSED
    for start in range(4):
        check(step, lib, start)
    way = heated(step, lib)
    step.close()
    assert way.call((lib.array(numbers()),), {}) is recheck.MISSED
    with pytest.raises(ClosedError):
        step(lib.array(numbers()))


@pytest.mark.parametrize("what", ["new", "clone", "address", "stage", "replay"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_errors_leave_it_as_it_was(
    lib: Lib,
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    error: type[BaseException],
) -> None:
    armed: list[bool] = []

    def failing(function: Any) -> Any:
        def call(*args: Any) -> Any:
            if armed:
                raise error("injected")
            return function(*args)

        return call

    names = {"stage": "copy"}
    if what == "replay":
        monkeypatch.setattr(ost.GraphCache, "replay", failing(ost.GraphCache.replay))
    else:
        name = names.get(what, what)
        monkeypatch.setattr(Lib, name, failing(getattr(Lib, name)))
    step = make(double)
    heated(step, lib)
    x = lib.array(numbers(5))
    armed.append(True)
    if what == "replay":
        with pytest.raises(error):
            step(x)
    else:  # not all of these are called in both ways
        with contextlib.suppress(error):
            step(x)
    armed.clear()
    free = []
    thread = threading.Thread(target=lambda: free.append(step._lock.acquire(timeout=300)))
    thread.start()
    thread.join()
    assert free == [True], "the lock is held still"
    step._lock._at_fork_reinit()
    for start in range(4):
        check(step, lib, start)


def test_an_array_without_an_address(lib: Lib, make: Any) -> None:
    """Its key has the reason, so it is no error of the short way."""
    step, x = make(double), lib.array(numbers())
    way, asked = heated(step, lib), []

    class Nowhere:
        @property
        def address(self) -> int:
            asked.append(True)
            raise RuntimeError("no memory")

    x.buffer = Nowhere()  # type: ignore[assignment]
    assert way.call((x,), {}) is recheck.MISSED and asked
    check(step, lib, 3)


def test_streams_in_turns(lib: Lib, make: Any) -> None:
    step = make(double)
    results = []
    for call in range(40):
        with lib.on(lib.streams[call // 3 % 2]):
            x = lib.array(numbers(call))
            results.append(step(x))
    for call, result in enumerate(results):
        np.testing.assert_array_equal(result.numpy(), 2 * numbers(call))
    assert lib.waits >= 13


def test_threads_streams_and_evictions(lib: Lib, make: Any) -> None:
    step = make(lambda x, y: (x.line(2.0), {"y": y.line(3.0)}))
    wrong: list[Any] = []
    stop = threading.Event()

    def work(number: int) -> None:
        for call in range(150):
            x, y = (lib.array(numbers(call + k * number)) for k in (100, 1000))
            a, rest = step(x, y)
            if not (
                np.array_equal(a.numpy(), 2 * numbers(call + 100 * number))
                and np.array_equal(rest["y"].numpy(), 3 * numbers(call + 1000 * number))
            ):
                wrong.append((number, call))

    def disturb() -> None:
        while not stop.wait(0.01):
            step.cache.evict_all()
            step.statistics()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    other = threading.Thread(target=disturb)
    for thread in (*threads, other):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    other.join()
    assert not wrong
    statistics = step.statistics()
    assert statistics.calls == 450 == statistics.replays + statistics.eager


def test_memory_that_the_function_writes(lib: Lib, make: Any) -> None:
    total = lib.array(np.zeros(4))

    def add(x: Array) -> Array:
        total.shift(1.0)
        return x.line(2.0)

    step = make(add)
    for call in range(1, 9):
        check(step, lib, call)
        np.testing.assert_array_equal(total.numpy(), [call] * 4)
    assert step._hot
    result = step(total)  # a copy would not see what is written
    np.testing.assert_array_equal(result.numpy(), [18.0] * 4)
    assert "shares memory" in str(step.statistics().eager_reasons)


@pytest.mark.parametrize("begin", [0, 4, 8])
def test_a_part_of_memory_that_the_function_writes(lib: Lib, make: Any, begin: int) -> None:
    total, beside = lib.array(np.zeros(12)), lib.array(np.zeros(12))

    def add(x: Array) -> Array:
        total.shift(1.0)
        return x.line(2.0)

    step = make(add)
    way = heated(step, lib)
    calls, (hot,) = way.count, step._hot
    other = Array(lib, (4,), beside.buffer[begin : begin + 4])
    np.testing.assert_array_equal(step(other).numpy(), [0.0] * 4)
    assert way.count == calls + 1
    part = Array(lib, (4,), total.buffer[begin : begin + 4])
    assert hot.match((part,), {}) is not None
    np.testing.assert_array_equal(step(part).numpy(), [12.0] * 4)
    assert way.count == calls + 1 and "shares memory" in str(step.statistics().eager_reasons)


def test_a_dropped_function_is_gone(lib: Lib, host_device: Device) -> None:
    step = graphed(double, lib)
    heated(step, lib)
    captured, gone = step._hot[0].line.captured, weakref.ref(step)
    gc.disable()
    try:
        del step
        assert gone() is None, "something that has no owner keeps it"
    finally:
        gc.enable()
    host_device.synchronize()
    gc.collect()
    assert captured() is None


def test_the_benchmark_finds_the_parts_of_a_call(
    make: Callable[..., Graphed], lib: Lib, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks inside, and is run with a GPU alone."""
    monkeypatch.setattr(torch_graphed, "_synchronize", lib.device.synchronize)
    step = make(double)
    heated(step, lib)
    way = torch_graphed.Way("graphed", step, 0.0, 0.0)
    row = torch_graphed._parts(way, (lib.array(numbers()),), (lib.array(numbers(1)),), 1)
    assert row["short"] and row["replays"]
    inside = {"patch_us", "patched_us"} if step._hot[0].line.captured().moves is not None else set()
    assert (
        row.keys()
        == {"short", "moved_us", "match_us", "replay_us", "bare_us", "replays", "eager"} | inside
    )


def test_keys_that_were_given_up(lib: Lib, make: Any) -> None:
    """Calls like them run the function without a key; others go on as before."""
    factor = [2.0]

    def f(x: Array, read: bool) -> Array:
        if read and x.lib.capturing():
            raise NotGraphable("it reads a value")
        return x.line(factor[0])

    step = make(f)

    def call(read: bool, times: int) -> int:
        """How many of these calls went by a key."""
        keyed = step._calls
        for start in range(times):
            found = step(lib.array(numbers(start)), read).numpy()
            np.testing.assert_array_equal(found, factor[0] * numbers(start))
        return step._calls - keyed

    call(True, 8)
    assert call(True, 50) == 0
    assert call(False, 40) < 30  # replays
    assert call(True, 50) < 40
    factor[0] = 3.0
    call(True, 5)
    call(False, 5)
    before = step.statistics().replays
    call(False, 3)
    assert step.statistics().replays == before + 3
    lines = {line.reason: line for line in step.statistics().keys}
    (given_up,) = [line for reason, line in lines.items() if "reads a value" in reason][:1]
    assert given_up.calls == given_up.eager == sum(given_up.eager_reasons.values())
    assert step.statistics().calls == sum(line.calls for line in step.statistics().keys)
    step.forget()
    assert call(True, 1) == 1


def test_a_function_that_is_given_up(lib: Lib, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps state in Python, so no call of it has a key of its own."""
    seen: list[int] = []

    def f(x: Array) -> Array:
        f.calls = getattr(f, "calls", 0) + 1  # type: ignore[attr-defined]
        seen.append(f.calls)  # type: ignore[attr-defined]
        return x.line(2.0)

    step = make(f)
    for start in range(40):
        check(step, lib, start)
    assert seen == [*range(1, 41)] and step._calls < 20
    assert step.statistics().eager == step.statistics().calls == 40
    assert "changes Python state" in step.explain()
