"""`interop.torch.graphed` on a GPU: what it replays and refuses, and twelve ways to misuse it."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import importlib.util
import queue
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import VerificationError
from tests.gpu.foreign import library
from tests.processes import child_environment

torch = library("torch")

pytestmark = [
    *(pytest.mark.gpu, pytest.mark.filterwarnings("ignore")),
    pytest.mark.usefixtures("no_gradients"),
]

Make = Callable[..., Any]


def randn(*shape: int, dtype: Any = None) -> Any:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def same(one: Any, other: Any) -> bool:
    """Bit by bit."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.equal(
            one.contiguous().reshape(-1).view(torch.uint8),
            other.contiguous().reshape(-1).view(torch.uint8),
        )
    )


def check(step: Any, function: Any, inputs: list[tuple[Any, ...]], **keywords: Any) -> None:
    """Each call gives what the function gives from the same seed."""
    for number, args in enumerate(inputs):
        torch.manual_seed(number)
        wanted = function(*args, **keywords)
        torch.manual_seed(number)
        found = step(*args, **keywords)
        assert same(found, wanted), f"call {number}: {(found - wanted).abs().max()}"


class Mlp(torch.nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.one = torch.nn.Linear(width, 4 * width)
        self.two = torch.nn.Linear(4 * width, width)
        self.scale = 1.0

    def forward(self, x: Any) -> Any:
        return self.two(torch.nn.functional.gelu(self.one(x))) * self.scale


# ------------------------------------------------------------------------------ what it does


def test_a_function_is_replayed(make: Make) -> None:
    def f(x: Any, w: Any) -> Any:
        return torch.softmax(x @ w, dim=-1)

    step = make(f)
    check(step, f, [(randn(8, 16), randn(16, 32)) for _ in range(6)])
    (line,) = step.statistics().keys
    assert (line.eager, line.captures, line.replays) == (1, 1, 5), step.explain()
    with step.cache.hold(line.key) as run:
        assert any("softmax" in node.name for node in run.nodes())
    assert line.key in step.inspect() and "kernel)" in step.inspect()


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_modes_of_gradients(make: Make, mode: str) -> None:
    model = Mlp().cuda()
    step = make(model)
    # inference_mode(False) would turn gradients on.
    with torch.inference_mode() if mode == "inference" else torch.no_grad():
        check(step, model, [(randn(4, 64),) for _ in range(4)])
    assert step.statistics().replays == 3, step.explain()


def test_strides_and_types_are_keys(make: Make) -> None:
    f = lambda x: x.t() @ x + 1  # noqa: E731
    step = make(f)
    inputs = [randn(8, 8), randn(8, 8).t(), randn(8, 8).to(torch.bfloat16), randn(16, 8)[::2]]
    check(step, f, [(x,) for _ in range(3) for x in inputs])
    assert [line.replays for line in step.statistics().keys] == [2] * 4, step.explain()


def test_many_inputs_of_several_types(make: Make) -> None:
    def f(*xs: Any) -> Any:
        return torch.stack([x.float().sum() for x in xs])

    step = make(f)
    for _ in range(4):
        xs = [
            randn(3 + i).to(t) for i, t in enumerate([torch.float32, torch.half, torch.int64] * 3)
        ]
        assert same(step(*xs), f(*xs))
    assert step.statistics().replays == 3, step.explain()


@pytest.mark.parametrize("name", ["dropout", "rand", "multinomial", "attention"])
def test_random_numbers_are_those_of_eager(make: Make, name: str) -> None:
    heads = randn(2, 4, 64, 64, dtype=torch.bfloat16)
    attention = torch.nn.functional.scaled_dot_product_attention
    works = {
        "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
        "rand": lambda x: torch.rand_like(x) + torch.randn_like(x),
        "multinomial": lambda x: torch.multinomial(x.abs(), 4),
        "attention": lambda x: attention(heads, heads, heads, dropout_p=0.5) + x[0, 0],
    }
    f = works[name]
    step = make(f)
    x = randn(16, 64)
    torch.manual_seed(5)
    wanted = [f(x) for _ in range(5)]
    torch.manual_seed(5)
    found = [step(x) for _ in range(5)]
    assert [same(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * 5
    assert step.statistics().replays == 4, step.explain()
    assert not same(found[3], found[4])
    check(step, f, [(x,)] * 3)  # seeds set in between


def test_a_generator_that_was_given(make: Make) -> None:
    own = torch.Generator(device="cuda").manual_seed(3)
    f = lambda x: x + torch.rand(x.shape, device="cuda", generator=own) + torch.rand_like(x)  # noqa: E731
    step = make(f, generators=[own])
    x = randn(100)
    results = []
    for run in (f, step):
        torch.manual_seed(1)
        own.manual_seed(2)
        results.append([run(x) for _ in range(4)])
    assert all(same(a, b) for a, b in zip(*results, strict=True))
    assert step.statistics().replays == 3, step.explain()


def test_a_generator_that_was_not_given_runs_eagerly(make: Make) -> None:
    own = torch.Generator(device="cuda").manual_seed(3)
    f = lambda x: x + torch.rand(x.shape, device="cuda", generator=own)  # noqa: E731
    step = make(f)
    x = randn(100)
    results = []
    for run in (f, step):
        own.manual_seed(2)
        results.append([run(x) for _ in range(4)])
    assert all(same(a, b) for a, b in zip(*results, strict=True))
    assert step.statistics().replays == 0 and step.statistics().quarantined, step.explain()
    torch.rand(4, device="cuda")  # the default generator still works
    torch.rand(4, device="cuda", generator=own)


def test_static_tensors_are_written_in_place_and_bound_anew(make: Make) -> None:
    def decode(x: Any, place: Any, cache: Any) -> Any:
        cache.index_copy_(0, place, x)
        return cache.sum(0)

    step = make(decode, static=("cache",))
    caches = [torch.zeros(8, 16, device="cuda") for _ in range(2)]
    mirrors = [torch.zeros(8, 16, device="cuda") for _ in range(2)]
    for which in (0, 1):
        for place in range(5):
            x, at = randn(1, 16), torch.tensor([place], device="cuda")
            wanted = decode(x, at, mirrors[which])
            assert same(step(x, at, caches[which]), wanted)
            assert same(caches[which], mirrors[which])
    statistics = step.statistics()
    assert (statistics.captures, statistics.rebound, statistics.eager) == (1, 1, 1), step.explain()


def test_a_static_object(make: Make) -> None:
    class Cache:
        def __init__(self) -> None:
            self.layers = [{"k": torch.zeros(4, 8, device="cuda")} for _ in range(3)]

    def f(x: Any, cache: Cache) -> tuple[Any, Cache]:
        for layer in cache.layers:
            layer["k"].add_(x)
        return cache.layers[-1]["k"] * 2, cache

    step = make(f, static=("cache",))
    for _ in range(2):
        ours, theirs = Cache(), Cache()
        for _ in range(3):
            x = randn(4, 8)
            found, wanted = step(x, ours), f(x, theirs)
            assert same(found[0], wanted[0]) and found[1] is ours
            assert same(ours.layers[0]["k"], theirs.layers[0]["k"])
    assert (step.statistics().captures, step.statistics().rebound) == (1, 1), step.explain()


def test_a_cache_amid_other_memory_is_bound_anew(make: Make) -> None:
    """torch's allocator cuts tensors out of large allocations: what lies in front of a cache, and
    how far it is used, the driver does not know."""
    in_front = [randn(64) for _ in range(8)]
    weights = [randn(64, 64) for _ in range(3)]
    caches = [{"k": [torch.zeros(8, 64, device="cuda") for _ in range(3)]} for _ in range(4)]
    behind = randn(64)

    def decode(x: Any, place: Any, cache: Any) -> Any:
        for w, k, more in zip(weights, cache["k"], in_front, strict=False):
            x = x @ w + more
            k.index_copy_(0, place, x)
            x = torch.softmax(x @ k.t(), -1) @ k + behind
        return x

    step = make(decode, static=("cache",))
    mirrors = [{"k": [torch.zeros_like(k) for k in cache["k"]]} for cache in caches]
    for number in range(24):
        which = number // 3 % 4
        x, at = randn(1, 64), torch.tensor([number % 8], device="cuda")
        assert same(step(x, at, caches[which]), decode(x, at, mirrors[which])), number
        assert all(map(same, caches[which]["k"], mirrors[which]["k"]))
    statistics = step.statistics()
    assert (statistics.captures, statistics.rebound) == (1, 7), statistics.capture_reasons


def test_dynamic_sizes(make: Make) -> None:
    w = randn(16, 16)
    f = lambda tokens, scale: torch.relu(tokens @ w) * scale  # noqa: E731
    step = make(f, dynamic={"tokens": 0}, buckets=ost.PowersOfTwo(32))
    for n in (5, 6, 8, 7, 5, 3, 4, 3):
        x = randn(n, 16)
        found, wanted = step(x, 2.0), f(x, 2.0)
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted)
    assert [line.captures for line in step.statistics().keys] == [1, 1], step.explain()
    assert step.statistics().replays >= 5


def test_a_check_finds_answers_that_depend_on_padding(make: Make) -> None:
    f = lambda tokens: tokens - tokens.mean(0)  # noqa: E731
    step = make(f, dynamic={"tokens": 0}, buckets=ost.PowersOfTwo(32), verify="first")
    for n in (5, 6, 7, 5):
        x = randn(n, 16)
        torch.testing.assert_close(step(x), f(x))
    assert any("check failed" in line.reason for line in step.statistics().keys), step.explain()


def test_checks_pass_with_random_numbers_and_state(make: Make) -> None:
    state = torch.zeros(64, device="cuda")

    def f(x: Any) -> Any:
        state.add_(1)
        return torch.nn.functional.dropout(x, 0.5) + state

    step = make(f, verify=2)
    x = randn(64)
    torch.manual_seed(0)
    found = [step(x) for _ in range(6)]
    state.zero_()
    torch.manual_seed(0)
    wanted = [f(x) for _ in range(6)]
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))
    (line,) = step.statistics().keys
    assert line.verified >= 2 and not line.reason, step.explain()


