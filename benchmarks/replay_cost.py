"""CPU cost of one replay: ours beside C, cuda.bindings, cuda.core, PyTorch and CuPy.

Lower bound: the driver's own `cuGraphLaunch`, timed inside C on the same executable.  The GPU needs
about a microsecond for each kernel of a chain in any case, so a graph of 280 kernels keeps it busy
for a quarter of a millisecond: a slower launch costs time only for short graphs, or if the CPU has
other work to do.

Two figures for each, both on graphs of the same kernels (a chain of tiny ones, random inputs):

  launch        one call, timed by itself; a wait after every few, so that no call finds the launch
                queue full (then it would time the GPU).  Median and 90th percentile of all calls.
  back to back  many calls and one wait at the end, divided by the number of replays: the larger of
                the CPU's and the GPU's time.

Ours is measured twice: with the compiled hot path (`driver/_launch.c`), if it is built, and with
the one in Python over a ctypes call, on another executable of the same graph.

The cost of the checks of a launch is the difference of `GraphExec.launch` and the prepared driver
call under it, which checks nothing.  A `GraphedStep` is called with the same size again and again,
and with a new size at each call (in the same bucket, so with the same graph); a `HeldReplay` looks
its graph up once.

All Python callables are called without arguments; those with arguments are a `functools.partial`,
so that there is no Python frame in between.  Python's clock costs some 40 ns for each reading,
which is in the Python figures; C reads its own.  All take turns, so that changes of the clock rate
affect all.  The answers of each are compared with NumPy.

    python -m benchmarks.replay_cost [--out DIR] [--device cuda:0|host] [--quick]

The last line is one JSON object.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import ostinato as ost
from benchmarks import common
from benchmarks.common import Chain, Measured, measured
from benchmarks.uncompiled import without_extension
from ostinato.driver import launcher
from ostinato.step import ExplicitBuckets, GraphCache

CALLS = {1: 2000, 32: 2000, 280: 600, 1000: 200}
"""The number of calls in a turn, by the graph's length; long graphs take the GPU longer."""
TURNS = 5

C_LOOP = r"""
#include <stdint.h>
#include <time.h>

typedef int (*launch_function)(void* executable, void* stream);
typedef int (*wait_function)(void* stream);

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* Times every launch; waits after each `burst` of them.  Gives the first status that is no 0. */
int bursts(launch_function launch, wait_function wait, void* executable, void* stream,
           int64_t count, int64_t burst, int64_t* nanoseconds) {
    for (int64_t i = 0; i < count; i++) {
        int64_t start = now();
        int status = launch(executable, stream);
        nanoseconds[i] = now() - start;
        if (!status && (i + 1) % burst == 0) status = wait(stream);
        if (status) return status;
    }
    return wait(stream);
}

/* All of them and one wait. */
int back_to_back(launch_function launch, wait_function wait, void* executable, void* stream,
                 int64_t count, int64_t* nanoseconds) {
    int64_t start = now();
    for (int64_t i = 0; i < count; i++) {
        int status = launch(executable, stream);
        if (status) return status;
    }
    int status = wait(stream);
    *nanoseconds = now() - start;
    return status;
}
"""


@dataclass(slots=True)
class Contender:
    """One way to launch the same graph."""

    name: str
    bursts: Callable[[int, int], Sequence[int]]
    """(count, burst) -> nanoseconds of each of `count` calls, with a wait after every `burst`."""
    back_to_back: Callable[[int], int]
    """count -> nanoseconds of all calls and one wait."""
    keep: object = None
    calls: list[int] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)


