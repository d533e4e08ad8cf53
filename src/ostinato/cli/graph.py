"""`ostinato graph`: saves a model's graph to a file; shows, compares, runs, checks graph files."""

from __future__ import annotations

import contextlib
import io
import json
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ostinato.cli.arguments import AsJson, DeviceName, Rows, expanded, ready_file
from ostinato.cli.plain import say
from ostinato.cli.progress import fetched
from ostinato.errors import InputError, NotAvailableError
from ostinato.models.arguments import counted
from ostinato.models.extra import require_extra

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostinato.graph import Graph

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Save, show, compare, run and check graphs in files.\n\n"
    "A graph file is a program: run and check none that you would not run.",
)

File = Annotated[Path, typer.Argument(callback=expanded, help="A graph file.", metavar="FILE")]
Code = Annotated[
    Path | None,
    typer.Option("--code", callback=expanded, help="The folder that it shares with others."),
]
Constants = Annotated[
    Path | None,
    typer.Option(
        "--constants", callback=expanded, help="Constants by name, in a safetensors file."
    ),
]
Inputs = Annotated[
    Path | None,
    typer.Option(callback=expanded, help="Inputs by name, in NumPy's .npz; the others are zeros."),
]


@app.command()
def save(
    path: File,
    model: Annotated[str, typer.Option(help="As for `ostinato generate`.")] = "smollm2-135m",
    rows: Rows = 1,
    context: Annotated[int, typer.Option(min=16, help="Positions of its cache.")] = 512,
    device: DeviceName = None,
) -> None:
    """Save the decode step of a model.

    The file then runs without this library's decoder. Needs a GPU: the decoder's kernels for the
    CPU cannot be saved.
    """
    require_extra("`ostinato graph save`")
    from ostinato import graphfile
    from ostinato.device import open_device
    from ostinato.models.decoder import Decoder
    from ostinato.models.files.open import open_checkpoint

    ready_file(path, "FILE")
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(open_device(device))
        if not opened.capabilities.compiles_cuda:
            raise NotAvailableError(
                "graph save needs a GPU, and this machine has none or another device was named: "
                "the decoder's kernels for the CPU cannot be saved"
            )
        checkpoint = stack.enter_context(open_checkpoint(fetched(model)))
        positions = min(context, checkpoint.config.context_length)
        decoder = stack.enter_context(Decoder(opened, checkpoint, max_context=positions))
        graph = decoder.graph(rows)
        state, weights = _memory(graph)
        graphfile.save(graph, path, inputs=state, outputs=state, constants=weights)
        say(f"{counted(len(graph), 'node')} saved to {path}")


def _memory(graph: Graph) -> tuple[dict[str, object], dict[str, object]]:
    """Returns the allocations that a graph writes, and those that it only reads, by name."""
    with graph.instantiate() as run:
        touched = run.manifest()
    context = graph.context
    owners = {id(owner): owner for t in touched if (owner := context.owner_of(t.range.address))}
    written = {id(context.owner_of(t.range.address)) for t in touched if t.written}
    state: dict[str, object] = {}
    weights: dict[str, object] = {}
    for number, (key, owner) in enumerate(owners.items()):
        name = f"{getattr(owner, 'name', '') or 'memory'}.{number}"
        (state if key in written else weights)[name] = owner
    return state, weights


@app.command()
def show(path: File, code: Code = None, as_json: AsJson = False) -> None:
    """Show what a file holds.

    Needs no GPU, and loads none of the file's code.
    """
    from ostinato.graphfile.show import file_json, file_text

    say(json.dumps(file_json(path, code)) if as_json else file_text(path, code))


