"""A decoder's backend on CUDA devices."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ostinato import Buffer, Device, Kernel, Operation, Stream
from ostinato.errors import InputError, NotAvailableError, UnsupportedModelError
from ostinato.models.backend import (
    BoundCall,
    BoundLaunch,
    Buffers,
    DeviceModel,
    LibraryRows,
    Resolve,
    WeightsKind,
)
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda import shapes
from ostinato.models.cuda.bricks import FORMAT_OF, Formats, formats_of, pays
from ostinato.models.cuda.dequantise import convert_on_device
from ostinato.models.cuda.library import (
    ARRIVED,
    LibraryLowering,
    Lowered,
    ProductCall,
    library_buffers,
    library_rows_for,
    lower_with_library,
    piece_rows,
)
from ostinato.models.cuda.lowering import (
    CARRIED,
    CudaLaunch,
    Lowering,
    lower,
    rounded_buffers,
)
from ostinato.models.cuda.products import PIECE_ROWS, LibraryProduct, LibraryProducts, open_products
from ostinato.models.cuda.shapes import Tuning
from ostinato.models.cuda.tunings import choose_tuning, known_of
from ostinato.models.files.checkpoint import Checkpoint, StoredCheckpoint
from ostinato.models.layout import device_shapes
from ostinato.models.program import SAMPLED_ROWS, KernelCall
from ostinato.models.weights import WeightTarget

if TYPE_CHECKING:
    from ostinato.modules import ModuleCache


@dataclass(frozen=True, slots=True)
class BoundProduct:
    """A library's product in a step; `operations` captures its launches for given buffers."""

    product: LibraryProduct
    call: ProductCall

    programmatic: ClassVar[bool] = False
    """A library's kernels do not support programmatic launch."""

    def with_programmatic(self, programmatic: bool) -> BoundProduct:
        """Returns this object: the launch cannot be programmatic."""
        return self

    def operations(self, resolve: Resolve) -> tuple[Operation, ...]:
        """Returns the library's launches as operations.  Raises NotAvailableError."""
        call = self.call
        found = [resolve(one) for one in (call.weight, call.inputs, call.out, call.workspace)]
        weight, inputs, out, workspace = (one for one in found if isinstance(one, Buffer))
        return self.product.operations(
            call.name,
            weight=weight,
            inputs=inputs,
            out=out,
            workspace=workspace,
            weight_is_scratch=call.unpacked,
        )


def load_kernel(modules: ModuleCache, launch: CudaLaunch) -> Kernel:
    """Compiles or finds a launch's kernel and allows its shared memory.

    Must not be called inside a capture.  Raises CompileError, NoCudaError, DriverError.
    """
    kernel = modules.get_or_compile(launch.source, launch.kernel, options=launch.options)
    if launch.config.shared:  # an attribute of the function: not to be set in a capture
        kernel.allow_shared(launch.config.shared)
    return kernel


