"""A graphed function with its options, guards and cache, shared by the parts of a `Graphed`."""

from __future__ import annotations

import pickle
import random
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato import GraphCache
from ostinato.interop.reading.arguments import Arguments
from ostinato.interop.reading.guards import Guards
from ostinato.interop.reading.kept import HostSnapshot
from ostinato.interop.reading.library import GraphedOptions, Library, NotGraphable, Turns
from ostinato.interop.reading.places import code_of, lines_of
from ostinato.interop.reading.records import Captured, ReadCall
from ostinato.interop.reading.trees import Unknown

_WORD = re.compile(r"[^\W\d]\w*")
_MOST_NAMED = 3
_DRAWING = frozenset([*dir(random), *dir(np.random)])
"""Names of the functions that draw from the generators of Python and NumPy, and others."""


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A function, the way it is graphed, and the cache of its graphs."""

    function: Callable[..., Any]
    name: str
    library: Library
    options: GraphedOptions
    arguments: Arguments
    guards: Guards | None
    """The guards; None if there is nothing to guard, or if guards are switched off."""
    code: Guards
    """The guards of the function even if guards are switched off: the names in its code."""
    turns: Turns
    cache: GraphCache
    lock: Any

    def at(self, reason: str) -> str:
        """Returns a reason with the place where the function is defined."""
        code = code_of(self.function)
        where = f"{code.co_filename}:{code.co_firstlineno}" if code else "an unknown place"
        return f"{reason}; {self.name} is at {where}"

    def not_graphable(self, reason: str) -> NotGraphable:
        """Returns the error for a call that cannot be a graph."""
        return NotGraphable(self.at(reason))

    def refusal(self, arrays: Iterable[Any]) -> str:
        """Describes why one of some arrays cannot be part of a graph; empty if all can."""
        return next(filter(None, map(self.library.refusal, arrays)), "")

    def hidden(self, call: ReadCall) -> str:
        """Describes an attribute of a call's arrays that a graph would not read, or returns "".

        The graph has a copy of each argument, without the attributes that the user has set."""
        hidden, names = self.library.hidden, self.code.named
        found = [hidden(array, names, copied=True) for array in call.leaves]
        found += [hidden(array, names) for array in call.state]
        return next(filter(None, found), "")

    def overwritten(self, captured: Captured, call: ReadCall) -> set[int]:
        """Returns the indices of the arguments of a call that are static results of the call
        before: a replay overwrites them, whatever the function does to its arguments."""
        if self.options.results != "static":
            return set()
        library = self.library
        memory = [*map(library.storage, captured.outputs)]
        places = [*map(library.address, call.leaves)]
        return {i for i, place in enumerate(places) if any(m.holds(place) for m in memory)}

    def pointers(self, call: ReadCall) -> list[int]:
        """Returns the addresses of the static arguments of a call."""
        return [*map(self.library.address, call.statics)]

    def keep(self, call: ReadCall) -> HostSnapshot:
        """Returns a snapshot of the host state that a run of a call may change, to restore it."""

        def note(kept: HostSnapshot) -> None:
            if self.guards is not None:
                kept.guards(self.guards)
            self.arguments.keep(call, kept)
            kept.attributes(self.library.attached(call.state))

        return HostSnapshot(note)

    def changed_state(self, call: ReadCall) -> str:
        """Names what the function uses besides its arguments and has changed since a call began;
        empty if nothing has changed."""
        if self.guards is None or call.seen is None:
            return ""
        try:
            now = self.guards.read()
        except Unknown as error:
            return str(error)
        return self.located(self.guards.explain(call.seen, now))

    def drawing(self) -> Callable[[bool], str]:
        """Returns a function that names the shared generator of Python or NumPy from which the
        function has drawn since now, and, if `undo`, restores its state; "" if there is none.

        Other threads draw from them too: if there are any, a draw counts only if the function's
        code, or that of a function that it names, names a function that draws."""
        before = random.getstate(), pickle.dumps(np.random.get_state(legacy=False))

        def found(undo: bool) -> str:
            python, numpy = random.getstate(), pickle.dumps(np.random.get_state(legacy=False))
            if before == (python, numpy):
                return ""
            names = self.code.named.union([place.name for place in self.code.places])
            for helper in [place.read() for place in self.code.places]:
                names = names.union(getattr(getattr(helper, "__code__", None), "co_names", ()))
            if len(sys._current_frames()) > 1 and _DRAWING.isdisjoint(names):
                return ""
            if undo:
                random.setstate(before[0])
                np.random.set_state(pickle.loads(before[1]))
            return f"the state of {'random' if python != before[0] else 'numpy.random'}"

        return found

    def seeded(self) -> str:
        """Returns the lines on which the function may give a generator a seed."""
        lines = [lines_of(self.function, [name]) for name in self.library.seeds]
        return self.place(sorted({line for several in lines for line in several}))

    def place(self, lines: Sequence[int]) -> str:
        """Formats lines of the function as " at file:line, ..."; empty if there are none."""
        code, named = code_of(self.function), ", ".join(map(str, lines[:_MOST_NAMED]))
        return "" if code is None or not lines else f" at {code.co_filename}:{named}"

    def located(self, names: Iterable[str]) -> str:
        """Formats names of what the function uses, with the lines of the function that name it."""
        found: dict[str, list[str]] = {}
        for name in names:
            place = self.place(lines_of(self.function, _WORD.findall(name)))
            found.setdefault(place, []).append(name)
        # The place with most names comes first: a scheduler, before the optimiser that it changes.
        places = sorted(found.items(), key=lambda each: -len(each[1]))[:_MOST_NAMED]
        return "; ".join(
            [
                f"{', '.join(several[:_MOST_NAMED])}{', …' * (len(several) > _MOST_NAMED)}{place}"
                for place, several in places
            ]
        )
