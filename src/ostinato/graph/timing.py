"""Times of the nodes of an executable, by a twin that has a timer after every node.

A timer is a kernel of one thread that writes the time of the device's own clock (`%globaltimer`,
which moves in steps of 32 ns on an H200; on the CPU `time.perf_counter_ns`).  The twin has the
nodes and edges of the executable, and a node waits for the timers of the nodes that it waits for:

    timer ─▶ a ─▶ timer ─▶ b ─▶ timer        time of b = last timer - timer before - one timer

Events would need no kernel, but two event nodes in a row take 2.7 us on an H200 (`event_us` in
benchmarks/results/profile-1B-nvidia-h200.json) where a kernel takes less than one.
"""

from __future__ import annotations

import logging
import statistics
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

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
from ostinato.driver.closeable import Closeable
from ostinato.driver.context import CallKind, Context
from ostinato.driver.forking import new_lock
from ostinato.driver.stream import Event, Stream, require_stream, wait_for_streams
from ostinato.errors import CaptureError, InputError, OstinatoError
from ostinato.graph.flat import FlatNode
from ostinato.graph.probes import probe
from ostinato.graph.show.demangle import demangled
from ostinato.graph.show.outline import count_text, kind_text, line_text, shorten
from ostinato.launching import prepare
from ostinato.memory.buffer import allocate

