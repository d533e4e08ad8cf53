"""`python -m benchmarks.weights --out DIR [--plan 1B:q8_0,q4_0:1,8]`: packed and bfloat16 weights.

Measures one decoder for each kind of random weights of a shape, as users run it: loading, graphs by
capture, tokens from a run that launches ahead.  The last line is JSON, which is also in
`DIR/weights-{device}.json`.

The physics: a step reads each weight once, so it takes no less than their bytes over the memory's
bandwidth, which is measured in the same run.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import ostinato as ost
from benchmarks import common
from ostinato.bench.floor import measure_bandwidth
from ostinato.bench.random_weights import random_checkpoint
from ostinato.bench.shapes import shape_named
from ostinato.bench.ways import DecoderWay, LaunchMode, decoder_traffic
from ostinato.models import Decoder

PLANS = (
    "1B:bf16,q8_0,q4_0,q4_k_m:1,8,32",
    "8B:bf16,q8_0,q4_k_m:1",
    "135M:bf16,q8_0,q5_1,q5_0,q4_1,iq4_nl,q4_k_m:1",
    "360M:bf16,q8_0,q5_0,q4_0,q4_k_m:1",
)
QUICK = ("tiny:bf16,q4_0:1,2",)
_CONTEXT, _TOKENS, _ROUNDS, _PROMPT = 20, 100, 3, 512


def rows_of(
    device: ost.Device,
    stream: ost.Stream,
    shape: str,
    kind: str,
    batches: list[int],
    bandwidth: float,
    quick: bool,
) -> Iterator[dict[str, object]]:
    config = shape_named(shape)
    recipe = None if kind == "bf16" else kind
    tokens, prompt = (4, 16) if quick else (_TOKENS, _PROMPT)
    begin = time.perf_counter()
    with random_checkpoint(config, kind, recipe=recipe) as checkpoint:
        decoder = Decoder(
            device,
            checkpoint,
            weights="auto" if recipe is None or device.name == "host" else "packed",
            max_context=min(prompt + 2 * tokens, config.context_length),
            sequences=max(batches),
            stop_tokens=(),
            stream=stream,
        )
    with decoder:
        numbers = decoder.statistics()
        loaded = time.perf_counter() - begin
        shared: dict[str, object] = {
            "shape": shape, "kind": kind, "weights": numbers.weights,
            "weight_bytes": numbers.weight_bytes, "load_seconds": round(loaded, 2),
        }  # fmt: skip
        way = DecoderWay(LaunchMode("capture"), decoder, owns=False)
        for batch in batches:
            for _ in range(3):  # eager, captured, replayed
                way.place(batch, _CONTEXT)
                way.decode(4)
            found = []
            for _ in range(_ROUNDS):
                way.place(batch, _CONTEXT)
                found.append(way.decode(tokens).seconds / tokens * 1e6)
            us = statistics.median(found)
            floor = decoder_traffic(decoder).step(batch, _CONTEXT + tokens / 2) / bandwidth * 1e6
            yield shared | {
                "batch": batch, "token_us": round(us, 2), "floor_us": round(floor, 2),
                "tokens_per_second": round(batch * 1e6 / us, 1),
            }  # fmt: skip
        given = [(7 * i + 3) % config.vocabulary for i in range(prompt)]
        seconds = statistics.median([way.prompt(given).seconds for _ in range(3 + _ROUNDS)][3:])
        yield shared | {"prompt": prompt, "prompt_tokens_per_second": round(prompt / seconds)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--plan", nargs="*", help="SHAPE:KIND,…:BATCH,…")
    chosen = parser.parse_args(arguments)
    plans = chosen.plan or (QUICK if chosen.quick else PLANS)
    rows: list[dict[str, object]] = []
    skipped: dict[str, str] = {}
    # One stream for all decoders: with a second one the driver replays more slowly.
    with ost.open_device(chosen.device) as device, device.create_stream() as stream:
        bandwidth = measure_bandwidth(device).best
        for plan in plans:
            shape, kinds, batches = plan.split(":")
            for kind in kinds.split(","):
                wanted = [int(batch) for batch in batches.split(",")]
                try:
                    given = (shape, kind, wanted, bandwidth, chosen.quick)
                    for row in rows_of(device, stream, *given):
                        rows.append(row)
                        print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
                except ost.errors.OutOfMemoryError as error:
                    skipped[f"{shape} {kind}"] = str(error)
        common.emit(
            "weights",
            device,
            chosen.out,
            ceiling={
                "what": "every weight once, and keys and values, over the bandwidth",
                "us": {f"{r['shape']} {r['kind']}": r["floor_us"] for r in rows if "batch" in r},
                "bandwidth_gb_per_s": round(bandwidth / 1e9, 1),
            },
            settings={"plan": list(plans), "context": _CONTEXT, "tokens": _TOKENS},
            rows=rows,
            skipped=skipped,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
