"""Training steps: a graphed step has the effects of an eager one, whatever changes between calls.

On the CPU captures are tapes, and `on_cpu_steps` makes optimisers count as they do beside a GPU.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from ostinato.interop.torch import waits
from tests.interop.tape import OnCpu  # needs torch

Make = Callable[..., Any]
_nn: Any = torch.nn


def layered() -> Any:
    return _nn.Sequential(
        _nn.Linear(4, 8), _nn.BatchNorm1d(8), _nn.SiLU(), _nn.Dropout(0.25), _nn.Linear(8, 2)
    )


class Attending(_nn.Module):  # type: ignore[misc]  # torch has no type for it
    """A model that draws random numbers inside its attention, twice, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        layer = _nn.TransformerEncoderLayer(16, 2, 16, dropout=0.25, batch_first=True)
        self.first = _nn.Linear(4, 16)
        self.encoder = _nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = _nn.Linear(16, 2)

    def forward(self, x: Any) -> Any:
        return self.last(self.encoder(self.first(x)[:, None].expand(-1, 6, -1))[:, 0])


class Masking(_nn.Module):  # type: ignore[misc]  # torch has no type for it
    """A graph network, which chooses its edges by a mask: an operation that waits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = _nn.Linear(4, 8), _nn.Linear(8, 2)
        draw = torch.Generator().manual_seed(0)
        self.register_buffer("edges", torch.randint(0, 8, (2, 40), generator=draw))

    def forward(self, x: Any) -> Any:
        count = len(x)
        source, target = self.edges[:, self.edges[0] != self.edges[1]] % count
        # No sums in index_add, whose order differs from run to run on a GPU.
        linked = torch.zeros(count, count, device=x.device).index_put(
            (target, source), x.new_ones(())
        )
        x = linked @ self.first(x) / linked.sum(1, keepdim=True).clamp(min=1)
        return self.last(_nn.functional.mish(x))


class Trained:
    """A small model with an optimiser, a scheduler and a scaler, and the step that trains it."""

    def __init__(
        self,
        where: str,
        optimizer: str = "sgd",
        model: Callable[[], Any] = layered,
        *,
        scales: bool = False,
    ) -> None:
        torch.manual_seed(1)
        self.where, self.clip = where, 1.0
        self.model = model().to(where)
        *_, self.last = [each for each in self.model.modules() if isinstance(each, _nn.Linear)]
        self.unused = _nn.Parameter(torch.ones(2, device=where))
        parameters = [*self.model.parameters(), self.unused]
        make: dict[str, Callable[[], Any]] = {
            "sgd": lambda: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
            "adam": lambda: torch.optim.Adam(parameters, lr=0.02),
            "adamw": lambda: torch.optim.AdamW(parameters, lr=0.02, foreach=False),
            "lion": lambda: Lion(parameters, {"lr": 0.01}),
            "amsgrad": lambda: torch.optim.Adam(
                parameters, lr=0.02, weight_decay=0.1, amsgrad=True, maximize=True
            ),
            "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=0.02, momentum=0.5),
            "adagrad": lambda: torch.optim.Adagrad(parameters, lr=0.02, lr_decay=0.1),
            "adadelta": lambda: torch.optim.Adadelta(parameters),
            "adamax": lambda: torch.optim.Adamax(parameters, lr=0.02),
            "nadam": lambda: torch.optim.NAdam(parameters, lr=0.02),
            "radam": lambda: torch.optim.RAdam(parameters, lr=0.02),
        }
        self.optimizer = make[optimizer]()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.8)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=1)
        self.scaler = torch.amp.GradScaler(
            where, init_scale=64.0, growth_interval=3, enabled=scales
        )
        self.average = torch.zeros_like(next(self.model.parameters()))

    def state(self) -> list[Any]:
        """Returns all that a step may change."""
        held = [self.model, self.optimizer, self.scheduler, self.plateau, self.scaler]
        found: list[Any] = [copy.deepcopy(each.state_dict()) for each in held]
        found += [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return [*found, self.average.clone(), torch.get_rng_state()]


class Lion(torch.optim.Optimizer):  # type: ignore[misc]  # torch has no type for it
    """An optimiser of the user's, which counts its steps in Python."""

    count = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"] / self.count)


