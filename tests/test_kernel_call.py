"""Eager launches, compiled and in Python: the same bytes, the same call, the same refusals.

On C functions of our own in place of the driver's: no GPU needed.
"""

from __future__ import annotations

import ctypes
import gc
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.driver.api import (
    FunctionHandle,
    KernelArguments,
    KernelNodeParams,
    LaunchConfig,
    ParameterSlot,
    StreamHandle,
)
from ostinato.driver.cuda import libcuda as cu
from ostinato.driver.cuda.frozen import raw_kernel
from ostinato.driver.cuda.modules import ModuleCalls
from ostinato.driver.launcher import (
    compiled,
    kernel_call,
    kernel_nodes,
    packer,
    set_nodes,
)
from ostinato.driver.signature import BYTES, Signature, Space
from ostinato.errors import ClosedError, DriverError

needs_extension = pytest.mark.skipif(not compiled(), reason="the extension was not built")

LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
CURRENT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
CONTEXT = 0x7F12_0000_1234


# ----------------------------------------------------------------------------------------- packing


class Placed:
    """Something with an address."""

    def __init__(self, address: object) -> None:
        self.address = address


class Interfaced:
    """A device array of another library."""

    def __init__(self, address: int, typestr: str | None = None) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "typestr": typestr}


class Held:
    """Memory that says what it holds, and of which device it is, as a buffer does."""

    def __init__(self, address: int, dtype: np.dtype[Any], space: Space) -> None:
        self.dtype = dtype
        self._pointer = (address, space.element(dtype))


SPACE, OTHER = Space("here"), Space("there")


TYPES = ["*f32", "*const i32", "i8", "u8", "i16", "u16", "*bf16", "i32", "u32", "i64", "u64", "f32"]

numbers = st.one_of(
    st.integers(-(1 << 65), 1 << 65),
    st.sampled_from([0, 1, -1, 127, 128, 255, 256, -129, (1 << 31) - 1, 1 << 31, (1 << 64) - 1]),
)
values = st.one_of(
    numbers,
    st.floats(),
    st.booleans(),
    st.none(),
    st.integers(0, (1 << 64) - 1).map(Placed),
    st.builds(Interfaced, st.integers(0, (1 << 64) - 1), st.sampled_from([None, "<f4", "<i8"])),
    st.builds(
        Held,
        st.integers(0, (1 << 64) - 1),
        st.sampled_from([BYTES, *map(np.dtype, ("f4", "i4", "u4", "f8", "?"))]),
        st.sampled_from([SPACE, SPACE, OTHER]),
    ),
    st.sampled_from(
        [Placed(None), Placed(True), np.int32(3), np.uint64(9), np.float32(2), b"abcd"]
    ),
)


@needs_extension
@given(st.lists(st.tuples(st.sampled_from(TYPES), values), max_size=9), st.booleans())
def test_what_is_packed_is_what_the_careful_way_packs(
    pairs: list[tuple[str, Any]], short: bool
) -> None:
    signature = Signature.parse(", ".join(f"p{i}: {kind}" for i, (kind, _) in enumerate(pairs)))
    codes = "".join(parameter.plain for parameter in signature.parameters)
    given_values = tuple(value for _, value in pairs)
    fast = packer(codes, signature.layout, signature.elements(SPACE))
    if short and pairs:
        assert fast(given_values[1:]) is None
    found = fast(given_values)
    if found is not None:
        assert found == signature.pack(given_values, None, SPACE).data


@needs_extension
def test_what_raises_when_asked_for_its_address_is_left_to_the_careful_way() -> None:
    class Refuses:
        @property
        def address(self) -> int:
            raise AttributeError("not now")

    signature = Signature.parse("x: *f32")
    pack = packer("P", signature.layout, signature.elements(SPACE))
    assert pack((Refuses(),)) is None
    assert pack((Placed(8),)) == (8).to_bytes(8, "little")


