"""The first difference and the times of nodes in graphs that PyTorch captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import KernelNodeParams
from ostinato.explain import first_difference
from tests.gpu.foreign import library

torch: Any = library("torch")

pytestmark = [
    *(pytest.mark.gpu, pytest.mark.filterwarnings("ignore")),
    pytest.mark.usefixtures("no_gradients"),
]
ROWS, INNER, OUTER = 64, 256, 512


def bits(tensor: Any) -> bytes:
    return bytes(tensor.cpu().numpy().tobytes())


class Captured:
    """A function of no arguments, captured by torch; the graph, and its result."""

    def __init__(self, device: Device, work: Callable[[], object]) -> None:
        from ostinato.interop.torch import adopt_graph

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(side)
        self.owner = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self.owner):
            self.result = work()
        self.owner.instantiate()
        torch.cuda.synchronize()
        self.graph = adopt_graph(device, self.owner)


class Layers:
    """softmax(relu(x w + b) v): products, and kernels of torch's own."""

    def __init__(self) -> None:
        generator = torch.Generator(device="cuda").manual_seed(3)

        def random(*shape: int) -> object:
            return torch.randn(*shape, device="cuda", generator=generator)

        self.x, self.w, self.b = random(ROWS, INNER), random(OUTER, INNER), random(OUTER)
        self.v = random(OUTER, OUTER)
        self.between = torch.relu

    def run(self) -> object:
        inner = self.between(torch.nn.functional.linear(self.x, self.w, self.b))
        return torch.softmax(inner @ self.v, dim=-1)


def test_two_captures_are_the_same(cuda_device: Device, stream: ost.Stream) -> None:
    layers = Layers()
    one, two = (Captured(cuda_device, layers.run) for _ in range(2))
    found = first_difference(stream, one.graph, two.graph)
    assert found is None, str(found)


def test_two_captures_of_which_one_has_another_operation(
    cuda_device: Device, stream: ost.Stream
) -> None:
    """A node is named after the product, whose kernels both have."""
    layers = Layers()
    one = Captured(cuda_device, layers.run)
    before = [bits(layers.x), bits(layers.w)]
    layers.between = torch.sigmoid
    two = Captured(cuda_device, layers.run)
    found = first_difference(stream, one.graph, two.graph)
    assert found is not None and found.b is not None, str(found)
    assert "sigmoid" in found.b.node.name, str(found)
    assert [bits(layers.x), bits(layers.w)] == before


def test_a_graph_and_its_executable(cuda_device: Device, stream: ost.Stream) -> None:
    layers = Layers()
    captured = Captured(cuda_device, layers.run)
    with captured.graph.instantiate(upload=stream) as run:
        assert first_difference(stream, captured.graph, run) is None
        run.set(1, enabled=False)
        found = first_difference(stream, captured.graph, run)
    assert found is not None and found.a is not None and found.a.path == "1", str(found)


def test_the_times_of_all_kernels(cuda_device: Device, stream: ost.Stream) -> None:
    layers = Layers()
    captured = Captured(cuda_device, layers.run)
    captured.owner.replay()
    torch.cuda.synchronize()
    wanted = captured.result.clone()
    kernels = [n for n in captured.graph.nodes() if isinstance(n.params, KernelNodeParams)]
    with captured.graph.instantiate(upload=stream) as run:
        times = run.profile(stream=stream, replays=20)
    assert sum(node.kind == "kernel" for node in times.nodes) == len(kernels) > 2
    assert all(node.seconds > 0 for node in times.nodes)
    assert torch.equal(captured.result, wanted)


def test_a_check_of_a_graphed_function_names_the_node(cuda_device: Device) -> None:
    from ostinato.interop.torch import graphed

    layers, hidden = Layers(), np.full(4096, 2.0)  # larger than what a guard compares

    def work(x: Any) -> Any:
        inner = torch.relu(torch.nn.functional.linear(x, layers.w)) * float(hidden[0])
        return torch.softmax(inner @ layers.v, dim=-1)

    step = graphed(work, device=cuda_device, verify=2)
    for _ in range(4):
        torch.testing.assert_close(step(layers.x), work(layers.x))
    before = [bits(layers.x), bits(layers.w), bits(layers.v)]
    hidden[:] = 3.0
    for _ in range(4):
        found = step(layers.x)
    assert torch.equal(found, work(layers.x))
    (line,) = step.statistics().keys
    assert "the first node to differ is node " in line.reason, line.reason
    assert "another argument" in line.reason and "mul" in line.reason.lower(), line.reason
    assert [bits(layers.x), bits(layers.w), bits(layers.v)] == before
    step.close()
