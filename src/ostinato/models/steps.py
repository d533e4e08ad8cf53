"""The decoder's two graphed steps over one program: "prefill", and "decode", which samples."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

from ostinato import (
    Device,
    Graph,
    GraphCache,
    GraphedStep,
    Operation,
    Role,
    Slot,
    Stream,
    capture,
    prepare,
)
from ostinato.models.backend import Backend
from ostinato.models.decoder_statistics import OperationTimes
from ostinato.models.plan import BufferPlan
from ostinato.models.program import decode_program
from ostinato.replay import Decision, StepStatistics

__all__ = ["DecoderSteps"]

# By whether the step samples.
_NAMES = {False: "prefill", True: "decode"}
# Garbage for padding rows while a step is checked: without ACTIVE, outside of everything.
_POISON_ROWS = (-2, 1 << 30)


class DecoderSteps:
    """Runs a step of so many rows: eagerly, or by its bucket's graph.

    Launches are prepared once for each bucket: for single rows when this is made, for others before
    their first step.  That loads their kernels, so that no capture meets one that is not.
    Arguments are those of `Decoder`.
    """

    def __init__(
        self,
        device: Device,
        backend: Backend,
        plan: BufferPlan,
        *,
        graphs: bool,
        build: Literal["capture", "record"],
        warmups: int,
        verify: Literal["off", "first"] | int,
        graph_budget: int | str | None,
    ) -> None:
        self._backend = backend
        self._plan = plan
        self.programs = {s: decode_program(plan.config, sampled=s) for s in _NAMES}
        self.kernel_seconds = 0.0
        """Spent on kernels: compiling or finding them, loading, preparing their launches."""
        self._prepared: dict[int, dict[bool, tuple[Operation, ...]]] = {}
        self._prepare(1)
        self.cache = GraphCache(device, buckets=plan.sizes.buckets, budget=graph_budget)
        self.stream: Stream = device.create_stream()
        self._times: OperationTimes | None = None
        self.last_decision: Decision | None = None
        """How the last step was run, and why."""
        self._steps = {
            sampled: GraphedStep(
                partial(self._submit, sampled),
                stream=self.stream,
                cache=self.cache,
                name=name,
                slots=_slots_to_verify(plan) if verify != "off" else (),
                build=build,
                warmups=warmups,
                enabled=graphs,
                verify=verify,
                preconditions={
                    "weights loaded": lambda: plan.weights.loaded,
                    "workspace ready": lambda: plan.prepared,
                    "output head present": lambda: plan.weights.has_head,
                },
            )
            for sampled, name in _NAMES.items()
        }

    def __call__(self, rows: int, *, sampled: bool) -> Decision:
        """Runs the step on the first `rows` of the plan's rows.  Does not wait."""
        self._prepare(self.cache.buckets.bucket(rows))
        self.last_decision = self._steps[sampled](rows=rows)
        return self.last_decision

    def _submit(self, sampled: bool, stream: Stream, *, rows: int) -> None:
        operations = self._prepared[rows][sampled]
        if self._times is not None:
            self._times.run(stream, operations)
            return
        for operation in operations:
            stream.submit(operation)

    def _prepare(self, rows: int) -> None:
        """Makes the launches of a bucket, unless they are there: never inside a capture, since it
        may compile and load."""
        if rows in self._prepared:
            return
        begin = time.perf_counter()
        plan, whole = self._plan, self.programs[True]
        bound = self._backend.bind(whole, plan.config, rows, plan.sizes.context)
        operations = tuple(
            prepare(one.kernel, one.config, *(plan.resolve(v, rows) for _, v in one.arguments))
            for one in bound
        )
        # A step that does not sample is the beginning of one that does.
        self._prepared[rows] = {s: operations[: len(p)] for s, p in self.programs.items()}
        self.kernel_seconds += time.perf_counter() - begin

    def graph(self, rows: int, *, sampled: bool) -> Graph:
        """The graph of a step of so many rows (or of their bucket), captured for reading."""
        bucket = self.cache.buckets.bucket(rows)
        self._prepare(bucket)
        with capture(self.stream) as under_way:
            self._submit(sampled, self.stream, rows=bucket)
        return under_way.graph

    @contextmanager
    def profile(self) -> Iterator[OperationTimes]:
        """Times every operation by itself; steps inside the block run eagerly for it."""
        times = self._times = OperationTimes()
        for step in self._steps.values():
            step.profiling = True
        try:
            yield times
        finally:
            self._times = None
            for step in self._steps.values():
                step.profiling = False

    def statistics(self) -> dict[str, StepStatistics]:
        """What each step did so far, by name."""
        return {name: self._steps[sampled].statistics() for sampled, name in _NAMES.items()}

    def close(self) -> None:
        """Gives graphs and stream back once their work is done.  Idempotent."""
        self.cache.close()
        self._prepared.clear()
        self.stream.close()


def _slots_to_verify(plan: BufferPlan) -> tuple[Slot, ...]:
    buffers = plan.buffers
    return (
        Slot("rows", plan.rows.buffer, Role.INPUT, size="rows", poison=_POISON_ROWS),
        Slot("cache", buffers["cache"], Role.STATE),
        Slot("state", buffers["state"], Role.STATE),
        Slot("ring", plan.ring, Role.STATE),
        Slot("logits", buffers["logits"], Role.STATE),
    )
