"""What `graphed` does with torch's values, without a GPU: a capture here is a host function that
computes again and copies into the first result.  The rest is as in `interop.torch`."""

from __future__ import annotations

import collections
import contextlib
import gc
import random
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import ClosedError, EagerRunError, InputError
from ostinato.interop.reading import recheck
from ostinato.interop.reading.library import GraphedOptions
from ostinato.interop.reading.padding import Padding
from ostinato.interop.reading.recheck import Checks

torch: Any = pytest.importorskip("torch")


@pytest.fixture
def make(host_device: Device) -> Iterator[Callable[..., Any]]:
    from tests.interop.tape import OnCpu, on_cpu

    made: list[Any] = []

    def build(function: Any, **options: Any) -> Any:
        made.append(on_cpu(OnCpu(host_device), function, **options))
        return made[-1]

    yield build
    for one in made:
        one.close()


def check(step: Any, function: Any, *inputs: Any) -> None:
    for x in inputs:
        assert torch.equal(step(x), function(x))


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.0))
        self.scale = 1.0

    def forward(self, x: Any) -> Any:
        return self.inner(x) * self.scale


def test_nothing_points_weakly_at_an_event(make: Any) -> None:
    """torch frees its events without clearing weak references: the next collection of garbage that
    met one ended the process."""
    if not torch.backends.cuda.is_built():
        pytest.skip("torch without CUDA has no events")
    event, other = torch.cuda.Event(), torch.cuda.Event()
    function = lambda x: x * 2 if event is not other else x  # noqa: E731
    step = make(function)
    check(step, function, *torch.randn(4, 2, 4))
    assert step.statistics().replays == 3, step.explain()
    assert (weakref.getweakrefcount(event), weakref.getweakrefcount(other)) == (0, 0)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("inference", [False, True])
def test_in_place(make: Any, inference: bool, first: int) -> None:
    """Also writes that change nothing before the fourth call."""
    with torch.inference_mode(inference):
        step = make(lambda x, y: (x.add_(y).sum(),))
        x, y = torch.zeros(4), torch.zeros(4)
        for number in range(6):
            y.fill_(number >= first)
            (total,) = step(x, y)
            count = max(0, number + 1 - first)
            assert x.tolist() == [count] * 4 and float(total) == 4 * count


def test_a_failed_check_runs_no_host_functions_again(host_device: Device) -> None:
    """Nothing puts back what they do: here, all work of the graph."""
    from tests.interop.tape import on_tape

    hidden, state = torch.full((4096,), 2.0).numpy(), torch.zeros(4)

    def work(x: Any) -> Any:
        state.add_(1)
        return x * float(hidden[0])

    step, x = on_tape(host_device, work, verify=1), torch.arange(4.0)
    for time in range(1, 6):
        if time == 4:
            hidden[:] = 3
        assert torch.equal(step(x), (2 if time < 4 else 3) * x)
        assert state.tolist() == [time] * 4
    (line,) = step.statistics().keys
    assert "a check failed" in line.reason and "first node" not in line.reason
    step.close()


def test_registered_containers(make: Any) -> None:
    def f(pair: Any) -> Any:
        return torch.max(pair[0], 1), {"a": pair[1] + 1, "b": torch.Size([1])}

    step = make(f)
    for _ in range(4):
        a, b = torch.randn(3, 3), torch.randn(2)
        (values, places), rest = step((a, b))
        assert torch.equal(values, a.max(1).values) and torch.equal(places, a.max(1).indices)
        assert torch.equal(rest["a"], b + 1) and rest["b"] == torch.Size([1])
    assert step.statistics().replays == 3, step.explain()
    assert isinstance(step((a, b))[0], torch.return_types.max)


