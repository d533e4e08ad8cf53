"""A step replays its own graph, at the size of the call."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import InputError
from ostinato.step import graphed_step
from tests.footguns.common import Rows, count_step
from tests.sources import config, kernel


def test_a_step_with_state_advances_once_a_call(device: Device, stream: ost.Stream) -> None:
    counter = device.zeros(1, np.int32)
    cache = ost.GraphCache(device)
    slots = [ost.Slot("counter", counter, "state")]
    for verify in ("off", "first", 1):
        options = {"stream": stream, "slots": slots, "verify": verify, "name": f"count {verify}"}
        step = count_step(device, counter, cache, 1, **options)
        before = counter.to_numpy(stream)[0]
        for calls in range(1, 6):
            step()
            assert counter.to_numpy(stream)[0] == before + calls


def test_a_failed_capture_has_run_nothing(device: Device, stream: ost.Stream) -> None:
    counter = device.zeros(1, np.int32)

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "increment"), config(1), counter, 1)
        stream.synchronize()

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), warmups=0)
    for calls in range(1, 4):
        step()
        assert counter.to_numpy(stream)[0] == calls


def test_two_steps_in_one_cache_have_graphs_of_their_own(device: Device) -> None:
    """Two lambdas of one line have one name."""
    x, y, cache = device.zeros(1, np.int32), device.zeros(1, np.int32), ost.GraphCache(device)
    a, b = count_step(device, x, cache, 7), count_step(device, y, cache, 9)
    for _ in range(3):
        a()
        b()
    device.synchronize()
    assert [device.to_numpy(v)[0] for v in (x, y)] == [21, 27]


def test_two_instances_of_one_method_have_graphs_of_their_own(device: Device) -> None:
    class Model:
        def __init__(self, by: int) -> None:
            self.counter, self.by = device.zeros(1, np.int32), by

        def forward(self, stream: ost.Stream, _: ost.Sizes) -> None:
            ost.launch(stream, kernel(device, "increment"), config(1), self.counter, self.by)

    cache, models = ost.GraphCache(device), [Model(2), Model(5)]
    steps = [
        ost.GraphedStep(m.forward, stream=device.create_stream(), cache=cache, name="model")
        for m in models
    ]
    for _ in range(4):
        for step in steps:
            step()
    assert [device.to_numpy(m.counter)[0] for m in models] == [8, 20]


def test_graphs_are_shared_only_if_that_is_asked_for(device: Device) -> None:
    counter, cache = device.zeros(1, np.int32), ost.GraphCache(device)
    first = count_step(device, counter, cache, 1, share="count")
    other = count_step(device, counter, cache, 1, share="count")
    first()
    first()
    other()
    assert other.statistics().replays == 1
    assert len(cache) == 1
    assert device.to_numpy(counter)[0] == 3


def test_graphs_are_not_shared_by_a_number(device: Device) -> None:
    """The number of a layer could also be the identity of another step."""
    counter, cache = device.zeros(1, np.int32), ost.GraphCache(device)
    number = count_step(device, counter, cache, 1).key().identity
    with pytest.raises(InputError, match=f"share={number}: a text is needed"):
        count_step(device, counter, cache, 10, share=number)


def test_a_step_that_is_gone_leaves_no_graph_for_the_next(device: Device) -> None:
    counter, cache = device.zeros(1, np.int32), ost.GraphCache(device)
    for by in (1, 10):
        step = count_step(device, counter, cache, by)
        for _ in range(3):
            step()
        del step
        gc.collect()
        device.synchronize()
        assert len(cache) == 0
    assert device.to_numpy(counter)[0] == 33


def test_an_empty_cache_is_not_false(device: Device) -> None:
    assert ost.GraphCache(device)


def test_a_shared_graph_reads_the_size_of_the_call(device: Device) -> None:
    """It does not matter which step made the graph, or whether that step is closed."""
    work, cache = Rows(device), ost.GraphCache(device, buckets=ost.PowersOfTwo(8, minimum=8))
    first, other = (
        ost.GraphedStep(work.add, stream=work.stream, cache=cache, share="rows") for _ in range(2)
    )
    for step, rows in ((first, 8), (first, 8), (other, 3), (first, 2), (other, 5)):
        step(rows=rows)
    assert other.statistics().replays == 2
    assert work.seen() == [5, 5, 4, 3, 3, 2, 2, 2]
    first.close()
    for rows in (1, 1, 4):
        other(rows=rows)
    assert other.statistics().replays == 4
    assert work.seen() == [8, 6, 5, 4, 3, 2, 2, 2]


@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_calls_itself_keeps_its_size(device: Device, first: bool) -> None:
    """A fault left the inner call's size on the device for the rest of the outer run."""
    work = Rows(device)

    def run(stream: ost.Stream, sizes: ost.Sizes) -> None:
        if not first:
            sizes.on_device("rows")
        if sizes.rows == 8:
            step(rows=3)
        work.add(stream, sizes)

    cache = ost.GraphCache(device, buckets=ost.PowersOfTwo(8))
    step = ost.GraphedStep(run, stream=work.stream, cache=cache)
    for calls in (1, 2, 3):
        step(rows=8)
        assert work.seen() == [2 * calls] * 3 + [calls] * 5


