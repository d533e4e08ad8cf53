"""100,000 calls of a graphed function over 50 keys, in a cache for 10 graphs, from two threads.

    python -m benchmarks.torch_soak [--out DIR] [--quick]

Limits: a key that is evicted all the time is captured up to eight times in 1,000 uses, and runs
eagerly otherwise; both are counted.  Each answer is compared with eager torch, bit by bit.  The
threads call on streams of their own; half of the calls have one of a few keys, so that there are
replays between the evictions.  Memory is read, and counts as flat, as in benchmarks.soak; on the
device it is all memory in use, including torch's cached memory.

Exits with 1 if an answer is wrong or memory is not flat.  The last line is one JSON object.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import ostinato as ost
from benchmarks import common
from benchmarks.soak import DEVICE_SLACK, POINTS, PROCESS_SLACK, Part
from ostinato.interop.reading.library import LIMITS

CALLS = 100_000
KEYS = 50
GRAPHS = 10
OFTEN = 5
"""The number of keys that half of the calls have."""


def soak(device: ost.Device, calls: int) -> tuple[Part, dict[str, object]]:
    """Runs the soak.  Returns its memory figures, and counts."""
    import torch

    from ostinato.interop.torch import graphed

    torch.manual_seed(0)
    weight = torch.randint(-3, 4, (32, 32), device="cuda").float()  # integers: sums are exact

    def function(x: Any) -> Any:
        return (x @ weight).relu() + 1, x.sum(dim=-1)

    cache = ost.GraphCache(device, max_graphs=GRAPHS, limits=LIMITS)
    step = graphed(function, device=device, cache=cache, name="soak")
    part, wrong, failures = Part("graphed calls"), [0], []
    done, lock = [0, 0], threading.Lock()
    start = time.perf_counter()

    def work(number: int) -> None:
        rng = random.Random(number)
        stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            batches = [
                torch.randint(-9, 9, (n + 1, 32), device="cuda").float() for n in range(KEYS)
            ]
            bad = torch.zeros((), dtype=torch.int64, device="cuda")
            for call in range(calls // 2):
                x = batches[rng.randrange(OFTEN if rng.random() < 0.5 else KEYS)]
                x.add_(1).remainder_(9)
                for one, other in zip(step(x), function(x), strict=True):
                    bad += (one != other).any()
                done[number] += 1
                if call % 256 == 0:
                    stream.synchronize()
            with lock:
                wrong[0] += int(bad)

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for point in range(1, POINTS):
        while sum(done) < calls * point // POINTS and not failures:
            time.sleep(0.01)
        part.sample(device, sum(done))
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    torch.cuda.synchronize()
    part.seconds = time.perf_counter() - start
    part.sample(device, sum(done))
    counts = step.statistics()
    found = {
        "wrong": wrong[0],
        "calls": counts.calls,
        "replays": counts.replays,
        "eager": counts.eager,
        "captures": counts.captures,
        "quarantined": len(counts.quarantined),
        "graphs": counts.cache.graphs,
        "evictions": counts.cache.evictions.total,
        "eager_reasons": dict(counts.eager_reasons),
    }
    step.close()
    cache.close()
    device.synchronize()
    part.left = device.context.retired
    return part, found


def main(argv: Sequence[str] | None = None) -> int:
    chosen = common.options(__doc__).parse_args(argv)
    torch = common.torch_with_cuda(chosen.device)
    if torch is None:
        return 0
    torch.cuda.current_stream()  # torch opens its context first
    device = ost.open_device(chosen.device)
    part, found = soak(device, 2_000 if chosen.quick else CALLS)
    row = part.row() | found
    print(common.table("graphed calls", [row], list(row)))
    good = part.flat and not found["wrong"]
    common.emit(
        "torch_soak",
        device,
        chosen.out,
        ceiling={
            "what": "drift of device and process memory that counts as flat, bytes",
            "device_bytes": DEVICE_SLACK,
            "process_bytes": PROCESS_SLACK,
        },
        settings={"keys": KEYS, "graphs": GRAPHS, "threads": 2, "quick": chosen.quick},
        rows=[row],
        skipped={},
        summary={"good": good},
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
