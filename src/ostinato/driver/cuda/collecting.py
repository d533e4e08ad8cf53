"""The machine code of other libraries' kernels, noted when the driver loads it.

The driver gives no code back.  CUPTI calls a function of ours with each cubin that is loaded while
somebody listens, and a cubin has its kernels' names in it.  Our own modules need none of this: the
driver object keeps what it loaded.

CUPTI takes one listener in a process, so a profiler (Kineto, Nsight) and this exclude each other.
Its calls come on the thread that loads the module.  They need the interpreter's lock, as every
function of Python that C calls.
"""

from __future__ import annotations

import atexit
import ctypes
import glob
import hashlib
import importlib.util
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ostinato.driver.forking import new_lock
from ostinato.errors import NotAvailableError

__all__ = ["ModuleCollector", "collect_modules", "collected", "cubins_with"]

_RESOURCE_DOMAIN, _MODULE_LOADED = 3, 6  # cupti_callbacks.h
_BUSY = 39  # CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED
_NAMES = ("libcupti.so.13", "libcupti.so.12", "libcupti.so")
_INSTALL = "install it (pip install nvidia-cuda-cupti), or CUDA's toolkit"


class _ModuleData(ctypes.Structure):
    """CUpti_ModuleResourceData"""

    _fields_ = (
        ("moduleId", ctypes.c_uint32),
        ("cubinSize", ctypes.c_size_t),
        ("pCubin", ctypes.c_void_p),
    )


class _ResourceData(ctypes.Structure):
    """CUpti_ResourceData"""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("descriptor", ctypes.c_void_p),
    )


_Callback = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_ResourceData)
)


class ModuleCollector:
    """Listens until `close()`; what was collected stays.  Made by `collect_modules`."""

    def __init__(self, cupti: Any, path: str) -> None:
        self._cupti = cupti
        self.path = path
        self._subscriber = ctypes.c_void_p()
        self._callback = _Callback(self._loaded)
        # The driver may load a module while the interpreter ends, when this object is gone already
        # and its place may be another callback's: the callback is never freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._callback))
        atexit.register(self.close)
        self._waiting: list[bytes] = []
        self._cubins: dict[str, bytes] = {}
        self._lock = new_lock()
        self._require(
            "cuptiSubscribe",
            cupti.cuptiSubscribe(ctypes.byref(self._subscriber), self._callback, None),
        )
        self._require("cuptiEnableCallback", self._enable(1))

    def __repr__(self) -> str:
        return f"<ModuleCollector of {self.path}: {len(self.cubins)} cubins>"

    @property
    def cubins(self) -> dict[str, bytes]:
        """The cubins by the SHA-256 of their bytes."""
        with self._lock:
            while self._waiting:
                data = self._waiting.pop()
                self._cubins[hashlib.sha256(data).hexdigest()] = data
            return dict(self._cubins)

    def close(self) -> None:
        """Stops listening.  Idempotent."""
        self._enable(0)

    def listen(self) -> None:
        """Listens again."""
        self._require("cuptiEnableCallback", self._enable(1))

    def _loaded(self, _: int, domain: int, kind: int, data: Any) -> None:
        # As little as can be: the driver holds locks of its own here.
        if domain == _RESOURCE_DOMAIN and kind == _MODULE_LOADED and data:
            module = _ModuleData.from_address(data.contents.descriptor or 0)
            if module.pCubin and module.cubinSize:
                self._waiting.append(ctypes.string_at(module.pCubin, module.cubinSize))

    def _enable(self, on: int) -> int:
        status: int = self._cupti.cuptiEnableCallback(
            ctypes.c_uint32(on), self._subscriber, _RESOURCE_DOMAIN, _MODULE_LOADED
        )
        return status

    def _require(self, call: str, status: int) -> None:
        if not status:
            return
        why = (
            "something else listens already (a profiler); end it first"
            if status == _BUSY
            else f"see CUptiResult in cupti_result.h, and whether {self.path} fits the driver"
        )
        raise NotAvailableError(f"{call} failed with status {status}: {why}")


_collector: ModuleCollector | None = None
_lock = new_lock()


def collect_modules() -> ModuleCollector:
    """Notes the machine code of every kernel that the process loads from now on, for `Graph.save`.

        collector = ost.collect_modules()    # first of all, before torch launches anything
        import torch

    Kernels that were loaded before cannot be saved; those that this library compiled always can.
    It costs one copy of each module's code, and nothing for a launch.  `close()` ends it.
    Raises NotAvailableError where there is no libcupti, or a profiler uses it.
    """
    global _collector  # CUPTI has one listener in a process
    with _lock:
        if _collector is None:
            cupti, path = _find()
            _collector = ModuleCollector(cupti, path)
        else:
            _collector.listen()
        return _collector


def collected() -> dict[str, bytes]:
    """What was collected so far, by the SHA-256 of the bytes."""
    return {} if _collector is None else _collector.cubins


def cubins_with(name: str) -> list[bytes]:
    """The collected cubins that have a kernel of this name.

    Raises NotAvailableError, with what to do, if there is none.
    """
    # Every kernel has a section of this name; the linker may share the end of longer names.
    sign = b".nv.info." + name.encode() + b"\0"
    found = [data for data in collected().values() if sign in data]
    if not found:
        why = (
            "nothing is collected in this process"
            if _collector is None
            else "it was loaded before collecting began"
        )
        raise NotAvailableError(
            f"the machine code of {name} is not known: {why}; call ost.collect_modules() (or set "
            "OSTINATO_COLLECT_MODULES=1) before the library that launches it loads its kernels"
        )
    return found


def _find() -> tuple[Any, str]:
    """libcupti: the one that is loaded, else the one that pip installed, else the system's."""
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
    places: list[str] = []
    spec = importlib.util.find_spec("nvidia")
    for place in [] if spec is None else spec.submodule_search_locations or ():
        for name in _NAMES:
            places += sorted(glob.glob(f"{glob.escape(place)}/*/lib/{name}"))  # noqa: PTH207
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    places += [f"{toolkit}/extras/CUPTI/lib64/libcupti.so"]
    return places