@needs_extension
def test_nonsense_makes_no_packer() -> None:
    for codes, slots in (("z", [ParameterSlot(0, 4)]), ("Q", [ParameterSlot(-8, 8)])):
        with pytest.raises(ValueError, match="slot 0"):
            packer(codes, slots, [None])


# ----------------------------------------------------------------------------------------- calling


class FakeCuda:
    """cuLaunchKernelEx and cuCtxGetCurrent, and what they saw."""

    def __init__(self, layout: tuple[ParameterSlot, ...] = ()) -> None:
        self.layout = layout
        self.current = CONTEXT
        self.seen: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self._launch, self._current = LAUNCH(self._launched), CURRENT(self._asked)
        self.calls: dict[str, Callable[..., int]] = {
            "cuLaunchKernelEx": self._launch,
            "cuCtxGetCurrent": self._current,
            "cuCtxPushCurrent_v2": self._pushed,
            "cuCtxPopCurrent_v2": self._popped,
            "cuFuncGetName": lambda *_: 1,
        }
        self.below: list[int] = []

    def __getitem__(self, symbol: str) -> Callable[..., int]:
        return self.calls[symbol]

    def has(self, symbol: str) -> bool:
        return True

    def bare(self, symbol: str) -> None:
        return None

    def address(self, symbol: str) -> int:
        return ctypes.cast(self.calls[symbol], ctypes.c_void_p).value or 0  # type: ignore[arg-type]

    def _asked(self, out: Any) -> int:
        out[0] = self.current
        return 0

    def _pushed(self, context: int) -> int:
        self.below.append(self.current)
        self.current = context
        return 0

    def _popped(self, _: object) -> int:
        self.current = self.below.pop()
        return 0

    def _launched(self, config: int, function: int, params: int, extra: int) -> int:
        raw = cu.LaunchConfigStruct.from_address(config)
        words = (ctypes.c_void_p * len(self.layout)).from_address(params) if params else ()
        self.seen.append(
            {
                "grid": (raw.gridDimX, raw.gridDimY, raw.gridDimZ),
                "block": (raw.blockDimX, raw.blockDimY, raw.blockDimZ),
                "shared": raw.sharedMemBytes,
                "stream": raw.hStream,
                "attributes": raw.numAttrs,
                "function": function,
                "arguments": [
                    ctypes.string_at(word, slot.size)
                    for word, slot in zip(words, self.layout, strict=True)
                ],
                "extra": bool(extra),
                "context": self.current,
            }
        )
        return self.statuses.pop(0) if self.statuses else 0


class Driver(ModuleCalls):
    """The launching part of the CUDA driver, on such functions."""

    def __init__(self, lib: FakeCuda) -> None:
        super().__init__(lib, CONTEXT, 0)  # type: ignore[arg-type]
        self._layouts = {5: lib.layout, 6: lib.layout}


SIGNATURE = Signature.parse("x: *f32, small: u8, n: i32, f: f32")
ARGUMENTS = SIGNATURE.pack((0x7F00_0000_0010, 7, -3, 0.5))
PARTS = [
    *(struct.pack("<Q", 0x7F00_0000_0010), b"\7"),
    *(struct.pack("<i", -3), struct.pack("<f", 0.5)),
]


def fresh() -> KernelArguments:
    return KernelArguments(ARGUMENTS.data, ARGUMENTS.layout)


def launch(driver: Driver, arguments: KernelArguments, config: LaunchConfig, **how: int) -> None:
    stream, function = how.get("stream", 0xABC0), how.get("function", 5)
    driver.launch_kernel(StreamHandle(stream), FunctionHandle(function), config, arguments)


