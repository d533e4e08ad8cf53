"""Where the time of one decode step goes, from its graph.

The step's graph is captured, and its launches are submitted again into shortened captures of the
same stream, with the same kinds of edges.  Three things are timed, always as replays of graphs:

`us` of a launch: how much longer the graph takes that ends with it than the graph that ends with
the launch before.  So it is the time from the end of one launch to the end of the next, in the
running step: what it costs there, whatever overlaps.  All of them and `start_us`, which is what a
replay of one empty kernel takes, add up to the step.  It is not how long
the kernel was on the device: a kernel that was let start early (programmatic launch) has done part
of its work in the time of the one before it.  The graph that ends with a launch leaves out what the
next one would already have done beside it; that is counted to the next one.

On the CPU nothing overlaps, and a difference of two such times would be mostly noise: there `us` is
`alone_us`.

`alone_us`: from an event node before the launch to one after it, less what the same two event nodes
measure with nothing between.  Nothing overlaps then, so it includes the launch, the whole kernel
and its draining; the sum of these less the step's time is the overlap.

`gap_us`: what a launch costs with nothing in it, from one to the next: the step's graph with an
empty kernel in place of every kernel, in the same launch shape and with the same edges.

`nbytes`: weights and keys and values that the launch's pointers lead to, each once (see
`Attribution`); activations, which fit the cache, are not counted.  A launch with no such bytes has
no floor.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ostinato as ost
from ostinato.bench.floor import Bandwidth, measure_bandwidth
from ostinato.bench.options import DecodeOptions
from ostinato.bench.replays import Replays
from ostinato.bench.ways import LaunchMode, decoder_traffic, open_ways
from ostinato.errors import InputError, NotAvailableError
from ostinato.models import Checkpoint, Decoder

# A difference of two times that is not above this (microseconds) says nothing about speed.
_LEAST = 0.05
_GATHERS = "embed"
_ATTENDS = "attention"


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """All launches of one kernel.  `us`, `alone_us` and `nbytes` are medians of a launch,
    `total_us` the sum of all."""

    name: str
    launches: int
    us: float
    total_us: float
    alone_us: float
    nbytes: int
    floor_us: float

    @property
    def terabytes_per_second(self) -> float:
        return self.nbytes / self.us / 1e6 if self.us > _LEAST else 0.0

    @property
    def of_floor(self) -> float:
        """1 is as fast as the memory can deliver the bytes."""
        return self.floor_us / self.us if self.us > _LEAST else 0.0

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "launches": self.launches,
            "us": round(self.us, 3),
            "total_us": round(self.total_us, 2),
            "alone_us": round(self.alone_us, 3),
            "nbytes": self.nbytes,
            "terabytes_per_second": round(self.terabytes_per_second, 3),
            "floor_us": round(self.floor_us, 3),
            "of_floor": round(self.of_floor, 3),
        }


@dataclass(frozen=True, slots=True)
class Profile:
    """One step's times, in microseconds.  `step_us`: of a replay, one right after the other.
    `launch_us`, `launch_names`: of every launch, in order.  `event_us`: what two event nodes with
    nothing between measure, which is taken off."""

    batch: int
    position: int
    step_us: float
    start_us: float
    gap_us: float
    event_us: float
    alone_us: float
    floor_us: float
    bandwidth: Bandwidth
    rows: tuple[ProfileRow, ...]
    launch_names: tuple[str, ...]
    launch_us: tuple[float, ...]

    @property
    def overlap_us(self) -> float:
        """How much longer the step would be with nothing overlapping."""
        return self.alone_us - self.step_us

    @property
    def apart(self) -> bool:
        """Whether `launch_us` are times of launches by themselves, as on the CPU."""
        return sum(self.launch_us) == self.alone_us

    def summary(self) -> dict[str, object]:
        return {
            "step_us": round(self.step_us, 2),
            "start_us": round(self.start_us, 2),
            "launches": len(self.launch_names),
            "gap_us_per_launch": round(self.gap_us, 3),
            "gaps_us": round(self.gap_us * len(self.launch_names), 2),
            "alone_us": round(self.alone_us, 2),
            "overlap_us": round(self.overlap_us, 2),
            "event_us": round(self.event_us, 3),
            "floor_us": round(self.floor_us, 2),
            "of_floor": round(self.floor_us / self.step_us, 3),
            "launch_us": [round(us, 3) for us in self.launch_us],
        }

    def explanation(self) -> str:
        """The numbers that belong to the whole step, in words."""
        count = len(self.launch_names)
        own = f"from event node to event node, whose own {self.event_us:.2f} us are taken off"
        launches = (
            f"alone: {self.alone_us:.1f} us if nothing overlapped, so the overlap is "
            f"{self.overlap_us:.1f} us\n"
            f"'us' is what the step gets longer by this launch, whatever overlaps; 'alone' is {own}"
        )
        if self.apart:
            launches = (
                f"alone: {self.alone_us:.1f} us for all launches by themselves\n"
                f"'us' is a launch by itself, since nothing overlaps on the CPU: {own}"
            )
        return (
            f"step: {self.step_us:.1f} us, of which the floor is {self.floor_us:.1f} "
            f"({self.floor_us / self.step_us:.1%})\n"
            f"start: a replay of one empty kernel takes {self.start_us:.1f} us\n"
            f"gaps: {count} empty launches take {self.gap_us * count:.1f} us, "
            f"{self.gap_us:.2f} each\n{launches}"
        )


class Attribution:
    """Which bytes of the memory a launch has to move, by the ranges that it reads and writes.

    A weight counts whole, except where rows are gathered from it (`embed`), and at the last launch
    that names it: those before prefetch it.  The KV cache counts up to the position where a kernel
    attends, else the one position that is written.
    """

    def __init__(self, decoder: Decoder, batch: int, position: int) -> None:
        config = decoder.config
        self._whole = decoder_traffic(decoder)
        self._batch, self._position = batch, position
        self._layer = self._whole.position // config.layers
        self._row = decoder.weights.buffer("embed").nbytes // config.vocabulary
        self._weights = [(b.address, b.nbytes) for b in decoder.weights.tensors.values()]
        cache = decoder.plan.buffers["cache"]
        self._cache = (cache.address, cache.nbytes)

    @property
    def step(self) -> float:
        """Bytes that the whole step reads."""
        return self._whole.step(self._batch, self._position + 1)

    def of(self, operations: Sequence[ost.Operation]) -> list[int]:
        """Bytes of each launch of a step, in order."""
        counted: set[int] = set()  # weights, by address
        return [self._of(operation, counted) for operation in reversed(operations)][::-1]

    def _of(self, operation: ost.Operation, counted: set[int]) -> int:
        name = operation.name
        total = 0
        touched = {(r.address, r.nbytes) for r in (operation.reads or ())}
        touched |= {(r.address, r.nbytes) for r in (operation.writes or ())}
        for address, nbytes in touched:
            if any(start <= address < start + size for start, size in self._weights):
                if name == _GATHERS:
                    total += self._batch * self._row
                elif address not in counted:
                    counted.add(address)
                    total += nbytes
            elif self._cache[0] <= address < self._cache[0] + self._cache[1]:
                positions = self._position + 1 if _ATTENDS in name else 1
                total += self._batch * self._layer * positions
        return total


def profile_step(
    device: ost.Device,
    decoder: Decoder,
    *,
    batch: int = 1,
    position: int = 20,
    rounds: int = 5,
    log: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Profiles a decode step of `batch` sequences, each with `position` positions in its cache.

    The decoder is to hold such sequences (`DecoderWay.place`); what they hold afterwards is not
    defined.  Raises InputError if it cannot make the step's graph here.
    """
    if position >= decoder.plan.sizes.context:
        raise InputError(f"position {position}: the decoder has {decoder.plan.sizes.context}")
    # Rows that the host set say where a step is: every replay of them is the same step.
    decoder.device_state = False
    decoder.decode_batch(range(batch))
    stream = decoder.stream
    graph = decoder.graph(batch)
    operations = _operations(graph)
    attribution = Attribution(decoder, batch, position)
    log("bandwidth")
    bandwidth = measure_bandwidth(device)
    replays = Replays(device, stream, operations, rounds, log)
    event, alone = replays.alone()
    if device.capabilities.host_memory_is_device_memory:
        step, start = replays.whole()
        each = alone
    else:
        start, *ends = replays.ends()
        step, each = ends[-1], [b - a for a, b in itertools.pairwise((start, *ends))]
    gap = replays.gap(start)
    nbytes = attribution.of(operations)
    names = [operation.name for operation in operations]
    rows = []
    for name in dict.fromkeys(names):
        own = [i for i, other in enumerate(names) if other == name]
        size = int(statistics.median(nbytes[i] for i in own))
        rows.append(
            ProfileRow(
                name=name,
                launches=len(own),
                us=statistics.median(each[i] for i in own),
                total_us=sum(each[i] for i in own),
                alone_us=statistics.median(alone[i] for i in own),
                nbytes=size,
                floor_us=size / bandwidth.best * 1e6,
            )
        )
    return Profile(
        batch,
        position,
        step_us=step,
        start_us=start,
        gap_us=gap,
        event_us=event,
        alone_us=sum(alone),
        floor_us=attribution.step / bandwidth.best * 1e6,
        bandwidth=bandwidth,
        rows=tuple(rows),
        launch_names=tuple(names),
        launch_us=tuple(each),
    )


