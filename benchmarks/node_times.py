"""The times that `GraphExec.profile` gives for nodes, beside those of CUPTI in torch's profiler.

    python -m benchmarks.node_times [--out DIR] [--device cuda:0|host] [--quick]

Five graphs: a chain of small kernels; a decode step of the 135M shape with random weights (its
launches without programmatic start, since the profile breaks it and CUPTI does not); and, captured
by torch, an MLP, an attention block and a convolution net.  `ours_us` and `cupti_us` are medians of
one node over the replays; CUPTI's is the time from the kernel's start to its end, ours has the
start of the node too.  `agrees`: within 0.3 us or 5 % of CUPTI's, whichever is more.  `replay_us`
is a replay without timers.  `sampled_us` is the sum of the nodes as `profile(sample=2)` has it;
`launch_us` is the host's time of a launch without a sampler, `counted_us` of one that a sampler
counts and does not time.  Without torch, or on the host, only our times are measured.

The last line is one JSON object.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import ostinato as ost
from benchmarks import common
from ostinato.bench.random_weights import random_checkpoint
from ostinato.bench.shapes import SHAPES
from ostinato.driver.api import KernelNodeParams
from ostinato.explain import NodeTimes
from ostinato.models import Decoder

LENGTH = 300
LEAST_US, SHARE = 0.3, 0.05


def chain(device: ost.Device, stream: ost.Stream, held: ExitStack, length: int) -> ost.Graph:
    work = common.Chain(device, length)
    return held.enter_context(ost.capture_function(stream, lambda: work.submit(stream)))


def decode(device: ost.Device, stream: ost.Stream, held: ExitStack, shape: str) -> ost.Graph:
    with random_checkpoint(SHAPES[shape]) as checkpoint:
        decoder = Decoder(device, checkpoint, max_context=128, stop_tokens=(), stream=stream)
    held.enter_context(decoder)
    decoder.prefill(list(range(1, 65)))
    decoder.device_state = False  # every replay computes the same step
    decoder.decode_batch(range(1))
    step = decoder.graph(1)
    labels = [step.labels[node.handle].operation for node in step.nodes()]

    def launches() -> None:
        for operation in labels:
            assert operation is not None and isinstance(operation.params, KernelNodeParams)
            config = replace(operation.params.config, programmatic=False)
            stream.submit(replace(operation, params=replace(operation.params, config=config)))

    return held.enter_context(ost.capture_function(stream, launches))


def of_torch(device: ost.Device, torch: Any, name: str, held: ExitStack) -> ost.Graph:
    from ostinato.interop.torch import adopt_graph

    torch.manual_seed(1)
    nn, model, x = torch.nn, None, None
    if name == "MLP":
        model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(1024, 1024), nn.GELU())))
        x = torch.randn(16, 1024)
    elif name == "attention":
        model = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        x = torch.randn(4, 256, 512)
    else:
        layers = [(3, 64), (64, 128), (128, 128)]
        model = nn.Sequential(
            *(m for a, b in layers for m in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU()))
        )
        x = torch.randn(8, 3, 64, 64)
    model, x = model.cuda().eval(), x.cuda()
    captured = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(x)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(captured):
            y = model(x)
    torch.cuda.synchronize()
    held.callback(lambda kept: None, (model, x, y, captured))
    return adopt_graph(device, captured)


def cupti(
    torch: Any, run: ost.GraphExec, stream: ost.Stream, replays: int, nodes: int
) -> list[float]:
    """The median time of each node in microseconds, in the order of their starts, by the profiler.

    Raises RuntimeError if it saw another number of nodes.
    """
    profiler = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(replays):
            run.launch(stream)
            stream.synchronize()
        torch.cuda.synchronize()
    kind = torch.autograd.DeviceType.CUDA
    events = [e for e in found.profiler.kineto_results.events() if e.device_type() == kind]
    events = [e for e in events if "Context Sync" not in e.name() and e.duration_ns()]
    events.sort(key=lambda e: e.start_ns())
    if len(events) != nodes * replays:
        names = sorted({e.name() for e in events})[:5]
        raise RuntimeError(f"{len(events)} events for {nodes} nodes in {replays} replays: {names}")
    return [
        statistics.median(e.duration_ns() / 1e3 for e in events[at::nodes]) for at in range(nodes)
    ]


def sampled_us(run: ost.GraphExec, stream: ost.Stream, replays: int) -> float:
    """The sum of the nodes by a sampler of every second launch, in microseconds."""
    with run.profile(stream=stream, sample=2, replays=replays) as sampler:
        for _ in range(2 * replays):
            run.launch(stream)
            stream.synchronize()
        return 1e6 * sampler.times().total


def launch_us(run: ost.GraphExec, stream: ost.Stream, launches: int) -> float:
    """The median time of the host in a launch, in microseconds; each is waited for."""
    spent = []
    for _ in range(launches):
        begin = time.perf_counter_ns()
        run.launch(stream)
        spent.append((time.perf_counter_ns() - begin) / 1e3)
        stream.synchronize()
    return statistics.median(spent)


def rows_of(
    name: str, times: NodeTimes, theirs: Sequence[float | None]
) -> Iterator[dict[str, Any]]:
    for node, other in zip(times.nodes, theirs, strict=True):
        ours = 1e6 * node.seconds
        row: dict[str, Any] = {
            "graph": name,
            "node": node.path,
            "name": node.name[:80],
            "ours_us": round(ours, 3),
        }
        if other is not None:
            row["cupti_us"] = round(other, 3)
            row["agrees"] = abs(ours - other) <= max(LEAST_US, SHARE * other)
        yield row


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = common.options(__doc__).parse_args(arguments)
    replays = 3 if chosen.quick else 200
    rows: list[dict[str, Any]] = []
    graphs: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    torch = common.torch_with_cuda(chosen.device)
    # One stream for all: with a second one the driver replays more slowly.
    with ost.open_device(chosen.device) as device, device.create_stream() as stream:
        length, shape = (10, "tiny") if chosen.quick else (LENGTH, "135M")
        makers: dict[str, Callable[[ExitStack], ost.Graph]] = {
            "chain": lambda held: chain(device, stream, held, length),
            f"decode {shape}": lambda held: decode(device, stream, held, shape),
        }
        if torch is None:
            skipped["torch"] = "no torch with a CUDA device: no CUPTI, and no graphs of torch"
        else:
            for model in ("MLP", "attention", "convolution"):
                makers[model] = lambda held, model=model: of_torch(device, torch, model, held)
        for name, make in makers.items():
            with ExitStack() as held:
                run = held.enter_context(make(held).instantiate(upload=stream))
                times = run.profile(stream=stream, replays=replays)
                theirs: list[float | None] = [None] * len(times.nodes)
                if torch is not None:
                    measure = (torch, run, stream, replays, len(times.nodes))
                    seen = common.optional(skipped, f"CUPTI of {name}", lambda m=measure: cupti(*m))
                    theirs = seen or theirs  # type: ignore[assignment]
                own = list(rows_of(name, times, theirs))
                rows += own
                bare = launch_us(run, stream, 5 * replays)
                with run.profile(stream=stream, sample=1 << 30):
                    counted = launch_us(run, stream, 5 * replays)
                graphs.append(
                    {
                        "graph": name,
                        "nodes": len(own),
                        "ours_us": round(1e6 * times.total, 2),
                        "cupti_us": round(sum(t for t in theirs if t is not None), 2),
                        "replay_us": round(1e6 * times.replay, 2),
                        "timer_us": round(1e6 * times.timer, 3),
                        "sampled_us": round(sampled_us(run, stream, replays), 2),
                        "launch_us": round(bare, 2),
                        "counted_us": round(counted, 2),
                        "agree": sum(row.get("agrees", False) for row in own),
                    }
                )
        print(
            common.table(
                "Times of nodes", rows, ["graph", "node", "name", "ours_us", "cupti_us", "agrees"]
            )
        )
        print(common.table("Graphs", graphs, list(graphs[0])))
        common.emit(
            "node_times",
            device,
            chosen.out,
            ceiling={
                "what": "the steps of the device's clock on an H200, microseconds",
                "us": 0.032,
            },
            settings={
                "replays": replays,
                "quick": chosen.quick,
                "least_us": LEAST_US,
                "share": SHARE,
            },
            rows=rows,
            skipped=skipped,
            summary={"graphs": graphs},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