Step = Callable[[Any, Any], Any]


def plainly(t: Trained) -> Step:
    def step(x: Any, y: Any) -> Any:
        t.optimizer.zero_grad()
        loss = _nn.functional.mse_loss(t.model(x), y)
        loss.backward()
        t.optimizer.step()
        return loss.detach()

    return step


def scheduled(t: Trained) -> Step:
    def step(x: Any, y: Any) -> Any:
        loss = _nn.functional.mse_loss(t.model(x), y)
        loss.backward()
        t.optimizer.step()
        t.scheduler.step()
        t.optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return step


def by_plateau(t: Trained) -> Step:
    def step(x: Any, y: Any) -> Any:
        loss = _nn.functional.mse_loss(t.model(x), y)
        loss.backward()
        t.optimizer.step()
        t.plateau.step(loss.detach())
        t.optimizer.zero_grad()
        return {"loss": loss.item()}

    return step


def scaled(t: Trained) -> Step:
    def step(x: Any, y: Any) -> Any:
        t.optimizer.zero_grad()
        loss = _nn.functional.mse_loss(t.model(x), y)
        t.scaler.scale(loss).backward()
        t.scaler.unscale_(t.optimizer)
        _nn.utils.clip_grad_norm_(t.model.parameters(), t.clip)
        t.scaler.step(t.optimizer)
        t.scaler.update()
        return loss.detach()

    return step


def accumulated(t: Trained) -> Step:
    def step(x: Any, y: Any) -> Any:
        t.optimizer.zero_grad()
        total = torch.zeros((), device=x.device)
        for part, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = _nn.functional.mse_loss(t.model(part), wanted) / 2
            loss.backward()
            total += loss.detach()
        t.optimizer.step()
        with torch.no_grad():
            t.average.mul_(0.9).add_(next(t.model.parameters()), alpha=0.1)
        return total

    return step


def stopped_by_nan(t: Trained) -> Step:
    def step(x: Any, y: Any) -> Any:
        loss = _nn.functional.mse_loss(t.model(x), y)
        if not torch.isfinite(loss):
            raise FloatingPointError("the loss is not finite")
        loss.backward()
        t.optimizer.step()
        t.optimizer.zero_grad()
        return loss.detach()

    return step


STEPS = [plainly, scheduled, by_plateau, scaled, accumulated]
KINDS = ["sgd", "adam", "adamw", "lion"]


