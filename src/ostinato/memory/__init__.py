"""Memory: buffers that own or view it, and pools from which captures allocate."""

from ostinato.memory.buffer import Buffer, allocate, copy, fill
from ostinato.memory.dlpack import adopt_array
from ostinato.memory.pool import CapturePool, Growth, PoolState, PoolStatistics

__all__ = [
    "Buffer",
    "CapturePool",
    "Growth",
    "PoolState",
    "PoolStatistics",
    "adopt_array",
    "allocate",
    "copy",
    "fill",
]
