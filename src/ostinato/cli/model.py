"""`ostinato model`: get, list and remove model files."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ostinato import settings
from ostinato.cli.arguments import require_readable
from ostinato.cli.plain import say
from ostinato.cli.progress import byte_progress
from ostinato.models.files import store
from ostinato.models.files.hub import hub_name

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Get, list and remove models.")

Name = Annotated[str, typer.Argument(help="A known name, such as smollm2-135m.")]
Wanted = Annotated[
    str,
    typer.Argument(
        help="A known name; or a Hugging Face id (with the hub extra): org/name, "
        "org/name:Q4_K_M, org/name:file.gguf."
    ),
]


@app.command()
def pull(name: Wanted) -> None:
    """Fetch a known model into the cache folder, and check its digest; or a model of the Hugging
    Face hub into the hub's own cache."""
    if name not in store.KNOWN_MODELS and hub_name(name) is not None:
        say(str(store.resolve(name)))
        return
    if store.is_present(name):
        store.require_sound(name)
        say(f"{name} is there: {store.model_path(name)}")
        return
    with byte_progress(f"fetching {name}") as progress:
        path = store.pull(name, progress=progress)
    say(str(path))


@app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """List the known models, and which of them are there."""
    require_readable(settings.cache_dir() / "models")
    models = store.list_models()
    if as_json:
        rows = [
            {
                "name": m.model.name,
                "present": m.present,
                "path": str(m.path),
                "size": m.model.size,
                "description": m.model.description,
            }
            for m in models
        ]
        print(json.dumps(rows))
        return
    for m in models:
        state = str(m.path) if m.present else "not fetched (ostinato model pull)"
        say(f"{m.model.name}  {m.model.size / 1e6:.0f} MB  {m.model.description}  {state}")


@app.command()
def remove(name: Name) -> None:
    """Remove a fetched model from the cache folder."""
    print(f"{name} removed" if store.remove(name) else f"{name} was not there")
