"""Charts of results in plain SVG, drawn without other programs, for light and dark colour schemes.
Equal numbers give equal text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from ostinato.bench.decode import Row
from ostinato.graph.show.drawing import Drawing

LEFT, RIGHT = 28.0, 872.0
_BAR, _WIDE = 208.0, 386.0  # the left end of bars, and the longest bar
_ENDS = (198.0, 660.0, 754.0, 826.0, 870.0)  # right ends of the texts beside a bar

# Blues and greens for our ways, warm colours for others: distinct on white and on black.
OURS = ("#3b6fd6", "#17917a", "#7c5bd0", "#4c9a3a", "#2f8fb8")
THEIRS = ("#c98a12", "#cf4675", "#8a6d5a")

STYLE = """
    .card { fill: #ffffff; stroke: #d5dbe4; }
    text { font-family: ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
           font-size: 12px; fill: #3c4654; }
    .title { font-size: 15px; font-weight: 700; fill: #1b2330; }
    .small { font-size: 11px; fill-opacity: 0.78; }
    .floor { stroke: #1b2330; stroke-width: 1.5; stroke-dasharray: 5 4; fill: none; }
    .track { fill: #7b90af; fill-opacity: 0.13; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #14181f; stroke: #303947; }
      text { fill: #c4cbd6; }
      .title { fill: #f0f3f7; }
      .floor { stroke: #f0f3f7; }
    }
"""


def heading(sheet: Drawing, name: str, below: str) -> None:
    """Adds a heading at the lower end of the sheet, and increases the sheet's height."""
    sheet.text(LEFT, sheet.height + 10, name, "title")
    sheet.text(LEFT, sheet.height + 28, below, "small")
    sheet.height += 48


def bar(sheet: Drawing, fill: str, part: float, mark: float | None, *texts: str) -> None:
    """Adds a bar filled up to `part` of its width, with a mark and texts, and increases the
    sheet's height."""
    y = sheet.height
    sheet.rect(_BAR, y, _WIDE, 18, class_="track", rx=3)
    sheet.rect(_BAR, y, _WIDE * part, 18, fill=fill, rx=3)
    if mark is not None:
        sheet.add("path", d=f"M{_BAR + _WIDE * mark:g} {y - 3:g}v24", class_="floor")
    for text, end in zip(texts, _ENDS, strict=False):
        sheet.text(end, y + 13, text, anchor="end")
    sheet.height += 26


def decode_svg(subject: str, machine: str, rows: Sequence[Row]) -> str:
    """Draws a comparison as one picture: bars for each batch and context that was measured."""
    sheet, name = Drawing(LEFT + RIGHT, LEFT), f"decoding {subject} on {machine}"
    palettes = {True: cycle(OURS), False: cycle(THEIRS)}
    ways = {row.way: row.ours for row in rows}
    colours = {way: next(palettes[ours]) for way, ours in ways.items()}
    heading(sheet, name, "tokens a second" if rows else "nothing was measured")
    for batch, context in sorted({(row.batch, row.context) for row in rows}):
        here = [row for row in rows if (row.batch, row.context) == (batch, context)]
        first, floor = here[0].first_position, batch * 1e6 / here[0].floor_us
        below = f"dashed: the floor set by reading weights and cache, {floor:,.0f}"
        heading(sheet, f"batch {batch}, positions {first} to {first + here[0].tokens}", below)
        most = max(floor, *(row.tokens_per_second for row in here))
        for row in here:
            more = "" if row.ours or row.ours_is is None else f"ours {row.ours_is:.2f} x"
            speed = row.tokens_per_second
            texts = row.way, f"{speed:,.0f}", f"{row.of_floor:.1%}", "", more
            bar(sheet, colours[row.way], speed / most, floor / most, *texts)
        sheet.height += 20
    return sheet.svg(name, STYLE)
