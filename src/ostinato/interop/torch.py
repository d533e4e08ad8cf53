"""PyTorch: its kept graphs adopted, our streams current in it, tensors over our buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ostinato import Buffer, Device, Graph, MemoryRange, Node, Stream
from ostinato.errors import InputError, NotAvailableError

try:
    import torch
except ImportError as error:
    raise NotAvailableError(
        f"PyTorch is not installed ({error}); install torch with CUDA, as pytorch.org says"
    ) from error

__all__ = ["adopt_graph", "as_tensor", "external_stream", "use_stream"]


def adopt_graph(device: Device, graph: torch.cuda.CUDAGraph) -> Graph:
    """The definition that torch captured, to read, compare, instantiate, patch and replay.

    `graph` must have been made with `torch.cuda.CUDAGraph(keep_graph=True)`: otherwise torch
    destroys the definition when the capture ends, and InputError says so.  The CUDAGraph is kept
    alive, and with it torch's memory pool of the capture.

    A graph that draws random numbers can be read and compared, but not instantiated (GraphError):
    torch moves its generators on before each of its own replays, so ours would repeat the same
    numbers.
    """
    try:
        handle = graph.raw_cuda_graph()
    except (RuntimeError, AttributeError) as error:
        raise InputError(
            "torch kept no definition of this graph: make it with "
            f"torch.cuda.CUDAGraph(keep_graph=True) ({error})"
        ) from error
    adopted = Graph.adopt(device, handle, owner=graph)
    drawing = next(_drawing(adopted.nodes, device.driver.memory_range), None)
    if drawing is not None:
        adopted.only_to_read = (
            f"node {drawing.index} ({drawing.name}) draws random numbers, and torch moves its "
            "generators on only in its own replays; replay it there (graph.replay()), or draw the "
            "numbers outside of the graph"
        )
    return adopted


def external_stream(stream: Stream) -> Any:
    """Our stream as a torch stream."""
    return torch.cuda.ExternalStream(stream.handle)


@contextmanager
def use_stream(stream: Stream) -> Iterator[Any]:
    """Makes our stream torch's current one, so that torch and Triton launch on it.

    Inside our own captures torch's allocator does not know that it is captured: temporaries that
    it gives out may be given to others while the graph still points at them.  Use operations with
    `out=`, or capture with `torch.cuda.graph` and `adopt_graph`.
    """
    with torch.cuda.stream(external_stream(stream)) as current:
        yield current


def as_tensor(buffer: Buffer) -> torch.Tensor:
    """A tensor over the buffer's memory, without a copy; it keeps the buffer alive."""
    return torch.as_tensor(buffer, device="cuda")


# torch passes the state of a generator to kernels by value (ATen's PhiloxCudaState).  In a capture
# it holds two addresses, of the seed and of the offset, each an int64 tensor of one element, then
# the offset inside the graph (a multiple of 4; 4 bytes up to torch 2.8, 8 since), then a flag that
# is 1.
_WORD = 8
_STATES = ((4, 20), (8, 24))
"""Bytes of the offset inside the graph, and where the flag is."""


def _drawing(nodes: tuple[Node, ...], find: Callable[[int], MemoryRange | None]) -> Iterator[Node]:
    """The nodes with a generator's state among their arguments, also inside other nodes."""
    for node in nodes:
        for argument in node.arguments:
            pairs = _captured_states(argument.raw, argument.offset, find)
            if any(_is_scalar(seed) and _is_scalar(offset) for seed, offset in pairs):
                yield node
        for body in node.children:
            yield from _drawing(body, find)


def _captured_states(
    raw: bytes, offset: int, find: Callable[[int], MemoryRange | None]
) -> Iterator[tuple[int, int]]:
    """The two addresses of each thing in an argument that looks like a captured state.

    `offset` is where the argument lies in the parameter buffer.
    """
    for at in range(-offset % _WORD, len(raw) - 2 * _WORD, _WORD):
        seed, counter = (int.from_bytes(raw[i : i + _WORD], "little") for i in (at, at + _WORD))
        for size, flag in _STATES:
            if at + flag >= len(raw) or raw[at + flag] != 1 or not (seed and counter):
                continue
            inside = int.from_bytes(raw[at + 16 : at + 16 + size], "little")
            if inside % 4 == 0 and seed != counter and find(seed) and find(counter):
                yield seed, counter


def _is_scalar(address: int) -> bool:
    """Whether torch's allocator has given out 8 bytes at an address; True where it cannot tell."""
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # another allocator than torch's own
        return True
    for segment in segments:
        start = segment["address"]
        if start <= address < start + segment["total_size"]:
            for block in segment["blocks"]:
                if start == address:
                    return bool(block.get("requested_size", _WORD) == _WORD)
                start += block["size"]
    return False
