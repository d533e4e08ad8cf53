"""Where the boxes and edges of a picture go: a layered layout, in pixels.

1. Rows: a box is below all that it depends on; an edge that passes rows gets a point in each, so
   that no edge runs through a box.
2. Order: rows are sorted by the mean place of their neighbours, so that few edges cross.
3. Place: every point is as near to the middle of its neighbours as its row allows.
4. Columns: a high picture is cut into columns, which are read like those of a newspaper.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import accumulate, count, groupby, islice, pairwise
from operator import add

from ostinato.graph.show.drawing import Drawing, bend, element, group, px

__all__ = ["edge", "lay_out", "layers"]

_GAP = 22.0  # between boxes of a row, and between rows
_LANE = 7.0  # between edges that run to the next column
_WIDEST = 8  # boxes side by side
_ASPECT = 1.5  # width to height of a picture with columns
_TALLEST = 1000.0  # what is lower than this is not cut into columns
_PASSING = 3  # edges that may run from one column into the next


def layers(points: Iterable[int], links: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The points by the length of the longest path to each: every link goes to a later layer."""
    sorter = TopologicalSorter[int](dict.fromkeys(points, ()))
    for a, b in links:
        sorter.add(b, a)
    sorter.prepare()
    found: list[list[int]] = []
    while sorter.is_active():
        found.append(sorted(sorter.get_ready()))
        sorter.done(*found[-1])
    return found


def edge(path: str, look: str) -> str:
    return element("path", class_=look, d=path, marker_end=f"url(#ostinato-{look})")


