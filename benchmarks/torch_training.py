"""Training steps as people write them, in `graphed`, beside eager steps and a graph made by hand.

    python -m benchmarks.torch_training [--works mlp,lstm] [--compile] [--steps N] [--out DIR]

A step is `zero_grad`, forward, backward, optimiser; it returns its loss.  Each work is trained
twice: with the optimiser as people write it (`AdamW(parameters, lr)`: its counters are on the CPU,
so that `graphed` makes its steps between two graphs), and with one that a graph can hold
(`capturable`, `fused`, a rate on the GPU).  Of the second there is also a graph of the whole step
made by hand, which is the bound: `of_hand` is the time of `graphed` as a part of its time.
`parameters` compares them after 200 steps with those of eager training, bit for bit, with torch's
deterministic kernels; times are those with its usual ones.  Times are those of whole steps with
the wait for the GPU at their end, in turns.  `first_ms` is the time of the first 12 steps.  With
`--compile` each work has a process and, while it runs, a GPU of its own: torch 2.11 breaks the
context in the third work of a process, also without any code of ours.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ostinato as ost
from benchmarks import common

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


def trained(torch: Any, work: Work, capturable: bool, steps: int) -> str:
    """Trains eagerly, by `graphed` and eagerly again; returns how the parameters compare."""
    from ostinato.interop.torch import graphed

    found = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for way in ("eager", "graphed", "eager"):
            model, step = trainer(torch, work, capturable)
            if way == "graphed":
                step = graphed(step)
            draw = torch.Generator("cuda").manual_seed(7)
            for count in range(steps):
                torch.manual_seed(count)
                step(*work.draw(draw))
            found.append([p.detach().clone() for p in model.parameters()])
            if way == "graphed":
                step.close()
    finally:
        torch.use_deterministic_algorithms(False)
    eager, ours, again = found
    if all(map(torch.equal, eager, ours)):
        return "same"
    return "WRONG" if all(map(torch.equal, eager, again)) else "eager runs differ"


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
    torch: Any, name: str, work: Work, steps: int, compiles: bool
) -> list[dict[str, object]]:
    from ostinato.interop.torch import graphed

    rows = []
    draw = torch.Generator("cuda").manual_seed(9)
    args = work.draw(draw)
    for capturable in (False, True):
        step = graphed(trainer(torch, work, capturable)[1])
        ways: dict[str, Callable[..., Any]] = {
            "eager": trainer(torch, work, capturable)[1],
            "graphed": step,
        }
        row: dict[str, object] = {
            "work": name,
            "optimizer": "capturable" if capturable else "plain",
        }
        row["parameters"] = trained(torch, work, capturable, CHECKED)
        row["first_ms"] = begun(torch, step, args)
        if capturable and not work.waits:
            ways["by hand"] = by_hand(torch, trainer(torch, work, True)[1], args)
        if not capturable and work.alone and not work.waits:
            # The forward and backward alone as graphs, in an eager step.
            def made_graphed(model: Any) -> Any:
                return torch.cuda.make_graphed_callables(model, (args[0].clone(),))

            replayed: Callable[[Any], Any] = lambda model: graphed(model, gradients="replay")  # noqa: E731
            ways["module"] = trainer(torch, work, False, wrap=replayed)[1]
            ways["make_graphed"] = trainer(torch, work, False, wrap=made_graphed)[1]
            begun(torch, ways["module"], args)
        if compiles and not capturable:
            torch._dynamo.reset()
            ways["compiled"] = trainer(torch, work, capturable, compiles=True)[1]
            row["compile_ms"] = begun(torch, ways["compiled"], args)
        us = common.call_times(torch, ways, args, max(2, steps // BLOCK), BLOCK)
        row |= {f"{way.replace(' ', '_')}_us": round(value, 1) for way, value in us.items()}
        row["of_eager"] = round(us["graphed"] / us["eager"], 3)
        if "by hand" in us:
            row["of_hand"] = round(us["graphed"] / us["by hand"], 3)
        counts = step.statistics()
        row |= {"replays": counts.replays, "eager": counts.eager}
        row["how"] = "; ".join([f"{key.decision} {key.reason}".strip() for key in counts.keys])
        step.close()
        rows.append(row)
        print(row, flush=True)
    return rows


def apart(torch: Any, names: Sequence[str], chosen: Any) -> Iterator[dict[str, Any]]:
    """Measures each work in a process of its own, with a GPU that no other one has meanwhile.
    Yields `rows` and `skipped` of each, in order."""
    gpus: queue.SimpleQueue[str] = queue.SimpleQueue()
    numbers = ",".join(map(str, range(torch.cuda.device_count())))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", numbers).split(",")
    for number in visible:
        gpus.put(number)

    def measured(name: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            words = ["--works", name, "--steps", str(chosen.steps), "--device", chosen.device]
            words += ["--compile", "--out", folder, *(["--quick"] if chosen.quick else [])]
            command = [sys.executable, "-m", "benchmarks.torch_training", *words]
            gpu = gpus.get()
            try:
                ended = subprocess.run(
                    command,
                    stdout=subprocess.PIPE,
                    text=True,
                    check=False,
                    timeout=chosen.within,
                    env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
                )
                found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
                return found
            except subprocess.TimeoutExpired:
                why = f"took longer than {chosen.within} s"
            except (IndexError, ValueError):
                why = f"its process ended with status {ended.returncode}"
            finally:
                gpus.put(gpu)
        return {"rows": [], "skipped": {name: why}}

    with ThreadPoolExecutor(len(visible)) as pool:
        yield from pool.map(measured, names)


def main() -> int:
    parser = common.options(__doc__)
    parser.add_argument("--works", default="", help="some of them, with commas between")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compile", action="store_true", help="torch.compile beside them")
    parser.add_argument("--within", type=float, help="seconds a work, with --compile")
    chosen = parser.parse_args()
    torch = common.torch_with_cuda(chosen.device)
    if torch is None:
        return 0
    device = ost.open_device(chosen.device)
    rows: list[dict[str, object]] = []
    skipped: dict[str, str] = {}
    works = _works(torch)
    names = tuple(filter(None, chosen.works.split(","))) or tuple(works)
    if chosen.compile and len(names) > 1:
        for found in apart(torch, names, chosen):
            rows += found["rows"]
            skipped |= found["skipped"]
    else:
        for name in names:
            try:
                rows += measure(
                    torch, name, works[name], 20 if chosen.quick else chosen.steps, chosen.compile
                )
            except Exception as error:
                skipped[name] = f"{type(error).__name__}: {str(error)[:300]}"
                print(name, skipped[name], flush=True)
                traceback.print_exc()
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
    common.emit(
        "torch_training",
        device,
        chosen.out,
        ceiling={"what": "a graph of the whole step, made by hand, of the capturable optimiser"},
        settings={"steps": chosen.steps, "torch": torch.__version__, "quick": chosen.quick},
        rows=rows,
        skipped=skipped,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
