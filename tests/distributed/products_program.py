"""One rank of two on CUDA: products of several rows that add the sums of all ranks, for tests.

    products_program.py RANK GROUP [CUT ...]

Compares with NumPy: the residual, the inputs of the next product, and the sums of squares.  The
values are integers, whose sums are exact; at the end others, whose results must be the same on all
ranks.  Two products take turns, whose grids differ.  Then the ranks choose the best of logits.
Prints a line of JSON: a digest of the results of each cut.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import ostinato as ost
from benchmarks.kernels.checks import from_panels, to_bf16, to_panels
from ostinato.distributed import Group, join_group, open_collectives
from ostinato.models.cuda import lowering as kc
from ostinato.models.cuda.backend import load_kernel
from ostinato.models.cuda.legal import problems_of
from ostinato.models.cuda.shapes import MatrixShape, default_tuning
from ostinato.models.host.shard_kernels import _key
from ostinato.models.program import (
    ACTIVE,
    BEST_OVER_RANKS,
    OPTIONS,
    SAMPLE,
    STOP_TOKENS,
    decode_program,
)
from ostinato.models.sharding import (
    COLLECTIVES,
    BoundCollective,
    Sharding,
    exchanging_products,
    shard_program,
)
from tests.models.random_models import llama

CUTS = {
    "warps share inputs": (5, MatrixShape(2, 4, 1, 128, 1), MatrixShape(4, 2, 1, 64, 1)),
    "the last block of some": (9, MatrixShape(2, 2, 2, 64, 1), MatrixShape(4, 1, 3, 64, 1)),
    "clusters": (17, MatrixShape(2, 2, 2, 64, 1, 2), MatrixShape(4, 1, 4, 64, 1, 4)),
    "warpgroups": (
        17,
        MatrixShape(4, 1, 2, 64, 1, 2, 3, warpgroup=1),
        MatrixShape(4, 2, 4, 64, 1, 4, 4, warpgroup=1),
    ),
    "wide warpgroups": (
        33,
        MatrixShape(8, 2, 1, 64, 1, 1, 3, warpgroup=1),
        MatrixShape(4, 2, 8, 64, 1, 8, 3, warpgroup=1),
    ),
}
"""Rows, and the shapes of output and down: all ways in which a thread gets whole sums."""
TURNS = 6


def drawn(shape: tuple[int, ...], *seed: int) -> Any:
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


def compare(
    group: Group,
    device: ost.Device,
    made: Any,
    cut: str,
    load: Callable[[kc.CudaLaunch], ost.Kernel],
) -> list[bytes]:
    """Returns the results, which must be the same on all ranks.  `load` loads a kernel."""
    (rows, *cuts), ranks = CUTS[cut], group.size
    hidden = 192
    config = llama(4 * ranks, ranks, 64, hidden=hidden, inner=512 * ranks, vocabulary=48 * ranks)
    live = np.zeros((rows, 4), np.int32)
    live[:, 3] = ACTIVE
    live[rows // 2, 3] = 0  # its inputs are zero
    active = live[:, 3] == ACTIVE
    sharding = Sharding(config, group.rank, ranks)
    part = sharding.part
    sizes: dict[str, Any] = {"rows": rows, "context": 64}
    chosen: dict[str, Any] = dict(zip(("output", "down"), cuts, strict=True))
    if cuts[0].warpgroup:
        others = MatrixShape(4, 1, 1, 64, 1, 1, 3, warpgroup=1)
        chosen |= dict.fromkeys(("qkv", "gate_up", "head"), others)
    sizes["tuning"] = replace(default_tuning(part, **sizes), **chosen)
    assert not problems_of(part, rows, sizes["tuning"])
    program = shard_program(decode_program(part), sharding, whole_logits=False)
    bound = [
        one if one.kernel not in COLLECTIVES else BoundCollective(one, made, rows)
        for one in exchanging_products(program, sharding, made.exchanged_sum(2 * rows))
    ]
    lowered = kc.lower(bound, part, **sizes)
    launches = {one.kernel: one for one in lowered if isinstance(one, kc.CudaLaunch)}
    own = [launches[kernel] for kernel in kc.ROUNDED_OF_RANKS.values()]
    kernels = [load(launch) for launch in own]
    in_panels = "PANELS" in dict(own[0].options.defines)
    assert in_panels == bool(cuts[0].warpgroup)
    norm, residual = drawn((hidden,), 1), drawn((rows, hidden), 2)
    x, next_in = device.array(residual), device.zeros((rows, hidden), np.uint16)
    squares = device.zeros((2, rows, 2), np.uint64)
    workspace = device.zeros(kc.workspace_bytes(part, **sizes) // 4, np.float32)
    buffers: dict[str, Any] = {
        "row_count": rows, "live": device.array(live), "x": x, "norm": device.array(norm),
        "next": next_in, "squares": squares, "later": 0, "sums": made.sums(rows * hidden),
        "workspace": workspace,
    }  # fmt: skip
    found = []
    with device.create_stream() as stream:
        for turn in range(TURNS + 1):
            exact = turn < TURNS
            launch, half = own[turn % 2], turn % 2
            width = (part.query_size, part.inner)[turn % 2]
            total = np.zeros((rows, hidden), np.float32)
            for rank in range(ranks):
                weight, rounded = drawn((hidden, width), rank, 3), drawn((rows, width), turn, rank)
                total += rounded @ weight.T
                if rank == group.rank:
                    if not exact:
                        weight, rounded = np.sin(weight + 1), np.cos(rounded + np.arange(width))
                    buffers["weight"] = device.array(to_bf16(weight))
                    rounded = to_panels(rounded) if in_panels else rounded
                    buffers["rounded"] = device.array(to_bf16(rounded))
            squares.set(np.zeros((2, rows, 2), np.uint64), stream)
            next_in.set(np.full((rows, hidden), 0x7FC0, np.uint16), stream)
            given = dict(launch.arguments)
            names = launch.signature.parameters
            values = [buffers.get(one.name, given.get(one.name)) for one in names]
            alone = replace(launch.config, programmatic=False)
            operation = ost.prepare(kernels[turn % 2], alone, *values)
            group.barrier()  # ranks of one context allocate nothing while another's kernel waits
            stream.submit(operation)
            with group.watching("sums"):
                stream.synchronize()
            if not exact:
                found.append(x.to_numpy(stream).tobytes())
                choice = launches[BEST_OVER_RANKS]
                given = (load(choice), made, workspace, part.vocabulary)
                found += chosen_of(group, stream, device, choice, *given)
                break
            residual[active] += total[active]
            assert (x.to_numpy(stream) == residual).all(), (cut, turn)
            got = next_in.to_numpy(stream)
            got = from_panels(got, bricks=False) if in_panels else got
            assert (got == to_bf16(residual * norm) * active[:, None]).all(), (cut, turn)
            sums = squares.to_numpy(stream)
            assert (sums[half, :, 0] == (residual.astype(np.float64) ** 2).sum(1) * active).all()
            assert not sums[half, :, 1].any() and not sums[1 - half].any()
            assert not workspace.to_numpy(stream)[: kc.COUNTER_BYTES // 4].any()
            found += [got.tobytes(), sums.tobytes()]
    return found


def chosen_of(
    group: Group,
    stream: ost.Stream,
    device: ost.Device,
    launch: kc.CudaLaunch,
    kernel: ost.Kernel,
    made: Any,
    workspace: ost.Buffer,
    tokens: int,
) -> list[bytes]:
    """Returns the states after the choice of each row's best logit, several times in a row.
    `tokens`: of a rank."""
    rows, given, found = launch.config.grid[0], dict(launch.arguments), []
    blocks = int(dict(launch.options.defines)["HEAD_BLOCKS"])
    live = np.zeros((rows, 4), np.int32)
    live[:, 1], live[:, 2], live[:, 3] = 7, np.arange(rows), ACTIVE | SAMPLE
    live[rows // 2, 3] = 0  # gets no token
    options = np.zeros(rows, OPTIONS)
    options["repetition_penalty"], options["limit"] = 1, 30
    options["temperature"][1] = 1  # is not greedy
    state = device.zeros((rows, 4), np.int32)
    buffers: dict[str, Any] = {
        "live": device.array(live), "options": device.array(options.view(np.uint64)),
        "stops": device.array(np.full(STOP_TOKENS, 99, np.int32)), "state": state,
        "ring": device.zeros((rows, 2 * 16), np.int32), "workspace": workspace,
        "windows": made.windows, "row_count": rows, "context": 64, "ring_size": 16,
    }  # fmt: skip
    values = [buffers.get(one.name, given.get(one.name)) for one in launch.signature.parameters]
    alone = replace(launch.config, programmatic=False)
    operation = ost.prepare(kernel, alone, *values)
    keys = workspace.view(kc.COUNTER_BYTES, rows * blocks, np.uint64)
    for turn in range(3):
        logits = np.random.default_rng(turn).integers(-9, 9, (rows, group.size, blocks))
        own = logits[:, group.rank].astype(np.float32)
        mine = [_key(logit, token) for row in own for token, logit in enumerate(row)]
        keys.set(np.array(mine, np.uint64), stream)
        state.set(np.full((rows, 4), -7, np.int32), stream)
        stream.synchronize()
        group.barrier()
        stream.submit(operation)
        with group.watching("the best of all ranks"):
            stream.synchronize()
        best = logits.reshape(rows, -1).argmax(1)  # the first one of equal ones
        wanted = np.full((rows, 4), -7)
        wanted[:, 0], wanted[:, 1:] = best // blocks * tokens + best % blocks, (8, 9, 0)
        wanted[1, ::3] = -1, 1
        wanted[rows // 2] = -7
        got = state.to_numpy(stream)
        assert (got == wanted).all(), turn
        found.append(got.tobytes())
    return found


def main(rank: str, group_id: str, *cuts: str) -> None:
    with (
        join_group(group_id, rank=int(rank), size=2, deadline=60) as group,
        ost.open_device(f"cuda:{rank}") as device,
        open_collectives(group, device, "exchange") as made,
    ):
        found = {}
        for cut in cuts or CUTS:
            results = compare(
                group, device, made, cut, lambda launch: load_kernel(device.modules, launch)
            )
            found[cut] = hashlib.sha256(b"".join(results)).hexdigest()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
