"""The app that joins all commands, and the entry point."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import typer

from ostinato import __version__
from ostinato.cli.arguments import as_typed
from ostinato.cli.autopsy import autopsy
from ostinato.cli.bench import bench
from ostinato.cli.cache import app as cache_app
from ostinato.cli.chat import chat
from ostinato.cli.doctor import doctor
from ostinato.cli.endings import ending, own_process
from ostinato.cli.generate import generate
from ostinato.cli.graph import app as graph_app
from ostinato.cli.inspect import inspect
from ostinato.cli.model import app as model_app
from ostinato.cli.serve import serve
from ostinato.cli.tune import tune
from ostinato.errors import InputError

app = typer.Typer(
    name="ostinato",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Capture GPU work into CUDA graphs once and replay it: here with a real model.",
    epilog="Exit status: 0 done; 1 failed; 2 for a bad option, argument or setting; 128 + n if "
    "signal n ended it.",
)
for _command in (generate, chat, serve, inspect, bench, doctor, autopsy, tune):
    app.command()(_command)
app.add_typer(model_app, name="model")
app.add_typer(cache_app, name="cache")
app.add_typer(graph_app, name="graph")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ostinato {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def run(arguments: Sequence[str], process: AbstractContextManager[None] | None = None) -> int:
    """Runs one command, given without the program's name, inside `process`; returns the exit
    status."""

    def command() -> None:
        # Calling `app` would handle errors and exit statuses in typer's way.
        parsed = typer.main.get_command(app)
        try:
            with (
                process or nullcontext(),
                parsed.make_context("ostinato", list(arguments)) as context,
            ):
                parsed.invoke(context)
        except InputError as error:
            error.args = (as_typed(str(error), _invoked(parsed, arguments)),)
            raise

    return ending(command)


def _invoked(command: Any, arguments: Sequence[str]) -> Any:
    for word in arguments:
        found = getattr(command, "commands", {}).get(word)
        if found is None:
            break
        command = found
    return command


def main() -> None:
    """The entry point."""
    sys.exit(run(sys.argv[1:], own_process()))
