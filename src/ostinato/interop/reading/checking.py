"""The memory of a check for a function: its results, and the arrays that it writes.

The eager run comes last: the function runs only once, and its answer counts.  Turn 2, for calls
with dynamic sizes, has poisoned padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato import GraphExec, NodeKind, first_difference
from ostinato.errors import ContextPoisonedError, NotHeldError, StateLostError
from ostinato.interop.reading.function import Subject
from ostinato.interop.reading.kept import HostSnapshot
from ostinato.interop.reading.moves import NAMES
from ostinato.interop.reading.records import Captured, Line, ReadCall
from ostinato.interop.reading.slots import Maker
from ostinato.interop.reading.states import StateWatch
from ostinato.interop.reading.trees import Tree, Unknown
from ostinato.lowlevel import Memory, every_node
from ostinato.step import Cause, Finding

_MOST_SAVED = 1 << 30
"""The most bytes that a search for the first node saves."""
_NAMES = "a capture made now", "the graph"


@dataclass(frozen=True, slots=True, eq=False)
class _Content:
    """The content of this memory at one moment."""

    tree: Tree | None
    """The result of the run before, taken apart; None if that cannot be done."""
    unknown: str = ""
    """The reason why `tree` is None; empty if it is not."""
    fresh: Sequence[Any] = ()
    """The values in the result that are new in each call."""
    leaves: Sequence[Any] = ()
    written: Sequence[Any] = ()
    gradients: Sequence[Any] = ()
    """The gradients that the function replaces."""
    random: Any = None
    """States of the generators; None after the last run, when the generators have these states."""


class CallEffects(Memory[_Content]):
    """The results, written arrays, gradients and generator states of one call."""

    def __init__(self, subject: Subject, line: Line, captured: Captured, call: ReadCall) -> None:
        self._subject, self._line, self._captured, self._call = subject, line, captured, call
        state, attached = call.state, captured.attached
        self._written = [*call.leaves, *(state[i] for i in sorted(line.state) if i < len(state))]
        self._written += [each.after for each in attached if each.before is each.after is not None]
        chain = captured.chain
        self._places = [] if chain is None else chain.places
        self._replaced = [each for each in attached if each.before is not each.after]
        stepped = [] if chain is None else chain.stepped
        for value in stepped:  # what a step changes is no argument of the graphs
            StateWatch(value, subject.library).read([], self._written)
        self._kept: HostSnapshot | None = subject.keep(call) if stepped else None
        if self._kept is not None:
            self._kept.begin()

    def nbytes(self) -> tuple[int, int, int]:
        storage = self._subject.library.storage
        return sum(storage(array).nbytes for array in self._written), 0, 0

    def turns(self, eager: _Content | None) -> Sequence[int]:
        return (1, 2) if self._call.sizes else (1,)

    def read(self, result: Any = None, *, last: bool = False) -> _Content:
        library = self._subject.library
        gradients = [getattr(each.array, each.name) for each in self._replaced]
        marks, fresh = self._captured.marks, []
        try:
            for place, mark in zip(self._places, marks, strict=True) if result is not None else ():
                fresh.append(place.get(result))
                result = place.put(result, mark)
            tree = self._subject.arguments.tree(result, self._call, marks)
        except Unknown as error:
            return _Content(None, str(error))
        except (LookupError, TypeError):
            return _Content(None, "it has another form than that of the chain")
        if last:
            return _Content(tree, "", fresh, tree.leaves, self._written, gradients)
        return _Content(
            tree,
            "",
            fresh,
            [*map(library.clone, tree.leaves)],
            [*map(library.clone, self._written)],
            [None if gradient is None else library.clone(gradient) for gradient in gradients],
            library.save_random(),
        )

    def start(self, before: _Content, turn: int, eager: _Content | None) -> _Content:
        if turn != 1:  # before turn 1 nothing has been written
            self.restore(before)
        return before

    def restore(self, before: _Content) -> None:
        library = self._subject.library
        for array, content in zip(self._written, before.written, strict=True):
            if library.difference(
                array, content, None
            ):  # a copy of equal content would change the array's version
                library.copy(array, content)
        self._captured.detach()
        if self._kept is not None:
            self._kept.end()
            self._kept.put_back()
        library.restore_random(before.random)

    def difference(
        self, before: _Content, eager: _Content, replayed: _Content, turn: int
    ) -> Finding | None:
        found = self._first(eager, replayed)
        if not found:
            return None
        what = "with poisoned padding, " if turn == 2 else ""
        return Finding("a check failed", what + found, Cause.FROZEN)

    def first_node(
        self, maker: Maker, executable: GraphExec, stage: Callable[[Captured], None]
    ) -> str:
        """Describes the first node that does something else in the graph than in a capture of the
        call as it is now; empty if there is none, or if they cannot be compared.

        `stage`: copies the arguments into a graph's own inputs.  Python runs once more, in the
        capture, and its state is put back; so is all memory that the graphs write."""
        old, subject = self._captured, self._subject
        if old.chain is not None or old.backward is not None or subject.library.ranks:
            return ""
        # What host functions do, and which gradients a capture attaches, is not put back.
        nodes = every_node(executable.nodes())
        if old.attached or any(node.kind is NodeKind.HOST for node in nodes):
            return ""
        kept = subject.keep(self._call)
        try:
            try:
                graph, new = maker.make(self._line, self._call, kept)
            finally:
                kept.put_back()
            with graph:
                for captured in (old, new):
                    stage(captured)
                if old.moves is not None:  # no arrays to copy, of which the next replay has others
                    count = old.moves.inputs + len(old.moves.outputs)
                    old.moves.change(old.moves.packed(*[0] * count))(executable)
                found = first_difference(
                    subject.library.stream(), graph, executable, limit=_MOST_SAVED, names=_NAMES
                )
        except (ContextPoisonedError, StateLostError):
            raise
        except Exception:  # the capture runs the function, and the check has found enough
            return ""
        if found is None:
            return ""
        return f"; the first node to differ is {found.line()} ({found.cause}: {found.why})"

    def _first(self, eager: _Content, replayed: _Content) -> str:
        """Describes the first difference between a replay and the eager run; empty without one."""
        if eager.tree is None:
            return f"the result cannot be built again: {eager.unknown}"
        if eager.tree.tokens != self._captured.tree.tokens:
            return "the result has other plain values, or another form, than that of the eager run"
        if len(replayed.leaves) != len(eager.leaves):
            return f"the replay gives {len(replayed.leaves)} arrays, eager {len(eager.leaves)}"
        for place, one, other in zip(self._places, replayed.fresh, eager.fresh, strict=True):
            found = self._apart(one, other)
            if found:
                return f"result{place} differs from the eager run: {found}"
        for index, path in enumerate(eager.tree.paths):
            found = self._differ(replayed.leaves[index], eager.leaves[index])
            if found:
                return f"{path} differs from the eager run: {found}{self._writers(index)}"
        overwritten = self._subject.overwritten(self._captured, self._call)
        for index, (one, other) in enumerate(zip(replayed.written, eager.written, strict=True)):
            found = "" if index in overwritten else self._differ(one, other)
            if found:
                return f"an array that the function writes differs afterwards: {found}"
        for one, other in zip(replayed.gradients, eager.gradients, strict=True):
            if one is not None and other is not None:
                found = self._differ(one, other)
            else:
                found = "" if one is other else "one is missing"
            if found:
                return f"the gradient of an array differs from that of the eager run: {found}"
        if not self._subject.library.same_random(replayed.random):
            return "the generators are in another state after a replay than after an eager run"
        return ""

    def _apart(self, one: Any, other: Any) -> str:
        """Describes how two values that the host has read differ; empty if they do not."""
        if self._subject.library.is_array(one):
            return self._differ(one, other)
        first, second = np.asarray(one), np.asarray(other)
        if first.shape != second.shape or first.dtype != second.dtype:
            return f"{one!r} against {other!r}"
        relative, absolute = self._subject.options.tolerance or (0.0, 0.0)
        if first.tobytes() == second.tobytes() or (
            relative + absolute and np.allclose(first, second, relative, absolute, equal_nan=True)
        ):
            return ""
        return f"{one!r} against {other!r}"

    def _differ(self, one: Any, other: Any) -> str:
        return self._subject.library.difference(one, other, self._subject.options.tolerance)

    def _writers(self, output: int) -> str:
        """Names the kernels of the graph that point at one of its outputs."""
        subject = self._subject
        address = subject.library.address(self._captured.outputs[output])
        names: list[str] = []
        with suppress(NotHeldError), subject.cache.hold(self._line.name) as run:
            names = [
                f"node {node.index} {node.name}"
                for node in run.nodes()
                if node.name not in NAMES
                and any(p.address == address for a in node.arguments for p in a.pointers)
            ][-4:]
        return f" (kernels that point at it: {', '.join(names)})" if names else ""
