"""Kernels: compiled once, loaded once, ready before a capture.

`ModuleCache` (as `device.modules`) turns a `Source` and an entry name into a loaded `Kernel`: from
memory, from disk, or by compiling.  Not here: launching (`ostinato.launch`), graphs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ostinato.modules.cache import ModuleCache, ModuleCacheStatistics, PreloadItem
from ostinato.modules.disk import DiskStatistics, DiskStore, StoredKernel
from ostinato.modules.kernel import Kernel, LoadedModule
from ostinato.modules.source import CompileOptions, Source

if TYPE_CHECKING:
    from ostinato.modules.ahead import compile_ahead
    from ostinato.modules.cubin import KernelResources
    from ostinato.modules.offline import CompiledSource

__all__ = [
    "CompileOptions",
    "CompiledSource",
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
    "compile_ahead",
]


_LATER = {"CompiledSource": "offline", "KernelResources": "cubin", "compile_ahead": "ahead"}
"""Names that only compiling ahead or without a device needs, imported on first use."""


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'ostinato.modules' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ostinato.modules.{_LATER[name]}"), name)