def test_results_of_transformers(make: Any) -> None:
    """They are the caller's own."""
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def f(x: Any) -> Any:
        return outputs.CausalLMOutputWithPast(logits=x * 2, hidden_states=(x, x + 1))

    step = make(f)
    for _ in range(4):
        x = torch.randn(3)
        found, eager = step(x), f(x)
        assert isinstance(found, outputs.CausalLMOutputWithPast) and found.loss is None
        assert vars(found).keys() == vars(eager).keys() and [*found] == [*eager]
        assert found.logits is found["logits"] and torch.equal(found.to_tuple()[0], x * 2)
        assert torch.equal(found["hidden_states"][1], x + 1)
        found["logits"] = found.loss = None
        found.note = "mine"
    assert step.statistics().replays == 3, step.explain()


def test_dicts_that_hold_more_than_their_children(make: Any) -> None:
    class Output(collections.OrderedDict):  # type: ignore[type-arg]
        pass

    def flat(value: Any) -> Any:
        return [*value.values()], (tuple(value), value.words)

    def built(values: Any, context: Any) -> Any:
        made = Output(zip(context[0], values, strict=True))
        made.words = [*context[1]]
        return made

    torch.utils._pytree.register_pytree_node(Output, flat, built)
    try:

        def f(x: Any) -> Any:
            out = Output(a=x + 1)
            out.words = ["one"]
            return out

        step = make(f)
        for _ in range(4):
            found = step(torch.ones(2))
            assert found["a"].tolist() == [2, 2] and found.words == ["one"]
            found.words.append("two")
        assert step.statistics().replays == 3, step.explain()
    finally:
        torch.utils._pytree._deregister_pytree_node(Output)


def test_dynamic_axes(make: Any) -> None:
    step = make(
        lambda x, y: (x * 2, y.sum(-1)),
        padding=Padding({"x": 1, "y": 0}, ost.PowersOfTwo(16)),
        verify="first",
    )
    for n in (5, 6, 8, 7):
        x, y = torch.randn(2, n), torch.randn(n, 3)
        a, b = step(x, y)
        assert torch.equal(a, x * 2) and torch.equal(b, y.sum(-1))
    assert step.statistics().captures == 1 and step.statistics().replays >= 3, step.explain()


def test_what_fails_names_the_line(make: Any) -> None:
    step: Any = None

    def f(x: Any) -> Any:
        if step._library.inside:
            raise RuntimeError("operation not permitted when stream is capturing")  # here
        return x * 2

    step = make(f, guard=False)
    check(step, lambda x: x * 2, *[torch.randn(3) for _ in range(3)])
    reason = step.statistics().keys[0].reason
    assert "not permitted" in reason and "test_graphed_torch_cpu.py" in reason and "here" in reason


def test_gradients(make: Any) -> None:
    model = Net()
    with torch.enable_grad():
        step = make(model)
        with pytest.raises(InputError, match="no_grad"):
            step(torch.randn(2, 4))
        step = make(model, gradients="eager")
        for _ in range(3):
            step(torch.randn(2, 4)).sum().backward()
    assert model.inner[0].weight.grad is not None
    check(step, model, *[torch.randn(2, 4) for _ in range(3)])
    assert step.statistics().replays == 2, step.explain()


def test_differences_are_words() -> None:
    from ostinato.interop.torch.library import Torch

    difference = Torch.difference
    a = torch.arange(6.0).view(2, 3)
    b = a.clone()
    b[1, 1] = 9
    assert difference(None, a, a.clone(), None) == ""
    assert "[1, 1]: 4.0 against 9.0" in difference(None, a, b, None)
    assert "1 of 6" in difference(None, a, b, (1e-3, 1e-3))
    assert difference(None, a, a + 1e-7, (1e-3, 1e-3)) == ""
    nan = torch.full((2,), float("nan"))
    assert difference(None, nan, nan.clone(), None) == ""
    assert difference(None, torch.tensor(1), torch.tensor(2), None)
    assert difference(None, torch.tensor(True), torch.tensor(True), None) == ""
    assert "shape" in difference(None, a, a.view(3, 2), None)


