"""Matrix products by cuBLASLt for steps of many rows, as operations of our own.

Our kernels are made for few rows: every weight passes through a multiprocessor's registers once for
all rows.  With many rows, a library's pipelines through shared memory are faster (docs/design.md).

    products, why = open_products(device)         why: the library's name, or why there is none
    product = products.product(MatrixProduct(…))  plans the algorithm, once for each shape
    product.operations(weight=…, inputs=…, out=…, workspace=…)

The library is called once for each product of a step: the call is captured, and its launches are
lifted out of the graph (`ostinato.lift`).  So a step consists of our own operations, with the
operands that each reads and writes, and is the same in eager runs, captures, recordings and loops.
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
"""The most rows of one step whose products a library computes."""

_MADE = (1 << 20) + 7
_WORKSPACE = 32 << 20  # NVIDIA's advice for Hopper; allocated once for each plan


def open_products(
    device: Device, rows: int | Literal["auto"] | None, stream: Stream | None = None
) -> tuple[LibraryProducts | None, str]:
    """Returns the library for a device and its description, or None and the reason.

    `rows`: the least rows for which it will be used, for the description; "auto" for a number by
    the model; None for never.  `stream`: the stream for trials of products; a new one if None.
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
    """cuBLASLt on a device, which is not used before the first product."""

    workspace_bytes = _WORKSPACE
    """Bytes of device memory that all products share: two products must never run concurrently."""

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
        """Plans a product once for each shape.  Must not be called inside a capture.  Raises
        NotAvailableError if the library has no algorithm."""
        known = self._known.get(product)
        if known is None:
            self._stream = self._stream or self._device.create_stream()
            planned = self._library.plan(self._context, product, _WORKSPACE)
            known = self._known[product] = LibraryProduct(self._device, self._stream, planned)
        return known


class LibraryProduct:
    """One product of cuBLASLt.  Its operations keep it alive."""

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
        """Captures and lifts the library's call on these buffers, without running it.  Must not be
        called inside a capture.  `weight_is_scratch`: the weight has its values only during a step.

        The first call also runs the product on other buffers, which loads the library's kernels.
        Raises NotAvailableError if the library's launches cannot be repeated as operations with the
        same bits.
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
        self._planned(
            self._stream.handle,
            weight=weight.address,
            inputs=inputs.address,
            out=out.address,
            workspace=workspace.address,
            nbytes=workspace.nbytes,
        )

    def _try_out(self, name: str, weight: Buffer) -> None:
        """Runs the call and the lifted operations, and compares their results."""
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
        """Bytes of workspace that this product alone needs."""
        return max(256, self._planned.workspace_bytes)


def _bfloat16(count: int, seed: int) -> npt.NDArray[np.uint16]:
    """Returns the bits of `count` normal values as bfloat16, which repeat after _MADE values."""
    values = np.random.default_rng(seed).standard_normal(min(count, _MADE), np.float32)
    return np.resize((values.view(np.uint32) >> 16).astype(np.uint16), count)
