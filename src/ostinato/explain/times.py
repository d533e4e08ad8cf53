"""The host time of replays: upload, launch, synchronise, in seconds.  `graph.timing` has the times
of nodes."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from ostinato.driver.forking import new_lock
from ostinato.driver.stream import Stream
from ostinato.errors import ContextPoisonedError, InputError, OstinatoError
from ostinato.graph import GraphExec
from ostinato.graph.timing import trace_event
from ostinato.settings import ReplaySettings, ResolvedReplaySettings, replay_settings

_log = logging.getLogger(__name__)

_PARTS = ("upload", "launch", "synchronize", "total")
"""The values of `part` in `ReplayProfile.percentiles`."""


@dataclass(frozen=True, slots=True)
class ReplayEvent:
    """One replay.  Times are seconds of host time; `start` counts from the profile's start.

    `synchronize` is zero if the replay was not waited for; then no field includes the time that the
    device took.
    """

    number: int
    key: str
    start: float
    upload: float
    launch: float
    synchronize: float

    @property
    def total(self) -> float:
        return self.upload + self.launch + self.synchronize


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of durations in seconds, by nearest rank; zeros if there are none."""

    count: int
    p50: float
    p90: float
    p99: float
    largest: float

    @classmethod
    def of(cls, durations: Iterable[float]) -> Percentiles:
        """Computes the percentiles of durations in any order."""
        values = sorted(durations)
        if not values:
            return cls(0, 0.0, 0.0, 0.0, 0.0)

        def rank(share: float) -> float:
            return float(values[max(0, math.ceil(share * len(values)) - 1)])

        return cls(len(values), rank(0.5), rank(0.9), rank(0.99), values[-1])


class ReplayProfile:
    """A collector of replay events: keeps the latest `keep`, prints the first and then one in
    `print_every`, passes all to `sinks`.

    `printer` takes the printed lines; without one they go to the log, at level INFO.  A sink is
    called with each event on the replaying thread; its exceptions go to the caller.  Raises
    InputError for `keep` below 0 and `print_every` below 1.

        step = ost.GraphedStep(run, stream=stream, cache=cache, profile=ost.explain.ReplayProfile())
        step.profile.percentiles("launch").p50
    """

    def __init__(
        self,
        *,
        keep: int = 10_000,
        print_every: int = 64,
        printer: Callable[[str], object] = _log.info,
        sinks: tuple[Callable[[ReplayEvent], object], ...] = (),
    ) -> None:
        if keep < 0 or print_every < 1:
            raise InputError(f"keep={keep} must be 0 or more, print_every={print_every} 1 or more")
        self._events: deque[ReplayEvent] = deque(maxlen=keep)
        self._print_every = print_every
        self._printer = printer
        self._sinks = sinks
        self._began = time.perf_counter_ns()
        self._count = 0
        self._lock = new_lock()
        self._nvtx = _nvtx()

    def __repr__(self) -> str:
        return f"<ReplayProfile of {self._count} replays, {len(self._events)} kept>"

    @property
    def events(self) -> tuple[ReplayEvent, ...]:
        """The latest events, oldest first."""
        with self._lock:
            return tuple(self._events)

    @property
    def count(self) -> int:
        """The number of all replays so far, also of those no longer kept."""
        return self._count

    def run(
        self, key: Hashable, run: GraphExec, stream: Stream, settings: ResolvedReplaySettings
    ) -> None:
        """Replays once and stores an event.  Raises the errors of `run_replay`."""
        name = str(key)
        with nullcontext() if self._nvtx is None else self._nvtx.annotate(f"replay {name}"):
            begin = time.perf_counter_ns()
            with _not_launched:
                if settings.upload:
                    run.upload(stream)
                uploaded = time.perf_counter_ns()
                run.launch(stream)
            launched = time.perf_counter_ns()
            if settings.synchronize:
                stream.synchronize()
            done = time.perf_counter_ns()
        with self._lock:
            self._count += 1
            event = ReplayEvent(
                self._count,
                name,
                (begin - self._began) / 1e9,
                (uploaded - begin) / 1e9 if settings.upload else 0.0,
                (launched - uploaded) / 1e9,
                (done - launched) / 1e9 if settings.synchronize else 0.0,
            )
            self._events.append(event)
        if event.number % self._print_every == 1 % self._print_every:
            self._printer(
                f"ostinato: replay {event.number} of {name}: upload {1e6 * event.upload:.1f} us, "
                f"launch {1e6 * event.launch:.1f} us, sync {1e6 * event.synchronize:.1f} us, "
                f"total {1e6 * event.total:.1f} us"
            )
        for sink in self._sinks:
            sink(event)

    def percentiles(self, part: str = "total", *, key: Hashable = None) -> Percentiles:
        """Returns the percentiles of "upload", "launch", "synchronize" or "total" of the kept
        events, of one key or of all.  Raises InputError for another part."""
        if part not in _PARTS:
            raise InputError(f"part={part!r}; there are {', '.join(_PARTS)}")
        name = None if key is None else str(key)
        return Percentiles.of(getattr(e, part) for e in self.events if name in (None, e.key))

    def to_json_lines(self) -> str:
        """Returns one line for each kept event, a JSON object."""
        return "".join(json.dumps(asdict(e) | {"total": e.total}) + "\n" for e in self.events)

    def to_chrome_trace(self) -> dict[str, Any]:
        """Returns the events for chrome://tracing and Perfetto: complete events, whose times are
        in microseconds."""
        trace = []
        for event in self.events:
            at = event.start
            for part in ("upload", "launch", "synchronize"):
                duration = getattr(event, part)
                if duration:
                    told = {"key": event.key, "number": event.number}
                    trace.append(trace_event(part, "replay", at, duration, told))
                at += duration
        return {"traceEvents": trace, "displayTimeUnit": "ns"}


