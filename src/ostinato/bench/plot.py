"""Charts of results in plain SVG, with no other program.

They lie on a card of their own, and follow the reader's light or dark scheme.  Equal numbers give
equal text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ostinato.bench.decode import Row
from ostinato.bench.profile import Profile
from ostinato.graph.show.drawing import Drawing, element, label, picture, px, rect, title

__all__ = ["decode_svg", "profile_svg"]

_WIDTH, _MARGIN = 900.0, 28.0
_RIGHT = _WIDTH - _MARGIN
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


@dataclass(frozen=True, slots=True)
class _Bar:
    """A bar with the texts to its right.  `share` of the width is filled, `floor` is marked."""

    name: str
    colour: str
    share: float
    texts: Sequence[str]
    floor: float | None = None


@dataclass(slots=True)
class _Sheet:
    """The elements so far, and how far down they go."""

    y: float = _MARGIN
    lines: list[str] = field(default_factory=list)

    def heading(self, name: str, below: str) -> None:
        self.text(_MARGIN, 10, name, "title")
        self.text(_MARGIN, 28, below, "small")
        self.y += 48

    def text(self, x: float, down: float, text: str, look: str = "", anchor: str = "") -> None:
        self.lines.append(label(x, self.y + down, text, look, anchor))

    def line(self, points: Sequence[tuple[float, float]], look: str, stroke: str = "") -> None:
        path = "L".join(f"{px(x)} {px(y)}" for x, y in points)
        self.lines.append(element("path", d=f"M{path}", class_=look, stroke=stroke))

    def bars(self, bars: Sequence[_Bar], left: float, right: float, ends: Sequence[float]) -> None:
        """Bars between `left` and `right`; their texts end so far right of `right`."""
        width = right - left
        for bar in bars:
            self.text(left - 10, 13, bar.name, anchor="end")
            self.lines.append(rect(left, self.y, width, 18, class_="track", rx=3))
            self.lines.append(rect(left, self.y, width * bar.share, 18, fill=bar.colour, rx=3))
            if bar.floor is not None:
                x = left + width * bar.floor
                self.line([(x, self.y - 3), (x, self.y + 21)], "floor")
            for text, end in zip(bar.texts, ends, strict=False):
                self.text(right + end, 13, text, anchor="end")
            self.y += 26

    def svg(self, name: str) -> str:
        return picture(name, _STYLE, Drawing(_WIDTH, self.y + _MARGIN - 12, self.lines))


# ------------------------------------------------------------------------------------- comparisons


def decode_svg(subject: str, machine: str, rows: Sequence[Row]) -> str:
    """A comparison as one picture: bars at the first point; lines over contexts, and over batches,
    where several were measured."""
    sheet = _Sheet()
    name = f"decoding {subject} on {machine}"
    colours: dict[str, str] = {}
    for palette, ours in ((_OURS, True), (_THEIRS, False)):
        ways = dict.fromkeys(row.way for row in rows if row.ours is ours)
        colours |= zip(ways, itertools.cycle(palette), strict=False)
    if not rows:
        sheet.heading(name, "nothing was measured")
        return sheet.svg(name)
    batch, context = min((row.batch, row.context) for row in rows)
    _comparison(sheet, name, [r for r in rows if (r.batch, r.context) == (batch, context)], colours)
    for axis, other, what in (
        ("context", "batch", "over positions in the cache"),
        ("batch", "context", "of all sequences together"),
    ):
        places: dict[int, set[int]] = {}
        for row in rows:
            places.setdefault(getattr(row, other), set()).add(getattr(row, axis))
        at = max(sorted(places), key=lambda value: len(places[value]))
        if len(places[at]) > 1:
            sheet.heading(f"by {axis}", f"tokens a second {what}, {other} {at}")
            _chart(sheet, axis, [row for row in rows if getattr(row, other) == at], colours)
    return sheet.svg(name)


def _comparison(sheet: _Sheet, name: str, rows: Sequence[Row], colours: Mapping[str, str]) -> None:
    first = rows[0]
    sheet.heading(
        name,
        f"tokens a second, batch {first.batch}, positions {first.first_position} to "
        f"{first.first_position + first.tokens}; the line is the floor set by reading weights and "
        "cache",
    )
    floor = first.batch * 1e6 / first.floor_us
    most = max(floor, *(row.tokens_per_second for row in rows))
    bars = []
    for row in rows:
        more = "" if row.ours or row.ours_is is None else f"ours {row.ours_is:.2f} x"
        texts = f"{row.tokens_per_second:,.0f}", f"{row.of_floor:.1%}", more
        bars.append(_Bar(row.way, colours[row.way], row.tokens_per_second / most, texts))
    left, right, top = _MARGIN + 150, _RIGHT - 200, sheet.y
    sheet.bars(bars, left, right, (60, 116, 200))
    x = left + (right - left) * floor / most
    sheet.line([(x, top - 6), (x, sheet.y - 2)], "floor")
    sheet.text(x, 12, f"floor {floor:,.0f}", "small", "end")
    sheet.y += 36


def _chart(sheet: _Sheet, axis: str, rows: Sequence[Row], colours: Mapping[str, str]) -> None:
    """Lines over the places of `axis`, which stand evenly: they mostly double."""
    floors = {getattr(row, axis): row.batch * 1e6 / row.floor_us for row in rows}
    places = sorted(floors)
    high = max(*floors.values(), *(row.tokens_per_second for row in rows)) * 1.05
    low = min(row.tokens_per_second for row in rows) / 1.2
    left, right, top = _MARGIN + 60, _RIGHT - 200, sheet.y

    def at(place: int, value: float) -> tuple[float, float]:
        part = places.index(place) / max(1, len(places) - 1)
        return left + (right - left) * part, top + _PLOT * math.log(high / value, high / low)

    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for tick in (step * 10.0**power for step in (1, 2, 5)):
            if low <= tick <= high:
                _, y = at(places[0], tick)
                sheet.line([(left, y), (right, y)], "grid")
                sheet.text(left - 8, y - top + 4, f"{tick:,.0f}", "small", "end")
    for place in places:
        x, _ = at(place, low)
        sheet.text(x, _PLOT + 18, str(place), "small", "middle")
    floor = [at(place, floors[place]) for place in places]
    sheet.line(floor, "floor")
    ends = [(floor[-1][1], "floor", "")]
    for way, colour in colours.items():
        own = sorted((getattr(row, axis), row.tokens_per_second) for row in rows if row.way == way)
        if not own:
            continue
        sheet.line([at(*point) for point in own], "line", colour)
        for place, value in own:
            x, y = at(place, value)
            tip = title(f"{way}, {axis} {place}: {value:,.1f} tokens a second")
            sheet.lines.append(element("circle", tip, cx=x, cy=y, r=3.2, fill=colour))
        ends.append((at(*own[-1])[1], way, colour))
    below = -math.inf
    for end, way, colour in sorted(ends):  # names beside the lines, one below the other
        below = max(end + 4, below + 15)
        if colour:
            sheet.lines.append(rect(right + 12, below - 8, 9, 9, fill=colour, rx=2))
        sheet.text(right + 27, below - top, way)
    sheet.y = max(top + _PLOT + 44, below + 28)


# ----------------------------------------------------------------------------------------- profiles


def profile_svg(subject: str, machine: str, profile: Profile) -> str:
    """A step's profile: its launches along time, then what each kernel takes in all, with the part
    that the memory needs."""
    sheet = _Sheet()
    name = f"one decode step of {subject} on {machine}"
    sheet.heading(
        name,
        f"batch {profile.batch}, position {profile.position}: {_duration(profile.step_us)}, "
        f"{profile.floor_us / profile.step_us:.0%} of the memory's speed; "
        f"{len(profile.launch_names)} launches, each from the end of the one before",
    )
    colours = {
        row.name: colour
        for row, colour in zip(profile.rows, itertools.cycle(_KERNELS), strict=False)
    }
    scale = (_RIGHT - _MARGIN) / (profile.start_us + sum(max(0.0, us) for us in profile.launch_us))
    x = _MARGIN + profile.start_us * scale
    tip = title(f"a replay of one empty kernel: {profile.start_us:.2f} us")
    sheet.lines.append(rect(_MARGIN, sheet.y, x - _MARGIN, 34, tip, class_="track"))
    for launched, us in zip(profile.launch_names, profile.launch_us, strict=True):
        wide = max(0.0, us) * scale
        gap = 0.6 if wide > 2 else 0.0  # a hair of the card between launches
        tip = title(f"{launched}: {us:.2f} us")
        sheet.lines.append(rect(x, sheet.y, wide - gap, 34, tip, fill=colours[launched]))
        x += wide
    sheet.text(_MARGIN, 50, "0", "small")
    sheet.text(_RIGHT, 50, _duration(profile.step_us), "small", "end")
    sheet.y += 74
    most = max(max(row.total_us, row.floor_us * row.launches) for row in profile.rows)
    bars = []
    for row in profile.rows:
        texts, floor = [_duration(row.total_us), f"{_duration(row.us)} each"], None
        if row.nbytes:
            texts += [_speed(row.terabytes_per_second), f"{row.of_floor:.0%}"]
            floor = row.floor_us * row.launches / most
        filled, text = max(0.0, row.total_us) / most, f"{row.name} × {row.launches}"
        bars.append(_Bar(text, colours[row.name], filled, texts, floor))
    sheet.bars(bars, _MARGIN + 180, _RIGHT - 278, (66, 160, 232, 276))
    gaps = profile.gap_us * len(profile.launch_names)
    text = (
        f"dashed: bytes over {profile.bandwidth.best / 1e12:.2f} TB/s.  Empty launches of the same "
        f"shapes take {_duration(gaps)} ({profile.gap_us:.2f} us each).  One after the other "
        f"alone: {_duration(profile.alone_us)}."
    )
    sheet.text(_MARGIN, 16, text, "small")
    sheet.y += 34
    return sheet.svg(name)


def _duration(us: float) -> str:
    if us >= 1e3:
        return f"{us / 1e3:.2f} ms"
    return f"{us:.1f} us" if us >= 10 else f"{us:.2f} us"


def _speed(terabytes: float) -> str:
    return f"{terabytes:.2f} TB/s" if terabytes >= 0.1 else f"{terabytes * 1e3:.1f} GB/s"
