"""`GraphedStep`: a function of stream work that is run eagerly, then captured, then replayed.

    first call of a key   -> eager (warm-up: libraries initialise, modules load); its answer counts
    next                  -> captured (nothing runs), then replayed
    from then on          -> replayed

with `build="record"`: the first call is recorded (a real run) and the graph built from it.  A key
that cannot be captured, or whose replay is found wrong, is quarantined with its reason and served
eagerly from then on.

An eager run gets the real sizes.  A graph is made for the bucketed sizes; the rows in between are
padding, and `replay.slots` has the contract for them.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from ostinato import settings as _settings
from ostinato.driver.api import CaptureMode, CaptureStatus, whole_number
from ostinato.driver.closeable import Closeable
from ostinato.driver.forking import new_lock
from ostinato.driver.stream import Operation, Stream, require_stream
from ostinato.errors import (
    CaptureBrokenError,
    CaptureLimitError,
    ClosedError,
    ContextPoisonedError,
    DriverError,
    EagerRunError,
    InputError,
    OstinatoError,
    PoolSealedError,
    StateLostError,
    VerificationError,
)
from ostinato.explain.times import (
    NotLaunched,
    ReplayProfile,
    replay_as_set,
    resolved,
    run_replay,
)
from ostinato.graph import (
    GraphExec,
    Recording,
    Submission,
    capture,
    first_missing,
    operations,
    record,
    submissions,
)
from ostinato.memory import CapturePool, PoolState
from ostinato.settings import ReplaySettings
from ostinato.step.budget import parse_bytes
from ostinato.step.cache import GraphCache
from ostinato.step.held import HeldCounts, HeldReplay, launch_in_turn
from ostinato.step.key_state import TIMED_EVERY, KeyState, remember
from ostinato.step.policy import Action, Decision, Reason, Situation, decide, fall_back
from ostinato.step.sizes import Call, Sizes, StepKey, bucket_of, checked_sizes, sizes_of
from ostinato.step.slots import Role, Slot, check_slots, check_verify
from ostinato.step.statistics import Counts, StepStatistics
from ostinato.step.work import work_digest

if TYPE_CHECKING:
    from ostinato.step.check import CheckReport, Finding
    from ostinato.step.store import GraphStore

_log = logging.getLogger(__name__)
_numbers = itertools.count(1)

_ERRORS: Mapping[Reason, type[OstinatoError]] = {
    Reason.STATE_LOST: StateLostError,
    Reason.HOST_STATE: VerificationError,
    Reason.MISMATCH: VerificationError,
}
"""What a call raises if it is refused for this reason; EagerRunError for others."""
_REFUSALS = 3
"""A key is quarantined after so many refused replays in a row."""


Work: TypeAlias = Callable[[Stream, Sizes], object]
"""What a step runs: submits work of the given sizes to the stream."""
Builder: TypeAlias = Callable[[Stream, Sizes], GraphExec]
"""Makes the executable of the given (bucketed) sizes, uploaded on the stream or not."""


class GraphedStep(Closeable):
    """A step that replays a graph where it can.

    `run(stream, sizes)` must submit all its work to the stream (and streams forked from it), at
    fixed addresses.  Whatever changes from call to call must be in device memory: host numbers are
    frozen by the capture.  `sizes.rows` (`Sizes`) is the real size in an eager run, and the bucket
    where a graph is made.  Rows beyond the real size are padding; `step.slots` has the contract for
    them.  Kernels can read the real size on the device: `sizes.on_device("rows")`.

    Graphs belong to the step: another step has its own, even with the same name in the same cache.
    Steps that are given the same `share` use each other's graphs and sizes on the device; the
    caller must make sure that they do the same work on the same memory, and one after the other.

    `slots` are the buffers that the step reads and writes; `verify` needs them.  "first" checks
    each graph at its first replay, and again at the first with padding of each size; a number n
    also checks every n-th replay; "off" or None never checks.  A check that fails quarantines the
    key, restores what it changed and runs the call eagerly, or raises VerificationError if
    `strict`.  If the step keeps state on the host, this and all later calls raise VerificationError
    (unless graphs are switched off): captures and checks call `run` too, so no run is known to be
    right until the caller has corrected that state and calls `release`.  Memory that the step
    writes and that no slot declares is checked up to `check_limit`.  `replay.check` describes what
    a check finds.

    `strict`: a call that would run eagerly although graphs are on raises EagerRunError, and nothing
    of it runs; later calls of a key whose check failed raise VerificationError.  Warm-ups, recorded
    runs, calls inside another capture, and calls while `enabled` is False or `profiling` is set run
    eagerly without an error.  `Reason.silent` says which reasons are errors.

    `preconditions` are called before each call.  If one returns a false value, the call runs
    eagerly, with the reason PRECONDITION and the names of the false ones.  `warmups` eager runs
    come before a capture; a capture that lacks an operation of the last warm-up is refused.
    `preload` is called once, before the first capture and outside of it, to load what the step
    launches (`lambda: device.modules.preload(kernels)`).  `builder(stream, sizes)`, if given,
    makes the executable in place of a capture of `run`, for graphs that a capture cannot make, such
    as a loop.  Its graph must do the same as `run`, which is still called for eager runs.  An
    exception of either quarantines the key, except a ClosedError or PoolSealedError: then the next
    call tries again.

    `repeatable`: a run that the driver refused half-way may be run again from its start, since what
    it reads is changed by its last launch alone.  Then a call with `build="record"` whose recorded
    run is refused runs eagerly; without it, or for a step that is `strict`, it raises the driver's
    error if anything was done before.

    `store`: a key's graph is restored from it when the key is first called, bound to the slots'
    buffers, without a warm-up; one that does not fit is captured as usual (`store.statistics()`
    says why).  `save` writes the step's graphs.  The store names what the step reads besides its
    slots, such as weights.  A graph whose `run` had other code, defaults or closure is not taken.
    For what `run` calls, give the store a `tag`, and use `verify`.  Two steps with one store need
    two names.

    `mode` and `pool` as for `Capture`.  `name` is the first part of its keys' text; None: the name
    of `run`.

    `enabled` None: graphs are on unless OSTINATO_NO_GRAPHS is "1".  `settings` take precedence over
    the environment; giving a `profile` switches profiling on.

    Calls of one step are serialised, and so are calls of several steps on one stream.  Not
    guaranteed, but found by `verify`: that a `run` which keeps state outside device memory gives
    the same answers by replay, and that a graph contains work that another library submits to other
    streams.
    """

    def __init__(
        self,
        run: Work,
        *,
        stream: Stream,
        cache: GraphCache,
        name: str | None = None,
        share: str | None = None,
        slots: Sequence[Slot] = (),
        build: Literal["capture", "record"] = "capture",
        warmups: int = 1,
        enabled: bool | None = None,
        verify: Literal["off", "first"] | int | None = "off",
        strict: bool = False,
        check_limit: int | str = "64 MiB",
        preconditions: Mapping[str, Callable[[], bool]] | None = None,
        preload: Callable[[], object] | None = None,
        builder: Builder | None = None,
        repeatable: bool = False,
        mode: CaptureMode = CaptureMode.THREAD_LOCAL,
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
        optional = [("preload", preload), ("builder", builder)]
        functions = [("run", run), *(option for option in optional if option[1] is not None)]
        for what, function in [*functions, *conditions.items()]:
            if not callable(function):
                raise InputError(f"{what}: a function is needed, not {type(function).__name__}")
        for what, made in (("run", run), ("builder", builder)):
            if made is not None:
                _require_sizes(what, made)
        options: list[tuple[str, object, type]] = [
            ("pool", pool, CapturePool),
        ]
        if store is not None:
            from ostinato.step.store import GraphStore

            options.append(("store", store, GraphStore))
        given = [option for option in options if option[1] is not None]
        for what, value, kind in [
            ("cache", cache, GraphCache),
            ("mode", mode, CaptureMode),
            *given,
        ]:
            if not isinstance(value, kind):
                raise InputError(f"{what}: a {kind.__name__} is needed, not {value!r}")
        if build not in ("capture", "record"):
            raise InputError(f'build={build!r}: "capture" or "record"')
        if builder is not None and build == "record":
            raise InputError("a builder makes the graph itself, so nothing is recorded for it")
        least = whole_number(warmups)
        if least is None or least < 0:
            raise InputError(f"warmups={warmups!r}: a whole number of 0 or more is needed")
        if not isinstance(share, str | None):  # numbers are the steps' own
            raise InputError(f"share={share!r}: a text is needed, the name of the graphs to share")
        if stream.context is not cache.context:
            raise InputError("the step's stream is of another device than its cache")
        if store is not None and store.context is not cache.context:
            raise InputError("the step's store is of another device than its cache")
        if pool is not None and pool.context is not cache.context:
            raise InputError("the step's pool is of another device than its cache")
        verify = "off" if verify is None else verify
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
        self._repeatable = repeatable
        self.enabled = _settings.graphs_enabled(enabled)
        self.profiling = False
        """Set it while a profiler times single operations: calls run eagerly then."""
        self.verify = verify
        self.strict = strict
        self.preconditions = conditions
        self._preload = preload
        self._preloaded: object = None
        self._builder = builder
        self.mode = mode
        self.pool = pool
        self.settings, self.profile = resolved(settings, profile)
        self._plain = self.settings.plain
        self._identity: int | str = next(_numbers) if share is None else share
        self._sizes = sizes_of(cache, share)
        self._work = "" if store is None else work_digest(run, builder)
        self._claim = None if store is None or share is not None else store.claim(self.name)
        self._check_limit = parse_bytes(check_limit)
        self._last_check: CheckReport | None = None
        self._calls: dict[tuple[tuple[str, int], ...], Call] = {}
        self._buckets = cache.buckets
        self._states: dict[StepKey, KeyState] = {}
        self._broken: tuple[Reason, str] | None = None
        """Why no key is served until `release`, and the text of the error."""
        self._keys: set[Hashable] = set()
        """Keys under which this step put graphs into the cache."""
        self._dropped = Counts()
        """Of keys whose records were dropped."""
        self._held: list[tuple[StepKey, HeldCounts]] = []
        self._given_back: deque[tuple[StepKey, HeldCounts]] = deque()
        """Of graphs that are not held any more, until they are counted."""
        self._lock = new_lock()
        """Taken after the stream's turn: a step may be called inside of another's run."""
        self._finalizer = weakref.finalize(
            self, stream.context.retire, partial(_evict, cache, self._keys)
        )
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        state = "" if self._finalizer.alive else ", closed"
        refused = "" if self._broken is None else f", serves no key: {self._broken[0]}"
        graphs = f"{len(self._keys)} graphs{refused}{state}"
        return f"<GraphedStep {self.name!r} on {self.stream!r}, {graphs}>"

    # --- sizes and keys
    def key(self, **sizes: int) -> StepKey:
        """The cache key of these sizes.  Raises InputError for sizes that have no bucket."""
        with self._lock:
            call = self._call(sizes)
        if call.over_buckets is not None:
            raise InputError(call.over_buckets)
        return call.key

    def _call(self, sizes: Mapping[str, int]) -> Call:
        """The sizes in buckets.  Raises InputError for no size or one over a slot, ClosedError."""
        self._require_open()
        if self._buckets is not self.cache.buckets:
            self._buckets = self.cache.buckets
            self._calls.clear()
        known = None
        for size in sizes.values():
            if type(size) is not int:  # True and 3.0 are equal to whole numbers, and no sizes
                break
        else:
            known = self._calls.get(tuple(sizes.items()))
        if known is None:
            # By whole numbers, and not as given: an array that is a size may change.
            checked = checked_sizes(sizes)
            given = tuple(checked.items())
            known = self._calls.get(given)
            if known is None:
                known = self._bucketed(checked)
                remember(self._calls, given, known)
        return known

    def _bucketed(self, sizes: dict[str, int]) -> Call:
        for slot in self.slots:
            slot.rows(sizes)
        schemes, over_buckets = self._buckets, None
        buckets: dict[str, int] = dict(sizes)
        for name, size in sizes.items():
            if size > schemes.limit:
                over_buckets = over_buckets or f"{name}={size} is over the limit {schemes.limit}"
            else:
                buckets[name] = bucket_of(schemes, name, size)
        over_slot = next(
            (
                f"{slot.size}={buckets[slot.size]}, slot {slot.name!r} has {len(slot.buffer)} rows"
                for slot in self.slots
                if slot.size is not None and buckets[slot.size] > len(slot.buffer)
            ),
            None,
        )
        key = StepKey(self.name, self._identity, tuple(sorted(buckets.items())))
        sums = sum(sizes.values()), sum(buckets.values())
        padded = frozenset(name for name in sizes if sizes[name] != buckets[name])
        return Call(key, sizes, buckets, *sums, padded, over_buckets, over_slot)

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError(f"the step {self.name!r} is closed; make another")

    def _state(self, key: StepKey) -> KeyState:
        state = self._states.get(key)
        if state is None:
            state = KeyState()
            dropped = remember(self._states, key, state)
            if dropped is not None:
                self._dropped.add(dropped.counts)
        return state

    # --- calling
    def __call__(self, *unnamed: object, **sizes: int) -> Decision:
        """Runs the step once for these sizes; returns what was done and why.  Does not wait.

        Raises InputError for a size that is no whole number of 0 or more, or over a slot's rows;
        what `run` raises in an eager run; VerificationError and EagerRunError (see the class);
        StateLostError if a check could not put back what it changed; ContextPoisonedError;
        ClosedError; TypeError for a size without its name.
        """
        if unnamed:
            raise self._unnamed()
        with self.stream.turn.lock, self._lock:
            if self._sizes.running:  # called by `run`, or by that of a step with the same sizes
                with self._sizes.nested(self.stream):
                    return self(**sizes)
            call = self._call(sizes)
            state = self._state(call.key)
            counts = state.counts
            counts.calls += 1
            counts.used += call.used
            counts.padded += call.room
            if self.store is not None and not state.looked:
                self._restore(self.store, call, state)
            # Held, so that another thread's eviction cannot close it before it is launched.
            with self.cache.hold(call.key) as executable:
                executable = self._usable(call, executable)
                decision = decide(self._situation(call, state, executable is not None))
                if decision.action is Action.REPLAY and executable is not None:
                    return self._replay(call, state, executable, decision)
            if decision.action is Action.BUILD:
                return self._build(call, state, decision)
            return self._run_eager(call, state, decision)

    def _unnamed(self) -> TypeError:
        """The error of a call that gives a size without its name."""
        names = {slot.size: None for slot in self.slots if slot.size is not None} or ["rows"]
        given = ", ".join(f"{name}=…" for name in names)
        return TypeError(f"the step {self.name!r} takes its sizes by name: step({given})")

    def _run(self, sizes: Mapping[str, int]) -> None:
        try:
            self._sizes.running = True
            self.run(self.stream, Sizes(sizes, self._sizes, self.stream))
        finally:
            self._sizes.running = False

    def save(self, *, check: bool = True) -> dict[StepKey, str]:
        """Writes the graphs that the step has now to its store; returns why some were not written.

        Raises InputError for a step without a store.
        """
        if self.store is None:
            raise InputError(f"the step {self.name!r} has no store; give it one (store=)")
        refused: dict[StepKey, str] = {}
        with self.stream.turn.lock, self._lock:
            inputs, outputs = self._memory()
            for key in [key for key in self._keys if isinstance(key, StepKey)]:
                with self.cache.hold(key) as executable:
                    if executable is None:
                        continue
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
                        self._broken = (Reason.STATE_LOST, str(lost))
                        raise
                    if why:
                        refused[key] = why
        return refused

    def _memory(self) -> tuple[dict[str, object], dict[str, object]]:
        """What a launch reads and what it writes, by the slots' names and the sizes'."""
        read, written = (Role.INPUT, Role.STATE), (Role.OUTPUT, Role.STATE)
        inputs: dict[str, object] = {
            # The padding of an output is left as it was.
            slot.name: slot.buffer
            for slot in self.slots
            if slot.role in read or (slot.role is Role.OUTPUT and slot.size is not None)
        }
        outputs: dict[str, object] = {s.name: s.buffer for s in self.slots if s.role in written}
        return inputs | self._sizes.memory, outputs

    def _restore(self, store: GraphStore, call: Call, state: KeyState) -> None:
        """Takes a key's graph from the store, if there is one that fits.  What is wrong with the
        store raises nothing: the store counts it, and the key is captured."""
        if not self.enabled or call.key in self.cache or self.stream.context.captures:
            return
        self._sizes.begin(call.sizes, self.stream)
        state.looked = True
        inputs, outputs = self._memory()
        made = store.executable((call.key, self._work), inputs | outputs)
        if made is not None:
            self._sizes.note_restored()
            self._keys.add(call.key)
            try:
                self.cache.install(call.key, made)
            except ContextPoisonedError:
                raise
            except OstinatoError as error:
                made.close()
                store.note_refused(str(error))

    def prepare(self, **sizes: int) -> Decision:
        """Makes the graph of these sizes now, by capture or by the `builder`; nothing runs.

        Its first launch uploads it: uploaded graphs that wait slow others (`GraphExec.upload`).
        Returns the decision: BUILD if the graph was made, REPLAY if it was there, EAGER or REFUSE
        with the reason if a call would not use one.  Whatever a first run initialises must be
        initialised before (modules preloaded, libraries warmed up).  A failure quarantines the key,
        as in a call.  Raises InputError as a call does, and for a step with `build="record"`.
        """
        with self.stream.turn.lock, self._lock:
            if self._sizes.running:
                with self._sizes.nested(self.stream):
                    return self.prepare(**sizes)
            call, state, decision = self._next(sizes)
            if decision.reason is Reason.WARMING_UP or decision.action is Action.BUILD:
                if self.build == "record":
                    raise InputError("a recorded step is built by its first call, not beforehand")
                decision = Decision(Action.BUILD, Reason.FIRST_USE)
                return self._make_graph(call, state) or decision
            return decision

    def hold(self, **sizes: int) -> HeldReplay | Decision:
        """The graph of these sizes, for many replays in a row that each cost only a launch.

        Makes the graph first if the next call would capture it.  Returns a Decision, and holds
        nothing, if a call would do more than replay (run eagerly, record, check, count replays for
        `verify=N`) or would raise: call the step then.  A `with` block of a Decision raises
        InputError.  `enabled`, `preconditions` and the other conditions are not looked at again
        while the graph is held.
        Raises ContextPoisonedError and InputError as a call does.
        """
        with self.stream.turn.lock, self._lock:
            if self._sizes.running:
                with self._sizes.nested(self.stream):
                    return self.hold(**sizes)
            call, state, decision = self._next(sizes)
            if decision.action in (Action.EAGER, Action.REFUSE):
                return decision
            if isinstance(self.verify, int):
                return replace(
                    decision,
                    detail=f"not held: verify={self.verify} counts replays, and a held graph is "
                    'launched without that; call the step, or use verify="first"',
                )
            if decision.action is Action.BUILD:
                if self.build == "record" or self.verify != "off":
                    return decision
                failure = self._make_graph(call, state)
                if failure is not None:
                    return failure
            lease = ExitStack()
            executable = lease.enter_context(self.cache.hold(call.key))
            if executable is None:  # evicted at once, by another thread
                return Decision(Action.BUILD, Reason.FIRST_USE)
            if self.verify != "off" and not state.is_checked(executable, call.padded):
                lease.close()
                return replace(decision, detail="its check is due")
            self._sizes.set(call.sizes, self.stream)
            replay = partial(launch_in_turn, self.stream, executable)
            if not self._plain or self._sizes.asked:
                replay = partial(self._replay_held, call, executable)
            counts = HeldCounts(call.used, call.room)
            self._count_given_back()
            # Ended by a finaliser perhaps, in any thread, which must not wait for the step.
            lease.callback(self._given_back.append, (call.key, counts))
            self._held.append((call.key, counts))
            return HeldReplay(self.stream.context, replay, lease, counts)

    def _next(self, sizes: Mapping[str, int]) -> tuple[Call, KeyState, Decision]:
        """What a call of these sizes would do now."""
        call = self._call(sizes)
        state = self._state(call.key)
        if self.store is not None and not state.looked:
            self._restore(self.store, call, state)
        with self.cache.hold(call.key) as executable:
            has_graph = self._usable(call, executable) is not None
        return call, state, decide(self._situation(call, state, has_graph))

    def _set_sizes(self, call: Call) -> None:
        if self._sizes.complete is not call.sizes or self.stream.context.taps:
            self._sizes.set(call.sizes, self.stream)

    def _replay_held(self, call: Call, executable: GraphExec) -> None:
        with self.stream.turn.lock:  # another thread's call may have other sizes
            if self._sizes.running:
                with self._sizes.nested(self.stream):
                    self._replay_held(call, executable)
                return
            self._set_sizes(call)
            replay_as_set(call.key, executable, self.stream, self.settings, self.profile)

    def _count_given_back(self) -> None:
        """Counts the launches of graphs that are not held any more.  Under the step's lock."""
        while self._given_back:
            key, counts = self._given_back.popleft()
            self._held.remove((key, counts))
            state = self._states.get(key)
            (self._dropped if state is None else state.counts).replays(counts)

    def _usable(self, call: Call, executable: GraphExec | None) -> GraphExec | None:
        """The executable; None, and it is taken out of the cache, if memory that it points at was
        closed, or a change of it failed half way."""
        if executable is None or not executable.suspect or executable.usable:
            return executable
        self.cache.evict(call.key)
        return None

    def _situation(self, call: Call, state: KeyState, has_graph: bool) -> Situation:
        context = self.stream.context
        return Situation(
            enabled=self.enabled,
            profiling=self.profiling,
            inside_capture=bool(context.captures)
            and self.stream.capture_info.status is not CaptureStatus.NONE,
            quarantine=self._broken or state.quarantine,
            unmet=tuple(name for name, met in self.preconditions.items() if not met())
            if self.preconditions
            else (),
            over_buckets=call.over_buckets,
            over_slot=call.over_slot,
            has_graph=has_graph,
            runs=state.runs,
            warmups=self.warmups,
            capped=None if has_graph else self._sealed() or self._capped(call.key),
            strict=self.strict,
            records=self.build == "record",
        )

    def _sealed(self) -> tuple[Reason, str] | None:
        """Why the step's pool would refuse a capture."""
        pool = self.pool
        captures = self.build == "capture" and self._builder is None
        if pool is None or pool.state is not PoolState.SEALED or not captures:
            return None
        return Reason.POOL_SEALED, pool.sealed_text("a capture")

    def _capped(self, key: StepKey) -> tuple[Reason, str] | None:
        """Why the cache would refuse a capture of a key."""
        refused = self.cache.refusal(key)
        return None if refused is None else (Reason(refused.reason.value), refused.detail)

    def _run_eager(self, call: Call, state: KeyState, decision: Decision) -> Decision:
        """Runs the call launch by launch, at its real sizes; raises if the decision refuses."""
        if decision.action is Action.REFUSE:
            error = _ERRORS.get(decision.reason)
            if error is not None:
                raise error(f"{call.key}: {decision.detail}")
            raise EagerRunError(
                f"{call.key} has no graph to replay, and a strict step does not run it eagerly: "
                f"{decision.reason.value} ({decision.detail})"
            )
        if decision.reason is Reason.INSIDE_CAPTURE:
            self._sizes.begin_in_capture(call.sizes, self.stream)
        else:
            self._sizes.begin(call.sizes, self.stream)
        before = self.stream.submitted
        if decision.reason is Reason.WARMING_UP:
            with submissions(self.stream.context) as made:
                self._run(call.sizes)
            state.submitted = tuple(made)
        else:
            self._run(call.sizes)
        self._sizes.end()
        state.runs += 1
        state.counts.ran_eagerly(self.stream.submitted - before, decision.reason)
        return decision

    # --- replaying
    def _replay(
        self, call: Call, state: KeyState, executable: GraphExec, decision: Decision
    ) -> Decision:
        state.replays += 1
        self._set_sizes(call)
        if self.verify != "off" and self._is_due(call, state, executable):
            return self._checked(call, state, executable, decision)
        try:
            self._launch(call, state, executable)
        except NotLaunched as refused:
            return self._refused(call, state, str(refused))
        state.counts.replayed += 1
        state.refusals = 0
        return decision

    def _is_due(self, call: Call, state: KeyState, executable: GraphExec) -> bool:
        if not state.is_checked(executable, call.padded):
            return True
        return isinstance(self.verify, int) and state.replays % self.verify == 0

    def _launch(self, call: Call, state: KeyState, executable: GraphExec) -> None:
        """One replay, one in `TIMED_EVERY` timed.  Raises as `run_replay` does."""
        begin = 0 if state.replays % TIMED_EVERY else time.perf_counter_ns()
        if self._plain:
            try:
                executable.launch(self.stream)
            except ContextPoisonedError:
                raise
            except OstinatoError as error:
                raise NotLaunched(str(error)) from error
        else:
            run_replay(call.key, executable, self.stream, self.settings, self.profile)
        if begin:
            state.times.append((time.perf_counter_ns() - begin) / 1e3)

    def _refused(self, call: Call, state: KeyState, why: str) -> Decision:
        """Drops the graph, and runs the call eagerly."""
        state.refusals += 1
        if state.refusals >= _REFUSALS:
            self._quarantine(call.key, state, Reason.REFUSED, why)
        else:
            self.cache.evict(call.key)
        return self._fall_back(call, state, Reason.REFUSED, why)

    def _fall_back(self, call: Call, state: KeyState, reason: Reason, why: str) -> Decision:
        """Runs the call eagerly, where a graph was expected; raises EagerRunError if strict."""
        return self._run_eager(call, state, fall_back(reason, why, strict=self.strict))

    # --- building
    def _build(self, call: Call, state: KeyState, decision: Decision) -> Decision:
        if self.build == "record":
            return self._build_by_record(call, state, decision)
        failure = self._make_graph(call, state)
        if failure is not None:
            # The capture ran nothing, so the call must still run the step once.
            return self._fall_back(call, state, failure.reason, failure.detail)
        with self.cache.hold(call.key) as executable:
            if executable is None:
                return self._fall_back(call, state, Reason.EVICTED, "")
            return self._replay(call, state, executable, decision)

    def _make_graph(self, call: Call, state: KeyState) -> Decision | None:
        """Captures the step and installs its graph; returns a Decision if that failed."""
        self._sizes.begin(call.sizes, self.stream)

        def make() -> GraphExec:
            if self._preload is not None:
                # Kept: kernels that nothing holds may be unloaded again.
                self._preloaded, self._preload = self._preload(), None
            if self._builder is not None:
                sizes = Sizes(call.buckets, self._sizes, self.stream)
                return self._builder(self.stream, sizes)
            with capture(self.stream, mode=self.mode, pool=self.pool, contained=True) as under_way:
                self._run(call.buckets)
            self._sizes.end()
            _require_all(state.submitted, under_way.submissions)
            return under_way.graph.instantiate()

        return self._install(call, state, make)

    def _install(
        self, call: Call, state: KeyState, make: Callable[[], GraphExec]
    ) -> Decision | None:
        """Puts the executable of `make` into the cache; an error of `make` quarantines the key,
        except a ClosedError, a PoolSealedError and what is lost with the context."""
        try:
            self._keys.add(call.key)
            self.cache.get_or_capture(call.key, make)
        except ContextPoisonedError:
            raise
        except CaptureLimitError as limit:  # another thread's capture, or one that `make` made
            reason, detail = self._capped(call.key) or (Reason.CAPTURE_TIME, str(limit))
            return Decision(Action.EAGER, reason, detail)
        except PoolSealedError as error:  # the key is captured once its pool is open again
            return Decision(Action.EAGER, Reason.POOL_SEALED, str(error))
        except ClosedError as error:  # a mistake of this call, which an eager run finds too
            return Decision(Action.EAGER, Reason.BUILD_FAILED, str(error))
        except Exception as error:
            return self._quarantine(call.key, state, Reason.BUILD_FAILED, str(error))
        state.counts.built += 1
        return None

    def _build_by_record(self, call: Call, state: KeyState, decision: Decision) -> Decision:
        """Records a real run at the bucketed sizes and builds the graph; the answer of the run is
        kept, also if the graph cannot be built.  If the driver refuses a part of the run, the call
        is run eagerly from its start, where that is known to do nothing twice."""
        self._sizes.begin(call.sizes, self.stream)
        look = None
        if self.verify != "off":
            from ostinato.step.check import watch_promises

            look = watch_promises(self.slots, call.sizes, self.stream)
        recording: Recording | None = None
        try:
            before = self.stream.submitted
            with record(self.stream) as recording:
                self._run(call.buckets)
            self._sizes.end()
            state.counts.ran_eagerly(self.stream.submitted - before, decision.reason)
        except (ContextPoisonedError, ClosedError, PoolSealedError):
            raise
        except Exception as error:
            self._quarantine(call.key, state, Reason.BUILD_FAILED, str(error))
            # What was done before the refusal must not be done twice.
            again = self._repeatable or recording is None or recording.did_nothing
            if self.strict or not (again and isinstance(error, DriverError)):
                raise
            return self._fall_back(call, state, Reason.BUILD_FAILED, str(error))
        state.runs += 1
        try:
            finding = look() if look is not None else None
        except StateLostError as lost:
            self._broken = (Reason.STATE_LOST, str(lost))
            raise
        if finding is not None:
            return self._mismatched(call, state, finding)

        recorded = recording

        def make() -> GraphExec:
            return recorded.build().instantiate()

        return self._install(call, state, make) or decision

    def _quarantine(self, key: StepKey, state: KeyState, reason: Reason, why: str) -> Decision:
        state.quarantine = (reason, why)
        self.cache.evict(key)
        refused = self.strict or reason is Reason.HOST_STATE
        served = "not run" if refused else "run eagerly"
        _log.warning("%s is %s from now on: %s: %s", key, served, reason.value, why)
        return Decision(Action.EAGER, reason, why)

    def release(self, **sizes: int) -> None:
        """Ends the quarantine of the key of these sizes, and allows calls again after an error of
        the step's state, which stops all keys.

        Call it after the cause was corrected: for a quarantine, what broke the graph; for a
        VerificationError, the state on the host; for a StateLostError, the content of the slots.
        Raises InputError as `key` does, and releases nothing then.
        """
        with self._lock:
            key = self.key(**sizes)
            self._broken = None
            state = self._states.get(key)
            if state is not None:
                state.quarantine, state.refusals = None, 0

    # --- checking
    def _checked(
        self, call: Call, state: KeyState, executable: GraphExec, decision: Decision
    ) -> Decision:
        from ostinato.step.check import check_replay

        def eager() -> Sequence[Operation]:
            with operations(self.stream.context) as made:
                self._run(call.buckets)
            return made

        try:
            report = check_replay(
                self.slots,
                call.sizes,
                self.stream,
                executable,
                eager=eager,
                replay=lambda: self._launch(call, state, executable),
                own=self._sizes.ranges,
                limit=self._check_limit,
            )
        except NotLaunched as refused:
            return self._refused(call, state, str(refused))
        except StateLostError as lost:
            self._broken = (Reason.STATE_LOST, str(lost))
            raise
        self._last_check = report
        state.counts.verified += 1
        state.counts.replayed += 1
        state.note_check(executable, call.padded)
        if report.finding is None:
            return decision
        return self._mismatched(call, state, report.finding)

    def _mismatched(self, call: Call, state: KeyState, finding: Finding) -> Decision:
        """After a failed check, with all memory as before the call: runs the call eagerly.

        Raises VerificationError if strict, or if the step keeps state on the host.
        """
        from ostinato.step.check import Cause

        why = str(finding)
        if finding.cause is Cause.HOST_STATE:
            why += ". Put that state right and release() the step's sizes, or switch its graphs off"
            self._quarantine(call.key, state, Reason.HOST_STATE, why)
            self._broken = state.quarantine
            raise VerificationError(f"{call.key}: {why}")
        decision = self._quarantine(call.key, state, Reason.MISMATCH, why)
        if self.strict:
            raise VerificationError(f"{call.key}: {why}")
        return self._run_eager(call, state, decision)

    # --- numbers and lifetime
    def statistics(self) -> StepStatistics:
        """What the step did so far."""
        with self._lock:
            counts = {key: state.counts.copy() for key, state in self._states.items()}
            dropped = self._dropped.copy()
            for key, held in self._held:
                counts.get(key, dropped).replays(held)
            lines = tuple(
                counts[key].key_statistics(
                    key,
                    None if state.quarantine is None else state.quarantine[1],
                    state.times,
                    self.cache.key_statistics(key),
                )
                for key, state in self._states.items()
            )
            total = Counts.sum([*counts.values(), dropped])
            return total.statistics(lines, self._last_check)

    def close(self) -> None:
        """Takes the step's graphs out of the cache, and gives its memory back.  Idempotent.

        Later calls raise ClosedError.
        """
        with self._lock:
            self._finalizer.detach()
            self._claim = None
            _evict(self.cache, self._keys)
            self._sizes.close()


def _require_sizes(what: str, function: Callable[..., object]) -> None:
    """Raises InputError unless a function can be called with a stream and sizes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # compiled code need not tell
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise InputError(
            f"{what} is called as {what}(stream, sizes), with sizes.rows for a size called rows, "
            f"and it takes {signature}"
        ) from None


def _require_all(eager: Sequence[Submission] | None, captured: Sequence[Submission]) -> None:
    """Raises CaptureBrokenError if a capture lacks what the warm-up submitted."""
    missing = None if eager is None else first_missing(eager, captured)
    if missing is not None:
        raise CaptureBrokenError(
            f"the capture has {len(captured)} operations, the eager run before had "
            f"{len(eager or ())}: {missing} is missing. What is done only once, or by a condition "
            "on the host, is not in the graph: do it before the step, or in each run"
        )


def _evict(cache: GraphCache, keys: set[Hashable]) -> None:
    """Takes the graphs of a step that was closed or dropped out of the cache."""
    for key in keys.copy():
        cache.evict(key)
    keys.clear()
