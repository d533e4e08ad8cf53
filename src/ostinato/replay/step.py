"""`GraphedStep`: a function of stream work that is run eagerly, then captured, then replayed.

    first call of a key   -> eager (warm-up: libraries initialise, modules load); its answer counts
    next                  -> captured (nothing runs), then replayed
    from then on          -> replayed

with `build="record"`: the first call is recorded (a real run) and the graph built from it.  A key
that cannot be captured is quarantined with its reason and served eagerly from then on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

from ostinato import settings as _settings
from ostinato.cache import GraphCache
from ostinato.driver.api import CaptureMode, CaptureStatus
from ostinato.driver.stream import Stream
from ostinato.errors import ContextPoisonedError, InputError, VerificationError
from ostinato.graph import GraphExec, capture, record
from ostinato.memory import CapturePool
from ostinato.replay.held import HeldCounts, HeldReplay
from ostinato.replay.policy import Action, Decision, Reason, Situation, decide
from ostinato.replay.profile import ReplayProfile, run_replay
from ostinato.replay.slots import Slot, check_replay
from ostinato.replay.statistics import Counts, StepStatistics
from ostinato.settings import ReplaySettings

__all__ = ["GraphedStep", "StepStatistics"]

_log = logging.getLogger(__name__)

Key = tuple[Hashable, ...]


class Work(Protocol):
    """What a step runs: submits work of the given (bucketed) sizes to the stream."""

    def __call__(self, stream: Stream, **sizes: int) -> object: ...


class Builder(Protocol):
    """Makes the executable of the given (bucketed) sizes, uploaded on the stream or not."""

    def __call__(self, stream: Stream, **sizes: int) -> GraphExec: ...


@dataclass(slots=True)
class _KeyState:
    """What is known of one key besides its graph."""

    runs: int = 0
    replays: int = 0
    quarantine: tuple[Reason, str] | None = None


class GraphedStep:
    """A step that replays a graph where it can.

    `run(stream, **sizes)` must submit all its work to the stream (and streams forked from it), at
    fixed addresses, for the bucketed sizes it is given.  Whatever changes from call to call must
    live in device memory: host numbers are frozen by the capture.

    `slots` are the buffers it touches; they are needed only for `verify`: "first" checks each key
    when its graph is made, a number n also every n-th replay, "off" never.  A check that fails
    quarantines the key and keeps the eager answer, or raises VerificationError if `strict`.

    `preconditions` are asked before each replay or build; the names of those that fail are the
    reason of the eager run.  `warmups` eager runs precede a capture.  `preload` is called once,
    before the first capture and outside of it, to load what the step launches
    (`lambda: device.modules.preload(kernels)`); what it raises quarantines the key.

    `builder(stream, **sizes)`, if given, makes the executable in place of a capture of `run`, for
    graphs that no stream shows, such as a loop; what it raises quarantines the key.  It must do
    what `run` does, which is still what runs eagerly.

    Calls of one step are serialised.  Not guaranteed: that a `run` which keeps state outside of
    device memory gives the same answers by replay; `verify` is there to find out.
    """

    def __init__(
        self,
        run: Work,
        *,
        stream: Stream,
        cache: GraphCache,
        name: str | None = None,
        slots: Sequence[Slot] = (),
        build: Literal["capture", "record"] = "capture",
        warmups: int = 1,
        enabled: bool = True,
        verify: Literal["off", "first"] | int = "off",
        strict: bool = False,
        preconditions: Mapping[str, Callable[[], bool]] | None = None,
        preload: Callable[[], object] | None = None,
        builder: Builder | None = None,
        mode: CaptureMode = CaptureMode.THREAD_LOCAL,
        pool: CapturePool | None = None,
        settings: ReplaySettings | None = None,
        profile: ReplayProfile | None = None,
    ) -> None:
        if build not in ("capture", "record"):
            raise InputError(f'build={build!r}: "capture" or "record"')
        if builder is not None and build == "record":
            raise InputError("a builder makes the graph itself, so nothing is recorded for it")
        if warmups < 0:
            raise InputError(f"warmups={warmups}: 0 or more")
        if isinstance(verify, str) and verify not in ("off", "first"):
            raise InputError(f'verify={verify!r}: "off", "first", or every how many replays')
        if verify != "off" and not slots:
            raise InputError("verify needs the slots that the step reads and writes")
        self.run = run
        self.stream = stream
        self.cache = cache
        self.name: str = name or str(getattr(run, "__qualname__", type(run).__name__))
        self.slots = tuple(slots)
        self.build = build
        self.warmups = warmups
        self.enabled = enabled
        self.profiling = False
        """Set while a profiler times single operations: steps run eagerly then."""
        self.verify = verify
        self.strict = strict
        self.preconditions = dict(preconditions or {})
        self._preload = preload
        self._preloaded: object = None
        self._builder = builder
        self.mode = mode
        self.pool = pool
        self.settings = _settings.replay_settings(base=settings)
        self.profile = profile
        if self.profile is None and self.settings.profile:
            self.profile = ReplayProfile(print_every=self.settings.print_every)
        self._keys: dict[tuple[tuple[str, int], ...], tuple[Key, dict[str, int]]] = {}
        self._states: dict[Key, _KeyState] = {}
        self._counts = Counts()
        self._held: list[HeldCounts] = []
        self._lock = threading.RLock()

    # --- keys
    def key(self, **sizes: int) -> Key:
        """The cache key of these sizes: the step's name and the buckets.  Raises InputError."""
        return self._bucketed(sizes)[0]

    def _bucketed(self, sizes: Mapping[str, int]) -> tuple[Key, dict[str, int]]:
        given = tuple(sizes.items())
        known = self._keys.get(given)
        if known is None:
            buckets = {n: self.cache.buckets.bucket(size) for n, size in sizes.items()}
            known = ((self.name, *sorted(buckets.items())), buckets)
            self._keys[given] = known
        return known

    # --- calling
    def __call__(self, **sizes: int) -> Decision:
        """Runs the step once for these sizes; what was done and why.  Does not wait.

        Raises what `run` raises eagerly, VerificationError if strict, ContextPoisonedError.
        """
        with self._lock:
            try:
                key, buckets = self._bucketed(sizes)
            except InputError as error:
                situation = Situation(enabled=self.enabled, over_buckets=str(error))
                decision = decide(situation)
                self._counts.called(sum(sizes.values()), sum(sizes.values()))
                self._run_eager(dict(sizes), decision)
                return decision
            state = self._states.get(key)
            if state is None:
                state = self._states[key] = _KeyState()
            self._counts.called(sum(sizes.values()), sum(buckets.values()))
            # Held, so that another thread's eviction cannot close it before it is launched.
            with self.cache.hold(key) as executable:
                decision = decide(self._situation(state, executable is not None))
                if decision.action is Action.REPLAY and executable is not None:
                    return self._replay(key, state, executable, sizes, buckets, decision)
            if decision.action is Action.BUILD:
                return self._build(key, state, sizes, buckets, decision)
            state.runs += 1
            self._run_eager(buckets, decision)
            return decision

    def prepare(self, **sizes: int) -> Decision:
        """Makes the graph of these sizes now, without running anything; capture only.

        What a first run initialises must be initialised before (modules preloaded, libraries
        warmed up).  A failure quarantines the key, as in a call.
        """
        with self._lock:
            key, buckets = self._bucketed(sizes)
            state = self._states.setdefault(key, _KeyState())
            situation = self._situation(state, key in self.cache)
            decision = decide(situation)
            if decision.reason is Reason.WARMING_UP or decision.action is Action.BUILD:
                if self.build == "record":
                    raise InputError("a recorded step is built by its first call, not beforehand")
                decision = Decision(Action.BUILD, Reason.FIRST_USE)
                failure = self._make_graph(key, state, buckets)
                return failure or decision
            return decision

    def hold(self, **sizes: int) -> HeldReplay | Decision:
        """The graph of these sizes for many replays in a row, each of which costs a launch alone.

        Makes the graph first if it is due and nothing has to run for it.  A Decision, and nothing
        is held, where a call would do more than replay (run eagerly, record, check): call then.
        The decision holds for as long as the graph is held: what is switched off meanwhile is not
        asked for again.  Raises ContextPoisonedError.
        """
        with self._lock:
            try:
                key, buckets = self._bucketed(sizes)
            except InputError as error:
                return decide(Situation(enabled=self.enabled, over_buckets=str(error)))
            state = self._states.setdefault(key, _KeyState())
            decision = decide(self._situation(state, key in self.cache))
            if decision.action is Action.EAGER or isinstance(self.verify, int):
                return decision
            if decision.action is Action.BUILD:
                if self.build == "record" or self.verify != "off":
                    return decision
                failure = self._make_graph(key, state, buckets)
                if failure is not None:
                    return failure
            lease = ExitStack()
            executable = lease.enter_context(self.cache.hold(key))
            if executable is None:  # evicted at once, by another thread
                return Decision(Action.BUILD, Reason.FIRST_USE)
            settings, replay = self.settings, partial(executable.launch, self.stream)
            if settings.upload or settings.synchronize or settings.profile:
                replay = partial(run_replay, key, executable, self.stream, settings, self.profile)
            counts = HeldCounts(sum(sizes.values()), sum(buckets.values()))
            lease.callback(self._let_go, counts)
            self._held.append(counts)
            return HeldReplay(self.stream.context, replay, lease, counts)

    def _let_go(self, counts: HeldCounts) -> None:
        with self._lock:
            self._held.remove(counts)
            self._counts.replays(counts)

    def _situation(self, state: _KeyState, has_graph: bool) -> Situation:
        context = self.stream.context
        return Situation(
            enabled=self.enabled,
            profiling=self.profiling,
            inside_capture=context.captures_under_way > 0
            and self.stream.capture_info.status is not CaptureStatus.NONE,
            quarantine=state.quarantine,
            unmet=tuple(name for name, met in self.preconditions.items() if not met())
            if self.preconditions
            else (),
            has_graph=has_graph,
            runs=state.runs,
            warmups=self.warmups,
            records=self.build == "record",
        )

    def _run_eager(self, buckets: dict[str, int], decision: Decision) -> None:
        before = self.stream.submitted
        self.run(self.stream, **buckets)
        self._counts.eager += 1
        self._counts.launches_eager += self.stream.submitted - before
        self._counts.reasons[decision.reason.value] += 1

    def _replay(
        self,
        key: Key,
        state: _KeyState,
        executable: GraphExec,
        sizes: Mapping[str, int],
        buckets: dict[str, int],
        decision: Decision,
    ) -> Decision:
        state.replays += 1
        if isinstance(self.verify, int) and state.replays % self.verify == 0:
            return self._checked(key, state, executable, sizes, buckets, decision)
        self._launch(key, executable)
        return decision

    def _launch(self, key: Key, executable: GraphExec) -> None:
        run_replay(key, executable, self.stream, self.settings, self.profile)
        self._counts.replayed += 1
        self._counts.launches_replayed += 1

    # --- building
    def _build(
        self,
        key: Key,
        state: _KeyState,
        sizes: Mapping[str, int],
        buckets: dict[str, int],
        decision: Decision,
    ) -> Decision:
        if self.build == "record":
            return self._build_by_record(key, state, buckets, decision)
        failure = self._make_graph(key, state, buckets)
        if failure is not None:
            # The capture ran nothing, so the step is still to be run, once.
            self._run_eager(buckets, failure)
            return failure
        with self.cache.hold(key) as executable:
            if executable is None:  # evicted at once, by another thread
                self._run_eager(buckets, decision)
                return decision
            if self.verify != "off":
                return self._checked(key, state, executable, sizes, buckets, decision)
            self._launch(key, executable)
            return decision

    def _make_graph(self, key: Key, state: _KeyState, buckets: dict[str, int]) -> Decision | None:
        """Captures the step and installs its graph; the decision if that failed."""

        def make() -> GraphExec:
            if self._preload is not None:
                # Kept: what nobody holds may be unloaded again.
                self._preloaded, self._preload = self._preload(), None
            if self._builder is not None:
                return self._builder(self.stream, **buckets)
            with capture(self.stream, mode=self.mode, pool=self.pool) as under_way:
                self.run(self.stream, **buckets)
            return under_way.graph.instantiate(upload=self.stream)

        return self._install(key, state, make)

    def _install(
        self, key: Key, state: _KeyState, make: Callable[[], GraphExec]
    ) -> Decision | None:
        """Puts what `make` gives into the cache; or quarantines the key and says why."""
        try:
            self.cache.get_or_capture(key, make)
        except ContextPoisonedError:
            raise
        except Exception as error:
            return self._quarantine(key, state, Reason.BUILD_FAILED, str(error))
        self._counts.built += 1
        return None

    def _build_by_record(
        self, key: Key, state: _KeyState, buckets: dict[str, int], decision: Decision
    ) -> Decision:
        with record(self.stream) as recording:
            self._run_eager(buckets, decision)
        state.runs += 1

        def make() -> GraphExec:
            return recording.build().instantiate(upload=self.stream)

        return self._install(key, state, make) or decision

    def _quarantine(self, key: Key, state: _KeyState, reason: Reason, why: str) -> Decision:
        state.quarantine = (reason, why)
        self.cache.evict(key)
        _log.warning("%s is run eagerly from now on: %s: %s", key, reason.value, why)
        return Decision(Action.EAGER, reason, why)

    def release(self, **sizes: int) -> None:
        """Lets a quarantined key be tried again (after what broke it was mended)."""
        with self._lock:
            state = self._states.get(self.key(**sizes))
            if state is not None:
                state.quarantine = None

    # --- checking
    def _checked(
        self,
        key: Key,
        state: _KeyState,
        executable: GraphExec,
        sizes: Mapping[str, int],
        buckets: dict[str, int],
        decision: Decision,
    ) -> Decision:
        mismatch = check_replay(
            self.slots,
            sizes,
            self.stream,
            lambda: self.run(self.stream, **buckets),
            lambda: self._launch(key, executable),
        )
        self._counts.verified += 1
        if mismatch is None:
            return decision
        self._quarantine(key, state, Reason.MISMATCH, str(mismatch))
        if self.strict:
            raise VerificationError(f"{key}: {mismatch}")
        return Decision(Action.EAGER, Reason.MISMATCH, str(mismatch))

    # --- numbers
    def statistics(self) -> StepStatistics:
        """What the step did so far."""
        with self._lock:
            quarantined = {str(k): s.quarantine[1] for k, s in self._states.items() if s.quarantine}
            counts = replace(self._counts)
            for held in self._held:
                counts.replays(held)
            return counts.statistics(quarantined)
