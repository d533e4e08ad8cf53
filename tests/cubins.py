"""What a sound cubin says of its kernels: registers, stack, launch bounds, parameters.

Attribute numbers as in `cuobjdump -elf`.  The file is one that NVRTC has just made: it is trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ostinato.driver.api import ParameterSlot
from ostinato.modules.cubin import kernel_names

_MAX_THREADS, _FRAME_SIZE, _PARAMETER, _REGISTERS = 0x05, 0x11, 0x17, 0x2F
_ENTRY = struct.Struct("<IIQQQQIIQQ")


@dataclass(frozen=True)
class KernelResources:
    """A kernel as compiled.

    `max_threads` is from its launch bounds, None without any; `frame` is bytes of stack a thread;
    `shared` static shared memory in bytes.
    """

    name: str
    registers: int
    max_threads: int | None
    frame: int
    shared: int
    parameters: tuple[ParameterSlot, ...]


def kernel_resources(data: bytes) -> tuple[KernelResources, ...]:
    """Of each kernel, in name order.  Raises InputError if it is no cubin."""
    names = kernel_names(data)
    (table,) = struct.unpack_from("<Q", data, 0x28)
    count, names_index = struct.unpack_from("<HH", data, 0x3C)
    raw = [_ENTRY.unpack_from(data, table + _ENTRY.size * i) for i in range(count)]

    def content(index: int) -> bytes:
        _, _, _, _, offset, size, *_ = raw[index]
        return data[offset : offset + size]

    def text(strings: bytes, at: int) -> str:
        return strings[at : strings.index(b"\0", at)].decode()

    sections = {text(content(names_index), entry[0]): i for i, entry in enumerate(raw)}
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
    """Numbers and values: a format byte, a number byte, a word; format 4 has so many bytes more."""
    at = 0
    while at + 4 <= len(data):
        kind, number, word = struct.unpack_from("<BBH", data, at)
        at += 4
        nbytes = word if kind == 4 else 0
        yield number, data[at : at + nbytes] if nbytes else word.to_bytes(2, "little")
        at += nbytes
