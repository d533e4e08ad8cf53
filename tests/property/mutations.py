"""Mistakes that the library could have.  Each changes one method; the property test must see it.

A mutation is a context manager: inside of it the library is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from ostinato import Graph, GraphCache, GraphedStep, Stream
from ostinato.driver.context import Context
from ostinato.driver.host.driver import HostDriver
from ostinato.graph import capturing, executable, order, recording
from ostinato.graph.executable import GraphExec
from ostinato.graph.shadow import Shadow
from ostinato.state import staging
from ostinato.step import buckets, sizes
from ostinato.step.cache import Table
from ostinato.step.declared import Declared
from ostinato.step.engine import Engine
from ostinato.step.entry import CachedGraph
from ostinato.step.flight import Flights

Method = Callable[..., Any]
MUTATIONS: dict[str, Callable[[], AbstractContextManager[object]]] = {}


def mutation(owner: object, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function that takes the original method and its arguments in its place."""

    def register(wrong: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def wrongly() -> Iterator[None]:
            right = getattr(owner, name)

            @functools.wraps(right)
            def method(*args: Any, **kwargs: Any) -> Any:
                return wrong(right, *args, **kwargs)

            with mock.patch.object(owner, name, method):
                yield

        MUTATIONS[wrong.__name__] = wrongly
        return wrong

    return register


# --- order
@mutation(HostDriver, "stream_wait_event")
def an_event_is_not_waited_for(right: Method, self: HostDriver, stream: Any, event: Any) -> None:
    captured = self._events[event].captured is not None  # a fork, or a join
    if captured or self._streams[stream].capture is not None:
        right(self, stream, event)


@mutation(order, "conflict")
def a_recording_orders_writers_only(right: Method, first: Any, second: Any) -> bool:
    if None in (first.writes, second.writes):
        return right(first, second)
    return order.overlap(first.writes, second.writes)


@mutation(Graph, "add_event_record")
def an_event_node_records_nothing(right: Method, self: Graph, event: Any, after: Any = ()) -> Any:
    return self.add_empty(after=after)


# --- changes of executables
@mutation(Shadow, "_set")
def the_last_of_many_changes_is_left_out(right: Method, self: Shadow, nodes: list[Any]) -> None:
    right(self, nodes[:-1] or nodes)


@mutation(executable, "plan_rebind")
def a_rebound_pointer_loses_its_offset(
    right: Method, index: Any, moves: list[Any], *rest: Any
) -> Any:
    plan = right(index, moves, *rest)
    starts = np.array([move.new.address for move in moves], np.uint64)
    return replace(
        plan, values=np.array([max(starts[starts <= v]) for v in plan.values], np.uint64)
    )


@mutation(GraphExec, "_set_enabled")
def nothing_is_switched_off(right: Method, self: GraphExec, node: Any, enabled: bool) -> None:
    right(self, node, True)


@mutation(Shadow, "update")
def an_update_is_not_noted(right: Method, self: Shadow, graph: Graph) -> list[object]:
    now, self._commit = self._now, lambda now: []
    try:
        return right(self, graph)
    finally:
        del self._commit
        assert self._now is now


@mutation(Shadow, "_undo")
def a_refused_change_mends_an_executable(right: Method, self: Shadow, nodes: list[Any]) -> None:
    right(self, nodes)
    self.unusable = ""


# --- lifetimes
@mutation(Context, "retire")
def what_is_closed_is_destroyed_at_once(
    right: Method, self: Context, destroy: Callable[[], None], streams: Any = (), **how: Any
) -> None:
    right(self, destroy, (), **how)


@mutation(executable._Release, "retire")
def an_executable_does_not_wait_for_its_launch(right: Method, self: Any, prepared: Any) -> None:
    right(self, {})


@mutation(Graph, "add")
def a_node_keeps_nothing_alive(right: Method, self: Graph, *args: Any, **more: Any) -> Any:
    before = len(self.keep)
    node = right(self, *args, **more)
    del self.keep[before:]
    return node


# --- caches
@mutation(GraphCache, "_leased")
def a_cache_gives_the_graph_of_another_key(right: Method, self: GraphCache, key: Any) -> Any:
    others = [other for other in self.table.entries if other != key]
    return right(self, others[-1] if others and key in self.table.entries else key)


@mutation(CachedGraph, "release")
def a_held_graph_is_closed_by_the_first_release(right: Method, self: CachedGraph) -> bool:
    right(self)
    return self.leaving


@mutation(GraphCache, "_touching")
def an_invalidation_forgets_one(right: Method, self: GraphCache, target: Any) -> Any:
    return right(self, target)[1:]


@mutation(Flights, "board")
def threads_make_the_same_graph_twice(right: Method, self: Flights, flight: Any) -> None:
    right(self, flight)


@mutation(buckets.PowersOfTwo, "bucket")
def buckets_are_rounded_down(right: Method, self: Any, size: int) -> int:
    rounded = int(right(self, size))
    return rounded // 2 if rounded > size else rounded


# --- steps
@mutation(sizes.DeviceSizes, "set")
def a_size_is_written_too_late(right: Method, self: Any, wanted: Any, stream: Stream) -> None:
    before, self._late = getattr(self, "_late", wanted), wanted
    right(self, before, stream)


@mutation(Engine, "_build")
def a_built_graph_is_not_run(right: Method, self: Any, work: Any, entry: Any, decision: Any) -> Any:
    if not work.recorded and self.make(work, entry) is None:
        return decision
    return right(self, work, entry, decision)


@mutation(Engine, "_refused")
def a_refused_replay_is_forgotten(
    right: Method, self: Any, work: Any, entry: Any, error: Any
) -> Any:
    with mock.patch.object(self, "_run_eager", lambda work, entry, decision: decision):
        return right(self, work, entry, error)


@mutation(staging.StagingRing, "__init__")
def a_staging_ring_does_not_wait(right: Method, self: Any, *args: Any, **more: Any) -> None:
    right(self, *args, **more)

    class Forgetful(list[Any]):
        def __setitem__(self, index: Any, value: Any) -> None:
            pass

    self._done = Forgetful(self._done)
    self._unmarked = Forgetful(self._unmarked)


@mutation(Declared, "start")
def a_check_runs_twice(right: Method, self: Any, before: Any, turn: int, eager: Any) -> Any:
    return self.read() if turn else right(self, before, turn, eager)


# --- what is not done at all, and what is returned all the same
LEFT_OUT: dict[str, tuple[Any, str, object]] = {
    "a_recording_knows_no_fork": (recording.Recording, "waited", None),
    "what_an_executable_holds_is_not_noted": (Shadow, "_commit", []),
    "a_refused_change_is_not_undone": (Shadow, "_undo", None),
    "a_launch_shape_is_not_set": (GraphExec, "_set_config", None),
    "closed_memory_is_not_noticed": (GraphExec, "memory_closed", None),
    "half_a_capture_stays_in_the_graph": (capturing._Session, "_take_back", None),
    "a_cache_keeps_to_no_limit": (Table, "_trim", []),
    "a_closed_step_is_served": (GraphedStep, "_require_open", None),
    "a_check_leaves_poison": (Declared, "accept", None),
    "a_failed_check_puts_nothing_back": (Declared, "restore", None),
}
MUTATIONS |= {
    name: functools.partial(mock.patch.object, owner, method, lambda *_, result=result: result)
    for name, (owner, method, result) in LEFT_OUT.items()
}
