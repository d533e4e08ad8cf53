"""Times of the nodes of an executable, by a twin that has a timer after every node.

A timer is a kernel of one thread that writes the time of the device's own clock (`%globaltimer`,
which moves in steps of 32 ns on an H200; on the CPU `time.perf_counter_ns`).  The twin has the
nodes and edges of the executable, and a node waits for the timers of the nodes that it waits for:

    timer ─▶ a ─▶ timer ─▶ b ─▶ timer        time of b = last timer - timer before - one timer

Events would need no kernel, but two event nodes in a row take 2.7 us on an H200 (`event_us` in
benchmarks/results/profile-1B-nvidia-h200.json) where a kernel takes less than one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.driver.api import (
    EventRecordNodeParams,
    EventWaitNodeParams,
    KernelNodeParams,
    LaunchConfig,
    NodeHandle,
    NodeParams,
    not_null,
    whole_number,
)
from ostinato.driver.context import CallKind, Context
from ostinato.driver.stream import Event, Stream, require_stream
from ostinato.errors import CaptureError, InputError
from ostinato.graph.flat import FlatNode
from ostinato.graph.probes import probe
from ostinato.graph.show.demangle import demangled
from ostinato.graph.show.outline import kind_text, line_text, shorten
from ostinato.launching import prepare
from ostinato.memory.buffer import allocate

_PAIRS = 8
"""Timers without a node between them, whose time is subtracted."""
_WARM = 3
_MOST_ROWS = 40
_NAME = 56


@dataclass(frozen=True, slots=True)
class NodeTime:
    """The time of one node, in seconds.

    `path` is "3", or "3.child.0" in a child graph; `line` the Python line that made it, "" if that
    is unknown.  `seconds` and `least` are median and minimum over the replays; `start` and `end`
    are those in the twin's replay of median length, from the start of its first node on.
    """

    path: str
    kind: str
    name: str
    line: str
    seconds: float
    least: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """The times of all nodes of an executable that do work, made by `GraphExec.profile`.

    `print` shows a table: a row for each node, or for each name if there are more than 40 nodes.
    `replay` is the time of a replay of the executable itself, in a row of replays, in seconds;
    `timer` the time of a timer, which is subtracted from each node's.  `overlap`: kernels of the
    executable may start before their predecessors end (programmatic launch), which no kernel of the
    twin does; then the sum of the nodes is larger than it need be.
    """

    nodes: tuple[NodeTime, ...]
    replays: int
    replay: float
    timer: float
    overlap: bool

    @property
    def total(self) -> float:
        """The sum of all nodes, in seconds; parallel nodes count each."""
        return sum(node.seconds for node in self.nodes)

    def __str__(self) -> str:
        rows = [(node.path, node.name, "", [node.seconds]) for node in self.nodes]
        if len(rows) > _MOST_ROWS:
            rows = []
            for name in dict.fromkeys(node.name for node in self.nodes):
                every = [node.seconds for node in self.nodes if node.name == name]
                rows.append(("", name, f"{len(every)} ×", every))
            rows.sort(key=lambda row: -sum(row[-1]))
        total = self.total or 1.0
        lines = [f"{'node':>10}  {'name':{_NAME}}  {'':>7}  {'us':>10}  {'sum':>10}  share"]
        for path, name, times, each in rows:
            own = f"{1e6 * statistics.median(each):>10.2f}  {1e6 * sum(each):>10.2f}"
            share = f"{sum(each) / total:>5.1%}"
            lines.append(f"{path:>10}  {shorten(name, _NAME):{_NAME}}  {times:>7}  {own}  {share}")
        lines.append(
            f"{len(self.nodes)} nodes: {1e6 * self.total:.1f} us; a replay: "
            f"{1e6 * self.replay:.1f} us; medians of {self.replays} replays; a timer of "
            f"{1e6 * self.timer:.2f} us is taken off each node"
        )
        if self.overlap:
            lines.append(
                "kernels that start before the one before them ends (programmatic launch) are "
                "timed without that: the difference of the sum and a replay is mostly overlap"
            )
        return "\n".join(lines)

    def to_chrome_trace(self) -> dict[str, Any]:
        """Returns one replay for chrome://tracing and Perfetto: complete events, whose times are in
        microseconds, parallel nodes in rows of their own.

            json.dump(profile.to_chrome_trace(), file)
        """
        events, free = [], [0.0]
        for node in sorted(self.nodes, key=lambda n: n.start):
            row = next((r for r, at in enumerate(free) if at <= node.start), len(free))
            free[row : row + 1] = [node.end]
            told = {"node": node.path, "kind": node.kind, "line": node.line}
            events.append(
                trace_event(node.name, "node", node.start, node.end - node.start, told, row)
            )
        return {"traceEvents": events, "displayTimeUnit": "ns"}


def trace_event(
    name: str, category: str, start: float, seconds: float, told: dict[str, Any], row: int = 0
) -> dict[str, Any]:
    """Returns one complete event of a Chrome trace."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": 1e6 * start,
        "dur": 1e6 * seconds,
        "pid": 0,
        "tid": row,
        "args": told,
    }


