"""A graph as a picture in plain SVG, with no other program.

A body that is too large is folded: runs of nodes that repeat become one frame, and what is still
too much is left out of the middle.  Equal graphs give equal text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from ostinato.driver.api import ConditionalKind, ConditionalNodeParams, KernelNodeParams, NodeKind
from ostinato.graph.node import Node
from ostinato.graph.show.drawing import Drawing, bend, element, group, label, picture, rect, title
from ostinato.graph.show.layout import edge, lay_out, layers
from ostinato.graph.show.outline import Outline, count_text, details, kind_text, shape_text, shorten

__all__ = ["to_svg"]

_CHARACTER, _SMALL = 7.25, 6.1  # widths in the monospaced face at 12 px and 10 px
_HEIGHT = 40.0  # of a box
_SHORTEST_FOLD = 4  # nodes: less is not worth a frame

_COLOURS = {  # fill and line
    NodeKind.KERNEL: ("#eaf1ff", "#3b6fd6"),
    NodeKind.MEMCPY: ("#e2f6f1", "#17917a"),
    NodeKind.MEMSET: ("#fdf3dc", "#c98a12"),
    NodeKind.HOST: ("#fdeaf0", "#cf4675"),
    NodeKind.CHILD_GRAPH: ("#f3effd", "#7c5bd0"),
    NodeKind.CONDITIONAL: ("#f3effd", "#7c5bd0"),
    NodeKind.MEM_ALLOC: ("#e9f6e6", "#4c9a3a"),
    NodeKind.MEM_FREE: ("#e9f6e6", "#4c9a3a"),
}
_GREY = ("#f1f3f6", "#7b8594")
_EDGES = {"edge": "#8b95a5", "early": "#3b6fd6", "again": "#7c5bd0"}
_ARROWS = "".join(
    f'<marker id="ostinato-{look}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    'markerHeight="7" markerUnits="userSpaceOnUse" orient="auto">'
    f'<path d="M0.5 0.8 7.5 4 0.5 7.2z" fill="{colour}"/></marker>'
    for look, colour in _EDGES.items()
)
_STYLE = """
    .card { fill: #ffffff; stroke: #d5dbe4; }
    text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
           monospace; font-size: 10px; fill: #5a6473; }
    .name { font-size: 12px; font-weight: 600; fill: #1b2330; }
    .title { font-size: 14px; font-weight: 700; fill: #1b2330; }
    .number { fill: #98a1af; }
    .box { stroke-opacity: 0.55; }
    .gap { fill: #ffffff; stroke: #98a1af; stroke-dasharray: 3 3; }
    .frame { fill-opacity: 0.75; stroke-opacity: 0.6; }
    .part { fill: #ffffff; fill-opacity: 0.8; stroke-opacity: 0.5; stroke-dasharray: 4 3; }
    .edge, .early, .again { fill: none; stroke: #8b95a5; stroke-width: 1.3; }
    .early { stroke: #3b6fd6; stroke-dasharray: 5 3; }
    .again { stroke: #7c5bd0; }
"""


def to_svg(top: Outline, *, max_nodes: int = 200) -> str:
    """A picture of the graph as the text of an SVG file, on a background of its own.

    Child graphs and bodies are frames within frames.  Where a body has more than `max_nodes`
    nodes, runs of nodes that repeat are drawn once with their number, and what is still too much
    is left out of the middle and said so.  Hovering over a box shows all that is known of it.
    """
    drawing, legend = _draw(top, max(2, max_nodes)), _legend(top)
    count = sum(1 for _ in top.walk())
    heading = f"graph of {count_text(count, 'node')}" if count else "empty graph"
    margin, head = 24.0, 66.0
    width = max(drawing.width, legend.width, 220.0) + 2 * margin
    lines = [
        element("defs", _ARROWS),
        label(margin, 29, heading, "title"),
        group(margin, 40, legend.lines),
        group((width - drawing.width) / 2, head, drawing.lines),
    ]
    return picture(top.summary(), _STYLE, Drawing(width, drawing.height + head + margin, lines))


def _legend(top: Outline) -> Drawing:
    """Colours with the number of nodes of each kind, arrows with the number of edges."""
    x, lines = 0.0, []
    for kind, count in sorted(Counter(n.kind for n in top.walk()).items()):
        fill, stroke = _COLOURS.get(kind, _GREY)
        text = f"{count} {kind_text(kind)}"
        lines += [rect(x, 0, 11, 11, rx=3, fill=fill, stroke=stroke), label(x + 17, 9.5, text)]
        x += 17 + len(text) * _SMALL + 18
    for early, count in sorted(Counter(e.programmatic for e in top.walk_edges()).items()):
        text = count_text(count, "programmatic edge" if early else "edge")
        way = bend([(x, 5.5), (x + 22, 5.5)])
        lines += [edge(way, "early" if early else "edge"), label(x + 29, 9.5, text)]
        x += 29 + len(text) * _SMALL + 18
    return Drawing(x, 11, lines)


# ------------------------------------------------------------------------------- what is drawn


@dataclass(frozen=True, slots=True)
class _Unit:
    """What is drawn as one: a node, a run of nodes that repeats, or nodes left out.

    `members` are indices in the body, all of them; `shown` those of the first repetition.
    """

    members: tuple[int, ...]
    shown: tuple[int, ...] = ()


def _draw(body: Outline, max_nodes: int, within: Sequence[int] | None = None) -> Drawing:
    """A body, or (`within`) some of its nodes."""
    chosen = range(len(body.nodes)) if within is None else within
    inside = set(chosen)
    edges = {
        (e.source, e.target): e.programmatic
        for e in body.edges
        if e.source in inside and e.target in inside
    }
    order = [*chain.from_iterable(layers(chosen, edges))]
    units = [_Unit((i,)) for i in order]
    if within is None and len(order) > max_nodes:
        units = _shortened(_folded(body, order), max_nodes)
    unit_of = {i: u for u, unit in enumerate(units) for i in unit.members}
    links: dict[tuple[int, int], str] = {}
    for (a, b), early in edges.items():
        ends = unit_of[a], unit_of[b]
        if ends[0] != ends[1]:
            links[ends] = "early" if early and links.get(ends) != "edge" else "edge"
    width = max((_box(body.nodes[i]).width for i in chosen if not body.inner[i]), default=0.0)
    return lay_out([_unit(body, unit, max_nodes, width) for unit in units], links)


def _unit(body: Outline, unit: _Unit, max_nodes: int, width: float) -> Drawing:
    first, last, count = min(unit.members), max(unit.members), len(unit.members)
    if unit.shown:
        name = f"{count // len(unit.shown)} times: nodes {first} to {last}"
        return _frame(name, [("", _draw(body, max_nodes, unit.shown))], _GREY, name, False)
    if count > 1:
        texts = f"… {count} nodes not drawn", f"nodes {first} to {last}"
        width = max(width, 28 + len(texts[0]) * _CHARACTER)
        lines = [rect(0, 0, width, _HEIGHT, class_="gap", rx=6), *_two(*texts)]
        return Drawing(width, _HEIGHT, lines)
    node = body.nodes[first]
    if not body.inner[first]:
        return _box(node, width)
    parts = [(part.title, _draw(part, max_nodes)) for part in body.inner[first]]
    params = node.params
    loop = isinstance(params, ConditionalNodeParams) and params.kind is ConditionalKind.WHILE
    name = f"{node.name.replace('_', ' ')} #{node.index}"
    return _frame(name, parts, _COLOURS[node.kind], _tooltip(node), loop)


def _two(name: str, below: str) -> list[str]:
    """The two lines of text in a box."""
    return [label(14, 17, name, "name"), label(14, 31.5, below)]


def _box(node: Node, width: float = 120.0) -> Drawing:
    """A node with nothing inside, at least so wide."""
    fill, stroke = _COLOURS.get(node.kind, _GREY)
    name, number = shorten(node.name, 26), f"#{node.index}"
    if isinstance(node.params, KernelNodeParams):
        config = node.params.config
        below = f"grid {shape_text(config.grid)} · block {shape_text(config.block)}"
    elif node.kind in (NodeKind.MEMCPY, NodeKind.MEMSET):
        below = details(node).rpartition(", ")[2]  # the size alone
    else:
        below = shorten(details(node), 30) or kind_text(node.kind)
    width = max(width, 28 + len(name) * _CHARACTER, 36 + len(below + number) * _SMALL)
    lines = [
        title(_tooltip(node)),
        rect(0, 0, width, _HEIGHT, class_="box", rx=6, fill=fill, stroke=stroke),
        element("path", d="M6 0.5a5.5 5.5 0 0 0-5.5 5.5v28a5.5 5.5 0 0 0 5.5 5.5z", fill=stroke),
        *_two(name, below),
        label(width - 8, 31.5, number, "number", "end"),
    ]
    return Drawing(width, _HEIGHT, lines)


def _frame(
    name: str, parts: Sequence[tuple[str, Drawing]], colour: tuple[str, str], tip: str, loop: bool
) -> Drawing:
    """A frame with a name around drawings side by side, each with a name of its own."""
    fill, stroke = colour
    pad, head = 14.0, 28.0
    named = any(part for part, _ in parts)
    top, inset = (head + 18, pad) if named else (head, 0.0)
    gutter = 26.0 if loop else 0.0  # where a WHILE's way back runs
    widths = [max(d.width, len(part) * _SMALL, 48.0) + 2 * inset for part, d in parts]
    inside = sum(widths) + pad * (len(parts) - 1)
    width = max(inside + gutter, len(name) * _CHARACTER) + 2 * pad
    height = top + (max((d.height for _, d in parts), default=0.0) or 20.0) + inset + pad
    lines = [
        title(tip),
        rect(0, 0, width, height, class_="frame", rx=8, fill=fill, stroke=stroke),
        label(pad, 19, name, "name"),
    ]
    x = (width - gutter - inside) / 2
    for (part, drawing), wide in zip(parts, widths, strict=True):
        if named:
            lines += [
                rect(x, head, wide, height - head - pad, class_="part", rx=6, stroke=stroke),
                label(x + 8, head + 13, part if drawing.height else f"{part}: empty"),
            ]
        lines.append(group(x + (wide - drawing.width) / 2, top, drawing.lines))
        x += wide + pad
    if loop:
        right, low, high = width - pad - gutter, height - pad - 16, head + 16
        way = [(right, low), (right + 20, low), (right + 20, high), (right + 1, high)]
        lines.append(edge(bend(way), "again"))
    return Drawing(width, height, lines)


def _tooltip(node: Node) -> str:
    """All that is known of a node."""
    lines = [f"#{node.index} {kind_text(node.kind)} {node.name}"]
    if isinstance(node.params, KernelNodeParams):
        config = node.params.config
        lines.append(f"grid {shape_text(config.grid)}, block {shape_text(config.block)}")
        if config.shared:
            lines.append(f"{config.shared} bytes of dynamic shared memory")
        lines += [f"  {argument.text(node.places)}" for argument in node.arguments]
    else:
        lines.append(details(node))
    return "\n".join(line for line in (*lines, node.location) if line)


# --------------------------------------------------------------------------------------- folding


def _folded(body: Outline, order: Sequence[int]) -> list[_Unit]:
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
        run = tuple(order[place : place + period * times])
        units.append(_Unit(run, run[:period] if times > 1 else ()))
        place += len(run)
    return units


def _keys(body: Outline, order: Sequence[int]) -> list[tuple[object, ...]]:
    """What must be the same of two nodes for them to be drawn once."""
    at = {index: place for place, index in enumerate(order)}
    back: dict[int, list[tuple[int, bool]]] = {i: [] for i in order}
    for e in body.edges:
        back[e.target].append((at[e.target] - at[e.source], e.programmatic))
    keys: list[tuple[object, ...]] = []
    for i in order:
        node = body.nodes[i]
        config = node.params.config if isinstance(node.params, KernelNodeParams) else None
        inner = tuple(tuple(_keys(b, range(len(b.nodes)))) for b in body.inner[i])
        keys.append((node.kind, node.name, config, tuple(sorted(back[i])), inner))
    return keys


def _repetition(keys: Sequence[int], start: int) -> tuple[int, int]:
    """The period whose repetition from `start` covers the most, and how often it repeats."""
    best = (1, 1)
    left = len(keys) - start
    for period in range(1, left // 2 + 1):
        same = period
        while same < left and keys[start + same] == keys[start + same - period]:
            same += 1
        times = same // period
        if times > 1 and period * times >= max(_SHORTEST_FOLD, best[0] * best[1] + 1):
            best = (period, times)
    return best


def _shortened(units: list[_Unit], limit: int) -> list[_Unit]:
    """At most about `limit` nodes: those in the middle of the order are left out."""
    sizes = [len(u.shown) or 1 for u in units]
    if sum(sizes) <= limit:
        return units
    head = sum(size <= limit // 2 for size in accumulate(sizes))
    room = limit - 1 - sum(sizes[:head])
    tail = len(units) - sum(size <= room for size in accumulate(reversed(sizes)))
    middle = tuple(chain.from_iterable(u.members for u in units[head:tail]))
    return [*units[:head], _Unit(middle), *units[tail:]]
