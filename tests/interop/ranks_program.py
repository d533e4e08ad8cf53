"""One rank under torchrun, for tests of graphed functions that communicate.

    torchrun --standalone --nproc-per-node 2 ranks_program.py SCENARIO

With two GPUs by NCCL, else by gloo and on tapes.  Every rank prints a line of JSON.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ostinato as ost
from ostinato.errors import GroupError

ON_GPU = torch.cuda.device_count() > 1
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = f"cuda:{RANK}" if ON_GPU else "cpu"
_opened: list[ost.Device] = []


def graphed(function: Any, **options: Any) -> Any:
    if ON_GPU:
        from ostinato.interop import torch as interop

        return interop.graphed(function, **options)
    from tests.interop.tape import on_tape

    _opened.append(ost.open_device("host"))
    return on_tape(_opened[-1], function, chains=True, **options)


def values(turn: int, rank: int) -> torch.Tensor:
    return torch.arange(300.0, device=DEVICE) + 10 * turn + 1000 * rank


def wanted(turn: int) -> torch.Tensor:
    return sum(values(turn, rank) * 2 for rank in range(SIZE)) + 1


def summing(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def calls(function: Any, turns: range) -> bool:
    return all(torch.equal(function(values(turn, RANK)), wanted(turn)) for turn in turns)


def told(function: Any) -> dict[str, Any]:
    numbers = function.statistics()
    reasons = [key.reason for key in numbers.keys if key.reason]
    return {"captures": numbers.captures, "replays": numbers.replays, "reasons": reasons}


def together() -> dict[str, Any]:
    """Calls of two keys, replayed; then all ranks forget, and capture again."""
    function = graphed(summing)
    right = calls(function, range(6))
    other = torch.ones(7, device=DEVICE) * (RANK + 1)
    right &= all(bool((function(other) == 2 * SIZE * (SIZE + 1) / 2 + 1).all()) for _ in range(4))
    function.forget()
    right &= calls(function, range(4))
    return {"right": right, **told(function)}


def functional() -> dict[str, Any]:
    """A collective of `_functional_collectives`, and one of a group of its own."""
    from torch.distributed import _functional_collectives as functions

    group = dist.new_group(list(range(SIZE)))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = functions.all_reduce(x * 2, "sum", group)
        dist.barrier(group) if not ON_GPU else None
        return y + 1

    made = graphed(function)
    return {"right": calls(made, range(6)), **told(made)}


def single() -> dict[str, Any]:
    """A message to a single rank, for GPUs: a tape has no kernels of NCCL."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if RANK == 0:
            dist.send(y, 1)
        else:
            dist.recv(y, 0)
        return y + 1

    made = graphed(function)
    right = all(torch.equal(made(values(turn, RANK)), values(turn, 0) * 2 + 1) for turn in range(4))
    return {"right": right, **told(made)}


def apart() -> dict[str, Any]:
    """Rank 1 cannot capture: it looks at a value."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = summing(x)
        if RANK == 1:
            y.sum().item()
        return y

    made = graphed(function)
    return {"right": calls(made, range(6)), **told(made)}


def raised() -> dict[str, Any]:
    """Rank 1 raises an exception of its own while the ranks capture, and goes on after it."""
    failing = [False]

    def function(x: torch.Tensor) -> torch.Tensor:
        y = summing(x)
        if failing[0]:
            raise ValueError("on one rank")
        return y

    made = graphed(function, guard=False)
    right = calls(made, range(1))
    failing[0] = RANK == 1
    try:
        right &= calls(made, range(1, 2))
        error = ""
    except ValueError as caught:
        error = str(caught)
    failing[0] = False
    right &= calls(made, range(2, 5))
    return {"right": right, "caught": error, **told(made)}


def again() -> dict[str, Any]:
    """Rank 1 alone forgets its graphs."""
    function = graphed(summing)
    right = calls(function, range(4))
    if RANK == 1:
        function.forget()
    error = ""
    try:
        right &= calls(function, range(4, 6) if RANK else range(4, 5))
    except GroupError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"right": right, "error": error, **told(function)}


def eagerly() -> dict[str, Any]:
    """Rank 1 alone runs a key eagerly that has a graph: its argument shares memory with the
    function's state, which it writes."""
    state = torch.zeros(300, device=DEVICE)

    def function(x: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return summing(x)

    made = graphed(function)
    right = calls(made, range(4))
    error = ""
    try:
        made(state if RANK == 1 else values(4, RANK))
    except GroupError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"right": right, "error": error, **told(made)}


def ends_with_graphs_of(function: Any) -> list[int]:
    """Notes, whenever a group ends, how many objects of the function's device are not destroyed
    yet: NCCL waits for ever for graphs.  Called before the function's first call."""
    kind: Any = dist.ProcessGroup
    end, found, context = kind.shutdown, list[int](), function.cache.context

    def noting(group: Any) -> None:
        found.append(context.retired)
        end(group)

    kind.shutdown = noting
    return found


