"""Training steps as people write them, in `graphed`, beside eager steps and a graph made by hand.

    python -m benchmarks.torch_training [--works mlp,lstm] [--compile] [--steps N] [--out DIR]

A step is `zero_grad`, forward, backward, optimiser; it returns its loss.  Each work is trained
twice: with the optimiser as people write it (`AdamW(parameters, lr)`: its counters are on the CPU,
so that `graphed` makes its steps between two graphs), and with one that a graph can hold
(`capturable`, `fused`, a rate on the GPU).  Of the second there is also a graph of the whole step
made by hand, which is the bound: `of_hand` is the time of `graphed` as a part of its time.
`parameters` compares them after 200 steps with those of eager training, bit for bit, with torch's
deterministic kernels; times are those with its usual ones.  Times are those of whole steps with
the wait for the GPU at their end, in turns.  `first_ms` is the time of the first 12 steps.

Each work has a process of its own: torch 2.11 breaks the context in the third compiled work of a
process, also without any code of ours.  The processes prepare at the same time.  One that has
prepared measures while the others wait between two parts of their preparation, and its rows are
written as they come: of a run that is cut off those are kept.  With `--compile`, which has a file
of its own and compares no parameters, the works are also compiled at the same time: `compile_ms` is
the time of the first 12 steps then, beside the other works, and `compile_cpu_ms` the CPU time of
all threads of the process meanwhile, without that of the compiler's workers.
`--after FILE` keeps the rows of other works of an earlier run, each with its commit.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ostinato as ost
from benchmarks import common
from ostinato.bench.report import Result, machine

BLOCK = 10
CHECKED = 200
"""Steps after which the parameters are compared."""


@dataclass(frozen=True)
class Work:
    """A model to train.  `loss(model, *args)` gives the loss of the arguments that `draw` makes."""

    model: Callable[[], Any]
    loss: Callable[..., Any]
    draw: Callable[[Any], tuple[Any, ...]]
    alone: bool = True
    """True if the model's only argument is the first one of `draw`."""
    waits: bool = False
    """True if the model waits for the GPU, so that no graph by hand can hold it."""


def _works(torch: Any) -> dict[str, Work]:
    nn, functional = torch.nn, torch.nn.functional

    def randn(generator: Any, *shape: int) -> Any:
        return torch.randn(*shape, device="cuda", generator=generator)

    def numbers(generator: Any, most: int, *shape: int) -> Any:
        return torch.randint(0, most, shape, device="cuda", generator=generator)

    def squares(model: Any, x: Any, y: Any) -> Any:
        return functional.mse_loss(model(x), y)

    def mlp() -> Any:
        return nn.Sequential(
            nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8)
        )

    class Recurrent(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 4)

        def forward(self, x: Any) -> Any:
            return self.head(self.body(x)[0][:, -1])

    class GraphNet(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            from torch_geometric.nn import GCNConv

            self.first, self.second = GCNConv(32, 64), GCNConv(64, 16)
            draw = torch.Generator().manual_seed(0)
            self.register_buffer("edges", torch.randint(0, 200, (2, 1000), generator=draw))

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x, self.edges).relu(), self.edges)

    def transformer() -> Any:
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def resnet() -> Any:
        from torchvision.models import resnet18

        return resnet18()

    def llama() -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
        return LlamaForCausalLM(config).to(torch.bfloat16)

    def tokens(model: Any, ids: Any) -> Any:
        logits = model(ids, use_cache=False).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    return {
        "mlp": Work(mlp, squares, lambda g: (randn(g, 64, 64), randn(g, 64, 8))),
        "lstm": Work(Recurrent, squares, lambda g: (randn(g, 16, 24, 32), randn(g, 16, 4))),
        "graph network": Work(
            GraphNet, squares, lambda g: (randn(g, 200, 32), randn(g, 200, 16)), waits=True
        ),
        "transformer": Work(
            transformer, squares, lambda g: (randn(g, 8, 32, 128), randn(g, 8, 32, 128))
        ),
        "resnet18": Work(
            resnet,
            lambda model, x, y: functional.cross_entropy(model(x), y),
            lambda g: (randn(g, 8, 3, 64, 64), numbers(g, 1000, 8)),
        ),
        "llama 135M": Work(llama, tokens, lambda g: (numbers(g, 49152, 1, 64),), alone=False),
    }


