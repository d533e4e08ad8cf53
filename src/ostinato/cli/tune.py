"""`ostinato tune`: finds and stores the decode kernels' best launch shapes for this GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ostinato.cli.arguments import AsJson, Rows, finite, require_readable
from ostinato.cli.bench import numbers, status, subject_of
from ostinato.cli.plain import say
from ostinato.errors import NotAvailableError
from ostinato.models.extra import require_extra

if TYPE_CHECKING:
    from ostinato.device import Device
    from ostinato.models import Checkpoint


def tune(
    model: Annotated[
        str | None, typer.Option(help="Tune for this model; as for `ostinato generate`.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Or for a known shape with random weights: 135M, 360M, 1B, 8B."),
    ] = None,
    rows: Rows = 1,
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
    as_json: AsJson = False,
) -> None:
    """Search for the decode kernels' best launch shapes on this GPU.

    Decoders on this machine use what is found. The search begins with what is in use now. Every
    candidate is timed as a captured graph of the real step, and is taken only if its logits agree
    with the default's and are the same bits each time. What is found is kept in the cache folder
    for this GPU, these sizes and this kernel code, until its file is deleted. The shapes are those
    of products with bfloat16 weights; products with packed ones go by a rule. The host device has
    nothing to tune.
    """
    require_extra("`ostinato tune`")
    from ostinato.device import open_device
    from ostinato.models.cuda.tunings import stored_in

    require_readable(stored_in())
    contexts = tuple(dict.fromkeys(numbers(context, "--context")))
    if min(contexts) < 0:
        raise typer.BadParameter(f"{context!r}: positions begin at 0", param_hint="--context")
    if shape is not None and model is not None:
        raise typer.BadParameter("give a shape or a model, not both", param_hint="--shape")
    subject_of(shape)  # finds a wrong name before a device is opened
    with open_device(device) as opened:
        if not opened.capabilities.compiles_cuda:
            raise NotAvailableError(
                f"there is nothing to tune on {opened.name}: only the CUDA kernels have launch "
                "shapes to choose; `ostinato doctor` says what there is of a GPU"
            )
        weights = subject_of(shape, model)[1]
        found = _search(opened, weights, rows, contexts, seconds, keep=not dry_run)
    if as_json:
        print(json.dumps(found))
    else:
        _show(found)


def _search(
    device: Device,
    open_weights: Callable[[], Checkpoint],
    rows: int,
    contexts: tuple[int, ...],
    seconds: float,
    *,
    keep: bool,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Searches, and stores a faster result if `keep`."""
    import numpy as np

    from ostinato.models.cuda import tunings
    from ostinato.models.cuda.dequantise import convert_on_device
    from ostinato.models.cuda.shapes import require_supported
    from ostinato.models.decoder import DEFAULT_CONTEXT
    from ostinato.models.tune.search import search
    from ostinato.models.weights import load_weights

    with closing(open_weights()) as checkpoint:
        config = checkpoint.config
        require_supported(config, rows)
        weights = load_weights(
            device, checkpoint, np.uint16, convert=partial(convert_on_device, device)
        )
    # The default context of decoders; shapes for longer contexts are derived from it.
    context = max(min(config.context_length, DEFAULT_CONTEXT), max(contexts) + 1)
    key = tunings.TuningKey.of(config, rows, device.properties.name)
    sizes: dict[str, Any] = {"rows": rows, "context": context}
    # A stored result is replaced only by a faster one.
    known = tunings.known_of(device)
    start = tunings.choose_tuning(config, **sizes, gpu=key.gpu, folder=folder, **known)
    given: dict[str, Any] = {"contexts": contexts, "seconds": seconds}
    with closing(weights), status() as tell:
        result = search(device, weights, start, **sizes, **given, tell=tell)
        tell("")
    path = None
    if keep and result.improved:
        times = {"before": result.before, "after": result.after}
        path = tunings.save_tuning(key, result.tuning, **times, folder=folder)
    return {
        "gpu": key.gpu,
        "shape": key.shape,
        "rows": rows,
        "before_us": result.before,
        "after_us": result.after,
        "from": tunings.encode_tuning(start),
        "tuning": tunings.encode_tuning(result.tuning),
        "trials": len(result.trials),
        "refused": list(result.refused),
        "improved": result.improved,
        "stored": None if path is None else str(path),
    }


def _show(found: dict[str, Any]) -> None:
    for context, before in found["before_us"].items():
        after = found["after_us"][context]
        rate = found["rows"] * 1e6 / after
        change = f"{before:.1f} -> {after:.1f} us, {before / after - 1:+.1%}"
        print(f"position {context}: {change}, {rate:,.0f} tokens/s")
    for name, now in found["tuning"].items():
        if now != found["from"][name]:
            print(f"{name}: {found['from'][name]} -> {now}")
    for line in found["refused"]:
        say(f"faster, but not taken: {line}")
    print(f"{found['trials']} candidates were timed")
    if not found["improved"]:
        print("nothing is faster than the shapes in use: nothing is stored")
    elif found["stored"] is not None:
        say(f"stored in {found['stored']}; decoders of these sizes use it from now on")
