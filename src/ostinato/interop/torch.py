"""PyTorch: its kept graphs adopted, our streams current in it, tensors over our buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ostinato import Buffer, Device, Graph, Stream
from ostinato.errors import InputError

__all__ = ["adopt_graph", "as_tensor", "external_stream", "use_stream"]


def adopt_graph(device: Device, graph: torch.cuda.CUDAGraph) -> Graph:
    """The definition that torch captured, to read, compare, instantiate, patch and replay.

    `graph` must have been made with `torch.cuda.CUDAGraph(keep_graph=True)`: otherwise torch
    destroys the definition when the capture ends, and InputError says so.  The CUDAGraph is kept
    alive, and with it torch's memory pool of the capture.
    """
    try:
        handle = graph.raw_cuda_graph()
    except (RuntimeError, AttributeError) as error:
        raise InputError(
            "torch kept no definition of this graph: make it with "
            f"torch.cuda.CUDAGraph(keep_graph=True) ({error})"
        ) from error
    return Graph.adopt(device, handle, owner=graph)


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
