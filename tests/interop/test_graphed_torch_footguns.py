"""Known ways to get a wrong answer out of functions and modules of torch, without a GPU.

Captures are frozen as those of CUDA are (`tape.py`)."""

from __future__ import annotations

import collections
import copy
import ctypes
import dataclasses
import enum
import functools
import gc
import io
import itertools
import pickle
import queue
import socket
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.interop.reading.padding import Padding

torch: Any = pytest.importorskip("torch")


@pytest.fixture
def make(host_device: Device) -> Iterator[Callable[..., Any]]:
    from tests.interop.tape import on_tape

    made: list[Any] = []

    def graphed(function: Any, **options: Any) -> Any:
        made.append(on_tape(host_device, function, **options))
        return made[-1]

    yield graphed
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def equal(found: Any, wanted: Any) -> None:
    leaves = torch.utils._pytree.tree_leaves
    for one, other in zip(leaves(found), leaves(wanted), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def check(step: Any, function: Any, *args: Any, calls: int = 4) -> None:
    for _ in range(calls):
        wanted = function(*args)
        equal(step(*args), wanted)


BASE = torch.arange(24.0)


@pytest.mark.parametrize(
    "x",
    [
        BASE.view(4, 6).t(),
        BASE[::2],
        BASE.view(4, 6)[:, 1:4],
        BASE[:3].expand(4, 3),
        BASE[0].expand(3, 3),
        BASE[3].expand(1),
        BASE.as_strided((5, 3), (1, 1)),
        BASE.unfold(0, 3, 1),
        BASE[:0],
        BASE[3],
        BASE.view(2, 3, 4).permute(2, 0, 1),
        BASE[5:],
        torch.view_as_complex(BASE.view(12, 2)).conj(),
        torch.view_as_complex(BASE.view(12, 2)).conj().imag,
        BASE.bool(),
        BASE.to(torch.complex64),
        BASE.to(torch.bfloat16),
        torch.tensor([float("nan"), -0.0, float("inf")]),
    ],
)
def test_arguments_of_all_layouts(make: Any, x: Any) -> None:
    step = make(lambda x: (x * 2, x.sum(), x + 0))
    check(step, lambda x: (x * 2, x.sum(), x + 0), x)
    assert step.statistics().replays == 3, step.explain()


def test_arguments_whose_elements_repeat(make: Any) -> None:
    def f(x: Any, y: Any) -> Any:
        x[0].add_(1)  # all rows are this one
        return x * (2 if x.stride(0) == 0 else 3), x.sum() + y

    mine, theirs = torch.arange(3.0), torch.arange(3.0)
    step = make(f, verify=3)
    for _ in range(6):
        found = step(mine.expand(4, 3), torch.ones(1))
        equal(found, f(theirs.expand(4, 3), torch.ones(1)))
        equal(mine, theirs)
    assert step.statistics().verified == 2 and not step.statistics().quarantined


def test_dynamic_sizes_beside_arguments_whose_elements_repeat(make: Any) -> None:
    step = make(lambda x, y: x + y, padding=Padding({"x": 0}, ost.PowersOfTwo(8)))
    for size in (3, 5, 3, 6, 3):
        check(step, lambda x, y: x + y, torch.ones(size), BASE[3].expand(1), calls=1)
        check(step, lambda x, y: x + y, torch.ones(size, 4), BASE[0].expand(1, 4), calls=1)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "bool", "complex64", "int8"])
@pytest.mark.parametrize("tolerance", [None, (1e-3, 1e-3)])
def test_checks_of_all_types(make: Any, name: str, tolerance: Any) -> None:
    x = torch.tensor([0, 1, 1, 0]).to(getattr(torch, name))
    step = make(lambda x: (x.clone(),), verify=1, tolerance=tolerance)
    for _ in range(3):
        (found,) = step(x)
        assert torch.equal(found.view(torch.uint8), x.view(torch.uint8))
    assert step.statistics().verified == 2 and not step.statistics().quarantined


def test_checks_of_statistics_that_torch_does_not_count(make: Any) -> None:
    """`batch_norm` writes its running statistics, and their versions do not tell it."""
    mine, theirs = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    step = make(mine, verify=2)
    for _ in range(6):
        x = torch.rand(5, 3)
        equal(step(x), theirs(x))
        equal(mine.running_mean, theirs.running_mean)
        equal(mine.running_var, theirs.running_var)
    assert step.statistics().verified == 3 and not step.statistics().quarantined


@pytest.mark.parametrize("lazy", [torch.conj, torch.Tensor._neg_view])
def test_checks_of_lazy_tensors(make: Any, lazy: Any) -> None:
    x = lazy(torch.tensor([1 + 2j, 3 + 4j]))
    step = make(lambda x: (x * 2, x), verify=1)
    check(step, lambda x: (x * 2, x), x)
    assert step.statistics().verified == 3 and not step.statistics().quarantined


def test_arrays_that_share_memory_and_are_written(make: Any) -> None:
    def f(x: Any, y: Any) -> Any:
        x.add_(1)
        return y.sum()

    mine, theirs = torch.zeros(6), torch.zeros(6)
    step = make(f)
    for _ in range(5):
        equal(step(mine[:4], mine[2:]), f(theirs[:4], theirs[2:]))
        equal(mine, theirs)


def test_parts_of_memory_that_another_library_gave(make: Any) -> None:
    """The storages of such tensors begin at different addresses."""

    def f(x: Any, y: Any) -> Any:
        x.add_(1)
        return y.sum()

    def parts() -> Any:
        whole = np.zeros(6, np.float32)
        return torch.from_numpy(whole[:4]), torch.from_numpy(whole[2:])

    step, mine, theirs = make(f), parts(), parts()
    for _ in range(5):
        equal(step(*mine), f(*theirs))
        equal(mine, theirs)
    apart = torch.zeros(3), torch.zeros(0)  # nothing is shared here
    check(make(f), lambda x, y: y.sum(), *apart)


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "data": lambda x, out: out.data.copy_(x),
    "kernels of one's own": lambda x, out: np.copyto(out.numpy(), x.numpy()),
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("filled", [False, True])
def test_writes_that_are_not_counted(host_device: Device, way: str, filled: bool) -> None:
    """`filled`: the first call changes nothing."""
    from tests.interop.tape import OnCpu, on_cpu

    def f(x: Any, out: Any) -> Any:
        WRITES[way](x, out)
        return x + 1

    with on_cpu(OnCpu(host_device), f) as step:
        out = torch.zeros(3) if filled else torch.ones(3)
        for call in range(6):
            x = torch.full((3,), float(call))
            equal(step(x, out), x + 1)
            equal(out, x)
            before = x.clone()
            equal(x, before)
        assert step.statistics().replays == 5, step.explain()


def set_data(x: Any) -> Any:
    x.data = x.data * 2
    return x + 1


def set_attribute(x: Any) -> Any:
    x.called = True
    return x + 1


@pytest.mark.parametrize(
    ("function", "static"), [(set_data, ()), (set_data, ("x",)), (set_attribute, ())]
)
def test_tensors_that_are_given_other_memory_or_attributes(
    make: Any, function: Any, static: Any
) -> None:
    step = make(function, static=static)
    mine, theirs = torch.ones(3), torch.ones(3)
    for _ in range(4):
        equal(step(mine), function(theirs))
        equal(mine, theirs)
        fresh = torch.ones(3)
        step(fresh)
        assert torch.equal(fresh, torch.full((3,), 2.0)) or fresh.called


def test_a_weight_that_the_function_gives_other_memory(make: Any) -> None:
    def using(weight: Any) -> Any:
        def f(x: Any) -> Any:
            weight.data = weight.data * 2
            return x + weight

        return f

    step, function = make(using(torch.ones(3))), using(torch.ones(3))
    check(step, function, torch.ones(3), calls=6)
    assert "the memory of a tensor" in step.explain()


@pytest.mark.parametrize("sizes", [(5, 5, 6, 7, 8), (8, 8, 8, 5, 6, 5, 7)])
@pytest.mark.parametrize("verify", ["off", "first"])
def test_results_that_tell_a_dynamic_size(make: Any, sizes: Any, verify: Any) -> None:
    """A size that is a number in a result cannot be cut back."""
    options = {"padding": Padding({"x": 0}, ost.PowersOfTwo(16)), "verify": verify}
    step = make(lambda x: (x * 2, len(x)), **options)
    for size in sizes:
        doubled, length = step(torch.ones(size))
        assert doubled.shape == (size,) and length == size
    assert "plain values" in step.explain()


def test_results_that_hold_a_function_of_the_call(make: Any) -> None:
    """It has what the call computed, and is the caller's to keep."""

    def f(x: Any) -> Any:
        y = x * 2
        return y, lambda: y + 1

    step, kept = make(f), []
    for call in range(5):
        kept.append(step(torch.full((3,), float(call)))[1])
    for call, later in enumerate(kept):
        equal(later(), torch.full((3,), 2.0 * call + 1))


