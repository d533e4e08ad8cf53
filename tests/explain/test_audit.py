"""The pointer audit, on both drivers: each pointer is live, freed, moved, unknown or null."""

from __future__ import annotations

import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.explain import KnownMemory, PointerReport, add_memory_source
from ostinato.graph.audit import MemoryMap, _sources, of_driver
from tests.sources import config, kernel

N = 64


def scaled(device: Device, x: object) -> ost.Graph:
    graph = ost.Graph.create(device)
    graph.add_kernel(kernel(device, "scale"), config(N), x, N)
    return graph


def only(graph: ost.Graph | ost.GraphExec) -> PointerReport:
    (pointer,) = graph.audit().pointers
    return pointer


def test_a_live_pointer_names_buffer_and_offset(device: Device) -> None:
    x = device.zeros(N, "f4", name="x")
    for found in (only(scaled(device, x[4:])), only(scaled(device, x[4:]).instantiate())):
        assert (found.node, found.name, found.place) == ("0", "scale", "argument 0 (x)")
        assert (found.state, found.address) == ("live", x.address + 16)
        assert found.memory.startswith("16 bytes into 'x' float32[64] (256 bytes at ")
    assert not scaled(device, x).audit().suspects


def test_a_closed_buffer_is_freed(device: Device) -> None:
    x = device.zeros(N, "f4", name="x")
    run = scaled(device, x).instantiate()
    x.close()
    found = only(run)
    assert found.state == "freed" and "'x' float32[64]" in found.memory
    assert run.audit().suspects == (found,)
    assert "1 pointer, 1 suspect\nnode 0 (scale) argument 0 (x) = " in str(run.audit())


def test_a_view_with_a_name_is_named_and_its_memory_too(device: Device) -> None:
    weights = device.zeros(2 * N, "f4", name="weights")
    bias = weights[N:]
    bias.name = "bias"
    graph = scaled(device, bias)
    (found,) = graph.audit().pointers
    assert found.state == "live"
    assert found.memory.startswith("'bias' float32[64] in 'weights' (256 bytes at ")
    weights.close()
    (found,) = graph.audit().pointers
    assert found.state == "freed"
    assert found.memory.startswith("'bias' float32[64] in 'weights' (256 bytes at ")


def test_a_closed_buffer_is_freed_while_a_capture_delays_that(
    device: Device, stream: ost.Stream
) -> None:
    x, y = device.zeros(N, "f4", name="x"), device.zeros(N, "f4")
    graph = scaled(device, x)
    with ost.capture(stream):
        ost.fill(stream, y, 1)
        x.close()
        found = only(graph)
    assert found.state == "freed"


def test_a_closed_view_frees_nothing(device: Device) -> None:
    x = device.zeros(N, "f4", name="x")
    view = x[8:]
    graph = scaled(device, view)
    view.close()
    assert only(graph).state == "live"


def test_memory_whose_place_another_buffer_has_is_moved(device: Device) -> None:
    """The launch would write into the other one, without an error of the driver."""
    x = device.zeros(N, "f4", name="x")
    graph, address = scaled(device, x), x.address
    x.close()
    device.synchronize()
    others = []
    for _ in range(64):
        others.append(device.zeros(N, "f4", name="y"))
        if others[-1].address == address:
            break
    else:
        pytest.skip("the driver gave no address again")
    found = only(graph)
    assert found.state == "moved" and "whose place is now that of 'y' float32[64]" in found.memory


def test_an_address_in_no_allocation_has_a_nearest_one(device: Device) -> None:
    x = device.driver.mem_alloc(N * 4)
    device.driver.mem_free(x)
    found = only(scaled(device, x))
    assert found.state == "unknown" and scaled(device, x).audit().suspects
    y = device.zeros(N, "f4", name="y")
    before, after = (
        only(scaled(device, y.address - 16)),
        only(scaled(device, y.address + (1 << 40))),
    )
    assert after.state == "unknown" and after.memory == "far from all known memory"
    if before.state == "unknown":  # else another allocation is there
        assert before.misses == -16 and "16 bytes before 'y' float32[64]" in str(before)


def test_a_null_pointer_is_null_and_no_suspect(device: Device) -> None:
    graph = scaled(device, 0)
    assert only(graph).state == "null" and not graph.audit().suspects


def test_copies_fills_and_nodes_inside_of_others_are_looked_at(device: Device) -> None:
    x, y = device.zeros(N, "f4", name="x"), device.zeros(N, "f4", name="y")
    graph = ost.Graph.create(device)
    graph.add_copy(y, x)
    graph.add_fill(y, 0)
    graph.add_child(scaled(device, x))
    body = graph.add_conditional("if", graph.condition()).bodies[0]
    body.add_kernel(kernel(device, "scale"), config(N), y, N)
    found = [(p.node, p.place) for p in graph.audit().pointers]
    assert found == [
        ("0", "dst"),
        ("0", "src"),
        ("1", "dst"),
        ("2/0/0", "argument 0 (x)"),
        ("3/0/0", "argument 0 (x)"),
    ]


def test_the_executable_counts_and_not_its_definition(device: Device) -> None:
    x, y = device.zeros(N, "f4", name="x"), device.zeros(N, "f4", name="y")
    run = scaled(device, x).instantiate()
    run.rebind({x: y})
    assert "'y'" in only(run).memory and "'x'" in only(run.graph).memory


def test_adopted_graphs_have_words_that_may_be_pointers(device: Device) -> None:
    whole = scaled(device, device.zeros(N, "f4", name="x"))
    found = only(ost.Graph.adopt(device, int(whole.handle), owner=whole))
    assert not found.typed and found.state == "live"


def test_other_libraries_tell_of_their_memory(device: Device) -> None:
    memory = ost.MemoryRange(1 << 45, 4096)
    block = KnownMemory(ost.MemoryRange((1 << 45) + 512, 256), "a block", live=False)

    def source(context: object) -> list[KnownMemory]:
        return [KnownMemory(memory, "a segment"), block] if context is device.context else []

    add_memory_source(source)
    add_memory_source(source)
    try:
        assert only(scaled(device, (1 << 45) + 16)).state == "live"
        assert (
            scaled(device, 1 << 45).audit().pointers[0].memory.startswith("a segment (4096 bytes")
        )
        assert _sources.count(source) == 1
    finally:
        _sources.remove(source)


def test_what_a_library_took_back_is_freed_though_the_driver_has_it(device: Device) -> None:
    segment = ost.MemoryRange(1 << 45, 4096)
    block = KnownMemory(ost.MemoryRange((1 << 45) + 512, 256), "a block", live=False)

    def source(context: object) -> list[KnownMemory]:
        return [block]

    add_memory_source(source)
    try:
        memory = MemoryMap(device.context, ask_driver=False, noted=[of_driver(segment)])
        assert memory.at((1 << 45) + 600) == block
        assert memory.at(1 << 45) == of_driver(segment)
    finally:
        _sources.remove(source)