def test_attributes_that_are_equal_and_not_the_same(make: Any) -> None:
    class Scaled(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.by: Any = 2

        def forward(self, x: Any) -> Any:
            return x * self.by

    model = Scaled()
    step = make(model)
    x = torch.arange(4)
    for model.by in (2, 2, 2.0, 2.0, 2, 2.0, True, 1, 1.0, True):
        found = step(x)
        assert found.dtype == model(x).dtype and torch.equal(found, model(x))
    del model.by
    with pytest.raises(AttributeError):
        step(x)
    model.by = 3
    check(step, model, x, x, x)


@pytest.mark.skipif(not recheck.compiled(), reason="the extension was not built")
@pytest.mark.parametrize("seed", range(4))
def test_the_short_way_takes_no_call_that_the_key_tells_apart(make: Any, seed: int) -> None:
    rng = random.Random(seed)
    net = Net().eval()
    inner, buffers = net.inner, [torch.ones(4), torch.zeros(4)]
    net.register_buffer("shift", buffers[0])
    linear = inner[0]
    parameters = [linear.weight, torch.nn.Parameter(torch.ones(4, 4))]
    data = [linear.weight.data, torch.ones(4, 4), torch.ones(4, 4).t()]
    handles: list[Any] = []

    def hook(*args: Any) -> None: ...

    def mode(name: str) -> None:
        if name == "grad":
            torch.set_grad_enabled(not torch.is_grad_enabled())
        elif name == "precision":
            torch.set_float32_matmul_precision(rng.choice(["highest", "high", "medium"]))
        elif name == "type":
            torch.set_default_dtype(rng.choice([torch.float32, torch.float64]))
        else:
            torch.use_deterministic_algorithms(rng.random() < 0.5)

    def unhook() -> None:
        while handles:
            handles.pop().remove()

    changes: list[Callable[[], Any]] = [
        lambda: setattr(linear, "weight", rng.choice(parameters)),
        lambda: setattr(linear.weight, "data", rng.choice(data)),
        lambda: setattr(net, "shift", rng.choice(buffers)),
        lambda: net.register_buffer("late", rng.choice([None, *buffers])),
        lambda: net.train(rng.random() < 0.5),
        lambda: inner[1].train(rng.random() < 0.5),
        lambda: setattr(inner[1], "p", rng.choice([0.0, 0.5, 0])),
        lambda: setattr(net, "scale", rng.choice([1, 1.0, True, 2.0])),
        lambda: inner.__setitem__(0, rng.choice([linear, torch.nn.Linear(4, 4)])),
        lambda: setattr(inner, "late", torch.nn.Identity()),
        lambda: inner._modules.pop("late", None),
        lambda: handles.append(rng.choice([net, linear]).register_forward_hook(hook)),
        lambda: handles.append(linear.register_forward_pre_hook(hook)),
        unhook,
        *[lambda n=n: mode(n) for n in ("grad", "precision", "type", "deterministic")],  # type: ignore[misc]
        lambda: None,
    ]
    states = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    step, taken, refused = make(net, gradients="eager"), 0, 0
    xs = [torch.ones(4, 4), torch.ones(2, 4), torch.ones(4, 4).t(), torch.ones(4, 4).double()]
    xs += [torch.nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4, requires_grad=True)]
    try:
        for _ in range(120):
            for line in step._lines.values():
                line.unmatched = 0
            x = xs[0]
            with contextlib.suppress(RuntimeError):  # types that do not fit
                for _ in range(4):
                    step(x)
                    if step._hot:
                        break
            if not step._hot:
                unhook()
                torch.set_grad_enabled(False)
                torch.set_default_dtype(torch.float32)
                linear.weight, inner[0] = parameters[0], linear
                net.eval()
                step = make(net, gradients="eager")
                continue
            (hot, *_) = step._hot
            rng.choice(changes)()
            given = rng.choice([x, x, x, *xs])
            took = hot.match((given,), {}) is not None
            line = next((k for k, one in step._lines.items() if one is hot.line), None)
            hooked = bool(net._forward_hooks)
            epoch, (key, _) = step._epoch, step._key((given,), {})
            if took:
                assert key == line and epoch == step._epoch and not hooked
            taken, refused = taken + took, refused + (not took)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(states[0])
        torch.set_float32_matmul_precision(states[1])
    assert taken > 10 and refused > 20, (taken, refused)


