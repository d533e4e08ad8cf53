"""Gradients of graphed calls: those of eager calls, whatever is between a call and its backward."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

Make = Callable[..., Any]
_nn: Any = torch.nn


def network(where: str) -> Any:
    torch.manual_seed(2)
    return _nn.Sequential(
        _nn.Linear(4, 8), _nn.LayerNorm(8), _nn.Tanh(), _nn.Linear(8, 3), _nn.Softmax(-1)
    ).to(where)


class Pair:
    """A network with graphed calls, and the same with eager calls."""

    def __init__(self, make: Make, where: str, **options: Any) -> None:
        self.where = where
        self.models = [network(where) for _ in range(2)]
        self.step = make(self.models[0], gradients="replay", **options)
        self.calls: tuple[Any, Any] = self.step, self.models[1]

    def both(self, work: Callable[[Any, Any], Any]) -> list[Any]:
        """Does the same with both; compares the results and all gradients."""
        found = [work(call, model) for call, model in zip(self.calls, self.models, strict=True)]
        self.compare(*found)
        return found

    def compare(self, one: Any, other: Any) -> None:
        leaves = torch.utils._pytree.tree_leaves
        for mine, theirs in zip(leaves(one), leaves(other), strict=True):
            same = mine is theirs is None or torch.equal(mine, theirs)
            assert same, self.step.explain()
        for mine, theirs in zip(*[model.parameters() for model in self.models], strict=True):
            assert (mine.grad is None) == (theirs.grad is None), self.step.explain()
            if mine.grad is not None:
                assert torch.equal(mine.grad, theirs.grad), self.step.explain()


@pytest.fixture
def pair(make_chained: Make, where: str) -> Pair:
    return Pair(make_chained, where)


def drawn(call: int, rows: int = 6, *, needs: bool = False, where: str = "cpu") -> Any:
    draw = torch.Generator().manual_seed(call)
    return torch.randn(rows, 4, generator=draw).to(where).requires_grad_(needs)


def test_training_a_graphed_module(pair: Pair) -> None:
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair.models]
    for call in range(12):
        x = drawn(call, where=pair.where)

        def work(forward: Any, model: Any, x: Any = x) -> Any:
            optimizer = optimizers[pair.models.index(model)]
            optimizer.zero_grad()
            loss = forward(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        pair.both(work)
    assert pair.step.statistics().replays >= 8, pair.step.explain()


@pytest.mark.parametrize("count", [3, 12])  # more than a key has pairs of graphs for
def test_several_calls_before_a_backward(count: int, pair: Pair) -> None:
    for call in range(8):

        def work(forward: Any, model: Any, call: int = call) -> Any:
            model.zero_grad()
            found = [forward(drawn(10 * call + n, where=pair.where)) for n in range(count)]
            loss = sum(one.square().sum() * n for n, one in enumerate(found))
            loss.backward()
            return found

        pair.both(work)
    assert pair.step.statistics().replays >= 10, pair.step.explain()


def test_arguments_with_gradients_and_frozen_layers(pair: Pair) -> None:
    for model in pair.models:
        model[0].requires_grad_(False)
    for call in range(8):
        xs = [drawn(call, needs=True, where=pair.where) for _ in range(2)]

        def work(forward: Any, model: Any, xs: Any = xs) -> Any:
            x = xs[pair.models.index(model)]
            gradient = torch.autograd.grad(forward(x)[:, 0].sum(), x)
            forward(x)[:, 1].sum().backward()
            return gradient, x.grad

        pair.both(work)
    assert pair.step.statistics().replays >= 10, pair.step.explain()


def test_gradients_are_added_and_kept(pair: Pair) -> None:
    kept: list[list[Any]] = [[], []]
    for call in range(8):

        def work(forward: Any, model: Any, call: int = call) -> Any:
            side = pair.models.index(model)
            if call % 4 == 0:
                kept[side] += [p.grad for p in model.parameters() if p.grad is not None]
                model.zero_grad()
            forward(drawn(call, where=pair.where)).square().sum().backward()
            return [one.clone() for one in kept[side]]

        pair.both(work)


def test_results_that_are_dropped_free_their_graph(pair: Pair) -> None:
    for call in range(12):
        pair.both(lambda forward, model, call=call: forward(drawn(call, where=pair.where)).detach())
    gc.collect()
    assert pair.step.statistics().captures <= 3, pair.step.explain()
    assert pair.step.statistics().replays >= 8, pair.step.explain()


def test_a_second_backward(pair: Pair) -> None:
    for call in range(6):

        def work(forward: Any, model: Any, call: int = call) -> Any:
            model.zero_grad()
            loss = forward(drawn(call, where=pair.where)).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            return loss.detach()

        pair.both(work)
    x = drawn(1, where=pair.where)
    pair.models[0].zero_grad()
    loss = pair.step(x).square().sum()
    loss.backward(retain_graph=True)
    pair.models[0].zero_grad()
    pair.step(x)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


def test_a_weight_that_changes_before_the_backward_is_an_error(pair: Pair) -> None:
    x = drawn(0, where=pair.where)
    for _ in range(4):
        pair.step(x).sum().backward()
    loss = pair.step(x).square().sum()
    with torch.no_grad():
        pair.models[0][3].weight.mul_(2)
    if pair.where == "cuda":  # a tape has no addresses
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()


def test_a_second_derivative_is_refused_by_name(pair: Pair) -> None:
    for _ in range(4):
        x = drawn(0, needs=True, where=pair.where)
        found = pair.step(x).square().sum()
        if pair.step.statistics().replays:
            (gradient,) = torch.autograd.grad(found, x, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                gradient.sum().backward()
            return
    raise AssertionError(pair.step.explain())


def test_a_result_that_keeps_its_gradient(make_chained: Make, where: str) -> None:
    """As in pytorch/pytorch#91468."""

    def f(x: Any) -> Any:
        y = x.clone()
        y.retain_grad()
        return y * 2, y

    step = make_chained(f, gradients="replay")
    for call in range(5):
        found = []
        for function in (step, f):
            x = drawn(call, needs=True, where=where)
            z, y = function(x)
            z.sum().backward()
            found.append((x.grad, y.grad))
        assert torch.equal(*[x for x, _ in found]) and torch.equal(*[y for _, y in found])


