"""`ostinato tune`: finds the decode kernels' best launch shapes for this GPU, and keeps them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ostinato.cli.arguments import finite, require_readable
from ostinato.cli.plain import say
from ostinato.errors import NotAvailableError
from ostinato.models.extra import require_extra

if TYPE_CHECKING:
    from rich.table import Table

    from ostinato.device import Device
    from ostinato.models import Checkpoint, LlamaConfig
    from ostinato.models.cuda.shapes import Tuning
    from ostinato.models.cuda.tunings import StoredTuning, TuningStore
    from ostinato.models.tune.sweep import Progress, SweepResult

__all__ = ["tune"]


def tune(
    model: Annotated[
        str | None, typer.Option(help="Tune for this model; as for `ostinato generate`.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Or for a known shape with random weights: 135M, 360M, 1B, 8B."),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=1, max=64, help="Rows of the step: 1 for single-token decode.")
    ] = 1,
    context: Annotated[
        str,
        typer.Option(help="Positions at which a step is timed; the first decides most shapes."),
    ] = "20,500",
    seconds: Annotated[
        float,
        typer.Option(
            min=1, callback=finite, help="About how long to search, without loading weights."
        ),
    ] = 60.0,
    device: Annotated[str | None, typer.Option(help='"cuda:0", ...')] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Search and show, but store nothing.")
    ] = False,
    show_list: Annotated[
        bool,
        typer.Option(
            "--list", help="List what is stored; with --model or --shape, what is in use for it."
        ),
    ] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all stored tunings.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Search for the decode kernels' best launch shapes on this GPU.

    Decoders on this machine use what is found. The search begins with what is in use now. Every
    candidate is timed as a captured graph of the real step, and is taken only if its logits agree
    with the default's and are the same bits each time. What is found is kept in the cache folder
    for this GPU, these sizes and this kernel code. The shapes are those of products with bfloat16
    weights; products with packed ones go by a rule. The host device has nothing to tune.
    """
    require_extra("`ostinato tune`")
    from ostinato.device import open_device
    from ostinato.models.cuda.tunings import TuningStore

    if show_list and clear:
        raise typer.BadParameter("--list or --clear, not both", param_hint="--clear")
    store = TuningStore()
    require_readable(store.folder)
    if show_list:
        in_use = None if model is None and shape is None else _in_use(model, shape, rows, device)
        _list(store, as_json, in_use)
        return
    if clear:
        _clear(store, as_json)
        return
    settings = _Settings(rows, _contexts(context), seconds, as_json)
    title, open_weights = _source(model, shape)
    with open_device(device) as opened:
        if not opened.capabilities.compiles_cuda:
            raise NotAvailableError(
                f"there is nothing to tune on {opened.name}: only the CUDA kernels have launch "
                "shapes to choose; `ostinato doctor` says what there is of a GPU"
            )
        _tune(opened, open_weights, title, settings, None if dry_run else store)


@dataclass(frozen=True, slots=True)
class _Settings:
    rows: int
    contexts: tuple[int, ...]
    seconds: float
    as_json: bool


def _contexts(text: str) -> tuple[int, ...]:
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 0:
        raise typer.BadParameter(
            f"{text!r}: positions such as 20,500 are needed", param_hint="--context"
        )
    return found


def _source(model: str | None, shape: str | None) -> tuple[str, Callable[[], Checkpoint]]:
    """What is tuned for, in words, and how to open its weights."""
    if model is not None and shape is not None:
        raise typer.BadParameter("give a model or a shape, not both", param_hint="--shape")
    if model is None:
        from ostinato.bench.random_weights import random_checkpoint
        from ostinato.bench.shapes import shape_named

        name = "135M" if shape is None else shape
        config = shape_named(name)
        return f"the {name} shape", lambda: random_checkpoint(config)
    from ostinato.cli.progress import fetched
    from ostinato.models import open_checkpoint

    wanted = model
    return model, lambda: open_checkpoint(fetched(wanted))


def _tune(
    device: Device,
    open_weights: Callable[[], Checkpoint],
    title: str,
    settings: _Settings,
    store: TuningStore | None,
) -> None:
    import numpy as np

    from ostinato.models.cuda.dequantise import convert_on_device
    from ostinato.models.cuda.shapes import require_supported
    from ostinato.models.cuda.tunings import TuningKey, choose_tuning, known_of
    from ostinato.models.decoder import DEFAULT_CONTEXT
    from ostinato.models.tune.meter import search
    from ostinato.models.weights import load_weights

    gpu = device.properties.name
    rows, contexts = settings.rows, settings.contexts
    with closing(open_weights()) as checkpoint:
        config = checkpoint.config
        require_supported(config, rows)
        weights = load_weights(
            device, checkpoint, np.uint16, convert=partial(convert_on_device, device)
        )
    # What decoders have by default, and those of longer contexts follow from.
    context = max(min(config.context_length, DEFAULT_CONTEXT), max(contexts) + 1)
    # What an earlier search stored is only to be replaced by something faster.
    start = choose_tuning(
        config, rows=rows, context=context, gpu=gpu, store=store, **known_of(device)
    )
    with closing(weights), _progress(f"{title} on {gpu}", settings.seconds) as tell:
        result = search(
            device,
            weights,
            start.tuning,
            rows=rows,
            context=context,
            contexts=contexts,
            seconds=settings.seconds,
            tell=tell,
        )
    path = None
    if store is not None and result.improved:
        path = store.save(
            TuningKey.of(config, rows, gpu),
            result.tuning,
            before=result.before,
            after=result.after,
            seconds=settings.seconds,
        )
    _show(config, gpu, settings, start.tuning, result, path)