def test_layouts_of_results_are_found_again() -> None:
    from ostinato.interop.torch.library import Torch

    lib: Any = Torch.__new__(Torch)
    base = torch.arange(60, dtype=torch.float32)
    whole = lib.storage(base).address
    for tensor in (
        base,
        base[7:],
        base.view(3, 20).t(),
        base.view(3, 20)[1:, 2:9:3],
        base[:1].expand(4),
        base[3],
        base[:0],
        base.view(torch.int64)[5:9],
        base.view(torch.uint8)[17:23],
    ):
        layout, span = lib.layout(tensor, whole), lib.span(tensor)
        found = lib.view(base, layout)
        assert found.dtype == tensor.dtype and found.stride() == tensor.stride()
        assert torch.equal(found, tensor) and lib.span(found) == span
        if tensor.numel():
            assert found.data_ptr() == tensor.data_ptr()
            assert span.nbytes == tensor.element_size() * (
                1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            )
    assert lib.layout(torch._neg_view(base), whole) is None
    for wrong in (
        ["float32", [61], [1], 0],
        ["float32", [4], [1], 2],
        ["float32", [4], [1], -4],
        ["float32", [4], [-1], 40],
        ["float64", [30], [1], 8],
        ["Tensor", [4], [1], 0],
        ["nothing", [4], [1], 0],
    ):
        with pytest.raises(ValueError, match=r"type|memory"):
            lib.view(base, wrong)


def test_private_numbers_that_a_forward_reads_are_described(make: Any) -> None:
    from ostinato.interop.reading.guards import Guards
    from ostinato.interop.reading.stored import Description

    class Scaled(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, by: float, calls: int) -> None:
            super().__init__()
            self._by, self._calls = by, calls

        def forward(self, x: Any) -> Any:
            return x * self._by

    def parts(*numbers: Any) -> Any:
        model = Scaled(*numbers)
        description = Description(make(model)._library)
        description.guards(Guards(model.forward, description.library))
        return description.parts

    assert parts(1.0, 0) == parts(1.0, 5) != parts(2.0, 0)


def test_enums_with_an_equality_of_their_own_are_text(make: Any) -> None:
    import enum

    from ostinato.interop.reading.stored import text_of
    from ostinato.interop.reading.trees import plain_token

    class Mode(enum.IntEnum):
        ONE, TWO = 1, 2

    library = make(torch.nn.Identity())._library
    one, two = [text_of(plain_token(mode), library) for mode in Mode]
    assert one != two and "Mode.ONE" in one


def test_settings_of_torch_are_text(make: Any) -> None:
    from ostinato.interop.reading.stored import text_of

    library = make(torch.nn.Identity())._library
    assert "BlasBackend" in text_of(library.modes(), library)


