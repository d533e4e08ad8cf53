"""100,000 calls of a graphed function over 50 keys, and 50,000 training steps: is memory flat?

    python -m benchmarks.torch_soak [--out DIR] [--quick]

Calls: two threads share a cache for 10 graphs.  Limits: a key that is evicted all the time is
captured up to eight times in 1,000 uses, and runs eagerly otherwise; both are counted.  Each answer
is compared with eager torch, bit by bit.  The threads call on streams of their own; half of the
calls have one of a few keys, so that there are replays between the evictions.

Training: a step with dropout and AdamW, whose rate a scheduler changes every 100 steps.  Ten
replays are checked: parameters and the optimiser's state are saved, the step runs both ways, and is
compared.

Memory is read, and counts as flat, as in benchmarks.soak; on the device it is all memory in use,
including torch's cached memory.

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
STEPS = 50_000
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


def training(device: ost.Device, steps: int) -> tuple[Part, dict[str, object]]:
    """Trains a small network in `graphed`, with `POINTS` checked replays and a scheduler's rate."""
    import torch

    from ostinato.interop.torch import graphed

    torch.manual_seed(0)
    nn = torch.nn
    model = nn.Sequential(
        *(nn.Linear(64, 128), nn.Tanh(), nn.Dropout(0.1), nn.Linear(128, 128), nn.Tanh()),
        nn.Linear(128, 8),
    ).cuda()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(1e-3, device="cuda"), capturable=True, fused=True
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    checked = steps // POINTS
    replayed = graphed(step, device=device, name="training", verify=checked)
    part = Part("training steps")
    start = time.perf_counter()
    for done in range(1, steps + 1):
        x = torch.randn(64, 64, device="cuda")
        replayed(x, x[:, :8].sin())
        if done % 100 == 0:
            scheduler.step()
        if done % checked == 0:
            torch.cuda.synchronize()
            part.sample(device, done)
    part.seconds = time.perf_counter() - start
    counts = replayed.statistics()
    found = {
        "wrong": len(counts.quarantined),
        "calls": counts.calls,
        "replays": counts.replays,
        "eager": counts.eager,
        "checked": counts.verified,
        "captures": counts.captures,
        "quarantined": len(counts.quarantined),
        "graphs": counts.cache.graphs,
        "evictions": counts.cache.evictions.total,
        "eager_reasons": dict(counts.eager_reasons),
    }
    replayed.close()
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
    quick = chosen.quick
    rows = [
        part.row() | found
        for part, found in (
            soak(device, 2_000 if quick else CALLS),
            training(device, 500 if quick else STEPS),
        )
    ]
    print(common.table("soak", rows, [name for name in rows[0] if name != "eager_reasons"]))
    good = all(row["flat"] and not row["wrong"] for row in rows)
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
        rows=rows,
        skipped={},
        summary={"good": good},
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
