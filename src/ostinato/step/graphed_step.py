"""`GraphedStep`: a function of stream work that is run eagerly, then captured, then replayed.

This is the door of declared slots: it makes a `Work` of each call, by its sizes, and an `Engine`
decides what the call becomes.  With `build="record"` the first call is recorded (a real run) and
the graph is built from the recording.

An eager run gets the real sizes.  A graph is made for the bucketed sizes; the rows in between are
padding, and `step.slots` has the contract for them.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from ostinato import settings as _settings
from ostinato.driver.api import CaptureMode, named_choice, parse_bytes, require_word, whole_number
from ostinato.driver.closeable import Closeable
from ostinato.driver.stream import Stream, require_stream
from ostinato.errors import (
    CaptureBrokenError,
    ClosedError,
    ContextPoisonedError,
    InputError,
    NotHeldError,
    OstinatoError,
    StateLostError,
)
from ostinato.explain.times import ReplayProfile, resolved
from ostinato.graph import (
    GraphExec,
    Submission,
    capture,
    first_missing,
    submissions,
)
from ostinato.graph.capturing import ModeName
from ostinato.memory import CapturePool, PoolState
from ostinato.settings import ReplaySettings
from ostinato.step.cache import GraphCache
from ostinato.step.check import CheckReport, Finding, check_runs
from ostinato.step.engine import Call, Change, Engine, Work
from ostinato.step.held import HeldReplay
from ostinato.step.policy import REPLAY, Action, Decision, Reason
from ostinato.step.sizes import NONE_READ, Sizes, StepKey, bucket_of, checked_sizes, sizes_of
from ostinato.step.slots import Slot, check_slots, check_verify
from ostinato.step.statistics import StepStatistics
from ostinato.step.work import work_digest

if TYPE_CHECKING:
    from ostinato.step.store import GraphStore

_numbers = itertools.count(1)
_REMEMBERED = 4096
"""The number of combinations of sizes that a step keeps; over it, the oldest are dropped."""


StepFunction: TypeAlias = Callable[[Stream, Sizes], object]
"""The function of a step: submits work of the given sizes to the stream."""
Builder: TypeAlias = Callable[[Stream, Sizes], GraphExec]
"""A function that makes the executable for (bucketed) sizes; it may upload it on the stream."""


@dataclass(slots=True, eq=False)
class SizedCall(Call):
    """Calls with the same sizes."""

    sizes: dict[str, int] = field(default_factory=dict)
    buckets: dict[str, int] = field(default_factory=dict)


class GraphedStep(Closeable):
    """A step that replays a graph where possible, and runs eagerly otherwise.

    `run(stream, sizes)` must submit all its work to the stream (and streams forked from it), at
    fixed addresses.  Values that change from call to call must be in device memory: the capture
    freezes host numbers.  `sizes.rows` (`Sizes`) is the real size in an eager run, and the bucket
    where a graph is made.  Rows beyond the real size are padding; `step.slots` has the contract for
    them.  Kernels can read the real size on the device: `sizes.on_device("rows")`.

    Graphs belong to the step: another step has its own, even with the same name in the same cache.
    Steps with the same `share` use each other's graphs and sizes on the device; the caller must
    make sure that they do the same work on the same memory, and one after the other.

    `slots` are the buffers that the step reads and writes; `verify` needs them.  "first" checks
    each graph at its first replay, and again at the first with padding of each size; a number n
    also checks every n-th replay; "off" never checks.  A check that fails quarantines the
    key, restores the memory that it changed and runs the call eagerly, or raises VerificationError
    if `strict`.  If the step keeps state on the host, this and all later calls raise
    VerificationError (unless graphs are switched off): captures and checks call `run` too, so no
    run is known to be right until the caller has corrected that state and calls `forget`.  Memory
    that the step writes and no slot declares is checked up to `check_limit` bytes.  `step.check`
    lists what a check finds.

    `strict`: a call that would run eagerly although graphs are on raises EagerRunError, and nothing
    of it runs; later calls of a key whose check failed raise VerificationError.  Warm-ups, recorded
    runs, calls inside another capture, and calls while `graphs` is False or `profiling` is set run
    eagerly without an error.  `Reason.silent` says which reasons are errors.

    `preconditions` are called before each call; assign the attribute to replace them.  If one
    returns a false value, the call runs eagerly, with the reason PRECONDITION and the names of the
    false ones.  `warmups` eager runs come before a capture; a capture that lacks an operation of
    the last warm-up is refused.  `preload` is called once, before the first capture and outside of
    it, to load the kernels of the step (`lambda: device.modules.preload(kernels)`).
    `builder(stream, sizes)`, if given, makes the executable in place of a capture of `run`, for
    graphs that a capture cannot make, such as a loop.  Its graph must do the same as `run`, which
    still makes the eager runs.  An exception of either quarantines the key, except a ClosedError or
    PoolSealedError: then the next call tries again.

    `repeatable`: a run that the driver refused half-way may be run again from its start, because
    only its last launch changes memory that the run reads.  Then a call with `build="record"` whose
    recorded run is refused runs eagerly; without it, or for a step that is `strict`, the call
    raises the driver's error if any work was done before.

    `store`: a key's graph is restored from it when the key is first called, bound to the slots'
    buffers, without a warm-up; a graph that does not fit is captured as usual
    (`store.statistics()` has the reason).  `save` writes the step's graphs.  The store names the
    memory that the step reads besides its slots, such as weights.  A graph whose `run` had other
    code, defaults or closure is not restored.  For functions that `run` calls, give the store a
    `tag`, and use `verify`.  Two steps with one store need two names.

    `mode` and `pool` are those of `Capture`.  `name` is the first part of its keys' text; None: the
    name of `run`.

    `graphs` None: graphs are on unless OSTINATO_NO_GRAPHS is on.  `settings` override the
    environment; giving a `profile` switches profiling on.

    Calls of one step are serialised, and so are calls of several steps on one stream.  Not
    guaranteed, but found by `verify`: that a `run` which keeps state outside device memory gives
    the same answers by replay, and that a graph contains work that another library submits to other
    streams.
    """

    def __init__(
        self,
        run: StepFunction,
        *,
        stream: Stream,
        cache: GraphCache,
        name: str | None = None,
        share: str | None = None,
        slots: Sequence[Slot] = (),
        build: Literal["capture", "record"] = "capture",
        warmups: int = 1,
        graphs: bool | None = None,
        verify: Literal["off", "first"] | int = "off",
        strict: bool = False,
        check_limit: int | str = "64 MiB",
        preconditions: Mapping[str, Callable[[], bool]] | None = None,
        preload: Callable[[], object] | None = None,
        builder: Builder | None = None,
        repeatable: bool = False,
        mode: ModeName = "thread_local",
        pool: CapturePool | None = None,
        settings: ReplaySettings | None = None,
        profile: ReplayProfile | None = None,
        store: GraphStore | None = None,
    ) -> None:
        require_stream(stream, "stream")
        try:
            conditions = dict(preconditions or {})
        except (TypeError, ValueError):
            raise InputError(
                f"preconditions: a dict of functions by name is needed, not {preconditions!r}"
            ) from None
        functions: list[tuple[str, object]] = [("run", run), *conditions.items()]
        functions += [("preload", preload)] if preload is not None else []
        functions += [("builder", builder)] if builder is not None else []
        for what, function in functions:
            if not callable(function):
                raise InputError(f"{what}: a function is needed, not {type(function).__name__}")
        _require_sizes("run", run)
        if builder is not None:
            _require_sizes("builder", builder)
        kinds: list[tuple[str, object, type]] = [("cache", cache, GraphCache)]
        if pool is not None:
            kinds.append(("pool", pool, CapturePool))
        if store is not None:
            from ostinato.step.store import GraphStore

            kinds.append(("store", store, GraphStore))
        for what, value, kind in kinds:
            if not isinstance(value, kind):
                raise InputError(f"{what}: a {kind.__name__} is needed, not {value!r}")
        require_word("build", build, ("capture", "record"))
        named_choice("mode", mode, CaptureMode)
        if builder is not None and build == "record":
            raise InputError("a builder makes the graph itself, so nothing is recorded for it")
        least = whole_number(warmups)
        if least is None or least < 0:
            raise InputError(f"warmups={warmups!r}: a whole number of 0 or more is needed")
        if not isinstance(share, str | None):  # numbers are the steps' own
            raise InputError(f"share={share!r}: a text is needed, the name of the graphs to share")
        for what, owner in (("stream", stream), ("store", store), ("pool", pool)):
            if owner is not None and owner.context is not cache.context:
                raise InputError(f"the step's {what} is of another device than its cache")
        check_verify(verify, slots)
        check_slots(slots, stream.context)
        self.run = run
        self.stream = stream
        self.cache = cache
        self.name: str = name or str(getattr(run, "__qualname__", type(run).__name__))
        self.slots = tuple(slots)
        self.store = store
        self.build = build
        self.warmups = least
        self.repeatable = repeatable
        self.graphs = _settings.graphs_enabled(graphs)
        self.profiling = False
        """Set this while a profiler times single operations: calls then run eagerly."""
        self.verify = verify
        self.strict = strict
        self.preconditions: Mapping[str, Callable[[], bool]] = conditions
        self._preload = preload
        self._preloaded: object = None
        self._builder = builder
        self.mode = mode
        self.pool = pool
        self._identity: int | str = next(_numbers) if share is None else share
        self._sizes = sizes_of(cache, share)
        guarded = ((self._sizes, "complete"),)
        self._turn = stream.turn.lock
        self.settings, self.profile = resolved(settings, profile)
        self._engine = Engine(
            cache, self._turn, guarded, settings=self.settings, profile=self.profile
        )
        self._lock = self._engine.lock
        self._work = "" if store is None else work_digest(run, builder)
        self._claim = None if store is None or share is not None else store.claim(self.name)
        self._check_limit = parse_bytes(check_limit, "check_limit", 1)
        self._calls: dict[tuple[tuple[str, int], ...], SizedCall] = {}
        self._buckets, self._epoch = cache.buckets, cache.epoch
        self._finalizer = weakref.finalize(
            self, stream.context.retire, partial(_evict, cache, self._engine.keys)
        )
        self._finalizer.atexit = False

    def __setattr__(self, name: str, value: object) -> None:
        """Changes the epoch: every public attribute can forbid a replay."""
        if name == "preconditions":  # an item added to a dict later would change no epoch
            value = MappingProxyType(dict(cast(Mapping[str, Callable[[], bool]], value)))
        super().__setattr__(name, value)
        if not name.startswith("_") and "_engine" in vars(self):
            self._engine.changed()

    def __repr__(self) -> str:
        state = "" if self._finalizer.alive else ", closed"
        broken = self._engine.broken
        refused = "" if broken is None else f", serves no key: {broken[0]}"
        graphs = f"{len(self._engine.keys)} graphs{refused}{state}"
        return f"<GraphedStep {self.name!r} on {self.stream!r}, {graphs}>"

    # --- sizes and keys
    def key(self, **sizes: int) -> StepKey:
        """Returns the cache key of these sizes.  Raises InputError for sizes without a bucket."""
        with self._lock:
            call = self._call(sizes)
        if call.unfit is not None:
            raise InputError(call.unfit[1])
        assert isinstance(call.key, StepKey)
        return call.key

    def _call(self, sizes: Mapping[str, int]) -> SizedCall:
        """Returns the calls of these sizes.  Raises InputError for no valid sizes, ClosedError."""
        if self._epoch is not self.cache.epoch:
            self._require_open()
            if self._buckets is not self.cache.buckets:
                self._buckets = self.cache.buckets
                while self._calls:
                    self._engine.drop(self._calls.popitem()[1])
            self._epoch = self.cache.epoch
        known = None
        for size in sizes.values():
            if type(size) is not int:  # True and 3.0 are equal to whole numbers, but are not sizes
                break
        else:
            known = self._calls.get(tuple(sizes.items()))
        if known is None:
            # Keyed by whole numbers, not by the given objects: an array that is a size may change.
            checked = checked_sizes(sizes)
            given = tuple(checked.items())
            known = self._calls.get(given)
            if known is None:
                known = self._calls[given] = self._bucketed(checked)
                if len(self._calls) > _REMEMBERED:
                    self._engine.drop(self._calls.pop(next(iter(self._calls))))
        return known

    def _bucketed(self, sizes: dict[str, int]) -> SizedCall:
        schemes, unfit = self._buckets, None
        buckets: dict[str, int] = dict(sizes)
        for name, size in sizes.items():
            if size > schemes.limit:
                over = f"{name}={size} is over the limit {schemes.limit}"
                unfit = unfit or (Reason.OVER_BUCKETS, over)
            else:
                buckets[name] = bucket_of(schemes, name, size)
        for slot in self.slots:
            rows = slot.rows(sizes)
            if rows is not None and slot.size is not None:  # a graph must not exceed the buffer
                buckets[slot.size] = min(buckets[slot.size], len(slot.buffer))
        key = StepKey(self.name, self._identity, tuple(sorted(buckets.items())))
        return SizedCall(
            key,
            used=sum(sizes.values()),
            room=sum(buckets.values()),
            padded=frozenset(name for name in sizes if sizes[name] != buckets[name]),
            unfit=unfit,
            given=sizes,
            sizes=sizes,
            buckets=buckets,
        )

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError(f"the step {self.name!r} is closed; make another")

    # --- calling
    def __call__(self, *unnamed: object, **sizes: int) -> Decision:
        """Runs the step once for these sizes; returns the decision.  Does not wait.

        Raises InputError for a size that is no whole number of 0 or more, or over a slot's rows;
        the errors of `run` in an eager run; VerificationError and EagerRunError (see the class);
        StateLostError if a check could not put back what it changed; ContextPoisonedError;
        ClosedError; TypeError for a size without its name.
        """
        if unnamed:
            raise self._unnamed()
        try:
            call = self._calls.get(tuple(sizes.items()))
        except TypeError:  # an object that cannot be hashed is no size
            call = None
        try:
            again = None if call is None or call.repeat is None else call.repeat.again(sizes)
        except ContextPoisonedError:
            raise
        except OstinatoError as error:
            with self._turn, self._lock:
                return self._engine.refused(_StepWork(self, self._call(sizes)), error)
        if again is not None:
            return REPLAY
        with self._turn, self._lock:
            if self._sizes.running:  # called by `run`, or by that of a step with these sizes
                with self._sizes.nested(self.stream):
                    return self(**sizes)
            return self._engine.call(_StepWork(self, self._call(sizes)))

    def _unnamed(self) -> TypeError:
        """Returns the error of a call that gives a size without its name."""
        names = {slot.size: None for slot in self.slots if slot.size is not None} or ["rows"]
        given = ", ".join(f"{name}=…" for name in names)
        return TypeError(f"the step {self.name!r} takes its sizes by name: step({given})")

    def save(self, *, check: bool = True) -> dict[StepKey, str]:
        """Writes the step's present graphs to its store; returns why some were not written.

        Raises InputError for a step without a store.
        """
        if self.store is None:
            raise InputError(f"the step {self.name!r} has no store; give it one (store=)")
        refused: dict[StepKey, str] = {}
        with self._turn, self._lock:
            inputs, outputs = self._memory()
            for key in [key for key in self._engine.keys if isinstance(key, StepKey)]:
                with suppress(NotHeldError), self.cache.hold(key) as executable:
                    self._sizes.set(dict(key.sizes), self.stream)  # the check launches it
                    try:
                        why = self.store.save_executable(
                            (key, self._work),
                            executable,
                            inputs=inputs,
                            outputs=outputs,
                            check=check,
                        )
                    except StateLostError as lost:
                        self._engine.lose(lost)
                        raise
                    if why:
                        refused[key] = why
        return refused

    def _memory(self) -> tuple[dict[str, object], dict[str, object]]:
        """Returns the memory that a launch reads and writes, by the names of slots and sizes."""
        read, written = ("input", "state"), ("output", "state")
        inputs: dict[str, object] = {
            # The padding of an output keeps its content.
            slot.name: slot.buffer
            for slot in self.slots
            if slot.role in read or (slot.role == "output" and slot.size is not None)
        }
        outputs: dict[str, object] = {s.name: s.buffer for s in self.slots if s.role in written}
        return inputs | self._sizes.memory, outputs

    def prepare(self, **sizes: int) -> Decision:
        """Makes the graph of these sizes now, by capture or by the `builder`; no work runs.

        Its first launch uploads it: uploaded graphs that wait slow others (`GraphExec.upload`).
        Returns the decision: BUILD if the graph was made, REPLAY if it was there, EAGER or REFUSE
        with the reason if a call would not use one.  Everything that a first run initialises must
        be initialised before (modules preloaded, libraries warmed up).  A failure quarantines the
        key, as in a call.  Raises InputError as a call does, and for a step with `build="record"`.
        """
        with self._turn, self._lock:
            if self._sizes.running:
                with self._sizes.nested(self.stream):
                    return self.prepare(**sizes)
            work = _StepWork(self, self._call(sizes))
            entry, decision = self._engine.next(work)
            if decision.reason is Reason.WARMING_UP or decision.action is Action.BUILD:
                if self.build == "record":
                    raise InputError("a recorded step is built by its first call, not beforehand")
                decision = Decision(Action.BUILD, Reason.FIRST_USE)
                return self._engine.make(work, entry) or decision
            return decision

    def hold(self, **sizes: int) -> HeldReplay:
        """Returns the graph of these sizes, for many replays in a row that each cost only a launch.

        Makes the graph first if the next call would capture it.  Raises NotHeldError, with the
        Decision, if a call would do more than replay (run eagerly, record, check, count replays for
        `verify=N`) or would raise: call the step then.  `graphs`, `preconditions` and the other
        conditions are not checked again while the graph is held.
        Raises ContextPoisonedError and InputError as a call does.
        """
        with self._turn, self._lock:
            if self._sizes.running:
                with self._sizes.nested(self.stream):
                    return self.hold(**sizes)
            work = _StepWork(self, self._call(sizes))
            held = self._engine.hold(work, work.relaunch)
        if isinstance(held, Decision):
            why = f"no replay is held, because a call would do more than replay: {held}"
            raise NotHeldError(f"{why}; call the step", held)
        return held

    def forget(self, **sizes: int) -> None:
        """Ends the quarantine of the key of these sizes, and allows calls again after an error of
        the step's state, which stops all keys.

        Call it after the cause was corrected: for a quarantine, the fault of the graph; for a
        VerificationError, the state on the host; for a StateLostError, the content of the slots.
        Raises InputError as `key` does, and then changes nothing.
        """
        with self._lock:
            self._engine.forget(self.key(**sizes))

    # --- numbers and lifetime
    def statistics(self) -> StepStatistics:
        """Returns the counts of the step so far."""
        with self._lock:
            return StepStatistics(**self._engine.statistics())

    def close(self) -> None:
        """Takes the step's graphs out of the cache, and frees the step's memory.  Idempotent.

        Later calls raise ClosedError.
        """
        with self._lock:
            self._finalizer.detach()
            self._claim = None
            self._engine.changed()
            _evict(self.cache, self._engine.keys)
            self._sizes.close()


class _StepWork(Work):
    """One call of a step."""

    __slots__ = ("call", "options", "step", "stream")

    call: SizedCall

    def __init__(self, step: GraphedStep, call: SizedCall) -> None:
        self.step = self.options = step
        self.call = call
        self.stream = step.stream

    # --- running
    def begin(self, *, inside: bool = False) -> None:
        sizes = self.step._sizes
        (sizes.begin_in_capture if inside else sizes.begin)(self.call.sizes, self.stream)

    def run(self, *, padded: bool = False) -> None:
        sizes = self.step._sizes
        try:
            sizes.running, sizes.complete = True, None  # calls inside the run must not be repeated
            self.step.run(self.stream, self._sizes(padded=padded))
        finally:
            sizes.running = False
        sizes.end()

    def _sizes(self, *, padded: bool) -> Sizes:
        values = self.call.buckets if padded else self.call.sizes
        return Sizes(values, self.step._sizes, self.stream)

    def warm(self) -> None:
        entry = self.call.entry
        assert entry is not None
        with submissions(self.stream.context) as made:
            self.run()
        entry.submitted = tuple(made)

    # --- graphs
    @property
    def recorded(self) -> bool:
        return self.step.build == "record"

    @property
    def repeatable(self) -> bool:
        return self.step.repeatable

    def build(self) -> GraphExec:
        step = self.step
        if step._preload is not None:
            # Kept: the module of a kernel without a reference may be unloaded.
            step._preloaded, step._preload = step._preload(), None
        if step._builder is not None:
            return step._builder(self.stream, self._sizes(padded=True))
        with capture(self.stream, mode=step.mode, pool=step.pool, contained=True) as under_way:
            self.run(padded=True)
        assert self.call.entry is not None
        _require_all(self.call.entry.submitted, under_way.submissions)
        return under_way.graph.instantiate()

    def bind(self) -> None:
        sizes = self.step._sizes
        there = sizes.complete
        there = there is self.call.sizes or there is NONE_READ
        if not there or self.stream.context.taps:
            sizes.set(self.call.sizes, self.stream)

    @property
    def binds(self) -> bool:
        return self.step._sizes.asked

    def relaunch(self, launch: Callable[[], None]) -> None:
        """Replays a held graph: takes the stream's turn, binds, and launches."""
        sizes = self.step._sizes
        with self.step._turn:  # another thread's call may have other sizes
            if sizes.running:
                with sizes.nested(self.stream):
                    self.relaunch(launch)
                return
            self.bind()
            launch()

    def wanted(self) -> tuple[object, ...]:
        return (self.step._sizes.wanted(self.call.sizes),)

    def closed_to_builds(self) -> tuple[Reason, str] | None:
        step, pool = self.step, self.step.pool
        captures = step.build == "capture" and step._builder is None
        if pool is None or pool.state is not PoolState.SEALED or not captures:
            return None
        return Reason.POOL_SEALED, pool.sealed_text("a capture")

    def restored(self) -> GraphExec | None:
        step = self.step
        if step.store is None:
            return None
        step._sizes.begin(self.call.sizes, self.stream)
        inputs, outputs = step._memory()
        made = step.store.executable((self.call.key, step._work), inputs | outputs)
        if made is not None:
            step._sizes.note_restored()
        return made

    def not_restored(self, why: str) -> None:
        assert self.step.store is not None
        self.step.store.note_refused(why)

    # --- checks
    def check(self, executable: GraphExec, launch: Callable[[Change], object]) -> CheckReport:
        from ostinato.step.declared import Declared

        self.bind()
        step = self.step
        memory = Declared(
            step.slots,
            self.call.sizes,
            self.stream,
            executable,
            partial(self.run, padded=True),
            own=step._sizes.ranges,
            limit=step._check_limit,
        )
        return check_runs(memory, memory.eager, lambda turn: launch(None))

    def watch(self) -> Callable[[], Finding | None]:
        from ostinato.step.declared import Declared

        memory = Declared(self.step.slots, self.call.sizes, self.stream)
        before = memory.read()

        def look() -> Finding | None:
            finding = memory.fault(before, memory.read())
            if finding is not None:
                memory.restore(before)
            return finding

        return look


def _require_sizes(what: str, function: Callable[..., object]) -> None:
    """Raises InputError unless a function can be called with a stream and sizes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # compiled code need not have a signature
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise InputError(
            f"{what} is called as {what}(stream, sizes), with sizes.rows for a size called rows, "
            f"and it takes {signature}"
        ) from None


def _require_all(eager: Sequence[Submission] | None, captured: Sequence[Submission]) -> None:
    """Raises CaptureBrokenError if a capture lacks an operation that the warm-up submitted."""
    missing = None if eager is None else first_missing(eager, captured)
    if missing is not None:
        raise CaptureBrokenError(
            f"the capture has {len(captured)} operations, the eager run before had "
            f"{len(eager or ())}: {missing} is missing. What is done only once, or by a condition "
            "on the host, is not in the graph: do it before the step, or in each run"
        )


def _evict(cache: GraphCache, keys: set[Hashable]) -> None:
    for key in keys.copy():
        cache.evict(key)
    keys.clear()
