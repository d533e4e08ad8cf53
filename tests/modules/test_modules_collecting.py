"""What collects machine code, on a libcupti of our own: no GPU needed."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ostinato.driver.cuda.collecting import ModuleCollector
from ostinato.errors import NotAvailableError

RESOURCE, MODULE_LOADED = 3, 6
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


class Module(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("size", ctypes.c_size_t), ("code", ctypes.c_char_p))


class Resource(ctypes.Structure):
    _fields_ = (
        ("context", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("descriptor", ctypes.POINTER(Module)),
    )


class Cupti:
    """Calls the listener as the driver does: without the interpreter's lock."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.listener: Any = None
        self.enabled: list[int] = []

    def cuptiSubscribe(self, _: object, listener: ctypes.c_void_p, __: object) -> int:
        self.listener = _Callback(listener.value or 0)
        return self.status

    def cuptiEnableCallback(self, on: ctypes.c_uint32, *_: object) -> int:
        self.enabled.append(on.value)
        return 0

    def load(self, code: bytes, domain: int = RESOURCE, kind: int = MODULE_LOADED) -> None:
        held = Module(1, len(code), code or None)
        resource = Resource(None, None, ctypes.pointer(held))
        self.listener(None, domain, kind, ctypes.addressof(resource))


def test_each_code_is_kept_once_whichever_thread_loads_it() -> None:
    cupti = Cupti()
    collector = ModuleCollector(cupti, "none")
    codes = [bytes([i]) * 1000 + b"\0end" for i in range(50)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(cupti.load, codes * 4))
    assert sorted(collector.cubins.values()) == codes
    cupti.load(b"later")
    assert sorted(collector.cubins.values()) == sorted([*codes, b"later"])
    collector.close()
    collector.listen()
    assert cupti.enabled == [1, 0, 1]


def test_other_calls_of_cupti_are_no_code() -> None:
    cupti = Cupti()
    collector = ModuleCollector(cupti, "none")
    cupti.load(b"no", domain=2)
    cupti.load(b"no", kind=7)
    cupti.load(b"")
    cupti.listener(None, RESOURCE, MODULE_LOADED, None)
    assert collector.cubins == {}


def test_a_profiler_that_listens_is_named() -> None:
    with pytest.raises(NotAvailableError, match="profiler"):
        ModuleCollector(Cupti(39), "none")
