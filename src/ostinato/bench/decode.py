"""All contestants decode in turns, point by point; what comes of it as rows.

A point is a number of sequences (batch) and of positions in their caches before the first token
(context).  At each point every contestant is warmed up, then all take turns for some rounds; a
row has the median of its rounds.  Batches are measured at the first context, and contexts at the
first batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import ostinato as ost
from ostinato.bench.contest import Contestant, Timed, Times
from ostinato.bench.floor import Bandwidth, measure_bandwidth
from ostinato.bench.peers import PEERS, Peers, first_line
from ostinato.bench.shapes import Traffic, traffic
from ostinato.bench.ways import DecoderWay, open_ways, ways_of
from ostinato.errors import InputError
from ostinato.models import Checkpoint, LlamaConfig

__all__ = ["DecodeOptions", "DecodeResult", "Point", "Row", "measure", "points_of"]

MOST_ROWS = 64
"""Sequences that a decoder steps at once, at most."""

# One run of a slow contestant may take so long (seconds); then it decodes fewer tokens.
_RUN_SECONDS = 3.0
_WARMUP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What is compared.

    `batches`, `contexts`: see above.  `tokens`: of each sequence in a run.  `tokens_per_launch`:
    numbers above 1 are each a way with a WHILE node, whose runs have the next lower multiple.
    `peers`: names from `peers.PEERS`.  `rounds`: at most; fewer when the time runs short, but one
    at least.  `seconds`: a point is given its share of what is left; compiling is not begun when
    too little is left for it.
    """

    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (20,)
    tokens: int = 100
    tokens_per_launch: tuple[int, ...] = ()
    peers: tuple[str, ...] = ()
    rounds: int = 5
    seconds: float = 120.0

    def require(self, config: LlamaConfig) -> None:
        """Raises InputError for what a model of this shape cannot do."""
        for name, values in (("batch", self.batches), ("context", self.contexts)):
            if not values:
                raise InputError(f"no {name} was given")
            if len(set(values)) != len(values):
                raise InputError(f"a {name} was given twice: {', '.join(map(str, values))}")
        for batch in self.batches:
            if not 1 <= batch <= MOST_ROWS:
                raise InputError(f"batch {batch}: a step decodes 1 to {MOST_ROWS} sequences")
        longest = config.context_length
        for context in self.contexts:
            if not 0 <= context < longest:
                raise InputError(
                    f"context {context}: this model has {longest} positions, so that a token can "
                    f"have 0 to {longest - 1} before it"
                )
        for name, value in (("tokens", self.tokens), ("rounds", self.rounds)):
            if value < 1:
                raise InputError(f"{name} is {value}, must be 1 or more")
        if self.tokens > longest:
            raise InputError(f"{self.tokens} tokens: this model has {longest} positions")
        for name in self.peers:
            if name not in PEERS:
                raise InputError(f"there is no peer {name!r}; there are: {', '.join(PEERS)}")
        for count in self.tokens_per_launch:
            if not 1 <= count <= self.tokens:
                raise InputError(
                    f"{count} tokens a launch: a run has {self.tokens} tokens; 1 to as many can "
                    "come from a launch"
                )


@dataclass(frozen=True, slots=True)
class Point:
    """`first`: the position of the first token; `context`, or less where the model ends before the
    last token would."""

    batch: int
    context: int
    first: int


def points_of(options: DecodeOptions, config: LlamaConfig) -> list[list[Point]]:
    """The points in series; one set of decoders serves a series, whose contexts fall."""

    def point(batch: int, context: int) -> Point:
        return Point(batch, context, min(context, config.context_length - options.tokens))

    first, *more = options.contexts
    if len(options.batches) == 1:
        falling = sorted(options.contexts, reverse=True)
        return [[point(options.batches[0], context) for context in falling]]
    series = [[point(batch, first) for batch in options.batches]]
    if more:
        series.append([point(options.batches[0], c) for c in sorted(more, reverse=True)])
    return series


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant at one point.

    `tokens_per_second` is of all sequences together.  Times are microseconds: `token_us` is the
    median of (a run's wall time / its tokens of one sequence), `between_us` the median time from a
    token's arrival to the next.  `floor_us`: the step's bytes over the measured bandwidth, for the
    run's middle; `of_floor` is it over `token_us`.  `ours_is`: how many times as fast the fastest
    of our ways is.
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

    def as_dict(self) -> dict[str, object]:
        """Flat, for the results; numbers to four digits."""
        plain = asdict(self)
        plain.update(plain.pop("details"))
        return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in plain.items()}


