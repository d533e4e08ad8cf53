"""The layer program's kernels on packed weights, compiled: what a decoder on the CPU runs where the
extension `_native` was built.  Its sources are in `native/`.

They are host kernels as those of `host.kernels`, and take their place one by one: the same names
and parameters, except that matrices are `PackedMatrix` bytes.  What chooses and advances tokens
stays in NumPy.  Weights are dequantised in registers, to the values of `dequantise_rows` bit by
bit; sums are float32.  Which instructions do it is found out when the program runs.

The same rows give the same bits however many rows, threads or pieces there are, which NumPy's
kernels do not guarantee.
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
from ostinato.driver.launcher import load_extension
from ostinato.driver.signature import Parameter, Signature
from ostinato.models.arguments import whole
from ostinato.models.host.kernels import HOST_KERNELS

__all__ = [
    "MOST_THREADS",
    "compiled",
    "default_threads",
    "description",
    "kernels_of",
    "packed_kernels",
    "without_extension",
]

MOST_THREADS = 1024
# More threads than this wait longer for each other than they work; `threads` may ask for them.
_DEFAULT_MOST = 16
_PACKED = ("table", "weight")  # the parameters that are matrices

_extension, _missing = load_extension("ostinato.models._native")


def compiled() -> bool:
    """Whether there are compiled kernels."""
    return _extension is not None


def description() -> str:
    """What decodes on the CPU and, if it is not the compiled kernels, why, in words."""
    if _extension is None:
        return f"NumPy; of the compiled kernels: {_missing or 'left out'}"
    return f"compiled, {_extension.INSTRUCTIONS[0]}, {default_threads()} threads"


@contextmanager
def without_extension() -> Iterator[None]:
    """Decoders made inside run as where the extension was not built: for tests, and to measure what
    it gains.  Not for several threads to enter."""
    global _extension
    kept, _extension = _extension, None
    try:
        yield
    finally:
        _extension = kept


def default_threads() -> int:
    """How many threads work where nobody says otherwise: as many as there are processors for this
    process, 16 at most.  OSTINATO_THREADS says otherwise; raises SettingsError if it cannot."""
    wanted = settings.THREADS.read()
    if wanted is not None:
        return min(wanted, MOST_THREADS)
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        count = os.cpu_count() or 1
    return max(1, min(count, _quota(Path("/sys/fs/cgroup/cpu.max")), _DEFAULT_MOST))


def _quota(path: Path) -> int:
    """Processors that a container's share of time amounts to."""
    with suppress(OSError, ValueError):
        share, period = path.read_text(encoding="ascii").split()
        if share != "max" and int(period) > 0:
            return max(1, int(share) // int(period))
    return MOST_THREADS


def packed_kernels(threads: int | None = None) -> Mapping[str, HostKernel]:
    """The kernels by name, on so many threads; `default_threads` if None.

    Decoders with the same number share the threads: who finds them at work does its own alone.
    Raises InputError for a number that is none, SettingsError as `default_threads`.
    """
    count = default_threads() if threads is None else whole(threads, "threads", 1, MOST_THREADS)
    return _shared(count)


@functools.cache
def _shared(threads: int) -> Mapping[str, HostKernel]:
    return MappingProxyType(kernels_of(threads))


def kernels_of(threads: int, instructions: str | None = None) -> dict[str, HostKernel]:
    """Kernels with threads of their own, which end with them.

    `instructions`: one of the extension's INSTRUCTIONS; the best if None.
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
