"""Other libraries' doors, without the libraries: what is said where one is missing, and how a
generator's state is found among kernel arguments."""

from __future__ import annotations

import importlib
import struct
import sys
import types
from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest

import ostinato as ost
from ostinato.errors import EagerRunError, NotAvailableError

LIBRARIES = ("torch", "cupy", "numba", "triton", "transformers")


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    """A test imports `ostinato.interop` anew, and later tests get the modules of before."""
    package = importlib.import_module("ostinato.interop")
    attributes = dict(vars(package))
    before = {name: sys.modules.pop(name) for name in imported()}
    yield
    for name in imported():
        del sys.modules[name]
    sys.modules.update(before)
    vars(package).clear()
    vars(package).update(attributes)


def imported() -> list[str]:
    return [name for name in sys.modules if name.startswith("ostinato.interop.")]


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("torch", "cupy", "numba"):
        monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    with pytest.raises(NotAvailableError, match=r"is not installed .* install"):
        importlib.import_module(f"ostinato.interop.{name}")


@pytest.fixture
def interop(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """`ostinato.interop.torch` over a torch that has nothing but an allocator."""
    torch = types.ModuleType("torch")
    blocks = [
        {"size": 512, "requested_size": 8},
        {"size": 512, "requested_size": 8},
        {"size": 1024, "requested_size": 1000},
    ]
    torch.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        is_initialized=lambda: True,
        memory_snapshot=lambda: [{"address": 4096, "total_size": 2048, "blocks": blocks}],
    )
    for name in ("CUDAGraph", "Event", "Stream"):
        setattr(torch.cuda, name, object)
    torch.__dict__["__getattr__"] = lambda name: MagicMock(name=name)
    monkeypatch.setitem(sys.modules, "torch", torch)
    modes = types.ModuleType("torch.utils._python_dispatch")
    modes.TorchDispatchMode = object  # type: ignore[attr-defined]
    gradients = types.ModuleType("torch.autograd.function")
    gradients.once_differentiable = lambda method: method  # type: ignore[attr-defined]
    torch.autograd = types.ModuleType("torch.autograd")  # type: ignore[attr-defined]
    torch.autograd.Function = object
    torch.autograd.__dict__["__getattr__"] = torch.__dict__["__getattr__"]
    monkeypatch.setitem(sys.modules, "torch.autograd", torch.autograd)
    monkeypatch.setitem(sys.modules, gradients.__name__, gradients)
    monkeypatch.setitem(sys.modules, "torch.utils", types.ModuleType("torch.utils"))
    monkeypatch.setitem(sys.modules, modes.__name__, modes)
    return importlib.import_module("ostinato.interop.torch.adopting")


def held(address: int) -> ost.MemoryRange | None:
    return ost.MemoryRange(4096, 2048) if 4096 <= address < 6144 else None


NO_STATES = {
    "not captured": struct.pack("<QQQB7x", 4096, 4608, 8, 0),
    "numbers": struct.pack("<QQQB7x", 12, 13, 8, 1),
    "one tensor twice": struct.pack("<QQQB7x", 4096, 4096, 8, 1),
    "a count that is none": struct.pack("<QQQB7x", 4096, 4608, 9, 1),
    "pointers alone": struct.pack("<QQ", 4096, 4608),
}


def found(interop: types.ModuleType, raw: bytes, offset: int = 0) -> bool:
    pairs = list(interop._captured_states(raw, offset, held))
    return any(interop._is_scalar(a) and interop._is_scalar(b) for a, b in pairs)


def test_a_captured_generator_is_found(interop: types.ModuleType) -> None:
    raw = struct.pack("<QQQB7x", 4096, 4608, 8, 1)
    assert found(interop, raw)
    assert found(interop, b"\x07" * 16 + raw)
    assert found(interop, b"\x07" * 4 + raw, offset=4)


@pytest.mark.parametrize("kind", NO_STATES)
def test_other_arguments_are_no_generator(interop: types.ModuleType, kind: str) -> None:
    assert not found(interop, NO_STATES[kind])


def test_tensors_of_more_than_a_number_are_no_generator(interop: types.ModuleType) -> None:
    assert not found(interop, struct.pack("<QQQB7x", 4096, 5120, 8, 1))
    assert not found(interop, struct.pack("<QQQB7x", 4096, 4616, 8, 1)), "inside a block"


def test_blocks_that_torch_took_back_are_freed(
    interop: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def segment(address: int, pool: tuple[int, int], device: int = 0) -> dict[str, object]:
        blocks = [
            {"size": 512, "state": "active_allocated"},
            {"size": 1024, "state": "inactive"},
        ]
        return {"address": address, "device": device, "segment_pool_id": pool, "blocks": blocks}

    segments = [segment(4096, (0, 0)), segment(8192, (0, 1)), segment(1 << 20, (0, 0), device=1)]
    monkeypatch.setattr(interop.torch.cuda, "memory_snapshot", lambda: segments)
    gpu = types.SimpleNamespace(driver=types.SimpleNamespace(name="cuda:0"))
    known = {m.range.address: (m.range.nbytes, m.live) for m in interop.known_memory(gpu)}
    assert known == {
        4096: (512, True),
        4608: (1024, False),
        8192: (512, True),
        8704: (1024, True),  # the graph uses what its capture gave back
    }


def test_cupy_without_a_gpu_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decorator does not break a module's import on a machine without a GPU."""

    class CUDARuntimeError(RuntimeError):
        pass

    def no_device() -> int:
        raise CUDARuntimeError("cudaErrorNoDevice")

    cupy = types.ModuleType("cupy")
    runtime = types.SimpleNamespace(getDevice=no_device, CUDARuntimeError=CUDARuntimeError)
    cupy.cuda = types.SimpleNamespace(runtime=runtime, Memory=object, MemoryPool=MagicMock())  # type: ignore[attr-defined]
    cupy.ndarray = type("ndarray", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupyx", types.ModuleType("cupyx"))
    graphed = importlib.import_module("ostinato.interop.cupy").graphed

    @graphed(verify="first")
    def double(x: int) -> int:
        return 2 * x

    assert [double(n) for n in range(3)] == [0, 2, 4]
    assert "CuPy has no CUDA device here (cudaErrorNoDevice)" in double.explain()
    double.close()
    strict = graphed(double.__wrapped__, strict=True)
    with pytest.raises(EagerRunError, match="cudaErrorNoDevice"):
        strict(1)
    strict.close()
