"""Records of `Graphed`: a key, the graph of a key, and a call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ostinato import MemoryRange, Stream
from ostinato.interop.reading.chains import Chain
from ostinato.interop.reading.guards import Seen
from ostinato.interop.reading.moves import Moves
from ostinato.interop.reading.padding import DynamicAxis
from ostinato.interop.reading.together import Agreement
from ostinato.interop.reading.trees import Tree
from ostinato.lowlevel import Call

_MOST_FAILURES = 8
"""A key is given up after this many builds in a row that made no chain."""
TRIALS = 3
"""The number of eager runs, and of calls by a chain, that are timed, to compare them."""
_MORE_TRIALS = 12
"""The number of calls by a chain that are timed before the chain is given up as slower."""
_GAIN = 0.95
"""A chain is kept if it takes at most this part of the time of an eager run."""


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """The memory that a graph uses and that the caller owns."""

    storages: list[tuple[MemoryRange, Any]]
    """The pieces of memory, each once, with an array that keeps it alive."""
    pattern: list[int]
    """The index in `storages` of each array's memory."""


@dataclass(frozen=True, slots=True, eq=False)
class AttachedGradient:
    """An array's gradient before and after a captured call; a replay makes the same change."""

    array: Any
    name: str
    before: Any
    after: Any
    read: bool
    """True if the graph points at the memory of `before`."""

    @property
    def fits(self) -> bool:
        """True if a replay does what the function would do now.  A replay writes into the gradient
        of the capture, so a gradient that was added to must still be that array; and if there was
        none, there must be none now, since the function would add to it."""
        if self.before is not None and self.before is not self.after and not self.read:
            return True  # the function replaced it, whatever it was
        return getattr(self.array, self.name) is self.before


class ReplayedBackward(Protocol):
    """The backward of a captured call."""

    @property
    def pending(self) -> bool:
        """True while a replay may still be followed by its backward, which needs the memory of the
        call."""
        ...

    def begin(self, leaves: Sequence[Any], lock: Any, take: Callable[[], Stream], /) -> None:
        """Notes the copied arguments of the call that is replayed next.  `take` returns, under the
        lock, the caller's stream after the work of earlier calls."""
        ...

    def attach(self, results: Sequence[Any], /) -> list[Any]:
        """Returns copies of the results of that replay as arrays with gradients."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Captured:
    """The data of one graph besides its nodes; the graph owns it."""

    inputs: list[Any]
    stage: Callable[[Sequence[Any]], None]
    """A function that copies a call's arrays into `inputs`, or makes the first graph of a chain
    copy them, and the last one its outputs into the arrays after them; not used with `moves`."""
    outputs: list[Any]
    tree: Tree
    clones: list[bool]
    """True for each output that is copied; the others are views of memory in `bound`."""
    written: tuple[int, ...]
    """Indices of the inputs that the function writes, which are copied back after a replay."""
    bound: Bound
    pointers: list[int]
    """Addresses of the static arguments."""
    epoch: int
    """`ReadCall.epoch` of the call that the graph was last bound to."""
    kept: list[object] = field(default_factory=list, repr=False)
    """Owners of other memory that the graph points at, which may have no other reference: a table
    that a helper made and will drop from its cache."""
    moves: Moves | None = None
    """The copies that nodes of the graph make; None if it makes none, or is one of several."""
    moved: tuple[int, ...] = ()
    """Indices of the outputs that nodes of the graph copy."""
    recipes: tuple[tuple[Any, ...], ...] = ()
    """Arguments of `Library.new` for the outputs that the graph itself copies
    (`Library.recipe`)."""
    give: Callable[..., Any] = lambda made: None
    """A function that builds a call's result from the outputs that the graph copied (none if it
    copies none), the static objects in the result, and for dynamic sizes the cut outputs."""
    owner: object = None
    """Objects of the library that must live while the graph can run: its own graph, its pool."""
    call: ReadCall | None = None
    """The captured call, with the graph's inputs as its arrays; None without a store."""
    result: Any = None
    """The result of `call`; None without a store."""
    rebound: bool = False
    """True if the graph was bound to other memory than it was captured with."""
    attached: tuple[AttachedGradient, ...] = ()
    """The gradients that the function sets or adds to."""
    chain: Chain | None = None
    """The graphs before this one, if the call waits for the device."""
    marks: list[object] = field(default_factory=list)
    """Objects that stand for the values of `Chain.places` when results are taken apart."""
    backward: ReplayedBackward | None = None
    """The backward of the call, if its results have gradients."""
    compared: bool = False
    """True if the inputs were compared with the arguments after a replay."""

    def detach(self) -> None:
        """Removes the gradients that the capture or a replay has set, before an eager run."""
        for each in self.attached:
            setattr(each.array, each.name, each.before)


