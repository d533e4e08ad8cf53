"""What may be joined: arrays of several libraries; and errors that name the column."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device, open_device
from ostinato.errors import InputError
from ostinato.relational import Joiner, KeyColumns
from ostinato.testing import HeldStream
from tests.relational.tables import pairs

ONE = {"k": np.array([1, 2])}


def test_buffers_are_referred_to_and_arrays_copied(joiner: Joiner) -> None:
    values = np.array([5, 6, 7])
    buffer = joiner.device.array(values)
    assert joiner.columns({"k": buffer}, "k").addresses == (buffer.address,)
    columns = joiner.columns({"k": values}, "k")
    values[:] = 0
    assert pairs(joiner.join(columns, {"k": np.array([7])}, "k")).tolist() == [[2, 0]]
    assert repr(columns) == f"<KeyColumns k: int64; 3 rows on {joiner.device.name}>"
    assert (len(columns), columns.names, columns.key_bytes) == (3, ("k",), 8)


def test_views_and_strided_arrays(joiner: Joiner) -> None:
    values = np.arange(20, dtype=np.int32)
    right = {"k": joiner.device.array(values)[10:]}
    result = joiner.join({"k": values[::-3]}, right, on="k")
    assert pairs(result).tolist() == [[0, 9], [1, 6], [2, 3], [3, 0]]


def test_key_columns_need_no_names(joiner: Joiner) -> None:
    left = joiner.columns({"a": np.array([1, 2])}, "a")
    right = joiner.columns({"b": np.array([2])}, "b")
    assert pairs(joiner.join(left, right)).tolist() == [[1, 0]]
    assert pairs(joiner.join(left, joiner.build_index(right))).tolist() == [[1, 0]]
    with pytest.raises(InputError, match="key columns are a, and b are asked for"):
        joiner.join(left, right, on="b")
    with pytest.raises(InputError, match="on=… is needed"):
        joiner.join({"a": np.array([1])}, right)


def test_an_arrow_table(joiner: Joiner) -> None:
    arrow = pytest.importorskip("pyarrow")
    whole = arrow.table({"k": np.array([1, 2, 3]), "b": np.array([4, 5, 6], np.uint32)})
    chunks = arrow.concat_tables([whole.slice(1), whole.slice(0, 0), whole.slice(0, 2)])
    for left, wanted in ((whole, [[1, 0]]), (chunks, [[0, 0], [3, 0]]), (whole.slice(3), [])):
        right = {"k": np.array([2]), "b": np.array([5], np.uint32)}
        assert pairs(joiner.join(left, right, on=["k", "b"])).tolist() == wanted
    batch = whole.to_batches()[0]
    assert pairs(joiner.join(batch, {"k": arrow.array([3])}, on="k")).tolist() == [[2, 0]]
    empty = arrow.chunked_array([], arrow.int64())
    assert pairs(joiner.join({"k": empty}, ONE, on="k")).tolist() == []


def test_nulls_are_refused(joiner: Joiner) -> None:
    arrow = pytest.importorskip("pyarrow")
    with pytest.raises(InputError, match="column 'k' has 1 nulls"):
        joiner.join(arrow.table({"k": [1, None, 3]}), ONE, on="k")
    with pytest.raises(InputError, match="column 'k' has 1 nulls"):
        joiner.join(ONE, {"k": arrow.array([1, None])}, on="k")


def test_a_column_at_an_odd_address_is_refused(joiner: Joiner) -> None:
    """A GPU cannot read it, and the process would lose its context."""
    memory = joiner.device.zeros(32, "bytes")
    for dtype, offset in ((np.int64, 4), (np.int32, 1)):
        with pytest.raises(InputError, match="column 'k' begins at"):
            joiner.columns({"k": memory.view(offset, 2, dtype)}, "k")
    assert len(joiner.columns({"k": memory.view(4, 2, np.int32)}, "k")) == 2


def test_a_masked_column_of_structs_is_refused(joiner: Joiner) -> None:
    values = np.ma.masked_array([(1, 2)], [(True, False)], [("a", np.int32), ("b", np.int32)])
    with pytest.raises(InputError, match="keys are of type"):
        joiner.columns({"k": values}, "k")


def test_masked_values_are_refused(joiner: Joiner) -> None:
    values = np.ma.masked_equal(np.array([1, 2, 3]), 2)
    with pytest.raises(InputError, match="column 'k' has masked values"):
        joiner.join({"k": values}, ONE, on="k")
    whole = np.ma.masked_array([2, 3])
    assert pairs(joiner.join({"k": whole}, ONE, on="k")).tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.array([1.0]), "column 'k' is float64; keys are of type int32, uint32, int64, uint64"),
        (np.array([1], np.int16), "column 'k' is int16"),
        (np.array([True]), "column 'k' is bool"),
        (np.array(["a"]), "column 'k' is <U1"),
        (np.array([None]), "column 'k' is object"),
        (np.array([1], ">i8"), "column 'k' is >i8"),
        (np.array(["2020-01-01"], "M8[D]"), "column 'k' is datetime64"),
        (np.array([[1, 2]]), r"column 'k' has shape \[1, 2\]"),
        (np.array(1), r"column 'k' has shape \[\]"),
        ([1, 2], "column 'k' is a list"),
        (None, "column 'k' is a NoneType"),
    ],
)
def test_what_is_no_column(joiner: Joiner, values: Any, words: str) -> None:
    for left, right in (({"k": values}, ONE), (ONE, {"k": values})):
        with pytest.raises(InputError, match=words):
            joiner.join(left, right, on="k")
    with pytest.raises(InputError, match=words):
        joiner.build_index({"k": values}, on="k")


def test_types_must_be_the_same(joiner: Joiner) -> None:
    other = {"k": np.array([1], np.int32)}
    with pytest.raises(
        InputError, match="'k' is int64 on the left, and column 'k' is int32 on the"
    ):
        joiner.join(ONE, other, on="k")
    with pytest.raises(InputError, match="column 'a' is uint64 on the left"):
        joiner.join({"a": np.array([1], np.uint64)}, joiner.build_index(ONE, "k"), on="a")


def test_lengths_must_be_the_same(joiner: Joiner) -> None:
    uneven = {"a": np.array([1, 2]), "b": np.array([1])}
    with pytest.raises(InputError, match="column 'b' has 1 rows, and column 'a' has 2"):
        joiner.join(uneven, {"a": np.array([1]), "b": np.array([1])}, on=["a", "b"])


def test_unknown_columns(joiner: Joiner) -> None:
    with pytest.raises(InputError, match="no column 'x'; there are: k"):
        joiner.join(ONE, ONE, on="x")
    with pytest.raises(InputError, match="no column 'x'; there are: none"):
        joiner.build_index({}, on="x")
    with pytest.raises(InputError, match="a list is no table"):
        joiner.join([1, 2], ONE, on="k")
    arrow = pytest.importorskip("pyarrow")
    twice = arrow.Table.from_arrays([arrow.array([1]), arrow.array([2])], names=["k", "k"])
    with pytest.raises(InputError, match="2 columns 'k'"):
        joiner.join(twice, ONE, on="k")


@pytest.mark.parametrize(
    "on", [[], [("a", "b", "c")], [3], [("a", 3)], 5, ["k"] * 256], ids=lambda on: str(on)[:20]
)
def test_what_is_no_list_of_names(joiner: Joiner, on: Any) -> None:
    with pytest.raises(InputError, match="on"):
        joiner.join(ONE, ONE, on=on)


def test_the_order_of_an_indexs_columns_is_kept_to(joiner: Joiner) -> None:
    """Columns are compared by place: another order would compare others, without an error."""
    table = {"a": np.array([1, 2]), "b": np.array([2, 2]), "c": np.array([2, 2])}
    index = joiner.build_index(table, on=["a", "b"])
    for on in (["b", "a"], [("b", "b"), ("a", "a")], ["b", "c"], ["c", "a"]):
        with pytest.raises(InputError, match="the index has its key columns in the order a, b"):
            joiner.join(table, index, on=on)
    assert pairs(joiner.join(table, index, on=["a", "c"])).tolist() == [[0, 0], [1, 1]]
    assert pairs(joiner.join(table, index, on=[("b", "a"), ("a", "b")])).tolist() == [[1, 1]]


def test_one_table_has_no_pairs_of_names(joiner: Joiner) -> None:
    table = {"a": np.array([1]), "b": np.array([2])}
    assert joiner.columns(table, on=["a", ("b", "b")]).names == ("a", "b")
    with pytest.raises(InputError, match=r"'a' and 'b'.*one table"):
        joiner.columns(table, on=[("a", "b")])


@pytest.mark.parametrize("capacity", [-1, 2**32, 1.5, "8", True, np.ones(2, int), int])
def test_what_is_no_capacity(joiner: Joiner, capacity: Any) -> None:
    with pytest.raises(InputError, match="capacity"):
        joiner.join(ONE, ONE, on="k", capacity=capacity)


def test_too_many_rows(host_device: Device) -> None:
    """Without the memory: a view that says that it has them."""
    rows = 2**32 - 1
    buffer = ost.Buffer(
        host_device.context, host_device.empty(8, "bytes").address, (rows,), np.dtype(np.int32)
    )
    with pytest.raises(InputError, match=f"column 'k' has {rows} rows; a join takes fewer"):
        KeyColumns(host_device, host_device.create_stream(), ("k",), (buffer,))


def test_columns_of_another_device(joiner: Joiner) -> None:
    """Also of the same one, opened another time."""
    for name, words in (("host", "host, another"), (joiner.device.name, ".*opened another time")):
        with open_device(name) as other:
            buffer = other.array(np.array([1]))
            for table in ({"k": buffer}, Joiner(other).columns({"k": buffer}, "k")):
                with pytest.raises(InputError, match=f"column 'k' lives on {words}"):
                    joiner.join(ONE, table, on="k")


def test_cuda_arrays_are_not_memory_of_the_host(host_joiner: Joiner) -> None:
    interface = {"shape": (2,), "typestr": "<i8", "data": (0x7F0000000000, False), "version": 3}
    foreign = SimpleNamespace(__cuda_array_interface__=interface)
    with pytest.raises(InputError, match="column 'k' is not in memory of host"):
        host_joiner.join({"k": foreign}, ONE, on="k")
    strided = SimpleNamespace(__cuda_array_interface__=interface | {"strides": (16,)})
    with pytest.raises(InputError, match=r"column 'k': .*strided"):
        host_joiner.join({"k": strided}, ONE, on="k")

    class OnCuda:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self, **_: Any) -> object:
            raise AssertionError("it is refused before")

    with pytest.raises(InputError, match=r"column 'k' lives on DLPack device \(2, 0\)"):
        host_joiner.join({"k": OnCuda()}, ONE, on="k")


class Foreign:
    """Another library's array over a buffer of ours; `stream` fills it."""

    def __init__(self, buffer: ost.Buffer, stream: int | None) -> None:
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": buffer.shape,
            "typestr": buffer.dtype.str,
            "data": (buffer.address, False),
            "version": 3,
            "stream": stream,
        }


