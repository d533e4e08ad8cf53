"""SVG as text, for pictures of graphs and charts of benchmarks."""

from __future__ import annotations

from xml.sax.saxutils import escape

from ostinato.graph.show.outline import printable


class Drawing:
    """A picture or a part of one: its size in pixels, and its elements, the first drawn first."""

    def __init__(self, width: float = 0.0, height: float = 0.0) -> None:
        self.width, self.height = width, height
        self.lines: list[str] = []

    def add(self, tag: str, text: str = "", /, **look: float | str) -> None:
        """Adds an element.  `class_` is `class`, `text_anchor` is `text-anchor`, an attribute that
        is "" is left out, and `tip` is shown when the pointer is over the element."""
        opened, tip = tag, str(look.pop("tip", ""))
        for key, value in look.items():
            shown = value if isinstance(value, str) else f"{value:g}"
            opened += f' {key.rstrip("_").replace("_", "-")}="{shown}"' if shown else ""
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self.lines.append(f"<{opened}>{title}{escape(text)}</{tag}>")

    def rect(self, x: float, y: float, width: float, height: float, **look: float | str) -> None:
        self.add("rect", x=x, y=y, width=max(0.0, width), height=height, **look)

    def text(self, x: float, y: float, text: str, look: str = "", anchor: str = "") -> None:
        self.add("text", text, x=x, y=y, class_=look, text_anchor=anchor)

    def place(self, x: float, y: float, part: Drawing) -> None:
        self.lines += [f'<g transform="translate({x:g} {y:g})">', *part.lines, "</g>"]

    def svg(self, name: str, style: str) -> str:
        """Returns the text of an SVG file: the drawing on a card of its own."""
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}"'
        opened = f'<svg xmlns="http://www.w3.org/2000/svg" {size} height="{self.height:g}"'
        card = Drawing()
        card.add("title", name)
        card.add("style", style)
        card.rect(0.5, 0.5, self.width - 1, self.height - 1, class_="card", rx=10)
        text = "\n".join([f'{opened} role="img">', *card.lines, *self.lines, "</svg>\n"])
        # XML does not allow most control characters.
        return "\n".join(printable(line) for line in text.split("\n"))
