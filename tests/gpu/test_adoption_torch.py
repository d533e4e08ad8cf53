"""Graphs that PyTorch captured: a linear layer and a softmax, cuBLAS and elementwise kernels."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import GraphError, InputError, UpdateRefusedError
from tests.gpu.foreign import (
    Area,
    check_inventory,
    check_rebind,
    check_replay,
    check_showing,
    clear,
    kernels,
    library,
    read,
)

torch = library("torch")

pytestmark = [
    *(pytest.mark.gpu, pytest.mark.filterwarnings("ignore")),
    pytest.mark.usefixtures("no_gradients"),
]
ROWS, INNER, OUTER = 64, 256, 512
DTYPES = ["float32", "bfloat16"]


def area(name: str, tensor: torch.Tensor) -> Area:
    assert tensor.is_contiguous()
    return Area(name, tensor.data_ptr(), tensor.numel() * tensor.element_size())


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


class Step:
    """y = softmax(x w' + b), captured by torch as its documentation says."""

    def __init__(self, dtype: str = "float32", seed: int = 7) -> None:
        self.dtype = getattr(torch, dtype)
        self._generator = torch.Generator(device="cuda").manual_seed(seed)
        self.x = self.random(ROWS, INNER)
        self.weight, self.bias = self.random(OUTER, INNER), self.random(OUTER)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.eager(self.x)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self.graph):
            self.y = self.eager(self.x)
        torch.cuda.synchronize()

    def random(self, *shape: int) -> torch.Tensor:
        values = torch.randn(*shape, device="cuda", generator=self._generator)
        return values.to(self.dtype)

    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.nn.functional.linear(x, self.weight, self.bias), dim=-1)


def adopted(device: Device, step: Step) -> ost.Graph:
    from ostinato.interop.torch import adopt_graph

    return adopt_graph(device, step.graph)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inventory(cuda_device: Device, dtype: str) -> None:
    step = Step(dtype)
    graph = adopted(cuda_device, step)
    tensors = {"x": step.x, "weight": step.weight, "bias": step.bias, "y": step.y}
    check_inventory(graph, [area(name, tensor) for name, tensor in tensors.items()])
    names = [node.name.lower() for node in kernels(graph)]
    assert any("softmax" in name for name in names), names
    assert any("softmax" not in name for name in names), names  # cuBLAS has its own names
    check_showing(graph)


def test_packed_arguments_of_cublas(cuda_device: Device, stream: ost.Stream) -> None:
    # Which kernel cuBLAS takes, and so how it passes arguments, is its own choice by shape.
    shown, found = {}, 0
    for dtype, rows, inner, outer in (
        ("bfloat16", 1024, 1024, 1024),
        ("float16", 512, 2048, 512),
        ("float32", 1024, 1024, 1024),
        ("bfloat16", 64, 256, 512),
    ):
        kind = getattr(torch, dtype)
        x = torch.randn(rows, inner, device="cuda").to(kind)
        weight = torch.randn(outer, inner, device="cuda").to(kind)
        torch.mm(x, weight.t())
        torch.cuda.synchronize()
        owner = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(owner):
            y = torch.mm(x, weight.t())
        from ostinato.interop.torch import adopt_graph

        graph = adopt_graph(cuda_device, owner)
        run = graph.instantiate(upload=stream)
        wanted = bits(torch.mm(x, weight.t()))
        y.zero_()
        torch.cuda.synchronize()
        run.launch(stream)
        stream.synchronize()
        assert bits(y) == wanted
        for node in kernels(graph):
            arguments = node.kernel.arguments
            shown[f"{dtype} {rows}x{inner}x{outer} {node.name[:60]}"] = (
                len(arguments.data),
                arguments.packed,
            )
            found += arguments.packed and len(arguments.data) > 0
            assert arguments.data
    assert found, f"no kernel's arguments came through `extra`: {shown}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_replay_is_the_owners_bit_by_bit(
    cuda_device: Device, stream: ost.Stream, dtype: str
) -> None:
    step = Step(dtype)
    graph = adopted(cuda_device, step)
    run = check_replay(cuda_device, stream, graph, step.graph.replay, [area("y", step.y)])
    assert read(cuda_device, area("y", step.y)) == bits(step.eager(step.x))
    run.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rebind_is_eager_on_the_new_input(
    cuda_device: Device, stream: ost.Stream, dtype: str
) -> None:
    step = Step(dtype)
    run = adopted(cuda_device, step).instantiate(upload=stream)
    fresh = step.random(ROWS, INNER)
    torch.cuda.synchronize()
    output = area("y", step.y)
    check_rebind(cuda_device, stream, run, step.x, fresh, lambda: bits(step.eager(fresh)), output)


