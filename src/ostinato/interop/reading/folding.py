"""Folds keys that differ in plain values alone.  A number that is another one at each call (a
position) would make a key for each call and a graph for none."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

from ostinato.interop.reading.records import Line

MOST = 8
"""Keys that differ in the same plain values alone before they are folded."""
_MOST_MET = 128
_MOST_KINDS = 64
_MOST_COMPARED = 32
_MOST_CHANGING = 256
Flat: TypeAlias = tuple[Hashable, ...]
"""A key whose tokens are all in one tuple."""


class Fold:
    """Keys that share one line."""

    def __init__(self, places: tuple[int, ...], flat: Flat, line: Line) -> None:
        """`flat`: one of the keys."""
        self.places, self.line = places, line
        """Indices of the tokens in which the keys differ."""
        self.same = _without(flat, places)
        """The tokens that the keys have in common."""
        self._met: OrderedDict[Hashable, None] = OrderedDict()
        """The values of the last calls, which may come again."""
        self.endless = False
        """True if there were more different values than are remembered."""

    def comes_again(self, flat: Flat) -> bool:
        """True if a call's values were met before, so that the call gets a key of its own."""
        values = tuple([flat[place] for place in self.places])
        if values in self._met:
            del self._met[values]
            return True
        self.meet(flat)
        return False

    def meet(self, flat: Flat) -> None:
        self._met[tuple([flat[place] for place in self.places])] = None
        if len(self._met) > _MOST_MET:
            self._met.popitem(last=False)
            self.endless = True


class Folds:
    """The folded keys of one function."""

    def __init__(self) -> None:
        self._recent: OrderedDict[Flat, deque[tuple[Flat, Hashable]]] = OrderedDict()
        """The latest new keys, by their tokens that are of no plain values."""
        self._folds: dict[tuple[int, ...], dict[Flat, Fold]] = {}

    def find(self, flat: Flat) -> Fold | None:
        """Returns the fold that a key belongs to, or None."""
        for places, folds in self._folds.items():
            fold = folds.get(_without(flat, places))
            if fold is not None and all(_is_plain(flat[place]) for place in places):
                return fold
        return None

    def family(
        self, flat: Flat, key: Hashable
    ) -> tuple[tuple[int, ...], list[tuple[Flat, Hashable]]]:
        """Notes a new key.  Returns the places in which most of the latest keys differ from it, all
        of them in plain values, and these keys with itself."""
        kind = _without(flat, [place for place, token in enumerate(flat) if _is_plain(token)])
        recent = self._recent.pop(kind, None) or deque(maxlen=_MOST_COMPARED)
        alike: dict[tuple[int, ...], list[tuple[Flat, Hashable]]] = defaultdict(list)
        for other in recent:
            differs = map(operator.ne, flat, other[0])
            alike[tuple([place for place, one in enumerate(differs) if one])].append(other)
        recent.append((flat, key))
        self._recent[kind] = recent
        if len(self._recent) > _MOST_KINDS:
            self._recent.popitem(last=False)
        few = [places for places in alike if 0 < len(places) <= _MOST_CHANGING]
        places = max(few, key=lambda places: len(alike[places]), default=())
        return places, [*alike[places], (flat, key)]

    def add(self, fold: Fold) -> None:
        """Folds the keys of a family from here on."""
        self._folds.setdefault(fold.places, {})[fold.same] = fold

    def drop(self, fold: Fold) -> None:
        """Ends a fold: its keys are new again."""
        folds = self._folds[fold.places]
        del folds[fold.same]
        if not folds:
            del self._folds[fold.places]


def _without(flat: Flat, places: Sequence[int]) -> Flat:
    """Returns a key without the values at some places; empty if the key is too short."""
    if places and places[-1] >= len(flat):
        return ()
    rest = [*flat]
    for place in places:
        rest[place] = None
    return tuple(rest)


def _is_plain(token: Any) -> bool:
    """True if a token is that of a plain value, not of an array or of a container's kind."""
    if type(token) is not tuple or len(token) < 2 or not isinstance(token[0], type):
        return False
    if token[0] is tuple:
        return type(token[1]) is tuple
    return token[0] not in (list, dict, OrderedDict)
