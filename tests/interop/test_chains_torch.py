"""Chains of torch's operations: on the CPU with captures that are tapes (`tape.py`), and on a GPU.

Each call has the answer and the effects of an eager call."""

from __future__ import annotations

import gc
import logging
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ostinato.device import Device
from ostinato.interop.reading.chains import as_value
from tests.conftest import DRIVERS, shuffled_device
from tests.processes import child_environment

torch: Any = pytest.importorskip("torch")

from benchmarks.torch_waits import works_on
from tests.interop.tape import OnCpu  # needs torch

device = pytest.fixture(params=DRIVERS)(shuffled_device)
Make = Callable[..., Any]
_leaves: Any = torch.utils._pytree.tree_leaves


@pytest.fixture
def make(make_chained: Make) -> Make:
    return make_chained


def same(one: Any, other: Any) -> bool:
    return bool(one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num()))


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
    return torch.linalg.inv(torch.eye(4, device=x.device) * 3 + x.abs().sum() * 0) @ x


def _singular(x: Any) -> Any:
    try:
        return torch.linalg.inv(torch.zeros(4, 4, device=x.device) * x.sum())
    except RuntimeError:
        return x * 5


def _eigen(x: Any) -> Any:
    return torch.linalg.eigh(torch.outer(x, x) + torch.eye(4, device=x.device)).eigenvalues


def _validated(x: Any) -> Any:
    return torch.distributions.Categorical(logits=x).log_prob(x.sum().long() * 0)


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


def _positions(x: Any) -> Any:
    """Other shapes of the results for other values (vllm-omni's issue 4562)."""
    mask = (x > 0) & (x < 9)
    return x[mask], x.masked_select(~mask)


def _nothing(x: Any) -> Any:
    return x[(x > 1000)].sum() + x


