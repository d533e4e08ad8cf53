"""The search for better launch shapes: `StepMeter` times a step with a tuning on a device, `Sweep`
goes from the best tuning so far to a faster neighbour of it, one shape at a time.

It uses public names only, and the decoder's own program, plan and kernels, so it measures what will
run.  The stages with the largest expected gain come first.  The time of the whole step decides,
since a kernel that is faster alone may leave its neighbours fewer resources.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato import Device, GraphExec, Kernel, Operation, Stream, capture_function, copy, prepare
from ostinato.driver.closeable import Closeable
from ostinato.errors import CompileError, ContextPoisonedError, DriverError, InputError
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.backend import load_kernel
from ostinato.models.cuda.legal import problems_of
from ostinato.models.cuda.lowering import (
    PRODUCTS_OF,
    CudaLaunch,
    lower,
    prefetch_macro,
    rounded_buffers,
    shape_macro,
    workspace_bytes,
)
from ostinato.models.cuda.shapes import (
    MAX_SHARED,
    PRODUCTS,
    Tuning,
    default_tuning,
    for_context,
)
from ostinato.models.cuda.tunings import known_of
from ostinato.models.plan import BufferPlan, PlanSizes
from ostinato.models.program import ACTIVE, FROM_STATE, OPTIONS, ROW, SAMPLE, STATE, decode_program
from ostinato.models.tune.candidates import (
    block_variants,
    neighbours,
    start_variants,
    warpgroup_variants,
)
from ostinato.models.weights import Weights
from ostinato.modules import CompileOptions, compile_ahead

_WORKSPACE = 1 << 25
_WARM = 3
_REPEATS = 12
_ROUNDS, _CAREFUL_ROUNDS = 3, 11
TOLERANCE = 1e-2
"""The largest relative difference of all logits between two tunings, whose sums of bfloat16
products have different orders; the KV cache is in bfloat16, too."""
_ROUNDED_LAYERS = 7
"""The layers after which several rows, whose inputs are rounded to bfloat16, may differ by
TOLERANCE; for more layers the limit grows with the square root: two orders of the same sums
differed by 1.0e-2 after 16 layers (1B shape) and 1.6e-2 after 32 (8B; 8 rows, H200)."""
_STAGES = ("gate_up", "attention", "down", "qkv", "output", "head")
"""Stages in the order of their usual gain, the largest first."""
_CHUNK = 48
"""Candidates that are compiled together."""
_FINALISTS = 3
_HOPELESS = 0.01
"""The relative excess over the best of its stage from which a candidate is not timed again."""
_NOISE = 0.002
"""The least relative gain for which a change is kept."""


def _narrowed(launch: CudaLaunch) -> CompileOptions:
    """Returns the options without the shapes of other products, whose kernels are then not
    compiled."""
    own = PRODUCTS_OF.get(launch.kernel)
    if own is None:
        return launch.options
    names = [name for name in PRODUCTS.values() if name != own]
    others = {macro(name) for name in names for macro in (shape_macro, prefetch_macro)}
    defines = dict(launch.options.defines)
    kept = {n: v for n, v in defines.items() if n not in others}
    return CompileOptions(defines=kept, arch=launch.options.arch)


class StepMeter(Closeable):
    """The buffers of a model on a device, to time steps of `rows` rows.

    `weights`: on the device, bfloat16; the caller closes them.  `trusted`: the tuning whose results
    others are compared with.  `positions`: the largest context to be timed.  The KV cache holds
    noise.  Raises InputError if the model's context is too short, OutOfMemoryError.
    """

    def __init__(
        self, device: Device, weights: Weights, trusted: Tuning, *, rows: int, positions: int
    ) -> None:
        self.device, self.config, self.rows = device, weights.config, rows
        context = positions + _WARM + _REPEATS + 1
        if context > self.config.context_length:
            raise InputError(
                f"context {positions}: the model was trained for {self.config.context_length} "
                f"positions, and {context} are needed to time a step there"
            )
        sizes = PlanSizes(rows=rows, sequences=rows, context=context)
        more = rounded_buffers(self.config, rows)
        self.plan = BufferPlan.allocate(device, weights, sizes, workspace=_WORKSPACE, more=more)
        self._program = decode_program(self.config)
        self._trusted = trusted
        self.stream: Stream = device.create_stream()
        self._marks = [device.create_event(timing=True) for _ in range(2)]
        try:
            self._fill(context)
        except BaseException:
            self.close()
            raise

    def _fill(self, context: int) -> None:
        """Fills the cache with noise, and sets rows, options and stop tokens for all steps."""
        self._fill_cache()
        rows = self.rows
        stops = np.full(self.plan.stops.buffer.shape, -1, np.int32)
        self.plan.stops.set(stops, self.stream)
        table = np.zeros(rows, ROW)
        table["sequence"], table["flags"] = np.arange(rows), ACTIVE | SAMPLE | FROM_STATE
        self.plan.rows.set(table, self.stream)
        options = np.zeros(rows, OPTIONS)
        options["top_p"], options["limit"], options["repetition_penalty"] = 1.0, context, 1.0
        self.plan.options.set(options, self.stream)

    def _fill_cache(self) -> None:
        noise = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
        halves = (noise.view(np.uint32) >> 16).astype(np.uint16)
        source = self.device.array(halves)
        cache = self.plan.buffers["cache"]

        def fill() -> None:
            for start in range(0, cache.nbytes, source.nbytes):
                size = min(source.nbytes, cache.nbytes - start) // 2
                copy(self.stream, cache.view(start, size), source.view(0, size))

        with capture_function(self.stream, fill).instantiate() as filling:
            filling.launch(self.stream)
            self.stream.synchronize()
        source.close()

    def prepare(self, tunings: Sequence[Tuning]) -> None:
        """Compiles the kernels of all tunings, on all cores; errors show when one is measured."""
        disk = self.device.modules.disk
        if disk is not None and self.device.capabilities.compiles_cuda:
            every = (one for tuning in tunings for one in self._launches(tuning))
            variants = [(one.source, one.options) for one in every]
            capability = self.device.properties.compute_capability
            compile_ahead(variants, capability, folder=disk.folder)

    def _launches(self, tuning: Tuning) -> tuple[CudaLaunch, ...]:
        """Returns launches whose products are compiled one by one: a candidate changes only one."""
        made = lower(
            self._program, self.config, rows=self.rows, context=self.plan.sizes.context,
            tuning=tuning, multiprocessors=self.device.properties.multiprocessors,
        )  # fmt: skip
        narrow = {one.kernel: _narrowed(one) for one in made}
        return tuple(replace(one, options=narrow[one.kernel]) for one in made)

    def _kernel(self, launch: CudaLaunch) -> Kernel:
        return load_kernel(self.device.modules, launch)

    def operations(self, tuning: Tuning) -> tuple[Operation, ...]:
        """Returns the launches of a step.  Raises InputError if the workspace is too small for
        them, CompileError, DriverError."""
        context = self.plan.sizes.context
        need = workspace_bytes(self.config, rows=self.rows, context=context, tuning=tuning)
        if need > _WORKSPACE:
            raise InputError(f"a workspace of {need} bytes is needed; {_WORKSPACE} are there")
        return tuple(self._operation(one) for one in self._launches(tuning))

    def _operation(self, launch: CudaLaunch) -> Operation:
        arguments = (self.plan.resolve(value, self.rows) for _, value in launch.arguments)
        return prepare(self._kernel(launch), launch.config, *arguments)

    def _reset(self, context: int) -> None:
        """Sets every sequence's state to position `context`, from which a step decodes."""
        state = np.zeros(self.rows, STATE)
        state["token"], state["position"], state["length"] = 1, context, context + 1
        buffer = self.plan.buffers["state"]
        buffer.set(state.view(np.int32).reshape(buffer.shape), self.stream)

    def microseconds(
        self, tuning: Tuning, context: int, *, careful: bool = False, enough: float = math.inf
    ) -> float:
        """Returns the time of one of several replays in a row, the median over some rounds;
        infinite for a tuning that the compiler or the driver refuses.  If the first round takes
        more than `enough`, it is the only one.  Raises ContextPoisonedError."""
        try:
            executable = self._graph(tuning)
        except ContextPoisonedError:
            raise
        except (CompileError, DriverError, InputError):
            return math.inf
        start, stop = self._marks
        found: list[float] = []
        with executable:
            for _ in range(_CAREFUL_ROUNDS if careful else _ROUNDS):
                self._reset(context)
                for _ in range(_WARM):
                    executable.launch(self.stream)
                self.stream.record(start)
                for _ in range(_REPEATS):
                    executable.launch(self.stream)
                self.stream.record(stop)
                self.stream.synchronize()
                found.append(stop.elapsed_since(start) * 1e6 / _REPEATS)
                if found[0] > enough:
                    break
        return statistics.median(found)

    def _graph(self, tuning: Tuning) -> GraphExec:
        operations = self.operations(tuning)

        def submit() -> None:
            for operation in operations:
                self.stream.submit(operation)

        return capture_function(self.stream, submit).instantiate(upload=self.stream)

    def problem(self, tuning: Tuning) -> str | None:
        """Returns the reason to refuse a tuning: its logits differ from the trusted one's by more
        than the tolerance, or from run to run; None if there is none."""
        context = self.plan.sizes.context // 2
        wanted = self.logits(self._trusted, context)
        seen = [self.logits(tuning, context) for _ in range(3)]
        if any(one.tobytes() != seen[0].tobytes() for one in seen):
            return "the same step gave different bits"
        error = float(np.linalg.norm(seen[0] - wanted) / max(float(np.linalg.norm(wanted)), 1e-30))
        most = TOLERANCE
        if tuning.tiles:
            most *= max(1.0, math.sqrt(self.config.layers / _ROUNDED_LAYERS))
        if not error <= most:
            return f"its logits are {error:.2e} away from the default's, above {most:.2g}"
        return None

    def logits(self, tuning: Tuning, context: int) -> npt.NDArray[np.float32]:
        """Returns the logits of one step at a position: float32, [rows, vocabulary]."""
        self._reset(context)
        with self._graph(tuning) as executable:
            executable.launch(self.stream)
            return self.plan.buffers["logits"].to_numpy(self.stream)

    def close(self) -> None:
        """Frees buffers and stream, but not the weights.  Idempotent."""
        if not self.device.context.closed and not self.stream.closed:
            self.stream.synchronize()
        for mark in self._marks:
            mark.close()
        self.plan.close()
        self.stream.close()


