"""Captures that another thread breaks: the key is captured again later, a few times."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import (
    CaptureBrokenError,
    ClosedError,
    EagerRunError,
    Status,
    driver_error,
)
from ostinato.interop.captures import captured, disturbed, explained
from ostinato.interop.graphed import Graphed
from ostinato.step import Reason
from tests.interop.library import Array, Lib
from tests.threads import in_thread


class Capturing(Lib):
    """Captures as the libraries of `interop` do, and can be disturbed meanwhile."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.disturb: Callable[[], object] | None = None

    def capture(self, work: Callable[[ost.Stream], Any]) -> tuple[ost.Graph, Any]:
        self.captures += 1
        pool = [self.device.zeros(4096, "f4") for _ in range(8)]
        self.here.pool = [*pool]

        def run(stream: ost.Stream) -> Any:
            self.here.capture = ost.Capture(stream)  # any: it says that this thread captures
            try:
                return work(stream)
            finally:
                self.here.capture = None

        with self.on(self.side):
            graph, result = captured(self.side, run, str)
        return ost.Graph.adopt(self.device, int(graph.handle), owner=(graph, pool)), result


@pytest.fixture
def lib(host_device: Device) -> Capturing:
    return Capturing(host_device)


def synchronize(lib: Capturing) -> BaseException | None:
    """What another thread gets that waits for the device."""
    return in_thread(lib.device.driver.synchronize)


def function(lib: Capturing, where: str) -> Callable[[Array], Array]:
    def f(x: Array) -> Array:
        if where == "before" and lib.capturing() and lib.disturb is not None:
            lib.disturb()
        out = x.line(2.0)
        if where == "after" and lib.capturing() and lib.disturb is not None:
            lib.disturb()
        return out

    return f


def call(step: Graphed, lib: Capturing, times: int) -> None:
    for start in range(times):
        x = np.arange(start, start + 4, dtype=np.float32)
        np.testing.assert_array_equal(step(lib.array(x)).numpy(), 2 * x)


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_capture_that_another_thread_broke_is_made_again(
    lib: Capturing, make: Any, where: str
) -> None:
    step = make(function(lib, where), guard=False)
    seen: list[Any] = []
    lib.disturb = lambda: seen.append(synchronize(lib))
    call(step, lib, 2)
    assert [error.status for error in seen] == [Status.STREAM_CAPTURE_UNSUPPORTED]
    (line,) = step.statistics().keys
    assert (line.eager, line.captures, line.broken, line.reason) == (2, 0, 1, "")
    assert "tried again" in str(line.eager_reasons)
    lib.disturb = None
    call(step, lib, 3)
    (line,) = step.statistics().keys
    assert (line.eager, line.captures, line.replays, line.broken) == (2, 1, 3, 1)
    assert step.statistics().broken == 1 and "did not break (1x)" in step.explain()


@pytest.mark.parametrize(
    ("where", "disturb", "words"),
    [
        ("after", "synchronize", ["synchronize()", "5 times"]),
        ("before", "short_of_memory", ["5 times: a capture had no memory", "no 4096 bytes left"]),
    ],
)
def test_a_key_whose_captures_always_fail_runs_eagerly(
    lib: Capturing, make: Any, where: str, disturb: str, words: list[str]
) -> None:
    step = make(function(lib, where), guard=False)
    lib.disturb = lambda: globals()[disturb](lib)
    call(step, lib, 100)
    (line,) = step.statistics().keys
    assert lib.captures == line.broken == 5 and (line.captures, line.eager) == (0, 100)
    assert all(word in line.reason for word in [*words, "test_broken_captures.py"]), line.reason
    lib.disturb = None
    step.forget()
    call(step, lib, 3)
    assert step.statistics().replays == 2


def test_captures_that_are_broken_now_and_then_do_not_add_up(lib: Capturing, make: Any) -> None:
    step = make(function(lib, "after"), guard=False)
    call(step, lib, 1)
    for _ in range(7):
        lib.disturb = lambda: synchronize(lib)
        call(step, lib, 1)
        lib.disturb = None
        call(step, lib, 2)
        step.cache.evict_all()
    (line,) = step.statistics().keys
    assert (line.broken, line.captures, line.reason) == (7, 7, "")


def test_strict_says_that_it_is_tried_again(lib: Capturing, make: Any) -> None:
    step = make(function(lib, "after"), guard=False, strict=True)
    lib.disturb = lambda: synchronize(lib)
    call(step, lib, 1)
    with pytest.raises(EagerRunError, match="tried again"):
        call(step, lib, 1)
    lib.disturb = None
    call(step, lib, 1)


def test_what_the_function_does_itself_is_not_tried_again(lib: Capturing, make: Any) -> None:
    def waits(x: Array) -> Array:
        out = x.line(2.0)
        if lib.capturing():
            lib.device.synchronize()
        return out

    def hides(x: Array) -> Array:
        try:
            return waits(x)
        except ost.OstinatoError:
            return x.line(2.0)

    for f in (waits, hides):
        before = lib.captures
        step = make(f, guard=False)
        call(step, lib, 4)
        (line,) = step.statistics().keys
        assert line.reason and not line.broken and lib.captures == before + 1, f


def short_of_memory(lib: Capturing) -> None:
    """What an allocation in the function finds."""
    raise MemoryError("the device has no 4096 bytes left")


