"""cuBLASLt through ctypes: matrix products of weights in bfloat16, prepared once and called often.

ctypes and not nvmath-python: importing that costs 0.45 s of the 2 s that a process may take to its
first token, and this file needs only a dozen calls that are equal in cuBLAS 12 and 13, enum values
too (a test compares them with cublasLt.h).  cuda.pathfinder, which comes with cuda.bindings, finds
and loads the library: from toolkits, conda, NVIDIA's wheels, or the copy that torch has loaded.

    load_cublaslt() -> Cublaslt                  the library; no device is touched
    .plan(driver, MatrixProduct, …) -> Planned   descriptors and the algorithm: once for each shape
    planned(stream, …)                           one call, which may be captured once it ran

Guaranteed: the same call gives the same bits every time.  cuBLAS guarantees that for one version on
GPUs of one kind; the plans here allow only reductions in a fixed order (no atomics).
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import byref
from dataclasses import dataclass
from typing import Any

from ostinato.driver.api import CudaContext
from ostinato.driver.cuda.libcuda import INSTALL as INSTALL_CUDA
from ostinato.driver.forking import new_lock
from ostinato.errors import InputError, NoCudaError, NotAvailableError

INSTALL = "install it with: pip install 'ostinato[cublas13]' (or 'ostinato[cublas12]')"

_R_32F, _R_16BF = 0, 14  # cudaDataType
_COMPUTE_32F = 68  # cublasComputeType_t
_TRANSPOSE = 1  # cublasOperation_t
_DESC_TRANSA = 3  # cublasLtMatmulDescAttributes_t
_PREF_WORKSPACE, _PREF_REDUCTION = 1, 3  # cublasLtMatmulPreferenceAttributes_t
# cublasLtReductionScheme_t: partial sums in the workspace, added in a fixed order.  In-place sums
# would be added in the order of their arrival.
_REDUCTION_IN_ORDER = 2

_ALIGNMENT = 256  # bytes of workspace that algorithms are chosen for by default

_STATUS = {
    1: ("NOT_INITIALIZED", "the library could not start on this device; the driver may be too old"),
    3: ("ALLOC_FAILED", "there is not enough memory for the library's own use"),
    7: ("INVALID_VALUE", "a size, a type or a layout is none that the library takes"),
    8: ("ARCH_MISMATCH", "the library has no code for this GPU"),
    11: ("MAPPING_ERROR", "the library could not reach device memory"),
    13: ("EXECUTION_FAILED", "the GPU could not run it; an earlier launch may have failed"),
    14: ("INTERNAL_ERROR", "the library failed; often its version and the driver do not fit"),
    15: ("NOT_SUPPORTED", "the library has no kernel for this product on this GPU"),
    16: ("LICENSE_ERROR", "the library's licence check failed"),
}
"""cublasStatus_t: the name after CUBLAS_STATUS_, and its meaning."""

_P = ctypes.c_void_p
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (_P,),
    "cublasLtMatmulDescCreate": (_P, ctypes.c_int, ctypes.c_int),
    "cublasLtMatmulDescDestroy": (_P,),
    "cublasLtMatmulDescSetAttribute": (_P, ctypes.c_int, _P, ctypes.c_size_t),
    "cublasLtMatrixLayoutCreate": (
        *(_P, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    ),
    "cublasLtMatrixLayoutDestroy": (_P,),
    "cublasLtMatmulPreferenceCreate": (_P,),
    "cublasLtMatmulPreferenceDestroy": (_P,),
    "cublasLtMatmulPreferenceSetAttribute": (_P, ctypes.c_int, _P, ctypes.c_size_t),
    "cublasLtMatmulAlgoGetHeuristic": (*(_P,) * 7, ctypes.c_int, _P, _P),
    "cublasLtMatmul": (*(_P,) * 14, ctypes.c_size_t, _P),
}


class _HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; the algorithm is eight words private to the library."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspaceSize", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("wavesCount", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """y[rows, outputs] = h[rows, inputs] W[outputs, inputs]^T, all with whole rows, C order.

    h and W are bfloat16, sums and y float32.  `accumulate` adds to the present values of y.
    Raises InputError for sizes below 1.
    """

    rows: int
    outputs: int
    inputs: int
    accumulate: bool = False

    def __post_init__(self) -> None:
        if min(self.rows, self.outputs, self.inputs) < 1:
            raise InputError(f"{self}: sizes are whole numbers of 1 or more")

    def __str__(self) -> str:
        sign = "+=" if self.accumulate else "="
        return f"float32 [{self.rows}, {self.outputs}] {sign} bf16 [.., {self.inputs}]"


def explain_blas_status(status: int) -> str:
    """Returns a cublasStatus_t in words."""
    name, meaning = _STATUS.get(status, ("?", "a status that this version does not know"))
    return f"status {status} (CUBLAS_STATUS_{name}): {meaning}"


_loaded: list[Cublaslt] = []  # the library of this process, once it is loaded
_loading = new_lock()


def load_cublaslt() -> Cublaslt:
    """Returns the library of this machine, loaded once for the process.  Touches no device.

    Raises NotAvailableError with the line that installs it (NoCudaError if all of CUDA is missing).
    """
    with _loading:
        if not _loaded:
            _loaded.append(_load())
        return _loaded[0]


def _load() -> Cublaslt:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError as error:
        raise NoCudaError(f"cuBLASLt cannot be looked for ({error}); {INSTALL_CUDA}") from None
    try:
        found = load_nvidia_dynamic_lib("cublasLt")
        path = found.abs_path
        if path is None:
            raise NotAvailableError(f"cuda.pathfinder loaded cuBLASLt from nowhere; {INSTALL}")
        return Cublaslt(path)
    except NotAvailableError:
        raise
    except Exception as error:  # pathfinder's DynamicLibNotFoundError and its relatives; OSError
        reason = str(error).strip().split("\n", 1)[0]
        raise NotAvailableError(f"cuBLASLt cannot be loaded: {reason}; {INSTALL}") from None


class Cublaslt:
    """libcublasLt.  Calls release the GIL; any thread may call.

    Raises OSError if the file cannot be loaded or is no cuBLASLt.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        dll = ctypes.CDLL(path)
        self.calls: dict[str, Any] = {}
        try:
            for symbol, parameters in _PROTOTYPES.items():
                call = getattr(dll, symbol)
                call.argtypes, call.restype = parameters, ctypes.c_int
                self.calls[symbol] = call
            dll.cublasLtGetVersion.restype = ctypes.c_size_t
            number = int(dll.cublasLtGetVersion())
        except AttributeError as error:
            raise OSError(f"{path} is no cuBLASLt: {error}") from None
        # 120804 before 13, 130000 and up since; both formats are read with the same arithmetic.
        self.version = (number // 10000, number // 100 % 100, number % 100)
        self._handles: dict[int, int] = {}
        """cublasLtHandle_t of each device, by its context.

        The handles are never destroyed: graphs may hold the library's kernels for any time, and
        destroying a handle waits for the whole device.
        """
        self._lock = new_lock()

    def __str__(self) -> str:
        return f"cuBLASLt {'.'.join(map(str, self.version))}, {self.path}"

    def call(self, symbol: str, *arguments: object, about: object = "") -> None:
        """Calls a function of the library.  Raises NotAvailableError with the status in words."""
        status = self.calls[symbol](*arguments)
        if status:
            where = f" for {about}" if about else ""
            raise NotAvailableError(f"{symbol}{where} gave {explain_blas_status(status)} ({self})")

    def plan(self, driver: CudaContext, product: MatrixProduct, workspace: int) -> Planned:
        """Makes descriptors, and finds an algorithm that takes at most `workspace` bytes.

        Not inside a capture.  Raises NotAvailableError if the library has no algorithm.
        """
        with driver.made_current():
            with self._lock:
                handle = self._handles.get(driver.context)
                if handle is None:
                    out = ctypes.c_void_p()
                    self.call("cublasLtCreate", byref(out))
                    handle = self._handles[driver.context] = out.value or 0
            return Planned(self, handle, driver, product, workspace)


class Planned:
    """A product whose call is ready.  All its pointers must be aligned to 256 bytes, as every
    allocation is."""

    def __init__(
        self,
        library: Cublaslt,
        handle: int,
        driver: CudaContext,
        product: MatrixProduct,
        workspace: int,
    ) -> None:
        self.product = product
        self._library = library
        self._handle = handle
        self._driver = driver
        self._made: list[tuple[str, ctypes.c_void_p]] = []
        finalizer = weakref.finalize(self, _destroy, library, self._made)
        finalizer.atexit = False
        rows, outputs, inputs = product.rows, product.outputs, product.inputs
        # The library counts in columns: [rows, outputs] here is its outputs x rows, and W[outputs,
        # inputs] its inputs x outputs, which it transposes.
        self._operation = self._create("MatmulDesc", _COMPUTE_32F, _R_32F)
        self._set("MatmulDesc", self._operation, _DESC_TRANSA, ctypes.c_int32(_TRANSPOSE))
        self._weight = self._create("MatrixLayout", _R_16BF, inputs, outputs, inputs)
        self._input = self._create("MatrixLayout", _R_16BF, inputs, rows, inputs)
        self._output = self._create("MatrixLayout", _R_32F, outputs, rows, outputs)
        preference = self._create("MatmulPreference")
        name = "MatmulPreference"
        self._set(name, preference, _PREF_WORKSPACE, ctypes.c_uint64(workspace))
        self._set(name, preference, _PREF_REDUCTION, ctypes.c_uint32(_REDUCTION_IN_ORDER))
        found, count = _HeuristicResult(), ctypes.c_int()
        library.call(
            "cublasLtMatmulAlgoGetHeuristic",
            *(handle, self._operation, self._weight, self._input, self._output),
            *(self._output, preference, 1, byref(found), byref(count)),
            about=product,
        )
        if not count.value or found.state:
            raise NotAvailableError(
                f"{library} has no algorithm for {product}"
                + (f": {explain_blas_status(found.state)}" if found.state else "")
            )
        self._found = found
        self.workspace_bytes: int = found.workspaceSize
        self._alpha = ctypes.c_float(1.0)
        self._beta = ctypes.c_float(1.0 if product.accumulate else 0.0)

    def _create(self, what: str, *arguments: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._library.call(f"cublasLt{what}Create", byref(made), *arguments, about=self.product)
        self._made.append((f"cublasLt{what}Destroy", made))
        return made

    def _set(self, what: str, made: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self._library.call(
            f"cublasLt{what}SetAttribute",
            *(made, attribute, byref(value), ctypes.sizeof(value)),
            about=self.product,
        )

    def __call__(
        self, stream: int, *, weight: int, inputs: int, out: int, workspace: int, nbytes: int
    ) -> None:
        """Puts the product on a stream; all are addresses, `nbytes` is the workspace's size.

        The first call of a shape loads the library's kernels, so it must come before a capture.
        Raises NotAvailableError with the status in words, InputError for unaligned addresses.
        """
        for address in (weight, inputs, out, workspace):
            if address % _ALIGNMENT:
                raise InputError(f"{self.product}: {address:#x} is not aligned to {_ALIGNMENT}")
        with self._driver.made_current():
            self._library.call(
                "cublasLtMatmul",
                *(self._handle, self._operation, byref(self._alpha), weight, self._weight),
                *(inputs, self._input, byref(self._beta), out, self._output, out, self._output),
                *(byref(self._found.algo), workspace, nbytes, stream),
                about=self.product,
            )


def _destroy(library: Cublaslt, made: list[tuple[str, ctypes.c_void_p]]) -> None:
    """Destroys descriptors, which are in ordinary memory: no device is touched."""
    for symbol, value in made:
        library.calls[symbol](value)
