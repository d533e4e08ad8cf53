"""CuPy: adopts its graphs; gives it ostinato's streams, and arrays over ostinato's buffers."""

from __future__ import annotations

from typing import Any

from ostinato import Buffer, Device, Graph, Stream
from ostinato.errors import InputError, NotAvailableError

try:
    import cupy
except ImportError as error:
    raise NotAvailableError(
        f"CuPy is not installed ({error}); install cupy-cuda13x or cupy-cuda12x"
    ) from error


def adopt_graph(device: Device, graph: Any) -> Graph:
    """Adopts the definition inside a `cupy.cuda.Graph`, which is kept alive.

    Raises InputError for an object without a graph handle."""
    handle = getattr(graph, "graph", None)
    if not isinstance(handle, int) or not handle:
        raise InputError(f"{type(graph).__name__} holds no graph handle")
    return Graph.adopt(device, handle, owner=graph)


def external_stream(stream: Stream) -> Any:
    """Returns a CuPy stream for an ostinato stream; `with` makes it current."""
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14
        return cupy.cuda.Stream.from_external(stream)
    return cupy.cuda.ExternalStream(stream.handle)


def as_array(buffer: Buffer) -> Any:
    """Returns a CuPy array over the buffer's memory, without a copy; it keeps the buffer alive."""
    return cupy.asarray(buffer)