class _Twin:
    """The twin of an executable, as the driver's graph; closed by the caller."""

    def __init__(self, flat: Sequence[FlatNode], context: Context, held: ExitStack) -> None:
        self._driver, self.flat = context.driver, flat
        self._stamp = probe(context, "ostinato_stamp")
        self.slots = held.enter_context(allocate(context, len(flat) + _PAIRS + 1, np.uint64))
        self._graph = not_null(self._driver.graph_create(), "graph")
        held.callback(context.retire, partial(self._driver.graph_destroy, self._graph))
        self._used = 0
        self.timed: list[tuple[int, int, tuple[int, ...]]] = []
        """The place, the timer, and the timers before, of each node that does work."""
        self._build()
        self.executable = not_null(self._driver.graph_instantiate(self._graph), "executable")
        held.callback(context.retire, partial(self._driver.exec_destroy, self.executable))

    def _add(self, after: Sequence[NodeHandle], params: NodeParams) -> NodeHandle:
        return self._driver.graph_add_node(self._graph, after, params)

    def _mark(self, after: Sequence[NodeHandle]) -> tuple[NodeHandle, int]:
        """Adds a timer, and returns its node and its slot."""
        slot, self._used = self._used, self._used + 1
        operation = prepare(self._stamp, LaunchConfig(1, 1), self.slots, slot)
        return self._add(after, operation.params), slot

    def _build(self) -> None:
        last, slot = self._mark(())
        for _ in range(_PAIRS):
            last, slot = self._mark([last])
        ends: list[tuple[tuple[NodeHandle, ...], tuple[int, ...]]] = []
        """The nodes that stand for the end of each node, and the timers that tell it."""
        for place, one in enumerate(self.flat):
            before = [ends[at] for at in one.after] or [((last,), (slot,))]
            nodes = tuple(dict.fromkeys(node for handles, _ in before for node in handles))
            marks = tuple(dict.fromkeys(mark for _, slots in before for mark in slots))
            if isinstance(one.node.params, EventRecordNodeParams | EventWaitNodeParams):
                nodes = (self._add(nodes, one.node.params),)
            elif not one.idle:
                end, own = self._mark([self._add(nodes, one.alone)])
                self.timed.append((place, own, marks))
                nodes, marks = (end,), (own,)
            ends.append((nodes, marks))


def profile(
    flat: Sequence[FlatNode],
    stream: Stream,
    replays: int,
    launch: Callable[[Stream], object],
    before: Callable[[Stream], object] | None,
) -> NodeTimes:
    """Implements `GraphExec.profile`.  `launch` launches the executable of these nodes; `before` is
    called before each launch of the twin."""
    require_stream(stream, "profile(stream=…)")
    count = whole_number(replays)
    if count is None or count < 1:
        raise InputError(f"replays={replays!r}: a whole number of 1 or more is needed")
    if stream.is_capturing():
        raise CaptureError("profile: the stream is capturing (the capture goes on)")
    context = stream.context
    with ExitStack() as held:
        twin = _Twin(flat, context, held)
        events = [held.enter_context(Event(context, timing=True)) for _ in range(2)]
        for number in range(_WARM + count):
            if number == _WARM:
                stream.record(events[0])
            launch(stream)
        stream.record(events[1])
        stream.synchronize()
        replay = events[1].elapsed_since(events[0]) / count
        stamps = []
        for _ in range(_WARM + count):
            if before is not None:
                before(stream)
            run = partial(context.driver.exec_launch, twin.executable)
            stream.guarded("a timed graph", run, CallKind.ONCE)
            stamps.append(twin.slots.to_numpy(stream))
    seconds = (np.array(stamps[_WARM:]) - np.min(stamps)).astype(np.float64) / 1e9
    kernels = (one.node.params for one in flat if isinstance(one.node.params, KernelNodeParams))
    return _times(twin, seconds, replay, any(params.config.programmatic for params in kernels))


def _times(twin: _Twin, stamps: npt.NDArray[np.float64], replay: float, overlap: bool) -> NodeTimes:
    """`stamps`: seconds, a row for each replay of the twin."""
    timer = float(np.median(np.diff(stamps[:, : _PAIRS + 1])))
    middle = stamps[np.argsort(np.ptp(stamps, axis=1))[len(stamps) // 2]]
    middle = middle - middle[_PAIRS]
    nodes = []
    for place, own, before in twin.timed:
        one = twin.flat[place]
        spent = np.maximum(stamps[:, own] - stamps[:, before].max(axis=1) - timer, 0)
        begin = middle[list(before)].max()
        kernel = isinstance(one.node.params, KernelNodeParams)
        nodes.append(
            NodeTime(
                one.path,
                kind_text(one.node.kind),
                demangled(one.node.name) if kernel else one.node.name,
                line_text(one.node.location),
                float(np.median(spent)),
                float(spent.min()),
                float(begin),
                float(max(begin, middle[own] - timer)),
            )
        )
    return NodeTimes(tuple(nodes), len(stamps), replay, timer, overlap)
