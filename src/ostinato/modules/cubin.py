"""What a cubin says of its kernels, read from the ELF file itself: no driver, no cuobjdump.

Section and attribute numbers as in NVIDIA's `cuobjdump -elf` output: a `.text.<kernel>` section for
each kernel, a `.nv.info.<kernel>` section with its attributes and one `.nv.info` for the module.
An attribute is a format byte, a number byte and a 16-bit value or length.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ostinato.driver.api import ParameterSlot
from ostinato.errors import InputError

__all__ = ["KernelResources", "kernel_names", "kernel_resources"]

_SIZED = 4  # the format whose 16-bit word is the length of what follows
_MAX_THREADS, _PARAMETER, _FRAME_SIZE, _REGISTERS = 0x05, 0x17, 0x11, 0x2F
_FUNCTION_SYMBOL = 2


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    data: bytes
    size: int
    link: int


def _sections(data: bytes) -> list[_Section]:
    if data[:5] != b"\x7fELF\x02":
        raise InputError("this is not a cubin (a 64-bit ELF file)")
    try:
        (table,) = struct.unpack_from("<Q", data, 0x28)
        entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
        raw = [
            struct.unpack_from("<IIQQQQIIQQ", data, table + entry_size * i) for i in range(count)
        ]
        names_at = raw[names_index][4]
        found = []
        for name_at, kind, _, _, offset, size, link, *_ in raw:
            begin = names_at + name_at
            name = data[begin : data.index(b"\0", begin)].decode("utf-8", "replace")
            body = b"" if kind == 8 else data[offset : offset + size]  # NOBITS has no content
            found.append(_Section(name, body, size, link))
    except (struct.error, IndexError, ValueError) as error:
        raise InputError(f"this cubin is damaged: {error}") from None
    return found


def kernel_names(data: bytes) -> tuple[str, ...]:
    """The entry names in a cubin.  Raises InputError if it is none."""
    return tuple(
        sorted(
            s.name.removeprefix(".nv.info.")
            for s in _sections(data)
            if s.name.startswith(".nv.info.") and _attributes(s.data, _PARAMETER, _MARK_ENTRY)
        )
    )


_MARK_ENTRY = 0x19  # EIATTR_CBANK_PARAM_SIZE: entries have it, device functions do not


def _attributes(data: bytes, *numbers: int) -> list[bytes]:
    found, at = [], 0
    while at + 4 <= len(data):
        kind, number, word = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == _SIZED:
            body = data[at : at + word]
            at += word
        else:
            body = word.to_bytes(2, "little")
        if number in numbers:
            found.append(body)
    return found


def kernel_resources(data: bytes) -> tuple[KernelResources, ...]:
    """Registers, launch bounds, stack and parameters of each kernel, in name order."""
    sections = _sections(data)
    by_name = {s.name: s for s in sections}
    symbols = _symbols(sections)
    module = by_name[".nv.info"].data if ".nv.info" in by_name else b""
    registers = _by_symbol(module, _REGISTERS, symbols)
    frames = _by_symbol(module, _FRAME_SIZE, symbols)
    found = []
    for name in kernel_names(data):
        info = by_name[f".nv.info.{name}"].data
        bounds = _attributes(info, _MAX_THREADS)
        threads = None
        if bounds:
            x, y, z = struct.unpack_from("<III", bounds[0])
            threads = x * y * z
        shared = by_name.get(f".nv.shared.{name}")
        found.append(
            KernelResources(
                name=name,
                registers=registers.get(name, 0),
                max_threads=threads,
                frame=frames.get(name, 0),
                shared=0 if shared is None else shared.size,
                parameters=_parameters(_attributes(info, _PARAMETER)),
            )
        )
    return tuple(found)


def _parameters(raw: list[bytes]) -> tuple[ParameterSlot, ...]:
    """index, ordinal, offset, and a word whose bits 18 on are the size."""
    slots = {}
    for body in raw:
        _, ordinal, offset, word = struct.unpack_from("<IHHI", body)
        slots[ordinal] = ParameterSlot(offset, word >> 18)
    return tuple(slots[i] for i in sorted(slots))


def _symbols(sections: list[_Section]) -> list[str]:
    table = next((s for s in sections if s.name == ".symtab"), None)
    if table is None:
        return []
    names = sections[table.link].data
    found = []
    for at in range(0, len(table.data), 24):
        name_at, info = struct.unpack_from("<IB", table.data, at)
        end = names.index(b"\0", name_at)
        is_function = info & 0xF == _FUNCTION_SYMBOL
        found.append(names[name_at:end].decode("utf-8", "replace") if is_function else "")
    return found


def _by_symbol(data: bytes, number: int, symbols: list[str]) -> dict[str, int]:
    found = {}
    for body in _attributes(data, number):
        index, value = struct.unpack_from("<II", body)
        if index < len(symbols):
            found[symbols[index]] = value
    return found
