"""Statistics of a decoder: launches, reasons, times of phases, and times of single operations."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ostinato import Event, Operation, Stream
from ostinato.step import CacheStatistics, StepStatistics


@dataclass(slots=True)
class Phases:
    """Totals of seconds and tokens by phase ("load", "plan", "prefill", "decode")."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens: Counter[str] = field(default_factory=Counter)
    host_writes: int = 0
    """The number of staged copies of rows to the device."""
    one_by_one: Counter[str] = field(default_factory=Counter)
    """Runs that waited for each step, launched one step for one token although more were wanted, or
    did not draft although the decoder can, by reason."""
    lookup_tokens: int = 0
    """Tokens chosen by steps that draft."""
    lookup_steps: int = 0

    @contextmanager
    def measure(self, phase: str, tokens: int = 0) -> Iterator[None]:
        """Adds the block's time to the phase; counts its tokens only if it does not raise."""
        start = time.perf_counter()
        try:
            yield
            self.tokens[phase] += tokens
        finally:
            self.seconds[phase] += time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class OperationTime:
    """Totals of one kernel: launches and seconds."""

    launches: int
    seconds: float


class OperationTimes:
    """Times of single operations, measured with an event before and after each."""

    def __init__(self) -> None:
        self._launches: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}

    def run(self, stream: Stream, operations: Sequence[Operation]) -> None:
        """Submits the operations, waits for them and adds their times."""
        marks = [self._mark(stream)]
        for operation in operations:
            stream.submit(operation)
            marks.append(self._mark(stream))
        stream.synchronize()
        for index, operation in enumerate(operations):
            name = operation.name
            self._launches[name] += 1
            spent = marks[index + 1].elapsed_since(marks[index])
            self._seconds[name] = self._seconds.get(name, 0.0) + spent
        for mark in marks:
            mark.close()

    @staticmethod
    def _mark(stream: Stream) -> Event:
        return stream.record(Event(stream.context, timing=True))

    def by_kernel(self) -> dict[str, OperationTime]:
        """Returns the totals by kernel name, the largest time first."""
        ordered = sorted(self._seconds.items(), key=lambda item: -item[1])
        return {name: OperationTime(self._launches[name], spent) for name, spent in ordered}


@dataclass(frozen=True, slots=True)
class DecoderStatistics:
    """The counts and times of a decoder so far.

    `launches_eager`: operations launched one by one.  `launches_replayed`: graph launches.
    `launches_per_token`: the operations of one decode step of one row, which one graph launch
    replaces.
    `eager_reasons`: eager steps by reason.  `one_by_one`: runs (`Decoder.run`) that waited for each
    step, launched one step for one token although more were wanted, or did not draft although the
    decoder can, by reason.  `lookup_tokens`: those of the decoded tokens of sequences
    that draft; `lookup_steps`: the steps that gave them, counted for each of these sequences.
    `host_writes`: staged copies of rows.
    Seconds are wall time (for a run, the time it waited for tokens): `load_seconds` to read the
    weights, `plan_seconds` to allocate the buffers, `kernel_seconds` to compile or find the
    kernels, load them and prepare their launches.
    `weights`: description of the matrices on the device; `weight_bytes`: device memory of all
    weights; `unpacked_bytes`: the same without packing.
    `library`: the library that computes products in steps of many rows, or the reason why none
    does; empty for a device that has no such library.
    """

    launches_eager: int
    launches_replayed: int
    launches_per_token: int
    graphs_captured: int
    eager_reasons: dict[str, int]
    one_by_one: dict[str, int]
    quarantined: dict[str, str]
    prefill_tokens: int
    decoded_tokens: int
    lookup_tokens: int
    lookup_steps: int
    load_seconds: float
    plan_seconds: float
    kernel_seconds: float
    prefill_seconds: float
    decode_seconds: float
    host_writes: int
    weights: str
    weight_bytes: int
    unpacked_bytes: int
    plan_bytes: int
    library: str
    steps: dict[str, StepStatistics]
    graph_cache: CacheStatistics
