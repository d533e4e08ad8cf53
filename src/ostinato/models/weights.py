"""A model's weights in device memory, in the shapes that the kernels need.

Queries, keys and values are one matrix, gate and up another, so that a layer is four products.
Where device memory is host memory, a checkpoint is converted straight into place, or its bytes are
copied unchanged for kernels that read packed weights; a CUDA device converts the file's bytes
itself.  Weights that are in device memory already, in these shapes, are adopted without a copy.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ostinato import Buffer, Device
from ostinato.errors import ClosedError, InputError
from ostinato.models.arguments import quoted
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.bricks import Formats, Placed, matrix_bytes, places
from ostinato.models.files.checkpoint import Checkpoint, StoredCheckpoint
from ostinato.models.layout import device_shapes, part_rows, weight_shapes

if TYPE_CHECKING:
    from ostinato.models.packed import PackedMatrix

# The size of the reused staging memory for a device with its own memory: tensors are converted
# together in it, enough bytes that every thread has work.
_STAGED_BYTES = 64 << 20
_ALIGNMENT = 64
# The widest load of a kernel.
_LEAST_ALIGNMENT = 16
# More threads contend for the interpreter's lock: 4 take 0.21 s for SmolLM2-135M on 16 cores, 16
# take 0.38.
_THREADS = 4

_Matrix = TypeVar("_Matrix", npt.NDArray[Any], Buffer)

WeightTarget: TypeAlias = Buffer | Placed
"""The destination of a tensor's values, or of its bytes if they stay packed."""
Convert: TypeAlias = Callable[[Checkpoint, Iterable[tuple[str, WeightTarget]]], bool]
"""The type of `Backend.convert`."""


@dataclass(slots=True, eq=False)
class Weights:
    """The weights of one model.

    `shapes`: shapes by the names of `weight_shapes`, with fused tensors in place of their parts.
    `tensors`: their memory by the same names.  Matrices are `dtype`, vectors always float32; if
    `packed`, matrices are the bytes of a `PackedMatrix` (uint8, flat), and `dtype` is the cache's.
    `formats`: the matrices whose bytes are in a CUDA device's own order (`cuda.bricks`).  `loaded`:
    every tensor is there, with its values.
    """

    config: LlamaConfig
    dtype: np.dtype[Any]
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    tensors: dict[str, Buffer] = field(default_factory=dict, repr=False)
    loaded: bool = False
    packed: bool = False
    formats: Formats = field(default_factory=dict, repr=False)
    memory: Buffer | None = field(default=None, repr=False)
    """The allocation that all tensors are views of, if there is one."""

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.tensors.values())

    @property
    def unpacked_bytes(self) -> int:
        """The value of `nbytes` if every matrix were in `dtype`."""
        shapes = self.shapes.values()
        return sum(math.prod(s) * _kind(s, self.dtype).itemsize for s in shapes)

    def description(self) -> str:
        """Returns the form of the matrices in words, such as "bfloat16" or "packed"."""
        if self.packed:
            return "packed"
        if not self.formats:
            return {"uint16": "bfloat16"}.get(self.dtype.name, self.dtype.name)
        kinds = sorted({part.kind for parts in self.formats.values() for part in parts})
        rest = sum(len(b.shape) == 2 for b in self.tensors.values())
        return f"packed ({', '.join(kinds)}){f', and {rest} in bfloat16' if rest else ''}"

    def buffer(self, name: str, layer: int | None = None) -> Buffer:
        """Returns a tensor by its name in the program.  Raises ClosedError if it is not loaded, or
        closed."""
        key = name if layer is None else f"layers.{layer}.{name}"
        buffer = self.tensors.get(key)
        if buffer is None or buffer.closed:
            raise ClosedError(f"the weight {key!r} is not loaded (any more)")
        return buffer

    def close(self) -> None:
        """Frees the memory; adopted memory is only released to its owner.  Idempotent."""
        self.loaded = False
        for buffer in self.tensors.values():
            buffer.close()
        if self.memory is not None:
            self.memory.close()


