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
from collections.abc import Callable, Hashable, Iterable, Mapping
from statistics import median
from typing import Any, Self

from ostinato import Graph, GraphCache, MemoryRange, Stream, new_lock
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
from ostinato.interop.graphing.library import Library, NotGraphable, Options
from ostinato.interop.graphing.padding import cuts
from ostinato.interop.graphing.recheck import MOST_HOT, Checks, Hot, recheck
from ostinato.interop.graphing.records import Bound, Captured, Line, Work
from ostinato.interop.graphing.statistics import GraphedKeyStatistics, GraphedStatistics, table
from ostinato.interop.graphing.trees import (
    Tree,
    Unknown,
    children_of,
    flatten,
    is_plain,
    joined,
    plain_token,
    tree_of,
)

__all__ = ["EAGER", "Graphed"]

_MOST_LINES = 4096
_numbers = itertools.count()
"""Of keys, in all caches."""
EAGER = object()
"""Stands for the result of a call that is to run eagerly."""
_NOTHING = Work((), {}, [], [], [], None)
"""Of a call whose results depend on nothing but the graph."""
_TIMED = 16
"""One call in so many is timed."""


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
    ) -> None:
        self._function = function
        self._library = library
        self._options = options
        self.cache = cache
        """Where the graphs are kept."""
        self.name = name
        self._owns_cache = owns_cache
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
        self._special = {*options.static, *(options.padding.axes if options.padding else ())}
        unknown = [n for n in (*self._special, *options.fill) if not self._has_parameter(n)]
        if unknown:
            raise InputError(f"{name} has no parameter {unknown[0]!r} (it has {self._names})")
        self._watched: weakref.WeakKeyDictionary[object, ObjectWatch] = weakref.WeakKeyDictionary()
        self._last: Stream | None = None
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
        self.__name__ = name
        self.__wrapped__ = function
        self.__doc__ = getattr(function, "__doc__", None)

    def __repr__(self) -> str:
        return f"<graphed {self.name}: {len(self._lines)} keys{', closed' * self._closed}>"

    def _has_parameter(self, name: str) -> bool:
        return name in self._names or self._rest

    # ------------------------------------------------------------------------------ calls
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._hot:
            result = self._shortly(args, kwargs)
            if result is not EAGER:
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
            if not self._calls % _TIMED:
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
            result = self._slowly(line, work)
            self._hot = ()  # of calls that the function made of itself meanwhile
        if result is not EAGER:
            return result
        return self._function(*args, **kwargs)  # without the lock: it may take as long as it likes

    def _shortly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A replay for a call like one of the last, found without a key; EAGER if it is none."""
        with self._lock:
            for hot in self._hot:
                leaves = hot.match(args, kwargs)
                if leaves is None:
                    continue
                captured, line = hot.captured(), hot.line
                if captured is None or (hot.state and self._writes(hot.state, leaves)):
                    break
                began = 0
                self._calls += 1
                if not self._calls % _TIMED:
                    began = time.perf_counter_ns()
                if self._last is not hot.stream:
                    self._turn()
                captured.stage(leaves)
                if not self.cache.replay(line.name, hot.stream):
                    break
                line.calls += 1
                line.replays += 1
                result = self._results(line, captured, _NOTHING)
                if began:
                    line.unmatched >>= 1
                    line.times.append((time.perf_counter_ns() - began) / 1000)
                return result
        return EAGER

    def _heat(self, line: Line, captured: Captured, work: Work, key: Any) -> None:
        """Looks for a short way for calls like this one, which was just replayed."""
        seen = self._guarded, self._pointers, key[-1]
        assert self._last is not None
        hot = recheck(
            self._library,
            self._options,
            self._guards,
            self._names,
            work,
            line,
            captured,
            self._last,
            seen,
            self._note,
        )
        if hot is not None:
            others = [one for one in self._hot if one.line is not line]
            self._hot = (hot, *others[: MOST_HOT - 1])

    def _note(self, checks: Checks) -> None:
        """Notes what else must be as it is for `_shortly` to stand for a call."""

    def _writes(self, state: frozenset[int], leaves: list[Any]) -> bool:
        memory = self._library.storage
        return not state.isdisjoint([memory(leaf).address for leaf in leaves])

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
                self._hot = ()
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
                tokens.append(id(type(leaf)))
            if dynamic:
                assert padding is not None
                try:
                    shape, axis = padding.padded(name, signature[0])
                except InputError as error:
                    raise NotGraphable(str(error)) from error
                work.sizes.append(signature[0][axis])
                # Without strides: it is copied into memory of its own layout.
                tokens.append((shape, axis, signature[1], *signature[3:]))
            else:
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
        stream = self._turn()
        if work.sizes:
            self._stage(captured, work)
        else:
            captured.stage(work.leaves)
        if not self.cache.replay(line.name, stream):
            return False, None
        line.replays += 1
        return True, self._results(line, captured, work)

    def _turn(self) -> Stream:
        """The caller's stream, whose later work comes behind all that this function did so far.

        Its graphs share memory, so they must run one after the other, whatever the stream."""
        stream = self._library.stream()
        if stream is not self._last:
            if self._last is not None:
                self._library.wait(stream, self._last)
            self._last = stream
        return stream

    def _results(self, line: Line, captured: Captured, work: Work) -> Any:
        library = self._library
        if captured.simple:
            return library.clone(captured.outputs[0])
        if captured.written:
            axes = self._axes(work)[0] if work.sizes else [None] * len(work.leaves)
            for index in captured.written:
                leaf, changed, axis = work.leaves[index], captured.inputs[index], axes[index]
                if axis is not None:
                    changed = library.narrow(changed, axis, library.signature(leaf)[0][axis])
                library.copy(leaf, changed)
        outputs = captured.outputs
        if work.sizes and line.cuts:
            outputs = self._cut(line, captured, work)
        if self._options.results == "clone":
            clone = library.clone
            outputs = [
                clone(out) if copied else out
                for out, copied in zip(outputs, captured.clones, strict=True)
            ]
        tree = captured.tree
        return tree.build(outputs, self._static_objects(work) if tree.given else ())

    def _stage(self, captured: Captured, work: Work) -> None:
        """Copies inputs of which some are shorter than their memory."""
        library, options, place = self._library, self._options, 0
        padding = options.padding
        assert padding is not None
        for into, leaf, axis, fill in zip(
            captured.inputs, work.leaves, *self._axes(work), strict=True
        ):
            if axis is None:
                library.copy(into, leaf)
                continue
            size, place = work.sizes[place], place + 1
            library.copy(library.narrow(into, axis, size), leaf)
            if fill is not None:
                library.fill(library.rest(into, axis, size), fill)

    def _axes(self, work: Work) -> tuple[list[int | None], list[float | None]]:
        """The dynamic axis of each leaf, and what its padding holds."""
        library, padding = self._library, self._options.padding
        axes: list[int | None] = []
        fills: list[float | None] = []
        names = itertools.chain(self._names, itertools.repeat("*"))
        for name, value in [*zip(names, work.args, strict=False), *work.kwargs.items()]:
            if name in self._options.static:
                continue
            leaves: list[Any] = []
            if not is_plain(value, library.plain):
                flatten(value, name, library, [], leaves)
            for leaf in leaves:
                if padding is not None and name in padding.axes:
                    shape = library.signature(leaf)[0]
                    axes.append(padding.padded(name, shape)[1])
                    fills.append(self._options.fill.get(name))
                else:
                    axes.append(None)
                    fills.append(None)
        return axes, fills

    def _cut(self, line: Line, captured: Captured, work: Work) -> list[Any]:
        """The results without what padding made of them."""
        outputs = list(captured.outputs)
        for (index, _), found in line.cuts.items():
            for cut in found:
                outputs[index] = self._library.narrow(
                    outputs[index], cut.axis, work.sizes[cut.size]
                )
        return outputs

    # ------------------------------------------------------------------------------ the rest
    def _at(self, reason: str) -> str:
        return f"{reason}; {self.name} is at {_where(self._function)}"

    def _slowly(self, line: Line, work: Work) -> Any:
        """Every call that is not a plain replay."""
        self._hot = ()  # what it changes is looked at again
        if self._state_reason:
            return self._eager(line, work, self._state_reason)
        if line.refused:
            raise InputError(f'{line.reason}, or ask for gradients="eager"')
        if line.reason:
            return self._eager(line, work, line.reason)
        if not line.warmed:
            return self._warm_up(line, work)
        if self._overlaps(line, work):
            return self._eager(line, work, "an argument shares memory with another that is written")
        captured, fresh = line.captured(), False
        try:
            if captured is None or line.name not in self.cache:
                why = "the graph was evicted" if line.captures else "the second call of a key"
                captured, fresh = self._capture(line, work, why), True
            elif captured.epoch != self._epoch or self._pointers_of(work) != captured.pointers:
                captured = self._rebind(line, captured, work)
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
        reason = next(filter(None, map(library.refusal, work.leaves)), "")
        reason = reason or next(filter(None, map(library.refusal, work.statics)), "")
        seen = work.seen
        if not reason and seen is not None:
            reason = next(filter(None, map(library.refusal, seen.arrays)), "")
            reason = reason and f"what the function uses: {reason}"
        if reason:
            line.reason = self._at(reason)
            return self._eager(line, work, line.reason)
        state = self._state(work)
        versions = [*map(library.version, work.leaves)]
        versions_before = [*map(library.version, state)]
        line.eager += 1
        line.reasons["the first call of a key warms up"] += 1
        self._turn()
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
        wrong = next(filter(None, map(library.refusal, tree.leaves)), "")
        if wrong:
            line.reason = self._at(f"of the result: {wrong}")
            return result
        self._note_shapes(line, tree, work)
        line.warmed = True
        return result

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

        def make() -> Any:
            graph, captured = self._make(line, work)
            run = graph.instantiate(upload=self._turn())
            made.append(captured)
            return run

        self.cache.evict(line.name)
        self.cache.get_or_capture(line.name, make)
        captured = made[0]
        line.captures += 1
        line.capture_reasons[why] += 1
        line.captured = weakref.ref(captured)
        return captured

    def _make(self, line: Line, work: Work) -> tuple[Graph, Captured]:
        library = self._library
        axes = self._axes(work)[0] if work.sizes else [None] * len(work.leaves)
        inputs, place = [], 0
        for leaf, axis in zip(work.leaves, axes, strict=True):
            shape = None
            if axis is not None:
                given = [*library.signature(leaf)[0]]
                given[axis], place = self._bucket(work.sizes[place]), place + 1
                shape = given
            inputs.append(library.buffer(leaf, shape))
        args, kwargs = self._replaced(work, inputs)
        stage = library.stager(inputs)
        if work.sizes:
            for buffer in inputs:
                library.fill(buffer, 0)
        before = work.seen
        versions = [*map(library.version, inputs)]
        self._turn()
        graph, result = library.capture(lambda: self._function(*args, **kwargs))
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
        wrong = next(filter(None, map(library.refusal, tree.leaves)), "")
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
        bound = self._bound(work)
        static = [memory for memory, _ in bound.storages]
        clones = [
            not any(m.nbytes and m.holds(library.address(leaf)) for m in static)
            for leaf in tree.leaves
        ]
        captured = Captured(
            owner=graph.owner,
            inputs=inputs,
            stage=stage,
            outputs=tree.leaves,
            tree=tree,
            clones=clones,
            written=tuple(sorted(line.written)),
            bound=bound,
            pointers=self._pointers_of(work),
            epoch=self._epoch,
        )
        captured.simple = (
            self._options.results == "clone"
            and type(result) is library.array_type
            and clones == [True]
            and not (captured.written or work.sizes)
        )
        graph.owner = captured
        if work.sizes:
            self._relate(line, captured, work)
        return graph, captured

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
            return joined(value, [visit(child) for child in found[1]], library)

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
                line.cuts[index, one.axis] = [one]
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

    def _rebind(self, line: Line, captured: Captured, work: Work) -> Captured:
        """Points a graph at static memory that has moved; captures it again if that cannot be.

        Raises what `_capture` raises.
        """
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
            return self._capture(line, work, why)
        line.rebound += bool(moved)
        captured.bound = now
        captured.checked = False
        captured.pointers = self._pointers_of(work)
        captured.epoch = self._epoch
        return captured

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
        axes, fills = self._axes(work)
        self._stage(captured, work)
        for into, axis, fill in zip(captured.inputs, axes, fills, strict=True):
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
                if any(p.address == address for a in node.arguments for p in a.pointers)
            ][-4:]

    # ------------------------------------------------------------------------------ looking
    def statistics(self) -> GraphedStatistics:
        """Counts since it was made, with a line for each key."""
        with self._lock:
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
            replays=sum(each.replays for each in lines),
            rebound=sum(each.rebound for each in lines),
            verified=sum(each.verified for each in lines),
            nested=self._nested,
            quarantined={each.name: each.reason for each in lines if each.reason},
            eager_reasons=dict(reasons),
            capture_reasons=dict(captures),
            keys=lines,
            cache=cache,
        )

    def _decision(self, line: Line, charged: Mapping[Any, int]) -> str:
        if self._state_reason or line.reason:
            return "eager"
        if line.name in charged:
            return "replayed"
        return "evicted" if line.captures else "warmed up"

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
            self._hot = ()
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