@pytest.fixture(autouse=True)
def on_cpu_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a tape refuse the counters of optimisers, which lie on the CPU beside a GPU."""
    refusal, watch = OnCpu.refusal, OnCpu.watch
    counters: list[Any] = []

    def watched(self: Any, value: Any, /) -> Any:
        found = watch(self, value)
        one = getattr(found, "object", None)
        if isinstance(one, torch.optim.Optimizer):
            counters.append(one.state)
        return found

    def refused(self: Any, tensor: Any, /) -> str:
        if any(tensor is each.get("step") for state in counters for each in state.values()):
            return "a counter on the CPU"
        return refusal(self, tensor)

    monkeypatch.setattr(OnCpu, "watch", watched)
    monkeypatch.setattr(OnCpu, "refusal", refused)


def same(one: Any, other: Any) -> bool:
    """True if two states are equal, tensors bit for bit (NaN where NaN is)."""
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5)))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other or (one != one and other != other))  # NaN is NaN


def trained(
    make: Make,
    where: str,
    writer: Callable[[Trained], Step],
    kind: str = "sgd",
    *,
    calls: int = 24,
    between: Callable[[Trained, int], None] = lambda trained, call: None,
    rows: Callable[[int], int] = lambda call: 8,
    replays: int = 10,
    model: Callable[[], Any] = layered,
    **options: Any,
) -> Any:
    """Trains by graphed and by eager steps; each call must do the same.  `between` is called before
    each call.  Returns the graphed step."""
    both = [Trained(where, kind, model, scales=writer is scaled) for _ in range(2)]
    steps = [make(writer(both[0]), **options), writer(both[1])]
    random_states = [torch.get_rng_state()] * 2
    for call in range(calls):
        draw = torch.Generator().manual_seed(call)
        x, y = (torch.randn(rows(call), n, generator=draw) for n in (4, 2))
        found = []
        for side, (one, step) in enumerate(zip(both, steps, strict=True)):
            torch.set_rng_state(random_states[side])
            torch.manual_seed(100 + call)
            between(one, call)
            try:
                result: Any = step(x.to(where), y.to(where))
            except FloatingPointError as error:
                result = str(error)
            found.append((result, one.state()))
        (ours, our_state), (theirs, their_state) = found
        assert same(ours, theirs), f"call {call}: {ours} {theirs}\n{steps[0].explain()}"
        for index, (mine, wanted) in enumerate(zip(our_state, their_state, strict=True)):
            assert same(mine, wanted), f"call {call}, state {index}\n{steps[0].explain()}"
    assert steps[0].statistics().replays >= replays, steps[0].explain()
    return steps[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writer", STEPS)
def test_a_whole_step(writer: Any, kind: str, make_chained: Make, where: str) -> None:
    trained(make_chained, where, writer, kind)


IN_THE_GRAPH = ["sgd", "adam", "adamw", "amsgrad", "rmsprop", "adagrad", "adadelta", "adamax"]


@pytest.mark.parametrize("kind", [*IN_THE_GRAPH, "nadam", "radam"])
def test_a_rate_that_is_scheduled(kind: str, make_chained: Make, where: str) -> None:
    """Rates, momenta and counts are numbers in a graph with the step; NAdam and RAdam decide by
    them, or keep others on the CPU, and kernels without `foreach` divide by other numbers."""

    def writer(t: Trained) -> Step:
        if kind in ("sgd", "adam", "adamw"):
            t.scheduler = torch.optim.lr_scheduler.OneCycleLR(t.optimizer, 0.1, total_steps=60)
        return scheduled(t)

    step = trained(make_chained, where, writer, kind)
    found = step.explain().rpartition("steps of Python at ")[2]
    inside = kind in IN_THE_GRAPH and (kind, where) != ("adamw", "cuda")
    assert ("numbers of Python for" in found) is inside, step.explain()


def test_counts_that_the_user_sets(make_chained: Make, where: str) -> None:
    def between(t: Trained, call: int) -> None:
        counts = [state["step"] for state in t.optimizer.state.values()]
        for count in counts if call == 10 else counts[:1] if call == 16 else ():
            count.fill_(3.0)
        if call == 20:
            for state in t.optimizer.state.values():
                state["step"] = torch.tensor(7.0)

    trained(make_chained, where, plainly, "adam", calls=30, between=between)


def test_a_rate_that_becomes_a_tensor(make_chained: Make, where: str) -> None:
    def between(t: Trained, call: int) -> None:
        if call == 10:
            t.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
        if call > 20:
            t.optimizer.param_groups[0]["lr"].mul_(0.9)

    trained(make_chained, where, plainly, "adam", calls=30, between=between, replays=8)


def test_a_hook_of_a_step(make_chained: Make, where: str) -> None:
    """With a hook the step is called in Python."""

    def between(t: Trained, call: int) -> None:
        def note(*args: Any) -> None:
            t.average.add_(1)

        if call == 9:
            t.hook = t.optimizer.register_step_post_hook(note)  # type: ignore[attr-defined]
        if call == 20:
            t.hook.remove()  # type: ignore[attr-defined]

    trained(make_chained, where, plainly, "adam", calls=30, between=between)


@pytest.mark.parametrize("draws", [False, True])
def test_a_capture_that_breaks_after_a_step(draws: bool, make_chained: Make, where: str) -> None:
    """No step counts twice, if the rest of the call or all of it runs eagerly then."""

    def writer(t: Trained) -> Step:
        t.model[3].p = 0.25 * draws
        step = plainly(t)

        def also(x: Any, y: Any) -> Any:
            loss = step(x, y)
            square = t.last.weight @ t.last.weight.T
            return loss + torch.linalg.eigh(square.detach())[0].sum()

        return also

    trained(make_chained, where, writer, "adam", replays=8 if where == "cpu" else 0)


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_value_that_decides_beside_a_step(place: str, make_chained: Make, where: str) -> None:
    """Another value takes back the step of the replay, if there was one yet."""

    def writer(t: Trained) -> Step:
        step = plainly(t)

        def also(x: Any, y: Any) -> Any:
            if place == "before" and len(torch.unique(t.last.bias.detach() > 50)) > 1:
                raise FloatingPointError("too much")
            loss = step(x, y)
            if place == "after" and t.last.bias.detach()[0] > 50:
                raise FloatingPointError("too much")
            return loss

        return also

    def between(t: Trained, call: int) -> None:
        with torch.no_grad():
            t.last.bias[0] = 100.0 if call in (12, 17) else 0.25

    least = 10 if where == "cpu" else 0
    trained(make_chained, where, writer, "adam", calls=30, between=between, replays=least)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_random_numbers_inside_attention(kind: str, make_chained: Make, where: str) -> None:
    """Its backward reads the seed of the forward, which the graph itself has written."""
    trained(make_chained, where, plainly, kind, model=Attending)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_model_that_waits(kind: str, make_chained: Make, where: str) -> None:
    trained(make_chained, where, plainly, kind, model=Masking)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_backward_writes_only_memory_of_its_graph(
    kind: str, make_chained: Make, where: str
) -> None:
    """A backward allocates in a thread of its own."""
    others: list[Any] = []

    def between(t: Trained, call: int) -> None:
        if call == 8:  # the graphs are made
            sizes = [2**n for n in range(4, 20)] * 8
            others.extend(torch.full((size,), 7.0, device=where) for size in sizes)
        assert all(bool((other == 7).all()) for other in others), call

    def writer(t: Trained) -> Step:
        t.model[3].p = 0.0  # no random numbers, for which torch itself captures
        return plainly(t)

    trained(make_chained, where, writer, kind, between=between)


def test_parts_that_hold_much(
    make_chained: Make, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part is ended where it holds too much; not in a backward, which has its own thread."""
    monkeypatch.setattr(waits, "MOST_HELD", 256)
    trained(make_chained, where, plainly, "adam")


