"""`Graphed`: a function that replays a graph of itself.  It knows no library; `Library` does.

What happens to a key (`Line`):

    first call -> WARMED (ran eagerly) -> second call: captured -> CAPTURED: replays
                     │                         │                    └─ evicted: captured again
                     └── refused ──────────────┴── failed ──▶ EAGER, with its reason

A capture that something else broke (another thread), or that had no memory, is tried again at later
calls: after 1, 4, 16 and 64 more of them (`_later`).

A failure costs speed, never answers: whatever cannot be captured runs eagerly and is counted, and
what a capture that fails did to the host is put back first (`kept.py`).  Keys that differ in plain
values alone are folded into one that runs eagerly (`folding.py`).

The way of a call, each step of which only comes if those before it do not answer:

    __call__   a call like one of the last: a whole replay in C (`recheck.py`)
    _keyed     its key (`arguments.py`, `guards.py`), and a replay of the key's graph as it is
    _slowly    the key is new, its graph is not there or must be changed: a warm-up, a graph out of
               the store (`saving.py`), a capture or a rebinding (`slots.py`), a check
               (`checking.py`), or an eager run and its reason
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from statistics import median
from typing import Any, Self

from ostinato import GraphCache
from ostinato.errors import (
    CaptureLimitError,
    ClosedError,
    ContextPoisonedError,
    EagerRunError,
    InputError,
    NotAvailableError,
    OstinatoError,
    VerificationError,
)
from ostinato.interop.reading.arguments import Arguments
from ostinato.interop.reading.checking import due, verified
from ostinato.interop.reading.folding import MOST, Fold, Folds
from ostinato.interop.reading.function import Subject
from ostinato.interop.reading.guards import Guarded, Guards
from ostinato.interop.reading.library import (
    CaptureDisturbed,
    Library,
    NoMemory,
    NotGraphable,
    Options,
    Turns,
)
from ostinato.interop.reading.objects import same
from ostinato.interop.reading.recheck import (
    MISSED,
    MOST_HOT,
    TIMED,
    Checks,
    Hot,
    launch,
    recheck,
)
from ostinato.interop.reading.records import Captured, Line, Work
from ostinato.interop.reading.saving import Saving
from ostinato.interop.reading.slots import Maker
from ostinato.interop.reading.statistics import GraphedKeyStatistics, GraphedStatistics, explained
from ostinato.interop.reading.stored import Stored
from ostinato.interop.reading.trees import Unknown
from ostinato.lowlevel import causes, new_lock
from ostinato.settings import blocking_captures, graphs_enabled

_MOST_LINES = 4096
_MOST_KEPT = 256 << 20
"""Bytes of arguments that are compared after a warm-up, and of what else a function that is checked
uses."""
_MOST_BROKEN, _WAIT = 5, 4
_DISTURBED = "something else than the function broke a capture, which is tried again later"
_BROKEN = (
    "were broken from outside ({}). Look for another thread that calls what CUDA forbids while any "
    "stream captures, such as torch.cuda.synchronize() (wait for a stream or an event instead), or "
    "for an error that the function itself catches"
)
_SHORT = "the device had no memory for a graph, which is tried again later"
_FULL = (
    "had no memory ({}). Free some, or let the graphs hold less (budget=, buckets for sizes that "
    "change)"
)
_numbers = itertools.count()
"""Of keys, in all caches."""
_OFF = "graphs are switched off (OSTINATO_NO_GRAPHS)"
_OVERLAPS = "an argument shares memory with another that is written"
_EVERY = "every call"
_ALL: tuple[Any, ...] = (_EVERY,)
"""The words and the key of a function that runs eagerly whatever it is given."""
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
        unavailable: str = "",
    ) -> None:
        self._function = function
        self._library = library
        self._options = options
        self.cache = cache
        """Where the graphs are kept."""
        self.name = name
        self.unavailable = unavailable
        """Why nothing can be captured on this machine: every call is eager.  Empty if it can."""
        self._owns_cache = owns_cache
        self._lock = new_lock()
        self._lines: dict[Hashable, Line] = {}
        guards = Guards(function, library)
        self._guards = guards if options.guard and not guards.empty else None
        self._subject = Subject(
            function,
            name,
            library,
            options,
            Arguments(function, name, library, options),
            self._guards,
            guards,
            Turns(library),
            cache,
            self._lock,
        )
        self._maker = Maker(self._subject, keeps=stored is not None)
        self._saving = None if stored is None else Saving(self._subject, stored, self._maker)
        # What the guards saw last: arrays, where they are, and which of the layouts seen so far
        # these have.  The epoch is another one after each change.
        self._guarded: list[Any] = []
        self._pointers: list[int] = []
        self._shapes: dict[Hashable, int] = {}
        self._shape = 0
        self._epoch = 0
        self._start_over()
        self._nested = 0
        # Not the other lock: another thread may hold that and wait for the capture that is under
        # way here.
        self._nesting = new_lock()
        self._closed = False
        self._enabled = graphs_enabled()
        self._calls = 0
        self._hot: tuple[Hot, ...] = ()
        """Short ways for calls like the last, of the state as it is now."""
        self._ways: tuple[Callable[[tuple[Any, ...], dict[str, Any]], Any], ...] = ()
        """Their calls."""
        self.__name__ = name
        self.__wrapped__ = function
        self.__doc__ = getattr(function, "__doc__", None)
        self._own_names = frozenset(vars(self)) | {"_own_names"}

    def _start_over(self) -> None:
        """The state of one that was never called."""
        self._lines.clear()
        self._folds = Folds()
        self._stateful, self._state_reason = 0, self.unavailable
        if self.unavailable:
            self._lines[None] = Line(f"{self.name} #{next(_numbers)}", _EVERY)

    def others(self) -> list[tuple[str, Any]]:
        """Attributes that the user gave it, which the function may read as its own."""
        return [(n, v) for n, v in vars(self).items() if n not in self._own_names]

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"graphed {self.name} can be neither copied nor pickled: its graphs belong to this "
            "process and to the tensors of one function; graph the copy of the function itself"
        )

    def __deepcopy__(self, memo: object) -> Any:
        return self.__reduce_ex__(4)

    def __repr__(self) -> str:
        return f"<graphed {self.name}: {len(self._lines)} keys{', closed' * self._closed}>"

    # ------------------------------------------------------------------------------ calls
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for way in self._ways:
            result = way(args, kwargs)
            if result is not MISSED:
                return result
        if self.unavailable:
            return self._only_eager(args, kwargs)
        if self._library.capturing():
            with self._nesting:
                self._nested += 1
            return self._function(*args, **kwargs)
        if self._closed:
            raise ClosedError(f"graphed {self.name} is closed; call the function itself")
        with self._lock:
            result = self._keyed(args, kwargs)
        if result is not EAGER:
            return result
        return self._function(*args, **kwargs)  # without the lock: it may take as long as it likes

    def _only_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call where there is no device: the library cannot even tell modes and streams."""
        if self._closed:
            raise ClosedError(f"graphed {self.name} is closed; call the function itself")
        with self._lock:
            line = self._lines[None]
            line.calls += 1
            self._slowly(line, Work(args, kwargs), None)  # raises if it is a strict one
        return self._function(*args, **kwargs)

    def _keyed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call by its key; EAGER if the caller is to run it."""
        self._calls += 1
        began = 0 if self._calls % TIMED else time.perf_counter_ns()
        try:
            if self._state_reason or not self._enabled:
                # Whatever the key, which may be another one at each call.
                key, work = _ALL, Work(args, kwargs)
            else:
                key, work = self._key(args, kwargs)
        # RecursionError: an argument contains itself.
        except (Unknown, NotGraphable, RecursionError) as error:
            work = Work(args, kwargs)
            key = type(error), str(error)
            self._line(key, work).reason = self._subject.at(str(error))
        line = self._lines.get(key)
        if line is None:
            fold = self._fold(key, work)
            if fold is not None:
                return self._folded(fold, work)
            line = self._line(key, work)
        line.calls += 1
        captured = line.captured()
        if captured is not None and self._ready(line, captured, work):
            done, result = self._replay(line, captured, work)
            if done:
                if began:
                    line.times.append((time.perf_counter_ns() - began) / 1000)
                line.unmatched += 1
                if not line.unmatched & (line.unmatched - 1):
                    self._heat(line, captured, work, key)
                return result
        result = self._slowly(line, work, key)
        self._set_hot()  # drops what recursive calls of the function have set meanwhile
        return result

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Work]:
        """What must be equal for a graph to stand for a call.  Raises Unknown, NotGraphable."""
        library, guards = self._library, self._guards
        modes = library.modes()  # first: it raises in modes in which arrays cannot be inspected
        tokens, work = self._subject.arguments.key(args, kwargs)
        work.tokens = tokens
        used: tuple[Hashable, ...] = ()
        if guards is not None:
            seen = work.seen = guards.read()
            arrays = seen.arrays
            try:
                pointers = [*map(library.address, arrays)]
            except Exception as error:  # an array without memory of its own: a sparse one
                why = self._subject.refusal(arrays) or str(error)
                raise NotGraphable(f"what the function uses: {why}") from None
            if pointers != self._pointers or not same(arrays, self._guarded):
                self._pointers, self._guarded = pointers, arrays
                shape = tuple([(type(a), library.signature(a), library.offset(a)) for a in arrays])
                self._shape = self._shapes.setdefault(shape, len(self._shapes))
                self._epoch += 1
                self._set_hot()
            live = library.live()
            used = seen.tokens, self._shape, live and tuple(map(live, arrays))
        work.epoch = self._epoch
        return (*tokens, *used, modes), work

    def _line(self, key: Hashable, work: Work) -> Line:
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= _MOST_LINES:
                self._forget()
            name = f"{self.name} #{next(_numbers)}"
            words = _EVERY if key is _ALL else self._subject.arguments.words(work)
            line = self._lines[key] = Line(name, words)
        return line

    def _fold(self, key: Any, work: Work) -> Fold | None:
        """Where a new key is folded with others that differ from it in plain values alone; None if
        it is to have a line of its own."""
        if key is _ALL:
            return None
        flat = key if work.seen is None else (*key[:-4], *key[-4], *key[-3:])
        fold = self._folds.find(flat)
        if fold is not None:
            return None if fold.comes_again(flat) else fold
        places, family = self._folds.family(flat, key)
        if len(family) < MOST:
            return None
        lines = [self._lines.get(each) for _, each in family]
        if any(line is not None and line.refused for line in lines):
            family.clear()  # each of them raises
            return None
        names, what = self._places_in_words(places, work)
        fold = Fold(places, flat, Line(f"{self.name} #{next(_numbers)}", names))
        fold.line.reason = self._subject.at(
            f"{what} had another value in each of {MOST} keys, and a graph holds one value: give "
            "it as an array of the device, of which a graph reads what it holds then. A value that "
            "comes again gets a graph"
        )
        for (each, other), line in zip(family, lines, strict=True):
            if line is None:
                fold.meet(each)
            elif line.captured() is None and not line.reason:
                del self._lines[other]
                fold.meet(each)
                fold.line.absorb(line)
        self._folds.add(fold)
        self._lines[fold] = fold.line
        return fold

    def _places_in_words(self, places: Sequence[int], work: Work) -> tuple[str, str]:
        """A key as it stands in tables, whose tokens at some places change; and what these are
        of."""
        subject, first = self._subject, len(work.tokens)
        owners = subject.arguments.owners(work) if places[0] < first else []
        inside = self._guards.names() if self._guards is not None and places[-1] >= first else []
        arguments = {*[owners[place] for place in places if place < first]}
        used = [*dict.fromkeys([inside[place - first] for place in places if place >= first])]
        words = [subject.arguments.words(work, arguments), *[f"{name}=…" for name in used[:MOST]]]
        found = [*sorted(arguments), *[subject.located(used)] * bool(used)]
        return ", ".join(filter(None, words)), ", ".join(found)

    def _folded(self, fold: Fold, work: Work) -> Any:
        """A call of a fold, which the caller is to run."""
        line = fold.line
        line.calls += 1
        if fold.endless:
            return self._eager(line, work, line.reason)
        line.eager += 1  # as the first calls of keys: those of strict ones, too
        line.reasons[line.reason] += 1
        return EAGER

    def _forget(self) -> None:
        """Drops the older half of the keys without a graph."""
        idle = [key for key, line in [*self._lines.items()] if line.captured() is None]
        for key in idle[: max(1, len(idle) // 2)]:
            del self._lines[key]
            if isinstance(key, Fold):
                self._folds.drop(key)

    def _ready(self, line: Line, captured: Captured, work: Work) -> bool:
        """Whether a graph can be replayed as it is, unless it was evicted."""
        return (
            captured.epoch == work.epoch
            and (not captured.attached or all(each.fits for each in captured.attached))
            and not line.reason
            and not self._state_reason
            and (not work.statics or self._subject.pointers(work) == captured.pointers)
            and (not work.sizes or _fits(line, work))
            and not due(self._options.verify, line, captured, work)
            and not self._overlaps(line, work)
        )

    # ------------------------------------------------------------------------------ replays
    def _replay(
        self, line: Line, captured: Captured, work: Work, *, poisoned: bool = False
    ) -> tuple[bool, Any]:
        """Replays a graph for a call.  (False, None) if it was evicted: nothing ran then.

        `poisoned`: with padding that no answer may depend on."""
        stream = self._subject.turns.take()
        if work.sizes:
            self._stage(captured, work, poisoned)
        leaves = None if work.sizes else work.leaves
        made = launch(self._library, self.cache, line, captured, leaves, stream)
        if made is None:
            return False, None
        line.replays += not poisoned
        return True, self._results(line, captured, work, made)

    def _stage(self, captured: Captured, work: Work, poisoned: bool) -> None:
        """Copies inputs of which some are shorter than their memory."""
        library = self._library
        for into, leaf, dynamic in zip(captured.inputs, work.leaves, work.axes, strict=True):
            if dynamic is None:
                library.copy(into, leaf)
                continue
            axis, size = dynamic.axis, dynamic.size
            front = library.narrow(into, axis, size)
            library.copy(front, leaf)
            if dynamic.fill is not None:
                library.fill(library.rest(into, axis, size), dynamic.fill)
            elif poisoned:
                library.poison(library.rest(into, axis, size), front, axis)

    def _results(self, line: Line, captured: Captured, work: Work, made: Sequence[Any]) -> Any:
        """What a call gives after its replay.  `made`: the copies that the graph has made."""
        library = self._library
        for each in captured.attached:
            if getattr(each.array, each.name) is not each.after:
                setattr(each.array, each.name, each.after)
        written = captured.written
        overwritten = self._subject.overwritten(captured, work) if written else ()
        for index in written:
            if index in overwritten:
                continue
            changed, dynamic = captured.inputs[index], work.axes[index]
            if dynamic is not None:
                changed = library.narrow(changed, dynamic.axis, dynamic.size)
            library.copy(work.leaves[index], changed)
        given: Sequence[Any] = ()
        if captured.tree.given:
            given = self._subject.arguments.static_objects(work)
        if not work.sizes:
            return captured.give(made, given)
        outputs = [*captured.outputs]
        for (index, axis), cut in line.cuts.items():
            outputs[index] = library.narrow(outputs[index], axis, work.sizes[cut.size])
        return captured.give(made, given, outputs)

    def _giver(self, captured: Captured) -> Callable[..., Any]:
        """See `Captured.give`."""
        library, build = self._library, captured.tree.build
        if self._options.results == "static":
            return self._static_giver(captured)
        moved = () if captured.moves is None else captured.moves.outputs
        if moved and len(moved) == len(captured.outputs):
            return build
        # What is given of each output: a copy, by the graph (None) or by the library; or an array
        # over static memory, which is another one each time, since its shape may be changed in
        # place.  Static arrays stay themselves.
        kept = {id(array) for _, array in captured.bound.storages}
        hows: list[Callable[[Any], Any] | None] = []
        for index, (output, copied) in enumerate(
            zip(captured.outputs, captured.clones, strict=True)
        ):
            copy = None if index in moved else library.clone
            hows.append(copy if copied else _itself if id(output) in kept else library.alias)

        def give(
            made: Sequence[Any],
            given: Sequence[Any] = (),
            outputs: Sequence[Any] = captured.outputs,
        ) -> Any:
            copies = iter(made)
            pairs = zip(outputs, hows, strict=True)
            return build([next(copies) if how is None else how(out) for out, how in pairs], given)

        return give

    def _static_giver(self, captured: Captured) -> Callable[..., Any]:
        """The outputs themselves, but copies of those that lie in the graph's inputs: the next call
        may be given them as other arguments, and its copies would overwrite each other."""
        library, build = self._library, captured.tree.build
        memory = [*map(library.storage, captured.inputs)]
        passed = [any(m.holds(library.address(o)) for m in memory) for o in captured.outputs]
        if not any(passed):
            return lambda made, given=(), outputs=captured.outputs: build(outputs, given)
        hows = [library.clone if each else _itself for each in passed]

        def give(
            made: Sequence[Any],
            given: Sequence[Any] = (),
            outputs: Sequence[Any] = captured.outputs,
        ) -> Any:
            return build([how(out) for how, out in zip(hows, outputs, strict=True)], given)

        return give

    # --- the short way
    def _heat(self, line: Line, captured: Captured, work: Work, key: Any) -> None:
        """Looks for a short way for calls like this one, which was just replayed."""
        stream = self._subject.turns.last
        assert stream is not None
        seen = self._guarded, self._pointers, key[-1]
        hot = recheck(self._subject, work, line, captured, stream, seen, self._note)
        if hot is not None:
            kept = [one for one in self._hot if one.line is not line][: MOST_HOT - 1]
            self._set_hot(hot, *kept)

    def _set_hot(self, *hot: Hot) -> None:
        """Replaces the short ways by these."""
        for one in self._hot:
            if one not in hot:
                one.end()
        self._hot = hot
        self._ways = tuple([one.way.call for one in hot])

    def _note(self, checks: Checks) -> None:
        """Notes what else must be as it is for a short way to stand for a call."""

    # ------------------------------------------------------------------------------ the rest
    def _slowly(self, line: Line, work: Work, key: Any) -> Any:
        """Every call that is not a plain replay."""
        self._set_hot()  # no plain replay until this call is over: it may change what they rely on
        if not self._enabled:  # no error of a strict one: it was asked for
            line.reason = _OFF
            line.eager += 1
            line.reasons[_OFF] += 1
            return EAGER
        if self._state_reason:
            return self._eager(line, work, self._state_reason)
        if line.refused:
            raise InputError(f'{line.reason}, or ask for gradients="eager"')
        if line.reason:
            return self._eager(line, work, line.reason)
        if line.wait:
            line.wait -= 1
            return self._eager(line, work, line.later)
        if self._saving is not None and not line.text:
            self._saving.name(line, work, key)
        there = line.captured() is not None and line.name in self.cache
        if not (line.warmed or there or self._restore(line, work)):
            return self._warm_up(line, work)
        if self._overlaps(line, work):
            return self._eager(line, work, _OVERLAPS)
        captured = self._graph_or_why(line, work)
        if captured is None:
            return self._warm_up(line, work)
        if isinstance(captured, str):
            return self._eager(line, work, captured)
        if self._overlaps(line, work):  # known since the capture, which showed what is written
            captured.detach()
            return self._eager(line, work, _OVERLAPS)
        if work.sizes and not _fits(line, work):
            return self._learn(line, captured, work)
        if due(self._options.verify, line, captured, work):
            return self._verify(line, captured, work)
        done, result = self._replay(line, captured, work)
        if not done:
            captured.detach()
            return self._eager(line, work, "the graph was evicted while it was to be replayed")
        if not (captured.compared or work.sizes):
            captured.compared = True
            now = dict(enumerate(captured.inputs))
            found = self._uncounted(line.written, work.leaves, now)
            for index in found:
                self._library.copy(work.leaves[index], captured.inputs[index])
            line.written |= found
            captured.written = tuple(sorted({*captured.written, *found}))
        return result

    def _eager(self, line: Line, work: Work, reason: str) -> Any:
        if self._options.strict:
            raise EagerRunError(f"graphed {self.name} would run eagerly: {reason}")
        line.eager += 1
        line.reasons[reason] += 1
        return EAGER

    def _warm_up(self, line: Line, work: Work) -> Any:
        """The first call of a key: it runs eagerly, beside the caller's stream."""
        subject, library, options = self._subject, self._library, self._options
        reason, seen = subject.refusal([*work.leaves, *work.statics]), work.seen
        if not reason and seen is not None:
            reason = subject.refusal(seen.arrays)
            reason = reason and f"what the function uses: {reason}"
        reason = reason or subject.hidden(work)
        if reason:
            line.reason = subject.at(reason)
            return self._eager(line, work, line.reason)
        state = work.state
        places = self._places(work.leaves + work.statics), self._places(state)
        versions = [*map(library.version, work.leaves)]
        versions_before = [*map(library.version, state)]
        # A check writes again what a replay has written, and a file takes it for a constant, if it
        # is not known.
        asked = options.verify is not None or self._saving is not None
        try:
            kept = self._kept(work.leaves)
            kept_state = self._kept(state) if asked else {}
        except Exception as error:
            if not self._is_out_of_memory(error):
                raise
            return self._eager(line, work, self._without_memory(line, str(error)))
        line.eager += 1
        line.reasons["the first call of a key warms up"] += 1
        subject.turns.take()
        seeded = library.seeding()
        result = library.run_beside(lambda: self._function(*work.args, **work.kwargs))
        if library.wants_gradient(result):
            line.reason = subject.at(
                "the call needs gradients, which a replay does not give; call it inside "
                "torch.no_grad() or torch.inference_mode()"
            )
            if options.gradients == "refuse":
                line.refused = True
                raise InputError(f'{line.reason}, or ask for gradients="eager"')
            return result
        after = [*map(library.version, work.leaves)]
        line.written |= {i for i, (a, b) in enumerate(zip(versions, after, strict=True)) if a != b}
        line.written |= self._uncounted(line.written, work.leaves, kept)
        line.state |= {
            i
            for i, (array, before) in enumerate(zip(state, versions_before, strict=True))
            if before is None or library.version(array) != before
        }
        line.state |= self._uncounted(line.state, state, kept_state)
        if (
            subject.arguments.changed(work, work.tokens)
            or self._places(work.leaves + work.statics) != places[0]
            or subject.hidden(work)
        ):
            line.reason = subject.at(
                "the function changes a container or an object that it is given (another item, "
                "another attribute, other memory of a tensor), and a replay runs no Python"
            )
            return result
        changed = subject.changed_state(work)
        if not changed and self._places(state) != places[1]:
            changed = "the memory of a tensor"
        if not changed:
            changed = seeded(subject.code.named)
            changed += subject.seeded() if changed else ""
        self._stateful = self._stateful + 1 if changed else 0
        if changed:
            if self._stateful > 1:
                self._state_reason = subject.at(
                    f"the function changes Python state that it uses itself ({changed}), and "
                    "a replay runs no Python"
                )
            return result
        tree = self._maker.taken_apart(result, work)
        wrong = tree if isinstance(tree, str) else self._maker.lost(tree, work)
        if isinstance(tree, str) or wrong:
            line.reason = subject.at(wrong)
            return result
        self._maker.note_shapes(line, tree, work)
        line.warmed = True
        return result

    def _places(self, arrays: Sequence[Any]) -> list[int]:
        return [*map(self._library.address, arrays)]

    def _kept(self, arrays: Sequence[Any]) -> dict[int, Any]:
        """Copies of arrays, by their places, as far as they are not large: the small ones first."""
        library, left, kept = self._library, _MOST_KEPT, {}
        sizes = [library.storage(array).nbytes for array in arrays]
        for index in sorted(range(len(arrays)), key=sizes.__getitem__):
            left -= sizes[index]
            if left >= 0 and library.version(arrays[index]) is not None:
                kept[index] = library.clone(arrays[index])
        return kept

    def _uncounted(
        self, counted: Collection[int], arrays: Sequence[Any], like: Mapping[int, Any]
    ) -> set[int]:
        """Which arrays are not like others any more though no write was counted: kernels of the
        user's own write them, or operations that the library does not see."""
        return {
            index
            for index, other in like.items()
            if index not in counted and self._library.difference(arrays[index], other, None)
        }

    def _overlaps(self, line: Line, work: Work) -> bool:
        """Whether an argument that is copied shares memory with something that the function writes:
        the copy would not see that."""
        if not (line.written or line.state):
            return False
        memory = self._library.storage
        copied = [*map(memory, work.leaves)]
        if line.written and any(a.overlaps(b) for a, b in itertools.combinations(copied, 2)):
            return True
        if not copied:
            return False
        state = work.state
        # If an argument is written, whatever else the function reads may be in its memory.
        others = state if line.written else [state[i] for i in line.state if i < len(state)]
        return any(a.overlaps(b) for b in map(memory, others) for a in copied)

    # --- graphs
    def _restore(self, line: Line, work: Work) -> bool:
        """Takes a key's graph from the store, if there is one that fits."""
        captured = None if self._saving is None else self._saving.restore(line, work)
        if captured is None:
            return False
        self._attach(captured, line)
        line.restored += 1
        return True

    def _graph_or_why(self, line: Line, work: Work) -> Captured | str | None:
        """As `_graph`; why the call runs eagerly if no graph can be made."""
        try:
            return self._graph(line, work)
        except ContextPoisonedError:
            raise
        except CaptureLimitError as error:
            return f"the cache refused the capture: {error}"
        except Exception as error:
            short = self._is_out_of_memory(error)
            if short:
                why = str(error)
            elif isinstance(error, CaptureDisturbed):
                return self._later(line, _DISTURBED, _BROKEN.format(error))
            elif isinstance(error, NotGraphable):
                line.reason = str(error)
            elif isinstance(error, OstinatoError):
                why = f"no graph could be made ({type(error).__name__}: {error})"
                line.reason = self._subject.at(why)
            else:
                raise
        # The error is gone, and with it what its frames held.
        if short:
            return self._without_memory(line, why)
        self._library.trim(short=False)
        return line.reason

    def _without_memory(self, line: Line, error: str) -> str:
        """Makes room after the device had no memory for a graph; why the call runs eagerly."""
        self._make_room()
        self._library.trim(short=True)
        return self._later(line, _SHORT, _FULL.format(error))

    def _is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, NoMemory) or any(map(self._library.out_of_memory, causes(error)))

    def _make_room(self) -> None:
        """Evicts that half of this function's graphs that was not used for longest."""
        names, kept = {line.name for line in self._lines.values()}, self.cache.keys()
        own = [key for key in kept if key in names]
        for name in own[: (len(own) + 1) // 2]:
            self.cache.evict(name)

    def _graph(self, line: Line, work: Work) -> Captured | None:
        """The graph of a key, captured or bound anew where that must be; None if the key must be
        warmed up first.  Raises NotGraphable, and the errors of the library below."""
        captured = line.captured()
        if captured is None or line.name not in self.cache:
            why = "the graph was evicted" if line.captures else "the second call of a key"
        elif not all(each.fits for each in captured.attached):
            why = "a gradient is another one than it was at the capture"
        elif captured.epoch == work.epoch and self._subject.pointers(work) == captured.pointers:
            return captured
        else:
            why = self._maker.rebind(line, captured, work)
            if not why:
                return captured
            if not line.warmed:
                self.cache.evict(line.name)
                return None
        return self._capture(line, work, why)

    def _capture(self, line: Line, work: Work, why: str) -> Captured:
        """Captures a key.  Raises NotGraphable, and the errors of the library below."""
        made: list[Captured] = []
        if not work.sizes:
            self._maker.mover()  # before memory is measured

        def make() -> Any:
            graph, captured = self._maker.make(line, work, kept)
            run = graph.instantiate(upload=self._subject.turns.take())
            made.append(captured)
            return run

        self.cache.evict(line.name)
        kept = self._subject.keep(work)
        try:
            self.cache.get_or_capture(line.name, make)
        except BaseException as error:
            kept.put_back()  # the call runs eagerly next
            left = self._subject.changed_state(work)
            if (
                left
                and isinstance(error, Exception)
                and not isinstance(error, ContextPoisonedError)
            ):
                raise NotGraphable(
                    self._subject.at(
                        f"{error}; and before it failed, the capture changed Python state that "
                        f"could not be put back ({left})"
                    )
                ) from error
            raise
        line.captures += 1
        line.broken_again = 0
        line.capture_reasons[why] += 1
        self._attach(made[0], line)
        return made[0]

    def _later(self, line: Line, why: str, advice: str) -> str:
        """Notes that a capture failed, but not because of the function: another one is made after
        some calls, or none if that has happened too often in a row.  Why the call runs eagerly."""
        line.broken += 1
        line.broken_again += 1
        line.wait, line.later = _WAIT ** (line.broken_again - 1) - 1, why
        if line.broken_again >= _MOST_BROKEN:
            line.reason = self._subject.at(
                f"{line.broken_again} captures {advice}; call invalidate() to capture again"
            )
        return line.reason or why

    def _attach(self, captured: Captured, line: Line) -> None:
        """Makes a captured or restored graph the one of a key."""
        captured.give = self._giver(captured)
        line.captured = weakref.ref(captured)

    def _learn(self, line: Line, captured: Captured, work: Work) -> Any:
        """An eager run that tells which axes of the results are dynamic."""
        reason = "where the size shows in the results is learned from an eager run"
        self._eager(line, work, reason)
        captured.detach()
        result = self._function(*work.args, **work.kwargs)
        try:
            tree = self._subject.arguments.tree(result, work)
            self._maker.note_shapes(line, tree, work)
            self._maker.relate(line, captured.tree, work)
        except (Unknown, NotGraphable) as error:
            line.reason = self._subject.at(str(error))
        return result

    def _verify(self, line: Line, captured: Captured, work: Work) -> Any:
        """A replay and an eager run, whose answer counts."""
        replayed, eager, wrong = verified(
            self._subject,
            line,
            captured,
            work,
            lambda poisoned: self._replay(line, captured, work, poisoned=poisoned),
        )
        if not replayed:
            return self._eager(line, work, "the graph was evicted while it was to be checked")
        line.eager += 1
        line.reasons["a check runs the call eagerly too"] += 1
        if wrong:
            line.reason = self._subject.at(f"a check failed: {wrong}")
            self.cache.evict(line.name)
            if self._options.strict:
                raise VerificationError(f"graphed {self.name}, {line.words}: {line.reason}")
        return eager

    def save(self, *, check: bool = True) -> dict[str, str]:
        """Writes the graphs that are kept now to the store; why some were not written, by key.

        Each is captured once more, which proves which words of it are addresses, launched, and
        checked in another process (`graphfile.save`).  Nobody may use its memory meanwhile.  Raises
        InputError without a store, NotAvailableError without a device, ContextPoisonedError.
        """
        if self.unavailable:
            raise NotAvailableError(f"graphed {self.name} has no graph to save: {self.unavailable}")
        if self._saving is None:
            raise InputError(f"graphed {self.name} has no store; give it one (store=folder)")
        with self._lock:
            return self._saving.save(self._lines.values(), check=check)

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
                    broken=line.broken,
                )
                for line in self._lines.values()
            )
        return GraphedStatistics.of(
            lines,
            nested=self._nested,
            cache=cache,
            not_restored={} if self._saving is None else self._saving.reasons,
        )

    def _decision(self, line: Line, charged: Mapping[Any, int]) -> str:
        if self._state_reason or line.reason:
            return "eager"
        if line.name in charged:
            return "replayed"
        return "evicted" if line.captures or line.restored else "warmed up"

    def explain(self) -> str:
        """A table: each key, what is done with its calls, and why.

        Nobody sees what a captured function puts on CUDA's legacy default stream: it ran at the
        capture and is missing from each replay.  OSTINATO_BLOCKING_CAPTURES=1 in the environment
        makes such a function run eagerly, and the reason here names its line.
        """
        statistics = self.statistics()
        text = explained(statistics.keys)
        if statistics.captures and not blocking_captures():
            text += f"\nnot seen: {_UNSEEN}"
        return text

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
            self._set_hot()
            self._start_over()
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


_UNSEEN = (
    "work that a captured function put on the legacy default stream, which no replay repeats "
    "(OSTINATO_BLOCKING_CAPTURES=1 finds it)"
)


def _itself(array: Any) -> Any:
    return array


def _fits(line: Line, work: Work) -> bool:
    """Whether it is known what to cut from the results for the sizes of a call."""
    return all(d is None or d.place in line.learned or d.size == d.capacity for d in work.dynamic)
