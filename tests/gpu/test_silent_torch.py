"""What torch shares or ends behind a graph's back: no replay is wrong without a word."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest

from ostinato.device import Device
from tests.gpu.foreign import library

torch = library("torch")

pytestmark = [
    *(pytest.mark.gpu, pytest.mark.filterwarnings("ignore")),
    pytest.mark.usefixtures("no_gradients"),
]

Make = Callable[..., Any]
_LONG = 400_000_000
"""Cycles, some 0.2 s, for which a graph waits before it draws."""


def late(x: Any) -> Any:
    torch.cuda._sleep(_LONG)
    return x + torch.rand_like(x)


def soon(x: Any) -> Any:
    return x * 2 + torch.rand_like(x)


def captured(work: Callable[[Any], Any], x: Any) -> tuple[Any, Any]:
    """Work that torch captured, with its result."""
    work(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        result = work(x)
    torch.cuda.synchronize()
    return graph, result


# ------------------------------------------------------- random numbers of graphs under way


def test_two_functions_that_draw_on_two_streams(make: Make) -> None:
    """torch has one seed and one offset in device memory for all graphs of a generator."""
    x, first, second = torch.zeros(64, device="cuda"), torch.cuda.Stream(), torch.cuda.Stream()
    one, two = make(late), make(soon)
    for _ in range(3):
        one(x), two(x)
    torch.manual_seed(7)
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        found = one(x)
    with torch.cuda.stream(second):
        beside = two(x)
    torch.cuda.synchronize()
    torch.manual_seed(7)
    assert torch.equal(found, late(x)) and torch.equal(beside, soon(x))


@pytest.mark.parametrize("by", ["graphed", "torch"])
def test_a_capture_while_a_graph_that_draws_is_under_way(make: Make, by: str) -> None:
    """torch writes the seed, and zero for the offset, when a capture begins."""
    x, first, second = torch.zeros(64, device="cuda"), torch.cuda.Stream(), torch.cuda.Stream()
    one, two = make(late), make(soon)
    for _ in range(3):
        one(x)
    two(x)
    torch.rand(8, device="cuda")
    torch.manual_seed(7)
    torch.rand(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        found = one(x)
    with torch.cuda.stream(second):
        if by == "graphed":
            two(x)
        else:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            x + 1
            graph.capture_end()
    torch.cuda.synchronize()
    torch.manual_seed(7)
    torch.rand(8, device="cuda")
    assert torch.equal(found, late(x))


def test_adoption_while_a_graph_of_torch_is_under_way(cuda_device: Device) -> None:
    from ostinato.interop.torch import adopt_graph

    x, first = torch.zeros(64, device="cuda"), torch.cuda.Stream()
    (one, found), (two, _) = captured(late, x), captured(soon, x)
    torch.manual_seed(7)
    torch.rand(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        one.replay()
    adopt_graph(cuda_device, two)
    torch.cuda.synchronize()
    torch.manual_seed(7)
    torch.rand(8, device="cuda")
    assert torch.equal(found, late(x))


def test_an_adopted_graph_that_draws_on_two_streams_in_turn(cuda_device: Device) -> None:
    from ostinato.interop.torch import adopt_graph

    x, sums = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")

    def work(x: Any) -> Any:
        torch.cuda._sleep(_LONG)
        return sums.mul_(2).add_(torch.rand_like(x))

    owner, _ = captured(work, x)
    run = adopt_graph(cuda_device, owner).instantiate()
    wanted = []
    for ours in (False, True):
        torch.manual_seed(7)
        sums.zero_()
        torch.cuda.synchronize()
        streams = [cuda_device.create_stream() for _ in range(2)]
        for stream in streams:
            if ours:
                run.launch(stream)
            else:
                work(x)
        torch.cuda.synchronize()
        wanted.append(sums.clone())
    assert torch.equal(*wanted)
    owner.replay()  # torch's own replays go on
    torch.cuda.synchronize()


# ----------------------------------------------------------------------- cuBLAS's workspaces


def _freed() -> list[Any]:
    """Lets torch free all workspaces, and returns tensors that lie where they lay."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    return [torch.full((8 << 20,), 7.0, device="cuda") for _ in range(32)]


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("where", ["a stream of its own", "a thread of autograd"])
def test_workspaces_of_streams_and_threads_that_a_function_goes_to(
    make: Make, where: str, used_before: bool
) -> None:
    weight = torch.randn(8192, 64, device="cuda")
    side = torch.cuda.Stream()

    def forked(x: Any) -> Any:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            y = x @ weight
        current.wait_stream(side)
        return y * 2

    def differentiated(x: Any) -> Any:
        with torch.enable_grad():
            z = weight.detach().requires_grad_()
            return torch.autograd.grad((x @ z).square().sum(), z)[0].mT @ weight

    f = forked if where == "a stream of its own" else differentiated
    if used_before:
        f(torch.randn(64, 8192, device="cuda"))
    step = make(f)
    others: list[Any] = []
    for number in range(10):
        x = torch.randn(64, 8192, device="cuda")
        if number == 5:
            others = _freed()
        assert torch.equal(step(x), f(x)), number
    torch.cuda.synchronize()
    assert all(bool((other == 7).all()) for other in others)
    if f is differentiated:
        assert step.statistics().replays >= 8, step.explain()
    else:
        assert "side.wait_stream(current)" in step.explain()


