"""The policy of a graphed step: a pure function from its situation to a decision with a reason.

It calls no driver and does no I/O.  A graph that fails costs speed, not correctness: the call runs
eagerly, and the reason is counted.  If the eager run may be wrong too, or if the step is strict,
the call raises.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ostinato.step.limits import Refusal


class Action(enum.Enum):
    """The action of one call of a step."""

    EAGER = "eager"
    """Runs launch by launch."""
    BUILD = "build"
    """Makes the graph of this key: captures and then replays it, or records a real run."""
    REPLAY = "replay"
    REFUSE = "refuse"
    """Raises: neither a replay nor an eager run is known to be right, or the step is strict."""


class Reason(enum.StrEnum):
    """The reason of a decision."""

    REPLAYED = "the graph of this key is there"
    FIRST_USE = "the graph of this key is made now"
    WARMING_UP = "warming up before the capture"
    GRAPHS_OFF = "graphs are switched off"
    PROFILING = "profiling per operation"
    INSIDE_CAPTURE = "the stream is being captured, so the work joins that capture"
    BUILD_FAILED = "building the graph failed before"
    MISMATCH = "the replay gave another answer than the eager run"
    HOST_STATE = "the step keeps state on the host, which a capture or a check has advanced"
    STATE_LOST = "a check could not put back what it had changed"
    PRECONDITION = "a precondition is not met"
    OVER_BUCKETS = "the size is over the largest bucket"
    NOT_GRAPHABLE = "the call cannot be a graph"
    OVERLAP = "an argument shares memory with another that is written"
    WAITS = "the call waits for the device; it is timed before it becomes a chain of graphs"
    LEARNING = "where the size shows in the results is learned from an eager run"
    REFUSED = "the replay was refused, and nothing of it ran"
    RECAPTURED = Refusal.RECAPTURED.value
    CAPTURE_TIME = Refusal.SECONDS.value
    POOL_SEALED = "the capture pool is sealed"
    DISTURBED = "something else than the step broke its capture, which is tried again later"
    NO_MEMORY = "the device has no memory for the graph, which is tried again later"
    EVICTED = "another thread evicted the graph before its first replay"

    @property
    def silent(self) -> bool:
        """True if the caller would not expect an eager run for this reason: graphs are not switched
        off, the run is no step towards a graph, and no capture is under way."""
        return self not in _EXPECTED


_EXPECTED = {
    Reason.REPLAYED,
    Reason.FIRST_USE,
    Reason.WARMING_UP,
    Reason.WAITS,
    Reason.GRAPHS_OFF,
    Reason.PROFILING,
    Reason.INSIDE_CAPTURE,
}


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts that the decision depends on."""

    graphs: bool = True
    profiling: bool = False
    inside_capture: bool = False
    quarantine: tuple[Reason, str] | None = None
    """The reason why this key runs eagerly from now on, or is refused, with the error's text."""
    unmet: tuple[str, ...] = ()
    """Names of the preconditions that are not met."""
    unfit: tuple[Reason, str] | None = None
    """The reason why this call runs eagerly, whatever graph its key has, with the details."""
    has_graph: bool = False
    runs: int = 0
    """The number of eager runs of this key so far."""
    warmups: int = 1
    capped: tuple[Reason, str] | None = None
    """The reason why no graph can be made now (limits of the cache, a sealed pool, a capture that
    was broken and is tried again later), with the details."""
    strict: bool = False
    """True if a silent eager run is an error."""
    records: bool = False
    """True if the graph is built by recording, so that the recorded run is the first real run."""


@dataclass(frozen=True, slots=True)
class Decision:
    """An action, its reason, and details as text."""

    action: Action
    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.action.value}: {self.reason.value}{detail}"


REPLAY = Decision(Action.REPLAY, Reason.REPLAYED)
"""The decision to replay, which needs no details."""


def decide(situation: Situation) -> Decision:
    """Returns the decision for a situation.  The first rule below that holds decides."""
    s = situation
    if s.quarantine is not None and s.quarantine[0] is Reason.STATE_LOST:
        return Decision(Action.REFUSE, *s.quarantine)  # an eager run would read lost state too
    if not s.graphs:
        return Decision(Action.EAGER, Reason.GRAPHS_OFF)
    if s.profiling:
        return Decision(Action.EAGER, Reason.PROFILING)
    if s.inside_capture:
        return Decision(Action.EAGER, Reason.INSIDE_CAPTURE)
    if s.unfit is not None:
        return fall_back(*s.unfit, strict=s.strict)
    if s.quarantine is not None:
        reason, why = s.quarantine
        return fall_back(reason, why, strict=s.strict or reason is Reason.HOST_STATE)
    if s.unmet:
        return fall_back(Reason.PRECONDITION, ", ".join(s.unmet), strict=s.strict)
    if s.has_graph:
        return REPLAY
    if not s.records and s.runs < s.warmups:
        return Decision(Action.EAGER, Reason.WARMING_UP)
    if s.capped is not None:
        return fall_back(*s.capped, strict=s.strict)
    return Decision(Action.BUILD, Reason.FIRST_USE)


def fall_back(reason: Reason, detail: str, *, strict: bool) -> Decision:
    """Returns the decision where a replay was expected and is not possible: an eager run, or a
    refusal if the step is strict."""
    return Decision(Action.REFUSE if strict else Action.EAGER, reason, detail)
