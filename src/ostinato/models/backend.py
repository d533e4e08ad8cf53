"""What differs between devices for a decoder: the kernels, the type of the weights, launch shapes.

Everything above it (program, plan, decoder) is the same for every device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np

from ostinato import Buffer, Device, Kernel, LaunchConfig, Operation, Source, prepare
from ostinato.errors import NotAvailableError, UnsupportedModelError
from ostinato.models.config import LlamaConfig
from ostinato.models.program import SAMPLED_ROWS, Argument, KernelCall

if TYPE_CHECKING:
    from ostinato.models.cuda.library import Lowered, ProductCall
    from ostinato.models.cuda.lowering import CudaLaunch
    from ostinato.models.cuda.products import Product, Products
    from ostinato.models.cuda.shapes import Tuning
    from ostinato.modules import ModuleCache

__all__ = [
    "Backend",
    "BoundCall",
    "BoundLaunch",
    "BoundProduct",
    "CudaBackend",
    "HostBackend",
    "LibraryRows",
    "backend_for",
    "load_kernel",
]

LibraryRows: TypeAlias = int | Literal["auto"] | None
"""From how many rows on a step multiplies with a library where there is one: by `library_rows_for`,
or never.  A piece of a prompt with more than SAMPLED_ROWS does so unless that is never."""
Resolve = Callable[[Argument], object]
Buffers = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


@dataclass(frozen=True, slots=True)
class BoundLaunch:
    """A call of the program for one number of rows: a loaded kernel, its launch shape, and its
    arguments by parameter, in the kernel's own order."""

    kernel: Kernel
    config: LaunchConfig
    arguments: tuple[tuple[str, Argument], ...]

    def operations(self, resolve: Resolve) -> tuple[Operation, ...]:
        """The launch with what stands for its arguments."""
        values = (resolve(value) for _, value in self.arguments)
        return (prepare(self.kernel, self.config, *values),)

    @property
    def programmatic(self) -> bool:
        return self.config.programmatic

    def with_programmatic(self, programmatic: bool) -> BoundLaunch:
        """The same, and whether it may start before the launch before it has ended."""
        return replace(self, config=replace(self.config, programmatic=programmatic))


@dataclass(frozen=True, slots=True)
class BoundProduct:
    """A library's product in a step; what it launches is known once its buffers are."""

    product: Product
    call: ProductCall

    programmatic: ClassVar[bool] = False
    """A library's kernels know nothing of it."""

    def with_programmatic(self, programmatic: bool) -> BoundProduct:
        """The same."""
        return self

    def operations(self, resolve: Resolve) -> tuple[Operation, ...]:
        """The library's launches, as ours.  Raises NotAvailableError."""
        call = self.call
        found = [resolve(one) for one in (call.weight, call.inputs, call.out, call.workspace)]
        weight, inputs, out, workspace = (one for one in found if isinstance(one, Buffer))
        return self.product.operations(
            call.name, weight=weight, inputs=inputs, out=out, workspace=workspace
        )


BoundCall = BoundLaunch | BoundProduct


class Backend(Protocol):
    """How one kind of device runs the program.

    `dtype` is that of matrices and of the KV cache: float32, or uint16 for the bits of bfloat16.
    `packed`: matrices stay as the file packs them (`PackedMatrix`), and `dtype` is the cache's.
    `library`: the one that multiplies in steps of many rows, or why there is none; empty where that
    is no question.
    `spins`: kernels run beside the interpreter, so that the host may look for a token without a
    pause; where they need its lock that would hold them up.  A ring entry reaches the host in one
    store in either case, so what it finds is whole.
    """

    name: str
    dtype: np.dtype[Any]
    packed: bool
    spins: bool

    def piece_rows(self, config: LlamaConfig) -> int:
        """How many tokens of a prompt are best taken at once: the rows of the largest step."""

    @property
    def library(self) -> str:
        """See above."""

    def require_supported(self, config: LlamaConfig, rows: int, sampled: int = 1) -> None:
        """Raises UnsupportedModelError for a model, or steps of up to `rows` rows of which up to
        `sampled` sample, that the kernels cannot compute."""

    def workspace_bytes(self, config: LlamaConfig, rows: Iterable[int], context: int) -> int:
        """Bytes of workspace that serve steps of all these numbers of rows; to be zero at first."""

    def buffers(self, config: LlamaConfig, rows: int) -> Buffers:
        """Shapes and dtypes of what its kernels need besides for steps of up to `rows` rows."""

    def bind(
        self, program: Sequence[KernelCall], config: LlamaConfig, rows: int, context: int
    ) -> tuple[BoundCall, ...]:
        """The program's launches for steps of `rows` rows, with every kernel on the device.

        It may compile and load, so it belongs before a capture.  The end of a step, from `head` on,
        is one launch a call.  Raises CompileError, NoCudaError, DriverError; NotAvailableError if
        the library fails, see `give_up_library`.
        """

    def give_up_library(self, reason: str) -> bool:
        """From here on no library multiplies, for this reason; False if none did."""


