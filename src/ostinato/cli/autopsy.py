"""`ostinato autopsy`: the node at which a replay failed, from a report or a graph file."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ostinato.cli import graph
from ostinato.cli.arguments import AsJson, DeviceName, expanded
from ostinato.cli.plain import say

if TYPE_CHECKING:
    from numpy.typing import NDArray


def autopsy(
    path: Annotated[
        Path,
        typer.Argument(metavar="FILE", callback=expanded, help="A report, or a graph file."),
    ],
    inputs: Annotated[
        Path | None,
        typer.Option(
            callback=expanded, help="Inputs by name, in NumPy's .npz; the others are the file's."
        ),
    ] = None,
    constants: graph.Constants = None,
    code: graph.Code = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Print the report on a replay that failed.

    OSTINATO_BLACK_BOX=1 has such reports written; the error names the file. The nodes that may have
    been running come first, then all nodes with their pointers, and the known memory.

    A graph file is replayed, as by `ostinato graph run`, with a mark after each node; if it fails,
    the same is printed. A report names the file of its graph and inputs, if it has one. Constants
    that are neither given nor in the file are zeros, which is said.
    """
    import ostinato as ost

    if zipfile.is_zipfile(path):
        try:
            given = _constants(path, constants, code)
            with ost.black_box(inputs=0) as box:
                graph.replay(path, inputs, None, given, code, 1, device, stored=True)
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


def _constants(path: Path, given: Path | None, code: Path | None) -> dict[str, NDArray[Any]]:
    """Returns the constants of a graph file that are in it by name: given ones, or zeros."""
    import numpy as np

    from ostinato.graphfile.container import open_file
    from ostinato.graphfile.loading import constants_of

    values = constants_of(given)[1]
    with open_file(path, code) as contents:
        buffers = [one for one in contents.manifest.buffers if "constant" in one.roles]
    zeros = {
        one.name: np.zeros(one.shape, one.dtype)
        for one in buffers
        if not (one.stored or one.name in values)
    }
    if zeros:
        say(f"zeros: {', '.join(zeros)} (constants by name: --constants)", stream=sys.stderr)
    return zeros | {one.name: values[one.name] for one in buffers if one.name in values}
