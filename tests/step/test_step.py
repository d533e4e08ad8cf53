"""Graphed steps: the same answer eagerly, captured and replayed, whatever goes wrong."""

from __future__ import annotations

import gc
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.context import CallKind
from ostinato.errors import (
    CaptureError,
    ClosedError,
    DriverError,
    EagerRunError,
    InputError,
    NotHeldError,
    SettingsError,
    StateLostError,
    Status,
    VerificationError,
    driver_error,
)
from ostinato.explain import ReplayProfile
from ostinato.settings import ReplaySettings
from ostinato.step import Action, Decision, GraphCache, PowersOfTwo, Reason
from ostinato.testing import FaultyDriver
from tests.sources import config, kernel, preload

ROWS, WIDTH = 8, 16


class Rows:
    """total[r] += factor * x[r] for the rows in use."""

    def __init__(self, device: Device, **options: object) -> None:
        self.device = device
        self.stream = device.create_stream()
        self.x = device.array(np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH))
        self.total = device.zeros((ROWS, WIDTH), np.float32)
        self.factor = ost.DeviceScalar(device, np.float32, initial=1, stream=self.stream)
        self.axpy = kernel(device, "axpy_rows")
        self.slots = [
            ost.Slot("x", self.x, "input", size="rows"),
            ost.Slot("total", self.total, "state", size="rows"),
        ]
        self.cache = GraphCache(device, buckets=PowersOfTwo(ROWS))
        self.runs = 0
        options.setdefault("slots", self.slots)
        self.step = ost.GraphedStep(
            self.run, stream=self.stream, cache=self.cache, name="rows", **options
        )

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.runs += 1
        real = sizes.on_device("rows")
        launched = config(sizes.rows * WIDTH)
        ost.launch(stream, self.axpy, launched, self.x, self.factor, self.total, real, WIDTH)

    def totals(self) -> np.ndarray:
        return self.total.to_numpy(self.stream)


def test_eager_captured_replayed_give_the_same(device: Device) -> None:
    rows = Rows(device)
    x = rows.x.to_numpy(rows.stream)
    seen = []
    for call in range(1, 5):
        seen.append(rows.step(rows=3))
        np.testing.assert_array_equal(rows.totals()[:3], call * x[:3])
    assert [d.action for d in seen] == [
        Action.EAGER,
        Action.BUILD,
        Action.REPLAY,
        Action.REPLAY,
    ]
    assert rows.runs == 2  # once eagerly, once captured
    statistics = rows.step.statistics()
    assert (statistics.launches_eager, statistics.replays) == (1, 3)
    assert statistics.eager_reasons == {Reason.WARMING_UP.value: 1}
    assert statistics.padding_waste == pytest.approx(0.25)


def test_statistics_print_as_tables(device: Device) -> None:
    rows = Rows(device)
    for size in (3, 3, 4, 5):
        rows.step(rows=size)
    first, second = (str(key.key) for key in rows.step.statistics().keys)
    assert str(rows.step.statistics()).splitlines() == [
        "calls 4: replays 2, eager 2, verified 0; captures 1; padding 25%",
        "  2 x warming up before the capture",
        "key" + " " * (len(first) - 3) + "  calls  replays  eager  captures  padding  µs p50  p99",
        f"{first}      3        2      1         1      17%  -       -",
        f"{second}      1        0      1         0      38%  -       -",
    ]
    one, heading, *lines = str(rows.cache.statistics()).splitlines()
    assert one.startswith("graphs 1, ") and "captures 1 in" in one
    assert heading.split() == ["key", "hits", "bytes", "captures", "ms", "evicted"]
    there, gone = (line.split() for line in lines)
    assert there[0] == first and there[-3] == "1"
    assert gone == [second, "0", "-", "0", "0.0", "0"]  # no graph yet


