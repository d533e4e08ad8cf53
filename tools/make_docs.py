"""Writes the generated parts of the docs: --help texts in docs/cli.md, docs/errors.md, docs/log.md,
pictures from captures, figures from benchmarks/results, the output of samples.

python -m tools.make_docs           writes them
python -m tools.make_docs --check   lists those that are stale; exit status 1 if there are any
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
import textwrap
from pathlib import Path

os.environ.update(COLUMNS="88", TERM="dumb", NO_COLOR="1")
os.environ.pop("FORCE_COLOR", None)

import click
import numpy as np
import typer

import ostinato as ost
from ostinato import errors, settings
from ostinato.bench.floor import Bandwidth
from ostinato.bench.plot import profile_svg
from ostinato.bench.profile import Profile, ProfileRow
from ostinato.cli import app
from ostinato.relational import JoinKey
from ostinato.relational.chain import KERNELS, chain_of, source
from tools import figures, pictures, samples

ROOT = Path(__file__).resolve().parent.parent


_HELP = re.compile(r"(?<=<!-- help: written by make docs -->\n).*?(?=<!-- end -->)", re.S)


def with_help(page: str) -> str:
    """Returns docs/cli.md with the help of every command, in the order of the commands, and the
    environment variables of the library."""
    parts: list[str] = []
    root = typer.main.get_command(app)
    names = {"help_option_names": root.context_settings["help_option_names"]}

    def add(command: click.Command, path: str, depth: int) -> None:
        context = click.Context(
            command, info_name=path, terminal_width=88, max_content_width=88, **names
        )
        text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
        parts.append(f"\n{'#' * depth} `{path}`\n\n```\n{text.strip()}\n```\n")
        for name, sub in getattr(command, "commands", {}).items():
            add(sub, f"{path} {name}", min(depth + 1, 4))

    add(root, "ostinato", 2)
    parts.append(
        "\n## Environment\n\nThe library reads these too.\n\n| variable | meaning |\n|---|---|\n"
    )
    parts += [f"| `{variable.name}` | {variable.doc} |\n" for variable in settings.ALL]
    (found,) = _HELP.finditer(page)
    return page[: found.start()] + "".join(parts) + page[found.end() :]


def graph_picture() -> str:
    """Draws a small captured graph with a fork, as SVG."""

    @ost.host_kernel("x: *const f32, out: *out f32, n: u32")
    def normalise(launch, x, out, n):
        out[:n] = x[:n]

    @ost.host_kernel("x: *const f32, weights: *const f32, out: *out f32, n: u32")
    def project(launch, x, weights, out, n):
        out[:n] = weights[:n] * x[:n]

    @ost.host_kernel("a: *const f32, b: *const f32, out: *out f32, n: u32")
    def multiply(launch, a, b, out, n):
        out[:n] = a[:n] * b[:n]

    source = ost.Source(host=[normalise, project, multiply], name="picture")
    with ost.open_device("host") as device:
        stream, side = device.create_stream(), device.create_stream()
        k = {n: device.modules.get_or_compile(source, n) for n in source.host}
        x, gate, up, out = (device.zeros(2048, np.float32) for _ in range(4))
        shape = ost.LaunchConfig(grid=8, block=256)
        with ost.capture(stream) as capture:
            ost.fill(stream, out, 0)
            ost.launch(stream, k["normalise"], shape, x, out, 2048)
            side.wait(stream.record())
            ost.launch(stream, k["project"], shape, out, x, gate, 2048)
            ost.launch(side, k["project"], shape, out, x, up, 2048)
            stream.wait(side.record())
            ost.launch(stream, k["multiply"], shape, gate, up, out, 2048)
            ost.copy(stream, x, out)
        return without_addresses(capture.graph.to_svg())


def join_picture() -> str:
    """Draws the graph of an inner join of 1,000 rows on a GPU with 132 multiprocessors."""
    key = JoinKey.of("inner", 1, 8, rows=1000, right_rows=1000, capacity=1000)
    with ost.open_device("host") as device:
        stream = device.create_stream()
        ring, state, block = (device.zeros(1 << 15, "bytes") for _ in range(3))
        kernels = dict(zip(KERNELS, device.modules.preload([(source(), KERNELS)]), strict=True))
        with ost.capture(stream) as capture:
            for one in chain_of(key, multiprocessors=132):
                first = (ring, state) if one.kernel == "begin" else ()
                config = one.config(programmatic=True)
                ost.launch(stream, kernels[one.kernel], config, *first, block, *one.numbers)
        return without_addresses(capture.graph.to_svg())


def profile_picture(shape: str) -> str:
    """Draws a step's profile on an H100 from its results file, as `ostinato bench` does."""
    result = figures.results(f"profile-{shape}-{figures.H100}")
    ceiling, summary, settings = result["ceiling"], result["summary"], result["settings"]
    fields = [field.name for field in dataclasses.fields(ProfileRow)]
    rows = tuple(ProfileRow(**{name: row[name] for name in fields}) for row in result["rows"])
    layers = max(row.launches for row in rows)
    # The file's launches are in order and have no names: the first and last kernels run once, the
    # others in every layer.
    of_layer = [row.name for row in rows if row.launches == layers]
    names: list[str] = []
    for row in rows:
        names += [row.name] if row.launches == 1 else of_layer * layers * (row.name == of_layer[0])
    profile = Profile(
        batch=settings["batch"],
        position=settings["position"],
        step_us=summary["step_us"],
        start_us=summary["start_us"],
        gap_us=summary["gap_us_per_launch"],
        event_us=summary["event_us"],
        alone_us=summary["alone_us"],
        floor_us=ceiling["floor_us"],
        bandwidth=Bandwidth(ceiling["bandwidth_gb_per_s"] * 1e9, 0, ceiling["bandwidth"]),
        rows=rows,
        launch_names=tuple(names),
        launch_us=tuple(summary["launch_us"]),
    )
    return profile_svg(shape, result["machine"]["device"], profile)


