"""Which graphs point into a buffer, as their next launches will use them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import (
    FunctionHandle,
    KernelArguments,
    KernelColumns,
    MemcpyNodeParams,
    MemOp,
    MemOpKind,
    NodeHandle,
)
from ostinato.errors import InputError
from ostinato.graph.words import WordIndex
from ostinato.memory.ranges import range_of
from tests.sources import config, kernel

N = 64


@pytest.fixture
def cache(device: Device) -> Iterator[ost.GraphCache]:
    with ost.GraphCache(device) as opened:
        yield opened


def scaled(device: Device, stream: ost.Stream, x: ost.Buffer) -> ost.Graph:
    """x *= 2"""
    scale = kernel(device, "scale")
    with ost.capture(stream) as capture:
        ost.launch(stream, scale, config(x.size), x, x.size)
    return capture.graph


def floats(device: Device, count: int = N) -> ost.Buffer:
    return device.zeros(count, np.float32)


def test_every_kind_of_pointer(device: Device, stream: ost.Stream, cache: ost.GraphCache) -> None:
    x, y, z, other = (floats(device) for _ in range(4))
    scale = kernel(device, "scale")
    with ost.capture(stream) as capture:
        ost.launch(stream, scale, config(N), x, N)
        ost.copy(stream, y, x)
        ost.fill(stream, z, 1.0)
    cache.install("all", capture.graph.instantiate())
    assert [cache.touching(b) for b in (x, y, z, other)] == [["all"], ["all"], ["all"], []]
    touches = {(t.node_index, t.place): t.range for t in cache.manifest("all")}
    assert touches == {
        (0, "argument 0"): x.range,
        (1, "dst"): y.range,
        (1, "src"): x.range,
        (2, "dst"): z.range,
    }
    with pytest.raises(InputError, match="'none'"):
        cache.manifest("none")


def test_views(device: Device, stream: ost.Stream, cache: ost.GraphCache) -> None:
    """What a launch was given reaches as far as the buffer it was given, not further."""
    rows = device.zeros((8, N), np.float32)
    cache.install("whole", scaled(device, stream, rows).instantiate())
    cache.install("middle", scaled(device, stream, rows[2:4]).instantiate())
    assert cache.touching(rows[3]) == ["whole", "middle"]
    assert cache.touching(rows[4]) == ["whole"]
    assert cache.touching(rows) == ["whole", "middle"]
    assert cache.touching(rows[3:3]) == []  # no bytes


@pytest.mark.parametrize("whole_first", [True, False])
def test_memory_that_a_launch_was_given_twice_reaches_as_far_as_the_longer(
    device: Device, stream: ost.Stream, whole_first: bool
) -> None:
    rows, out = device.zeros((8, N), np.float32), floats(device)
    given = (rows, rows[:1]) if whole_first else (rows[:1], rows)
    add, scale = kernel(device, "add"), kernel(device, "scale")
    with ost.capture(stream) as capture:
        ost.launch(stream, add, config(N), *given, out, N)
        ost.launch(stream, scale, config(N), rows[:2], N)  # another node's
    run = capture.graph.instantiate()
    found = [touch.range.nbytes for touch in run.manifest()]
    assert found == [rows.nbytes, rows.nbytes, 4 * N, 2 * 4 * N]
    with pytest.raises(InputError, match=r"node 0 \(add\) argument 0 \(a\) points 0 bytes"):
        run.rebind({rows[:1]: floats(device)})


def test_an_address_alone_reaches_to_the_end_that_its_memory_had(
    device: Device, stream: ost.Stream
) -> None:
    x, scale = floats(device), kernel(device, "scale")
    with ost.capture(stream) as capture:
        ost.launch(stream, scale, config(N), x.address + 16, N - 4)
    run = capture.graph.instantiate()
    (before,) = run.manifest()
    assert before.range.nbytes >= 4 * N - 16
    x.close()
    device.synchronize()
    assert run.manifest() == (before,)


def test_it_follows_patches_and_rebindings(
    device: Device, stream: ost.Stream, cache: ost.GraphCache
) -> None:
    x, y, z = (floats(device) for _ in range(3))
    run = scaled(device, stream, x).instantiate()
    cache.install("step", run)
    run.rebind({x: y})
    assert [cache.touching(b) for b in (x, y)] == [[], ["step"]]
    assert cache.touching(y.view(4 * (N - 1))) == ["step"]  # still as far as before
    run.set(0, "x", z)
    assert [cache.touching(b) for b in (x, y, z)] == [[], [], ["step"]]
    assert cache.evict_touching(x) == [] and "step" in cache
    assert cache.evict_touching(z) == ["step"] and run.closed
    assert not cache.replay("step", stream)
    assert cache.statistics().evictions.touching == 1


def test_it_follows_updates(device: Device, stream: ost.Stream, cache: ost.GraphCache) -> None:
    x, y = floats(device), floats(device)
    run = scaled(device, stream, x).instantiate()
    cache.install("step", run)
    run.update(scaled(device, stream, y))
    assert [cache.touching(b) for b in (x, y)] == [[], ["step"]]


def test_inside_child_graphs_and_bodies(
    device: Device, stream: ost.Stream, cache: ost.GraphCache
) -> None:
    x, y = floats(device), floats(device)
    outer = ost.Graph.create(device)
    outer.add_child(scaled(device, stream, x))
    branch = outer.add_conditional("if", outer.condition(default=1))
    scale = kernel(device, "scale")
    with ost.capture(stream, into=branch.bodies[0]):
        ost.launch(stream, scale, config(N), y, N)
    cache.install("outer", outer.instantiate())
    assert cache.touching(x) == ["outer"] and cache.touching(y) == ["outer"]
    places = [(t.node_index, t.place) for t in cache.manifest("outer")]
    assert places == [(0, "scale argument 0"), (1, "scale argument 0")]


def test_numbers_are_no_pointers_where_a_signature_says_so(
    device: Device, stream: ost.Stream, cache: ost.GraphCache
) -> None:
    x, out = floats(device), device.zeros(1, np.uint64)
    number = kernel(device, "number")
    with ost.capture(stream) as capture:
        ost.launch(stream, number, config(1), x.address, out)
    cache.install("typed", capture.graph.instantiate())
    assert cache.touching(x) == [] and cache.touching(out) == ["typed"]


@pytest.mark.parametrize("patched", [True, False])
def test_an_address_in_two_halves_is_seen_and_stays(host_device: Device, patched: bool) -> None:
    @ost.host_kernel("low: u32, high: u32, x: *out f32")
    def halves(launch: object, low: int, high: int, x: object) -> None: ...

    made = host_device.modules.get_or_compile(ost.Source(host=[halves], name="halves"), "halves")
    x, y, other = (floats(host_device) for _ in range(3))
    stream, low, high = host_device.create_stream(), x.address & 0xFFFF_FFFF, x.address >> 32
    with ost.capture(stream) as capture:
        ost.launch(stream, made, config(1), low, high, x)
    run = capture.graph.instantiate()
    if patched:
        run.set(0, "x", other)
    assert run.touches(x) and not run.touches(y)
    assert [touch.place for touch in run.manifest()] == ["argument 0", "argument 2"]
    report = run.rebind({x: y})
    assert [word.place for word in report.words] == ([] if patched else ["argument 2 (x)"])
    assert [left.place for left in report.left] == ["argument 0"]
    assert run.touches(x) and run.touches(y) is not patched


def test_memory_nodes(device: Device, cache: ost.GraphCache) -> None:
    x = device.zeros(4, np.uint32)
    graph = ost.Graph.create(device)
    placed = graph.add_alloc(4096)
    write = MemOp(MemOpKind.WRITE, x.address + 4, 7)
    graph.add_batch_mem_op([write], keep=[x], after=[placed])
    graph.add_free(placed.alloc.address, after=[graph.nodes()[1]])
    graph.add_call(lambda: None)
    cache.install("all", graph.instantiate())
    assert cache.touching(x) == ["all"] and cache.touching(x[2:]) == []
    assert cache.touching(ost.MemoryRange(placed.alloc.address + 4000, 8)) == ["all"]
    places = [t.place for t in cache.manifest("all")]
    assert places == ["allocation", "operation 0", "freed"]


def test_rows_of_a_copy(device: Device, cache: ost.GraphCache) -> None:
    """A copy reaches from its first row to the end of its last, gaps included."""
    x, y = device.zeros((8, 16), "bytes"), device.zeros((8, 16), "bytes")
    graph = ost.Graph.create(device)
    rows = MemcpyNodeParams(y.address, x[1].address, 4, height=3, dst_pitch=4, src_pitch=16)
    graph.add(rows, keep=[x, y])
    cache.install("rows", graph.instantiate())
    assert [t.range for t in cache.manifest("rows")] == [
        ost.MemoryRange(y.address, 12),
        ost.MemoryRange(x[1].address, 36),
    ]
    assert [cache.touching(x[n]) for n in (0, 1, 3, 4)] == [[], ["rows"], ["rows"], []]


def test_packed_arguments() -> None:
    """One buffer of unknown layout, as cuBLAS gives it: its words are searched."""
    packed = KernelArguments(bytes(8) + (4096).to_bytes(8, "little"), (), packed=True)
    columns = KernelColumns(["gemm"], np.array([0]), np.array([16]), packed.data)
    frozen: Any = SimpleNamespace(kernels=columns, kernel=lambda _: (FunctionHandle(1), packed))
    nodes: Any = SimpleNamespace(
        frozen=frozen,
        handles=(NodeHandle(1),),
        outer=(),
        name=lambda _: "gemm",
        operations=lambda indices: [None for _ in indices],
    )
    index = WordIndex([(nodes, range(1))], {})
    assert index.touches(ost.MemoryRange(4000, 200), None)
    assert not index.touches(ost.MemoryRange(4100, 200), None)
    assert not index.touches(ost.MemoryRange((1 << 64) - 8, 8), None)
    # How far the word is used is not known: up to the end of its allocation, if that is alive.
    assert index.touches(ost.MemoryRange(4100, 200), ost.MemoryRange(4000, 400))
    assert not index.touches(ost.MemoryRange(4100, 200), ost.MemoryRange(4100, 400))


def test_words_of_adopted_graphs(device: Device, stream: ost.Stream, cache: ost.GraphCache) -> None:
    """Without a signature, a word that lies in the memory asked about counts."""
    x, gone, other = floats(device), floats(device), floats(device)
    for key, buffer in (("x", x), ("gone", gone)):
        graph = scaled(device, stream, buffer)
        cache.install(key, ost.Graph.adopt(device, graph.handle, owner=graph).instantiate())
    assert [cache.touching(b) for b in (x, gone, other)] == [["x"], ["gone"], []]
    assert [t.range.address for t in cache.manifest("x")] == [x.address]
    gone.close()
    device.synchronize()
    assert cache.evict_touching(gone) == ["gone"]  # also when no allocation confirms it any more


def test_a_graph_that_cannot_be_read_touches_everything(
    device: Device, stream: ost.Stream, cache: ost.GraphCache
) -> None:
    x, other = floats(device), floats(device)
    early, late = scaled(device, stream, x), scaled(device, stream, x)
    early_run, late_run = early.instantiate(), late.instantiate()
    early.close()
    cache.install("early", early_run)
    cache.install("late", late_run)
    late.close()
    assert cache.touching(other) == ["early"]
    assert cache.touching(x) == ["early", "late"]


def test_ranges_of_things() -> None:
    def array(**interface: object) -> object:
        return SimpleNamespace(__cuda_array_interface__={"version": 3, **interface})

    own = ost.MemoryRange(256, 8)
    assert range_of(own) is own
    plain = array(shape=(2, 3), typestr="<f4", data=(4096, False))
    assert range_of(plain) == ost.MemoryRange(4096, 24)
    back = array(shape=(2, 3), typestr="<f4", data=(4096, False), strides=(100, -4))
    assert range_of(back) == ost.MemoryRange(4096 - 8, 100 + 8 + 4)
    empty = array(shape=(2, 0), typestr="<f4", data=(4096, False), strides=(100, 4))
    assert range_of(empty) == ost.MemoryRange(4096, 0)
    text = array(shape=(4,), typestr="<U4", data=(4096, False))
    assert range_of(text) == ost.MemoryRange(4096, 4 * np.dtype("<U4").itemsize)
    times = array(shape=[4], typestr="<M8[ns]", data=(4096, False))
    assert range_of(times) == ost.MemoryRange(4096, 32)
    listed = array(shape=(2,), typestr="<f4", data=(4096, False), strides=[100])
    assert range_of(listed) == ost.MemoryRange(4096, 104)
    for wrong in (4096, "x", np.zeros(3)):
        with pytest.raises(InputError, match="MemoryRange"):
            range_of(wrong)
    with pytest.raises(InputError, match="'zz' of an array interface is no type"):
        range_of(array(shape=(4,), typestr="zz", data=(4096, False)))