def test_dynamic_sizes_of_what_is_written_and_strided(make: Any) -> None:
    def f(x: Any) -> Any:
        x.add_(1)
        return x.sum(0)

    step = make(f, padding=Padding({"x": -1}, ost.PowersOfTwo(16)))
    for n in (5, 6, 7, 8, 3, 4, 5, 5, 6):
        mine = torch.arange(3.0 * n).view(n, 3).t()
        theirs = mine.clone()
        equal(step(mine), f(theirs))
        equal(mine, theirs)


NUMBERS = itertools.count(2)


def times() -> Callable[..., Any]:
    """A new function."""
    number = next(NUMBERS)
    return lambda *args: args[-1] * number


class Doubling(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


class Inner(torch.nn.Module):
    by: Any = 1.0
    bys: Any = ()

    def forward(self, x: Any) -> Any:
        return x * self.by * sum(self.bys)


class Net(torch.nn.Module):
    by: Any = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.inner = type("Own", (Inner,), {"bys": [1.0]})()
        self.table = torch.ones(3)
        self.scales = [2.0]
        self.config = types.SimpleNamespace(by=2.0)
        self.extra = [torch.ones(3)]

    def forward(self, x: Any) -> Any:
        y = self.linear(x) * self.table * self.scales[0] + self.extra[0]
        return self.inner(y * self.config.by * getattr(self, "late", self.by))


class Runner:
    """A plain object that has a module."""

    def __init__(self) -> None:
        self.model = Net()

    def __call__(self, x: Any) -> Any:
        return self.helped(x)

    def helped(self, x: Any) -> Any:
        return self.model(x)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a tensor that is no buffer": lambda m: setattr(m, "table", m.table * 2),
    "an item of a list": lambda m: m.scales.__setitem__(0, m.scales[0] + 1),
    "a setting": lambda m: setattr(m.config, "by", m.config.by + 1),
    "another object of settings": lambda m: setattr(
        m, "config", types.SimpleNamespace(by=m.config.by + 1)
    ),
    "a tensor in a list": lambda m: m.extra.__setitem__(0, m.extra[0] * 3),
    "a forward": lambda m: setattr(m.linear, "forward", lambda x: x * 5),
    "an attribute that was not there": lambda m: setattr(m, "late", 3.0),
    "a buffer that was not there": lambda m: m.register_buffer("late", torch.ones(3) * 3),
    "the data of a weight": lambda m: setattr(m.linear.weight, "data", m.linear.weight.data * 2),
    "the memory of a weight": lambda m: m.linear.weight.set_(torch.rand(3, 3)),
    "what is behind a weight": lambda m: torch.utils.swap_tensors(
        m.linear.weight, torch.nn.Parameter(torch.rand(3, 3))
    ),
    "an attribute at another place": lambda m: vars(m).update(
        scales=[vars(m).pop("scales")[0] + 1]
    ),
    "a weight in place": lambda m: m.linear.weight.mul_(2),
    "a module": lambda m: setattr(m, "linear", torch.nn.Linear(3, 3)),
    "a method as forward": lambda m: setattr(
        m.linear, "forward", types.MethodType(times(), m.linear)
    ),
    "a partial as forward": lambda m: setattr(
        m.linear, "forward", functools.partial(torch.mul, other=torch.tensor(next(NUMBERS)))
    ),
    "a forward of the whole": lambda m: setattr(m, "forward", times()),
    "a forward of the class": lambda m: setattr(type(m), "forward", times()),
    "a class": lambda m: setattr(m.linear, "__class__", type("Other", (Doubling,), {})),
    "an attribute of the class": lambda m: setattr(type(m), "by", type(m).by + 1),
    "an attribute of a class inside": lambda m: setattr(type(m.inner), "by", type(m.inner).by + 1),
    "an item of a class's list": lambda m: type(m.inner).bys.append(5.0),
    "a hook of its own": lambda m: m.linear.register_forward_hook(times()),
    "no hooks": lambda m: setattr(m.linear, "_forward_hooks", collections.OrderedDict()),
    "a hook": lambda m: m.linear.register_forward_hook(lambda m, args, out: out * 2),
    "a hook with names": lambda m: m.linear.register_forward_pre_hook(
        lambda m, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True
    ),
    "a hook of the whole": lambda m: m.register_forward_hook(lambda m, args, out: out * 2),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["module", "closure", "attribute"])
def test_changes_of_a_module(make: Any, change: str, kind: str) -> None:
    if "of the class" in change and "forward" in change and kind != "module":
        return  # it is not seen
    runner, x = Runner(), torch.ones(2, 3)
    model = runner.model
    model.__class__ = type("Own", (Net,), {})  # whose attributes are set
    functions = {"module": model, "closure": lambda x: model(x), "attribute": runner}
    step = make(functions[kind])
    check(step, model, x)
    assert step.statistics().replays == 3, step.explain()
    for _ in range(2):
        CHANGES[change](model)
        check(step, model, x)
    assert not step.statistics().quarantined


class Either(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(5.0))
        self.register_parameter("shift", None)

    def forward(self, x: Any) -> Any:
        return x - self.shift if self.scale is None else x * self.scale


def test_a_weight_under_another_name(make: Any) -> None:
    model, x = Either(), torch.ones(3)
    step = make(model)
    check(step, model, x)
    model.scale, model.shift = None, model.scale
    check(step, model, x)
    assert step.statistics().replays == 6, step.explain()


class Looking(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, look_up: Any) -> None:
        super().__init__()
        self.look_up = look_up

    def forward(self, x: Any) -> Any:
        return x * self.look_up("scale")


def test_built_in_methods_of_what_changes(make: Any) -> None:
    table: dict[str, Any] = {"scale": 2.0}
    model, x = Looking(table.get), torch.ones(3)
    step, given = make(model), make(lambda x, look_up: x * look_up("scale"))
    for scale in (2.0, 3.0):
        table["scale"] = scale
        check(step, model, x)
        check(given, lambda x, look_up: x * look_up("scale"), x, table.get)
    assert step.statistics().replays == 6, step.explain()
    check(make(lambda x, act: act(x)), lambda x, act: act(x), x, torch.relu)


def test_attributes_that_are_set_of_a_graphed_module(make: Any) -> None:
    model, x = Net(), torch.ones(2, 3)
    step = make(model)
    check(step, model, x)
    step.table, step.by = model.table * 2, 3.0
    assert model.by == 3.0
    check(step, model, x)
    step.linear = torch.nn.Linear(3, 3)
    assert step.linear is model.linear and "linear.weight" in model.state_dict()
    check(step, model, x)
    del step.by
    assert model.by == 1.0
    check(step, model, x)


def test_forwards_and_hooks_of_the_whole(make: Any) -> None:
    """The module's own forward is another one while its hooks run, and is put back."""
    model, x = Net(), torch.ones(2, 3)
    step = make(model)
    model.register_forward_hook(lambda m, args, out: out + 1)
    for number in (None, 2.0, 3.0, None):
        if number is not None:
            model.forward = lambda x, number=number: x * number
        elif "forward" in vars(model):
            del model.forward
        check(step, model, x)
        assert ("forward" in vars(model)) == (number is not None)
    assert step.statistics().replays >= 12


class Doubled(torch.nn.Linear):  # type: ignore[misc]
    def __call__(self, x: Any) -> Any:
        return super().__call__(x) * 2


def test_a_class_with_a_call_of_its_own(make: Any) -> None:
    model, x = Doubled(3, 3), torch.ones(2, 3)
    step = make(model)
    check(step, model, x)
    assert step.statistics().replays == 3, step.explain()


def test_hooks_that_call_the_whole(make: Any) -> None:
    model, x, depth = Net(), torch.ones(2, 3), []

    def hook(m: Any, args: Any, out: Any) -> Any:
        if depth:
            return out
        depth.append(1)
        try:
            return out + m(args[0]) + step(args[0])
        finally:
            depth.pop()

    step = make(model)
    model.register_forward_hook(hook)
    check(step, model, x)
    assert step.statistics().replays > 3


def test_modules_of_the_same_shapes(make: Any) -> None:
    """One of another class is another function; one of the same class has other weights alone."""

    class Doubled(torch.nn.Linear):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return super().forward(x) * 2

    held, x = types.SimpleNamespace(net=None), torch.ones(1, 2)
    step = make(lambda x: held.net(x))
    plain, other, doubled = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), Doubled(2, 2)
    for net in (plain, plain, plain, doubled, doubled, plain, doubled, other, other, plain):
        held.net = net
        equal(step(x), net(x))
    assert len(step.statistics().keys) == 2, step.explain()


