"""Kernels: compiled once, loaded once, ready before a capture.

`ModuleCache` (as `device.modules`) turns a `Source` and an entry name into a loaded `Kernel`, from
memory, from disk, or compiled now.  Not here: launching (`ostinato.launch`), graphs.
"""

from ostinato.modules.ahead import CompilerPool
from ostinato.modules.cache import CacheStatistics, ModuleCache, PreloadItem
from ostinato.modules.disk import DiskStatistics, DiskStore, StoredKernel
from ostinato.modules.kernel import Kernel, LoadedModule
from ostinato.modules.source import CompileOptions, Source

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
