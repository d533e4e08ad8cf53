"""`python -m benchmarks.kernels --out DIR [--shapes 135M,1B] [--skip-checks]`

Checks every CUDA kernel against NumPy, then times one decode step as a graph.  Prints a table and
one line of JSON, which is also in `DIR/kernels-{device}.json`.  The kernels have the default launch
shapes; `ostinato tune` searches for better ones.

The physics: a step of one row reads every weight once, so its minimum time is bytes over bandwidth
(269 MB and 88 µs for the 135M shape, 2.47 GB and 810 µs for the 1B shape); the time above that is
the latency of 94 and 84 dependent kernels.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import ostinato as ost
from benchmarks import common
from benchmarks.kernels.checks import Bench, Case, cases, config_of, run_checks
from benchmarks.kernels.timing import BANDWIDTH, StepBench
from ostinato.bench.shapes import SHAPES
from ostinato.models.cuda.shapes import Tuning, default_tuning, without_block

if TYPE_CHECKING:
    from benchmarks.kernels.rig import Gpu


# Head sizes 16 to 128; 1, 3, 4, 5 and 8 query heads for a KV head; odd vocabularies; widths that
# fill no tile.
CHECKED = {
    "135M": (config_of(9, 3, 64, inner=1536, vocabulary=49152, tied_embeddings=True), (1, 8, 64)),
    "1B": (config_of(32, 8, 64, inner=8192, vocabulary=8191, layers=1), (1, 16, 64)),
    "head 128, group 4": (config_of(8, 2, 128, inner=1432, vocabulary=1003), (1, 2, 5, 33)),
    "group 8": (config_of(8, 1, 64, hidden=328, inner=264, vocabulary=301), (1, 3, 7, 24)),
    "group 1": (config_of(4, 4, 32, inner=88, vocabulary=131), (1, 4, 12)),
    "head 80": (config_of(2, 1, 80, inner=96, vocabulary=64), (1, 2, 9)),
    "head 96, group 5": (config_of(5, 1, 96, inner=1000, vocabulary=77), (1, 6, 17)),
    "head 16": (config_of(5, 1, 16, inner=48, vocabulary=33), (1, 8)),
}


def check(machine: Any, names: Any, *, clusters: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        config, rows = CHECKED[name]
        started = time.perf_counter()
        context = 777 if config.hidden > 500 else 150
        rule = partial(default_tuning, config, context=context, clusters=clusters)
        tunings = {count: rule(rows=count) for count in rows}
        errors = run_checks(machine, config, rows, sequences=5, context=context, tunings=tunings)
        found[name] = errors
        shown = " ".join(f"{kernel} {error:.1e}" for kernel, error in errors.items() if error)
        print(
            f"ok {name:18} rows {rows}: {shown}  {time.perf_counter() - started:.1f} s", flush=True
        )
    return found


def repeat_check(machine: Any, times: int) -> None:
    """Checks that repeated steps from the same state give the same bits."""
    config, _ = CHECKED["135M"]
    for rows in (1, 8):
        bench = Bench(machine, config, max_rows=rows, sequences=8, context=600)
        batch = [c for c in cases(bench, rows) if c.name.startswith(("position 299", "batch"))]
        case: Case = batch[-1] if batch else next(iter(cases(bench, rows)))
        case.rows["position"] = 500 - np.arange(rows)
        bench.set_case(case)
        launches = bench.launches(rows)
        first = None
        for _ in range(times):
            for launch in launches:
                bench.launch(launch, rows)
            bits = bench.machine.read(bench.device["logits"]).tobytes()
            first = first or bits
            assert bits == first, f"{rows} rows: logits differ between repeats"
        print(f"ok {times} repeats of a step of {rows} rows: equal bits", flush=True)


def main() -> int:
    parser = common.options(__doc__)
    parser.add_argument("--shapes", default="135M,1B", help="shapes to time")
    parser.add_argument("--skip-checks", action="store_true")
    chosen = parser.parse_args()
    from benchmarks.kernels.rig import Gpu

    gpu = Gpu()
    clusters = gpu.capability >= (9, 0)
    print(gpu.device_name, gpu.capability, gpu.multiprocessors, flush=True)
    if not chosen.skip_checks:
        check(gpu, CHECKED, clusters=clusters)
        repeat_check(gpu, 100)
        gpu.free_all()
    rows: list[dict[str, Any]] = []
    for name in chosen.shapes.split(","):
        started = time.perf_counter()
        rows += _of_shape(gpu, name, clusters)
        gpu.free_all()
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    with ost.open_device(chosen.device) as device:
        common.emit(
            "kernels",
            device,
            chosen.out,
            ceiling={
                "what": "every weight once, and the keys and values up to the position",
                "bytes_per_second": BANDWIDTH,
            },
            settings={"shapes": chosen.shapes, "checked": not chosen.skip_checks},
            rows=rows,
            skipped={},
        )
    return 0


def _of_shape(gpu: Gpu, name: str, clusters: bool) -> Iterator[dict[str, Any]]:
    """Times steps, pieces of prompts, sampling, and the kernels of a step; yields rows."""
    config = SHAPES[name]
    bench = StepBench(gpu, config, sequences=64 if name == "1B" else 1)
    device: dict[str, Any] = {"multiprocessors": gpu.multiprocessors, "clusters": clusters}
    device["fast_memory"] = gpu.fast_memory
    rule = partial(default_tuning, config, context=bench.context, **device)
    single = rule()
    steps: list[tuple[str, int, Tuning, tuple[int, ...]]] = [("rule", 1, single, (20, 500))]
    if single.block is not None:
        apart = without_block(single, config, multiprocessors=gpu.multiprocessors)
        steps.append(("attention as three launches", 1, apart, (20, 500)))
    steps += [("rule", rows, rule(rows=rows), (500,)) for rows in (8, 32, 64)]
    for label, rows, tuning, positions in steps:
        if rows > bench.sequences:
            continue
        for position in positions:
            us, floor = bench.time_step(rows, tuning, position), bench.floor(rows, position)
            yield {
                "shape": name, "what": label, "rows": rows, "position": position, "us": us,
                "floor_us": floor, "of_floor": floor / us,
            }  # fmt: skip
            print(
                f"{name:5} rows {rows:2} at {position:4}: {us:8.1f} us "
                f"{rows * 1e6 / us:8.0f} tok/s {floor / us:5.0%} of the floor  {label}",
                flush=True,
            )
    for start in (0, 448):
        us = bench.time_piece(64, rule(rows=64), start)
        print(
            f"{name:5} piece of 64 at {start:3}: {us:8.1f} us, {64e6 / us:8.0f} tok/s", flush=True
        )
        yield {"shape": name, "what": "piece", "rows": 64, "position": start, "us": us}
    for label, options in (
        ("temperature", (0.8, 1.0, 0)),
        ("top_p", (0.8, 0.9, 0)),
        ("top_k", (0.8, 0.9, 40)),
    ):
        us = bench.time_step(1, single, 20, options=options)
        print(f"{name:5} sampling by {label:12} {us:8.1f} us", flush=True)
        yield {"shape": name, "what": f"sampling by {label}", "rows": 1, "position": 20, "us": us}
    for position in (20, 500):
        for kernel, times in bench.profile(1, single, position).items():
            yield {"shape": name, "what": kernel, "rows": 1, "position": position, **times}
            print(
                f"{name:5} at {position:4} {kernel:16} x{times['launches']:<3} alone "
                f"{times['alone_us']:7.2f} us, adds {times['adds_us']:7.2f}, floor "
                f"{times['floor_us']:7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