@dataclass(frozen=True, slots=True)
class Trial:
    """A measured candidate of a stage: `microseconds` is the sum over the contexts of the stage."""

    stage: str
    tuning: Tuning
    microseconds: float


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The result of a sweep.  `before`, `after`: microseconds by context.  `refused`: a line for
    each faster tuning that was refused, with the reason."""

    tuning: Tuning
    before: dict[int, float]
    after: dict[int, float]
    trials: tuple[Trial, ...]
    refused: tuple[str, ...]

    @property
    def improved(self) -> bool:
        return sum(self.after.values()) < sum(self.before.values()) * (1 - _NOISE)


def search(
    device: Device,
    weights: Weights,
    start: Tuning,
    *,
    rows: int,
    context: int,
    contexts: Sequence[int],
    seconds: float,
    tell: Callable[[str], None] = lambda line: None,
) -> SweepResult:
    """Searches from `start` on, for about `seconds`, and returns the best tuning for steps of
    `rows` rows whose results agree with the default's (`Sweep`).

    `weights`: on the device, bfloat16; the caller closes them.  `context`, `contexts`, `tell`: see
    `Sweep`.  Raises the errors of StepMeter and `Sweep.run`.
    """
    config, known = weights.config, known_of(device)
    default = default_tuning(config, rows=rows, context=context, **known)
    del known["fast_memory"]  # a search tries the shapes for fast and for slow memory
    with StepMeter(device, weights, default, rows=rows, positions=max(contexts)) as meter:
        sweep = Sweep(
            config, start, meter, rows=rows, **known, context=context, contexts=contexts, tell=tell
        )
        return sweep.run(seconds)


@dataclass
class Sweep:
    """A search that starts from the tuning `best` and improves it.

    `clusters`, `warpgroups`: True if the device has them; `shared`: bytes of shared memory that a
    block may have.  `context`: positions of a sequence in the decoders that will use the tuning.
    `contexts`: positions at which the step is timed; only the first is used for products.  `tell`
    is called with a line after each stage.
    """

    config: LlamaConfig
    best: Tuning
    meter: StepMeter
    _: KW_ONLY
    rows: int
    multiprocessors: int
    clusters: bool = False
    warpgroups: bool = False
    shared: int = MAX_SHARED
    context: int
    contexts: Sequence[int]
    tell: Callable[[str], None] = lambda line: None
    clock: Callable[[], float] = time.monotonic
    trials: list[Trial] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def run(self, seconds: float) -> SweepResult:
        """Runs all stages in about `seconds`.  Raises InputError, and the meter's errors."""
        if not self.contexts or not seconds > 0:
            raise InputError(
                f"contexts {list(self.contexts)} and {seconds} seconds: both are needed"
            )
        deadline, start = self.clock() + seconds, self.best
        self.meter.prepare([start])
        before = {c: self.meter.microseconds(start, c, careful=True) for c in self.contexts}
        block = ["block"] if self.rows == 1 and self.clusters else []
        order = ["warpgroups"] * self.warpgroups + ["start", *block, *_STAGES, "start"]
        shares = [4 if name in (*block, *_STAGES) else 1 for name in order]
        for index, name in enumerate(order):
            now = self.clock()
            share = shares[index] / sum(shares[index:])
            self.stage(name, now + share * max(0.0, deadline - now))
            self.tell(f"{name}: {len(self.trials)} tried")
        after = {c: self.meter.microseconds(self.best, c, careful=True) for c in self.contexts}
        return SweepResult(self.best, before, after, tuple(self.trials), tuple(self.refused))

    def cost(self, tuning: Tuning, contexts: Sequence[int], **how: Any) -> float:
        return sum(self.meter.microseconds(tuning, context, **how) for context in contexts)

    def stage(self, name: str, until: float) -> None:
        """Times a stage's candidates and keeps the best, again and again until none is better or
        the clock reaches `until`."""
        # The context's length affects the time of the attention and of the kernel after it only.
        contexts = self.contexts[:1] if name in PRODUCTS.values() else self.contexts
        fastest = math.inf
        # Texts: a tuning's `start_next` is a mapping, which is not hashable.
        seen = {repr(self.best)}
        before = None
        while before is not self.best:
            before, found = self.best, []
            wanted = {repr(one): one for one in self.candidates(name)}
            fresh = [one for text, one in wanted.items() if text not in seen]
            for index, tuning in enumerate(fresh):
                if self.clock() >= until:
                    break
                if index % _CHUNK == 0:
                    self.meter.prepare(fresh[index : index + _CHUNK])
                enough = fastest * (1 + _HOPELESS) if len(contexts) == 1 else math.inf
                found.append(Trial(name, tuning, self.cost(tuning, contexts, enough=enough)))
                seen.add(repr(tuning))
                fastest = min(fastest, found[-1].microseconds)
            self.trials += found
            self._choose(sorted(found, key=lambda t: t.microseconds)[:_FINALISTS], contexts)

    def _choose(self, finalists: list[Trial], contexts: Sequence[int]) -> None:
        """Makes the fastest finalist the best if careful measurements and its results allow it."""
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
                break
            self.refused.append(f"{trial.stage}: {why}")

    def candidates(self, name: str) -> Iterator[Tuning]:
        """Yields the tunings that a stage tries next to the best so far, those which this device
        can launch; none for a kernel that the best does not launch."""
        best, config, count = self.best, self.config, self.multiprocessors
        if best.block is not None and name in ("qkv", "attention", "output"):
            return
        if name == "start":
            made: Iterable[Tuning] = start_variants(best)
        elif name == "block":
            made = block_variants(best, config, count)
        elif name == "warpgroups":
            made = warpgroup_variants(best, config, self.rows, count)
        else:
            made = neighbours(best, name)
        has: dict[str, Any] = {
            "clusters": self.clusters,
            "warpgroups": self.warpgroups,
            "shared": self.shared,
        }
        sizes = {"rows": self.rows, "context": self.context, "multiprocessors": count}
        for one in made:
            if not problems_of(config, self.rows, one, **has):
                yield for_context(one, config, **sizes)
