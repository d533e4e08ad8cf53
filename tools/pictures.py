"""Explanatory pictures for the docs, drawn by `make docs`, in the reader's light or dark scheme.

Each function returns the text of an SVG file.  Times come from results files, and are to scale.
"""

from __future__ import annotations

from ostinato.graph.show.drawing import Drawing
from tools import figures

__all__ = ["buckets", "padding", "timeline"]

_STYLE = """
    .card { fill: #ffffff; stroke: #d5dbe4; }
    text { font-family: ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
           font-size: 13px; fill: #3c4654; }
    .title { font-size: 15px; font-weight: 700; fill: #1b2330; }
    .code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
            monospace; }
    .track { fill: #7b90af; fill-opacity: 0.13; }
    .host { fill: #c98a12; }
    .gpu { fill: #3b6fd6; }
    .used { fill: #3b6fd6; fill-opacity: 0.22; stroke: #3b6fd6; }
    .pad { fill: none; stroke: #7b8594; stroke-dasharray: 3 3; }
    .other { fill: #17917a; fill-opacity: 0.22; stroke: #17917a; }
    .wrong { fill: #cf4675; fill-opacity: 0.3; stroke: #cf4675; stroke-width: 2; }
    .graph { fill: #7c5bd0; fill-opacity: 0.12; stroke: #7c5bd0; }
    .arrow { fill: none; stroke: #7b8594; stroke-width: 1.5; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #14181f; stroke: #303947; }
      text { fill: #c4cbd6; }
      .title { fill: #f0f3f7; }
      .gpu { fill: #6f9bf0; }
    }
"""
_CELL = 34.0


def timeline() -> str:
    """Draws the work of host and GPU for a decode step, launched kernel by kernel and replayed."""
    rows = figures.results(f"decode-135M-{figures.H100}")["rows"]
    eager, replay = (
        figures.row(rows, {"kind": "decode", "way": w})["token_us"] for w in ("eager", "capture")
    )
    ways = figures.results(f"replay_cost-{figures.H100}")["rows"]
    by = {"launched by": "ostinato compiled, GraphExec.launch", "kernels": 280}
    one_launch = figures.row(ways, by)["median_us"]
    # The profile is of another run: its kernels are scaled to the time of this replay.
    kernels = figures.results(f"profile-135M-{figures.H100}")["summary"]["launch_us"]
    kernels = [us * replay / sum(kernels) for us in kernels]
    # The interval of the launches: the last two kernels, which are long, end the step.
    apart = (eager - sum(kernels[-2:])) / (len(kernels) - 2)
    count = len(kernels)

    left, width = 76.0, 656.0
    picture = Drawing(left + width + 24, 248)
    title = f"One token of SmolLM2-135M on an H100, to scale: {count} kernels"
    picture.text(24, 32, title, "title")

    def lane(top: float, name: str, spans: list[tuple[float, float]], look: str) -> None:
        picture.text(24, top + 16, name)
        picture.rect(left, top, width, 22, class_="track", rx=3)
        for start, us in spans:
            wide = max(us * width / eager - 0.8, 1.2)
            picture.rect(left + start * width / eager, top, wide, 22, class_=look)

    picture.text(
        left, 66, f"eager: {count} launches, {eager:.0f} µs; the GPU waits for each of them"
    )
    lane(76, "host", [(i * apart, apart) for i in range(count)], "host")
    lane(104, "GPU", [(i * apart, us) for i, us in enumerate(kernels[:-1])], "gpu")
    picture.rect(left + width * (1 - kernels[-1] / eager), 104, width * kernels[-1] / eager, 22,
                 class_="gpu")  # fmt: skip
    picture.text(left, 164, f"replay: 1 launch, {replay:.0f} µs; the host is free")
    lane(174, "host", [(0, one_launch)], "host")
    starts = [sum(kernels[:i]) for i in range(count)]
    lane(202, "GPU", list(zip(starts, kernels, strict=True)), "gpu")
    picture.text(left + width * replay / eager + 10, 218, "the next token")
    return picture.svg(f"{count} launches in {eager:.0f} µs, one in {replay:.0f} µs", _STYLE)


def buckets() -> str:
    """Draws calls of 3, 4 and 2 rows, and the graphs that they replay."""
    picture = Drawing(700, 246)
    picture.text(24, 32, "Sizes are rounded up to buckets; each bucket has one graph", "title")
    for lane, (rows, bucket) in enumerate(((3, 4), (4, 4), (2, 2))):
        y = 58.0 + 62 * lane
        picture.text(24, y + 22, f"step(rows={rows})", "code")
        for i in range(bucket):
            look = "used" if i < rows else "pad"
            picture.rect(176 + (_CELL + 6) * i, y, _CELL, _CELL, class_=look, rx=4)
        if rows < bucket:
            picture.text(176 + (_CELL + 6) * bucket + 8, y + 22, "padding")
        start = 432 if rows < bucket else 350
        picture.add("path", d=f"M{start} {y + 17:g}H510l-6 -5m6 5l-6 5", class_="arrow")
    for y, high, bucket in ((52, 108, 4), (176, 46, 2)):
        picture.rect(518, y, 156, high, class_="graph", rx=8)
        picture.text(596, y + high / 2 + 5, f"graph for {bucket} rows", anchor="middle")
    return picture.svg("3 and 4 rows replay the graph for 4, 2 rows the graph for 2", _STYLE)


def padding() -> str:
    """Draws the tutorial's mistake: the effect of a replay with 3 rows on the fourth, wrong and
    right."""
    picture = Drawing(700, 234)
    picture.text(24, 32, "step(batch=3) replays the graph for 4 rows", "title")
    lanes = (
        ("before", (3, 3, 3, 2), "the fourth row is another sequence's"),
        ("the size frozen as 4", (4, 4, 4, 3), "wrong, and no error"),
        ("the size read on the device", (4, 4, 4, 2), "right"),
    )
    for lane, (name, values, words) in enumerate(lanes):
        y = 58.0 + 56 * lane
        picture.text(24, y + 22, name)
        for i, value in enumerate(values):
            look = "used" if i < 3 else "wrong" if value == 3 else "other"
            picture.rect(236 + (_CELL + 6) * i, y, _CELL, _CELL, class_=look, rx=4)
            picture.text(236 + (_CELL + 6) * i + _CELL / 2, y + 22, str(value), "code", "middle")
        picture.text(236 + (_CELL + 6) * 4 + 14, y + 22, words)
    return picture.svg(
        "a frozen size changes the padding, a size read on the device does not", _STYLE
    )
