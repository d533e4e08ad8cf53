"""The keys of a function in its store: writes the graphs that are kept, reads one for a new key."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ostinato import Buffer, GraphExec, MemoryRange, Stream
from ostinato.errors import ContextPoisonedError, InputError, OstinatoError
from ostinato.graphfile import LoadedGraph, Twin
from ostinato.interop.reading.function import Subject
from ostinato.interop.reading.library import NotGraphable
from ostinato.interop.reading.moves import Mover
from ostinato.interop.reading.objects import same
from ostinato.interop.reading.records import Bound, Captured, Line, ReadCall
from ostinato.interop.reading.slots import Maker
from ostinato.interop.reading.stored import (
    CALL,
    Description,
    Stored,
    Unstable,
    described,
    rebuilt,
    require_rebuildable,
)


class Saving:
    """The keys of one function, and its store."""

    def __init__(self, subject: Subject, stored: Stored, maker: Maker) -> None:
        self._subject, self._stored, self._maker = subject, stored, maker

    @property
    def reasons(self) -> dict[str, int]:
        """Reasons why keys were not restored, with counts."""
        stored = self._stored
        return dict(stored.reasons + Counter(stored.store.statistics().reasons))

    def name(self, line: Line, call: ReadCall, key: Any) -> None:
        """Gives a line the text of its key, which is the same in every process, and the names of
        the arrays that are not copied."""
        description, guards = Description(self._stored.library), self._subject.guards
        own = key[: -1 if guards is None else -4]  # without the parts from the guards
        why = ""
        try:
            description.add(*own, key[-1])
            if len({*map(id, call.leaves)}) < len(call.leaves):
                raise Unstable("an array is given twice")
            if guards is not None:
                description.guards(guards)
        except Unstable as error:
            why = str(error)
        if not why and call.seen is not None and not same(description.arrays, call.seen.arrays):
            why = "what the function uses is not known by names"
        if why:
            self._stored.reasons[why] += 1
            line.text = f"!{why}"
            return
        line.names = [f"static {i}" for i in range(len(call.statics))] + description.names
        line.text = "\n".join(description.parts)

    def _pieces(self, line: Line, bound: Bound) -> list[tuple[str, MemoryRange, bool]]:
        """Returns the memory that a call uses besides its inputs: name, range, whether it is
        written."""
        written = {bound.pattern[i] for i in line.state if i < len(bound.pattern)}
        names: dict[int, str] = {}
        for name, piece in zip(line.names, bound.pattern, strict=True):
            names.setdefault(piece, name)
        return [
            (names[piece], memory, piece in written)
            for piece, (memory, _) in enumerate(bound.storages)
            if memory.nbytes
        ]

    # --- writing
    def save(self, lines: Iterable[Line], *, check: bool) -> dict[str, str]:
        """Writes the graphs that were captured here; returns why some were not written, by key.

        Raises ContextPoisonedError."""
        refused: dict[str, str] = {}
        for line in lines:
            captured = line.captured()
            if captured is not None and captured.chain is not None:
                refused[line.words] = "it waits for the device, and a file holds one graph"
            if captured is None or captured.call is None:
                continue
            try:
                self._save(line, captured, captured.call, check)
            except ContextPoisonedError:
                raise
            except (OstinatoError, NotGraphable, Unstable) as error:
                refused[line.words] = str(error)
        return refused

    def _save(self, line: Line, captured: Captured, call: ReadCall, check: bool) -> None:
        library = self._stored.library
        if line.ranks is not None:
            raise InputError("it communicates with other processes, whose connection no file holds")
        if captured.rebound:
            raise InputError("it was bound to other memory")
        if line.text.startswith("!"):
            raise InputError(line.text[1:])
        if captured.attached:
            raise InputError("it gives gradients to what it uses")
        if captured.tree.given:
            raise InputError("its result holds an object that it was given")
        leaves: list[Any] = []
        result = described(captured.result, library, leaves)
        require_rebuildable(captured.result, result, leaves, library)
        pieces = self._pieces(line, captured.bound)
        inputs, outputs, results = self._memory(captured, pieces)
        if None in [layout for _, layout in results]:
            raise InputError("the memory of a result holds another value than the result")
        constants = {name: memory for name, memory, written in pieces if not written}
        state = {name: memory for name, memory, written in pieces if written}
        with self._subject.cache.hold(line.name) as run:
            kept = self._subject.keep(call)
            try:
                other, twin = self._maker.make(line, call, kept)
            finally:
                kept.put_back()  # the user has not called the function
            moved = self._memory(twin, pieces)
            if moved[2] != results:
                raise InputError("a second capture gave results of another layout")
            facts = {
                "result": result,
                "outputs": results,
                "written": sorted(line.written),
                "state": sorted(line.state),
                "moved": None if captured.moves is None else [*captured.moves.outputs],
            }
            raw = np.frombuffer(json.dumps(facts, allow_nan=False).encode(), np.uint8)
            written = {f"input {i}": inputs[f"input {i}"] for i in line.written}
            self._stored.opened(constants).save(
                line.text,
                run.graph,
                inputs=inputs | state | {CALL: library.device.array(raw)},
                outputs=outputs | state | written,
                twin=Twin(other, moved[0] | moved[1]),
                check=check,
            )

    def _memory(
        self, captured: Captured, pieces: Sequence[tuple[str, MemoryRange, bool]]
    ) -> tuple[dict[str, MemoryRange], dict[str, MemoryRange], list[tuple[str, Any]]]:
        """Returns a graph's own inputs and outputs by name, and for each result the name of its
        memory and its layout there."""
        library = self._stored.library
        storage = library.storage
        inputs = {f"input {i}": storage(one) for i, one in enumerate(captured.inputs)}
        known = {memory.address: (name, memory) for name, memory, _ in pieces}
        known |= {memory.address: (name, memory) for name, memory in inputs.items()}
        spans: dict[int, list[MemoryRange]] = {}
        for output in captured.outputs:
            if storage(output).address not in known:
                spans.setdefault(storage(output).address, []).append(library.span(output))
        outputs: dict[str, MemoryRange] = {}
        for number, (address, found) in enumerate(spans.items()):
            found = [one for one in found if one.nbytes] or found[:1]
            first = min(one.address for one in found)
            last = max(one.address + one.nbytes for one in found)
            outputs[f"output {number}"] = whole = MemoryRange(first, last - first)
            known[address] = f"output {number}", whole
        results = []
        for output in captured.outputs:
            name, memory = known[storage(output).address]
            results.append((name, library.layout(output, memory.address)))
        named = [{n: m for n, m in of.items() if m.nbytes} for of in (inputs, outputs)]
        return named[0], named[1], results

    # --- reading
    def restored(self, line: Line, call: ReadCall) -> tuple[GraphExec, Captured] | None:
        """Restores a key's graph from the store, with its record; None if there is none that
        fits."""
        stored, subject = self._stored, self._subject
        if not line.text or line.text.startswith("!"):
            return None
        inputs, bound = self._maker.inputs(call), self._maker.bound(call)
        memory = {f"input {i}": stored.library.storage(one) for i, one in enumerate(inputs)}
        memory |= {name: piece for name, piece, _ in self._pieces(line, bound)}
        stream = subject.turns.take()
        loaded = stored.store.restore(line.text, {n: m for n, m in memory.items() if m.nbytes})
        if loaded is None:
            return None
        try:
            facts = _facts_of(loaded, stream)
            captured = self._restored(line, call, inputs, bound, loaded, facts)
            loaded.owner = captured
            return loaded.instantiate(upload=stream), captured
        except ContextPoisonedError:
            raise
        except (OstinatoError, LookupError, TypeError, ValueError) as error:
            loaded.close()
            self.note_refused(f"{type(error).__name__}: {error}")
            return None

    def note_refused(self, why: str) -> None:
        """Counts a graph of the store that could not be used."""
        self._stored.reasons[why] += 1

    def _restored(
        self,
        line: Line,
        call: ReadCall,
        inputs: list[Any],
        bound: Bound,
        loaded: LoadedGraph,
        facts: dict[str, Any],
    ) -> Captured:
        """Makes the record of a graph from a file.  Raises InputError, LookupError, TypeError and
        ValueError for facts that do not describe the graph."""
        library = self._stored.library
        arrays = {f"input {i}": one for i, one in enumerate(inputs)}
        for (name, *_), (_, array) in zip(
            self._pieces(line, bound), [s for s in bound.storages if s[0].nbytes], strict=True
        ):
            arrays[name] = array
        for name, buffer in loaded.outputs.items():
            if name.startswith("output "):
                arrays[name] = library.over(buffer)
        nothing = library.over(loaded.inputs[CALL])  # for results without elements
        outputs = []
        for name, layout in facts["outputs"]:
            outputs.append(library.view(arrays.get(name, nothing), layout))
            if name not in arrays and library.span(outputs[-1]).nbytes:
                raise ValueError(f"the file names no {name!r}")
        tree = self._subject.arguments.tree(rebuilt(facts["result"], outputs), call)
        if not same(tree.leaves, outputs):
            raise ValueError("its results are not the arrays that the file lists")
        moved = facts["moved"]
        moves = None if moved is None else Mover.find(loaded.nodes(), len(inputs), tuple(moved))
        copied = [i for i, copied in enumerate(self._maker.clones(outputs, bound)) if copied]
        if (moved is not None and moves is None) or (moved and moved != copied):
            raise ValueError("its graph does not copy the arrays that the file lists")
        line.written |= {int(i) for i in facts["written"]}
        line.state |= {int(i) for i in facts["state"]}
        stage = library.stager(inputs)
        captured = self._maker.record(line, call, inputs, stage, tree, bound)
        captured.moves, captured.moved = moves, tuple(moved or ())
        captured.recipes = tuple([library.recipe(outputs[i]) for i in captured.moved])
        return captured


def _facts_of(loaded: LoadedGraph, stream: Stream) -> dict[str, Any]:
    """Returns what a file says besides its graph.  Raises ValueError."""
    try:
        note = loaded.inputs[CALL]
        facts = json.loads(bytes(note.to_numpy(stream))) if isinstance(note, Buffer) else None
        if not isinstance(facts, dict):
            raise ValueError("they are no object")
    except (KeyError, ValueError) as error:
        why = f"the file does not say how its results are put together ({error})"
        raise ValueError(why) from None
    return facts