@dataclass(slots=True, eq=False)
class Waiting:
    """The chains of a key whose calls wait for the device.

    Each chain has a line of its own, and serves the calls in which the host sees its values."""

    why: str
    """The reason why the calls cannot be one graph."""
    chains: list[Line] = field(default_factory=list)
    """The last used first."""
    failures: int = 0
    """Builds in a row that gave no chain."""
    strange: int = 0
    """Calls in which the host saw values of no chain."""
    eager: list[float] = field(default_factory=list)
    """Seconds of eager runs, each with a wait for the device at its end."""
    chained: list[float] = field(default_factory=list)
    """Seconds of calls that a chain served, each with such a wait."""
    weighed: bool = False
    """True if the times were compared, and no more are taken."""
    results: dict[Hashable, list[Hashable]] = field(default_factory=dict)
    """Tokens of the last result by the values of the waits, if they are not those of the warm-up.
    A chain is kept if they come again."""

    def weigh(self, seconds: float, words: str) -> str:
        """Notes the time of a call that a chain served.  Returns the reason why the key is given
        up, if enough calls show that its chains are no faster than eager runs; else ""."""
        self.chained.append(seconds)
        chained, eager = min(self.chained), min(self.eager)
        slower, count = chained > _GAIN * eager, len(self.chained)
        self.weighed = count >= (_MORE_TRIALS if slower else TRIALS)
        if not (self.weighed and slower):
            return ""
        times = f"{1e6 * chained:.0f} µs, and eagerly {1e6 * eager:.0f} µs"
        return f"as a chain ({words}) a call takes {times}"

    def note_build(self, chain: Line) -> str:
        """Notes that a chain was built, or not.  Returns the reason why the key is given up, if no
        build can succeed or too many did not; else ""."""
        if chain.captured() is not None:
            self.failures = 0
            return ""
        self.failures += 1
        if not chain.reason and self.failures < _MOST_FAILURES:
            return ""
        return chain.reason or chain.unbound or "no chain of graphs could be made"


@dataclass(slots=True, eq=False)
class Line(Call):
    """The state of one key: a line of the table that `explain` returns."""

    words: str = ""
    refused: str = ""
    """The reason why its calls raise InputError: they need gradients.  Empty if they do not."""
    warmed: bool = False
    differentiated: bool = False
    """True if its results have gradients, and replays have a backward (`gradients="replay"`)."""
    twins: list[Line] = field(default_factory=list)
    """Lines of the same key with graphs of their own, for calls while backwards are pending."""
    captured: Callable[[], Captured | None] = lambda: None
    text: str = ""
    """The key's text for a graph file; "!" and a reason if it differs in other processes."""
    names: list[str] = field(default_factory=list)
    """Names of the arrays that are not copied, for a graph file."""
    written: set[int] = field(default_factory=set)
    """Indices of the copied arguments that the function writes."""
    state: set[int] = field(default_factory=set)
    """Indices in `ReadCall.state` of the arrays that the function writes."""
    shapes: tuple[list[tuple[int, ...]], list[int]] | None = None
    """The shapes of the results of the last eager run, and the dynamic sizes of that run."""
    tokens: list[Hashable] = field(default_factory=list)
    """Tokens of the result of the last eager run: everything but its arrays."""
    cuts: dict[tuple[int, int], DynamicAxis] = field(default_factory=dict)
    """The dynamic axes of the results, by the result's index and the axis."""
    learned: set[int] = field(default_factory=set)
    """Indices of the dynamic sizes whose axes in the results are known."""
    unbound: str = ""
    """The reason why the last graph could not be bound to the memory of a call."""
    waits: Waiting | None = None
    """The chains of its calls; None if its calls do not wait for the device."""
    parent: Line | None = None
    """The line of the key, for one of its chains."""
    ranks: Agreement | None = None
    """The ranks with which its calls communicate."""
    together: bool = False
    """True if all these ranks have a graph of it."""
    unmatched: int = 0
    """Replays that went by the key; a short way is tried when the count is a power of two."""

    @property
    def name(self) -> str:
        return str(self.key)

    @property
    def reason(self) -> str:
        """The reason why its calls run eagerly; empty if they do not."""
        reason = None if self.entry is None else self.entry.reason
        return "" if reason is None else reason[1]

    @property
    def times(self) -> deque[float]:
        """Durations of the timed calls, from call to return, in seconds."""
        assert self.counts is not None
        return self.counts.times


@dataclass(frozen=True, slots=True)
class Dynamic:
    """The dynamic axis of one array of a call."""

    axis: int
    size: int
    capacity: int
    """The bucket of the size."""
    place: int
    """The index of the array among the dynamic arrays of the call."""
    fill: float | None
    """The value of the padding; None if no answer may depend on the padding."""


@dataclass(slots=True, eq=False)
class ReadCall:
    """A call, taken apart into arrays and tokens."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any] = field(default_factory=list)
    """The arrays that are copied into the graph's inputs."""
    statics: list[Any] = field(default_factory=list)
    """The arrays of the static arguments."""
    dynamic: list[Dynamic | None] = field(default_factory=list)
    """The dynamic axis of each leaf, or None; empty if no argument can have a dynamic axis."""
    sizes: list[int] = field(default_factory=list)
    """The sizes of the dynamic axes, in the order of the arrays."""
    tokens: list[Hashable] = field(default_factory=list)
    """The part of the key that comes from the arguments."""
    keyed: bool = False
    """True if the call has a key of its own: all that decides what it does could be read."""
    seen: Seen | None = None
    """The values that the function uses besides its arguments; None without guards."""
    epoch: int = 0
    """A number that changes when a guarded array is replaced or moves."""

    @property
    def axes(self) -> list[Dynamic | None]:
        """The dynamic axis of each leaf, or None."""
        return self.dynamic or [None] * len(self.leaves)

    @property
    def padded(self) -> frozenset[int]:
        """Indices of the leaves that are shorter than their bucket."""
        axes = enumerate(self.dynamic)
        return frozenset(i for i, d in axes if d is not None and d.size != d.capacity)

    @property
    def state(self) -> list[Any]:
        """The arrays that the function uses and that are not copied: the static, then the
        guarded."""
        return [*self.statics, *([] if self.seen is None else self.seen.arrays)]
