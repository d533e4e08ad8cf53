"""A graph as a picture: a layered drawing in plain SVG, made here with no other program.

What repeats, and what is too much, becomes one frame (`_fold`); `graph.layout` says where all goes.
The same graph gives the same text, always.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from ostinato.driver.api import ConditionalKind, ConditionalNodeParams, KernelNodeParams, NodeKind
from ostinato.graph.node import Node
from ostinato.graph.show.layout import Drawing, Layout, px, rounded, topological
from ostinato.graph.show.outline import (
    Outline,
    details,
    kind_text,
    printable,
    shape_text,
    shorten,
)

__all__ = ["to_svg"]

_CHARACTER = 7.25  # of the monospaced face at 12 px
_SMALL = 6.1  # of the same at 10 px
_BOX_HEIGHT = 40.0
_NAME_WIDTH = 26
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


def to_svg(top: Outline, *, max_nodes: int = 200) -> str:
    """A picture of the graph as the text of an SVG file, on a background of its own.

    Child graphs and bodies are frames within frames.  Where a body has more than `max_nodes`
    nodes, runs of nodes that repeat are drawn once with their number, and what is still too much
    is left out of the middle and said so.  Hovering over a box shows all that is known of it.
    """
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
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{px(width)}" height="{px(height)}" '
            f'viewBox="0 0 {px(width)} {px(height)}" role="img">',
            f"  <title>{_text(top.summary())}</title>",
            f"  <style>{_STYLE}  </style>",
            "  <defs>",
            *(_marker(name, colour) for name, colour in _MARKERS.items()),
            "  </defs>",
            f'  <rect x="0.5" y="0.5" width="{px(width - 1)}" height="{px(height - 1)}" rx="10" '
            'fill="#ffffff" stroke="#d5dbe4"/>',
            f'  <text class="title" x="{px(margin)}" y="29">{title}</text>',
            f'  <g transform="translate({px(margin)} 40)">',
            *chips,
            "  </g>",
            f'  <g transform="translate({px(x)} {px(head)})">',
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
            f'    <rect x="{px(x)}" y="0" width="11" height="11" rx="3" fill="{colour.fill}" '
            f'stroke="{colour.line}"/><text x="{px(x + 17)}" y="9.5">{label}</text>'
        )
        x += 17 + len(label) * _SMALL + 18
    kinds = [(False, "edge"), (True, "programmatic edge")]
    for early, label in kinds:
        count = sum(1 for e in top.walk_edges() if e.programmatic is early)
        if count:
            label = f"{count} {label}" + "s" * (count > 1)
            lines.append(
                f'    <path class="edge{" early" * early}" d="M{px(x)} 5.5h22" marker-end='
                f'"url(#ostinato-{"early" if early else "arrow"})"/>'
                f'<text x="{px(x + 29)}" y="9.5">{label}</text>'
            )
            x += 29 + len(label) * _SMALL + 18
    return lines, x


# ------------------------------------------------------------------------------- what is drawn


@dataclass(frozen=True, slots=True)
class _Unit:
    """What is drawn as one: a node, a run of nodes that repeats, or nodes left out.

    `members` are indices in the body, all of them; `shown` those of the first repetition.
    """

    members: tuple[int, ...]
    shown: tuple[int, ...] = ()
    times: int = 1


def _draw(body: Outline, max_nodes: int, *, within: frozenset[int] | None = None) -> Drawing:
    """A body, or (`within`) some of its nodes."""
    chosen = [n.index for n in body.nodes if within is None or n.index in within]
    edges = {(e.source, e.target): e.programmatic for e in body.edges}
    edges = {(a, b): v for (a, b), v in edges.items() if {a, b} <= set(chosen)}
    order = topological(chosen, list(edges))
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
    return Layout([(b.width, b.height) for b in boxes], links, firsts).drawing(boxes)


def _is_box(body: Outline, unit: _Unit) -> bool:
    return len(unit.members) == 1 and not body.inner[unit.members[0]]


def _unit_drawing(body: Outline, unit: _Unit, max_nodes: int) -> Drawing:
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


def _box(node: Node, width: float = 0.0) -> Drawing:
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
    w, h = px(width), px(_BOX_HEIGHT)
    lines = [
        f"<g><title>{_text(_tooltip(node))}</title>",
        f'<rect width="{w}" height="{h}" rx="6" fill="{colour.fill}" stroke="{colour.line}" '
        'stroke-opacity="0.55"/>',
        f'<path d="M6 0.5h-0a5.5 5.5 0 0 0-5.5 5.5v{px(_BOX_HEIGHT - 12)}a5.5 5.5 0 0 0 5.5 5.5z" '
        f'fill="{colour.line}"/>',
        f'<text class="name" x="14" y="17">{_text(name)}</text>',
        f'<text x="14" y="31.5">{_text(below)}</text>',
        f'<text class="number" x="{px(width - 8)}" y="31.5" text-anchor="end">{number}</text></g>',
    ]
    return Drawing(width, _BOX_HEIGHT, lines)


_SIZED = (NodeKind.MEMCPY, NodeKind.MEMSET)


def _note(first: str, second: str) -> Drawing:
    width = 28 + max(len(first), len(second)) * _CHARACTER
    lines = [
        f'<rect width="{px(width)}" height="{px(_BOX_HEIGHT)}" rx="6" fill="#ffffff" '
        'stroke="#98a1af" stroke-dasharray="3 3"/>',
        f'<text class="name" x="14" y="17">{_text(first)}</text>',
        f'<text x="14" y="31.5">{_text(second)}</text>',
    ]
    return Drawing(width, _BOX_HEIGHT, lines)


def _frame(
    title: str,
    parts: Sequence[tuple[str, Drawing]],
    colour: _Colour,
    tooltip: str,
    *,
    loop: bool = False,
) -> Drawing:
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
        f'<rect width="{px(width)}" height="{px(height)}" rx="8" fill="{colour.fill}" '
        f'fill-opacity="0.75" stroke="{colour.line}" stroke-opacity="0.6"/>',
        f'<text class="name" x="{px(pad)}" y="19">{_text(title)}</text></g>',
    ]
    x = (width - gutter - inside) / 2
    for (name, drawing), w in zip(parts, widths, strict=True):
        if names:
            lines.append(
                f'<rect x="{px(x)}" y="{px(head)}" width="{px(w + 2 * pad)}" '
                f'height="{px(height - head - pad)}" rx="6" fill="#ffffff" fill-opacity="0.8" '
                f'stroke="{colour.line}" stroke-opacity="0.5" stroke-dasharray="4 3"/>'
                f'<text x="{px(x + 8)}" y="{px(head + 13)}">'
                f"{_text(name)}{'' if drawing.height else ': empty'}</text>"
            )
            x += pad
        lines.append(f'<g transform="translate({px(x + (w - drawing.width) / 2)} {px(top)})">')
        lines += [*drawing.lines, "</g>"]
        x += w + (pad if names else 0) + between
    if loop:
        right, low, high = width - pad - gutter, height - pad - 16, head + 16
        way = [(right, low), (right + 20, low), (right + 20, high), (right + 1, high)]
        lines.append(
            f'<path class="edge again" d="{rounded(way)}" marker-end="url(#ostinato-again)"/>'
        )
    return Drawing(width, height, lines)


def _tooltip(node: Node) -> str:
    lines = [f"#{node.index} {kind_text(node.kind)} {node.name}"]
    if isinstance(node.params, KernelNodeParams):
        config = node.params.config
        lines.append(f"grid {shape_text(config.grid)}, block {shape_text(config.block)}")
        if config.shared:
            lines.append(f"{config.shared} bytes of dynamic shared memory")
        lines += [f"  {argument.text(node.places)}" for argument in node.arguments]
    else:
        lines.append(details(node))
    lines.append(node.location or "")
    return "\n".join(line for line in lines if line)


def _text(text: str) -> str:
    """Text for XML, which has no words at all for most control characters."""
    return escape("\n".join(printable(line) for line in text.split("\n")))


# --------------------------------------------------------------------------------------- folding


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
