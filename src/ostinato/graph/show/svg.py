"""A graph as a picture in plain SVG, without another program.  It follows the reader's light or
dark scheme.  Equal graphs give equal text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from graphlib import TopologicalSorter
from itertools import chain

from ostinato.driver.api import ConditionalKind, ConditionalNodeParams, KernelNodeParams, NodeKind
from ostinato.graph.node import Node
from ostinato.graph.show.digest import folded
from ostinato.graph.show.drawing import Drawing
from ostinato.graph.show.layout import lay_out
from ostinato.graph.show.outline import (
    Outline,
    count_text,
    details,
    kind_text,
    launch_text,
    shape_text,
    shorten,
)

_CHARACTER, _SMALL = 7.25, 6.1  # widths in the monospaced face at 12 px and 10 px
_HEIGHT = 40.0  # of a box
_GAP, _PAD = 22.0, 14.0  # between boxes, and in a frame
_HEADS = {"frame": (28, _PAD, 19, "name"), "part": (18, 8, 13, "")}  # height, the name's x, y, look

_COLOURS = {
    NodeKind.KERNEL: {"fill": "#eaf1ff", "stroke": "#3b6fd6"},
    NodeKind.MEMCPY: {"fill": "#e2f6f1", "stroke": "#17917a"},
    NodeKind.MEMSET: {"fill": "#fdf3dc", "stroke": "#c98a12"},
    NodeKind.HOST: {"fill": "#fdeaf0", "stroke": "#cf4675"},
    NodeKind.CHILD_GRAPH: {"fill": "#f3effd", "stroke": "#7c5bd0"},
    NodeKind.CONDITIONAL: {"fill": "#f3effd", "stroke": "#7c5bd0"},
    NodeKind.MEM_ALLOC: {"fill": "#e9f6e6", "stroke": "#4c9a3a"},
    NodeKind.MEM_FREE: {"fill": "#e9f6e6", "stroke": "#4c9a3a"},
}
_GREY = {"fill": "#f1f3f6", "stroke": "#7b8594"}
_EDGES = {"edge": "#8b95a5", "early": "#3b6fd6", "again": "#7c5bd0"}
_ARROW = (
    '<marker id="ostinato-{look}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    'markerHeight="7" markerUnits="userSpaceOnUse" orient="auto">'
    '<path d="M0.5 0.8 7.5 4 0.5 7.2z" fill="{colour}"/></marker>'
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
    .frame, .part { fill-opacity: 0.75; stroke-opacity: 0.6; }
    .part { stroke-dasharray: 4 3; }
    .edge, .early, .again { fill: none; stroke-width: 1.3; }
    .edge { stroke: #8b95a5; marker-end: url(#ostinato-edge); }
    .early { stroke: #3b6fd6; stroke-dasharray: 5 3; marker-end: url(#ostinato-early); }
    .again { stroke: #7c5bd0; marker-end: url(#ostinato-again); }
    @media (prefers-color-scheme: dark) {
      .card { fill: #14181f; stroke: #303947; }
      text { fill: #a9b3c1; }
      .name, .title { fill: #f0f3f7; }
      .box { fill-opacity: 0.12; stroke-opacity: 0.9; }
      .gap { fill: #14181f; }
      .frame, .part { fill-opacity: 0.05; }
    }
"""


def to_svg(top: Outline, *, max_nodes: int = 200) -> str:
    """Returns a picture of the graph as the text of an SVG file, on a background of its own.

    Child graphs and bodies are frames within frames.  In a body of more than `max_nodes` nodes,
    repeated runs of nodes are drawn once with the number of repeats, and if there are still too
    many, the middle is replaced by a note.  Hovering over a box shows all data of it.
    """
    graph, legend = _draw(top, max(2, max_nodes)), _legend(top)
    count = sum(1 for _ in top.walk())
    heading = f"graph of {count_text(count, 'node')}" if count else "empty graph"
    picture = Drawing(max(graph.width, legend.width, 220.0) + 48, graph.height + 90)
    picture.text(24, 29, heading, "title")
    picture.place(24, 40, legend)
    picture.place((picture.width - graph.width) / 2, 66, graph)
    return picture.svg(top.summary(), _STYLE)


def _legend(top: Outline) -> Drawing:
    """Draws colours with the number of nodes of each kind, arrows with the number of edges."""
    legend = Drawing()
    legend.lines += [_ARROW.format(look=look, colour=colour) for look, colour in _EDGES.items()]

    def words(left: float, text: str) -> None:
        legend.text(legend.width + left, 9.5, text)
        legend.width += left + len(text) * _SMALL + 18

    for kind, count in sorted(Counter(n.kind for n in top.walk()).items()):
        legend.rect(legend.width, 0, 11, 11, rx=3, **_COLOURS.get(kind, _GREY))
        words(17, f"{count} {kind_text(kind)}")
    for early, count in sorted(Counter(e.programmatic for e in top.walk_edges()).items()):
        legend.add("path", d=f"M{legend.width:g} 5.5h22", class_="early" if early else "edge")
        words(29, count_text(count, "programmatic edge" if early else "edge"))
    return legend


_Unit = list[tuple[int, ...]]
"""A unit of the picture: the indices of its nodes, one tuple for each repeat.
A node by itself is [(index,)]; several nodes that do not repeat are left out of the picture."""


