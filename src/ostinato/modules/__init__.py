"""Kernels: compiled once, loaded once, ready before a capture.

`ModuleCache` (as `device.modules`) turns a `Source` and an entry name into a loaded `Kernel`, from
memory, from disk, or compiled now.  Not here: launching (`ostinato.launch`), graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.modules.cache import CacheStatistics, ModuleCache, PreloadItem
from ostinato.modules.disk import DiskStatistics, DiskStore, StoredKernel
from ostinato.modules.kernel import Kernel, LoadedModule
from ostinato.modules.source import CompileOptions, Source

if TYPE_CHECKING:
    from ostinato.modules.ahead import CompilerPool

__all__ = [
    "CacheStatistics",
    "CompileOptions",
    "CompilerPool",
    "DiskStatistics",
    "DiskStore",
    "Kernel",
    "LoadedModule",
    "ModuleCache",
    "PreloadItem",
    "Source",
    "StoredKernel",
]


def __getattr__(name: str) -> object:
    """What compiles ahead, in processes of its own, is loaded when it is first used."""
    if name != "CompilerPool":
        raise AttributeError(f"module 'ostinato.modules' has no attribute {name!r}")
    from ostinato.modules.ahead import CompilerPool

    return CompilerPool