def test_modules_are_described_by_names_in_the_order_of_their_guards(make: Any) -> None:
    from types import SimpleNamespace

    from ostinato.interop.reading.guards import Guards
    from ostinato.interop.reading.stored import Description

    def describe(model: Any) -> Any:
        lib = make(model)._library
        guards = Guards(model.forward, lib)
        description = Description(lib)
        description.guards(guards)
        seen = guards.read()
        assert len(seen.arrays) == len(description.arrays) == len({*description.names})
        assert all(a is b for a, b in zip(seen.arrays, description.arrays, strict=True))
        return description

    def build() -> Any:
        model = Net()
        model.register_buffer("shift", torch.zeros(4))
        model.config = SimpleNamespace(rope=SimpleNamespace(theta=1e4), _attention="one")
        return model

    first = describe(build())
    assert "self.inner.0.weight" in first.names and "self.shift" in first.names
    assert describe(build()).parts == first.parts
    changes: list[Callable[[Any], Any]] = [
        lambda m: setattr(m, "scale", 2.0),
        lambda m: setattr(m.config.rope, "theta", 1e5),
        lambda m: setattr(m.config, "_attention", "other"),
        lambda m: m.inner[0].register_forward_hook(lambda *a: None),
        lambda m: m.eval(),
        lambda m: m.inner.append(torch.nn.Identity()),
        lambda m: setattr(m.inner, "0", torch.nn.Linear(4, 4).double()),
        lambda m: setattr(m, "forward", lambda x: x),
        lambda m: m.inner[0].requires_grad_(False),
        lambda m: setattr(m.inner[0], "weight", torch.nn.Parameter(torch.ones(4, 4).t())),
    ]
    for number, change in enumerate(changes):
        model = build()
        change(model)
        try:
            parts = describe(model).parts
        except AssertionError:
            parts = None  # a function of its own has no weights
        assert parts != first.parts, number


@pytest.mark.skipif(not recheck.compiled(), reason="the extension was not built")
def test_addresses_are_read_anew_and_as_torch_tells_them(make: Any) -> None:
    library = make(lambda x: x)._library
    assert library.reader is not None, "torch has the function, and it was not found"
    rng, linear = random.Random(0), torch.nn.Linear(4, 4)
    with torch.inference_mode():
        inferred = torch.ones(5)
    tensors = [linear.weight, linear.bias, torch.ones(3), torch.ones(6)[2:], inferred]

    def any_tensor() -> Any:
        return rng.choice(tensors[:4])

    def swap() -> None:
        one, other = any_tensor(), torch.ones(7)
        if isinstance(one, torch.nn.Parameter):
            other = torch.nn.Parameter(other)
        torch.utils.swap_tensors(one, other)

    def data() -> None:
        any_tensor().data = torch.ones(4)

    def storage() -> None:
        any_tensor().data.set_(torch.ones(9).untyped_storage())

    def resize() -> None:
        any_tensor().data.resize_(rng.choice([1, 1000]))

    def resize_storage() -> None:
        any_tensor().untyped_storage().resize_(rng.choice([4000, 8000]))

    def move() -> None:
        torch.__future__.set_swap_module_params_on_conversion(rng.random() < 0.5)
        linear.to(rng.choice([torch.float32, torch.float64]))

    held = [torch.empty(1)]  # what was let go must not come back at the same address
    agreed = [0, 0]
    try:
        for _ in range(300):
            checks = Checks(library)
            before = checks.addresses(tensors)
            assert before == [t.data_ptr() for t in tensors]
            match = checks.made(0, ()).match
            held += [t.detach() for t in tensors]
            rng.choice([swap, data, storage, resize, resize_storage, move, lambda: None])()
            same = before == [t.data_ptr() for t in tensors]
            assert (match((), {}) == []) == same
            agreed[same] += 1
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert min(agreed) > 40, agreed


