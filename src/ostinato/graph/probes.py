"""Kernels that look at a run of a graph from between its nodes: a timer, a digest of memory,
marks for the host, and a copy of many pieces of memory."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.driver.context import Context
from ostinato.driver.host.kernel import host_kernel
from ostinato.modules import Kernel, Source

PIECE = 1 << 16
"""Bytes of memory that have one digest."""


@host_kernel("slots: *u64, at: u32", name="ostinato_stamp")
def _stamp(launch: Any, slots: Any, at: int) -> None:
    slots[at] = time.perf_counter_ns()


@host_kernel("memory: *const bytes, nbytes: u64, size: u64, out: *out u64", name="ostinato_digest")
def _digest(launch: Any, memory: Any, nbytes: int, size: int, out: Any) -> None:
    for place, at in enumerate(range(0, nbytes, size)):
        piece = memory[at : min(at + size, nbytes)]
        out[place] = np.frombuffer(hashlib.blake2b(piece, digest_size=8).digest(), np.uint64)[0]


@host_kernel("words: *out u32, n: u32", name="ostinato_begin")
def _begin(launch: Any, words: Any, n: int) -> None:
    words[:n] = 2


@host_kernel("word: *out u32", name="ostinato_crumb")
def _crumb(launch: Any, word: Any) -> None:
    word[0] = 1


@host_kernel("word: *out u32", name="ostinato_early_crumb")
def _early_crumb(launch: Any, word: Any) -> None:
    word[0] = 1


@host_kernel("pieces: *const u64", name="ostinato_copy")
def _copy(launch: Any, pieces: Any) -> None:
    for source, target, nbytes in pieces[: 3 * launch.grid[0]].reshape(-1, 3).tolist():
        ctypes.memmove(target, source, nbytes)


@functools.cache
def source() -> Source:
    """Returns the source of the kernels."""
    text = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    return Source(
        text, host=[_stamp, _digest, _begin, _crumb, _early_crumb, _copy], name="probes.cu"
    )


def probe(context: Context, name: str) -> Kernel:
    """Returns a kernel, compiled and loaded at the first call.  Raises the errors of
    `ModuleCache.get_or_compile`."""
    kernel = context.modules.get_or_compile(source(), name)
    assert isinstance(kernel, Kernel)
    return kernel
