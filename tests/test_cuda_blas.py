"""cuBLASLt's wrapper without a GPU: what it asks, what it says, and that it is what the header
says where there is one."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.driver.cuda import blas as cuda_blas
from ostinato.driver.cuda.blas import Cublaslt, MatrixProduct, load_cublaslt
from ostinato.errors import InputError, NoCudaError, NotAvailableError

PRODUCT = MatrixProduct(32, 64, 48, accumulate=True)


class FakeDriver:
    context = 7

    def __init__(self) -> None:
        self.current = 0

    @contextlib.contextmanager
    def made_current(self) -> Iterator[None]:
        self.current += 1
        yield
        self.current -= 1


class FakeLibrary(Cublaslt):
    """Takes every call; `fails` gives statuses by symbol, `algorithms` how many there are."""

    def __init__(self, driver: FakeDriver, algorithms: int = 1, **fails: int) -> None:
        self.path, self.version = "/lib/libcublasLt.so", (13, 0, 1)
        self.driver, self.algorithms, self.fails = driver, algorithms, fails
        self.calls = {symbol: self._answer(symbol) for symbol in cuda_blas._PROTOTYPES}
        self.made: list[tuple[str, tuple[Any, ...]]] = []
        self.alive = 0
        self._handles, self._lock = {}, contextlib.nullcontext()  # type: ignore[assignment]

    def _answer(self, symbol: str) -> Any:
        def call(*arguments: Any) -> int:
            destroys = symbol.endswith("Destroy")
            assert self.driver.current or destroys, f"{symbol} without our context"
            self.made.append((symbol, arguments))
            if symbol.endswith("Create") and not self.fails.get(symbol):
                arguments[0]._obj.value = len(self.made)
                self.alive += symbol != "cublasLtCreate"
            self.alive -= destroys
            if symbol == "cublasLtMatmulAlgoGetHeuristic":
                arguments[8]._obj.workspaceSize = 4096
                arguments[9]._obj.value = self.algorithms
            return self.fails.get(symbol, 0)

        return call


def planned(library: FakeLibrary) -> Any:
    return library.plan(library.driver, PRODUCT, 1 << 20)


def test_a_product_is_prepared_once_and_called() -> None:
    library = FakeLibrary(FakeDriver())
    plan = planned(library)
    assert plan.workspace_bytes == 4096
    layouts = [a[1:] for s, a in library.made if s == "cublasLtMatrixLayoutCreate"]
    # The library counts in columns: W inputs x outputs, h inputs x rows, y outputs x rows.
    assert layouts == [(14, 48, 64, 48), (14, 48, 32, 48), (0, 64, 32, 64)]
    library.made.clear()
    plan(5, weight=0x1000, inputs=0x2000, out=0x3000, workspace=0x4000, nbytes=8192)
    ((symbol, arguments),) = library.made
    assert symbol == "cublasLtMatmul"
    assert arguments[2]._obj.value == 1.0 and arguments[7]._obj.value == 1.0  # it accumulates
    assert (arguments[3], arguments[5], arguments[8], arguments[10]) == (
        *(0x1000, 0x2000, 0x3000, 0x3000),
    )
    assert arguments[-3:] == (0x4000, 8192, 5)
    del plan
    assert library.alive == 0, "descriptors are given back"


def test_what_the_library_refuses_is_said_in_words() -> None:
    with pytest.raises(
        NotAvailableError, match=r"cublasLtCreate gave status 1 .*driver may be too"
    ):
        planned(FakeLibrary(FakeDriver(), cublasLtCreate=1))
    library = FakeLibrary(FakeDriver(), cublasLtMatmulAlgoGetHeuristic=15)
    with pytest.raises(NotAvailableError, match=r"float32 \[32, 64\].*no kernel for this product"):
        planned(library)
    assert library.alive == 0
    with pytest.raises(NotAvailableError, match="no algorithm"):
        planned(FakeLibrary(FakeDriver(), algorithms=0))
    plan = planned(FakeLibrary(FakeDriver(), cublasLtMatmul=13))
    with pytest.raises(NotAvailableError, match="EXECUTION_FAILED"):
        plan(0, weight=0, inputs=0, out=0, workspace=0, nbytes=0)
    assert "does not know" in cuda_blas.explain_blas_status(77)


def test_addresses_and_sizes_that_cannot_be_are_refused() -> None:
    plan = planned(FakeLibrary(FakeDriver()))
    with pytest.raises(InputError, match="0x1010 is not aligned to 256"):
        plan(0, weight=0x1000, inputs=0x1010, out=0, workspace=0, nbytes=0)
    with pytest.raises(InputError, match="sizes are whole numbers of 1 or more"):
        MatrixProduct(0, 8, 8)


def test_where_there_is_no_library_it_is_said_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")
    monkeypatch.setattr(cuda_blas, "_loaded", [])

    def missing(name: str) -> Any:
        raise RuntimeError("Failure finding libcublasLt.so\nsearched here and there")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", missing)
    with pytest.raises(NotAvailableError, match=r"finding libcublasLt.so; install it with: pip"):
        load_cublaslt()

    with monkeypatch.context() as without:
        without.setitem(sys.modules, "cuda.pathfinder", None)
        with pytest.raises(NoCudaError, match="cuda13"):
            load_cublaslt()

    class Found:
        abs_path = str(tmp_path / "nothing.so")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", lambda name: Found)
    with pytest.raises(NotAvailableError, match=r"nothing\.so"):
        load_cublaslt()
    with pytest.raises(OSError, match="no cuBLASLt"):
        Cublaslt(ctypes.util.find_library("c") or "libc.so.6")


def header() -> str:
    """cublasLt.h and cublas_api.h of an installed wheel or toolkit."""
    pathfinder = pytest.importorskip("cuda.pathfinder")
    folder = pathfinder.find_nvidia_header_directory("cublas")
    if folder is None:
        pytest.skip("no cuBLAS headers here")
    files = [Path(folder) / name for name in ("cublasLt.h", "cublas_api.h")]
    return "".join(path.read_text() for path in files if path.exists())


def test_numbers_are_the_headers() -> None:
    text = header()
    wanted = {
        "CUBLAS_COMPUTE_32F": cuda_blas._COMPUTE_32F,
        "CUBLAS_OP_T": cuda_blas._TRANSPOSE,
        "CUBLASLT_MATMUL_DESC_TRANSA": cuda_blas._DESC_TRANSA,
        "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES": cuda_blas._PREF_WORKSPACE,
        "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK": cuda_blas._PREF_REDUCTION,
        "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE": cuda_blas._REDUCTION_IN_ORDER,
        **{f"CUBLAS_STATUS_{name}": code for code, (name, _) in cuda_blas._STATUS.items()},
    }
    for name, value in wanted.items():
        found = re.search(rf"\b{name}\s*=\s*(\w+)", text)
        assert found is not None, name
        assert int(found[1], 0) == value, name


def test_there_is_one_handle_for_each_context() -> None:
    library = FakeLibrary(FakeDriver())
    for context, handles in ((7, 1), (7, 1), (8, 2)):
        library.driver.context = context
        planned(library)
        assert [symbol for symbol, _ in library.made].count("cublasLtCreate") == handles