def load_weights(
    device: Device,
    checkpoint: Checkpoint,
    dtype: npt.DTypeLike = np.float32,
    *,
    packed: bool = False,
    formats: Formats | None = None,
    threads: int | None = None,
    convert: Convert | None = None,
) -> Weights:
    """Reads every tensor of a checkpoint into device memory, and waits until all are there.

    `dtype`: type of matrices, float32 or uint16 (the bits of bfloat16).  `packed`: matrices stay
    packed as in the file, see `Weights`; only where device memory is host memory.  `formats`: see
    `Backend.formats`; `convert` must support them.  `threads`: threads of the host's conversion; if
    None 4, or the number of cores if that is less.  `convert`: see `Backend.convert`; without it,
    or if it returns False, the host converts.
    Raises ModelFormatError, OutOfMemoryError, InputError if `formats` cannot be converted; nothing
    is left allocated then.
    """
    config = checkpoint.config
    shapes = device_shapes(checkpoint.shapes())
    weights = Weights(config, np.dtype(dtype), shapes, packed=packed, formats=formats or {})
    workers = threads or min(_THREADS, os.cpu_count() or 1)
    try:
        if packed:
            _load_packed(device, checkpoint, weights, workers)
            weights.loaded = True
            return weights
        for name, shape in shapes.items():
            how = weights.formats.get(name)
            if how is None:
                kind = _kind(shape, weights.dtype)
                weights.tensors[name] = device.empty(shape, kind, name=name)
            else:  # zeros: kernels also read the rows that pad the last brick; they must be finite
                nbytes = matrix_bytes(how, shape[1])
                weights.tensors[name] = device.zeros(nbytes, np.uint8, name=name)
        if device.capabilities.host_memory_is_device_memory and not weights.formats:
            values = {name: buffer.array for name, buffer in _all_parts(weights)}
            checkpoint.load(values, threads=workers)
        elif convert is None or not convert(checkpoint, _targets(weights)):
            if weights.formats:
                raise InputError(
                    f"{checkpoint.path}: its packed weights cannot be converted for {device.name}"
                )
            _upload(device, checkpoint, weights, workers)
    except BaseException:
        weights.close()
        raise
    weights.loaded = True
    return weights


def adopt_weights(
    device: Device,
    config: LlamaConfig,
    tensors: Mapping[str, object],
    dtype: npt.DTypeLike = np.uint16,
) -> Weights:
    """Makes `Weights` for `Decoder` of tensors that are in device memory already, without a copy.

    `tensors`: one for each name of `weight_shapes(config)`, in its shape and C-contiguous: buffers,
    or another library's device arrays (`Device.adopt_array`), which are kept alive until the
    weights are closed.  Matrices are `dtype`, uint16 for bfloat16 (for a CUDA device's kernels) or
    float32 (for the host's); vectors are float32.  Each begins at a multiple of 16 bytes.

    Work that writes to the tensors must end before a decoder reads them, or be on the decoder's
    stream.  Decoders use later changes, but their KV caches keep the results from before.
    Raises InputError for wrong or missing names, and for wrong shapes, types or addresses.
    """
    shapes = weight_shapes(config)
    weights = Weights(config, np.dtype(dtype), shapes)
    unknown = [name for name in tensors if name not in shapes]
    missing = [name for name in shapes if name not in tensors]
    if unknown or missing:
        raise InputError(
            f"of the weights {quoted(missing)} are missing and {quoted(unknown)} are not known; "
            "weight_shapes(config) has the names"
        )
    for name, shape in shapes.items():
        buffer = device.adopt_array(tensors[name])
        kind = _kind(shape, weights.dtype)
        if buffer.shape != shape or buffer.dtype != kind:
            raise InputError(
                f"the weight {name!r} is {buffer.dtype} {list(buffer.shape)}, must be {kind} "
                f"{list(shape)}"
            )
        if buffer.context is not device.context:
            raise InputError(f"the weight {name!r} is a buffer of another device")
        if buffer.address % _LEAST_ALIGNMENT:
            raise InputError(
                f"the weight {name!r} begins at {buffer.address:#x}; a multiple of "
                f"{_LEAST_ALIGNMENT} bytes is needed"
            )
        buffer.name = buffer.name or name
        weights.tensors[name] = buffer
    weights.loaded = True
    return weights


