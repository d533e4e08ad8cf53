"""Packed matrices on CUDA devices: which there are, and how large.  Pure.

A GGUF file's quantised matrix keeps its bits and gets another order (kernels/bricks.cuh has it):
16 rows of 256 inputs are a *brick*, which the tensor cores' lanes read 16 bytes at a time.
Queries, keys and values, below each other in one matrix, are rows of bricks of their own, so they
may be of three types; gate and up share bricks, so they must be of one.  A matrix of which that
cannot be said is bfloat16, as all are without `packed`.

Where a row's inputs are not whole bricks, the last one's scales stand for all of it, and a matrix
is a few percent larger than in the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ostinato import Buffer
from ostinato.models.config import LlamaConfig
from ostinato.models.layout import part_rows, weight_shapes

BRICK = 256
"""Inputs of a brick; it has 16 rows."""
_UNIT = 64
_MOST_INPUTS = 1 << 15
"""A block has all of them in shared memory, as digits."""


@dataclass(frozen=True, slots=True)
class Format:
    """A packed type's bricks, in bytes: `unit`, codes of 64 inputs; `rest`, all else."""

    unit: int
    rest: int

    def row_bytes(self, columns: int) -> int:
        """Of a row of bricks, which is 16 rows of a matrix."""
        bricks, left = divmod(columns, BRICK)
        last = -(-left // _UNIT) * self.unit + self.rest if left else 0
        return bricks * (BRICK // _UNIT * self.unit + self.rest) + last


FORMATS: Mapping[str, Format] = {
    "Q8_0": Format(1024, 256),
    "Q4_0": Format(512, 256),
    "Q4_1": Format(512, 512),
    "Q4_K": Format(512, 256),
    "Q5_K": Format(512, 768),
    "Q6_K": Format(512, 1312),
}
"""By the tensor type's name."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of bricks below each other: their tensor type, and pairs of outputs."""

    kind: str
    pairs: int

    def nbytes(self, columns: int) -> int:
        return -(-self.pairs // 8) * FORMATS[self.kind].row_bytes(columns)


Packing = tuple[Part, ...]
"""Of a packed matrix."""
Formats = Mapping[str, Packing]
"""The matrices that are packed, by their names in `weight_shapes`; others are bfloat16."""
_PAYS_FROM = 32 << 20
_PAYS_TO = 14336


def packing(name: str, kinds: Sequence[str], rows: Sequence[int], columns: int) -> Packing | None:
    """How a matrix is packed that these tensors make up; None for bfloat16.

    `name`: in `weight_shapes`.  `kinds`, `rows`: types and rows of the tensors.  `columns`: inputs.
    """
    if columns > _MOST_INPUTS or any(kind not in FORMATS for kind in kinds):
        return None
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
    """How the matrices of a file can be packed.  `kind_of`: a canonical tensor's type in it.
    `shapes`: of the tensors in device memory, those of the config if None."""
    found = {}
    for name, shape in (shapes or weight_shapes(config)).items():
        if len(shape) == 2:
            parts = dict(part_rows(config, name, shape[0]))
            kinds = [kind_of(part) for part in parts]
            if (how := packing(name, kinds, [*parts.values()], shape[1])) is not None:
                found[name] = how
    return found


def pays(config: LlamaConfig) -> bool:
    """Whether steps of few rows are faster with packed weights.

    By the bytes of a layer in bfloat16: the steps of small models are launches more than bytes, and
    with bfloat16 they have fewer (attention_block.cu).  And by the inputs of its products, whose
    digits fill a multiprocessor's shared memory: more of them than measured are left unpacked.
    """
    c = config
    nbytes = 2 * c.hidden * (2 * c.query_size + 2 * c.kv_size + 3 * c.inner)
    return nbytes >= _PAYS_FROM and max(c.hidden, c.query_size, c.inner) <= _PAYS_TO


def device_bytes(shapes: Mapping[str, tuple[int, ...]], formats: Formats) -> int:
    """Of all weights on the device.  `shapes`: of their tensors there."""
    total = 0
    for name, shape in shapes.items():
        how = formats.get(name)
        if how is not None:
            total += matrix_bytes(how, shape[1])
        else:
            total += math.prod(shape) * (2 if len(shape) == 2 else 4)
    return total


def matrix_bytes(packed: Packing, columns: int) -> int:
    """Of a packed matrix with so many inputs."""
    return sum(part.nbytes(columns) for part in packed)


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where rows of a tensor go in a packed matrix: their part begins at byte `offset`, and the
    first of them is row `first` of it.  Of each `size` rows, those `size / 2` apart are a pair."""

    offset: int
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a tensor of a packed matrix goes: the matrix's bytes, and its rows' place in them."""

    matrix: Buffer
    place: RowPlace


def pair_size(config: LlamaConfig, name: str) -> int:
    """Of so many rows of a matrix, those half of it apart are a pair of outputs (linear.cuh)."""
    last = name.rpartition(".")[2]
    if last == "w_gate_up":
        return 2 * config.inner
    return config.head_size if last == "wqkv" and not config.qk_norm else 2


def places(
    config: LlamaConfig, name: str, packed: Packing, rows: Sequence[int], columns: int
) -> tuple[RowPlace, ...]:
    """Of each tensor that makes up a packed matrix, with so many rows."""
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
