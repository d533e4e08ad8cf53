"""`ostinato autopsy`: the node at which a replay failed, from a report or a graph file."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Annotated

import typer

from ostinato.cli import graph
from ostinato.cli.arguments import AsJson, expanded
from ostinato.cli.plain import say


def autopsy(
    path: Annotated[
        Path,
        typer.Argument(metavar="FILE", callback=expanded, help="A report, or a graph file."),
    ],
    inputs: graph.Inputs = None,
    constants: graph.Constants = None,
    code: graph.Code = None,
    device: graph.DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Print the report on a replay that failed.

    OSTINATO_BLACK_BOX=1 has such reports written; the error names the file. The nodes that may have
    been running come first, then all nodes with their pointers, and the known memory.

    A graph file is replayed, as by `ostinato graph run`, with a mark after each node; if it fails,
    the same is printed.
    """
    import ostinato as ost

    if zipfile.is_zipfile(path):
        try:
            with ost.black_box() as box:
                graph.run(path, inputs, None, constants, code, 1, device)
        except ost.errors.ContextPoisonedError:
            report = box.report
            assert report is not None
        else:
            say("no node failed")
            return
    else:
        report = ost.explain.BlackBoxReport.load(path)
        if inputs or constants or code or device:
            raise typer.BadParameter(f"{path} is a report, which is not replayed")
    if as_json:
        print(json.dumps(report.to_dict()))
        return
    say(str(report))
    say("")
    say(report.table())
