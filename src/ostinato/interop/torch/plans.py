"""Plans of cuFFT.  torch keeps them in a cache for each device.  A graph with a Fourier transform
computes something else, or breaks, once its plan has ended: the cache was cleared, made smaller, or
full when another plan came."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from ostinato import Node
from ostinato.interop.captures import kernels_of
from ostinato.interop.reading.library import NotGraphable

_NAMES = re.compile(r"fft|bluestein|radix\d", re.IGNORECASE)
"""Names of cuFFT's kernels (CUDA 12 and 13): `vector_fft`, `regular_bluestein_fft`,
`dpRadix0016A::kernel1Mem`."""

FULL = (
    "torch's cache of cuFFT's plans is full, and ends plans that graphs use; raise "
    "torch.backends.cuda.cufft_plan_cache.max_size"
)
"""The reason why no graph with transforms is replayed while the cache is full."""

_ends = 0
"""The number of times at which plans may have ended since `watch`."""
_watched = False


def transforms(nodes: Iterable[Node]) -> bool:
    """True if nodes of a graph launch kernels of cuFFT."""
    return any(_NAMES.search(node.name) for node in kernels_of(nodes))


def watch() -> int:
    """Counts from now on what ends plans; returns the count so far.  Lasts as long as the process.
    What torch does is not changed."""
    global _watched
    if not _watched:
        _watched = True
        cache: Any = torch.backends.cuda.cuFFTPlanCache
        cache.clear = _counted(cache.clear)
        size = vars(cache)["max_size"]
        size.setter = _counted(size.setter)
    return _ends


def _counted(call: Any) -> Any:
    def counted(*args: Any) -> Any:
        global _ends
        _ends += 1
        return call(*args)

    return counted


def ended(index: int, since: int) -> int:
    """Returns how often plans of a device may have ended after `since`; -1 if its cache is full, so
    that each further plan ends another."""
    full = torch._cufft_get_plan_cache_size(index) >= torch._cufft_get_plan_cache_max_size(index)
    return -1 if full else _ends - since


def require_room(ends: int) -> int:
    """Returns what `ended` has returned.  Raises NotGraphable if the cache is full."""
    if ends < 0:
        raise NotGraphable(FULL)
    return ends
