"""Matrix products by a library, where steps have many rows: cuBLASLt, as operations of our own.

Our kernels are made for few rows: every weight passes through a multiprocessor's registers once for
all rows.  With many rows, a library's pipelines through shared memory are faster (docs/design.md).

    products, why = open_products(device)         why: what is used, or why not, in words
    product = products.product(MatrixProduct(…))  the algorithm, once for each shape
    product.operations(weight=…, inputs=…, out=…, workspace=…)

The library is called once for each product of a step: the call is captured, and what it launched is
lifted out of the graph (`ostinato.lift`).  So a step consists of our own operations, with what each
reads and writes, and is the same in eager runs, captures, recordings and loops.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from ostinato import Buffer, Device, Operation, Stream, capture, lift
from ostinato.driver.api import CudaContext
from ostinato.driver.cuda.blas import (
    Cublaslt,
    MatrixProduct,
    Planned,
    load_cublaslt,
)
from ostinato.errors import (
    CaptureError,
    ContextPoisonedError,
    DriverError,
    GraphError,
    NotAvailableError,
)

PIECE_ROWS = 2048
"""Most rows of one step where a library multiplies."""

_MADE = (1 << 20) + 7
_WORKSPACE = 32 << 20  # what NVIDIA advises for Hopper; a plan has it once


def open_products(
    device: Device, rows: int | Literal["auto"] | None, stream: Stream | None = None
) -> tuple[LibraryProducts | None, str]:
    """The library for a device; None with the reason where there is none.

    `rows`: from how many rows on it will be used, "auto" for a number by the model; None for never.
    `stream`: where products are tried out; one of their own if None.
    """
    if rows is None:
        return None, "not used: switched off (library_rows=None)"
    try:
        library = load_cublaslt()
    except NotAvailableError as error:
        return None, f"not used: {error}"
    context = device.driver.cuda_context
    if context is None:
        return None, f"not used: {device.name} has no CUDA context, which cuBLASLt works in"
    where = "large steps" if rows == "auto" else f"steps of {rows} rows and more"
    return LibraryProducts(device, context, library, stream), f"{library}, for {where}"


class LibraryProducts:
    """cuBLASLt on a device.  Nothing of the device is touched before the first product."""

    workspace_bytes = _WORKSPACE
    """Device memory that its products share: two of them must never run side by side."""

    def __init__(
        self,
        device: Device,
        context: CudaContext,
        library: Cublaslt,
        stream: Stream | None = None,
    ) -> None:
        self._device = device
        self._context = context
        self._library = library
        self._known: dict[MatrixProduct, LibraryProduct] = {}
        self._stream = stream

    def product(self, product: MatrixProduct) -> LibraryProduct:
        """Chooses an algorithm, once.  Not inside a capture.  Raises NotAvailableError if the
        library has none."""
        known = self._known.get(product)
        if known is None:
            self._stream = self._stream or self._device.create_stream()
            planned = self._library.plan(self._context, product, _WORKSPACE)
            known = self._known[product] = LibraryProduct(self._device, self._stream, planned)
        return known


class LibraryProduct:
    """One product of cuBLASLt.  Operations made of it keep it."""

    def __init__(self, device: Device, stream: Stream, planned: Planned) -> None:
        self.product = planned.product
        self._device = device
        self._stream = stream
        self._planned = planned
        self._tried = False

    def operations(
        self,
        name: str,
        *,
        weight: Buffer,
        inputs: Buffer,
        out: Buffer,
        workspace: Buffer,
        weight_is_scratch: bool = False,
    ) -> tuple[Operation, ...]:
        """The library's call on these buffers, captured and lifted; it does not run.  Not inside a
        capture.  `weight_is_scratch`: the weight gets its values in a step only.

        The first time, the call is tried out on other buffers, which loads the library's kernels.
        Raises NotAvailableError if what the library launches cannot be launched by us with the same
        bits.
        """
        try:
            if not self._tried:
                if weight_is_scratch:
                    size = self.product.outputs * self.product.inputs
                    with self._device.array(_bfloat16(size, 8)) as made:
                        self._try_out(name, made)
                else:
                    self._try_out(name, weight)
                self._tried = True
            return self._lifted(name, weight, inputs, out, workspace)
        except ContextPoisonedError:
            raise
        except (CaptureError, DriverError, GraphError) as error:
            raise NotAvailableError(f"{name}, {self.product}: {error}") from error

    def _lifted(
        self, name: str, weight: Buffer, inputs: Buffer, out: Buffer, workspace: Buffer
    ) -> tuple[Operation, ...]:
        reads = [weight.range, inputs.range, workspace.range]
        if self.product.accumulate:
            reads.append(out.range)
        with capture(self._stream) as under_way:
            self._call(weight, inputs, out, workspace)
        with under_way.graph as graph:
            return lift(
                graph,
                name=name,
                reads=reads,
                writes=(out.range, workspace.range),
                keep=(self, weight, inputs, out, workspace),
            )

    def _call(self, weight: Buffer, inputs: Buffer, out: Buffer, workspace: Buffer) -> None:
        """Calls the library."""
        self._planned(
            self._stream.handle,
            weight=weight.address,
            inputs=inputs.address,
            out=out.address,
            workspace=workspace.address,
            nbytes=workspace.nbytes,
        )

    def _try_out(self, name: str, weight: Buffer) -> None:
        """Runs the call, and what was lifted of it, and compares."""
        product, device, stream = self.product, self._device, self._stream
        bits = _bfloat16(product.inputs, 7)
        with (
            device.array(np.tile(bits, (product.rows, 1))) as inputs,
            device.zeros((product.rows, product.outputs), np.float32) as out,
            device.zeros((product.rows, product.outputs), np.float32) as again,
            device.zeros(self.workspace_bytes, "bytes") as workspace,
        ):
            self._call(weight, inputs, out, workspace)
            for operation in self._lifted(name, weight, inputs, again, workspace):
                stream.submit(operation)
            wanted, found = out.to_numpy(stream), again.to_numpy(stream)
        if wanted.tobytes() != found.tobytes():
            raise NotAvailableError(
                f"{name}, {product}: what cuBLASLt launched gives another result when we launch "
                "it, so it is not used; please report this"
            )

    @property
    def workspace_bytes(self) -> int:
        """What this product alone needs."""
        return max(256, self._planned.workspace_bytes)


def _bfloat16(count: int, seed: int) -> npt.NDArray[np.uint16]:
    """The bits of normal values, which repeat after a while."""
    values = np.random.default_rng(seed).standard_normal(min(count, _MADE), np.float32)
    return np.resize((values.view(np.uint32) >> 16).astype(np.uint16), count)
