"""cuBLAS's workspaces.  torch keeps one for each stream and thread.

A graph holds their addresses, and torch frees them on its own terms: all of them before a capture
of `torch.compile(mode="reduce-overhead")`, those of a stream with a graph captured there, those of
a thread with the thread (pytorch/pytorch#193402, #192061).  So those of captures lie in pools of
torch's allocator that hold nothing else: freed or not, no other work gets the memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ostinato import MemoryRange, Node
from ostinato.interop.captures import kernels_of
from ostinato.interop.reading.library import living_objects
from ostinato.interop.reading.slots import points_at, words_of_nodes

_pools: dict[tuple[int, int], Any] = {}
"""For each device and stream of captures a pool for its workspaces.  Pools stay for ever: the
driver may give the handle of a closed stream to a new one."""

_PRODUCTS = re.compile(r"gem|cutlass|nvjet|xmma|blas|split_?k|dot|trsm|trmm|syrk", re.IGNORECASE)
"""Names of kernels of cuBLAS (CUDA 12 and 13)."""


def make(index: int, side: Any, *, engine: bool) -> None:
    """Makes the workspaces of a stream of captures (torch's object), where there are none.

    `engine`: also those of autograd's thread."""
    pool = _pools.setdefault((index, side.cuda_stream), torch.cuda.graph_pool_handle())

    def multiply() -> None:
        square = torch.zeros(16, 16, device=f"cuda:{index}")
        into = torch.empty_like(square)
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool)
        try:
            torch.mm(square, square, out=into)
            torch.addmm(square[0], square, square, out=into)  # by cuBLASLt
        finally:
            torch._C._cuda_endAllocateToPool(index, pool)

    # The errors: where torch allows deterministic operations alone, and of other allocators.
    with suppress(RuntimeError, UserWarning), torch.cuda.stream(side), unseen_by_modes():
        multiply()
        if engine:
            _on_the_engine(multiply, index)


@dataclass(frozen=True, slots=True)
class Uses:
    """The workspaces that graphs use: our own; those of a stream or thread that is not ours, as
    the kernel that does and whose it is, empty if none does."""

    own: bool
    others: str


def used(index: int, nodes: Sequence[Node], bystanders: Collection[int]) -> Uses:
    """Reads from the nodes of graphs which workspaces they use.

    A word that points into a workspace need not be a use.  Kernels have arguments that nobody sets:
    torch's lists of tensors have room for hundreds (`MultiTensorApply.cuh`), and the rest is what
    the stack has held, such as the address of the workspace of an earlier product.  No product of a
    capture can use that of a stream that took no part in it (`bystanders`), unless the graph holds
    another one, which was captured elsewhere.

    If there is none of our own, the device had no memory for it, and the graphs use another one."""
    words = words_of_nodes(nodes)
    within = words_of_nodes(each for node in nodes for body in node.children for each in body)
    own, others = present(index)
    suspects = [
        (memory, stream)
        for memory, stream in others
        if points_at(within if stream in bystanders else words, memory)
    ]
    if suspects:
        owned = _memory_of_tensors()
        suspects = [each for each in suspects if not points_at(owned, each[0])]
    by_name = any(_PRODUCTS.search(node.name) for node in kernels_of(nodes))
    found = "there is no memory for its own" if by_name and not own else ""
    for memory, stream in suspects[:1]:
        node = next(each for each in nodes if points_at(words_of_nodes([each]), memory))
        found = f"{node.name} points at one of stream {stream:#x}"
    return Uses(own=by_name or any(points_at(words, memory) for memory in own), others=found)


def bystanders(index: int) -> list[Any]:
    """Returns those of torch's own streams that have a workspace.  torch never destroys them, so
    the driver may be asked about them at any time."""
    found = {stream for _, stream in present(index)[1]}
    return [each for each in _streams_of_torch(index) if each.cuda_stream in found] if found else []


@cache
def _streams_of_torch(index: int) -> list[Any]:
    """torch's own streams of a device: 32 for each of two priorities, handed out in turns, so that
    the turn is afterwards where it was."""
    return [torch.cuda.Stream(index, priority=each) for each in (0, -1) for _ in range(32)]


def present(index: int) -> tuple[list[MemoryRange], list[tuple[MemoryRange, int]]]:
    """Returns our own workspaces, and those of others, each with its stream.

    Another one is memory as large as our own that is in use, in torch's common memory or for
    another stream than those of captures; a tensor may have it.  None of the legacy default stream
    counts, since no capture has work there."""
    pools = {pool for (device, _), pool in _pools.items() if device == index}
    streams = {stream for device, stream in _pools if device == index}
    own: list[MemoryRange] = []
    others: list[tuple[int, MemoryRange, int]] = []
    sizes: set[int] = set()
    for segment in torch.cuda.memory_snapshot() if pools else ():
        if segment["device"] != index:
            continue
        pool = tuple(segment.get("segment_pool_id", (0, 0)))
        stream, at = segment["stream"], segment["address"]
        apart = stream != 0 and (pool == (0, 0) or stream not in streams)
        for block in segment["blocks"]:
            memory, size = MemoryRange(at, block["size"]), block.get("requested_size", 0)
            at += block["size"]
            if block["state"] != "active_allocated":
                continue
            if pool in pools:
                own.append(memory)
                sizes.add(size)
            elif apart:
                others.append((size, memory, stream))
    return own, [(memory, stream) for size, memory, stream in others if size in sizes]


def _memory_of_tensors() -> npt.NDArray[np.uint64]:
    """Returns the addresses of the memory of all tensors in the process, sorted."""
    found = []
    for tensor in living_objects(torch.Tensor):
        with suppress(Exception):  # it has no memory of its own, or only code of the user's knows
            found.append(tensor.untyped_storage().data_ptr())
    return np.unique(np.array(found, np.uint64))


def _on_the_engine(work: Callable[[], None], index: int) -> None:
    """Runs work in autograd's thread for a device, on the current stream."""

    class _Engine(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                work()
            return gradient

    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, device=f"cuda:{index}", requires_grad=True)
        torch.autograd.grad(_Engine.apply(x).sum(), x)


@contextmanager
def unseen_by_modes() -> Iterator[None]:
    """No mode of the caller sees the operations of the block."""
    with torch._C._DisableTorchDispatch(), torch.no_grad(), torch._C._DisableAutocast():
        yield
