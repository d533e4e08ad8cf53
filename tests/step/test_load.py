"""A step and its cache under load: many requests, a budget for a third of the keys, evictions,
invalidations and captures that fail, all at random."""

from __future__ import annotations

import gc
import random
from collections import Counter

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import CaptureError
from ostinato.step import CaptureLimits, FootprintSource, Multiples, Reason
from tests.sources import config, kernel

ROWS, WIDTH = 48, 4
KEYS = 24
KEPT = KEYS // 3
OWN = 8 << 20
"""Bytes that each graph brings, so that device memory shows which are there."""
SLACK = 16 << 20
"""Graphs themselves, buffers, and the driver's blocks."""


class Load:
    """total[r] += x[r] for the rows in use, with a graph of its own memory for each two rows."""

    def __init__(self, device: Device, seed: int) -> None:
        self.device = device
        self.random = random.Random(seed)
        self.stream = device.create_stream()
        # Whole numbers, so that sums have no rounding.
        x = (np.arange(ROWS * WIDTH) % 7 + 1).astype(np.float32).reshape(ROWS, WIDTH)
        self.x = device.array(x)
        self.total = device.zeros((ROWS, WIDTH), np.float32)
        self.one = device.array(np.ones(1, np.float32))
        self.added = np.zeros((ROWS, WIDTH), np.float64)
        self.each = x.astype(np.float64)
        self.kernels = {name: kernel(device, name) for name in ("axpy_rows", "fill")}
        self.cache = ost.GraphCache(
            device,
            buckets=Multiples(2, ROWS),
            budget=KEPT * (OWN + (1 << 20)),
            limits=CaptureLimits(per_key=4, within=60),
        )
        self.step = ost.GraphedStep(
            self.run, stream=self.stream, cache=self.cache, name="load", builder=self.build
        )
        self.failing = False
        self.failed = 0
        self.decisions: Counter[Reason] = Counter()
        device.synchronize()
        self.free = device.memory_info()[0]

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        real = sizes.on_device("rows")
        axpy, launched = self.kernels["axpy_rows"], config(sizes.rows * WIDTH or 1)
        ost.launch(stream, axpy, launched, self.x, self.one, self.total, real, WIDTH)

    def build(self, stream: ost.Stream, sizes: ost.Sizes) -> ost.GraphExec:
        own = self.device.empty(OWN // 4, np.float32)
        with ost.capture(stream) as capture:
            ost.launch(stream, self.kernels["fill"], config(WIDTH), own, 1.0, WIDTH)
            self.run(stream, sizes)
            if self.failing:
                self.failing = False
                self.failed += 1
                raise CaptureError("planted")
        return capture.graph.instantiate(upload=stream)

    def request(self) -> None:
        # Few sizes are frequent, as in a service; all come.
        rows = min(ROWS, int(ROWS * self.random.random() ** 4) + self.random.randrange(3))
        self.added[:rows] += self.each[:rows]
        decision = self.step(rows=rows)
        self.decisions[decision.reason] += 1
        chance = self.random.randrange(1000)
        if chance < 6:
            self.failing = True
        elif chance < 46:
            self.step.forget(rows=self.random.randrange(ROWS + 1))
        elif chance < 66 and self.cache.keys():
            assert self.cache.evict(self.random.choice(self.cache.keys()))
        elif chance == 66:
            self.cache.evict_touching(self.total)  # all of them
            assert len(self.cache) == 0

    def check(self) -> None:
        """Answers, memory and limits, at this moment."""
        np.testing.assert_array_equal(self.total.to_numpy(self.stream), self.added)
        # Closed graphs are destroyed once their work is done, at the next occasion.
        gc.collect()
        self.device.synchronize()
        self.device.context.collect()
        stats = self.cache.statistics()
        assert stats.budget is not None and stats.nbytes <= stats.budget
        used = self.free - self.device.memory_info()[0]
        assert used <= stats.budget + SLACK, f"{used} bytes for {stats.graphs} graphs"
        assert all(line.nbytes_source is FootprintSource.MEASURED for line in stats.keys)


@pytest.mark.alone
@pytest.mark.parametrize("number", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_cache_under_load(device: Device, number: int) -> None:
    load = Load(device, number)
    for index in range(number):
        load.request()
        if index % (number // 20) == 0:
            load.check()
    load.check()

    cache, step = load.cache.statistics(), load.step.statistics()
    assert cache.forgotten == 0
    lines = (*cache.keys, *cache.gone)
    assert len({line.key for line in lines}) == len(lines) == len(step.keys) == KEYS
    for name in ("hits", "misses", "captures", "capture_failures", "installed", "replaced"):
        assert sum(getattr(line, name) for line in lines) == getattr(cache, name), name
    for line in lines:
        assert line.captures == line.left + (line in cache.keys)
    assert cache.captures == cache.graphs + cache.evictions.total
    assert cache.evictions.total == sum(line.evictions.total for line in lines)
    assert cache.capture_seconds == pytest.approx(sum(line.capture_seconds for line in lines))

    assert step.calls == number == step.eager + step.replays
    assert step.eager == sum(step.eager_reasons.values())
    for name in ("calls", "eager", "replays", "captures", "used", "padded"):
        assert sum(getattr(line, name) for line in step.keys) == getattr(step, name), name
    assert sum(sum(line.eager_reasons.values()) for line in step.keys) == step.eager
    assert step.captures == cache.captures and load.failed == cache.capture_failures
    # A call looks once; one that captures looks again for what it captured, and one of a key that
    # was given up need not look.
    looks, given_up = number + cache.captures, load.decisions[Reason.BUILD_FAILED]
    assert looks - given_up <= cache.hits + cache.misses <= looks
    replayed = load.decisions[Reason.REPLAYED] + load.decisions[Reason.FIRST_USE]
    assert replayed == step.replays
    for reason, count in load.decisions.items():
        if reason not in (Reason.REPLAYED, Reason.FIRST_USE):
            assert step.eager_reasons[reason.value] == count
    for line in step.keys:
        assert line.graph == load.cache.key_statistics(line.key)
        assert line.seconds.count <= line.replays and line.seconds.p50 <= line.seconds.p99

    # What was to happen has happened.
    assert cache.evictions.budget > 0 and 0 < cache.evictions.asked < cache.evictions.total
    assert cache.evictions.touching and load.failed
    for expected in (Reason.BUILD_FAILED, Reason.RECAPTURED, Reason.WARMING_UP):
        assert step.eager_reasons[expected.value]
    assert step.replays > number // 4
    assert any(line.seconds.count for line in step.keys)
    load.step.close()
    assert len(load.cache) == 0
