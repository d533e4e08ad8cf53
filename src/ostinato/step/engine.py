"""`Engine`: decides what a call becomes, by its key: warm, build, replay, eager or refuse.

    first call of a key   -> eager (warm-up: libraries initialise, modules load); its answer counts
    next                  -> its graph is built (nothing runs), then replayed
    from then on          -> replayed

A key that cannot be built, or whose replay is found wrong, keeps its reason (`Entry.reason`) and is
served eagerly from then on.  A build that failed for a reason outside the work, or for lack of
memory, is tried again after 1, 4, 16 and 64 calls.

The engine has no slots, sizes or arguments.  A door (`GraphedStep`, `relational.Joiner`,
`interop.graphed.Graphed`) makes a `Work` of each call and passes it to the engine once; the engine
calls the door only through the work.

`policy.decide` decides what a call becomes.  It runs if the cache's epoch has changed since the
last replay of such a call was decided, or if the entry has no graph; otherwise the decision is
unchanged: replay.
"""

from __future__ import annotations

import logging
import operator
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from ostinato.driver.api import CaptureStatus
from ostinato.driver.forking import new_lock
from ostinato.driver.launcher import repeat
from ostinato.driver.stream import Stream
from ostinato.errors import (
    CaptureLimitError,
    ClosedError,
    ContextPoisonedError,
    DriverError,
    EagerRunError,
    NotHeldError,
    OstinatoError,
    PoolSealedError,
    StateLostError,
    Status,
    VerificationError,
    causes,
)
from ostinato.explain.times import (
    NotLaunched,
    Percentiles,
    ReplayProfile,
    replay_as_set,
    run_replay,
)
from ostinato.graph import GraphExec, Recording, record
from ostinato.settings import ResolvedReplaySettings
from ostinato.step.cache import GraphCache
from ostinato.step.check import Cause, CheckReport, Finding
from ostinato.step.entry import CachedGraph, Entry
from ostinato.step.held import HeldCounts, HeldReplay, launch_in_turn
from ostinato.step.policy import REPLAY, Action, Decision, Reason, Situation, decide, fall_back
from ostinato.step.statistics import Counts, StepKeyStatistics

if TYPE_CHECKING:
    from ostinato.driver.launcher import Repeat

_log = logging.getLogger(__name__)

TIMED_EVERY = 32
"""One replay of a key out of this many is timed, never its first."""
_ERRORS: Mapping[Reason, type[OstinatoError]] = {
    Reason.STATE_LOST: StateLostError,
    Reason.HOST_STATE: VerificationError,
    Reason.MISMATCH: VerificationError,
}
"""The error that a refused call raises, by reason; EagerRunError for other reasons."""
_SETTLED = (Reason.GRAPHS_OFF, Reason.PROFILING, Reason.OVER_BUCKETS)
"""Reasons for which calls run eagerly until a setting changes; given-up keys are added to these."""
_REFUSALS = 3
"""The number of refused replays in a row after which a key is given up."""
_DISTURBANCES, _WAIT = 5, 4
"""The number of failed builds in a row that gives a key up; the growth of the wait between them."""
_SWEEP = 1024
"""The number of new keys after which the counts of forgotten keys are added up."""


Change: TypeAlias = "Callable[[GraphExec], object] | None"
"""A change of an executable before its launch; None if the executable is launched unchanged."""


class Options(Protocol):
    """Settings of a door that its user may change at any time; the door then changes the epoch."""

    @property
    def graphs(self) -> bool: ...
    @property
    def profiling(self) -> bool: ...
    @property
    def strict(self) -> bool: ...
    @property
    def verify(self) -> Literal["off", "first"] | int: ...
    @property
    def warmups(self) -> int: ...
    @property
    def preconditions(self) -> Mapping[str, Callable[[], bool]]: ...


@dataclass(slots=True, eq=False)
class Call:
    """The common data of calls that are alike.  A door makes one, and keeps it for later calls."""

    key: Hashable
    used: int = 0
    """The sum of the real sizes."""
    room: int = 0
    """The sum of the bucketed sizes."""
    padded: frozenset[Hashable] = frozenset()
    """The sizes or arguments that have padding."""
    unfit: tuple[Reason, str] | None = None
    """The reason why these calls run eagerly, whatever graph their key has."""
    given: dict[str, int] | None = None
    """The arguments of a call that may be repeated without its key; None if it may not."""
    entry: Entry | None = None
    counts: Counts | None = None
    decided_at: int | None = None
    """The cache's epoch when a replay was decided."""
    settled: Decision | None = None
    """The decision to run eagerly, if it holds until the epoch changes."""
    settled_at: int | None = None
    """The epoch when `settled` was decided."""
    repeat: Repeat | None = None
    """A launcher that repeats the call without any other check (`driver.launcher`)."""
    armed_at: int | None = None
    """The epoch when `repeat` was armed."""


