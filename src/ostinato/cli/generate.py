"""`ostinato generate`: a model answers a prompt, token by token, through captured graphs."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ostinato.cli import arguments
from ostinato.cli.endings import INTERRUPTED
from ostinato.cli.plain import say
from ostinato.cli.progress import prompt_progress
from ostinato.cli.ranks import following_ranks, rank_devices, rank_threads
from ostinato.cli.speaker import sampling_options, show, speaker
from ostinato.models.extra import require_extra


class Build(StrEnum):
    """The way in which graphs are made."""

    capture = "capture"
    record = "record"


def generate(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            callback=arguments.texts,
            help="What to say to the model, in quotes or not.  What is piped in is added after a "
            "blank line; it is the prompt if there are no words, or - alone.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", callback=arguments.expanded, help="Read the prompt from this file."
        ),
    ] = None,
    model: arguments.ModelName = "smollm2-135m",
    max_tokens: arguments.MaxTokens = 256,
    temperature: arguments.Temperature = 0.0,
    top_k: arguments.TopK = 0,
    top_p: arguments.TopP = 1.0,
    min_p: arguments.MinP = 0.0,
    repetition_penalty: arguments.RepetitionPenalty = 1.0,
    seed: arguments.Seed = None,
    stop: arguments.Stops = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Through the model's chat template, or the text as it is. "
            "By default chat, if there is a template.",
        ),
    ] = None,
    system: arguments.System = None,
    template_args: arguments.TemplateArgs = None,
    device: arguments.DeviceName = None,
    max_context: arguments.MaxContext = None,
    threads: arguments.Threads = None,
    tensor_parallel: arguments.TensorParallel = 1,
    weights: arguments.WeightsOption = arguments.WeightsName.auto,
    no_graphs: arguments.NoGraphs = False,
    build: Annotated[
        Build,
        typer.Option(help="Make graphs by stream capture, or node by node from a recorded run."),
    ] = Build.capture,
    tokens_per_launch: arguments.TokensPerLaunch = 1,
    lookup: arguments.Lookup = 0,
    as_json: arguments.AsJson = False,
    stream_json: Annotated[
        bool,
        typer.Option(
            "--stream-json",
            help='Print a JSON line for each piece, {"text": ...}, and then {"summary": ...}.',
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No summary and no progress bars.")
    ] = False,
) -> None:
    """Answer a prompt, printing the text as it comes.

    The answer goes to standard output; progress and a summary go to the error stream. The model
    runs on the GPU where there is one, else on the CPU with the same graphs. Ctrl-C stops the
    answer and still prints the summary; the exit status is then 130.

    Without options the likeliest token is always taken (greedy), so that the same prompt gives the
    same answer. Small models repeat themselves then: --temperature 0.7 --min-p 0.05
    --repetition-penalty 1.1 reads better. (chat and serve do so by themselves.)

    With --tensor-parallel this process is rank 0 and starts the others. Ctrl-C, and any rank that
    fails, dies or stops (OSTINATO_GROUP_DEADLINE), end all of them.
    """
    require_extra("`ostinato generate`")
    from ostinato.models.sampling import GREEDY

    if as_json and stream_json:
        raise typer.BadParameter("--json or --stream-json, not both", param_hint="--stream-json")
    wanted = arguments.read_prompt(prompt, file)
    sampling = sampling_options(
        GREEDY,
        seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    devices = rank_devices(tensor_parallel, device)
    options: dict[str, Any] = {
        "threads": rank_threads(devices, threads),
        "weights": weights.value,
        "max_context": max_context,
        "graphs": False if no_graphs else None,
        "lookup": lookup,
        "build": build.value,
    }
    call: dict[str, Any] = {
        "prompt": wanted,
        "max_tokens": max_tokens,
        "chat": chat,
        "system": system,
        "template_args": arguments.read_template_args(template_args),
        "tokens_per_launch": tokens_per_launch,
        "stop": stop or (),
    }

    interrupted = False
    with (
        following_ranks(devices, model, options) as leading,
        speaker(model, device=devices[0], quiet=quiet, **options, **leading) as generator,
    ):
        with prompt_progress(quiet=quiet) as progress:
            answer = generator.generate(**call, sampling=sampling, progress=progress)
            try:
                for piece in answer:
                    if not as_json:
                        show(_line(text=piece) if stream_json else piece)
            except KeyboardInterrupt:
                interrupted = True
        summary = answer.summary()
    if as_json:
        sys.stdout.write(json.dumps(summary.to_dict()) + "\n")
    elif stream_json:
        sys.stdout.write(_line(summary=summary.to_dict()))
    else:
        sys.stdout.write("\n")
        sys.stdout.flush()
        if not quiet:
            together = sys.stdout.isatty() and sys.stderr.isatty()
            say(f"\n{summary}" if together else f"{summary}", stream=sys.stderr)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _line(**entry: object) -> str:
    return json.dumps(entry) + "\n"