def destroyed() -> dict[str, Any]:
    """The group ends before the function is closed, which then has no graph of it."""
    function, other = graphed(summing), graphed(lambda x: x * 3)
    left = ends_with_graphs_of(function)
    right = calls(function, range(4))
    for _ in range(4):
        right &= torch.equal(other(values(0, RANK)), values(0, RANK) * 3)
    dist.destroy_process_group()
    kept = len(function.cache), len(other.cache)
    error = ""
    try:
        function(values(4, RANK))
    except (RuntimeError, ValueError) as raised:
        error = str(raised)
    right &= torch.equal(other(values(1, RANK)), values(1, RANK) * 3)
    function.close()
    return {"right": right, "kept": kept, "error": error, "left": left, "after": told(other)}


def closed(gone: bool = False) -> dict[str, Any]:
    """The function is closed before the group ends.  `gone`: and nobody has it any more."""
    function = graphed(summing)
    left, context = ends_with_graphs_of(function), function.cache.context
    right = calls(function, range(4))
    numbers = told(function)
    function(values(0, RANK))  # still under way when the function is closed
    function.close()
    if gone:
        alive = weakref.ref(function)
        del function
        gc.collect()
        right &= alive() is None
        context.retire(lambda: None)  # as a graph that is still under way
    dist.destroy_process_group()
    return {"right": right and left == [0], **numbers}


def collected() -> dict[str, Any]:
    """Nobody has the function any more when the group ends."""
    return closed(gone=True)


def uncounted() -> dict[str, Any]:
    """No sequence number says that the function communicates, as with NCCL's messages to single
    ranks; a graph that was refused for them is still under way when the group ends."""
    made = graphed(lambda x: x * 2)
    left, context = ends_with_graphs_of(made), made.cache.context
    right = torch.equal(made(values(0, RANK)), values(0, RANK) * 2)
    context.retire(lambda: None)
    dist.destroy_process_group()
    return {"right": right and left == [0], **told(made)}


def trained(
    model: Any, prepare: Callable[[Any], Any], warm: int, unsynced: int, scheduled: bool
) -> list[bytes]:
    """Losses and parameters of training steps on this rank's own data.  `unsynced`: the number of
    steps after which in one each rank uses its own gradients; 0 for never.  `scheduled`: a step
    also changes the learning rate, in Python."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.9)
    loss_of = torch.nn.MSELoss()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimiser.zero_grad(set_to_none=False)
        loss = loss_of(model(x), y)
        loss.backward()
        optimiser.step()
        if scheduled:
            scheduler.step()
        return loss.detach()

    torch.manual_seed(RANK)
    data = [
        (torch.randn(8, 16, device=DEVICE), torch.randn(8, 4, device=DEVICE)) for _ in range(20)
    ]
    for x, y in data[:warm]:
        step(x, y)
    made = prepare(step)
    losses = []
    for number, (x, y) in enumerate(data[warm:]):
        alone = unsynced and number % unsynced == unsynced - 1
        with model.no_sync() if alone else contextlib.nullcontext():
            losses.append(made(x, y).clone())
    found = [*losses, *model.parameters(), *model.buffers()]
    return [one.detach().cpu().numpy().tobytes() for one in found]


def parallel(warm: int = 11, unsynced: int = 0, scheduled: bool = False) -> dict[str, Any]:
    """DistributedDataParallel, after eleven eager steps: losses and parameters are those of
    eager."""
    runs, made = [], []

    def prepare(step: Any) -> Any:
        made.append(graphed(step))
        return made[0]

    for how in (lambda step: step, prepare):
        torch.manual_seed(5)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4)
        )
        side = torch.cuda.Stream() if ON_GPU else None
        with torch.cuda.stream(side):
            data_parallel = torch.nn.parallel.DistributedDataParallel(
                model.to(DEVICE), device_ids=[RANK] if ON_GPU else None
            )
        runs.append(trained(data_parallel, how, warm, unsynced, scheduled))
    return {"right": runs[0] == runs[1], **told(made[0])}


def early() -> dict[str, Any]:
    """DistributedDataParallel from its first step on."""
    return parallel(0)


def stepping() -> dict[str, Any]:
    """DistributedDataParallel with a scheduler, whose steps Python makes."""
    return parallel(scheduled=True)


def unsynced() -> dict[str, Any]:
    """DistributedDataParallel, of which some steps do not communicate."""
    return parallel(unsynced=4)


def sharded() -> dict[str, Any]:
    """FSDP, which is refused."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(5)
    model = fully_shard(torch.nn.Linear(16, 4, device=DEVICE))
    made = graphed(lambda x: model(x).detach())
    with torch.no_grad():
        x = torch.ones(3, 16, device=DEVICE)
        right = all(torch.equal(made(x), model(x)) for _ in range(4))
    return {"right": right, **told(made)}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    one.__name__: one
    for one in (
        *(together, functional, single, apart, raised, again, eagerly, destroyed, closed),
        *(collected, uncounted, parallel, early, stepping, unsynced, sharded),
    )
}


def main(scenario: str) -> int:
    faulthandler.dump_traceback_later(100, exit=True)
    if ON_GPU:
        torch.cuda.set_device(RANK)
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    try:
        found = SCENARIOS[scenario]()
    except BaseException:
        found = {"failed": traceback.format_exc()}
    # One write: the ranks share the output.
    os.write(1, (json.dumps({"rank": RANK, **found}) + "\n").encode())
    if dist.is_initialized():
        # A rank that has not agreed leaves collectives behind, or a group, that never end.
        os._exit(0) if "error" in found else dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
