"""Time from process start to the first replay of each graph: captured, or restored from a store.

    python -m benchmarks.cold_start [--shape 1B] [--batches 8] [--compile]
    python -m benchmarks.cold_start --device host       our own kernels only

Each figure is measured in a process of its own.  Two works:

  keys     graphs of our own kernels, one for each key
  decode   one greedy decode step of transformers' Llama (random weights of a shape) over a static
           cache, a graph for each batch size from 1 on; needs torch and transformers on a GPU

and up to three ways:

  capture  without a store: eager runs that warm up, then captures
  compile  torch.compile(mode="reduce-overhead"), with `--compile`; its caches on disk are cold
  restore  `GraphStore.restore`, bound to the live weights and caches

Before, another process saves all graphs (`save_ms`, not part of any start).  `ready_ms` is the time
until the device is open and the weights are loaded; `graphs_ms` is the time from there to the end
of the first replay of the last graph, and `first_ms` to that of the first graph, which loads the
code that all share (`--profile`: functions by their time, of one more restoring process).  Then,
untimed, all ways must give the same bytes from the same state.  Files are in the page cache.

Lower bound of a restore: reading graphs and code (`store_mib`) and checking their digests, which
is measured too.
"""

from __future__ import annotations

import cProfile
import hashlib
import json
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import ostinato as ost
from benchmarks import common
from ostinato.graphfile.show import file_json

KEYS = 64
LENGTH = 192
"""The number of positions in the static cache."""
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
    parser.add_argument("--batches", type=int, default=8, help="how many batch sizes")
    parser.add_argument("--compile", action="store_true", help="torch.compile too: minutes")
    parser.add_argument("--profile", action="store_true", help="where a restore's time goes")
    chosen = parser.parse_args(given)
    skipped: dict[str, str] = {}
    works = {"keys": str(4 if chosen.quick else KEYS)}
    if chosen.device == "host":
        skipped["decode"] = "it needs a GPU"
    else:
        most = 2 if chosen.quick else chosen.batches
        works["decode"] = ",".join(str(batch + 1) for batch in range(most))
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
                if chosen.profile:
                    start("profile", command)
            except subprocess.CalledProcessError as error:
                failed = True
                skipped[work] = (error.stderr.strip().splitlines() or ["it ended"])[-1][:300]
                print(error.stderr, file=sys.stderr)
                continue
            answers = {one["way"]: one.pop("answer") for one in (saved, *found)}
            # Compiled code rounds differently; all other ways run the same kernels.
            exact = {answer for way, answer in answers.items() if way != "compile"}
            if len(exact) != 1:
                skipped[work] = f"the ways give other bytes: {answers}"
                failed = True
                continue
            needed = _needed(place)
            mib = round(sum(path.stat().st_size for path in needed) / (1 << 20), 1)
            for one in found:
                more = {"save_ms": saved["graphs_ms"], "store_mib": mib}
                rows.append({"work": work, **one, **more})
            began = time.perf_counter_ns()
            for path in needed:
                hashlib.sha256(path.read_bytes()).digest()
            read += time.perf_counter_ns() - began
    columns = (
        *("work", "way", "graphs", "ready_ms", "graphs_ms", "first_ms", "total_ms", "memory_mib"),
    )
    if rows:
        print(common.table(f"cold start on {chosen.device}", rows, columns))
    with ost.open_device(chosen.device) as device:
        common.emit(
            "cold_start",
            device,
            chosen.out,
            ceiling={
                "what": "what a restore reads of the stores read, and its digests made",
                "us": read / 1e3,
            },
            settings={"shape": chosen.shape, "length": LENGTH, **works},
            rows=rows,
            skipped=skipped,
            summary={f"{r['work']}_{r['way']}_ms": r["graphs_ms"] for r in rows},
        )
    return int(failed)


def _needed(store: Path) -> list[Path]:
    """Returns the files of a store that a restore reads: graphs and code, each once."""
    graphs = sorted(store.glob("graphs/*.graph"))
    functions = [f for path in graphs for f in cast(Any, file_json(path))["functions"]]
    digests = {f["digest"] for f in functions if f["digest"]}
    return [*graphs, *(store / "code" / digest for digest in sorted(digests))]