@pytest.mark.parametrize("inner", ["shares", "held", "hold", "prepare"])
def test_a_step_keeps_its_size_whatever_its_run_calls(device: Device, inner: str) -> None:
    """The run calls a step that shares its sizes, launches a held graph, or makes a graph."""
    work, cache = Rows(device), ost.GraphCache(device, buckets=ost.PowersOfTwo(8))
    calls: list[Callable[[], object]] = []

    def run(stream: ost.Stream, sizes: ost.Sizes) -> None:
        for call in calls if sizes.rows == 7 else ():
            call()
        work.add(stream, sizes)

    step = ost.GraphedStep(run, stream=work.stream, cache=cache, share="rows")
    other = ost.GraphedStep(work.add, stream=work.stream, cache=cache, share="rows")
    for _ in range(3):
        step(rows=2)
    held = step.hold(rows=2)
    with held:
        calls += {
            "shares": [lambda: other(rows=2)],
            "held": [held.launch],
            "hold": [lambda: other(rows=2), lambda: step.hold(rows=2)],
            "prepare": [lambda: other(rows=2), lambda: step.prepare(rows=4)],
        }[inner]
        ost.fill(work.stream, work.totals, 0)
        step(rows=7)
    assert work.seen() == [2, 2, 1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("around", ["capture", "recording", "step", "recorded step"])
def test_a_graph_around_a_step_has_the_size_of_its_call(device: Device, around: str) -> None:
    """A fault made the graph read the size that later calls of the step left on the device."""
    work = Rows(device)
    stream = work.stream
    inner = ost.GraphedStep(work.add, stream=stream, cache=ost.GraphCache(device))
    for _ in range(0 if around == "step" else 3):  # a capture does what the warm-up did
        inner(rows=4)

    def again(stream: ost.Stream, sizes: ost.Sizes) -> None:
        inner(rows=sizes.rows)

    if around == "capture":
        launch = ost.capture_function(stream, lambda: inner(rows=4)).instantiate().launch
    elif around == "recording":
        with ost.record(stream) as recording:
            inner(rows=4)
        launch = recording.build().instantiate().launch
    else:
        build: Any = "record" if around == "recorded step" else "capture"
        cache = ost.GraphCache(device)
        step = ost.GraphedStep(again, stream=stream, cache=cache, build=build)

        def launch(stream: ost.Stream) -> None:
            step(rows=4)

        launch(stream)
        launch(stream)
    for rows in (2, 4, 3):
        inner(rows=rows)
        for own in (4, rows, 2):
            ost.fill(stream, work.totals, 0)
            launch(stream) if own == 4 else inner(rows=own)
            assert sum(work.seen()) == own
    if around in ("step", "recorded step"):
        assert step.statistics().replays >= 3


def test_a_bucket_ends_with_the_rows_of_a_slot(device: Device) -> None:
    """Buckets are powers of two, and the slot has 6 rows: calls of five rows were never graphed."""
    whole = device.array(np.ones((8, 4), np.float32))
    x = whole[:6]

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        count = sizes.rows * 4
        ost.launch(stream, kernel(device, "scale"), config(count), x, count)

    step = ost.GraphedStep(
        work,
        stream=device.create_stream(),
        cache=ost.GraphCache(device),
        slots=[ost.Slot("x", x, "state", size="rows", scratch_padding=True)],
        warmups=0,
    )
    for rows in (5, 6, 5):
        step(rows=rows)
    assert step.key(rows=5) == step.key(rows=6) != step.key(rows=4)
    assert step.statistics().replays == 3
    assert (whole.to_numpy(step.stream)[5] == 8).all(), "a row of padding, within the slot"
    assert (whole.to_numpy(step.stream)[6:] == 1).all(), "and none behind it"


def test_other_buckets_are_other_graphs(device: Device) -> None:
    x, cache = device.zeros(1, np.int32), ost.GraphCache(device, buckets=ost.PowersOfTwo(8))
    step = count_step(device, x, cache, 1)
    step.run = lambda stream, sizes: ost.launch(
        stream, kernel(device, "increment"), config(1), x, 1
    )
    before = step.key(n=3)
    cache.buckets = ost.ExplicitBuckets([3, 8])
    assert step.key(n=3) != before


def test_a_step_forgets_sizes_that_it_has_not_seen_for_long(
    host_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphed_step, "_REMEMBERED", 256)
    x = host_device.zeros(1, np.int32)
    step = count_step(host_device, x, ost.GraphCache(host_device), 1, graphs=False)
    step.run = lambda stream, sizes: None
    tracemalloc.start()
    try:
        for n in range(300):
            step(n=n)
        first = tracemalloc.get_traced_memory()[0]
        for n in range(300, 1200):
            step(n=n)
        assert tracemalloc.get_traced_memory()[0] < first + (1 << 16)
    finally:
        tracemalloc.stop()
