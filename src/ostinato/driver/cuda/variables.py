"""The variables of a cubin, with their contents right after loading.

A graph's file has a module's code and not the later contents of its `__device__` and `__constant__`
variables.  Read from the ELF file: sections `.nv.global` (zeros), `.nv.global.init` and
`.nv.constant3`, and the symbol table's objects in them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

_SECTIONS = (".nv.global", ".nv.global.init", ".nv.constant3")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOLS, _NO_CONTENT = 2, 8  # section types
_OBJECT = 1
_LARGEST = 1 << 28


@dataclass(frozen=True, slots=True)
class ModuleVariable:
    """A variable and its first content."""

    name: str
    content: bytes


@lru_cache(maxsize=64)  # a module has many kernels, and each one's check calls this
def variables_of(cubin: bytes) -> tuple[ModuleVariable, ...]:
    """Returns the variables in a cubin.  Raises ValueError, IndexError or struct.error for a
    damaged cubin; empty for data that is no 64-bit ELF file (PTX is compiled anew)."""
    if cubin[:5] != b"\x7fELF\x02":
        return ()
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    if size != _SECTION.size:
        raise ValueError(f"section headers of {size} bytes")
    sections = [_SECTION.unpack_from(cubin, table + size * i) for i in range(count)]
    name_table = sections[names_at][4]
    names = [_text(cubin, name_table + section[0]) for section in sections]
    found: dict[str, ModuleVariable] = {}
    for section in sections:
        if section[1] != _SYMBOLS:
            continue
        start, nbytes, strings = section[4], section[5], sections[section[6]][4]
        for at in range(start, start + nbytes, _SYMBOL.size):
            name, info, _, index, value, length = _SYMBOL.unpack_from(cubin, at)
            if info & 0xF != _OBJECT or index >= count or names[index] not in _SECTIONS:
                continue
            if length > _LARGEST:
                raise ValueError(f"a variable of {length} bytes")
            home = sections[index]
            first = home[4] + value
            content = bytes(length) if home[1] == _NO_CONTENT else cubin[first : first + length]
            text = _text(cubin, strings + name)
            found[text] = ModuleVariable(text, content)
    return tuple(found.values())


def same_content(
    name: str, one: Mapping[str, tuple[int, bytes]], other: Mapping[str, tuple[int, bytes]]
) -> bool:
    """True if a variable has equal content in two loaded modules of the same code.

    Both map names to address and content.  Words that point to the same place of one variable, each
    in its own module, are equal.
    """
    if one.keys() != other.keys():
        return False
    (_, mine), (_, theirs) = one[name], other[name]
    if len(mine) != len(theirs):
        return False
    for at in range(0, len(mine), 8):
        if mine[at : at + 8] == theirs[at : at + 8]:
            continue
        places = [_place(data[at : at + 8], all) for data, all in ((mine, one), (theirs, other))]
        if places[0] is None or places[0] != places[1]:
            return False
    return True


def _place(word: bytes, variables: Mapping[str, tuple[int, bytes]]) -> tuple[str, int] | None:
    """Returns the variable that a word points into, and the offset."""
    value = int.from_bytes(word, "little") if len(word) == 8 else 0
    for name, (address, content) in variables.items():
        if address <= value <= address + len(content):
            return name, value - address
    return None


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode("utf-8", "replace")
