"""`python -m benchmarks.tuning --out DIR [--plan 1B:1,8]`: the default launch shapes of a step, and
the best that `ostinato tune` finds.

A search for each model shape and number of rows begins with the default, times whole steps in loops
of replays, and accepts only shapes whose results agree with the default's.  `of_found_20` is the
default's time over the best one's at position 20, both from longer measurements.  The last line is
JSON, which is also in `DIR/tuning-{device}.json`.

The physics: a step reads each weight once, so it takes no less than their bytes over the memory's
bandwidth, which is measured in the same run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial

import numpy as np

import ostinato as ost
from benchmarks import common
from ostinato.bench.floor import measure_bandwidth
from ostinato.bench.random_weights import random_checkpoint
from ostinato.bench.shapes import shape_named, traffic
from ostinato.models.cuda.dequantise import convert_on_device
from ostinato.models.cuda.shapes import default_tuning
from ostinato.models.cuda.tunings import encode_tuning, known_of
from ostinato.models.decoder import DEFAULT_CONTEXT
from ostinato.models.tune.search import search
from ostinato.models.weights import load_weights

PLANS = ("135M:1,8,32,64", "1B:1,8,32,64", "8B:1,8,32,64")
QUICK = ("135M:8",)
_SECONDS = 40.0
"""The duration of each search."""
_CONTEXTS = (20, 500)
"""The positions at which steps are timed."""


def rows_of(
    device: ost.Device, shape: str, batches: Sequence[int], seconds: float, bandwidth: float
) -> Iterator[dict[str, object]]:
    config = shape_named(shape)
    with random_checkpoint(config) as checkpoint:
        weights = load_weights(
            device, checkpoint, np.uint16, convert=partial(convert_on_device, device)
        )
    read = traffic(config, weights.dtype.itemsize)
    with closing(weights):
        for rows in batches:
            default = default_tuning(config, rows=rows, context=DEFAULT_CONTEXT, **known_of(device))
            found = search(
                device,
                weights,
                default,
                rows=rows,
                context=DEFAULT_CONTEXT,
                contexts=_CONTEXTS,
                seconds=seconds,
            )
            before, after = encode_tuning(default), encode_tuning(found.tuning)
            row: dict[str, object] = {"shape": shape, "rows": rows}
            for context in _CONTEXTS:
                default_us, found_us = found.before[context], found.after[context]
                row |= {
                    f"default_us_{context}": round(default_us, 1),
                    f"found_us_{context}": round(found_us, 1),
                    f"of_found_{context}": round(default_us / found_us, 3),
                }
            yield row | {
                "candidates": len(found.trials),
                "changed": {name: now for name, now in after.items() if now != before[name]},
                "floor_us": round(read.step(rows, _CONTEXTS[0]) / bandwidth * 1e6, 1),
            }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--plan", nargs="*", help="SHAPE:ROWS,…")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="of each search")
    chosen = parser.parse_args(arguments)
    plans = chosen.plan or (QUICK if chosen.quick else PLANS)
    seconds = 2.0 if chosen.quick else chosen.seconds
    rows: list[dict[str, object]] = []
    skipped: dict[str, str] = {}
    with ost.open_device(chosen.device) as device:
        bandwidth = measure_bandwidth(device).best
        if not device.capabilities.compiles_cuda:
            skipped["all"] = f"{device.name} has no launch shapes to choose"
            plans = ()
        for plan in plans:
            shape, batches = plan.split(":")
            try:
                for row in rows_of(
                    device, shape, [int(b) for b in batches.split(",")], seconds, bandwidth
                ):
                    rows.append(row)
                    print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
            except ost.errors.OutOfMemoryError as error:
                skipped[shape] = str(error)
        common.emit(
            "tuning",
            device,
            chosen.out,
            ceiling={
                "what": "every weight once, and keys and values, over the bandwidth",
                "us": {f"{r['shape']} {r['rows']}": r["floor_us"] for r in rows},
                "bandwidth_gb_per_s": round(bandwidth / 1e9, 1),
            },
            settings={"plan": list(plans), "contexts": list(_CONTEXTS), "seconds": seconds},
            rows=rows,
            skipped=skipped,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
