"""`Graphed`: a function that replays a graph of itself.  It knows no library; `Library` does.

What happens to a key (`Line`):

    first call -> WARMED (ran eagerly) -> second call: captured -> CAPTURED: replays
                     │                         │                    └─ evicted: captured again
                     └── refused ──────────────┴── failed ──▶ EAGER, with its reason

A failure costs speed, never answers: whatever cannot be captured runs eagerly and is counted.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Self

from ostinato import Graph, GraphCache, LoadedGraph, MemoryRange, Stream, Twin, new_lock
from ostinato.errors import (
    CaptureLimitError,
    ClosedError,
    ContextPoisonedError,
    EagerRunError,
    InputError,
    OstinatoError,
    UpdateRefusedError,
    VerificationError,
)
from ostinato.interop.graphing.guards import Guarded, Guards, ObjectWatch, same
from ostinato.interop.graphing.library import Library, NotGraphable, Options, Turns
from ostinato.interop.graphing.moves import MOST, NAMES, Mover
from ostinato.interop.graphing.padding import cuts
from ostinato.interop.graphing.recheck import (
    MISSED,
    MOST_HOT,
    TIMED,
    Checks,
    Hot,
    Surroundings,
    launch,
    recheck,
)
from ostinato.interop.graphing.records import Bound, Captured, Facts, Line, Work
from ostinato.interop.graphing.statistics import GraphedKeyStatistics, GraphedStatistics, table
from ostinato.interop.graphing.stored import (
    CALL,
    Description,
    Stored,
    StoringLibrary,
    Unstable,
    described,
    rebuilt,
    require_rebuildable,
)
from ostinato.interop.graphing.trees import (
    Tree,
    Unknown,
    children_of,
    flatten,
    is_plain,
    joiner,
    plain_token,
    tree_of,
)

__all__ = ["EAGER", "Graphed"]

_MOST_LINES = 4096
_numbers = itertools.count()
"""Of keys, in all caches."""
EAGER = object()
"""Stands for the result of a call that is to run eagerly."""


class Graphed(Guarded):
    """A function whose calls replay a graph.  Made by `graphed` of a library's interop.

    Called like the function.  Thread-safe: calls on one stream or on several, one after the other.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        library: Library,
        options: Options,
        cache: GraphCache,
        *,
        name: str,
        owns_cache: bool,
        stored: Stored | None = None,
    ) -> None:
        self._function = function
        self._library = library
        self._options = options
        self.cache = cache
        """Where the graphs are kept."""
        self.name = name
        self._owns_cache = owns_cache
        self._stored = stored
        self._lock = new_lock()
        self._lines: dict[Hashable, Line] = {}
        guards = Guards(function, library) if options.guard else None
        self._guards = None if guards is None or guards.empty else guards
        self._pointers: list[int] = []
        self._guarded: list[Any] = []
        self._shapes: dict[Hashable, int] = {}
        self._shape = 0
        self._epoch = 0
        self._names, self._rest = _parameters(function)
        self._movers: list[Mover | None] = []
        self._special = {*options.static, *(options.padding.axes if options.padding else ())}
        unknown = [n for n in (*self._special, *options.fill) if not self._has_parameter(n)]
        if unknown:
            raise InputError(f"{name} has no parameter {unknown[0]!r} (it has {self._names})")
        self._watched: weakref.WeakKeyDictionary[object, ObjectWatch] = weakref.WeakKeyDictionary()
        self._turns = Turns(library)
        self._stateful = 0
        self._state_reason = ""
        self._nested = 0
        # Not the other lock: another thread may hold that and wait for the capture that is under
        # way here.
        self._nesting = new_lock()
        self._closed = False
        self._calls = 0
        self._hot: tuple[Hot, ...] = ()
        """Short ways for calls like the last, of the state as it is now."""
        self._ways: tuple[Callable[[tuple[Any, ...], dict[str, Any]], Any], ...] = ()
        """Their calls."""
        self._shared = Surroundings(
            library,
            options,
            self._guards,
            self._names,
            self._lock,
            self._turns,
            cache,
        )
        self.__name__ = name
        self.__wrapped__ = function
        self.__doc__ = getattr(function, "__doc__", None)

    def __repr__(self) -> str:
        return f"<graphed {self.name}: {len(self._lines)} keys{', closed' * self._closed}>"

    def _has_parameter(self, name: str) -> bool:
        return name in self._names or self._rest

    # ------------------------------------------------------------------------------ calls
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for way in self._ways:
            result = way(args, kwargs)
            if result is not MISSED:
                return result
        library = self._library
        if library.capturing():
            with self._nesting:
                self._nested += 1
            return self._function(*args, **kwargs)
        if self._closed:
            raise ClosedError(f"graphed {self.name} is closed; call the function itself")
        with self._lock:
            began = 0
            self._calls += 1
            if not self._calls % TIMED:
                began = time.perf_counter_ns()
            try:
                key, work = self._key(args, kwargs)
            except (Unknown, NotGraphable) as error:
                work = Work(args, kwargs, [], [], [], None)
                key = type(error), str(error)
                self._line(key, work).reason = self._at(str(error))
            line = self._lines.get(key) or self._line(key, work)
            line.calls += 1
            captured = line.captured()
            if (
                captured is not None
                and captured.epoch == self._epoch
                and not line.reason
                and not self._state_reason
                and (not work.statics or self._pointers_of(work) == captured.pointers)
                and (not work.sizes or self._fits(line, work))
                and not (self._options.verify and self._due(line, captured, work))
                and not ((line.written or line.state) and self._overlaps(line, work))
            ):
                done, result = self._replay(line, captured, work)
                if done:
                    if began:
                        line.times.append((time.perf_counter_ns() - began) / 1000)
                    line.unmatched += 1
                    if not line.unmatched & (line.unmatched - 1):
                        self._heat(line, captured, work, key)
                    return result
            result = self._slowly(line, work, key)
            self._go_by()  # of calls that the function made of itself meanwhile
        if result is not EAGER:
            return result
        return self._function(*args, **kwargs)  # without the lock: it may take as long as it likes

    def _heat(self, line: Line, captured: Captured, work: Work, key: Any) -> None:
        """Looks for a short way for calls like this one, which was just replayed."""
        stream = self._turns.last
        assert stream is not None
        seen = self._guarded, self._pointers, key[-1]
        hot = recheck(self._shared, work, line, captured, stream, seen, self._note)
        if hot is not None:
            kept = [one for one in self._hot if one.line is not line][: MOST_HOT - 1]
            self._go_by(hot, *kept)

    def _go_by(self, *hot: Hot) -> None:
        """These short ways from here on, and no others."""
        for one in self._hot:
            if one not in hot:
                one.end()
        self._hot = hot
        self._ways = tuple([one.way.call for one in hot])

    def _note(self, checks: Checks) -> None:
        """Notes what else must be as it is for `_shortly` to stand for a call."""

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, Work]:
        """What must be equal for a graph to stand for a call.  Raises Unknown, InputError."""
        library, array, special = self._library, self._library.array_type, self._special
        signature = library.signature
        tokens: list[Hashable] = []
        work = Work(args, kwargs, [], [], [], None)
        leaves = work.leaves
        if not (special or kwargs):
            tokens = [signature(v) if type(v) is array else None for v in args]
            if None in tokens:
                tokens.clear()
            else:
                leaves += args
        if tokens:
            pass
        elif special:
            names: Iterable[str] = itertools.chain(self._names, itertools.repeat("*"))
            for name, value in zip(names, args, strict=False):
                self._one(name, value, tokens, work)
        else:
            for value in args:
                self._one("an argument", value, tokens, work)
        for name, value in kwargs.items():
            tokens.append(name)
            self._one(name, value, tokens, work)
        if work.sizes:  # sizes that are equal are one size, whatever array they come from
            tokens.append(tuple(map(work.sizes.index, work.sizes)))
        guards = self._guards
        if guards is not None:
            seen = work.seen = guards.read()
            tokens.append(seen.tokens)
            arrays = seen.arrays
            pointers = [*map(library.address, arrays)]
            if pointers != self._pointers or not same(arrays, self._guarded):
                self._pointers, self._guarded = pointers, arrays
                shape = tuple([(type(a), signature(a), library.offset(a)) for a in arrays])
                self._shape = self._shapes.setdefault(shape, len(self._shapes))
                self._epoch += 1
                self._go_by()
            tokens.append(self._shape)
        tokens.append(library.modes())
        return tuple(tokens), work

    def _one(self, name: str, value: Any, tokens: list[Hashable], work: Work) -> None:
        """Adds one argument to a key."""
        library = self._library
        if name in self._options.static:
            self._static(name, value, tokens, work)
            return
        if is_plain(value, library.plain):
            tokens.append(plain_token(value))
            return
        before = len(work.leaves)
        flatten(value, name, library, tokens, work.leaves)
        padding = self._options.padding
        dynamic = padding is not None and name in padding.axes
        for leaf in work.leaves[before:]:
            signature = library.signature(leaf)
            if type(leaf) is not library.array_type:
                kind: Any = type(leaf)
                tokens.append(kind)
            if dynamic:
                assert padding is not None
                try:
                    shape, axis = padding.padded(name, signature[0])
                except InputError as error:
                    raise NotGraphable(str(error)) from error
                work.sizes.append(signature[0][axis])
                work.axes.append(axis)
                work.fills.append(self._options.fill.get(name))
                # Without strides: it is copied into memory of its own layout.
                tokens.append((shape, axis, signature[1], *signature[3:]))
            else:
                work.axes.append(None)
                work.fills.append(None)
                tokens.append(signature)

    def _static(self, name: str, value: Any, tokens: list[Hashable], work: Work) -> None:
        library, before = self._library, len(work.statics)
        if library.is_array(value):
            work.statics.append(value)
        elif is_plain(value, library.plain):
            tokens.append(plain_token(value))
        else:
            found = children_of(value, library)
            if found is not None:
                tokens.append(found[0])
                for child in found[1]:
                    self._static(name, child, tokens, work)
                return
            try:
                watch = self._watched.get(value)
                if watch is None:
                    watch = self._watched[value] = ObjectWatch(value, library)
            except TypeError:  # no weak references, or no hash
                watch = ObjectWatch(value, library)
            watch.read(tokens, work.statics)
        for array in work.statics[before:]:
            tokens.append(
                (type(array).__qualname__, library.signature(array), library.offset(array))
            )

    def _line(self, key: Hashable, work: Work) -> Line:
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= _MOST_LINES:
                self._forget()
            name = f"{self.name} #{next(_numbers)}"
            line = self._lines[key] = Line(name, self._words(work))
        return line

    def _forget(self) -> None:
        """Drops the older half of the keys without a graph."""
        idle = [key for key, line in self._lines.items() if line.captured() is None]
        for key in idle[: max(1, len(idle) // 2)]:
            del self._lines[key]

    def _words(self, work: Work) -> str:
        """The arguments of a call as they stand in tables."""
        parts = []
        names = itertools.chain(self._names, itertools.repeat("*"))
        for name, value in [*zip(names, work.args, strict=False), *work.kwargs.items()]:
            parts.append(f"{name}={self._word(value, name)}")
        return ", ".join(parts)

    def _word(self, value: Any, name: str) -> str:
        library = self._library
        if library.is_array(value):
            shape = [*library.signature(value)[0]]
            padding = self._options.padding
            if padding is not None and name in padding.axes:
                with contextlib.suppress(InputError):
                    shape = [*padding.padded(name, shape)[0]]
            return f"{library.signature(value)[1]}{shape}".replace("torch.", "")
        if is_plain(value, library.plain):
            return repr(value)[:40]
        return type(value).__name__

    def _pointers_of(self, work: Work) -> list[int]:
        return [*map(self._library.address, work.statics)]

    # ------------------------------------------------------------------------------ replays
    def _fits(self, line: Line, work: Work) -> bool:
        """Whether it is known what to cut from the results for these sizes."""
        for place, size in enumerate(work.sizes):
            if place not in line.learned and size != self._bucket(size):
                return False
        return True

    def _replay(self, line: Line, captured: Captured, work: Work) -> tuple[bool, Any]:
        """Replays a graph for a call.  (False, None) if it was evicted: nothing ran then."""
        stream = self._turns.take()
        if work.sizes:
            self._stage(captured, work)
        leaves = None if work.sizes else work.leaves
        made = launch(self._library, self.cache, line, captured, leaves, stream)
        if made is None:
            return False, None
        line.replays += 1
        return True, self._results(line, captured, work, made)

    def _results(self, line: Line, captured: Captured, work: Work, made: Sequence[Any] = ()) -> Any:
        """What a call gives after its replay.  `made`: the copies that the graph has made."""
        library = self._library
        for index in captured.written:
            leaf, changed = work.leaves[index], captured.inputs[index]
            axis = work.axes[index] if work.axes else None
            if axis is not None:
                changed = library.narrow(changed, axis, library.signature(leaf)[0][axis])
            library.copy(leaf, changed)
        tree = captured.tree
        if not (tree.given or work.sizes):
            return captured.give(made)
        outputs = self._cut(line, captured, work) if work.sizes else [*captured.outputs]
        if made:
            for index, copy in zip(captured.moves.outputs, made, strict=True):  # type: ignore[union-attr]
                outputs[index] = copy
        elif self._options.results == "clone":
            clones = zip(outputs, captured.clones, strict=True)
            outputs = [library.clone(out) if copied else out for out, copied in clones]
        return tree.build(outputs, self._static_objects(work) if tree.given else ())

    def _stage(self, captured: Captured, work: Work) -> None:
        """Copies inputs of which some are shorter than their memory."""
        library, place = self._library, 0
        for into, leaf, axis, fill in zip(
            captured.inputs, work.leaves, work.axes, work.fills, strict=True
        ):
            if axis is None:
                library.copy(into, leaf)
                continue
            size, place = work.sizes[place], place + 1
            library.copy(library.narrow(into, axis, size), leaf)
            if fill is not None:
                library.fill(library.rest(into, axis, size), fill)

    def _cut(self, line: Line, captured: Captured, work: Work) -> list[Any]:
        """The results without what padding made of them."""
        outputs = list(captured.outputs)
        for (index, axis), cut in line.cuts.items():
            outputs[index] = self._library.narrow(outputs[index], axis, work.sizes[cut.size])
        return outputs

    # ------------------------------------------------------------------------------ the rest
    def _at(self, reason: str) -> str:
        return f"{reason}; {self.name} is at {_where(self._function)}"

    def _slowly(self, line: Line, work: Work, key: Any) -> Any:
        """Every call that is not a plain replay."""
        self._go_by()  # what it changes is looked at again
        if self._state_reason:
            return self._eager(line, work, self._state_reason)
        if line.refused:
            raise InputError(f'{line.reason}, or ask for gradients="eager"')
        if line.reason:
            return self._eager(line, work, line.reason)
        if self._stored is not None and not line.text:
            line.text = self._text(self._stored, line, work, key)
        there = line.captured() is not None and line.name in self.cache
        if not (line.warmed or there or self._restore(line, work)):
            return self._warm_up(line, work)
        if self._overlaps(line, work):
            return self._eager(line, work, "an argument shares memory with another that is written")
        captured, fresh = line.captured(), False
        try:
            if captured is None or line.name not in self.cache:
                why = "the graph was evicted" if line.captures else "the second call of a key"
                captured, fresh = self._capture(line, work, why), True
            elif captured.epoch != self._epoch or self._pointers_of(work) != captured.pointers:
                why = self._rebind(line, captured, work)
                if why and not line.warmed:
                    self.cache.evict(line.name)
                    return self._warm_up(line, work)
                if why:
                    captured = self._capture(line, work, why)
        except CaptureLimitError as error:
            return self._eager(line, work, f"the cache refused the capture: {error}")
        except NotGraphable as error:
            line.reason = str(error)
            return self._eager(line, work, line.reason)
        except ContextPoisonedError:
            raise
        except OstinatoError as error:
            line.reason = self._at(f"no graph could be made ({type(error).__name__}: {error})")
            return self._eager(line, work, line.reason)
        if fresh and self._overlaps(line, work):  # the capture told what is written
            return self._eager(line, work, "an argument shares memory with another that is written")
        if work.sizes and not self._fits(line, work):
            return self._learn(line, captured, work)
        if self._due(line, captured, work):
            return self._verify(line, captured, work)
        done, result = self._replay(line, captured, work)
        if not done:
            return self._eager(line, work, "the graph was evicted while it was to be replayed")
        return result

    def _due(self, line: Line, captured: Captured, work: Work) -> bool:
        """Whether a replay is to be checked: the first of a graph, the first that has padding, and
        each so many."""
        verify = self._options.verify
        if verify is None:
            return False
        if not captured.checked or (not captured.checked_padding and self._has_padding(work)):
            return True
        return verify != "first" and line.replays % int(verify) == 0

    def _has_padding(self, work: Work) -> bool:
        return any(size != self._bucket(size) for size in work.sizes)

    def _eager(self, line: Line, work: Work, reason: str) -> Any:
        if self._options.strict:
            raise EagerRunError(f"graphed {self.name} would run eagerly: {reason}")
        line.eager += 1
        line.reasons[reason] += 1
        return EAGER

    def _warm_up(self, line: Line, work: Work) -> Any:
        """The first call of a key: it runs eagerly, beside the caller's stream."""
        library, options = self._library, self._options
        reason, seen = self._refusal([*work.leaves, *work.statics]), work.seen
        if not reason and seen is not None:
            reason = self._refusal(seen.arrays)
            reason = reason and f"what the function uses: {reason}"
        if reason:
            line.reason = self._at(reason)
            return self._eager(line, work, line.reason)
        state = self._state(work)
        versions = [*map(library.version, work.leaves)]
        versions_before = [*map(library.version, state)]
        line.eager += 1
        line.reasons["the first call of a key warms up"] += 1
        self._turns.take()
        result = library.run_beside(lambda: self._function(*work.args, **work.kwargs))
        if library.wants_gradient(result):
            line.reason = self._at(
                "the call needs gradients, which a replay does not give; call it inside "
                "torch.no_grad() or torch.inference_mode()"
            )
            if options.gradients == "refuse":
                line.refused = True
                raise InputError(f'{line.reason}, or ask for gradients="eager"')
            return result
        after = [*map(library.version, work.leaves)]
        line.written |= {i for i, (a, b) in enumerate(zip(versions, after, strict=True)) if a != b}
        line.state |= {
            i
            for i, (array, before) in enumerate(zip(state, versions_before, strict=True))
            if before is None or library.version(array) != before
        }
        if self._guards is not None and seen is not None:
            changed = self._guards.explain(seen, self._guards.read())
            if changed:
                self._stateful += 1
                if self._stateful > 1:
                    self._state_reason = self._at(
                        f"the function changes Python state that it uses itself ({changed}), and "
                        "a replay runs no Python"
                    )
                return result
        try:
            tree = self._tree(result, work)
        except Unknown as error:
            line.reason = self._at(f"the result cannot be built again: {error}")
            return result
        wrong = self._refusal(tree.leaves)
        if wrong:
            line.reason = self._at(f"of the result: {wrong}")
            return result
        self._note_shapes(line, tree, work)
        line.warmed = True
        return result

    def _refusal(self, arrays: Iterable[Any]) -> str:
        """Why one of some arrays can be no part of a graph; empty if all can."""
        return next(filter(None, map(self._library.refusal, arrays)), "")

    def _overlaps(self, line: Line, work: Work) -> bool:
        """Whether an argument that is copied shares memory with something that the function writes:
        the copy would not see that."""
        if not (line.written or line.state):
            return False
        memory = self._library.storage
        copied = [memory(leaf).address for leaf in work.leaves]
        if line.written and len({*copied}) < len(copied):
            return True
        if not copied:
            return False
        state = self._state(work)
        # If an argument is written, whatever else the function reads may be in its memory.
        others = state if line.written else [state[i] for i in line.state if i < len(state)]
        return not {memory(array).address for array in others}.isdisjoint(copied)

    @staticmethod
    def _state(work: Work) -> list[Any]:
        """The arrays of a call that are not copied."""
        return [*work.statics, *([] if work.seen is None else work.seen.arrays)]

    def _note_shapes(self, line: Line, tree: Tree, work: Work) -> None:
        shapes = [tuple(self._library.signature(leaf)[0]) for leaf in tree.leaves]
        line.shapes = shapes, list(work.sizes)

    def _tree(self, result: Any, work: Work) -> Tree:
        """A result taken apart.  Objects that were given as static arguments stay themselves."""
        return tree_of(result, "result", self._library, self._static_objects(work))

    def _static_objects(self, work: Work) -> list[Any]:
        names = itertools.chain(self._names, itertools.repeat("*"))
        given = [*zip(names, work.args, strict=False), *work.kwargs.items()]
        library = self._library
        return [
            value
            for name, value in given
            if name in self._options.static
            and not library.is_array(value)
            and not is_plain(value, library.plain)
            and children_of(value, library) is None
        ]

    # --- making graphs
    def _capture(self, line: Line, work: Work, why: str) -> Captured:
        """Captures a key.  Raises NotGraphable, and the errors of the library below."""
        made: list[Captured] = []
        if not work.sizes:
            self._mover()  # before memory is measured

        def make() -> Any:
            graph, captured = self._make(line, work)
            run = graph.instantiate(upload=self._turns.take())
            made.append(captured)
            return run

        self.cache.evict(line.name)
        self.cache.get_or_capture(line.name, make)
        captured = made[0]
        line.captures += 1
        line.capture_reasons[why] += 1
        line.captured = weakref.ref(captured)
        return captured

    def _inputs(self, work: Work) -> list[Any]:
        """The graph's own arrays for those of a call that are copied."""
        library, place = self._library, 0
        axes = work.axes or [None] * len(work.leaves)
        inputs = []
        for leaf, axis in zip(work.leaves, axes, strict=True):
            shape = None
            if axis is not None:
                given = [*library.signature(leaf)[0]]
                given[axis], place = self._bucket(work.sizes[place]), place + 1
                shape = given
            inputs.append(library.buffer(leaf, shape))
        return inputs

    def _make(self, line: Line, work: Work) -> tuple[Graph, Captured]:
        library = self._library
        inputs = self._inputs(work)
        args, kwargs = self._replaced(work, inputs)
        stage = library.stager(inputs)
        if work.sizes:
            for buffer in inputs:
                library.fill(buffer, 0)
        before = work.seen
        versions = [*map(library.version, inputs)]
        self._turns.take()
        bound = self._bound(work)
        sources = self._extents(inputs, work.leaves)
        mover = None if work.sizes or sources is None else self._mover()
        moved: tuple[int, ...] = ()

        def run(stream: Stream) -> Any:
            nonlocal moved
            if mover is None or sources is None:
                return self._function(*args, **kwargs)
            mover.begin(stream, sources)
            result = self._function(*args, **kwargs)
            moved, places = self._moved(result, work, bound)
            if moved:
                mover.end(stream, places)
            return result

        graph, result = library.capture(run)
        moves = None if mover is None else mover.find(graph, len(inputs), moved)
        if mover is not None and moves is None:
            raise NotGraphable(
                self._at("the capture is empty: nothing ran on the caller's current stream")
            )
        line.written |= {
            index
            for index, (old, buffer) in enumerate(zip(versions, inputs, strict=True))
            if old is None or library.version(buffer) != old
        }
        if self._guards is not None and before is not None:
            changed = self._guards.explain(before, self._guards.read())
            if changed:
                raise NotGraphable(
                    self._at(f"the function changes Python state that it uses ({changed})")
                )
        try:
            tree = self._tree(result, work)
        except Unknown as error:
            raise NotGraphable(self._at(f"the result cannot be built again: {error}")) from None
        wrong = self._refusal(tree.leaves)
        if wrong:
            raise NotGraphable(self._at(f"of the result: {wrong}"))
        if not work.sizes and line.shapes is not None:
            shapes = [tuple(library.signature(leaf)[0]) for leaf in tree.leaves]
            if shapes != line.shapes[0]:
                raise NotGraphable(
                    self._at(
                        f"the result has other shapes when it is captured ({shapes}) than it had "
                        f"eagerly ({line.shapes[0]})"
                    )
                )
        clones = self._clones(tree.leaves, bound)
        captured = Captured(
            owner=(graph.owner, mover),
            inputs=inputs,
            stage=stage,
            outputs=tree.leaves,
            tree=tree,
            clones=clones,
            written=tuple(sorted(line.written)),
            bound=bound,
            pointers=self._pointers_of(work),
            epoch=self._epoch,
            moves=moves,
            templates=tuple([tree.leaves[i] for i in moved]),
            give=self._giver(tree, clones, moved),
        )
        if self._stored is not None:
            own = Work(args, kwargs, inputs, work.statics, work.sizes, work.seen, work.axes)
            captured.facts = self._facts(self._stored, line, own, result, tree)
        graph.owner = captured
        if work.sizes:
            self._relate(line, captured, work)
        return graph, captured

    def _clones(self, leaves: list[Any], bound: Bound) -> list[bool]:
        """Which outputs are copied: those that lie in memory of the graph's own."""
        address, static = self._library.address, [memory for memory, _ in bound.storages]
        return [not any(m.nbytes and m.holds(address(leaf)) for m in static) for leaf in leaves]

    def _giver(
        self, tree: Tree, clones: list[bool], moved: tuple[int, ...]
    ) -> Callable[[Sequence[Any]], Any]:
        """See `Captured.give`."""
        outputs, build, clone = tree.leaves, tree.build, self._library.clone
        copies = self._options.results == "clone"

        def give(made: Sequence[Any]) -> Any:
            if not copies:
                return build(outputs)
            if not made:
                pairs = zip(outputs, clones, strict=True)
                return build([clone(out) if copied else out for out, copied in pairs])
            given = [*outputs]
            for index, copy in zip(moved, made, strict=True):
                given[index] = copy
            return build(given)

        return build if moved and moved == (*range(len(outputs)),) else give

    # --- copies inside the graph
    def _mover(self) -> Mover | None:
        """What puts copies into graphs; made for the first one."""
        if not self._movers:
            self._movers.append(Mover.of(self._library.device))
        return self._movers[0]

    def _extents(
        self, arrays: Sequence[Any], like: Sequence[Any] = ()
    ) -> list[tuple[int, int]] | None:
        """Addresses and bytes of arrays that can be copied as they lie, also from arrays `like`
        them; None if one cannot, or if there are too many."""
        extent, address = self._library.extent, self._library.address
        sizes = [extent(array) for array in arrays]
        if len(arrays) > MOST or None in sizes or None in map(extent, like):
            return None
        return [(address(a), n) for a, n in zip(arrays, sizes, strict=True) if n is not None]

    def _moved(
        self, result: Any, work: Work, bound: Bound
    ) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Which outputs the graph copies, and where they lie."""
        try:
            leaves = self._tree(result, work).leaves
        except Unknown:  # which is said later
            return (), []
        if self._options.results != "clone" or self._refusal(leaves):
            return (), []
        places = tuple(i for i, copied in enumerate(self._clones(leaves, bound)) if copied)
        found = self._extents([leaves[i] for i in places])
        return ((), []) if found is None else (places, found)

    def _bucket(self, size: int) -> int:
        padding = self._options.padding
        assert padding is not None
        return padding.buckets.bucket(size)

    def _replaced(self, work: Work, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments with other arrays in the places of those that are copied."""
        rest = iter(leaves)
        library, static = self._library, self._options.static

        def visit(value: Any) -> Any:
            if library.is_array(value):
                return next(rest)
            if is_plain(value, library.plain):
                return value
            found = children_of(value, library)
            assert found is not None
            return joiner(value, library)([visit(child) for child in found[1]])

        names = itertools.chain(self._names, itertools.repeat("*"))
        args = tuple(
            value if name in static else visit(value)
            for name, value in zip(names, work.args, strict=False)
        )
        kwargs = {n: v if n in static else visit(v) for n, v in work.kwargs.items()}
        return args, kwargs

    def _relate(self, line: Line, captured: Captured, work: Work) -> None:
        """Learns from the shapes of an eager run which axes of the results are dynamic.

        Raises NotGraphable if the shapes cannot be explained.
        """
        if line.shapes is None:
            return
        shapes, sizes = line.shapes
        capacities = [self._bucket(size) for size in sizes]
        padded = [tuple(self._library.signature(leaf)[0]) for leaf in captured.outputs]
        if len(shapes) != len(padded):
            raise NotGraphable(self._at("the number of results depends on a dynamic size"))
        found = cuts(shapes, padded, sizes, capacities)
        if isinstance(found, str):
            raise NotGraphable(self._at(found))
        for index, cut in enumerate(found):
            for one in cut:
                line.cuts[index, one.axis] = one
        line.learned |= {i for i, s in enumerate(sizes) if s != capacities[i]}

    def _learn(self, line: Line, captured: Captured, work: Work) -> Any:
        """An eager run that tells which axes of the results are dynamic."""
        reason = "where the size shows in the results is learned from an eager run"
        self._eager(line, work, reason)
        result = self._function(*work.args, **work.kwargs)
        try:
            self._note_shapes(line, self._tree(result, work), work)
            self._relate(line, captured, work)
        except (Unknown, NotGraphable) as error:
            line.reason = self._at(str(error))
        return result

    def _rebind(self, line: Line, captured: Captured, work: Work) -> str:
        """Points a graph at static memory that has moved; why it must be captured again if that
        cannot be."""
        now = self._bound(work)
        why = self._cannot_rebind(captured, now)
        moved = [
            (a, b)
            for (a, _), (b, _) in zip(captured.bound.storages, now.storages, strict=False)
            if a != b
        ]
        if moved and not why:
            with self.cache.hold(line.name) as run:
                if run is None:
                    why = "the graph was evicted"
                else:
                    try:
                        report = run.rebind(moved)
                    except (InputError, UpdateRefusedError) as error:
                        why = f"memory that it uses has moved, and rebinding failed: {error}"
                    else:
                        if report.left:
                            left = report.left[0]
                            why = (
                                "memory that it uses has moved, and not every word that may point "
                                f"there could be changed: node {left.node_index} "
                                f"({left.node_name}), {left.place}: {left.why}"
                            )
        if why:
            return why
        line.rebound += bool(moved)
        if moved and captured.facts is not None:
            captured.facts = replace(captured.facts, why_not="it was bound to other memory")
        captured.bound = now
        captured.checked = False
        captured.pointers = self._pointers_of(work)
        captured.epoch = self._epoch
        return ""

    def _bound(self, work: Work) -> Bound:
        """The memory of the arrays of a call that are not copied, each piece once, in the order in
        which it first comes."""
        found: dict[int, tuple[MemoryRange, Any]] = {}
        places: dict[int, int] = {}
        pattern = []
        for array in self._state(work):
            memory = self._library.storage(array)
            found.setdefault(memory.address, (memory, array))
            pattern.append(places.setdefault(memory.address, len(places)))
        return Bound(list(found.values()), pattern)

    def _cannot_rebind(self, captured: Captured, now: Bound) -> str:
        """Why a graph cannot be pointed at other memory; empty if it can."""
        old = captured.bound
        if now.pattern != old.pattern:
            return "memory that it uses has moved, and other arrays share memory than before"
        moved = []
        for (a, _), (b, _) in zip(old.storages, now.storages, strict=True):
            if a == b:
                continue
            if a.nbytes != b.nbytes or not b.address:
                return f"memory that it uses has moved: {a.nbytes} bytes before, {b.nbytes} now"
            moved.append(a)
        address = self._library.address
        if any(m.holds(address(leaf)) for m in moved for leaf in captured.outputs):
            return "memory that it uses has moved, and a result is a view of it"
        return ""

    # --- graphs in files
    def _text(self, stored: Stored, line: Line, work: Work, key: Any) -> str:
        """The text of a key that is the same in every process; what it is not, if there is none."""
        description = Description(stored.library)
        guards = self._guards
        call = key[: -1 if guards is None else -3]  # without the guards' own
        try:
            description.add(*call, key[-1])
            if guards is not None:
                description.guards(guards)
        except Unstable as error:
            stored.reasons[str(error)] += 1
            return f"!{error}"
        if work.seen is not None and not same(description.arrays, work.seen.arrays):
            stored.reasons["what the function uses is not known by names"] += 1
            return "!what the function uses is not known by names"
        line.names = [f"static {i}" for i in range(len(work.statics))] + description.names
        return "\n".join(description.parts)

    def _facts(self, stored: Stored, line: Line, own: Work, result: Any, tree: Tree) -> Facts:
        """What the file of a graph is made of."""
        why, data = line.text[1:] if line.text.startswith("!") else "", None
        if tree.given:
            why = why or "its result holds an object that it was given"
        if not why:
            leaves: list[Any] = []
            try:
                data = described(result, self._library, leaves)
                require_rebuildable(result, data, leaves, self._library)
            except Unstable as error:
                why = str(error)
        return Facts(line.text, data, own, why)

    def _pieces(self, line: Line, bound: Bound) -> list[tuple[str, MemoryRange, bool]]:
        """The memory that a call uses besides its inputs: names, ranges, and what is written."""
        written = {bound.pattern[i] for i in line.state if i < len(bound.pattern)}
        names: dict[int, str] = {}
        for name, piece in zip(line.names, bound.pattern, strict=True):
            names.setdefault(piece, name)
        return [
            (names[piece], memory, piece in written)
            for piece, (memory, _) in enumerate(bound.storages)
            if memory.nbytes
        ]

    def save(self, *, check: bool = True) -> dict[str, str]:
        """Writes the graphs that are kept now to the store; why some were not written, by key.

        Each is captured once more, which proves which words of it are addresses, launched, and
        checked in another process (`Graph.save`).  Nobody may use its memory meanwhile.  Raises
        InputError without a store, ContextPoisonedError.
        """
        stored = self._stored
        if stored is None:
            raise InputError(f"graphed {self.name} has no store; give it one (store=folder)")
        refused: dict[str, str] = {}
        with self._lock:
            for line in self._lines.values():
                captured = line.captured()
                if captured is None or captured.facts is None or captured.facts.restored:
                    continue
                try:
                    self._save(stored, line, captured, captured.facts, check)
                except ContextPoisonedError:
                    raise
                except (OstinatoError, NotGraphable) as error:
                    refused[line.words] = str(error)
        return refused

    def _save(
        self, stored: Stored, line: Line, captured: Captured, facts: Facts, check: bool
    ) -> None:
        if facts.why_not:
            raise InputError(facts.why_not)
        library, pieces = stored.library, self._pieces(line, captured.bound)
        inputs, outputs, results = self._memory(library, captured, pieces)
        if None in [layout for _, layout in results]:
            raise InputError("the memory of a result holds another value than the result")
        constants = {name: memory for name, memory, written in pieces if not written}
        state = {name: memory for name, memory, written in pieces if written}
        with self.cache.hold(line.name) as run:
            if run is None:
                raise InputError("its graph was evicted")
            other, twin = self._make(line, facts.work)
            moved = self._memory(library, twin, pieces)
            if moved[2] != results:
                raise InputError("a second capture lays its results out otherwise")
            named = Twin(other, moved[0] | moved[1])
            stored.save(
                facts.key,
                run.graph,
                {
                    "result": facts.result,
                    "outputs": results,
                    "written": sorted(line.written),
                    "state": sorted(line.state),
                    "moved": None if captured.moves is None else [*captured.moves.outputs],
                },
                inputs=inputs | state,
                outputs=outputs
                | state
                | {f"input {i}": inputs[f"input {i}"] for i in line.written},
                constants=constants,
                twin=named,
                check=check,
            )

    @staticmethod
    def _memory(
        library: StoringLibrary,
        captured: Captured,
        pieces: Sequence[tuple[str, MemoryRange, bool]],
    ) -> tuple[dict[str, MemoryRange], dict[str, MemoryRange], list[tuple[str, Any]]]:
        """A graph's own inputs and outputs by name, and for each result in which memory it lies,
        and how."""
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

    def _restore(self, line: Line, work: Work) -> bool:
        """Takes a key's graph from the store, if there is one that fits."""
        stored = self._stored
        if stored is None or not line.text or line.text.startswith("!"):
            return False
        inputs, bound = self._inputs(work), self._bound(work)
        if work.sizes:
            for one in inputs:
                self._library.fill(one, 0)
        memory = {f"input {i}": self._library.storage(one) for i, one in enumerate(inputs)}
        memory |= {name: piece for name, piece, _ in self._pieces(line, bound)}
        stream = self._turns.take()
        found = stored.restore(line.text, {n: m for n, m in memory.items() if m.nbytes}, stream)
        if found is None:
            return False
        loaded, facts = found
        try:
            captured = self._restored(stored, line, work, inputs, bound, loaded, facts)
            loaded.owner = captured
            self.cache.install(line.name, loaded.instantiate(upload=stream))
        except ContextPoisonedError:
            raise
        except (OstinatoError, LookupError, TypeError, ValueError) as error:
            loaded.close()
            stored.reasons[f"{type(error).__name__}: {error}"] += 1
            return False
        line.captured = weakref.ref(captured)
        line.restored += 1
        return True

    def _restored(
        self,
        stored: Stored,
        line: Line,
        work: Work,
        inputs: list[Any],
        bound: Bound,
        loaded: LoadedGraph,
        facts: dict[str, Any],
    ) -> Captured:
        """What belongs to a graph from a file.  Raises InputError, LookupError, TypeError and
        ValueError for facts that are none of it."""
        library = stored.library
        arrays = {f"input {i}": one for i, one in enumerate(inputs)}
        for (name, *_), (_, array) in zip(
            self._pieces(line, bound),
            [s for s in bound.storages if s[0].nbytes],
            strict=True,
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
        tree = self._tree(rebuilt(facts["result"], outputs), work)
        if not same(tree.leaves, outputs):
            raise ValueError("the results of the file are put together otherwise")
        clones, moved = self._clones(outputs, bound), facts["moved"]
        moves = None if moved is None else Mover.find(loaded, len(inputs), tuple(moved))
        if (moved is not None and moves is None) or (
            moved and moved != [i for i, copied in enumerate(clones) if copied]
        ):
            raise ValueError("the graph of the file does not copy what it says")
        line.written |= {int(i) for i in facts["written"]}
        line.state |= {int(i) for i in facts["state"]}
        copied = tuple(moved or ())
        return Captured(
            owner=None,  # the graph has what it needs
            inputs=inputs,
            stage=library.stager(inputs),
            outputs=outputs,
            tree=tree,
            clones=clones,
            written=tuple(sorted(line.written)),
            bound=bound,
            pointers=self._pointers_of(work),
            epoch=self._epoch,
            moves=moves,
            templates=tuple([outputs[i] for i in copied]),
            give=self._giver(tree, clones, copied),
            facts=Facts(line.text, None, work, restored=True),
        )

    # --- checking
    def _verify(self, line: Line, captured: Captured, work: Work) -> Any:
        """Replays, puts everything back, runs eagerly, and compares; the eager answer counts."""
        library, options = self._library, self._options
        random = library.save_random()
        state = self._state(work)
        written = [*work.leaves, *(state[i] for i in sorted(line.state) if i < len(state))]
        kept = [(array, library.clone(array)) for array in written]

        def put_back() -> None:
            for array, before in kept:
                library.copy(array, before)
            library.restore_random(random)

        def leaves_of(result: Any) -> list[Any]:
            return [library.clone(leaf) for leaf in self._tree(result, work).leaves]

        done, result = self._replay(line, captured, work)
        if not done:
            return self._eager(line, work, "the graph was evicted while it was to be checked")
        results = [leaves_of(result)]
        after = [library.clone(array) for array, _ in kept]
        moved_on = library.save_random()
        if work.sizes:
            put_back()
            poisoned, result = self._poisoned(line, captured, work)
            if poisoned:
                results.append(leaves_of(result))
        put_back()
        eager = self._function(*work.args, **work.kwargs)
        line.eager += 1
        line.reasons["a check runs the call eagerly too"] += 1
        line.verified += 1
        captured.checked = True
        captured.checked_padding |= self._has_padding(work)
        wanted = self._tree(eager, work)
        found = ""
        for index, leaves in enumerate(results):
            found = found or self._compare(line, captured, leaves, wanted, poisoned=index > 0)
        for (array, _), replayed in zip(kept, after, strict=True):
            difference = "" if found else library.difference(replayed, array, options.tolerance)
            if difference:
                found = f"an array that the function writes differs afterwards: {difference}"
        if not found and not library.same_random(moved_on):
            found = "the generators are in another state after a replay than after an eager run"
        if found:
            line.reason = self._at(f"a check failed: {found}")
            self.cache.evict(line.name)
            if options.strict:
                raise VerificationError(f"graphed {self.name}, {line.words}: {line.reason}")
        return eager

    def _poisoned(self, line: Line, captured: Captured, work: Work) -> tuple[bool, Any]:
        """A replay with padding that no answer may depend on.  (False, None) if the graph was
        evicted: nothing ran then."""
        library, place = self._library, 0
        self._stage(captured, work)
        for into, axis, fill in zip(captured.inputs, work.axes, work.fills, strict=True):
            if axis is None:
                continue
            size, place = work.sizes[place], place + 1
            if fill is None:
                rest = library.rest(into, axis, size)
                library.poison(rest, library.narrow(into, axis, size), axis)
        stream = library.stream()
        if not self.cache.replay(line.name, stream):
            return False, None
        return True, self._results(line, captured, work)

    def _compare(
        self, line: Line, captured: Captured, leaves: list[Any], wanted: Tree, *, poisoned: bool
    ) -> str:
        """How a replay's result differs from the eager one; empty if it does not."""
        what = "with poisoned padding " if poisoned else ""
        if len(leaves) != len(wanted.leaves):
            return f"{what}the replay gives {len(leaves)} arrays, eager {len(wanted.leaves)}"
        for index, (one, other, path) in enumerate(
            zip(leaves, wanted.leaves, wanted.paths, strict=True)
        ):
            difference = self._library.difference(one, other, self._options.tolerance)
            if difference:
                names = self._writers(line, captured, index)
                behind = f" (kernels that point at it: {', '.join(names)})" if names else ""
                return f"{what}{path} differs from the eager run: {difference}{behind}"
        return ""

    def _writers(self, line: Line, captured: Captured, index: int) -> list[str]:
        """The kernels of a graph that point at one of its outputs."""
        address = self._library.address(captured.outputs[index])
        with self.cache.hold(line.name) as run:
            if run is None:
                return []
            return [
                f"node {node.index} {node.name}"
                for node in run.nodes
                if node.name not in NAMES
                and any(p.address == address for a in node.arguments for p in a.pointers)
            ][-4:]

    # ------------------------------------------------------------------------------ looking
    def statistics(self) -> GraphedStatistics:
        """Counts since it was made, with a line for each key."""
        with self._lock:
            for hot in self._hot:
                hot.count()
            cache = self.cache.statistics()
            charged = {line.key: line.nbytes for line in cache.keys}
            lines = tuple(
                GraphedKeyStatistics(
                    name=line.name,
                    key=line.words,
                    decision=self._decision(line, charged),
                    reason=self._state_reason or line.reason,
                    calls=line.calls,
                    eager=line.eager,
                    captures=line.captures,
                    restored=line.restored,
                    replays=line.replays,
                    rebound=line.rebound,
                    verified=line.verified,
                    us=median(line.times) if line.times else None,
                    nbytes=charged.get(line.name, 0),
                    eager_reasons=dict(line.reasons),
                    capture_reasons=dict(line.capture_reasons),
                )
                for line in self._lines.values()
            )
        reasons: Counter[str] = Counter()
        captures: Counter[str] = Counter()
        for each in lines:
            reasons.update(each.eager_reasons)
            captures.update(each.capture_reasons)
        return GraphedStatistics(
            calls=sum(each.calls for each in lines) + self._nested,
            eager=sum(each.eager for each in lines),
            captures=sum(each.captures for each in lines),
            restored=sum(each.restored for each in lines),
            replays=sum(each.replays for each in lines),
            rebound=sum(each.rebound for each in lines),
            verified=sum(each.verified for each in lines),
            nested=self._nested,
            quarantined={each.name: each.reason for each in lines if each.reason},
            eager_reasons=dict(reasons),
            capture_reasons=dict(captures),
            keys=lines,
            cache=cache,
            not_restored={} if self._stored is None else self._stored.all_reasons(),
        )

    def _decision(self, line: Line, charged: Mapping[Any, int]) -> str:
        if self._state_reason or line.reason:
            return "eager"
        if line.name in charged:
            return "replayed"
        return "evicted" if line.captures or line.restored else "warmed up"

    def explain(self) -> str:
        """A table: each key, what is done with its calls, and why."""
        rows = [["key", "decision", "captures", "replays", "eager", "µs", "bytes", "reason"]]
        for each in self.statistics().keys:
            us = "-" if each.us is None else f"{each.us:.1f}"
            rows.append(
                [
                    each.key,
                    each.decision,
                    str(each.captures),
                    str(each.replays),
                    str(each.eager),
                    us,
                    str(each.nbytes),
                    each.reason or _again(each.capture_reasons),
                ]
            )
        return table(rows)

    def inspect(self) -> str:
        """The graphs that are kept, each as the library's table of its nodes."""
        parts = []
        with self._lock:
            for line in self._lines.values():
                with self.cache.hold(line.name) as run:
                    if run is not None:
                        parts.append(f"{line.name}: {line.words}\n{run.graph}")
        return "\n\n".join(parts) or f"graphed {self.name} keeps no graph yet"

    def invalidate(self) -> int:
        """Drops every graph, and forgets why keys ran eagerly; returns how many were dropped.

        The next call of each key captures again; for what a guard does not see.
        """
        with self._lock:
            names = [line.name for line in self._lines.values()]
            self._go_by()
            self._lines.clear()
            self._stateful, self._state_reason = 0, ""
            return sum(self.cache.evict(name) for name in names)

    # ------------------------------------------------------------------------------ lifetime
    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Gives the graphs and their memory back.  Calls raise ClosedError from here on."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.invalidate()
            self._guarded = []
            self._guards = None
        if self._owns_cache:
            self.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _again(reasons: Mapping[str, int]) -> str:
    """Why a key was captured more than once."""
    again = [f"{why} ({count}x)" for why, count in [*reasons.items()][1:]]
    return f"captured again: {'; '.join(again)}" if again else ""


def _parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of positional parameters, and whether it takes others by keyword."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return [], True
    names, rest = [], False
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        else:
            rest = True
    return names, rest


def _where(function: Callable[..., Any]) -> str:
    """The file and line where a function is defined."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(plain, "__code__", None)
    if code is None:
        plain = vars(type(function)).get("__call__")
        code = getattr(plain, "__code__", None)
    return "an unknown place" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
