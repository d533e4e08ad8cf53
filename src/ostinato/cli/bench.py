"""`ostinato bench`: compares the ways of decoding, and profiles a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from ostinato.cli import arguments
from ostinato.cli.arguments import expanded, finite, ready_file, ready_folder
from ostinato.cli.endings import FAILED
from ostinato.cli.plain import plain, say
from ostinato.cli.progress import fetched
from ostinato.cli.ranks import other_ranks, rank_devices
from ostinato.models.extra import require_extra

if TYPE_CHECKING:
    from ostinato.bench.decode import DecodeResult
    from ostinato.bench.options import DecodeOptions
    from ostinato.bench.report import Result
    from ostinato.device import Device
    from ostinato.models import Checkpoint

DEFAULT_SHAPE = "135M"


def bench(
    shape: Annotated[
        str | None,
        typer.Option(
            help="Random weights of this shape: tiny, 135M, 360M, 1B or 8B.  "
            f"{DEFAULT_SHAPE} if no model is given."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A real model instead, as for `ostinato generate`.")
    ] = None,
    batch: Annotated[
        str, typer.Option(help="Sequences at once, 1 to 64; several as 1,8,32.")
    ] = "1",
    context: Annotated[
        str,
        typer.Option(
            help="Positions in the cache before the first token; several as 0,128,1024.  "
            "Batches are measured at the first one, the others with the first batch."
        ),
    ] = "20",
    uneven: Annotated[
        bool,
        typer.Option(
            "--uneven",
            help="The sequences of a batch stand at different positions, evenly from the context "
            "down to a part of it.",
        ),
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of each sequence in a run; by default 100, or 32 on the CPU."
        ),
    ] = None,
    tokens_per_launch: Annotated[
        str | None,
        typer.Option(help="Tokens for each launch of a WHILE node; 1 for none.  By default 16."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Also measure prompts of this many tokens in an empty cache; several as 128,512.  "
            "By default none."
        ),
    ] = None,
    library_rows: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Steps of this many rows or more multiply with cuBLASLt; 0 for never.  By default "
            "it depends on the model's size.",
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            help="auto, packed or bf16, as for `ostinato generate`; or q8_0, q4_0, q4_1, q5_0, "
            "q5_1, iq4_nl, q5_k, q6_k or q4_k_m: the shape's random weights are quantised so, and "
            "stay packed.",
        ),
    ] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds at most; all take turns in each.")] = 5,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1,
            callback=finite,
            help="No new round begins after this time; by default 120, or 45 on the CPU.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few tokens and one round: shows that it runs.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Instead measure each launch of one step of the first batch and context, from its "
            "graph.",
        ),
    ] = False,
    device: arguments.DeviceName = None,
    tensor_parallel: arguments.TensorParallel = 1,
    out: Annotated[
        Path | None,
        typer.Option(callback=expanded, help="Write the result file to this folder."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=expanded, help="Write a picture (SVG) to this file.")
    ] = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Measure decoding, by each way of launching.

    Four ways take turns in one run: launch by launch, captured graphs, recorded graphs, and many
    tokens a launch. The numbers are medians, beside the floor that is set by reading weights and
    cache at the bandwidth measured in the same run.
    A prompt's time ends with the first token after it. Where the output is no terminal, its last
    line is the result as one JSON object. The exit status is 1 if our ways do not choose the same
    tokens.
    """
    require_extra("`ostinato bench`")
    from ostinato.bench.decode import measure
    from ostinato.bench.floor import measure_bandwidth
    from ostinato.bench.options import DecodeOptions
    from ostinato.device import open_device
    from ostinato.models.backend import WeightsKind

    if shape is not None and model is not None:
        raise typer.BadParameter("give a shape or a model, not both", param_hint="--shape")
    output = Output(out, plot, as_json)
    if out is not None:
        ready_folder(out, "--out")
    if plot is not None:
        ready_file(plot, "--plot")
    parallel = tensor_parallel > 1
    if parallel and profile:
        raise typer.BadParameter(
            "a step of several ranks is not profiled: alone, a launch that waits for other ranks "
            "shows their times",
            param_hint="--profile",
        )
    if uneven and profile:
        raise typer.BadParameter(
            "a profile is of a step whose sequences stand at one position", param_hint="--profile"
        )
    devices = rank_devices(tensor_parallel, device)
    with open_device(devices[0]) as used:  # finds a wrong name before a model is fetched
        kind = weights if weights in get_args(WeightsKind) else None
        if kind is None and model is not None:
            raise typer.BadParameter(
                f"{weights!r}: a model has its own types; auto, packed or bf16",
                param_hint="--weights",
            )
        which = {"shape": shape, "model": model, "recipe": weights if kind is None else None}
        subject, opened = subject_of(**which)
        options = DecodeOptions.usual(
            used,
            batches=numbers(batch, "--batch"),
            contexts=numbers(context, "--context"),
            uneven=uneven,
            tokens=tokens,
            tokens_per_launch=numbers(tokens_per_launch, "--tokens-per-launch"),
            prompts=numbers(prompt, "--prompt"),
            library_rows="auto" if library_rows is None else library_rows or None,
            weights=kind or "packed",
            quick=quick,
            rounds=rounds,
            seconds=seconds,
        )

        def work() -> dict[str, Any]:
            assert bandwidth is not None
            path = None if model is None else str(fetched(model))
            told = {"options": asdict(options), "bandwidth": asdict(bandwidth)}
            return {"kind": "bench", "subject": which | {"model": path}, **told}

        with status() as log:
            bandwidth = None
            if parallel:  # before the other ranks start: slow on a busy CPU
                log("measuring the memory's bandwidth")
                bandwidth = measure_bandwidth(used)
            with other_ranks(devices, work) as group:
                if profile:
                    _profile(used, subject, opened, options, output, log)
                    return
                run = partial(measure, group=group, bandwidth=bandwidth)
                equal = compare(run, used, subject, opened, options, output, log)
    if not equal:
        raise typer.Exit(FAILED)