@pytest.mark.skipif(not recheck.compiled(), reason="the extension was not built")
@pytest.mark.parametrize("further", [None, lambda: struct.pack("2Q", 8, 9)])
@pytest.mark.parametrize("reads", [False, True])
def test_a_call_in_c_tells_the_graph_where_tensors_lie(
    make: Any, reads: bool, further: Any
) -> None:
    library, x = make(lambda x: x)._library, torch.ones(5)
    lock, stream, noted, before = threading.RLock(), object(), [], []
    captured, turns = Hidden(), SimpleNamespace(last=stream)
    made = torch.empty(3), torch.empty(2, 2)
    captured.recipes, captured.give = (*map(library.recipe, made),), list

    def set_argument(node: int, argument: int, data: bytes) -> None:
        assert (node, argument) == (7, 0)
        noted.append(struct.unpack("32Q", data))

    def replay(name: str, its: object, change: Any) -> bool:
        assert (name, its) == ("key", stream)
        while before:
            before.pop()()
        return change(SimpleNamespace(set=set_argument)) is None

    checks = Checks(library)
    subject: Any = SimpleNamespace(options=GraphedOptions(), arguments=None)
    checks.arguments([("x", x)], subject)
    way = recheck._extension.Way(  # type: ignore[union-attr]
        *(checks.made(1, ()), lock.acquire, lock.release, weakref.ref(captured), turns, stream),
        *(library.maker(), library.address, library.reader if reads else None, 7),
        *(replay, "key", recheck.MISSED, [].append, b"", further),
    )
    rest = [0] * 29 if further is None else [8, 9] + [0] * 27

    def call(given: Any) -> Any:
        made = way.call((given,), {})
        assert [one.shape for one in made] == [(3,), (2, 2)]
        where = [given.data_ptr(), *[one.data_ptr() for one in made]]
        assert [*noted[-1]] == where + rest
        return made

    kept = [call(given) for given in (x, torch.ones(7)[2:], x)]
    before.append(lambda: kept.append(call(torch.ones(5))))  # a call inside of one
    kept.append(call(x))
    assert way.call((torch.ones(6),), {}) is recheck.MISSED and len(noted) == 5 == len(kept)
    with pytest.raises(TypeError, match="only a replay"):
        way(SimpleNamespace())


@pytest.mark.skipif(not recheck.compiled(), reason="the extension was not built")
@pytest.mark.parametrize("of", ["blas", "linalg"])
def test_a_library_that_is_set_again_is_read_again(make: Any, of: str) -> None:
    """The settings themselves take too long to be read by each call."""
    library = make(lambda x: x)._library
    checks = Checks(library)
    for held, name in library.names():
        checks.some_items(held, {name: held[name]})
    match = checks.made(0, ()).match
    assert match((), {}) == [] == match((), {})
    getattr(torch.backends.cuda, f"preferred_{of}_library")("default")
    assert match((), {}) is None


@pytest.mark.parametrize("period", [1, 2, 16, 17])
def test_a_key_that_was_given_up_hides_no_other_key_for_long(make: Any, period: int) -> None:
    held = {"scale": 3.0}
    step = make(lambda x: x * held["scale"] if held["scale"] == 2 else x.tolist())
    x = torch.ones(3)
    with torch.no_grad():
        for _ in range(100):
            assert step(x) == [1.0, 1.0, 1.0]  # no tensor, which no graph gives
        for call in range(1000):
            held["scale"] = 3.0 if call % period else 2.0
            found = step(x)
            assert found == [1.0, 1.0, 1.0] if call % period else torch.equal(found, x * 2)
    counts = step.statistics()
    assert counts.replays > 1000 // period // 4 and counts.calls == 1100, step.explain()
    step.close()
    held["scale"] = 3.0
    with pytest.raises(ClosedError):
        step(x)


class Hidden:
    """Something that weak references can be made of."""

    templates: Any = ()
    give: Any = None


