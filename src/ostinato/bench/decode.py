"""Measures ways of decoding in turns, point by point, and returns the results as rows: our ways,
and other libraries (`Others`).

A point is a number of sequences (batch) and of positions in their caches before the first token
(context).  At each point every contestant is warmed up, then all take turns for some rounds; a
row has the median of its rounds.  Batches are measured at the first context, and contexts at the
first batch.  Prompts follow the points of the first series, with the same decoders.

A prompt consists of random tokens, different in each round and equal for all contestants; it is
read into the empty cache of one sequence.  Its time is the wall time from the call, with the tokens
on the host, until the caller has the first token after them.  Its floor counts only memory: a
contestant that reads a prompt in pieces needs every weight once for each piece, one that reads it
whole needs it once, so the floors differ.  Arithmetic does not count, although it is the real bound
of a long prompt that is read whole.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import ostinato as ost
from ostinato.bench.floor import Bandwidth, measure_bandwidth
from ostinato.bench.options import DecodeOptions, Point, points_of, positions_of
from ostinato.bench.shapes import Traffic, traffic
from ostinato.bench.ways import (
    Contestant,
    Timed,
    Times,
    decoder_traffic,
    open_ways,
    random_tokens,
    record,
    ways_of,
)
from ostinato.distributed import Group
from ostinato.models import Checkpoint, LlamaConfig

# The most seconds of one run; a slow contestant decodes fewer tokens.
_RUN_SECONDS = 3.0
_WARMUP_TOKENS = 4
_PROMPT_WARMUPS = 3  # launch by launch, then captured, then replayed
_PROMPT_SEED = 23


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant at one point.

    `tokens_per_second` counts all sequences together.  Times are microseconds: `token_us` is the
    median of (a run's wall time / its tokens of one sequence), `between_us` the median time from a
    token's arrival to the next.  `floor_us`: the step's bytes over the measured bandwidth, in the
    middle of the run; `of_floor`: `floor_us` / `token_us`.  `ours_is`: the time over that of the
    fastest of our ways, None without one.
    """

    way: str
    ours: bool
    batch: int
    context: int
    first_position: int
    tokens: int
    tokens_per_second: float
    token_us: float
    token_min_us: float
    token_max_us: float
    between_us: float | None
    rounds: int
    floor_us: float
    of_floor: float
    ours_is: float | None
    details: dict[str, object] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Returns the row with its details as one flat record of the results."""
        fields = asdict(self)
        return record("decode", fields | fields.pop("details"))


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One contestant and one length of a prompt; in results its `kind` is "prompt".

    Times are microseconds.  `first_token_us` is the median of the rounds, and `tokens_per_second`
    the prompt's tokens over this time.  `piece`: tokens that were read at once.  `floor_us`: see
    this module; `of_floor`: `floor_us` / `first_token_us`.  `ours_is`: the time over that of the
    fastest of our ways, None without one.
    """

    way: str
    ours: bool
    prompt: int
    piece: int
    tokens_per_second: float
    first_token_us: float
    first_token_min_us: float
    first_token_max_us: float
    rounds: int
    floor_us: float
    of_floor: float
    ours_is: float | None

    def to_dict(self) -> dict[str, object]:
        """Returns the row as a record of the results."""
        return record("prompt", asdict(self))


@dataclass(slots=True)
class DecodeResult:
    """The results of a comparison.  `unequal`: a line for each point at which our ways chose
    different tokens, which is a defect of the library."""

    bandwidth: Bandwidth
    traffic: Traffic
    """The traffic of our decoders; without one, of a model in bfloat16."""
    rows: list[Row] = field(default_factory=list)
    prompts: list[PromptRow] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    unequal: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    library: str = ""
    """The library that computes products in steps of many rows, or the reason why none does."""
    weights: str = ""
    """The form of the matrices of our decoders (`Weights.description`)."""
    device_bytes: int = 0
    """Bytes of all weights of a decoder, or of this rank's share."""
    ranks: int = 1
    collectives: str = ""
    """The ranks' means of exchange; empty without a group."""


