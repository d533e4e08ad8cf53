"""What a step counts for each key, what it does over the cache's limits, and what strict means."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import (
    CaptureError,
    ClosedError,
    DriverError,
    EagerRunError,
    NotHeldError,
    PoolSealedError,
    Status,
)
from ostinato.explain import ReplayProfile
from ostinato.step import (
    Action,
    CaptureLimits,
    Decision,
    GraphCache,
    PowersOfTwo,
    Reason,
    engine,
    graphed_step,
)
from ostinato.step import cache as cache_module
from ostinato.testing import FaultyDriver
from tests.sources import config, empty_graph, kernel, preload

N = 8


class Counting:
    """count += 1, and how often the function was called."""

    def __init__(
        self, device: Device, *, limits: CaptureLimits | None = None, **options: object
    ) -> None:
        self.device, self.stream = device, device.create_stream()
        self.count = device.zeros(1, np.int32)
        self.increment = kernel(device, "increment")
        self.cache = GraphCache(device, buckets=PowersOfTwo(N), limits=limits)
        self.runs = 0
        self.broken = False
        self.preparing: Callable[[], object] = lambda: None
        self.step = ost.GraphedStep(
            self.run,
            stream=self.stream,
            cache=self.cache,
            name="counting",
            **options,  # type: ignore[arg-type]
        )

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.runs += 1
        self.preparing()
        ost.launch(stream, self.increment, config(1), self.count, 1)
        if self.broken and stream.is_capturing():
            raise CaptureError("planted")

    @property
    def value(self) -> int:
        return int(self.count.to_numpy(self.stream)[0])


# --- by key
def test_a_line_for_each_key(device: Device) -> None:
    case = Counting(device)
    for rows in (3, 3, 4, 3, 8):
        case.step(rows=rows)
    four, eight = case.step.statistics().keys
    assert four.key == case.step.key(rows=4) and eight.key == case.step.key(rows=8)
    assert (four.calls, four.eager, four.replays, four.captures) == (4, 1, 3, 1)
    assert (four.used, four.padded) == (13, 16) and four.padding_waste == pytest.approx(3 / 16)
    assert four.eager_reasons == eight.eager_reasons == {Reason.WARMING_UP.value: 1}
    assert four.graph is not None and four.graph == case.cache.key_statistics(four.key)
    assert four.graph.nbytes > 0 and four.graph.captures == 1
    assert four.graph.capture_seconds >= (four.graph.last_capture_seconds or 0) > 0
    # Found three times: after its capture, and by the two calls after that.
    assert (four.graph.hits, four.graph.misses) == (3, 2)
    assert (eight.calls, eight.replays, eight.reason) == (1, 0, "")
    assert eight.graph is not None and eight.graph.nbytes == 0
    case.cache.evict(four.key)
    line = case.step.statistics().keys[0]
    assert line.graph is not None and line.graph.evictions.asked == 1 and line.graph.nbytes == 0


def test_replays_are_timed_now_and_then(device: Device) -> None:
    case, began = Counting(device, warmups=0), time.perf_counter()
    for _ in range(2 * engine.TIMED_EVERY + 1):
        case.step(rows=1)
    (line,) = case.step.statistics().keys
    assert line.seconds.count == 2, "one in so many, and not the first"
    spent = time.perf_counter() - began
    assert 0 < line.seconds.p50 <= line.seconds.p99 == line.seconds.largest <= spent
    assert case.value == 2 * engine.TIMED_EVERY + 1


def test_held_launches_count_for_their_key(device: Device) -> None:
    case = Counting(device, warmups=0)
    case.step(rows=1)
    with case.step.hold(rows=3) as held:
        for _ in range(5):
            held.launch()
        during = case.step.statistics().keys[1]
        assert (during.calls, during.replays, during.used, during.padded) == (5, 5, 15, 20)
    after = case.step.statistics()
    assert (after.keys[1].calls, after.calls, after.replays) == (5, 6, 6)


def test_keys_that_were_dropped_count_on(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_REMEMBERED", 2)
    case = Counting(device, warmups=0)
    held = case.step.hold(rows=1)
    for rows in (2, 4, 8):
        case.step(rows=rows)
    case.cache.evict_all()  # keys with a graph are not dropped
    held.launch()
    statistics = case.step.statistics()
    assert [line.key for line in statistics.keys] == [case.step.key(rows=r) for r in (4, 8)]
    assert (statistics.calls, statistics.replays) == (4, 4)
    held.close()
    assert case.step.statistics().calls == 4 == case.value


def test_a_profile_by_key(host_device: Device) -> None:
    profile = ReplayProfile()
    case = Counting(host_device, warmups=0, profile=profile)
    for rows in (1, 1, 8):
        case.step(rows=rows)
    one = profile.percentiles("launch", key=case.step.key(rows=1))
    assert one.count == 2 and profile.percentiles("launch").count == 3
    assert profile.percentiles(key="unknown").count == 0


# --- limits
def test_a_key_that_is_captured_again_and_again_runs_eagerly(device: Device) -> None:
    case = Counting(device, warmups=0, limits=CaptureLimits(per_key=2, within=12))
    seen: list[Decision] = []
    for _ in range(30):
        seen.append(case.step(rows=1))
        case.cache.evict(case.step.key(rows=1))  # memory that moves at each step, say
    assert case.value == 30, "each call has run once"
    capped = [decision for decision in seen if decision.reason is Reason.RECAPTURED]
    assert {decision.action for decision in capped} == {Action.EAGER}
    assert "2 times in its last 12 uses" in capped[0].detail
    statistics = case.step.statistics()
    assert statistics.eager_reasons == {Reason.RECAPTURED.value: len(capped)}
    assert statistics.quarantined == {}
    assert 3 <= statistics.captures == 30 - len(capped) <= 8, "captured again once it may be"


def test_the_time_of_captures_runs_out(device: Device) -> None:
    case = Counting(device, warmups=0, limits=CaptureLimits(seconds=1e-9))
    assert case.step(rows=1).action is Action.BUILD  # one that begins is finished
    assert case.step(rows=1).action is Action.REPLAY
    late = case.step(rows=8)
    assert (late.action, late.reason) == (Action.EAGER, Reason.CAPTURE_TIME)
    assert case.step.prepare(rows=8).reason is Reason.CAPTURE_TIME
    with pytest.raises(NotHeldError, match=Reason.CAPTURE_TIME.value):
        case.step.hold(rows=8)
    assert case.value == 3


def test_time_that_runs_out_inside_a_capture_quarantines_nothing(device: Device) -> None:
    """Between the decision and the capture another thread may take what was left."""
    case = Counting(device, limits=CaptureLimits(per_key=1))
    key = case.step.key(rows=1)
    asked = case.cache.refusal

    def once_free(wanted: object) -> object:
        case.cache.refusal = asked  # type: ignore[method-assign]
        case.cache.get_or_capture(key, lambda: empty_graph(device))
        case.cache.evict(key)
        return None

    case.step(rows=1)
    case.cache.refusal = once_free  # type: ignore[assignment, method-assign]
    decision = case.step(rows=1)
    assert (decision.action, decision.reason) == (Action.EAGER, Reason.RECAPTURED)
    assert case.step.statistics().quarantined == {} and case.value == 2


@pytest.mark.parametrize("late", [False, True], ids=["before the call", "inside the capture"])
def test_a_sealed_pool_quarantines_nothing(device: Device, late: bool) -> None:
    """`late`: another thread seals the pool between the decision and the capture."""
    pool = device.pool(name="scratch")
    case = Counting(device, warmups=0, pool=pool, preload=pool.seal if late else None)
    if not late:
        pool.seal()
    for _ in range(2):
        decision = case.step(rows=2)
        assert (decision.action, decision.reason) == (Action.EAGER, Reason.POOL_SEALED)
        assert "pool.open()" in decision.detail
    assert case.step.prepare(rows=2).reason is Reason.POOL_SEALED
    pool.open()
    assert [case.step(rows=2).action for _ in range(2)] == [Action.BUILD, Action.REPLAY]
    pool.seal()  # a graph that is there needs nothing of the pool
    assert case.step(rows=2).action is Action.REPLAY and case.value == 5
    statistics = case.step.statistics()
    assert statistics.quarantined == {}
    assert statistics.eager_reasons == {Reason.POOL_SEALED.value: 2}


def test_a_recorded_run_that_finds_its_pool_sealed_quarantines_nothing(device: Device) -> None:
    pool = device.pool(name="scratch")
    case = Counting(device, build="record")
    case.preparing = lambda: pool.empty(4, "u4")
    pool.seal()
    with pytest.raises(PoolSealedError, match=r"pool\.open\(\)"):
        case.step(rows=2)
    pool.open()
    assert [case.step(rows=2).action for _ in range(2)] == [Action.BUILD, Action.REPLAY]
    assert case.value == 2


def test_keys_are_asked_for_by_many_threads(
    host_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More sizes than the step keeps."""
    monkeypatch.setattr(graphed_step, "_REMEMBERED", 1)
    step, interval = Counting(host_device).step, sys.getswitchinterval()

    def ask(thread: int) -> None:
        for turn in range(2000):
            rows = (turn + thread) % N + 1
            assert dict(step.key(rows=rows).sizes) == {"rows": PowersOfTwo(N).bucket(rows)}

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(ask, range(4)))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("strict", [False, True])
def test_a_graph_that_another_thread_evicts_at_once(
    device: Device, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Counting(device, warmups=0, strict=strict)
    get_or_capture = case.cache.get_or_capture

    def evicted(key: object, make: Callable[[], ost.GraphExec]) -> ost.GraphExec:
        made = get_or_capture(key, make)
        case.cache.evict(key)
        return made

    monkeypatch.setattr(case.cache, "get_or_capture", evicted)
    if strict:
        with pytest.raises(EagerRunError, match="evicted the graph"):
            case.step(rows=1)
        assert case.value == 0
    else:
        decision = case.step(rows=1)
        assert (decision.action, decision.reason) == (Action.EAGER, Reason.EVICTED)
        assert case.value == 1
        assert case.step.statistics().eager_reasons == {Reason.EVICTED.value: 1}


# --- what may pass
def faulty(host_device: Device, **options: object) -> tuple[FaultyDriver, Counting]:
    faults = FaultyDriver(host_device.driver)
    return faults, Counting(preload(Device(faults)), warmups=0, **options)


def test_a_graph_that_found_no_memory_is_made_later(host_device: Device) -> None:
    """One refused allocation made a key eager for ever."""
    faults, case = faulty(host_device)
    faults.fail("graph_instantiate", Status.OUT_OF_MEMORY)
    assert case.step(rows=1).reason is Reason.NO_MEMORY
    assert case.step(rows=1).action is Action.BUILD
    assert case.value == 2 and not case.step.statistics().quarantined


def test_graphs_that_nobody_uses_leave_for_one_that_found_no_memory(host_device: Device) -> None:
    """Half of them, those that were not used for longest."""
    faults, case = faulty(host_device)
    for rows in (2, 1, 4):
        case.step(rows=rows)
    with case.step.hold(rows=2):
        faults.fail("graph_instantiate", Status.OUT_OF_MEMORY)
        assert case.step(rows=8).action is Action.BUILD
        assert set(case.cache.keys()) == {case.step.key(rows=rows) for rows in (2, 4, 8)}
    assert case.cache.statistics().evictions.memory == 1
    assert case.value == 4


def test_a_launch_that_found_no_memory_is_made_later(host_device: Device) -> None:
    """The first launch uploads the graph."""
    faults, case = faulty(host_device)
    for calls in (1, 2, 3, 4):
        faults.fail("exec_launch", Status.OUT_OF_MEMORY)
        while case.step(rows=1).reason is not Reason.REFUSED:
            pass
        assert not case.step.statistics().quarantined, calls
    assert case.value == case.step.statistics().calls
    calls = case.step.statistics().calls
    while case.step(rows=1).action is not Action.BUILD:
        pass
    assert case.step.statistics().calls == calls + 64


@pytest.mark.parametrize("times", [3, 5])
def test_a_capture_that_something_else_broke_is_made_again(host_device: Device, times: int) -> None:
    """After 1, 4, 16 and 64 calls; another thread's call had broken it, which says nothing of the
    step.  After five times the key is given up."""
    faults, case = faulty(host_device)
    tried: list[int] = []

    def disturb() -> None:
        if case.stream.is_capturing() and len(tried) < times:
            tried.append(case.step.statistics().calls)
            faults.fail("launch_kernel", Status.STREAM_CAPTURE_INVALIDATED)

    case.preparing = disturb
    decisions = [case.step(rows=1) for _ in range(22 if times == 3 else 100)]
    assert tried == [1, 2, 6, 22, 86][:times] and case.value == len(decisions)
    if times == 3:
        assert {each.reason for each in decisions} == {Reason.DISTURBED, Reason.FIRST_USE}
        assert decisions[-1].action is Action.BUILD and not case.step.statistics().quarantined
        return
    (why,) = case.step.statistics().quarantined.values()
    assert why.startswith("5 times: ") and decisions[-1].reason is Reason.BUILD_FAILED
    case.step.forget(rows=1)
    assert case.step(rows=1).action is Action.BUILD


def test_a_wait_that_fails_after_a_replay_runs_nothing_again(host_device: Device) -> None:
    settings = ost.settings.ReplaySettings(synchronize=True)
    faults, case = faulty(host_device, settings=settings)
    for _ in range(3):
        case.step(rows=1)
    faults.fail("stream_synchronize")
    with pytest.raises(DriverError, match="stream_synchronize"):
        case.step(rows=1)
    assert case.value == 4


def switch_off(case: Counting) -> None:
    case.step.graphs = False


def profile(case: Counting) -> None:
    case.step.profiling = True


def verify(case: Counting) -> None:
    case.step.verify = 1


REFUSING: dict[str, tuple[Callable[[Counting], object], Action, Reason | None]] = {
    "off": (switch_off, Action.EAGER, Reason.GRAPHS_OFF),
    "profiling": (profile, Action.EAGER, Reason.PROFILING),
    "precondition": (lambda case: unmet(case), Action.EAGER, Reason.PRECONDITION),
    "buckets": (lambda case: small(case), Action.EAGER, Reason.OVER_BUCKETS),
    "evicted": (lambda case: case.cache.evict_all(), Action.BUILD, None),
    "replaced": (
        lambda case: case.cache.install(case.step.key(rows=2), empty_graph(case.device)),
        Action.REPLAY,
        None,
    ),
}


@pytest.mark.parametrize("change", REFUSING)
def test_a_repeated_call_sees_what_was_changed(device: Device, change: str, launcher: str) -> None:
    """Nothing of it is asked while nothing changes."""
    case = Counting(device)
    for _ in range(5):
        case.step(rows=2)
    spoil, action, reason = REFUSING[change]
    spoil(case)
    decision = case.step(rows=2)
    assert decision.action is action and reason in (None, decision.reason)
    assert case.value == (5 if change == "replaced" else 6)


def test_a_repeated_call_is_captured_recorded_and_closed_as_others(device: Device) -> None:
    case = Counting(device)
    for _ in range(5):
        case.step(rows=2)
    with ost.capture(case.stream) as under_way:
        assert case.step(rows=2).reason is Reason.INSIDE_CAPTURE
    assert case.value == 5
    run = under_way.graph.instantiate()
    case.step(rows=2), case.step(rows=2)
    with ost.record(case.stream) as recording:
        case.step(rows=2)
    run.launch(case.stream)
    recording.build().instantiate().launch(case.stream)
    assert case.value == 10
    case.step(rows=2), case.step(rows=2)
    case.step.close()
    with pytest.raises(ClosedError):
        case.step(rows=2)


def test_repeated_calls_are_uses_of_their_graph(device: Device) -> None:
    """The least recently used graph is another one, however a graph is used."""
    case = Counting(device, warmups=0)
    for rows in (1, 2, 2, 2, 2):
        case.step(rows=rows)
    one, two = (case.step.key(rows=rows) for rows in (1, 2))
    assert case.cache.get(one) is not None
    case.step(rows=2)
    assert case.cache.keys() == [one, two]
    line = case.cache.key_statistics(two)
    assert line is not None and line.hits == 5
    assert [line.calls for line in case.step.statistics().keys] == [1, 5]


def test_a_step_that_is_switched_off_replays_no_graph_of_another(device: Device) -> None:
    """Steps that share their graphs are decided for one by one."""
    case = Counting(device, warmups=0, share="count")
    other = ost.GraphedStep(case.run, stream=case.stream, cache=case.cache, share="count")
    for step in (case.step, other) * 3:
        step(rows=2)
    other.graphs = False
    for _ in range(3):
        assert case.step(rows=2).action is Action.REPLAY
        assert other(rows=2).reason is Reason.GRAPHS_OFF
    assert case.value == 12


def test_a_graph_that_is_put_under_a_key_that_was_given_up_is_not_replayed(device: Device) -> None:
    case = Counting(device)
    for _ in range(4):
        case.step(rows=2)
    case.cache.evict_all()
    case.broken = True
    assert case.step(rows=2).reason is Reason.BUILD_FAILED
    case.cache.install(case.step.key(rows=2), empty_graph(case.device))
    for _ in range(3):
        assert case.step(rows=2).reason is Reason.BUILD_FAILED
    assert case.value == 8


def test_a_precondition_that_comes_later_is_not_overlooked(device: Device) -> None:
    case = Counting(device)
    for _ in range(4):
        case.step(rows=2)
    given = {"ready": lambda: False}
    with pytest.raises(TypeError):
        case.step.preconditions["ready"] = given["ready"]  # type: ignore[index]
    case.step.preconditions = given
    assert case.step(rows=2).reason is Reason.PRECONDITION
    case.step.preconditions = {}
    assert case.step(rows=2).reason is Reason.REPLAYED


# --- strict
def unmet(case: Counting) -> None:
    case.step.preconditions = {"workspace ready": lambda: False}


def broken(case: Counting) -> None:
    case.broken = True


def small(case: Counting) -> None:
    case.cache.buckets = PowersOfTwo(1)


def capped(case: Counting) -> None:
    case.cache.limits = CaptureLimits(seconds=1e-9)
    case.cache.get_or_capture("other", lambda: empty_graph(case.device))


def sealed(case: Counting) -> None:
    case.step.pool = case.device.pool(name="scratch")
    case.step.pool.seal()


SILENT: list[tuple[Callable[[Counting], None], Reason, str]] = [
    (unmet, Reason.PRECONDITION, "workspace ready"),
    (broken, Reason.BUILD_FAILED, "planted"),
    (small, Reason.OVER_BUCKETS, "over the limit 1"),
    (capped, Reason.CAPTURE_TIME, "at most 1e-09 s"),
    (sealed, Reason.POOL_SEALED, "pool.open()"),
]


@pytest.mark.parametrize(("spoil", "reason", "why"), SILENT, ids=[s.__name__ for s, _, _ in SILENT])
def test_a_strict_step_raises_and_runs_nothing(
    device: Device, spoil: Callable[[Counting], None], reason: Reason, why: str
) -> None:
    lax, strict = (Counting(device, warmups=0, strict=strict) for strict in (False, True))
    for case in (lax, strict):
        spoil(case)
    assert lax.step(rows=2).reason is reason and lax.value == 1
    statistics = lax.step.statistics()
    assert statistics.eager_reasons == {reason.value: 1}
    assert (statistics.calls, statistics.eager, statistics.used, statistics.padded) == (1, 1, 2, 2)
    for _ in range(3):
        with pytest.raises(EagerRunError, match=why) as raised:
            strict.step(rows=2)
        assert reason.value in str(raised.value) and "counting" in str(raised.value)
    assert strict.value == 0, "nothing ran"
    statistics = strict.step.statistics()
    assert (statistics.calls, statistics.eager, statistics.replays) == (3, 0, 0)


def test_a_strict_step_says_what_its_next_call_would_do(device: Device) -> None:
    case = Counting(device, warmups=0, strict=True)
    broken(case)
    assert case.step.prepare(rows=2).reason is Reason.BUILD_FAILED
    with pytest.raises(NotHeldError) as caught:
        case.step.hold(rows=2)
    assert caught.value.decision.action is Action.REFUSE
    with pytest.raises(EagerRunError):
        case.step(rows=2)
    case.broken = False
    case.step.forget(rows=2)
    assert case.step(rows=2).action is Action.BUILD and case.value == 1


def test_a_strict_step_runs_eagerly_where_that_was_asked_for(device: Device) -> None:
    case = Counting(device, strict=True)
    assert case.step(rows=1).reason is Reason.WARMING_UP
    assert case.step(rows=1).action is Action.BUILD
    case.step.graphs = False
    assert case.step(rows=1).reason is Reason.GRAPHS_OFF
    case.step.graphs, case.step.profiling = True, True
    assert case.step(rows=1).reason is Reason.PROFILING
    case.step.profiling = False
    with ost.capture(case.stream):
        assert case.step(rows=1).reason is Reason.INSIDE_CAPTURE
    assert case.value == 4
    recorded = Counting(device, strict=True, build="record")
    assert recorded.step(rows=1).action is Action.BUILD
    assert recorded.step(rows=1).action is Action.REPLAY
    assert recorded.value == 2 and recorded.runs == 1


def test_a_recorded_run_counts_and_the_next_call_is_refused(host_device: Device) -> None:
    """The recorded run is a real one: a strict step raises at the next call, not after it."""
    faults = FaultyDriver(host_device.driver)
    case = Counting(preload(Device(faults)), strict=True, build="record")
    faults.fail("graph_instantiate", status=1)
    assert case.step(rows=1).reason is Reason.BUILD_FAILED
    faults.clear()
    assert case.value == 1
    with pytest.raises(EagerRunError, match="graph_instantiate"):
        case.step(rows=1)
    assert case.value == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_refused_replay(host_device: Device, strict: bool) -> None:
    """It is run eagerly, or raises if the step is strict."""
    faults, case = faulty(host_device, strict=strict)
    case.step(rows=1)
    fault = faults.fail("exec_launch", status=1)
    if strict:
        with pytest.raises(EagerRunError, match="refused, and nothing of it ran"):
            case.step(rows=1)
    else:
        assert case.step(rows=1).reason is Reason.REFUSED
    assert fault.fired == 1 and case.value == 2 - strict
    faults.clear()
    assert case.step(rows=1).action is Action.BUILD and case.value == 3 - strict
