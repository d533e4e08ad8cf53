"""Finding a better tuning: coordinate descent on measured times, within so many seconds.

Nothing here touches a device: `Meter` does (`tune.meter.StepMeter`).  One thing at a
time is changed, whatever is expected to gain most first; the time of the whole step decides, since
a kernel that is faster alone may leave its neighbours less room.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from ostinato.errors import InputError
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.shapes import (
    MAX_SHARED,
    PRODUCT_CALLS,
    PRODUCTS,
    ROUNDED_CALLS,
    Tuning,
    blocked_calls,
    for_context,
)
from ostinato.models.tune.candidates import (
    attention_shapes,
    block_variants,
    expected_gains,
    product_shapes,
    start_variants,
    warpgroup_variants,
)

__all__ = ["Meter", "Progress", "SweepResult", "Trial", "sweep"]

_CHUNK = 48
"""Candidates that are compiled together."""
_FINALISTS = 3
_HOPELESS = 0.01
"""Relative; what takes so much longer than the best of its stage is not timed again."""
_NOISE = 0.002
"""Relative; a change that gains less is not worth a table entry."""
_AGAIN = 10
"""Candidates of a stage that a second pass looks at again."""


class Meter(Protocol):
    """Measures tunings on a device."""

    def prepare(self, tunings: Sequence[Tuning]) -> None:
        """Compiles and loads what these need, side by side."""

    def microseconds(
        self, tuning: Tuning, context: int, *, careful: bool = False, enough: float = math.inf
    ) -> float:
        """Of one step at this position.  Infinite for a tuning that the device refuses.  What
        takes longer than `enough` may be measured with less effort."""

    def problem(self, tuning: Tuning) -> str | None:
        """Why the tuning's results cannot be trusted; None if they agree."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate that was measured: the stage, its microseconds added up over the contexts of
    the stage."""

    stage: str
    tuning: Tuning
    microseconds: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a sweep is: `best` and `first` are microseconds at the first context."""

    stage: str
    done: int
    seconds: float
    first: float
    best: float


@dataclass(frozen=True, slots=True)
class SweepResult:
    """`before` and `after`: microseconds by context.  `refused`: what was faster and not taken,
    with the reason.  `complete`: every stage had its turn within the time."""

    tuning: Tuning
    before: dict[int, float]
    after: dict[int, float]
    trials: tuple[Trial, ...]
    refused: tuple[str, ...]
    complete: bool

    @property
    def improved(self) -> bool:
        return sum(self.after.values()) < sum(self.before.values()) * (1 - _NOISE)


@dataclass
class _Sweep:
    config: LlamaConfig
    rows: int
    multiprocessors: int
    clusters: bool
    shared: int
    context: int
    contexts: tuple[int, ...]
    meter: Meter
    clock: Callable[[], float]
    deadline: float
    tell: Callable[[Progress], None]
    best: Tuning
    started: float
    trials: list[Trial] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    first: float = 0.0
    now: float = 0.0

    def cost(self, tuning: Tuning, contexts: Sequence[int], **how: Any) -> float:
        return sum(self.meter.microseconds(tuning, context, **how) for context in contexts)

    def stage(self, name: str, candidates: Sequence[Tuning], share: float) -> bool:
        """Tries candidates for `share` of the time that is left; returns whether all were tried."""
        # The context's length changes the time of the attention and of the kernel after it.
        contexts = self.contexts[:1] if name in PRODUCTS.values() else self.contexts
        begin = self.clock()
        until = begin + max(0.0, self.deadline - begin) * share
        found: list[Trial] = []
        done, fastest = 0, math.inf
        wanted = [one for one in dict.fromkeys(map(_Hashed, candidates)) if one.it != self.best]
        for start in range(0, len(wanted), _CHUNK):
            if self.clock() >= until:
                break
            chunk = [one.it for one in wanted[start : start + _CHUNK]]
            self.meter.prepare(chunk)
            for tuning in chunk:
                enough = fastest * (1 + _HOPELESS) if len(contexts) == 1 else math.inf
                found.append(Trial(name, tuning, self.cost(tuning, contexts, enough=enough)))
                fastest = min(fastest, found[-1].microseconds)
                done += 1
                self._say(name, done)
                if self.clock() >= until:
                    break
        self.trials += found
        self._choose(sorted(found, key=lambda t: t.microseconds)[:_FINALISTS], contexts)
        self._say(name, done)
        return done == len(wanted)

    def _say(self, stage: str, done: int) -> None:
        seconds = self.clock() - self.started
        self.tell(Progress(stage, done, seconds, self.first, self.now))

    def _choose(self, finalists: list[Trial], contexts: Sequence[int]) -> None:
        """The fastest finalist becomes the best if it is that when both are measured with care."""
        if not finalists:
            return
        held = self.cost(self.best, contexts, careful=True)
        again = [(self.cost(t.tuning, contexts, careful=True), t) for t in finalists]
        for us, trial in sorted(again, key=lambda pair: pair[0]):
            if us >= held * (1 - _NOISE):
                break
            why = self.meter.problem(trial.tuning)
            if why is None:
                self.best = trial.tuning
                self.now = self.cost(self.best, self.contexts[:1], careful=True)
                break
            self.refused.append(f"{trial.stage}: {why}")

    def candidates(self, name: str) -> Sequence[Tuning]:
        """What a stage tries, given the best so far; nothing for what that does not launch."""
        if self._not_launched(name):
            return ()
        if name == "start":
            return start_variants(self.best)
        if name.startswith("start "):
            return start_variants(self.best, name.removeprefix("start "))
        if name == "block":
            return block_variants(self.best, self.config, self.multiprocessors)
        if name == "warpgroups":
            return warpgroup_variants(self.best, self.config, self.rows, self.multiprocessors)
        if name == "attention":
            shapes = attention_shapes(
                self.config, self.rows, clusters=self.clusters, shared=self.shared
            )
            longest = partial(
                for_context,
                config=self.config,
                rows=self.rows,
                context=self.context,
                multiprocessors=self.multiprocessors,
            )
            return [longest(replace(self.best, attention=shape)) for shape in shapes]
        made = product_shapes(
            self.config, name, self.rows, self.multiprocessors,
            clusters=self.clusters, warpgroups=self.best.warpgroups,
            shared=self.shared,
        )  # fmt: skip
        return [_with(self.best, name, shape) for shape in made]

    def _not_launched(self, name: str) -> bool:
        kernel = name.removeprefix("start ")
        if kernel == "attention_block":
            return self.best.block is None
        blocked = blocked_calls(self.config)
        stages = (PRODUCT_CALLS[call] for call in blocked if call in PRODUCT_CALLS)
        return self.best.block is not None and kernel in (*blocked, *stages)

    def again(self, name: str) -> Sequence[Tuning]:
        """The fastest of a stage that was measured before, on top of what is best now."""
        if self._not_launched(name):
            return ()
        ranked = sorted((t for t in self.trials if t.stage == name), key=lambda t: t.microseconds)[
            :_AGAIN
        ]
        return [_with(self.best, name, getattr(t.tuning, name)) for t in ranked]


