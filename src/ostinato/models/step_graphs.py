"""The decoder's graphed steps over one program: "prefill"; "decode", which samples; "lookup", which
drafts tokens and chooses as many as agree; and loops of the last two, which give several tokens a
launch.  "ending", and "lookup layers" and "lookup ending", are parts of steps whose masks are made
between layers and ending.

The graph of a loop is built node by node around the launches of the step:

    continue_loop (starts the count)  ->  WHILE: the step's launches  ->  continue_loop (counts)

The body is captured, or with `build="record"` built from the same launches, with edges derived from
the operands that each launch reads and writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

from ostinato import (
    Device,
    Graph,
    GraphCache,
    GraphedStep,
    GraphExec,
    Operation,
    Sizes,
    Slot,
    Stream,
    capture,
)
from ostinato.errors import (
    CaptureError,
    ContextPoisonedError,
    DriverError,
    GraphError,
    InputError,
    NotAvailableError,
)
from ostinato.models.backend import Backend, BoundCall, DeviceModel
from ostinato.models.decoder_statistics import OperationTimes
from ostinato.models.plan import BufferPlan
from ostinato.models.program import CallArgument, KernelCall, decode_program, loop_call
from ostinato.step import Action, Decision, HeldReplay, Reason, StepStatistics

if TYPE_CHECKING:
    from ostinato.models.ranks import Ranks

_PREFILL, _DECODE, _ENDING = "prefill", "decode", "ending"
_LOOKUPS = _LOOKUP, _LOOKUP_LAYERS, _LOOKUP_ENDING = "lookup", "lookup layers", "lookup ending"
_WHOLE_LOGITS = "decode, whole logits"
"""The name of a step of ranks that gives each rank all logits, so that rows need not be greedy."""
# Poison for padding rows in checks: without ACTIVE, with numbers that are out of every range.
_POISON_ROWS = (-2, 1 << 30)


class StepGraphs:
    """The graphed steps of a decoder, by name; a step runs eagerly or as a replay of its graph.

    Launches are prepared once for each bucket: for the least rows on construction, for other
    buckets before their first step.  This loads the kernels, so that no capture has to load one.
    The arguments are those of `Decoder`; `ranks` is its membership in a group, if any.  Then each
    graph is compared with those of the other ranks before its first launch, and nothing is launched
    after a failure of the group.
    """

    def __init__(
        self,
        device: Device,
        backend: Backend,
        plan: BufferPlan,
        stream: Stream,
        *,
        graphs: bool | None,
        build: Literal["capture", "record"],
        warmups: int,
        verify: Literal["off", "first"] | int,
        graph_budget: int | str | None,
        ranks: Ranks | None = None,
    ) -> None:
        self._device = device
        self._backend = backend
        self._plan = plan
        self._model = DeviceModel(plan.config, plan.sizes.context, plan.weights.formats)
        self._build = build
        self._ranks = ranks
        self.whole_logits = False
        """True if ranks must have all logits, because some row is not greedy; it can be changed
        between steps."""
        names = (_PREFILL, _DECODE) if ranks is None else (_PREFILL, _DECODE, _WHOLE_LOGITS)
        self.programs = {name: self._program(name) for name in names}
        self._largest = plan.sizes.rows
        self.kernel_seconds = 0.0
        """Seconds spent to compile or find kernels, load them and prepare their launches."""
        self._prepared: dict[int, dict[str, tuple[Operation, ...]]] = {}
        self._bounds: dict[int, dict[str, tuple[BoundCall, ...]]] = {}
        self._buckets = plan.sizes.buckets
        self._ready: set[int] = set()
        """Numbers of rows whose bucket is prepared."""
        self._least = plan.sizes.least_rows
        self._prepare(self._least)
        self.launches: int = len(self._prepared[self._least][_DECODE])
        """The number of launches of a step that samples one row."""
        self.graph_cache = GraphCache(device, buckets=self._buckets, budget=graph_budget)
        self.stream = stream
        self._times: OperationTimes | None = None
        self.last_decision: Decision | None = None
        """The action of the last step and its reason; None before the first step."""
        self._new_step = partial(
            GraphedStep,
            stream=self.stream,
            cache=self.graph_cache,
            slots=_slots_to_verify(plan) if verify != "off" else (),
            graphs=graphs,
            verify=verify,
            # Only `sample`, the last launch, changes the input of a step: the rows' state.
            repeatable=ranks is None,
            preconditions={
                "weights loaded": lambda: plan.weights.loaded,
                "workspace ready": lambda: plan.prepared,
            },
        )
        self._steps = {
            name: self._new_step(
                partial(self._submit, name),
                name=name,
                # A rank's graph has its own builder, which compares it before its first launch.
                build=build if ranks is None else "capture",
                builder=None if ranks is None else partial(self._build_step, name),
                warmups=warmups if ranks is None or build == "capture" else 0,
            )
            for name in (*names, _ENDING)
        }
        if plan.sizes.lookup:  # without a warm-up, see `_loop`
            for name in _LOOKUPS:
                self._steps[name] = self._new_step(
                    partial(self._submit, name),
                    name=name,
                    warmups=0,
                    builder=partial(self._build_step, name),
                )
        self._loops: dict[tuple[int, str], GraphedStep] = {}

    def end(self, rows: int, *, drafts: bool = False) -> None:
        """Runs the rest of a step that samples, after the same rows were run with `sampled=False`;
        ranks have all logits.  Does not wait."""
        self._check()
        step = self._steps[_LOOKUP_ENDING if drafts else _ENDING]
        self.last_decision = step(rows=max(rows, self._least))

    def __call__(
        self, rows: int, *, sampled: bool = True, tokens: int = 1, drafts: bool = False
    ) -> None:
        """Runs the step on the first `rows` of the plan's rows, `tokens` times.  Does not wait.

        `tokens` may exceed 1 only if the step samples and all active rows are FROM_STATE.
        `drafts`: the step drafts tokens for its DRAFTS rows.
        """
        rows = max(rows, self._least)
        self.last_decision = self._step(rows, sampled, tokens, drafts)(rows=rows)

    def hold(self, rows: int, *, tokens: int = 1, drafts: bool = False) -> HeldReplay:
        """Returns the graph of a step that samples, held for many launches: `GraphedStep.hold`."""
        rows = max(rows, self._least)
        held = self._step(rows, True, tokens, drafts).hold(rows=rows)
        self.last_decision = Decision(Action.REPLAY, Reason.REPLAYED)
        return held

    def _step(self, rows: int, sampled: bool, tokens: int, drafts: bool) -> GraphedStep:
        """Returns the graphed step for these arguments, after preparing its launches."""
        self._check()
        if rows not in self._ready:
            self._prepare(self._buckets.bucket(rows))
            self._ready.add(rows)
        name = self._name(sampled, drafts)
        return self._steps[name] if tokens == 1 else self._loop(tokens, name)

    def _name(self, sampled: bool, drafts: bool = False) -> str:
        """Returns the name of the step."""
        if drafts:
            return _LOOKUP if sampled else _LOOKUP_LAYERS
        if not sampled:
            return _PREFILL
        return _WHOLE_LOGITS if self.whole_logits and self._ranks is not None else _DECODE

    def _check(self) -> None:
        """Raises GroupError if the decoder's group has failed."""
        if self._ranks is not None:
            self._ranks.check()

    def _submit(self, name: str, stream: Stream, sizes: Sizes) -> None:
        self._check()
        # Launches are made for buckets: every kernel treats inactive rows as padding.
        operations = self._prepared[self._buckets.bucket(sizes.rows)][name]
        if self._times is not None:
            self._times.run(stream, operations)
            return
        for operation in operations:
            stream.submit(operation)

    def _prepare(self, rows: int) -> None:
        """Makes the launches of a bucket, unless they are there.  The method may compile and load
        kernels, so it must not be called inside a capture."""
        if rows in self._prepared:
            return
        begin = time.perf_counter()
        try:
            self._prepared[rows] = self._make(rows)
        except NotAvailableError as error:
            # Our own kernels replace the library if they support this many rows.
            if not self._backend.give_up_library(str(error)):
                raise
            self._largest = min(self._largest, self._plan.sizes.sampled_rows)
            if rows > self._largest:
                raise
            self._prepared[rows] = self._make(rows)
        finally:
            self.kernel_seconds += time.perf_counter() - begin

    def _make(self, rows: int) -> dict[str, tuple[Operation, ...]]:
        """Returns the operations of steps of `rows` rows, by the steps' names.

        A step that does not sample is the same step without its ending, from `head` on.
        """
        bounds: dict[str, tuple[BoundCall, ...]] = {}
        made: dict[str, tuple[Operation, ...]] = {}
        for name in list(self.programs)[1:]:
            layers, rest = self._bound(name, rows)
            if not made:
                bounds[_PREFILL] = layers
                made[_PREFILL] = self._operations(layers, rows)
            bounds[name] = (*bounds[_PREFILL], *rest)
            made[name] = (*made[_PREFILL], *self._operations(rest, rows))
        # Of ranks the last one has all logits.  The first launch follows one of another graph.
        bounds[_ENDING] = (rest[0].with_programmatic(False), *rest[1:])
        made[_ENDING] = self._operations(bounds[_ENDING], rows)
        if rows <= self._plan.sizes.draft_rows:
            layers, rest = self._bound(_LOOKUP, rows)
            bounds[_LOOKUP] = (*layers, *rest)
            rest = (rest[0].with_programmatic(False), *rest[1:])
            bounds |= {_LOOKUP_LAYERS: layers, _LOOKUP_ENDING: rest}
            made |= {name: self._operations(bounds[name], rows) for name in _LOOKUPS}
        self._bounds[rows] = bounds
        return made

    def piece(self, tokens: int) -> int:
        """Returns the tokens that the next step of a prompt takes, of `tokens` left, and prepares
        its launches.

        The steps are smaller after a failure of the library that large steps need.
        """
        sizes, largest = self._plan.sizes, self._largest
        count = sizes.piece(tokens, largest)
        if count > sizes.sampled_rows:
            try:
                self._prepare(self._buckets.bucket(count))
            except NotAvailableError:
                if self._largest == largest:
                    raise
                count = sizes.piece(tokens, self._largest)
        return count

    def _program(self, name: str, *, last_row: bool = False) -> tuple[KernelCall, ...]:
        """Returns the calls of a step, by its name."""
        sampled = name != _PREFILL
        lookup = self._plan.sizes.lookup if name == _LOOKUP else 0
        if self._ranks is None:
            of = self._plan.config
            return decode_program(of, sampled=sampled, last_row=last_row, lookup=lookup)
        whole = name == _WHOLE_LOGITS
        return self._ranks.program(
            sampled=sampled, whole_logits=whole, last_row=last_row, lookup=lookup
        )

    def _bound(self, name: str, rows: int) -> tuple[tuple[BoundCall, ...], tuple[BoundCall, ...]]:
        """Binds the launches of a step that samples, by its name; returns those of its layers, and
        those of its ending, in which each call of the program is one `BoundCall`."""
        sizes = self._plan.sizes
        program = self._program(name, last_row=rows > sizes.sampled_rows)
        calls: tuple[KernelCall | BoundCall, ...] = program
        if self._ranks is not None:
            by_products = "sums" in self._plan.buffers and self._backend.exchanges_sums(
                self._model, rows
            )
            calls = self._ranks.with_collectives(
                program,
                rows,
                by_products=by_products,
                carried=self._backend.carries_sums(self._model, rows),
                shared=self._backend.shares_sums(self._model, rows),
            )
        bound = self._backend.bind(calls, self._model, rows)
        kernels = [call.kernel if isinstance(call, KernelCall) else "" for call in calls]
        begin = len(bound) - len(calls) + kernels.index("head")
        return bound[:begin], bound[begin:]

    def _operations(
        self, bound: tuple[BoundCall, ...], rows: int, condition: int | None = None
    ) -> tuple[Operation, ...]:
        def resolve(value: CallArgument) -> object:
            return condition if value == "condition" else self._plan.resolve(value, rows)

        return tuple(operation for one in bound for operation in one.operations(resolve))

    def _build_step(self, name: str, stream: Stream, sizes: Sizes) -> GraphExec:
        rows = sizes.rows

        def make() -> GraphExec:
            operations = self._prepared[rows][name]
            if self._build == "record":
                graph = Graph.create(self._device)
                graph.add_operations(operations)
            else:
                with capture(stream, contained=True) as under_way:
                    for operation in operations:
                        stream.submit(operation)
                graph = under_way.graph
            return graph.instantiate(upload=stream)

        return self._agreed(name, rows, self._bounds[rows][name], make)

    # --- several ranks
    def _agreed(
        self, name: str, rows: int, bound: tuple[BoundCall, ...], make: Callable[[], GraphExec]
    ) -> GraphExec:
        """Returns the graph made by `make`, compared with the other ranks' if there are any."""
        if self._ranks is None:
            return make()
        code = self._ranks.code_of(bound)
        return self._ranks.agree_graph(f"graph of {name!r}, rows={rows}", code, make)

    # --- loops
    def _loop(self, tokens: int, name: str) -> GraphedStep:
        """Returns the graphed step that loops over `tokens` steps of this name.  An eager run does
        all of them, even after every row has stopped: the rows are then padding."""
        step = self._loops.get((tokens, name))
        if step is None:

            def submit(stream: Stream, sizes: Sizes) -> None:
                for _ in range(tokens):
                    self._submit(name, stream, sizes)

            # No warm-up: a sequence has a token to decode only after a first step.
            step = self._new_step(
                submit,
                name=f"{name} x {tokens}",
                warmups=0,
                builder=partial(self._build_loop, tokens, name),
            )
            step.profiling = self._times is not None
            self._loops[tokens, name] = step
        return step

    def _build_loop(self, tokens: int, name: str, stream: Stream, sizes: Sizes) -> GraphExec:
        if not self._device.capabilities.conditional_nodes:
            raise NotAvailableError(f"{self._device.name} has no conditional nodes")
        begin, rows = time.perf_counter(), sizes.rows
        bound = self._bounds[rows][name]
        calls = (loop_call(tokens), loop_call())
        loop = self._backend.bind(calls, self._model, rows)
        self.kernel_seconds += time.perf_counter() - begin

        def make() -> GraphExec:
            try:
                return self._loop_graph(stream, rows, bound, *loop)
            except ContextPoisonedError:
                raise
            except (CaptureError, DriverError, GraphError):
                # Some drivers refuse programmatic launches in the body of a loop.
                plain = tuple(one.with_programmatic(False) for one in bound)
                if plain == bound:
                    raise
                return self._loop_graph(stream, rows, plain, *loop)

        return self._agreed(f"{name} x {tokens}", rows, (*bound, *loop), make)

    def _loop_graph(
        self,
        stream: Stream,
        rows: int,
        step: tuple[BoundCall, ...],
        begin: BoundCall,
        again: BoundCall,
    ) -> GraphExec:
        chained = again.with_programmatic(step[-1].programmatic)
        graph = Graph.create(self._device)
        try:
            condition = graph.condition()
            (start,) = self._operations((begin,), rows, condition)
            started = graph.add_operation(start)
            loop = graph.add_conditional("while", condition, after=[started])
            body = loop.bodies[0]
            operations = self._operations((*step, chained), rows, condition)
            if self._build == "record":
                body.add_operations(operations)
            else:
                with capture(stream, into=body):
                    for operation in operations:
                        stream.submit(operation)
            return graph.instantiate(upload=stream)
        except Exception:
            graph.close()
            raise

    def graph(self, rows: int, *, sampled: bool) -> Graph:
        """Captures a step of `rows` rows, rounded up to their bucket, as a graph to inspect."""
        bucket = self._buckets.bucket(max(rows, self._least))
        self._prepare(bucket)
        with capture(self.stream) as under_way:
            for operation in self._prepared[bucket][self._name(sampled)]:
                self.stream.submit(operation)
        return under_way.graph

    @contextmanager
    def profile(self) -> Iterator[OperationTimes]:
        """Times every operation by itself; steps inside the block run eagerly.

        Raises InputError inside another `profile` block."""
        if self._times is not None:
            raise InputError("a profile is under way; end it before another one begins")
        times = self._times = OperationTimes()
        self._profiling(True)
        try:
            yield times
        finally:
            self._times = None
            self._profiling(False)

    def _profiling(self, on: bool) -> None:
        for step in (*self._steps.values(), *self._loops.values()):
            step.profiling = on

    def statistics(self) -> dict[str, StepStatistics]:
        """Returns the statistics of each step, by name."""
        steps = (*self._steps.values(), *self._loops.values())
        return {step.name: step.statistics() for step in steps}

    def close(self) -> None:
        """Closes all graphs, after their work is done, and drops the launches.  Idempotent."""
        for step in (*self._steps.values(), *self._loops.values()):
            step.close()
        self.graph_cache.close()
        self._ready.clear()
        self._prepared.clear()
        self._bounds.clear()


def _slots_to_verify(plan: BufferPlan) -> tuple[Slot, ...]:
    kept = ("cache", "history", "state", "logits", "biases")
    state = {name: plan.buffers[name] for name in kept}
    scratch = {name: buffer for name, buffer in plan.buffers.items() if name not in state}
    return (
        Slot("rows", plan.rows.buffer, "input", size="rows", poison=_POISON_ROWS),
        Slot("ring", plan.ring, "state"),
        Slot("logprobs", plan.logprobs, "state"),
        Slot("allowed", plan.allowed, "state"),
        *(Slot(name, buffer, "state") for name, buffer in state.items()),
        *(Slot(name, buffer, "scratch") for name, buffer in scratch.items()),
    )
