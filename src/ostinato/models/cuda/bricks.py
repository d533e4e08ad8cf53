"""Packed matrices on CUDA devices: their formats and sizes.  Pure.

A GGUF file's quantised matrix keeps its bits and gets another order (see kernels/bricks.cuh):
16 rows of 256 inputs are a *brick*, which the tensor cores' lanes read 16 bytes at a time.
Queries, keys and values, stacked in one matrix, have separate rows of bricks, so they may be of
three types; gate and up share bricks, so they must be of one.  A matrix that does not fit these
rules is bfloat16.  IQ4_NL alone takes more bytes than in the file: it becomes Q8_0.

Where a row's inputs are not whole bricks, the last brick still has the scales of a whole one, and
the matrix is a few percent larger than in the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ostinato import Buffer
from ostinato.models.config import LlamaConfig
from ostinato.models.layout import part_rows, weight_shapes

BRICK = 256
"""The inputs of a brick; a brick has 16 rows."""
_UNIT = 64
_MOST_INPUTS = 1 << 15
"""The most inputs of a packed matrix: a block holds all of them in shared memory, as digits."""


@dataclass(frozen=True, slots=True)
class Format:
    """The sizes of a format's bricks, in bytes: `unit` for the codes of 64 inputs, `rest` for
    a brick's scales, minima and high bits."""

    unit: int
    rest: int

    def row_bytes(self, columns: int) -> int:
        """Returns the bytes of a row of bricks, which is 16 rows of a matrix."""
        bricks, left = divmod(columns, BRICK)
        last = -(-left // _UNIT) * self.unit + self.rest if left else 0
        return bricks * (BRICK // _UNIT * self.unit + self.rest) + last


FORMATS: Mapping[str, Format] = {
    "Q8_0": Format(1024, 256),
    "Q4_0": Format(512, 256),
    "Q4_1": Format(512, 512),
    "Q5_0": Format(512, 768),
    "Q5_1": Format(512, 1024),
    "Q4_K": Format(512, 256),
    "Q5_K": Format(512, 768),
    "Q6_K": Format(512, 1312),
}
"""Formats by name."""
FORMAT_OF: Mapping[str, str] = {kind: kind for kind in FORMATS} | {"IQ4_NL": "Q8_0"}
"""Names of formats by the tensor type in the file.  IQ4_NL's sixteen values are exact in 8 bits."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of bricks of one format, `kind`, with their number of output pairs."""

    kind: str
    pairs: int

    def nbytes(self, columns: int) -> int:
        return -(-self.pairs // 8) * FORMATS[self.kind].row_bytes(columns)


Packing = tuple[Part, ...]
"""The parts of a packed matrix, in order."""
Formats = Mapping[str, Packing]
"""The packed matrices, by their names in `weight_shapes`; others are bfloat16."""
_PAYS_FROM = 32 << 20
_PAYS_TO = 14336


def packing(name: str, kinds: Sequence[str], rows: Sequence[int], columns: int) -> Packing | None:
    """Returns the packing of a matrix that consists of these tensors; None for bfloat16.

    `name`: its name in `weight_shapes`.  `kinds`, `rows`: types in the file and rows of the
    tensors.
    `columns`: number of inputs.
    """
    if columns > _MOST_INPUTS or any(kind not in FORMAT_OF for kind in kinds):
        return None
    kinds = [FORMAT_OF[kind] for kind in kinds]
    if name.endswith("w_gate_up"):
        return (Part(kinds[0], rows[0]),) if len(set(kinds)) == 1 else None
    made: list[Part] = []
    for kind, count in zip(kinds, rows, strict=True):
        pairs = -(-count // 2)
        if made and made[-1].kind == kind and made[-1].pairs % 8 == 0:
            made[-1] = Part(kind, made[-1].pairs + pairs)
        else:
            made.append(Part(kind, pairs))
    return tuple(made)


def formats_of(
    config: LlamaConfig,
    kind_of: Callable[[str], str],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Formats:
    """Returns the packed formats of a file's matrices.  `kind_of`: returns a canonical tensor's
    type in the file.  `shapes`: shapes of the tensors in device memory; the config's if None."""
    found = {}
    for name, shape in (shapes or weight_shapes(config)).items():
        if len(shape) == 2:
            parts = dict(part_rows(config, name, shape[0]))
            kinds = [kind_of(part) for part in parts]
            if (how := packing(name, kinds, [*parts.values()], shape[1])) is not None:
                found[name] = how
    return found


def pays(config: LlamaConfig) -> bool:
    """True if steps of few rows are faster with packed weights.

    The rule uses the bytes of a layer in bfloat16: launches dominate the steps of small models, and
    bfloat16 needs fewer (attention_block.cu).  It also limits the inputs of products, whose digits
    fill a multiprocessor's shared memory: more than were measured are left unpacked.
    """
    c = config
    nbytes = 2 * c.hidden * (2 * c.query_size + 2 * c.kv_size + 3 * c.inner)
    return nbytes >= _PAYS_FROM and max(c.hidden, c.query_size, c.inner) <= _PAYS_TO


def device_bytes(shapes: Mapping[str, tuple[int, ...]], formats: Formats) -> int:
    """Returns the bytes of all weights on the device.  `shapes`: shapes of their tensors there."""
    total = 0
    for name, shape in shapes.items():
        how = formats.get(name)
        if how is not None:
            total += matrix_bytes(how, shape[1])
        else:
            total += math.prod(shape) * (2 if len(shape) == 2 else 4)
    return total


def matrix_bytes(packed: Packing, columns: int) -> int:
    """Returns the bytes of a packed matrix with `columns` inputs."""
    return sum(part.nbytes(columns) for part in packed)


@dataclass(frozen=True, slots=True)
class RowPlace:
    """The place of a tensor's rows in a packed matrix: row `first` of the part at byte `offset` is
    the tensor's first.  In each group of `size` rows, rows `size / 2` apart are a pair."""

    offset: int
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class Placed:
    """The target of a tensor in a packed matrix: the matrix's bytes, and the rows' place there."""

    matrix: Buffer
    place: RowPlace


def pair_size(config: LlamaConfig, name: str) -> int:
    """Returns the size of groups of rows; rows half a group apart are a pair (linear.cuh)."""
    last = name.rpartition(".")[2]
    if last == "w_gate_up":
        return 2 * config.inner
    return config.head_size if last == "wqkv" and not config.qk_norm else 2


def places(
    config: LlamaConfig, name: str, packed: Packing, rows: Sequence[int], columns: int
) -> tuple[RowPlace, ...]:
    """Returns the place of each tensor that a packed matrix consists of; `rows`: rows of each."""
    size = pair_size(config, name)
    made = []
    offset, first, parts = 0, 0, list(packed)
    for count in rows:
        if first >= 2 * parts[0].pairs:
            offset += parts.pop(0).nbytes(columns)
            first = 0
        made.append(RowPlace(offset, first, size))
        first += count
    return tuple(made)