def test_hooks_of_weights_and_modes(pair: Pair) -> None:
    seen: list[list[float]] = [[], []]
    for side, model in enumerate(pair.models):
        model[0].weight.register_hook(lambda g, side=side: seen[side].append(float(g.sum())))
    for call in range(10):

        def work(forward: Any, model: Any, call: int = call) -> Any:
            model.zero_grad()
            model.train(call % 4 < 2)
            with torch.set_grad_enabled(call % 5 != 4):
                found = forward(drawn(call, where=pair.where))
            if found.requires_grad:
                found.square().sum().backward()
            return found.detach()

        pair.both(work)
    assert seen[0] == seen[1] and len(seen[0]) == 8


def test_weights_that_are_loaded_or_move(pair: Pair) -> None:
    states = [copy.deepcopy(pair.models[0].state_dict())]
    for call in range(16):

        def work(forward: Any, model: Any, call: int = call) -> Any:
            if call == 6:
                model.load_state_dict(states[0])
            if call == 10:
                model[3].weight.data = model[3].weight.data.clone() * 0.5
            forward(drawn(call, where=pair.where)).square().sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.01)
            model.zero_grad(set_to_none=call % 3 == 0)

        pair.both(work)


def several(where: str) -> Callable[[Any], Any]:
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(3)).to(where)
    weight.requires_grad_()

    def function(x: Any) -> Any:
        y = x @ weight
        return {"y": y, "half": y[:2], "count": x.sum(), "same": y}

    function.weights = [weight]  # type: ignore[attr-defined]
    return function


def of_a_closure(where: str) -> Callable[[Any], Any]:
    model = network(where)
    function = lambda x: {"y": model(x), "half": model[0].bias * x[:, :1]}  # noqa: E731
    function.weights = [*model.parameters()]  # type: ignore[attr-defined]
    return function


def recurrent(where: str) -> Callable[[Any], Any]:
    torch.manual_seed(5)
    model = _nn.GRU(4, 3, num_layers=2).to(where)
    function = lambda x: {"y": model(x)[0]}  # noqa: E731
    function.weights = [*model.parameters()]  # type: ignore[attr-defined]
    return function


