"""The commands together, and what happens to an error of ours: its words, and exit status 1."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ostinato import __version__
from ostinato.cli.bench import bench
from ostinato.cli.cache import app as cache_app
from ostinato.cli.doctor import doctor
from ostinato.cli.generate import generate
from ostinato.cli.inspect import inspect
from ostinato.cli.model import app as model_app
from ostinato.cli.tune import tune
from ostinato.errors import OstinatoError

__all__ = ["app", "main"]

app = typer.Typer(
    name="ostinato",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Capture GPU work into CUDA graphs once, and play it again: here with a real model.",
)
app.command("generate")(generate)
app.command("inspect")(inspect)
app.command("bench")(bench)
app.command("doctor")(doctor)
app.command("tune")(tune)
app.add_typer(model_app, name="model")
app.add_typer(cache_app, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ostinato {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point: errors of this library are printed without a traceback."""
    try:
        app()
    except OstinatoError as error:
        print(f"error: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(f"  {note}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left: not our error
        sys.exit(141)
