"""Random worlds of torch: functions over the same modules, weights, hooks and optimisers, with
changes between their calls.  A world exists twice, graphed and plainly; both must stay alike."""

from __future__ import annotations

import contextlib
import random
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_nn: Any = torch.nn
_functional: Any = torch.nn.functional


class Scaled(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """A layer with private settings, which other methods than `forward` read."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.shared, self.by, self._by = shared, 1.0, 1.0
        self._settings = types.SimpleNamespace(by=1.0)
        self.register_buffer("seen", torch.zeros(4))

    def scaled(self, x: Any) -> Any:
        return x * self._settings.by * self._by

    def forward(self, x: Any) -> Any:
        if self.training:
            self.seen.add_(x.detach().mean(0))
        return self.shared(x) * self.by + self.seen


class Hook:
    """A hook of a module or of a weight, with a state."""

    def __init__(self) -> None:
        self.by, self.counts, self.calls = 1.5, False, 0

    def of_module(self, module: Any, given: Any, out: Any) -> Any:
        self.calls += self.counts
        return out * self.by

    def of_weight(self, gradient: Any) -> Any:
        self.calls += self.counts
        return gradient * self.by


class World:
    """`graphed`: makes the functions that are called, of plain ones."""

    def __init__(self, draw: random.Random, where: str, graphed: Callable[..., Any]) -> None:
        torch.manual_seed(draw.randrange(1000))
        shared = _nn.Linear(4, 4)
        self.first = _nn.Sequential(Scaled(shared), _nn.Tanh(), _nn.BatchNorm1d(4)).to(where)
        self.second = _nn.Sequential(shared, _nn.Dropout(0.25), _nn.Linear(4, 4)).to(where)
        self.total = torch.zeros(4, device=where)
        self.state = types.SimpleNamespace(by=1.0, limit=0.0, fails=False, log=[])
        self.hook, self.handles = Hook(), list[Any]()
        self.parameters = [*{*self.first.parameters(), *self.second.parameters()}]
        self.parameters.sort(key=lambda p: (p.shape, float(p.detach().sum())))
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05, momentum=0.5)
        by = {"by": 2.0}
        self.acts = [lambda y: y * by["by"], _functional.relu, Hook().of_weight]
        self.by = by
        self.makes = draw.sample([*KINDS], 3)
        self.functions = [KINDS[kind](self, graphed) for kind in self.makes]

    def content(self) -> list[Any]:
        """All that calls and changes may change."""
        tensors = [*self.first.state_dict().values(), *self.second.state_dict().values()]
        gradients = [p.grad for p in self.first.parameters()]
        numbers = [self.state.by, self.hook.calls, len(self.state.log), torch.is_grad_enabled()]
        return [*tensors, self.total, *gradients, *numbers]


def _forward(world: World, graphed: Any) -> Any:
    return graphed(world.first, gradients="eager")


def _closure(world: World, graphed: Any) -> Any:
    def f(x: Any) -> Any:
        world.total.add_(x.detach().mean(0))
        return world.second(x) + world.total * world.state.by, x

    return graphed(f, gradients="eager")


def _private(world: World, graphed: Any) -> Any:
    layer = world.first[0]
    return graphed(lambda x: layer.scaled(x) + world.total, gradients="eager")


def _with_function(world: World, graphed: Any) -> Any:
    step = graphed(lambda x, act: act(world.second(x)), gradients="eager")
    return lambda x: step(x, world.acts[0])


def _waiting(world: World, graphed: Any) -> Any:
    def f(x: Any) -> Any:
        y = world.second(x)
        world.total.mul_(0.5)
        if (y.sum() > world.state.limit).item():
            y = y + world.total
        return y, y.sum().item()

    return graphed(f, gradients="eager")


def _failing(world: World, graphed: Any) -> Any:
    def f(x: Any) -> Any:
        world.total.add_(1)
        if world.state.fails:
            raise ValueError("as it was asked to")
        return world.total * x

    return graphed(f, gradients="eager")


def _nested(world: World, graphed: Any) -> Any:
    inner = graphed(lambda x: world.second(x) * world.by["by"], gradients="eager")
    outer = graphed(lambda x: inner(x) - world.total, gradients="eager")
    return lambda x: (outer(x), inner(x))


def _training(world: World, graphed: Any) -> Any:
    def f(x: Any) -> Any:
        world.optimizer.zero_grad()
        with torch.enable_grad():
            loss = world.first(x).square().mean() + world.second(x).square().mean()
            if loss.requires_grad:
                loss.backward()
        world.optimizer.step()
        return loss.detach()

    return graphed(f)


def _logging(world: World, graphed: Any) -> Any:
    def f(x: Any) -> Any:
        if world.state.limit > 1:
            world.state.log.append(x)
        return world.first(x) * 2

    return graphed(f, gradients="eager")


KINDS: dict[str, Callable[[World, Any], Any]] = {
    "forward": _forward,
    "closure": _closure,
    "private": _private,
    "with a function": _with_function,
    "waiting": _waiting,
    "failing": _failing,
    "nested": _nested,
    "training": _training,
    "logging": _logging,
}
"""Kinds of functions."""


def _layer(world: World) -> Any:
    return world.first[0]


def _replace_weight(world: World) -> None:
    world.second[2].weight = _nn.Parameter(world.second[2].weight.detach() * 0.5)


def _load(world: World, assign: bool) -> None:
    held = {k: v.detach().clone() * 0.5 for k, v in world.second.state_dict().items()}
    world.second.load_state_dict(held, assign=assign)


def _hook_module(world: World) -> None:
    world.handles.append(_layer(world).shared.register_forward_hook(world.hook.of_module))


def _hook_weight(world: World) -> None:
    weight = _layer(world).shared.weight
    if weight.requires_grad:
        world.handles.append(weight.register_hook(world.hook.of_weight))


def _unhook(world: World) -> None:
    if world.handles:
        world.handles.pop().remove()


def _set_data(world: World) -> None:
    weight = _layer(world).shared.weight
    weight.data = weight.data.clone() * 0.9


def _swap(world: World) -> None:
    bias = world.second[2].bias
    with torch.no_grad():
        bias.set_(bias.detach().clone() + 0.1)


def _write(world: World) -> None:
    with torch.no_grad():
        _layer(world).shared.weight.mul_(0.9)


def _freeze(world: World) -> None:
    weight = world.second[2].weight
    weight.requires_grad_(not weight.requires_grad)


def _replace_module(world: World) -> None:
    world.second[1] = _nn.Dropout(0.5) if isinstance(world.second[1], _nn.Tanh) else _nn.Tanh()


def _turn(world: World) -> None:
    world.acts.append(world.acts.pop(0))


def _settings(world: World) -> None:
    _layer(world)._settings = types.SimpleNamespace(by=_layer(world)._settings.by + 0.5)


class Doubled(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """A parametrization of a weight."""

    def forward(self, weight: Any) -> Any:
        return weight * 2


def _parametrize(world: World) -> None:
    layer, parametrize = world.second[2], torch.nn.utils.parametrize
    if parametrize.is_parametrized(layer):
        parametrize.remove_parametrizations(layer, "bias", leave_parametrized=False)
    else:
        parametrize.register_parametrization(layer, "bias", Doubled())


def _exchange(world: World) -> None:
    bias = _layer(world).shared.bias
    made = _nn.Parameter(bias.detach() + 0.1, bias.requires_grad)
    if bias.grad is None and not bias._backward_hooks:
        torch.utils.swap_tensors(bias, made)


def _transpose(world: World) -> None:
    weight = _layer(world).shared.weight
    weight.data = weight.data.t().clone().t()


def _buffer(world: World) -> None:
    layer = _layer(world)
    layer.seen = layer.seen + 0.1


def _hook_before(world: World) -> None:
    by = world.by
    hook = world.second.register_forward_pre_hook(lambda module, given: (given[0] * by["by"],))
    world.handles.append(hook)


def _of(path: str, change: Callable[[Any], Any]) -> Callable[[World], None]:
    """A change of a number."""

    def apply(world: World) -> None:
        *names, last = path.split(".")
        held: Any = world
        for name in names:
            held = held[int(name)] if name.isdigit() else getattr(held, name)
        setattr(held, last, change(getattr(held, last)))

    return apply


CHANGES: list[Callable[[World], None]] = [
    *(_replace_weight, _hook_module, _hook_weight, _unhook, _set_data, _swap, _write, _freeze),
    *(_replace_module, _turn, _settings, _parametrize, _exchange, _transpose, _buffer),
    _hook_before,
    lambda world: _load(world, True),
    lambda world: _load(world, False),
    lambda world: world.by.update(by=world.by["by"] + 1),
    lambda world: world.optimizer.param_groups[0].update(lr=0.01),
    lambda world: world.optimizer.zero_grad(),
    lambda world: world.first.train(not world.first.training),
    lambda world: world.second[1].train(not world.second[1].training),
    _of("state.by", lambda by: by + 1),
    _of("state.limit", lambda limit: 2.0 - limit),
    _of("state.fails", lambda fails: not fails),
    _of("hook.by", lambda by: by + 0.25),
    _of("hook.counts", lambda counts: not counts),
    _of("first.0.by", lambda by: by + 0.5),
    _of("first.0._by", lambda by: by + 0.5),
    _of("first.0._settings.by", lambda by: by + 0.5),
    _of("first.2.momentum", lambda by: 0.3 - by if by else 0.1),
]
"""Changes between calls."""


@contextlib.contextmanager
def _autocast() -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        yield


def _called(function: Any, x: Any, seed: int, *, thread: bool) -> Any:
    found: list[Any] = []
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def call() -> None:
        with torch.set_grad_enabled(modes[0]), torch.inference_mode(modes[1]):
            torch.manual_seed(seed)
            try:
                found.append(function(x))
            except ValueError as error:
                found.append(str(error))

    if thread:
        other = threading.Thread(target=call)
        other.start()
        other.join()
    else:
        call()
    return found[0]


def alike(one: Any, other: Any) -> bool:
    """True if two values are equal bit by bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and torch.equal(one.detach().nan_to_num(), other.detach().nan_to_num())
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and bool(one == other or one != one)


def _require(found: Any, wanted: Any, log: list[str]) -> None:
    if not alike(found, wanted):
        raise AssertionError("\n".join([*log, f"{found}, and eagerly {wanted}"]))


def run_world(seed: int, where: str, graphed: Callable[..., Any], *, turns: int = 16) -> int:
    """Runs a world; returns the number of replays.  Raises AssertionError with what was done."""
    made: list[Any] = []

    def keep(function: Any, **options: Any) -> Any:
        made.append(graphed(function, **options))
        return made[-1]

    ours = World(random.Random(seed), where, keep)
    theirs = World(random.Random(seed), where, lambda function, **options: function)
    draw, log = random.Random(seed + 1), [f"functions: {ours.makes}"]
    among = draw.sample(range(len(CHANGES)), 5)
    modes: list[Any] = [torch.no_grad] * 6 + [torch.enable_grad, _autocast]
    if "training" not in ours.makes:  # inference mode keeps tensors that no gradient may need
        modes.append(torch.inference_mode)
    for number in range(turns):
        if draw.random() < 0.5:
            change = draw.choice(among)
            log.append(f"change {change}: {getattr(CHANGES[change], '__name__', '')}")
            for world in (ours, theirs):
                CHANGES[change](world)
        at, rows = draw.randrange(3), draw.choice([3, 3, 3, 5])
        mode, thread = draw.choice(modes), draw.random() < 0.1
        log.append(f"{number}: {ours.makes[at]} ({rows} rows, {mode.__name__}, {thread=})")
        for call in range(draw.randint(1, 6)):
            x = torch.randn(rows, 4, device=where)
            with mode():
                found = _called(ours.functions[at], x.clone(), call, thread=thread)
                wanted = _called(theirs.functions[at], x.clone(), call, thread=thread)
                _require(found, wanted, [*log, f"call {call}"])
            for place, pair in enumerate(zip(ours.content(), theirs.content(), strict=True)):
                _require(*pair, [*log, f"call {call}, {place} of what is changed"])
    return sum(step.statistics().replays for step in made)
