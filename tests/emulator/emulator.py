"""The CUDA kernels on the CPU: compiled as C++ with `emulate.h`, run as fibers.  Needs g++.

Every buffer ends at a page that nobody may touch, so that an index past the end is a fault at the
instruction that has it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import ostinato as ost
from ostinato.driver.api import LaunchConfig
from ostinato.driver.host.kernel import HostKernel, HostLaunch
from ostinato.models.cuda.lowering import CudaLaunch
from ostinato.modules import CompileOptions

HERE = Path(__file__).parent

# Each library has statics and fibers of its own: no symbols are shared but those of `_ENTRY`.
_FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-DEMULATED"),
    *("-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique"),
    *("-fno-exceptions", "-fno-asynchronous-unwind-tables"),  # less to write
    *("-Wno-unknown-pragmas", "-Wno-unused-function"),
)
# Linked libraries stay needed, also `libraries.so`, which has no symbols of its own.
_SHARED = ("-shared", "-Wl,--no-as-needed")
_HEADER, _RUNTIME = ((HERE / f"emulate.{ending}").read_text() for ending in ("h", "cpp"))

_ENTRY = """
extern "C" __attribute__((visibility("default"))) unsigned long long emulate_KERNEL_NAME(
    void** arguments, const int* grid, const int* block, int shared, int together) {
    emulated::prefetched_bytes = 0;
    emulated::launch_kernel<KERNEL_NAME>(arguments, grid, block, shared, together);
    return emulated::prefetched_bytes;
}
"""

_libc = ctypes.CDLL(None, use_errno=True)


_ONE_AT_A_TIME = threading.Lock()
"""A library keeps its launch in variables of its own, and all emulators of a process share it."""


class Emulator:
    """Runs `CudaLaunch`es over NumPy arrays."""

    name = "emulator"

    def __init__(self, *, threads: bool = False) -> None:
        """`threads`: launches of several threads run side by side, and may wait for each other."""
        self.prefetched = 0  # bytes, by the last launch
        self._flags = ("-DEMULATED_THREADS",) if threads else ()
        self._one_at_a_time: AbstractContextManager[object]
        self._one_at_a_time = nullcontext() if threads else _ONE_AT_A_TIME
        self._libraries: dict[tuple[ost.Source, CompileOptions, str], ctypes.CDLL] = {}
        self._expected: dict[tuple[ost.Source, CompileOptions], set[str]] = {}
        self._folder = Path(tempfile.gettempdir()) / f"ostinato-emulator-{os.getuid()}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        status = self._folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(
                f"{self._folder} can be written by others, and code is loaded from it: delete it"
            )

    def array(self, values: np.ndarray) -> np.ndarray:
        """A copy in memory that ends at a page without access."""
        page = mmap.PAGESIZE
        size = max(1, -(-values.nbytes // page)) * page
        region = mmap.mmap(-1, size + 2 * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(region))
        for edge in (base, base + page + size):
            if _libc.mprotect(ctypes.c_void_p(edge), page, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        start = page + size - -(-values.nbytes // 16) * 16
        flat = np.frombuffer(region, values.dtype, values.size, start)
        flat[:] = values.reshape(-1)
        return flat.reshape(values.shape)

    def read(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def write(self, array: np.ndarray, values: np.ndarray) -> None:
        array[...] = values

    def expect(self, *launches: CudaLaunch) -> None:
        """Says what will be launched: a source's kernels with the same options are built at once,
        when the first is."""
        for one in launches:
            if (one.source, one.options, one.kernel) not in self._libraries:
                self._expected.setdefault((one.source, one.options), set()).add(one.kernel)

    def build(self, source: ost.Source, kernel: str, options: CompileOptions) -> None:
        """Builds what is expected now, instead of at the first launch."""
        self._library(CudaLaunch(kernel, source, options, LaunchConfig(1, 1), ()))

    def launch(self, launch: CudaLaunch, values: Mapping[str, Any]) -> None:
        """`values`: by parameter name, arrays of this emulator or numbers."""
        library = self._library(launch)
        holders = []
        signature = launch.source.signature(launch.kernel)
        assert signature is not None, f"{launch.kernel} has no signature"
        for parameter in signature.parameters:
            value = values[parameter.name]
            if parameter.pointer and (value is None or isinstance(value, int)):
                holders.append(ctypes.c_void_p(value))  # the null pointer
            elif parameter.pointer:
                holders.append(ctypes.c_void_p(value.ctypes.data))
            elif parameter.type == "f32":
                holders.append(ctypes.c_float(value))
            elif parameter.type.startswith("bytes"):
                holders.append(ctypes.create_string_buffer(value, len(value)))
            elif parameter.type == "cond":  # the address where the emulated runtime puts the value
                holders.append(ctypes.c_uint64(value))
            else:
                holders.append(ctypes.c_uint32(value))
        pointers = (ctypes.c_void_p * len(holders))(*[ctypes.addressof(h) for h in holders])
        config = launch.config
        run = getattr(library, f"emulate_{launch.kernel}")
        run.restype = ctypes.c_ulonglong
        with self._one_at_a_time:
            self.prefetched = run(
                pointers,
                (ctypes.c_int * 3)(*config.grid),
                (ctypes.c_int * 3)(*config.block),
                config.shared,
                int(config.cooperative or config.cluster is not None),
            )

    def synchronize(self) -> None:
        pass

    def host_kernel(
        self,
        source: ost.Source,
        name: str,
        options: CompileOptions | None = None,
        config: LaunchConfig | None = None,
    ) -> HostKernel:
        """A kernel of a CUDA source, for the host driver.

        It runs in the shape `config`, or in that of each launch if None.
        """
        signature = source.signature(name)
        assert signature is not None, f"{name} has no signature"
        names = [parameter.name for parameter in signature.parameters]
        chosen = options or CompileOptions()
        self.expect(CudaLaunch(name, source, chosen, config or LaunchConfig(1, 1), ()))

        def run(how: HostLaunch, *values: Any) -> None:
            given = dict(zip(names, values, strict=True))
            handle, wanted = given.get("condition"), ctypes.c_uint32()
            if handle is not None:  # the emulated runtime writes the value where the handle says
                given["condition"] = ctypes.addressof(wanted)
            shape = config or LaunchConfig(how.grid, how.block, how.shared, cluster=how.cluster)
            self.launch(CudaLaunch(name, source, chosen, shape, ()), given)
            if handle is not None:
                how.set_conditional(handle, wanted.value)

        return HostKernel(name, run, signature)

    def _library(self, launch: CudaLaunch) -> ctypes.CDLL:
        unit = (launch.source, launch.options)
        known = self._libraries.get((*unit, launch.kernel))
        if known is not None:
            return known
        wanted = {launch.kernel, *self._expected.pop(unit, ())}
        if not launch.options.defines:  # all tests share the one way to build it
            wanted.update(launch.source.signatures)
        kernels = sorted(wanted)
        defines = [f"-D{name}={value}" for name, value in launch.options.defines]
        texts = [launch.source.cuda or "", *launch.source.headers.values()]
        key = _key(*texts, _HEADER, _RUNTIME, *_FLAGS, *self._flags, *defines, *kernels)
        target, source = self._folder / f"{key}.so", launch.source
        with _alone(target) as missing:
            if missing:
                runtime = _runtime(self._folder, self._flags)
                with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                    for name, text in source.headers.items():
                        Path(folder, name).write_text(text)
                    _build(
                        target,
                        *(*_SHARED, f"-I{runtime}", f"-I{folder}", str(runtime / "emulate.o")),
                        *("-include", "emulate.h", *self._flags, *defines, "-x", "c++", "-"),
                        *("-x", "none", "-nodefaultlibs", str(runtime / "libraries.so"), "-lgcc"),
                        text=f'#line 1 "{source.name}"\n{source.cuda}\n'
                        + "".join(_ENTRY.replace("KERNEL_NAME", kernel) for kernel in kernels),
                    )
        library = ctypes.CDLL(str(target))
        for kernel in kernels:
            self._libraries[(*unit, kernel)] = library
        return library


def _runtime(folder: Path, flags: tuple[str, ...]) -> Path:
    """A folder with emulate.h, precompiled, and emulate.cpp as an object: each takes longer than a
    kernel.  And with a library that needs those of C++: linking with these takes a quarter of the
    time of a kernel."""
    made = folder / _key(_HEADER, _RUNTIME, *_FLAGS, *_SHARED, *flags)
    made.mkdir(exist_ok=True)
    header, last = made / "emulate.h", made / "emulate.o"
    with _alone(last) as missing:
        if missing:
            header.write_text(_HEADER)
            # -w: a header that is compiled for itself has a `#pragma once` for nothing.
            _build(made / "emulate.h.gch", *flags, "-w", "-x", "c++-header", str(header))
            _build(made / "libraries.so", *flags, *_SHARED, "-x", "c++", "-")
            _build(last, *flags, "-c", f"-I{made}", "-x", "c++", "-", text=_RUNTIME)
    return made


@contextmanager
def _alone(target: Path) -> Iterator[bool]:
    """Whether a file is still to be built, by this thread alone: ranks and other processes that
    need the same one wait for it."""
    if target.exists():
        yield False
        return
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # goes with the file, also if the process is killed
        yield not target.exists()


def _key(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


def _build(target: Path, *arguments: str, text: str = "") -> None:
    """In one step: what is killed leaves no half of it."""
    temporary = target.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
    subprocess.run(
        ["g++", *_FLAGS, "-o", str(temporary), *arguments], input=text, text=True, check=True
    )
    temporary.replace(target)
