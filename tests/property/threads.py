"""Threads that work at once: each on its own stream and boxes, or several on one graph or step."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ostinato as ost
from ostinato.errors import EagerRunError
from ostinato.step import Reason
from tests.property.caches import KEYS, CacheRules
from tests.property.engine import BYTE, lists, rule, sampled, tuples
from tests.property.graphs import Executable, boxes_of
from tests.property.oracle import Box, Op, apply, whole
from tests.property.steps import Escaping
from tests.property.world import Lane


@dataclass(eq=False)
class Job:
    """What one thread calls, and what is true afterwards, given what the call returned."""

    lane: Lane | None
    boxes: list[Box]
    call: Callable[[], object]
    then: Callable[[Any], None] = lambda result: None
    on: object = None
    """Jobs on the same do the same one after the other, so they may share lanes and boxes."""


@contextmanager
def _hasty() -> Iterator[None]:
    """Threads are switched as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def _all_at_once(calls: Sequence[Callable[[], object]]) -> list[object]:
    """What the calls return, each on a thread of its own.  Raises what one of them raises."""
    begin = threading.Barrier(len(calls))
    results: list[object] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        begin.wait()
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    with _hasty():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results


class ThreadRules(CacheRules):
    """A rule for several threads."""

    KINDS = ("eager", "capture", "launch", "launch", "replay", "evict", "get", "call", "collect")

    @rule(
        1.5,
        jobs=lists(tuples(sampled(*KINDS), BYTE, BYTE, BYTE), 2, 4),
        twins=sampled(0, 0, 1),
        key=sampled(*KEYS),
    )
    def at_once(self, jobs: list[tuple[str, int, int, int]], twins: int, key: object) -> None:
        """Each job on a thread; with `twins` all do the first one's."""
        if twins:
            jobs = [
                (jobs[0][0], jobs[0][1], at + job[2], jobs[0][3]) for at, job in enumerate(jobs)
            ]
        chosen: list[Job] = []
        kinds: set[str] = set()
        for kind, which, lane, more in jobs:
            if {kind, *kinds} >= {"get", "evict"}:
                continue  # what was evicted in between would be made twice
            job: Job | None = getattr(self, f"job_{kind}")(which, self.lane(lane), more, key)
            if job is not None and all(self.may_meet(job, other) for other in chosen):
                chosen.append(job)
                kinds.add(kind)
        if len(chosen) < 2:
            return
        working = [(job.lane, job.boxes) for job in chosen if job.lane is not None]
        for on, boxes in working:
            self.order(on, boxes)
        results = _all_at_once([job.call for job in chosen])
        for job, result in zip(chosen, results, strict=True):
            job.then(result)
        if working:  # one stream behind them all, since they may have shared boxes
            end, _ = working[0]
            for on, _ in working[1:]:
                if on is not end:
                    end.stream.wait(on.stream.record())
            for _, boxes in working:
                self.order(end, boxes)
                self.look(end, boxes, "on threads at once")

    @staticmethod
    def may_meet(job: Job, other: Job) -> bool:
        if job.on is not None and job.on is other.on:
            return True
        if job.lane is not None and job.lane is other.lane:
            return False  # one may capture on it
        return not set(job.boxes) & set(other.boxes)

    def job_eager(self, which: int, lane: Lane, more: int, key: object) -> Job:
        ops = self.some_ops(which, more)

        def call() -> None:
            for op in ops:
                self.submit(lane.stream, op)

        return Job(lane, boxes_of(ops), call, lambda result: apply(ops))

    def some_ops(self, which: int, more: int) -> list[Op]:
        return [self.op((n + which, more + n, which + 3 * n, more)) for n in (0, 1, 2)]

    def job_capture(self, which: int, lane: Lane, more: int, key: object) -> Job:
        """Capture, instantiate, change, launch."""
        ops = self.some_ops(which, more)

        def call() -> ost.Graph:
            graph = self.captured(lane, ops)
            run = graph.instantiate(upload=lane.stream if more % 2 else None)
            run.rebind({self.part(whole(box)): self.part(whole(box)) for box in boxes_of(ops)})
            run.launch(lane.stream)
            if more % 3:
                run.close()
            return graph

        def then(graph: ost.Graph) -> None:
            apply(ops)
            self.define(graph, ops)

        return Job(lane, boxes_of(ops), call, then)

    def job_launch(self, which: int, lane: Lane, more: int, key: object) -> Job | None:
        if not self.executables:
            return None
        executable = self.executable(which)
        if executable.refusal is not None or not executable.readable:
            return None

        def then(result: object) -> None:
            for _ in range(2):
                executable.apply()

        def call() -> None:
            for _ in range(2):
                executable.run.launch(lane.stream)

        cached = executable.cached is not None
        return None if cached else Job(lane, executable.boxes, call, then, executable)

    def job_replay(self, which: int, lane: Lane, more: int, key: object) -> Job | None:
        cache = self.cache(which)
        executable = self.cached.get((cache, key))
        if executable is None or executable.refusal is not None or not executable.readable:
            return None
        known = executable

        def then(replayed: bool) -> None:
            if replayed:
                known.apply()

        return Job(lane, known.boxes, lambda: cache.replay(key, lane.stream), then, known)

    def job_evict(self, which: int, lane: Lane, more: int, key: object) -> Job:
        cache = self.cache(which)
        return Job(None, [], lambda: cache.evict(key))

    def job_get(self, which: int, lane: Lane, more: int, key: object) -> Job:
        """All that ask at once get the same, and one makes it."""
        cache, ops = self.cache(which), self.some_ops(which, more)
        known = self.cached.get((cache, key))
        made: list[ost.Graph] = []

        def make() -> ost.GraphExec:
            made.append(self.captured(lane, ops))
            return made[-1].instantiate()

        def then(run: ost.GraphExec) -> None:
            now = self.cached.get((cache, key))
            if made:
                assert now is None and known is None, f"{key} was made twice"
                definition = self.define(made[0], ops)
                now = Executable(run, tuple(ops), definition, cached=cache)
                self.executables.append(now)
                self.cached[cache, key] = now
            elif now is not None:
                assert run is now.run

        return Job(lane, [], lambda: cache.get_or_capture(key, make), then)

    def job_call(self, which: int, lane: Lane, more: int, key: object) -> Job | None:
        if not self.steps:
            return None
        modelled = self.modelled(which)
        sizes = self.sizes(modelled, 3)
        work, step = modelled.work, modelled.step
        if (
            modelled.refusals_of(sizes)
            or isinstance(work, Escaping)
            or step.mode == "global"  # any thread's work may break its captures
        ):
            return None

        def call() -> Any:
            try:
                return step(**sizes)
            except EagerRunError:
                assert step.strict
                return None

        def then(decision: Any) -> None:
            if decision is None:
                return
            assert decision.reason is not Reason.MISMATCH, decision
            self.note(modelled, sizes, decision)
            work.apply(work.w, sizes, modelled.reached(sizes))

        return Job(modelled.lane, modelled.boxes, call, then, modelled)

    def job_collect(self, which: int, lane: Lane, more: int, key: object) -> Job:
        def call() -> None:
            gc.collect()
            self.device.context.collect()

        return Job(None, [], call)


class Uncompiled(ThreadRules):
    """Without the compiled launch call."""

    compiled = False
