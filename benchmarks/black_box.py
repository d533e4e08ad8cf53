"""The cost of a black box: replays without a box, with one, and after it.

A mark is a kernel of one thread, so with a mark after every node the GPU runs twice as many
kernels; that of a mark starts while its node runs, and waits for its end.  A chain of tiny kernels
is the worst case: a mark costs the same after a long one.  A decode step of the 8B shape (random
weights, one row, position 64, one replay after the other) is what a user has; its kernels start
early, also with marks between them.  Without a box a launch runs no other code than before; `after`
shows that nothing is left of a box that was closed.

    python -m benchmarks.black_box [--shape 8B] [--out DIR] [--device cuda:0|host] [--quick]

`replay_us` is a replay of many in a row, by the device's clock; `times` as a ratio of `before`;
`launch_us` the CPU's time of a launch (median), with a wait after every few.  The last line is one
JSON object.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import ostinato as ost
from benchmarks import common
from benchmarks.common import Chain
from ostinato.bench.floor import device_us
from ostinato.bench.random_weights import random_checkpoint
from ostinato.bench.shapes import SHAPES
from ostinato.models import Decoder

_LENGTH, _BURST = 300, 8


@dataclass(frozen=True, slots=True)
class Work:
    """A graph that is replayed: `check` raises AssertionError if a replay's answer is wrong."""

    run: ost.GraphExec
    check: Callable[[str], None]
    every: Mapping[str, int]
    """Cases, by the nodes from one mark to the next."""
    replays: int
    rounds: int


def chain(device: ost.Device, stream: ost.Stream, held: ExitStack, quick: bool) -> Work:
    length = 20 if quick else _LENGTH
    made = Chain(device, length)
    graph = held.enter_context(ost.capture_function(stream, lambda: made.submit(stream)))
    run = held.enter_context(graph.instantiate())
    every = {"a mark a node": 1, "a mark every tenth": 10}
    sizes = (4, 2) if quick else (100, 7)
    return Work(run, lambda case: made.check(case, stream), every, *sizes)


def decode(
    device: ost.Device, stream: ost.Stream, held: ExitStack, shape: str, quick: bool
) -> Work:
    config = SHAPES[shape]
    with random_checkpoint(config) as checkpoint:
        decoder = Decoder(device, checkpoint, max_context=128, stop_tokens=(), stream=stream)
    held.enter_context(decoder)
    decoder.prefill(list(range(1, 65)))
    decoder.device_state = False  # every replay computes the same step
    decoder.decode_batch(range(1))
    graph, logits = decoder.graph(1), decoder.plan.buffers["logits"][0]
    run = held.enter_context(graph.instantiate())
    run.launch(stream)
    expected = logits.to_numpy(stream)

    def check(case: str) -> None:
        found = logits.to_numpy(stream)
        ost.fill(stream, logits, 0)
        stream.synchronize()
        if not np.array_equal(found, expected):
            raise AssertionError(f"{case}: other logits")

    layer = len(graph.nodes()) // config.layers
    sizes = (4, 2) if quick else (25, 7)
    return Work(run, check, {"a mark a node": 1, "a mark a layer": layer}, *sizes)


def rows_of(
    name: str, work: Work, device: ost.Device, stream: ost.Stream
) -> Iterator[dict[str, Any]]:
    def many() -> None:
        for _ in range(work.replays):
            work.run.launch(stream)

    cases: dict[str, dict[str, Any] | None] = {"before": None}
    for case, every in work.every.items():
        cases[case] = {"every": every}
        cases[f"{case}, no inputs"] = {"every": every, "inputs": 0}
    cases["after"] = None
    least = 0.0
    for case, options in cases.items():
        with nullcontext() if options is None else ost.black_box(work.run, **options):
            work.run.launch(stream)  # makes the twin
            work.check(case)
            replay = device_us(device, stream, many, work.rounds) / work.replays
            launches = []
            for number in range(4 * _BURST):
                begin = time.perf_counter_ns()
                work.run.launch(stream)
                launches.append((time.perf_counter_ns() - begin) / 1e3)
                if number % _BURST == _BURST - 1:
                    stream.synchronize()
            work.check(case)
        least = least or replay
        yield {
            "work": name,
            "case": case,
            "nodes": len(work.run.graph),
            "replay_us": round(replay, 2),
            "times": round(replay / least, 3),
            "launch_us": round(statistics.median(launches), 2),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--shape", default="8B", help="of the decode step")
    chosen = parser.parse_args(arguments)
    shape = "tiny" if chosen.quick else chosen.shape
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    # One stream for all: with a second one the driver replays more slowly.
    with ost.open_device(chosen.device) as device, device.create_stream() as stream:
        makers: dict[str, Callable[[ExitStack], Work]] = {
            "chain": lambda held: chain(device, stream, held, chosen.quick),
            f"decode {shape}": lambda held: decode(device, stream, held, shape, chosen.quick),
        }
        for name, make in makers.items():
            with ExitStack() as held:
                work = common.optional(skipped, name, partial(make, held))
                for row in rows_of(name, work, device, stream) if isinstance(work, Work) else ():
                    rows.append(row)
                    print(row, flush=True)
        columns = ["work", "case", "replay_us", "times", "launch_us"]
        print(common.table(f"A black box, {device.properties.name}", rows, columns))
        common.emit(
            "black_box",
            device,
            chosen.out,
            ceiling={
                "what": "a replay of the chain without a box, microseconds",
                "us": rows[0]["replay_us"],
            },
            settings={"kernels": _LENGTH, "shape": shape, "quick": chosen.quick},
            rows=rows,
            skipped=skipped,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