def test_modules_that_are_replaced_are_not_kept(make: Any) -> None:
    held, gone = types.SimpleNamespace(net=None), []
    step = make(lambda x: held.net(x))
    for _ in range(10):
        held.net = torch.nn.Linear(2, 2)
        gone.append(weakref.ref(held.net))
        check(step, held.net, torch.ones(1, 2), calls=3)
    gc.collect()
    assert sum(one() is not None for one in gone) <= 2


def test_a_module_that_keeps_what_it_computed(make: Any) -> None:
    class Keeping(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            self.last = x * 2
            return x + 1

    model = Keeping()
    step = make(model)
    for start in range(6):
        x = torch.full((2,), float(start))
        equal(step(x), x + 1)
        equal(model.last, x * 2)


def test_running_statistics_in_turns_with_evaluation(make: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    step, x = make(model), torch.randn(4, 3)
    for training in (True,) * 4 + (False,) * 4 + (True,) * 2:
        model.train(training)
        other = copy.deepcopy(model)
        equal(step(x), other(x))
        equal(dict(model.state_dict()), dict(other.state_dict()))


def test_weights_that_learn_again(make: Any) -> None:
    model = torch.nn.Linear(3, 3).requires_grad_(False)
    with torch.enable_grad():
        step = make(model, gradients="eager")
        check(step, model, torch.ones(2, 3))
        assert step.statistics().replays == 3
        model.requires_grad_(True)
        assert step(torch.ones(2, 3)).requires_grad
        model.requires_grad_(False)
        assert not step(torch.ones(2, 3)).requires_grad
        assert step(torch.ones(2, 3, requires_grad=True)).requires_grad


def test_the_default_device_is_in_the_key(make: Any) -> None:
    def f(x: Any) -> Any:
        return x * torch.ones(2).device.type.count("meta")

    step, x = make(f), torch.ones(2)
    check(step, f, x)
    with torch.device("meta"):
        check(step, f, x)
    check(step, f, x)


def test_modes_that_look_at_each_operation(make: Any) -> None:
    counter = pytest.importorskip("torch.utils.flop_counter")
    model, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    step = make(model)
    check(step, model, x)
    with counter.FlopCounterMode(display=False) as wanted:
        model(x)
    with counter.FlopCounterMode(display=False) as found:
        step(x)
    assert found.get_total_flops() == wanted.get_total_flops() > 0
    assert "FlopCounterMode" in step.explain()
    check(step, model, x)
    assert step.statistics().replays >= 6


NEWER: Any = [
    (torch.backends.cudnn, "depthwise_kernel", "native"),
    (torch.backends.cuda.matmul, "prefer_cublaslt_grouped_gemm", True),
]
"""Settings that not every torch has."""


@pytest.fixture
def settings() -> Iterator[None]:
    """torch's settings are what they were after the test."""
    backends = torch.backends
    held = [
        *((backends.cuda.matmul, "fp32_precision"), (backends.cudnn.conv, "fp32_precision")),
        (backends.cudnn.rnn, "fp32_precision"),
        (backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        (backends.cudnn, "deterministic"),
        (backends.cuda.matmul, "allow_fp16_accumulation"),
        (backends.mha, "_is_fastpath_enabled"),
        *[(held, name) for held, name, _ in NEWER if hasattr(held, name)],
    ]
    before = [getattr(each, name) for each, name in held]
    order = torch._C._get_sdp_priority_order()
    yield
    torch.use_deterministic_algorithms(False)
    torch._C._set_sdp_priority_order(order)
    backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
    torch._C._set_sm_carveout_experimental(None)
    torch.set_default_dtype(torch.float32)
    torch.set_autocast_dtype("cuda", torch.float16)
    torch.set_autocast_enabled("cpu", False)
    for (each, name), value in zip(held, before, strict=True):
        setattr(each, name, value)


def set_to(held: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: setattr(held, name, value)


SETTINGS: dict[str, Callable[[], Any]] = {
    "products": set_to(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "convolutions": set_to(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "sums": set_to(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "algorithms": set_to(torch.backends.cudnn, "deterministic", True),
    "sums in float16": set_to(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
    "sums of attention": lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True),
    "an order of kernels": lambda: torch._C._set_sdp_priority_order([2, 1, 0, 3, 4]),
    "the default type": lambda: torch.set_default_dtype(torch.float64),
    "the type of autocast": lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
    "the CPU's autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "the fast way of encoders": set_to(torch.backends.mha, "_is_fastpath_enabled", False),
    "processors that products leave free": lambda: torch._C._set_sm_carveout_experimental(8),
}
SETTINGS |= {name: set_to(held, name, v) for held, name, v in NEWER if hasattr(held, name)}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_choose_kernels(make: Any, setting: str, settings: None) -> None:
    """The new settings of the precision may make torch's old ones raise."""
    step, x = make(lambda x: x @ x), torch.ones(2, 2)
    for _ in range(2):
        check(step, lambda x: x @ x, x)
        SETTINGS[setting]()
    assert len(step.statistics().keys) == 2 and step.statistics().replays == 6, step.explain()
    assert step._hot


def test_settings_of_deterministic_algorithms(make: Any, settings: None) -> None:
    deterministic = torch.utils.deterministic
    step, x = make(lambda x: x @ x), torch.ones(2, 2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    check(step, lambda x: x @ x, x)
    torch.use_deterministic_algorithms(True)
    check(step, lambda x: x @ x, x)
    before = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = not before
    try:
        check(step, lambda x: x @ x, x)
    finally:
        deterministic.fill_uninitialized_memory = before
    assert len(step.statistics().keys) == 3 and step.statistics().replays == 9, step.explain()


def test_precisions_that_contradict_each_other(make: Any, settings: None) -> None:
    """Products raise then: that is not the precision that the old setting alone would give."""
    step, x, precision = make(lambda x: x @ x), torch.ones(2, 2), torch.backends.cuda.matmul
    try:
        torch.set_float32_matmul_precision("high")
        check(step, lambda x: x @ x, x)
        precision.fp32_precision = "ieee"
        check(step, lambda x: x @ x, x)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(step.statistics().keys) == 2, step.explain()


def test_attention_kernels_that_are_chosen(make: Any) -> None:
    attention = torch.nn.attention
    step, x = make(lambda x: x * 2), torch.ones(2)
    check(step, lambda x: x * 2, x)
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        check(step, lambda x: x * 2, x)
    check(step, lambda x: x * 2, x)
    assert len(step.statistics().keys) == 2 and step.statistics().eager == 2


@pytest.mark.filterwarnings("ignore")
def test_transforms_of_functions(make: Any) -> None:
    def f(x: Any) -> Any:
        return (x * x).sum()

    step, x, direction = make(f), torch.ones(3), torch.full((3,), 2.0)
    check(step, f, x)
    assert step._hot
    for _ in range(3):
        equal(torch.func.vmap(step)(torch.ones(2, 3)), torch.func.vmap(f)(torch.ones(2, 3)))
        equal(torch.func.jvp(step, (x,), (direction,)), torch.func.jvp(f, (x,), (direction,)))
        with torch.enable_grad():
            equal(torch.func.grad(step)(x), torch.func.grad(f)(x))
    check(step, f, x)
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        for _ in range(3):
            dual = forward.make_dual(x, direction)
            equal(forward.unpack_dual(step(dual)).tangent, torch.tensor(12.0))
    check(step, f, x)
    assert step.statistics().captures == 1 and "torch.func" in step.explain()


@pytest.mark.filterwarnings("ignore")
def test_traces_of_torch_jit(make: Any) -> None:
    step = make(lambda x: x * 2)
    check(step, lambda x: x * 2, torch.ones(3))
    traced = torch.jit.trace(step, (torch.ones(3),), check_trace=False)
    equal(traced(torch.full((3,), 5.0)), torch.full((3,), 10.0))


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_no_plain_memory(make: Any) -> None:
    def f(x: Any) -> Any:
        return torch.nested.to_padded_tensor(x, 0.0) if x.is_nested else x.dequantize()

    step = make(f)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    quantized = [
        torch.quantize_per_tensor(torch.ones(3), scale, 0, torch.quint8) for scale in (0.1, 0.3)
    ]
    for x in (nested, *quantized):
        check(step, f, x)
    reasons = step.explain()
    assert "a nested tensor" in reasons and "a quantized tensor" in reasons


class Sparse(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(3).to_sparse())

    def forward(self, x: Any) -> Any:
        return torch.sparse.mm(self.graph, x)


def test_tensors_without_memory_of_their_own(make: Any) -> None:
    """Neither can be asked where it lies."""
    check(make(Sparse()), Sparse(), torch.ones(3, 2))
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3))
    step = make(lazy)
    first = step(torch.ones(3, 2))
    for _ in range(3):
        equal(step(torch.ones(3, 2)), first)
    assert "UninitializedParameter" in step.explain() and step.statistics().replays == 2


class Layer:
    def __init__(self, value: float) -> None:
        self.keys = torch.full((3,), value)


class Cache:
    """Caches are equal if they are of the same kind."""

    def __init__(self, value: float) -> None:
        self.layer = Layer(value)
        self.layers = [Layer(value), Layer(value)]
        self.pair = torch.full((3,), value), torch.full((3,), value)
        self.last = collections.deque([torch.full((3,), value)], maxlen=1)
        self.late: Any = None
        self.number: Any = 1
        self.net = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(3, 3)))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return 1


def use_cache(x: Any, cache: Any) -> Any:
    late = 0 if cache.late is None else cache.late
    y = x + cache.layer.keys + cache.layers[1].keys + cache.pair[1] + cache.last[0] + late
    return cache.net(y) + cache.number


CHANGES_OF_STATICS: dict[str, Callable[[Any], object]] = {
    "a tensor": lambda c: setattr(c.layer, "keys", c.layer.keys * 2),
    "an object": lambda c: setattr(c, "layer", Layer(7.0)),
    "an object in a list": lambda c: c.layers.__setitem__(1, Layer(7.0)),
    "a tuple": lambda c: setattr(c, "pair", (torch.zeros(3), torch.ones(3) * 5)),
    "a deque": lambda c: c.last.append(torch.ones(3) * 5),
    "what was none": lambda c: setattr(c, "late", torch.ones(3)),
    "what was a number": lambda c: setattr(c, "number", torch.ones(3)),
    "a name": lambda c: vars(c).update(net=vars(c).pop("net")),
    "a weight": lambda c: setattr(c.net[0][0].weight, "data", torch.rand(3, 3)),
    "a module": lambda c: c.net.__setitem__(0, torch.nn.Linear(3, 3)),
    "a hook": lambda c: c.net[0].register_forward_hook(lambda m, args, out: out * 2),
}


def of_package(kind: type) -> Any:
    """A class like another one, which belongs to an installed package."""
    held = {
        name: each for name, each in vars(kind).items() if name not in ("__dict__", "__weakref__")
    }
    return type(kind.__name__, (), held | {"__module__": "numpy"})


@pytest.mark.parametrize("change", CHANGES_OF_STATICS)
@pytest.mark.parametrize("kind", ["any", "plain", "of a package"])
def test_changes_of_static_objects(
    make: Any, change: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a package's object the arrays are read, wherever they are."""
    plainly = kind != "any"  # what has no short way is left out
    if plainly and change == "a deque":
        return
    if kind == "of a package":
        for each in (Layer, Cache):
            monkeypatch.setitem(globals(), each.__name__, of_package(each))
    step, x, cache = make(use_cache, static=("cache",)), torch.ones(3), Cache(1.0)
    if plainly:
        cache.last = [torch.ones(3)]  # type: ignore[assignment]
    check(step, use_cache, x, cache)
    assert bool(step._hot) == plainly and step.statistics().replays == 3
    CHANGES_OF_STATICS[change](cache)
    check(step, use_cache, x, cache)
    assert not step.statistics().quarantined


def test_a_list_of_a_module_in_a_static_object_of_a_package(make: Any) -> None:
    def f(x: Any, cache: Any) -> Any:
        return x * cache.net.extra[0]

    step, x, cache = make(f, static=("cache",)), torch.ones(3), of_package(Cache)(1.0)
    for value in (2.0, 3.0):
        cache.net.extra = [torch.full((3,), value)]
        check(step, f, x, cache)
    assert step.statistics().replays >= 6, step.explain()


def test_static_objects_that_are_equal(make: Any) -> None:
    step, x = make(use_cache, static=("cache",)), torch.ones(3)
    one, other = Cache(1.0), Cache(2.0)
    for cache in (one, other, one, other):
        check(step, use_cache, x, cache)
    gone = weakref.ref(one)
    step.forget()
    del one, cache
    gc.collect()
    assert gone() is None


def test_static_modules(make: Any) -> None:
    def f(x: Any, model: Any) -> Any:
        return model(x)

    step, x, model = make(f, static=("model",)), torch.ones(2, 3), Net()
    check(step, f, x, model)
    for name, change in CHANGES.items():
        others = "setting", "class", "as forward", "an "
        if not any(word in name for word in others):  # such are not watched
            change(model)
            check(step, f, x, model)
    assert not step.statistics().quarantined, step.explain()


class Standing:
    """Stands for a method, whose attributes are its own."""

    def __init__(self, function: Any) -> None:
        self.function, self.scale = function, 2.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["function"], name)

    def __call__(self, x: Any) -> Any:
        return self.function(x) * self.scale


def uses() -> dict[str, tuple[Callable[..., Any], Callable[[], Any]]]:
    """Functions, and a change of what each uses; more is in test_guards_random.py."""
    layer, factor = torch.nn.Linear(3, 3), torch.ones(3)
    method, multiply = layer.forward, factor.mul
    partial = functools.partial(torch.mul, other=torch.ones(3))
    standing = Standing(torch.nn.Linear(3, 3).forward)
    return {
        "what a method is bound to": (
            lambda x: method(x),
            lambda: setattr(layer.weight, "data", torch.rand(3, 3)),
        ),
        "what a method of a tensor is bound to": (
            lambda x: multiply(x),
            lambda: setattr(factor, "data", torch.rand(3)),
        ),
        "an argument of a partial": (
            lambda x: partial(x),
            lambda: partial.keywords.update(other=torch.ones(3) * 4),
        ),
        "an attribute of what stands for a method": (
            standing,
            lambda: setattr(standing, "scale", 3.0),
        ),
    }


@pytest.mark.parametrize("use", uses())
def test_changes_of_what_a_function_uses(make: Any, use: str) -> None:
    function, change = uses()[use]
    step, x = make(function), torch.ones(2, 3)
    check(step, function, x)
    assert step.statistics().replays == 3, step.explain()
    before = function(x)
    change()
    assert not torch.equal(function(x), before)
    check(step, function, x)
    assert not step.statistics().quarantined


class Private(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self._by, self._settings = 2.0, types.SimpleNamespace(by=2.0)

    @property
    def by(self) -> Any:
        return self._by

    def scaled(self, x: Any) -> Any:
        return x * self._settings.by

    def forward(self, x: Any) -> Any:
        return x


class Asking(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner.scaled(x) * self.inner.by + self.inner(x)


@pytest.mark.parametrize("kind", ["module", "closure"])
def test_private_attributes_that_other_methods_than_forward_read(make: Any, kind: str) -> None:
    private = Private()
    model: Any = Asking(private)
    if kind == "closure":
        model = lambda x: private.scaled(x) * private.by + private(x)  # noqa: E731
    step, x = make(model), torch.ones(3)
    check(step, model, x)
    private._by = 3.0
    check(step, model, x)
    private._settings.by = 5.0
    check(step, model, x)
    Private.scaled = lambda self, x: x * 7  # type: ignore[method-assign]
    check(step, model, x)
    assert step.statistics().replays >= 8, step.explain()


class Holding(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """A layer that multiplies by what an attribute holds."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self.read = held, read

    def forward(self, x: Any) -> Any:
        return x * self.read(self.held)


@pytest.mark.parametrize("place", ["module", "argument"])
@pytest.mark.parametrize(
    "kind",
    [
        *("tuple", "set", "key", "class", "class in a tuple", "member", "method of a member"),
        *("object", "closure", "default value", "class that is called"),
    ],
)
def test_what_plain_values_hold(make: Any, kind: str, place: str) -> None:
    """Functions, classes and members of enumerations are compared by identity, and hold state."""

    class Kept:
        by = 2.0

        def __new__(cls, *given: Any) -> Any:
            return given[0] * cls.by if given else super().__new__(cls)

    class Member(enum.Enum):
        A = 1

        def of_kept(self) -> float:
            return Kept.by

    reads: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "tuple": (((0, lambda: Kept.by),), lambda held: held[0][1]()),
        "set": (frozenset([lambda: Kept.by]), lambda held: next(iter(held))()),
        "key": ({lambda: Kept.by: 0}, lambda held: next(iter(held))()),
        "class": (Kept, lambda held: held.by),
        "class in a tuple": ((0, Kept), lambda held: held[1].by),
        "member": (Member.A, lambda held: held.by),
        "method of a member": (Member.A, lambda held: held.of_kept()),
        "object": ({(Kept(), 0): 0}, lambda held: next(iter(held))[0].by),
        "closure": (lambda: Kept.by, lambda held: held()),
        "default value": ((lambda kept=Kept: kept.by,), lambda held: held[0]()),
        "class that is called": (Kept, lambda held: held(1.0)),
    }
    Member.A.by = 2.0  # type: ignore[attr-defined]
    held, read = reads[kind]
    x = torch.ones(3)
    model: Any = torch.nn.Sequential(Holding(held, read))
    given: tuple[Any, ...] = (x,)
    if place == "argument":
        model, given = lambda x, held: x * read(held), (x, held)
    step = make(model)
    for value in (2.0, 3.0, 5.0):
        Kept.by = Member.A.by = value  # type: ignore[attr-defined]
        check(step, model, *given)
    if kind != "object" or place == "module":
        assert step.statistics().replays >= 6, step.explain()


class Hooking:
    """A hook with a state, which counts its calls if `counts`."""

    def __init__(self, counts: bool) -> None:
        self.scale, self.counts, self.calls = 2.0, counts, 0

    def __call__(self, module: Any, given: Any, out: Any) -> Any:
        if self.counts:
            self.calls += 1
        return out * self.scale + self.calls


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("of", ["a module", "a module inside", "all modules"])
@pytest.mark.parametrize("kind", ["closure", "module"])
def test_what_hooks_of_modules_use(make: Any, of: str, kind: str, counts: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
    theirs = copy.deepcopy(model)
    hooks = Hooking(counts), Hooking(counts)
    removed = []

    def run(module: Any, hook: Any, x: Any) -> Any:
        """Calls a module; a hook of all modules is there for this call alone."""
        if of != "all modules":
            return module(x)
        handle = torch.nn.modules.module.register_module_forward_hook(hook)
        try:
            return module(x)
        finally:
            handle.remove()

    for each, hook in zip((model, theirs), hooks, strict=True):
        if of != "all modules":
            removed.append((each[0] if "inside" in of else each).register_forward_hook(hook))
    step = make((lambda x: model(x)) if kind == "closure" else model)
    for number in range(12):
        x = torch.rand(2, 3)
        found = run(step, hooks[0], x)
        equal(found, run(theirs, hooks[1], x))
        assert hooks[0].calls == hooks[1].calls, number
        if number == 6:
            hooks[0].scale = hooks[1].scale = 5.0


def test_activations_that_a_hook_keeps(make: Any) -> None:
    """A graph's memory holds them only until a later node of the graph needs it."""
    model, kept = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()), {}
    model[0].register_forward_hook(lambda module, given, out: kept.update(out=out))
    step = make(lambda x: model(x))
    for _ in range(6):
        x = torch.rand(2, 3)
        step(x)
        equal(kept["out"], torch.nn.functional.linear(x, model[0].weight, model[0].bias))
    assert not step.statistics().replays, step.explain()


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_modules_whose_attributes_python_does_not_have(make: Any) -> None:
    model = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))
    steps = [make(model), make(lambda x: model(x)), make(model, guard=False)]
    for train in (True, False):
        model.train(train)
        for _ in range(4):
            x = torch.rand(4, 3)
            for step in steps[:2]:
                state = copy.deepcopy(model.state_dict())
                found = step(x)
                model.load_state_dict(state)
                equal(found, model(x))
    assert all("TorchScript" in step.explain() for step in steps[:2]), steps[0].explain()
    for _ in range(4):
        steps[2](x)
    assert steps[2].statistics().replays == 3


def test_a_graph_of_operations_that_is_compiled_again(make: Any) -> None:
    """`torch.fx` puts another `forward` into the class of the module."""
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
    model = lambda x: traced(x) * 2  # noqa: E731
    step, x = make(model), torch.ones(3)
    check(step, model, x)
    last = [node for node in traced.graph.nodes if node.op == "call_module"][-1]
    last.replace_all_uses_with(last.args[0])
    traced.graph.erase_node(last)
    traced.recompile()
    check(step, model, x)
    assert step.statistics().replays == 6, step.explain()


LEFT: dict[str, tuple[Callable[[], object], Callable[[], object], Callable[[], object]]] = {
    "the default type": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
        torch.get_default_dtype,
    ),
    "gradients": (
        lambda: torch.set_grad_enabled(True),
        lambda: torch.set_grad_enabled(False),
        torch.is_grad_enabled,
    ),
    "determinism": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
        torch.are_deterministic_algorithms_enabled,
    ),
    "the precision of products": (
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest"),
        torch.get_float32_matmul_precision,
    ),
}


@pytest.mark.parametrize("mode", LEFT)
def test_modes_that_a_function_leaves_as_it_sets_them(make: Any, mode: str) -> None:
    change, undo, read = LEFT[mode]

    def f(x: Any) -> Any:
        change()
        return x * 2

    step, x = make(f), torch.ones(3)
    try:
        for _ in range(6):
            undo()
            equal(step(x), x * 2)
            after = read()
            undo()
            f(x)
            assert after == read(), step.explain()
    finally:
        undo()


@pytest.mark.parametrize("size", [(3, 3), (2, 3)])
def test_a_weight_whose_shape_the_function_changes(make: Any, size: Any) -> None:
    """`t_` moves no memory."""
    mine, theirs = torch.rand(size), None
    theirs = mine.clone()

    def using(weight: Any) -> Any:
        def f(x: Any) -> Any:
            weight.t_()
            return weight.sum(0) * x

        return f

    step, function = make(using(mine)), using(theirs)
    for _ in range(6):
        wanted = function(torch.tensor(2.0))
        equal(step(torch.tensor(2.0)), wanted)
        assert mine.stride() == theirs.stride()


class Adapted(torch.nn.Module):  # type: ignore[misc]
    """As libraries of adapters do it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self._off, self._active = torch.nn.Linear(3, 3), False, ["a"]
        self.adapters = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in "ab"})

    @property
    def active(self) -> list[str]:
        return self._active

    def forward(self, x: Any) -> Any:
        y = self.base(x)
        return y if self._off else sum([self.adapters[name](x) for name in self.active], y)


ADAPTERS: dict[str, Callable[[Any], object]] = {
    "off": lambda layer: setattr(layer, "_off", True),
    "another": lambda layer: setattr(layer, "_active", ["b"]),
    "one more": lambda layer: layer._active.append("b"),
}


@pytest.mark.parametrize("change", ADAPTERS)
def test_adapters_that_are_switched(make: Any, change: str) -> None:
    model, x = torch.nn.Sequential(Adapted()), torch.ones(2, 3)
    step = make(model)
    check(step, model, x)
    before = model(x)
    ADAPTERS[change](model[0])
    assert not torch.equal(model(x), before)
    check(step, model, x)
    assert step.statistics().replays == 6, step.explain()


def test_a_forward_of_torch_that_is_replaced(make: Any, monkeypatch: Any) -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
    x, before = torch.ones(3), torch.nn.Linear.forward
    for step in (make(inner), make(lambda x: inner(x))):
        check(step, inner, x)
        monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: before(self, x) * 2)
        check(step, inner, x)
        monkeypatch.undo()
        check(step, inner, x)
        assert step.statistics().replays == 10 and step._hot, step.explain()


def test_attributes_of_the_graphed_function_itself(make: Any) -> None:
    def f(x: Any) -> Any:
        return x * step.scale

    step, x = make(f), torch.ones(3)
    for step.scale in (2.0, 3.0):
        check(step, f, x)
    assert step.statistics().replays == 6, step.explain()


def iterators() -> dict[str, Any]:
    numbers, waiting = [*range(1, 99)], queue.SimpleQueue[int]()
    for number in numbers:
        waiting.put(number)
    return {
        "a count": itertools.count(1),
        "a generator": (n for n in numbers),
        "of a list": iter(numbers),
        "of pairs": map(max, enumerate(numbers)),
        "of an array": np.array(numbers).flat,
        "of a deque": iter(collections.deque(numbers)),
        "of batches": iter(torch.utils.data.DataLoader(numbers, batch_size=None)),
        "a text": io.StringIO("\n".join(map(str, numbers))),
        "a queue": waiting,
    }


@pytest.mark.parametrize("which", iterators())
def test_iterators_that_a_function_goes_on_with(make: Any, which: str) -> None:
    mine = types.SimpleNamespace(held=iterators()[which])
    step = make(lambda x: x * int(mine.held.get() if which == "a queue" else next(mine.held)))
    for number in range(1, 6):
        equal(step(torch.ones(3)), torch.full((3,), float(number)))
    assert "mine.held is an iterator (" in step.explain()


def test_an_iterator_that_a_function_makes(make: Any) -> None:
    held = types.SimpleNamespace(left=None)

    def f(x: Any) -> Any:
        if held.left is None:
            held.left = iter([1.0, 2.0, 3.0, 4.0])
        return x * next(held.left)

    step = make(f)
    for number in range(1, 5):
        equal(step(torch.ones(3)), torch.full((3,), float(number)))


class Refusing:
    """It raises another error than AttributeError for what it has not."""

    def __init__(self) -> None:
        self.held = {"scale": 2.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["held"][name]


def test_an_object_that_raises_for_what_it_has_not(make: Any) -> None:
    model, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    model.settings = Refusing()
    check(make(model), model, x)


@pytest.mark.parametrize("kind", [np.ndarray, ctypes.c_int])
def test_an_object_that_says_that_it_is_of_another_class(make: Any, kind: type) -> None:
    class Proxy:
        __class__ = kind
        scale = 2.0

    held = Proxy()
    check(make(lambda x: x * held.scale), lambda x: x * 2.0, torch.ones(3))


class Alike(enum.Enum):
    """Members that are equal."""

    ONE, TWO = 1, 2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)

    def __hash__(self) -> int:
        return 1


class NoHash(enum.Enum):
    ONE, TWO = 1, 2

    def __eq__(self, other: object) -> bool:
        return self is other


class AllAlike(type):
    def __eq__(cls, other: object) -> bool:
        return True

    def __hash__(cls) -> int:
        return 1


class First(metaclass=AllAlike):
    value = 1


class Second(metaclass=AllAlike):
    value = 2


@pytest.mark.parametrize("kinds", [[*Alike], [*NoHash], [First, Second]])
def test_values_that_are_equal_and_not_the_same(make: Any, kinds: Any) -> None:
    step, x = make(lambda x, kind: x * kind.value), torch.ones(3)
    inside = make(lambda x: x * held[0].value)
    for kind in kinds:
        held = [kind]
        check(step, lambda x, kind: x * kind.value, x, kind)
        check(inside, lambda x, kind=kind: x * kind.value, x)
    assert step.statistics().replays == inside.statistics().replays == 6


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "does it learn": lambda x: x.requires_grad,
    "is it a weight": lambda x: isinstance(x, torch.nn.Parameter),
    "has it a gradient": lambda x: x.grad is not None,
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("learns", [True, False])
def test_what_a_function_asks_of_an_argument(make: Any, question: str, learns: bool) -> None:
    asked = QUESTIONS[question]
    step, plain = make(lambda x: x * (2 if asked(x) else 3)), torch.full((3,), 5.0)
    names = asked.__code__  # what a function reads of an argument is known of its own code alone
    if "grad" in names.co_names:
        step = make(lambda x: x * (2 if x.grad is not None else 3))
    weight = torch.nn.Parameter(plain.clone(), requires_grad=learns)
    given = plain.clone().requires_grad_(learns)
    if learns:
        weight.grad, given.grad = torch.ones(3), torch.ones(3)
    for x in (weight, given, plain):
        check(step, lambda x: x * (2 if asked(x) else 3), x)
    for x in (weight, given):
        check(make(lambda x: x.sub_(0.5) * 1), lambda x: x.detach() - 0.5, x, calls=3)


def test_gradients_that_an_argument_is_given(make: Any) -> None:
    def f(x: Any) -> Any:
        (x * x).sum().backward()
        return x.detach() * 1

    step, x = make(f), torch.ones(3, requires_grad=True)
    with torch.enable_grad():
        for calls in range(1, 5):
            step(x)
            equal(x.grad, torch.full((3,), 2.0 * calls))
    assert "of an argument the function makes a tensor with an attribute 'grad'" in step.explain()


def test_hooks_of_an_argument_change_its_gradients(make: Any) -> None:
    def f(x: Any) -> Any:
        return torch.autograd.grad((x * x).sum(), x)[0]

    step, hooked = make(f), make(f)
    with torch.enable_grad():
        x = torch.ones(3, requires_grad=True)
        check(step, f, x)
        x.register_hook(lambda gradient: gradient * 2)
        check(hooked, f, x)
    assert step.statistics().replays == 3 and "_backward_hooks" in hooked.explain()


def test_dynamic_sizes_of_what_learns(make: Any) -> None:
    def f(x: Any) -> Any:
        return x.detach() * (2 if x.requires_grad else 3)

    step = make(f, padding=Padding({"x": 0}, ost.PowersOfTwo(16)), verify="first")
    with torch.enable_grad():
        for n in (5, 6, 7, 8, 5, 6):
            x = torch.arange(float(n)).requires_grad_()
            equal(step(x), f(x))
    assert step.statistics().replays, step.explain()


def with_attribute(x: Any) -> Any:
    y = x * 2
    y.number = 5
    return y


RESULTS: dict[str, Callable[[Any], Any]] = {
    "an attribute": with_attribute,
    "learns": lambda x: (x * 2).requires_grad_(),
    "a weight": lambda x: torch.nn.Parameter(x * 2, requires_grad=False),
}


@pytest.mark.parametrize("which", RESULTS)
def test_results_that_a_copy_is_not_like(make: Any, which: str) -> None:
    f, weight = RESULTS[which], torch.nn.Parameter(torch.ones(3))
    weight.number = 5
    step, itself, x = make(f), make(lambda x: (x * 2, weight)), torch.ones(3)
    for _ in range(4):
        found, wanted = step(x), f(x)
        equal(found, wanted)
        assert type(found) is type(wanted) and vars(found) == vars(wanted)
        assert found.requires_grad == wanted.requires_grad
        assert itself(x)[1] is weight
    assert "of which a replay gives a copy" in step.explain()
    assert itself.statistics().replays == 3


def test_parametrized_weights_that_are_kept(make: Any) -> None:
    parametrize, model = torch.nn.utils.parametrize, torch.nn.Linear(3, 3)
    torch.nn.utils.parametrizations.weight_norm(model)
    step, x = make(model), torch.ones(2, 3)
    for _ in range(2):
        with parametrize.cached():
            check(step, model, x)
        model.parametrizations.weight.original0.mul_(2)
        check(step, model, x)
    assert "parametrize.cached" in step.explain() and step.statistics().replays == 7


def test_threads_and_hooks(make: Any) -> None:
    model = torch.nn.Linear(3, 3)
    step, wrong = make(model), []
    model.register_forward_hook(lambda m, args, out: out + 1)

    def work(number: int) -> None:
        with torch.no_grad():
            for call in range(20):
                x = torch.full((2, 3), float(call + number))
                wanted = torch.nn.functional.linear(x, model.weight, model.bias) + 1
                if not torch.equal(step(x), wanted):
                    wrong.append((number, call))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert not wrong


def test_static_results_as_the_next_arguments(make: Any) -> None:
    def f(x: Any, y: Any) -> Any:
        return y, x, x[:2], x + y

    step = make(f, results="static")
    mine = theirs = torch.arange(3.0), torch.ones(3)
    for _ in range(5):
        found, wanted = step(*mine), f(*theirs)
        equal(found, wanted)
        mine, theirs = found[:2], wanted[:2]
    assert step.statistics().replays == 4


@pytest.mark.parametrize("verify", ["off", 3])
def test_a_static_result_that_the_next_call_writes(make: Any, verify: Any) -> None:
    def f(x: Any) -> Any:
        return x.add_(1) * 2

    step = make(f, results="static", verify=verify)
    mine, theirs = torch.arange(3.0), torch.arange(3.0)
    for _ in range(5):
        mine, theirs = step(mine), f(theirs)
        equal(mine, theirs)
    assert step.statistics().replays == 4 and not step.statistics().quarantined


def test_sizes_are_sizes(make: Any) -> None:
    """torch's registry makes plain tuples of them."""

    def f(x: Any, size: Any) -> Any:
        return x.view(size) * (2 if isinstance(size, torch.Size) else 3), x.shape

    step = make(f)
    for _ in range(4):
        found, shape = step(torch.ones(6), torch.Size([2, 3]))
        equal(found, torch.full((2, 3), 2.0))
        assert shape.numel() == 6
    assert step.statistics().replays == 3


def test_containers_that_the_registry_makes_of_another_class(make: Any) -> None:
    class Pair(list):  # type: ignore[type-arg]
        pass

    pytree = torch.utils._pytree
    pytree.register_pytree_node(Pair, lambda p: ([*p], None), lambda items, _: [*items])
    step = make(lambda x: Pair([x, x * 2]))
    try:
        assert [type(step(BASE[:3])) for _ in range(3)] == [Pair] * 3
    finally:
        pytree._deregister_pytree_node(Pair)
    assert "another class" in step.explain()


def test_views_whose_shapes_are_changed_in_place(make: Any) -> None:
    weight = torch.arange(3.0)
    step = make(lambda x: (x * 2, weight.view(1, 3), weight))
    for _ in range(6):
        copied, view, same = step(torch.ones(2))
        assert copied.shape == (2,) and view.shape == (1, 3) and same is weight
        view.unsqueeze_(0).add_(1)
        copied.unsqueeze_(0)
    equal(weight, torch.arange(3.0) + 6)


def test_attributes_of_tensors(make: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad, weight.scale, weight.unused = torch.ones(3), 2.0, 3.0

    def by_grad(x: Any) -> Any:
        return x * weight.grad

    def by_scale(x: Any) -> Any:
        return x * weight * weight.scale

    def by_neither(x: Any) -> Any:
        return x * weight * getattr(x, "by", 1.0)

    for function, name in ((by_grad, "grad"), (by_scale, "scale"), (by_neither, "by")):
        step, x = make(function), torch.ones(2, 3)
        if name == "by":
            x.by = 5.0
        check(step, function, x)
        weight.grad, weight.scale = weight.grad * 2, weight.scale * 2
        check(step, function, x)
        why = "a gradient is another one" if name == "grad" else f"an attribute {name!r}"
        assert why in step.explain()
    step = make(by_neither)
    check(step, by_neither, torch.ones(2, 3))
    assert step.statistics().replays == 3


class Box:
    """A container of torch's registry."""

    def __init__(self, value: Any, by: Any) -> None:
        self.value, self.by = value, by


def registered(context: Callable[[Box], Any], by: Callable[[Any], Any]) -> type[Box]:
    kind = type("Box", (Box,), {})
    torch.utils._pytree.register_pytree_node(
        kind,
        lambda box: ([box.value], context(box)),
        lambda children, context: kind(*children, by(context)),
        serialized_type_name=f"Box{next(NUMBERS)}",
    )
    return kind


def first(context: Any) -> Any:
    return context[0]


CONTEXTS: dict[str, tuple[Callable[[Box], Any], Callable[[Any], Any], list[Any]]] = {
    "numbers": (lambda box: (box.by,), first, [1, 1.0, True, 0.0, -0.0]),
    "no hash": (lambda box: [box.by], first, [1, 1.0, True]),
    "large arrays": (
        lambda box: [box.by],
        first,
        [np.full(4000, 1.0), np.array([1.0] * 2000 + [2.0] * 2000)],
    ),
    "a dict": (lambda box: {"by": [box.by]}, lambda c: c["by"][0], [1, 1.0, 2]),
    "nothing": (lambda box: None, lambda c: 7, [1, 1.0, 2]),
    "an array": (lambda box: np.array([box.by]), lambda c: c.item(), [1, 1.0, 2]),
}


@pytest.mark.parametrize("which", CONTEXTS)
def test_containers_that_are_equal_and_do_not_do_the_same(make: Any, which: str) -> None:
    context, by, values = CONTEXTS[which]
    kind = registered(context, by)

    def f(box: Any) -> Any:
        number = box.by if isinstance(box.by, int | float) else float(box.by[2500])
        return kind(box.value * number, box.by), 1 / (box.value * number)

    step, x = make(f), torch.ones(3, dtype=torch.int32)
    for value in values:
        for _ in range(4):
            box, rest = f(kind(x, value))
            found, other = step(kind(x, value))
            equal((found.value, other), (box.value, rest))
            assert type(found) is kind and type(found.by) is type(value)
            assert found.by is value or found.by == value


def test_attributes_that_were_added_to_containers(make: Any) -> None:
    utils = pytest.importorskip("transformers.utils")

    @dataclasses.dataclass
    class Encoded(utils.ModelOutput):  # type: ignore[misc, name-defined]
        last: Any = None
        rest: Any = None

    def f(given: Any) -> Any:
        made = Encoded(last=given.last * getattr(given, "by", 1.0))
        made.note = given.note
        if given.note == "an object":
            made.held = held
        return made

    step, given, held = make(f), Encoded(last=torch.ones(3)), object()
    for note, by in (("a", 1.0), ("a", 2.0), ("b", 2.0), ("an object", 3.0)):
        given.note, given.by = note, by
        for _ in range(4):
            found, wanted = step(given), f(given)
            equal(found.last, wanted.last)
            assert found["last"] is found.last and found.rest is None
            assert type(found) is Encoded and [*found] == [*wanted] == ["last"]
            assert found.note == note and getattr(found, "held", 0) is getattr(wanted, "held", 0)
    assert step.statistics().replays == 9 and "cannot be built again" in step.explain()


def test_methods_that_are_met_late_change_nothing(make: Any) -> None:
    """What they name is looked for at once in all that was met before."""

    class First:
        def __init__(self) -> None:
            self.config = types.SimpleNamespace(by=2.0)

    held = [First(), types.SimpleNamespace()]

    def f(x: Any, n: int) -> Any:
        return x * getattr(held[0], "config").by * held[1](x)  # noqa: B009

    def called(name: str) -> Any:
        code = f"class Late:\n def __call__(self, x): return x + (self.{name} is None)"
        space: dict[str, Any] = {}
        exec(code, space)
        made = space["Late"]()
        setattr(made, name, None)
        return made

    step, x = make(f), torch.ones(3)
    for n in range(4):
        held[1] = called(f"{'config' if n == 2 else 'late'}{n if n != 2 else ''}")
        for _ in range(3):
            equal(step(x, n), f(x, n))
    assert step.statistics().replays == 8, step.explain()


def test_a_list_in_itself_runs_eagerly(make: Any) -> None:
    def f(given: Any) -> Any:
        return given[0] * 2

    step, given = make(f), [torch.ones(3)]
    given.append(given)
    check(step, f, given)
    assert "recursion" in step.explain()


def test_a_graphed_module_is_not_copied(make: Any) -> None:
    step = make(torch.nn.Linear(2, 2))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="graphed f can be neither copied nor pickled"):
            copied(step)
    assert copy.deepcopy(step.module) is not step.module


# ---------------------------------------------------------------- optimisers, schedulers, scalers


class Training:
    """A model that learns, in all the ways in which a function may hold its optimiser."""

    def __init__(self, kind: str, hold: str = "closure", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 3)
        kinds = {"momentum": {"momentum": 0.9, "weight_decay": 0.01}, "plain": {}}
        given = {"lr": 0.01, **kinds[kind], **options}
        groups = [{"params": [self.model.weight]}, {"params": [self.model.bias], "lr": 0.02}]
        self.optimizer = torch.optim.SGD(groups, **given)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        model, optimizer, take = self.model, self.optimizer, self.optimizer.step
        parameters = [*model.parameters()]

        def learned(x: Any, step: Any) -> Any:
            for parameter in parameters:
                parameter.grad = None
            loss = model(x).square().sum()
            loss.backward()
            step()
            return loss.detach()

        class Wrapped:
            def __init__(self, inner: Any) -> None:
                self.inner = inner

            def step(self) -> None:
                self.inner.step()

        wrapped = Wrapped(optimizer)
        self.step: Any = {
            "closure": lambda x: learned(x, optimizer.step),
            "bound method": lambda x: learned(x, take),
            "wrapper": lambda x: learned(x, wrapped.step),
            "attribute": self.of_self,
            "a partial": functools.partial(lambda step, x: learned(x, step), take),
        }[hold]
        self.learned = learned

    def of_self(self, x: Any) -> Any:
        return self.learned(x, self.optimizer.step)

    def parameters(self) -> list[Any]:
        """All that a step changes."""
        parameters = [*self.model.parameters()]
        given = [p.grad for p in parameters if p.grad is not None]
        return [*parameters, *given, *[[*one.values()] for one in self.optimizer.state.values()]]


HOLDS = ["closure", "bound method", "wrapper", "attribute", "a partial"]


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("kind", ["plain", "momentum"])
def test_a_learning_rate_that_a_scheduler_changes(make: Any, kind: str, hold: str) -> None:
    mine, theirs = Training(kind, hold), Training(kind, hold)
    step = make(mine.step, gradients="eager")
    with torch.enable_grad():
        for number in range(20):
            x = torch.full((2, 3), number % 3 + 1.0)
            equal(step(x), theirs.step(x))
            equal(mine.parameters(), theirs.parameters())
            if number % 5 == 4:
                mine.schedule.step()
                theirs.schedule.step()
    assert step.statistics().captures == 4 and step.statistics().replays >= 14, step.explain()


CHANGES_OF_OPTIMISERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda t: t.optimizer.param_groups[0].update(momentum=0.5),
    "weight_decay": lambda t: t.optimizer.param_groups[1].update(weight_decay=0.3),
    "nesterov": lambda t: t.optimizer.param_groups[0].update(nesterov=True),
    "maximize": lambda t: t.optimizer.param_groups[0].update(maximize=True),
    "a state tensor": lambda t: t.optimizer.state[t.model.weight].update(
        momentum_buffer=torch.ones(3, 3)
    ),
    "no state": lambda t: t.optimizer.state.clear(),
    "a loaded state": lambda t: t.optimizer.load_state_dict(
        Training("momentum").optimizer.state_dict()
    ),
    "fewer parameters": lambda t: t.optimizer.param_groups[1]["params"].clear(),
    "no group": lambda t: t.optimizer.param_groups.pop(),
    "a hook": lambda t: t.optimizer.register_step_pre_hook(
        lambda *_: t.optimizer.param_groups[0].update(lr=0.001)
    ),
}


@pytest.mark.parametrize("change", CHANGES_OF_OPTIMISERS)
@pytest.mark.parametrize("hold", ["closure", "attribute"])
def test_changes_of_an_optimiser(make: Any, change: str, hold: str) -> None:
    mine, theirs = Training("momentum", hold), Training("momentum", hold)
    step = make(mine.step, gradients="eager")
    with torch.enable_grad():
        for number in range(12):
            x = torch.full((2, 3), number % 3 + 1.0)
            equal(step(x), theirs.step(x))
            equal(mine.parameters(), theirs.parameters())
            if number == 5:
                assert step.statistics().replays == 4, step.explain()
                for each in (mine, theirs):
                    CHANGES_OF_OPTIMISERS[change](each)
    assert step.statistics().replays >= 6 and not step.statistics().quarantined, step.explain()


def test_a_learning_rate_that_is_another_one_at_each_step(make: Any) -> None:
    mine, theirs = Training("momentum"), Training("momentum")
    step = make(mine.step, gradients="eager")
    x = torch.ones(2, 3)
    with torch.enable_grad():
        for _ in range(60):
            equal(step(x), theirs.step(x))
            equal(mine.parameters(), theirs.parameters())
            for each in (mine, theirs):
                for group in each.optimizer.param_groups:
                    group["lr"] *= 0.99
        line = step.statistics().keys[-1]
        assert len(step.statistics().keys) == 2 and step.statistics().captures == 0
        assert "optimizer.param_groups[0]['lr']=…" in line.words, step.explain()
        assert (
            "give it as an array" in line.reason
            and "test_graphed_torch_footguns.py:" in line.reason
        )
        for _ in range(6):  # no change any more
            equal(step(x), theirs.step(x))
    assert step.statistics().replays == 4, step.explain()


def test_an_averaged_model(make: Any) -> None:
    """It reads whether it was updated before, which no graph can."""

    def training() -> Any:
        made = Training("momentum")
        optimizer, learned, model = made.optimizer, made.learned, made.model
        average = torch.optim.swa_utils.AveragedModel(model)

        def f(x: Any) -> Any:
            loss = learned(x, optimizer.step)
            average.update_parameters(model)
            return loss

        return made, average, f

    (mine, average, f), (theirs, other, g) = training(), training()
    step = make(f, gradients="eager")
    with torch.enable_grad():
        for _ in range(8):
            equal(step(torch.ones(2, 3)), g(torch.ones(2, 3)))
            equal(mine.parameters(), theirs.parameters())
            equal(average.state_dict(), other.state_dict())
    assert step.statistics().captures == 0 and step.statistics().quarantined, step.explain()


def test_a_seed_that_the_function_gives(make: Any) -> None:
    def f(x: Any) -> Any:
        torch.manual_seed(5)
        return x + torch.rand(3)

    step = make(f)
    torch.manual_seed(1)
    for _ in range(4):
        equal(step(torch.ones(3)), f(torch.ones(3)))
        torch.manual_seed(1)
    line = f.__code__.co_firstlineno + 1
    assert step.statistics().captures == 0 and f"cpu at {__file__}:{line})" in step.explain()


def test_numbers_that_the_function_draws_on_the_cpu(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.interop.tape import OnCpu

    monkeypatch.setattr(OnCpu, "_of_host", (torch.default_generator,))

    def f(x: Any) -> Any:
        return x * 2 if float(torch.rand(())) < 0.5 else x  # it skips what it does, now and then

    step = make(f)
    torch.manual_seed(0)
    wanted = [f(torch.ones(3)) for _ in range(20)]
    torch.manual_seed(0)
    equal([step(torch.ones(3)) for _ in range(20)], wanted)
    assert step.statistics().captures == 0 and "generator of the CPU" in step.explain()


def gradients_in(way: str) -> tuple[Any, Any, Callable[[Any, int], None]]:
    """A model, a function that gives it gradients, and what is done around each call."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def inside(x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    def outside(x: Any) -> Any:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    def around(x: Any, number: int) -> None:
        if way != "zeroed inside" and number % (3 if "added" in way else 1) == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none="kept" not in way)
        elif way == "zeroed inside":
            optimizer.step()

    return model, inside if way == "zeroed inside" else outside, around


@pytest.mark.parametrize(
    "way", ["zeroed inside", "zeroed outside", "zeroed outside, kept", "added to", "added to, kept"]
)
@pytest.mark.parametrize("shapes", [1, 2])
@pytest.mark.parametrize("verify", ["off", 3])
def test_gradients_that_the_function_gives(make: Any, way: str, shapes: int, verify: Any) -> None:
    """They are those of the last call, also for who reads them outside."""
    (mine, f, around), (theirs, g, around_theirs) = gradients_in(way), gradients_in(way)
    step = make(f, gradients="eager", verify=verify)
    with torch.enable_grad():
        for number in range(30):
            x = torch.full((2 + number // 2 % shapes, 3), number % 3 + 1.0)
            equal(step(x), g(x))
            equal([p.grad for p in mine.parameters()], [p.grad for p in theirs.parameters()])
            around(x, number)
            around_theirs(x, number)
            equal([*mine.parameters()], [*theirs.parameters()])
    if way != "added to":
        assert step.statistics().replays >= 12, step.explain()


def test_gradients_and_sizes_that_change(make: Any) -> None:
    """After the capture an eager run learns where the size shows in the results."""

    def using(weight: Any) -> Any:
        def f(x: Any) -> Any:
            y = x @ weight
            (y.square().sum() + weight.square().sum()).backward()
            return y.detach()

        return f

    mine, theirs = (torch.nn.Parameter(torch.eye(3)) for _ in range(2))
    step = make(
        using(mine),
        gradients="eager",
        padding=Padding({"x": 0}, ost.PowersOfTwo(8)),
        fill={"x": 0.0},
    )
    with torch.enable_grad():
        for size in (8, 7, 8, 5, 6, 7, 5, 6):
            equal(step(torch.ones(size, 3)), using(theirs)(torch.ones(size, 3)))
            equal(mine.grad, theirs.grad)
            mine.grad = theirs.grad = None
    assert step.statistics().replays >= 4, step.explain()


def test_numbers_that_others_draw_on_the_cpu_meanwhile(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.interop.tape import OnCpu

    monkeypatch.setattr(OnCpu, "_of_host", (torch.default_generator,))
    run_beside = OnCpu.run_beside

    def disturbed(self: Any, work: Any) -> Any:
        torch.rand(3)  # another thread's
        return run_beside(self, work)

    monkeypatch.setattr(OnCpu, "run_beside", disturbed)
    step = make(lambda x: x * 2)
    check(step, lambda x: x * 2, torch.ones(3))
    assert step.statistics().replays == 3, step.explain()


def test_a_check_compares_the_gradients_that_the_function_gives(make: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(3))

    def f(x: Any) -> Any:
        weight.grad = None
        ((socket.getdefaulttimeout() or 1.0) * (weight * x).sum()).backward()
        return x + 1

    step = make(f, gradients="eager", verify=2)
    with torch.enable_grad():
        for _ in range(3):
            step(torch.ones(3))
        socket.setdefaulttimeout(2.0)  # a number in C, which no guard reads
        try:
            for _ in range(4):
                step(torch.ones(3))
        finally:
            socket.setdefaulttimeout(None)
    assert "gradient" in str(step.statistics().quarantined), step.explain()
    equal(weight.grad, torch.full((3,), 2.0))


def test_a_check_leaves_the_arguments_alone(make: Any) -> None:
    """What autograd has saved of them can still be used."""
    step, x = make(lambda x: x * 2, verify=1), torch.ones(3)
    for _ in range(3):
        with torch.enable_grad():
            weight = torch.nn.Parameter(torch.ones(3))
            outside = (weight * x).sum()
        equal(step(x), x * 2)
        with torch.enable_grad():
            outside.backward()
        equal(weight.grad, x)
    assert step.statistics().verified == 2


def test_a_check_whose_replay_raises_changes_nothing(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = torch.zeros(3)

    def f(x: Any) -> Any:
        total.add_(x)
        return x * 2

    step = make(f, verify=1)
    for _ in range(3):
        step(torch.ones(3))
    clone, calls = step._library.clone, iter(range(100))

    def fails(array: Any) -> Any:
        if next(calls) == 2:  # of the result, after the replay
            raise RuntimeError("no clone")
        return clone(array)

    monkeypatch.setattr(step._library, "clone", fails)
    before = total.clone()
    with pytest.raises(RuntimeError, match="no clone"):
        step(torch.ones(3))
    equal(total, before)
