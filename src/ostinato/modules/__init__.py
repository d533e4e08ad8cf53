"""Kernels: compiled once, loaded once, ready before a capture.

`ModuleCache` (as `device.modules`) turns a `Source` and an entry name into a loaded `Kernel`: from
memory, from disk, or by compiling.  Not here: launching (`ostinato.launch`), graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.modules.cache import ModuleCache, ModuleCacheStatistics, PreloadItem
from ostinato.modules.disk import DiskStatistics, DiskStore, StoredKernel
from ostinato.modules.kernel import Kernel, LoadedModule
from ostinato.modules.source import CompileOptions, Source

if TYPE_CHECKING:
    from ostinato.modules.ahead import CompilerPool
    from ostinato.modules.cubin import KernelResources
    from ostinato.modules.offline import CompiledSource

__all__ = [
    "CompileOptions",
    "CompiledSource",
    "CompilerPool",
    "DiskStatistics",
    "DiskStore",
    "Kernel",
    "KernelResources",
    "LoadedModule",
    "ModuleCache",
    "ModuleCacheStatistics",
    "PreloadItem",
    "Source",
    "StoredKernel",
]


def __getattr__(name: str) -> object:
    """Imports what only compiling ahead or without a device needs, on first use."""
    if name == "CompilerPool":
        from ostinato.modules.ahead import CompilerPool

        return CompilerPool
    if name == "KernelResources":
        from ostinato.modules.cubin import KernelResources

        return KernelResources
    if name == "CompiledSource":
        from ostinato.modules.offline import CompiledSource

        return CompiledSource
    raise AttributeError(f"module 'ostinato.modules' has no attribute {name!r}")
