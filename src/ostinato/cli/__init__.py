"""The `ostinato` command.  Each command has a file, which imports what it needs when called."""

from ostinato.cli.main import app, main

__all__ = ["app", "main"]