@pytest.mark.parametrize(
    "how", ["stream said", "not said", "of another joiner", "of a closed stream"]
)
def test_work_that_fills_columns_is_waited_for(device: Device, how: str) -> None:
    """That of another library's stream, of another joiner's, and of one that was closed, which does
    not wait for its work."""
    stream, values = device.create_stream(), device.zeros(4, np.int64)
    filled = np.array([9, 2, 9, 9])
    source = device.array(filled)
    with Joiner(device, stream=stream) as one, Joiner(device) as other:
        for joiner in (one, other):  # takes all memory beforehand: giving some back would wait
            for _ in range(2):
                joiner.join({"k": filled}, ONE, on="k")
        right = other.columns(ONE, "k")
        gc.collect()
        device.synchronize()
        device.context.collect()
        with HeldStream(stream) as held:
            ost.copy(stream, values, source)
            held.release_after(0.2)
            columns: Any = {"k": Foreign(values, stream.handle if how == "stream said" else None)}
            if how.startswith("of"):
                columns = one.columns({"k": values if "closed" in how else filled}, "k")
            if "closed" in how:
                stream.close()
            pending = other.submit(columns, right, on=None if how.startswith("of") else "k")
            assert pairs(pending.result()).tolist() == [[1, 1]]


def test_an_array_on_the_processor_through_dlpack(joiner: Joiner) -> None:
    class OnCpu:
        values = np.array([4, 2])

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.values.__dlpack_device__()

        def __dlpack__(self, **options: Any) -> object:
            return self.values.__dlpack__(**options)

    assert pairs(joiner.join({"k": OnCpu()}, ONE, on="k")).tolist() == [[1, 1]]


