"""Charts of results in plain SVG, drawn without other programs, for light and dark colour schemes.
Equal numbers give equal text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from ostinato.bench.decode import Row
from ostinato.bench.profile import Profile
from ostinato.graph.show.drawing import Drawing

_LEFT, _RIGHT = 28.0, 872.0
_BAR, _WIDE = 208.0, 386.0  # the left end of bars, and the longest bar
_ENDS = (198.0, 660.0, 754.0, 826.0, 870.0)  # right ends of the texts beside a bar

# Blues and greens for our ways, warm colours for others: distinct on white and on black.
_OURS = ("#3b6fd6", "#17917a", "#7c5bd0", "#4c9a3a", "#2f8fb8")
_THEIRS = ("#c98a12", "#cf4675", "#8a6d5a")
_KERNELS = (*_OURS, *_THEIRS, "#7b8594", "#a0862c")

_STYLE = """
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


def _heading(sheet: Drawing, name: str, below: str) -> None:
    """Adds a heading at the lower end of the sheet, and increases the sheet's height."""
    sheet.text(_LEFT, sheet.height + 10, name, "title")
    sheet.text(_LEFT, sheet.height + 28, below, "small")
    sheet.height += 48


def _bar(sheet: Drawing, fill: str, part: float, mark: float | None, *texts: str) -> None:
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
    sheet, name = Drawing(_LEFT + _RIGHT, _LEFT), f"decoding {subject} on {machine}"
    palettes = {True: cycle(_OURS), False: cycle(_THEIRS)}
    ways = {row.way: row.ours for row in rows}
    colours = {way: next(palettes[ours]) for way, ours in ways.items()}
    _heading(sheet, name, "tokens a second" if rows else "nothing was measured")
    for batch, context in sorted({(row.batch, row.context) for row in rows}):
        here = [row for row in rows if (row.batch, row.context) == (batch, context)]
        first, floor = here[0].first_position, batch * 1e6 / here[0].floor_us
        below = f"dashed: the floor set by reading weights and cache, {floor:,.0f}"
        _heading(sheet, f"batch {batch}, positions {first} to {first + here[0].tokens}", below)
        most = max(floor, *(row.tokens_per_second for row in here))
        for row in here:
            more = "" if row.ours or row.ours_is is None else f"ours {row.ours_is:.2f} x"
            speed = row.tokens_per_second
            texts = row.way, f"{speed:,.0f}", f"{row.of_floor:.1%}", "", more
            _bar(sheet, colours[row.way], speed / most, floor / most, *texts)
        sheet.height += 20
    return sheet.svg(name, _STYLE)


def profile_svg(subject: str, machine: str, profile: Profile) -> str:
    """Draws a step's profile: its launches along time, then each kernel's total time, with its
    memory floor."""
    sheet, name = Drawing(_LEFT + _RIGHT, _LEFT), f"one decode step of {subject} on {machine}"
    place, step = f"batch {profile.batch}, position {profile.position}", _duration(profile.step_us)
    launches, share = len(profile.launch_names), profile.floor_us / profile.step_us
    each = "by itself" if profile.apart else "from the end of the one before"
    below = f"{place}: {step}, {share:.0%} of the memory's speed; {launches} launches, each {each}"
    _heading(sheet, name, below)
    colours = dict(zip((row.name for row in profile.rows), cycle(_KERNELS), strict=False))
    drawn = profile.start_us + sum(max(0.0, us) for us in profile.launch_us)
    scale = (_RIGHT - _LEFT) / max(drawn, profile.step_us)
    x, y = _LEFT + profile.start_us * scale, sheet.height
    tip = f"a replay of one empty kernel: {profile.start_us:.2f} us"
    sheet.rect(_LEFT, y, x - _LEFT, 34, tip=tip, class_="track")
    for launched, us in zip(profile.launch_names, profile.launch_us, strict=True):
        wide = max(0.0, us) * scale
        gap = 0.6 if wide > 2 else 0.0  # separates neighbouring launches
        sheet.rect(x, y, wide - gap, 34, tip=f"{launched}: {us:.2f} us", fill=colours[launched])
        x += wide
    sheet.text(_LEFT, y + 50, "0", "small")
    sheet.text(_RIGHT, y + 50, step, "small", "end")
    sheet.height += 74
    most = max(max(row.total_us, row.floor_us * row.launches) for row in profile.rows)
    for row in profile.rows:
        total, speed, floor = row.total_us, row.terabytes_per_second, None
        texts = [f"{row.name} × {row.launches}", _duration(total), f"{_duration(row.us)} each"]
        if row.nbytes:
            texts += [f"{speed:.2f} TB/s" if speed >= 0.1 else f"{speed * 1e3:.1f} GB/s"]
            texts += [f"{row.of_floor:.0%}"]
            floor = row.floor_us * row.launches / most
        _bar(sheet, colours[row.name], total / most, floor, *texts)
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