def test_a_check_names_output_and_kernel(make: Make) -> None:
    hidden = np.full(4096, 2.0)  # larger than what a guard compares

    def f(x: Any) -> tuple[Any, Any]:
        return x + 1, x * float(hidden[0])

    step = make(f, verify=1)
    x = randn(64)
    step(x)
    step(x)
    hidden[:] = 3.0
    assert same(step(x)[1], x * 3)
    assert "result[1] differs" in step.explain() and "node" in step.explain()
    assert same(step(x)[1], x * 3)
    strict = make(f, verify=1, strict=True)
    strict(x)
    hidden[:] = 4.0
    strict(x)
    hidden[:] = 5.0
    with pytest.raises(VerificationError):
        strict(x)


def test_batch_norm_in_training(make: Make) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).cuda()

    ours, theirs = build(), build()
    step = make(ours)
    for _ in range(5):
        x = randn(2, 3, 8, 8)
        torch.testing.assert_close(step(x), theirs(x))
    torch.testing.assert_close(ours[1].running_mean, theirs[1].running_mean)
    assert int(ours[1].num_batches_tracked) == 5
    step.eval()
    theirs.eval()
    for _ in range(3):
        x = randn(2, 3, 8, 8)
        torch.testing.assert_close(step(x), theirs(x))


