"""`Graphed`: a function that replays a graph of itself, for any library (`Library`).

It makes a call's key from the arguments and from what the function uses besides them, and an
`Engine` decides what is done with calls of that key.  What cannot be captured runs eagerly and is
counted; host state that a failed capture changed is put back first (`kept.py`).  Keys that differ
in plain values alone are folded into one that runs eagerly (`folding.py`).

The path of a call; each step is taken only if the one before it does not make the call:

    __call__   a call like one of the last: a whole replay in C (`recheck.py`)
    _keyed     its key (`arguments.py`, `guards.py`), whose `Line` the engine has
    Engine     a replay (`_Work.bind`), a warm-up (`warm`), a capture (`build`, `slots.py`) or a
               graph from the store (`restored`, `saving.py`), a graph that is bound to memory
               that has moved (`fits`), a check (`checking.py`), or an eager run and its reason

A key whose calls wait for the device has a line for each of its chains (`_waiting`, `chains.py`).
"""

from __future__ import annotations

import itertools
import operator
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NoReturn, cast

from ostinato import GraphCache, GraphExec, MemoryRange, Stream
from ostinato.errors import (
    ClosedError,
    ContextPoisonedError,
    GroupError,
    InputError,
    NotAvailableError,
    NotHeldError,
    OstinatoError,
    OutOfMemoryError,
    StateLostError,
)
from ostinato.interop.reading.arguments import Arguments
from ostinato.interop.reading.chains import Chain, ChainReplay, Diverged, Raised
from ostinato.interop.reading.checking import CallEffects
from ostinato.interop.reading.folding import MOST, Fold, Folds
from ostinato.interop.reading.function import Subject
from ostinato.interop.reading.guards import Guarded, Guards
from ostinato.interop.reading.kept import HostSnapshot
from ostinato.interop.reading.library import (
    CaptureDisturbed,
    GraphedOptions,
    Library,
    NoMemory,
    NotGraphable,
    Turns,
    WaitsForDevice,
)
from ostinato.interop.reading.recheck import (
    EAGER,
    MISSED,
    MOST_HOT,
    TIMED,
    Checks,
    ShortWay,
    checked,
    eager,
    recheck,
)
from ostinato.interop.reading.records import TRIALS, Captured, Line, ReadCall, Waiting
from ostinato.interop.reading.saving import Saving
from ostinato.interop.reading.slots import Maker
from ostinato.interop.reading.statistics import GraphedStatistics, explained
from ostinato.interop.reading.stored import Stored
from ostinato.interop.reading.trees import Unknown, code_in
from ostinato.lowlevel import Change, Closeable, Counts, Engine, Work, causes, check_runs
from ostinato.step import Action, CheckReport, Decision, Reason

_MOST_LINES = 4096
_MOST_KEPT = 256 << 20
"""The most bytes of arrays that are copied before a warm-up, to be compared after it."""
_BROKEN = (
    "a capture was broken from outside ({}). Look for another thread that calls what CUDA forbids "
    "while any stream captures, such as torch.cuda.synchronize() (wait for a stream or an event "
    "instead), or for an error that the function itself catches; call forget() to capture again"
)
_FULL = (
    "a capture had no memory ({}). Free some, or let the graphs hold less (budget=, buckets for "
    "sizes that change); call forget() to capture again"
)
_MOST_TWINS = 3
"""The most further pairs of graphs that a key has for calls while backwards are pending."""
_MOST_CHAINS = 8
"""The most chains of a key, each for other values that the host sees."""
_STEPS = "it has steps that Python makes"
_STRANGE = 16
"""A key is given up after more calls than this whose values no chain has, plus four for each call
that a chain served."""
_numbers = itertools.count()
"""Numbers of keys, over all caches."""
_OFF = "graphs are switched off (OSTINATO_NO_GRAPHS)"
_EVERY = "every call"
_ALL: tuple[Any, ...] = (_EVERY,)
"""The key, and before it its text in tables, of a function that runs eagerly in every call."""