def test_results_of_classes_whose_metaclass_does_more_are_made_by_them() -> None:
    from ostinato.interop.torch.trees import joiner

    made: list[Any] = []

    class Counting(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            made.append(cls)
            return super().__call__(*args, **kwargs)

    class Named(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            super().__setattr__(name, value)

    for meta, counted in ((Named, 0), (Counting, 3)):
        kind = meta("Output", (collections.OrderedDict,), {})
        flat: Any = lambda value: ([*value.values()], [*value])  # noqa: E731
        built: Any = lambda values, keys, kind=kind: kind(zip(keys, values, strict=True))  # noqa: E731
        torch.utils._pytree.register_pytree_node(kind, flat, built)
        try:
            join = joiner(kind(a=1, b=2))
            made.clear()
            assert [join([n, n + 1]) for n in range(3)] == [kind(a=n, b=n + 1) for n in range(3)]
            assert len(made) == 2 * counted
        finally:
            torch.utils._pytree._deregister_pytree_node(kind)


def test_results_of_transformers_are_made_without_their_constructor() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    from ostinato.interop.torch.trees import joiner

    like = outputs.CausalLMOutputWithPast(logits=torch.ones(2), hidden_states=None)
    join = joiner(like)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(like), "__post_init__", lambda self: pytest.fail("constructed"))
        assert join([3]).logits == 3 and vars(join([4])).keys() == vars(like).keys()


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_cuda")
def test_without_cuda_modules_and_functions_run_eagerly() -> None:
    from ostinato.interop.torch import graphed

    @graphed
    def double(x: Any) -> Any:
        return x * 2

    model = Net()
    step = graphed(model, store="never made", generators=[torch.Generator()])
    check(double, double.__wrapped__, *[torch.randn(2, 4) for _ in range(3)])
    check(step, model, *[torch.randn(2, 4) for _ in range(3)])
    model.register_forward_hook(lambda m, args, out: out + 1)
    check(step, model, torch.randn(2, 4))
    assert list(step.state_dict()) == list(model.state_dict()) and step.double() is step
    for one, calls in ((double, 3), (step, 4)):
        assert "torch has no CUDA device here" in one.explain()
        assert (one.statistics().eager, one.statistics().captures) == (calls, 0)
    double.close()
    with (
        graphed(model, strict=True) as strict,
        pytest.raises(EagerRunError, match="no CUDA device"),
    ):
        strict(torch.randn(2, 4).double())
    with torch.enable_grad():
        step(torch.randn(2, 4).double()).sum().backward()  # as the module itself
    assert model.inner[0].weight.grad is not None
    step.close()


@pytest.mark.parametrize("allocator", ["cudaMallocAsync", "pluggable"])
def test_with_another_allocator_than_its_own_torch_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch, allocator: str
) -> None:
    from ostinato.interop.torch import graphed

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)
    with graphed(lambda x: x * 2) as double:
        check(double, double.__wrapped__, *[torch.randn(2, 4) for _ in range(3)])
        (line,) = double.statistics().keys
        assert (line.eager, line.captures) == (3, 0)
        assert f"torch allocates with {allocator}" in double.explain()


def test_tensors_of_the_cpu_are_adopted(host_device: Device) -> None:
    stream = host_device.create_stream()
    tensor = torch.zeros(4, 4)
    ost.fill(stream, host_device.adopt_array(tensor), 3)
    ost.fill(stream, host_device.adopt_array(tensor[1]), 5)  # a part of the same memory
    half = host_device.adopt_array(torch.ones(3, dtype=torch.bfloat16))
    stream.synchronize()
    assert tensor.tolist() == [[3] * 4, [5] * 4, [3] * 4, [3] * 4]
    assert half.to_numpy(stream).tolist() == [0x3F80] * 3
    for wrong, said in (
        (torch.zeros(4, 4).t(), "strided"),
        (torch.zeros(4, requires_grad=True), "gradient"),
    ):
        with pytest.raises(InputError, match=said):
            host_device.adopt_array(wrong)


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("kept", "event.record()"),
        ("waited for", "event.record()"),
        ("external, made inside", "event.record()"),
        ("never recorded", "event.wait()"),
        ("fork", "side_waits = event.wait(side)"),
        ("let go", ""),
        ("external", ""),
        ("external, let go", ""),
        ("another thread's", ""),
        ("fork and join", ""),
    ],
)
def test_events_of_a_capture_that_no_replay_would_record(
    host_device: Device, monkeypatch: pytest.MonkeyPatch, way: str, why: str
) -> None:
    from ostinato.interop.torch.capturing import FollowedEvents

    recorded = host_device.create_event()
    main, side = SimpleNamespace(stream_id=1), SimpleNamespace(stream_id=2)

    class Event:
        """As torch's: without a handle before it is recorded, and nothing may refer to it weakly:
        torch does not clear such references when it frees the event."""

        __slots__ = ("cuda_event",)

        def __init__(self) -> None:
            self.cuda_event = 0

        def record(self, stream: object = None) -> None:
            self.cuda_event = recorded.handle

        def wait(self, stream: object = None) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    methods, event = (Event.record, Event.wait), Event()
    if way not in ("external, made inside", "never recorded"):
        event.record()

    def work(event: Event) -> None:
        if way == "never recorded":
            event.wait()
            return
        event.record()
        if way == "waited for":
            event.wait()
        if "fork" in way:
            side_waits = event.wait(side)
            assert side_waits is None
        if way == "fork and join":
            event.record(side)
            event.wait()

    graph, events = ost.Graph.create(host_device), FollowedEvents()
    if "external" in way:
        graph.add_event_record(recorded)
    with events.following():
        if way == "another thread's":
            thread = threading.Thread(target=work, args=(event,))
            thread.start()
            thread.join()
        else:
            work(Event() if "let go" in way or way == "fork and join" else event)
    missing = events.missing_in(graph)
    assert (Event.record, Event.wait) == methods
    assert bool(missing) is bool(why)
    if why:
        assert "test_graphed_torch_cpu.py" in missing and why in missing
    kept = [each for each in graph.keep if isinstance(each, Event)]
    assert len(kept) == (way in ("external", "external, let go"))