def test_memory_comes_back(make: Make, cuda_device: Device) -> None:
    step = make(lambda x: (x @ x).relu() @ x)
    x = randn(1024, 1024)
    for _ in range(3):
        step(x)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    step.close()
    del step
    gc.collect()
    cuda_device.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() < held


# ----------------------------------------------------------------------- memory of other owners


_ADD = """
extern "C" __global__ void add_table(const float* x, const float* table, float* out, int n) {
    int i = threadIdx.x;
    if (i < n) out[i] = x[i] + table[i];
}"""


def _reading(how: str, table: Callable[[int], Any]) -> Callable[[Any], Any]:
    """Adds a table that only the call sees: by an operation of torch, by a kernel that torch does
    not see, by an operation inside of an operation of the user's, and by one of torch that is the
    last use of the table."""
    if how == "a kernel of its own":
        kernel = torch.cuda._compile_kernel(_ADD, "add_table")

        def launched(x: Any) -> Any:
            out = torch.empty_like(x)
            kernel(block=(64, 1, 1), args=[x, table(x.numel()), out, x.numel()])
            return out

        return launched
    if how == "an operation of its own":
        operation: Any = torch.library.custom_op(
            "ostinato_tests::add_table",
            lambda x: x + table(x.numel()),
            mutates_args=(),
            schema="(Tensor x) -> Tensor",
        )
        return lambda x: operation(x)
    if how == "torch, for the last time":

        def last(x: Any) -> Any:
            out = x + table(x.numel())
            if torch.cuda.is_current_stream_capturing():
                table.cache_clear()  # type: ignore[attr-defined]
            return out

        return last
    return lambda x: x + table(x.numel())


@pytest.mark.parametrize(
    "how",
    ["torch", "a kernel of its own", "an operation of its own", "torch, for the last time"],
)
def test_memory_that_a_helper_alone_owns_lives_as_long_as_the_graph(make: Make, how: str) -> None:
    @functools.lru_cache(maxsize=1)
    def table(size: int) -> Any:
        return torch.full((size,), 3.0, device="cuda")

    table(48)  # on the caller's stream, whose memory the caller's next tensors get
    add = _reading(how, table)
    step = make(lambda x: add(x))
    x = torch.ones(48, device="cuda")
    for _ in range(2):
        assert same(step(x), x + 3)
    table(16)
    others = [torch.full((48,), 777.0, device="cuda") for _ in range(256)]
    for _ in range(3):
        assert same(step(x), x + 3)
    assert step.statistics().replays == 4, step.explain()
    assert len(others) == 256


def test_memory_that_a_graph_keeps_comes_back_with_it(make: Make, cuda_device: Device) -> None:
    @functools.lru_cache(maxsize=1)
    def table(size: int) -> Any:
        return torch.full((size, 1 << 20), 3.0, device="cuda")

    def read(x: Any) -> Any:
        return x + table(x.numel())[:, 0]

    step = make(lambda x: read(x))
    x = torch.ones(16, device="cuda")
    for _ in range(3):
        step(x)
    torch.cuda.synchronize()
    table.cache_clear()
    held = torch.cuda.memory_allocated()
    step.close()
    gc.collect()
    cuda_device.synchronize()
    gc.collect()
    assert held - torch.cuda.memory_allocated() >= 64 << 20


@pytest.mark.parametrize("draws", [False, True])
def test_a_key_without_memory_for_its_graph_is_captured_later(make: Make, draws: bool) -> None:
    """`draws`: random numbers, so that torch itself captures."""
    full = np.ones(4096)  # larger than what a guard compares

    def work(x: Any) -> Any:
        if draws:
            x = x + torch.rand_like(x)
        if full[0] and torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 46, dtype=torch.uint8, device="cuda")
        return x * 2

    step = make(lambda x: work(x))
    x = randn(64)
    check(step, work, [(x,) for _ in range(2)])
    (line,) = step.statistics().keys
    assert (line.captures, line.broken, line.reason) == (0, 1, ""), step.explain()
    assert "no memory" in str(line.eager_reasons)
    full[:] = 0
    check(step, work, [(x,) for _ in range(4)])
    (line,) = step.statistics().keys
    assert (line.captures, line.replays, line.reason) == (1, 4, ""), step.explain()


@pytest.mark.parametrize("draws", [False, True])
def test_captures_that_fail_give_their_memory_back(make: Make, draws: bool) -> None:
    def waits(x: Any) -> Any:
        if draws:
            x = x + torch.rand_like(x)
        large = torch.ones(16 << 20, device="cuda")  # 64 MiB
        torch.cuda.current_stream().synchronize()
        return x * large[:8]

    x = randn(8)
    waits(x)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    steps = [make(waits) for _ in range(3)]
    for step in steps:
        for _ in range(8):
            step(x)
        assert step.statistics().eager == 8 and step.statistics().quarantined, step.explain()
    gc.collect()
    torch.cuda.empty_cache()
    workspaces = len(steps) * (34 << 20)  # of cuBLAS, for the streams of captures
    assert torch.cuda.memory_reserved() - before < workspaces + (32 << 20)
    torch.rand(3, device="cuda")  # and torch works on


def test_graphs_hold_a_part_of_the_device_by_default(make: Make) -> None:
    budget = make(lambda x: x * 2).cache.statistics().budget
    assert budget is not None
    assert 4 * budget <= torch.cuda.get_device_properties(0).total_memory < 5 * budget


