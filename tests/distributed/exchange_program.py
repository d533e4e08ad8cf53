"""One rank of two on CUDA or host devices: exchanges in peer memory, for tests.

    exchange_program.py RANK GROUP [host]

Compares sums and gathers with NumPy: eager, captured and replayed; sums that go to the other rank
whole and those computed in parts, in turns, many behind each other, beside work of another stream.
Then rank 1 raises, and rank 0 says why its device stopped waiting.
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

COUNTS = (1, 2, 255, 256, 257, 513, 2048, 4099, 32768, 131071, 131072, 131073, 262143, 262144)
"""The last two are around the largest sums; 131,072 are the most values that go whole."""
LARGEST = 262144
RANKS = 2
WHOLE, IN_PARTS = 1 << 40, -1
"""`ExchangeCollectives._hop_bytes` with which sums go whole, where they may, or are computed in
parts."""


def drawn(rank: int, turn: int, count: int) -> Any:
    return np.random.default_rng([rank, turn, count]).standard_normal(count).astype(np.float32)


def compare(group: Group, device: ost.Device, made: Any) -> None:
    stream = device.create_stream()
    for turn, count in enumerate(COUNTS):
        parts = [drawn(rank, turn, count) for rank in range(RANKS)]
        total = parts[0] + parts[1]
        begin = drawn(9, turn, count)
        for turn_of, programmatic in enumerate((False, made.programmatic(4 * count)) * 2):
            made._hop_bytes = (WHOLE, IN_PARTS)[(turn + turn_of // 2) % 2]
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
    assert made.limit == 4 * LARGEST
    # Many in one graph, without the host between them, of both kinds and uneven sizes.
    sizes, many = [COUNTS[-1 - i % len(COUNTS)] if i % 5 else 4096 for i in range(12)], 20
    most = max(sizes)
    ones = np.full(most, group.rank + 1.0, np.float32)
    target, source = device.zeros(most, np.float32), device.array(ones)
    partial = device.zeros(most, np.float32)
    wanted = np.zeros(most, np.float32)
    busy = device.zeros(64 << 20 if most > 65536 else 4096, "bytes"), device.create_stream()
    sums = []
    for again in range(many):
        for number, count in enumerate(sizes):
            made._hop_bytes = (WHOLE, IN_PARTS)[(again * number) % 2]
            sums.append((count, made.accumulate(target[:count], partial[:count])))
            wanted[:count] += 3
    with ost.capture(stream) as under_way:
        for count, operations in sums:
            ost.copy(stream, partial[:count], source[:count])
            for operation in operations:
                stream.submit(operation)
    with under_way.graph.instantiate(upload=stream) as executable:
        for again in range(5):
            if group.rank == again % 2:  # one of both is late, and its device has other work
                time.sleep(0.005)
                for _ in range(20):
                    ost.copy(busy[1], busy[0][: busy[0].size // 2], busy[0][busy[0].size // 2 :])
            executable.launch(stream)
        with group.watching("a graph of exchanges"):
            stream.synchronize()
        assert (target.to_numpy(stream) == 5 * wanted).all()
        busy[1].synchronize()


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
