"""Matrices packed as in the file, each in one piece of memory, for the compiled host kernels.

    head                   "ostinato", rows, columns, number of parts, 0; for each part its tensor
                           type (GGUF's number), its rows and the offset of its first row
    part, part, …          each part's rows, packed as in the file; queries, keys and values, or
                           gate and up, may be of different types

Numbers are the machine's own (32 bits, offsets 64).  Each part begins at a multiple of 64 bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ostinato.errors import InputError
from ostinato.models.files.dequantise import BLOCK_TYPES, SUPPORTED_TYPES

_HEAD = struct.Struct("=8s4I")
_PART = struct.Struct("=2IQ")
_MOST_PARTS = 3
_ALIGNMENT = 64
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Rows of one tensor type; `type` is a key of `BLOCK_TYPES`."""

    type: str
    rows: int


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The layout of a matrix [rows, columns] whose rows are divided into parts.

    Raises InputError for an unknown type, for rows that are no whole number of its blocks, and for
    sizes above 2^31 - 1.
    """

    columns: int
    parts: tuple[PackedPart, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.parts) <= _MOST_PARTS:
            raise InputError(f"{len(self.parts)} parts of a packed matrix; 1 to {_MOST_PARTS}")
        for part in self.parts:
            block = BLOCK_TYPES.get(part.type)
            if block is None:
                raise InputError(
                    f"tensor type {part.type!r} is not known; there are: "
                    f"{', '.join(SUPPORTED_TYPES)}"
                )
            if part.rows < 1 or self.columns < 1 or self.columns % block.values:
                raise InputError(
                    f"{part.rows} rows of {self.columns} values cannot be {part.type}: a row is a "
                    f"whole number of blocks of {block.values}"
                )
        if max(self.rows, self.columns) > _MOST:
            raise InputError(f"a packed matrix of [{self.rows}, {self.columns}]; {_MOST} at most")

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the head and the parts together."""
        last = self.parts[-1]
        return self._offsets()[-1] + last.rows * self._row_bytes(last)

    def _row_bytes(self, part: PackedPart) -> int:
        block = BLOCK_TYPES[part.type]
        return self.columns // block.values * block.size

    def _offsets(self) -> list[int]:
        offsets = []
        end = _HEAD.size + _MOST_PARTS * _PART.size
        for part in self.parts:
            offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
            end = offsets[-1] + part.rows * self._row_bytes(part)
        return offsets

    def begin(self, memory: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], ...]:
        """Writes the head; returns a view of each part, uint8 [rows, bytes in a row], to fill.

        `memory`: flat, contiguous, `nbytes` of uint8.
        """
        offsets = self._offsets()
        head = _HEAD.pack(b"ostinato", self.rows, self.columns, len(self.parts), 0)
        for part, offset in zip(self.parts, offsets, strict=True):
            head += _PART.pack(BLOCK_TYPES[part.type].number, part.rows, offset)
        memory[: offsets[0]] = 0
        memory[: len(head)] = np.frombuffer(head, np.uint8)
        rows = []
        for part, offset in zip(self.parts, offsets, strict=True):
            size = self._row_bytes(part)
            rows.append(memory[offset : offset + part.rows * size].reshape(part.rows, size))
        return tuple(rows)
