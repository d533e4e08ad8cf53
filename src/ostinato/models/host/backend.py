"""A decoder's backend on the host driver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ostinato import Buffer, Device, LaunchConfig, Source
from ostinato.models.backend import BoundCall, BoundLaunch, Buffers
from ostinato.models.config import LlamaConfig
from ostinato.models.files.checkpoint import Checkpoint
from ostinato.models.host.kernels import HOST_KERNELS
from ostinato.models.host.packed_kernels import compiled, packed_kernels
from ostinato.models.program import SAMPLED_ROWS, KernelCall

__all__ = ["HostBackend"]


class HostBackend:
    """Compiled kernels on packed weights where the extension was built, else NumPy kernels on
    float32 ones; float32 sums in both, and a float32 cache."""

    dtype: np.dtype[Any] = np.dtype(np.float32)
    spins = False
    library = ""

    def __init__(
        self, device: Device, *, threads: int | None = None, packed: bool | None = None
    ) -> None:
        self._modules = device.modules
        self.packed = compiled() if packed is None else packed
        self.name = "packed" if self.packed else "numpy"
        kernels = packed_kernels(threads) if self.packed else HOST_KERNELS
        self._source = Source(host=kernels, name="decoder")

    def piece_rows(self, config: LlamaConfig) -> int:
        """SAMPLED_ROWS: more rows are not faster."""
        return SAMPLED_ROWS

    def require_supported(self, config: LlamaConfig, rows: int, sampled: int = 1) -> None:
        """Supports every model that has a config, and any number of rows."""

    def workspace_bytes(self, config: LlamaConfig, rows: Iterable[int], context: int) -> int:
        """Room for the widest product of each row, and for what is multiplied."""
        c = config
        widest = max(c.query_size + 2 * c.kv_size, 2 * c.inner, c.hidden)
        return max(rows) * (widest + c.hidden) * 4

    def buffers(self, config: LlamaConfig, rows: int) -> Buffers:
        """No further ones."""
        return {}

    def give_up_library(self, reason: str) -> bool:
        """There is no library."""
        return False

    def convert(self, checkpoint: Checkpoint, tensors: Iterable[tuple[str, Buffer]]) -> bool:
        """Never: device memory is the process's own, and the checkpoint converts into it."""
        return False

    def bind(
        self, program: Sequence[KernelCall], config: LlamaConfig, rows: int, context: int
    ) -> tuple[BoundCall, ...]:
        """A host kernel does the whole grid in one call; the launch shape is for readers of
        graphs."""
        get, shape = self._modules.get_or_compile, LaunchConfig(grid=rows, block=1)
        return tuple(
            BoundLaunch(get(self._source, call.kernel), shape, call.arguments) for call in program
        )