def _draw(body: Outline, max_nodes: int, within: Sequence[int] | None = None) -> Drawing:
    """Draws a body, or (`within`) some of its nodes."""
    nodes = within or range(len(body.nodes))
    into = {i: [e for e in body.after(i) if e.source in nodes] for i in nodes}
    order = [*TopologicalSorter({i: [e.source for e in into[i]] for i in into}).static_order()]
    units: list[_Unit] = [[(i,)] for i in order]
    if within is None and len(order) > max_nodes:
        units = folded(body, order)
    if len(units) > max_nodes:
        middle = slice(max_nodes // 2, -(max_nodes // 2))
        units[middle] = [[tuple(chain(*chain(*units[middle])))]]
    unit_of = {i: u for u, unit in enumerate(units) for i in chain(*unit)}
    links: dict[tuple[int, int], str] = {}
    for e in chain(*into.values()):
        ends = unit_of[e.source], unit_of[e.target]
        if ends[0] != ends[1] and links.get(ends) != "edge":
            links[ends] = "early" if e.programmatic else "edge"
    width = max((_box(body.nodes[i]).width for i in order if not body.inner[i]), default=0.0)
    return lay_out([_unit(body, unit, max_nodes, width) for unit in units], links, _GAP)


def _unit(body: Outline, unit: _Unit, max_nodes: int, width: float) -> Drawing:
    first, *others = chain(*unit)
    nodes = f"nodes {min(first, *others)} to {max(first, *others)}" if others else ""
    if len(unit) > 1:
        repeated = _draw(body, max_nodes, unit[0])
        return _frame(f"{len(unit)} times: {nodes}", repeated, nodes, class_="frame", **_GREY)
    if others:
        return _card(f"… {len(unit[0])} nodes not drawn", nodes, "", width, nodes, class_="gap")
    node = body.nodes[first]
    if not body.inner[first]:
        return _box(node, width)
    look = _COLOURS.get(node.kind, _GREY)
    parts = []
    for part in body.inner[first]:
        drawn = _draw(part, max_nodes)
        title = part.title if drawn.height else f"{part.title}: empty"
        parts.append(_frame(title, drawn, title, class_="part", **look | {"fill": "#ffffff"}))
    if isinstance(node.params, ConditionalNodeParams) and node.params.kind is ConditionalKind.WHILE:
        back, low = Drawing(12), parts[0].height - 16
        back.add("path", d=f"M-14 {low:g}h14q6 0 6-6V22q0-6-6-6h-13", class_="again")
        parts.append(back)
    name, tip = f"{node.name.replace('_', ' ')} #{first}", _tooltip(node, details(node))
    return _frame(name, lay_out(parts, {}, _PAD), tip, class_="frame", **look)


def _card(name: str, below: str, number: str, width: float, tip: str, **look: str) -> Drawing:
    """Draws two lines of text in a box of at least this width."""
    needed = 28 + len(name) * _CHARACTER, 36 + len(below + number) * _SMALL
    card = Drawing(max(width, *needed), _HEIGHT)
    card.add("title", tip)
    card.rect(0, 0, card.width, _HEIGHT, rx=6, **look)
    card.text(14, 17, name, "name")
    card.text(14, 31.5, below)
    card.text(card.width - 8, 31.5, number, "number", "end")
    return card


def _box(node: Node, width: float = 120.0) -> Drawing:
    """Draws a node with nothing inside, in a box of at least this width."""
    name, look, known = shorten(node.name, 26), _COLOURS.get(node.kind, _GREY), [details(node)]
    below = shorten(known[0], 30) or kind_text(node.kind)
    if isinstance(node.params, KernelNodeParams):
        config = node.params.config
        below = f"grid {shape_text(config.grid)} · block {shape_text(config.block)}"
        known = [launch_text(config), *(f"  {a.text(node.places)}" for a in node.arguments)]
    elif node.kind in (NodeKind.MEMCPY, NodeKind.MEMSET):
        below = known[0].rpartition(", ")[2]  # the size alone
    box = _card(name, below, f"#{node.index}", width, _tooltip(node, *known), class_="box", **look)
    edge = "M6 0.5a5.5 5.5 0 0 0-5.5 5.5v28a5.5 5.5 0 0 0 5.5 5.5z"
    box.add("path", d=edge, fill=look["stroke"])
    return box


def _frame(name: str, inside: Drawing, tip: str, **look: str) -> Drawing:
    """Draws a frame with a name around a drawing."""
    head, left, base, face = _HEADS[look["class_"]]
    width = max(inside.width, len(name) * _CHARACTER, 48.0) + 2 * _PAD
    frame = Drawing(width, head + (inside.height or 20) + _PAD)
    frame.add("title", tip)
    frame.rect(0, 0, width, frame.height, rx=8, **look)
    frame.text(left, base, name, face)
    frame.place((width - inside.width) / 2, head, inside)
    return frame


def _tooltip(node: Node, *known: str) -> str:
    """Returns a node's number, kind and name, the given details, and the line that made it."""
    lines = [f"#{node.index} {kind_text(node.kind)} {node.name}", *known, node.location]
    return "\n".join(line for line in lines if line)
