"""The cost of a black box: replays of tiny kernels without a box, with one, and after it.

A mark is a kernel of one thread, so with a mark after every node the GPU runs twice as many
kernels.  A chain of tiny kernels is the worst case: a mark costs the same after a long one.
Without a box a launch runs no other code than before; `after` shows that nothing is left of a box
that was closed.

    python -m benchmarks.black_box [--out DIR] [--device cuda:0|host] [--quick]

`replay_us` is a replay of many in a row, by the device's clock; `launch_us` the CPU's time of a
launch (median), with a wait after every few.  The last line is one JSON object.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import ostinato as ost
from benchmarks import common
from benchmarks.common import Chain
from ostinato.bench.floor import device_us

_LENGTH, _REPLAYS, _ROUNDS, _BURST = 300, 100, 7, 8
_CASES: dict[str, dict[str, Any] | None] = {
    "before": None,
    "a mark a node": {"every": 1},
    "a mark a node, no inputs": {"every": 1, "inputs": 0},
    "a mark every tenth": {"every": 10},
    "after": None,
}
"""The options of the box, or None."""


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = common.options(__doc__).parse_args(arguments)
    length, replays, rounds = (20, 4, 2) if chosen.quick else (_LENGTH, _REPLAYS, _ROUNDS)
    rows: list[dict[str, object]] = []
    with ost.open_device(chosen.device) as device:
        stream, chain = device.create_stream(), Chain(device, length)
        run = ost.capture_function(stream, lambda: chain.submit(stream)).instantiate()
        run.launch(stream)
        chain.check("the first replay", stream)

        def many() -> None:
            for _ in range(replays):
                run.launch(stream)

        least = 0.0
        for case, box in _CASES.items():
            with nullcontext() if box is None else ost.black_box(**box):
                run.launch(stream)  # makes the twin
                chain.check(case, stream)
                replay = device_us(device, stream, many, rounds) / replays
                launches = []
                for number in range(replays):
                    begin = time.perf_counter_ns()
                    run.launch(stream)
                    launches.append((time.perf_counter_ns() - begin) / 1e3)
                    if number % _BURST == 0:
                        stream.synchronize()
                stream.synchronize()
            least = least or replay
            rows.append(
                {
                    "case": case,
                    "replay_us": round(replay, 2),
                    "times": round(replay / least, 3),
                    "launch_us": round(statistics.median(launches), 2),
                }
            )
        title = f"A chain of {length} tiny kernels, {device.properties.name}"
        print(common.table(title, rows, ["case", "replay_us", "times", "launch_us"]))
        common.emit(
            "black_box",
            device,
            chosen.out,
            ceiling={"what": "a replay without a box, microseconds", "us": round(least, 2)},
            settings={"kernels": length, "replays": replays, "quick": chosen.quick},
            rows=rows,
            skipped={},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
