"""Executables in caches by key: put in, replayed, held and thrown out in every way."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import ostinato as ost
from ostinato.errors import ClosedError, DriverError, InputError, NotHeldError
from ostinato.step import StepKey
from tests.property.engine import BYTE, booleans, rule, sampled
from tests.property.graphs import Executable, GraphRules
from tests.property.oracle import Op, leaves, refs_of
from tests.property.steps import StepRules
from tests.property.world import OPS

Spec = tuple[int, int, int, int]
KEYS = ("a", ("b", 8), 3, None)


@dataclass(eq=False)
class Hold:
    """A lease that is out: an eviction waits for its end."""

    executable: Executable
    around: contextlib.ExitStack


class CacheRules(GraphRules, StepRules):
    """Rules for what is in caches besides the graphs of steps."""

    def open(self) -> None:
        super().open()
        self.cached: dict[tuple[ost.GraphCache, object], Executable] = {}
        self.holds: list[Hold] = []

    def close_everything(self) -> None:
        for hold in self.holds:
            hold.around.close()
        self.holds, self.cached = [], {}
        super().close_everything()

    def check(self) -> None:
        super().check()
        self.see_who_left()

    def see_who_left(self) -> None:
        """What left a cache is closed, once nobody holds it; what is there is open."""
        for (cache, key), executable in list(self.cached.items()):
            if key in cache:
                assert not executable.run.closed, f"{key} is in the cache and closed"
            else:
                del self.cached[cache, key]
                executable.cached = None
                self.executables.remove(executable)
                held = any(hold.executable is executable for hold in self.holds)
                assert executable.run.closed is not held, f"{key} left; held: {held}"
        for hold in self.holds:
            assert not hold.executable.run.closed, "an executable was closed while it was held"
        for cache, limits in zip(self.caches, self.limits, strict=True):
            budget, most = limits
            assert most is None or len(cache) <= most, f"{len(cache)} graphs, not {most}"
            if budget is not None and len(cache) > 1:
                assert cache.statistics().nbytes <= budget, f"over the budget of {budget} bytes"

    def alive(self) -> list[Executable]:
        return [*super().alive(), *(hold.executable for hold in self.holds)]

    def cache(self, which: int) -> ost.GraphCache:
        return self.caches[which % len(self.caches)]

    @rule(
        3,
        when=lambda self: self.executables,
        which=BYTE,
        where=BYTE,
        key=sampled(*KEYS),
        nbytes=sampled(None, 0, 5000, 30_000),
    )
    def install(self, which: int, where: int, key: object, nbytes: int | None) -> None:
        executable, cache = self.executable(which), self.cache(where)
        if executable.cached is None:
            executable.cached = cache
            before = self.cached.pop((cache, key), None)
            cache.install(key, executable.run, nbytes=nbytes)
            self.cached[cache, key] = executable
            if before is not None:
                self.replaced(before)
        elif self.cached.get((cache, key)) is executable:
            cache.install(key, executable.run, nbytes=nbytes)  # only another number of bytes
        else:
            other = cache if executable.cached is cache else None
            if other is not None:
                self.refuses(lambda: other.install(key, executable.run), InputError)

    def replaced(self, before: Executable) -> None:
        before.cached = None
        self.executables.remove(before)
        held = any(hold.executable is before for hold in self.holds)
        assert before.run.closed is not held

    @rule(3, where=BYTE, key=sampled(*KEYS), specs=OPS, lane=BYTE, fail=booleans(), way=BYTE)
    def get_or_capture(
        self, where: int, key: object, specs: list[Spec], lane: int, fail: bool, way: int
    ) -> None:
        cache, on = self.cache(where), self.lane(lane)
        ops: list[Op] = [self.op(spec) for spec in specs]
        known = self.cached.get((cache, key))

        def make() -> ost.GraphExec:
            graph = self.captured(on, ops)
            self.define(graph, ops)
            if fail:
                raise ZeroDivisionError
            return graph.instantiate(upload=on.stream if way % 2 else None)

        try:
            run = cache.get_or_capture(key, make)
        except ZeroDivisionError:
            assert known is None and key not in cache
            return
        if known is not None:
            assert run is known.run
            return
        made = Executable(run, tuple(ops), self.definitions[-1], cached=cache)
        self.executables.append(made)
        self.cached[cache, key] = made

    @rule(6, where=BYTE, key=sampled(*KEYS), lane=BYTE)
    def replay(self, where: int, key: object, lane: int) -> None:
        cache, on = self.cache(where), self.lane(lane)
        executable = self.cached.get((cache, key))
        if executable is None:
            assert cache.replay(key, on.stream) is False
            return
        before = executable.run.closed
        assert not before
        self.play(executable, on, lambda: cache.replay(key, on.stream))

    @rule(1, where=BYTE, key=sampled(*KEYS), lane=BYTE)
    def fail_to_replay(self, where: int, key: object, lane: int) -> None:
        cache, on = self.cache(where), self.lane(lane)
        executable = self.cached.get((cache, key))
        if executable is not None and executable.refusal is None and executable.readable:
            self.faults.fail("exec_launch")
            self.refuses(lambda: cache.replay(key, on.stream), DriverError)
            self.faults.clear()

    @rule(2, where=BYTE, key=sampled(*KEYS))
    def hold_key(self, where: int, key: object) -> None:
        cache = self.cache(where)
        around = contextlib.ExitStack()
        known = self.cached.get((cache, key))
        try:
            run = around.enter_context(cache.hold(key))
        except NotHeldError:
            assert known is None
        else:
            assert known is not None and run is known.run
            self.holds.append(Hold(known, around))
        if len(self.holds) > 3:
            self.release_key(0)

    @rule(3, when=lambda self: self.holds, which=BYTE, lane=BYTE)
    def launch_held_key(self, which: int, lane: int) -> None:
        executable, on = self.holds[which % len(self.holds)].executable, self.lane(lane)
        self.play(executable, on, lambda: executable.run.launch(on.stream))

    @rule(1, when=lambda self: self.holds, which=BYTE)
    def release_key(self, which: int) -> None:
        hold = self.holds.pop(which % len(self.holds))
        hold.around.close()
        again = any(other.executable is hold.executable for other in self.holds)
        if hold.executable.cached is None and not again:
            assert hold.executable.run.closed, "nobody holds what left the cache"

    @rule(2, where=BYTE, at=BYTE)
    def invalidate_part(self, where: int, at: int) -> None:
        """Exactly the graphs that point into a part of a box leave."""
        cache, ref = self.cache(where), self.ref(at)
        mine = {key: e for (c, key), e in self.cached.items() if c is cache}
        wanted = set()
        for key, executable in mine.items():
            refs = [r for op in leaves(executable.ops) for r in refs_of(op).values()]
            if not executable.readable or any(not r.reach for r in refs):
                return
            if any(r.overlaps(ref) for r in refs):
                wanted.add(key)
        buffer = self.part(ref)
        touching = cache.touching(buffer)
        gone = cache.evict_touching(buffer)
        assert gone == touching and cache.touching(buffer) == []
        assert {key for key in gone if key in mine} == wanted
        for modelled in self.steps:
            # Graphs may be there of the weights before these.
            if modelled.step.cache is cache and ref.box is modelled.work.x:
                a_key = modelled.step.key(**dict.fromkeys(modelled.work.names, 1))
                left = filter(lambda key: isinstance(key, StepKey), cache.keys())
                assert all(key.identity != a_key.identity for key in left), ref

    @rule(0.3, where=BYTE)
    def use_a_closed_cache(self, where: int) -> None:
        cache = self.cache(where)
        self.close_cache(where, (None, None))
        assert cache.closed and len(cache) == 0 and cache.keys() == []
        self.see_who_left()
        stream = self.open_lanes[0].stream
        self.refuses(lambda: cache.replay("a", stream))
        self.refuses(lambda: cache.get("a"))
        self.refuses(lambda: cache.get_or_capture("a", lambda: None), ClosedError)
