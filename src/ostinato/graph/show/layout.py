"""Where the boxes and links of a picture go: a layered layout, in pixels.

1. Rows: a box is below all that it depends on.  A link that passes rows gets a point in each, so
   that no link runs through a box.
2. Order: rows are sorted by the mean rank of their neighbours, so that few links cross.
3. Place: every point is as near to the middle of its neighbours as its row allows.
4. Columns: a high picture is cut into columns, which are read like those of a newspaper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from ostinato.graph.show.drawing import Drawing

__all__ = ["lay_out"]

_GAP = 22.0  # between boxes of a row, and between rows
_WIDEST = 8  # boxes side by side
_TALLEST = 1000.0  # what is lower than this is not cut into columns
_ASPECT = 1.5  # width to height of a picture with columns
_MARGIN = 32.0  # above, below and between columns
_PASSING = 3  # points in the first row of a column: all links to them run around the margin


@dataclass(eq=False, slots=True)
class _Point:
    """A box, or where a link passes a row."""

    box: Drawing
    pull: float = 1.0
    above: list[_Point] = field(default_factory=list)
    below: list[_Point] = field(default_factory=list)
    rank: int = 0  # in its row
    x: float = 0.0  # of its middle
    top: float = 0.0
    bottom: float = 0.0  # of its row
    column: float = 0.0  # where its column begins


_Links = Mapping[tuple[int, int], str]
_Rows = Sequence[list[_Point]]


def lay_out(boxes: Sequence[Drawing], links: _Links) -> Drawing:
    """The boxes and the links between them as one drawing.  Links go from a lower to a higher
    index of `boxes`, each with its look."""
    if not boxes:
        return Drawing()
    points = [_Point(box) for box in boxes]
    rows = _rows(points, links)
    routes = {ends: _route(ends, points, rows) for ends in sorted(links)}
    _order(rows)
    _place(rows)
    drawing = _stack(rows)
    for ends, route in routes.items():
        path = f"M{route[0].x:g} {route[0].top + route[0].box.height:g}"
        drawing.arrow(path + "".join(_step(a, b) for a, b in pairwise(route)), links[ends])
    for p in points:
        drawing.place(p.x - p.box.width / 2, p.top, p.box)
    return drawing


def _rows(points: Sequence[_Point], links: _Links) -> _Rows:
    """The points by the length of the longest path to each; those that wait for nothing are near
    to what waits for them."""
    layers = [0] * len(points)
    for a, b in sorted(links):
        layers[b] = max(layers[b], layers[a] + 1)
    for i in {a for a, _ in links} - {b for _, b in links}:
        layers[i] = min(layers[b] for a, b in links if a == i) - 1
    rows = []
    for layer in range(max(layers) + 1):
        row = [p for p, at in zip(points, layers, strict=True) if at == layer]
        rows += [row[k : k + _WIDEST] for k in range(0, len(row), _WIDEST)]
    return rows


def _route(ends: tuple[int, int], points: Sequence[_Point], rows: _Rows) -> list[_Point]:
    """A link as points, one in each row from its start to its end."""
    start, end = (points[i] for i in ends)
    first, last = (next(r for r, row in enumerate(rows) if p in row) for p in (start, end))
    route = [start]
    for row in rows[first + 1 : last]:
        route.append(_Point(Drawing(8), pull=3))
        row.append(route[-1])
    route.append(end)
    for upper, lower in pairwise(route):
        upper.below.append(lower)
        lower.above.append(upper)
    return route


def _order(rows: _Rows) -> None:
    for sweep in range(24):
        for row in rows[:: -1 if sweep % 2 else 1]:
            near = {p: p.below if sweep % 2 else p.above for p in row}
            row.sort(key=lambda p: fmean(q.rank for q in near[p]) if near[p] else p.rank)
            for rank, p in enumerate(row):
                p.rank = rank


def _place(rows: _Rows) -> None:
    """Points of a row keep their order and do not overlap: weighted least squares by pooling
    (isotonic regression).  Where a link passes it pulls more, so that it gets straight."""
    for sweep in range(16):
        for row in rows[:: -1 if sweep % 2 else 1]:
            offset = 0.0
            pools: list[tuple[float, float, list[_Point]]] = []  # place, weight, points
            for p in row:
                near = p.above + p.below
                pulls = [p.pull * q.pull for q in near]
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
    left = min(p.x - p.box.width / 2 for row in rows for p in row)
    width = max(p.x + p.box.width / 2 for row in rows for p in row) - left
    heights = [max(p.box.height for p in row) for row in rows]
    runs = [max((abs(p.x - q.x) for p in row for q in p.below), default=0.0) for row in rows]
    steps = [h + _GAP + min(26.0, run / 8) for h, run in zip(heights, runs, strict=True)]
    tall, columns, margin = sum(steps), 1, 0.0
    if tall > _TALLEST:
        columns, margin = max(1, round(math.sqrt(_ASPECT * tall / width))), _MARGIN
    x, y, high = 0.0, margin, 0.0
    for row, height, step in zip(rows, heights, steps, strict=True):
        if y >= margin + tall / columns and len(row) <= _PASSING:
            x, y = x + width + _MARGIN, margin
        for p in row:
            p.column, p.x, p.top, p.bottom = x, p.x + x - left, y, y + height
        high = max(high, y + height + margin)
        y += step
    return Drawing(x + width, high)


def _step(a: _Point, b: _Point) -> str:
    """From a row to the top of the next, which may be that of the next column."""

    def curve(x: float, by: float, to_x: float, to_y: float) -> str:
        return f"C{x:g} {by:g} {to_x:g} {by:g} {to_x:g} {to_y:g}"

    down = f"V{a.bottom:g}"
    if a.column == b.column:
        return down + curve(a.x, (a.bottom + b.top) / 2, b.x, b.top)
    side = b.column - 8 - 6 * b.rank
    around = curve(a.x, a.bottom + 40 - 13 * b.rank, side, a.bottom)
    return f"{down}{around}V{b.top:g}" + curve(side, b.top - 20 - 8 * b.rank, b.x, b.top)
