"""Times of replays of a step's graph and its variants: prefixes, single launches, empty kernels."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import ostinato as ost
from ostinato.driver.api import KernelNodeParams
from ostinato.errors import InputError

# Replays in one timing, which the host submits while longer work is still running.
_BURST = 12
_EVENT_PAIRS = 8
_DEFAULT_SHARED = 48 << 10  # bytes a block may have without `allow_shared`

_EMPTY_CUDA = r"""
extern "C" __global__ void empty() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
"""


@ost.host_kernel("", name="empty")
def _empty(launch: object) -> None:
    pass


EMPTY = ost.Source(cuda=_EMPTY_CUDA, host=[_empty], name="empty.cu")


class Replays:
    """Timings of variants of a chain of launches on a stream.

    A variant is captured by submitting the launches again, so its edges have the same kinds as the
    chain's.  All times are microseconds, medians of `rounds` in which the variants take turns.
    """

    def __init__(
        self,
        device: ost.Device,
        stream: ost.Stream,
        operations: Sequence[ost.Operation],
        rounds: int,
        log: Callable[[str], None],
    ) -> None:
        self.device, self.stream, self.operations = device, stream, list(operations)
        self.log = log
        # On the host device a step is slow, and nothing runs asynchronously.
        slow = device.capabilities.host_memory_is_device_memory
        self.burst = 1 if slow else _BURST
        self.rounds = min(rounds, 3) if slow else rounds

    def ends(self) -> list[float]:
        """Returns the times of a replay of one empty kernel, then of the first launch, of the first
        two, …, of all."""
        count = len(self.operations)
        self.log(f"capturing {count} beginnings of the step")
        beginnings = [self._hollow(self.operations[:1])]
        beginnings += [self.operations[: n + 1] for n in range(count)]
        with ExitStack() as held:
            graphs = [held.enter_context(self._captured(one)) for one in beginnings]
            # `ahead` runs while the host submits.  It is not the whole step, which writes tokens.
            return self._in_turns("beginnings", graphs, ahead=graphs[-2])

    def whole(self) -> tuple[float, float]:
        """Returns the times of a replay of the step, and of an empty kernel."""
        with (
            self._captured(self.operations) as step,
            self._captured(self._hollow(self.operations[:1])) as nothing,
        ):
            spent, start = self._in_turns("whole steps", [step, nothing])
        return spent, start

    def gap(self, start: float) -> float:
        """Returns the time that each launch of an empty kernel adds; `start`: the time of a replay
        of one empty kernel."""
        count = len(self.operations)
        if count < 2:
            return 0.0
        with self._captured(self._hollow(self.operations)) as graph:
            (spent,) = self._in_turns("empty launches", [graph])
        return (spent - start) / (count - 1)

    def alone(self) -> tuple[float, list[float]]:
        """Returns the time between two adjacent event nodes, and the time of each launch between
        two event nodes, less the former."""
        self.log("launches apart")
        events: list[ost.Event] = []
        last: list[ost.Node] = []
        times: list[list[float]] = []
        with ExitStack() as held:
            graph = held.enter_context(ost.Graph.create(self.device))

            def mark() -> None:
                events.append(held.enter_context(self.device.create_event(timing=True)))
                last[:] = [graph.add_event_record(events[-1], after=last)]

            for _ in range(_EVENT_PAIRS + 1):
                mark()
            for operation in self.operations:
                last[:] = [graph.add_operation(_plain(operation), after=last)]
                mark()
            run = held.enter_context(graph.instantiate(upload=self.stream))
            for number in range(self.rounds * self.burst + 2):  # the first two warm up
                run.launch(self.stream)
                self.stream.synchronize()
                if number > 1:
                    times.append([b.elapsed_since(a) * 1e6 for a, b in itertools.pairwise(events)])
        # Events have a coarse resolution: a mean of the middle half is finer than the median.
        middle = [_middle(found) for found in zip(*times, strict=True)]
        own = statistics.median(middle[:_EVENT_PAIRS])
        return own, [spent - own for spent in middle[_EVENT_PAIRS:]]

    def _captured(self, operations: Iterable[ost.Operation]) -> ost.GraphExec:
        with ost.capture(self.stream) as under_way:
            for operation in operations:
                self.stream.submit(operation)
        return under_way.graph.instantiate(upload=self.stream)

    def _hollow(self, operations: Sequence[ost.Operation]) -> list[ost.Operation]:
        """Returns an empty kernel for each launch, with the same launch configuration."""
        kernel = self.device.modules.get_or_compile(EMPTY, "empty")
        configs = [_params(operation).config for operation in operations]
        most = max(config.shared for config in configs)
        if most > _DEFAULT_SHARED:
            kernel.allow_shared(most)
        self.device.modules.preload([kernel])
        return [ost.prepare(kernel, config) for config in configs]

    def _in_turns(
        self, what: str, graphs: Sequence[ost.GraphExec], ahead: ost.GraphExec | None = None
    ) -> list[float]:
        """Returns the time of a replay of each graph; `ahead` runs before each timing, or the same
        graph if None."""
        times: list[list[float]] = [[] for _ in graphs]
        for number in range(self.rounds + 1):  # the first one warms up
            self.log(f"{what}: round {number} of {self.rounds}")
            for graph, found in zip(graphs, times, strict=True):
                found.append(self._time(graph, ahead or graph))
        return [statistics.median(found[1:]) for found in times]

    def _time(self, graph: ost.GraphExec, ahead: ost.GraphExec) -> float:
        """Returns the time of one replay in a burst that is submitted before its first begins."""
        event = self.device.create_event
        with event(timing=True) as begin, event(timing=True) as end:
            if self.burst > 1:
                for _ in range(2):
                    ahead.launch(self.stream)
            self.stream.record(begin)
            for _ in range(self.burst):
                graph.launch(self.stream)
            self.stream.record(end)
            self.stream.synchronize()
            return end.elapsed_since(begin) * 1e6 / self.burst


def _params(operation: ost.Operation) -> KernelNodeParams:
    if not isinstance(operation.params, KernelNodeParams):
        raise InputError(f"{operation.name} is no kernel")
    return operation.params


def _plain(operation: ost.Operation) -> ost.Operation:
    """Returns the launch without programmatic start: between event nodes none could start early."""
    params = _params(operation)
    config = replace(params.config, programmatic=False)
    return replace(operation, params=replace(params, config=config))


def _middle(values: Sequence[float]) -> float:
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return statistics.fmean(ordered[quarter : len(ordered) - quarter])