def lay_out(boxes: Sequence[Drawing], links: Mapping[tuple[int, int], str]) -> Drawing:
    """The boxes and the links between them (by index) with their looks, as one drawing."""
    return _Layout(boxes, links).drawing() if boxes else Drawing(0.0, 0.0, [])


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a point is: its column, its middle, top and bottom of its row, and its own."""

    column: int
    x: float
    row: tuple[float, float]
    own: tuple[float, float]


class _Layout:
    """Points are boxes (by index) and, with higher numbers, points of edges that pass a row."""

    def __init__(self, boxes: Sequence[Drawing], links: Mapping[tuple[int, int], str]) -> None:
        self.boxes, self.links = boxes, links
        self.above: dict[int, list[int]] = defaultdict(list)
        self.below: dict[int, list[int]] = defaultdict(list)
        self.x: dict[int, float] = {}  # the middle of each point; 0 is the middle of its column
        self.rows: list[list[int]] = []
        layer = {i: n for n, row in enumerate(layers(range(len(boxes)), links)) for i in row}
        after: dict[int, list[int]] = defaultdict(list)
        for a, b in links:
            after[a].append(layer[b])
        for i in after.keys() - {b for _, b in links}:  # near to what waits for it
            layer[i] = min(after[i]) - 1
        for _, members in groupby(sorted(layer, key=lambda i: (layer[i], i)), layer.get):
            row = [*members]
            self.rows += [row[k : k + _WIDEST] for k in range(0, len(row), _WIDEST)]
        row_of = {i: r for r, row in enumerate(self.rows) for i in row}
        points = count(len(boxes))
        self.routes: dict[tuple[int, int], list[int]] = {}  # each link as points, one a row
        for a, b in sorted(links):
            between = self.rows[row_of[a] + 1 : row_of[b]]
            route = self.routes[a, b] = [a, *islice(points, len(between)), b]
            for row, point in zip(between, route[1:], strict=False):
                row.append(point)
            for upper, lower in pairwise(route):
                self.above[lower].append(upper)
                self.below[upper].append(lower)
        self._order()
        self._place()

    def _order(self) -> None:
        for sweep in range(24):
            near, step = (self.below, -1) if sweep % 2 else (self.above, 1)
            for fixed, row in pairwise(self.rows[::step]):
                at = {p: k for k, p in enumerate(fixed)}
                mean = {p: float(k) for k, p in enumerate(row)}
                mean |= {p: sum(at[q] for q in near[p]) / len(near[p]) for p in row if near[p]}
                row.sort(key=mean.__getitem__)

    def _place(self) -> None:
        for row in self.rows:
            self._settle(row, [0.0] * len(row))
        for sweep in range(16):
            for row in self.rows[:: -1 if sweep % 2 else 1]:
                self._settle(row, [self._wanted(p) for p in row])

    def _wanted(self, p: int) -> float:
        """The middle of a point's neighbours.  Long edges pull more, so that they get straight."""
        near = self.above[p] + self.below[p]
        pulls = [(1.0, 2.0, 8.0)[(p >= len(self.boxes)) + (q >= len(self.boxes))] for q in near]
        total = sum(pull * self.x[q] for pull, q in zip(pulls, near, strict=True))
        return total / sum(pulls) if near else self.x[p]

    def _settle(self, row: Sequence[int], wanted: Sequence[float]) -> None:
        """Moves the points of a row as near as can be to where they are wanted, in their order and
        without overlaps: weighted least squares by pooling (isotonic regression)."""
        gaps = ((self._width(a) + self._width(b)) / 2 + _GAP for a, b in pairwise(row))
        offsets = [*accumulate(gaps, initial=0.0)]
        pools: list[tuple[float, float, int]] = []  # place, weight, number of points
        for p, want, offset in zip(row, wanted, offsets, strict=True):
            place, weight, points = want - offset, 1.0 if p < len(self.boxes) else 4.0, 1
            while pools and pools[-1][0] > place:
                before, more, others = pools.pop()
                place = (place * weight + before * more) / (weight + more)
                weight, points = weight + more, points + others
            pools.append((place, weight, points))
        levels = (place for place, _, points in pools for _ in range(points))
        self.x.update(zip(row, map(add, levels, offsets), strict=True))

    def _width(self, p: int) -> float:
        return self.boxes[p].width if p < len(self.boxes) else 8.0

    def _height(self, r: int) -> float:
        return max(self.boxes[p].height for p in self.rows[r] if p < len(self.boxes))

    def _step(self, r: int) -> float:
        """From a row's top to the next one's: more where edges run far to the side."""
        runs = (abs(self.x[p] - self.x[q]) for p in self.rows[r] for q in self.below[p])
        return self._height(r) + _GAP + min(26.0, max(runs, default=0.0) / 8)

    def _extent(self, rows: Iterable[int]) -> tuple[float, float]:
        ends = [(self.x[p], self._width(p) / 2) for r in rows for p in self.rows[r]]
        return min(x - half for x, half in ends), max(x + half for x, half in ends)

    def _passing(self, r: int) -> int:
        """How many edges run from row r - 1 into row r."""
        return sum(len(self.below[p]) for p in self.rows[r - 1])

    def _columns(self) -> list[range]:
        """The rows of each column, which ends where few edges go on."""
        tops = [*accumulate((self._step(r) for r in range(len(self.rows))), initial=0.0)]
        left, right = self._extent(range(len(self.rows)))
        columns = math.sqrt(_ASPECT * tops[-1] / (right - left)) if tops[-1] > _TALLEST else 1
        cuts = [0]
        for share in range(round(columns), 1, -1):
            top = tops[cuts[-1]]
            tall = (tops[-1] - top) / share
            near = [r for r, y in enumerate(tops[:-1]) if 0.7 <= (y - top) / tall <= 1.15]
            rank = [(self._passing(r), abs(tops[r] - top - tall), r) for r in near]
            if rank and min(rank)[0] <= _PASSING:
                cuts.append(min(rank)[2])
        return [range(a, b) for a, b in pairwise([*cuts, len(self.rows)])]

    def drawing(self) -> Drawing:
        columns = self._columns()
        onward = [_LANE * self._passing(rows.stop) for rows in columns[:-1]] + [0.0]
        top = 18 + max(onward) if len(columns) > 1 else 0.0
        spots: dict[int, _Spot] = {}
        rights: list[float] = []
        x = high = 0.0
        for column, rows in enumerate(columns):
            left, right = self._extent(rows)
            y = top
            for r in rows:
                bottom = y + self._height(r)
                for p in self.rows[r]:
                    spare = bottom - y - self.boxes[p].height if p < len(self.boxes) else 0.0
                    own = y + spare / 2, bottom - spare / 2
                    spots[p] = _Spot(column, x - left + self.x[p], (y, bottom), own)
                high = max(high, bottom + (onward[column] + 8 if top else 0.0))
                y += self._step(r)
            rights.append(x + right - left)
            x = rights[-1] + 24 + onward[column]
        lanes = [count() for _ in columns]
        lines = []
        for ends, look in sorted(self.links.items()):
            spot = [spots[p] for p in self.routes[ends]]
            path = f"M{px(spot[0].x)} {px(spot[0].own[1])}"
            for a, b in pairwise(spot):
                lane = 0.0 if a.column == b.column else _LANE * next(lanes[a.column])
                end = b.own[0] if b is spot[-1] else b.own[1]
                path += f"V{px(a.row[1])}" if a.row[1] != a.own[1] else ""
                path += _link(a, b, rights[a.column] + 12 + lane, lane)
                path += f"V{px(end)}" if end != b.row[0] else ""
            lines.append(edge(path, look))
        for p, box in enumerate(self.boxes):
            lines.append(group(spots[p].x - box.width / 2, spots[p].own[0], box.lines))
        return Drawing(rights[-1], high, lines)


def _link(a: _Spot, b: _Spot, side: float, lane: float) -> str:
    """From the bottom of a row to the top of the next; by way of `side` into the next column."""
    low, high = a.row[1], b.row[0]
    if a.column != b.column:
        under, over = low + 9 + lane, high - 12 - lane
        way = [(a.x, low), (a.x, under), (side, under), (side, over), (b.x, over), (b.x, high)]
        return bend(way).replace("M", "L", 1)
    if abs(a.x - b.x) < 0.05:
        return f"V{px(high)}"
    half = px((low + high) / 2)
    return f"C{px(a.x)} {half} {px(b.x)} {half} {px(b.x)} {px(high)}"