_log = logging.getLogger(__name__)
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
    `replay` is the time of a replay of the executable itself, in a row of replays, in seconds (of a
    `NodeSampler` that of single replays, with the host's time if the device waits for it);
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
            f"{count_text(len(self.nodes), 'node')}: {1e6 * self.total:.1f} us; a replay: "
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
    """The twin of an executable for one stream, as the driver's graph; `held` closes it."""

    def __init__(self, flat: Sequence[FlatNode], stream: Stream, held: ExitStack) -> None:
        context = stream.context
        self._driver, self.flat = context.driver, flat
        self._stamp = probe(context, "ostinato_stamp")
        self.slots = held.enter_context(allocate(context, len(flat) + _PAIRS + 1, np.uint64))
        self._graph = not_null(self._driver.graph_create(), "graph")
        held.callback(context.retire, partial(self._driver.graph_destroy, self._graph), (stream,))
        self._used = 0
        self.timed: list[tuple[int, int, tuple[int, ...]]] = []
        """The place, the timer, and the timers before, of each node that does work."""
        self._build()
        self.executable = not_null(self._driver.graph_instantiate(self._graph), "executable")
        destroy = partial(self._driver.exec_destroy, self.executable)
        held.callback(context.retire, destroy, (stream,))

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
    count = _require(stream, replays)
    context = stream.context
    with ExitStack() as held:
        twin = _Twin(flat, stream, held)
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
    return _times(twin, stamps[_WARM:], replay)


def _require(stream: Stream, replays: int) -> int:
    """Returns the number of replays.  Raises InputError, CaptureError."""
    require_stream(stream, "profile(stream=…)")
    count = whole_number(replays)
    if count is None or count < 1:
        raise InputError(f"replays={replays!r}: a whole number of 1 or more is needed")
    if stream.is_capturing():
        raise CaptureError("profile: the stream is capturing (the capture goes on)")
    return count


def _times(twin: _Twin, slots: Sequence[npt.NDArray[np.uint64]], replay: float) -> NodeTimes:
    """`slots`: the content of the twin's after each of its replays."""
    stamps = (np.array(slots) - np.min(slots)).astype(np.float64) / 1e9
    kernels = [one.node.params for one in twin.flat]
    overlap = any(isinstance(p, KernelNodeParams) and p.config.programmatic for p in kernels)
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


class _Executable(Protocol):
    """The part of `GraphExec` that a sampler needs."""

    context: Context

    @property
    def streams(self) -> tuple[Stream, ...]: ...
    def flat_nodes(self) -> tuple[FlatNode, ...]: ...
    def revision(self) -> int: ...
    def cool(self) -> None: ...


class NodeSampler(Closeable):
    """Times one in so many of the launches that a program makes anyway; made by
    `GraphExec.profile(sample=…)`, which has the rules.

        with run.profile(stream=stream, sample=1000) as sampler:
            serve()                      # launches the executable
            print(sampler.times())

    `close()`, or the end of the `with` block, ends it; `times()` still works then.
    """

    def __init__(self, run: _Executable, stream: Stream, replays: int, sample: int) -> None:
        count, every = _require(stream, replays), whole_number(sample)
        if every is None or every < 2:
            raise InputError(f"sample={sample!r}: one in so many, a whole number of 2 or more")
        context = run.context
        context.require_same(stream.context, "profile: the stream", "the executable is of")
        self.closed = False
        self.stopped = ""
        """The error after which no launch is timed any more; "" without one."""
        self._run = weakref.ref(run)  # which has this
        self._stream, self._every, self._left = stream, every, 2
        self._lock = new_lock()
        self._slots: deque[npt.NDArray[np.uint64]] = deque(maxlen=count)
        self._replays: deque[float] = deque(maxlen=count)
        self._pending = self._ready = False
        self._begin, self._end = (Event(context, timing=True) for _ in range(2))
        self._done = Event(context)
        self._driver = context.driver
        """Called directly: the stream's own calls raise what host functions have raised, and that
        belongs to a call of the program's."""
        self._held = ExitStack()
        self._finalizer = weakref.finalize(self, context.retire, self._held.close, (stream,))
        self._finalizer.atexit = False
        self._nodes: object = None
        """By what the rows of two twins can be told to be of the same nodes."""
        self._follow(run)

    def __repr__(self) -> str:
        state = f", stopped: {self.stopped}" if self.stopped else ", closed" if self.closed else ""
        return f"<NodeSampler of one launch in {self._every}, {len(self._slots)} timed{state}>"

    def times(self) -> NodeTimes:
        """Returns the times of the latest `replays` launches that were timed and have finished; a
        table without nodes if there is none yet.  Does not wait.  Raises DriverError."""
        context = self._stream.context
        with self._lock:  # for a moment only, since a launch may wait for it
            if not context.closed:
                with context.relaxed():
                    self._collect()
            twin, slots, replays = self._twin, [*self._slots], [*self._replays]
        if not slots:
            return NodeTimes((), 0, 0.0, 0.0, False)
        return _times(twin, slots, statistics.median(replays))

    def close(self) -> None:
        """Makes all launches go the usual way again.  Waits for a launch that is being timed.
        Idempotent."""
        run = self._run()
        with self._lock:
            if self._pending:  # later launches, on any stream, must come after it
                self._tried(self._finished)
            self.closed = True
        if run is not None:
            run.cool()
        self._finalizer()

    # --- launches
    def around(self, stream: Stream, call: Callable[[], int]) -> Callable[[], int]:
        """Returns what launches the executable on a stream, with its `call`; the result is a
        status, like that of `call`."""
        if stream is self._stream:
            return partial(self._counted, call)
        return partial(self._ordered, stream, call)

    def _ordered(self, stream: Stream, call: Callable[[], int]) -> int:
        """Launches on another stream.  Launches of one executable wait for each other, but not for
        those of its twin."""
        if self._pending:
            self._driver.stream_wait_event(stream.handle, self._done.handle)
        return call()

    def _counted(self, call: Callable[[], int]) -> int:
        self._left -= 1
        if self._left > 1:
            return call()
        with self._lock:
            if self._left == 1:  # the launch before the one that is timed gives `NodeTimes.replay`
                self._ready, begun = False, self._tried(self._begun)
                status = call()
                self._ready = begun and not status and self._tried(self._ended)
                return status
            self._left = self._every
            if not (self._ready and self._tried(self._launched)):
                return call()
            self._tried(self._noted)
            return 0

    def _tried(self, step: Callable[[], bool]) -> bool:
        """True if a step was done.  An error ends the timing, not the program's launch."""
        if self.closed or self.stopped:
            return False
        try:
            with self._stream.context.relaxed():  # it may be another thread that captures
                return step()
        except OstinatoError as error:
            self.stopped, self._pending = str(error), False
            _log.warning("launches are not timed any more: %s", self.stopped)
            return False

    def _begun(self) -> bool:
        if self._stream.is_capturing():
            return False
        self._collect()
        if self._pending:
            return False
        self._driver.event_record(self._begin.handle, self._stream.handle)
        return True

    def _ended(self) -> bool:
        self._driver.event_record(self._end.handle, self._stream.handle)
        return True

    def _launched(self) -> bool:
        run = self._run()
        if run is None or not wait_for_streams(self._stream, run.streams):
            return False
        if run.revision() != self._revision:
            self._follow(run)
        self._driver.exec_launch(self._twin.executable, self._stream.handle)
        return True

    def _noted(self) -> bool:
        self._pending = True
        host, slots, stream = self._host, self._twin.slots, self._stream.handle
        self._driver.memcpy(host.address, slots.address, slots.nbytes, stream)
        self._driver.event_record(self._done.handle, stream)
        return True

    def _finished(self) -> bool:
        self._driver.event_synchronize(self._done.handle)
        self._collect()
        return True

    def _collect(self) -> None:
        """Takes the answer of the last launch that was timed, if it is there."""
        if self._pending and self._driver.event_query(self._done.handle):
            self._pending = False
            self._slots.append(self._host.array.copy())
            self._replays.append(self._end.elapsed_since(self._begin))

    def _follow(self, run: _Executable) -> None:
        """Makes the twin of what the executable launches next."""
        self._revision, flat, context = run.revision(), run.flat_nodes(), run.context
        with ExitStack() as made:
            twin = _Twin(flat, self._stream, made)
            self._host = made.enter_context(
                allocate(context, twin.slots.size, np.uint64, pinned=True)
            )
            context.retire(self._held.pop_all().close, (self._stream,))
            self._held.push(made.pop_all())
        nodes = [(one.path, one.node.kind, one.node.name) for one in flat], twin.timed
        if self._slots and nodes != self._nodes:
            self._slots.clear()
            self._replays.clear()
        self._twin, self._nodes = twin, nodes