_ASYNC = """
import torch
from ostinato.interop.torch import graphed

assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
model = torch.nn.Linear(8, 8).cuda()
step = graphed(model)
with torch.no_grad():
    for _ in range(4):
        x = torch.randn(2, 8, device="cuda")
        assert torch.equal(step(x), model(x))
print(step.explain())
"""


def test_with_cuda_malloc_async_every_call_is_eager_and_the_process_ends_well() -> None:
    environment = child_environment(PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    done = subprocess.run(
        [sys.executable, "-c", _ASYNC], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "torch allocates with cudaMallocAsync" in done.stdout


# ------------------------------------------------------------------------- explained eager runs


def eager_reason(step: Any, function: Any, *args: Any) -> str:
    for _ in range(3):
        found, wanted = step(*args), function(*args)
        assert found is wanted or same(found, wanted)
    statistics = step.statistics()
    assert statistics.replays == 0 and statistics.eager == 3, step.explain()
    (reason,) = statistics.quarantined.values()
    torch.rand(3, device="cuda")  # and torch works on
    return str(reason)


def test_tensors_on_the_cpu(make: Make) -> None:
    def f(x: Any, by: Any) -> Any:
        return x * by

    reason = eager_reason(make(f), f, randn(8), torch.tensor(2.0))
    assert "cpu" in reason and "test_graphed_torch.py" in reason

    by = torch.tensor(3.0)
    assert "cpu" in eager_reason(make(lambda x: x * by), lambda x: x * by, randn(8))


def test_subclasses_of_tensors(make: Make) -> None:
    class Odd(torch.Tensor):
        pass

    f = lambda x: x * 2  # noqa: E731
    x = randn(8).as_subclass(Odd)
    step = make(f)
    for _ in range(3):
        assert torch.equal(step(x), x * 2)
    assert "subclass" in step.explain() and step.statistics().replays == 0


def test_sparse_tensors(make: Make) -> None:
    f = lambda x: torch.sparse.sum(x)  # noqa: E731
    x = torch.eye(8, device="cuda").to_sparse()
    step = make(f)
    for _ in range(3):
        assert float(step(x)) == 8
    assert "layout" in step.explain() and step.statistics().replays == 0


def test_arguments_that_share_memory(make: Make) -> None:
    def f(x: Any, y: Any) -> Any:
        x.add_(1)
        return y.sum()

    for inference in (False, True):
        with torch.inference_mode() if inference else torch.no_grad():
            step = make(f)
            x = torch.zeros(64, device="cuda")
            for number in range(1, 6):
                assert float(step(x, x)) == 64 * number
            assert "shares memory" in str(step.statistics().eager_reasons)


# ------------------------------------------------------------------------------ twelve misuses


def test_1_an_output_is_kept_across_calls(make: Make) -> None:
    step = make(lambda x: x * 2)
    xs = [randn(1000) for _ in range(6)]
    kept = [step(x) for x in xs]
    assert all(same(k, x * 2) for k, x in zip(kept, xs, strict=True))


def test_2_an_input_is_resized(make: Make) -> None:
    step = make(lambda x: x * 2)
    x = randn(16)
    for size in ((16,), (16,), (4, 4), (8,), (4, 4), (8,)):
        x.resize_(size)
        assert same(step(x), x * 2)


@pytest.mark.parametrize("how", ["data", "attribute", "to", "load"])
def test_3_weights_are_moved(make: Make, how: str) -> None:
    model = Mlp().cuda()
    step = make(model)
    x = randn(4, 64)
    check(step, model, [(x,)] * 3)
    for _ in range(2):
        if how == "data":
            model.one.weight.data = randn(256, 64)
        elif how == "attribute":
            model.one.weight = torch.nn.Parameter(randn(256, 64))
        elif how == "to":
            old = model.one.weight.data
            model.to("cpu").to("cuda")
            model.one.weight.data.mul_(1.5)
            del old
        else:
            model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True)
        gc.collect()
        check(step, model, [(x,)] * 3)
    statistics = step.statistics()
    assert statistics.captures + statistics.rebound >= 2, step.explain()


def test_4_a_print_is_captured(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    def f(x: Any) -> Any:
        print(x.sum())
        return x * 2

    step = make(f)
    for _ in range(8):
        x = randn(8)
        assert same(step(x), x * 2)
    assert capsys.readouterr().out.count("tensor(") >= 8
    assert "print(x.sum())" in step.explain()


def test_5_python_state(make: Make) -> None:
    calls = 0

    def f(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return x * calls

    step = make(f)
    x = randn(8)
    for number in range(1, 7):
        assert same(step(x), x * number)
    assert "Python state" in step.explain()


def test_6_a_number_of_the_closure_changes(make: Make) -> None:
    by = 2.0
    step = make(lambda x: x * by)
    x = randn(8)
    for by in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0):
        assert same(step(x), x * by)
    model = Mlp().cuda()
    graphed_model = make(model)
    for scale in (1.0, 1.0, 2.0, 2.0, 2.0):
        model.scale = scale
        assert same(graphed_model(randn(2, 64).fill_(1)), model(randn(2, 64).fill_(1)))


@pytest.mark.parametrize("inference", [False, True])
def test_7_an_input_is_changed_in_place(make: Make, inference: bool) -> None:
    with torch.inference_mode() if inference else torch.no_grad():
        step = make(lambda x, y: x.add_(y).sum())
        x, y = randn(64), torch.ones(64, device="cuda")
        before = x.clone()
        for number in range(1, 6):
            total = step(x, y)
            before.add_(y)
            assert same(x, before), f"call {number}"
            assert same(total, before.sum())


@pytest.mark.parametrize("inference", [False, True])
def test_7_a_change_in_place_that_changes_nothing_at_first(make: Make, inference: bool) -> None:
    with torch.inference_mode() if inference else torch.no_grad():
        step = make(lambda x, y: x.add_(y).sum())
        x, y = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
        for number in range(6):
            y.fill_(number // 3)
            assert float(step(x, y)) == 64 * max(0, number - 2)
            assert float(x[0]) == max(0, number - 2)


def test_8_another_stream(make: Make) -> None:
    w = randn(512, 512)
    f = lambda x: (x @ w).relu() @ w  # noqa: E731
    step = make(f)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    wanted, found = [], []
    for number in range(30):
        with torch.cuda.stream(streams[number % 3]):
            x = randn(512, 512)
            wanted.append(f(x))
            found.append(step(x))
    torch.cuda.synchronize()
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


def test_9_a_graph_inside_a_graph(make: Make) -> None:
    inner = make(lambda x: x * 2)
    x = randn(8)
    for _ in range(3):
        inner(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = inner(x) + 1
    graph.replay()
    assert same(y, x * 2 + 1)
    outer = make(lambda x: inner(x) + 3)
    check(outer, lambda x: x * 2 + 3, [(randn(8),) for _ in range(4)])
    assert outer.statistics().replays == 3, outer.explain()


def test_10_an_exception_in_the_middle(make: Make) -> None:
    def f(x: Any) -> Any:
        y = torch.nn.functional.dropout(x, 0.5)
        if torch.cuda.is_current_stream_capturing():
            raise KeyError("in the middle")
        return y

    step = make(f)
    check(step, f, [(randn(64),) for _ in range(4)])
    assert "in the middle" in step.explain()
    good = make(lambda x: torch.nn.functional.dropout(x, 0.5))
    check(good, lambda x: torch.nn.functional.dropout(x, 0.5), [(randn(64),) for _ in range(4)])
    assert good.statistics().replays == 3, good.explain()

    def g(x: Any) -> Any:
        raise KeyError("always")

    with pytest.raises(KeyError):
        make(g)(randn(4))


def test_11_autocast_changes(make: Make) -> None:
    model = Mlp().cuda()
    step = make(model)
    x = randn(4, 64)
    for dtype in (None, None, torch.bfloat16, torch.bfloat16, torch.half, torch.half, None):
        with torch.autocast("cuda", dtype=dtype or torch.half, enabled=dtype is not None):
            for _ in range(3):
                assert same(step(x), model(x))
    assert len(step.statistics().keys) == 3, step.explain()
    assert step.statistics().captures == 3


def test_12_a_static_tensor_is_freed(make: Make) -> None:
    step = make(lambda x, w: x @ w, static=("w",))
    for _ in range(4):
        w = randn(64, 64)
        for _ in range(3):
            x = randn(8, 64)
            assert same(step(x, w), x @ w)
        del w
        torch.cuda.empty_cache()
    held = {"w": randn(64, 64)}
    step = make(lambda x: x @ held["w"])
    x = randn(8, 64)
    for _ in range(3):
        assert same(step(x), x @ held["w"])
    del held["w"]
    with pytest.raises(KeyError):
        step(x)


@pytest.mark.parametrize("results", ["clone", "static"])
def test_arrays_of_all_layouts(make: Make, results: str) -> None:
    """Whether the graph copies them itself or torch does, beside it."""
    from ostinato.interop.reading.moves import NAMES

    def whole(n: int) -> Any:
        return torch.randint(-9, 9, (n, 6), device="cuda").float()

    def images() -> Any:
        return whole(16).view(2, 3, 4, 4)

    cases: dict[str, tuple[Callable[[], Any], bool]] = {
        "plain": (lambda: whole(4), True),
        "odd place": (lambda: whole(5).view(-1)[1:25], True),
        "bytes": (lambda: whole(4).to(torch.int8).view(-1)[3:], True),
        "transposed": (lambda: whole(4).t(), True),
        "channels last": (lambda: images().contiguous(memory_format=torch.channels_last), True),
        "scalar": (lambda: whole(1)[0, 0].clone(), True),
        "large": (lambda: torch.randn(3_000_001, device="cuda"), True),
        "gaps": (lambda: whole(8)[::2], False),
        "columns": (lambda: whole(8)[:, 1:3], False),
        "expanded": (lambda: whole(1).expand(5, 6), False),
        "conjugated": (lambda: torch.complex(whole(2), whole(2)).conj(), False),
        "negated": (lambda: torch._neg_view(whole(4)), False),
    }
    for name, (draw, inside) in cases.items():
        step = make(lambda x: (x + 1, x * 2), results=results)
        for _ in range(5):
            x = draw()
            for one, other in zip(step(x), (x + 1, x * 2), strict=True):
                assert same(one.resolve_neg().resolve_conj(), other), name
        counts = step.statistics()
        assert counts.replays == 4, f"{name}: {step.explain()}"
        assert (NAMES[0] in step.inspect()) == inside, name


def test_arrays_without_elements(make: Make) -> None:
    """Nothing runs, so there is no graph; the results have their shapes."""
    step = make(lambda x: (x + 1, x * 2))
    for _ in range(3):
        one, other = step(randn(0, 6))
        assert one.shape == other.shape == (0, 6)
    assert step.statistics().eager == 3 and "empty" in step.explain()
    x = randn(2, 6)
    for _ in range(3):
        assert same(step(x)[0], x + 1)
    assert step.statistics().replays == 2


def test_results_of_all_layouts(make: Make) -> None:
    def f(x: Any) -> Any:
        y = x + 1
        return {
            "plain": y,
            "transposed": y.t(),
            "view": y[1:3],
            "gaps": y[:, ::2],
            "expanded": y[:1].expand(4, 6),
            "flags": y > 0,
            "empty": y[:0],
            "conjugated": torch.complex(y, y).conj(),
            "input": x,
        }

    for keys in (["plain", "transposed", "view", "flags", "empty", "input"], [*f(randn(4, 6))]):
        step = make(lambda x, keys=keys: {k: v for k, v in f(x).items() if k in keys})
        kept = []
        for _ in range(5):
            x = randn(4, 6)
            kept.append((step(x), f(x)))
        for found, wanted in kept:
            for key in keys:
                assert same(found[key].resolve_conj(), wanted[key].resolve_conj()), key
        assert step.statistics().replays == 4, step.explain()


def test_positions_are_no_random_states(make: Make) -> None:
    step = make(lambda a, b, c, d: (a + b, c * d))
    for number in range(5):
        args = [torch.tensor(number + k, device="cuda") for k in range(4)]
        one, two = step(*args)
        assert (int(one), int(two)) == (2 * number + 1, (number + 2) * (number + 3))
    assert step.statistics().replays == 4, step.explain()


def test_memory_of_earlier_calls_is_not_written(make: Make) -> None:
    step = make(lambda x: x * 2)
    for number in range(200):
        x = torch.full((1024,), float(number), device="cuda")
        y = step(x)
        place = y.data_ptr()
        del y
        other = torch.full((1024,), -1.0, device="cuda")  # likely where the result was
        again = step(x)
        assert bool((other == -1).all()), (number, place, other.data_ptr())
        assert bool((again == 2 * number).all())
    assert step.statistics().replays == 399


# ------------------------------------------------------------------------------ threads


def test_another_thread_draws_random_numbers_while_a_graph_is_captured(make: Make) -> None:
    drawn: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def draw() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            drawn.put(torch.rand(4, device="cuda"))

    def f(x: Any) -> Any:
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
        return x * 2

    step = make(f, guard=False)  # else the queue, which replays do not fill, is a reason not to
    x = randn(8)
    torch.manual_seed(3)
    for _ in range(3):
        assert same(step(x), x * 2)
    assert drawn.qsize() == 2 and step.statistics().replays == 2, step.explain()
    torch.manual_seed(3)
    torch.cuda.synchronize()
    assert all(same(drawn.get(), torch.rand(4, device="cuda")) for _ in range(2))


@pytest.mark.parametrize("calls", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_soak(make: Make, cuda_device: Device, calls: int) -> None:
    """50 keys under a budget for 10, from two threads, in phases: in each a thread uses 5 keys."""
    keys, budget, phases = 50, 10, 10
    cache = ost.GraphCache(cuda_device, max_graphs=budget, limits=ost.CaptureLimits(per_key=100))
    w = randn(32, 32)
    f = lambda x, by: torch.relu(x @ w) * by  # noqa: E731
    step = make(f, cache=cache)
    each = calls // 2 // phases
    barrier = threading.Barrier(2)
    held: list[int] = []

    def work(seed: int) -> int:
        chance = random.Random(seed)
        wrong = 0
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for phase in range(phases):
                first = 5 * (2 * phase + seed) % keys
                for _ in range(each):
                    key = first + chance.randrange(5)
                    x, by = randn(1 + key // 2, 32), float(key % 2 + 1)
                    found, wanted = step(x, by), f(x, by)
                    wrong += not torch.equal(found, wanted)
                torch.cuda.synchronize()
                if not barrier.wait(60):
                    held.append(torch.cuda.memory_allocated())
        return wrong

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [0, 0]
    statistics = step.statistics()
    assert statistics.calls == statistics.eager + statistics.replays == calls
    assert len(statistics.keys) == keys and len(cache) <= budget
    assert statistics.captures > keys and not statistics.quarantined, step.explain()
    assert statistics.replays > 0.8 * calls, step.explain()
    # Every key was there after half of the phases.
    assert max(held[phases // 2 :]) <= held[phases // 2 - 1] + (4 << 20), held


@pytest.mark.parametrize("seed", [False, True])
@pytest.mark.parametrize("way", ["kept", "external", "forks", "lets wait", "never recorded"])
def test_an_event_that_is_in_use_after_the_call(make: Make, way: str, seed: bool) -> None:
    """No replay recorded it: who waited for it saw what was there before.  With random numbers
    torch itself captures."""
    event = torch.cuda.Event(external=way == "external")
    side, other, x = torch.cuda.Stream(), torch.cuda.Stream(), torch.zeros(1 << 22, device="cuda")

    def function(x: Any) -> Any:
        y = torch.rand_like(x) if seed else x * 2
        if way == "forks":
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                z = y + 1
            torch.cuda.current_stream().wait_stream(side)
            return z
        if way == "never recorded":
            torch.cuda.current_stream().wait_event(event)
        elif way == "lets wait":
            other.wait_stream(torch.cuda.current_stream())
        else:
            event.record()
        return y + 1

    step = make(function)
    for _ in range(4):
        step(x)
        if way in ("kept", "external"):
            other.wait_event(event)
            event.synchronize()
    # How many numbers a graph draws is measured with all other nodes switched off, and an event's
    # cannot be.
    unmeasured = way == "external" and seed
    refused = way in ("kept", "lets wait", "never recorded")
    assert (step.statistics().replays == 0) is (refused or unmeasured), step.explain()
    if refused:
        assert "test_graphed_torch.py" in str(step.explain()), step.explain()


# ------------------------------------------------------------------------------ training


class Learning:
    """A model that learns inside of the function."""

    def __init__(self, make_optimizer: Callable[..., Any], *, scaled: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Mlp(16).cuda()
        self.optimizer = make_optimizer(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=3)
        self.scaled = scaled

    def step(self, x: Any, y: Any) -> Any:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        if self.scaled:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
        return loss.detach()


OPTIMISERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "capturable Adam": lambda p: torch.optim.Adam(p, lr=0.01, capturable=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, capturable=True),
    "Adam, lr in a tensor": lambda p: torch.optim.Adam(
        p, lr=torch.tensor(0.01, device="cuda"), capturable=True
    ),
}


def train(make: Make, name: str, *, scaled: bool = False) -> Any:
    """30 steps next to an eager twin, whose learning rate is another one after six."""
    mine, theirs = (Learning(OPTIMISERS[name], scaled=scaled) for _ in range(2))
    step = make(mine.step, gradients="eager")
    with torch.enable_grad():
        for number in range(30):
            x, y = randn(8, 16), randn(8, 16)
            assert same(step(x, y), theirs.step(x, y)), f"{name}, step {number}: {step.explain()}"
            for one, other in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
                assert same(one, other), f"{name}, step {number}"
            if number % 6 == 5:
                mine.schedule.step()
                theirs.schedule.step()
    assert mine.scaler.state_dict() == theirs.scaler.state_dict()
    return step


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_learning_rate_that_a_scheduler_changes(make: Make, name: str) -> None:
    step = train(make, name)
    statistics = step.statistics()
    if name == "Adam":  # it counts its steps on the CPU, so that replays make them in Python
        assert statistics.captures == 1 and statistics.replays >= 20, step.explain()
    elif "tensor" in name:
        assert statistics.captures == 1 and statistics.replays >= 27, statistics
    else:
        assert statistics.captures == 5 and statistics.replays >= 23, statistics


@pytest.mark.parametrize("name", ["SGD", "fused SGD", "capturable Adam", "fused AdamW"])
def test_a_scaler_of_gradients(make: Make, name: str) -> None:
    """It reads whether anything overflowed, in Python, unless the optimiser does on the device."""
    step = train(make, name, scaled=True)
    statistics = step.statistics()
    assert statistics.replays >= (20 if "fused" in name else 3), step.explain()
    assert ("steps of Python" in step.explain()) is not ("fused" in name), step.explain()


# ------------------------------------------------------------------------------ seeds

SEEDS: dict[str, Callable[[Any], Any]] = {
    "torch.manual_seed": lambda own: torch.manual_seed(5),
    "torch.cuda.manual_seed": lambda own: torch.cuda.manual_seed(5),
    "the default generator": lambda own: torch.cuda.default_generators[
        torch.cuda.current_device()
    ].manual_seed(5),
    "a generator": lambda own: own.manual_seed(5),
    "a state": lambda own: own.set_state(torch.Generator(device="cuda").manual_seed(5).get_state()),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("seeded_before", [False, True])
def test_a_seed_that_the_function_gives(make: Make, seed: str, seeded_before: bool) -> None:
    """torch ignores a seed in a capture, if it is the one that the generator has."""
    own = torch.Generator(device="cuda").manual_seed(3)
    give = SEEDS[seed]

    def f(x: Any) -> Any:
        give(own)
        return x + torch.rand(x.shape, device="cuda", generator=own) + torch.rand_like(x)

    step = make(f, generators=[own])
    x = randn(100)
    results = []
    for run in (f, step):
        torch.manual_seed(1)
        own.manual_seed(2)
        if seeded_before:
            give(own)
        results.append([run(x) for _ in range(6)])
        results[-1] += [torch.rand(4, device="cuda"), torch.rand(4, device="cuda", generator=own)]
    assert all(same(a, b) for a, b in zip(*results, strict=True)), step.explain()
    assert step.statistics().replays == 0 and step.statistics().quarantined, step.explain()


def test_seeds_are_as_they_were_after_a_capture(make: Make) -> None:
    """Also after one that failed, and for a recurrent network, whose dropout cuDNN keeps."""
    f = lambda x: x + torch.rand_like(x)  # noqa: E731
    step, broken = make(f), make(lambda x: x + torch.rand_like(x).sum().item())
    x = randn(10)
    torch.cuda.manual_seed(7)
    wanted = [f(x) for _ in range(4)]
    torch.cuda.manual_seed(7)
    assert all(same(step(x), one) for one in wanted)
    assert torch.cuda.initial_seed() == 7 and step.statistics().replays == 3, step.explain()
    for _ in range(3):
        broken(x)
    assert torch.cuda.initial_seed() == 7
    assert same(step(x), step(x)) is False


def test_numbers_that_are_drawn_on_the_cpu(make: Make) -> None:
    f = lambda x: x * 2 if float(torch.rand(())) < 0.5 else x + 1  # noqa: E731
    step, x = make(f), randn(10)
    torch.manual_seed(0)
    wanted = [f(x) for _ in range(20)]
    torch.manual_seed(0)
    assert all(same(step(x), one) for one in wanted)
    assert step.statistics().replays == 0 and "generator of the CPU" in step.explain()


@pytest.mark.parametrize("zeroed", ["inside", "outside"])
def test_gradients_are_those_of_the_last_call(make: Make, zeroed: str) -> None:
    """Of whichever key, also for an optimiser outside of the function."""

    def using(model: Any) -> Callable[..., Any]:
        parameters = [*model.parameters()]

        def f(x: Any) -> Any:
            for parameter in parameters if zeroed == "inside" else ():
                parameter.grad = None
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        return f

    mine, theirs = Mlp(16).cuda(), Mlp(16).cuda()
    theirs.load_state_dict(mine.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (mine, theirs)]
    step, f = make(using(mine), gradients="eager"), using(theirs)
    with torch.enable_grad():
        for number in range(20):
            x = randn(4 + number % 2, 16)
            assert same(step(x), f(x)), number
            for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
                assert same(one.grad, other.grad), number
            for optimizer in optimizers:
                optimizer.step()
                if zeroed == "outside":
                    optimizer.zero_grad()
    assert step.statistics().replays >= 14, step.explain()


def test_a_pool_outlives_the_graphs_that_torch_captured(cuda_device: Device) -> None:
    """torch counts its own graphs of a pool alone for pinned memory, and refused a pool that only
    others still used (an internal assertion, torch 2.11)."""
    from ostinato.interop.torch.capturing import Captures

    captures, x = Captures(cuda_device, 0, ()), torch.ones(4, device="cuda")
    stream = cuda_device.adopt_stream(torch.cuda.current_stream())
    with torch.no_grad():
        first, doubled = captures.capture(lambda _: x * 2)  # by ostinato, and kept
        for seed in range(3):
            torch.manual_seed(seed)
            drawn, found = captures.capture(lambda _: torch.rand(4, device="cuda"))  # by torch
            drawn.instantiate().launch(stream)
            torch.manual_seed(seed)
            assert torch.equal(found, torch.rand(4, device="cuda"))
            del drawn, found
            cuda_device.synchronize()
            gc.collect()
        first.instantiate().launch(stream)
        assert torch.equal(doubled, x * 2)


@pytest.mark.parametrize("way", ["forward", "chain", "backward", "training"])
def test_13_torch_frees_the_workspaces_of_cublas(make: Make, way: str) -> None:
    """It does before each capture for torch.compile, and later versions with their own graphs."""

    def mlp() -> Any:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 128)]
        return torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(128, 8)).cuda()

    def stepped(model: Any) -> Any:
        called = make(model, gradients="replay") if way == "backward" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Any) -> Any:
            y = called(x)
            if way == "chain" and not bool(y.isfinite().all()):
                raise ValueError("not finite")
            if way in ("forward", "chain"):
                return y @ y.mT
            optimizer.zero_grad()
            loss = y.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    model, twin = mlp(), mlp()
    step = stepped(model)
    step = step if way == "backward" else make(step)
    expected = stepped(twin) if way != "backward" else None
    with torch.set_grad_enabled(way in ("backward", "training")):
        for number in range(12):
            x = randn(64, 64)
            if number == 6:
                torch.cuda.synchronize()
                torch._C._cuda_clearCublasWorkspaces()
                gc.collect()
                torch.cuda.empty_cache()
                others = [torch.full((8 << 20,), 7.0, device="cuda") for _ in range(32)]
            result = step(x)
            if expected is not None:
                assert same(result, expected(x)), number
            assert result.isfinite().all()
    assert all(bool((other == 7).all()) for other in others)
    if way != "backward":
        assert step.statistics().replays >= 4, step.explain()


def test_14_a_kernel_of_triton_is_dropped(make: Make, tmp_path: Path) -> None:
    """Since Triton 3.7 the end of a compiled kernel unloads its code."""
    compiler = pytest.importorskip("triton.compiler.compiler")
    path = tmp_path / "kernel_of_test_14.py"
    path.write_text(
        "import triton, triton.language as tl\n@triton.jit\ndef add(x, y, n, B: tl.constexpr):\n"
        "    i = tl.program_id(0) * B + tl.arange(0, B)\n"
        "    tl.store(y + i, tl.load(x + i, i < n) + 3.0, i < n)\n"
    )
    spec = importlib.util.spec_from_file_location("kernel_of_test_14", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    held = [module.add]

    def f(x: Any) -> Any:
        y = torch.empty_like(x)
        held[-1][(4,)](x, y, x.numel(), B=256)
        return y

    before = {id(o) for o in gc.get_objects() if isinstance(o, compiler.CompiledKernel)}
    step = make(f)
    x = randn(1000)
    for _ in range(3):
        assert same(step(x), x + 3)
    assert step.statistics().replays, step.explain()
    kernels = [o for o in gc.get_objects() if isinstance(o, compiler.CompiledKernel)]
    kernels = [weakref.ref(o) for o in kernels if id(o) not in before]
    assert kernels
    held[0].device_caches.clear()
    gc.collect()
    assert any(kernel() is not None for kernel in kernels)
    step.close()
    gc.collect()
    assert all(kernel() is None for kernel in kernels)


@pytest.mark.parametrize("how", ["clear", "smaller for a while", "full"])
def test_15_plans_of_cufft_end(make: Make, how: str) -> None:
    """A graph with a transform gives another result, or breaks, once its plan has ended."""
    cache = torch.backends.cuda.cufft_plan_cache
    f = lambda x: torch.fft.fft(x).abs() * 2  # noqa: E731
    step, most = make(f), cache.max_size
    try:
        for number in range(10):
            x = randn(64, 1000)
            assert same(step(x), f(x)), number
            if number == 4:
                assert step.statistics().replays >= 3, step.explain()
                torch.cuda.synchronize()
                if how == "clear":
                    cache.clear()
                else:
                    cache.max_size = 1
                f(randn(64, 1002))
                if how == "smaller for a while":
                    cache.max_size = most
    finally:
        cache.max_size = most
    counts = step.statistics()
    assert counts.captures == (1 if how == "full" else 2), step.explain()
    assert counts.replays == (4 if how == "full" else 8), step.explain()
