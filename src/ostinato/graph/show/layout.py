"""Where the boxes and links of a picture go: a layered layout, in pixels.

1. Rows: a box is below all that it depends on.  A link that passes rows gets a point in each, so
   that no link runs through a box.
2. Order: rows are sorted by the mean place of their neighbours, so that few links cross.
3. Place: every point is as near to the middle of its neighbours as its row allows.
4. Columns: a high picture is cut into columns, which are read like those of a newspaper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, pairwise
from statistics import fmean

from ostinato.graph.show.drawing import Drawing, bend

__all__ = ["lay_out"]

_GAP = 22.0  # between boxes of a row, and between rows
_LANE = 7.0  # between links that run to the next column
_AROUND = 36.0  # columns, for these links
_WIDEST = 8  # boxes side by side
_TALLEST = 1000.0  # what is lower than this is not cut into columns
_ASPECT = 1.5  # width to height of a picture with columns
_PASSING = 3  # links that may run from one column into the next


@dataclass(eq=False, slots=True)
class _Point:
    """A box, or where a link passes a row."""

    box: Drawing
    x: float  # of its middle; until all points have a place, its number in its row
    pull: float = 1.0
    above: list[_Point] = field(default_factory=list)
    below: list[_Point] = field(default_factory=list)
    top: float = 0.0
    bottom: float = 0.0  # of its row, in whose middle it is
    side: float = 0.0  # the right end of its column


_Links = Mapping[tuple[int, int], str]
_Rows = Sequence[list[_Point]]


def lay_out(boxes: Sequence[Drawing], links: _Links) -> Drawing:
    """The boxes and the links between them as one drawing.  Links go from a lower to a higher
    index of `boxes`, each with its look."""
    if not boxes:
        return Drawing()
    row_of = _row_of(len(boxes), links)
    rows: _Rows = [[] for _ in range(max(row_of) + 1)]
    points = [_added(box, rows[r]) for box, r in zip(boxes, row_of, strict=True)]
    routes = []
    for a, b in sorted(links):
        passed = [_added(Drawing(8), row, 4.0) for row in rows[row_of[a] + 1 : row_of[b]]]
        routes.append([points[a], *passed, points[b]])
        for upper, lower in pairwise(routes[-1]):
            upper.below.append(lower)
            lower.above.append(upper)
    _order(rows)
    _place(rows)
    drawing = _stack(rows)
    lanes = {p.side: count() for p in points}
    for ends, (first, *others) in zip(sorted(links), routes, strict=True):
        path = f"M{first.x:g} {(first.top + first.bottom + first.box.height) / 2:g}"
        for upper, lower in pairwise([first, *others]):
            path += f"V{upper.bottom:g}{_way(upper, lower, lanes)}"
        end = (others[-1].top + others[-1].bottom - others[-1].box.height) / 2
        drawing.arrow(path if end == others[-1].top else f"{path}V{end:g}", links[ends])
    for p in points:
        drawing.place(p.x - p.box.width / 2, (p.top + p.bottom - p.box.height) / 2, p.box)
    return drawing


def _row_of(boxes: int, links: _Links) -> list[int]:
    """The row of each box by the length of the longest path to it; a box that waits for nothing is
    near to what waits for it."""
    layers = [0] * boxes
    for a, b in sorted(links):
        layers[b] = max(layers[b], layers[a] + 1)
    for i in {a for a, _ in links} - {b for _, b in links}:
        layers[i] = min(layers[b] for a, b in links if a == i) - 1
    rows = [(layer, layers[:i].count(layer) // _WIDEST) for i, layer in enumerate(layers)]
    number = {row: r for r, row in enumerate(sorted(set(rows)))}
    return [number[row] for row in rows]


def _added(box: Drawing, row: list[_Point], pull: float = 1.0) -> _Point:
    row.append(_Point(box, len(row), pull))
    return row[-1]


def _order(rows: _Rows) -> None:
    for sweep in range(24):
        for row in rows[:: -1 if sweep % 2 else 1]:
            near = {p: p.below if sweep % 2 else p.above for p in row}
            row.sort(key=lambda p: fmean(q.x for q in near[p]) if near[p] else p.x)
            for number, p in enumerate(row):
                p.x = number


def _place(rows: _Rows) -> None:
    """Points of a row keep their order and do not overlap: weighted least squares by pooling
    (isotonic regression).  Where a link passes it pulls more, so that it gets straight."""
    for sweep in range(17):  # the first puts the middles of all rows below each other
        for row in rows[:: 1 if sweep % 2 else -1]:
            offset = 0.0
            pools: list[tuple[float, float, list[_Point]]] = []  # place, weight, points
            for p in row:
                near = p.above + p.below if sweep else []
                pulls = [math.sqrt(p.pull * q.pull) for q in near]
                wanted = fmean((q.x for q in near), pulls) if near else p.x
                p.x = offset + p.box.width / 2
                offset += p.box.width + _GAP
                place, weight, points = wanted - p.x, p.pull, [p]
                while pools and pools[-1][0] > place:
                    before, more, others = pools.pop()
                    place = (place * weight + before * more) / (weight + more)
                    weight, points = weight + more, others + points
                pools.append((place, weight, points))
            for place, _, points in pools:
                for p in points:
                    p.x += place


def _stack(rows: _Rows) -> Drawing:
    """Puts the rows below each other, in columns; returns an empty drawing of that size."""
    heights = [max(p.box.height for p in row) for row in rows]
    runs = [max((abs(p.x - q.x) for p in row for q in p.below), default=0.0) for row in rows]
    steps = [h + _GAP + min(26.0, run / 8) for h, run in zip(heights, runs, strict=True)]
    tops = [*accumulate(steps, initial=0.0)]
    passing = [0, *(sum(len(p.below) for p in row) for row in rows)]  # links into each row
    cuts = [0]
    columns = math.sqrt(_ASPECT * tops[-1] / _extent(rows)[1]) if tops[-1] > _TALLEST else 1
    for share in range(round(columns), 1, -1):
        top = tops[cuts[-1]]
        tall = (tops[-1] - top) / share
        good = [
            (passing[r], abs(y - top - tall), r)
            for r, y in enumerate(tops[:-1])
            if 0.7 <= (y - top) / tall <= 1.15 and passing[r] <= _PASSING
        ]
        cuts += [r for _, _, r in sorted(good)[:1]]
    around = _AROUND if len(cuts) > 1 else 0.0
    drawing = Drawing()
    for start, end in pairwise([*cuts, len(rows)]):
        left, width = _extent(rows[start:end])
        x, drawing.width = drawing.width, drawing.width + width + around
        for row, height, y in zip(rows[start:end], heights[start:], tops[start:], strict=False):
            top = around + y - tops[start]
            drawing.height = max(drawing.height, top + height + around)
            for p in row:
                p.x, p.side, p.top, p.bottom = p.x + x - left, x + width, top, top + height
    return drawing


def _extent(rows: _Rows) -> tuple[float, float]:
    """The left end and the width of rows."""
    left = min(p.x - p.box.width / 2 for row in rows for p in row)
    return left, max(p.x + p.box.width / 2 for row in rows for p in row) - left


def _way(a: _Point, b: _Point, lanes: Mapping[float, count[int]]) -> str:
    """From the bottom of a row to the top of the next, which may be that of the next column."""
    if a.side == b.side:
        half = (a.bottom + b.top) / 2
        return f"C{a.x:g} {half:g} {b.x:g} {half:g} {b.x:g} {b.top:g}"
    lane = _LANE * next(lanes[a.side])
    under, over, side = a.bottom + 9 + lane, b.top - 12 - lane, a.side + 12 + lane
    return bend(
        [(a.x, a.bottom), (a.x, under), (side, under), (side, over), (b.x, over), (b.x, b.top)]
    )