@dataclass(slots=True)
class DecodeResult:
    """Everything that a run found.  `unequal`: points at which our ways chose different tokens,
    in words: a defect; there should be none."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    unequal: list[str] = field(default_factory=list)
    bandwidth: Bandwidth | None = None
    traffic: Traffic | None = None
    versions: dict[str, str] = field(default_factory=dict)


def measure(
    device: ost.Device,
    opened: Callable[[], Checkpoint],
    options: DecodeOptions,
    *,
    log: Callable[[str], None] = lambda _: None,
) -> DecodeResult:
    """Runs the whole comparison.  `opened` gives the checkpoint anew for every decoder; `log` is
    told what goes on.

    What a peer cannot do is noted as skipped, and so is a way of ours for which the memory does not
    suffice; whatever else our ways raise is raised.  Raises InputError first, for options that
    do not fit the model.
    """
    with opened() as checkpoint:
        config = checkpoint.config
    options.require(config)
    result = DecodeResult()
    log("measuring the memory's bandwidth")
    result.bandwidth = measure_bandwidth(device)
    contest = _Contest(device, config, opened, options, result, log)
    for series in points_of(options, config):
        contest.run(series)
    return result


class _Contest:
    def __init__(
        self,
        device: ost.Device,
        config: LlamaConfig,
        opened: Callable[[], Checkpoint],
        options: DecodeOptions,
        result: DecodeResult,
        log: Callable[[str], None],
    ) -> None:
        self.device, self.config, self.opened = device, config, opened
        self.options, self.result, self.log = options, result, log
        self.deadline = time.monotonic() + options.seconds
        series = points_of(options, config)
        self.points_left = sum(len(points) for points in series)
        self.positions = max(p.first for points in series for p in points) + options.tokens

    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def run(self, series: Sequence[Point]) -> None:
        options, result = self.options, self.result
        positions = max(point.first for point in series) + options.tokens
        self.log("loading our decoders")
        ways = open_ways(
            self.device,
            self.opened,
            ways_of(options.tokens_per_launch),
            slots=max(point.batch for point in series),
            positions=min(positions + 1, self.config.context_length),
            skipped=result.skipped,
        )
        peers = None
        try:
            if ways:
                itemsize = ways[0].decoder.backend.dtype.itemsize
                result.traffic = traffic(self.config, itemsize)
            if options.peers:
                self.log("making the peers' model")
            peers = Peers(
                self.device,
                self.config,
                options.peers,
                positions=self.positions + 1,
                left=self.left,
            )
            result.skipped.update(peers.skipped)
            result.versions.update(peers.versions)
            for point in series:
                self._point(point, ways, [*ways, *peers.contestants])
                self.points_left -= 1
        finally:
            if peers is not None:
                peers.close()
            for way in ways:
                way.close()

    def _point(
        self, point: Point, ways: Sequence[DecoderWay], contestants: Sequence[Contestant]
    ) -> None:
        where = f"batch {point.batch}, context {point.context}"
        share = time.monotonic() + self.left() / self.points_left
        counts: dict[str, int] = {}
        takers: list[Contestant] = []
        for contestant in contestants:
            self.log(f"{where}: {contestant.name}")

            def ready(one: Contestant = contestant) -> None:
                counts[one.name] = self._ready(one, point)

            if self._tries(contestant, where, ready):
                takers.append(contestant)
        runs: dict[str, list[Timed]] = {taker.name: [] for taker in takers}
        for number in range(self.options.rounds):
            if number and time.monotonic() > share:
                break
            self.log(f"{where}: round {number + 1} of {self.options.rounds}")
            for taker in list(takers):

                def turn(one: Contestant = taker) -> None:
                    one.place(point.batch, point.first)
                    runs[one.name].append(one.decode(counts[one.name]))

                if not self._tries(taker, where, turn):
                    takers.remove(taker)
        self._compare(runs, [w.name for w in ways if w in takers], where)
        self._rows(point, [t for t in takers if runs[t.name]], runs, counts)

    def _tries(self, contestant: Contestant, where: str, act: Callable[[], None]) -> bool:
        """Whether `act` did not raise.  A peer's exception is noted; one of ours goes on."""
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
        """Warms it up; how many tokens a run of it is to have."""
        tokens, multiple = self.options.tokens, contestant.multiple
        contestant.reserve(point.batch, min(point.first + tokens + 1, self.config.context_length))
        few = _whole(min(tokens, max(_WARMUP_TOKENS, 2 * multiple)), multiple)
        seconds = 0.0
        for _ in range(3):  # launch by launch, then captured, then replayed
            contestant.place(point.batch, point.first)
            seconds = contestant.decode(few).seconds
        return max(few, _whole(min(tokens, int(_RUN_SECONDS / (seconds / few))), multiple))

    def _compare(self, runs: dict[str, list[Timed]], ours: Sequence[str], where: str) -> None:
        """Our ways choose the same tokens, in every run."""
        taken = [(name, run.tokens) for name in ours for run in runs[name]]
        for name, tokens in taken[1:]:
            reference, expected = taken[0]
            for slot, (one, other) in enumerate(zip(expected, tokens, strict=True)):
                pairs = enumerate(zip(one, other, strict=False))  # slow ways decode fewer
                for at, (a, b) in pairs:
                    if a != b:
                        self.result.unequal.append(
                            f"{where}: token {at} of sequence {slot} is {a} by {reference} and "
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
        times = {t.name: Times.of(runs[t.name], counts[t.name]) for t in takers}
        best = min((times[t.name].median for t in takers if t.ours), default=None)
        for taker in takers:
            found, count = times[taker.name], counts[taker.name]
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
                    ours_is=None if best is None else found.median / best,
                    details=taker.details(),
                )
            )

    def _floor(self, point: Point, tokens: int) -> float:
        """Microseconds a step, in the middle of a run."""
        bandwidth = self.result.bandwidth
        bytes_of = self.result.traffic or traffic(self.config, 2)
        assert bandwidth is not None
        return bytes_of.step(point.batch, point.first + (tokens + 1) / 2) / bandwidth.best * 1e6


def _whole(tokens: int, multiple: int) -> int:
    """The multiple that is not above `tokens`."""
    return tokens // multiple * multiple