class Rounded(torch.autograd.Function):  # type: ignore[misc]  # torch has no type for it
    """Waits in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient / 2 if float(gradient.abs().max()) > 100 else gradient


def test_a_backward_that_waits(make_chained: Make, where: str) -> None:
    def writer(t: Trained) -> Step:
        def step(x: Any, y: Any) -> Any:
            t.optimizer.zero_grad()
            loss = _nn.functional.mse_loss(Rounded.apply(t.model(x)), y)
            loss.backward()
            t.optimizer.step()
            return loss.detach()

        return step

    trained(make_chained, where, writer, "adam", replays=0)


def test_a_rate_that_changes_at_each_call(make_chained: Make, where: str) -> None:
    def between(t: Trained, call: int) -> None:
        for group in t.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.1 / (call + 1), 0.01 * call

    trained(make_chained, where, plainly, between=between, replays=8)


def test_a_scale_that_overflows(make_chained: Make, where: str) -> None:
    def between(t: Trained, call: int) -> None:
        if call in (9, 15):
            with torch.no_grad():
                t.model[0].weight[0, 0] = float("inf") if call == 9 else 0.5

    trained(make_chained, where, scaled, "adam", between=between)


def test_a_clip_that_changes(make_chained: Make, where: str) -> None:
    def between(t: Trained, call: int) -> None:
        t.clip = (1.0, 0.01)[call % 2]

    trained(make_chained, where, scaled, "adam", calls=36, between=between)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_checkpoint_is_loaded_into_a_running_step(
    kind: str, make_chained: Make, where: str
) -> None:
    kept: dict[int, Any] = {}

    def between(t: Trained, call: int) -> None:
        held = [t.model, t.optimizer, t.scheduler]
        if call == 5:
            kept[id(t)] = [copy.deepcopy(each.state_dict()) for each in held]
        if call == 14:
            for each, state in zip(held, kept[id(t)], strict=True):
                each.load_state_dict(state)

    trained(make_chained, where, scheduled, kind, between=between)


def test_another_batch_size(make_chained: Make, where: str) -> None:
    trained(make_chained, where, scheduled, "adam", calls=40, rows=lambda call: (8, 6)[call % 2])


def test_layers_that_are_frozen_and_modes(make_chained: Make, where: str) -> None:
    def between(t: Trained, call: int) -> None:
        t.model[0].requires_grad_(call % 16 < 8)
        t.model[1].train(call % 32 < 16)

    trained(make_chained, where, scheduled, "adam", calls=48, between=between)


def test_parameters_that_are_added(make_chained: Make, where: str) -> None:
    def between(t: Trained, call: int) -> None:
        if call == 11:
            more = _nn.Parameter(torch.ones(3, device=t.where))
            t.optimizer.add_param_group({"params": [more], "lr": 0.5})

    trained(make_chained, where, plainly, "adam", calls=30, between=between)


def test_a_parameter_in_the_place_of_another(make_chained: Make, where: str) -> None:
    """It has the memory of the one before, so the graph would fit."""
    torch.manual_seed(0)
    ours = _nn.Linear(3, 1).to(where)
    theirs = copy.deepcopy(ours)

    def made(model: Any) -> Callable[[Any], Any]:
        def function(x: Any) -> Any:
            model.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss.detach()

        return function

    step = make_chained(made(ours))
    if where == "cpu":
        step._maker._moved_memory = lambda captured, now: []  # as on a GPU: none has moved
    for call in range(9):
        if call == 5:
            for model in (ours, theirs):
                before = model.weight
                model.weight = _nn.Parameter(before.data)
                model.weight.grad = before.grad.clone()
        x = torch.full((2, 3), float(call), device=where)
        assert torch.equal(step(x), made(theirs)(x))
        assert torch.equal(ours.weight.grad, theirs.weight.grad), call
    assert step.statistics().replays > 4, step.explain()


def test_a_second_optimizer(make_chained: Make, where: str) -> None:
    def writer(t: Trained) -> Step:
        other = torch.optim.Adam(t.model[0].parameters(), lr=0.01)
        first = plainly(t)

        def step(x: Any, y: Any) -> Any:
            loss = first(x, y)
            other.step()
            return loss

        return step

    trained(make_chained, where, writer)


def test_a_closure(make_chained: Make, where: str) -> None:
    def writer(t: Trained) -> Step:
        def step(x: Any, y: Any) -> Any:
            def closure() -> Any:
                t.optimizer.zero_grad()
                loss = _nn.functional.mse_loss(t.model(x), y)
                loss.backward()
                return loss

            return t.optimizer.step(closure).detach()

        return step

    trained(make_chained, where, writer)


def test_gradients_of_several_calls(make_chained: Make, where: str) -> None:
    """The optimiser is outside of the step, which adds to the gradients of the calls before."""

    def writer(t: Trained) -> Step:
        def step(x: Any, y: Any) -> Any:
            loss = _nn.functional.mse_loss(t.model(x), y)
            loss.backward()
            return loss.detach()

        return step

    def between(t: Trained, call: int) -> None:
        if call % 3 == 0:
            t.optimizer.step()
            t.optimizer.zero_grad()

    trained(make_chained, where, writer, calls=30, between=between)


def test_an_error_in_a_step_of_python(make_chained: Make, where: str) -> None:
    def between(t: Trained, call: int) -> None:
        def fail(*args: Any) -> None:
            raise FloatingPointError("not today")

        if call in (8, 16):
            t.hook = t.optimizer.register_step_pre_hook(fail)  # type: ignore[attr-defined]
        if call in (9, 17):
            t.hook.remove()  # type: ignore[attr-defined]

    trained(make_chained, where, scheduled, "adam", between=between)


def test_an_error_keeps_nothing_alive(make_chained: Make, where: str) -> None:
    """Its frames hold autograd's nodes, which remember the stream of captures."""
    t = Trained(where, "adam")
    step = make_chained(stopped_by_nan(t))
    alive: list[Any] = []
    for call in range(16):
        with torch.no_grad():
            t.last.bias[0] = float("nan") if call in (1, 8, 11, 12) else 0.5
        try:
            step(torch.ones(8, 4, device=where), torch.ones(8, 2, device=where))
        except FloatingPointError as error:
            place = error.__traceback__
            while place is not None and place.tb_next is not None:
                place = place.tb_next
            assert place is not None
            alive.append(weakref.ref(place.tb_frame.f_locals["loss"]))
            del place
    assert [loss() for loss in alive] == [None] * 4, step.explain()


