"""A decoder's backend on the host driver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ostinato import Device, LaunchConfig, Source
from ostinato.errors import InputError, NotAvailableError
from ostinato.models.backend import (
    Backend,
    BoundCall,
    BoundLaunch,
    DeviceModel,
    WeightsKind,
)
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.bricks import Formats
from ostinato.models.files.checkpoint import Checkpoint
from ostinato.models.host.kernels import HOST_KERNELS, ROW_BY_ROW
from ostinato.models.host.packed_kernels import compiled, description, packed_kernels
from ostinato.models.host.shard_kernels import SHARD_KERNELS
from ostinato.models.program import SAMPLED_ROWS, KernelCall


class HostBackend(Backend):
    """The CPU's kernels: compiled ones on packed weights if the extension was built, else NumPy
    kernels on float32 weights; sums and cache are float32 in both."""

    dtype: np.dtype[Any] = np.dtype(np.float32)
    spins = False

    def __init__(
        self, device: Device, *, threads: int | None = None, packed: bool | None = None
    ) -> None:
        self._modules = device.modules
        self.packed = compiled() if packed is None else packed
        if self.packed and not compiled():
            raise NotAvailableError(
                f"packed weights on a CPU need the compiled kernels; there is {description()}"
            )
        self.name = "packed" if self.packed else "numpy"
        kernels = packed_kernels(threads) if self.packed else HOST_KERNELS
        self.alike_rows = SAMPLED_ROWS if self.packed else ROW_BY_ROW
        self._source = Source(host={**kernels, **SHARD_KERNELS}, name="decoder")

    def piece_rows(self, config: LlamaConfig) -> int:
        """Returns SAMPLED_ROWS: more rows are not faster."""
        return SAMPLED_ROWS

    def formats(self, checkpoint: Checkpoint, wanted: WeightsKind) -> Formats:
        """Returns no formats: `packed` holds for all matrices, whose bytes keep the file's order.
        Raises InputError for "bf16"."""
        if wanted == "bf16":
            raise InputError(
                "weights in bfloat16 are for GPUs; the CPU's kernels read packed ones, or float32"
            )
        return {}

    def workspace_bytes(self, model: DeviceModel, rows: Iterable[int]) -> int:
        """Returns the bytes of each row's widest product and of its normed inputs."""
        c = model.config
        widest = max(c.query_size + 2 * c.kv_size, 2 * c.inner, c.hidden)
        return max(rows) * (widest + c.hidden) * 4

    def bind(
        self, program: Sequence[KernelCall | BoundCall], model: DeviceModel, rows: int
    ) -> tuple[BoundCall, ...]:
        """Implements `Backend.bind`.  A host kernel computes the whole grid in one call; the launch
        shape is only informative."""
        get, shape = self._modules.get_or_compile, LaunchConfig(grid=rows, block=1)
        return tuple(
            BoundLaunch(get(self._source, call.kernel), shape, call.arguments)
            if isinstance(call, KernelCall)
            else call
            for call in program
        )
