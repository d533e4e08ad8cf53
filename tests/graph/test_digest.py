"""The digest of a graph: equal for equal shapes, whatever they point at, and for no others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from tests.sources import config, kernel

Build = Callable[[Device, ost.Graph, list[ost.Buffer]], None]


def chain(
    device: Device,
    graph: ost.Graph,
    buffers: list[ost.Buffer],
    *,
    value: float = 1.0,
    n: int = 64,
    name: str = "fill",
    joined: bool = True,
    copied: int = 64,
    filled: type = np.float32,
) -> None:
    """A fill, a kernel after it, and a copy after both, or after the kernel alone."""
    x, y = buffers
    fill = graph.add_fill(x.view(dtype=filled), 0)
    arguments = (x, value, 64) if name == "fill" else (x, 64)
    scaled = graph.add_kernel(kernel(device, name), config(n), *arguments, after=[fill])
    graph.add_copy(y[:copied], x[:copied], after=[fill, scaled] if joined else [scaled])


def digest_of(device: Device, build: Build, n: int = 64) -> str:
    buffers = [device.zeros(n, np.float32) for _ in range(2)]
    graph = ost.Graph.create(device)
    build(device, graph, buffers)
    return graph.digest()


def test_addresses_handles_and_values_do_not_count(device: Device) -> None:
    first = digest_of(device, chain)
    assert len(first) == 64 and int(first, 16)
    kept = [device.zeros(1000, np.float32) for _ in range(3)]
    assert digest_of(device, chain) == first, "other buffers, functions and handles"

    assert digest_of(device, partial(chain, value=2.0)) == first and len(kept) == 3


def test_a_captured_graph_and_its_clone_have_one_digest(device: Device) -> None:
    stream, x = device.create_stream(), device.zeros(64, np.float32)
    with ost.capture(stream) as capture:
        for _ in range(3):
            ost.launch(stream, kernel(device, "scale"), config(64), x, 64)
    run = capture.graph.instantiate()
    before = capture.graph.digest()
    assert capture.graph.clone().digest() == before
    run.rebind({x: device.zeros(64, np.float32)})
    assert capture.graph.digest() == before


def one_more(device: Device, graph: ost.Graph, buffers: list[ost.Buffer]) -> None:
    chain(device, graph, buffers)
    graph.add_empty()


def as_a_child(
    device: Device, graph: ost.Graph, buffers: list[ost.Buffer], *, joined: bool = True
) -> None:
    child = ost.Graph.create(device)
    chain(device, child, buffers, joined=joined)
    graph.add_child(child)


def test_what_runs_and_in_which_order_counts(device: Device) -> None:
    builds: dict[str, Build] = {
        "chain": chain,
        "other kernel": partial(chain, name="scale"),
        "other grid": partial(chain, n=256),
        "other edges": partial(chain, joined=False),
        "other copy": partial(chain, copied=32),
        "other fill": partial(chain, filled=np.uint8),
        "one more": one_more,
        "as a child": as_a_child,
        "as another child": partial(as_a_child, joined=False),
    }
    digests = {name: digest_of(device, build) for name, build in builds.items()}
    assert len(set(digests.values())) == len(builds), digests


@pytest.mark.parametrize("kind", ["if", "while", "switch"])
def test_bodies_count(device: Device, kind: Literal["if", "while", "switch"]) -> None:
    def build(device: Device, graph: ost.Graph, filled: bool) -> str:
        node = graph.add_conditional(kind, graph.condition())
        if filled:
            node.bodies[0].add_empty()
        return graph.digest()

    def digest(filled: bool) -> str:
        return build(device, ost.Graph.create(device), filled)

    assert digest(True) == digest(True) != digest(False) == digest(False)
