"""What `Graphed` knows of a key, of its graph, and of a call."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato import MemoryRange
from ostinato.interop.graphing.guards import Seen
from ostinato.interop.graphing.moves import Moves
from ostinato.interop.graphing.padding import Cut
from ostinato.interop.graphing.trees import Tree

__all__ = ["Bound", "Captured", "Line", "Work"]


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """The memory that a graph uses and that is not its own."""

    storages: list[tuple[MemoryRange, Any]]
    """Each piece once, with an array that keeps it alive."""
    pattern: list[int]
    """Of each array, in which piece it is."""


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """What a file is made of, besides the graph."""

    key: str
    """Text of the key."""
    result: Any
    """How the result is put together, as plain data."""
    work: Work
    """A call that has the graph's own inputs as its arrays."""
    why_not: str = ""
    """Why it cannot be saved."""
    restored: bool = False


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
    moves: Moves | None = None
    """How the graph itself copies the arrays of a call; None if that is done around it."""
    templates: tuple[Any, ...] = ()
    """The outputs that it copies itself."""
    give: Callable[[Sequence[Any]], Any] = lambda made: None
    """The result of a call that writes no arguments and has no dynamic sizes, from the outputs
    that were copied by the graph, or none if it copies none."""
    facts: Facts | None = None
    """For its file; None if graphs are not saved."""
    checked: bool = False
    checked_padding: bool = False


@dataclass(slots=True, eq=False)
class Line:
    """One key."""

    name: str
    words: str
    reason: str = ""
    refused: bool = False
    """Its calls need gradients, and raise."""
    warmed: bool = False
    captured: Callable[[], Captured | None] = lambda: None
    calls: int = 0
    eager: int = 0
    captures: int = 0
    restored: int = 0
    replays: int = 0
    rebound: int = 0
    verified: int = 0
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
    cuts: dict[tuple[int, int], Cut] = field(default_factory=dict)
    """By the result's number and its axis."""
    learned: set[int] = field(default_factory=set)
    """Dynamic sizes of which it is known where they show in the results."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Of eager runs."""
    capture_reasons: Counter[str] = field(default_factory=Counter)
    times: deque[float] = field(default_factory=lambda: deque(maxlen=256))
    unmatched: int = 0
    """Replays that were found by the key: after each power of two a short way is looked for."""


@dataclass(slots=True, eq=False)
class Work:
    """One call, taken apart."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    statics: list[Any]
    sizes: list[int]
    """Of the dynamic arrays, in order."""
    seen: Seen | None
    axes: list[int | None] = field(default_factory=list)
    """Of each leaf its dynamic axis; empty where no argument can have one."""
    fills: list[float | None] = field(default_factory=list)
    """What its padding holds."""