class CudaBackend:
    """CUDA kernels in bfloat16 with float32 sums, compiled for one model and number of rows.
    In steps of `library_rows` and more rows a library computes the products, if there is one
    (`cuda.library`); with packed weights and "auto", only in pieces of prompts.

    Launches are programmatic: each may start while its predecessor still runs, and waits on the
    device only for this one.  The predecessor has waited for its own predecessor, so the wait
    covers all earlier kernels if the launches form a chain.  In a stream and its captures they do.
    A recorded graph derives its edges from the operands that kernels read and write; it is the same
    chain if every kernel uses an operand that its predecessor wrote
    (tests/models/test_decoder_backend.py checks the signatures), and only then does
    `graph.recording` make the edge programmatic.  Launches outside the chain must be ordinary.
    """

    name = "cuda"
    dtype: np.dtype[Any] = np.dtype(np.uint16)
    packed = False
    spins = True
    alike_rows = SAMPLED_ROWS

    _LEAST: ClassVar[tuple[int, int]] = (8, 0)  # bfloat16 on the tensor cores

    def __init__(
        self,
        device: Device,
        *,
        library_rows: LibraryRows = "auto",
        stream: Stream | None = None,
    ) -> None:
        self._device = device
        self._modules = device.modules
        self._properties = device.properties
        self._tunings: dict[tuple[LlamaConfig, int, int], Tuning] = {}
        capability = self._properties.compute_capability
        if capability < self._LEAST:
            raise NotAvailableError(
                f"{device.name} ({self._properties.name}) has compute capability "
                f"{capability[0]}.{capability[1]}; the decoder's kernels need 8.0 or newer. "
                'open_device("host") runs it on the CPU'
            )
        shared, needed = self._properties.max_shared_per_block, shapes.LEAST_SHARED
        if shared < needed:
            raise NotAvailableError(
                f"{device.name} ({self._properties.name}) has {shared // 1024} KiB of shared "
                f"memory for a block; the decoder's kernels need {needed // 1024}. "
                'open_device("host") runs it on the CPU'
            )
        self._known = known_of(device)
        self._library_rows = library_rows
        self._products: LibraryProducts | None
        self._products, self.library = open_products(device, library_rows, stream)

    def piece_rows(self, config: LlamaConfig) -> int:
        """Returns the result of `library.piece_rows` with a library, else the most rows of our own
        products."""
        return SAMPLED_ROWS if self._products is None else piece_rows(config)

    def give_up_library(self, reason: str) -> bool:
        if self._products is None:
            return False
        self._products, self.library = None, f"not used: {reason}"
        return True

    def _multiplies(self, model: DeviceModel, rows: int) -> bool:
        """True if the library computes the products of a step of `rows` rows."""
        least = self._library_rows
        if least == "auto":  # packed weights are unpacked into memory for each library product
            least = SAMPLED_ROWS + 1 if model.formats else library_rows_for(model.config)
        if self._products is None or least is None:
            return False
        return rows >= min(least, SAMPLED_ROWS + 1)  # our own products do not support more rows

    def _tuning(self, model: DeviceModel, rows: int) -> Tuning:
        """Returns a tuning, looked up once and kept: the workspace is sized for the first result,
        and the stored tuning may change."""
        config, sizes = model.config, dict[str, Any](rows=rows, context=model.context)
        found = self._tunings.get((config, rows, model.context))
        if found is None:
            if rows > SAMPLED_ROWS:
                sizes |= {"multiprocessors": self._known["multiprocessors"], "most": PIECE_ROWS}
                found = shapes.default_tuning(config, **sizes)
            else:
                found = choose_tuning(config, **sizes, gpu=self._properties.name, **self._known)
            self._tunings[config, rows, model.context] = found
        return found

    def require_supported(self, config: LlamaConfig, rows: int, sampled: int = 1) -> None:
        shapes.require_supported(config, sampled)
        if rows > SAMPLED_ROWS and self._products is None:
            raise UnsupportedModelError(
                f"{rows} rows; the CUDA kernels take 1 to {SAMPLED_ROWS} where no library "
                f"multiplies (cuBLASLt is {self.library})"
            )
        shapes.require_supported(config, rows, most=PIECE_ROWS)

    def formats(self, checkpoint: Checkpoint, wanted: WeightsKind) -> Formats:
        """Returns the formats of the checkpoint's quantised matrices; none for "bf16", or for
        "auto" if packing does not pay (`pays`).  Raises InputError."""
        config = checkpoint.config
        if wanted == "bf16" or (wanted == "auto" and not pays(config)):
            return {}
        found: Formats = {}
        if isinstance(checkpoint, StoredCheckpoint):
            there, stored = device_shapes(checkpoint.shapes()), checkpoint
            found = formats_of(config, lambda name: stored.raw(name).type, there)
        if wanted == "packed" and not found:
            raise InputError(
                f"{checkpoint.path}: weights='packed', but it has no quantised matrix that the "
                f"kernels read so; they read {', '.join(FORMAT_OF)}"
            )
        return found

    def workspace_bytes(self, model: DeviceModel, rows: Iterable[int]) -> int:
        config, formats = model.config, model.formats
        found, processors = [], self._properties.multiprocessors
        for count in rows:
            tuning = self._tuning(model, count)
            if count <= SAMPLED_ROWS:  # even with a library, since it may fail
                lowering = Lowering(config, count, tuning, formats, processors)
                found.append(lowering.workspace_bytes)
            if self._multiplies(model, count):
                with_library = LibraryLowering(
                    config, count, tuning, tuning, formats, processors, self._known["warpgroups"]
                )
                found.append(with_library.workspace_bytes)
        return max(found)

    def buffers(self, model: DeviceModel, rows: int) -> Buffers:
        config = model.config
        if self._products is not None and self._multiplies(model, rows):
            more = library_buffers(config, rows, self._products.workspace_bytes, model.formats)
            return rounded_buffers(config, rows) | more
        # Our own products have at most SAMPLED_ROWS rows; without tiles they mostly read float32.
        tiles = shapes.in_tiles(config, rows, self._known["shared"])
        return rounded_buffers(config, min(rows, SAMPLED_ROWS)) if tiles else {}

    def convert(self, checkpoint: Checkpoint, tensors: Iterable[tuple[str, WeightTarget]]) -> bool:
        """Copies the file's bytes to the device and converts them there (`cuda.dequantise`)."""
        return convert_on_device(self._device, checkpoint, tensors)

    def exchanges_sums(self, model: DeviceModel, rows: int) -> bool:
        """False if the library computes the products."""
        if self._multiplies(model, rows):
            return False
        config, count = model.config, self._properties.multiprocessors
        apart = shapes.without_block(self._tuning(model, rows), config, multiprocessors=count)
        return Lowering(config, rows, apart, model.formats, count).exchanges_sums()

    def carries_sums(self, model: DeviceModel, rows: int) -> bool:
        """True if our own products read rounded inputs, as they do in steps of several rows."""
        return not self._multiplies(model, rows) and self._tuning(model, rows).tiles

    def shares_sums(self, model: DeviceModel, rows: int) -> bool:
        """True if the library computes the products."""
        return self._multiplies(model, rows)

    def shared_buffers(self, model: DeviceModel, rows: int, ranks: int) -> Buffers:
        if not self._multiplies(model, rows):
            return {}
        f32, hidden = np.dtype(np.float32), model.config.hidden
        return {
            "x": ((rows, hidden), f32),
            ARRIVED.name: ((ranks, -(-rows // ranks), hidden), f32),
            CARRIED.name: rounded_buffers(model.config, rows)[CARRIED.name],
        }

    def bind(
        self, program: Sequence[KernelCall | BoundCall], model: DeviceModel, rows: int
    ) -> tuple[BoundCall, ...]:
        """Implements `Backend.bind`; kernels, which differ by rows, are compiled concurrently."""
        given: dict[str, Any] = {"multiprocessors": self._properties.multiprocessors}
        given |= {"rows": rows, "tuning": self._tuning(model, rows), "formats": model.formats}
        lowered: Sequence[Lowered | BoundCall]
        if self._multiplies(model, rows):
            single = self._tuning(model, 1)
            given["warpgroups"] = self._known["warpgroups"]
            lowered = lower_with_library(program, model.config, single=single, **given)
        else:
            lowered = lower(program, model.config, context=model.context, **given)
        launches = [one for one in lowered if isinstance(one, CudaLaunch)]
        # Keyed by `compiled`: matrices of one kind may be packed differently from layer to layer.
        first_uses = {one.compiled: one for one in launches}

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            loaded = pool.map(partial(load_kernel, self._modules), first_uses.values())
            kernels = dict(zip(first_uses, loaded, strict=True))
        self._modules.preload(kernels.values())  # loads them now, not at the first launch
        bound: list[BoundCall] = []
        for one in lowered:
            if isinstance(one, CudaLaunch):
                bound.append(BoundLaunch(kernels[one.compiled], one.config, one.arguments))
            elif isinstance(one, ProductCall):
                assert self._products is not None
                bound.append(BoundProduct(self._products.product(one.product), one))
            else:
                bound.append(one)
        return tuple(bound)
