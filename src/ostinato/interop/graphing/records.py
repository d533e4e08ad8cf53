"""What `Graphed` knows of a key, of its graph, and of a call."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato import MemoryRange
from ostinato.interop.graphing.guards import Seen
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


@dataclass(slots=True, eq=False, weakref_slot=True)
class Captured:
    """What belongs to one graph; the graph owns it."""

    owner: object
    """The library's own graph, with its memory."""
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
    simple: bool = False
    """Whether the result is one array, which is copied, and nothing else is to be done."""
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
    replays: int = 0
    rebound: int = 0
    verified: int = 0
    written: set[int] = field(default_factory=set)
    """Arguments that the function writes, among those that are copied."""
    state: set[int] = field(default_factory=set)
    """What it writes of the static arguments and of the arrays that it uses besides them."""
    shapes: tuple[list[tuple[int, ...]], list[int]] | None = None
    """The result's shapes of the last eager run, and the dynamic sizes of that."""
    cuts: dict[tuple[int, int], list[Cut]] = field(default_factory=dict)
    learned: set[int] = field(default_factory=set)
    """Dynamic sizes of which it is known where they show in the results."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Of eager runs."""
    capture_reasons: Counter[str] = field(default_factory=Counter)
    times: deque[float] = field(default_factory=lambda: deque(maxlen=256))
    unmatched: int = 0
    """Replays that were found by the key: after each power of two a short way is looked for."""
    kept: list[object] = field(default_factory=list)
    """Objects that stand in the key by their identity."""


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
