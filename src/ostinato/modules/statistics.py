"""What a module cache answers of itself."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.modules.disk import DiskStatistics

__all__ = ["CacheStatistics"]


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What a module cache did since it was made.

    `hits` were answered from memory; `waits` waited for another thread's compilation;
    `known_failures` raised a remembered CompileError; `nbytes` is code and source text held.
    """

    modules: int
    nbytes: int
    hits: int
    misses: int
    waits: int
    compiles: int
    compile_seconds: float
    failures: int
    known_failures: int
    evictions: int
    disk: DiskStatistics | None