def test_a_value_that_decides(make_chained: Make, where: str) -> None:
    def between(t: Trained, call: int) -> None:
        with torch.no_grad():
            t.model[4].bias[0] = float("nan") if call == 12 else 0.25

    trained(make_chained, where, stopped_by_nan, calls=30, between=between)


def test_a_step_whose_rate_is_read_is_never_stale(make_chained: Make, where: str) -> None:
    def writer(t: Trained) -> Step:
        step = scheduled(t)

        def also(x: Any, y: Any) -> Any:
            return (
                step(x, y),
                t.scheduler.get_last_lr()[0],
                x.sum() * t.optimizer.param_groups[0]["lr"],
            )

        return also

    trained(make_chained, where, writer, replays=0)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("writer", STEPS)
def test_checks_take_back_what_a_step_did(
    writer: Any, kind: str, make_chained: Make, where: str
) -> None:
    step = trained(make_chained, where, writer, kind, verify=3)
    assert step.statistics().verified > 2, step.explain()


@pytest.mark.parametrize("seed", range(6))
def test_random_training(seed: int, make_chained: Make, where: str) -> None:
    draw = random.Random(seed)
    acts = ["", "", "", "rate", "eval", "freeze", "load", "none", "nan"]
    plan = [draw.choice(acts) for _ in range(40)]
    kept: dict[int, Any] = {}

    def between(t: Trained, call: int) -> None:
        what = plan[call]
        if what == "rate":
            t.optimizer.param_groups[0]["lr"] *= 0.9
        elif what == "eval":
            t.model.train(not t.model.training)
        elif what == "freeze":
            t.last.requires_grad_(not t.last.weight.requires_grad)
        elif what == "nan":  # for one call, of the steps that stop at it
            with torch.no_grad():
                t.last.bias[0] = 0.5 if t.last.bias[0].isnan() else float("nan")
        elif what == "load":
            now = copy.deepcopy(t.optimizer.state_dict())
            t.optimizer.load_state_dict(kept.get(id(t), now))
            kept[id(t)] = now
        elif what == "none":
            t.optimizer.zero_grad()

    writer, kind = draw.choice([*STEPS, stopped_by_nan]), draw.choice(KINDS)
    model = draw.choice([layered, Attending, Masking])
    sizes = [draw.choice([8, 8, 8, 6]) for _ in range(40)]
    trained(
        make_chained,
        where,
        writer,
        kind,
        calls=40,
        between=between,
        rows=sizes.__getitem__,
        replays=0,
        model=model,
        **draw.choice([{}, {"verify": 4}]),
    )


def test_a_step_that_returns_a_loss_with_gradients(make_chained: Make, where: str) -> None:
    def writer(t: Trained) -> Step:
        def step(x: Any, y: Any) -> Any:
            t.optimizer.zero_grad()
            loss = _nn.functional.mse_loss(t.model(x), y)
            loss.backward()
            t.optimizer.step()
            t.scheduler.step()
            return loss

        return step

    step = trained(make_chained, where, writer, replays=0, gradients="replay")
    assert "detach" in step.explain(), step.explain()
