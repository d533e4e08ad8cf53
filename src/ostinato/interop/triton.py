"""Triton: launches its kernels on ostinato's streams.

Triton launches on torch's current stream and takes torch tensors, so this is `interop.torch` and
`warm`: a kernel compiles and loads at its first launch of each specialisation, which breaks a
capture, and `warm` makes that launch before.
"""

from __future__ import annotations

from collections.abc import Callable

from ostinato import Stream
from ostinato.interop.torch import as_tensor, use_stream

__all__ = ["as_tensor", "use_stream", "warm"]


def warm(stream: Stream, work: Callable[[], object]) -> None:
    """Runs `work` once on an ostinato stream and waits, so that its kernels are compiled and
    loaded.

    The work really runs: give it scratch buffers, or a step that may be repeated.
    """
    with use_stream(stream):
        work()
    stream.synchronize()