def without_addresses(picture: str) -> str:
    # Addresses differ from run to run: they are numbered in the order in which they appear.
    found = dict.fromkeys(re.findall(r"0x[0-9a-f]{6,}", picture))
    for number, address in enumerate(found, start=1):
        picture = picture.replace(address, f"0x{number:x}000")
    return picture.replace(f"{ROOT}/", "")


def errors_page() -> str:
    """Returns docs/errors.md: the tree of exceptions, and the meaning of every driver status."""
    tree = inspect.getdoc(errors).split("\n\n")[1]  # type: ignore[union-attr]
    rows = "".join(
        f'| <a id="{int(status)}"></a>{int(status)} | {status.name} '
        f"| {type(errors.driver_error(status, '')).__name__} | {words.meaning} | {words.advice} |\n"
        for status, words in ((status, errors.explain(status)) for status in errors.Status)
        if status is not errors.Status.SUCCESS
    )
    lines = [
        "# Errors by status number\n",
        "<!-- Written from `ostinato.errors` by `make docs`: do not edit by hand. -->\n",
        "Everything that the library raises on purpose is an `ost.errors.OstinatoError`. An error",
        "says what failed, which node, key or file, the driver's status where there is one, and",
        "what to do.\n",
        f"```\n{textwrap.dedent(tree)}\n```\n",
        "A `DriverError` carries the status of the driver's call (`CUresult` in cuda.h), whichever",
        "driver it is. `ost.errors.explain(status)` gives the same words in a program.\n",
        "| status | name | raised as | it means | what to do |\n|---|---|---|---|---|",
    ]
    return "\n".join(lines) + "\n" + rows


_ENTRIES = re.compile(r"(?<=<!-- entries: written by make docs -->\n).*?(?=<!-- end -->)", re.S)


def log_page() -> str:
    """Returns docs/log.md with the titles of the entries in each of the log's files."""
    lines = []
    for file in sorted((ROOT / "docs/log").glob("*.md")):
        subject, *titles = re.findall(r"^##? (.+)$", file.read_text(encoding="utf-8"), re.M)
        about = f"- **[{subject.removeprefix('Log: ')}](log/{file.name})**: {'. '.join(titles)}."
        lines.append(textwrap.fill(about, 118, subsequent_indent="  ", break_long_words=False))
    page = (ROOT / "docs/log.md").read_text(encoding="utf-8")
    (found,) = _ENTRIES.finditer(page)
    return page[: found.start()] + "\n".join([*lines, ""]) + page[found.end() :]


WRITTEN = {
    "docs/errors.md": errors_page,
    "docs/log.md": log_page,
    "docs/timeline.svg": pictures.timeline,
    "docs/graph.svg": graph_picture,
    "docs/join.svg": join_picture,
    "docs/profile-135M.svg": lambda: profile_picture("135M"),
    "docs/profile-1B.svg": lambda: profile_picture("1B"),
}


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    texts = {name: make() for name, make in WRITTEN.items()}
    for name in dict.fromkeys((*figures.PAGES, *samples.PAGES)):
        text = (ROOT / name).read_text(encoding="utf-8")
        try:
            text = figures.filled(text) if name in figures.PAGES else text
            texts[name] = samples.filled(name, text) if name in samples.PAGES else text
        except (figures.FigureError, samples.SampleError) as error:
            raise SystemExit(f"{name}: {error}") from error
    texts["docs/cli.md"] = with_help((ROOT / "docs/cli.md").read_text(encoding="utf-8"))
    for name, text in texts.items():
        path = ROOT / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name}: {'stale; run make docs' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