def python_contender(
    name: str,
    launch: Callable[[], object],
    wait: Callable[[], object],
    keep: object = None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Contender:
    """Makes a contender that launches and is timed in Python; `around` is entered while timing."""
    clock = time.perf_counter_ns

    def bursts(count: int, burst: int) -> list[int]:
        with around():
            return timed_bursts(count, burst)

    def back_to_back(count: int) -> int:
        with around():
            return timed_back_to_back(count)

    def timed_bursts(count: int, burst: int) -> list[int]:
        times = [0] * count
        for i in range(count):
            start = clock()
            launch()
            times[i] = clock() - start
            if (i + 1) % burst == 0:
                wait()
        wait()
        return times

    def timed_back_to_back(count: int) -> int:
        start = clock()
        for _ in range(count):
            launch()
        wait()
        return clock() - start

    return Contender(name, bursts, back_to_back, (launch, keep))


class CLoop:
    """The C loop, compiled once."""

    def __init__(self) -> None:
        self.library = common.build_c(C_LOOP)

    def contender(
        self,
        name: str,
        launch: ctypes.c_void_p,
        wait: ctypes.c_void_p,
        executable: int,
        stream: int,
        keep: object = None,
    ) -> Contender:
        """Makes a contender from the addresses of a C launch and a C wait, timed inside C."""
        handles = (ctypes.c_void_p(executable), ctypes.c_void_p(stream))

        def bursts(count: int, burst: int) -> Sequence[int]:
            times = (ctypes.c_int64 * count)()
            counts = (ctypes.c_int64(count), ctypes.c_int64(burst))
            _check(self.library.bursts(launch, wait, *handles, *counts, times))
            return list(times)

        def back_to_back(count: int) -> int:
            total = ctypes.c_int64()
            number = ctypes.c_int64(count)
            _check(self.library.back_to_back(launch, wait, *handles, number, ctypes.byref(total)))
            return total.value

        return Contender(name, bursts, back_to_back, keep)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the driver answered {status} to the C loop")


def contenders(
    chain: Chain, stream: ost.Stream, skipped: dict[str, str]
) -> tuple[list[Contender], list[ost.GraphExec]]:
    """Makes all contenders that can run here; C, with which the others are compared, comes first.
    Returns our executables too."""
    device = chain.device
    with ost.capture(stream) as capture:
        chain.submit(stream)
    run = capture.graph.instantiate(upload=stream)
    with without_extension():  # its launches are ctypes calls
        plain = capture.graph.instantiate(upload=stream)
    cuda = device.capabilities.source_language == "cuda"
    found: list[Contender | None] = []
    if cuda:
        found.append(_made(skipped, "C", lambda: _c(run, stream)))
    else:
        skipped["C, cuda.bindings, cuda.core, PyTorch, CuPy"] = f"{device.name} is no GPU"
    if launcher.compiled():
        found += _ours("compiled", run, stream, nullcontext)
        found += _steps(chain, stream)
    else:
        skipped["ostinato compiled"] = launcher.description()
    found += _ours("ctypes", plain, stream, without_extension)
    if cuda:
        found.append(_made(skipped, "cuda.bindings", lambda: _bindings(run, stream)))
        found.append(_made(skipped, "cuda.core", lambda: _cuda_core(chain)))
        found.append(_made(skipped, "PyTorch", lambda: _torch(chain, stream)))
        found.append(_made(skipped, "CuPy", lambda: _cupy(chain)))
    return [c for c in found if c is not None], [run, plain]


def _ours(
    path: str,
    run: ost.GraphExec,
    stream: ost.Stream,
    around: Callable[[], AbstractContextManager[None]],
) -> list[Contender]:
    """Makes contenders for the prepared call by itself, and for the method that users call."""
    wait, driver = stream.synchronize, stream.context.driver
    with around():
        prepared = driver.exec_prepare_launch(run.handle, stream.handle)
        launch = partial(run.launch, stream)  # bound to the path of `around`
    return [
        python_contender(f"ostinato {path}, prepared call", prepared, wait, run, around),
        python_contender(f"ostinato {path}, GraphExec.launch", launch, wait, run, around),
    ]


def _steps(chain: Chain, stream: ost.Stream) -> list[Contender]:
    """Makes contenders that call a step which replays the same work."""

    def run(stream: ost.Stream, _: ost.Sizes) -> None:
        chain.submit(stream)

    def contender(name: str, *sizes: int) -> Contender:
        cache = GraphCache(chain.device, buckets=ExplicitBuckets([max(sizes)]))
        made = ost.GraphedStep(run, stream=stream, cache=cache)
        steps.append(made)
        made(n=max(sizes))  # warms up
        replayed = made(n=max(sizes))
        assert replayed.action.value == "build"
        call: Callable[[], object] = partial(made, n=sizes[0])
        if len(sizes) > 1:
            turn = itertools.cycle(sizes)
            call = lambda: made(n=next(turn))  # noqa: E731  # with a frame of its own
        return python_contender(f"ostinato compiled, {name}", call, stream.synchronize, made)

    steps: list[ost.GraphedStep] = []
    found = [contender("GraphedStep", 2), contender("GraphedStep, another size", 1, 2)]
    held = steps[0].hold(n=2)
    wait = stream.synchronize
    return [
        python_contender("ostinato compiled, HeldReplay.launch", held.launch, wait, held),
        *found,
    ]


def _made(skipped: dict[str, str], name: str, make: Callable[[], Contender]) -> Contender | None:
    made = common.optional(skipped, name, make)
    return made if isinstance(made, Contender) else None


def _c(run: ost.GraphExec, stream: ost.Stream) -> Contender:
    libcuda = ctypes.CDLL("libcuda.so.1")
    launch = common.address_of_function(libcuda, "cuGraphLaunch")
    wait = common.address_of_function(libcuda, "cuStreamSynchronize")
    return CLoop().contender("C", launch, wait, run.handle, stream.handle, (libcuda, run))


def _bindings(run: ost.GraphExec, stream: ost.Stream) -> Contender:
    from cuda.bindings import driver

    executable, on = driver.CUgraphExec(run.handle), driver.CUstream(stream.handle)
    return python_contender(
        "cuda.bindings", partial(driver.cuGraphLaunch, executable, on), stream.synchronize, run
    )


def _cuda_core(chain: Chain) -> Contender:
    from cuda.core import Device

    owner = Device(0)
    owner.set_current()
    on = owner.create_stream()
    builder = on.create_graph_builder()
    builder.begin_building(mode="thread_local")
    chain.submit(chain.device.adopt_stream(on))
    graph = builder.end_building().complete()
    graph.upload(on)
    return python_contender("cuda.core", partial(graph.launch, on), on.sync, (builder, owner))


def _torch(chain: Chain, stream: ost.Stream) -> Contender:
    import torch

    on = torch.cuda.ExternalStream(stream.handle)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=on, capture_error_mode="thread_local"):
        chain.submit(stream)
    torch.cuda.set_stream(on)  # the stream of replay(), without a context manager in the timing
    return python_contender("PyTorch", graph.replay, on.synchronize, graph)