def test_rebind_of_weights_and_output(cuda_device: Device, stream: ost.Stream) -> None:
    step = Step()
    run = adopted(cuda_device, step).instantiate(upload=stream)
    weight, y = step.random(OUTER, INNER), torch.zeros_like(step.y)
    run.rebind({step.weight: weight, step.y: y})
    torch.cuda.synchronize()
    clear(cuda_device, area("y", step.y))
    run.launch(stream)
    step.weight = weight
    assert read(cuda_device, area("new y", y)) == bits(step.eager(step.x))
    assert set(read(cuda_device, area("y", step.y))) == {0xEE}  # the old output is not touched


def test_update_from_another_of_torchs_graphs(cuda_device: Device, stream: ost.Stream) -> None:
    one, two = Step(seed=1), Step(seed=2)
    first, second = adopted(cuda_device, one), adopted(cuda_device, two)
    difference = first.diff(second)
    assert difference.changed and not difference.added and not difference.removed
    run = first.instantiate(upload=stream)
    report = run.update(second)
    assert report.nodes == len(second)
    run.launch(stream)
    assert read(cuda_device, area("y", two.y)) == bits(two.eager(two.x))


def test_an_update_to_another_topology_is_refused_and_changes_nothing(
    cuda_device: Device, stream: ost.Stream
) -> None:
    step = Step()
    run = adopted(cuda_device, step).instantiate(upload=stream)
    other = torch.cuda.CUDAGraph(keep_graph=True)
    y = torch.zeros_like(step.x)
    with torch.cuda.graph(other):
        y.copy_(step.x)
        y.mul_(2).add_(1).relu_().sub_(3)
    from ostinato.interop.torch import adopt_graph

    with pytest.raises(UpdateRefusedError):
        run.update(adopt_graph(cuda_device, other))
    clear(cuda_device, area("y", step.y))
    run.launch(stream)
    assert read(cuda_device, area("y", step.y)) == bits(step.eager(step.x))


def test_the_owner_lives_as_long_as_we_need_it(cuda_device: Device, stream: ost.Stream) -> None:
    step = Step()
    graph = adopted(cuda_device, step)
    run = graph.instantiate(upload=stream)
    owner, ours = weakref.ref(step.graph), weakref.ref(graph)
    wanted = bits(step.eager(step.x))
    del step.graph, graph
    gc.collect()
    torch.cuda.empty_cache()
    assert owner() is not None and ours() is not None
    clear(cuda_device, area("y", step.y))
    run.launch(stream)
    assert read(cuda_device, area("y", step.y)) == wanted
    run.close()
    del run
    gc.collect()
    cuda_device.synchronize()
    gc.collect()
    # What torch itself keeps of its graph is its own affair (its capture's context manager has
    # been seen to); of ours, only the definition held it.
    assert ours() is None


