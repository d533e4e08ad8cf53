"""`ostinato autopsy`: what a black box wrote when a replay failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ostinato.cli.arguments import AsJson, expanded
from ostinato.cli.plain import say


def autopsy(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", callback=expanded, help="The report's file.")
    ],
    as_json: AsJson = False,
) -> None:
    """Print the report on a replay that failed.

    OSTINATO_BLACK_BOX=1 has such reports written; the error names the file. The nodes that may have
    been running come first, then all nodes with their pointers, and the known memory.
    """
    from ostinato.explain import BlackBoxReport

    report = BlackBoxReport.load(path)
    if as_json:
        print(json.dumps(report.to_dict()))
        return
    say(str(report))
    say("")
    say(report.table())