@app.command("diff")
def difference(
    before: File,
    after: Annotated[Path, typer.Argument(callback=expanded, help="Another one.", metavar="FILE")],
    code: Code = None,
    as_json: AsJson = False,
) -> None:
    """Show what differs between the graphs of two files, side by side.

    Nodes, arguments, launch shapes and edges; kernels by their code. Memory without a name counts
    by the order of its first use. Needs no GPU, and loads none of the files' code. The exit status
    is 1 if they differ.
    """
    from ostinato.graphfile.comparing import file_diff

    found = file_diff(before, after, code)
    say(json.dumps(found.to_dict()) if as_json else found.side_by_side())
    if found:
        raise typer.Exit(1)


@app.command()
def run(
    path: File,
    inputs: Inputs = None,
    outputs: Annotated[
        Path | None, typer.Option(callback=expanded, help="Write the outputs to this .npz file.")
    ] = None,
    constants: Constants = None,
    code: Code = None,
    times: Annotated[int, typer.Option(min=1, help="Launch so many times.")] = 1,
    device: DeviceName = None,
) -> None:
    """Load a graph and launch it."""
    replay(path, inputs, outputs, constants, code, times, device)


def replay(
    path: Path,
    inputs: Path | None,
    outputs: Path | None,
    constants: Path | Mapping[str, NDArray[Any]] | None,
    code: Path | None,
    times: int,
    device: str | None,
    *,
    stored: bool = False,
) -> None:
    """Implements `run`.  `stored`: inputs that are not given are those of the file, not zeros."""
    import numpy as np

    import ostinato as ost

    if outputs is not None:
        ready_file(outputs, "--outputs")
    with ost.open_device(device) as opened:
        stream = opened.create_stream()
        loaded = ost.graphfile.load(opened, path, constants=constants, code=code)
        given = {} if inputs is None else _arrays(inputs)
        unknown = given.keys() - loaded.inputs.keys()
        if unknown:
            raise typer.BadParameter(
                f"{', '.join(sorted(unknown))}: the graph has {', '.join(loaded.inputs)}",
                param_hint="--inputs",
            )
        for name, buffer in loaded.inputs.items():
            if stored and name not in given:
                continue
            values = given.get(name, np.zeros(buffer.shape, buffer.dtype))
            try:
                buffer.set(values, stream)
            except InputError as error:
                raise typer.BadParameter(f"{name}: {error}", param_hint="--inputs") from None
        executable = loaded.instantiate(upload=stream)
        stream.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            executable.launch(stream)
        stream.synchronize()
        each = (time.perf_counter() - start) / times
        found = {name: buffer.to_numpy(stream) for name, buffer in loaded.outputs.items()}
        if outputs is not None:
            _write(outputs, found)
        say(f"{counted(times, 'launch', 'es')}, {each * 1e6:.1f} us each")
        for name, array in found.items():
            say(f"{name}: {np.array2string(array, threshold=8, edgeitems=3)}")


@app.command()
def check(
    path: File, constants: Constants = None, code: Code = None, device: DeviceName = None
) -> None:
    """Run a file on its stored inputs, and compare the results."""
    import ostinato as ost

    with ost.open_device(device) as opened:
        ost.graphfile.check(opened, path, constants=constants, code=code)
        say(f"{path}: the stored results, bit by bit, on {opened.properties.name}")


def _write(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Writes an .npz file completely or not at all.  `numpy.savez` cannot be used: array names may
    equal its own arguments (`file`, `allow_pickle`)."""
    import numpy as np

    from ostinato.models.files.reading import write_file

    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    write_file(path, content.getbuffer())


def _arrays(path: Path) -> dict[str, object]:
    import numpy as np

    try:
        with path.open("rb") as file:
            # For other files NumPy's error suggests unpickling them.
            if not file.read(6).startswith((b"PK", b"\x93NUMPY")):
                raise ValueError("it is no .npz file")
            file.seek(0)
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise ValueError("one array without a name; an .npz file is wanted")
            return {name: loaded[name] for name in loaded.files}
    except Exception as error:  # NumPy passes on errors of zipfile, zlib and struct
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise typer.BadParameter(f"{path}: {words}", param_hint="--inputs") from None