def compare(
    run: Callable[..., DecodeResult],
    device: Device,
    subject: str,
    opened: Callable[[], Checkpoint],
    options: DecodeOptions,
    output: Output,
    log: Callable[[str], None],
) -> bool:
    """Runs a comparison (`measure`), shows and writes its result; returns whether all ways chose
    the same tokens."""
    from ostinato.bench import report
    from ostinato.bench.plot import decode_svg

    found = run(device, opened, options, log=log)
    log("")
    _finish(
        report.decode_result(device, subject, options, found),
        output,
        lambda: report.show(subject, device, found),
        lambda: decode_svg(subject, device.properties.name, found.rows),
    )
    return not found.unequal


def _profile(
    device: Device,
    subject: str,
    opened: Callable[[], Checkpoint],
    options: DecodeOptions,
    output: Output,
    log: Callable[[str], None],
) -> None:
    from ostinato.bench import report
    from ostinato.bench.plot import profile_svg
    from ostinato.bench.profile import profile_subject

    found = profile_subject(device, opened, options, log)
    log("")
    _finish(
        report.profile_result(device, subject, found),
        output,
        lambda: report.show_profile(subject, device, found),
        lambda: profile_svg(subject, device.properties.name, found),
    )


def subject_of(
    shape: str | None = None, model: str | None = None, recipe: str | None = None
) -> tuple[str, Callable[[], Checkpoint]]:
    """Returns the name of the subject, and a function that opens it.  `recipe`: quantisation of
    random weights."""
    from ostinato.bench.random_weights import random_checkpoint
    from ostinato.bench.shapes import shape_named
    from ostinato.models import open_checkpoint

    if model is not None:
        path = fetched(model)
        return Path(model).stem, lambda: open_checkpoint(path)
    name = DEFAULT_SHAPE if shape is None else shape
    config = shape_named(name)
    if recipe is not None:
        name = f"{name}-{recipe.lower()}"
        random_checkpoint(config, name, recipe=recipe).close()  # raises for an unknown recipe
    return name, lambda: random_checkpoint(config, f"random-{name}", recipe=recipe)


def numbers(text: str | None, option: str) -> tuple[int, ...]:
    """Returns an option's comma-separated numbers; empty if it is not given."""
    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: whole numbers are wanted, with commas between them", param_hint=option
        ) from None


@dataclass(frozen=True, slots=True)
class Output:
    """The destinations of a result besides standard output, which gets JSON only or the tables
    too."""

    folder: Path | None
    picture: Path | None
    only_json: bool


def _finish(
    result: Result, output: Output, show: Callable[[], None], picture: Callable[[], str]
) -> None:
    """Shows, writes, draws and prints a result; prints it also if it cannot be written."""
    from ostinato.models.files.reading import write_file

    if not output.only_json:
        show()
    notes = sys.stderr if output.only_json else sys.stdout
    try:
        if output.folder is not None:
            say(f"results: {result.write(output.folder)}", stream=notes)
        if output.picture is not None:
            write_file(output.picture, picture())
            say(f"drawn to {output.picture}", stream=notes)
    finally:
        if output.only_json or not sys.stdout.isatty():
            print(result.line())


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Shows progress on the error stream: on a terminal as one changing line."""
    if not sys.stderr.isatty():
        begin = time.monotonic()

        def say(text: str) -> None:
            if text:
                print(f"{time.monotonic() - begin:6.1f} s  {text}", file=sys.stderr, flush=True)

        yield say
        return
    from rich.console import Console

    with Console(stderr=True).status("…") as status:
        yield lambda text: status.stop() if not text else status.update(plain(text))
