"""The names of the kernels in a cubin, read from the ELF file itself: no driver, no cuobjdump.

Section and attribute numbers as in NVIDIA's `cuobjdump -elf` output: every function has a section
`.nv.info.<name>` with its attributes.  An attribute is a format byte, a number byte and a 16-bit
value or length.

A file that is not a cubin, or a damaged one, raises InputError or is read as far as it goes; the
work and the memory are bounded by its size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ostinato.errors import InputError

__all__ = ["kernel_names"]

_INFO = ".nv.info."
_SIZED = 4  # the format whose 16-bit word is the length of what follows
# EIATTR_KPARAM_INFO and EIATTR_CBANK_PARAM_SIZE: kernels have one of them, device functions none.
_OF_KERNELS = (0x17, 0x19)
_NO_CONTENT = 8
_ENTRY = struct.Struct("<IIQQQQIIQQ")


def kernel_names(data: bytes) -> tuple[str, ...]:
    """The entry names in a cubin, sorted.  Raises InputError if it is none, or damaged."""
    if data[:5] != b"\x7fELF\x02":
        raise InputError("this is not a cubin (a 64-bit ELF file)")
    try:
        names = {
            name.removeprefix(_INFO)
            for name, content in _sections(data)
            if name.startswith(_INFO) and _is_of_kernel(content)
        }
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise InputError(f"this cubin is damaged: {error}") from None
    return tuple(sorted(names))


def _sections(data: bytes) -> list[tuple[str, memoryview]]:
    """Name and content of each section.  Raises ValueError, IndexError or struct.error."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    if entry_size != _ENTRY.size:
        raise ValueError(f"section headers of {entry_size} bytes")
    raw = [_ENTRY.unpack_from(data, table + entry_size * i) for i in range(count)]
    whole, left, contents = memoryview(data), len(data), []
    for _, kind, _, _, offset, size, *_ in raw:
        nbytes = 0 if kind == _NO_CONTENT else size
        left -= nbytes
        if left < 0 or offset + nbytes > len(data):
            raise ValueError("its sections are larger than the file")
        contents.append(whole[offset : offset + nbytes])
    names = _names(contents[names_index].tobytes(), [at for at, *_ in raw])
    return list(zip(names, contents, strict=True))


def _names(table: bytes, offsets: list[int]) -> Iterator[str]:
    """The strings at these offsets.  They may share bytes: their total length is bounded."""
    left = 4 * len(table)
    for offset in offsets:
        end = table.index(b"\0", offset)
        left -= end - offset
        if left < 0:
            raise ValueError("its names have no end")
        yield table[offset:end].decode("utf-8", "replace")


def _is_of_kernel(content: memoryview) -> bool:
    at = 0
    while at + 4 <= len(content):
        kind, number, word = struct.unpack_from("<BBH", content, at)
        if number in _OF_KERNELS:
            return True
        at += 4 + (word if kind == _SIZED else 0)
    return False
