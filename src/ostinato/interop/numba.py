"""Numba: launches its kernels on ostinato's streams, and wraps ostinato's buffers as its arrays.

Numba has no graphs of its own: launch its kernels on `external_stream(stream)` inside
`ostinato.capture(stream)`.  Run them once before the capture: a first launch compiles and loads.
"""

from __future__ import annotations

from typing import Any

from ostinato import Buffer, Stream
from ostinato.errors import NotAvailableError

try:
    from numba import cuda
except ImportError as error:
    raise NotAvailableError(f"Numba is not installed ({error}); install numba-cuda") from error

__all__ = ["as_array", "external_stream"]


def external_stream(stream: Stream) -> Any:
    """Returns a Numba stream for an ostinato stream."""
    return cuda.external_stream(stream.handle)


def as_array(buffer: Buffer) -> Any:
    """Returns a Numba device array over the buffer's memory, without a copy or a synchronise."""
    as_cuda_array: Any = cuda.as_cuda_array
    return as_cuda_array(buffer, sync=False)
