"""The machine code of other libraries' kernels, kept when the driver loads it.

The driver returns no code.  CUPTI calls a function of this library with each cubin that is loaded
while the collector listens, and a cubin contains its kernels' names.  Modules of this library need
none of this: the driver object keeps their code.

CUPTI takes one listener in a process, so a profiler (Kineto, Nsight) and this exclude each other.
CUPTI calls on the thread that loads the module, with locks of the driver held, so the function is
in C (`_launch.c`) and takes no lock of the interpreter.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ostinato.driver.cuda.libcuda import Libcuda, require_gpu
from ostinato.driver.extension import load_extension
from ostinato.driver.forking import new_lock
from ostinato.errors import NotAvailableError

_RESOURCE_DOMAIN, _MODULE_LOADED = 3, 6  # cupti_callbacks.h
_BUSY = 39  # CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED
_NAMES = ("libcupti.so.13", "libcupti.so.12", "libcupti.so")
_INSTALL = "install it (pip install nvidia-cuda-cupti), or CUDA's toolkit"


class ModuleCollector:
    """Collects until `close()`, and keeps the collected code.  Made by `collect_modules`."""

    def __init__(self, cupti: Any, path: str) -> None:
        self._cupti = cupti
        self.path = path
        self._subscriber = ctypes.c_void_p()
        self._cubins: dict[str, bytes] = {}
        self._has: dict[str, dict[str, bool]] = {}
        """True if a cubin has a kernel, by the kernel's name and the cubin's digest."""
        self._lock = new_lock()
        module, missing = load_extension("ostinato.driver._launch")
        if module is None:
            raise NotAvailableError(f"collecting needs the extension module _launch: {missing}")
        self._drain = module.drain_modules
        listener = ctypes.c_void_p(module.module_listener())
        self._require(
            "cuptiSubscribe", cupti.cuptiSubscribe(ctypes.byref(self._subscriber), listener, None)
        )
        self.listen()

    def __repr__(self) -> str:
        return f"<ModuleCollector of {self.path}>"

    @property
    def cubins(self) -> dict[str, bytes]:
        """The cubins by the SHA-256 of their bytes."""
        with self._lock:
            loaded, lost = self._drain()
            for data in loaded:
                self._cubins[hashlib.sha256(data).hexdigest()] = data
            if lost:
                raise NotAvailableError(
                    f"the code of {lost} modules could not be kept: host memory is short"
                )
            return dict(self._cubins)

    def with_kernel(self, name: str) -> list[bytes]:
        """Returns the cubins that have a kernel of this name; searches each once for a name."""
        # Every kernel has a section of this name; the linker may share the end of longer names.
        sign = b".nv.info." + name.encode() + b"\0"
        cubins = self.cubins
        with self._lock:
            has = self._has.setdefault(name, {})
            has.update({d: sign in data for d, data in cubins.items() if d not in has})
            return [cubins[digest] for digest, found in has.items() if found]

    def close(self) -> None:
        """Stops collecting.  Idempotent."""
        self._enable(0)

    def listen(self) -> None:
        """Collects again."""
        self._require("cuptiEnableCallback", self._enable(1))

    def _enable(self, on: int) -> int:
        status: int = self._cupti.cuptiEnableCallback(
            ctypes.c_uint32(on), self._subscriber, _RESOURCE_DOMAIN, _MODULE_LOADED
        )
        return status

    def _require(self, call: str, status: int) -> None:
        if not status:
            return
        why = f"see CUptiResult in cupti_result.h, and whether {self.path} fits the driver"
        if status == _BUSY:
            why = "something else listens already (a profiler); end it first"
        raise NotAvailableError(f"{call} failed with status {status}: {why}")


_collector: ModuleCollector | None = None
_lock = new_lock()


def collect_modules() -> ModuleCollector:
    """Collects the machine code of every kernel that the process loads from now on, for
    `graphfile.save`.

        collector = ost.graphfile.collect_modules()  # before torch launches anything
        import torch

    Kernels that were loaded before cannot be saved; kernels that this library compiled always can.
    Costs one copy of each module's code, and nothing for a launch.  `close()` ends it.
    Raises NoCudaError without a GPU or its driver, NotAvailableError without libcupti, or if a
    profiler uses it.
    """
    global _collector  # CUPTI has one listener in a process
    with _lock:
        if _collector is None:
            lib = Libcuda()
            cupti, path = _find()
            try:
                _collector = ModuleCollector(cupti, path)
            except NotAvailableError:
                require_gpu(lib, 0)  # only now: it starts the driver
                raise
        else:
            _collector.listen()
        return _collector


def cubins_with(name: str) -> list[bytes]:
    """Returns the collected cubins that have a kernel of this name.

    Raises NotAvailableError, with advice, if there is none.
    """
    found = [] if _collector is None else _collector.with_kernel(name)
    if not found:
        why = "it was loaded before collecting began"
        if _collector is None:
            why = "nothing is collected in this process"
        raise NotAvailableError(
            f"the machine code of {name} is not known: {why}; call "
            "ostinato.graphfile.collect_modules() (or set OSTINATO_COLLECT_MODULES=1) before the "
            "library that launches it loads its kernels"
        )
    return found


def _find() -> tuple[Any, str]:
    """Returns libcupti: the loaded one, else the one that pip installed, else the system's."""
    tried = []
    for path in (*_loaded_paths(), *_installed_paths(), *_NAMES):
        try:
            return ctypes.CDLL(path), path
        except OSError as error:
            tried.append(str(error))
    raise NotAvailableError(f"libcupti is not here ({tried[-1]}); {_INSTALL}")


def _loaded_paths() -> list[str]:
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        paths = [line.split(maxsplit=5)[-1] for line in lines if "libcupti.so" in line]
        return list(dict.fromkeys(paths))
    return []


def _installed_paths() -> list[str]:
    import glob

    places: list[str] = []
    spec = importlib.util.find_spec("nvidia")
    for place in [] if spec is None else spec.submodule_search_locations or ():
        for name in _NAMES:
            places += sorted(glob.glob(f"{glob.escape(place)}/*/lib/{name}"))  # noqa: PTH207
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    places += [f"{toolkit}/extras/CUPTI/lib64/libcupti.so"]
    return places
