"""Numbers of a decoder: launches, reasons, phases, and single operations while they are timed."""

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
    """Seconds and tokens by phase ("load", "plan", "prefill", "decode"), added up."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens: Counter[str] = field(default_factory=Counter)
    host_writes: int = 0
    """How often the host set the rows of a step."""
    tokens_eager: int = 0
    """Tokens chosen by steps that ran launch by launch."""
    tokens_replayed: int = 0
    """Tokens chosen by replays."""
    one_by_one: Counter[str] = field(default_factory=Counter)
    """Runs that could not go ahead, or not many tokens a launch, by reason."""

    def sampled(self, tokens: int, *, eagerly: bool) -> None:
        """Counts tokens that were chosen, at the ends of prompts too."""
        if eagerly:
            self.tokens_eager += tokens
        else:
            self.tokens_replayed += tokens

    @contextmanager
    def measure(self, phase: str, tokens: int = 0) -> Iterator[None]:
        """Adds the block's time; its tokens count only if it ends well."""
        start = time.perf_counter()
        try:
            yield
            self.tokens[phase] += tokens
        finally:
            self.seconds[phase] += time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class OperationTime:
    """One kernel's launches and seconds, added up."""

    launches: int
    seconds: float


class OperationTimes:
    """Times operations one by one, with an event on each side."""

    def __init__(self) -> None:
        self._launches: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}

    def run(self, stream: Stream, operations: Sequence[Operation]) -> None:
        """Submits the operations and waits for them."""
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
        """By kernel name, the slowest first."""
        ordered = sorted(self._seconds.items(), key=lambda item: -item[1])
        return {name: OperationTime(self._launches[name], spent) for name, spent in ordered}


@dataclass(frozen=True, slots=True)
class DecoderStatistics:
    """What a decoder did so far.

    `launches_eager`: operations launched one by one.  `launches_replayed`: graph launches, each in
    place of many.  `launches_per_token`: the operations of one decode step of one row, which one
    graph launch stands for.  `launches_per_token_eager`, `launches_per_token_replayed`: what was
    counted, launches of steps that choose tokens over the tokens they gave; 0 if there were none.
    `eager_reasons`: eager steps by reason.  `one_by_one`: runs (`Decoder.run`) that waited for each
    step, or had one launch for each where more tokens a launch were wanted, by reason.
    `host_writes`: staged copies of rows.
    Seconds are wall time (of a run, what it waited for tokens): `load_seconds` reads the weights,
    `plan_seconds` allocates the buffers, `kernel_seconds` compiles or finds the kernels, loads them
    and prepares their launches.
    `weights`: what the matrices on the device are, in words; `weight_bytes` of device memory are
    all weights, `unpacked_bytes` they would be without packing.
    `library`: what multiplies in steps of many rows besides our own kernels, or why nothing does;
    empty where that is no question.
    """

    launches_eager: int
    launches_replayed: int
    launches_per_token: int
    launches_per_token_eager: float
    launches_per_token_replayed: float
    graphs_captured: int
    eager_reasons: dict[str, int]
    one_by_one: dict[str, int]
    quarantined: dict[str, str]
    prefill_tokens: int
    decoded_tokens: int
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
