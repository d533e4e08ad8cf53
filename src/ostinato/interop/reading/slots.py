"""Captures the graph of a key, and binds it to memory that has moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato import Graph, GraphExec, MemoryRange, Node, NodeKind, Stream
from ostinato.errors import ContextPoisonedError, NotHeldError, OstinatoError
from ostinato.interop.reading.chains import Chain, ChainBuilder, Raised, output_noted
from ostinato.interop.reading.function import Subject
from ostinato.interop.reading.kept import HostSnapshot
from ostinato.interop.reading.library import NotGraphable, WaitsForDevice, living_objects
from ostinato.interop.reading.moves import MOST, Mover, Moves
from ostinato.interop.reading.padding import cuts
from ostinato.interop.reading.records import AttachedGradient, Bound, Captured, Line, ReadCall
from ostinato.interop.reading.trees import Tree, Unknown
from ostinato.lowlevel import every_node, replace_small_fills

_MOST_RESULTS = 8
"""The number of results of one key whose tokens are kept."""


@dataclass(slots=True, eq=False)
class _Prepared:
    """The inputs of a graph, and the state before the function runs on them."""

    inputs: list[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stage: Callable[[Sequence[Any]], None]
    versions: list[int | None]
    bound: Bound
    around: list[tuple[MemoryRange, object]]
    drawn: Callable[[bool], str]
    mover: Mover | None
    """The kernels that copy inputs and outputs; None if the library copies them."""
    sources: list[tuple[int, int]]
    """Addresses and bytes of the inputs that it copies."""
    attached: list[tuple[Any, str, Any]] = field(default_factory=list)

    def copy_in(self, stream: Stream) -> None:
        """Captures the copies of the inputs, if the mover makes them."""
        if self.mover is not None:
            self.mover.begin(stream, self.sources)


@dataclass(slots=True, eq=False)
class ChainRun:
    """A run of a function as a chain of graphs."""

    prepared: _Prepared
    links: ChainBuilder
    random: Any
    """The states of the generators before it."""
    versions: list[int | None]
    """The versions of the arrays that are not copied, before it."""
    result: Any = None
    moved: tuple[int, ...] = ()
    """The indices of the outputs that the last graph copies."""
    fresh: list[Any] = field(default_factory=list)
    """The values in the result that are new in each call (`Chain.places`)."""
    why: NotGraphable | None = None
    """The reason why the graphs cannot be replayed; None if they can."""
    told: list[str] = field(default_factory=list)
    """The lines on which it printed or logged."""


class Maker:
    """The maker of one function's graphs.

    `keeps`: whether to keep with each graph what its file needs."""

    def __init__(self, subject: Subject, *, keeps: bool) -> None:
        self._subject = subject
        self._keeps = keeps

    @cached_property
    def mover(self) -> Mover | None:
        """The kernels that copy arrays inside graphs; None if they cannot be compiled."""
        return Mover.of(self._subject.library.device)

    # --- the memory of a graph
    def inputs(self, call: ReadCall) -> list[Any]:
        """Allocates the graph's own arrays for the copied arrays of a call."""
        library = self._subject.library
        inputs = []
        made: dict[tuple[Any, ...], Any] = {}  # an array that is given twice has one input
        for leaf, dynamic in zip(call.leaves, call.axes, strict=True):
            shape = how = None
            if dynamic is not None:
                shape = [*library.signature(leaf)[0]]
                shape[dynamic.axis] = dynamic.capacity
                how = dynamic.axis, dynamic.capacity, dynamic.fill
            if (id(leaf), how) not in made:
                made[id(leaf), how] = library.buffer(leaf, shape)
            inputs.append(made[id(leaf), how])
        if call.sizes:
            for one in inputs:
                library.fill(one, 0)
        return inputs

    def bound(self, call: ReadCall) -> Bound:
        """Returns the memory of the arrays of a call that are not copied, each piece once, in order
        of first use."""
        found: dict[int, tuple[MemoryRange, Any]] = {}
        places: dict[int, int] = {}
        pattern = []
        for array in call.state:
            memory = self._subject.library.storage(array)
            found.setdefault(memory.address, (memory, array))
            pattern.append(places.setdefault(memory.address, len(places)))
        return Bound(list(found.values()), pattern)

    def clones(self, leaves: Sequence[Any], bound: Bound) -> list[bool]:
        """Returns for each output whether it is copied: it lies in the graph's own memory."""
        address = self._subject.library.address
        static = [memory for memory, _ in bound.storages]
        return [not any(m.nbytes and m.holds(address(leaf)) for m in static) for leaf in leaves]

    def changed(self, arrays: Sequence[Any], versions: Sequence[int | None]) -> set[int]:
        """Returns the indices of the arrays that were, or may have been, written since they had
        these versions."""
        version = self._subject.library.version
        return {
            index
            for index, (array, old) in enumerate(zip(arrays, versions, strict=True))
            if old is None or version(array) != old
        }

    # --- captures
    def _prepare(self, call: ReadCall, *, moves: bool) -> _Prepared:
        """Makes the inputs of a graph, and notes the state before a run on them.  Raises
        NotGraphable.

        `moves`: the graph may copy inputs and outputs itself, if it can."""
        subject = self._subject
        library, arguments = subject.library, subject.arguments
        inputs = self.inputs(call)
        try:
            args, kwargs = arguments.replaced(call, inputs)
        except Unknown as error:
            raise subject.not_graphable(f"the arguments cannot be built again: {error}") from None
        stage = library.stager(inputs)
        versions = [*map(library.version, inputs)]
        subject.turns.take()
        around, drawn = self._memory_around(), subject.drawing()
        sources = self._extents(inputs, call.leaves) if moves and not call.sizes else None
        mover, bound = None if sources is None else self.mover, self.bound(call)
        return _Prepared(
            inputs, args, kwargs, stage, versions, bound, around, drawn, mover, sources or []
        )

    def make(self, line: Line, call: ReadCall, kept: HostSnapshot) -> tuple[Graph, Captured]:
        """Captures a call, and notes in its line which arrays it writes.  Raises NotGraphable.

        `kept`: notes what running the function changes on the host."""
        subject = self._subject
        library = subject.library
        prepared = self._prepare(call, moves=not line.differentiated)
        inputs, function, mover = prepared.inputs, subject.function, prepared.mover
        pair = library.differentiable(function, call.state) if line.differentiated else None
        if pair is not None:
            function = pair.run
        moved: tuple[int, ...] = ()

        def run(stream: Stream) -> Any:
            nonlocal moved
            prepared.copy_in(stream)
            result = self._run(prepared, call, kept, function)
            if mover is not None:
                moved, places = self._moved(result, call, prepared.bound)
                if moved:
                    mover.end(stream, places)
            return result

        graph, result = (library if pair is None else pair).capture(run)
        self._fast(graph)
        nodes = graph.nodes()
        moves = None if mover is None else mover.find(nodes, len(inputs), moved)
        if mover is not None and moves is None:
            raise subject.not_graphable(
                "the capture is empty: nothing ran on the caller's current stream"
            )
        captured = self._captured(line, call, prepared, nodes, result)
        if pair is not None:
            captured.attached = ()  # the gradients of other steps
            captured.backward = pair.backward(captured.outputs, inputs, graph.owner)
        captured.owner = graph.owner, mover
        captured.moves, captured.moved = moves, moved
        captured.recipes = tuple([library.recipe(captured.outputs[i]) for i in moved])
        if self._keeps:
            captured.call = ReadCall(
                prepared.args, prepared.kwargs, inputs, call.statics, call.dynamic, call.sizes
            )
            captured.call.seen, captured.call.epoch = call.seen, call.epoch
            captured.result = result
        graph.owner = captured
        return graph, captured

    def _fast(self, graph: Graph) -> None:
        """Changes a graph so that it runs faster."""
        if self.mover is not None:
            replace_small_fills(self.mover.device, graph)

    def _run(
        self,
        prepared: _Prepared,
        call: ReadCall,
        kept: HostSnapshot,
        function: Callable[..., Any],
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Any:
        """Runs the function on the inputs of a graph, in a block."""
        kept.begin()  # a second try begins where the first one did
        prepared.attached = self._subject.library.attached(call.state)
        try:
            with around():
                return function(*prepared.args, **prepared.kwargs)
        finally:
            kept.end()

    def run_chain(self, call: ReadCall, kept: HostSnapshot, random: Any) -> ChainRun:
        """Runs the function once, for real, as a chain of graphs.  `random`: the states of the
        generators now.

        Raises what the function raises, as `Raised`; NotGraphable in the middle of a run, with the
        memory of the device as before."""
        subject, library = self._subject, self._subject.library
        prepared = self._prepare(call, moves=True)
        if prepared.mover is not None:
            prepared.mover = prepared.mover.apart()
        mover = prepared.mover
        versions = [*map(library.version, call.state)]
        attached = partial(library.attached, call.state)

        def run(stream: Stream) -> Any:
            result = self._run(prepared, call, kept, subject.function, builder.around)
            if mover is not None and stream.capture_info().status.name == "ACTIVE":
                made.moved, places = self._moved(result, call, prepared.bound)
                if made.moved:
                    builder.copying_out()
                    mover.end(stream, places)
            return result

        builder = ChainBuilder(
            subject.function, Maker._run.__code__, attached, prepared.copy_in, self._fast
        )
        made = ChainRun(prepared, builder, random, versions)
        prepared.stage(call.leaves)
        prepared.versions = [*map(library.version, prepared.inputs)]
        try:
            assert library.chain is not None
            with output_noted(made.told):
                made.result, made.why = library.chain(run, builder)
        except (NotGraphable, ContextPoisonedError):
            raise
        except Exception as error:
            self._give_back(made, call)
            raise Raised(error) from error
        return made

    def _give_back(self, made: ChainRun, call: ReadCall) -> None:
        """Copies the inputs that a run has written into the arguments."""
        library, prepared = self._subject.library, made.prepared
        for index in self.changed(prepared.inputs, prepared.versions):
            library.copy(call.leaves[index], prepared.inputs[index])
        if made.links.at_end is not None:
            made.links.at_end()

    def whole(self, made: ChainRun, call: ReadCall) -> Any:
        """Returns the result of a run of which no chain was made."""
        self._give_back(made, call)
        given = {id(b): leaf for b, leaf in zip(made.prepared.inputs, call.leaves, strict=True)}
        try:
            tree = self._subject.arguments.tree(made.result, call)
        except Unknown:
            return made.result
        leaves = [given.get(id(leaf), leaf) for leaf in tree.leaves]
        return tree.build(leaves, self._subject.arguments.static_objects(call))

    def chained(self, line: Line, call: ReadCall, made: ChainRun) -> tuple[GraphExec, Captured]:
        """Makes the chain of a run; returns the executable of its last graph.  Raises
        NotGraphable."""
        subject, links, mover = self._subject, made.links, made.prepared.mover
        library = subject.library
        if made.told:
            raise subject.not_graphable(
                f"it prints or logs at {made.told[0]}, which a replay would not repeat"
            )
        if made.why is not None:
            raise type(made.why)(subject.at(str(made.why)))
        nodes = [node for graph in links.graphs for node in graph.nodes()]
        room = None if mover is None else mover.room(len(made.moved))
        try:
            chain, executable = links.joined(library.device, room)
        except ValueError as error:
            raise WaitsForDevice(str(error)) from None
        marks = [object() for _ in chain.places]  # in the result, for values new in each call
        result = made.result
        for place, mark in zip(chain.places, marks, strict=True):
            made.fresh.append(place.get(made.result))
            result = place.put(result, mark)
        captured = self._captured(line, call, made.prepared, nodes, result, chain, marks)
        # Other values of the waits than in the warm-up may lead to other writes.
        line.state |= self.changed(call.state, made.versions)
        self._note_saved(call, made, chain)
        captured.chain, captured.marks = chain, marks
        captured.owner = [graph.owner for graph in links.graphs], mover
        if mover is not None:
            every = [*[link.executable for link in chain.links], executable]
            begins = next(each for each in every if each is not None)
            moves = Moves(
                begins.graph.nodes(), len(made.prepared.inputs), made.moved, links.further
            )
            if chain.links:
                captured.stage = partial(moves.stage, begins, library.address)
            else:
                captured.moves = moves
            captured.moved = made.moved
            captured.recipes = tuple([library.recipe(captured.outputs[i]) for i in made.moved])
        executable.graph.owner = captured
        return executable, captured

    def _note_saved(self, call: ReadCall, made: ChainRun, chain: Chain) -> None:
        """Notes which memory a chain writes before the last wait that is compared.  Raises
        NotGraphable if that is not known."""
        library, storage = self._subject.library, self._subject.library.storage
        every = made.links.waits
        if not every:  # only copies from the CPU waited, which are made once
            return
        own = {storage(one).address for one in made.prepared.inputs}
        state = [storage(array).address for array in call.state]
        drew = not library.same_random(made.random)
        chain.draws = made.links.further is not None  # a launch that is refused comes after a draw
        last, waits = every[-1], [wait for wait in every if wait.compared]
        steps = [wait for wait in every if wait.step is not None]
        if not waits:
            chain.complete = bool(last.line) and not (
                steps or last.written - own or last.unseen or drew
            )
            return
        wait = waits[-1]
        if steps and every.index(wait) > every.index(steps[0]):
            raise self._subject.not_graphable(
                f"after {steps[0].line} the call waits at {wait.line} for a value that decides, "
                "and what Python has done could not be taken back for another value"
            )
        if wait.unseen:
            raise self._subject.not_graphable(
                f"the work of {wait.unseen} is not the library's, and what it writes before "
                f"the call waits at {wait.line} is not known"
            )
        unknown = wait.written - own - {*state}
        if unknown:
            raise self._subject.not_graphable(
                "the call writes memory that is neither an argument nor known to be used, "
                f"before it waits at {wait.line}"
            )
        chain.saved = tuple([i for i, address in enumerate(state) if address in wait.written])
        chain.draws |= drew
        chain.complete = bool(last.line) and not (
            steps or last.written - own - wait.written or last.unseen
        )

    def _captured(
        self,
        line: Line,
        call: ReadCall,
        prepared: _Prepared,
        nodes: Sequence[Node],
        result: Any,
        chain: Chain | None = None,
        marks: Sequence[object] = (),
    ) -> Captured:
        """Makes the record of what was captured; notes in the line which arrays it writes.

        `chain`: the chain of a function that ran for real, so that what it drew from shared
        generators counts.  `marks`: objects in the result, in place of other values.
        Raises NotGraphable."""
        subject, library, inputs = self._subject, self._subject.library, prepared.inputs
        line.written |= self.changed(inputs, prepared.versions)
        # A replay would not set such an attribute: the gradient of `loss.backward()`, say.
        given = next(filter(None, [library.hidden(i, ("grad",), copied=True) for i in inputs]), "")
        if given:
            raise subject.not_graphable(f"of an argument the function makes {given}")
        drew = prepared.drawn(chain is None)
        changed = subject.changed_state(call) or drew
        if changed:
            raise subject.not_graphable(
                f"the function changes Python state that it uses ({changed})"
            )
        tree = self.taken_apart(result, call, marks)
        if isinstance(tree, str):
            raise subject.not_graphable(tree)
        if chain is not None:  # values that the host sees may decide shapes
            self._compare_chained(line, tree, chain)
        else:
            self._compare_shapes(line, tree, call)
        bound = prepared.bound
        captured = self.record(line, call, inputs, prepared.stage, tree, bound)
        attached = [*zip(prepared.attached, library.attached(call.state), strict=True)]
        steps = [] if chain is None else chain.steps
        between = {id(array): value for step in steps for array, _, value in step.attached}
        values = [value for (_, _, one), (_, _, other) in attached for value in (one, other)]
        words = words_of_nodes(nodes)

        def read(gradient: Any) -> bool:
            return gradient is not None and points_at(words, library.storage(gradient))

        # All of them, if any: a replay that sets some must also find the others as they were.
        if any(value is not None for value in (*values, *between.values())):
            captured.attached = tuple(
                [
                    AttachedGradient(array, name, before, after, read(before))
                    for (array, name, before), (_, _, after) in attached
                ]
            )
        if chain is not None:
            chain.settled = [
                (array, name, after)
                for (array, name, _), (_, _, after) in attached
                if between.get(id(array), after) is not after
            ]
        captured.kept = _pointed_at(words, prepared.around, bound)
        return captured

    def record(
        self,
        line: Line,
        call: ReadCall,
        inputs: list[Any],
        stage: Callable[[Sequence[Any]], None],
        tree: Tree,
        bound: Bound,
    ) -> Captured:
        """Makes the record of a graph over these inputs, whose results are the arrays of a tree."""
        return Captured(
            inputs=inputs,
            stage=stage,
            outputs=tree.leaves,
            tree=tree,
            clones=self.clones(tree.leaves, bound),
            written=tuple(sorted(line.written)),
            bound=bound,
            pointers=self._subject.pointers(call),
            epoch=call.epoch,
        )

    def _memory_around(self) -> list[tuple[MemoryRange, object]]:
        """Returns the memory of all arrays in the process, each piece with its owner.

        A capture may read any of it.  Only the words of its graph show what it reads: no mode of a
        library sees kernels of Triton and of extensions, and a mode would change what other
        functions do.  The caller keeps all of it until the capture has ended, so that an address in
        the graph is an address of this memory, not of later memory in its place."""
        library = self._subject.library
        return [
            piece for each in living_objects(library.array_type) for piece in library.memory(each)
        ]

    def taken_apart(self, result: Any, call: ReadCall, marks: Sequence[object] = ()) -> Tree | str:
        """Takes the result of a call apart; returns a reason instead if no replay can give it."""
        try:
            tree = self._subject.arguments.tree(result, call, marks)
        except Unknown as error:
            return f"the result cannot be built again: {error}"
        wrong = self._subject.refusal(tree.leaves)
        return f"of the result: {wrong}" if wrong else tree

    def reads_back(self, result: Any, call: ReadCall) -> bool:
        """True if a result holds arrays of the host, which a chain may give anew."""
        library = self._subject.library
        try:
            leaves = self._subject.arguments.tree(result, call).leaves
        except Unknown as error:
            return library.chain is not None and isinstance(error.value, np.ndarray)
        return library.chain is not None and any(map(library.on_host, leaves))

    def lost(self, tree: Tree, call: ReadCall) -> str:
        """Describes what a replay's result would lack of an eager result; empty if nothing."""
        lost = [*map(self._subject.library.lost, tree.leaves)]
        if any(lost):
            themselves = {id(array) for _, array in self.bound(call).storages}
            for leaf, path, what in zip(tree.leaves, tree.paths, lost, strict=True):
                if what and id(leaf) not in themselves:
                    return f"{path} is an array of which a replay gives a copy, without {what}"
        return ""

    def _extents(
        self, arrays: Sequence[Any], like: Sequence[Any] = ()
    ) -> list[tuple[int, int]] | None:
        """Returns addresses and bytes of arrays that can be copied byte by byte, also from arrays
        `like` them; None if one cannot, or if there are too many."""
        extent, address = self._subject.library.extent, self._subject.library.address
        sizes = [extent(array) for array in arrays]
        if len(arrays) > MOST or None in sizes or None in map(extent, like):
            return None
        return [(address(a), n) for a, n in zip(arrays, sizes, strict=True) if n is not None]

    def _moved(
        self, result: Any, call: ReadCall, bound: Bound
    ) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Returns the indices of the outputs that the graph copies, with addresses and bytes."""
        tree = self.taken_apart(result, call)
        if self._subject.options.results != "clone" or isinstance(tree, str):
            return (), []
        leaves = tree.leaves
        places = tuple(i for i, copied in enumerate(self.clones(leaves, bound)) if copied)
        found = self._extents([leaves[i] for i in places])
        return ((), []) if found is None else (places, found)

    # --- shapes
    def note_shapes(self, line: Line, tree: Tree, call: ReadCall) -> None:
        """Notes the shapes and the tokens of the result of an eager run."""
        line.tokens = tree.tokens
        line.shapes = self._shapes(tree), list(call.sizes)

    def _shapes(self, tree: Tree) -> list[tuple[int, ...]]:
        return [tuple(self._subject.library.signature(leaf)[0]) for leaf in tree.leaves]

    def _compare_shapes(self, line: Line, tree: Tree, call: ReadCall) -> None:
        """Raises NotGraphable if the shapes of a captured result are not those of the eager run."""
        if call.sizes:
            self.relate(line, tree, call)
            return
        if line.shapes is None:
            return
        self._compare_plain(line, tree)
        if self._shapes(tree) != line.shapes[0]:
            raise self._subject.not_graphable(
                f"the result has other shapes when it is captured ({self._shapes(tree)}) than "
                f"it had eagerly ({line.shapes[0]})"
            )

    def _compare_plain(self, line: Line, tree: Tree) -> None:
        """Raises NotGraphable if the tokens of a captured result are not those of the eager run: if
        it has a padded size, say, or a function that is made in each call."""
        if tree.tokens != line.tokens:
            raise self._subject.not_graphable(
                "the result has other plain values, or another form, when it is captured than "
                "it had eagerly, and a replay gives those of the capture"
            )

    def _compare_chained(self, line: Line, tree: Tree, chain: Chain) -> None:
        """Raises WaitsForDevice if the tokens of a chain's result are neither those of the eager
        run nor those of the last run in which the host saw the same values."""
        assert line.parent is not None and line.parent.waits is not None
        results = line.parent.waits.results
        if tree.tokens in (line.tokens, results.get(chain.values)):
            return
        if len(results) > _MOST_RESULTS:
            results.clear()
        results[chain.values] = tree.tokens
        raise WaitsForDevice(
            self._subject.at("the result has plain values that may be other ones in each call")
        )

    def relate(self, line: Line, padded: Tree, call: ReadCall) -> None:
        """Learns from the shapes of the last eager run which axes of the results are dynamic.

        `padded`: the result of a capture.  Raises NotGraphable if the shapes cannot be explained.
        """
        if line.shapes is None:
            return
        self._compare_plain(line, padded)
        shapes, sizes = line.shapes
        capacities = [d.capacity for d in call.dynamic if d is not None]
        if len(shapes) != len(padded.leaves):
            raise self._subject.not_graphable("the number of results depends on a dynamic size")
        found = cuts(shapes, self._shapes(padded), sizes, capacities)
        if isinstance(found, str):
            raise self._subject.not_graphable(found)
        for index, cut in enumerate(found):
            for one in cut:
                line.cuts[index, one.axis] = one
        line.learned |= {i for i, s in enumerate(sizes) if s != capacities[i]}

    # --- memory that has moved
    def rebind(self, line: Line, captured: Captured, call: ReadCall) -> str:
        """Points a graph at static memory that has moved; returns why it must be captured again, or
        ""."""
        now = self.bound(call)
        moved = self._moved_memory(captured, now)
        if isinstance(moved, str):
            return f"memory that it uses has moved{moved}"
        links = [] if captured.chain is None else captured.chain.links
        for wait in [] if captured.chain is None else captured.chain.waits:
            used = any(before.holds(place) for before, _ in moved for place in wait.reads)
            if used or wait.step is not None:
                return f"memory that it uses has moved, and {wait.line} may use it"
        if moved:
            before_last = [link.executable for link in links if link.executable is not None]
            try:
                with self._subject.cache.hold(line.name) as run:
                    left = [each.rebind(moved).left for each in (*before_last, run)]
            except ContextPoisonedError:
                raise
            except NotHeldError:
                return "the graph was evicted"
            except OstinatoError as error:
                return f"memory that it uses has moved, and rebinding failed: {error}"
            if any(left):
                word = next(filter(None, left))[0]
                return (
                    "memory that it uses has moved, and not every word that may point there could "
                    f"be changed: node {word.node_index} ({word.node_name}), {word.place}: "
                    f"{word.why}"
                )
            assert line.counts is not None
            line.counts.rebound += 1
            captured.rebound = True
        captured.bound = now
        captured.pointers = self._subject.pointers(call)
        captured.epoch = call.epoch
        return ""

    def _moved_memory(
        self, captured: Captured, now: Bound
    ) -> list[tuple[MemoryRange, MemoryRange]] | str:
        """Returns the memory of a graph that has moved, before and now; or how it has moved, if the
        graph cannot be pointed at the other memory."""
        if now.pattern != captured.bound.pattern:
            return ", and other arrays share memory than before"
        pairs = zip(captured.bound.storages, now.storages, strict=True)
        moved = [(before, after) for (before, _), (after, _) in pairs if before != after]
        for before, after in moved:
            if before.nbytes != after.nbytes or not after.address:
                return f": {before.nbytes} bytes before, {after.nbytes} now"
        places = [*map(self._subject.library.address, captured.outputs)]
        if any(before.holds(place) for before, _ in moved for place in places):
            return ", and a result is a view of it"
        return moved


def _pointed_at(
    words: npt.NDArray[np.uint64], around: Iterable[tuple[MemoryRange, object]], bound: Bound
) -> list[object]:
    """Returns the owners of memory that words point at, without `bound`, which may move.

    A number that equals an address by chance keeps memory longer, and has no other effect."""
    others = {memory.address for memory, _ in bound.storages}
    found = [(memory, keeper) for memory, keeper in around if memory.address not in others]
    starts = np.array([memory.address for memory, _ in found], np.uint64)
    ends = np.array([memory.end for memory, _ in found], np.uint64)
    inside = np.searchsorted(words, starts) < np.searchsorted(words, ends)
    return [keeper for (_, keeper), used in zip(found, inside.tolist(), strict=True) if used]


def words_of_nodes(nodes: Iterable[Node]) -> npt.NDArray[np.uint64]:
    """Returns all words in the nodes of a graph that may be addresses, sorted, each once."""
    packed, fields = [], []
    for node in every_node(nodes):
        if node.kind is NodeKind.KERNEL:
            data = node.kernel.arguments.data
            packed.append(np.frombuffer(data, np.uint64, len(data) // 8))
        elif node.kind is NodeKind.MEMCPY:
            fields += [node.memcpy.src, node.memcpy.dst]
        elif node.kind is NodeKind.MEMSET:
            fields.append(node.memset.dst)
        elif node.kind is NodeKind.BATCH_MEM_OP:
            fields += [operation.address for operation in node.batch_mem_op.operations]
    return np.unique(np.concatenate([*packed, np.array(fields, np.uint64)]))


def points_at(words: npt.NDArray[np.uint64], memory: MemoryRange) -> bool:
    """True if one of the words of a graph is an address in the memory."""
    first, last = np.searchsorted(words, np.array([memory.address, memory.end], np.uint64))
    return bool(first < last)
