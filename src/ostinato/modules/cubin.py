"""Reads the description of kernels from a cubin's ELF data, without a driver or cuobjdump.

Section names and attribute numbers are those of NVIDIA's `cuobjdump -elf` output.  Every kernel has
a section `.nv.constant0.<name>` for its parameters, even without any; device functions have none.
`.nv.info.<name>` has attributes: a format byte, a number byte and a 16-bit value or length.

`kernel_names` accepts any file: if it is damaged or no cubin, it raises InputError or reads as much
as it can; its work and memory are bounded by the file's size.  `kernel_resources` is for code that
the compiler has just made.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ostinato.driver.api import ParameterSlot
from ostinato.errors import InputError

_CONSTANTS = ".nv.constant0."
_SIZED = 4  # format whose 16-bit word is the length of the value that follows
_MAX_THREADS, _FRAME_SIZE, _PARAMETER, _REGISTERS = 0x05, 0x11, 0x17, 0x2F
_NO_CONTENT = 8
_ENTRY = struct.Struct("<IIQQQQIIQQ")


def kernel_names(data: bytes) -> tuple[str, ...]:
    """Returns the entry names in a cubin, sorted.  Raises InputError if it is no cubin, or
    damaged."""
    if data[:5] != b"\x7fELF\x02":
        raise InputError("this is not a cubin (a 64-bit ELF file)")
    try:
        names = {
            name.removeprefix(_CONSTANTS)
            for name in _section_names(data)
            if name.startswith(_CONSTANTS)
        }
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise InputError(f"this cubin is damaged: {error}") from None
    return tuple(sorted(names))


def _section_names(data: bytes) -> Iterator[str]:
    """Yields the name of each section.  Raises ValueError, IndexError or struct.error."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    if entry_size != _ENTRY.size:
        raise ValueError(f"section headers of {entry_size} bytes")
    raw = [_ENTRY.unpack_from(data, table + entry_size * i) for i in range(count)]
    for _, kind, _, _, offset, size, *_ in raw:
        if offset + (0 if kind == _NO_CONTENT else size) > len(data):
            raise ValueError("its sections are larger than the file")
    _, _, _, _, offset, size, *_ = raw[names_index]
    return _names(data[offset : offset + size], [at for at, *_ in raw])


def _names(table: bytes, offsets: list[int]) -> Iterator[str]:
    """Yields the strings at these offsets.  They may overlap, so their total length is bounded."""
    left = 4 * len(table)
    for offset in offsets:
        end = table.index(b"\0", offset)
        left -= end - offset
        if left < 0:
            raise ValueError("its names have no end")
        yield table[offset:end].decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class KernelResources:
    """A kernel as compiled for one architecture.

    `name`: its symbol.  `registers`: per thread.  `max_threads`: from its launch bounds, None
    without them.  `frame`: bytes of local memory per thread, for spilled registers and arrays.
    `shared`: bytes of static shared memory per block.
    """

    name: str
    registers: int
    max_threads: int | None
    frame: int
    shared: int
    parameters: tuple[ParameterSlot, ...]


def kernel_resources(data: bytes) -> tuple[KernelResources, ...]:
    """Returns the resources of each kernel, by name.  Raises InputError if `data` is no cubin."""
    names = kernel_names(data)
    if not names:
        return ()
    sections = {name: place for place, name in enumerate(_section_names(data))}
    (table,) = struct.unpack_from("<Q", data, 0x28)
    (count,) = struct.unpack_from("<H", data, 0x3C)
    raw = [_ENTRY.unpack_from(data, table + _ENTRY.size * i) for i in range(count)]

    def content(index: int) -> bytes:
        _, _, _, _, offset, size, *_ = raw[index]
        return data[offset : offset + size]

    def text(strings: bytes, at: int) -> str:
        return strings[at : strings.index(b"\0", at)].decode()

    symbols = sections[".symtab"]
    strings = content(raw[symbols][6])
    symbol_names = [text(strings, at) for at, _ in struct.iter_unpack("<I20s", content(symbols))]
    of_module = list(_attributes(content(sections[".nv.info"])))

    def by_symbol(wanted: int) -> dict[str, int]:
        pairs = [struct.unpack_from("<II", body) for number, body in of_module if number == wanted]
        return {symbol_names[index]: value for index, value in pairs}

    registers, frames = by_symbol(_REGISTERS), by_symbol(_FRAME_SIZE)
    found = []
    for name in names:
        info = list(_attributes(content(sections[f".nv.info.{name}"])))
        bounds = [struct.unpack("<III", body) for number, body in info if number == _MAX_THREADS]
        slots = {}
        for number, body in info:
            if number == _PARAMETER:
                _, ordinal, offset, word = struct.unpack("<IHHI", body)
                slots[ordinal] = ParameterSlot(offset, word >> 18)
        shared = sections.get(f".nv.shared.{name}")
        found.append(
            KernelResources(
                name=name,
                registers=registers[name],
                max_threads=bounds[0][0] * bounds[0][1] * bounds[0][2] if bounds else None,
                frame=frames.get(name, 0),
                shared=0 if shared is None else raw[shared][5],
                parameters=tuple(slots[i] for i in sorted(slots)),
            )
        )
    return tuple(found)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields numbers and values.  Each has a format byte, a number byte and a word; in format 4 the
    word is the length of the value behind it."""
    at = 0
    while at + 4 <= len(data):
        kind, number, word = struct.unpack_from("<BBH", data, at)
        at += 4
        nbytes = word if kind == _SIZED else 0
        yield number, data[at : at + nbytes] if nbytes else word.to_bytes(2, "little")
        at += nbytes
