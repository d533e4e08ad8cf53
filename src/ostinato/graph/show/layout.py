"""The layout of boxes and links in a picture: layered, in pixels.

1. Rows: a box is below all boxes on which it depends.  A link that passes rows gets a point in
each, so that no link runs through a box.  2. Places: sweeps over the rows move every point towards
its neighbours, and sort each row by the new places of its points, so that few links cross.  3.
Columns: a high picture is cut into columns, which are read like those of a newspaper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, count, pairwise
from statistics import fmean

from ostinato.graph.show.drawing import Drawing

_LANE = 7.0  # between links that run to the next column
_AROUND = 36.0  # columns, for these links
_WIDEST = 8  # boxes side by side
_TALLEST = 1000.0  # lower pictures are not cut into columns
_ASPECT = 1.5  # width to height of a picture with columns
_PASSING = 3  # links that may run from one column into the next
_WORTH = 150.0  # pixels of error in a column's height that one such link less is worth
_SWEEPS, _LAST = 25, 16  # over the rows: for few crossings, then for straight links


@dataclass(eq=False, slots=True)
class _Point:
    """A box, or the point at which a link passes a row."""

    box: Drawing
    row: int
    pull: float = 1.0
    above: list[_Point] = field(default_factory=list)
    below: list[_Point] = field(default_factory=list)
    x: float = 0.0  # of its middle
    top: float = 0.0
    bottom: float = 0.0  # of its row
    side: float = 0.0  # the right end of its column


def lay_out(boxes: Sequence[Drawing], links: Mapping[tuple[int, int], str], gap: float) -> Drawing:
    """Lays boxes out, `gap` apart, with the links between them, as one drawing.  Links go from a
    lower to a higher index of `boxes`, each with its look."""
    ends = sorted(links)
    points = [_Point(box, r) for box, r in zip(boxes, _rows(len(boxes), ends), strict=True)]
    routes = []
    for a, b in ends:
        passed = [_Point(Drawing(8), r, 2.0) for r in range(points[a].row + 1, points[b].row)]
        routes.append([points[a], *passed, points[b]])
        for upper, lower in pairwise(routes[-1]):
            upper.below.append(lower)
            lower.above.append(upper)
    rows: list[list[_Point]] = [[] for _ in {p.row for p in points}]
    for p in dict.fromkeys(chain(points, *routes)):
        rows[p.row].append(p)
    _place(rows, gap)
    drawing = _stack(rows, gap)
    lanes = {p.side: count() for p in points}
    for link, route in zip(ends, routes, strict=True):
        path = f"M{route[0].x:g} {route[0].top + route[0].box.height:g}"
        path += "".join(_way(a, b, lanes) for a, b in pairwise(route))
        drawing.add("path", d=path, class_=links[link])
    for p in points:
        drawing.place(p.x - p.box.width / 2, p.top, p.box)
    return drawing


def _rows(boxes: int, links: Sequence[tuple[int, int]]) -> list[int]:
    """Returns the row of each box by the length of the longest path to it; a box without
    predecessors is near to its followers."""
    layers = [0] * boxes
    for a, b in links:
        layers[b] = max(layers[b], layers[a] + 1)
    for i in {a for a, _ in links} - {b for _, b in links}:
        layers[i] = min(layers[b] for a, b in links if a == i) - 1
    rows = [(layer, layers[:i].count(layer) // _WIDEST) for i, layer in enumerate(layers)]
    number = {row: r for r, row in enumerate(sorted(set(rows)))}
    return [number[row] for row in rows]


def _place(rows: Sequence[list[_Point]], gap: float) -> None:
    """Sweeps down and up: halfway to the row before, at last all the way to the rows on both sides.
    Points do not overlap: weighted least squares by pooling (isotonic regression).  The point of a
    passing link pulls more, so that the link gets straight."""
    for sweep in range(_SWEEPS + _LAST):
        for row in rows[:: -1 if sweep % 2 else 1]:
            wanted = {}
            for p in row:
                near = p.above + p.below if sweep >= _SWEEPS else p.below if sweep % 2 else p.above
                wanted[p] = fmean((q.x for q in near), (q.pull for q in near)) if near else p.x
            row.sort(key=lambda p: wanted[p])
            pools: list[tuple[float, float, list[_Point]]] = []  # place, weight, points
            offset = 0.0
            for p in row:
                middle, weight, points = offset + p.box.width / 2, p.pull, [p]
                place = (wanted[p] if sweep >= _SWEEPS else (wanted[p] + p.x) / 2) - middle
                while pools and pools[-1][0] > place:
                    before, more, others = pools.pop()
                    place = (place * weight + before * more) / (weight + more)
                    weight, points = weight + more, others + points
                pools.append((place, weight, points))
                p.x = middle
                offset += p.box.width + gap
            for place, _, points in pools:
                for p in points:
                    p.x += place


def _stack(rows: Sequence[list[_Point]], gap: float) -> Drawing:
    """Puts the rows below each other, in columns; returns an empty drawing of that size."""
    heights = [max(p.box.height for p in row) for row in rows]
    runs = [max((abs(p.x - q.x) for p in row for q in p.below), default=0.0) for row in rows]
    steps = [h + gap + min(26.0, run / 8) for h, run in zip(heights, runs, strict=True)]
    *tops, tall = accumulate(steps, initial=0.0)
    passing = [sum(len(p.above) for p in row) for row in rows]  # links into each row
    lefts = [min(p.x - p.box.width / 2 for p in row) for row in rows]
    rights = [max(p.x + p.box.width / 2 for p in row) for row in rows]
    columns = (_ASPECT * tall / (max(rights) - min(lefts))) ** 0.5 if tall > _TALLEST else 1.0
    middles = [tall * k / round(columns) for k in range(1, round(columns))]
    few = [r for r in range(len(rows)) if passing[r] <= _PASSING]
    cuts = {min(few, key=lambda r: abs(tops[r] - y) + _WORTH * passing[r]) for y in middles}
    around = _AROUND if cuts - {0} else 0.0
    drawing = Drawing()
    for start, end in pairwise(sorted({0, *cuts, len(rows)})):
        move = drawing.width - min(lefts[start:end])
        side = max(rights[start:end]) + move
        for r in range(start, end):
            top = around + tops[r] - tops[start]
            bottom = top + heights[r]
            for p in rows[r]:
                p.x, p.side, p.top, p.bottom = p.x + move, side, top, bottom
            drawing.height = max(drawing.height, bottom + around)
        drawing.width = side + around
    return drawing


def _way(a: _Point, b: _Point, lanes: Mapping[float, count[int]]) -> str:
    """Returns a path from the bottom of a row to the top of the next row or column."""
    if a.side == b.side:
        half = (a.bottom + b.top) / 2
        return f"V{a.bottom:g}C{a.x:g} {half:g} {b.x:g} {half:g} {b.x:g} {b.top:g}"
    lane = _LANE * next(lanes[a.side])
    across = f"V{a.bottom + 3 + lane:g}q0 6 6 6H{a.side + 6 + lane:g}q6 0 6-6"
    return f"{across}V{b.top - 6 - lane:g}q0-6 6-6H{b.x - 6:g}q6 0 6 6V{b.top:g}"