@pytest.mark.parametrize("where", ["in the function", "where its graph is made"])
def test_a_key_without_memory_for_its_graph_is_captured_later(
    lib: Capturing, make: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make(function(lib, "before"), guard=False)
    if where == "in the function":
        lib.disturb = lambda: short_of_memory(lib)
    else:
        no_memory = driver_error(Status.OUT_OF_MEMORY, "graph_instantiate")
        monkeypatch.setattr(ost.Graph, "instantiate", raising(no_memory))
    call(step, lib, 3)  # a warm-up, two captures
    (line,) = step.statistics().keys
    assert (line.eager, line.captures, line.broken, line.reason) == (3, 0, 2, "")
    assert "no memory" in str(line.eager_reasons) and lib.trims == [True, True]
    lib.disturb = None
    monkeypatch.undo()
    call(step, lib, 3)
    assert step.statistics().replays == 0  # it waits
    call(step, lib, 3)
    (line,) = step.statistics().keys
    assert (line.captures, line.replays, line.reason) == (1, 3, "")
    assert lib.trims == [True, True]


def test_a_key_without_memory_for_its_first_call_is_warmed_up_later(
    lib: Capturing, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the arguments were is kept while a key is warmed up."""
    step = make(function(lib, "before"), guard=False)
    monkeypatch.setattr(lib, "clone", raising(MemoryError("no 16 bytes left")))
    call(step, lib, 1)
    (line,) = step.statistics().keys
    assert (line.eager, line.broken, line.reason) == (1, 1, "") and lib.trims == [True]
    monkeypatch.undo()
    call(step, lib, 3)
    (line,) = step.statistics().keys
    assert (line.eager, line.captures, line.replays) == (2, 1, 2), step.explain()


def raising(error: Exception) -> Callable[..., Any]:
    def call(*args: object, **kwargs: object) -> Any:
        raise error

    return call


def test_what_a_capture_that_failed_has_allocated_is_given_back(lib: Capturing, make: Any) -> None:
    left: list[weakref.ref[Array]] = []

    def fails(x: Array) -> Array:
        out = x.line(2.0)
        if lib.capturing():
            left.append(weakref.ref(out))
            raise RuntimeError("the function asks for a value")
        return out

    step = make(fails, guard=False)
    there: list[object] = []
    lib.trim = lambda *, short: there.extend([left[0](), short])  # type: ignore[method-assign]
    call(step, lib, 3)
    assert there == [None, False] and step.statistics().captures == 0


def chained(*errors: BaseException) -> BaseException:
    """The last one, raised while those before it were handled."""
    for one, following in itertools.pairwise(errors):
        following.__context__ = one
    return errors[-1]


def test_which_errors_are_of_others() -> None:
    refused = driver_error(Status.STREAM_CAPTURE_UNSUPPORTED, "f")
    broken = driver_error(Status.STREAM_CAPTURE_INVALIDATED, "f")
    words = "CUDA error: operation {} capture\nSearch for `cudaErrorStream`"
    torch_broken = RuntimeError(words.format("failed due to a previous error during"))
    torch_refused = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    assert disturbed(broken) and disturbed(torch_broken)
    assert disturbed(chained(KeyError("x"), torch_broken, CaptureBrokenError("the capture")))
    assert not disturbed(refused) and not disturbed(torch_refused)
    assert not disturbed(chained(torch_refused, torch_broken))
    implicit = RuntimeError(
        "CUDA error: operation would make the legacy stream depend on a capturing blocking stream"
    )
    assert not disturbed(chained(implicit, torch_broken))
    assert "give it the stream that is current in ostinato" in explained(implicit, ost, "")
    assert not disturbed(chained(refused, broken, ValueError("mine")))
    assert not disturbed(ValueError("mine")) and not disturbed(CaptureBrokenError("the capture"))
    for status in (Status.STREAM_CAPTURE_UNJOINED, Status.STREAM_CAPTURE_ISOLATION):
        assert not disturbed(chained(driver_error(status, "f"), CaptureBrokenError("x")))


def test_a_replay_that_is_refused_runs_eagerly(lib: Capturing, make: Any) -> None:
    """Nothing of it ran: the call is made all the same, and its graph is made again."""
    step = make(function(lib, "before"), guard=False)
    call(step, lib, 3)
    refused = driver_error(Status.INVALID_VALUE, "graph_launch")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ost.GraphExec, "launch", raising(refused))
        call(step, lib, 1)
    (line,) = step.statistics().keys
    assert (line.eager, line.replays, line.reason) == (2, 2, "")
    assert line.eager_reasons[Reason.REFUSED.value] == 1
    call(step, lib, 2)
    (line,) = step.statistics().keys
    assert (line.captures, line.replays, line.eager) == (2, 4, 2)


def test_a_function_that_finds_no_memory_itself_runs_once(lib: Capturing, make: Any) -> None:
    """Its first call is a real one: what it did before is not done again."""
    total = lib.array(np.zeros(4))

    def f(x: Array) -> Array:
        total.shift(1.0)
        if lib.disturb is not None:
            lib.disturb()
        return x.line(2.0)

    step = make(f, guard=False)
    lib.disturb = lambda: short_of_memory(lib)
    with pytest.raises(MemoryError):
        step(lib.array(np.ones(4)))
    np.testing.assert_array_equal(total.numpy(), [1.0] * 4)
    lib.disturb = None
    call(step, lib, 3)
    np.testing.assert_array_equal(total.numpy(), [4.0] * 4)
    (line,) = step.statistics().keys
    assert (line.calls, line.eager, line.replays) == (4, 1, 2)


@pytest.mark.parametrize("called", [0, 1, 5])
def test_a_function_whose_cache_was_closed_runs_eagerly(
    lib: Capturing, make: Any, called: int
) -> None:
    cache = ost.GraphCache(lib.device)
    f = function(lib, "before")
    step, strict = [make(f, cache=cache, guard=False, strict=s) for s in (False, True)]
    call(step, lib, called)
    cache.close()
    call(step, lib, 3)
    if called:
        assert "cache of its graphs is closed" in step.explain()
    with pytest.raises(ClosedError, match="cache"):
        call(strict, lib, 1)