class _Opaque(torch.Tensor):  # type: ignore[misc]
    """A subclass that nobody may ask anything."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it was asked")


class _Outer(torch.Tensor):  # type: ignore[misc]
    """A subclass without memory of its own."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it was asked")


@pytest.mark.filterwarnings("error")
def test_whose_memory_is_whose(host_device: Device) -> None:
    from tests.interop.tape import OnCpu

    library = OnCpu(host_device)
    base = torch.ones(8)
    for array in (base[2:], base.view(2, 4).t(), base.as_subclass(_Opaque)):
        ((memory, keeper),) = library.memory(array)
        assert (memory.address, memory.nbytes) == (base.data_ptr(), 32)
        assert keeper.data_ptr() == base.data_ptr()
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(4)
    for array in (fake, _Outer(base), torch.empty(0), torch.empty(4, device="meta")):
        assert library.memory(array) == []
    weight = torch.nn.Parameter(torch.ones(4))
    with torch.enable_grad():
        (weight * 2).sum().backward()
    addresses = [memory.address for memory, _ in library.memory(weight)]
    assert addresses == [weight.data_ptr(), weight.grad.data_ptr()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_the_memory_of_a_sparse_tensor_is_that_of_its_parts(
    host_device: Device, layout: str
) -> None:
    from tests.interop.tape import OnCpu

    blocks = {"blocksize": (2, 2)} if layout.startswith("b") else {}
    one = torch.eye(4).to_sparse(layout=getattr(torch, f"sparse_{layout}"), **blocks)
    (*found,) = OnCpu(host_device).memory(one)
    assert len(found) == (2 if layout == "coo" else 3)
    values = one._values() if layout == "coo" else one.values()
    assert values.data_ptr() in [memory.address for memory, _ in found]


def test_streams_of_captures_serve_later_functions(
    host_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each would leave a workspace of cuBLAS.  Graphs may use it as long as they live."""
    from ostinato.interop.torch.capturing import Captures, Kept

    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)

    def stream_of(captures: Captures) -> int:
        theirs, ours = captures.beside()
        assert theirs == ours.handle
        return int(theirs)

    captures, other = (Captures(host_device, 0, ()) for _ in range(2))
    first, second = stream_of(captures), stream_of(other)
    assert stream_of(captures) == first != second
    graph = Kept()
    captures.owners.add(graph)
    del captures
    gc.collect()
    third = Captures(host_device, 0, ())
    assert stream_of(third) not in (first, second)
    del graph
    gc.collect()
    fourth = Captures(host_device, 0, ())
    assert stream_of(fourth) == first
    assert len({*map(stream_of, (other, third, fourth))}) == 3
