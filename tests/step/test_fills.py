"""Kernels in the place of small fills."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import MemsetNodeParams
from ostinato.errors import GraphError, InputError
from ostinato.step import fills
from ostinato.step.fills import FILL
from tests.emulator.emulator import Emulator
from tests.sources import config, kernel


def replaced(device: Device, at: int, size: int) -> None:
    """A small fill, one with gaps and a large one: the first alone becomes a kernel."""
    stream = device.create_stream()
    values = np.random.default_rng(at + size).integers(0, 256, 50_000, np.uint8)
    x, width = device.array(values), 40_000 // size - 1
    value = 0xA1B2C3D4 >> 8 * (4 - size)
    fill = MemsetNodeParams(x.address + at, value, size, width)
    gaps = MemsetNodeParams(x.address + 45_000, 7, 1, 3, 2, 10)
    graph = ost.Graph.create(device)
    first = graph.add(fill, keep=[x])
    second = graph.add(gaps, after=[first], keep=[x])
    large = device.zeros(1 << 16, "u1")
    graph.add_fill(large, 1, after=[second])
    assert ost.lowlevel.replace_small_fills(device, graph) == 1
    assert sorted(node.name for node in graph.nodes()) == ["memset", "memset", FILL]
    assert ost.lowlevel.replace_small_fills(device, graph) == 0
    graph.instantiate().launch(stream)
    wanted = values.copy()
    pattern = np.frombuffer(value.to_bytes(size, "little"), np.uint8)
    wanted[at : at + size * width] = np.tile(pattern, width)
    wanted[[45_000, 45_001, 45_002, 45_010, 45_011, 45_012]] = 7
    np.testing.assert_array_equal(x.to_numpy(stream), wanted)
    assert (large.to_numpy(stream) == 1).all()


PLACES = [(at, size) for at in (0, 4, 2, 1) for size in (1, 2, 4) if at % size == 0]


@pytest.mark.parametrize(("at", "size"), PLACES)
def test_a_small_fill_becomes_a_kernel(device: Device, at: int, size: int) -> None:
    replaced(device, at, size)


@pytest.mark.parametrize(("at", "size"), PLACES)
def test_the_kernel_in_cuda_fills_the_same_on_the_emulator(
    host_device: Device, monkeypatch: pytest.MonkeyPatch, at: int, size: int
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    code = fills.source()
    plain = ost.Source(code.cuda, signatures={FILL: code.host[FILL].signature})
    emulated = ost.Source(host=[Emulator().host_kernel(plain, FILL)])
    monkeypatch.setattr(fills, "source", lambda: emulated)
    replaced(host_device, at, size)


def test_a_captured_fill_between_kernels(device: Device) -> None:
    stream, x = device.create_stream(), device.zeros(300, "f4")
    scale = ost.prepare(kernel(device, "scale"), config(300), x, 300)
    with ost.capture(stream) as capture:
        stream.submit(scale)
        ost.fill(stream, x, 0x40)  # every byte: 3.00390625
        stream.submit(scale)
    with ost.capture(stream) as other:
        ost.fill(stream, x, 0x40)
        stream.submit(scale)
    assert ost.lowlevel.replace_small_fills(device, capture.graph) == 1
    assert [node.kind for node in capture.graph.nodes()] == [ost.NodeKind.KERNEL] * 3
    other.graph.instantiate().launch(stream)
    wanted = x.to_numpy(stream)
    x.set(np.zeros(300, "f4"), stream)
    capture.graph.instantiate().launch(stream)
    np.testing.assert_array_equal(x.to_numpy(stream), wanted)
    assert wanted.any()


def test_what_cannot_be_replaced_is_left_or_said(device: Device, host_device: Device) -> None:
    x = device.zeros(300, "f4")
    graph = ost.Graph.create(device)
    graph.add_fill(x, 1)
    if device is not host_device:
        with pytest.raises(InputError, match="is not of"):
            ost.lowlevel.replace_small_fills(host_device, graph)
    with ost.open_device("host") as another, pytest.raises(InputError, match="is not of"):
        ost.lowlevel.replace_small_fills(another, graph)
    outer = ost.Graph.create(device)
    outer.add_child(graph)
    assert ost.lowlevel.replace_small_fills(device, outer) == 0
    graph.instantiate().close()
    with pytest.raises(GraphError, match="an executable"):
        ost.lowlevel.replace_small_fills(device, graph)
    assert [node.name for node in graph.nodes()] == ["memset"]
    allocating = ost.Graph.create(device)
    allocating.add_fill(x, 1)
    allocating.add_alloc(64)
    assert ost.lowlevel.replace_small_fills(device, allocating) == 0
