"""The `ostinato` command.  One file a command; each imports what it needs when it is called."""

from ostinato.cli.main import app, main

__all__ = ["app", "main"]