class Work(ABC):
    """One call, with the methods by which the engine runs, builds and binds it."""

    __slots__ = ()

    call: Call
    stream: Stream
    options: Options

    @property
    def padded(self) -> frozenset[Hashable]:
        """The sizes or arguments that have padding in this call."""
        return self.call.padded

    def unfit(self) -> tuple[Reason, str] | None:
        """Returns why this call runs eagerly, whatever graph its key has, with details; or None."""
        return self.call.unfit

    # --- running
    @abstractmethod
    def begin(self, *, inside: bool = False) -> None:
        """Prepares a run or a build.  `inside`: the run is part of a capture under way."""

    @abstractmethod
    def run(self, *, padded: bool = False) -> None:
        """Submits the work, at the sizes of the call or, if `padded`, at those of its graph."""

    def warm(self) -> None:
        """Runs a call that has no graph yet."""
        self.run()

    def warm_ups(self, counts: Counts) -> int:
        """Returns the number of runs of its key that were warm-ups."""
        return counts.eager

    submitted: Any = property(
        operator.attrgetter("stream.submitted"),  # no frame of Python: it is read in every call
        doc="The number of operations that were submitted to its stream so far.",
    )

    def words(self, decision: Decision) -> str:
        """Returns the reason of an eager run, as text under which it is counted."""
        return decision.reason.value

    # --- graphs
    @property
    def recorded(self) -> bool:
        """True if its graph is built of a recorded run, which is the first real run."""
        return False

    @abstractmethod
    def build(self) -> GraphExec:
        """Makes its graph.  No work runs."""

    @property
    def done(self) -> bool:
        """True if `build` has run the call, whose answer counts also if the build failed."""
        return False

    def failed(self, error: Exception) -> tuple[Reason, str] | None:
        """Classifies an error of `build`: for NO_MEMORY and DISTURBED the key is tried again later,
        for WAITS by its door; for any other reason it is given up; for None the error is raised."""
        if out_of_memory(error):
            return Reason.NO_MEMORY, str(error)
        if disturbed(error):
            return Reason.DISTURBED, str(error)
        return Reason.BUILD_FAILED, str(error)

    def fits(self) -> bool:
        """True if the graph of its key, which may be changed for it, does the same as the call.
        Called if the epoch has changed since the last replay of `call`."""
        return True

    def trim(self, *, short: bool) -> None:  # noqa: B027  # for libraries that keep memory
        """Frees memory that its library keeps for later use.  Called after a failed build, and,
        with `short`, if the device has no memory."""

    @property
    def repeatable(self) -> bool:
        """True if a run that the driver refused half-way may be run again from its start."""
        return False

    @abstractmethod
    def bind(self) -> Change:
        """Writes, before each replay, the memory that the graph reads, in stream order.  Returns
        the change of the executable for this launch.  After a NotLaunched the call runs eagerly."""

    @property
    def binds(self) -> bool:
        """True if `bind` may have something to do."""
        return True

    def wanted(self) -> tuple[object, ...]:
        """Returns the values of the engine's guarded attributes that make `bind` needless."""
        return ()

    def closed_to_builds(self) -> tuple[Reason, str] | None:
        """Returns why a build would be refused now, besides the cache's limits; or None."""
        return None

    def restored(self) -> GraphExec | None:
        """Returns its graph from a store, if there is one that fits."""
        return None

    def not_restored(self, why: str) -> None:  # noqa: B027  # for doors with a store alone
        """Handles a graph that `restored` returned and that could not be kept."""

    # --- checks, for doors whose `verify` may differ from "off"
    def check(self, executable: GraphExec, launch: Callable[[Change], object]) -> CheckReport:
        """Runs the call both ways and compares.  `launch` replays it, given the result of `bind`.
        After a check that passes, memory is as one run leaves it; else as before, or as left by the
        run whose answer counts.  Raises StateLostError if memory cannot be put back."""
        raise NotImplementedError

    def watch(self) -> Callable[[], Finding | None]:
        """Prepares the check of a recorded run.  The returned function is called after the run, and
        returns the first change that the run may not make, or None."""
        raise NotImplementedError