@pytest.mark.parametrize(
    "function",
    [
        *(_assertion, _mask, _mask_written, _equal, _length, _inverse, _singular, _eigen),
        *(_validated, _written, _view, _nothing, _positions),
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_functions_that_wait_are_replayed_and_right(
    function: Callable[..., Any], mode: Any, make: Make, where: str
) -> None:
    step = make(function)
    draw = random.Random(1)
    pool = [[1.0, 2.0, 3.0, 4.0], [-1.0, 0.5, 2.0, -3.0], [9.0, 8.0, 7.0, 6.0]]
    with mode():
        for _ in range(30):
            values = draw.choice(pool)
            x, other = (torch.tensor(values, device=where) for _ in range(2))
            found, expected = step(x), function(other)
            for one, wanted in zip(_leaves(found), _leaves(expected), strict=True):
                assert same(one, wanted), values
            assert torch.equal(x, other)
    if not (function is _singular and where == "cuda"):  # it hides what broke its capture
        assert step.statistics().replays > 5, step.explain()


def test_what_a_value_guards_does_not_run_for_another_one(make: Make, where: str) -> None:
    """Reading out of bounds ends the context of a GPU; what is written stays written."""
    table, count = torch.arange(4.0, device=where), torch.zeros(1, device=where)

    def function(at: Any) -> Any:
        if bool((at < 4).all()):
            count.add_(1)
            return at * count
        return table[at.clamp(max=3)] * 2

    def inside(at: Any) -> Any:
        return table[at] if bool((at < 4).all()) else table[at.clamp(max=3)] * 2

    for theirs in (function, inside):
        step = make(theirs)
        with torch.no_grad():
            for call in range(40):
                at = torch.tensor([0, 3, 1 if call < 10 or call % 3 else 1 << 20], device=where)
                before = count.clone()
                found = step(at)
                after = count.clone()
                count.copy_(before)
                assert same(found, theirs(at)) and same(count, after)
        assert step.statistics().replays > 20, step.explain()


class _Scored(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return x * 2, x.sum().item()


_scored = _Scored()


@torch.no_grad()  # type: ignore[untyped-decorator]
def _decorated(x: Any) -> Any:
    with torch.autocast(x.device.type, enabled=False):
        y = x.sin()
        return y, float(y.sum())


def _metrics(x: Any) -> Any:
    loss, right = (x - 1).square().mean(), (x > 2).sum()
    found = {"loss": loss.item(), "right": int(right), "any": bool((x > 8).any())}
    return x + loss, found


def _last(x: Any) -> Any:
    total = x.sum().item()
    y = x.cumsum(0)
    return [total, y.max().item(), y]


def _by_module(x: Any) -> Any:
    y, score = _scored(x)
    return score, y + 1


def _both(x: Any) -> Any:
    """One value that is compared, and one that is not."""
    y = x * (2 if x[0].item() > 5 else 3)
    return y, y.sum().item()


@pytest.mark.parametrize(
    "function",
    [_Scored(), _decorated, _metrics, _last, _by_module, _both],
    ids=lambda f: getattr(f, "__name__", "module"),
)
@pytest.mark.parametrize("verify", ["off", 3])
def test_values_that_are_only_returned_are_those_of_their_call(
    function: Any, verify: Any, make: Make, where: str
) -> None:
    step = make(function, verify=verify)
    with torch.no_grad():
        for call in range(24):
            x = torch.tensor([call % 2 * 9.0, call, 1.5, -call], device=where)
            found, expected = step(x), function(x)
            for one, wanted in zip(_leaves(found), _leaves(expected), strict=True):
                assert type(one) is type(wanted)
                assert same(one, wanted) if isinstance(one, torch.Tensor) else one == wanted
    assert step.statistics().replays > 10, step.explain()


def test_an_unforeseen_wait_runs_once_and_is_learned(make: Make, where: str) -> None:
    total = torch.zeros(4, device=where)

    def function(x: Any) -> Any:
        y = x * 2
        total.add_(y)  # written once, though the capture breaks below
        return _eigen(y) + total.sum()

    step, theirs = make(function), torch.zeros(4, device=where)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], device=where)
    with torch.no_grad():
        for _ in range(14):
            theirs += x * 2
            assert torch.equal(step(x), _eigen(x * 2) + theirs.sum())
            assert torch.equal(total, theirs)
    assert step.statistics().replays > 0, step.explain()


def test_a_function_that_catches_an_error_of_its_capture(make: Make, where: str) -> None:
    """The draw cannot run again, so the call begins anew where the capture breaks."""

    def function(x: Any, seen: Any) -> Any:
        seen += 1
        kept = torch.nn.functional.dropout(x, 0.5)
        try:
            return kept + _eigen(x)
        except Exception:
            return x * 0

    graphed = make(function)
    for call in range(12):
        x, found = torch.randn(4, device=where), []
        for one in (graphed, function):
            torch.manual_seed(call)
            seen = torch.zeros(1, device=where)
            found.append((one(x, seen), seen))
        assert all(map(torch.equal, *found)), (call, graphed.explain())


@pytest.mark.parametrize(
    "work",
    [
        lambda x, w: (x[:4] * w).reshape(2, 2, 3).prod(1),
        lambda x, w: x.masked_fill(x > 0.3, w.sum() * 0.3),
        lambda x, w: (x * w + torch._efficientzerotensor(3, device=x.device)).sin(),
    ],
    ids=["prod", "masked_fill", "no memory"],
)
def test_gradients_that_a_mode_would_round_otherwise(work: Any, make: Make, where: str) -> None:
    def function(x: Any, w: Any) -> Any:
        assert (x.abs() < 100).all()
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            return torch.autograd.grad(work(x, w).square().sum(), w)[0]

    graphed = make(function)
    for call in range(12):
        draw = torch.Generator().manual_seed(call)
        x, w = (torch.randn(*shape, generator=draw).to(where) for shape in ((400, 3), (3,)))
        assert torch.equal(graphed(x, w), function(x, w)), (call, graphed.explain())


def test_modules_with_buffers_that_are_written_before_a_wait(make: Make, where: str) -> None:
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
    ours, theirs = Counting().to(where), Counting().to(where)
    step = make(ours)
    inputs = [torch.randn(8, 4, device=where) for _ in range(3)]
    draw = random.Random(2)
    with torch.no_grad():
        for _ in range(40):
            x = draw.choice(inputs)
            assert torch.equal(step(x), theirs(x))
            assert torch.equal(ours.seen, theirs.seen)
            assert torch.equal(ours.norm.running_mean, theirs.norm.running_mean)


@pytest.mark.parametrize("training", [True, False])
def test_replays_copy_only_buffers_that_are_written_before_a_wait(
    make: Make, where: str, training: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.ReLU()).to(where).train(training)

    def function(x: Any) -> Any:
        y = model(x)
        return y + 1 if y.max() > 9 else y

    step = make(function)
    with torch.no_grad():
        for _ in range(8):
            step(torch.randn(8, 4, device=where))
    (chain,) = [
        found.chain
        for found in (line.captured() for line in step._lines.values())
        if found is not None and found.chain is not None
    ]
    assert bool(chain.saved) is training


def test_numbers_that_are_drawn_before_another_value_are_drawn_once(make: Make, where: str) -> None:
    def function(x: Any) -> Any:
        noise = torch.rand(4, device=where)
        if (x + noise).max() > 5:
            return noise + torch.rand(4, device=where)
        return noise * 2

    step, found = make(function), [[], []]
    with torch.no_grad():
        for into, each in zip(found, (function, step), strict=True):
            torch.manual_seed(3)
            for value in [1.0] * 12 + [1.0, 9.0, 9.0, 1.0] * 6:
                into.append(each(torch.full((4,), value, device=where)))
    assert all(map(same, *found))
    assert step._hot and step.statistics().replays > 12, step.explain()


@pytest.mark.parametrize("by_the_wait", [False, True])
def test_weights_that_move_between_calls_that_wait(
    by_the_wait: bool, make: Make, where: str
) -> None:
    """The graphs are bound to the new memory, unless an operation that waits reads it."""
    held = {"weight": torch.ones(4, device=where)}
    kept = []

    def function(x: Any) -> Any:
        y = held["weight"] * x
        large = y.max().item() > 2
        return y.cumsum(0) * held["weight"] if large else y + held["weight"]

    def reading(x: Any) -> Any:
        y = held["weight"] * x
        return held["weight"].unique() * 3 + y

    step = make(reading if by_the_wait else function)
    theirs = reading if by_the_wait else function
    x = torch.tensor([0.5, 1.0, 0.25, 0.125], device=where)
    with torch.no_grad():
        for call in range(18):
            if call > 8 and call % 3 == 0:
                kept.append(held["weight"])
                held["weight"] = torch.ones(4, device=where) * (1 + call // 16)
            assert same(step(x), theirs(x))
    numbers = step.statistics()
    assert numbers.replays > 3, step.explain()
    if where == "cuda":
        assert (numbers.rebound > 0) is not by_the_wait, step.explain()


def test_a_call_whose_part_was_held_too_long_is_cut_without_a_wait(
    make: Make, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostinato.interop.torch import waits

    monkeypatch.setattr(waits, "MOST_HELD", 64)

    def function(x: Any) -> Any:
        for _ in range(12):
            x = x * 1.5 + 1
        return x if x.sum() > 0 else -x

    step = make(function)
    x = torch.tensor([1.0, -2.0, 3.0, 4.0], device=where)
    with torch.no_grad():
        for _ in range(10):
            assert torch.equal(step(x), function(x))
    assert step.statistics().replays > 0


@pytest.mark.parametrize("seed", range(4))
def test_random_functions_of_torch_are_as_eager_calls(seed: int, make: Make, where: str) -> None:
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
                one = torch.eye(4, device=where) * (number + 1)
                y = y + torch.linalg.eigh(one).eigenvalues * x.sum()
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
        state, theirs = (torch.zeros(2, device=where) for _ in range(2))

        def function(x: Any, steps: Any = steps, state: Any = state) -> Any:
            y = run(steps, x, x * 1, state)
            return y if steps[0][1] % 2 else (y, x.sum().item(), {"y": y.sum().item()})

        option = draw.choice([{}, {"results": "static"}, {"verify": 3}])
        step = make(function, **option)
        with torch.no_grad():
            for _ in range(20):
                values = draw.choice([[0.0, 1, 2, 3], [1.0, 1, 1, 1], [3.0, 4, 0, -2]])
                x, other = (torch.tensor(values, device=where) for _ in range(2))
                try:
                    expected = function(other, state=theirs)
                except Stop:
                    with pytest.raises(Stop):
                        step(x)
                else:
                    found = step(x)
                    pairs = zip(_leaves(found), _leaves(expected), strict=True)
                    for one, wanted in pairs:
                        scalars = not isinstance(one, torch.Tensor)
                        assert (
                            as_value(one) == as_value(wanted) if scalars else same(one, wanted)
                        ), steps
                assert torch.equal(x, other), steps
                assert torch.equal(state, theirs), steps


def test_a_wait_that_torch_does_not_show_leaves_nothing_written_twice(
    make: Make, where: str
) -> None:
    """It breaks the run that builds in its middle, and the call runs eagerly from its start."""
    state, hidden = (torch.zeros(4, device=where) for _ in range(2))
    find = {"it": [hidden]}.__getitem__

    def function(x: Any) -> Any:
        state.add_(1)
        found: Any = find("it")
        found[0].add_(x)
        x.mul_(2)
        if x.sum() > 0:
            state.add_(10)
        if OnCpu.inside or (where == "cuda" and torch.cuda.is_current_stream_capturing()):
            raise RuntimeError("operation not permitted when stream is capturing")
        return x + state

    step = make(function)
    with torch.no_grad():
        for call in range(1, 10):
            x = torch.ones(4, device=where)
            assert same(step(x), torch.full((4,), 2.0 + 11 * call, device=where))
            assert same(x, torch.full((4,), 2.0, device=where))
            assert same(hidden, torch.full((4,), float(call), device=where))
    assert step.statistics().replays == 0 and "not permitted" in step.explain()


@pytest.mark.parametrize(
    "work",
    [
        lambda x: torch.bincount(x, minlength=3) + 1,
        lambda x: torch.unique(x, return_inverse=True, return_counts=True),
        lambda x: (x * 2)[x > 3],
        lambda x: (x * 2).masked_select(x > 3) + 1,
        lambda x: x.clone().index_put_((x > 3,), x.sum()),
        lambda x: torch.nonzero(x > 3) * 2,
    ],
)
def test_a_count_that_differs_reads_and_writes_no_other_memory(
    work: Make, make: Make, where: str
) -> None:
    """Operations that need the count run before the host has seen that it is another one."""
    draw, step = random.Random(2), make(work)
    with torch.no_grad():
        for call in range(40):
            most = 0 if call < 12 else draw.choice((0, 1, 5, 90))
            values = [draw.randrange(most) for _ in range(64)] if most else [*range(5), *[0] * 59]
            x = torch.tensor(values, device=where)
            for found, wanted in zip(_leaves(step(x)), _leaves(work(x)), strict=True):
                assert same(found, wanted), call
    assert step.statistics().replays > 5, step.explain()


@pytest.mark.parametrize("written", ["by itself", "by a view", "not"])
def test_a_number_is_read_before_it_is_written(written: str, make: Make, where: str) -> None:
    def function(x: Any) -> Any:
        n = x.sum()
        if n.item() == 10.0:
            n = n.mul_(2) if written == "by itself" else n * 2 if written == "not" else n
            n.view(1).add_(2) if written == "by a view" else None
        return x + n

    step = make(function)
    with torch.no_grad():
        for call in range(30):
            values = [3.0, 2.0, 1.0, 4.0 + (call > 12 and call % 3 == 0)]
            x = torch.tensor(values, device=where)
            assert same(step(x), function(x)), call
    assert step.statistics().replays > 5, step.explain()
    # Work that may run while the number is read needs no IF node.
    assert ("conditional" in step.inspect()) == (written != "not")


def test_matrices_without_an_inverse_in_the_middle(make: Make, where: str) -> None:
    """What comes after a check of errors runs before the host has seen that there is one."""

    def function(a: Any) -> Any:
        for _ in range(3):
            a = torch.linalg.inv(a) + torch.eye(4, device=where)
            lower = torch.linalg.cholesky(a @ a.mT + torch.eye(4, device=where))
            a = a + torch.linalg.solve(lower.mT, a, left=False)
        return a

    draw, step = torch.Generator().manual_seed(5), make(function)
    kinds = [torch.full((4, 4), value) for value in (0.0, float("nan"), float("inf"), 1e38)]
    with torch.no_grad():
        for call in range(40):
            a = torch.randn(2, 4, 4, generator=draw) + 4 * torch.eye(4)
            if call > 12 and call % 2:
                a[call % 4 // 2] = kinds[call // 4 % 4]
            outcomes = []
            for way in (function, step):
                try:
                    outcomes.append(way(a.to(where)))
                except RuntimeError as error:
                    outcomes.append(str(error))
            wanted, found = outcomes
            assert type(found) is type(wanted), call
            assert found == wanted if isinstance(found, str) else same(found, wanted), call
    assert step.statistics().replays > 5, step.explain()


def _from_fewer(x: Any, at: Any, _: Any) -> Any:
    x = x[:, :3]
    return x.gather(-1, at) if bool((at < 3).all()) else x


def _copied_over(x: Any, at: Any, places: Any) -> Any:
    at.copy_(places)
    return x.gather(-1, at) if bool((at < 5).all()) else x


def _written_by_a_view(x: Any, at: Any, places: Any) -> Any:
    at[:2, 0].add_(places[:2, 0])
    return x.gather(-1, at) if bool((at < 5).all()) else x


def _of_other_memory(x: Any, at: Any, places: Any) -> Any:
    del at
    at = places.clone()
    return x.gather(-1, at) if bool((at < 5).all()) else x


@pytest.mark.parametrize("work", [_from_fewer, _copied_over, _written_by_a_view, _of_other_memory])
def test_places_that_a_value_guards_are_not_read_for_another_one(
    work: Make, make: Make, where: str
) -> None:
    """An action's place in the table of its probabilities needs no guard, unlike others."""

    def function(x: Any, places: Any) -> Any:
        return work(x, x.argmax(-1, keepdim=True), places)

    draw, step = random.Random(4), make(function)
    with torch.no_grad():
        for call in range(40):
            x = torch.eye(5)[[0 if call < 12 else draw.randrange(5) for _ in range(4)]].to(where)
            most = 1 if call < 12 else draw.choice((1, 1, 9**9))
            places = torch.full((4, 1), draw.randrange(most), device=where)
            assert same(step(x, places), function(x, places)), call
    assert step.statistics().replays > 5, step.explain()


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize(
    "work",
    [
        *("assertion", "mask", "equal", "length", "solve", "cholesky", "kalman", "policy"),
        *("normal", "multivariate", "constant", "unique"),
        *("gpytorch", "ode fixed", "ode adaptive", "gcn", "gat"),
    ],
)
def test_the_functions_of_the_benchmark_are_replayed(work: str, make: Make, where: str) -> None:
    torch.manual_seed(0)
    try:
        function, draw = works_on(torch, where)[work]()
    except ImportError as error:
        pytest.skip(f"not installed: {error}")
    step = make(function)
    with torch.no_grad():
        for call in range(12):
            args, found = draw(), []
            for each in (function, step):
                torch.manual_seed(call)
                found.append(_leaves(each(*[array.clone() for array in args])))
            for ours, wanted in zip(*found, strict=True):
                torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    assert step.statistics().replays >= 5, step.explain()


def test_operations_of_magma_raise_in_captures_and_nowhere_else() -> None:
    capturing = pytest.importorskip("ostinato.interop.torch.capturing")
    if not hasattr(torch.library, "get_kernel"):
        pytest.skip("this version of torch cannot wrap a kernel")
    a = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
    b, lower = torch.tensor([[1.0], [2.0]]), torch.linalg.cholesky(a)
    both = b.expand(2, 2, 1), lower.expand(2, 2, 2)
    wanted = torch.linalg.solve(a, b)
    inside = [True]
    with capturing.only_capturable("CPU", lambda: inside[0]):
        torch.testing.assert_close(torch.cholesky_solve(b, lower), wanted)  # one matrix
        torch.testing.assert_close(torch.cholesky_solve(b[None], lower[None])[0], wanted)
        for call in (lambda: torch.cholesky_solve(*both), lambda: torch.cholesky_inverse(both[1])):
            with pytest.raises(RuntimeError, match=r"stream is capturing: .*MAGMA"):
                call()
        inside[0] = False
        torch.testing.assert_close(torch.cholesky_solve(*both)[1], wanted)
    inside[0] = True
    torch.testing.assert_close(torch.cholesky_solve(*both)[1], wanted)


@pytest.mark.parametrize("how", [print, logging.getLogger(__name__).warning])
def test_a_function_that_prints_what_it_has_read_runs_eagerly(
    how: Callable[..., object], make: Make, where: str
) -> None:
    def function(x: Any) -> Any:
        how("the sum is", x.sum().item()) if how is print else how("%s", x.sum().item())
        return x * 2

    step = make(function)
    x = torch.tensor([1.0, 2.0], device=where)
    with torch.no_grad():
        for _ in range(12):
            assert same(step(x), x * 2)
    assert step.statistics().replays == 0
    assert "prints" in step.explain() and "test_chains_torch.py" in step.explain()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
class TestOnGpu:
    """Copies between two kinds of memory, random numbers, and kernels that torch does not see."""

    def run(self, step: Any, function: Any, draw: Callable[[], Any], calls: int = 16) -> None:
        with torch.no_grad():
            for call in range(calls):
                x = draw()
                torch.manual_seed(call)
                expected = function(x)
                after = torch.rand(1, device="cuda")
                torch.manual_seed(call)
                assert same(step(x), expected), step.explain()
                assert torch.equal(torch.rand(1, device="cuda"), after)

    def test_copies_from_the_cpu_are_made_once(self, make: Make) -> None:
        def function(x: Any) -> Any:
            index = torch.tensor([2, 0, 1])
            scale = torch.tensor([1.0, 2.0, 3.0], device="cuda")
            bias = torch.ones(3).pin_memory().to("cuda", non_blocking=True)
            y = torch.empty(3, device="cuda").copy_(torch.arange(3.0))
            return x[index] * scale + bias + y

        step = make(function)
        self.run(step, function, lambda: torch.randn(3, device="cuda"))
        assert step.statistics().replays > 4, step.explain()

    def test_a_copy_from_the_cpu_that_is_written_is_made_in_each_call(self, make: Make) -> None:
        library = torch.library.Library("ostinato_tests", "FRAGMENT")
        library.define("doubled(Tensor x) -> Tensor")  # it does not say that it writes x
        library.impl("doubled", lambda x: x.mul_(2).clone(), "CUDA")

        def added(scale: Any, x: Any) -> Any:
            return scale.add_(x)

        def by_a_view(scale: Any, x: Any) -> Any:
            scale[1:].unsqueeze(0).copy_(x[1:])
            return scale

        def by_out(scale: Any, x: Any) -> Any:
            return torch.add(x, 1, out=scale)

        def after_a_wait(scale: Any, x: Any) -> Any:
            return scale.add_(1) if bool(x.isfinite().all()) else scale

        def by_no_word(scale: Any, x: Any) -> Any:
            return torch.ops.ostinato_tests.doubled(scale)

        def by_statistics(scale: Any, x: Any) -> Any:
            kept = scale.clone()
            torch.nn.functional.batch_norm(x[None] + x[:, None], scale, kept, training=True)
            return scale

        for write in (added, by_a_view, by_out, after_a_wait, by_no_word, by_statistics):

            def function(x: Any, write: Any = write) -> Any:
                scale = torch.tensor([1.0, 2.0, 3.0]).to("cuda")
                return x * write(scale, x) + scale

            step = make(function)
            self.run(step, function, lambda: torch.randn(3, device="cuda"))
            assert step.statistics().replays > 4, (write, step.explain())

    @pytest.mark.parametrize("results", ["clone", "static"])
    def test_a_copy_from_the_cpu_that_is_returned_is_the_callers(
        self, results: str, make: Make
    ) -> None:
        def function(x: Any) -> Any:
            scale = torch.tensor([1.0, 2.0, 3.0]).to("cuda")
            return scale, x * scale

        step = make(function, results=results)
        with torch.no_grad():
            for _ in range(16):
                x = torch.randn(3, device="cuda")
                found = step(x)
                for one, wanted in zip(found, function(x), strict=True):
                    assert same(one, wanted), step.explain()
                found[0].zero_()
        assert step.statistics().replays > 4, step.explain()

    def test_a_cpu_tensor_that_no_guard_reads_is_read_in_each_call(self, make: Make) -> None:
        held = {"table": torch.tensor([1.0, 2.0, 3.0])}
        find = held.__getitem__

        def function(x: Any) -> Any:
            return x * find("table").to("cuda") + x[find("table").long() - 1]

        step = make(function, guard=False)
        for _ in range(3):
            self.run(step, function, lambda: torch.randn(3, device="cuda"), 8)
            held["table"].copy_(torch.tensor([1.0, 3.0, 2.0]))
        assert step.statistics().replays > 4, step.explain()

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_copies_to_the_cpu_that_are_only_returned(self, mode: Any, make: Make) -> None:
        def function(x: Any) -> Any:
            y, host = x * 2, x.cpu()
            pinned = (x + 1).to("cpu", non_blocking=True)
            return y.tolist(), host, {"a": y.cpu().numpy(), "b": pinned, "c": y[0].item()}

        step, results = make(function), []
        with mode():
            for call in range(20):
                x = torch.tensor([1.0, call], device="cuda")
                results.append((step(x), function(x)))
        for found, expected in results:
            assert found[0] == expected[0] and found[2]["c"] == expected[2]["c"]
            assert same(found[1], expected[1]) and same(found[2]["b"], expected[2]["b"])
            assert (found[2]["a"] == expected[2]["a"]).all()
        assert step.statistics().replays > 8, step.explain()

    def test_copies_to_the_cpu_are_compared_whole(self, make: Make) -> None:
        def function(x: Any) -> Any:
            host = x.round().cpu().numpy()
            return x * float(host.sum()) + torch.from_numpy(host).cuda()

        step = make(function)
        values = [torch.tensor(v, device="cuda") for v in ([1.0, 2.0], [2.0, 1.0], [1.2, 2.3])]
        draw = random.Random(0)
        self.run(step, function, lambda: draw.choice(values), 40)
        assert step.statistics().replays > 4, step.explain()

    @pytest.mark.parametrize("returned", [False, True])
    def test_several_parts_draw_and_another_value_takes_back_what_they_drew(
        self, returned: bool, make: Make
    ) -> None:
        def function(x: Any) -> Any:
            noise = torch.rand(4, device="cuda")
            if (x * noise).sum() > 0:
                found = x.multinomial(3).float() + torch.randn(3, device="cuda")
            else:
                found = torch.nn.functional.dropout(x, 0.5)[:3]
            if not found.isfinite().all():  # pytest rewrites assertions
                raise ValueError
            found = torch.cat([found, noise, torch.rand(2, device="cuda")])
            return (found, found.sum().item()) if returned else found

        step = make(function)
        draw = random.Random(3)
        with torch.no_grad():
            for call in range(40):
                sign = 1 if call < 10 else draw.choice((1, 1, -1))
                x = torch.rand(4, device="cuda") * sign
                torch.manual_seed(call)
                expected = _leaves(function(x)), torch.rand(1, device="cuda")
                torch.manual_seed(call)
                found = _leaves(step(x)), torch.rand(1, device="cuda")
                assert torch.equal(found[1], expected[1]), call
                for one, wanted in zip(found[0], expected[0], strict=True):
                    assert torch.equal(torch.as_tensor(one), torch.as_tensor(wanted)), call
        assert step.statistics().replays > 20, step.explain()

    def test_kernels_that_torch_does_not_see(self, make: Make) -> None:
        triton = pytest.importorskip("triton")
        import triton.language as tl

        global _double

        @triton.jit
        def _double(x, n: tl.constexpr):  # type: ignore[no-untyped-def]
            i = tl.arange(0, n)
            tl.store(x + i, tl.load(x + i) * 2)

        def function(x: Any) -> Any:
            y = x.clone()
            _double[1,](y, 4)
            return y * 2 if y.sum() > 0 else y

        step = make(function)
        self.run(step, function, lambda: torch.rand(4, device="cuda") + 1)
        assert "what it writes before" in step.explain()

        def after(x: Any) -> Any:
            y = x * 2 if x.sum() > 0 else x.clone()
            _double[1,](y, 4)
            return y

        step = make(after)
        self.run(step, after, lambda: torch.rand(4, device="cuda") + 1)
        assert step.statistics().replays > 4, step.explain()

    def test_an_explicit_wait_in_the_function_is_never_made_twice(self, make: Make) -> None:
        def function(x: Any) -> Any:
            y = x * 2
            torch.cuda.current_stream().synchronize()
            return y + 1

        step = make(function)
        self.run(step, function, lambda: torch.randn(4, device="cuda"))
        assert "synchronize" in step.explain()

    def test_from_other_threads_and_streams(self, make: Make) -> None:
        def function(x: Any) -> Any:
            y = x * 2
            if y.sum() > 0:
                y = y + 1
            return y[y > 3]

        step = make(function)
        failed: list[Any] = []

        def work(number: int) -> None:
            stream = torch.cuda.Stream()
            with torch.no_grad(), torch.cuda.stream(stream):
                for _ in range(60):
                    x = torch.full((8,), float(number), device="cuda")
                    if not torch.equal(step(x), function(x)):
                        failed.append(number)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert not failed

    def test_a_function_that_is_dropped_gives_its_memory_back(
        self, make: Make, device: Device
    ) -> None:
        from ostinato.interop.torch import graphed

        def function(x: Any) -> Any:
            large = torch.ones(16 << 20, device="cuda")  # 64 MiB
            return x * float(large[0].item())

        x = torch.ones(8, device="cuda")
        reserved = []
        for _ in range(4):
            step = graphed(function, device=device)
            self.run(step, function, lambda: x, 8)
            assert step.statistics().replays > 1, step.explain()
            step.close()
            del step
            gc.collect()
            torch.cuda.synchronize()
            device.context.collect()
            torch.cuda.empty_cache()
            reserved.append(torch.cuda.memory_reserved())
        # The first one has left the workspaces of cuBLAS, which the others use too.
        assert reserved[-1] - reserved[0] < 32 << 20, reserved


_LEGACY = """
import torch
from ostinato.interop.torch import graphed

def function(x):
    y = x * 2
    with torch.cuda.stream(torch.cuda.default_stream()):
        return y + 1  # as extensions do that know nothing of streams

step = graphed(function)
with torch.no_grad():
    for _ in range(6):
        x = torch.randn(1 << 20, device="cuda")
        assert torch.equal(step(x), x * 2 + 1)
assert step.statistics().replays == 0
print("right", step.explain())
"""


@pytest.mark.gpu
def test_work_on_the_legacy_default_stream_is_found() -> None:
    """In a process with one thread: a capture of other threads' work would break."""
    done = subprocess.run(
        [sys.executable, "-c", _LEGACY],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "right" in done.stdout and "legacy" in done.stdout