def trainer(
    torch: Any,
    work: Work,
    capturable: bool,
    *,
    compiles: bool = False,
    wrap: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """Makes a model, always the same, and the step that trains it; `wrap` makes what it calls."""
    torch.manual_seed(0)
    model = work.model().cuda().train()
    called = model if wrap is None else wrap(model)
    if capturable:
        rate = torch.tensor(1e-3, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = torch.compile(work.loss, mode="reduce-overhead") if compiles else work.loss

    def step(*args: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_of(called, *args)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def by_hand(torch: Any, step: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
    """Captures a whole step, as torch's documentation does it."""
    inputs = [a.clone() for a in args]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(*inputs)

    def replay(*given: Any) -> Any:
        for into, one in zip(inputs, given, strict=True):
            into.copy_(one)
        graph.replay()
        return loss

    return replay


def trained(
    torch: Any, work: Work, capturable: bool, steps: int, between: Callable[[], None]
) -> str:
    """Trains eagerly and by `graphed`; returns how the parameters compare.  If they differ, trains
    eagerly again: some works give other parameters each time.  `between` is called before each
    training."""
    from ostinato.interop.torch import graphed

    def parameters(wrap: Callable[[Any], Any] | None = None) -> list[Any]:
        between()
        model, step = trainer(torch, work, capturable)
        if wrap is not None:
            step = wrap(step)
        draw = torch.Generator("cuda").manual_seed(7)
        for count in range(steps):
            torch.manual_seed(count)
            step(*work.draw(draw))
        if wrap is not None:
            step.close()
        return [p.detach() for p in model.parameters()]

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        eager = parameters()
        if all(map(torch.equal, eager, parameters(graphed))):
            return "same"
        return "WRONG" if all(map(torch.equal, eager, parameters())) else "eager runs differ"
    finally:
        torch.use_deterministic_algorithms(False)


def begun(torch: Any, step: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Runs the first 12 steps; returns their time in milliseconds."""
    torch.compiler.cudagraph_mark_step_begin()  # imports the compiler
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        step(*args)
    torch.cuda.synchronize()
    return round(1e3 * (time.perf_counter() - began), 1)


def measure(
    torch: Any, name: str, work: Work, steps: int, compiles: bool, turn: Callable[[bool], None]
) -> Iterator[dict[str, object]]:
    """Yields the rows of a work.  Calls `turn` with False between parts of the preparation, and
    with True before the first time that is compared."""
    from ostinato.interop.torch import graphed

    kinds = {"plain": False, "capturable": True}
    between = partial(turn, False)
    equal: dict[str, str] = {}
    for kind, capturable in kinds.items() if not compiles else ():
        equal[kind] = trained(torch, work, capturable, CHECKED, between)
    args = work.draw(torch.Generator("cuda").manual_seed(9))
    beside: dict[str, Callable[..., Any]] = {}
    compiled: dict[str, object] = {}
    if work.alone and not work.waits:
        # The forward and backward alone as graphs, in an eager step.
        def made_graphed(model: Any) -> Any:
            return torch.cuda.make_graphed_callables(model, (args[0].clone(),))

        replayed: Callable[[Any], Any] = lambda model: graphed(model, gradients="replay")  # noqa: E731
        beside["module"] = trainer(torch, work, False, wrap=replayed)[1]
        beside["make_graphed"] = trainer(torch, work, False, wrap=made_graphed)[1]
        begun(torch, beside["module"], args)
        between()
    if compiles:
        began = time.process_time()
        beside["compiled"] = trainer(torch, work, False, compiles=True)[1]
        compiled["compile_ms"] = begun(torch, beside["compiled"], args)
        compiled["compile_cpu_ms"] = round(1e3 * (time.process_time() - began), 1)
    turn(True)
    for kind, capturable in kinds.items():
        step = graphed(trainer(torch, work, capturable)[1])
        ways = {"eager": trainer(torch, work, capturable)[1], "graphed": step}
        row: dict[str, object] = {"work": name, "optimizer": kind}
        if equal:
            row["parameters"] = equal[kind]
        row["first_ms"] = begun(torch, step, args)
        if capturable and not work.waits:
            ways["by hand"] = by_hand(torch, trainer(torch, work, True)[1], args)
        if not capturable:
            ways |= beside
            row |= compiled
        us = common.call_times(torch, ways, args, max(2, steps // BLOCK), BLOCK)
        row |= {f"{way.replace(' ', '_')}_us": round(value, 1) for way, value in us.items()}
        row["of_eager"] = round(us["graphed"] / us["eager"], 3)
        if "by hand" in us:
            row["of_hand"] = round(us["graphed"] / us["by hand"], 3)
        counts = step.statistics()
        row |= {"replays": counts.replays, "eager": counts.eager}
        row["how"] = "; ".join([f"{key.decision} {key.reason}".strip() for key in counts.keys])
        step.close()
        yield row


def apart(names: Sequence[str], chosen: Any) -> Iterator[dict[str, Any]]:
    """Measures each work in a process of its own.  Yields their rows as they come, and for a work
    whose process fails a row with the reason, `skipped`, alone."""
    found: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    variables = {
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // len(names))),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }

    def run(name: str, lock: str) -> None:
        words = ["--works", name, "--steps", str(chosen.steps), "--device", chosen.device]
        words += ["--compile"] * chosen.compile + ["--quick"] * chosen.quick
        words += ["--within", str(chosen.within)]
        command = [sys.executable, "-m", "benchmarks.torch_training", *words, "--beside", lock]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
        ) as child:
            assert child.stdout is not None
            why = ""
            for line in child.stdout:
                if line.startswith('{"work": '):
                    found.put(json.loads(line))
                elif line.startswith("not measured: "):
                    why = line.removeprefix("not measured: ").strip()
        if child.returncode == -signal.SIGALRM:
            why = f"was not prepared after {chosen.within} s"
        elif child.returncode:
            why = why or f"its process ended with status {child.returncode}"
        if why:
            found.put({"work": name, "skipped": why})
        found.put(None)

    with tempfile.NamedTemporaryFile() as lock:
        for name in names:
            threading.Thread(target=run, args=(name, lock.name), daemon=True).start()
        for _ in names:
            yield from iter(found.get, None)


def alone(torch: Any, name: str, work: Work, chosen: Any) -> None:
    """Measures a work beside other processes, and prints each row as a line of JSON.

    Processes share a lock (the file's second byte) while they prepare; each has it for itself
    while it measures.  Who waits for it has the first byte, so that nobody gets it again before."""
    with Path(chosen.beside).open("r+b") as file:

        def turn(mine: bool) -> None:
            torch.cuda.synchronize()
            left = signal.alarm(0)
            fcntl.lockf(file, fcntl.LOCK_UN, 1, 1)
            fcntl.lockf(file, fcntl.LOCK_EX, 1, 0)
            fcntl.lockf(file, fcntl.LOCK_EX if mine else fcntl.LOCK_SH, 1, 1)
            fcntl.lockf(file, fcntl.LOCK_UN, 1, 0)
            signal.alarm(0 if mine else left)

        turn(False)
        signal.alarm(chosen.within)
        steps = 20 if chosen.quick else chosen.steps
        try:
            for row in measure(torch, name, work, steps, chosen.compile, turn):
                print(json.dumps(row), flush=True)
        except Exception as error:
            traceback.print_exc()
            print(f"not measured: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def main() -> int:
    parser = common.options(__doc__)
    parser.add_argument("--works", default="", help="some of them, with commas between")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compile", action="store_true", help="torch.compile beside them")
    parser.add_argument("--within", type=int, default=0, help="seconds to prepare a work; 0: any")
    parser.add_argument("--after", type=Path, metavar="FILE", help="results of an earlier run")
    parser.add_argument("--beside", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch = common.torch_with_cuda(chosen.device)
    if torch is None:
        return 0
    works = _works(torch)
    names = tuple(filter(None, chosen.works.split(","))) or tuple(works)
    if chosen.beside:
        alone(torch, names[0], works[names[0]], chosen)
        return 0
    device = ost.open_device(chosen.device)
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    result = Result(
        "torch_training-compile" if chosen.compile else "torch_training",
        {"what": "a graph of the whole step, made by hand, of the capturable optimiser"},
        {},
        machine(device),
        {"steps": chosen.steps, "torch": torch.__version__, "quick": chosen.quick},
        rows,
        skipped,
    )
    if chosen.after is not None:
        before = json.loads(chosen.after.read_text(encoding="utf-8"))
        kept = [row for row in before["rows"] if row["work"] not in names]
        rows += [{"commit": before["machine"]["commit"], **row} for row in kept]
    for row in apart(names, chosen):
        if "skipped" in row:
            skipped[row["work"]] = row["skipped"]
        else:
            rows.append(row)
            rows.sort(key=lambda each: [*works].index(each["work"]))
        print(row, flush=True)
        path = result.write(chosen.out)
    columns = (
        "work",
        "optimizer",
        "eager_us",
        "graphed_us",
        "by_hand_us",
        "module_us",
        "make_graphed_us",
        "compiled_us",
        "of_eager",
        "parameters",
    )
    print(common.table("training steps", rows, columns))
    print(f"results: {path}")
    print(result.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