def start(way: str, command: Sequence[str]) -> dict[str, Any]:
    """Runs one process, and returns its figures.  Raises CalledProcessError with its stderr."""
    spawned = time.monotonic_ns()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cold_start", "--child", way, str(spawned), *command],
        cwd=common.ROOT.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=_SECONDS,
    )
    if way == "profile":
        print(done.stderr, flush=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(
    way: str, spawned: str, work: str, device: str, what: str, shape: str, folder: str
) -> dict[str, object]:
    """Measures, in this process, all graphs of a work in one way."""
    made = _keys if work == "keys" else _decode
    return made(way, int(spawned), device, what, shape, Path(folder))


class _Clock:
    def __init__(self, way: str, spawned: int, device: ost.Device) -> None:
        self._way, self._spawned, self._device = way, spawned, device
        self._free = device.memory_info()[0]
        self._profile = cProfile.Profile() if way == "profile" else None
        self._first = 0
        self._ready = time.monotonic_ns()
        if self._profile is not None:
            self._profile.enable()

    def lap(self) -> None:
        """Notes the time of the first graph, which loads the code that all share.  Must be called
        after each graph."""
        self._first = self._first or time.monotonic_ns()

    def row(self, graphs: int, answer: str) -> dict[str, object]:
        now = time.monotonic_ns()
        if self._profile is not None:
            self._profile.disable()
            pstats.Stats(self._profile, stream=sys.stderr).sort_stats("tottime").print_stats(30)
        return {
            "way": self._way,
            "graphs": graphs,
            "ready_ms": round((self._ready - self._spawned) / 1e6, 2),
            "graphs_ms": round((now - self._ready) / 1e6, 2),
            "first_ms": round((self._first - self._ready) / 1e6, 2),
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
            if way in ("restore", "profile"):
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
            clock.lap()
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
        ost.graphfile.collect_modules()
    import torch

    from benchmarks.peers import transformers_loop as loops
    from ostinato.bench.shapes import SHAPES

    config = SHAPES[shape]
    with ost.open_device(name) as device, torch.no_grad():
        model = loops.random_llama(config)
        constants = _memory(weights_of(model))
        store = ost.GraphStore(device, folder, tag=f"llama {shape}", constants=constants)
        torch.cuda.synchronize()
        clock = _Clock(way, spawned, device)
        states: dict[int, dict[str, Any]] = {}
        steps: dict[int, Callable[[], object]] = {}
        for batch in map(int, what.split(",")):
            shapes = folder / f"{batch}.json"
            if way in ("restore", "profile"):
                state = _empty(json.loads(shapes.read_text()))
                loaded = store.restore(batch, _memory(state), complete=True)
                assert loaded is not None, store.statistics().reasons
                stream = device.create_stream()
                step: Callable[[], object] = partial(loaded.instantiate().launch, stream)
            else:
                hows: dict[str, loops.How] = {"save": "eager", "capture": "graph"}
                how = hows.get(way, "compile")
                loop = loops.DecodeLoop(model, batch=batch, length=LENGTH, how=how)
                state, step = state_of(loop), partial(loop.run, 1)
                if way == "save":
                    step = _saved(device, store, batch, loop, state)
                    kinds = {n: (list(t.shape), str(t.dtype)[6:]) for n, t in state.items()}
                    shapes.write_text(json.dumps(kinds))
            step()
            torch.cuda.synchronize()
            states[batch], steps[batch] = state, step
            clock.lap()
        row = clock.row(len(steps), "")
        for batch, step in steps.items():
            settle(states[batch], batch)
            step()
            torch.cuda.synchronize()
        answer = " ".join(_digest(state) for state in states.values())
        return row | {"answer": answer}


def _empty(kinds: Mapping[str, tuple[list[int], str]]) -> dict[str, Any]:
    """Returns tensors of zeros by name."""
    import torch

    made = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda")
        for name, (shape, dtype) in kinds.items()
    }
    torch.cuda.synchronize()  # they are used on another stream
    return made


def weights_of(model: Any) -> dict[str, Any]:
    """Returns the tensors that a step only reads, by name."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor for name, tensor in tensors.items() if tensor.is_cuda and tensor.numel()}


def state_of(loop: Any) -> dict[str, Any]:
    """Returns the other tensors of a step, which it reads and writes, by name."""
    import torch

    state = {"token": loop._token, "position": loop._position}
    for number, layer in enumerate(loop._cache.layers):
        for name, value in vars(layer).items():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                state[f"cache.{number}.{name}"] = value
    return state


def _saved(
    device: ost.Device, store: ost.GraphStore, batch: int, loop: Any, state: Mapping[str, Any]
) -> Callable[[], object]:
    """Captures one step and saves it.  Returns a function that replays it."""
    import torch

    from ostinato.interop.torch import adopt_graph

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loop._advance()
    graph.instantiate()
    # A check in a fresh process would have to write out the weights; replays are compared instead.
    named = _memory(state)
    store.save(batch, adopt_graph(device, graph), inputs=named, outputs=named, check=False)
    replay: Callable[[], object] = graph.replay
    return replay


def _memory(tensors: Mapping[str, Any]) -> dict[str, ost.MemoryRange]:
    return {
        name: ost.MemoryRange(t.data_ptr(), t.numel() * t.element_size())
        for name, t in tensors.items()
    }


def settle(state: Mapping[str, Any], seed: int, token: int = 7, place: int = PLACE) -> None:
    """Sets the state to the same values in every process."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    for name, tensor in sorted(state.items()):
        if tensor.is_floating_point():
            tensor.normal_(generator=generator)
        else:
            tensor.fill_(token if name == "token" else place)
    torch.cuda.synchronize()


def _digest(state: Mapping[str, Any]) -> str:
    import torch

    made = hashlib.sha256()
    for _, tensor in sorted(state.items()):
        made.update(tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return made.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
