"""Pictures of results as plain SVG, drawn here with no other program.

They lie on a card of their own, and follow the reader's light or dark scheme.  The same numbers
give the same text, always.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from ostinato.bench.decode import Row
from ostinato.bench.profile import Profile

__all__ = ["decode_svg", "profile_svg"]

_WIDTH = 900.0
_MARGIN = 28.0
_LABEL = 150.0  # of a bar, to its left
_VALUE = 200.0  # what is written to a bar's right, in columns
_COLUMNS = (60.0, 116.0, 200.0)
_PROFILE_COLUMNS = (66.0, 160.0, 232.0, 276.0)
_BAR = 18.0
_ROW = 26.0
_PLOT = 260.0  # a line chart's height

# Ours in blues and greens, others in warm colours: told apart on white and on black.
_OURS = ("#3b6fd6", "#17917a", "#7c5bd0", "#4c9a3a", "#2f8fb8")
_THEIRS = ("#c98a12", "#cf4675", "#8a6d5a")
_KERNELS = (*_OURS, *_THEIRS, "#7b8594", "#a0862c")

_STYLE = """
    .card { fill: #ffffff; stroke: #d5dbe4; }
    text { font-family: ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
           font-size: 12px; fill: #3c4654; }
    .title { font-size: 15px; font-weight: 700; fill: #1b2330; }
    .small { font-size: 11px; fill: #66707f; }
    .grid { stroke: #dfe4eb; stroke-width: 1; }
    .floor { stroke: #1b2330; stroke-width: 1.5; stroke-dasharray: 5 4; fill: none; }
    .track { fill: #eef1f5; }
    .line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #14181f; stroke: #303947; }
      text { fill: #c4cbd6; }
      .title { fill: #f0f3f7; }
      .small { fill: #97a1b0; }
      .grid { stroke: #2a323e; }
      .floor { stroke: #f0f3f7; }
      .track { fill: #222934; }
    }
"""


@dataclass(slots=True)
class _Sheet:
    """Lines of a drawing, and how far down it goes."""

    y: float = _MARGIN
    lines: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        style = f' class="{kind}"' if kind else ""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.lines.append(f'<text x="{_px(x)}" y="{_px(y)}"{style}{where}>{escape(text)}</text>')

    def rect(
        self, x: float, y: float, width: float, height: float, look: str, tip: str = ""
    ) -> None:
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self.lines.append(
            f'<rect x="{_px(x)}" y="{_px(y)}" width="{_px(max(0.0, width))}" '
            f'height="{_px(height)}" {look}>{title}</rect>'
        )

    def columns(self, x: float, y: float, texts: Sequence[str], ends: Sequence[float]) -> None:
        """Texts that end at these places, right of x."""
        for text, end in zip(texts, ends, strict=False):
            self.text(x + end, y, text, anchor="end")

    def line(self, points: Sequence[tuple[float, float]], look: str) -> None:
        path = "L".join(f"{_px(x)} {_px(y)}" for x, y in points)
        self.lines.append(f'<path d="M{path}" {look}/>')

    def heading(self, title: str, below: str) -> None:
        self.text(_MARGIN, self.y + 10, title, "title")
        self.text(_MARGIN, self.y + 28, below, "small")
        self.y += 48

    def svg(self, title: str) -> str:
        height = self.y + _MARGIN - 12
        size = f'width="{_px(_WIDTH)}" height="{_px(height)}"'
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
                f'viewBox="0 0 {_px(_WIDTH)} {_px(height)}" role="img">',
                f"<title>{escape(title)}</title>",
                f"<style>{_STYLE}</style>",
                f'<rect class="card" x="0.5" y="0.5" width="{_px(_WIDTH - 1)}" '
                f'height="{_px(height - 1)}" rx="10"/>',
                *self.lines,
                "</svg>",
                "",
            )
        )


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


# ------------------------------------------------------------------------------------- comparisons


def decode_svg(subject: str, machine: str, rows: Sequence[Row]) -> str:
    """A comparison as one picture: bars at the first point; lines over contexts, and over batches,
    where several were measured."""
    sheet = _Sheet()
    colours = _colours_of(rows)
    title = f"decoding {subject} on {machine}"
    if rows:
        batch = min(row.batch for row in rows)
        context = min(row.context for row in rows if row.batch == batch)
        _bars(sheet, title, [r for r in rows if (r.batch, r.context) == (batch, context)], colours)
        over_context = [row for row in rows if row.batch == batch]
        if len({row.context for row in over_context}) > 1:
            below = f"tokens a second over positions in the cache, batch {batch}"
            _chart(sheet, "by context", below, over_context, "context", colours)
        at = _context_of_batches(rows)
        over_batch = [row for row in rows if row.context == at]
        if len({row.batch for row in over_batch}) > 1:
            below = f"tokens a second of all sequences together, context {at}"
            _chart(sheet, "by batch", below, over_batch, "batch", colours)
    else:
        sheet.heading(title, "nothing was measured")
    return sheet.svg(title)


def _colours_of(rows: Sequence[Row]) -> dict[str, str]:
    found: dict[str, str] = {}
    used = {True: 0, False: 0}
    for row in rows:
        if row.way not in found:
            palette = _OURS if row.ours else _THEIRS
            found[row.way] = palette[used[row.ours] % len(palette)]
            used[row.ours] += 1
    return found


def _context_of_batches(rows: Sequence[Row]) -> int:
    """The context at which most batches were measured."""
    batches: dict[int, set[int]] = {}
    for row in rows:
        batches.setdefault(row.context, set()).add(row.batch)
    return max(batches, key=lambda context: len(batches[context]))


def _bars(sheet: _Sheet, title: str, rows: Sequence[Row], colours: dict[str, str]) -> None:
    first = rows[0]
    sheet.heading(
        title,
        f"tokens a second, batch {first.batch}, positions {first.first_position} to "
        f"{first.first_position + first.tokens}; the line is the floor set by reading weights and "
        "cache",
    )
    floor = first.batch * 1e6 / first.floor_us
    most = max(floor, *(row.tokens_per_second for row in rows))
    left, width = _MARGIN + _LABEL, _WIDTH - 2 * _MARGIN - _LABEL - _VALUE
    top = sheet.y
    for row in rows:
        sheet.text(left - 10, sheet.y + 13, row.way, anchor="end")
        sheet.rect(left, sheet.y, width, _BAR, 'class="track" rx="3"')
        share = row.tokens_per_second / most
        sheet.rect(left, sheet.y, width * share, _BAR, f'fill="{colours[row.way]}" rx="3"')
        more = "" if row.ours or row.ours_is is None else f"ours {row.ours_is:.2f} x"
        values = (f"{row.tokens_per_second:,.0f}", f"{row.of_floor:.1%}", more)
        sheet.columns(left + width, sheet.y + 13, values, _COLUMNS)
        sheet.y += _ROW
    x = left + width * floor / most
    sheet.line([(x, top - 6), (x, sheet.y - 2)], 'class="floor"')
    sheet.text(x, sheet.y + 12, f"floor {floor:,.0f}", "small", "end")
    sheet.y += 36


def _chart(
    sheet: _Sheet, title: str, below: str, rows: Sequence[Row], axis: str, colours: dict[str, str]
) -> None:
    """Lines over the places of `axis`, which stand evenly: they mostly double."""
    sheet.heading(title, below)
    places = sorted({_place(row, axis) for row in rows})
    floors = {_place(r, axis): r.batch * 1e6 / r.floor_us for r in rows}
    high = max(*floors.values(), *(row.tokens_per_second for row in rows)) * 1.05
    low = min(row.tokens_per_second for row in rows) / 1.2
    left, width, top = _MARGIN + 60, _WIDTH - 2 * _MARGIN - 60 - _VALUE, sheet.y
    decades = math.log10(high / low)

    def x(place: int) -> float:
        return left + width * (places.index(place) / max(1, len(places) - 1))

    def y(value: float) -> float:
        return top + _PLOT * (1 - math.log10(value / low) / decades)

    for tick in _ticks(low, high):
        sheet.line([(left, y(tick)), (left + width, y(tick))], 'class="grid"')
        sheet.text(left - 8, y(tick) + 4, f"{tick:,.0f}", "small", "end")
    for place in places:
        sheet.text(x(place), top + _PLOT + 18, str(place), "small", "middle")
    sheet.line([(x(place), y(floors[place])) for place in places], 'class="floor"')
    ends = [(y(floors[places[-1]]), "floor", "")]
    for way, colour in colours.items():
        own = sorted((_place(row, axis), row.tokens_per_second) for row in rows if row.way == way)
        if not own:
            continue
        points = [(x(place), y(value)) for place, value in own]
        sheet.line(points, f'class="line" stroke="{colour}"')
        for (px, py), (place, value) in zip(points, own, strict=True):
            tip = f"{way}, {axis} {place}: {value:,.1f} tokens a second"
            sheet.lines.append(
                f'<circle cx="{_px(px)}" cy="{_px(py)}" r="3.2" fill="{colour}">'
                f"<title>{escape(tip)}</title></circle>"
            )
        ends.append((points[-1][1], way, colour))
    at = -math.inf
    for end, way, colour in sorted(ends):  # names beside the lines, one below the other
        at = max(end + 4, at + 15)
        if colour:
            sheet.rect(left + width + 12, at - 8, 9, 9, f'fill="{colour}" rx="2"')
        sheet.text(left + width + 27, at, way)
    sheet.y = max(top + _PLOT + 44, at + 28)


def _place(row: Row, axis: str) -> int:
    return row.context if axis == "context" else row.batch


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every decade in the range."""
    found = []
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        found += [step * 10.0**power for step in (1, 2, 5)]
    return [tick for tick in found if low <= tick <= high]


# ----------------------------------------------------------------------------------------- profiles


def profile_svg(subject: str, machine: str, profile: Profile) -> str:
    """A step's profile: its launches along time, then what each kernel takes in all, with the part
    that the memory needs."""
    sheet = _Sheet()
    title = f"one decode step of {subject} on {machine}"
    sheet.heading(
        title,
        f"batch {profile.batch}, position {profile.position}: {_duration(profile.step_us)}, "
        f"{profile.floor_us / profile.step_us:.0%} of the memory's speed; "
        f"{len(profile.launch_names)} launches, each from the end of the one before",
    )
    names = [row.name for row in profile.rows]
    colours = {name: _KERNELS[i % len(_KERNELS)] for i, name in enumerate(names)}
    width = _WIDTH - 2 * _MARGIN
    whole = profile.start_us + sum(max(0.0, us) for us in profile.launch_us)
    x = _MARGIN
    tip = f"a replay of one empty kernel: {profile.start_us:.2f} us"
    sheet.rect(x, sheet.y, width * profile.start_us / whole, 34, 'class="track"', tip)
    x += width * profile.start_us / whole
    for name, us in zip(profile.launch_names, profile.launch_us, strict=True):
        wide = width * max(0.0, us) / whole
        look = f'fill="{colours[name]}"'
        # A hair of the card between launches, where there is room for one.
        sheet.rect(x, sheet.y, wide - (0.6 if wide > 2 else 0), 34, look, f"{name}: {us:.2f} us")
        x += wide
    sheet.y += 40
    sheet.text(_MARGIN, sheet.y + 10, "0", "small")
    sheet.text(_WIDTH - _MARGIN, sheet.y + 10, _duration(profile.step_us), "small", "end")
    sheet.y += 34
    left, room = _MARGIN + _LABEL + 30, width - _LABEL - 30 - _VALUE - 78
    most = max(max(row.total_us, row.floor_us * row.launches) for row in profile.rows)
    for row in profile.rows:
        sheet.text(left - 10, sheet.y + 13, f"{row.name} × {row.launches}", anchor="end")
        sheet.rect(left, sheet.y, room, _BAR, 'class="track" rx="3"')
        look = f'fill="{colours[row.name]}" rx="3"'
        sheet.rect(left, sheet.y, room * max(0.0, row.total_us) / most, _BAR, look)
        floor = room * row.floor_us * row.launches / most
        if row.nbytes:
            sheet.line([(left + floor, sheet.y - 3), (left + floor, sheet.y + 21)], 'class="floor"')
        parts = [_duration(row.total_us), f"{_duration(row.us)} each"]
        if row.nbytes:
            parts += [_speed(row.terabytes_per_second), f"{row.of_floor:.0%}"]
        sheet.columns(left + room, sheet.y + 13, parts, _PROFILE_COLUMNS)
        sheet.y += _ROW
    gaps = profile.gap_us * len(profile.launch_names)
    sheet.text(
        _MARGIN,
        sheet.y + 16,
        f"dashed: bytes over {profile.bandwidth.best / 1e12:.2f} TB/s.  Empty launches of the same "
        f"shapes take {_duration(gaps)} ({profile.gap_us:.2f} us each).  One after "
        f"the other alone: {_duration(profile.alone_us)}.",
        "small",
    )
    sheet.y += 34
    return sheet.svg(title)


def _duration(us: float) -> str:
    if us >= 1e3:
        return f"{us / 1e3:.2f} ms"
    return f"{us:.1f} us" if us >= 10 else f"{us:.2f} us"


def _speed(terabytes: float) -> str:
    return f"{terabytes:.2f} TB/s" if terabytes >= 0.1 else f"{terabytes * 1e3:.1f} GB/s"
