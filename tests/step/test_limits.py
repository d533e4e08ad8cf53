"""Limits for captures: a pure rule with named reasons, and the cache that keeps to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import CaptureError, CaptureLimitError, InputError
from ostinato.step import CaptureLimits, Refusal
from ostinato.step.limits import refuse
from tests.sources import empty_graph

SECONDS = st.floats(0.001, 100)
limits = st.builds(
    CaptureLimits,
    seconds=SECONDS,
    window=st.none() | SECONDS,
    per_key=st.none() | st.integers(1, 5),
    within=st.integers(1, 20),
)


@given(limits, st.floats(0, 200), st.integers(0, 50), st.lists(st.integers(0, 50), max_size=6))
def test_each_refusal_has_its_reason(
    given: CaptureLimits, spent: float, uses: int, earlier: list[int]
) -> None:
    captured_at = sorted(min(at, uses) for at in earlier)
    refused = refuse(given, spent=spent, uses=uses, captured_at=captured_at)
    recent = [at for at in captured_at if at > uses - given.within]
    often = given.per_key is not None and len(recent) >= given.per_key
    long = given.seconds is not None and spent >= given.seconds
    assert (refused is None) == (not often and not long)
    if refused is not None:
        assert refused.reason is (Refusal.RECAPTURED if often else Refusal.SECONDS)
        assert refused.reason.value in str(refused) and refused.detail
    assert refuse(given, spent=spent, uses=uses, captured_at=captured_at) == refused


@given(st.integers(1, 4), st.integers(1, 30), st.lists(st.booleans(), max_size=200))
def test_no_window_of_uses_has_more_captures_than_allowed(
    per_key: int, within: int, asks: list[bool]
) -> None:
    """A key that is asked for and thrown out again, in any pattern, for ever."""
    rule = CaptureLimits(per_key=per_key, within=within)
    captured: list[int] = []
    for uses, wanted in enumerate(asks):
        if wanted and refuse(rule, spent=0, uses=uses, captured_at=captured) is None:
            captured.append(uses)
    for start in range(len(asks)):
        assert sum(start <= at < start + within for at in captured) <= per_key
    if all(asks):  # and it is captured again as soon as it may be
        assert len(captured) >= len(asks) // within * min(per_key, within)


@given(st.lists(st.integers(0, 9), max_size=9))
def test_no_limits_refuse_nothing(captured_at: list[int]) -> None:
    assert refuse(CaptureLimits(), spent=1e9, uses=9, captured_at=captured_at) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": 0},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"seconds": "1"},
        {"seconds": True},
        {"seconds": 1, "window": -1},
        {"window": 1},
        {"per_key": 0},
        {"per_key": 1.5},
        {"per_key": True},
        {"within": 0},
        {"within": None},
    ],
)
def test_limits_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(reversed(wrong))):
        CaptureLimits(**wrong)  # type: ignore[arg-type]


def test_a_key_that_is_captured_again_and_again_is_refused(device: Device) -> None:
    made = []

    def make() -> ost.GraphExec:
        made.append(empty_graph(device))
        return made[-1]

    with ost.GraphCache(device, limits=CaptureLimits(per_key=2, within=6)) as cache:
        for _ in range(2):
            cache.get_or_capture("a", make)
            cache.evict("a")
        uses = 0
        while cache.refusal("a") is not None:
            with pytest.raises(CaptureLimitError, match=r"'a'.*2 times in its last 6 uses"):
                cache.get_or_capture("a", make)
            uses += 1
        assert (len(made), uses) == (2, 6)
        cache.get_or_capture("b", make)  # another key is another count
        cache.get_or_capture("a", make)
        stats = cache.statistics()
        assert stats.captures == 4 and stats.refused == {Refusal.RECAPTURED.value: 6}
        a = next(line for line in stats.keys if line.key == "a")
        assert (a.captures, a.misses, a.refused) == (3, 6, dict(stats.refused))
        assert a.evictions.asked == 2


def test_captures_that_fail_count_too(device: Device) -> None:
    def fail() -> ost.GraphExec:
        raise CaptureError("no")

    with ost.GraphCache(device, limits=CaptureLimits(per_key=2)) as cache:
        for expected in (CaptureError, CaptureError, CaptureLimitError):
            with pytest.raises(CaptureError) as raised:
                cache.get_or_capture("a", fail)
            assert type(raised.value) is expected
        (gone,) = cache.statistics().gone
        assert (gone.key, gone.captures, gone.capture_failures) == ("a", 0, 2)
        assert gone.nbytes == 0 and gone.nbytes_source is None


class Clock:
    """Stands for the time module: each call takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def tick(self) -> float:
        self.now += 1
        return self.now

    perf_counter = monotonic = tick


def set_clock(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    for module in ("cache", "limits"):
        monkeypatch.setattr(f"ostinato.step.{module}.time", clock)


def test_the_time_of_captures_is_limited(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, Clock())
    with ost.GraphCache(device, limits=CaptureLimits(seconds=3)) as cache:
        made = []
        with pytest.raises(CaptureLimitError, match="at most 3 s"):
            for key in range(100):
                cache.get_or_capture(key, lambda: empty_graph(device))
                made.append(key)
        spent = cache.statistics().capture_seconds
        assert made and spent >= 3, "the last capture that began was finished"
        assert cache.keys() == made
        cache.limits = CaptureLimits(seconds=spent + 1)
        cache.get_or_capture("more", lambda: empty_graph(device))


def test_a_window_of_time_passes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    set_clock(monkeypatch, clock)
    with ost.GraphCache(device, limits=CaptureLimits(seconds=1, window=50)) as cache:
        cache.get_or_capture("a", lambda: empty_graph(device))
        refused = cache.refusal("b")
        assert refused is not None and refused.reason is Refusal.SECONDS
        assert "in 50 s" in refused.detail
        clock.now += 50
        assert cache.refusal("b") is None
        cache.get_or_capture("b", lambda: empty_graph(device))


def test_asking_whether_a_capture_is_refused_is_no_use(device: Device) -> None:
    with ost.GraphCache(device, limits=CaptureLimits(per_key=1)) as cache:
        assert cache.refusal("a") is None
        assert cache.key_statistics("a") is None
        assert cache.statistics().gone == ()
