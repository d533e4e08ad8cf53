"""Timing tunings on a device: one decode step as a captured graph, and whether its logits agree.

With public names only, and on the decoder's own program, plan and kernels: what is measured is what
will run.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato import Device, GraphExec, Kernel, Operation, Stream, capture_function, copy, prepare
from ostinato.driver.closeable import Closeable
from ostinato.errors import CompileError, ContextPoisonedError, DriverError, InputError
from ostinato.models.cuda.backend import load_kernel
from ostinato.models.cuda.lowering import (
    PRODUCTS_OF,
    CudaLaunch,
    lower,
    prefetch_macro,
    rounded_buffers,
    shape_macro,
    workspace_bytes,
)
from ostinato.models.cuda.shapes import PRODUCTS, Tuning, default_tuning
from ostinato.models.cuda.tunings import known_of
from ostinato.models.plan import BufferPlan, PlanSizes
from ostinato.models.program import ACTIVE, FROM_STATE, OPTIONS, ROW, SAMPLE, STATE, decode_program
from ostinato.models.tune.sweep import Progress, SweepResult, sweep
from ostinato.models.weights import Weights
from ostinato.modules import CompileOptions, CompilerPool

__all__ = ["StepMeter", "search"]

_WORKSPACE = 1 << 25
_WARM = 3
_REPEATS = 12
_ROUNDS, _CAREFUL_ROUNDS = 3, 11
TOLERANCE = 1e-2
"""Relative, over all logits: sums of bfloat16 products in two orders, a KV cache in bfloat16."""
_ROUNDED_LAYERS = 7
"""Several rows, whose inputs are rounded to bfloat16, may be TOLERANCE apart after so many layers,
and after more as the root of their number: two orders of the same sums were 1.0e-2 apart after 16
layers (1B shape) and 1.6e-2 after 32 (8B; 8 rows, H200)."""


def _narrowed(launch: CudaLaunch) -> CompileOptions:
    """Without the shapes of other products, whose kernels are then left out of the code."""
    own = PRODUCTS_OF.get(launch.kernel)
    if own is None:
        return launch.options
    names = [name for name in PRODUCTS.values() if name != own]
    others = {macro(name) for name in names for macro in (shape_macro, prefetch_macro)}
    defines = dict(launch.options.defines)
    kept = {n: v for n, v in defines.items() if n not in others}
    return CompileOptions(defines=kept, arch=launch.options.arch)


class StepMeter(Closeable):
    """One shape's buffers on a device, for timing steps of `rows` rows (`tune.sweep.Meter`).

    `weights`: on the device, bfloat16; the caller closes them.  `positions`: the largest context
    that will be asked for.  The KV cache holds noise.  Raises OutOfMemoryError.
    """

    def __init__(self, device: Device, weights: Weights, *, rows: int, positions: int) -> None:
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
        self._base: Tuning | None = None
        self._compilers: CompilerPool | None = None
        disk = device.modules.disk
        if disk is not None and device.capabilities.compiles_cuda:
            capability = device.properties.compute_capability
            self._compilers = CompilerPool(capability, folder=disk.folder)
        try:
            self.stream: Stream = device.create_stream()
            self._marks = [device.create_event(timing=True) for _ in range(2)]
            self._fill_cache()
            stops = np.full(self.plan.stops.buffer.shape, -1, np.int32)
            self.plan.stops.set(stops, self.stream)
            table = np.zeros(rows, ROW)
            table["sequence"], table["flags"] = np.arange(rows), ACTIVE | SAMPLE | FROM_STATE
            self.plan.rows.set(table, self.stream)
            options = np.zeros(rows, OPTIONS)
            options["top_p"], options["limit"] = 1.0, context
            options["repetition_penalty"] = 1.0
            self.plan.options.set(options, self.stream)
        except BaseException:
            self.plan.close()
            raise

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

    # --- launches
    def prepare(self, tunings: Sequence[Tuning]) -> None:
        """Compiles and loads the kernels of all of them, on all cores."""
        wanted: dict[Any, CudaLaunch] = {}
        for tuning in tunings:
            for one in self._launches(tuning):
                wanted.setdefault((one.source, one.options, one.kernel), one)
        if self._compilers is not None:
            self._compilers.compile([(one.source, one.options) for one in wanted.values()])
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            list(pool.map(self._try_kernel, wanted.values()))

    def _launches(self, tuning: Tuning) -> tuple[CudaLaunch, ...]:
        """Each product compiled by itself: a candidate changes one, and the others are there."""
        made = lower(
            self._program, self.config, rows=self.rows, context=self.plan.sizes.context,
            tuning=tuning, multiprocessors=self.device.properties.multiprocessors,
        )  # fmt: skip
        narrow: dict[str, CompileOptions] = {}
        for one in made:
            if one.kernel not in narrow:
                narrow[one.kernel] = _narrowed(one)
        return tuple(replace(one, options=narrow[one.kernel]) for one in made)

    def _kernel(self, launch: CudaLaunch) -> Kernel:
        return load_kernel(self.device.modules, launch)

    def _try_kernel(self, launch: CudaLaunch) -> None:
        """Loads kernels.  Errors are dropped here: measuring such a tuning raises them again."""
        try:
            self._kernel(launch)
        except ContextPoisonedError:
            raise
        except (CompileError, DriverError):
            return

    def operations(self, tuning: Tuning) -> tuple[Operation, ...]:
        """The launches of a step.  Raises InputError where the workspace is too small for it,
        CompileError, DriverError."""
        context = self.plan.sizes.context
        need = workspace_bytes(self.config, rows=self.rows, context=context, tuning=tuning)
        if need > _WORKSPACE:
            raise InputError(f"a workspace of {need} bytes is needed; {_WORKSPACE} are there")
        return tuple(self._operation(one) for one in self._launches(tuning))

    def _operation(self, launch: CudaLaunch) -> Operation:
        arguments = (self.plan.resolve(value, self.rows) for _, value in launch.arguments)
        return prepare(self._kernel(launch), launch.config, *arguments)

    def _reset(self, context: int) -> None:
        """Every row decodes the next token of its sequence, from this position."""
        state = np.zeros(self.rows, STATE)
        state["token"], state["position"], state["length"] = 1, context, context + 1
        buffer = self.plan.buffers["state"]
        buffer.copy_from(state.view(np.int32).reshape(buffer.shape), self.stream)

    # --- the meter
    def microseconds(
        self, tuning: Tuning, context: int, *, careful: bool = False, enough: float = math.inf
    ) -> float:
        """The median over some rounds of one replay's time, back to back; infinite for a tuning
        that the compiler or the driver refuses.  One round alone where it shows more than `enough`.
        Raises ContextPoisonedError."""
        try:
            executable = self._graph(tuning)
        except ContextPoisonedError:
            raise
        except (CompileError, DriverError, InputError):
            return math.inf
        try:
            return self._time(executable, context, careful, enough)
        finally:
            executable.close()

    def _graph(self, tuning: Tuning) -> GraphExec:
        operations = self.operations(tuning)

        def submit() -> None:
            for operation in operations:
                self.stream.submit(operation)

        return capture_function(self.stream, submit).instantiate(upload=self.stream)

    def _time(self, executable: GraphExec, context: int, careful: bool, enough: float) -> float:
        start, stop = self._marks
        found: list[float] = []
        for _ in range(_CAREFUL_ROUNDS if careful else _ROUNDS):
            self._reset(context)
            for _ in range(_WARM):
                executable.launch(self.stream)
            self.stream.record(start)
            for _ in range(_REPEATS):
                executable.launch(self.stream)
            self.stream.record(stop)
            self.stream.synchronize()
            found.append(stop.elapsed_since(start) * 1e3 / _REPEATS)
            if found[0] > enough:
                break
        return statistics.median(found)

    def trust(self, tuning: Tuning) -> None:
        """Makes a tuning the reference, with whose results those of others are compared."""
        self._base = tuning

    def problem(self, tuning: Tuning) -> str | None:
        """Why a tuning's logits are not those of the trusted one, or not the same bits each time;
        None if they are."""
        context = self.plan.sizes.context // 2
        if self._base is None:
            raise InputError("no tuning is trusted yet: there is nothing to compare with")
        wanted = self.logits(self._base, context)
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
        """The logits of one step at a position: float32, [rows, vocabulary]."""
        self._reset(context)
        with self._graph(tuning) as executable:
            executable.launch(self.stream)
            return self.plan.buffers["logits"].to_numpy(self.stream)

    # --- lifetime
    def close(self) -> None:
        """Gives buffers and stream back, not the weights.  Idempotent."""
        if self._compilers is not None:
            self._compilers.close()
        if not self.device.context.closed and not self.stream.closed:
            self.stream.synchronize()
        for mark in self._marks:
            mark.close()
        self.plan.close()
        self.stream.close()


def search(
    device: Device,
    weights: Weights,
    start: Tuning,
    *,
    rows: int,
    context: int,
    contexts: Sequence[int],
    seconds: float,
    tell: Callable[[Progress], None] = lambda progress: None,
) -> SweepResult:
    """The best tuning for steps of `rows` rows that is found from `start` on, in about so many
    seconds (`sweep`), whose results agree with the default's.

    `weights`: on the device, bfloat16; the caller closes them.  `context`, `contexts`: as `sweep`
    has them.  Raises what StepMeter and `sweep` raise.
    """
    config, known = weights.config, known_of(device)
    with StepMeter(device, weights, rows=rows, positions=max(contexts)) as meter:
        meter.trust(default_tuning(config, rows=rows, context=context, **known))
        del known["fast_memory"]  # a search tries what the rule has for either
        return sweep(
            config,
            start,
            meter,
            rows=rows,
            **known,
            context=context,
            contexts=contexts,
            seconds=seconds,
            tell=tell,
        )