def test_functions_without_products_share_a_workspace(make: Make) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    x = torch.randn(64, 64, device="cuda")
    works = [lambda x, n=n: (x * n).sin() for n in range(6)]
    for work in works:
        step = make(work)
        for _ in range(3):
            assert torch.equal(step(x), work(x))
        assert step.statistics().replays == 2, step.explain()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 70 << 20


# ----------------------------------------------------------------------------- plans of cuFFT


@pytest.mark.parametrize("how", ["clear", "smaller for a while"])
def test_plans_that_end_between_a_replay_and_its_backward(make: Make, how: str) -> None:
    cache = torch.backends.cuda.cufft_plan_cache
    most = cache.max_size
    f = lambda x: torch.fft.fft(x).abs() * 2  # noqa: E731
    step = make(f, gradients="replay")

    def gradients(function: Any, between: Callable[[], object] = lambda: None) -> Any:
        x = torch.arange(64 * 1000.0, device="cuda").reshape(64, 1000).requires_grad_()
        with torch.enable_grad():
            y = function(x)
            between()
            y.sum().backward()
        return x.grad

    def end() -> None:
        torch.cuda.synchronize()
        if how == "clear":
            cache.clear()
        else:
            cache.max_size = 1
        torch.fft.fft(torch.randn(64, 1002, device="cuda"))
        cache.max_size = most

    try:
        for _ in range(4):
            assert torch.equal(gradients(step), gradients(f))
        assert step.statistics().replays >= 2, step.explain()
        with pytest.raises(RuntimeError, match="plans of cuFFT"):
            gradients(step, end)
        for _ in range(3):
            assert torch.equal(gradients(step), gradients(f))
    finally:
        cache.max_size = most


@pytest.mark.parametrize("how", ["cleared by the function", "full"])
def test_plans_that_end_in_the_call_that_makes_them(make: Make, how: str) -> None:
    cache = torch.backends.cuda.cufft_plan_cache
    most = cache.max_size

    def f(x: Any) -> Any:
        y = torch.fft.fft(x).abs()
        if how == "full":
            return y + torch.fft.fft(x[:, :998]).abs().sum()
        cache.clear()
        return y

    step = make(f)
    try:
        if how == "full":
            cache.max_size = 1
        for number in range(6):
            x = torch.randn(64, 1000, device="cuda")
            assert torch.equal(step(x), f(x)), number
    finally:
        cache.max_size = most


# ----------------------------------------------------------------- memory of a graph's pool


