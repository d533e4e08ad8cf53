"""The first difference and the times of nodes in graphs that PyTorch captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import KernelNodeParams
from ostinato.explain import DifferenceCause, first_difference
from tests.gpu.foreign import library

torch = library("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
ROWS, INNER, OUTER = 64, 256, 512


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def stream(cuda_device: Device) -> ost.Stream:
    return cuda_device.create_stream()


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

    def run(
        self, *, middle: Callable[..., object] = torch.relu, bias: object = None, by: float = 1.0
    ) -> object:
        bias = self.b if bias is None else bias
        inner = middle(torch.nn.functional.linear(self.x, self.w, bias))
        return torch.softmax(inner @ self.v * by, dim=-1)


def test_two_captures_of_the_same_work(cuda_device: Device, stream: ost.Stream) -> None:
    layers = Layers()
    one, two = (Captured(cuda_device, layers.run) for _ in range(2))
    kept = [layers.x.clone(), layers.w.clone(), one.result.clone(), two.result.clone()]
    assert first_difference(stream, one.graph, two.graph) is None
    torch.cuda.synchronize()
    now = [layers.x, layers.w, one.result, two.result]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))


def test_another_kernel(cuda_device: Device, stream: ost.Stream) -> None:
    layers = Layers()
    right = Captured(cuda_device, layers.run)
    wrong = Captured(cuda_device, lambda: layers.run(middle=torch.tanh))
    found = first_difference(stream, right.graph, wrong.graph)
    assert found is not None and found.b is not None
    assert found.cause is DifferenceCause.OTHER_KERNEL
    assert "tanh" in found.b.node.name


def test_a_changed_constant(cuda_device: Device, stream: ost.Stream) -> None:
    layers = Layers()
    right, wrong = (Captured(cuda_device, lambda by=by: layers.run(by=by)) for by in (1.5, 2.5))
    found = first_difference(stream, right.graph, wrong.graph)
    assert found is not None and found.b is not None
    assert found.cause is DifferenceCause.OTHER_ARGUMENT
    assert "Mul" in found.b.node.name or "mul" in found.b.node.name


def test_other_content_of_a_tensor(cuda_device: Device, stream: ost.Stream) -> None:
    layers = Layers()
    other = layers.b.clone()
    other[7] += 1
    right = Captured(cuda_device, layers.run)
    wrong = Captured(cuda_device, lambda: layers.run(bias=other))
    found = first_difference(stream, right.graph, wrong.graph)
    assert found is not None and found.a is not None
    wanted = DifferenceCause.READ_BEFORE_WRITTEN, DifferenceCause.STALE_POINTER
    assert found.cause in wanted
    assert found.a.path == "0"  # the product with its bias


def test_the_times_of_all_kernels(cuda_device: Device, stream: ost.Stream) -> None:
    layers = Layers()
    captured = Captured(cuda_device, layers.run)
    wanted = captured.result.clone()
    kernels = [n for n in captured.graph.nodes() if isinstance(n.params, KernelNodeParams)]
    with captured.graph.instantiate(upload=stream) as run:
        times = run.profile(stream=stream, replays=20)
    assert sum(node.kind == "kernel" for node in times.nodes) == len(kernels) > 2
    assert all(node.seconds > 0 for node in times.nodes)
    assert torch.equal(captured.result, wanted)
