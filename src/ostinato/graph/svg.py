"""A graph as a picture: a layered drawing in plain SVG, made here with no other program.

    fold ─ what repeats, and what is too much, becomes one frame      _fold
    layer ─ longest path from the sources, wide layers split          _layers
    order ─ barycentres, the order with the fewest crossings kept     _order
    place ─ straight over parents and children as far as they fit     _place
    wrap ─ the layers run down in columns, as text does in a paper    _wrap

Edges that pass layers go through points of their own in each ("ghosts"), so that no edge runs
through a box.  The same graph gives the same text, always.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from ostinato.driver.api import ConditionalKind, ConditionalNodeParams, KernelNodeParams, NodeKind
from ostinato.graph.node import Node
from ostinato.graph.render import (
    Outline,
    details,
    kind_text,
    outline,
    printable,
    shape_text,
    shorten,
)

if TYPE_CHECKING:
    from ostinato.graph.graph import Graph

__all__ = ["to_svg"]

_CHARACTER = 7.25  # of the monospaced face at 12 px
_SMALL = 6.1  # of the same at 10 px
_BOX_HEIGHT = 40.0
_NAME_WIDTH = 26
_GAP_X, _GAP_Y = 22.0, 22.0
_LANE = 7.0
_WIDEST = 8  # boxes side by side
_ASPECT = 1.5  # width to height that columns aim at
_TALLEST = 640.0  # what is lower than this is not wrapped
_SHORTEST_FOLD = 4  # nodes: less is not worth a frame


@dataclass(frozen=True, slots=True)
class _Colour:
    fill: str
    line: str


_BLUE = _Colour("#eaf1ff", "#3b6fd6")
_TEAL = _Colour("#e2f6f1", "#17917a")
_AMBER = _Colour("#fdf3dc", "#c98a12")
_ROSE = _Colour("#fdeaf0", "#cf4675")
_VIOLET = _Colour("#f3effd", "#7c5bd0")
_GREEN = _Colour("#e9f6e6", "#4c9a3a")
_GREY = _Colour("#f1f3f6", "#7b8594")

_COLOURS = {
    NodeKind.KERNEL: _BLUE,
    NodeKind.MEMCPY: _TEAL,
    NodeKind.MEMSET: _AMBER,
    NodeKind.HOST: _ROSE,
    NodeKind.CHILD_GRAPH: _VIOLET,
    NodeKind.CONDITIONAL: _VIOLET,
    NodeKind.MEM_ALLOC: _GREEN,
    NodeKind.MEM_FREE: _GREEN,
}

_STYLE = """
    text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
           monospace; font-size: 10px; fill: #5a6473; }
    .name { font-size: 12px; font-weight: 600; fill: #1b2330; }
    .title { font-size: 14px; font-weight: 700; fill: #1b2330; }
    .number { fill: #98a1af; }
    .edge { fill: none; stroke: #8b95a5; stroke-width: 1.3; }
    .early { stroke: #3b6fd6; stroke-dasharray: 5 3; }
    .again { stroke: #7c5bd0; }
"""


def to_svg(graph: Graph, *, max_nodes: int = 200) -> str:
    """A picture of the graph as the text of an SVG file, on a background of its own.

    Child graphs and bodies are frames within frames.  Where a body has more than `max_nodes`
    nodes, runs of nodes that repeat are drawn once with their number, and what is still too much
    is left out of the middle and said so.  Hovering over a box shows all that is known of it.
    """
    top = outline(graph)
    drawing = _draw(top, max(2, max_nodes))
    chips, chips_width = _legend(top)
    count = sum(1 for _ in top.walk())
    title = f"graph of {count} node{'s' * (count != 1)}" if count else "empty graph"
    margin, head = 24.0, 66.0
    width = max(drawing.width, chips_width, 220.0) + 2 * margin
    height = drawing.height + head + margin
    x = (width - drawing.width) / 2
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(width)}" height="{_n(height)}" '
            f'viewBox="0 0 {_n(width)} {_n(height)}" role="img">',
            f"  <title>{_text(top.summary())}</title>",
            f"  <style>{_STYLE}  </style>",
            "  <defs>",
            *(_marker(name, colour) for name, colour in _MARKERS.items()),
            "  </defs>",
            f'  <rect x="0.5" y="0.5" width="{_n(width - 1)}" height="{_n(height - 1)}" rx="10" '
            'fill="#ffffff" stroke="#d5dbe4"/>',
            f'  <text class="title" x="{_n(margin)}" y="29">{title}</text>',
            f'  <g transform="translate({_n(margin)} 40)">',
            *chips,
            "  </g>",
            f'  <g transform="translate({_n(x)} {_n(head)})">',
            *drawing.lines,
            "  </g>",
            "</svg>",
            "",
        )
    )


_MARKERS = {"arrow": "#8b95a5", "early": "#3b6fd6", "again": "#7c5bd0"}


def _marker(name: str, colour: str) -> str:
    return (
        f'    <marker id="ostinato-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0.5 0.8 7.5 4 0.5 7.2z" fill="{colour}"/></marker>'
    )


def _legend(top: Outline) -> tuple[list[str], float]:
    """Colours with the number of nodes of each kind, and how wide that is."""
    lines: list[str] = []
    x = 0.0
    counts = Counter(n.kind for n in top.walk())
    for kind, count in sorted(counts.items()):
        colour = _COLOURS.get(kind, _GREY)
        label = f"{count} {kind_text(kind)}"
        lines.append(
            f'    <rect x="{_n(x)}" y="0" width="11" height="11" rx="3" fill="{colour.fill}" '
            f'stroke="{colour.line}"/><text x="{_n(x + 17)}" y="9.5">{label}</text>'
        )
        x += 17 + len(label) * _SMALL + 18
    kinds = [(False, "edge"), (True, "programmatic edge")]
    for early, label in kinds:
        count = sum(1 for e in top.walk_edges() if e.programmatic is early)
        if count:
            label = f"{count} {label}" + "s" * (count > 1)
            lines.append(
                f'    <path class="edge{" early" * early}" d="M{_n(x)} 5.5h22" marker-end='
                f'"url(#ostinato-{"early" if early else "arrow"})"/>'
                f'<text x="{_n(x + 29)}" y="9.5">{label}</text>'
            )
            x += 29 + len(label) * _SMALL + 18
    return lines, x


# ------------------------------------------------------------------------------- what is drawn


@dataclass(frozen=True, slots=True)
class _Drawing:
    width: float
    height: float
    lines: list[str]


@dataclass(frozen=True, slots=True)
class _Unit:
    """What is drawn as one: a node, a run of nodes that repeats, or nodes left out.

    `members` are indices in the body, all of them; `shown` those of the first repetition.
    """

    members: tuple[int, ...]
    shown: tuple[int, ...] = ()
    times: int = 1


def _draw(body: Outline, max_nodes: int, *, within: frozenset[int] | None = None) -> _Drawing:
    """A body, or (`within`) some of its nodes."""
    chosen = [n.index for n in body.nodes if within is None or n.index in within]
    edges = {(e.source, e.target): e.programmatic for e in body.edges}
    edges = {(a, b): v for (a, b), v in edges.items() if {a, b} <= set(chosen)}
    order = _topological(chosen, list(edges))
    units = [_Unit((i,)) for i in order]
    folded = _fold(body, order) if within is None else []
    if within is None and len(order) > max_nodes:
        units = _shorten(folded, max_nodes)
    starts = {i for u in folded for i in u.members[:: len(u.shown) or None] if u.times > 1}
    firsts = {k for k, u in enumerate(units) if u.members[0] in starts}
    unit_of = {i: u for u, unit in enumerate(units) for i in unit.members}
    links: dict[tuple[int, int], bool] = {}
    for (a, b), early in edges.items():
        ends = (unit_of[a], unit_of[b])
        if ends[0] != ends[1]:
            links[ends] = early and links.get(ends, True)
    boxes = [_unit_drawing(body, unit, max_nodes) for unit in units]
    plain = max((b.width for b, u in zip(boxes, units, strict=True) if _is_box(body, u)), default=0)
    boxes = [
        _box(body.nodes[u.members[0]], plain) if _is_box(body, u) else b
        for b, u in zip(boxes, units, strict=True)
    ]
    return _Layout([(b.width, b.height) for b in boxes], links, firsts).drawing(boxes)


def _is_box(body: Outline, unit: _Unit) -> bool:
    return len(unit.members) == 1 and not body.inner[unit.members[0]]


def _unit_drawing(body: Outline, unit: _Unit, max_nodes: int) -> _Drawing:
    first, last = min(unit.members), max(unit.members)
    if unit.times > 1:
        inner = _draw(body, max_nodes, within=frozenset(unit.shown))
        title = f"{unit.times} times: nodes {first} to {last}"
        return _frame(title, [("", inner)], _GREY, "")
    if len(unit.members) > 1:
        return _note(f"… {len(unit.members)} nodes not drawn", f"nodes {first} to {last}")
    node = body.nodes[first]
    if not body.inner[first]:
        return _box(node)
    loop = isinstance(node.params, ConditionalNodeParams) and (
        node.params.kind is ConditionalKind.WHILE
    )
    title = f"{node.name.replace('_', ' ')} #{node.index}"
    parts = [(part.title, _draw(part, max_nodes)) for part in body.inner[first]]
    return _frame(title, parts, _COLOURS[node.kind], _tooltip(node), loop=loop)


def _box(node: Node, width: float = 0.0) -> _Drawing:
    colour = _COLOURS.get(node.kind, _GREY)
    name = shorten(node.name, _NAME_WIDTH)
    if isinstance(node.params, KernelNodeParams):
        config = node.params.config
        below = f"grid {shape_text(config.grid)} · block {shape_text(config.block)}"
    else:
        text = details(node).rpartition(", ")[2] if node.kind in _SIZED else details(node)
        below = shorten(text, 30) or kind_text(node.kind)
    number = f"#{node.index}"
    width = max(
        width,
        28 + len(name) * _CHARACTER,
        36 + (len(below) + len(number)) * _SMALL,
        120.0,
    )
    w, h = _n(width), _n(_BOX_HEIGHT)
    lines = [
        f"<g><title>{_text(_tooltip(node))}</title>",
        f'<rect width="{w}" height="{h}" rx="6" fill="{colour.fill}" stroke="{colour.line}" '
        'stroke-opacity="0.55"/>',
        f'<path d="M6 0.5h-0a5.5 5.5 0 0 0-5.5 5.5v{_n(_BOX_HEIGHT - 12)}a5.5 5.5 0 0 0 5.5 5.5z" '
        f'fill="{colour.line}"/>',
        f'<text class="name" x="14" y="17">{_text(name)}</text>',
        f'<text x="14" y="31.5">{_text(below)}</text>',
        f'<text class="number" x="{_n(width - 8)}" y="31.5" text-anchor="end">{number}</text></g>',
    ]
    return _Drawing(width, _BOX_HEIGHT, lines)


_SIZED = (NodeKind.MEMCPY, NodeKind.MEMSET)


def _note(first: str, second: str) -> _Drawing:
    width = 28 + max(len(first), len(second)) * _CHARACTER
    lines = [
        f'<rect width="{_n(width)}" height="{_n(_BOX_HEIGHT)}" rx="6" fill="#ffffff" '
        'stroke="#98a1af" stroke-dasharray="3 3"/>',
        f'<text class="name" x="14" y="17">{_text(first)}</text>',
        f'<text x="14" y="31.5">{_text(second)}</text>',
    ]
    return _Drawing(width, _BOX_HEIGHT, lines)


def _frame(
    title: str,
    parts: Sequence[tuple[str, _Drawing]],
    colour: _Colour,
    tooltip: str,
    *,
    loop: bool = False,
) -> _Drawing:
    """A frame with a title around drawings side by side, each with a title of its own."""
    pad, head, between = 14.0, 28.0, 14.0
    gutter = 26.0 if loop else 0.0  # where a WHILE's way back runs
    names = any(name for name, _ in parts)
    top = head + (18.0 if names else 0.0)
    widths = [max(d.width, len(name) * _SMALL, 48.0) for name, d in parts]
    inside = sum(widths) + between * (len(parts) - 1) + 2 * pad * names * len(parts)
    width = max(inside + 2 * pad + gutter, 2 * pad + len(title) * _CHARACTER)
    tall = max((d.height for _, d in parts), default=0.0) or 20.0
    height = top + tall + pad * (2 if names else 1)
    lines = [
        f"<g><title>{_text(tooltip or title)}</title>",
        f'<rect width="{_n(width)}" height="{_n(height)}" rx="8" fill="{colour.fill}" '
        f'fill-opacity="0.75" stroke="{colour.line}" stroke-opacity="0.6"/>',
        f'<text class="name" x="{_n(pad)}" y="19">{_text(title)}</text></g>',
    ]
    x = (width - gutter - inside) / 2
    for (name, drawing), w in zip(parts, widths, strict=True):
        if names:
            lines.append(
                f'<rect x="{_n(x)}" y="{_n(head)}" width="{_n(w + 2 * pad)}" '
                f'height="{_n(height - head - pad)}" rx="6" fill="#ffffff" fill-opacity="0.8" '
                f'stroke="{colour.line}" stroke-opacity="0.5" stroke-dasharray="4 3"/>'
                f'<text x="{_n(x + 8)}" y="{_n(head + 13)}">'
                f"{_text(name)}{'' if drawing.height else ': empty'}</text>"
            )
            x += pad
        lines.append(f'<g transform="translate({_n(x + (w - drawing.width) / 2)} {_n(top)})">')
        lines += [*drawing.lines, "</g>"]
        x += w + (pad if names else 0) + between
    if loop:
        right, low, high = width - pad - gutter, height - pad - 16, head + 16
        way = [(right, low), (right + 20, low), (right + 20, high), (right + 1, high)]
        lines.append(
            f'<path class="edge again" d="{_rounded(way)}" marker-end="url(#ostinato-again)"/>'
        )
    return _Drawing(width, height, lines)


def _tooltip(node: Node) -> str:
    lines = [f"#{node.index} {kind_text(node.kind)} {node.name}"]
    if isinstance(node.params, KernelNodeParams):
        config = node.params.config
        lines.append(f"grid {shape_text(config.grid)}, block {shape_text(config.block)}")
        if config.shared:
            lines.append(f"{config.shared} bytes of dynamic shared memory")
        lines += [f"  {argument}" for argument in node.arguments]
    else:
        lines.append(details(node))
    lines.append(node.location or "")
    return "\n".join(line for line in lines if line)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(text: str) -> str:
    """Text for XML, which has no words at all for most control characters."""
    return escape("\n".join(printable(line) for line in text.split("\n")))


# --------------------------------------------------------------------------------------- folding


def _topological(chosen: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
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


def _fold(body: Outline, order: Sequence[int]) -> list[_Unit]:
    """Runs of the order that repeat, each as one unit; the rest node by node.

    A run repeats if kinds, names and launch sizes do and if every node depends on nodes equally
    far back; so a layer that also waits for something outside of the layers is not folded.
    """
    numbers: dict[object, int] = {}
    keys = [numbers.setdefault(key, len(numbers)) for key in _keys(body, order)]
    units: list[_Unit] = []
    place = 0
    while place < len(order):
        period, times = _repetition(keys, place)
        if period * times >= _SHORTEST_FOLD and times > 1:
            run = tuple(order[place : place + period * times])
            units.append(_Unit(run, run[:period], times))
            place += period * times
        else:
            units.append(_Unit((order[place],)))
            place += 1
    return units


def _keys(body: Outline, order: Sequence[int]) -> list[tuple[object, ...]]:
    """What must be the same of two nodes for them to be drawn once."""
    at = {index: place for place, index in enumerate(order)}
    back: dict[int, list[tuple[int, bool]]] = {}
    for e in body.edges:
        back.setdefault(e.target, []).append((at[e.target] - at[e.source], e.programmatic))
    keys: list[tuple[object, ...]] = []
    for i in order:
        node = body.nodes[i]
        config = node.params.config if isinstance(node.params, KernelNodeParams) else None
        inner = tuple(tuple(_keys(b, range(len(b.nodes)))) for b in body.inner[i])
        keys.append((node.kind, node.name, config, tuple(sorted(back.get(i, ()))), inner))
    return keys


def _repetition(keys: Sequence[object], start: int) -> tuple[int, int]:
    """The period whose repetition from `start` covers the most, and how often it repeats."""
    best = (1, 1)
    left = len(keys) - start
    for period in range(1, left // 2 + 1):
        if keys[start] != keys[start + period]:
            continue
        same = period
        while same < left and keys[start + same] == keys[start + same - period]:
            same += 1
        times = same // period
        if times > 1 and period * times > best[0] * best[1]:
            best = (period, times)
    return best


def _shorten(units: list[_Unit], limit: int) -> list[_Unit]:
    """At most about `limit` nodes: those in the middle of the order are left out."""
    if sum(len(u.shown) or 1 for u in units) <= limit:
        return units
    head: list[_Unit] = []
    tail: list[_Unit] = []
    room = limit - 1
    front, end = 0, len(units)
    while front < end:
        unit = units[front] if len(head) <= len(tail) else units[end - 1]
        room -= len(unit.shown) or 1
        if room < 0:
            break
        if len(head) <= len(tail):
            head.append(unit)
            front += 1
        else:
            tail.insert(0, unit)
            end -= 1
    middle = tuple(itertools.chain.from_iterable(u.members for u in units[front:end]))
    return [*head, _Unit(middle), *tail]


# ---------------------------------------------------------------------------------------- layout


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
class _Layout:
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

    def drawing(self, boxes: Sequence[_Drawing]) -> _Drawing:
        if not boxes:
            return _Drawing(0.0, 0.0, [])
        self._layers()
        self._order()
        self._place()
        return self._wrap(boxes)

    def _layers(self) -> None:
        count = len(self.sizes)
        order = _topological(range(count), list(self.links))
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

    def _wrap(self, boxes: Sequence[_Drawing]) -> _Drawing:
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
            lines.append(f'<g transform="translate({_n(left)} {_n(top)})">')
            lines += [*box.lines, "</g>"]
        return _Drawing(
            x, max(c.bottom + _LANE * c.onward + 8 * bool(most) for c in columns), lines
        )

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
        path = [f"M{_n(x)} {_n(y)}"]
        for a, b in itertools.pairwise(route):
            here, there = self.places[a], self.places[b]
            x, (top, bottom) = self._middle(b), self._ends(b)
            path.append(f"V{_n(here.bottom)}" if self._ends(a)[1] != here.bottom else "")
            if here.column is there.column:
                half = (here.bottom + there.top) / 2
                start = self._middle(a)
                path.append(
                    f"V{_n(there.top)}"
                    if abs(start - x) < 0.05
                    else f"C{_n(start)} {_n(half)} {_n(x)} {_n(half)} {_n(x)} {_n(there.top)}"
                )
            else:
                lane = _LANE * here.column.used
                here.column.used += 1
                low, high = here.bottom + 9 + lane, there.top - 12 - lane
                side = here.column.right + 12 + lane
                way = [(self._middle(a), here.bottom), (self._middle(a), low), (side, low)]
                way += [(side, high), (x, high), (x, there.top)]
                path.append(_rounded(way).replace("M", "L", 1))
            end = top if b == route[-1] else bottom
            path.append(f"V{_n(end)}" if end != there.top else "")
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


def _rounded(points: Sequence[tuple[float, float]], radius: float = 6.0) -> str:
    """A path along straight lines with rounded corners."""
    path = [f"M{_n(points[0][0])} {_n(points[0][1])}"]
    for before, (x, y), after in zip(points, points[1:], points[2:], strict=False):
        corners = []
        for other in (before, after):
            length = math.dist(other, (x, y)) or 1.0
            r = min(radius, length / 2) / length
            corners.append(f"{_n(x + (other[0] - x) * r)} {_n(y + (other[1] - y) * r)}")
        path.append(f"L{corners[0]}Q{_n(x)} {_n(y)} {corners[1]}")
    path.append(f"L{_n(points[-1][0])} {_n(points[-1][1])}")
    return "".join(path)