def backend_for(
    device: Device, *, library_rows: LibraryRows = "auto", threads: int | None = None
) -> Backend:
    """The backend for a device, by what its kernels are written in.

    `library_rows`: see `LibraryRows`.  `threads`: of kernels that run on the CPU; see
    `packed_kernels`.
    Raises NotAvailableError where there are no kernels for it, InputError, SettingsError.
    """
    language = device.capabilities.source_language
    if language == "host":
        return HostBackend(device, threads=threads)
    if language == "cuda":
        return CudaBackend(device, library_rows=library_rows)
    raise NotAvailableError(
        f"the decoder has no kernels in {language!r} yet, which {device.name} needs; "
        'open_device("host") runs it on the CPU'
    )


class HostBackend:
    """Compiled kernels on packed weights where the extension was built, else NumPy kernels on
    float32 ones; float32 sums in both, and a float32 cache."""

    dtype: np.dtype[Any] = np.dtype(np.float32)
    spins = False
    library = ""

    def __init__(self, device: Device, *, threads: int | None = None) -> None:
        from ostinato.models.host import packed_kernels as kernels_packed
        from ostinato.models.host.kernels import HOST_KERNELS

        self._modules = device.modules
        self.packed = kernels_packed.compiled()
        self.name = "packed" if self.packed else "numpy"
        kernels = kernels_packed.packed_kernels(threads) if self.packed else HOST_KERNELS
        self._source = Source(host=kernels, name="decoder")

    def piece_rows(self, config: LlamaConfig) -> int:
        """As many as a batch may have."""
        return SAMPLED_ROWS

    def require_supported(self, config: LlamaConfig, rows: int, sampled: int = 1) -> None:
        """Every model that has a config, and any number of rows."""

    def workspace_bytes(self, config: LlamaConfig, rows: Iterable[int], context: int) -> int:
        """Room for the widest product of each row, and for what is multiplied."""
        c = config
        widest = max(c.query_size + 2 * c.kv_size, 2 * c.inner, c.hidden)
        return max(rows) * (widest + c.hidden) * 4

    def buffers(self, config: LlamaConfig, rows: int) -> Buffers:
        """None."""
        return {}

    def give_up_library(self, reason: str) -> bool:
        """There is none."""
        return False

    def bind(
        self, program: Sequence[KernelCall], config: LlamaConfig, rows: int, context: int
    ) -> tuple[BoundCall, ...]:
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
    In steps of `library_rows` and more rows a library multiplies, where there is one
    (`cuda.library`).

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
    packed = False
    spins = True

    _LEAST: ClassVar[tuple[int, int]] = (8, 0)  # bfloat16 on the tensor cores

    def __init__(self, device: Device, *, library_rows: LibraryRows = "auto") -> None:
        from ostinato.models.cuda.products import open_products

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
        self._library_rows = library_rows
        self._products: Products | None
        self._products, self.library = open_products(device, library_rows)

    def piece_rows(self, config: LlamaConfig) -> int:
        """Many where a library multiplies, as far as the attention has counters for them."""
        from ostinato.models.cuda.library import most_rows

        return SAMPLED_ROWS if self._products is None else most_rows(config)

    def give_up_library(self, reason: str) -> bool:
        if self._products is None:
            return False
        self._products, self.library = None, f"not used: {reason}"
        return True

    def _multiplies(self, config: LlamaConfig, rows: int) -> bool:
        """Whether the library does in a step of so many rows."""
        from ostinato.models.cuda.library import library_rows_for

        least = self._library_rows
        if least == "auto":
            least = library_rows_for(config)
        if self._products is None or least is None:
            return False
        return rows >= min(least, SAMPLED_ROWS + 1)  # ours do not go further

    def _tuning(self, config: LlamaConfig, rows: int, context: int) -> Tuning:
        """Looked up once: what is stored may change, and the workspace was made for the first."""
        key = (config, rows, context)
        if key not in self._tunings:
            self._tunings[key] = self._find_tuning(config, rows, context)
        return self._tunings[key]

    def _find_tuning(self, config: LlamaConfig, rows: int, context: int) -> Tuning:
        from ostinato.models.cuda.library import library_tuning
        from ostinato.models.cuda.tunings import choose_tuning

        gpu, count = self._properties.name, self._properties.multiprocessors
        if rows > SAMPLED_ROWS:
            return library_tuning(config, rows=rows, context=context, multiprocessors=count)
        return choose_tuning(
            config,
            rows=rows,
            context=context,
            gpu=gpu,
            multiprocessors=count,
            clusters=self._clusters,
        ).tuning

    def require_supported(self, config: LlamaConfig, rows: int, sampled: int = 1) -> None:
        from ostinato.models.cuda.library import most_rows
        from ostinato.models.cuda.shapes import require_supported

        require_supported(config, sampled)
        if rows > SAMPLED_ROWS and self._products is None:
            raise UnsupportedModelError(
                f"{rows} rows; the CUDA kernels take 1 to {SAMPLED_ROWS} where no library "
                f"multiplies (cuBLASLt is {self.library})"
            )
        require_supported(config, rows, most=max(SAMPLED_ROWS, most_rows(config)))

    def workspace_bytes(self, config: LlamaConfig, rows: Iterable[int], context: int) -> int:
        from ostinato.models.cuda.library import library_workspace_bytes
        from ostinato.models.cuda.lowering import workspace_bytes

        found = []
        for count in rows:
            tuning = self._tuning(config, count, context)
            if count <= SAMPLED_ROWS:  # also if a library is meant to multiply: it may fail
                found.append(workspace_bytes(config, rows=count, context=context, tuning=tuning))
            if self._multiplies(config, count):
                found.append(library_workspace_bytes(config, rows=count, tuning=tuning))
        return max(found)

    def buffers(self, config: LlamaConfig, rows: int) -> Buffers:
        from ostinato.models.cuda.library import library_buffers

        if self._products is None or not self._multiplies(config, rows):
            return {}
        return library_buffers(config, rows, self._products.workspace_bytes)

    def _lower(
        self, program: Sequence[KernelCall], config: LlamaConfig, rows: int, context: int
    ) -> tuple[Lowered, ...]:
        from ostinato.models.cuda.library import lower_with_library
        from ostinato.models.cuda.lowering import lower

        tuning = self._tuning(config, rows, context)
        if not self._multiplies(config, rows):
            return lower(program, config, rows=rows, context=context, tuning=tuning)
        return lower_with_library(
            program, config, rows=rows, tuning=tuning, single=self._tuning(config, 1, context)
        )

    def bind(
        self, program: Sequence[KernelCall], config: LlamaConfig, rows: int, context: int
    ) -> tuple[BoundCall, ...]:
        """Sources and macros differ by rows; what is not compiled yet is compiled side by side."""
        from ostinato.models.cuda.lowering import CudaLaunch

        lowered = self._lower(program, config, rows, context)
        launches = [one for one in lowered if isinstance(one, CudaLaunch)]
        first_uses = {one.kernel: one for one in launches}  # a kernel is lowered alike everywhere

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            loaded = pool.map(partial(load_kernel, self._modules), first_uses.values())
            kernels = dict(zip(first_uses, loaded, strict=True))
        self._modules.preload(kernels.values())  # on the device now, not at the first launch
        bound: list[BoundCall] = []
        for one in lowered:
            if isinstance(one, CudaLaunch):
                bound.append(BoundLaunch(kernels[one.kernel], one.config, one.arguments))
            else:
                assert self._products is not None
                bound.append(BoundProduct(self._products.product(one.product), one))
        return tuple(bound)
