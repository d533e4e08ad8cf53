"""CPU cost of a change to an executable, beside the same driver calls made from C.

Lower bound: each change is one or more calls of libcuda, and the C figures are the time of these
calls alone: `cuGraphExecKernelNodeSetParams` once, or for each of 280 nodes; `cuGraphExecUpdate`;
or a whole capture, instantiate and destroy.  Our cost above that is finding the arguments, checking
them, and keeping the data to undo a refused change.

  first patch      one argument of an executable that was just made, of 1,000 nodes
  first rebind     every pointer into one buffer, of such an executable; second: the same again
  update 1,000     all parameters of 1,000 nodes
  adopt            a graph of 179 nodes, as if of another library, whose nodes are read
  adopted rebind   the first of an executable of it, without signatures
  patch one        a pointer of one node
  patch a number   a number of one node
  patch prepared   the same, by a patcher
  patch all        a number of every node, in one call
  rebind all       every pointer into one buffer, in all nodes (two for each node)
  inventory        the graph's nodes as records, with all arguments (no C figure)
  add a node       to a graph of 100, and to one of 2,000 nodes (no C figure)
  update           all parameters from another definition of the same topology
  recapture        capture all launches again and instantiate

`at_most_us` is the goal on a GPU.  After each timed change the graph runs, untimed, so that every
change takes effect, and the answers are compared with NumPy.

    python -m benchmarks.change_cost [--out DIR] [--device cuda:0|host] [--quick]

The last line is one JSON object.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import ostinato as ost
from benchmarks import common
from benchmarks.common import Chain, Measured, measured

NODES = 280
FIRST_NODES = 1000
ADOPTED_NODES = 179
REPETITIONS = {
    "first patch": 20,
    "first rebind": 20,
    "update 1,000": 100,
    "adopt": 20,
    "patch one": 1000,
    "patch a number": 1000,
    "patch prepared": 1000,
    "patch all": 200,
    "rebind all": 200,
    "inventory": 60,
    "add a node": 100,
    "update": 200,
    "recapture": 60,
}
AT_MOST = {
    "first patch": 1000,
    "first rebind": 1000,
    "second rebind": 1500,
    "update 1,000": 600,
    "adopt": 5000,
    "adopted rebind": 2000,
    "patch one": 5,
    "patch a number": 5,
    "patch prepared": 1.5,
    "rebind all": 600,
    "inventory": 3000,
    "add to 100": 20,
    "add to 2,000": 20,
    "recapture": 4000,
}
"""The goals, in microseconds."""

C_CHANGES = r"""
#include <stdint.h>
#include <time.h>

/* CUDA_KERNEL_NODE_PARAMS_v2 */
typedef struct {
    void* func;
    unsigned grid[3], block[3], shared;
    void** kernel_params;
    void** extra;
    void* kern;
    void* context;
} kernel;

typedef int (*set_params)(void* executable, void* node, const kernel* params);
typedef int (*update_function)(void* executable, void* graph, void* result);
typedef int (*launch_graph)(void* executable, void* stream);
typedef int (*wait_function)(void* stream);
typedef int (*begin_capture)(void* stream, int mode);
typedef int (*end_capture)(void* stream, void** graph);
typedef int (*launch_kernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             unsigned, void* stream, void** params, void** extra);
typedef int (*instantiate_graph)(void** executable, void* graph, unsigned long long flags);
typedef int (*destroy)(void* handle);

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* Sets `nodes` nodes, by turns to what `one` and what `two` say. */
int set_nodes(set_params set, launch_graph launch, wait_function wait, void* executable,
              void* stream, void** handles, const kernel* one, const kernel* two, int64_t nodes,
              int64_t count, int64_t* nanoseconds) {
    int status = 0;
    for (int64_t i = 0; i < count; i++) {
        const kernel* params = i % 2 ? one : two;
        int64_t start = now();
        for (int64_t n = 0; n < nodes; n++) status |= set(executable, handles[n], &params[n]);
        nanoseconds[i] = now() - start;
        if (status || (status = launch(executable, stream)) || (status = wait(stream)))
            return status;
    }
    return status;
}

