"""Charts of results in plain SVG, with no other program.  They follow the reader's light or dark
scheme.  Equal numbers give equal text."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from statistics import mode

from ostinato.bench.decode import Row
from ostinato.bench.profile import Profile
from ostinato.graph.show.drawing import Drawing

__all__ = ["decode_svg", "profile_svg"]

_LEFT, _RIGHT = 28.0, 872.0
_BAR, _WIDE = 208.0, 386.0  # where bars begin, and the longest
_ENDS = (660.0, 754.0, 826.0, 870.0)  # of the texts beside a bar
_PLOT = 260.0  # a line chart's height

# Ours in blues and greens, others in warm colours: told apart on white and on black.
_OURS = ("#3b6fd6", "#17917a", "#7c5bd0", "#4c9a3a", "#2f8fb8")
_THEIRS = ("#c98a12", "#cf4675", "#8a6d5a")
_GREY = "#7b8594"

_STYLE = """
    .card { fill: #ffffff; stroke: #d5dbe4; }
    text { font-family: ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
           font-size: 12px; fill: #3c4654; }
    .title { font-size: 15px; font-weight: 700; fill: #1b2330; }
    .small { font-size: 11px; fill-opacity: 0.78; }
    .grid { stroke: #7b90af; stroke-opacity: 0.24; }
    .floor { stroke: #1b2330; stroke-width: 1.5; stroke-dasharray: 5 4; fill: none; }
    .track { fill: #7b90af; fill-opacity: 0.13; }
    .line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #14181f; stroke: #303947; }
      text { fill: #c4cbd6; }
      .title { fill: #f0f3f7; }
      .floor { stroke: #f0f3f7; }
    }
"""


def _heading(sheet: Drawing, name: str, below: str) -> None:
    """At the lower end of the sheet, which grows; so does `_bar`."""
    sheet.text(_LEFT, sheet.height + 10, name, "title")
    sheet.text(_LEFT, sheet.height + 28, below, "small")
    sheet.height += 48


def _bar(
    sheet: Drawing, name: str, fill: str, part: float, mark: float | None, *texts: str
) -> None:
    """A bar of which a part is filled in this colour, with a mark; its texts to the right."""
    y = sheet.height
    sheet.text(_BAR - 10, y + 13, name, anchor="end")
    sheet.rect(_BAR, y, _WIDE, 18, class_="track", rx=3)
    sheet.rect(_BAR, y, _WIDE * part, 18, fill=fill, rx=3)
    if mark is not None:
        sheet.add("path", d=f"M{_BAR + _WIDE * mark:g} {y - 3:g}v24", class_="floor")
    for text, end in zip(texts, _ENDS, strict=False):
        sheet.text(end, y + 13, text, anchor="end")
    sheet.height += 26


def decode_svg(subject: str, machine: str, rows: Sequence[Row]) -> str:
    """A comparison as one picture: bars at the first point; lines over contexts, and over batches,
    where several were measured."""
    sheet, name = Drawing(_LEFT + _RIGHT, _LEFT), f"decoding {subject} on {machine}"
    if not rows:
        _heading(sheet, name, "nothing was measured")
        return sheet.svg(name, _STYLE)
    first = min(rows, key=lambda row: (row.batch, row.context))
    floor = first.batch * 1e6 / first.floor_us
    below = (
        f"tokens a second, batch {first.batch}, positions {first.first_position} to "
        f"{first.first_position + first.tokens}; dashed: the floor set by reading weights and cache"
    )
    _heading(sheet, name, f"{below}, {floor:,.0f}")
    colours = {"floor": _GREY}
    for palette, ours in ((_OURS, True), (_THEIRS, False)):
        ways = dict.fromkeys(row.way for row in rows if row.ours is ours)
        colours |= zip(ways, cycle(palette), strict=False)
    compared = [r for r in rows if (r.batch, r.context) == (first.batch, first.context)]
    most = max(floor, *(row.tokens_per_second for row in compared))
    for row in compared:
        more = "" if row.ours or row.ours_is is None else f"ours {row.ours_is:.2f} x"
        speed, texts = row.tokens_per_second, (f"{row.of_floor:.1%}", "", more)
        _bar(sheet, row.way, colours[row.way], speed / most, floor / most, f"{speed:,.0f}", *texts)
    sheet.height += 36
    for axis, other, what in (
        ("context", "batch", "over positions in the cache"),
        ("batch", "context", "of all sequences together"),
    ):
        at = mode(getattr(row, other) for row in rows)
        chosen = [row for row in rows if getattr(row, other) == at]
        if len({getattr(row, axis) for row in chosen}) > 1:
            _heading(sheet, f"by {axis}", f"tokens a second {what}, {other} {at}")
            _chart(sheet, axis, chosen, colours)
    sheet.height += 16
    return sheet.svg(name, _STYLE)


def _chart(sheet: Drawing, axis: str, rows: Sequence[Row], colours: Mapping[str, str]) -> None:
    """Lines over the places of `axis`, which stand evenly: they mostly double."""
    lines: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        lines[row.way][getattr(row, axis)] = row.tokens_per_second
        lines["floor"][getattr(row, axis)] = row.batch * 1e6 / row.floor_us
    values = [value for line in lines.values() for value in line.values()]
    high, low = max(values) * 1.05, min(values) / 1.2
    left, right, top = _LEFT + 60, _RIGHT - 200, sheet.height
    step = (right - left) / (len(lines["floor"]) - 1)
    xs = {place: left + step * k for k, place in enumerate(sorted(lines["floor"]))}

    def y(value: float) -> float:
        return top + _PLOT * math.log(high / value, high / low)

    for tick in (digit * 10.0**power for power in range(-3, 9) for digit in (1, 2, 5)):
        if low <= tick <= high:
            sheet.add("path", d=f"M{left:g} {y(tick):g}H{right:g}", class_="grid")
            sheet.text(left - 8, y(tick) + 4, f"{tick:,g}", "small", "end")
    for place, x in xs.items():
        sheet.text(x, top + _PLOT + 18, str(place), "small", "middle")
    below = -math.inf
    for last, way in sorted((y(line[max(line)]), way) for way, line in lines.items()):
        line, colour = sorted(lines[way].items()), colours[way]
        look = "floor" if way == "floor" else "line"
        path = "L".join(f"{xs[place]:g} {y(value):g}" for place, value in line)
        sheet.add("path", d=f"M{path}", class_=look, stroke=colour)
        for place, value in line:
            tip = f"{way}, {axis} {place}: {value:,.1f} tokens a second"
            sheet.add("circle", tip=tip, cx=xs[place], cy=y(value), r=3.2, fill=colour)
        below = max(last + 4, below + 15)  # names beside the lines, one below the other
        sheet.rect(right + 12, below - 8, 9, 9, fill=colour, rx=2)
        sheet.text(right + 27, below, way)
    sheet.height = max(top + _PLOT + 44, below + 28)


def profile_svg(subject: str, machine: str, profile: Profile) -> str:
    """A step's profile: its launches along time, then what each kernel takes in all, with the part
    that the memory needs."""
    sheet, name = Drawing(_LEFT + _RIGHT, _LEFT), f"one decode step of {subject} on {machine}"
    launches, share = len(profile.launch_names), profile.floor_us / profile.step_us
    below = (
        f"batch {profile.batch}, position {profile.position}: {_duration(profile.step_us)}, "
        f"{share:.0%} of the memory's speed; {launches} launches, each "
    )
    each = "by itself" if profile.apart else "from the end of the one before"
    _heading(sheet, name, below + each)
    kernels = [row.name for row in profile.rows]
    colours = dict(zip(kernels, cycle((*_OURS, *_THEIRS, _GREY, "#a0862c")), strict=False))
    drawn = profile.start_us + sum(max(0.0, us) for us in profile.launch_us)
    scale = (_RIGHT - _LEFT) / max(drawn, profile.step_us)
    x, y = _LEFT + profile.start_us * scale, sheet.height
    tip = f"a replay of one empty kernel: {profile.start_us:.2f} us"
    sheet.rect(_LEFT, y, x - _LEFT, 34, tip=tip, class_="track")
    for launched, us in zip(profile.launch_names, profile.launch_us, strict=True):
        wide = max(0.0, us) * scale
        gap = 0.6 if wide > 2 else 0.0  # a hair of the card between launches
        sheet.rect(x, y, wide - gap, 34, tip=f"{launched}: {us:.2f} us", fill=colours[launched])
        x += wide
    sheet.text(_LEFT, y + 50, "0", "small")
    sheet.text(_RIGHT, y + 50, _duration(profile.step_us), "small", "end")
    sheet.height += 74
    most = max(max(row.total_us, row.floor_us * row.launches) for row in profile.rows)
    for row in profile.rows:
        name_and_times, speed = f"{row.name} × {row.launches}", row.terabytes_per_second
        texts, floor = [_duration(row.total_us), f"{_duration(row.us)} each"], None
        if row.nbytes:
            texts += [f"{speed:.2f} TB/s" if speed >= 0.1 else f"{speed * 1e3:.1f} GB/s"]
            texts += [f"{row.of_floor:.0%}"]
            floor = row.floor_us * row.launches / most
        _bar(sheet, name_and_times, colours[row.name], row.total_us / most, floor, *texts)
    text = (
        f"dashed: bytes over {profile.bandwidth.best / 1e12:.2f} TB/s.  Empty launches of the same "
        f"shapes take {_duration(profile.gap_us * launches)} ({profile.gap_us:.2f} us each).  One "
        f"after the other alone: {_duration(profile.alone_us)}."
    )
    sheet.text(_LEFT, sheet.height + 16, text, "small")
    sheet.height += 50
    return sheet.svg(name, _STYLE)


def _duration(us: float) -> str:
    if us >= 1e3:
        return f"{us / 1e3:.2f} ms"
    return f"{us:.1f} us" if us >= 10 else f"{us:.2f} us"
