"""The contestants of a comparison (`Contestant`), and our own ways of decoding: launch by launch,
with captured and recorded graphs, with many tokens a launch."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

import ostinato as ost
from ostinato.bench.options import positions_of
from ostinato.bench.shapes import Traffic, traffic
from ostinato.distributed import Group
from ostinato.models import Checkpoint, Decoder, LlamaConfig
from ostinato.models.backend import LibraryRows, WeightsKind
from ostinato.models.cuda.bricks import device_bytes
from ostinato.models.decoder import backend_for, formats_for
from ostinato.models.layout import device_shapes
from ostinato.models.sharding import Sharding, shard_checkpoint

# Bytes for a decoder's allocations besides weights and cache.
_SPARE = 1 << 29
_SEED = 5


@dataclass(frozen=True, slots=True)
class Timed:
    """One run of a contestant.

    `seconds`: time from the call until the caller has the last token of every sequence.
    `arrivals`: seconds from the call to each token of the first sequence, if they come one by one.
    `tokens`: the chosen tokens by sequence, if the contestant reads all of them.
    """

    seconds: float
    arrivals: tuple[float, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()


class Contestant(Protocol):
    """A way of decoding, or a library that decodes.

    `ours`: True if its tokens must equal those of our other ways.  `multiple`: the tokens of one
    launch; a run must decode a multiple of this number.  `no_prompts`: the reason why its prompts
    are not measured; empty if they are.
    """

    name: str
    ours: bool
    multiple: int
    no_prompts: str

    def reserve(self, batch: int, positions: int) -> None:
        """Prepares for `batch` sequences of `positions` positions.  May compile and capture."""

    def place(self, batch: int, context: int) -> None:
        """Sets each of `batch` sequences to position `context`, with `context` positions in its
        cache.  Not timed."""

    def decode(self, tokens: int) -> Timed:
        """Decodes `tokens` tokens of each sequence, from its position."""

    def piece(self, tokens: int) -> int:
        """Returns the tokens that are read at once of a prompt of `tokens` tokens."""

    def prompt(self, tokens: Sequence[int]) -> Timed:
        """Reads a prompt into the empty cache of one sequence and returns once the next token is
        chosen; for our ways, `tokens` of the result holds only this token."""

    def details(self) -> dict[str, object]:
        """Returns further facts for the results, besides times."""

    def close(self) -> None:
        """Frees the contestant's memory.  Idempotent."""


@dataclass(frozen=True, slots=True)
class Times:
    """The time of a token over several runs, in microseconds: a whole run divided by its tokens."""

    median: float
    least: float
    most: float
    between: float | None
    """The median time between the arrivals of two tokens, None if they do not come one by one."""
    rounds: int

    @classmethod
    def of(cls, runs: Sequence[Timed], tokens: int) -> Times:
        each = [run.seconds / tokens * 1e6 for run in runs]
        gaps = [
            (later - earlier) * 1e6
            for run in runs
            for earlier, later in zip(run.arrivals, run.arrivals[1:], strict=False)
        ]
        between = statistics.median(gaps) if gaps else None
        return cls(statistics.median(each), min(each), max(each), between, len(each))


def random_tokens(vocabulary: int, count: int, seed: tuple[int, ...]) -> list[int]:
    """Returns `count` random tokens; the same seed gives the same tokens."""
    drawn = np.random.default_rng(seed).integers(0, vocabulary, count)
    return [int(token) for token in drawn]


def record(kind: str, fields: Mapping[str, object]) -> dict[str, object]:
    """Returns a row of the results: its kind, and its fields with floats to four digits."""
    plain: dict[str, object] = {"kind": kind, **fields}
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in plain.items()}


@dataclass(frozen=True, slots=True)
class LaunchMode:
    """A mode of launching tokens: without `graphs` launch by launch; `tokens_per_launch` above 1
    means a WHILE node around the step."""

    name: str
    graphs: bool = True
    build: Literal["capture", "record"] = "capture"
    tokens_per_launch: int = 1