/* Updates by turns from two definitions. */
int update(update_function change, launch_graph launch, wait_function wait, void* executable,
           void* stream, void* one, void* two, int64_t count, int64_t* nanoseconds) {
    for (int64_t i = 0; i < count; i++) {
        int64_t result[8] = {0};
        int64_t start = now();
        int status = change(executable, i % 2 ? one : two, result);
        nanoseconds[i] = now() - start;
        if (status || (status = launch(executable, stream)) || (status = wait(stream)))
            return status;
    }
    return 0;
}

/* Captures the launches, instantiates, and destroys both after a run. */
int recapture(begin_capture begin, launch_kernel launch_one, end_capture end,
              instantiate_graph instantiate, launch_graph launch, wait_function wait,
              destroy destroy_executable, destroy destroy_graph, void* stream,
              const kernel* params, int64_t nodes, int64_t count, int64_t* nanoseconds) {
    for (int64_t i = 0; i < count; i++) {
        void *graph = 0, *executable = 0;
        int64_t start = now();
        int status = begin(stream, 1);
        for (int64_t n = 0; n < nodes; n++) {
            const kernel* k = &params[n];
            status |= launch_one(k->func, k->grid[0], k->grid[1], k->grid[2], k->block[0],
                                 k->block[1], k->block[2], k->shared, stream, k->kernel_params, 0);
        }
        status |= end(stream, &graph);
        if (!status) status = instantiate(&executable, graph, 0);
        int64_t made = now() - start;
        if (status || (status = launch(executable, stream)) || (status = wait(stream)))
            return status;
        start = now();
        status = destroy_executable(executable) | destroy_graph(graph);
        nanoseconds[i] = made + now() - start;
        if (status) return status;
    }
    return 0;
}
"""


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("kernel_params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class C:
    """The driver's calls from C, on graphs that this library made."""

    def __init__(self, stream: ost.Stream) -> None:
        self.library = common.build_c(C_CHANGES)
        self.libcuda = ctypes.CDLL("libcuda.so.1")
        self.stream = ctypes.c_void_p(stream.handle)
        self._keep: list[object] = []

    def call(self, symbol: str) -> ctypes.c_void_p:
        return common.address_of_function(self.libcuda, symbol)

    @property
    def running(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return self.call("cuGraphLaunch"), self.call("cuStreamSynchronize")

    def kernels(self, nodes: Sequence[ost.Node]) -> ctypes.Array[_Kernel]:
        """Returns the nodes' parameters as an array for the driver."""
        array = (_Kernel * len(nodes))()
        for slot, node in zip(array, nodes, strict=True):
            kernel = node.kernel
            data = ctypes.create_string_buffer(kernel.arguments.data, len(kernel.arguments.data))
            first = ctypes.addressof(data)
            layout = kernel.arguments.layout
            pointers = (ctypes.c_void_p * len(layout))(*[first + s.offset for s in layout])
            self._keep += [data, pointers]
            slot.func = kernel.function
            slot.grid[:], slot.block[:] = kernel.config.grid, kernel.config.block
            slot.shared = kernel.config.shared
            slot.kernel_params = ctypes.addressof(pointers)
        return array

    def set_nodes(
        self, run: ost.GraphExec, one: Sequence[ost.Node], two: Sequence[ost.Node], count: int
    ) -> list[int]:
        """Sets the parameters of all nodes by turns to those of `one` and `two`; the handles are
        those of `one`."""
        handles = (ctypes.c_void_p * len(one))(*[node.handle for node in one])
        return self._times(
            count,
            self.library.set_nodes,
            self.call("cuGraphExecKernelNodeSetParams_v2"),
            *self.running,
            ctypes.c_void_p(run.handle),
            self.stream,
            handles,
            self.kernels(one),
            self.kernels(two),
            ctypes.c_int64(len(one)),
        )

    def update(self, run: ost.GraphExec, one: ost.Graph, two: ost.Graph, count: int) -> list[int]:
        return self._times(
            count,
            self.library.update,
            self.call("cuGraphExecUpdate_v2"),
            *self.running,
            ctypes.c_void_p(run.handle),
            self.stream,
            ctypes.c_void_p(one.handle),
            ctypes.c_void_p(two.handle),
        )

    def recapture(self, nodes: Sequence[ost.Node], count: int) -> list[int]:
        return self._times(
            count,
            self.library.recapture,
            self.call("cuStreamBeginCapture_v2"),
            self.call("cuLaunchKernel"),
            self.call("cuStreamEndCapture"),
            self.call("cuGraphInstantiateWithFlags"),
            *self.running,
            self.call("cuGraphExecDestroy"),
            self.call("cuGraphDestroy"),
            self.stream,
            self.kernels(nodes),
            ctypes.c_int64(len(nodes)),
        )

    @staticmethod
    def _times(count: int, function: Callable[..., int], *args: object) -> list[int]:
        times = (ctypes.c_int64 * count)()
        status = function(*args, ctypes.c_int64(count), times)
        if status:
            raise RuntimeError(f"the driver answered {status} to the C calls")
        return list(times)


def timed(count: int, change: Callable[[int], object], settle: Callable[[], object]) -> list[int]:
    """Times each `change(i)`, in nanoseconds; `settle` runs untimed after each."""
    times = []
    for i in range(count):
        start = time.perf_counter_ns()
        change(i)
        times.append(time.perf_counter_ns() - start)
        settle()
    return times


class Ours:
    """The changes through this library, on one executable."""

    def __init__(self, chain: Chain, stream: ost.Stream) -> None:
        self.chain, self.stream = chain, stream
        self.arenas = (chain.arena, chain.new_arena())
        self.graphs = tuple(self.capture(arena) for arena in self.arenas)
        self.run = self.graphs[0].instantiate(upload=stream)

    def capture(self, arena: ost.Buffer, chain: Chain | None = None) -> ost.Graph:
        with ost.capture(self.stream) as capture:
            (chain or self.chain).submit(self.stream, arena)
        return capture.graph

    def settle(self) -> None:
        self.run.launch(self.stream)
        self.stream.synchronize()

    def answer(self, what: str, arena: int) -> None:
        """Runs the graph, and checks that the right arena has the right numbers."""
        self.settle()
        self.chain.check(what, self.stream, self.arenas[arena])

    def patch(self, count: int) -> list[int]:
        chain, node = self.chain, self.chain.length // 2
        others = (chain.other, chain.device.array(chain.other.to_numpy(self.stream)))
        times = timed(count, lambda i: self.run.set(node, "b", others[(i + 1) % 2]), self.settle)
        self.run.set(node, "b", chain.other)
        self.answer("patch", 0)
        return times

    def first_patch(self, count: int, nodes: int) -> list[int]:
        """Times the first patch of new executables with that many nodes."""
        chain = Chain(self.chain.device, nodes)
        with ost.capture(self.stream) as capture:
            chain.submit(self.stream)
        times = []
        for _ in range(count):
            with capture.graph.instantiate() as run:
                start = time.perf_counter_ns()
                run.set(nodes // 2, "b", chain.other)
                times.append(time.perf_counter_ns() - start)
                run.launch(self.stream)
                chain.check("first patch", self.stream)
        capture.graph.close()
        return times

    def rebinds(self, count: int, updates: int, nodes: int) -> dict[str, list[int]]:
        """Times the first and the second rebinding of new executables with that many nodes, and
        whole updates of one."""
        chain = Chain(self.chain.device, nodes)
        arenas = chain.arena, chain.new_arena()
        graphs = [self.capture(arena, chain) for arena in arenas]
        times: dict[str, list[int]] = {"first rebind": [], "second rebind": [], "update 1,000": []}

        def changed(what: str, run: ost.GraphExec, to: int, change: Callable[[], object]) -> None:
            start = time.perf_counter_ns()
            change()
            times[what].append(time.perf_counter_ns() - start)
            run.launch(self.stream)
            chain.check(what, self.stream, arenas[to])

        for _ in range(count):
            with graphs[0].instantiate() as run:
                for to, what in ((1, "first rebind"), (0, "second rebind")):
                    targets = {arenas[1 - to]: arenas[to]}
                    changed(what, run, to, partial(run.rebind, targets))
        with graphs[0].instantiate() as run:
            for i in range(updates):
                to = (i + 1) % 2
                changed("update 1,000", run, to, partial(run.update, graphs[to]))
        for graph in graphs:
            graph.close()
        return times

    def adopt(self, count: int, nodes: int) -> dict[str, list[int]]:
        """Times the adoption of a graph with that many nodes, and the first rebinding."""
        chain = Chain(self.chain.device, nodes)
        arenas = chain.arena, chain.new_arena()
        times: dict[str, list[int]] = {"adopt": [], "adopted rebind": []}
        with self.capture(chain.arena, chain) as graph:
            for _ in range(count):
                start = time.perf_counter_ns()
                adopted = ost.Graph.adopt(chain.device, graph.handle, owner=graph)
                assert len(adopted.nodes()) == nodes
                times["adopt"].append(time.perf_counter_ns() - start)
                with adopted.instantiate() as run:
                    start = time.perf_counter_ns()
                    run.rebind({arenas[0]: arenas[1]})
                    times["adopted rebind"].append(time.perf_counter_ns() - start)
                    run.launch(self.stream)
                    chain.check("adopted rebind", self.stream, arenas[1])
        return times

    def patch_number(self, count: int, patch: Callable[[int], object], what: str) -> list[int]:
        """Times patches of a kernel's number of floats, by turns to 1 and to all of a cell; ends
        with all."""
        times = timed(count, lambda i: patch(common.CELL if i % 2 else 1), self.settle)
        patch(common.CELL)
        self.answer(what, 0)
        return times

    def patch_all(self, count: int) -> list[int]:
        """Times patches of a number of every node; ends with the initial values."""
        all_nodes = range(self.chain.length)
        patches = [[(node, "n", cells) for node in all_nodes] for cells in (1, common.CELL)]
        times = timed(count, lambda i: self.run.set_all(patches[i % 2]), self.settle)
        self.run.set_all(patches[1])
        self.answer("patch all", 0)
        return times

    def inventory(self, count: int) -> list[int]:
        def read(_: int) -> None:
            arguments = [node.arguments for node in self.graphs[0].nodes()]
            assert len(arguments) == self.chain.length

        return timed(count, read, lambda: None)

    def add(self, count: int, nodes: int) -> list[int]:
        """Times adding a node to a chain of that many nodes."""
        chain = self.chain
        first, last = chain.arena[0], chain.arena[1]
        operands = (first, chain.other, last, common.CELL)
        with ost.Graph.create(chain.device) as graph:
            made: list[ost.Node] = []

            def add(_: int) -> None:
                made[:] = [graph.add_kernel(chain.kernel, chain.config, *operands, after=made)]

            timed(nodes, add, lambda: None)
            times = timed(count, add, lambda: None)
            assert len(graph) == nodes + count
        return times

    def rebind(self, count: int) -> list[int]:
        """Times rebinding between two arenas; ends with the initial one."""
        count += count % 2

        def change(i: int) -> None:
            old, new = self.arenas[i % 2], self.arenas[(i + 1) % 2]
            report = self.run.rebind({old: new})
            assert report.nodes == self.chain.length and not report.left

        times = timed(1, change, lambda: self.answer("rebind", 1))
        return times + timed(count - 1, lambda i: change(i + 1), self.settle)

    def update(self, count: int) -> list[int]:
        count += count % 2
        times = timed(
            1, lambda i: self.run.update(self.graphs[1]), lambda: self.answer("update", 1)
        )
        times += timed(count - 1, lambda i: self.run.update(self.graphs[i % 2]), self.settle)
        self.run.update(self.graphs[0])
        self.answer("update", 0)
        return times

    def recapture(self, count: int) -> list[int]:
        times = []
        for _ in range(count):
            start = time.perf_counter_ns()
            graph = self.capture(self.chain.arena)
            run = graph.instantiate()
            made = time.perf_counter_ns() - start
            run.launch(self.stream)
            self.stream.synchronize()
            start = time.perf_counter_ns()
            run.close()
            graph.close()
            times.append(made + time.perf_counter_ns() - start)
        self.chain.check("recapture", self.stream)
        return times


def measure(
    chain: Chain, stream: ost.Stream, *, quick: bool, skipped: dict[str, str]
) -> list[dict[str, object]]:
    ours = Ours(chain, stream)
    counts = {name: 4 if quick else count for name, count in REPETITIONS.items()}
    middle = chain.length // 2
    first = 20 if quick else FIRST_NODES
    rebinds = ours.rebinds(counts["first rebind"], counts["update 1,000"], first)
    adopted = ours.adopt(counts["adopt"], 20 if quick else ADOPTED_NODES)
    results: dict[str, dict[str, list[int]]] = {
        "first patch": {"ostinato": ours.first_patch(counts["first patch"], first)},
        **{name: {"ostinato": one} for name, one in (*rebinds.items(), *adopted.items())},
        "patch one": {"ostinato": ours.patch(counts["patch one"])},
        "patch a number": {
            "ostinato": ours.patch_number(
                counts["patch a number"], partial(ours.run.set, middle, "n"), "patch a number"
            )
        },
        "patch prepared": {
            "ostinato": ours.patch_number(
                counts["patch prepared"], ours.run.patcher(middle, "n"), "patch prepared"
            )
        },
        "patch all": {"ostinato": ours.patch_all(counts["patch all"])},
        "rebind all": {"ostinato": ours.rebind(counts["rebind all"])},
        "inventory": {"ostinato": ours.inventory(counts["inventory"])},
        "add to 100": {"ostinato": ours.add(counts["add a node"], 4 if quick else 100)},
        "add to 2,000": {"ostinato": ours.add(counts["add a node"], 8 if quick else 2000)},
        "update": {"ostinato": ours.update(counts["update"])},
        "recapture": {"ostinato": ours.recapture(counts["recapture"])},
    }
    if chain.device.capabilities.source_language != "cuda":
        skipped["C"] = f"{chain.device.name} is no GPU"
    else:
        common.optional(skipped, "C", lambda: _in_c(ours, counts, results))
    rows = []
    for name, by in results.items():
        c = measured(by["C"]) if "C" in by else None
        rows += [_row(name, who, measured(times), c) for who, times in by.items()]
    ours.run.close()
    return rows


def _in_c(ours: Ours, counts: dict[str, int], results: dict[str, dict[str, list[int]]]) -> None:
    c, stream, chain = C(ours.stream), ours.stream, ours.chain
    one, two = (graph.nodes() for graph in ours.graphs)
    # C has an executable of its own: the shadow of ours does not know values that C sets.
    with ours.graphs[0].instantiate(upload=stream) as run:
        stream.synchronize()
        middle = slice(chain.length // 2, chain.length // 2 + 1)
        for name in ("patch one", "patch a number", "patch prepared", "first patch"):
            results[name]["C"] = c.set_nodes(run, one[middle], two[middle], counts[name])
        even = counts["rebind all"] + counts["rebind all"] % 2
        results["patch all"]["C"] = c.set_nodes(run, one, two, even)
        results["rebind all"]["C"] = c.set_nodes(run, one, two, even)
        chain.check("C, rebind", stream)
        results["update"]["C"] = c.update(run, *ours.graphs, even)
        chain.check("C, update", stream)
        results["recapture"]["C"] = c.recapture(one, counts["recapture"])
        chain.check("C, recapture", stream)


def _row(change: str, who: str, one: Measured, c: Measured | None) -> dict[str, object]:
    times_c = None if c is None else round(one.median / c.median, 2)
    most = AT_MOST.get(change) if who == "ostinato" else None
    return {"change": change, "by": who, **one.fields(), "times_c": times_c, "at_most_us": most}


def main(argv: Sequence[str] | None = None) -> int:
    options = common.options(__doc__).parse_args(argv)
    nodes = 8 if options.quick else NODES
    skipped: dict[str, str] = {}
    with ost.open_device(options.device) as device:
        stream, chain = device.create_stream(), Chain(device, nodes)
        chain.submit(stream)
        chain.check("eager", stream)
        rows = measure(chain, stream, quick=options.quick, skipped=skipped)
        title = f"Changing an executable of {nodes} kernels, {device.properties.name}"
        columns = ["change", "by", "median_us", "p90_us", "min_us", "times_c", "at_most_us"]
        print(common.table(title, rows, columns))
        by_change = itertools.groupby(rows, key=lambda row: row["change"])
        medians = {
            str(change): {str(row["by"]): row["median_us"] for row in group}
            for change, group in by_change
        }
        common.emit(
            "change_cost",
            device,
            options.out,
            ceiling={
                "what": "the same driver calls made from C, median, microseconds by change",
                "us": {change: by["C"] for change, by in medians.items() if "C" in by},
            },
            settings={"nodes": nodes, "quick": options.quick},
            rows=rows,
            skipped=skipped,
            summary={"median_us": medians},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
