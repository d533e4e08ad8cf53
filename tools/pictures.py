"""Draws docs/timeline.svg for `make docs`, in the reader's light or dark scheme.

Times come from results files, and are to scale.  docs/buckets.svg and docs/padding.svg have no
measured figures: no code writes them.
"""

from __future__ import annotations

from ostinato.graph.show.drawing import Drawing
from tools import figures

_STYLE = """
    .card { fill: #ffffff; stroke: #d5dbe4; }
    text { font-family: ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
           font-size: 13px; fill: #3c4654; }
    .title { font-size: 15px; font-weight: 700; fill: #1b2330; }
    .track { fill: #7b90af; fill-opacity: 0.13; }
    .host { fill: #c98a12; }
    .gpu { fill: #3b6fd6; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #14181f; stroke: #303947; }
      text { fill: #c4cbd6; }
      .title { fill: #f0f3f7; }
      .gpu { fill: #6f9bf0; }
    }
"""


def timeline() -> str:
    """Returns the SVG: a decode step on host and GPU, launched kernel by kernel and replayed."""
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
