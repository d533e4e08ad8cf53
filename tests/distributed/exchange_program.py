"""One rank of two on CUDA or host devices: exchanges in peer memory, for tests.

    exchange_program.py RANK GROUP [host]

Compares sums and gathers with NumPy: eager, captured and replayed, and in the body of a loop.  Then
rank 1 raises, and rank 0 says why its device stopped waiting.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

import ostinato as ost
from ostinato.distributed import Group, join_group, open_collectives
from ostinato.errors import GroupError

COUNTS = (1, 2, 255, 256, 257, 2048, 4099, 32768, 131072)
RANKS = 2


def drawn(rank: int, turn: int, count: int) -> Any:
    return np.random.default_rng([rank, turn, count]).standard_normal(count).astype(np.float32)


def compare(group: Group, device: ost.Device, made: Any) -> None:
    stream = device.create_stream()
    for turn, count in enumerate(COUNTS):
        parts = [drawn(rank, turn, count) for rank in range(RANKS)]
        total = parts[0] + parts[1]
        begin = drawn(9, turn, count)
        for programmatic in (False, made.programmatic(4 * count)):
            target, partial = device.array(begin), device.array(parts[group.rank])
            mine, out = device.array(parts[group.rank]), device.empty(count, np.float32)
            both = device.empty(RANKS * count, np.float32)
            operations = (
                *made.all_reduce(mine, out),
                *made.all_gather(mine, both, programmatic=programmatic),
                *made.accumulate(target, partial, programmatic=programmatic),
            )
            wanted, times = begin.copy(), 0
            with ost.capture(stream) as under_way:
                for operation in operations:
                    stream.submit(operation)
            with under_way.graph.instantiate(upload=stream) as executable:
                for again in range(6):
                    partial.set(parts[group.rank], stream)
                    if (again + group.rank) % 3 == 0:
                        time.sleep(0.001)
                    if again % 2:
                        for operation in operations:
                            stream.submit(operation)
                    else:
                        executable.launch(stream)
                    wanted = wanted + total
                    times += 1
                    with group.watching("exchanges"):
                        stream.synchronize()
                    assert (target.to_numpy(stream) == wanted).all(), (count, again, "accumulate")
                    assert not partial.to_numpy(stream).any(), (count, again)
                    assert (out.to_numpy(stream) == total).all(), (count, again, "all_reduce")
                    found = both.to_numpy(stream)
                    assert (found == np.concatenate(parts)).all(), (count, again, "all_gather")
    # Many in one graph, without the host between them.
    count, many = 4096, 400
    ones = np.full(count, group.rank + 1.0, np.float32)
    target, source = device.zeros(count, np.float32), device.array(ones)
    partial = device.zeros(count, np.float32)
    (operation,) = made.accumulate(target, partial)
    with ost.capture(stream) as under_way:
        for _ in range(many):
            ost.copy(stream, partial, source)
            stream.submit(operation)
    with under_way.graph.instantiate(upload=stream) as executable:
        for _ in range(5):
            executable.launch(stream)
        with group.watching("a graph of exchanges"):
            stream.synchronize()
        assert (target.to_numpy(stream) == 5 * many * 3).all()


def main(rank: str, group_id: str, kind: str = "cuda") -> None:
    lost = ""
    with (
        join_group(group_id, rank=int(rank), size=RANKS, deadline=60) as group,
        ost.open_device("host" if kind == "host" else f"cuda:{rank}") as device,
    ):
        made = open_collectives(group, device, "exchange")
        compare(group, device, made)
        buffer = device.zeros(64, np.float32)
        stream = device.create_stream()
        # Made before: once the group has failed none is made any more.
        operations = made.all_reduce(buffer, buffer)
        group.barrier()
        if group.rank == 1:
            raise ValueError("over")
        try:
            for operation in operations * 3:
                stream.submit(operation)
            with group.watching("a rank that does not come"):
                stream.synchronize()
        except GroupError as error:
            lost = str(error)
        assert np.isnan(buffer.to_numpy(stream)).all()
        print(json.dumps({"lost": lost, "way": made.name}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
