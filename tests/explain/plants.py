"""Planted faults: each is a graph with one bad node, whose place the black box must name.

`python -m tests.explain.plants NAME DEVICE` plants one and prints what was found as one line of
JSON: on a GPU a fault costs the process its context, so each needs a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import PROGRAMMATIC
from ostinato.errors import ContextPoisonedError, NotReadyError

N = 256
CUDA = r"""
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(
    cudaGraphConditionalHandle handle, unsigned value);

// As a kernel that starts early: it lets the next one start, and waits for the one before.
extern "C" __device__ void early() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");
#endif
}
extern "C" __global__ void twice(float* x) { early(); x[threadIdx.x] *= 2.0f; }
extern "C" __global__ void touch(float* x, unsigned long long at) { early(); x[at] = 1.0f; }
// It reads where its grid leads: written there, it could destroy the marks of the black box.
extern "C" __global__ void fold(float* x) {
    x[threadIdx.x] = x[blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x];
}
extern "C" __global__ void trap(unsigned* count, unsigned turn) {
    early();
    if (++*count == turn) __trap();
}
extern "C" __global__ void again(
    unsigned* count, unsigned turns, cudaGraphConditionalHandle condition) {
    cudaGraphSetConditional(condition, *count < turns);
}
// Before its own wait: it may do so while the kernel before it runs.
extern "C" __global__ void hasty(float* x, unsigned long long at) { x[at] = 1.0f; early(); }
extern "C" __global__ void spin(unsigned ms) {
    early();
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < ms * 1000000ull);
}
"""


@ost.host_kernel("x: *f32")
def twice(launch, x):
    x[:N] *= np.float32(2)


@ost.host_kernel("x: *f32, at: u64")
def touch(launch, x, at):
    x[at] = 1


@ost.host_kernel("x: *f32")
def fold(launch, x):
    for i in range(launch.grid[0] * launch.block[0]):
        x[i % launch.block[0]] = x[i]


@ost.host_kernel("count: *u32, turn: u32")
def trap(launch, count, turn):
    count[0] += 1
    if count[0] == turn:
        raise RuntimeError("trap")


@ost.host_kernel("count: *u32, turns: u32, condition: cond")
def again(launch, count, turns, condition):
    launch.set_conditional(condition, int(count[0] < turns))


@ost.host_kernel("x: *f32, at: u64")
def hasty(launch, x, at):
    x[at] = 1


@ost.host_kernel("ms: u32")
def spin(launch, ms):
    import time

    time.sleep(ms / 1000)


SOURCE = ost.Source(CUDA, host=[twice, touch, fold, trap, again, hasty, spin], name="plants.cu")
ONE = ost.LaunchConfig(1, 1)
ROW = ost.LaunchConfig(1, N)


class Ground:
    """A device with what the plants use."""

    def __init__(self, device: Device) -> None:
        self.device = device
        device.modules.preload([(SOURCE, list(SOURCE.host))])
        self.stream = device.create_stream()
        self.x = device.array(np.ones(N, np.float32), name="x")
        self.y = device.array(np.ones(N, np.float32), name="y")
        self.count = device.zeros(1, "u4", name="count")
        self.raw: list[int] = []

    def kernel(self, name: str) -> ost.Kernel:
        return self.device.kernel(SOURCE, name)

    def allocated(self) -> int:
        """The address of memory that this library knows nothing of."""
        self.raw.append(self.device.driver.mem_alloc(64 << 20))
        return self.raw[-1]

    def free_all(self) -> None:
        for address in self.raw:
            self.device.driver.mem_free(address)


Add = Callable[..., ost.Node]
"""Adds a node to a graph: (graph, after)."""
BAD: dict[str, Callable[[Ground], tuple[str, ost.LaunchConfig, tuple[Any, ...]]]] = {
    "beyond": lambda g: ("touch", ONE, (g.x, 1 << 40)),
    "null": lambda g: ("touch", ONE, (0, 0)),
    "freed": lambda g: ("touch", ONE, (g.allocated(), 0)),
    "misaligned": lambda g: ("touch", ONE, (g.x.address + 2, 0)),
    "trap": lambda g: ("trap", ONE, (g.count, 1)),
    "grid": lambda g: ("fold", ost.LaunchConfig((1 << 24) if _cuda(g) else 1000, N), (g.x,)),
}


def _cuda(ground: Ground) -> bool:
    return ground.device.name != "host"


def chain(ground: Ground, graph: ost.Graph, bad: tuple[Any, ...], after: Any = ()) -> Any:
    """twice, the bad node, twice, twice: the bad node is number 1."""
    name, config, args = bad
    first = graph.add_kernel(ground.kernel("twice"), ROW, ground.x, after=after)
    second = graph.add_kernel(ground.kernel(name), config, *args, after=[first])
    third = graph.add_kernel(ground.kernel("twice"), ROW, ground.y, after=[second])
    return graph.add_copy(ground.y, ground.x, after=[third])


def early(
    ground: Ground, graph: ost.Graph, bad: tuple[Any, ...], first: tuple[Any, ...] = ()
) -> None:
    """Kernels that may start before the one before them ends; the bad node is number 1."""
    after: list[ost.Node] = []
    for name, config, args in (
        first or ("twice", ROW, (ground.x,)),
        bad,
        *2 * [("twice", ROW, (ground.y,))],
    ):
        made = ost.prepare(ground.kernel(name), config, *args)
        data = [PROGRAMMATIC] * len(after)
        after = [graph.add(made.params, after=after, edge_data=data, operation=made)]


def ahead(ground: Ground, graph: ost.Graph, bad: tuple[Any, ...]) -> None:
    """The same behind a kernel of 0.2 s, which lets the bad one start at once."""
    early(ground, graph, bad, ("spin", ONE, (200,)))


def fork(ground: Ground, graph: ost.Graph, bad: tuple[Any, ...]) -> None:
    """The bad node, number 1, and node 2 can run at once."""
    name, config, args = bad
    first = graph.add_kernel(ground.kernel("twice"), ROW, ground.x)
    left = graph.add_kernel(ground.kernel(name), config, *args, after=[first])
    right = graph.add_kernel(ground.kernel("twice"), ROW, ground.y, after=[first])
    graph.add_empty(after=[left, right])


def child(ground: Ground, graph: ost.Graph, bad: tuple[Any, ...]) -> None:
    inner = ost.Graph.create(ground.device)
    chain(ground, inner, bad)
    first = graph.add_kernel(ground.kernel("twice"), ROW, ground.x)
    node = graph.add_child(inner, after=[first])
    graph.add_kernel(ground.kernel("twice"), ROW, ground.x, after=[node])


def body(ground: Ground, graph: ost.Graph, bad: tuple[Any, ...]) -> None:
    first = graph.add_kernel(ground.kernel("twice"), ROW, ground.x)
    branch = graph.add_conditional("if", graph.condition(1), after=[first])
    chain(ground, branch.bodies[0], bad)


def loop(ground: Ground, graph: ost.Graph, bad: tuple[Any, ...]) -> None:
    """A loop of five turns, whose third is bad if the bad node is a trap."""
    name, config, args = bad
    condition = graph.condition(1)
    first = graph.add_kernel(ground.kernel("twice"), ROW, ground.x)
    turns = graph.add_conditional("while", condition, after=[first])
    inside = turns.bodies[0]
    ahead = inside.add_kernel(ground.kernel("twice"), ROW, ground.x)
    node = inside.add_kernel(ground.kernel(name), config, *args, after=[ahead])
    inside.add_kernel(ground.kernel("again"), ONE, ground.count, 5, condition, after=[node])


@dataclass(frozen=True)
class Plant:
    """`running`: the paths that may be named; the first one must be."""

    bad: str
    shape: Callable[..., object]
    running: tuple[str, ...]
    every: int = 1
    adopted: bool = False
    stale: bool = False
    """The memory is freed after the first replay, as if a rebind was forgotten."""
    hasty: bool = False
    """The bad node may fail early, while the one before it runs: then both are named."""

    @property
    def again(self) -> bool:
        """True if it fails again from a graph file, where no memory is freed."""
        return self.bad != "freed"


PLANTS = {
    **{f"{bad}-chain": Plant(bad, chain, ("1",)) for bad in BAD},
    "hasty-ahead": Plant("hasty", ahead, ("1", "0"), hasty=True),
    **{f"{bad}-fork": Plant(bad, fork, ("1", "2")) for bad in ("beyond", "trap")},
    **{f"{bad}-child": Plant(bad, child, ("1/0/1",)) for bad in ("null", "trap")},
    **{f"{bad}-body": Plant(bad, body, ("1/0/1",)) for bad in ("beyond", "misaligned")},
    **{f"{bad}-early": Plant(bad, early, ("1",)) for bad in ("beyond", "null", "trap")},
    "third-turn-loop": Plant("third", loop, ("1/0/1",)),
    "stale-chain": Plant("freed", chain, ("1",), stale=True),
    "trap-adopted": Plant("trap", chain, ("1",), adopted=True),
    "stale-adopted": Plant("freed", fork, ("1", "2"), adopted=True, stale=True),
    "trap-every-2": Plant("trap", chain, ("1", "0"), every=2),
}
BAD["third"] = lambda g: ("trap", ONE, (g.count, 3))
BAD["hasty"] = lambda g: ("hasty", ONE, (g.x, 1 << 40))


def planted(name: str, device: Device, folder: str) -> dict[str, Any]:
    """Plants a fault, lets it happen, and returns what the error says."""
    plant = PLANTS[name]
    ground = Ground(device)
    graph = ost.Graph.create(device)
    plant.shape(ground, graph, BAD[plant.bad](ground))
    if plant.adopted:
        graph = ost.Graph.adopt(device, int(graph.handle), owner=graph)
    if not plant.stale:
        ground.free_all()
    run = graph.instantiate()
    try:
        with ost.black_box(every=plant.every, folder=folder) as box:
            if plant.stale:
                run.launch(ground.stream)
                ground.stream.synchronize()
                ground.free_all()
            run.launch(ground.stream)
            run.launch(ground.stream)
            ground.stream.synchronize()
    except ContextPoisonedError as error:
        report = error.report
        assert report is box.report and report is not None
        return {
            "status": error.status,
            "running": [node.path for replay in report.replays for node in replay.running],
            "early": [n.path for r in report.replays for n in r.nodes if n.state == "early"],
            "text": str(error),
            "file": report.file,
            "graph": next(replay.file for replay in report.replays),
        }
    return {"running": [], "early": [], "text": "no fault", "file": None}


def in_state(report: str, *states: str) -> list[str]:
    """The paths of the nodes in one of the states, from what `autopsy --json` prints."""
    replays = json.loads(report)["replays"]
    nodes = [node for replay in replays for node in replay["nodes"]]
    return [node["path"] for node in nodes if node["state"] in states]


def hang(device: Device) -> dict[str, Any]:
    """A node that runs for some seconds, and a wait of half a second."""
    ground = Ground(device)
    graph = ost.Graph.create(device)
    chain(ground, graph, ("spin", ONE, (3000,)))
    run = graph.instantiate()
    with ost.black_box():
        run.launch(ground.stream)
        try:
            ground.stream.synchronize(deadline=0.5)
        except NotReadyError as error:
            text = str(error)
            ground.stream.synchronize(deadline=60)
            return {"text": text, "y": ground.y.to_numpy(ground.stream)[:2].tolist()}
    return {"text": "no error"}


def main(name: str, device: str) -> None:
    with ost.open_device(device) as opened:
        found = hang(opened) if name == "hang" else planted(name, opened, sys.argv[3])
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
