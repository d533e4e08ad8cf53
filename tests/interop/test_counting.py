"""The numbers of an optimiser's step: how they are computed, and where kernels have them."""

from __future__ import annotations

import copy
import math
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.driver.api import KernelArguments, ParameterSlot
from ostinato.interop.torch.counting import CapturedStep, KernelNumbers, countable, tensors_in

Change = Callable[[Any, Any, float, Any], None]


class Counting(torch.optim.Optimizer):  # type: ignore[misc]  # torch has no type for it
    """An optimiser whose step does `change` with itself, a parameter, the rate, and the state."""

    def __init__(self, parameters: Any, change: Change) -> None:
        super().__init__(parameters, {"lr": 0.5, "scales": (0.25, 0.75)})
        self.change = change

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("step", torch.tensor(0.0)).add_(1)
                self.change(self, p, group["lr"], state)


def _get_value(count: Any) -> Any:
    """As optimisers of torch read a count."""
    return count.item()


def step_of(optimizer: Any) -> CapturedStep:
    """Counts are the tensors without axes."""
    return CapturedStep(optimizer, optimizer.step, "a line", lambda t: t.dim() > 0, lambda: None)


def made(make: Callable[[Any], Any], steps: int = 4) -> Any:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(3)]
    optimizer = make(parameters)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(3)
        optimizer.step()
    return optimizer


class Compared(TorchDispatchMode):  # type: ignore[misc]  # torch has no type for it
    """Compares the operations of a step with those that are expected."""

    def __init__(self, learned: CapturedStep) -> None:
        super().__init__()
        self.learned = learned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.learned.of_host(tensors_in((args, kwargs))):
            self.learned.numbers(func, args, kwargs or {})  # raises for other numbers
        return func(*args, **(kwargs or {}))


def scaled(optimizer: Any, p: Any, rate: float, state: Any) -> None:
    count = _get_value(state["step"])
    p.add_(p.grad, alpha=-rate / (1 - 0.5**count)).mul_(1.0 + 0.125)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("AdamW", {}),
        ("Adam", {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("RMSprop", {"momentum": 0.5, "centered": True}),
        ("Adagrad", {"lr_decay": 0.1}),
        ("Adamax", {}),
    ],
)
def test_each_step_passes_on_the_numbers(kind: str, settings: Any, foreach: bool) -> None:
    """The expressions give, for other rates and later counts, what the step passes on then."""
    optimizer = made(lambda p: getattr(torch.optim, kind)(p, foreach=foreach, **settings))
    before = copy.deepcopy(optimizer.state_dict())
    learned = step_of(optimizer)
    assert str(before) == str(optimizer.state_dict()), "the dry runs leave nothing behind"
    for group in optimizer.param_groups:
        group["lr"] *= 0.75
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] += 3
    learned._now = [count + 3 for count in learned._now]
    with Compared(learned):
        optimizer.step()
    learned.finished()


def by_root(optimizer: Any, p: Any, rate: float, state: Any) -> None:
    p.add_(p.grad, alpha=math.sqrt(rate))


def by_size(optimizer: Any, p: Any, rate: float, state: Any) -> None:
    p.add_(p.grad, alpha=rate if rate < 0.6 else 1.0)


def by_tensor(optimizer: Any, p: Any, rate: float, state: Any) -> None:
    p.copy_(torch.where(p > 0, p, torch.tensor(rate)))


def by_attribute(optimizer: Any, p: Any, rate: float, state: Any) -> None:
    optimizer.count = getattr(optimizer, "count", 0) + 1
    p.add_(p.grad, alpha=rate)


def by_state(optimizer: Any, p: Any, rate: float, state: Any) -> None:
    state["last"] = p + 1


def by_two(optimizer: Any, p: Any, rate: float, state: Any) -> None:
    state["step"].add_(1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (by_root, "how a number of"),
        (by_size, "decides"),
        (by_tensor, "a number in a tensor"),
        (by_attribute, "attributes"),
        (by_state, "state"),
        (by_two, "count one step"),
    ],
)
def test_a_step_that_does_more_is_refused(change: Change, why: str) -> None:
    optimizer = made(lambda p: Counting(p, change))
    before = str(optimizer.state_dict())
    with pytest.raises(Exception, match=why):
        step_of(optimizer)
    assert str(optimizer.state_dict()) == before


def test_a_count_is_read_by_its_name() -> None:
    numbers = step_of(made(lambda p: Counting(p, scaled)))
    assert numbers._code([{"lr": 0.25}], [3.0]) == (-0.25 / (1 - 0.5**3.0),)


def test_which_optimisers_count() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert countable(torch.optim.AdamW(parameters))
    assert not countable(torch.optim.AdamW(parameters, capturable=True))
    assert not countable(torch.optim.AdamW(parameters, lr=torch.tensor(0.1)))
    assert not countable(Counting(parameters, scaled)), "it may count elsewhere"


# ------------------------------------------------------------------------- arguments of kernels
def kernel(*arguments: bytes) -> Any:
    slots, at = [], 0
    for each in arguments:
        slots.append(ParameterSlot(at, len(each)))
        at += len(each)
    return SimpleNamespace(arguments=KernelArguments(b"".join(arguments), tuple(slots)))


def floats(*values: float) -> bytes:
    return struct.pack(f"{len(values)}f", *values)


SMALL = bytes(range(1, 97))
ADDRESSES = bytes(1536)
"""The addresses and sizes of a list of tensors, as a kernel gets them."""


@pytest.mark.parametrize("length", [1536, 10752])
def test_numbers_are_in_the_table_of_a_list(length: int) -> None:
    """A tensor that two launches share has its number in both; what else is there is old."""
    nodes = [
        kernel(floats(0.5) + bytes(length - 4) + floats(0.3, 0.5, 9.0)),
        kernel(bytes(length) + floats(0.5, 0.7) + SMALL + floats(0.3)),
    ]
    found = KernelNumbers(nodes, [0.3, 0.5, 0.7], wide=False)._found
    assert [(at, which) for _, _, at, which in found] == [(length, [0, 1]), (length, [1, 2])]


@pytest.mark.parametrize(
    ("nodes", "wide", "places"),
    [
        ([kernel(SMALL, floats(0.3)), kernel(SMALL, floats(7, 0.3))], False, [(1, 0), (1, 4)]),
        ([kernel(ADDRESSES + floats(0.3, 0.5), b"?")], False, [(0, 1536)]),
        ([kernel(struct.pack("d", 0.3))], True, [(0, 0)]),
    ],
)
def test_where_one_number_is(nodes: Any, wide: bool, places: Any) -> None:
    found = KernelNumbers(nodes, [0.3], wide=wide)._found
    assert [each[1:] for each in found] == [(*place, [0]) for place in places]


@pytest.mark.parametrize(
    ("nodes", "values"),
    [
        ([], [0.3]),
        ([kernel(SMALL, floats(0.5))], [0.3]),
        ([kernel(SMALL, floats(0.3)), kernel(SMALL, floats(0.5))], [0.3]),
        ([kernel(SMALL, floats(0.3), floats(0.3))], [0.3]),
        ([kernel(floats(0.0), floats(0.0, 1.0))], [0.0]),
        ([kernel(ADDRESSES + floats(0.7, 0.3, 0.5))], [0.3, 0.5]),
        ([kernel(ADDRESSES + floats(0.3))], [0.3, 0.5]),
        ([SimpleNamespace(memset=1)], [0.3]),
    ],
)
def test_numbers_that_are_not_found_for_certain(nodes: Any, values: Any) -> None:
    with pytest.raises(ValueError):
        KernelNumbers(nodes, values, wide=False)
