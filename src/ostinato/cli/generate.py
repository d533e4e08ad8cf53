"""`ostinato generate`: a real model answers, token by token, through captured graphs."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated

import typer

from ostinato.cli.arguments import text
from ostinato.cli.endings import INTERRUPTED
from ostinato.cli.progress import fetched

__all__ = ["generate"]


class Build(StrEnum):
    """How the graphs are made."""

    capture = "capture"
    record = "record"


def generate(
    prompt: Annotated[str, typer.Argument(callback=text, help="What to say to the model.")],
    model: Annotated[
        str,
        typer.Option(
            help="A GGUF file; a folder with safetensors, config.json and tokenizer.json; "
            "a known name (`ostinato model list`); or a Hugging Face id (with the hub extra)."
        ),
    ] = "smollm2-135m",
    max_tokens: Annotated[int, typer.Option(min=1, help="At most so many new tokens.")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token (greedy).")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among so many tokens; 0 for all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Choose among the likeliest of this total probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same answer.")] = 0,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Through the model's chat template, or the text as it is. "
            "By itself: chat if there is a template.",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(callback=text, help="A system message, for chats.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help='"host", "cuda:0", ...; by itself the GPU where there is one.'),
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(min=1, help="Positions in the KV cache.")
    ] = None,
    eager: Annotated[bool, typer.Option("--eager", help="No graphs: launch by launch.")] = False,
    build: Annotated[
        Build, typer.Option(help="Graphs from stream capture, or by hand from a recorded run.")
    ] = Build.capture,
    tokens_per_launch: Annotated[
        int,
        typer.Option(min=1, max=256, help="Tokens of one graph launch, by a loop on the device."),
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="The last line is the summary as one JSON object.")
    ] = False,
) -> None:
    """Answer a prompt, printing the tokens as they come, then a summary.

    The model runs on the GPU where there is one, else on the CPU with the same graphs.  Ctrl-C
    stops it and still prints the summary; the exit status is then 130.
    """
    from ostinato.device import open_device
    from ostinato.models.generate import TextGenerator
    from ostinato.models.sampling import SamplingOptions

    sampling = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    interrupted = False
    with (
        open_device(device) as opened,  # a wrong name is found before a model is fetched
        TextGenerator(
            opened, fetched(model), max_context=max_context, graphs=not eager, build=build.value
        ) as generator,
    ):
        answer = generator.generate(
            prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            chat=chat,
            system=system,
            tokens_per_launch=tokens_per_launch,
        )
        try:
            for piece in answer:
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            interrupted = True
        summary = answer.summary()
    sys.stdout.write("\n")
    print(json.dumps(summary.as_dict()) if as_json else f"\n{summary}")
    if interrupted:
        raise typer.Exit(INTERRUPTED)
