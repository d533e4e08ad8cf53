"""The `ostinato` command.  One file a command; each is loaded when it is called."""

from ostinato.cli.app import app, main

__all__ = ["app", "main"]
