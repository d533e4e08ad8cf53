"""Compares the cost of this tree's calls with those of another tree, for "no slower than before".

Each tree runs in processes of its own, in turns (before, after, before, after, …), so that changes
of the clock rate affect both.  A process times every call by itself and reports medians.  The
figure of a call is the median over all turns of (after / before), with the range of these ratios
as a measure of the noise.

  start         from the start of `import ostinato` until a device is open
  launch        `ostinato.launch` with two pointers and a number
  replay        `GraphExec.launch` of one kernel
  step          `GraphedStep(rows=3)`, a replay
  other size    the same, another size of the same bucket at each call
  patch         one number of a node; `patch all` of every node
  rebind        every pointer into one buffer, in all nodes
  update        all parameters from another definition
  capture       capture, instantiate, close both

The other tree is any checkout, for example of the commit before:

    git worktree add build/before HEAD~1
    python -m benchmarks.commits --before build/before [--turns N] [--device cuda:0|host] [--quick]

The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
NODES = 280
CUDA = """
extern "C" __global__ void blend(const float* a, float* out, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 0.5f * a[i] + 1.0f;
}"""
COUNTS = {
    "launch": 4000,
    "replay": 4000,
    "step": 4000,
    "other size": 4000,
    "patch": 1000,
    "patch all": 200,
    "rebind": 200,
    "update": 200,
    "capture": 30,
}


def measure(device_name: str, quick: bool) -> dict[str, float]:
    """Measures, in this process, the `ostinato` that it imports: microseconds by call."""
    begun = time.perf_counter_ns()
    import ostinato as ost

    device = ost.open_device(device_name)
    found = {"start": (time.perf_counter_ns() - begun) / 1e3}
    counts = {name: 4 if quick else count for name, count in COUNTS.items()}
    nodes = 8 if quick else NODES

    @ost.host_kernel("a: *const f32, out: *out f32, n: u32")
    def blend(launch: object, a: np.ndarray, out: np.ndarray, n: int) -> None:
        out[:n] = np.float32(0.5) * a[:n] + np.float32(1)

    stream = device.create_stream()
    source = ost.Source(cuda=CUDA, host=[blend], name="commits")
    kernel = device.modules.get_or_compile(source, "blend")
    config = ost.LaunchConfig(grid=1, block=256)
    values = np.random.default_rng(7).uniform(1, 2, 256).astype(np.float32)
    inputs = [device.array(values) for _ in range(2)]
    out = device.array(values)

    def times(name: str, call: Callable[[int], object], settle: int = 16) -> None:
        clock, taken = time.perf_counter_ns, []
        for i in range(counts[name] + min(64, counts[name])):
            start = clock()
            call(i)
            taken.append(clock() - start)
            if i % settle == settle - 1:
                stream.synchronize()
        stream.synchronize()
        found[name] = statistics.median(taken[min(64, counts[name]) :]) / 1e3

    def captured(operand: ost.Buffer) -> ost.Graph:
        with ost.capture(stream) as capture:
            for _ in range(nodes):
                ost.launch(stream, kernel, config, operand, out, 256)
        return capture.graph

    times("launch", lambda _: ost.launch(stream, kernel, config, inputs[0], out, 256))
    with ost.capture(stream) as capture:
        ost.launch(stream, kernel, config, inputs[0], out, 256)
    single = capture.graph.instantiate()
    times("replay", lambda _: single.launch(stream))

    x = device.array(np.resize(values, (8, 32)))
    y = device.array(np.resize(values, (8, 32)))
    slots = [ost.Slot("x", x, "input", "rows"), ost.Slot("y", y, "output", "rows")]

    def run(stream: ost.Stream, *_: object, **rows: object) -> None:  # or before `Sizes`
        ost.launch(stream, kernel, config, x, y, 256)

    cache = ost.GraphCache(device, buckets=ost.PowersOfTwo(8))
    step = ost.GraphedStep(run, stream=stream, slots=slots, cache=cache)
    times("step", lambda _: step(rows=3))
    times("other size", lambda i: step(rows=3 + i % 2))

    graphs = [captured(operand) for operand in inputs]
    whole = graphs[0].instantiate()
    middle = nodes // 2
    patch = getattr(whole, "patch", None) or whole.set  # before `set` too
    patch_all = getattr(whole, "patch_all", None) or whole.set_all
    times("patch", lambda i: patch(middle, "n", 255 + i % 2), 1)
    patches = [[(node, "n", number) for node in range(nodes)] for number in (255, 256)]
    times("patch all", lambda i: patch_all(patches[i % 2]), 1)
    times("rebind", lambda i: whole.rebind({inputs[i % 2]: inputs[1 - i % 2]}), 1)
    times("update", lambda i: whole.update(graphs[1 - i % 2]), 1)

    def capture_once(_: int) -> None:
        graph = captured(inputs[0])
        graph.instantiate().close()
        graph.close()

    times("capture", capture_once, 1)
    whole.launch(stream)
    last = out.to_numpy(stream)
    if not np.array_equal(last, np.float32(0.5) * values + np.float32(1)):
        raise AssertionError("the kernel's answer is wrong")
    return found


def child(tree: Path, device: str, quick: bool) -> dict[str, float]:
    """Measures one tree in a process of its own, and returns the figures."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    command = [sys.executable, str(Path(__file__).resolve()), "--child", device, str(int(quick))]
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks import common

    parser = common.options(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="the other tree")
    parser.add_argument("--turns", type=int, default=7, help="processes of each tree")
    options = parser.parse_args(argv)
    turns: list[tuple[dict[str, float], dict[str, float]]] = []
    for _ in range(1 + (1 if options.quick else options.turns)):
        pair = [child(tree, options.device, options.quick) for tree in (options.before, ROOT)]
        turns.append((pair[0], pair[1]))
    del turns[0]  # it compiled kernels, and read files for the first time
    rows: list[dict[str, object]] = []
    for name in turns[0][0]:
        ratios = sorted(after[name] / before[name] for before, after in turns)
        rows.append(
            {
                "call": name,
                "before_us": round(statistics.median(before[name] for before, _ in turns), 3),
                "after_us": round(statistics.median(after[name] for _, after in turns), 3),
                "ratio": round(statistics.median(ratios), 3),
                "least": round(ratios[0], 3),
                "most": round(ratios[-1], 3),
            }
        )
    columns = ["call", "before_us", "after_us", "ratio", "least", "most"]
    print(common.table("This tree beside the one before", rows, columns))
    with common.ost.open_device(options.device) as device:
        common.emit(
            "commits",
            device,
            options.out,
            ceiling={"what": "the tree before, which does the same; a ratio of 1 is no change"},
            settings={"nodes": NODES, "turns": len(turns), "quick": options.quick},
            rows=rows,
            skipped={},
            summary={"ratio": {str(row["call"]): row["ratio"] for row in rows}},
        )
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3] == "1")))
    else:
        sys.exit(main())