def _kind(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if len(shape) == 2 else np.dtype(np.float32)


def _load_packed(device: Device, checkpoint: Checkpoint, weights: Weights, threads: int) -> None:
    """Loads matrices packed as in the file, or as float32 if the checkpoint has no file.

    All weights are one allocation, so that the operating system uses large pages.  With small pages
    a step, which reads all weights, takes 10 % longer.
    """
    config, end = checkpoint.config, 0
    matrices: dict[str, PackedMatrix] = {}
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name, shape in weights.shapes.items():
        places[name] = end, shape
        if len(shape) == 2:
            matrices[name] = _packed_matrix(checkpoint, name, shape)
            end += _aligned(matrices[name].nbytes)
        else:
            end += _aligned(shape[0] * 4)
    weights.memory = device.empty(end, np.uint8, name="weights")
    values: dict[str, npt.NDArray[Any]] = {}
    for name, (start, shape) in places.items():
        if name not in matrices:
            vector = weights.tensors[name] = weights.memory.view(start, shape, np.float32)
            vector.name = name
            values.update(_parts(config, name, vector.array))
            continue
        matrix = weights.memory.view(start, matrices[name].nbytes, np.uint8)
        weights.tensors[name] = matrix
        matrix.name = name
        targets = matrices[name].begin(matrix.array)
        for (part, _), rows in zip(part_rows(config, name, shape[0]), targets, strict=True):
            if isinstance(checkpoint, StoredCheckpoint):
                checkpoint.packed(part, rows)
            else:
                values[part] = rows.view(np.float32)
    checkpoint.load(values, threads=threads)


def _packed_matrix(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> PackedMatrix:
    from ostinato.models.packed import PackedMatrix, PackedPart

    parts = part_rows(checkpoint.config, name, shape[0])
    if not isinstance(checkpoint, StoredCheckpoint):
        return PackedMatrix(shape[1], tuple(PackedPart("F32", rows) for _, rows in parts))
    made = (PackedPart(checkpoint.raw(part).type, rows) for part, rows in parts)
    return PackedMatrix(shape[1], tuple(made))


def _upload(device: Device, checkpoint: Checkpoint, weights: Weights, threads: int) -> None:
    """Converts on the host and copies to the device, many tensors at a time."""
    largest = max((_aligned(buffer.nbytes) for buffer in weights.tensors.values()), default=0)
    staging = np.empty(max(_STAGED_BYTES, largest), np.uint8)
    stream = device.create_stream()
    try:
        for group in _groups(weights.tensors, staging.nbytes):
            values: dict[str, npt.NDArray[Any]] = {}
            start = 0
            for name, buffer in group.items():
                piece = staging[start : start + buffer.nbytes]
                values[name] = piece.view(buffer.dtype).reshape(buffer.shape)
                start += _aligned(buffer.nbytes)
            parts = (_parts(weights.config, name, array) for name, array in values.items())
            checkpoint.load(dict(itertools.chain.from_iterable(parts)), threads=threads)
            for name, buffer in group.items():
                buffer.set(values[name], stream)
        stream.synchronize()
    finally:
        stream.close()


def _groups(tensors: dict[str, Buffer], nbytes: int) -> Iterator[dict[str, Buffer]]:
    """Yields the tensors in order, in groups of at most `nbytes`; a larger tensor is a group."""
    group: dict[str, Buffer] = {}
    size = 0
    for name, buffer in tensors.items():
        if group and size + buffer.nbytes > nbytes:
            yield group
            group, size = {}, 0
        group[name] = buffer
        size += _aligned(buffer.nbytes)
    if group:
        yield group


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _all_parts(weights: Weights) -> Iterator[tuple[str, Buffer]]:
    """Yields every canonical tensor with its part of a buffer."""
    for name, buffer in weights.tensors.items():
        yield from _parts(weights.config, name, buffer)


def _targets(weights: Weights) -> Iterator[tuple[str, WeightTarget]]:
    """Yields every canonical tensor with its target on the device, also for packed matrices."""
    c = weights.config
    for name, buffer in weights.tensors.items():
        how = weights.formats.get(name)
        if how is None:
            yield from _parts(c, name, buffer)
            continue
        rows, columns = weights.shapes[name]
        parts = dict(part_rows(c, name, rows))
        found = places(c, name, how, [*parts.values()], columns)
        yield from ((part, Placed(buffer, place)) for part, place in zip(parts, found, strict=True))


def _parts(config: LlamaConfig, name: str, array: _Matrix) -> Iterator[tuple[str, _Matrix]]:
    """Yields the canonical tensors that `array` consists of, each with its rows of `array`."""
    start = 0
    for part, rows in part_rows(config, name, array.shape[0]):
        yield part, array[start : start + rows]
        start += rows
