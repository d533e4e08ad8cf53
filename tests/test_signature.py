"""Signatures: reading them, C's layout, and packing values."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.driver.api import KernelArguments, ParameterSlot
from ostinato.driver.host.kernel import HostKernel
from ostinato.driver.signature import Access, Signature, address_of, pack_untyped
from ostinato.errors import InputError

SIZES = {
    "i8": 1,
    "u8": 1,
    "i16": 2,
    "u16": 2,
    "f16": 2,
    "bf16": 2,
    "i32": 4,
    "u32": 4,
    "f32": 4,
    "i64": 8,
    "u64": 8,
    "f64": 8,
    "cond": 8,
}


def test_what_a_signature_says() -> None:
    signature = Signature.parse(" x: *f32 , y: * const bf16, out: *out u8, n: u32, b: bytes[24]")
    names = [p.name for p in signature.parameters]
    assert names == ["x", "y", "out", "n", "b"]
    x, y, out, n, b = signature.parameters
    assert (x.pointer, y.pointer, out.pointer, n.pointer, b.pointer) == (True,) * 3 + (False,) * 2
    assert x.access == Access.READ | Access.WRITE
    assert (y.access, out.access) == (Access.READ, Access.WRITE)
    assert (x.dtype, y.dtype, out.dtype) == (np.float32, np.uint16, np.uint8)
    assert [p.size for p in signature.parameters] == [8, 8, 8, 4, 24]
    assert signature.index("out") == 2
    with pytest.raises(InputError, match="x, y, out, n, b"):
        signature.index("z")


def test_nothing_at_all() -> None:
    signature = Signature.parse("  ")
    assert (signature.parameters, signature.layout) == ((), ())
    assert signature.pack([]) == KernelArguments(b"", ())


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "x: f33",
        "x: *bytes[4]",
        "x: bytes",
        "x: bytes[0]",
        "x: f32[2]",
        "x: *const",
        "x: **f32",
        "1x: f32",
        "x: f32,",
        "x: f32, x: u32",
        "x: const f32",
    ],
)
def test_what_cannot_be_read_is_quoted(text: str) -> None:
    with pytest.raises(InputError, match="signature"):
        Signature.parse(text)


@given(st.lists(st.sampled_from([*SIZES, "*f32", "bytes[5]", "bytes[24]"]), max_size=12))
def test_layouts_are_aligned_dense_and_in_order(types: list[str]) -> None:
    signature = Signature.parse(", ".join(f"p{i}: {t}" for i, t in enumerate(types)))
    end = 0
    for kind, slot in zip(types, signature.layout, strict=True):
        size = SIZES.get(kind, 8 if kind.startswith("*") else 0) or int(kind[6:-1])
        alignment = 8 if kind.startswith("bytes") else size
        assert slot.size == size
        assert slot.offset % alignment == 0
        assert end <= slot.offset < end + alignment
        end = slot.offset + slot.size


def test_packing_as_c_would() -> None:
    signature = Signature.parse("a: i8, b: f64, c: u16, d: *f32, e: bytes[3], f: f32")
    packed = signature.pack([-1, 2.5, 65535, 0x123456789, b"xyz", np.float32(0.5)])
    assert packed.data == struct.pack("<b7xdH6xQ3sxf", -1, 2.5, 65535, 0x123456789, b"xyz", 0.5)
    assert packed.layout == signature.layout
    assert len(packed) == 6
    assert packed.raw(4) == b"xyz"
    kernel = HostKernel("k", print, signature)
    assert kernel.size == len(packed.data)
    assert kernel.unpack(packed.data) == (-1, 2.5, 65535, 0x123456789, b"xyz", 0.5)


@given(
    st.integers(-128, 127),
    st.integers(0, 2**32 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(width=32, allow_nan=False),
    st.floats(allow_nan=False),
    st.binary(min_size=5, max_size=5),
)
def test_what_is_packed_is_what_a_host_kernel_gets(
    a: int, b: int, c: int, d: float, e: float, f: bytes
) -> None:
    signature = Signature.parse("a: i8, f: bytes[5], b: u32, c: i64, d: f32, e: f64")
    kernel = HostKernel("k", print, signature)
    assert kernel.unpack(signature.pack([a, f, b, c, d, e]).data) == (a, f, b, c, d, e)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("u8", 256),
        ("u8", -1),
        ("i8", 128),
        ("u32", 1 << 32),
        ("i32", 1.0),
        ("i32", "1"),
        ("f32", "1"),
        ("f32", None),
        ("u32", np.int64(1)),
        ("f32", np.float64(1)),
        ("*f32", "x"),
        ("*f32", 1.5),
        ("*f32", True),
        ("*f32", -1),
        ("*f32", 1 << 64),
        ("bytes[4]", b"123"),
        ("bytes[4]", 4),
        ("bytes[4]", memoryview(np.zeros(4, np.int32))),  # 4 elements, 16 bytes
        ("bytes[4]", np.array([1], ">i4")),
        ("bytes[4]", np.array([(1,)], [("a", ">i4")])[0]),
        ("bytes[4]", np.ma.masked_array([1], [True], np.int32)),
        ("bytes[8]", np.array([None])),
    ],
)
def test_values_that_do_not_fit_are_named(kind: str, value: object) -> None:
    with pytest.raises(InputError, match="thing"):
        Signature.parse(f"thing: {kind}").pack([value])


def test_the_number_of_values() -> None:
    with pytest.raises(InputError, match=r"2 arguments .*x, n.* 1 were given"):
        Signature.parse("x: *f32, n: u32").pack([0])


def test_safe_numpy_scalars_and_structs() -> None:
    signature = Signature.parse("a: i64, b: f64, c: bytes[8]")
    pair = np.array([1, 2], np.int32)
    for struct_ in (pair, memoryview(pair), bytearray(pair.tobytes())):
        packed = signature.pack([np.uint32(7), np.float32(0.5), struct_])
        assert packed.data == struct.pack("<qdii", 7, 0.5, 1, 2)


def test_addresses_of_things() -> None:
    class Buffer:
        address = 64

    class Array:
        __cuda_array_interface__ = {"data": (128, False)}  # noqa: RUF012

    assert [address_of(v) for v in (32, np.uint64(48), Buffer(), Array())] == [32, 48, 64, 128]
    assert address_of("text") is None
    assert address_of(True) is None
    assert address_of(np.zeros(1)) is None  # host memory has no device address


def test_without_types_the_size_decides() -> None:
    slots = (ParameterSlot(0, 8), ParameterSlot(8, 4), ParameterSlot(12, 1), ParameterSlot(16, 8))
    packed = pack_untyped(slots, [0x1000, 1.5, -1, 2.5])
    assert packed.data == struct.pack("<Qfb3xd", 0x1000, 1.5, -1, 2.5)
    raw = pack_untyped((ParameterSlot(0, 4), ParameterSlot(4, 1)), [np.int32(-5), True])
    assert raw.data == struct.pack("<ib", -5, 1)


@pytest.mark.parametrize(
    ("size", "value"),
    [(4, 1 << 32), (4, -(1 << 31) - 1), (2, 1.5), (4, b"12345"), (8, "x"), (4, np.int64(1))],
)
def test_without_types_what_cannot_fit_is_refused(size: int, value: object) -> None:
    with pytest.raises(InputError, match="argument 0"):
        pack_untyped((ParameterSlot(0, size),), [value])
    with pytest.raises(InputError, match="takes 1 arguments"):
        pack_untyped((ParameterSlot(0, size),), [])


def test_arguments_are_changed_by_copy() -> None:
    packed = Signature.parse("x: *f32, n: u32").pack([1, 2])
    other = packed.with_bytes(packed.slot(1).offset, (9).to_bytes(4, "little"))
    assert (packed.raw(1), other.raw(1)) == (b"\2\0\0\0", b"\x09\0\0\0")
    assert other.with_bytes(0, b"\7").raw(0)[:1] == b"\7"
    for bad in (
        lambda: packed.raw(2),
        lambda: packed.raw(-1),
        lambda: packed.require_size(1, b"1"),
        lambda: packed.with_bytes(10, b"123"),
    ):
        with pytest.raises(InputError):
            bad()


def test_codes_are_those_of_the_types() -> None:
    """What `struct` packs by a parameter's code reads the same by its NumPy type."""
    for name in SIZES:
        parameter = Signature.parse(f"x: {name}").parameters[0]
        packed = struct.pack(f"<{parameter.code}", 3)
        assert np.frombuffer(packed, parameter.dtype).tolist() == [3]
    pointer, record = Signature.parse("x: *i32, s: bytes[12]").parameters
    assert (pointer.code, record.code) == ("P", "12s")