def ways_of(tokens_per_launch: Sequence[int]) -> tuple[LaunchMode, ...]:
    """Returns the modes eager, capture and record, and a WHILE for each number above 1."""
    return (
        LaunchMode("eager", graphs=False),
        LaunchMode("capture"),
        LaunchMode("record", build="record"),
        *(LaunchMode(f"while {n}", tokens_per_launch=n) for n in tokens_per_launch if n > 1),
    )


class DecoderWay:
    """A decoder with one launch mode.  Ways that differ only in `tokens_per_launch` share a
    decoder; the way that made it closes it (`owns`)."""

    ours = True

    def __init__(
        self,
        way: LaunchMode,
        decoder: Decoder,
        *,
        owns: bool = True,
        uneven: bool = False,
    ) -> None:
        self.name = way.name
        self.way = way
        self.decoder = decoder
        self._owns = owns
        self._sequences: tuple[int, ...] = ()
        self._uneven = uneven
        self.multiple = way.tokens_per_launch
        self.no_prompts = "" if owns else "takes prompts as the way whose decoder it shares"
        self._last: dict[str, object] = {}  # the counts of the last run

    def reserve(self, batch: int, positions: int) -> None:
        """Does nothing: the decoder was made with room for all points."""

    def place(self, batch: int, context: int) -> None:
        """Sets the sequences to their positions (`positions_of`), with the state on the device, or
        on the host at context 0.  The cache is kept, so a smaller context costs only one step."""
        decoder = self.decoder
        self._sequences = tuple(range(batch))
        for sequence, position in enumerate(positions_of(batch, context, self._uneven)):
            first = max(1, position)
            if len(decoder.tokens(sequence)) < first:
                decoder.reset(sequence)
                decoder.prefill(self._prompt(sequence, first), sequence)
            decoder.truncate(first, sequence)
        if context:
            decoder.decode_batch(self._sequences)

    def _prompt(self, sequence: int, count: int) -> list[int]:
        return random_tokens(self.decoder.config.vocabulary, count, (_SEED, sequence))

    def decode(self, tokens: int) -> Timed:
        """Decodes with a run, which launches ahead if there are graphs."""
        n, decoder = self.way.tokens_per_launch, self.decoder
        before = decoder.statistics()
        arrivals: list[float] = []
        chosen: list[tuple[int, ...]]
        if len(self._sequences) == 1:
            single: list[int] = []
            begin = time.perf_counter()
            for token in decoder.run(count=tokens, tokens_per_launch=n):
                arrivals.append(time.perf_counter() - begin)
                single.append(token)
            chosen = [tuple(single)]
        else:
            steps: list[dict[int, int]] = []
            begin = time.perf_counter()
            for step in decoder.run_batch(self._sequences, count=tokens, tokens_per_launch=n):
                arrivals.append(time.perf_counter() - begin)
                steps.append(step)
            chosen = [tuple(step[sequence] for step in steps) for sequence in self._sequences]
        after = decoder.statistics()
        launched = after.launches_eager + after.launches_replayed
        launched -= before.launches_eager + before.launches_replayed
        self._last = {
            "launches_per_token": launched / tokens,
            "one_by_one": dict(Counter(after.one_by_one) - Counter(before.one_by_one)),
        }
        return Timed(arrivals[-1], tuple(arrivals), tuple(chosen))

    def piece(self, tokens: int) -> int:
        return min(tokens, self.decoder.plan.sizes.rows)

    def prompt(self, tokens: Sequence[int]) -> Timed:
        """Reads a prompt in sequence 0, which is empty afterwards."""
        self.decoder.reset(0)
        begin = time.perf_counter()
        first = self.decoder.prefill(tokens)
        seconds = time.perf_counter() - begin
        self.decoder.reset(0)
        return Timed(seconds, (seconds,), ((first,),))

    def details(self) -> dict[str, object]:
        numbers = self.decoder.statistics()
        return {
            **self._last,
            "launches_eager": numbers.launches_eager,
            "launches_replayed": numbers.launches_replayed,
            "graphs_captured": numbers.graphs_captured,
            "load_seconds": numbers.load_seconds,
            "kernel_seconds": numbers.kernel_seconds,
            "eager_reasons": numbers.eager_reasons,
            "quarantined": numbers.quarantined,
        }

    def close(self) -> None:
        if self._owns:
            self.decoder.close()


