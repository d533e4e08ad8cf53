"""What `Graphed` knows of a key, of its graph, and of a call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato import MemoryRange
from ostinato.interop.reading.guards import Seen
from ostinato.interop.reading.moves import Moves
from ostinato.interop.reading.padding import DynamicAxis
from ostinato.interop.reading.trees import Tree
from ostinato.lowlevel import Call


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """The memory that a graph uses and that is not its own."""

    storages: list[tuple[MemoryRange, Any]]
    """Each piece once, with an array that keeps it alive."""
    pattern: list[int]
    """Of each array, in which piece it is."""


@dataclass(frozen=True, slots=True, eq=False)
class AttachedGradient:
    """What a captured function did to an array's gradient, which a replay is to do."""

    array: Any
    name: str
    before: Any
    after: Any

    @property
    def fits(self) -> bool:
        """Whether a replay does what the function would do now.  It writes where the capture did:
        what is added to must be that, and if there was nothing, the function may have been about to
        add to what is there now."""
        if self.before is not None and self.before is not self.after:
            return True  # it was replaced, whatever it was
        return getattr(self.array, self.name) is self.before


@dataclass(slots=True, eq=False, weakref_slot=True)
class Captured:
    """What belongs to one graph; the graph owns it."""

    owner: object
    """What the library needs while the graph can run: its own graph, its pool."""
    inputs: list[Any]
    stage: Callable[[Sequence[Any]], None]
    outputs: list[Any]
    tree: Tree
    clones: list[bool]
    """Which outputs are copied; the others are views of memory that the caller declared static."""
    written: tuple[int, ...]
    """Inputs that the function writes, which are copied back."""
    bound: Bound
    pointers: list[int]
    """Of the static arguments."""
    epoch: int
    """Of the guarded arrays."""
    kept: list[object] = field(default_factory=list, repr=False)
    """What keeps the other memory that the graph points at, which nobody else may keep: a table
    that a helper made, and will forget."""
    moves: Moves | None = None
    """How the graph itself copies the arrays of a call; None if that is done around it."""
    recipes: tuple[tuple[Any, ...], ...] = ()
    """Of new arrays for the outputs that it copies itself (`Library.recipe`)."""
    give: Callable[..., Any] = lambda made: None
    """The result of a call, from the outputs that were copied by the graph (none if it copies
    none), the objects that it was given if it holds any, and for the call's dynamic sizes what its
    outputs are cut to."""
    call: ReadCall | None = None
    """The call that was captured, with the graph's own inputs as its arrays, and"""
    result: Any = None
    """its result; both for its file, and None if it is not to be saved."""
    rebound: bool = False
    """Whether it was bound to other memory than it was captured with."""
    attached: tuple[AttachedGradient, ...] = ()
    """The gradients that the function gives, or adds to."""
    compared: bool = False
    """Whether its inputs were compared with the arguments after a replay."""

    def detach(self) -> None:
        """Takes the gradients away that the capture or a replay gave, before an eager run."""
        for each in self.attached:
            setattr(each.array, each.name, each.before)


@dataclass(slots=True, eq=False)
class Line(Call):
    """One key."""

    words: str = ""
    refused: str = ""
    """Why its calls raise: they need gradients."""
    warmed: bool = False
    captured: Callable[[], Captured | None] = lambda: None
    text: str = ""
    """Of the key, for a file; what it is not the same in another process for, behind a "!"."""
    names: list[str] = field(default_factory=list)
    """Of the arrays that are not copied, for a file."""
    written: set[int] = field(default_factory=set)
    """Arguments that the function writes, among those that are copied."""
    state: set[int] = field(default_factory=set)
    """What it writes of the static arguments and of the arrays that it uses besides them."""
    shapes: tuple[list[tuple[int, ...]], list[int]] | None = None
    """The result's shapes of the last eager run, and the dynamic sizes of that."""
    tokens: list[Hashable] = field(default_factory=list)
    """What that result is besides its arrays."""
    cuts: dict[tuple[int, int], DynamicAxis] = field(default_factory=dict)
    """By the result's number and its axis."""
    learned: set[int] = field(default_factory=set)
    """Dynamic sizes of which it is known where they show in the results."""
    unbound: str = ""
    """Why its last graph could not be bound to what a call uses."""
    unmatched: int = 0
    """Replays that were found by the key: after each power of two a short way is looked for."""

    @property
    def name(self) -> str:
        return str(self.key)

    @property
    def reason(self) -> str:
        """Why its calls run eagerly; empty if they do not."""
        reason = None if self.entry is None else self.entry.reason
        return "" if reason is None else reason[1]

    @property
    def times(self) -> deque[float]:
        """Seconds of the whole calls that were timed."""
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
    """Among the dynamic arrays of the call."""
    fill: float | None
    """What the padding holds; None if no answer may depend on it."""


@dataclass(slots=True, eq=False)
class ReadCall:
    """One call, taken apart."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any] = field(default_factory=list)
    """The arrays that are copied."""
    statics: list[Any] = field(default_factory=list)
    """Those of static arguments."""
    dynamic: list[Dynamic | None] = field(default_factory=list)
    """Of each leaf; empty where no argument can have a dynamic axis."""
    sizes: list[int] = field(default_factory=list)
    """Of the dynamic arrays, in order."""
    tokens: list[Hashable] = field(default_factory=list)
    """What stands for the arguments in its key."""
    keyed: bool = False
    """Whether it has a key of its own: all that decides what it does could be read."""
    seen: Seen | None = None
    """What the function uses besides its arguments."""
    epoch: int = 0
    """Of the guarded arrays: it is another one after one of them has moved."""

    @property
    def axes(self) -> list[Dynamic | None]:
        """Of each leaf its dynamic axis, or None."""
        return self.dynamic or [None] * len(self.leaves)

    @property
    def padded(self) -> frozenset[int]:
        """Which of its arrays are shorter than their bucket."""
        axes = enumerate(self.dynamic)
        return frozenset(i for i, d in axes if d is not None and d.size != d.capacity)

    @property
    def state(self) -> list[Any]:
        """The arrays that it uses and that are not copied."""
        return [*self.statics, *([] if self.seen is None else self.seen.arrays)]
