"""Planted divergences: does `ost.first_difference` name the node that was planted, and how fast?

    python -m benchmarks.divergences [--works layers,Llama] [--out DIR] [--device cuda:0|host]

Each plant makes two runs of one work, of which one has a mistake in one node that is known
beforehand: a weight, an argument, a pointer, an edge, a launch shape, a seed.  The works are graphs
of this library (a small network, and the decoder), of Triton, and of models of transformers that
torch captured.  A plant is right if the named node is the planted one, or, of an operation of torch
that is several nodes, one of them.  Each work also has a control, two runs that differ in nothing,
for which None is right; controls do not count as plants.

`seconds` is the time of the call of `first_difference` alone.  Each work has a process of its own,
so that an error, or a fault of the GPU, costs no other work; what it did not reach counts as wrong.
On the host driver only the graphs of this library run.  The last line is one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import ostinato as ost
from benchmarks import common
from ostinato.bench.random_weights import random_checkpoint
from ostinato.bench.shapes import SHAPES
from ostinato.models import Decoder

TARGET, TARGET_SECONDS = 36, 10.0
"""The plants that must be named rightly, and the seconds that each may take."""
_LIMIT = 150
"""Seconds that one work may take."""

Run = Any
"""What `first_difference` takes: a graph, an executable, or a function."""


@dataclass(frozen=True, slots=True)
class Planted:
    """Two runs, and the paths of the nodes in which they differ first, of the second run, or of the
    first one (`in_a`) for a node that only it has.  No paths: they do not differ."""

    a: Run
    b: Run
    paths: tuple[str, ...]
    in_a: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """`open`: makes the object whose methods plant, of a device, and whether small is enough;
    `plants`: its methods by what they plant.  `nothing` is the control."""

    kind: str
    open: Callable[..., Any]
    plants: Mapping[str, str]


# ------------------------------------------------------------------------------- layers

CUDA = r"""
#define THREAD const unsigned i = blockIdx.x * blockDim.x + threadIdx.x
extern "C" __global__ void row_norm(const float* x, float* out, float epsilon, unsigned rows,
                                unsigned width) {
    THREAD;
    if (i >= rows * width) return;
    const float* row = x + i / width * width;
    float sum = 0.0f;
    for (unsigned j = 0; j < width; ++j) sum += row[j] * row[j];
    out[i] = x[i] * (1.0f / sqrtf(sum / width + epsilon));
}
extern "C" __global__ void project(const float* x, const float* weight, const float* bias,
                                   float* out, unsigned rows, unsigned width) {
    THREAD;
    if (i >= rows * width) return;
    const float* row = x + i / width * width;
    float sum = bias[i % width];
    for (unsigned j = 0; j < width; ++j) sum += row[j] * weight[j * width + i % width];
    out[i] = sum;
}
extern "C" __global__ void drop(float* x, unsigned seed, unsigned n) {
    THREAD;
    if (i < n && ((i * 2654435761u ^ seed) * 2246822519u >> 28) == 0) x[i] = 0.0f;
}
extern "C" __global__ void add(const float* x, const float* y, float* out, float factor,
                               unsigned n) {
    THREAD;
    if (i < n) out[i] = x[i] + factor * y[i];
}
extern "C" __global__ void times(const float* x, float* out, float factor, unsigned n) {
    THREAD;
    if (i < n) out[i] = x[i] * factor;
}
// The last block of those that count writes the sum.
extern "C" __global__ void sum_last(const float* x, unsigned* counter, float* out, unsigned n) {
    if (threadIdx.x || atomicAdd(counter, 1u) != gridDim.x - 1) return;
    float sum = 0.0f;
    for (unsigned i = 0; i < n; ++i) sum += x[i];
    *out = sum;
}
"""


def _reached(launch: Any, n: int) -> int:
    return min(n, int(launch.grid[0] * launch.block[0]))


@ost.host_kernel("x: *const f32, out: *out f32, epsilon: f32, rows: u32, width: u32")
def row_norm(launch, x, out, epsilon, rows, width):
    n = _reached(launch, rows * width)
    row = x[: rows * width].reshape(rows, width)
    with np.errstate(all="ignore"):
        scale = 1 / np.sqrt(np.square(row).mean(axis=1, keepdims=True) + np.float32(epsilon))
        out[:n] = (row * scale.astype(np.float32)).reshape(-1)[:n]


@ost.host_kernel(
    "x: *const f32, weight: *const f32, bias: *const f32, out: *out f32, rows: u32, width: u32"
)
def project(launch, x, weight, bias, out, rows, width):
    n = _reached(launch, rows * width)
    matrix = weight[: width * width].reshape(width, width)
    # Row by row, so that a row has the same bits in each batch.
    found = [row @ matrix + bias[:width] for row in x[: rows * width].reshape(rows, width)]
    out[:n] = np.concatenate(found)[:n]


@ost.host_kernel("x: *f32, seed: u32, n: u32")
def drop(launch, x, seed, n):
    n = _reached(launch, n)
    mixed = (np.arange(n, dtype=np.uint32) * np.uint32(2654435761)) ^ np.uint32(seed)
    x[:n][mixed * np.uint32(2246822519) >> np.uint32(28) == 0] = 0


@ost.host_kernel("x: *const f32, y: *const f32, out: *out f32, factor: f32, n: u32")
def add(launch, x, y, out, factor, n):
    n = _reached(launch, n)
    out[:n] = x[:n] + np.float32(factor) * y[:n]


@ost.host_kernel("x: *const f32, out: *out f32, factor: f32, n: u32")
def times(launch, x, out, factor, n):
    n = _reached(launch, n)
    out[:n] = x[:n] * np.float32(factor)


@ost.host_kernel("x: *const f32, counter: *u32, out: *f32, n: u32")
def sum_last(launch, x, counter, out, n):
    for _ in range(launch.grid[0]):
        counter[0] += 1
        if counter[0] == launch.grid[0]:
            out[0] = x[:n].sum()


SOURCE = ost.Source(
    CUDA, host=[row_norm, project, drop, add, times, sum_last], name="divergences.cu"
)
WIDTH, BLOCK, LAYERS = 128, 32, 3


@dataclass(frozen=True, slots=True)
class Step:
    """One launch: a kernel, "copy" or "fill", its arguments by name, and its configuration."""

    name: str
    args: Mapping[str, Any]
    config: ost.LaunchConfig

    def with_(self, **args: Any) -> Step:
        return replace(self, args={**self.args, **args})


Steps = dict[str, Step]


class Layers:
    """A network of three layers, x = x + factor drop(project(norm(x))), with its own memory.

    `steps` are its launches by name, in order; a node of their graph has the place of its name.
    """

    def __init__(self, device: ost.Device, stream: ost.Stream, rows: int = 4) -> None:
        self.device, self.stream, self.rows, self.n = device, stream, rows, rows * WIDTH
        rng = np.random.default_rng(3)

        def noise(name: str, *shape: int) -> ost.Buffer:
            return device.array(rng.uniform(-1, 1, shape).astype(np.float32), name=name)

        self.weights = [noise(f"weight{i}", WIDTH, WIDTH) for i in range(LAYERS)]
        self.biases = [noise(f"bias{i}", WIDTH) for i in range(LAYERS)]
        given = rng.uniform(-1, 1, (9, WIDTH)).astype(np.float32)
        given[2] = 0
        self.given = device.array(given, name="given")
        self.x, self.h, self.z, self.kept, self.scaled = (
            device.zeros((rows, WIDTH), np.float32, name=name)
            for name in ("x", "h", "z", "kept", "scaled")
        )
        self.counter = device.zeros(1, np.uint32, name="counter")
        self.total = device.zeros(1, np.float32, name="total")
        config = ost.LaunchConfig(-(-self.n // BLOCK), BLOCK)
        shape = {"rows": rows, "width": WIDTH}
        self.steps: Steps = {
            "start": Step("copy", {"dst": self.x, "src": self.given[:rows]}, config),
            "clear": Step("fill", {"dst": self.counter, "value": 0}, config),
        }
        for i in range(LAYERS):
            layer: dict[str, dict[str, Any]] = {
                "row_norm": {"x": self.x, "out": self.h, "epsilon": 1e-5, **shape},
                "project": {"x": self.h, "weight": self.weights[i], "bias": self.biases[i]},
                "drop": {"x": self.z, "seed": 7 + i, "n": self.n},
                "add": {"x": self.x, "y": self.z, "out": self.x, "factor": 0.5, "n": self.n},
            }
            layer["project"] |= {"out": self.z, **shape}
            self.steps |= {f"{name}{i}": Step(name, of, config) for name, of in layer.items()}
        scaled = {"x": self.x, "out": self.scaled, "factor": 2.0, "n": self.n}
        summed = {"x": self.x, "counter": self.counter, "out": self.total, "n": self.n}
        self.steps |= {
            "keep": Step("copy", {"dst": self.kept, "src": self.x}, config),
            "scale": Step("times", scaled, config),
            "sum": Step("sum_last", summed, config),
        }

    def changed(self, name: str, **args: Any) -> Steps:
        """The steps with other arguments of one."""
        return {**self.steps, name: self.steps[name].with_(**args)}

    def submit(self, steps: Steps | None = None) -> None:
        for one in (self.steps if steps is None else steps).values():
            if one.name == "copy":
                ost.copy(self.stream, one.args["dst"], one.args["src"])
            elif one.name == "fill":
                ost.fill(self.stream, one.args["dst"], one.args["value"])
            else:
                kernel = self.device.kernel(SOURCE, one.name)
                ost.launch(self.stream, kernel, one.config, *one.args.values())

    def graph(self, steps: Steps | None = None) -> ost.Graph:
        return ost.capture_function(self.stream, lambda: self.submit(steps))

    def forked(self, *cut: tuple[str, str]) -> ost.Graph:
        """A graph of the kernels alone, in which each waits for the one before; an edge that is
        `cut` begins at the node before that one instead."""
        graph, nodes = ost.Graph.create(self.device), dict[str, ost.Node]()
        for name, one in self.steps.items():
            before = [*nodes][-1:]
            if before and (before[0], name) in cut:
                before = [*nodes][-2:-1]
            after = [nodes[each] for each in before]
            if one.name == "copy":
                nodes[name] = graph.add_copy(one.args["dst"], one.args["src"], after=after)
            elif one.name == "fill":
                nodes[name] = graph.add_fill(one.args["dst"], one.args["value"], after=after)
            else:
                kernel = self.device.kernel(SOURCE, one.name)
                nodes[name] = graph.add_kernel(kernel, one.config, *one.args.values(), after=after)
        return graph

    def place(self, name: str) -> tuple[str, ...]:
        return (str([*self.steps].index(name)),)

    def replayed(self) -> None:
        """One replay of the graph as it should be, whose results stay in memory."""
        self.graph().instantiate().launch(self.stream)
        self.stream.synchronize()


class Ground:
    """Plants in `Layers`."""

    def __init__(self, device: ost.Device) -> None:
        self.device, self.stream = device, device.create_stream()
        device.modules.preload([(SOURCE, list(SOURCE.host))])

    def layers(self, rows: int = 4) -> Layers:
        return Layers(self.device, self.stream, rows)

    def adopted(self, graph: ost.Graph) -> ost.Graph:
        """The graph as if another library had made it: without signatures, lines and owners."""
        return ost.Graph.adopt(self.device, int(graph.handle), owner=graph)

    def nothing(self) -> Planted:
        one, two = self.layers(), self.layers()
        return Planted(one.submit, two.graph(), ())

    def weight_element(self) -> Planted:
        one, two = self.layers(), self.layers()
        values = two.weights[2].to_numpy(two.stream)
        values[40, 17] += 0.5
        two.weights[2].set(values, two.stream)
        return Planted(one.graph(), two.graph(), one.place("project2"))

    def frozen_scalar(self) -> Planted:
        layers = self.layers()
        run = layers.graph().instantiate()
        now = layers.changed("add1", factor=0.75)
        return Planted(lambda: layers.submit(now), run, layers.place("add1"))

    def epsilon_in_a_child(self) -> Planted:
        layers = self.layers()

        def outer() -> ost.Graph:
            graph = ost.Graph.create(self.device)
            first = graph.add_fill(layers.scaled, 1)
            graph.add_child(layers.graph(), after=[first])
            return graph

        run, (place,) = outer().instantiate(), layers.place("row_norm1")
        run.set(run.nodes()[1].children[0][int(place)], "epsilon", 1e-2)
        return Planted(outer(), run, (f"1.child.{place}",))

    def forgotten_rebind(self) -> Planted:
        layers = self.layers()
        fresh = self.device.zeros((layers.rows, WIDTH), np.float32, name="fresh")
        right, wrong = (layers.graph().instantiate() for _ in range(2))
        right.rebind({layers.h: fresh})
        wrong.rebind({layers.h: fresh})
        (place,) = layers.place("project2")
        wrong.set(int(place), "x", layers.h)
        return Planted(right, wrong, (place,))

    def freed_buffer(self) -> Planted:
        layers, gone = self.layers(), self.device.zeros(WIDTH, np.float32, name="gone")
        wrong = layers.graph(layers.changed("project1", bias=gone))
        gone.close()
        return Planted(layers.graph(), wrong, layers.place("project1"))

    def missing_edge(self) -> Planted:
        layers = self.layers()
        layers.replayed()  # the answers are there: only another order shows it
        return Planted(layers.forked(), layers.forked(("project2", "drop2")), layers.place("drop2"))

    def missing_tail(self) -> Planted:
        layers = self.layers()
        step = layers.steps["project2"]
        short = replace(step, config=ost.LaunchConfig(step.config.grid[0] - 1, BLOCK))
        wrong = layers.graph({**layers.steps, "project2": short})
        runs = (self.adopted(one) for one in (layers.graph(), wrong))
        return Planted(*runs, layers.place("project2"))

    def other_bytes_copied(self) -> Planted:
        layers = self.layers()
        wrong = layers.graph(layers.changed("start", src=layers.given[1 : layers.rows + 1]))
        return Planted(layers.graph(), wrong, layers.place("start"))

    def other_fill(self) -> Planted:
        layers = self.layers()
        run = layers.graph().instantiate()
        (place,) = layers.place("clear")
        run.set(int(place), dst=layers.counter, value=1)
        return Planted(layers.graph(), run, (place,))

    def never_written(self) -> Planted:
        runs, places = [], ()
        for content in (0, 3):
            layers = self.layers()
            scratch = self.device.full((layers.rows, WIDTH), content, np.float32, name="scratch")
            runs.append(layers.graph(layers.changed("add1", y=scratch)))
            places = layers.place("add1")
        return Planted(runs[0], runs[1], places)

    def not_a_number(self) -> Planted:
        layers = self.layers()
        wrong = layers.graph(layers.changed("row_norm0", epsilon=0.0))  # one row is zeros
        return Planted(layers.graph(), wrong, layers.place("row_norm0"))

    def minus_zero(self) -> Planted:
        layers = self.layers()
        runs = (layers.graph(layers.changed("scale", factor=factor)) for factor in (0.0, -0.0))
        return Planted(*runs, layers.place("scale"))

    def other_seed(self) -> Planted:
        layers = self.layers()
        wrong = layers.graph(layers.changed("drop1", seed=99))
        return Planted(self.adopted(layers.graph()), self.adopted(wrong), layers.place("drop1"))

    def next_version(self) -> Planted:
        """Two graph files, each loaded to memory of its own."""
        layers, runs = self.layers(), []
        with tempfile.TemporaryDirectory() as folder:
            for factor in (0.5, 0.25):
                path = Path(folder, f"{factor}.graph")
                ost.graphfile.save(
                    layers.graph(layers.changed("add1", factor=factor)),
                    path,
                    inputs={"given": layers.given},
                    outputs={"total": layers.total, "kept": layers.kept, "scaled": layers.scaled},
                    constants={one.name: one for one in (*layers.weights, *layers.biases)},
                    check=False,
                )
                runs.append(ost.graphfile.load(self.device, path))
        return Planted(*runs, layers.place("add1"))

    def eight_rows(self) -> Planted:
        """A step of one row against one of eight, in which one norm is over the whole batch."""
        one, many = self.layers(1), self.layers(8)
        wrong = many.changed("row_norm1", rows=1, width=many.n)
        return Planted(one.graph(), many.graph(wrong), one.place("row_norm1"))

    def zeroed_once(self) -> Planted:
        """The counter of a kernel's last block was set to zero once, before the capture, so the
        graph does not do it (as reported in https://github.com/ROCm/aiter/pull/4715)."""
        layers = self.layers()
        layers.replayed()
        steps = {name: one for name, one in layers.steps.items() if name != "clear"}
        return Planted(layers.submit, layers.graph(steps), layers.place("clear"), in_a=True)

    def changed_input_address(self) -> Planted:
        """The step before gives its result at a new address, and this one reads the address of the
        capture (as reported in https://github.com/vllm-project/vllm/pull/53915)."""
        layers = self.layers()
        fresh = self.device.zeros((layers.rows, WIDTH), np.float32, name="fresh")
        now = layers.changed("project1", out=fresh)
        for name, word in (("drop1", "x"), ("add1", "y")):
            now[name] = now[name].with_(**{word: fresh})
        run = layers.graph().instantiate()
        run.set(int(layers.place("project1")[0]), "out", fresh)
        return Planted(lambda: layers.submit(now), run, layers.place("drop1"))


# -------------------------------------------------------------------------- the decoder


class DecoderGround:
    """Plants in a decode step of the 135M shape ("tiny" for trials), with random weights."""

    def __init__(self, device: ost.Device, quick: bool) -> None:
        self.device, self.stream = device, device.create_stream()
        with random_checkpoint(SHAPES["tiny" if quick else "135M"]) as checkpoint:
            self.decoder = Decoder(
                device, checkpoint, max_context=64, stop_tokens=(), stream=self.stream
            )
        self.decoder.prefill(list(range(1, 17)))
        self.decoder.device_state = False  # every replay computes the same step
        self.decoder.decode_batch(range(1))
        self.graph = self.decoder.graph(1)

    def runs(self) -> list[ost.GraphExec]:
        return [self.graph.instantiate() for _ in range(2)]

    def bytes_of(self, buffer: ost.Buffer) -> Any:
        return buffer.view(dtype=np.uint8).to_numpy(self.stream)

    def like(self, buffer: ost.Buffer, raw: Any) -> ost.Buffer:
        """A buffer of the same shape and type with these bytes."""
        copy = self.device.empty(buffer.shape, buffer.dtype, name="changed")
        copy.view(dtype=np.uint8).set(raw, self.stream)
        return copy

    def node(self, layer: int, *names: str) -> int:
        """The index of a layer's first node of one of these names."""
        found = [node.index for node in self.graph.nodes() if node.name in names]
        return found[layer]

    def nothing(self) -> Planted:
        return Planted(*self.runs(), ())

    def weight_element(self) -> Planted:
        (right, wrong), node = self.runs(), self.node(1, "down_residual")
        original = self.decoder.weights.buffer("w_down", 1)
        raw = self.bytes_of(original)
        raw[403] ^= 0x80  # the sign of a float32 or bfloat16
        wrong.set(node, "weight", self.like(original, raw))
        return Planted(right, wrong, (str(node),))

    def stale_cache(self) -> Planted:
        """All nodes use a copy of the KV cache that lacks a position of the second layer."""
        (right, wrong), cache = self.runs(), self.decoder.plan.buffers["cache"]
        raw = self.bytes_of(cache)
        raw.reshape(*cache.shape, -1)[1, :, :, :, 3] = 0
        wrong.rebind({cache: self.like(cache, raw)})
        # On a GPU one kernel may do the work of three.
        return Planted(right, wrong, (str(self.node(1, "attention", "attention_block")),))

    def epsilon(self) -> Planted:
        (right, wrong), node = self.runs(), self.node(1, "norm_gate_up")
        wrong.set(node, "epsilon", 1e-2)
        return Planted(right, wrong, (str(node),))


# ------------------------------------------------------------------------------------------ the run

OURS = "ours"
TORCH = "benchmarks.divergences_torch"
WORKS = {
    "layers": Work(
        OURS,
        lambda device, quick: Ground(device),
        {
            "one element of a weight": "weight_element",
            "a scalar that the capture froze": "frozen_scalar",
            "the epsilon of a norm in a child graph": "epsilon_in_a_child",
            "a rebind that did not reach one node": "forgotten_rebind",
            "a pointer to a freed buffer": "freed_buffer",
            "a missing edge": "missing_edge",
            "a launch shape without the tail": "missing_tail",
            "a copy of other bytes": "other_bytes_copied",
            "the value of a fill": "other_fill",
            "memory that was never written": "never_written",
            "a NaN": "not_a_number",
            "-0.0 for 0.0": "minus_zero",
            "another seed of a dropout": "other_seed",
            "another version of a graph file": "next_version",
            "a norm over the whole batch, 1 row against 8": "eight_rows",
            "a counter that was zeroed once, before the capture": "zeroed_once",
            "an input that has moved since the capture": "changed_input_address",
        },
    ),
    "decoder": Work(
        OURS,
        lambda device, quick: DecoderGround(device, quick),
        {
            "one element of a weight": "weight_element",
            "a stale copy of the KV cache": "stale_cache",
            "the epsilon of one norm": "epsilon",
        },
    ),
    "kernels of Triton": Work(
        "Triton",
        lambda device, quick: import_module("benchmarks.divergences_triton").Ground(device),
        {
            "another constexpr": "constexpr",
            "a scalar argument": "scalar",
            "the epsilon of one norm": "epsilon",
            "another seed of a dropout": "seed",
            "a smaller block, and so no tail": "tail",
            "a pointer to an older buffer": "stale_pointer",
            "a launch that is left out": "left_out",
        },
    ),
    **{
        name: Work(
            "transformers",
            lambda device, quick, name=name: import_module(TORCH).Ground(device, name),
            plants,
        )
        for name, plants in {
            "Llama": {
                "one element of a weight": "llama_weight",
                "the epsilon of one norm": "llama_epsilon",
                "a launch shape without the tail": "llama_tail",
                "a stale copy of the KV cache": "llama_cache",
            },
            "GPT-2": {"another bias": "gpt2_bias", "a NaN in a weight": "gpt2_nan"},
            "BERT": {
                "another activation": "bert_activation",
                "the epsilon of one norm": "bert_epsilon",
                "another probability of a dropout": "bert_dropout",
            },
            "Mamba": {
                "one element of A": "mamba_a",
                "one element of a convolution's bias": "mamba_bias",
            },
            "ViT": {
                "one element of the patches' weight": "vit_weight",
                "another class token": "vit_token",
            },
        }.items()
    },
}
"""All works by name.  Other libraries are imported when their works are opened."""


def measure(name: str, device: ost.Device, quick: bool) -> Iterator[dict[str, Any]]:
    """Yields a row for the control and for each plant of a work."""
    work = WORKS[name]
    ground = work.open(device, quick)
    for what, method in {CONTROL: "nothing", **work.plants}.items():
        row: dict[str, Any] = {"kind": work.kind, "work": name, "plant": what}
        try:
            row |= compared(ground.stream, getattr(ground, method)())
        except Exception as error:
            row |= {"right": False, "error": f"{type(error).__name__}: {error}"[:500]}
        yield row


def compared(stream: ost.Stream, planted: Planted) -> dict[str, Any]:
    """Looks for the first difference of two runs; returns what is told of it."""
    began = time.perf_counter()
    found = ost.first_difference(stream, planted.a, planted.b)
    seconds = time.perf_counter() - began
    node = None if found is None else found.a if planted.in_a else found.b
    other = None if found is None else found.a or found.b
    right = found is None
    if planted.paths:
        right = node is not None and node.path in planted.paths
    row: dict[str, Any] = {} if right else {"told": str(found)[:1000]}
    return row | {
        "planted": " or ".join(planted.paths) or "none",
        "named": "none" if other is None else str(node or other).removeprefix("node "),
        "cause": "" if found is None else found.cause.partition(":")[0],
        "right": right,
        "seconds": round(seconds, 3),
    }


CONTROL = "nothing"


def missed(name: str, rows: Sequence[Mapping[str, Any]], why: str) -> list[dict[str, Any]]:
    """Rows for what a process did not reach."""
    work, seen = WORKS[name], {row["plant"] for row in rows}
    return [
        {"kind": work.kind, "work": name, "plant": what, "right": False, "error": why}
        for what in (CONTROL, *work.plants)
        if what not in seen
    ]


def in_a_process(name: str, device: str, quick: bool) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.divergences", "--inside", name]
    command += ["--device", device, *["--quick"] * quick]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            ended = subprocess.run(
                command, cwd=common.ROOT.parent, stdout=out, stderr=err, timeout=_LIMIT, check=False
            )
            why = f"the process ended with status {ended.returncode}"
        except subprocess.TimeoutExpired:
            why = f"the process took longer than {_LIMIT} s"
        out.seek(0)
        err.seek(0)
        rows = [json.loads(line) for line in out if line.startswith("{")]
        last = err.read().strip().splitlines()[-1:]
    return rows + missed(name, rows, ": ".join([why, *last])[:500])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--works", default="", help="some of them, with commas between")
    parser.add_argument("--inside", default="", help="one work, in this process: rows as JSON")
    chosen = parser.parse_args(arguments)
    if chosen.inside:
        with ost.open_device(chosen.device) as device:
            for row in measure(chosen.inside, device, chosen.quick):
                print(json.dumps(row), flush=True)
        return 0
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for name, work in WORKS.items():
        if chosen.works and name not in chosen.works.split(","):
            continue
        if work.kind != OURS and not chosen.device.startswith("cuda"):
            skipped[name] = "it needs a CUDA device"
            continue
        for row in in_a_process(name, chosen.device, chosen.quick):
            rows.append(row)
            print("right" if row["right"] else "WRONG", row, flush=True)
    plants, controls = (
        [row for row in rows if (row["plant"] == CONTROL) is control] for control in (False, True)
    )
    columns = ("work", "plant", "planted", "named", "cause", "right", "seconds")
    print(common.table("planted divergences", rows, columns))
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    with ost.open_device(chosen.device) as device:
        common.emit(
            "divergences",
            device,
            chosen.out,
            ceiling={"what": "every planted node named", "plants": len(plants)},
            settings={"quick": chosen.quick, "target": TARGET, "target_seconds": TARGET_SECONDS},
            rows=rows,
            skipped=skipped,
            summary={
                "plants": len(plants),
                "right": sum(row["right"] for row in plants),
                "right_in_time": sum(
                    row["right"] and row["seconds"] < TARGET_SECONDS for row in plants
                ),
                "controls": len(controls),
                "controls_right": sum(row["right"] for row in controls),
                "most_seconds": max(seconds, default=None),
            },
        )
    return 0


if __name__ == "__main__":
    # As a module: a graph file holds no kernels of the program's own file.
    from benchmarks import divergences

    sys.exit(divergences.main())