class NotLaunched(Exception):
    """An error: a replay was refused before any of it ran; `__cause__` has the reason."""


class _NotLaunched:
    """A `with` block that turns the errors of a launch into NotLaunched, except where the whole
    context is lost.  A class, because a generator would cost a replay a microsecond."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        if isinstance(error, OstinatoError) and not isinstance(error, ContextPoisonedError):
            raise NotLaunched(str(error)) from error


_not_launched = _NotLaunched()


def run_replay(
    key: Hashable,
    run: GraphExec,
    stream: Stream,
    settings: ResolvedReplaySettings,
    profile: ReplayProfile | None,
) -> None:
    """Replays once, with an upload before and a synchronise after it if the settings ask for them.

    Raises NotLaunched if nothing ran, the errors of `Stream.synchronize`, and ContextPoisonedError.
    """
    if profile is not None and settings.profile:
        profile.run(key, run, stream, settings)
        return
    with _not_launched:
        if settings.upload:
            run.upload(stream)
        run.launch(stream)
    if settings.synchronize:
        stream.synchronize()


def replay_as_set(
    key: Hashable,
    run: GraphExec,
    stream: Stream,
    settings: ResolvedReplaySettings,
    profile: ReplayProfile | None,
) -> None:
    """Calls `run_replay`, and raises the errors of `GraphExec.launch` instead of NotLaunched."""
    try:
        run_replay(key, run, stream, settings, profile)
    except NotLaunched as refused:
        assert refused.__cause__ is not None
        raise refused.__cause__ from None


def resolved(
    settings: ReplaySettings | None, profile: ReplayProfile | None
) -> tuple[ResolvedReplaySettings, ReplayProfile | None]:
    """Returns the settings of replays, and the profile that collects them, or None.  A given
    profile switches profiling on unless the settings forbid it; settings that profile make a new
    one.

    Raises SettingsError, and InputError for arguments of other types.
    """
    for what, value, kind in (
        ("settings", settings, ReplaySettings),
        ("profile", profile, ReplayProfile),
    ):
        if value is not None and not isinstance(value, kind):
            raise InputError(f"{what}: a {kind.__name__} is needed, not {value!r}")
    if profile is not None and (settings is None or settings.profile is None):
        settings = replace(settings or ReplaySettings(), profile=True)
    decided = replay_settings(settings)
    if profile is None and decided.profile:
        printer = _print if decided.printed else _log.info
        profile = ReplayProfile(print_every=decided.print_every, printer=printer)
    return decided, profile


def _print(line: str) -> None:
    """Prints to standard error, as OSTINATO_PROFILE requests."""
    import sys

    print(line, file=sys.stderr)


def _nvtx() -> Any:
    """Returns the nvtx package, for ranges in NVIDIA's profilers; None if it is not installed."""
    try:
        import nvtx
    except ImportError:
        return None
    return nvtx