def _cupy(chain: Chain) -> Contender:
    import cupy

    on = cupy.cuda.Stream(non_blocking=True)
    on.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
    chain.submit(chain.device.adopt_stream(on))
    graph = on.end_capture()
    graph.upload(on)
    return python_contender("CuPy", partial(graph.launch, on), on.synchronize, graph)


def measure(
    length: int, stream: ost.Stream, chain: Chain, *, quick: bool, skipped: dict[str, str]
) -> list[dict[str, object]]:
    """Measures all contenders for one length of graphs.  Returns their rows."""
    chain.submit(stream)  # loads everything before the capture
    chain.check("eager", stream)
    found, executables = contenders(chain, stream, skipped)
    calls = 8 if quick else CALLS[length]
    burst = 16 if length < 280 else 4
    many = 4 if quick else CALLS[length]
    for contender in found:
        contender.bursts(min(calls, 64), burst)  # warm
        chain.check(contender.name, stream)
    for _ in range(1 if quick else TURNS):
        for contender in found:
            contender.calls.extend(contender.bursts(calls, burst))
            contender.totals.append(contender.back_to_back(many) / many)
    rows = []
    floor: Measured | None = None
    for contender in found:
        contender.bursts(1, 1)
        chain.check(contender.name, stream)
        one = measured(contender.calls)
        floor = one if contender.name == "C" else floor
        total = measured([int(t) for t in contender.totals])
        rows.append(
            {
                "kernels": length,
                "launched by": contender.name,
                **one.fields(),
                "times_c": round(one.median / floor.median, 2) if floor else None,
                "back_to_back_us": round(total.median, 3),
                "per_kernel_us": round(total.median / length, 4),
            }
        )
    for run in executables:
        run.close()
    return rows


def _difference(rows: list[dict[str, object]], one: str, other: str) -> dict[str, float]:
    """Returns the differences of two contenders' medians, by number of kernels."""
    median = {(r["kernels"], r["launched by"]): r["median_us"] for r in rows}
    found = {}
    for (length, name), us in median.items():
        less = median.get((length, other))
        if name == one and isinstance(us, float) and isinstance(less, float):
            found[str(length)] = round(us - less, 3)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = common.options(__doc__).parse_args(argv)
    lengths = (1, 8) if options.quick else tuple(CALLS)
    skipped: dict[str, str] = {}
    with ost.open_device(options.device) as device:
        rows = []
        stream = device.create_stream()
        for length in lengths:
            chain = Chain(device, length)
            rows += measure(length, stream, chain, quick=options.quick, skipped=skipped)
        columns = ["kernels", "launched by", "median_us", "p90_us", "min_us", "times_c"]
        columns += ["back_to_back_us", "per_kernel_us"]
        print(common.table(f"One replay, {device.properties.name}", rows, columns))
        c = {str(r["kernels"]): r["median_us"] for r in rows if r["launched by"] == "C"}
        common.emit(
            "replay_cost",
            device,
            options.out,
            ceiling={
                "what": "cuGraphLaunch timed inside C on the same executable, median, "
                "microseconds by number of kernels",
                "us": c,
            },
            settings={
                "turns": 1 if options.quick else TURNS,
                "quick": options.quick,
                "replay call": launcher.description(),
            },
            rows=rows,
            skipped=skipped,
            summary={
                f"{path} GraphExec.launch over C": {
                    str(r["kernels"]): r["times_c"]
                    for r in rows
                    if r["launched by"] == f"ostinato {path}, GraphExec.launch"
                }
                for path in ("compiled", "ctypes")
            }
            | {
                "microseconds of the checks of a launch": _difference(
                    rows, "ostinato compiled, GraphExec.launch", "ostinato compiled, prepared call"
                ),
                "microseconds of another size": _difference(
                    rows,
                    "ostinato compiled, GraphedStep, another size",
                    "ostinato compiled, GraphedStep",
                ),
            },
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
