"""Kernel names as in their source: C++ compilers encode types into them.

The C++ runtime library, if the process has it or can load it, demangles them; otherwise names stay
unchanged.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_LIBRARIES = ("libstdc++.so.6", "libc++abi.so.1")


@functools.lru_cache(maxsize=4096)
def demangled(name: str) -> str:
    """Returns "scale<float>" for "_Z5scaleIfEvPT_j", without parameters and result type."""
    take_apart = _function() if name.startswith("_Z") else None
    if take_apart is None:
        return name
    status = ctypes.c_int()
    text = take_apart(name.encode(), None, None, ctypes.byref(status))
    try:
        if status.value or not text:
            return name
        return _without_parameters(ctypes.string_at(text).decode(errors="replace"))
    finally:
        _free()(text)


@functools.cache
def _function() -> Any | None:
    """Returns `__cxa_demangle` of the Itanium C++ ABI, section 3.4, or None."""
    for library in _LIBRARIES:
        try:
            found = ctypes.CDLL(library).__cxa_demangle
        except (OSError, AttributeError):
            continue
        found.argtypes = (ctypes.c_char_p, *(ctypes.c_void_p,) * 3)
        found.restype = ctypes.c_void_p
        return found
    return None


@functools.cache
def _free() -> Any:
    free = ctypes.CDLL(None).free
    free.argtypes, free.restype = (ctypes.c_void_p,), None
    return free


def _without_parameters(text: str) -> str:
    """Returns "scale<float>" for "void scale<float>(float*, unsigned int)"."""
    depth, start, end = 0, 0, len(text)
    for at, character in enumerate(text):
        if character in "<(":
            if character == "(" and depth == 0 and not text.startswith("(anonymous", at):
                end = at
                break
            depth += 1
        elif character in ">)":
            depth -= 1
        elif character == " " and depth == 0:
            start = at + 1
    return text[start:end] or text