def decoder_traffic(decoder: Decoder, group: Group | None = None) -> Traffic:
    """Returns the traffic of this decoder: packed weights count with their packed bytes; a rank of
    a group counts its share."""
    config = _part(decoder.config, group)
    found = traffic(config, decoder.backend.dtype.itemsize)
    if not decoder.backend.packed and not decoder.weights.formats:
        return found
    weights, tied = decoder.weights, config.tied_embeddings
    unread = 0 if tied else weights.buffer("embed").nbytes
    return replace(
        found,
        weights=sum(buffer.nbytes for buffer in weights.tensors.values()) - unread,
        head=weights.buffer("embed" if tied else "head").nbytes,
    )


def open_ways(
    device: ost.Device,
    opened: Callable[[], Checkpoint],
    ways: Sequence[LaunchMode],
    *,
    sequences: int,
    positions: int,
    skipped: dict[str, str],
    library_rows: LibraryRows,
    weights: WeightsKind,
    uneven: bool = False,
    group: Group | None = None,
    stream: ost.Stream | None = None,
) -> list[DecoderWay]:
    """Makes a decoder for each way that needs its own, all loaded at once, so that they can take
    turns.

    `stream`: the stream of all decoders, so that replays are as fast as with a single decoder; if
    None each makes its own.
    A way that does not fit in the free memory of every rank is noted in `skipped` and left out.
    """
    made: dict[tuple[bool, str], Decoder] = {}
    found: list[DecoderWay] = []
    try:
        for way in ways:
            key = (way.graphs, way.build)
            first = key not in made
            if first:
                with opened() as checkpoint:
                    why = _no_room(device, checkpoint, weights, sequences, positions, group)
                    if group is not None:
                        told = group.exchange(f"room for {way.name}", why.encode())
                        why = next((one.decode() for one in told if one), "")
                    if why:
                        skipped[way.name] = why
                        continue
                    made[key] = Decoder(
                        device,
                        checkpoint,
                        max_context=positions,
                        sequences=sequences,
                        graphs=way.graphs,
                        build=way.build,
                        library_rows=library_rows,
                        weights=weights,
                        stop_tokens=(),
                        group=group,
                        stream=stream,
                    )
            found.append(DecoderWay(way, made[key], owns=first, uneven=uneven))
    except BaseException:
        for contestant in found:
            contestant.close()
        raise
    return found


def _part(config: LlamaConfig, group: Group | None) -> LlamaConfig:
    return config if group is None else Sharding(config, group.rank, group.size).part


def _no_room(
    device: ost.Device,
    checkpoint: Checkpoint,
    weights: WeightsKind,
    sequences: int,
    positions: int,
    group: Group | None,
) -> str:
    """Returns the reason why a decoder does not fit in the free memory; "" if it does."""
    if device.capabilities.host_memory_is_device_memory:
        return ""
    read = checkpoint
    if group is not None:
        read = shard_checkpoint(checkpoint, Sharding(checkpoint.config, group.rank, group.size))
    formats = formats_for(backend_for(device), read, weights, sequences)
    nbytes = device_bytes(device_shapes(read.shapes()), formats)
    cache = traffic(read.config, 2).position * sequences * positions
    need, (free, _) = nbytes + cache + _SPARE, device.memory_info()
    if need <= free:
        return ""
    return f"needs {need / 2**30:.1f} GiB of device memory, and {free / 2**30:.1f} are free"