class Others(Protocol):
    """Contestants of other libraries, opened together.

    `skipped`: reasons by contestant that cannot run here.  `versions`: versions by library.
    """

    @property
    def contestants(self) -> Sequence[Contestant]: ...
    @property
    def skipped(self) -> Mapping[str, str]: ...
    @property
    def versions(self) -> Mapping[str, str]: ...

    def close(self) -> None:
        """Frees the contestants' memory.  Idempotent."""


OpenOthers = Callable[[LlamaConfig, Path | None, int, Callable[[], float]], Others]
"""Opens contestants for a model: its config, its file if there is one, the positions of a sequence,
and a function that returns the seconds left of the comparison."""


def measure(
    device: ost.Device,
    opened: Callable[[], Checkpoint],
    options: DecodeOptions,
    *,
    open_others: OpenOthers | None = None,
    log: Callable[[str], None] = lambda _: None,
    group: Group | None = None,
    bandwidth: Bandwidth | None = None,
) -> DecodeResult:
    """Runs the whole comparison, of our ways only, or with others.

    `group`: our decoders are one rank of several; all ranks must call this alike, without others.
    The clock of rank 0 decides for all, and its times are the result's.  `bandwidth`: the device's
    bandwidth, measured here if None.

    `opened` is called for every decoder and opens the checkpoint; `log` is called with lines of
    progress.  A contestant of others that fails is noted in `skipped`, as is a way of ours that
    does not fit in memory; all other exceptions of our ways are raised.  Raises InputError, before
    anything is measured, for options that do not fit the model.
    """
    with opened() as checkpoint:
        config, path = checkpoint.config, checkpoint.path if checkpoint.has_file else None
    options.require(config)
    if bandwidth is None:
        log("measuring the memory's bandwidth")
        bandwidth = measure_bandwidth(device)
    ranks = 1 if group is None else group.size
    result = DecodeResult(bandwidth, traffic(config, 2), ranks=ranks)
    contest = _Contest(device, config, opened, options, result, log, path, group, open_others)
    with contest.stream:
        prompts = options.prompts
        for series in contest.series:
            contest.run(series, prompts)
            prompts = ()
    return result


