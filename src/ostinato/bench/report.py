"""The results of a benchmark: a table on the terminal, a result file, one line of JSON.

A result is JSON data, `"schema": "ostinato.benchmark/1"`: `benchmark`, `ceiling` (the physical
bound of the numbers, with its inputs), `summary`, `machine`, `settings`, `rows` (one record for
each line of the table), `skipped` (reasons by contestant that was not measured).  The file is
`{folder}/{benchmark}-{device}.json`.  A comparison's rows have a `kind`: "decode" (the fields of
`decode.Row`, and `Contestant.details`) or "prompt" (the fields of `decode.PromptRow`).
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import ostinato as ost
from ostinato.bench.decode import DecodeResult, PromptRow, Row
from ostinato.bench.options import DecodeOptions
from ostinato.bench.profile import Profile
from ostinato.files import replace_file

SCHEMA = "ostinato.benchmark/1"
_LIBRARIES = (
    "ostinato",
    "numpy",
    "cuda-core",
    "cuda-bindings",
    "torch",
    "transformers",
    "cupy-cuda13x",
)


def commit() -> str:
    """Returns OSTINATO_COMMIT, else the commit of the git checkout that contains this file, else
    "unknown"."""
    given = os.environ.get("OSTINATO_COMMIT")
    if given:
        return given
    here = Path(__file__).resolve()
    try:
        # In a virtual environment inside another repository, this file is not tracked.
        for command in (["ls-files", "--error-unmatch", here.name], ["rev-parse", "HEAD"]):
            answer = subprocess.run(
                ["git", *command], cwd=here.parent, capture_output=True, text=True, check=True
            )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer.stdout.strip()[:12]


def machine(device: ost.Device) -> dict[str, object]:
    """Returns the `machine` of a result: the device, the processor, and versions."""
    properties = device.properties
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": properties.name,
        "driver": device.name,
        "driver_version": properties.driver_version,
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one benchmark, with the fields of its file."""

    benchmark: str
    ceiling: Mapping[str, object]
    summary: Mapping[str, object]
    machine: Mapping[str, object]
    settings: Mapping[str, object]
    rows: Sequence[Mapping[str, object]]
    skipped: Mapping[str, str]

    def to_dict(self) -> dict[str, object]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"schema": SCHEMA, **values}

    def write(self, folder: Path) -> Path:
        """Writes the file, whole or not at all, makes the folder if needed, and returns the file's
        path.  Raises OSError."""
        slug = re.sub(r"[^a-z0-9]+", "-", str(self.machine["device"]).lower()).strip("-")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.benchmark}-{slug}.json"
        text = json.dumps(self.to_dict(), indent=1) + "\n"
        replace_file(path, text.encode(), private=False)
        return path

    def line(self) -> str:
        """Returns the result as one line of JSON."""
        return json.dumps(self.to_dict())


def decode_result(
    device: ost.Device, subject: str, options: DecodeOptions, found: DecodeResult
) -> Result:
    """Returns a comparison as a result.  `subject`: the shape's or model's name, which is part of
    the benchmark's name, as are the options that vary."""
    ceiling: dict[str, object] = {
        "what": "every weight once, and keys and values of all positions, over the bandwidth",
        "bandwidth": found.bandwidth.how,
        "bandwidth_gb_per_s": _gigabytes(found.bandwidth.best),
        "read_gb_per_s": _gigabytes(found.bandwidth.read),
        "copy_gb_per_s": _gigabytes(found.bandwidth.copy),
        "weight_bytes": found.traffic.weights,
        "bytes_per_position": found.traffic.position,
        "floor_us_at_context_0": round(found.traffic.weights / found.bandwidth.best * 1e6, 2),
    }
    if found.ranks > 1:
        ceiling["ranks"] = (
            "bytes of one rank's share, nothing for what the ranks exchange; on a CPU the ranks "
            "share the bandwidth"
        )
    if options.prompts:
        ceiling["prompt"] = (
            "every weight once for each piece of the prompt, the output head once, and for each "
            "piece keys and values up to its end, over the bandwidth; arithmetic is not counted"
        )
    best = max((row for row in found.rows if row.ours), key=_first_point, default=None)
    summary: dict[str, object] = {"tokens_equal": not found.unequal}
    if found.unequal:
        summary["unequal"] = list(found.unequal)
    if best is not None:
        summary["best"] = best.way
        summary["tokens_per_second"] = round(best.tokens_per_second, 1)
        summary["of_floor"] = round(best.of_floor, 3)
    ours = [row for row in found.prompts if row.ours]
    if ours:
        summary["prompt_tokens_per_second"] = {
            str(prompt): round(max(r.tokens_per_second for r in ours if r.prompt == prompt), 1)
            for prompt in dict.fromkeys(row.prompt for row in ours)
        }
    return Result(
        _name("decode", subject, options, found.ranks),
        ceiling,
        summary,
        machine(device),
        {
            "model": subject,
            **asdict(options),
            "library": found.library,
            "weights": found.weights,
            "weights_on_device_bytes": found.device_bytes,
            "ranks": found.ranks,
            "collectives": found.collectives,
            "peer_versions": dict(found.versions),
        },
        [*(row.to_dict() for row in found.rows), *(row.to_dict() for row in found.prompts)],
        found.skipped,
    )


