"""Where the boxes and edges of a picture go: a layered layout, in pixels.

    layer ─ longest path from the sources, wide layers split          _layers
    order ─ barycentres, the order with the fewest crossings kept     _order
    place ─ straight over parents and children as far as they fit     _place
    wrap ─ the layers run down in columns, as text does in a paper    _wrap

Edges that pass layers go through points of their own in each ("ghosts"), so that no edge runs
through a box.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Drawing", "Layout", "px", "rounded", "topological"]

_GAP_X, _GAP_Y = 22.0, 22.0
_LANE = 7.0
_WIDEST = 8  # boxes side by side
_ASPECT = 1.5  # width to height that columns aim at
_TALLEST = 640.0  # what is lower than this is not wrapped


@dataclass(frozen=True, slots=True)
class Drawing:
    width: float
    height: float
    lines: list[str]


@dataclass(slots=True, eq=False)
class _Column:
    rows: list[int]
    axis: float = 0.0
    right: float = 0.0
    bottom: float = 0.0
    onward: int = 0
    """How many edges go on in the next column; each has a lane of its own on the way."""
    used: int = 0
    """How many of the lanes are drawn."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a point's row is."""

    column: _Column
    top: float
    bottom: float


@dataclass(slots=True)
class Layout:
    """Boxes of given sizes and the edges between them (true: programmatic), laid out.

    Points are boxes (by index) and ghosts (beyond), in `rows` from top to bottom.
    """

    sizes: list[tuple[float, float]]
    links: dict[tuple[int, int], bool]
    firsts: set[int]
    """Boxes that begin one of several runs that are alike: good ones to begin a column with."""
    rows: list[list[int]] = field(default_factory=list)
    routes: list[tuple[list[int], bool]] = field(default_factory=list)
    """An edge as points, one a row from its source's to its target's."""
    x: dict[int, float] = field(default_factory=dict)
    """The middle of each point, from its column's axis."""
    places: dict[int, _Place] = field(default_factory=dict)
    _above: dict[int, list[int]] = field(default_factory=dict)
    _below: dict[int, list[int]] = field(default_factory=dict)

    def width(self, point: int) -> float:
        return self.sizes[point][0] if point < len(self.sizes) else 8.0

    def height(self, point: int) -> float:
        return self.sizes[point][1] if point < len(self.sizes) else 0.0

    def drawing(self, boxes: Sequence[Drawing]) -> Drawing:
        if not boxes:
            return Drawing(0.0, 0.0, [])
        self._layers()
        self._order()
        self._place()
        return self._wrap(boxes)

    def _layers(self) -> None:
        count = len(self.sizes)
        order = topological(range(count), list(self.links))
        before: dict[int, list[int]] = {}
        after: dict[int, list[int]] = {}
        for a, b in self.links:
            before.setdefault(b, []).append(a)
            after.setdefault(a, []).append(b)
        layer: dict[int, int] = {}
        for i in order:
            layer[i] = max((layer[a] + 1 for a in before.get(i, ())), default=0)
        for i in reversed(order):  # What waits for nothing is drawn near to what waits for it.
            if i in after and i not in before:
                layer[i] = min(layer[b] for b in after[i]) - 1
        ranks: dict[int, list[int]] = {}
        for i in order:
            ranks.setdefault(layer[i], []).append(i)
        self.rows = [
            members[k : k + _WIDEST]
            for _, members in sorted(ranks.items())
            for k in range(0, len(members), _WIDEST)
        ]
        row = {i: r for r, members in enumerate(self.rows) for i in members}
        ghost = itertools.count(count)
        for (a, b), early in sorted(self.links.items()):
            route = [a]
            for r in range(row[a] + 1, row[b]):
                route.append(next(ghost))
                self.rows[r].append(route[-1])
            self.routes.append(([*route, b], early))
            for upper, lower in itertools.pairwise([*route, b]):
                self._above.setdefault(lower, []).append(upper)
                self._below.setdefault(upper, []).append(lower)

    def _order(self) -> None:
        """Rows in the order of their neighbours' barycentres; the best of a few sweeps."""
        best, fewest = [list(r) for r in self.rows], self._crossings()
        for sweep in range(8):
            if not fewest:
                break
            down = sweep % 2 == 0
            near = self._above if down else self._below
            for r in range(1, len(self.rows)) if down else range(len(self.rows) - 2, -1, -1):
                beside = self.rows[r - 1 if down else r + 1]
                at = {p: k for k, p in enumerate(beside)}
                own = {p: float(k) for k, p in enumerate(self.rows[r])}
                for p in own:
                    places = [at[q] for q in near.get(p, ())]
                    if places:
                        own[p] = sum(places) / len(places)
                self.rows[r].sort(key=own.__getitem__)
            crossings = self._crossings()
            if crossings < fewest:
                best, fewest = [list(r) for r in self.rows], crossings
        self.rows = best

    def _crossings(self) -> int:
        total = 0
        for upper, lower in itertools.pairwise(self.rows):
            at = {p: k for k, p in enumerate(lower)}
            seen: list[int] = []
            for p in upper:
                ends = sorted(at[q] for q in self._below.get(p, ()))
                total += sum(len(seen) - bisect_right(seen, end) for end in ends)
                for end in ends:
                    insort(seen, end)
        return total

    def _place(self) -> None:
        gaps = [
            [(self.width(a) + self.width(b)) / 2 + _GAP_X for a, b in itertools.pairwise(row)]
            for row in self.rows
        ]
        for row, gap in zip(self.rows, gaps, strict=True):
            middle = sum(gap) / 2
            for p, along in zip(row, itertools.accumulate(gap, initial=0.0), strict=True):
                self.x[p] = along - middle
        both, down, up = (self._above, self._below), (self._above,), (self._below,)
        for nears in (*(down, up) * 4, both, both, both, both):
            backwards = nears is up
            for r in reversed(range(len(self.rows))) if backwards else range(len(self.rows)):
                wanted = [self._wanted(p, nears) for p in self.rows[r]]
                weights = [1.0 if p < len(self.sizes) else 4.0 for p in self.rows[r]]
                self.x.update(zip(self.rows[r], _settle(wanted, gaps[r], weights), strict=True))

    def _wanted(self, p: int, nears: Sequence[dict[int, list[int]]]) -> float:
        """Where a point would be straight over or under its neighbours.

        An edge that passes several rows pulls more the more of it is between ghosts: straight.
        """
        total = weight = 0.0
        for q in itertools.chain.from_iterable(near.get(p, ()) for near in nears):
            pull = (1.0, 2.0, 8.0)[(p >= len(self.sizes)) + (q >= len(self.sizes))]
            total, weight = total + pull * self.x[q], weight + pull
        return total / weight if weight else self.x[p]

    def _wrap(self, boxes: Sequence[Drawing]) -> Drawing:
        """Cuts the rows into columns, and draws."""
        columns = [_Column(rows) for rows in self._columns()]
        x = 0.0
        for column in columns[:-1]:
            column.onward = self._onward(column.rows[-1] + 1)
        most = max(c.onward for c in columns)
        for column in columns:
            left, right = self._extent(column.rows)
            column.axis, column.right = x - left, x + right - left
            x = column.right + (24 + _LANE * column.onward if column is not columns[-1] else 0)
            y = 18 + _LANE * most if most else 0.0
            for r in column.rows:
                column.bottom = y + self._row_height(r)
                self.places.update({p: _Place(column, y, column.bottom) for p in self.rows[r]})
                y = column.bottom + self._gap_below(r)
        lines = [
            f'<path class="edge{" early" * early}" d="{self._path(route)}" '
            f'marker-end="url(#ostinato-{"early" if early else "arrow"})"/>'
            for route, early in self.routes
        ]
        for p, box in enumerate(boxes):
            left, top = self._middle(p) - box.width / 2, self._ends(p)[0]
            lines.append(f'<g transform="translate({px(left)} {px(top)})">')
            lines += [*box.lines, "</g>"]
        return Drawing(x, max(c.bottom + _LANE * c.onward + 8 * bool(most) for c in columns), lines)

    def _middle(self, p: int) -> float:
        return self.places[p].column.axis + self.x[p]

    def _ends(self, p: int) -> tuple[float, float]:
        """Top and bottom of a box in its row; a ghost is as high as the row."""
        place = self.places[p]
        if p >= len(self.sizes):
            return place.top, place.bottom
        spare = (place.bottom - place.top - self.height(p)) / 2
        return place.top + spare, place.bottom - spare

    def _path(self, route: Sequence[int]) -> str:
        x, y = self._middle(route[0]), self._ends(route[0])[1]
        path = [f"M{px(x)} {px(y)}"]
        for a, b in itertools.pairwise(route):
            here, there = self.places[a], self.places[b]
            x, (top, bottom) = self._middle(b), self._ends(b)
            path.append(f"V{px(here.bottom)}" if self._ends(a)[1] != here.bottom else "")
            if here.column is there.column:
                half = (here.bottom + there.top) / 2
                start = self._middle(a)
                path.append(
                    f"V{px(there.top)}"
                    if abs(start - x) < 0.05
                    else f"C{px(start)} {px(half)} {px(x)} {px(half)} {px(x)} {px(there.top)}"
                )
            else:
                lane = _LANE * here.column.used
                here.column.used += 1
                low, high = here.bottom + 9 + lane, there.top - 12 - lane
                side = here.column.right + 12 + lane
                way = [(self._middle(a), here.bottom), (self._middle(a), low), (side, low)]
                way += [(side, high), (x, high), (x, there.top)]
                path.append(rounded(way).replace("M", "L", 1))
            end = top if b == route[-1] else bottom
            path.append(f"V{px(end)}" if end != there.top else "")
        return "".join(path)

    def _row_height(self, r: int) -> float:
        return max(self.height(p) for p in self.rows[r])

    def _gap_below(self, r: int) -> float:
        """More room where edges run far to the side."""
        far = 0.0
        if r + 1 < len(self.rows):
            lower = set(self.rows[r + 1])
            for p in self.rows[r]:
                for q in self._below.get(p, ()):
                    far = max(far, abs(self.x[p] - self.x[q]) if q in lower else 0.0)
        return _GAP_Y + min(26.0, far / 8)

    def _extent(self, rows: Sequence[int]) -> tuple[float, float]:
        points = [p for r in rows for p in self.rows[r]]
        return (
            min(self.x[p] - self.width(p) / 2 for p in points),
            max(self.x[p] + self.width(p) / 2 for p in points),
        )

    def _columns(self) -> list[list[int]]:
        """The rows of each column: one column, or as many as make a good shape."""
        steps = [self._row_height(r) + self._gap_below(r) for r in range(len(self.rows))]
        begins = {r for r, row in enumerate(self.rows) if self.firsts & set(row)}
        best, least = [list(range(len(steps)))], math.inf
        most = 24 if sum(steps) > _TALLEST else 1
        for count, room in itertools.product(range(1, most + 1), (1.0, 1.04, 1.1, 1.2)):
            columns = self._cut(steps, begins, sum(steps) / count * room + 1)
            extents = [self._extent(rows) for rows in columns]
            width = sum(right - left + 30 for left, right in extents)
            height = max(sum(steps[r] for r in rows) for rows in columns)
            waste = 1 - sum(steps) / (len(columns) * height)
            cost = abs(math.log(width / height / _ASPECT)) + waste
            if len(columns) > 1:
                onward = max(self._onward(rows[0]) for rows in columns[1:])
                amid = sum(rows[0] not in begins for rows in columns[1:]) / len(columns)
                cost += math.inf if waste > 0.35 else 0.25 + 0.4 * (onward - 1) + 0.2 * amid
            if cost < least:
                best, least = columns, cost
        return best

    def _cut(self, steps: Sequence[float], begins: set[int], height: float) -> list[list[int]]:
        """Columns not higher than `height`, cut where few edges go on and a run begins."""
        columns: list[list[int]] = []
        start = 0
        while start < len(steps):
            sums = itertools.accumulate(itertools.islice(steps, start, None))
            end = start + max(1, sum(1 for _ in itertools.takewhile(lambda y: y <= height, sums)))
            if end < len(steps):
                end = min(
                    range(end, max(start, (start + end) // 2), -1),
                    key=lambda r: (self._onward(r), r not in begins),
                )
            columns.append(list(range(start, end)))
            start = end
        return columns

    def _onward(self, r: int) -> int:
        """How many edges run from row r - 1 into row r."""
        return sum(len(self._below.get(p, ())) for p in self.rows[r - 1])


def _settle(
    wanted: Sequence[float], gaps: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Places in the given order, at least `gaps` apart, as near as can be to the wanted ones.

    Weighted least squares by pooling neighbours that would overlap (isotonic regression).
    """
    offsets = list(itertools.accumulate(gaps, initial=0.0))
    pools: list[tuple[float, float, int]] = []  # place, weight, number of points
    for want, offset, heavy in zip(wanted, offsets, weights, strict=True):
        place, weight, count = want - offset, heavy, 1
        while pools and pools[-1][0] > place:
            before, more, others = pools.pop()
            place = (place * weight + before * more) / (weight + more)
            weight, count = weight + more, count + others
        pools.append((place, weight, count))
    level = itertools.chain.from_iterable([place] * count for place, _, count in pools)
    return [a + b for a, b in zip(level, offsets, strict=True)]


def rounded(points: Sequence[tuple[float, float]], radius: float = 6.0) -> str:
    """A path along straight lines with rounded corners."""
    path = [f"M{px(points[0][0])} {px(points[0][1])}"]
    for before, (x, y), after in zip(points, points[1:], points[2:], strict=False):
        corners = []
        for other in (before, after):
            length = math.dist(other, (x, y)) or 1.0
            r = min(radius, length / 2) / length
            corners.append(f"{px(x + (other[0] - x) * r)} {px(y + (other[1] - y) * r)}")
        path.append(f"L{corners[0]}Q{px(x)} {px(y)} {corners[1]}")
    path.append(f"L{px(points[-1][0])} {px(points[-1][1])}")
    return "".join(path)


def topological(chosen: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """An order that the edges allow, by index wherever they leave the choice."""
    waiting = Counter(b for _, b in edges)
    followers: dict[int, list[int]] = {}
    for a, b in edges:
        followers.setdefault(a, []).append(b)
    ready = [i for i in chosen if not waiting[i]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        for b in followers.get(order[-1], ()):
            waiting[b] -= 1
            if not waiting[b]:
                heapq.heappush(ready, b)
    return order


def px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
