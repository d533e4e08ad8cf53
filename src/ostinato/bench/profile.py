"""The profile of one decode step: the time of each launch of its graph.

The step's graph is captured, and its launches are submitted again into shortened captures of the
same stream, with the same kinds of edges.  Three times are measured, always as replays of graphs:

`us` of a launch: the time of the graph that ends with this launch, less that of the graph that ends
with the preceding one.  So it is the time from the end of one launch to the end of the next in the
running step, its cost there whatever overlaps.  The sum of all, and of `start_us`, the time of a
replay of one empty kernel, is the step's time.  It is not the kernel's time on the device: a kernel
that starts early (programmatic launch) does part of its work in the time of its predecessor.  The
graph that ends with a launch lacks the work that the next one would already do beside it; this work
is counted for the next one.

On the CPU nothing overlaps, and a difference of two such times would be mostly noise: there `us` is
`alone_us`.

`alone_us`: the time between an event node before the launch and one after it, less the time between
two event nodes without a launch.  Nothing overlaps then, so it includes the launch, the whole
kernel and its draining; the sum of these less the step's time is the overlap.

`gap_us`: the cost of an empty launch, measured with the step's graph with an empty kernel in place
of every kernel, of the same launch shape and with the same edges.

`nbytes`: weights, keys and values that the launch reads or writes, each once (see `Attribution`);
activations, which fit the cache, do not count.  A launch without such bytes has no floor.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import ostinato as ost
from ostinato.bench.floor import Bandwidth, measure_bandwidth
from ostinato.bench.options import DecodeOptions
from ostinato.bench.replays import Replays
from ostinato.bench.ways import LaunchMode, decoder_traffic, open_ways
from ostinato.errors import InputError, NotAvailableError
from ostinato.models import Checkpoint, Decoder

# Microseconds; a smaller difference of two times is only noise.
_LEAST = 0.05
_GATHERS = "embed"
_ATTENDS = "attention"


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """The launches of one kernel.  `us`, `alone_us` and `nbytes` are medians over its launches,
    `total_us` is the sum of `us`."""

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
        """The floor over the time: 1 is the speed at which the memory delivers the bytes."""
        return self.floor_us / self.us if self.us > _LEAST else 0.0

    def to_dict(self) -> dict[str, object]:
        fields = asdict(self)
        fields |= {
            "terabytes_per_second": self.terabytes_per_second,
            "of_floor": self.of_floor,
        }
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in fields.items()}


@dataclass(frozen=True, slots=True)
class Profile:
    """The times of one step, in microseconds.  `step_us`: a replay, in a row of replays.
    `launch_us`, `launch_names`: time and kernel of every launch, in order.  `event_us`: time
    between two adjacent event nodes, which is subtracted from `alone_us`."""

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
        """The additional time of the step if nothing overlapped."""
        return self.alone_us - self.step_us

    @property
    def apart(self) -> bool:
        """True if `launch_us` are times of single launches, as on the CPU."""
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
        """Returns the numbers of the whole step in words."""
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
    """The bytes that each launch must move, from the ranges that it reads and writes.

    A weight counts as a whole, except where rows are gathered from it (`embed`), and only at the
    last launch that has it as an operand: earlier launches prefetch it.  The KV cache counts up to
    the step's position for attention kernels, else for the one position that is written.
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
        """The bytes that the whole step reads."""
        return self._whole.step(self._batch, self._position + 1)

    def of(self, operations: Sequence[ost.Operation]) -> list[int]:
        """Returns the bytes of each launch of a step, in order."""
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


def _profiled(
    device: ost.Device,
    decoder: Decoder,
    batch: int,
    position: int,
    rounds: int,
    log: Callable[[str], None],
) -> Profile:
    """Profiles a decode step of `batch` sequences, each with `position` positions in its cache.

    The decoder must hold such sequences (`DecoderWay.place`); their tokens are undefined
    afterwards.
    """
    # With rows set by the host, every replay computes the same step.
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
    log: Callable[[str], None],
) -> Profile:
    """Opens a decoder and profiles a step of it, at the first batch and context of `options`.

    Raises InputError for options that do not fit the model, or if a node of the step's graph is no
    kernel launch of this library; NotAvailableError if there is too little memory.
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
        return _profiled(device, way.decoder, batch, context, options.rounds, log)
    finally:
        way.close()


def _operations(graph: ost.Graph) -> list[ost.Operation]:
    """Returns the operations that were submitted to capture the graph, in order.  Raises InputError
    for a graph with other nodes."""
    found = []
    for node in graph.nodes():
        label = graph.labels.get(node.handle)
        if label is None or label.operation is None or node.kind is not ost.NodeKind.KERNEL:
            raise InputError(
                f"node {node.index} ({node.name}) is no launch of this library; a step's profile "
                "needs a graph of kernels that it captured"
            )
        found.append(label.operation)
    return found
