"""Tables to join, the answers, and how results are compared with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ostinato.relational import Joiner, JoinResult

Columns = dict[str, npt.NDArray[Any]]

TYPES = (np.int32, np.uint32, np.int64, np.uint64)
BORDERS = (0, 1, 2, 255, 256, 257)
FAR_BORDERS = (65_535, 65_536, 65_537)


def pairs(result: JoinResult) -> npt.NDArray[np.int64]:
    """The result's pairs in order, a row each."""
    left, right = result.to_numpy()
    assert len(left) == len(right) == len(result)
    return in_order(left, right)


def in_order(left: npt.ArrayLike, right: npt.ArrayLike) -> npt.NDArray[np.int64]:
    both = np.stack([np.asarray(left, np.int64), np.asarray(right, np.int64)], axis=1)
    return both[np.lexsort((both[:, 1], both[:, 0]))]


def expected(left: Mapping[str, Any], right: Mapping[str, Any]) -> npt.NDArray[np.int64]:
    """By sorting: the pairs of rows that are equal in all columns, in order."""
    names = list(left)
    count = len(left[names[0]])
    codes = np.zeros(count + len(right[names[0]]), np.int64)
    for name in names:
        both = np.concatenate([left[name], right[name]])
        _, code = np.unique(both, return_inverse=True)
        _, codes = np.unique(codes * (code.max(initial=0) + 1) + code, return_inverse=True)
    ours, theirs = codes[:count], codes[count:]
    order = np.argsort(theirs, kind="stable")
    first = np.searchsorted(theirs[order], ours, "left")
    counts = np.searchsorted(theirs[order], ours, "right") - first
    rows = np.repeat(np.arange(count), counts)
    places = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    return in_order(rows, order[places])


def check(joiner: Joiner, left: Columns, right: Columns, **options: Any) -> JoinResult:
    """Joins with and without an index, and compares both results with the answer."""
    wanted, on = expected(left, right), list(left)
    index = joiner.build_index(right, on)
    indexed = joiner.join(left, index, on, **options)
    np.testing.assert_array_equal(pairs(indexed), wanted)
    result = joiner.join(left, right, on, **options)
    np.testing.assert_array_equal(pairs(result), wanted)
    index.close()
    return result


@dataclass(frozen=True)
class Shape:
    """How tables are drawn: rows of both sides, how many keys there are, and how skewed."""

    left: int
    right: int
    types: tuple[type, ...]
    distinct: int
    skew: float
    seed: int
    everywhere: bool
    """Whether keys are all bit patterns, or close to zero."""

    def tables(self) -> tuple[Columns, Columns]:
        rng = np.random.default_rng(self.seed)
        sides: tuple[Columns, Columns] = {}, {}
        for number, kind in enumerate(self.types):
            info = np.iinfo(kind)
            if self.everywhere:
                values = rng.integers(info.min, info.max, self.distinct, kind, endpoint=True)
                for at, value in enumerate((info.min, info.max, 0, -1 % (int(info.max) + 1))):
                    values[at : at + 1] = value
            else:
                start = -(self.distinct // 2) if info.min else 0
                values = np.arange(start, start + self.distinct).astype(kind)
            for side, rows in zip(sides, (self.left, self.right), strict=True):
                ranks = self.distinct * rng.random(rows) ** (1 + self.skew)
                side[f"k{number}"] = values[np.minimum(ranks.astype(int), self.distinct - 1)]
        return sides


@st.composite
def shapes(draw: st.DrawFn, largest: int = 400, most_columns: int = 3) -> Shape:
    rows = st.one_of(st.sampled_from([b for b in BORDERS if b <= largest]), st.integers(0, largest))
    return Shape(
        draw(rows),
        draw(rows),
        tuple(draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=most_columns))),
        draw(st.sampled_from([1, 2, 5, 40, 1000])),
        draw(st.sampled_from([0.0, 1.0, 6.0])),
        draw(st.integers(0, 2**32)),
        draw(st.booleans()),
    )
