"""SVG as text: the few elements that pictures of graphs and charts of benchmarks are made of.

Equal arguments give equal text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from ostinato.graph.show.outline import printable

__all__ = ["Drawing", "bend", "element", "group", "label", "picture", "px", "rect", "title"]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Elements between (0, 0) and (`width`, `height`), in pixels."""

    width: float
    height: float
    lines: Sequence[str]


def px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def element(name: str, *inside: str, **attributes: float | str) -> str:
    """An element.  Numbers get one decimal, "" leaves an attribute out; `class_` is `class`, and
    `text_anchor` is `text-anchor`."""
    opened = name
    for key, value in attributes.items():
        shown = value if isinstance(value, str) else px(value)
        opened += f' {key.rstrip("_").replace("_", "-")}="{shown}"' if shown else ""
    return f"<{opened}>{''.join(inside)}</{name}>" if inside else f"<{opened}/>"


def _escaped(text: str) -> str:
    """Text for XML, which does not allow most control characters."""
    return escape("\n".join(printable(line) for line in text.split("\n")))


def title(text: str) -> str:
    """In front of elements: the text that is shown when the pointer is over one of them."""
    return element("title", _escaped(text))


def label(x: float, y: float, text: str, look: str = "", anchor: str = "") -> str:
    return element("text", _escaped(text), x=x, y=y, class_=look, text_anchor=anchor)


def rect(x: float, y: float, width: float, height: float, *inside: str, **look: float | str) -> str:
    return element("rect", *inside, x=x, y=y, width=max(0.0, width), height=height, **look)


def group(x: float, y: float, lines: Iterable[str]) -> str:
    return element("g", "\n".join(("", *lines, "")), transform=f"translate({px(x)} {px(y)})")


def bend(points: Sequence[tuple[float, float]], radius: float = 6.0) -> str:
    """The data of a path along straight lines, with rounded corners."""
    path = f"M{px(points[0][0])} {px(points[0][1])}"
    for before, at, after in zip(points, points[1:], points[2:], strict=False):
        ends = []
        for other in (before, after):
            part = min(0.5, radius / (math.dist(other, at) or 1.0))
            ends.append(" ".join(px(a + (b - a) * part) for a, b in zip(at, other, strict=True)))
        path += f"L{ends[0]}Q{px(at[0])} {px(at[1])} {ends[1]}"
    return f"{path}L{px(points[-1][0])} {px(points[-1][1])}"


def picture(name: str, style: str, drawing: Drawing) -> str:
    """The text of an SVG file: the drawing on a card of its own."""
    width, height = drawing.width, drawing.height
    card = rect(0.5, 0.5, width - 1, height - 1, class_="card", rx=10)
    lines = "\n".join(("", title(name), element("style", style), card, *drawing.lines, ""))
    look = {"width": px(width), "height": px(height), "role": "img"}
    box, xmlns = f"0 0 {px(width)} {px(height)}", "http://www.w3.org/2000/svg"
    return element("svg", lines, xmlns=xmlns, viewBox=box, **look) + "\n"
