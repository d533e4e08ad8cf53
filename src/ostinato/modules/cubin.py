"""What a cubin says of its kernels, read from the ELF file itself: no driver, no cuobjdump.

Section and attribute numbers as in NVIDIA's `cuobjdump -elf` output: a `.text.<kernel>` section for
each kernel, a `.nv.info.<kernel>` section with its attributes and one `.nv.info` for the module.
An attribute is a format byte, a number byte and a 16-bit value or length.

A file that is no cubin, or a damaged one, is an InputError, or is read as far as it goes; the work
and the memory are bounded by its size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ostinato.driver.api import ParameterSlot
from ostinato.errors import InputError

__all__ = ["KernelResources", "kernel_names", "kernel_resources"]

_SIZED = 4  # the format whose 16-bit word is the length of what follows
_MAX_THREADS, _PARAMETER, _FRAME_SIZE, _REGISTERS = 0x05, 0x17, 0x11, 0x2F
_MARK_ENTRY = 0x19  # EIATTR_CBANK_PARAM_SIZE: entries have it, device functions do not
_FUNCTION_SYMBOL = 2
_NO_CONTENT = 8
_ENTRY = struct.Struct("<IIQQQQIIQQ")


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
    data: memoryview
    size: int
    link: int


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise InputError(f"this cubin is damaged: {error}") from None


class _Names:
    """A table of strings.  Names may share bytes, and so be more than the file in all."""

    def __init__(self, table: memoryview) -> None:
        self._table = table.tobytes()
        self._left = 4 * len(self._table)

    def at(self, offset: int) -> str:
        end = self._table.index(b"\0", offset)
        self._left -= end - offset
        if self._left < 0:
            raise ValueError("its names have no end")
        return self._table[offset:end].decode("utf-8", "replace")


def _sections(data: bytes) -> list[_Section]:
    if data[:5] != b"\x7fELF\x02":
        raise InputError("this is not a cubin (a 64-bit ELF file)")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    if entry_size != _ENTRY.size:
        raise ValueError(f"section headers of {entry_size} bytes")
    raw = [_ENTRY.unpack_from(data, table + entry_size * i) for i in range(count)]
    whole, left, bodies = memoryview(data), len(data), []
    for _, kind, _, _, offset, size, *_ in raw:
        nbytes = 0 if kind == _NO_CONTENT else size
        left -= nbytes
        if left < 0 or offset + nbytes > len(data):
            raise ValueError("its sections are larger than the file")
        bodies.append(whole[offset : offset + nbytes])
    names = _Names(bodies[names_index])
    return [
        _Section(names.at(at), body, size, link)
        for (at, _, _, _, _, size, link, *_), body in zip(raw, bodies, strict=True)
    ]


def kernel_names(data: bytes) -> tuple[str, ...]:
    """The entry names in a cubin.  Raises InputError if it is none, or damaged."""
    with _reading():
        return _kernel_names(_sections(data))


def _kernel_names(sections: list[_Section]) -> tuple[str, ...]:
    return tuple(
        sorted(
            {
                s.name.removeprefix(".nv.info.")
                for s in sections
                if s.name.startswith(".nv.info.") and _attributes(s.data, _PARAMETER, _MARK_ENTRY)
            }
        )
    )


def _attributes(data: memoryview, *numbers: int) -> list[bytes]:
    found, at = [], 0
    while at + 4 <= len(data):
        kind, number, word = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == _SIZED:
            body = data[at : at + word].tobytes()
            at += word
        else:
            body = word.to_bytes(2, "little")
        if number in numbers:
            found.append(body)
    return found


def kernel_resources(data: bytes) -> tuple[KernelResources, ...]:
    """Registers, launch bounds, stack and parameters of each kernel, in name order.

    Raises InputError if it is no cubin, or damaged.
    """
    with _reading():
        sections = _sections(data)
        by_name = {s.name: s for s in sections}
        module = by_name[".nv.info"].data if ".nv.info" in by_name else memoryview(b"")
        symbols = _symbols(sections, by_name.get(".symtab"))
        registers = _by_symbol(module, _REGISTERS, symbols)
        frames = _by_symbol(module, _FRAME_SIZE, symbols)
        return tuple(
            _resources(name, by_name, registers.get(name, 0), frames.get(name, 0))
            for name in _kernel_names(sections)
        )


def _resources(
    name: str, sections: dict[str, _Section], registers: int, frame: int
) -> KernelResources:
    info = sections[f".nv.info.{name}"].data
    bounds = _attributes(info, _MAX_THREADS)
    threads = None
    if bounds:
        x, y, z = struct.unpack_from("<III", bounds[0])
        threads = x * y * z
    shared = sections.get(f".nv.shared.{name}")
    return KernelResources(
        name=name,
        registers=registers,
        max_threads=threads,
        frame=frame,
        shared=0 if shared is None else shared.size,
        parameters=_parameters(_attributes(info, _PARAMETER)),
    )


def _parameters(raw: list[bytes]) -> tuple[ParameterSlot, ...]:
    """index, ordinal, offset, and a word whose bits 18 on are the size."""
    slots = {}
    for body in raw:
        _, ordinal, offset, word = struct.unpack_from("<IHHI", body)
        slots[ordinal] = ParameterSlot(offset, word >> 18)
    return tuple(slots[i] for i in sorted(slots))


def _symbols(sections: list[_Section], table: _Section | None) -> list[str]:
    """The names of functions by the number of their symbol; "" for other symbols."""
    if table is None:
        return []
    names = _Names(sections[table.link].data)
    found = []
    for at in range(0, len(table.data), 24):
        name_at, info = struct.unpack_from("<IB", table.data, at)
        found.append(names.at(name_at) if info & 0xF == _FUNCTION_SYMBOL else "")
    return found


def _by_symbol(data: memoryview, number: int, symbols: list[str]) -> dict[str, int]:
    found = {}
    for body in _attributes(data, number):
        index, value = struct.unpack_from("<II", body)
        if index < len(symbols):
            found[symbols[index]] = value
    return found