def profile_subject(
    device: ost.Device,
    opened: Callable[[], Checkpoint],
    options: DecodeOptions,
    *,
    log: Callable[[str], None] = lambda _: None,
) -> Profile:
    """`profile_step` of a decoder of its own, at the first batch and context of `options`.

    Raises InputError for options that do not fit the model, NotAvailableError if there is no memory
    for it.
    """
    with opened() as checkpoint:
        options.require(checkpoint.config)
    batch, context = options.batches[0], options.contexts[0]
    skipped: dict[str, str] = {}
    log("loading the decoder")
    ways = open_ways(
        device,
        opened,
        [LaunchMode("capture")],
        sequences=batch,
        positions=min(context + 64, checkpoint.config.context_length),
        skipped=skipped,
        library_rows=options.library_rows,
        weights=options.weights,
    )
    if not ways:
        raise NotAvailableError(f"the decoder {skipped['capture']}")
    (way,) = ways
    try:
        way.place(batch, context)
        return profile_step(
            device,
            way.decoder,
            batch=batch,
            position=context,
            rounds=options.rounds,
            log=log,
        )
    finally:
        way.close()


def _operations(graph: ost.Graph) -> list[ost.Operation]:
    """What was submitted to capture the graph, in order.  Raises InputError for a graph with nodes
    that were not."""
    found = []
    for node in graph.nodes():
        label = graph.labels.get(node.handle)
        if label is None or label.operation is None or node.kind is not ost.NodeKind.KERNEL:
            raise InputError(
                f"node {node.index} ({node.name}) is no launch of this library; a step's profile "
                "needs a graph of kernels that it captured"
            )
        found.append(label.operation)
    if not found:
        raise InputError("the step's graph is empty")
    return found