@pytest.mark.parametrize("build", ["capture", "record"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_call_with_a_closed_buffer_is_an_error_of_that_call(
    device: Device, build: str, strict: bool
) -> None:
    rows = Rows(device, warmups=0, build=build, strict=strict, slots=())
    x = rows.x.to_numpy(rows.stream)
    rows.step(rows=8)
    rows.x.close()
    for _ in range(2):  # the first one had a graph, which cannot be replayed any more
        with pytest.raises((ClosedError, EagerRunError), match=r"the buffer 'x' at .* is closed"):
            rows.step(rows=8)
    rows.x = device.array(x)
    assert rows.step(rows=8).action is Action.BUILD
    assert rows.step(rows=8).action is Action.REPLAY
    assert rows.step.statistics().quarantined == {}
    np.testing.assert_array_equal(rows.totals(), 3 * x)


class Length:
    """A whole number that changes in place, as a tensor of one element does."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def test_a_size_that_changes_in_place_is_read_by_each_call(device: Device) -> None:
    rows, length = Rows(device), Length(2)
    for value in (2, 3, 8):
        length.value = value
        rows.step(rows=length)
    counts = (np.arange(ROWS)[:, None] < np.array([2, 3, 8])).sum(1)
    expected = rows.x.to_numpy(rows.stream) * counts[:, None]
    np.testing.assert_array_equal(rows.totals(), expected)
    assert rows.step.key(rows=length) == rows.step.key(rows=8)


@pytest.mark.parametrize("wrong", [3.0, True, "3", -1, None, [3]])
def test_what_is_no_size_is_refused_whatever_was_called_before(
    device: Device, wrong: object
) -> None:
    """3.0 == 3 and True == 1, so they would be found among the sizes of earlier calls."""
    rows = Rows(device)
    for size in (3, 1):
        rows.step(rows=size)
    for call in (rows.step, rows.step.hold, rows.step.prepare, rows.step.key):
        with pytest.raises(InputError, match=r"rows=.*: a whole number of 0 or more is needed"):
            call(rows=wrong)
    assert rows.step.key(rows=np.int64(3)) == rows.step.key(rows=3)


def test_a_slot_names_the_size_that_a_call_lacks(device: Device) -> None:
    rows = Rows(device)
    with pytest.raises(InputError, match=r"the size 'rows', which this call.*gives row\)"):
        rows.step(row=3)
    with pytest.raises(InputError, match="size=3: the name of a size argument is needed"):
        ost.Slot("x", rows.x, "input", size=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("held", [False, True])
def test_a_replay_reads_the_real_size_of_its_own_call(device: Device, held: bool) -> None:
    """3 and 4 share a graph, so the size is the only thing that tells their calls apart."""
    rows = Rows(device, warmups=0)
    expected = np.zeros((ROWS, WIDTH), np.float32)
    x = rows.x.to_numpy(rows.stream)
    rows.step(rows=3)
    expected[:3] += x[:3]
    both = {n: rows.step.hold(rows=n) if held else None for n in (3, 4)}
    for n in (4, 3, 3, 4):
        replay = both[n]
        if replay is None:
            assert rows.step(rows=n).action is Action.REPLAY
        else:
            replay.launch()
        expected[:n] += x[:n]
        np.testing.assert_array_equal(rows.totals(), expected)


def test_a_key_that_cannot_be_captured_is_quarantined_and_served(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Rows(device, slots=())
    calls = rows.run

    def synchronises(stream: ost.Stream, sizes: ost.Sizes) -> None:
        calls(stream, sizes)
        stream.synchronize()

    rows.step.run = synchronises
    x = rows.x.to_numpy(rows.stream)
    with caplog.at_level(logging.WARNING):
        for call in range(1, 5):
            rows.step(rows=2)
            np.testing.assert_array_equal(rows.totals()[:2], call * x[:2])
    statistics = rows.step.statistics()
    (why,) = statistics.quarantined.values()
    assert "stream.synchronize()" in why
    assert statistics.replays == 0
    assert statistics.eager_reasons[Reason.BUILD_FAILED.value] == 3
    assert "eagerly from now on" in caplog.text
    rows.step.run = calls
    rows.step.forget(rows=2)
    assert rows.step(rows=2).action is Action.BUILD


@pytest.mark.parametrize("build", ["capture", "record"])
@pytest.mark.parametrize("call", ["graph_instantiate", "exec_launch"])
def test_a_build_that_fails_costs_speed_only(host_device: Device, build: str, call: str) -> None:
    faults = FaultyDriver(host_device.driver)
    rows = Rows(preload(Device(faults)), build=build, warmups=0)
    faults.fail(call, Status.INVALID_VALUE, times=3)
    x = rows.x.to_numpy(rows.stream)
    for number in range(1, 7):  # every other call of a recorded step makes its graph
        rows.step(rows=8)
        np.testing.assert_array_equal(rows.totals(), number * x)
    assert rows.step.statistics().replays == 0
    assert len(rows.cache) == 0


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("options", [{}, {"repeatable": True}, {"strict": True}], ids=str)
def test_a_refused_launch_of_a_recorded_run(
    device: Device, options: dict[str, bool], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is run again, eagerly, if nothing was done before, or if the step may be repeated."""
    stream = device.create_stream()
    first, second = (device.zeros(1, np.int32) for _ in range(2))
    increment = kernel(device, "increment")

    def run(stream: ost.Stream, sizes: ost.Sizes) -> None:
        for counter in (first, second):
            stream.submit(ost.prepare(increment, config(1), counter, 1))

    step = ost.GraphedStep(run, stream=stream, cache=GraphCache(device), build="record", **options)
    launch, left = device.driver.launch_kernel, at

    def fails(*arguments: object) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            raise driver_error(Status.INVALID_VALUE, "launch_kernel")
        return launch(*arguments)

    monkeypatch.setattr(device.driver, "launch_kernel", fails)
    again = "strict" not in options and (at == 1 or "repeatable" in options)
    if again:
        decision = step(rows=1)
        assert (decision.action, decision.reason) == (Action.EAGER, Reason.BUILD_FAILED)
    else:
        with pytest.raises(DriverError, match="launch_kernel"):
            step(rows=1)
    done = [int(counter.to_numpy(stream)[0]) for counter in (first, second)]
    assert done == [int(again) + (at == 2), int(again)]
    assert "launch_kernel" in str(step.statistics().quarantined)
    step.forget(rows=1)
    assert step(rows=1).action is Action.BUILD and step(rows=1).action is Action.REPLAY
    assert int(second.to_numpy(stream)[0]) == done[1] + 2


def test_a_recorded_run_that_gave_work_away_is_not_run_again(device: Device) -> None:
    """Another library may have done anything with the stream before the refusal."""
    stream, calls = device.create_stream(), 0

    def run(stream: ost.Stream, sizes: ost.Sizes) -> None:
        nonlocal calls
        calls += 1
        with suppress(DriverError):
            stream.guarded("refused", refuse, CallKind.WORK)
        stream.enter("giving the stream to another library", CallKind.GIVE)
        stream.guarded("refused", refuse, CallKind.WORK)

    def refuse(handle: object) -> None:
        raise driver_error(Status.INVALID_VALUE, "launch_kernel")

    step = ost.GraphedStep(run, stream=stream, cache=GraphCache(device), build="record")
    with pytest.raises(DriverError, match="launch_kernel"):
        step(rows=1)
    assert calls == 1


def test_prepare_makes_the_graph_beforehand(device: Device) -> None:
    rows = Rows(device)
    for bucket in (1, 2, 4, 8):
        rows.step.prepare(rows=bucket)
    assert (rows.totals() == 0).all()
    assert rows.step(rows=7).action is Action.REPLAY
    np.testing.assert_array_equal(rows.totals()[:7], rows.x.to_numpy(rows.stream)[:7])
    assert (rows.totals()[7] == 0).all()


def test_a_size_that_the_device_does_not_have_joins_no_capture(device: Device) -> None:
    """The graph of that capture would read whatever size is on the device at its launch."""
    rows = Rows(device, warmups=0)
    x = rows.x.to_numpy(rows.stream)
    rows.step(rows=8)
    with ost.capture(rows.stream) as outer:
        with pytest.raises(CaptureError, match="rows is 8 on the device and 3 is wanted"):
            rows.step(rows=3)
        rows.step(rows=8)
    assert [node.kind.name for node in outer.graph.nodes()] == ["MEMSET", "KERNEL"]  # with the size
    rows.step(rows=3)
    expected = x.copy()
    expected[:3] *= 2
    np.testing.assert_array_equal(rows.totals(), expected)


class ReadsLate(Rows):
    """It asks for its size in a capture only."""

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        if stream.is_capturing():
            super().run(stream, sizes)


def test_a_size_that_is_first_read_in_a_capture_must_be_there(device: Device) -> None:
    rows = ReadsLate(device)
    rows.step(rows=8)
    rows.step(rows=3)  # no run has read it, so it was not written
    with ost.capture(rows.stream) as outer:
        with pytest.raises(CaptureError, match="rows is 8 on the device and 3 is wanted"):
            rows.step(rows=3)
        rows.step(rows=8)
    outer.graph.instantiate().launch(rows.stream)
    np.testing.assert_array_equal(rows.totals(), rows.x.to_numpy(rows.stream))


class Frozen(Rows):
    """A step with a host number in it: the capture freezes the one of its time."""

    value = 1.0

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.runs += 1
        ost.launch(
            stream,
            kernel(self.device, "fill"),
            config(sizes.rows),
            self.total,
            self.value,
            sizes.rows,
        )


def test_verify_finds_a_frozen_number_and_keeps_the_eager_answer(device: Device) -> None:
    step = Frozen(device, verify=1, warmups=0)
    assert step.step(rows=8).action is Action.BUILD
    step.value = 2.0
    decision = step.step(rows=8)
    assert decision.reason is Reason.MISMATCH
    assert "slot 'total' at [0, 0]: 2.0 eagerly, 1.0 by replay" in decision.detail
    assert "changed since its capture" in decision.detail
    assert step.totals()[0, 0] == 2
    assert step.step(rows=8).action is Action.EAGER
    strict = Frozen(device, verify=1, warmups=0, strict=True)
    strict.step(rows=8)
    strict.value = 3.0
    with pytest.raises(VerificationError, match="total"):
        strict.step(rows=8)


class Counting(Frozen):
    """A step whose eager runs are not repeatable: it counts them itself."""

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.value += 1
        super().run(stream, sizes)


def test_a_step_with_state_on_the_host_is_refused(device: Device) -> None:
    """Not run eagerly: its captures and checks have advanced that state, so nobody knows by how
    much the next answer would be off."""
    counting = Counting(device, verify="first", warmups=0)
    with pytest.raises(VerificationError, match=r"value=3 in one run and value=4 in the next"):
        counting.step(rows=8)
    assert (counting.totals() == 0).all(), "no memory is changed"
    for call in (counting.step, lambda rows: counting.step(rows=4)):
        with pytest.raises(VerificationError, match="on the host"):
            call(rows=8)
    assert not_held(counting.step, rows=8).reason is Reason.HOST_STATE
    counting.step.graphs = False
    counting.step(rows=8)
    assert counting.totals()[0, 0] == counting.value
    counting.step.graphs, counting.step.verify = True, "off"
    counting.step.forget(rows=8)
    assert counting.step(rows=8).action is Action.BUILD


def test_the_same_work_with_other_answers_is_run_eagerly(device: Device) -> None:
    """Sums in no fixed order, say: the step is as right as it ever was."""
    drawn, noise = [], device.pinned(WIDTH, np.float32)
    out = device.zeros(WIDTH, np.float32)

    def draw() -> None:
        drawn.append(True)
        noise.array[:] = len(drawn)

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        stream.call(draw)
        ost.copy(stream, out, noise)

    step = ost.GraphedStep(
        work,
        stream=device.create_stream(),
        cache=GraphCache(device),
        slots=[ost.Slot("out", out, "output")],
        verify="first",
        warmups=0,
    )
    for _ in range(2):
        decision = step()
        assert (decision.action, decision.reason) == (Action.EAGER, Reason.MISMATCH)
        assert "two eager runs of the same work" in decision.detail
        assert (out.to_numpy(step.stream) == len(drawn)).all()


def test_verify_passes_advances_state_once_and_samples_again(device: Device) -> None:
    rows = Rows(device, verify=2, warmups=0)
    x = rows.x.to_numpy(rows.stream)
    for call in range(1, 8):
        rows.step(rows=3)
        np.testing.assert_array_equal(rows.totals()[:3], call * x[:3])
        assert (rows.totals()[3:] == 0).all(), "no poison stays in the padding of a state"
        np.testing.assert_array_equal(rows.x.to_numpy(rows.stream), x)
    assert rows.step.statistics().verified == 4  # when it was made, then replays 2, 4 and 6
    assert rows.step.statistics().quarantined == {}


def test_state_that_a_check_cannot_put_back_is_said(host_device: Device) -> None:
    faults = FaultyDriver(host_device.driver)
    rows = Rows(preload(Device(faults)), verify=1, warmups=0)
    x = rows.x.to_numpy(rows.stream)
    rows.step(rows=8)

    def interrupted(stream: ost.Stream, sizes: ost.Sizes) -> None:
        Rows.run(rows, stream, sizes)
        faults.fail("memcpy_from_host", times=2)  # the undo, and the undo tried again
        raise ZeroDivisionError

    rows.step.run = interrupted
    with pytest.raises((StateLostError, ZeroDivisionError)) as raised:
        rows.step(rows=8)
    assert "slots 'x', 'total' is not valid" in str(raised.value)
    rows.step.run = rows.run
    assert not_held(rows.step, rows=8).reason is Reason.STATE_LOST
    for size in (8, 3):
        with pytest.raises(StateLostError):
            rows.step(rows=size)
    rows.step.graphs = False
    with pytest.raises(StateLostError):  # an eager run would read the lost state
        rows.step(rows=8)
    rows.step.graphs = True
    with pytest.raises(InputError):
        rows.step.forget(rows=9)
    with pytest.raises(StateLostError):  # so nothing was released
        rows.step(rows=8)
    rows.x.set(x, rows.stream)
    rows.total.set(x, rows.stream)
    rows.step.forget(rows=8)
    rows.step(rows=8)
    np.testing.assert_array_equal(rows.totals(), 2 * x)


def test_a_size_whose_write_failed_half_way_is_written_again(host_device: Device) -> None:
    """The copy was submitted, and what marks its end was refused."""
    faults = FaultyDriver(host_device.driver)
    rows = Rows(preload(Device(faults)), warmups=0)
    x = rows.x.to_numpy(rows.stream)
    rows.step(rows=3)
    faults.fail("event_record")
    with pytest.raises(DriverError):
        rows.step(rows=4)
    rows.step(rows=3)
    np.testing.assert_array_equal(rows.totals()[:4], [2 * x[0], 2 * x[1], 2 * x[2], 0 * x[3]])


def test_profile_as_events(device: Device, tmp_path: object) -> None:
    said: list[str] = []
    seen, began = [], time.perf_counter()
    profile = ReplayProfile(print_every=2, printer=said.append, sinks=(seen.append,))
    rows = Rows(
        device,
        warmups=0,
        profile=profile,
        settings=ReplaySettings(profile=True, synchronize=True, upload=True),
    )
    for _ in range(5):
        rows.step(rows=8)
    spent = time.perf_counter() - began
    assert profile.count == 5
    assert [e.number for e in seen] == [1, 2, 3, 4, 5]
    for event in profile.events:
        assert min(event.upload, event.launch, event.synchronize) > 0
        assert event.total == pytest.approx(event.upload + event.launch + event.synchronize)
        assert event.start + event.total <= spent, "in seconds"
    assert said[0].endswith(f"total {1e6 * seen[0].total:.1f} us"), "a text has its unit"
    lines = [json.loads(line) for line in profile.to_json_lines().splitlines()]
    assert len(lines) == 5
    trace = profile.to_chrome_trace()["traceEvents"]
    assert len(trace) == 15
    assert {e["name"] for e in trace} == {"upload", "launch", "synchronize"}
    assert (trace[0]["ts"], trace[0]["dur"]) == (1e6 * seen[0].start, 1e6 * seen[0].upload)
    p = profile.percentiles()
    assert 0 < p.p50 <= p.p90 <= p.p99 <= p.largest
    for part in ("count", "wait"):
        with pytest.raises(InputError, match="total"):
            profile.percentiles(part)
    for wrong in ({"keep": -1}, {"print_every": 0}):
        with pytest.raises(InputError):
            ReplayProfile(**wrong)


def test_settings_from_the_environment() -> None:
    from ostinato.settings import graphs_enabled, replay_settings

    off = replay_settings(environ={})
    assert (off.upload, off.synchronize, off.profile, off.print_every) == (False, False, False, 64)
    assert off.plain
    profiled = {"OSTINATO_PROFILE": "1"}
    asked = replay_settings(environ=profiled)
    assert (asked.upload, asked.synchronize, asked.profile, asked.printed) == (True,) * 4
    assert not replay_settings(environ=profiled | {"OSTINATO_SKIP_UPLOAD": "1"}).upload
    assert replay_settings(environ=profiled | {"OSTINATO_SKIP_UPLOAD": "no"}).upload
    assert not replay_settings(environ=profiled | {"OSTINATO_SKIP_SYNC": "1"}).synchronize
    assert replay_settings(environ={"OSTINATO_PROFILE_EVERY": "8"}).print_every == 8
    with pytest.raises(ost.OstinatoError, match="OSTINATO_PROFILE_EVERY"):
        replay_settings(environ={"OSTINATO_PROFILE_EVERY": "none"})
    with pytest.raises(InputError, match="print_every=0"):
        replay_settings(ReplaySettings(print_every=0))
    assert graphs_enabled(environ={})


SWITCHES = "NO_GRAPHS PROFILE SKIP_UPLOAD SKIP_SYNC COLLECT_MODULES BLOCKING_CAPTURES"


@pytest.mark.parametrize("name", SWITCHES.split())
def test_a_variable_is_on_or_off_by_any_of_the_usual_words(name: str) -> None:
    variable = getattr(ost.settings, name)
    for words, on in (("1 true yes on TRUE Yes", True), ("0 false no off Off", False)):
        for word in words.split():
            assert variable.read({f"OSTINATO_{name}": word}) is on, word
    assert not variable.read({}) and not variable.read({f"OSTINATO_{name}": ""})
    for word in ("2", "yess", "-", "none"):
        with pytest.raises(SettingsError, match=f"^OSTINATO_{name}='{word}': 1, true, yes or on"):
            variable.read({f"OSTINATO_{name}": word})


def test_what_is_given_in_code_wins_over_the_environment() -> None:
    from ostinato.settings import graphs_enabled, replay_settings

    environ = {
        "OSTINATO_PROFILE": "1",
        "OSTINATO_PROFILE_EVERY": "8",
        "OSTINATO_SKIP_UPLOAD": "1",
        "OSTINATO_SKIP_SYNC": "1",
        "OSTINATO_NO_GRAPHS": "1",
    }
    given = ReplaySettings(upload=True, synchronize=True, profile=False, print_every=3)
    made = replay_settings(given, environ)
    assert (made.upload, made.synchronize, made.profile, made.print_every) == (True, True, False, 3)
    assert graphs_enabled(True, environ)
    assert not graphs_enabled(False, {})


def test_the_environment_switches_graphs_off(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_NO_GRAPHS", "1")
    rows, typed = Rows(device, warmups=0), Rows(device, warmups=0, graphs=True)
    assert rows.step(rows=2).reason is Reason.GRAPHS_OFF
    assert typed.step(rows=2).action is Action.BUILD


def _by_step(device: Device) -> Callable[[], object]:
    rows = Rows(device, warmups=0)
    return lambda: rows.step(rows=8)


def _by_held_step(device: Device) -> Callable[[], object]:
    return Rows(device, warmups=0).step.hold(rows=8).launch


def _by_cache(
    device: Device, change: Callable[[ost.GraphExec], object] | None = None
) -> Callable[[], object]:
    cache, stream, count = GraphCache(device), device.create_stream(), device.zeros(1, np.int32)
    graph = ost.capture_function(stream, lambda: ost.fill(stream, count, 1))
    cache.install("rows", graph.instantiate())
    return lambda: cache.replay("rows", stream, change)


def _by_changing_cache(device: Device) -> Callable[[], object]:
    return _by_cache(device, lambda run: None)


@pytest.mark.parametrize("every", ["1", "2", None])
@pytest.mark.parametrize("by", [_by_step, _by_held_step, _by_cache, _by_changing_cache])
def test_the_environments_profile_is_printed(
    device: Device, by: Callable[[Device], Callable[[], object]], every: str | None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Whoever replays: the first, and then one in so many."""
    monkeypatch.setenv("OSTINATO_PROFILE", "1")
    if every is not None:
        monkeypatch.setenv("OSTINATO_PROFILE_EVERY", every)
    replay = by(device)
    for _ in range(66):
        replay()
    found = capsys.readouterr().err.splitlines()
    numbers = [int(re.match(r"ostinato: replay (\d+) of rows.*total", line)[1]) for line in found]
    assert numbers == [*range(1, 67, int(every or 64))]


@pytest.mark.parametrize("refused", [False, True])
def test_a_profiled_replay_is_a_range_for_nvidias_profilers(
    host_device: Device, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins before the upload and ends after the wait, also if the launch is refused."""
    faults = FaultyDriver(host_device.driver)

    @contextmanager
    def annotate(message: str) -> Iterator[None]:
        faults.calls.append(f"begin {message}")
        try:
            yield
        finally:
            faults.calls.append("end")

    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=annotate))
    rows = Rows(preload(Device(faults)), warmups=0, slots=(), profile=ReplayProfile())
    rows.step(rows=8)
    faults.calls.clear()
    if refused:
        faults.fail("exec_launch")
    rows.step(rows=8)
    of_replays = ("exec_upload", "exec_launch", "stream_synchronize")
    found = [call for call in faults.calls if " " in call or call in ("end", *of_replays)]
    done = of_replays[: 2 if refused else 3]
    assert found[: len(done) + 2] == [f"begin replay {rows.step.key(rows=8)}", *done, "end"]


def test_preload_comes_before_the_first_capture_and_once(device: Device) -> None:
    """A kernel that nobody loaded is loaded outside of the capture."""
    text = 'extern "C" __global__ void late(int* c) { *c += 1; }'

    @ost.host_kernel("c: *i32")
    def late(launch, c):
        c[0] += 1

    source = ost.Source(cuda=text, host=[late], name="late")
    counter, stream = device.zeros(1, np.int32), device.create_stream()
    seen = []

    def preload() -> object:
        seen.append(stream.is_capturing())
        return device.modules.preload([(source, "late")])

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        kernel = device.modules.get_or_compile(source, "late")
        ost.launch(stream, kernel, ost.LaunchConfig(sizes.n, 1), counter)

    step = ost.GraphedStep(
        work, stream=stream, cache=GraphCache(device), warmups=0, preload=preload
    )
    for n in (1, 2, 1):
        assert step(n=n).action in (Action.BUILD, Action.REPLAY)
    assert seen == [False]
    assert step.statistics().quarantined == {}


# ------------------------------------------------------------------------------- held and built


def not_held(step: ost.GraphedStep, **sizes: int) -> Decision:
    """Why nothing is held."""
    with pytest.raises(NotHeldError, match=r"no replay is held.*; call the step") as caught:
        step.hold(**sizes)
    decision = caught.value.decision
    assert isinstance(decision, Decision) and str(decision) in str(caught.value)
    return decision


def test_a_held_graph_replays_as_calls_do_and_counts_as_they_do(device: Device) -> None:
    rows = Rows(device, warmups=0)
    x = rows.x.to_numpy(rows.stream)
    with rows.step.hold(rows=3) as held:  # nothing has to run for it, so it is made
        assert (rows.totals() == 0).all()
        for _ in range(3):
            held.launch()
        rows.step(rows=4)
    np.testing.assert_array_equal(rows.totals()[:3], 4 * x[:3])
    with pytest.raises(ClosedError, match="not held any more"):
        held.launch()
    statistics = rows.step.statistics()
    assert (statistics.calls, statistics.replays, statistics.launches_eager) == (4, 4, 0)
    assert (statistics.used, statistics.padded, statistics.captures) == (13, 16, 1)


def test_what_is_held_outlives_an_eviction(device: Device) -> None:
    rows = Rows(device, warmups=0)
    held = rows.step.hold(rows=8)
    rows.cache.evict_all()
    held.launch()
    np.testing.assert_array_equal(rows.totals(), rows.x.to_numpy(rows.stream))
    assert rows.cache.statistics().leaving == 1
    held.close()
    held.close()
    assert rows.cache.statistics().leaving == 0


def test_what_is_held_and_dropped_is_let_go_outside_of_captures(device: Device) -> None:
    rows = Rows(device, warmups=0)
    held = rows.step.hold(rows=8)
    held.launch()
    rows.cache.evict_all()
    with ost.capture(rows.stream):
        ost.fill(rows.stream, rows.total, 0)
        del held
        gc.collect()
        device.context.collect()
        assert rows.cache.statistics().leaving == 1
    device.synchronize()
    assert rows.cache.statistics().leaving == 0
    statistics = rows.step.statistics()
    assert (statistics.calls, statistics.replays, statistics.used) == (1, 1, 8)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"warmups": 1}, Reason.WARMING_UP),
        ({"graphs": False}, Reason.GRAPHS_OFF),
        ({"build": "record"}, Reason.FIRST_USE),
        ({"warmups": 0, "verify": "first"}, Reason.FIRST_USE),
        ({"warmups": 0, "verify": 2}, Reason.FIRST_USE),
        ({"preconditions": {"ready": lambda: False}}, Reason.PRECONDITION),
    ],
)
def test_nothing_is_held_where_a_call_does_more_than_replay(
    device: Device, options: dict[str, object], reason: Reason
) -> None:
    rows = Rows(device, **options)
    assert not_held(rows.step, rows=2).reason is reason
    assert rows.runs == 0
    assert rows.step.statistics().calls == 0
    rows.cache.buckets = PowersOfTwo(4)
    assert not_held(rows.step, rows=8).action is Action.EAGER


