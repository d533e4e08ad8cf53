"""Chains of torch's operations, on the CPU, with captures that are tapes (`tape.py`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from ostinato.device import Device
from ostinato.interop import graphed as door

torch = pytest.importorskip("torch")

from tests.interop.tape import on_tape  # needs torch


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains are kept, however long they take."""
    monkeypatch.setattr(door, "_GAIN", float("inf"))


def _assertion(x: Any) -> Any:
    assert x.abs().max() < 100, "too large"
    return x * 2


def _mask(x: Any) -> Any:
    return x[x > 0].sum() + x


def _mask_written(x: Any) -> Any:
    y = x.clone()
    y[y > 0] = y[y > 0] * 3
    return y


def _equal(x: Any) -> Any:
    return x + 1 if torch.equal(x, x.round()) else x - 1


def _length(x: Any) -> Any:
    return x[: int(x.abs().sum().item()) % 3].sum()


def _inverse(x: Any) -> Any:
    return torch.linalg.inv(torch.eye(4) * 3 + x.abs().sum() * 0) @ x


def _singular(x: Any) -> Any:
    try:
        return torch.linalg.inv(torch.zeros(4, 4) * x.sum())
    except RuntimeError:
        return x * 5


def _eigen(x: Any) -> Any:
    return torch.linalg.eigh(torch.outer(x, x) + torch.eye(4)).eigenvalues


def _validated(x: Any) -> Any:
    return torch.distributions.Categorical(logits=x).log_prob(torch.zeros((), dtype=torch.long))


def _written(x: Any) -> Any:
    x.add_(1)
    if x.sum() > 10:
        x.mul_(2)
    return x.sum()


def _view(x: Any) -> Any:
    y = x.view(2, 2)
    y.t_()
    if bool((y > 0).all()):
        y.add_(1)
    return y * 2


def _list(x: Any) -> Any:
    return x * len([v for v in x.round().tolist() if v > 0])


def _nothing(x: Any) -> Any:
    return x[(x > 1000)].sum() + x


@pytest.mark.parametrize(
    "function",
    [
        *(_assertion, _mask, _mask_written, _equal, _length, _inverse, _singular, _eigen),
        *(_validated, _written, _view, _nothing),
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_functions_that_wait_are_replayed_and_right(
    function: Callable[..., Any], mode: Any, host_device: Device
) -> None:
    step = on_tape(host_device, function, chains=True)
    draw = random.Random(1)
    pool = [[1.0, 2.0, 3.0, 4.0], [-1.0, 0.5, 2.0, -3.0], [9.0, 8.0, 7.0, 6.0]]
    with mode():
        for _ in range(30):
            values = draw.choice(pool)
            x, other = torch.tensor(values), torch.tensor(values)
            found, expected = step(x), function(other)
            assert torch.equal(found, expected), values
            assert torch.equal(x, other)
    assert step.statistics().replays > 5, step.explain()
    step.close()


def test_an_operation_that_waits_unforeseen_runs_once_and_is_learned(host_device: Device) -> None:
    total = torch.zeros(4)

    def function(x: Any) -> Any:
        y = x * 2
        total.add_(y)  # written once, though the capture breaks below
        return _eigen(y) + total.sum()

    step, theirs = on_tape(host_device, function, chains=True), torch.zeros(4)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with torch.no_grad():
        for _ in range(14):
            theirs += x * 2
            assert torch.equal(step(x), _eigen(x * 2) + theirs.sum())
            assert torch.equal(total, theirs)
    assert step.statistics().replays > 0, step.explain()
    step.close()


def test_modules_with_buffers_that_are_written_before_a_wait(host_device: Device) -> None:
    class Counting(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            y = self.norm(x)
            self.seen += 1
            if y.max() > 1.4:
                self.seen += 10
            return y

    torch.manual_seed(0)
    ours, theirs = Counting(), Counting()
    step = on_tape(host_device, ours, chains=True)
    inputs = [torch.randn(8, 4) for _ in range(3)]
    draw = random.Random(2)
    with torch.no_grad():
        for _ in range(40):
            x = draw.choice(inputs)
            assert torch.equal(step(x), theirs(x))
            assert torch.equal(ours.seen, theirs.seen)
            assert torch.equal(ours.norm.running_mean, theirs.norm.running_mean)
    step.close()


def test_a_call_whose_part_was_held_too_long_is_cut_without_a_wait(
    host_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostinato.interop.torch import waits

    monkeypatch.setattr(waits, "MOST_HELD", 64)

    def function(x: Any) -> Any:
        for _ in range(12):
            x = x * 1.5 + 1
        return x if x.sum() > 0 else -x

    step = on_tape(host_device, function, chains=True)
    x = torch.tensor([1.0, -2.0, 3.0, 4.0])
    with torch.no_grad():
        for _ in range(10):
            assert torch.equal(step(x), function(x))
    assert step.statistics().replays > 0
    step.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_functions_of_torch_are_as_eager_calls(seed: int, host_device: Device) -> None:
    """Writes, views, masks, waits, branches, loops and exceptions."""
    draw = random.Random(seed)

    class Stop(Exception):
        pass

    def program(depth: int = 0) -> list[Any]:
        steps: list[Any] = []
        for _ in range(draw.randint(1, 4)):
            kind = draw.choice(
                [
                    *("add", "write", "state", "wait", "mask", "masked", "view", "eigen", "equal"),
                    *("branch", "loop", "raise"),
                ]
            )
            if kind in ("branch", "loop", "raise") and depth > 1:
                kind = "add"
            inner = [program(depth + 1), program(depth + 1)] if kind in ("branch", "loop") else []
            steps.append((kind, draw.randint(0, 3), inner))
        return steps

    def run(steps: list[Any], x: Any, y: Any, state: Any) -> Any:
        for kind, number, inner in steps:
            if kind == "add":
                y = y + number
            elif kind == "write":
                x.add_(number)
            elif kind == "state":
                state.add_(number)
            elif kind == "wait":
                y = y * float(x.sum().item())
            elif kind == "mask":
                y = y + y[y > number].sum()
            elif kind == "masked":
                y = y.clone()
                y[y > number] = number
            elif kind == "view":
                y = y.view(2, 2).t().reshape(4)
            elif kind == "eigen":
                y = y + torch.linalg.eigh(torch.eye(4) * (number + 1)).eigenvalues * x.sum()
            elif kind == "equal" and torch.equal(x, y):
                y = y - 1
            elif kind == "branch":
                y = run(inner[bool(x.sum() > 3 * number)], x, y, state)
            elif kind == "loop":
                for _ in range(int(x.sum().item()) % 3):
                    y = run(inner[0], x, y, state)
            elif kind == "raise" and x.sum() > 12:
                raise Stop
        return y

    for _ in range(12):
        steps = program()
        state, theirs = torch.zeros(2), torch.zeros(2)

        def function(x: Any, steps: Any = steps, state: Any = state) -> Any:
            return run(steps, x, x * 1, state)

        step = on_tape(host_device, function, chains=True)
        with torch.no_grad():
            for _ in range(20):
                values = draw.choice([[0.0, 1, 2, 3], [1.0, 1, 1, 1], [3.0, 4, 0, -2]])
                x, other = torch.tensor(values), torch.tensor(values)
                try:
                    expected = run(steps, other, other * 1, theirs)
                except Stop:
                    with pytest.raises(Stop):
                        step(x)
                else:
                    found = step(x)
                    assert torch.equal(found.nan_to_num(), expected.nan_to_num()), steps
                assert torch.equal(x, other), steps
                assert torch.equal(state, theirs), steps
        step.close()