def test_torchs_pool_is_not_given_away_under_our_replay(
    cuda_device: Device, stream: ost.Stream
) -> None:
    step = Step()
    run = adopted(cuda_device, step).instantiate(upload=stream)
    y = area("y", step.y)
    wanted = bits(step.eager(step.x))
    del step.graph, step.y  # from here on only our executable stands for the pool
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.full((ROWS, OUTER), 9.0, device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    for _ in range(3):
        run.launch(stream)
        assert read(cuda_device, y) == wanted
    assert all(bool((other == 9).all()) for other in others)


def test_one_node_switched_off(cuda_device: Device, stream: ost.Stream) -> None:
    step = Step()
    graph = adopted(cuda_device, step)
    run = graph.instantiate(upload=stream)
    (softmax,) = [node for node in kernels(graph) if "softmax" in node.name.lower()]
    y = area("y", step.y)
    clear(cuda_device, y)
    run.set(softmax, enabled=False)
    run.launch(stream)
    assert read(cuda_device, y) != bits(step.eager(step.x))
    run.set(softmax, enabled=True)
    run.launch(stream)
    assert read(cuda_device, y) == bits(step.eager(step.x))


def test_a_graph_that_torch_did_not_keep_is_refused(cuda_device: Device) -> None:
    from ostinato.interop.torch import adopt_graph

    x = torch.ones(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.mul_(2)
    with pytest.raises(InputError, match="keep_graph"):
        adopt_graph(cuda_device, graph)


def test_torchs_work_in_our_capture(cuda_device: Device, stream: ost.Stream) -> None:
    from ostinato.interop.torch import use_stream

    step = Step()
    linear, y = torch.empty_like(step.y), torch.empty_like(step.y)

    def work() -> None:
        torch.addmm(step.bias, step.x, step.weight.t(), out=linear)
        torch.softmax(linear, dim=-1, out=y)

    torch.cuda.synchronize()
    with use_stream(stream):
        work()
    stream.synchronize()
    wanted = bits(y)
    with use_stream(stream), ost.capture(stream) as capture:
        work()
    check_inventory(capture.graph, [area("x", step.x), area("y", y)])
    clear(cuda_device, area("y", y))
    run = capture.graph.instantiate(upload=stream)
    run.launch(stream)
    assert read(cuda_device, area("y", y)) == wanted


def test_our_buffers_in_torchs_graph(cuda_device: Device, stream: ost.Stream) -> None:
    from ostinato.interop.torch import adopt_graph, as_tensor

    rng = np.random.default_rng(5)
    values = [rng.standard_normal(1000).astype(np.float32) for _ in range(2)]
    x, other = (cuda_device.array(v) for v in values)
    out = cuda_device.zeros(1000, np.float32)
    x_there, out_there = as_tensor(x), as_tensor(out)
    assert x_there.data_ptr() == x.address
    torch.mul(x_there, 3, out=out_there)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(captured):
        torch.mul(x_there, 3, out=out_there)
    graph = adopt_graph(cuda_device, captured)
    check_inventory(graph, [Area("x", x.address, x.nbytes), Area("out", out.address, out.nbytes)])
    run = graph.instantiate(upload=stream)
    for buffer, host in ((x, values[0]), (other, values[1])):
        if buffer is other:
            run.rebind({x: other})
        run.launch(stream)
        np.testing.assert_array_equal(out.to_numpy(stream), 3 * host)


def test_a_tensor_over_a_buffer_is_never_a_copy(cuda_device: Device, stream: ost.Stream) -> None:
    from ostinato.interop.torch import as_tensor

    with pytest.raises(InputError, match="from_numpy"):
        as_tensor(cuda_device.pinned(4, "bytes"))
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    with ost.open_device("cuda:1") as other:
        x = other.array(np.ones(4, np.float32))
        there = as_tensor(x)  # torch's current GPU is the first
        assert there.device.index == 1 and there.data_ptr() == x.address


def test_small_fills_of_torch_become_kernels(cuda_device: Device, stream: ost.Stream) -> None:
    from ostinato.interop.torch import adopt_graph

    x = torch.randn(1 << 22, device="cuda")
    x.sum()
    captured = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(captured):
        y = x.sum()  # over many blocks, whose counter is cleared by a memset node
    graph = adopt_graph(cuda_device, captured)
    fills = graph.count("memset")
    assert fills > 0
    assert ost.lowlevel.replace_small_fills(cuda_device, graph) == fills
    assert graph.count("memset") == 0
    run = graph.instantiate(upload=stream)
    for scale in (1, 2, 3):
        x.copy_(torch.randn(1 << 22, device="cuda") * scale)
        wanted = x.sum()
        torch.cuda.synchronize()
        run.launch(stream)
        stream.synchronize()
        assert torch.equal(y, wanted)
        y.zero_()
        captured.replay()  # torch's own: of the same definition
        assert torch.equal(y, wanted)


def test_streams_and_arrays_come_over(cuda_device: Device, stream: ost.Stream) -> None:
    theirs = torch.cuda.Stream()
    ours = cuda_device.adopt_stream(theirs)
    assert ours.handle == theirs.cuda_stream
    tensor = torch.arange(100, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    buffer = cuda_device.adopt_array(tensor)
    ost.fill(ours, buffer, 4)
    ours.synchronize()
    assert bool((tensor == 4).all())
    with pytest.raises(InputError, match="strided"):
        cuda_device.adopt_array(torch.zeros(8, 8, device="cuda").t()[:, 1:])
    half = torch.ones(10, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    assert cuda_device.adopt_array(half).nbytes == 20


def captured(work: object, *generators: object) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """`work()` warmed up and captured."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        out = work()
    torch.cuda.synchronize()
    return graph, out


def random_works() -> dict[str, tuple[object, tuple[object, ...]]]:
    x = torch.randn(ROWS, INNER, device="cuda")
    heads = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
    own = torch.Generator(device="cuda").manual_seed(3)
    attention = torch.nn.functional.scaled_dot_product_attention
    learned, kept = (
        torch.randn(2, 4, 64, 64, device="cuda", requires_grad=True),
        list[torch.Tensor](),
    )

    def differentiated() -> torch.Tensor:
        kept.clear()  # with autograd's nodes, which remember the stream
        with torch.enable_grad():
            kept.append(attention(learned, learned, learned, dropout_p=0.5).sum())
        # What autograd keeps stays in use, and with it the seed that the backward reads.
        return torch.autograd.grad(kept[-1], learned, retain_graph=True)[0]

    return {
        "dropout": (lambda: torch.nn.functional.dropout(x, 0.5), ()),
        "rand": (lambda: torch.rand(ROWS, device="cuda"), ()),
        "normal": (lambda: torch.empty_like(x).normal_(), ()),
        "multinomial": (lambda: torch.multinomial(x.abs(), 4), ()),
        "own generator": (lambda: torch.rand(ROWS, device="cuda", generator=own), (own,)),
        "attention": (lambda: attention(heads, heads, heads, dropout_p=0.5), ()),
        "gradient of attention": (differentiated, ()),
    }


NAMES = list(random_works()) if torch.cuda.is_available() else ["dropout"]


def seeded(generators: tuple[object, ...], seed: int) -> None:
    torch.manual_seed(seed)
    for generator in generators:
        generator.manual_seed(seed + 1)


@pytest.mark.parametrize("name", NAMES)
def test_random_numbers_are_those_of_torchs_own_replay(
    cuda_device: Device, stream: ost.Stream, name: str
) -> None:
    from ostinato.interop.torch import adopt_graph

    work, generators = random_works()[name]
    owner, out = captured(work, *generators)
    seeded(generators, 11)
    before = [g.get_offset() for g in (torch.cuda.default_generators[0], *generators)]
    graph = adopt_graph(cuda_device, owner, generators=generators)
    assert before == [g.get_offset() for g in (torch.cuda.default_generators[0], *generators)]
    assert torch.initial_seed() == 11
    run = graph.instantiate(upload=stream)
    results: list[list[bytes]] = []
    offsets: list[list[int]] = []
    for replay in (owner.replay, lambda: run.launch(stream)):
        results.append([])
        for seed in (5, None, None, 6, None):
            if seed is not None:
                seeded(generators, seed)
            cuda_device.synchronize()
            replay()
            cuda_device.synchronize()
            results[-1].append(bits(out))
        states = (torch.cuda.default_generators[0], *generators)
        offsets.append([g.get_offset() for g in states])
        torch.rand(3, device="cuda")
    assert results[0] == results[1]
    assert offsets[0] == offsets[1]
    assert len(set(results[1])) == 5


def test_random_numbers_after_torchs_replays_and_ours_in_turn(
    cuda_device: Device, stream: ost.Stream
) -> None:
    from ostinato.interop.torch import adopt_graph

    one, two = torch.randn(64, device="cuda"), torch.randn(64, device="cuda")
    graphs = [captured(lambda x=x: torch.nn.functional.dropout(x, 0.5)) for x in (one, two)]
    runs = [adopt_graph(cuda_device, owner).instantiate(upload=stream) for owner, _ in graphs]

    def sequence(ours: bool) -> list[bytes]:
        torch.manual_seed(3)
        found = []
        for number in range(6):
            (owner, out), run = graphs[number % 2], runs[number % 2]
            cuda_device.synchronize()
            if ours and number != 3:
                run.launch(stream)
            else:
                owner.replay()
            cuda_device.synchronize()
            found += [bits(out), bits(torch.rand(4, device="cuda"))]
        return found

    assert sequence(ours=False) == sequence(ours=True)


def test_a_graph_that_draws_is_no_part_of_another(cuda_device: Device, stream: ost.Stream) -> None:
    from ostinato.interop.torch import adopt_graph

    x = torch.randn(64, device="cuda")
    owner, _ = captured(lambda: torch.nn.functional.dropout(x, 0.5))
    graph = adopt_graph(cuda_device, owner)
    with pytest.raises(GraphError, match="random"):
        ost.Graph.create(cuda_device).add_child(graph)


def test_a_generator_that_was_not_given_is_named(cuda_device: Device) -> None:
    from ostinato.interop.torch import adopt_graph

    work, generators = random_works()["own generator"]
    owner, _ = captured(work, *generators)
    graph = adopt_graph(cuda_device, owner)
    assert len(graph.nodes()) > 0
    with pytest.raises(GraphError, match="generators="):
        graph.instantiate()
    owner.replay()  # torch's own replay still works
    cuda_device.synchronize()


def test_graphs_without_random_numbers_are_launched(
    cuda_device: Device, stream: ost.Stream
) -> None:
    from ostinato.interop.torch import adopt_graph

    one, two = (torch.ones((), dtype=torch.int64, device="cuda") * n for n in (1, 2))
    heads = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(ROWS, INNER, device="cuda")
    attention = torch.nn.functional.scaled_dot_product_attention
    for work in (
        lambda: one + two,  # tensors of 8 bytes among the arguments
        lambda: torch.where(one > two, one, two),
        lambda: attention(heads, heads, heads),
        lambda: torch.sort(x)[0],
        lambda: torch.nn.functional.layer_norm(x, (INNER,)),
        lambda: torch.nn.functional.dropout(x, 0.5, training=False) * 2,
    ):
        owner, out = captured(work)
        wanted = bits(work())
        out.zero_()
        torch.cuda.synchronize()
        adopt_graph(cuda_device, owner).instantiate(upload=stream).launch(stream)
        cuda_device.synchronize()
        assert bits(out) == wanted