def test_a_tensor_that_a_helper_makes_in_a_capture_and_keeps(make: Make) -> None:
    """Its memory would be that of other graphs' intermediate results."""
    size = 1 << 20

    @functools.lru_cache(maxsize=1)
    def table(size: int) -> Any:
        return torch.arange(size, device="cuda", dtype=torch.float32)

    def f(x: Any, reads: bool) -> Any:
        return x + table(size) if reads else ((x * 2 + 1).sin() - 3).cos()

    step = make(f)
    x = torch.randn(size, device="cuda")
    for _ in range(3):
        assert torch.equal(step(x, False), f(x, False))
    step(x, True)
    table(3)  # the capture makes it again
    for number in range(4):
        assert torch.equal(step(x, True), x + torch.arange(size, device="cuda")), number
        assert torch.equal(step(x, False), f(x, False))
        torch.cuda.synchronize()
        assert torch.equal(table(size), torch.arange(size, device="cuda").float()), number


@pytest.mark.parametrize("how", ["waits", "draws"])
def test_a_tensor_that_a_helper_makes_in_a_capture_that_breaks(make: Make, how: str) -> None:
    """No kernel has computed it."""
    size = 1 << 20

    @functools.lru_cache(maxsize=1)
    def table(size: int) -> tuple[Any, int]:
        return torch.arange(size, device="cuda", dtype=torch.float32), size

    def f(x: Any) -> Any:
        y = x + table(size)[0]
        if how == "draws":
            return y + torch.rand_like(x)
        return y if y.sum().item() > 0 else -y

    step = make(f)
    for number in range(7):
        x = torch.randn(size, device="cuda")
        torch.manual_seed(number)
        found = step(x)
        torch.cuda.synchronize()
        torch.manual_seed(number)
        wanted = x + torch.arange(size, device="cuda")
        assert torch.equal(found, wanted + torch.rand_like(x) if how == "draws" else wanted), number
        table(3)  # each run makes it again
        others = [torch.full((size,), 7.0, device="cuda") for _ in range(4)]
    assert len(others) == 4
    assert step.statistics().replays, step.explain()


# -------------------------------------------------------------------- settings and generators


@pytest.mark.parametrize("setting", ["products", "algebra"])
def test_libraries_that_torch_prefers(make: Make, setting: str) -> None:
    weight = torch.randn(512, 512, device="cuda")
    prefer = torch.backends.cuda.preferred_linalg_library
    name = "cusolver"
    if setting == "products":
        prefer, name = torch.backends.cuda.preferred_blas_library, "cublaslt"
    f = lambda x: x @ weight  # noqa: E731
    step = make(f)
    try:
        for number in range(8):
            if number == 4:
                prefer(name)
            x = torch.randn(64, 512, device="cuda")
            assert torch.equal(step(x), f(x)), number
    finally:
        prefer("default")
    assert step.statistics().captures == 2, step.explain()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_seeds_of_recurrent_layers(make: Make, dropout: float) -> None:
    """cuDNN draws from a state of its own, which a seed starts anew in an eager run."""
    model = torch.nn.LSTM(16, 16, num_layers=2, dropout=dropout).cuda().train()
    f = lambda x: model(x)[0] * 2  # noqa: E731
    step = make(f)
    for number in range(14):
        x = torch.randn(4, 2, 16, device="cuda")
        torch.manual_seed(number)
        found = step(x)
        torch.manual_seed(number)
        assert torch.equal(found, f(x)), number
    if not dropout:
        assert step.statistics().replays == 13, step.explain()


@pytest.mark.parametrize("waits", [False, True])
def test_a_function_that_draws_and_forks_to_any_stream_of_torch(make: Make, waits: bool) -> None:
    """torch has 32 streams, on one of which the seed would be set during a capture."""
    side = torch.cuda.Stream()
    for number in range(33):

        def f(x: Any) -> Any:
            if waits and (x < 0).any().item():  # the same in all calls
                x = -x
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                y = x.sin()
            current.wait_stream(side)
            return y + torch.rand_like(x)

        step = make(f)
        for call in range(16 if waits else 3):
            x = torch.rand(64, device="cuda")
            torch.manual_seed(call)
            found = step(x)
            torch.manual_seed(call)
            assert torch.equal(found, f(x)), (number, call)
            assert torch.initial_seed() == call == torch.cuda.initial_seed()
        assert step.statistics().replays, step.explain()
        step.close()