def _with(tuning: Tuning, name: str, shape: Any) -> Tuning:
    return replace(tuning, **{name: shape})


class _Hashed:
    """A tuning by its value: its `start_next` is a mapping, which has no hash."""

    def __init__(self, it: Tuning) -> None:
        self.it = it

    def __hash__(self) -> int:
        return hash((self.it.qkv, self.it.output, self.it.gate_up, self.it.down, self.it.head))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and self.it == other.it


def sweep(
    config: LlamaConfig,
    start: Tuning,
    meter: Meter,
    *,
    rows: int,
    multiprocessors: int,
    clusters: bool = False,
    warpgroups: bool = False,
    shared: int = MAX_SHARED,
    context: int,
    contexts: Sequence[int],
    seconds: float,
    tell: Callable[[Progress], None] = lambda progress: None,
    clock: Callable[[], float] = time.monotonic,
) -> SweepResult:
    """The best tuning found from `start` on, in about so many seconds.

    `clusters`, `warpgroups`: whether the device has them; `shared`: bytes that a block may have.
    `context`: positions of a sequence, of the decoders that it is for.  `contexts`: positions at
    which the step is timed; the first one decides about products.  `tell` is called after each
    candidate.  Raises InputError for no contexts or no time, and what the meter raises.
    """
    if not contexts or not seconds > 0:
        raise InputError(f"contexts {list(contexts)} and {seconds} seconds: both are needed")
    began = clock()
    meter.prepare([start])
    before = {c: meter.microseconds(start, c, careful=True) for c in contexts}
    run = _Sweep(
        config, rows, multiprocessors, clusters, shared, context, tuple(contexts), meter, clock,
        began + seconds, tell, start, began, first=before[contexts[0]], now=before[contexts[0]],
    )  # fmt: skip
    gains = expected_gains(config)
    if rows == 1 and clusters:
        gains = ("block", *gains)
    # The kernels of the attention's block first, as in a step; then the other products.
    blocked = blocked_calls(config)
    others = (call for call in PRODUCTS if PRODUCTS[call] not in ("qkv", "output"))
    qkv = (call for call in blocked if call not in ("attention", "output_residual"))
    starts = (*qkv, "output_residual", *others, "attention", "attention_block")
    if start.tiles:
        starts = (*(ROUNDED_CALLS.get(one, one) for one in starts), "norm_rows")
    order = [
        *(["warpgroups"] if warpgroups else []),
        "start",
        *gains,
        "start",
        *(f"start {kernel}" for kernel in starts),
    ]
    complete = True
    for index, name in enumerate(order):
        left = order[index:]
        heavy = sum(2.0 if one in gains else 0.5 for one in left)
        share = (2.0 if name in gains else 0.5) / (heavy + 1.0)  # 1.0: time for a second pass
        complete = run.stage(name, run.candidates(name), share) and complete
    for _ in _passes(run):
        for name in gains:
            run.stage(name, run.again(name), 0.5)
    after = {c: meter.microseconds(run.best, c, careful=True) for c in contexts}
    trials, refused = tuple(run.trials), tuple(run.refused)
    return SweepResult(run.best, before, after, trials, refused, complete)


def _passes(run: _Sweep) -> Iterator[None]:
    """Yields for each pass, as long as there is time and the last one changed something."""
    known = None
    while run.clock() < run.deadline and run.best != known:
        known = run.best
        yield