@pytest.mark.parametrize("error", [BufferError("conjugate"), RuntimeError("a type of its own")])
def test_what_an_array_refuses_to_hand_out_names_the_column(
    joiner: Joiner, error: Exception
) -> None:
    class Refusing:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **options: Any) -> object:
            raise error

    with pytest.raises(InputError, match=f"column 'k': .*{error}"):
        joiner.join({"k": Refusing()}, ONE, on="k")


def test_a_series_is_no_array_of_arrow(joiner: Joiner) -> None:
    polars = pytest.importorskip("polars")
    with pytest.raises(InputError, match="column 'k' is a Series; give a NumPy array"):
        joiner.join({"k": polars.Series([1, 2])}, ONE, on="k")


def test_types_of_arrow_that_have_no_numbers(joiner: Joiner) -> None:
    arrow = pytest.importorskip("pyarrow")
    kinds = (arrow.date32(), arrow.decimal128(5), arrow.bool_(), arrow.float64(), arrow.string())
    for kind in kinds:
        with pytest.raises(InputError, match=r"column 'k' is .*; keys are of type int32"):
            joiner.join({"k": arrow.array([None], kind)[:0]}, ONE, on="k")
    encoded = arrow.chunked_array([arrow.array(v).dictionary_encode() for v in ([1, 9], [9, 2])])
    assert pairs(joiner.join({"k": encoded}, ONE, on="k")).tolist() == [[0, 0], [3, 1]]


@pytest.mark.gpu
def test_arrays_of_cupy_and_torch(cuda_device: Device) -> None:
    found = [name for name in ("cupy", "torch") if _importable(name)]
    if not found:
        pytest.skip("neither CuPy nor torch is installed")
    with Joiner(cuda_device) as joiner:
        for name in found:
            module = sys.modules[name]
            array = module.asarray([3, 2, 1])
            array = array.cuda() if name == "torch" else array
            result = joiner.join({"k": array}, ONE, on="k")
            assert pairs(result).tolist() == [[1, 1], [2, 0]]


def _importable(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True