def test_a_check_now_and_then_keeps_replays_from_being_held(device: Device) -> None:
    rows = Rows(device, warmups=0, verify=2)
    rows.step(rows=2)
    decision = not_held(rows.step, rows=2)
    assert decision.action is Action.REPLAY and "verify=2 counts replays" in decision.detail
    first = Rows(device, warmups=0, verify="first")
    first.step(rows=2)
    first.step.hold(rows=2).close()


def test_a_builder_makes_the_graph_by_itself(device: Device) -> None:
    rows = Rows(device)

    def build(stream: ost.Stream, sizes: ost.Sizes) -> ost.GraphExec:
        graph = ost.Graph.create(device)
        launched, step = config(sizes.rows * WIDTH), made
        real = sizes.on_device("rows")
        graph.add_kernel(step.axpy, launched, step.x, step.factor, step.total, real, WIDTH)
        return graph.instantiate(upload=stream)

    made = Rows(device, builder=build)
    for _ in range(3):
        rows.step(rows=8)
        made.step(rows=8)
    np.testing.assert_array_equal(made.totals(), rows.totals())
    assert made.runs == 1, "the warm-up; nothing was captured"
    assert made.step.statistics().replays == 2
    with pytest.raises(InputError, match="nothing is recorded"):
        Rows(device, builder=build, build="record")


