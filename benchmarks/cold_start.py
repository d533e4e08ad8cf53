"""From process start to the first replay of each graph: captured, or restored from a store.

    python -m benchmarks.cold_start [--shape 1B] [--compile]
    python -m benchmarks.cold_start --device host       our own kernels alone

Each figure is of a process of its own.  Two works:

  keys     graphs of our own kernels, one a key
  decode   one greedy decode step of transformers' Llama (random weights of a shape) over a static
           cache, a graph for each batch size; needs torch and transformers on a GPU

and up to three ways:

  capture  as a process without a store does: eager runs that warm up, then captures
  compile  torch.compile(mode="reduce-overhead"), if it is asked for; its caches on disk are cold
  restore  `GraphStore.restore`, bound to the live weights and caches

Before, another process saves all graphs (`save_ms`, not part of any start).  `ready_ms` is the time
until the device is open and the weights are there, `graphs_ms` from there to the end of the first
replay of the last graph.  Every way must give the same bytes.  Files are in the page cache.
What bounds a restore: reading the files, which is measured with the check of their digests.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ostinato as ost
from benchmarks import common

BATCHES = (1, 2, 3, 4, 5, 6, 7, 8)
KEYS = 64
LENGTH = 192
"""Positions in the static cache."""
PLACE = 64
"""The position that the step decodes."""
_SECONDS = 500


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["--child"]:
        print(json.dumps(child(*given[1:])), flush=True)
        return 0
    parser = common.options(__doc__)
    parser.add_argument("--shape", default="1B", help="of the model, as ostinato bench names it")
    parser.add_argument("--compile", action="store_true", help="torch.compile too: minutes")
    chosen = parser.parse_args(given)
    skipped: dict[str, str] = {}
    works = {"keys": str(4 if chosen.quick else KEYS)}
    if chosen.device == "host":
        skipped["decode"] = "it needs a GPU"
    else:
        works["decode"] = ",".join(map(str, BATCHES[: 2 if chosen.quick else None]))
    rows = []
    read, failed = 0.0, False
    with tempfile.TemporaryDirectory() as folder:
        for work, what in works.items():
            place = Path(folder) / work
            place.mkdir()
            command = [work, chosen.device, what, chosen.shape, str(place)]
            try:
                saved = start("save", command)
                ways = ["capture", *["compile"] * (chosen.compile and work == "decode"), "restore"]
                found = [start(way, command) for way in ways]
            except subprocess.CalledProcessError as error:
                failed = True
                skipped[work] = (error.stderr.strip().splitlines() or ["it ended"])[-1][:300]
                print(error.stderr, file=sys.stderr)
                continue
            answers = {one["way"]: one.pop("answer") for one in (saved, *found)}
            # What is compiled rounds otherwise; all others are the same kernels.
            exact = {answer for way, answer in answers.items() if way != "compile"}
            if len(exact) != 1:
                skipped[work] = f"the ways give other bytes: {answers}"
                failed = True
                continue
            for one in found:
                rows.append({"work": work, **one, "save_ms": saved["graphs_ms"]})
            began = time.perf_counter_ns()
            for path in (p for p in place.rglob("*") if p.is_file()):
                hashlib.sha256(path.read_bytes()).digest()
            read += time.perf_counter_ns() - began
    columns = ("work", "way", "graphs", "ready_ms", "graphs_ms", "total_ms", "memory_mib")
    if rows:
        print(common.table(f"cold start on {chosen.device}", rows, columns))
    with ost.open_device(chosen.device) as device:
        common.emit(
            "cold_start",
            device,
            chosen.out,
            ceiling={
                "what": "all files of the stores read and their digests made",
                "us": read / 1e3,
            },
            settings={"shape": chosen.shape, "length": LENGTH, **works},
            rows=rows,
            skipped=skipped,
            summary={f"{r['work']}_{r['way']}_ms": r["graphs_ms"] for r in rows},
        )
    return int(failed)


def start(way: str, command: Sequence[str]) -> dict[str, Any]:
    """What one process says of itself.  Raises CalledProcessError with its stderr."""
    spawned = time.monotonic_ns()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cold_start", "--child", way, str(spawned), *command],
        cwd=common.ROOT.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=_SECONDS,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(
    way: str, spawned: str, work: str, device: str, what: str, shape: str, folder: str
) -> dict[str, object]:
    """One process: all graphs of a work, in one way."""
    made = _keys if work == "keys" else _decode
    return made(way, int(spawned), device, what, shape, Path(folder))


class _Clock:
    def __init__(self, way: str, spawned: int, device: ost.Device) -> None:
        self._way, self._spawned, self._device = way, spawned, device
        self._ready = time.monotonic_ns()
        self._free = device.memory_info()[0]

    def row(self, graphs: int, answer: str) -> dict[str, object]:
        now = time.monotonic_ns()
        return {
            "way": self._way,
            "graphs": graphs,
            "ready_ms": round((self._ready - self._spawned) / 1e6, 2),
            "graphs_ms": round((now - self._ready) / 1e6, 2),
            "total_ms": round((now - self._spawned) / 1e6, 2),
            "memory_mib": round((self._free - self._device.memory_info()[0]) / (1 << 20), 1),
            "answer": answer,
        }


# ------------------------------------------------------------------------------- our own kernels


def _keys(
    way: str, spawned: int, name: str, what: str, shape: str, folder: Path
) -> dict[str, object]:
    with ost.open_device(name) as device:
        stream = device.create_stream()
        chains = [common.Chain(device, 16 + number) for number in range(int(what))]
        store = ost.GraphStore(device, folder, tag="chains")
        stream.synchronize()
        clock = _Clock(way, spawned, device)
        held = []
        for number, chain in enumerate(chains):
            state = {"arena": chain.arena, "other": chain.other}
            if way == "restore":
                loaded = store.restore(number, state)
                assert loaded is not None, store.statistics().reasons
                run = loaded.instantiate()
            else:
                graph = ost.capture_function(stream, partial(chain.submit, stream))
                if way == "save":
                    store.save(
                        number,
                        graph,
                        inputs=state,
                        outputs={"arena": chain.arena},
                        check=not number,
                    )
                run = graph.instantiate()
            run.launch(stream)
            held.append(run)
        stream.synchronize()
        row = clock.row(len(held), "right")
        for chain in chains:
            chain.check(way, stream)
        return row


# --------------------------------------------------------------------------------- transformers


def _decode(
    way: str, spawned: int, name: str, what: str, shape: str, folder: Path
) -> dict[str, object]:
    if way == "save":
        ost.collect_modules()
    import torch

    from ostinato.bench import transformers_loop as loops
    from ostinato.bench.shapes import SHAPES

    config = SHAPES[shape]
    sizes = loops.LlamaSizes(
        hidden=config.hidden,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        inner=config.inner,
        vocabulary=config.vocabulary,
        context=config.context_length,
        tied_embeddings=config.tied_embeddings,
    )
    with ost.open_device(name) as device, torch.no_grad():
        model = loops.random_llama(sizes)
        constants = _memory(dict(model.named_parameters()) | dict(model.named_buffers()))
        store = ost.GraphStore(device, folder, tag=f"llama {shape}", constants=constants)
        torch.cuda.synchronize()
        clock = _Clock(way, spawned, device)
        held: list[object] = []
        answers: list[str] = []
        for batch in map(int, what.split(",")):
            shapes = folder / f"{batch}.json"
            if way == "restore":
                state = {
                    n: torch.zeros(size, dtype=getattr(torch, dtype), device="cuda")
                    for n, (size, dtype) in json.loads(shapes.read_text()).items()
                }
                loaded = store.restore(batch, _memory(state))
                assert loaded is not None, store.statistics().reasons
                run, stream = loaded.instantiate(), device.create_stream()
                held += [run, stream, state]
                once: Callable[[], object] = lambda: run.launch(stream)  # noqa: B023, E731
            else:
                how: loops.How = "graph" if way == "capture" else "compile"
                loop = loops.DecodeLoop(
                    model, batch=batch, length=LENGTH, how="eager" if way == "save" else how
                )
                state = _state(loop)
                held.append(loop)
                once = lambda: loop.run(1)  # noqa: B023, E731
                if way == "save":
                    once = _saved(device, store, batch, loop, state)
                    kinds = {n: (list(t.shape), str(t.dtype)[6:]) for n, t in state.items()}
                    shapes.write_text(json.dumps(kinds))
            _settle(state, batch)
            once()
            torch.cuda.synchronize()
            answers.append(_digest(state))
        return clock.row(len(answers), " ".join(answers))


def _state(loop: Any) -> dict[str, Any]:
    """The tensors that a step reads and writes besides the weights."""
    import torch

    state = {"token": loop._token, "position": loop._position}
    for number, layer in enumerate(loop._cache.layers):
        for name, value in vars(layer).items():
            if isinstance(value, torch.Tensor):
                state[f"cache.{number}.{name}"] = value
    return state


def _saved(
    device: ost.Device, store: ost.GraphStore, batch: int, loop: Any, state: Mapping[str, Any]
) -> Callable[[], object]:
    """Captures one step and saves it; a replay of it."""
    import torch

    from ostinato.interop.torch import adopt_graph

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loop._advance()
    graph.instantiate()
    # The check in a fresh process would write out the weights; the replays are compared instead.
    named = _memory(state)
    store.save(batch, adopt_graph(device, graph), inputs=named, outputs=named, check=False)
    replay: Callable[[], object] = graph.replay
    return replay


def _memory(tensors: Mapping[str, Any]) -> dict[str, ost.MemoryRange]:
    return {
        name: ost.MemoryRange(t.data_ptr(), t.numel() * t.element_size())
        for name, t in tensors.items()
    }


def _settle(state: Mapping[str, Any], seed: int) -> None:
    """Puts the same into the state in every process."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    for name, tensor in sorted(state.items()):
        if tensor.is_floating_point():
            tensor.normal_(generator=generator)
        else:
            tensor.fill_(7 if name == "token" else PLACE)
    torch.cuda.synchronize()


def _digest(state: Mapping[str, Any]) -> str:
    import torch

    made = hashlib.sha256()
    for _, tensor in sorted(state.items()):
        made.update(tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return made.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
