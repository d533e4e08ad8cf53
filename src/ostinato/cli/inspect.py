"""`ostinato inspect`: the graph of a decode step as a table, as data or as a picture."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ostinato.cli.arguments import AsJson, DeviceName, Rows, expanded, ready_file
from ostinato.cli.plain import say
from ostinato.cli.progress import fetched
from ostinato.models.arguments import counted
from ostinato.models.extra import require_extra
from ostinato.models.files.reading import write_file

_CONTEXT = 512


class What(StrEnum):
    """The step whose graph is shown."""

    decode = "decode"
    prefill = "prefill"


def inspect(
    what: Annotated[
        What, typer.Argument(help="decode (with the choice of a token) or prefill (without).")
    ] = What.decode,
    model: Annotated[str, typer.Option(help="As for `ostinato generate`.")] = "smollm2-135m",
    rows: Rows = 1,
    device: DeviceName = None,
    as_json: AsJson = False,
    dot: Annotated[bool, typer.Option("--dot", help="In Graphviz' language.")] = False,
    svg: Annotated[
        Path | None, typer.Option(callback=expanded, help="Write a picture to this file.")
    ] = None,
) -> None:
    """Capture a step of a model and show its graph."""
    require_extra("`ostinato inspect`")
    from ostinato.device import open_device
    from ostinato.models.decoder import Decoder
    from ostinato.models.files.open import open_checkpoint

    if as_json and dot:
        raise typer.BadParameter("--json or --dot, not both", param_hint="--dot")
    if svg is not None:
        ready_file(svg, "--svg")
    with (
        open_device(device) as opened,  # finds a wrong name before a model is fetched
        open_checkpoint(fetched(model)) as checkpoint,
        Decoder(
            opened, checkpoint, max_context=min(_CONTEXT, checkpoint.config.context_length)
        ) as decoder,
    ):
        graph = decoder.graph(rows, sampled=what is What.decode)
        if svg is not None:
            write_file(svg, graph.to_svg())
            if not (as_json or dot):  # their output is read by other programs
                say(f"{counted(len(graph), 'node')} drawn to {svg}")
        if as_json:
            print(json.dumps(graph.to_dict()))
        elif dot:
            say(graph.to_dot())
        elif svg is None:
            say(str(graph))
