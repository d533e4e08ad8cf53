"""The cache against a model: a plain dict in order of use, with a budget, on the host driver."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import ostinato as ost
from ostinato.device import open_device
from ostinato.errors import CaptureError, NotHeldError
from ostinato.step.statistics import Evictions
from tests.sources import config, kernel

KEYS = st.sampled_from(["a", ("b", 8), 3, None, frozenset({"e"})])
BYTES = st.integers(0, 12)
AMOUNT = st.integers(1, 1000)
BUDGET = 20


@dataclass
class Kept:
    """What the model knows of a graph: it adds `by` to counter number `at`."""

    run: ost.GraphExec
    nbytes: int
    by: int
    at: int


class CacheModel(RuleBasedStateMachine):
    @initialize(budget=st.sampled_from([None, BUDGET]), max_graphs=st.sampled_from([None, 1, 3]))
    def open(self, budget: int | None, max_graphs: int | None) -> None:
        self.device = open_device("host")
        self.stream = self.device.create_stream()
        self.add = kernel(self.device, "increment")
        self.counters = [self.device.zeros(1, np.int32) for _ in range(3)]
        self.expected = [0, 0, 0]
        self.budget, self.max_graphs = budget, max_graphs
        self.cache = ost.GraphCache(self.device, budget=budget, max_graphs=max_graphs)
        self.model: OrderedDict[object, Kept] = OrderedDict()
        self.gone: list[ost.GraphExec] = []
        self.hits = self.misses = self.replaced = self.over = self.captures = 0
        self.left: Counter[str] = Counter()

    def teardown(self) -> None:
        if hasattr(self, "device"):
            self.cache.close()
            assert all(kept.run.closed for kept in self.model.values())
            self.device.close()

    # --- the model
    def graph(self, by: int, at: int) -> ost.GraphExec:
        with ost.capture(self.stream) as capture:
            ost.launch(self.stream, self.add, config(1), self.counters[at], by)
        return capture.graph.instantiate(upload=self.stream)

    def use(self, key: object) -> Kept | None:
        if key in self.model:
            self.model.move_to_end(key)
        return self.model.get(key)

    def put(self, key: object, kept: Kept) -> None:
        if key in self.model:
            self.gone.append(self.model.pop(key).run)
            self.replaced += 1
        self.model[key] = kept
        while self.max_graphs is not None and len(self.model) > self.max_graphs:
            self.drop(next(iter(self.model)), "count")
        if self.budget is not None:
            while self.total > self.budget and len(self.model) > 1:
                self.drop(next(iter(self.model)), "budget")
            self.over += self.total > self.budget

    def drop(self, key: object, why: str) -> None:
        self.gone.append(self.model.pop(key).run)
        self.left[why] += 1

    @property
    def total(self) -> int:
        return sum(kept.nbytes for kept in self.model.values())

    # --- the calls
    @rule(key=KEYS, nbytes=BYTES, by=AMOUNT, at=st.integers(0, 2))
    def install(self, key: object, nbytes: int, by: int, at: int) -> None:
        run = self.graph(by, at)
        self.cache.install(key, run, nbytes=nbytes)
        self.put(key, Kept(run, nbytes, by, at))

    @rule(key=KEYS)
    def replay(self, key: object) -> None:
        kept = self.use(key)
        assert self.cache.replay(key, self.stream) is (kept is not None)
        if kept is None:
            self.misses += 1
        else:
            self.hits += 1
            self.expected[kept.at] += kept.by

    @rule(key=KEYS)
    def get(self, key: object) -> None:
        kept = self.use(key)
        assert self.cache.get(key) is (None if kept is None else kept.run)
        self.hits += kept is not None
        self.misses += kept is None

    @rule(key=KEYS, nbytes=BYTES, by=AMOUNT, at=st.integers(0, 2))
    def get_or_capture(self, key: object, nbytes: int, by: int, at: int) -> None:
        kept = self.use(key)
        run = self.cache.get_or_capture(key, lambda: self.graph(by, at), nbytes=nbytes)
        if kept is not None:
            assert run is kept.run
            self.hits += 1
        else:
            self.captures += 1
            self.put(key, Kept(run, nbytes, by, at))

    @rule(key=KEYS)
    def fail_to_capture(self, key: object) -> None:
        def fail() -> ost.GraphExec:
            with ost.capture(self.stream):
                raise CaptureError("no")

        kept = self.use(key)
        try:
            run = self.cache.get_or_capture(key, fail)
        except CaptureError:
            assert kept is None
        else:
            assert kept is not None and run is kept.run
            self.hits += 1

    @rule(key=KEYS, old=st.integers(0, 2), new=st.integers(0, 2))
    def rebind(self, key: object, old: int, new: int) -> None:
        kept = self.use(key)
        try:
            with self.cache.hold(key) as run:
                assert kept is not None and run is kept.run
                run.rebind({self.counters[old]: self.counters[new]})
        except NotHeldError:
            assert kept is None
            self.misses += 1
        else:
            assert kept is not None
            self.hits += 1
            kept.at = new if kept.at == old else kept.at

    @rule(key=KEYS, by=AMOUNT)
    def patch(self, key: object, by: int) -> None:
        if key in self.model:
            self.model[key].run.set(0, "by", by)
            self.model[key].by = by

    @rule(key=KEYS)
    def evict(self, key: object) -> None:
        assert self.cache.evict(key) is (key in self.model)
        if key in self.model:
            self.drop(key, "asked")

    @rule(key=KEYS)
    def evict_while_held(self, key: object) -> None:
        kept = self.use(key)
        if kept is None:
            self.misses += 1
            with pytest.raises(NotHeldError):
                self.cache.hold(key).__enter__()
            return
        with self.cache.hold(key) as run:
            assert self.cache.evict(key)
            assert not run.closed
            run.launch(self.stream)
            self.expected[kept.at] += kept.by
            self.hits += 1
            self.drop(key, "asked")
            assert self.cache.statistics().leaving == 1

    @rule()
    def evict_all(self) -> None:
        assert self.cache.evict_all() == len(self.model)
        for key in list(self.model):
            self.drop(key, "asked")

    @rule(at=st.integers(0, 2))
    def evict_touching(self, at: int) -> None:
        touching = [key for key, kept in self.model.items() if kept.at == at]
        assert self.cache.touching(self.counters[at]) == touching
        assert self.cache.evict_touching(self.counters[at]) == touching
        for key in touching:
            self.drop(key, "touching")

    # --- what holds after each call
    def check(self, holds: Callable[[], bool]) -> None:
        if hasattr(self, "device"):
            assert holds()

    @invariant()
    def same_keys_in_the_same_order(self) -> None:
        self.check(lambda: self.cache.keys() == list(self.model))
        self.check(lambda: len(self.cache) == len(self.model))
        self.check(lambda: all(key in self.cache for key in self.model))

    @invariant()
    def what_left_is_closed_and_what_is_there_is_not(self) -> None:
        if hasattr(self, "device"):
            assert all(run.closed for run in self.gone)
            assert not any(kept.run.closed for kept in self.model.values())

    @invariant()
    def every_replay_ran_once(self) -> None:
        if hasattr(self, "device"):
            found = [int(c.to_numpy(self.stream)[0]) for c in self.counters]
            assert found == self.expected

    @invariant()
    def the_numbers_agree(self) -> None:
        if not hasattr(self, "device"):
            return
        stats = self.cache.statistics()
        assert stats.nbytes == self.total
        assert (stats.hits, stats.misses) == (self.hits, self.misses)
        assert (stats.captures, stats.replaced) == (self.captures, self.replaced)
        assert (stats.evictions, stats.over_budget) == (Evictions(**self.left), self.over)
        assert stats.leaving == 0
        assert [k.key for k in stats.keys] == list(self.model)


CacheModel.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestCacheModel = CacheModel.TestCase
