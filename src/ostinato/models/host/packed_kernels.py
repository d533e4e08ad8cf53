"""The program's kernels in C, on packed weights, for a decoder on the CPU if the extension
`_native` was built.  Its sources are in `native/`.

They replace the kernels of `host.kernels` one by one: names and parameters are the same, except
that matrices are `PackedMatrix` bytes.  The kernels that choose and advance tokens are NumPy's in
both.  Weights are dequantised in registers, to the same bits as `dequantise_rows`; sums are
float32.  The instruction set is chosen at run time.

The same rows give the same bits for any numbers of rows, threads and pieces, unlike NumPy's
kernels.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from ostinato import HostKernel, settings
from ostinato.driver.extension import load_extension
from ostinato.driver.signature import Parameter, Signature
from ostinato.models.arguments import whole
from ostinato.models.host.kernels import HOST_KERNELS

MOST_THREADS = 1024
# The default's limit: with more threads the waits for each other cost more than the work saves.
_DEFAULT_MOST = 16
_PACKED = ("table", "weight")  # the parameters that are matrices

_extension, _missing = load_extension("ostinato.models._native")
if _extension is not None and not _extension.INSTRUCTIONS:
    _extension, _missing = None, "this processor has neither AVX2 nor AVX-512"


def compiled() -> bool:
    """True if the extension was loaded, and this processor has the instructions of its kernels."""
    return _extension is not None


def description() -> str:
    """Returns the kind of the CPU's kernels in words, with the reason if they are not compiled."""
    if _extension is None:
        return f"NumPy; of the compiled kernels: {_missing or 'left out'}"
    return f"compiled, {_extension.INSTRUCTIONS[0]}, {default_threads()} threads"


@contextmanager
def without_extension() -> Iterator[None]:
    """Makes decoders constructed in the block run without the extension, for tests and comparisons.
    Only one thread at a time may enter."""
    global _extension
    kept, _extension = _extension, None
    try:
        yield
    finally:
        _extension = kept


def default_threads() -> int:
    """Returns the number of threads: OSTINATO_THREADS, else the number of processors that this
    process may use, 16 at most.  Raises SettingsError for an invalid value of the variable."""
    wanted = settings.THREADS.read()
    if wanted is not None:
        return min(wanted, MOST_THREADS)
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        count = os.cpu_count() or 1
    return max(1, min(count, _quota(Path("/sys/fs/cgroup/cpu.max")), _DEFAULT_MOST))


def _quota(path: Path) -> int:
    """Returns the number of whole processors in a container's quota of CPU time."""
    with suppress(OSError, ValueError):
        share, period = path.read_text(encoding="ascii").split()
        if share != "max" and int(period) > 0:
            return max(1, int(share) // int(period))
    return MOST_THREADS


def packed_kernels(threads: int | None = None) -> Mapping[str, HostKernel]:
    """Returns the kernels by name, on `threads` threads; `default_threads` if None.

    Decoders with the same number share the threads; a kernel that is launched while they are busy
    runs on the calling thread only.  Raises InputError for a number outside 1 to `MOST_THREADS`,
    SettingsError as `default_threads` does.
    """
    count = default_threads() if threads is None else whole(threads, "threads", 1, MOST_THREADS)
    return _shared(count)


@functools.cache
def _shared(threads: int) -> Mapping[str, HostKernel]:
    return MappingProxyType(kernels_of(threads))


def kernels_of(threads: int, instructions: str | None = None) -> dict[str, HostKernel]:
    """Returns kernels with threads of their own, which end when the kernels are collected.

    `instructions`: one of the extension's INSTRUCTIONS; the best one if None.
    """
    native = _extension.Kernels(threads, instructions)
    kernels = dict(HOST_KERNELS)
    for name, kernel in HOST_KERNELS.items():
        function = getattr(native, name, None)
        if function is not None:
            parameters = tuple(map(_packed, kernel.signature.parameters))
            kernels[name] = HostKernel(name, function, Signature(parameters))
    return kernels


def _packed(parameter: Parameter) -> Parameter:
    if parameter.name not in _PACKED:
        return parameter
    return replace(parameter, type="u8", dtype=np.dtype(np.uint8))