@dataclass(eq=False)
class _Contest:
    device: ost.Device
    config: LlamaConfig
    opened: Callable[[], Checkpoint]
    options: DecodeOptions
    result: DecodeResult
    log: Callable[[str], None]
    path: Path | None
    group: Group | None
    open_others: OpenOthers | None

    def __post_init__(self) -> None:
        options = self.options
        self.deadline = time.monotonic() + options.seconds
        self.series = points_of(options, self.config)
        points = [point for series in self.series for point in series]
        self.points_left = len(points) + len(options.prompts)
        last = max(point.first for point in points) + options.tokens
        self.positions = max(last, *options.prompts, 0)
        self.stream = self.device.create_stream()

    def left(self) -> float:
        """Returns the seconds until the deadline."""
        return self.deadline - time.monotonic()

    def run(self, series: Sequence[Point], prompts: Sequence[int]) -> None:
        options, result = self.options, self.result
        positions = max(max(point.first for point in series) + options.tokens, *prompts, 0)
        self.log("loading our decoders")
        ways = open_ways(
            self.device,
            self.opened,
            ways_of(options.tokens_per_launch),
            sequences=max(point.batch for point in series),
            positions=min(positions + 1, self.config.context_length),
            skipped=result.skipped,
            library_rows=options.library_rows,
            weights=options.weights,
            uneven=options.uneven,
            group=self.group,
            stream=self.stream,
        )
        others: Others | None = None
        contestants: list[Contestant] = [*ways]
        try:
            if ways:
                result.library = ways[0].decoder.backend.library
                result.weights = ways[0].decoder.weights.description()
                result.device_bytes = ways[0].decoder.weights.nbytes
                result.traffic = decoder_traffic(ways[0].decoder, self.group)
                result.collectives = ways[0].decoder.collectives
            if self.open_others is not None:
                self.log("opening the others")
                others = self.open_others(self.config, self.path, self.positions + 1, self.left)
                contestants += others.contestants
                result.skipped.update(others.skipped)
                result.versions.update(others.versions)
            for point in series:
                self._point(point, contestants)
                self.points_left -= 1
            for prompt in prompts:
                self._prompt(prompt, contestants)
                self.points_left -= 1
        except BaseException as error:
            if self.group is not None:  # before the decoders' `close` waits for their work
                self.group.fail(error)
            raise
        finally:
            if others is not None:
                others.close()
            for way in ways:
                way.close()

    def _point(self, point: Point, contestants: Sequence[Contestant]) -> None:
        where = f"batch {point.batch}, context {point.context}"
        counts: dict[str, int] = {}

        def ready(one: Contestant) -> None:
            counts[one.name] = self._ready(one, point)

        def turn(one: Contestant, number: int) -> Timed:
            one.place(point.batch, point.first)
            return one.decode(counts[one.name])

        takers, runs = self._turns(where, contestants, ready, turn)
        self._compare(runs, [t.name for t in takers if t.ours], where)
        self._rows(point, takers, runs, counts)

    def _prompt(self, count: int, contestants: Sequence[Contestant]) -> None:
        where, vocabulary = f"prompt {count}", self.config.vocabulary

        def ready(one: Contestant) -> None:
            one.reserve(1, min(count + 1, self.config.context_length))
            for number in range(_PROMPT_WARMUPS):
                one.prompt(prompt_tokens(vocabulary, count, number))

        def turn(one: Contestant, number: int) -> Timed:
            return one.prompt(prompt_tokens(vocabulary, count, _PROMPT_WARMUPS + number))

        for one in contestants:
            if one.no_prompts and not one.ours:
                self.result.skipped[f"{one.name}, {where}"] = one.no_prompts
        asked = [one for one in contestants if not one.no_prompts]
        takers, runs = self._turns(where, asked, ready, turn)
        ours = [t.name for t in takers if t.ours]
        for number in range(len(runs[ours[0]]) if ours else 0):  # each round has its own prompt
            answers = {name: [runs[name][number]] for name in ours}
            self._compare(answers, ours, f"{where}: in round {number + 1}")
        for taker, found, ours_is in _timed(takers, runs, dict.fromkeys(runs, 1)):
            piece = taker.piece(count)
            floor = self._us(self.result.traffic.prompt(count, piece))
            self.result.prompts.append(
                PromptRow(
                    way=taker.name,
                    ours=taker.ours,
                    prompt=count,
                    piece=piece,
                    tokens_per_second=count * 1e6 / found.median,
                    first_token_us=found.median,
                    first_token_min_us=found.least,
                    first_token_max_us=found.most,
                    rounds=found.rounds,
                    floor_us=floor,
                    of_floor=floor / found.median,
                    ours_is=ours_is,
                )
            )

    def _turns(
        self,
        where: str,
        contestants: Sequence[Contestant],
        ready: Callable[[Contestant], None],
        turn: Callable[[Contestant, int], Timed],
    ) -> tuple[list[Contestant], dict[str, list[Timed]]]:
        """Prepares all contestants and runs them in turns; returns those that did not fail, and
        the runs by name."""
        share = time.monotonic() + self.left() / self.points_left
        takers: list[Contestant] = []
        for one in contestants:
            self.log(f"{where}: {one.name}")
            if self._tries(one, where, partial(ready, one)):
                takers.append(one)
        runs: dict[str, list[Timed]] = {taker.name: [] for taker in takers}
        for number in range(self.options.rounds):
            if self._decided("another round", number > 0 and time.monotonic() > share):
                break
            self.log(f"{where}: round {number + 1} of {self.options.rounds}")
            for one in list(takers):

                def act(one: Contestant = one, number: int = number) -> None:
                    runs[one.name].append(turn(one, number))

                if not self._tries(one, where, act):
                    takers.remove(one)
        return takers, runs

    def _tries(self, contestant: Contestant, where: str, act: Callable[[], None]) -> bool:
        """Calls `act`; returns False if it raised.  Exceptions of our ways are raised, others are
        noted in `skipped`, and the contestant is closed."""
        try:
            act()
        except Exception as error:
            if contestant.ours:
                raise
            self.result.skipped[f"{contestant.name}, {where}"] = first_line(error)
            contestant.close()
            return False
        return True

    def _ready(self, contestant: Contestant, point: Point) -> int:
        """Warms up a contestant; returns the number of tokens that its runs decode."""
        tokens, multiple = self.options.tokens, contestant.multiple
        contestant.reserve(point.batch, min(point.first + tokens + 1, self.config.context_length))
        few = _whole(min(tokens, max(_WARMUP_TOKENS, 2 * multiple)), multiple)
        seconds = 0.0
        for _ in range(3):  # launch by launch, then captured, then replayed
            contestant.place(point.batch, point.first)
            seconds = contestant.decode(few).seconds
        most = self._decided("tokens of a run", int(_RUN_SECONDS / (seconds / few)))
        return max(few, _whole(min(tokens, most), multiple))

    def _decided(self, what: str, value: int) -> int:
        """Returns rank 0's `value` on all ranks, for values that depend on a clock."""
        return value if self.group is None else int(self.group.broadcast(what, b"%d" % value))

    def _compare(self, runs: dict[str, list[Timed]], ours: Sequence[str], where: str) -> None:
        """Notes in `unequal` if our ways chose different tokens, in any run or on any rank."""
        taken = [(name, run.tokens) for name in ours for run in runs[name]]
        if self.group is not None:
            digest = hashlib.blake2b(repr(taken).encode(), digest_size=16).digest()
            told = self.group.exchange("the tokens", digest)
            if len(set(told)) > 1:
                self.result.unequal.append(f"{where}: the ranks chose different tokens")
        for name, tokens in taken[1:]:
            reference, expected = taken[0]
            for sequence, (one, other) in enumerate(zip(expected, tokens, strict=True)):
                pairs = enumerate(zip(one, other, strict=False))  # slow ways decode fewer
                for at, (a, b) in pairs:
                    if a != b:
                        self.result.unequal.append(
                            f"{where}: token {at} of sequence {sequence} is {a} by {reference} and "
                            f"{b} by {name}"
                        )
                        return

    def _rows(
        self,
        point: Point,
        takers: Sequence[Contestant],
        runs: dict[str, list[Timed]],
        counts: dict[str, int],
    ) -> None:
        for taker, found, ours_is in _timed(takers, runs, counts):
            count = counts[taker.name]
            floor = self._floor(point, count)
            self.result.rows.append(
                Row(
                    way=taker.name,
                    ours=taker.ours,
                    batch=point.batch,
                    context=point.context,
                    first_position=point.first,
                    tokens=count,
                    tokens_per_second=point.batch * 1e6 / found.median,
                    token_us=found.median,
                    token_min_us=found.least,
                    token_max_us=found.most,
                    between_us=found.between,
                    rounds=found.rounds,
                    floor_us=floor,
                    of_floor=floor / found.median,
                    ours_is=ours_is,
                    details=taker.details(),
                )
            )

    def _floor(self, point: Point, tokens: int) -> float:
        """Returns the floor of a step in microseconds, in the middle of a run."""
        positions = positions_of(point.batch, point.first, self.options.uneven)
        mean = sum(positions) / len(positions)
        return self._us(self.result.traffic.step(point.batch, mean + (tokens + 1) / 2))

    def _us(self, nbytes: float) -> float:
        """Returns the microseconds for `nbytes` at the bandwidth, which ranks on a CPU share."""
        shared = self.result.ranks if self.device.capabilities.host_memory_is_device_memory else 1
        return nbytes * shared / self.result.bandwidth.best * 1e6


def _timed(
    takers: Sequence[Contestant], runs: Mapping[str, list[Timed]], counts: Mapping[str, int]
) -> Iterator[tuple[Contestant, Times, float | None]]:
    """Yields each contestant, the times of its runs divided by its `counts`, and its median over
    that of the fastest of our ways (None without one)."""
    times = {t.name: Times.of(runs[t.name], counts[t.name]) for t in takers}
    best = min((times[t.name].median for t in takers if t.ours), default=None)
    for taker in takers:
        found = times[taker.name]
        yield taker, found, None if best is None else found.median / best


def first_line(error: BaseException) -> str:
    """Returns an error's type and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _whole(tokens: int, multiple: int) -> int:
    return tokens // multiple * multiple


def prompt_tokens(vocabulary: int, count: int, number: int) -> list[int]:
    """Returns the prompt of `count` tokens for round `number`."""
    return random_tokens(vocabulary, count, (_PROMPT_SEED, count, number))