class Engine:
    """The keys of one door, in a cache.

    `guarded`: objects and names of attributes that must be equal to the values of `Work.wanted` for
    a call to be repeated without other checks (`driver.launcher.Repeat`).  Calls are made
    under `turn`, the lock of their stream, and the engine's `lock`, in this order.  `settings`
    and `profile`: those of the cache if None.  `timed`: whether the engine times launches; a door
    may time whole calls itself.
    """

    def __init__(
        self,
        cache: GraphCache,
        turn: Any,
        guarded: tuple[tuple[object, str], ...] = (),
        *,
        settings: ResolvedReplaySettings | None = None,
        profile: ReplayProfile | None = None,
        timed: bool = True,
    ) -> None:
        self.cache = cache
        self.settings = cache.settings if settings is None else settings
        self.profile = cache.profile if settings is None else profile
        self.lock = new_lock()
        """Taken after the stream's turn: the run of one step may call another step."""
        self.broken: tuple[Reason, str] | None = None
        """The reason why no key is served until `forget`, with the text of the error."""
        self.keys: set[Hashable] = set()
        """The keys under which graphs were put into the cache."""
        self.last_check: CheckReport | None = None
        guards = ((cache, "epoch"), *guarded)
        self._new_repeat = partial(
            repeat, turn, REPLAY, guards, cache.table, cache.touch, cache.let_go
        )
        self._repeated: set[Call] = set()
        """The calls that have a repeat."""
        self._last: Call | None = None
        """The call of the last replay."""
        self._plain = self.settings.plain
        self._timed = timed
        self._counts: dict[Entry, Counts] = {}
        self._dropped = Counts()
        """The sum of the counts of keys that the cache has forgotten."""
        self._sweep_at = _SWEEP
        self._held: list[tuple[Entry, HeldCounts]] = []
        self._given_back: deque[tuple[Entry, HeldCounts]] = deque()
        """The counts of graphs that are not held any more and are not counted yet."""

    def __repr__(self) -> str:
        return f"<Engine of {len(self.keys)} graphs in {self.cache!r}>"

    def changed(self) -> None:
        """Makes the next calls be decided anew, after an event that could forbid a replay."""
        self.cache.epoch += 1

    def entered(self, call: Call) -> tuple[Entry, Counts]:
        """Returns the entry of a call, and this engine's counts for it."""
        entry, counts = call.entry, call.counts
        if entry is None or counts is None or entry.forgotten:
            entry = call.entry = self.cache.entry(call.key)
            call.settled = None
            counts = self._counts.get(entry)
            if counts is None:
                if len(self._counts) >= self._sweep_at:
                    self._sweep()
                    self._sweep_at = len(self._counts) + _SWEEP
                counts = self._counts[entry] = Counts()
            call.counts = counts
        return entry, counts

    def _sweep(self) -> None:
        """Adds the counts of entries that the cache has forgotten to `_dropped`."""
        for entry in [entry for entry in self._counts if entry.forgotten]:
            self._dropped.add(self._counts.pop(entry))

    def _counts_of(self, entry: Entry) -> Counts:
        return self._counts.get(entry, self._dropped)

    # --- calls
    def call(self, work: Work) -> Decision:
        """Makes a call; returns the decision.  Raises the errors of `Work.run` in an eager run, and
        VerificationError, EagerRunError, StateLostError, ContextPoisonedError, ClosedError."""
        call, cache = work.call, self.cache
        entry, counts = call.entry, call.counts
        if entry is None or counts is None or entry.forgotten:
            entry, counts = self.entered(call)
        counts.calls += 1
        counts.used += call.used
        counts.padded += call.room
        if call.repeat is not None:
            self._count_repeats(call)
        settled = call.settled
        if settled is not None and call.settled_at is cache.epoch and not cache.context.captures:
            return self._run_eager(work, entry, settled)
        # Leased, so that another thread's eviction cannot close the graph before its launch.
        kept = entry.graph
        if kept is None or not kept.lease():
            kept = self._leased(work, entry)
        elif kept is not cache.table.latest:
            cache.touch(kept)
        try:
            decision = REPLAY
            if (
                kept is None
                or call.decided_at is not cache.epoch
                or kept.executable.suspect
                or cache.context.captures
                or work.options.preconditions
            ):
                decision = self._decision(work, entry, kept)
            if decision is REPLAY and kept is not None:
                return self._replay(work, entry, kept, decision)
        finally:
            if kept is not None and kept.release():
                cache.let_go(kept)
        del kept  # if it was evicted, its memory is freed before another graph allocates some
        if decision.action is Action.BUILD:
            return self._build(work, entry, decision)
        if entry.wait and entry.disturbance is not None:
            entry.wait -= decision.reason is entry.disturbance[0]
        return self._run_eager(work, entry, decision)

    def next(self, work: Work) -> tuple[Entry, Decision]:
        """Returns the entry of a call, and the decision that the call would get now."""
        entry, _ = self.entered(work.call)
        kept = self._leased(work, entry)
        try:
            return entry, self._decision(work, entry, kept)
        finally:
            if kept is not None and kept.release():
                self.cache.let_go(kept)

    def _leased(self, work: Work, entry: Entry) -> CachedGraph | None:
        """Leases the graph of an entry; restores it from the work's store if the entry has none."""
        if entry.graph is None and not entry.looked:
            self._restore(work, entry)
        return self.cache.lease(entry)

    def _decision(self, work: Work, entry: Entry, kept: CachedGraph | None) -> Decision:
        """Decides, but repeats the last decision if only conditions that are checked at each call
        can have changed.  Evicts a graph that does not fit the call or cannot be launched any more
        (memory that it points at was closed, or a change of it failed half-way)."""
        call, options = work.call, work.options
        if kept is not None and not (
            (not kept.executable.suspect or kept.executable.usable())
            and (call.decided_at is self.cache.epoch or work.fits())
        ):
            entry.looked = True  # the store has no other graph of this key
            self.cache.evict(entry.key)
            kept = None
        epoch = self.cache.epoch
        if kept is not None and call.decided_at is epoch and not self.cache.context.captures:
            for met in options.preconditions.values():
                if not met():
                    break
            else:
                return REPLAY
        decision = decide(self._situation(work, entry, kept is not None))
        if decision is REPLAY:
            call.decided_at = epoch
        elif decision.action is Action.EAGER:
            given_up = self.broken or entry.reason
            if decision.reason in _SETTLED or (given_up and given_up[0] is decision.reason):
                call.settled, call.settled_at = decision, epoch
        return decision

    def _situation(self, work: Work, entry: Entry, has_graph: bool) -> Situation:
        options, context = work.options, self.cache.context
        return Situation(
            graphs=options.graphs,
            profiling=options.profiling,
            inside_capture=bool(context.captures)
            and work.stream.capture_info().status is not CaptureStatus.NONE,
            quarantine=self.broken or entry.reason,
            unmet=tuple(name for name, met in options.preconditions.items() if not met()),
            unfit=work.unfit(),
            has_graph=has_graph,
            runs=work.warm_ups(self._counts_of(entry)),
            warmups=options.warmups,
            capped=None if has_graph else self._capped(work, entry),
            strict=options.strict,
            records=work.recorded,
        )

    def _capped(self, work: Work, entry: Entry) -> tuple[Reason, str] | None:
        """Returns why no graph can be built now, or None."""
        if entry.wait:
            return entry.disturbance
        closed = work.closed_to_builds()
        if closed is not None:
            return closed
        refused = self.cache.refusal(entry.key)
        return None if refused is None else (Reason(refused.reason.value), refused.detail)

    def _run_eager(self, work: Work, entry: Entry, decision: Decision) -> Decision:
        """Runs the call launch by launch, at its real sizes; raises if the decision refuses."""
        if decision.action is Action.REFUSE:
            error = _ERRORS.get(decision.reason)
            if error is not None:
                raise error(f"{entry.key}: {decision.detail}")
            raise EagerRunError(
                f"{entry.key} would run eagerly, and it is strict: {decision.reason.value} "
                f"({decision.detail})"
            )
        work.begin(inside=decision.reason is Reason.INSIDE_CAPTURE)
        before = work.submitted
        if decision.reason is Reason.WARMING_UP:
            work.warm()
        else:
            work.run()
        counts = work.call.counts or self._counts_of(entry)
        counts.ran_eagerly(work.submitted - before, work.words(decision))
        return decision

    # --- replaying
    def _replay(self, work: Work, entry: Entry, kept: CachedGraph, decision: Decision) -> Decision:
        call, verify = work.call, work.options.verify
        counts = self._counts_of(entry) if call.counts is None else call.counts
        if verify != "off" and self._is_due(verify, work, counts, kept):
            return self._checked(work, entry, kept, decision)
        try:
            change = work.bind()
        except NotLaunched as error:
            return self._refused(work, entry, error.__cause__ or error)
        refused: BaseException | None = None
        try:
            executable = kept.executable
            if not self._plain or (self._timed and not (counts.replays + 1) % TIMED_EVERY):
                self._launch(work, counts, kept, change)
            elif change is None:
                executable.launch(work.stream)
            else:
                with kept.changing:
                    change(executable)
                    executable.launch(work.stream)
        except NotLaunched as error:
            refused = error.__cause__ or error
        except OstinatoError as error:
            # With other settings it may be an error of the wait after a launch.
            if not self._plain or isinstance(error, ContextPoisonedError):
                raise
            refused = error
        if refused is not None:
            return self._refused(work, entry, refused)
        counts.replays += 1
        entry.refusals = entry.disturbed = 0
        if call.given is None:
            return decision
        way = call.repeat
        if (
            call is self._last  # its repeat did not launch; below: it has none that is armed
            or way is None
            or not way.left
            or call.armed_at is not self.cache.epoch
            or way not in kept.repeats
        ) and not (isinstance(verify, int) or work.options.preconditions):
            self._arm(work, counts, kept)
        self._last = call
        return decision

    def _is_due(self, verify: str | int, work: Work, counts: Counts, kept: CachedGraph) -> bool:
        if not kept.is_checked(self, work.padded):
            return True
        return isinstance(verify, int) and (counts.replays + 1) % verify == 0

    def _launch(
        self,
        work: Work,
        counts: Counts,
        kept: CachedGraph,
        change: Change,
    ) -> None:
        """Replays once, after the change of the executable; times one replay in `TIMED_EVERY`.
        Raises the errors of `run_replay` and of `change`."""
        timed = self._timed and not (counts.replays + 1) % TIMED_EVERY
        begin = time.perf_counter_ns() if timed else 0
        run = partial(run_replay, work.call.key, kept.executable, work.stream)
        if change is None:
            run(self.settings, self.profile)
        else:
            with kept.changing:
                change(kept.executable)
                run(self.settings, self.profile)
        if begin:
            counts.times.append((time.perf_counter_ns() - begin) / 1e9)

    def _arm(self, work: Work, counts: Counts, kept: CachedGraph) -> None:
        """Arms the repeat of a call, so that the next call like it skips the engine."""
        call = work.call
        if not self._plain or self.cache.context.taps:
            return
        assert call.given is not None
        if call.repeat is None:
            call.repeat = self._new_repeat()
            if call.repeat is None:
                return
            self._repeated.add(call)
        self._count_repeats(call)
        call.armed_at = self.cache.epoch
        kept.repeats.add(call.repeat)
        call.repeat.arm(
            call.given,
            (call.armed_at, *work.wanted()),
            kept,
            kept.executable,
            work.stream,
            TIMED_EVERY - 1 - counts.replays % TIMED_EVERY,
        )
        if kept.leaving:  # set meanwhile by another thread
            call.repeat.cool()

    def _count_repeats(self, call: Call) -> None:
        launches = 0 if call.repeat is None else call.repeat.taken()
        if launches and call.entry is not None:
            self._counts_of(call.entry).replayed(launches, call.used, call.room)

    def drop(self, call: Call) -> None:
        """Removes a call that its door does not keep any longer."""
        if call.repeat is not None:
            call.repeat.cool()
            self._count_repeats(call)
            self._repeated.discard(call)

    def refused(self, work: Work, error: OstinatoError) -> Decision:
        """Makes a call whose repeat launched its graph and was refused."""
        entry, counts = self.entered(work.call)
        counts.calls += 1
        counts.used += work.call.used
        counts.padded += work.call.room
        return self._refused(work, entry, error)

    def _refused(self, work: Work, entry: Entry, error: BaseException) -> Decision:
        if work.stream.is_capturing():  # by another library: captures of this one are found before
            return self._run_eager(work, entry, Decision(Action.EAGER, Reason.INSIDE_CAPTURE))
        entry.refusals += 1
        why = str(error)
        if out_of_memory(error):
            self.cache.evict(entry.key)
            self.without_memory(work, entry, why)
        elif entry.refusals >= _REFUSALS:
            self.give_up(entry, Reason.REFUSED, why, strict=work.options.strict)
        else:
            self.cache.evict(entry.key)
        return self._fall_back(work, entry, Reason.REFUSED, why)

    def _fall_back(self, work: Work, entry: Entry, reason: Reason, why: str) -> Decision:
        """Runs the call eagerly where a graph was expected; raises EagerRunError if strict."""
        return self._run_eager(work, entry, fall_back(reason, why, strict=work.options.strict))

    # --- building
    def _build(self, work: Work, entry: Entry, decision: Decision) -> Decision:
        if work.recorded:
            return self._build_by_record(work, entry, decision)
        failure = self.make(work, entry)
        if work.done:
            self._counts_of(entry).ran_eagerly(0, work.words(decision))
            return decision
        if failure is not None and failure.reason is Reason.WAITS:
            return self._run_eager(work, entry, failure)
        if failure is not None:
            # The build ran nothing, so the call must still run the work once.
            return self._fall_back(work, entry, failure.reason, failure.detail)
        entry, _ = self.entered(work.call)
        unfit = work.unfit()  # the build may have found it
        if unfit is not None:
            return self._fall_back(work, entry, *unfit)
        kept = self.cache.lease(entry)
        if kept is None:
            return self._fall_back(work, entry, Reason.EVICTED, "")
        try:
            return self._replay(work, entry, kept, decision)
        finally:
            if kept.release():
                self.cache.let_go(kept)

    def make(self, work: Work, entry: Entry) -> Decision | None:
        """Builds the graph and keeps it; returns a Decision if that failed, else None."""
        work.begin()
        return self._install(work, entry, work.build)

    def _install(
        self, work: Work, entry: Entry, make: Callable[[], GraphExec], *, again: bool = True
    ) -> Decision | None:
        """Puts the executable that `make` returns into the cache.  An error of `make` gives the key
        up, except a ClosedError, a PoolSealedError, a lost context, and errors that `Work.failed`
        marks as passing or raises."""
        try:
            self.keys.add(entry.key)
            self.cache.get_or_capture(entry.key, make)
        except ContextPoisonedError:
            raise
        except CaptureLimitError as limit:  # another thread's capture, or one that `make` made
            reason, detail = self._capped(work, entry) or (Reason.CAPTURE_TIME, str(limit))
            return Decision(Action.EAGER, reason, detail)
        except PoolSealedError as error:  # the key is built once its pool is open again
            return Decision(Action.EAGER, Reason.POOL_SEALED, str(error))
        except ClosedError as error:  # a mistake of this call, which an eager run finds too
            return Decision(Action.EAGER, Reason.BUILD_FAILED, str(error))
        except Exception as error:
            failed = work.failed(error)
            if failed is None:
                raise
            # What the work held goes now, and not with the next collection of garbage: memory of
            # the device, and nodes of autograd that remember the stream of the capture.
            for each in causes(error):
                traceback.clear_frames(each.__traceback__)
        else:
            self._counts_of(entry).captures += 1
            return None
        reason, why = failed
        if reason is Reason.NO_MEMORY and again and self._make_room(work):
            return self._install(work, entry, make, again=False)
        if reason is not Reason.NO_MEMORY:
            work.trim(short=False)
        if reason in (Reason.NO_MEMORY, Reason.DISTURBED):
            return self._disturbed(work, entry, reason, why)
        if reason is Reason.WAITS:
            return Decision(Action.EAGER, reason, why)
        return self.give_up(entry, reason, why, strict=work.options.strict)

    def _make_room(self, work: Work) -> bool:
        """Evicts graphs that are not in use; returns whether there were any."""
        gone = self.cache.evict_idle()
        context = self.cache.context
        if gone and not context.captures:
            work.stream.synchronize()  # until then their memory is not freed
            context.collect()
        work.trim(short=True)
        return bool(gone)

    def without_memory(self, work: Work, entry: Entry, why: str) -> None:
        """Evicts graphs after the device had no memory for a key, and schedules another try."""
        self._make_room(work)
        self._disturbed(work, entry, Reason.NO_MEMORY, why)

    def _disturbed(self, work: Work, entry: Entry, reason: Reason, why: str) -> Decision:
        """Notes that a build failed for a reason that may pass.  The key is tried again after some
        calls, or given up if builds have failed too often in a row."""
        entry.disturbed += 1
        self._counts_of(entry).broken += 1
        if entry.disturbed >= _DISTURBANCES:
            why = f"{entry.disturbed} times: {why}"
            return self.give_up(entry, Reason.BUILD_FAILED, why, strict=work.options.strict)
        entry.wait = _WAIT ** (entry.disturbed - 1) - 1
        entry.disturbance = reason, why
        return Decision(Action.EAGER, reason, why)

    def _build_by_record(self, work: Work, entry: Entry, decision: Decision) -> Decision:
        """Records a real run at the bucketed sizes and builds the graph.  The answer of the run
        counts, also if the graph cannot be built.  If the driver refuses a part of the run, the
        call is run eagerly from its start if that is known to do nothing twice."""
        stream, options = work.stream, work.options
        work.begin()
        look = work.watch() if options.verify != "off" else None
        recording: Recording | None = None
        try:
            before = work.submitted
            with record(stream) as recording:
                work.run(padded=True)
            self._counts_of(entry).ran_eagerly(work.submitted - before, work.words(decision))
        except (ContextPoisonedError, ClosedError, PoolSealedError):
            raise
        except Exception as error:
            self.give_up(entry, Reason.BUILD_FAILED, str(error), strict=options.strict)
            # Work that ran before the refusal must not run twice.
            again = work.repeatable or recording is None or recording.did_nothing
            if options.strict or not (again and isinstance(error, DriverError)):
                raise
            return self._fall_back(work, entry, Reason.BUILD_FAILED, str(error))
        try:
            finding = look() if look is not None else None
        except StateLostError as lost:
            self.lose(lost)
            raise
        if finding is not None:
            return self._mismatched(work, entry, finding)

        recorded = recording

        def make() -> GraphExec:
            return recorded.build().instantiate()

        return self._install(work, entry, make) or decision

    def give_up(self, entry: Entry, reason: Reason, why: str, *, strict: bool) -> Decision:
        """Quarantines the key.  `strict`: its calls are not run eagerly either."""
        entry.reason = (reason, why)
        entry.looked = True
        self.cache.evict(entry.key)
        self.changed()
        refused = strict or reason is Reason.HOST_STATE
        served = "not run" if refused else "run eagerly"
        _log.warning("%s is %s from now on: %s: %s", entry.key, served, reason.value, why)
        return Decision(Action.EAGER, reason, why)

    def lose(self, lost: StateLostError) -> None:
        """Refuses all calls from here on: memory could not be put back."""
        self.broken = (Reason.STATE_LOST, str(lost))
        self.changed()

    def forget(self, key: Hashable) -> None:
        """Allows calls again, and ends the quarantine of this key."""
        self.broken = None
        for entry in self._counts:
            if entry.key == key:
                entry.forgive()
        self.changed()

    # --- stores
    def _restore(self, work: Work, entry: Entry) -> None:
        """Installs a key's graph from its store, if there is one that fits.  A faulty store raises
        no error: the store counts the reason, and the key is built."""
        if not work.options.graphs or self.cache.context.captures:
            return
        entry.looked = True
        made = work.restored()
        if made is None:
            return
        self.keys.add(entry.key)
        try:
            self.cache.install(entry.key, made)
        except ContextPoisonedError:
            raise
        except OstinatoError as error:
            made.close()
            work.not_restored(str(error))
        else:
            entry.looked = False  # after an eviction the store is searched again

    # --- checking
    def _checked(self, work: Work, entry: Entry, kept: CachedGraph, decision: Decision) -> Decision:
        counts = self._counts_of(entry)
        try:
            report = work.check(kept.executable, partial(self._launch, work, counts, kept))
        except NotLaunched as refused:
            return self._refused(work, entry, refused.__cause__ or refused)
        except StateLostError as lost:
            self.lose(lost)
            raise
        self.last_check = report
        counts.verified += 1
        counts.replays += 1
        kept.note_check(self, work.padded)
        if report.finding is None:
            return decision
        return self._mismatched(work, entry, report.finding)

    def _mismatched(self, work: Work, entry: Entry, finding: Finding) -> Decision:
        """Runs the call eagerly after a failed check, with all memory as before the call.

        Raises VerificationError if strict, or if the work keeps state on the host.
        """
        why = str(finding)
        if finding.cause is Cause.HOST_STATE:
            why += ". Put that state right and forget() the step's sizes, or switch its graphs off"
            self.give_up(entry, Reason.HOST_STATE, why, strict=True)
            self.broken = entry.reason
            self.changed()
            raise VerificationError(f"{entry.key}: {why}")
        decision = self.give_up(entry, Reason.MISMATCH, why, strict=work.options.strict)
        if work.options.strict:
            raise VerificationError(f"{entry.key}: {why}")
        return self._run_eager(work, entry, decision)

    # --- many replays in a row
    def hold(
        self, work: Work, relaunch: Callable[[Callable[[], None]], None]
    ) -> HeldReplay | Decision:
        """Implements `GraphedStep.hold`.  `relaunch` takes the stream's turn, binds, launches."""
        call, verify = work.call, work.options.verify
        entry, decision = self.next(work)
        if decision.action in (Action.EAGER, Action.REFUSE):
            return decision
        if isinstance(verify, int):
            return replace(
                decision,
                detail=f"not held: verify={verify} counts replays, and a held graph is "
                'launched without that; call the step, or use verify="first"',
            )
        if decision.action is Action.BUILD:
            if work.recorded or verify != "off":
                return decision
            failure = self.make(work, entry)
            if failure is not None:
                return failure
            entry, _ = self.entered(call)
        lease = ExitStack()
        try:
            executable = lease.enter_context(self.cache.hold(call.key))
        except NotHeldError:  # evicted at once, by another thread
            return Decision(Action.BUILD, Reason.FIRST_USE)
        kept = entry.graph
        if kept is None:
            lease.close()
            return Decision(Action.BUILD, Reason.FIRST_USE)
        if verify != "off" and not kept.is_checked(self, call.padded):
            lease.close()
            return replace(decision, detail="its check is due")
        work.bind()
        run = partial(launch_in_turn, work.stream, executable)
        if not self._plain or work.binds:
            args = call.key, executable, work.stream, self.settings, self.profile
            run = partial(relaunch, partial(replay_as_set, *args))
        counts = HeldCounts(call.used, call.room)
        self._count_given_back()
        # A finaliser may end the lease, in any thread, and must not wait for the engine's lock.
        lease.callback(self._given_back.append, (entry, counts))
        self._held.append((entry, counts))
        return HeldReplay(work.stream.context, run, lease, counts)

    def _count_given_back(self) -> None:
        while self._given_back:
            entry, held = self._given_back.popleft()
            self._held.remove((entry, held))
            self._counts_of(entry).replayed(held.launches, held.used, held.padded)

    # --- numbers
    def statistics(
        self, calls: Iterable[Call] | None = None, words: Callable[[Call], str] | None = None
    ) -> dict[str, Any]:
        """Returns the fields of a `StepStatistics` for these calls; None: for all keys.  `words`
        gives the text that names a call in its record; None: the key is the text."""
        for call in self._repeated:
            self._count_repeats(call)
        self._sweep()
        named = {self.entered(call)[0]: call for call in calls or ()}
        counts = {e: self._counts_of(e).copy() for e in (self._counts if calls is None else named)}
        dropped = self._dropped.copy() if calls is None else Counts()
        for entry, held in self._held:
            counts.get(entry, dropped).replayed(held.launches, held.used, held.padded)
        lines = tuple(
            self._line(entry, each, words(named[entry]) if words else str(entry.key))
            for entry, each in counts.items()
        )
        total = Counts()
        for each in [*counts.values(), dropped]:
            total.add(each)
        return {
            **total.fields(),
            "restored": sum(line.restored for line in lines),
            "launches_eager": total.launches_eager,
            "quarantined": {str(line.key): line.reason for line in lines if line.reason},
            "last_check": self.last_check,
            "keys": lines,
        }

    def _line(self, entry: Entry, counts: Counts, words: str) -> StepKeyStatistics:
        reason = "" if entry.reason is None else entry.reason[1]
        decision: Literal["warmed up", "replayed", "evicted", "eager"] = "eager"
        if not reason:
            there = entry.graph is not None
            made = counts.captures or entry.installed
            decision = "replayed" if there else "evicted" if made else "warmed up"
        return StepKeyStatistics(
            key=entry.key,
            words=words,
            decision=decision,
            reason=reason,
            restored=entry.installed,
            seconds=Percentiles.of(counts.times),
            graph=self.cache.key_statistics(entry.key),
            **counts.fields(),
        )


def out_of_memory(error: BaseException) -> bool:
    """True if an error has the status "out of memory"."""
    return any(getattr(e, "status", None) == Status.OUT_OF_MEMORY for e in causes(error))


def disturbed(error: BaseException) -> bool:
    """True if an error of a capture has status 901 (another event had broken the capture before)
    and no call inside the capture was refused."""
    rules = range(Status.STREAM_CAPTURE_UNSUPPORTED, Status.STREAM_CAPTURE_WRONG_THREAD + 1)
    statuses = {getattr(each, "status", None) for each in causes(error)}
    return {s for s in statuses if s in rules} == {Status.STREAM_CAPTURE_INVALIDATED}
