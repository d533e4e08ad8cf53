"""Checks of a replay: the call runs eagerly too, and all that it gives and writes is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ostinato.interop.reading.function import Subject
from ostinato.interop.reading.moves import NAMES
from ostinato.interop.reading.records import Captured, Line, ReadCall
from ostinato.interop.reading.trees import Tree, Unknown
from ostinato.step import Cause, CheckReport, Finding


def verified(
    subject: Subject,
    line: Line,
    captured: Captured,
    work: ReadCall,
    replay: Callable[[bool], Any],
) -> tuple[CheckReport, Any]:
    """Replays a call, puts everything back, and runs it eagerly.

    `replay`: replays it, with poisoned padding if so asked.  Returns what was found, and the eager
    result.  If a replay raises, all is as before.
    """
    library, tree = subject.library, subject.arguments.tree
    random = library.save_random()
    state = work.state
    written = [*work.leaves, *(state[i] for i in sorted(line.state) if i < len(state))]
    written += [each.after for each in captured.attached if each.before is each.after]
    kept = [(array, library.clone(array)) for array in written]
    replaced = [each for each in captured.attached if each.before is not each.after]

    def put_back() -> None:
        for array, before in kept:
            if library.difference(array, before, None):  # else its version would change for nothing
                library.copy(array, before)
        captured.detach()
        library.restore_random(random)

    def leaves_of(result: Any) -> list[Any]:
        return [library.clone(leaf) for leaf in tree(result, work).leaves]

    try:
        results = [leaves_of(replay(False))]
        after = [library.clone(array) for array, _ in kept]
        given = [None if each.after is None else library.clone(each.after) for each in replaced]
        moved_on = library.save_random()
        if work.sizes:
            put_back()
            results.append(leaves_of(replay(True)))
    finally:
        put_back()
    eager = subject.function(*work.args, **work.kwargs)
    found = ""
    try:
        wanted = tree(eager, work)
    except Unknown as error:
        found, wanted, results = f"the result cannot be built again: {error}", captured.tree, []
    if wanted.tokens != captured.tree.tokens:
        found = "the result has other plain values, or another form, than that of the eager run"
    for index, leaves in enumerate(results):
        found = found or _difference(subject, line, captured, leaves, wanted, poisoned=index > 0)
    overwritten = subject.overwritten(captured, work)
    for index, ((array, _), replayed) in enumerate(zip(kept, after, strict=True)):
        differs = ""
        if not found and index not in overwritten:
            differs = library.difference(replayed, array, subject.options.tolerance)
        if differs:
            found = f"an array that the function writes differs afterwards: {differs}"
    for each, replayed in zip(replaced, given, strict=True):
        now = getattr(each.array, each.name)
        differs = "one is missing"
        if now is not None and replayed is not None:
            differs = library.difference(replayed, now, subject.options.tolerance)
        if not found and differs and now is not replayed:
            found = f"the gradient of an array differs from that of the eager run: {differs}"
    if not found and not library.same_random(moved_on):
        found = "the generators are in another state after a replay than after an eager run"
    nbytes = sum(library.storage(array).nbytes for array, _ in kept)
    finding = Finding("a check failed", found, Cause.FROZEN) if found else None
    return CheckReport(nbytes, 0, 0, finding), eager


def _difference(
    subject: Subject,
    line: Line,
    captured: Captured,
    leaves: Sequence[Any],
    wanted: Tree,
    *,
    poisoned: bool,
) -> str:
    """How a replay's result differs from the eager one; empty if it does not."""
    what = "with poisoned padding " if poisoned else ""
    if len(leaves) != len(wanted.leaves):
        return f"{what}the replay gives {len(leaves)} arrays, eager {len(wanted.leaves)}"
    for index, (one, other, path) in enumerate(
        zip(leaves, wanted.leaves, wanted.paths, strict=True)
    ):
        difference = subject.library.difference(one, other, subject.options.tolerance)
        if difference:
            names = _writers(subject, line, captured, index)
            behind = f" (kernels that point at it: {', '.join(names)})" if names else ""
            return f"{what}{path} differs from the eager run: {difference}{behind}"
    return ""


def _writers(subject: Subject, line: Line, captured: Captured, index: int) -> list[str]:
    """The kernels of a graph that point at one of its outputs."""
    address = subject.library.address(captured.outputs[index])
    with subject.cache.hold(line.name) as run:
        if run is None:
            return []
        return [
            f"node {node.index} {node.name}"
            for node in run.nodes
            if node.name not in NAMES
            and any(p.address == address for a in node.arguments for p in a.pointers)
        ][-4:]