def test_a_launch_is_what_was_asked_for_whatever_was_launched_before(launcher: str) -> None:
    lib = FakeCuda(SIGNATURE.layout)
    driver, arguments = Driver(lib), fresh()
    first = LaunchConfig((3, 2, 1), (32, 4), 1024)
    second = LaunchConfig(9, 64, cluster=3, programmatic=True)
    ways = [(config, stream, f) for config in (first, second) for stream in (1, 2) for f in (5, 6)]
    for config, stream, function in [*ways, *ways[::-1], *[way for way in ways for _ in range(2)]]:
        launch(driver, arguments, config, stream=stream, function=function)
        seen = lib.seen.pop()
        assert seen["grid"] == config.grid and seen["block"] == config.block
        assert (seen["shared"], seen["stream"], seen["function"]) == (
            *(config.shared, stream, function),
        )
        assert seen["attributes"] == (2 if config is second else 0)
        assert seen["arguments"] == PARTS and not seen["extra"]
    other = FakeCuda(SIGNATURE.layout)
    launch(Driver(other), arguments, first)
    assert len(other.seen) == 1 and not lib.seen, "of another driver"


def test_a_status_is_an_error_that_names_the_launch(launcher: str) -> None:
    lib = FakeCuda(SIGNATURE.layout)
    driver, arguments, config = Driver(lib), fresh(), LaunchConfig(7, 32)
    launch(driver, arguments, config)
    lib.statuses = [1]
    with pytest.raises(DriverError, match=r"grid=\(7, 1, 1\)"):
        launch(driver, arguments, config)
    launch(driver, arguments, config)
    assert len(lib.seen) == 3


def test_a_launch_where_another_context_is_current_is_in_ours(launcher: str) -> None:
    lib = FakeCuda(SIGNATURE.layout)
    driver, arguments, config = Driver(lib), fresh(), LaunchConfig(7, 32)
    for _ in range(2):
        lib.current = 0x1111
        launch(driver, arguments, config)
        assert lib.seen.pop()["context"] == CONTEXT and not lib.seen
        assert lib.current == 0x1111, "it is current again"


def test_nothing_is_launched_once_the_driver_is_closed(launcher: str) -> None:
    lib = FakeCuda(SIGNATURE.layout)
    driver, arguments, config = Driver(lib), fresh(), LaunchConfig(7, 32)
    launch(driver, arguments, config)
    driver.after_fork()
    with pytest.raises(ClosedError):
        launch(driver, arguments, config)
    assert len(lib.seen) == 1


def test_what_does_not_fit_is_refused_and_not_launched(launcher: str) -> None:
    lib = FakeCuda(SIGNATURE.layout)
    driver = Driver(lib)
    with pytest.raises(DriverError, match="4294967296"):
        launch(driver, fresh(), LaunchConfig((1 << 32, 1, 1), 32))
    short = KernelArguments(ARGUMENTS.data[:-1], ARGUMENTS.layout)
    with pytest.raises(DriverError, match="the function takes 4"):
        launch(driver, short, LaunchConfig(1, 32))
    assert not lib.seen


def test_arguments_packed_by_a_library_go_as_they_are(launcher: str) -> None:
    lib = FakeCuda()
    launch(Driver(lib), KernelArguments(bytes(50), (), packed=True), LaunchConfig(1, 32))
    assert lib.seen.pop()["extra"]


@needs_extension
def test_a_functions_launches_in_one_call() -> None:
    lib = FakeCuda(SIGNATURE.layout)
    driver = Driver(lib)
    pack = packer("PBif", SIGNATURE.layout, SIGNATURE.elements(SPACE))
    call = driver.function_prepare_launch(FunctionHandle(5), pack)
    assert call is not None
    values = (Placed(0x7F00_0000_0010), 7, -3, 0.5)
    assert call(0xABC0, (3, 2, 1), (32, 4, 1), 1024, values) == 0
    seen = lib.seen.pop()
    assert (seen["grid"], seen["block"], seen["shared"]) == ((3, 2, 1), (32, 4, 1), 1024)
    assert (seen["stream"], seen["function"], seen["attributes"]) == (0xABC0, 5, 0)
    assert seen["arguments"] == PARTS and not seen["extra"]
    lib.statuses = [700]
    assert call(0xABC0, (1, 1, 1), (1, 1, 1), 0, values) == 700
    lib.seen.clear()
    # Not launched: values, numbers, or a context that are others' business.
    big, one = (1 << 32, 1, 1), (1, 1, 1)
    assert call(1, one, one, 0, (*values[:3], 1)) is None
    assert call(1, one, one, 0, values[:3]) is None
    assert call(1, one, one, 0, list(values)) is None  # type: ignore[arg-type]
    assert call(1, big, one, 0, values) is None
    assert call(1, one, one, -1, values) is None
    lib.current = 1
    assert call(1, one, one, 0, values) is None
    assert not lib.seen
    with pytest.raises(TypeError, match="are needed"):
        call(1, one, one)  # type: ignore[call-arg]


