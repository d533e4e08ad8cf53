"""What differs between devices for a decoder: the kernels, the type of the weights, launch shapes.

Everything above it (program, plan, decoder) is the same for every device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from ostinato import Device, Kernel, LaunchConfig, Source
from ostinato.errors import NotAvailableError
from ostinato.models.config import LlamaConfig
from ostinato.models.program import Argument, KernelCall

if TYPE_CHECKING:
    from ostinato.models.kernels_cuda import CudaLaunch
    from ostinato.models.kernels_cuda_shapes import Tuning
    from ostinato.modules import ModuleCache

__all__ = ["Backend", "BoundLaunch", "CudaBackend", "HostBackend", "backend_for", "load_kernel"]


@dataclass(frozen=True, slots=True)
class BoundLaunch:
    """A call of the program for one number of rows: a loaded kernel, its launch shape, and its
    arguments by parameter, in the kernel's own order."""

    kernel: Kernel
    config: LaunchConfig
    arguments: tuple[tuple[str, Argument], ...]


class Backend(Protocol):
    """How one kind of device runs the program.

    `dtype` is that of matrices and of the KV cache: float32, or uint16 for the bits of bfloat16.
    `spins`: kernels run beside the interpreter, so that the host may look for a token without a
    pause; where they need its lock that would hold them up.  A ring entry reaches the host in one
    store in either case, so what it finds is whole.
    """

    name: str
    dtype: np.dtype[Any]
    spins: bool

    def require_supported(self, config: LlamaConfig, rows: int) -> None:
        """Raises UnsupportedModelError for a model, or steps of up to `rows` rows, that the
        kernels cannot compute."""

    def workspace_bytes(self, config: LlamaConfig, rows: Iterable[int], context: int) -> int:
        """Bytes of workspace that serve steps of all these numbers of rows; to be zero at first."""

    def bind(
        self, program: Sequence[KernelCall], config: LlamaConfig, rows: int, context: int
    ) -> tuple[BoundLaunch, ...]:
        """The program's launches for steps of `rows` rows, with every kernel on the device.

        It may compile and load, so it belongs before a capture.  Raises CompileError, NoCudaError,
        DriverError.
        """


def backend_for(device: Device) -> Backend:
    """The backend for a device, by what its kernels are written in.

    Raises NotAvailableError where there are no kernels for it.
    """
    language = device.capabilities.source_language
    if language == "host":
        return HostBackend(device)
    if language == "cuda":
        return CudaBackend(device)
    raise NotAvailableError(
        f"the decoder has no kernels in {language!r} yet, which {device.name} needs; "
        'open_device("host") runs it on the CPU'
    )


class HostBackend:
    """NumPy kernels, in float32."""

    name = "numpy"
    dtype: np.dtype[Any] = np.dtype(np.float32)
    spins = False

    def __init__(self, device: Device) -> None:
        from ostinato.models.kernels_host import HOST_KERNELS

        self._modules = device.modules
        self._source = Source(host=HOST_KERNELS, name="decoder")

    def require_supported(self, config: LlamaConfig, rows: int) -> None:
        """Every model that has a config, and any number of rows."""

    def workspace_bytes(self, config: LlamaConfig, rows: Iterable[int], context: int) -> int:
        """Room for the widest product of each row."""
        c = config
        return max(rows) * max(c.query_size + 2 * c.kv_size, 2 * c.inner, c.hidden) * 4

    def bind(
        self, program: Sequence[KernelCall], config: LlamaConfig, rows: int, context: int
    ) -> tuple[BoundLaunch, ...]:
        """A host kernel does the whole grid in one call; the shape only tells readers how much."""
        get, shape = self._modules.get_or_compile, LaunchConfig(grid=rows, block=1)
        return tuple(
            BoundLaunch(get(self._source, call.kernel), shape, call.arguments) for call in program
        )


def load_kernel(modules: ModuleCache, launch: CudaLaunch) -> Kernel:
    """The launch's kernel, ready to be launched so; not inside a capture.

    Raises CompileError, NoCudaError, DriverError.
    """
    kernel = modules.get_or_compile(launch.source, launch.kernel, options=launch.options)
    if launch.config.shared:  # an attribute of the function: not to be set in a capture
        kernel.allow_shared(launch.config.shared)
    return kernel


class CudaBackend:
    """CUDA kernels, in bfloat16 with float32 sums; compiled for one model and number of rows.

    Their launches are programmatic: each may start while the one before it still runs, and waits on
    the device for that one alone, which stands for all earlier ones because it waited too.  So they
    must form a chain.  A stream and a capture of it do.  A recorded graph has its edges from what
    kernels read and write, and is the same chain as long as every kernel touches what the one just
    before it wrote (tests/models/test_decoder_backend.py holds the signatures to that); only then
    does `graph.recording` give the edge a programmatic type.  A kernel outside of the chain would
    have to be launched without.
    """

    name = "cuda"
    dtype: np.dtype[Any] = np.dtype(np.uint16)
    spins = True

    _LEAST: ClassVar[tuple[int, int]] = (8, 0)  # bfloat16 on the tensor cores

    def __init__(self, device: Device) -> None:
        self._modules = device.modules
        self._properties = device.properties
        self._clusters = device.capabilities.clusters
        self._tunings: dict[tuple[LlamaConfig, int, int], Tuning] = {}
        capability = self._properties.compute_capability
        if capability < self._LEAST:
            raise NotAvailableError(
                f"{device.name} ({self._properties.name}) has compute capability "
                f"{capability[0]}.{capability[1]}; the decoder's kernels need 8.0 or newer. "
                'open_device("host") runs it on the CPU'
            )

    def _tuning(self, config: LlamaConfig, rows: int, context: int) -> Tuning:
        """Looked up once: what is stored may change, and the workspace was made for the first."""
        from ostinato.models.tuning import choose_tuning

        key = (config, rows, context)
        if key not in self._tunings:
            gpu, count = self._properties.name, self._properties.multiprocessors
            self._tunings[key] = choose_tuning(
                config,
                rows=rows,
                context=context,
                gpu=gpu,
                multiprocessors=count,
                clusters=self._clusters,
            ).tuning
        return self._tunings[key]

    def require_supported(self, config: LlamaConfig, rows: int) -> None:
        from ostinato.models.kernels_cuda_shapes import require_supported

        require_supported(config, rows)

    def workspace_bytes(self, config: LlamaConfig, rows: Iterable[int], context: int) -> int:
        from ostinato.models.kernels_cuda import workspace_bytes

        return max(
            workspace_bytes(
                config, rows=count, context=context, tuning=self._tuning(config, count, context)
            )
            for count in rows
        )

    def bind(
        self, program: Sequence[KernelCall], config: LlamaConfig, rows: int, context: int
    ) -> tuple[BoundLaunch, ...]:
        """Sources and macros differ by rows; what is not compiled yet is compiled side by side."""
        from ostinato.models.kernels_cuda import lower

        tuning = self._tuning(config, rows, context)
        launches = lower(program, config, rows=rows, context=context, tuning=tuning)
        first_uses = {one.kernel: one for one in launches}  # a kernel is lowered alike everywhere

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            loaded = pool.map(partial(load_kernel, self._modules), first_uses.values())
            kernels = dict(zip(first_uses, loaded, strict=True))
        self._modules.preload(kernels.values())  # on the device now, not at the first launch
        return tuple(
            BoundLaunch(kernels[one.kernel], one.config, one.arguments) for one in launches
        )