@pytest.mark.parametrize(
    ("wrong", "needed"),
    [
        ({"cache": None}, "cache: a GraphCache is needed, not None"),
        ({"mode": 1}, 'mode=1: "global", "thread_local" or "relaxed" is needed'),
        ({"pool": "x"}, "pool: a CapturePool is needed, not 'x'"),
        ({"settings": {}}, "settings: a ReplaySettings is needed, not {}"),
        ({"profile": True}, "profile: a ReplayProfile is needed, not True"),
        ({"store": "folder"}, "store: a GraphStore is needed, not 'folder'"),
        ({"warmups": 1.5}, "warmups=1.5: a whole number"),
        ({"warmups": -1}, "warmups=-1: a whole number"),
        ({"warmups": "2"}, "warmups='2': a whole number"),
        ({"preload": 5}, "preload: a function is needed, not int"),
        ({"builder": 5}, "builder: a function is needed, not int"),
        ({"preconditions": {"ready": True}}, "ready: a function is needed, not bool"),
        ({"preconditions": {"ready": None}}, "ready: a function is needed, not NoneType"),
        ({"preconditions": {"builder": None}}, "builder: a function is needed, not NoneType"),
        ({"preconditions": {"run": bool}, "run": 5}, "run: a function is needed, not int"),
        ({"preconditions": [bool]}, "preconditions: a dict of functions by name is needed"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused(
    device: Device, wrong: dict[str, object], needed: str
) -> None:
    """Some had quarantined each key at its capture, so that the step never replayed."""
    own = {"run": lambda stream, sizes: None, "stream": device.create_stream()}
    with pytest.raises(InputError, match=f"^{needed}"):
        ost.GraphedStep(**{**own, "cache": GraphCache(device), **wrong})  # type: ignore[arg-type]


def test_memory_of_another_device_is_refused(device: Device, tmp_path: Path) -> None:
    """At once: a graph that points at it would end the context of a GPU."""
    stream, cache = device.create_stream(), GraphCache(device)
    with ost.open_device("host") as other:
        slot = ost.Slot("x", other.zeros(8, "bytes"), "state")
        store = ost.GraphStore(other, tmp_path)
        for wrong in ({"slots": [slot]}, {"pool": other.pool()}, {"store": store}):
            with pytest.raises(InputError, match="of another device"):
                ost.GraphedStep(lambda stream, _: None, stream=stream, cache=cache, **wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="of another device"):
            ost.Capture(stream, pool=other.pool())


def test_a_builder_that_fails_quarantines_its_key(device: Device) -> None:
    def build(stream: ost.Stream, sizes: ost.Sizes) -> ost.GraphExec:
        raise ValueError("no plan")

    rows = Rows(device, warmups=0, builder=build)
    decision = not_held(rows.step, rows=8)
    assert (decision.reason, decision.detail) == (Reason.BUILD_FAILED, "no plan")
    rows.step(rows=8)
    np.testing.assert_array_equal(rows.totals(), rows.x.to_numpy(rows.stream))
    assert "no plan" in str(rows.step.statistics().quarantined)


@pytest.mark.parametrize("why", ["given up", "switched off", "over the buckets"])
def test_a_closed_cache_refuses_calls_that_run_eagerly_too(device: Device, why: str) -> None:
    def build(stream: ost.Stream, sizes: ost.Sizes) -> ost.GraphExec:
        raise ValueError("no plan")

    rows = Rows(device, warmups=0, builder=build)
    rows.step.graphs = why != "switched off"
    if why == "over the buckets":
        rows.cache.buckets = PowersOfTwo(4)
    for _ in range(3):
        assert rows.step(rows=8).action is Action.EAGER
    rows.cache.close()
    with pytest.raises(ClosedError, match="cache is closed"):
        rows.step(rows=8)


def test_a_closed_step_refuses(device: Device) -> None:
    rows = Rows(device)
    rows.step(rows=3)
    rows.step(rows=3)
    before = rows.totals()
    rows.step.close()
    rows.step.close()
    for call in (
        lambda: rows.step(rows=3),
        lambda: rows.step(rows=9),
        lambda: rows.step.prepare(rows=3),
        lambda: rows.step.hold(rows=3),
        lambda: rows.step.key(rows=3),
    ):
        with pytest.raises(ClosedError, match="step"):
            call()
    np.testing.assert_array_equal(rows.totals(), before)
    assert len(rows.cache) == 0
