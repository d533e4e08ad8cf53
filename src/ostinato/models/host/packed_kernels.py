"""The layer program's kernels in C, on packed weights: a decoder on the CPU runs them if the
extension `_native` was built.  Its sources are in `native/`.

They replace the host kernels of `host.kernels` one by one: names and parameters are the same,
except that matrices are `PackedMatrix` bytes.  The kernels that choose and advance tokens are
NumPy's in both.  Weights are dequantised in registers, to the same bits as `dequantise_rows`; sums
are float32.  The instruction set is chosen when the program runs.

The same rows give the same bits, whatever the numbers of rows, threads and pieces are; NumPy's
kernels do not guarantee that.
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
# More threads than this wait longer for each other than they work; `threads` may ask for them.
_DEFAULT_MOST = 16
_PACKED = ("table", "weight")  # the parameters that are matrices

_extension, _missing = load_extension("ostinato.models._native")


def compiled() -> bool:
    """Whether the extension was loaded."""
    return _extension is not None


def description() -> str:
    """What decodes on the CPU, in words; if it is not the compiled kernels, the reason too."""
    if _extension is None:
        return f"NumPy; of the compiled kernels: {_missing or 'left out'}"
    return f"compiled, {_extension.INSTRUCTIONS[0]}, {default_threads()} threads"


@contextmanager
def without_extension() -> Iterator[None]:
    """Decoders that are made inside run as if the extension was not built: for tests, and to
    measure what it gains.  One thread at a time may enter."""
    global _extension
    kept, _extension = _extension, None
    try:
        yield
    finally:
        _extension = kept


def default_threads() -> int:
    """The number of threads: OSTINATO_THREADS, else the processors that this process may use, 16 at
    most.  Raises SettingsError if the variable cannot be read."""
    wanted = settings.THREADS.read()
    if wanted is not None:
        return min(wanted, MOST_THREADS)
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        count = os.cpu_count() or 1
    return max(1, min(count, _quota(Path("/sys/fs/cgroup/cpu.max")), _DEFAULT_MOST))


def _quota(path: Path) -> int:
    """The number of processors that a container's share of CPU time amounts to."""
    with suppress(OSError, ValueError):
        share, period = path.read_text(encoding="ascii").split()
        if share != "max" and int(period) > 0:
            return max(1, int(share) // int(period))
    return MOST_THREADS


def packed_kernels(threads: int | None = None) -> Mapping[str, HostKernel]:
    """The kernels by name, on `threads` threads; `default_threads` if None.

    Decoders with the same number share the threads; a kernel that is launched while they are busy
    runs on the calling thread alone.  Raises InputError for a number that is not from 1 to
    `MOST_THREADS`, SettingsError as `default_threads`.
    """
    count = default_threads() if threads is None else whole(threads, "threads", 1, MOST_THREADS)
    return _shared(count)


@functools.cache
def _shared(threads: int) -> Mapping[str, HostKernel]:
    return MappingProxyType(kernels_of(threads))


def kernels_of(threads: int, instructions: str | None = None) -> dict[str, HostKernel]:
    """Kernels with threads of their own, which end when the kernels are collected.

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