def test_where_there_is_no_shortcut_it_is_said(launcher: str) -> None:
    driver = Driver(FakeCuda())
    many = Signature.parse(", ".join(f"p{i}: u64" for i in range(300)))
    slow = packer("Q" * 300, many.layout, [None] * 300)
    packed = (1).to_bytes(8, "little") * 300 if launcher == "compiled" else None
    assert slow((1,) * 300) == packed
    assert driver.function_prepare_launch(FunctionHandle(5), slow) is None
    short = packer("P", SIGNATURE.layout[:1], SIGNATURE.elements(SPACE)[:1])
    found = driver.function_prepare_launch(FunctionHandle(5), short)
    assert (found is None) == (launcher == "python")


@needs_extension
def test_a_call_outlives_what_it_was_made_of_and_leaks_nothing() -> None:
    lib = FakeCuda(SIGNATURE.layout)
    addresses = lib.address("cuLaunchKernelEx"), lib.address("cuCtxGetCurrent")
    target = (*addresses, CONTEXT, 5)

    def make() -> Callable[[], int | None]:
        arguments = KernelArguments(bytes(bytearray(ARGUMENTS.data)), ARGUMENTS.layout)
        made = kernel_call(target, LaunchConfig(2, 32), 1, (0, 0), arguments)
        assert made is not None
        return made

    call = make()
    gc.collect()
    assert call() == 0 and lib.seen.pop()["arguments"] == PARTS
    lib.current = 1
    assert call() is None and not lib.seen
    with pytest.raises(ValueError, match="behind the last byte"):
        short = KernelArguments(b"abc", (ParameterSlot(255, 1),))
        kernel_call(target, LaunchConfig(1, 1), 1, (0, 0), short)
    tracemalloc.start()
    try:
        for _ in range(100):
            make()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(2000):
            make()
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()


@needs_extension
def test_a_node_that_holds_the_bytes_is_not_set_again() -> None:
    statuses: list[int] = []
    calls: list[int] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    def take(executable: int, node: int, params: int) -> int:
        calls.append(node)
        return statuses.pop() if statuses else 0

    cuda = FakeCuda()
    addresses = [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (take, cuda._current)]
    arguments = KernelArguments(bytes(16), (ParameterSlot(0, 8), ParameterSlot(8, 8)))
    params = KernelNodeParams(FunctionHandle(5), LaunchConfig(1, 1), arguments)
    calls_of = addresses[0], addresses[1]
    made_of = kernel_nodes(calls_of, CONTEXT, 1, [2], [0], raw_kernel(params))
    assert made_of is not None
    (node,) = made_of
    short = raw_kernel(replace(params, arguments=KernelArguments(bytes(15), arguments.layout)))
    with pytest.raises(ValueError, match="behind the last byte"):
        kernel_nodes(calls_of, CONTEXT, 1, [2], [0], short)

    def made(place: int, raw: bytes) -> int:
        calls.clear()
        assert node.set(place, raw) == 0
        return len(calls)

    zero, one = bytes(8), b"one 1234"
    assert made(0, zero) == 1  # what the driver holds is not known before
    assert made(0, zero) == made(8, zero) == 0
    assert made(8, one) == 1 and made(8, one) == 0 and made(0, one) == 1
    statuses.append(1)
    assert node.set(8, zero) == 1 and node.data == one + one
    assert made(8, one) == 1 and made(8, one) == 0
    calls.clear()
    assert set_nodes([(node, 0, one)]) == (0, 0) and len(calls) == 1
    cuda.current = CONTEXT + 8
    assert node.set(0, one) is None