def _show(
    config: LlamaConfig,
    gpu: str,
    settings: _Settings,
    start: Tuning,
    result: SweepResult,
    path: Path | None,
) -> None:
    from ostinato.models.cuda.shapes import shape_key
    from ostinato.models.cuda.tunings import encode_tuning

    if settings.as_json:
        summary = {
            "gpu": gpu,
            "shape": shape_key(config),
            "rows": settings.rows,
            "before_us": result.before,
            "after_us": result.after,
            "tuning": encode_tuning(result.tuning),
            "trials": len(result.trials),
            "refused": list(result.refused),
            "complete": result.complete,
            "stored": None if path is None else str(path),
        }
        print(json.dumps(summary))
        return
    from rich.console import Console

    console = Console()
    console.print(_times_table(result, settings.rows))
    console.print(_shapes_table(start, result.tuning))
    for line in result.refused:
        say(f"faster, but not taken: {line}")
    said = "" if result.complete else "; not all of them within the time"
    print(f"{len(result.trials)} candidates were timed{said}")
    if path is not None:
        say(f"stored in {path}; decoders of these sizes use it from now on")
    elif result.improved:
        print("not stored (--dry-run)")
    else:
        print("nothing is faster than the shapes in use: nothing is stored")


def _times_table(result: SweepResult, rows: int) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for column in ("context", "before", "after", "gain", "tokens/s"):
        table.add_column(column, justify="right")
    for context, before in result.before.items():
        after = result.after[context]
        rate = rows * 1e6 / after
        gain = f"{before / after - 1:+.1%}"
        table.add_row(str(context), f"{before:.1f} us", f"{after:.1f} us", gain, f"{rate:,.0f}")
    return table


def _shapes_table(before: Tuning, after: Tuning) -> Table:
    """The shape of each kernel; changed ones stand out."""
    from rich.table import Table

    from ostinato.models.cuda.tunings import encode_tuning

    table = Table(box=None, header_style="bold")
    for column in ("", "before", "after"):
        table.add_column(column)
    old, new = encode_tuning(before), encode_tuning(after)
    for name, now in new.items():
        changed = now != old[name]
        table.add_row(name, _words(old[name]), _words(now), style="bold" if changed else "dim")
    return table


def _words(value: object) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{k} {v}" for k, v in value.items() if k != "kind") or "as usual"


@contextmanager
def _progress(title: str, seconds: float) -> Iterator[Callable[[Progress], None]]:
    """A bar of the time on the terminal's error stream."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    still = not console.is_terminal  # without a terminal rich prints only an empty line
    with Bars(*columns, console=console, transient=True, disable=still) as bars:
        task = bars.add_task(title, total=seconds)

        def tell(now: Progress) -> None:
            said = f"{title}: {now.stage}, {now.done} tried, {now.first:.0f} -> {now.best:.0f} us"
            bars.update(task, completed=min(now.seconds, seconds), description=said)

        yield tell


# ------------------------------------------------------------------------------- what is stored


def _in_use(model: str | None, shape: str | None, rows: int, device: str | None) -> dict[str, Any]:
    """Which tuning a decoder on this device gets, and where it comes from."""
    from ostinato.device import open_device
    from ostinato.models.cuda.shapes import shape_key
    from ostinato.models.cuda.tunings import choose_tuning, known_of
    from ostinato.models.decoder import DEFAULT_CONTEXT

    title, open_weights = _source(model, shape)
    with closing(open_weights()) as checkpoint:
        config = checkpoint.config
    with open_device(device) as opened:
        gpu, origin = opened.properties.name, "none: the host's kernels have no launch shapes"
        if opened.capabilities.compiles_cuda:
            chosen = choose_tuning(
                config,
                rows=rows,
                context=min(config.context_length, DEFAULT_CONTEXT),
                gpu=gpu,
                **known_of(opened),
            )
            origin = chosen.origin.value
    return {"for": title, "gpu": gpu, "shape": shape_key(config), "rows": rows, "origin": origin}


def _list(store: TuningStore, as_json: bool, in_use: dict[str, Any] | None) -> None:
    entries = store.entries()
    if as_json:
        stored = [_row(entry) for entry in entries]
        data = {"folder": str(store.folder), "stored": stored}
        print(json.dumps(data | ({"in_use": in_use} if in_use else {})))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold")
    for column in ("GPU", "shape", "rows", "us a step by context"):
        table.add_column(column)
    for entry in entries:
        row = _row(entry)
        times = ", ".join(f"{c}: {us:.0f}" for c, us in (entry.after or {}).items())
        if entry.problem:
            times = f"not used: {entry.problem}"
        # What a file says of itself is text, never markup.
        cells = (row["gpu"], row["shape"], row["rows"], times)
        table.add_row(*(Text(str(cell)) for cell in cells))
    if table.rows:
        Console().print(table)
    say(f"{len(entries)} stored in {store.folder}; everything else is by the default rule")
    print("shape: hidden-inner-heads-kv_heads-head_size-vocabulary")
    if in_use:
        say("in use for {for}, {rows} rows, on {gpu}: {origin}".format(**in_use))


def _row(entry: StoredTuning) -> dict[str, Any]:
    key = entry.key
    return {
        "path": str(entry.path),
        "gpu": None if key is None else key.gpu,
        "shape": None if key is None else key.shape,
        "rows": None if key is None else key.rows,
        "before_us": entry.before,
        "after_us": entry.after,
        "made": entry.made,
        "problem": entry.problem,
    }


def _clear(store: TuningStore, as_json: bool) -> None:
    removed = store.clear()
    if as_json:
        print(json.dumps({"folder": str(store.folder), "removed": removed}))
    else:
        say(f"{removed} tunings removed from {store.folder}")
    if left := len(store.entries()):
        raise NotAvailableError(f"{left} tunings in {store.folder} cannot be removed by this user")
