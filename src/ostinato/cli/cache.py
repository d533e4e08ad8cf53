"""`ostinato cache`: lists, prunes and clears the compiled kernels on disk."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ostinato.cli.arguments import AsJson, expanded, finite, require_readable
from ostinato.cli.plain import plain, say
from ostinato.errors import NotAvailableError
from ostinato.models.arguments import counted

if TYPE_CHECKING:
    from ostinato.modules import DiskStore, StoredKernel

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List, prune and clear compiled kernels."
)

Folder = Annotated[
    Path | None,
    typer.Option("--folder", callback=expanded, help="Another folder than that of the settings."),
]


@app.command("list")
def list_kernels(folder: Folder = None, as_json: AsJson = False) -> None:
    """List the kernels on disk, and which files are damaged.

    The most recently used ones come first.
    """
    store = _store(folder)
    entries = store.entries()
    total = sum(entry.nbytes for entry in entries)
    if as_json:
        print(
            json.dumps(
                {
                    "folder": str(store.folder),
                    "bytes": total,
                    "max_bytes": store.max_bytes,
                    "kernels": [_row(entry) for entry in entries],
                }
            )
        )
        return
    if entries:
        _print_table(entries)
    say(
        f"{counted(len(entries), 'file')}, {total / 1024:.1f} KiB of at most "
        f"{store.max_bytes / 2**20:.0f} MiB, in {store.folder}"
    )


@app.command()
def prune(
    max_mib: Annotated[
        float,
        typer.Option("--max-mib", min=0, callback=finite, help="Keep at most so many MiB."),
    ],
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Remove least recently used kernels until the rest fits."""
    _remove(_store(folder), int(min(max_mib, 2**40) * 2**20), as_json)


@app.command()
def clear(folder: Folder = None, as_json: AsJson = False) -> None:
    """Remove all kernels from disk.

    They are compiled again when they are needed.
    """
    _remove(_store(folder), None, as_json)


def _store(folder: Path | None) -> DiskStore:
    from ostinato.modules import DiskStore

    store = DiskStore(folder)
    try:
        require_readable(store.folder)
    except OSError as error:
        if folder is None:
            raise
        raise typer.BadParameter(f"{folder}: {error.strerror}", param_hint="--folder") from None
    return store


def _remove(store: DiskStore, most: int | None, as_json: bool) -> None:
    """Removes files until the rest fits into `most` bytes, or all of them."""
    removed = store.clear() if most is None else store.prune(most)
    left = store.entries(check=False)
    if as_json:
        print(json.dumps({"folder": str(store.folder), "removed": removed, "left": len(left)}))
    else:
        say(f"{counted(removed, 'file')} removed, {len(left)} left in {store.folder}")
    if left and (most is None or sum(entry.nbytes for entry in left) > most):
        raise NotAvailableError(
            f"not all could be removed from {store.folder}: another process removes or writes "
            "files there, or this user may not; try again, or delete the folder"
        )


def _row(entry: StoredKernel) -> dict[str, object]:
    return {
        "key": entry.key,
        "source": entry.name,
        "arch": entry.arch,
        "entries": list(entry.entries),
        "bytes": entry.nbytes,
        "last_use": datetime.fromtimestamp(entry.last_use, UTC).isoformat(),
        "problem": entry.problem,
    }


def _print_table(entries: tuple[StoredKernel, ...]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold")
    for column in ("key", "source", "arch", "entries", "KiB", "last use"):
        table.add_column(column, justify="right" if column == "KiB" else "left")
    now = time.time()
    for entry in entries:
        # Text from a file is shown as it is, never read as markup.
        name = plain(f"not used: {entry.problem}" if entry.problem else entry.name)
        table.add_row(
            entry.key[:12],
            Text(name, "red" if entry.problem else ""),
            Text(plain(entry.arch)),
            Text(plain(", ".join(entry.entries))),
            f"{entry.nbytes / 1024:.1f}",
            _ago(now - entry.last_use),
        )
    Console().print(table)


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"