class Graphed(Guarded, Closeable):
    """A function whose calls replay a graph.  Made by `graphed` of a library's interop.

    Called like the function.  Thread-safe: calls run one after the other, on one stream or several.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        library: Library,
        options: GraphedOptions,
        cache: GraphCache,
        *,
        name: str,
        owns_cache: bool,
        stored: Stored | None = None,
        unavailable: str = "",
    ) -> None:
        self._function = function
        self._original: Callable[..., Any] = function
        """The callable for a key that was given up: for a module, the module with its hooks."""
        self._library = library
        self._options = options
        self.cache = cache
        """The cache that holds the graphs."""
        self.name = name
        self.unavailable = unavailable
        """The reason why nothing can be captured here, and every call is eager; or empty."""
        self._owns_cache = owns_cache
        self._engine = Engine(cache, None, timed=False)
        self._lock = self._engine.lock
        self._lines: dict[Hashable, Line] = {}
        guards = Guards(function, library)
        self._guards = guards if options.guard and not guards.empty else None
        self._subject = Subject(
            function,
            name,
            library,
            options,
            Arguments(function, name, library, options, guards),
            self._guards,
            guards,
            Turns(library),
            cache,
            self._lock,
        )
        self._maker = Maker(self._subject, keeps=stored is not None)
        self._saving = None if stored is None else Saving(self._subject, stored, self._maker)
        # The last reading of the guards: arrays, their addresses, and the number of their layout
        # among those so far.  Each change increments the epoch.
        self._guarded: list[Any] = []
        self._pointers: list[int] = []
        self._shapes: dict[Hashable, int] = {}
        self._shape = 0
        self._epoch = 0
        self._closed = False
        self._start_over()
        self._calls = 0
        self._stepping = False
        """True if replays call methods of optimisers and the like in Python."""
        self._diverges = False
        """True once there is a chain whose replays may diverge."""
        self._hot: tuple[ShortWay, ...] = ()
        """The short ways that are valid now, for calls like the last ones."""
        self._ways: tuple[Callable[[tuple[Any, ...], dict[str, Any]], Any], ...] = ()
        """The `call` methods of the short ways."""
        self.__name__ = name
        self.__wrapped__ = function
        self.__doc__ = getattr(function, "__doc__", None)
        self._own_names = frozenset(vars(self)) | {"_own_names"}

    def _start_over(self) -> None:
        """Resets the state to that of a function that was never called."""
        self._lines.clear()
        self._folds = Folds()
        self._stateful = 0
        self._engine.broken = None
        if self.unavailable and not self._closed:
            self._engine.broken = Reason.NOT_GRAPHABLE, self.unavailable
            self._line(_ALL, ReadCall((), {}))

    def others(self) -> list[tuple[str, Any]]:
        """Returns the attributes that the user has set, which the function may read as its own."""
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
            try:
                result = way(args, kwargs)
            except OstinatoError as error:
                self._refused(error)
                break
            except Raised as raised:
                result = raised
            if isinstance(result, Raised):
                _raise(result)
            if result is EAGER:
                if len(self._ways) > 1:  # the call may change what the other ways rely on
                    self._keep_only(way)
                return self._original(*args, **kwargs)
            if result is not MISSED:
                return result
        return self._long(*args, **kwargs)

    def _long(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a call that no short way serves."""
        # Without a device the library has neither modes nor streams.
        if not self.unavailable and self._library.capturing():
            return self._function(*args, **kwargs)
        if self._closed:
            raise ClosedError(f"graphed {self.name} is closed; call the function itself")
        with self._lock:
            result = self._keyed(args, kwargs)
        if result is not EAGER:
            return result
        return self._function(*args, **kwargs)  # without the lock: its run may be long

    def _keep_only(self, way: Any) -> None:
        """Ends all short ways but one."""
        with self._lock:
            self._set_hot(*[one for one in self._hot if one.way.call == way])

    def _refused(self, error: OstinatoError) -> None:
        """Ends the short ways after a replay by one was refused, so that the call goes by its key.
        Raises the error if some work may have run."""
        if isinstance(error, ContextPoisonedError) or not self._engine.settings.plain:
            raise error
        with self._lock:
            self._set_hot()
            if isinstance(error, StateLostError):
                self._engine.lose(error)
                raise error

    def _keyed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call by its key; returns EAGER if the caller must run it."""
        self._calls += 1
        began = 0 if self._calls % TIMED else time.perf_counter_ns()
        line: Line | None
        try:
            if self._engine.broken or not self._options.graphs:
                # One key for all calls: real keys may be new at each call.
                key, given = _ALL, ReadCall(args, kwargs)
            else:
                key, given = self._key(args, kwargs)
        # RecursionError: an argument contains itself.
        except (Unknown, NotGraphable, RecursionError) as error:
            given = ReadCall(args, kwargs)
            key = type(error), str(error)
            line = self._line(key, given)
            self._give_up(line, str(error))
        else:
            line = self._lines.get(key)
        if line is None:
            # Adam counts its steps on the CPU.
            if self._refusal(given) and self._step_in_python():
                self._calls -= 1
                return self._keyed(args, kwargs)
            fold = self._fold(key, given)
            if fold is not None:
                return self._folded(fold, given)
            line = self._line(key, given)
            if self._saving is not None and key is not _ALL:
                self._saving.name(line, given, key)
        if line.refused:
            self._engine.entered(line)[1].calls += 1
            raise InputError(f'{line.refused}, or ask for gradients="eager"')
        if line.warmed and line.waits is None and self._stepping and not line.reason:
            if line.differentiated:
                self._give_up(
                    line, f"{_STEPS}, and its result needs gradients: return loss.detach()"
                )
            elif line.ranks is not None:  # each rank decides by itself which chains it keeps
                self._give_up(
                    line,
                    f"{_STEPS}, and it communicates between ranks: give the optimiser "
                    "capturable=True, or step its scheduler outside of the function",
                )
            else:
                line.waits = Waiting(_STEPS)
        if line.waits is not None and not line.reason:
            try:
                return self._waiting(line, line.waits, given, key)
            except Raised as raised:
                failed = raised
            _raise(failed)
        pending: tuple[Reason, str] | None = None
        if line.differentiated:
            line, pending = self._free(line, key)
        work = self._decided(line, given, pending)
        decision, made = work.decision, work.made
        if line.together and line.ranks is not None and made is None and not work.ran:
            # A replay would have compared nothing: the other ranks may be in one.
            line.ranks.agree("runs it eagerly")
            line.together = not line.reason
        if decision is None:
            return EAGER
        if work.slow and self._hot:
            self._set_hot()  # drops the ways that recursive calls have set meanwhile
        alike = made is not None and not work.slow
        if decision.action is Action.EAGER and decision.reason is not Reason.WARMING_UP:
            alike = key is _ALL or (bool(line.reason) and given.keyed)
        if alike:
            line.unmatched += 1
            if not line.unmatched & (line.unmatched - 1):
                self._heat(line, work, key, work.words(decision) if made is None else "")
        if began and not work.slow:
            line.times.append((time.perf_counter_ns() - began) / 1e9)
        return work.result

    def _decided(
        self, line: Line, given: ReadCall, unmet: tuple[Reason, str] | None = None
    ) -> _Work:
        """Makes a call by its line; eagerly for a reason `unmet`."""
        work = _Work()  # without a frame of Python: each call by its key comes here
        work.door, work.call, work.given, work.options = self, line, given, self._options
        work.unmet = unmet
        captured = line.captured()
        if (  # there is no graph, or the last decision was for another state
            captured is None
            or unmet is not None
            or captured.epoch != given.epoch
            or (captured.attached and not all(each.fits for each in captured.attached))
            or (given.statics and self._subject.pointers(given) != captured.pointers)
            or (given.sizes and not _fits(line, given))
            or ((line.written or line.state) and work.overlaps())
        ):
            work.begin()
            line.decided_at = None
        del captured  # the graph owns it, and may be dropped now
        try:
            work.decision = self._engine.call(work)
        except ClosedError:
            if work.ran or not self.cache.closed:
                raise
            self._engine.broken = Reason.NOT_GRAPHABLE, "the cache of its graphs is closed"
            if self._options.strict:
                raise
            return work
        if unmet is not None:  # the decision is for this call alone
            line.decided_at = None
        captured, made = work.captured, work.made
        if captured is not None and made is not None:
            if captured.chain is not None:
                try:
                    work.finish()
                except Diverged:
                    self._engine.entered(line)[1].replays -= 1
                    raise
            if captured.attached or captured.written or captured.tree.given or given.sizes:
                work.result = self._results(work, captured, made)
            else:  # its only effect is a result of the copies alone
                work.result = captured.give(made)
            if not (captured.compared or given.sizes):
                work.compare(captured)
        return work

    def _free(self, line: Line, key: Hashable) -> tuple[Line, tuple[Reason, str] | None]:
        """Returns the line of a key of which no replay waits for its backward; or a reason to run
        the call eagerly."""
        for each in (line, *line.twins):
            captured = each.captured()
            if captured is None or captured.backward is None or not captured.backward.pending:
                return each, None
        if len(line.twins) >= _MOST_TWINS:
            return line, (Reason.OVERLAP, f"{_MOST_TWINS + 1} replays wait for their backward")
        twin = self._line_beside(line, key)
        line.twins.append(twin)
        return twin, None

    def _line_beside(self, line: Line, key: Hashable, parent: Line | None = None) -> Line:
        """Makes a line with a graph of its own for a key that was warmed up."""
        made = Line(f"{self.name} #{next(_numbers)}", words=line.words, parent=parent)
        made.warmed, made.differentiated = True, line.differentiated
        made.tokens, made.shapes = line.tokens, line.shapes
        made.written, made.state = set(line.written), set(line.state)
        self._lines[key, made] = made
        return made

    # --- calls that wait for the device
    def _waiting(self, line: Line, waiting: Waiting, given: ReadCall, key: Hashable) -> Any:
        """Makes a call that waits: by the chain that has its values, by a new chain, or eagerly.
        Returns EAGER if the caller must run it."""
        strict = self._options.strict
        if len(waiting.eager) < TRIALS and not strict:
            return self._timed(line, waiting, given)
        values: tuple[Hashable, ...] = ()
        where, timed = "", not (waiting.weighed or strict)
        for each in [*waiting.chains]:
            captured = each.captured()
            if captured is None or captured.chain is None:
                continue
            if captured.chain.values[: len(values)] != values:
                continue
            began = time.perf_counter()
            try:
                work = self._decided(each, given)
            except Diverged as other:
                values, where = other.values, other.line
                self._engine.entered(each)[1].calls -= 1
                continue
            if each is not waiting.chains[0]:
                waiting.chains.remove(each)
                waiting.chains.insert(0, each)
            if work.made is None:
                return work.result
            if timed:
                self._library.stream().synchronize()
                why = waiting.weigh(time.perf_counter() - began, captured.chain.words)
                if why:
                    self._unchain(line, waiting, why)
            elif not work.slow:
                each.unmatched += 1
                if not each.unmatched & (each.unmatched - 1):
                    self._heat(each, work, key, "")
            return work.result
        return self._new_chain(line, waiting, given, key, where)

    def _timed(self, line: Line, waiting: Waiting, given: ReadCall) -> Any:
        """Runs a call eagerly, and times it with the wait for the device at its end."""
        self._set_hot()  # the call may change what the ways rely on
        _, counts = self._engine.entered(line)
        counts.calls += 1
        counts.ran_eagerly(0, Reason.WAITS.value)
        stream = self._library.stream()
        stream.synchronize()
        began = time.perf_counter()
        result = self._function(*given.args, **given.kwargs)
        stream.synchronize()
        waiting.eager.append(time.perf_counter() - began)
        return result

    def _unchain(self, line: Line, waiting: Waiting, why: str) -> None:
        """Gives up a key with chains, and drops these."""
        self._give_up(line, why if waiting.why in why else f"{waiting.why}; {why}")
        counts = self._engine.entered(line)[1]
        self._set_hot()
        for key, each in [*self._lines.items()]:
            if each.parent is line:
                counts.add(self._engine.entered(each)[1])
                self.cache.evict(each.name)
                del self._lines[key]
        waiting.chains.clear()

    def _new_chain(
        self, line: Line, waiting: Waiting, given: ReadCall, key: Hashable, where: str
    ) -> Any:
        """Makes a call whose values no chain has: builds a chain, or runs the call eagerly."""
        waiting.strange += bool(where)
        chain = next((each for each in waiting.chains if each.captured() is None), None)
        if chain is None and len(waiting.chains) >= _MOST_CHAINS:
            why = f"the value at {where} is another one in most calls"
            self._set_hot()  # counts its calls
            served = sum(self._engine.entered(each)[1].replays for each in waiting.chains)
            if waiting.strange > _STRANGE + 4 * served:
                self._unchain(line, waiting, why)
            return self._decided(line, given, (Reason.NOT_GRAPHABLE, why)).result
        if chain is None:
            chain = self._line_beside(line, key, parent=line)
            waiting.chains.insert(0, chain)
        work = self._decided(chain, given)
        if work.ran:  # False while the engine waits with another build, for lack of memory
            why = waiting.note_build(chain)
            if why:
                self._unchain(line, waiting, why)
        return work.result

    def _step_in_python(self, *, waits: bool = False) -> bool:
        """Lets replays call the methods of the optimisers, schedulers and scalers that the function
        uses, or only of those that wait for the device.  Returns False if there are none of which
        that can be done."""
        guards, library = self._guards, self._library
        if guards is None or library.chain is None or self._saving is not None:
            return False
        found = [library.step_in_python(e, guards.named, waits) for e in guards.watched()]
        if not any(found):
            return False
        self._stepping = True
        guards.start_over()
        self._set_hot()
        for line in self._lines.values():  # no later call has one of these keys
            self.cache.evict(line.name)
        return True

    def _key(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], ReadCall]:
        """Returns the key of a call, and the call taken apart.  Raises Unknown, NotGraphable."""
        library, guards = self._library, self._guards
        modes = library.modes()  # first: it raises in modes in which arrays cannot be inspected
        tokens, given = self._subject.arguments.key(args, kwargs)
        used: tuple[Hashable, ...] = ()
        if guards is not None:
            guards.given = [*code_in(tokens)] if len(tokens) > len(given.leaves) else ()
            known, seen = guards.known, guards.read()
            if guards.known != known:  # of static arguments more is read from now on
                tokens, given = self._subject.arguments.key(args, kwargs)
            given.seen, arrays = seen, seen.arrays
            try:
                pointers = [*map(library.address, arrays)]
            except Exception as error:  # an array without memory of its own: a sparse one
                why = self._subject.refusal(arrays) or str(error)
                raise NotGraphable(f"what the function uses: {why}") from None
            if pointers != self._pointers or not all(map(operator.is_, arrays, self._guarded)):
                self._pointers, self._guarded = pointers, arrays
                shape = tuple([(type(a), library.signature(a), library.offset(a)) for a in arrays])
                self._shape = self._shapes.setdefault(shape, len(self._shapes))
                self._epoch += 1
                self._set_hot()
            live = library.live()
            used = seen.tokens, self._shape, live and tuple(map(live, arrays))
        given.tokens, given.keyed, given.epoch = tokens, True, self._epoch
        return (*tokens, *used, modes), given

    def _line(self, key: Hashable, given: ReadCall) -> Line:
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= _MOST_LINES:
                self._forget()
            name = f"{self.name} #{next(_numbers)}"
            words = _EVERY if key is _ALL else self._subject.arguments.words(given)
            line = self._lines[key] = Line(name, words=words)
        return line

    def _give_up(self, line: Line, why: str) -> str:
        """Makes a key run eagerly from here on; returns the reason, with the function's place."""
        entry, _ = self._engine.entered(line)
        reason = self._subject.at(why)
        if entry.reason is None:
            self._engine.give_up(entry, Reason.NOT_GRAPHABLE, reason, strict=self._options.strict)
        return reason

    def _fold(self, key: Any, given: ReadCall) -> Fold | None:
        """Returns the fold of a new key with others that differ from it in plain values alone; None
        if the key gets a line of its own."""
        if key is _ALL:
            return None
        flat = key if given.seen is None else (*key[:-4], *key[-4], *key[-3:])
        fold = self._folds.find(flat)
        if fold is not None:
            return None if fold.comes_again(flat) else fold
        places, family = self._folds.family(flat, key)
        if len(family) < MOST or self._stepped(places, given):
            return None
        lines = [self._lines.get(each) for _, each in family]
        if any(line is not None and line.refused for line in lines):
            return None  # each of these keys raises
        names, what = self._places_in_words(places, given)
        fold = Fold(places, flat, Line(f"{self.name} #{next(_numbers)}", words=names))
        self._give_up(
            fold.line,
            f"{what} had another value in each of {MOST} keys, and a graph holds one value: give "
            "it as an array of the device, of which a graph reads what it holds then. A value that "
            "comes again gets a graph",
        )
        for (each, other), line in zip(family, lines, strict=True):
            if line is None:
                fold.meet(each)
            elif line.captured() is None and not (line.reason or line.waits):
                del self._lines[other]
                fold.meet(each)
                self._engine.entered(fold.line)[1].add(self._engine.entered(line)[1])
        self._folds.add(fold)
        self._lines[fold] = fold.line
        return fold

    def _stepped(self, places: Sequence[int], given: ReadCall) -> bool:
        """True if keys differ only in the values of objects whose steps Python makes from now on:
        a learning rate."""
        if self._guards is None or places[0] < len(given.tokens):
            return False
        states = self._guards.naming().states
        if not all(states[place - len(given.tokens)] for place in places):
            return False
        if not self._step_in_python():
            return False
        idle = [
            (k, each) for k, each in self._lines.items() if not (each.captured() or each.reason)
        ]
        for key, line in idle[1:]:  # one line counts the calls of all
            self._engine.entered(idle[0][1])[1].add(self._engine.entered(line)[1])
            del self._lines[key]
        return True

    def _places_in_words(self, places: Sequence[int], given: ReadCall) -> tuple[str, str]:
        """Formats a key for tables, without its tokens at some places, and names the values of
        these."""
        subject, first = self._subject, len(given.tokens)
        owners = subject.arguments.owners(given) if places[0] < first else []
        inside = (
            self._guards.naming().names if self._guards is not None and places[-1] >= first else []
        )
        arguments = {*[owners[place] for place in places if place < first]}
        used = [*dict.fromkeys([inside[place - first] for place in places if place >= first])]
        words = [subject.arguments.words(given, arguments), *[f"{name}=…" for name in used[:MOST]]]
        found = [*sorted(arguments), *[subject.located(used)] * bool(used)]
        return ", ".join(filter(None, words)), ", ".join(found)

    def _folded(self, fold: Fold, given: ReadCall) -> Any:
        """Counts a call of a fold; returns EAGER, since the caller must run it."""
        line = fold.line
        if fold.endless:
            self._decided(line, given)
        else:  # like first calls of keys, which run eagerly even if `strict`
            _, counts = self._engine.entered(line)
            counts.calls += 1
            counts.ran_eagerly(0, line.reason)
        return EAGER

    def _forget(self) -> None:
        """Drops the older half of the keys without a graph."""
        idle = [k for k, line in [*self._lines.items()] if not (line.captured() or line.waits)]
        for key in idle[: max(1, len(idle) // 2)]:
            del self._lines[key]
            if isinstance(key, Fold):
                self._folds.drop(key)

    # ------------------------------------------------------------------------------ replays
    def _results(self, work: _Work, captured: Captured, made: Sequence[Any]) -> Any:
        """Returns the result of a call after its replay.  `made`: outputs that the graph copied."""
        library, given = self._library, work.given
        for each in captured.attached:
            if getattr(each.array, each.name) is not each.after:
                setattr(each.array, each.name, each.after)
        written = captured.written
        overwritten = self._subject.overwritten(captured, given) if written else ()
        for index in written:
            if index in overwritten:
                continue
            changed, dynamic = captured.inputs[index], given.axes[index]
            if dynamic is not None:
                changed = library.narrow(changed, dynamic.axis, dynamic.size)
            library.copy(given.leaves[index], changed)
        placed: Sequence[Any] = ()
        if captured.tree.given:
            placed = [*work.fresh, *self._subject.arguments.static_objects(given)]
        if not given.sizes:
            return captured.give(made, placed)
        outputs = [*captured.outputs]
        for (index, axis), cut in work.call.cuts.items():
            outputs[index] = library.narrow(outputs[index], axis, given.sizes[cut.size])
        return captured.give(made, placed, outputs)

    def _giver(self, captured: Captured) -> Callable[..., Any]:
        """Returns the function for `Captured.give`."""
        library, outputs = self._library, captured.outputs
        build: Callable[..., Any] = captured.tree.build
        if captured.backward is not None:
            plain, attach = build, captured.backward.attach
            build = lambda made, given=(): plain(attach(made), given)  # noqa: E731
        # For each output the result has the copy that the graph made (None), or what a function
        # makes of the output.
        hows: list[Callable[[Any], Any] | None] = []
        if self._options.results == "static":
            # The outputs themselves, but copies of those in the graph's inputs: the next call may
            # take these as other arguments, whose copies would overwrite each other.  Nor must the
            # caller write what a chain has made once.  Once there is a chain that may diverge, all
            # are copies: a graph made after it may have its outputs where the chain works, and an
            # argument there would be overwritten before the chain diverges.
            constants = captured.chain.constants if captured.chain is not None else ()
            memory = [*map(library.storage, [*captured.inputs, *constants])]
            for output, copied in zip(outputs, captured.clones, strict=True):
                place = library.address(output)
                within = any(m.holds(place) for m in memory)
                hows.append(library.clone if within or (copied and self._diverges) else _itself)
        else:
            moved = captured.moved
            if moved and len(moved) == len(outputs):
                return build
            # Static arrays stay themselves.  An array over static memory is a new one each time,
            # since its shape may be changed in place.
            kept = {id(array) for _, array in captured.bound.storages}
            for index, (output, copied) in enumerate(zip(outputs, captured.clones, strict=True)):
                copy = None if index in moved else library.clone
                hows.append(copy if copied else _itself if id(output) in kept else library.alias)
        if all(how is _itself for how in hows):
            return lambda made, given=(), outputs=outputs: build(outputs, given)

        def give(
            made: Sequence[Any], given: Sequence[Any] = (), outputs: Sequence[Any] = outputs
        ) -> Any:
            copies = iter(made)
            pairs = zip(outputs, hows, strict=True)
            return build([next(copies) if how is None else how(out) for out, how in pairs], given)

        return give

    # --- the short way
    def _heat(self, line: Line, work: _Work, key: Any, reason: str) -> None:
        """Makes a short way, if there is one, for calls like this one, which was just replayed or
        which runs eagerly for a lasting reason."""
        hot: ShortWay | None = None
        if key is _ALL:
            hot = eager(line, None, reason, self._alone)
        else:
            subject, given = self._subject, work.given
            stream, captured = subject.turns.last, work.captured
            seen = self._guarded, self._pointers, key[-1]
            if reason:
                made = None
                with suppress(Exception):  # raised for an array that no graph takes
                    made = checked(subject, given, (), seen, self._note)
                hot = None if made is None else eager(line, made.match, reason, self._alone)
            elif stream is not None and captured is not None:
                hot = recheck(subject, given, line, captured, stream, seen, self._note)
        if hot is not None:
            kept = [one for one in self._hot if one.line is not line][: MOST_HOT - 1]
            self._set_hot(hot, *kept)

    def _alone(self) -> bool:
        """True if all calls so far had one key, and a call of another one would not raise an
        error."""
        options = self._options
        if len(self._lines) > 1 or options.strict:
            return False
        return options.gradients != "refuse" or self._library.live() is None

    def _set_hot(self, *hot: ShortWay) -> None:
        """Replaces the short ways by these."""
        for one in self._hot:
            if one not in hot:
                one.end()
        self._hot = hot
        self._ways = tuple([one.way.call for one in hot])

    def _note(self, checks: Checks) -> None:
        """Notes further state that must be unchanged for a short way; for subclasses."""

    # ------------------------------------------------------------------------------ the rest
    def _refusal(self, given: ReadCall) -> str:
        """Describes why a call cannot be a graph, as far as that shows before it runs, or returns
        ""."""
        subject, seen = self._subject, given.seen
        reason = subject.refusal([*given.leaves, *given.statics])
        if not reason and seen is not None:
            reason = subject.refusal(seen.arrays)
            reason = reason and f"what the function uses: {reason}"
        return reason or subject.hidden(given)

    def _places(self, arrays: Sequence[Any]) -> list[Hashable]:
        library = self._library
        return [*map(library.address, arrays), *map(library.signature, arrays)]

    def _kept(self, arrays: Sequence[Any]) -> dict[int, Any]:
        """Copies arrays, the small ones first, up to `_MOST_KEPT` bytes; returns them by index."""
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
        """Returns the indices of arrays that have changed without a counted write: by kernels of
        the user's own, or by operations that the library does not count."""
        return {
            index
            for index, other in like.items()
            if index not in counted and self._library.difference(arrays[index], other, None)
        }

    def _is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, NoMemory) or any(map(self._library.out_of_memory, causes(error)))

    # --- graphs
    def _take_back(self, kept: HostSnapshot, given: ReadCall, error: BaseException) -> None:
        """Puts back the Python state that a run before an error has changed, since the call runs
        eagerly next.  Raises NotGraphable if some cannot be put back."""
        kept.put_back()
        left = self._subject.changed_state(given)
        if left and isinstance(error, Exception) and not isinstance(error, ContextPoisonedError):
            raise self._subject.not_graphable(
                f"{error}; and before it failed, the capture changed Python state that could "
                f"not be put back ({left})"
            ) from error

    def _attach(self, captured: Captured, line: Line) -> None:
        """Makes a captured or restored graph the graph of a key."""
        chain = captured.chain
        self._diverges |= chain is not None and any(wait.compared for wait in chain.waits)
        captured.give = self._giver(captured)
        if chain is not None and chain.at_end is not None:
            captured.give = partial(_then, captured.give, chain.at_end)
        line.captured = weakref.ref(captured)

    def save(self, *, check: bool = True) -> dict[str, str]:
        """Writes the graphs that are kept now to the store; returns why some were not written, by
        key.

        Each graph is captured once more, which proves which words of it are addresses, launched,
        and checked in another process (`graphfile.save`).  Nothing else may use its memory
        meanwhile.  Raises InputError without a store, NotAvailableError without a device,
        ContextPoisonedError.
        """
        if self.unavailable:
            raise NotAvailableError(f"graphed {self.name} has no graph to save: {self.unavailable}")
        if self._saving is None:
            raise InputError(f"graphed {self.name} has no store; give it one (store=folder)")
        with self._lock:
            return self._saving.save(self._lines.values(), check=check)

    # ------------------------------------------------------------------------------ looking
    def statistics(self) -> GraphedStatistics:
        """Returns counts since it was made, with an element for each key."""
        with self._lock:
            for hot in self._hot:
                hot.count()
            broken = "" if self._engine.broken is None else self._engine.broken[1]
            if not self._options.graphs:
                broken = _OFF
            closed = self.cache.closed  # a closed cache takes no new keys
            lines = [one for one in self._lines.values() if one.entry is not None or not closed]
            found = self._engine.statistics(lines, lambda call: cast(Line, call).words)
        if broken:
            found["keys"] = tuple(
                [replace(line, decision="eager", reason=broken) for line in found["keys"]]
            )
            found["quarantined"] = {line.key: broken for line in found["keys"]}
        return GraphedStatistics(
            **found,
            cache=self.cache.statistics(),
            not_restored={} if self._saving is None else self._saving.reasons,
        )

    def explain(self) -> str:
        """Returns a table: each key, what is done with its calls, and why.

        Work that a captured function submits to CUDA's legacy default stream is not noticed if the
        process has other Python threads, or by CuPy: it runs at the capture and is missing from
        each replay.  OSTINATO_BLOCKING_CAPTURES=1 in the environment makes such a function run
        eagerly, and the reason here names its line.
        """
        statistics = self.statistics()
        text = explained(statistics.keys)
        if statistics.captures and self._library.unseen:
            text += f"\nnot seen: {_UNSEEN}"
        return text

    def inspect(self) -> str:
        """Returns the graphs that are kept, each as a table of its nodes."""
        parts = []
        with self._lock:
            for line in self._lines.values():
                with suppress(NotHeldError), self.cache.hold(line.name) as run:
                    captured = line.captured()
                    chain = None if captured is None else captured.chain
                    graphs = [] if chain is None else chain.graphs
                    text = "\n".join([str(graph) for graph in [*graphs, run.graph]])
                    parts.append(f"{line.name}: {line.words}\n{text}")
        return "\n\n".join(parts) or f"graphed {self.name} keeps no graph yet"

    def forget(self) -> int:
        """Drops every graph, and forgets why keys ran eagerly; returns how many were dropped.

        The next call of each key captures again.  For changes that no guard reads.
        """
        with self._lock:
            names = [line.name for line in self._lines.values()]
            self._engine.keys.clear()
            self._set_hot()
            self._start_over()
            return sum(self.cache.evict(name) for name in names)

    # ------------------------------------------------------------------------------ lifetime
    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Frees the graphs and their memory.  Later calls raise ClosedError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.forget()
            self._guarded = []
            self._guards = None
        if self._owns_cache:
            self.cache.close()


_UNSEEN = (
    "work that a captured function put on the legacy default stream, which no replay repeats "
    "(OSTINATO_BLOCKING_CAPTURES=1 finds it)"
)


class _Work(Work):
    """A call of a function."""

    call: Line
    door: Graphed
    given: ReadCall
    decision: Decision | None = None
    """The engine's decision; None if the cache is closed, and the caller must run it."""
    captured: Captured | None = None
    """The record of the graph that was replayed."""
    made: Sequence[Any] | None = None
    """The outputs that the graph copied; None if nothing was replayed, or if `result` is set."""
    result: Any = EAGER
    slow = False
    """True if more than a replay was done for the call."""
    fresh: Sequence[Any] = ()
    """The values in the result that the host read in a replay."""
    ran = False
    """True if the function was run for the call."""
    done = False
    unmet: tuple[Reason, str] | None = None
    """The reason why the call runs eagerly."""
    _replay: ChainReplay | None = None
    """The replay of a chain under way."""
    _built = False
    _learns: Captured | None = None
    _why = ""

    @cached_property
    def stream(self) -> Stream:  # type: ignore[override]  # a replay notes its own (`bind`)
        return self.door._library.stream()

    @property
    def padded(self) -> frozenset[Hashable]:
        return self.given.padded

    def unfit(self) -> tuple[Reason, str] | None:
        door, line, given, entry = self.door, self.call, self.given, self.call.entry
        assert entry is not None
        if self.unmet is not None:
            return self.unmet
        there = entry.graph is not None
        if not there and not line.warmed and entry.reason is None:
            why = door._refusal(given)
            if why:
                return Reason.NOT_GRAPHABLE, door._give_up(line, why)
        if (line.written or line.state) and self.overlaps():
            return Reason.OVERLAP, ""
        if there and given.sizes and not _fits(line, given):
            self._learns = line.captured()
            return Reason.LEARNING, ""
        return None

    # --- running
    def begin(self, *, inside: bool = False) -> None:
        self.slow = True
        # Short ways end: this call may change what they rely on.
        if self.door._hot:
            self.door._set_hot()

    def run(self, *, padded: bool = False) -> None:
        self.made = None
        self._put_back()
        captured = self.call.captured() if self._built else None
        if captured is not None:
            captured.detach()
        if self._learns is None:
            return
        # The run also shows which axes of its result are dynamic.
        door, line, given, maker = self.door, self.call, self.given, self.door._maker
        self.result = door._function(*given.args, **given.kwargs)
        try:
            tree = door._subject.arguments.tree(self.result, given)
            maker.note_shapes(line, tree, given)
            maker.relate(line, self._learns.tree, given)
        except (Unknown, NotGraphable) as error:
            door._give_up(line, str(error))

    def overlaps(self) -> bool:
        """True if a copied argument shares memory with an array that the function writes: the copy
        would not show the write."""
        line, memory, state = self.call, self.door._library.storage, self.given.state
        copied = [*map(memory, self.given.leaves)]
        if not copied:
            return False
        # If an argument is written, any other array that the function reads may be in its memory.
        others = state if line.written else [state[i] for i in line.state if i < len(state)]
        pairs = itertools.combinations(copied, 2) if line.written else ()
        more = itertools.product(copied, map(memory, others))
        return any(itertools.starmap(MemoryRange.overlaps, itertools.chain(pairs, more)))

    def warm(self) -> None:
        """Runs the first call of a key eagerly, on a stream beside the caller's, and learns what it
        writes.  Nothing runs if there is no memory for copies of the arguments."""
        self.ran = True
        door, line, given = self.door, self.call, self.given
        subject, library, options, maker = door._subject, door._library, door._options, door._maker
        state = given.state
        places = door._places(given.leaves + given.statics), door._places(state)
        versions = [*map(library.version, given.leaves)]
        versions_before = [*map(library.version, state)]
        modes = library.modes()
        # Writes must be known: a check puts back what is written, and files hold all else as
        # constants.
        asked = options.verify != "off" or door._saving is not None
        try:
            kept = door._kept(given.leaves)
            kept_state = door._kept(state) if asked else {}
        except Exception as error:
            if not door._is_out_of_memory(error):
                raise
            assert line.entry is not None
            door._engine.without_memory(self, line.entry, str(error))
            self._why = Reason.NO_MEMORY.value
            return
        subject.turns.take()
        seeded, drawn = library.seeding(), subject.drawing()
        heard = library.heard(door, door.name)
        run = partial(door._function, *given.args, **given.kwargs)
        replayed = options.gradients == "replay"
        if replayed and library.live() is not None:
            # On the caller's stream: what autograd notes of it must be right in the backward.
            result = self.result = run()
        else:
            result = self.result = library.run_beside(run)
        line.ranks = heard()
        if line.ranks is not None:
            line.ranks.agree("runs it for the first time")
        needed = library.wants_gradient(result)
        line.differentiated = needed and replayed
        if line.differentiated and line.ranks is not None:
            door._give_up(
                line,
                "its result needs gradients, and it communicates between ranks, which would have "
                "to agree on each backward too: graph the whole training step, and return "
                "loss.detach()",
            )
            return
        if needed and not replayed:
            why = door._give_up(
                line,
                "the call needs gradients, which a replay does not give; call it inside "
                "torch.no_grad() or torch.inference_mode()",
            )
            if options.gradients == "refuse":
                line.refused = why
                raise InputError(f'{why}, or ask for gradients="eager"')
            return
        after = [*map(library.version, given.leaves)]
        line.written |= {i for i, (a, b) in enumerate(zip(versions, after, strict=True)) if a != b}
        line.written |= door._uncounted(line.written, given.leaves, kept)
        line.state |= maker.changed(state, versions_before)
        line.state |= door._uncounted(line.state, state, kept_state)
        if (
            subject.arguments.changed(given, given.tokens)
            or door._places(given.leaves + given.statics) != places[0]
            or subject.hidden(given)
        ):
            door._give_up(
                line,
                "the function changes a container or an object that it is given (another item, "
                "another attribute, other memory of a tensor), and a replay runs no Python",
            )
            return
        changed = subject.changed_state(given)
        if not changed and door._places(state) != places[1]:
            changed = "the memory of a tensor, or its shape"
        if not changed:
            changed = seeded(subject.code.named)
            changed += subject.seeded() if changed else ""
        changed = changed or drawn(False) or _other_modes(library, modes)
        door._stateful = door._stateful + 1 if changed else 0
        if changed:
            if door._stateful > 1 and not door._step_in_python():
                why = f"the function changes Python state that it uses itself ({changed}), and "
                why = subject.at(why + "a replay runs no Python")
                door._engine.broken = Reason.NOT_GRAPHABLE, why
            return
        tree = maker.taken_apart(result, given)
        if line.differentiated and not isinstance(tree, str):  # a replay's results have gradients
            tree = replace(tree, leaves=[*map(library.without_gradient, tree.leaves)])
        wrong = tree if isinstance(tree, str) else maker.lost(tree, given)
        if isinstance(tree, str) or wrong:
            if maker.reads_back(result, given):
                line.warmed = True
            else:
                door._give_up(line, wrong)
            return
        maker.note_shapes(line, tree, given)
        line.warmed = True
        if not given.sizes:
            with suppress(OutOfMemoryError):  # the capture makes it then
                _ = maker.mover  # now, since memory is measured around a capture

    def warm_ups(self, counts: Counts) -> int:
        return int(self.call.warmed)

    @property
    def submitted(self) -> int:
        return 0  # the library does not count what it submits

    def words(self, decision: Decision) -> str:
        told = decision.reason in (Reason.NOT_GRAPHABLE, Reason.BUILD_FAILED, Reason.MISMATCH)
        return self._why or (decision.detail if told else decision.reason.value)

    # --- graphs
    def build(self) -> GraphExec:
        self.ran = True
        line, subject = self.call, self.door._subject
        if line.parent is not None:
            return self._build_chain(line.parent)
        if line.ranks is not None:
            line.together = False
            made = line.ranks.together(self._build, self._messages, subject.not_graphable)
            line.together = True
            return made
        made = self._build()
        if self._messages(made):
            made.close()
            raise subject.not_graphable(
                "it communicates with other processes in a way that is not counted (send, recv), "
                "so that ranks cannot agree on a graph of it"
            )
        return made

    def _messages(self, made: GraphExec) -> str:
        return "\n".join(self.door._library.messages(made.graph))

    def _build(self) -> GraphExec:
        door, line, given, subject = self.door, self.call, self.given, self.door._subject
        kept = subject.keep(given)
        try:
            graph, captured = door._maker.make(line, given, kept)
            made = graph.instantiate(upload=subject.turns.take())
        except BaseException as error:
            door._take_back(kept, given, error)
            raise
        assert line.entry is not None
        again = line.entry.captures or line.entry.installed
        self._note_capture(
            captured, "the graph was evicted" if again else "the second call of a key"
        )
        self._built = True
        return made

    def _build_chain(self, parent: Line) -> GraphExec:
        """Runs the call for real, as the chain of its line.  Raises Raised, NotGraphable."""
        door, line, given, maker = self.door, self.call, self.given, self.door._maker
        kept = door._subject.keep(given)
        random = door._library.save_random()
        try:
            run = maker.run_chain(given, kept, random)
        except Raised:
            raise
        except BaseException as error:
            door._library.restore_random(random)
            door._take_back(kept, given, error)
            raise
        self.done = True
        try:
            executable, captured = maker.chained(line, given, run)
        except BaseException as error:
            line.unbound = str(error)
            self.result = maker.whole(run, given)
            raise
        assert captured.chain is not None
        self._note_capture(captured, "the call waits for the device")
        line.words = f"{parent.words}: {captured.chain.words}"
        self.compare(captured)
        self.fresh = run.fresh
        copies = [door._library.clone(captured.outputs[index]) for index in run.moved]
        self.result = door._results(self, captured, copies)
        return executable

    def _note_capture(self, captured: Captured, why: str) -> None:
        """Makes what was captured the graph of the key.  `why`: the reason of the capture, unless
        the last graph could not be bound."""
        line = self.call
        assert line.counts is not None
        line.counts.capture_reasons[line.unbound or why] += 1
        line.unbound = ""
        self.door._attach(captured, line)

    def compare(self, captured: Captured) -> None:
        """Finds, after the first replay of a graph, the arguments that it writes without a counted
        write, and copies these back."""
        door, line, leaves = self.door, self.call, self.given.leaves
        captured.compared = True
        found = door._uncounted(line.written, leaves, dict(enumerate(captured.inputs)))
        for index in found:
            door._library.copy(leaves[index], captured.inputs[index])
        line.written |= found
        captured.written = tuple(sorted({*captured.written, *found}))

    def failed(self, error: Exception) -> tuple[Reason, str] | None:
        door = self.door
        if isinstance(error, Raised | GroupError):
            return None
        if (
            isinstance(error, WaitsForDevice)
            and door._library.chain is not None
            and not self.given.sizes
            and not self.call.differentiated  # a chain gives no gradients
        ):
            if self.call.parent is None and not door._step_in_python(waits=True):
                self.call.waits = Waiting(str(error))
            return Reason.WAITS, str(error)
        short = door._is_out_of_memory(error)
        if short or isinstance(error, CaptureDisturbed):
            reason, text = (Reason.NO_MEMORY, _FULL) if short else (Reason.DISTURBED, _BROKEN)
            return reason, door._subject.at(text.format(error))
        if isinstance(error, NotGraphable):
            return Reason.NOT_GRAPHABLE, str(error)
        if isinstance(error, OstinatoError):
            why = f"no graph could be made ({type(error).__name__}: {error})"
            return Reason.BUILD_FAILED, door._subject.at(why)
        return None

    def fits(self) -> bool:
        door, line, given, captured = self.door, self.call, self.given, self.call.captured()
        assert line.entry is not None and line.entry.graph is not None
        if captured is None:
            return False
        if not all(each.fits for each in captured.attached):
            line.unbound = "a gradient is another one than it was at the capture"
            return False
        if captured.epoch == given.epoch and door._subject.pointers(given) == captured.pointers:
            return True
        used = {*map(id, given.state)} if captured.attached else set()
        if not all(id(each.array) in used for each in captured.attached):
            line.unbound = "an array to which it gives a gradient is another object now"
            return False
        if captured.backward is not None or (captured.chain is not None and captured.attached):
            line.unbound = "memory that it uses has moved"
            return False
        line.unbound = door._maker.rebind(line, captured, given)
        line.entry.graph.checked.clear()
        return not line.unbound

    def trim(self, *, short: bool) -> None:
        self.door._library.trim(short=short)

    def restored(self) -> GraphExec | None:
        saving = self.door._saving
        found = None if saving is None else saving.restored(self.call, self.given)
        if found is None:
            return None
        self.door._attach(found[1], self.call)
        return found[0]

    def not_restored(self, why: str) -> None:
        assert self.door._saving is not None
        self.door._saving.note_refused(why)

    # --- replays
    def bind(self, *, poisoned: bool = False) -> Change:
        door, given = self.door, self.given
        library, turns = door._library, door._subject.turns
        self.stream = library.stream()
        if self.stream is not turns.last:
            turns.take()
        captured = self.captured = self.call.captured()
        assert captured is not None
        moves = captured.moves
        if captured.backward is not None:
            captured.backward.begin(given.leaves, door._lock, turns.take)
        if given.sizes:
            self._stage(captured, poisoned)
        made = self.made = [*itertools.starmap(library.new, captured.recipes)]
        if moves is None and not given.sizes:
            captured.stage([*given.leaves, *made])
        if captured.chain is not None:
            self._run_chain(captured.chain)
        if moves is None:
            return None
        leaves = given.leaves if moves.inputs else ()
        address = library.address
        return moves.change(moves.packed(*map(address, leaves), *map(address, made)))

    def _stage(self, captured: Captured, poisoned: bool) -> None:
        """Copies the arrays into the inputs, of which some are longer than the arrays."""
        library, given = self.door._library, self.given
        for into, leaf, dynamic in zip(captured.inputs, given.leaves, given.axes, strict=True):
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

    def _run_chain(self, chain: Chain) -> None:
        """Runs everything before the last graph.  Raises Diverged and NotLaunched, with all memory
        as before the call."""
        try:
            self._replay = chain.start(self.door._library, self.given.state, self.stream)
        except StateLostError as lost:
            self.door._engine.lose(lost)
            raise

    def finish(self) -> None:
        """Waits for the numbers inside of the last graph, after its launch.  Raises Diverged, with
        all memory as before the call."""
        assert self._replay is not None, "the chain was run"
        self._replay.finish()
        self.fresh = self._replay.fresh

    def _put_back(self) -> None:
        replay, self._replay = self._replay, None
        if replay is not None:  # its last graph was refused
            try:
                replay.refused("the last of them")
            except StateLostError as lost:
                self.door._engine.lose(lost)
                raise

    def check(self, executable: GraphExec, launch: Callable[[Change], object]) -> CheckReport:
        door, line = self.door, self.call
        self.ran = True
        self.begin()

        def replay(turn: int) -> Any:
            launch(self.bind(poisoned=turn == 2))
            assert self.captured is not None and self.made is not None
            if self.captured.chain is not None:
                self.finish()
            return door._results(self, self.captured, self.made)

        def eager() -> Any:
            self.result = door._function(*self.given.args, **self.given.kwargs)
            return self.result

        captured = line.captured()
        assert captured is not None and line.counts is not None
        memory = CallEffects(door._subject, line, captured, self.given)
        report = check_runs(memory, eager, replay, once=True)
        found = report.finding
        if found is None:
            line.counts.ran_eagerly(0, "a check runs the call eagerly too")
        else:
            node = memory.first_node(door._maker, executable, partial(self._stage, poisoned=False))
            report = replace(report, finding=replace(found, what=found.what + node))
        self.made = self._replay = None
        return report


def _raise(raised: Raised) -> NoReturn:
    """Raises the error of a function, with the context of an eager call.  Nothing of this module
    holds it: the frames of its traceback hold arrays and autograd's nodes."""
    error = raised.error
    del raised.error
    raised.__cause__ = raised.__context__ = None
    try:
        raise error
    finally:
        del error


def _other_modes(library: Library, before: Hashable) -> str:
    """Returns a text if the modes of a library are no longer those before a run; else ""."""
    try:
        now = library.modes()
    except NotGraphable as error:
        return str(error)
    return "" if now == before else "the modes of the library, such as its default type"


def _then(give: Callable[..., Any], at_end: Callable[[], object], *args: Any) -> Any:
    result = give(*args)
    at_end()
    return result


def _itself(array: Any) -> Any:
    return array


def _fits(line: Line, given: ReadCall) -> bool:
    """True if the cuts of the results are known for the sizes of a call."""
    padded = [d.place for d in given.dynamic if d is not None and d.size != d.capacity]
    return line.learned.issuperset(padded)
