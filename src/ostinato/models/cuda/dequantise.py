"""Conversion of a file's tensors on a CUDA device: to float32 or bfloat16
(`kernels/dequantise.cu`), or to packed bytes in another order (`kernels/repack.cu`).

The file's bytes are copied to the device straight from the map.  Conversion on the host would be
slower, since its threads contend for the interpreter's lock (SmolLM2-135M on 16 cores: 0.3 s with
four threads, 0.45 s with sixteen).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ostinato import Buffer, Device, LaunchConfig, Source, Stream, prepare
from ostinato.models.cuda.bricks import FORMAT_OF, Placed
from ostinato.models.cuda.lowering import source_of
from ostinato.models.files.checkpoint import Checkpoint, RawTensor, StoredCheckpoint
from ostinato.models.files.dequantise import SUPPORTED_TYPES
from ostinato.models.weights import WeightTarget

if TYPE_CHECKING:
    from ostinato.modules import ModuleCache

_MOST_STAGED = 64 << 20
_THREADS = 256
_OUT = {np.dtype(np.float32): "f32", np.dtype(np.uint16): "bf16"}


@functools.cache
def dequantise_source() -> Source:
    """Returns the source of the kernels `<type>_to_f32` and `<type>_to_bf16`."""
    return source_of(
        "dequantise",
        {
            f"{kind}_to_{out}": f"stored: *const u8, out: *out {out}, row_bytes: u32, "
            "columns: u32, head: u32"
            for kind in SUPPORTED_TYPES
            for out in _OUT.values()
        },
    )


@functools.cache
def repack_source() -> Source:
    """Returns the source of the kernels `<type>_to_bricks`."""
    to_bricks = (
        "stored: *const u8, bricks: *u8, row_bytes: u32, columns: u32, first: u32, head: u32, "
        "size: u32"
    )
    return source_of("repack", {f"{kind}_to_bricks": to_bricks for kind in FORMAT_OF})


def convert_on_device(
    device: Device, checkpoint: Checkpoint, tensors: Iterable[tuple[str, WeightTarget]]
) -> bool:
    """Converts tensors of a checkpoint's file into buffers, by canonical name, or packs them into
    matrices; waits for the results.

    Returns False, and does nothing, if the checkpoint has no stored bytes.  Raises CompileError,
    DriverError, OutOfMemoryError.
    """
    if not isinstance(checkpoint, StoredCheckpoint):
        return False
    staging = device.empty(staged_bytes(map(checkpoint.raw, checkpoint.tensor_names())), "bytes")
    with staging, device.create_stream() as stream:
        for name, out in tensors:
            raw, stored = checkpoint.raw(name), checkpoint.stored(name)
            if isinstance(out, Placed):
                repack_on_device(device.modules, raw, stored, out, staging, stream)
            else:
                dequantise_on_device(device.modules, raw, stored, out, staging, stream)
        stream.synchronize()
    return True


def staged_bytes(tensors: Iterable[RawTensor]) -> int:
    """Returns the bytes of staging memory that `dequantise_on_device` needs for these tensors."""
    return max(max(_least_bytes(raw), min(raw.size, _MOST_STAGED)) for raw in tensors)


def dequantise_on_device(
    modules: ModuleCache,
    raw: RawTensor,
    stored: npt.NDArray[np.uint8],
    out: Buffer,
    staging: Buffer,
    stream: Stream,
) -> None:
    """Writes a tensor's values to `out` (float32, or uint16 for bfloat16), in stream order.

    `stored`: the tensor's bytes in the file; they are copied before this returns.  `staging`: see
    `staged_bytes`; later work on the stream may use it again.  The values are those of
    `Checkpoint.load`, bit by bit, except for the payloads of NaN.  Raises CompileError,
    DriverError.
    """
    kernel = modules.get_or_compile(dequantise_source(), f"{raw.type}_to_{_OUT[out.dtype]}")
    row_values = raw.columns * out.dtype.itemsize
    head = raw.together if raw.heads else 0
    for start, rows, part in _staged(raw, stored, staging, stream):
        values = out.view(start * row_values, rows * raw.columns)
        shape = LaunchConfig(rows, _THREADS)
        given = (part, values, raw.size // raw.rows, raw.columns, head)
        stream.submit_as_graph(prepare(kernel, shape, *given))


def repack_on_device(
    modules: ModuleCache,
    raw: RawTensor,
    stored: npt.NDArray[np.uint8],
    out: Placed,
    staging: Buffer,
    stream: Stream,
) -> None:
    """Writes a tensor's bytes to its place in a packed matrix, in stream order; arguments and
    errors: see `dequantise_on_device`."""
    kernel = modules.get_or_compile(repack_source(), f"{raw.type}_to_bricks")
    place, row_bytes = out.place, raw.size // raw.rows
    bricks = out.matrix.view(place.offset, out.matrix.nbytes - place.offset, np.uint8)
    head = raw.together if raw.heads else 0
    for start, rows, part in _staged(raw, stored, staging, stream):
        given = (row_bytes, raw.columns, place.first + start, head, place.size)
        shape = LaunchConfig(rows, _THREADS)
        stream.submit_as_graph(prepare(kernel, shape, part, bricks, *given))


def _staged(
    raw: RawTensor, stored: npt.NDArray[np.uint8], staging: Buffer, stream: Stream
) -> Iterator[tuple[int, int, Buffer]]:
    """Yields the tensor's rows in pieces: first row, number of rows, their bytes on the device."""
    row_bytes = raw.size // raw.rows
    step = staging.nbytes // _least_bytes(raw) * raw.together
    for start in range(0, raw.rows, step):
        rows = min(step, raw.rows - start)
        part = staging.view(0, rows * row_bytes, np.uint8)
        part.set(stored[start * row_bytes : (start + rows) * row_bytes], stream)
        yield start, rows, part


def _least_bytes(raw: RawTensor) -> int:
    """Returns the bytes of the rows that must be converted together."""
    return raw.size // raw.rows * raw.together