def _name(kind: str, subject: str, options: DecodeOptions, ranks: int = 1) -> str:
    """Returns a benchmark's name, with the options that are not the defaults, so that results of
    different kinds have different files."""
    parts, plain = [kind, subject], DecodeOptions()
    if len(options.batches) > 1:
        parts.append("batches")
    elif options.batches != plain.batches:
        parts.append(f"batch-{options.batches[0]}")
    if len(options.contexts) > 1:
        parts.append("contexts")
    elif options.contexts != plain.contexts:
        parts.append(str(options.contexts[0]))
    if options.uneven:
        parts.append("uneven")
    if options.prompts:
        parts.append("prompt")
    if options.library_rows is None:
        parts.append("own-products")
    if ranks > 1:
        parts.append(f"{ranks}-ranks")
    return "-".join(parts)


def _gigabytes(nbytes: float) -> float:
    """Returns gigabytes to four significant digits."""
    return float(f"{nbytes / 1e9:.4g}")


def _first_point(row: Row) -> tuple[int, int, float]:
    """Returns a key whose maximum is the smallest batch, then the smallest context, then the
    fastest."""
    return -row.batch, -row.context, row.tokens_per_second


def profile_result(device: ost.Device, subject: str, profile: Profile) -> Result:
    """Returns a step's profile as a result."""
    point = DecodeOptions(batches=(profile.batch,), contexts=(profile.position,))
    return Result(
        _name("profile", subject, point),
        {
            "what": "the launch's bytes over the bandwidth",
            "bandwidth": profile.bandwidth.how,
            "bandwidth_gb_per_s": _gigabytes(profile.bandwidth.best),
            "floor_us": round(profile.floor_us, 2),
        },
        profile.summary(),
        machine(device),
        {"model": subject, "batch": profile.batch, "position": profile.position},
        [row.to_dict() for row in profile.rows],
        {},
    )


# ------------------------------------------------------------------------------------- the terminal


def _print(title: str, rows: Sequence[Mapping[str, str]], groups: Sequence[object]) -> None:
    """Prints a table of rows by column, the first left-aligned, with a line between groups."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, name in enumerate(rows[0] if rows else ()):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row, group, after in zip(rows, groups, [*groups[1:], None], strict=True):
        table.add_row(*row.values(), end_section=group != after)
    # Output to a file gets a width that holds the tables.
    Console(width=None if sys.stdout.isatty() else 110, highlight=False).print(table)


def _times_ours(row: Row | PromptRow) -> str:
    return "-" if row.ours_is is None or row.ours else f"{row.ours_is:.2f} x"


def show(subject: str, device: ost.Device, found: DecodeResult) -> None:
    """Prints the tables of a comparison."""
    lines = []
    for row in found.rows:
        launches = row.details.get("launches_per_token")
        lines.append(
            {
                "way": row.way,
                "batch": str(row.batch),
                "context": str(row.context),
                "tok/s": f"{row.tokens_per_second:,.1f}",
                "us a token": f"{row.token_us:,.1f}",
                "between": "-" if row.between_us is None else f"{row.between_us:,.1f}",
                "of floor": f"{row.of_floor:.1%}",
                "launches": f"{launches:.3g}" if isinstance(launches, float | int) else "-",
                "ours is": _times_ours(row),
            }
        )
    where = f"{found.ranks} x " * (found.ranks > 1) + device.properties.name
    points = [(row.batch, row.context) for row in found.rows]
    _print(f"decoding {subject} on {where}", lines, points)
    if found.prompts:
        lines = [
            {
                "way": row.way,
                "prompt": str(row.prompt),
                "at once": str(row.piece),
                "tok/s": f"{row.tokens_per_second:,.1f}",
                "ms to first token": f"{row.first_token_us / 1e3:,.2f}",
                "of floor": f"{row.of_floor:.1%}",
                "ours is": _times_ours(row),
            }
            for row in found.prompts
        ]
        title = f"prompts of {subject} on {device.properties.name}"
        _print(title, lines, [row.prompt for row in found.prompts])
    print(f"floor: {found.bandwidth.best / 1e9:,.0f} GB/s, by {found.bandwidth.how}")
    if found.weights:
        of = "of each rank" if found.ranks > 1 else "on the device"
        print(f"weights: {found.weights}, {found.device_bytes / 1e6:,.0f} MB {of}")
    if found.collectives:
        print(f"ranks exchange by: {found.collectives}")
    for name, why in found.skipped.items():
        print(f"not measured: {name}: {why}")
    for line in found.unequal:
        print(f"NOT EQUAL: {line}")


def show_profile(subject: str, device: ost.Device, profile: Profile) -> None:
    """Prints the table of a step's profile."""
    lines = [
        {
            "launch": row.name,
            "times": str(row.launches),
            "us each": f"{row.us:.2f}",
            "us in all": f"{row.total_us:.1f}",
            "alone": f"{row.alone_us:.2f}",
            "KB each": f"{row.nbytes / 1e3:,.1f}",
            "TB/s": f"{row.terabytes_per_second:.3g}" if row.nbytes else "-",
            "of floor": f"{row.of_floor:.1%}" if row.nbytes else "-",
            "share": f"{row.total_us / profile.step_us:.1%}",
        }
        for row in profile.rows
    ]
    title = (
        f"one step of {subject}, batch {profile.batch}, at position {profile.position}, on "
        f"{device.properties.name}"
    )
    _print(title, lines, [0] * len(lines))
    print(profile.explanation())
