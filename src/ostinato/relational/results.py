"""The result of a join, and the statistics of a joiner."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ostinato import Buffer, Device, Stream
from ostinato.relational.keys import JoinKey
from ostinato.relational.workspace import Lease
from ostinato.step import CacheStatistics

Rows: TypeAlias = npt.NDArray[np.uint32]


class JoinResult:
    """The result of a join: pairs of row numbers, in no particular order.

    `left_rows` and `right_rows` are device buffers, uint32, of `len(result)` elements; they may
    outlive the result.  Later joins reuse their memory once nothing refers to it: work on other
    streams that reads them must be done by then, or the joiner's stream must wait for it.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        key: JoinKey,
        lease: Lease,
        total: int,
        retries: int,
    ) -> None:
        self._device, self._stream = device, stream
        self.key = key
        """The key of the graph that wrote the result."""
        self.retries = retries
        """Number of repetitions of the join because its result did not fit."""
        self._lease, self._total = lease, total

    @functools.cached_property
    def left_rows(self) -> Buffer:
        """Row numbers of the left side; uint32, on the device."""
        return self._lease.rows(0, self._total)

    @functools.cached_property
    def right_rows(self) -> Buffer:
        """Row numbers of the right side, in the same order; uint32, on the device."""
        return self._lease.rows(1, self._total)

    def __len__(self) -> int:
        return self._total

    def __repr__(self) -> str:
        return f"<JoinResult {len(self)} rows on {self._device.name}>"

    def to_numpy(self) -> tuple[Rows, Rows]:
        """Returns copies of the left and the right row numbers.  Waits for the joiner's stream, or
        for the device if that stream is closed."""
        if self._stream.closed:
            return self._device.to_numpy(self.left_rows), self._device.to_numpy(self.right_rows)
        return self.left_rows.to_numpy(self._stream), self.right_rows.to_numpy(self._stream)


@dataclass(frozen=True, slots=True)
class JoinStatistics:
    """Counts of a joiner since it was made."""

    joins: int
    """Joins submitted, repetitions not counted."""
    indexes: int
    """Indexes built."""
    retries: int
    """Joins repeated because their result did not fit."""
    replays: int
    """Launches of a graph."""
    eager: int
    """Chains launched kernel by kernel instead."""
    eager_reasons: Mapping[str, int]
    """Number of eager chains by reason."""
    waits: int
    """Number of waits because all entries of the ring were in use."""
    recoveries: int
    """Number of times that the device's state was restored after a failed launch."""
    growths: int
    """Number of allocations of the workspace."""
    workspace_bytes: int
    output_bytes: int
    """Bytes of result buffers that are kept for later joins."""
    kernels_compiled: int
    """Kernels compiled by the device's module cache, for all its users."""
    cache: CacheStatistics
    """Statistics of the graphs: `captures`, `hits`, and a line for each key."""