def frozen(where: str) -> Callable[[Any], Any]:
    """A part without gradients, for which torch has another way (its fast path)."""
    torch.manual_seed(6)
    layer = _nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).to(where)
    layer.eval().requires_grad_(False)
    head = _nn.Linear(4, 3).to(where)
    function = lambda x: {"y": head(layer(x[None]))}  # noqa: E731
    function.weights = [*head.parameters()]  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize("of", [several, of_a_closure, recurrent, frozen])
def test_results_that_stay_alive(of: Callable[[str], Any], make_chained: Make, where: str) -> None:
    """Their history keeps autograd's nodes of the weights, on the stream of the call."""
    functions = [of(where) for _ in range(2)]
    step = make_chained(functions[0], gradients="replay")
    alive: list[Any] = []
    for call in range(10):
        x = drawn(call, where=where)
        for function in (step, functions[1]):
            found = function(x)
            alive.append(found)
            assert "count" not in found or not found["count"].requires_grad
            parts = [found[key].square().sum() for key in ("y", "half") if key in found]
            (sum(parts) + (found["same"][0].sum() if "same" in found else 0)).backward()
        for mine, theirs in zip(*[f.weights for f in functions], strict=True):
            assert torch.equal(mine.grad, theirs.grad), (call, step.explain())
        assert torch.equal(alive[-1]["y"], alive[-2]["y"]), (call, step.explain())
    assert step.statistics().replays >= 5, step.explain()


@pytest.mark.parametrize("seed", range(6))
def test_random_orders_of_calls_and_backwards(seed: int, make_chained: Make, where: str) -> None:
    draw = random.Random(seed)
    pair = Pair(make_chained, where)
    open_: list[list[Any]] = []
    for _ in range(80):
        acts = ["call"] * 4 + ["backward"] * 3 + ["drop", "zero", "step", "other", "freeze"]
        what = draw.choice(acts)
        if what == "call":
            number, rows = draw.randrange(99), draw.choice([6, 6, 6, 6, 6, 5])
            needs = draw.random() < 0.2
            xs = [drawn(number, rows, needs=needs, where=where) for _ in range(2)]
            found = pair.both(
                lambda forward, model, xs=xs: forward(xs[pair.models.index(model)]).square()
            )
            if found[0].requires_grad:
                open_.append([found, xs])
        elif what == "backward" and open_:
            found, xs = open_.pop(draw.randrange(len(open_)))
            for one in found:
                one.sum().backward()
            pair.compare(*[x.grad for x in xs])
        elif what == "drop" and open_:
            open_.pop(draw.randrange(len(open_)))
        elif what == "zero":
            pair.both(lambda forward, model: model.zero_grad())
        elif what == "freeze":
            layer = draw.randrange(4)
            for model in pair.models:
                for p in model[layer].parameters():
                    p.requires_grad_(not p.requires_grad)
        elif what == "step":
            open_.clear()  # else eager backwards raise too
            with torch.no_grad():
                for model in pair.models:
                    for p in model.parameters():
                        p.mul_(0.99)
        else:
            with torch.no_grad():
                pair.both(lambda forward, model: forward(drawn(7, where=where)))


class Checked(_nn.Module):  # type: ignore[misc]  # torch has no type for it
    """A network that waits in its forward for a value that decides, and one that is returned."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner = network(where)

    def forward(self, x: Any) -> Any:
        assert torch.isfinite(x).all(), "the input is not finite"
        return self.inner(x)


def test_a_call_that_waits_has_the_gradients_of_an_eager_call(
    make_chained: Make, where: str
) -> None:
    models = [Checked(where) for _ in range(2)]
    step = make_chained(models[0], gradients="replay")
    for call in range(14):
        for forward, model in ((step, models[0]), (models[1], models[1])):
            model.zero_grad()
            forward(drawn(call, where=where)).square().sum().backward()
        for mine, theirs in zip(*[model.parameters() for model in models], strict=True):
            assert torch.equal(mine.grad, theirs.grad), (call, step.explain())
    assert step.statistics().replays == 0 and "waits" in step.explain(), step.explain()
